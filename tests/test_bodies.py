"""The end of a body: what cancels it, which exception comes out, that its lease is given up."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import threading
import time
from asyncio import tasks
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeAlias

import anyio
import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, Lock, LockClient, LostReason
from aiodlock.testing import LockServer
from tests import leaks
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until

TTL_S = 0.3
# Of a lease that is to be lost: nothing but its first step must come before its end.
SHORT_S = 0.15
KEY = "aiodlock:{x}"
FOREIGN = "somebody else"

Cancel: TypeAlias = Callable[[], object]
Block: TypeAlias = Callable[[Cancel], Coroutine[Any, Any, None]]
Way: TypeAlias = Callable[[Block], Coroutine[Any, Any, None]]


async def forgotten() -> None:
    """Wait for what nobody refers to, so that the task is collected."""
    await asyncio.get_running_loop().create_future()


def me() -> asyncio.Task[Any]:
    """The current task."""
    task = asyncio.current_task()
    assert task is not None
    return task


async def assert_no_cancel_left() -> None:
    """Nothing of a cancel is left in this task: neither its count, nor one still to come."""
    assert me().cancelling() == 0
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert me().cancelling() == 0


def stall_past_deadline(lease: Lease) -> None:
    """The loop stands still until the lease's time is over, so that no timer can tell."""
    while lease.remaining > 0:
        time.sleep(lease.remaining)


def lose(*leases: Lease) -> None:
    """Lose them in this very tick: their time runs out, and check() finds it."""
    for lease in leases:
        stall_past_deadline(lease)
        with pytest.raises(LeaseLostError):
            lease.check()


def notes(error: BaseException) -> list[str]:
    """What we said on somebody else's exception."""
    return [note for note in getattr(error, "__notes__", []) if note.startswith("aiodlock: ")]


def short(client: LockClient, name: str = "x") -> Lock:
    """A lock whose lease runs out, so that `lose` can lose it."""
    return client.lock(name, ttl=SHORT_S, auto_extend=False)


# How somebody else cancels: each runs a block, hands it what cancels it, and knows the outcome.


async def by_task(block: Block) -> None:
    """`task.cancel()`; the cancel comes out, counted once."""

    async def run() -> None:
        try:
            await block(me().cancel)
        except asyncio.CancelledError:
            assert me().cancelling() == 1
            raise

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    assert task.cancelled(), f"it survived its cancel: {task.exception()!r}"


async def by_timeout(block: Block) -> None:
    """`asyncio.timeout`: TimeoutError."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as bound:
            await block(lambda: bound.reschedule(0))


async def by_group(block: Block) -> None:
    """`asyncio.TaskGroup`: the sibling's error alone."""
    fail = asyncio.Event()

    async def sibling() -> None:
        await fail.wait()
        raise KeyError("sibling")

    with pytest.raises(ExceptionGroup) as failed:
        async with asyncio.TaskGroup() as group:
            group.create_task(sibling())
            await block(fail.set)
    assert [repr(error) for error in failed.value.exceptions] == ["KeyError('sibling')"]


async def by_scope(block: Block) -> None:
    """`anyio.CancelScope`: it catches its cancel."""
    with anyio.CancelScope() as scope:
        await block(scope.cancel)
    assert scope.cancelled_caught


WAYS: list[Way] = [by_task, by_timeout, by_group, by_scope]
way_to_cancel = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


# The loss cancels the body.


@pytest.mark.parametrize(("standing", "reason"), [(None, "DELETED"), (FOREIGN, "STOLEN")])
async def test_body_whose_lease_is_lost_is_cancelled_once_and_can_clean_up(
    locks: LockClient, redis: Redis, standing: str | None, reason: str
) -> None:
    """Its clean-up awaits for longer than the ttl; then LeaseLostError stands for the cancel."""
    cancels = cleaned = 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=TTL_S) as lease:
            await (redis.delete(KEY) if standing is None else redis.set(KEY, standing))
            try:
                await forever()
            except asyncio.CancelledError:
                cancels += 1
                for _ in range(4):
                    await asyncio.sleep(TTL_S / 3)
                    cleaned += 1
                raise
    assert (cancels, cleaned) == (1, 4)
    assert lost.value.reason is LostReason[reason]
    assert (lost.value.name, lost.value.fencing_token) == ("x", lease.fencing_token)
    assert isinstance(lost.value.__context__, asyncio.CancelledError)
    assert await redis.get(KEY) == standing
    await assert_no_cancel_left()


async def test_body_that_must_not_be_cancelled_runs_to_its_end(
    locks: LockClient, redis: Redis
) -> None:
    """`on_lost="raise"`: the loss is told at the exit only."""
    steps = 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=TTL_S, on_lost="raise") as lease:
            await redis.delete(KEY)
            await lease.wait_lost()
            await asyncio.sleep(0)
            assert me().cancelling() == 0
            steps += 1
    assert steps == 1
    assert lost.value.reason is LostReason.DELETED
    await assert_no_cancel_left()


