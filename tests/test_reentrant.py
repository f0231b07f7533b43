"""A task that enters its own lock again: the same lease; or it is told what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import Backoff, Lease, LeaseLostError, Lock, LockClient, LockTimeout, LostReason
from aiodlock.testing import LockServer, lock_server
from tests.conftest import MakeClient
from tests.holders import KEY, watchdogs
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until

HELD_TWICE = "this task holds the lock 'n' already and would wait for itself for ever"


@pytest.fixture
def again(locks: LockClient) -> Lock:
    """A lock that its task may enter again."""
    return locks.lock("n", reentrant=True)


@pytest.fixture
def short(locks: LockClient) -> Lock:
    """The same, whose watchdog soon sees that it is lost."""
    return locks.lock("n", ttl=0.3, reentrant=True)


async def is_free(redis: Redis) -> bool:
    """Whether nothing stands in the key."""
    return not await redis.exists(KEY)


# Entering again.


async def test_task_that_enters_again_gets_the_same_lease_without_a_call(
    locks: LockClient, again: Lock, redis: Redis
) -> None:
    """By every way in, from any lock of that name; not one script call is made."""
    async with again as lease:
        calls = await evalsha_calls(redis)
        entered: list[Lease | None] = []
        async with again as inner:
            entered.append(inner)
        other = locks.lock("n", ttl=5, wait_timeout=0, reentrant=True)
        async with other.acquire() as inner:
            entered.append(inner)
        entered.append(await other.acquire())
        entered.append(await other.try_acquire())
        assert await lease.release() is False
        assert await lease.release() is False
        assert all(inner is lease for inner in entered)
        assert await evalsha_calls(redis) == calls
        assert lease.ttl == 30, "the options of the first stay"
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def evalsha_calls(redis: Redis) -> int:
    """How many script calls the server has done."""
    return int((await redis.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def test_last_release_of_as_many_as_acquired_frees_the_lock(
    again: Lock, redis: Redis
) -> None:
    """Each release undoes one acquisition; one more is a release of what is released."""
    lease = await again.acquire()
    assert await again.acquire() is lease
    assert await lease.release() is False
    assert lease.is_held
    assert not await is_free(redis)
    assert await lease.release() is True
    assert await lease.release() is False
    assert await is_free(redis)
    async with again as later:
        assert later is not lease
        assert later.fencing_token > lease.fencing_token


async def test_release_within_a_block_is_not_undone_again_at_its_end(
    again: Lock, redis: Redis
) -> None:
    """A release undoes the innermost block's own entry, as it does with a plain lease."""
    async with again as lease:
        async with again:
            await lease.release()
            assert lease.is_held
        assert lease.is_held
        kept = await again.acquire()
        async with again:
            pass
        assert lease.is_held
        assert await kept.release() is False
    assert await is_free(redis)


async def test_block_whose_inner_acquisition_is_kept_does_not_release(
    again: Lock, redis: Redis
) -> None:
    """What counts is how many entries are left, not which."""
    async with again:
        kept = await again.acquire()
    assert kept.is_held
    assert not await is_free(redis)
    async with kept:
        with pytest.raises(RuntimeError, match="entered already"):
            async with kept:
                pytest.fail("entered without an acquisition")
    assert kept.state == "released"


async def test_lease_released_for_good_within_nested_blocks_ends_them_quietly(
    again: Lock, redis: Redis
) -> None:
    """As often as it was acquired: the blocks have nothing left to undo."""
    async with again as lease, again:
        assert await lease.release() is False
        assert await lease.release() is True
        assert await is_free(redis)
        with pytest.raises(RuntimeError, match="was released"):
            lease.check()
    assert await is_free(redis)


async def test_other_task_and_child_task_wait_their_turn(again: Lock, redis: Redis) -> None:
    """The right is the task's: not its children's, which are handed the lock in their turn."""
    order: list[str] = []

    async def child() -> None:
        async with again:
            order.append("child")
            async with again:
                order.append("child again")

    async with again, again:
        children = [asyncio.create_task(child()) for _ in range(2)]
        await until(lambda: are_queued(redis, 2))
        order.append("parent")
    await asyncio.gather(*children)
    assert order == ["parent", *["child", "child again"] * 2]
    assert await leftovers(redis) == []


