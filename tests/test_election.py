"""One leader out of many candidates: in turn, told of its end, seen by others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Backoff,
    Leader,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    NameTakenError,
    Term,
)
from aiodlock.testing import LockServer, lock_server
from tests.conftest import MakeClient
from tests.holders import KEY
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until
from tests.workers import Worker


async def are_queued(redis: Redis, candidates: int) -> bool:
    """Whether so many wait for their turn."""
    return int(await redis.zcard(f"{KEY}:queue")) == candidates


async def test_candidates_lead_one_at_a_time_in_the_order_in_which_they_came(
    make_client: MakeClient, redis: Redis
) -> None:
    """Of several clients; each term has a larger number, and the next begins at once."""
    terms: list[tuple[int, int]] = []
    ends = [asyncio.Event() for _ in range(4)]

    async def stand(candidate: int, locks: LockClient) -> None:
        async with locks.election("n") as term:
            assert term.is_leading
            terms.append((candidate, term.number))
            await ends[candidate].wait()

    tasks = []
    for candidate in range(4):
        tasks.append(asyncio.create_task(stand(candidate, make_client())))
        await until(lambda: terms)
        await until(lambda waiting=candidate: are_queued(redis, waiting))  # type: ignore[misc]
    for candidate in range(4):
        await until(lambda so_many=candidate + 1: len(terms) == so_many, 1.0)  # type: ignore[misc]
        ends[candidate].set()
    await asyncio.gather(*tasks)
    assert [candidate for candidate, _ in terms] == [0, 1, 2, 3]
    numbers = [number for _, number in terms]
    assert numbers == sorted(set(numbers))
    assert await leftovers(redis) == []


async def test_observer_sees_who_leads(make_client: MakeClient, redis: Redis) -> None:
    """From any client, by one call; nobody before and after the term."""
    locks, others = make_client(label="web-1"), make_client()
    election = others.election("n")
    assert await election.leader() is None
    async with locks.election("n") as term:
        leader = await election.leader()
        assert leader is not None
        assert leader.holder.startswith("web-1:")
        assert leader.number == term.number
        assert await locks.election("n").leader() == leader
    assert await election.leader() is None
    await redis.set(KEY, "another's", px=5_000)
    assert await election.leader() == Leader("another's", None)
    assert election.name == "n"
    await redis.delete(KEY)
    await redis.rpush(KEY, "not a lock")
    with pytest.raises(NameTakenError):
        await election.leader()


async def test_lock_and_election_of_one_name_exclude_each_other(
    make_client: MakeClient,
) -> None:
    """It is the same key, of the same kind."""
    locks, others = make_client(), make_client()
    async with locks.election("n") as term:
        assert await others.lock("n").try_acquire() is None
        with pytest.raises(RuntimeError, match="holds the lock 'n' already"):
            async with locks.election("n"):
                pytest.fail("leads twice")
        assert term.is_leading
    async with others.lock("n") as lease:
        assert await locks.election("n").leader() == Leader(lease.holder, lease.fencing_token)
        with pytest.raises(LockTimeout):
            async with locks.election("n", wait_timeout=0.05):
                pytest.fail("elected")


async def test_leader_that_is_deposed_is_told_once_and_knows_why(
    make_client: MakeClient, redis: Redis
) -> None:
    """Its body is cancelled; the next candidate leads with a larger number."""
    locks, cancels = make_client(ttl=0.3), 0
    with pytest.raises(LeaseLostError) as lost:
        async with locks.election("n") as term:
            watching = asyncio.create_task(term.wait_ended())
            await asyncio.sleep(0)
            term.check()
            await make_client().lock("n").break_lock(fencing_token=term.number)
            try:
                await forever()
            except asyncio.CancelledError:
                cancels += 1
                await asyncio.sleep(0.002)
                raise
    assert (lost.value.reason, lost.value.fencing_token) == (LostReason.DELETED, term.number)
    assert await watching is LostReason.DELETED
    assert (cancels, term.is_leading) == (1, False)
    with pytest.raises(LeaseLostError):
        term.check()
    async with locks.election("n") as later:
        assert later.number > term.number


async def test_leader_whose_server_is_silent_is_told_by_its_own_clock(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Before another can lead."""
    locks = make_client(proxy.url, ttl=0.4, request_timeout=0.2)
    with pytest.raises(LeaseLostError) as lost:
        async with locks.election("n") as term:
            with pytest.raises(LeaseLostError) as short:
                term.check(min_left=60)
            proxy.black_hole()
            await forever()
    assert short.value.reason is LostReason.TOO_LITTLE_TIME
    assert lost.value.reason is LostReason.UNREACHABLE


