"""redis-fifo-lock: a queue in Lua, a blocking pop for each waiter."""

from __future__ import annotations

from typing import Any

from redis_fifo_lock import FifoLock

from ._api import Pair
from ._pooled import Pooled

MAX_HOLD_MS = 3_600_000


class Fifo(Pooled):
    """`lease = await lock.acquire()`, then `await lock.release(lease)`."""

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = FifoLock(self._redis, name, lease_ms=int(ttl_s * 1000), max_hold_ms=MAX_HOLD_MS)
        return Pair(lock.acquire, lock.release)

    def key(self, name: str) -> str:
        return f"{{{name}}}:h"

    def is_held(self, held: Any) -> bool:
        return not held.lost.is_set()
