"""Faults by lot: of connections, of the server, of hosts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.model import Kept
from tests.simulation.acts import PREFIX
from tests.simulation.network import Weather, Wire
from tests.simulation.referee import Referee
from tests.simulation.site import Site
from tests.simulation.users import Crew
from tests.simulation.world import World

_SUFFIXES: Final = (":queue", ":alive", ":fence", "")
_REFUSALS: Final = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "MISCONF Redis is configured to save RDB snapshots, but it's unable to persist to disk.",
)


class Chaos:
    """Breaks things until its time is over, then lets everything be well."""

    def __init__(
        self,
        world: World,
        sites: Sequence[Site],
        referee: Referee,
        crews: list[Crew],
        *,
        names: tuple[str, ...],
        ttl_s: float,
    ) -> None:
        self.injected: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()  # While somebody whom it concerns held or waited.
        self._world = world
        self._sites = sites
        self._referee = referee
        self._crews = crews
        self._names = names
        self._ttl_s = ttl_s
        self._chance = random.Random(world.random.random())
        self._is_over = False
        self._older: Mapping[bytes, Kept] = {}

    def plan(self, faults: list[str], *, until_s: float, mean_pause_s: float) -> None:
        """Some of *faults*, at moments by lot; at *until_s* it ends."""
        at = self._chance.random()
        while faults and at < until_s:
            self._world.at(at, self._strike, self._chance.choice(faults))
            at += self._chance.expovariate(1 / mean_pause_s)
        self._world.at(until_s, self._end)

    def _strike(self, fault: str) -> None:
        if self._inject(fault):
            self.injected[fault] += 1
            self._world.note("FAULT", fault)

    def _inject(self, fault: str) -> bool:
        """Whether there was somebody to hit."""
        return FAULTS[fault](self)

    def _end(self) -> None:
        self._is_over = True
        for site in self._sites:
            site.network.weather.clear()
            site.network.join()
            site.server.resume()
            self._accept(site)
        for crew in self._crews:
            crew.host.resume()

    def _concerns(self, fault: str, host: object = None) -> None:
        """Count whom it hits: those on *host*, or all."""
        if any(host in (None, concerned) for concerned in self._referee.concerned()):
            self.hits[fault] += 1

    def _site(self) -> Site:
        """One server, by lot if there are more."""
        return self._sites[0] if len(self._sites) == 1 else self._chance.choice(self._sites)

    # Connections.

    def _wire(self, fault: str, site: Site | None = None) -> Wire | None:
        wires = (site or self._site()).network.live()
        if not wires:
            return None
        wire = self._chance.choice(wires)
        self._concerns(fault, wire.host)
        return wire

    def cut(self) -> bool:
        """A connection breaks; requests on their way may still arrive."""
        wire = self._wire("cut")
        if wire is not None:
            self._referee.trouble(1.0)
            wire.cut(self._chance, up_lives=self._chance.random() < 0.5)
        return wire is not None

    def silence(self) -> bool:
        """A connection goes half-open."""
        wire = self._wire("silence")
        if wire is not None:
            self._referee.trouble(10.0)
            up, down = self._chance.choice(((True, True), (True, False), (False, True)))
            wire.silence(up=up, down=down)
        return wire is not None

    def stall(self) -> bool:
        """A connection takes long, in one direction or both; nothing is lost."""
        wire = self._wire("stall")
        if wire is not None:
            for_s = self._chance.choice((0.2, 2.0, 10.0)) * self._chance.random()
            self._referee.trouble(for_s + 2.0)
            for pipe in self._chance.choice(((wire.up, wire.down), (wire.up,), (wire.down,))):
                pipe.stall(for_s)
        return wire is not None

    def late_news(self) -> bool:
        """One host: its requests go nowhere, while its messages are later still."""
        crew, site = self._crew(), self._site()
        if crew is None:
            return False
        self._concerns("late_news", crew.host)
        for_s = 0.5 + 4 * self._chance.random()
        self._referee.trouble(for_s + 2.0)
        site.network.cut_off(crew.host, for_s, fate="refused")
        for wire in site.network.live():
            if wire.host is crew.host and site.server.hears(wire.number):
                wire.down.stall(for_s + 0.5 * self._chance.random())
            elif wire.host is crew.host:
                wire.silence(up=True, down=True)
        return True

    def slow(self) -> bool:
        """Everything takes longer for a while."""
        weather = self._site().network.weather
        weather.most_s = self._chance.choice((0.02, 0.3))
        return self._bad_weather("slow", weather)

    def uneven(self) -> bool:
        """Some messages take much longer for a while."""
        weather = self._site().network.weather
        weather.slow_share = 0.2
        return self._bad_weather("uneven", weather)

    def refuse(self) -> bool:
        """New connections are refused for a while, or never answered."""
        weather = self._site().network.weather
        weather.refuses_share, weather.swallows_share = self._chance.choice(((0.8, 0), (0, 0.8)))
        return self._bad_weather("refuse", weather)

    def _bad_weather(self, fault: str, weather: Weather) -> bool:
        for_s = 0.2 + 3 * self._chance.random()
        self._concerns(fault)
        self._referee.trouble(for_s + 2.0)
        self._world.after(for_s, weather.clear)
        return True

    # The server.

    def pause_server(self) -> bool:
        for_s = self._chance.choice((0.1, 1.0, 4.0)) * self._chance.random()
        self._concerns("pause_server")
        self._referee.trouble(for_s + 2.0)
        self._site().server.pause(for_s)
        return True

    def refusals(self) -> bool:
        """For a while it answers each script with an error that a server in trouble has."""
        for_s = 0.05 + self._chance.choice((0.2, 2.0)) * self._chance.random()
        self._concerns("refusals")
        self._referee.trouble(for_s + 2.0)
        site = self._site()
        site.server.refusal = self._chance.choice(_REFUSALS)
        self._world.after(for_s, self._accept, site)
        return True

    def _accept(self, site: Site) -> None:
        site.server.refusal = None

    def crash(self) -> bool:
        """It comes back with all of its keys."""
        site = self._site()
        return self._crash("crash", site, site.server.model.dump, loses=False)

    def crash_empty(self) -> bool:
        """It comes back with nothing."""
        return self._crash("crash_empty", self._site(), dict, loses=True)

    def failover(self) -> bool:
        """What takes its place has the keys of a moment ago, without the last writes."""
        site = self._site()
        self._older = site.server.model.dump()
        self._world.after(0.5 * self._chance.random(), self._promote, site)
        return site.server.is_up

    def _promote(self, site: Site) -> None:
        older = self._older
        self._crash("failover", site, lambda: older, loses=True)

    def _crash(
        self, fault: str, site: Site, kept: Callable[[], Mapping[bytes, Kept]], *, loses: bool
    ) -> bool:
        if not site.server.is_up or self._is_over:
            return False
        for_s = self._down_s(loses=loses)
        self._concerns(fault)
        self._referee.trouble(for_s + 5.0)
        site.server.crash(tells=self._chance.random() < 0.7)
        site.server.resume()
        self._world.after(for_s, self._start, site, kept(), loses)
        return True

    def _down_s(self, *, loses: bool) -> float:
        """How long a server stays away after a crash."""
        return 0.05 + self._chance.choice((0.1, 3.0)) * self._chance.random()

    def _start(self, site: Site, kept: Mapping[bytes, Kept], loses: bool) -> None:
        if loses:
            site.scripts.keys_went(None)
        site.server.start(kept)
        site.scripts.restored()

    def script_flush(self) -> bool:
        """Again and again for a while: which scripts are known changes within a request."""
        self._concerns("script_flush")
        site = self._site()
        for n in range(20):
            self._world.after(n * 0.1 * self._chance.random(), site.server.forget_scripts)
        return True

    def client_kill(self) -> bool:
        site = self._site()
        wire = self._wire("client_kill", site)
        if wire is not None:
            self._referee.trouble(1.0)
            site.server.disconnect(wire.number)
        return wire is not None

    def evict(self) -> bool:
        """A side key goes; rarely the lock itself, which breaks it."""
        suffix = self._chance.choices(_SUFFIXES, (4, 4, 4, 1))[0]
        return self._remove("evict", f"{PREFIX}{{{self._chance.choice(self._names)}}}{suffix}")

    def _remove(self, fault: str, key: str) -> bool:
        site = self._site()
        if not site.server.model.delete(key.encode()):
            return False
        self._concerns(fault)
        self._referee.trouble(7.0)
        site.scripts.keys_went(key)
        return True

    def flushall(self) -> bool:
        self._concerns("flushall")
        self._referee.trouble(7.0)
        site = self._site()
        site.server.model.flushall()
        site.scripts.keys_went(None)
        return True

    def step(self) -> bool:
        """Its wall clock is set, forward or back."""
        by_s = self._chance.choice((-20.0, -1.0, 1.0, 20.0)) * self._chance.random()
        self._concerns("step")
        self._referee.trouble(self._ttl_s + 20.0)
        site = self._site()
        site.scripts.clock_steps(by_s)
        site.server.stepped_us += int(by_s * 1e6)
        return True

    # Hosts.

    def _crew(self) -> Crew | None:
        alive = [crew for crew in self._crews if not crew.is_over]
        return self._chance.choice(alive) if alive else None

    def stop_host(self) -> bool:
        """For less than a ttl, or for more."""
        return self._stop("stop_host", suspend=False)

    def suspend_host(self) -> bool:
        return self._stop("suspend_host", suspend=True)

    def _stop(self, fault: str, *, suspend: bool) -> bool:
        crew = self._crew()
        if crew is None or crew.host.stopped_until > self._world.now:
            return False
        for_s = self._chance.choice((0.1, 0.5, 1.5)) * self._ttl_s * self._chance.random()
        self._concerns(fault, crew.host)
        self._referee.trouble(for_s + 1.0)
        crew.host.stop(for_s, suspend=suspend)
        return True

    def kill_host(self) -> bool:
        crew = self._crew()
        if crew is None:
            return False
        self._concerns("kill_host", crew.host)
        self._referee.trouble(1.0)
        crew.die()
        crew.host.kill()
        for site in self._sites:
            for wire in site.network.live():
                if wire.host is crew.host:
                    self._close_dead(wire)
        return True

    def _close_dead(self, wire: Wire) -> None:
        wire.down.die()
        # The kernel closes its sockets, unless the whole machine went.
        if self._chance.random() < 0.5:
            wire.up.send(None)
        else:
            wire.up.die()


FAULTS: Final[dict[str, Callable[[Chaos], bool]]] = {
    fault.__name__: fault
    for fault in (
        Chaos.cut,
        Chaos.silence,
        Chaos.stall,
        Chaos.late_news,
        Chaos.slow,
        Chaos.uneven,
        Chaos.refuse,
        Chaos.pause_server,
        Chaos.refusals,
        Chaos.crash,
        Chaos.crash_empty,
        Chaos.failover,
        Chaos.script_flush,
        Chaos.client_kill,
        Chaos.evict,
        Chaos.flushall,
        Chaos.step,
        Chaos.stop_host,
        Chaos.suspend_host,
        Chaos.kill_host,
    )
}
