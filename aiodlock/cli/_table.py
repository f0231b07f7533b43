"""An aligned table of text cells, coloured where the reader's terminal can show it."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TextIO

from aiodlock.cli._screen import padded, shortened, width


class Tone(StrEnum):
    """How a cell is meant; the value is its terminal colour."""

    PLAIN = ""
    GOOD = "\x1b[32m"
    BAD = "\x1b[31m"


@dataclass(frozen=True, slots=True)
class Cell:
    """A text of the table, and whether it is good news."""

    text: str
    tone: Tone = Tone.PLAIN


_HEAD_LEAST: Final = 5
_LEAST: Final = 8
"""Columns that are left of a text that may be cut."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    coloured: bool,
    columns: int | None = None,
    may_cut: Collection[int] = (),
) -> list[str]:
    """The lines of the table: *head*, a rule, the rows; figures stand to the right.

    To fit into *columns* of a terminal, as far as that is possible, the head is cut, and the cells
    of the columns *may_cut*; what was cut ends with `>`.
    """
    texts = list(zip(head, *map(_texts, rows), strict=True))
    widths = [max(map(width, column)) for column in texts]
    if columns is not None:
        least = [max([min(width(first), _HEAD_LEAST), *map(width, rest)]) for first, *rest in texts]
        widths = _narrowed(widths, least, columns - 2 * (len(head) - 1), may_cut)
    lines = [_line([Cell(text) for text in head], widths, coloured=False)]
    lines.append("  ".join("-" * width for width in widths))
    return lines + [_line(row, widths, coloured=coloured) for row in rows]


def _narrowed(
    widths: list[int], least: list[int], room: int, may_cut: Collection[int]
) -> list[int]:
    """*widths* that need no more than *room*: the head gives way first, then the widest text."""
    narrow = list(widths)
    for index, need in enumerate(least):
        if index not in may_cut:
            narrow[index] -= min(max(0, sum(narrow) - room), max(0, widths[index] - need))
    # Bound: each turn takes a column away from what may be cut.
    while sum(narrow) > room:
        widest = max(may_cut, key=lambda index: narrow[index], default=None)
        if widest is None or narrow[widest] <= _LEAST:
            break
        narrow[widest] -= 1
    return narrow


def can_colour(stream: TextIO) -> bool:
    """Whether *stream* is a terminal whose user has not asked for no colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _texts(row: Sequence[Cell]) -> list[str]:
    return [cell.text for cell in row]


def _line(row: Sequence[Cell], widths: Sequence[int], *, coloured: bool) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join(_cell(cell, columns, coloured) for cell, columns in cells).rstrip()


def _cell(cell: Cell, columns: int, coloured: bool) -> str:
    # Padded before it is coloured: the colour's own characters take no room on the screen.
    text = padded(shortened(cell.text, columns), columns, right=cell.text.isdecimal())
    return f"{cell.tone}{text}\x1b[0m" if coloured and cell.tone else text
