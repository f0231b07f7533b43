"""The scripts in odd worlds: lost keys, stepping clocks, foreign values, numbers at a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ResponseError

from aiodlock import LeaseLostError, LockClient, LostReason, NameTakenError, _names
from aiodlock._clock import TTL_MAX_S
from aiodlock._store import _wire
from aiodlock.testing import LockServer
from tests.by_hand import A, B, ByHand, C, D, client_id
from tests.conftest import MakeClient
from tests.keys import leftovers, ttls
from tests.mutants import Mutant
from tests.until import until

DAY_MS = 86_400_000
TOMBSTONE_MS = 60_000
# What passes between two looks at a key, on a busy machine.
SLACK_MS = 3_000


@pytest.fixture
def name(redis: Redis) -> ByHand:
    """One name on an empty server."""
    return ByHand(redis)


def is_about(ms: float, expected_ms: float) -> bool:
    """Whether *ms*, which only shrinks, was *expected_ms* a moment ago."""
    return expected_ms - SLACK_MS < ms <= expected_ms


def test_scripts_of_shares_have_word_for_word_the_same_middle() -> None:
    """Between two rules: who may enter, which an acquisition and a release must see alike."""
    parts = [
        _wire.Script(name).text.split("\n-- ---") for name in ("share_acquire", "share_release")
    ]
    assert [len(part) for part in parts] == [3, 3]
    assert parts[0][1] == parts[1][1]


# No script ever shortens the life of the lock's key.


async def check_nothing_shortens_the_lock(name: ByHand) -> None:
    """Neither its owner with a smaller ttl, nor anybody else; answers tell what is really left."""
    fencing_token = (await name.granted(A, ttl_ms=30_000)).fencing_token
    grant = await name.granted(A, ttl_ms=500)
    assert is_about(grant.ttl_left_ms, 30_000)
    left_ms = await name.extend(f"{A}/{fencing_token}", ttl_ms=500)
    assert isinstance(left_ms, int)
    assert is_about(left_ms, 30_000)
    refusal = await name.refused(B, ttl_ms=500, alive_ms=1000)
    assert is_about(refusal.ttl_left_ms, 30_000)
    await name.refused(C, ttl_ms=500, alive_ms=0)
    await name.release(B)
    await name.release(D, tombstone=True)
    assert is_about((await name.state()).ttls_ms["lock"], 30_000)


async def check_nothing_shortens_a_hand_off(name: ByHand) -> None:
    """A waiter with a small ttl was handed a lock for 6 s: its poll leaves it at that."""
    await name.granted(A)
    await name.refused(B, ttl_ms=500, alive_ms=6_000)
    await name.release(A)
    assert is_about((await name.granted(B, ttl_ms=500)).ttl_left_ms, 6_000)
    assert is_about((await name.state()).ttls_ms["lock"], 6_000)


@pytest.mark.parametrize(
    "check", [check_nothing_shortens_the_lock, check_nothing_shortens_a_hand_off]
)
async def test_lock_asked_with_a_smaller_ttl_keeps_its_life(
    name: ByHand, check: Callable[[ByHand], Awaitable[None]]
) -> None:
    """By poll, extension or anything else."""
    await check(name)


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (
            check_nothing_shortens_the_lock,
            Mutant("acquire", "if left < ttl_ms then", "if true then"),
        ),
        (
            check_nothing_shortens_a_hand_off,
            Mutant("acquire", "if left < ttl_ms then", "if true then"),
        ),
        (
            check_nothing_shortens_the_lock,
            Mutant("extend", "if left < ttl_ms then", "if true then"),
        ),
    ],
)
async def test_script_that_sets_the_ttl_always_is_noticed(
    name: ByHand, check: Callable[[ByHand], Awaitable[None]], mutant: Mutant
) -> None:
    """The two checks above can fail."""
    with mutant.applied(), pytest.raises(AssertionError):
        await check(name)


async def test_lock_asked_with_a_larger_ttl_lives_longer(name: ByHand) -> None:
    """By poll and by extension; one that somebody made persistent gets its ttl back."""
    fencing_token = (await name.granted(A, ttl_ms=5_000)).fencing_token
    assert (await name.granted(A, ttl_ms=20_000)).ttl_left_ms == 20_000
    assert is_about((await name.state()).ttls_ms["lock"], 20_000)
    assert await name.extend(f"{A}/{fencing_token}", ttl_ms=40_000) == 40_000
    assert is_about((await name.state()).ttls_ms["lock"], 40_000)
    await name.redis.persist(name.keys.lock)
    assert await name.extend(f"{A}/{fencing_token}", ttl_ms=5_000) == 5_000
    await name.redis.persist(name.keys.lock)
    assert (await name.granted(A, ttl_ms=5_000)).ttl_left_ms == 5_000
    assert is_about((await name.state()).ttls_ms["lock"], 5_000)


async def test_lease_extended_by_less_than_it_has_keeps_its_deadline(
    name: ByHand, locks: LockClient
) -> None:
    """A whole client: what it is told is what is really left, also by a lock with a small ttl."""
    async with locks.lock("name", ttl=30.0) as lease:
        assert await lease.extend(0.5) > 25.0
        assert await locks.lock("name", ttl=0.5).try_acquire() is None
        assert lease.remaining > 25.0
        assert is_about((await name.state()).ttls_ms["lock"], 30_000)
        assert await lease.extend(60.0) > 55.0
        assert is_about((await name.state()).ttls_ms["lock"], 60_000)


@pytest.mark.parametrize("waiters", [0, 1])
async def test_body_whose_key_was_deleted_is_told_so_whoever_waits(
    name: ByHand, locks: LockClient, waiters: int
) -> None:
    """Its own release hands the free lock on; that is nobody's theft."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("name", ttl=30.0):
            for _ in range(waiters):
                await name.refused(B)
            await name.let_expire()
    assert lost.value.reason is LostReason.DELETED
    assert (await name.state()).holder == (B if waiters else None)


