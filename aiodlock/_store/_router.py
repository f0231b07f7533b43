"""Over which connection the requests about a key go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol, cast

from redis.asyncio import Connection, ConnectionPool
from redis.exceptions import AskError

from ._api import NoAnswer
from ._mux import Link, Multiplexer
from ._wire import Source


class Router(Protocol):
    """Knows the primary of every key, and the connections to the primaries."""

    @property
    def has_one_primary(self) -> bool:
        """Whether all keys are on one server, so that a call may have those of several names."""

    def link(self, key: str) -> Link | None:
        """The connection that carries requests about *key*, if it is there now."""

    async def linked(self, key: str, within: float) -> Link:
        """The same, made if need be; what goes wrong comes out as redis-py says it."""

    def is_current(self, number: int) -> bool:
        """Whether the connection with that number is still there."""

    def node(self, key: str) -> str:
        """Which primary has *key*, as far as is known."""

    async def source(self, key: str) -> Source:
        """Where a connection can be borrowed, now that the link of *key* is silent."""

    async def redirect(self, error: AskError) -> Source:
        """Where a request that was answered with *error* (MOVED or ASK) belongs."""

    def doubt(self) -> None:
        """What was known about the primaries may be wrong."""

    def next_number(self) -> int:
        """A number for a borrowed connection; none is used twice."""

    def inbox_source(self) -> Source:
        """Where the connection for messages comes from; asked anew after each loss."""

    async def aclose(self) -> None:
        """Every task has ended, and every connection is given back."""


class PoolSource:
    """The connection pool of a client of redis-py."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def pick(self) -> Connection:
        return cast(Connection, self._pool.get_available_connection())  # type: ignore[no-untyped-call]

    async def connect(self, connection: Connection) -> None:
        await self._pool.ensure_connection(connection)

    async def give_back(self, connection: Connection) -> None:
        await self._pool.release(connection)


class Primary:
    """The only primary: every key is there."""

    has_one_primary = True

    def __init__(
        self, pool: ConnectionPool, on_lost: Callable[[], None], *, request_timeout: float
    ) -> None:
        self._source = PoolSource(pool)
        self._numbers = itertools.count(1)
        self._mux = Multiplexer(
            self._source, self._numbers, request_timeout=request_timeout, on_lost=on_lost
        )

    def link(self, key: str) -> Link | None:
        return self._mux.link

    async def linked(self, key: str, within: float) -> Link:
        return await self._mux.linked(within)

    def is_current(self, number: int) -> bool:
        return self._mux.link is not None and self._mux.link.number == number

    def node(self, key: str) -> str:
        return ""

    async def source(self, key: str) -> Source:
        return self._source

    async def redirect(self, error: AskError) -> Source:
        raise NoAnswer(
            "this server is one node of a cluster: give LockClient a RedisCluster"
        ) from error

    def doubt(self) -> None:
        """There is nothing to doubt."""

    def next_number(self) -> int:
        return next(self._numbers)

    def inbox_source(self) -> Source:
        return self._source

    async def aclose(self) -> None:
        await self._mux.aclose()
