"""The command line: measure, report, plot."""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from pathlib import Path

from ._report import markdown, write_into
from ._results import Results
from ._rows import ROWS, chosen
from ._run import Plan, prepare, run

ROUNDS = 5


def main(arguments: list[str]) -> None:
    """Do what the command line says; measure if it says nothing."""
    if arguments and arguments[0] in ("report", "plot", "page"):
        _show(arguments)
    else:
        _measure(arguments)


def _show(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="print a file of results as Markdown")
    report.add_argument("results", type=Path)
    plot = commands.add_parser("plot", help="draw a file of results")
    plot.add_argument("results", type=Path)
    plot.add_argument("directory", type=Path)
    page = commands.add_parser("page", help="write the report of a file of results into a page")
    page.add_argument("results", type=Path)
    page.add_argument("page", type=Path)
    options = parser.parse_args(arguments)
    results = Results.load(options.results)
    if options.command == "report":
        _report(results)
    elif options.command == "plot":
        _plot(results, options.directory)
    else:
        write_into(options.page, results)


def _measure(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"of {names}, or what they begin")
    parser.add_argument("--clients", nargs="+", metavar="CLIENT", help="only these")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; with --quick, 1")
    parser.add_argument("--quick", action="store_true", help="fewer clients, short windows")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the results there")
    parser.add_argument("--page", type=Path, help="write the report into this page")
    options = parser.parse_args(arguments)
    try:
        rows = chosen(options.rows) if options.rows else ROWS
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(
        rows=rows,
        rounds=options.rounds or (1 if options.quick else ROUNDS),
        is_quick=options.quick,
        only=frozenset(options.clients) if options.clients else None,
    )
    prepare(_say)
    results = asyncio.run(run(plan, _say, functools.partial(_keep, options.out)))
    if options.plots:
        _plot(results, options.plots)
    if options.page:
        write_into(options.page, results)
    _report(results)


def _keep(path: Path | None, results: Results) -> None:
    if path is not None:
        results.save(path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def _report(results: Results) -> None:
    print(markdown(results))  # noqa: T201


def _plot(results: Results, directory: Path) -> None:
    from ._plots import draw

    for path in draw(results, directory):
        _say(f"drawn: {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
