"""Several names at once: all of them, or none."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from . import _clock
from ._body import Body
from ._errors import LeaseLostError, LockError, LostReason
from ._lease import Lease
from ._lock import Lock, newest_entry
from ._running import may_await
from ._store._api import NoAnswer

# Where others have used the time up, the next one is still asked once, as a wait ends with a try.
_LAST_TRY_S: Final = 0.001


class AllLocks:
    """Names with options, to be entered together; shared by as many tasks as you like.

    Made by `LockClient.all`. `async with locks.all("a", "b") as leases` acquires one after
    another, always in the order of the names' UTF-8 bytes: whoever keeps to it, in whichever
    program, cannot be in a deadlock with another who does.

    Entering makes the server calls of `Lock.acquire`, and raises what it does, for the name that
    was not got; none is held then. `LeaseLostError` if one is lost while the next is waited for.
    Leaving releases all at once, and raises as a lock's block does, `LeaseLostError` for the first
    name that was lost, with the others in its notes.

    Cancellation: what was got is released, and waited for, 1 s at most.
    """

    def __init__(
        self, locks: Sequence[Lock], *, wait_timeout: float | None, tells_body: bool
    ) -> None:
        self._locks = sorted(locks, key=lambda lock: lock.name.encode())
        self._wait_timeout = wait_timeout
        self._tells_body = tells_body
        self._entries: list[tuple[asyncio.Task[Any] | None, AllLeases]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """What is locked, each once, in the order of acquiring."""
        return tuple(lock.name for lock in self._locks)

    async def __aenter__(self) -> AllLeases:
        leases = AllLeases(_AllBody(tells=self._tells_body))
        wait_timeout = self._wait_timeout
        ends_at = None if not wait_timeout else _clock.now() + wait_timeout
        try:
            for lock in self._locks:
                if ends_at is not None:
                    wait_timeout = max(_LAST_TRY_S, ends_at - _clock.now())
                leases._add(await lock.acquire(wait_timeout=wait_timeout))
            leases.check()
        except BaseException as error:
            await leases._give_back(error)
            raise
        leases._body.is_entered = True
        self._entries.append((asyncio.current_task(), leases))
        return leases

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        await newest_entry(self._entries, self.names, "async with locks.all(...)")._leave(error)

    def __repr__(self) -> str:
        return f"<AllLocks {', '.join(map(repr, self.names))}>"


class _AllBody(Body):
    """One block of several leases: whichever is lost, its task is cancelled once.

    Args:
        tells: Whether to cancel it inside the block, too; while it waits for the next lease it is.
    """

    def __init__(self, *, tells: bool) -> None:
        super().__init__()
        self.is_entered = False
        self._tells = tells

    def cancel(self) -> None:
        if self._may_tell():
            super().cancel()

    def _may_tell(self) -> bool:
        return self._tells or not self.is_entered


class AllLeases(Mapping[str, Lease]):
    """The leases of several names, by name, in the order of acquiring. Made by `AllLocks`.

    Losing one is losing all.
    """

    def __init__(self, body: _AllBody) -> None:
        self._body = body
        self._leases: dict[str, Lease] = {}

    def __getitem__(self, name: str) -> Lease:
        return self._leases[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The fencing token of each, by name.

        Raises:
            RuntimeError: The client is a quorum without fencing.
        """
        return {name: lease.fencing_token for name, lease in self._leases.items()}

    @property
    def is_held(self) -> bool:
        """Whether all may still be believed in, by the clock; no I/O."""
        return all(lease.is_held for lease in self._leases.values())

    def check(self, min_left: float = 0.0) -> None:
        """Return if all are held for *min_left* seconds more: `Lease.check` of each; no I/O.

        Args:
            min_left: Seconds, at least 0.

        Raises:
            LeaseLostError: Of the first that is lost, or held too shortly.
            RuntimeError: One was released.
            TypeError, ValueError: min_left is not what is allowed.
        """
        for lease in self._leases.values():
            lease.check(min_left)

    async def extend(self, ttl: float | None = None) -> float:
        """Make the time left of each at least *ttl*: `Lease.extend`, one after another.

        Args:
            ttl: Seconds, at least 0.01. Default: the ttl that they were made with.

        Returns:
            Seconds for which all may still be relied on, counted from before the calls.

        Raises:
            LeaseLostError, ServerUnreachable, NotAllowedError, RuntimeError, TypeError, ValueError:
                As for a lease; the others may be extended or not.

        Cancellation: as for a lease.
        """
        started = _clock.now()
        for lease in self._leases.values():
            await lease.extend(ttl)
        return min(lease.deadline for lease in self._leases.values()) - started

    async def wait_lost(self) -> LostReason | None:
        """Why one was lost, as soon as the first is; None when one was released.

        No server calls. Cancellation: changes nothing.
        """
        waits = [asyncio.ensure_future(lease.wait_lost()) for lease in self._leases.values()]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return next((reason for wait in done if (reason := wait.result())), None)
        finally:
            for wait in waits:
                wait.cancel()

    def __repr__(self) -> str:
        return f"<AllLeases {list(self._leases.values())!r}>"

    # From here on not for users: what `AllLocks` does with it.

    def _add(self, lease: Lease) -> None:
        lease._enter(self._body)
        self._leases[lease.name] = lease

    async def _give_back(self, error: BaseException) -> None:
        """Not all were got: release the others as a single lock does that was not got."""
        leases = list(self._leases.values())
        if not leases or not may_await(error):
            for lease in leases:
                lease._leave_without_awaiting()
            return
        is_our_cancel = await self._body.leave(error)
        self._leave_blocks()
        releasing = self._begin_releases(Lease._release)
        if isinstance(error, asyncio.CancelledError) and not is_our_cancel:
            await self._outlast(releasing)
        for lease in leases:
            if is_our_cancel and lease._validity.reason is not None:
                raise lease._lost_error()
            lease._note_loss(error)

    async def _leave(self, error: BaseException | None) -> None:
        """The end of the block: what `Lease.__aexit__` does, for all of them at once."""
        leases = list(self._leases.values())
        for lease in leases:
            lease._notice_deadline(tell_body=False)
        if not may_await(error):
            for lease in leases:
                lease._leave_without_awaiting()
            return
        is_our_cancel = await self._body.leave(error)
        releasing = self._begin_releases(_let_go)
        try:
            if releasing:
                await asyncio.wait(releasing.values())
        except asyncio.CancelledError as cancelled:
            await self._outlast(releasing)
            if error is None or is_our_cancel or isinstance(error, asyncio.CancelledError):
                for lease in leases:
                    lease._note_loss(cancelled)
                raise
            self._body.cancel_again(cancelled)
            error.add_note(f"aiodlock: cancelled while {list(self)!r} were released")
        finally:
            self._leave_blocks()
        failures = {name: task.result() for name, task in releasing.items() if task.done()}
        self._conclude(error, failures, is_our_cancel=is_our_cancel)

    def _conclude(
        self,
        error: BaseException | None,
        failures: Mapping[str, BaseException | None],
        *,
        is_our_cancel: bool,
    ) -> None:
        # The lost ones last, for the first of them raises; it has the others in its notes.
        leases = sorted(self._leases.values(), key=lambda lease: lease._validity.reason is not None)
        for number, lease in enumerate(leases, start=1):
            try:
                lease._conclude(error, failures.get(lease.name), is_our_cancel=is_our_cancel)
            except LeaseLostError as first:
                for other in leases[number:]:
                    first.add_note(f"aiodlock: {other._lost_error()}")
                raise

    def _begin_releases(
        self, release: Callable[[Lease], Coroutine[Any, Any, Any]]
    ) -> dict[str, asyncio.Task[Any]]:
        """Each in a task of its own, which goes on if the caller is cancelled."""
        releasing: dict[str, asyncio.Task[Any]] = {}
        for name, lease in self._leases.items():
            if not lease.is_gone:
                lease._retire()  # Now: nobody is to believe in it until the task begins.
                releasing[name] = lease._background.start(release(lease), "releasing", name)
        return releasing

    async def _outlast(self, releasing: dict[str, asyncio.Task[Any]]) -> None:
        """A cancelled caller waits for them, but not for long."""
        if releasing:
            background = self[next(iter(releasing))]._background
            await background.finish(asyncio.wait(releasing.values()), f"releasing {list(self)!r}")

    def _leave_blocks(self) -> None:
        for lease in self._leases.values():
            lease._leave_block()


async def _let_go(lease: Lease) -> BaseException | None:
    """Why it could not be released, if it could not."""
    try:
        lease._judge(await lease._release())
    except (NoAnswer, LockError) as problem:
        return problem
    return None
