"""The file of results: who measured what, with every raw run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

DIGITS = 4


@dataclass(frozen=True)
class Run:
    """One client in one row in one round.

    Attributes:
        figures: By name, with the unit last; empty where it failed.
        errors: How often each type of exception was seen.
        failed: Why there are no figures.
    """

    row: str
    client: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    failed: str = ""


class Summary(NamedTuple):
    """Of the rounds: the median, the lowest, the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Self | None:
        """None of nothing."""
        if not values:
            return None
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Results:
    """All runs of one measurement, and what is to be known about them."""

    about: dict[str, Any]
    parameters: dict[str, Any]
    absent: dict[str, dict[str, str]]
    runs: list[Run]

    @property
    def rounds(self) -> int:
        """How many were begun."""
        return max((run.round for run in self.runs), default=0)

    def values(self, row: str, client: str, figure: str) -> dict[int, float]:
        """By round."""
        return {
            run.round: run.figures[figure]
            for run in self.runs
            if (run.row, run.client) == (row, client) and figure in run.figures
        }

    def summary(self, row: str, client: str, figure: str) -> Summary | None:
        return Summary.of(list(self.values(row, client, figure).values()))

    def best(
        self, row: str, clients: Iterable[str], figure: str, of: Callable[[list[float]], float]
    ) -> dict[int, float]:
        """By round, the figure of that one of *clients* who was best in it."""
        all_of_them: dict[int, list[float]] = {}
        for client in clients:
            for turn, value in self.values(row, client, figure).items():
                all_of_them.setdefault(turn, []).append(value)
        return {turn: of(values) for turn, values in all_of_them.items()}

    def rows(self) -> Iterator[str]:
        """Those measured, in order."""
        yield from dict.fromkeys(run.row for run in self.runs)

    def save(self, path: Path) -> None:
        """As JSON, one run a line."""
        head = {"about": self.about, "parameters": self.parameters, "absent": self.absent}
        lines = ",\n".join(json.dumps(_rounded(run)) for run in self.runs)
        text = json.dumps(head, indent=1)[:-2]
        path.write_text(f'{text},\n "runs": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text())
        return cls(**{**fields, "runs": [Run(**run) for run in fields["runs"]]})


def ratios(above: Mapping[int, float], below: Mapping[int, float]) -> list[float]:
    """Of one to another, by round; a round that one of the two has not is left out."""
    both = sorted(above.keys() & below.keys())
    return [above[turn] / below[turn] for turn in both if below[turn]]


def _rounded(run: Run) -> dict[str, Any]:
    """Digits that do not repeat anyway are not written down."""
    figures = {name: _digits(value) for name, value in run.figures.items()}
    return {**asdict(run), "figures": figures}


def _digits(value: float) -> float:
    if value == int(value):
        return int(value)
    return float(f"{value:.{DIGITS}g}")
