"""Readers, who share a name, with the writer, who has it alone."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Backoff,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockTimeout,
    LostReason,
    NameTakenError,
    QuorumError,
    Reader,
    ServerUnreachable,
    Writer,
    _names,
)
from aiodlock.testing import LockServer, lock_server
from tests import topologies, wire
from tests.by_hand import ONE, OTHER, THIRD, Grant, client_id
from tests.conftest import MakeClient
from tests.holders import hears
from tests.keys import leftovers, ttls
from tests.mutants import Mutant, sha_of
from tests.proxy import ChaosProxy
from tests.shared_by_hand import SharedByHand
from tests.steps import cancel_at_every_step
from tests.until import until

SOON_S = 1.0
"""Sooner than any waiter polls by itself when the ttl is 30 s."""

KEY = "aiodlock:{x}"
R1, R2, R3 = f"{ONE}:1r", f"{OTHER}:1r", f"{ONE}:12r"
W1, W2 = f"{THIRD}:1w", f"{ONE}:3w"


@pytest.fixture
async def hand(redis: Redis) -> SharedByHand:
    """The name `x`, by hand."""
    return SharedByHand(redis)


async def waiting(redis: Redis, count: int) -> None:
    """Return once so many stand in the queue."""

    async def are_there() -> bool:
        return int(await redis.zcard(f"{KEY}:queue")) == count

    await until(are_there)


async def queued(redis: Redis, *acquiring: Coroutine[Any, Any, Lease]) -> list[asyncio.Task[Lease]]:
    """Tasks that acquire, one behind the other in the queue."""
    before = int(await redis.zcard(f"{KEY}:queue"))
    tasks = []
    for number, coroutine in enumerate(acquiring, before + 1):
        tasks.append(asyncio.create_task(coroutine))
        await waiting(redis, number)
    return tasks


# Who may be inside.


async def test_readers_of_two_clients_share_and_a_writer_waits_for_all_of_them(
    redis: Redis, make_client: MakeClient
) -> None:
    """It enters with the last reader's release, by message, and then nobody reads."""
    ours, others = make_client(), make_client()
    first = await ours.reader("x").acquire()
    second = await others.reader("x").acquire()
    assert first.fencing_token < second.fencing_token
    assert await others.writer("x").try_acquire() is None
    (writing,) = await queued(redis, others.writer("x").acquire())
    await until(lambda: hears(others))
    await first.release()
    assert not writing.done()
    released_at = time.monotonic()
    await second.release()
    async with await writing as lease:
        assert time.monotonic() - released_at < SOON_S
        assert lease.fencing_token > second.fencing_token
        assert await ours.reader("x").try_acquire() is None
        assert await ours.writer("x").try_acquire() is None
    async with ours.reader("x").acquire(wait_timeout=5):
        pass
    assert await leftovers(redis) == []


async def test_neighbouring_readers_of_any_client_enter_together(
    redis: Redis, make_client: MakeClient
) -> None:
    """One release of the writer lets three in; the writer behind them waits, with who follows."""
    ours, others = make_client(), make_client()
    writer = await ours.writer("x").acquire()
    *readers, second, last = await queued(
        redis,
        ours.reader("x").acquire(),
        others.reader("x").acquire(),
        ours.reader("x").acquire(),
        others.writer("x").acquire(),
        others.reader("x").acquire(),
    )
    await until(lambda: hears(ours) and hears(others))
    released_at = time.monotonic()
    await writer.release()
    leases = await asyncio.gather(*readers)
    assert time.monotonic() - released_at < SOON_S
    assert not second.done()
    assert not last.done()
    assert all(lease.is_held for lease in leases)
    for lease in leases:
        await lease.release()
    await (await second).release()
    await (await last).release()
    assert await leftovers(redis) == []


async def test_reader_does_not_overtake_a_waiting_writer_nor_a_writer_readers(
    redis: Redis, make_client: MakeClient
) -> None:
    """One queue for both: with readers that come for ever, a writer gets in all the same."""
    ours, others = make_client(), make_client()
    entered = {"r": 0, "w": 0}
    asked_at: dict[str, int] = {}
    stop = asyncio.Event()

    async def read_again_and_again(locks: LockClient, stay_s: float) -> None:
        while not stop.is_set():
            async with locks.reader("x").acquire(wait_timeout=20):
                entered["r"] += 1
                # Of eight readers each may be before either writer once, and on its way twice.
                assert all(entered["r"] - before <= 4 * 8 for before in asked_at.values())
                await asyncio.sleep(stay_s)

    async def write_again_and_again(locks: LockClient, who: str) -> None:
        for _ in range(20):
            asked_at[who] = entered["r"]
            async with locks.writer("x").acquire(wait_timeout=20):
                del asked_at[who]
                entered["w"] += 1

    async def write_all() -> None:
        await asyncio.gather(
            write_again_and_again(others, "others"), write_again_and_again(ours, "ours")
        )
        stop.set()

    async with asyncio.TaskGroup() as group:
        for number in range(8):  # Of different lengths: some are inside whenever one leaves.
            locks = (ours, others)[number % 2]
            group.create_task(read_again_and_again(locks, 0.003 + 0.002 * number))
        await until(lambda: entered["r"] > 20)
        group.create_task(write_all())
    assert entered["w"] == 40
    assert await leftovers(redis) == []


