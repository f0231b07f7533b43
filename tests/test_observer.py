"""What an observer is told: every event of every outcome, in order, with one end for each."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Lease,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    NameTakenError,
    Observer,
    ServerUnreachable,
)
from aiodlock._observer import METHODS, LockEvent
from aiodlock.testing import LockServer
from tests import leaks
from tests.conftest import MakeClient
from tests.proxy import ChaosProxy
from tests.recorder import Recorder, faults_of
from tests.simulation import users
from tests.simulation.chaos import FAULTS
from tests.simulation.one import simulate
from tests.simulation.quorum_chaos import QUORUM_FAULTS
from tests.until import forever, until

TTL_S = 0.3
KEY = "aiodlock:{x}"
FOREIGN = "somebody else"
# Nothing of this seed's world is killed: who is killed tells nobody.
DEATHS = {"kill_host"}

Open: TypeAlias = Callable[..., LockClient]


@pytest.fixture
def recorder() -> Recorder:
    """What the clients of `open_locks` are observed by."""
    return Recorder()


@pytest.fixture(params=["server", "memory", "quorum"])
async def open_locks(
    request: pytest.FixtureRequest, server: LockServer, recorder: Recorder
) -> AsyncIterator[Open]:
    """Makes clients that share their locks: the first of them is observed, others are not."""
    word = f"{random.getrandbits(64):x}"
    makes: dict[str, Open] = {
        "server": partial(LockClient.from_url, server.url),
        "memory": partial(LockClient.from_url, f"memory://{word}"),
        "quorum": partial(LockClient.quorum, [f"memory://{word}{n}" for n in range(3)]),
    }
    async with AsyncExitStack() as stack:
        clients: list[LockClient] = []

        def make(**options: Any) -> LockClient:
            observer = None if clients else recorder
            clients.append(makes[request.param](observer=observer, **options))
            stack.push_async_callback(clients[-1].aclose)
            return clients[-1]

        yield make


@pytest.fixture
def observed(make_client: MakeClient, recorder: Recorder) -> MakeClient:
    """Makes observed clients on the real server."""
    return partial(make_client, observer=recorder)


@asynccontextmanager
async def held(client: LockClient) -> AsyncIterator[Lease]:
    """Another client has the lock."""
    async with client.lock("x") as lease:
        yield lease


async def test_observer_of_a_free_lock_is_told_of_its_whole_life(
    open_locks: Open, recorder: Recorder
) -> None:
    """Who, what, since when; all events of it share a number."""
    locks = open_locks(label="us")
    async with locks.lock("x", ttl=5) as lease:
        assert recorder.told == ["waiting", "acquired"]
        assert recorder.last("acquired").left == pytest.approx(lease.remaining, abs=0.5)
    assert recorder.told == ["waiting", "acquired", "released"]
    waiting, acquired, released = (event for _, event in recorder.events)
    assert {(event.acquisition, event.name, event.kind) for _, event in recorder.events} == {
        (waiting.acquisition, "x", "lock")
    }
    holder = lease.holder
    assert [event.holder for _, event in recorder.events] == [holder] * 3
    assert (waiting.fencing_token, waiting.held, waiting.left) == (None, 0.0, 0.0)
    assert acquired.fencing_token == released.fencing_token == lease.fencing_token
    assert 0 < acquired.waited == released.waited
    assert acquired.held < released.held


async def test_observer_of_every_way_to_leave_is_told_of_one_release(
    open_locks: Open, recorder: Recorder
) -> None:
    """By hand, twice; by a block of a lease, of an acquisition, of a shared lock."""
    lock = open_locks().lock("x")
    lease = await lock.acquire()
    await lease.release()
    await lease.release()
    async with await lock.acquire():
        pass
    async with lock.acquire():
        pass
    async with lock:
        pass
    assert recorder.told == ["waiting", "acquired", "released"] * 4
    assert len(recorder.by_acquisition()) == 4


async def test_observer_of_a_release_inside_the_block_is_told_once(
    open_locks: Open, recorder: Recorder
) -> None:
    """The end of the block is no second one."""
    async with open_locks().lock("x") as lease:
        await lease.release()
    assert recorder.told == ["waiting", "acquired", "released"]


async def test_observer_of_a_waiter_is_told_when_the_lock_is_handed_over(
    open_locks: Open, recorder: Recorder
) -> None:
    """How long it waited is in the event."""
    ours, other = open_locks(), open_locks()
    async with held(other):
        waiting = asyncio.create_task(ours.lock("x").acquire())
        await until(lambda: recorder.told == ["waiting"])
        began = recorder.last("waiting")
        await asyncio.sleep(0.05)
        assert recorder.told == ["waiting"]
    lease = await waiting
    assert recorder.told == ["waiting", "acquired"]
    assert recorder.last("acquired").acquisition == began.acquisition
    assert recorder.last("acquired").waited >= 0.045
    await lease.release()


async def test_observer_of_who_did_not_get_it_in_time_is_told_of_a_timeout(
    open_locks: Open, recorder: Recorder
) -> None:
    """By `acquire`, by `try_acquire`; with its error."""
    ours, other = open_locks(), open_locks()
    async with held(other):
        with pytest.raises(LockTimeout) as error:
            await ours.lock("x").acquire(wait_timeout=0.05)
        assert recorder.last("not_acquired").error is error.value
        assert recorder.last("not_acquired").waited >= 0.045
        assert await ours.lock("x").try_acquire() is None
    assert recorder.told == ["waiting", "not_acquired"] * 2
    assert [e.outcome for what, e in recorder.events if what == "not_acquired"] == ["timeout"] * 2


async def test_observer_of_a_cancelled_waiter_is_told_so(
    open_locks: Open, recorder: Recorder
) -> None:
    """Before its clean-up is over, even."""
    ours, other = open_locks(), open_locks()
    async with held(other):
        waiting = asyncio.create_task(ours.lock("x").acquire())
        await until(lambda: recorder.told == ["waiting"])
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert recorder.told == ["waiting", "not_acquired"]
    assert recorder.last("not_acquired").outcome == "cancelled"


async def test_observer_of_a_waiter_whose_client_closes_is_told_so(
    open_locks: Open, recorder: Recorder
) -> None:
    """A deployment is no trouble."""
    ours, other = open_locks(), open_locks()
    async with held(other):
        waiting = asyncio.create_task(ours.lock("x").acquire())
        await until(lambda: recorder.told == ["waiting"])
        await asyncio.sleep(0.02)
        await ours.aclose()
        with pytest.raises(RuntimeError):
            await waiting
    assert recorder.told == ["waiting", "not_acquired"]
    assert recorder.last("not_acquired").outcome == "closed"


async def test_observer_of_a_closing_client_is_told_of_releases_and_losses(
    open_locks: Open, recorder: Recorder
) -> None:
    """A lease without a block is released; one with a body is lost, though extended still."""
    locks = open_locks()
    lease = await locks.lock("loose").acquire()
    entered = asyncio.Event()

    async def body() -> None:
        async with locks.lock("x"):
            entered.set()
            await forever()

    working = asyncio.create_task(body())
    await entered.wait()
    await locks.aclose()
    with pytest.raises(LeaseLostError):
        await working
    ends = {event.name: what for what, event in recorder.events}
    assert ends == {"loose": "released", "x": "lost"}
    assert recorder.last("lost").reason is LostReason.CLOSED
    assert [faults_of(told) for told in recorder.by_acquisition().values()] == [[], []]
    assert lease.state == "released"


async def test_observer_of_a_body_that_takes_its_time_to_leave_is_told_of_nothing_after_its_loss(
    open_locks: Open, recorder: Recorder
) -> None:
    """Though a closing client extends its lease until then."""
    locks = open_locks()
    lease = await locks.lock("x", ttl=TTL_S).acquire()

    async def body() -> None:
        async with lease:
            try:
                await forever()
            finally:
                deadline = lease.deadline
                await until(lambda: lease.deadline > deadline)

    working = asyncio.create_task(body())
    await asyncio.sleep(0)
    await locks.aclose()
    with pytest.raises(LeaseLostError):
        await working
    assert recorder.told[-1] == "lost"
    assert faults(recorder) == {}


def test_observer_of_a_loop_that_was_closed_is_told_of_nothing_more(recorder: Recorder) -> None:
    """Neither by what is destroyed with the loop, nor by the next loop's own work."""
    locks = LockClient.from_url("memory://", observer=recorder)

    async def work() -> None:
        async with locks:
            lease = await locks.lock("y").acquire()
            await lease.release()

    loop = asyncio.new_event_loop()
    lease = loop.run_until_complete(locks.lock("x").acquire())
    waiting = locks.lock("x").acquire()
    loop.call_soon(waiting.send, None)  # As far as its first request.
    loop.run_until_complete(asyncio.sleep(0))
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
    waiting.close()
    asyncio.run(work())
    assert lease.state == "lost"
    assert [(what, event.name) for what, event in recorder.events] == [
        ("waiting", "x"),
        ("acquired", "x"),
        ("waiting", "x"),
        ("waiting", "y"),
        ("acquired", "y"),
        ("released", "y"),
    ]


