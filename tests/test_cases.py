"""A test for each fault that users of other lock libraries met, by its number in the catalogue."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from redis.asyncio import BlockingConnectionPool, Redis

from aiodlock import (
    Backoff,
    Lease,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    QuorumError,
    ServerUnreachable,
    _clock,
)
from aiodlock._store._quorum import QuorumStore
from aiodlock.testing import LockServer
from tests import quorums, wire
from tests.conftest import MakeClient
from tests.holders import (
    KEY,
    ROUND_TRIP_S,
    NextHolder,
    holding,
    script_digest,
    watchdog_timers,
    watchdogs,
)
from tests.keys import leftovers, ttls
from tests.proxy import ChaosProxy
from tests.until import until
from tests.workers import Worker

# The catalogue counts in steps of two; 071 to 083 and 103 on are about other things than locks on
# one server, or on several.
NUMBERS = [*range(1, 70, 2), *range(85, 102, 2)]
UNCOVERED: dict[int, str] = {}

# What a server that is slow or gone may add to a wait: the last try, and a busy machine.
LAST_TRY_S = 0.1


def test_every_case_in_range_has_a_test_or_a_reason() -> None:
    """No number is forgotten, and none is both tested and excused."""
    tested = {int(name[10:13]) for name in globals() if name.startswith("test_case_")}
    assert sorted(tested | UNCOVERED.keys()) == NUMBERS
    assert tested & UNCOVERED.keys() == set()
    assert all(UNCOVERED.values())


async def is_free(redis: Redis) -> bool:
    """Whether nothing of any lock is left."""
    return await leftovers(redis, ignoring_tombstones=True) == []


async def queued(redis: Redis, count: int = 1) -> bool:
    """Whether so many wait."""
    return bool(await redis.zcard(f"{KEY}:queue") == count)


@contextlib.asynccontextmanager
async def script(code: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process that runs *code* with warnings as errors; it is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", code, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: asyncio.subprocess.Process) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


# A. Cancellation and lost replies.


@pytest.mark.parametrize("when", ["before it ran", "while it runs", "reply delayed"])
async def test_case_001_cancelled_release_leaves_no_key_that_nobody_can_free(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, when: str
) -> None:
    """The release is sent all the same; one that never began can be begun again."""
    lease = await make_client(proxy.url).lock("n").acquire()
    if when == "reply delayed":
        proxy.delay_replies(0.2, matching=(await script_digest(redis, "release")).encode())
    task = asyncio.create_task(lease.release())
    if when != "before it ran":
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if when == "before it ran":
        assert await lease.release() is True
    assert await leftovers(redis) == []
    assert await lease.release() is False


@pytest.mark.parametrize("close", [True, False], ids=["closed", "silent"])
async def test_case_003_lost_reply_to_acquire_leaves_no_lock_that_nobody_owns(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, *, close: bool
) -> None:
    """Cut off, it asks again and has it; given up, the next client gets it well before the ttl."""
    locks = make_client(proxy.url, request_timeout=0.5)
    digest = await script_digest(redis, "acquire")
    proxy.drop_replies(1, matching=digest.encode(), close=close)
    if close:
        lease = await locks.lock("n").acquire(wait_timeout=2)
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
        await lease.release()
    else:
        with pytest.raises(ServerUnreachable):
            await locks.lock("n").acquire(wait_timeout=0.3)
    second = await make_client().lock("n").acquire(wait_timeout=2)
    assert await second.release() is True


@pytest.mark.parametrize("close", [True, False], ids=["closed", "silent"])
async def test_case_005_lost_reply_to_release_is_no_loss(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, *, close: bool
) -> None:
    """Neither the block nor the call claims that the lock was lost: it was ours to the end."""
    digest = (await script_digest(redis, "release")).encode()
    locks = make_client(proxy.url, request_timeout=0.5)
    proxy.drop_replies(1, matching=digest, close=close)
    async with locks.lock("n") as lease:
        pass
    assert lease.state == "released"
    second = await locks.lock("n").acquire()
    proxy.drop_replies(1, matching=digest, close=close)
    assert await second.release() is False  # It says no more than that this call did not.
    assert await is_free(redis)
    assert await second.wait_lost() is None


@pytest.mark.parametrize("first", ["cancel", "release"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["one client", "three clients"])
async def test_case_007_lock_is_not_handed_to_a_cancelled_waiter(
    make_client: MakeClient, redis: Redis, first: str, *, is_shared: bool
) -> None:
    """Cancelled in the tick of the release: the third one has it at once, not after a ttl."""
    clients = [make_client()] * 3 if is_shared else [make_client() for _ in range(3)]
    held = await clients[0].lock("n").acquire()
    waiter = asyncio.create_task(clients[1].lock("n").acquire())
    await until(lambda: queued(redis))
    if first == "cancel":
        waiter.cancel()
    releasing = asyncio.create_task(held.release())
    waiter.cancel()
    third = await clients[2].lock("n").acquire(wait_timeout=1)
    assert await releasing is True
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await third.release() is True
    assert await leftovers(redis) == []


COMPETE = """
import asyncio, sys
from aiodlock import LockClient

async def compete(locks):
    lease = await locks.lock("n").try_acquire()
    if lease:
        async with lease:
            await asyncio.sleep(0.001)
        return 1
    return 0

