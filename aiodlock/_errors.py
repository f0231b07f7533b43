"""Every error that aiodlock raises."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Literal, Self


class LostReason(enum.Enum):
    """Why a lease stopped being ours before it was released."""

    EXPIRED = "its time was over and nothing extended it"
    STOLEN = "something else stands in its key"
    DELETED = "its key was deleted before its time was over"
    UNREACHABLE = "its deadline passed while no server answered an extension"
    LOOP_STALLED = "the event loop stood still until its deadline had passed"
    MAX_HOLD = "it was held for max_hold seconds"
    CLOSED = "its client was closed, or this is a forked child"
    TOO_LITTLE_TIME = "held, but not for as long as check() asked"


class LockError(Exception):
    """What every error of a lock is; `name` is the lock's name."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        """Process pools pickle errors; what is not pickled breaks the pool."""
        return (type(self)._rebuilt, (self.args, self.__dict__))

    @classmethod
    def _rebuilt(cls, args: tuple[Any, ...], attributes: dict[str, Any]) -> Self:
        error = cls.__new__(cls, *args)
        error.args = args
        error.__dict__.update(attributes)
        return error


class LockTimeout(LockError, TimeoutError):
    """Another holds the lock, and it was not got in time.

    `holder` (`<label>:<client id>`, or the text in the key where another library wrote it),
    `ttl_left` (seconds; None for a key without TTL) and `waiters` (this one too, if it queued) are
    what the last answer said.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str,
        holder: str | None,
        ttl_left: float | None,
        waiters: int,
    ) -> None:
        super().__init__(message, name=name)
        self.holder = holder
        self.ttl_left = ttl_left
        self.waiters = waiters


class ServerUnreachable(LockError, ConnectionError):
    """The server gave no usable answer; `__cause__` is what was seen last."""


class QuorumError(ServerUnreachable):
    """The nodes of a quorum did not decide, or did not answer.

    `outcome` is "unreachable" where too few answered for a majority, else "undecided": with those
    who answered, the silent ones could make it ours or another's. `nodes` is what each node said,
    by its address.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str,
        outcome: Literal["unreachable", "undecided"],
        nodes: Mapping[str, str],
    ) -> None:
        super().__init__(message, name=name)
        self.outcome = outcome
        self.nodes = dict(nodes)


class NotAllowedError(LockError):
    """The server forbids what a lock needs; the message names what is missing."""


class NameTakenError(LockError):
    """The lock's key holds something that is not a lock."""


class LeaseLostError(LockError):
    """The lease is not ours any more (or, TOO_LITTLE_TIME, not for long enough).

    `fencing_token` is None over a quorum without fencing.
    """

    def __init__(self, *, name: str, fencing_token: int | None, reason: LostReason) -> None:
        state = "" if reason is LostReason.TOO_LITTLE_TIME else "lost: "
        which = "" if fencing_token is None else f" (fencing token {fencing_token})"
        super().__init__(f"the lease of {name!r}{which} is {state}{reason.value}", name=name)
        self.fencing_token = fencing_token
        self.reason = reason
