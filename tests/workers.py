"""A process with a client of its own, which can be killed."""

from __future__ import annotations

import asyncio
import sys
from typing import Self

PROGRAM = """
import asyncio, sys
from aiodlock import LockClient

async def hold(locks, name):
    async with locks.lock(name):
        await asyncio.Event().wait()

async def main(url, ttl):
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tasks = []
    async with LockClient.from_url(url, ttl=ttl) as locks:
        print("ready", flush=True)
        while name := (await lines.readline()).decode().rstrip("\\n"):
            tasks.append(asyncio.create_task(hold(locks, name)))

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


class Worker:
    """``async with Worker(url, ttl=1.0) as worker``; it is killed at the end if not before.

    What it acquires it holds for ever.
    """

    def __init__(self, url: str, *, ttl: float) -> None:
        self._arguments = (url, str(ttl))

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", PROGRAM, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            self.kill()
        await self._process.communicate()

    async def asks_for(self, name: str, *, times: int = 1) -> None:
        """Tell it to acquire *name*, in so many tasks; do not wait until it has done so."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n".encode() * times)
        await self._process.stdin.drain()

    def kill(self) -> None:
        """SIGKILL: nothing is released, nothing closed but by the kernel."""
        self._process.kill()
