"""A cancel at any await: nothing is left on the server or in the loop, and the cancel comes out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeAlias

import anyio
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import (
    AllLocks,
    Backoff,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockTimeout,
    _cleanup,
)
from aiodlock._session import Session
from aiodlock.fastapi import Locked, install
from aiodlock.testing import LockServer
from tests import leaks, quorums
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.quorums import Nodes
from tests.steps import Mode, Steps, cancel_at_every_step
from tests.until import until

KEY = "aiodlock:{x}"
QUEUE = f"{KEY}:queue"
REQUEST_TIMEOUT_S = 0.5
# A cancelled caller waits for its release at most that long (design §7).
CANCELLED_S = 1.0
# What the loop and a loaded machine may add to a bound of the contract.
SLACK_S = 0.5

# A connection that is being made has timers; a forgotten waiter's lives for at least 1.8 s.
SETTLE_S = 1.0

Act: TypeAlias = Callable[[], Coroutine[Any, Any, object]]


# What a connection keeps for all its requests, and a client for all its watchdogs: one timer each.
KEPT_FOR_ALL = ("Link._on_time", "Watchdogs._wake")


def strays() -> list[str]:
    """The timers that somebody has set, but for those that are kept for all."""
    callbacks = (getattr(timer, "_callback", None) for timer in leaks.timers())
    names = (getattr(callback, "__qualname__", repr(callback)) for callback in callbacks)
    return sorted(name for name in names if not name.endswith(KEPT_FOR_ALL))


async def settled_strays(before: list[str]) -> list[str]:
    """Those that are left once they had `SETTLE_S` to end; `until` would add its own."""
    for _ in range(round(SETTLE_S / 0.01)):
        if strays() == before:
            break
        await asyncio.sleep(0.01)
    return strays()


async def waiters(redis: Redis) -> int:
    """How many stand in the queue."""
    return int(await redis.zcard(QUEUE))


class Stage:
    """What is the same in every scenario: who else wants the lock, and what must be left."""

    def __init__(self, redis: Redis, rival: LockClient) -> None:
        self.redis = redis
        self.rival = rival.lock("x", ttl=30)
        self.held: Lease | None = None
        self.over = asyncio.Event()
        self.handing: asyncio.Task[None] | None = None

    async def play(
        self,
        act: Act,
        *,
        before: Act | None = None,
        after: Act | None = None,
        modes: tuple[Mode, ...] = tuple(Mode),
        allowed: tuple[type[Exception], ...] = (),
        instead: Callable[[], object] | None = None,
        label: str,
    ) -> Steps:
        """Cancel *act* at each of its steps; *before* and *after* are the scenario's own."""
        timers = strays()

        async def prepare() -> None:
            self.over.clear()
            if before is not None:
                await before()

        async def look() -> None:
            if after is not None:
                await after()
            await self.assert_free()
            assert await settled_strays(timers) == timers

        return await cancel_at_every_step(
            *(act, look),
            before=prepare,
            modes=modes,
            allowed=allowed,
            instead=instead,
            label=label,
        )

    async def assert_free(self) -> None:
        """No key but the fence, and another client acquires with its first request."""
        await self.end_rival()
        assert await leftovers(self.redis, ignoring_tombstones=True) == []
        lease = await self.rival.try_acquire()
        assert lease is not None
        await lease.release()

    async def hold(self, lock: Lock | None = None) -> None:
        """Somebody holds it: the rival, if no other lock is named."""
        self.held = await (lock or self.rival).acquire()

    async def hand_over(self, lock: Lock | None = None) -> None:
        """Somebody holds it, and gives it up once another waits."""
        await self.hold(lock)
        self.handing = asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        async def is_time() -> bool:
            return self.over.is_set() or await waiters(self.redis) > 0

        await until(is_time, 20)
        assert self.held is not None
        await self.held.release()

    async def end_handing(self) -> None:
        """The rival gives up waiting for a waiter, and releases."""
        self.over.set()
        handing, self.handing = self.handing, None
        if handing is not None:
            await handing

    async def end_rival(self) -> None:
        """The holder that the scenario began with is gone, and nobody waits."""
        await self.end_handing()
        held, self.held = self.held, None
        if held is not None:
            assert await self.redis.exists(QUEUE) == 0
            await held.release()


@pytest.fixture
async def stage(redis: Redis, make_client: MakeClient) -> AsyncIterator[Stage]:
    """The stage, with a rival that is connected and that hears."""
    async with make_client(label="rival") as rival:
        yield Stage(redis, rival)


@pytest.fixture
async def slow(make_client: MakeClient, proxy: ChaosProxy) -> AsyncIterator[LockClient]:
    """A connected client, each of whose replies takes 10 ms."""
    async with make_client(proxy.url, request_timeout=REQUEST_TIMEOUT_S) as locks:
        await warm(locks)
        proxy.delay_replies(0.01)
        yield locks


async def warm(locks: LockClient) -> None:
    """Connect, load the scripts, and subscribe, so that this is no step of a scenario."""
    lock = locks.lock("warm")
    async with lock.acquire() as lease:
        await lease.extend()
        waiting = asyncio.create_task(lock.acquire())
        try:
            await until(lambda: hears(locks))
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


def acquire_and_release(lock: Lock) -> Act:
    """The simplest of all uses."""

    async def act() -> None:
        lease = await lock.acquire()
        await lease.release()

    return act


def use(lock: Lock) -> Act:
    """`async with lock`, with a body that waits."""

    async def act() -> None:
        async with lock as lease:
            await asyncio.sleep(0)
            assert lease.is_held

    return act


# On a healthy server.


async def test_acquire_of_a_free_lock_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """One request each way."""
    await warm(locks)
    done = await stage.play(acquire_and_release(locks.lock("x")), label="acquire, release")
    assert done.steps == 2


