"""One question to every node of a quorum, settled as soon as its answers decide it."""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Literal, TypeVar

_T = TypeVar("_T")

# What a node may be slower than the majority, beside as long again as that took.
_GRACE_S: Final = 0.25

# A timer that is later than this says that the loop stood still; the answers may be there, unread.
_STALL_S: Final = 0.05

Outcome = Literal["yes", "no", "unreachable", "undecided"]


class Tally:
    """Counts the votes of one round; pure.

    `blocking` nodes keep the others from a majority.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.majority = nodes // 2 + 1
        self.blocking = nodes - self.majority + 1
        self.yes = 0
        self.no = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        return self.nodes - self.yes - self.no - self.failed

    @property
    def has_answers(self) -> bool:
        """Whether a majority said anything."""
        return self.yes + self.no >= self.majority

    @property
    def outcome(self) -> Outcome:
        """What the votes say; who has not voted counts as failed."""
        if self.yes >= self.majority:
            return "yes"
        if self.no >= self.blocking:
            return "no"
        if self.failed + self.pending >= self.blocking:
            return "unreachable"
        return "undecided"

    @property
    def is_settled(self) -> bool:
        """Whether no vote that is still to come can change that."""
        if self.yes >= self.majority or self.no >= self.blocking or self.pending == 0:
            return True
        if self.yes + self.pending >= self.majority or self.no + self.pending >= self.blocking:
            return False
        return self.failed >= self.blocking or self.failed + self.pending < self.blocking


class Round(Generic[_T]):
    """Gathers the votes; settled by a majority, by its impossibility, or by time.

    Where a majority has answered without deciding, the rest is waited for as long again as that
    took, no longer: one hung node must not slow everything.

    Args:
        nodes: How many there are.
        within: Seconds.
        wants_all: Whether a majority is not enough to go on: who is as fast is to be heard too.
    """

    def __init__(self, nodes: int, within: float, *, wants_all: bool = False) -> None:
        self.tally = Tally(nodes)
        self.answers: dict[int, _T] = {}
        """Of those who voted yes or no."""
        self.votes: dict[int, bool] = {}
        self.troubles: dict[int, Exception] = {}
        self._wants_all = wants_all
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._ends_at = self._began_at + within  # Kept by us: uvloop's timers do not always tell.
        self._end = self._loop.call_at(self._ends_at, self._on_time)
        self._has_grace = True
        self._is_short = False  # Whether the rest has been given its time.
        self._settled: asyncio.Future[None] = self._loop.create_future()

    def vote(self, node: int, answer: _T, *, is_yes: bool) -> None:
        """What *node* said; after the round is settled, it changes nothing."""
        if self._settled.done():
            return
        self.answers[node] = answer
        self.votes[node] = is_yes
        self.tally.yes += is_yes
        self.tally.no += not is_yes
        self._judge()

    def fail(self, node: int, trouble: Exception) -> None:
        """Why *node* said nothing that counts."""
        if self._settled.done():
            return
        self.troubles[node] = trouble
        self.tally.failed += 1
        self._judge()

    @property
    def has_majority(self) -> bool:
        """Whether it ended by a majority, without those who have not voted yet."""
        return self._settled.done() and self.tally.yes >= self.tally.majority

    async def settled(self) -> Outcome:
        """Wait for what the votes say."""
        try:
            await self._settled
        finally:
            self._settle()
        return self.tally.outcome

    def of(self, *, is_yes: bool) -> dict[int, _T]:
        """The answers of those who voted so."""
        return {node: self.answers[node] for node, vote in self.votes.items() if vote is is_yes}

    def _judge(self) -> None:
        if self.tally.pending == 0 or (self.tally.is_settled and not self._wants_all):
            self._settle()
        elif self.tally.has_answers and not self._is_short:
            self._is_short = True
            self._end.cancel()
            now = self._loop.time()
            self._ends_at = min(self._ends_at, 2 * now - self._began_at + _GRACE_S)
            self._end = self._loop.call_at(self._ends_at, self._on_time)

    def _on_time(self) -> None:
        now = self._loop.time()
        if self._has_grace and now - self._ends_at > _STALL_S:
            self._has_grace = False  # Once: a loop that is always late must time out as well.
            self._ends_at = now + _STALL_S
            self._end = self._loop.call_at(self._ends_at, self._on_time)
        else:
            self._settle()

    def _settle(self) -> None:
        self._end.cancel()
        if not self._settled.done():
            self._settled.set_result(None)
