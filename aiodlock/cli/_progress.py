"""A progress bar in one line of a terminal; plain lines where there is no terminal."""

import shutil
from typing import TextIO

_BAR_CELLS = 20


class Progress:
    """Lines that stay, below them a bar that is drawn over and over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_drawn_over = stream.isatty()
        self._drawn = ""

    def line(self, text: str) -> None:
        """Print *text* for good, above the bar."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def show(self, fraction: float, note: str) -> None:
        """Draw the bar at *fraction* of its length with *note* behind it."""
        if self._is_drawn_over:
            self._draw(f"{bar(fraction)}  {note}")

    def clear(self) -> None:
        """Take the bar away."""
        if self._drawn:
            self._draw("")

    def _draw(self, text: str) -> None:
        # Blanks over the rest of the last text: every terminal can do that. One column stays
        # free, because a full line would wrap.
        shown = text[: shutil.get_terminal_size().columns - 1]
        end = "" if shown else "\r"
        print(f"\r{shown:{len(self._drawn)}}", end=end, file=self._stream, flush=True)
        self._drawn = shown


def bar(fraction: float) -> str:
    """The bar itself: `[#####...............]`; anything beyond 1 is full."""
    full = round(min(max(fraction, 0.0), 1.0) * _BAR_CELLS)
    return f"[{'#' * full:.<{_BAR_CELLS}}]"
