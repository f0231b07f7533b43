"""The three locks of the demo: two as they are often written by hand, then aiodlock's."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from redis.asyncio import Redis

from aiodlock import LockClient
from aiodlock._names import keys
from aiodlock.cli._demo_job import TTL_S, Job

Section = Callable[[], AbstractAsyncContextManager[int | None]]
"""Waits for the lock, gives the grant's fencing token where there is one, and releases."""


@asynccontextmanager
async def setnx(job: Job) -> AsyncIterator[Section]:
    """No expiry: the key of a holder that crashed stays for ever."""
    key = keys(job.prefix, job.lock).lock

    @asynccontextmanager
    async def section() -> AsyncIterator[None]:
        while not await redis.setnx(key, "locked"):
            await _pause()
        try:
            yield
        finally:
            await redis.delete(key)

    async with Redis.from_url(job.url) as redis:
        yield section


@asynccontextmanager
async def set_nx_px(job: Job) -> AsyncIterator[Section]:
    """An expiry, but the release does not ask whose key it is that it deletes."""
    key = keys(job.prefix, job.lock).lock

    @asynccontextmanager
    async def section() -> AsyncIterator[None]:
        while not await redis.set(key, "locked", nx=True, px=round(TTL_S * 1000)):
            await _pause()
        try:
            yield
        finally:
            await redis.delete(key)

    async with Redis.from_url(job.url) as redis:
        yield section


@asynccontextmanager
async def aiodlock(job: Job) -> AsyncIterator[Section]:
    """The same ttl; extended while the job lasts, released by its owner only."""
    label = f"worker-{job.worker + 1}"
    async with LockClient.from_url(job.url, prefix=job.prefix, label=label) as locks:
        lock = locks.lock(job.lock, ttl=TTL_S)

        @asynccontextmanager
        async def section() -> AsyncIterator[int]:
            async with lock as lease:
                yield lease.fencing_token

        yield section


LOCKS = {"setnx": setnx, "set_nx_px": set_nx_px, "aiodlock": aiodlock}


async def _pause() -> None:
    await asyncio.sleep(random.uniform(0.01, 0.02))
