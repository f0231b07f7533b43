"""Text made harmless, and measured, for terminals."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodlock.cli._screen import cut, harmless, padded, quoted, shortened, span, width
from aiodlock.cli._table import Cell, table


@given(st.text(st.characters(), max_size=30))
def test_harmless_text_is_one_printable_line(text: str) -> None:
    """Whatever was in it, bytes that are no text, too."""
    shown = harmless(text)
    assert shown.isprintable()
    assert shown == shown.strip(" ")


@given(st.text("a\\\n\x1b\x80n x2e0\u202e", max_size=8), st.text("a\\\n\x1bnx 2e0", max_size=8))
def test_harmless_texts_of_different_names_differ(one: str, other: str) -> None:
    """An operator must know which name is meant."""
    assert (harmless(one) == harmless(other)) == (one == other)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("invoice:42", "invoice:42"),
        ("日本 語", "日本 語"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x1b[31m", r"\e[31m"),
        ("a\\n", r"a\\n"),
        ("\u202eabc\u200b", r"\u202eabc\u200b"),
        ("\U000e0041", r"\U000e0041"),
        ("\udcff", r"\xff"),
        (" a b ", r"\x20a b\x20"),
        ("  ", r"\x20\x20"),
        ("", ""),
    ],
)
def test_harmless_writes_what_a_terminal_acts_on_as_an_escape(text: str, shown: str) -> None:
    """And leaves the rest."""
    assert harmless(text) == shown
    assert quoted(text) == f"'{shown}'"


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[31m", "a\\nb", "\u202e日本", " a "])
def test_harmless_text_can_be_given_back_through_a_shell(name: str) -> None:
    """Within `$'...'`."""
    command = ["bash", "-c", f"printf %s $'{harmless(name)}'"]
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert done.stdout.decode() == name


def test_width_counts_the_columns_of_a_terminal() -> None:
    """Wide characters take two, marks on another character none."""
    assert [width(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]


def test_cut_text_fits_and_halves_no_wide_character() -> None:
    """As much as there is room for."""
    assert [cut("a日本", columns) for columns in (0, 1, 2, 3, 9)] == ["", "a", "a", "a日", "a日本"]


def test_padded_text_is_as_wide_as_asked() -> None:
    """On either side."""
    assert (padded("日", 4), padded("日", 4, right=True)) == ("日  ", "  日")


def test_table_with_wide_characters_stays_aligned() -> None:
    """Each column begins at one place of the screen."""
    rows = [[Cell("日本"), Cell("x")], [Cell("abcde"), Cell("x")]]
    lines = table(("a", "b"), rows, coloured=False)
    assert [width(line[: line.rindex(line[-1])]) for line in (lines[0], *lines[2:])] == [7, 7, 7]


def test_table_without_room_cuts_the_head_and_what_may_be_cut() -> None:
    """Never a number, and it says that something was cut."""
    rows = [[Cell("a name that is long"), Cell("1796036624600362"), Cell("7")], [Cell("b")] * 3]
    head = ("name", "fencing token of it", "queue")
    fits, narrow = (
        table(head, rows, coloured=False, columns=columns, may_cut=(0,)) for columns in (80, 40)
    )
    assert fits == table(head, rows, coloured=False)
    assert narrow[0].split() == ["name", "fencing", "token", "o>", "queue"]
    assert narrow[2] == "a name that is>  1796036624600362      7"
    assert max(map(width, narrow)) <= 40


def test_table_with_too_little_room_leaves_numbers_whole() -> None:
    """The terminal is narrower than they are: who shows the line marks where it ends."""
    rows = [[Cell("a name that is long"), Cell("1796036624600362")]]
    (*_, line) = table(("name", "token"), rows, coloured=False, columns=20, may_cut=(0,))
    assert line == "a name >  1796036624600362"


def test_shortened_text_says_so() -> None:
    """By its last sign."""
    assert [shortened("1796036", columns) for columns in (6, 7)] == ["17960>", "1796036"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (60, "1 min 0 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_span_is_told_in_the_two_largest_units(seconds: float, words: str) -> None:
    """As people say it."""
    assert span(seconds) == words
