"""Asks one server everything that `aiodlock doctor` wants to know, within a bounded time.

No setting is changed, and no key stays: what is written is one key of a random name, for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline, PubSub
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    RedisError,
    ResponseError,
)

from aiodlock import _names
from aiodlock.cli import _doctor_keys, _doctor_rights
from aiodlock.cli._connecting import shown
from aiodlock.cli._doctor_facts import (
    Clock,
    Facts,
    Plan,
    SlowCommand,
    Trouble,
    lines_of,
    replicas_of,
    said,
)

LIMIT_S: Final = 15.0
"""No question is asked after so long; the last one may take a request's time more."""

_SAMPLES, _SAMPLES_S = 30, 2.0  # of anything that is measured: at most so many, or so long
_READINGS = 5  # of the clock; the quickest one counts
_MESSAGES = 5
_SLOW_ENTRIES = 64

# One by one: Redis 6.2 takes no more, and the whole of it has passwords in it.
_SETTINGS: Final = (
    *("maxmemory", "maxmemory-policy", "appendfsync", "save", "maxclients", "timeout"),
    *("min-replicas-to-write", "min-replicas-max-lag", "client-output-buffer-limit"),
    *("busy-reply-threshold", "lua-time-limit"),
)

wall_clock = time.time


class Asker:
    """A connection to one server; refusals are noted in the facts, an end of it is raised.

    Raises:
        RedisError, OSError: The server does not answer, or no longer.
        OutOfTimeError: The time for this server is over.
    """

    def __init__(self, url: str, plan: Plan, facts: Facts) -> None:
        self.plan = plan
        self.facts = facts
        self.redis = _client(url, plan.request_timeout)
        # One that subscribes is another's connection, as with a lock.
        self.listener = _client(url, plan.request_timeout)
        self.has_answered = False
        self._end = time.monotonic() + LIMIT_S

    def check_time(self) -> None:
        """Go on only while there is time."""
        if time.monotonic() > self._end:
            raise OutOfTimeError

    async def ask(self, question: str, *command: str | int) -> Any:
        """The reply to *command*; None where it is refused, which is noted under *question*."""
        self.check_time()
        try:
            return await self.redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            self.facts.unseen[question] = said(error)
            return None

    async def ask_all(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """The reply to each, or the error that it is, in one round trip."""
        self.check_time()
        async with self.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                _put(pipe, command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies


class OutOfTimeError(Exception):
    """The server answers, but so slowly that there was no time for all."""


async def facts_of(url: str, plan: Plan) -> Facts:
    """What can be seen of the server at *url*, however little; raises nothing of the server's.

    Bounded by `LIMIT_S` and one request more.
    """
    facts = Facts(shown(url))
    asker = Asker(url, plan, facts)
    try:
        # Twice: a server may drip, and on 3.11 redis-py swallows a cancel now and then.
        async with asyncio.timeout(LIMIT_S + plan.request_timeout):
            await _ask(asker)
    except (OutOfTimeError, TimeoutError):
        facts.unseen["out of time"] = f"so slow that {LIMIT_S:.0f} s were not enough"
    except (RedisError, OSError) as error:
        facts.trouble = trouble_of(error, has_answered=asker.has_answered)
    finally:
        with contextlib.suppress(RedisError, OSError):
            await asker.redis.aclose()
            await asker.listener.aclose()
    return facts


async def _ask(asker: Asker) -> None:
    facts = asker.facts
    await _is_there(asker)
    await _information(asker)
    if facts.mode == "sentinel":
        return
    facts.clock = await _clock(asker)
    await _settings(asker)
    if facts.is_clustered:
        facts.cluster = lines_of(await asker.ask("CLUSTER INFO", "CLUSTER", "INFO") or "")
    await _latency(asker, await _doctor_rights.try_all(asker))
    await _messages(asker)
    await _slow_commands(asker)
    await _sentinels(asker)
    await _doctor_keys.look(asker)
    if facts.clock is not None:
        facts.clock_later = await _clock(asker)


def trouble_of(error: BaseException, *, has_answered: bool) -> tuple[Trouble, str]:
    """Why a server cannot be asked, or no longer, by what redis-py raised; with its words."""
    words = said(error)
    if isinstance(error, BusyLoadingError):
        return "loading", words
    if words.startswith("BUSY "):
        return "busy", words
    if "max number of clients" in words:
        return "connections-full", words
    if isinstance(error, AuthenticationError | ResponseError):
        return "login", words
    # A server that closes at once may want TLS; one that speaks HTTP answers with an H.
    is_strange = isinstance(error, InvalidResponse) or "closed by server" in words or "SSL" in words
    if is_strange and not has_answered:
        return "not-redis", words
    return "unreachable", words


async def _is_there(asker: Asker) -> None:
    """Raises for whatever would be said to every further question."""
    pool = asker.redis.connection_pool
    # Whatever is refused while it connects is about the user, or the database.
    await pool.release(await pool.get_connection())  # type: ignore[no-untyped-call]
    try:
        await asker.redis.execute_command("PING")  # type: ignore[no-untyped-call]
    except ResponseError as error:
        if str(error).startswith("BUSY "):
            raise
        # PING is forbidden to this user, which is no matter.
    asker.has_answered = True


async def _information(asker: Asker) -> None:
    facts = asker.facts
    told = await asker.ask("INFO", "INFO")
    if told is not None:
        facts.info = lines_of(told)
        facts.replicas = replicas_of(facts.info)
    elif greeting := await asker.ask("HELLO", "HELLO"):
        # It is never forbidden, and tells the little that stands in place of the rest.
        facts.info = _greeted(greeting)
    facts.unseen.pop("HELLO", None)


def _greeted(greeting: list[Any]) -> dict[str, str]:
    told = dict(zip(greeting[::2], greeting[1::2], strict=True))
    return {
        f"{told['server']}_version": str(told["version"]),
        "server_mode": str(told["mode"]),
        "role": str(told["role"]),
    }


async def _settings(asker: Asker) -> None:
    replies = await asker.ask_all(*(("CONFIG", "GET", name) for name in _SETTINGS))
    for name, reply in zip(_SETTINGS, replies, strict=True):
        if isinstance(reply, Exception):
            asker.facts.unseen["CONFIG GET"] = said(reply)
        elif reply:  # [name, value]; nothing where the server has no such setting
            asker.facts.config[name] = str(reply[1])


async def _clock(asker: Asker) -> Clock | None:
    """Between two readings of our own; the quickest answer says it best."""
    readings: list[Clock] = []
    end = time.monotonic() + _SAMPLES_S
    while len(readings) < _READINGS and time.monotonic() < end:
        before = wall_clock()
        told = await asker.ask("TIME", "TIME")
        after = wall_clock()
        if told is None:
            return None
        seconds, microseconds = told
        middle = (before + after) / 2
        now = int(seconds) + int(microseconds) / 1e6
        readings.append(Clock(now - middle, abs(after - before) / 2))
    return min(readings, key=lambda reading: reading.within_s)


async def _latency(asker: Asker, command: Sequence[str]) -> None:
    """How long *command* takes."""
    end = time.monotonic() + _SAMPLES_S
    for _ in range(_SAMPLES):
        started_at = time.monotonic()
        if await asker.ask(command[0], *command) is None:
            return
        asker.facts.latencies_s.append(time.monotonic() - started_at)
        if time.monotonic() > end:
            return


async def _messages(asker: Asker) -> None:
    """Whether what is published on an inbox of ours arrives."""
    asker.check_time()
    async with asker.listener.pubsub() as inbox:
        try:
            asker.facts.message_delays_s = await _heard(asker, inbox)
        except ResponseError as error:
            asker.facts.message_trouble = said(error)


async def _heard(asker: Asker, inbox: PubSub) -> list[float]:
    channel = _names.inbox(asker.plan.prefix, _names.new_client_id())
    limit_s = asker.plan.request_timeout
    delays: list[float] = []
    await inbox.subscribe(channel)
    if await inbox.get_message(timeout=limit_s) is None:
        asker.facts.message_trouble = f"no answer to SUBSCRIBE within {limit_s:g} s"
        return delays
    end = time.monotonic() + _SAMPLES_S
    while len(delays) < _MESSAGES and time.monotonic() < end:
        started_at = time.monotonic()
        await asker.redis.publish(channel, "")
        if await inbox.get_message(timeout=limit_s) is None:
            asker.facts.message_trouble = f"published, but not heard within {limit_s:g} s"
            break
        delays.append(time.monotonic() - started_at)
    return delays


async def _slow_commands(asker: Asker) -> None:
    entries = await asker.ask("SLOWLOG GET", "SLOWLOG", "GET", _SLOW_ENTRIES)
    now = wall_clock() + (asker.facts.clock.ahead_s if asker.facts.clock else 0.0)
    for _, started_at, microseconds, words, *_ in entries or ():
        slow = SlowCommand(str(words[0]).upper(), microseconds / 1e6, now - started_at)
        asker.facts.slow_commands.append(slow)


async def _sentinels(asker: Asker) -> None:
    told = await asker.ask("PUBSUB NUMSUB", "PUBSUB", "NUMSUB", "__sentinel__:hello")
    if told:
        asker.facts.sentinels = int(told[1])


def _client(url: str, request_timeout: float) -> Redis:
    redis = Redis.from_url(url)
    # Whatever the URL says: our own bounds, and text that turns back into the same bytes.
    redis.connection_pool.connection_kwargs.update(
        socket_timeout=request_timeout,
        socket_connect_timeout=request_timeout,
        decode_responses=True,
        encoding="utf-8",
        encoding_errors="surrogateescape",
        protocol=2,
        driver_info=None,
    )
    # As the server says it: redis-py would make numbers of ids.
    redis.response_callbacks.clear()
    return redis


def _put(pipe: Pipeline, command: tuple[str | int, ...]) -> None:
    pipe.execute_command(*command)
