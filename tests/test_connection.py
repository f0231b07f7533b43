"""The connection: many callers on one, and what happens to them when it breaks."""

from __future__ import annotations

import ast
import asyncio
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

import aiodlock
from aiodlock import Lease, LockClient, NotAllowedError, ServerUnreachable
from aiodlock._store import _mux
from aiodlock.testing import LockServer, lock_server
from tests import wire
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until

SLACK_S = 0.25
"""What a loaded machine may add to a bound of the contract."""


async def warm(locks: LockClient) -> None:
    """Connect both connections, and have every script in the server's cache."""
    lock = locks.lock("warm")
    async with lock as lease:
        await lease.extend()
        await lock.inspect()
        waiting = asyncio.create_task(lock.acquire())
        await until(lambda: hears(locks))
    await (await waiting).release()


async def acquired(locks: LockClient, n: int, prefix: str = "own", **options: Any) -> list[Lease]:
    """Leases of *n* names, all asked for in the same turn of the loop."""
    return await asyncio.gather(
        *(locks.lock(f"{prefix} {i}", **options).acquire() for i in range(n))
    )


async def released(leases: list[Lease]) -> list[bool]:
    """What each release says, all sent in the same turn of the loop."""
    return await asyncio.gather(*(lease.release() for lease in leases))


async def values(redis: Redis, leases: list[Lease]) -> list[str | None]:
    """What stands on the server under the names of *leases*."""
    found = await redis.mget([f"aiodlock:{{{lease.name}}}" for lease in leases])
    return [None if value is None else str(value) for value in found]


def grants(leases: list[Lease]) -> list[str]:
    """What should stand there."""
    return [f"{lease.owner_token}/{lease.fencing_token}" for lease in leases]


# One write, one reader, two connections.


async def test_link_many_callers_in_one_tick_are_few_writes(
    server: LockServer, redis: Redis
) -> None:
    """The first of a hundred leaves at once, the others by the batch, so that the server begins."""
    writes = 1 + math.ceil(99 / _mux._BATCH)
    tap = wire.Tap()
    async with wire.tapped(server.url, tap) as client, LockClient(client) as locks:
        await warm(locks)
        before, reads = len(tap.writes), await reads_of(redis)
        leases = await acquired(locks, 100)
        assert wire.requests_in(tap.writes[before:]) == 100
        assert len(tap.writes) - before == writes
        assert await reads_of(redis) - reads <= 10 + writes  # of 16 KiB each, and the question
        assert await released(leases) == [True] * 100
        assert len(tap.writes) - before == 2 * writes


async def reads_of(redis: Redis) -> int:
    """How often the server has read from any socket."""
    return int((await redis.info("stats"))["total_reads_processed"])


async def test_link_gives_each_caller_its_own_reply(locks: LockClient, redis: Redis) -> None:
    """Two hundred at once: what each was told is what the server wrote for it."""
    leases = await acquired(locks, 200)
    assert await values(redis, leases) == grants(leases)
    assert await released(leases) == [True] * 200
    assert await leftovers(redis) == []


async def test_link_cancelled_callers_leave_the_others_their_own_replies(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Every second caller leaves while its reply is on the way: no reconnect, no mix-up."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        before = proxy.connections
        proxy.delay_replies(0.1, wire.sha("acquire"))
        tasks = [asyncio.create_task(locks.lock(f"own {i}").acquire()) for i in range(60)]
        await until(lambda: proxy.requests["EVALSHA"] >= 60)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results[::2]] == [asyncio.CancelledError] * 30
        leases = [result for result in results[1::2] if isinstance(result, Lease)]
        assert await values(redis, leases) == grants(leases)
        assert len(leases) == 30
        assert proxy.connections == before
        assert await released(leases) == [True] * 30
        assert await leftovers(redis) == []