async def test_acquire_with_backoff_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Waiting by polling."""
    await warm(locks)
    lock = locks.lock("x", retry=Backoff(initial=0.01, maximum=0.01))
    done = await stage.play(
        acquire_and_release(lock), before=stage.hand_over, label="acquire by polling, release"
    )
    assert done.steps >= 3


async def test_acquire_that_waits_in_vain_cancelled_anywhere_leaves_the_queue(
    stage: Stage, locks: LockClient
) -> None:
    """The holder keeps the lock; the waiter's entry is gone when the cancel comes out."""
    await warm(locks)
    lock = locks.lock("x")
    timed_out: list[bool] = []

    async def act() -> None:
        try:
            await lock.acquire(wait_timeout=0.05)
        except LockTimeout:
            timed_out.append(True)

    async def after() -> None:
        if timed_out:
            # A wait that is over leaves the queue in the background.
            timed_out.clear()
            await until(lambda: _is_zero(waiters(stage.redis)))

    done = await stage.play(act, before=stage.hold, after=after, label="acquire, queued")
    assert done.steps >= 3


async def _is_zero(count: Awaitable[int]) -> bool:
    return await count == 0


async def test_nested_reentrant_blocks_cancelled_anywhere_leave_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Free at first, and handed over; the inner block adds no await of its own."""
    await warm(locks)
    lock = locks.lock("x", reentrant=True)

    async def act() -> None:
        async with lock as lease:
            await asyncio.sleep(0)
            async with lock as inner:
                await asyncio.sleep(0)
                assert inner is lease
            await asyncio.sleep(0)

    done = await stage.play(act, label="nested reentrant blocks")
    assert done.steps == 5
    done = await stage.play(act, before=stage.hand_over, label="nested reentrant blocks, queued")
    assert done.steps >= 6


async def test_several_names_cancelled_anywhere_leave_none(
    stage: Stage, locks: LockClient, slow: LockClient
) -> None:
    """One of the three is another's until it is waited for; also where each reply takes long."""
    await warm(locks)
    for client, label in ((locks, "several names"), (slow, "several names, slowly")):
        names = client.all("w", "x", "y")

        async def act(names: AllLocks = names) -> None:
            async with names as leases:
                await asyncio.sleep(0)
                leases.check()

        done = await stage.play(act, before=stage.hand_over, label=label)
        assert done.steps >= 5


async def test_several_names_in_vain_cancelled_anywhere_leave_none(
    stage: Stage, locks: LockClient
) -> None:
    """What was got is given back in the background when the time is over."""
    await warm(locks)
    names = locks.all("w", "x", "y", wait_timeout=0.05)

    async def act() -> None:
        with suppress(LockTimeout):
            async with names:
                raise AssertionError("entered")

    async def after() -> None:
        async def is_given_back() -> bool:
            free = not await stage.redis.exists("aiodlock:{w}", "aiodlock:{y}")
            return free and await waiters(stage.redis) == 0

        await until(is_given_back)

    done = await stage.play(act, before=stage.hold, after=after, label="several names, in vain")
    assert done.steps >= 4


async def test_release_of_a_name_that_stays_taken_cancelled_anywhere_is_sent(
    stage: Stage, locks: LockClient
) -> None:
    """If it was got at all, the name is taken by nobody afterwards, for as long as was asked."""
    await warm(locks)
    lock = locks.lock("x", hold_at_least=20)
    got: list[Lease] = []

    async def act() -> None:
        async with lock as lease:
            got.append(lease)
            await asyncio.sleep(0)

    async def after() -> None:
        if got:
            holder = got[-1].holder
            kept = f"{holder}:0/{got[-1].fencing_token}"
            assert await stage.redis.get(KEY) == kept
            assert 15_000 < await stage.redis.pttl(KEY) <= 20_000
            await stage.redis.delete(KEY)
        got.clear()

    done = await stage.play(act, after=after, label="a name that stays taken")
    assert done.steps == 3


@pytest.mark.parametrize("holder", ["another client", "the same client"])
async def test_acquire_that_is_handed_the_lock_cancelled_anywhere_passes_it_on(
    stage: Stage, locks: LockClient, holder: str
) -> None:
    """Cancelled before, in, and after the tick in which the message, or the reply, arrives."""
    await warm(locks)
    lock = locks.lock("x")
    holding = lock if holder == "the same client" else None
    done = await stage.play(
        acquire_and_release(lock),
        before=lambda: stage.hand_over(holding),
        label=f"acquire handed over by {holder}, release",
    )
    assert done.steps >= 3


async def test_acquire_handed_over_without_a_watchdog_cancelled_anywhere_passes_it_on(
    stage: Stage, locks: LockClient
) -> None:
    """Where nothing extends the lease, one more poll confirms it."""
    await warm(locks)
    done = await stage.play(
        acquire_and_release(locks.lock("x", auto_extend=False)),
        before=stage.hand_over,
        label="acquire handed over and confirmed, release",
    )
    assert done.steps >= 4


@pytest.mark.parametrize("wait_timeout", [0, 0.05])
async def test_try_acquire_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient, wait_timeout: float
) -> None:
    """On a lock that is held: with a wait, and with one request."""
    await warm(locks)
    lock = locks.lock("x")
    gave_up: list[bool] = []

    async def act() -> None:
        assert await lock.try_acquire(wait_timeout=wait_timeout) is None
        gave_up.append(True)

    async def after() -> None:
        if gave_up:
            gave_up.clear()
            await until(lambda: _is_zero(waiters(stage.redis)))

    done = await stage.play(
        act, before=stage.hold, after=after, label=f"try_acquire, {wait_timeout} s, held"
    )
    assert done.steps >= (3 if wait_timeout else 1)