async def test_extension_of_what_is_gone_creates_nothing(name: ByHand) -> None:
    """It says that nothing stands there."""
    fencing_token = (await name.granted(A)).fencing_token
    await name.let_expire()
    assert await name.extend(f"{A}/{fencing_token}") is None
    assert (await name.state()).value is None


async def test_waiters_of_different_ttl_share_a_queue(name: ByHand) -> None:
    """One of ttl 30 (alive 6 s), one of ttl 0.5 (alive 1 s): none shortens the other's life."""
    await name.granted(A)
    await name.refused(B, ttl_ms=30_000, alive_ms=6_000)
    before = (await name.state()).alive[B]
    await name.refused(C, ttl_ms=500, alive_ms=1_000)
    state = await name.state()
    assert state.queue == [B, C]
    assert state.alive[B] == before
    assert is_about(state.alive[C] - await name.now_ms(), 1_000)
    assert is_about(state.ttls_ms["queue"], 12_000)
    assert is_about(state.ttls_ms["alive"], 12_000)
    await name.release(A)
    state = await name.state()
    assert state.holder == B
    assert is_about(state.ttls_ms["lock"], 6_000)
    await name.release(B)
    state = await name.state()
    assert state.holder == C
    assert is_about(state.ttls_ms["lock"], 1_000)


# A clock that stepped, keys that were evicted.


async def test_head_with_liveness_far_ahead_is_cut_to_six_seconds(name: ByHand) -> None:
    """The clock stepped back since it polled; those behind it are not looked at."""
    await name.granted(A)
    await name.refused(B)
    await name.refused(C)
    far_ms = await name.now_ms() + 3_600_000
    await name.redis.zadd(name.keys.alive, {B: far_ms, C: far_ms, f"!{A}": far_ms})
    await name.refused(D, alive_ms=1_000)
    state = await name.state()
    assert is_about(state.alive[B] - await name.now_ms(), 6_000)
    assert state.alive[C] == far_ms
    assert state.alive[f"!{A}"] == far_ms, "a tombstone is no waiter"


@pytest.mark.parametrize("by_release", [True, False])
async def test_grant_to_liveness_far_ahead_lives_six_seconds(
    name: ByHand, *, by_release: bool
) -> None:
    """By release, and by the poll of another."""
    await name.granted(A)
    await name.refused(B)
    await name.redis.zadd(name.keys.alive, {B: await name.now_ms() + 3_600_000})
    if by_release:
        await name.release(A)
    else:
        await name.let_expire()
        await name.refused(C)
    state = await name.state()
    assert state.holder == B
    assert is_about(state.ttls_ms["lock"], 6_000)


