"""One server gets into trouble while tasks acquire, then release."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .._orders import Order
from .._stage import Stage
from ..clients import Client, Pair
from ._crew import Crew

DRAIN_S = 5.0
CALM_PART = 0.4
"""Of the window: so long they are at work before."""


async def trouble(client: Client, order: Order, stage: Stage) -> dict[str, Any]:
    """The same work before and in trouble, over the same connections, the one beside the other."""
    pairs = [
        client.pair(f"own-{order.worker}-{number}", order.ttl_s) for number in range(order.tasks)
    ]
    await _Spell(client, pairs).run(order.warm_up_s)
    calm = _Spell(client, pairs)
    await calm.run(order.window_s * CALM_PART)
    await stage.ready()
    troubled = _Spell(client, pairs)
    await troubled.run(order.window_s)
    await stage.done()
    return {
        "calm": calm.told(),
        "troubled": troubled.told(),
        "errors": dict(troubled.crew.errors),
    }


@dataclass
class _Spell:
    client: Client
    pairs: list[Pair]
    cycles: int = 0
    longest_ns: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    crew: Crew = field(init=False)

    async def run(self, window_s: float) -> None:
        """Until all have ended, or hung for too long."""
        self.crew = Crew(self.client)
        began_ns, began_cpu_s = time.monotonic_ns(), time.process_time()
        self._end_ns = began_ns + int(window_s * 1e9)
        self._asked_ns: list[int | None] = [None] * len(self.pairs)
        bodies = [self._repeat(place, pair) for place, pair in enumerate(self.pairs)]
        await self.crew.run(bodies, window_s + DRAIN_S)
        now_ns = time.monotonic_ns()
        self.seconds = (now_ns - began_ns) / 1e9
        self.cpu_s = time.process_time() - began_cpu_s
        hung_ns = [now_ns - asked_ns for asked_ns in self._asked_ns if asked_ns is not None]
        self.longest_ns = max([self.longest_ns, *hung_ns])

    def told(self) -> dict[str, float]:
        return {
            "cycles": self.cycles,
            "seconds": self.seconds,
            "cpu_s": self.cpu_s,
            "longest_ms": self.longest_ns / 1e6,
        }

    async def _repeat(self, place: int, pair: Pair) -> None:
        acquire, release = pair
        now_ns = time.monotonic_ns
        asked_ns = now_ns()
        # Once at least, as in the other work.
        while asked_ns < self._end_ns or not self.cycles:
            self._asked_ns[place] = asked_ns
            try:
                await release(await acquire())
            except Exception as error:
                await self.crew.failed(error)
            else:
                self.cycles += 1
            ended_ns = now_ns()
            self.longest_ns = max(self.longest_ns, ended_ns - asked_ns)
            asked_ns = ended_ns
        self._asked_ns[place] = None