async def test_observer_in_a_forked_child_is_told_of_nothing(
    observed: MakeClient, recorder: Recorder
) -> None:
    """It may be in the middle of something, with a lock that nobody in the child will open."""
    locks = observed()
    async with locks.lock("x") as lease:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: of forks beside threads.
            pid = os.fork()
        if not pid:
            os.write(writing, f"{lease.state} {recorder.told}".encode())
            os._exit(0)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it says one line
        os.close(writing)
        with open(reading) as told:  # noqa: ASYNC230, PTH123
            assert told.read() == "lost ['waiting', 'acquired']"
    assert recorder.told == ["waiting", "acquired", "released"]


async def test_observer_of_an_extension_is_told_how_long_it_lasts(
    open_locks: Open, recorder: Recorder
) -> None:
    """By hand; by the watchdog."""
    async with open_locks().lock("x", ttl=TTL_S) as lease:
        await lease.extend(20)
        assert recorder.told == ["waiting", "acquired", "extended"]
        assert recorder.last("extended").left > 15
    async with open_locks().lock("y", ttl=TTL_S):
        pass
    assert recorder.told == ["waiting", "acquired", "extended", "released"]


async def test_observer_of_a_watchdog_is_told_of_each_extension(
    open_locks: Open, recorder: Recorder
) -> None:
    """As often as it extends."""
    async with open_locks().lock("x", ttl=TTL_S):
        await until(lambda: recorder.told.count("extended") == 2)
    assert recorder.told == ["waiting", "acquired", "extended", "extended", "released"]


