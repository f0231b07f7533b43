"""One simulation, from its seed to its verdict."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.simulation.acts import Options
from tests.simulation.chaos import FAULTS, Chaos
from tests.simulation.history import History
from tests.simulation.network import Network, Weather
from tests.simulation.referee import Referee
from tests.simulation.scripts import ScriptReferee
from tests.simulation.server import SimulatedServer
from tests.simulation.users import Crew
from tests.simulation.virtual import under_seed
from tests.simulation.world import Clock, Endless, Host, World

# Rates differ by so much at most: less than the drift that aiodlock allows for.
RATE_SHARE: Final = 0.0045
_SAMPLE_S: Final = 0.5
# After everybody has left: longer than any key but the fences.
_AFTER_S: Final = 400.0
# A day, and what slow clocks or such that were set back may add.
_DAY_S: Final = 86_400.0 * 1.05


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


@dataclass(frozen=True)
class Setting:
    """What one seed is about."""

    hosts: int
    tasks: tuple[int, ...]
    options: Options
    faults: list[str]
    mean_pause_s: float
    rate_share: float = RATE_SHARE

    @classmethod
    def of(
        cls, chance: random.Random, *, rate_share: float, faults: Sequence[str] | None
    ) -> Setting:
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


class Simulation:
    """The world of one seed."""

    def __init__(
        self, seed: int, *, rate_share: float, faults: Sequence[str] | None, stops_early: bool
    ) -> None:
        self._stops_early = stops_early
        self.history = History()
        self.world = World(seed, self.history)
        chance = random.Random(f"setting {seed}")
        self._setting = setting = Setting.of(chance, rate_share=rate_share, faults=faults)
        weather = Weather(random.Random(f"weather {seed}"))
        self.server = SimulatedServer(self.world, rate=self._rate(chance))
        self.network = Network(self.world, self.server, weather)
        scripts = ScriptReferee(self.world, self.server.model)
        self.server.on_script = scripts.on_script
        self.referee = Referee(self.world, self.server.model, scripts)
        self.crews = [self._crew(n, chance) for n in range(setting.hosts)]
        self.chaos = Chaos(
            self.world,
            self.network,
            self.server,
            self.referee,
            self.crews,
            names=setting.options.names,
            ttl_s=setting.options.ttl_s,
        )

    def run(self) -> None:
        """Trouble, then calm, then nothing may be left."""
        options = self._setting.options
        self.chaos.plan(
            self._setting.faults,
            until_s=options.until_s,
            mean_pause_s=self._setting.mean_pause_s,
        )
        self._sample()
        self.world.run(until=options.until_s)
        # The longest wait there is, then each of at most 12 waiters holds for at most 6 ttls.
        most_s = 60 + 12 * (6 * options.ttl_s + 10)
        is_over = self.world.run(until=options.until_s + most_s, is_over=self._may_end)
        if self._stops_early and self.history.breaches:
            return
        if not is_over:
            self.world.breach("end", f"hung: {self._under_way()}")
            return
        self._check_left()
        self.referee.check_overlaps()
        longest_s = 2 * options.ttl_most_s + 6 + 4 + 1 + self.referee.scripts.stepped_back_s
        self.referee.check_waits(options.until_s + 20, longest_s)
        self._check_keys()

    def check_garbage(self, ignored: list[str]) -> None:
        """What is destroyed is destroyed in silence, but for what killed hosts left."""
        gc.collect()
        for crew in self.crews:
            for error in crew.host.errors:
                if not crew.host.is_dead:
                    self.world.breach("error", f"{crew.host.name}: {error}")
        for what in ignored:
            self.world.breach("ignored", what)

    def leave(self) -> bool:
        """Destroy what killed hosts left, if there is something."""
        for crew in self.crews:
            for task in asyncio.all_tasks(crew.host.loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            crew.host.loop.leave()
        return any(crew.host.is_dead for crew in self.crews)

    def _rate(self, chance: random.Random) -> float:
        return 1 + self._setting.rate_share * chance.choice((-1, 0, 1, chance.uniform(-1, 1)))

    def _crew(self, n: int, chance: random.Random) -> Crew:
        clock = Clock(offset_s=chance.random() * 1e6, rate=self._rate(chance))
        host = Host(self.world, f"h{n}", clock)
        host.connect = functools.partial(self.network.connect, host)
        self.world.hosts.append(host)
        setting = self._setting
        closes_at = setting.options.until_s * chance.random() if chance.random() < 0.15 else None
        return Crew(
            host,
            self.referee,
            setting.options,
            random.Random(chance.random()),
            tasks=setting.tasks[n],
            closes_at=closes_at,
        )

    def _sample(self) -> None:
        self.referee.look_for_orphans()
        if not self._are_over():
            self.world.after(_SAMPLE_S, self._sample)

    def _are_over(self) -> bool:
        return all(crew.is_over for crew in self.crews)

    def _may_end(self) -> bool:
        return (self._stops_early and bool(self.history.breaches)) or self._are_over()

    def _under_way(self) -> list[str]:
        return [
            f"{crew.host.name}: {sorted(map(_place, asyncio.all_tasks(crew.host.loop)))}"
            for crew in self.crews
            if not crew.is_over
        ]

    def _check_left(self) -> None:
        self.world.run(until=self.world.now + 0.1)
        for crew in self.crews:
            if crew.host.is_dead:
                continue
            for task in asyncio.all_tasks(crew.host.loop):
                self.world.breach("left", f"{crew.host.name}: task {task.get_name()}")
            for timer in crew.host.loop.timers():
                self.world.breach("left", f"{crew.host.name}: {timer}")

    def _check_keys(self) -> None:
        for after_s, may_stay in ((_AFTER_S, ":fence"), (_DAY_S, "nothing")):
            self.world.run(until=self.world.now + after_s)
            for key in self.server.model.dump():
                if not key.decode().endswith(may_stay):
                    self.world.breach("left", f"{key.decode()} after {after_s:g} s")


def _place(task: asyncio.Task[Any]) -> str:
    """Where it waits."""
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "?"


def simulate(
    seed: int,
    *,
    trace: bool = False,
    rate_share: float = RATE_SHARE,
    faults: Sequence[str] | None = None,
    stops_early: bool = False,
) -> Verdict:
    """The verdict on one seed; the same in every process.

    Args:
        seed: All chance is drawn from it.
        trace: Whether the verdict brings the whole history.
        rate_share: How far the rate of a clock may be off.
        faults: Of these, in place of the seed's own choice.
        stops_early: Whether the first breach is enough.
    """
    with under_seed(seed) as ignored:
        simulation = Simulation(seed, rate_share=rate_share, faults=faults, stops_early=stops_early)
        try:
            simulation.run()
        except Endless as error:
            simulation.world.breach("end", str(error))
        except Exception:  # Of the world, or of a rule put out; a task's comes out elsewhere.
            simulation.world.breach("error", traceback.format_exc(limit=-3))
        simulation.check_garbage(ignored)
        verdict = _verdict(seed, simulation, trace=trace)
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
