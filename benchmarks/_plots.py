"""Results as drawings: SVG files that load nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from ._results import Results
from .clients import CLIENTS

Points = dict[int, float]


@dataclass(frozen=True)
class Plot:
    """One figure over the rows whose names begin alike, of which the last part is a number."""

    file: str
    title: str
    rows: str
    across: str
    figure: str
    clients: Sequence[str]

    def lines(self, results: Results) -> dict[str, Points]:
        """For each client that has some its points: the medians."""
        lines = {client: dict(sorted(self._points(results, client))) for client in self.clients}
        return {client: points for client, points in lines.items() if points}

    def _points(self, results: Results, client: str) -> Iterator[tuple[int, float]]:
        for row in results.rows():
            kind, _, number = row.rpartition("-")
            summary = results.summary(row, client, self.figure)
            if kind == self.rows and summary is not None and summary.median > 0:
                yield int(number), summary.median


PLOTS: Final = (
    Plot(
        "cost-against-tasks.svg", "Client CPU for one cycle, µs", "cycle", "tasks",
        "client_cpu_us", ("aiodlock", "redis-py", "redis-py-pool", "fifo", "floor-own"),
    ),
    Plot(
        "hand-off-against-waiters.svg", "Hand-off to another task, median, ms", "handoff",
        "tasks that want one name", "handoff_median_ms",
        ("aiodlock", "redis-py", "redis-py-pool", "fifo", "floor-own"),
    ),
    Plot(
        "cpu-against-leases.svg", "Client CPU for leases held, s/s", "leases", "leases, ttl 3 s",
        "client_cpu_s_per_s", ("aiodlock", "fifo", "floor-own"),
    ),
)  # fmt: skip
COLORS: Final = {
    "aiodlock": "#0b6e99",
    "redis-py": "#c4452d",
    "redis-py-pool": "#d98e04",
    "fifo": "#6b4fa0",
    "floor-own": "#4a4a4a",
}
"""The same in every plot."""
WIDTH, HEIGHT, LEGEND_MARGIN = 800, 500, 40


def draw(results: Results, directory: Path) -> list[Path]:
    """Every plot for which there are points; returns the files written."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in PLOTS:
        lines = plot.lines(results)
        if lines:
            path = directory / plot.file
            path.write_text(_svg(plot, lines))
            written.append(path)
    return written


def _svg(plot: Plot, lines: dict[str, Points]) -> str:
    import pygal

    # As labels, not as numbers: pygal has no logarithmic axis for what goes across.
    numbers = sorted({number for points in lines.values() for number in points})
    chart = pygal.Line(_config(tuple(COLORS[client] for client in lines)))
    chart.title = plot.title
    chart.x_title = plot.across
    chart.x_labels = [f"{number:,}" for number in numbers]
    for client, points in lines.items():
        chart.add(CLIENTS[client].label, [points.get(number) for number in numbers])
    return _without_scripts(chart.render_tree())


def _without_scripts(drawing: ElementTree.Element) -> str:
    """What is left is a picture: nothing in it runs or is loaded."""
    for parent in drawing.iter():
        for child in list(parent):
            if str(child.tag).endswith("script"):
                parent.remove(child)
    return f"{ElementTree.tostring(drawing, encoding='unicode')}\n"


def _config(colors: tuple[str, ...]) -> Any:
    import pygal
    from pygal.style import CleanStyle

    style = CleanStyle(
        colors=colors, background="white", plot_background="white", font_family="sans-serif"
    )
    return pygal.Config(
        style=style,
        js=[],  # Else it wants one from elsewhere.
        width=WIDTH,
        height=HEIGHT,
        logarithmic=True,
        legend_at_bottom=True,
        legend_at_bottom_columns=2,
        margin_bottom=LEGEND_MARGIN,
        truncate_legend=-1,
        allow_interruptions=False,
        stroke_style={"width": 2},
        dots_size=4,
        disable_xml_declaration=True,
        no_prefix=True,
    )
