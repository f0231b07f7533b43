"""pottery's AIORedlock, on one server."""

from __future__ import annotations

from typing import Any

from pottery import AIORedlock
from redis.asyncio import Redis

from .._orders import Order
from ._api import Lender, Pair


class Pottery(Lender):
    """Tries again after up to 0.2 s."""

    def __init__(self, **pool: Any) -> None:
        self._pool = pool

    async def open(self, order: Order) -> None:
        self._redis = Redis.from_url(order.url, **self._pool)

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = AIORedlock(key=name, masters={self._redis}, auto_release_time=ttl_s)
        return Pair(lock.acquire, lambda _: lock.release())

    def key(self, name: str) -> str:
        return f"redlock:{name}"

    async def aclose(self) -> None:
        await self._redis.aclose()
