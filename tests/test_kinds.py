"""One contract, written once, over every kind of client that people have."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import pytest
import pytest_asyncio
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.auth.token import SimpleToken
from redis.backoff import ConstantBackoff
from redis.cluster import LoadBalancingStrategy
from redis.credentials import StreamingCredentialProvider

from aiodlock import (
    LeaseLostError,
    LockClient,
    LockInfo,
    LostReason,
    NotAllowedError,
    ServerUnreachable,
    _names,
)
from aiodlock._store import _source
from aiodlock.testing import LockServer, lock_server
from tests import topologies
from tests.keys import leftovers
from tests.permissions import LEAST_PERMISSIONS
from tests.until import until

SOON_S = 1.0
"""Sooner than any waiter polls by itself when the ttl is 30 s."""

TTL_S = 0.6
"""Where it must run out, or be extended, while a test waits."""


# The contract.


@dataclass
class World:
    """A server seen through one kind of client.

    Attributes:
        new: A client of that kind, entered; closed when the world ends.
        admin: What looks at the server from outside, and has all rights.
        servers: Those that clients are connected to; none where there is no connection.
    """

    new: Callable[[], Awaitable[LockClient]]
    admin: Redis | RedisCluster
    servers: list[LockServer] = field(default_factory=list)
    users_own: list[Redis | RedisCluster] = field(default_factory=list)

    async def value(self, name: str) -> str | None:
        """What stands in the key of *name*."""
        found = await self.admin.get(_names.keys("aiodlock:", name).lock)
        return None if found is None else str(found)

    async def delete(self, name: str) -> None:
        """Take the key of *name* away behind its holder's back."""
        assert await self.admin.delete(_names.keys("aiodlock:", name).lock) == 1

    async def left(self) -> list[str]:
        """Every key that should not be there when nobody holds or waits."""
        return await leftovers(self.admin)  # type: ignore[arg-type]  # a cluster can do the same


Rule: TypeAlias = Callable[[World], Awaitable[None]]

RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    """*check* is part of the contract: it runs on every kind."""
    RULES[check.__name__] = check
    return check


@rule
async def one_holds_and_others_do_not(world: World) -> None:
    """Whoever comes second does not get it; another name is another lock; tokens grow."""
    ours, others = await world.new(), await world.new()
    async with ours.lock("a").acquire(wait_timeout=5) as first:
        assert await world.value("a") == f"{first.owner_token}/{first.fencing_token}"
        assert await others.lock("a").try_acquire() is None
        assert await ours.lock("a").try_acquire() is None
        async with others.lock("b").acquire(wait_timeout=5):
            assert first.is_held
    async with others.lock("a").acquire(wait_timeout=5) as second:
        assert second.fencing_token > first.fencing_token
    assert await world.left() == []


@rule
async def a_release_hands_over_to_the_first_waiter(world: World) -> None:
    """Waiters of two clients get it in the order in which they came, without a poll between."""
    ours, others = await world.new(), await world.new()
    order: list[str] = []

    async def queue(locks: LockClient, who: str) -> None:
        async with locks.lock("a").acquire(wait_timeout=20):
            order.append(who)

    holder = await ours.lock("a").acquire(wait_timeout=5)
    tasks = []
    for place, (locks, who) in enumerate([(others, "1"), (ours, "2"), (others, "3")]):
        tasks.append(asyncio.create_task(queue(locks, who)))
        await until(functools.partial(waiters, ours, place + 1))
    await until(lambda: hears(ours) and hears(others))
    released_at = time.monotonic()
    assert await holder.release() is True
    await asyncio.gather(*tasks)
    assert time.monotonic() - released_at < SOON_S
    assert order == ["1", "2", "3"]
    assert await world.left() == []


@rule
async def a_watchdog_keeps_what_stands_and_tells_of_what_is_gone(world: World) -> None:
    """One body outlasts its ttl and nobody gets in; another's key is deleted: it is told."""
    ours, others = await world.new(), await world.new()
    deleted_at = 0.0
    async with ours.lock("kept", ttl=TTL_S).acquire(wait_timeout=5) as kept:
        with pytest.raises(LeaseLostError) as lost:
            async with ours.lock("gone", ttl=TTL_S).acquire(wait_timeout=5):
                await world.delete("gone")
                deleted_at = time.monotonic()
                await asyncio.sleep(10)
        assert lost.value.reason is LostReason.DELETED
        assert time.monotonic() - deleted_at < TTL_S
        await asyncio.sleep(TTL_S * 0.8)
        assert kept.state == "held"
        assert await world.value("kept") == f"{kept.owner_token}/{kept.fencing_token}"
        assert await others.lock("kept").try_acquire() is None
    assert await world.left() == []


@rule
async def what_stands_is_told(world: World) -> None:
    """`inspect` names the holder of a lock, and nobody of a free one."""
    ours, others = await world.new(), await world.new()
    assert await others.lock("a").inspect() == LockInfo(False, None, None, None, 0)
    async with ours.lock("a", ttl=30).acquire(wait_timeout=5) as lease:
        told = await others.lock("a").inspect()
        holder = lease.owner_token.rpartition(":")[0]
        assert told == LockInfo(True, holder, told.ttl_left, lease.fencing_token, 0)
        assert told.ttl_left is not None
        assert 20 < told.ttl_left <= 30