async def test_try_acquire_that_gets_it_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Free at first, and handed over later."""
    await warm(locks)
    lock = locks.lock("x")

    async def act() -> None:
        lease = await lock.try_acquire(wait_timeout=5)
        assert lease is not None
        async with lease:
            await asyncio.sleep(0)

    done = await stage.play(act, label="try_acquire, free")
    assert done.steps == 3
    done = await stage.play(act, before=stage.hand_over, label="try_acquire, handed over")
    assert done.steps >= 4


async def test_hold_and_extend_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Extended by hand, twice, and by the watchdog while the body waits for it."""
    await warm(locks)
    lock = locks.lock("x", ttl=0.3)

    async def act() -> None:
        async with lock as lease:
            await lease.extend()
            await lease.extend(1)
            await asyncio.sleep(0.15)

    done = await stage.play(act, label="hold, extend")
    assert done.steps >= 5


@pytest.mark.parametrize("extending", [False, True], ids=["at rest", "while it extends"])
async def test_release_cancelled_anywhere_is_done(
    stage: Stage, slow: LockClient, proxy: ChaosProxy, extending: bool
) -> None:
    """Case 001: the key is gone when the cancelled release returns, and a second one is quiet."""
    leases: list[Lease] = []

    async def before() -> None:
        lease = await slow.lock("x", ttl=0.3).acquire()
        leases.append(lease)
        if extending:
            await until(lambda: any("watchdog" in task.get_name() for task in asyncio.all_tasks()))

    async def act() -> None:
        await leases[-1].release()

    async def after() -> None:
        assert leases[-1].state == "released"
        assert not await leases[-1].release()

    done = await stage.play(
        act, before=before, after=after, label=f"release {'while extending' * extending}"
    )
    assert done.steps >= 1


async def test_async_with_lock_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Free, and handed over."""
    await warm(locks)
    act = use(locks.lock("x"))
    assert (await stage.play(act, label="async with lock")).steps == 3
    done = await stage.play(act, before=stage.hand_over, label="async with lock, handed over")
    assert done.steps >= 4


async def test_decorated_function_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """The lock around a call."""
    await warm(locks)

    @locks.locked("{name}")
    async def work(name: str) -> str:
        await asyncio.sleep(0)
        return name

    async def act() -> None:
        assert await work("x") == "x"

    done = await stage.play(act, label="@locked")
    assert done.steps == 3
    done = await stage.play(act, before=stage.hand_over, label="@locked, handed over")
    assert done.steps >= 4


async def test_nested_locks_cancelled_anywhere_leave_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """The inner is released by the cancel, and so is the outer."""
    await warm(locks)
    outer, inner = locks.lock("x"), locks.lock("y")

    async def act() -> None:
        async with outer, inner:
            await asyncio.sleep(0)

    done = await stage.play(act, label="two locks, nested")
    assert done.steps == 5


async def test_task_group_under_a_lock_cancelled_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """The children end first, then the lock is released."""
    await warm(locks)
    lock = locks.lock("x")
    inside: list[Lease] = []

    async def child(lease: Lease) -> None:
        inside.append(lease)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            lease.check()
        finally:
            inside.remove(lease)

    async def act() -> None:
        async with lock as lease, asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(child(lease))
            await lease.extend()

    async def after() -> None:
        assert inside == []

    done = await stage.play(act, after=after, label="lock around a TaskGroup")
    assert done.steps >= 3


async def test_locks_in_a_task_group_cancelled_anywhere_leave_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Three children want one lock, and whoever is inside or waits is cancelled by its group."""
    await warm(locks)
    lock = locks.lock("x")

    async def child() -> None:
        async with lock:
            await asyncio.sleep(0)

    async def act() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(child())
            for _ in range(10):  # Steps at which the children are in the midst of something.
                await lock.inspect()

    done = await stage.play(act, label="locks in a TaskGroup")
    assert done.steps >= 10


async def test_extend_cancelled_anywhere_leaves_the_lease_as_it_is(
    stage: Stage, slow: LockClient
) -> None:
    """By hand, with slow replies: the lease is held as before, and is released like any other."""
    leases: list[Lease] = []

    async def before() -> None:
        leases.append(await slow.lock("x", ttl=30).acquire())

    async def act() -> None:
        await leases[-1].extend(60)

    async def after() -> None:
        assert leases[-1].state == "held"
        assert leases[-1].remaining > 20
        assert await leases[-1].release() is True

    done = await stage.play(act, before=before, after=after, label="extend")
    assert done.steps >= 1


async def test_release_that_hands_over_cancelled_anywhere_has_handed_over(
    stage: Stage, slow: LockClient
) -> None:
    """The waiter of another client holds when the cancel has come out."""
    holders: list[Lease] = []
    waiting: list[asyncio.Task[Lease]] = []

    async def before() -> None:
        holders.append(await slow.lock("x", ttl=30).acquire())
        waiting.append(asyncio.create_task(stage.rival.acquire(wait_timeout=20)))
        await until(lambda: waiters(stage.redis))

    async def act() -> None:
        await holders[-1].release()

    async def after() -> None:
        assert await (await waiting[-1]).release() is True
        assert holders[-1].state == "released"

    done = await stage.play(act, before=before, after=after, label="release that hands over")
    assert done.steps >= 1


async def test_words_of_an_operator_cancelled_anywhere_leave_nothing(
    stage: Stage, slow: LockClient
) -> None:
    """To look changes nothing; to break has broken it or not, and the holder is told if so."""
    holders: list[Lease] = []

    async def before() -> None:
        holders.append(await stage.rival.acquire())

    async def act() -> None:
        assert (await slow.lock("x").inspect()).held
        await slow.lock("x").break_lock(fencing_token=holders[-1].fencing_token)

    async def after() -> None:
        await holders[-1].release()

    done = await stage.play(act, before=before, after=after, label="inspect, break_lock")
    assert done.steps == 3


