"""Negative controls of the contract: for each rule a library that breaks it, which must be seen."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock import AllLeases, Lease, Lock, LockError, NotAllowedError, _names
from aiodlock._reentrant import Reentries
from aiodlock._session import Session
from aiodlock._store import _calls, _mux, _wire
from aiodlock._store._api import Granted, NoAnswer, Refused, Released, Standing
from aiodlock._store._redis import RedisStore
from aiodlock._store._wire import Held
from aiodlock._waiting import Wait
from aiodlock._watchdog import Watchdog
from aiodlock.testing import LockServer
from tests.mutants import Mutant
from tests.test_contract import RULES
from tests.worlds import STORES, World
from tests.worlds import Standing as Servers

pytestmark = pytest.mark.deep

LIMIT_S = 2.0
"""A rule that hangs this long is red, too: more than any takes where it holds."""

Patch: TypeAlias = pytest.MonkeyPatch
Spoil: TypeAlias = Callable[[Patch, World], AbstractContextManager[None] | None]


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Awaitable[Any]]) -> None:
    """*owner*'s method *name* becomes ``wrapper(original, self, ...)``."""
    original = getattr(owner, name)

    async def spoilt(self: Any, *args: Any, **options: Any) -> Any:
        return await wrapper(functools.partial(original, self), *args, **options)

    patch.setattr(owner, name, spoilt)


# What is spoilt.


def everybody_is_granted(patch: Patch, _: World) -> None:
    """A refusal passes for a grant."""

    async def acquire(original: Any, acquisition: Any, **options: Any) -> Any:
        answer = await original(acquisition, **options)
        if isinstance(answer, Refused):
            later = answer.sent_at + options["ttl_ms"] / 1000
            return Granted(answer.value, answer.last_fencing_token, later, False)
        return answer

    around(patch, RedisStore, "acquire", acquire)


def single_tries_queue(patch: Patch, _: World) -> None:
    """As if they waited."""

    async def acquire(original: Any, acquisition: Any, **options: Any) -> Any:
        return await original(acquisition, **{**options, "alive_ms": 5000})

    around(patch, RedisStore, "acquire", acquire)


def every_copy_removes(patch: Patch, _: World) -> None:
    """Each release says that it did the work, and none is remembered as done."""

    async def release(original: Any, *args: Any) -> Any:
        await original(*args)
        return True

    around(patch, Lease, "release", release)


def waiters_stay_in_the_queue(patch: Patch, _: World) -> None:
    """Whoever gives up is not given up."""

    async def give_up(original: Any, acquisition: Any, terms: Any) -> None:
        return None

    around(patch, Session, "_give_up", give_up)


def waits_do_not_end(patch: Patch, _: World) -> None:
    """`wait_timeout` is ignored."""

    async def acquire(original: Any, *args: Any, **options: Any) -> Any:
        return await original(*args, **{**options, "wait_timeout": None})

    around(patch, Session, "acquire", acquire)


def keys_live_too_long(patch: Patch, _: World) -> None:
    """A hundred times the ttl."""

    async def acquire(original: Any, acquisition: Any, **options: Any) -> Any:
        return await original(acquisition, **{**options, "ttl_ms": options["ttl_ms"] * 100})

    around(patch, RedisStore, "acquire", acquire)


def extensions_create(patch: Patch, world: World) -> None:
    """`SET` in the place of a check."""

    async def extend(original: Any, acquisition: Any, value: str, **options: Any) -> Any:
        await world.put(acquisition.name, value)
        return await original(acquisition, value, **options)

    around(patch, RedisStore, "extend", extend)


def extensions_are_not_sent(patch: Patch, _: World) -> None:
    """As if no server answered them."""

    async def extend(original: Any, *args: Any, **options: Any) -> Any:
        raise NoAnswer("spoilt")

    around(patch, RedisStore, "extend", extend)


