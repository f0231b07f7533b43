"""pottery's AIORedlock, on one server or a quorum."""

from __future__ import annotations

from pottery import AIORedlock

from ._api import Pair
from ._pooled import Pooled


class Pottery(Pooled):
    """Tries again after up to 0.2 s."""

    def pair(self, name: str, ttl_s: float) -> Pair:
        lock = AIORedlock(key=name, masters=set(self._servers), auto_release_time=ttl_s)
        return Pair(lock.acquire, lambda _: lock.release())

    def key(self, name: str) -> str:
        return f"redlock:{name}"
