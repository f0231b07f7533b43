"""Leases that are held."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from pathlib import Path
from typing import Any

import redis

from .._orders import Order
from .._stage import Stage
from .._stays import percentile
from ..clients import Client

AT_ONCE = 100
TICK_S = 0.005
SETTLE_TTLS = 1.2
"""After so many ttls every lease has been extended, with whatever that needs."""
BUFFERS_SHRINK_S = 3.0
"""After so long a server has taken back the room of buffers that are not used."""
ASKED_AT_ONCE = 1000
PAGE_KB = 4


async def hold(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """What holding costs: CPU, lateness of the loop, leases lost, memory."""
    await _acquire(client, order, count=AT_ONCE, kind="warm")
    before_kb = _resident_kb()
    leases = await _acquire(client, order)
    await stage.ready()
    ticker = asyncio.create_task(_lateness_ms(order.window_s))
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(order.window_s)
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    late_ms = await ticker
    resident_kb = _resident_kb() - before_kb
    await stage.done()
    return {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "lost": await _lost(client, order, leases),
        "lag_p99_ms": percentile(late_ms, 99),
        "lag_max_ms": max(late_ms),
        "resident_kb": resident_kb / order.tasks,
        "errors": {},
    }


async def names(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """Few names are held, then many: for who compares the server's memory."""
    await _acquire(client, order, count=AT_ONCE, kind="warm")
    await asyncio.sleep(BUFFERS_SHRINK_S)
    await stage.ready()
    leases = await _acquire(client, order)
    await asyncio.sleep(BUFFERS_SHRINK_S)
    await stage.done()
    return {"lost": await _lost(client, order, leases), "errors": {}}


async def traced(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """What a lease weighs in the client, by the count of the allocator."""
    await _acquire(client, order, count=AT_ONCE, kind="warm")
    await stage.ready()
    gc.collect()
    tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    leases = await _acquire(client, order)
    await asyncio.sleep(SETTLE_TTLS * order.ttl_s)
    gc.collect()
    after_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await stage.done()
    return {
        "traced_kb": (after_bytes - before_bytes) / order.tasks / 1024,
        "lost": await _lost(client, order, leases),
        "errors": {},
    }


async def _acquire(
    client: Client, order: Order, count: int | None = None, kind: str = "lease"
) -> list[tuple[str, Any]]:
    """So many leases, each with its key; a hundred are asked for at a time."""
    names = [f"{kind}-{number}" for number in range(count or order.tasks)]
    leases: list[tuple[str, Any]] = []
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        # In threads too: an await that blocks is an await.
        held = await asyncio.gather(*(client.pair(name, order.ttl_s).acquire() for name in some))
        leases += zip((client.key(name) for name in some), held, strict=True)
    return leases


async def _lateness_ms(window_s: float) -> list[float]:
    """How late the loop wakes a task that wants to be woken every 5 ms."""
    loop = asyncio.get_running_loop()
    end, late_ms = loop.time() + window_s, []
    while (now := loop.time()) < end:
        await asyncio.sleep(TICK_S)
        late_ms.append((loop.time() - now - TICK_S) * 1e3)
    return late_ms


async def _lost(client: Client, order: Order, leases: list[tuple[str, Any]]) -> int:
    """Leases that the client gave up, or that the server has not."""
    gone = await asyncio.to_thread(_gone, order.port, [key for key, _ in leases])
    return sum(
        is_gone or not client.is_held(held) for is_gone, (_, held) in zip(gone, leases, strict=True)
    )


def _gone(port: int, keys: list[str]) -> list[bool]:
    found: list[bool] = []
    with redis.Redis(port=port, driver_info=None) as server:
        for first in range(0, len(keys), ASKED_AT_ONCE):
            pipeline = server.pipeline(transaction=False)
            for key in keys[first : first + ASKED_AT_ONCE]:
                pipeline.exists(key)
            found += [not there for there in pipeline.execute()]
    return found


def _resident_kb() -> float:
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * PAGE_KB
