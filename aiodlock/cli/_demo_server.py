"""A room for the demo on a server: a prefix of its own, swept when the demo leaves."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from aiodlock._names import keys
from aiodlock.cli._demo_locks import LOCKS


class Unreachable(Exception):
    """The server did not answer, or not as a server for locks does."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where the demo takes place."""

    server: str
    prefix: str


@contextlib.asynccontextmanager
async def room_on(url: str) -> AsyncIterator[Room]:
    """A room on the server at *url*; its keys are deleted at the end."""
    async with Redis.from_url(url) as redis:
        room = Room(await _server(redis), f"aiodlock-demo:{secrets.token_hex(4)}:")
        try:
            yield room
        finally:
            await _sweep(redis, room.prefix)


async def _server(redis: Redis) -> str:
    try:
        info = await redis.info("server")
    except RedisError as error:
        raise Unreachable(f"the server does not answer: {error}") from error
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '(unknown version)')}"


async def _sweep(redis: Redis, prefix: str) -> None:
    # After Ctrl-C an embedded server may be gone before us, and its keys with it.
    with contextlib.suppress(RedisError):
        for name in LOCKS:
            await redis.delete(*keys(prefix, name))
