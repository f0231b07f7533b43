"""redis-lock-py: one subscription for each waiter, one message to all."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis_lock.asyncio import RedisLock

from .._orders import Order
from ._api import Lender, Pair


class PubSubLock(Lender):
    """`RedisLock(redis, name, expire_timeout=ttl)`; it waits for at most 60 s."""

    def __init__(self, **pool: Any) -> None:
        self._pool = pool

    async def open(self, order: Order) -> None:
        self._redis = Redis.from_url(order.url, **self._pool)

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = RedisLock(self._redis, name, expire_timeout=int(ttl_s))

        async def acquire() -> None:
            if not await lock.acquire():
                raise TimeoutError

        return Pair(acquire, lambda _: lock.release())

    async def aclose(self) -> None:
        await self._redis.aclose()
