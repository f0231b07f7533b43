"""The public contract: names, signatures, refused arguments, and what each call answers."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import dataclasses
import functools
import gc
import inspect
import math
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

import aiodlock
from aiodlock import (
    AllLeases,
    Backoff,
    Election,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockError,
    LockInfo,
    LockTimeout,
    LostReason,
    NameTakenError,
    NotAllowedError,
    ServerUnreachable,
    Term,
)
from aiodlock._lock import LockOptions
from aiodlock.testing import LockServer, memory_client
from tests.conftest import MakeClient
from tests.keys import leftovers
from tests.proxy import ChaosProxy
from tests.until import until

KEY = "aiodlock:{n}"
# What a busy machine may add to any bound that a test measures.
SLACK_S = 1.0


# Names and signatures.


def shape(function: Callable[..., object]) -> str:
    """The signature without annotations; an inherited default shows as `Ellipsis`."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=... if isinstance(parameter.default, Enum) else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


LOCK_OPTIONS = (
    "ttl=None, wait_timeout=Ellipsis, auto_extend=True, retry=None, on_lost='cancel', max_hold=None"
)
ELECTION_OPTIONS = "ttl=None, wait_timeout=Ellipsis, retry=None, on_lost='cancel', max_hold=None"
OPTIONS = (
    "prefix='aiodlock:', ttl=30.0, wait_timeout=None, request_timeout=2.0, label=None, "
    "observer=None"
)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (LockClient, f"(redis, *, {OPTIONS})"),
        (LockClient.from_url, f"(url, *, {OPTIONS})"),
        (
            LockClient.lock,
            f"(self, name, *, {LOCK_OPTIONS}, reentrant=False, hold_at_least=None)",
        ),
        (LockClient.all, f"(self, *names, {LOCK_OPTIONS})"),
        (LockClient.election, f"(self, name, *, {ELECTION_OPTIONS})"),
        (AllLeases.check, "(self, min_left=0.0)"),
        (AllLeases.extend, "(self, ttl=None)"),
        (AllLeases.wait_lost, "(self)"),
        (Election.leader, "(self)"),
        (Term.check, "(self, min_left=0.0)"),
        (Term.wait_ended, "(self)"),
        (LockClient.aclose, "(self)"),
        (Lock.acquire, "(self, *, wait_timeout=Ellipsis)"),
        (Lock.try_acquire, "(self, *, wait_timeout=0.0)"),
        (Lock.inspect, "(self)"),
        (Lock.break_lock, "(self, *, fencing_token=None)"),
        (Lease.check, "(self, min_left=0.0)"),
        (Lease.extend, "(self, ttl=None)"),
        (Lease.release, "(self)"),
        (Lease.wait_lost, "(self)"),
        (Backoff, "(initial=0.05, factor=2.0, maximum=1.0, jitter=0.5)"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_signature_of_each_call_is_the_designs(
    function: Callable[..., object], expected: str
) -> None:
    """Names, order, keyword-only marks and defaults are a promise to users."""
    assert shape(function) == expected


def test_locked_takes_a_template_and_the_options_of_lock() -> None:
    """The decorator refuses what `lock` does not know, and takes all that it knows."""
    locks = LockClient.from_url("memory://")
    with pytest.raises(TypeError, match="unknown"):
        locks.locked("n", unknown=1)  # type: ignore[call-arg]
    options = inspect.signature(LockClient.lock).parameters.keys() - {"self", "name"}
    assert options == LockOptions.__optional_keys__
    decorate = locks.locked(
        "n",
        ttl=1,
        wait_timeout=1,
        auto_extend=True,
        retry=None,
        on_lost="raise",
        max_hold=2,
        reentrant=True,
        hold_at_least=1,
    )
    assert callable(decorate)


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (LockClient.aclose, True),
        (LockClient.lock, False),
        (LockClient.locked, False),
        (LockClient.all, False),
        (LockClient.election, False),
        (AllLeases.check, False),
        (AllLeases.extend, True),
        (AllLeases.wait_lost, True),
        (Election.leader, True),
        (Term.check, False),
        (Term.wait_ended, True),
        (Lock.acquire, False),
        (Lock.try_acquire, True),
        (Lock.inspect, True),
        (Lock.break_lock, True),
        (Lease.check, False),
        (Lease.extend, True),
        (Lease.release, True),
        (Lease.wait_lost, True),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_call_that_talks_to_a_server_is_async_and_no_other(
    function: Callable[..., object], is_async: bool
) -> None:
    """What is not async does no I/O; `acquire` returns what can be awaited or entered."""
    assert inspect.iscoroutinefunction(function) is is_async


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((Lock, name) for name in ("name", "ttl")),
        *(
            (Lease, name)
            for name in (
                *("name", "ttl", "holder", "owner_token", "fencing_token"),
                *("state", "remaining", "is_held"),
            )
        ),
    ],
)
def test_attribute_of_lock_and_lease_is_read_only(cls: type, name: str) -> None:
    """They tell; nobody sets them."""
    attribute = inspect.getattr_static(cls, name)
    assert isinstance(attribute, property)
    assert attribute.fset is None


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (LockError, (Exception,)),
        (LockTimeout, (LockError, TimeoutError)),
        (ServerUnreachable, (LockError, ConnectionError)),
        (NotAllowedError, (LockError,)),
        (NameTakenError, (LockError,)),
        (LeaseLostError, (LockError,)),
    ],
)
def test_error_has_the_bases_of_the_design(
    error: type[Exception], bases: tuple[type[Exception], ...]
) -> None:
    """`except TimeoutError` and `except ConnectionError` catch what a user thinks they do."""
    assert error.__bases__ == bases
    assert getattr(aiodlock, error.__name__) is error


def test_lost_reasons_are_the_eight_of_the_design() -> None:
    """Users match on them."""
    assert [reason.name for reason in LostReason] == [
        *("EXPIRED", "STOLEN", "DELETED", "UNREACHABLE", "LOOP_STALLED"),
        *("MAX_HOLD", "CLOSED", "TOO_LITTLE_TIME"),
    ]


def test_lock_info_has_the_fields_of_the_design() -> None:
    """In this order, for those who unpack it."""
    assert LockInfo._fields == ("held", "holder", "ttl_left", "fencing_token", "waiters")


