"""Several names at once: all or none, in one order, lost together, each released by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis

from aiodlock import (
    AllLeases,
    Backoff,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    NameTakenError,
)
from aiodlock.cli._history import out_of_order, overlaps
from aiodlock.testing import LockServer, lock_server
from tests.conftest import MakeClient
from tests.crowd import Crowd, Order
from tests.holders import watchdogs
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until

# What a busy machine may add to a bound.
SLACK_S = 0.5


def key(name: str) -> str:
    """The key of a name that needs no escapes."""
    return f"aiodlock:{{{name}}}"


async def is_clean(redis: Redis) -> bool:
    """Whether nobody holds or waits."""
    return await leftovers(redis, ignoring_tombstones=True) == []


async def waits_for(redis: Redis, name: str) -> bool:
    """Whether somebody waits for it."""
    return bool(await redis.zcard(f"{key(name)}:queue"))


# Acquiring.


async def test_names_are_acquired_once_each_in_the_order_of_their_bytes(
    locks: LockClient, redis: Redis
) -> None:
    """However they were given; the order is one that any program can follow."""
    names = ["b", "a", "ä", "Z", "a", "\U0001f512", "\uffff", "{x}"]
    all_locks = locks.all(*names)
    assert all_locks.names == ("Z", "a", "b", "{x}", "ä", "\uffff", "\U0001f512")
    async with all_locks as leases:
        assert tuple(leases) == all_locks.names
        tokens = list(leases.fencing_tokens.values())
        assert tokens == sorted(tokens)
        assert leases["a"].fencing_token == leases.fencing_tokens["a"]
        assert leases.is_held
        leases.check(min_left=1)
        assert await redis.exists(key("a"), key("b"), key("Z"), key("ä")) == 4
    assert not leases.is_held
    assert await leftovers(redis) == []


async def test_two_who_name_the_same_in_other_orders_never_wait_for_each_other(
    make_client: MakeClient, redis: Redis
) -> None:
    """Of one client and of another, round after round."""
    clients, inside, done = [make_client(), make_client()], 0, 0

    async def work(locks: LockClient, *names: str) -> None:
        nonlocal inside, done
        for _ in range(20):
            async with locks.all(*names):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1
                done += 1

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for locks in clients:
            group.create_task(work(locks, "x", "y", "z"))
            group.create_task(work(locks, "z", "y", "x"))
    assert done == 80
    assert await leftovers(redis) == []


async def test_one_that_is_not_got_in_time_leaves_none(
    make_client: MakeClient, locks: LockClient, redis: Redis
) -> None:
    """The error names it; the budget is one for all of them."""
    async with make_client().lock("b"), make_client().lock("d"):
        started = time.monotonic()
        with pytest.raises(LockTimeout) as timeout:
            async with locks.all("d", "c", "b", "a", wait_timeout=0.3):
                pytest.fail("entered")
        assert timeout.value.name == "b"
        assert 0.3 <= time.monotonic() - started < 0.3 + SLACK_S
        await until(lambda: are_free(redis, "a", "c"))
        assert not await waits_for(redis, "b")
    await until(lambda: is_clean(redis))


async def are_free(redis: Redis, *names: str) -> bool:
    """Whether nobody holds them."""
    return not await redis.exists(*map(key, names))


async def test_budget_that_one_name_used_up_is_not_given_to_the_next(
    make_client: MakeClient, locks: LockClient, redis: Redis
) -> None:
    """The wait for the first is paid for by the second; it is asked once more, at the end."""
    first = await make_client().lock("a").acquire()
    async with make_client().lock("b"):
        asyncio.get_running_loop().call_later(
            1.0, lambda: releasing.append(asyncio.create_task(first.release()))
        )
        releasing: list[asyncio.Task[bool]] = []
        started = time.monotonic()
        with pytest.raises(LockTimeout) as timeout:
            async with locks.all("a", "b", wait_timeout=1.2):
                pytest.fail("entered")
        assert timeout.value.name == "b"
        assert time.monotonic() - started < 1.2 + SLACK_S
        assert await releasing[0] is True
    await until(lambda: is_clean(redis))


async def test_single_try_sends_one_request_for_each_and_queues_nowhere(
    make_client: MakeClient, locks: LockClient, redis: Redis
) -> None:
    """`wait_timeout=0`: what is free is given back at once."""
    async with make_client().lock("b"):
        with pytest.raises(LockTimeout):
            async with locks.all("a", "b", "c", wait_timeout=0):
                pytest.fail("entered")
        assert not await waits_for(redis, "b")
        await until(lambda: are_free(redis, "a", "c"))
    async with locks.all("a", "b", "c", wait_timeout=0) as leases:
        assert len(leases) == 3


async def test_key_that_is_no_lock_leaves_none(locks: LockClient, redis: Redis) -> None:
    """The error of the one name comes out; the others are free."""
    await redis.rpush(key("b"), "not a lock")
    with pytest.raises(NameTakenError) as taken:
        async with locks.all("a", "b", "c"):
            pytest.fail("entered")
    assert taken.value.name == "b"
    await until(lambda: are_free(redis, "a", "c"))


async def test_name_that_the_task_holds_already_is_refused(locks: LockClient, redis: Redis) -> None:
    """It would wait for itself for ever; nothing is held by then."""
    async with locks.lock("b"):
        with pytest.raises(RuntimeError, match="holds the lock 'b' already"):
            async with locks.all("a", "b"):
                pytest.fail("entered")
        await until(lambda: are_free(redis, "a"))
    async with locks.all("a", "b"):
        with pytest.raises(RuntimeError, match="holds the lock 'a' already"):
            await locks.lock("a").acquire()


async def test_locks_shared_by_tasks_are_entered_by_each_in_turn(
    locks: LockClient, redis: Redis
) -> None:
    """As a lock is: each entry is its own; and a fixture may end in another task."""
    pair = locks.all("a", "b")

    async def work() -> dict[str, int]:
        async with pair as leases:
            await asyncio.sleep(0)
            return leases.fencing_tokens

    tokens = await asyncio.gather(*(work() for _ in range(4)))
    assert len({token["a"] for token in tokens}) == 4

    async def fixture() -> AsyncGenerator[AllLeases]:
        async with pair as leases:
            yield leases

    held = fixture()
    leases = await asyncio.create_task(held.__anext__())
    assert leases.is_held
    with pytest.raises(StopAsyncIteration):
        await asyncio.create_task(held.__anext__())
    assert await leftovers(redis) == []


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda locks: locks.all(), ValueError, "at least one name"),
        (lambda locks: locks.all(["a", "b"]), TypeError, "non-empty str"),
        (lambda locks: locks.all("a", 1), TypeError, "non-empty str"),
        (lambda locks: locks.all("a", ""), ValueError, "non-empty str"),
        (lambda locks: locks.all("a", "b" * 513), ValueError, "512"),
        (lambda locks: locks.all("a", wait_timeout=-1), ValueError, "wait_timeout"),
        (lambda locks: locks.all("a", ttl=0), ValueError, "ttl"),
        (lambda locks: locks.all("a", on_lost="shout"), ValueError, "on_lost"),
        (lambda locks: locks.all("a", retry=1), TypeError, "retry"),
        (lambda locks: locks.all("a", ttl=2, max_hold=1), ValueError, "max_hold"),
    ],
)
def test_argument_that_is_not_allowed_is_refused_at_construction(
    locks: LockClient,
    make: Callable[[Any], object],
    error: type[Exception],
    said: str,
) -> None:
    """With a message that says what is."""
    with pytest.raises(error, match=said):
        make(locks)


async def test_names_that_are_polled_for_are_got(make_client: MakeClient, redis: Redis) -> None:
    """The other options are those of each lock."""
    locks = make_client()
    other = await make_client().lock("b").acquire()
    retry = Backoff(initial=0.01, maximum=0.02)
    waiting = asyncio.create_task(enter(locks, retry=retry, ttl=7, max_hold=9))
    await until(lambda: waits_for(redis, "b"))
    await other.release()
    assert await waiting == [7.0, 7.0]


async def enter(locks: LockClient, **options: Any) -> list[float]:
    """The ttls that the leases have."""
    async with locks.all("a", "b", **options) as leases:
        return [lease.ttl for lease in leases.values()]


# Losing one.


async def test_lost_lease_cancels_the_body_once_and_releases_the_others(
    locks: LockClient, redis: Redis
) -> None:
    """The error names the lost one."""
    cancels = 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.all("a", "b", "c", ttl=0.3) as leases:
            watching = asyncio.create_task(leases.wait_lost())
            await redis.delete(key("b"))
            try:
                await forever()
            except asyncio.CancelledError:
                cancels += 1
                await asyncio.sleep(0.002)
                assert not leases.is_held
                with pytest.raises(LeaseLostError, match="'b'"):
                    leases.check()
                assert leases["a"].is_held
                raise
    assert (lost.value.name, lost.value.reason) == ("b", LostReason.DELETED)
    assert cancels == 1
    assert await watching is LostReason.DELETED
    assert_not_cancelled()
    assert await leftovers(redis) == []
    assert watchdogs() == []


def assert_not_cancelled() -> None:
    """Nothing of ours is left in this task."""
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_all_lost_at_once_cancel_the_body_once(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A silent server: the first in order is named, the others stand in its notes."""
    locks = make_client(proxy.url, request_timeout=0.2)
    cancels = 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.all("a", "b", "c", ttl=0.3):
            proxy.black_hole()
            try:
                await forever()
            except asyncio.CancelledError:
                cancels += 1
                await asyncio.sleep(0.1)
                raise
    assert (lost.value.name, lost.value.reason) == ("a", LostReason.UNREACHABLE)
    notes = lost.value.__notes__
    assert ["'b'" in note or "'c'" in note for note in notes] == [True, True], notes
    assert cancels == 1
    assert_not_cancelled()


