"""A drop-in for redis-py's async lock: `redis.lock("x", timeout=10, lock_class=Lock)`."""

from ._lock import Lock

__all__ = ["Lock"]
