"""Results as Markdown: what the page of the documentation shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ._gates import GATES, Verdict, judged
from ._results import Results, Summary
from .clients import CLIENTS

COLUMNS: Final[dict[str, str]] = {
    "cycles_per_s": "cycles/s",
    "calm_ms": "ms/cycle before",
    "cycle_ms": "ms/cycle",
    "cycle_ratio": "ms/cycle, in trouble / before",
    "longest_ms": "longest cycle ms",
    "client_cpu_us": "client CPU µs/cycle",
    "cpu_ratio": "client CPU, in trouble / before",
    "server_cpu_us": "server CPU µs/cycle",
    "handoff_median_ms": "hand-off ms, median",
    "handoff_p99_ms": "hand-off ms, p99",
    "longest_wait_ms": "longest wait ms",
    "jain": "Jain",
    "sent": "commands/cycle",
    "evalsha": "EVALSHA/cycle",
    "calls": "calls/cycle, those in scripts too",
    "client_cpu_s_per_s": "client CPU s/s",
    "server_cpu_s_per_s": "server CPU s/s",
    "sent_per_s": "commands/s each",
    "lag_p99_ms": "loop late ms, p99",
    "lag_max_ms": "loop late ms, most",
    "resident_kb": "resident kB/lease",
    "traced_kb": "traced kB/lease",
    "keys_bytes": "bytes of keys each",
    "server_bytes": "server's memory each, buffers too, bytes",
    "published_to_nodes": "messages between nodes/cycle",
    "connections": "connections",
    "lost": "lost",
    "overlaps": "overlaps",
    "errors": "errors",
}
"""Figures that tables show, in this order, where a row has them."""
NODE_COLUMNS: Final = {
    "server_cpu_us": "CPU µs",
    "evalsha": "EVALSHA",
    "published": "PUBLISH",
    "net_out_bytes": "bytes out",
}
NODES: Final = 3
BEGIN: Final = "<!-- report: python -m benchmarks page -->"
END: Final = "<!-- end of report -->"
WORDS: Final = {
    **COLUMNS,
    "client_cpu_us": "client CPU per cycle",
    "cycle_ms": "time of a cycle",
    "cycle_ratio": "time of a cycle, in trouble / before",
    "handoff_median_ms": "hand-off",
    "sent_per_s": "commands/s and waiter",
}


def markdown(results: Results) -> str:
    """The whole report."""
    parts = [_about(results), *gates(results)]
    parts += [part for row in results.rows() for part in _row(results, row)]
    return "\n\n".join(parts)


def write_into(page: Path, results: Results) -> None:
    """Put the report between the two marks of *page*, in place of what stands there."""
    text = page.read_text()
    page.write_text(f"{before(text)}{BEGIN}\n\n{markdown(results)}\n\n{END}{after(text)}")


def before(page: str) -> str:
    """What stands in a page before its report."""
    return page.partition(BEGIN)[0]


def after(page: str) -> str:
    """What stands behind it."""
    return page.partition(END)[2]


def _about(results: Results) -> str:
    about, machine = results.about, results.about["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    rounds = results.parameters["rounds"]
    return "\n".join(
        [
            f"* {machine['cpu']}, {machine['cores']} cores, {machine['kernel']}; {about['python']}",
            f"* {packages}" + (f", node {about['node']}" if about["node"] else ""),
            f"* server: {about['server']}",
            *_left_out(about.get("left_out", {})),
            f"* {rounds} {'round' if rounds == 1 else 'rounds'}, {about['date']}",
            f"* commit {about['commit']}",
        ]
    )


def _left_out(reasons: Mapping[str, str]) -> Iterator[str]:
    if reasons:
        yield "* tried, and left out: " + "; ".join(
            f"{name} {reason}" for name, reason in reasons.items()
        )


def gates(results: Results) -> Iterator[str]:
    """The table of gates and aims."""
    verdicts = judged(results, GATES)
    if verdicts:
        yield "### Gates"
        head = ("row", "aiodlock's", "median", "spread", "gate", "", "aim", "")
        yield table(head, (_gate_cells(verdict) for verdict in verdicts))


def _gate_cells(verdict: Verdict) -> Sequence[str]:
    gate, summary = verdict.gate, verdict.summary
    sign = "≥" if gate.at_least else "≤"
    bounds = ["" if b is None else f"{sign} {number(b)}" for b in (gate.gate, gate.aim)]
    subject = WORDS.get(gate.figure, gate.figure)
    if gate.client != "aiodlock":
        subject = f"{subject}, {CLIENTS[gate.client].label.removeprefix('aiodlock, ')}"
    if gate.others:
        place = f" in {gate.against_row}" if gate.against_row else ""
        subject = f"{subject} / that of {_named(gate.others)}{place}"
    median = number(summary.median) if summary else "-"
    return (
        gate.row, subject, median, _spread(summary), bounds[0], verdict.gate_says,
        bounds[1], verdict.aim_says,
    )  # fmt: skip


def _named(clients: Sequence[str]) -> str:
    if len(clients) > 1:
        return f"the best of {', '.join(clients)}"
    return CLIENTS[clients[0]].label


def _row(results: Results, row: str) -> Iterator[str]:
    """One row: everybody's figures, and who has none."""
    yield f"### {row}: {results.parameters['rows'][row]['title']}"
    clients = list(dict.fromkeys(run.client for run in results.runs if run.row == row))
    clients.sort(key=list(CLIENTS).index)
    measured = [client for client in clients if _figures(results, row, client)]
    columns = [
        figure
        for figure in COLUMNS
        if any(figure in _figures(results, row, client) for client in measured)
    ]
    if measured:
        head = ("", *(COLUMNS[column] for column in columns))
        yield table(head, (_client_cells(results, row, one, columns) for one in measured))
    yield from _of_nodes(results, row, measured)
    notes = [*_failures(results, row), *_absent(results, row)]
    if notes:
        yield "\n".join(f"* {note}" for note in notes)


