"""What `aiodlock doctor` measures at a server: its clock, how long a call takes, and a message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from redis.asyncio.client import PubSub
from redis.exceptions import ResponseError

from aiodlock import _names
from aiodlock.cli._doctor_asker import Asker
from aiodlock.cli._doctor_facts import Clock, said

# Of anything that is measured: at most so many, or so long.
_SAMPLES: Final = 30
_READINGS: Final = 5  # of the clock; the quickest one counts
_MESSAGES: Final = 5
_SAMPLES_S: Final = 2.0

wall_clock = time.time


async def clock(asker: Asker) -> Clock | None:
    """Between two readings of our own; the quickest answer says it best."""
    readings: list[Clock] = []
    end = time.monotonic() + _SAMPLES_S
    while len(readings) < _READINGS and time.monotonic() < end:
        before = wall_clock()
        told = await asker.ask("TIME", "TIME")
        after = wall_clock()
        if told is None:
            return None
        seconds, microseconds = told
        middle = (before + after) / 2
        now = int(seconds) + int(microseconds) / 1e6
        readings.append(Clock(now - middle, abs(after - before) / 2))
    return min(readings, key=lambda reading: reading.within_s)


async def latency(asker: Asker, command: Sequence[str]) -> None:
    """How long *command* takes."""
    end = time.monotonic() + _SAMPLES_S
    for _ in range(_SAMPLES):
        started_at = time.monotonic()
        if await asker.ask(command[0], *command) is None:
            return
        asker.facts.latencies_s.append(time.monotonic() - started_at)
        if time.monotonic() > end:
            return


async def messages(asker: Asker) -> None:
    """Whether what is published on an inbox of ours arrives."""
    asker.check_time()
    async with asker.listener.pubsub() as inbox:
        try:
            asker.facts.message_delays_s = await _heard(asker, inbox)
        except ResponseError as error:
            asker.facts.message_trouble = said(error)


async def _heard(asker: Asker, inbox: PubSub) -> list[float]:
    channel = _names.inbox(asker.plan.prefix, _names.new_client_id())
    limit_s = asker.plan.request_timeout
    delays: list[float] = []
    await inbox.subscribe(channel)
    if await inbox.get_message(timeout=limit_s) is None:
        asker.facts.message_trouble = f"no answer to SUBSCRIBE within {limit_s:g} s"
        return delays
    end = time.monotonic() + _SAMPLES_S
    while len(delays) < _MESSAGES and time.monotonic() < end:
        started_at = time.monotonic()
        await asker.redis.publish(channel, "")
        if await inbox.get_message(timeout=limit_s) is None:
            asker.facts.message_trouble = f"published, but not heard within {limit_s:g} s"
            break
        delays.append(time.monotonic() - started_at)
    return delays
