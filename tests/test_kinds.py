"""Every kind of client that people have, under the rules in which the connection has a part."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import pytest
import pytest_asyncio
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster
from redis.auth.token import SimpleToken
from redis.cluster import LoadBalancingStrategy
from redis.credentials import StreamingCredentialProvider

from aiodlock import (
    LeaseLostError,
    LockClient,
    LostReason,
    NotAllowedError,
    ServerUnreachable,
    _names,
)
from aiodlock.testing import LockServer, lock_server
from tests import topologies
from tests.permissions import LEAST_PERMISSIONS
from tests.test_contract import CONNECTION_RULES, SOON_S, TTL_S, waiters
from tests.until import until
from tests.worlds import Remap, World, admin_of, world_of

RULES = CONNECTION_RULES
"""Of the contract, the rules in which the way to the server has a part."""


# The kinds.


@dataclass
class Standing:
    """The servers that all kinds share."""

    plain: LockServer
    socket_server: LockServer
    socket_url: str
    cluster: topologies.Cluster


Open: TypeAlias = Callable[[Standing], AbstractAsyncContextManager[World]]


@dataclass
class Kind:
    """A way in which people have a client; no rule may be left out."""

    name: str
    open: Open


def of_redis(**options: Any) -> Open:
    """`Redis(host=..., port=..., **options)` of the user's."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new(_: Remap | None) -> Redis:
            return Redis(host=topologies.HOST, port=standing.plain.port, **options)

        return world_of(new, admin_of(standing.plain, options.get("db", 0)), standing.plain)

    return open_it


def of_pool(pool_class: type[ConnectionPool], **options: Any) -> Open:
    """A client on a pool that the user made."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new(_: Remap | None) -> Redis:
            return Redis.from_pool(pool_class.from_url(standing.plain.url, **options))

        return world_of(new, admin_of(standing.plain), standing.plain)

    return open_it


class NewestFirst(ConnectionPool):
    """A pool of the user's own making."""

    def get_available_connection(self) -> Any:
        """As the pool of redis-py, but it makes a new one rather than take the oldest."""
        if not self._available_connections:
            return super().get_available_connection()  # type: ignore[no-untyped-call]
        connection = self._available_connections.pop()
        self._in_use_connections.add(connection)
        return connection


@asynccontextmanager
async def of_url(url: str, server: LockServer) -> AsyncIterator[World]:
    """`LockClient.from_url`."""
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(admin_of(server))

        async def new(**options: Any) -> LockClient:
            return await stack.enter_async_context(LockClient.from_url(url, **options))

        yield World(new, [admin], [server], stack=stack)


@asynccontextmanager
async def over_tls(standing: Standing) -> AsyncIterator[World]:
    """`rediss://` with certificates checked."""
    async with (
        topologies.tls(standing.plain.port) as tls,
        of_url(tls.url(tls.ca_file), standing.plain) as made,
    ):
        yield made


@asynccontextmanager
async def with_least_permissions(standing: Standing) -> AsyncIterator[World]:
    """A user who may do what locks need, and nothing else."""
    async with (
        topologies.user(standing.plain, *LEAST_PERMISSIONS) as user,
        of_url(user.url(standing.plain), standing.plain) as made,
    ):
        yield made


