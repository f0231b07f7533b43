"""Waiting: how long it takes at most, what ends it, what it costs, and in which order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import Backoff, Lease, Lock, LockClient, LockTimeout, ServerUnreachable, _waiting
from aiodlock.testing import LockServer
from tests import wire
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until

SLACK_S = 0.25
"""What a loaded machine may add to a bound of the contract."""
AWAY_S = 0.4
"""How long a server is away that comes back."""
LAST_TRY_S = 0.1
"""How long the answer to the last try is awaited (design, issue 2)."""


def key_of(name: str) -> str:
    """The key of a name that needs no escapes."""
    return f"aiodlock:{{{name}}}"


async def queued(redis: Redis, n: int, name: str = "a") -> bool:
    """Whether *n* wait for *name*."""
    return int(await redis.zcard(f"{key_of(name)}:queue")) == n


async def warmed(locks: LockClient) -> LockClient:
    """The client, connected and with the scripts in the server's cache."""
    async with locks.lock("warm") as lease:
        await lease.extend()
    return locks


def waits(locks: LockClient, n: int = 1, name: str = "a", **options: Any) -> list[Any]:
    """Tasks that wait for *name*."""
    return [asyncio.create_task(locks.lock(name, **options).acquire()) for _ in range(n)]


async def subscribed(locks: LockClient) -> None:
    """Until its inbox hears, and who waits has polled, as it does whenever that begins."""
    await until(lambda: hears(locks))
    await asyncio.sleep(0.1)


async def others_hold(redis: Redis, name: str = "a", ms: int = 60_000) -> None:
    """A lock of another library: nobody extends it, and its release wakes nobody."""
    await redis.set(key_of(name), "another library", px=ms)


# Servers that do not answer.

