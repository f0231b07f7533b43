"""Waiters are woken: whoever frees the lock, and whatever of the news is lost on its way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, LockClient, _names
from tests.by_hand import A, ByHand, C, D, client_id
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.mutants import sha_of
from tests.proxy import ChaosProxy
from tests.until import until

# A waiter of ttl 30 polls every 1.8 to 2 s by itself; one that is woken does not need half of that.
WOKEN_S = 0.9


@dataclass(frozen=True)
class World:
    """What a check may use; `locks` is a client behind the proxy that hears messages."""

    name: ByHand
    proxy: ChaosProxy
    locks: LockClient

    async def waiter(self, ttl: float = 30.0, place: int = 0) -> asyncio.Task[Lease]:
        """A task of `locks` that waits, and has polled since it hears messages."""
        waiting = asyncio.create_task(self.locks.lock("name", ttl=ttl).acquire())

        async def has_place() -> bool:
            return len((await self.name.state()).queue) == place + 1

        await until(has_place)
        return waiting


@pytest.fixture
async def world(redis: Redis, proxy: ChaosProxy, make_client: MakeClient) -> AsyncIterator[World]:
    """A server that has every script, and a client whose inbox stands before anything is tried."""
    locks = make_client(proxy.url)
    async with locks.lock("warm up") as lease:
        await lease.extend()
        waiting = asyncio.create_task(locks.lock("warm up").acquire())
        await until(lambda: is_subscribed(redis))
        await until(lambda: proxy.requests["EVALSHA"] >= 4)  # it has polled since
    await (await waiting).release()
    await redis.flushall()
    yield World(ByHand(redis), proxy, locks)
    proxy.heal()


@asynccontextmanager
async def woken() -> AsyncIterator[None]:
    """What happens inside is no timer's doing."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < WOKEN_S, "nobody was woken"


async def test_waiter_whose_message_overtakes_the_reply_is_granted_by_it(world: World) -> None:
    """It was queued, and handed the lock, before it was told that it must wait: one poll in all."""
    await world.name.granted(A)
    before = world.proxy.requests["EVALSHA"]
    late = world.proxy.delay_replies(0.3, sha_of("acquire"), n=1)
    waiting = await world.waiter()
    assert late.hits == 1
    await world.name.release(A)
    async with woken():
        lease = await waiting
    assert world.proxy.requests["EVALSHA"] - before == 1
    await lease.release()


async def test_waiter_whose_lock_is_freed_before_it_subscribed_is_woken_by_that(
    redis: Redis, proxy: ChaosProxy, make_client: MakeClient
) -> None:
    """Case 045: the release falls between the failed poll and the subscription."""
    locks = make_client(proxy.url)
    names = [ByHand(redis, f"name {n}") for n in range(10)]
    for name in names:
        await name.granted(A)
    held_back = proxy.delay_requests(1.0, b"SUBSCRIBE")
    waiting = [asyncio.create_task(locks.lock(f"name {n}", ttl=30.0).acquire()) for n in range(10)]
    await until(lambda: held_back.hits)
    assert not await is_subscribed(redis)
    # Each polls by itself with growing pauses meanwhile; nobody is told of these releases.
    await asyncio.sleep(0.9)
    for name in names:
        await name.release(A)
    await until(lambda: is_subscribed(redis))
    async with asyncio.timeout(0.4):
        leases = await asyncio.gather(*waiting)
    for lease in leases:
        await lease.release()


async def test_waiters_all_poll_when_their_connection_is_lost(world: World) -> None:
    """Whatever the server was asked or said meanwhile: each asks again, at once."""
    await world.name.granted(A)
    waiting = [await world.waiter(place=n) for n in range(3)]
    before = world.proxy.requests["EVALSHA"]
    async with woken():
        world.proxy.kill_connections("commands")
        await until(lambda: world.proxy.requests["EVALSHA"] - before >= 3)
    await world.name.release(A)
    for waiter in waiting:
        await (await waiter).release()


async def test_waiters_all_poll_when_the_inbox_was_lost_and_is_back(world: World) -> None:
    """Messages of meanwhile are lost: a release in that gap costs nobody a poll interval."""
    await world.name.granted(A)
    waiting = [await world.waiter(place=n) for n in range(3)]
    before = world.proxy.requests["EVALSHA"]
    world.proxy.kill_connections("inbox")
    await until(lambda: world.proxy.requests["EVALSHA"] - before >= 3, WOKEN_S)
    lost = world.proxy.drop_messages()
    world.proxy.kill_connections("inbox")
    await world.name.release(A)
    async with woken():
        lease = await waiting[0]
    assert lost.hits <= 1
    for waiter in waiting[1:]:
        await lease.release()
        lease = await waiter
    await lease.release()