def extensions_shorten(patch: Patch, world: World) -> None:
    """`PEXPIRE` without a look at what there is."""

    async def extend(original: Any, acquisition: Any, value: str, **options: Any) -> Any:
        for admin in world.admins:
            await admin.pexpire(acquisition.keys.lock, options["ttl_ms"])
        return await original(acquisition, value, **options)

    around(patch, RedisStore, "extend", extend)


def deadlines_are_late(patch: Patch, _: World) -> None:
    """Counted from too late an instant."""

    async def acquire(original: Any, acquisition: Any, **options: Any) -> Any:
        answer = await original(acquisition, **options)
        if isinstance(answer, Granted):
            return answer._replace(deadline=answer.deadline + 1)
        return answer

    around(patch, RedisStore, "acquire", acquire)


def fences_stay_for_ever(patch: Patch, world: World) -> None:
    """A key for each name, without a TTL."""

    async def release(original: Any, acquisition: Any, **options: Any) -> Any:
        for admin in world.admins:
            await admin.persist(acquisition.keys.fence)
        return await original(acquisition, **options)

    around(patch, RedisStore, "release", release)


def max_hold_is_ignored(patch: Patch, _: World) -> None:
    """Its terms do not reach the lease."""

    async def acquire(original: Any, name: str, keys: Any, terms: Any, **options: Any) -> Any:
        return await original(name, keys, terms._replace(max_hold=None), **options)

    around(patch, Session, "acquire", acquire)


def messages_are_always_trusted(patch: Patch, _: World) -> None:
    """Also where nothing extends the lease."""
    original = Wait.__init__

    def init(self: Wait, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "trusts_messages": True})

    patch.setattr(Wait, "__init__", init)


def deadlines_are_not_watched(patch: Patch, _: World) -> None:
    """Only an answer of the server tells of a loss."""
    patch.setattr(Watchdog, "_watch_deadline", lambda *_: None)
    patch.setattr(Lease, "_notice_deadline", lambda self, **_: self._validity.is_open)


def connections_are_not_made_again(patch: Patch, world: World) -> None:
    """Once they were cut."""
    cut = world.cut_connections
    is_cut: list[bool] = []

    async def cut_connections() -> None:
        is_cut.append(True)
        await cut()

    original = Held.take.__func__  # type: ignore[attr-defined]

    async def take(cls: Any, source: Any) -> Any:
        if is_cut:
            raise RedisConnectionError("spoilt")
        return await original(cls, source)

    world.cut_connections = cut_connections  # type: ignore[method-assign]
    patch.setattr(Held, "take", classmethod(take))


def scripts_are_never_sent(patch: Patch, _: World) -> None:
    """By their digests only, which the server must know already."""
    for module in (_calls, _mux):
        patch.setattr(module, "NoScriptError", ZeroDivisionError)  # What no server says.


def fencing_tokens_stand_still(patch: Patch, _: World) -> None:
    """Every grant is number 7."""

    async def acquire(original: Any, acquisition: Any, **options: Any) -> Any:
        answer = await original(acquisition, **options)
        return answer._replace(fencing_token=7) if isinstance(answer, Granted) else answer

    around(patch, RedisStore, "acquire", acquire)


def inspections_miss_the_time(patch: Patch, _: World) -> None:
    """The ttl of the key is not told."""

    async def look(original: Any, *args: Any, **options: Any) -> Standing:
        return Standing(*(await original(*args, **options)))._replace(ttl_left_ms=0)

    around(patch, RedisStore, "inspect", look)


def any_grant_is_broken(patch: Patch, _: World) -> None:
    """Which one was meant is not looked at."""

    async def break_lock(original: Any, *, fencing_token: int | None = None) -> bool:
        return bool(await original())

    around(patch, Lock, "break_lock", break_lock)


def broken_locks_are_not_handed_on(patch: Patch, _: World) -> None:
    """It says that it is broken, and is not."""

    async def break_lock(original: Any, *, fencing_token: int | None = None) -> bool:
        return fencing_token != 1

    around(patch, Lock, "break_lock", break_lock)


