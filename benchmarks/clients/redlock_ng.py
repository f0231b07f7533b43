"""redlock-ng's AsyncRedlock."""

from __future__ import annotations

from redlock import AsyncRedlock

from .._orders import Order
from ._api import Lender, Pair


class RedlockNg(Lender):
    """`await redlock.acquire(name, ttl)`: tries again every 0.1 to 0.3 s, here for ever."""

    async def open(self, order: Order) -> None:
        self._redlock = AsyncRedlock(order.urls)

    def pair(self, name: str, ttl_s: float) -> Pair:
        ttl_ms = int(ttl_s * 1000)
        redlock = self._redlock
        return Pair(lambda: redlock.acquire(name, ttl_ms, blocking=True), redlock.release)

    async def aclose(self) -> None:
        for redis in self._redlock.client.instances:
            await redis.aclose()
