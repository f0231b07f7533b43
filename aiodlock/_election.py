"""One leader out of many candidates, told when it is the leader no more."""

from __future__ import annotations

import types
from typing import NamedTuple

from ._errors import LostReason
from ._lease import Lease
from ._lock import Lock


class Leader(NamedTuple):
    """Who led when the server was asked.

    `holder` is `<label>:<client id>`; `number` is that of the term, None over a quorum without
    fencing, and where another library holds the lock.
    """

    holder: str
    number: int | None


class Election:
    """An office with at most one leader; candidates stand in one queue. Made by `LockClient`.

    `async with locks.election("scheduler") as term` waits until this task leads; leaving the block
    resigns, and the next candidate leads at once. It is the lock of that name, so it makes the
    server calls of a lock, raises what a lock does, and excludes a lock of the same name.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    @property
    def name(self) -> str:
        """What is led."""
        return self._lock.name

    async def leader(self) -> Leader | None:
        """Who leads now, also if it is this task; None: nobody.

        One script call (over a quorum to each node); changes nothing. It may be another by the time
        you read it.

        Raises:
            ServerUnreachable: No answer within `request_timeout`.
            NotAllowedError, NameTakenError: The server forbids it; not a lock.

        Cancellation: changes nothing.
        """
        info = await self._lock.inspect()
        return None if info.holder is None else Leader(info.holder, info.fencing_token)

    async def __aenter__(self) -> Term:
        return Term(await self._lock.__aenter__())

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        await self._lock.__aexit__(exc_type, error, traceback)

    def __repr__(self) -> str:
        return f"<Election {self.name!r}>"


class Term:
    """The time for which one candidate leads. Made by `Election`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def number(self) -> int:
        """The fencing token: it grows with every term, so storage can refuse an old leader.

        Raises:
            RuntimeError: The client is a quorum without fencing.
        """
        return self._lease.fencing_token

    @property
    def is_leading(self) -> bool:
        """Whether the term lasts, by the clock; no I/O."""
        return self._lease.is_held

    def check(self, min_left: float = 0.0) -> None:
        """Return if the term lasts for *min_left* seconds more; call it before what others see.

        `Lease.check`: no I/O.

        Args:
            min_left: Seconds, at least 0.

        Raises:
            LeaseLostError: It ended; or (TOO_LITTLE_TIME) may end before that.
            RuntimeError: This task resigned.
            TypeError, ValueError: min_left is not what is allowed.
        """
        self._lease.check(min_left)

    async def wait_ended(self) -> LostReason | None:
        """Why the term ended, as soon as it does; None when its leader resigned.

        No server calls. Cancellation: changes nothing.
        """
        return await self._lease.wait_lost()

    def __repr__(self) -> str:
        return f"<Term of {self._lease!r}>"
