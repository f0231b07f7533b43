"""The task that extends a lease until it is released or lost."""

from __future__ import annotations

import asyncio
import math
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
# Watchdogs that are due in one step of this length begin together.
_GRAIN_S: Final = 0.005


class Watchdogs:
    """Those of one client that have nothing to do yet, with one timer for all.

    Most leases are released before their first extension is due; a timer for each would cost a
    tenth of an acquisition. Bound: one watchdog for each lease.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._resting: dict[int, dict[Watchdog, None]] = {}  # By the step in which they are due.
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_in = math.inf

    def add(self, watchdog: Watchdog) -> None:
        """`begin` it when it is due, or a moment before."""
        step = watchdog.due_in
        self._resting.setdefault(step, {})[watchdog] = None
        if step < self._wakes_in:
            self._wake_in(step)

    def remove(self, watchdog: Watchdog) -> None:
        step = self._resting.get(watchdog.due_in)
        if step is not None and step.pop(watchdog, watchdog) is None and not step:
            del self._resting[watchdog.due_in]

    def close(self) -> None:
        """No timer is left."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_in(self, step: int) -> None:
        self.close()
        self._wakes_in = step
        self._timer = self._loop.call_at(step * _GRAIN_S, self._wake)

    def _wake(self) -> None:
        self._wakes_in = math.inf
        now = round(self._loop.time() / _GRAIN_S)
        for step in sorted(step for step in self._resting if step <= now):
            for watchdog in self._resting.pop(step):
                watchdog.begin()
        if self._resting:
            self._wake_in(min(self._resting))


class Watchdog:
    """Looks after one lease, which it holds weakly: a forgotten lease must not live for ever.

    The task begins when the first extension is due. A timer of its own tells of the deadline from
    then on, so that a server which says nothing cannot delay that.
    """

    def __init__(
        self, lease: Lease, store: Store, watchdogs: Watchdogs, *, ttl: float, auto_extend: bool
    ) -> None:
        self._lease = weakref.ref(lease)
        self._store = store
        self._watchdogs = watchdogs
        self._ttl = ttl
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.due_in = 0
        """The step of the loop's time in which the first extension is due."""
        if auto_extend:
            left = lease.deadline - _clock.now()
            due_at = self._loop.time() + _clock.extension_delay(left, random.random())
            self.due_in = int(due_at / _GRAIN_S)
            watchdogs.add(self)
        else:
            self._watch_deadline(lease)

    def stop(self) -> asyncio.Task[None] | None:
        """Extend no more; the task that is still to end, if there is one."""
        self._watchdogs.remove(self)
        if self._end is not None:
            self._end.cancel()
        task = self._task
        if task is None or task.done() or task is running_task() or self._loop.is_closed():
            return None
        task.cancel()
        return task

    def begin(self) -> None:
        """The first extension is due."""
        lease = self._lease()
        if lease is None:
            return
        self._watch_deadline(lease)
        if lease.wants_extension:
            self._task = self._loop.create_task(self._run(), name=f"aiodlock watchdog {lease.name}")

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
        pause = _clock.extension_delay(lease.deadline - _clock.now(), random.random())
        return _clock.in_step(pause, self._loop.time())

    def _endangered(self, failures: int) -> float | None:
        """Seconds until the next try, which leaves time for more; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        lease._endanger()
        left = lease.deadline - _clock.now()
        pause = _clock.growing(failures, first_s=_RETRY_FIRST_S, most_s=_RETRY_MAX_S)
        return min(pause, max(_RETRY_LEAST_S, left / 4))
