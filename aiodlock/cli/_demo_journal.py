"""Collects what the workers of the demo say while they run, as intervals."""

from typing import NamedTuple

from aiodlock.cli._history import Interval


class Entry(NamedTuple):
    """A stay that has not ended yet."""

    worker: int
    enter_ns: int
    fencing_token: int | None


class Journal:
    """Who waits, who is inside, and every stay that has ended."""

    def __init__(self) -> None:
        self.ended: list[Interval] = []
        self.waiting: set[int] = set()
        self.losses = 0
        self.last_entry_ns = 0
        self._inside: dict[int, Entry] = {}

    @property
    def grants(self) -> int:
        """How many stays have begun."""
        return len(self.ended) + len(self._inside)

    @property
    def inside(self) -> int:
        """How many workers are inside now."""
        return len(self._inside)

    @property
    def holder(self) -> Entry | None:
        """The stay of the one worker inside, if nobody has entered since it did.

        With a lock that leaks, one who is inside may have lost it to others that came and went.
        """
        if len(self._inside) != 1:
            return None
        [entry] = self._inside.values()
        return entry if entry.enter_ns == self.last_entry_ns else None

    def read(self, worker: int, line: str) -> None:
        """Take down one line that *worker* said."""
        match line.split():
            case ["want"]:
                self.waiting.add(worker)
            case ["enter", at_ns, *token]:
                self._enter(Entry(worker, int(at_ns), int(token[0]) if token else None))
            case ["leave", at_ns]:
                self._leave(worker, int(at_ns), was_killed=False)
            case ["lost"]:
                self.losses += 1
            case _:
                raise ValueError(f"not a line of a worker: {line!r}")

    def gone(self, worker: int, at_ns: int, *, was_killed: bool) -> None:
        """Take down that *worker* is no more since *at_ns*; its lines must all be read."""
        self.waiting.discard(worker)
        if worker in self._inside:
            self._leave(worker, at_ns, was_killed=was_killed)

    def _enter(self, entry: Entry) -> None:
        self.waiting.discard(entry.worker)
        self.last_entry_ns = max(self.last_entry_ns, entry.enter_ns)
        self._inside[entry.worker] = entry

    def _leave(self, worker: int, at_ns: int, *, was_killed: bool) -> None:
        entry = self._inside.pop(worker)
        self.ended.append(Interval(worker, entry.enter_ns, at_ns, entry.fencing_token, was_killed))
