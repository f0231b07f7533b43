"""Acquiring without a queue: whole tries, each with an owner token of its own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable

from . import _clock
from ._errors import LockTimeout, ServerUnreachable
from ._store._api import Acquisition, Granted, NoAnswer, NoMajority, Refused, Store
from ._waiting import (
    DEFAULT_BACKOFF,
    LAST_TRY_S,
    PATIENCE_S,
    TOO_LATE,
    Backoff,
    closed_error,
    not_got,
    rest,
    rouse,
    told_of_a_long_wait,
)


class Tries:
    """Tries until one is granted; the release of each is sent before the next begins.

    A try that got a minority keeps the others from a majority, until it is released.

    Args:
        on_refused: Told what stands in the key where waiting goes on; it may raise.
    """

    _is_closed = False
    _wake: asyncio.Future[None] | None = None
    _refused: Refused | None = None
    _trouble: NoAnswer | None = None  # Why the last try was not answered.
    _silent_since: float | None = None
    _number = 0
    _warned = False

    def __init__(
        self,
        store: Store,
        new_acquisition: Callable[[], Acquisition],
        *,
        ttl: float,
        wait_timeout: float | None,
        request_timeout: float,
        retry: Backoff | None,
        on_refused: Callable[[Acquisition, str], None],
    ) -> None:
        self.acquisition = new_acquisition()
        self.may_stand = False
        """Whether something of this acquisition may be on a server, to be released."""
        self._store = store
        self._new_acquisition = new_acquisition
        self._ttl_ms = _clock.ttl_ms(ttl)
        self._request_timeout = request_timeout
        self._backoff = retry or DEFAULT_BACKOFF
        self._on_refused = on_refused
        self._is_one_try = wait_timeout == 0
        self._started_at = _clock.now()
        # One try has the time of a request: another is made in it where the servers said nothing.
        wait_s = request_timeout if self._is_one_try else wait_timeout
        self._ends_at = math.inf if wait_s is None else self._started_at + wait_s

    def close(self) -> None:
        """The client closes: try no more."""
        self._is_closed = True
        if self._wake is not None:
            rouse(self._wake)

    async def run(self) -> Granted:
        """Try, sleep, try; bounded by the wait's end, or by silence of the servers.

        Raises:
            LockTimeout, QuorumError: Not got in time.
            NotAllowedError, NameTakenError: Trying again is no use.
            RuntimeError: The client was closed, or two nodes are one server.
        """
        while True:
            is_last = self._is_over()
            granted = await self._try()
            if granted is not None:
                return granted
            # Without an end, an answer makes the wait go on, however long the silence was.
            is_at_end = is_last and (self._ends_at < math.inf or self._is_over())
            if is_at_end or self._is_enough():
                raise self._gave_up()
            self._raise_if_closed()
            if self._refused is not None and not self._is_one_try:
                self._on_refused(self.acquisition, self._refused.value)
            await self._undo()
            await self._sleep()
            self._raise_if_closed()

    async def _try(self) -> Granted | None:
        left = self._ends_at - _clock.now()
        within = min(self._request_timeout, left if left > 0 else LAST_TRY_S)
        asked_at = _clock.now()
        self.may_stand = True
        self._trouble = None
        try:
            answer = await self._store.acquire(
                self.acquisition, ttl_ms=self._ttl_ms, alive_ms=0, within=within
            )
        except NoAnswer as error:
            self._trouble = error
            if isinstance(error, NoMajority) and error.outcome == "undecided":
                self._silent_since = None  # They answered, each something else.
            else:
                self._silent_since = self._silent_since or asked_at
            return None
        self._silent_since = None
        if isinstance(answer, Refused):
            self._refused = answer
            return None
        if answer.deadline > _clock.now():
            return answer
        self._trouble = TOO_LATE
        return None

    async def _undo(self) -> None:
        """Give back what a minority granted; the next try has another token."""
        # Where nobody answers it stands until its ttl is over: there is no more to be done.
        left = max(LAST_TRY_S, self._ends_at - _clock.now())
        with contextlib.suppress(NoAnswer):
            await self._store.release(self.acquisition, within=min(self._request_timeout, left))
        self._store.forget(self.acquisition.token)
        self.may_stand = False
        self.acquisition = self._new_acquisition()

    async def _sleep(self) -> None:
        """A random pause, which keeps two who split the votes from doing so again."""
        pause = self._backoff.pause(self._number, random.random())
        self._number += 1
        pause = min(pause, self._ends_at - _clock.now())
        if pause <= 0 or self._is_closed:
            return
        if self._refused is not None and self._trouble is None and not self._warned:
            waited_s = _clock.now() - self._started_at
            name = self.acquisition.name
            self._warned = told_of_a_long_wait(name, self._refused, waited_s)
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await rest(self._wake, pause)
        finally:
            self._wake = None

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise closed_error(self.acquisition.name)

    def _is_over(self) -> bool:
        now = _clock.now()
        if self._ends_at < math.inf:
            return now >= self._ends_at
        return self._silent_since is not None and now - self._silent_since >= PATIENCE_S

    def _is_enough(self) -> bool:
        """Whether one try was asked for, and was answered, or could not be made."""
        return self._is_one_try and (self._trouble is None or not self.acquisition.was_sent)

    def _gave_up(self) -> LockTimeout | ServerUnreachable:
        name, refused, trouble = self.acquisition.name, self._refused, self._trouble
        if refused is not None and (trouble is None or not self._is_stale(refused)):
            return not_got(name, refused)
        return (trouble or TOO_LATE).unreachable(f"the lock {name!r} was not got", name=name)

    def _is_stale(self, refused: Refused) -> bool:
        """Whether so old an answer says nothing; who waits for ever gives up for silence only."""
        fresh_s = self._request_timeout + _clock.poll_interval(_clock.alive(self._ttl_ms / 1000))
        return self._ends_at == math.inf or _clock.now() - refused.sent_at > fresh_s
