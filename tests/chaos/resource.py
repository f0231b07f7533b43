"""A counter in a file that many processes work on, guarded by fencing tokens in two ways.

The file is a list of operations. Each is one line appended at once, so all processes agree on
their order, and one that is killed or stopped at any instant leaves no half of one; whether an
operation took effect follows from those before it.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class State:
    """What the operations so far amount to.

    Attributes:
        claimed: The largest fencing token that claimed first.
        value: The counter under claim-first.
        commits: How many of its writes took effect.
        loose_token: The largest fencing token that wrote, where only writes are checked.
        loose_value: The counter there.
        loose_commits: How many of its writes took effect.
    """

    claimed: int = 0
    value: int = 0
    commits: int = 0
    loose_token: int = 0
    loose_value: int = 0
    loose_commits: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)

    def apply(self, line: bytes) -> bool:
        """Do one operation, if its token allows it; whether it did."""
        kind, *words = line.split()
        numbers = list(map(int, words))
        done = getattr(self, f"_{kind.decode()}")(*numbers[:-1])  # The last one tells copies apart.
        self.verdicts[f"{kind.decode()} {'done' if done else 'refused'}"] += 1
        return bool(done)

    @property
    def lost(self) -> int:
        """Updates that took effect under claim-first, and are not in its counter."""
        return self.commits - self.value

    @property
    def loosely_lost(self) -> int:
        """The same where only writes are checked."""
        return self.loose_commits - self.loose_value

    def _claim(self, token: int) -> bool:
        if token <= self.claimed:
            return False
        self.claimed = token
        return True

    def _read(self, token: int) -> bool:
        return token == self.claimed

    def _write(self, token: int, value: int) -> bool:
        if token != self.claimed:
            return False
        self.value = value
        self.commits += 1
        return True

    def _loose(self, token: int, value: int) -> bool:
        if token < self.loose_token:
            return False
        self.loose_token, self.loose_value = token, value
        self.loose_commits += 1
        return True


class RefusedError(Exception):
    """The resource has seen a larger fencing token."""


class Resource:
    """One process' view of it: `claim`, `read`, `write`, each with the section's token."""

    def __init__(self, path: Path) -> None:
        self.state = State()
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o600)
        self._read_to = 0
        self._pending = b""
        self._operations = 0

    def claim(self, token: int) -> None:
        """Before the first read of a section."""
        self._do("claim", token)

    def read(self, token: int) -> tuple[int, int]:
        """Both counters; the second needs no token."""
        self._do("read", token)
        return self.state.value, self.state.loose_value

    def write(self, token: int, value: int, loose_value: int) -> None:
        """Set both counters, each by its own rule; raises if claim-first refuses."""
        self._append("loose", token, loose_value)
        self._do("write", token, value)

    def catch_up(self) -> State:
        """Read what all processes did meanwhile."""
        self._seen(None)
        return self.state

    def _do(self, kind: str, token: int, *numbers: int) -> None:
        if not self._seen(self._append(kind, token, *numbers)):
            raise RefusedError(f"{kind} with {token}: {self.state.claimed} has claimed")

    def _append(self, kind: str, *numbers: int) -> bytes:
        self._operations += 1
        mark = f"{os.getpid()}{self._operations:012}"
        line = " ".join([kind, *map(str, numbers), mark]).encode()
        os.write(self._file, line + b"\n")
        return line

    def _seen(self, ours: bytes | None) -> bool:
        """Apply every operation up to the end; whether *ours*, which is among them, was done."""
        was_done = False
        while chunk := os.pread(self._file, 1 << 20, self._read_to):
            self._read_to += len(chunk)
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            for line in lines:
                was_done = self.state.apply(line) if line == ours else self._other(line, was_done)
        return was_done

    def _other(self, line: bytes, was_done: bool) -> bool:
        self.state.apply(line)
        return was_done