async def main(url):
    asyncio.get_running_loop().slow_callback_duration = 60
    # In debug mode, on a busy machine, a thousand take their time.
    async with LockClient.from_url(url, request_timeout=20) as locks:
        tasks = [asyncio.create_task(compete(locks)) for _ in range(1000)]
        tasks[500].cancel()
        got = await asyncio.gather(*tasks[:500], *tasks[501:])
        late = [asyncio.create_task(compete(locks)) for _ in range(20)]
        await asyncio.sleep(0)
    ended = await asyncio.gather(*late, return_exceptions=True)
    print(sum(got) > 0, len(asyncio.all_tasks()))

asyncio.run(main(sys.argv[1]))
"""


def test_case_009_thousand_competing_tasks_leave_no_warning_of_asyncio(
    server: LockServer,
) -> None:
    """In debug mode with warnings as errors: closing waits for every task of the library."""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", COMPETE, server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONASYNCIODEBUG": "1"},
    )
    assert (ran.stdout, ran.stderr) == ("True 1\n", "")


async def test_case_011_release_that_fails_does_not_replace_the_cancel(
    make_client: MakeClient, server: LockServer
) -> None:
    """The server is down at shutdown: what comes out is `CancelledError`, with a note."""
    entered = asyncio.Event()

    async def work() -> None:
        async with make_client(request_timeout=0.2).lock("n", ttl=5):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    server.pause()
    try:
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await task
    finally:
        server.resume()
    assert task.cancelled()
    assert "release of 'n' failed" in str(cancelled.value.__notes__)


async def test_case_013_lease_acquired_through_wait_for_is_anybodys_to_release(
    locks: LockClient, redis: Redis
) -> None:
    """On 3.11 `wait_for` runs it in another task; ownership does not depend on that."""
    lease = await asyncio.wait_for(locks.lock("n").acquire(), 5)
    assert await asyncio.create_task(lease.release()) is True
    async with await asyncio.wait_for(locks.lock("n").acquire(), 5):
        pass
    assert await leftovers(redis) == []


# B. Watchdog, extension, loss.


@pytest.mark.parametrize("theirs", [None, "theirs"], ids=["DEL", "SET"])
async def test_case_015_body_does_not_go_on_without_the_lock(
    make_client: MakeClient, redis: Redis, theirs: str | None
) -> None:
    """Cancelled within one extension interval, and the exit says that the lease is lost."""
    async with holding(make_client().lock("n", ttl=0.9)) as holder:
        since = _clock.now()
        await (redis.set(KEY, theirs, px=5000) if theirs else redis.delete(KEY))
        assert (await holder.lost()).reason in (LostReason.DELETED, LostReason.STOLEN)
        assert holder.told_at - since <= 0.9 / 3 + ROUND_TRIP_S


async def test_case_017_watchdog_survives_killed_connections_and_lost_replies(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A body of 5 ttl, with CLIENT KILL and a reply that never comes: no loss event."""
    ttl = 0.4
    async with holding(make_client(proxy.url).lock("n", ttl=ttl)) as holder:
        lease = await holder.entered()
        value = await redis.get(KEY)
        await asyncio.sleep(ttl)
        assert await redis.client_kill_filter(_type="normal", skipme=True) > 0
        await asyncio.sleep(2 * ttl)
        digest = await script_digest(redis, "extend")
        dropped = proxy.drop_replies(1, digest.encode(), close=True)
        await asyncio.wait_for(dropped.used.wait(), 3)
        await asyncio.sleep(2 * ttl)
        assert await redis.get(KEY) == value
        assert (lease.is_held, holder.cancels) == (True, 0)


async def test_case_019_body_that_blocked_the_loop_is_told(
    make_client: MakeClient, redis: Redis
) -> None:
    """`check` at once, the body at the next turn; nothing of the next holder is touched."""
    with pytest.raises(LeaseLostError) as lost:
        async with make_client().lock("n", ttl=0.3) as lease:
            time.sleep(0.75)  # noqa: ASYNC251 - this is the fault
            with pytest.raises(LeaseLostError):
                lease.check()
            assert await redis.set(KEY, "theirs", px=5000, nx=True) is True
            next_holder = await NextHolder.of(redis)
            await asyncio.sleep(0.2)
    assert lost.value.reason is LostReason.LOOP_STALLED
    assert await next_holder.is_untouched(redis)


async def test_case_021_extension_that_fails_for_longer_than_the_ttl_is_a_loss(
    make_client: MakeClient, server: LockServer
) -> None:
    """Told by our own clock, at the deadline; no answer of the server is needed for it."""
    ttl = 0.5
    async with holding(make_client(request_timeout=0.2).lock("n", ttl=ttl)) as holder:
        lease = await holder.entered()
        stopped_at = _clock.now()
        server.pause()
        try:
            reason = await asyncio.wait_for(lease.wait_lost(), 2 * ttl)
            assert _clock.now() - stopped_at <= ttl + ROUND_TRIP_S
            assert reason in (LostReason.UNREACHABLE, LostReason.LOOP_STALLED)
            assert (await holder.lost()).reason is reason
        finally:
            server.resume()


