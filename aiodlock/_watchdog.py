"""The tasks that extend a client's leases, each from when it is first due."""

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


class Watchdogs:
    """The leases of one client, each with a watchdog from the time when it is first to be extended.

    One timer wakes them all: most leases are released before that, and a timer for each, or a
    watchdog that has nothing to do, would cost a tenth of an acquisition. Leases are held weakly: a
    forgotten one must not live for ever. Bound: one entry for each lease that is not gone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, weakref.ref[Lease]] = {}  # By owner token, as all here.
        self._awake: dict[str, Watchdog] = {}
        self._steps: dict[str, int] = {}  # In which each is to begin, or to wake.
        self._resting: dict[int, dict[str, asyncio.Future[None] | None]] = {}  # The same, by step.
        self._timer: asyncio.TimerHandle | None = None
        self._wake_step = math.inf

    def watch(self, lease: Lease) -> None:
        """From now on look after *lease*."""
        token = lease.owner_token
        self._leases[token] = weakref.ref(lease)
        if lease.terms.auto_extend:
            left = lease.deadline - _clock.now()
            self._rest(token, _clock.extension_delay(left, random.random()), None)
        else:
            self._awake[token] = Watchdog(lease, self._store, self)

    def sleep(self, token: str, pause: float) -> asyncio.Future[None]:
        """For *pause* seconds, or a moment less: with those that are due at about the same time."""
        wake = self._loop.create_future()
        self._rest(token, pause, wake)
        return wake

    def leases(self) -> list[Lease]:
        """Those that are not gone; there is no other list of them."""
        leases = [lease() for lease in self._leases.values()]
        return [lease for lease in leases if lease is not None]

    def lease(self, token: str) -> Lease | None:
        """The one with that owner token, if it is not gone."""
        lease = self._leases.get(token)
        return None if lease is None else lease()

    def stop(self, token: str) -> asyncio.Task[None] | None:
        """Extend it no more; the task that is still to end, if there is one."""
        step = self._steps.pop(token, None)
        if step is not None:
            resting = self._resting[step]
            del resting[token]
            if not resting:
                del self._resting[step]
        watchdog = self._awake.get(token)
        return None if watchdog is None else watchdog.stop()

    def forget(self, token: str) -> None:
        """Nothing of it is left that we could remove."""
        self._leases.pop(token, None)
        self._awake.pop(token, None)

    def close(self) -> None:
        """No timer is left."""
        self._cancel_timer()

    def _rest(self, token: str, pause: float, wake: asyncio.Future[None] | None) -> None:
        step = self._steps[token] = _clock.step_at_end(self._loop.time(), pause)
        self._resting.setdefault(step, {})[token] = wake
        if step < self._wake_step:
            self._wake_at(step)

    def _wake_at(self, step: int) -> None:
        self._cancel_timer()
        self._wake_step = step
        self._timer = self._loop.call_at(step * _clock.STEP_S, self._wake)

    def _wake(self) -> None:
        self._wake_step = math.inf
        now = round(self._loop.time() / _clock.STEP_S)  # A timer may be a moment early.
        for step in sorted(step for step in self._resting if step <= now):
            for token, wake in self._resting.pop(step).items():
                del self._steps[token]
                if wake is None:
                    self._begin(token)
                elif not wake.done():
                    wake.set_result(None)
        if self._resting:
            self._wake_at(min(self._resting))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self, token: str) -> None:
        """Never raises: one that fails must not keep the others asleep."""
        lease = self._leases[token]()
        if lease is None:
            return
        try:
            watchdog = self._awake[token] = Watchdog(lease, self._store, self)
            watchdog.begin(lease)
        except Exception as error:
            message = f"the watchdog of {lease!r} did not begin"
            self._loop.call_exception_handler({"message": message, "exception": error})


class Watchdog:
    """Looks after one lease: a timer that tells of its deadline, and a task that extends it.

    The timer is its own, so that a server which says nothing cannot delay the news.
    """

    def __init__(self, lease: Lease, store: Store, watchdogs: Watchdogs) -> None:
        self._lease = weakref.ref(lease)
        self._token = lease.owner_token
        self._store = store
        self._watchdogs = watchdogs
        self._failures = 0  # In a row.
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._watch_deadline(lease)

    def begin(self, lease: Lease) -> None:
        """The first extension is due."""
        if lease.wants_extension:
            self._task = self._loop.create_task(
                self._run(lease.terms.ttl), name=f"aiodlock watchdog {lease.name}"
            )

    def stop(self) -> asyncio.Task[None] | None:
        """Extend no more; the task that is still to end, if there is one."""
        if self._end is not None:
            self._end.cancel()
        task = self._task
        if task is None or task.done() or task is running_task() or self._loop.is_closed():
            return None
        task.cancel()
        return task

    def _watch_deadline(self, lease: Lease) -> None:
        """Until it is over; at once where the loop stood still that long."""
        if lease._notice_deadline():
            self._end = self._loop.call_later(lease.remaining, self._on_deadline)

    def _on_deadline(self) -> None:
        lease = self._lease()
        if lease is not None:
            self._watch_deadline(lease)

    async def _run(self, ttl: float) -> None:
        """Extend and sleep; ends with the lease, its loss, or the last extension allowed."""
        while (pause := await self._extend(ttl)) is not None:
            await self._watchdogs.sleep(self._token, pause)

    async def _extend(self, ttl: float) -> float | None:
        """Seconds until the next extension, or the next try; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        # After a suspend this wakes before the timer of the deadline does.
        lease._notice_deadline()
        if not lease.wants_extension:
            return None
        extension = lease._begin_extension(ttl)
        within = (lease.deadline - _clock.now()) / 2
        del lease  # Only its holder keeps it alive while this waits.
        try:
            answer = await extension.send(self._store, within=within)
        except (NoAnswer, LockError):
            self._failures += 1
            return self._endangered()
        self._failures = 0
        return self._extended(extension, answer)

    def _extended(self, extension: Extension, answer: float | NotOurs) -> float | None:
        """Seconds until the next extension; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        lease._end_extension(extension, answer)
        if not lease.wants_extension:
            return None
        return _clock.extension_delay(lease.deadline - _clock.now(), random.random())

    def _endangered(self) -> float | None:
        """Seconds until the next try, which leaves time for more; None: there is to be none."""
        lease = self._lease()
        if lease is None:
            return None
        lease._endanger()
        left = lease.deadline - _clock.now()
        pause = _clock.growing(self._failures, first_s=_RETRY_FIRST_S, most_s=_RETRY_MAX_S)
        return min(pause, max(_RETRY_LEAST_S, left / 4))
