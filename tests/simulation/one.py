"""One simulation, from its seed to its verdict."""

from __future__ import annotations

import gc
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from tests.simulation.course import Simulation
from tests.simulation.quorum_course import QuorumSimulation
from tests.simulation.setting import Setting
from tests.simulation.virtual import under_seed
from tests.simulation.world import RATE_SHARE, Endless


@dataclass
class Verdict:
    """What came of one seed."""

    seed: int
    breaches: list[str]
    digest: str
    turns: int
    virtual_s: float
    counts: Counter[str]
    injected: Counter[str]
    hits: Counter[str]
    trace: list[str] = field(default_factory=list)


def simulate(
    seed: int,
    *,
    trace: bool = False,
    rate_share: float = RATE_SHARE,
    faults: Sequence[str] | None = None,
    stops_early: bool = False,
    is_quorum: bool = False,
    is_hasty: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Verdict:
    """The verdict on one seed; the same in every process.

    Args:
        seed: All chance is drawn from it.
        trace: Whether the verdict brings the whole history.
        rate_share: How far the rate of a clock may be off.
        faults: Of these, in place of the seed's own choice.
        stops_early: Whether the first breach is enough.
        is_quorum: Whether there are several servers.
        is_hasty: Whether one of them that lost its keys comes back at once, which it must not.
        options: In place of what the seed draws for the users.
    """
    with under_seed(seed) as ignored:
        chance = random.Random(f"setting {seed}")
        world, setting_of = (
            (QuorumSimulation, Setting.of_quorum) if is_quorum else (Simulation, Setting.of)
        )
        setting = setting_of(chance, rate_share=rate_share, faults=faults)
        setting = replace(setting, options=replace(setting.options, **options), is_hasty=is_hasty)
        simulation = world(seed, setting, chance)
        simulation.stops_early = stops_early
        try:
            simulation.run()
        except Endless as error:
            simulation.world.breach("end", str(error))
        except Exception:  # Of the world, or of a rule put out; a task's comes out elsewhere.
            simulation.world.breach("error", traceback.format_exc(limit=-3))
        simulation.check_garbage(ignored)
        verdict = _verdict(seed, simulation, trace=trace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Of what killed hosts never began.
            if simulation.leave():
                del simulation
                gc.collect()
    return verdict


def _verdict(seed: int, simulation: Simulation, *, trace: bool) -> Verdict:
    history = simulation.history
    return Verdict(
        seed,
        simulation.history.breaches,
        history.digest(),
        simulation.world.turns,
        simulation.world.now,
        history.counts,
        simulation.chaos.injected,
        simulation.chaos.hits,
        [str(event) for event in history.events] if trace else [],
    )
