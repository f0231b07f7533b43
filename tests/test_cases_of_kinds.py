"""The cases of other users that every kind of lock can meet: 099, 101 and 114 of the catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, TypeAlias

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, LockClient, LockTimeout
from aiodlock._all import AllLeases
from aiodlock._election import Term
from aiodlock.fencing import RedisFence, StaleFenceError
from tests import wire
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until

Open: TypeAlias = Callable[[LockClient], AbstractAsyncContextManager[Any]]

KEY: Final = "aiodlock:{n}"
HANGS_S: Final = 10.0
"""What takes longer would wait for itself for ever."""

KINDS: Final[dict[str, Open]] = {
    "lock": lambda locks: locks.lock("n", on_lost="raise"),
    "reentrant lock": lambda locks: locks.lock("n", reentrant=True, on_lost="raise"),
    "kept for a while": lambda locks: locks.lock("n", hold_at_least=0.05, on_lost="raise"),
    "one of several names": lambda locks: locks.all("m", "n", on_lost="raise"),
    "election": lambda locks: locks.election("n", on_lost="raise"),
    "reader": lambda locks: locks.reader("n", on_lost="raise"),
    "writer": lambda locks: locks.writer("n", on_lost="raise"),
    "permit of one": lambda locks: locks.semaphore("n", permits=1, on_lost="raise"),
    "permit of two": lambda locks: locks.semaphore("n", permits=2, on_lost="raise"),
}
OF_LOCKS: Final = "holds the lock '[mn]' already"
REFUSED: Final = {
    "lock": OF_LOCKS,
    "kept for a while": OF_LOCKS,
    "one of several names": OF_LOCKS,
    "election": OF_LOCKS,
    "writer": "enter once",
    "permit of one": "it has every permit",
}


def lease_of(entered: Lease | AllLeases | Term) -> Lease:
    """That of the name "n", whatever the block was given."""
    if isinstance(entered, AllLeases):
        return entered["n"]
    return entered._lease if isinstance(entered, Term) else entered


async def is_free(redis: Redis) -> bool:
    """Whether nothing of any kind is left."""
    return await leftovers(redis, ignoring_tombstones=True) == []


@pytest.mark.parametrize("is_same", [True, False], ids=["same object", "second object"])
@pytest.mark.parametrize("kind", REFUSED)
async def test_case_099_task_that_would_wait_for_itself_is_told_so_by_every_kind(
    locks: LockClient, redis: Redis, kind: str, *, is_same: bool
) -> None:
    """Not a hang; and what it has it keeps."""
    first = KINDS[kind](locks)
    async with first as entered:
        with pytest.raises(RuntimeError, match=REFUSED[kind]):
            async with asyncio.timeout(HANGS_S), first if is_same else KINDS[kind](locks):
                pytest.fail("entered")
        lease_of(entered).check()
    await until(lambda: is_free(redis))


@pytest.mark.parametrize("kind", REFUSED)
async def test_task_that_was_told_so_has_left_the_queue(
    proxy: ChaosProxy, make_client: MakeClient, redis: Redis, kind: str
) -> None:
    """By then: nobody waits any more."""
    locks = make_client(proxy.url)
    async with KINDS[kind](locks):
        for script in ("release", "share_release"):
            proxy.delay_requests(0.1, wire.sha(script))
        with pytest.raises(RuntimeError, match=REFUSED[kind]):
            await KINDS[kind](locks).__aenter__()
        assert [key async for key in redis.scan_iter("*:queue")] == []


async def test_reader_that_could_not_become_the_writer_reads_on(locks: LockClient) -> None:
    """It is not told that a writer waits, when that is the one that it would have been."""
    async with locks.reader("n"):
        with pytest.raises(RuntimeError, match="a reader cannot become the writer"):
            await locks.writer("n").acquire()
        async with locks.reader("n"):
            pass


async def test_task_that_is_cancelled_while_it_leaves_the_queue_is_cancelled(
    proxy: ChaosProxy, make_client: MakeClient, redis: Redis
) -> None:
    """What it was about to be told does not take the place of the cancel."""
    locks = make_client(proxy.url)

    async def upgrade() -> None:
        async with locks.reader("n"):
            await locks.writer("n").acquire()

    late = proxy.delay_requests(0.3, wire.sha("share_release"))
    upgrading = asyncio.create_task(upgrade())
    await late.used.wait()
    upgrading.cancel()
    await asyncio.wait([upgrading])
    assert upgrading.cancelled()
    await until(lambda: is_free(redis))


@pytest.mark.parametrize(
    ("held", "asked", "told"),
    [
        ("reader", "writer", "a reader cannot become the writer"),
        ("writer", "reader", r"lease\.downgrade\(\)"),
        ("reader", "reader", "a writer waits between"),
    ],
    ids=["upgrade", "writer that reads", "writer between"],
)
async def test_case_099_reader_or_writer_that_would_wait_for_its_task_is_told_so(
    locks: LockClient, redis: Redis, held: str, asked: str, told: str
) -> None:
    """The one through the other, and a reader behind a writer who waits for it."""
    async with KINDS[held](locks) as lease:
        waiting = asyncio.create_task(locks.writer("n").acquire())
        await until(lambda: redis.zcard(f"{KEY}:queue"))
        with pytest.raises(RuntimeError, match=told):
            async with asyncio.timeout(HANGS_S), KINDS[asked](locks):
                pytest.fail("entered")
        lease.check()
    await (await waiting).release()
    await until(lambda: is_free(redis))


@pytest.mark.parametrize("is_same", [True, False], ids=["same object", "second object"])
@pytest.mark.parametrize("kind", ["reentrant lock", "reader", "permit of two"])
async def test_case_099_task_for_which_there_is_room_enters_again(
    locks: LockClient, redis: Redis, kind: str, *, is_same: bool
) -> None:
    """Where several may hold it is another lease; of a reentrant lock it is the same."""
    first = KINDS[kind](locks)
    async with asyncio.timeout(HANGS_S), first as outer:
        async with first if is_same else KINDS[kind](locks) as inner:
            assert (inner is outer) is (kind == "reentrant lock")
            inner.check()
        outer.check()
    await until(lambda: is_free(redis))


@pytest.mark.parametrize("kind", ["reader", "permit of two"])
async def test_case_101_names_with_room_for_two_are_taken_in_any_order(
    make_client: MakeClient, redis: Redis, kind: str
) -> None:
    """A takes [x, y] and B takes [y, x], 200 rounds each: nobody waits for anybody."""

    def open_(locks: LockClient, name: str) -> AbstractAsyncContextManager[Lease]:
        if kind == "reader":
            return locks.reader(name)
        return locks.semaphore(name, permits=2)

    rounds = {"A": 0, "B": 0}

    async def work(who: str, first: str, second: str) -> None:
        async with make_client(label=who) as locks:
            for _ in range(200):
                async with open_(locks, first), open_(locks, second):
                    await asyncio.sleep(0)
                    rounds[who] += 1

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(work("A", "x", "y"))
        group.create_task(work("B", "y", "x"))
    assert rounds == {"A": 200, "B": 200}
    assert await leftovers(redis) == []


NESTED: Final[dict[str, Callable[[LockClient, str, int], Any]]] = {
    "locks": lambda locks, name, _: locks.lock(name),
    "writers": lambda locks, name, _: locks.writer(name),
    "permits of one": lambda locks, name, _: locks.semaphore(name, permits=1),
    "a reader of what the other writes": lambda locks, name, turn: (
        locks.writer(name) if turn == 0 else locks.reader(name)
    ),
}


@pytest.mark.parametrize("kind", NESTED)
async def test_case_101_two_who_wait_for_each_other_end_in_the_time_of_one(
    make_client: MakeClient, redis: Redis, kind: str
) -> None:
    """One by one, in different orders, no library can sort them: `wait_timeout` ends it."""
    both_hold = asyncio.Barrier(2)

    async def work(who: str, first: str, second: str, wait_timeout: float) -> str:
        locks = make_client(label=who)
        async with NESTED[kind](locks, first, 0):
            await both_hold.wait()
            try:
                async with NESTED[kind](locks, second, 1).acquire(wait_timeout=wait_timeout):
                    return "both"
            except LockTimeout as error:
                return f"held by {(error.holder or '').partition(':')[0]}"

    async with asyncio.timeout(60):
        ended = await asyncio.gather(work("A", "x", "y", 0.3), work("B", "y", "x", 30))
    assert list(ended) == ["held by B", "both"]
    await until(lambda: is_free(redis))


async def renew(entered: Any) -> None:
    """Everything that is no new grant."""
    lease = lease_of(entered)
    await lease.extend(60)
    if lease.owner_token.endswith("w"):
        await lease.downgrade()


@pytest.mark.parametrize("kind", KINDS)
async def test_case_114_late_holder_of_every_kind_is_refused_by_its_number(
    make_client: MakeClient, redis: Redis, kind: str
) -> None:
    """It grows by each grant and by nothing else; past the end of the key, and of the counter."""
    ours, others = make_client(), make_client()
    fence = RedisFence(redis)
    with pytest.raises(LeaseLostError):
        async with KINDS[kind](ours) as entered:
            late = lease_of(entered)
            number = late.fencing_token
            await renew(entered)
            if kind == "reentrant lock":
                await enter_again(ours, number)
            assert late.fencing_token == number
            # As if the holder had slept past its ttl, and the others had not.
            await redis.delete(*await leftovers(redis))
            async with KINDS[kind](others) as next_one:
                newer = lease_of(next_one).fencing_token
                await fence.claim(lease_of(next_one))
                with pytest.raises(StaleFenceError):
                    await fence.claim(late)
    assert late.state == "lost"
    await redis.flushall()
    async with KINDS[kind](ours) as entered:
        assert number < newer < lease_of(entered).fencing_token


async def enter_again(locks: LockClient, number: int) -> None:
    """The same lease, with the same number."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            again = await stack.enter_async_context(KINDS["reentrant lock"](locks))
            assert again.fencing_token == number
