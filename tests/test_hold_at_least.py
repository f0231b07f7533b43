"""A name that stays taken for a while after its release: by nobody, and no longer than that."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Lease,
    LeaseLostError,
    LockClient,
    LostReason,
    ServerUnreachable,
    _clock,
    _names,
)
from aiodlock.testing import LockServer, lock_server
from tests import topologies, wire
from tests.by_hand import ONE, A, B, ByHand, C
from tests.conftest import MakeClient
from tests.holders import KEY
from tests.keys import leftovers, ttls
from tests.mutants import Mutant
from tests.proxy import ChaosProxy
from tests.ticks import Order, Run, runs_of
from tests.until import forever, until

HOLD_S = 20.0
# What a round trip may take off on a busy machine, where the rest of a life is looked at.
SLACK_S = 5.0


async def left_s(redis: Redis) -> float:
    """For how long the name is still taken; less than 0: it is free."""
    return int(await redis.pttl(KEY)) / 1000


async def assert_kept(redis: Redis, lease: Lease, hold_s: float = HOLD_S) -> None:
    """It is released, but its name stays taken by nobody until about then."""
    assert lease.state in ("released", "lost")
    holder = lease.holder
    assert await redis.get(KEY) == f"{holder}:0/{lease.fencing_token}"
    assert hold_s - SLACK_S < await left_s(redis) <= hold_s


# After the release.


@pytest.mark.parametrize("ttl", [60, 5], ids=["shorter than the ttl", "longer than the ttl"])
async def test_name_after_the_release_stays_taken_until_then(
    locks: LockClient, redis: Redis, ttl: float
) -> None:
    """Its life becomes shorter or longer; whoever looks sees who had it."""
    lock = locks.lock("n", ttl=ttl, hold_at_least=HOLD_S)
    async with lock as lease:
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    await assert_kept(redis, lease)
    assert await lock.try_acquire() is None
    info = await lock.inspect()
    assert (info.held, info.fencing_token) == (True, lease.fencing_token)
    assert info.holder == lease.holder


async def test_name_counts_from_the_grant_not_from_the_release(
    locks: LockClient, redis: Redis
) -> None:
    """What the body took is a part of it."""
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    lease._keep_until -= 12  # type: ignore[operator]  # as if it had held for 12 s
    assert await lease.release() is True
    await assert_kept(redis, lease, HOLD_S - 12)


async def test_name_held_for_longer_than_that_is_free_at_the_release(
    locks: LockClient, redis: Redis
) -> None:
    """An ordinary release, which hands over to a waiter at once."""
    lease = await locks.lock("n", hold_at_least=0.05).acquire()
    waiting = asyncio.create_task(locks.lock("n").acquire())
    await until(lambda: redis.zcard(f"{KEY}:queue"))
    await asyncio.sleep(0.06)
    assert await lease.release() is True
    async with await asyncio.wait_for(waiting, 1):
        pass
    assert await leftovers(redis) == []


async def test_waiter_for_a_name_that_stays_taken_gets_it_when_that_ends(
    make_client: MakeClient, redis: Redis
) -> None:
    """Nobody tells it: it polls, and as the head at the very end of the key's life."""
    locks, others = make_client(), make_client(ttl=1)
    lease = await locks.lock("n", ttl=60, hold_at_least=0.7).acquire()
    granted_at = time.monotonic()
    waiting = [asyncio.create_task(others.lock("n").acquire()) for _ in range(2)]
    await until(lambda: are_queued(redis, 2))
    assert await lease.release() is True
    assert await are_queued(redis, 2), "the queue is left as it is"
    done, _ = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert time.monotonic() - granted_at >= 0.7 - 0.002
    assert done == {waiting[0]}
    for wait in waiting:
        await (await wait).release()
    assert await leftovers(redis) == []


async def are_queued(redis: Redis, waiters: int) -> bool:
    """Whether so many wait now."""
    return int(await redis.zcard(f"{KEY}:queue")) == waiters


