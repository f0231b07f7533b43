"""What one simulation is about, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.acts import Options
from tests.simulation.chaos import FAULTS
from tests.simulation.quorum_chaos import QUORUM_FAULTS
from tests.simulation.world import RATE_SHARE


@dataclass(frozen=True)
class Setting:
    """What one seed is about."""

    hosts: int
    tasks: tuple[int, ...]
    options: Options
    faults: list[str]
    mean_pause_s: float
    rate_share: float = RATE_SHARE
    clocks_apart_s: float = 0.0  # Of the servers, when all begins.
    fencing_share: float = 1.0  # Of the hosts over a quorum.
    is_hasty: bool = False  # A server that lost its keys comes back at once.

    @classmethod
    def of(
        cls, chance: random.Random, *, rate_share: float, faults: Sequence[str] | None
    ) -> Setting:
        """One server."""
        hosts = chance.randint(2, 4)
        is_calm = chance.random() < 0.25
        until_s = 2 + 4 * chance.random()
        options = Options(
            names=("a",) if chance.random() < 0.7 else ("a", "b"),
            ttl_s=chance.choice((0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
            request_timeout_s=chance.choice((0.2, 1.0, 2.0)),
            cancel_share=chance.choice((0.0, 0.2, 0.6)),
            retry_share=chance.choice((0.0, 0.2)),
            auto_extend_share=chance.choice((0.5, 1.0)),
            hold_s=chance.choice((0.02, 0.3, 1.0)),
            breaks=chance.choice((0, 0, 0, 1)),
            protocol=chance.choice((2, 3)),
            until_s=until_s,
        )
        # A few kinds at a time: all at once drown each other.
        chosen = chance.sample(sorted(FAULTS), chance.randint(1, 6))
        return cls(
            hosts,
            tuple(chance.randint(1, 4 if hosts < 4 else 2) for _ in range(hosts)),
            options,
            list(faults) if faults is not None else [] if is_calm else chosen,
            chance.choice((0.3, 1.0, 2.0)),
            rate_share,
        )

    @classmethod
    def of_quorum(
        cls, chance: random.Random, *, rate_share: float, faults: Sequence[str] | None
    ) -> Setting:
        """Three servers, or five."""
        hosts = chance.randint(2, 4)
        is_calm = chance.random() < 0.15
        options = Options(
            names=("a",) if chance.random() < 0.8 else ("a", "b"),
            ttl_s=chance.choice((0.1, 0.3, 1.0, 1.0, 3.0, 10.0)),
            request_timeout_s=chance.choice((0.2, 1.0, 2.0)),
            cancel_share=chance.choice((0.0, 0.2, 0.6)),
            retry_share=chance.choice((0.0, 0.2)),
            auto_extend_share=chance.choice((0.5, 1.0)),
            hold_s=chance.choice((0.02, 0.3, 1.0)),
            breaks=chance.choice((0, 0, 0, 1)),
            protocol=chance.choice((2, 3)),
            until_s=3 + 5 * chance.random(),
            nodes=tuple(f"s{n}" for n in range(chance.choice((3, 5)))),
            extends_wildly=chance.random() < 0.5,
        )
        chosen = chance.sample(sorted(QUORUM_FAULTS), chance.randint(1, 6))
        return cls(
            hosts,
            tuple(chance.randint(1, 3 if hosts < 4 else 2) for _ in range(hosts)),
            options,
            list(faults) if faults is not None else [] if is_calm else chosen,
            chance.choice((0.15, 0.5, 1.0)),
            rate_share,
            clocks_apart_s=chance.choice((0.0, 0.001, 0.1, 1.0, 5.0)),
            fencing_share=chance.choice((1.0, 1.0, 0.5, 0.0)),
        )