def per_cents_are_not_encoded(patch: Patch, _: World) -> None:
    """Two names meet in one key."""
    patch.setattr(_names, "_ESCAPES", str.maketrans({"{": "%7B", "}": "%7D"}))


def prefixes_are_ignored(patch: Patch, _: World) -> None:
    """One key for a name, whoever asks."""
    keys = _names.keys
    patch.setattr(_names, "keys", lambda _, name: keys("one:", name))


def wrong_types_are_forbidden(patch: Patch, _: World) -> None:
    """Another error than the one of the contract."""
    patch.setattr(_wire, "NameTakenError", NotAllowedError)


def closing_clients_release_first(patch: Patch, _: World) -> None:
    """And leave the queue then, in which their own waiter may be first."""

    async def close(original: Any, caller: Any) -> None:
        (session,) = original.args
        for lease in session._watchdogs.leases():
            await lease.release()
        await asyncio.sleep(0.1)
        await original(caller)

    around(patch, Session, "close", close)


def closing_clients_do_not_wait_for_bodies(patch: Patch, _: World) -> None:
    """What they hold is left to its ttl."""

    async def end_bodies(original: Any, leases: Any) -> None:
        return None

    around(patch, Session, "_end_bodies", end_bodies)


def releases_are_not_sent(patch: Patch, _: World) -> None:
    """The caller is told that they were."""

    async def release(original: Any, *args: Any, **options: Any) -> Released:
        return Released(removed=True, value=None, repeated=False)

    around(patch, RedisStore, "release", release)


def nobody_enters_again(patch: Patch, _: World) -> None:
    """A task that has the lease is not known to have it."""
    patch.setattr(Reentries, "enter_again", lambda *_: None)


def what_was_got_in_vain_is_kept(patch: Patch, _: World) -> None:
    """The names that were got before the one that was not."""

    async def give_back(original: Any, error: BaseException) -> None:
        return None

    around(patch, AllLeases, "_give_back", give_back)


def names_are_free_at_the_release(patch: Patch, _: World) -> None:
    """However long they were to stay taken."""

    async def release(original: Any, *args: Any, **options: Any) -> Any:
        return await original(*args, **{**options, "keep_until": None})

    around(patch, RedisStore, "release", release)


def script(name: str, old: str, new: str) -> Spoil:
    """One line of a script is spoilt."""
    return lambda *_: Mutant(name, old, new).applied()


OURS = "and (value == token or string.sub(value, 1, #token + 1) == token .. '/')"
any_holder_is_ours = script("release", OURS, "")
last_come_first_served = script("acquire", "math.max(highest + 1, now_us)", "-now_us")
the_queue_is_overtaken = script("acquire", "if not head or head == token then", "if true then")
the_dead_are_served = script(
    "release",
    "tonumber(redis.call('ZSCORE', KEYS[4], head) or now_ms + 6000), now_ms + 6000)",
    "now_ms + 6000, now_ms + 6000)",
)
second_copies_are_refused = script(
    "acquire", "if value and string.sub(value, 1, #token + 1) == token .. '/' then", "if false then"
)

