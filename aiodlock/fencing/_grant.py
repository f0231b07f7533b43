"""Whose turn it is, as storage is told it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from aiodlock import LockError

_NAME_BYTES_MAX: Final = 512
_TOKEN_MAX: Final = 2**63 - 1  # what a BIGINT holds


class Fenced(Protocol):
    """A `Lease`, or a `Grant` that stands for one."""

    @property
    def name(self) -> str: ...

    @property
    def fencing_token(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease's name with its fencing token, for code that has no lease: behind a queue or an API.

    Args:
        name: The lock's name.
        fencing_token: The lease's, 1 to 2**63 - 1.

    Raises:
        TypeError, ValueError: An argument is not what is allowed.
    """

    name: str
    fencing_token: int

    def __post_init__(self) -> None:
        checked_name(self.name)
        _check_token(self.fencing_token)


class StaleFenceError(LockError):
    """The fencing token does not stand in the storage, which therefore refused the section.

    `stored_token` says what stands there: a larger one (a newer section has claimed), the same one
    (a claim that was committed before), a smaller one or None (this section never claimed, or its
    claim was rolled back).
    """

    def __init__(self, *, name: str, fencing_token: int, stored_token: int | None) -> None:
        told = _told(name, fencing_token, stored_token)
        super().__init__(told, name=name)
        self.fencing_token = fencing_token
        self.stored_token = stored_token


def grant_of(lease: Fenced) -> Grant:
    """What storage needs of *lease*, validated."""
    try:
        return Grant(lease.name, lease.fencing_token)
    except AttributeError:
        raise TypeError(f"lease must be a Lease or a Grant; got {lease!r}") from None


def checked_name(name: str, what: str = "name") -> str:
    """*name*, if it is one."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str; got {name!r}")
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= _NAME_BYTES_MAX:
        raise ValueError(f"{what} must be 1 to {_NAME_BYTES_MAX} UTF-8 bytes; got {name!r}")
    return name


def _check_token(token: int) -> None:
    if type(token) is not int:  # a bool is none
        raise TypeError(f"fencing_token must be an int; got {token!r}")
    if not 1 <= token <= _TOKEN_MAX:
        raise ValueError(f"fencing_token must be from 1 to 2**63 - 1; got {token!r}")


def _told(name: str, token: int, stored: int | None) -> str:
    if stored is None:
        return f"{name!r} was never claimed here: claim with fencing token {token} first"
    if stored == token:
        return f"{name!r} was claimed with fencing token {token} before: a section claims once"
    if stored < token:
        return f"{name!r} is not claimed with fencing token {token}, but {stored}: claim first"
    return f"fencing token {token} of {name!r} is stale: {stored} has claimed"
