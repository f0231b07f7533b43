"""Judges what the workers of one run wrote, against what docs/explanation/safety.md promises."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from aiodlock import _clock
from aiodlock.cli._history import NS_PER_S
from tests.chaos.crew import TTLS_S
from tests.chaos.faults import Kind, Struck
from tests.chaos.journal import NEVER_NS, Diary, Stay, Wait
from tests.chaos.resource import State
from tests.chaos.worker import SLOW_MAX_S, is_patient

PAGE = Path(__file__).parents[2] / "docs/explanation/safety.md"
ALIVE_S = _clock.alive(max(TTLS_S))
# Invariant 7, without the round trip.
WITHIN_S = max(*TTLS_S, ALIVE_S) + 2 * _clock.poll_interval(ALIVE_S)
SLACK_S = 1.5
"""What a busy machine may add to a bound, where nothing measures how busy it is."""
CLOCK_SLACK_NS = NS_PER_S // 50
"""By how much the wall clock may be set right during a run."""
TOLD_SLACK_S = 0.25
"""How late a body may be told, beside the time in which its loop did not run."""


@cache
def cases() -> dict[str, str]:
    """What the page's table says of two bodies at once, for each case."""
    rows = re.findall(r"^\| \[([^]]+)\].*\|([^|]+)\|$", PAGE.read_text(), flags=re.MULTILINE)
    return {case: said.strip() for case, said in rows}


def may_overlap(kind: Kind) -> bool:
    """Whether the page names it as one that lets two leases be valid at once."""
    said = cases()[kind.case]
    assert said.startswith(("no", "until")), f"the page says of {kind.case!r}: {said!r}"
    return said.startswith("until told")


@dataclass
class Run:
    """What is known of a run when it is over.

    Attributes:
        struck: Every fault, in order.
        calm_ns: The instant after which nothing was injected.
        stuck: Workers that did not end when told to.
        leftovers: Keys that were still there.
        wall_ns: How far the wall clock is ahead of the journals'.
    """

    struck: list[Struck]
    diaries: list[Diary]
    resource: State
    began_ns: int
    calm_ns: int
    settled_ns: int
    stuck: list[int] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    wall_ns: int = 0

    @property
    def stays(self) -> list[Stay]:
        """All of them, by entry."""
        stays = (stay for diary in self.diaries for stay in diary.stays)
        return sorted(stays, key=lambda stay: stay.enter_ns)

    @property
    def waits(self) -> list[Wait]:
        return [wait for diary in self.diaries for wait in diary.waits]


@dataclass
class Verdict:
    """What came out.

    Attributes:
        faults: What is wrong, in words; empty is well.
    """

    faults: list[str]
    grants: int
    overlaps_allowed: int
    overlaps_forbidden: int
    longest_overlap_s: float
    longest_gap_s: float
    longest_wait_s: float
    told_latest_s: float
    told: Counter[str]
    refused: int
    lost: int
    loosely_lost: int


def judge(run: Run) -> Verdict:
    """Everything that is to hold."""
    stays = run.stays
    pairs = list(overlapping(stays))
    forbidden = [pair for pair in pairs if not is_excused(*pair, run)]
    late = [(stay, told_late_s(stay, run.diaries)) for stay in stays if was_told(stay)]
    gaps = list(gaps_s(run))
    refused = (n for what, n in run.resource.verdicts.items() if what.endswith("refused"))
    return Verdict(
        faults=[
            *(f"two hold at once: {_both(run, *pair)}" for pair in forbidden),
            *(f"told {s:.2f} s after its deadline: {_one(run, t)}" for t, s in late if is_late(s)),
            *(
                f"nobody got the lock for {s:.2f} s from {_at(run, t)}"
                for t, s in gaps
                if is_gap(s)
            ),
            *troubles_of_grants(run),
            *starved(run),
            *troubles_at_the_end(run),
        ],
        grants=len(stays),
        overlaps_allowed=len(pairs) - len(forbidden),
        overlaps_forbidden=len(forbidden),
        longest_overlap_s=max((_common_s(*pair) for pair in pairs), default=0.0),
        longest_gap_s=max((seconds for _, seconds in gaps), default=0.0),
        longest_wait_s=max(waits_after_s(run).values(), default=0.0),
        told_latest_s=max((seconds for _, seconds in late), default=0.0),
        told=sum((diary.told for diary in run.diaries), Counter()),
        refused=sum(refused),
        lost=run.resource.lost,
        loosely_lost=run.resource.loosely_lost,
    )


