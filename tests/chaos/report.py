"""What is printed of a run."""

from __future__ import annotations

from tests.chaos.run import Outcome

MOST_PROBLEMS = 12


def text(outcome: Outcome) -> str:
    """A table of the faults, a line of figures, and what is wrong."""
    verdict = outcome.verdict
    figures = (
        f"{outcome.seconds:.1f} s, {verdict.grants} grants; "
        f"overlaps {verdict.overlaps_allowed} allowed (longest {verdict.longest_overlap_s:.2f} s), "
        f"{verdict.overlaps_forbidden} not; longest gap {verdict.longest_gap_s:.2f} s, "
        f"longest wait after the faults {verdict.longest_wait_s:.2f} s, "
        f"told at most {verdict.told_latest_s:.3f} s late"
    )
    resource = (
        f"{verdict.refused} refused, {verdict.lost} updates lost "
        f"(where only writes are checked: {verdict.loosely_lost})"
    )
    lines = [
        f"\n{outcome.plan.name}: {figures}",
        f"  resource: {resource}",
        "  " + ", ".join(f"{what} {n}" for what, n in sorted(verdict.told.items())),
    ]
    if outcome.counts:
        heads = ("injected", "hit holder", "hit waiter", "leases lost")
        lines.append(f"  {'fault':28}" + "".join(f" {head:>11}" for head in heads))
    for count in outcome.counts:
        figures_of = (count.injected, count.hit_holder, count.hit_waiter, count.losses)
        lines.append(f"  {count.kind.name:28}" + "".join(f" {n:11}" for n in figures_of))
    problems = outcome.problems
    lines += [f"  WRONG: {problem}" for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        lines.append(f"  ... {len(problems) - MOST_PROBLEMS} more")
    return "\n".join(lines)