async def test_observer_of_a_broken_lock_is_told_that_it_was_deleted(
    open_locks: Open, recorder: Recorder
) -> None:
    """By the extension that finds it."""
    ours, other = open_locks(), open_locks()
    with pytest.raises(LeaseLostError):
        async with ours.lock("x", ttl=5) as lease:
            assert await other.lock("x").break_lock() is True
            with contextlib.suppress(LeaseLostError):
                await lease.extend()
    assert recorder.told == ["waiting", "acquired", "lost"]
    assert recorder.last("lost").reason is LostReason.DELETED


@pytest.mark.parametrize("is_stolen", [False, True])
async def test_observer_of_a_loss_that_the_release_finds_is_told_of_it(
    open_locks: Open, recorder: Recorder, is_stolen: bool
) -> None:
    """What raises `LeaseLostError` at the end of a block is no release."""
    ours, other = open_locks(), open_locks()
    taken: Lease | None = None
    with pytest.raises(LeaseLostError) as error:
        async with ours.lock("x", ttl=5):
            await other.lock("x").break_lock()
            if is_stolen:
                taken = await other.lock("x").acquire()
    assert recorder.told == ["waiting", "acquired", "lost"]
    assert recorder.last("lost").reason is error.value.reason
    expected = LostReason.STOLEN if is_stolen else LostReason.DELETED
    assert error.value.reason is expected
    if taken is not None:
        await taken.release()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ttl": 0.1, "auto_extend": False}, LostReason.EXPIRED),
        ({"ttl": 0.1, "max_hold": 0.15}, LostReason.MAX_HOLD),
    ],
)
async def test_observer_of_a_lease_whose_time_is_over_is_told_why(
    open_locks: Open, recorder: Recorder, options: dict[str, Any], reason: LostReason
) -> None:
    """By its timer, before its holder does anything."""
    lease = await open_locks().lock("x", **options).acquire()
    await until(lambda: "lost" in recorder.told)
    assert recorder.last("lost").reason is reason
    assert recorder.last("lost").held == pytest.approx(0.12, abs=0.5)
    await lease.release()
    assert [faults_of(told) for told in recorder.by_acquisition().values()] == [[]]


async def test_observer_of_a_loop_that_stood_still_is_told_so(
    open_locks: Open, recorder: Recorder
) -> None:
    """The task that blocked is the one that is told."""
    with pytest.raises(LeaseLostError):
        async with open_locks().lock("x", ttl=0.1):
            time.sleep(0.3)  # noqa: ASYNC251 - that is the point
    assert recorder.told == ["waiting", "acquired", "lost"]
    assert recorder.last("lost").reason is LostReason.LOOP_STALLED


