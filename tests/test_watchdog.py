"""The watchdog: a lease lives as long as its holder works, and not a moment on a guess."""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import LeaseLostError, LockClient, LostReason, ServerUnreachable, _clock
from aiodlock._validity import Validity
from aiodlock._watchdog import Watchdogs
from aiodlock.testing import LockServer
from tests.conftest import MakeClient
from tests.holders import (
    KEY,
    ROUND_TRIP_S,
    NextHolder,
    extensions_seen,
    holding,
    script_digest,
    timers_of,
    watchdog_timers,
    watchdogs,
)
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until

# The design's bound on how late a holder is told, and how often a busy machine may miss it.
TOLD_WITHIN_S = 0.1
ATTEMPTS = 3


# The key is kept.


Trouble = Callable[[ChaosProxy, Redis], Awaitable[object]]


async def nothing(proxy: ChaosProxy, redis: Redis) -> None:
    """Nothing happens."""


async def kill_all(proxy: ChaosProxy, redis: Redis) -> None:
    """Every connection of the client is reset."""
    assert proxy.kill_connections() > 0


async def flush_scripts(proxy: ChaosProxy, redis: Redis) -> None:
    """The server forgets every script."""
    await redis.script_flush()


async def drop_a_reply(proxy: ChaosProxy, redis: Redis) -> None:
    """The next extension is done by the server, and never answered: the connection breaks."""
    digest = await script_digest(redis, "extend")
    proxy.drop_replies(1, matching=digest.encode(), close=True)


async def test_bodies_of_five_ttl_keep_their_keys_whatever_happens_twice(
    server: LockServer, redis: Redis
) -> None:
    """The same value all the time, always with time left; no loss, and a proper release."""
    async with asyncio.TaskGroup() as group:
        for trouble in (nothing, kill_all, flush_scripts, drop_a_reply):
            group.create_task(_hold_through(trouble, server, redis), name=trouble.__name__)
    assert await leftovers(redis) == []


async def _hold_through(trouble: Trouble, server: LockServer, redis: Redis) -> None:
    name, ttl = trouble.__name__, 0.5
    key = f"aiodlock:{{{name}}}"
    async with ChaosProxy(server.port) as proxy, LockClient.from_url(proxy.url) as locks:
        async with locks.lock(name, ttl=ttl) as lease:
            value = await redis.get(key)
            ends_at = time.monotonic() + 5 * ttl
            troubles_at = [ends_at - 3.5 * ttl, ends_at - 1.5 * ttl]
            while time.monotonic() < ends_at:
                if troubles_at and time.monotonic() >= troubles_at[0]:
                    del troubles_at[0]
                    await trouble(proxy, redis)
                lease.check()
                assert await redis.get(key) == value, name
                await asyncio.sleep(0.02)
            assert troubles_at == []
        assert lease.state == "released"


async def test_stall_shorter_than_the_time_left_loses_nothing(locks: LockClient) -> None:
    """A late watchdog extends at once, and the body goes on."""
    async with locks.lock("n", ttl=0.9) as lease:
        time.sleep(0.4)  # noqa: ASYNC251 - past the first extension, not past the deadline
        lease.check()
        await until(lambda: lease.remaining > 0.7)
        await asyncio.sleep(0.4)
        lease.check()


async def test_server_that_pauses_for_less_than_the_time_left_costs_nothing(
    make_client: MakeClient, server: LockServer
) -> None:
    """At risk while it is silent, held again as soon as it answers."""
    async with holding(make_client().lock("n", ttl=1.2)) as holder:
        lease = await holder.entered()
        server.pause()
        try:
            await until(lambda: lease.state == "at_risk")
            assert lease.is_held
        finally:
            server.resume()
        await until(lambda: lease.state == "held")
        await until(lambda: lease.remaining > 0.9)
        assert holder.cancels == 0


async def test_server_that_forbids_for_a_moment_costs_nothing(
    make_client: MakeClient, redis: Redis
) -> None:
    """A refused extension is a failed one like another: tried again until the deadline."""
    async with holding(make_client().lock("n", ttl=1.2)) as holder:
        lease = await holder.entered()
        await redis.acl_setuser("default", enabled=True, commands=["-evalsha", "-eval"])
        try:
            await until(lambda: lease.state == "at_risk")
        finally:
            await redis.acl_setuser("default", enabled=True, commands=["+evalsha", "+eval"])
        await until(lambda: lease.state == "held")
        assert holder.cancels == 0