async def test_body_that_swallows_the_cancel_goes_on_and_is_told_at_the_exit(
    locks: LockClient,
) -> None:
    """One cancel, not more; nothing of it is left after the block."""
    steps = 0
    with pytest.raises(LeaseLostError):
        async with short(locks).acquire() as lease:
            asyncio.get_running_loop().call_soon(lose, lease)
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
            for _ in range(3):
                await asyncio.sleep(0.01)
                steps += 1
    assert steps == 3
    await assert_no_cancel_left()


async def test_body_that_turns_the_cancel_into_its_own_error_keeps_it(locks: LockClient) -> None:
    """Its own error comes out, with a note."""
    with pytest.raises(KeyError) as own:
        async with short(locks).acquire() as lease:
            asyncio.get_running_loop().call_soon(lose, lease)
            try:
                await forever()
            except asyncio.CancelledError:
                raise KeyError("mine") from None
    assert len(notes(own.value)) == 1
    await assert_no_cancel_left()


@pytest.mark.parametrize("first", ["result", "loss"])
async def test_body_that_ends_in_the_tick_of_the_loss_leaks_no_cancel(
    locks: LockClient, first: str
) -> None:
    """What it waited for is there in the same tick."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def tick(lease: Lease) -> None:
        if first == "result":
            result.set_result(None)
        lose(lease)
        if not result.done():
            result.set_result(None)

    with pytest.raises(LeaseLostError):
        async with short(locks).acquire() as lease:
            loop.call_soon(tick, lease)
            await result
    await assert_no_cancel_left()


def lose_in_an_eager_task(lease: Lease) -> None:
    """Another task finds the loss while ours runs: its cancel cannot be delivered yet.

    As a task of `asyncio.eager_task_factory` does; that came with Python 3.12, what it is made of
    was there before.
    """
    loop, task = asyncio.get_running_loop(), me()
    tasks._leave_task(loop, task)
    lose(lease)
    tasks._enter_task(loop, task)
    assert task.cancelling() > 0


async def test_body_that_ends_with_the_cancel_undelivered_leaks_no_cancel(
    locks: LockClient,
) -> None:
    """On every Python: the next awaits work (3.11 and 3.12 keep a cancel that is taken back)."""
    with pytest.raises(LeaseLostError):
        async with short(locks).acquire() as lease:
            lose_in_an_eager_task(lease)
    await assert_no_cancel_left()


async def test_body_with_its_own_error_and_the_cancel_undelivered_leaks_no_cancel(
    locks: LockClient,
) -> None:
    """The same, with an error of its own."""
    with pytest.raises(KeyError) as own:
        async with short(locks).acquire() as lease:
            lose_in_an_eager_task(lease)
            raise KeyError("mine")
    assert len(notes(own.value)) == 1
    await assert_no_cancel_left()


@pytest.mark.parametrize("first", ["ours", "other"])
async def test_body_that_ends_with_two_cancels_undelivered_is_cancelled(
    locks: LockClient, redis: Redis, first: str
) -> None:
    """Ours is taken back, the other's comes out."""

    async def block(cancel: Cancel) -> None:
        async with short(locks).acquire() as lease:
            if first == "other":
                cancel()
            lose_in_an_eager_task(lease)
            if first == "ours":
                cancel()

    await by_task(block)
    assert await leftovers(redis) == []


# Somebody else cancels too.


@pytest.mark.parametrize("together", [True, False], ids=["same tick", "in the clean-up"])
@pytest.mark.parametrize("first", ["ours", "other"])
@way_to_cancel
async def test_body_that_somebody_else_cancels_too_ends_with_their_cancel(
    locks: LockClient, redis: Redis, way: Way, first: str, together: bool
) -> None:
    """CancelledError with a note on the loss, whichever came first; who cancelled catches it."""
    loop = asyncio.get_running_loop()
    seen: list[list[str]] = []

    async def block(cancel: Cancel) -> None:
        try:
            async with short(locks).acquire() as lease:
                strikes: list[Cancel] = [lambda: lose(lease), cancel]
                if first == "other":
                    strikes.reverse()
                loop.call_soon(strikes[0])
                if together:
                    loop.call_soon(strikes[1])
                try:
                    await forever()
                finally:
                    if not together:
                        loop.call_soon(strikes[1])
                        await forever()
        except asyncio.CancelledError as error:
            seen.append(notes(error))
            raise

    await way(block)
    assert len(seen) == 1
    assert len(seen[0]) == 1
    assert "is lost" in seen[0][0]
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


@pytest.mark.parametrize("first", ["ours", "other"])
async def test_body_that_is_cancelled_and_loses_in_one_callback_ends_with_the_cancel(
    locks: LockClient, first: str
) -> None:
    """Both before the task runs again: one CancelledError is delivered for two cancels."""

    async def block(cancel: Cancel) -> None:
        async with short(locks).acquire() as lease:
            strikes: list[Cancel] = [lambda: lose(lease), cancel]
            if first == "other":
                strikes.reverse()
            asyncio.get_running_loop().call_soon(lambda: [strike() for strike in strikes])
            await forever()

    await by_task(block)


