"""Who holds a lock in a test: tasks that are told of their loss, and what the next one has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple, Self, cast

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, Lock, LockClient, _clock
from aiodlock._store._api import QueueStore
from aiodlock._store._wire import Script
from aiodlock._watchdog import Watchdog
from tests import leaks

KEY = "aiodlock:{n}"
# What one round trip may take on a busy machine.
ROUND_TRIP_S = 0.15


class Holder:
    """A task that works under a lock for as long as it may."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._entered: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._work())
        self.deadline = 0.0
        """The last deadline that its lease had, on the library's clock."""
        self.told_at = 0.0
        """When its body was cancelled, on that clock."""
        self.cancels = 0
        self.has_cleaned_up = False

    async def entered(self) -> Lease:
        async with asyncio.timeout(5):
            return await self._entered

    async def lost(self, limit_s: float = 5.0) -> LeaseLostError:
        """What came out of its block; fails if nothing does."""
        with pytest.raises(LeaseLostError) as error:
            await asyncio.wait_for(self.task, limit_s)
        return error.value

    async def _work(self) -> None:
        async with self._lock.acquire() as lease:
            self._entered.set_result(lease)
            try:
                while True:
                    if lease.is_held:
                        self.deadline = max(self.deadline, _clock.now() + lease.remaining)
                    await asyncio.sleep(0.004)
            except asyncio.CancelledError:
                self.told_at = _clock.now()
                self.cancels += 1
                await asyncio.sleep(0.002)
                self.has_cleaned_up = True
                raise

    @property
    def late_s(self) -> float:
        """How long after its deadline its body was told."""
        return self.told_at - self.deadline


@contextlib.asynccontextmanager
async def holding(lock: Lock) -> AsyncIterator[Holder]:
    """A holder inside its block; it is cancelled at the end if it is still there."""
    holder = Holder(lock)
    try:
        await holder.entered()
        yield holder
    finally:
        holder.task.cancel()
        await asyncio.wait({holder.task})


@contextlib.asynccontextmanager
async def extensions_seen(redis: Redis) -> AsyncIterator[list[float]]:
    """The instants (the server's clock) of every extension that the server does meanwhile."""
    digest = await script_digest(redis, "extend")
    seen: list[float] = []
    async with redis.monitor() as monitor:

        async def listen() -> None:
            async for command in monitor.listen():
                seen.extend([command["time"]] if digest in command["command"] else [])

        listening = asyncio.create_task(listen())
        try:
            yield seen
        finally:
            listening.cancel()
            await asyncio.wait({listening})


async def script_digest(redis: Redis, name: str) -> str:
    """How requests for one of our scripts can be told from others; the server knows it then."""
    return str(await redis.script_load(Script(name).text))


def hears(locks: LockClient) -> bool:
    """Whether messages reach the waiters of *locks*."""
    return locks._session is not None and cast(QueueStore, locks._session.store).hears


def watchdogs() -> list[str]:
    """The names of the watchdog tasks that run."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sorted(name for name in names if name.startswith("aiodlock watchdog"))


def watchdog_timers() -> list[asyncio.TimerHandle]:
    """The timers that belong to watchdogs."""
    return timers_of(Watchdog)


def timers_of(owner: type) -> list[asyncio.TimerHandle]:
    """The timers that call a method of an *owner*."""
    return [
        timer
        for timer in leaks.timers()
        if isinstance(getattr(getattr(timer, "_callback", None), "__self__", None), owner)
    ]


class NextHolder(NamedTuple):
    """What stood in the key at some instant: the next holder's, to be left alone."""

    value: object
    ends_at: float

    @classmethod
    async def of(cls, redis: Redis) -> Self:
        """What stands now."""
        value, asked_at = await redis.get(KEY), _clock.now()
        pttl = await redis.pttl(KEY)
        return cls(value, asked_at + pttl / 1000 if pttl >= 0 else 0.0)

    async def is_untouched(self, redis: Redis) -> bool:
        """Whether it stands still, with neither more nor less time than it had."""
        value, ends_at = await NextHolder.of(redis)
        return value == self.value and abs(ends_at - self.ends_at) < ROUND_TRIP_S
