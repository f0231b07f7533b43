"""The page on `aiodlock run` says what the command is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aiodlock.cli import _parser
from aiodlock.cli._connecting import ExitCode
from aiodlock.cli._run import _command
from tests.command_line import helps

HOW_TO = (Path(__file__).parent.parent / "docs/how-to/command-line.md").read_text()
SHELL = "".join(re.findall(r"```sh\n(.*?)```", HOW_TO, re.DOTALL))


@pytest.mark.parametrize("line", re.findall(r"\b(aiodlock run .*)$", SHELL, re.MULTILINE))
def test_command_of_the_how_to_is_understood(line: str) -> None:
    """Its options are known, and come before the name."""
    args = _parser().parse_args(shlex.split(line)[1:])
    assert _command(args)[0].startswith(("./", "/"))


def test_every_exit_code_is_on_the_page_and_in_the_help() -> None:
    """Those that are ours."""
    told = helps()["run"]
    for code in ExitCode:
        assert re.search(rf"^ +{int(code)}  \w", told, re.MULTILINE)
        assert re.search(rf"^\|.*\b{int(code)}\b.*\|$", HOW_TO, re.MULTILINE)
