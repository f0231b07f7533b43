"""The course of one simulation over one server: trouble, then calm, then nothing may be left."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tests.simulation.chaos import Chaos
from tests.simulation.history import History
from tests.simulation.network import Network, Weather
from tests.simulation.referee import Referee
from tests.simulation.scripts import ScriptReferee
from tests.simulation.server import SimulatedServer
from tests.simulation.setting import Setting
from tests.simulation.site import ONLY, Site
from tests.simulation.users import Crew
from tests.simulation.world import Clock, Host, World

_SAMPLE_S: Final = 0.5
# After everybody has left: longer than any key but the fences.
_AFTER_S: Final = 400.0
# A day, and what slow clocks or such that were set back may add.
_DAY_S: Final = 86_400.0 * 1.05


class Simulation:
    """The world of one seed: one server."""

    def __init__(self, seed: int, setting: Setting, chance: random.Random) -> None:
        self.stops_early = False
        self._has_newcomers = False
        self.history = History()
        self.world = World(seed, self.history)
        self.setting = setting
        self.sites = {
            name: self._site(
                name, random.Random(f"weather {seed}{name.removeprefix(ONLY)}"), chance
            )
            for name in setting.options.nodes
        }
        self.referee = self._referee()
        self.crews = [self._crew(n, chance) for n in range(setting.hosts)]
        self.chaos = self._chaos()

    def run(self) -> None:
        """Trouble, then calm, then nothing may be left."""
        options = self.setting.options
        self.chaos.plan(
            self.setting.faults,
            until_s=options.until_s,
            mean_pause_s=self.setting.mean_pause_s,
        )
        self._sample()
        self.world.run(until=options.until_s)
        # The longest wait there is, then each of at most 12 waiters holds for at most 6 ttls.
        most_s = 60 + 12 * (6 * options.ttl_s + 10)
        is_over = self.world.run(until=options.until_s + most_s, is_over=self._may_end)
        if self.stops_early and self.history.breaches:
            return
        if not is_over:
            self.world.breach("end", f"hung: {self._under_way()}")
            return
        self._check_left()
        self.referee.check_overlaps()
        self._check_at_end()
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
        """Destroy what hosts left that were killed, or did not come to their end."""
        for host in self.world.hosts:
            for task in asyncio.all_tasks(host.loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            host.loop.leave()
        return any(crew.host.is_dead or not crew.is_over for crew in self.crews)

    def _check_at_end(self) -> None:
        """What only one server promises."""
        options = self.setting.options
        longest_s = 2 * options.ttl_most_s + 6 + 4 + 1 + self.referee.stepped_back_s
        self.referee.check_waits(options.until_s + 20, longest_s)

    def _referee(self) -> Referee:
        return Referee(self.world, *(site.scripts for site in self.sites.values()))

    def _chaos(self) -> Chaos:
        options = self.setting.options
        return Chaos(
            self.world,
            list(self.sites.values()),
            self.referee,
            self.crews,
            names=options.names,
            ttl_s=options.ttl_s,
        )

    def _site(self, name: str, weather: random.Random, chance: random.Random) -> Site:
        rate, ahead_s = self._rate(chance), 0.0
        if name != ONLY:
            ahead_s = self.setting.clocks_apart_s * chance.choice((0.0, 1.0, chance.random()))
        server = SimulatedServer(self.world, rate=rate, ahead_us=int(ahead_s * 1e6))
        scripts = ScriptReferee(self.world, server.model, node="" if name == ONLY else name)
        server.on_script = scripts.on_script
        return Site(name, server, Network(self.world, server, Weather(weather)), scripts)

    def add_host(self, name: str, chance: random.Random) -> Host:
        """A machine more, which reaches every server."""
        clock = Clock(offset_s=chance.random() * 1e6, rate=self._rate(chance))
        host = Host(self.world, name, clock)
        host.connect = functools.partial(self._connect, host)
        self.world.hosts.append(host)
        return host

    async def _connect(self, host: Host, make: Callable[[], asyncio.Protocol], to: str) -> Any:
        return await self.sites[to].network.connect(host, make)

    def _rate(self, chance: random.Random) -> float:
        return 1 + self.setting.rate_share * chance.choice((-1, 0, 1, chance.uniform(-1, 1)))

    def _crew(self, n: int, chance: random.Random) -> Crew:
        host, setting = self.add_host(f"h{n}", chance), self.setting
        options = setting.options
        if len(self.sites) > 1:
            has_fencing = chance.random() < setting.fencing_share
            options = replace(options, fencing=options.fencing and has_fencing)
        closes_at = setting.options.until_s * chance.random() if chance.random() < 0.15 else None
        return Crew(
            host,
            self.referee,
            options,
            random.Random(chance.random()),
            tasks=setting.tasks[n],
            closes_at=closes_at,
        )

    def _sample(self) -> None:
        if self._has_newcomers:
            return
        self.referee.look_for_orphans()
        if not self._are_over():
            self.world.after(_SAMPLE_S, self._sample)

    def _are_over(self) -> bool:
        return all(crew.is_over for crew in self.crews)

    def _may_end(self) -> bool:
        return (self.stops_early and bool(self.history.breaches)) or self._are_over()

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
            for site in self.sites.values():
                for key in site.server.model.dump():
                    if not key.decode().endswith(may_stay):
                        self.world.breach("left", f"{key.decode()} after {after_s:g} s")


def _place(task: asyncio.Task[Any]) -> str:
    """Where it waits."""
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else "?"
