"""Permits: how many may hold a name at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import LeaseLostError, LockClient, LostReason
from aiodlock.testing import LockServer, lock_server
from tests import wire
from tests.by_hand import ONE, OTHER, THIRD
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers
from tests.mutants import Mutant
from tests.proxy import ChaosProxy
from tests.shared_by_hand import SharedByHand
from tests.steps import cancel_at_every_step
from tests.until import until

SOON_S = 1.0
"""Sooner than any waiter polls by itself when the ttl is 30 s."""

KEY = "aiodlock:{x}"
PERMITS = 10
TASKS = 1000


@pytest.fixture
async def hand(redis: Redis) -> SharedByHand:
    """The name `x`, by hand."""
    return SharedByHand(redis)


async def waiting(redis: Redis, count: int) -> None:
    """Return once so many stand in the queue."""

    async def are_there() -> bool:
        return int(await redis.zcard(f"{KEY}:queue")) == count

    await until(are_there)


async def test_thousand_tasks_with_ten_permits_are_never_more_than_ten_inside(
    redis: Redis, make_client: MakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its turns, and a cycle costs about two calls."""
    clients = [make_client(), make_client()]
    inside, most = 0, 0
    turns = [0] * TASKS
    is_over = asyncio.Event()
    all_wait = asyncio.Event()

    async def work(number: int) -> None:
        nonlocal inside, most
        lock = clients[number % 2].semaphore("x", permits=PERMITS)
        while not is_over.is_set():
            async with lock.acquire(wait_timeout=60):
                inside += 1
                most = max(most, inside)
                await all_wait.wait()
                turns[number] += 1
                await asyncio.sleep(0)
                inside -= 1

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
        await until(lambda: _queue_is(redis, TASKS - PERMITS), 30)
        calls, began_at = await wire.calls(redis, "evalsha"), time.monotonic()
        all_wait.set()
        await until(lambda: sum(turns) >= 5 * TASKS, 60)
        cycles, seconds = sum(turns), time.monotonic() - began_at
        calls = await wire.calls(redis, "evalsha") - calls
        counted = list(turns)
        is_over.set()
    jain = sum(counted) ** 2 / (len(counted) * sum(turn * turn for turn in counted))
    with capsys.disabled():
        print(
            f"\n{PERMITS} permits, {TASKS} tasks, {cycles} cycles in {seconds:.1f} s: "
            f"at most {most} inside, Jain {jain:.4f}, {calls / cycles:.2f} EVALSHA per cycle"
        )
    assert most == PERMITS
    assert jain >= 0.99
    # A waiter polls each 2 s beside that, while its wait is longer.
    assert calls / cycles <= 2.3 + seconds / 1.8 * TASKS / cycles
    assert await leftovers(redis) == []


async def _queue_is(redis: Redis, count: int) -> bool:
    return int(await redis.zcard(f"{KEY}:queue")) == count


async def test_cycle_of_short_waits_costs_little_more_than_two_calls(
    redis: Redis, make_client: MakeClient
) -> None:
    """Forty tasks in two clients: nobody waits as long as a poll."""
    clients = [make_client(), make_client()]
    cycles = 0
    calls = await wire.calls(redis, "evalsha")

    async def work(locks: LockClient) -> None:
        nonlocal cycles
        for _ in range(50):
            async with locks.semaphore("x", permits=4).acquire(wait_timeout=30):
                await asyncio.sleep(0)
                cycles += 1

    await asyncio.gather(*(work(clients[number % 2]) for number in range(40)))
    assert cycles == 2000
    assert (await wire.calls(redis, "evalsha") - calls) / cycles <= 2.3


async def test_permits_are_given_by_arrival_and_as_many_as_there_is_room_for(
    redis: Redis, make_client: MakeClient
) -> None:
    """Three inside, four wait: two releases let the first two in, by message."""
    ours, others = make_client(), make_client()
    leases = [await ours.semaphore("x", permits=3).acquire() for _ in range(3)]
    assert await others.semaphore("x", permits=3).try_acquire() is None
    tasks = []
    for number in range(4):
        locks = (ours, others)[number % 2]
        tasks.append(asyncio.create_task(locks.semaphore("x", permits=3).acquire()))
        await waiting(redis, number + 1)
    await until(lambda: hears(ours) and hears(others))
    released_at = time.monotonic()
    await leases[0].release()
    await leases[1].release()
    first = await asyncio.gather(*tasks[:2])
    assert time.monotonic() - released_at < SOON_S
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in tasks[2:])
    told = await ours.semaphore("x", permits=3).inspect()
    assert [holder.access for holder in told.holders] == ["permit"] * 3
    assert told.waiters == 2
    for lease in (leases[2], *first):
        await lease.release()
    for task in tasks[2:]:
        await (await task).release()
    assert await leftovers(redis) == []