async def test_observer_of_a_lease_at_risk_is_told_when_it_recovers(
    observed: MakeClient, recorder: Recorder, proxy: ChaosProxy
) -> None:
    """Once at risk, once extended; no more."""
    async with observed(proxy.url).lock("x", ttl=1):
        proxy.black_hole()
        await until(lambda: "at_risk" in recorder.told)
        assert 0 < recorder.last("at_risk").left < 1
        proxy.heal()
        await until(lambda: "extended" in recorder.told)
    told = recorder.told
    assert told[:4] == ["waiting", "acquired", "at_risk", "extended"]
    assert told.count("at_risk") == 1
    assert faults_of(told) == []


async def test_observer_of_a_lease_without_a_server_is_told_of_the_risk_then_of_the_loss(
    observed: MakeClient, recorder: Recorder, proxy: ChaosProxy
) -> None:
    """In time."""
    with pytest.raises(LeaseLostError):
        async with observed(proxy.url, request_timeout=0.2).lock("x", ttl=TTL_S):
            proxy.black_hole()
            await forever()
    assert recorder.told == ["waiting", "acquired", "at_risk", "lost"]
    assert recorder.last("lost").reason is LostReason.UNREACHABLE


async def test_observer_of_a_release_without_an_answer_is_told_of_a_release(
    observed: MakeClient, recorder: Recorder, proxy: ChaosProxy
) -> None:
    """Its holder gave it up at once, and that is how long it was held."""
    lease = await observed(proxy.url, request_timeout=0.2).lock("x", ttl=5).acquire()
    proxy.black_hole()
    with pytest.raises(ServerUnreachable):
        await lease.release()
    assert recorder.told == ["waiting", "acquired", "released"]
    assert recorder.last("released").held < 0.2


async def test_observer_of_a_cancelled_release_is_told_of_one_release(
    observed: MakeClient, recorder: Recorder, proxy: ChaosProxy
) -> None:
    """It goes on in the background; that is no second one."""
    lease = await observed(proxy.url).lock("x", ttl=5).acquire()
    proxy.delay_replies(0.05)
    releasing = asyncio.create_task(lease.release())
    await asyncio.sleep(0.01)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert recorder.told == ["waiting", "acquired", "released"]


async def test_observer_of_an_unreachable_server_is_told_so(
    observed: MakeClient, recorder: Recorder, proxy: ChaosProxy
) -> None:
    """With the error, whose cause says more."""
    proxy.black_hole()
    with pytest.raises(ServerUnreachable) as error:
        await observed(proxy.url, request_timeout=0.1).lock("x").acquire(wait_timeout=0.2)
    assert recorder.told == ["waiting", "not_acquired"]
    told = recorder.last("not_acquired")
    assert (told.outcome, told.error) == ("unreachable", error.value)


async def test_observer_of_a_key_that_is_no_lock_is_told_of_an_error(
    observed: MakeClient, recorder: Recorder, redis: Redis
) -> None:
    """Nobody need wait for that."""
    assert await redis.rpush(KEY, "not a lock") == 1
    with pytest.raises(NameTakenError):
        await observed().lock("x").acquire()
    assert recorder.told == ["waiting", "not_acquired"]
    assert recorder.last("not_acquired").outcome == "error"


async def test_observer_of_a_foreign_value_is_told_that_it_was_stolen(
    observed: MakeClient, recorder: Recorder, redis: Redis
) -> None:
    """By the watchdog."""
    with pytest.raises(LeaseLostError):
        async with observed().lock("x", ttl=TTL_S):
            await redis.set(KEY, FOREIGN, px=60_000)
            await forever()
    assert recorder.told == ["waiting", "acquired", "lost"]
    assert recorder.last("lost").reason is LostReason.STOLEN


async def test_observer_of_a_lease_thrown_away_is_told_that_nothing_extends_it(
    open_locks: Open, recorder: Recorder
) -> None:
    """In the loop, a turn later."""
    leases = [await open_locks().lock("x", ttl=5).acquire()]
    with pytest.warns(ResourceWarning):
        leases.clear()
    assert recorder.told == ["waiting", "acquired"]
    await until(lambda: "lost" in recorder.told)
    assert recorder.last("lost").reason is LostReason.EXPIRED


async def test_observer_of_a_coroutine_thrown_away_is_told_in_the_next_turn(
    open_locks: Open, recorder: Recorder
) -> None:
    """The garbage collector may run inside of the observer, which must not be entered again."""
    ours, other = open_locks(), open_locks()
    async with held(other):
        acquiring = ours.lock("x").acquire()
        acquiring.send(None)  # As far as its first request.
        assert recorder.told == ["waiting"]
        acquiring.close()
        assert recorder.told == ["waiting"]
        await until(lambda: recorder.told == ["waiting", "not_acquired"])
        assert recorder.last("not_acquired").outcome == "cancelled"


