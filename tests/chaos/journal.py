"""What each worker process did when, in a file that outlives a SIGKILL.

One line an event, each written at once: a process that is killed or stopped has said all that it
did before. The instants are nanoseconds of the library's clock, which all processes share.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from aiodlock import _clock
from aiodlock.cli._history import NS_PER_S, Interval

NEVER_NS = 1 << 62


def now_ns() -> int:
    """This instant on the clock of every deadline."""
    return round(_clock.now() * NS_PER_S)


def at_ns(instant: float) -> int:
    """An instant of the library (seconds) as the journal writes it."""
    return round(instant * NS_PER_S)


class Pen:
    """Appends to a worker's journal."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)

    def say(self, *words: object) -> None:
        """Write one line."""
        line = " ".join(map(str, words)).replace("\n", "; ")
        os.write(self._file, line.encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Stay(Interval):
    """One stay inside the section; it ends at the holder's own deadline at the latest.

    Attributes:
        asked_ns: When its acquisition began.
        deadline_ns: The last deadline that its body saw.
        told_ns: When its body was at an end, by itself or by what it was told.
        why: `done`, `cancelled`, `lost:<reason>`; `killed` or `open` where it never left.
        task: Which task of the worker.
        exit_why: What came out of the block, if not nothing.
        exit_ns: When it did.
    """

    asked_ns: int = 0
    deadline_ns: int = NEVER_NS
    told_ns: int = 0
    why: str = "done"
    task: int = 0
    exit_why: str = ""
    exit_ns: int = 0

    @property
    def was_lost(self) -> bool:
        """Whether the holder was told so, but for a lease that nobody was to extend."""
        told = {self.why, self.exit_why} - {"lost:EXPIRED"}
        return any(why.startswith("lost:") for why in told)


@dataclass(frozen=True, slots=True)
class Wait:
    """One acquisition from its beginning until it was granted, given up or killed."""

    worker: int
    task: int
    from_ns: int
    to_ns: int
    was_granted: bool


@dataclass
class Diary:
    """All that one worker wrote.

    Attributes:
        told: How often acquisitions and sections ended in which way.
        lags: When its loop did not run: (from, to).
        is_closed: Whether it ended as told to, with nothing left behind.
    """

    worker: int
    stays: list[Stay] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    lags: list[tuple[int, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    is_ready: bool = False
    is_closed: bool = False

    def lag_ns(self, from_ns: int, to_ns: int) -> int:
        """How long, between two instants, its loop did not run."""
        return sum(max(0, min(to, to_ns) - max(since, from_ns)) for since, to in self.lags)


def path_of(folder: Path, worker: int) -> Path:
    """Where the journal of *worker* is."""
    return folder / f"worker-{worker}"


def read(path: Path, worker: int, *, killed_ns: int | None = None) -> Diary:
    """The diary of *worker*, which was killed at *killed_ns* if it was."""
    reader = _Reader(Diary(worker))
    if path.exists():
        *lines, _ = path.read_text().split("\n")  # The last one ends nothing, or is being written.
        for line in lines:
            reader.take(line)
    reader.end(killed_ns)
    return reader.diary


class _Reader:
    """Takes down lines; knows who waits or is inside at the moment."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self._asked: dict[int, int] = {}
        self._inside: dict[int, tuple[int, int, int, int]] = {}  # asked, enter, token, deadline

    def take(self, line: str) -> None:
        """One line, of the section or of what is around it."""
        if not self._take_step(line.split(" ")):
            self._take_news(line.split(" "))

    def _take_step(self, words: list[str]) -> bool:
        """Whether it is one of an acquisition or of the section that follows."""
        match words:
            case ["want", task, instant]:
                self._asked[int(task)] = int(instant)
            case ["enter", task, instant, token, deadline]:
                asked_ns = self._wait_ends(int(task), int(instant), was_granted=True)
                self._inside[int(task)] = asked_ns, int(instant), int(token), int(deadline)
            case ["extended", task, deadline]:
                asked_ns, enter_ns, token_seen, _ = self._inside[int(task)]
                self._inside[int(task)] = asked_ns, enter_ns, token_seen, int(deadline)
            case ["leave", task, instant, deadline, why]:
                self._leave(int(task), int(instant), int(deadline), why)
            case ["quit", task, instant, why]:
                self._wait_ends(int(task), int(instant), was_granted=False)
                self.diary.told[why] += 1
            case _:
                return False
        return True

    def _take_news(self, words: list[str]) -> None:
        match words:
            case ["exit", task, instant, why]:
                self._exit(int(task), int(instant), why)
            case ["lag", since, to]:
                self.diary.lags.append((int(since), int(to)))
            case ["error", *said]:
                self.diary.errors.append(" ".join(said))
            case ["ready"]:
                self.diary.is_ready = True
            case ["closed"]:
                self.diary.is_closed = True
            case _:
                raise ValueError(f"not a line of a worker: {words}")

    def end(self, killed_ns: int | None) -> None:
        """No more lines: whoever is inside or waits does so until the kill, or for ever."""
        end_ns = NEVER_NS if killed_ns is None else killed_ns
        for task in tuple(self._inside):
            deadline_ns = self._inside[task][3]
            self._leave(task, end_ns, deadline_ns, "open" if killed_ns is None else "killed")
        for task in tuple(self._asked):
            self._wait_ends(task, end_ns, was_granted=False)

    def _leave(self, task: int, told_ns: int, deadline_ns: int, why: str) -> None:
        asked_ns, enter_ns, token, _ = self._inside.pop(task)
        self.diary.told[why] += 1
        self.diary.stays.append(
            Stay(
                worker=self.diary.worker,
                enter_ns=enter_ns,
                leave_ns=max(enter_ns, min(told_ns, deadline_ns)),
                fencing_token=token,
                was_killed=why == "killed",
                asked_ns=asked_ns,
                deadline_ns=deadline_ns,
                told_ns=told_ns,
                why=why,
                task=task,
            )
        )

    def _exit(self, task: int, exit_ns: int, why: str) -> None:
        self.diary.told[f"exit:{why}"] += 1
        stays = self.diary.stays
        last = next(n for n in reversed(range(len(stays))) if stays[n].task == task)
        stays[last] = dataclasses.replace(stays[last], exit_why=why, exit_ns=exit_ns)

    def _wait_ends(self, task: int, instant_ns: int, *, was_granted: bool) -> int:
        asked_ns = self._asked.pop(task)
        self.diary.waits.append(
            Wait(self.diary.worker, task, asked_ns, max(asked_ns, instant_ns), was_granted)
        )
        return asked_ns
