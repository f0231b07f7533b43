"""The page that compares: its tables say what was tried and measured, and nothing else."""

from __future__ import annotations

import json

import pytest

from aiodlock.testing import lock_server
from benchmarks._behaviours import ASYNC_CLIENTS, TRIALS, tried
from benchmarks._report import number
from benchmarks._results import Results
from benchmarks.comparison import BEGIN, BEHAVIOURS, END, FIGURES, PAGE, RESULTS, filled, main
from benchmarks.comparison import behaviours as table_of


def told() -> dict[str, dict[str, dict[str, str]]]:
    """The file that the first table is made from."""
    made: dict[str, dict[str, dict[str, str]]] = json.loads(BEHAVIOURS.read_text())
    return made


def test_page_says_what_the_files_say() -> None:
    """No figure on it was written by hand."""
    text = PAGE.read_text()
    for table in ("behaviours", "figures"):
        assert text.count(BEGIN.format(table=table)) == text.count(END.format(table=table)) == 1
    assert filled(text) == text


def test_page_shows_a_figure_of_the_results_for_each_column() -> None:
    """Those of aiodlock, which is in every row."""
    results = Results.load(RESULTS)
    table = PAGE.read_text().partition(BEGIN.format(table="figures"))[2]
    (line,) = (line for line in table.splitlines() if line.startswith("| aiodlock | "))
    row = [cell.strip() for cell in line.split("|")]
    for name, figure, _ in FIGURES:
        summary = results.summary(name, "aiodlock", figure)
        assert summary is not None
        assert number(summary.median) in row


def test_every_client_was_tried_in_every_trial() -> None:
    """None is left out because it did badly, or well."""
    outcomes = told()["outcomes"]
    assert list(outcomes) == list(ASYNC_CLIENTS)
    assert all(list(each) == list(TRIALS) for each in outcomes.values())


def test_table_names_each_client_with_its_version() -> None:
    """A reader with another version knows."""
    lines = table_of(told()).splitlines()
    assert lines[2].startswith(f"| aiodlock {told()['about']['packages']['aiodlock']} |")
    assert len(lines) == 2 + len(ASYNC_CLIENTS) + 2


@pytest.mark.deep
@pytest.mark.parametrize("client", ["aiodlock", "redis-py"])
async def test_client_tried_again_does_what_the_page_says(client: str) -> None:
    """The trials find the same now; redis-py's lock shows that they can find a fault."""
    with lock_server() as server:
        assert await tried(client, server) == told()["outcomes"][client]


def test_unknown_command_is_refused() -> None:
    """By the parser, before anything is written."""
    with pytest.raises(SystemExit):
        main(["nonsense"])