async def test_body_in_a_timeout_that_expired_within_it_still_ends_with_their_cancel(
    locks: LockClient,
) -> None:
    """A timeout inside takes its own cancel back; the one that counts came later."""

    async def block(cancel: Cancel) -> None:
        loop = asyncio.get_running_loop()
        async with short(locks).acquire() as lease:
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.timeout(0):
                    try:
                        await forever()
                    finally:
                        loop.call_soon(lose, lease)
                        await forever()
            loop.call_soon(cancel)
            await forever()

    await by_task(block)


@way_to_cancel
async def test_body_of_two_leases_lost_together_that_somebody_cancels_ends_with_their_cancel(
    locks: LockClient, redis: Redis, way: Way
) -> None:
    """The inner block must not hide the cancel from the outer one."""

    async def block(cancel: Cancel) -> None:
        def strike() -> None:
            lose(outer, inner)
            cancel()

        async with short(locks, "x").acquire() as outer, short(locks, "y").acquire() as inner:
            asyncio.get_running_loop().call_soon(strike)
            await forever()

    await way(block)
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


async def test_body_cancelled_before_it_entered_can_still_lose(locks: LockClient) -> None:
    """A cancel that is being dealt with when the block is entered is no cancel of the block."""
    seen: list[BaseException] = []

    async def run() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            try:
                async with short(locks).acquire() as lease:
                    asyncio.get_running_loop().call_soon(lose, lease)
                    await forever()
            except BaseException as error:
                seen.append(error)
                assert me().cancelling() == 1
            raise

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert [type(error) for error in seen] == [LeaseLostError]
    assert task.cancelled()


@way_to_cancel
async def test_body_cancelled_without_a_loss_ends_with_the_cancel(
    locks: LockClient, redis: Redis, way: Way
) -> None:
    """Released, no note, and whoever cancelled catches it."""
    seen: list[list[str]] = []

    async def block(cancel: Cancel) -> None:
        try:
            async with locks.lock("x"):
                asyncio.get_running_loop().call_soon(cancel)
                await forever()
        except asyncio.CancelledError as error:
            seen.append(notes(error))
            raise

    await way(block)
    assert seen == [[]]
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


async def lost_within(around: Callable[[Coroutine[Any, Any, None]], Any], lock: Lock) -> None:
    """Lose the lease of a body that stands in *around*."""

    async def body() -> None:
        async with lock.acquire() as lease:
            asyncio.get_running_loop().call_soon(lose, lease)
            await forever()

    await around(body())


async def in_timeout(body: Coroutine[Any, Any, None]) -> None:
    """`asyncio.timeout` with time left."""
    async with asyncio.timeout(60):
        await body


