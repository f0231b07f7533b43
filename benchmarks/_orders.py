"""What one worker process is told to do."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

NAME: Final = "bench"
"""The one name that all compete for, where they do."""


@dataclass(frozen=True)
class Order:
    """What one worker process is told to do.

    Attributes:
        work: One of `work.WORKS`.
        ports: Of the server; of every node, where it is a cluster or a quorum.
        tasks: How many tasks, waiters or leases.
        worker: Which of the workers of this measurement it is.
    """

    client: str
    work: str
    ports: tuple[int, ...]
    tasks: int
    window_s: float
    warm_up_s: float
    ttl_s: float = 10.0
    worker: int = 0

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def urls(self) -> list[str]:
        return [f"redis://127.0.0.1:{port}" for port in self.ports]

    @property
    def url(self) -> str:
        return self.urls[0]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "ports": tuple(fields["ports"])})
