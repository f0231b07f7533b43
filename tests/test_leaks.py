"""The checks that every test passes through, and the look into Redis: they see what is left."""

from __future__ import annotations

import asyncio
from collections import Counter

from redis.asyncio import Redis

from tests import leaks
from tests.keys import leftovers, ttls


async def idle() -> None:
    """A task that does not end by itself."""
    await asyncio.Event().wait()


async def test_tasks_left_are_counted_by_what_they_run() -> None:
    """The current task is not one of them; one that ends in time is forgiven."""
    before = leaks.tasks()
    staying = [asyncio.create_task(idle()) for _ in range(2)]
    ending = asyncio.create_task(asyncio.sleep(0.02))
    assert leaks.tasks() - before == Counter({"idle": 2, "sleep": 1})
    staying.pop().cancel()
    await ending
    assert await leaks.settled(before + Counter({"idle": 1})) == Counter()
    staying.pop().cancel()
    assert await leaks.settled(before) == Counter()


async def test_timers_are_those_set_and_not_cancelled() -> None:
    """A cancelled one stays in the loop for a while, and is none."""
    before = leaks.timers()
    timer = asyncio.get_running_loop().call_later(60, lambda: None)
    assert [left for left in leaks.timers() if left not in before] == [timer]
    timer.cancel()
    assert timer not in leaks.timers()


async def test_loop_errors_are_collected_and_the_handler_put_back() -> None:
    """What nobody awaits is told to the handler only."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    with leaks.loop_errors() as errors:
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
    assert len(errors) == 1
    assert "ZeroDivisionError" in errors[0]
    assert loop.get_exception_handler() is before


async def test_leftovers_are_all_keys_but_fences(redis: Redis) -> None:
    """Only under the prefix; tombstones when asked for."""
    await redis.set("aiodlock:{a}", "x", px=1000)
    await redis.set("aiodlock:{a}:fence", 1)
    await redis.set("other:{a}", "x")
    await redis.zadd("aiodlock:{a}:alive", {"!token": 1})
    await redis.zadd("aiodlock:{b}:alive", {"!token": 1, "token": 2})
    left = ["aiodlock:{a}", "aiodlock:{a}:alive", "aiodlock:{b}:alive"]
    assert await leftovers(redis) == left
    left.remove("aiodlock:{a}:alive")
    assert await leftovers(redis, ignoring_tombstones=True) == left
    assert await leftovers(redis, "other:") == ["other:{a}"]
    life = await ttls(redis)
    assert 0 < life["aiodlock:{a}"] <= 1000
    assert life["aiodlock:{a}:fence"] == -1
