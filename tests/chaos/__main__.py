"""``python -m tests.chaos [--seconds N] [--seed S] [--plan NAME ...]``."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from tests.chaos.plans import PLANS, Plan
from tests.chaos.report import text
from tests.chaos.run import run_plan

LEAST_S = 3.0
"""What a plan gets, however little there is for all."""


def main() -> int:
    """How many plans failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="of faults, for all plans")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=list(PLANS), metavar="NAME")
    parser.add_argument("--lock", default="aiodlock", help="or a naive one, which must fail")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    seconds = max(LEAST_S, chosen.seconds / len(chosen.plan))
    plans = [PLANS[name] for name in chosen.plan]
    failed = sum(not passes(plan, chosen.seed, seconds, chosen.lock) for plan in plans)
    print(f"\n{len(plans) - failed} plans passed, {failed} failed (seed {chosen.seed})")
    return failed


def passes(plan: Plan, seed: int, seconds: float, lock: str) -> bool:
    """Run it and print its report; the journals of a run that failed stay."""
    folder = Path(tempfile.mkdtemp(prefix=f"aiodlock-{plan.name}-"))
    is_well = False
    try:
        outcome = asyncio.run(run_plan(plan, seed=seed, seconds=seconds, lock=lock, folder=folder))
        print(text(outcome), flush=True)
        is_well = not outcome.problems
    except Exception:
        print(f"\n{plan.name}: WRONG:\n{traceback.format_exc()}", flush=True)
    finally:
        if is_well:
            shutil.rmtree(folder)
        else:
            print(f"  the journals are in {folder}", flush=True)
    return is_well


if __name__ == "__main__":
    sys.exit(main())
