"""One question to the nodes of a quorum: which votes decide it, when it ends, what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from aiodlock._store._round import _GRACE_S, Outcome, Round, Tally
from tests import leaks

NODES = range(3, 10)

WITHIN_S = 2.0
"""The bound of every round here, on a clock that jumps from timer to timer."""


class Votes(NamedTuple):
    """How many of *nodes* voted how."""

    nodes: int
    yes: int
    no: int
    failed: int

    @property
    def pending(self) -> int:
        return self.nodes - self.yes - self.no - self.failed

    def tally(self) -> Tally:
        """The same, counted by the library."""
        tally = Tally(self.nodes)
        tally.yes, tally.no, tally.failed = self.yes, self.no, self.failed
        return tally

    def completions(self) -> Iterator[Votes]:
        """Every way in which the pending ones may still vote."""
        for yes in range(self.pending + 1):
            for no in range(self.pending + 1 - yes):
                failed = self.pending - yes - no
                yield Votes(self.nodes, self.yes + yes, self.no + no, self.failed + failed)

    def verdict(self) -> Outcome:
        """What complete votes say, by the words of the design."""
        if 2 * self.yes > self.nodes:
            return "yes"
        if 2 * (self.nodes - self.no) <= self.nodes:  # Not even with all who said nothing.
            return "no"
        if 2 * (self.yes + self.no) <= self.nodes:
            return "unreachable"
        return "undecided"


def all_votes(nodes: int) -> Iterator[Votes]:
    """Every count of votes, complete or not."""
    counts = range(nodes + 1)
    for yes in counts:
        for no in counts:
            for failed in counts:
                if yes + no + failed <= nodes:
                    yield Votes(nodes, yes, no, failed)


# The tally.


@pytest.mark.parametrize("nodes", NODES)
def test_tally_of_any_votes_says_what_they_say_if_nobody_else_votes(nodes: int) -> None:
    """Exhaustive; who has not voted counts as failed."""
    for votes in all_votes(nodes):
        silent = votes._replace(failed=votes.failed + votes.pending)
        assert votes.tally().outcome == silent.verdict(), votes


@pytest.mark.parametrize("nodes", NODES)
def test_tally_is_settled_where_no_vote_to_come_can_change_it_and_nowhere_else(nodes: int) -> None:
    """Exhaustive, against every completion; then the outcome is the one that all of them have."""
    settled = 0
    for votes in all_votes(nodes):
        possible = {completed.verdict() for completed in votes.completions()}
        tally = votes.tally()
        assert tally.is_settled == (len(possible) == 1), (votes, possible)
        if tally.is_settled:
            settled += votes.pending > 0
            assert {tally.outcome} == possible, votes
    assert settled > 0


@pytest.mark.parametrize("nodes", NODES)
def test_tally_majorities_always_share_a_node(nodes: int) -> None:
    """And as many as block leave no majority, while one less does."""
    tally = Tally(nodes)
    assert 2 * tally.majority > nodes
    assert 2 * (tally.majority - 1) <= nodes
    assert nodes - tally.blocking < tally.majority
    assert nodes - (tally.blocking - 1) >= tally.majority


def test_oracle_sees_a_tally_that_counts_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: half of the nodes is no majority."""
    init = Tally.__init__

    def half(self: Tally, nodes: int) -> None:
        init(self, nodes)
        self.majority = nodes // 2

    monkeypatch.setattr(Tally, "__init__", half)
    with pytest.raises(AssertionError):
        test_tally_is_settled_where_no_vote_to_come_can_change_it_and_nowhere_else(4)


# The round, on a clock that does not wait.


