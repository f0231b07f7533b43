"""One part of the demo: a crew on one lock, one kill of a holder, what came of it."""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from aiodlock.cli import _history
from aiodlock.cli._demo_crew import Crew, crew
from aiodlock.cli._demo_job import TTL_S, Job
from aiodlock.cli._history import NS_PER_S, Interval

WORKERS = 4

_TICK_S = 0.05
_INTO_ITS_JOB_S = 0.3  # a holder this long inside is on a slow job, so the kill finds it there
_LINGER_S = 2 * TTL_S  # how long to look for a next holder after the kill
_GRACE_S = 10.0  # how much longer than planned to look for a holder to kill


@dataclass(frozen=True, slots=True)
class Part:
    """A lock and how long it is watched."""

    lock: str
    title: str
    seconds: float
    outlasting_first: int  # stays that must have outlasted the ttl before the kill


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was seen of a part: every figure of the demo comes from here."""

    part: Part
    history: list[Interval]
    ended_ns: int
    waiting: int  # workers that stood waiting at the end
    losses: int  # leases that their holders were told they had lost

    @property
    def victim(self) -> Interval | None:
        """The stay that the kill ended."""
        return next(iter(_history.killed(self.history)), None)

    @property
    def grants_after_kill(self) -> int:
        """How many entered after the kill."""
        victim = self.victim
        return len(_history.entries_after(self.history, victim.leave_ns)) if victim else 0

    @property
    def watched_after_kill(self) -> float:
        """Seconds from the kill to the end of the part."""
        victim = self.victim
        return (self.ended_ns - victim.leave_ns) / NS_PER_S if victim else 0.0


class Scene:
    """A part while it is played."""

    def __init__(self, part: Part, workers: Crew) -> None:
        self.part = part
        self.journal = workers.journal
        self.victim: int | None = None
        self._workers = workers
        self._killed_ns = 0
        self._began_ns = workers.begin()

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return _seconds_since(self._began_ns)

    @property
    def is_over(self) -> bool:
        """Its time is up, and the kill was made and answered, or has been waited for enough."""
        if self.victim is None:
            return self.seconds >= self.part.seconds + _GRACE_S
        went_on = self.journal.last_entry_ns > self._killed_ns
        lingered = _seconds_since(self._killed_ns) >= _LINGER_S
        return self.seconds >= self.part.seconds and (went_on or lingered)

    async def kill_if_due(self) -> bool:
        """Kill a holder in the middle of its job, once; whether that was now."""
        target = self._target()
        if target is None:
            return False
        self._killed_ns = await self._workers.kill(target)
        self.victim = target
        return True

    def _target(self) -> int | None:
        if self.victim is not None or not self._outlasted_enough():
            return None
        holder = self.journal.holder
        if holder is None or _seconds_since(holder.enter_ns) < _INTO_ITS_JOB_S:
            return None
        return holder.worker

    def _outlasted_enough(self) -> bool:
        outlasting = _history.longer_than(self.journal.ended, TTL_S)
        return len(outlasting) >= self.part.outlasting_first


class Watcher(Protocol):
    """Who looks on while a part is played."""

    def killed(self, scene: Scene) -> None:
        """The victim has just been killed."""

    def tick(self, scene: Scene) -> None:
        """A moment has passed."""


async def play(part: Part, url: str, prefix: str, watcher: Watcher) -> Outcome:
    """Let a crew work on the part's lock, kill a holder, and tell what was seen."""
    jobs = [Job(part.lock, url, prefix, number, WORKERS) for number in range(WORKERS)]
    async with crew(jobs) as workers:
        scene = Scene(part, workers)
        while not scene.is_over:
            await asyncio.sleep(_TICK_S)
            await workers.check()
            if await scene.kill_if_due():
                watcher.killed(scene)
            watcher.tick(scene)
        waiting = len(scene.journal.waiting)
        ended_ns = await workers.dismiss()
    return Outcome(part, scene.journal.ended, ended_ns, waiting, scene.journal.losses)


def _seconds_since(instant_ns: int) -> float:
    return (time.monotonic_ns() - instant_ns) / NS_PER_S
