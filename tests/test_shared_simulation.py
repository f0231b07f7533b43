"""Readers, writers and permits of whole clients on a virtual clock, seed by seed."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from aiodlock._waiting import Wait
from tests.mutants import function_mutant
from tests.shared_model import _Shared
from tests.simulation.shared import simulate_shared

pytestmark = pytest.mark.deep

SEEDS: Final = 120
# Within so many seeds each mutant must be caught.
SEEDS_OF_MUTANT: Final = 120


def test_several_holders_under_any_chaos_keep_the_rule_of_entry(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No seed has a breach; and all that may happen does."""
    outcomes: Counter[str] = Counter()
    failed, most = [], 0
    for seed in range(SEEDS):
        verdict = simulate_shared(seed)
        outcomes += verdict.outcomes
        most = max(most, verdict.most_inside)
        if verdict.breaches:
            failed.append((seed, verdict.breaches[:3]))
    with capsys.disabled():
        print(f"\n{SEEDS} seeds: {dict(outcomes)}, at most {most} inside")
    assert failed == []
    assert most >= 4
    ways = ("got", "LockTimeout", "LeaseLostError", "cancelled", "downgraded")
    assert [way for way in ways if outcomes[way] < 10] == []


@pytest.mark.parametrize(
    ("owner", "function", "old", "new"),
    [
        (_Shared, "limit", "members[:1]", "[]"),
        (_Shared, "drop_ended", "self._server.now_ms, DEAD_MAX", "self._server.now_ms + 50, 9"),
        (Wait, "_take_hand_over", "value.fencing_token > self._largest_seen", "True"),
    ],
)
def test_simulation_with_a_rule_of_several_holders_put_out_notices(
    owner: type, function: str, old: str, new: str
) -> None:
    """The negative control."""
    with function_mutant(owner, function, old, new):
        assert any(simulate_shared(seed).breaches for seed in range(SEEDS_OF_MUTANT))
