"""The contract of Lock and Lease, each rule written once, over every kind of store."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import pytest
import pytest_asyncio

from aiodlock import (
    Backoff,
    LeaseLostError,
    Lock,
    LockClient,
    LockInfo,
    LockTimeout,
    LostReason,
    NameTakenError,
    _client,
    _clock,
    _names,
)
from aiodlock._store._api import Acquisition, Refused
from aiodlock.testing import LockServer
from tests.steps import Mode, cancel_at_every_step
from tests.until import until
from tests.worlds import PREFIX, STORES, Standing, Store, World, standing_servers, value_of

SOON_S = 1.0
"""Sooner than any waiter polls by itself when the ttl is 30 s."""

TTL_S = 0.6
"""Where it must run out, or be extended, while a test waits."""

SHORT_S = 0.2
"""Where it must run out, and nothing else happens meanwhile."""

Rule: TypeAlias = Callable[[World], Awaitable[None]]

RULES: dict[str, Rule] = {}
"""All of them; a store that leaves one out says why in its row of `STORES`."""

CONNECTION_RULES: dict[str, Rule] = {}
"""Those in which the way to the server has a part: `test_kinds` runs them on kinds of clients."""


def rule(check: Rule) -> Rule:
    """*check* is part of the contract: it runs on every store."""
    RULES[check.__name__] = check
    return check


def connection_rule(check: Rule) -> Rule:
    """It runs on every kind of client, too."""
    CONNECTION_RULES[check.__name__] = check
    return rule(check)


# One holder.


@connection_rule
async def one_holds_and_others_do_not(world: World) -> None:
    """Whoever comes second does not get it; another name is another lock; tokens grow."""
    ours, others = await world.two()
    async with ours.lock("a").acquire(wait_timeout=5) as first:
        assert await world.value("a") == value_of(first)
        assert await others.lock("a").try_acquire() is None
        assert await ours.lock("a").try_acquire() is None
        async with others.lock("b").acquire(wait_timeout=5):
            assert first.is_held
    async with others.lock("a").acquire(wait_timeout=5) as second:
        assert second.fencing_token > first.fencing_token
    assert await world.left() == []


@rule
async def many_tasks_of_many_clients_go_one_by_one(world: World) -> None:
    """Never two inside, each as often as it asked, and tokens in the order of the grants."""
    inside = 0
    tokens: list[int] = []

    async def work(locks: LockClient) -> None:
        nonlocal inside
        for _ in range(5):
            async with locks.lock("a").acquire(wait_timeout=30) as lease:
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                tokens.append(lease.fencing_token)
                inside -= 1

    clients = [await world.new() for _ in range(3)]
    await asyncio.gather(*(work(locks) for locks in clients for _ in range(3)))
    assert len(tokens) == 45
    assert tokens == sorted(set(tokens))
    assert await world.left() == []


@rule
async def a_single_try_neither_waits_nor_queues(world: World) -> None:
    """Held: `None` at once, and nobody stands in the queue for it."""
    ours, others = await world.two()
    async with ours.lock("a", ttl=30).acquire(wait_timeout=5):
        started_at = time.monotonic()
        assert await others.lock("a").try_acquire() is None
        assert time.monotonic() - started_at < SOON_S
        assert await waiters(ours, 0)
    lease = await others.lock("a").try_acquire()
    assert lease is not None
    assert await lease.release() is True


@rule
async def a_single_try_does_not_overtake_a_waiter(world: World) -> None:
    """Free, but another waits: `None`, and that one has it now."""
    ours, others = await world.two()
    holder = await ours.lock("a", ttl=30).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await until(lambda: hears(others))
    await world.delete("a")
    freed_at = time.monotonic()
    assert await ours.lock("a").try_acquire() is None
    async with await waiting as lease:
        assert time.monotonic() - freed_at < SOON_S
        assert await world.value("a") == value_of(lease)
        assert await holder.release() is False
        assert await world.value("a") == value_of(lease)


@rule
async def a_lock_of_another_library_is_respected(world: World) -> None:
    """What stands in the key excludes us, is shown, is not ours to free, and is waited out."""
    locks = await world.new()
    await world.put("a", "another's")
    assert await locks.lock("a").try_acquire() is None
    told = await locks.lock("a").inspect()
    assert told == LockInfo(True, "another's", told.ttl_left, None, 0)
    # Nobody tells of a foreign release; a waiter of this ttl polls three times in a second.
    waiting = asyncio.create_task(locks.lock("a", ttl=TTL_S).acquire(wait_timeout=20))
    await until(lambda: waiters(locks, 1))
    assert await world.value("a") == "another's"
    await world.delete("a")
    assert await (await waiting).release() is True
    assert await world.left() == []


# Release.


@rule
async def a_release_frees_only_what_is_its_own(world: World) -> None:
    """A holder whose time ran out takes nothing of the next one's away, whatever it calls."""
    ours, others = await world.two()
    late = await ours.lock("a", ttl=SHORT_S, auto_extend=False).acquire(wait_timeout=5)
    async with others.lock("a").acquire(wait_timeout=5) as next_lease:
        assert late.state == "lost"
        with pytest.raises(LeaseLostError):
            await late.extend()
        assert await late.release() is False
        assert await world.value("a") == value_of(next_lease)
        assert await next_lease.extend() > 20
    assert await world.left() == []


