"""Judges a history: who was inside the locked section from when to when.

All instants are nanoseconds of CLOCK_MONOTONIC, which all processes of one machine share. The
functions look at nothing but the intervals, so that any lock can be judged by them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """One stay of one worker inside the section: from its grant until it left or was killed."""

    worker: int
    enter_ns: int
    leave_ns: int
    fencing_token: int | None = None
    was_killed: bool = False

    @property
    def seconds(self) -> float:
        """How long the stay lasted."""
        return (self.leave_ns - self.enter_ns) / NS_PER_S


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two stays that had some time in common: two workers were inside at once."""

    first: Interval
    second: Interval


def overlaps(history: Iterable[Interval]) -> list[Overlap]:
    """One `Overlap` per entry that found somebody inside.

    An entry at the very instant of a leave is none: the section was handed over.
    """
    found: list[Overlap] = []
    last: Interval | None = None  # of those entered so far, the one that stays longest
    for interval in _by_entry(history):
        if last is not None and interval.enter_ns < last.leave_ns:
            found.append(Overlap(last, interval))
        if last is None or interval.leave_ns > last.leave_ns:
            last = interval
    return found


def out_of_order(history: Iterable[Interval]) -> list[tuple[Interval, Interval]]:
    """Neighbours by entry whose fencing tokens do not grow; an entry without token counts too."""
    return [
        (earlier, later)
        for earlier, later in pairwise(_by_entry(history))
        if earlier.fencing_token is None
        or later.fencing_token is None
        or earlier.fencing_token >= later.fencing_token
    ]


def killed(history: Iterable[Interval]) -> list[Interval]:
    """The stays that a kill ended, by entry."""
    return [interval for interval in _by_entry(history) if interval.was_killed]


def longer_than(history: Iterable[Interval], seconds: float) -> list[Interval]:
    """The stays that lasted longer than *seconds*, by entry."""
    return [interval for interval in _by_entry(history) if interval.seconds > seconds]


def entries_after(history: Iterable[Interval], instant_ns: int) -> list[Interval]:
    """The stays that began after *instant_ns*, by entry."""
    return [interval for interval in _by_entry(history) if interval.enter_ns > instant_ns]


def longest_gap_after_kill(history: Sequence[Interval]) -> float | None:
    """Seconds from a kill until the next one entered, the longest of them.

    `None` when no holder was killed, or when nobody entered after one of the kills: that gap
    has no end yet.
    """
    gaps: list[float] = []
    for victim in killed(history):
        following = entries_after(history, victim.leave_ns)
        if not following:
            return None
        gaps.append((following[0].enter_ns - victim.leave_ns) / NS_PER_S)
    return max(gaps, default=None)


def _by_entry(history: Iterable[Interval]) -> list[Interval]:
    return sorted(history, key=lambda interval: interval.enter_ns)
