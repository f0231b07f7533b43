"""What peers over redis-py's asyncio client have in common."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from .._orders import Order
from ._api import Lender


class Pooled(Lender):
    """One `Redis` for each server; *pool*: what its connection pool is made with."""

    def __init__(self, **pool: Any) -> None:
        self._pool = pool

    async def open(self, order: Order) -> None:
        self._servers = [Redis.from_url(url, **self._pool) for url in order.urls]

    @property
    def _redis(self) -> Redis:
        return self._servers[0]

    async def aclose(self) -> None:
        for redis in self._servers:
            await redis.aclose()