async def test_lease_lost_while_the_next_is_waited_for_ends_the_wait(
    make_client: MakeClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever `on_lost` is: there is no body yet that could go on without it."""
    locks = make_client()
    for on_lost in ("cancel", "raise"):
        async with make_client().lock("b"):
            waiting = asyncio.create_task(enter(locks, ttl=0.3, on_lost=on_lost))
            await until(lambda: waits_for(redis, "b"))
            await redis.delete(key("a"))
            with pytest.raises(LeaseLostError) as lost:
                await asyncio.wait_for(waiting, 5)
            assert (lost.value.name, lost.value.reason) == ("a", LostReason.DELETED)
            assert waiting.cancelling() == 0
            await until(lambda: not_waited_for(redis, "b"))
        await until(lambda: is_clean(redis))


async def not_waited_for(redis: Redis, name: str) -> bool:
    """Whether nobody waits for it."""
    return not await waits_for(redis, name)


async def test_body_that_is_not_to_be_cancelled_runs_to_its_end(
    locks: LockClient, redis: Redis
) -> None:
    """`on_lost="raise"`: it may ask; the error comes at the end."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.all("a", "b", ttl=0.3, on_lost="raise") as leases:
            await redis.delete(key("a"))
            await until(lambda: leases["a"].state == "lost")
            await asyncio.sleep(0.01)
            assert leases["b"].is_held
    assert lost.value.name == "a"
    assert await leftovers(redis) == []


async def test_loss_that_a_call_of_the_body_finds_is_raised_there(
    locks: LockClient, redis: Redis
) -> None:
    """`extend` of all; the body is not cancelled as well."""
    with pytest.raises(LeaseLostError) as at_the_end:
        async with locks.all("a", "b") as leases:
            assert 39 < await leases.extend(40) <= 40
            assert await redis.pttl(key("a")) > 39_000 < await redis.pttl(key("b"))
            await redis.delete(key("b"))
            with pytest.raises(LeaseLostError) as at_the_call:
                await leases.extend()
            await asyncio.sleep(0.01)
    assert at_the_call.value.name == at_the_end.value.name == "b"
    assert await leftovers(redis) == []


async def test_too_little_time_names_the_lease_that_has_it(locks: LockClient) -> None:
    """And none is lost by that."""
    async with locks.all("a", "b", ttl=5) as leases:
        await leases["a"].extend(60)
        with pytest.raises(LeaseLostError) as short:
            leases.check(min_left=10)
        assert (short.value.name, short.value.reason) == ("b", LostReason.TOO_LITTLE_TIME)
        assert leases.is_held


async def test_body_that_fails_keeps_its_error_with_a_note_of_the_loss(
    locks: LockClient, redis: Redis
) -> None:
    """As with one lease."""
    with pytest.raises(ValueError, match="own") as raised:
        async with locks.all("a", "b") as leases:
            await redis.delete(key("b"))
            with pytest.raises(LeaseLostError):
                await leases.extend()
            raise ValueError("the body's own")
    assert any("'b'" in note for note in raised.value.__notes__)
    assert await leftovers(redis) == []


async def test_one_released_by_hand_is_not_lost(locks: LockClient, redis: Redis) -> None:
    """Each is released by itself: earlier than the block, too."""
    async with locks.all("a", "b") as leases:
        watching = asyncio.create_task(leases.wait_lost())
        await asyncio.sleep(0)
        assert await leases["a"].release() is True
        assert await watching is None
        assert not leases.is_held
        assert leases["b"].is_held
        with pytest.raises(RuntimeError, match="'a' was released"):
            leases.check()
    assert await leftovers(redis) == []


# Ends of other kinds.


@pytest.mark.parametrize("how", ["native", "anyio"])
async def test_cancel_while_the_next_is_waited_for_leaves_none_when_it_comes_out(
    make_client: MakeClient, locks: LockClient, redis: Redis, how: str
) -> None:
    """The release is waited for, in both kinds of cancellation."""
    ended = asyncio.Event()

    async def work(scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await enter(locks)
            finally:
                assert await are_free_now(redis, "a")
                ended.set()

    async with make_client().lock("b"):
        scope = anyio.CancelScope()
        task = asyncio.create_task(work(scope))
        await until(lambda: waits_for(redis, "b"))
        (task if how == "native" else scope).cancel()
        await asyncio.wait([task])
        assert task.cancelled() is (how == "native")
        assert ended.is_set()


async def are_free_now(redis: Redis, *names: str) -> bool:
    """The same within a cancelled scope."""
    with anyio.CancelScope(shield=True):
        found = await redis.exists(*map(key, names))
    return not found


async def test_release_of_which_one_reply_is_lost_is_repeated(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The others do not wait for it, and nothing is taken for a loss."""
    locks = make_client(proxy.url)
    async with locks.all("a", "b", "c"):
        fault = proxy.drop_replies(1, b"EVALSHA", close=True)
    assert fault.hits == 1
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_release_without_an_answer_is_a_warning_of_each(
    make_client: MakeClient, proxy: ChaosProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The work was done under the locks; all are sent at once, so it takes one request's time."""
    locks = make_client(proxy.url, request_timeout=0.3)
    with caplog.at_level(logging.WARNING, "aiodlock"):
        async with locks.all("a", "b", "c", "d"):
            proxy.black_hole()
            started = time.monotonic()
    assert time.monotonic() - started < 0.6 + SLACK_S
    said = [text for text in caplog.messages if "its ttl will free it" in text]
    assert [name for name in "abcd" if any(f"{name!r}" in text for text in said)] == list("abcd")
    proxy.heal()


async def test_closing_client_tells_the_body_and_releases_all(
    make_client: MakeClient, redis: Redis
) -> None:
    """Once, by CLOSED; the keys are gone when it is closed."""
    locks = make_client()
    inside, cancels = asyncio.Event(), list[str]()

    async def work() -> None:
        async with locks.all("a", "b"):
            inside.set()
            try:
                await forever()
            except asyncio.CancelledError:
                cancels.append("told")
                raise

    task = asyncio.create_task(work())
    await inside.wait()
    await locks.aclose()
    assert await leftovers(redis) == []
    with pytest.raises(LeaseLostError) as lost:
        await task
    assert (lost.value.name, lost.value.reason, cancels) == ("a", LostReason.CLOSED, ["told"])


async def test_generator_that_is_closed_in_the_block_releases_all(
    locks: LockClient, redis: Redis
) -> None:
    """Its end can still await."""

    async def numbers() -> AsyncGenerator[int]:
        async with locks.all("a", "b"):
            yield 1

    generator = numbers()
    assert await anext(generator) == 1
    await generator.aclose()
    assert await leftovers(redis) == []


async def test_coroutine_destroyed_in_the_block_is_released_by_its_loop(
    locks: LockClient, redis: Redis
) -> None:
    """It cannot await; in the block, and while it waits for the next."""
    for rival in (None, "b"):
        held = None if rival is None else await locks.lock(rival).acquire()
        coroutine: Any = hold_for_ever(locks)
        for _ in range(200):
            waits_for_it = coroutine.send(None)
            if waits_for_it is None and await redis.exists(key("a")):
                break
            if waits_for_it is not None:
                waits_for_it._asyncio_future_blocking = False
                await asyncio.wait([waits_for_it], timeout=0.05)
                if not waits_for_it.done():
                    break
        assert await redis.exists(key("a")) == 1
        coroutine.close()
        await until(lambda: are_free(redis, "a"))
        if held is not None:
            await held.release()
        await until(lambda: is_clean(redis))


async def hold_for_ever(locks: LockClient) -> None:
    """In the block it waits for what never comes."""
    async with locks.all("a", "b"):
        await asyncio.sleep(0)
        await asyncio.get_running_loop().create_future()


# Elsewhere.


async def test_processes_that_name_the_same_in_any_order_never_overlap_while_they_are_killed(
    server: LockServer, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three processes of four tasks, each second a kill of a holder: one inside, none stuck."""
    order = Order(server.url, "several names", tasks=4, ttl=0.5)
    async with Crowd(order, workers=3, redis=redis) as crowd:
        for _ in range(4):
            await asyncio.sleep(1)
            await crowd.kill_a_holder()
        kills, grants = len(crowd.kills), len(crowd.history)
        await until(lambda: len(crowd.history) > grants + 50, 20)
        assert crowd.crashed == 0
    history = crowd.history
    with capsys.disabled():
        print(f"\nseveral names, 3 processes: {len(history)} grants, {kills} kills of a holder")
    assert [
        overlap
        for overlap in overlaps(history)
        if not (overlap.first.was_killed or overlap.second.was_killed)
    ] == []
    assert out_of_order(history) == []


@pytest.fixture(scope="module")
def servers() -> Any:
    """Three that know nothing of each other."""
    with lock_server() as one, lock_server() as two, lock_server() as three:
        yield one, two, three


async def test_quorum_gives_all_or_none(servers: tuple[LockServer, ...]) -> None:
    """The same, in the quorum's way of waiting."""
    urls = [server.url for server in servers]
    async with LockClient.quorum(urls) as locks, LockClient.quorum(urls) as others:
        async with locks.all("b", "a") as leases:
            assert list(leases.fencing_tokens) == ["a", "b"]
            with pytest.raises(LockTimeout):
                async with others.all("a", "c", wait_timeout=0.2):
                    pytest.fail("entered")
        async with others.all("a", "b", "c", wait_timeout=5) as leases:
            assert leases.is_held