def _figures(results: Results, row: str, client: str) -> set[str]:
    runs = (run for run in results.runs if (run.row, run.client) == (row, client))
    return {figure for run in runs for figure in run.figures}


def _client_cells(
    results: Results, row: str, client: str, columns: Sequence[str]
) -> Sequence[str]:  # fmt: skip
    summaries = (results.summary(row, client, column) for column in columns)
    return (CLIENTS[client].label, *map(_with_spread, summaries))


def _of_nodes(results: Results, row: str, clients: Sequence[str]) -> Iterator[str]:
    """What each node of a cluster did for one cycle."""
    if any("node0_evalsha" in _figures(results, row, client) for client in clients):
        head = ("each cycle", "node", *NODE_COLUMNS.values())
        yield table(head, _node_cells(results, row, clients))


def _node_cells(results: Results, row: str, clients: Sequence[str]) -> Iterator[Sequence[str]]:
    for client in clients:
        for node in range(NODES):
            names = [f"node{node}_{figure}" for figure in NODE_COLUMNS]
            summaries = (results.summary(row, client, name) for name in names)
            role = "the name's" if node == 0 else "another"
            yield (CLIENTS[client].label, role, *map(_with_spread, summaries))


def _failures(results: Results, row: str) -> Iterator[str]:
    """Runs without figures, and the kinds of errors in those with some."""
    for run in results.runs:
        if run.row == row and run.failed:
            yield f"{CLIENTS[run.client].label}, round {run.round}: {run.failed}"
        if run.row == row and run.errors:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in run.errors.items())
            yield f"{CLIENTS[run.client].label}, round {run.round}: {kinds}"


def _absent(results: Results, row: str) -> Iterator[str]:
    for client, reason in results.absent.get(row, {}).items():
        yield f"{CLIENTS[client].label}: not measured, {reason}"


def _with_spread(summary: Summary | None) -> str:
    if summary is None:
        return ""
    if summary.low == summary.high:
        return number(summary.median)
    return f"{number(summary.median)} ({_spread(summary)})"


def _spread(summary: Summary | None) -> str:
    return f"{number(summary.low)} to {number(summary.high)}" if summary else "-"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
