"""The rules of the design, each with the faults that put it out.

Run as a program it prints the table of what is noticed by what.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeAlias
from unittest import mock

from aiodlock import _cleanup, _clock, _self_wait, _semaphore
from aiodlock._all import AllLeases, AllLocks, _AllBody
from aiodlock._body import Body
from aiodlock._cleanup import Background
from aiodlock._client import LockClient
from aiodlock._lease import Lease
from aiodlock._reentrant import ReentrantLease, Reentries
from aiodlock._session import Session
from aiodlock._shared import Shared
from aiodlock._store import _extensions, _mux, _node, _shares, _source
from aiodlock._store._ballot import Part
from aiodlock._store._calls import Caller
from aiodlock._store._extensions import Extensions, _Shared
from aiodlock._store._inbox import Inbox
from aiodlock._store._mux import Link, Multiplexer
from aiodlock._store._quorum import QuorumStore
from aiodlock._store._redis import RedisStore
from aiodlock._store._requests import Acquire, Release, Retire, ShareRelease
from aiodlock._store._round import Round, Tally
from aiodlock._store._shares import Downgrade
from aiodlock._store._wire import Held
from aiodlock._trying import Tries
from aiodlock._validity import Validity
from aiodlock._waiting import Wait
from aiodlock._watchdog import Watchdog, Watchdogs
from aiodlock.fencing import _redis as redis_fence
from aiodlock.fencing import _sql as sql_fence
from tests.mutants import Mutant, function_mutant


@dataclass(frozen=True)
class Line:
    """A piece of the product's Python that occurs once in a function, and what stands instead."""

    owner: type | ModuleType
    function: str
    old: str
    new: str

    def applied(self) -> AbstractContextManager[None]:
        return function_mutant(self.owner, self.function, self.old, self.new)

    @property
    def place(self) -> str:
        owner = self.owner.__name__.rpartition(".")[2]
        return f"{owner}.{self.function}"


@dataclass(frozen=True)
class Constant:
    """A constant of a module's, with another value."""

    owner: ModuleType
    name: str
    value: object

    def applied(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self.owner, self.name, self.value)

    @property
    def place(self) -> str:
        return f"{self.owner.__name__.rpartition('.')[2]}.{self.name}"


@dataclass(frozen=True)
class Both:
    """A fault of two halves, as of a script and of whoever calls it."""

    first: Line | Constant | Mutant
    second: Line | Constant | Mutant

    @contextmanager
    def applied(self) -> Iterator[None]:
        with self.first.applied(), self.second.applied():
            yield


Fault: TypeAlias = Line | Constant | Mutant | Both


@dataclass(frozen=True)
class Proof:
    """One fault, with the test that must fail by it, with *error*."""

    fault: Fault
    check: str
    error: str = "AssertionError"


@dataclass(frozen=True)
class Elsewhere:
    """A fault that another test applies: *module* has it in *table*, where *entry* names it."""

    module: str
    table: str
    entry: str


@dataclass(frozen=True)
class Rule:
    """A sentence of the design, in our words, with what shows that the tests hold it.

    Attributes:
        id: For people; the section of the design comes first.
    """

    id: str
    sentence: str
    proofs: tuple[Proof | Elsewhere, ...]


def _invariant(label: str) -> Elsewhere:
    return Elsewhere("tests.test_invariants", "MUTANTS", label)


def _simulated_on_nodes(label: str) -> Elsewhere:
    return Elsewhere("tests.simulation.quorum_mutants", "MUTANTS", f"quorum: {label}")


def _kept(label: str) -> Elsewhere:
    return Elsewhere("tests.test_hold_at_least", "MUTANTS", label)


def _simulated(label: str) -> Elsewhere:
    return Elsewhere("tests.simulation.mutants", "MUTANTS", label)


def _compared(label: str) -> Elsewhere:
    return Elsewhere("tests.test_differential", "MUTANTS", label)


_OURS: Final = "(value == token or string.sub(value, 1, #token + 1) == token .. '/')"

# Sections 1 and 5: the scripts.

