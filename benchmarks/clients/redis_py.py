"""redis-py: its asyncio Lock, or the two commands that a lock is made of."""

from __future__ import annotations

import uuid
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode

from aiodlock.redispy import Lock as DropIn

from .._orders import Order
from ._api import Lender, Pair
from ._pooled import Pooled
from ._scripts import COMPARE_AND_DELETE, sha


class OwnLock(Lender):
    """`Redis.lock(name, timeout=ttl)`: tries again every 0.1 s; or our drop-in for it."""

    def __init__(self, *, drop_in: bool = False, **pool: Any) -> None:
        self._lock_class = DropIn if drop_in else None
        self._pool = pool

    async def open(self, order: Order) -> None:
        self._redis: Redis | RedisCluster
        if len(order.ports) == 1:
            self._redis = Redis.from_url(order.url, **self._pool)
        else:
            nodes = [ClusterNode("127.0.0.1", port) for port in order.ports]
            self._redis = RedisCluster(startup_nodes=nodes)

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = self._redis.lock(name, timeout=ttl_s, lock_class=self._lock_class)
        return Pair(lock.acquire, lambda _: lock.release())

    async def aclose(self) -> None:
        await self._redis.aclose()


class Commands(Pooled):
    """SET NX PX, then a script that compares and deletes."""

    async def open(self, order: Order) -> None:
        await super().open(order)
        await self._redis.script_load(COMPARE_AND_DELETE)

    def pair(self, name: str, ttl_s: float) -> Pair:
        redis, digest, ttl_ms = self._redis, sha(COMPARE_AND_DELETE), int(ttl_s * 1000)

        async def acquire() -> str:
            token = uuid.uuid4().hex
            if not await redis.set(name, token, nx=True, px=ttl_ms):
                raise RuntimeError(f"{name} is held")
            return token

        async def release(token: str) -> None:
            if not await redis.evalsha(digest, 1, name, token):
                raise RuntimeError(f"{name} was lost")

        return Pair(acquire, release)
