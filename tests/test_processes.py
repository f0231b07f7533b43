"""Many tasks in several processes on one name, with workers killed: who was inside when."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import pytest
from redis.asyncio import Redis

from aiodlock.cli._history import NS_PER_S, Interval, Overlap, killed, out_of_order, overlaps
from aiodlock.testing import LockServer
from tests.crowd import KEY, Crowd, Order
from tests.keys import leftovers
from tests.until import until

WORKERS, TASKS = 4, 10
TTL_S = 0.5
KILL_EVERY_S = 2.5
LASTS_S = 20.0
# Invariant 7: max(ttl, alive) + 2 poll intervals + a round trip; then what a busy machine adds.
WITHIN_S = 1.0 + 2 / 3
SLACK_S = 1.0


def overlaps_of_the_living(history: list[Interval]) -> list[Overlap]:
    """Two inside at once, neither of them killed there."""
    return [
        overlap
        for overlap in overlaps(history)
        if not (overlap.first.was_killed or overlap.second.was_killed)
    ]


def longest_gap_s(history: list[Interval], from_ns: int, to_ns: int) -> float:
    """The longest time without an entry between two instants; 0 if they are not in order."""
    entries = sorted(i.enter_ns for i in history if from_ns < i.enter_ns < to_ns)
    instants = [from_ns, *entries, to_ns]
    return max(b - a for a, b in itertools.pairwise(instants)) / NS_PER_S


async def test_forty_tasks_in_four_processes_never_overlap_while_workers_are_killed(
    server: LockServer, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 s, a kill each 2.5 s, every second one of the holder: one inside, numbers in order."""
    chosen = random.Random(7)
    order = Order(server.url, "aiodlock", tasks=TASKS, ttl=TTL_S)
    async with Crowd(order, workers=WORKERS, redis=redis) as crowd:
        began_ns = time.monotonic_ns()
        for count in range(1, round(LASTS_S / KILL_EVERY_S)):
            await asyncio.sleep(_seconds_to(began_ns, count * KILL_EVERY_S))
            if count % 2:
                await crowd.kill_a_holder()
            else:
                await crowd.kill(chosen.randrange(WORKERS))
        await asyncio.sleep(_seconds_to(began_ns, LASTS_S))
        ended_ns = time.monotonic_ns()
        assert crowd.crashed == 0
    history = [i for i in crowd.history if i.enter_ns < ended_ns]
    hits = [kill for kill in crowd.kills if kill.hit_holder]
    gaps = [
        longest_gap_s(history, kill.at_ns, kill.at_ns + round(KILL_EVERY_S * NS_PER_S))
        for kill in hits
    ]
    with capsys.disabled():
        print(
            f"\n{WORKERS} processes x {TASKS} tasks, {LASTS_S:.0f} s: {len(history)} grants, "
            f"{len(crowd.kills)} kills, {len(hits)} of a holder "
            f"({len(killed(history))} inside its section), "
            f"longest gap after one {max(gaps, default=0):.2f} s, "
            f"{len(overlaps(history))} overlaps, {crowd.losses} leases lost"
        )
    assert overlaps_of_the_living(history) == []
    assert out_of_order(history) == []
    assert len(hits) >= 3
    assert len(history) >= 1000
    assert max(gaps) <= WITHIN_S + SLACK_S
    # Every task had its turn, whatever died beside it.
    assert len({interval.worker for interval in history}) == WORKERS * TASKS
    # The dead leave nothing behind for longer than the queue's life.
    await until(lambda: _has_no_lock(redis), limit_s=WITHIN_S + SLACK_S)
    assert set(await leftovers(redis)) <= {f"{KEY}:queue", f"{KEY}:alive"}


@pytest.mark.parametrize(("lock", "slow_every"), [("check then set", 0), ("SET NX, DEL", 8)])
async def test_naive_lock_under_such_a_load_overlaps(
    server: LockServer,
    redis: Redis,
    capsys: pytest.CaptureFixture[str],
    lock: str,
    slow_every: int,
) -> None:
    """The checker sees what it is there to see: the negative control of the test above."""
    order = Order(server.url, lock, tasks=TASKS, ttl=TTL_S, slow_every=slow_every)
    async with Crowd(order, workers=2, redis=redis) as crowd:
        began = time.monotonic()
        await until(lambda: overlaps_of_the_living(crowd.history), limit_s=20)
        seconds = time.monotonic() - began
        assert crowd.crashed == 0
    found = overlaps_of_the_living(crowd.history)
    with capsys.disabled():
        print(f"\n{lock}: {len(crowd.history)} grants, {len(found)} overlaps in {seconds:.1f} s")
    assert len(found) > 0


async def _has_no_lock(redis: Redis) -> bool:
    return not await redis.exists(KEY)


def _seconds_to(began_ns: int, seconds: float) -> float:
    return seconds - (time.monotonic_ns() - began_ns) / NS_PER_S
