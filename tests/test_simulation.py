"""Whole clients on a virtual clock: no seed breaks a rule, and each rule put out is noticed."""

from __future__ import annotations

import multiprocessing.pool
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.simulation import many
from tests.simulation.chaos import FAULTS
from tests.simulation.many import Caught, Tally
from tests.simulation.mutants import MUTANTS
from tests.simulation.one import simulate

ROOT: Final = Path(__file__).parent.parent
SEEDS: Final = 150
PROCESSES: Final = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[multiprocessing.pool.Pool]:
    """Processes that simulate."""
    with many.workers(PROCESSES) as processes:
        yield processes


@pytest.fixture(scope="module")
def tally(pool: multiprocessing.pool.Pool) -> Tally:
    """The same seeds in each run: a test that fails by chance helps nobody."""
    return many.run_many(0, SEEDS, pool)


@pytest.fixture(scope="module")
def caught(pool: multiprocessing.pool.Pool) -> dict[str, Caught]:
    """Who noticed which mutant."""
    return {one.mutant: one for one in pool.imap_unordered(many.hunt, range(len(MUTANTS)))}


def test_clients_under_any_chaos_keep_every_rule(tally: Tally) -> None:
    """No seed has a breach; a failing one comes with the command that replays it."""
    assert not tally.failed, f"\n{tally}"


def test_chaos_of_all_seeds_brings_every_fault_to_somebody(tally: Tally) -> None:
    """Each kind of fault was injected, and hit a holder or a waiter."""
    assert [fault for fault in FAULTS if not tally.hits[fault]] == []


def test_users_of_all_seeds_go_every_way(tally: Tally) -> None:
    """Leases were got, lost, broken off and handed on: what never happens is not tested."""
    ways = ("got", "grant", "publish", "release", "cut off", "close", "act", "overlap")
    assert [way for way in ways if not tally.counts[way]] == []


@pytest.mark.parametrize("mutant", [mutant.name for mutant in MUTANTS])
def test_referee_with_one_rule_put_out_notices(mutant: str, caught: dict[str, Caught]) -> None:
    """Each rule is there because something breaks without it."""
    assert caught[mutant].rule is not None, f"not within {caught[mutant].seeds} seeds"


def test_seed_in_another_process_has_the_same_history() -> None:
    """A replay shows what happened, whatever the process hashes by."""
    told = {_replayed(seed=3, hash_seed=hash_seed) for hash_seed in ("0", "4711")}
    assert len(told) == 1


def test_seeds_that_differ_have_histories_that_differ(pool: multiprocessing.pool.Pool) -> None:
    """The digest is of the history, not of nothing."""
    tally = [pool.apply(simulate, (seed,)).digest for seed in range(4)]
    assert len(set(tally)) == 4


def _replayed(*, seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "breaches: []" in done.stdout
    return done.stdout
