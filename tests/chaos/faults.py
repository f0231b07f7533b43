"""What can strike whom: each fault is a coroutine that returns when it is over."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from aiodlock import _names
from aiodlock.cli._history import NS_PER_S
from aiodlock.testing import LockServer
from tests.chaos.crew import TTLS_S, Crew, Worker
from tests.chaos.journal import Stay, Wait, now_ns
from tests.chaos.worker import is_proxied
from tests.proxy import ChaosProxy, Fault
from tests.topologies import HOST, Cluster, Watched, ask, info, slot_of, well

LONG_S = max(TTLS_S) * 1.2
SHORT_S = 0.3
PROXY_LIMIT_S = 1.0
AIMED = 0.7
SIGHT_NS = 2 * NS_PER_S
SIGHT_POLL_S = 0.03
SIGHT_TRIES = 20


@dataclass(frozen=True)
class Scope:
    """Whom a fault concerns.

    Attributes:
        worker: This process alone.
        proxied: Those behind the proxy alone.
        missed: Nobody: it did not come to pass.
        since_ns: When it struck, if it took aim first.
        held: Redis named it as the holder while it was stopped, perhaps before it knew.
    """

    worker: int | None = None
    proxied: bool = False
    missed: bool = False
    since_ns: int = 0
    held: bool = False

    def has(self, one: Stay | Wait) -> bool:
        """Whether it is concerned."""
        if self.missed or (self.proxied and not is_proxied(one.task)):
            return False
        return self.worker is None or self.worker == one.worker


ALL, PROXIED, NOBODY = Scope(), Scope(proxied=True), Scope(missed=True)


@dataclass
class Field:
    """Where faults strike; a plan has some of it."""

    name: str
    crew: Crew
    chance: random.Random
    servers: list[LockServer]
    proxy: ChaosProxy | None = None
    watched: Watched | None = None
    cluster: Cluster | None = None
    keys: _names.Keys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = _names.keys("aiodlock:", self.name)

    @property
    def server(self) -> LockServer:
        """The only one."""
        [server] = self.servers
        return server

    async def value(self) -> str:
        """What stands in the lock's key."""
        return str(await ask(self.server, "GET", self.keys.lock) or "")

    def holder_in(self, value: str, *, proxied: bool = False) -> Worker | None:
        """The living worker whom *value* names; with *proxied*, by its second client only."""
        number, _, client = value.partition(":")[0].removeprefix("w").partition(".")
        if proxied and client != "1":
            return None
        return next((w for w in self.crew.living if str(w.number) == number), None)

    async def holder(self) -> Worker | None:
        """The living worker that holds now."""
        return self.holder_in(await self.value())

    async def sighted(self, *, proxied: bool = False) -> Worker | None:
        """A holder that has been one for a moment already, if one comes."""
        give_up_ns, before = now_ns() + SIGHT_NS, ""
        while now_ns() < give_up_ns:
            value = await self.value()
            worker = self.holder_in(value, proxied=proxied)
            if worker is not None and value == before:
                return worker
            before = value
            await asyncio.sleep(SIGHT_POLL_S)
        return None

    async def stopped_victim(self) -> tuple[Worker, bool]:
        """A holder's worker mostly, else any, stopped; whether it is the holder's."""
        if self.chance.random() < AIMED:
            for _ in range(SIGHT_TRIES):
                if (worker := await self.sighted()) is None:
                    break
                worker.pause()
                if await self.holder() is worker:
                    return worker, True
                worker.resume()
        worker = self.crew.any()
        worker.pause()
        return worker, await self.holder() is worker


