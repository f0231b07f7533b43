"""A short part of ``nox -s chaos``: real processes, real faults, a checker that can turn red."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LockClient, _clock
from aiodlock.cli._history import NS_PER_S
from tests.chaos import journal, verdict
from tests.chaos.crew import TTLS_S
from tests.chaos.faults import ALL, NOBODY, Kind, Scope, Struck
from tests.chaos.journal import Diary, Pen, Stay, Wait, read
from tests.chaos.plans import (
    FAILOVER,
    FLUSHALL,
    KILL,
    MOVE,
    PAUSE,
    PLANS,
    RESTART_EMPTY,
    RESTART_KEPT,
    SERVER_PAUSE,
)
from tests.chaos.report import text
from tests.chaos.resource import RefusedError, Resource, State
from tests.chaos.run import Count, Outcome, run_plan
from tests.chaos.verdict import Run, judge, may_overlap, overlapping
from tests.chaos.worker import is_patient
from tests.conftest import MakeClient

pytestmark = pytest.mark.deep

SEED = 11
# Seconds of faults; one that has hit nobody by then gets more.
SHORT = {"kept": 4.0, "forget": 3.0, "failover": 1.0, "move": 2.0}
# "kept" has all their faults in one run.
PARTS = {"calm", "kill", "pause", "links", "server", "restart-kept"}
# "kept" and "forget" at once, which takes longer to prove than a merge should wait.
LONG = {"all"}
# Half a minute on a busy machine; test_sentinel.py has one such failover.
LONG_KINDS = {FAILOVER}


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[Outcome], None]:
    """Print the report of a run, also of one that passed."""

    def told(outcome: Outcome) -> None:
        with capsys.disabled():
            print(f"{text(outcome)}\n  seed {outcome.seed}")

    return told


def test_plans_all_run_here_or_are_named() -> None:
    """A plan that is neither in the short part nor named as left out was forgotten."""
    assert sorted([*SHORT, *PARTS, *LONG]) == sorted(PLANS)
    kept = set(PLANS["kept"].kinds)
    assert all(set(PLANS[name].kinds) <= kept for name in PARTS)


@pytest.mark.parametrize("name", SHORT)
async def test_workers_under_faults_keep_what_the_documents_promise(
    name: str, tell: Callable[[Outcome], None]
) -> None:
    """Each fault of the plan hits somebody, and nothing comes of it but what safety.md names."""
    kinds = tuple(kind for kind in PLANS[name].kinds if kind not in LONG_KINDS)
    plan = dataclasses.replace(PLANS[name], kinds=kinds)
    outcome = await run_plan(plan, seed=SEED, seconds=SHORT[name])
    tell(outcome)
    assert outcome.problems == []


@pytest.mark.parametrize(
    ("name", "lock"), [("calm", "SET NX, DEL"), ("calm", "check then set"), ("kill", "SET NX, DEL")]
)
async def test_naive_lock_in_place_of_ours_turns_the_checker_red(
    name: str, lock: str, tell: Callable[[Outcome], None]
) -> None:
    """Negative control: two hold at once, without any fault and while workers are killed."""
    plan = PLANS[name]
    # In their key nothing says who holds: no fault can take aim.
    kinds = tuple(dataclasses.replace(kind, needs_holder=False) for kind in plan.kinds)
    outcome = await run_plan(
        dataclasses.replace(plan, kinds=kinds),
        seed=SEED,
        seconds=0.0,
        lock=lock,
        workers=2,
        until=has_overlap,
        settles=False,
    )
    tell(outcome)
    assert outcome.verdict.overlaps_forbidden > 0
    assert any("two hold at once" in problem for problem in outcome.problems)


def has_overlap(folder: Path) -> bool:
    """Whether two who have left were inside at once."""
    diaries = [journal.read(path, 0) for path in folder.glob("worker-*") if not path.suffix]
    stays = (stay for diary in diaries for stay in diary.stays if stay.why != "open")
    return any(overlapping(sorted(stays, key=lambda stay: stay.enter_ns)))


# The checker, on histories made by hand.


def a_stay(worker: int, enter: float, leave: float, token: int, **more: object) -> Stay:
    """One who asked half a second before it entered, and left of its own will."""
    return dataclasses.replace(
        Stay(
            worker,
            round(enter * NS_PER_S),
            round(leave * NS_PER_S),
            token,
            asked_ns=round((enter - 0.5) * NS_PER_S),
            told_ns=round(leave * NS_PER_S),
        ),
        **more,  # type: ignore[arg-type]
    )


def a_fault(kind: Kind, begin: float, end: float, scope: Scope = ALL) -> Struck:
    """One that struck from *begin* to *end*, in seconds."""
    return Struck(kind, round(begin * NS_PER_S), round(end * NS_PER_S), scope)


def a_run(*stays: Stay, struck: tuple[Struck, ...] = (), **more: object) -> Run:
    """A run of two workers, ten seconds long, whose only tasks are served to the end."""
    calm_ns, over_ns = 10 * NS_PER_S, 11 * NS_PER_S
    diaries = [Diary(number, is_ready=True, is_closed=True) for number in range(2)]
    for stay in stays:
        diaries[stay.worker].stays.append(stay)
    for diary in diaries:
        diary.waits.append(Wait(diary.worker, 0, calm_ns, calm_ns + 1, was_granted=True))
    # The times in which nobody is inside are not what these tests are about.
    diaries[0].stays += [
        a_stay(0, second + 0.9, second + 0.95, 1_000_000 + second, task=2) for second in range(11)
    ] * ("keeps_quiet" not in more)
    more.pop("keeps_quiet", None)
    return dataclasses.replace(
        Run([*struck], diaries, State(), 0, calm_ns, over_ns),
        **more,  # type: ignore[arg-type]
    )


def problems_of(*stays: Stay, struck: tuple[Struck, ...] = (), **more: object) -> list[str]:
    """What the checker says of such a run."""
    return judge(a_run(*stays, struck=struck, **more)).faults


def pair(first_token: int = 200_000, second_token: int = 300_000) -> tuple[Stay, Stay]:
    """Two that overlap, from 0.2 to 0.4 and from 0.3 to 0.35; their tokens say so in us."""
    return a_stay(0, 0.2, 0.4, first_token), a_stay(1, 0.3, 0.35, second_token)


def test_history_without_faults_is_well() -> None:
    """The checker is not red by itself."""
    assert problems_of(a_stay(0, 0.2, 0.3, 1), a_stay(1, 0.3, 0.4, 2)) == []


@pytest.mark.parametrize("kind", [None, KILL, PAUSE, RESTART_KEPT, MOVE])
def test_overlap_that_no_case_of_the_page_allows_is_red(kind: Kind | None) -> None:
    """Neither without a fault nor with one after which the server still knows who holds."""
    struck = () if kind is None else (a_fault(kind, 0.25, 0.26),)
    [problem] = problems_of(*pair(), struck=struck)
    assert problem.startswith("two hold at once")


@pytest.mark.parametrize("kind", [FLUSHALL, RESTART_EMPTY])
def test_overlap_over_a_loss_of_memory_is_allowed_and_counted(kind: Kind) -> None:
    """The first was granted before, the second after."""
    outcome = judge(a_run(*pair(), struck=(a_fault(kind, 0.25, 0.26),)))
    assert outcome.faults == []
    assert outcome.overlaps_allowed == 1


@pytest.mark.parametrize(("begin", "end"), [(0.05, 0.1), (0.34, 0.36)])
def test_overlap_beside_a_loss_of_memory_is_red(begin: float, end: float) -> None:
    """Both were granted before it, or both after."""
    [problem] = problems_of(*pair(), struck=(a_fault(FLUSHALL, begin, end),))
    assert problem.startswith("two hold at once")


def test_overlap_with_a_grant_that_was_forgotten_on_its_way_is_allowed() -> None:
    """The older was granted before the loss, which its fencing token tells, and entered after."""
    late, newer = pair(100_000, 260_000)  # Granted at 0.1 and 0.26 s.
    asked = dataclasses.replace(late, asked_ns=0), dataclasses.replace(newer, asked_ns=0)
    assert problems_of(*asked, struck=(a_fault(FLUSHALL, 0.15, 0.15),)) == []
    for begin in (0.05, 0.29):
        [problem] = problems_of(*asked, struck=(a_fault(FLUSHALL, begin, begin),))
        assert problem.startswith("two hold at once")


def test_overlap_beside_one_that_is_allowed_is_red() -> None:
    """Of three at once two came after the loss: one of the pairs has no excuse."""
    three = (*pair(), a_stay(1, 0.31, 0.33, 310_000))
    [problem] = problems_of(*three, struck=(a_fault(FLUSHALL, 0.25, 0.26),))
    assert "token 300000" in problem
    assert "token 310000" in problem


@pytest.mark.parametrize("second", [1, 2])
def test_fencing_token_that_does_not_grow_is_red(second: int) -> None:
    """A smaller one, and the same one again."""
    [problem] = problems_of(a_stay(0, 0.2, 0.3, 2), a_stay(1, 0.4, 0.5, second))
    assert problem.startswith("a fencing token went back")


@pytest.mark.parametrize("where", ["why", "exit_why"])
def test_lease_that_was_stolen_without_a_cause_is_red(where: str) -> None:
    """Told by an extension, or at the release."""
    stolen = a_stay(0, 0.2, 0.3, 1, **{where: "lost:STOLEN"}, exit_ns=round(0.3 * NS_PER_S))
    [problem] = problems_of(stolen)
    assert problem.startswith("taken from its holder")
    assert problems_of(stolen, struck=(a_fault(FLUSHALL, 0.25, 0.26),)) == []


def test_body_that_is_told_late_is_red_unless_its_loop_stood_still() -> None:
    """A second after its deadline."""
    late = a_stay(1, 0.2, 0.3, 1, deadline_ns=NS_PER_S * 3 // 10, told_ns=NS_PER_S * 13 // 10)
    [problem] = problems_of(late)
    assert problem.startswith("told 1.00 s after its deadline")
    run = a_run(late)
    run.diaries[1].lags.append((NS_PER_S // 4, NS_PER_S * 125 // 100))
    assert judge(run).faults == []


def test_time_without_a_holder_is_red_when_it_is_too_long() -> None:
    """With waiters, and no fault in it; one that ended later begins it anew."""
    first, last = a_stay(0, 0.2, 0.3, 1), a_stay(1, 5.0, 10.9, 2)
    [problem] = problems_of(first, last, keeps_quiet=True)
    assert problem.startswith("nobody got the lock for 4.70 s")
    struck = (a_fault(KILL, 2.0, 2.5),)
    assert problems_of(first, last, struck=struck, keeps_quiet=True) == []


def test_waiter_that_is_never_served_is_red() -> None:
    """After the last fault, a patient task of a living worker."""
    run = a_run()
    run.diaries[1].waits[:] = [Wait(1, 0, 0, 20 * NS_PER_S, was_granted=False)]
    assert is_patient(0)
    assert judge(run).faults == ["worker 1, task 0 never got the lock after the last fault"]


def test_holder_that_never_left_is_red() -> None:
    """It neither said that it left, nor was killed."""
    assert problems_of(a_stay(0, 0.2, 0.3, 1, why="open"))[0].startswith("never left")


def test_error_of_a_worker_and_what_is_left_behind_are_red() -> None:
    """An exception, a process that does not end, a key."""
    run = a_run(stuck=[1], leftovers=["a key"])
    run.diaries[0].errors.append("an exception")
    run.resource.commits += 1
    assert judge(run).faults == [
        "worker 0: an exception",
        "worker 1 did not end",
        "left in Redis: a key",
        "the resource lost 1 updates under claim-first",
    ]


def test_page_that_names_the_cases_is_read() -> None:
    """Each fault of each plan has its row in the table of safety.md."""
    allowed = {kind.name for plan in PLANS.values() for kind in plan.kinds if may_overlap(kind)}
    assert allowed == {
        *("FLUSHALL", "delete keys", "evict keys", "restart, empty"),
        *("fail over", "fail over, not copied"),
    }


@pytest.mark.parametrize(
    ("scope", "hits"),
    [(ALL, True), (NOBODY, False), (Scope(worker=1), False), (Scope(proxied=True), False)],
)
def test_fault_hits_only_whom_it_concerns(scope: Scope, hits: bool) -> None:
    """Task 0 of worker 0, which is not behind the proxy."""
    stay = a_stay(0, 0.2, 0.4, 1)
    assert a_fault(KILL, 0.3, 0.3, scope).hit(stay) is hits
    assert not a_fault(KILL, 0.5, 0.6, scope).hit(stay)


@pytest.mark.parametrize(
    ("hit_holder", "hit_waiter", "losses", "is_proved"),
    [(1, 0, 1, True), (0, 1, 1, False), (1, 1, 0, False)],
)
def test_fault_that_hit_nobody_whom_it_was_to_hit_proves_nothing(
    hit_holder: int, hit_waiter: int, losses: int, is_proved: bool
) -> None:
    """A server that is away for longer than a ttl is to make a holder lose its lease."""
    assert SERVER_PAUSE.needs_loss
    assert Count(SERVER_PAUSE, 1, hit_holder, hit_waiter, losses).is_proved is is_proved


# The journal and the resource.


def test_journal_of_a_worker_that_was_killed_inside_ends_at_the_kill(tmp_path: Path) -> None:
    """Or at its deadline, where that came first; half a line at the end is no line."""
    pen = Pen(tmp_path / "journal")
    for line in ("want 0 1", "enter 0 5 7 90", "extended 0 100", "want 1 6", "enter 1"):
        pen.say(line)
    with (tmp_path / "journal").open("r+b") as file:
        file.truncate((tmp_path / "journal").stat().st_size - 1)
    [stay] = read(tmp_path / "journal", 3, killed_ns=60).stays
    assert (stay.enter_ns, stay.leave_ns, stay.why, stay.was_killed) == (5, 60, "killed", True)
    [stay] = read(tmp_path / "journal", 3, killed_ns=200).stays
    assert stay.leave_ns == 100
    [_, waiting] = read(tmp_path / "journal", 3, killed_ns=60).waits
    assert (waiting.task, waiting.to_ns, waiting.was_granted) == (1, 60, False)


async def test_write_only_check_loses_an_update_that_claim_first_keeps(
    make_client: MakeClient, redis: Redis, tmp_path: Path
) -> None:
    """The server forgets; both sections read before either writes, with tokens in order."""
    resource = Resource(tmp_path / "resource")

    async def read_in_section(locks: LockClient) -> tuple[Lease, int, int]:
        lease = await locks.lock("name").acquire()
        resource.claim(lease.fencing_token)
        return lease, *resource.read(lease.fencing_token)

    async with make_client() as ours, make_client() as others:
        old = await read_in_section(ours)
        await redis.flushall()
        new = await read_in_section(others)
        for lease, value, loose in (old, new):
            lease.check()  # Neither has been told that two hold.
            with contextlib.suppress(RefusedError):
                resource.write(lease.fencing_token, value + 1, loose + 1)
    assert (resource.state.loose_commits, resource.state.loosely_lost) == (2, 1)
    assert (resource.state.commits, resource.state.lost) == (1, 0)
    assert resource.state.verdicts["write refused"] == 1


def test_resource_refuses_a_section_that_another_has_claimed_since(tmp_path: Path) -> None:
    """Two processes' views of one file; the older section's write changes nothing."""
    old, new = (Resource(tmp_path / "resource") for _ in range(2))
    old.claim(1)
    value, loose = old.read(1)
    new.claim(2)
    other_value, other_loose = new.read(2)
    with pytest.raises(RefusedError, match="write with 1: 2 has claimed"):
        old.write(1, value + 1, loose + 1)
    new.write(2, other_value + 1, other_loose + 1)
    state = old.catch_up()
    assert (state.commits, state.value, state.lost) == (1, 1, 0)
    assert (state.loose_commits, state.loose_value, state.loosely_lost) == (2, 1, 1)
    with pytest.raises(RefusedError):
        old.claim(1)
    assert old.state.verdicts == new.catch_up().verdicts
    assert Counter(old.state.verdicts)["claim refused"] == 1


def test_bound_of_a_gap_is_that_of_the_seventh_rule() -> None:
    """max(ttl, alive) and two poll intervals."""
    alive = _clock.alive(max(TTLS_S))
    bound = max(*TTLS_S, alive) + 2 * alive / 3
    assert bound == verdict.WITHIN_S
