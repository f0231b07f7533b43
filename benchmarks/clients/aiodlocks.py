"""aiodlock, as users write it."""

from __future__ import annotations

from typing import Any

from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode

from aiodlock import Lease, LockClient
from aiodlock._names import keys

from .._orders import Order
from ._api import Pair

PREFIX = "aiodlock:"


class ByHand:
    """`lease = await lock.acquire()`, then `await lease.release()`."""

    in_threads = False

    async def open(self, order: Order) -> None:
        self._cluster: RedisCluster | None = None
        if len(order.ports) == 1:
            self._locks = LockClient.from_url(order.url)
        else:
            nodes = [ClusterNode("127.0.0.1", port) for port in order.ports]
            self._cluster = RedisCluster(startup_nodes=nodes)
            self._locks = LockClient(self._cluster)

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = self._locks.lock(name, ttl=ttl_s)
        return Pair(lock.acquire, Lease.release)

    def key(self, name: str) -> str:
        return keys(PREFIX, name).lock

    def is_held(self, held: Any) -> bool:
        return bool(held.is_held)

    async def aclose(self) -> None:
        await self._locks.aclose()
        if self._cluster is not None:
            await self._cluster.aclose()


class Quorum(ByHand):
    """The same over independent servers, of which a majority decides."""

    def __init__(self, *, fencing: bool) -> None:
        self._fencing = fencing

    async def open(self, order: Order) -> None:
        self._cluster = None
        self._locks = LockClient.quorum(order.urls, fencing=self._fencing)


class Block(ByHand):
    """`async with lock`."""

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = self._locks.lock(name, ttl=ttl_s)
        return Pair(lock.__aenter__, lambda _lease: lock.__aexit__(None, None, None))