Strike = Callable[[Field], Awaitable[Scope]]


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        case: The row of the table in docs/explanation/safety.md that tells what it does.
        needs_holder: It proves something only if it struck a holder; else a waiter will do.
        needs_loss: Only if somebody lost what it held, and had to be told.
    """

    name: str
    strike: Strike
    case: str
    needs_holder: bool = True
    needs_loss: bool = False


@dataclass(frozen=True)
class Struck:
    """A fault that was injected: from when to when."""

    kind: Kind
    begin_ns: int
    end_ns: int
    scope: Scope

    def hit(self, one: Stay | Wait) -> bool:
        """Whether *one* was under way then, and concerned."""
        begin_ns, end_ns = span(one)
        return self.scope.has(one) and begin_ns <= self.end_ns and end_ns >= self.begin_ns


def span(one: Stay | Wait) -> tuple[int, int]:
    """From when to when it lasted."""
    return (one.enter_ns, one.leave_ns) if isinstance(one, Stay) else (one.from_ns, one.to_ns)


async def inject(kind: Kind, field: Field) -> Struck:
    """Have it strike, once all workers are at it: one that starts is neither holder nor waiter."""
    await field.crew.ready()
    begin_ns = now_ns()
    scope = await kind.strike(field)
    return Struck(kind, max(begin_ns, scope.since_ns), now_ns(), scope)


# Workers.


async def kill_worker(field: Field) -> Scope:
    """SIGKILL; another takes its place."""
    worker, held = await field.stopped_victim()
    since_ns = now_ns()
    worker.kill()
    field.crew.start()
    return Scope(worker=worker.number, since_ns=since_ns, held=held)


async def pause_worker(field: Field) -> Scope:
    """SIGSTOP for longer than any ttl."""
    return await _paused(field, LONG_S)


async def pause_worker_briefly(field: Field) -> Scope:
    """SIGSTOP, mostly survived."""
    return await _paused(field, SHORT_S)


async def _paused(field: Field, most_s: float) -> Scope:
    worker, held = await field.stopped_victim()
    since_ns = now_ns()
    await asyncio.sleep(most_s * field.chance.uniform(0.8, 1.0))
    worker.resume()
    return Scope(worker=worker.number, since_ns=since_ns, held=held)


# The server.


async def pause_server(field: Field) -> Scope:
    """SIGSTOP for longer than any ttl."""
    return await _server_paused(field, LONG_S)


async def pause_server_briefly(field: Field) -> Scope:
    """SIGSTOP, mostly survived."""
    return await _server_paused(field, SHORT_S)


async def _server_paused(field: Field, most_s: float) -> Scope:
    await field.sighted()
    since_ns = now_ns()
    field.server.pause()
    try:
        await asyncio.sleep(most_s * field.chance.uniform(0.8, 1.0))
    finally:
        field.server.resume()
    return Scope(since_ns=since_ns)


async def restart_server(field: Field) -> Scope:
    """SIGKILL, and a new one on the same port; with or without memory, as the plan has it."""
    await field.sighted()
    since_ns = now_ns()
    field.server.kill()
    await asyncio.sleep(field.chance.uniform(0, SHORT_S))
    field.server.restart()
    return Scope(since_ns=since_ns)


async def flush_scripts(field: Field) -> Scope:
    """It knows none of our scripts any more."""
    await ask(field.server, "SCRIPT", "FLUSH")
    return ALL


async def kill_connections(field: Field) -> Scope:
    """CLIENT KILL of all connections, or of the inboxes, or of all but those."""
    for kind in field.chance.choice([("NORMAL",), ("PUBSUB",), ("NORMAL", "PUBSUB")]):
        await ask(field.server, "CLIENT", "KILL", "TYPE", kind)
    return ALL


async def flush_all(field: Field) -> Scope:
    """Every key is gone."""
    await ask(field.server, "FLUSHALL")
    return ALL


async def delete_keys(field: Field) -> Scope:
    """Some of the name's keys are gone, the lock's among them."""
    others = [field.keys.fence, field.keys.queue, field.keys.alive]
    side = field.chance.sample(others, field.chance.randrange(4))
    return ALL if await ask(field.server, "DEL", field.keys.lock, *side) else NOBODY


async def evict(field: Field) -> Scope:
    """The server has no memory left, and throws out what was not used lately."""
    before = await _evicted(field)
    await ask(field.server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", 1)
    for _ in range(200):
        if not await ask(field.server, "EXISTS", field.keys.lock):
            break
    await ask(field.server, "CONFIG", "SET", "maxmemory", 0)
    return ALL if await _evicted(field) > before else NOBODY


async def _evicted(field: Field) -> int:
    return int((await info(field.server, "stats"))["evicted_keys"])


# The way between, behind the proxy.


async def reset_links(field: Field) -> Scope:
    """RST on all connections, or on those of one kind."""
    proxy = _proxy(field)
    only = field.chance.choice([None, "commands", "inbox"])
    return PROXIED if proxy.kill_connections(only) else NOBODY  # type: ignore[arg-type]


async def lose_replies(field: Field) -> Scope:
    """The server has done it; the connection dies before anybody is told."""
    fault = _proxy(field).drop_replies(field.chance.randint(1, 3), b"EVALSHA", close=True)
    return await _used(field, fault)


async def delay_replies(field: Field) -> Scope:
    """Late by up to longer than a request may take."""
    seconds = field.chance.uniform(0.1, 1.2)
    return await _used(field, _proxy(field).delay_replies(seconds, b"EVALSHA", n=3), seconds)


async def delay_requests(field: Field) -> Scope:
    """The server does them late, also for those who have given up since."""
    seconds = field.chance.uniform(0.1, 1.2)
    return await _used(field, _proxy(field).delay_requests(seconds, b"EVALSHA", n=3), seconds)


async def lose_messages(field: Field) -> Scope:
    """Hand-offs that nobody hears of."""
    return await _used(field, _proxy(field).drop_messages(3))


async def delay_messages(field: Field) -> Scope:
    """Hand-offs heard of too late to be believed."""
    seconds = field.chance.uniform(0.1, 1.2)
    return await _used(field, _proxy(field).delay_messages(seconds, n=3), seconds)


async def half_open_inboxes(field: Field) -> Scope:
    """Inboxes that hear nothing, and do not know it."""
    return PROXIED if _proxy(field).half_open_inboxes() else NOBODY


async def black_hole(field: Field) -> Scope:
    """Nothing gets through for longer than some ttls; then it is lost, or all comes at once."""
    proxy = _proxy(field)
    await field.sighted(proxied=True)
    since_ns = now_ns()
    proxy.black_hole()
    try:
        await asyncio.sleep(LONG_S * field.chance.uniform(0.2, 1.0))
    finally:
        proxy.heal(deliver=field.chance.random() < 0.5)
    return Scope(proxied=True, since_ns=since_ns)


def _proxy(field: Field) -> ChaosProxy:
    assert field.proxy is not None, "this plan has no proxy"
    return field.proxy


async def _used(field: Field, fault: Fault, seconds: float = 0.0) -> Scope:
    """Once it has struck as often as it is to, or for long enough; then it is over."""
    try:
        async with asyncio.timeout(PROXY_LIMIT_S):
            await fault.used.wait()
    except TimeoutError:
        pass
    if fault.hits:
        await asyncio.sleep(seconds)
    _proxy(field).heal()
    return PROXIED if fault.hits else NOBODY


# A master with its replica.


async def fail_over(field: Field) -> Scope:
    """The Sentinels swap the two, both well."""
    watched = _watched(field)
    master = await watched.master()
    await watched.fail_over()
    await watched.moved_from(master)
    await well(functools.partial(_trouble, watched))
    return ALL


async def fail_over_without_copy(field: Field) -> Scope:
    """The replica has heard nothing for a moment when the master dies or hangs."""
    watched = _watched(field)
    master, replica = await watched.master(), await watched.replica()
    await ask(replica, "REPLICAOF", HOST, 1)
    await asyncio.sleep(SHORT_S)
    hangs = field.chance.random() < 0.5
    if hangs:
        master.pause()
    else:
        master.kill()
    await watched.moved_from(master)
    if hangs:
        master.resume()
    else:
        master.restart()
    # The Sentinels would do this too, after ten seconds.
    await ask(master, "REPLICAOF", HOST, replica.port)
    await well(functools.partial(_trouble, watched))
    return ALL


async def _trouble(watched: Watched) -> str:
    """What keeps them from being well; a server that has just changed sides hangs up."""
    try:
        return await watched.trouble()
    except (RedisError, OSError) as error:
        return repr(error)


def _watched(field: Field) -> Watched:
    assert field.watched is not None, "this plan has no Sentinels"
    return field.watched


# A cluster.


async def move_slot(field: Field) -> Scope:
    """The name's slot goes to another primary, in steps with work between them."""
    assert field.cluster is not None, "this plan has no cluster"
    cluster, slot = field.cluster, slot_of(field.name)
    source = await cluster.owner(slot)
    target = field.chance.choice([node for node in cluster.nodes if node is not source])
    await cluster.begin_move(slot, source, target)
    await asyncio.sleep(field.chance.uniform(0, SHORT_S))
    await cluster.move_keys(slot, source, target)
    await asyncio.sleep(field.chance.uniform(0, SHORT_S))
    await cluster.end_move(slot, source, target)
    return ALL
