"""Rules whose faults no other test noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Backoff,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    _clock,
    _names,
    _waiting,
)
from aiodlock._store._api import Acquisition, Released
from aiodlock._validity import Validity
from tests import wire
from tests.by_hand import A, ByHand
from tests.conftest import MakeClient
from tests.holders import KEY, hears, holding, watchdogs
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import forever, until


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """What happens inside takes no longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


async def warm(locks: LockClient) -> None:
    """Connect, and have the scripts in the server's cache."""
    async with locks.lock("warm") as lease:
        await lease.extend()


async def hearing(locks: LockClient) -> None:
    """Wait until messages reach the client's waiters."""
    await until(lambda: hears(locks))


# Deadlines.


async def test_deadline_of_an_extension_counts_from_before_it_was_sent(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The delay is far more than the drift."""
    locks = make_client(proxy.url)
    await warm(locks)
    lease = await locks.lock("n", ttl=2).acquire()
    proxy.delay_replies(0.3, wire.sha("extend"), n=1)
    assert await lease.extend(5) < 5
    assert lease.remaining <= 5 - 0.3
    await lease.release()


async def test_deadline_of_an_extension_is_from_what_the_server_has(
    locks: LockClient, redis: Redis
) -> None:
    """An operator made the key last longer: that is what may be believed in."""
    lease = await locks.lock("n", ttl=5).acquire()
    await redis.pexpire(KEY, 60_000)
    assert 50 < await lease.extend() < 60
    await lease.release()


async def test_deadline_of_a_grant_is_from_what_the_server_has(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Meanwhile the key was made to last longer; the second copy of the acquire is told so."""
    locks = make_client(proxy.url, request_timeout=1.0)
    await warm(locks)
    lost = wire.stall(proxy, "acquire")
    acquiring = asyncio.create_task(locks.lock("n", ttl=5).acquire(wait_timeout=0))
    await until(lambda: lost.hits and redis.exists(KEY))
    await until(lambda: redis.pexpire(KEY, 60_000))
    lease = await acquiring
    assert 50 < lease.remaining < 60
    await lease.release()


async def test_grant_told_by_its_first_copy_counts_from_that(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A second copy was sent meanwhile, which is held up: the deadline is not from its start."""
    locks = make_client(proxy.url, request_timeout=2.0)
    await warm(locks)
    slow = proxy.delay_replies(1.5, wire.sha("acquire"), n=1)
    acquiring = asyncio.create_task(locks.lock("n", ttl=20).acquire(wait_timeout=0))
    await until(lambda: slow.hits)
    held_up = proxy.delay_requests(2.0, wire.sha("acquire"))
    lease = await acquiring
    assert held_up.hits == 1, "no second copy was sent"
    assert lease.remaining <= 20 * 0.99 - 1.5
    await lease.release()


async def test_lease_lost_twice_keeps_its_first_reason_and_cancels_once(
    locks: LockClient,
) -> None:
    """Stolen, and then over as well."""
    async with holding(locks.lock("n", ttl=5)) as holder:
        lease = await holder.entered()
        lease._lose(LostReason.STOLEN)
        await asyncio.sleep(0)
        lease._lose(LostReason.EXPIRED)
        assert (await holder.lost()).reason is LostReason.STOLEN
        assert (holder.cancels, holder.has_cleaned_up) == (1, True)


async def test_watchdog_that_is_not_answered_has_time_for_another_try(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Both copies of its request are lost; the next request is answered before the deadline."""
    locks = make_client(proxy.url, request_timeout=5)
    await warm(locks)
    silent = wire.stall(proxy, "extend", n=2)
    lease = await locks.lock("n", ttl=1.8).acquire()
    await until(lambda: lease.state == "at_risk")
    await until(lambda: lease.state != "at_risk")
    assert (lease.state, silent.hits) == ("held", 2)
    await lease.release()


# The arithmetic of a lease's states, on a clock that stands still.


NOW_S = 1000.0


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `NOW_S` all the time."""
    monkeypatch.setattr(_clock, "now", lambda: NOW_S)


def valid_for(
    left_s: float, *, auto_extend: bool = True, max_hold: float | None = None
) -> Validity:
    """That of a lease with so much time left."""
    return Validity(NOW_S + left_s, auto_extend=auto_extend, max_hold=max_hold)


def test_pause_after_failures_doubles_up_to_its_most() -> None:
    """From the first on; thousands of failures are no overflow."""
    pauses = [_clock.growing(n, first_s=0.1, most_s=3.0) for n in (1, 2, 3, 4, 5, 6, 5000)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0])


@pytest.mark.parametrize("pause_s", [0.0, 0.004, 0.1, 0.19, 0.33, 2.0, 9.7, 3333.3])
def test_pause_in_steps_ends_when_it_is_over_or_a_moment_before(pause_s: float) -> None:
    """Never after it: an extension would come too late."""
    for moment in range(100):
        now_s = NOW_S + moment * 0.00123
        early_s = now_s + pause_s - _clock.step_at_end(now_s, pause_s) * _clock.STEP_S
        assert -1e-6 <= early_s <= max(4 * _clock.STEP_S, pause_s / 100)


def test_pauses_in_steps_that_are_long_end_together() -> None:
    """In far fewer steps than they would by themselves."""
    moments = [NOW_S + n * _clock.STEP_S for n in range(400)]
    ends = [len({_clock.step_at_end(now_s, pause_s) for now_s in moments}) for pause_s in (0.1, 5)]
    assert ends == [400, pytest.approx(100, abs=1)]


@pytest.mark.parametrize(
    ("hostname", "label"),
    [
        ("web-1.example_org", "web-1.example_org-77"),
        ("Häst name{1}", "H-st-name-1--77"),
        ("", "host-77"),
        ("a" * 99, f"{'a' * 48}-77"),
    ],
)
def test_label_of_a_host_shows_it_as_far_as_a_label_can(hostname: str, label: str) -> None:
    """With the process; every one is a label that a client may be given."""
    assert _names.label_of_host(hostname, 77) == label
    assert _names.checked_label(label) == label


@pytest.mark.parametrize(
    ("left_s", "standing", "state", "reason"),
    [
        (0.5, None, "lost", LostReason.DELETED),
        (0.5, "theirs", "lost", LostReason.STOLEN),
        (0.0, None, "released", None),
        (-0.5, "theirs", "released", None),
    ],
)
def test_validity_of_a_lease_whose_release_finds_nothing_is_lost_before_its_deadline_only(
    still: None, left_s: float, standing: str | None, state: str, reason: LostReason | None
) -> None:
    """After it the key may have run out since the body ended."""
    validity = valid_for(left_s)
    assert [validity.release(), validity.release()] == [True, False]  # Only once it is news.
    validity.find_gone(standing)
    assert (validity.state, validity.reason, validity.is_open) == (state, reason, False)


def test_validity_of_a_lease_that_was_lost_keeps_its_reason_when_its_release_finds_nothing(
    still: None,
) -> None:
    """It was told of that reason already."""
    validity = valid_for(5)
    validity.lose(LostReason.STOLEN)
    validity.find_gone(None)
    assert (validity.state, validity.reason) == ("lost", LostReason.STOLEN)


@pytest.mark.parametrize(
    ("left_s", "standing", "reason"),
    [
        (5, "theirs", LostReason.STOLEN),
        (-5, "theirs", LostReason.STOLEN),
        (5, None, LostReason.DELETED),
        (0, None, LostReason.EXPIRED),
        (-5, None, LostReason.EXPIRED),
    ],
)
def test_validity_of_a_lease_that_an_extension_finds_taken_is_final(
    still: None, left_s: float, standing: str | None, reason: LostReason
) -> None:
    """There is nothing to extend any more."""
    validity = valid_for(left_s)
    assert validity.find_taken(standing) is reason
    assert validity.is_final is True


def test_validity_after_an_answer_asks_no_more(still: None) -> None:
    """Once the last extension was answered, a deadline that passes is nobody's silence."""
    validity = valid_for(-0.05, auto_extend=False)
    validity.ask(1)
    assert validity.reason_at_deadline() is LostReason.UNREACHABLE
    validity.prolong(NOW_S - 0.05, is_last=False)
    assert validity.reason_at_deadline() is LostReason.EXPIRED


def test_validity_that_max_hold_allows_exactly_is_not_cut(still: None) -> None:
    """The whole ttl fits; and a lease whose deadline is that of max_hold ends by it."""
    assert valid_for(1, max_hold=2).ask(2) == (2000, False)
    assert valid_for(1, max_hold=2).ask(2.001) == (2000, True)
    assert valid_for(0, max_hold=0).reason_at_deadline() is LostReason.MAX_HOLD


async def test_block_whose_body_swallowed_the_cancel_ends_in_one_turn(locks: LockClient) -> None:
    """In case that it was not delivered it gives way to the loop, but does not wait."""
    with within(0.7), pytest.raises(LeaseLostError):
        async with locks.lock("n") as lease:
            asyncio.get_running_loop().call_soon(lease._lose, LostReason.STOLEN)
            with suppress(asyncio.CancelledError):
                await forever()


# Nothing is sent after a release.


async def test_lease_released_in_the_turn_of_an_extension_is_not_in_the_call(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Two were to share it; the call leaves for the one that is still held."""
    locks = make_client(proxy.url)
    await warm(locks)
    gone, kept = [await locks.lock(name).acquire() for name in ("gone", "kept")]
    values = [f"{lease.owner_token}/{lease.fencing_token}" for lease in (gone, kept)]
    sent = [proxy.delay_replies(0.0, value.encode()) for value in values]  # Each request once.
    extending = [asyncio.create_task(lease.extend()) for lease in (gone, kept)]
    await asyncio.sleep(0)
    extending[0].cancel()
    assert await gone.release() is True
    assert await extending[1] > 20
    assert extending[0].cancelled()
    assert [fault.hits for fault in sent] == [0, 1]
    await kept.release()


async def test_watchdog_has_ended_when_a_release_that_never_waits_returns(
    locks: LockClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers at once leaves the task no turn of the loop to end in."""

    async def at_once(acquisition: Acquisition, **options: object) -> Released:
        return Released(True, None, False)

    lease = await locks.lock("n", ttl=0.9).acquire()
    await until(lambda: watchdogs() == ["aiodlock watchdog n"])
    with monkeypatch.context() as patch:
        patch.setattr(lease._store, "release", at_once)
        assert await lease.release() is True
    assert watchdogs() == []
    await redis.delete(KEY)


# Waking.


async def test_waiter_is_woken_by_a_reply_whose_caller_was_cancelled_before_it_came(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """By the hand-off that the reply tells of: it does not even poll."""
    locks = make_client(proxy.url)
    lease = await locks.lock("n").acquire()
    waiting = asyncio.create_task(locks.lock("n").acquire())
    await hearing(locks)
    await until(lambda: proxy.requests["EVALSHA"] + proxy.requests["EVAL"] >= 4)
    polls = proxy.delay_replies(0.0, wire.sha("acquire"))
    late = proxy.delay_replies(0.2, wire.sha("release"), n=1)
    releasing = asyncio.create_task(lease.release())
    await until(lambda: late.hits)
    releasing.cancel()
    handed = await waiting
    assert polls.hits == 0
    await asyncio.wait([releasing])
    await handed.release()


async def test_waiters_poll_once_their_first_subscription_stands(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was freed before it did, and nothing else would wake them for two seconds."""
    monkeypatch.setattr(_waiting, "DEFAULT_BACKOFF", Backoff(initial=60, maximum=60, jitter=0))
    name, locks = ByHand(redis, "n"), make_client(proxy.url)
    await warm(locks)
    await name.granted(A)
    held_back = proxy.delay_requests(0.3, b"SUBSCRIBE")
    waiting = asyncio.create_task(locks.lock("n").acquire())
    await until(lambda: held_back.hits)
    await name.let_expire()
    with within(1.5):
        lease = await waiting
    await lease.release()


async def test_inbox_is_asked_once_however_many_miss_a_message(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """Five waiters find themselves holding while the answer to the first PING is awaited.

    A sixth goes on waiting, so that the inbox is needed.
    """
    locks = make_client(proxy.url, request_timeout=1.0)
    names = [f"n{n}" for n in range(6)]
    others = [await make_client().lock(name).acquire() for name in names]
    waiting = [asyncio.create_task(locks.lock(name, ttl=1).acquire()) for name in names]
    await hearing(locks)
    await asyncio.sleep(0.1)  # They poll once more, since the inbox hears.
    assert proxy.half_open_inboxes() == 1
    log = wire.logged(proxy)
    await asyncio.gather(*(lease.release() for lease in others[1:]))
    leases = await asyncio.gather(*waiting[1:])
    await until(lambda: log["SUBSCRIBE"] == 1)
    assert log["PING"] == 1
    await others[0].release()
    await asyncio.gather(*(lease.release() for lease in [*leases, await waiting[0]]))


# Cleaning up.


async def test_wait_that_is_over_is_not_held_up_by_its_clean_up(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """The reply to its release takes a second; `aclose` waits for that, the caller does not."""
    name, locks = ByHand(redis, "n"), make_client(proxy.url)
    await warm(locks)
    await name.granted(A)
    late = proxy.delay_replies(1.0, wire.sha("release"))
    with within(0.9), pytest.raises(LockTimeout):
        await locks.lock("n").acquire(wait_timeout=0.1)
    await locks.aclose()
    assert late.hits == 1
    assert (await name.state()).queue == []


async def test_client_closed_at_once_has_left_the_queue(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """What the end of a wait left to the background is done when `aclose` returns."""
    name, locks = ByHand(redis, "n"), make_client(proxy.url)
    await warm(locks)
    await name.granted(A)
    late = proxy.delay_requests(0.3, wire.sha("release"))
    with pytest.raises(LockTimeout):
        await locks.lock("n").acquire(wait_timeout=0.1)
    await until(lambda: late.hits)
    await locks.aclose()
    assert (await name.state()).queue == []
    assert await leftovers(redis) == [KEY]


# The connection.


async def test_releases_on_a_silent_link_borrow_one_connection_at_a_time(
    proxy: ChaosProxy,
) -> None:
    """Ten of them, each a call of its own: one connection more than the link is open."""
    tap = wire.Tap()
    async with (
        wire.tapped(proxy.url, tap) as client,
        LockClient(client, request_timeout=1.0) as locks,
    ):
        await warm(locks)
        leases = await asyncio.gather(*(locks.lock(f"n{n}").acquire() for n in range(10)))
        assert tap.most_open == 1
        silent = wire.stall(proxy, "release")
        await asyncio.gather(*(lease.release() for lease in leases))
        assert silent.hits == 1
        assert tap.most_open == 2


async def test_call_on_a_link_that_is_known_to_be_silent_goes_around_it_at_once(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """The first one found that out, in half of its time; the next one does not wait for that."""
    locks = make_client(proxy.url, request_timeout=4.0)
    await warm(locks)
    leases = [await locks.lock(name).acquire() for name in ("a", "b")]
    silent = wire.stall(proxy, "extend")
    assert await leases[0].extend() > 20
    with within(1.5):
        assert await leases[1].extend() > 20
    assert silent.hits == 1
    proxy.heal()
    await asyncio.gather(*(lease.release() for lease in leases))


async def test_users_socket_timeout_does_not_end_an_idle_connection(proxy: ChaosProxy) -> None:
    """The reader waits for as long as nobody asks anything."""
    tap = wire.Tap()
    async with (
        wire.tapped(proxy.url, tap, socket_timeout=0.1) as client,
        LockClient(client) as locks,
    ):
        lease = await locks.lock("n").acquire()
        await asyncio.sleep(0.3)
        assert tap.connects == 1
        assert await lease.release() is True
        assert tap.connects == 1
