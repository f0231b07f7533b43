"""Every kind of store with clients on it, each opened alike: a new store is one row of `STORES`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ConstantBackoff

from aiodlock import Lease, LockClient, _names
from aiodlock._store import _source
from aiodlock.testing import LockServer, lock_server
from tests import keys, topologies, wire
from tests.proxy import ChaosProxy
from tests.until import until

PREFIX = "aiodlock:"

NODES = 5
"""How many independent servers there are for quorums."""

AGREED_S = 3.0
"""More than the slowest copy takes until it has what most have."""

Address: TypeAlias = tuple[str, int]
Remap: TypeAlias = Callable[[Address], Address]
NewClient: TypeAlias = Callable[..., Awaitable[LockClient]]
AnyRedis: TypeAlias = Redis | RedisCluster


@dataclass
class World:
    """A store seen through one kind of client, and from outside.

    Attributes:
        new: A client of that kind with those options, entered; closed when the world ends.
        admins: One for each copy of the data; they look at it from outside, and may do all.
        servers: Those that clients are connected to; none where there is no connection.
        users_own: What the user made, and is to close.
        new_through: The same as `new`, to other addresses than those of the servers.
        extension: The script that extends a lease there.
    """

    new: NewClient
    admins: list[AnyRedis]
    servers: list[LockServer] = field(default_factory=list)
    users_own: list[AnyRedis] = field(default_factory=list)
    new_through: Callable[[Remap], Awaitable[LockClient]] | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    name: str = ""
    extension: str = "extend"

    async def two(self) -> tuple[LockClient, LockClient]:
        """Two clients that know nothing of each other."""
        return await self.new(), await self.new()

    async def behind_proxies(self) -> tuple[LockClient, Network]:
        """A client whose ways to the servers can be disturbed."""
        assert self.new_through is not None, "there is no way that could be disturbed"
        proxies = {
            server.port: await self.stack.enter_async_context(ChaosProxy(server.port))
            for server in self.servers
        }
        ports = {port: proxy.port for port, proxy in proxies.items()}
        client = await self.new_through(lambda address: (address[0], ports[address[1]]))
        return client, Network(list(proxies.values()))

    async def flush(self) -> None:
        """Drop every key."""
        for admin in self.admins:
            await admin.flushall()

    async def value(self, name: str) -> str | None:
        """What stands in the key of *name*, at most of the copies."""
        found = [await admin.get(key_of(name)) for admin in self.admins]
        most = max(found, key=found.count)
        return None if most is None else str(most)

    async def ttl_left_s(self, name: str) -> float:
        """For how long it will stand there at least, on most of the copies."""
        left_ms = [int(await admin.pttl(key_of(name))) for admin in self.admins]
        return sorted(left_ms, reverse=True)[len(left_ms) // 2] / 1000

    async def ttls(self, prefix: str = PREFIX) -> dict[str, int]:
        """Milliseconds left of every key; the least of the copies."""
        found: dict[str, int] = {}
        await self._agreed()
        for admin in self.admins:
            for key, ttl_ms in (await keys.ttls(_as_redis(admin), prefix)).items():
                found[key] = min(ttl_ms, found.get(key, ttl_ms))
        return found

    async def put(self, name: str, value: str) -> None:
        """Have another's value in the key of *name*, behind its holder's back."""
        for admin in self.admins:
            await admin.set(key_of(name), value, px=30_000)

    async def spoil(self, name: str) -> None:
        """Have something in the key of *name* that is no lock."""
        for admin in self.admins:
            assert await admin.rpush(key_of(name), "not a lock") == 1

    async def delete(self, name: str, *, side: str = "lock") -> None:
        """Take a key of *name* away behind its holder's back."""
        key = getattr(_names.keys(PREFIX, name), side)
        await self._agreed()
        assert [await admin.delete(key) for admin in self.admins] == [1] * len(self.admins)

    async def left(self, *, ignoring_tombstones: bool = False) -> list[str]:
        """Every key that should not be there, on any copy, when nobody holds or waits."""
        await self._agreed()
        found: set[str] = set()
        for admin in self.admins:
            found.update(
                await keys.leftovers(_as_redis(admin), ignoring_tombstones=ignoring_tombstones)
            )
        return sorted(found)

    async def _agreed(self) -> None:
        """Let the slower copies catch up: a quorum does not wait for them."""

        async def agree() -> bool:
            found = [set(await keys.ttls(_as_redis(admin), "")) for admin in self.admins]
            return all(each == found[0] for each in found)

        with contextlib.suppress(TimeoutError):
            if len(self.admins) > 1:
                await until(agree, AGREED_S)

    async def cut_connections(self) -> None:
        """Every server drops every client."""
        for server in self.servers:
            for kind in ("normal", "pubsub"):
                await topologies.ask(server, "CLIENT", "KILL", "TYPE", kind)

    async def forget_scripts(self) -> None:
        """As after a restart or a failover."""
        for server in self.servers:
            await topologies.ask(server, "SCRIPT", "FLUSH")
        if not self.servers:
            for admin in self.admins:
                await admin.script_flush()