async def test_observer_of_a_body_thrown_away_is_told_of_its_release(
    open_locks: Open, recorder: Recorder
) -> None:
    """The loop goes on, so the release is sent."""
    locks = open_locks()
    entered: list[bool] = []

    async def body() -> None:
        async with locks.lock("x"):
            entered.append(True)
            await asyncio.get_running_loop().create_future()

    with leaks.loop_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # The lease may be collected first.
        asyncio.create_task(body())  # noqa: RUF006 - that is the point
        await until(lambda: entered)
        gc.collect()
        await until(lambda: "released" in recorder.told)
    assert recorder.told == ["waiting", "acquired", "released"]


async def test_observer_of_a_reentrant_lock_is_told_of_one_acquisition(
    open_locks: Open, recorder: Recorder
) -> None:
    """Entering again is none."""
    lock = open_locks().lock("x", reentrant=True)
    async with lock:
        async with lock:
            assert recorder.told == ["waiting", "acquired"]
        assert recorder.told == ["waiting", "acquired"]
    assert recorder.told == ["waiting", "acquired", "released"]


async def test_observer_of_several_names_is_told_of_each(
    open_locks: Open, recorder: Recorder
) -> None:
    """Also where the second is not got, and the first given back."""
    ours, other = open_locks(), open_locks()
    async with ours.all("w", "x"):
        pass
    assert sorted(recorder.told) == ["acquired"] * 2 + ["released"] * 2 + ["waiting"] * 2
    recorder.events.clear()
    async with held(other):
        with pytest.raises(LockTimeout):
            async with ours.all("w", "x", wait_timeout=0.05):
                pass
        await until(lambda: "released" in recorder.told)
    assert [(what, event.name) for what, event in recorder.events] == [
        ("waiting", "w"),
        ("acquired", "w"),
        ("waiting", "x"),
        ("not_acquired", "x"),
        ("released", "w"),
    ]


async def test_observer_of_an_election_is_told_of_its_term(
    open_locks: Open, recorder: Recorder
) -> None:
    """The number of the term is the fencing token."""
    async with open_locks().election("x") as term:
        assert recorder.last("acquired").fencing_token == term.number
    assert recorder.told == ["waiting", "acquired", "released"]


@pytest.mark.parametrize("kind", ["reader", "writer", "semaphore"])
async def test_observer_of_a_lock_that_several_may_hold_is_told_of_each_holder(
    make_client: MakeClient, recorder: Recorder, kind: str
) -> None:
    """And of what kind the lock is; a waiter is told as ever."""
    options = {"permits": 1} if kind == "semaphore" else {}
    lock = getattr(make_client(observer=recorder), kind)("x", **options)
    async with lock as lease:
        assert recorder.last("acquired").holder == lease.holder
        other = await lock.try_acquire()
        assert (other is not None) == (kind == "reader")
        if other is not None:
            await other.release()
    second = ["acquired", "released"] if kind == "reader" else ["not_acquired"]
    assert recorder.told == ["waiting", "acquired", "waiting", *second, "released"]
    assert {event.kind for _, event in recorder.events} == {kind}
    assert faults(recorder) == {}


async def test_observer_of_a_quorum_without_fencing_is_told_of_no_fencing_token(
    recorder: Recorder,
) -> None:
    """There is none."""
    urls = [f"memory://unfenced{n}" for n in range(3)]
    async with (
        LockClient.quorum(urls, fencing=False, observer=recorder) as locks,
        locks.lock("x"),
    ):
        assert recorder.last("acquired").fencing_token is None


# An observer that fails.


