"""Readers, writers and permits in several processes that are killed: who was inside when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from redis.asyncio import Redis

from aiodlock.cli._history import NS_PER_S, Interval
from aiodlock.testing import LockServer
from tests.crowd import Crowd, Order, permits_of
from tests.until import until

pytestmark = pytest.mark.deep

WORKERS, TASKS = 3, 6
TTL_S = 0.5
KILL_EVERY_S = 1.5
LASTS_S = 8.0


def crowds(history: Iterable[Interval]) -> Iterator[list[Interval]]:
    """After each entry, all who were inside, but for those who were killed there."""
    inside: list[Interval] = []
    for interval in sorted(history, key=lambda interval: interval.enter_ns):
        if not interval.was_killed:
            inside = [i for i in inside if i.leave_ns > interval.enter_ns] + [interval]
            yield inside


def number_of(interval: Interval) -> int:
    """Its process."""
    return interval.worker // 1000


def writer_with_another(inside: list[Interval]) -> bool:
    """Whether one is not alone."""
    return len(inside) > 1 and any(number_of(interval) == 0 for interval in inside)


def too_many(inside: list[Interval]) -> bool:
    """Whether there are more than any of them bears."""
    return len(inside) > min(permits_of(number_of(interval)) for interval in inside)


def unordered_writers(history: list[Interval]) -> list[tuple[Interval, Interval]]:
    """A writer beside one that left before it entered, with tokens that do not grow."""
    left = sorted(history, key=lambda interval: interval.leave_ns)
    return [
        (earlier, writer)
        for writer in history
        if number_of(writer) == 0
        for earlier in left
        if earlier.leave_ns < writer.enter_ns
        and (earlier.fencing_token or 0) >= (writer.fencing_token or 0)
    ]


@pytest.mark.parametrize(
    ("lock", "is_wrong", "together"),
    [("readers, writer", writer_with_another, 4), ("semaphore", too_many, 3)],
)
async def test_processes_that_are_killed_keep_the_rule_of_entry(
    server: LockServer,
    redis: Redis,
    capsys: pytest.CaptureFixture[str],
    lock: str,
    is_wrong: Callable[[list[Interval]], bool],
    together: int,
) -> None:
    """8 s, a kill each 1.5 s; and as many are inside at once as may be."""
    chosen = random.Random(7)
    order = Order(server.url, lock, tasks=TASKS, ttl=TTL_S, work_s=0.004)
    async with Crowd(order, workers=WORKERS, redis=redis) as crowd:
        began_ns = time.monotonic_ns()
        for count in range(1, round(LASTS_S / KILL_EVERY_S)):
            await asyncio.sleep(count * KILL_EVERY_S - (time.monotonic_ns() - began_ns) / NS_PER_S)
            if count % 2:
                await crowd.kill_a_holder()
            else:
                await crowd.kill(chosen.randrange(WORKERS))
        await asyncio.sleep(LASTS_S - (time.monotonic_ns() - began_ns) / NS_PER_S)
        assert crowd.crashed == 0
    seen = list(crowds(crowd.history))
    largest = max(map(len, seen))
    with capsys.disabled():
        print(
            f"\n{lock}: {WORKERS} processes x {TASKS} tasks, {LASTS_S:.0f} s: {len(seen)} grants, "
            f"{len(crowd.kills)} kills, at most {largest} inside, {crowd.losses} leases lost"
        )
    assert [inside for inside in seen if is_wrong(inside)] == []
    assert largest >= together
    assert len(seen) > 300
    assert {number_of(interval) for interval in crowd.history} == set(range(WORKERS))
    if lock != "semaphore":
        assert unordered_writers(crowd.history) == []


@pytest.mark.parametrize("is_wrong", [writer_with_another, too_many])
async def test_checker_sees_a_naive_lock_let_too_many_in(
    server: LockServer, redis: Redis, is_wrong: Callable[[list[Interval]], bool]
) -> None:
    """The negative control: many look whether the key is there, then set it."""
    order = Order(server.url, "SET NX, DEL", tasks=8, ttl=0.1, work_s=0.05, slow_every=2)
    async with Crowd(order, workers=2, redis=redis) as crowd:
        await until(lambda: any(map(is_wrong, crowds(crowd.history))), limit_s=30)
        assert crowd.crashed == 0


def test_checker_of_the_order_sees_a_writer_with_a_smaller_token() -> None:
    """A reader that left before it entered has a larger one."""
    reader = Interval(1000, 0, 10, fencing_token=7)
    assert unordered_writers([reader, Interval(0, 20, 30, fencing_token=7)]) != []
    assert unordered_writers([reader, Interval(0, 20, 30, fencing_token=8)]) == []
