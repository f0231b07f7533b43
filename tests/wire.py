"""What goes over the wire, seen from outside: connections counted, writes noted, scripts named."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Self

import pytest
from redis.asyncio import Connection, ConnectionPool, Redis

from aiodlock._store._wire import Script, digest
from tests.proxy import ChaosProxy, Fault

FOR_EVER_S = 60.0
"""Longer than any test: a stall of this length never ends while it runs."""


def sha(script: str) -> bytes:
    """The digest by which ``EVALSHA`` names a script of ours, as it stands in a request."""
    return digest(Script(script).text).encode()


def stall(proxy: ChaosProxy, script: str = "", n: int = 1) -> Fault:
    """The next *n* replies to *script* never come, nor what is behind them on that connection.

    This is how TCP loses a reply without closing: dropping one reply and passing the next, as
    ``drop_replies`` without ``close`` does, is no fault that a connection can have.
    """
    return proxy.delay_replies(FOR_EVER_S, sha(script) if script else b"EVALSHA", n)


def lose(proxy: ChaosProxy, script: str = "", n: int = 1) -> Fault:
    """The next *n* replies to *script* are lost, and their connections reset."""
    return proxy.drop_replies(n, sha(script) if script else b"EVALSHA", close=True)


class Watch:
    """How long something took; as a context manager or read while it runs."""

    def __enter__(self) -> Self:
        self.started_at = time.monotonic()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ended_at = time.monotonic()

    @property
    def s(self) -> float:
        """Seconds, to the end of the block or until now."""
        return getattr(self, "ended_at", time.monotonic()) - self.started_at


class Log(Counter[str]):
    """Put in the place of ``proxy.requests``: also keeps the order and the times of arrival."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []
        super().__init__()

    def __setitem__(self, command: str, count: int) -> None:
        self.seen.append((time.monotonic(), command))
        super().__setitem__(command, count)

    def after_last(self, command: str) -> list[str]:
        """What arrived behind the last *command*."""
        commands = [seen for _, seen in self.seen]
        return commands[len(commands) - commands[::-1].index(command) :]


def logged(proxy: ChaosProxy) -> Log:
    """From now on the proxy's requests are kept in order."""
    log = proxy.requests = Log()
    return log


class Tap:
    """What the connections of one pool do: redis-py's own, noted as they go by.

    Attributes:
        writes: What each call that writes to a socket carried, in order.
        connects: How many times a socket was opened, or tried to be.
        most_open: The largest number of connections that were open at once.
    """

    def __init__(self, connection_class: type[Connection] = Connection) -> None:
        self.writes: list[bytes] = []
        self.connects = 0
        self.most_open = 0
        self.made: list[Connection] = []
        self._base = connection_class

    @property
    def open(self) -> int:
        """How many are open now."""
        return sum(connection.is_connected for connection in self.made)

    @property
    def connection_class(self) -> type[Connection]:
        """For a pool."""
        tap = self
        base: Any = self._base

        class Tapped(base):  # type: ignore[misc]
            def __init__(self, **options: Any) -> None:
                super().__init__(**options)
                tap.made.append(self)

            async def connect(self) -> None:
                tap.connects += not self.is_connected
                await super().connect()
                tap.most_open = max(tap.most_open, tap.open)

            async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
                parts = [command] if isinstance(command, bytes) else list(command)
                tap.writes.append(b"".join(parts))
                await super().send_packed_command(parts, check_health)

        return Tapped


def tapped(url: str, tap: Tap, **options: Any) -> Redis:
    """A client of redis-py on *url* whose connections *tap* sees; the caller closes it."""
    pool = ConnectionPool.from_url(url, connection_class=tap.connection_class, **options)
    return Redis.from_pool(pool)


async def at_once(cases: Mapping[str, Awaitable[object]]) -> None:
    """Run them all in this loop at the same time, each to its end; a failure says whose it is."""
    results = await asyncio.gather(*cases.values(), return_exceptions=True)
    failures = []
    for case, result in zip(cases, results, strict=True):
        if isinstance(result, BaseException):
            result.add_note(f"in the case: {case}")
            failures.append(result)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(results)} cases failed", failures)


async def command(redis: Redis, *parts: str | bytes) -> Any:
    """The reply to a command that redis-py has no method for."""
    return await redis.execute_command(*parts)  # type: ignore[no-untyped-call]


async def connections(redis: Redis, name: str) -> list[dict[str, Any]]:
    """What the server tells about the connections of the client with this ``client_name``."""
    return [client for client in await redis.client_list() if client["name"] == name]


async def received(redis: Redis) -> int:
    """How many connections the server has accepted since it started."""
    return int((await redis.info("stats"))["total_connections_received"])


async def calls(redis: Redis, command: str) -> int:
    """How many times the server has done *command*."""
    stats = await redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {}).get("calls", 0))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What aiodlock has warned of so far, in order."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "aiodlock" and record.levelno >= logging.WARNING
    ]


def requests_in(writes: Iterable[bytes], command: bytes = b"EVALSHA") -> int:
    """How many *commands* there are in these writes."""
    return sum(written.count(b"\r\n" + command + b"\r\n") for written in writes)
