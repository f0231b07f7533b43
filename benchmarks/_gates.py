"""Gates, with their judgement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ._results import Results, Summary

MET: Final = "met"
WITHIN: Final = "within spread"
MISSED: Final = "missed"
UNKNOWN: Final = "not measured"


@dataclass(frozen=True)
class Gate:
    """One figure of aiodlock's in one row, and what it must be.

    Attributes:
        against: Another client, to whose figure in the same round ours is a ratio; in another row,
            if `against_row` says so.
        gate, aim: At most this much; at least, where `at_least`. None: there is none.
        is_count: Every round must meet it: what is counted has no noise.
    """

    row: str
    figure: str
    against: str | None = None
    against_row: str | None = None
    gate: float | None = None
    aim: float | None = None
    at_least: bool = False
    is_count: bool = False
    client: str = "aiodlock"

    @property
    def subject(self) -> str:
        """What is judged, in a few words."""
        if self.against is None:
            return self.figure
        there = f" in {self.against_row}" if self.against_row else ""
        return f"{self.figure} / {self.against}{there}"

    def values(self, results: Results) -> list[float]:
        """The figure or the ratio, round by round."""
        if self.against is None:
            return list(results.values(self.row, self.client, self.figure).values())
        there = (self.against_row or self.row, self.against)
        return results.ratios(self.figure, (self.row, self.client), there)


class Verdict(NamedTuple):
    """What became of one gate."""

    gate: Gate
    summary: Summary | None
    gate_says: str
    aim_says: str


def judged(results: Results, gates: Iterable[Gate]) -> list[Verdict]:
    """Every gate of a row that was measured."""
    rows = set(results.rows())
    return [_judged(results, gate) for gate in gates if gate.row in rows]


def _judged(results: Results, gate: Gate) -> Verdict:
    summary = Summary.of(gate.values(results))
    return Verdict(
        gate, summary, judgement(summary, gate, gate.gate), judgement(summary, gate, gate.aim)
    )


def judgement(summary: Summary | None, gate: Gate, bound: float | None) -> str:
    """Met by the median; or by the best round only, which the spread may explain; or by none."""
    if bound is None:
        return ""
    if summary is None:
        return UNKNOWN
    best, worst = (summary.high, summary.low) if gate.at_least else (summary.low, summary.high)
    decisive = worst if gate.is_count else summary.median
    if _meets(decisive, bound, gate.at_least):
        return MET
    return WITHIN if not gate.is_count and _meets(best, bound, gate.at_least) else MISSED


def _meets(value: float, bound: float, at_least: bool) -> bool:
    return value >= bound if at_least else value <= bound


def _none_of(row: str, *figures: str) -> tuple[Gate, ...]:
    return tuple(Gate(row, figure, gate=0, is_count=True) for figure in figures)


HEARTBEATS_PER_S: Final = 0.5
"""One waiter's, where ttl >= 6 s."""

GATES: Final = (
    Gate("cycle-1", "client_cpu_us", "redis-py", gate=0.6, aim=0.5),
    Gate("cycle-1", "client_cpu_us", "floor", gate=1.5, aim=1.25),
    *_none_of("cycle-1", "errors"),
    Gate("cycle-100", "cycles_per_s", "redis-py", gate=5, aim=10, at_least=True),
    Gate("cycle-100", "cycles_per_s", "floor-own", gate=0.6, at_least=True),
    Gate("cycle-100", "connections", gate=2, is_count=True),
    *_none_of("cycle-100", "errors"),
    Gate("cycle-1000", "cycles_per_s", "redis-py-pool", gate=5, aim=10, at_least=True),
    Gate("cycle-1000", "connections", gate=2, is_count=True),
    *_none_of("cycle-1000", "errors"),
    Gate("handoff-100", "handoff_median_ms", "redis-py", gate=0.4),
    Gate("handoff-100", "handoff_median_ms", "floor-own", aim=1.1),
    # "Flat from 2 to 100 waiters", in a number.
    Gate("handoff-100", "handoff_median_ms", "aiodlock", against_row="handoff-2", gate=1.5),
    Gate("handoff-100", "evalsha", gate=2.2, is_count=True),
    Gate("handoff-100", "jain", gate=0.99, at_least=True, is_count=True),
    *_none_of("handoff-100", "errors", "overlaps"),
    Gate("processes", "handoff_median_ms", "redis-py", gate=0.6),
    Gate("processes", "handoff_median_ms", "floor-own", aim=1.2),
    Gate("processes", "jain", gate=0.98, at_least=True, is_count=True),
    *_none_of("processes", "errors", "overlaps"),
    Gate("idle-100", "sent_per_s", gate=0.6, aim=HEARTBEATS_PER_S / 100, is_count=True),
    Gate("idle-1000", "sent_per_s", gate=0.6, aim=HEARTBEATS_PER_S / 1000, is_count=True),
    Gate("idle-1000", "connections", gate=2, is_count=True),
    *_none_of("idle-1000", "errors", "overlaps"),
    Gate("leases-10000", "client_cpu_s_per_s", "floor-own", gate=1.4),
    Gate("leases-10000", "client_cpu_s_per_s", aim=0.35),
    Gate("leases-10000", "lag_max_ms", gate=100, aim=50),
    *_none_of("leases-10000", "errors", "lost"),
    Gate("memory", "traced_kb", gate=8, aim=2),
)  # fmt: skip