class Network:
    """The ways from one client to all of its servers, disturbed together."""

    def __init__(self, proxies: list[ChaosProxy]) -> None:
        self._proxies = proxies

    def lose_replies(self, script: str) -> Callable[[], int]:
        """Lose the next reply to *script* on each way; how many were lost can be asked."""
        faults = [wire.lose(proxy, script) for proxy in self._proxies]
        return lambda: sum(fault.hits for fault in faults)

    def black_hole(self) -> None:
        for proxy in self._proxies:
            proxy.black_hole()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()


def key_of(name: str) -> str:
    """The key of *name* itself."""
    return _names.keys(PREFIX, name).lock


def value_of(lease: Lease) -> str:
    """What stands in the key while *lease* is held."""
    return _names.value_of(lease.owner_token, lease.fencing_token)


def _as_redis(admin: AnyRedis) -> Redis:
    """A client of a cluster can do what is asked of it here."""
    return admin  # type: ignore[return-value]


# The servers, and how a client of the user's becomes a world.


@dataclass
class Standing:
    """The servers that all worlds share."""

    plain: LockServer
    cluster: topologies.Cluster
    watched: topologies.Watched
    nodes: list[LockServer] = field(default_factory=list)


@asynccontextmanager
async def standing_servers(plain: LockServer) -> AsyncIterator[Standing]:
    """Every server, started at once."""
    async with AsyncExitStack() as stack:
        cluster, watched = await asyncio.gather(
            stack.enter_async_context(topologies.cluster()),
            stack.enter_async_context(topologies.watched()),
        )
        nodes = [await stack.enter_async_context(lock_server()) for _ in range(NODES)]
        yield Standing(plain, cluster, watched, nodes)


Open: TypeAlias = Callable[[Standing], AbstractAsyncContextManager[World]]
NewRedis: TypeAlias = Callable[[Remap | None], Awaitable[AnyRedis]]


@asynccontextmanager
async def world_of(
    new_redis: NewRedis, admin: AnyRedis, *servers: LockServer
) -> AsyncIterator[World]:
    """The world of clients that users make themselves, and close."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admin)
        users_own: list[AnyRedis] = []

        async def make(remap: Remap | None, **options: Any) -> LockClient:
            users_own.append(await stack.enter_async_context(await new_redis(remap)))
            return await stack.enter_async_context(LockClient(users_own[-1], **options))

        async def new(**options: Any) -> LockClient:
            return await make(None, **options)

        yield World(new, [admin], list(servers), users_own, make, stack)


def admin_of(server: LockServer, db: int = 0) -> Redis:
    """Looks at *server* from outside; its own connection may be dropped like all others."""
    retry = Retry(ConstantBackoff(0.01), 3)
    return Redis.from_url(server.url, db=db, decode_responses=True, retry=retry)


# The stores.


def of_one_server(standing: Standing) -> AbstractAsyncContextManager[World]:
    """`Redis(host=..., port=...)` of the user's."""

    async def new(remap: Remap | None) -> Redis:
        host, port = _remapped(remap, (topologies.HOST, standing.plain.port))
        return Redis(host=host, port=port)

    return world_of(new, admin_of(standing.plain), standing.plain)


def of_cluster(standing: Standing) -> AbstractAsyncContextManager[World]:
    """`RedisCluster` of three nodes."""

    async def new(remap: Remap | None) -> RedisCluster:
        return standing.cluster.client(address_remap=remap)

    admin = standing.cluster.client(decode_responses=True)
    return world_of(new, admin, *standing.cluster.nodes)


@asynccontextmanager
async def of_sentinels(standing: Standing) -> AsyncIterator[World]:
    """`Sentinel(...).master_for(...)`."""
    async with AsyncExitStack() as stack:

        async def new(remap: Remap | None) -> Redis:
            client = await stack.enter_async_context(standing.watched.client())
            sentinels: Sentinel = client.connection_pool.sentinel_manager  # type: ignore[attr-defined]
            discover = sentinels.discover_master

            async def discover_master(service: str) -> Address:
                return _remapped(remap, await discover(service))

            sentinels.discover_master = discover_master  # type: ignore[assignment]
            return client

        master = await standing.watched.master()
        yield await stack.enter_async_context(world_of(new, admin_of(master), master))


