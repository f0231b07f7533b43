"""A program that forks while it holds a lock by some kind of client, and lets its child lock."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool

from aiodlock import LockClient
from aiodlock.testing import LockServer

HOST = "127.0.0.1"
LIMIT_S = 60


class OwnPool(ConnectionPool):
    """A pool of the user's own making."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


def of_sentinels(ports: list[int]) -> Redis:
    """What `master_for` gives."""
    manager: Any = Sentinel([(HOST, port) for port in ports])  # type: ignore[no-untyped-call]
    return manager.master_for("locks")  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[list[int]], Redis | RedisCluster]] = {
    "sentinel": of_sentinels,
    "cluster": lambda ports: RedisCluster(host=HOST, port=ports[0]),
    "blocking pool": lambda ports: Redis.from_pool(
        BlockingConnectionPool(host=HOST, port=ports[0], max_connections=3)
    ),
    "own pool": lambda ports: Redis.from_pool(OwnPool(host=HOST, port=ports[0])),
    "single connection": lambda ports: Redis(
        host=HOST, port=ports[0], single_connection_client=True
    ),
}


async def outcome(kind: str, servers: Sequence[LockServer]) -> list[str]:
    """What child and parent say, in that order; nothing else is said, nor on stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-m", "tests.fork_of", kind),
        *(str(server.port) for server in servers),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
    )
    async with asyncio.timeout(LIMIT_S):
        said, _ = await process.communicate()
    return said.decode().splitlines()


async def fork(redis: Redis | RedisCluster) -> None:
    """Hold, fork, let the child lock, hold on."""
    async with LockClient(redis) as locks, locks.lock("parent").acquire(wait_timeout=10) as lease:
        pid = os.fork()
        if not pid:
            try:
                say("child", asyncio.run(hold(locks)))
            except BaseException as error:
                say("child", f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - the parent stands still meanwhile, on purpose
        await lease.extend()
        say("parent", lease.state)
    if isinstance(redis, Redis) and isinstance(redis.connection_pool, SentinelConnectionPool):
        for sentinel in redis.connection_pool.sentinel_manager.sentinels:
            await sentinel.aclose()
    await redis.aclose()


async def hold(locks: LockClient) -> str:
    """What the child does."""
    async with locks, locks.lock("child").acquire(wait_timeout=10) as lease:
        return lease.state


def say(who: str, what: str) -> None:
    """On a line of its own."""
    print(f"{who}: {what}", flush=True)


async def main(kind: str, *ports: str) -> None:
    """Make the client in the loop that it is used in, as applications do."""
    await fork(KINDS[kind]([int(port) for port in ports]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
