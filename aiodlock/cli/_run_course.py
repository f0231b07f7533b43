"""The course of `aiodlock run`: wait for the lock, run the command, watch the lease, release it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiodlock import (
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockError,
    LockTimeout,
    LostReason,
)
from aiodlock.cli._child import Child, running
from aiodlock.cli._connecting import ExitCode, failure_of, log
from aiodlock.cli._signals import Inbox

# The end of a lease, in which a command that is told to end can do so while it is still ours: a
# third of the ttl at most, which leaves the watchdog another third to try in again.
_GRACE_MAX_S: Final = 5.0
_GRACE_SHARE: Final = 1 / 3
# The end of that grace, in which SIGKILL has its effect.
_RESERVE_SHARE: Final = 0.1
# What a command gets to end in where the lease may be another's already.
_HASTE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """One `aiodlock run`, from its arguments to its exit code.

    Attributes:
        client: What *lock* was made by; it is closed at the end.
        lock: With `on_lost="raise"`, for it is not us who work under it.
        command: With its arguments.
        urls: Where the servers are, to say who did not answer.
        conflict_exit_code: For a lock that was not got in time.
    """

    client: LockClient
    lock: Lock
    command: Sequence[str]
    urls: Sequence[str]
    conflict_exit_code: int

    async def run(self) -> int:
        """The exit code.

        Raises:
            Failure: The command was not run.
        """
        with Inbox() as inbox:
            async with self.client:
                try:
                    lease = await self._lease(inbox)
                    return await self._run_under(lease, inbox)
                except _Interrupted as interrupted:
                    return interrupted.exit_code
                except LockTimeout as error:
                    log.warning("%s", error)
                    return self.conflict_exit_code
                except LeaseLostError as error:
                    log.error("%s; the command did not begin", error)
                    return ExitCode.LOST
                except LockError as error:
                    raise failure_of(error, self.urls) from None

    async def _lease(self, inbox: Inbox) -> Lease:
        """With all of its ttl before it."""
        log.info("waiting for %r", self.lock.name)
        began = time.monotonic()
        acquiring = asyncio.ensure_future(self.lock.acquire())
        with inbox.told_to(lambda _: acquiring.cancel()):
            try:
                lease = await acquiring
            except asyncio.CancelledError:
                raise _Interrupted(inbox) from None
        # One that came by hand-off has 2 to 6 s only.
        await lease.extend()
        waited = time.monotonic() - began
        told = (lease.name, waited, lease.fencing_token, lease.ttl)
        log.info("got %r after %.1f s, fencing token %d, ttl %g s", *told)
        return lease

    async def _run_under(self, lease: Lease, inbox: Inbox) -> int:
        status: int | None = None
        try:
            async with lease:
                if inbox.first is not None:
                    raise _Interrupted(inbox)
                told = os.environ | _told(lease)
                async with running(self.command, told, inbox, lambda: lease.is_held) as child:
                    status = await _status(child, lease)
        except LeaseLostError as error:
            if status is not None:
                log.error("%s; the command had ended with %d by then", error, status)
            return ExitCode.LOST
        if status is None:
            return ExitCode.LOST
        log.info("the command ended with %d, %r is released", status, lease.name)
        return status


class _Interrupted(Exception):
    """A signal came before there was a command to have it."""

    def __init__(self, inbox: Inbox) -> None:
        assert inbox.first is not None
        super().__init__(f"{inbox.first.name} before the command began")
        self.exit_code = 128 + inbox.first


def _told(lease: Lease) -> dict[str, str]:
    """What the command learns of the lease; of its owner token only the part for people."""
    return {
        "AIODLOCK_NAME": lease.name,
        "AIODLOCK_FENCING_TOKEN": str(lease.fencing_token),
        "AIODLOCK_HOLDER": lease.holder,
    }


async def _status(child: Child, lease: Lease) -> int | None:
    """That of *child*; None if it was ended, because the lease did not last as long."""
    grace = min(_GRACE_MAX_S, lease.ttl * _GRACE_SHARE)
    lost = asyncio.create_task(lease.wait_lost())
    try:
        # Once a ttl or so, and once more whenever an extension was late.
        while not lost.done() and lease.remaining > grace:
            await _either(child, lost, within=lease.remaining - grace)
            if child.ended.done():
                return child.ended.result()
        await _end_in_time(child, lease, lost, grace)
        return None
    finally:
        lost.cancel()


async def _end_in_time(
    child: Child, lease: Lease, lost: asyncio.Task[LostReason | None], grace: float
) -> None:
    """SIGTERM; then SIGKILL before the lease is over, or soon if it is another's already.

    SIGKILL also where the command has ended: it may have left some of its group behind.
    """
    left = max(0.0, lease.remaining - grace * _RESERVE_SHARE)
    if lost.done():
        left = min(_HASTE_S, grace)
    log.error("%s; the command gets SIGTERM, and SIGKILL in %.1f s", _loss(lease, lost), left)
    child.end()
    if lost.done():
        await asyncio.wait({child.ended}, timeout=left)
    else:  # If it turns out to be another's, SIGTERM was long enough ago.
        await _either(child, lost, within=left)
    child.kill()


async def _either(child: Child, lost: asyncio.Task[LostReason | None], *, within: float) -> None:
    both: set[asyncio.Future[Any]] = {child.ended, lost}
    await asyncio.wait(both, timeout=within, return_when=asyncio.FIRST_COMPLETED)


def _loss(lease: Lease, lost: asyncio.Task[LostReason | None]) -> str:
    reason = lost.result() if lost.done() else None
    if reason is not None:
        token = lease.fencing_token
        return str(LeaseLostError(name=lease.name, fencing_token=token, reason=reason))
    why = "no server extends it" if lease.wants_extension else "it was held for --max-hold"
    return f"the lease of {lease.name!r} is over in {lease.remaining:.1f} s, for {why}"
