"""What a task does with locks: every way in, every way out, drawn by lot."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import anyio

from aiodlock import (
    Backoff,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockTimeout,
    ServerUnreachable,
)
from tests.simulation.referee import Asking, Belief, Referee
from tests.simulation.scripts import short
from tests.simulation.site import ONLY
from tests.simulation.world import Host

PREFIX: Final = "aiodlock:"
# What a client that closes under us may say.
_CLOSED: Final = re.compile("closed|was released")


@dataclass(frozen=True)
class Options:
    """What the tasks of one simulation are like."""

    names: tuple[str, ...]
    ttl_s: float
    request_timeout_s: float
    cancel_share: float
    retry_share: float
    auto_extend_share: float
    hold_s: float
    breaks: int  # How often somebody breaks a lock: its share of about 20.
    protocol: int
    until_s: float  # No act begins later.
    nodes: tuple[str, ...] = (ONLY,)  # More than one: a quorum.
    fencing: bool = True
    extends_wildly: bool = False  # Beyond the lock's own ttl; while it is being released.

    @property
    def ttl_most_s(self) -> float:
        return self.ttl_s * 2


class Process(Protocol):
    """Whose acts they are."""

    host: Host
    referee: Referee
    options: Options
    client: LockClient
    is_closing: bool
    is_over: bool
    open: dict[Belief, Lease]
    shared: dict[str, Choice]

    def note(self, kind: str, *details: object) -> None: ...


@dataclass
class Choice:
    """A lock, with what was drawn for it."""

    name: str
    lock: Lock
    ttl_s: float
    wait_timeout: float | None
    tells_body: bool
    has_max_hold: bool
    polls: bool
    extends: bool

    @property
    def key(self) -> str:
        return f"{PREFIX}{{{self.name}}}"

    @classmethod
    def of(cls, process: Process, chance: random.Random, *, is_nested: bool) -> Choice:
        """One by lot; *is_nested*: of a holder, who must not wait for another for long."""
        options = process.options
        name = chance.choice(options.names)
        ttl_s = options.ttl_s * chance.choice((1.0, 1.0, 0.5, 2.0))
        long_s = (0.0, 0.3) if is_nested else (None, None, 0.0, 0.05, 1.0, 5.0, 20.0)
        wait_timeout = chance.choice(long_s)
        lot = chance.random()
        tells_body = lot < 0.8
        max_hold = ttl_s * (1 + chance.random() * 3) if chance.random() < 0.1 else None
        extends = chance.random() < options.auto_extend_share
        retry = Backoff() if chance.random() < options.retry_share else None
        lock = process.client.lock(
            name,
            ttl=ttl_s,
            wait_timeout=wait_timeout,
            auto_extend=extends,
            retry=retry,
            on_lost="cancel" if tells_body else "raise",
            max_hold=max_hold,
            hold_at_least=ttl_s * (0.1 + 5 * lot) if lot < 0.1 else None,
        )
        return cls(
            name,
            lock,
            ttl_s,
            wait_timeout,
            tells_body,
            has_max_hold=max_hold is not None,
            polls=retry is not None,
            extends=extends,
        )


class Act:
    """One acquisition with what follows, or a look, or a blow; it may be cut off at any moment."""

    def __init__(self, process: Process, chance: random.Random, *, is_nested: bool = False) -> None:
        self._process = process
        self._host = process.host
        self._referee = process.referee
        self._chance = chance
        self._is_nested = is_nested
        self._has_nested = False
        self._choice = Choice.of(process, chance, is_nested=is_nested)
        self._asking: Asking | None = None
        self._belief: Belief | None = None
        self._lease: Lease | None = None
        self._asked_at_deadline = math.inf
        self._late: asyncio.Task[None] | None = None  # Kept, as asyncio does not.

    async def run(self) -> None:
        """To its end, which must be one of those that are allowed."""
        ways: tuple[tuple[Callable[[], Awaitable[None]], int], ...] = (
            (self._block, 8),
            (self._shared_block, 4),
            (self._by_hand, 6),
            (self._throw_away, 1),
            (self._inspect, 1),
            (self._break, self._process.options.breaks),
        )
        way = self._chance.choices([w for w, _ in ways], [share for _, share in ways])[0]
        outcome = "done"
        try:
            await self._limited(way)
        except (LockTimeout, ServerUnreachable, TimeoutError) as error:
            outcome = type(error).__name__
            if isinstance(error, ServerUnreachable) and self._asking is not None:
                self._referee.unreachable(self._asking)
        except LeaseLostError as error:
            outcome = error.reason.name
            self._judge_loss(outcome)
        except RuntimeError as error:
            if not (self._process.is_closing and _CLOSED.search(str(error))):
                raise
            outcome = "closed"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._end_ask(outcome)
            self._process.note("act", self._choice.name, way.__name__, outcome)
            self._host.world.history.counts[f"outcome {outcome}"] += 1

    async def _limited(self, way: Callable[[], Awaitable[None]]) -> None:
        """By a cancel, a timeout or a scope, at some moment; or not."""
        if self._chance.random() >= self._process.options.cancel_share:
            return await way()
        pause_s = self._chance.choice((0.002, 0.02, 0.5, 3.0)) * self._chance.random()
        kind = self._chance.choice(("cancel", "timeout", "scope"))
        task = asyncio.current_task()
        assert task is not None
        timer = self._host.loop.call_later(pause_s, self._cut, task if kind == "cancel" else None)
        try:
            if kind == "scope":
                with anyio.move_on_after(pause_s):
                    await way()
            else:
                async with asyncio.timeout(pause_s if kind == "timeout" else None):
                    await way()
        finally:
            timer.cancel()

    def _cut(self, task: asyncio.Task[None] | None) -> None:
        self._process.note("cut off", self._choice.name)
        if self._asking is not None:
            self._asking.cancelled_at = self._host.world.now
        if task is not None:
            task.cancel()

    # The ways.

    async def _block(self) -> None:
        self._ask(self._choice.wait_timeout)
        async with self._choice.lock.acquire() as lease:
            await self._body(lease)

    async def _shared_block(self) -> None:
        """By a lock that all tasks of the process share."""
        if not self._is_nested:
            self._choice = self._process.shared.setdefault(self._choice.name, self._choice)
        self._ask(self._choice.wait_timeout)
        async with self._choice.lock as lease:
            await self._body(lease)

    async def _by_hand(self) -> None:
        wait_timeout = self._chance.choice((0.0, 0.0, 0.3, self._choice.wait_timeout))
        self._ask(wait_timeout)
        lease = await self._choice.lock.try_acquire(wait_timeout=wait_timeout)
        if lease is None:
            self._end_ask("None")
        else:
            try:
                await self._body(lease, has_block=False)
            finally:
                await lease.release()

    async def _throw_away(self) -> None:
        """A lease that nobody releases: its ttl must free it."""
        self._ask(0.0)
        lease = await self._choice.lock.try_acquire()
        if lease is not None:
            self._got(lease, has_block=False)
            self._end_belief(was_dropped=True)
            self._lease = None

    async def _inspect(self) -> None:
        await self._choice.lock.inspect()

    async def _break(self) -> None:
        self._referee.will_break(self._choice.key)
        await self._choice.lock.break_lock()

    async def _body(self, lease: Lease, *, has_block: bool = True) -> None:
        """Hold it for a while, as users do; what comes after its end is no work under the lock."""
        self._got(lease, has_block=has_block)
        try:
            for _ in range(self._chance.randint(1, 3)):
                await asyncio.sleep(self._chance.random() * self._hold_s())
                await self._use(lease)
            if self._process.options.extends_wildly and self._chance.random() < 0.1:
                self._late = asyncio.create_task(self._extend_late(lease))
                await asyncio.sleep(0)
        finally:
            tells_body = has_block and self._choice.tells_body and not self._has_nested
            self._end_belief(tells_body=tells_body)

    def _hold_s(self) -> float:
        return self._choice.ttl_s if self._chance.random() < 0.1 else self._process.options.hold_s

    async def _extend(self, lease: Lease, ttl: float | None) -> None:
        # An answer that comes after the loss moves the deadline of what is lost already.
        self._asked_at_deadline = lease.deadline
        with suppress(ServerUnreachable):
            await lease.extend(ttl)

    async def _extend_late(self, lease: Lease) -> None:
        """By another task, which is not told that this one leaves."""
        with suppress(ServerUnreachable, LeaseLostError, RuntimeError):
            await lease.extend()

    async def _use(self, lease: Lease) -> None:
        lot = self._chance.random()
        if self._process.options.extends_wildly and self._chance.random() < 0.3:
            await self._extend(lease, self._process.options.ttl_most_s)
        elif lot < 0.3:
            lease.check()
        elif lot < 0.4:
            await self._extend(lease, self._choice.ttl_s if lot < 0.35 else None)
        elif lot < 0.5:
            lease.check(min_left=0.001)
        elif lot < 0.55 and not self._is_nested:
            self._has_nested = True
            await Act(self._process, self._chance, is_nested=True).run()

    # What the referee is told.

    def _ask(self, wait_timeout: float | None) -> None:
        self._asking = Asking(
            self._host,
            self._choice.key,
            self._host.world.now,
            wait_timeout,
            self._process.options.request_timeout_s,
            self._host.stopped_s,
            self._host.now(),
        )
        self._referee.ask(self._asking)

    def _end_ask(self, outcome: str) -> None:
        asking, self._asking = self._asking, None
        if asking is not None and not self._process.is_over:
            self._referee.end_ask(asking, outcome)

    def _got(self, lease: Lease, *, has_block: bool) -> None:
        asking = self._asking
        assert asking is not None
        self._end_ask("got")
        self._lease = lease
        fencing_token = lease.fencing_token if self._process.options.fencing else 0
        self._belief = Belief(
            self._host,
            asking.name,
            lease.owner_token,
            fencing_token,
            self._host.world.now,
            asking.since,
            asking.stopped_s,
            has_block,
            self._choice.polls,
            self._choice.extends,
        )
        self._process.open[self._belief] = lease
        self._referee.believe(self._belief)
        self._process.note("got", self._choice.name, short(lease.owner_token), fencing_token)

    def _end_belief(self, *, was_dropped: bool = False, tells_body: bool = False) -> None:
        belief, lease = self._belief, self._lease
        if belief is None or lease is None or self._process.is_over:
            return
        del self._process.open[belief]
        self._referee.end_belief(belief, lease.deadline)
        if tells_body:
            self._referee.told(belief, lease.deadline)
        # Whose body outlasts the closing of its client leaves its lease to the ttl.
        is_excused = was_dropped or self._process.is_closing
        self._referee.ended(belief.host, belief.name, belief.asked_at, is_excused=is_excused)
        self._process.note("over", self._choice.name, short(belief.token), lease.state)

    def _judge_loss(self, reason: str) -> None:
        if reason == "CLOSED":
            if not self._process.is_closing:
                self._host.world.breach("lost", f"{self._belief} CLOSED by an open client")
        elif reason != "TOO_LITTLE_TIME" and self._belief is not None and self._lease is not None:
            self._referee.lost(
                self._belief,
                reason,
                min(self._asked_at_deadline, self._lease.deadline),
                has_max_hold=self._choice.has_max_hold,
            )
