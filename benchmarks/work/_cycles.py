"""Tasks that acquire, then release, each its own name."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from .._orders import Order
from .._stage import Stage
from ..clients import Client, Pair
from ._crew import Crew

DRAIN_S = 5.0


async def cycles(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """As many cycles as go into the window; nobody ever waits for another."""
    pairs = [
        client.pair(f"own-{order.worker}-{number}", order.ttl_s) for number in range(order.tasks)
    ]
    await _turn(client, pairs, order.warm_up_s)
    await stage.ready()
    began_cpu_s = time.process_time()
    crew, counts, in_window, elapsed_s = await _turn(client, pairs, order.window_s)
    cpu_s = time.process_time() - began_cpu_s
    await stage.done()
    return {
        "cycles": sum(counts),
        "cycles_per_s": in_window / elapsed_s,
        "cpu_s": cpu_s,
        "errors": dict(crew.errors),
    }


async def _turn(
    client: Client, pairs: list[Pair], window_s: float
) -> tuple[Crew, list[int], int, float]:
    """The crew, cycles of each until all had ended, cycles in the window, its true length."""
    crew = Crew(client)
    counts = [0] * len(pairs)
    began_ns = time.monotonic_ns()
    end_ns = began_ns + int(window_s * 1e9)
    bodies = [_repeat(crew, pair, counts, place, end_ns) for place, pair in enumerate(pairs)]
    watch = asyncio.create_task(_count_at(end_ns, began_ns, counts))
    await crew.run(bodies, window_s + DRAIN_S)
    return crew, counts, *(await watch)


async def _count_at(end_ns: int, began_ns: int, counts: list[int]) -> tuple[int, float]:
    await asyncio.sleep((end_ns - time.monotonic_ns()) / 1e9)
    return sum(counts), (time.monotonic_ns() - began_ns) / 1e9


async def _repeat(crew: Crew, pair: Pair, counts: list[int], place: int, end_ns: int) -> None:
    acquire, release = pair
    now_ns = time.monotonic_ns
    # Once at least: a warm-up must have made every connection.
    while now_ns() < end_ns or not counts[place]:
        try:
            await release(await acquire())
        except Exception as error:
            await crew.failed(error)
        else:
            counts[place] += 1