async def test_wait_for_the_loss_cancelled_anywhere_changes_nothing(
    stage: Stage, locks: LockClient
) -> None:
    """Who waits for it goes; the lease stays."""
    leases: list[Lease] = []

    async def before() -> None:
        leases.append(await locks.lock("x", ttl=0.05, auto_extend=False).acquire())

    async def act() -> None:
        await leases[-1].wait_lost()

    async def after() -> None:
        await leases[-1].release()

    done = await stage.play(act, before=before, after=after, label="wait_lost")
    assert done.steps == 1


# Requests of FastAPI.


class Asking:
    """One request at a time to an app, called as its server calls it: no task between.

    Attributes:
        statuses: What was answered to each so far.
        gone: Set: the client has hung up.
    """

    def __init__(self, app: FastAPI, path: str) -> None:
        self.app = app
        self.statuses: list[int] = []
        self.gone = asyncio.Event()
        self._path = path
        self._is_read = False

    async def before(self) -> None:
        """A new client."""
        self.gone.clear()
        self._is_read = False

    async def __call__(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])
        await asyncio.sleep(0)


def app_on(locks: LockClient) -> FastAPI:
    """A route for each way in which a request holds a lock."""
    app = FastAPI()
    install(app, locks)

    @app.get("/function")
    async def function(lease: Annotated[Lease, Locked("x")]) -> str:
        await asyncio.sleep(0)
        lease.check()
        return "done"

    @app.get("/request")
    async def request(lease: Annotated[Lease, Locked("x", scope="request")]) -> str:
        await asyncio.sleep(0)
        lease.check()
        return "done"

    @app.get("/thread")
    def thread(lease: Annotated[Lease, Locked("x")]) -> str:
        time.sleep(0.005)
        lease.check()
        return "done"

    @app.get("/stream")
    async def stream(lease: Annotated[Lease, Locked("x", scope="request")]) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for number in range(3):
                lease.check()
                yield str(number)
                await asyncio.sleep(0)

        return StreamingResponse(body())

    return app


@pytest.mark.parametrize("how", ["cancelled", "hung up"])
@pytest.mark.parametrize("route", ["function", "request", "thread", "stream"])
async def test_request_that_ends_anywhere_leaves_nothing(
    stage: Stage, locks: LockClient, route: str, how: str
) -> None:
    """Its task is cancelled at each await, or its client hangs up there: the lock is free."""
    await warm(locks)
    asking = Asking(app_on(locks), f"/{route}")

    async def before_held() -> None:
        await asking.before()
        await stage.hand_over()

    for what, before in {"free": asking.before, "handed over": before_held}.items():
        done = await stage.play(
            asking,
            before=before,
            instead=asking.gone.set if how == "hung up" else None,
            label=f"FastAPI request, {route}, {how}, {what}",
        )
        assert done.steps >= 3
        assert done.runs >= done.steps
    assert set(asking.statuses) == {200}


# The client itself.


class Closing:
    """A client with somebody in each state, to be closed."""

    def __init__(self, stage: Stage, locks: LockClient) -> None:
        self.stage = stage
        self.locks = locks
        self.tasks: list[asyncio.Task[object]] = []

    async def prepare(self) -> None:
        """A waiter for what the rival holds, a body, a lease without one, an acquisition."""
        await self.locks.__aenter__()
        await self.stage.hold()
        self.lease = await self.locks.lock("lease").acquire()
        inside = asyncio.Event()

        async def body() -> None:
            async with self.locks.lock("body"):
                inside.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.01)

        self.tasks = [
            asyncio.create_task(self.locks.lock("x").acquire()),
            asyncio.create_task(body()),
        ]
        await until(lambda: waiters(self.stage.redis))
        await inside.wait()

    async def look(self) -> None:
        """Each was told, and nothing is left of them although the close was cancelled."""
        ends = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [RuntimeError, LeaseLostError]
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert [name for name in names if name.startswith("aiodlock closing")] == []
        assert self.lease.state == "released"
        assert await leftovers(self.stage.redis) == [KEY]
        with pytest.raises(RuntimeError, match="closed"):
            await self.locks.lock("x").try_acquire()


async def test_aclose_cancelled_anywhere_is_finished(stage: Stage, make_client: MakeClient) -> None:
    """Waiters and leases are gone when the cancel comes out."""
    closing = Closing(stage, make_client())
    done = await stage.play(
        closing.locks.aclose,
        before=closing.prepare,
        after=closing.look,
        label="aclose with a waiter, a body and a lease",
    )
    assert done.steps >= 1


async def test_first_acquire_ever_cancelled_anywhere_leaves_nothing(
    stage: Stage, make_client: MakeClient
) -> None:
    """Connecting, loading the scripts, subscribing are under way."""
    clients: list[LockClient] = []

    async def before() -> None:
        clients.append(make_client())

    async def act() -> None:
        async with clients[-1].lock("x"):
            await asyncio.sleep(0)

    async def after() -> None:
        await stage.end_rival()
        assert await leftovers(stage.redis) == []
        await clients[-1].aclose()

    done = await stage.play(act, before=before, after=after, label="first acquire of a client")
    assert done.steps >= 4

    async def before_held() -> None:
        await before()
        await stage.hand_over()

    done = await stage.play(
        act, before=before_held, after=after, label="first acquire of a client, handed over"
    )
    assert done.steps >= 4


