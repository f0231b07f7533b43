"""Whole clients on a virtual clock: no seed breaks a rule, and each rule put out is noticed."""

from __future__ import annotations

import asyncio
import multiprocessing.pool
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from aiodlock import QuorumError
from aiodlock._store._quorum import QuorumStore
from tests.mutants import function_mutant
from tests.simulation import many
from tests.simulation.chaos import FAULTS
from tests.simulation.many import MUTANTS, Caught, Tally
from tests.simulation.one import simulate
from tests.simulation.quorum_chaos import QUORUM_FAULTS
from tests.simulation.quorum_course import QuorumSimulation
from tests.simulation.setting import Setting
from tests.simulation.users import client_of, redis_of
from tests.simulation.virtual import under_seed

ROOT: Final = Path(__file__).parent.parent
SEEDS: Final = 150
SEEDS_OF_QUORUM: Final = 60
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
def quorum_tally(pool: multiprocessing.pool.Pool) -> Tally:
    """The same with three servers, or five."""
    return many.run_many(0, SEEDS_OF_QUORUM, pool, is_quorum=True)


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


def test_clients_of_a_quorum_under_what_it_bears_keep_every_rule(quorum_tally: Tally) -> None:
    """Nor do minorities that crash, lose their keys, or are cut off bring a breach."""
    assert not quorum_tally.failed, f"\n{quorum_tally}"


def test_chaos_of_a_quorum_brings_every_fault_to_somebody(quorum_tally: Tally) -> None:
    """Each kind of fault was injected, and hit a holder or one who tries."""
    assert [fault for fault in QUORUM_FAULTS if not quorum_tally.hits[fault]] == []


def test_users_of_a_quorum_go_every_way(quorum_tally: Tally) -> None:
    """Leases were got, confirmed, lost and broken off, and newcomers came at the end."""
    ways = ("got", "confirm", "release", "cut off", "close", "act", "newcomer", "overlap")
    assert [way for way in ways if not quorum_tally.counts[way]] == []
    assert quorum_tally.counts["newcomer"] >= SEEDS_OF_QUORUM


@pytest.mark.parametrize("mutant", [mutant.name for mutant in MUTANTS])
def test_referee_with_one_rule_put_out_notices(mutant: str, caught: dict[str, Caught]) -> None:
    """Each rule is there because something breaks without it."""
    assert caught[mutant].rule is not None, f"not within {caught[mutant].seeds} seeds"


def left_after_extending() -> float:
    """Three nodes: the first extended to 10 s, the second to 3 s, the third is down."""
    with under_seed(0):
        setting = Setting.of_quorum(random.Random(0), rate_share=0.0, faults=[])
        users = replace(setting.options, nodes=("s0", "s1", "s2"), request_timeout_s=0.2)
        setting = replace(setting, hosts=0, tasks=(), options=users)
        simulation = QuorumSimulation(0, setting, random.Random(0))
        host = simulation.add_host("h0", random.Random(0))
        _, second, third = (site.server for site in simulation.sites.values())

        async def hold() -> float:
            servers = [redis_of(node, users) for node in users.nodes]
            async with client_of(servers, users, label="h0") as client:
                lease = await client.lock("a", ttl=3.0, auto_extend=False).acquire()
                third.crash(tells=True)
                second.refusal = "BUSY Redis is busy running a script."
                with pytest.raises(QuorumError):
                    await lease.extend(10.0)
                second.refusal = None
                await asyncio.sleep(0.5)
                return await lease.extend(3.0)

        task = host.loop.create_task(hold())
        assert simulation.world.run(until=10.0, is_over=task.done)
        simulation.leave()
        return task.result()


def test_lease_whose_nodes_differ_lasts_as_long_as_the_shortest() -> None:
    """Chance seldom leads there: an extension that failed made one node's life longer."""
    assert 2.5 < left_after_extending() < 3.0


def test_lease_that_trusts_the_longest_life_is_noticed() -> None:
    """The negative control."""
    with function_mutant(QuorumStore, "_confirm", "min(left for", "max(left for"):
        assert left_after_extending() > 9.0


@pytest.mark.parametrize("world", [(), ("--quorum",)], ids=["one", "quorum"])
def test_seed_in_another_process_has_the_same_history(world: tuple[str, ...]) -> None:
    """A replay shows what happened, whatever the process hashes by."""
    told = {_replayed(*world, seed=3, hash_seed=hash_seed) for hash_seed in ("0", "4711")}
    assert len(told) == 1


def test_seeds_that_differ_have_histories_that_differ(pool: multiprocessing.pool.Pool) -> None:
    """The digest is of the history, not of nothing."""
    tally = [pool.apply(simulate, (seed,)).digest for seed in range(4)]
    assert len(set(tally)) == 4


def _replayed(*world: str, seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", *world, "--seed", str(seed)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "breaches: []" in done.stdout
    return done.stdout