class Failing(Recorder):
    """Raises in every method, once it has written it down."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self._fail, found) if name in METHODS else found

    def _fail(self, note: Callable[[LockEvent], None], event: LockEvent) -> None:
        note(event)
        raise asyncio.CancelledError if event.name == "cancelled" else ZeroDivisionError


@pytest.mark.parametrize("name", ["x", "cancelled"])
async def test_observer_that_raises_breaks_no_lock_and_is_logged_once_for_each_method(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whatever it raises; each method has its own record, with the bound in its text."""
    failing = Failing()
    locks = make_client(observer=failing)
    for _ in range(3):
        async with locks.lock(name, ttl=5) as lease:
            await lease.extend()
            assert await locks.lock(name).try_acquire() is None
    with pytest.raises(LeaseLostError):
        async with locks.lock(name, ttl=5):
            await locks.lock(name).break_lock()
    records = [record for record in caplog.records if "observer" in record.message]
    assert sorted(str(next(iter(record.args or ()))) for record in records) == sorted(
        ["waiting", "acquired", "extended", "not_acquired", "released", "lost"]
    )
    assert {record.levelno for record in records} == {logging.ERROR}
    assert all("once for each method and client" in record.message for record in records)
    assert all(record.exc_info for record in records)
    assert all(faults_of(told) == [] for told in failing.by_acquisition().values())


async def test_observer_that_raises_keeps_no_watchdog_from_its_work(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """At risk, extended: the lease outlives both."""
    failing = Failing()
    async with make_client(proxy.url, observer=failing).lock("x", ttl=1) as lease:
        proxy.black_hole()
        await until(lambda: "at_risk" in failing.told)
        proxy.heal()
        await until(lambda: failing.told.count("extended") >= 2)
        assert lease.is_held


@pytest.mark.parametrize("observer", [1, Recorder, object()])
def test_client_with_an_observer_that_is_none_is_refused(observer: object) -> None:
    """The message says what is allowed."""
    makes: list[Callable[..., LockClient]] = [
        partial(LockClient, Redis()),
        partial(LockClient.from_url, "redis://"),
        partial(LockClient.quorum, [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]),
    ]
    for make in makes:
        with pytest.raises(TypeError, match=r"observer must be an aiodlock\.Observer or None"):
            make(observer=observer)


def test_client_with_an_observer_that_must_be_awaited_is_refused() -> None:
    """Nobody would await it."""

    class Async(Observer):
        async def lost(self, event: LockEvent) -> None:  # type: ignore[override]
            """It would never begin."""

    with pytest.raises(TypeError, match=r"lost\(\) is async"):
        LockClient.from_url("redis://", observer=Async())


# Whatever happens.


async def test_observer_of_random_work_is_told_of_one_end_for_each_beginning(
    open_locks: Open, recorder: Recorder
) -> None:
    """Waiters that give up, are cancelled, lose their lease, leave it lying; then a close."""
    ours, other = open_locks(ttl=0.2), open_locks(ttl=0.2)
    chance = random.Random(8)

    async def work(locks: LockClient) -> None:
        for _ in range(12):
            lock = locks.lock(chance.choice("ab"), auto_extend=chance.random() < 0.5)
            with contextlib.suppress(LockTimeout, LeaseLostError, TimeoutError, RuntimeError):
                async with asyncio.timeout(chance.choice((0.01, 0.1, 5))):
                    wait_timeout = chance.choice((0, 0.05, 5))
                    async with lock.acquire(wait_timeout=wait_timeout) as lease:
                        await asyncio.sleep(chance.random() * 0.02)
                        if chance.random() < 0.2:
                            await lock.break_lock()
                        elif chance.random() < 0.2:
                            await lease.extend()

    working = [asyncio.create_task(work(locks)) for locks in (ours, ours, ours, other)]
    _, late = await asyncio.wait(working, timeout=2.0)
    await ours.aclose()
    for task in late:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    await until(lambda: faults(recorder) == {})
    assert {"acquired", "not_acquired", "released"} <= set(recorder.told)


def faults(recorder: Recorder, *, may_be_unended: bool = False) -> dict[int, list[str]]:
    """What is wrong, by acquisition."""
    return {
        number: found
        for number, told in recorder.by_acquisition().items()
        if (found := faults_of(told, may_be_unended=may_be_unended))
    }


@pytest.mark.parametrize("is_quorum", [False, True])
def test_observer_of_clients_under_any_chaos_is_told_of_one_end_for_each_beginning(
    monkeypatch: pytest.MonkeyPatch, is_quorum: bool
) -> None:
    """On a virtual clock, seed by seed, with every fault but the death of a process."""
    told: set[str] = set()
    for seed in range(20):
        recorder = Recorder()
        monkeypatch.setattr(users, "OBSERVER", recorder)
        survived = (QUORUM_FAULTS if is_quorum else FAULTS).keys() - DEATHS
        simulate(
            seed,
            is_quorum=is_quorum,
            faults=random.Random(seed).sample(sorted(survived), 4),
        )
        assert faults(recorder) == {}, f"seed {seed}"
        told |= set(recorder.told)
    assert told == set(METHODS)
