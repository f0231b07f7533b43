"""Work that must be finished although the caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import anyio

_log = logging.getLogger("aiodlock")


class Background:
    """Tasks that go on after their callers have left, until `drain`.

    Bound: each is the clean-up of one acquisition and lasts at most one request's time.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, object], what: str) -> asyncio.Task[object]:
        """Run *work* in a task of its own; a failure is logged, for nobody waits for it."""
        task = asyncio.get_running_loop().create_task(_logged(work, what), name=f"aiodlock {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(
        self, work: Coroutine[Any, Any, object], what: str, *, within: float
    ) -> asyncio.CancelledError | None:
        """Start *work*, then `outlast` it."""
        return await outlast(self.start(work, what), within=within)

    async def drain(self) -> None:
        """Wait until every task has ended."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))


async def outlast(task: asyncio.Task[Any], *, within: float) -> asyncio.CancelledError | None:
    """Wait at most *within* seconds for *task*, however often the caller is cancelled.

    The anyio shield keeps a cancelled scope from cancelling at every await; native cancels get
    through it, so they are remembered.

    Returns:
        The last cancel that arrived meanwhile, for the caller to raise.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not task.done() and (left := end - loop.time()) > 0:
            try:
                await asyncio.wait((task,), timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
    return cancelled


async def _logged(work: Coroutine[Any, Any, object], what: str) -> object:
    try:
        return await work
    except Exception as error:
        _log.warning("%s failed: %s", what, error)
        return None