async def are_queued(redis: Redis, waiters: int) -> bool:
    """Whether so many wait now."""
    return int(await redis.zcard(f"{KEY}:queue")) == waiters


async def test_decorated_function_that_calls_itself_runs(locks: LockClient, redis: Redis) -> None:
    """`locked` takes the option as it takes all of a lock's."""

    @locks.locked("n", reentrant=True)
    async def countdown(n: int) -> int:
        return 0 if n == 0 else 1 + await countdown(n - 1)

    assert await countdown(20) == 20
    assert await is_free(redis)


# Loss.


async def test_lost_lease_cancels_the_body_once_and_comes_out_of_every_block(
    short: Lock, redis: Redis
) -> None:
    """The inner block raises; where that is caught, the outer one does, at its end."""
    cancels = 0
    told: list[LostReason] = []
    with pytest.raises(LeaseLostError) as outer:
        async with short.acquire():
            try:
                async with short:
                    await redis.delete(KEY)
                    try:
                        await forever()
                    except asyncio.CancelledError:
                        cancels += 1
                        await asyncio.sleep(0.002)  # it may clean up
                        raise
            except LeaseLostError as error:
                told.append(error.reason)
            await asyncio.sleep(0.002)
    task = asyncio.current_task()
    assert task is not None
    assert (cancels, told, task.cancelling()) == (1, [LostReason.DELETED], 0)
    assert outer.value.reason is LostReason.DELETED


async def test_lost_lease_without_a_block_does_not_stand_in_the_way(
    locks: LockClient, redis: Redis
) -> None:
    """A loop that acquires again after a loss gets a new lease."""
    lock = locks.lock("x", reentrant=True, ttl=0.3)
    first = await lock.acquire()
    await redis.delete("aiodlock:{x}")
    assert await first.wait_lost() is LostReason.DELETED
    second = await lock.acquire(wait_timeout=5)
    assert second.fencing_token > first.fencing_token
    await second.release()
    await first.release()


async def test_lost_lease_entered_again_raises_rather_than_waits(
    again: Lock, locks: LockClient, redis: Redis
) -> None:
    """A new lease would hide the loss from the block around; a new task gets a new one."""
    with pytest.raises(LeaseLostError):
        async with again as lease:
            await redis.delete(KEY)
            with pytest.raises(LeaseLostError):
                await lease.extend()
            for way in (again.acquire, again.try_acquire, again.__aenter__):
                with pytest.raises(LeaseLostError) as lost:
                    await way()
                assert lost.value.fencing_token == lease.fencing_token
            async with asyncio.TaskGroup() as group:
                group.create_task(enter(again))
    async with again as next_lease:
        assert next_lease.fencing_token > lease.fencing_token


async def enter(lock: Lock) -> None:
    """Its turn comes, and it goes."""
    async with lock.acquire(wait_timeout=5):
        pass


async def test_lease_lost_between_inner_blocks_tells_the_outer_one(
    short: Lock, redis: Redis
) -> None:
    """The inner block has ended well, and its end gave nothing back."""
    with pytest.raises(LeaseLostError):
        async with short:
            async with short:
                pass
            await redis.delete(KEY)
            await forever()


async def test_body_that_fails_in_the_inner_block_keeps_the_lock_to_the_outer_end(
    again: Lock, redis: Redis
) -> None:
    """Its own error comes out of both, untouched."""
    error = ValueError("the body's own")
    with pytest.raises(ValueError, match="own") as raised:
        async with again:
            try:
                async with again:
                    raise error
            finally:
                assert not await is_free(redis)
    assert raised.value is error
    assert await is_free(redis)


async def test_cancel_from_outside_in_the_inner_block_passes_through_both(
    again: Lock, redis: Redis
) -> None:
    """It is nobody's loss."""

    async def work() -> None:
        async with again, again:
            inside.set()
            await forever()

    inside = asyncio.Event()
    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await is_free(redis)


# Ends of other kinds.


