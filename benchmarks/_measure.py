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
from ._trouble import Trouble, befalling
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
        servers = await stack.enter_async_context(_servers(row))
        trouble = await stack.enter_async_context(befalling(servers[-1], row.trouble))
        ports = (*(server.port for server in servers[:-1]), trouble.port)
        # The one in trouble may not answer us, either.
        watched = servers[:-1] if row.trouble else servers
        observers = [await stack.enter_async_context(Observer(one.port)) for one in watched]
        order = Order(
            client=client, work=row.work, ports=ports, tasks=row.tasks, window_s=window_s,
            warm_up_s=warm_up_s, ttl_s=row.ttl_s,
        )  # fmt: skip
        orders = [replace(order, worker=worker) for worker in range(row.processes)]
        hands = [await stack.enter_async_context(Hand(one)) for one in orders]
        raw = await _together(hands, observers, trouble, row, client, window_s)
    return reduced(raw)


async def server_version() -> str:
    """Of the server that is measured with."""
    async with lock_server() as server, Observer(server.port) as observer:
        return await observer.version()


@asynccontextmanager
async def _servers(row: Row) -> AsyncIterator[Sequence[LockServer]]:
    if row.nodes > 1:
        from tests.topologies import cluster

        async with cluster() as made:
            yield made.nodes
        return
    async with AsyncExitStack() as stack:
        servers = [lock_server(*SERVER_OPTIONS) for _ in range(row.quorum or 1)]
        yield [await stack.enter_async_context(server) for server in servers]


async def _together(
    hands: Sequence[Hand],
    observers: Sequence[Observer],
    trouble: Trouble,
    row: Row,
    client: str,
    window_s: float,
) -> Raw:
    """Let all begin at once; look at the servers before, midway, and after."""
    keys = row.work in ("names", "queue")
    for hand in hands:
        await hand.hears(READY, READY_WITHIN_S)
    before = [await observer.look(keys=keys) for observer in observers]
    async with trouble:
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
