"""redis-fifo-lock: a queue in Lua, a blocking pop for each waiter."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis_fifo_lock import FifoLock

from .._orders import Order
from ._api import Lender, Pair

MAX_HOLD_MS = 3_600_000


class Fifo(Lender):
    """`lease = await lock.acquire()`, then `await lock.release(lease)`."""

    def __init__(self, **pool: Any) -> None:
        self._pool = pool

    async def open(self, order: Order) -> None:
        self._redis = Redis.from_url(order.url, **self._pool)

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = FifoLock(self._redis, name, lease_ms=int(ttl_s * 1000), max_hold_ms=MAX_HOLD_MS)
        return Pair(lock.acquire, lock.release)

    def key(self, name: str) -> str:
        return f"{{{name}}}:h"

    def is_held(self, held: Any) -> bool:
        return not held.lost.is_set()

    async def aclose(self) -> None:
        await self._redis.aclose()