async def in_group(body: Coroutine[Any, Any, None]) -> None:
    """The body of a task group, with a sibling."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever())
            await body
    except ExceptionGroup as errors:
        (error,) = errors.exceptions
        raise error from None


async def in_scope(body: Coroutine[Any, Any, None]) -> None:
    """An anyio scope with time left."""
    with anyio.fail_after(60):
        await body


async def in_wait_for(body: Coroutine[Any, Any, None]) -> None:
    """`asyncio.wait_for`: on 3.11 in a task of its own."""
    await asyncio.wait_for(body, 60)


@pytest.mark.parametrize(
    "around", [in_timeout, in_group, in_scope, in_wait_for], ids=lambda around: around.__name__
)
async def test_body_within_a_bound_that_loses_raises_the_loss_through_it(
    locks: LockClient, around: Callable[[Coroutine[Any, Any, None]], Any]
) -> None:
    """Our cancel is not taken for theirs."""
    with pytest.raises(LeaseLostError):
        await lost_within(around, short(locks))
    await assert_no_cancel_left()


# Loss that the body finds itself.


async def test_body_whose_check_finds_the_loss_is_not_cancelled(locks: LockClient) -> None:
    """It is told where it asked; it may go on, and is told again at the exit."""
    steps = 0
    with pytest.raises(LeaseLostError):
        async with short(locks).acquire() as lease:
            lose(lease)
            for _ in range(3):
                await asyncio.sleep(0.01)
                steps += 1
    assert steps == 3
    await assert_no_cancel_left()


async def test_body_whose_check_in_a_thread_finds_the_loss_is_not_cancelled_from_there(
    locks: LockClient,
) -> None:
    """Code beside the loop may ask; the answer is right, and no task is touched from outside."""
    with pytest.raises(LeaseLostError):
        async with short(locks).acquire() as lease:
            thread = threading.Thread(target=lose, args=(lease,))
            thread.start()
            thread.join()
            assert lease.state == "lost"
            assert me().cancelling() == 0
    await assert_no_cancel_left()


async def test_body_whose_extend_finds_the_loss_is_not_cancelled(
    locks: LockClient, redis: Redis
) -> None:
    """The same by an answer of the server."""
    steps = 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=30) as lease:
            await redis.delete(KEY)
            with pytest.raises(LeaseLostError) as found:
                await lease.extend()
            assert found.value.reason is LostReason.DELETED
            for _ in range(3):
                await asyncio.sleep(0.01)
                steps += 1
    assert steps == 3
    assert lost.value.reason is LostReason.DELETED
    await assert_no_cancel_left()


async def test_body_whose_error_is_the_loss_it_found_raises_that_very_error(
    locks: LockClient,
) -> None:
    """No second error, and no note on it that says the same."""
    found: list[LeaseLostError] = []
    with pytest.raises(LeaseLostError) as lost:
        async with short(locks).acquire() as lease:
            stall_past_deadline(lease)
            try:
                lease.check()
            except LeaseLostError as error:
                found.append(error)
                raise
    assert found == [lost.value]
    assert notes(lost.value) == []


# Several leases of one task.


async def test_leases_of_one_task_lost_together_cancel_it_once(
    locks: LockClient, redis: Redis
) -> None:
    """One cancel until the outermost has left; between the blocks the task can await."""
    cancels = between = 0
    with pytest.raises(LeaseLostError) as outermost:
        async with short(locks, "x").acquire() as outer:
            with pytest.raises(LeaseLostError) as innermost:
                async with (
                    short(locks, "y").acquire() as middle,
                    short(locks, "z").acquire() as inner,
                ):
                    asyncio.get_running_loop().call_soon(lose, outer, middle, inner)
                    try:
                        await forever()
                    except asyncio.CancelledError:
                        cancels += 1
                        await asyncio.sleep(0.01)
                        raise
            for _ in range(3):
                await asyncio.sleep(0)
                between += 1
    assert (cancels, between) == (1, 3)
    assert (innermost.value.name, outermost.value.name) == ("z", "x")
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


async def test_lease_lost_in_the_clean_up_of_another_cancels_no_second_time(
    locks: LockClient,
) -> None:
    """The task is told already; each block still raises its own loss."""
    cancels = 0
    loop = asyncio.get_running_loop()
    with pytest.raises(LeaseLostError) as lost:
        async with short(locks, "x").acquire() as outer, short(locks, "y").acquire() as inner:
            loop.call_soon(lose, inner)
            try:
                await forever()
            except asyncio.CancelledError:
                cancels += 1
                loop.call_soon(lose, outer)
                for _ in range(5):
                    await asyncio.sleep(0)
                raise
    assert cancels == 1
    assert lost.value.name == "y"
    await assert_no_cancel_left()


async def test_outer_lease_lost_alone_ends_both_blocks(locks: LockClient, redis: Redis) -> None:
    """The cancel passes through the inner block, which gives its lease up."""
    with pytest.raises(LeaseLostError) as lost:
        async with short(locks, "x").acquire() as outer, locks.lock("y") as inner:
            asyncio.get_running_loop().call_soon(lose, outer)
            await forever()
    assert (lost.value.name, inner.state) == ("x", "released")
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


async def test_outer_lease_lost_after_the_inner_one_was_left_cancels_again(
    locks: LockClient,
) -> None:
    """They were not lost together: the second loss is news."""
    loop = asyncio.get_running_loop()
    with pytest.raises(LeaseLostError) as second:
        async with locks.lock("x", ttl=2 * TTL_S, auto_extend=False) as outer:
            with pytest.raises(LeaseLostError) as first:
                async with short(locks, "y").acquire() as inner:
                    loop.call_soon(lose, inner)
                    await forever()
            loop.call_soon(lose, outer)
            await forever()
    assert (first.value.name, second.value.name) == ("y", "x")
    await assert_no_cancel_left()


# Entered here, left there.


async def test_lease_entered_in_one_task_and_left_in_another_is_released(
    locks: LockClient, redis: Redis
) -> None:
    """As fixtures do, whose set-up and end are two tasks; through the Lock too."""
    lock = locks.lock("x")
    lease = await asyncio.create_task(lock.__aenter__())
    assert lease.is_held
    await asyncio.create_task(lock.__aexit__(None, None, None))
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def test_lease_left_in_another_task_after_its_loss_raises_there(locks: LockClient) -> None:
    """The task that entered has ended: nobody is cancelled."""
    lock = short(locks)
    lease = await asyncio.create_task(lock.__aenter__())
    await lease.wait_lost()
    with pytest.raises(LeaseLostError):
        await asyncio.create_task(lock.__aexit__(None, None, None))
    await assert_no_cancel_left()


async def test_task_that_entered_is_left_alone_when_another_leaves_too_late(
    locks: LockClient,
) -> None:
    """The exit finds the loss and raises it; a cancel of the first task would serve nobody."""
    lock = short(locks)
    left = asyncio.Event()

    async def enter() -> str:
        leases.append(await lock.__aenter__())
        await left.wait()
        await asyncio.sleep(0)
        assert me().cancelling() == 0
        return "undisturbed"

    leases: list[Lease] = []
    entering = asyncio.create_task(enter())
    await until(lambda: leases)
    stall_past_deadline(leases[0])
    with pytest.raises(LeaseLostError):
        await lock.__aexit__(None, None, None)
    left.set()
    await asyncio.wait([entering])
    assert not entering.cancelled()
    assert entering.result() == "undisturbed"


async def test_task_that_entered_and_waits_for_the_one_that_leaves_is_cancelled_cleanly(
    locks: LockClient, redis: Redis
) -> None:
    """The loss cancels who entered, and through it who leaves; no cancel is left in either."""

    async def work(stack: contextlib.AsyncExitStack, lease: Lease) -> None:
        async with stack:
            asyncio.get_running_loop().call_soon(lose, lease)
            await forever()

    stack = contextlib.AsyncExitStack()
    lease = await stack.enter_async_context(short(locks))
    with pytest.raises(LeaseLostError):
        await asyncio.create_task(work(stack, lease))
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


# One lock object, many entries.


async def test_lock_entered_by_many_tasks_gives_each_its_own_lease(
    locks: LockClient, redis: Redis
) -> None:
    """Ten tasks share the object; nobody overlaps, nobody leaves another's lease."""
    lock = locks.lock("x")
    inside: set[str] = set()
    tokens: list[str] = []

    async def work() -> None:
        for _ in range(5):
            async with lock as lease:
                assert inside == set()
                inside.add(lease.owner_token)
                assert str(await redis.get(KEY)).startswith(f"{lease.owner_token}/")
                inside.remove(lease.owner_token)
                tokens.append(lease.owner_token)
            assert lease.state == "released"

    await asyncio.gather(*(work() for _ in range(10)))
    assert len(set(tokens)) == 50
    assert await leftovers(redis) == []


