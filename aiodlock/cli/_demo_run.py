"""Plays the three parts of the demo, then shows their table."""

from __future__ import annotations

import sys
import textwrap

from aiodlock.cli._demo_job import QUICK_S, SLOW_EVERY_S, SLOW_S, TTL_S
from aiodlock.cli._demo_part import WORKERS, Outcome, Part
from aiodlock.cli._demo_report import HEAD, complaints, meaning, row
from aiodlock.cli._demo_server import room_on
from aiodlock.cli._demo_show import Show
from aiodlock.cli._progress import Progress
from aiodlock.cli._table import can_colour, table

_STARTING_S = 5.5  # of the whole, for starting the processes three times
_COLUMNS = 79


async def run_demo(url: str, seconds: float) -> bool:
    """Show the demo on the server at *url*; whether it showed what it should."""
    progress = Progress(sys.stdout)
    parts = _parts(seconds - _STARTING_S)
    show = Show(progress, len(parts))
    try:
        async with room_on(url) as room:
            progress.line(_wrapped(_introduction(room.server)))
            outcomes = [await show.play(part, url, room.prefix) for part in parts]
    finally:
        progress.clear()
    return _conclude(*outcomes)


def _parts(seconds: float) -> tuple[Part, Part, Part]:
    return (
        Part("setnx", "SETNX, no expiry", seconds * 0.2, outlasting_first=0),
        Part("set_nx_px", "SET NX PX, plain DEL", seconds * 0.3, outlasting_first=1),
        Part("aiodlock", "aiodlock", seconds * 0.5, outlasting_first=1),
    )


def _introduction(server: str) -> str:
    return (
        f"{WORKERS} processes take turns on one lock on {server}. A job lasts"
        f" {QUICK_S * 1000:g} ms; every {SLOW_EVERY_S:g} s there is one of {SLOW_S:g} s, longer"
        f" than the ttl of {TTL_S:g} s. In the middle of such a job its process is killed"
        " (SIGKILL). The same with three locks:"
    )


def _conclude(naive: Outcome, unchecked: Outcome, ours: Outcome) -> bool:
    outcomes = (naive, unchecked, ours)
    rows = [row(outcome) for outcome in outcomes]
    print("", *table(HEAD, rows, coloured=can_colour(sys.stdout)), "", sep="\n")
    found = complaints(*outcomes)
    if found:
        print("This run has not shown what it should:")
    for text in found or meaning(*outcomes):
        print(_wrapped(text, indent="- "))
    return not found


def _wrapped(text: str, indent: str = "") -> str:
    hanging = " " * len(indent)
    return textwrap.fill(text, _COLUMNS, initial_indent=indent, subsequent_indent=hanging)
