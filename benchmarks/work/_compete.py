"""Tasks that compete for one name."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .._orders import NAME, Order
from .._stage import Stage
from .._stays import Stay
from ..clients import Client, Pair
from ._crew import Crew

DRAIN_S = 5.0


async def compete(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """Everyone wants in again as soon as it is out; who was inside when is the result."""
    # Another name: who is left behind in the warm-up may hold it for the rest of its ttl.
    await _Contest(client, _pairs(client, order, f"{NAME}-warm"), order, order.warm_up_s).run()
    pairs = _pairs(client, order, NAME)
    await stage.ready()
    began_cpu_s = time.process_time()
    contest = _Contest(client, pairs, order, order.window_s)
    unserved_ms = await contest.run()
    cpu_s = time.process_time() - began_cpu_s
    await stage.done()
    return {
        "cpu_s": cpu_s,
        "began_ns": contest.began_ns,
        "ended_ns": contest.end_ns,
        "everyone": [contest.who(place) for place in range(order.tasks)],
        "stays": contest.stays,
        "unserved_ms": unserved_ms,
        "errors": dict(contest.crew.errors),
    }


def _pairs(client: Client, order: Order, name: str) -> list[Pair]:
    return [client.pair(name, order.ttl_s) for _ in range(order.tasks)]


@dataclass
class _Contest:
    client: Client
    pairs: list[Pair]
    order: Order
    window_s: float
    stays: list[Stay] = field(default_factory=list)

    async def run(self) -> list[float]:
        """Until all have left; for how long those had asked, in ms, who never got in."""
        self.crew = Crew(self.client)
        self.asked_ns: list[int | None] = [None] * len(self.pairs)
        self.began_ns = time.monotonic_ns()
        self.end_ns = self.began_ns + int(self.window_s * 1e9)
        bodies = [self._repeat(place, pair) for place, pair in enumerate(self.pairs)]
        await self.crew.run(bodies, self.window_s + DRAIN_S)
        now_ns = time.monotonic_ns()
        return [(now_ns - asked) / 1e6 for asked in self.asked_ns if asked is not None]

    def who(self, place: int) -> str:
        return f"{self.order.worker}.{place}"

    async def _repeat(self, place: int, pair: Pair) -> None:
        acquire, release = pair
        now_ns = time.monotonic_ns
        who = self.who(place)
        while (asked_ns := now_ns()) < self.end_ns:
            self.asked_ns[place] = asked_ns
            try:
                held = await acquire()
                entered_ns = now_ns()
                self.asked_ns[place] = None
                # Without this two holders in one process could never be seen side by side.
                await self.crew.step_aside()
                left_ns = now_ns()
                self.stays.append(Stay(who, asked_ns, entered_ns, left_ns))
                await release(held)
            except Exception as error:
                await self.crew.failed(error)
