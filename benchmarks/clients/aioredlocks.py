"""aioredlock, over a client of its own time."""

from __future__ import annotations

from aioredlock import Aioredlock

from .._orders import Order
from ._api import Lender, Pair

TRIES = 1_000_000


class AioRedlock(Lender):
    """`await manager.lock(name, ttl)`: tries again every 0.1 to 0.3 s, here for ever."""

    async def open(self, order: Order) -> None:
        self._manager = Aioredlock(order.urls, retry_count=TRIES)

    def pair(self, name: str, ttl_s: float) -> Pair:
        return Pair(lambda: self._manager.lock(name, ttl_s), self._manager.unlock)

    async def aclose(self) -> None:
        await self._manager.destroy()