class Jumping(asyncio.SelectorEventLoop):
    """Its clock stands still while anything can run, then jumps to the next timer."""

    instant = 1000.0

    def time(self) -> float:
        return self.instant

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self.instant = max(self.instant, loop._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run *scene* on such a clock; no timer and no task may be left."""

    async def run() -> None:
        await scene()
        await asyncio.sleep(0)
        assert leaks.timers() == []
        assert not leaks.tasks()

    with asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(run())


def now() -> float:
    """The instant on that clock."""
    return asyncio.get_running_loop().time()


def later(seconds: float, then: Callable[..., object], *args: Any, **options: Any) -> None:
    """A node that says something in so many seconds."""
    asyncio.get_running_loop().call_later(seconds, lambda: then(*args, **options))


NEVER = RuntimeError("refused")


def test_round_ends_at_the_majority_and_not_at_the_slowest() -> None:
    """Three of five say yes after 1, 2 and 3 ms; the others would take a second."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S)
        began_at = now()
        for node, seconds in enumerate([0.003, 1.0, 0.001, 1.0, 0.002]):
            later(seconds, round_.vote, node, f"of {node}", is_yes=True)
        assert await round_.settled() == "yes"
        assert now() - began_at == pytest.approx(0.003)
        assert round_.of(is_yes=True) == {2: "of 2", 4: "of 4", 0: "of 0"}
        await asyncio.sleep(2)  # The late ones.
        assert round_.of(is_yes=True) == {2: "of 2", 4: "of 4", 0: "of 0"}
        assert round_.tally.outcome == "yes"

    play(scene)


def test_round_ends_when_no_majority_is_possible_any_more() -> None:
    """Three of five say no: the other two are not waited for."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S)
        began_at = now()
        for node in range(3):
            later(0.01, round_.vote, node, "held", is_yes=False)
        assert await round_.settled() == "no"
        assert now() - began_at == pytest.approx(0.01)

    play(scene)


def test_round_ends_at_once_where_too_many_have_failed() -> None:
    """Three of five refuse the connection: unreachable, without waiting for the silent ones."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S)
        began_at = now()
        for node in range(3):
            round_.fail(node, NEVER)
        assert await round_.settled() == "unreachable"
        assert now() == began_at
        assert round_.troubles == dict.fromkeys(range(3), NEVER)
        assert round_.answers == {}

    play(scene)


def test_round_without_a_majority_of_answers_ends_with_its_time() -> None:
    """Two of five answer: the rest has the whole time, and counts as failed then."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S)
        began_at = now()
        for node in range(2):
            later(0.01, round_.vote, node, "granted", is_yes=True)
        assert await round_.settled() == "unreachable"
        assert now() - began_at == pytest.approx(WITHIN_S)

    play(scene)


@pytest.mark.parametrize("wants_all", [False, True], ids=["undecided", "wants all"])
@pytest.mark.parametrize("took_s", [0.001, 0.2, 0.95, 1.5])
def test_round_waits_for_stragglers_as_long_again_and_a_moment(
    took_s: float, *, wants_all: bool
) -> None:
    """A majority has answered without deciding: one hung node cannot take all of the time."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S, wants_all=wants_all)
        began_at = now()
        for node in range(4):
            later(took_s, round_.vote, node, "said", is_yes=wants_all or node < 2)
        outcome = await round_.settled()
        assert outcome == ("yes" if wants_all else "undecided")
        assert now() - began_at == pytest.approx(min(2 * took_s + _GRACE_S, WITHIN_S))

    play(scene)


def test_round_gives_its_stragglers_their_time_once() -> None:
    """A second answer in that time does not add to it; one that decides ends it."""

    async def scene() -> None:
        for last, outcome, took_s in ((9.0, "undecided", 0.2 + _GRACE_S), (0.25, "yes", 0.25)):
            round_: Round[str] = Round(5, WITHIN_S)
            began_at = now()
            for node, seconds in enumerate([0.05, 0.1, 0.05, 0.15]):
                later(seconds, round_.vote, node, "said", is_yes=node < 2)
            later(last, round_.vote, 4, "said", is_yes=True)
            assert await round_.settled() == outcome
            assert now() - began_at == pytest.approx(took_s)
        await asyncio.sleep(10)

    play(scene)


def test_round_that_wants_all_ends_with_the_last() -> None:
    """Everybody who is not much slower is heard, and no longer waited for than that."""

    async def scene() -> None:
        round_: Round[int] = Round(3, WITHIN_S, wants_all=True)
        began_at = now()
        round_.vote(0, 0, is_yes=True)
        round_.vote(1, 1, is_yes=True)
        later(0.1, round_.fail, 2, NEVER)
        assert await round_.settled() == "yes"
        assert now() - began_at == pytest.approx(0.1)
        assert (round_.answers, round_.troubles) == ({0: 0, 1: 1}, {2: NEVER})

    play(scene)


def test_round_changes_nothing_for_what_comes_after_its_end() -> None:
    """Votes and failures alike: the outcome that somebody acted on stays what it was."""

    async def scene() -> None:
        round_: Round[str] = Round(3, WITHIN_S)
        round_.vote(0, "held", is_yes=False)
        round_.vote(1, "held", is_yes=False)
        assert await round_.settled() == "no"
        tally = dict(vars(round_.tally))
        round_.vote(2, "granted", is_yes=True)
        round_.fail(2, NEVER)
        assert vars(round_.tally) == tally
        assert (set(round_.answers), round_.troubles) == ({0, 1}, {})

    play(scene)


def test_round_that_is_cancelled_leaves_no_timer_and_hears_no_more() -> None:
    """`play` looks for the timer."""

    async def scene() -> None:
        round_: Round[str] = Round(5, WITHIN_S)
        round_.vote(0, "granted", is_yes=True)
        task = asyncio.create_task(round_.settled())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for node in range(1, 5):
            round_.vote(node, "granted", is_yes=True)
        assert list(round_.answers) == [0]

    play(scene)


def test_round_whose_timer_is_late_takes_what_came_meanwhile() -> None:
    """The loop stood still, not the nodes: their replies are read in the turns that follow."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Jumping)
        round_: Round[str] = Round(3, WITHIN_S)
        loop.instant += 2 * WITHIN_S
        await asyncio.sleep(0)
        for node in range(2):
            later(0, round_.vote, node, "granted", is_yes=True)
        assert await round_.settled() == "yes"
        silent: Round[str] = Round(3, WITHIN_S)
        loop.instant += 2 * WITHIN_S
        late_at = now()
        assert await silent.settled() == "unreachable"
        assert now() - late_at < WITHIN_S / 2  # Once, and not for long.

    play(scene)


def test_check_sees_a_timer_that_is_left() -> None:
    """Negative control: a round that nobody waits for keeps its timer."""

    async def scene() -> None:
        Round[str](5, WITHIN_S)

    with pytest.raises(AssertionError):
        play(scene)
