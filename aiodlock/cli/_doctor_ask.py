"""Asks one server everything that `aiodlock doctor` wants to know, within a bounded time.

No setting is changed, and no key stays: what is written is one key of a random name, for a moment.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    RedisError,
    ResponseError,
)

from aiodlock.cli import _doctor_keys, _doctor_measure, _doctor_rights
from aiodlock.cli._connecting import shown
from aiodlock.cli._doctor_asker import LIMIT_S, Asker, OutOfTimeError
from aiodlock.cli._doctor_facts import (
    Facts,
    Plan,
    SlowCommand,
    Trouble,
    lines_of,
    replicas_of,
    said,
)

_SLOW_ENTRIES = 64

# One by one: Redis 6.2 takes no more, and the whole of it has passwords in it.
_SETTINGS: Final = (
    *("maxmemory", "maxmemory-policy", "appendfsync", "save", "maxclients", "timeout"),
    *("min-replicas-to-write", "min-replicas-max-lag", "client-output-buffer-limit"),
    *("busy-reply-threshold", "lua-time-limit"),
)


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
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        facts.trouble = "not-redis", f"an answer that no Redis gives: {error}"
    finally:
        await asker.aclose()
    return facts


async def _ask(asker: Asker) -> None:
    facts = asker.facts
    await _is_there(asker)
    with asker.noting("INFO"):
        await _information(asker)
    if facts.mode == "sentinel":
        return
    steps = (
        ("TIME", _clock),
        ("CONFIG GET", _settings),
        ("CLUSTER INFO", _cluster),
        ("EVALSHA", _rights),
        ("PUBLISH", _doctor_measure.messages),
        ("SLOWLOG GET", _slow_commands),
        ("PUBSUB NUMSUB", _sentinels),
        ("SCAN", _doctor_keys.look),
        ("TIME", _clock_later),
    )
    for question, step in steps:
        with asker.noting(question):
            await step(asker)


async def _clock(asker: Asker) -> None:
    asker.facts.clock = await _doctor_measure.clock(asker)


async def _clock_later(asker: Asker) -> None:
    if asker.facts.clock is not None:
        asker.facts.clock_later = await _doctor_measure.clock(asker)


async def _cluster(asker: Asker) -> None:
    if asker.facts.is_clustered:
        told = await asker.ask("CLUSTER INFO", "CLUSTER", "INFO")
        asker.facts.cluster = lines_of(told or "")


async def _rights(asker: Asker) -> None:
    await _doctor_measure.latency(asker, await _doctor_rights.try_all(asker))


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
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return "certificate", words
    # A server that closes at once may want TLS; one that speaks HTTP answers with an H.
    is_strange = isinstance(error, InvalidResponse) or "closed by server" in words or "SSL" in words
    if is_strange and not has_answered:
        return "not-redis", words
    return "unreachable", words


async def _is_there(asker: Asker) -> None:
    """Raises for whatever would be said to every further question."""
    await asker.log_in()
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


async def _slow_commands(asker: Asker) -> None:
    entries = await asker.ask("SLOWLOG GET", "SLOWLOG", "GET", _SLOW_ENTRIES)
    now = _doctor_measure.wall_clock() + (asker.facts.clock.ahead_s if asker.facts.clock else 0.0)
    for _, started_at, microseconds, words, *_ in entries or ():
        slow = SlowCommand(str(words[0]).upper(), microseconds / 1e6, now - started_at)
        asker.facts.slow_commands.append(slow)


async def _sentinels(asker: Asker) -> None:
    told = await asker.ask("PUBSUB NUMSUB", "PUBSUB", "NUMSUB", "__sentinel__:hello")
    if told:
        asker.facts.sentinels = int(told[1])
