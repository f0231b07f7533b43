"""One acquisition from its first request to its end, as the log and an observer are told of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from typing import Final

from . import _clock, _names
from ._errors import LockTimeout, LostReason, ServerUnreachable
from ._names import Access
from ._observer import LockEvent, LockKind, LostEvent, NotAcquiredEvent, Observer, Outcome
from ._running import running_loop

_log = logging.getLogger("aiodlock")

_KINDS: Final[dict[Access | None, LockKind]] = {
    None: "lock",
    "reading": "reader",
    "writing": "writer",
    "permit": "semaphore",
}

_numbers: Final = itertools.count(1)


class Audience:
    """Who is told about the locks of one client: its observer, and the log at DEBUG."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._failed: set[str] = set()  # Methods; bound: as many as an observer has.

    def begin(self, name: str, tail: str, holder: str) -> Observed | None:
        """An acquisition, told to whoever listens; None where nobody does: no event is made.

        Args:
            name: What is locked.
            tail: Of its owner tokens, which says of what kind the lock is.
            holder: Who acquires.
        """
        if self._observer is None and not _log.isEnabledFor(logging.DEBUG):
            return None
        return Observed(self, name, _KINDS[_names.access_of(tail)], holder)

    def tell(self, what: str, event: LockEvent) -> None:
        """Whatever an observer makes of it, its lock goes on."""
        if what != "lost" and _log.isEnabledFor(logging.DEBUG):  # A loss has a record already.
            _log.debug("%s: %r", what.replace("_", " "), event.name, extra=_fields(event))
        if self._observer is None:
            return
        try:
            getattr(self._observer, what)(event)
        except (Exception, asyncio.CancelledError):
            if what not in self._failed:
                self._failed.add(what)
                _log.exception(
                    "the observer's %s() failed, which changes nothing for the lock %r; "
                    "said once for each method and client",
                    what,
                    event.name,
                    extra=_fields(event),
                )


class Observed:
    """Tells of one acquisition: its beginning, its end, and what happens in between."""

    def __init__(self, audience: Audience, name: str, kind: LockKind, holder: str) -> None:
        self._audience = audience
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._kind = kind
        self._holder = holder
        self._number = next(_numbers)
        self._fencing_token: int | None = None
        self._began_at = _clock.now()
        self._acquired_at: float | None = None
        self._retired_at: float | None = None
        self._is_over = False
        audience.tell("waiting", LockEvent(*self._now()))

    def acquired(self, fencing_token: int | None, left: float) -> None:
        self._fencing_token = fencing_token
        self._acquired_at = _clock.now()
        self._audience.tell("acquired", LockEvent(*self._now(left)))

    def not_acquired(self, error: BaseException, *, is_closing: bool) -> None:
        outcome = _outcome_of(error, is_closing=is_closing)
        self._end("not_acquired", NotAcquiredEvent(*self._now(), outcome, error))

    def extended(self, left: float) -> None:
        self._audience.tell("extended", LockEvent(*self._now(left)))

    def at_risk(self, left: float) -> None:
        self._audience.tell("at_risk", LockEvent(*self._now(left)))

    def lost(self, reason: LostReason) -> None:
        self._end("lost", LostEvent(*self._now(), reason))

    def retired(self) -> None:
        """It is held no more, and will be told when the server has answered."""
        self._retired_at = _clock.now()

    def released(self) -> None:
        self._end("released", LockEvent(*self._now()))

    def _now(
        self, left: float = 0.0
    ) -> tuple[int, str, LockKind, str, int | None, float, float, float]:
        """What every event has."""
        now = self._retired_at or _clock.now()
        acquired_at = self._acquired_at
        return (
            self._number,
            self._name,
            self._kind,
            self._holder,
            self._fencing_token,
            (now if acquired_at is None else acquired_at) - self._began_at,
            0.0 if acquired_at is None else now - acquired_at,
            left,
        )

    def _end(self, what: str, event: LockEvent) -> None:
        """Once; never outside of the loop: in a forked child, or when the loop has ended."""
        if self._is_over:
            return
        self._is_over = True
        if running_loop() is not self._loop:
            return
        if isinstance(sys.exception(), GeneratorExit):
            # The garbage collector may have interrupted anything: the observer, with its own locks.
            self._loop.call_soon(self._audience.tell, what, event)
        else:
            self._audience.tell(what, event)


def _outcome_of(error: BaseException, *, is_closing: bool) -> Outcome:
    if isinstance(error, LockTimeout):
        return "timeout"
    if isinstance(error, ServerUnreachable):
        return "unreachable"
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return "closed" if is_closing else "error"


def _fields(event: LockEvent) -> dict[str, object]:
    """What a record carries; named so that it meets no attribute that others give to records."""
    return {
        "lock_name": event.name,
        "lock_kind": event.kind,
        "lock_holder": event.holder,
        "lock_fencing_token": event.fencing_token,
        "lock_acquisition": event.acquisition,
        "lock_waited": event.waited,
        "lock_held": event.held,
    }
