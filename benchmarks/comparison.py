"""The tables of docs/explanation/comparison.md, from results and behaviours that were written down.

`python -m benchmarks.comparison try` tries every lock again, and `page` writes the page's tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from . import _machine
from ._behaviours import ASYNC_CLIENTS, TRIALS, try_one
from ._measure import server_version
from ._report import COLUMNS, number, table
from ._results import Results
from .clients import CLIENTS

DOCS: Final = Path(__file__).parents[1] / "docs"
PAGE: Final = DOCS / "explanation" / "comparison.md"
BEHAVIOURS: Final = DOCS / "benchmarks" / "behaviours.json"
RESULTS: Final = DOCS / "benchmarks" / "results.json"
BEGIN: Final = "<!-- {table}: python -m benchmarks.comparison page -->"
END: Final = "<!-- end of {table} -->"
LIMIT_S: Final = 300.0
FIGURES: Final = (
    ("cycle-1", "client_cpu_us", "1 task"),
    ("cycle-1", "server_cpu_us", "1 task"),
    ("cycle-100", "cycles_per_s", "100 names"),
    ("handoff-100", "handoff_median_ms", "100 waiters"),
    ("handoff-100", "longest_wait_ms", "100 waiters"),
    ("handoff-100", "jain", "100 waiters"),
    ("handoff-100", "connections", "100 waiters"),
    ("idle-100", "sent_per_s", "100 idle"),
)
"""Row of the results, figure, and the row in a word."""
MEASURED: Final = (
    *("aiodlock", "redis-py", "fifo", "python-redis-lock", "pottery", "coredis"),
    *("redis-lock-py", "node-redlock"),
)
LARGER: Final = {"redis-py": "redis-py-pool"}
"""Who stands in where the default connection pool is too small for the row."""


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument("command", choices=("try", "one", "page"))
    parser.add_argument("client", nargs="?")
    options = parser.parse_args(arguments)
    if options.command == "one":
        json.dump(try_one(options.client), sys.stdout)
    elif options.command == "try":
        BEHAVIOURS.write_text(json.dumps(_try_all(), indent=1) + "\n")
    else:
        PAGE.write_text(filled(PAGE.read_text()))


def filled(page: str) -> str:
    """*page* with its tables as the files say."""
    tables = {
        "behaviours": behaviours(json.loads(BEHAVIOURS.read_text())),
        "figures": figures(Results.load(RESULTS)),
    }
    for name, made in tables.items():
        before, begin, rest = page.partition(BEGIN.format(table=name))
        _, end, after = rest.partition(END.format(table=name))
        page = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return page


def behaviours(told: Mapping[str, Any]) -> str:
    """One line for each lock."""
    about = told["about"]
    rows = (
        (f"{_label(client)} {_version(client, about)}", *(outcomes[title] for title in TRIALS))
        for client, outcomes in told["outcomes"].items()
    )
    made = f"Tried on {about['date'][:10]}, {about['python']}, {about['server']}."
    return f"{table(('', *TRIALS), rows)}\n\n{made}"


def figures(results: Results) -> str:
    """The medians of some rows of the benchmarks."""
    head = ("", *(f"{COLUMNS[figure]} ({words})" for _, figure, words in FIGURES))
    about = results.about
    rounds = results.parameters["rounds"]
    made = f"Medians of {rounds} rounds, {about['date'][:10]}, {about['server']}."
    return f"{table(head, _figure_rows(results))}\n\n{made}"


def _figure_rows(results: Results) -> Iterator[Sequence[str]]:
    for client in MEASURED:
        cells = [_cell(results, row, client, figure) for row, figure, _ in FIGURES]
        if any(cells):
            yield (_label(client), *cells)


def _cell(results: Results, row: str, client: str, figure: str) -> str:
    for who in (client, LARGER.get(client)):
        summary = results.summary(row, who, figure) if who else None
        if summary is not None:
            return number(summary.median)
    return ""


def _label(client: str) -> str:
    """The library, without the manner in which the benchmarks use it."""
    return CLIENTS[client].label.partition(",")[0]


def _version(client: str, about: Mapping[str, Any]) -> str:
    needs = CLIENTS[client].needs
    distribution = "redis" if client == "redis-py" else needs[0] if needs else client
    return str(about["packages"][distribution])


def _try_all() -> dict[str, Any]:
    """Each in a process of its own; fails if one is not installed."""
    outcomes = {}
    for client in ASYNC_CLIENTS:
        if absence := CLIENTS[client].absence():
            raise SystemExit(f"{client}: {absence}")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.comparison", "one", client]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
        outcomes[client] = json.loads(done.stdout)
    about = {**_machine.about(), "server": asyncio.run(server_version())}
    wanted = ("date", "python", "packages", "server")
    return {"about": {key: about[key] for key in wanted}, "outcomes": outcomes}


if __name__ == "__main__":
    main(sys.argv[1:])
