"""From what the user has to a client of redis-py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline
from redis.asyncio.sentinel import SentinelConnectionPool

from ._cluster import Cluster
from ._router import Primary, Router


def of_url(url: str) -> Redis:
    """A new client for *url*."""
    if not isinstance(url, str):
        raise TypeError(
            "url must be a str such as redis://localhost:6379/0, rediss://, unix:// or memory://; "
            f"got a {type(url).__qualname__}"
        )
    if url.startswith("memory://"):
        return _memory(url.removeprefix("memory://"))
    redis = Redis.from_url(url)
    _check_database(url)
    return redis


def _check_database(url: str) -> None:
    """redis-py takes a path that is no number for database 0, where nobody looks for the lock."""
    parts = urlsplit(url)
    number = unquote(parts.path).replace("/", "")
    if parts.scheme != "unix" and number and not number.isdecimal():
        # Not what stands there: it may be a part of a password.
        raise ValueError("the path of a URL is the number of a database: redis://localhost:6379/0")


def _memory(word: str) -> Redis:
    try:
        from fakeredis import FakeAsyncRedis, FakeServer
    except ImportError:
        raise RuntimeError("memory:// needs fakeredis: pip install 'aiodlock[testing]'") from None
    server = _memories.get(word) if word else None
    if server is None:
        server = FakeServer()
        if word:
            _memories[word] = server
    return FakeAsyncRedis(server=server)


def checked(redis: object) -> Redis | RedisCluster:
    """*redis* if locks can be kept there."""
    if not isinstance(redis, Redis | RedisCluster) or isinstance(redis, Pipeline):
        # By its type: the thing itself may be a URL with a password.
        raise TypeError(
            "LockClient takes a redis.asyncio.Redis or RedisCluster (and LockClient.from_url a "
            f"URL); got a {type(redis).__module__}.{type(redis).__qualname__}"
        )
    if isinstance(redis, RedisCluster):
        most = redis.get_connection_kwargs().get("max_connections")
    else:
        most = redis.connection_pool.max_connections
    if most is not None and most < 2:
        raise ValueError(
            "LockClient needs a pool of at least 2 connections, one for requests and one for "
            "messages; got max_connections=1"
        )
    return redis


def router(
    redis: Redis | RedisCluster, *, request_timeout: float
) -> Callable[[Callable[[], None]], Router]:
    """Makes the router, given what to call when a connection was lost."""
    if isinstance(redis, RedisCluster):
        return functools.partial(Cluster, redis, request_timeout=request_timeout)
    return functools.partial(Primary, redis.connection_pool, request_timeout=request_timeout)


def with_new_pool(redis: Redis | RedisCluster) -> Redis:
    """The same server and options, with none of the connections.

    Raises:
        RuntimeError: redis-py cannot copy clients of a cluster or of Sentinels.
    """
    if isinstance(redis, RedisCluster) or isinstance(redis.connection_pool, SentinelConnectionPool):
        raise RuntimeError(
            "a client of a cluster or of Sentinels does not outlive a fork: make one, and a "
            "LockClient, in the child"
        )
    pool = redis.connection_pool
    return type(redis)(
        connection_pool=type(pool)(
            connection_class=pool.connection_class,
            max_connections=pool.max_connections,
            **pool.connection_kwargs,
        )
    )


_memories: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
