"""The pages on the command line say what the command is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aiodlock.cli import _parser, main
from aiodlock.cli._connecting import ExitCode
from aiodlock.cli._run import _command

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = (DOCS / "reference" / "command-line.md").read_text()
HOW_TO = (DOCS / "how-to" / "command-line.md").read_text()
SHELL = "".join(re.findall(r"```sh\n(.*?)```", HOW_TO, re.DOTALL))


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `aiodlock COMMAND --help` prints."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", re.findall(r"^## `aiodlock (\w+)`$", REFERENCE, re.MULTILINE))
def test_help_in_the_reference_is_the_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every Python, at 100 columns. If not: paste it anew."""
    monkeypatch.setenv("COLUMNS", "100")
    assert f"## `aiodlock {command}`\n\n```text\n{help_of(command, capsys)}```\n" in REFERENCE


@pytest.mark.parametrize("line", re.findall(r"\b(aiodlock run .*)$", SHELL, re.MULTILINE))
def test_command_of_the_how_to_is_understood(line: str) -> None:
    """Its options are known, and come before the name."""
    args = _parser().parse_args(shlex.split(line)[1:])
    assert _command(args)[0].startswith(("./", "/"))


def test_every_exit_code_is_on_the_page_and_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that are ours."""
    told = help_of("run", capsys)
    for code in ExitCode:
        assert re.search(rf"^ +{int(code)}  \w", told, re.MULTILINE)
        assert re.search(rf"^\|.*\b{int(code)}\b.*\|$", HOW_TO, re.MULTILINE)
