"""Work that must be finished although the caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

import anyio

_log = logging.getLogger("aiodlock")

# How long a cancelled caller waits for its own clean-up.
_CANCELLED_S: Final = 1.0


class Background:
    """Tasks that go on after their callers have left, until `drain`.

    Bound: one for each acquisition that is given up and each request that is late, each at most
    one request's time.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, object], what: str, name: str | None = None
    ) -> asyncio.Task[object]:
        """Run *work* in a task of its own; a failure is logged, for nobody waits for it."""
        task = asyncio.get_running_loop().create_task(
            _logged(work, what, name), name=f"aiodlock {_about(what, name)}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before its first step would leave it unawaited.
        task.add_done_callback(lambda _: work.close())
        return task

    async def finish(
        self, work: Coroutine[Any, Any, object], what: str, name: str | None = None
    ) -> asyncio.CancelledError | None:
        """Start *work*, then `outlast` it, for 1 s at most."""
        return await outlast(self.start(work, what, name), within=_CANCELLED_S)

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


async def _logged(work: Coroutine[Any, Any, object], what: str, name: str | None) -> object:
    try:
        return await work
    except Exception as error:
        _log.warning("%s failed: %s", _about(what, name), error, extra={"lock_name": name})
        return None


def _about(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {name!r}"