async def test_inspect_shows_every_holder_with_what_it_does(
    redis: Redis, make_client: MakeClient
) -> None:
    """Who, for how long, with which fencing token; and how many wait."""
    ours, others = make_client(label="ours"), make_client(label="others")
    first = await ours.reader("x", ttl=30).acquire()
    second = await others.reader("x", ttl=40).acquire()
    (writing,) = await queued(redis, ours.writer("x").acquire())
    told = await others.writer("x").inspect()
    assert (told.held, told.fencing_token, told.waiters) == (True, first.fencing_token, 1)
    assert [(h.holder, h.fencing_token, h.access) for h in told.holders] == [
        (lease.holder, lease.fencing_token, "reading") for lease in (first, second)
    ]
    assert 29 < told.holders[0].ttl_left <= 30
    assert 39 < told.holders[1].ttl_left <= 40
    assert repr(told).count("access='reading'") == 2
    await first.release()
    await second.release()
    await writing
    (holder,) = (await others.reader("x").inspect()).holders
    assert holder.access == "writing"
    await (await writing).release()
    assert await ours.reader("x").inspect() == (False, None, None, None, 0)


async def test_every_key_of_shared_holders_has_a_ttl(redis: Redis, locks: LockClient) -> None:
    """The lock and its grants live as long as the longest life of a holder."""
    async with locks.reader("x", ttl=60), locks.reader("x", ttl=10):
        (writing,) = await queued(redis, locks.writer("x").acquire())
        lives = await ttls(redis)
        assert len(lives) == 5
        assert all(life > 0 for life in lives.values())
        assert 55_000 < lives[KEY] <= 60_000
        assert 55_000 < lives[f"{KEY}:grants"] <= 60_000
        writing.cancel()
        await asyncio.wait([writing])


# A writer that reads from now on.


async def test_writer_that_downgrades_lets_in_the_readers_at_the_head(
    redis: Redis, make_client: MakeClient
) -> None:
    """With its fencing token, and until it leaves; the writer behind them waits for all."""
    ours, others = make_client(), make_client()
    async with ours.writer("x").acquire() as lease:
        token = lease.fencing_token
        *readers, writing = await queued(
            redis,
            others.reader("x").acquire(),
            ours.reader("x").acquire(),
            others.writer("x").acquire(),
        )
        await until(lambda: hears(ours) and hears(others))
        downgraded_at = time.monotonic()
        await lease.downgrade()
        await lease.downgrade()
        leases = await asyncio.gather(*readers)
        assert time.monotonic() - downgraded_at < SOON_S
        assert lease.fencing_token == token
        assert await lease.extend(60) > 50
        holders = (await ours.reader("x").inspect()).holders
        assert [holder.access for holder in holders] == ["reading"] * 3
        for reader in leases:
            await reader.release()
        await asyncio.sleep(0.05)
        assert not writing.done()
    await (await writing).release()
    assert await leftovers(redis) == []


async def test_downgrade_of_what_is_no_writers_lease_is_refused(locks: LockClient) -> None:
    """A reader's, a permit, a plain one; and a writer's that was released."""
    for lock in (locks.reader("r"), locks.semaphore("s", permits=1), locks.lock("p")):
        async with lock as lease:
            with pytest.raises(RuntimeError, match="only a writer"):
                await lease.downgrade()
    lease = await locks.writer("x").acquire()
    await lease.release()
    with pytest.raises(RuntimeError, match="was released"):
        await lease.downgrade()


async def test_downgrade_of_a_lease_that_is_gone_raises_its_loss(
    redis: Redis, locks: LockClient
) -> None:
    """Nobody is made a reader that is no holder."""
    lease = await locks.writer("x").acquire()
    await redis.delete(KEY)
    with pytest.raises(LeaseLostError) as error:
        await lease.downgrade()
    assert error.value.reason is LostReason.DELETED
    assert lease.state == "lost"
    await lease.release()