@asynccontextmanager
async def in_memory(_: Standing) -> AsyncIterator[World]:
    """`memory://<word>`: clients with that word share one memory."""
    url = "memory://worlds"
    async with AsyncExitStack() as stack:
        admin = await _admin_of_memory(url, stack)

        async def new(**options: Any) -> LockClient:
            return await stack.enter_async_context(LockClient.from_url(url, **options))

        yield World(new, [admin], stack=stack)


def of_quorum(count: int) -> Open:
    """`LockClient.quorum([Redis(...), ...])` of so many servers of the user's."""

    @asynccontextmanager
    async def opened(standing: Standing) -> AsyncIterator[World]:
        servers = standing.nodes[:count]
        async with AsyncExitStack() as stack:
            admins: list[AnyRedis] = [
                await stack.enter_async_context(admin_of(server)) for server in servers
            ]
            users_own: list[AnyRedis] = []

            async def make(remap: Remap | None, **options: Any) -> LockClient:
                addresses = [_remapped(remap, (topologies.HOST, server.port)) for server in servers]
                nodes = [
                    await stack.enter_async_context(Redis(host=host, port=port))
                    for host, port in addresses
                ]
                users_own.extend(nodes)
                return await stack.enter_async_context(LockClient.quorum(nodes, **options))

            async def new(**options: Any) -> LockClient:
                return await make(None, **options)

            yield World(new, admins, servers, users_own, make, stack, extension="confirm")

    return opened


@asynccontextmanager
async def quorum_in_memory(_: Standing) -> AsyncIterator[World]:
    """`LockClient.quorum` of three memories in this process."""
    urls = [f"memory://worlds {number}" for number in range(3)]
    async with AsyncExitStack() as stack:
        admins = [await _admin_of_memory(url, stack) for url in urls]

        async def new(**options: Any) -> LockClient:
            return await stack.enter_async_context(LockClient.quorum(urls, **options))

        yield World(new, admins, stack=stack)


async def _admin_of_memory(url: str, stack: AsyncExitStack) -> AnyRedis:
    """Keeps the memory alive, and looks at it from outside."""
    keeper: Any = await stack.enter_async_context(_source.of_url(url))
    server = keeper.connection_pool.connection_kwargs["server"]
    admin: AnyRedis = await stack.enter_async_context(
        type(keeper)(server=server, decode_responses=True)
    )
    return admin


def _remapped(remap: Remap | None, address: Address) -> Address:
    return remap(address) if remap else address


@dataclass
class Store:
    """Where leases can live.

    Attributes:
        without: The rules of the contract that do not apply to it, each with the reason.
    """

    name: str
    open: Open
    without: dict[str, str] = field(default_factory=dict)


_NO_CONNECTION = "it lives in the process: there is no connection that could fail"
_IN_PROCESS = {
    "a_lost_connection_is_made_again": _NO_CONNECTION,
    "a_lost_reply_is_no_loss": _NO_CONNECTION,
    "a_silent_server_cannot_delay_the_news": _NO_CONNECTION,
}

_NO_QUEUE = "nobody queues over a quorum: each node would have a queue in another order"
_NO_HAND_OFF = "nothing is handed over in a quorum: a waiter tries again by itself"
_WITHOUT_QUEUE = {
    "a_single_try_does_not_overtake_a_waiter": _NO_QUEUE,
    "a_waiter_who_leaves_is_passed_over": _NO_QUEUE,
    "a_waiter_who_died_is_passed_over": _NO_QUEUE,
    "those_who_poll_are_served_in_their_turn": _NO_QUEUE,
    "a_release_hands_over_to_the_first_waiter": _NO_HAND_OFF,
    "a_lease_handed_over_is_extended_beyond_its_short_start": _NO_HAND_OFF,
    "a_lease_handed_over_without_a_watchdog_has_its_whole_ttl": _NO_HAND_OFF,
}

STORES = [
    Store("one server", of_one_server),
    Store("cluster", of_cluster),
    Store("Sentinel", of_sentinels),
    Store("memory", in_memory, _IN_PROCESS),
    Store("quorum of 3", of_quorum(3), _WITHOUT_QUEUE),
    Store("quorum of 5", of_quorum(5), _WITHOUT_QUEUE),
    Store("quorum in memory", quorum_in_memory, _WITHOUT_QUEUE | _IN_PROCESS),
]