async def test_head_without_liveness_gets_one(name: ByHand) -> None:
    """By the poll of another, which does not drop it; a second poll does not give it more."""
    await name.granted(A)
    await name.refused(B)
    await name.refused(C)
    await name.redis.delete(name.keys.alive)
    await name.refused(C)
    first = await name.state()
    assert first.queue == [B, C]
    assert is_about(first.alive[B] - await name.now_ms(), 6_000)
    await name.refused(C)
    assert (await name.state()).alive[B] == first.alive[B]


@pytest.mark.parametrize("evicted", ["lock", "fence", "queue", "alive"])
async def test_name_with_one_key_evicted_goes_on(name: ByHand, evicted: str) -> None:
    """Every key alone: waiters are granted in their order, tokens grow, nothing stays behind."""
    grants = [(await name.granted(A)).fencing_token]
    await name.refused(B)
    await name.refused(C)
    await name.redis.delete(getattr(name.keys, evicted))
    for waiter in (B, C):  # as each does by timer
        await name.acquire(waiter)
    expected = {"lock": [C]}.get(evicted, [B, C])
    assert (await name.state()).queue == expected
    await name.release(A)
    for holder in (B, C):
        state = await name.state()
        assert state.holder == holder
        assert state.value is not None
        grants.append(int(state.value.rpartition("/")[2]))
        assert min(state.ttls_ms.values()) > 0
        await name.release(holder)
    assert grants == sorted(set(grants))
    assert await leftovers(name.redis) == []


async def test_fence_key_lives_a_day_from_each_grant(name: ByHand) -> None:
    """On each of the four ways to a grant."""

    async def check(grant: Awaitable[object]) -> None:
        await name.redis.expire(name.keys.fence, 100)
        await grant
        assert is_about((await name.state()).ttls_ms["fence"], DAY_MS)

    await check(name.granted(A))
    await name.refused(B)
    await name.refused(C)
    await check(name.release(A))
    await name.let_expire()
    await check(name.refused(D))
    await name.let_expire()
    await check(name.granted(D))


async def test_life_of_the_queue_is_twelve_seconds_from_each_poll(name: ByHand) -> None:
    """A poll that does not queue gives it none; none takes any away."""
    await name.granted(A)
    await name.refused(B)
    for key in (name.keys.queue, name.keys.alive):
        await name.redis.expire(key, 8)
    await name.refused(C, alive_ms=0)
    assert is_about((await name.state()).ttls_ms["queue"], 8_000)
    await name.refused(C, alive_ms=1_000)
    state = await name.state()
    assert is_about(state.ttls_ms["queue"], 12_000)
    assert is_about(state.ttls_ms["alive"], 12_000)


# Tombstones.


async def test_tombstone_refuses_its_acquisition_only(name: ByHand) -> None:
    """For a minute, free or held; it is no waiter, and gets no hand-off."""
    await name.release(B, tombstone=True)
    state = await name.state()
    assert is_about(state.alive[f"!{B}"] - await name.now_ms(), TOMBSTONE_MS)
    assert is_about(state.ttls_ms["alive"], TOMBSTONE_MS)
    assert await name.acquire(B) is None
    assert await name.acquire(B, alive_ms=0) is None
    assert (await name.state()).value is None
    await name.granted(A)
    assert await name.acquire(B) is None
    refusal = await name.refused(C)
    assert (refusal.place, refusal.waiters) == (0, 1)
    await name.release(C)
    assert await name.release(A) == (True, None)
    state = await name.state()
    assert (state.value, state.queue, list(state.alive)) == (None, [], [f"!{B}"])


async def test_tombstone_outlives_the_polls_of_others(name: ByHand) -> None:
    """`alive` keeps its longer life, the tombstone its place in it."""
    await name.granted(A)
    await name.release(B, tombstone=True)
    for _ in range(3):
        await name.refused(C, alive_ms=1_000)
        await name.refused(D, alive_ms=1_000)
    await name.release(C)
    state = await name.state()
    assert is_about(state.ttls_ms["alive"], TOMBSTONE_MS)
    assert await name.acquire(B) is None


async def test_tombstone_is_purged_when_its_minute_is_over(name: ByHand) -> None:
    """By the next poll of anybody; one that is not over stays."""
    await name.granted(A)
    await name.release(B, tombstone=True)
    await name.release(D, tombstone=True)
    await name.let_die(f"!{B}")
    await name.refused(C)
    assert sorted((await name.state()).alive) == [f"!{D}", C]