async def test_permit_of_a_crashed_holder_comes_back_by_its_ttl(
    hand: SharedByHand, locks: LockClient
) -> None:
    """The others keep theirs."""
    lock = locks.semaphore("x", permits=2)
    async with lock as lease:
        await hand.enter(f"{OTHER}:1s2", ttl_ms=200)
        began_at = time.monotonic()
        waiter = asyncio.create_task(lock.acquire(wait_timeout=10))
        async with await waiter:
            assert 0.1 < time.monotonic() - began_at < SOON_S
            assert lease.is_held
    assert await leftovers(hand.redis) == []


async def test_two_deployments_with_different_permits_let_in_the_smaller_number(
    redis: Redis, make_client: MakeClient
) -> None:
    """Whoever bears two is never inside with more than one other; without it there is room."""
    old, new = make_client(), make_client()
    few, many = old.semaphore("x", permits=2), new.semaphore("x", permits=3)
    first, second = await few.acquire(), await many.acquire()
    assert await many.try_acquire() is None
    assert await few.try_acquire() is None
    entering = [asyncio.create_task(many.acquire(wait_timeout=20)) for _ in range(2)]
    await waiting(redis, 2)
    await first.release()  # Now nobody inside bears less than three.
    leases = await asyncio.gather(*entering)
    assert await few.try_acquire() is None
    waiter = asyncio.create_task(few.acquire(wait_timeout=20))
    await waiting(redis, 1)
    await second.release()
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await leases[0].release()
    await (await waiter).release()
    await leases[1].release()
    assert await leftovers(redis) == []


async def test_task_with_every_permit_that_asks_for_one_more_is_refused(
    locks: LockClient,
) -> None:
    """It would wait for itself; with permits in other hands it waits for those."""
    lock = locks.semaphore("x", permits=2)
    async with lock, lock:
        with pytest.raises(RuntimeError, match="it has every permit"):
            await lock.acquire()
    async with lock:
        other = await asyncio.create_task(lock.acquire())
        waiter = lock.acquire(wait_timeout=10)
        asyncio.get_running_loop().call_later(0.1, asyncio.ensure_future, other.release())
        async with waiter:
            pass


async def test_permit_is_extended_and_lost_by_itself(redis: Redis, locks: LockClient) -> None:
    """Each lease has a watchdog of its own."""
    lock = locks.semaphore("x", permits=2, ttl=0.4)
    async with lock as kept:
        with pytest.raises(LeaseLostError) as error:
            async with lock.acquire() as lost:
                await redis.zrem(KEY, lost.owner_token)
                await asyncio.sleep(5)
        assert error.value.reason is LostReason.DELETED
        await asyncio.sleep(0.6)
        assert kept.is_held
    assert await leftovers(redis) == []


