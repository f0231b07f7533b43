"""Waiting for what another task, process or machine brings about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

POLL_S = 0.002


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = 3.0) -> None:
    """Return once *condition* holds; fail if it does not within *limit_s* seconds.

    Args:
        condition: Asked again and again; may be async, to ask a server.
        limit_s: Far more than it should take: a bound on hanging, not a measurement.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    async with asyncio.timeout(limit_s):
        while loop.time() < end:  # On 3.11 redis-py may swallow the cancel of a timeout.
            answer = condition()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(POLL_S)
        raise TimeoutError


async def forever() -> None:
    """Wait for a cancel, which must come."""
    loop = asyncio.get_running_loop()
    never = loop.create_future()
    alarm = loop.call_later(10, never.set_exception, AssertionError("no cancel came"))
    try:
        await never
    finally:
        alarm.cancel()
