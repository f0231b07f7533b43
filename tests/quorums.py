"""Independent servers, each with a way to it that can be disturbed, as a quorum for tests.

``python -m tests.quorums <order>`` is a worker of `tests.crowd` whose lock is a quorum's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redis import Redis as BlockingRedis

from aiodlock import LockClient
from aiodlock._store._quorum import QuorumStore
from aiodlock.testing import LockServer, lock_server
from tests import crowd, keys, wire
from tests.proxy import ChaosProxy
from tests.until import until
from tests.worlds import admin_of

KEY = "aiodlock:{n}"
FENCE = f"{KEY}:fence"


@contextmanager
def servers(count: int) -> Iterator[list[LockServer]]:
    """So many of them, that know nothing of each other."""
    with ExitStack() as stack:
        yield [stack.enter_context(lock_server()) for _ in range(count)]


def make_well(nodes: Sequence[LockServer]) -> None:
    """Running, empty, primaries without limits, however the test before left them."""
    for node in nodes:
        if node.process.poll() is not None:
            node.restart()
        node.resume()
        with BlockingRedis.from_url(node.url) as admin:
            admin.replicaof("NO", "ONE")
            admin.config_set("maxmemory", 0)
            admin.flushall()
            admin.config_resetstat()


class Nodes:
    """The servers of a quorum, seen from outside; clients on them go through `proxies`.

    Attributes:
        admins: A client of each, for looking at keys.
        proxies: The way to each; `open` makes clients that take it.
    """

    def __init__(self, servers: list[LockServer], proxies: list[ChaosProxy]) -> None:
        self.servers = servers
        self.proxies = proxies
        self.admins = [admin_of(server) for server in servers]

    @property
    def urls(self) -> list[str]:
        """Of the servers themselves."""
        return [server.url for server in self.servers]

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[LockClient]:
        """A client through the proxies; `nodes` names other ones."""
        nodes = options.pop("nodes", [proxy.url for proxy in self.proxies])
        async with LockClient.quorum(nodes, **options) as locks:
            yield locks

    async def values(self, key: str = KEY) -> list[str | None]:
        """What stands in *key* on each; None: nothing."""
        found: list[Any] = await asyncio.gather(*(admin.get(key) for admin in self.admins))
        return found

    async def put(self, key: str, value: str | int, *which: int) -> None:
        """Have *value* in *key* on these."""
        await asyncio.gather(*(self.admins[node].set(key, value, px=60_000) for node in which))

    async def delete(self, key: str, *which: int) -> None:
        """Have nothing in *key* on these, where something is."""
        assert [await self.admins[node].delete(key) for node in which] == [1] * len(which)

    async def delete_fences(self) -> None:
        """Have every counter lost."""
        await asyncio.gather(*(admin.delete(FENCE) for admin in self.admins))

    async def left(self) -> dict[int, list[str]]:
        """What should not be there when nobody holds, by node."""
        found = {
            node: await keys.leftovers(admin, ignoring_tombstones=True)
            for node, admin in enumerate(self.admins)
        }
        return {node: names for node, names in found.items() if names}

    async def free(self) -> None:
        """Wait until nothing is left anywhere: a slow node may be told last."""
        await until(lambda: _is_empty(self), 5.0)

    async def calls(self, command: str = "evalsha") -> list[int]:
        """How many times each has done *command*."""
        return [await wire.calls(admin, command) for admin in self.admins]


@asynccontextmanager
async def nodes_of(servers: list[LockServer]) -> AsyncIterator[Nodes]:
    """These servers, made well, with a proxy before each."""
    make_well(servers)  # In this thread: what it starts dies with the thread.
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(ChaosProxy(server.port)) for server in servers]
        nodes = Nodes(servers, proxies)
        for admin in nodes.admins:
            await stack.enter_async_context(admin)
        try:
            yield nodes
        finally:
            for server in servers:
                server.resume()


def store_of(locks: LockClient) -> QuorumStore:
    """Where the leases of *locks* live."""
    assert locks._session is not None
    store = locks._session.store
    assert isinstance(store, QuorumStore)
    return store


async def warm(locks: LockClient, name: str = "warm") -> None:
    """Every node is connected and knows the scripts."""
    store = store_of(locks)
    async with locks.lock(name).acquire(wait_timeout=10) as lease:
        await lease.extend()
    await until(lambda: all(not node._asked for node in store._nodes), 10.0)


async def _is_empty(nodes: Nodes) -> bool:
    return await nodes.left() == {}


# In a worker process.


@asynccontextmanager
async def locks_of(order: crowd.Order) -> AsyncIterator[crowd.Section]:
    """The library, on the quorum whose URLs are the order's, separated by blanks."""
    async with LockClient.quorum(order.url.split(), label=f"worker-{order.number}") as locks:
        lock = locks.lock(crowd.NAME, ttl=order.ttl)

        @asynccontextmanager
        async def section() -> AsyncIterator[crowd.Grant]:
            async with lock as lease:
                lease.check()
                deadline_ns = time.monotonic_ns() + int(lease.remaining * 1e9)
                yield crowd.Grant(lease.fencing_token, deadline_ns, lambda: lease.is_held)

        yield section


async def worker(order: crowd.Order) -> crowd.Worker:
    """A new process that competes by *order*, as soon as it is `ready`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.quorums", json.dumps(asdict(order))),
        stdin=PIPE,
        stdout=PIPE,
        cwd=Path(__file__).parent.parent,
    )
    return crowd.Worker(order, process)


if __name__ == "__main__":
    crowd.LOCKS["quorum"] = locks_of
    crowd._main()
