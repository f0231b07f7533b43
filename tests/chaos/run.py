"""Runs one plan: servers, workers, faults until each has struck somebody, calm, the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiodlock.testing import LockServer, lock_server
from tests import crowd, topologies
from tests.chaos.crew import FINISH_LIMIT_S, READY_LIMIT_S, TASKS, Crew
from tests.chaos.faults import Field, Kind, Struck, inject
from tests.chaos.journal import Diary, now_ns
from tests.chaos.order import Servers
from tests.chaos.plans import Plan
from tests.chaos.resource import Resource
from tests.chaos.verdict import SLACK_S, WITHIN_S, Run, Verdict, judge
from tests.chaos.worker import is_patient
from tests.keys import leftovers, ttls
from tests.proxy import ChaosProxy

WORKERS = 3
BETWEEN_S = (0.1, 0.5)
SETTLE_LIMIT_S = 20.0
# The queue's life; a tombstone's is 60 s, too long to wait for.
LIFE_S = 12.0
TOMBSTONE_S = 60.0
FENCE_S = 86_400.0
PROVE_LIMIT_S = 40.0
"""For how long after its time a plan goes on that has not proved yet what it is to prove."""


@dataclass(frozen=True)
class Count:
    """How often one kind of fault was injected, and hit somebody."""

    kind: Kind
    injected: int
    hit_holder: int
    hit_waiter: int
    losses: int

    @property
    def is_proved(self) -> bool:
        """Whether it struck those whom it was to strike."""
        hits = self.hit_holder if self.kind.needs_holder else self.hit_holder + self.hit_waiter
        return hits > 0 and (self.losses > 0 or not self.kind.needs_loss)


@dataclass(frozen=True)
class Outcome:
    """What is to be told of a run of one plan."""

    plan: Plan
    seed: int
    seconds: float
    counts: list[Count]
    verdict: Verdict
    struck: list[Struck]

    @property
    def problems(self) -> list[str]:
        """What is wrong; a fault that struck nobody proves nothing."""
        unproved = [count.kind.name for count in self.counts if not count.is_proved]
        return [
            *self.verdict.faults,
            *(f"not proved: {name} hit nobody whom it was to hit" for name in unproved),
        ]


async def run_plan(
    plan: Plan,
    *,
    seed: int,
    seconds: float,
    lock: str = "aiodlock",
    folder: Path | None = None,
    workers: int = WORKERS,
    until: Callable[[Path], bool] = lambda _: True,
    settles: bool = True,
) -> Outcome:
    """Run *plan* with faults for *seconds*, and longer where that has not proved all.

    It ends once each fault has struck somebody, and *until* has seen enough in the folder with the
    journals. They stay in *folder*, if there is one. Without *settles* nobody waits to see that all
    ends well, which a naive lock does not.
    """
    limit_s = seconds + PROVE_LIMIT_S + READY_LIMIT_S + SETTLE_LIMIT_S + FINISH_LIMIT_S + 60
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiodlock-")))
        folder.mkdir(parents=True, exist_ok=True)
        make_crew = functools.partial(
            Crew, lock=lock, name=crowd.NAME, seed=seed, workers=workers, folder=folder
        )
        async with asyncio.timeout(limit_s), _field(plan, seed, make_crew) as field:
            seen = functools.partial(until, folder)
            storm = functools.partial(_storm, plan, field, seconds, seen)
            return await _run(plan, field, seed, folder, storm, settles=settles)


async def _run(
    plan: Plan,
    field: Field,
    seed: int,
    folder: Path,
    storm: Callable[[], Awaitable[list[Struck]]],
    *,
    settles: bool,
) -> Outcome:
    began, began_ns = time.monotonic(), now_ns()
    wall_ns = time.time_ns() - began_ns
    struck = await storm()
    await field.crew.ready()
    calm_ns = settled_ns = now_ns()
    field.crew.tell("calm")
    stuck: list[int] = []
    if settles:
        await _settle(field.crew, calm_ns)
        settled_ns = now_ns()
        stuck = await field.crew.finish()
    else:
        field.crew.kill_all()
    run = Run(
        struck=struck,
        diaries=field.crew.diaries,
        resource=Resource(folder / "resource").catch_up(),
        began_ns=began_ns,
        calm_ns=calm_ns,
        settled_ns=settled_ns,
        stuck=stuck,
        wall_ns=wall_ns,
        leftovers=await _leftovers(field) if settles else [],
    )
    took_s = time.monotonic() - began
    return Outcome(plan, seed, took_s, _counts(plan, run), judge(run), struck)


async def _storm(
    plan: Plan, field: Field, seconds: float, until: Callable[[], bool]
) -> list[Struck]:
    """Each kind in turn, in an order of chance; then those that have struck nobody yet."""
    struck: list[Struck] = []
    began = time.monotonic()
    turn: list[Kind] = []
    while (elapsed_s := time.monotonic() - began) < seconds + PROVE_LIMIT_S:
        if elapsed_s >= seconds:
            unproved = _unproved(plan, field, struck)
            if not unproved and until():
                break
            turn = [kind for kind in turn if kind in unproved] or unproved
        if not turn:
            turn = field.chance.sample(plan.kinds, len(plan.kinds))
        if turn:
            struck.append(await inject(turn.pop(), field))
        await asyncio.sleep(field.chance.uniform(*BETWEEN_S))
    return struck


def _unproved(plan: Plan, field: Field, struck: list[Struck]) -> list[Kind]:
    diaries = field.crew.diaries
    counts = (_count(kind, diaries, struck) for kind in plan.kinds)
    return [count.kind for count in counts if not count.is_proved]


def _counts(plan: Plan, run: Run) -> list[Count]:
    return [_count(kind, run.diaries, run.struck) for kind in plan.kinds]


def _count(kind: Kind, diaries: list[Diary], struck: list[Struck]) -> Count:
    ours = [one for one in struck if one.kind is kind]
    stays = [stay for diary in diaries for stay in diary.stays]
    waits = [wait for diary in diaries for wait in diary.waits]
    return Count(
        kind,
        injected=len(ours),
        hit_holder=sum(one.scope.held or any(map(one.hit, stays)) for one in ours),
        hit_waiter=sum(any(map(one.hit, waits)) for one in ours),
        losses=sum(stay.was_lost and any(one.hit(stay) for one in ours) for stay in stays),
    )


async def _settle(crew: Crew, calm_ns: int) -> None:
    """Until each patient task of the living has had its turn, or for long enough."""
    give_up_at = time.monotonic() + SETTLE_LIMIT_S
    at_least_until = time.monotonic() + WITHIN_S / 4
    while time.monotonic() < give_up_at:
        served = {
            (stay.worker, stay.task)
            for diary in crew.diaries
            for stay in diary.stays
            if stay.enter_ns > calm_ns and is_patient(stay.task)
        }
        wanted = sum(is_patient(task) for task in range(TASKS)) * len(crew.living)
        if len(served) >= wanted and time.monotonic() > at_least_until:
            return
        await asyncio.sleep(0.1)


async def _leftovers(field: Field) -> list[str]:
    """What is still there when the last TTL is over, or will be for longer than it may."""
    give_up_at = time.monotonic() + LIFE_S + SLACK_S
    while found := await _left(field):
        if time.monotonic() > give_up_at:
            return found
        await asyncio.sleep(0.1)
    return []


async def _left(field: Field) -> list[str]:
    found: list[str] = []
    for server in await _primaries(field):
        async with topologies.admin(server) as redis:
            found += await leftovers(redis, ignoring_tombstones=True)
            for key, ttl_ms in (await ttls(redis)).items():
                most_s = FENCE_S if key.endswith(":fence") else TOMBSTONE_S
                if not 0 < ttl_ms <= most_s * 1000 and ttl_ms != -2:
                    found.append(f"{key} for {ttl_ms} ms")
    return found


async def _primaries(field: Field) -> list[LockServer]:
    if field.watched is not None:
        return [await field.watched.master()]
    return field.servers


@asynccontextmanager
async def _field(
    plan: Plan, seed: int, make_crew: Callable[[Servers], Crew]
) -> AsyncIterator[Field]:
    """The servers of a plan, and workers that are at it."""
    async with contextlib.AsyncExitStack() as stack:
        proxy = watched = cluster = None
        if plan.where == "server":
            servers = [await stack.enter_async_context(lock_server(*plan.server_args))]
            proxy = await stack.enter_async_context(ChaosProxy(servers[0].port))
            where = Servers(urls=(servers[0].url, proxy.url))
        elif plan.where == "sentinel":
            watched = await stack.enter_async_context(topologies.watched())
            servers = watched.servers
            where = Servers(sentinels=tuple(sentinel.port for sentinel in watched.sentinels))
        else:
            cluster = await stack.enter_async_context(topologies.cluster())
            servers = cluster.nodes
            where = Servers(cluster=tuple(node.port for node in cluster.nodes))
        async with make_crew(where) as crew:
            yield Field(crowd.NAME, crew, random.Random(seed), servers, proxy, watched, cluster)
