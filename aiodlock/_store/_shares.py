"""The script calls that differ where several may hold a name: readers, a writer, a semaphore."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

from .. import _names
from .._names import Keys
from ._api import Acquisition, Holding, NodeStanding, Standing
from ._requests import READ, SHARE_RELEASE, Us, packed_of, says_who_entered, tell_entered
from ._wire import Call, Script, SimpleCall, text

SHARE_EXTEND: Final = Script("share_extend")
SHARE_INSPECT: Final = Script("share_inspect")
SHARE_CONFIRM: Final = Script("share_confirm")

# How many keys, five keys, four arguments.
_PARTS: Final = 1 + 5 + 4


class Downgrade(Call):
    """A writer gives up the right to write, and goes on as a reader."""

    __slots__ = ("_acquisition", "_notice", "_us")

    def __init__(
        self, acquisition: Acquisition, us: Us, *, notice: Callable[[int, str, Keys], None]
    ) -> None:
        super().__init__(SHARE_RELEASE, acquisition.name, acquisition.keys.lock)
        self._acquisition = acquisition
        self._us = us
        self._notice = notice

    def fits(self, reply: list[Any]) -> bool:
        return says_who_entered(reply)

    def parts(self, number: int) -> tuple[int, bytes]:
        return _PARTS, packed_of(self._acquisition) + READ + self._us.all

    def heard(self, number: int, reply: Any) -> None:
        tell_entered(self._notice, reply, self._acquisition.keys)


class _OfOneHolder(SimpleCall):
    """Its reply is 1 with the ms left, or 0."""

    __slots__ = ()

    def fits(self, reply: list[Any]) -> bool:
        return reply == [0] or (len(reply) == 2 and reply[0] == 1 and type(reply[1]) is int)


class ShareExtend(_OfOneHolder):
    """For one holder: they seldom fall due together."""

    __slots__ = ()

    def __init__(self, acquisition: Acquisition, value: str, *, ttl_ms: int) -> None:
        fencing_token = value.rpartition("/")[2]
        keys = [acquisition.keys.lock, acquisition.keys.grants]
        args = acquisition.token, str(ttl_ms), fencing_token
        super().__init__(SHARE_EXTEND, acquisition.name, keys, *args)

    def answer(self, reply: list[Any]) -> tuple[int, Any]:
        """1 with the ms left, or 0: others that hold are no sign that ours was stolen."""
        return reply[0], reply[1] if reply[0] else None


class ShareConfirm(_OfOneHolder):
    """On a node of a quorum, as `Confirm` for a lock; a writer that has downgraded only reads."""

    __slots__ = ()

    may_repeat = False

    def __init__(self, acquisition: Acquisition, *, ttl_ms: int, fencing_token: int) -> None:
        keys = acquisition.keys
        reads = str(int(acquisition.reads_only))
        args = acquisition.token, str(ttl_ms), str(fencing_token), reads
        super().__init__(
            SHARE_CONFIRM, acquisition.name, [keys.lock, keys.fence, keys.grants], *args
        )


class ShareInspect(SimpleCall):
    """All who hold."""

    __slots__ = ()

    def __init__(self, name: str, keys: Keys) -> None:
        super().__init__(SHARE_INSPECT, name, [keys.lock, keys.queue, keys.grants])

    def fits(self, reply: list[Any]) -> bool:
        return len(reply) % 3 == 1

    def answer(self, reply: list[Any]) -> Standing:
        """What *reply* says."""
        return standing_of(holdings(reply), waiters=reply[0])


def holdings(reply: list[Any]) -> list[Holding]:
    """The holders of a reply to `ShareInspect`, the first to end first."""
    items = iter(reply[1:])
    return [
        _holding(text(value), ttl_left_ms, reads_only=bool(reads_only))
        for value, ttl_left_ms, reads_only in zip(items, items, items, strict=True)
    ]


def _holding(value: str, ttl_left_ms: int, *, reads_only: bool) -> Holding:
    read = _names.read_value(value)
    if read is None:
        return Holding(value, ttl_left_ms, None, None)
    access = "reading" if reads_only else _names.access_of(read.owner_token)
    return Holding(value, ttl_left_ms, read.fencing_token, access)


def standing_of(
    holders: list[Holding], *, waiters: int, votes: tuple[NodeStanding, ...] = ()
) -> Standing:
    """What stands where *holders* do."""
    if not holders:
        return Standing(None, -2, waiters, None, votes)
    first = holders[0]
    return Standing(
        first.value, first.ttl_left_ms, waiters, first.fencing_token, votes, tuple(holders)
    )


def agreed(parts: Iterable[list[Holding]], *, majority: int, fencing: bool) -> list[Holding]:
    """Those who hold on a majority of nodes, of which *parts* has what each said."""
    found: dict[str, list[Holding]] = {}
    for holding in itertools.chain.from_iterable(parts):
        found.setdefault(holding.value.rpartition("/")[0], []).append(holding)
    holders = [
        _agreed(theirs, majority, fencing=fencing)
        for theirs in found.values()
        if len(theirs) >= majority
    ]
    return sorted(holders, key=lambda holding: holding.ttl_left_ms)


def _agreed(theirs: list[Holding], majority: int, *, fencing: bool) -> Holding:
    """One holder: the majority is over when so many have run out that too few are left."""
    latest = max(theirs, key=lambda holding: holding.fencing_token or 0)
    lefts = sorted((holding.ttl_left_ms for holding in theirs), reverse=True)
    reads = any(holding.access == "reading" for holding in theirs)
    return Holding(
        latest.value,
        lefts[majority - 1],
        latest.fencing_token if fencing else None,
        "reading" if reads else latest.access,
    )
