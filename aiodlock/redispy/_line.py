"""The tasks of one process that wait for one lock: the first of them asks for all."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from typing import Final

from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import _clock
from .._waiting import rest, rouse
from ._acquisition import LAST_ANSWER_S, Acquisition
from ._requests import UNANSWERED

# The last try is made so long before the end, to be answered by then.
_LAST_TRY_S: Final = 0.02
# What the server counts as expired needs a moment more than the ms it told.
_EXPIRY_SLACK_S: Final = 0.002
# No timer runs longer: a bound, not a pace.
_LONGEST_S: Final = 3600.0
# Tasks of one process that hand the lock to each other for so many times `sleep` leave it free for
# a little more than one `sleep`, in which whoever polls elsewhere gets it.
_RUN_SLEEPS: Final = 10.0
_GAP_SLEEPS: Final = 1.2


class Turn:
    """One who waits."""

    __slots__ = ("_wake", "_was_told", "asks", "sleep")

    def __init__(self, sleep: float, *, asks: bool) -> None:
        self.sleep = sleep
        self.asks = asks
        self._was_told = False
        self._wake: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """Something has changed."""
        self._was_told = True
        if self._wake is not None:
            rouse(self._wake)

    async def rest(self, pause: float) -> bool:
        """For *pause* seconds, or until told: was it told?"""
        self._wake = asyncio.get_running_loop().create_future()
        self._was_told = False
        try:
            await rest(self._wake, pause)
        finally:
            self._wake = None
        return self._was_told


class Line:
    """First come, first served, among the tasks that wait here.

    Bound: one turn for each waiting task.
    """

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._is_ours = False
        self._run_since: float | None = None
        self._not_before = 0.0
        self._answered_at = 0.0
        self._expires_at = math.inf

    @property
    def is_empty(self) -> bool:
        return not self._turns

    async def wait(self, acquisition: Acquisition, sleep: float, end: float) -> bool:
        """Whether it was got by *end*, an instant of the running loop.

        Raises:
            redis.RedisError, OSError: A request failed, or the last one was not answered.
        """
        turn = Turn(sleep, asks=self.is_empty)
        self._turns.append(turn)
        # The line keeps the pace of its most impatient member.
        self._turns[0].tell()
        got = False
        try:
            got = await self._stand(turn, acquisition, end)
        finally:
            self._leave(turn, got=got)
        return got

    def freed(self) -> None:
        """A task of this process has released it."""
        self._is_ours = False
        if not self._turns:
            return
        head, now = self._turns[0], asyncio.get_running_loop().time()
        if self._run_since is not None and now - self._run_since > _RUN_SLEEPS * self._pace():
            self._run_since = None
            self._not_before = now + _GAP_SLEEPS * self._pace()
        else:
            head.asks = True
        self._expires_at = math.inf
        head.tell()

    async def _stand(self, turn: Turn, acquisition: Acquisition, end: float) -> bool:
        """Bounded by *end*: each round is a request, a sleep, or being told."""
        loop = asyncio.get_running_loop()
        was_refused = False
        while True:
            is_last = loop.time() >= end - _LAST_TRY_S
            if turn.asks or (is_last and turn is self._turns[0]):
                turn.asks = False
                try:
                    if await self._ask(turn, acquisition, end):
                        return True
                except RedisTimeoutError:
                    # That another had it was an answer, too.
                    if not was_refused or loop.time() < end - _LAST_TRY_S:
                        raise
                    return False
                was_refused = True
            if is_last:
                return False
            if not turn.asks:
                turn.asks = await self._rest(turn, end - _LAST_TRY_S - loop.time())

    async def _ask(self, turn: Turn, acquisition: Acquisition, end: float) -> bool:
        # A request that is made late, or after an end in the past, has its time all the same.
        answer_by = max(end, asyncio.get_running_loop().time()) + LAST_ANSWER_S
        try:
            left = await acquisition.ask(answer_by=answer_by)
        except UNANSWERED:
            # What the first has learned the others find out at once, rather than one by one.
            if turn is self._turns[0]:
                for other in self._turns:
                    other.asks = True
                    other.tell()
            raise
        now = self._answered_at = asyncio.get_running_loop().time()
        if left is None:
            self._is_ours = True
            self._run_since = self._run_since or now
            self._expires_at = now + acquisition.lives
            return True
        if not self._is_ours:
            self._run_since = None
        self._expires_at = now + left + _EXPIRY_SLACK_S
        return False

    async def _rest(self, turn: Turn, left: float) -> bool:
        """Until a request is due, or *left* seconds: is it this turn's to make?"""
        is_first = turn is self._turns[0]
        pause = min(left, _LONGEST_S, self._pause() if is_first else math.inf)
        was_told = pause > 0 and await turn.rest(pause)
        return turn.asks or (is_first and not was_told)

    def _pause(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._not_before > now:
            return self._not_before - now
        # From the last answer, not from now: those who come meanwhile must not put it off.
        due = self._answered_at + _clock.jittered(self._pace(), random.random())
        return min(due, self._expires_at) - now

    def _pace(self) -> float:
        return min(turn.sleep for turn in self._turns)

    def _leave(self, turn: Turn, *, got: bool) -> None:
        was_first = turn is self._turns[0]
        self._turns.remove(turn)
        if was_first and self._turns:
            # Who was cancelled may have been told to ask.
            self._turns[0].asks = self._turns[0].asks or not got
            self._turns[0].tell()