@rule
async def a_release_can_be_repeated(world: World) -> None:
    """Five at once and one later: one of them did it, and none complains."""
    locks = await world.new()
    lease = await locks.lock("a").acquire(wait_timeout=5)
    released = await asyncio.gather(*(lease.release() for _ in range(5)))
    assert sorted(released) == [False] * 4 + [True]
    assert await lease.release() is False
    assert lease.state == "released"
    with pytest.raises(RuntimeError, match="released"):
        await lease.extend()
    assert await world.left() == []


@connection_rule
async def a_release_hands_over_to_the_first_waiter(world: World) -> None:
    """Waiters of two clients get it in the order in which they came, without a poll between."""
    ours, others = await world.two()
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


# Waiting.


@rule
async def a_waiter_who_leaves_is_passed_over(world: World) -> None:
    """One is cancelled, one gives up in time: the others go on in their order."""
    ours, others = await world.two()
    order: list[str] = []

    async def queue(locks: LockClient, who: str, wait_timeout: float) -> None:
        async with locks.lock("a").acquire(wait_timeout=wait_timeout):
            order.append(who)

    holder = await ours.lock("a").acquire(wait_timeout=5)
    tasks = []
    for place, waiter in enumerate(
        [(others, "1", 20.0), (ours, "2", 20.0), (others, "3", 20.0), (ours, "4", 0.3)]
    ):
        tasks.append(asyncio.create_task(queue(*waiter)))
        if place < 3:  # The last may be gone by then.
            await until(functools.partial(waiters, ours, place + 1))
    tasks[1].cancel()
    ends = await asyncio.gather(tasks[1], tasks[3], return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, LockTimeout]
    await until(functools.partial(waiters, ours, 2))
    await holder.release()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == ["1", "3"]
    assert await world.left() == []


@rule
async def a_waiter_who_died_is_passed_over(world: World) -> None:
    """It is first in the queue and polls no more: the release goes to the one behind it."""
    ours, others = await world.two()
    holder = await ours.lock("a").acquire(wait_timeout=5)
    await dying_waiter(others, alive_s=0.6)
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 2))
    await asyncio.sleep(0.7)  # Until its liveness has passed, by the server's clock.
    await until(lambda: hears(others))
    released_at = time.monotonic()
    await holder.release()
    async with await waiting:
        assert time.monotonic() - released_at < SOON_S
    assert await world.left() == []


@connection_rule
async def a_waiter_who_is_cancelled_leaves_nothing(world: World) -> None:
    """Neither in the queue nor, when the lock comes free, in the key."""
    ours, others = await world.two()
    async with ours.lock("a").acquire(wait_timeout=5):
        waiting = asyncio.create_task(others.lock("a").acquire())
        await until(lambda: waiters(ours, 1))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await waiters(ours, 0)
    assert await world.left() == []


@rule
async def an_acquire_cancelled_anywhere_leaves_nothing(world: World) -> None:
    """At each of its steps, in each way, on a free lock and on one that is handed over."""
    ours, others = await world.two()
    lock = ours.lock("a")
    handing: list[asyncio.Task[None]] = []

    async def use() -> None:
        async with lock.acquire(wait_timeout=20):
            await asyncio.sleep(0)

    async def hand_over() -> None:
        held = await others.lock("a").acquire(wait_timeout=5)
        handing.append(asyncio.create_task(given_up_soon(held.release)))

    async def free_again() -> None:
        while handing:
            await handing.pop()
        assert await world.left(ignoring_tombstones=True) == []

    for label, before in {"free": None, "handed over": hand_over}.items():
        label = f"a lock, {label}, on {world.name}"
        done = await cancel_at_every_step(use, free_again, before=before, label=label)
        assert done.runs >= done.steps * len(Mode)


