"""What a loop still has when a test believes that all is over: tasks, timers, unseen errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.until import until

SETTLE_S = 2.0


def tasks() -> Counter[str]:
    """The unfinished tasks beside the current one, counted by the function that they run."""
    current = asyncio.current_task()
    return Counter(
        getattr(task.get_coro(), "__qualname__", repr(task))
        for task in asyncio.all_tasks()
        if task is not current
    )


def timers() -> list[asyncio.TimerHandle]:
    """The timers set and not cancelled."""
    loop: Any = asyncio.get_running_loop()
    return [timer for timer in loop._scheduled if not timer.cancelled()]


async def settled(before: Counter[str]) -> Counter[str]:
    """The tasks that there are beyond *before*, once they had time to end: empty is well."""
    with suppress(TimeoutError):
        await until(lambda: not tasks() - before, SETTLE_S)
    return tasks() - before


@contextmanager
def loop_errors() -> Iterator[list[str]]:
    """Collect what the running loop's exception handler is told."""
    loop = asyncio.get_running_loop()
    seen: list[str] = []
    before = loop.get_exception_handler()

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        seen.append(f"{context.get('message')}: {context.get('exception')!r}")

    loop.set_exception_handler(note)
    try:
        yield seen
    finally:
        loop.set_exception_handler(before)