async def test_term_that_was_resigned_has_no_reason(locks: LockClient) -> None:
    """Leaving the block is no loss."""
    async with locks.election("n") as term:
        watching = asyncio.create_task(term.wait_ended())
        await asyncio.sleep(0)
    assert await watching is None
    assert not term.is_leading
    with pytest.raises(RuntimeError, match="was released"):
        term.check()


async def test_term_that_lasts_too_long_ends(make_client: MakeClient) -> None:
    """`max_hold` is the length of a term; `on_lost` is that of a lock."""
    locks = make_client(ttl=0.2)
    with pytest.raises(LeaseLostError) as lost:
        async with locks.election("n", max_hold=0.3, on_lost="raise") as term:
            await until(lambda: not term.is_leading)
            await asyncio.sleep(0.01)
    assert lost.value.reason is LostReason.MAX_HOLD


async def test_leader_that_is_killed_is_succeeded_when_its_ttl_is_over(
    server: LockServer, locks: LockClient
) -> None:
    """A process that is gone at once, and said nothing."""
    async with Worker(server.url, ttl=0.5) as worker:
        await worker.asks_for("n")
        election = locks.election("n", ttl=0.5, wait_timeout=10)
        await until(election.leader)
        first = await election.leader()
        assert first is not None
        assert first.number is not None
        worker.kill()
        async with election as term:
            assert term.number > first.number


async def test_candidate_that_is_cancelled_leaves_the_queue(
    make_client: MakeClient, redis: Redis
) -> None:
    """And one that leads resigns by that."""
    locks = make_client()

    async def stand() -> None:
        async with locks.election("n", retry=Backoff()):
            await forever()

    tasks = [asyncio.create_task(stand()) for _ in range(3)]
    await until(lambda: are_queued(redis, 2))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert await leftovers(redis) == []


async def test_election_shared_by_tasks_and_fixtures_knows_which_term_ends(
    locks: LockClient, redis: Redis
) -> None:
    """As a lock does."""
    election = locks.election("n")

    async def fixture() -> AsyncGenerator[Term]:
        async with election as term:
            yield term

    held = fixture()
    term = await asyncio.create_task(held.__anext__())
    waiting = asyncio.create_task(stand_once(election))
    await until(lambda: are_queued(redis, 1))
    with pytest.raises(StopAsyncIteration):
        await asyncio.create_task(held.__anext__())
    assert await waiting > term.number
    assert await leftovers(redis) == []


async def stand_once(election: Any) -> int:
    """The number of its term."""
    async with election as term:
        return int(term.number)


@pytest.fixture(scope="module")
def servers() -> Any:
    """Three that know nothing of each other."""
    with lock_server() as one, lock_server() as two, lock_server() as three:
        yield one, two, three


async def test_quorum_elects_one_and_shows_it(servers: tuple[LockServer, ...]) -> None:
    """Without fencing a term has no number."""
    urls = [server.url for server in servers]
    async with LockClient.quorum(urls) as locks, LockClient.quorum(urls, fencing=False) as plain:
        async with locks.election("n") as term:
            leader = await locks.election("n").leader()
            assert leader is not None
            assert leader.number == term.number
        async with plain.election("n", wait_timeout=5) as term:
            leader = await plain.election("n").leader()
            assert leader is not None
            assert leader.number is None
            with pytest.raises(RuntimeError, match="no fencing token"):
                _ = term.number


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda locks: locks.election(""), ValueError),
        (lambda locks: locks.election(b"n"), TypeError),
        (lambda locks: locks.election("n", ttl=math.nan), ValueError),
        (lambda locks: locks.election("n", ttl=5, max_hold=4), ValueError),
        (lambda locks: locks.election("n", retry=0.1), TypeError),
        (lambda locks: locks.election("n", wait_timeout=-1), ValueError),
        (lambda locks: locks.election("n", on_lost="shout"), ValueError),
    ],
)
def test_argument_that_is_not_allowed_is_refused_at_construction(
    locks: LockClient, make: Callable[[Any], object], error: type[Exception]
) -> None:
    """As those of a lock are."""
    with pytest.raises(error):
        make(locks)
