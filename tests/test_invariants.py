"""The invariants of the protocol; each check passes on our scripts, fails on a spoilt one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from aiodlock import LockClient, _clock
from tests.by_hand import ONE, OTHER, THIRD, A, B, ByHand, C, D, Grant, State
from tests.conftest import MakeClient
from tests.mutants import Mutant, text_of
from tests.proxy import ChaosProxy
from tests.until import until
from tests.workers import Worker

# For what the machine adds to the bound of invariant 7; there is other work on it.
RTT_S = 0.4


@dataclass(frozen=True)
class World:
    """What a check may use."""

    redis: Redis
    proxy: ChaosProxy
    make_client: MakeClient

    def name(self, name: str = "name") -> ByHand:
        return ByHand(self.redis, name)


Check: TypeAlias = Callable[[World], Awaitable[None]]


@pytest.fixture
def world(redis: Redis, proxy: ChaosProxy, make_client: MakeClient) -> World:
    """An empty server, with the tools to work it."""
    return World(redis, proxy, make_client)


# 1. The key exists only with a TTL.


async def check_every_key_has_a_ttl(world: World) -> None:
    """After every call of every kind, on every way through the scripts."""
    name = world.name()

    async def check() -> None:
        ttls_ms = (await name.state()).ttls_ms
        assert all(ttl > 0 for ttl in ttls_ms.values()), ttls_ms

    async def call(done: Awaitable[object]) -> None:
        await done
        await check()

    await call(name.granted(A, ttl_ms=5000))  # free and alone
    await call(name.refused(B))
    await call(name.refused(C))
    await call(name.granted(A))  # asked again
    await call(name.extend(_value(await name.state())))
    await call(name.release(A))  # handed to B
    await name.let_expire()
    await call(name.refused(D))  # handed to C by D's poll
    await name.let_expire()
    await call(name.granted(D))  # taken by the head
    await call(name.refused(B))
    await name.redis.delete(name.keys.alive)
    await call(name.refused(C, alive_ms=0))  # B gets a new liveness by the poll of another
    await call(name.release(C, tombstone=True))
    await call(name.release(B))
    await call(name.release(D))  # deleted
    await call(name.granted(A))  # taken beside a tombstone
    await call(name.release(A))
    name = world.name("nobody ever had")
    await call(name.release(D, tombstone=True))
    await call(name.granted(A, alive_ms=0))  # on the slow way, without queueing


# 2. Only its owner, its expiry or `break_lock` removes it.


async def check_only_the_owner_removes_a_lock(world: World) -> None:
    """Not the release, the poll or the extension of another, however alike its token is."""
    name = world.name()
    await name.granted(C)
    value = _value(await name.state())
    fencing_token = value.rpartition("/")[2]

    async def nothing_happened() -> None:
        state = await name.state()
        assert state.value == value
        assert 25_000 < state.ttls_ms["lock"] <= 30_000, "another changed its life"

    for queued in (False, True):
        for other in (A, f"{C}3", B, "", ":"):
            await name.release(other, tombstone=other == B)
            await nothing_happened()
            await name.extend(f"{other}/{fencing_token}", ttl_ms=60_000)
            await nothing_happened()
        await name.extend(f"{C}/{int(fencing_token) - 1}", ttl_ms=60_000)
        await nothing_happened()
        for waiter in (A, f"{ONE}:120", f"{THIRD}:3"):
            await name.acquire(waiter, ttl_ms=60_000, alive_ms=6000 if queued else 0)
            await nothing_happened()
    assert await name.release(C) == (True, _value(await name.state()))
    assert (await name.state()).holder == A


async def check_owner_expiry_and_break_lock_remove_a_lock(world: World) -> None:
    """Each of the three does."""
    name = world.name()
    await name.granted(A)
    assert await name.release(A) == (True, None)
    assert (await name.state()).value is None
    await name.granted(A, ttl_ms=100)
    await until(lambda: _is_free(name))
    await name.granted(B)
    locks = world.make_client()
    assert await locks.lock("name").break_lock() is True
    assert (await name.state()).value is None


# 3. The holder is not in the queue.


async def check_holder_leaves_the_queue(world: World) -> None:
    """On each of the ways to a grant; and its liveness goes with its place."""

    async def holds(name: ByHand, holder: str, waiters: list[str]) -> None:
        state = await name.state()
        assert state.holder == holder
        assert state.queue == waiters
        assert sorted(state.alive) == sorted(waiters)

    name = world.name("handed over by release")
    await _queued(name, A, B, C)
    await name.release(A)
    await holds(name, B, [C])

    name = world.name("handed over by the poll of another")
    await _queued(name, A, B, C)
    await name.let_expire()
    await name.refused(C)
    await holds(name, B, [C])

    name = world.name("taken by the head")
    await _queued(name, A, B, C)
    await name.let_expire()
    await name.granted(B)
    await holds(name, B, [C])

    name = world.name("granted, and queued too, as after a failover")
    await _queued(name, A, B, C)
    await name.redis.set(name.keys.lock, f"{B}/7", px=30_000)
    await name.granted(B)
    await holds(name, B, [C])


# 4. A grant goes to the earliest live waiter; a live waiter is never overtaken.


async def check_grants_go_by_arrival(world: World) -> None:
    """Whoever polls, however often and in whatever order; those who went away are passed over."""
    name = world.name()
    waiters = [f"{client}:{n}" for n in (2, 3) for client in (ONE, OTHER, THIRD)]
    await _queued(name, A, *waiters)
    for poller in reversed(waiters):
        await name.refused(poller)
    assert (await name.state()).queue == waiters
    await name.hand_over(A, waiters[0])
    assert await name.acquire(D, alive_ms=0) is not None
    await name.let_expire()
    await name.refused(D, alive_ms=0)  # a newcomer that does not queue, on a free lock
    assert (await name.state()).holder == waiters[1]
    await name.let_expire()
    await name.refused(D)  # a newcomer that does
    assert (await name.state()).holder == waiters[2]
    await name.let_expire()
    await name.refused(waiters[5])  # the last of all
    assert (await name.state()).holder == waiters[3]
    await name.release(waiters[4])  # it leaves
    await name.hand_over(waiters[3], waiters[5])
    assert (await name.state()).queue == [D]


async def check_newcomer_finds_the_lock_just_freed(world: World) -> None:
    """There is no lock and no liveness left, only a queue: still it does not overtake."""
    name = world.name()
    await _queued(name, A, B)
    await name.redis.delete(name.keys.lock, name.keys.alive)
    await name.refused(C)
    assert (await name.state()).holder == B


async def check_slow_head_that_polls_keeps_its_place(world: World) -> None:
    """Its liveness has passed, but nobody dropped it yet: its own poll is in time."""
    name = world.name()
    await _queued(name, A, B, C)
    await name.let_die(B)
    await name.refused(B)
    await name.hand_over(A, B)


async def check_dead_waiters_are_passed_over(world: World) -> None:
    """By a release, and by the poll of another; the live ones after them keep their order."""
    for by_release in (True, False):
        name = world.name(f"by release: {by_release}")
        await _queued(name, A, B, C, D)
        await name.let_die(B)
        if by_release:
            await name.release(A)
        else:
            await name.let_expire()
            await name.refused(D)
        state = await name.state()
        assert (state.holder, state.queue) == (C, [D])
        assert sorted(state.alive) == [D]


async def check_clock_step_keeps_the_order(world: World) -> None:
    """The queue was filled before the clock stepped back an hour: newcomers still stand behind."""
    name = world.name()
    await name.granted(A)
    hour_ahead_us = (await name.now_ms() + 3_600_000) * 1000
    await name.redis.zadd(name.keys.queue, {B: hour_ahead_us})
    await name.refused(C)
    await name.refused(D)
    assert (await name.state()).queue == [B, C, D]


async def check_waiter_without_liveness_is_not_overtaken(world: World) -> None:
    """Its liveness was evicted: it counts as live, for a release and for the poll of another."""
    name = world.name()
    await _queued(name, A, B, C, D)
    await name.redis.delete(name.keys.alive)
    await name.hand_over(A, B)
    await name.let_expire()
    await name.refused(D)
    assert (await name.state()).holder == C


# 5. Free with waiters lasts no longer than the next poll or release.


async def check_free_lock_goes_to_a_waiter_at_once(world: World) -> None:
    """By the release that frees it, else by the next poll, whoever makes it."""
    polls: list[Callable[[ByHand], Awaitable[object]]] = [
        lambda name: name.refused(C),
        lambda name: name.refused(C, alive_ms=0),
        lambda name: name.refused(D),
        lambda name: name.granted(B),
    ]
    for number, poll in enumerate(polls):
        name = world.name(f"poll {number}")
        await _queued(name, A, B, C)
        await name.let_expire()
        await poll(name)
        assert (await name.state()).holder == B
        name = world.name(f"release {number}")
        await _queued(name, A, B, C)
        await name.release(A)
        assert (await name.state()).holder == B


async def check_free_lock_goes_to_a_waiter_when_another_leaves(world: World) -> None:
    """The release of a waiter that gives up is a release, too, whatever its place was."""
    for number, (leaves, tombstone) in enumerate([(B, False), (B, True), (D, False), (A, False)]):
        name = world.name(f"{number}")
        await _queued(name, A, B, C, D)
        await name.let_expire()
        await name.release(leaves, tombstone=tombstone)
        state = await name.state()
        assert state.holder == (C if leaves == B else B)
        assert state.holder not in state.queue
        assert 5000 < state.ttls_ms["lock"] <= 6000


async def check_dead_waiters_do_not_keep_a_lock_free(world: World) -> None:
    """A hundred of them before the live one."""
    dead = [f"{OTHER}:{n}" for n in range(2, 102)]
    for by_release in (True, False):
        name = world.name(f"by release: {by_release}")
        await _queued(name, A, *dead, C)
        await name.let_die(*dead)
        if by_release:
            await name.hand_over(A, C)
        else:
            await name.let_expire()
            await name.refused(D)
        state = await name.state()
        assert state.holder == C
        assert 5000 < state.ttls_ms["lock"] <= 6000, "granted for as long as C is known to live"


# 6. Fencing tokens grow strictly, in the order of grants.


async def check_fencing_tokens_grow(world: World) -> None:
    """On every way to a grant, also where the last token is ahead of the clock."""
    for ahead in (False, True):
        name = world.name(f"ahead: {ahead}")
        if ahead:
            await name.redis.set(name.keys.fence, 2**52, ex=86_400)
        grants: list[int] = []
        await _queued(name, A, B, C)
        grants.append(_fencing_token(await name.state()))
        await name.release(A)
        grants.append(_fencing_token(await name.state()))
        await name.let_expire()
        await name.refused(D)  # handed to C
        grants.append(_fencing_token(await name.state()))
        await name.let_expire()
        grants.append((await name.granted(D)).fencing_token)  # taken by the head
        await name.release(D)
        grants.extend([await _once(name, A) for _ in range(3)])  # free and alone
        assert all(earlier < later for earlier, later in itertools.pairwise(grants)), grants
        if ahead:
            assert grants == list(range(2**52 + 1, 2**52 + 8))
        assert (await name.state()).fencing_token == grants[-1]


async def check_fencing_tokens_survive_the_loss_of_their_key(world: World) -> None:
    """Its ttl of a day, a flush, an eviction: the clock carries it on."""
    name = world.name()
    grants: list[int] = []
    for _ in range(3):
        await name.redis.delete(name.keys.fence)
        await _queued(name, A, B, C)
        grants.append(_fencing_token(await name.state()))
        await name.redis.delete(name.keys.fence)
        await name.release(A)
        grants.append(_fencing_token(await name.state()))
        await name.redis.delete(name.keys.fence)
        await name.let_expire()
        await name.refused(D)
        grants.append(_fencing_token(await name.state()))
        await name.redis.flushall()
    assert all(earlier < later for earlier, later in itertools.pairwise(grants)), grants


# 7. After any crash of any waiters and holder, and with every message lost, a live waiter holds
#    the lock within max(ttl, alive) + 2 * poll interval + RTT.

TTL_S = 0.3


def bound_s(ttl: float = TTL_S) -> float:
    """What invariant 7 allows, with `RTT_S`."""
    alive = _clock.alive(ttl)
    return max(ttl, alive) + 2 * _clock.poll_interval(alive) + RTT_S


async def _live_waiters(world: World, name: ByHand, behind: int) -> list[asyncio.Task[float]]:
    """Two waiters of two clients, which hear nothing; each tells when it held."""

    async def hold(locks: LockClient) -> float:
        async with locks.lock("name", ttl=TTL_S):
            return time.monotonic()

    waiting = []
    for number in range(2):
        locks = world.make_client(world.proxy.url)
        waiting.append(asyncio.create_task(hold(locks)))
        await _until_queued(name, behind + number + 1)
    return waiting


async def _hold_in_time(waiting: list[asyncio.Task[float]], crashed_at: float) -> None:
    """The first of them does; the second, whom no message reaches, within one more interval."""
    spare_s = _clock.poll_interval(_clock.alive(TTL_S)) + RTT_S
    _, late = await asyncio.wait(
        waiting, timeout=crashed_at + bound_s() + spare_s - time.monotonic()
    )
    for waiter in late:
        waiter.cancel()
    await asyncio.wait(waiting)
    assert not late, f"{len(late)} live waiters hold nothing"
    held_after_s = [await waiter - crashed_at for waiter in waiting]
    print(f"held {held_after_s[0]:.2f} s after the crash; bound {bound_s():.2f} s")
    assert held_after_s[0] <= bound_s()
    assert held_after_s == sorted(held_after_s)


async def check_crash_of_holder_and_head(world: World) -> None:
    """The holder and the two waiters at the head are gone; every message is lost."""
    lost = world.proxy.drop_messages()
    name = world.name()
    await _queued(name, A, B, C, ttl_ms=int(TTL_S * 1000), alive_ms=1000)
    waiting = await _live_waiters(world, name, behind=2)
    # As if the crash were now: each was heard of a moment ago.
    await name.extend(_value(await name.state()), ttl_ms=int(TTL_S * 1000))
    for dead in (A, B, C):
        await name.acquire(dead, ttl_ms=int(TTL_S * 1000), alive_ms=1000)
    await _hold_in_time(waiting, time.monotonic())
    assert lost.hits > 0


async def check_hand_off_to_a_crashed_waiter(world: World) -> None:
    """The holder lives and releases, to the two waiters at the head who are gone."""
    lost = world.proxy.drop_messages()
    name = world.name()
    holder = await world.make_client().lock("name", ttl=TTL_S).acquire()
    await name.refused(B, alive_ms=1000)
    await name.refused(C, alive_ms=1000)
    waiting = await _live_waiters(world, name, behind=2)
    await name.refused(B, alive_ms=1000)
    await name.refused(C, alive_ms=1000)
    crashed_at = time.monotonic()
    await holder.release()
    assert (await name.state()).holder == B
    await _hold_in_time(waiting, crashed_at)
    assert lost.hits > 0


# What the second round of a quorum may do to a node.


async def check_confirmation_never_shortens_a_life(world: World) -> None:
    """With a shorter ttl as with a longer one, with a fencing token and without."""
    name = world.name()
    for token, fencing in ((A, True), (B, False)):
        granted = await name.granted(token, ttl_ms=60_000)
        fencing_token = granted.fencing_token + 1 if fencing else 0
        assert await _confirmed(name, token, fencing_token, ttl_ms=1_000) > 50_000
        assert (await name.state()).ttls_ms["lock"] > 50_000
        assert await _confirmed(name, token, fencing_token, ttl_ms=90_000) > 80_000
        assert (await name.state()).ttls_ms["lock"] > 80_000
        await name.release(token)


async def check_confirmation_makes_nothing(world: World) -> None:
    """What is gone stays gone; what is another's stays his, also if its token begins alike."""
    name = world.name()
    granted = await name.granted(C)
    await name.let_expire()
    assert await _confirmed(name, C, granted.fencing_token + 1) is None
    assert await _is_free(name)
    assert (await name.state()).fencing_token == granted.fencing_token
    granted = await name.granted(C)
    before = (await name.state())._replace(ttls_ms={})
    for other in (A, B):
        assert await _confirmed(name, other, granted.fencing_token + 1) == before.value
        assert (await name.state())._replace(ttls_ms={}) == before


