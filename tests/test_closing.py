"""The end of a client: closed, left with its loop, forked; the end of a lease: thrown away."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, LockClient, LostReason
from aiodlock.testing import LockServer
from tests import leaks
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until

KEY = "aiodlock:{x}"
QUEUE = f"{KEY}:queue"
# How long a closing client waits for bodies (design §3).
BODIES_S = 5.0
# What a loaded machine may add to a bound of the contract.
SLACK_S = 1.0

Outcome = LeaseLostError | RuntimeError | None


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our log said that people should see."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("aiodlock") and record.levelno >= logging.WARNING
    ]


def our_tasks() -> list[str]:
    """The tasks of the library, by name."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sorted(name for name in names if name.startswith("aiodlock"))


def known_tokens(locks: LockClient) -> list[str]:
    """The acquisitions that the client still knows of."""
    session = locks._session
    assert session is not None
    return list(vars(session.store)["_ours"])


async def queue_is(redis: Redis, length: int) -> None:
    """Return once that many wait."""

    async def reached() -> bool:
        return int(await redis.zcard(QUEUE)) == length

    await until(reached)


class Holder:
    """A task with a body under a lock, which says how it ended."""

    def __init__(
        self,
        locks: LockClient,
        *,
        cleaning_s: float = 0.0,
        name: str = "x",
        **options: Any,
    ) -> None:
        self.locks = locks
        self.name = name
        self.cleaning_s = cleaning_s
        self.options = options
        self.cancels = 0
        self.left_at = 0.0
        self.lease: Lease | None = None
        self.task = asyncio.create_task(self._hold())

    @classmethod
    async def entered(cls, locks: LockClient, **options: Any) -> Holder:
        """One that is inside its block."""
        holder = cls(locks, **options)
        await until(lambda: holder.lease)
        return holder

    async def _hold(self) -> None:
        async with self.locks.lock(self.name, **self.options) as self.lease:
            try:
                await forever()
            except asyncio.CancelledError:
                self.cancels += 1
                await asyncio.sleep(self.cleaning_s)
                raise
            finally:
                self.left_at = time.monotonic()

    async def outcome(self) -> BaseException | None:
        """What came out of it."""
        await asyncio.wait([self.task])
        return asyncio.CancelledError() if self.task.cancelled() else self.task.exception()


# What each one is told.


async def test_client_that_is_closed_tells_everybody_and_leaves_nothing(
    make_client: MakeClient, redis: Redis
) -> None:
    """A waiter, a body, a lease without one, a newcomer; no key, no task, no timer is left."""
    timers = len(leaks.timers())
    locks = make_client()
    holder = await Holder.entered(locks)
    waiter = asyncio.create_task(locks.lock("x").acquire())
    trying = asyncio.create_task(locks.lock("x").try_acquire(wait_timeout=60))
    lease = await locks.lock("y").acquire()
    lost = asyncio.create_task(lease.wait_lost())
    await queue_is(redis, 2)
    await locks.aclose()
    ends = await asyncio.gather(waiter, trying, return_exceptions=True)
    assert [(type(end), "closed" in str(end)) for end in ends] == [(RuntimeError, True)] * 2
    outcome = await holder.outcome()
    assert isinstance(outcome, LeaseLostError)
    assert (outcome.reason, holder.cancels) == (LostReason.CLOSED, 1)
    assert (lease.state, await lost) == ("released", None)
    with pytest.raises(RuntimeError, match="closed"):
        await locks.lock("x").acquire()
    with pytest.raises(RuntimeError, match="closed"):
        await locks.lock("x").try_acquire()
    assert await leftovers(redis) == []
    assert our_tasks() == []
    assert len(leaks.timers()) == timers


async def test_newcomer_while_the_client_closes_is_refused(make_client: MakeClient) -> None:
    """It is not let in between the waiters' leaving and the end."""
    locks = make_client()
    holder = await Holder.entered(locks, cleaning_s=0.2)
    closing = asyncio.create_task(locks.aclose())
    await until(lambda: holder.cancels)
    for act in (locks.lock("y").acquire, locks.lock("y").try_acquire, locks.lock("y").inspect):
        with pytest.raises(RuntimeError, match="closed"):
            await act()
    with pytest.raises(RuntimeError, match="being closed"):
        await locks.__aenter__()
    await closing
    with pytest.raises(LeaseLostError):
        await holder.task


async def test_client_whose_body_must_not_be_cancelled_waits_for_it(
    make_client: MakeClient, redis: Redis
) -> None:
    """`on_lost="raise"`: told at the exit only."""
    locks = make_client()
    done = asyncio.Event()

    async def body() -> None:
        async with locks.lock("x", on_lost="raise") as lease:
            entered.append(lease)
            await done.wait()

    entered: list[Lease] = []
    holding = asyncio.create_task(body())
    await until(lambda: entered)
    closing = asyncio.create_task(locks.aclose())
    await until(lambda: entered[0].state == "lost")
    assert await redis.exists(KEY) == 1
    done.set()
    await closing
    with pytest.raises(LeaseLostError) as lost:
        await holding
    assert lost.value.reason is LostReason.CLOSED
    assert await leftovers(redis) == []