async def test_whole_life_of_a_client_cancelled_anywhere_leaves_nothing(
    stage: Stage, make_client: MakeClient
) -> None:
    """`async with client`, `async with lock`: what a script does."""

    async def act() -> None:
        async with make_client() as locks, locks.lock("x"):
            await asyncio.sleep(0)

    done = await stage.play(act, label="client, lock, body")
    assert done.steps >= 5


# On a bad network.


async def test_acquire_with_slow_replies_cancelled_anywhere_leaves_nothing(
    stage: Stage, slow: LockClient
) -> None:
    """The server has done it, and the reply is on its way."""
    done = await stage.play(use(slow.lock("x")), label="async with lock, slow replies")
    assert done.steps == 3
    done = await stage.play(
        use(slow.lock("x")),
        before=stage.hand_over,
        label="async with lock, handed over, slow replies",
    )
    assert done.steps >= 3


async def test_acquire_with_slow_requests_cancelled_anywhere_leaves_nothing(
    stage: Stage, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The server has not even heard of it when the release is sent behind it."""
    async with make_client(proxy.url, request_timeout=REQUEST_TIMEOUT_S) as locks:
        await warm(locks)
        proxy.delay_requests(0.01, n=None)
        done = await stage.play(use(locks.lock("x")), label="async with lock, slow requests")
        assert done.steps == 3


@pytest.mark.parametrize("lost", ["acquire", "extend", "release"])
async def test_use_with_a_lost_reply_cancelled_anywhere_leaves_nothing(
    stage: Stage, make_client: MakeClient, proxy: ChaosProxy, lost: str
) -> None:
    """The connection breaks when the reply comes, which the server has sent."""
    async with make_client(proxy.url, request_timeout=REQUEST_TIMEOUT_S) as locks:
        await warm(locks)
        lock = locks.lock("x")

        def lose_next_reply(of: str) -> None:
            if of == lost:
                proxy.drop_replies(1, b"EVALSHA", close=True)

        async def act() -> None:
            lose_next_reply("acquire")
            async with lock as lease:
                lose_next_reply("extend")
                await lease.extend()
                lose_next_reply("release")

        async def after() -> None:
            proxy.heal()
            await warm(locks)

        done = await stage.play(
            act, after=after, label=f"acquire, extend, release; {lost}'s reply lost"
        )
        assert done.steps >= 4


async def test_acquire_in_a_black_hole_is_cancelled_within_a_second(
    stage: Stage, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Nothing answers: the caller waits for its release at most 1 s; it is undone later."""
    async with make_client(proxy.url, request_timeout=10) as locks:
        await warm(locks)
        loop = asyncio.get_running_loop()
        proxy.black_hole()
        task = asyncio.create_task(locks.lock("x").acquire())
        await asyncio.sleep(0.05)
        cancelled_at = loop.time()
        task.cancel()
        await asyncio.wait([task])
        took_s = loop.time() - cancelled_at
        assert task.cancelled()
        assert CANCELLED_S - 0.01 <= took_s <= CANCELLED_S + SLACK_S
        proxy.heal()
        await until(lambda: _nothing(stage.redis))
    await stage.assert_free()


async def test_acquire_that_cannot_connect_is_cancelled_at_once(
    stage: Stage, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Nothing was sent, so nothing is to be given up, and nobody is waited for."""
    proxy.black_hole()
    async with make_client(proxy.url, request_timeout=1) as locks:
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(locks.lock("x").acquire())
        await asyncio.sleep(0.05)
        cancelled_at = loop.time()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert loop.time() - cancelled_at < SLACK_S
    await stage.assert_free()


async def _nothing(redis: Redis) -> bool:
    return await leftovers(redis) == []


async def test_release_in_a_black_hole_is_cancelled_within_a_second(
    stage: Stage, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The same for a holder."""
    async with make_client(proxy.url, request_timeout=10) as locks:
        loop = asyncio.get_running_loop()
        lease = await locks.lock("x").acquire()
        proxy.black_hole()
        task = asyncio.create_task(lease.release())
        await asyncio.sleep(0.05)
        cancelled_at = loop.time()
        task.cancel()
        await asyncio.wait([task])
        took_s = loop.time() - cancelled_at
        assert task.cancelled()
        assert CANCELLED_S - 0.01 <= took_s <= CANCELLED_S + SLACK_S
        proxy.heal()
        await until(lambda: _nothing(stage.redis))
    await stage.assert_free()


async def test_native_cancel_in_the_clean_up_of_a_cancelled_scope_is_not_swallowed(
    stage: Stage, slow: LockClient, proxy: ChaosProxy
) -> None:
    """The scope catches its own cancel, not the one of the task, which came while we cleaned up."""
    await stage.hold()

    async def run() -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await slow.lock("x").acquire()
        went_on.append(True)

    scopes: list[anyio.CancelScope] = []
    went_on: list[bool] = []
    task = asyncio.create_task(run())
    await until(lambda: waiters(stage.redis))
    proxy.delay_replies(0.1)
    scopes[0].cancel()
    await until(lambda: _is_zero(waiters(stage.redis)))
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert went_on == []
    await stage.assert_free()


# Over a quorum: nothing is left on any node.


@pytest.fixture
async def quorum(nodes: Nodes) -> AsyncIterator[LockClient]:
    """A client on all five, through the proxies, connected to all."""
    async with nodes.open(request_timeout=REQUEST_TIMEOUT_S) as locks:
        await quorums.warm(locks)
        yield locks


async def play_on(
    nodes: Nodes,
    act: Act,
    *,
    before: Act | None = None,
    after: Act | None = None,
    label: str,
) -> Steps:
    """Cancel *act* at each of its steps; then every node is free, and no timer is left."""
    timers = strays()

    async def look() -> None:
        if after is not None:
            await after()
        await nodes.free()
        assert await settled_strays(timers) == timers

    return await cancel_at_every_step(act, look, before=before, label=f"{label}, quorum")


async def test_quorum_acquire_cancelled_anywhere_leaves_nothing(
    nodes: Nodes, quorum: LockClient
) -> None:
    """Two rounds, a body, a release."""
    done = await play_on(nodes, use(quorum.lock("n")), label="async with lock")
    assert done.steps >= 4


async def test_quorum_acquire_with_slow_nodes_cancelled_anywhere_leaves_nothing(
    nodes: Nodes, quorum: LockClient
) -> None:
    """Replies of some are on their way, requests of others."""
    nodes.proxies[0].delay_replies(0.02)
    nodes.proxies[1].delay_requests(0.02, n=None)
    nodes.proxies[2].delay_requests(0.04, n=None)
    done = await play_on(nodes, use(quorum.lock("n")), label="async with lock, slow nodes")
    assert done.steps >= 4


async def test_quorum_first_acquire_ever_cancelled_anywhere_leaves_nothing(nodes: Nodes) -> None:
    """Connecting and loading the scripts are under way, on each node by itself."""
    clients: list[LockClient] = []

    async def before() -> None:
        clients.append(LockClient.quorum(nodes.urls))

    async def after() -> None:
        await clients[-1].aclose()
        assert await nodes.left() == {}

    async def act() -> None:
        async with clients[-1].lock("n"):
            await asyncio.sleep(0)

    done = await play_on(nodes, act, before=before, after=after, label="first acquire of a client")
    assert done.steps >= 4


async def test_quorum_acquire_that_gets_a_minority_cancelled_anywhere_gives_it_back(
    nodes: Nodes, quorum: LockClient
) -> None:
    """Another stands on three of five; cancelled while trying, giving back, pausing."""
    lock = quorum.lock("n", retry=Backoff(initial=0.01, maximum=0.02))
    another = ["another", None, "another", None, "another"]

    async def before() -> None:
        await nodes.put(quorums.KEY, "another", 0, 2, 4)

    async def act() -> None:
        assert await lock.try_acquire(wait_timeout=0.06) is None

    async def after() -> None:
        async def is_given_back() -> bool:
            return await nodes.values() == another

        await until(is_given_back)
        await nodes.delete(quorums.KEY, 0, 2, 4)

    done = await play_on(nodes, act, before=before, after=after, label="acquire of a minority")
    assert done.steps >= 4


async def test_quorum_acquire_with_a_stopped_node_cancelled_anywhere_leaves_nothing(
    nodes: Nodes, quorum: LockClient
) -> None:
    """On those that run at once, and on the stopped one when it goes on, its ttl at the latest."""
    nodes.servers[3].pause()
    running = Nodes(nodes.servers[:3] + nodes.servers[4:], [])
    lock = quorum.lock("n", ttl=2)
    done = await play_on(running, use(lock), label="async with lock, a stopped node")
    assert done.steps >= 4
    for admin in running.admins:
        await admin.aclose()
    nodes.servers[3].resume()
    await nodes.free()


async def test_quorum_hold_and_extend_cancelled_anywhere_leaves_nothing(
    nodes: Nodes, quorum: LockClient
) -> None:
    """By hand, by the watchdog, and with a node that is healed by it."""
    lock = quorum.lock("n", ttl=0.3)

    async def act() -> None:
        # (redis-py's asyncio client swallows a cancel now and then.)
        with BlockingRedis.from_url(nodes.urls[1]) as admin:
            async with lock as lease:
                await lease.extend()
                admin.delete(quorums.KEY)
                await lease.extend(1)
                await asyncio.sleep(0.15)

    done = await play_on(nodes, act, label="hold, extend, heal")
    assert done.steps >= 6


@pytest.mark.parametrize("slow_s", [0.0, 0.01])
async def test_quorum_release_cancelled_anywhere_is_done(
    nodes: Nodes, quorum: LockClient, slow_s: float
) -> None:
    """A second one is quiet."""
    leases: list[Lease] = []
    if slow_s:
        for proxy in nodes.proxies:
            proxy.delay_replies(slow_s)

    async def before() -> None:
        leases.append(await quorum.lock("n").acquire(wait_timeout=5))

    async def act() -> None:
        await leases[-1].release()

    async def after() -> None:
        assert leases[-1].state == "released"
        assert not await leases[-1].release()

    done = await play_on(
        nodes, act, before=before, after=after, label=f"release, replies after {slow_s} s"
    )
    assert done.steps >= 1


async def test_quorum_aclose_cancelled_anywhere_is_finished(nodes: Nodes) -> None:
    """With a waiter, a body and a lease; their keys are gone when the cancel comes out."""
    clients: list[LockClient] = []
    tasks: list[asyncio.Task[Any]] = []
    leases: list[Lease] = []

    async def hold(entered: asyncio.Event) -> None:
        async with clients[-1].lock("body"):
            entered.set()
            await asyncio.sleep(10)

    async def before() -> None:
        clients.append(LockClient.quorum(nodes.urls))
        leases.append(await clients[-1].lock("n").acquire())
        waiting = asyncio.create_task(clients[-1].lock("n").acquire())
        entered = asyncio.Event()
        tasks[:] = [waiting, asyncio.create_task(hold(entered))]
        await entered.wait()

    async def close() -> None:
        await clients[-1].aclose()

    async def after() -> None:
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [RuntimeError, LeaseLostError]
        assert leases[-1].state == "released"
        assert await nodes.left() == {}
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert [name for name in names if name.startswith("aiodlock")] == []

    done = await play_on(nodes, close, before=before, after=after, label="aclose")
    assert done.steps >= 1


async def test_quorum_check_sees_a_caller_that_does_not_clean_up(
    nodes: Nodes, quorum: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what was granted stays on the nodes."""

    async def give_up(self: Session, acquisition: Any, terms: Any) -> None:
        self.store.forget(acquisition.token)

    monkeypatch.setattr(Session, "_give_up", give_up)
    monkeypatch.setattr(Nodes, "free", _free_at_once)
    with pytest.raises(AssertionError):
        await play_on(nodes, use(quorum.lock("n", ttl=2)), label="no clean-up")
    monkeypatch.undo()
    await nodes.free()


async def _free_at_once(nodes: Nodes) -> None:
    """As `free`, but sure of it sooner than a ttl."""
    left = await nodes.left()
    for _ in range(20):
        if not left:
            break
        await asyncio.sleep(0.02)
        left = await nodes.left()
    assert left == {}


# Negative controls: the checks above see it when the clean-up is not what it is.


async def _send_only(
    self: _cleanup.Background,
    work: Coroutine[Any, Any, object],
    what: str,
    name: str | None = None,
) -> None:
    self.start(work, what, name)


async def _do_nothing(
    self: _cleanup.Background,
    work: Coroutine[Any, Any, object],
    what: str,
    name: str | None = None,
) -> None:
    work.close()


async def _unshielded(task: asyncio.Task[Any], *, within: float) -> None:
    await asyncio.wait({task}, timeout=within)


@asynccontextmanager
async def expected_failure(stage: Stage, locks: LockClient) -> AsyncIterator[None]:
    """The block fails at a step that was cancelled; what it leaves behind is removed."""
    with pytest.raises(AssertionError) as failure:
        yield
    assert any("cancel at step" in note for note in failure.value.__notes__)
    with suppress(AssertionError):
        await stage.end_rival()
    await locks.aclose()
    await stage.redis.flushall()


@pytest.mark.parametrize("mode", Mode)
async def test_check_sees_a_caller_that_does_not_wait_for_its_clean_up(
    stage: Stage, slow: LockClient, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Without the wait the cancel comes out while the key still stands."""
    proxy.delay_requests(0.05, n=None)
    monkeypatch.setattr(_cleanup.Background, "finish", _send_only)
    async with expected_failure(stage, slow):
        await stage.play(use(slow.lock("x")), modes=(mode,), label="(control)")


@pytest.mark.parametrize("mode", Mode)
async def test_check_sees_a_caller_that_does_not_clean_up(
    stage: Stage, slow: LockClient, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Without the release the lock stands until its ttl is over."""
    monkeypatch.setattr(_cleanup.Background, "finish", _do_nothing)
    async with expected_failure(stage, slow):
        await stage.play(acquire_and_release(slow.lock("x")), modes=(mode,), label="(control)")


@pytest.mark.parametrize("mode", [Mode.TWICE, Mode.SCOPE])
async def test_check_sees_a_clean_up_without_its_shield(
    stage: Stage, slow: LockClient, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """The second cancel, or the scope's next, ends the clean-up."""
    proxy.delay_requests(0.05, n=None)
    monkeypatch.setattr(_cleanup, "outlast", _unshielded)
    async with expected_failure(stage, slow):
        await stage.play(use(slow.lock("x")), modes=(mode,), label="(control)")


# Case 007: cancelled and handed the lock in one tick.


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("first", ["cancel", "release"])
@pytest.mark.parametrize("holder", ["another client", "the same client"])
async def test_waiter_cancelled_when_it_is_handed_the_lock_passes_it_on(
    stage: Stage, locks: LockClient, holder: str, first: str, turns: int
) -> None:
    """Both orders, with some turns of the loop between; a third waiter gets it, then nobody."""
    lock = locks.lock("x")
    await stage.hold(lock if holder == "the same client" else None)
    held = stage.held
    assert held is not None
    second = asyncio.create_task(lock.acquire())
    await until(lambda: waiters(stage.redis))
    third = asyncio.create_task(stage.rival.acquire(wait_timeout=5))

    async def both_wait() -> bool:
        return await waiters(stage.redis) == 2

    await until(both_wait)
    acts: list[Callable[[], object]] = [
        second.cancel,
        lambda: releases.append(asyncio.create_task(held.release())),
    ]
    releases: list[asyncio.Task[bool]] = []
    if first == "release":
        acts.reverse()
    acts[0]()
    for _ in range(turns):
        await asyncio.sleep(0)
    acts[1]()
    await asyncio.wait([second])
    assert await releases[0]
    lease = None if second.cancelled() else second.result()
    if lease is not None:
        # It had the lock before the cancel came.
        assert (first, turns > 0) == ("release", True)
        await lease.release()
    assert await (await third).release()
    stage.held = None
    await stage.assert_free()


# What people put around an acquisition.

S: TypeAlias = float


async def wait_for(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """`asyncio.wait_for`: on 3.11 in a task of its own."""
    return await asyncio.wait_for(coro, seconds)


async def timeout(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """`asyncio.timeout`."""
    async with asyncio.timeout(seconds):
        return await coro


async def fail_after(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """`anyio.fail_after`."""
    with anyio.fail_after(seconds):
        return await coro


async def move_on_after(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """`anyio.move_on_after`, which goes on silently."""
    with anyio.move_on_after(seconds):
        return await coro
    raise TimeoutError


async def task_group(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """A sibling that fails cancels it."""

    async def fail() -> None:
        await asyncio.sleep(seconds)
        raise TimeoutError

    try:
        async with asyncio.TaskGroup() as group:
            acquiring = group.create_task(coro)
            failing = group.create_task(fail())
            lease = await acquiring
            failing.cancel()
            return lease
    except* TimeoutError:
        pass
    raise TimeoutError


async def anyio_group(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """An anyio task group that is cancelled."""
    leases: list[Lease] = []

    async def acquire() -> None:
        leases.append(await coro)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(acquire)
        await anyio.sleep(seconds)
        group.cancel_scope.cancel()
    if leases:
        return leases[0]
    raise TimeoutError


async def gather(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """`asyncio.gather`, cancelled."""
    both = asyncio.gather(coro, asyncio.sleep(0))
    asyncio.get_running_loop().call_later(seconds, both.cancel)
    try:
        lease: Lease = (await both)[0]
        return lease
    except asyncio.CancelledError:
        raise TimeoutError from None


async def task(coro: Coroutine[Any, Any, Lease], seconds: S) -> Lease:
    """A task, waited for and cancelled."""
    acquiring = asyncio.create_task(coro)
    done, _ = await asyncio.wait([acquiring], timeout=seconds)
    if done:
        return acquiring.result()
    acquiring.cancel()
    await asyncio.wait([acquiring])
    assert acquiring.cancelled()
    raise TimeoutError


BOUNDS = [wait_for, timeout, fail_after, move_on_after, task_group, anyio_group, gather, task]
bounds = pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.__name__)
Bound: TypeAlias = Callable[[Coroutine[Any, Any, Any], float], Coroutine[Any, Any, Any]]


@bounds
async def test_bound_around_an_acquire_that_waits_ends_it_and_leaves_the_queue(
    stage: Stage, locks: LockClient, bound: Bound
) -> None:
    """TimeoutError of theirs; the entry in the queue is gone by then."""
    await stage.hold()
    with pytest.raises(TimeoutError) as ended:
        await bound(locks.lock("x").acquire(), 0.05)
    assert not isinstance(ended.value, LockTimeout)
    assert await waiters(stage.redis) == 0
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    await asyncio.sleep(0)
    await stage.assert_free()


@bounds
async def test_bound_around_an_acquire_that_succeeds_gives_a_lease_for_any_task(
    stage: Stage, locks: LockClient, bound: Bound
) -> None:
    """Whichever task acquired, this one enters, extends, and releases."""
    async with await bound(locks.lock("x").acquire(), 60) as lease:
        assert await lease.extend() > 0
    assert lease.state == "released"
    await stage.assert_free()


@bounds
async def test_bound_around_a_body_ends_it_and_releases(
    stage: Stage, locks: LockClient, bound: Bound
) -> None:
    """The body can clean up under the lock; then it is released."""
    cleaned: list[bool] = []

    async def work() -> None:
        async with locks.lock("x") as lease:
            try:
                await asyncio.Event().wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await stage.redis.ping()
                lease.check()
                cleaned.append(True)

    with pytest.raises(TimeoutError):
        await bound(work(), 0.05)
    assert cleaned == [True]
    await stage.assert_free()


@pytest.mark.parametrize("count", [20])
async def test_gathered_acquires_cancelled_together_leave_the_queue(
    stage: Stage, locks: LockClient, count: int
) -> None:
    """Twenty waiters of one client, one cancel."""
    await stage.hold()
    lock = locks.lock("x")
    together = asyncio.gather(*(lock.acquire() for _ in range(count)))

    async def all_wait() -> bool:
        return await waiters(stage.redis) == count

    await until(all_wait)
    together.cancel()
    with pytest.raises(asyncio.CancelledError):
        await together
    # gather ends with the first; the others are told and still leave.
    await until(lambda: _is_zero(waiters(stage.redis)))
    await stage.assert_free()


async def test_acquire_never_started_leaves_nothing(stage: Stage, locks: LockClient) -> None:
    """A task cancelled before its first step has not acquired anything."""
    acquiring = asyncio.create_task(locks.lock("x").acquire())
    acquiring.cancel()
    await asyncio.wait([acquiring])
    assert acquiring.cancelled()
    await stage.assert_free()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_eager_tasks_cancelled_while_they_wait_leave_the_queue(
    stage: Stage, locks: LockClient
) -> None:
    """Tasks that run at their creation: holders, waiters, cancels."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - not on 3.11
    lock = locks.lock("x")
    order: list[int] = []

    async def work(number: int) -> None:
        async with lock:
            order.append(number)
            await asyncio.sleep(0)

    try:
        await asyncio.gather(*(work(number) for number in range(10)))
        assert order == list(range(10))
        await stage.hold()
        waiting = [asyncio.create_task(work(number)) for number in range(10)]

        async def all_wait() -> bool:
            return await waiters(stage.redis) == 10

        await until(all_wait)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        await stage.assert_free()
    finally:
        loop.set_task_factory(None)


# The end of the loop cancels everything at once, our own tasks too.


async def test_loop_that_ends_with_bodies_and_waiters_leaves_nothing(
    server: LockServer, redis: Redis
) -> None:
    """`asyncio.run` cancels all tasks: the reader and writer beside those who need them."""
    script = f"""
import asyncio
from redis import Redis
from aiodlock import LockClient
locks = LockClient.from_url({server.url!r}, request_timeout=10)
async def body(entered):
    async with locks.lock("x"):
        entered.set()
        await asyncio.sleep(60)
async def main():
    global tasks
    entered = asyncio.Event()
    tasks = [asyncio.create_task(body(entered))]
    await entered.wait()
    tasks += [asyncio.create_task(locks.lock("x").acquire()) for _ in range(3)]
    with Redis.from_url({server.url!r}) as look:
        while look.zcard({QUEUE!r}) < 3:
            await asyncio.sleep(0.001)
asyncio.run(main())
print([task.cancelled() for task in tasks])
"""
    began = time.monotonic()
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    took_s = time.monotonic() - began
    assert ended.stdout == "[True, True, True, True]\n", ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert "never" not in ended.stderr
    assert await leftovers(redis, ignoring_tombstones=True) == []
    assert took_s < 10  # the time of one request: none of theirs was waited for in vain