def test_backoff_is_a_value() -> None:
    """Equal by its numbers, and frozen."""
    assert Backoff() == Backoff(initial=0.05, factor=2, maximum=1.0, jitter=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Backoff().initial = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "error",
    [
        LockTimeout("held", name="n", holder="h", ttl_left=1.5, waiters=2),
        ServerUnreachable("gone", name="n"),
        NotAllowedError("no", name="n"),
        NameTakenError("taken", name="n"),
        LeaseLostError(name="n", fencing_token=7, reason=LostReason.STOLEN),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_that_crosses_a_process_border_keeps_what_it_says(error: LockError) -> None:
    """Process pools and task queues pickle exceptions; one that cannot be is worse than lost."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


# Bad input.


def client(**options: Any) -> LockClient:
    """A client whose options are looked at."""
    return LockClient.from_url("memory://", **options)


def lock(name: object = "n", **options: Any) -> Lock:
    """A lock whose options are looked at."""
    return client().lock(name, **options)  # type: ignore[arg-type]


def templated(template: object) -> object:
    """A function of one argument, decorated with *template*."""

    async def settle(order: object) -> None: ...

    return client().locked(template)(settle)  # type: ignore[arg-type]


def decorated(function: Any) -> object:
    """*function* under a lock."""
    return client().locked("n")(function)


NOT_NUMBERS: tuple[object, ...] = (True, "5", Decimal(5), timedelta(seconds=5), 1j, [1])
Refused = tuple[str, Callable[[], object], type[Exception], str]


def refusals(
    what: str,
    construct: Callable[[Any], object],
    values: tuple[object, ...],
    error: type[Exception],
    says: str,
) -> list[Refused]:
    """One row for each of *values*: each is refused by *error* whose message matches *says*."""
    return [
        (f"{what}={value!r:.40}", functools.partial(construct, value), error, says)
        for value in values
    ]


NAME = r"non-empty str of at most 512 UTF-8 bytes"
TTL = r"ttl must be .*real number.* at least 0\.01"
WAIT = r"wait_timeout.*real number.* at least 0"
HOLD = r"max_hold.*at least"
PREFIX = r"prefix must be a str of at most 128 UTF-8 bytes without \{ and \}"
LABEL = r"label must be a str of 1 to 64 characters"
REQUEST = r"request_timeout must be .*real number"
HUGE = 10**400  # an int that no float can hold

REFUSED: list[Refused] = [
    *refusals("name", lock, (None, b"x", 5, ["x"]), TypeError, NAME),
    *refusals("name", lock, ("", "x" * 513, "é" * 257, "\ud800"), ValueError, NAME),
    *refusals("ttl", lambda v: lock(ttl=v), NOT_NUMBERS, TypeError, TTL),
    *refusals("client ttl", lambda v: client(ttl=v), (None, *NOT_NUMBERS), TypeError, TTL),
    *refusals(
        *("ttl", lambda v: lock(ttl=v)),
        (0, 0.0, -1, 0.0001, 0.0099, math.nan, math.inf, -math.inf, HUGE),
        *(ValueError, TTL),
    ),
    *refusals("client ttl", lambda v: client(ttl=v), (0, math.nan, math.inf), ValueError, TTL),
    *refusals("wait_timeout", lambda v: lock(wait_timeout=v), NOT_NUMBERS, TypeError, WAIT),
    *refusals(
        *("wait_timeout", lambda v: lock(wait_timeout=v)),
        (-0.1, -math.inf, math.nan),
        *(ValueError, WAIT),
    ),
    *refusals("client wait_timeout", lambda v: client(wait_timeout=v), (-1,), ValueError, WAIT),
    *refusals("client wait_timeout", lambda v: client(wait_timeout=v), ("1",), TypeError, WAIT),
    *refusals("acquire", lambda v: lock().acquire(wait_timeout=v), (-1,), ValueError, WAIT),
    *refusals("acquire", lambda v: lock().acquire(wait_timeout=v), ("1",), TypeError, WAIT),
    *refusals("max_hold", lambda v: lock(ttl=5, max_hold=v), NOT_NUMBERS, TypeError, HOLD),
    *refusals(
        "max_hold", lambda v: lock(ttl=5, max_hold=v), (4.9, 0, -1, math.nan), ValueError, HOLD
    ),
    *refusals("max_hold", lambda v: lock(max_hold=v), (29,), ValueError, HOLD),
    *refusals(
        "on_lost", lambda v: lock(on_lost=v), ("ignore", "", "CANCEL"), ValueError, "on_lost.*raise"
    ),
    *refusals("prefix", lambda v: client(prefix=v), (None, b"x:", 5), TypeError, PREFIX),
    *refusals(
        *("prefix", lambda v: client(prefix=v)),
        ("a{b", "}", "x" * 129, "é" * 65, "\udc80"),
        *(ValueError, PREFIX),
    ),
    *refusals("label", lambda v: client(label=v), (b"x", 5, True), TypeError, LABEL),
    *refusals(
        *("label", lambda v: client(label=v)),
        ("", "a b", "x" * 65, "ä", "a:b", "a/b", "a\n"),
        *(ValueError, LABEL),
    ),
    *refusals(
        "request_timeout",
        lambda v: client(request_timeout=v),
        (None, *NOT_NUMBERS),
        *(TypeError, REQUEST),
    ),
    *refusals(
        *("request_timeout", lambda v: client(request_timeout=v)),
        (0, -1, math.nan),
        *(ValueError, REQUEST),
    ),
    *refusals(
        *("retry", lambda v: lock(retry=v)), (True, 0.5, "x", Backoff), *(TypeError, "Backoff")
    ),
    *refusals(
        "auto_extend",
        lambda v: lock(auto_extend=v),
        (1, 0, None, "yes"),
        TypeError,
        "True or False",
    ),
    *refusals("initial", lambda v: Backoff(initial=v), (None, *NOT_NUMBERS), TypeError, "initial"),
    *refusals(
        *("initial", lambda v: Backoff(initial=v, maximum=9)),
        (0, -1, math.nan, HUGE),
        *(ValueError, "initial"),
    ),
    *refusals("factor", lambda v: Backoff(factor=v), ("2", None), TypeError, "factor"),
    *refusals(
        "factor",
        lambda v: Backoff(factor=v),
        (0.99, 0, -2, math.nan),
        ValueError,
        "at least 1|finite",
    ),
    *refusals("maximum", lambda v: Backoff(maximum=v), ("2", None), TypeError, "maximum"),
    *refusals(
        *("maximum", lambda v: Backoff(initial=2, maximum=v)),
        (1.9, 0, math.nan),
        *(ValueError, "at least initial|finite"),
    ),
    *refusals("jitter", lambda v: Backoff(jitter=v), ("0", None, True), TypeError, "jitter"),
    *refusals(
        "jitter", lambda v: Backoff(jitter=v), (-0.1, 1.1, math.nan), ValueError, "0 to 1|finite"
    ),
    *refusals("template", templated, (b"x", 5, None), TypeError, "template"),
    *refusals(
        "template",
        templated,
        *(
            ("{missing}", "a:{order}:{missing.id}", "{}", "{0}", "{order[0]}", "{order.}"),
            *(ValueError, r"parameters \(order\)"),
        ),
    ),
    *refusals("template", templated, ("{order:{width}}",), ValueError, r"parameters \(order\)"),
    *refusals("template", templated, ("{", "a}", "{order"), ValueError, "template|field"),
    *refusals("template", templated, ("", "x" * 513), ValueError, NAME),
    *refusals(
        "function", decorated, (lambda: None, 5, len, Backoff), TypeError, "takes async functions"
    ),
    *refusals("url", LockClient.from_url, ("http://localhost", ""), ValueError, "redis://"),
    *refusals("url", LockClient.from_url, (None, 5, b"redis://x"), TypeError, "url"),
    *refusals(
        "redis", LockClient, (None, "redis://localhost"), TypeError, r"redis\.asyncio\.Redis"
    ),
    *refusals("redis", LockClient, (BlockingRedis(),), TypeError, r"redis\.asyncio\.Redis"),
    *refusals("redis", LockClient, (Redis(max_connections=1),), ValueError, "at least 2"),
]


@pytest.mark.parametrize(
    ("construct", "error", "says"), [pytest.param(*row[1:], id=row[0]) for row in REFUSED]
)
def test_bad_input_is_refused_at_construction_with_what_is_allowed(
    construct: Callable[[], object], error: type[Exception], says: str
) -> None:
    """Nothing runs on a wrong option: the error comes where the mistake was made."""
    with pytest.raises(error, match=says) as refused:
        construct()
    # OverflowError and UnicodeError are cousins of ValueError that say nothing of what is allowed.
    assert type(refused.value) is error


@pytest.mark.parametrize(
    "construct",
    [
        lambda: lock("x" * 512),
        lambda: lock("é" * 256),
        lambda: lock(ttl=0.01),
        lambda: lock(ttl=Fraction(1, 3)),
        lambda: lock(ttl=1e12),
        lambda: lock(ttl=5, max_hold=5),
        lambda: lock(wait_timeout=0),
        lambda: lock(wait_timeout=None),
        lambda: client(prefix=""),
        lambda: client(prefix="é" * 64),
        lambda: client(label="A-z_0.9" + "x" * 57),
        lambda: Backoff(initial=1, factor=1, maximum=1, jitter=0),
        lambda: Backoff(jitter=1),
        lambda: templated("{order}"),
        lambda: templated("{order.id}:{{literal}}:{order!r:>10}"),
    ],
)
def test_input_at_the_very_limit_is_taken(construct: Callable[[], object]) -> None:
    """The limits are inclusive where the design says "at most" and "at least"."""
    assert construct() is not None


async def test_lease_calls_with_bad_input_are_refused(locks: LockClient) -> None:
    """`extend`, `check` and `try_acquire` check as construction does, before any I/O."""
    async with locks.lock("n") as lease:
        for ttl in (0, -1, math.nan, math.inf):
            with pytest.raises(ValueError, match=TTL):
                await lease.extend(ttl)
        with pytest.raises(TypeError, match=TTL):
            await lease.extend("5")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="min_left"):
            lease.check(-1)
        with pytest.raises(TypeError, match="min_left"):
            lease.check("1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=WAIT):
            await locks.lock("n").try_acquire(wait_timeout=-1)
        assert lease.state == "held"


async def test_max_hold_beyond_all_bounds_does_not_break_the_watchdog(locks: LockClient) -> None:
    """A number that is allowed works, however large: the arithmetic on it does not overflow."""
    for max_hold in (1e307, math.inf):
        async with locks.lock("n", ttl=0.2, max_hold=max_hold) as lease:
            assert await lease.extend() > 0
            await asyncio.sleep(0.3)
            lease.check()


# Names.

ODD_NAMES = [
    *("a b", "{", "}", "%", "%7B", "%7b", "{x}", "x}", "{}", "%25", "ключ", "🔒", "e\u0301", "é"),
    *("\n", "\r\n", "\0", "*", "[a-z]?", "a/b:1", "'", '"', "\\", "$5", "n:fence", "n:queue", " "),
    *("x" * 512, "é" * 256, "!", "inbox:x", "-1"),
]


async def test_name_of_any_characters_is_a_lock_of_its_own(
    make_client: MakeClient, redis: Redis
) -> None:
    """All of them held at once by one client, refused to another, shown, handed on and freed."""
    ours, others = make_client(), make_client()
    async with contextlib.AsyncExitStack() as held:
        for name in ODD_NAMES:
            lease = await held.enter_async_context(ours.lock(name).acquire(wait_timeout=0))
            assert lease.name == name
        for name in ODD_NAMES:
            assert await others.lock(name).try_acquire() is None
            info = await others.lock(name).inspect()
            assert (info.held, info.waiters) == (True, 0)
        waiting = [asyncio.create_task(others.lock(n).acquire(wait_timeout=5)) for n in ODD_NAMES]
        await until(lambda: _all_wait(ours, len(ODD_NAMES)))
    for lease in await asyncio.gather(*waiting):
        assert await lease.release() is True
    assert await leftovers(redis) == []


async def _all_wait(locks: LockClient, count: int) -> bool:
    infos = [await locks.lock(name).inspect() for name in ODD_NAMES]
    return sum(info.waiters for info in infos) == count


@pytest.mark.parametrize("prefix", ["", "a*b:", "ключ:", "%7B"])
async def test_client_with_any_prefix_keeps_to_it(
    make_client: MakeClient, redis: Redis, prefix: str
) -> None:
    """Every key begins with the prefix, and hand-offs reach another client that has it too."""
    ours, others = make_client(prefix=prefix), make_client(prefix=prefix)
    async with ours.lock("n") as lease:
        waiting = asyncio.create_task(others.lock("n").acquire(wait_timeout=5))
        await until(lambda: _waiters(ours, 1))
        keys = [str(key) async for key in redis.scan_iter()]
        assert keys
        assert [key for key in keys if not key.startswith(prefix + "{n}")] == []
    async with await waiting as second:
        assert second.fencing_token > lease.fencing_token


async def _waiters(locks: LockClient, count: int, name: str = "n") -> bool:
    return (await locks.lock(name).inspect()).waiters == count


# Acquiring.


@pytest.mark.parametrize("wait_timeout", [0, 0.05])
async def test_try_acquire_on_a_held_lock_gives_none(
    make_client: MakeClient, redis: Redis, wait_timeout: float
) -> None:
    """None, neither an exception nor a wait beyond what was asked; nothing is left of it."""
    async with make_client().lock("n") as lease:
        began = time.monotonic()
        assert await make_client().lock("n").try_acquire(wait_timeout=wait_timeout) is None
        assert time.monotonic() - began >= wait_timeout
        lease.check()
    await until(lambda: _is_clean(redis))


async def _is_clean(redis: Redis) -> bool:
    return await leftovers(redis) == []


async def test_try_acquire_on_a_free_lock_gives_a_lease(locks: LockClient, redis: Redis) -> None:
    """A true value, not entered yet; one request; gone after its block."""
    lease = await locks.lock("n").try_acquire()
    assert lease
    async with lease as entered:
        assert entered is lease
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    assert await leftovers(redis) == []


async def test_try_acquire_on_a_free_lock_that_others_wait_for_gives_none(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """It does not jump the queue, but helps: the waiter at the head has the lock then."""
    holder, others = make_client(), make_client()
    # No messages, so that the waiter sleeps on although the key was deleted.
    waiter = make_client(proxy.url)
    held = await holder.lock("n").acquire()
    waiting = asyncio.create_task(waiter.lock("n").acquire(wait_timeout=10))
    await until(lambda: _waiters(others, 1))
    await until(lambda: proxy.requests["SUBSCRIBE"])
    await redis.delete(KEY)
    proxy.black_hole()
    assert await others.lock("n").try_acquire() is None
    info = await others.lock("n").inspect()
    assert (info.held, info.waiters) == (True, 0)
    proxy.heal()
    async with await waiting as lease:
        assert info.fencing_token == lease.fencing_token
    assert await held.release() is False


async def test_acquire_not_in_time_tells_who_holds(make_client: MakeClient) -> None:
    """`LockTimeout` carries what the last answer said: holder, time left, waiters."""
    async with make_client(label="web-1").lock("n", ttl=20) as lease:
        waiting = [
            asyncio.create_task(make_client().lock("n").acquire(wait_timeout=30)) for _ in range(2)
        ]
        locks = make_client()
        await until(lambda: _waiters(locks, 2))
        with pytest.raises(LockTimeout, match=r"'n'.*web-1") as refused:
            await locks.lock("n").acquire(wait_timeout=0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        error = refused.value
        assert (error.name, error.waiters) == ("n", 2)
        assert error.holder == lease.holder
        assert error.ttl_left is not None
        assert 10 < error.ttl_left <= 20
        assert lease.owner_token not in str(error)


@pytest.mark.parametrize("where", ["client", "lock", "acquire"])
async def test_wait_timeout_given_nearest_wins(make_client: MakeClient, where: str) -> None:
    """The call's before the lock's before the client's; never given up early."""
    short, long = 0.1, 300.0
    given = {"client": long, "lock": long, "acquire": long}
    order = ["client", "lock", "acquire"]
    for outer in order[order.index(where) + 1 :]:
        del given[outer]
    given[where] = short
    async with make_client().lock("n"):
        locks = make_client(wait_timeout=given["client"])
        options: dict[str, Any] = {"wait_timeout": given["lock"]} if "lock" in given else {}
        call = {"wait_timeout": given["acquire"]} if "acquire" in given else {}
        began = time.monotonic()
        with pytest.raises(LockTimeout):
            await locks.lock("n", **options).acquire(**call)
        assert short <= time.monotonic() - began < short + 0.1 + SLACK_S


async def test_wait_timeout_of_none_at_the_lock_overrides_the_clients(
    make_client: MakeClient,
) -> None:
    """None means for ever, not "as the client says"."""
    holder = make_client()
    locks = make_client(wait_timeout=0.05)
    lease = await holder.lock("n").acquire()
    waiting = asyncio.create_task(locks.lock("n", wait_timeout=None).acquire())
    done, _ = await asyncio.wait({waiting}, timeout=0.4)
    assert not done
    await lease.release()
    await (await waiting).release()


async def test_acquire_gives_a_coroutine_by_the_abc(locks: LockClient) -> None:
    """What asyncio takes as a coroutine; closing it unused is no error and sends nothing."""
    acquiring = locks.lock("n").acquire()
    assert isinstance(acquiring, collections.abc.Coroutine)
    assert inspect.isawaitable(acquiring)
    acquiring.close()
    assert (await locks.lock("n").inspect()).held is False


async def by_create_task(lock: Lock) -> Lease:
    """In a task of its own."""
    return await asyncio.create_task(lock.acquire())


async def by_task_group(lock: Lock) -> Lease:
    """In a group."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(lock.acquire())
    return task.result()


async def by_gather(lock: Lock) -> Lease:
    """With others."""
    [lease] = await asyncio.gather(lock.acquire())
    return lease


async def by_wait_for(lock: Lock) -> Lease:
    """With a limit from outside."""
    return await asyncio.wait_for(lock.acquire(), 5)


async def by_shield(lock: Lock) -> Lease:
    """Shielded."""
    return await asyncio.shield(lock.acquire())


async def by_await(lock: Lock) -> Lease:
    """Plainly."""
    return await lock.acquire()


@pytest.mark.parametrize(
    "way", [by_create_task, by_task_group, by_gather, by_wait_for, by_shield, by_await]
)
async def test_acquire_works_wherever_asyncio_takes_a_coroutine(
    locks: LockClient, redis: Redis, way: Callable[[Lock], Awaitable[Lease]]
) -> None:
    """The lease does not care which task acquired it; any task may enter or release it."""
    async with await way(locks.lock("n")) as lease:
        assert await redis.get(KEY) == f"{lease.owner_token}/{lease.fencing_token}"
    assert await leftovers(redis) == []


async def test_acquire_cancelled_by_wait_for_leaves_nothing(
    make_client: MakeClient, redis: Redis
) -> None:
    """A wait cut from outside leaves the queue; the holder and the next one notice nothing."""
    async with make_client().lock("n") as lease:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(make_client().lock("n").acquire(), 0.1)
        assert await leftovers(redis) == [KEY]
        lease.check()


async def test_acquire_object_is_used_once(locks: LockClient, redis: Redis) -> None:
    """Awaited or entered again it says so, and takes no second lease."""
    acquiring = locks.lock("n").acquire()
    async with await acquiring as lease:
        with pytest.raises(RuntimeError, match="already awaited"):
            await acquiring
        with pytest.raises(RuntimeError, match="already awaited"):
            async with acquiring:
                pytest.fail("entered")
        lease.check()
    entered = locks.lock("n").acquire()
    async with entered:
        pass
    with pytest.raises(RuntimeError, match="already awaited"):
        async with entered:
            pytest.fail("entered")
    assert await leftovers(redis) == []


async def test_acquire_never_awaited_warns(locks: LockClient, redis: Redis) -> None:
    """The classic mistake, `lock.acquire()` without await, is told by Python itself."""
    with pytest.warns(RuntimeWarning, match="never awaited"):
        _forget(locks.lock("n"))
    assert await leftovers(redis) == []


def _forget(lock: Lock) -> None:
    lock.acquire()
    gc.collect()


# One lock, many entries.


async def test_lock_shared_by_tasks_lets_one_in_at_a_time(locks: LockClient, redis: Redis) -> None:
    """One object, twenty tasks, each entry an acquisition of its own with a larger number."""
    lock = locks.lock("n")
    inside = 0
    tokens: list[tuple[str, int]] = []

    async def work() -> None:
        nonlocal inside
        async with lock as lease:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0.001)
            tokens.append((lease.owner_token, lease.fencing_token))
            inside -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    assert len({owner for owner, _ in tokens}) == 20
    assert [number for _, number in tokens] == sorted({number for _, number in tokens})
    assert await leftovers(redis) == []


async def test_lock_entered_by_one_task_and_left_by_another_is_released(
    locks: LockClient, redis: Redis
) -> None:
    """A fixture's set-up and tear-down may be two tasks; with one entry it is clear which."""
    lock = locks.lock("n")
    lease = await asyncio.create_task(_enter(lock))
    await lock.__aexit__(None, None, None)
    assert lease.state == "released"
    assert await leftovers(redis) == []


async def _enter(lock: Lock) -> Lease:
    return await lock.__aenter__()


async def test_lock_left_by_a_stranger_with_two_entries_says_that_it_is_unclear(
    locks: LockClient, redis: Redis
) -> None:
    """To release the wrong one would be worse than an error."""
    lock = locks.lock("n", ttl=0.1, auto_extend=False)
    leases = [await asyncio.create_task(_enter(lock)) for _ in range(2)]
    with pytest.raises(RuntimeError, match="unclear"):
        await lock.__aexit__(None, None, None)
    assert [lease.is_held for lease in leases] == [False, True]
    for lease in leases:
        await lease.release()
    assert await leftovers(redis) == []


async def test_lock_entered_twice_by_one_task_leaves_the_newest_first(
    locks: LockClient, redis: Redis
) -> None:
    """Possible where the first ran out: the inner exit is the inner lease's."""
    lock = locks.lock("n", ttl=0.15, auto_extend=False, on_lost="raise")
    with pytest.raises(LeaseLostError) as lost:
        async with lock as first:
            async with lock as second:
                assert (first.state, second.state) == ("lost", "held")
            assert second.state == "released"
    assert lost.value.fencing_token == first.fencing_token
    assert await leftovers(redis) == []


# inspect().


async def test_inspect_tells_free_held_and_waited_for(make_client: MakeClient) -> None:
    """It looks and changes nothing; the holder is shown without its token."""
    locks, others = make_client(label="us"), make_client()
    lock = others.lock("n")
    assert await lock.inspect() == LockInfo(False, None, None, None, 0)
    lease = await locks.lock("n", ttl=20).acquire()
    info = await lock.inspect()
    assert info.ttl_left is not None
    assert lease.remaining < info.ttl_left <= 20
    assert info == LockInfo(True, lease.holder, info.ttl_left, lease.fencing_token, 0)
    assert str(info.holder).startswith("us:")
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: _waiters(locks, 1))
    await lease.release()
    second = await waiting
    info = await locks.lock("n").inspect()
    assert (info.held, info.fencing_token, info.waiters) == (True, second.fencing_token, 0)
    await second.release()
    assert await lock.inspect() == LockInfo(False, None, None, None, 0)


@pytest.mark.parametrize(
    ("value", "holder"),
    [
        (b"someone-else", "someone-else"),
        (b"a:b:3/7", "a:b:3/7"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("ключ".encode(), "ключ"),
        (b"", ""),
    ],
)
@pytest.mark.parametrize("px", [None, 5000])
async def test_inspect_of_a_foreign_lock_shows_its_value(
    locks: LockClient, redis: Redis, value: bytes, holder: str, px: int | None
) -> None:
    """Another library's `SET NX PX` excludes us; without TTL there is no time left to tell."""
    await redis.set(KEY, value, px=px)
    info = await locks.lock("n").inspect()
    assert (info.held, info.holder, info.fencing_token) == (True, holder, None)
    assert (info.ttl_left is None) == (px is None)
    with pytest.raises(LockTimeout) as refused:
        await locks.lock("n").acquire(wait_timeout=0)
    assert refused.value.holder == holder
    assert (refused.value.ttl_left is None) == (px is None)


async def test_name_that_holds_something_else_is_taken(locks: LockClient, redis: Redis) -> None:
    """A list under the lock's key is no lock: told as such by each call, and left alone."""
    await redis.rpush(KEY, "a")
    lock = locks.lock("n", wait_timeout=1)
    for call in (lock.acquire, lock.try_acquire, lock.inspect, lock.break_lock):
        with pytest.raises(NameTakenError) as taken:
            await call()
        assert taken.value.name == "n"
    assert await redis.lrange(KEY, 0, -1) == ["a"]


# break_lock().


@pytest.mark.parametrize("how", ["any grant", "this grant"])
async def test_break_lock_on_a_held_lock_frees_it_and_the_holder_learns(
    make_client: MakeClient, redis: Redis, how: str
) -> None:
    """With nobody waiting the key goes: DELETED, at the holder's next extension."""
    lease = await make_client().lock("n", ttl=0.6).acquire()
    token = lease.fencing_token if how == "this grant" else None
    assert await make_client().lock("n").break_lock(fencing_token=token) is True
    assert await leftovers(redis) == []
    assert await asyncio.wait_for(lease.wait_lost(), 0.6 / 3 + SLACK_S) is LostReason.DELETED
    assert await lease.release() is False


async def test_break_lock_hands_on_like_a_release(make_client: MakeClient) -> None:
    """The first waiter has it at once, and the old holder hears that it was STOLEN."""
    lease = await make_client().lock("n", ttl=0.9).acquire()
    waiters = [make_client().lock("n", ttl=30), make_client().lock("n", ttl=30)]
    operator = make_client()
    waiting = []
    for count, lock in enumerate(waiters, 1):
        waiting.append(asyncio.create_task(lock.acquire()))
        await until(lambda count=count: _waiters(operator, count))  # type: ignore[misc]
    assert await operator.lock("n").break_lock() is True
    first = await asyncio.wait_for(waiting[0], SLACK_S)
    assert not waiting[1].done()
    assert first.fencing_token > lease.fencing_token
    assert await asyncio.wait_for(lease.wait_lost(), 0.9 / 3 + SLACK_S) is LostReason.STOLEN
    assert await lease.release() is False
    first.check()
    await first.release()
    await (await waiting[1]).release()


async def test_break_lock_by_the_holders_own_client_hands_on_to_its_own_waiter(
    locks: LockClient,
) -> None:
    """Where all three share one client no message is sent; the reply has to wake the waiter."""
    lease = await locks.lock("n", ttl=0.6).acquire()
    waiting = asyncio.create_task(locks.lock("n", ttl=30).acquire())
    await until(lambda: _waiters(locks, 1))
    assert await locks.lock("n").break_lock() is True
    second = await asyncio.wait_for(waiting, SLACK_S)
    assert await asyncio.wait_for(lease.wait_lost(), 0.6 / 3 + SLACK_S) is LostReason.STOLEN
    await second.release()


async def test_break_lock_of_another_grant_changes_nothing(
    make_client: MakeClient, redis: Redis
) -> None:
    """An operator who looked a moment ago must not break the grant that came since."""
    async with make_client().lock("n", ttl=20) as lease:
        before = await redis.get(KEY)
        for token in (lease.fencing_token - 1, lease.fencing_token + 1, 0):
            assert await make_client().lock("n").break_lock(fencing_token=token) is False
        assert await redis.get(KEY) == before
        assert lease.state == "held"


async def test_break_lock_on_a_free_lock_is_false(locks: LockClient, redis: Redis) -> None:
    """Nothing stood, nothing is made."""
    assert await locks.lock("n").break_lock() is False
    assert await locks.lock("n").break_lock(fencing_token=1) is False
    assert await leftovers(redis) == []


@pytest.mark.parametrize("value", [b"foreign", b"\xff\x00", b"foreign/12", b""])
@pytest.mark.parametrize("px", [None, 60_000])
async def test_break_lock_on_a_foreign_lock_removes_it(
    make_client: MakeClient, redis: Redis, value: bytes, px: int | None
) -> None:
    """What an operator wants most for a key without TTL; its waiter goes on at once."""
    await redis.set(KEY, value, px=px)
    lock = make_client().lock("n")
    assert await lock.break_lock(fencing_token=12) is False
    assert await redis.exists(KEY) == 1
    waiting = asyncio.create_task(make_client().lock("n").acquire())
    await until(lambda: _is_queued(redis))
    assert await lock.break_lock() is True
    async with await asyncio.wait_for(waiting, SLACK_S):
        assert (await lock.inspect()).fencing_token is not None


async def _is_queued(redis: Redis) -> bool:
    return bool(await redis.zcard(f"{KEY}:queue"))


# A lease in each of its states.


async def test_lease_held_answers_as_held(locks: LockClient, redis: Redis) -> None:
    """All of its questions, without I/O."""
    lease = await locks.lock("n", ttl=20).acquire()
    assert (lease.name, lease.ttl, lease.state, lease.is_held) == ("n", 20.0, "held", True)
    assert isinstance(lease.fencing_token, int)
    pttl = await redis.pttl(KEY)
    assert 0 < lease.remaining < pttl / 1000
    lease.check()
    lease.check(10)
    with pytest.raises(LeaseLostError) as too_little:
        lease.check(min_left=20)
    assert too_little.value.reason is LostReason.TOO_LITTLE_TIME
    assert too_little.value.fencing_token == lease.fencing_token
    assert lease.state == "held"
    waiting = asyncio.create_task(lease.wait_lost())
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    assert await lease.release() is True
    assert await asyncio.wait_for(waiting, 5) is None


async def test_check_for_too_little_time_in_the_body_comes_out_as_the_bodys_own(
    locks: LockClient, redis: Redis
) -> None:
    """It is still held, so the body is not cancelled, and the lease is released as ever."""
    with pytest.raises(LeaseLostError) as lost:
        async with locks.lock("n", ttl=1) as lease:
            lease.check(min_left=5)
    assert lost.value.reason is LostReason.TOO_LITTLE_TIME
    assert lease.state == "released"
    assert await leftovers(redis) == []
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_lease_at_risk_is_still_held_until_the_server_answers_again(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """An unanswered extension changes the state and nothing else."""
    locks = make_client(proxy.url, request_timeout=0.15)
    async with locks.lock("n", ttl=20) as lease:
        proxy.black_hole()
        before = lease.remaining
        with pytest.raises(ServerUnreachable, match="'n'") as unreachable:
            await lease.extend()
        assert unreachable.value.name == "n"
        assert unreachable.value.__cause__ is not None
        assert (lease.state, lease.is_held) == ("at_risk", True)
        assert 0 < lease.remaining < before
        lease.check()
        proxy.heal()
        assert await lease.extend() > 15
        assert (lease.state, lease.is_held) == ("held", True)


async def test_lease_lost_answers_as_lost(locks: LockClient, redis: Redis) -> None:
    """Each call says so and why; releasing it is allowed, and touches nothing."""
    lease = await locks.lock("n", ttl=20).acquire()
    await redis.set(KEY, "theirs", px=5000)
    with pytest.raises(LeaseLostError, match="'n'") as lost:
        await lease.extend()
    error = lost.value
    assert (error.name, error.fencing_token) == ("n", lease.fencing_token)
    assert error.reason is LostReason.STOLEN
    assert (lease.state, lease.is_held, lease.remaining) == ("lost", False, 0.0)
    for call in (lease.check, functools.partial(lease.check, 0)):
        with pytest.raises(LeaseLostError):
            call()
    with pytest.raises(LeaseLostError):
        await lease.extend()
    with pytest.raises(LeaseLostError):
        async with lease:
            pytest.fail("entered")
    assert await lease.wait_lost() is LostReason.STOLEN
    assert await lease.release() is False
    assert lease.state == "lost"
    assert await redis.get(KEY) == "theirs"


async def test_lease_deleted_is_lost_as_deleted(locks: LockClient, redis: Redis) -> None:
    """No key before the deadline: somebody removed it; it is not made again."""
    lease = await locks.lock("n", ttl=20).acquire()
    await redis.delete(KEY)
    with pytest.raises(LeaseLostError) as lost:
        await lease.extend()
    assert lost.value.reason is LostReason.DELETED
    assert await redis.exists(KEY) == 0
    assert await lease.release() is False


async def test_lease_released_answers_as_released(locks: LockClient, redis: Redis) -> None:
    """Releasing again is False; to go on using it is a mistake, told as RuntimeError."""
    lease = await locks.lock("n", ttl=20).acquire()
    assert [await lease.release(), await lease.release()] == [True, False]
    assert (lease.state, lease.is_held, lease.remaining) == ("released", False, 0.0)
    with pytest.raises(RuntimeError, match="'n' was released"):
        lease.check()
    with pytest.raises(RuntimeError, match="'n' was released"):
        await lease.extend()
    with pytest.raises(RuntimeError, match="'n' was released"):
        async with lease:
            pytest.fail("entered")
    assert await lease.wait_lost() is None
    assert await leftovers(redis) == []


async def test_lease_released_by_many_at_once_is_removed_by_one(
    locks: LockClient, redis: Redis
) -> None:
    """Idempotent also while the first is under way; nobody gets an exception."""
    lease = await locks.lock("n").acquire()
    answers = await asyncio.gather(*(lease.release() for _ in range(5)))
    assert sorted(answers) == [False, False, False, False, True]
    assert await leftovers(redis) == []


async def test_lease_released_in_its_block_leaves_in_peace(locks: LockClient, redis: Redis) -> None:
    """An early release is no loss, and the exit does not touch who came after."""
    async with locks.lock("n") as lease:
        assert await lease.release() is True
        await redis.set(KEY, "theirs", px=5000)
    assert lease.state == "released"
    assert await redis.get(KEY) == "theirs"


async def test_lease_entered_twice_says_so(locks: LockClient) -> None:
    """One lease, one block."""
    async with locks.lock("n") as lease:
        with pytest.raises(RuntimeError, match="entered already"):
            async with lease:
                pytest.fail("entered")
        lease.check()


async def test_owner_token_is_unique_and_of_the_designs_shape(make_client: MakeClient) -> None:
    """`<label>:<client id>:<n>`: one for each acquisition, never used again."""
    ours, others = make_client(label="us"), make_client(label="them")
    tokens = []
    for locks in (ours, ours, others):
        async with locks.lock("n") as lease:
            tokens.append(lease.owner_token)
    first, second, third = [token.split(":") for token in tokens]
    assert (first[0], third[0]) == ("us", "them")
    assert first[:2] == second[:2]
    assert first[1] != third[1]
    assert len(bytes.fromhex(first[1])) == 16
    assert first[2] != second[2]


async def test_repr_shows_the_state_and_never_the_owner_token(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Logs are read by more people than may release a lock."""
    locks = make_client(proxy.url, request_timeout=0.1)
    lock = locks.lock("n", ttl=20)
    lease = await lock.acquire()
    seen = [repr(lease)]
    assert all(word in seen[0] for word in ("'n'", "held", str(lease.fencing_token), "19."))
    proxy.black_hole()
    with pytest.raises(ServerUnreachable) as unreachable:
        await lease.extend()
    seen.append(repr(lease))
    assert "at_risk" in seen[-1]
    proxy.heal()
    await redis.delete(KEY)
    with pytest.raises(LeaseLostError) as lost:
        await lease.extend()
    seen.append(repr(lease))
    assert "lost" in seen[-1]
    await lease.release()
    second = await lock.acquire()
    await second.release()
    seen += [repr(second), repr(lock), repr(locks), str(lost.value), str(unreachable.value)]
    assert "released" in seen[3]
    secrets = [token for one in (lease, second) for token in (one.owner_token,)]
    assert [text for text in seen for secret in secrets if secret in text] == []


async def test_extend_gives_what_may_be_relied_on_and_never_shortens(
    locks: LockClient, redis: Redis
) -> None:
    """Longer than the ttl it lengthens, shorter it changes nothing."""
    async with locks.lock("n", ttl=10) as lease:
        relied_on = await lease.extend(40)
        assert 38 < relied_on < 40
        assert 39_000 < await redis.pttl(KEY) <= 40_000
        relied_on = await lease.extend(0.5)
        assert 37 < relied_on < 40
        assert 38_000 < await redis.pttl(KEY) <= 40_000
        assert 37 < lease.remaining < 40
        assert lease.ttl == 10


# The decorator.


class Account:
    """Something with a number, and a method under a lock."""

    def __init__(self, number: int) -> None:
        self.number = number


async def holders_of(redis: Redis) -> list[str]:
    """The names that are locked now."""
    keys = await leftovers(redis)
    return [key.removeprefix("aiodlock:{").removesuffix("}") for key in keys]


async def test_decorator_fills_the_name_from_the_arguments(locks: LockClient, redis: Redis) -> None:
    """By position, by keyword, by default, dotted, formatted; braces can be escaped."""

    @locks.locked("{a}:{b}:{account.number}:{n:03d}:{{x}}")
    async def work(a: str, /, b: str = "default", *, account: Account, n: int = 7) -> list[str]:
        return await holders_of(redis)

    escaped = "%7Bx%7D"
    assert await work("a", account=Account(5)) == [f"a:default:5:007:{escaped}"]
    assert await work("a", "b", account=Account(5), n=1) == [f"a:b:5:001:{escaped}"]
    assert await work("a", b="B", account=Account(6)) == [f"a:B:6:007:{escaped}"]
    assert await leftovers(redis) == []


async def test_decorator_on_a_method_sees_self(locks: LockClient, redis: Redis) -> None:
    """`{self.number}` makes one lock per object; two objects do not wait for each other."""
    both_inside = asyncio.Barrier(2)

    class Guarded(Account):
        @locks.locked("account:{self.number}", wait_timeout=0)
        async def settle(self) -> list[str]:
            await both_inside.wait()
            return await holders_of(redis)

    seen = await asyncio.wait_for(asyncio.gather(Guarded(1).settle(), Guarded(2).settle()), 5)
    assert "account:1" in seen[0]
    assert "account:2" in seen[1]


async def test_decorator_passes_its_options_on(make_client: MakeClient, redis: Redis) -> None:
    """The options are those of `lock`; the error of a wait that failed comes to the caller."""
    locks = make_client()

    @locks.locked("n", ttl=7, wait_timeout=0)
    async def work() -> int:
        return int(await redis.pttl(KEY))

    assert 6000 < await work() <= 7000
    async with make_client().lock("n"):
        with pytest.raises(LockTimeout):
            await work()


async def test_decorator_keeps_the_function_s_face_and_its_exceptions(
    locks: LockClient, redis: Redis
) -> None:
    """What wraps must look like what it wraps, and let its errors through."""

    @locks.locked("n:{x}")
    async def work(x: int) -> int:
        """Its words."""
        raise ValueError(x)

    assert (work.__name__, work.__doc__) == ("work", "Its words.")
    assert inspect.iscoroutinefunction(work)
    assert list(inspect.signature(work).parameters) == ["x"]
    with pytest.raises(ValueError, match="5"):
        await work(5)
    with pytest.raises(TypeError, match="missing"):
        await work()  # type: ignore[call-arg]
    assert await leftovers(redis) == []


async def test_decorator_calls_of_one_name_take_turns(locks: LockClient) -> None:
    """Each call is an acquisition of its own, in the order of the calls."""
    inside: list[int] = []
    order: list[int] = []

    @locks.locked("n")
    async def work(number: int) -> None:
        inside.append(number)
        assert inside == [number]
        await asyncio.sleep(0.002)
        inside.remove(number)
        order.append(number)

    await asyncio.gather(*(work(number) for number in range(10)))
    assert order == list(range(10))


def test_decorator_refuses_what_is_not_async() -> None:
    """A lock around the making of a generator or a plain call would protect nothing."""

    async def generator() -> AsyncIterator[int]:
        yield 1

    def plain() -> None: ...

    for function in (generator, plain):
        with pytest.raises(TypeError, match="async functions"):
            decorated(function)


# In memory.


async def test_memory_client_does_what_a_real_one_does() -> None:
    """Turns, time-outs, try-lock, numbers, inspection: users test against it."""
    async with memory_client() as locks:
        lock = locks.lock("n", ttl=5)
        order: list[int] = []

        async def work(number: int) -> None:
            async with lock:
                await asyncio.sleep(0.001)
                order.append(number)

        await asyncio.gather(*(work(number) for number in range(5)))
        assert order == [0, 1, 2, 3, 4]
        async with lock as lease:
            assert await lock.try_acquire() is None
            with pytest.raises(LockTimeout):
                await lock.acquire(wait_timeout=0.05)
            info = await lock.inspect()
            assert (info.held, info.fencing_token) == (True, lease.fencing_token)
            assert await lease.extend(9) > 8
        assert (await lock.inspect()).held is False


async def test_memory_clients_of_one_word_share_and_others_do_not() -> None:
    """`memory://word` is one server; `memory://` alone is private."""
    async with contextlib.AsyncExitStack() as stack:
        urls = ("memory://shared", "memory://shared", "memory://", "memory://")
        clients = [await stack.enter_async_context(LockClient.from_url(url)) for url in urls]
        lease = await clients[0].lock("n").acquire()
        answers = [await locks.lock("n").try_acquire() for locks in clients[1:]]
        assert [answer is None for answer in answers] == [True, False, False]
        waiting = asyncio.create_task(clients[1].lock("n").acquire())
        await until(lambda: _waiters(clients[0], 1))
        await lease.release()
        async with await asyncio.wait_for(waiting, 5) as second:
            assert second.fencing_token > lease.fencing_token


async def test_memory_lease_is_extended_and_can_be_lost() -> None:
    """The watchdog works there too, and so does the news of a loss."""
    async with LockClient.from_url("memory://watched") as locks:
        lease = await locks.lock("n", ttl=0.3).acquire()
        await asyncio.sleep(0.7)
        lease.check()
        assert await locks.lock("n").break_lock() is True
        assert await asyncio.wait_for(lease.wait_lost(), 0.1 + SLACK_S) is LostReason.DELETED


# Without asserts, without a loop.

OUTCOMES = """
import asyncio, sys
from aiodlock import *

async def main(url):
    async with LockClient.from_url(url) as locks, LockClient.from_url(url) as others:
        lock = locks.lock("n", ttl=0.4)
        async with lock as lease:
            await asyncio.sleep(0.8)
            print(lease.state, await others.lock("n").try_acquire())
            waiting = asyncio.create_task(others.lock("n").acquire())
            while not (await lock.inspect()).waiters:
                await asyncio.sleep(0.01)
        second = await waiting
        print(second.state, second.fencing_token > lease.fencing_token)
        try:
            await lock.acquire(wait_timeout=0.1)
        except LockTimeout as error:
            print(type(error).__name__)
        print(await lock.break_lock(), await second.release())
        try:
            async with locks.lock("m", ttl=0.2):
                await others.lock("m").break_lock()
                await asyncio.sleep(5)
        except LeaseLostError as error:
            print(error.reason.name)
        try:
            locks.lock("")
        except ValueError:
            print("refused")
    print(sum(task.get_name().startswith("aiodlock") for task in asyncio.all_tasks()))

asyncio.run(main(sys.argv[1]))
"""


def test_interpreter_without_asserts_has_the_same_outcomes(server: LockServer) -> None:
    """`python -O` drops assert statements; none of them may do anything."""
    ran = subprocess.run(
        [sys.executable, "-O", "-W", "error", "-c", OUTCOMES, server.url],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        *("held None", "held True", "LockTimeout", "True False", "DELETED", "refused", "0")
    ]


def test_client_and_locks_are_made_without_a_running_loop(server: LockServer) -> None:
    """Module level code makes them; the loop comes with the first await."""
    locks = LockClient.from_url(server.url)
    lock = locks.lock("n")

    async def main() -> int:
        async with locks, lock as lease:
            return lease.fencing_token

    first = asyncio.run(main())
    assert asyncio.run(main()) > first