async def check_confirmation_never_lowers_the_counter(world: World) -> None:
    """A node that knows a larger one keeps it; one that knows a smaller one takes this."""
    name = world.name()
    granted = await name.granted(A)
    for above, expected in ((9, 9), (5, 9), (10, 10)):
        fencing_token = granted.fencing_token + above
        await _confirmed(name, A, fencing_token)
        state = await name.state()
        assert state.value == f"{A}/{fencing_token}"
        assert state.fencing_token == granted.fencing_token + expected
        assert all(ttl_ms > 0 for ttl_ms in state.ttls_ms.values()), state.ttls_ms
    await name.release(A)
    ahead = await name.now_ms() * 1000 + 3_600_000_000
    await name.granted(B)
    await _confirmed(name, B, ahead)
    await name.release(B)
    assert (await name.granted(C)).fencing_token == ahead + 1


CHECKS: list[Check] = [
    check_every_key_has_a_ttl,
    check_only_the_owner_removes_a_lock,
    check_owner_expiry_and_break_lock_remove_a_lock,
    check_holder_leaves_the_queue,
    check_grants_go_by_arrival,
    check_newcomer_finds_the_lock_just_freed,
    check_slow_head_that_polls_keeps_its_place,
    check_dead_waiters_are_passed_over,
    check_clock_step_keeps_the_order,
    check_waiter_without_liveness_is_not_overtaken,
    check_free_lock_goes_to_a_waiter_at_once,
    check_free_lock_goes_to_a_waiter_when_another_leaves,
    check_dead_waiters_do_not_keep_a_lock_free,
    check_fencing_tokens_grow,
    check_fencing_tokens_survive_the_loss_of_their_key,
    check_crash_of_holder_and_head,
    check_hand_off_to_a_crashed_waiter,
    check_confirmation_never_shortens_a_life,
    check_confirmation_makes_nothing,
    check_confirmation_never_lowers_the_counter,
]

