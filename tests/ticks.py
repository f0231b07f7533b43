"""Instances of one service that start the same job at each tick of clocks that differ.

The processes run this file: ``python -m tests.ticks <order>``. Each says on stdout which ticks it
took, when it asked, and when it had the lock; and dies with its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Self

from aiodlock import LockClient

NAME = "tick"


@dataclass(frozen=True)
class Order:
    """What one instance is to do.

    Attributes:
        began_s: When tick 0 was, on the clock that all processes of a machine share.
        behind_s: By how much this instance's clock is behind.
        hold_s: Its `hold_at_least`; None: none.
    """

    url: str
    began_s: float
    period_s: float
    hold_s: float | None
    behind_s: float = 0.0
    job_s: float = 0.005


class Run(NamedTuple):
    """One instance got to run the job of one tick."""

    tick: int
    asked_s: float
    got_s: float


async def _serve(order: Order) -> None:
    async with LockClient.from_url(order.url) as locks:
        # As long as the name stays taken: so it does if the instance dies during the job.
        lock = locks.lock(NAME, ttl=order.hold_s or 1.0, hold_at_least=order.hold_s)
        print("ready", flush=True)
        while True:
            clock_s = time.monotonic() - order.began_s - order.behind_s
            tick = max(0, int(clock_s // order.period_s) + 1)
            await asyncio.sleep(tick * order.period_s - clock_s)
            asked_s = time.monotonic()
            lease = await lock.try_acquire()
            if lease is None:
                continue
            async with lease:
                print(tick, asked_s, time.monotonic(), flush=True)
                await asyncio.sleep(order.job_s)


def _main() -> None:
    asyncio.run(_serve(Order(**json.loads(sys.argv[1]))))


# In the test.


class Instance:
    """One process; `runs` is what it said when it was killed."""

    def __init__(self, order: Order, process: Process) -> None:
        self.order = order
        self._process = process

    @classmethod
    async def start(cls, order: Order) -> Self:
        """One that is connected."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.ticks", json.dumps(asdict(order))), stdout=PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return cls(order, process)

    async def kill(self) -> list[Run]:
        """SIGKILL; what it ran, but for a line that it had not ended."""
        self._process.kill()
        output, _ = await self._process.communicate()
        lines = [line.split() for line in output.decode().split("\n")[:-1]]
        return [Run(int(tick), float(asked), float(got)) for tick, asked, got in lines]


async def runs_of(order: Order, *, behind_s: list[float], kills: int) -> list[Run]:
    """What instances with such clocks run, while one after the other is killed and replaced."""
    instances = [await Instance.start(replace(order, behind_s=late)) for late in behind_s]
    runs: list[Run] = []
    try:
        for number in range(kills):
            # Within a job, as often as not: jobs begin with the ticks.
            to_tick_s = (order.began_s - time.monotonic()) % order.period_s
            await asyncio.sleep(2 * order.period_s + to_tick_s + order.job_s / 2)
            killed = instances.pop(0)
            runs += await killed.kill()
            instances.append(await Instance.start(killed.order))
            print(f"killed {number}", file=sys.stderr)
        await asyncio.sleep(2 * order.period_s)
    finally:
        for instance in instances:
            runs += await instance.kill()
    return sorted(runs, key=lambda run: run.asked_s)


if __name__ == "__main__":
    _main()