SPOILT: dict[str, Spoil] = {
    "one_holds_and_others_do_not": everybody_is_granted,
    "many_tasks_of_many_clients_go_one_by_one": everybody_is_granted,
    "a_single_try_neither_waits_nor_queues": single_tries_queue,
    "a_single_try_does_not_overtake_a_waiter": the_queue_is_overtaken,
    "a_lock_of_another_library_is_respected": everybody_is_granted,
    "a_release_frees_only_what_is_its_own": any_holder_is_ours,
    "a_release_can_be_repeated": every_copy_removes,
    "a_release_hands_over_to_the_first_waiter": last_come_first_served,
    "a_waiter_who_leaves_is_passed_over": last_come_first_served,
    "a_waiter_who_died_is_passed_over": the_dead_are_served,
    "a_waiter_who_is_cancelled_leaves_nothing": waiters_stay_in_the_queue,
    "an_acquire_cancelled_anywhere_leaves_nothing": waiters_stay_in_the_queue,
    "a_wait_ends_in_time_and_tells_who_holds": waits_do_not_end,
    "those_who_poll_are_served_in_their_turn": last_come_first_served,
    "an_expiry_frees_and_is_told": keys_live_too_long,
    "an_extension_never_shortens": extensions_shorten,
    "an_extension_never_creates_a_key": extensions_create,
    "a_deadline_is_never_later_than_the_keys": deadlines_are_late,
    "every_key_ends_by_itself": fences_stay_for_ever,
    "a_lease_is_bounded_by_max_hold": max_hold_is_ignored,
    "a_lease_handed_over_is_extended_beyond_its_short_start": extensions_are_not_sent,
    "a_lease_handed_over_without_a_watchdog_has_its_whole_ttl": messages_are_always_trusted,
    "a_watchdog_keeps_what_stands_and_tells_of_what_is_gone": extensions_are_not_sent,
    "a_thief_is_told_of_and_left_alone": any_holder_is_ours,
    "a_silent_server_cannot_delay_the_news": deadlines_are_not_watched,
    "a_lost_reply_is_no_loss": second_copies_are_refused,
    "a_lost_connection_is_made_again": connections_are_not_made_again,
    "scripts_that_the_server_forgot_are_sent_again": scripts_are_never_sent,
    "fencing_tokens_grow_with_every_grant": fencing_tokens_stand_still,
    "what_stands_is_told": inspections_miss_the_time,
    "an_operator_breaks_it_for_the_next": broken_locks_are_not_handed_on,
    "only_the_grant_that_was_meant_is_broken": any_grant_is_broken,
    "any_name_will_do": per_cents_are_not_encoded,
    "clients_of_two_prefixes_do_not_meet": prefixes_are_ignored,
    "a_key_that_is_no_lock_is_left_alone": wrong_types_are_forbidden,
    "a_closed_client_leaves_the_users_own_alone": releases_are_not_sent,
    "a_closing_client_leaves_the_queue_before_it_releases": closing_clients_release_first,
    "a_body_in_a_closing_client_is_told_and_waited_for": closing_clients_do_not_wait_for_bodies,
    "a_task_enters_its_own_lock_again": nobody_enters_again,
    "several_names_are_got_all_or_none": what_was_got_in_vain_is_kept,
    "a_name_stays_taken_for_as_long_as_was_asked": names_are_free_at_the_release,
    "a_leader_is_seen_and_succeeded": everybody_is_granted,
}

SEEN = (AssertionError, TimeoutError, LockError, pytest.fail.Exception)


@contextlib.asynccontextmanager
async def world_for(name: str, server: LockServer) -> AsyncIterator[World]:
    """The quickest store that has the rule: in memory, or one server."""
    servers = Servers(server, None, None)  # type: ignore[arg-type]  # neither is asked for
    memory = next(store for store in STORES if store.name == "memory")
    store = STORES[0] if name in memory.without else memory
    async with store.open(servers) as world:
        await world.flush()
        yield world


# What a rule that failed was about to do is thrown away.
@pytest.mark.filterwarnings("ignore:a lease of .* was thrown away while held:ResourceWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("name", RULES)
def test_rule_turns_red_where_the_library_breaks_it(
    name: str, server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assertion, a call that fails, or no end; and green again without the fault."""

    async def run() -> None:
        async with world_for(name, server) as world:
            with ExitStack() as stack:
                patch = stack.enter_context(monkeypatch.context())
                spoilt = SPOILT[name](patch, world)
                stack.enter_context(spoilt or contextlib.nullcontext())
                with pytest.raises(SEEN):
                    async with asyncio.timeout(LIMIT_S):
                        await RULES[name](world)
                # In a loop of its own: what a rule that failed left behind ends here.
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    if not task.get_name().startswith("aiodlock"):
                        task.cancel()

    with asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda *_: None)
        runner.run(run())
    gc.collect()


def test_every_rule_has_its_control() -> None:
    """A new rule comes with a library that breaks it."""
    assert set(SPOILT) == set(RULES)