@rule
async def a_wait_ends_in_time_and_tells_who_holds(world: World) -> None:
    """Neither before nor long after `wait_timeout`; the place in the queue is given up."""
    ours, others = await world.two()
    async with ours.lock("a", ttl=30).acquire(wait_timeout=5) as lease:
        started_at = time.monotonic()
        with pytest.raises(LockTimeout) as error:
            await others.lock("a").acquire(wait_timeout=0.3)
        assert 0.29 <= time.monotonic() - started_at < 0.3 + SOON_S
        assert error.value.holder == lease.holder
        assert error.value.ttl_left is not None
        assert 20 < error.value.ttl_left <= 30
        assert await others.lock("a").try_acquire(wait_timeout=0.1) is None
        await until(lambda: waiters(ours, 0))
    assert await world.left() == []


@rule
async def those_who_poll_are_served_in_their_turn(world: World) -> None:
    """`retry=Backoff(...)` stands in the same queue as the others."""
    ours, others = await world.two()
    polling = Backoff(initial=0.02, maximum=0.05)
    order: list[str] = []

    async def queue(locks: LockClient, who: str, retry: Backoff | None) -> None:
        async with locks.lock("a", retry=retry).acquire(wait_timeout=20):
            order.append(who)

    holder = await ours.lock("a").acquire(wait_timeout=5)
    tasks = []
    for place, (locks, who, retry) in enumerate(
        [(others, "1", polling), (ours, "2", None), (ours, "3", polling), (others, "4", None)]
    ):
        tasks.append(asyncio.create_task(queue(locks, who, retry)))
        await until(functools.partial(waiters, ours, place + 1))
    await holder.release()
    await asyncio.gather(*tasks)
    assert order == ["1", "2", "3", "4"]
    assert await world.left() == []


# Time.


@rule
async def an_expiry_frees_and_is_told(world: World) -> None:
    """Without a watchdog it ends at its deadline, EXPIRED, and the head is awake then."""
    ours, others = await world.two()
    started_at = time.monotonic()
    lease = await ours.lock("a", ttl=TTL_S, auto_extend=False).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a", ttl=30).acquire(wait_timeout=20))
    assert await lease.wait_lost() is LostReason.EXPIRED
    async with await waiting as next_lease:
        took_s = time.monotonic() - started_at
        assert TTL_S - 0.01 <= took_s < TTL_S + SOON_S
        assert next_lease.fencing_token > lease.fencing_token
        assert await lease.release() is False
    assert await world.left() == []


@rule
async def an_extension_never_shortens(world: World) -> None:
    """Less than there is changes nothing; more is got, by the server's word too."""
    locks = await world.new()
    async with locks.lock("a", ttl=30).acquire(wait_timeout=5) as lease:
        assert await lease.extend(1) > 20
        assert await world.ttl_left_s("a") > 20
        assert await lease.extend(60) > 50
        assert await world.ttl_left_s("a") > 50
        assert await lease.extend() > 50
        assert lease.remaining > 50


@rule
async def an_extension_never_creates_a_key(world: World) -> None:
    """What is gone is gone: DELETED, and nothing stands there afterwards."""
    locks = await world.new()
    lease = await locks.lock("a", ttl=30).acquire(wait_timeout=5)
    await world.delete("a")
    with pytest.raises(LeaseLostError) as lost:
        await lease.extend()
    assert lost.value.reason is LostReason.DELETED
    assert lost.value.fencing_token == lease.fencing_token
    assert await world.value("a") is None
    assert await lease.release() is False
    assert await world.left() == []


@rule
async def a_deadline_is_never_later_than_the_keys(world: World) -> None:
    """After a grant, after extensions, after a hand-off: the server has more time than we say."""
    ours, others = await world.two()
    lease = await ours.lock("a", ttl=30).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a", ttl=30).acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    for extend in (None, lease.extend, functools.partial(lease.extend, 60)):
        if extend is not None:
            await extend()
        left_s = await world.ttl_left_s("a")
        assert 25 < lease.deadline - _clock.now() <= left_s
    await lease.release()
    async with await waiting as handed:
        left_s = await world.ttl_left_s("a")
        assert 0 < handed.deadline - _clock.now() <= left_s