async def test_release_that_leaves_a_tombstone_frees_and_hands_over(name: ByHand) -> None:
    """Of a holder with a waiter, of a holder alone, of a waiter: each does all its work."""
    await name.granted(A)
    await name.refused(B)
    await name.refused(C)
    assert (await name.release(B, tombstone=True))[0] is False
    assert (await name.state()).queue == [C]
    await name.hand_over(A, C, tombstone=True)
    assert await name.release(C, tombstone=True) == (True, None)
    state = await name.state()
    assert (state.value, state.queue) == (None, [])
    assert sorted(state.alive) == sorted(f"!{token}" for token in (A, B, C))


# Bounds.


async def test_purge_takes_a_thousand_at_a_time(name: ByHand) -> None:
    """Of dead waiters and of old tombstones alike, so that no call blocks the server for long."""
    await name.granted(A)
    dead = [f"{B}{n}" for n in range(2500)]
    past_ms = await name.now_ms() - 1
    await name.redis.zadd(name.keys.queue, {token: n for n, token in enumerate(dead, 1)})
    await name.redis.zadd(name.keys.alive, dict.fromkeys(dead, past_ms))
    await name.refused(C)
    assert (await name.state()).queue == [*dead[1000:], C]
    await name.refused(C)
    await name.refused(C)
    assert (await name.state()).queue == [C]
    await name.redis.zadd(name.keys.alive, {f"!{token}": past_ms for token in dead})
    await name.refused(C)
    assert len((await name.state()).alive) == 1500 + 1
    await name.refused(C)
    await name.refused(C)
    assert list((await name.state()).alive) == [C]


@pytest.mark.parametrize("by_release", [True, False])
async def test_live_waiter_behind_a_thousand_dead_is_granted_its_liveness(
    name: ByHand, *, by_release: bool
) -> None:
    """It trusts the message as long as it knows itself alive, so the grant must last as long."""
    await name.granted(A)
    dead = [f"{B}{n}" for n in range(1000)]
    past_ms = await name.now_ms() - 1
    await name.redis.zadd(name.keys.queue, {token: n for n, token in enumerate(dead, 1)})
    await name.refused(C)  # drops nobody: the first is not known to be dead yet
    await name.redis.zadd(name.keys.alive, dict.fromkeys(dead, past_ms))
    assert (await name.state()).queue == [*dead, C]
    if by_release:
        await name.release(A)
    else:
        await name.let_expire()
    await name.refused(D)  # whatever that call could not do, the next poll does
    state = await name.state()
    assert (state.holder, state.queue) == (C, [D])
    assert is_about(state.ttls_ms["lock"], 6_000)


# Numbers.


@pytest.mark.parametrize("last", [2**31, 2**32 + 1, 10**15 + 1, 2**52 + 1, 2**53 - 20])
async def test_fencing_tokens_are_exact(name: ByHand, last: int) -> None:
    """Where Lua's `..` would cut digits: in replies, in the key, in what a release names."""

    async def in_the_key() -> int:
        return int(str((await name.state()).value).rpartition("/")[2])

    await name.redis.set(name.keys.fence, last, ex=86_400)
    now_us = await name.now_ms() * 1000
    first = (await name.granted(A)).fencing_token
    if last > now_us:
        assert first == last + 1
    else:
        assert now_us < first < now_us + SLACK_MS * 1000
    await name.redis.set(name.keys.fence, 2**53 - 20, ex=86_400)
    assert (await name.granted(A)).fencing_token == await in_the_key() == first
    assert (await name.refused(B)).last_fencing_token == 2**53 - 20
    await name.refused(C)
    assert (await name.release(A))[1] == f"{B}/{2**53 - 19}"
    assert (await name.granted(B)).fencing_token == await in_the_key() == 2**53 - 19
    await name.let_expire()
    assert (await name.refused(D)).value == f"{C}/{2**53 - 18}"
    await name.let_expire()
    assert (await name.granted(D)).fencing_token == await in_the_key() == 2**53 - 17
    await name.release(D)
    assert (await name.granted(A)).fencing_token == await in_the_key() == 2**53 - 16


async def test_refusal_without_fence_key_tells_the_time(name: ByHand) -> None:
    """In microseconds, whole: a message of before is then smaller."""
    await name.granted(A)
    await name.redis.delete(name.keys.fence)
    before_us = await name.now_ms() * 1000
    told = (await name.refused(B)).last_fencing_token
    assert before_us <= told < before_us + SLACK_MS * 1000


