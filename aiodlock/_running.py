"""Where we run: whether there is a loop, a task, a way to await."""

from __future__ import annotations

import asyncio
import inspect


def may_await(error: BaseException | None) -> bool:
    """Whether a block that ends with *error* can still await.

    A coroutine that is destroyed cannot; an async generator that is closed, in a loop, can. Where
    GeneratorExit was thrown in tells which: it may have passed others on its way.
    """
    if not isinstance(error, GeneratorExit):
        return True
    thrown_at = error.__traceback__
    while thrown_at is not None and thrown_at.tb_next is not None:
        thrown_at = thrown_at.tb_next
    if thrown_at is None or running_loop() is None:
        return False
    return bool(thrown_at.tb_frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread; without it, nothing can be awaited here."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def running_task() -> asyncio.Task[object] | None:
    """The current task, if there is one."""
    return asyncio.current_task() if running_loop() is not None else None