async def test_task_that_nests_locks_of_other_names_leaves_each(
    locks: LockClient, redis: Redis
) -> None:
    """Three names, entered in one task, left in any order."""
    first, second, third = (locks.lock(name) for name in "xyz")
    one, two = await first.__aenter__(), await second.__aenter__()
    async with third as three:
        await first.__aexit__(None, None, None)
        assert [lease.state for lease in (one, two, three)] == ["released", "held", "held"]
    await second.__aexit__(None, None, None)
    assert [lease.state for lease in (one, two, three)] == ["released"] * 3
    assert await leftovers(redis) == []


async def test_lock_shared_by_a_holder_that_expired_and_the_next_leaves_the_right_lease(
    locks: LockClient, redis: Redis
) -> None:
    """Case 095: A expires, B acquires through the same object, A leaves: B keeps its lease."""
    lock = locks.lock("x", ttl=TTL_S, auto_extend=False, on_lost="raise")
    entered, left = asyncio.Event(), asyncio.Event()

    async def second() -> None:
        async with lock as lease:
            entered.set()
            await left.wait()
            assert str(await redis.get(KEY)) == f"{lease.owner_token}/{lease.fencing_token}"
            lease.check()

    with pytest.raises(LeaseLostError) as lost:
        async with lock as first:
            await first.wait_lost()
            after = asyncio.create_task(second())
            await entered.wait()
    left.set()
    await after
    assert lost.value.fencing_token == first.fencing_token
    assert await leftovers(redis) == []


async def test_lock_left_by_a_task_that_never_entered_while_two_others_have_refuses(
    locks: LockClient,
) -> None:
    """Which entry is meant cannot be known; those who entered still leave theirs."""
    lock = locks.lock("x", ttl=TTL_S, auto_extend=False, on_lost="raise")
    entered, leave = asyncio.Event(), asyncio.Event()

    async def second() -> None:
        with contextlib.suppress(LeaseLostError):
            async with lock:
                entered.set()
                await leave.wait()

    with pytest.raises(LeaseLostError):
        async with lock as first:
            await first.wait_lost()
            after = asyncio.create_task(second())
            await entered.wait()
            with pytest.raises(RuntimeError, match="entered 2 times by other tasks"):
                await asyncio.create_task(lock.__aexit__(None, None, None))
    leave.set()
    await after


async def test_lease_acquired_through_wait_for_belongs_to_no_task(
    locks: LockClient, redis: Redis
) -> None:
    """Case 013: on 3.11 `wait_for` acquires in a task of its own; any task may release."""
    async with await asyncio.wait_for(locks.lock("x").acquire(), 5) as lease:
        assert await lease.extend() > 0
    assert lease.state == "released"
    lease = await asyncio.wait_for(locks.lock("x").acquire(), 5)
    assert await asyncio.create_task(lease.release())
    async with asyncio.timeout(5), locks.lock("x").acquire() as lease:
        lease.check()
    assert await leftovers(redis) == []


async def test_lease_released_after_it_expired_leaves_the_next_holder_alone(
    locks: LockClient, redis: Redis
) -> None:
    """Case 095 with leases: the late release removes nothing."""
    lock = short(locks)
    first = await lock.acquire()
    await first.wait_lost()
    async with locks.lock("x") as second:
        assert not await first.release()
        assert str(await redis.get(KEY)).startswith(f"{second.owner_token}/")
        with pytest.raises(LeaseLostError):
            await first.extend()


# Errors of the body.


class Odd(BaseException):
    """An exception that is no Exception."""


ERRORS: list[BaseException] = [
    ValueError("mine"),
    ExceptionGroup("mine", [ValueError("one"), KeyError("two")]),
    BaseExceptionGroup("mine", [Odd(), asyncio.CancelledError()]),
    TimeoutError("mine"),
    LeaseLostError(name="another", fencing_token=1, reason=LostReason.STOLEN),
    asyncio.CancelledError("raised by hand"),
    KeyboardInterrupt("mine"),
    SystemExit(3),
    StopAsyncIteration("mine"),
    Odd("mine"),
]


