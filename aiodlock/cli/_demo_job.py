"""What one worker of the demo is told to do: which lock, where, when a job is a slow one."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Self

TTL_S = 1.0
QUICK_S = 0.01
SLOW_S = 1.5  # outlasts the ttl
SLOW_EVERY_S = 2.0  # one slow job in so much time, the workers in turn
PAUSE_S = 0.005  # between two jobs, so that a worker's own next try is not always the first

_FIRST_SLOW_S = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """The order that a worker reads as its first line."""

    lock: str
    url: str
    prefix: str
    worker: int
    workers: int

    def slow_due(self, seconds: float) -> int:
        """How many slow jobs this worker is to have begun *seconds* after its start.

        By the clock and not by the count of jobs: else a lock that lets everybody in would get
        more of them, and the three locks would not have the same load.
        """
        own_first = _FIRST_SLOW_S + self.worker * SLOW_EVERY_S
        rounds = (seconds - own_first) / (self.workers * SLOW_EVERY_S)
        return max(0, math.floor(rounds) + 1)

    def to_line(self) -> bytes:
        """This order as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The order that `to_line` wrote."""
        return cls(**json.loads(line))
