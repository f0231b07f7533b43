"""Every rule of the register is held: put out, its test goes red, and as it is, green."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from aiodlock._validity import Validity
from tests import rules
from tests.rule_runs import Outcome, names_of, outcomes
from tests.rules import PROOFS, RULES, Elsewhere, Line, Proof, Rule

pytestmark = pytest.mark.deep

PAGE = Path(__file__).parent.parent / "docs/explanation/mutants.md"
MANY = 45
"""At least so many rules the design has."""


def ids(proofs: Iterable[Proof]) -> list[str]:
    """One for each, to choose it by `-k`."""
    of = {id(proof): rule.id for rule in RULES for proof in rule.proofs}
    counted: Counter[str] = Counter()
    names = []
    for proof in proofs:
        rule = of[id(proof)]
        counted[rule] += 1
        names.append(f"{rule} ({counted[rule]})")
    return names


IDS = ids(PROOFS)


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[tuple[str, int], Outcome]:
    """What each test of the register came to, as the code is (-1) and with each fault."""
    wanted: list[Any] = [
        item.callspec.params["number"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and "number" in item.callspec.params
    ]
    return {(outcome.check, outcome.proof): outcome for outcome in outcomes(wanted)}


@pytest.mark.parametrize("number", range(len(PROOFS)), ids=IDS)
def test_rule_that_is_put_out_is_noticed(ran: dict[tuple[str, int], Outcome], number: int) -> None:
    """Its test passes, but fails with the fault; and not by a slip of the fault's own."""
    proof = PROOFS[number]
    sound, spoilt = ran[proof.check, -1], ran[proof.check, number]
    assert sound.errors == [], f"it fails as the code is: {sound.text}"
    assert spoilt.errors != [], f"nobody notices: {proof}"
    assert proof.error in spoilt.errors, f"it fails by {spoilt.text!r}: {proof}"


CHECK = "tests/test_watchdog.py::test_validity_never_moves_its_deadline_back"
CONTROLS = [
    Proof(Line(Validity, "prolong", "max(self._answered, deadline)", "deadline"), CHECK),
    Proof(Line(Validity, "prolong", "self._is_asking = False", "self._is_asking = not 1"), CHECK),
    Proof(Line(Validity, "prolong", "a line that there is not", ""), CHECK),
    Proof(Line(Validity, "prolong", "self._ends_at)", "self.there_is_not)"), CHECK),
    Proof(Line(Validity, "prolong", "self._is_asking = False", "pass"), f"{CHECK}_not"),
]


def test_fault_that_changes_nothing_or_is_none_is_told() -> None:
    """The negative control of the runs: only the first of these counts as noticed."""
    ran = {outcome.proof: outcome for outcome in outcomes(range(5), f"{__name__}:CONTROLS")}
    noticed = ["AssertionError" in ran[number].errors for number in range(5)]
    assert noticed == [True, False, False, False, False]
    assert ran[1].errors == []
    assert "no such line" in ran[2].text
    assert "AttributeError" in ran[3].errors
    assert ran[4].text == "no such test"


def test_error_within_a_group_and_of_raises_is_found() -> None:
    """As task groups raise it, and as `raises` does where nothing was raised."""
    group = BaseExceptionGroup("", [ValueError(), ExceptionGroup("", [AssertionError()])])
    assert {"ValueError", "AssertionError"} <= set(names_of(group))
    with pytest.raises(pytest.fail.Exception) as failed:
        pytest.fail("as raises does")
    assert names_of(failed.value) == ["AssertionError"]


def found_elsewhere(place: Elsewhere) -> bool:
    """Whether that module has that fault."""
    table: Any = getattr(importlib.import_module(place.module), place.table, None)
    if table is None or not place.entry:
        return table is not None
    entries = table if isinstance(table, list | tuple) else [table]
    return any(place.entry in texts_of(entry) for entry in entries)


def texts_of(entry: object) -> list[object]:
    """The words by which an entry of a table can be found."""
    return list(entry) if isinstance(entry, tuple) else list(vars(entry).values())


ELSEWHERE = [proof for rule in RULES for proof in rule.proofs if isinstance(proof, Elsewhere)]


@pytest.mark.parametrize("place", ELSEWHERE, ids=lambda place: f"{place.table}: {place.entry}")
def test_fault_that_another_test_applies_is_there(place: Elsewhere) -> None:
    """The register names it; that test sees to it that it is noticed."""
    assert found_elsewhere(place), f"no such fault: {place}"


def test_fault_that_no_other_test_applies_is_told() -> None:
    """The negative control."""
    assert not found_elsewhere(Elsewhere("tests.test_invariants", "MUTANTS", "no such label"))
    assert not found_elsewhere(Elsewhere("tests.test_invariants", "NO_TABLE", ""))
    assert not found_elsewhere(Elsewhere("tests.test_late", "NOT_LEFT", "acquire"))


def unproven(register: Iterable[Rule]) -> list[str]:
    """The rules that nothing puts out."""
    return [rule.id for rule in register if not rule.proofs]


def test_every_rule_has_a_fault() -> None:
    """A rule without one is a sentence that nobody tests; and each has a name of its own."""
    assert unproven(RULES) == []
    assert unproven([*RULES, Rule("0 new", "A rule.", ())]) == ["0 new"]
    assert [rule for rule, n in Counter(rule.id for rule in RULES).items() if n > 1] == []
    assert {rule.id[0] for rule in RULES} >= {"1", "5", "6", "7"}
    assert len(RULES) >= MANY


def test_table_names_every_rule_with_what_notices_it() -> None:
    """It is what the documentation shows; `python -m tests.rules` prints it."""
    table = rules.table()
    assert PAGE.read_text().endswith(f"{table}\n"), "docs/explanation/mutants.md is not of today"
    for rule in RULES:
        assert rule.sentence in table
        for proof in rule.proofs:
            shown = proof.entry if isinstance(proof, Elsewhere) else proof.check.split("::")[1]
            assert shown.partition("[")[0] in table