# In which order.


@asynccontextmanager
async def grants(redis: Redis) -> AsyncIterator[list[str]]:
    """Collect the owner tokens to which the server grants the lock, in order."""
    seen: list[str] = []
    async with redis.monitor() as monitor:

        async def read() -> None:
            async for each in monitor.listen():
                words = each["command"].split()
                if words[:2] == ["SET", KEY]:
                    seen.append(words[2].partition("/")[0])
                elif words == ["ECHO", "end"]:
                    return

        reading = asyncio.create_task(read())
        try:
            yield seen
        finally:
            await redis.echo("end")
            await reading


@pytest.mark.parametrize("held_by", ["body", "lease"])
async def test_lock_of_a_closing_client_goes_to_another_clients_waiter_not_to_its_own(
    make_client: MakeClient, redis: Redis, held_by: str
) -> None:
    """Its own waiter stands first; were the lock released before it left, it would be handed it."""
    locks, other = make_client(), make_client()
    holder: Holder | None = None
    async with grants(redis) as granted:
        if held_by == "body":
            holder = await Holder.entered(locks)
            held = holder.lease
        else:
            held = await locks.lock("x").acquire()
        own = asyncio.create_task(locks.lock("x").acquire())
        await queue_is(redis, 1)
        others = asyncio.create_task(other.lock("x").acquire(wait_timeout=10))
        await queue_is(redis, 2)
        await locks.aclose()
        lease = await others
        await lease.release()
    assert held is not None
    assert granted == [held.owner_token, lease.owner_token]
    if holder is not None:
        assert isinstance(await holder.outcome(), LeaseLostError)
    with pytest.raises(RuntimeError, match="closed"):
        await own


async def test_waiters_of_a_closing_client_are_gone_while_its_body_still_cleans_up(
    make_client: MakeClient, redis: Redis
) -> None:
    """The lock stands, and the queue is empty: waiters leave first."""
    locks = make_client()
    holder = await Holder.entered(locks, cleaning_s=0.3)
    own = asyncio.create_task(locks.lock("x").acquire())
    await queue_is(redis, 1)
    closing = asyncio.create_task(locks.aclose())
    await until(lambda: holder.cancels)
    assert own.done()
    with pytest.raises(RuntimeError, match="closed"):
        await own
    assert await redis.exists(QUEUE) == 0
    assert await redis.exists(KEY) == 1
    await closing
    assert isinstance(await holder.outcome(), LeaseLostError)
    assert await leftovers(redis) == []


@pytest.mark.parametrize("closed_after_s", [0.0, 0.3], ids=["before", "after"])
async def test_lease_of_a_body_that_a_closing_client_waits_for_is_still_extended(
    make_client: MakeClient, redis: Redis, closed_after_s: float
) -> None:
    """Closed before, and after, the first extension: the key stands until the body has left."""
    locks = make_client()
    holder = await Holder.entered(locks, ttl=0.6, cleaning_s=1.5)
    lease = holder.lease
    assert lease is not None
    await asyncio.sleep(closed_after_s)
    closing = asyncio.create_task(locks.aclose())
    await until(lambda: holder.cancels)
    value = f"{lease.owner_token}/{lease.fencing_token}"
    while not holder.left_at:
        assert await redis.get(KEY) == value
        assert lease.state == "lost"
        await asyncio.sleep(0.05)
    await closing
    assert isinstance(await holder.outcome(), LeaseLostError)
    assert await leftovers(redis) == []


async def test_lease_that_a_closing_client_lost_to_another_is_not_asked_for_without_end(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """While its body cleans up the watchdog must not storm the server about what is gone."""
    locks = make_client(proxy.url)
    holder = await Holder.entered(locks, ttl=0.6, cleaning_s=1.0)
    closing = asyncio.create_task(locks.aclose())
    await until(lambda: holder.cancels)
    await redis.set(KEY, "somebody else")
    before = proxy.requests["EVALSHA"]
    await closing
    # It may extend at 0.2 s, learns that it is not ours, and releases at the end.
    assert proxy.requests["EVALSHA"] - before <= 3
    assert await redis.get(KEY) == "somebody else"
    assert isinstance(await holder.outcome(), LeaseLostError)


async def test_client_whose_body_does_not_leave_is_closed_after_five_seconds(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning; then nothing extends the lease, and its ttl ends it."""
    locks = make_client()
    holder = await Holder.entered(locks, ttl=1.0, cleaning_s=2 * BODIES_S)
    began = time.monotonic()
    await locks.aclose()
    took_s = time.monotonic() - began
    assert BODIES_S - 0.01 <= took_s <= BODIES_S + SLACK_S
    assert our_tasks() == []
    messages = warnings_in(caplog)
    assert len(messages) == 1
    assert "'x'" in messages[0]
    assert "until its ttl" in messages[0]
    assert await redis.exists(KEY) == 1
    left_ms = int(await redis.pttl(KEY))
    assert 0 < left_ms <= 1000

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)
    holder.task.cancel()
    assert isinstance(await holder.outcome(), asyncio.CancelledError | LeaseLostError)


async def test_body_that_closes_its_own_client_is_not_waited_for(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not cancelled, it is told at its exit; the lease is left to its ttl."""
    locks = make_client()
    steps = 0
    began = time.monotonic()
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=0.5) as lease:
            await locks.aclose()
            steps += 1
            await asyncio.sleep(0)
            assert lease.state == "lost"
            with pytest.raises(LeaseLostError):
                lease.check()
    assert time.monotonic() - began < BODIES_S
    assert (steps, lost.value.reason) == (1, LostReason.CLOSED)
    assert len(warnings_in(caplog)) == 1
    assert our_tasks() == []

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)


