"""One worker process of the demo: `python -m aiodlock.cli._demo_worker`.

It reads its order as the first line of stdin, answers `ready`, begins at the second line, and
ends when stdin does: so it cannot outlive the demo, however that ends. What it does it says on
stdout, one line an event: `want`, `enter <ns> [<fencing token>]`, `leave <ns>`, `lost`.
"""

import asyncio
import os
import sys
import time
from typing import NoReturn

from aiodlock import LeaseLostError
from aiodlock.cli._demo_job import PAUSE_S, QUICK_S, SLOW_S, Job
from aiodlock.cli._demo_locks import LOCKS, Section


def main() -> None:
    """Work until stdin ends."""
    asyncio.run(_serve())


async def _serve() -> None:
    orders = await _stdin()
    job = Job.from_line(await _line_or_exit(orders))
    async with LOCKS[job.lock](job) as section:
        _say("ready")
        await _line_or_exit(orders)
        # No TaskGroup: its error would hide the message of the one that a worker died of.
        pact = asyncio.create_task(_line_or_exit(orders))
        try:
            await _work(job, section)
        finally:
            pact.cancel()


async def _work(job: Job, section: Section) -> None:
    began = time.monotonic()
    slow_begun = 0
    while True:
        _say("want")
        try:
            async with section() as token:
                slow_due = job.slow_due(time.monotonic() - began)
                await _stay(token, SLOW_S if slow_due > slow_begun else QUICK_S)
                slow_begun = slow_due
        except LeaseLostError:
            _say("lost")
        await asyncio.sleep(PAUSE_S)


async def _stay(token: int | None, seconds: float) -> None:
    _say(f"enter {time.monotonic_ns()}" + ("" if token is None else f" {token}"))
    try:
        await asyncio.sleep(seconds)
    finally:
        _say(f"leave {time.monotonic_ns()}")


def _say(event: str) -> None:
    # One unbuffered write per line: a SIGKILL after it loses nothing, and none is torn.
    os.write(sys.stdout.fileno(), event.encode() + b"\n")


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _line_or_exit(orders: asyncio.StreamReader) -> bytes:
    line = await orders.readline()
    return line or _exit()


def _exit() -> NoReturn:
    # Not by leaving: a worker that is being dismissed must not hand the lock on once more.
    os._exit(0)


if __name__ == "__main__":
    main()
