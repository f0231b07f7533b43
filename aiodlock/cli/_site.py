"""The servers that an operator's command looks at: one, a cluster, or a quorum of several."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from redis.asyncio import Redis, RedisCluster
from redis.client import NEVER_DECODE
from redis.exceptions import RedisClusterException

from aiodlock import LockClient, LockError, _names
from aiodlock._store._wire import FAILURES, trouble
from aiodlock.cli._cluster import REQUEST_S, cluster_at
from aiodlock.cli._connecting import ExitCode, Failure, client_of, failure_of, shown, urls_of
from aiodlock.cli._look import BYTES_MOST, Look, look_of

AT_ONCE: Final = 8
"""Names that are asked about together: so many connections to a server, and no more."""

_LOOK: Final = resources.files(__package__).joinpath("lua/look.lua").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Node:
    """One server, or one cluster; `label` is for people, without a password."""

    label: str
    redis: Redis | RedisCluster

    async def look(self, keys: _names.Keys, *, most: int) -> Look:
        """What stands there now. One script call.

        Raises:
            NoAnswer: None that tells anything.
            NotAllowedError: The server forbids it.
        """
        arguments = ("EVAL", _LOOK, 5, *keys, keys.grants, most, BYTES_MOST)
        return look_of(await _asked(self.redis, *arguments))

    async def primaries(self) -> dict[str, Any]:
        """What to send a SCAN to, by what people call it.

        Raises:
            NoAnswer: None that tells anything.
        """
        if isinstance(self.redis, Redis):
            return {self.label: self.redis}
        try:
            await self.redis.initialize()
        except (RedisClusterException, *FAILURES) as error:
            raise _trouble(error) from error
        return {primary.name: primary for primary in self.redis.get_primaries()}

    async def scan(self, primary: Any, cursor: int, pattern: str, count: int) -> tuple[int, Any]:
        """The next cursor (0: it is over), and keys. One command."""
        reply = await _asked(primary, "SCAN", cursor, "MATCH", pattern, "COUNT", count)
        return int(reply[0]), reply[1]


@dataclass(frozen=True, slots=True)
class Site:
    """All of them, seen by one command."""

    nodes: tuple[Node, ...]
    locks: LockClient
    prefix: str
    urls: list[str]

    @property
    def majority(self) -> int:
        """How many nodes decide."""
        return len(self.nodes) // 2 + 1


@asynccontextmanager
async def site_of(args: argparse.Namespace) -> AsyncIterator[Site]:
    """The servers that the options name, open for this block.

    Raises:
        Failure: They are not what is allowed; or, out of the block, what `LockError` says.
    """
    urls = urls_of(args)
    locks = client_of(args)
    try:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(_node(url)) for url in urls]
            if len(nodes) == 1 and (
                cluster := await stack.enter_async_context(cluster_at(urls[0]))
            ):
                nodes = [Node(nodes[0].label, cluster)]
                locks = LockClient(cluster, prefix=args.prefix)
            await stack.enter_async_context(locks)
            yield Site(tuple(nodes), locks, args.prefix, urls)
    except LockError as error:
        raise failure_of(error, urls) from error


def named(name: str, prefix: str) -> _names.Keys:
    """The keys of *name*.

    Raises:
        Failure: It can be no lock's name.
    """
    try:
        return _names.keys(prefix, _names.checked_name(name))
    except ValueError as error:
        raise Failure(str(error), ExitCode.USAGE) from None


@asynccontextmanager
async def _node(url: str) -> AsyncIterator[Node]:
    # A URL's own options win over these.
    redis = Redis.from_url(
        url,
        socket_timeout=REQUEST_S,
        socket_connect_timeout=REQUEST_S,
        max_connections=AT_ONCE,
    )
    try:
        yield Node(shown(url), redis)
    finally:
        await redis.aclose()


async def _asked(redis: Any, *command: str | int) -> Any:
    """The reply to *command*, in bytes.

    Raises:
        NoAnswer: None that tells anything.
        NotAllowedError: The server forbids it.
    """
    try:
        return await redis.execute_command(*command, **{NEVER_DECODE: True})
    except (RedisClusterException, *FAILURES) as error:
        raise _trouble(error) from error


def _trouble(error: Exception) -> Exception:
    return trouble(error, "a lock")
