"""An observer that writes down what it is told, for tests to read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from aiodlock import LockEvent, LostEvent, NotAcquiredEvent, Observer

ENDS_OF_A_WAIT = ("acquired", "not_acquired")
ENDS_OF_A_LEASE = ("lost", "released")


class Recorder(Observer):
    """Attributes: `events`, each with the method that was called, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def waiting(self, event: LockEvent) -> None:
        self.events.append(("waiting", event))

    def acquired(self, event: LockEvent) -> None:
        self.events.append(("acquired", event))

    def not_acquired(self, event: NotAcquiredEvent) -> None:
        self.events.append(("not_acquired", event))

    def extended(self, event: LockEvent) -> None:
        self.events.append(("extended", event))

    def at_risk(self, event: LockEvent) -> None:
        self.events.append(("at_risk", event))

    def lost(self, event: LostEvent) -> None:
        self.events.append(("lost", event))

    def released(self, event: LockEvent) -> None:
        self.events.append(("released", event))

    @property
    def told(self) -> list[str]:
        """The methods that were called, in order."""
        return [what for what, _ in self.events]

    def last(self, what: str) -> Any:
        """The last event of that method."""
        return [event for told, event in self.events if told == what][-1]

    def by_acquisition(self) -> dict[int, list[str]]:
        """The methods that were called for each."""
        found: dict[int, list[str]] = defaultdict(list)
        for what, event in self.events:
            found[event.acquisition].append(what)
        return found


def faults_of(told: list[str], *, may_be_unended: bool = False) -> list[str]:
    """What is wrong with the events of one acquisition, told in that order."""
    waits = [what for what in told if what in ENDS_OF_A_WAIT]
    leases = [what for what in told if what in ENDS_OF_A_LEASE]
    wanted = 1 if "acquired" in waits else 0
    faults = []
    if told.count("waiting") != 1 or told[0] != "waiting":
        faults.append("it does not begin by waiting, once")
    if len(waits) != 1 and not (may_be_unended and not waits):
        faults.append(f"its wait has {len(waits)} ends")
    if len(leases) != wanted and not (may_be_unended and not leases):
        faults.append(f"its lease has {len(leases)} ends")
    if waits and told[1] not in ENDS_OF_A_WAIT:
        faults.append("something happens before it is acquired")
    if (leases or "not_acquired" in waits) and told[-1] not in (*leases, "not_acquired"):
        faults.append("something happens after its end")
    return faults