def of_cluster(**options: Any) -> Open:
    """`RedisCluster` of three nodes."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new(_: Remap | None) -> RedisCluster:
            return standing.cluster.client(**options)

        admin = standing.cluster.client(decode_responses=True)
        return world_of(new, admin, *standing.cluster.nodes)

    return open_it


class Rotating(StreamingCredentialProvider):
    """Credentials that change under those who use them, as those of clouds do."""

    def __init__(self, user: topologies.User) -> None:
        self._user = user
        self._callbacks: list[Callable[[Any], Awaitable[None]]] = []

    def get_credentials(self) -> tuple[str, str]:
        return self._user.name, self._user.password

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self._callbacks.append(callback)

    def on_error(self, callback: Callable[[Exception], None]) -> None:
        pass

    def is_streaming(self) -> bool:
        return True

    async def rotate(self, server: LockServer) -> None:
        """A new password, told to redis-py; with the old one nobody logs in any more."""
        self._user = topologies.User(self._user.name, f"{self._user.password}+")
        words = ("SETUSER", self._user.name, "resetpass", f">{self._user.password}")
        await topologies.ask(server, "ACL", *words)
        token = SimpleToken(self._user.password, -1, 0, {"oid": self._user.name})
        for callback in self._callbacks:
            await callback(token)


@asynccontextmanager
async def with_streamed_credentials(standing: Standing) -> AsyncIterator[World]:
    """A provider whose password changes between any two clients."""
    server = standing.plain
    async with topologies.user(server, "+@all", "~*", "&*") as user:
        provider = Rotating(user)

        async def new(_: Remap | None) -> Redis:
            await provider.rotate(server)
            return Redis(port=server.port, credential_provider=provider)

        async with world_of(new, admin_of(server), server) as made:
            yield made


KINDS = [
    Kind("Redis with a pool of its own", of_redis()),
    Kind("LockClient.from_url", lambda standing: of_url(standing.plain.url, standing.plain)),
    Kind("a single connection client", of_redis(single_connection_client=True)),
    Kind("two connections", of_redis(max_connections=2)),
    Kind("three connections", of_redis(max_connections=3)),
    Kind("a blocking pool", of_pool(BlockingConnectionPool, max_connections=3, timeout=1)),
    Kind("a pool of the user's making", of_pool(NewestFirst)),
    *(
        Kind(
            f"RESP{protocol} {encoding} {'decoded' if decoded else 'as bytes'}",
            of_redis(protocol=protocol, encoding=encoding, decode_responses=decoded),
        )
        # Every pair of values; redis-py's own choice, RESP3 UTF-8 as bytes, is the first kind.
        for protocol, encoding, decoded in [
            (2, "latin-1", True),
            (2, "utf-8", False),
            (3, "latin-1", False),
            (3, "utf-8", True),
        ]
    ),
    Kind("responses as RESP3 has them", of_redis(legacy_responses=False)),
    Kind("a Unix socket", lambda standing: of_url(standing.socket_url, standing.socket_server)),
    Kind("TLS", over_tls),
    Kind("database 7", of_redis(db=7)),
    Kind("streaming credentials", with_streamed_credentials),
    Kind("least permissions", with_least_permissions),
    Kind(
        "RedisCluster that reads from replicas, RESP2, decoded",
        of_cluster(
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN,
            protocol=2,
            decode_responses=True,
        ),
    ),
]

RUN: set[tuple[str, str]] = set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(session_server: LockServer) -> AsyncIterator[Standing]:
    """Every server, started at once."""
    async with AsyncExitStack() as stack:
        cluster, unix = await asyncio.gather(
            stack.enter_async_context(topologies.cluster()),
            stack.enter_async_context(topologies.unix_socket()),
        )
        yield Standing(session_server, *unix, cluster)


@pytest.fixture(scope="module", autouse=True)
def every_rule_ran(request: pytest.FixtureRequest) -> Any:
    """A pair of rule and kind that was collected and then skipped is no pass."""
    yield
    asked = {
        (cast(Kind, item.callspec.params["kind"]).name, item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == CONTRACT.__name__
    }
    assert asked - RUN == set(), "skipped without a reason on record"


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, id=f"{kind.name}-{name}") for kind in KINDS for name in RULES],
)
async def test_client_of_every_kind_keeps_the_contract(
    kind: Kind, name: str, standing: Standing
) -> None:
    """The rule holds on this kind, on the real thing."""
    try:
        async with kind.open(standing) as world:
            await world.flush()
            await RULES[name](world)
    finally:
        if not isinstance(sys.exception(), pytest.skip.Exception):
            RUN.add((kind.name, name))


CONTRACT = test_client_of_every_kind_keeps_the_contract


def test_kind_of_client_has_a_name_of_its_own() -> None:
    """What ran is counted by it."""
    assert len({kind.name for kind in KINDS}) == len(KINDS)


# What only some kinds have.


async def test_client_over_tls_with_a_wrong_ca_says_so_at_once(server: LockServer) -> None:
    """The certificate is not signed by whom we trust: no lock, and the cause is told."""
    async with (
        topologies.tls(server.port) as tls,
        LockClient.from_url(tls.url(tls.wrong_ca_file)) as locks,
    ):
        started_at = time.monotonic()
        with pytest.raises(ServerUnreachable, match="certificate verify failed") as error:
            await locks.lock("a").try_acquire()
        assert time.monotonic() - started_at < SOON_S
        assert "certificate verify failed" in str(error.value.__cause__)


async def test_lease_whose_password_changed_does_not_notice(server: LockServer) -> None:
    """The password changes and the server drops the connections, three times in three ttls."""
    async with topologies.user(server, "+@all", "~*", "&*") as user:
        provider = Rotating(user)
        redis = Redis(port=server.port, credential_provider=provider)
        async with redis, LockClient(redis) as locks:
            async with locks.lock("a", ttl=TTL_S).acquire(wait_timeout=5) as lease:
                waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=20))
                await until(lambda: waiters(locks, 1))
                for _ in range(3):
                    await asyncio.sleep(TTL_S)
                    await provider.rotate(server)
                    await topologies.ask(server, "CLIENT", "KILL", "USER", user.name)
                assert lease.is_held
                assert await lease.extend() > 0
            async with await waiting as next_lease:
                assert next_lease.fencing_token > lease.fencing_token


async def test_client_with_a_wrong_password_is_not_allowed_at_once(server: LockServer) -> None:
    """Nobody waits for a password to become right."""
    async with topologies.user(server, "+@all", "~*", "&*") as user:
        wrong = topologies.User(user.name, "wrong")
        async with LockClient.from_url(wrong.url(server)) as locks:
            started_at = time.monotonic()
            with pytest.raises(NotAllowedError, match=r"(?i)password"):
                await locks.lock("a").acquire(wait_timeout=20)
            assert time.monotonic() - started_at < SOON_S


@pytest.mark.parametrize("client", [Redis, RedisCluster])
def test_client_with_one_connection_is_refused(client: Callable[..., Any]) -> None:
    """One connection cannot carry both requests and messages: said when it is made."""
    with pytest.raises(ValueError, match="max_connections"):
        LockClient(client(host="localhost", port=1, max_connections=1))


async def test_holder_whose_key_was_evicted_is_told() -> None:
    """A server that makes room by `volatile-ttl` takes locks first (case 081).

    The holder hears of it at its next extension, and the next grant has a larger fencing token
    although the counter may be gone, too. (That the policy is unfit for locks is for the
    documentation to say: asking for it would take rights that locks do not need.)
    """
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "volatile-ttl")
    async with (
        lock_server(*options) as server,
        admin_of(server) as admin,
        LockClient.from_url(server.url) as locks,
    ):
        evicted_at = 0.0
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("a", ttl=TTL_S).acquire(wait_timeout=5) as lease:
                key = _names.keys("aiodlock:", "a").lock
                for n in range(1000):
                    await admin.set(f"filler {n}", "x" * 20_000, ex=1000)
                    if await admin.get(key) is None:
                        break
                evicted_at = time.monotonic()
                await asyncio.sleep(10)
        assert lost.value.reason is LostReason.DELETED
        assert time.monotonic() - evicted_at < TTL_S
        async with locks.lock("a").acquire(wait_timeout=5) as next_lease:
            assert next_lease.fencing_token > lease.fencing_token


async def test_databases_of_one_server_do_not_share_locks(server: LockServer) -> None:
    """The same name in two databases is two locks; a hand-off goes to its own database."""
    async with (
        LockClient.from_url(f"{server.url}/1") as one,
        LockClient.from_url(f"{server.url}/2") as two,
    ):
        first = await one.lock("a").acquire(wait_timeout=5)
        second = await two.lock("a").acquire(wait_timeout=5)
        waiting = asyncio.create_task(one.lock("a").acquire(wait_timeout=20))
        await until(lambda: waiters(one, 1))
        await second.release()
        assert await waiters(one, 1)
        await first.release()
        assert await (await waiting).release() is True


async def test_url_with_options_of_redis_py_is_heeded(server: LockServer) -> None:
    """`?client_name=...&protocol=2` in the URL is what the server sees."""
    url = f"{server.url}/3?client_name=locker&protocol=2"
    async with LockClient.from_url(url) as locks, locks.lock("a").acquire(wait_timeout=5):
        clients = await topologies.ask(server, "CLIENT", "LIST")
    ours = [line for line in clients.splitlines() if "name=locker" in line]
    assert len(ours) == 1
    assert " db=3 " in ours[0]
    assert " resp=2 " in ours[0]