_SCRIPTS: Final = (
    Rule(
        "1 no expiry",
        "Every key gets its ttl in the command that writes it.",
        (
            _invariant("1 free lock taken without ttl"),
            _invariant("1 handed over by release without ttl"),
            _invariant("1 queue without ttl"),
            _invariant("1 tombstone without ttl"),
            Proof(
                Mutant(
                    "acquire", "ARGV[1] .. '/' .. text, 'PX', ARGV[2])", "ARGV[1] .. '/' .. text)"
                ),
                "tests/test_cases.py::test_case_063_key_never_exists_without_its_ttl[closed]",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "1 expiry in a second command",
        "A lock is never without its ttl, not even between two requests.",
        (
            Proof(
                Both(
                    Mutant(
                        "acquire",
                        "ARGV[1] .. '/' .. text, 'PX', ARGV[2])",
                        "ARGV[1] .. '/' .. text)",
                    ),
                    Line(
                        RedisStore,
                        "acquire",
                        "return call.answer(await self._caller.reply(call, within))",
                        "answer = call.answer(await self._caller.reply(call, within)); "
                        "await self._extensions.ask(acquisition, answer.value, ttl_ms, within); "
                        "return answer",
                    ),
                ),
                "tests/test_cases.py::test_case_063_key_never_exists_without_its_ttl[killed after]",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "1 release without a check",
        "A release deletes the lock only if it is still the releasing holder's.",
        (
            _invariant("2 release of another, nobody waits"),
            _invariant("2 release of another, somebody waits"),
            _invariant("2 release by a token that begins alike"),
            Proof(
                Mutant(
                    "release",
                    f"local ours = value and not wrong\n  and {_OURS}",
                    "local ours = value",
                ),
                "tests/test_bodies.py::"
                "test_lease_released_after_it_expired_leaves_the_next_holder_alone",
            ),
        ),
    ),
    Rule(
        "1 the reply is lost",
        "An acquire that comes again finds the lock its own, and is granted it again.",
        (
            Proof(
                Mutant(
                    "acquire",
                    "if value and string.sub(value, 1, #token + 1) == token .. '/' then",
                    "if false then",
                ),
                "tests/test_lost_replies.py::test_acquire_whose_reply_is_lost_is_granted[0.0]",
            ),
        ),
    ),
    Rule(
        "5 tombstone is heeded",
        "An acquire that arrives after its own release is refused.",
        (Elsewhere("tests.test_late", "NOT_HEEDED", "acquire"),),
    ),
    Rule(
        "5 tombstone is left",
        "A release leaves a tombstone where a copy of its acquire may still come.",
        (
            Elsewhere("tests.test_late", "NOT_LEFT", "release"),
            Proof(
                Line(
                    Release,
                    "parts",
                    "bool(asked) and any(other != number for other in asked)",
                    "False",
                ),
                "tests/test_late.py::"
                "test_acquire_that_arrives_after_its_release_leaves_no_ghost[timed out, free]",
            ),
        ),
    ),
    Rule(
        "5 no needless tombstone",
        "Where all went over one connection, in order, the name keeps its fast path.",
        (
            Proof(
                Line(
                    Release,
                    "parts",
                    "bool(asked) and any(other != number for other in asked)",
                    "True",
                ),
                "tests/test_late.py::"
                "test_acquire_and_release_over_one_connection_need_no_tombstone",
            ),
        ),
    ),
    Rule(
        "5 tombstone lives a minute",
        "The polls of others do not shorten the key in which it lies.",
        (
            Proof(
                Mutant(
                    "acquire",
                    "if redis.call('PTTL', KEYS[4]) < 12000 then",
                    "if redis.call('PTTL', KEYS[4]) ~= 12000 then",
                ),
                "tests/test_protocol.py::test_tombstone_outlives_the_polls_of_others",
            ),
            _compared("alive is always cut to 12 s"),
        ),
    ),
    Rule(
        "5 tombstone is purged",
        "It is gone when its minute is over.",
        (
            Proof(
                Mutant(
                    "acquire", "if not redis.call('ZSCORE', KEYS[3], member) then", "if false then"
                ),
                "tests/test_protocol.py::test_tombstone_is_purged_when_its_minute_is_over",
            ),
        ),
    ),
    Rule(
        "5 my liveness first",
        "A poll refreshes its own liveness before it drops dead waiters.",
        (_invariant("4 others are dropped before my liveness is refreshed"),),
    ),
    Rule(
        "5 the dead are passed over",
        "A grant goes to a waiter that lives, never to one whose liveness has passed.",
        (_invariant("4 release hands to the dead"), _invariant("4 poll hands to the dead")),
    ),
    Rule(
        "5 purge is bounded",
        "A poll drops at most a thousand entries.",
        (
            Proof(
                Mutant("acquire", "'LIMIT', 0, 1000)", "'LIMIT', 0, 2000)"),
                "tests/test_protocol.py::test_purge_takes_a_thousand_at_a_time",
            ),
        ),
    ),
    Rule(
        "5 a slow waiter keeps its place",
        "The purge takes from `alive` only what stands for no waiter.",
        (_compared("the slow lose their liveness"),),
    ),
    Rule(
        "5 first come, first served",
        "A free lock is taken by the head of the queue, or by anybody where there is no queue.",
        (
            _invariant("4 anybody takes a free lock"),
            _invariant("4 free is free, whoever waits"),
            _invariant("4 release hands to the last"),
        ),
    ),
    Rule(
        "5 keep the place",
        "A waiter that polls again stays where it stands.",
        (_invariant("4 each poll goes to the end"),),
    ),
    Rule(
        "5 place by arrival",
        "A newcomer stands behind all others, though the clock stepped back.",
        (_invariant("4 place by the clock alone"),),
    ),
    Rule(
        "5 help the head",
        "A poll that finds the lock free, but not its own to take, hands it to the head.",
        (
            _invariant("5 poll leaves a free lock that is not its own"),
            Proof(
                Mutant(
                    "acquire", "  redis.pcall('PUBLISH', ARGV[4]", "  redis.pcall('ECHO', ARGV[4]"
                ),
                "tests/test_wakeups.py::"
                "test_head_of_a_lock_freed_by_nobody_is_woken_by_any_poll[6000]",
            ),
        ),
    ),
    Rule(
        "5 extend by the whole value",
        "An extension keeps exactly the grant alive that it was made for.",
        (
            _invariant("2 extension of another"),
            Proof(
                Mutant(
                    "extend",
                    "if value == ARGV[n + 1] then",
                    "if type(value) == 'string' "
                    "and string.match(value, '[^/]*') == string.match(ARGV[n + 1], '[^/]*') then",
                ),
                "tests/test_late.py::test_token_granted_twice_is_lost_and_given_back[True]",
            ),
        ),
    ),
    Rule(
        "5 extend makes no key",
        "An extension of what is gone creates nothing.",
        (
            _simulated("extend makes a key again"),
            Proof(
                Mutant(
                    "extend",
                    "    answers[2 * n - 1], answers[2 * n] = 0, value\n",
                    "    redis.call('SET', lock, ARGV[n + 1], 'PX', ttl_ms, 'NX')\n"
                    "    answers[2 * n - 1], answers[2 * n] = 0, value\n",
                ),
                "tests/test_protocol.py::test_extension_of_what_is_gone_creates_nothing",
            ),
        ),
    ),
    Rule(
        "5 shared extension: each for itself",
        "A lock of a wrong type does not keep the others of its call from living on.",
        (_compared("extend stops at a wrong type"),),
    ),
    Rule(
        "5 shared extension: time",
        "Who has little time shares no call with those who have more.",
        (
            Proof(
                Line(Extensions, "_add", "math.frexp(within)[1]", "0"),
                "tests/test_extensions.py::test_lease_with_little_time_hurries_nobody",
            ),
        ),
    ),
    Rule(
        "5 no life is shortened",
        "No script shortens the life of a lock's key.",
        (
            Elsewhere("tests.test_protocol", "test_script_that_sets_the_ttl_always_is_noticed", ""),
            Proof(
                Mutant("extend", "if left < ttl_ms then", "if true then"),
                "tests/test_protocol.py::"
                "test_lease_extended_by_less_than_it_has_keeps_its_deadline",
            ),
        ),
    ),
    Rule(
        "1 waiters poll",
        "A release grants the lock to the first live waiter, who need not ask for it.",
        (
            _invariant("5 release only deletes"),
            _invariant("5 only a release of the holder hands over"),
            _simulated("release hands nothing on"),
        ),
    ),
    Rule(
        "5 leave the queue",
        "Whoever releases, or is granted the lock, is in the queue no more.",
        (
            _invariant("4 release leaves the releasing waiter in the queue"),
            _invariant("3 handed over by release"),
            _invariant("3 taken in its turn"),
        ),
    ),
    Rule(
        "5 a hand-off is short",
        "A hand-off lives no longer than its waiter is known to live.",
        (_invariant("7 a hand-off outlives its waiter"),),
    ),
    Rule(
        "5 release by the owner token",
        "A second grant to the same token, which we did not see, is given back too.",
        (
            Proof(
                Line(
                    Lease,
                    "_give_up",
                    "self._acquisition, within",
                    "__import__('dataclasses').replace("
                    "self._acquisition, token=self._value, packed=b''), within",
                ),
                "tests/test_late.py::test_token_granted_twice_is_lost_and_given_back[True]",
            ),
        ),
    ),
    Rule(
        "5 a refused channel",
        "A message that the server refuses does not undo the hand-off.",
        (
            Proof(
                Mutant("release", "redis.pcall('PUBLISH'", "redis.call('PUBLISH'"),
                "tests/test_protocol.py::test_refused_channel_does_not_undo_a_hand_off[True]",
                "ResponseError",
            ),
            Proof(
                Mutant("acquire", "redis.pcall('PUBLISH'", "redis.call('PUBLISH'"),
                "tests/test_protocol.py::test_refused_channel_does_not_undo_a_hand_off[False]",
                "ResponseError",
            ),
        ),
    ),
    Rule(
        "5 one's own waiter needs no message",
        "A waiter of the releasing client is woken by the reply, and no message is sent.",
        (
            _compared("one's own waiter is sent a message"),
            Proof(
                Line(RedisStore, "_notice_released", "self._hand_over(standing, keys)", "pass"),
                "tests/test_wakeups.py::test_waiter_of_the_releasing_client_is_woken_by_the_reply",
            ),
        ),
    ),
    Rule(
        "5 fencing tokens grow",
        "Each grant has a token larger than the last, and than that of any grant before a loss.",
        (
            _invariant("6 the clock alone where free"),
            _invariant("6 the clock alone in release"),
            _invariant("6 the counter alone in its turn"),
            _simulated("fencing token is the time"),
        ),
    ),
    Rule(
        "5 fencing tokens are exact",
        "No number of microseconds is cut to fourteen digits.",
        (
            Proof(
                Mutant(
                    "release",
                    "local text = string.format('%.0f', math.max(",
                    "local text = tostring(math.max(",
                ),
                "tests/test_protocol.py::test_fencing_tokens_are_exact[4503599627370497]",
            ),
        ),
    ),
    Rule(
        "5 crashes are outlived",
        "A live waiter holds within the bound, whoever crashed and whatever message was lost.",
        (
            _invariant("7 a dead head is kept alive by the polls of others"),
            _invariant("7 a waiter does not tell that it lives"),
        ),
    ),
)

# Section 5: waiting.

_WAITING: Final = (
    Rule(
        "5 alive",
        "A waiter counts as alive for its ttl, within 1 and 6 seconds, after each poll.",
        (
            Proof(
                Line(_clock, "alive", "min(ALIVE_MAX_S, max(ttl_s, ALIVE_MIN_S))", "ttl_s"),
                "tests/test_watchdog.py::test_waiter_is_alive_for_its_ttl_within_bounds[30-6-2]",
            ),
        ),
    ),
    Rule(
        "5 three polls in a life",
        "A waiter polls each third of that.",
        (
            Proof(
                Line(_clock, "poll_interval", "alive_s / 3", "alive_s"),
                "tests/test_wakeups.py::test_waiter_whose_message_is_lost_holds_by_its_own_poll",
            ),
        ),
    ),
    Rule(
        "5 the first poll queues",
        "A waiter stands in the queue by its first request, before it has subscribed.",
        (
            Proof(
                Line(
                    Wait,
                    "_poll",
                    "alive_ms=_clock.ttl_ms(self._alive)",
                    "alive_ms=_clock.ttl_ms(self._alive) if self._refused else 0",
                ),
                "tests/test_wakeups.py::"
                "test_waiter_whose_message_overtakes_the_reply_is_granted_by_it",
            ),
        ),
    ),
    Rule(
        "5 a message may come early",
        "A message that overtakes the reply of the poll that queued it counts.",
        (
            Proof(
                Line(
                    Wait,
                    "_poll",
                    "self._refused = answer",
                    "self._refused, self._handed = answer, None",
                ),
                "tests/test_wakeups.py::"
                "test_waiter_whose_message_overtakes_the_reply_is_granted_by_it",
            ),
        ),
    ),
    Rule(
        "5 the head looks at the expiry",
        "The head of the queue polls when the holder's time is over.",
        (
            Proof(
                Line(Wait, "_pause", "refused.place == 0", "False"),
                "tests/test_wakeups.py::test_head_waits_no_longer_than_the_holder_lives",
            ),
        ),
    ),
    Rule(
        "5 poll after a lost connection",
        "Every waiter polls once when the connection for commands was lost.",
        (
            Proof(
                Line(Multiplexer, "_forget", "self._on_lost()", "pass"),
                "tests/test_wakeups.py::test_waiters_all_poll_when_their_connection_is_lost",
            ),
        ),
    ),
    Rule(
        "5 poll after a lost inbox",
        "Every waiter polls once when the inbox is subscribed, again and the first time.",
        (
            Proof(
                Line(RedisStore, "_inbox_hears", "self._poke_all()", "pass"),
                "tests/test_wakeups.py::test_waiters_all_poll_when_the_inbox_was_lost_and_is_back",
                "TimeoutError",
            ),
            Proof(
                Line(RedisStore, "_inbox_hears", "self._poke_all()", "pass"),
                "tests/test_survivors.py::test_waiters_poll_once_their_first_subscription_stands",
            ),
        ),
    ),
    Rule(
        "5 a half-open inbox",
        "A waiter that finds itself holding, and was not told, has the inbox asked.",
        (
            Proof(
                Line(Wait, "_poll", "self._store.doubt_inbox()", "pass"),
                "tests/test_waiting.py::test_deaf_inbox_is_found_out_and_replaced_with_one_warning",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "5 an inbox that does not answer",
        "It is cut, and made anew, with a warning.",
        (
            Proof(
                Line(Inbox, "_ask", "await self._held.cut()", "pass"),
                "tests/test_waiting.py::test_deaf_inbox_is_found_out_and_replaced_with_one_warning",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "5 one question at a time",
        "There is no second PING while one is unanswered.",
        (
            Proof(
                Line(Inbox, "doubt", "self.hears and self._pong is None", "self.hears"),
                "tests/test_survivors.py::test_inbox_is_asked_once_however_many_miss_a_message",
            ),
        ),
    ),
    Rule(
        "5 message: in time",
        "A message is trusted only while the last poll answered leaves a third of alive.",
        (
            Elsewhere(
                "tests.test_late",
                "RULES",
                "deadline - _clock.now() >= _clock.poll_interval(self._alive)",
            ),
            _simulated("every message is trusted"),
        ),
    ),
    Rule(
        "5 message: newer",
        "A message is trusted only with a fencing token above all that the polls have shown.",
        (
            Elsewhere("tests.test_late", "RULES", "value.fencing_token > self._largest_seen"),
            _simulated("message older than the last poll is trusted"),
        ),
    ),
    Rule(
        "5 message: same connection",
        "Polls answered over a connection that was lost since do not count.",
        (Elsewhere("tests.test_late", "RULES", "self._store.is_current(refused.link)"),),
    ),
    Rule(
        "5 a trusted message suffices",
        "The body starts by the message, without another round trip.",
        (
            Proof(
                Line(Wait, "_take_hand_over", "self._trusts_messages\n", "False\n"),
                "tests/test_late.py::test_message_in_time_starts_the_body_at_once",
            ),
        ),
    ),
    Rule(
        "5 nobody extends: confirm",
        "With `auto_extend=False` a hand-off is confirmed by a poll that sets the whole ttl.",
        (
            Proof(
                Line(Wait, "_take_hand_over", "self._trusts_messages\n", "True\n"),
                "tests/test_late.py::test_message_without_a_watchdog_is_confirmed_for_the_full_ttl",
            ),
        ),
    ),
    Rule(
        "5 stray hand-off",
        "A hand-off to a token of ours that neither waits nor holds is given back.",
        (
            Proof(
                Line(
                    RedisStore,
                    "_hand_over",
                    "self.release(stray, within=self._request_timeout)",
                    "self.inspect(stray.name, keys, within=self._request_timeout)",
                ),
                "tests/test_late.py::test_hand_off_to_nobody_is_given_back",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "5 wake where replies are read",
        "A reply wakes whom it concerns, though the caller has left.",
        (
            Proof(
                Line(
                    Link,
                    "_answer",
                    "request.call.heard(self.number, reply)",
                    "request.answer.done() or request.call.heard(self.number, reply)",
                ),
                "tests/test_survivors.py::"
                "test_waiter_is_woken_by_a_reply_whose_caller_was_cancelled_before_it_came",
            ),
        ),
    ),
    Rule(
        "5 a refusal names the holder",
        "If that is a waiter of ours, it polls.",
        tuple(
            Proof(
                Line(RedisStore, "_notice", "waiter.poke()", "pass"),
                "tests/test_wakeups.py::test_waiter_that_holds_and_was_not_told_is_woken_by_a_"
                f"reply_to_another[{call}]",
            )
            for call in ("acquire", "extend", "release")
        ),
    ),
    Rule(
        "5 no subscriber: polling",
        "Where the inbox is refused, waiting goes on with growing pauses.",
        (
            Proof(
                Line(Wait, "_pause", "not self._store.hears", "False"),
                "tests/test_waiting.py::"
                "test_waiters_without_the_right_to_subscribe_poll_with_one_warning[-subscribe]",
            ),
        ),
    ),
    Rule(
        "5 one warning",
        "An outage of the inbox is warned of once.",
        (
            Proof(
                Line(RedisStore, "_warn_of_polling", "if not self._is_warned:", "if True:"),
                "tests/test_waiting.py::"
                "test_waiters_without_the_right_to_subscribe_poll_with_one_warning[-subscribe]",
            ),
        ),
    ),
    Rule(
        "5 a foreign lock without ttl",
        "It is polled like another, and warned of once.",
        (
            Proof(
                Line(Wait, "_tell_of_a_long_wait", "self._warned = told", "told"),
                "tests/test_wakeups.py::test_waiter_on_a_foreign_lock_gets_it_when_it_goes[None]",
            ),
        ),
    ),
    Rule(
        "5 abandoned acquires",
        "An acquire whose caller has left is never sent again, not after NOSCRIPT either.",
        (
            _simulated("acquire sent again after it was given up"),
            Proof(
                Line(
                    Link,
                    "_answer",
                    "return None if request.answer.done() else self._send_again(request)",
                    "return self._send_again(request)",
                ),
                "tests/test_late.py::test_acquire_abandoned_before_noscript_is_not_sent_again",
            ),
        ),
    ),
)

# Section 6: deadlines, the watchdog, the body.

_DEADLINES: Final = (
    Rule(
        "6 from before the request",
        "The deadline counts from before the request was sent.",
        (
            _simulated("deadline counted from the reply"),
            Proof(
                Line(
                    Acquire,
                    "answer",
                    "_clock.deadline(self.sent_at,",
                    "_clock.deadline(_clock.now(),",
                ),
                "tests/test_watchdog.py::test_deadline_counts_from_before_the_request_was_sent",
            ),
            Proof(
                Line(
                    RedisStore,
                    "extend",
                    "_clock.deadline(sent_at,",
                    "_clock.deadline(_clock.now(),",
                ),
                "tests/test_survivors.py::"
                "test_deadline_of_an_extension_counts_from_before_it_was_sent",
            ),
        ),
    ),
    Rule(
        "6 from the first copy",
        "What a later copy of a request finds, the first one may have done.",
        (
            Proof(
                Line(Acquire, "sent", "if not self.sent_at:", "if True:"),
                "tests/test_survivors.py::test_grant_told_by_its_first_copy_counts_from_that",
            ),
        ),
    ),
    Rule(
        "6 from the ms left",
        "The deadline comes from what the server has, never from what was asked.",
        (
            Proof(
                Line(
                    RedisStore,
                    "extend",
                    "_clock.deadline(sent_at, answer)",
                    "_clock.deadline(sent_at, ttl_ms)",
                ),
                "tests/test_survivors.py::test_deadline_of_an_extension_is_from_what_the_server_has",
            ),
            Proof(
                Line(
                    Acquire,
                    "answer",
                    "_clock.deadline(self.sent_at, ttl_left_ms)",
                    "_clock.deadline(self.sent_at, 2 * ttl_left_ms)",
                ),
                "tests/test_survivors.py::test_deadline_of_a_grant_is_from_what_the_server_has",
            ),
        ),
    ),
    Rule(
        "6 drift",
        "1 % and 2 ms are taken off, for clocks of different rates.",
        (
            _simulated("no drift"),
            Proof(
                Line(_clock, "deadline", " - ttl_left_s * _DRIFT_SHARE", ""),
                "tests/test_watchdog.py::"
                "test_deadline_is_from_the_sending_less_the_drift[100.0-10000-109.898]",
            ),
            Proof(
                Line(
                    _clock,
                    "deadline",
                    " - _DRIFT_S",
                    "",
                ),
                "tests/test_watchdog.py::"
                "test_deadline_is_from_the_sending_less_the_drift[100.0-10000-109.898]",
            ),
        ),
    ),
    Rule(
        "6 only a positive answer",
        "A request without an answer moves no deadline.",
        (
            Proof(
                Line(
                    Lease,
                    "extend",
                    "self._validity.endanger()",
                    "self._validity.prolong(_clock.now() + asked, is_last=False)",
                ),
                "tests/test_watchdog.py::"
                "test_holder_that_extends_on_a_dead_server_keeps_its_deadline",
            ),
        ),
    ),
    Rule(
        "6 never back",
        "A deadline never moves back.",
        (
            Proof(
                Line(Validity, "prolong", "max(self._answered, deadline)", "deadline"),
                "tests/test_watchdog.py::test_validity_never_moves_its_deadline_back",
            ),
        ),
    ),
    Rule(
        "6 over is over",
        "After the deadline the lease counts as gone, whether or not anybody told us.",
        (
            Proof(
                Line(Lease, "check", "if left <= 0:", "if False:"),
                "tests/test_watchdog.py::"
                "test_check_after_the_loop_stood_still_tells_at_once[False]",
            ),
            Proof(
                Line(Lease, "_end_extension", "not self._notice_deadline()", "False"),
                "tests/test_watchdog.py::test_lease_that_was_shown_as_lost_is_never_held_again",
            ),
            Proof(
                Line(Lease, "__aexit__", "self._notice_deadline(tell_body=False)", "pass"),
                "tests/test_bodies.py::"
                "test_body_that_blocked_the_loop_past_the_deadline_and_succeeded_is_lost[True]",
            ),
        ),
    ),
    Rule(
        "6 a timer of its own",
        "A server that says nothing does not delay the news of the deadline.",
        (
            _simulated("nobody tells of the deadline"),
            Proof(
                Line(
                    Watchdog,
                    "_watch_deadline",
                    "self._end = self._loop.call_later(lease.remaining, self._on_deadline)",
                    "pass",
                ),
                "tests/test_watchdog.py::test_lease_without_watchdog_is_expired_at_its_deadline",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 the clock",
        "It goes on while the machine sleeps; it is never the wall clock.",
        (
            Proof(
                Constant(_clock, "_CLOCK_ID", time.CLOCK_REALTIME),
                "tests/test_watchdog.py::test_clock_goes_on_and_is_not_the_wall_clock",
            ),
        ),
    ),
    Rule(
        "1 work outlasts the ttl",
        "A lease is extended until it is released.",
        (
            _simulated("watchdog that goes on"),
            Proof(
                Line(Watchdog, "begin", "if lease.wants_extension:", "if False:"),
                "tests/test_watchdog.py::test_stall_shorter_than_the_time_left_loses_nothing",
                "LeaseLostError",
            ),
        ),
    ),
    Rule(
        "6 at a third",
        "The watchdog extends after a third of the validity.",
        (
            Proof(
                Line(_clock, "extension_delay", "valid_s / 3", "valid_s / 2"),
                "tests/test_watchdog.py::"
                "test_extensions_come_each_third_of_the_ttl_or_a_little_sooner",
            ),
            _simulated("extends when it is too late"),
        ),
    ),
    Rule(
        "6 of the validity it has",
        "After a hand-off that is a third of the short life, not of the ttl.",
        (
            Proof(
                Line(
                    Watchdogs,
                    "watch",
                    "left = lease.deadline - _clock.now()",
                    "left = lease.ttl",
                ),
                "tests/test_watchdog.py::"
                "test_lease_got_by_hand_off_starts_short_and_is_extended_in_time",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 jitter only shortens",
        "No extension comes later than a third.",
        (
            Proof(
                Line(_clock, "jittered", "1 - 0.1 * random", "1 + 0.1 * random"),
                "tests/test_watchdog.py::"
                "test_extension_is_due_after_a_third_and_jitter_only_shortens[1.0]",
            ),
        ),
    ),
    Rule(
        "6 no task before its time",
        "The watchdog's task begins when the first extension is due.",
        (
            Proof(
                Line(
                    Watchdogs,
                    "watch",
                    "_clock.extension_delay(left, random.random())",
                    "-1.0",
                ),
                "tests/test_watchdog.py::test_watchdog_of_a_short_body_is_never_made",
            ),
        ),
    ),
    Rule(
        "6 half the time left",
        "An extension is waited for half the time left, so that another has room.",
        (
            Proof(
                Line(
                    Watchdog,
                    "_extend",
                    "(lease.deadline - _clock.now()) / 2",
                    "lease.deadline - _clock.now()",
                ),
                "tests/test_survivors.py::"
                "test_watchdog_that_is_not_answered_has_time_for_another_try",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 at risk",
        "A failed or unanswered extension puts the lease at risk.",
        (
            Proof(
                Line(Watchdog, "_endangered", "lease._endanger()", "pass"),
                "tests/test_watchdog.py::test_server_that_forbids_for_a_moment_costs_nothing",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 again until the deadline",
        "A failed extension is tried again.",
        (
            Proof(
                Line(Watchdog, "_extend", "return self._endangered()", "self._endangered()"),
                "tests/test_lost_replies.py::test_watchdog_whose_reply_is_lost_keeps_the_lease",
                "LeaseLostError",
            ),
            Proof(
                Line(
                    Watchdog,
                    "_extend",
                    "return self._endangered()",
                    "return self._endangered() and None",
                ),
                "tests/test_watchdog.py::test_server_that_forbids_for_a_moment_costs_nothing",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 not mine is lost",
        "An answer that says that the lease is another's ends it at once.",
        (
            Proof(
                Line(
                    Lease,
                    "_end_extension",
                    "self._lose(self._validity.find_taken(answer.value))",
                    "self._validity.find_taken(answer.value)",
                ),
                "tests/test_watchdog.py::"
                "test_body_whose_key_is_taken_from_outside_is_told_at_the_next_extension"
                "[theirs-LostReason.STOLEN]",
            ),
        ),
    ),
    Rule(
        "6 a stall is told apart",
        "If the loop stood still past the deadline, the reason is LOOP_STALLED.",
        (
            Proof(
                Line(Validity, "reason_at_deadline", "-self.left <= _STALL_S", "True"),
                "tests/test_watchdog.py::test_validity_tells_why_the_deadline_passed"
                "[0.5-True-True-False-LostReason.LOOP_STALLED]",
            ),
        ),
    ),
    Rule(
        "6 no extension after the release",
        "The watchdog is stopped before the release is sent.",
        (
            Proof(
                Line(
                    Lease,
                    "_release",
                    "self._keeper.stop(self.owner_token)",
                    "None",
                ),
                "tests/test_watchdog.py::"
                "test_watchdog_starts_when_the_first_extension_is_due_and_ends_with_the_release",
            ),
            Proof(
                Line(_Shared, "parts", "self.waiting", "self._sharers"),
                "tests/test_survivors.py::"
                "test_lease_released_in_the_turn_of_an_extension_is_not_in_the_call",
            ),
        ),
    ),
    Rule(
        "6 ended with the release",
        "The watchdog's task has ended when the release returns.",
        (
            Proof(
                Line(Lease, "_release", "await asyncio.wait((ending,))", "pass"),
                "tests/test_survivors.py::"
                "test_watchdog_has_ended_when_a_release_that_never_waits_returns",
            ),
        ),
    ),
    Rule(
        "6 lost once",
        "A loss is told once, with its first reason.",
        (
            Proof(
                Line(Validity, "lose", "if not self.is_open:", "if False:"),
                "tests/test_survivors.py::"
                "test_lease_lost_twice_keeps_its_first_reason_and_cancels_once",
            ),
        ),
    ),
    Rule(
        "1 the lock is lost anyway",
        "A loss cancels the body.",
        (
            Proof(
                Line(Lease, "_lose", "self._tell_body(self._body)", "pass"),
                "tests/test_watchdog.py::"
                "test_body_that_blocked_the_loop_is_told_within_one_turn[True]",
            ),
        ),
    ),
    Rule(
        "6 not by its own call",
        "A loss that the body's own call finds raises there, and does not cancel.",
        (
            Proof(
                Line(Body, "cancel", "running_task() is self.task", "False"),
                "tests/test_bodies.py::test_body_whose_check_finds_the_loss_is_not_cancelled",
            ),
        ),
    ),
    Rule(
        "6 take the cancel back",
        "The body's task is uncancelled when the block turns our cancel into the loss.",
        (
            Proof(
                Line(Body, "leave", "self.task.uncancel()", "self.task.cancelling() - 1"),
                "tests/test_bodies.py::"
                "test_body_whose_lease_is_lost_is_cancelled_once_and_can_clean_up"
                "[None-DELETED]",
            ),
        ),
    ),
    Rule(
        "6 others cancel too",
        "If somebody else cancelled as well, their cancel comes out.",
        (
            Proof(
                Line(Body, "_others", "cancels > self._cancels_before", "False"),
                "tests/test_bodies.py::"
                "test_body_that_somebody_else_cancels_too_ends_with_their_cancel"
                "[by_task-ours-in the clean-up]",
            ),
            Proof(
                Line(
                    Lease,
                    "_conclude",
                    "self._note_loss(error)",
                    "pass",
                ),
                "tests/test_bodies.py::"
                "test_body_that_somebody_else_cancels_too_ends_with_their_cancel"
                "[by_task-ours-in the clean-up]",
            ),
        ),
    ),
    Rule(
        "6 one cancel for several",
        "Leases of one task that are lost together cancel it once.",
        (
            Proof(
                Line(
                    Body,
                    "cancel",
                    "_cancels.get(self.task)",
                    "_cancels.get(self.task); shared and self.task.cancel()",
                ),
                "tests/test_bodies.py::test_leases_of_one_task_lost_together_cancel_it_once",
                "CancelledError",
            ),
        ),
    ),
    Rule(
        "3 max_hold is cut",
        "Extensions are cut so that the key ends at grant + max_hold.",
        (
            Proof(
                Line(Validity, "ask", "if ttl <= most:", "if True:"),
                "tests/test_watchdog.py::"
                "test_lease_held_for_max_hold_is_lost_and_its_key_ends_then",
            ),
        ),
    ),
    Rule(
        "3 the last extension",
        "Once an extension was cut, no further one is sent.",
        (
            Proof(
                Line(Validity, "prolong", "self.is_final or is_last", "False"),
                "tests/test_watchdog.py::test_lease_after_its_last_extension_sends_no_more",
            ),
        ),
    ),
    Rule(
        "3 a forgotten lease",
        "One that is thrown away while held stops its watchdog.",
        (
            Proof(
                Line(Lease, "__del__", "keeper.stop(token)", "pass"),
                "tests/test_watchdog.py::"
                "test_lease_thrown_away_while_held_stops_its_watchdog_and_warns",
            ),
        ),
    ),
)

# uncancel() drops such a cancel by itself since 3.13.
_LEAKED: Final = Proof(
    Line(Body, "leave", "await asyncio.sleep(0)", "pass"),
    "tests/test_bodies.py::test_body_that_ends_with_the_cancel_undelivered_leaks_no_cancel",
    "CancelledError",
)
_UNDELIVERED: Final = Rule(
    "6 an undelivered cancel",
    "A cancel of ours that was not delivered is taken up in one turn, before the block is left.",
    (
        *((_LEAKED,) if sys.version_info < (3, 13) else ()),
        Proof(
            Line(Body, "leave", "asyncio.sleep(0)", "asyncio.sleep(1)"),
            "tests/test_survivors.py::test_block_whose_body_swallowed_the_cancel_ends_in_one_turn",
        ),
    ),
)

# Section 7, with the end of a client.

_CANCELLATION: Final = (
    Rule(
        "7 a cancelled release is sent",
        "A release that is cancelled is done all the same.",
        (
            Proof(
                Line(
                    Lease,
                    "_release",
                    'await self._background.finish(self._give_up(), "releasing", self.name)',
                    "pass",
                ),
                "tests/test_cases.py::"
                "test_case_001_cancelled_release_leaves_no_key_that_nobody_can_free"
                "[reply delayed]",
            ),
        ),
    ),
    Rule(
        "1 cancelled while acquiring",
        "What may stand of it is released: queued, granted, or on its way.",
        (
            _simulated("nothing is given up on cancel"),
            Elsewhere("tests.test_cancellation", "_do_nothing", ""),
            Proof(
                Line(
                    Session,
                    "_failed",
                    "await self.background.finish(work, what, acquisition.name)",
                    "work.close()",
                ),
                "tests/test_late.py::"
                "test_acquire_and_release_over_one_connection_need_no_tombstone",
            ),
        ),
    ),
    Rule(
        "7 the clean-up is waited for",
        "A cancelled caller goes on when its clean-up is done.",
        (Elsewhere("tests.test_cancellation", "_send_only", ""),),
    ),
    Rule(
        "7 for a second at most",
        "A server that does not answer holds a cancelled caller for 1 s.",
        (
            Proof(
                Constant(_cleanup, "_CANCELLED_S", 1.8),
                "tests/test_cancellation.py::"
                "test_acquire_in_a_black_hole_is_cancelled_within_a_second",
            ),
        ),
    ),
    Rule(
        "7 in the background after a timeout",
        "When a wait is over, its caller does not wait for the clean-up.",
        (
            Proof(
                Line(
                    Session,
                    "_failed",
                    "self.background.start(work, what, acquisition.name)",
                    "await work",
                ),
                "tests/test_survivors.py::test_wait_that_is_over_is_not_held_up_by_its_clean_up",
            ),
            _simulated("nothing is given up on timeout"),
        ),
    ),
    Rule(
        "7 awaited by aclose",
        "What goes on in the background has ended when the client is closed.",
        (
            Proof(
                Line(Background, "drain", "while self._tasks:", "while False:"),
                "tests/test_survivors.py::test_client_closed_at_once_has_left_the_queue",
            ),
        ),
    ),
    Rule(
        "7 the shield",
        "A second cancel, or an anyio scope's next, does not end the clean-up.",
        (
            Elsewhere("tests.test_cancellation", "_unshielded", ""),
            _simulated("clean-up without its shield"),
            Proof(
                Line(_cleanup, "outlast", "cancelled = error", "raise"),
                "tests/test_cancellation.py::"
                "test_acquire_with_slow_requests_cancelled_anywhere_leaves_nothing",
            ),
        ),
    ),
    Rule(
        "7 a task of its own",
        "The clean-up does not run in the task that was cancelled.",
        (_simulated("clean-up in the cancelled task"),),
    ),
    Rule(
        "7 the cancel comes out",
        "`CancelledError` is what a cancelled acquire ends with.",
        (
            Proof(
                Line(
                    Session,
                    "acquire",
                    "raise\n    finally",
                    "raise closed_error(name)\n    finally",
                ),
                "tests/test_late.py::"
                "test_acquire_and_release_over_one_connection_need_no_tombstone",
                "RuntimeError",
            ),
        ),
    ),
    Rule(
        "7 fork: the child holds nothing",
        "In a forked child the parent's leases are lost, CLOSED.",
        (
            Proof(
                Line(LockClient, "_forget_parent", "self._session.disown()", "pass"),
                "tests/test_closing.py::"
                "test_child_that_leaves_the_block_of_its_parent_releases_nothing",
            ),
        ),
    ),
    Rule(
        "7 fork: a client of its own",
        "A forked child locks with a new client id, over connections of its own.",
        (
            Proof(
                Line(LockClient, "_forget_parent", "self._session = self._closing = None", "pass"),
                "tests/test_closing.py::"
                "test_child_forked_inside_a_coroutine_uses_the_client_it_inherited",
            ),
        ),
    ),
    Rule(
        "3 aclose: waiters first",
        "Waiters leave before any lease is released, which would hand a lock to one of them.",
        (
            Proof(
                Line(Session, "close", "await self._end_waits()", "pass"),
                "tests/test_closing.py::"
                "test_lock_of_a_closing_client_goes_to_another_clients_waiter_not_to_its_own"
                "[body]",
            ),
        ),
    ),
    Rule(
        "3 aclose: newcomers are refused",
        "Whoever is granted a lock while the client closes gives it back.",
        (
            Proof(
                Line(Session, "acquire", "if self.is_closing:", "if False:"),
                "tests/test_closing.py::"
                "test_waiter_whose_request_is_in_flight_when_its_client_closes_is_told",
            ),
        ),
    ),
    Rule(
        "3 aclose: bodies are waited for",
        "A body that was told has time to leave, and its lease lives until then.",
        (
            Proof(
                Line(Session, "close", "await self._end_bodies(bodies)", "pass"),
                "tests/test_closing.py::test_client_whose_body_must_not_be_cancelled_waits_for_it",
            ),
            Proof(
                Line(Lease, "_lose", "if reason is not LostReason.CLOSED:", "if True:"),
                "tests/test_closing.py::"
                "test_lease_of_a_body_that_a_closing_client_waits_for_is_still_extended"
                "[before]",
            ),
        ),
    ),
    Rule(
        "3 aclose: told by CLOSED",
        "A running body loses its lease.",
        (
            Proof(
                Line(Session, "close", "lease._lose(LostReason.CLOSED, tell", "dict(tell"),
                "tests/test_closing.py::"
                "test_client_that_is_closed_tells_everybody_and_leaves_nothing",
            ),
        ),
    ),
)

# Section 8: the connection.

_CONNECTION: Final = (
    Rule(
        "8 a silent connection is given up",
        "One that gave no reply for `request_timeout`, though asked, is replaced.",
        (
            _simulated("silent connection is kept"),
            Proof(
                Line(Link, "_judge", "if silent_at <= now:", "if False:"),
                "tests/test_connection.py::test_link_silent_for_request_timeout_is_given_up",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "8 each request its own deadline",
        "A request without a reply ends when its own time is over.",
        (
            Proof(
                Line(Link, "_judge_late", "if request.ends_at <= now:", "if False:"),
                "tests/test_connection.py::test_request_has_a_deadline_of_its_own",
            ),
        ),
    ),
    Rule(
        "8 drop nobody else's",
        "A request that runs out of time leaves the connection to the others.",
        (
            Proof(
                Line(
                    Link,
                    "_judge_late",
                    'request.settle(request.fallback or NoAnswer("no reply in time"))',
                    'self.drop("no reply in time")',
                ),
                "tests/test_connection.py::test_request_out_of_time_drops_nobody_elses",
            ),
        ),
    ),
    Rule(
        "8 ask again elsewhere",
        "A request whose time runs out is sent again over a borrowed connection.",
        (
            Proof(
                Line(Caller, "_repeat", "if self._borrowers < _BORROWERS_MAX:", "if False:"),
                "tests/test_lost_replies.py::test_acquire_whose_reply_is_lost_is_granted[0.0]",
                "ServerUnreachable",
            ),
        ),
    ),
    Rule(
        "8 around a silent link",
        "Once a link is known to be silent, a call does not wait for it first.",
        (
            Proof(
                Line(Caller, "reply", "if link.is_suspect else None", "if False else None"),
                "tests/test_survivors.py::"
                "test_call_on_a_link_that_is_known_to_be_silent_goes_around_it_at_once",
            ),
        ),
    ),
    Rule(
        "8 one borrowed connection",
        "However many take the slow path, one connection more is open.",
        (
            Proof(
                Line(
                    Caller,
                    "_elsewhere",
                    "async with asyncio.timeout_at(end), self._borrowing:",
                    "async with asyncio.timeout_at(end):",
                ),
                "tests/test_survivors.py::"
                "test_releases_on_a_silent_link_borrow_one_connection_at_a_time",
            ),
        ),
    ),
    Rule(
        "8 two connections",
        "A client needs room for two; a pool of one is refused.",
        (
            Proof(
                Line(_source, "checked", "most is not None and most < 2", "False"),
                "tests/test_connection.py::test_pool_of_one_connection_is_refused",
            ),
        ),
    ),
    Rule(
        "8 the loop stood still, not the server",
        "A timer that is late gives the replies that lie unread a moment more, once.",
        (
            Proof(
                Line(Link, "_on_time", "if is_late and self._has_grace:", "if False:"),
                "tests/test_connection.py::test_loop_that_stalls_does_not_drop_the_link"
                "[one request to a fast server]",
                "ServerUnreachable",
            ),
            Proof(
                Line(Link, "_on_time", "self._has_grace = False", "pass"),
                "tests/test_connection.py::test_loop_that_stalls_all_the_time_still_ends_a_wait",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "8 a script's text once",
        "After NOSCRIPT one request has the text, the rest go by its digest behind it.",
        (
            Proof(
                Line(Link, "_send_again", "request.call.script not in self._loading", "True"),
                "tests/test_connection.py::"
                "test_scripts_forgotten_are_sent_once_each_however_many_call",
            ),
        ),
    ),
    Rule(
        "8 new credentials",
        "A connection that the server logged out is replaced, and no lease notices.",
        (
            Proof(
                Line(_mux, "_is_displaced", "AuthenticationError | ReadOnlyError", "ReadOnlyError"),
                "tests/test_connection.py::"
                "test_credentials_that_the_server_dropped_are_given_again",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "8 reads wait without a limit",
        "The user's `socket_timeout` does not bound our requests.",
        (
            Proof(
                Line(Held, "__init__", "self.connection.socket_timeout = None", "pass"),
                "tests/test_survivors.py::"
                "test_users_socket_timeout_does_not_end_an_idle_connection",
            ),
        ),
    ),
    Rule(
        "8 settings are put back",
        "A connection goes back to the pool as it was.",
        (
            Proof(
                Line(
                    Held,
                    "give_back",
                    "self.connection.socket_timeout, self.connection.retry = self._settings",
                    "pass",
                ),
                "tests/test_connection.py::test_users_pool_is_handed_back_as_it_was",
            ),
        ),
    ),
    Rule(
        "8 replies in order",
        "Each caller gets the reply to its own request.",
        (
            Proof(
                Line(
                    Link,
                    "_answer",
                    "self._outstanding.popleft()",
                    "self._outstanding.pop()",
                ),
                "tests/test_connection.py::test_link_gives_each_caller_its_own_reply",
            ),
        ),
    ),
    Rule(
        "8 a shared extension's bound",
        "At most a hundred leases share a call.",
        (
            Proof(
                Constant(_extensions, "_SHARERS_MAX", 1000),
                "tests/test_extensions.py::test_extensions_of_one_turn_share_calls_of_a_hundred",
            ),
        ),
    ),
)

_FAULTS = "tests/test_quorum_faults.py::"
_OF_QUORUM = "tests/test_quorum.py::"

_QUORUM: Final = (
    Rule(
        "9 majority",
        "Any two majorities share a node.",
        (
            _simulated_on_nodes("half of the nodes are a majority"),
            Proof(
                Line(Tally, "__init__", "nodes // 2 + 1", "nodes // 2"),
                "tests/test_round.py::test_tally_majorities_always_share_a_node[5]",
            ),
        ),
    ),
    Rule(
        "9 returns at the majority",
        "The slowest node is not waited for.",
        (
            Proof(
                Line(Round, "_judge", "self.tally.is_settled and", "False and"),
                "tests/test_round.py::test_round_ends_at_the_majority_and_not_at_the_slowest",
            ),
            Proof(
                Line(Round, "_judge", "self.tally.has_answers", "False"),
                "tests/test_round.py::"
                "test_round_waits_for_stragglers_as_long_again_and_a_moment[0.2-undecided]",
            ),
        ),
    ),
    Rule(
        "9 second round",
        "A majority knows the fencing token before the body begins.",
        (
            _simulated_on_nodes("the second round leaves the counters"),
            _simulated_on_nodes("fencing without a second round"),
            Proof(
                Mutant("confirm", "redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)", ""),
                _OF_QUORUM + "test_fencing_tokens_grow_over_grants_of_every_two_majorities",
            ),
            Proof(
                Line(
                    QuorumStore,
                    "acquire",
                    "await self._confirm(ballot, ttl_ms, within=until - _clock.now())",
                    "deadline",
                ),
                _OF_QUORUM + "test_fencing_token_stands_on_a_majority_when_the_body_begins",
            ),
        ),
    ),
    Rule(
        "9 deadline",
        "It is that of the node on which the lock ends first, and counts from before the request.",
        (
            _simulated_on_nodes("deadline of the slowest node"),
            Proof(
                Line(QuorumStore, "_confirm", "min(left for", "max(left for"),
                "tests/test_simulation.py::"
                "test_lease_whose_nodes_differ_lasts_as_long_as_the_shortest",
            ),
        ),
    ),
    Rule(
        "9 undone before the next try",
        "What a minority granted is given back before the next try.",
        (
            _simulated_on_nodes("a try is not undone"),
            _simulated_on_nodes("the next try has the same owner token"),
            Proof(
                Line(
                    Tries,
                    "_undo",
                    "await self._store.release("
                    "self.acquisition, within=min(self._request_timeout, left))",
                    "pass",
                ),
                _OF_QUORUM + "test_minority_of_a_waiter_is_given_back_between_two_tries",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "9 released where it may stand",
        "A release goes to the nodes, too, that did not answer.",
        (
            _simulated_on_nodes("only what was granted is released"),
            Proof(
                Line(
                    QuorumStore,
                    "release",
                    "if part.may_stand or part.acquisition.asked:",
                    "if part.may_stand and not part.acquisition.asked:",
                ),
                _FAULTS + "test_acquire_whose_replies_are_lost_is_given_back_everywhere",
                "LockTimeout",
            ),
        ),
    ),
    Rule(
        "9 never sent once given up",
        "An acquire that waits for its connection is not sent after its release.",
        (
            _simulated_on_nodes("what is unsent leaves after the release"),
            Proof(
                Line(Part, "give_up", "self._taking.cancel()", "pass"),
                _FAULTS
                + "test_acquire_that_waits_for_its_connection_when_it_is_given_up_is_never_sent",
            ),
        ),
    ),
    Rule(
        "9 heal after a majority",
        "A node is given the lock again only after a round in which a majority extended.",
        (
            _simulated_on_nodes("a failed round heals"),
            _simulated_on_nodes("healed before the majority spoke"),
            _simulated_on_nodes("healed after the release"),
            Proof(
                Line(
                    QuorumStore,
                    "_confirm",
                    "outcome = await round_.settled()",
                    "outcome = await round_.settled(); self._heal(ballot, ttl_ms, within)",
                ),
                _FAULTS + "test_round_without_a_majority_heals_nothing",
            ),
            Proof(
                Line(QuorumStore, "extend", " and not ballot.is_over", ""),
                _FAULTS + "test_lease_that_was_released_meanwhile_is_healed_nowhere",
            ),
            Proof(
                Line(QuorumStore, "extend", "self._heal(ballot, ttl_ms, within)", "pass"),
                _FAULTS + "test_minority_that_lost_its_keys_is_given_them_again_and_"
                "counts_from_then_on[delete]",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "9 a dead node is spared",
        "It does not collect requests.",
        (
            Proof(
                Constant(_node, "_PATIENCE_S", 60.0),
                _FAULTS + "test_node_that_is_dead_collects_no_requests",
            ),
        ),
    ),
    Rule(
        "9 each server once",
        "A server by two addresses is refused.",
        (
            Proof(
                Line(QuorumStore, "acquire", "if self._twin:", "if False:"),
                _OF_QUORUM
                + "test_quorum_with_a_server_by_two_addresses_is_refused_when_it_acquires[5]",
            ),
        ),
    ),
)

_FENCING: Final = (
    Rule(
        "10 claim first",
        "A claim succeeds only if its token is larger than the one stored.",
        (
            Proof(
                Constant(
                    sql_fence,
                    "_CLAIM",
                    sql_fence._CLAIM.replace("held.token < excluded", "held.token <= excluded"),
                ),
                "tests/test_fencing_sql.py::"
                "test_claim_with_no_larger_token_rolls_the_transaction_back[aiosqlite-late1]",
            ),
            Proof(
                Constant(
                    redis_fence,
                    "_CLAIM",
                    redis_fence._CLAIM.replace("token >= ARGV[1]", "token > ARGV[1]"),
                ),
                "tests/test_fencing_redis.py::"
                "test_claim_with_no_larger_token_is_refused[server-late1]",
            ),
        ),
    ),
    Rule(
        "10 equality later",
        "Every later operation of the section requires its own token, until it has committed.",
        (
            Proof(
                Constant(
                    sql_fence,
                    "_CHECK",
                    "SELECT token FROM {fence} WHERE name = {0} AND token = {1}",
                ),
                "tests/test_fencing_sql.py::"
                "test_newer_claim_waits_for_the_section_that_has_checked[aiosqlite-by-hand]",
                "OperationalError",
            ),
            Proof(
                Constant(
                    redis_fence, "_WRITE", redis_fence._WRITE.replace("token ~= ARGV[1]", "false")
                ),
                "tests/test_fencing_redis.py::"
                "test_write_with_another_token_runs_nothing[server-grant0-102]",
            ),
        ),
    ),
)

_REENTRANT: Final = "tests/test_reentrant.py::test_"
_SEVERAL: Final = "tests/test_all.py::test_"
_KEPT: Final = "tests/test_hold_at_least.py::test_"

_MORE_THAN_A_MUTEX: Final = (
    Rule(
        "3 the outermost block releases",
        "Leaving an inner block of a reentrant lock releases nothing.",
        (
            Proof(
                Line(ReentrantLease, "_undo_entry", "return not self._entries", "return True"),
                f"{_REENTRANT}body_that_fails_in_the_inner_block_keeps_the_lock_to_the_outer_end",
            ),
            Proof(
                Line(ReentrantLease, "_undo_entry", "len(self._blocks) == 1", "True"),
                f"{_REENTRANT}closing_client_waits_for_the_outermost_block",
            ),
        ),
    ),
    Rule(
        "3 the newest entry",
        "A release within an inner block undoes that block's own entry.",
        (
            Proof(
                Line(ReentrantLease, "_undo_entry", "if body in self._entries:", "if True:"),
                f"{_REENTRANT}release_within_a_block_is_not_undone_again_at_its_end",
                "ValueError",
            ),
        ),
    ),
    Rule(
        "3 a lost lease is not hidden",
        "A task that enters its lost lease again gets the error, not a new lease.",
        (
            Proof(
                Line(ReentrantLease, "enter_again", "self.check()", "pass"),
                f"{_REENTRANT}lost_lease_entered_again_raises_rather_than_waits",
            ),
        ),
    ),
    Rule(
        "3 every block is told",
        "The inner block of a lost reentrant lease raises, as the outer one does.",
        (
            Proof(
                Line(ReentrantLease, "_tell_body", "in self._blocks:", "in self._blocks[:1]:"),
                f"{_REENTRANT}lost_lease_cancels_the_body_once_and_comes_out_of_every_block",
            ),
        ),
    ),
    Rule(
        "3 the task's own",
        "Only the task that acquired a reentrant lease may enter it again.",
        (
            Proof(
                Line(
                    Reentries,
                    "enter_again",
                    "self._leases.get(task)",
                    "next(iter(self._leases.values()), None)",
                ),
                f"{_REENTRANT}other_task_and_child_task_wait_their_turn",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "3 reentrant leases are held weakly",
        "The list of reentrant leases keeps none of them alive.",
        (
            Proof(
                Line(Reentries, "add", "weakref.WeakValueDictionary()", "{}"),
                f"{_REENTRANT}lease_thrown_away_by_its_task_warns_and_may_be_acquired_anew",
            ),
        ),
    ),
    Rule(
        "3 no wait for oneself",
        "A task that would wait for itself for ever is told so, and only such a task.",
        (
            Proof(
                Line(Session, "_refuse_wait_for_own_lock", "if lease is not None", "if False"),
                "tests/test_cases.py::"
                "test_case_099_task_that_would_wait_for_itself_for_ever_is_told_so[same object]",
                "TimeoutError",
            ),
            Proof(
                Line(Session, "_refuse_wait_for_own_lock", "lease.is_endless and ", ""),
                f"{_REENTRANT}wait_for_oneself_that_ends_with_the_lease_is_granted[outer1]",
                "RuntimeError",
            ),
            Proof(
                Line(Session, "_refuse_wait_for_own_lock", "is running_task()", "is not None"),
                f"{_REENTRANT}task_that_waits_for_another_task_is_not_refused",
                "RuntimeError",
            ),
            Proof(
                Line(Session, "_refusal", " if is_endless else _go_on", ""),
                f"{_REENTRANT}wait_for_oneself_that_has_an_end_is_an_ordinary_timeout[finite]",
                "RuntimeError",
            ),
        ),
    ),
    Rule(
        "3 one global order",
        "Several names are acquired in the order of their bytes, however they were given.",
        (
            Proof(
                Line(
                    AllLocks,
                    "__init__",
                    "sorted(locks, key=lambda lock: lock.name.encode())",
                    "list(locks)",
                ),
                f"{_SEVERAL}names_are_acquired_once_each_in_the_order_of_their_bytes",
            ),
        ),
    ),
    Rule(
        "3 one budget",
        "Several names share one wait_timeout.",
        (
            Proof(
                Line(
                    AllLocks,
                    "__aenter__",
                    "wait_timeout = max(_LAST_TRY_S, ends_at - _clock.now())",
                    "pass",
                ),
                f"{_SEVERAL}budget_that_one_name_used_up_is_not_given_to_the_next",
            ),
        ),
    ),
    Rule(
        "3 all or none",
        "Where one of several names is not got, the others are given back.",
        (
            Proof(
                Line(
                    AllLeases,
                    "_give_back",
                    "self._begin_releases(Lease._release)",
                    "dict[str, Any]()",
                ),
                f"{_SEVERAL}one_that_is_not_got_in_time_leaves_none",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "3 losing one is losing all",
        "A lease that is lost ends the wait for the next name, too.",
        (
            Proof(
                Line(_AllBody, "_may_tell", " or not self.is_entered", ""),
                f"{_SEVERAL}lease_lost_while_the_next_is_waited_for_ends_the_wait",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "6 one cancel for several leases",
        "Several leases of one block, all lost, cancel its task once.",
        (
            Proof(
                Line(Body, "cancel", "self._shared is not None or ", ""),
                f"{_SEVERAL}all_lost_at_once_cancel_the_body_once",
            ),
        ),
    ),
    Rule(
        "3 hold_at_least",
        "A name stays taken after the release until that long since the grant.",
        (
            Proof(
                Line(Lease, "_give_up", ", keep_until=self._keep_until", ""),
                f"{_KEPT}name_after_the_release_stays_taken_until_then[shorter than the ttl]",
            ),
            _kept("kept for ever"),
            _kept("never kept for less"),
        ),
    ),
    Rule(
        "5 a kept name is nobody's",
        "No copy of any request prolongs or frees a name that stays taken.",
        (
            _kept("the kept name is its owner's still"),
            _kept("no tombstone"),
            Proof(
                Line(Retire, "parts", "any(other != number for other in asked)", "False"),
                f"{_KEPT}release_after_a_lost_grant_refuses_late_copies",
            ),
        ),
    ),
    Rule(
        "5 only the owner keeps a name",
        "A release that is to keep a name changes nothing where the lock is not the owner's.",
        (_kept("kept by what begins alike"), _kept("kept by anybody")),
    ),
)

_READ: Final = "tests/test_readers.py::test_"
_PERMIT: Final = "tests/test_semaphore.py::test_"
_OF_KINDS: Final = "tests/test_cases_of_kinds.py::test_case_"
_SHARED_NODES: Final = "tests/test_shared_quorum.py::test_"
_MAY_ENTER: Final = "return inside < math.min(most, limit_of(member))"


def _shared(check: str, *mutants: tuple[str, str, str]) -> tuple[Proof, ...]:
    """Faults of the scripts that *check* of the readers' tests notices."""
    test = f"{_READ}shared_scripts_keep_the_rule[check_{check}]"
    return tuple(Proof(Mutant(*mutant), test) for mutant in mutants)


def _permits(check: str, *mutants: tuple[str, str, str]) -> tuple[Proof, ...]:
    """Those that *check* of the semaphore's tests notices."""
    test = f"{_PERMIT}semaphore_scripts_keep_the_rule[check_{check}]"
    return tuple(Proof(Mutant(*mutant), test) for mutant in mutants)


def _shared_compared(line: str) -> Elsewhere:
    return Elsewhere("tests.test_shared_differential", "MUTANTS", line)


_SEVERAL_HOLDERS: Final = (
    Rule(
        "3 a writer is alone",
        "Nobody is inside beside a writer; readers are inside with readers.",
        (
            *_shared("writer_is_alone", ("share_acquire", _MAY_ENTER, "return true")),
            *_shared("neighbours_enter_together", ("share_release", _MAY_ENTER, "return true")),
            *_shared(
                "writer_is_alone",
                (
                    "share_acquire",
                    "  return 1\nend\n\n-- Of readers",
                    "  return 9\nend\n\n-- Of readers",
                ),
            ),
        ),
    ),
    Rule(
        "3 no more than its permits",
        "Never more are inside than a semaphore has permits.",
        _permits(
            "no_more_than_permits",
            ("share_acquire", "inside < math.min(most", "inside <= math.min(most"),
            ("share_release", "inside < math.min(most", "inside <= math.min(most"),
            ("share_acquire", "inside, most = inside + 1,", "inside, most = inside,"),
        ),
    ),
    Rule(
        "3 the smallest number of permits",
        "Of all who are inside, and of who enters, the smallest number of permits counts.",
        (
            *_permits(
                "smallest_number_counts",
                ("share_acquire", "is_semaphore and -1 or 0", "0"),
                ("share_release", "is_semaphore and -1 or 0", "0"),
                ("share_acquire", "inside < math.min(most, limit_of(member))", "inside < most"),
            ),
            Proof(
                Mutant("share_release", _MAY_ENTER, "return inside < limit_of(member)"),
                f"{_PERMIT}semaphore_scripts_keep_the_rule[check_smallest_number_counts]",
            ),
        ),
    ),
    Rule(
        "5 only the head enters",
        "Who would fit in beside the holders stands behind a waiter who does not.",
        (
            *_shared(
                "only_the_head_enters",
                ("share_acquire", "if is_empty and not own_text and", "if"),
            ),
            Proof(
                Mutant("share_acquire", "if is_empty and not own_text and", "if not own_text and"),
                f"{_READ}reader_does_not_overtake_a_waiting_writer_nor_a_writer_readers",
            ),
        ),
    ),
    Rule(
        "5 all who may enter do",
        "A release, or a poll, lets in every waiter at the head for whom there is room.",
        (
            *_shared(
                "neighbours_enter_together",
                ("share_release", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
                ("share_acquire", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
                ("share_release", "\nlet_in()\n", "\n"),
            ),
            *_permits(
                "room_is_filled",
                ("share_release", "for _ = 1, 1000 do", "for _ = 1, 1 do"),
                ("share_release", "KEYS[1], '-inf', now_ms,", "KEYS[1], '-inf', 0,"),
            ),
            _shared_compared("for _ = 1, 1000 do"),
        ),
    ),
    Rule(
        "5 own waiters hear by the reply",
        "Those of the caller's own waiters who enter are woken by the reply, without a message.",
        (
            _shared_compared("if client_id == own_client_id then"),
            Proof(
                Line(
                    ShareRelease,
                    "heard",
                    "tell_entered(self._notice, reply, self.acquisition.keys)",
                    "pass",
                ),
                f"{_READ}neighbouring_readers_of_any_client_enter_together",
            ),
            Proof(
                Line(
                    Downgrade,
                    "heard",
                    "tell_entered(self._notice, reply, self._acquisition.keys)",
                    "pass",
                ),
                f"{_READ}writer_that_downgrades_lets_in_the_readers_at_the_head",
            ),
        ),
    ),
    Rule(
        "5 places of several kinds",
        "Readers, writers and permits stand by arrival, and keep their place when they poll.",
        (
            *_shared(
                "places_are_by_arrival",
                ("share_acquire", "math.max(highest + 1, now_us)", "now_us"),
                ("share_acquire", "  if not place then\n", "  if true then\n"),
            ),
            *_shared(
                "waiter_that_polls_lives",
                ("share_acquire", "  set_liveness(token, now_ms + alive_ms)\nend\nloc", "end\nloc"),
            ),
        ),
    ),
    Rule(
        "5 each holder has a life of its own",
        "A holder whose time is over keeps nobody out, extends nothing, and is shown no more.",
        (
            *_shared(
                "ended_holder_is_none",
                ("share_extend", "or tonumber(end_ms) <= now_ms", ""),
                ("share_acquire", "KEYS[1], '-inf', now_ms,", "KEYS[1], '-inf', 0,"),
                ("share_acquire", "  redis.call('ZREM', KEYS[5], member, '+' .. member)\n", ""),
            ),
            *_shared(
                "grant_asked_for_again_is_the_same",
                ("share_acquire", "granted and tonumber(end_ms) > now_ms then", "granted then"),
            ),
            Proof(
                Mutant("share_inspect", "'(%.0f', now_ms)", "'(%.0f', 0)"),
                f"{_READ}holder_whose_time_is_over_is_not_shown",
            ),
            _shared_compared("or tonumber(end_ms) <= now_ms"),
        ),
    ),
    Rule(
        "5 a release removes one holder",
        "The others stay, whether the one released, expired or crashed.",
        (
            *_shared(
                "release_removes_one",
                (
                    "share_release",
                    "removed = redis.call('ZREM', KEYS[1], token)",
                    "removed = redis.call('DEL', KEYS[1])",
                ),
                (
                    "share_release",
                    "~= 'r' then\n  redis.call('ZREM', KEYS[1], token)",
                    "~= 'r' then\n  redis.call('DEL', KEYS[1])",
                ),
            ),
            Proof(
                Mutant(
                    "share_release",
                    "removed = redis.call('ZREM', KEYS[1], token)",
                    "removed = redis.call('DEL', KEYS[1])",
                ),
                f"{_READ}reader_whose_time_ran_out_cannot_extend_and_takes_nothing_away",
            ),
        ),
    ),
    Rule(
        "5 a shared grant asked for again",
        "A poll of who is inside finds the same grant, though others wait.",
        _shared(
            "grant_asked_for_again_is_the_same",
            ("share_acquire", "if end_ms and granted and tonumber(end_ms) > now_ms", "if false"),
        ),
    ),
    Rule(
        "5 an extension is of one grant",
        "An extension keeps only that holder alive, by that grant, and makes none.",
        (
            *_shared(
                "extension_is_of_that_grant",
                ("share_extend", "or tonumber(granted) ~= tonumber(ARGV[3])", ""),
                (
                    "share_extend",
                    "or not granted or tonumber(granted)",
                    "or tonumber(granted or 0)",
                ),
            ),
            Proof(
                Line(RedisStore, "extend", "if acquisition.is_shared:", "if False:"),
                f"{_READ}reader_is_extended_by_its_watchdog",
                "LeaseLostError",
            ),
        ),
    ),
    Rule(
        "5 no holder's life is shortened",
        "Neither by its own extension or poll, nor by a holder with a shorter ttl.",
        _shared(
            "lives_are_never_shortened",
            ("share_acquire", "redis.call('PTTL', key) < longest_ms", "true"),
            ("share_extend", "if left < ttl_ms then", "if true then"),
            ("share_acquire", "  if left < ttl_ms then", "  if true then"),
        ),
    ),
    Rule(
        "5 the keys outlive their holders",
        "The lock and its grants live as long as the holder who lives longest.",
        (
            *_shared(
                "lives_grow_with_the_longest",
                ("share_acquire", "redis.call('PTTL', key) < longest_ms", "false"),
            ),
            _shared_compared("for _, key in ipairs(KEYS) do"),
        ),
    ),
    Rule(
        "5 who is let in lives as its liveness",
        "Who enters without asking holds no longer than it is known to live.",
        (
            *_shared(
                "grant_lives_as_long_as_its_waiter",
                ("share_release", "enter(head, until_ms - now_ms)", "enter(head, 6000)"),
            ),
            _shared_compared("enter(head, until_ms - now_ms)"),
        ),
    ),
    Rule(
        "5 the dead keep nobody out",
        "A waiter whose liveness has passed is dropped by any poll or release.",
        _shared(
            "dead_head_keeps_nobody_out",
            ("share_release", "(until_ms <= now_ms or redis", "(false or redis"),
            ("share_acquire", "(until_ms <= now_ms or redis", "(false or redis"),
        ),
    ),
    Rule(
        "5 a holder in the queue",
        "Who holds and is queued, as after a failover, is not granted it again for a shorter time.",
        _shared(
            "holder_that_is_queued_is_not_granted_again",
            ("share_release", " or redis.call('ZSCORE', KEYS[1], head)", ""),
            ("share_acquire", " or redis.call('ZSCORE', KEYS[1], head)", ""),
        ),
    ),
    Rule(
        "6 numbers of several holders grow",
        "Of grants that are made at once, too, each has a larger token than the one before.",
        _shared(
            "fencing_tokens_grow",
            ("share_release", "math.max(last + 1, now_us)", "math.max(last, now_us)"),
            ("share_acquire", "if last >= fencing_token then", "if false then"),
        ),
    ),
    Rule(
        "3 downgrade",
        "Readers enter beside a writer that has downgraded, until it leaves; only a holder can.",
        (
            *_shared(
                "downgrade_marks_until_release",
                ("share_acquire", "or redis.call('ZSCORE', KEYS[5], '+' .. member)", ""),
                (
                    "share_release",
                    "token, '+' .. token)\n  return {removed}",
                    "token)\n  return {removed}",
                ),
            ),
            *_shared(
                "downgrade_of_no_holder_makes_none",
                ("share_release", "granted and was_ours == 1 and", "was_ours == 1 and"),
                ("share_release", "was_ours == 1 and tonumber(end_ms) > now_ms", "was_ours == 1"),
            ),
            Proof(
                Line(Lease, "downgrade", "if not_ours is not None:", "if False:"),
                f"{_READ}downgrade_of_a_lease_that_is_gone_raises_its_loss",
            ),
            Proof(
                Line(
                    Lease,
                    "downgrade",
                    '_names.access_of(self.owner_token) != "writing"',
                    "False",
                ),
                f"{_READ}downgrade_of_what_is_no_writers_lease_is_refused",
            ),
            Proof(
                Line(RedisStore, "downgrade", "insists=True", "insists=False"),
                f"{_READ}downgrade_whose_reply_is_lost_is_asked_for_again",
                "ServerUnreachable",
            ),
        ),
    ),
    Rule(
        "5 a sharer's tombstone",
        "An acquire of a reader, writer or permit that comes after its release is refused.",
        (
            Proof(
                Mutant("share_acquire", "  return {-1}\n", ""),
                f"{_READ}late_copy_of_a_readers_acquire_is_refused_by_its_tombstone",
            ),
            Proof(
                Mutant("share_release", "if ARGV[2] == '1' then", "if false then"),
                f"{_READ}late_copy_of_a_readers_acquire_is_refused_by_its_tombstone",
            ),
        ),
    ),
    Rule(
        "5 a sharer's stray hand-off",
        "Who is let in and is gone is given back by its client, by the kind that its token tells.",
        (
            Proof(
                Line(RedisStore, "_hand_over", "is_shared=is_shared", "is_shared=False"),
                f"{_READ}hand_off_to_a_reader_that_is_gone_is_given_back",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "5 refused messages of several holders",
        "A refused channel undoes no hand-off, and a side key of a wrong type no release.",
        (
            _shared_compared("redis.pcall('PUBLISH'"),
            _shared_compared("if was_ours == 0 or ARGV[2] == 'r' then"),
        ),
    ),
    Rule(
        "5 what was evicted of several holders",
        "Where the grants are gone there is no holder; where the lock is gone, no grant.",
        (
            _shared_compared("if end_ms and not granted then"),
            *_shared(
                "evicted_lock_leaves_no_grant",
                *(
                    (script, "redis.call('DEL', KEYS[5])  -- What", "-- What")
                    for script in ("share_acquire", "share_release")
                ),
            ),
        ),
    ),
    Rule(
        "3 one name, one kind",
        "Who asks for a name that is held or waited for in another way is refused.",
        (
            Proof(
                Mutant("share_acquire", "if most == 0 then", "if false then"),
                f"{_READ}name_of_another_kind_is_refused_and_left_as_it_is",
                "LockTimeout",
            ),
            Proof(
                Mutant(
                    "share_acquire",
                    "if first and not own_text and limit_of(first) == 0",
                    "if false",
                ),
                f"{_READ}waiter_of_another_kind_on_a_free_name_is_not_overtaken",
                "LockTimeout",
            ),
            Proof(
                Mutant("acquire", "if string.match(head, ':", "if false and string.match(head, ':"),
                f"{_READ}lock_on_a_free_name_for_which_a_sharer_waits_is_refused[reader]",
                "LockTimeout",
            ),
            _compared("a refused one keeps its liveness"),
            Proof(
                Mutant(
                    "release",
                    "until_ms > now_ms and string.match(head",
                    "false and string.match(head",
                ),
                f"{_READ}lock_on_a_free_name_for_which_a_sharer_waits_is_refused[writer]",
                "ResponseError",
            ),
        ),
    ),
    Rule(
        "3 no wait for one's own share",
        "A task that would wait for what it holds itself is told what to do, and only such a task.",
        (
            Proof(
                Line(Session, "_refusal", "if tail:", "if False:"),
                f"{_OF_KINDS}099_reader_or_writer_that_would_wait_for_its_task_is_told_so[upgrade]",
            ),
            Proof(
                Line(
                    _self_wait,
                    "_lasts_while_it_waits",
                    "lease.body_task is task is not None and",
                    "",
                ),
                f"{_READ}writer_that_waits_for_a_reader_in_another_task_is_not_refused",
                "RuntimeError",
            ),
            Proof(
                Line(
                    _self_wait,
                    "check_leaves_room",
                    "lease.name == name and ",
                    "",
                ),
                f"{_READ}task_that_reads_one_name_may_wait_to_write_another",
                "RuntimeError",
            ),
            Proof(
                Line(
                    _self_wait,
                    "check_leaves_room",
                    " or len(own) < min(map(_names.limit_of, tokens))",
                    "",
                ),
                f"{_PERMIT}task_with_every_permit_that_asks_for_one_more_is_refused",
                "RuntimeError",
            ),
            Proof(
                Line(Tries, "run", "not self._is_one_try", "False"),
                f"{_READ}readers_and_writers_on_a_quorum_exclude_each_other[True]",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "3 no thief among sharers",
        "A holder who is gone was deleted: others who hold are no sign that it was stolen.",
        (
            Proof(
                Line(
                    ShareRelease,
                    "answer",
                    "Released(reply[0] == 1, None,",
                    "Released(reply[0] == 1, 'another/1',",
                ),
                f"{_READ}reader_that_is_gone_beside_another_was_deleted_and_not_robbed",
            ),
        ),
    ),
    Rule(
        "3 an operator breaks one grant",
        "With a fencing token only that holder is removed, without one all of them.",
        (
            Proof(
                Line(
                    Shared,
                    "break_lock",
                    "if fencing_token in (None, holding.fencing_token)",
                    "",
                ),
                f"{_READ}break_lock_breaks_one_grant_or_all",
            ),
        ),
    ),
    Rule(
        "3 permits are a number",
        "A number of permits that there cannot be is refused at construction.",
        (
            Proof(
                Line(_semaphore, "checked_permits", "1 <= permits <=", "0 <= permits <="),
                f"{_PERMIT}permits_that_are_no_number_of_permits_are_refused[0-ValueError]",
            ),
            Proof(
                Line(_semaphore, "checked_permits", " or isinstance(permits, bool)", ""),
                f"{_PERMIT}permits_that_are_no_number_of_permits_are_refused[True-TypeError]",
            ),
            Proof(
                Line(LockClient, "_like", "if unknown:", "if False:"),
                f"{_READ}options_of_reader_and_writer_are_those_of_a_lock",
            ),
        ),
    ),
    Rule(
        "9 no semaphore over a quorum",
        "It would let in more than its permits, and is refused.",
        (
            Proof(
                Line(LockClient, "semaphore", "if len(self._servers) > 1:", "if False:"),
                f"{_PERMIT}semaphore_over_a_quorum_is_refused_with_the_reason",
            ),
        ),
    ),
    Rule(
        "9 second round of a writer",
        "A majority knows the number of a reader or writer before the body begins.",
        (
            Proof(
                Mutant("share_confirm", "redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)", ""),
                f"{_SHARED_NODES}writers_numbers_grow_over_grants_of_every_two_majorities",
            ),
            Proof(
                Mutant("share_confirm", "redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])", ""),
                f"{_SHARED_NODES}writers_number_stands_on_every_node_a_moment_later",
                "TimeoutError",
            ),
        ),
    ),
    Rule(
        "9 downgrade on a majority",
        "Readers enter when a node of each majority knows that the writer only reads.",
        (
            Proof(
                Line(QuorumStore, "downgrade", "part.acquisition.reads_only = True", "pass"),
                f"{_SHARED_NODES}writer_that_reads_is_healed_as_a_reader",
                "TimeoutError",
            ),
            Proof(
                Mutant("share_confirm", "if ARGV[4] == '1' then", "if false then"),
                f"{_SHARED_NODES}writer_that_reads_is_healed_as_a_reader",
                "TimeoutError",
            ),
            Proof(
                Line(
                    QuorumStore,
                    "downgrade",
                    "await _insist(partial(self._confirm, ballot, 0), within)",
                    "0.0",
                ),
                f"{_SHARED_NODES}downgrade_without_a_majority_raises_and_can_be_repeated",
            ),
        ),
    ),
    Rule(
        "9 who is shown holds on a majority",
        "With the time after which no majority has it, and the largest number that a node gave it.",
        (
            Proof(
                Line(_shares, "agreed", "len(theirs) >= majority", "theirs"),
                f"{_SHARED_NODES}holder_on_a_minority_is_not_shown",
                "IndexError",
            ),
            Proof(
                Line(_shares, "_agreed", "lefts[majority - 1]", "lefts[0]"),
                f"{_SHARED_NODES}holder_is_shown_with_the_time_after_which_no_majority_has_it",
            ),
            Proof(
                Line(_shares, "_agreed", "max(theirs, key=", "min(theirs, key="),
                f"{_SHARED_NODES}holder_is_shown_with_the_largest_number_that_a_node_gave_it",
            ),
            Proof(
                Line(_shares, "_agreed", "any(holding", "all(holding"),
                f"{_SHARED_NODES}writer_is_shown_as_reading_where_one_node_knows_of_it",
            ),
            Proof(
                Line(QuorumStore, "_inspect_shared", "not round_.tally.has_answers", "False"),
                f"{_READ}readers_and_writers_on_a_quorum_exclude_each_other[True]",
            ),
        ),
    ),
    Rule(
        "9 a holder gone from a node",
        "What is left of a holder's grant on a node that has lost it goes too.",
        (
            _shared_compared("redis.call('ZREM', KEYS[3], ARGV[1], '+' .. ARGV[1])"),
            _shared_compared("or not granted then"),
        ),
    ),
)

RULES: Final = (
    *_SCRIPTS,
    *_WAITING,
    *_DEADLINES,
    _UNDELIVERED,
    *_CANCELLATION,
    *_CONNECTION,
    *_QUORUM,
    *_FENCING,
    *_MORE_THAN_A_MUTEX,
    *_SEVERAL_HOLDERS,
)
PROOFS: Final = [proof for rule in RULES for proof in rule.proofs if isinstance(proof, Proof)]


def table() -> str:
    """The register as a table of Markdown: each rule, where it is put out, and what notices."""
    lines = ["| Rule | Put out in | Noticed by |", "|---|---|---|"]
    for rule in RULES:
        section, _, _ = rule.id.partition(" ")
        text = f"{rule.sentence} (§{section})"
        for proof in rule.proofs:
            lines.append(f"| {text} | {_place(proof)} | {_noticed_by(proof)} |")
            text = ""
    return "\n".join([*lines, "", f"{len(RULES)} rules, {len(lines) - 2} faults."])


def _place(proof: Proof | Elsewhere) -> str:
    if isinstance(proof, Elsewhere):
        entry = f": {proof.entry}" if proof.entry else ""
        return f"`{proof.table}`{entry}".replace("|", "\\|")
    return ", ".join(_places(proof.fault))


def _places(fault: Fault) -> list[str]:
    if isinstance(fault, Both):
        return [*_places(fault.first), *_places(fault.second)]
    return [f"`{fault.script}.lua`" if isinstance(fault, Mutant) else f"`{fault.place}`"]


def _noticed_by(proof: Proof | Elsewhere) -> str:
    if isinstance(proof, Elsewhere):
        return f"`{proof.module.removeprefix('tests.')}`"
    return f"`{proof.check.partition('::')[2].partition('[')[0]}`"


if __name__ == "__main__":
    print(table())
