"""Many at work at once: as tasks, or as threads where the client blocks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from ..clients import Client

PAUSE_AFTER_ERROR_S = 0.001
THREAD_STACK_BYTES = 256 * 1024


class Crew:
    """Runs bodies side by side, lets them step aside, counts their errors."""

    def __init__(self, client: Client) -> None:
        self._in_threads = client.in_threads
        self.errors: Counter[str] = Counter()

    async def run(self, bodies: Sequence[Coroutine[Any, Any, None]], within: float) -> int:
        """Run all; how many had to be left behind after *within* seconds."""
        if self._in_threads:
            return await self._run_threads(bodies, within)
        tasks = [asyncio.create_task(body) for body in bodies]
        _, pending = await asyncio.wait(tasks, timeout=within)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=2.0)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                self.errors[type(error).__name__] += 1
        return len(pending)

    async def _run_threads(self, bodies: Sequence[Coroutine[Any, Any, None]], within: float) -> int:
        threading.stack_size(THREAD_STACK_BYTES)
        threads = [threading.Thread(target=finish, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        give_up_at = time.monotonic() + within
        await asyncio.to_thread(_join, threads, give_up_at)
        return sum(thread.is_alive() for thread in threads)

    async def step_aside(self) -> None:
        """Let every other one run that can."""
        if self._in_threads:
            time.sleep(0)  # noqa: ASYNC251 - a body in a thread is no task
        else:
            await asyncio.sleep(0)

    async def failed(self, error: Exception) -> None:
        """Count it, and do not spin on it."""
        self.errors[type(error).__name__] += 1
        if self._in_threads:
            time.sleep(PAUSE_AFTER_ERROR_S)  # noqa: ASYNC251
        else:
            await asyncio.sleep(PAUSE_AFTER_ERROR_S)


def _join(threads: Sequence[threading.Thread], give_up_at: float) -> None:
    for thread in threads:
        thread.join(max(0.0, give_up_at - time.monotonic()))


def finish(body: Coroutine[Any, Any, None]) -> None:
    """Run a body whose awaits all block instead: it ends in one step."""
    try:
        body.send(None)
    except StopIteration:
        return
    raise RuntimeError("a client for threads has awaited something")