async def test_lease_got_by_hand_off_starts_short_and_is_extended_in_time(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """2 to 6 s at first, whatever the ttl; its first extension comes after a third of that."""
    held = await make_client().lock("n", ttl=30).acquire()
    waiting = asyncio.create_task(make_client(proxy.url).lock("n", ttl=30).acquire())
    # Its first poll queues; the second follows the subscription, and from then on it sleeps.
    await until(lambda: proxy.requests["EVALSHA"] >= 2)
    await asyncio.sleep(ROUND_TRIP_S)
    await held.release()
    async with await waiting as lease:
        began, validity = _clock.now(), lease.remaining
        value = await redis.get(KEY)
        assert 2 <= validity <= 6
        assert await redis.pttl(KEY) <= 6000
        await until(lambda: lease.remaining > 20, limit_s=validity / 3 + 1)
        assert _clock.now() - began >= validity / 3 * 0.9 - 0.01
        assert await redis.pttl(KEY) > 20_000
        assert await redis.get(KEY) == value


async def test_lease_got_by_hand_off_without_watchdog_starts_with_its_whole_ttl(
    make_client: MakeClient, redis: Redis
) -> None:
    """Nothing would extend it later, so one poll confirms it first."""
    held = await make_client().lock("n").acquire()
    lock = make_client().lock("n", ttl=30, auto_extend=False)
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: redis.zcard(f"{KEY}:queue"))
    await held.release()
    async with await waiting as lease:
        assert lease.remaining > 25
        assert await redis.pttl(KEY) > 25_000


async def test_holder_that_asks_for_longer_is_not_cut_back_by_its_watchdog(
    locks: LockClient, redis: Redis
) -> None:
    """The watchdog makes the time left at least ttl; more than that stays."""
    async with extensions_seen(redis) as seen, locks.lock("n", ttl=0.4) as lease:
        assert await lease.extend(60) > 50
        await until(lambda: len(seen) >= 2)
        assert lease.remaining > 50
        assert await redis.pttl(KEY) > 50_000
        assert await lease.extend(0.05) > 50
        assert await redis.pttl(KEY) > 50_000


# The loss is told.


@pytest.mark.parametrize(
    ("theirs", "reason"), [(None, LostReason.DELETED), ("theirs", LostReason.STOLEN)]
)
async def test_body_whose_key_is_taken_from_outside_is_told_at_the_next_extension(
    make_client: MakeClient, redis: Redis, theirs: str | None, reason: LostReason
) -> None:
    """Cancelled once, within ttl/3 and a round trip; its exit leaves the other's key alone."""
    ttl = 1.5
    async with holding(make_client().lock("n", ttl=ttl)) as holder:
        lease = await holder.entered()
        since = _clock.now()
        if theirs is None:
            await redis.delete(KEY)
        else:
            # For less than our ttl, so that an extension of ours would show.
            await redis.set(KEY, theirs, px=1200)
        left_there = await NextHolder.of(redis)
        error = await holder.lost()
        assert (error.reason, error.fencing_token) == (reason, lease.fencing_token)
        assert holder.told_at - since <= ttl / 3 + ROUND_TRIP_S
        assert (holder.cancels, holder.has_cleaned_up) == (1, True)
        assert await left_there.is_untouched(redis)


