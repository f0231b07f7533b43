"""Readers, writers and permits of whole clients, simulated by seed: who was inside when.

The world, its faults and its hosts are those of `one`; what is held against the history is the rule
of entry. The server keeps what it knows here, and its clock does not step, so that nothing excuses
two holders who exclude each other.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from redis.asyncio import Redis
from redis.maint_notifications import MaintNotificationsConfig

from aiodlock import Lease, LockClient, LockError
from tests.shared_model import SharedModel
from tests.simulation.acts import PREFIX
from tests.simulation.chaos import FAULTS, Chaos
from tests.simulation.history import History
from tests.simulation.network import Network, Weather
from tests.simulation.referee import Referee
from tests.simulation.scripts import ScriptReferee
from tests.simulation.server import SimulatedServer
from tests.simulation.site import ONLY, Site
from tests.simulation.users import Crew
from tests.simulation.virtual import under_seed
from tests.simulation.world import RATE_SHARE, Clock, Endless, Host, World

# What loses keys, or moves the server's clock, breaks any lock.
EXCUSES: Final = ("crash_empty", "failover", "evict", "flushall", "step")
KINDS: Final = sorted(set(FAULTS) - set(EXCUSES))
_GRAIN_S: Final = 1e-6
_ACTS_MAX: Final = 12
_AFTER_S: Final = 400.0


@dataclass(eq=False)
class Stay:
    """Somebody inside, as long as he may believe in it; in true time.

    Attributes:
        limit: How many holders he bears, himself included.
    """

    host: Host
    lease: Lease
    limit: float
    fencing_token: int
    since: float
    until: float = math.inf

    def end(self) -> None:
        """Now, or at its deadline if that was before."""
        self.until = min(self.until, self.host.world.now, self.host.true(self.lease.deadline))


def intruders(stays: list[Stay]) -> Iterator[tuple[Stay, int]]:
    """Those at whose entry more were inside than any of them bears; with how many."""
    inside: list[Stay] = []
    for stay in sorted(stays, key=lambda stay: stay.since):
        inside = [other for other in inside if other.until > stay.since + _GRAIN_S]
        if stay.until > stay.since + _GRAIN_S:
            inside.append(stay)
            if len(inside) > min(other.limit for other in inside):
                yield stay, len(inside)


class _Watcher:
    """What chaos asks of a referee, as far as it has a part here."""

    def __init__(self, crews: list[SharedCrew]) -> None:
        self._crews = crews

    def concerned(self) -> list[Host]:
        """Those who hold or wait, roughly."""
        return [crew.host for crew in self._crews if not crew.is_over]

    def trouble(self, for_s: float) -> None:
        """Nobody asks here whether times are good."""

    def restored(self) -> None:
        """With all of its keys."""


class SharedCrew:
    """The process on one host: a client, with tasks that read and write, or take permits."""

    def __init__(
        self,
        host: Host,
        chance: random.Random,
        *,
        permits: int | None,
        tasks: int,
        ttl_s: float,
        until_s: float,
    ) -> None:
        self.host = host
        self.is_over = False
        self.stays: list[Stay] = []
        self.outcomes: Counter[str] = Counter()
        self._permits = permits
        self._chances = [random.Random(chance.random()) for _ in range(tasks)]
        self._ttl_s = ttl_s
        self._until_s = until_s
        host.loop.call_soon(self._start)

    def die(self) -> None:
        """Its host was killed: what it believed in ends now."""
        self.is_over = True
        for stay in self.stays:
            stay.end()

    def _start(self) -> None:
        self._main = self.host.loop.create_task(self._run(), name="crew")
        self._main.add_done_callback(self._ended)

    def _ended(self, main: asyncio.Task[None]) -> None:
        if not main.cancelled() and (error := main.exception()) and not self.is_over:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.host.world.breach("error", f"{error!r} in {where.name}:{where.lineno}")
        self.is_over = True

    async def _run(self) -> None:
        redis = Redis(
            host="server",
            port=1,
            protocol=2,
            driver_info=None,
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
        )
        client = LockClient(redis, prefix=PREFIX, ttl=self._ttl_s, label=self.host.name)
        async with client:
            users = [asyncio.create_task(self._use(client, chance)) for chance in self._chances]
            await asyncio.wait(users)
            for user in users:
                user.result()
        await redis.aclose()

    async def _use(self, client: LockClient, chance: random.Random) -> None:
        await asyncio.sleep(chance.random() * 0.5)
        for _ in range(_ACTS_MAX):
            if self.host.world.now >= self._until_s:
                break
            acting = asyncio.create_task(self._act(client, chance))
            if chance.random() < 0.2:
                self.host.loop.call_later(chance.random() * 0.5, acting.cancel)
            await asyncio.wait((acting,))
            outcome = "cancelled" if acting.cancelled() else acting.result()
            self.outcomes[outcome] += 1
            self.host.world.note("outcome", self.host.name, outcome)
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.2)) * chance.random())

    async def _act(self, client: LockClient, chance: random.Random) -> str:
        is_writer = chance.random() < 0.4
        wait_timeout = chance.choice((0.0, 0.5, 5.0, 60.0))
        if self._permits is not None:
            lock: Any = client.semaphore("a", permits=self._permits)
            limit: float = self._permits
        else:
            lock = client.writer("a") if is_writer else client.reader("a")
            limit = 1 if is_writer else math.inf
        try:
            async with lock.acquire(wait_timeout=wait_timeout) as lease:
                await self._stay(lease, limit, chance)
        except LockError as error:
            return type(error).__name__
        return "got"

    async def _stay(self, lease: Lease, limit: float, chance: random.Random) -> None:
        self._enter(lease, limit)
        try:
            await asyncio.sleep(chance.choice((0.01, 0.3, 1.0)) * chance.random())
            if limit == 1 and self._permits is None and chance.random() < 0.5:
                self._leave(lease)
                self._enter(lease, math.inf)
                await lease.downgrade()
                self.outcomes["downgraded"] += 1
                await asyncio.sleep(0.3 * chance.random())
        finally:
            self._leave(lease)

    def _enter(self, lease: Lease, limit: float) -> None:
        now = self.host.world.now
        self.stays.append(Stay(self.host, lease, limit, lease.fencing_token, now))

    def _leave(self, lease: Lease) -> None:
        for stay in self.stays:
            if stay.lease is lease and stay.until == math.inf:
                stay.end()


@dataclass
class SharedVerdict:
    """What came of one seed."""

    seed: int
    breaches: list[str]
    outcomes: Counter[str]
    most_inside: int


class SharedSimulation:
    """The world of one seed."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, History())
        chance = random.Random(f"shared {seed}")
        self._until_s = 2 + 4 * chance.random()
        self._ttl_s = chance.choice((0.1, 0.3, 1.0, 3.0, 10.0))
        self._faults = chance.sample(KINDS, chance.randint(0, 6))
        self._mean_pause_s = chance.choice((0.3, 1.0, 2.0))
        weather = Weather(random.Random(f"weather {seed}"))
        self.server = SimulatedServer(self.world, rate=self._rate(chance))
        self.server.model = SharedModel(self.server.wall_us, self.server._publish)
        self.server.on_script = lambda *_: None
        self.network = Network(self.world, self.server, weather)
        self._are_readers = chance.random() < 0.6
        self.crews = [self._crew(n, chance) for n in range(chance.randint(2, 4))]
        watcher = _Watcher(self.crews)
        self.chaos = Chaos(
            self.world,
            [Site(ONLY, self.server, self.network, cast(ScriptReferee, watcher))],
            cast(Referee, watcher),
            cast("list[Crew]", self.crews),
            names=("a",),
            ttl_s=self._ttl_s,
        )

    def run(self) -> None:
        """Trouble, then calm; the rule of entry held all the time, and nothing is left."""
        self.chaos.plan(self._faults, until_s=self._until_s, mean_pause_s=self._mean_pause_s)
        self.world.run(until=self._until_s)
        most_s = 120 + 12 * (6 * self._ttl_s + 10)
        is_over = self.world.run(
            until=self._until_s + most_s,
            is_over=lambda: all(crew.is_over for crew in self.crews),
        )
        if not is_over:
            self.world.breach("end", "hung")
            return
        for stay, count in intruders(self.stays):
            self.world.breach("entry", f"{count} inside, {stay.host.name} bears {stay.limit:g}")
        tokens = Counter((stay.fencing_token, stay.lease.owner_token) for stay in self.stays)
        if len({fencing_token for fencing_token, _ in tokens}) != len(tokens):
            self.world.breach("fencing", "two grants have one number")
        self.world.run(until=self.world.now + _AFTER_S)
        for key in self.server.model.dump():
            if not key.endswith(b":fence"):
                self.world.breach("left", f"{key.decode()} after {_AFTER_S:g} s")

    @property
    def stays(self) -> list[Stay]:
        """Of all hosts."""
        return [stay for crew in self.crews for stay in crew.stays]

    def check_garbage(self, ignored: list[str]) -> None:
        """What is destroyed is destroyed in silence."""
        gc.collect()
        for crew in self.crews:
            for error in crew.host.errors:
                if not crew.host.is_dead:
                    self.world.breach("error", f"{crew.host.name}: {error}")
        for what in ignored:
            self.world.breach("ignored", what)

    def leave(self) -> None:
        """Destroy what is left."""
        for crew in self.crews:
            for task in asyncio.all_tasks(crew.host.loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            crew.host.loop.leave()

    def _rate(self, chance: random.Random) -> float:
        return 1 + RATE_SHARE * chance.uniform(-1, 1)

    def _crew(self, n: int, chance: random.Random) -> SharedCrew:
        clock = Clock(offset_s=chance.random() * 1e6, rate=self._rate(chance))
        host = Host(self.world, f"h{n}", clock)
        host.connect = lambda make, _: self.network.connect(host, make)
        self.world.hosts.append(host)
        return SharedCrew(
            host,
            random.Random(chance.random()),
            permits=None if self._are_readers else chance.choice((2, 2, 3)),
            tasks=chance.randint(1, 4),
            ttl_s=self._ttl_s,
            until_s=self._until_s,
        )


def simulate_shared(seed: int) -> SharedVerdict:
    """The verdict on one seed; the same in every process."""
    with under_seed(seed) as ignored:
        simulation = SharedSimulation(seed)
        try:
            simulation.run()
        except Endless as error:
            simulation.world.breach("end", str(error))
        except Exception:  # Of the world, or of a rule put out.
            simulation.world.breach("error", traceback.format_exc(limit=-3))
        simulation.check_garbage(ignored)
        breaches = simulation.world.history.breaches
        outcomes = sum((crew.outcomes for crew in simulation.crews), Counter[str]())
        verdict = SharedVerdict(seed, breaches, outcomes, _most(simulation.stays))
        simulation.leave()
        del simulation
        gc.collect()
    return verdict


def _most(stays: list[Stay]) -> int:
    """How many were inside at once, at most."""
    most, inside = 0, list[Stay]()
    for stay in sorted(stays, key=lambda stay: stay.since):
        inside = [other for other in inside if other.until > stay.since] + [stay]
        most = max(most, len(inside))
    return most
