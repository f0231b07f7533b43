"""What a worker process is told to do."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from redis.asyncio import Redis, RedisCluster

from aiodlock import LockClient

REQUEST_TIMEOUT_S = 0.6


@dataclass(frozen=True)
class Servers:
    """Where the locks are: one of *urls*, *sentinels* and *cluster* says it.

    Attributes:
        urls: One for each client of a process.
        sentinels: Ports.
        cluster: Ports.
    """

    urls: tuple[str, ...] = ()
    sentinels: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()

    async def clients(self, stack: AsyncExitStack, label: str) -> list[LockClient]:
        """Two clients, entered."""
        made: list[LockClient] = []
        for number in range(2):
            options: dict[str, Any] = {
                "label": f"{label}.{number}",
                "request_timeout": REQUEST_TIMEOUT_S,
            }
            if self.urls:
                client = LockClient.from_url(self.urls[number % len(self.urls)], **options)
            else:
                client = LockClient(await self._redis(stack), **options)
            made.append(await stack.enter_async_context(client))
        return made

    async def _redis(self, stack: AsyncExitStack) -> Redis | RedisCluster:
        """What an application makes for servers that other processes run."""
        # Not for the others, who would start twice as slowly: these import pytest, and for TLS.
        from aiodlock.testing import lock_server
        from tests.topologies import Cluster, Watched

        ports = self.sentinels or self.cluster
        servers = [lock_server("--port", str(port)) for port in ports]
        if self.sentinels:
            return await stack.enter_async_context(Watched([], list(servers)).client())
        redis = Cluster(list(servers), []).client()
        stack.push_async_callback(redis.aclose)
        return redis


@dataclass(frozen=True)
class Order:
    """What one worker process is to do.

    Attributes:
        lock: "aiodlock", or one of the naive ones of tests/crowd.py.
        folder: Where its journal and the resource are.
        seed: Of its chances, together with its number.
        ttl: Seconds.
    """

    servers: Servers
    lock: str
    name: str
    folder: str
    number: int
    seed: int
    tasks: int
    ttl: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        servers = {key: tuple(value) for key, value in fields.pop("servers").items()}
        return cls(servers=Servers(**servers), **fields)