Fault = Callable[[LockServer, ChaosProxy], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def slow(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[None]:
    """Half a second for each answer."""
    proxy.delay_replies(0.5)
    try:
        yield
    finally:
        proxy.heal()


@asynccontextmanager
async def black_holed(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[None]:
    """Packets vanish."""
    proxy.black_hole()
    try:
        yield
    finally:
        proxy.heal()


@asynccontextmanager
async def stopped(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[None]:
    """SIGSTOP: the kernel still accepts connections."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


@asynccontextmanager
async def refusing(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[None]:
    """Each connection is reset at once, the old ones too."""
    right, proxy.server_port = proxy.server_port, 1
    proxy.kill_connections()
    try:
        yield
    finally:
        proxy.server_port = right


FAULTS = [slow, black_holed, stopped, refusing]


@pytest.mark.parametrize("fault", FAULTS)
async def test_wait_on_a_server_in_trouble_ends_in_time_and_not_before(
    make_client: MakeClient, server: LockServer, proxy: ChaosProxy, redis: Redis, fault: Fault
) -> None:
    """`wait_timeout` bounds all of it: connecting, asking, the last try; and nothing is left.

    Of a lock that is held the waiter was told a moment ago who holds it: that is the answer.
    A single request is bounded by `request_timeout`; trouble is never `None`.
    """
    new, connected, polling = (make_client(proxy.url) for _ in range(3))
    single = make_client(proxy.url, request_timeout=0.25)
    for locks in (connected, polling, single):
        await warmed(locks)
    await others_hold(redis, "held")
    with wire.Watch() as held_for:
        held = asyncio.create_task(connected.lock("held").acquire(wait_timeout=0.5))
        await until(lambda: queued(redis, 1, "held"))
        await subscribed(connected)
        async with fault(server, proxy):
            cases = {
                "new client": in_vain(new.lock("new"), 0.2),
                "connected client": in_vain(connected.lock("connected"), 0.2),
                "backoff": in_vain(polling.lock("polling", retry=Backoff()), 0.2),
                "one request": in_vain(single.lock("single", ttl=0.5), 0.0, up_to=0.25),
            }
            await wire.at_once(cases)
            with pytest.raises(LockTimeout) as caught:
                await held
    assert 0.5 <= held_for.s < 0.5 + LAST_TRY_S + SLACK_S
    assert caught.value.holder == "another library"
    for locks in (new, connected, polling, single):
        await locks.aclose()  # its clean-up goes on until here
    # In trouble for longer than its `request_timeout`, that one may have to leave it to the ttl.
    await until(lambda: not_held(redis, "single"))
    assert await leftovers(redis, ignoring_tombstones=True) == [key_of("held")]


async def not_held(redis: Redis, name: str) -> bool:
    """Whether nobody has it."""
    return int(await redis.exists(key_of(name))) == 0


async def in_vain(lock: Lock, wait_timeout: float, up_to: float | None = None) -> None:
    """An acquisition that ends with `ServerUnreachable`, on the dot; or by *up_to* seconds."""
    latest = wait_timeout + LAST_TRY_S if up_to is None else up_to
    with wire.Watch() as watch, pytest.raises(ServerUnreachable) as caught:
        await lock.try_acquire(wait_timeout=wait_timeout)
    assert wait_timeout <= watch.s < latest + SLACK_S
    assert caught.value.name == lock.name
    assert caught.value.__cause__ is not None


async def test_wait_is_bounded_with_connecting_and_asking_together(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A connection that took most of the time leaves the request the rest, not all of it again."""
    locks = make_client(proxy.url)
    proxy.delay_replies(0.4, b"HELLO")
    wire.stall(proxy, n=2)
    with wire.Watch() as watch, pytest.raises(ServerUnreachable):
        await locks.lock("a").acquire(wait_timeout=0.6)
    assert 0.6 <= watch.s < 0.6 + LAST_TRY_S + SLACK_S
    proxy.heal(deliver=False)


async def test_single_request_is_bounded_with_connecting_and_asking_together(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """`request_timeout` is one for both."""
    proxy.delay_replies(0.5, b"HELLO")
    wire.stall(proxy, n=4)

    async def ask(call: str) -> None:
        locks = make_client(proxy.url, request_timeout=0.7)
        with wire.Watch() as watch, pytest.raises(ServerUnreachable):
            await getattr(locks.lock("a"), call)()
        assert watch.s < 0.7 + SLACK_S

    await wire.at_once({call: ask(call) for call in ("try_acquire", "inspect")})
    proxy.heal(deliver=False)


async def test_try_acquire_is_one_request_that_does_not_queue(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Held: `None`, and nothing of it stays."""
    locks = await warmed(make_client(proxy.url))
    await others_hold(redis)
    before = proxy.requests.total()
    assert await locks.lock("a").try_acquire() is None
    with pytest.raises(LockTimeout):
        await locks.lock("a").acquire(wait_timeout=0)
    assert proxy.requests.total() - before == 2
    assert await leftovers(redis) == [key_of("a")]


# The end of a wait.


async def test_waiter_tries_a_last_time_at_the_end(locks: LockClient, redis: Redis) -> None:
    """Freed by somebody who wakes nobody, between its polls: it is got at the end."""
    await others_hold(redis)
    with wire.Watch() as watch:
        waiting = asyncio.create_task(locks.lock("a").acquire(wait_timeout=0.6))
        await until(lambda: queued(redis, 1))
        await asyncio.sleep(0.3)  # the polls of its beginning are over
        await redis.delete(key_of("a"))
        assert await (await waiting).release()
    assert 0.6 <= watch.s < 0.6 + LAST_TRY_S + SLACK_S


async def test_last_try_is_awaited_for_a_tenth_of_a_second(
    server: LockServer, redis: Redis
) -> None:
    """Its answer counts if it comes by then; if not, what it took is given back."""

    async def try_last(name: str, delay_s: float, *, is_got: bool) -> None:
        async with ChaosProxy(server.port) as proxy, LockClient.from_url(proxy.url) as locks:
            await warmed(locks)
            await others_hold(redis, name)
            with wire.Watch() as watch:
                trying = asyncio.create_task(locks.lock(name).try_acquire(wait_timeout=0.5))
                await until(lambda: queued(redis, 1, name))
                await subscribed(locks)
                await redis.delete(key_of(name))
                proxy.delay_replies(delay_s, wire.sha("acquire"))
                lease = await trying
            assert 0.5 <= watch.s < 0.5 + LAST_TRY_S + SLACK_S
            assert (lease is not None) == is_got
            if lease is not None:
                assert await lease.release()
            proxy.heal()

    await wire.at_once(
        {
            "in time": try_last("in time", 0.03, is_got=True),
            "too late": try_last("too late", 0.8, is_got=False),
        }
    )
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_last_try_is_made_where_a_request_took_all_of_the_time(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The first reply comes just too late; the last try finds that the lock is ours."""
    locks = await warmed(make_client(proxy.url))
    late = proxy.delay_replies(0.43, wire.sha("acquire"), 1)
    lease = await locks.lock("a").acquire(wait_timeout=0.4)
    assert late.hits == 1
    assert await lease.release()


# Servers that come back.


async def come_back_by_heal(server: LockServer, proxy: ChaosProxy) -> None:
    """A black hole that ends; what it held is delivered."""
    proxy.black_hole()
    await asyncio.sleep(AWAY_S)
    proxy.heal()


async def come_back_by_reset(server: LockServer, proxy: ChaosProxy) -> None:
    """A black hole that ends with the connections that it swallowed."""
    proxy.black_hole()
    await asyncio.sleep(AWAY_S)
    proxy.heal(deliver=False)


async def come_back_by_resume(server: LockServer, proxy: ChaosProxy) -> None:
    """SIGSTOP, SIGCONT."""
    server.pause()
    await asyncio.sleep(AWAY_S)
    server.resume()


async def come_back_by_restart(server: LockServer, proxy: ChaosProxy) -> None:
    """SIGKILL, nothing for a while, and a new one: empty."""
    server.kill()
    await asyncio.sleep(AWAY_S)
    server.restart()


async def come_back_by_listening(server: LockServer, proxy: ChaosProxy) -> None:
    """Connections are refused for a while."""
    async with refusing(server, proxy):
        await asyncio.sleep(AWAY_S)


comebacks = pytest.mark.parametrize(
    "come_back",
    [
        come_back_by_heal,
        come_back_by_reset,
        come_back_by_resume,
        come_back_by_restart,
        come_back_by_listening,
    ],
)
ComeBack = Callable[[LockServer, ChaosProxy], Any]


@comebacks
async def test_acquiring_rides_out_a_server_that_comes_back(
    make_client: MakeClient,
    server: LockServer,
    proxy: ChaosProxy,
    redis: Redis,
    come_back: ComeBack,
) -> None:
    """Begun before or meanwhile, with a time limit or none: all are granted soon after."""
    await others_hold(redis, "held", ms=300)
    locks = await warmed(make_client(proxy.url))
    waiting = waits(locks, 5, "held", ttl=5)
    await until(lambda: queued(redis, 5, "held"))
    away = asyncio.create_task(come_back(server, proxy))
    await asyncio.sleep(0)
    acquiring = [
        asyncio.create_task(locks.lock(f"a{i}").acquire(wait_timeout=3 if i % 2 else None))
        for i in range(5)
    ]
    await away
    with wire.Watch() as watch:
        leases = await asyncio.gather(*acquiring)
    assert watch.s < 1 + SLACK_S  # the longest pause between two tries
    assert [lease.is_held for lease in leases] == [True] * 5
    assert await asyncio.gather(*(lease.release() for lease in leases)) == [True] * 5
    tokens = []
    for task in asyncio.as_completed(waiting, timeout=6):
        lease = await task
        tokens.append(lease.fencing_token)
        await lease.release()
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 5


# What comes out: the table of design §3.


async def test_wait_that_was_answered_lately_ends_with_what_it_was_told(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Holder, ttl left and waiters of the last answer, younger than the bound."""
    locks = await warmed(make_client(proxy.url, request_timeout=0.4))
    theirs = await make_client(label="them").lock("a", ttl=5).acquire()
    others = waits(make_client(), 2)
    await until(lambda: queued(redis, 2))
    waiting = asyncio.create_task(locks.lock("a", ttl=1).acquire(wait_timeout=0.6))
    await until(lambda: queued(redis, 3))
    await subscribed(locks)
    proxy.black_hole()
    with pytest.raises(LockTimeout) as caught:
        await waiting
    assert caught.value.holder is not None
    assert caught.value.holder.startswith("them:")
    assert caught.value.ttl_left is not None
    assert 3 < caught.value.ttl_left <= 5
    assert caught.value.waiters == 3
    assert isinstance(caught.value, TimeoutError)
    proxy.heal()
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await theirs.release()


async def test_wait_whose_last_answer_is_old_ends_with_server_unreachable(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Older than `request_timeout` + alive/3 (0.2 + 0.33 s): nobody knows who holds it now."""
    locks = await warmed(make_client(proxy.url, request_timeout=0.2))
    await others_hold(redis)
    waiting = asyncio.create_task(locks.lock("a", ttl=1).acquire(wait_timeout=0.8))
    await until(lambda: queued(redis, 1))
    proxy.black_hole()
    with pytest.raises(ServerUnreachable) as caught:
        await waiting
    assert isinstance(caught.value, ConnectionError)
    proxy.heal()


@pytest.mark.parametrize("fault", [black_holed, refusing])
async def test_wait_for_ever_ends_after_thirty_seconds_of_silence(
    make_client: MakeClient,
    server: LockServer,
    proxy: ChaosProxy,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
) -> None:
    """Not before, whether or not there was an answer at first; here with a shorter patience."""
    assert _waiting.PATIENCE_S == 30
    monkeypatch.setattr(_waiting, "PATIENCE_S", 0.6)
    locks = await warmed(make_client(proxy.url, request_timeout=0.2))
    await others_hold(redis)

    async def lose_patience(waiting: asyncio.Task[Lease]) -> None:
        with wire.Watch() as watch, pytest.raises(ServerUnreachable):
            await waiting
        assert watch.s >= 0.6 - 0.05
        # The last poll before, and the one at the end, may each take `request_timeout`.
        assert watch.s < 0.6 + 2 * 0.2 + 0.34 + SLACK_S

    (refused,) = waits(locks, ttl=1)
    await until(lambda: queued(redis, 1))
    async with fault(server, proxy):
        (unanswered,) = waits(locks, 1, "b", ttl=1)
        await wire.at_once(
            {"refused": lose_patience(refused), "unanswered": lose_patience(unanswered)}
        )


async def test_wait_for_ever_is_never_told_that_the_lock_is_held(
    make_client: MakeClient,
    server: LockServer,
    proxy: ChaosProxy,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`LockTimeout` is the end of a time that was set; here only silence ends the wait.

    `request_timeout` + alive/3 is longer than the patience, as with a `request_timeout` of 30 s.
    """
    monkeypatch.setattr(_waiting, "PATIENCE_S", 0.5)
    locks = await warmed(make_client(proxy.url, request_timeout=3))
    await others_hold(redis)
    waiting = asyncio.create_task(locks.lock("a", ttl=1).acquire(wait_timeout=None))
    await until(lambda: queued(redis, 1))
    async with refusing(server, proxy):
        with pytest.raises(ServerUnreachable):
            await waiting


async def test_wait_for_ever_outlasts_the_patience_while_the_server_answers(
    make_client: MakeClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty seconds are the bound of silence, not of waiting."""
    monkeypatch.setattr(_waiting, "PATIENCE_S", 0.35)
    await others_hold(redis)
    (waiting,) = waits(make_client(), ttl=1)
    await asyncio.sleep(0.8)
    assert not waiting.done()
    await redis.delete(key_of("a"))
    assert await (await waiting).release()


# Backoff.


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.999])
@pytest.mark.parametrize(
    "backoff",
    [
        Backoff(),
        Backoff(initial=0.1, factor=3, maximum=5, jitter=0),
        Backoff(initial=2, factor=1, maximum=2, jitter=1),
    ],
    ids=repr,
)
def test_backoff_pause_is_the_formula(backoff: Backoff, chance: float) -> None:
    """Pause k: `min(maximum, initial * factor**k)` times a random number in [1 - jitter, 1]."""
    for k in range(12):
        longest = min(backoff.maximum, backoff.initial * backoff.factor**k)
        pause = backoff.pause(k, chance)
        assert pause == pytest.approx(longest * (1 - backoff.jitter * chance))
        assert longest * (1 - backoff.jitter) <= pause <= longest


def test_backoff_pause_of_a_very_long_wait_is_the_maximum() -> None:
    """The power overflows long before a patient waiter gives up."""
    assert Backoff(factor=10, maximum=3, jitter=0).pause(10_000, 0.0) == 3
    assert Backoff(jitter=0).pause(0, 0.5) == 0.05


async def test_backoff_waiter_polls_at_its_pauses_at_a_third_of_its_liveness_and_at_the_end(
    server: LockServer, redis: Redis
) -> None:
    """It never subscribes, and pauses that would cost it its place are cut."""
    growing = Backoff(initial=0.1, factor=2, maximum=0.4, jitter=0)
    slow = Backoff(initial=10, maximum=10, jitter=0)
    await wire.at_once(
        {
            "0.1, 0.2, 0.4 and what is left": poll_in_vain(
                server, redis, "growing", growing, 30, 1.0, [0.1, 0.2, 0.4, 0.3]
            ),
            "a third of a second and what is left": poll_in_vain(
                server, redis, "slow", slow, 0.5, 0.8, [0.333, 0.333, 0.133]
            ),
            "what is left": poll_in_vain(server, redis, "short", slow, 30, 0.3, [0.3]),
        }
    )


def assert_pauses(polls: list[float], expected: list[float]) -> None:
    """One poll for each pause and one before; none early, none later than a load explains.

    The last one is cut by the end of the wait, so it is shorter where the others were late.
    """
    pauses = [after - before for before, after in itertools.pairwise(polls)]
    assert len(pauses) == len(expected)
    for pause, least in zip(pauses[:-1], expected, strict=False):
        assert least - 0.01 <= pause < least + SLACK_S
    assert sum(expected) - 0.01 <= polls[-1] < sum(expected) + SLACK_S


async def poll_in_vain(
    server: LockServer,
    redis: Redis,
    name: str,
    retry: Backoff,
    ttl: float,
    wait_timeout: float,
    pauses: list[float],
) -> None:
    """Wait until the end, and look at what the server was asked, and when."""
    async with ChaosProxy(server.port) as proxy, LockClient.from_url(proxy.url) as locks:
        await warmed(locks)
        await others_hold(redis, name)
        log = wire.logged(proxy)
        with pytest.raises(LockTimeout):
            await locks.lock(name, ttl=ttl, retry=retry).acquire(wait_timeout=wait_timeout)
        await locks.aclose()
        assert log["SUBSCRIBE"] == 0
        seen = [at for at, command in log.seen if command == "EVALSHA"]
        # The last one is the clean-up.
        assert_pauses([at - seen[0] for at in seen[:-1]], pauses)


async def test_waiters_of_both_kinds_are_served_in_order_of_arrival(
    make_client: MakeClient, redis: Redis
) -> None:
    """Hand-off and backoff, of three clients, in one queue."""
    first = await make_client().lock("a").acquire()
    clients = [make_client() for _ in range(3)]
    order: list[int] = []

    async def wait(i: int) -> None:
        retry = Backoff(maximum=0.1) if i % 2 else None
        async with clients[i % 3].lock("a", retry=retry).acquire(wait_timeout=8):
            order.append(i)

    async with asyncio.TaskGroup() as group:
        for i in range(9):
            group.create_task(wait(i))
            await until(lambda i=i: queued(redis, i + 1))  # type: ignore[misc]
        await first.release()
    assert order == list(range(9))


# What waiting costs.


async def test_idle_waiters_cost_little(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Fifty of ttl 6 s: at most 0.6 commands per second and waiter, over two connections."""
    locks = await warmed(make_client(proxy.url))
    await others_hold(redis)
    waiting = waits(locks, 50, ttl=6)
    await until(lambda: queued(redis, 50))
    await subscribed(locks)
    before, connections = proxy.requests.total(), proxy.connections
    with wire.Watch() as watch:
        await asyncio.sleep(4.2)
    rate = (proxy.requests.total() - before) / watch.s / 50
    print(f"idle waiters: {rate:.2f} commands per second and waiter (50 for {watch.s:.1f} s)")
    assert 0.3 < rate <= 0.6
    assert (connections, proxy.connections) == (2, 2)
    await cancelled(waiting)


async def cancelled(tasks: list[Any]) -> None:
    """Cancel them, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@asynccontextmanager
async def dropping(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[None]:
    """Connections are accepted and logged in, and reset at the first script."""
    proxy.drop_replies(1_000_000, b"EVAL", close=True)
    proxy.kill_connections("commands")
    try:
        yield
    finally:
        proxy.heal()


async def test_server_in_trouble_is_not_stormed_by_its_waiters(
    server: LockServer, redis: Redis
) -> None:
    """A hundred waiters connect no oftener than a few would: twenty times a second at most."""

    async def count_connects(fault: Fault, name: str) -> None:
        async with ChaosProxy(server.port) as proxy, LockClient.from_url(proxy.url) as locks:
            await warmed(locks)
            await others_hold(redis, name)
            waiting = waits(locks, 100, name)
            await until(lambda: queued(redis, 100, name))
            await subscribed(locks)
            before = proxy.connections
            async with fault(server, proxy):
                with wire.Watch() as watch:
                    await asyncio.sleep(1.2)
                rate = (proxy.connections - before) / watch.s
            await redis.delete(key_of(name))
            first = await asyncio.wait_for(waiting[0], 3)
            await cancelled(waiting[1:])
            await first.release()
            print(f"{name} server: {rate:.0f} connects per second, for 100 waiters")
            assert 1 < rate <= 20

    cases = {"refusing": refusing, "dropping": dropping}
    await wire.at_once({name: count_connects(fault, name) for name, fault in cases.items()})


async def test_inbox_that_is_cut_again_and_again_is_no_storm(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Something between us and the server closes each subscription: pauses grow."""
    await others_hold(redis)
    locks = await warmed(make_client(proxy.url))
    waiting = waits(locks, 20)
    await until(lambda: queued(redis, 20))
    await subscribed(locks)
    log = wire.logged(proxy)
    with wire.Watch() as watch:
        while watch.s < 1.2:
            proxy.kill_connections("inbox")
            await asyncio.sleep(0.01)
    subscriptions, polls = log["SUBSCRIBE"], log["EVALSHA"] / 20
    await cancelled(waiting)
    print(f"cut inbox: {subscriptions} subscriptions, {polls:.0f} polls each in {watch.s:.1f} s")
    assert 2 <= subscriptions <= 10
    assert polls <= 25


async def test_client_that_may_not_subscribe_connects_no_oftener_for_many_waits(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A new try for each short wait would be a connection per acquisition."""
    async with refused_subscriber(redis) as user:
        locks = make_client(f"redis://{user}@127.0.0.1:{proxy.port}")
        await warmed(locks)
        before = proxy.connections
        with wire.Watch() as watch:
            for _ in range(20):
                async with locks.lock("a"):
                    assert await locks.lock("a").try_acquire(wait_timeout=0.03) is None
        assert proxy.connections - before <= 2 + 4 * watch.s
        await locks.aclose()


# The inbox.


@asynccontextmanager
async def refused_subscriber(redis: Redis, *rules: str) -> AsyncIterator[str]:
    """A user who may do all but subscribe, as ``name:password``."""
    await wire.command(
        redis,
        *("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "&*", "+@all"),
        *(rules or ("-subscribe",)),
    )
    try:
        yield "deaf:pw"
    finally:
        await wire.command(redis, "ACL", "DELUSER", "deaf")


@pytest.mark.parametrize("rules", [("-subscribe",), ("resetchannels",)], ids=" ".join)
async def test_waiters_without_the_right_to_subscribe_poll_with_one_warning(
    make_client: MakeClient,
    proxy: ChaosProxy,
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
    rules: tuple[str, ...],
) -> None:
    """Five waiters, one warning, and everyone is served."""
    async with refused_subscriber(redis, *rules) as user:
        locks = make_client(f"redis://{user}@127.0.0.1:{proxy.port}")
        theirs = await make_client().lock("a").acquire()
        waiting = waits(locks, 5)
        await until(lambda: queued(redis, 5))
        await until(lambda: proxy.requests["SUBSCRIBE"] >= 2)
        await theirs.release()
        with wire.Watch() as watch:
            for task in waiting:
                assert await (await task).release()
        assert watch.s < 1 + SLACK_S
        warnings = [text for text in wire.warnings_of(caplog) if "no hand-off messages" in text]
        assert len(warnings) == 1
        await locks.aclose()


async def test_deaf_inbox_is_found_out_and_replaced_with_one_warning(
    make_client: MakeClient,
    proxy: ChaosProxy,
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half-open: the hand-off is found by a poll, a PING is not answered, messages come again."""
    others = make_client()
    locks = await warmed(make_client(proxy.url, request_timeout=0.4))
    short, long = await others.lock("a").acquire(), await others.lock("b").acquire()
    (soon,), late = waits(locks, ttl=1), waits(locks, 3, "b", ttl=30)
    await until(lambda: queued(redis, 3, "b"))
    await subscribed(locks)
    assert proxy.half_open_inboxes() == 1
    log = wire.logged(proxy)
    with wire.Watch() as watch:
        await short.release()
        lease = await soon
    assert watch.s < 0.34 + SLACK_S  # at its poll, a third of its liveness later at most
    assert await lease.release()
    await until(lambda: log["SUBSCRIBE"] == 1)
    assert log["PING"] == 1
    await subscribed(locks)
    # The new one hears: the polls of these waiters are up to two seconds apart.
    with wire.Watch() as watch:
        await long.release()
        for task in late:
            assert await (await task).release()
    assert watch.s < SLACK_S
    assert len(wire.warnings_of(caplog)) == 1


async def test_message_lost_on_a_healthy_inbox_costs_a_ping_and_no_warning(
    make_client: MakeClient,
    server: LockServer,
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The inbox answers that it hears, in RESP2 and in RESP3: it is kept."""

    async def lose_one(protocol: int) -> None:
        name = f"resp{protocol}"
        async with (
            ChaosProxy(server.port) as proxy,
            LockClient.from_url(f"{proxy.url}?protocol={protocol}", request_timeout=0.4) as locks,
        ):
            await warmed(locks)
            theirs = await make_client().lock(name).acquire()
            (waiting,) = waits(locks, 1, name, ttl=1)
            await until(lambda: queued(redis, 1, name))
            await subscribed(locks)
            log = wire.logged(proxy)
            lost = proxy.drop_messages(1)
            await theirs.release()
            lease = await waiting
            assert lost.hits == 1
            await asyncio.sleep(0.5)  # longer than the answer to a PING may take
            assert (log["PING"], log["SUBSCRIBE"]) == (1, 0)
            assert await lease.release()

    await wire.at_once({f"RESP{protocol}": lose_one(protocol) for protocol in (2, 3)})
    assert wire.warnings_of(caplog) == []


@pytest.mark.parametrize("kind", ["inbox", "commands"])
async def test_waiters_poll_once_after_a_connection_was_lost(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, kind: Any
) -> None:
    """Whatever was said meanwhile is not missed, and the server is not flooded."""
    await others_hold(redis)
    locks = await warmed(make_client(proxy.url))
    waiting = waits(locks, 20)
    await until(lambda: queued(redis, 20))
    await subscribed(locks)
    log = wire.logged(proxy)
    assert proxy.kill_connections(kind) == 1
    if kind == "inbox":
        await until(lambda: log["SUBSCRIBE"] == 1)
        await until(lambda: log.after_last("SUBSCRIBE").count("EVALSHA") >= 20, 0.5)
    await until(lambda: log["EVALSHA"] >= 20, 0.5)
    await asyncio.sleep(0.3)
    assert log["EVALSHA"] <= 60
    assert log["HELLO"] == 1
    await cancelled(waiting)


async def test_waiter_misses_no_hand_off_while_a_connection_is_lost(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """Released in the very moment: it has the lock long before its next poll, 2 s away."""
    others = make_client()

    async def hand_over(kind: Any) -> None:
        name = f"lost: {kind}"
        async with ChaosProxy(server.port) as proxy, LockClient.from_url(proxy.url) as locks:
            await warmed(locks)
            for _ in range(4):
                theirs = await others.lock(name).acquire()
                (waiting,) = waits(locks, 1, name)
                await until(lambda: queued(redis, 1, name))
                await subscribed(locks)
                proxy.kill_connections(kind)
                await theirs.release()
                with wire.Watch() as watch:
                    lease = await waiting
                assert watch.s < 0.7 + SLACK_S
                grant = f"{lease.owner_token}/{lease.fencing_token}"
                assert await redis.get(key_of(name)) == grant
                assert await lease.release()

    await wire.at_once({str(kind): hand_over(kind) for kind in ("inbox", "commands", None)})


# The holder's end.


async def test_head_gets_a_crashed_holders_lock_when_it_expires(
    make_client: MakeClient, redis: Redis
) -> None:
    """Not a poll interval (2 s) later."""
    await others_hold(redis, ms=700)
    locks = make_client()
    waiting = waits(locks, 2)
    await until(lambda: queued(redis, 2))
    left_s = int(await redis.pttl(key_of("a"))) / 1000
    with wire.Watch() as watch:
        first, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert first == {waiting[0]}
    assert left_s - 0.05 < watch.s < left_s + SLACK_S
    assert await (await waiting[0]).release()
    assert await (await waiting[1]).release()


async def test_head_gets_the_lock_of_a_holder_that_extended_and_then_crashed(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Its last extension counts, and no more than its ttl and a poll interval pass."""
    crashing = make_client(proxy.url)
    lease = await crashing.lock("a", ttl=0.9).acquire()
    (waiting,) = waits(make_client(), ttl=1)
    await until(lambda: queued(redis, 1))
    await until(lambda: extended(redis, lease))
    proxy.black_hole()
    died_at = time.monotonic()
    theirs = await waiting
    took = time.monotonic() - died_at
    assert took < 0.9 + 0.34 + SLACK_S
    assert theirs.fencing_token > lease.fencing_token
    await theirs.release()
    proxy.heal()
    assert await lease.wait_lost() is not None


async def extended(redis: Redis, lease: Lease) -> bool:
    """Whether the key has just been given its full life again, for the second time."""
    left = int(await redis.pttl(key_of(lease.name)))
    return lease.ttl * 1000 - left < 20 and lease.remaining > 0.85
