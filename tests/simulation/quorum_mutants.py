"""The rules of a quorum, put out one at a time: its referee must notice each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from aiodlock import _clock
from aiodlock._store._api import Acquisition, Granted, NoAnswer, NotOurs, Refused
from aiodlock._store._ballot import Ballot, Part
from aiodlock._store._quorum import QuorumStore
from aiodlock._store._requests import Acquire
from aiodlock._store._round import Tally
from aiodlock._trying import Tries
from tests.model import Model, Reply
from tests.simulation.mutants import (
    Mutant,
    changed,
    deadline_of_reply,
    deadline_without_drift,
    nothing,
    replaced,
)


async def _heal_always(
    store: QuorumStore, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
) -> float | NotOurs:
    """Who lost it is given it again, whatever the others say."""
    ballot = store._ballots[acquisition]
    try:
        return await store._confirm(ballot, ttl_ms, within=within)
    finally:
        if not ballot.is_over:
            store._heal(ballot, ttl_ms, within)


async def _heal_at_once(
    store: QuorumStore, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
) -> float | NotOurs:
    """Who says that it is not ours is given it again, before the others have spoken."""
    ballot = store._ballots[acquisition]

    def hear(*heard: Any) -> None:
        QuorumStore._hear_confirm(store, *heard)
        if not ballot.is_over:
            store._heal(ballot, ttl_ms, within)

    with mock.patch.object(store, "_hear_confirm", hear):
        return await store._confirm(ballot, ttl_ms, within=within)


_acquire: Final = QuorumStore.acquire
_hear_acquire: Final = QuorumStore._hear_acquire


async def _acquire_with_stragglers(
    store: QuorumStore, acquisition: Acquisition, **options: Any
) -> Granted | Refused:
    """A try that was lost, and given back, is won by grants that came late."""
    answer: Granted | Refused | NoAnswer
    try:
        answer = await _acquire(store, acquisition, **options)
    except NoAnswer as error:
        answer = error
    if isinstance(answer, Granted):
        return answer
    ballot = store._ballots[acquisition]
    with suppress(NoAnswer):
        await store.release(acquisition, within=options["within"])
    late: list[Granted] = vars(ballot).get("late", [])
    if len(late) > len(ballot.parts) // 2:
        return min(late, key=lambda grant: grant.deadline)
    if isinstance(answer, NoAnswer):
        raise answer
    return answer


def _hear_late(
    store: QuorumStore, ballot: Ballot, index: int, call: Acquire, round_: Any, reply: Any
) -> None:
    _hear_acquire(store, ballot, index, call, round_, reply)
    if isinstance(reply, list) and reply[0] == 1:
        vars(ballot).setdefault("late", []).append(call.answer(reply))


def _confirm_what_is_gone(server: Model, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
    """A missing key is made again."""
    if server.string(keys[0]) is None:
        server.put(keys[0], b"%s/%s" % (args[0], args[2]), int(args[1]))
    return _confirm(server, keys, args)


_confirm: Final = Model._confirm


def _among(options: Mapping[str, Any], mutant: Mutant, *, first: int = 0) -> Mutant:
    """Noticed among such users only."""
    return replace(mutant, options=options, first=first)


# Who holds for longer than the ttl, and extends by hand at most.
_OUTLIVERS: Final = {"ttl_s": 1.0, "hold_s": 3.0, "auto_extend_share": 0.0, "cancel_share": 0.0}
# Who breaks locks that are held for long.
_BREAKERS: Final = {"ttl_s": 3.0, "hold_s": 1.0, "auto_extend_share": 1.0, "breaks": 6}

_OF_CODE: Final = (
    changed(
        "the second round leaves the counters",
        Model,
        "_confirm",
        "self.put(fence, fencing_token, FENCE_MS)",
        "pass",
    ),
    changed(
        "the second round lowers a counter",
        Model,
        "_confirm",
        "(_number(self.string(fence)) or 0) < int(fencing_token)",
        "True",
    ),
    changed(
        "fencing without a second round",
        QuorumStore,
        "acquire",
        "await self._confirm(ballot, ttl_ms, within=until - _clock.now())",
        "deadline",
    ),
    changed(
        "the smallest counter is the fencing token",
        QuorumStore,
        "acquire",
        "max(grant.fencing_token or 0",
        "min(grant.fencing_token or 0",
    ),
    _among(
        _BREAKERS,
        replaced(
            "a failed round heals", QuorumStore, "extend", _heal_always, ("partition", "silence")
        ),
        first=60,
    ),
    _among(
        _BREAKERS,
        replaced(
            "healed before the majority spoke",
            QuorumStore,
            "extend",
            _heal_at_once,
            ("partition", "silence"),
        ),
        first=60,
    ),
    changed("half of the nodes are a majority", Tally, "__init__", "nodes // 2 + 1", "nodes // 2"),
    _among(
        _OUTLIVERS | {"fencing": False, "request_timeout_s": 2.0},
        changed(
            "deadline of the slowest node",
            QuorumStore,
            "acquire",
            "min(grant.deadline for",
            "max(grant.deadline for",
            ("slow", "client_kill", "crash"),
        ),
        first=30,
    ),
    _among(
        _OUTLIVERS | {"ttl_s": 0.3, "hold_s": 1.0},
        replaced(
            "deadline counted from the reply",
            _clock,
            "deadline",
            deadline_of_reply,
            ("slow", "stop_host", "stall"),
        ),
        first=80,
    ),
    _among(
        _OUTLIVERS | {"ttl_s": 10.0, "hold_s": 30.0},
        replaced("no drift", _clock, "deadline", deadline_without_drift, ()),
    ),
    changed(
        "only what was granted is released",
        QuorumStore,
        "release",
        "if part.may_stand or part.acquisition.asked:",
        "if part.may_stand and not part.acquisition.asked:",
    ),
    changed(
        "a try is not undone",
        Tries,
        "_undo",
        "await self._store.release(self.acquisition, within=min(self._request_timeout, left))",
        "pass",
    ),
    changed(
        "the next try has the same owner token",
        Tries,
        "_undo",
        "self.acquisition = self._new_acquisition()",
        "pass",
    ),
    replaced("confirm makes a key again", Model, "_confirm", _confirm_what_is_gone),
    changed(
        "confirm takes another's key",
        Model,
        "_confirm",
        "value is None or not _is_of(token, value)",
        "value is None",
    ),
    Mutant(
        "late grants win a try that was given back",
        lambda: mock.patch.multiple(
            QuorumStore, acquire=_acquire_with_stragglers, _hear_acquire=_hear_late
        ),
    ),
    replaced("what is unsent leaves after the release", Part, "give_up", nothing),
    changed(
        "healed after the release", QuorumStore, "extend", "and not ballot.is_over", "and True"
    ),
    _among(
        _OUTLIVERS | {"ttl_s": 10.0, "hold_s": 30.0},
        Mutant("clocks run 3 % apart", nullcontext, (), rate_share=0.03),
    ),
    # What the guarantee rests on: without it, it does not stand.
    Mutant("who lost its keys comes back at once", nullcontext, ("crash_empty",), is_hasty=True),
)
MUTANTS: Final = tuple(
    replace(mutant, name=f"quorum: {mutant.name}", is_quorum=True) for mutant in _OF_CODE
)
