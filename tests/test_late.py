"""What arrives late or twice: hand-off messages, requests, grants after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, LockClient, LostReason, ServerUnreachable, _names
from aiodlock._store._api import Acquisition, NoAnswer
from aiodlock._waiting import Wait
from tests.by_hand import A, ByHand, D, client_id
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.mutants import Mutant, function_mutant, sha_of
from tests.proxy import ChaosProxy
from tests.until import until


@dataclass(frozen=True)
class World:
    """What a check may use; `locks` is a client behind the proxy."""

    name: ByHand
    proxy: ChaosProxy
    locks: LockClient


Check: TypeAlias = Callable[[World], Awaitable[None]]


@pytest.fixture
async def world(redis: Redis, proxy: ChaosProxy, make_client: MakeClient) -> World:
    """An empty server that has every script, and one client."""
    locks = make_client(proxy.url)
    async with locks.lock("warm up") as lease:
        await lease.extend()
    await redis.flushall()
    return World(ByHand(redis), proxy, locks)


@asynccontextmanager
async def waiter(world: World, ttl: float) -> AsyncIterator[tuple[asyncio.Task[Lease], str]]:
    """Waits behind A, hears messages, and has polled since it does; with its owner token."""
    await world.name.granted(A)
    polls = counted(world.proxy)
    waiting = asyncio.create_task(world.locks.lock("name", ttl=ttl).acquire())
    await until(lambda: is_heard(world.name))
    await until(lambda: polls() >= 2)
    (token,) = (await world.name.state()).queue
    try:
        yield waiting, token
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            await waiting.result().release()


# A hand-off message that is delivered late must not make two holders.


async def check_message_older_than_another_grant_is_not_trusted(world: World) -> None:
    """Meanwhile its grant was over, and D got the lock: the poll that told so is newer."""
    async with waiter(world, ttl=0.3) as (waiting, token):
        world.proxy.drop_messages(1)  # for it comes later
        handed = await world.name.hand_over(A, token)
        await world.name.let_expire()
        last = (await world.name.granted(D)).fencing_token
        await until(lambda: is_queued(world.name, token))  # by timer: it was told of D's grant
        polls = counted(world.proxy)
        await deliver(world.name, token, handed)
        await until(lambda: waiting.done() or polls() >= 2)
        assert (await world.name.state()).value == f"{D}/{last}"
        assert not waiting.done(), "two holders"
        await world.name.release(D)
        assert (await waiting).fencing_token > last


async def check_message_to_one_who_may_count_as_dead_is_not_trusted(world: World) -> None:
    """The answer that says when it polled last takes longer than it counts as alive after it."""
    async with waiter(world, ttl=0.3) as (waiting, token):
        since_ms = await world.name.now_ms()
        late = world.proxy.delay_replies(1.1, sha_of("acquire"), n=1)
        await until(lambda: late.hits)
        await until(lambda: has_polled(world.name, token, since_ms))
        await world.name.hand_over(A, token)
        await world.name.let_expire()
        await world.name.granted(D)
        polls = counted(world.proxy)
        await until(lambda: waiting.done() or polls())
        assert not waiting.done(), "two holders"
        await world.name.release(D)
        await waiting


async def check_message_that_leaves_little_time_is_confirmed(world: World) -> None:
    """It still holds, but for less than a third of what a waiter has: it polls once more."""
    async with waiter(world, ttl=0.3) as (waiting, token):
        since_ms = await world.name.now_ms()
        late = world.proxy.delay_replies(0.75, sha_of("acquire"), n=1)
        await until(lambda: late.hits)
        await until(lambda: has_polled(world.name, token, since_ms))
        polls = counted(world.proxy)
        await world.name.release(A)
        await waiting
        assert polls() == 1


async def check_poll_over_a_lost_connection_does_not_count(world: World) -> None:
    """Another server may stand behind the new one: a message is trusted after its next answer."""
    async with waiter(world, ttl=30.0) as (waiting, token):
        lost = world.proxy.drop_replies(3, sha_of("acquire"), close=True)
        world.proxy.kill_connections("commands")
        await world.name.hand_over(A, token)
        await waiting
        assert lost.hits == 3, "it did not wait for an answer"


def rule(text: str, instead: str = "True") -> AbstractContextManager[None]:
    """One of the rules by which a waiter trusts a message, put out."""
    return function_mutant(Wait, "_take_hand_over", text, instead)


RULES: list[tuple[Check, str]] = [
    (
        check_message_older_than_another_grant_is_not_trusted,
        "value.fencing_token > self._largest_seen",
    ),
    (
        check_message_to_one_who_may_count_as_dead_is_not_trusted,
        "deadline - _clock.now() >= _clock.poll_interval(self._alive)",
    ),
    (
        check_message_that_leaves_little_time_is_confirmed,
        "deadline - _clock.now() >= _clock.poll_interval(self._alive)",
    ),
    (check_poll_over_a_lost_connection_does_not_count, "self._store.is_current(refused.link)"),
]


@pytest.mark.parametrize("check", [check for check, _ in RULES], ids=lambda check: check.__name__)
async def test_waiter_that_gets_an_old_message_asks_the_server(world: World, check: Check) -> None:
    """Each rule by which a message is trusted."""
    await check(world)


@pytest.mark.parametrize(("check", "text"), RULES, ids=lambda value: getattr(value, "__name__", ""))
async def test_waiter_without_the_rule_is_noticed(world: World, check: Check, text: str) -> None:
    """Each check fails without its rule."""
    with rule(text), pytest.raises(AssertionError):
        await check(world)


async def test_message_in_time_starts_the_body_at_once(world: World) -> None:
    """The other side of the rules: one round trip per hand-off, and no poll to confirm it."""
    async with waiter(world, ttl=30.0) as (waiting, token):
        polls = counted(world.proxy)
        handed = await world.name.hand_over(A, token)
        lease = await waiting
        assert (polls(), f"{token}/{lease.fencing_token}") == (0, handed)
        assert 2.0 <= lease.remaining <= 6.0


async def test_message_without_a_watchdog_is_confirmed_for_the_full_ttl(world: World) -> None:
    """With `auto_extend=False` nobody else would make a hand-off last."""
    await world.name.granted(A)
    lock = world.locks.lock("name", ttl=30.0, auto_extend=False)
    polls = counted(world.proxy)
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: is_heard(world.name))
    await until(lambda: polls() >= 2)
    await world.name.release(A)
    lease = await waiting
    assert 25.0 < lease.remaining <= 30.0
    await lease.release()


async def test_hand_off_to_nobody_is_given_back(world: World) -> None:
    """A message names a token of ours that neither waits nor holds: the next one gets the lock."""
    async with waiter(world, ttl=30.0) as (waiting, token):
        gone = f"{token.rpartition(':')[0]}:999"
        await world.name.redis.set(world.name.keys.lock, f"{gone}/5", px=30_000)
        await deliver(world.name, token, f"{gone}/5")
        async with asyncio.timeout(5.0):  # not the 30 s for which it was granted
            await waiting
        # A message that was merely late makes nobody pay for a tombstone.
        assert f"!{gone}" not in await world.name.redis.zrange(world.name.keys.alive, 0, -1)


async def test_hand_off_to_one_given_up_without_an_answer_leaves_a_tombstone(world: World) -> None:
    """A copy of its acquire may still be under way: it must not come back after the hand-off."""
    async with waiter(world, ttl=30.0) as (waiting, token):
        store = world.locks._session.store  # type: ignore[union-attr]
        gone = Acquisition("name", world.name.keys, f"{token.rpartition(':')[0]}:999", asked=[77])
        with pytest.raises(NoAnswer):
            await store.release(gone, within=0.0)
        await world.name.redis.set(world.name.keys.lock, f"{gone.token}/5", px=30_000)
        await deliver(world.name, token, f"{gone.token}/5")
        async with asyncio.timeout(5.0):
            await waiting
        assert f"!{gone.token}" in await world.name.redis.zrange(world.name.keys.alive, 0, -1)


# An acquire that arrives after its release must not leave a ghost.


@asynccontextmanager
async def nothing_after_all_is_delivered(world: World) -> AsyncIterator[None]:
    """At the end: every request has reached the server, and only a tombstone is left."""
    stats = world.name.redis
    await stats.config_resetstat()
    before = world.proxy.requests["EVALSHA"]
    yield

    async def all_delivered() -> bool:
        info = await stats.info("commandstats")
        calls = info.get("cmdstat_evalsha", {}).get("calls", 0)
        return bool(calls == world.proxy.requests["EVALSHA"] - before)

    await until(all_delivered)
    left = await leftovers(world.name.redis, ignoring_tombstones=True)
    holder = (await world.name.state()).holder
    assert (left, holder) in (([], None), ([world.name.keys.lock], A)), "a ghost"


async def check_ghost_of_a_cancelled_waiter(world: World, *, held: bool) -> None:
    """Its acquire is stuck, its connection dies, it is cancelled; then the acquire gets through."""
    async with nothing_after_all_is_delivered(world):
        if held:
            await world.name.granted(A)
        late = world.proxy.delay_requests(0.6, sha_of("acquire"))
        acquiring = asyncio.create_task(world.locks.lock("name").acquire())
        await until(lambda: late.hits)
        world.proxy.kill_connections("commands")
        acquiring.cancel()
        await asyncio.wait([acquiring])


async def check_ghost_of_a_waiter_whose_time_is_over(world: World, *, held: bool) -> None:
    """Its connection lives but is stuck: the release goes by another one."""
    async with nothing_after_all_is_delivered(world):
        if held:
            await world.name.granted(A)
        world.proxy.delay_requests(0.6, sha_of("acquire"))
        with pytest.raises(ServerUnreachable):
            await world.locks.lock("name").acquire(wait_timeout=0.1)


async def check_ghost_of_a_lease(world: World) -> None:
    """It was asked for twice, over two connections; the first copy comes when all is over."""
    async with nothing_after_all_is_delivered(world):
        late = world.proxy.delay_requests(0.6, sha_of("acquire"))
        acquiring = asyncio.create_task(world.locks.lock("name").acquire())
        await until(lambda: late.hits)
        world.proxy.kill_connections("commands")
        lease = await acquiring
        assert late.hits == 1
        await lease.release()


GHOSTS: dict[str, Check] = {
    "cancelled, free": lambda world: check_ghost_of_a_cancelled_waiter(world, held=False),
    "cancelled, held": lambda world: check_ghost_of_a_cancelled_waiter(world, held=True),
    "timed out, free": lambda world: check_ghost_of_a_waiter_whose_time_is_over(world, held=False),
    "timed out, held": lambda world: check_ghost_of_a_waiter_whose_time_is_over(world, held=True),
    "lease": check_ghost_of_a_lease,
}

NOT_HEEDED = Mutant(
    "acquire", "if redis.call('ZSCORE', KEYS[4], '!' .. token) then", "if false then"
)
NOT_LEFT = Mutant("release", "if ARGV[2] == '1' then", "if false then")


@pytest.mark.parametrize("check", GHOSTS.values(), ids=GHOSTS)
async def test_acquire_that_arrives_after_its_release_leaves_no_ghost(
    world: World, check: Check
) -> None:
    """Neither a lock nor a place in the queue: a tombstone refuses it."""
    await check(world)
    (tombstone,) = (await world.name.state()).alive
    assert tombstone.startswith("!")


@pytest.mark.parametrize(
    ("ghost", "mutant"),
    [*((ghost, NOT_HEEDED) for ghost in GHOSTS), ("lease", NOT_LEFT)],
    ids=lambda value: value if isinstance(value, str) else value.script,
)
async def test_ghost_without_a_tombstone_is_noticed(
    world: World, ghost: str, mutant: Mutant
) -> None:
    """Each check fails without it."""
    with mutant.applied(), pytest.raises(AssertionError, match="a ghost"):
        async with warmed_up(world):
            await GHOSTS[ghost](world)


async def test_acquire_and_release_over_one_connection_need_no_tombstone(world: World) -> None:
    """Their order is enough, and the name stays on its fast path."""
    calls = counted(world.proxy)
    late = world.proxy.delay_requests(0.2, sha_of("acquire"))
    acquiring = asyncio.create_task(world.locks.lock("name").acquire())
    await until(lambda: late.hits)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    await until(lambda: is_granted_once(world.name))
    assert await leftovers(world.name.redis) == []
    assert calls() == 2, "an abandoned acquire is never sent again"


async def test_acquire_abandoned_before_noscript_is_not_sent_again(world: World) -> None:
    """The server has lost its scripts, and says so after the caller has left."""
    text = world.proxy.delay_requests(0.0, b"live_head", n=None)
    await world.name.redis.script_flush()
    late = world.proxy.delay_replies(0.2, sha_of("acquire"), n=1)
    acquiring = asyncio.create_task(world.locks.lock("name").acquire())
    await until(lambda: late.hits)
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring
    assert await leftovers(world.name.redis) == []
    assert text.hits == 0
    async with world.locks.lock("name"):
        assert text.hits == 1


# A token that is granted a second time, by a queue that a failover brought back.


@pytest.mark.parametrize("by_hand_off", [True, False])
async def test_token_granted_twice_is_lost_and_given_back(
    world: World, *, by_hand_off: bool
) -> None:
    """Its holder sees by the fencing token that this is not its grant; its release frees it."""
    lease = await world.locks.lock("name", ttl=30.0).acquire()
    # The new primary does not know of the grant, but still has the waiter that it was made to.
    await world.name.let_expire()
    now_ms = await world.name.now_ms()
    for key, score in ((world.name.keys.queue, 1), (world.name.keys.alive, now_ms + 5000)):
        await world.name.redis.zadd(key, {lease.owner_token: score})
        await world.name.redis.expire(key, 12)
    if by_hand_off:
        await world.name.redis.set(world.name.keys.lock, f"{A}/1", px=30_000)
        await world.name.release(A, client_id=client_id(A))
    await world.name.refused(D)
    state = await world.name.state()
    assert state.holder == lease.owner_token
    assert state.value != f"{lease.owner_token}/{lease.fencing_token}"
    with pytest.raises(LeaseLostError) as lost:
        await lease.extend()
    assert lost.value.reason is LostReason.STOLEN
    assert await lease.release() is True
    state = await world.name.state()
    assert (state.holder, state.queue) == (D, [])


async def test_body_whose_token_is_granted_twice_is_told(world: World) -> None:
    """By its watchdog; the release at its end gives the second grant to the next."""
    with pytest.raises(LeaseLostError) as lost:
        async with world.locks.lock("name", ttl=0.6) as lease:
            await world.name.redis.set(
                world.name.keys.lock, f"{lease.owner_token}/{lease.fencing_token + 9}", px=30_000
            )
            await world.name.refused(D)
            await asyncio.sleep(10)
    assert lost.value.reason is LostReason.STOLEN
    assert (await world.name.state()).holder == D


def counted(proxy: ChaosProxy) -> Callable[[], int]:
    """How many script calls came from the client since: polls, while it only waits."""
    before = proxy.requests["EVALSHA"]
    return lambda: proxy.requests["EVALSHA"] - before


async def is_heard(name: ByHand) -> bool:
    """Whether somebody has subscribed to an inbox."""
    return bool(await name.redis.pubsub_channels("aiodlock:inbox:*"))


async def is_queued(name: ByHand, token: str) -> bool:
    """Whether it waits."""
    return token in (await name.state()).queue


async def has_polled(name: ByHand, token: str, since_ms: int) -> bool:
    """Whether a poll of this waiter, whose alive is 1 s, has reached the server since then."""
    return (await name.state()).alive[token] > since_ms + 1_000


async def is_granted_once(name: ByHand) -> bool:
    """Whether anybody ever held it."""
    return (await name.state()).fencing_token is not None


async def deliver(name: ByHand, token: str, handed: str) -> None:
    """The message of a hand-off, now."""
    channel = _names.inbox("aiodlock:", client_id(token))
    assert await name.redis.publish(channel, f"{handed} {name.keys.lock}") == 1


@asynccontextmanager
async def warmed_up(world: World) -> AsyncIterator[None]:
    """The server knows the scripts as they are now."""
    async with world.locks.lock("warm up"):
        pass
    await world.name.redis.flushall()
    yield