async def test_lease_that_was_handed_over_counts_from_the_hand_off(
    make_client: MakeClient, redis: Redis
) -> None:
    """Not from the poll before it, which may be long ago."""
    locks = make_client()
    first = await make_client().lock("n").acquire()
    waiting = asyncio.create_task(locks.lock("n", hold_at_least=HOLD_S).acquire())
    await until(lambda: are_queued(redis, 1))
    await asyncio.sleep(0.5)
    began = _clock.now()
    await first.release()
    lease = await waiting
    assert lease._keep_until is not None
    assert lease._keep_until >= began + HOLD_S
    await lease.release()
    await assert_kept(redis, lease)


async def test_operator_breaks_a_name_that_stays_taken(locks: LockClient, redis: Redis) -> None:
    """As any lock; of that grant only, if it is named; and a waiter is handed it."""
    async with locks.lock("n", hold_at_least=HOLD_S) as lease:
        pass
    lock = locks.lock("n")
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: are_queued(redis, 1))
    assert await lock.break_lock(fencing_token=lease.fencing_token - 1) is False
    assert await lock.break_lock(fencing_token=lease.fencing_token) is True
    async with await asyncio.wait_for(waiting, 1):
        pass
    assert await leftovers(redis) == []


async def test_task_that_waits_for_its_own_name_that_stays_taken_is_not_refused(
    locks: LockClient,
) -> None:
    """It is nobody's, and it ends."""
    async with locks.lock("n", hold_at_least=0.3):
        pass
    async with locks.lock("n", hold_at_least=0.01):
        pass


async def test_reentrant_lock_keeps_the_name_from_its_last_release(
    locks: LockClient, redis: Redis
) -> None:
    """Not from an inner one."""
    lock = locks.lock("n", reentrant=True, hold_at_least=HOLD_S)
    async with lock as lease:
        async with lock:
            pass
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    await assert_kept(redis, lease)


async def test_decorated_function_runs_once_in_that_time(locks: LockClient, redis: Redis) -> None:
    """`locked` takes the option as it takes all of a lock's."""
    runs = 0

    @locks.locked("n", wait_timeout=0, hold_at_least=HOLD_S)
    async def job() -> None:
        nonlocal runs
        runs += 1

    await job()
    with pytest.raises(TimeoutError):
        await job()
    assert runs == 1
    assert 0 < await left_s(redis) <= HOLD_S


# However the block ends.


async def test_body_that_fails_or_is_cancelled_keeps_the_name(
    locks: LockClient, redis: Redis
) -> None:
    """The job of that time has had its chance."""
    lock = locks.lock("n", hold_at_least=HOLD_S)
    leases: list[Lease] = []
    with pytest.raises(ValueError, match="own"):
        async with lock as lease:
            raise ValueError("the body's own")
    await assert_kept(redis, lease)
    await redis.delete(KEY)

    async def work() -> None:
        async with lock as lease:
            leases.append(lease)
            await forever()

    task = asyncio.create_task(work())
    await until(lambda: leases)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await assert_kept(redis, leases[0])


@pytest.mark.parametrize("has_body", [True, False])
async def test_closing_client_keeps_the_name(
    make_client: MakeClient, redis: Redis, *, has_body: bool
) -> None:
    """Of a lease with a body, and of one without."""
    locks = make_client()
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()

    async def work() -> None:
        async with lease:
            await forever()

    task = asyncio.create_task(work() if has_body else asyncio.sleep(0))
    await asyncio.sleep(0)
    await locks.aclose()
    await asyncio.gather(task, return_exceptions=True)
    await assert_kept(redis, lease)


async def test_lease_that_was_lost_changes_nothing(locks: LockClient, redis: Redis) -> None:
    """The next holder's key stays as it is, and a free name stays free."""
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    await redis.set(KEY, "another's", px=1_000)
    assert await lease.release() is False
    assert await redis.get(KEY) == "another's"
    assert await left_s(redis) <= 1
    await redis.delete(KEY)
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("n", hold_at_least=HOLD_S):
            await redis.delete(KEY)
    assert lost.value.reason is LostReason.DELETED
    assert await redis.exists(KEY) == 0