@rule
async def every_key_ends_by_itself(world: World) -> None:
    """Held and waited for, handed over, released: no key is without a TTL."""
    ours, others = await world.two()
    lease = await ours.lock("a", ttl=30).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    for _ in range(2):
        ttls = await world.ttls()
        assert _names.keys(PREFIX, "a").lock in ttls
        assert {key: ttl for key, ttl in ttls.items() if ttl <= 0} == {}
        await lease.release()
        lease = await waiting
    ttls = await world.ttls()
    assert [key.rpartition(":")[2] for key in ttls] == ["fence"]
    assert min(ttls.values()) > 0


@rule
async def a_lease_is_bounded_by_max_hold(world: World) -> None:
    """However often it is extended: lost, MAX_HOLD, and the key ends then."""
    ours, others = await world.two()
    started_at = time.monotonic()
    with pytest.raises(LeaseLostError) as lost:
        async with ours.lock("a", ttl=TTL_S, max_hold=2 * TTL_S).acquire(wait_timeout=5) as lease:
            await lease.extend(30)
            assert await world.ttl_left_s("a") <= 2 * TTL_S
            await asyncio.sleep(10)
    assert lost.value.reason is LostReason.MAX_HOLD
    assert TTL_S < time.monotonic() - started_at < 2 * TTL_S + SOON_S
    async with others.lock("a").acquire(wait_timeout=5):
        pass
    assert await world.left() == []


@rule
async def a_lease_handed_over_is_extended_beyond_its_short_start(world: World) -> None:
    """A hand-off gives what the waiter's liveness had; its watchdog makes a lease of it."""
    ours, others = await world.two()
    holder = await ours.lock("a").acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a", ttl=0.3).acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await holder.release()
    async with await waiting as lease:
        await asyncio.sleep(1.3)  # Its liveness was 1 s.
        assert lease.state == "held"
        assert await world.value("a") == value_of(lease)
        assert await ours.lock("a").try_acquire() is None


