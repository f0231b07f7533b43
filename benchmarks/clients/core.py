"""coredis, a Redis client of its own, with its lock."""

from __future__ import annotations

import coredis
from coredis.patterns.lock import Lock

from .._orders import Order
from ._api import Lender, Pair

ROOM = 10


class Core(Lender):
    """`Lock(client, name, timeout=ttl)`: tries again every 0.1 s."""

    async def open(self, order: Order) -> None:
        self._client = coredis.Redis("127.0.0.1", order.port, max_connections=order.tasks + ROOM)
        await self._client.__aenter__()

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = Lock(self._client, name, timeout=ttl_s)
        return Pair(lock.acquire, lambda _: lock.release())

    async def aclose(self) -> None:
        await self._client.__aexit__(None, None, None)
