"""From who was inside when to waits, hand-offs, fairness, overlaps: pure arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from aiodlock.cli import _history
from aiodlock.cli._history import Interval


class Stay(NamedTuple):
    """One task's time inside the section, in ns of the monotonic clock.

    `entered_ns` is read after acquiring returned, `left_ns` before releasing was called.
    """

    who: str
    asked_ns: int
    entered_ns: int
    left_ns: int


def overlaps(stays: Iterable[Stay]) -> int:
    """How many began while another one was inside: 0, if the lock is one."""
    intervals = (Interval(0, stay.entered_ns, stay.left_ns) for stay in stays)
    return len(_history.overlaps(intervals))


def handoffs_ms(stays: Iterable[Stay]) -> list[float]:
    """From just before each release to the next one's being inside, where that is another task."""
    ordered = sorted(stays, key=lambda stay: stay.entered_ns)
    return [
        (later.entered_ns - earlier.left_ns) / 1e6
        for earlier, later in pairwise(ordered)
        if later.who != earlier.who
    ]


def longest_wait_ms(stays: Iterable[Stay], unserved_ms: Iterable[float]) -> float:
    """The longest time from asking to being inside, or to giving up."""
    waits = [(stay.entered_ns - stay.asked_ns) / 1e6 for stay in stays]
    return max([*waits, *unserved_ms], default=0.0)


def counts(stays: Iterable[Stay], everyone: Iterable[str]) -> list[int]:
    """How often each was inside, those included who never were."""
    entered = Counter(stay.who for stay in stays)
    return [entered[who] for who in everyone]


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all got the same, 1/n if one got everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that *percent* of them do not exceed; nan of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
