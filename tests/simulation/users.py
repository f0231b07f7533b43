"""The process on one host: a client with tasks that lock."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from redis.asyncio import Redis
from redis.maint_notifications import MaintNotificationsConfig

from aiodlock import Lease, LockClient, Observer
from tests.simulation.acts import PREFIX, Act, Choice, Options
from tests.simulation.referee import Belief, Referee
from tests.simulation.world import Host

# Of one task: more only take longer.
_ACTS_MAX: Final = 15

OBSERVER: Observer | None = None
"""Of every client, where a test wants to listen."""


class Crew:
    """The process on one host: a client, with tasks that use it."""

    def __init__(
        self,
        host: Host,
        referee: Referee,
        options: Options,
        chance: random.Random,
        *,
        tasks: int,
        closes_at: float | None,
    ) -> None:
        self.host = host
        self.referee = referee
        self.options = options
        self.is_closing = False
        self.is_over = False
        self.open: dict[Belief, Lease] = {}
        self.shared: dict[str, Choice] = {}
        self.client: LockClient
        self._closes_at = closes_at
        self._chances = [random.Random(chance.random()) for _ in range(tasks)]
        host.loop.call_soon(self._start)

    def die(self) -> None:
        """Its host was killed: what it believed in ends now."""
        self.is_over = True
        for belief, lease in self.open.items():
            self.referee.end_belief(belief, lease.deadline)
        self.referee.forget(self.host)

    def note(self, kind: str, *details: object) -> None:
        """Write it into the history; what is destroyed after the end does not count."""
        if not self.is_over:
            self.host.world.note(kind, self.host.name, *details)

    def _start(self) -> None:
        self._main = self.host.loop.create_task(self._run(), name="crew")
        self._main.add_done_callback(self._ended)

    def _ended(self, main: asyncio.Task[None]) -> None:
        self.note("end")
        if not main.cancelled() and (error := main.exception()) and not self.is_over:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.host.world.breach("error", f"{error!r} in {where.name}:{where.lineno}")
        self.is_over = True

    async def _run(self) -> None:
        """One session; two where the client is closed in the middle, and entered again."""
        servers = [redis_of(node, self.options) for node in self.options.nodes]
        self.client = client_of(servers, self.options, label=self.host.name)
        await self._session(self._closes_at)
        if self._closes_at is not None:
            await self._session(None)
        for server in servers:
            await server.aclose()

    async def _session(self, closes_at: float | None) -> None:
        self.is_closing = False
        self.shared.clear()
        async with self.client:
            users = [asyncio.create_task(self._use(chance)) for chance in self._chances]
            closes_in = None
            if closes_at is not None:
                closes_in = max(0.0, closes_at - self.host.world.now)
            await asyncio.wait(users, timeout=closes_in)
            self.is_closing = True
            self.note("close")
            self._end_loose_beliefs()
        await asyncio.wait(users)
        for user in users:
            user.result()

    def _end_loose_beliefs(self) -> None:
        """A client that closes releases leases that no block holds."""
        for belief, lease in self.open.items():
            if not belief.has_block:
                self.referee.end_belief(belief, lease.deadline)
                self.referee.ended(self.host, belief.name, belief.asked_at, is_excused=True)

    async def _use(self, chance: random.Random) -> None:
        await asyncio.sleep(chance.random() * 0.5)
        for _ in range(_ACTS_MAX):
            if self.host.world.now >= self.options.until_s or self.is_closing:
                break
            task = asyncio.create_task(Act(self, chance).run())
            await asyncio.wait((task,))
            if not task.cancelled():
                task.result()
            await asyncio.sleep(chance.choice((0.0, 0.001, 0.2)) * chance.random())


def redis_of(node: str, options: Options) -> Redis:
    """A client of redis-py for the server of that name."""
    return Redis(
        host=node,
        port=1,
        protocol=options.protocol,
        driver_info=None,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),
    )


def client_of(servers: Sequence[Redis], options: Options, *, label: str) -> LockClient:
    """Over the one server; over a quorum if there are more."""
    make: Callable[..., LockClient]
    if len(servers) == 1:
        make = partial(LockClient, servers[0])
    else:
        make = partial(LockClient.quorum, servers, fencing=options.fencing)
    return make(
        prefix=PREFIX,
        ttl=options.ttl_s,
        request_timeout=options.request_timeout_s,
        label=label,
        observer=OBSERVER,
    )
