"""Waiting for a lock: in the queue of its name, woken by hand-off or by polling."""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from . import _clock, _names
from ._errors import LockTimeout, ServerUnreachable
from ._store._api import Acquisition, Granted, NoAnswer, QueueStore, Refused

_log = logging.getLogger("aiodlock")

# How long the answer to the last try may take, after the wait is over.
LAST_TRY_S: Final = 0.1
# With wait_timeout=None: how long no answer at all is borne, and when a long wait is logged.
PATIENCE_S: Final = 30.0
# What the server counts as expired needs a moment more than the ms it told.
_EXPIRY_SLACK_S: Final = 0.002


TOO_LATE: Final = NoAnswer("it was granted, but the answer took longer than its ttl")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting by polling, with growing pauses.

    Pause k (from 0) lasts `min(maximum, initial * factor**k)` seconds times a random number in
    [1 - jitter, 1].

    Args:
        initial: Seconds, more than 0.
        factor: At least 1.
        maximum: Seconds, at least *initial*.
        jitter: Share of a pause that is random, 0 to 1.

    Raises:
        TypeError, ValueError: An argument is not a number, or out of its range.

    Source: "Exponential Backoff And Jitter" (AWS Architecture Blog).
    """

    initial: float = 0.05
    factor: float = 2.0
    maximum: float = 1.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for field in ("initial", "factor", "maximum", "jitter"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"Backoff's {field} must be a real number; got {value!r}")
            if not math.isfinite(_clock.as_float(value)):
                raise ValueError(f"Backoff's {field} must be finite; got {value!r}")
        if not self.initial > 0:
            raise ValueError(f"Backoff's initial must be more than 0 seconds; got {self.initial!r}")
        if not self.factor >= 1:
            raise ValueError(f"Backoff's factor must be at least 1; got {self.factor!r}")
        if not self.maximum >= self.initial:
            raise ValueError(f"Backoff's maximum must be at least initial; got {self.maximum!r}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"Backoff's jitter must be from 0 to 1; got {self.jitter!r}")

    def pause(self, k: int, chance: float) -> float:
        """Seconds of pause *k*; *chance* is a random number in [0, 1)."""
        try:
            longest = min(self.maximum, self.initial * self.factor**k)
        except OverflowError:
            longest = self.maximum
        return longest * (1 - self.jitter * chance)


DEFAULT_BACKOFF: Final = Backoff()


class Wait:
    """One acquisition, from its first poll until it is granted or given up.

    Args:
        on_refused: Told what stands in the key when it begins to wait; it may raise.
    """

    # What most acquisitions never change stands here, and costs them nothing.
    _is_closed = False
    _wake: asyncio.Future[None] | None = None
    _handed: str | None = None
    _poked = False
    _refused: Refused | None = None
    _trouble: NoAnswer | None = None
    _silent_since: float | None = None  # The first try after the last answer.
    _largest_seen = 0
    _failures = 0
    _pauses = 0
    _warned = False

    def __init__(
        self,
        store: QueueStore,
        acquisition: Acquisition,
        *,
        ttl: float,
        wait_timeout: float | None,
        request_timeout: float,
        retry: Backoff | None,
        on_refused: Callable[[Acquisition, str], None],
        trusts_messages: bool,
    ) -> None:
        self._store = store
        self.acquisition = acquisition
        self._ttl_ms = _clock.ttl_ms(ttl)
        self._alive = _clock.alive(ttl)
        self._request_timeout = request_timeout
        self._retry = retry
        self._backoff = retry or DEFAULT_BACKOFF
        self._on_refused = on_refused
        self._trusts_messages = trusts_messages
        self._queues = wait_timeout != 0
        self._started_at = _clock.now()
        self._ends_at = math.inf if wait_timeout is None else self._started_at + wait_timeout

    # What wakes it (the store calls these where messages and replies are read).

    def hand_over(self, value: str) -> None:
        self._handed = value
        self._rouse()

    def poke(self) -> None:
        self._poked = True
        # Trouble has its own pace: a server that drops every connection must not be stormed.
        if self._failures == 0:
            self._rouse()

    def close(self) -> None:
        """The client closes: stop waiting."""
        self._is_closed = True
        self._rouse()

    @property
    def may_stand(self) -> bool:
        """Whether something of this acquisition may be on the server, to be released."""
        if not self.acquisition.was_sent:
            return False
        was_refused = self._refused is not None and not self.acquisition.asked
        return self._queues or not was_refused

    async def run(self) -> Granted:
        """Poll, sleep, poll; bounded by the wait's end, or by silence of the server.

        Raises:
            LockTimeout, ServerUnreachable: Not got in time.
            NotAllowedError, NameTakenError: Waiting is no use.
            RuntimeError: The client was closed.
        """
        if not self._queues:
            return await self._ask_once()
        self._store.enlist(self.acquisition.token, self)
        by_timer = False
        while True:
            is_last = self._is_over()
            if granted := await self._poll(by_timer=by_timer):
                return granted
            if granted := self._take_hand_over():
                return granted
            # Without an end, an answer makes the wait go on, however long the silence was.
            if is_last and (self._ends_at < math.inf or self._is_over()):
                raise self._gave_up()
            if self._is_closed:
                raise closed_error(self.acquisition.name)
            by_timer = not await self._sleep(self._pause())
            if granted := self._take_hand_over():
                return granted

    async def _ask_once(self) -> Granted:
        """One request; asked again, within its time, where it got no usable answer."""
        end = self._started_at + self._request_timeout
        while True:
            try:
                answer = await self._store.acquire(
                    self.acquisition,
                    ttl_ms=self._ttl_ms,
                    alive_ms=0,
                    within=max(0.0, end - _clock.now()),
                )
            except NoAnswer as error:
                self._trouble = error
            else:
                if isinstance(answer, Refused):
                    self._refused = answer
                    raise self._gave_up()
                if answer.deadline > _clock.now():
                    return answer
                self._trouble = TOO_LATE
            pause = self._backoff.pause(self._failures, random.random())
            self._failures += 1
            if not self.acquisition.was_sent or _clock.now() + pause >= end:
                raise self._gave_up()
            await asyncio.sleep(pause)

    async def _poll(self, *, by_timer: bool) -> Granted | None:
        left = self._ends_at - _clock.now()
        within = min(self._request_timeout, left if left > 0 else LAST_TRY_S)
        self._poked = False
        asked_at = _clock.now()
        try:
            answer = await self._store.acquire(
                self.acquisition,
                ttl_ms=self._ttl_ms,
                alive_ms=_clock.ttl_ms(self._alive),
                within=within,
            )
        except NoAnswer as error:
            self._trouble = error
            self._failures += 1
            self._silent_since = self._silent_since or asked_at
            return None
        self._silent_since = None
        if isinstance(answer, Granted) and answer.deadline <= _clock.now():
            self._trouble = TOO_LATE
            self._failures += 1
            return None
        if isinstance(answer, Granted):
            if answer.already and by_timer and self._handed is None and self._retry is None:
                self._store.doubt_inbox()
            return answer
        if self._refused is None:
            self._on_refused(self.acquisition, answer.value)
        if self._refused is None and self._retry is None:
            self._store.listen(self.acquisition.token)
        self._failures = 0
        self._refused = answer
        self._largest_seen = max(self._largest_seen, answer.last_fencing_token)
        return None

    def _take_hand_over(self) -> Granted | None:
        """The grant that a message brought, if the message can be trusted; else poll for it.

        An old message, delivered late, would make two holders: it must come while our last
        answered poll still keeps us alive on the server, and be newer than that answer.
        """
        text, self._handed = self._handed, None
        refused = self._refused
        value = _names.read_value(text) if text else None
        if text is None or value is None or refused is None:
            return None
        deadline = _clock.deadline(refused.sent_at, _clock.ttl_ms(self._alive))
        if (
            self._trusts_messages
            and self._store.is_current(refused.link)
            and value.fencing_token > self._largest_seen
            and deadline - _clock.now() >= _clock.poll_interval(self._alive)
        ):
            return Granted(text, value.fencing_token, deadline, already=True)
        self._poked = True
        return None

    def _pause(self) -> float:
        """Seconds until the next poll, unless something wakes us."""
        longest = _clock.poll_interval(self._alive)
        if self._failures:
            return min(longest, DEFAULT_BACKOFF.pause(self._failures - 1, random.random()))
        if self._retry is not None or not self._store.hears:
            self._pauses += 1
            pause = min(longest, self._backoff.pause(self._pauses - 1, random.random()))
        else:
            pause = _clock.jittered(longest, random.random())
        refused = self._refused
        if refused is not None and refused.place == 0 and refused.ttl_left_ms >= 0:
            pause = min(pause, refused.ttl_left_ms / 1000 + _EXPIRY_SLACK_S)
        return pause

    async def _sleep(self, pause: float) -> bool:
        """Until woken, at most *pause* seconds, never beyond the end: was it woken?"""
        pause = min(pause, self._ends_at - _clock.now())
        if self._is_woken or pause <= 0:
            return self._is_woken
        self._tell_of_a_long_wait()
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await rest(self._wake, pause)
        finally:
            self._wake = None
        return self._is_woken

    @property
    def _is_woken(self) -> bool:
        return self._handed is not None or self._is_closed or (self._poked and not self._failures)

    def _rouse(self) -> None:
        if self._wake is not None:
            rouse(self._wake)

    def _is_over(self) -> bool:
        now = _clock.now()
        if self._ends_at < math.inf:
            return now >= self._ends_at
        return self._silent_since is not None and now - self._silent_since >= PATIENCE_S

    def _answered_at(self) -> float:
        return self._started_at if self._refused is None else self._refused.sent_at

    def _gave_up(self) -> LockTimeout | ServerUnreachable:
        name, refused = self.acquisition.name, self._refused
        silent_s = _clock.now() - self._answered_at()
        fresh_s = self._request_timeout + _clock.poll_interval(self._alive)
        # Who waits for ever gives up for one reason only.
        is_silent = silent_s > fresh_s or self._ends_at == math.inf
        if refused is None or (self._trouble is not None and is_silent):
            trouble = self._trouble or NoAnswer("nothing was asked")
            return trouble.unreachable(
                f"no usable answer about the lock {name!r} for {silent_s:.1f} s", name=name
            )
        return not_got(name, refused)

    def _tell_of_a_long_wait(self) -> None:
        """Once: about a key that will never expire, or a wait that has become long."""
        if not self._warned and self._refused is not None:
            waited_s = _clock.now() - self._started_at
            self._warned = told_of_a_long_wait(self.acquisition.name, self._refused, waited_s)


def not_got(name: str, refused: Refused) -> LockTimeout:
    """What a waiter gets who was refused until the end."""
    holder = _names.holder(refused.value)
    return LockTimeout(
        f"the lock {name!r} was not got in time: {holder} holds it; waiting: {refused.waiters}",
        name=name,
        holder=holder,
        ttl_left=None if refused.ttl_left_ms < 0 else refused.ttl_left_ms / 1000,
        waiters=refused.waiters,
    )


def told_of_a_long_wait(name: str, refused: Refused, waited_s: float) -> bool:
    """Whether there was something to tell, in the log."""
    if refused.ttl_left_ms != -1 and waited_s <= PATIENCE_S:
        return False
    holder, ttl_left = _names.holder(refused.value), refused.ttl_left_ms / 1000
    _log.warning(
        "waiting for the lock %r for %.0f s: %s holds it, %s",
        name,
        waited_s,
        holder,
        "without a TTL" if refused.ttl_left_ms == -1 else f"{ttl_left:.1f} s left",
        extra={
            "lock_name": name,
            "lock_holder": holder,
            "lock_ttl_left": None if ttl_left < 0 else ttl_left,
            "lock_waited": waited_s,
            "lock_waiters": refused.waiters,
        },
    )
    return True


def closed_error(name: str) -> RuntimeError:
    """What a waiter gets whose client closes."""
    return RuntimeError(f"the client was closed while waiting for {name!r}")


async def rest(wake: asyncio.Future[None], pause: float) -> None:
    """For *pause* seconds, or until *wake* is roused."""
    timer = asyncio.get_running_loop().call_later(pause, rouse, wake)
    try:
        await wake
    finally:
        timer.cancel()


def rouse(wake: asyncio.Future[None]) -> None:
    """Once is enough."""
    if not wake.done():
        wake.set_result(None)
