"""`aiodlock run` as processes of their own, with the fate of what runs under them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.until import until

LIMIT_S = 30.0
# A command with a child of its own, which both live until they are ended.
FAMILY = ("sh", "-c", "sleep 600 & echo $$ $!; wait")
# The same, but SIGTERM does not end them.
STUBBORN = ("sh", "-c", "trap '' TERM; sleep 600 & echo $$ $!; wait")


class Run:
    """``async with Run(url, "NAME", "--", "COMMAND") as run``; killed at the end if not before.

    It is the leader of a session without a terminal.
    """

    def __init__(
        self, url: str | None, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = arguments
        self._environment = {key: text for key, text in os.environ.items() if key != "AIODLOCK_URL"}
        self._environment |= {} if url is None else {"AIODLOCK_URL": url}
        self._environment |= environment or {}
        self.pids: list[int] = []
        """What the command told of itself and its own."""

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiodlock", "run", *self._arguments),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()

    async def line(self) -> str:
        """The next line that the command prints."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    async def told(self, words: str) -> str:
        """The first line on stderr with *words*."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            async for line in self.process.stderr:
                if words in line.decode():
                    return line.decode()
        raise AssertionError(f"stderr ended without {words!r}")

    async def began(self) -> Self:
        """Once the command has told its process ids."""
        self.pids = [int(pid) for pid in (await self.line()).split()]
        assert all(map(is_alive, self.pids))
        return self

    async def ended(self) -> tuple[int, str, str]:
        """Its exit code, with the rest of what was printed on stdout and on stderr."""
        async with asyncio.timeout(LIMIT_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()

    async def family_gone(self) -> None:
        """Once none of the command's own is left; fails if one stays."""
        await until(lambda: not any(map(is_alive, self.pids)), limit_s=LIMIT_S)


async def run(
    url: str | None, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Its exit code, what it printed on stdout, and on stderr."""
    async with Run(url, *arguments, environment=environment) as running:
        return await running.ended()


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is more than a zombie."""
    return state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """`R`, `S`, `T` (stopped), `Z` and so on; nothing where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
