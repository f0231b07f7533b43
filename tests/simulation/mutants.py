"""The rules of the design, put out one at a time: the referee must notice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import anyio

from aiodlock import _clock
from aiodlock._cleanup import Background
from aiodlock._session import Session
from aiodlock._store._mux import Link
from aiodlock._store._redis import RedisStore
from aiodlock._waiting import Wait
from aiodlock._watchdog import Watchdog
from tests import model
from tests.model import Model, Reply, _Name
from tests.mutants import function_mutant
from tests.simulation.one import RATE_SHARE


@dataclass(frozen=True)
class Mutant:
    """One rule put out, while it is ``applied()``; or a world worse than the design says."""

    name: str
    applied: Callable[[], AbstractContextManager[Any]]
    faults: tuple[str, ...] | None = None  # Those that matter to it; None: the seed's own.
    rate_share: float = RATE_SHARE


def _changed(
    name: str, owner: type, method: str, old: str, new: str, faults: tuple[str, ...] | None = None
) -> Mutant:
    return Mutant(name, lambda: function_mutant(owner, method, old, new), faults)


def _replaced(
    name: str, owner: Any, attribute: str, value: object, faults: tuple[str, ...] | None = None
) -> Mutant:
    return Mutant(name, lambda: mock.patch.object(owner, attribute, value), faults)


_deadline: Final = _clock.deadline


def _deadline_of_reply(sent_at: float, ttl_left_ms: int) -> float:
    return _deadline(_clock.now(), ttl_left_ms)


def _deadline_without_drift(sent_at: float, ttl_left_ms: int) -> float:
    return sent_at + ttl_left_ms / 1000


def _trust(wait: Wait) -> Any:
    """Each message is believed, for as long as a waiter is alive from now on."""
    with (
        mock.patch.object(wait._store, "is_current", return_value=True),
        mock.patch.object(_clock, "deadline", _deadline_of_reply),
    ):
        wait._largest_seen = 0
        return _take_hand_over(wait)


_take_hand_over: Final = Wait._take_hand_over


def _extend_anything(server: Model, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
    """Re-creates a key that is gone."""
    value = args[1]
    if server.string(keys[0]) is None:
        server.put(keys[0], value, int(args[0]))
    return _extend(server, keys, args)


_extend: Final = Model._extend


def _no_hand_over(name: _Name) -> tuple[bytes | None, int]:
    return None, 0


def _any_head(name: _Name) -> tuple[bytes | None, int]:
    head = name._server.members(name.queue).first()
    return head, model.LIVENESS_MS_MAX


def _time_only(name: _Name) -> int:
    name._server.put(name.fence, b"%d" % name._server.now_us, model.FENCE_MS)
    return name._server.now_us


def _without_shield(*, shield: bool) -> anyio.CancelScope:
    return _CancelScope()


_CancelScope: Final = anyio.CancelScope


async def _unsheltered(background: Background, work: Any, what: str) -> None:
    await work


def _nothing(*_: object) -> None:
    """In place of what should be done."""


def _too_late(valid_s: float, chance: float) -> float:
    return valid_s * 1.1


def _never(wait: Wait) -> bool:
    return False


MUTANTS: Final = (
    _replaced(
        "deadline counted from the reply",
        _clock,
        "deadline",
        _deadline_of_reply,
        ("slow", "uneven", "stop_host"),
    ),
    _replaced("no drift", _clock, "deadline", _deadline_without_drift, ("stop_host",)),
    Mutant("clocks run 3 % apart", nullcontext, ("stop_host",), rate_share=0.03),
    _replaced("every message is trusted", Wait, "_take_hand_over", _trust, ("late_news",)),
    _changed(
        "message older than the last poll is trusted",
        Wait,
        "_take_hand_over",
        "value.fencing_token > self._largest_seen",
        "True",
        ("late_news",),
    ),
    _changed(
        "no tombstone", Model, "_release", 'args[1] == b"1"', "False", ("stall", "uneven", "cut")
    ),
    _changed(
        "acquire sent again after it was given up",
        Link,
        "_answer",
        "return None if request.answer.done() else self._send_again(request)",
        "return self._send_again(request)",
        ("script_flush", "slow"),
    ),
    _changed(
        "release without a look at the owner",
        Model,
        "_release",
        "value is not None and (value == token or _is_of(token, value))",
        "value is not None",
    ),
    _replaced(
        "extend makes a key again", Model, "_extend", _extend_anything, ("evict", "flushall")
    ),
    _replaced("release hands nothing on", _Name, "take_earliest_live", _no_hand_over),
    _replaced("fencing token is the time", _Name, "_next_fencing_token", _time_only, ("step",)),
    _replaced(
        "granted to a dead waiter",
        _Name,
        "take_earliest_live",
        _any_head,
        ("kill_host", "stop_host"),
    ),
    _changed(
        "last come, first served",
        _Name,
        "enqueue",
        "max(highest + 1, self._server.now_us)",
        "-self._server.now_us",
    ),
    _changed("hand-off without a ttl", _Name, "grant", "ttl_ms)", "None)"),
    _changed(
        "a lost reply locks its own caller out",
        Model,
        "_acquire",
        "value is not None and _is_of(token, value)",
        "False",
    ),
    _changed(
        "nothing is given up on cancel",
        Session,
        "_failed",
        "if not wait.may_stand",
        "if isinstance(error, asyncio.CancelledError)",
    ),
    _changed(
        "nothing is given up on timeout",
        Session,
        "_failed",
        "if not wait.may_stand",
        "if isinstance(error, TimeoutError)",
    ),
    _replaced("extends when it is too late", _clock, "extension_delay", _too_late),
    _replaced("messages wake nobody", RedisStore, "_receive", _nothing),
    _replaced("nobody tells of the deadline", Watchdog, "_watch_deadline", _nothing),
    _replaced("watchdog that goes on", Watchdog, "stop", _nothing),
    _replaced("clean-up without its shield", anyio, "CancelScope", _without_shield),
    _replaced("clean-up in the cancelled task", Background, "finish", _unsheltered),
    _replaced("wait without an end", Wait, "_is_over", _never),
    _replaced("silent connection is kept", Link, "_judge", _nothing, ("silence",)),
)
