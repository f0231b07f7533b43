"""The cluster that a server given by its URL is a node of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import ResponseError

from aiodlock import LockError, ServerUnreachable
from aiodlock._store._wire import FAILURES, trouble

REQUEST_S: Final = 2.0
"""What one request may take, or a connection."""


@asynccontextmanager
async def cluster_at(url: str) -> AsyncIterator[RedisCluster | None]:
    """The cluster of the server at *url*, open for this block; None: it is in none.

    One command.

    Raises:
        ServerUnreachable, NotAllowedError: The server does not answer, or refuses the login.
    """
    redis = Redis.from_url(url, socket_timeout=REQUEST_S, socket_connect_timeout=REQUEST_S)
    try:
        is_node = await _is_node(redis)
    finally:
        await redis.aclose()
    if not is_node:
        yield None
        return
    cluster = RedisCluster.from_url(url, socket_timeout=REQUEST_S, socket_connect_timeout=REQUEST_S)
    try:
        yield cluster
    finally:
        await cluster.aclose()


async def _is_node(redis: Redis) -> bool:
    try:
        await redis.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
    except ResponseError:
        return False  # It is none, or we may not ask; who asks next is told what else is wrong.
    except FAILURES as error:
        found = trouble(error, "a lock")
        if isinstance(found, LockError):
            raise found from error
        raise ServerUnreachable(f"no answer: {found}", name="a lock") from error
    return True