@pytest.mark.parametrize("own", ERRORS, ids=lambda own: type(own).__name__)
def test_body_that_raises_is_released_and_its_very_error_comes_out(
    server: LockServer, own: BaseException
) -> None:
    """Case 093, in a loop of its own, since some of these end the loop."""

    async def program() -> None:
        async with LockClient.from_url(server.url) as locks, locks.lock("x"):
            assert look.get(KEY) is not None
            raise own

    with BlockingRedis.from_url(server.url) as look:
        with pytest.raises(type(own)) as out:
            asyncio.run(program())
        assert out.value is own
        assert notes(own) == []
        assert look.keys("aiodlock:*") == [f"{KEY}:fence".encode()]


def test_body_interrupted_by_ctrl_c_is_released(server: LockServer) -> None:
    """SIGINT cancels the main task; KeyboardInterrupt comes out of the program alone."""
    script = f"""
import asyncio, os, signal
from aiodlock import LockClient
async def main():
    async with LockClient.from_url({server.url!r}) as locks, locks.lock("x"):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    ended = run_program(script)
    assert ended.returncode == -2, ended.stderr
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "Exception ignored" not in ended.stderr
    with BlockingRedis.from_url(server.url) as look:
        assert look.keys("aiodlock:*") == [f"{KEY}:fence".encode()]


def run_program(script: str) -> subprocess.CompletedProcess[str]:
    """Run *script* by the interpreter of this test run, to its end."""
    return subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=30
    )


async def test_body_that_raises_after_a_loss_nobody_noticed_has_it_as_a_note(
    locks: LockClient, redis: Redis
) -> None:
    """Case 091: the body's error is not hidden, the loss not silent."""
    own = ValueError("mine")
    with pytest.raises(ValueError) as out:
        async with locks.lock("x"):
            await redis.delete(KEY)
            raise own
    assert out.value is own
    assert len(notes(own)) == 1
    assert LostReason.DELETED.value in notes(own)[0]


