"""Tasks that wait while one holds."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from .._orders import NAME, Order
from .._stage import Stage
from ..clients import Client, Pair
from ._crew import Crew

SETTLE_S = 1.0
HOLDER_TTL_S = 60.0


async def wait(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """What waiting costs while nothing happens."""
    waiters = await _Waiters.begin(client, order)
    waiters.start()
    await asyncio.sleep(SETTLE_S)
    await stage.ready()
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(order.window_s)
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    await stage.done()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "overlaps": waiters.entered,
        "errors": dict(waiters.crew.errors),
    }


async def queue(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """Nobody waits, then all do: for who compares the server's memory."""
    waiters = await _Waiters.begin(client, order)
    await stage.ready()
    waiters.start()
    await asyncio.sleep(SETTLE_S)
    await stage.done()
    return {"overlaps": waiters.entered, "errors": dict(waiters.crew.errors)}


class _Waiters:
    """Those who wait; none of them should get in."""

    def __init__(self, client: Client, order: Order) -> None:
        self.crew = Crew(client)
        self.entered = 0
        pairs = [client.pair(NAME, order.ttl_s) for _ in range(order.tasks)]
        self._bodies = [self._ask(pair) for pair in pairs]

    @classmethod
    async def begin(cls, client: Client, order: Order) -> _Waiters:
        """With one who holds for longer than anybody looks."""
        holder = client.pair(NAME, HOLDER_TTL_S)
        held = await holder.acquire()
        waiters = cls(client, order)
        waiters._held = held  # Some let go of what is forgotten.
        return waiters

    _held: object

    def start(self) -> None:
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.crew.run(self._bodies, HOLDER_TTL_S)

    async def _ask(self, pair: Pair) -> None:
        try:
            await pair.acquire()
        except Exception as error:
            await self.crew.failed(error)
        else:
            self.entered += 1
