"""Looks through the keys under the prefix for what should not be there, by SCAN with a bound."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from aiodlock import _names
from aiodlock.cli._doctor_facts import Leftovers, said
from aiodlock.cli._listing import literal, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodlock.cli._doctor_asker import Asker

_COUNT: Final = 500  # keys in one step of SCAN: a tenth of a millisecond of the server's
_STEPS: Final = 2000
_SCAN_S: Final = 3.0
_KEYS_MAX: Final = 2000
_VALUE_BYTES: Final = 255  # of a lock's value; ours is shorter
_QUEUES_MAX: Final = 50
_WAITERS_MAX: Final = 100

# By what stands behind the name: the types that are right there.
_TYPES: Final = {
    "": ("string", "zset"),  # one holder, or several
    ":fence": ("string",),
    ":queue": ("zset",),
    ":alive": ("zset",),
    ":grants": ("zset",),
}


async def look(asker: Asker) -> None:
    """Note what is odd, unless this user may not look."""
    found = await _scan(asker)
    if found is None:
        return
    keys, is_whole = found
    left = Leftovers(len(keys), is_whole)
    for start in range(0, len(keys), _COUNT):
        if not await _judge(asker, keys[start : start + _COUNT], left):
            return
    queues = [key for key in keys if key.endswith(":queue") and key not in left.wrong_type]
    for queue in queues[:_QUEUES_MAX]:
        if await _is_dead(asker, queue):
            left.dead_queues.append(queue)
    asker.facts.leftovers = left


async def _scan(asker: Asker) -> tuple[list[str], bool] | None:
    """Keys under the prefix, with whether these are all."""
    pattern = literal(asker.plan.prefix) + "*"
    keys: set[str] = set()  # SCAN may name one twice.
    cursor, end = "0", time.monotonic() + _SCAN_S
    for _ in range(_STEPS):
        reply = await asker.ask("SCAN", "SCAN", cursor, "MATCH", pattern, "COUNT", _COUNT)
        if reply is None:
            return None
        cursor = str(reply[0])
        keys.update(reply[1])
        if cursor == "0" or len(keys) > _KEYS_MAX or time.monotonic() > end:
            break
    return sorted(keys)[:_KEYS_MAX], cursor == "0" and len(keys) <= _KEYS_MAX


async def _judge(asker: Asker, keys: Sequence[str], left: Leftovers) -> bool:
    """Sort the odd ones of *keys* into *left*; False where this user may not ask."""
    replies = await asker.ask_all(
        *(("TYPE", key) for key in keys), *(("PTTL", key) for key in keys)
    )
    refusals = [said(reply) for reply in replies if isinstance(reply, Exception)]
    if refusals:
        asker.facts.unseen["TYPE"] = refusals[0]
        return False
    locks = []
    for key, type_, ttl_ms in zip(keys, replies, replies[len(keys) :], strict=False):
        if ttl_ms == -2:
            continue  # It has gone meanwhile.
        suffix = key[key.rfind("}") + 1 :]
        if suffix not in _TYPES or name_of(key.removesuffix(suffix), asker.plan.prefix) is None:
            left.strangers.append(key)
            continue
        if ttl_ms == -1:
            left.no_ttl.append(key)
        if type_ not in _TYPES[suffix]:
            left.wrong_type.append(key)
        elif not suffix and type_ == "string":
            locks.append(key)
    await _find_foreign(asker, locks, left)
    return True


async def _find_foreign(asker: Asker, locks: Sequence[str], left: Leftovers) -> None:
    # Not GET: what another library wrote may be of any length.
    values: list[Any] = []
    if locks:
        values = await asker.ask_all(*(("GETRANGE", key, 0, _VALUE_BYTES) for key in locks))
    for key, value in zip(locks, values, strict=True):
        if isinstance(value, Exception):
            asker.facts.unseen["GETRANGE"] = said(value)
        elif value and _names.read_value(value) is None:
            left.foreign.append(key)


async def _is_dead(asker: Asker, queue: str) -> bool:
    """Whether nobody in *queue* is alive, nor holds: then nobody will empty it."""
    lock = queue.removesuffix(":queue")
    exists, waiters, time_ = await asker.ask_all(
        ("EXISTS", lock), ("ZRANGE", queue, 0, _WAITERS_MAX - 1), ("TIME",)
    )
    if isinstance(waiters, Exception) or isinstance(time_, Exception) or exists or not waiters:
        return False
    now_ms = int(time_[0]) * 1000 + int(time_[1]) // 1000
    scores = await asker.ask_all(*(("ZSCORE", f"{lock}:alive", waiter) for waiter in waiters))
    # One without a liveness gets one with the next poll of anybody: it may live.
    return all(isinstance(score, str) and float(score) < now_ms for score in scores)