@rule
async def a_lease_handed_over_without_a_watchdog_has_its_whole_ttl(world: World) -> None:
    """Nothing will extend it, so it is confirmed before the body begins."""
    ours, others = await world.two()
    holder = await ours.lock("a").acquire(wait_timeout=5)
    lock = others.lock("a", ttl=30, auto_extend=False)
    waiting = asyncio.create_task(lock.acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await holder.release()
    async with await waiting as lease:
        assert lease.remaining > 20
        assert await world.ttl_left_s("a") > 20


# Loss.


@connection_rule
async def a_watchdog_keeps_what_stands_and_tells_of_what_is_gone(world: World) -> None:
    """One body outlasts its ttl and nobody gets in; another's key is deleted: it is told."""
    ours, others = await world.two()
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
        assert await world.value("kept") == value_of(kept)
        assert await others.lock("kept").try_acquire() is None
    assert await world.left() == []


@rule
async def a_thief_is_told_of_and_left_alone(world: World) -> None:
    """Another value in the key: STOLEN, and the release at the end of the block spares it."""
    locks = await world.new()
    stolen_at = 0.0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("a", ttl=TTL_S).acquire(wait_timeout=5) as lease:
            await world.put("a", "another's")
            stolen_at = time.monotonic()
            await asyncio.sleep(10)
    assert lost.value.reason is LostReason.STOLEN
    assert time.monotonic() - stolen_at < TTL_S
    assert await lease.wait_lost() is LostReason.STOLEN
    assert await world.value("a") == "another's"


@rule
async def a_silent_server_cannot_delay_the_news(world: World) -> None:
    """Nothing is answered any more: the body is told at its deadline, UNREACHABLE."""
    locks, network = await world.behind_proxies()
    silent_at = told_at = 0.0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("a", ttl=TTL_S).acquire(wait_timeout=5):
            network.black_hole()
            silent_at = time.monotonic()
            try:
                await asyncio.sleep(10)
            finally:
                told_at = time.monotonic()
                network.heal()
    assert lost.value.reason is LostReason.UNREACHABLE
    assert told_at - silent_at < TTL_S + SOON_S  # Less than `request_timeout`.
    async with locks.lock("a").acquire(wait_timeout=5):
        pass
    assert await world.left(ignoring_tombstones=True) == []


@rule
async def a_lost_reply_is_no_loss(world: World) -> None:
    """The server has done it and the answer is lost, once for each call: nobody notices."""
    locks, network = await world.behind_proxies()
    lock = locks.lock("a")
    async with lock.acquire(wait_timeout=5):
        pass
    lost = network.lose_replies("acquire")
    lease = await lock.acquire(wait_timeout=5)
    assert lost() > 0
    assert await world.value("a") == value_of(lease)
    lost = network.lose_replies(world.extension)
    assert await lease.extend() > 20
    assert lost() > 0
    assert lease.is_held
    lost = network.lose_replies("release")
    await lease.release()
    assert lost() > 0
    assert await world.left(ignoring_tombstones=True) == []


@connection_rule
async def a_lost_connection_is_made_again(world: World) -> None:
    """The server drops every connection: the lease stands, the waiter still gets it."""
    ours, others = await world.two()
    holder = await ours.lock("a", ttl=5).acquire(wait_timeout=5)
    waiting = asyncio.create_task(others.lock("a", ttl=5).acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await until(lambda: hears(others))
    await world.cut_connections()
    assert await holder.extend() > 4
    assert await holder.release() is True
    async with await waiting as lease:
        assert lease.is_held
    # Who waits without a queue may have a try under way when it is cut: that leaves a tombstone.
    assert await world.left(ignoring_tombstones=len(world.admins) > 1) == []


@connection_rule
async def scripts_that_the_server_forgot_are_sent_again(world: World) -> None:
    """`SCRIPT FLUSH` before each step (case 073), as after a restart or a failover."""
    ours, others = await world.two()
    await world.forget_scripts()
    lease = await ours.lock("a").acquire(wait_timeout=5)
    await world.forget_scripts()
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(ours, 1))
    await world.forget_scripts()
    assert await lease.extend() > 20
    await world.forget_scripts()
    assert await lease.release() is True
    next_lease = await waiting
    await world.forget_scripts()
    assert await others.lock("a").break_lock() is True
    assert await next_lease.release() is False
    assert await world.left() == []


# Order.


@rule
async def fencing_tokens_grow_with_every_grant(world: World) -> None:
    """By acquisition, expiry, hand-off, a broken lock, and after the counter itself was lost."""
    ours, others = await world.two()
    first = await ours.lock("a", ttl=SHORT_S, auto_extend=False).acquire(wait_timeout=5)
    after_expiry = await others.lock("a").acquire(wait_timeout=5)
    waiting = asyncio.create_task(ours.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(others, 1))
    await after_expiry.release()
    handed = await waiting
    assert await others.lock("a").break_lock() is True
    after_break = await others.lock("a").acquire(wait_timeout=5)
    await after_break.release()
    await world.delete("a", side="fence")
    after_loss = await ours.lock("a").acquire(wait_timeout=5)
    tokens = [
        lease.fencing_token for lease in (first, after_expiry, handed, after_break, after_loss)
    ]
    assert tokens == sorted(set(tokens))
    assert await handed.release() is False
    assert await after_loss.release() is True
    assert await first.release() is False


# Operators.


@connection_rule
async def what_stands_is_told(world: World) -> None:
    """`inspect` names the holder of a lock, and nobody of a free one."""
    ours, others = await world.two()
    assert await others.lock("a").inspect() == LockInfo(False, None, None, None, 0)
    async with ours.lock("a", ttl=30).acquire(wait_timeout=5) as lease:
        told = await others.lock("a").inspect()
        holder = lease.holder
        assert told == LockInfo(True, holder, told.ttl_left, lease.fencing_token, 0)
        assert told.ttl_left is not None
        assert 20 < told.ttl_left <= 30


@connection_rule
async def an_operator_breaks_it_for_the_next(world: World) -> None:
    """The waiter gets it; the holder learns at its next word that it is another's."""
    ours, others = await world.two()
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
async def only_the_grant_that_was_meant_is_broken(world: World) -> None:
    """Another fencing token, or a free lock: False, and nothing has changed."""
    ours, others = await world.two()
    old = await ours.lock("a").acquire(wait_timeout=5)
    await old.release()
    assert await others.lock("a").break_lock() is False
    async with ours.lock("a").acquire(wait_timeout=5) as lease:
        assert await others.lock("a").break_lock(fencing_token=old.fencing_token) is False
        assert await world.value("a") == value_of(lease)
        assert await lease.extend() > 20
    assert await world.left() == []


# Names.


@connection_rule
async def any_name_will_do(world: World) -> None:
    """Braces, per cents, blanks, letters of every script: each its own lock, all free at the end.

    `%7B` is what `{` is encoded as, so the two must not meet in one key.
    """
    locks = await world.new()
    names = ["{", "}", "{a}", "%", "%7B", "%257B", " ", "\0", "\r\n", "ß", "鍵", "🔒", "a" * 512]
    leases = await asyncio.gather(*(locks.lock(name).acquire(wait_timeout=5) for name in names))
    values = [await world.value(name) for name in names]
    assert values == [value_of(lease) for lease in leases]
    released = await asyncio.gather(*(lease.release() for lease in leases))
    assert released == [True] * len(names)
    assert await world.left() == []


@rule
async def clients_of_two_prefixes_do_not_meet(world: World) -> None:
    """The same name under each is two locks; every key begins with its prefix."""
    one, other = await world.new(prefix="one:"), await world.new(prefix="other:")
    async with one.lock("a").acquire(wait_timeout=5) as first:
        waiting = asyncio.create_task(one.lock("a").acquire(wait_timeout=20))
        await until(lambda: waiters(one, 1))
        async with other.lock("a").acquire(wait_timeout=5):
            assert first.is_held
            assert await waiters(other, 0)
            keys = set(await world.ttls(""))
            assert {key.partition(":")[0] for key in keys} == {"one", "other"}
        assert not waiting.done()
    assert await (await waiting).release() is True


@rule
async def a_key_that_is_no_lock_is_left_alone(world: World) -> None:
    """`NameTakenError` from every call, at once; what stands there stays."""
    locks = await world.new()
    await world.spoil("a")
    lock = locks.lock("a")
    started_at = time.monotonic()
    for call in (lock.acquire(wait_timeout=20), lock.try_acquire(), lock.inspect()):
        with pytest.raises(NameTakenError) as error:
            await call
        assert error.value.name == "a"
    assert time.monotonic() - started_at < SOON_S
    assert await world.left() == [_names.keys(PREFIX, "a").lock]


# The end of a client.


@connection_rule
async def a_closed_client_leaves_the_users_own_alone(world: World) -> None:
    """Leases are given back, waiters are told, and what the user made still works."""
    ours, others = await world.two()
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


@rule
async def a_closing_client_leaves_the_queue_before_it_releases(world: World) -> None:
    """Its own waiter is first, and yet another client's gets the lock that it gives back."""
    closing, others = await world.two()
    lease = await closing.lock("a").acquire(wait_timeout=5)
    own = asyncio.create_task(closing.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(others, 1))
    waiting = asyncio.create_task(others.lock("a").acquire(wait_timeout=20))
    await until(lambda: waiters(others, 2))
    await closing.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await own
    async with await waiting as next_lease:
        assert next_lease.fencing_token > lease.fencing_token
        assert await world.value("a") == value_of(next_lease)
    assert await world.left() == []


@rule
async def a_body_in_a_closing_client_is_told_and_waited_for(world: World) -> None:
    """CLOSED; it cleans up while the lock still stands, and is released when it has left."""
    closing, others = await world.two()
    entered = asyncio.Event()
    seen: list[object] = []

    async def body() -> None:
        async with closing.lock("a").acquire(wait_timeout=5) as lease:
            entered.set()
            try:
                await asyncio.sleep(10)
            finally:
                await asyncio.sleep(0.05)
                seen.extend([await others.lock("a").try_acquire(), await world.value("a")])
                seen.append(value_of(lease))

    task = asyncio.create_task(body())
    await entered.wait()
    await closing.aclose()
    assert await world.left() == []
    with pytest.raises(LeaseLostError) as lost:
        await task
    assert lost.value.reason is LostReason.CLOSED
    assert seen[0] is None
    assert seen[1] == seen[2]


# More than a mutex.


@rule
async def a_task_enters_its_own_lock_again(world: World) -> None:
    """The same lease, until the last block is left; nobody else is let in between."""
    ours, others = await world.two()
    lock = ours.lock("a", reentrant=True)
    async with lock.acquire(wait_timeout=5) as lease:
        async with lock.acquire(wait_timeout=1) as inner:
            assert inner is lease
        assert await world.value("a") == value_of(lease)
        assert await others.lock("a").try_acquire() is None
        with pytest.raises(LockTimeout):
            await asyncio.create_task(try_for(lock, 0.05))
    async with others.lock("a").acquire(wait_timeout=1):
        pass
    assert await world.left() == []


async def try_for(lock: Lock, seconds: float) -> None:
    """In vain."""
    await lock.acquire(wait_timeout=seconds)


@rule
async def several_names_are_got_all_or_none(world: World) -> None:
    """In whichever order they are named; what was got in vain is given back."""
    ours, others = await world.two()
    async with others.lock("b").acquire(wait_timeout=5):
        with pytest.raises(LockTimeout):
            async with ours.all("c", "b", "a", wait_timeout=0.1):
                pytest.fail("entered")
        await until(lambda: are_free(world, "a", "c"))
    async with ours.all("c", "a", "b", wait_timeout=5) as leases:
        for name in ("a", "b", "c"):
            assert await world.value(name) == value_of(leases[name])
        waiting = asyncio.create_task(others.lock("b").acquire(wait_timeout=20))
        await until(lambda: waiters(ours, 1, name="b"))
    await (await waiting).release()
    assert await world.left(ignoring_tombstones=True) == []


async def are_free(world: World, *names: str) -> bool:
    """Whether nobody holds them."""
    return [await world.value(name) for name in names] == [None] * len(names)


@rule
async def a_name_stays_taken_for_as_long_as_was_asked(world: World) -> None:
    """By nobody, from the release on; then the waiter has it."""
    ours, others = await world.two()
    began = time.monotonic()
    async with ours.lock("a", hold_at_least=SHORT_S).acquire(wait_timeout=5) as lease:
        waiting = asyncio.create_task(others.lock("a", ttl=TTL_S).acquire(wait_timeout=20))
        await until(lambda: waiters(ours, 1))
    async with await waiting as later:
        assert time.monotonic() - began >= SHORT_S - 0.002
        assert later.fencing_token > lease.fencing_token
    assert await world.left() == []


@rule
async def a_leader_is_seen_and_succeeded(world: World) -> None:
    """One at a time, with a larger number each time; and who asks is told."""
    ours, others = await world.two()
    async with ours.election("a", wait_timeout=5) as term:
        leader = await others.election("a").leader()
        assert leader is not None
        assert leader.number == term.number
        waiting = asyncio.create_task(number_of_a_term(others))
        await until(lambda: waiters(ours, 1))
    assert await waiting > term.number
    assert await ours.election("a").leader() is None
    assert await world.left() == []


async def number_of_a_term(locks: LockClient) -> int:
    """Stand, lead, resign."""
    async with locks.election("a", wait_timeout=20) as term:
        return term.number


# What the rules share.


async def waiters(locks: LockClient, n: int, *, name: str = "a") -> bool:
    """Whether so many wait for it; where there is no queue, of the clients in this process."""
    told = await locks.lock(name).inspect()
    assert locks._session is not None
    if locks._session.store.has_queue:
        return told.waiters == n
    alike = [client for client in _client._clients if client._prefix == locks._prefix]
    waits = [wait for client in alike if client._session for wait in client._session._waits]
    return sum(wait.acquisition.name == name for wait in waits) == n


def hears(locks: LockClient) -> bool:
    """Whether the client's inbox is subscribed, if it has need of one."""
    assert locks._session is not None
    store: Any = locks._session.store
    return bool(not store.has_queue or store.hears or not store._listening)


async def dying_waiter(locks: LockClient, *, alive_s: float) -> None:
    """Somebody queues for "a" with one poll, and is never heard of again."""
    assert locks._session is not None
    tail = locks.lock("a")._tail
    token = _names.owner_token(_names.holder_of("dead", _names.new_client_id()), 1) + tail
    answer = await locks._session.store.acquire(
        Acquisition("a", _names.keys(PREFIX, "a"), token, is_shared=bool(tail)),
        ttl_ms=30_000,
        alive_ms=round(alive_s * 1000),
        within=5,
    )
    assert isinstance(answer, Refused)
    assert answer.place >= 0


async def given_up_soon(release: Callable[[], Awaitable[object]]) -> None:
    """As a holder whose body takes a moment."""
    await asyncio.sleep(0.01)
    await release()


# Every rule on every store.


class Cell(NamedTuple):
    """One rule on one store."""

    store: str
    rule: str


RAN: set[Cell] = set()


def cell_of(store: Any, name: Any) -> Cell:
    """The parameters of the test below, as a cell."""
    return Cell(store.name, name)


def faults(stores: Iterable[Store], rules: Collection[str], ran: Collection[Cell]) -> list[str]:
    """What keeps the table from being full: rules that did not run, and reasons that are none."""
    found = []
    for store in stores:
        for name in rules:
            reason = store.without.get(name)
            if reason is None and Cell(store.name, name) not in ran:
                found.append(f"{name} did not run on {store.name}, and nobody says why")
            elif reason is not None and len(reason.split()) < 5:
                found.append(f"{name} is left out on {store.name} without a reason: {reason!r}")
        found += [
            f"{store.name} leaves out {x}, which is no rule"
            for x in set(store.without) - set(rules)
        ]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(session_server: LockServer) -> AsyncIterator[Standing]:
    """Every server, started at once, and once."""
    async with standing_servers(session_server) as servers:
        yield servers


@pytest.fixture(scope="module", autouse=True)
def _table_is_full(request: pytest.FixtureRequest) -> Iterator[None]:
    """A rule that was collected and then skipped is no pass; the counts go to the summary."""
    config = request.config
    config.pluginmanager.register(Summary(config), "the contract's summary")
    yield
    if not request.session.shouldfail:  # By -x: what comes after the failure did not run.
        asked = asked_for(request.session.items)
        assert asked - RAN == set(), "skipped without a reason on record"


def asked_for(items: Iterable[pytest.Item]) -> set[Cell]:
    """The cells that this test run was told to run."""
    return {
        cell_of(**item.callspec.params)
        for item in items
        if isinstance(item, pytest.Function) and item.originalname == CONTRACT.__name__
    }


class Summary:
    """Says at the end of the test run how much of the contract ran."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if RAN:
            terminalreporter.section("contract")
            lines = table() if self._config.get_verbosity() > 0 else summary()
            terminalreporter.write_line("\n".join(lines))


def summary() -> list[str]:
    """How many ran, and each that does not apply with its reason."""
    left_out = [(store.name, *each) for store in STORES for each in store.without.items()]
    counts = f"{len(RAN)} ran, {len(left_out)} left out with a reason"
    return [
        f"contract: {len(RULES)} rules x {len(STORES)} stores: {counts}",
        *(f"  not on {store}: {name}: {reason}" for store, name, reason in left_out),
    ]


def table() -> list[str]:
    """The same as a Markdown table."""
    rows = []
    for name in RULES:
        marks = ["ran" if Cell(store.name, name) in RAN else "-" for store in STORES]
        rows.append([name.replace("_", " "), *marks])
    head = ["rule", *(store.name for store in STORES)]
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), "", *summary()]


@pytest.mark.parametrize(
    ("store", "name"),
    [
        pytest.param(store, name, id=f"{store.name}-{name}")
        for store in STORES
        for name in RULES
        if name not in store.without
    ],
)
async def test_store_keeps_the_contract(store: Store, name: str, standing: Standing) -> None:
    """The rule holds on this store, on the real thing."""
    with counted(cell_of(store, name)):
        async with store.open(standing) as world:
            world.name = store.name
            await world.flush()
            await RULES[name](world)


CONTRACT = test_store_keeps_the_contract


@contextmanager
def counted(cell: Cell) -> Iterator[None]:
    """It ran, however it ended; unless it was skipped from within."""
    try:
        yield
    finally:
        if not isinstance(sys.exception(), pytest.skip.Exception):
            RAN.add(cell)


def test_rule_that_is_written_runs_on_every_store_or_has_a_reason_on_record() -> None:
    """No rule is left unregistered, none is left out silently, no store appears twice."""
    written = {
        name
        for name, function in inspect.getmembers(sys.modules[__name__], inspect.isfunction)
        if [p.annotation for p in inspect.signature(function).parameters.values()] == ["World"]
    }
    assert written == set(RULES), "a rule that is not registered does not run"
    assert len({store.name for store in STORES}) == len(STORES)
    (mark,) = CONTRACT.pytestmark  # type: ignore[attr-defined]
    collected = [cell_of(*case.values) for case in mark.args[1]]
    assert faults(STORES, RULES, collected) == []


def test_check_sees_a_rule_that_is_left_out_without_a_reason() -> None:
    """Negative control: not run, a reason that says nothing, a reason for what is no rule."""
    sound = STORES[0]
    silent = Store("silent", sound.open)
    curt = Store("curt", sound.open, {"a": "no"})
    stale = Store("stale", sound.open, {"gone": "this rule was renamed long ago"})
    rules = ["a", "b"]
    ran = [Cell("silent", "a"), Cell("curt", "b"), Cell("stale", "a"), Cell("stale", "b")]
    assert faults([silent, curt, stale], rules, ran) == [
        "b did not run on silent, and nobody says why",
        "a is left out on curt without a reason: 'no'",
        "stale leaves out gone, which is no rule",
    ]


def test_check_sees_a_rule_that_skips_itself() -> None:
    """Negative control: `pytest.skip` within a rule does not count as run; a failure does."""
    before = set(RAN)
    skipped, failed = Cell("control", "skips itself"), Cell("control", "fails")
    try:
        with pytest.raises(pytest.skip.Exception), counted(skipped):
            pytest.skip("it felt like it")
        with pytest.raises(AssertionError), counted(failed):
            raise AssertionError
        assert RAN - before == {failed}
    finally:
        RAN.intersection_update(before)