async def test_body_that_leaves_its_client_first_and_its_lock_last_ends(
    make_client: MakeClient, redis: Redis
) -> None:
    """The blocks in the wrong order: the inner one closes the client under the outer lock."""
    locks = make_client()
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=0.5), locks:
            pass
    assert lost.value.reason is LostReason.CLOSED


@pytest.mark.parametrize("turns", range(8))
async def test_lease_entered_while_its_client_closes_is_not_held_in_vain(
    make_client: MakeClient, redis: Redis, turns: int
) -> None:
    """Entering is refused, or the body is told; never a body that believes in what is given up."""
    locks = make_client()
    lease = await locks.lock("x").acquire()
    closing = asyncio.create_task(locks.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    with pytest.raises((RuntimeError, LeaseLostError)):
        async with lease:
            await until(lambda: not lease.is_held)
    await closing
    assert await leftovers(redis) == []


# At once, again, cancelled.


async def test_client_closed_by_several_at_once_is_closed_once(
    make_client: MakeClient, redis: Redis
) -> None:
    """Each returns when it is done."""
    locks = make_client()
    holder = await Holder.entered(locks, cleaning_s=0.1)

    async def close() -> bool:
        await locks.aclose()
        return holder.left_at > 0 and await leftovers(redis) == []

    assert await asyncio.gather(*(close() for _ in range(5))) == [True] * 5
    assert await close()
    assert our_tasks() == []
    assert isinstance(await holder.outcome(), LeaseLostError)


async def test_client_never_used_can_be_closed(make_client: MakeClient) -> None:
    """Nothing to do; not even a connection."""
    locks = make_client()
    await locks.aclose()
    await locks.aclose()
    async with locks:
        pass


async def test_close_that_is_cancelled_is_finished_first(
    make_client: MakeClient, redis: Redis
) -> None:
    """The cancel comes out when all is done, however often it was asked for."""
    locks = make_client()
    holder = await Holder.entered(locks, cleaning_s=0.2)
    closing = asyncio.create_task(locks.aclose())
    for _ in range(3):
        await asyncio.sleep(0.02)
        closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert holder.left_at > 0
    assert await leftovers(redis) == []
    assert our_tasks() == []
    assert isinstance(await holder.outcome(), LeaseLostError)


async def test_client_that_ends_with_an_error_is_closed_and_the_error_comes_out(
    make_client: MakeClient, redis: Redis
) -> None:
    """`async with client` around a failing program."""
    error = ValueError("mine")
    holders: list[Holder] = []
    with pytest.raises(ValueError) as out:
        async with make_client() as locks:
            holders.append(await Holder.entered(locks))
            raise error
    assert out.value is error
    assert isinstance(await holders[0].outcome(), LeaseLostError)
    assert await leftovers(redis) == []
    assert our_tasks() == []


# Without a server.


@pytest.mark.parametrize("gone", ["killed", "stopped", "black hole"])
async def test_client_whose_server_is_gone_is_closed_all_the_same(
    make_client: MakeClient,
    server: LockServer,
    proxy: ChaosProxy,
    caplog: pytest.LogCaptureFixture,
    gone: str,
) -> None:
    """Each step has the time of a request; warnings, no exception, no task is left."""
    request_timeout = 0.4
    locks = make_client(proxy.url, request_timeout=request_timeout)
    holder = await Holder.entered(locks)
    lease = await locks.lock("y").acquire()
    waiter = asyncio.create_task(locks.lock("x").acquire())
    with BlockingRedis.from_url(server.url) as look:
        await until(lambda: look.zcard(QUEUE))
    {"killed": server.kill, "stopped": server.pause, "black hole": proxy.black_hole}[gone]()
    began = time.monotonic()
    await locks.aclose()
    took_s = time.monotonic() - began
    with pytest.raises(RuntimeError, match="closed"):
        await waiter
    assert isinstance(await holder.outcome(), LeaseLostError)
    assert our_tasks() == []
    # The waiter's poll, its leaving, the leases' releases: one request's time each.
    assert took_s <= 3 * request_timeout + SLACK_S
    told = warnings_in(caplog)
    assert [message for message in told if "'y'" in message and "ttl" in message] != []
    assert not lease.is_held
    proxy.heal()


async def test_waiter_whose_request_is_in_flight_when_its_client_closes_is_told(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The answer, a grant, is on its way: it is given back."""
    locks = make_client(proxy.url)
    await (await locks.lock("warm").acquire()).release()
    proxy.delay_replies(0.3, b"EVALSHA", n=1)
    waiter = asyncio.create_task(locks.lock("x").acquire())

    async def granted() -> bool:
        return bool(await redis.exists(KEY))

    await until(granted)
    await locks.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await waiter
    assert await leftovers(redis) == []


async def test_waiter_that_connects_when_its_client_closes_is_told(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Nothing was sent yet, and nothing answers."""
    request_timeout = 0.4
    proxy.black_hole()
    locks = make_client(proxy.url, request_timeout=request_timeout)
    waiter = asyncio.create_task(locks.lock("x").acquire())
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await locks.aclose()
    assert time.monotonic() - began <= 2 * request_timeout + SLACK_S
    with pytest.raises(RuntimeError, match="closed"):
        await waiter
    assert our_tasks() == []


# Lost leases, thrown away.


async def test_client_with_a_lost_lease_that_was_thrown_away_leaves_no_task(
    make_client: MakeClient, redis: Redis
) -> None:
    """Its watchdog has ended with the loss, and its token is forgotten."""
    locks = make_client(ttl=6)
    lease: Lease | None = await locks.lock("x", ttl=0.9).acquire()
    assert lease is not None
    await redis.delete(KEY)
    assert await lease.wait_lost() is LostReason.DELETED
    await until(lambda: not [name for name in our_tasks() if "watchdog" in name], 0.2)
    lease = None
    gc.collect()
    await asyncio.sleep(0)
    assert known_tokens(locks) == []
    await locks.aclose()
    assert our_tasks() == []


async def test_lease_thrown_away_while_held_stops_its_watchdog_and_warns_once(
    locks: LockClient, proxy: ChaosProxy, make_client: MakeClient, redis: Redis
) -> None:
    """No I/O: the key runs out by its ttl, and then another can acquire."""
    behind = make_client(proxy.url)
    leases = [await behind.lock("x", ttl=0.9).acquire()]
    granted = leases[0].deadline
    await until(lambda: leases[0].deadline > granted)  # by its watchdog
    assert [name for name in our_tasks() if "watchdog" in name] == ["aiodlock watchdog x"]
    before = Counter(proxy.requests)
    with pytest.warns(ResourceWarning, match="a lease of 'x' was thrown away while held") as told:
        leases.clear()
    assert len(told) == 1
    for _ in range(3):
        await asyncio.sleep(0)
    assert [name for name in our_tasks() if "watchdog" in name] == []
    assert await redis.exists(KEY) == 1
    async with locks.lock("x").acquire(wait_timeout=5) as next_lease:
        assert next_lease.is_held
    assert proxy.requests == before


async def test_lease_thrown_away_after_its_release_says_nothing(locks: LockClient) -> None:
    """No warning, whichever way it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lease: Lease | None = await locks.lock("x").acquire()
        assert lease is not None
        await lease.release()
        lease = None
        async with locks.lock("x"):
            pass
        gc.collect()


def objects() -> Counter[str]:
    """How many there are of each kind, and of memory blocks, which not every object shows in."""
    gc.collect()
    kinds = Counter(type(each).__qualname__ for each in gc.get_objects())
    # A loop drops cancelled timers when they are more than a half: theirs, not ours.
    kinds["TimerHandle"] = len(leaks.timers())
    del kinds["Context"]
    kinds["(memory blocks)"] = sys.getallocatedblocks() // 20
    return kinds


def grown(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """The kinds of which there are a hundred more, which is far less than one for each cycle."""
    return {kind: count for kind, count in (after - before).items() if count > 100}


async def test_ten_thousand_cycles_leave_no_objects_behind(locks: LockClient) -> None:
    """Leases, futures, acquisitions, timers: as many after as before."""
    names = [f"name {number}" for number in range(20)]

    async def cycles(lock_name: str, count: int) -> None:
        lock = locks.lock(lock_name)
        for _ in range(count):
            async with lock:
                pass

    async def all_cycles(count: int) -> Counter[str]:
        await asyncio.gather(*(cycles(name, count) for name in names))
        return objects()

    before = await all_cycles(25)
    after = await all_cycles(500)
    assert grown(before, after) == {}


async def test_thousand_cancelled_waiters_leave_no_objects_behind(
    locks: LockClient, redis: Redis
) -> None:
    """Nor does anything of them stand in the server."""

    async def cancelled_waiters(count: int) -> Counter[str]:
        lock = locks.lock("x")
        async with lock:
            waiting = [asyncio.create_task(lock.acquire()) for _ in range(count)]
            await queue_is(redis, count)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert all(task.cancelled() for task in waiting)
            assert await redis.exists(QUEUE) == 0
        del waiting
        return objects()

    before = await cancelled_waiters(50)
    after = await cancelled_waiters(1000)
    assert grown(before, after) == {}


async def test_waiters_that_time_out_leave_nothing_behind(locks: LockClient, redis: Redis) -> None:
    """They leave the queue in the background, and are forgotten then."""
    lock = locks.lock("x")
    async with lock as lease:
        tries = (lock.try_acquire(wait_timeout=0.05) for _ in range(200))
        assert await asyncio.gather(*tries) == [None] * 200
        await queue_is(redis, 0)
        await until(lambda: known_tokens(locks) == [lease.owner_token])
    assert known_tokens(locks) == []


async def test_acquires_cancelled_before_there_is_a_connection_leave_nothing_behind(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Nothing was sent for them, and nothing is remembered of them."""
    proxy.black_hole()
    locks = make_client(proxy.url, request_timeout=5)
    waiting = [asyncio.create_task(locks.lock("x").acquire()) for _ in range(20)]
    await until(lambda: proxy.connections)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    assert known_tokens(locks) == []


# Loops.


def test_client_and_locks_are_made_without_a_loop(server: LockServer) -> None:
    """Module level: a client, a lock, a decorated function; then two loops use them in turn."""
    locks = LockClient.from_url(server.url)
    lock = locks.lock("x")
    tokens: list[int] = []

    @locks.locked("{name}")
    async def work(name: str) -> None:
        info = await locks.lock(name).inspect()
        assert info.held

    async def program() -> None:
        async with locks:
            async with lock as lease:
                tokens.append(lease.fencing_token)
            await work("x")

    asyncio.run(program())
    asyncio.run(program())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 2
    with BlockingRedis.from_url(server.url) as look:
        assert look.keys("aiodlock:*") == [f"{KEY}:fence".encode()]


async def test_client_entered_again_after_its_close_works(
    make_client: MakeClient, redis: Redis
) -> None:
    """In the same loop, three times; between them it is closed."""
    locks = make_client()
    lock = locks.lock("x")
    for _ in range(3):
        async with locks:
            async with lock as lease:
                assert lease.is_held
            holder = await Holder.entered(locks)
        assert isinstance(await holder.outcome(), LeaseLostError)
        with pytest.raises(RuntimeError, match="closed"):
            await lock.acquire()
        assert await leftovers(redis) == []
        assert our_tasks() == []


async def test_client_of_the_users_redis_gives_its_connections_back(server: LockServer) -> None:
    """It stays theirs to close: a pool of three serves one client after the other, and them."""
    async with Redis.from_url(server.url, max_connections=3) as users:
        for _ in range(3):
            async with LockClient(users) as locks:
                lock = locks.lock("x")
                async with lock:
                    waiter = asyncio.create_task(lock.acquire())
                    await queue_is(users, 1)
                await (await waiter).release()
            assert our_tasks() == []
            assert await asyncio.gather(*(users.exists(KEY) for _ in range(3))) == [0, 0, 0]


def test_client_used_from_another_loop_says_so(server: LockServer) -> None:
    """Acquiring, closing, entering: a clear RuntimeError; the first loop goes on with it."""

    async def acquire() -> Lease:
        return await locks.lock("x").acquire()

    async def enter() -> None:
        async with locks:
            pass

    async def release() -> bool:
        removed = await lease.release()
        async with locks.lock("x") as again:
            assert again.is_held
        await locks.aclose()
        return removed

    locks = LockClient.from_url(server.url)
    others: list[Callable[[], Coroutine[Any, Any, object]]] = [acquire, locks.aclose, enter]
    with asyncio.Runner() as first, asyncio.Runner() as second:
        lease = first.run(acquire())
        for other in others:
            with pytest.raises(RuntimeError, match="another event loop"):
                second.run(other())
        assert first.run(release())


def run_program(script: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run *script* by the interpreter of this test run, to its end."""
    return subprocess.run(
        [sys.executable, *options, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_client_whose_loop_was_closed_counts_as_left_with_one_warning(
    server: LockServer,
) -> None:
    """A held lease with its watchdog, somebody who waits for its loss, a waiter: all forgotten."""
    script = f"""
import asyncio, logging
from aiodlock import LockClient, LeaseLostError
logging.basicConfig(format="%(name)s %(levelname)s %(message)s", level=logging.WARNING)
logging.getLogger("asyncio").disabled = True
locks = LockClient.from_url({server.url!r}, ttl=0.6, label="same")
lock = locks.lock("x")
async def body():
    async with locks.lock("body"):
        await asyncio.sleep(60)
async def first():
    lease = await lock.acquire()
    tasks = [asyncio.ensure_future(lease.wait_lost()), asyncio.create_task(lock.acquire()),
             asyncio.create_task(body())]
    await asyncio.sleep(0.4)
    return lease, tasks
async def second():
    async with lock as again:
        async with locks.lock("body") as other:
            print(again.fencing_token > lease.fencing_token, again.is_held, other.is_held)
    try:
        lease.check()
    except LeaseLostError as error:
        print(lease.state, error.reason.name)
    await locks.aclose()
    print(len(asyncio.all_tasks()))
loop = asyncio.new_event_loop()
lease, tasks = loop.run_until_complete(first())
loop.close()
asyncio.run(second())
"""
    ended = run_program(script, "-W", "ignore::ResourceWarning")
    assert ended.stdout == "True True True\nlost CLOSED\n1\n", ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("aiodlock ")]
    assert len(told) == 1
    assert "event loop was closed" in told[0]
    assert "Exception ignored" not in ended.stderr, ended.stderr
    assert "never awaited" not in ended.stderr


def test_client_whose_close_was_cut_off_by_the_end_of_its_loop_can_be_used_again(
    server: LockServer,
) -> None:
    """A loop stopped in the middle of `aclose` must not leave the client closing for ever."""
    script = f"""
import asyncio, logging
from aiodlock import LockClient
logging.getLogger("asyncio").disabled = True
locks = LockClient.from_url({server.url!r}, ttl=0.6)
async def stubborn():
    async with locks.lock("x"):
        entered.set()
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
async def first():
    global entered, kept
    entered = asyncio.Event()
    kept = [asyncio.create_task(stubborn())]
    await entered.wait()
    kept.append(asyncio.create_task(locks.aclose()))
    await asyncio.sleep(0.2)
async def second():
    async with locks, locks.lock("y") as lease:
        print(lease.is_held)
loop = asyncio.new_event_loop()
loop.run_until_complete(first())
loop.close()
asyncio.run(second())
"""
    ended = run_program(script, "-W", "ignore::ResourceWarning")
    assert ended.stdout == "True\n", ended.stderr


def test_thousand_tasks_that_compete_and_a_close_leave_no_warning(server: LockServer) -> None:
    """Case 009: asyncio's debug mode, every warning an error, nothing on stderr."""
    script = f"""
import asyncio, gc
from aiodlock import LockClient
async def compete(locks, number, got):
    lease = await locks.lock(f"x{{number % 10}}").try_acquire()
    if lease:
        got.append(number)
        async with lease:
            await asyncio.sleep(0)
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60
    got = []
    async with LockClient.from_url({server.url!r}, request_timeout=30) as locks:
        await asyncio.gather(*(compete(locks, number, got) for number in range(1000)))
        left = [asyncio.create_task(compete(locks, number, got)) for number in range(1000)]
        await asyncio.sleep(0)
    ends = await asyncio.gather(*left, return_exceptions=True)
    print(len(got) >= 10, {{type(end).__name__ for end in ends}} <= {{"NoneType", "RuntimeError",
        "LeaseLostError"}}, len(asyncio.all_tasks()))
asyncio.run(main())
gc.collect()
"""
    ended = run_program(script, "-W", "error", PYTHONASYNCIODEBUG="1")
    assert ended.stderr == ""
    assert ended.stdout == "True True 1\n"
    with BlockingRedis.from_url(server.url) as look:
        assert [key for key in look.keys("aiodlock:*") if not key.endswith(b":fence")] == []


# Forks.


@asynccontextmanager
async def parent_goes_on(
    locks: LockClient, other: LockClient, proxy: ChaosProxy
) -> AsyncIterator[Lease]:
    """A parent that holds and waits; after the fork its lock and its inbox still work."""
    connections = proxy.connections
    async with locks.lock("held") as lease:
        others = await other.lock("x").acquire()
        waiter = asyncio.create_task(locks.lock("x", ttl=30).acquire(wait_timeout=20))
        async with Redis.from_url(f"redis://127.0.0.1:{proxy.server_port}") as redis:
            await queue_is(redis, 1)
        yield lease
        assert await lease.extend() > 0
        lease.check()
        polls = proxy.requests["EVALSHA"]
        await others.release()
        handed = await waiter
        # A message brought it, not a poll; over the connections that there were before.
        assert proxy.requests["EVALSHA"] == polls
        assert await handed.release()
        assert proxy.connections == connections
    async with locks.lock("held") as again:
        assert again.is_held


def in_child(locks: LockClient, inherited: Lease, url: str) -> dict[str, object]:
    """What a forked child finds: the lease is lost, and it can lock by itself."""
    found: dict[str, object] = {"state": inherited.state, "held": inherited.is_held}
    try:
        inherited.check()
    except LeaseLostError as error:
        found["reason"] = error.reason.name

    async def lock() -> dict[str, object]:
        async with locks:
            theirs = await locks.lock("held").try_acquire()
            async with locks.lock("child") as lease:
                info = await locks.lock("child").inspect()
                parents = (await locks.lock("held").inspect()).holder
                return {
                    "got the parent's": theirs is not None,
                    "holder differs": info.holder != parents,
                    "own": lease.is_held,
                    "released": await inherited.release(),
                }

    found |= asyncio.run(lock())
    gc.collect()
    return found


CHILD_FINDS = {
    "state": "lost",
    "held": False,
    "reason": "CLOSED",
    "got the parent's": False,
    "holder differs": True,
    "own": True,
    "released": False,
}


async def readable(descriptor: int) -> None:
    """Return once there is something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(20):
            await ready.wait()
    finally:
        loop.remove_reader(descriptor)


def ended(pid: int) -> int:
    """How a child has ended that has said everything."""
    return os.waitpid(pid, 0)[1]


def forked(work: Callable[[], object]) -> tuple[int, int]:
    """`os.fork`: the child's pid, and where it says in JSON what *work* returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        try:
            said = json.dumps(work())
        except BaseException as error:
            said = json.dumps(repr(error))
        os.write(writing, said.encode())
    finally:
        os._exit(0)


@pytest.fixture
async def behind(make_client: MakeClient, proxy: ChaosProxy) -> LockClient:
    """A client whose connections can be counted, with a label that does not name its process."""
    locks = make_client(proxy.url, label="parent")
    async with locks.lock("x"):
        waiter = asyncio.create_task(locks.lock("x").acquire())
        await until(lambda: hears(locks))
    await (await waiter).release()
    return locks


no_threads_warning = pytest.mark.filterwarnings(
    # Python 3.12 warns of forks beside threads; those of the tests hold no locks of ours.
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@no_threads_warning
async def test_child_forked_inside_a_coroutine_takes_nothing_from_its_parent(
    behind: LockClient, proxy: ChaosProxy, make_client: MakeClient
) -> None:
    """`os.fork` while the parent holds, waits, and listens."""
    # The child goes past the proxy, which is a part of its parent.
    direct = f"redis://127.0.0.1:{proxy.server_port}"
    own = make_client(direct, label="child")
    async with parent_goes_on(behind, make_client(direct), proxy) as lease:
        pid, reading = forked(lambda: in_child(own, lease, direct))
        await readable(reading)
        said = json.loads(os.read(reading, 65536))
        os.close(reading)
        assert ended(pid) == 0
        assert said == CHILD_FINDS


@no_threads_warning
async def test_child_forked_inside_a_coroutine_uses_the_client_it_inherited(
    make_client: MakeClient, server: LockServer, redis: Redis
) -> None:
    """The same client object: new connections, a new client id, the same options."""
    locks = make_client(label="both")
    async with locks.lock("held") as lease:
        pid, reading = forked(lambda: in_child(locks, lease, server.url))
        await readable(reading)
        said = json.loads(os.read(reading, 65536))
        os.close(reading)
        assert ended(pid) == 0
        assert said == CHILD_FINDS
        assert await lease.extend() > 0
        async with locks.lock("x") as other:
            assert other.is_held
    assert await leftovers(redis) == []


@no_threads_warning
async def test_child_of_a_client_on_the_users_redis_can_lock(
    server: LockServer, redis: Redis
) -> None:
    """Their object is inherited with its sockets; the child's locks have a pool of their own."""
    async with (
        Redis.from_url(server.url) as users,
        LockClient(users, label="both") as locks,
        locks.lock("held") as lease,
    ):
        pid, reading = forked(lambda: in_child(locks, lease, server.url))
        await readable(reading)
        said = json.loads(os.read(reading, 65536))
        os.close(reading)
        assert ended(pid) == 0
        assert said == CHILD_FINDS
        assert await lease.extend() > 0
        assert await users.ping()
    assert await leftovers(redis) == []


def _process(locks: LockClient, lease: Lease, url: str, pipe: Connection) -> None:
    """The target of a process; what it raises would be seen in its exit code."""
    pipe.send(in_child(locks, lease, url))
    pipe.close()


@no_threads_warning
async def test_process_forked_by_multiprocessing_inside_a_coroutine_can_lock(
    behind: LockClient, proxy: ChaosProxy, make_client: MakeClient
) -> None:
    """It ends in the usual way, with its destructors: the parent goes on."""
    direct = f"redis://127.0.0.1:{proxy.server_port}"
    own = make_client(direct, label="child")
    fork = multiprocessing.get_context("fork")
    async with parent_goes_on(behind, make_client(direct), proxy) as lease:
        reading, writing = fork.Pipe(duplex=False)
        process = fork.Process(target=_process, args=(own, lease, direct, writing))
        process.start()
        writing.close()
        await readable(reading.fileno())
        said = reading.recv()
        await until(lambda: process.exitcode is not None, 20)
        process.join()
        assert (said, process.exitcode) == (CHILD_FINDS, 0)
        process.close()
        reading.close()


@no_threads_warning
async def test_child_that_leaves_the_block_of_its_parent_releases_nothing(
    make_client: MakeClient, redis: Redis
) -> None:
    """The fork went into the body: its exit raises the loss and sends nothing."""
    locks = make_client()
    lease = await locks.lock("x").acquire()

    def leave() -> str:
        async def ends() -> str:
            try:
                await lease.__aexit__(None, None, None)
            except LeaseLostError as error:
                return error.reason.name
            return "left"

        return asyncio.run(ends())

    async with lease:
        pid, reading = forked(leave)
        await readable(reading)
        assert json.loads(os.read(reading, 65536)) == "CLOSED"
        os.close(reading)
        assert ended(pid) == 0
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
        assert await lease.extend() > 0


def test_programs_end_with_a_client_left_open_says_nothing_of_ours(server: LockServer) -> None:
    """A module-level client that nobody closes: no 'Exception ignored', no 'never awaited'."""
    script = f"""
import asyncio
from aiodlock import LockClient
locks = LockClient.from_url({server.url!r})
async def main():
    async with locks.lock("x"):
        pass
    assert await locks.lock("x").try_acquire(wait_timeout=0.01)
asyncio.run(main())
"""
    ended = run_program(script, "-W", "ignore::ResourceWarning")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("entered", ["client", "client and lock"])
def test_client_block_destroyed_with_its_loop_ignores_no_exception(
    server: LockServer, entered: str
) -> None:
    """`async with client` suspended when its loop is closed: nothing can be awaited any more."""
    block = {"client": "locks", "client and lock": 'locks, locks.lock("x")'}[entered]
    script = f"""
import asyncio, gc, logging
from aiodlock import LockClient
logging.getLogger("asyncio").disabled = True
async def program():
    locks = LockClient.from_url({server.url!r})
    await (await locks.lock("y").acquire()).release()
    try:
        async with {block}:
            inside.set()
            await asyncio.sleep(60)
    except BaseException as error:
        print(type(error).__name__)
        raise
async def main():
    global inside, held
    inside = asyncio.Event()
    held = asyncio.create_task(program())
    await inside.wait()
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
del held
gc.collect()
"""
    ended = run_program(script, "-W", "ignore::ResourceWarning")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "GeneratorExit\n", "")


def test_client_block_of_a_task_that_is_thrown_away_is_closed(server: LockServer) -> None:
    """Nothing may be awaited where the coroutine is destroyed, but the loop still runs."""
    script = f"""
import asyncio, gc, logging
from aiodlock import LockClient
logging.getLogger("asyncio").disabled = True
async def program():
    async with LockClient.from_url({server.url!r}) as locks, locks.lock("x"):
        inside.set()
        await asyncio.get_running_loop().create_future()
async def main():
    global inside
    inside = asyncio.Event()
    asyncio.create_task(program())
    await inside.wait()
    gc.collect()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
asyncio.run(main())
"""
    ended = run_program(script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    with BlockingRedis.from_url(server.url) as look:
        assert look.keys("aiodlock:*") == [f"{KEY}:fence".encode()]


def test_child_forked_in_a_thread_in_debug_mode_takes_nothing(server: LockServer) -> None:
    """As `Process.start` in an executor: each client is forgotten, the parent's loop left alone."""
    script = f"""
import asyncio, os
from aiodlock import LockClient
clients = [LockClient.from_url({server.url!r}, ttl=0.6) for _ in range(3)]
async def hold(number):
    lease = await clients[number].lock(f"x{{number}}").acquire()
    return lease, asyncio.create_task(lease.wait_lost())
def fork():
    pid = os.fork()
    if pid == 0:
        print([lease.state for lease, _ in held], flush=True)
        os._exit(0)
    return os.waitpid(pid, 0)[1]
async def main():
    global held
    asyncio.get_running_loop().slow_callback_duration = 60
    held = [await hold(number) for number in range(3)]
    await asyncio.sleep(0.3)
    print(await asyncio.to_thread(fork), flush=True)
    for lease, lost in held:
        print(await lease.extend() > 0, await lease.release(), await lost)
    for client in clients:
        await client.aclose()
asyncio.run(main(), debug=True)
"""
    ended = run_program(script, "-W", "ignore::DeprecationWarning")
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "['lost', 'lost', 'lost']", "0", *["True True None"] * 3
    ]  # fmt: skip


@pytest.mark.parametrize("block", ['locks.lock("x")', 'locks.lock("x").acquire()', "locks"])
def test_child_that_collects_a_task_of_its_parent_writes_nothing_to_its_loop(
    server: LockServer, block: str
) -> None:
    """A body that is garbage in both: its exit in the child must not wake the parent's loop."""
    script = f"""
import asyncio, gc, logging, os, sys
from aiodlock import LockClient
logging.getLogger("asyncio").disabled = True
gc.disable()
locks = LockClient.from_url({server.url!r})
async def body():
    await (await locks.lock("y").acquire()).release()
    async with {block}:
        inside.set()
        await asyncio.get_running_loop().create_future()
async def in_child():
    gc.collect()
async def main():
    global inside
    inside = asyncio.Event()
    asyncio.create_task(body())
    await inside.wait()
    loop = asyncio.get_running_loop()
    wakes = loop._read_from_self
    def count():
        print("woken by its child")
        wakes()
    loop._remove_reader(loop._ssock.fileno())
    loop._add_reader(loop._ssock.fileno(), count)
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(in_child())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    await asyncio.sleep(0.05)
    async with locks.lock("z"):
        pass
    await locks.aclose()
    gc.collect()
asyncio.run(main())
"""
    ended = run_program(script, "-W", "ignore::DeprecationWarning")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


async def test_client_closed_without_a_server_says_once_that_a_lease_stands(
    server: LockServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for one fact."""
    locks = make_client(request_timeout=0.2)
    lease = await locks.lock("n").acquire()
    server.kill()
    await locks.aclose()
    assert len([record for record in caplog.records if f"{lease.name!r}" in record.message]) == 1
