"""Gates, with their judgement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ._results import Results, Summary, ratios
from ._rows import QUORUM_PEERS, QUORUMS, ROWS

MET: Final = "met"
WITHIN: Final = "within spread"
MISSED: Final = "missed"
UNKNOWN: Final = "not measured"


@dataclass(frozen=True)
class Gate:
    """One figure of aiodlock's in one row, and what it must be.

    Attributes:
        against: Another client, to whose figure in the same round ours is a ratio; in another row,
            if `against_row` says so. Of several, the one that was best in the round.
        gate, aim: At most this much; at least, where `at_least`. None: there is none.
        is_count: Every round must meet it: what is counted has no noise.
    """

    row: str
    figure: str
    against: str | tuple[str, ...] | None = None
    against_row: str | None = None
    gate: float | None = None
    aim: float | None = None
    at_least: bool = False
    is_count: bool = False
    client: str = "aiodlock"

    @property
    def others(self) -> tuple[str, ...]:
        """Those against whom it is."""
        return (self.against,) if isinstance(self.against, str) else self.against or ()

    def values(self, results: Results) -> list[float]:
        """The figure or the ratio, round by round."""
        if self.against is None:
            return list(results.values(self.row, self.client, self.figure).values())
        best = max if self.at_least else min
        there = results.best(self.against_row or self.row, self.others, self.figure, best)
        return ratios(results.values(self.row, self.client, self.figure), there)


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


def _none_of(row: str, *figures: str, client: str = "aiodlock") -> tuple[Gate, ...]:
    return tuple(Gate(row, figure, gate=0, is_count=True, client=client) for figure in figures)


def _of_both(row: str, *figures: str) -> tuple[Gate, ...]:
    return tuple(
        gate for client in QUORUMS for gate in _none_of(row, *figures, client=client)
    )  # fmt: skip


def _of_quorum(row: str, *, gate: float | None = None) -> tuple[Gate, ...]:
    """One task on a quorum."""
    unfenced, fenced = QUORUMS
    return (
        Gate(row, "cycle_ms", QUORUM_PEERS, gate=gate, aim=OF_PEERS, client=unfenced),
        Gate(row, "cycle_ms", "floor-quorum", aim=1.2, client=unfenced),
        Gate(row, "client_cpu_us", QUORUM_PEERS, aim=OF_PEERS, client=unfenced),
        Gate(row, "cycle_ms", unfenced, gate=2, client=fenced),
        *_of_both(row, "errors"),
    )


def _of_trouble(row: str) -> tuple[Gate, ...]:
    """A quorum with one server in trouble, held against the same one before."""
    return (
        *(Gate(row, "cycle_ratio", gate=TROUBLE_COSTS, client=client) for client in QUORUMS),
        *_of_both(row, "errors"),
    )


OF_PEERS: Final = 0.8
"""A cycle on a quorum, in cycles of the best Python peer."""
TROUBLE_COSTS: Final = 1.3
"""A cycle with one server in trouble, in cycles with none."""
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
    *_of_quorum("quorum-3"),
    *_of_quorum("quorum-5", gate=OF_PEERS),
    Gate("quorum-tasks", "client_cpu_us", QUORUM_PEERS, gate=OF_PEERS, client="quorum"),
    Gate("quorum-tasks", "connections", gate=2, is_count=True, client="quorum"),
    *_of_both("quorum-tasks", "errors"),
    *_of_both("quorum-contest", "errors", "overlaps"),
    *(gate for row in ROWS if row.trouble for gate in _of_trouble(row.name)),
)  # fmt: skip
