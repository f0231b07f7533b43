"""The page about the command line shows what the commands say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aiodlock.cli._connecting import ExitCode
from tests import command_line

ANEW = "`python -m tests.command_line` writes the page anew"


def test_page_has_a_section_for_each_command_and_no_other() -> None:
    """Whichever commands there are."""
    page = command_line.PAGE.read_text("utf-8")
    assert sorted(command_line.shown(page)) == sorted(command_line.helps()), ANEW


@pytest.mark.parametrize("name", sorted(command_line.helps()))
def test_page_shows_the_help_of_a_command_as_it_is(name: str) -> None:
    """Not as it was."""
    shown = command_line.shown(command_line.PAGE.read_text("utf-8"))
    assert command_line.alike(shown[name]) == command_line.alike(command_line.helps()[name]), ANEW


def test_page_written_anew_is_not_stale(tmp_path: Path) -> None:
    """Whatever stood there, and if a command had no section."""
    page = "# Title\n\n## aiodlock ls\n\nWords.\n\n```text\nold\n```\n"
    anew = command_line.with_helps(page)
    assert command_line.shown(anew) == command_line.helps()
    assert anew.startswith("# Title\n\n## aiodlock ls\n\nWords.\n\n```text\nusage: aiodlock ls")


def test_page_lists_every_exit_code_that_commands_share() -> None:
    """By its number."""
    page = command_line.PAGE.read_text("utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert set(ExitCode) <= listed
