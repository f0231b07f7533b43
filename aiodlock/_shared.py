"""What is common to the locks that several may hold: readers, a writer, a semaphore."""

from __future__ import annotations

from typing import NamedTuple

from . import _names
from ._lock import Lock, LockInfo, check_fencing_token, described
from ._names import Access


class Holder(NamedTuple):
    """One of several holders: who, for how many seconds more, and to do what.

    `access` is "reading", "writing" or "permit"; `fencing_token` is None over a quorum without
    fencing.
    """

    holder: str
    ttl_left: float
    fencing_token: int | None
    access: Access | None


class SharedInfo(LockInfo):
    """What stood under a name that several may hold, when the server was asked.

    `holders` are those, at most 1000, the first to end first; `holder`, `ttl_left` and
    `fencing_token` are the first one's.
    """

    holders: tuple[Holder, ...] = ()

    def __repr__(self) -> str:
        return super().__repr__() + "".join(f"\n  {holder}" for holder in self.holders)


class Shared(Lock):
    """A lock that several may hold.

    Args:
        like: A lock with its name and options.
        tail: What its owner tokens end with.
    """

    def __init__(self, like: Lock, tail: str) -> None:
        super().__init__(
            like._bound,
            like._name,
            like._keys,
            like._terms,
            wait_timeout=like._wait_timeout,
            retry=like._retry,
        )
        self._tail = tail

    async def inspect(self) -> SharedInfo:
        """Who holds, and how many wait.

        One script call (over a quorum to each node); changes nothing.

        Returns:
            Holders of any kind: those that another client's reader, writer or semaphore let in.

        Raises:
            ServerUnreachable: No answer within `request_timeout`.
            NotAllowedError, NameTakenError: The server forbids it; a lock that only one may hold.

        Cancellation: changes nothing.
        """
        standing = await self._inspect()
        info = described(SharedInfo, standing)
        info.holders = tuple(
            Holder(
                _names.holder(holding.value),
                holding.ttl_left_ms / 1000,
                holding.fencing_token,
                holding.access,
            )
            for holding in standing.holders
        )
        return info

    async def break_lock(self, *, fencing_token: int | None = None) -> bool:
        """Take it from its holders, for the next waiters: for operators.

        One script call, with one more for each holder. They learn of it at their next extension.

        Args:
            fencing_token: Break only this grant. Default: all that stand now, at most 1000.

        Returns:
            Whether such a grant stood, and is broken.

        Raises:
            ServerUnreachable: No answer within `request_timeout`: some may be broken.
            NotAllowedError, NameTakenError: The server forbids it; a lock that only one may hold.
            TypeError: fencing_token is not an int.

        Cancellation: some may be broken.
        """
        check_fencing_token(fencing_token)
        standing = await self._inspect()
        broken = [
            await self._break(holding.value)
            for holding in standing.holders
            if fencing_token in (None, holding.fencing_token)
        ]
        return any(broken)
