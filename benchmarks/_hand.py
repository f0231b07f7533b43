"""A worker process, as the measuring process sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any, Self

from ._machine import ROOT
from ._orders import Order
from .clients import CLIENTS

LINE_BYTES_MAX = 1 << 28


class Failed(Exception):
    """A worker did not do what it was to do; the message says what it did instead."""


class Hand:
    """One worker process: ``async with Hand(order) as hand``; it is killed if it has not ended."""

    def __init__(self, order: Order) -> None:
        self._order = order

    async def __aenter__(self) -> Self:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __aexit__
        self._process = await asyncio.create_subprocess_exec(
            *_command(self._order),
            cwd=ROOT,
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._errors,
            limit=LINE_BYTES_MAX,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            # Not `kill()`: that looks for the end, and may take it from asyncio's own watcher.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._errors.close()

    def says(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def hears(self, word: str, within: float) -> None:
        """Wait for *word*.

        Raises:
            Failed: Something else came, or nothing.
        """
        line = await self._line(f"saying {word!r}", within)
        if line != word:
            raise Failed(f"said {line[:200]!r} instead of {word!r}")

    async def result(self, within: float) -> dict[str, Any]:
        """Its last word."""
        text = await self._line("its result", within)
        result: dict[str, Any] = json.loads(text)
        return result

    async def _line(self, what: str, within: float) -> str:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Failed(f"hung for {within:g} s before {what}") from None
        if not line:
            await self._process.wait()
            raise Failed(f"ended before {what}: {self._last_error()}")
        return line.decode().rstrip("\n")

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def _command(order: Order) -> list[str]:
    entry = CLIENTS[order.client]
    if not entry.is_node:
        return [sys.executable, "-m", "benchmarks.worker", order.as_json()]
    assert entry.apart is not None
    program = Path(__file__).parent / "clients" / entry.module
    return [shutil.which("node") or "node", str(program), str(entry.apart.path), order.as_json()]