@pytest.mark.parametrize("ttl_ms", [10, 2**31 + 1, int(TTL_MAX_S * 1000)])
async def test_ttl_at_its_limits_is_exact(name: ByHand, ttl_ms: int) -> None:
    """From the smallest that is allowed to the largest: set, told, extended, confirmed."""
    grant = await name.granted(A, ttl_ms=ttl_ms)
    assert (grant.ttl_left_ms, grant.already) == (ttl_ms, False)
    left_ms = await name.redis.pttl(name.keys.lock)
    if ttl_ms > SLACK_MS:
        assert is_about(left_ms, ttl_ms)
        value = f"{A}/{grant.fencing_token}"
        assert await name.extend(value, ttl_ms=ttl_ms) in range(ttl_ms - SLACK_MS, ttl_ms + 1)
        assert is_about((await name.granted(A, ttl_ms=ttl_ms)).ttl_left_ms, ttl_ms)
        assert is_about((await name.refused(B)).ttl_left_ms, ttl_ms)
    else:
        assert left_ms <= ttl_ms


# Keys that hold something else.


@pytest.mark.parametrize("key", ["lock", "fence", "queue", "alive"])
@pytest.mark.parametrize("held", [True, False])
async def test_key_of_another_type_is_refused_and_left_alone(
    name: ByHand, make_client: MakeClient, key: str, *, held: bool
) -> None:
    """A `NameTakenError` for whoever acquires; nothing is written, above all no key without ttl."""
    if held:
        await name.redis.set(name.keys.lock, "somebody's", px=30_000)
    wrong_key = getattr(name.keys, key)
    await name.redis.delete(wrong_key)
    await name.redis.rpush(wrong_key, "not a lock's")
    locks = make_client(ttl=5.0)
    lock = locks.lock("name", wait_timeout=2.0)
    for acquire in (lock.acquire, lock.try_acquire):
        with pytest.raises(NameTakenError, match="'name'"):
            await acquire()
    await locks.aclose()  # what it finishes in the background is done
    assert await name.redis.lrange(wrong_key, 0, -1) == ["not a lock's"]
    expected = {name.keys.lock} if held and key != "lock" else set()
    others_ms = await ttls(name.redis)
    del others_ms[wrong_key]
    assert set(others_ms) - {name.keys.fence} == expected
    assert min(others_ms.values(), default=1) > 0, "without a ttl"


@pytest.mark.parametrize("key", ["fence", "queue", "alive"])
async def test_release_beside_a_key_of_another_type_frees_the_lock(name: ByHand, key: str) -> None:
    """What stands in a side key is no reason to hold the lock until its ttl is over."""
    await name.granted(A)
    await name.redis.delete(getattr(name.keys, key))
    await name.redis.rpush(getattr(name.keys, key), "not a lock's")
    with suppress(ResponseError):  # it may tell of what it found
        await name.release(A)
    assert await name.redis.get(name.keys.lock) is None


# Locks of other libraries.


async def test_foreign_lock_is_opaque(name: ByHand) -> None:
    """Refused with its value and its time; no release or extension of ours removes it."""
    value = "6f1c:not/ours"
    for px in (None, 20_000):
        await name.redis.set(name.keys.lock, value, px=px)
        refusal = await name.refused(B)
        assert refusal.value == value
        assert refusal.ttl_left_ms == -1 if px is None else is_about(refusal.ttl_left_ms, px)
        assert await name.release(A) == (False, value)
        assert await name.extend(f"{A}/1") == value
        assert await name.redis.get(name.keys.lock) == value
    await name.redis.delete(name.keys.lock)  # a foreign release
    assert (await name.granted(B)).already is False


# Who is told of a hand-off.


@asynccontextmanager
async def inbox_of(redis: Redis, token: str) -> AsyncIterator[list[str]]:
    """The messages that the client of *token* would get."""
    heard: list[str] = []
    async with redis.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(_names.inbox("aiodlock:", client_id(token)))

        async def listen() -> None:
            while True:
                message = await pubsub.get_message(timeout=None)
                if message is not None:
                    heard.append(message["data"])

        listening = asyncio.create_task(listen())
        yield heard
        listening.cancel()
        await asyncio.wait([listening])


