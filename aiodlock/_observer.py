"""What a user is told of locks while they run: events, each given to a method of an observer."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Final, Literal

from ._errors import LostReason

LockKind = Literal["lock", "reader", "writer", "semaphore"]
Outcome = Literal["timeout", "unreachable", "cancelled", "closed", "error"]


@dataclass(frozen=True, slots=True)
class LockEvent:
    """What one acquisition had come to when something happened to it.

    Args:
        acquisition: A number that all events of one acquisition share; unique in this process.
        name: What is locked.
        kind: What it was locked with: "lock", "reader", "writer" or "semaphore".
        holder: Who acquires or holds: this client's `<label>:<client id>`.
        fencing_token: None until it is acquired, and over a quorum without fencing.
        waited: Seconds since the acquisition began; once it is acquired, those that it took.
        held: Seconds since it was acquired; those that it was held, once that is over.
        left: Seconds for which the lease may still be relied on; 0 where there is none.
    """

    acquisition: int
    name: str
    kind: LockKind
    holder: str
    fencing_token: int | None
    waited: float
    held: float
    left: float


@dataclass(frozen=True, slots=True)
class NotAcquiredEvent(LockEvent):
    """The end of an acquisition that came to nothing.

    Args:
        outcome: "timeout": held by another until then (also where `try_acquire` returns None).
            "unreachable": no usable answer. "cancelled": so was the caller. "closed": so was the
            client. "error": anything else.
        error: What came out of the acquisition.
    """

    outcome: Outcome
    error: BaseException


@dataclass(frozen=True, slots=True)
class LostEvent(LockEvent):
    """The end of a lease that was not released.

    Args:
        reason: Why. EXPIRED also where a lease was thrown away, since nothing extends it.
    """

    reason: LostReason


class Observer:
    """Told what happens to every lock of a client: `LockClient(..., observer=...)`.

    Make a class of it with the methods that you need; here they do nothing. Each acquisition
    begins with `waiting`, which `acquired` or `not_acquired` ends; `acquired` is followed by any
    number of `extended` or `at_risk`, then ended by `released` or `lost`. Entering a reentrant
    lease again is no acquisition; `LockClient.all` makes one for each name.

    They are called in the event loop, so they must not block. `waiting`, `acquired` and
    `not_acquired` run in the task that acquires, with its context variables; the others in any
    task, also in that which extends all leases: they must not cancel it. What they raise changes
    nothing for the lock; it is logged, once for each method and client. Nothing is told once the
    loop has ended, or in a forked child.
    """

    def waiting(self, event: LockEvent) -> None:
        """An acquisition begins; also one that will get the lock at once."""

    def acquired(self, event: LockEvent) -> None:
        """It was granted; the lease begins."""

    def not_acquired(self, event: NotAcquiredEvent) -> None:
        """It was not granted, and ends."""

    def extended(self, event: LockEvent) -> None:
        """The lease lasts longer; where it was at risk, it is so no more."""

    def at_risk(self, event: LockEvent) -> None:
        """An extension failed: without another one it is lost in `event.left` seconds."""

    def lost(self, event: LostEvent) -> None:
        """The lease ended, and its holder did not end it."""

    def released(self, event: LockEvent) -> None:
        """Its holder gave it up; `event.held` is until then, not until the server's answer."""


METHODS: Final = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""What an observer can be told, by the names of its methods."""


def checked_observer(observer: object) -> Observer | None:
    """*observer* if it can be told."""
    if observer is None:
        return None
    if not isinstance(observer, Observer):
        raise TypeError(f"observer must be an aiodlock.Observer or None; got {observer!r}")
    for method in METHODS:
        if inspect.iscoroutinefunction(getattr(observer, method)):
            raise TypeError(
                f"observer must have plain methods, for nobody awaits them; {method}() is async"
            )
    return observer
