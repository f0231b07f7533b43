"""The rules of the design, put out one at a time: the referee must notice each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
from tests.simulation.world import RATE_SHARE


@dataclass(frozen=True)
class Mutant:
    """One rule put out, while it is ``applied()``; or a world worse than the design says."""

    name: str
    applied: Callable[[], AbstractContextManager[Any]]
    faults: tuple[str, ...] | None = None  # Those that matter to it; None: the seed's own.
    rate_share: float = RATE_SHARE
    is_quorum: bool = False
    is_hasty: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # Of users to whom it matters.
    first: int = 0  # The seeds before this one notice nothing, and take their time.


def changed(
    name: str, owner: type, method: str, old: str, new: str, faults: tuple[str, ...] | None = None
) -> Mutant:
    """With one line of a method changed."""
    return Mutant(name, lambda: function_mutant(owner, method, old, new), faults)


def replaced(
    name: str, owner: Any, attribute: str, value: object, faults: tuple[str, ...] | None = None
) -> Mutant:
    """With something else in an attribute."""
    return Mutant(name, lambda: mock.patch.object(owner, attribute, value), faults)


_deadline: Final = _clock.deadline


def deadline_of_reply(sent_at: float, ttl_left_ms: int) -> float:
    """Not from the request."""
    return _deadline(_clock.now(), ttl_left_ms)


def deadline_without_drift(sent_at: float, ttl_left_ms: int) -> float:
    """As if all clocks ran alike."""
    return sent_at + ttl_left_ms / 1000


def _trust(wait: Wait) -> Any:
    """Each message is believed, for as long as a waiter is alive from now on."""
    with (
        mock.patch.object(wait._store, "is_current", return_value=True),
        mock.patch.object(_clock, "deadline", deadline_of_reply),
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


async def _unsheltered(
    background: Background, work: Any, what: str, name: str | None = None
) -> None:
    await work


def nothing(*_: object) -> None:
    """In place of what should be done."""


def _too_late(valid_s: float, chance: float) -> float:
    return valid_s * 1.1


def _never(wait: Wait) -> bool:
    return False


MUTANTS: Final = (
    replaced(
        "deadline counted from the reply",
        _clock,
        "deadline",
        deadline_of_reply,
        ("slow", "uneven", "stop_host"),
    ),
    replaced("no drift", _clock, "deadline", deadline_without_drift, ("stop_host",)),
    Mutant("clocks run 3 % apart", nullcontext, ("stop_host",), rate_share=0.03),
    replaced("every message is trusted", Wait, "_take_hand_over", _trust, ("late_news",)),
    changed(
        "message older than the last poll is trusted",
        Wait,
        "_take_hand_over",
        "value.fencing_token > self._largest_seen",
        "True",
        ("late_news",),
    ),
    changed(
        "no tombstone", Model, "_release", 'args[1] == b"1"', "False", ("stall", "uneven", "cut")
    ),
    changed(
        "acquire sent again after it was given up",
        Link,
        "_answer",
        "return None if request.answer.done() else self._send_again(request)",
        "return self._send_again(request)",
        ("script_flush", "slow"),
    ),
    changed(
        "release without a look at the owner",
        Model,
        "_release",
        "value is not None and (value == token or _is_of(token, value))",
        "value is not None",
    ),
    replaced("extend makes a key again", Model, "_extend", _extend_anything, ("evict", "flushall")),
    replaced("release hands nothing on", _Name, "take_earliest_live", _no_hand_over),
    replaced("fencing token is the time", _Name, "_next_fencing_token", _time_only, ("step",)),
    replaced(
        "granted to a dead waiter",
        _Name,
        "take_earliest_live",
        _any_head,
        ("kill_host", "stop_host"),
    ),
    changed(
        "last come, first served",
        _Name,
        "enqueue",
        "max(highest + 1, self._server.now_us)",
        "-self._server.now_us",
    ),
    changed("hand-off without a ttl", _Name, "grant", "ttl_ms)", "None)"),
    changed(
        "a lost reply locks its own caller out",
        Model,
        "_acquire",
        "value is not None and _is_of(token, value)",
        "False",
    ),
    changed(
        "nothing is given up on cancel",
        Session,
        "_failed",
        "if not wait.may_stand",
        "if isinstance(error, asyncio.CancelledError)",
    ),
    changed(
        "nothing is given up on timeout",
        Session,
        "_failed",
        "if not wait.may_stand",
        "if isinstance(error, TimeoutError)",
    ),
    replaced("extends when it is too late", _clock, "extension_delay", _too_late),
    replaced("messages wake nobody", RedisStore, "_receive", nothing),
    replaced("nobody tells of the deadline", Watchdog, "_watch_deadline", nothing),
    replaced("watchdog that goes on", Watchdog, "stop", nothing),
    replaced("clean-up without its shield", anyio, "CancelScope", _without_shield),
    replaced("clean-up in the cancelled task", Background, "finish", _unsheltered),
    replaced("wait without an end", Wait, "_is_over", _never),
    replaced("silent connection is kept", Link, "_judge", nothing, ("silence",)),
)