async def test_body_on_a_stopped_server_is_told_at_its_deadline(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """Not before, at most 100 ms after; what it still sends touches nothing of the next holder."""
    late_s = []
    for _ in range(ATTEMPTS):
        locks = make_client(request_timeout=0.2)
        async with holding(locks.lock("n", ttl=0.6)) as holder:
            lease = await holder.entered()
            server.pause()
            try:
                error = await holder.lost()
            finally:
                server.resume()
            assert (holder.cancels, holder.has_cleaned_up) == (1, True)
        late_s.append(holder.late_s)
        other = make_client().lock("n", ttl=20, auto_extend=False)
        async with await other.acquire(wait_timeout=5) as theirs:
            assert theirs.fencing_token > lease.fencing_token
            next_holder = await NextHolder.of(redis)
            await locks.aclose()
            assert await next_holder.is_untouched(redis)
        # A busy machine may be late itself; then the loop is to blame, and says so.
        if error.reason is LostReason.UNREACHABLE and late_s[-1] <= TOLD_WITHIN_S:
            break
        assert error.reason in (LostReason.UNREACHABLE, LostReason.LOOP_STALLED)
    else:
        pytest.fail(f"told so many seconds after the deadline: {late_s}")
    assert min(late_s) >= -0.001


async def test_extension_answered_after_the_deadline_comes_too_late(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """We could not know that it would come; the key, which is ours still, is given back."""
    digest = await script_digest(redis, "extend")
    proxy.delay_replies(1.0, matching=digest.encode())
    async with holding(make_client(proxy.url).lock("n", ttl=0.6)) as holder:
        lease = await holder.entered()
        error = await holder.lost()
        assert error.reason is LostReason.UNREACHABLE
        assert lease.state == "lost"
    proxy.heal()
    await until(lambda: _is_free(redis))


async def _is_free(redis: Redis) -> bool:
    return await leftovers(redis, ignoring_tombstones=True) == []


async def test_lease_without_watchdog_is_expired_at_its_deadline(
    make_client: MakeClient, redis: Redis
) -> None:
    """Nothing extends it, no task is there for it, and a timer tells."""
    late_s = []
    async with extensions_seen(redis) as seen:
        for _ in range(ATTEMPTS):
            async with holding(make_client().lock("n", ttl=0.4, auto_extend=False)) as holder:
                assert watchdogs() == []
                error = await holder.lost()
                assert (holder.cancels, error.reason) == (1, LostReason.EXPIRED)
            late_s.append(holder.late_s)
            if late_s[-1] <= TOLD_WITHIN_S:
                break
        else:
            pytest.fail(f"told so many seconds after the deadline: {late_s}")
        assert seen == []
    assert min(late_s) >= -0.001
    assert watchdog_timers() == []


async def test_lease_that_was_shown_as_lost_is_never_held_again(
    locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to an extension comes after the deadline, which nobody but a user noticed."""
    lease = await locks.lock("n", ttl=5).acquire()
    extension = lease._begin_extension(5)
    later = _clock.now() + 6
    with monkeypatch.context() as patch:
        patch.setattr(_clock, "now", lambda: later)
        assert lease.state == "lost"
        lease._end_extension(extension, later + 5)
        assert (lease.state, lease.is_held) == ("lost", False)
    assert lease.state == "lost"
    assert await lease.wait_lost() is LostReason.LOOP_STALLED
    assert await lease.release() is True


async def test_lease_held_for_max_hold_is_lost_and_its_key_ends_then(
    make_client: MakeClient, redis: Redis
) -> None:
    """Extensions are cut so that the key ends at grant + max_hold; after a cut one none is sent."""
    ttl, max_hold = 0.45, 0.75
    async with extensions_seen(redis) as seen:
        began = _clock.now()
        async with holding(make_client().lock("n", ttl=ttl, max_hold=max_hold)) as holder:
            granted = _clock.now()
            key_ends = []
            while not holder.task.done():
                asked = _clock.now()
                pttl = await redis.pttl(KEY)
                if pttl > 0:
                    key_ends.append(asked + pttl / 1000)
                await asyncio.sleep(0.01)
            error = await holder.lost()
            assert error.reason is LostReason.MAX_HOLD
            assert holder.cancels == 1
        assert max(key_ends) <= granted + max_hold + ROUND_TRIP_S
        assert max(key_ends) >= began + max_hold - 0.01
        # Told at the deadline of the last extension: a drift before the key ends, never after.
        assert began + max_hold * 0.98 - 0.01 <= holder.told_at
        assert holder.told_at <= granted + max_hold + TOLD_WITHIN_S + ROUND_TRIP_S
        # The first, near 0.15 s, reaches to 0.6; the next, near 0.3 s, is cut.
        assert 1 <= len(seen) <= 3
        count = len(seen)
        await asyncio.sleep(ttl / 2)
        assert len(seen) == count
    assert await leftovers(redis) == []


async def test_lease_after_its_last_extension_sends_no_more(
    make_client: MakeClient, redis: Redis
) -> None:
    """With max_hold = ttl already the first extension is cut, and the only one."""
    async with extensions_seen(redis) as seen:
        lock = make_client().lock("n", ttl=0.4, max_hold=0.4)
        async with holding(lock) as holder:
            assert (await holder.lost()).reason is LostReason.MAX_HOLD
        assert len(seen) == 1


@pytest.mark.parametrize("extended_before", [False, True])
async def test_check_after_the_loop_stood_still_tells_at_once(
    locks: LockClient, *, extended_before: bool
) -> None:
    """No turn of the loop is needed, and the body that found out itself is not cancelled too."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("n", ttl=0.3) as lease:
            first = _clock.now() + lease.remaining
            if extended_before:
                await until(lambda: _clock.now() + lease.remaining > first + 0.01)
            time.sleep(0.5)  # noqa: ASYNC251 - this is the fault
            assert (lease.state, lease.is_held) == ("lost", False)
            with pytest.raises(LeaseLostError) as at_once:
                lease.check()
            assert at_once.value.reason is LostReason.LOOP_STALLED
            await asyncio.sleep(0.05)  # no cancel comes
    assert lost.value.reason is LostReason.LOOP_STALLED


@pytest.mark.parametrize("extended_before", [False, True])
async def test_body_that_blocked_the_loop_is_told_within_one_turn(
    make_client: MakeClient, redis: Redis, *, extended_before: bool
) -> None:
    """After the stall one turn of the loop passes, no more."""
    turns = 0
    with pytest.raises(LeaseLostError) as lost:
        async with make_client().lock("n", ttl=0.3) as lease:
            first = _clock.now() + lease.remaining
            if extended_before:
                await until(lambda: _clock.now() + lease.remaining > first + 0.01)
            time.sleep(0.5)  # noqa: ASYNC251 - this is the fault
            while turns < 20:
                await asyncio.sleep(0)
                turns += 1
    assert lost.value.reason is LostReason.LOOP_STALLED
    assert turns <= 1
    assert lease.state == "lost"
    assert await leftovers(redis) == []


async def test_stalled_holder_leaves_the_next_one_alone(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """Another took the lock while the loop stood still: its value and its time stay."""
    with (
        BlockingRedis.from_url(server.url, decode_responses=True) as admin,
        pytest.raises(LeaseLostError) as lost,
    ):
        async with make_client().lock("n", ttl=0.3):
            time.sleep(0.6)  # noqa: ASYNC251 - this is the fault
            # As if another process had come meanwhile; this loop saw nothing of it.
            assert admin.set(KEY, "theirs", px=20_000, nx=True)
            ends_at = _clock.now() + 20
            await asyncio.sleep(5)
    assert lost.value.reason is LostReason.LOOP_STALLED
    assert await NextHolder("theirs", ends_at).is_untouched(redis)


async def test_body_told_by_raise_only_runs_to_its_end(
    make_client: MakeClient, redis: Redis
) -> None:
    """With `on_lost="raise"` nothing is cancelled; the loss comes out at the exit."""
    ran_to_its_end = False
    with pytest.raises(LeaseLostError) as lost:
        async with make_client().lock("n", ttl=0.3, on_lost="raise") as lease:
            await redis.set(KEY, "theirs", px=20_000)
            next_holder = await NextHolder.of(redis)
            assert await lease.wait_lost() is LostReason.STOLEN
            await asyncio.sleep(0.05)
            assert lease.state == "lost"
            ran_to_its_end = True
    assert ran_to_its_end
    assert lost.value.reason is LostReason.STOLEN
    assert await next_holder.is_untouched(redis)


async def test_partitioned_holder_comes_back_to_find_another(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """What it sent during the partition arrives late, and changes nothing of the next holder."""
    cut_off = make_client(proxy.url, request_timeout=0.2)
    async with holding(cut_off.lock("n", ttl=1.2)) as holder:
        lease = await holder.entered()
        proxy.black_hole()
        # For less than the first one's ttl, so that an extension of that would show.
        other = make_client().lock("n", ttl=0.8, auto_extend=False, on_lost="raise")
        async with await other.acquire(wait_timeout=5) as theirs:
            next_holder = await NextHolder.of(redis)
            assert (await holder.lost()).reason is LostReason.UNREACHABLE
            # It knew no later than the other could have the lock.
            assert lease.fencing_token < theirs.fencing_token
            async with extensions_seen(redis) as seen:
                proxy.heal()
                await until(lambda: len(seen) > 0)
            await cut_off.aclose()
            assert await next_holder.is_untouched(redis)
            theirs.check()


async def test_states_follow_the_server_there_and_back(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """held, at risk, held, at risk, lost: each told by `state`, and none besides."""
    locks = make_client(proxy.url, request_timeout=0.2)
    states: list[str] = []
    async with holding(locks.lock("n", ttl=0.8)) as holder:
        lease = await holder.entered()

        async def note() -> None:
            while True:
                if states[-1:] != [lease.state]:
                    states.append(lease.state)
                await asyncio.sleep(0.001)

        noting = asyncio.create_task(note())
        proxy.black_hole()
        await until(lambda: lease.state == "at_risk")
        proxy.heal()
        await until(lambda: lease.state == "held")
        proxy.black_hole()
        await holder.lost()
        await until(lambda: states[-1] == "lost")
        noting.cancel()
        await asyncio.wait({noting})
        proxy.heal()
    assert states == ["held", "at_risk", "held", "at_risk", "lost"]


async def test_lost_lease_tells_everyone_who_waits_for_it(locks: LockClient, redis: Redis) -> None:
    """As many tasks as like may await the loss; a late one is told at once."""
    lease = await locks.lock("n", ttl=0.3).acquire()
    waiting = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
    await redis.delete(KEY)
    reasons = await asyncio.wait_for(asyncio.gather(*waiting), 3)
    assert [*reasons, await lease.wait_lost()] == [LostReason.DELETED] * 4
    assert await lease.release() is False


# The task itself.


async def test_watchdog_starts_when_the_first_extension_is_due_and_ends_with_the_release(
    locks: LockClient,
) -> None:
    """No task before a third of the validity; none, and no timer, once release has returned."""
    lease = await locks.lock("n", ttl=0.9).acquire()
    began, due_s = _clock.now(), lease.remaining / 3
    assert watchdogs() == []
    await until(lambda: watchdogs() == ["aiodlock watchdog n"])
    assert _clock.now() - began >= due_s * 0.9 - 0.01
    assert await lease.release() is True
    assert watchdogs() == []
    assert watchdog_timers() == []


async def test_watchdog_of_a_short_body_is_never_made(locks: LockClient, redis: Redis) -> None:
    """Most bodies are short: no task, no timer but the one for all leases, and no extension."""
    async with extensions_seen(redis) as seen:
        for _ in range(20):
            async with locks.lock("n", ttl=5), locks.lock("m", ttl=5):
                assert (watchdogs(), watchdog_timers()) == ([], [])
                assert len(timers_of(Watchdogs)) == 1
                await asyncio.sleep(0)
                assert watchdogs() == []
        await locks.aclose()
        assert timers_of(Watchdogs) == []
        assert seen == []


async def test_watchdog_ends_when_it_finds_the_loss(locks: LockClient, redis: Redis) -> None:
    """There is nothing to watch any more: no task sleeps on until a next extension."""
    lease = await locks.lock("n", ttl=1.5).acquire()
    await redis.delete(KEY)
    assert await lease.wait_lost() is LostReason.DELETED
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert watchdogs() == []
    assert watchdog_timers() == []
    assert await lease.release() is False


async def test_client_closed_after_a_lost_lease_was_dropped_has_no_task_left(
    make_client: MakeClient, redis: Redis
) -> None:
    """Nobody releases a lease that is lost and forgotten; its watchdog must end all the same."""
    locks = make_client()
    lease = await locks.lock("n", ttl=1.5).acquire()
    await redis.delete(KEY)
    assert await lease.wait_lost() is LostReason.DELETED
    del lease
    gc.collect()
    await locks.aclose()
    assert [t.get_name() for t in asyncio.all_tasks() if t.get_name().startswith("aiodlock")] == []


async def test_lease_thrown_away_while_held_stops_its_watchdog_and_warns(
    locks: LockClient, redis: Redis
) -> None:
    """Nobody could release it any more, so nobody must extend it: the ttl frees it."""
    thrown_away = [await locks.lock("n", ttl=1.0).acquire()]
    first = _clock.now() + thrown_away[0].remaining
    await until(lambda: _clock.now() + thrown_away[0].remaining > first + 0.01)
    assert watchdogs() == ["aiodlock watchdog n"]
    with pytest.warns(ResourceWarning, match="'n'.*thrown away while held"):
        thrown_away.clear()
    await until(lambda: watchdogs() == [])
    assert watchdog_timers() == []
    assert await redis.pttl(KEY) <= 1000
    await until(lambda: _is_free(redis), limit_s=1.0 + 2)


async def test_extensions_come_each_third_of_the_ttl_or_a_little_sooner(
    locks: LockClient, redis: Redis
) -> None:
    """The jitter only shortens, by a tenth at most; the pauses are not all the same."""
    ttl = 0.5
    valid = ttl * 0.99 - 0.002
    async with extensions_seen(redis) as seen, locks.lock("n", ttl=ttl):
        await until(lambda: len(seen) >= 7)
    pauses = [later - earlier for earlier, later in itertools.pairwise(seen)]
    # A busy machine delays some of them; the middle one shows the rule.
    assert valid / 3 * 0.9 - 0.02 <= statistics.median(pauses) <= valid / 3 + 0.05
    assert max(pauses) - min(pauses) > 0.0005


async def test_release_sends_no_extension_after_it(locks: LockClient, redis: Redis) -> None:
    """The last extension stands before the release, for a lease that lived long enough for some."""
    async with extensions_seen(redis) as seen:
        lease = await locks.lock("n", ttl=0.3).acquire()
        await until(lambda: len(seen) >= 2)
        await lease.release()
        await redis.set(KEY, "theirs", px=20_000)
        next_holder, released_at = await NextHolder.of(redis), await redis.time()
        await asyncio.sleep(0.3)
        assert max(seen) < released_at[0] + released_at[1] / 1e6
        assert await next_holder.is_untouched(redis)


async def test_release_while_an_extension_is_under_way_waits_for_its_watchdog(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The extension is held back on its way: the release follows it, and then all is over."""
    digest = await script_digest(redis, "extend")
    fault = proxy.delay_requests(0.3, matching=digest.encode())
    lease = await make_client(proxy.url).lock("n", ttl=1.2).acquire()
    await asyncio.wait_for(fault.used.wait(), 3)
    assert watchdogs() == ["aiodlock watchdog n"]
    assert await lease.release() is True
    assert watchdogs() == []
    assert watchdog_timers() == []
    assert await leftovers(redis) == []


async def test_extension_that_arrives_after_the_release_does_not_touch_the_next_holder(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """It was held up on a connection that died; meanwhile the lock went on to another."""
    digest = await script_digest(redis, "extend")
    fault = proxy.delay_requests(0.4, matching=digest.encode())
    lease = await make_client(proxy.url).lock("n", ttl=30).acquire()
    extending = asyncio.create_task(lease.extend(60))
    await asyncio.wait_for(fault.used.wait(), 3)
    extending.cancel()
    proxy.kill_connections()
    assert await lease.release() is True
    async with extensions_seen(redis) as seen:
        other = make_client().lock("n", ttl=20, auto_extend=False)
        async with await other.acquire() as theirs:
            next_holder = await NextHolder.of(redis)
            await until(lambda: len(seen) > 0)
            assert await next_holder.is_untouched(redis)
            theirs.check()
    await asyncio.wait({extending})


async def test_holder_that_extends_on_a_dead_server_keeps_its_deadline(
    make_client: MakeClient, server: LockServer
) -> None:
    """`extend` without an answer says so, and neither gives nor takes time."""
    lease = await make_client(request_timeout=0.2).lock("n", ttl=20).acquire()
    before = _clock.now() + lease.remaining
    server.pause()
    try:
        began = time.monotonic()
        with pytest.raises(ServerUnreachable):
            await lease.extend()
        assert time.monotonic() - began < 0.2 + TOLD_WITHIN_S + ROUND_TRIP_S
        assert _clock.now() + lease.remaining == pytest.approx(before, abs=0.005)
    finally:
        server.resume()
    assert await lease.extend() > 15
    assert await lease.release() is True


async def test_deadline_counts_from_before_the_request_was_sent(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A slow answer says how much was left when the server gave it: its way here has passed."""
    locks = make_client(proxy.url)
    assert (await locks.lock("n").inspect()).held is False
    for script in ("acquire", "extend"):
        proxy.delay_replies(0.3, matching=(await script_digest(redis, script)).encode(), n=1)
    lease = await locks.lock("n", ttl=20).acquire()
    assert lease.remaining <= 20 - 0.3
    assert await lease.extend(30) < 30
    assert lease.remaining <= 30 - 0.3
    assert await lease.release() is True


# The arithmetic, without I/O.


@pytest.mark.parametrize(
    ("sent_at", "ttl_left_ms", "expected"),
    [(100.0, 10_000, 109.898), (0.0, 1000, 0.988), (5.0, 0, 4.998), (50.0, 10, 50.0079)],
)
def test_deadline_is_from_the_sending_less_the_drift(
    sent_at: float, ttl_left_ms: int, expected: float
) -> None:
    """Sent + ms left - (1 % + 2 ms): from what the server has, not from what was asked."""
    assert _clock.deadline(sent_at, ttl_left_ms) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("ttl", "expected"),
    [(0.01, 10), (0.0101, 11), (0.12345, 124), (1, 1000), (1.0000001, 1001), (1e12, 10**15)],
)
def test_ttl_in_ms_is_rounded_up(ttl: float, expected: int) -> None:
    """Never to less than was asked, and never to 0, which would delete the key."""
    assert _clock.ttl_ms(ttl) == expected


@pytest.mark.parametrize(
    ("ttl", "alive", "poll"), [(0.01, 1, 1 / 3), (1, 1, 1 / 3), (3, 3, 1), (6, 6, 2), (30, 6, 2)]
)
def test_waiter_is_alive_for_its_ttl_within_bounds(ttl: float, alive: float, poll: float) -> None:
    """min(6 s, max(ttl, 1 s)), and it polls at least three times in that."""
    assert _clock.alive(ttl) == alive
    assert _clock.poll_interval(_clock.alive(ttl)) == pytest.approx(poll)


@pytest.mark.parametrize("valid", [0.01, 1.0, 30.0])
def test_extension_is_due_after_a_third_and_jitter_only_shortens(valid: float) -> None:
    """At the latest a third, at the earliest a tenth sooner."""
    delays = [_clock.extension_delay(valid, chance / 100) for chance in range(100)]
    assert max(delays) == pytest.approx(valid / 3)
    assert min(delays) >= valid / 3 * 0.9
    assert delays == sorted(delays, reverse=True)
    assert len(set(delays)) == 100


def test_clock_goes_on_and_is_not_the_wall_clock() -> None:
    """It counts suspend where the system can; a step of the wall clock must not move it."""
    clock_id = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime(clock_id)
    assert before <= _clock.now() <= time.clock_gettime(clock_id)


def test_validity_never_moves_its_deadline_back() -> None:
    """An answer that was long on its way tells less than a later one did."""
    now = _clock.now()
    validity = Validity(now + 10, auto_extend=True, max_hold=None)
    validity.prolong(now + 5, is_last=False)
    assert validity.deadline == now + 10
    validity.prolong(now + 15, is_last=False)
    assert validity.deadline == now + 15


@pytest.mark.parametrize(
    ("late_s", "auto_extend", "is_asking", "is_last", "expected"),
    [
        (0.01, True, True, False, LostReason.UNREACHABLE),
        (0.5, True, True, False, LostReason.LOOP_STALLED),
        (0.01, True, False, False, LostReason.LOOP_STALLED),
        (0.01, False, False, False, LostReason.EXPIRED),
        (0.01, False, True, False, LostReason.UNREACHABLE),
        (0.01, True, False, True, LostReason.MAX_HOLD),
    ],
)
def test_validity_tells_why_the_deadline_passed(
    late_s: float, *, auto_extend: bool, is_asking: bool, is_last: bool, expected: LostReason
) -> None:
    """By what was under way then, and by how late it is noticed."""
    validity = Validity(_clock.now() - late_s, auto_extend=auto_extend, max_hold=None)
    if is_last:
        validity.prolong(validity.deadline, is_last=True)
    if is_asking:
        validity.ask(1)
    assert validity.reason_at_deadline() is expected


def test_validity_cuts_what_it_asks_for_to_max_hold() -> None:
    """Whole ttl while there is room, the rest of it at the end, never 0, which would delete."""
    validity = Validity(_clock.now() + 1, auto_extend=True, max_hold=2.0)
    assert validity.ask(1.5) == (1500, False)
    cut = validity.ask(5)
    assert 1900 <= cut.ttl_ms <= 2000
    assert cut.is_last
    over = Validity(_clock.now() + 1, auto_extend=True, max_hold=0)
    assert over.ask(5) == (1, True)
