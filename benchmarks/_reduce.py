"""The figures of one run, made from what workers or servers said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from . import _server, _stays
from ._rows import Row
from ._server import Figures, Habits, Look
from ._stays import Stay


@dataclass(frozen=True)
class Raw:
    """All that was heard of one run.

    Attributes:
        looks: Of each server, how it was before and after.
        midway: Connections in the middle of it, at the server that had most.
        told: What each worker process reported.
    """

    row: Row
    habits: Habits
    looks: Sequence[tuple[Look, Look]]
    midway: int
    told: Sequence[dict[str, Any]]

    @property
    def only(self) -> dict[str, Any]:
        """What the only worker reported."""
        (told,) = self.told
        return told

    @property
    def cpu_s(self) -> float:
        """Of all workers."""
        return sum(float(told["cpu_s"]) for told in self.told)

    def per_cycle(self, cycles: int) -> Figures:
        """What a cycle cost the server, or a quorum; in a cluster each node, the busiest first."""
        if self.row.nodes == 1:
            each = [_server.per_cycle(*pair, cycles, self.habits) for pair in self.looks]
            return {what: sum(figures[what] for figures in each) for what in each[0]}
        busiest_first = sorted(self.looks, key=lambda pair: pair[0].cpu_s - pair[1].cpu_s)
        figures = {
            f"node{place}_{what}": figure
            for place, pair in enumerate(busiest_first)
            for what, figure in _server.per_cycle(*pair, cycles, self.habits).items()
        }
        sent = sum(after.published - before.published for before, after in self.looks)
        return {**figures, "published_to_nodes": sent / cycles if cycles else 0.0}

    def per_second(self) -> Figures:
        """What a second cost both sides."""
        seconds = self.only["seconds"]
        asked = _server.per_second(*self.looks[0], seconds, self.row.tasks, self.habits)
        return {"client_cpu_s_per_s": self.cpu_s / seconds, **asked}

    def per_name(self) -> Figures:
        """What one more takes of the server's memory."""
        return _server.memory(*self.looks[0], self.row.tasks)


@dataclass(frozen=True)
class Measured:
    """What a run gave: its figures, and how often each type of exception was seen."""

    figures: Figures
    errors: dict[str, int]


def reduced(raw: Raw) -> Measured:
    """The figures of one run."""
    errors: Counter[str] = Counter()
    for told in raw.told:
        errors.update(told["errors"])
    figures = REDUCTIONS[raw.row.work](raw)
    figures |= _server.connections([look for pair in raw.looks for look in pair], raw.midway)
    figures["errors"] = sum(errors.values())
    # Of no hand-off at all there is no median.
    known = {name: figure for name, figure in figures.items() if not math.isnan(figure)}
    return Measured(known, dict(errors))


def of_cycles(raw: Raw) -> Figures:
    cycles, cycles_per_s = raw.only["cycles"], raw.only["cycles_per_s"]
    figures: Figures = {"cycles_per_s": cycles_per_s}
    if raw.row.quorum and raw.row.tasks == 1:
        figures["cycle_ms"] = _ratio(1000, cycles_per_s)
    return {**figures, **_cost(raw, cycles)}


def of_trouble(raw: Raw) -> Figures:
    """Of one task; a cycle that never ended counts with its time, as the only one if it was."""
    calm, troubled = raw.only["calm"], raw.only["troubled"]
    figures = {
        "calm_ms": calm["seconds"] * 1e3 / max(1, calm["cycles"]),
        "cycle_ms": troubled["seconds"] * 1e3 / max(1, troubled["cycles"]),
        "calm_cpu_us": _ratio(calm["cpu_s"] * 1e6, calm["cycles"]),
        "client_cpu_us": _ratio(troubled["cpu_s"] * 1e6, troubled["cycles"]),
    }
    return {
        **figures,
        "cycle_ratio": _ratio(figures["cycle_ms"], figures["calm_ms"]),
        "cpu_ratio": _ratio(figures["client_cpu_us"], figures["calm_cpu_us"]),
        "longest_ms": troubled["longest_ms"],
    }


def of_contest(raw: Raw) -> Figures:
    stays = [Stay(*stay) for told in raw.told for stay in told["stays"]]
    everyone = [who for told in raw.told for who in told["everyone"]]
    # The workers' windows differ by some ms: what counts is when all were at it.
    began_ns = max(told["began_ns"] for told in raw.told)
    ended_ns = min(told["ended_ns"] for told in raw.told)
    inside = [stay for stay in stays if began_ns <= stay.entered_ns < ended_ns]
    handoffs_ms = _stays.handoffs_ms(inside)
    unserved_ms = [wait_ms for told in raw.told for wait_ms in told["unserved_ms"]]
    return {
        "cycles_per_s": len(inside) / (ended_ns - began_ns) * 1e9,
        "handoffs": len(handoffs_ms),
        "handoff_median_ms": _stays.percentile(handoffs_ms, 50),
        "handoff_p99_ms": _stays.percentile(handoffs_ms, 99),
        "longest_wait_ms": _stays.longest_wait_ms(stays, unserved_ms),
        "unserved": len(unserved_ms),
        "jain": _stays.jain(_stays.counts(inside, everyone)),
        "overlaps": _stays.overlaps(stays),
        **_cost(raw, len(stays)),
    }


def of_waiting(raw: Raw) -> Figures:
    return {"overlaps": raw.only["overlaps"], **raw.per_second()}


def of_holding(raw: Raw) -> Figures:
    kept = ("lost", "lag_p99_ms", "lag_max_ms", "resident_kb")
    return {**{figure: raw.only[figure] for figure in kept}, **raw.per_second()}


def of_names(raw: Raw) -> Figures:
    return {"lost": raw.only["lost"], **raw.per_name()}


def of_queue(raw: Raw) -> Figures:
    return {"overlaps": raw.only["overlaps"], **raw.per_name()}


def of_tracing(raw: Raw) -> Figures:
    return {"traced_kb": raw.only["traced_kb"], "lost": raw.only["lost"]}


def _ratio(above: float, below: float) -> float:
    """Nan by nothing, which is left out."""
    return above / below if below else math.nan


def _cost(raw: Raw, cycles: int) -> Figures:
    """What a cycle cost both sides; every cycle counts, those after the window too."""
    if not cycles:
        return {}
    return {"client_cpu_us": raw.cpu_s / cycles * 1e6, **raw.per_cycle(cycles)}


REDUCTIONS: Final[dict[str, Callable[[Raw], Figures]]] = {
    "cycles": of_cycles,
    "compete": of_contest,
    "trouble": of_trouble,
    "wait": of_waiting,
    "hold": of_holding,
    "names": of_names,
    "queue": of_queue,
    "traced": of_tracing,
}