async def test_closing_client_waits_for_the_outermost_block(
    make_client: MakeClient, redis: Redis
) -> None:
    """The inner block's end releases nothing; the outer one's does, and the key is gone then."""
    locks = make_client()
    again = locks.lock("n", reentrant=True)
    inside, seen = asyncio.Event(), list[bool]()

    async def work() -> None:
        try:
            async with again:
                try:
                    async with again:
                        inside.set()
                        await forever()
                finally:
                    seen.append(await is_free(redis))
        finally:
            seen.append(await is_free(redis))

    task = asyncio.create_task(work())
    await inside.wait()
    await locks.aclose()
    with pytest.raises(LeaseLostError) as lost:
        await task
    assert lost.value.reason is LostReason.CLOSED
    assert seen == [False, True]


async def test_closing_client_releases_what_was_acquired_twice_and_never_entered(
    make_client: MakeClient, redis: Redis
) -> None:
    """Also where blocks were left, but an acquisition was kept."""
    locks = make_client()
    again = locks.lock("n", reentrant=True)
    lease = await again.acquire()
    async with again:
        pass
    await again.acquire()
    await locks.aclose()
    assert lease.state == "released"
    assert await is_free(redis)


async def test_fixture_that_ends_in_another_task_leaves_every_entry(
    again: Lock, redis: Redis
) -> None:
    """Nested blocks of one lock, of which all are the same lease: none is unclear."""

    async def fixture() -> AsyncGenerator[Lease]:
        async with again as lease, again:
            yield lease

    held = fixture()
    lease = await asyncio.create_task(held.__anext__())
    assert lease.is_held
    with pytest.raises(StopAsyncIteration):
        await asyncio.create_task(held.__anext__())
    assert lease.state == "released"
    assert await is_free(redis)


async def test_lease_thrown_away_by_its_task_warns_and_may_be_acquired_anew(
    again: Lock, redis: Redis
) -> None:
    """The list of reentrant leases keeps none alive."""
    held = {await again.acquire(), await again.acquire()}
    assert len(held) == 1
    with pytest.warns(ResourceWarning, match="thrown away"):
        held.clear()
    await until(lambda: not watchdogs())
    assert await again.try_acquire() is None  # it stands until its ttl is over
    await redis.delete(KEY)
    async with again as anew:
        assert anew.is_held


async def test_generator_that_is_closed_within_nested_blocks_releases(
    again: Lock, redis: Redis
) -> None:
    """Both blocks see the end of the generator, and the outer one gives the lock back."""

    async def numbers() -> AsyncGenerator[int]:
        async with again, again:
            yield 1

    generator = numbers()
    assert await anext(generator) == 1
    await generator.aclose()
    await until(lambda: is_free(redis))


async def test_coroutine_that_is_destroyed_within_nested_blocks_is_released_by_its_loop(
    again: Lock, redis: Redis
) -> None:
    """It cannot await; the lock is given back in the background."""

    async def work() -> None:
        async with again, again:
            await asyncio.sleep(0)
            await asyncio.Event().wait()

    coroutine: Any = work()
    for _ in range(200):
        waits_for = coroutine.send(None)
        if waits_for is None and not await is_free(redis):
            break
        if waits_for is not None:
            waits_for._asyncio_future_blocking = False
            await asyncio.wait([waits_for])
    assert not await is_free(redis)
    coroutine.close()
    await until(lambda: is_free(redis))