async def test_lease_of_which_only_the_clock_says_that_it_is_lost_keeps_the_name(
    locks: LockClient, redis: Redis
) -> None:
    """The server has it still: to free it would let the next one run too early."""
    with pytest.raises(LeaseLostError):
        async with locks.lock("n", ttl=0.2, auto_extend=False, hold_at_least=HOLD_S) as lease:
            await redis.pexpire(KEY, 60_000)
            await until(lambda: not lease.is_held)
    await assert_kept(redis, lease)


# Copies and losses.


async def test_reply_to_the_release_that_is_lost_is_asked_for_again_and_prolongs_nothing(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The first copy has done it; what the second finds is no loss."""
    locks = make_client(proxy.url)
    async with locks.lock("warm", hold_at_least=0.01):
        pass
    async with locks.lock("n", hold_at_least=HOLD_S) as lease:
        fault = wire.lose(proxy, "retire")
    assert fault.hits == 1
    await assert_kept(redis, lease)
    assert await lease.release() is False


async def test_release_after_a_lost_grant_refuses_late_copies(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """A copy of the acquire may still come by the other connection, when the time is over."""
    locks = make_client(proxy.url)
    async with locks.lock("warm"):
        pass
    fault = wire.lose(proxy, "acquire")
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    assert fault.hits == 1
    await lease.release()
    await assert_kept(redis, lease)
    assert await redis.zrange(f"{KEY}:alive", 0, -1) == [f"!{lease.owner_token}"]


async def test_release_without_an_answer_says_so(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """As an ordinary one; it may be sent again."""
    locks = make_client(proxy.url, request_timeout=0.3)
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    proxy.black_hole()
    with pytest.raises(ServerUnreachable):
        await lease.release()
    proxy.heal(deliver=False)
    await lease.release()
    await assert_kept(redis, lease)


async def test_server_that_forgot_its_scripts_is_sent_the_text(
    locks: LockClient, redis: Redis
) -> None:
    """Once, as for every script."""
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    await redis.script_flush()
    assert await lease.release() is True
    await assert_kept(redis, lease)


async def test_full_server_keeps_the_name_all_the_same(locks: LockClient, redis: Redis) -> None:
    """It refuses to write down that the name is nobody's; its life is right."""
    lease = await locks.lock("n", hold_at_least=HOLD_S).acquire()
    await redis.config_set("maxmemory", 1)
    try:
        assert await lease.release() is True
        assert HOLD_S - SLACK_S < await left_s(redis) <= HOLD_S
    finally:
        await redis.config_set("maxmemory", 0)


# The script by hand.


async def retire(
    name: ByHand, token: str, life_ms: int, *, tombstone: bool = False
) -> tuple[int, str | None]:
    """What the script answers."""
    keys = (name.keys.lock, name.keys.alive)[: 1 + tombstone]
    answer, value = await name._call("retire", keys, token, _names.retired(token), str(life_ms))
    return int(answer), value


async def check_repeated_copies_prolong_nothing(name: ByHand) -> None:
    """Nor do late ones of an acquire, an extension or a release."""
    grant = await name.granted(A)
    assert await retire(name, A, 10_000) == (1, None)
    kept = (await name.state()).value
    assert kept == f"{ONE}:0/{grant.fencing_token}"
    for copy in (
        lambda: retire(name, A, 60_000),
        lambda: name.extend(f"{A}/{grant.fencing_token}", ttl_ms=60_000),
        lambda: name.release(A),
        lambda: name.refused(A, ttl_ms=60_000, alive_ms=0),
    ):
        await copy()
        state = await name.state()
        assert state.value == kept, "a copy changed what stands there"
        assert state.ttls_ms["lock"] <= 10_000, "a copy prolonged it"


async def check_only_the_owner_keeps_a_name(name: ByHand) -> None:
    """However alike another's token is; and a free name is left free."""
    assert await retire(name, A, 10_000) == (2, None)
    assert (await name.state()).value is None
    await name.granted(C)
    value = (await name.state()).value
    for other in (A, B, f"{C}3"):
        assert await retire(name, other, 60_000) == (0, value)
        state = await name.state()
        assert state.value == value
        assert 25_000 < state.ttls_ms["lock"] <= 30_000, "another changed its life"


async def check_kept_name_ends_by_itself_and_hands_nothing_over(name: ByHand) -> None:
    """The queue stays as it is; the head takes the name when its life is over."""
    await name.granted(A, ttl_ms=60_000)
    await name.refused(B)
    await name.refused(C)
    assert await retire(name, A, 100) == (1, None)
    state = await name.state()
    assert state.queue == [B, C]
    assert 0 < state.ttls_ms["lock"] <= 100
    await until(lambda: is_free(name))
    assert (await name.refused(C)).value.startswith(f"{B}/")
    assert (await name.state()).holder == B


async def is_free(name: ByHand) -> bool:
    """Whether nothing stands in the lock's key."""
    return (await name.state()).value is None


async def check_tombstone_refuses_late_copies(name: ByHand) -> None:
    """For a minute, also where the name was another's already, or has a shorter-lived `alive`."""
    await name.granted(A)
    await name.refused(B)
    assert await retire(name, A, 10_000, tombstone=True) == (1, None)
    kept = (await name.state()).value
    assert await name.acquire(A) is None
    assert 59_000 < (await name.state()).ttls_ms["alive"] <= 60_000
    assert await retire(name, f"{ONE}:3", 1, tombstone=True) == (0, kept)
    assert await name.acquire(f"{ONE}:3") is None


CHECKS = [
    check_repeated_copies_prolong_nothing,
    check_only_the_owner_keeps_a_name,
    check_kept_name_ends_by_itself_and_hands_nothing_over,
    check_tombstone_refuses_late_copies,
]
MUTANTS = [
    (
        "the kept name is its owner's still",
        check_repeated_copies_prolong_nothing,
        Mutant("retire", "ARGV[2] .. string.sub(value, #token)", "value"),
    ),
    (
        "kept by what begins alike",
        check_only_the_owner_keeps_a_name,
        Mutant("retire", "ARGV[1] .. '/'\n", "ARGV[1]\n"),
    ),
    (
        "kept by anybody",
        check_only_the_owner_keeps_a_name,
        Mutant("retire", "string.sub(value, 1, #token) ~= token", "false"),
    ),
    (
        "kept for ever",
        check_kept_name_ends_by_itself_and_hands_nothing_over,
        Mutant("retire", ", 'KEEPTTL'", ""),
    ),
    (
        "never kept for less",
        check_kept_name_ends_by_itself_and_hands_nothing_over,
        Mutant("retire", "redis.call('PEXPIRE', KEYS[1], ARGV[3])", ""),
    ),
    (
        "no tombstone",
        check_tombstone_refuses_late_copies,
        Mutant("retire", "if KEYS[2] then", "if false then"),
    ),
    (
        "a tombstone that dies with the queue",
        check_tombstone_refuses_late_copies,
        Mutant("retire", "if redis.call('PTTL', KEYS[2]) < 60000 then", "if false then"),
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_script_as_it_is_keeps_the_rule(redis: Redis, check: Any) -> None:
    """Each check, on the script that we ship."""
    await check(ByHand(redis))


@pytest.mark.parametrize(
    ("check", "mutant"),
    [pytest.param(check, mutant, id=label) for label, check, mutant in MUTANTS],
)
async def test_script_without_its_line_breaks_the_rule(
    redis: Redis, check: Any, mutant: Mutant
) -> None:
    """Each check, where the line that keeps the rule is taken out: it must fail."""
    with mutant.applied(), pytest.raises(AssertionError):
        await check(ByHand(redis))


def test_every_check_has_a_mutant() -> None:
    """No check that nothing can turn red."""
    assert {check.__name__ for _, check, _ in MUTANTS} == {check.__name__ for check in CHECKS}


async def test_key_of_another_type_is_left_alone(locks: LockClient, redis: Redis) -> None:
    """It counts as lost, as for an ordinary release."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("n", hold_at_least=HOLD_S):
            await redis.delete(KEY)
            await redis.rpush(KEY, "not a lock")
    assert lost.value.reason is LostReason.STOLEN
    assert await redis.lrange(KEY, 0, -1) == ["not a lock"]


# Elsewhere.


@pytest.fixture(scope="module")
def servers() -> Any:
    """Three that know nothing of each other."""
    with lock_server() as one, lock_server() as two, lock_server() as three:
        yield one, two, three


@pytest.mark.parametrize("fencing", [True, False])
async def test_quorum_keeps_the_name_on_a_majority(
    servers: tuple[LockServer, ...], *, fencing: bool
) -> None:
    """With one server stopped, too."""
    urls = [server.url for server in servers]
    async with LockClient.quorum(urls, fencing=fencing, ttl=5) as locks:
        lock = locks.lock(f"n{fencing}", hold_at_least=HOLD_S)
        async with lock:
            servers[0].pause()
        try:
            assert await lock.try_acquire() is None
        finally:
            servers[0].resume()
        info = await lock.inspect()
        assert info.held
        assert info.ttl_left is not None
        assert HOLD_S - SLACK_S < info.ttl_left <= HOLD_S
        assert await lock.try_acquire() is None
        assert await lock.break_lock() is True
        async with lock.acquire(wait_timeout=5):
            pass


async def test_cluster_keeps_the_name(redis: Redis) -> None:
    """By one key, which a slot that is being moved does not refuse."""
    async with (
        topologies.cluster() as cluster,
        cluster.client() as client,
        LockClient(client) as locks,
    ):
        async with locks.lock("n", hold_at_least=HOLD_S):
            pass
        info = await locks.lock("n").inspect()
        assert info.held
        assert info.ttl_left is not None
        assert HOLD_S - SLACK_S < info.ttl_left <= HOLD_S


async def test_memory_keeps_the_name() -> None:
    """For users' tests."""
    async with LockClient.from_url("memory://") as locks:
        async with locks.lock("n", hold_at_least=HOLD_S):
            pass
        assert await locks.lock("n").try_acquire() is None
        assert 0 < ((await locks.lock("n").inspect()).ttl_left or 0) <= HOLD_S


# What is refused.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"hold_at_least": 0}, ValueError),
        ({"hold_at_least": -1}, ValueError),
        ({"hold_at_least": math.inf}, ValueError),
        ({"hold_at_least": math.nan}, ValueError),
        ({"hold_at_least": 31, "max_hold": 30}, ValueError),
        ({"hold_at_least": True}, TypeError),
        ({"hold_at_least": "5"}, TypeError),
    ],
)
def test_time_that_cannot_be_kept_is_refused_at_construction(
    locks: LockClient, options: dict[str, Any], error: type[Exception]
) -> None:
    """With a message that says what is allowed; and at the bound it is allowed."""
    with pytest.raises(error, match=r"hold_at_least.*must be a real number of seconds, at least"):
        locks.lock("n", **options)
    assert locks.lock("n", hold_at_least=30, max_hold=30).ttl == 30


# Many processes.


def too_near(runs: list[Run], hold_s: float) -> list[tuple[Run, Run]]:
    """Neighbours of which the later one had the lock before the earlier one's time was over.

    A server counts in whole ms.
    """
    return [
        (earlier, later)
        for earlier, later in itertools.pairwise(runs)
        if later.got_s - earlier.asked_s < hold_s - 0.002
    ]


PERIOD_S, APART_S, KEPT_S = 0.6, 0.1, 0.4
BEHIND_S = [0.0, APART_S, 2 * APART_S]


async def test_job_of_instances_whose_clocks_differ_runs_once_a_tick(
    server: LockServer, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three processes with clocks up to 0.2 s apart, each killed once; never two runs too near."""
    order = Order(server.url, time.monotonic(), PERIOD_S, KEPT_S)
    runs = await runs_of(order, behind_s=BEHIND_S, kills=3)
    with capsys.disabled():
        print(f"\nhold_at_least: {len(runs)} runs of {runs[-1].tick - runs[0].tick + 1} ticks")
    assert too_near(runs, KEPT_S) == []
    assert len(runs) >= 5
    assert all(ttl > 0 for ttl in (await ttls(redis)).values())


async def test_job_of_such_instances_without_it_runs_again_in_one_tick(
    server: LockServer,
) -> None:
    """The negative control: a lock alone does not make it once."""
    order = Order(server.url, time.monotonic(), PERIOD_S, None)
    runs = await runs_of(order, behind_s=BEHIND_S, kills=0)
    assert too_near(runs, KEPT_S) != []