async def test_permit_whose_release_was_not_answered_is_free(
    redis: Redis, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The release is sent again; it frees no second permit."""
    locks, others = make_client(proxy.url), make_client()
    lock = locks.semaphore("x", permits=2)
    async with lock:
        lease = await lock.acquire()
        lost = wire.lose(proxy, "share_release")
        await lease.release()
        assert lost.hits == 1
        assert len((await others.semaphore("x", permits=2).inspect()).holders) == 1
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_semaphore_acquire_cancelled_anywhere_leaves_nothing(
    redis: Redis, make_client: MakeClient
) -> None:
    """Waiting for one of two permits, at each await, in each way."""
    ours, rival = make_client(), make_client()
    lock = ours.semaphore("x", permits=2)
    handing: list[asyncio.Task[None]] = []

    async def hold_for_a_while() -> None:
        leases = [await rival.semaphore("x", permits=2).acquire() for _ in range(2)]
        handing.append(asyncio.create_task(give_up(leases)))

    async def give_up(leases: list[Any]) -> None:
        for _ in range(100):
            if await redis.zcard(f"{KEY}:queue"):
                break
            await asyncio.sleep(0.002)
        for lease in leases:
            await lease.release()

    async def use() -> None:
        async with lock:
            await asyncio.sleep(0)

    async def after() -> None:
        while handing:
            await handing.pop()
        assert await leftovers(redis, ignoring_tombstones=True) == []

    done = await cancel_at_every_step(use, after, before=hold_for_a_while, label="semaphore")
    assert done.steps >= 3


@pytest.mark.parametrize(
    ("permits", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (10**9 + 1, ValueError),
        (True, TypeError),
        (2.0, TypeError),
        ("2", TypeError),
        (None, TypeError),
    ],
)
async def test_permits_that_are_no_number_of_permits_are_refused(
    locks: LockClient, permits: Any, error: type[Exception]
) -> None:
    """The message says what is allowed."""
    with pytest.raises(error, match="permits must be an int from 1 to 1000000000"):
        locks.semaphore("x", permits=permits)


async def test_largest_number_of_permits_is_taken(locks: LockClient) -> None:
    """And the object tells what it was given."""
    lock = locks.semaphore("x", permits=10**9)
    assert lock.permits == 10**9
    async with lock:
        pass


async def test_semaphore_over_a_quorum_is_refused_with_the_reason(server: LockServer) -> None:
    """It would let in more than its permits."""
    with lock_server() as second, lock_server() as third:
        locks = LockClient.quorum([server.url, second.url, third.url])
        with pytest.raises(ValueError, match="unsound over a quorum"):
            locks.semaphore("x", permits=2)


# The scripts by hand, each rule with the line without which it fails.


def permit(client: str, number: int, permits: int) -> str:
    """An owner token."""
    return f"{client}:{number}s{permits}"


async def check_no_more_than_permits(hand: SharedByHand) -> None:
    """By entering at once, and by being let in."""
    await hand.enter(permit(ONE, 1, 2), permit(OTHER, 1, 2))
    await hand.queue(permit(ONE, 2, 2), permit(THIRD, 1, 2), permit(THIRD, 2, 2))
    await hand.release(permit(ONE, 1, 2))
    assert len(await hand.holders()) == 2
    await hand.queue(permit(THIRD, 3, 2), permit(THIRD, 4, 2))
    await hand.let_end(*await hand.holders())
    await hand.acquire(permit(THIRD, 2, 2))
    assert len(await hand.holders()) == 2


async def check_smallest_number_counts(hand: SharedByHand) -> None:
    """Of all inside, not only of the one that ends first; and of who enters."""
    await hand.enter(permit(ONE, 1, 3), ttl_ms=10_000)
    await hand.enter(permit(OTHER, 1, 2))
    await hand.queue(permit(ONE, 2, 3))
    await hand.release(permit(THIRD, 9, 3))
    assert len(await hand.holders()) == 2
    await hand.release(permit(OTHER, 1, 2))
    assert len(await hand.holders()) == 2
    await hand.queue(permit(OTHER, 2, 2))


async def check_room_is_filled(hand: SharedByHand) -> None:
    """Two end, three wait: the next release of anybody lets two in."""
    await hand.enter(*(permit(ONE, number, 3) for number in (1, 2, 3)))
    await hand.queue(*(permit(OTHER, number, 3) for number in (1, 2, 3)))
    await hand.let_end(permit(ONE, 1, 3), permit(ONE, 2, 3))
    await hand.release(permit(THIRD, 1, 3))
    assert len(await hand.holders()) == 3
    assert (await hand.state()).queue == [permit(OTHER, 3, 3)]


CHECKS = {
    check_no_more_than_permits: [
        Mutant("share_acquire", "inside < math.min(most", "inside <= math.min(most"),
        Mutant("share_release", "inside < math.min(most", "inside <= math.min(most"),
        Mutant("share_acquire", "inside, most = inside + 1,", "inside, most = inside,"),
    ],
    check_smallest_number_counts: [
        Mutant("share_acquire", "is_semaphore and -1 or 0", "0"),
        Mutant("share_release", "is_semaphore and -1 or 0", "0"),
        Mutant("share_acquire", "inside < math.min(most, limit_of(member))", "inside < most"),
    ],
    check_room_is_filled: [
        Mutant("share_release", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
        Mutant("share_release", "\nlet_in()\n", "\n"),
        Mutant("share_release", "KEYS[1], '-inf', now_ms,", "KEYS[1], '-inf', 0,"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_semaphore_scripts_keep_the_rule(hand: SharedByHand, check: Any) -> None:
    """On a real server."""
    await check(hand)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        pytest.param(check, mutant, id=f"{check.__name__}: {mutant.old.strip()[:40]}")
        for check, mutants in CHECKS.items()
        for mutant in mutants
    ],
)
async def test_check_of_a_semaphore_rule_notices_its_line_missing(
    hand: SharedByHand, check: Any, mutant: Mutant
) -> None:
    """The negative control."""
    with mutant.applied(), pytest.raises(AssertionError):
        await check(hand)
