"""All rows, in interleaved rounds: every client, then every client in another order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from . import _machine
from ._hand import Failed
from ._measure import measure, server_version
from ._results import Results, Run
from ._rows import QUICK_WARM_UP_S, WARM_UP_S, Row
from .clients import CLIENTS, _apart

Progress = Callable[[str], None]
Absences = dict[str, dict[str, str]]
QUICK_WITHIN_S: Final = 165.0
"""No step begins later: with one that hangs it still ends within four minutes."""
TOO_LATE: Final = f"left out, since --quick begins nothing after {QUICK_WITHIN_S:g} s"


@dataclass(frozen=True)
class Plan:
    """What to measure, how often."""

    rows: Sequence[Row]
    rounds: int
    is_quick: bool = False
    only: frozenset[str] | None = None

    def clients(self, row: Row) -> tuple[str, ...]:
        names = row.quick if self.is_quick else row.clients
        return tuple(name for name in names if self.only is None or name in self.only)

    def window_s(self, row: Row) -> float:
        return row.quick_window_s if self.is_quick else row.window_s

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return {
            "rounds": self.rounds,
            "quick": self.is_quick,
            "warm_up_s": QUICK_WARM_UP_S if self.is_quick else WARM_UP_S,
            "rows": {
                row.name: {
                    "title": row.title,
                    "tasks": row.tasks,
                    "processes": row.processes,
                    "quorum": row.quorum,
                    "ttl_s": row.ttl_s,
                    "window_s": self.window_s(row),
                }
                for row in self.rows
            },
        }


def prepare(progress: Progress) -> None:
    """Install what cannot live in the environment, where it is not there yet."""
    for place in _apart.PLACES:
        progress(f"looking for {place.name}")
        place.prepare()


async def run(
    plan: Plan, progress: Progress, keep: Callable[[Results], None] = lambda _: None
) -> Results:
    """Measure all; a client that fails is named in the results, and the others go on.

    *keep* is given what there is after each round, for a long run may be broken off.
    """
    absent = absences(plan)
    about = {**_machine.about(), "server": await server_version()}
    results = Results(about, plan.as_json(), absent, [])
    steps = list(steps_of(plan, absent))
    began_s = time.monotonic()
    for number, (turn, row, client) in enumerate(steps, 1):
        seconds = time.monotonic() - began_s
        if plan.is_quick and seconds > QUICK_WITHIN_S:
            done = Run(row.name, client, turn, failed=TOO_LATE)
        else:
            done = await _one(plan, row, client, turn)
        if turn > results.rounds > 0:
            keep(results)
        results.runs.append(done)
        where = f"[{number}/{len(steps)} {seconds:.0f} s] round {turn}/{plan.rounds}"
        progress(f"{where} {row.name} {client}: {told(done)}")
    keep(results)
    return results


def absences(plan: Plan) -> Absences:
    """By row and client, why it is not measured there."""
    found: Absences = {}
    for row in plan.rows:
        for client in plan.clients(row):
            entry = CLIENTS[client]
            reason = entry.absence() or entry.cannot.get(row.work)
            if reason:
                found.setdefault(row.name, {})[client] = reason
    return found


def steps_of(plan: Plan, absent: Absences) -> Iterator[tuple[int, Row, str]]:
    """Round, row, client, in the order of measuring; the orders can be had again."""
    for turn in range(1, plan.rounds + 1):
        for row in (row for row in plan.rows if turn <= row.most_rounds):
            there = [name for name in plan.clients(row) if name not in absent.get(row.name, {})]
            order = random.Random(f"{turn} {row.name}").sample(there, len(there))
            yield from ((turn, row, name) for name in order)


async def _one(plan: Plan, row: Row, client: str, turn: int) -> Run:
    warm_up_s = QUICK_WARM_UP_S if plan.is_quick else WARM_UP_S
    try:
        measured = await measure(row, client, window_s=plan.window_s(row), warm_up_s=warm_up_s)
    except Failed as failure:
        return Run(row.name, client, turn, failed=str(failure))
    except Exception as error:  # A server that breaks down under one must not end the others.
        return Run(row.name, client, turn, failed=repr(error))
    return Run(row.name, client, turn, measured.figures, measured.errors)


TOLD = (
    *("handoff_median_ms", "cycles_per_s", "cycle_ms", "client_cpu_us", "client_cpu_s_per_s"),
    *("sent_per_s", "traced_kb", "server_bytes", "cycle_ratio", "longest_ms", "lost", "overlaps"),
)


def told(run: Run) -> str:
    """One run in a few words."""
    if run.failed:
        return f"failed: {run.failed}"
    figures = [f"{name} {run.figures[name]:.4g}" for name in TOLD if name in run.figures]
    errors = [f"{name} x{count}" for name, count in run.errors.items()]
    return ", ".join(figures + errors)
