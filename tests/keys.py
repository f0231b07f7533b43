"""What is left in Redis: the keys that a test looks at from outside."""

from __future__ import annotations

from redis.asyncio import Redis


async def leftovers(
    redis: Redis, prefix: str = "aiodlock:", *, ignoring_tombstones: bool = False
) -> list[str]:
    """The keys that should not be there once nobody holds or waits, sorted.

    Args:
        redis: A client with ``decode_responses=True``.
        prefix: The lock client's.
        ignoring_tombstones: Leave out an ``:alive`` key that has nothing else in it.
    """
    keys = [key for key in await _keys(redis, prefix) if not key.endswith(":fence")]
    if ignoring_tombstones:
        keys = [key for key in keys if not await _is_tombstones(redis, key)]
    return keys


async def ttls(redis: Redis, prefix: str = "aiodlock:") -> dict[str, int]:
    """Milliseconds left of every key, the fence keys too; -1: it has no TTL, which is a bug."""
    return {key: int(await redis.pttl(key)) for key in await _keys(redis, prefix)}


async def _keys(redis: Redis, prefix: str) -> list[str]:
    return sorted([str(key) async for key in redis.scan_iter(match=f"{prefix}*", count=1000)])


async def _is_tombstones(redis: Redis, key: str) -> bool:
    if not key.endswith(":alive"):
        return False
    members = await redis.zrange(key, 0, -1)
    return all(str(member).startswith("!") for member in members)
