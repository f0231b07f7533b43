"""Random sequences of script calls on one name: after each call the invariants hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.by_hand import ONE, OTHER, A, B, ByHand, C, State

TOKENS = [A, B, C, f"{ONE}:2", f"{OTHER}:2"]
token = st.sampled_from(TOKENS)


@dataclass(frozen=True)
class Acquire:
    token: str
    ttl_ms: int
    alive_ms: int


@dataclass(frozen=True)
class Extend:
    token: str


@dataclass(frozen=True)
class Release:
    token: str
    tombstone: bool


@dataclass(frozen=True)
class Expire:
    """The holder's time is over."""


@dataclass(frozen=True)
class Die:
    """A waiter's liveness has passed."""

    token: str


@dataclass(frozen=True)
class Evict:
    key: str


Step = Acquire | Extend | Release | Expire | Die | Evict

# Long enough that none passes by itself within a sequence.
acquires = st.builds(
    Acquire, token, st.sampled_from([10_000, 30_000]), st.sampled_from([0, 5_000, 6_000, 6_000])
)
releases = st.builds(Release, token, st.sampled_from([False, False, False, True]))
others: st.SearchStrategy[Step] = st.one_of(
    st.builds(Extend, token),
    st.builds(Expire),
    st.builds(Die, token),
    st.builds(Evict, st.sampled_from(["fence", "queue", "alive"])),
)
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(acquires, acquires, acquires, releases, others), min_size=5, max_size=30
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps)
async def test_name_after_any_sequence_of_calls_keeps_the_invariants(
    redis: Redis, sequence: list[Step]
) -> None:
    """Grants in the order of arrival, tokens that grow, and no key without a ttl."""
    await redis.flushall()
    name = ByHand(redis)
    before = await name.state()
    largest = 0
    for step in sequence:
        if isinstance(step, Die) and not {step.token} <= {*before.queue} & {*before.alive}:
            continue  # it has no liveness that could pass
        now_ms = await name.now_ms()
        await perform(name, step, before)
        after = await name.state()
        told = f"{step}\n  before {before}\n  after  {after}"

        # 1: every key has a ttl.
        assert min(after.ttls_ms.values(), default=1) > 0, told
        # 2, 4 and 5: who holds afterwards, by the order of arrival.
        assert after.holder == expected_holder(step, before, now_ms), told
        # 3: the holder is not in the queue.
        assert after.holder not in {*after.queue, *after.alive}, told
        # 6: a new grant has a new, larger token.
        if after.value is not None and after.value != before.value:
            fencing_token = int(after.value.partition("/")[2])
            assert fencing_token > largest, told
            assert after.fencing_token == fencing_token, told
            largest = fencing_token
            event("granted")
        # The order is kept: who stays stays in place, who is new stands behind.
        stay = [waiter for waiter in before.queue if waiter in after.queue]
        assert after.queue[: len(stay)] == stay, told
        before = after


async def perform(name: ByHand, step: Step, before: State) -> Any:
    """What the step says, on the server."""
    match step:
        case Acquire(token, ttl_ms, alive_ms):
            return await name.acquire(token, ttl_ms=ttl_ms, alive_ms=alive_ms)
        case Extend(token):
            fencing_token = (before.value or "/0").partition("/")[2]
            return await name.extend(f"{token}/{fencing_token}")
        case Release(token, tombstone):
            return await name.release(token, tombstone=tombstone)
        case Expire():
            return await name.let_expire()
        case Die(token):
            return await name.let_die(token)
        case Evict(key):
            return await name.redis.delete(getattr(name.keys, key))


def expected_holder(step: Step, before: State, now_ms: int) -> str | None:
    """Who holds after *step*, if there is justice."""
    waiters = list(before.queue)
    alive = dict(before.alive)
    match step:
        case Expire():
            return None
        case Acquire(token, _, alive_ms):
            if before.holder is not None or f"!{token}" in alive:
                return before.holder
            if alive_ms:
                alive[token] = now_ms + alive_ms
            newcomer: str | None = token
        case Release(token) if before.holder in (None, token):
            waiters = [waiter for waiter in waiters if waiter != token]
            newcomer = None
        case _:
            return before.holder
    # A waiter without a liveness, which was evicted, counts as live.
    live = [waiter for waiter in waiters if alive.get(waiter, now_ms + 1) > now_ms]
    return live[0] if live else newcomer
