"""A program of the documents as a real process, whose lines are read and which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Self

from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

import conftest

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0
"""Far more than a program should take: a bound on hanging, not a measurement."""


class Program:
    """``async with Program("-m", "json.tool") as program``; what is left of it is killed.

    It gets a process group of its own, so that its children end with it.

    Attributes:
        lines: What it has written so far, errors too.
    """

    def __init__(
        self, *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = arguments
        self._cwd = cwd
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self.lines: list[str] = []

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            cwd=self._cwd,
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()
        await self.process.communicate()

    def kill(self) -> None:
        """SIGKILL, to its children too: nothing is released, nothing closed but by the kernel."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def says(self, text: str) -> str:
        """The next line with *text* in it; fails if there is none in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                async for line in self._rest():
                    if text in line:
                        return line
        raise AssertionError(f"it did not say {text!r}:\n{self.text}")

    async def ends(self) -> int:
        """Its exit code."""
        async with asyncio.timeout(LIMIT_S):
            async for _ in self._rest():
                pass
            return await self.process.wait()

    async def _rest(self) -> AsyncIterator[str]:
        """Its lines from here on, each kept."""
        assert self.process.stdout is not None
        while line := (await self.process.stdout.readline()).decode():
            self.lines.append(line.rstrip("\n"))
            yield self.lines[-1]

    @property
    def text(self) -> str:
        """All that it has written so far."""
        return "\n".join(self.lines)


async def output_of(
    *arguments: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> list[str]:
    """The lines of a program that runs to its end in good order."""
    async with Program(*arguments, cwd=cwd, env=env) as program:
        assert await program.ends() == 0, program.text
        return program.lines


def blocks_of(page: str, heading: str) -> list[str]:
    """The Python blocks of *page* (below docs/) under one heading."""
    path = ROOT / "docs" / page
    document = Document.parse(str(path), CodeBlockParser("python", conftest.run_block))
    begin = document.text.index(f"\n{heading}\n")
    level = heading.partition(" ")[0]
    end = document.text.find(f"\n{level} ", begin + 1)
    return [
        str(example.parsed)
        for example in document.examples()
        if begin < example.start and (end < 0 or example.start < end)
        if document.text.startswith("```", example.start)  # not the invisible ones
    ]
