"""One client at one kind of work, once: the figures of one run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from aiodlock.testing import LockServer, lock_server

from ._hand import Hand
from ._orders import Order
from ._reduce import Measured, Raw, reduced
from ._rows import Row
from ._server import Observer
from ._stage import DONE, END, GO, READY
from .clients import CLIENTS

READY_WITHIN_S = 45.0
DONE_WITHIN_S = 30.0
RESULT_WITHIN_S = 15.0
SERVER_OPTIONS = ("--maxclients", "12000")


async def measure(row: Row, client: str, *, window_s: float, warm_up_s: float) -> Measured:
    """One run, on servers of its own.

    Raises:
        Failed: There are no figures; the message says why.
    """
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(_servers(row.nodes))
        ports = tuple(server.port for server in servers)
        observers = [await stack.enter_async_context(Observer(port)) for port in ports]
        order = Order(
            client=client, work=row.work, ports=ports, tasks=row.tasks, window_s=window_s,
            warm_up_s=warm_up_s, ttl_s=row.ttl_s,
        )  # fmt: skip
        orders = [replace(order, worker=worker) for worker in range(row.processes)]
        hands = [await stack.enter_async_context(Hand(one)) for one in orders]
        raw = await _together(hands, observers, row, client, window_s)
    return reduced(raw)


async def server_version() -> str:
    """Of the server that is measured with."""
    async with _servers(1) as (server,), Observer(server.port) as observer:
        return await observer.version()


@asynccontextmanager
async def _servers(nodes: int) -> AsyncIterator[Sequence[LockServer]]:
    if nodes == 1:
        async with lock_server(*SERVER_OPTIONS) as server:
            yield [server]
        return
    from tests.topologies import cluster

    async with cluster() as made:
        yield made.nodes


async def _together(
    hands: Sequence[Hand], observers: Sequence[Observer], row: Row, client: str, window_s: float
) -> Raw:
    """Let all begin at once; look at the servers before, midway, and after."""
    keys = row.work in ("names", "queue")
    for hand in hands:
        await hand.hears(READY, READY_WITHIN_S)
    before = [await observer.look(keys=keys) for observer in observers]
    for hand in hands:
        hand.says(GO)
    await asyncio.sleep(window_s / 2)
    midway = max([await observer.connections() for observer in observers])
    end = time.monotonic() + window_s / 2 + DONE_WITHIN_S
    for hand in hands:
        await hand.hears(DONE, end - time.monotonic())
    after = [await observer.look(keys=keys) for observer in observers]
    for hand in hands:
        hand.says(END)
    told = [await hand.result(RESULT_WITHIN_S) for hand in hands]
    looks = list(zip(before, after, strict=True))
    return Raw(row, CLIENTS[client].habits, looks, midway, told)