@pytest.mark.parametrize("how", ["reset", "silent"])
async def test_waiter_of_the_client_whose_release_is_not_answered_is_woken(
    world: World, how: str
) -> None:
    """No message is sent to it, for the reply names it; and the reply is lost."""
    lease = await world.locks.lock("name").acquire()
    waiting = await world.waiter()
    messages = world.proxy.drop_messages()
    if how == "reset":
        lost = world.proxy.drop_replies(1, sha_of("release"), close=True)
    else:
        lost = world.proxy.delay_replies(0.5, sha_of("release"), n=1)
        releasing = asyncio.create_task(lease.release())
        await until(lambda: lost.hits)
        releasing.cancel()  # nobody waits for the reply
    async with woken():
        if how == "reset":
            assert await lease.release() is False  # the second copy, which found it gone
        await (await waiting).release()
    assert (lost.hits, messages.hits) == (1, 0)


async def test_waiter_of_the_releasing_client_is_woken_by_the_reply(world: World) -> None:
    """And by nothing else: there is no message, and no poll."""
    lease = await world.locks.lock("name").acquire()
    waiting = await world.waiter()
    messages = world.proxy.drop_messages()
    before = world.proxy.requests["EVALSHA"]
    async with woken():
        await lease.release()
        lease = await waiting
    assert world.proxy.requests["EVALSHA"] - before == 1
    assert messages.hits == 0
    await lease.release()


async def test_release_that_is_cancelled_wakes_the_next_of_the_same_client(world: World) -> None:
    """Its reply is read although its task has left."""
    lease = await world.locks.lock("name").acquire()
    waiting = await world.waiter()
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0)
    releasing.cancel()
    async with woken():
        await asyncio.wait([releasing])
        await (await waiting).release()


@pytest.mark.parametrize("alive_ms", [0, 6_000])
async def test_head_of_a_lock_freed_by_nobody_is_woken_by_any_poll(
    world: World, alive_ms: int
) -> None:
    """The lock expired, or a foreign client deleted it; another's poll hands it to the head."""
    await world.name.granted(A)
    waiting = await world.waiter()
    await world.name.let_expire()
    async with woken():
        await world.name.refused(D, alive_ms=alive_ms)
        await (await waiting).release()


async def test_head_handed_the_lock_by_a_poll_of_its_own_client_is_woken(world: World) -> None:
    """By the reply to that poll, though the message is lost."""
    world.proxy.drop_messages()
    await world.name.granted(A)
    waiting = await world.waiter()
    await world.name.let_expire()
    async with woken():
        assert await world.locks.lock("name").try_acquire() is None
        await (await waiting).release()


@pytest.mark.parametrize("call", ["acquire", "extend", "release"])
async def test_waiter_that_holds_and_was_not_told_is_woken_by_a_reply_to_another(
    world: World, call: str
) -> None:
    """A "not mine" reply names the holder: it is a waiter of ours, so it polls."""
    world.proxy.drop_messages()
    lease = await world.locks.lock("name", ttl=30.0).acquire()
    waiting = await world.waiter()
    (token,) = (await world.name.state()).queue
    await world.name.hand_over(lease.owner_token, token)  # an operator breaks the lock
    async with woken():
        if call == "acquire":
            assert await world.locks.lock("name").try_acquire() is None
        elif call == "extend":
            with pytest.raises(LeaseLostError):
                await lease.extend()
        else:
            assert await lease.release() is False
        await (await waiting).release()
    await lease.release()


async def test_waiter_whose_message_is_lost_holds_by_its_own_poll(world: World) -> None:
    """Within its poll interval; with a short ttl that is a third of a second."""
    lost = world.proxy.drop_messages()
    await world.name.granted(A)
    waiting = await world.waiter(ttl=0.5)
    started = time.monotonic()
    await world.name.release(A)
    lease = await waiting
    assert time.monotonic() - started < 1 / 3 + 0.3
    assert lost.hits == 1
    await lease.release()


