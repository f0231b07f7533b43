"""Many seeds on every core, with what they add up to."""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.simulation.chaos import FAULTS
from tests.simulation.mutants import MUTANTS as MUTANTS_OF_ONE
from tests.simulation.mutants import Mutant
from tests.simulation.one import Verdict, simulate
from tests.simulation.quorum_chaos import QUORUM_FAULTS
from tests.simulation.quorum_mutants import MUTANTS as MUTANTS_OF_QUORUM

MUTANTS: Final = (*MUTANTS_OF_ONE, *MUTANTS_OF_QUORUM)
# Within so many seeds each mutant must be caught.
SEEDS_OF_MUTANT: Final = 200
_CHUNK: Final = 5


class Caught(NamedTuple):
    """What became of a mutant; *rule* is None if nobody noticed it."""

    mutant: str
    rule: str | None
    breach: str
    seed: int
    seeds: int


@dataclass
class Tally:
    """What many simulations came to."""

    seeds: int = 0
    turns: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    failed: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.seeds += 1
        self.turns += verdict.turns
        self.virtual_s += verdict.virtual_s
        self.counts += verdict.counts
        self.injected += verdict.injected
        self.hits += verdict.hits
        if verdict.breaches:
            self.failed.append(verdict)

    def __str__(self) -> str:
        lines = [f"{'fault':<14} injected  hit a holder or a waiter"]
        lines += [
            f"{fault:<14} {count:8d}  {self.hits[fault]:8d}"
            for fault, count in sorted(self.injected.items())
        ]
        told = ("got", "acquire", "release", "retire", "grant", "publish", "cut off", "overlap")
        lines.append(", ".join(f"{kind}: {self.counts[kind]}" for kind in told))
        outcomes = sorted(kind for kind in self.counts if kind.startswith("outcome "))
        lines.append(", ".join(f"{kind[8:]}: {self.counts[kind]}" for kind in outcomes))
        for verdict in sorted(self.failed, key=lambda verdict: verdict.seed):
            lines.append(f"seed {verdict.seed}: {len(verdict.breaches)} breaches")
            lines += [f"    {breach}" for breach in verdict.breaches[:3]]
            lines.append(f"    python -m tests.simulation --seed {verdict.seed} --trace")
        return "\n".join(lines)


@contextmanager
def workers(count: int) -> Iterator[multiprocessing.pool.Pool]:
    """Processes of their own, which hash as every other run does."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        with multiprocessing.get_context("spawn").Pool(count, initializer=_begin) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def run_many(
    first: int,
    count: int,
    pool: multiprocessing.pool.Pool,
    *,
    faults: Sequence[str] | None = None,
    is_quorum: bool = False,
    on_failed: Callable[[Verdict], None] | None = None,
) -> Tally:
    """The seeds from *first* on; one that failed is told of at once."""
    tally = Tally()
    work = functools.partial(simulate, faults=faults, is_quorum=is_quorum)
    for verdict in pool.imap(work, range(first, first + count), chunksize=_CHUNK):
        tally.add(verdict)
        if verdict.breaches and on_failed is not None:
            on_failed(verdict)
    return tally


def hunt(number: int) -> Caught:
    """Simulate with mutant *number* until somebody notices."""
    mutant: Mutant = MUTANTS[number]
    with mutant.applied():
        for seed in range(mutant.first, mutant.first + SEEDS_OF_MUTANT):
            breaches = simulate(
                seed,
                rate_share=mutant.rate_share,
                faults=mutant.faults,
                stops_early=True,
                is_quorum=mutant.is_quorum,
                is_hasty=mutant.is_hasty,
                options=mutant.options,
            ).breaches
            if breaches:
                rule, _, what = breaches[0].partition(": ")
                return Caught(mutant.name, rule, what, seed, seed + 1 - mutant.first)
    return Caught(mutant.name, None, "", -1, SEEDS_OF_MUTANT)


def main(arguments: list[str]) -> int:
    """What the command line asks for; the process's exit status."""
    asked = _parser().parse_args(arguments)
    if asked.mutants:
        return _hunt_all(asked.workers)
    if asked.seed is not None:
        verdict = simulate(
            asked.seed, trace=asked.trace, faults=asked.faults, is_quorum=asked.quorum
        )
        for line in verdict.trace:
            print(line)
        print(f"seed {verdict.seed}: history {verdict.digest}, breaches: {verdict.breaches}")
        return int(bool(verdict.breaches))
    return _run_all(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print its history")
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=sorted({*FAULTS, *QUORUM_FAULTS}),
        help="of these (those that the seed draws)",
    )
    parser.add_argument("--quorum", action="store_true", help="of 3 or 5 servers, not of one")
    parser.add_argument("--mutants", action="store_true", help="see that each mutant is caught")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    return parser


def _run_all(asked: argparse.Namespace) -> int:
    began_at = time.perf_counter()
    with workers(asked.workers) as pool:
        tally = run_many(
            asked.first,
            asked.seeds,
            pool,
            faults=asked.faults,
            is_quorum=asked.quorum,
            on_failed=_tell,
        )
    took_s = time.perf_counter() - began_at
    print(tally)
    print(
        f"{tally.seeds} seeds from {asked.first} in {took_s:.0f} s: {tally.seeds / took_s:.1f} per "
        f"second in {asked.workers} processes, {tally.turns} turns; {len(tally.failed)} failed"
    )
    return int(bool(tally.failed))


def _tell(verdict: Verdict) -> None:
    print(f"seed {verdict.seed} failed: {verdict.breaches[0]}", file=sys.stderr, flush=True)


def _hunt_all(processes: int) -> int:
    with workers(processes) as pool:
        caught = list(pool.imap(hunt, range(len(MUTANTS))))
    for one in caught:
        result = f"{one.rule:<12} seed {one.seed:<4} {one.breach[:80]}" if one.rule else "MISSED"
        print(f"{one.mutant:<44} {result}")
    missed = [one for one in caught if one.rule is None]
    print(f"{len(caught) - len(missed)} of {len(caught)} mutants caught")
    return int(bool(missed))


def _begin() -> None:
    """What a process has from the beginning is no garbage to look at again and again."""
    gc.collect()
    gc.freeze()