@rule
async def an_operator_breaks_it_for_the_next(world: World) -> None:
    """The waiter gets it; the holder learns at its next word that it is another's."""
    ours, others = await world.new(), await world.new()
    holder = await ours.lock("a", ttl=30).acquire(wait_timeout=5)
    waiting = asyncio.create_task(ours.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(others, 1))
    assert await others.lock("a").break_lock(fencing_token=1) is False
    assert await others.lock("a").break_lock(fencing_token=holder.fencing_token) is True
    assert (await waiting).fencing_token > holder.fencing_token
    with pytest.raises(LeaseLostError) as lost:
        await holder.extend()
    assert lost.value.reason is LostReason.STOLEN
    assert await holder.release() is False
    assert await (await waiting).release() is True


@rule
async def a_lost_connection_is_made_again(world: World) -> None:
    """The server drops every connection: the lease stands, the waiter still gets it."""
    ours, others = await world.new(), await world.new()
    holder = await ours.lock("a", ttl=5).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a", ttl=5).acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await until(lambda: hears(others))
    for server in world.servers:
        for kind in ("normal", "pubsub"):
            await topologies.ask(server, "CLIENT", "KILL", "TYPE", kind)
    assert await holder.extend() > 4
    assert await holder.release() is True
    async with await waiting as lease:
        assert lease.is_held
    assert await world.left() == []


@rule
async def scripts_that_the_server_forgot_are_sent_again(world: World) -> None:
    """`SCRIPT FLUSH` before each step (case 073), as after a restart or a failover."""

    async def forget() -> None:
        for server in world.servers:
            await topologies.ask(server, "SCRIPT", "FLUSH")
        if not world.servers:
            await world.admin.script_flush()

    ours, others = await world.new(), await world.new()
    await forget()
    lease = await ours.lock("a").acquire(wait_timeout=5)
    await forget()
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await forget()
    assert await lease.extend() > 20
    await forget()
    assert await lease.release() is True
    next_lease = await waiting
    await forget()
    assert await others.lock("a").break_lock() is True
    assert await next_lease.release() is False
    assert await world.left() == []


@rule
async def a_waiter_who_is_cancelled_leaves_nothing(world: World) -> None:
    """Neither in the queue nor, when the lock comes free, in the key."""
    ours, others = await world.new(), await world.new()
    async with ours.lock("a").acquire(wait_timeout=5):
        waiting = asyncio.create_task(others.lock("a").acquire())
        await until(lambda: waiters(ours, 1))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await waiters(ours, 0)
    assert await world.left() == []


@rule
async def any_name_will_do(world: World) -> None:
    """Braces, per cents, blanks, letters of every script: each its own lock, all free at the end.

    `%7B` is what `{` is encoded as, so the two must not meet in one key.
    """
    locks = await world.new()
    names = ["{", "}", "{a}", "%", "%7B", "%257B", " ", "\0", "\r\n", "ß", "鍵", "🔒", "a" * 512]
    leases = await asyncio.gather(*(locks.lock(name).acquire(wait_timeout=5) for name in names))
    values = [await world.value(name) for name in names]
    assert values == [f"{lease.owner_token}/{lease.fencing_token}" for lease in leases]
    released = await asyncio.gather(*(lease.release() for lease in leases))
    assert released == [True] * len(names)
    assert await world.left() == []


@rule
async def a_closed_client_leaves_the_users_own_alone(world: World) -> None:
    """Leases are given back, waiters are told, and what the user made still works."""
    ours, others = await world.new(), await world.new()
    lease = await ours.lock("a").acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a").acquire())
    await until(lambda: waiters(ours, 1))
    await others.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    await ours.aclose()
    assert lease.state == "released"
    assert await world.left() == []
    for users in world.users_own:
        assert await users.ping()


async def waiters(locks: LockClient, n: int) -> bool:
    """Whether so many wait for "a"."""
    return (await locks.lock("a").inspect()).waiters == n


def hears(locks: LockClient) -> bool:
    """Whether the client's inbox is subscribed, if it has need of one."""
    assert locks._session is not None
    store: Any = locks._session.store
    return bool(store.hears or not store._listening)


# The kinds.


@dataclass
class Standing:
    """The servers that all kinds share."""

    plain: LockServer
    socket_server: LockServer
    socket_url: str
    cluster: topologies.Cluster
    watched: topologies.Watched


Open: TypeAlias = Callable[[Standing], AbstractAsyncContextManager[World]]