async def test_link_late_replies_are_not_given_to_the_next_callers(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Thirty callers give up in a black hole; what they asked for is answered, to nobody."""
    tap = wire.Tap()
    async with wire.tapped(proxy.url, tap) as client, LockClient(client) as locks:
        await warm(locks)
        proxy.black_hole()
        tried = await asyncio.gather(
            *(locks.lock(f"own {i}").acquire(wait_timeout=0.2) for i in range(30)),
            return_exceptions=True,
        )
        assert [type(result) for result in tried] == [ServerUnreachable] * 30
        asked = asyncio.create_task(acquired(locks, 60))
        await asyncio.sleep(0.05)
        proxy.heal()
        leases = await asked
        assert await values(redis, leases) == grants(leases)
        assert await released(leases) == [True] * 60
        assert tap.most_open <= 3
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_client_with_many_tasks_and_waiters_has_two_connections(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """Fifty holders and fifty waiters of one client: one for requests, one for messages."""
    async with make_client(f"{server.url}?client_name=many") as locks:
        leases = await acquired(locks, 50)
        queue = locks.lock("own 0")
        waiting = [asyncio.create_task(queue.acquire()) for _ in range(50)]
        await until(lambda: queued(redis, 50))
        await until(lambda: hears(locks))
        assert len(await wire.connections(redis, "many")) == 2
        assert await released(leases) == [True] * 50
        for task in waiting:
            assert await (await task).release()
        connected = await wire.connections(redis, "many")
        assert sorted(client["sub"] for client in connected) == ["0", "1"]


async def queued(redis: Redis, n: int, name: str = "own 0") -> bool:
    """Whether *n* wait for *name*."""
    return int(await redis.zcard(f"aiodlock:{{{name}}}:queue")) == n


async def test_client_on_the_slow_path_has_three_connections_at_most(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Ten leases are kept over one borrowed connection at a time while the link is silent."""
    tap = wire.Tap()
    async with wire.tapped(proxy.url, tap) as client, LockClient(client) as locks:
        await warm(locks)
        leases = await acquired(locks, 10, ttl=0.9)
        assert tap.most_open == 2
        silent = wire.stall(proxy, "extend")
        await until(lambda: silent.hits == 1)
        keys = [f"aiodlock:{{{lease.name}}}" for lease in leases]
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert await redis.exists(*keys) == 10
            await asyncio.sleep(0.05)
        assert tap.most_open == 3
        assert [lease.is_held for lease in leases] == [True] * 10
        assert await released(leases) == [True] * 10


# Deadlines, and when the connection is given up.


async def test_request_has_a_deadline_of_its_own(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Two that go out together into a black hole end each at its own time."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        proxy.black_hole()
        ended = await asyncio.gather(*(wait_in_vain(locks, wait) for wait in (0.2, 0.7)))
        for wait, took in zip((0.2, 0.7), ended, strict=True):
            assert wait <= took < wait + 0.1 + SLACK_S
        proxy.heal()


async def wait_in_vain(locks: LockClient, wait_timeout: float) -> float:
    """How long it takes until an acquisition gives up, seconds."""
    with wire.Watch() as watch, pytest.raises(ServerUnreachable):
        await locks.lock(f"in vain {wait_timeout}").acquire(wait_timeout=wait_timeout)
    return watch.s


async def test_link_silent_for_request_timeout_is_given_up(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Not before, and then the next one serves whoever still waits."""
    async with make_client(proxy.url, request_timeout=0.4) as locks:
        await warm(locks)
        before = proxy.connections
        wire.stall(proxy, "acquire")
        task = asyncio.create_task(locks.lock("a").acquire(wait_timeout=5))
        with wire.Watch() as watch:
            await until(lambda: proxy.connections > before)
        assert 0.3 < watch.s < 0.4 + SLACK_S
        lease = await task
        assert await values(redis, [lease]) == grants([lease])
        await until(lambda: proxy.open_connections == 2)
        assert await lease.release()


async def test_connection_that_its_pool_closed_is_replaced_not_reopened(
    server: LockServer, redis: Redis
) -> None:
    """redis-py would connect it anew inside the caller's own task; a new one is taken instead."""
    async with Redis.from_url(server.url) as client, LockClient(client) as locks:
        await warm(locks)
        lease = await locks.lock("a").acquire()
        before = locks._session.store._router.link("")  # type: ignore[union-attr]
        await before._held.connection.disconnect()
        assert await lease.release() is True
        after = locks._session.store._router.link("")  # type: ignore[union-attr]
        assert after is not before
        assert before.closing is not None
    assert await leftovers(redis) == []


async def test_request_out_of_time_drops_nobody_elses(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A short wait ends on a slow server; the one behind it is answered over the same link."""
    async with make_client(proxy.url, request_timeout=2) as locks:
        await warm(locks)
        late = proxy.delay_replies(0.6, wire.sha("acquire"))
        long = asyncio.create_task(locks.lock("long").acquire(wait_timeout=5))
        await wait_in_vain(locks, 0.1)
        assert late.hits == 3  # both, and the last try of the short one
        lease = await long
        assert late.hits == 3  # none was sent again
        assert await lease.release()


async def test_watchdog_unanswered_goes_elsewhere_and_drops_nobody(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Its request runs out of time before `request_timeout`: the link, and who waits, stay."""
    async with make_client(proxy.url, request_timeout=3) as locks:
        await warm(locks)
        before = proxy.connections
        lease = await locks.lock("short", ttl=0.6).acquire()
        late = proxy.delay_replies(1.0, wire.sha("extend"), 1)
        await until(lambda: late.hits == 1)
        other = asyncio.create_task(locks.lock("other").acquire(wait_timeout=0))
        await until(lambda: proxy.connections > before)  # borrowed
        await asyncio.sleep(0.5)  # beyond the ttl that the lease had
        assert lease.is_held
        assert await redis.exists("aiodlock:{short}") == 1
        assert not other.done()
        granted = await other  # over the link, once its reply came
        assert await values(redis, [granted, lease]) == grants([granted, lease])
        # Whatever was borrowed was given back, and the link is the one from before.
        await until(lambda: proxy.open_connections == 2)
        assert await released([lease, granted]) == [True, True]


@pytest.mark.parametrize(
    ("wait_timeout", "delay_s"),
    [
        pytest.param(0.0, 0.0, id="one request to a fast server"),
        pytest.param(5.0, 0.0, id="a wait on a fast server"),
        pytest.param(5.0, 0.2, id="a wait on a slow server"),
    ],
)
async def test_loop_that_stalls_does_not_drop_the_link(
    make_client: MakeClient, proxy: ChaosProxy, wait_timeout: float, delay_s: float
) -> None:
    """The loop stood still for longer than `request_timeout`, not the server."""
    async with make_client(proxy.url, request_timeout=0.4) as locks:
        await warm(locks)
        before = proxy.connections
        if delay_s:
            proxy.delay_replies(delay_s, wire.sha("acquire"))
        task = asyncio.create_task(locks.lock("a").acquire(wait_timeout=wait_timeout))
        await asyncio.sleep(0)  # it has handed its request over
        time.sleep(0.6)  # noqa: ASYNC251 - the fault
        assert await (await task).release()
        assert proxy.connections == before


async def test_loop_that_stalls_all_the_time_still_ends_a_wait(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A busy loop is late at every turn; a deadline that waits for a punctual one never comes."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        proxy.black_hole()
        stalling = asyncio.create_task(stalls(0.13))
        try:
            with wire.Watch() as watch, pytest.raises(ServerUnreachable):
                async with asyncio.timeout(4):
                    await locks.lock("a").acquire(wait_timeout=0.3)
        finally:
            stalling.cancel()
            proxy.heal()
        assert 0.3 <= watch.s < 0.3 + 0.1 + 6 * 0.13 + SLACK_S


async def stalls(length_s: float) -> None:
    """Hold the loop up at every turn."""
    while True:
        time.sleep(length_s)  # noqa: ASYNC251 - the fault
        await asyncio.sleep(0)


async def test_short_waits_do_not_spoil_the_start_of_a_long_one(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A new client on a slow server: what is asked once for all is not bounded by the hastiest."""
    locks = make_client(proxy.url)
    proxy.delay_replies(0.15)
    hasty = asyncio.create_task(hurry(locks))
    try:
        await asyncio.sleep(0.05)
        with wire.Watch() as watch:
            lease = await locks.lock("long").acquire(wait_timeout=5)
        assert watch.s < 2
        assert lease.is_held
    finally:
        hasty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hasty
    proxy.heal()
    assert await lease.release()


async def hurry(locks: LockClient) -> None:
    """Ask for a lock again and again, with hardly any time."""

    async def ask(n: int) -> None:
        with suppress(ServerUnreachable):
            await locks.lock(f"short {n}").try_acquire(wait_timeout=0.02)

    async with asyncio.TaskGroup() as group:
        for n in range(1000):
            group.create_task(ask(n))
            await asyncio.sleep(0.01)


async def test_first_acquire_cancelled_in_a_black_hole_spoils_no_later_one(
    server: LockServer,
) -> None:
    """Its failure is its own, though it was the one that asked first."""

    async def scenario(call: str) -> None:
        async with (
            ChaosProxy(server.port) as proxy,
            LockClient.from_url(proxy.url, request_timeout=0.4) as locks,
        ):
            assert not (await locks.lock(call).inspect()).held  # connected, and no more
            proxy.black_hole()
            cancelled = asyncio.create_task(locks.lock(call).acquire())
            await asyncio.sleep(0.05)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await asyncio.sleep(0.5)
            proxy.heal(deliver=False)
            await until(lambda: proxy.open_connections == 0)
            lease = await getattr(locks.lock(call), call)()
            assert lease
            assert await lease.release()

    await wire.at_once({call: scenario(call) for call in ("try_acquire", "acquire")})


async def test_users_socket_timeout_does_not_bound_our_requests(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """A reply slower than that is waited for, without a reconnect."""
    tap = wire.Tap()
    async with (
        wire.tapped(proxy.url, tap, socket_timeout=0.1) as client,
        LockClient(client) as locks,
    ):
        await warm(locks)
        proxy.delay_replies(0.3, wire.sha("acquire"))
        before = tap.connects
        (lease,) = await acquired(locks, 1)
        assert await lease.release()
        assert tap.connects == before


# Connections that are killed.


async def test_link_killed_while_idle_is_replaced_unnoticed(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """`CLIENT KILL` of both: the next request has a new connection."""
    async with make_client(f"{server.url}?client_name=idle") as locks:
        await warm(locks)
        lease = await locks.lock("kept", ttl=5).acquire()
        for client in await wire.connections(redis, "idle"):
            await redis.client_kill_filter(_id=client["id"])
        async with locks.lock("a").acquire(wait_timeout=0.5):
            pass
        assert lease.is_held
        assert await lease.release()


@pytest.mark.parametrize("times", [1, 3])
async def test_link_killed_with_requests_outstanding_is_replaced_for_all(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, times: int
) -> None:
    """Forty acquires lose their replies together, again and again: each is granted, once."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        log = wire.logged(proxy)
        proxy.delay_replies(0.3, wire.sha("acquire"), 40 * times)
        task = asyncio.create_task(acquired(locks, 40, ttl=5))
        for n in range(times):
            await until(lambda n=n: log["EVALSHA"] >= 40 * (n + 1))  # type: ignore[misc]
            assert proxy.kill_connections("commands") == 1
        leases = await task
        assert await values(redis, leases) == grants(leases)
        assert await released(leases) == [True] * 40
        assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_server_restarted_serves_the_same_client(
    server: LockServer, make_client: MakeClient, redis: Redis
) -> None:
    """Connections, scripts and data are gone: it connects and loads them anew."""
    async with make_client(server.url) as locks:
        await warm(locks)
        server.restart()
        with wire.Watch() as watch:
            leases = await acquired(locks, 20)
        assert watch.s < 1 + SLACK_S
        assert await values(redis, leases) == grants(leases)
        assert await released(leases) == [True] * 20


# Scripts that the server has forgotten.


async def test_scripts_forgotten_are_sent_once_each_however_many_call(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """One `EVAL` per script; the rest go by digest behind it."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        held = await acquired(locks, 50, "held")
        await redis.script_flush()
        log = wire.logged(proxy)
        leases, was_released, infos = await asyncio.gather(
            acquired(locks, 50),
            released(held),
            asyncio.gather(*(locks.lock("free").inspect() for _ in range(50))),
        )
        assert await values(redis, leases) == grants(leases)
        assert was_released == [True] * 50
        assert [info.held for info in infos] == [False] * 50
        assert log["EVAL"] == 3
        assert log["EVALSHA"] == 150 + 147
        assert log["SCRIPT"] == 0
        assert await released(leases) == [True] * 50


async def test_acquire_given_up_before_noscript_is_not_sent_again(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """It would come after its own release; that one is sent with its text, and runs."""
    async with make_client(proxy.url) as locks:
        await warm(locks)
        await redis.script_flush()
        log = wire.logged(proxy)
        proxy.delay_replies(0.2, wire.sha("acquire"), 1)
        task = asyncio.create_task(locks.lock("given up").acquire())
        await until(lambda: log["EVALSHA"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log["EVAL"] == 1  # the release
        assert await redis.exists("aiodlock:{given up}:fence") == 0  # no acquire ever ran
        assert await leftovers(redis) == []


# Servers that cannot now.


@asynccontextmanager
async def a_replica(redis: Redis) -> AsyncIterator[None]:
    """READONLY, as of a primary that was demoted."""
    await wire.command(redis, "REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        await wire.command(redis, "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def out_of_memory(redis: Redis) -> AsyncIterator[None]:
    """OOM, under the policy noeviction."""
    await redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await redis.config_set("maxmemory", 0)


@asynccontextmanager
async def a_disk_that_fails(redis: Redis) -> AsyncIterator[None]:
    """MISCONF: the directory for snapshots is gone."""
    shutil.rmtree(str((await redis.config_get("dir"))["dir"]))
    await redis.config_set("save", "3600 1")
    with suppress(ResponseError):
        await redis.bgsave()
    await until(lambda: save_failed(redis))
    try:
        yield
    finally:
        await redis.config_set("stop-writes-on-bgsave-error", "no")


async def save_failed(redis: Redis) -> bool:
    """Whether the last snapshot failed."""
    return bool((await redis.info("persistence"))["rdb_last_bgsave_status"] == "err")


@asynccontextmanager
async def a_busy_script(redis: Redis) -> AsyncIterator[None]:
    """BUSY: somebody's script does not end."""
    await redis.config_set("busy-reply-threshold", 10)
    host = redis.connection_pool.connection_kwargs
    async with Redis(host=host["host"], port=host["port"]) as other:
        script: Any = other.eval("while true do end", 0)
        running = asyncio.create_task(script)
        await until(lambda: is_busy(redis))
        try:
            yield
        finally:
            await redis.script_kill()
            await asyncio.wait({running})
            assert isinstance(running.exception(), ResponseError)


async def is_busy(redis: Redis) -> bool:
    """Whether the server says BUSY."""
    try:
        await redis.ping()
    except ResponseError as error:
        return str(error).startswith("BUSY")
    return False


Trouble = Callable[[Redis], AbstractAsyncContextManager[None]]
TROUBLES = [
    pytest.param(a_replica, "read only", id="READONLY"),
    pytest.param(out_of_memory, "maxmemory", id="OOM"),
    pytest.param(a_disk_that_fails, "MISCONF", id="MISCONF"),
    pytest.param(a_busy_script, "BUSY", id="BUSY"),
]


@pytest.mark.parametrize(("trouble", "words"), TROUBLES)
async def test_server_that_cannot_now_is_ridden_out(trouble: Trouble, words: str) -> None:
    """Who may wait gets the lock afterwards, who may not gets the cause, a lease is kept."""
    with lock_server() as server:
        async with (
            Redis.from_url(server.url, decode_responses=True) as redis,
            LockClient.from_url(server.url, request_timeout=0.3) as locks,
        ):
            await warm(locks)
            lease = await locks.lock("kept", ttl=4).acquire()
            async with trouble(redis):
                waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=10))
                for wait_timeout in (0.0, 0.25):
                    # On a loaded machine a try may end before the server has said why.
                    await until(lambda wait=wait_timeout: is_told(locks, wait, words))  # type: ignore[misc]
                assert not waiting.done()
            granted = await waiting
            assert lease.is_held
            assert await values(redis, [lease, granted]) == grants([lease, granted])
            assert await released([lease, granted]) == [True, True]
            assert await leftovers(redis, ignoring_tombstones=True) == []


async def is_told(locks: LockClient, wait_timeout: float, words: str) -> bool:
    """Whether the error of an acquisition in vain says what the server said."""
    with pytest.raises(ServerUnreachable) as caught:
        await locks.lock("b").acquire(wait_timeout=wait_timeout)
    cause = caught.value.__cause__
    return isinstance(cause, RedisError) and words in str(cause)


@pytest.mark.parametrize(("trouble", "words"), TROUBLES)
async def test_server_that_cannot_now_says_so_to_a_new_client(trouble: Trouble, words: str) -> None:
    """Also where the wait ends before the new client has given up asking what it may do."""

    async def newcomer_is_told() -> bool:
        async with LockClient.from_url(server.url, request_timeout=1.0) as locks:
            return await is_told(locks, 0.25, words)

    with lock_server() as server:
        async with Redis.from_url(server.url, decode_responses=True) as redis, trouble(redis):
            # On a loaded machine a wait may end before the server has said anything.
            await until(newcomer_is_told, limit_s=20)


async def test_server_that_loads_is_ridden_out(tmp_path: Path) -> None:
    """LOADING: it is up, and reads its snapshot for some time."""
    slow = ("--key-load-delay", "500", "--loading-process-events-interval-bytes", "1024")
    with lock_server("--dir", str(tmp_path), "--rdbcompression", "no", *slow) as server:
        async with (
            Redis.from_url(server.url, decode_responses=True) as redis,
            LockClient.from_url(server.url, request_timeout=0.3) as locks,
        ):
            # Large enough that the server looks up from each, to say that it is loading.
            await redis.eval("for i = 1, 2000 do redis.call('SET', i, string.rep('x', 500)) end", 0)
            await warm(locks)
            await redis.save()
            server.restart()
            await until(lambda: loads(redis))
            await until(lambda: is_told(locks, 0.0, "loading"))
            assert await loads(redis)
            async with locks.lock("a").acquire(wait_timeout=10):
                assert not await loads(redis)


async def loads(redis: Redis) -> bool:
    """Whether the server reads its snapshot."""
    with suppress(RedisConnectionError):  # the old connection is noticed to be dead once
        return bool((await redis.info("persistence"))["loading"])
    return False


# Who may not.


@asynccontextmanager
async def a_user(redis: Redis, *rules: str) -> AsyncIterator[dict[str, str]]:
    """A user of the server's, with all rights but as *rules* say; its name and password."""
    await wire.command(
        redis, "ACL", "SETUSER", "locker", "on", ">right", "~*", "&*", "+@all", *rules
    )
    try:
        yield {"username": "locker", "password": "right"}
    finally:
        await wire.command(redis, "ACL", "DELUSER", "locker")


@pytest.mark.parametrize("wait_timeout", [0.0, 5.0, None])
async def test_wrong_password_is_told_at_once(
    server: LockServer, redis: Redis, wait_timeout: float | None
) -> None:
    """Also where redis-py would try ten times more, as a `Redis(host=...)` does by default."""
    async with a_user(redis):
        client = Redis(port=server.port, username="locker", password="wrong")
        async with client, LockClient(client) as locks:
            with wire.Watch() as watch, pytest.raises(NotAllowedError):
                await locks.lock("a").acquire(wait_timeout=wait_timeout)
            assert watch.s < 1  # redis-py: 3 to 5 s


@pytest.mark.parametrize("rule", ["-evalsha", "-zadd"])
async def test_user_who_may_not_is_told_about_the_lock_it_asked_for(
    server: LockServer, redis: Redis, rule: str
) -> None:
    """Five names at once, one question to the server about all: each error has its own name."""
    async with a_user(redis, rule) as user:
        client = Redis(port=server.port, **user)  # type: ignore[arg-type]
        async with client, LockClient(client) as locks:
            results = await asyncio.gather(
                *(locks.lock(f"a{i}").acquire(wait_timeout=1) for i in range(5)),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [NotAllowedError] * 5
            assert [getattr(result, "name", None) for result in results] == [
                f"a{i}" for i in range(5)
            ]
            assert rule[1:] in str(results[0])
    assert await leftovers(redis) == []


async def test_refused_port_is_told_within_the_wait_of_a_client_with_retries() -> None:
    """Its ten retries would take four seconds."""
    async with Redis(port=1) as client, LockClient(client) as locks:
        for wait in (0.0, 0.3):
            with wire.Watch() as watch, pytest.raises(ServerUnreachable):
                await locks.lock("a").acquire(wait_timeout=wait)
            assert wait <= watch.s < wait + 0.1 + SLACK_S


async def test_credentials_that_the_server_dropped_are_given_again() -> None:
    """NOAUTH on a connection that was logged in: a new one is, and nobody notices."""
    with lock_server("--requirepass", "right") as server:
        tap = Forgetful()
        client = wire.tapped(server.url, tap, password="right")
        async with client, LockClient(client) as locks:
            await warm(locks)
            lease = await locks.lock("kept", ttl=1.2).acquire()
            connects = tap.connects
            tap.forget = True
            await until(lambda: not tap.forget)  # the watchdog is the first to meet it
            await until(lambda: tap.connects > connects and lease.state == "held")
            for wait_timeout in (0.0, 2.0):
                assert not (await locks.lock("a").inspect()).held  # it is connected again
                tap.forget = True
                async with locks.lock("a").acquire(wait_timeout=wait_timeout):
                    assert not tap.forget
            for call in (lease.extend, locks.lock("a").inspect, lease.release):
                assert not (await locks.lock("a").inspect()).held
                tap.forget = True
                assert await call()
                assert not tap.forget


class Forgetful(wire.Tap):
    """Has the server log a connection out before the next script on it, when told to."""

    forget = False

    @property
    def connection_class(self) -> type[Any]:
        tap = self
        base: Any = super().connection_class

        class Forgotten(base):  # type: ignore[misc]
            async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
                parts = [command] if isinstance(command, bytes) else list(command)
                if tap.forget and b"EVALSHA" in b"".join(parts):
                    tap.forget = False
                    parts.insert(0, b"*1\r\n$5\r\nRESET\r\n")
                await super().send_packed_command(parts, check_health)

            async def read_response(self, *args: Any, **options: Any) -> Any:
                reply = await super().read_response(*args, **options)
                while reply == b"RESET":
                    reply = await super().read_response(*args, **options)
                return reply

        return Forgotten


# The user's pool.


async def test_users_pool_is_handed_back_as_it_was(server: LockServer, redis: Redis) -> None:
    """Settings, counts and use: after `aclose()` nothing says that we were there."""
    tap = wire.Tap()
    mine = Retry(ConstantBackoff(0.01), 4)
    options: dict[str, Any] = {"socket_timeout": 7, "retry": mine, "client_name": "mine"}
    async with wire.tapped(server.url, tap, **options) as client:
        assert await client.ping()
        async with LockClient(client) as locks:
            await warm(locks)
            inbox, link = sorted(
                await wire.connections(redis, "mine"), key=lambda c: -int(c["sub"])
            )
            await redis.client_kill_filter(_id=inbox["id"])
            await redis.client_kill_filter(_id=link["id"])
            await warm(locks)
            assert await client.ping()
            assert await connected(redis, "mine", 3)
        await until(lambda: connected(redis, "mine", 1))
        assert [connection.socket_timeout for connection in tap.made] == [7] * len(tap.made)
        assert [connection.retry for connection in tap.made] == [mine] * len(tap.made)
        idle, used = (n for n, _ in client.connection_pool.get_connection_count())
        assert (idle, used) == (len(tap.made), 0)
        assert await client.ping()


async def connected(redis: Redis, name: str, n: int) -> bool:
    """Whether the client with this ``client_name`` has *n* connections."""
    return len(await wire.connections(redis, name)) == n


async def test_users_client_stays_open_and_our_own_is_closed(
    server: LockServer, redis: Redis
) -> None:
    """A user's connections outside the lock client are not touched by its end."""
    async with Redis.from_url(f"{server.url}?client_name=theirs") as client:
        async with LockClient(client) as locks:
            assert await client.ping()
            async with locks.lock("a"):
                theirs: Any = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
                before = await id_of(theirs)
        assert await id_of(theirs) == before  # it was not closed, and opened again
        await client.connection_pool.release(theirs)
        assert await client.ping()
    async with LockClient.from_url(f"{server.url}?client_name=ours") as locks:
        await warm(locks)
        assert await connected(redis, "ours", 2)
    await until(lambda: connected(redis, "ours", 0))


async def id_of(connection: Any) -> int:
    """The server's number for a connection of redis-py's."""
    await connection.send_command("CLIENT", "ID")
    return int(await connection.read_response())


async def test_users_client_closed_too_early_leaves_a_working_lock_and_no_connection(
    server: LockServer, redis: Redis
) -> None:
    """The order is wrong, and still nothing fails, hangs or leaks."""
    client = Redis.from_url(f"{server.url}?client_name=early")
    locks = LockClient(client)
    lease = await locks.lock("a", ttl=5).acquire()
    waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=5))
    await until(lambda: hears(locks))
    await client.aclose()
    assert await lease.extend() > 0
    assert await lease.release()
    assert await (await waiting).release()
    await locks.aclose()
    await until(lambda: connected(redis, "early", 0))
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_two_clients_on_one_pool_do_not_hinder_each_other(
    server: LockServer, redis: Redis
) -> None:
    """Each has its two connections; the end of one leaves the other its own."""
    async with Redis.from_url(f"{server.url}?client_name=shared") as client:
        async with LockClient(client) as one, LockClient(client) as two:
            lease = await one.lock("a").acquire()
            waiting = asyncio.create_task(two.lock("a").acquire(wait_timeout=5))
            await until(lambda: hears(two))
            assert await connected(redis, "shared", 3)  # nobody waits in the first one
            await lease.release()
            theirs = await waiting
            await one.aclose()
            await until(lambda: connected(redis, "shared", 2))
            assert await theirs.extend() > 0
            assert await theirs.release()
        await until(lambda: connected(redis, "shared", 0))


async def test_unix_socket_and_database_are_those_of_the_url(tmp_path: Path) -> None:
    """How to connect is redis-py's business: keys are in database 3, over a socket file."""
    path = tmp_path / "valkey.sock"
    with lock_server("--unixsocket", str(path)) as server:
        async with (
            LockClient.from_url(f"unix://{path}?db=3") as locks,
            Redis.from_url(f"{server.url}/3", decode_responses=True) as redis,
        ):
            await warm(locks)
            (lease,) = await acquired(locks, 1)
            assert await values(redis, [lease]) == grants([lease])
            assert await lease.release()


@pytest.mark.parametrize("path", ["prod", "0/extra", "l"])
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_url_whose_database_is_no_number_is_refused(scheme: str, path: str) -> None:
    """redis-py would take it for database 0, where nobody looks; the path may be a secret."""
    with pytest.raises(ValueError, match="the number of a database") as refused:
        LockClient.from_url(f"{scheme}://h/{path}")
    assert path not in str(refused.value).removesuffix("redis://localhost:6379/0")


def test_pool_of_one_connection_is_refused(server: LockServer) -> None:
    """At construction: a request and a subscription cannot share it."""
    with pytest.raises(ValueError, match="at least 2 connections"):
        LockClient(Redis(port=server.port, max_connections=1))
    with pytest.raises(ValueError, match="at least 2 connections"):
        LockClient.from_url(f"{server.url}?max_connections=1")


async def test_pool_of_two_connections_is_enough(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Hand-offs, lost connections and a silent link; only the third one is never had."""
    async with (
        make_client(f"{proxy.url}?max_connections=2", request_timeout=0.4) as locks,
        make_client() as others,
    ):
        await warm(locks)
        theirs = await others.lock("a").acquire()
        waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=5))
        await until(lambda: queued(redis, 1, "a"))
        with wire.Watch() as watch:
            await theirs.release()
            lease = await waiting
        assert watch.s < SLACK_S
        proxy.kill_connections()
        assert await lease.extend() > 0
        silent = wire.stall(proxy, "extend")
        with suppress(ServerUnreachable):
            await lease.extend()
        assert silent.hits == 1
        assert lease.is_held
        assert await lease.extend() > 0
        assert await lease.release()
        assert await leftovers(redis, ignoring_tombstones=True) == []


Pools = Callable[[str], ConnectionPool]


async def test_pool_without_room_for_the_inbox_means_polling_with_one_warning(
    make_client: MakeClient,
    server: LockServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two waits one after the other, one warning; no waiter fails, and later it subscribes."""
    pool = ConnectionPool.from_url(server.url, max_connections=2)
    async with Redis.from_pool(pool) as client, make_client() as others:
        taken: Connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        async with LockClient(client) as locks:
            for _ in range(2):
                theirs = await others.lock("a").acquire()
                waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=10))
                await asyncio.sleep(0.15)  # it tries to subscribe, some times
                await theirs.release()
                with wire.Watch() as watch:
                    assert await (await waiting).release()
                assert watch.s < 1 + SLACK_S  # as with `retry=Backoff()`
                await until(lambda: not is_subscribing())  # it tries only while somebody waits
            assert not hears(locks)
            assert len(wire.warnings_of(caplog)) == 1, wire.warnings_of(caplog)
            await pool.release(taken)
            async with locks.lock("a"):
                waiting = asyncio.create_task(locks.lock("a").acquire())
                await until(lambda: hears(locks), 8)
            assert await (await waiting).release()


def is_subscribing() -> bool:
    """Whether a client has, or tries to get, an inbox."""
    return any(task.get_name() == "aiodlock inbox" for task in asyncio.all_tasks())


async def test_blocking_pool_is_neither_waited_for_nor_forgotten(
    make_client: MakeClient, server: LockServer
) -> None:
    """Exhausted, it costs the inbox only; what we give back wakes a task that waits for it."""
    pool = BlockingConnectionPool.from_url(server.url, max_connections=2, timeout=5)
    async with Redis.from_pool(pool) as client, make_client() as others:
        taken: Connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        locks = LockClient(client)
        theirs = await others.lock("a").acquire()
        waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=5))
        await asyncio.sleep(0.1)
        await theirs.release()
        with wire.Watch() as watch:
            assert await (await waiting).release()
        assert watch.s < 1 + SLACK_S  # as with `retry=Backoff()`
        ping: Any = client.ping()
        pinging = asyncio.create_task(ping)
        await asyncio.sleep(0.05)
        assert not pinging.done()
        await locks.aclose()
        assert await pinging
        await pool.release(taken)


async def test_client_of_a_single_connection_lends_us_others(
    server: LockServer, redis: Redis
) -> None:
    """`single_connection_client=True` keeps its own for its commands."""
    client = Redis(port=server.port, single_connection_client=True, client_name="single")
    async with client:
        assert await client.ping()
        async with LockClient(client) as locks:
            await warm(locks)
            leases = await acquired(locks, 5)
            assert await asyncio.gather(*(client.ping() for _ in range(5))) == [True] * 5
            assert await connected(redis, "single", 3)
            assert await released(leases) == [True] * 5
        assert await client.ping()
        await until(lambda: connected(redis, "single", 1))


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_client_however_it_decodes_locks_the_same(
    server: LockServer, redis: Redis, protocol: int, decode: bool, encoding: str
) -> None:
    """Keys, holders, foreign values and hand-offs by message do not depend on the user's choice."""
    options: dict[str, Any] = {
        "port": server.port,
        "protocol": protocol,
        "decode_responses": decode,
        "encoding": encoding,
    }
    name = "Straße {1} 日本"
    key = "aiodlock:{Straße %7B1%7D 日本}"
    async with (
        Redis(**options) as client,
        LockClient(client, label="one") as locks,
        LockClient.from_url(server.url) as others,
    ):
        theirs = await others.lock(name).acquire()
        assert await redis.get(key) == f"{theirs.owner_token}/{theirs.fencing_token}"
        waiting = asyncio.create_task(locks.lock(name).acquire(wait_timeout=5))
        await until(lambda: redis.zcard(f"{key}:queue"))
        await until(lambda: hears(locks))
        with wire.Watch() as watch:
            await theirs.release()
            lease = await waiting
        assert watch.s < SLACK_S  # by message: the next poll is 2 s away
        info = await locks.lock(name).inspect()
        assert info.holder is not None
        assert (info.holder[:4], info.fencing_token) == ("one:", lease.fencing_token)
        assert await lease.extend() > 0
        assert await lease.release()
        await redis.set(key, "jemand, ganz fremd: ü", px=5000)
        foreign = await locks.lock(name).inspect()
        assert foreign.holder == "jemand, ganz fremd: ü"
        assert await locks.lock(name).try_acquire() is None
        assert await locks.lock(name).break_lock()


# What of redis-py is used.


def test_store_uses_only_public_names_of_redis_py() -> None:
    """No attribute with an underscore of anything but our own objects."""
    rooms = sorted((Path(aiodlock.__file__).parent / "_store").glob("*.py"))
    assert len(rooms) >= 5
    assert {room.name: private_names(room.read_text()) for room in rooms} == {
        room.name: [] for room in rooms
    }


def test_store_check_finds_private_names() -> None:
    """The check above is no use unless it sees one."""
    assert private_names("held.connection._writer.write(b'')\nself._mine = 1") == ["_writer"]
    assert private_names("from redis.asyncio.connection import _x") == ["_x"]
    assert private_names("getattr(pool, '_lock')") == ["_lock"]


def private_names(source: str) -> list[str]:
    """The names with an underscore that are taken from anything but `self` and our own rooms."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                found.append(name)
            case ast.ImportFrom(level=0, names=names):
                found += [alias.name for alias in names if alias.name.startswith("_")]
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                found += [name] if name.startswith("_") else []
    return found


@asynccontextmanager
async def garbled(server: LockServer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A way to *server* on which whatever is put into the list is sent in place of each reply."""
    instead: list[bytes] = []

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swap: list[bytes]
    ) -> None:
        while data := await reader.read(65536):
            writer.write(swap[0] if swap else data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(pass_on(reader, to_server[1], []))
            ways.create_task(pass_on(to_server[0], writer, instead))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield f"redis://127.0.0.1:{port}", instead


@pytest.mark.parametrize("reply", [b"*0\r\n", b"*1\r\n:1\r\n", b"+OK\r\n", b":1\r\n", b"$-1\r\n"])
@pytest.mark.parametrize("act", ["acquire", "extend", "release", "inspect"])
async def test_reply_of_another_shape_is_no_answer(
    make_client: MakeClient, server: LockServer, reply: bytes, act: str
) -> None:
    """A broken proxy sent it: the caller neither waits for ever nor gets an error of ours."""
    async with garbled(server) as (url, instead):
        locks = make_client(url, ttl=5, request_timeout=0.3)
        lock = locks.lock("garbled")
        await (await lock.acquire()).release()
        lease = await lock.acquire() if act in ("extend", "release") else None
        instead.append(reply)
        async with asyncio.timeout(10):
            with pytest.raises(ServerUnreachable):
                if act == "acquire":
                    await lock.try_acquire()
                elif act == "inspect":
                    await lock.inspect()
                elif lease is not None:
                    await getattr(lease, act)()
        instead.clear()
        if lease is not None:
            await lease.release()
        await locks.aclose()
