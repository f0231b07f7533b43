"""redis-lock-py: one subscription for each waiter, one message to all."""

from __future__ import annotations

from redis_lock.asyncio import RedisLock

from ._api import Pair
from ._pooled import Pooled


class PubSubLock(Pooled):
    """`RedisLock(redis, name, expire_timeout=ttl)`; it waits for at most 60 s."""

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = RedisLock(self._redis, name, expire_timeout=int(ttl_s))

        async def acquire() -> None:
            if not await lock.acquire():
                raise TimeoutError

        return Pair(acquire, lambda _: lock.release())
