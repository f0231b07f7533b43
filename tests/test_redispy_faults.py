"""The drop-in for redis-py's lock under cancels, lost replies, crowds and kills."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError
from redis.exceptions import TimeoutError as RedisTimeoutError

from aiodlock.redispy import Lock as OurLock
from aiodlock.redispy import _line
from aiodlock.testing import LockServer
from tests.crowd import KEY, Crowd, Order
from tests.proxy import ChaosProxy
from tests.steps import Mode, cancel_at_every_step
from tests.test_processes import overlaps_of_the_living
from tests.until import until

NAME = "reports"
FAR_S = 20.0
# What a request may take on a busy machine before it counts as unanswered.
PATIENT_S = 5.0

OURS = {"lock_class": OurLock, "timeout": FAR_S}
ACQUISITIONS = [{}, {"timeout": None}, {"token": "job"}]


def options(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the lock and of its acquire."""
    token = {"token": more["token"]} if "token" in more else {}
    return {**OURS, **{key: more[key] for key in more if key != "token"}}, token


# Cancels.


async def assert_free(redis: Redis) -> None:
    """At once: nothing waits for a time to be over."""
    assert await redis.get(NAME) is None


@pytest.mark.parametrize("more", ACQUISITIONS, ids=str)
async def test_acquire_cancelled_at_any_step_leaves_no_key(
    redis: Redis, more: dict[str, Any]
) -> None:
    """Also where the server has done it, and its reply is on the way."""
    await cancel_acquisitions(redis, *options(more), label=f"drop-in {more}")


async def test_acquire_of_redis_pys_lock_cancelled_at_some_step_leaves_a_key(
    redis: Redis,
) -> None:
    """Negative control: the check of the test above can fail."""
    of_lock, of_acquire = {**OURS, "lock_class": RedisPyLock}, {}
    with pytest.raises(AssertionError, match="a key is left"):
        await cancel_acquisitions(redis, of_lock, of_acquire, label="redis-py")


async def cancel_acquisitions(
    redis: Redis, of_lock: dict[str, Any], of_acquire: dict[str, Any], *, label: str
) -> None:
    """Whoever did not get the lock has not left it there."""
    got = False

    async def acquire() -> None:
        nonlocal got
        got = await redis.lock(NAME, **of_lock).acquire(**of_acquire)

    async def after() -> None:
        nonlocal got
        assert got or await is_free(redis), "a key is left"
        got = False
        await redis.delete(NAME)

    await cancel_at_every_step(acquire, after, label=label)


async def test_wait_cancelled_at_any_step_leaves_no_key_nor_place(redis: Redis) -> None:
    """The holder releases while it waits."""

    async def wait() -> None:
        holder, waiter = (redis.lock(NAME, sleep=0.02, **OURS) for _ in range(2))
        await holder.acquire()
        releasing = asyncio.create_task(release_soon(holder))
        try:
            await waiter.acquire()
            await waiter.release()
        finally:
            await asyncio.wait([releasing])

    async def after() -> None:
        await until(lambda: is_free(redis))
        lock = redis.lock(NAME, **OURS)
        assert await lock.acquire(blocking_timeout=0)
        await lock.release()

    await cancel_at_every_step(wait, after, label="drop-in waits")


async def release_soon(lock: RedisPyLock) -> None:
    """Once another has had the time to ask."""
    await asyncio.sleep(0.03)
    await lock.release()


async def is_free(redis: Redis) -> bool:
    return not await redis.exists(NAME)


async def test_release_cancelled_at_any_step_has_released(redis: Redis) -> None:
    """And the object knows it: a second release says that there is nothing."""
    lock = redis.lock(NAME, **OURS)

    async def after() -> None:
        await assert_free(redis)
        with pytest.raises(LockError, match="already unlocked"):
            await lock.release()

    async def before() -> None:
        lock.local.token = b"mine"
        await redis.set(NAME, "mine", px=60_000)

    await cancel_at_every_step(lock.release, after, before=before, label="drop-in releases")


async def test_block_cancelled_at_any_step_leaves_no_key(redis: Redis) -> None:
    """Whatever it was about to do."""

    async def block() -> None:
        async with redis.lock(NAME, **OURS):
            await asyncio.sleep(0)

    await cancel_at_every_step(block, lambda: assert_free(redis), label="drop-in block")


async def test_cancel_with_a_server_that_does_not_answer_comes_out_within_a_second(
    server: LockServer, proxy: ChaosProxy, redis: Redis
) -> None:
    """The clean-up goes on behind it."""
    async with Redis.from_url(proxy.url) as far:
        await far.ping()
        proxy.delay_replies(1.5, b"EVALSHA", n=1)
        await redis.ping()
        acquiring = asyncio.create_task(far.lock(NAME, **OURS).acquire())
        await until(lambda: redis.exists(NAME))
        began = time.monotonic()
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert acquiring.cancelled()
        assert time.monotonic() - began < 1.5
        await until(lambda: is_free(redis), limit_s=PATIENT_S)
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)


def _of_ours() -> list[str]:
    names = (task.get_name() for task in asyncio.all_tasks())
    return [name for name in names if name.startswith(("aiodlock", "aiodlock.redispy"))]
