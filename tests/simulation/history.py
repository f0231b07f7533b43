"""What happened in one simulation, in order."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple


class Event(NamedTuple):
    """One thing that happened, at a true time in seconds."""

    at: float
    kind: str
    details: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.at:12.6f}  {self.kind:<16} {' '.join(map(str, self.details))}"


class History:
    """Every event, with what it adds up to."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.breaches: list[str] = []
        self.counts: Counter[str] = Counter()

    def add(self, at: float, kind: str, *details: object) -> None:
        self.events.append(Event(at, kind, details))
        self.counts[kind] += 1

    def digest(self) -> str:
        """Equal for equal histories, in any process."""
        text = "\n".join(map(str, self.events))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
