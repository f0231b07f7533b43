"""python-redis-lock: it blocks, so it is used in threads."""

from __future__ import annotations

from redis import Redis
from redis_lock import Lock

from .._orders import Order
from ._api import Pair

ROOM = 10


class InThreads:
    """`Lock(redis, name, expire=ttl, auto_renewal=True)`, from as many threads as others tasks.

    Only where leases are to be held it extends them: a thread for each.
    """

    in_threads = True

    async def open(self, order: Order) -> None:
        # It waits in a blocking pop for as long as a ttl, redis-py for a reply for 5 s by default.
        self._redis = Redis.from_url(
            order.url, max_connections=order.tasks + ROOM, socket_timeout=None
        )
        self._renews = order.work in ("hold", "traced")

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = Lock(self._redis, name, expire=int(ttl_s), auto_renewal=self._renews)

        async def acquire() -> Lock:
            lock.acquire()
            return lock

        async def release(_: object) -> None:
            lock.release()

        return Pair(acquire, release)

    def key(self, name: str) -> str:
        return f"lock:{name}"

    def is_held(self, held: object) -> bool:
        return True

    async def aclose(self) -> None:
        self._redis.close()
