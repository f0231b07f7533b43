"""What names that several may hold must bear: other kinds, strangers' keys, full servers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, Lock, LockClient, LostReason, NameTakenError
from aiodlock.testing import LockServer, lock_server
from tests import quorums, wire
from tests.by_hand import OTHER, THIRD
from tests.conftest import MakeClient
from tests.keys import leftovers, ttls
from tests.proxy import ChaosProxy
from tests.quorums import Nodes
from tests.shared_by_hand import SharedByHand
from tests.until import until

KEY = "aiodlock:{x}"


@pytest.fixture
async def hand(redis: Redis) -> SharedByHand:
    """The name `x`, by hand."""
    return SharedByHand(redis)


# Other kinds.


@pytest.mark.parametrize("tail", ["r", "w", "s2"])
async def test_lock_that_is_refused_hands_a_free_name_to_nobody_who_would_share_it(
    hand: SharedByHand, locks: LockClient, tail: str
) -> None:
    """Neither its poll nor its clean-up; and the waiter enters when it polls."""
    waiter = f"{OTHER}:1{tail}"
    await hand.enter(f"{THIRD}:1w" if tail != "s2" else f"{THIRD}:1s1")
    await hand.queue(waiter)
    await hand.redis.delete(hand.keys.lock, hand.keys.grants)
    for wait_timeout in (0, 5):
        with pytest.raises(NameTakenError):
            await locks.lock("x").acquire(wait_timeout=wait_timeout)
        await asyncio.sleep(0)
        await locks._session.background.drain()  # type: ignore[union-attr]
        assert await hand.redis.exists(hand.keys.lock) == 0
    assert all(ttl_ms > 0 for ttl_ms in (await ttls(hand.redis, "")).values())
    await hand.enter(waiter)


async def test_dead_waiter_of_another_kind_keeps_nobody_out(
    hand: SharedByHand, locks: LockClient
) -> None:
    """Whoever is dead stands for no kind."""
    await hand.redis.zadd(hand.keys.queue, {f"{OTHER}:7": 5})
    await hand.redis.zadd(hand.keys.alive, {f"{OTHER}:7": 5})
    for key in (hand.keys.queue, hand.keys.alive):
        await hand.redis.pexpire(key, 10_000)
    async with locks.reader("x").acquire(wait_timeout=0):
        pass


def kinds(locks: LockClient) -> dict[str, Lock]:
    """One lock of each kind that several may hold."""
    return {
        "reader": locks.reader("x"),
        "writer": locks.writer("x"),
        "semaphore": locks.semaphore("x", permits=2),
    }


@pytest.mark.parametrize("kind", ["reader", "writer", "semaphore"])
async def test_sorted_set_of_a_stranger_is_refused_and_left_as_it_is(
    redis: Redis, locks: LockClient, kind: str
) -> None:
    """Its scores may look like instants long ago."""
    scores = {f"player {n}": n for n in range(1_500)}
    await redis.zadd(KEY, scores)
    lock = kinds(locks)[kind]
    for call in (lock.try_acquire(), lock.acquire(wait_timeout=5), lock.inspect()):
        with pytest.raises(NameTakenError):
            await call
    await locks._session.background.drain()  # type: ignore[union-attr]
    assert await redis.zcard(KEY) == len(scores)
    assert await leftovers(redis) == [KEY]


# Waiting for oneself.


async def test_reader_whose_lease_is_lost_may_wait_for_the_writer(
    redis: Redis, make_client: MakeClient
) -> None:
    """It holds nothing any more: it waits for the others."""
    ours, others = make_client(), make_client()
    with pytest.raises(LeaseLostError):
        async with ours.reader("x", on_lost="raise") as lease:
            other = await others.reader("x").acquire()
            await redis.zrem(KEY, lease.owner_token)
            with pytest.raises(LeaseLostError):
                await lease.extend()
            releasing = asyncio.create_task(_release_when_one_waits(redis, other))
            await (await ours.writer("x").acquire(wait_timeout=20)).release()
            await releasing
    assert await leftovers(redis) == []


async def _release_when_one_waits(redis: Redis, lease: Lease) -> None:
    await until(functools.partial(_one_waits, redis))
    await lease.release()


async def _one_waits(redis: Redis) -> bool:
    return int(await redis.zcard(f"{KEY}:queue")) == 1


@pytest.mark.parametrize("options", [{"auto_extend": False}, {"max_hold": 0.4}])
async def test_wait_for_an_own_share_that_ends_by_itself_is_granted(
    locks: LockClient, options: dict[str, float]
) -> None:
    """Its ttl, or its limit, is over sooner than for ever."""
    reader = locks.reader("x", ttl=0.3, on_lost="raise", **options)  # type: ignore[arg-type]
    with pytest.raises(LeaseLostError):
        async with reader, locks.writer("x", ttl=0.3).acquire(wait_timeout=20) as lease:
            lease.check()


@pytest.mark.parametrize(
    ("held", "asked", "is_refused"),
    [([1], 2, True), ([3, 3, 5], 5, True), ([3], 5, False), ([2, 2], 5, True)],
)
async def test_task_whose_own_permits_leave_no_room_is_told(
    make_client: MakeClient, held: list[int], asked: int, is_refused: bool
) -> None:
    """By the smallest number that anyone inside, or it, bears; with room it just enters."""
    locks = make_client()
    leases = [await locks.semaphore("x", permits=permits).acquire() for permits in held]
    entered = [await lease.__aenter__() for lease in leases]
    acquiring = locks.semaphore("x", permits=asked).acquire()
    if is_refused:
        with pytest.raises(RuntimeError, match="it has every permit"):
            await acquiring
    else:
        await (await acquiring).release()
    for lease in reversed(entered):
        await lease.__aexit__(None, None, None)


async def test_downgraded_writer_that_reads_again_behind_a_writer_is_told_as_a_reader(
    redis: Redis, locks: LockClient, make_client: MakeClient
) -> None:
    """It is no writer any more, so that to downgrade is no advice."""
    async with locks.writer("x") as lease:
        await lease.downgrade()
        writing = asyncio.create_task(make_client().writer("x").acquire(wait_timeout=20))
        await until(functools.partial(_one_waits, redis))
        with pytest.raises(RuntimeError, match="a writer waits between the two"):
            await locks.reader("x").acquire()
    await (await writing).release()


# Servers that refuse, and what lies between.


async def test_downgrade_of_a_key_that_became_something_else_is_a_loss(
    redis: Redis, locks: LockClient
) -> None:
    """STOLEN, as an extension says."""
    lease = await locks.writer("x").acquire()
    await redis.set(KEY, "a stranger's", px=30_000)
    with pytest.raises(LeaseLostError) as lost:
        await lease.downgrade()
    assert lost.value.reason is LostReason.STOLEN
    assert lease.state == "lost"


@pytest.fixture
def own_server() -> Iterator[LockServer]:
    """A server whose limits nobody else feels."""
    with lock_server() as server:
        yield server


async def test_server_without_memory_for_more_extends_what_several_hold(
    own_server: LockServer, make_client: MakeClient
) -> None:
    """As it does a lock: nothing is added."""
    locks = make_client(own_server.url)
    leases = [await lock.acquire() for lock in (locks.reader("r"), locks.semaphore("s", permits=2))]
    writer = await locks.writer("w").acquire()
    async with Redis.from_url(own_server.url) as admin:
        for lease in (*leases, writer):
            await lease.extend()  # The script is known now; to load one takes memory, too.
        await admin.config_set("maxmemory", 1)
        for lease in (*leases, writer):
            assert await lease.extend(60) > 50
        for lease in (*leases, writer):
            assert await lease.release()
        await admin.config_set("maxmemory", 0)


@pytest.mark.parametrize("kind", ["lock", "reader"])
async def test_release_that_gets_the_reply_of_an_acquire_ends_in_time(
    make_client: MakeClient, proxy: ChaosProxy, kind: str
) -> None:
    """Something between lost a reply, and all that follow are one behind."""
    locks = make_client(proxy.url, request_timeout=0.5)
    make = locks.lock if kind == "lock" else locks.reader
    lease = await make("x").acquire()
    proxy.drop_replies(1, wire.sha("release" if kind == "lock" else "share_release"))
    async with asyncio.timeout(10):
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        other = await make("y").acquire()
        await releasing
        await other.release()


# Over a quorum.


@pytest.fixture
async def three() -> AsyncIterator[Nodes]:
    """A quorum of three, with a proxy before each."""
    with quorums.servers(3) as servers:
        async with quorums.nodes_of(servers) as nodes:
            yield nodes


async def test_downgraded_writer_is_healed_beside_a_reader(three: Nodes) -> None:
    """It asks only to read, and so outlives the next node that fails."""
    async with (
        three.open(ttl=1.0, request_timeout=0.6) as ours,
        three.open(ttl=1.0, request_timeout=0.6) as others,
    ):
        await quorums.warm(ours)
        await quorums.warm(others, "warm 2")
        three.proxies[0].black_hole()
        async with ours.writer("x") as lease:
            await lease.downgrade()
            async with others.reader("x").acquire(wait_timeout=5):
                three.proxies[0].heal()
                await until(functools.partial(_stand, three, 0, 2), 20)
                assert await others.writer("x").try_acquire() is None
                three.proxies[1].black_hole()
                await asyncio.sleep(1.5)
                lease.check()
                three.proxies[1].heal()


async def _stand(nodes: Nodes, index: int, count: int) -> bool:
    return int(await nodes.admins[index].zcard(KEY)) == count


async def test_downgrade_over_a_quorum_is_asked_for_again(three: Nodes) -> None:
    """One node is silent, and the reply of another is lost with its connection."""
    async with three.open(ttl=5) as locks:
        await quorums.warm(locks)
        async with locks.writer("x") as lease:
            await lease.extend()
            three.proxies[2].black_hole()
            lost = wire.lose(three.proxies[0], "share_confirm")
            await lease.downgrade()
            assert lost.hits == 1
            three.proxies[2].heal()