async def test_head_waits_no_longer_than_the_holder_lives(world: World) -> None:
    """The holder is gone; the head looks when its time is over, not at the next poll."""
    await world.name.granted(A, ttl_ms=400)
    started = time.monotonic()
    lease = await world.locks.lock("name", ttl=30.0).acquire()
    assert 0.3 < time.monotonic() - started < WOKEN_S
    await lease.release()


GARBAGE = {
    "nothing": "",
    "a space": " ",
    "text": "text",
    "no client id": "a:b:1/2 key",
    "no fencing token": "{token}/ key",
    "a negative fencing token": "{token}/-1 key",
    "a fencing token of 5000 digits": f"{{token}}/{'9' * 5000} key",
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_waiter_hears_the_next_message_after_one_that_is_garbage(
    world: World, garbage: str | bytes
) -> None:
    """Anybody may publish on an inbox: what is no hand-off changes nothing."""
    await world.name.granted(A)
    waiting = await world.waiter()
    (token,) = (await world.name.state()).queue
    if isinstance(garbage, str):
        garbage = garbage.format(token="b" + token[1:])
    channel = _names.inbox("aiodlock:", client_id(token))
    assert await world.name.redis.publish(channel, garbage) == 1
    before = world.proxy.requests["EVALSHA"]
    async with woken():
        await world.name.release(A)
        lease = await waiting
    assert world.proxy.requests["EVALSHA"] == before, "woken by a poll, not by the message"
    await lease.release()


# Locks of different ttl, and of other libraries.


async def test_locks_of_ttl_half_and_thirty_seconds_take_turns(
    make_client: MakeClient, redis: Redis
) -> None:
    """On one name: in the order of arrival, each with its own ttl, none lost over several turns."""
    turns: list[float] = []
    remaining: dict[float, list[float]] = {0.5: [], 30.0: []}

    async def work(locks: LockClient, ttl: float) -> None:
        lock = locks.lock("name", ttl=ttl)
        for _ in range(3):
            async with lock as lease:
                turns.append(ttl)
                await asyncio.sleep(0.2)  # the watchdog's turn, where it is needed
                await lease.extend()
                remaining[ttl].append(lease.remaining)
                lease.check(min_left=0.3)

    clients = [make_client(), make_client()]
    async with asyncio.TaskGroup() as group:
        for locks, ttl in zip(clients, (0.5, 30.0), strict=True):
            group.create_task(work(locks, ttl))
            await until(lambda: turns)
    assert turns == [0.5, 30.0] * 3
    assert max(remaining[0.5][:1]) < 0.5
    assert min(remaining[30.0]) > 25.0
    assert await leftovers(redis) == []


async def test_waiter_of_a_long_ttl_outlasts_polls_of_short_ones(world: World) -> None:
    """It polls every 2 s; a neighbour whose alive is 1 s polls three times a second."""
    await world.name.granted(A)
    waiting = await world.waiter(ttl=30.0)
    (token,) = (await world.name.state()).queue
    started = time.monotonic()
    while time.monotonic() - started < 1.5:
        await world.name.refused(C, ttl_ms=500, alive_ms=1_000)
        assert (await world.name.state()).queue == [token, C]
        await asyncio.sleep(0.1)
    await world.name.hand_over(A, token)
    await (await waiting).release()


@pytest.mark.parametrize("px", [None, 600])
async def test_waiter_on_a_foreign_lock_gets_it_when_it_goes(
    world: World, caplog: pytest.LogCaptureFixture, px: int | None
) -> None:
    """Its release wakes nobody; one without a TTL is warned of, once."""
    await world.name.redis.set(world.name.keys.lock, "another library's", px=px)
    with caplog.at_level(logging.WARNING, "aiodlock"):
        before = world.proxy.requests["EVALSHA"]
        waiting = await world.waiter(ttl=0.5)
        started = time.monotonic()
        if px is None:
            await until(lambda: world.proxy.requests["EVALSHA"] - before >= 4)
            assert not waiting.done()
            await world.name.redis.delete(world.name.keys.lock)
            started = time.monotonic()
        lease = await waiting
    waited = time.monotonic() - started
    assert waited < 1 / 3 + 0.3 if px is None else waited < px / 1000 + 0.3
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (1 if px is None else 0), warnings
    if px is None:
        assert "without a TTL" in warnings[0]
        assert "another library's" in warnings[0]
    await lease.release()


async def is_subscribed(redis: Redis) -> bool:
    """Whether somebody hears hand-off messages."""
    return bool(await redis.pubsub_channels(f"{_names.inbox_prefix('aiodlock:')}*"))