async def test_hand_off_is_told_once_and_to_its_waiter_only(name: ByHand) -> None:
    """By release and by the poll of another; not where the reply of the release tells it."""
    async with inbox_of(name.redis, A) as ones, inbox_of(name.redis, B) as others:
        await until(lambda: _subscribers(name.redis, A, B))
        await name.granted(A)
        for waiter in (B, C, D):
            await name.refused(waiter)
        to_b = await name.hand_over(A, B, client_id=client_id(A))
        await until(lambda: others)
        to_c = await name.hand_over(B, C, client_id=client_id(B))
        await until(lambda: ones)
        await name.refused(A)
        await name.hand_over(C, D, client_id=client_id(C))
        await name.hand_over(D, A, client_id=client_id(A))  # as by break_lock of A's client
        await name.refused(B)
        await name.let_expire()
        to_b_again = (await name.refused(A)).value  # A's poll hands it to B
        await until(lambda: len(others) == 2)
        assert ones == [f"{to_c} {name.keys.lock}"]
        assert others == [f"{value} {name.keys.lock}" for value in (to_b, to_b_again)]


@pytest.mark.parametrize("by_release", [True, False])
async def test_refused_channel_does_not_undo_a_hand_off(
    name: ByHand, server: LockServer, *, by_release: bool
) -> None:
    """The releasing user may not publish: the waiter holds all the same, and learns it by poll."""
    await name.redis.acl_setuser(
        "mute",
        enabled=True,
        nopass=True,
        keys=["aiodlock:*"],
        commands=["+@all"],
        reset_channels=True,
    )
    try:
        url = f"redis://mute:any@127.0.0.1:{server.port}"
        async with Redis.from_url(url, decode_responses=True) as mute:
            with pytest.raises(ResponseError, match="channel"):
                await mute.publish("aiodlock:inbox:x", "message")
            muted = ByHand(mute)
            await name.granted(A)
            await name.refused(B)
            await name.refused(C)
            if by_release:
                await muted.hand_over(A, B)
            else:
                await name.let_expire()
                assert (await muted.refused(D)).value.startswith(f"{B}/")
            assert (await name.state()).queue == ([C] if by_release else [C, D])
            assert (await name.granted(B)).already is True
    finally:
        await name.redis.acl_deluser("mute")


# Names.

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.text(
    "a{}%7BD25:/! \n\0", min_size=1, max_size=8
)


@settings(max_examples=300, deadline=None)
@given(NAMES, NAMES)
@example("{", "%7B")
@example("a", "a}:fence")
@example("a:queue", "a")
@example("%", "%25")
def test_two_names_never_share_a_key(one: str, other: str) -> None:
    """And all keys of one name share a slot, whatever is in it."""
    ones, others = (_names.keys("aiodlock:", name) for name in (one, other))
    assert len({*ones, *others}) == (4 if one == other else 8)
    assert len({key_slot(key.encode()) for key in ones}) == 1
    assert {key.startswith("aiodlock:") for key in ones} == {True}


@pytest.mark.parametrize(
    "odd",
    [
        "{",
        "}",
        "{}",
        "a}{b",
        "%7B",
        " two words ",
        "line\nbreak\r\n",
        "\0",
        "naïve ☃",
        "'\"\\",
        "*?[",
    ],
)
async def test_name_of_any_characters_is_locked_and_handed_over(
    make_client: MakeClient, redis: Redis, odd: str
) -> None:
    """By message to another client, whose text holds the key."""
    one, other = make_client(), make_client()
    lease = await one.lock(odd).acquire()
    waiting = asyncio.create_task(other.lock(odd).acquire())
    await until(lambda: _has_waiters(one, odd, 1))
    await until(lambda: _subscribers(redis))
    await lease.release()
    handed = await waiting
    assert (await one.lock(odd).inspect()).fencing_token == handed.fencing_token
    await handed.release()
    assert await leftovers(redis) == []


async def _subscribers(redis: Redis, *tokens: str) -> bool:
    channels = [_names.inbox("aiodlock:", client_id(token)) for token in tokens]
    counts = await redis.pubsub_numsub(*channels) if channels else await redis.pubsub_channels()
    return bool(counts) and all(count if not channels else count[1] for count in counts)


async def _has_waiters(locks: LockClient, name: str, waiters: int) -> bool:
    return (await locks.lock(name).inspect()).waiters == waiters
