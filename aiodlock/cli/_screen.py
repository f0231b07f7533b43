"""Text from a server, as a terminal can show it without acting on it."""

from __future__ import annotations

import unicodedata
from typing import Final

_SHORT: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\x1b": r"\e", "\\": r"\\"}


def harmless(text: str) -> str:
    r"""*text* in one line: what a terminal would act on or hide stands there as an escape.

    The escapes are those of a shell's `$'...'`, so that the name can be given back to a command.
    """
    inner = "".join(map(_shown, text))
    head, tail = len(inner) - len(inner.lstrip(" ")), len(inner) - len(inner.rstrip(" "))
    if head == len(inner):
        return r"\x20" * head
    return r"\x20" * head + inner.strip(" ") + r"\x20" * tail


def quoted(name: str) -> str:
    """*name* within a sentence."""
    return f"'{harmless(name)}'"


def width(text: str) -> int:
    """How many columns of a terminal *text* takes."""
    return sum(map(_columns, text))


def padded(text: str, columns: int, *, right: bool = False) -> str:
    """*text* with blanks behind it, or before it, up to *columns*."""
    blanks = " " * (columns - width(text))
    return blanks + text if right else text + blanks


def cut(text: str, columns: int) -> str:
    """As much of *text* as fits into *columns*."""
    taken = 0
    for index, char in enumerate(text):
        taken += _columns(char)
        if taken > columns:
            return text[:index]
    return text


def shortened(text: str, columns: int) -> str:
    """*text*; where it does not fit into *columns*, as much of it as does, and `>`."""
    return text if width(text) <= columns else cut(text, columns - 1) + ">"


def span(seconds: float) -> str:
    """*seconds* for people: `0.4 s`, `4 min 12 s`, `3 h 5 min`, `2 d 7 h`."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(max(60, seconds)), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _shown(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    # Not printable are also characters that turn the direction of writing, or take no room.
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # A byte that was no UTF-8.
        return rf"\x{code - 0xDC00:02x}"
    if code < 0x80:
        return rf"\x{code:02x}"
    return rf"\u{code:04x}" if code < 0x10000 else rf"\U{code:08x}"


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