async def test_body_that_raises_while_its_release_fails_has_that_as_a_note(
    make_client: MakeClient, server: LockServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The server answers nobody; the body's error comes out after `request_timeout`."""
    locks = make_client(request_timeout=0.3)
    own = ValueError("mine")
    with pytest.raises(ValueError) as out:
        async with locks.lock("x"):
            server.pause()
            raise own
    server.resume()
    assert out.value is own
    assert len(notes(own)) == 1
    assert "the release of 'x' failed" in notes(own)[0]
    assert warnings_in(caplog) == []


async def test_body_that_succeeds_while_its_release_fails_is_a_warning(
    make_client: MakeClient, server: LockServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The work was done under the lock, and its ttl frees it: no exception."""
    locks = make_client(request_timeout=0.3)
    async with locks.lock("x") as lease:
        server.pause()
    server.resume()
    assert lease.state == "released"
    assert len(warnings_in(caplog)) == 1
    assert "the release of 'x' failed" in warnings_in(caplog)[0]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our log said that people should see."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("aiodlock") and record.levelno >= logging.WARNING
    ]


async def test_body_cancelled_while_the_server_is_stopped_ends_cancelled(
    make_client: MakeClient, server: LockServer
) -> None:
    """Case 011: the failed release is a note on the cancel, never in its place."""
    locks = make_client(request_timeout=0.3)
    seen: list[list[str]] = []

    async def block(cancel: Cancel) -> None:
        try:
            async with locks.lock("x"):
                server.pause()
                asyncio.get_running_loop().call_soon(cancel)
                await forever()
        except asyncio.CancelledError as error:
            seen.append(notes(error))
            raise

    await by_task(block)
    server.resume()
    assert len(seen[0]) == 1
    assert "the release of 'x' failed" in seen[0][0]


@pytest.mark.parametrize("auto_extend", [True, False])
async def test_body_that_blocked_the_loop_past_the_deadline_and_succeeded_is_lost(
    locks: LockClient, auto_extend: bool
) -> None:
    """The clock decides, not the timer, which had no chance to run."""
    reason = LostReason.LOOP_STALLED if auto_extend else LostReason.EXPIRED
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x", ttl=TTL_S, auto_extend=auto_extend) as lease:
            stall_past_deadline(lease)
    assert lost.value.reason is reason
    await assert_no_cancel_left()


async def delete(redis: Redis) -> None:
    """Nothing stands."""
    await redis.delete(KEY)


async def steal(redis: Redis) -> None:
    """Somebody else's value."""
    await redis.set(KEY, FOREIGN)


async def replace(redis: Redis) -> None:
    """No string at all."""
    await redis.delete(KEY)
    await redis.rpush(KEY, FOREIGN)


@pytest.mark.parametrize(
    ("change", "reason", "standing"),
    [(delete, "DELETED", "none"), (steal, "STOLEN", "string"), (replace, "STOLEN", "list")],
    ids=["deleted", "stolen", "no string"],
)
async def test_body_that_succeeded_after_a_loss_nobody_noticed_is_told_at_the_exit(
    locks: LockClient,
    redis: Redis,
    change: Callable[[Redis], Coroutine[Any, Any, None]],
    reason: str,
    standing: str,
) -> None:
    """The release finds nothing of ours, and leaves alone what stands there."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("x"):
            await change(redis)
    assert lost.value.reason is LostReason[reason]
    assert await redis.type(KEY) == standing


# Cancelled while it releases.


async def cancel_while_releasing(lease: Lease, cancel: Cancel) -> None:
    """Cancel once the release is on its way."""
    await until(lambda: lease.state == "released")
    cancel()


@contextlib.asynccontextmanager
async def slow_release(lock: Lock, proxy: ChaosProxy, cancel: Cancel) -> AsyncIterator[None]:
    """A body whose release takes a while, in which it is cancelled."""
    canceller: asyncio.Task[None] | None = None
    try:
        async with lock.acquire() as lease:
            proxy.delay_replies(0.1, b"EVALSHA", n=1)
            canceller = asyncio.create_task(cancel_while_releasing(lease, cancel))
            yield
    finally:
        assert canceller is not None
        assert canceller.done()


@way_to_cancel
async def test_body_cancelled_while_it_releases_is_released_and_cancelled(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, way: Way
) -> None:
    """The release is finished before the cancel comes out."""
    locks = make_client(proxy.url)
    left: list[list[str]] = []

    async def block(cancel: Cancel) -> None:
        try:
            async with slow_release(locks.lock("x"), proxy, cancel):
                pass
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                left.append(await leftovers(redis))
            raise

    await way(block)
    assert left == [[]]
    await assert_no_cancel_left()


@way_to_cancel
async def test_body_with_its_own_error_cancelled_while_it_releases_raises_it_and_is_cancelled(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, way: Way
) -> None:
    """Its own error comes out of the block with a note, and the cancel of the next await."""
    locks = make_client(proxy.url)
    own = ValueError("mine")
    seen: list[Exception] = []

    async def block(cancel: Cancel) -> None:
        try:
            async with slow_release(locks.lock("x"), proxy, cancel):
                raise own
        except ValueError as error:
            seen.append(error)
        await forever()

    await way(block)
    assert seen == [own]
    assert len(notes(own)) == 1
    assert "cancelled while" in notes(own)[0]
    assert await leftovers(redis) == []
    await assert_no_cancel_left()


@pytest.mark.parametrize("bound", ["asyncio.timeout", "anyio scope"])
async def test_error_of_a_body_that_leaves_a_bound_leaves_no_cancel_behind(
    make_client: MakeClient, proxy: ChaosProxy, bound: str
) -> None:
    """The bound cancelled during the release, took its cancel back, and let the error pass."""
    locks = make_client(proxy.url)
    with pytest.raises(ValueError):
        if bound == "asyncio.timeout":
            async with asyncio.timeout(None) as timeout:
                async with slow_release(locks.lock("x"), proxy, lambda: timeout.reschedule(0)):
                    raise ValueError("mine")
        else:
            with anyio.CancelScope() as scope:
                async with slow_release(locks.lock("x"), proxy, scope.cancel):
                    raise ValueError("mine")
    await assert_no_cancel_left()


# GeneratorExit.


async def generator(lock: Lock) -> AsyncIterator[Lease]:
    """Yields under the lock, without more ado."""
    async with lock as lease:
        yield lease


@contextlib.contextmanager
def unraisable() -> Iterator[list[str]]:
    """Collect what could not be raised anywhere."""
    seen: list[str] = []
    before = sys.unraisablehook
    sys.unraisablehook = lambda args: seen.append(f"{args.object!r}: {args.exc_value!r}")
    try:
        yield seen
    finally:
        sys.unraisablehook = before


@pytest.mark.parametrize("in_another_task", [False, True])
async def test_generator_closed_under_the_lock_is_released(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, in_another_task: bool
) -> None:
    """`aclose()` raises GeneratorExit at its yield; the release is done when it returns."""
    locks = make_client(proxy.url)
    steps: Any = generator(locks.lock("x"))
    lease = await anext(steps)
    proxy.delay_requests(0.1, b"EVALSHA")
    if in_another_task:
        await asyncio.create_task(steps.aclose())
    else:
        await steps.aclose()
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def test_generator_abandoned_under_the_lock_is_released_by_its_loop(
    locks: LockClient, redis: Redis
) -> None:
    """`break` out of `async for` leaves it to the loop, which closes it in a task of its own."""
    with unraisable() as ignored:
        async for lease in generator(locks.lock("x")):
            assert lease.is_held
            break
        gc.collect()
        await until(lambda: lease.state == "released")
    assert ignored == []

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)


async def test_generator_closed_after_a_loss_leaks_no_cancel(locks: LockClient) -> None:
    """GeneratorExit is the body's own error: it comes out, so that the close is none."""
    steps: Any = generator(short(locks))
    lease = await anext(steps)
    asyncio.get_running_loop().call_soon(lose, lease)
    with contextlib.suppress(asyncio.CancelledError):
        await forever()
    await steps.aclose()
    await assert_no_cancel_left()


async def test_coroutine_thrown_away_under_the_lock_is_released(
    locks: LockClient, redis: Redis
) -> None:
    """A task that nobody refers to is collected; what runs then may not await."""
    entered: list[bool] = []

    async def body() -> None:
        async with locks.lock("x"):
            entered.append(True)
            await forgotten()

    with leaks.loop_errors() as errors, unraisable() as ignored:
        asyncio.create_task(body())  # noqa: RUF006 - that is the point
        await until(lambda: entered)
        gc.collect()
        await asyncio.sleep(0)
    assert errors == ["Task was destroyed but it is pending!: None"]
    assert ignored == []

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)


async def test_coroutine_thrown_away_with_a_context_manager_of_the_users_is_released(
    locks: LockClient, redis: Redis
) -> None:
    """The lock is inside an async generator, which could await if it were closed itself."""
    entered: list[bool] = []

    @contextlib.asynccontextmanager
    async def locked() -> AsyncIterator[None]:
        async with locks.lock("x"):
            yield

    async def body() -> None:
        async with locked():
            entered.append(True)
            await forgotten()

    with leaks.loop_errors() as errors, unraisable() as ignored:
        asyncio.create_task(body())  # noqa: RUF006 - that is the point
        await until(lambda: entered)
        gc.collect()
        await asyncio.sleep(0)
    assert errors == ["Task was destroyed but it is pending!: None"]
    assert ignored == []

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)