async def test_case_023_extension_after_a_partition_is_refused(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A was cut off past its ttl, B has the lock, A comes back: A has lost, B's time is its own."""
    cut_off = make_client(proxy.url, request_timeout=0.2)
    lease = await cut_off.lock("n", ttl=1.0, on_lost="raise").acquire()
    proxy.black_hole()
    other = make_client().lock("n", ttl=0.7, auto_extend=False, on_lost="raise")
    async with await other.acquire(wait_timeout=5):
        next_holder = await NextHolder.of(redis)
        proxy.heal(deliver=False)
        with pytest.raises(LeaseLostError):
            await lease.extend()
        assert await lease.release() is False
        assert await next_holder.is_untouched(redis)


async def test_case_025_extension_interval_cannot_come_near_the_ttl(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """There is no option for it; a third of the ttl bears replies that take as long again."""
    with pytest.raises(TypeError, match="interval"):
        make_client().lock("n", extend_interval=30)  # type: ignore[call-arg]
    digest = (await script_digest(redis, "extend")).encode()
    ttl = 1.2
    async with holding(make_client(proxy.url).lock("n", ttl=ttl)) as holder:
        noise = [proxy.delay_replies(s, matching=digest, n=1) for s in (0.25, 0.02, 0.3, 0.1)]
        await until(lambda: all(fault.hits for fault in noise), limit_s=10)
        lease = await holder.entered()
        assert (lease.is_held, holder.cancels) == (True, 0)


SLEEPER = """
import asyncio, sys
from aiodlock import LeaseLostError, LockClient

async def main(url):
    cancels = 0
    async with LockClient.from_url(url) as locks:
        try:
            async with locks.lock("n", ttl=0.4) as lease:
                print("entered", flush=True)
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    cancels += 1
                    await asyncio.sleep(0.01)
                    raise
        except LeaseLostError as error:
            print("lost", error.reason.name, cancels, lease.state, flush=True)
        async with locks.lock("another") as lease:
            print("goes on", lease.state, flush=True)

asyncio.run(main(sys.argv[1]))
"""


async def test_case_027_process_that_slept_learns_of_its_loss_once_and_goes_on(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """SIGSTOP for 3 ttl, SIGCONT: one loss, a clean exit, and the next holder is left alone."""
    async with script(SLEEPER, server.url) as sleeper:
        assert await line(sleeper) == "entered"
        sleeper.send_signal(signal.SIGSTOP)
        lock = make_client().lock("n", ttl=0.5)
        async with await lock.acquire(wait_timeout=5) as lease:
            await asyncio.sleep(2 * 0.4)
            value = await redis.get(KEY)
            sleeper.send_signal(signal.SIGCONT)
            assert await line(sleeper) == "lost LOOP_STALLED 1 lost"
            assert await line(sleeper) == "goes on held"
            assert await redis.get(KEY) == value
            lease.check()
        out, errors = await sleeper.communicate()
        assert (out, errors, sleeper.returncode) == (b"", b"", 0)


async def test_case_029_stuck_body_does_not_hold_for_ever(make_client: MakeClient) -> None:
    """`max_hold`: the extensions end, the body is told, and the others get in."""
    locks = make_client()
    began = _clock.now()
    async with holding(locks.lock("n", ttl=0.3, max_hold=0.7)) as holder:
        other = await make_client().lock("n").acquire(wait_timeout=5)
        assert 0.7 * 0.97 <= _clock.now() - began <= 0.7 + 2 * ROUND_TRIP_S
        assert (await holder.lost()).reason is LostReason.MAX_HOLD
        assert holder.cancels == 1
        await other.release()


async def test_case_031_long_job_with_a_busy_pool_keeps_its_lock(
    server: LockServer, redis: Redis
) -> None:
    """Ten ttl, while the body's own commands use up the pool that the lock was made from."""
    ttl = 0.3
    pool = BlockingConnectionPool.from_url(server.url, max_connections=4, timeout=20)
    async with Redis.from_pool(pool) as shared, LockClient(shared) as locks:
        async with holding(locks.lock("n", ttl=ttl)) as holder:
            lease = await holder.entered()
            value = await redis.get(KEY)
            ends_at = time.monotonic() + 10 * ttl

            async def work() -> int:
                count = 0
                while time.monotonic() < ends_at:
                    await shared.incr("busy")
                    count += 1
                return count

            assert sum(await asyncio.gather(*(work() for _ in range(10)))) > 100
            assert await redis.get(KEY) == value
            assert (lease.is_held, holder.cancels) == (True, 0)
        assert await leftovers(redis) == []


async def test_case_033_loss_is_seen_in_the_state_and_at_the_exit(
    make_client: MakeClient, redis: Redis
) -> None:
    """Another value in the key: not held after the next extension, and theirs is untouched."""
    with pytest.raises(LeaseLostError, match="something else stands in its key") as lost:
        async with make_client().lock("n", ttl=1.5, on_lost="raise") as lease:
            await redis.set(KEY, "theirs", px=1200)
            next_holder = await NextHolder.of(redis)
            await until(lambda: not lease.is_held, limit_s=1.5 / 3 + ROUND_TRIP_S)
    assert lost.value.reason is LostReason.STOLEN
    assert await next_holder.is_untouched(redis)


FORKED = """
import asyncio, json, os, sys
from aiodlock import LeaseLostError, LockClient

async def child(locks, lease):
    seen = {"state": lease.state}
    try:
        lease.check()
    except LeaseLostError as error:
        seen["reason"] = error.reason.name
    seen["released"] = await lease.release()
    async with locks:
        seen["parent has it"] = await locks.lock("n").try_acquire() is None
        # The parent goes on extending meanwhile.
        before = await locks.lock("n").inspect()
        async with locks.lock("child", ttl=0.3) as mine:
            await asyncio.sleep(0.6)
            after = await locks.lock("n").inspect()
            seen["parent has it still"] = after.fencing_token == before.fencing_token
            seen["own"] = mine.state
            holders = {one.holder for one in (mine, lease)}
            seen["clients"] = len(holders)
    print(json.dumps(seen), flush=True)
    await asyncio.sleep(2.0)

async def main(url):
    async with LockClient.from_url(url) as locks:
        async with locks.lock("n", ttl=0.4) as lease:
            if os.fork() == 0:
                try:
                    asyncio.run(child(locks, lease))
                finally:
                    os._exit(0)
            await asyncio.sleep(30)

asyncio.run(main(sys.argv[1]))
"""


async def test_case_035_forked_child_has_its_own_state_and_leaves_the_parents_alone(
    server: LockServer, redis: Redis
) -> None:
    """The child locks for itself; the parent's lease it neither releases nor extends."""
    async with script(FORKED, server.url) as parent:
        child_saw = json.loads(await line(parent) or "{}")
        assert child_saw == {
            "state": "lost",
            "reason": "CLOSED",
            "released": False,
            "parent has it": True,
            "parent has it still": True,
            "own": "held",
            "clients": 2,
        }
        killed_at = time.monotonic()
        parent.kill()
        await until(lambda: _has_no_key(redis))
        assert time.monotonic() - killed_at <= 0.4 + ROUND_TRIP_S


async def _has_no_key(redis: Redis) -> bool:
    return not await redis.exists(KEY)


async def test_case_037_no_timer_task_or_key_is_left_of_bodies_that_ended_in_an_extension(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """500 bodies end while their extension is under way; who locks next keeps value and time."""
    count = 500
    locks = make_client(proxy.url)
    digest = await script_digest(redis, "extend")
    leases = await asyncio.gather(*(locks.lock(f"n{i}", ttl=2).acquire() for i in range(count)))
    late = proxy.delay_replies(0.2, matching=digest.encode())
    await until(lambda: len(watchdogs()) == count)
    assert late.hits > 0  # They share calls.
    assert await asyncio.gather(*(lease.release() for lease in leases)) == [True] * count
    assert watchdogs() == []
    assert watchdog_timers() == []
    assert await leftovers(redis) == []
    async with redis.pipeline() as pipe:
        for i in range(count):
            pipe.set(f"aiodlock:{{n{i}}}", "theirs", px=1000)
        await pipe.execute()
        await asyncio.sleep(0.3)
        for i in range(count):
            pipe.pttl(f"aiodlock:{{n{i}}}")
        assert max(await pipe.execute()) <= 700


# C. Waiting, time-outs, wake-up, fairness.


@pytest.mark.parametrize("freed_by", ["its expiry", "nobody who tells"])
async def test_case_039_waiter_with_long_pauses_does_not_give_up_early(
    locks: LockClient, redis: Redis, freed_by: str
) -> None:
    """The last sleep is cut to the time left, with a last try; a known expiry is not slept over."""
    patient = Backoff(initial=60, maximum=60, jitter=0)
    began = time.monotonic()
    if freed_by == "its expiry":
        await redis.set(KEY, "theirs", px=250)
        lease = await locks.lock("n", retry=patient).acquire(wait_timeout=0.9)
        assert 0.24 <= time.monotonic() - began <= 0.25 + 2 * ROUND_TRIP_S
    else:
        await redis.set(KEY, "theirs")
        waiting = asyncio.create_task(locks.lock("n", retry=patient).acquire(wait_timeout=0.3))
        await until(lambda: queued(redis))
        await redis.delete(KEY)
        lease = await waiting
        assert 0.29 <= time.monotonic() - began <= 0.3 + 2 * ROUND_TRIP_S
    assert await lease.release() is True


@pytest.mark.parametrize("what", ["reply", "connecting and reply", "connecting"])
async def test_case_041_wait_timeout_is_not_overshot_on_a_slow_server(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, what: str
) -> None:
    """The wait bounds all of it, connecting too, but for the last try; a late grant is undone."""
    locks = make_client(proxy.url)
    if what == "reply":
        assert (await locks.lock("n").inspect()).held is False
    if what == "connecting":
        # Most of the wait is spent on this; then the reply is as slow.
        proxy.delay_replies(0.25, matching=b"HELLO", n=1)
        proxy.delay_replies(0.6, matching=b"EVALSHA")
    else:
        proxy.delay_replies(0.5)
    began = time.monotonic()
    with pytest.raises(ServerUnreachable):
        await locks.lock("n").acquire(wait_timeout=0.3)
    assert 0.3 <= time.monotonic() - began <= 0.3 + LAST_TRY_S + ROUND_TRIP_S / 2
    proxy.heal()
    await until(lambda: is_free(redis))
    assert await redis.exists(KEY) == 0


async def test_case_043_block_is_not_entered_without_the_lock(make_client: MakeClient) -> None:
    """Not in time is an exception, by each way there is to enter."""
    async with make_client().lock("n"):
        locks = make_client()
        for wait_timeout in (0, 0.1):
            with pytest.raises(LockTimeout):
                async with locks.lock("n", wait_timeout=wait_timeout):
                    pytest.fail("entered")
            with pytest.raises(LockTimeout):
                async with locks.lock("n").acquire(wait_timeout=wait_timeout):
                    pytest.fail("entered")
            assert await locks.lock("n").try_acquire(wait_timeout=wait_timeout) is None


async def test_case_045_release_between_the_first_poll_and_the_subscription_is_not_missed(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Nobody heard the message: the poll that follows the subscription finds the lock."""
    held = await make_client().lock("n").acquire()
    subscribing = proxy.delay_requests(0.4, matching=b"SUBSCRIBE")
    waiting = asyncio.create_task(make_client(proxy.url).lock("n").acquire())
    await until(lambda: queued(redis))
    await asyncio.wait_for(subscribing.used.wait(), 3)
    began = time.monotonic()
    assert await held.release() is True
    lease = await asyncio.wait_for(waiting, 5)
    assert time.monotonic() - began <= 0.4 + 2 * ROUND_TRIP_S
    assert await lease.release() is True


async def test_case_047_waiter_is_not_passed_by_a_stream_of_newcomers(
    make_client: MakeClient, redis: Redis
) -> None:
    """First in, first out: it is the next one, however many come after it."""
    held = await make_client().lock("n").acquire()
    order: list[str] = []
    crowd = make_client()

    async def stand(who: str, locks: LockClient) -> None:
        async with locks.lock("n"):
            order.append(who)
            await asyncio.sleep(0.002)

    waiter = asyncio.create_task(stand("waiter", make_client()))
    await until(lambda: queued(redis))
    newcomers = []
    for count in range(100):
        if count == 50:
            await held.release()
        newcomers.append(asyncio.create_task(stand("newcomer", crowd)))
        await asyncio.sleep(0.005)
    await asyncio.gather(waiter, *newcomers)
    assert order == ["waiter"] + ["newcomer"] * 100


@pytest.mark.parametrize("is_shared", [True, False], ids=["one client", "two clients"])
async def test_case_049_greedy_holder_takes_turns_with_a_waiter(
    make_client: MakeClient, *, is_shared: bool
) -> None:
    """It locks again at once, without a pause; still they alternate strictly."""
    clients = [make_client()] * 2 if is_shared else [make_client(), make_client()]
    order: list[int] = []

    async def work(who: int) -> None:
        lock = clients[who].lock("n")
        for _ in range(20):
            async with lock:
                order.append(who)
                # Long enough for the other's request, which left when this grant was made.
                await asyncio.sleep(0.01)

    await asyncio.gather(work(0), work(1))
    # At either end one of them may be alone.
    turns = [a != b for a, b in itertools.pairwise(order[1:39])]
    assert turns == [True] * 37


@pytest.mark.parametrize("how", ["is cancelled", "times out", "loses its connection"])
async def test_case_051_waiter_that_leaves_takes_only_its_own_place(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, how: str
) -> None:
    """The one in the middle goes; the order of the others stays, and nobody is in twice."""
    held = await make_client().lock("n").acquire()
    order: list[int] = []

    async def stand(who: int, wait_timeout: float = 20) -> None:
        locks = make_client(proxy.url) if who == 2 else make_client()
        async with locks.lock("n").acquire(wait_timeout=wait_timeout):
            order.append(who)

    tasks = []
    for who in range(1, 5):
        short = how == "times out" and who == 2
        tasks.append(asyncio.create_task(stand(who, 0.4 if short else 20)))
        await until(lambda who=who: queued(redis, who))  # type: ignore[misc]
    queue = await redis.zrange(f"{KEY}:queue", 0, -1)
    if how == "loses its connection":
        # It stays in its place: a lost connection is no reason to stand at the end again.
        assert proxy.kill_connections() > 0
        await held.release()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3, 4]
        return
    if how == "is cancelled":
        tasks[1].cancel()
    with pytest.raises((asyncio.CancelledError, LockTimeout)):
        await tasks[1]
    await until(lambda: queued(redis, 3))
    assert await redis.zrange(f"{KEY}:queue", 0, -1) == [queue[0], *queue[2:]]
    await held.release()
    await asyncio.gather(tasks[0], *tasks[2:])
    assert order == [1, 3, 4]


async def test_case_053_waiters_leave_the_pool_to_the_body(
    server: LockServer, redis: Redis
) -> None:
    """A pool of 5, 50 waiters and a holder at work: commands, extensions, release all go on."""
    ttl = 0.4
    async with Redis.from_url(server.url, max_connections=5) as shared:
        async with LockClient(shared) as locks:
            lock = locks.lock("n", ttl=ttl)
            done: list[int] = []

            async def wait_for_it(number: int) -> None:
                async with lock:
                    done.append(number)

            async with lock as lease:
                waiters = [asyncio.create_task(wait_for_it(n)) for n in range(50)]
                await until(lambda: queued(redis, 50))
                ends_at = time.monotonic() + 2 * ttl
                while time.monotonic() < ends_at:
                    await asyncio.gather(*(shared.incr("work") for _ in range(3)))
                    lease.check()
            await asyncio.gather(*waiters)
            assert done == list(range(50))
        assert await shared.ping() is True


async def test_case_055_idle_waiters_do_not_storm_the_server(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """100 waiters on a silent holder: at most 0.6 calls per second and waiter, 2 connections."""
    async with make_client().lock("n"):
        locks = make_client(proxy.url)
        tasks = [asyncio.create_task(locks.lock("n").acquire()) for _ in range(100)]
        await until(lambda: queued(redis, 100))
        # The first poll of each, and the one that follows the subscription.
        await until(lambda: proxy.requests["EVALSHA"] + proxy.requests["EVAL"] >= 200)
        before, began = proxy.requests.total(), time.monotonic()
        await asyncio.sleep(2.5)
        calls = proxy.requests.total() - before
        assert calls <= 0.6 * 100 * (time.monotonic() - began)
        assert calls >= 100  # They are alive: each has polled once in two seconds.
        assert proxy.open_connections == 2
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_case_057_waiting_does_not_block_the_loop(make_client: MakeClient) -> None:
    """Nothing in the library sleeps or reads in a blocking way; a heartbeat keeps its pace."""
    gaps = []
    async with make_client().lock("n"):
        locks = make_client()
        # It connects here, for redis-py reads the version of its package from the disk then.
        assert await locks.lock("n").try_acquire(wait_timeout=0.3) is None
        with blockbuster_ctx("aiodlock"):
            for _ in range(3):
                waiting = asyncio.create_task(locks.lock("n").try_acquire(wait_timeout=0.5))
                beats = [time.monotonic()]
                while not waiting.done():
                    await asyncio.sleep(0.005)
                    beats.append(time.monotonic())
                assert await waiting is None
                gaps.append(max(b - a for a, b in itertools.pairwise(beats)))
                if gaps[-1] < 0.05:
                    break
    # A busy machine is late by itself, but not every time.
    assert min(gaps) < 0.05


async def test_case_059_wait_for_ever_can_be_bounded_and_is_told_of(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock left behind without TTL: a warning names it; a default for the client bounds it."""
    await redis.set(KEY, "left-behind")
    with caplog.at_level(logging.WARNING, "aiodlock"):
        waiting = asyncio.create_task(make_client().lock("n", ttl=1).acquire())
        await until(lambda: caplog.messages)
        await asyncio.sleep(0.4)  # Longer than a poll interval.
        assert not waiting.done()
    [message] = caplog.messages
    assert re.search(r"waiting for the lock 'n' .*left-behind.* without a TTL", message)
    with pytest.raises(LockTimeout) as refused:
        async with make_client(wait_timeout=0.1).lock("n"):
            pytest.fail("entered")
    assert (refused.value.holder, refused.value.ttl_left) == ("left-behind", None)
    waiting.cancel()
    await asyncio.wait({waiting})


# D. TTL and arguments.


@pytest.mark.parametrize(
    ("ttl", "error"),
    [
        *((value, ValueError) for value in (0.0001, 0.0015, 0, -1, math.inf, math.nan)),
        *((value, TypeError) for value in (True, "5", Decimal(5), timedelta(seconds=5))),
    ],
)
def test_case_061_ttl_that_cannot_be_kept_is_refused_at_construction(
    ttl: Any, error: type[Exception]
) -> None:
    """Not a lock that never acquires, with the reason hidden."""
    locks = LockClient.from_url("memory://")
    with pytest.raises(error, match=r"ttl must be .* at least 0\.01"):
        locks.lock("n", ttl=ttl)


@pytest.mark.parametrize(("ttl", "pttl"), [(0.54321, 544), (1e12, 10**15)])
async def test_case_061_odd_ttl_is_rounded_up_and_never_to_nothing(
    locks: LockClient, redis: Redis, ttl: float, pttl: int
) -> None:
    """What is allowed is kept, in whole milliseconds."""
    lease = await locks.lock("n", ttl=ttl).acquire()
    assert pttl - 500 < await redis.pttl(KEY) <= pttl
    assert await redis.pttl(KEY) > 0
    assert await lease.release() is True


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed after"])
async def test_case_063_key_never_exists_without_its_ttl(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, *, close: bool
) -> None:
    """The connection dies after the first command of the acquisition: the TTL came with it."""
    dropped = proxy.drop_replies(1, (await script_digest(redis, "acquire")).encode(), close=close)
    acquiring = asyncio.create_task(make_client(proxy.url).lock("n").acquire(wait_timeout=5))
    await asyncio.wait_for(dropped.used.wait(), 3)
    await until(lambda: redis.exists(KEY))
    proxy.kill_connections()
    for _ in range(20):
        assert [key for key, left in (await ttls(redis)).items() if left < 0] == []
    lease = await acquiring
    left = await ttls(redis)
    assert set(left) == {KEY, f"{KEY}:fence"}
    assert min(left.values()) > 0
    await lease.release()


async def test_case_065_there_is_no_lock_without_expiry(
    make_client: MakeClient, redis: Redis
) -> None:
    """No value means "never": what would is refused, and the default has a TTL."""
    for ttl in (None, 0, -1, math.inf):
        with pytest.raises((ValueError, TypeError)):
            make_client(ttl=ttl)
    async with make_client().lock("n", ttl=None) as lease:
        assert lease.ttl == 30
        assert 29_000 < await redis.pttl(KEY) <= 30_000
        assert await make_client().lock("n").try_acquire() is None


async def test_case_067_lease_that_was_lost_sight_of_warns_and_ends(
    make_client: MakeClient, redis: Redis
) -> None:
    """No block, an exception, the object gone: a warning, and the ttl frees the waiters."""
    locks = make_client()

    async def fail() -> None:
        lease = await locks.lock("n", ttl=0.4).acquire()
        raise ValueError(lease.name)

    # What the exception refers to holds the lease, so it is thrown away with that.
    with pytest.warns(ResourceWarning, match="'n'"):
        await _swallowed(fail)
    async with await make_client().lock("n").acquire(wait_timeout=0.4 + 1):
        assert watchdogs() == []


async def _swallowed(call: Callable[[], Any]) -> None:
    with contextlib.suppress(ValueError):
        await call()
    gc.collect()


async def test_case_069_lock_of_a_killed_process_is_free_within_its_ttl(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """SIGKILL: the waiter has it when the ttl is over, not a polling pause later."""
    ttl = 0.6
    async with Worker(server.url, ttl=ttl) as worker:
        await worker.asks_for("n")
        await until(lambda: redis.exists(KEY), limit_s=10)
        waiting = asyncio.create_task(make_client().lock("n", ttl=ttl).acquire())
        await until(lambda: queued(redis))
        await asyncio.sleep(ttl)  # It is extended meanwhile.
        assert not waiting.done()
        worker.kill()
        killed_at = time.monotonic()
        lease = await asyncio.wait_for(waiting, 5)
        assert time.monotonic() - killed_at <= ttl + ROUND_TRIP_S
        await lease.release()


# F. Several servers.


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LockServer]]:
    """Five that know nothing of each other."""
    with quorums.servers(5) as made:
        yield made


async def test_case_085_minority_is_undone_where_it_succeeded_and_where_that_is_unknown(
    servers: list[LockServer],
) -> None:
    """Of three, one holds garbage and one loses its reply: all free again before the next try."""
    async with quorums.nodes_of(servers[:3]) as nodes, nodes.open() as locks:
        await quorums.warm(locks)
        await nodes.put(KEY, "garbage", 0)
        lost = wire.lose(nodes.proxies[1], "acquire", 2)
        granted: list[list[str | None]] = []
        acquire = QuorumStore.acquire

        async def looked_at(self: QuorumStore, acquisition: Any, **options: Any) -> Any:
            await nodes.put(KEY, "garbage", 0)
            granted.append(await nodes.values())
            return await acquire(self, acquisition, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QuorumStore, "acquire", looked_at)
            async with locks.lock("n").acquire(wait_timeout=20) as lease:
                assert lost.hits == 2
                assert lease.is_held
        assert len(granted) >= 3
        assert granted == [["garbage", None, None]] * len(granted)
        await nodes.delete(KEY, 0)
        await nodes.free()


async def test_case_087_hung_node_slows_neither_acquire_nor_release(
    servers: list[LockServer],
) -> None:
    """One of five is a black hole: what is still to be done there is done when it is back."""
    async with quorums.nodes_of(servers) as nodes, nodes.open() as locks:
        await quorums.warm(locks)
        nodes.proxies[2].black_hole()
        started_at = time.monotonic()
        for _ in range(10):
            lease = await locks.lock("n").acquire(wait_timeout=5)
            assert await lease.release() is True
        # Less than one request's time-out, and thirty requests were made.
        assert time.monotonic() - started_at < 1.5
        nodes.proxies[2].heal()
        await locks.aclose()
        assert await nodes.left() == {}


@pytest.mark.parametrize("had_connected", [False, True])
async def test_case_089_quorum_that_is_down_is_told_soon_and_is_not_busy(
    servers: list[LockServer], *, had_connected: bool
) -> None:
    """All nodes down: a typed error that says what each said; busy is `None`.

    At once where nothing can be sent; where a request was under way, when its time is over.
    """
    async with (
        quorums.nodes_of(servers) as nodes,
        nodes.open(nodes=nodes.urls, request_timeout=1.0) as locks,
    ):
        if had_connected:
            async with locks.lock("n").acquire(wait_timeout=5):
                assert await locks.lock("n").try_acquire() is None
            await nodes.free()
        for server in servers:
            server.kill()
        started_at = time.monotonic()
        with pytest.raises(QuorumError) as down:
            await locks.lock("n").try_acquire()
        assert time.monotonic() - started_at < 0.9 + had_connected
        assert down.value.outcome == "unreachable"
        assert len(down.value.nodes) == 5
        assert not isinstance(down.value, LockTimeout)


# G. Exceptions.


async def test_case_091_error_of_the_body_is_not_replaced_by_the_loss(
    locks: LockClient, redis: Redis
) -> None:
    """Its own comes out, with a note; only a body that succeeded ends in `LeaseLostError`."""
    with pytest.raises(ValueError, match="mine") as own:
        async with locks.lock("n", on_lost="raise") as lease:
            await redis.set(KEY, "theirs", px=5000)
            with pytest.raises(LeaseLostError):
                await lease.extend()
            raise ValueError("mine")
    assert "is lost" in str(own.value.__notes__)
    await redis.delete(KEY)
    with pytest.raises(LeaseLostError):
        async with locks.lock("n", on_lost="raise"):
            await redis.set(KEY, "theirs", px=5000)
    assert await redis.get(KEY) == "theirs"


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("x"), asyncio.CancelledError("x"), KeyboardInterrupt("x"), SystemExit(3)),
        *(ExceptionGroup("x", [ValueError()]), StopAsyncIteration(), TimeoutError()),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_case_093_lock_is_released_whatever_the_body_raises(
    locks: LockClient, redis: Redis, error: BaseException
) -> None:
    """And what it raised is what comes out, the very object."""
    caught: BaseException | None = None
    try:
        async with locks.lock("n"):
            raise error
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert await leftovers(redis) == []


async def test_case_093_lock_is_released_when_a_generator_is_closed_in_its_body(
    locks: LockClient, redis: Redis
) -> None:
    """`GeneratorExit` at the yield."""

    async def stream() -> AsyncGenerator[Lease]:
        async with locks.lock("n") as lease:
            yield lease

    generator = stream()
    lease = await anext(generator)
    assert lease.is_held
    await generator.aclose()
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def test_case_095_task_does_not_release_what_another_acquired_through_the_same_lock(
    locks: LockClient, redis: Redis
) -> None:
    """A expired, B acquired through the same object, A releases: B keeps it."""
    lock = locks.lock("n", ttl=0.15, auto_extend=False)
    first = await lock.acquire()
    assert await first.wait_lost() is LostReason.EXPIRED
    second = await lock.acquire(wait_timeout=5)
    await second.extend(20)
    value = await redis.get(KEY)
    assert await first.release() is False
    assert await redis.get(KEY) == value
    assert second.is_held
    with pytest.raises(LeaseLostError):
        first.check()
    assert await second.release() is True


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decodes", [True, False], ids=["str", "bytes"])
async def test_case_097_client_that_decodes_or_speaks_otherwise_makes_no_difference(
    server: LockServer, redis: Redis, protocol: int, encoding: str, *, decodes: bool
) -> None:
    """Grants, hand-offs by message, extensions, foreign values, release: the same each time."""
    name = "ключ é"
    key = f"aiodlock:{{{name}}}"
    options: dict[str, Any] = {
        "decode_responses": decodes,
        "protocol": protocol,
        "encoding": encoding,
    }
    async with (
        Redis.from_url(server.url, **options) as one,
        Redis.from_url(server.url, **options) as other,
        LockClient(one) as ours,
        LockClient(other) as theirs,
    ):
        with pytest.raises(TypeError, match="non-empty str"):
            ours.lock(name.encode())  # type: ignore[arg-type]
        lease = await ours.lock(name).acquire()
        assert await redis.get(key) == f"{lease.owner_token}/{lease.fencing_token}"
        assert await theirs.lock(name).try_acquire() is None
        info = await theirs.lock(name).inspect()
        assert (info.holder, info.fencing_token) == (
            lease.holder,
            lease.fencing_token,
        )
        waiting = asyncio.create_task(theirs.lock(name).acquire())
        await until(lambda: redis.zcard(f"{key}:queue"))
        assert await lease.extend(40) > 30
        assert await lease.release() is True
        second = await asyncio.wait_for(waiting, 5)
        assert second.fencing_token > lease.fencing_token
        await redis.set(key, "é".encode("latin-1"), px=5000)
        with pytest.raises(LeaseLostError) as lost:
            await second.extend()
        assert lost.value.reason is LostReason.STOLEN
        assert (await ours.lock(name).inspect()).holder == "\\xe9"
        assert await ours.lock(name).break_lock() is True
        assert await second.release() is False


@pytest.mark.parametrize("is_same", [True, False], ids=["same object", "second object"])
async def test_case_099_task_that_locks_twice_is_told_who_holds_and_keeps_the_first(
    locks: LockClient, redis: Redis, *, is_same: bool
) -> None:
    """The lock is not reentrant: a bounded wait ends in an error that names this very client."""
    lock = locks.lock("n", wait_timeout=0.1)
    again = lock if is_same else locks.lock("n", wait_timeout=0.1)
    async with lock as lease:
        with pytest.raises(LockTimeout) as refused:
            async with again:
                pytest.fail("entered")
        assert refused.value.holder == lease.holder
        lease.check()
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    assert lease.state == "released"
    await until(lambda: is_free(redis))


@pytest.mark.parametrize("is_same", [True, False], ids=["same object", "second object"])
async def test_case_099_task_that_would_wait_for_itself_for_ever_is_told_so(
    locks: LockClient, redis: Redis, *, is_same: bool
) -> None:
    """Not a hang: an error that names the option with which it may enter again, and it may."""
    lock = locks.lock("n")
    async with lock as lease:
        with pytest.raises(RuntimeError, match=r"holds the lock 'n' already.*reentrant=True"):
            async with asyncio.timeout(5), lock if is_same else locks.lock("n"):
                pytest.fail("entered")
        lease.check()
    await until(lambda: is_free(redis))
    lock = locks.lock("n", reentrant=True)
    async with lock as lease, lock if is_same else locks.lock("n", reentrant=True) as again:
        assert again is lease
    await until(lambda: is_free(redis))


async def test_case_101_names_taken_in_different_orders_never_deadlock(
    make_client: MakeClient, redis: Redis
) -> None:
    """A takes [x, y] and B takes [y, x], 200 rounds each: both finish, one inside at a time."""
    inside = 0
    rounds = {"A": 0, "B": 0}

    async def work(who: str, *names: str) -> None:
        nonlocal inside
        async with make_client(label=who) as locks:
            for _ in range(200):
                async with locks.all(*names):
                    inside += 1
                    assert inside == 1
                    await asyncio.sleep(0)
                    inside -= 1
                    rounds[who] += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(work("A", "x", "y"))
        group.create_task(work("B", "y", "x"))
    assert rounds == {"A": 200, "B": 200}
    assert await leftovers(redis) == []