def was_told(stay: Stay) -> bool:
    """Whether it came to an end of its own."""
    return stay.why not in ("killed", "open")


def is_late(seconds: float) -> bool:
    """Whether a body was told too late, by more than a busy machine explains."""
    return seconds > TOLD_SLACK_S


def is_gap(seconds: float) -> bool:
    """Whether the seventh rule was broken."""
    return seconds > WITHIN_S + SLACK_S


def troubles_of_grants(run: Run) -> Iterator[str]:
    """Fencing tokens, and grants that were taken away or never ended."""
    for pair in backward(run.stays, run.struck):
        yield f"a fencing token went back: {_both(run, *pair)}"
    for stay in taken(run.stays, run.struck):
        yield f"taken from its holder: {_one(run, stay)}"
    for stay in run.stays:
        if stay.why == "open":
            yield f"never left: {_one(run, stay)}"
    if not run.stays:
        yield "nobody ever got the lock"


def troubles_at_the_end(run: Run) -> Iterator[str]:
    """What the workers complain of, what is left of them, what the resource lost."""
    for diary in run.diaries:
        yield from (f"worker {diary.worker}: {error}" for error in diary.errors)
    yield from (f"worker {number} did not end" for number in run.stuck)
    yield from (f"left in Redis: {key}" for key in run.leftovers)
    if run.resource.lost:
        yield f"the resource lost {run.resource.lost} updates under claim-first"


def overlapping(stays: Iterable[Stay]) -> Iterator[tuple[Stay, Stay]]:
    """Each two stays that have some time in common; *stays* by entry."""
    inside: list[Stay] = []
    for stay in stays:
        inside = [earlier for earlier in inside if earlier.leave_ns > stay.enter_ns]
        yield from ((earlier, stay) for earlier in inside)
        inside.append(stay)


def granted_ns(stay: Stay, wall_ns: int) -> int:
    """When the server granted it: its fencing token is that instant by the wall clock, in us.

    It came to the holder later, so that the server may have forgotten it before it was entered.
    """
    return min(stay.enter_ns, max(stay.asked_ns, _token(stay) * 1000 - wall_ns))


def is_excused(one: Stay, other: Stay, run: Run) -> bool:
    """Whether the server forgot the older grant after it was made, before the newer one."""
    older, newer = sorted((one, other), key=_token)
    since_ns = granted_ns(older, run.wall_ns) - CLOCK_SLACK_NS
    until_ns = granted_ns(newer, run.wall_ns) + CLOCK_SLACK_NS
    return any(
        may_overlap(fault.kind) and since_ns <= fault.end_ns and until_ns >= fault.begin_ns
        for fault in run.struck
    )


def backward(stays: Iterable[Stay], struck: list[Struck]) -> Iterator[tuple[Stay, Stay]]:
    """Stays whose fencing token is not larger than that of one that entered before.

    All servers of a run share one clock, so a fence key that was lost is no excuse; a grant that
    was forgotten on its way to the holder, and overtaken by the next one, is.
    """
    largest: Stay | None = None
    for stay in stays:
        if largest is not None and _token(stay) <= _token(largest):
            was_overtaken = any(
                may_overlap(one.kind)
                and one.end_ns >= stay.asked_ns
                and one.begin_ns <= stay.enter_ns
                for one in struck
            )
            if not was_overtaken or _token(stay) == _token(largest):
                yield largest, stay
        if largest is None or _token(stay) > _token(largest):
            largest = stay


TAKEN = ("lost:STOLEN", "lost:DELETED")


