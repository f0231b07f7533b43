"""Until when a lease may be believed in, in which state it is; pure, but for reading the clock."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

from . import _clock
from ._errors import LostReason
from ._observed import Observed

# A deadline that is noticed later than this was noticed late because the loop stood still.
_STALL_S: Final = 0.1

State = Literal["held", "at_risk", "lost", "released"]


class Asked(NamedTuple):
    """What an extension asks for; *is_last*: max_hold allows no longer one."""

    ttl_ms: int
    is_last: bool


class Validity:
    """All changes of a lease's state, and why they happen."""

    observed: Observed | None = None
    """Told of them, where somebody listens; of a release when it is answered."""

    def __init__(self, deadline: float, *, auto_extend: bool, max_hold: float | None) -> None:
        self.state: State = "held"
        self.reason: LostReason | None = None
        self.is_open = True
        """Whether it was neither lost nor released, as far as anybody noticed."""
        self.is_final = False  # No extension is to follow: max_hold, or it is not ours.
        self._ends_at = math.inf if max_hold is None else _clock.now() + max_hold
        self._answered = deadline
        self.deadline = min(deadline, self._ends_at)
        """Instant on our clock until which the lease may be believed in."""
        self._auto_extend = auto_extend
        self._is_asking = False  # An extension went out, and none was answered since.

    @property
    def left(self) -> float:
        """Seconds to the deadline; negative after it."""
        return self.deadline - _clock.now()

    def ask(self, ttl: float) -> Asked:
        """Begin an extension, cut so that the key ends at grant + max_hold."""
        self._is_asking = True
        most = self._ends_at - _clock.now()
        if ttl <= most:
            return Asked(_clock.ttl_ms(ttl), is_last=False)
        return Asked(max(1, math.floor(most * 1000)), is_last=True)

    def prolong(self, deadline: float, *, is_last: bool) -> None:
        """An extension was answered; a deadline never moves back."""
        self._is_asking = False
        self.is_final = self.is_final or is_last
        self._answered = max(self._answered, deadline)
        self.deadline = min(self._answered, self._ends_at)
        if self.state == "at_risk":
            self.state = "held"
        if self.observed is not None and self.is_open:
            self.observed.extended(self.left)

    def endanger(self) -> None:
        """An extension failed, or was not answered."""
        if self.state == "held":
            self.state = "at_risk"
            if self.observed is not None:
                self.observed.at_risk(self.left)

    def lose(self, reason: LostReason) -> bool:
        """Whether that is news."""
        if not self.is_open:
            return False
        self.state, self.reason, self.is_open = "lost", reason, False
        if self.observed is not None:
            self.observed.lost(reason)
        return True

    def release(self) -> bool:
        """Whether that is news."""
        if not self.is_open:
            return False
        self.state, self.is_open = "released", False
        if self.observed is not None:
            self.observed.retired()
        return True

    def find_gone(self, standing: str | None) -> None:
        """The release found *standing* in the key: it was lost before, unnoticed.

        After the deadline that proves nothing, for the key may have run out since the body ended.
        """
        if self.state == "released" and self.left > 0:
            self.state, self.reason = "lost", self.reason_for(standing)

    def find_taken(self, standing: str | None) -> LostReason:
        """An extension found *standing* in the key: none is to follow."""
        self.is_final = True
        return self.reason_for(standing)

    def reason_for(self, standing: str | None) -> LostReason:
        """Why *standing* (None: nothing) is in the key, in place of our value."""
        if standing is not None:
            return LostReason.STOLEN
        return LostReason.DELETED if self.left > 0 else LostReason.EXPIRED

    def reason_at_deadline(self) -> LostReason:
        """Why the deadline is over, by what was under way then."""
        if self.is_final or self._ends_at <= self._answered:
            return LostReason.MAX_HOLD
        if not self._auto_extend and not self._is_asking:
            return LostReason.EXPIRED
        if self._is_asking and -self.left <= _STALL_S:
            return LostReason.UNREACHABLE
        return LostReason.LOOP_STALLED