@dataclass
class Kind:
    """A way in which people have a client.

    Attributes:
        without: The rules that do not apply to it, each with the reason.
    """

    name: str
    open: Open
    without: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def world(
    new_redis: Callable[[], Awaitable[Redis | RedisCluster]],
    admin: Redis | RedisCluster,
    *servers: LockServer,
) -> AsyncIterator[World]:
    """The world of clients that users make themselves, and close."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admin)
        users_own: list[Redis | RedisCluster] = []

        async def new() -> LockClient:
            users_own.append(await stack.enter_async_context(await new_redis()))
            return await stack.enter_async_context(LockClient(users_own[-1]))

        yield World(new, admin, list(servers), users_own)


def of_redis(**options: Any) -> Open:
    """`Redis(host=..., port=..., **options)` of the user's."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new() -> Redis:
            return Redis(host=topologies.HOST, port=standing.plain.port, **options)

        return world(new, admin_of(standing.plain, options.get("db", 0)), standing.plain)

    return open_it


def of_pool(pool_class: type[ConnectionPool], **options: Any) -> Open:
    """A client on a pool that the user made."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new() -> Redis:
            return Redis.from_pool(pool_class.from_url(standing.plain.url, **options))

        return world(new, admin_of(standing.plain), standing.plain)

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

        async def new() -> LockClient:
            return await stack.enter_async_context(LockClient.from_url(url))

        yield World(new, admin, [server])


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


@asynccontextmanager
async def in_memory(_: Standing) -> AsyncIterator[World]:
    """`memory://kinds`: clients with that word share one memory."""
    url = "memory://kinds"
    async with AsyncExitStack() as stack:
        keeper: Any = await stack.enter_async_context(_source.of_url(url))
        server = keeper.connection_pool.connection_kwargs["server"]
        admin = await stack.enter_async_context(type(keeper)(server=server, decode_responses=True))

        async def new() -> LockClient:
            return await stack.enter_async_context(LockClient.from_url(url))

        yield World(new, admin)


@asynccontextmanager
async def of_sentinels(standing: Standing) -> AsyncIterator[World]:
    """`Sentinel(...).master_for(...)`."""
    async with AsyncExitStack() as stack:

        async def new() -> Redis:
            return await stack.enter_async_context(standing.watched.client())

        master = await standing.watched.master()
        yield await stack.enter_async_context(world(new, admin_of(master), master))


def of_cluster(**options: Any) -> Open:
    """`RedisCluster` of three nodes."""

    def open_it(standing: Standing) -> AbstractAsyncContextManager[World]:
        async def new() -> RedisCluster:
            return standing.cluster.client(**options)

        admin = standing.cluster.client(decode_responses=True)
        return world(new, admin, *standing.cluster.nodes)

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

        async def new() -> Redis:
            await provider.rotate(server)
            return Redis(port=server.port, credential_provider=provider)

        async with world(new, admin_of(server), server) as made:
            yield made


def admin_of(server: LockServer, db: int = 0) -> Redis:
    """Looks at *server* from outside; its own connection may be dropped like all others."""
    retry = Retry(ConstantBackoff(0.01), 3)
    return Redis.from_url(server.url, db=db, decode_responses=True, retry=retry)


NO_CONNECTION = "memory:// lives in the process: there is no connection that could be lost"

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
    Kind("Sentinel", of_sentinels),
    Kind("RedisCluster", of_cluster()),
    Kind(
        "RedisCluster that reads from replicas, RESP2, decoded",
        of_cluster(
            load_balancing_strategy=LoadBalancingStrategy.ROUND_ROBIN,
            protocol=2,
            decode_responses=True,
        ),
    ),
    Kind("memory://", in_memory, {"a_lost_connection_is_made_again": NO_CONNECTION}),
]

RUN: set[tuple[str, str]] = set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(session_server: LockServer) -> AsyncIterator[Standing]:
    """Every server, started at once."""
    async with AsyncExitStack() as stack:
        cluster, watched, unix = await asyncio.gather(
            stack.enter_async_context(topologies.cluster()),
            stack.enter_async_context(topologies.watched()),
            stack.enter_async_context(topologies.unix_socket()),
        )
        yield Standing(session_server, *unix, cluster, watched)


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
    [
        pytest.param(kind, name, id=f"{kind.name}-{name}")
        for kind in KINDS
        for name in RULES
        if name not in kind.without
    ],
)
async def test_client_of_every_kind_keeps_the_contract(
    kind: Kind, name: str, standing: Standing
) -> None:
    """The rule holds on this kind, on the real thing."""
    try:
        async with kind.open(standing) as world:
            await world.admin.flushall()
            await RULES[name](world)
    finally:
        if not isinstance(sys.exception(), pytest.skip.Exception):
            RUN.add((kind.name, name))


CONTRACT = test_client_of_every_kind_keeps_the_contract


def test_rule_that_does_not_apply_has_a_reason_on_record() -> None:
    """No kind leaves out what is no rule, or a rule without a sentence that says why."""
    written = {
        name
        for name, function in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
        if inspect.iscoroutinefunction(function)
        and list(inspect.signature(function).parameters.values())[:1]
        and [p.annotation for p in inspect.signature(function).parameters.values()] == ["World"]
    }
    assert written == set(RULES), "a rule that is not registered does not run"
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert set(kind.without) <= set(RULES), kind.name
        assert all(len(reason.split()) > 4 for reason in kind.without.values()), kind.name


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
