"""What there is more of after thousands of cycles than before them, of all that should balance."""

from __future__ import annotations

import gc
import logging
import traceback
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import blockbuster
from blockbuster import BlockBuster
from redis.asyncio import Redis

from tests import keys, leaks
from tests.until import until

WARM_UP = 30
"""At most so many cycles first, in which what is made once is made."""

BYTES_LIMIT = 40_000
"""What the loop's heap of cancelled timers and the caches of others come and go by.

Seventy bytes for each of 600 cycles would be more.
"""

RECORDS_LIMIT = 20
"""How many log records are kept for the report; one is a finding."""

SETTLE_S = 5.0

Cycle = Callable[[], Awaitable[object]]


class Standing(NamedTuple):
    """What there is now."""

    tasks: Counter[str]
    timers: int
    connections: int
    keys: list[str]

    @classmethod
    async def now(cls, redis: Redis) -> Standing:
        """*redis* looks at the server from outside; its own connection counts, then as now."""
        connections = len(await redis.client_list())
        left = await keys.leftovers(redis, ignoring_tombstones=True)
        return cls(leaks.tasks(), len(leaks.timers()), connections, left)

    def more_than(self, before: Standing) -> dict[str, object]:
        """What there is more of, by kind; nothing: it balances."""
        # A connection has one timer for all its requests, a client for its watchdogs, set or not.
        links = max(self.connections, before.connections)
        found: dict[str, object] = {
            "tasks": dict(self.tasks - before.tasks),
            "timers": max(0, self.timers - before.timers - links),
            "connections": self.connections - before.connections,
            "keys": sorted(set(self.keys) - set(before.keys)),
        }
        return {kind: more for kind, more in found.items() if more}


async def imbalance(
    cycle: Cycle, redis: Redis, *, times: int, quiet: bool = True
) -> dict[str, object]:
    """What *cycle*, awaited 2 * *times* times one after the other, leaves behind, by kind.

    Kinds: tasks, timers, connections, keys, bytes, records (of any logger, above DEBUG),
    warnings, errors (in the loop's exception handler).

    Args:
        cycle: Ends as it began.
        redis: A plain client for looking from outside.
        times: The second half of the cycles must need no more memory than the first left.
        quiet: Whether a log record is a finding; not where something goes wrong on purpose.
    """
    with leaks.loop_errors() as errors, noted_records() as records, noted_warnings() as warned:
        await _repeated(cycle, min(WARM_UP, times))
        before = await _settled(redis, None)
        grown = await _grown_bytes(cycle, times)
        after = await _settled(redis, before)
        gc.collect()
    found = after.more_than(before)
    if sum(grown.values()) > BYTES_LIMIT:
        found["bytes"] = dict(grown.most_common(5))
    found |= {"records": records} if records and quiet else {}
    found |= {"warnings": warned} if warned else {}
    found |= {"errors": errors} if errors else {}
    return found


async def _repeated(cycle: Cycle, times: int) -> None:
    for _ in range(times):
        await cycle()


async def _settled(redis: Redis, before: Standing | None) -> Standing:
    """As soon as it is no more than before; what a moment's patience does not end is left."""

    async def is_balanced() -> bool:
        now = await Standing.now(redis)
        return not now.more_than(before or now)

    with suppress(TimeoutError):
        await until(is_balanced, SETTLE_S)
    return await Standing.now(redis)


async def _grown_bytes(cycle: Cycle, times: int) -> Counter[str]:
    """By the line that asked for them; negative where some were given back."""
    tracemalloc.start()
    try:
        await _repeated(cycle, times)
        first = _traced()
        await _repeated(cycle, times)
        grown = _traced()
    finally:
        tracemalloc.stop()
    grown.subtract(first)
    return grown


def _traced() -> Counter[str]:
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces(
        (tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__))
    )
    return Counter({str(each.traceback): each.size for each in snapshot.statistics("lineno")})


@contextmanager
def noted_records() -> Iterator[list[str]]:
    """Every log record above DEBUG meanwhile, of any logger."""
    seen: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(seen) < RECORDS_LIMIT and record.levelno > logging.DEBUG:
                seen.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    root = logging.getLogger()
    # Alone: pytest's own handlers keep every record, which would be found as bytes.
    handlers, root.handlers = root.handlers, [Noting()]
    level = root.level
    root.setLevel(logging.INFO)
    try:
        yield seen
    finally:
        root.setLevel(level)
        root.handlers = handlers


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Every warning meanwhile, of any category, ResourceWarnings of collected objects too."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield seen
        finally:
            gc.collect()
            seen += [f"{each.category.__name__}: {each.message}" for each in caught]


@contextmanager
def noted_blocking() -> Iterator[list[str]]:
    """Every call meanwhile, in a running loop, that may block it, with the line that made it.

    Each is refused, too; whoever swallows that is noted all the same.
    """
    seen: list[str] = []
    original = blockbuster.blockbuster.BlockingError

    class Noted(original):  # type: ignore[misc, valid-type]
        def __init__(self, function: str) -> None:
            super().__init__(function)
            caller = traceback.extract_stack(limit=3)[0]
            seen.append(f"{function} at {caller.filename}:{caller.lineno}")

    watching = BlockBuster()
    for function in watching.functions.values():
        # redis-py looks up its own version for each connection that it makes.
        function.can_block_in("redis/utils.py", "get_lib_version")
    module: Any = blockbuster.blockbuster
    module.BlockingError = Noted
    watching.activate()
    try:
        yield seen
    finally:
        watching.deactivate()
        module.BlockingError = original