def taken(stays: Iterable[Stay], struck: list[Struck]) -> Iterator[Stay]:
    """Stays told, before their deadline, that their key was gone or another's, without a cause."""
    for stay in stays:
        # The library says so at a release only while the deadline is not over.
        was_taken_after = stay.why not in TAKEN and stay.exit_why in TAKEN
        was_taken = stay.why in TAKEN and stay.told_ns < stay.deadline_ns
        known_ns = stay.exit_ns if was_taken_after else stay.told_ns
        if (was_taken or was_taken_after) and not any(
            may_overlap(one.kind) and one.begin_ns <= known_ns and one.end_ns >= stay.asked_ns
            for one in struck
        ):
            yield stay


def told_late_s(stay: Stay, diaries: list[Diary]) -> float:
    """How long after its deadline a body was still at work, but for the time its loop stood."""
    if stay.told_ns <= stay.deadline_ns:
        return 0.0
    lag_ns = diaries[stay.worker].lag_ns(stay.deadline_ns, stay.told_ns)
    return max(0, stay.told_ns - stay.deadline_ns - lag_ns) / NS_PER_S


def gaps_s(run: Run) -> Iterator[tuple[int, float]]:
    """(since, seconds) of each time in which the lock was free, or a dead one's, while some wait.

    Counted from when the last fault in it was over: until then nobody may be able to get it.
    """
    ends = sorted([run.began_ns, *(one.end_ns for one in run.struck)])
    free_since = run.began_ns
    for stay in [*run.stays, None]:
        until_ns = run.settled_ns if stay is None else stay.enter_ns
        since = max([free_since, *(end for end in ends if end < until_ns)])
        if until_ns <= run.settled_ns and until_ns > since:
            yield since, (until_ns - since) / NS_PER_S
        if stay is not None:
            free_since = max(free_since, min(stay.leave_ns, run.settled_ns))


def waits_after_s(run: Run) -> dict[tuple[int, int], float]:
    """How long, after the last fault, each patient task waited for its first grant then."""
    first: dict[tuple[int, int], float] = {}
    for wait in sorted(run.waits, key=lambda wait: wait.to_ns):
        who = (wait.worker, wait.task)
        if is_patient(wait.task) and wait.was_granted and wait.to_ns > run.calm_ns:
            first.setdefault(who, (wait.to_ns - max(run.calm_ns, wait.from_ns)) / NS_PER_S)
    return first


def starved(run: Run) -> Iterator[str]:
    """Patient tasks of the living that waited longer than all others' turns take."""
    living = [diary.worker for diary in run.diaries if diary.is_closed]
    bound_s = WITHIN_S + SLACK_S + len(run.diaries) * len(TTLS_S) * SLOW_MAX_S
    waited = waits_after_s(run)
    tasks = {wait.task for wait in run.waits if is_patient(wait.task)}
    for who in itertools.product(living, tasks):
        if who not in waited:
            yield f"worker {who[0]}, task {who[1]} never got the lock after the last fault"
        elif waited[who] > bound_s:
            yield f"worker {who[0]}, task {who[1]} waited {waited[who]:.1f} s after the last fault"


def _token(stay: Stay) -> int:
    assert stay.fencing_token is not None
    return stay.fencing_token


def _common_s(first: Stay, second: Stay) -> float:
    return (min(first.leave_ns, second.leave_ns) - second.enter_ns) / NS_PER_S


def _both(run: Run, first: Stay, second: Stay) -> str:
    near = [
        f"{one.kind.name} {_at(run, one.begin_ns)} to {_at(run, one.end_ns)}"
        for one in run.struck
        if one.begin_ns < second.leave_ns and one.end_ns > first.enter_ns - NS_PER_S
    ]
    return f"{_one(run, first)}; {_one(run, second)}; faults: {near}"


def _one(run: Run, stay: Stay) -> str:
    return (
        f"worker {stay.worker} task {stay.task} from {_at(run, stay.enter_ns)} "
        f"to {_at(run, stay.leave_ns)} token {stay.fencing_token} ({stay.why}, "
        f"granted {_at(run, granted_ns(stay, run.wall_ns))}, "
        f"deadline {_at(run, stay.deadline_ns)}, told {_at(run, stay.told_ns)}, "
        f"asked {_at(run, stay.asked_ns)})"
    )


def _at(run: Run, instant_ns: int) -> str:
    return "never" if instant_ns == NEVER_NS else f"{(instant_ns - run.began_ns) / NS_PER_S:.4f}"
