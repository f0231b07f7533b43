"""The page that shows the help of each command, as the commands themselves print it.

`python -m tests.command_line` writes it anew.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Final

from aiodlock import cli

PAGE: Final = Path(__file__).parent.parent / "docs/reference/command-line.md"
_SECTION: Final = re.compile(
    r"## aiodlock (?P<name>[a-z-]+)\n.*?```text\n(?P<help>.*?)```\n", re.DOTALL
)


def helps() -> dict[str, str]:
    """The help of each command, for a terminal of 80 columns."""
    parser = cli._parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        return {name: each.format_help() for name, each in commands.choices.items()}
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def shown(page: str) -> dict[str, str]:
    """What *page* shows of each command that has a section."""
    return {found["name"]: found["help"] for found in _SECTION.finditer(page)}


def alike(text: str) -> str:
    """*text* whichever Python made it: each breaks lines, and joins names, in its own way."""
    joined = re.sub(r"(-\w) [A-Z]+, (--[\w-]+)", r"\1, \2", text)
    return " ".join(joined.split())


def with_helps(page: str) -> str:
    """*page* with the help of each command in its section; who has none gets one at the end."""
    helps_ = helps()

    def renewed(found: re.Match[str]) -> str:
        return found[0].replace(found["help"], helps_.pop(found["name"], ""))

    page = _SECTION.sub(renewed, page)
    for name, text in helps_.items():
        page = f"{page.rstrip()}\n\n## aiodlock {name}\n\n```text\n{text}```\n"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_helps(PAGE.read_text("utf-8")), "utf-8")