# What each check is there to notice: (what is spoilt, the check, how).
MUTANTS: list[tuple[str, Check, Mutant]] = [
    (
        "1 free lock taken without ttl",
        check_every_key_has_a_ttl,
        Mutant("acquire", "ARGV[1] .. '/' .. text, 'PX', ARGV[2])", "ARGV[1] .. '/' .. text)"),
    ),
    (
        "1 lock taken in its turn without ttl",
        check_every_key_has_a_ttl,
        Mutant("acquire", "token .. '/' .. text, 'PX', ARGV[2])", "token .. '/' .. text)"),
    ),
    (
        "1 handed over by a poll without ttl",
        check_every_key_has_a_ttl,
        Mutant("acquire", ", 'PX', math.max(1, head_until_ms - now_ms))", ")"),
    ),
    (
        "1 handed over by release without ttl",
        check_every_key_has_a_ttl,
        Mutant("release", ", 'PX', string.format('%.0f', until_ms - now_ms))", ")"),
    ),
    (
        "1 fence without ttl where free",
        check_every_key_has_a_ttl,
        Mutant("acquire", "text, 'EX', 86400, 'GET')", "text, 'GET')"),
    ),
    (
        "1 fence without ttl in its turn",
        check_every_key_has_a_ttl,
        Mutant(
            "acquire",
            "text, 'EX', 86400)\n  return text",
            "text)\n  return text",
        ),
    ),
    (
        "1 fence without ttl in release",
        check_every_key_has_a_ttl,
        Mutant("release", "text, 'EX', 86400)", "text)"),
    ),
    (
        "1 queue without ttl",
        check_every_key_has_a_ttl,
        Mutant("acquire", "redis.call('EXPIRE', KEYS[3], 12)", ""),
    ),
    (
        "1 alive without ttl",
        check_every_key_has_a_ttl,
        Mutant("acquire", "redis.call('PEXPIRE', KEYS[4], 12000)", ""),
    ),
    (
        "1 alive gets its ttl from those who queue only",
        check_every_key_has_a_ttl,
        Mutant("acquire", "if redis.call('PTTL', KEYS[4]) < 12000", "if alive_ms > 0"),
    ),
    (
        "1 tombstone without ttl",
        check_every_key_has_a_ttl,
        Mutant("release", "redis.call('PEXPIRE', KEYS[4], 60000)", ""),
    ),
    (
        "2 release of another, nobody waits",
        check_only_the_owner_removes_a_lock,
        Mutant(
            "release",
            "  if ours then\n    redis.call('DEL'",
            "  if true then\n    redis.call('DEL'",
        ),
    ),
    (
        "2 release of another, somebody waits",
        check_only_the_owner_removes_a_lock,
        Mutant("release", "if not ours and (value or wrong) then", "if false then"),
    ),
    (
        "2 release by a token that begins alike",
        check_only_the_owner_removes_a_lock,
        Mutant(
            "release",
            "string.sub(value, 1, #token + 1) == token .. '/'",
            "string.sub(value, 1, #token) == token",
        ),
    ),
    (
        "2 poll takes a held lock",
        check_only_the_owner_removes_a_lock,
        Mutant("acquire", "if not value then", "if true then"),
    ),
    (
        "2 poll confirms a token that begins alike",
        check_only_the_owner_removes_a_lock,
        Mutant(
            "acquire",
            "string.sub(value, 1, #token + 1) == token .. '/'",
            "string.sub(value, 1, #token) == token",
        ),
    ),
    (
        "2 extension of another",
        check_only_the_owner_removes_a_lock,
        Mutant("extend", "if value == ARGV[n + 1] then", "if value then"),
    ),
    (
        "2 owner cannot release",
        check_owner_expiry_and_break_lock_remove_a_lock,
        Mutant(
            "release",
            "    redis.call('DEL', KEYS[1])\n    return {1, false}\n  end\n  return wrong",
            "    return {1, false}\n  end\n  return wrong",
        ),
    ),
    (
        "3 taken in its turn",
        check_holder_leaves_the_queue,
        Mutant(
            "acquire",
            "if not head or head == token then\n    redis.call('ZREM', KEYS[3], token)",
            "if not head or head == token then",
        ),
    ),
    (
        "3 confirmed",
        check_holder_leaves_the_queue,
        Mutant(
            "acquire",
            "  redis.call('ZREM', KEYS[3], token)\n"
            "  redis.call('ZREM', KEYS[4], token)\n  local left",
            "  redis.call('ZREM', KEYS[4], token)\n  local left",
        ),
    ),
    (
        "3 handed over by a poll",
        check_holder_leaves_the_queue,
        Mutant(
            "acquire",
            "  redis.call('ZREM', KEYS[3], head)\n"
            "  redis.call('ZREM', KEYS[4], head)\n  redis.pcall",
            "  redis.call('ZREM', KEYS[4], head)\n  redis.pcall",
        ),
    ),
    (
        "3 handed over by release",
        check_holder_leaves_the_queue,
        Mutant("release", "redis.call('ZREM', KEYS[3], head)\n", "\n"),
    ),
    (
        "4 anybody takes a free lock",
        check_grants_go_by_arrival,
        Mutant("acquire", "if not head or head == token then", "if true then"),
    ),
    (
        "4 free is free, whoever waits",
        check_grants_go_by_arrival,
        Mutant(
            "acquire",
            "redis.call('EXISTS', KEYS[1], KEYS[3], KEYS[4])",
            "redis.call('EXISTS', KEYS[1])",
        ),
    ),
    (
        "4 a queue without liveness is no queue",
        check_newcomer_finds_the_lock_just_freed,
        Mutant("acquire", "KEYS[1], KEYS[3], KEYS[4])", "KEYS[1], KEYS[4])"),
    ),
    (
        "4 release hands to the last",
        check_grants_go_by_arrival,
        Mutant(
            "release",
            "redis.call('ZRANGE', KEYS[3], 0, 0)[1]",
            "redis.call('ZRANGE', KEYS[3], -1, -1)[1]",
        ),
    ),
    (
        "4 each poll goes to the end",
        check_grants_go_by_arrival,
        Mutant("acquire", "if not place then", "if true then"),
    ),
    (
        "4 release leaves the releasing waiter in the queue",
        check_grants_go_by_arrival,
        Mutant("release", "redis.call('ZREM', KEYS[3], token)", ""),
    ),
    (
        "4 others are dropped before my liveness is refreshed",
        check_slow_head_that_polls_keeps_its_place,
        Mutant(
            "acquire",
            "if alive_ms > 0 then\n  set_liveness(token, now_ms + alive_ms)\nend\n"
            "local head, head_until_ms = live_head()\n",
            "local head, head_until_ms = live_head()\n"
            "if alive_ms > 0 then\n  set_liveness(token, now_ms + alive_ms)\nend\n",
        ),
    ),
    (
        "4 release hands to the dead",
        check_dead_waiters_are_passed_over,
        Mutant(
            "release", "if until_ms > now_ms then", "if true then\n    until_ms = now_ms + 1000"
        ),
    ),
    (
        "4 poll hands to the dead",
        check_dead_waiters_are_passed_over,
        Mutant("acquire", "if until_ms > now_ms or n == 1000 then", "if true then"),
    ),
    (
        "4 place by the clock alone",
        check_clock_step_keeps_the_order,
        Mutant("acquire", "math.max(highest + 1, now_us)", "now_us"),
    ),
    (
        "4 no liveness is death, for release",
        check_waiter_without_liveness_is_not_overtaken,
        Mutant("release", "or now_ms + 6000), now_ms", "or 0), now_ms"),
    ),
    (
        "4 no liveness is death, for a poll",
        check_waiter_without_liveness_is_not_overtaken,
        Mutant("acquire", "or now_ms + 6001)", "or 0)"),
    ),
    (
        "5 release only deletes",
        check_free_lock_goes_to_a_waiter_at_once,
        Mutant("release", "for _ = 1, 1000 do", "for _ = 1, 0 do"),
    ),
    (
        "5 poll leaves a free lock that is not its own",
        check_free_lock_goes_to_a_waiter_at_once,
        Mutant(
            "acquire",
            "redis.call('SET', KEYS[1], value, 'PX', math.max(1, head_until_ms - now_ms))",
            "",
        ),
    ),
    (
        "5 only a release of the holder hands over",
        check_free_lock_goes_to_a_waiter_when_another_leaves,
        Mutant("release", "if not ours and (value or wrong) then", "if not ours then"),
    ),
    (
        "5 release passes over ten dead waiters at most",
        check_dead_waiters_do_not_keep_a_lock_free,
        Mutant("release", "for _ = 1, 1000 do", "for _ = 1, 10 do"),
    ),
    (
        "5 poll passes over ten dead waiters at most",
        check_dead_waiters_do_not_keep_a_lock_free,
        Mutant("acquire", "or n == 1000 then", "or n == 10 then"),
    ),
    (
        "6 the clock alone where free",
        check_fencing_tokens_grow,
        Mutant("acquire", "if last >= fencing_token then", "if false then"),
    ),
    (
        "6 the clock alone in its turn",
        check_fencing_tokens_grow,
        Mutant("acquire", "math.max(last + 1, now_us)", "now_us"),
    ),
    (
        "6 the clock alone in release",
        check_fencing_tokens_grow,
        Mutant("release", "math.max((tonumber(last or 0) or 0) + 1, now_us)", "now_us"),
    ),
    (
        "6 the same again in its turn",
        check_fencing_tokens_grow,
        Mutant("acquire", "math.max(last + 1, now_us)", "math.max(last, now_us)"),
    ),
    (
        "6 not written down in its turn",
        check_fencing_tokens_grow,
        Mutant(
            "acquire",
            "  redis.call('SET', KEYS[2], text, 'EX', 86400)\n  return text",
            "  return text",
        ),
    ),
    (
        "6 not written down in release",
        check_fencing_tokens_grow,
        Mutant("release", "    redis.call('SET', KEYS[2], text, 'EX', 86400)\n", ""),
    ),
    (
        "6 the counter alone in its turn",
        check_fencing_tokens_survive_the_loss_of_their_key,
        Mutant("acquire", "math.max(last + 1, now_us)", "last + 1"),
    ),
    (
        "6 the counter alone in release",
        check_fencing_tokens_survive_the_loss_of_their_key,
        Mutant("release", "math.max((tonumber(last or 0) or 0) + 1, now_us)", "(last or 0) + 1"),
    ),
    (
        "7 a dead head is kept alive by the polls of others",
        check_crash_of_holder_and_head,
        Mutant("acquire", "if until_ms > now_ms + 6000 then", "if true then"),
    ),
    (
        "7 a waiter does not tell that it lives",
        check_crash_of_holder_and_head,
        Mutant("acquire", "  set_liveness(token, now_ms + alive_ms)\n", ""),
    ),
    (
        "7 a hand-off outlives its waiter",
        check_hand_off_to_a_crashed_waiter,
        Mutant("release", "string.format('%.0f', until_ms - now_ms)", "60000"),
    ),
    (
        "quorum: confirm cuts an older life",
        check_confirmation_never_shortens_a_life,
        Mutant("confirm", "if left < tonumber(ARGV[2]) then", "if true then"),
    ),
    (
        "quorum: confirm tells of a life that it did not give",
        check_confirmation_never_shortens_a_life,
        Mutant("confirm", "redis.call('PEXPIRE', KEYS[1], ARGV[2])", ""),
    ),
    (
        "quorum: confirm takes the ttl away",
        check_confirmation_never_lowers_the_counter,
        Mutant("confirm", "ARGV[3], 'KEEPTTL')", "ARGV[3])\n    if true then return {1, 1} end"),
    ),
    (
        "quorum: confirm makes a key again",
        check_confirmation_makes_nothing,
        Mutant(
            "confirm",
            "if not value or",
            "value = value or token\n"
            "redis.call('SET', KEYS[1], value, 'PX', ARGV[2], 'NX')\n"
            "if not value or",
        ),
    ),
    (
        "quorum: confirm takes another's",
        check_confirmation_makes_nothing,
        Mutant("confirm", "string.sub(value, 1, #token) ~= token", "false"),
    ),
    (
        "quorum: confirm by what begins alike",
        check_confirmation_makes_nothing,
        Mutant("confirm", "local token = ARGV[1] .. '/'", "local token = ARGV[1]"),
    ),
    (
        "quorum: confirm lowers a counter",
        check_confirmation_never_lowers_the_counter,
        Mutant("confirm", "< tonumber(ARGV[3]) then", "~= tonumber(ARGV[3]) then"),
    ),
    (
        "quorum: confirm leaves a counter",
        check_confirmation_never_lowers_the_counter,
        Mutant("confirm", "redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)", ""),
    ),
    (
        "quorum: confirm leaves the fence without ttl",
        check_confirmation_never_lowers_the_counter,
        Mutant("confirm", "ARGV[3], 'EX', 86400)", "ARGV[3])"),
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_scripts_as_they_are_keep_the_invariant(world: World, check: Check) -> None:
    """Each check, on the scripts that we ship."""
    await check(world)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [pytest.param(check, mutant, id=label) for label, check, mutant in MUTANTS],
)
async def test_script_without_its_line_breaks_the_invariant(
    world: World, check: Check, mutant: Mutant
) -> None:
    """Each check, where the line that keeps the invariant is taken out: it must fail."""
    with mutant.applied(), pytest.raises(AssertionError):
        await check(world)


def test_every_check_has_a_mutant() -> None:
    """No check that nothing can turn red."""
    assert {check.__name__ for _, check, _ in MUTANTS} == {check.__name__ for check in CHECKS}


async def test_waiter_behind_killed_processes_holds_in_time(world: World) -> None:
    """Invariant 7 with real processes: SIGKILL for the holder's and the head's."""
    lost = world.proxy.drop_messages()
    name = world.name()
    async with (
        Worker(world.proxy.url, ttl=TTL_S) as holder,
        Worker(world.proxy.url, ttl=TTL_S) as head,
    ):
        await holder.asks_for("name")
        await until(lambda: _is_held(name))
        await head.asks_for("name", times=2)
        await _until_queued(name, 2)
        waiting = await _live_waiters(world, name, behind=2)
        holder.kill()
        head.kill()
        await _hold_in_time(waiting, time.monotonic())
        assert lost.hits > 0


async def test_waiter_behind_a_killed_head_is_handed_the_lock_in_time(world: World) -> None:
    """The holder lives and releases to a process that was killed in the queue."""
    lost = world.proxy.drop_messages()
    name = world.name()
    async with Worker(world.proxy.url, ttl=TTL_S) as head:
        lease = await world.make_client().lock("name", ttl=TTL_S).acquire()
        await head.asks_for("name", times=1)
        await _until_queued(name, 1)
        waiting = await _live_waiters(world, name, behind=1)
        head.kill()
        crashed_at = time.monotonic()
        await lease.release()
        await _hold_in_time(waiting, crashed_at)
        assert lost.hits > 0


async def _confirmed(name: ByHand, token: str, fencing_token: int, *, ttl_ms: int = 30_000) -> Any:
    """The ms left; or what stands in the key instead, if anything does."""
    keys = (name.keys.lock, name.keys.fence)
    _, answer = await name.redis.eval(
        text_of("confirm"), len(keys), *keys, token, str(ttl_ms), str(fencing_token)
    )
    return answer


def _value(state: State) -> str:
    assert state.value is not None
    return state.value


def _fencing_token(state: State) -> int:
    return int(_value(state).rpartition("/")[2])


async def _queued(
    name: ByHand, holder: str, *waiters: str, ttl_ms: int = 30_000, alive_ms: int = 6_000
) -> Grant:
    """One holds, the others wait in this order."""
    grant = await name.granted(holder, ttl_ms=ttl_ms)
    for place, waiter in enumerate(waiters):
        refusal = await name.refused(waiter, ttl_ms=ttl_ms, alive_ms=alive_ms)
        assert refusal.place == place
    return grant


async def _once(name: ByHand, token: str) -> int:
    grant = await name.granted(token)
    await name.release(token)
    return grant.fencing_token


async def _is_free(name: ByHand) -> bool:
    return (await name.state()).value is None


async def _is_held(name: ByHand) -> bool:
    return not await _is_free(name)


async def _until_queued(name: ByHand, waiters: int) -> None:
    async def are_queued() -> bool:
        return len((await name.state()).queue) == waiters

    await until(are_queued)