async def test_downgrade_whose_reply_is_lost_is_asked_for_again(
    redis: Redis, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """It is idempotent: readers enter once."""
    locks, others = make_client(proxy.url), make_client()
    async with locks.writer("x").acquire() as lease:
        (reading,) = await queued(redis, others.reader("x").acquire())
        lost = wire.lose(proxy, "share_release")
        await lease.downgrade()
        assert lost.hits == 1
        await (await reading).release()
        assert lease.is_held
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_downgrade_that_is_never_answered_raises_in_time(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The lease goes on; the client may ask again."""
    locks = make_client(proxy.url, request_timeout=0.2)
    async with locks.writer("x").acquire() as lease:
        proxy.black_hole()
        with pytest.raises(ServerUnreachable, match="downgrade"):
            await lease.downgrade()
        assert lease.is_held
        proxy.heal()
        await lease.downgrade()


# Waiting for oneself.


async def test_reader_that_would_become_the_writer_is_refused_with_the_reason(
    redis: Redis, locks: LockClient
) -> None:
    """It would wait for itself for ever; what it has it keeps, and nothing is left in the queue."""
    async with locks.reader("x") as lease:
        with pytest.raises(RuntimeError, match="a reader cannot become the writer"):
            await locks.writer("x").acquire(wait_timeout=30)
        assert await locks.writer("x").try_acquire() is None
        await waiting(redis, 0)
        assert lease.is_held
        async with locks.reader("x"):  # Nobody waits: readers share, their own task too.
            pass
    assert await leftovers(redis) == []


async def test_writer_that_asks_to_read_is_refused_and_told_of_downgrade(
    locks: LockClient,
) -> None:
    """Until it has downgraded."""
    async with locks.writer("x") as lease:
        with pytest.raises(RuntimeError, match=r"lease\.downgrade\(\)"):
            await locks.reader("x").acquire()
        with pytest.raises(RuntimeError, match="enter once"):
            await locks.writer("x").acquire()
        await lease.downgrade()
        async with locks.reader("x"):
            pass


async def test_reader_that_reads_again_behind_a_waiting_writer_is_refused(
    redis: Redis, locks: LockClient
) -> None:
    """The writer waits for its first lease, it would wait for the writer."""
    async with locks.reader("x"):
        (writing,) = await queued(redis, locks.writer("x").acquire())
        with pytest.raises(RuntimeError, match="a writer waits between"):
            await locks.reader("x").acquire()
        other = asyncio.create_task(locks.reader("x").acquire())  # Another task just waits.
        await waiting(redis, 2)
    await (await writing).release()
    await (await other).release()
    assert await leftovers(redis) == []


async def test_task_that_reads_one_name_may_wait_to_write_another(
    redis: Redis, make_client: MakeClient
) -> None:
    """It holds nothing that it waits for."""
    ours, others = make_client(), make_client()
    held = await others.reader("x").acquire()
    async with ours.reader("y"):
        waiter = ours.writer("x").acquire(wait_timeout=20)
        asyncio.get_running_loop().call_later(0.1, asyncio.ensure_future, held.release())
        async with waiter:
            pass
    assert await leftovers(redis) == []


async def test_writer_that_waits_for_a_reader_in_another_task_is_not_refused(
    locks: LockClient,
) -> None:
    """Of the same client; it gets in when the other has left."""
    is_inside, may_leave = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async with locks.reader("x"):
            is_inside.set()
            await may_leave.wait()

    reading = asyncio.create_task(read())
    await is_inside.wait()
    asyncio.get_running_loop().call_later(0.1, may_leave.set)
    async with locks.writer("x").acquire(wait_timeout=20):
        await reading


# Crashes, expiry, breaking.


async def test_crashed_reader_frees_only_itself(hand: SharedByHand, locks: LockClient) -> None:
    """The others read on until they leave, and only then does the writer get in."""
    await hand.enter(R1, ttl_ms=150)
    lease = await locks.reader("x").acquire()
    (writing,) = await queued(hand.redis, locks.writer("x").acquire())
    await until(lambda: _are(hand, [lease.owner_token]))
    assert not writing.done()
    await lease.extend()
    await lease.release()
    await (await writing).release()


async def test_holder_whose_time_is_over_is_not_shown(
    hand: SharedByHand, locks: LockClient
) -> None:
    """Though nobody has cleared it away yet."""
    await hand.enter(R1, R2)
    await hand.let_end(R1)
    told = await locks.reader("x").inspect()
    assert [holder.holder for holder in told.holders] == [R2.rpartition(":")[0]]


async def _are(hand: SharedByHand, tokens: list[str]) -> bool:
    """Whether these, and no others, live."""
    now_ms = await hand.now_ms()
    lives = (await hand.state()).holders
    return sorted(token for token, end_ms in lives.items() if end_ms > now_ms) == sorted(tokens)


async def test_writer_enters_when_the_last_crashed_reader_has_ended(
    hand: SharedByHand, locks: LockClient
) -> None:
    """Nobody tells of it: the head polls at the end of the first, then at the end of the next."""
    await hand.enter(R1, ttl_ms=150)
    await hand.enter(R2, ttl_ms=400)
    began_at = time.monotonic()
    async with locks.writer("x", ttl=30).acquire(wait_timeout=10):
        assert 0.3 < time.monotonic() - began_at < SOON_S


async def test_reader_whose_time_ran_out_cannot_extend_and_takes_nothing_away(
    hand: SharedByHand, locks: LockClient
) -> None:
    """Its end is its own: the other reader's lease stands."""
    late = await locks.reader("x", ttl=0.15, auto_extend=False).acquire()
    async with locks.reader("x").acquire() as lease:
        with pytest.raises(LeaseLostError) as error:
            await late.wait_lost()
            await late.extend()
        assert error.value.reason is LostReason.EXPIRED
        await asyncio.sleep(0.01)
        await late.release()
        assert await hand.holders() == [lease.owner_token]
        assert await lease.extend() > 20


async def test_reader_is_extended_by_its_watchdog(hand: SharedByHand, locks: LockClient) -> None:
    """It outlasts its ttl, alone and beside another."""
    async with locks.reader("x", ttl=0.3) as first, locks.reader("x", ttl=0.3) as second:
        await asyncio.sleep(0.7)
        assert (first.is_held, second.is_held) == (True, True)
        assert await hand.holders() == sorted([first.owner_token, second.owner_token])


async def test_reader_deleted_behind_its_back_is_lost(redis: Redis, locks: LockClient) -> None:
    """Its body is cancelled, whether its entry or its grant is gone."""
    for key in (KEY, f"{KEY}:grants"):
        with pytest.raises(LeaseLostError) as error:
            async with locks.reader("x", ttl=0.5):
                await redis.delete(key)
                await asyncio.sleep(5)
        assert error.value.reason is LostReason.DELETED


async def test_reader_that_is_gone_beside_another_was_deleted_and_not_robbed(
    redis: Redis, make_client: MakeClient
) -> None:
    """It learns it when it leaves: others who hold are no thieves."""
    ours, others = make_client(), make_client()
    async with others.reader("x"):
        with pytest.raises(LeaseLostError) as error:
            async with ours.reader("x") as lease:
                await redis.zrem(KEY, lease.owner_token)
        assert error.value.reason is LostReason.DELETED


async def test_key_that_became_something_else_is_lost_as_stolen(
    redis: Redis, locks: LockClient
) -> None:
    """At the next extension."""
    with pytest.raises(LeaseLostError) as error:
        async with locks.writer("x", ttl=0.5):
            await redis.set(KEY, "something else", px=10_000)
            await asyncio.sleep(5)
    assert error.value.reason is LostReason.STOLEN


async def test_break_lock_breaks_one_grant_or_all(redis: Redis, make_client: MakeClient) -> None:
    """And the next waiter gets in."""
    ours, others = make_client(), make_client()
    leases = [await ours.reader("x").acquire() for _ in range(3)]
    lock = others.writer("x")
    with pytest.raises(TypeError, match="fencing_token must be an int"):
        await lock.break_lock(fencing_token="1")  # type: ignore[arg-type]
    assert await lock.break_lock(fencing_token=leases[1].fencing_token) is True
    assert await lock.break_lock(fencing_token=leases[1].fencing_token) is False
    assert len((await lock.inspect()).holders) == 2
    (writing,) = await queued(redis, ours.writer("x").acquire())
    assert await lock.break_lock() is True
    await (await writing).release()
    assert await lock.break_lock() is False
    assert [await lease.release() for lease in leases] == [False] * 3


# What is lost on the way, or comes late.


@pytest.mark.parametrize("script", ["share_acquire", "share_extend", "share_release"])
async def test_lost_reply_makes_no_second_holder_and_loses_none(
    redis: Redis, make_client: MakeClient, proxy: ChaosProxy, script: str
) -> None:
    """It is asked for again: the owner token makes that harmless."""
    locks = make_client(proxy.url)
    async with locks.reader("warm") as lease:
        await lease.extend()
    lost = wire.lose(proxy, script)
    async with locks.reader("x").acquire(wait_timeout=5) as lease:
        assert len((await locks.reader("x").inspect()).holders) == 1
        await lease.extend()
        assert lease.is_held
    assert lost.hits == 1
    assert await leftovers(redis, ignoring_tombstones=True) == []


async def test_late_copy_of_a_readers_acquire_is_refused_by_its_tombstone(
    redis: Redis, make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """It was stuck while its connection died, and arrives when all is over."""
    locks = make_client(proxy.url)
    async with locks.reader("warm"):
        pass
    late = proxy.delay_requests(0.5, sha_of("share_acquire"))
    acquiring = asyncio.create_task(locks.reader("x").acquire())
    await until(lambda: late.hits)
    proxy.kill_connections("commands")
    acquiring.cancel()
    await asyncio.wait([acquiring])
    await asyncio.sleep(0.7)
    assert await leftovers(redis, ignoring_tombstones=True) == []
    (tombstone,) = await redis.zrange(f"{KEY}:alive", 0, -1)
    assert str(tombstone).startswith("!")


async def test_hand_off_to_a_reader_that_is_gone_is_given_back(
    hand: SharedByHand, make_client: MakeClient
) -> None:
    """As after a failover to a stale queue: its client answers with a release, by the tail."""
    locks = make_client()
    await hand.enter(W1)
    waiter = asyncio.create_task(locks.reader("x").acquire())
    await waiting(hand.redis, 1)
    await until(lambda: hears(locks))
    (token,) = (await hand.state()).queue
    holder, _, number = token.rpartition(":")
    for tail in ("r", "w"):
        stray = f"{holder}:{int(number[:-1]) + 500}{tail}"
        channel = _names.inbox("aiodlock:", client_id(token))
        await hand.redis.zadd(hand.keys.lock, {stray: await hand.now_ms() + 30_000})
        await hand.redis.publish(channel, f"{stray}/7 {KEY}")
        await until(lambda: _are(hand, [W1]))
    waiter.cancel()
    await asyncio.wait([waiter])


async def test_reader_polls_where_it_hears_no_messages(
    redis: Redis, make_client: MakeClient
) -> None:
    """`retry=Backoff(...)` stands in the same queue."""
    ours, others = make_client(), make_client()
    writer = await ours.writer("x").acquire()
    polling = Backoff(initial=0.02, maximum=0.05)
    tasks = await queued(
        redis,
        others.reader("x", retry=polling).acquire(),
        others.reader("x", retry=polling).acquire(),
    )
    await writer.release()
    for lease in await asyncio.gather(*tasks):
        await lease.release()


async def test_wait_that_is_over_tells_who_holds_and_makes_room_for_those_behind(
    redis: Redis, make_client: MakeClient
) -> None:
    """A writer that gives up lets the readers in that stood behind it."""
    ours, others = make_client(label="ours"), make_client()
    async with ours.reader("x") as lease:
        writing = asyncio.create_task(others.writer("x").acquire(wait_timeout=0.5))
        await waiting(redis, 1)
        (reading,) = await queued(redis, others.reader("x").acquire())
        with pytest.raises(LockTimeout) as error:
            await writing
        assert error.value.holder == lease.holder
        async with asyncio.timeout(SOON_S):
            await (await reading).release()
    assert await leftovers(redis) == []


async def test_client_that_closes_leaves_the_queue_and_releases(
    redis: Redis, make_client: MakeClient
) -> None:
    """Its waiters get `RuntimeError`, and another's enter."""
    ours, others = make_client(), make_client()
    held = await ours.reader("x").acquire()
    writing, reading = await queued(redis, ours.writer("x").acquire(), others.reader("x").acquire())
    await ours.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await writing
    assert held.state == "released"
    await (await reading).release()
    assert await leftovers(redis) == []


@pytest.mark.parametrize("kind", ["reader", "writer", "handed over", "downgrade"])
async def test_shared_acquire_cancelled_anywhere_leaves_nothing(
    redis: Redis, make_client: MakeClient, kind: str
) -> None:
    """At each of its awaits, in each way."""
    ours, rival = make_client(), make_client()
    handing: list[asyncio.Task[None]] = []

    async def hand_over(held: Lease) -> None:
        for _ in range(100):
            if await redis.zcard(f"{KEY}:queue"):
                break
            await asyncio.sleep(0.002)
        await held.release()

    async def before() -> None:
        if kind == "handed over":
            held = await rival.writer("x").acquire()
            handing.append(asyncio.create_task(hand_over(held)))

    async def use() -> None:
        if kind == "downgrade":
            async with ours.writer("x") as lease:
                await lease.downgrade()
        else:
            async with ours.writer("x") if kind == "writer" else ours.reader("x"):
                await asyncio.sleep(0)

    async def after() -> None:
        while handing:
            await handing.pop()
        assert await leftovers(redis, ignoring_tombstones=True) == []

    done = await cancel_at_every_step(use, after, before=before, label=f"shared: {kind}")
    assert done.steps >= 2


# Names of another kind.


async def test_name_of_another_kind_is_refused_and_left_as_it_is(
    redis: Redis, locks: LockClient
) -> None:
    """Whoever comes second, in whichever order, hears that the name is taken."""
    makers: dict[str, Callable[[], Lock]] = {
        "lock": lambda: locks.lock("x"),
        "reader": lambda: locks.reader("x"),
        "writer": lambda: locks.writer("x"),
        "semaphore": lambda: locks.semaphore("x", permits=2),
    }
    families = {"lock": 0, "reader": 1, "writer": 1, "semaphore": 2}
    for inside, first in makers.items():
        for asking, second in makers.items():
            if families[inside] == families[asking]:
                continue
            async with first() as lease:
                for wait_timeout in (0, 5):
                    with pytest.raises(NameTakenError, match="not one of this kind"):
                        await second().acquire(wait_timeout=wait_timeout)
                assert lease.is_held
            assert await leftovers(redis) == [], (inside, asking)


async def test_waiter_of_another_kind_on_a_free_name_is_not_overtaken(
    hand: SharedByHand, locks: LockClient
) -> None:
    """Nor let in: it would hold by scripts that it does not know."""
    await hand.redis.zadd(hand.keys.queue, {f"{OTHER}:7": 5})
    await hand.redis.pexpire(hand.keys.queue, 10_000)
    with pytest.raises(NameTakenError):
        await locks.reader("x").acquire(wait_timeout=5)
    assert await hand.holders() == []


@pytest.mark.parametrize("token", [R1, W1, f"{ONE}:4s2"], ids=["reader", "writer", "permit"])
async def test_lock_on_a_free_name_for_which_a_sharer_waits_is_refused(
    hand: SharedByHand, locks: LockClient, token: str
) -> None:
    """It neither takes the name nor hands it to who cannot hold it so; the sharer gets it."""
    await hand.redis.zadd(hand.keys.queue, {token: 5})
    await hand.let_live(token, 6_000)
    for wait_timeout in (0, 5):
        with pytest.raises(NameTakenError, match="not one of this kind"):
            await locks.lock("x").acquire(wait_timeout=wait_timeout)
    state = await hand.state()
    assert (state.holders, state.queue, list(state.alive)) == ({}, [token], [token])
    await hand.enter(token)


# The scripts by hand, each rule with the line without which it fails.


async def check_writer_is_alone(hand: SharedByHand) -> None:
    """Nobody enters beside it, and it beside nobody."""
    await hand.enter(R1)
    await hand.queue(W1)
    await hand.release(R1)
    assert await hand.holders() == [W1]
    await hand.queue(R2, W2)
    assert await hand.holders() == [W1]


async def check_only_the_head_enters(hand: SharedByHand) -> None:
    """A reader would fit in, but a writer waits before it."""
    await hand.enter(R1)
    await hand.queue(W1, R2)
    await hand.queue(R2)
    await hand.release(R3)
    assert (await hand.state()).queue == [W1, R2]
    assert await hand.holders() == [R1]


async def check_neighbours_enter_together(hand: SharedByHand) -> None:
    """By a release, and by the poll of another."""
    for by_release in (True, False):
        await hand.redis.flushall()
        await hand.enter(W1)
        await hand.queue(R1, R2, W2, R3)
        if by_release:
            await hand.release(W1)
        else:
            await hand.let_end(W1)
            await hand.queue(R3)
        assert await hand.holders() == sorted([R1, R2])
        assert (await hand.state()).queue == [W2, R3]


async def check_ended_holder_is_none(hand: SharedByHand) -> None:
    """It keeps nobody out, cannot extend, and its grant goes with it."""
    (token,) = await hand.enter(W1)
    await hand.let_end(W1)
    assert await hand.extend(W1, token) is None
    await hand.enter(R1, R2)
    await hand.let_end(R1)
    await hand.enter(R3)
    assert sorted((await hand.state()).grants) == sorted([R2, R3])


async def check_grant_asked_for_again_is_the_same(hand: SharedByHand) -> None:
    """It has its number still, though others wait; but not when its life is over."""
    (token,) = await hand.enter(W1)
    await hand.queue(R1)
    answer = await hand.acquire(W1)
    assert isinstance(answer, Grant)
    assert (answer.fencing_token, answer.already) == (token, True)
    assert (await hand.state()).queue == [R1]
    await hand.let_end(W1)
    await hand.queue(W1)
    assert await hand.holders() == [R1]


async def check_extension_is_of_that_grant(hand: SharedByHand) -> None:
    """Not of an earlier one to the same token, nor of another's; nor does it make one."""
    (token,) = await hand.enter(R1)
    assert await hand.extend(R1, token - 1) is None
    assert await hand.extend(R2, token) is None
    assert await hand.extend(R1, token) is not None
    await hand.redis.delete(hand.keys.grants)
    assert await hand.extend(R1, 0) is None
    assert await hand.holders() == [R1]


async def check_release_removes_one(hand: SharedByHand) -> None:
    """Its own, whether anybody waits or not; and a second time nothing."""
    await hand.enter(R1, R2, R3)
    assert await hand.release(R1) == (True, [])
    assert await hand.release(R1) == (False, [])
    await hand.queue(W1)
    assert await hand.release(R2) == (True, [])
    assert await hand.holders() == [R3]
    assert list((await hand.state()).grants) == [R3]


async def check_evicted_lock_leaves_no_grant(hand: SharedByHand) -> None:
    """By the next poll, and by the next release."""
    await hand.enter(R1)
    await hand.redis.delete(hand.keys.lock)
    await hand.enter(R2)
    assert list((await hand.state()).grants) == [R2]
    await hand.queue(W1)
    await hand.redis.delete(hand.keys.lock)
    await hand.release(R1)
    assert list((await hand.state()).grants) == [W1]


async def check_places_are_by_arrival(hand: SharedByHand) -> None:
    """Who polls again keeps its place; who comes later stands behind, whatever the clock says."""
    await hand.enter(W1)
    await hand.redis.zadd(hand.keys.queue, {R1: 2**52})
    await hand.let_live(R1, 6_000)
    await hand.queue(R2, R3)
    await hand.queue(R1)
    assert (await hand.state()).queue == [R1, R2, R3]


async def check_waiter_that_polls_lives(hand: SharedByHand) -> None:
    """Though its liveness had passed: its own poll does not drop it."""
    await hand.enter(W1)
    await hand.queue(R1, R2)
    await hand.let_die(R1)
    await hand.queue(R1)
    assert (await hand.state()).queue == [R1, R2]


async def check_downgrade_of_no_holder_makes_none(hand: SharedByHand) -> None:
    """A waiting writer, one whose life is over, one whose grant was evicted."""
    await hand.enter(W1)
    await hand.queue(W2)
    assert await hand.release(W2, how="r") == (False, [])
    await hand.redis.delete(hand.keys.grants)
    assert await hand.release(W1, how="r") == (False, [])
    await hand.redis.flushall()
    await hand.enter(W1)
    await hand.let_end(W1)
    assert await hand.release(W1, how="r") == (False, [])
    assert (await hand.state()).grants == {}


async def check_dead_head_keeps_nobody_out(hand: SharedByHand) -> None:
    """The writer at the head polls no more: the next poll of anybody, or release, passes it."""
    for by_release in (True, False):
        await hand.redis.flushall()
        await hand.enter(R1, R2)
        await hand.queue(W1, R3)
        await hand.let_die(W1)
        if by_release:
            await hand.release(R2)
        else:
            await hand.acquire(R3)
        assert R3 in await hand.holders()


async def check_holder_that_is_queued_is_not_granted_again(hand: SharedByHand) -> None:
    """As after a failover to a stale queue: it keeps its life and its number, and leaves it."""
    for by_release in (True, False):
        await hand.redis.flushall()
        tokens = await hand.enter(R1, R2)
        await hand.redis.zadd(hand.keys.queue, {R1: 5})
        await hand.let_live(R1, 3_000)
        if by_release:
            await hand.release(R2)
        else:
            await hand.enter(R3)
        state = await hand.state()
        assert state.queue == []
        assert state.grants[R1] == tokens[0]
        assert state.holders[R1] - await hand.now_ms() > 20_000


async def check_lives_are_never_shortened(hand: SharedByHand) -> None:
    """Of the keys, by a holder with a shorter ttl; of a holder, by its own shorter extension."""
    (token,) = await hand.enter(R1, ttl_ms=60_000)
    await hand.enter(R2, ttl_ms=10_000)
    state = await hand.state()
    assert min(state.ttls_ms["lock"], state.ttls_ms["grants"]) > 50_000
    left_ms = await hand.extend(R1, token, ttl_ms=10_000)
    assert left_ms is not None
    assert left_ms > 50_000
    answer = await hand.acquire(R1, ttl_ms=10_000)
    assert answer is not None
    assert answer.ttl_left_ms > 50_000


async def check_lives_grow_with_the_longest(hand: SharedByHand) -> None:
    """Both keys outlive every holder."""
    await hand.enter(R1, ttl_ms=10_000)
    await hand.enter(R2, ttl_ms=60_000)
    state = await hand.state()
    assert min(state.ttls_ms["lock"], state.ttls_ms["grants"]) > 50_000


async def check_fencing_tokens_grow(hand: SharedByHand) -> None:
    """In the order of the grants, also of those that are made at once, and ahead of the clock."""
    await hand.redis.set(hand.keys.fence, 2**52, ex=86_400)
    (first,) = await hand.enter(W1)
    await hand.queue(R1, R2, R3)
    await hand.release(W1)
    grants = (await hand.state()).grants
    tokens = [first, grants[R1], grants[R2], grants[R3], *await hand.enter(f"{OTHER}:9r")]
    assert tokens == list(range(2**52 + 1, 2**52 + 6))


async def check_downgrade_marks_until_release(hand: SharedByHand) -> None:
    """Readers enter beside it; after it left nothing of the mark is left."""
    await hand.enter(W1)
    await hand.release(W1, how="r")
    await hand.enter(R1)
    await hand.release(W1)
    assert list((await hand.state()).grants) == [R1]


async def check_grant_lives_as_long_as_its_waiter(hand: SharedByHand) -> None:
    """Who is let in without asking holds no longer than it is known to live."""
    await hand.enter(W1)
    await hand.acquire(R1, alive_ms=3_000)
    await hand.release(W1)
    (end_ms,) = (await hand.state()).holders.values()
    assert 2_000 < end_ms - await hand.now_ms() <= 3_000


CHECKS = {
    check_writer_is_alone: [
        Mutant("share_acquire", "return inside < math.min(most, limit_of(member))", "return true"),
        Mutant(
            "share_acquire", "  return 1\nend\n\n-- Of readers", "  return 9\nend\n\n-- Of readers"
        ),
    ],
    check_only_the_head_enters: [
        Mutant("share_acquire", "if is_empty and not own_text and", "if"),
    ],
    check_neighbours_enter_together: [
        Mutant("share_release", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
        Mutant("share_acquire", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
        Mutant("share_release", "\nlet_in()\n", "\n"),
    ],
    check_ended_holder_is_none: [
        Mutant("share_extend", "or tonumber(end_ms) <= now_ms", ""),
        Mutant("share_acquire", "KEYS[1], '-inf', now_ms,", "KEYS[1], '-inf', 0,"),
        Mutant("share_acquire", "  redis.call('ZREM', KEYS[5], member, '+' .. member)\n", ""),
    ],
    check_grant_asked_for_again_is_the_same: [
        Mutant("share_acquire", "if end_ms and granted and tonumber(end_ms) > now_ms", "if false"),
        Mutant("share_acquire", "granted and tonumber(end_ms) > now_ms then", "granted then"),
    ],
    check_extension_is_of_that_grant: [
        Mutant("share_extend", "or tonumber(granted) ~= tonumber(ARGV[3])", ""),
        Mutant("share_extend", "or not granted or tonumber(granted)", "or tonumber(granted or 0)"),
    ],
    check_release_removes_one: [
        Mutant(
            "share_release",
            "removed = redis.call('ZREM', KEYS[1], token)",
            "removed = redis.call('DEL', KEYS[1])",
        ),
        Mutant(
            "share_release",
            "~= 'r' then\n  redis.call('ZREM', KEYS[1], token)",
            "~= 'r' then\n  redis.call('DEL', KEYS[1])",
        ),
    ],
    check_evicted_lock_leaves_no_grant: [
        Mutant(script, "redis.call('DEL', KEYS[5])  -- What", "-- What")
        for script in ("share_acquire", "share_release")
    ],
    check_places_are_by_arrival: [
        Mutant("share_acquire", "math.max(highest + 1, now_us)", "now_us"),
        Mutant("share_acquire", "  if not place then\n", "  if true then\n"),
    ],
    check_waiter_that_polls_lives: [
        Mutant("share_acquire", "  set_liveness(token, now_ms + alive_ms)\nend\nloc", "end\nloc"),
    ],
    check_downgrade_of_no_holder_makes_none: [
        Mutant("share_release", "granted and was_ours == 1 and", "was_ours == 1 and"),
        Mutant("share_release", "was_ours == 1 and tonumber(end_ms) > now_ms", "was_ours == 1"),
    ],
    check_dead_head_keeps_nobody_out: [
        Mutant("share_release", "(until_ms <= now_ms or redis", "(false or redis"),
        Mutant("share_acquire", "(until_ms <= now_ms or redis", "(false or redis"),
    ],
    check_holder_that_is_queued_is_not_granted_again: [
        Mutant(script, " or redis.call('ZSCORE', KEYS[1], head)", "")
        for script in ("share_acquire", "share_release")
    ],
    check_lives_are_never_shortened: [
        Mutant("share_acquire", "redis.call('PTTL', key) < longest_ms", "true"),
        Mutant("share_extend", "if left < ttl_ms then", "if true then"),
        Mutant("share_acquire", "  if left < ttl_ms then", "  if true then"),
    ],
    check_lives_grow_with_the_longest: [
        Mutant("share_acquire", "redis.call('PTTL', key) < longest_ms", "false"),
    ],
    check_fencing_tokens_grow: [
        Mutant("share_release", "math.max(last + 1, now_us)", "math.max(last, now_us)"),
        Mutant("share_acquire", "if last >= fencing_token then", "if false then"),
    ],
    check_downgrade_marks_until_release: [
        Mutant("share_acquire", "or redis.call('ZSCORE', KEYS[5], '+' .. member)", ""),
        Mutant(
            "share_release",
            "token, '+' .. token)\n  return {removed}",
            "token)\n  return {removed}",
        ),
    ],
    check_grant_lives_as_long_as_its_waiter: [
        Mutant("share_release", "enter(head, until_ms - now_ms)", "enter(head, 6000)"),
    ],
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_shared_scripts_keep_the_rule(hand: SharedByHand, check: Any) -> None:
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
async def test_check_of_a_shared_rule_notices_its_line_missing(
    hand: SharedByHand, check: Any, mutant: Mutant
) -> None:
    """The negative control."""
    with mutant.applied(), pytest.raises(AssertionError):
        await check(hand)


# A cluster, a quorum, memory.


async def test_reader_and_writer_on_a_cluster(make_client: MakeClient) -> None:
    """All five keys are in one slot, whatever the name."""
    async with topologies.cluster() as cluster, AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            redis = await stack.enter_async_context(cluster.client())
            clients.append(await stack.enter_async_context(LockClient(redis)))
        ours, others = clients
        for name in ("x", "{y}", "z%"):
            async with ours.writer(name) as lease:
                reading = asyncio.create_task(others.reader(name).acquire(wait_timeout=10))
                await until(functools.partial(_one_waits, ours, name))
                await lease.downgrade()
                await (await reading).release()
            async with ours.semaphore(f"{name} permits", permits=2) as lease:
                assert await lease.extend() > 20


async def _one_waits(locks: LockClient, name: str) -> bool:
    return (await locks.reader(name).inspect()).waiters == 1


async def test_readers_in_memory_share() -> None:
    """`memory://` runs the same scripts."""
    async with LockClient.from_url("memory://") as locks:
        async with locks.writer("x") as lease:
            reading = asyncio.create_task(locks.reader("x").acquire())
            await until(lambda: _one_waits(locks, "x"))
            await lease.downgrade()
            async with await reading:
                assert len((await locks.reader("x").inspect()).holders) == 2
                assert await locks.writer("x").try_acquire() is None
        async with locks.semaphore("s", permits=2), locks.semaphore("s", permits=2):
            assert await locks.semaphore("s", permits=2).try_acquire() is None


@pytest.mark.parametrize("fencing", [True, False])
async def test_readers_and_writers_on_a_quorum_exclude_each_other(fencing: bool) -> None:
    """One of three nodes is down all the time; a majority of the others decides."""
    with lock_server() as one, lock_server() as two, lock_server() as three:
        urls = [server.url for server in (one, two, three)]
        async with (
            LockClient.quorum(urls, fencing=fencing) as ours,
            LockClient.quorum(urls, fencing=fencing) as others,
        ):
            three.kill()
            async with ours.reader("x", ttl=2) as first, others.reader("x", ttl=2) as second:
                assert await ours.writer("x").try_acquire() is None
                assert await first.extend() > 1
                told = await others.reader("x").inspect()
                assert [holder.access for holder in told.holders] == ["reading"] * 2
                assert {holder.holder for holder in told.holders} == {
                    lease.holder for lease in (first, second)
                }
                assert sum(vote.error is None for vote in told.votes) == 2
            async with ours.writer("x").acquire(wait_timeout=5) as lease:
                assert await others.reader("x").try_acquire() is None
                with pytest.raises(RuntimeError, match="itself"):
                    await ours.reader("x").acquire(wait_timeout=5)
                if fencing:
                    assert lease.fencing_token > max(first.fencing_token, second.fencing_token)
                    assert (await ours.writer("x").inspect()).fencing_token == lease.fencing_token
                await lease.downgrade()
                async with others.reader("x").acquire(wait_timeout=5):
                    assert await lease.extend() > 1
                    told = await others.reader("x").inspect()
                    assert [holder.access for holder in told.holders] == ["reading"] * 2
            two.kill()
            with pytest.raises(QuorumError):
                await ours.reader("x").inspect()
            with pytest.raises(QuorumError):
                await ours.reader("x").try_acquire()


async def test_quorum_of_readers_and_writers_never_has_both_inside() -> None:
    """Many of both, on three nodes, without a queue."""
    inside: list[str] = []
    seen = {"r": 0, "w": 0}

    async def work(locks: LockClient, kind: str) -> None:
        polling = Backoff(initial=0.002, maximum=0.02)
        lock: Reader | Writer = (
            locks.reader("x", retry=polling) if kind == "r" else locks.writer("x", retry=polling)
        )
        for _ in range(8):
            async with lock.acquire(wait_timeout=30):
                inside.append(kind)
                assert inside.count("w") == 0 or len(inside) == 1, inside
                seen[kind] += 1
                await asyncio.sleep(random.uniform(0, 0.004))
                assert inside.count("w") == 0 or len(inside) == 1, inside
                inside.remove(kind)

    with lock_server() as one, lock_server() as two, lock_server() as three:
        urls = [server.url for server in (one, two, three)]
        async with LockClient.quorum(urls) as ours, LockClient.quorum(urls) as others:
            await asyncio.gather(
                *(work(locks, kind) for locks in (ours, others) for kind in ("r", "r", "w"))
            )
    assert seen == {"r": 32, "w": 16}


async def test_options_of_reader_and_writer_are_those_of_a_lock(
    server: LockServer, locks: LockClient
) -> None:
    """Checked at construction, in the same words."""
    for make in (locks.reader, locks.writer):
        for bad, error in (
            ({"ttl": 0}, ValueError),
            ({"wait_timeout": -1}, ValueError),
            ({"retry": 1}, TypeError),
            ({"on_lost": "ignore"}, ValueError),
            ({"max_hold": 1}, ValueError),
            ({"permits": 3}, TypeError),
            ({"reentrant": True}, TypeError),
            ({"hold_at_least": 1}, TypeError),
        ):
            with pytest.raises(error):
                make("x", **bad)
        with pytest.raises(ValueError, match="name"):
            make("")
        lock = make("x", ttl=7)
        assert (lock.name, lock.ttl) == ("x", 7)
        assert repr(lock) == f"<{type(lock).__name__} 'x' ttl=7>"


@pytest.mark.parametrize(
    ("tail", "access", "limit"),
    [("", None, 1), ("r", "reading", 1), ("w", "writing", 1), ("s12", "permit", 12)],
)
def test_owner_token_tells_what_it_asks_for(tail: str, access: str | None, limit: int) -> None:
    """By its tail; whatever letters its label has."""
    token = _names.owner_token(_names.holder_of("srw-s7", "0" * 32), 45) + tail
    assert _names.access_of(token) == access
    assert _names.limit_of(token) == limit
    value = _names.read_value(f"{token}/7")
    assert value == (token, 7, f"srw-s7:{'0' * 32}")
    assert _names.read_value(f"{token}x/7") is None