async def test_generator_around_a_context_manager_of_the_users_is_released(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """An async generator that is closed, with the lock in another one inside it."""
    locks = make_client(proxy.url)

    @contextlib.asynccontextmanager
    async def locked() -> AsyncIterator[Lease]:
        async with locks.lock("x") as lease:
            yield lease

    async def outer() -> AsyncIterator[Lease]:
        async with locked() as lease:
            yield lease

    steps: Any = outer()
    lease = await anext(steps)
    proxy.delay_requests(0.1, b"EVALSHA")
    await steps.aclose()
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def test_coroutine_closed_under_the_lock_is_released(locks: LockClient, redis: Redis) -> None:
    """`close()` on a coroutine driven by hand: RuntimeError would say that it awaited."""

    async def body() -> None:
        async with locks.lock("x"):
            await asyncio.sleep(0)

    async def start() -> Coroutine[Any, Any, None]:
        coro = body()
        while await redis.get(KEY) is None:
            waits_for = coro.send(None)
            if waits_for is not None:
                await asyncio.wait([waits_for])
        coro.send(None)
        return coro

    coro = await asyncio.create_task(start())
    coro.close()

    async def gone() -> bool:
        return await leftovers(redis) == []

    await until(gone)


def test_coroutine_destroyed_with_its_loop_ignores_no_exception(server: LockServer) -> None:
    """The program ends with bodies suspended: nothing can be sent, nothing is said of it.

    A task is destroyed before the end, one that a lock knows only with it; a generator just ends.
    """
    script = f"""
import asyncio, gc
from aiodlock import LockClient
locks = LockClient.from_url({server.url!r}, ttl=5)
lock = locks.lock("x")
entered = 0
async def body(entering):
    global entered
    try:
        async with entering:
            entered += 1
            await asyncio.sleep(60)
    except BaseException as error:
        print(type(error).__name__, getattr(error, "__notes__", None))
        raise
async def generator():
    global entered
    async with locks.lock("y").acquire():
        entered += 1
        yield
async def main():
    global held, suspended
    held = [asyncio.create_task(body(locks.lock("z").acquire())), asyncio.create_task(body(lock))]
    suspended = generator()
    await anext(suspended)
    while entered < 3:
        await asyncio.sleep(0.001)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
del held, suspended
gc.collect()
print("end")
"""
    ended = run_program(script)
    assert ended.returncode == 0, ended.stderr
    out = ended.stdout.splitlines()
    assert [line.split()[0] for line in out] == ["GeneratorExit", "end", "GeneratorExit"]
    assert "Exception ignored" not in ended.stderr, ended.stderr
    assert "never awaited" not in ended.stderr
    assert "Error" not in ended.stderr
    with BlockingRedis.from_url(server.url) as look:
        left = sorted(key for key in look.keys("aiodlock:*") if not key.endswith(b":fence"))
        assert left == [b"aiodlock:{x}", b"aiodlock:{y}", b"aiodlock:{z}"]
        assert all(look.pttl(key) > 0 for key in left)


# A caller's own `__aexit__`, by hand: what the protocol gives is what comes in.


async def test_exit_called_by_hand_with_an_error_tells_python_to_raise_it(
    locks: LockClient,
) -> None:
    """It returns nothing true, so the error goes on; the lease is given up."""
    lock = locks.lock("x")
    lease = await lock.__aenter__()
    error = ValueError("mine")
    exit_info: tuple[type[BaseException], BaseException, TracebackType | None]
    exit_info = (ValueError, error, None)
    leave: Callable[..., Coroutine[Any, Any, object]] = lock.__aexit__
    assert not await leave(*exit_info)
    assert lease.state == "released"