async def test_reply_lost_at_the_last_release_is_asked_for_again(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The inner ends sent nothing, so nothing of theirs could be lost."""
    locks = make_client(proxy.url)
    again = locks.lock("n", reentrant=True)
    async with again, again:
        fault = proxy.drop_replies(1, b"EVALSHA", close=True)
    await until(lambda: is_free(redis))
    assert fault.hits == 1
    async with again.acquire(wait_timeout=5):
        pass


# Without the option.


@pytest.mark.parametrize("is_same", [True, False], ids=["same object", "second object"])
@pytest.mark.parametrize("retry", [None, Backoff()], ids=["hand-off", "polling"])
async def test_plain_lock_entered_again_without_an_end_is_refused_at_once(
    locks: LockClient, redis: Redis, retry: Backoff | None, *, is_same: bool
) -> None:
    """Told what to do instead; the lease goes on, and nobody stands in the queue."""
    lock = locks.lock("n", retry=retry)
    inner = lock if is_same else locks.lock("n", retry=retry)

    async def try_for_ever() -> object:
        return await inner.try_acquire(wait_timeout=None)

    async with lock as lease:
        for way in (inner.__aenter__, inner.acquire, try_for_ever):
            with pytest.raises(RuntimeError, match=f"{HELD_TWICE}.*reentrant=True"):
                await way()
        await until(lambda: are_queued(redis, 0))
        lease.check()
    await until(lambda: is_empty(redis))


async def is_empty(redis: Redis) -> bool:
    """Whether nothing of the name is left but its fencing token."""
    return await leftovers(redis) == []


async def test_reentrant_and_plain_locks_of_one_name_exclude_each_other(
    locks: LockClient, again: Lock
) -> None:
    """Entering a lease again takes that option at both places, and says so."""
    plain = locks.lock("n")
    async with again:
        with pytest.raises(RuntimeError, match=HELD_TWICE):
            await plain.acquire()
    async with plain:
        with pytest.raises(RuntimeError, match=HELD_TWICE):
            await again.acquire()


@pytest.mark.parametrize(
    ("outer", "wait_timeout"),
    [
        ({}, 0.05),
        ({}, 0),
        ({"auto_extend": False}, 0.05),
        ({"max_hold": 60}, 0.05),
    ],
    ids=["finite", "one request", "it ends by itself", "it ends by max_hold"],
)
async def test_wait_for_oneself_that_has_an_end_is_an_ordinary_timeout(
    locks: LockClient, outer: dict[str, Any], wait_timeout: float
) -> None:
    """It does not hang, so nothing is wrong with it."""
    async with locks.lock("n", **outer):
        with pytest.raises(LockTimeout):
            await locks.lock("n").acquire(wait_timeout=wait_timeout)


@pytest.mark.parametrize("outer", [{"auto_extend": False, "ttl": 0.2}, {"max_hold": 0.3}])
async def test_wait_for_oneself_that_ends_with_the_lease_is_granted(
    make_client: MakeClient, outer: dict[str, Any]
) -> None:
    """For ever, but what it waits for is not."""
    locks = make_client(ttl=0.2)
    with pytest.raises(LeaseLostError):
        async with locks.lock("n", on_lost="raise", **outer), asyncio.timeout(5):
            await (await locks.lock("n", ttl=0.2).acquire(wait_timeout=None)).release()


async def test_task_that_waits_for_another_task_is_not_refused(
    locks: LockClient, redis: Redis
) -> None:
    """Nor one whose own lease was never entered, for another task may release that."""
    lease = await locks.lock("n").acquire()
    waiting = asyncio.create_task(locks.lock("n").acquire())
    await until(lambda: are_queued(redis, 1))
    await lease.release()
    async with await waiting as second:
        third = asyncio.create_task(locks.lock("n").acquire())
        await asyncio.sleep(0)
        # Asked behind the third's request, and answered behind it.
        assert (await locks.lock("n").inspect()).waiters == 1
        assert second.is_held
    await (await third).release()


# Over a quorum.


@pytest.fixture(scope="module")
def servers() -> Any:
    """Three that know nothing of each other."""
    with lock_server() as one, lock_server() as two, lock_server() as three:
        yield one, two, three


async def test_quorum_keeps_the_rules_of_entering_again(
    servers: tuple[LockServer, ...],
) -> None:
    """The same lease again; and a plain lock is refused at its first answer, with nothing left."""
    urls = [server.url for server in servers]
    async with LockClient.quorum(urls) as locks, LockClient.quorum(urls) as others:
        async with locks.lock("n", reentrant=True) as lease:
            async with locks.lock("n", reentrant=True) as inner:
                assert inner is lease
            assert await others.lock("n").try_acquire() is None
            with pytest.raises(RuntimeError, match=HELD_TWICE):
                await locks.lock("n").acquire()
        async with others.lock("n").acquire(wait_timeout=5):
            pass


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_reentrant_that_is_no_bool_is_refused(locks: LockClient, value: object) -> None:
    """At construction."""
    with pytest.raises(TypeError, match="reentrant must be True or False"):
        locks.lock("n", reentrant=value)  # type: ignore[arg-type]
