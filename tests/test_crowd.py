"""Many waiters on one name: what they cost the server, in which order they go, what they leave."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import types
from typing import Any

from redis.asyncio import Redis

from aiodlock import LockClient
from aiodlock.testing import LockServer
from tests import leaks
from tests.by_hand import A, ByHand
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.until import until

CROWD = 100
TURNS = 6

CANCELLED = 50_000
BATCH = 1_000


async def test_hundred_waiters_of_one_client_go_in_order_for_two_calls_each(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """Over two connections; a turn costs the poll that queues and the release that hands over."""
    name = ByHand(redis)
    locks = make_client(f"{server.url}?client_name=crowd")
    order: list[int] = []
    calls: list[int] = []

    async def take_turns(number: int) -> None:
        lock = locks.lock("name")
        for _ in range(TURNS):
            async with lock:
                order.append(number)
                if len(order) % CROWD == 0:
                    calls.append(await evalsha_calls(redis))

    await name.granted(A)
    async with asyncio.TaskGroup() as group:
        for number in range(CROWD):
            group.create_task(take_turns(number))
        await until(lambda: are_queued(name, CROWD))
        await until(lambda: are_connected(redis, "crowd", 2))
        await name.release(A)
        await until(lambda: len(order) > CROWD, 30.0)
        assert await are_connected(redis, "crowd", 2)
    assert order == [*range(CROWD)] * TURNS
    # Not the first round, for which all were queued before; nor the last, after which none is.
    per_turn = (calls[-2] - calls[0]) / (CROWD * (TURNS - 2))
    print(f"\n{per_turn:.2f} EVALSHA per turn of {CROWD} waiters, 2 connections")
    assert per_turn <= 2.2
    assert await leftovers(redis) == []


async def test_waiters_that_are_cancelled_leave_nothing_however_many_there_were(
    make_client: MakeClient, redis: Redis
) -> None:
    """50,000: no place in the queue, no key, no task, no timer, no memory on either side."""
    name = ByHand(redis)
    locks = make_client()
    await name.granted(A, ttl_ms=3_600_000)

    async def come_and_go() -> None:
        waiting = [asyncio.create_task(locks.lock("name").acquire()) for _ in range(BATCH)]
        await until(lambda: are_queued(name, BATCH), 20.0)
        for waiter in waiting:
            waiter.cancel()
        await asyncio.wait(waiting)
        await until(lambda: are_queued(name, 0), 20.0)
        assert all(waiter.cancelled() for waiter in waiting)

    started = time.monotonic()
    await come_and_go()  # what is made once is made
    before = await left_behind(locks, redis)
    for _ in range(CANCELLED // BATCH - 1):
        await come_and_go()
    after = await left_behind(locks, redis)
    print(f"\n{CANCELLED} waiters came and went in {time.monotonic() - started:.1f} s")
    print(f"before {before}\nafter  {after}")
    # One entry of ours or the server's for each of them would be 5 MB; what they allow for is the
    # room that sets and buffers keep after a busy moment.
    for what, limit in {
        "keys": 0,
        "tasks": 0,
        "timers": 1,  # the one that a connection has for all its requests
        "objects": 500,
        "bytes of the client": 300_000,
        "bytes of the server": 300_000,
    }.items():
        assert after[what] - before[what] <= limit, what
    assert (await name.state()).alive == {}
    await name.release(A)
    assert await leftovers(redis) == []


async def left_behind(locks: LockClient, redis: Redis) -> dict[str, int]:
    """What there is now, where 50,000 of anything would show."""
    await until(lambda: not background_tasks(), 10.0)
    gc.collect()
    memory = await redis.info("memory")
    return {
        "keys": await redis.dbsize(),
        "tasks": sum(leaks.tasks().values()),
        "timers": len(leaks.timers()),
        "objects": len(gc.get_objects()),
        "bytes of the client": deep_size(locks),
        "bytes of the server": int(memory["used_memory"]),
    }


def background_tasks() -> list[str]:
    """Releases that have not ended yet."""
    return [task.get_name() for task in asyncio.all_tasks() if "giving up" in task.get_name()]


def deep_size(root: object) -> int:
    """Bytes of everything that *root* keeps alive, but for code and the loop."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    size = 0
    while todo:
        value = todo.pop()
        is_code = isinstance(value, type | types.ModuleType | types.FunctionType)
        if id(value) in seen or is_code or isinstance(value, asyncio.AbstractEventLoop):
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        todo.extend(gc.get_referents(value))
        if isinstance(value, dict):
            todo.extend(value)  # its text keys are no referents
    return size


def test_deep_size_sees_what_a_dictionary_keeps() -> None:
    """Negative control: ten thousand tokens forgotten in a dictionary of something's."""
    keeper = types.SimpleNamespace(tokens={})
    before = deep_size(keeper)
    keeper.tokens.update((f"{A}{n}", None) for n in range(10_000))
    assert deep_size(keeper) - before > 500_000


async def are_queued(name: ByHand, waiters: int) -> bool:
    """Whether so many wait now."""
    return int(await name.redis.zcard(name.keys.queue)) == waiters


async def evalsha_calls(redis: Redis) -> int:
    """How many script calls the server has done."""
    stats = await redis.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


async def are_connected(redis: Redis, client_name: str, expected: int) -> bool:
    """Whether so many connections carry that name."""
    names = [client["name"] for client in await redis.client_list()]
    return names.count(client_name) == expected
