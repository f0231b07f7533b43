"""The task that extends a lease until it is released or lost."""

from __future__ import annotations

import asyncio
import random
import weakref
from typing import Final

from . import _clock
from ._errors import LockError
from ._lease import Extension, Lease
from ._running import running_task
from ._store._api import NoAnswer, NotOurs, Store

_RETRY_FIRST_S: Final = 0.02
_RETRY_MAX_S: Final = 1.0
_RETRY_LEAST_S: Final = 0.005


class Watchdog:
    """Looks after one lease, which it holds weakly: a forgotten lease must not live for ever.

    A timer starts the task when the first extension is due, for most leases are released before.
    A second timer tells of the deadline, so that a server which says nothing cannot delay that.
    """

    def __init__(self, lease: Lease, store: Store, *, ttl: float, auto_extend: bool) -> None:
        self._lease = weakref.ref(lease)
        self._store = store
        self._ttl = ttl
        self._task_name = f"aiodlock watchdog {lease.name}"
        self._task: asyncio.Task[None] | None = None
        self._start: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        if auto_extend:
            pause = _clock.extension_delay(lease.remaining, random.random())
            self._start = self._loop.call_later(pause, self._begin)
        else:
            self._watch_deadline(lease)

    def stop(self) -> asyncio.Task[None] | None:
        """Extend no more; the task that is still to end, if there is one."""
        for timer in (self._start, self._end):
            if timer is not None:
                timer.cancel()
        task = self._task
        if task is None or task.done() or task is running_task() or self._loop.is_closed():
            return None
        task.cancel()
        return task

    def _begin(self) -> None:
        lease = self._lease()
        if lease is None:
            return
        self._watch_deadline(lease)
        if lease.wants_extension:
            self._task = self._loop.create_task(self._run(), name=self._task_name)

    def _watch_deadline(self, lease: Lease) -> None:
        """Until it is over; at once where the loop stood still that long."""
        if lease._notice_deadline():
            self._end = self._loop.call_later(lease.remaining, self._on_deadline)

    def _on_deadline(self) -> None:
        lease = self._lease()
        if lease is not None:
            self._watch_deadline(lease)

    async def _run(self) -> None:
        """Extend and sleep; ends with the lease, its loss, or the last extension allowed."""
        failures = 0
        while (lease := self._lease()) is not None:
            # After a suspend this wakes before the timer of the deadline does.
            lease._notice_deadline()
            if not lease.wants_extension:
                return
            extension = lease._begin_extension(self._ttl)
            within = (lease.deadline - _clock.now()) / 2
            del lease  # Only its holder keeps it alive while this waits.
            try:
                answer = await extension.send(self._store, within=within)
            except (NoAnswer, LockError):
                failures += 1
                pause = self._endangered(failures)
            else:
                failures = 0
                pause = self._extended(extension, answer)
            if pause is None:
                return
            await asyncio.sleep(pause)

    def _extended(self, extension: Extension, answer: float | NotOurs) -> float | None:
        """Seconds until the next extension; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        lease._end_extension(extension, answer)
        if not lease.wants_extension:
            return None
        return _clock.extension_delay(lease.deadline - _clock.now(), random.random())

    def _endangered(self, failures: int) -> float | None:
        """Seconds until the next try, which leaves time for more; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        lease._endanger()
        left = lease.deadline - _clock.now()
        pause = _clock.growing(failures, first_s=_RETRY_FIRST_S, most_s=_RETRY_MAX_S)
        return min(pause, max(_RETRY_LEAST_S, left / 4))
