"""An aligned table of text cells, coloured where the reader's terminal can show it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TextIO

from aiodlock.cli._screen import padded, width


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


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, coloured: bool) -> list[str]:
    """The lines of the table: *head*, a rule, the rows; figures stand to the right."""
    widths = [max(map(width, column)) for column in zip(head, *map(_texts, rows), strict=True)]
    lines = [_line([Cell(text) for text in head], widths, coloured=False)]
    lines.append("  ".join("-" * width for width in widths))
    return lines + [_line(row, widths, coloured=coloured) for row in rows]


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
    text = padded(cell.text, columns, right=cell.text.isdecimal())
    return f"{cell.tone}{text}\x1b[0m" if coloured and cell.tone else text
