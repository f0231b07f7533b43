"""A server as the user gave it: a client of redis-py, or where to find it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from . import _source
from ._quorum import QuorumStore
from ._redis import RedisStore
from ._router import Router

_LOCAL: Final = {"127.0.0.1": "localhost", "::1": "localhost"}


class Server:
    """The client of redis-py: the user's, which stays his to close, or ours.

    Raises:
        TypeError, ValueError: Locks cannot be kept there.
    """

    def __init__(self, redis: object, *, make: Callable[[], Redis] | None = None) -> None:
        self.redis: Redis | RedisCluster = _source.checked(redis)
        self._make = make  # None: the user's.
        self._is_inherited = False

    @classmethod
    def of_url(cls, url: str) -> Server:
        """One of our own."""
        make = functools.partial(_source.of_url, url)
        return cls(make(), make=make)

    @property
    def address(self) -> str:
        """Where it is, in words for people: never a password."""
        if isinstance(self.redis, RedisCluster):
            return "a cluster"
        pool = self.redis.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            sentinel = pool.sentinel_manager.sentinels[0].connection_pool.connection_kwargs
            return f"{pool.service_name} of the Sentinel {_place(sentinel)}"
        options: dict[str, Any] = pool.connection_kwargs
        if "server" in options:
            return f"memory {id(options['server']):x}"
        return _place(options)

    def router(self, *, request_timeout: float) -> Callable[[Callable[[], None]], Router]:
        """Makes the router, given what to call when a connection was lost."""
        if self._is_inherited:
            self.redis, self._is_inherited = _source.with_new_pool(self.redis), False
        return _source.router(self.redis, request_timeout=request_timeout)

    def renew(self) -> None:
        """Ours is made anew after its loop or process; the user's is the user's to replace."""
        if self._make is not None:
            self.redis = self._make()

    def inherit(self) -> object:
        """In a forked child: what is the parent's, and must be kept from being closed."""
        parents = self.redis
        self._is_inherited = self._make is None
        self.renew()
        return parents

    async def aclose(self) -> None:
        """Close it if it is ours."""
        if self._make is not None:
            redis, self.redis = self.redis, self._make()
            await redis.aclose()


def _place(options: dict[str, Any]) -> str:
    """Where a connection with *options* goes."""
    if options.get("path"):
        return str(options["path"])
    host = str(options.get("host", "localhost"))
    return f"{_LOCAL.get(host, host)}:{options.get('port', 6379)}"


def checked_nodes(nodes: object) -> list[Server]:
    """*nodes* as servers, if they can be a quorum; warns of an even number of them."""
    allowed = "LockClient.quorum takes at least 3 independent servers, as clients or URLs"
    if isinstance(nodes, str | bytes | Redis | RedisCluster) or not isinstance(nodes, Sequence):
        raise TypeError(f"{allowed}, in a list; got a {type(nodes).__qualname__}")
    if len(nodes) < 3:
        raise ValueError(f"{allowed}; got {len(nodes)}, which bear the loss of none")
    if any(isinstance(node, RedisCluster) for node in nodes):
        raise ValueError(
            f"{allowed}; got a RedisCluster, whose nodes are one server to a quorum: its replicas "
            "can lose a lock that it has granted"
        )
    servers = [Server.of_url(node) if isinstance(node, str) else Server(node) for node in nodes]
    addresses = [server.address for server in servers]
    twice = {address for address in addresses if addresses.count(address) > 1}
    if twice:
        raise ValueError(f"{allowed}, each once; got {min(twice)} twice")
    if len(servers) % 2 == 0:
        warnings.warn(
            f"a quorum of {len(servers)} bears the loss of no more nodes than one of "
            f"{len(servers) - 1}",
            stacklevel=3,
        )
    return servers


def store_of(
    servers: list[Server], *, prefix: str, client_id: str, request_timeout: float
) -> RedisStore:
    """Leases on one server, or one cluster."""
    (server,) = servers
    return RedisStore(
        server.router(request_timeout=request_timeout),
        prefix=prefix,
        client_id=client_id,
        request_timeout=request_timeout,
    )


def quorum_of(
    servers: list[Server],
    *,
    fencing: bool,
    prefix: str,
    client_id: str,
    request_timeout: float,
) -> QuorumStore:
    """Leases on a majority of independent servers."""
    return QuorumStore(
        {server.address: server.router(request_timeout=request_timeout) for server in servers},
        fencing=fencing,
        prefix=prefix,
        client_id=client_id,
        request_timeout=request_timeout,
    )
