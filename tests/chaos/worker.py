"""One worker process: tasks of every style that compete for one name until told to finish.

`python -m tests.chaos.worker <order>`; the line `finish` on stdin ends it, the end of stdin kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aiodlock import (
    Backoff,
    Lease,
    LeaseLostError,
    Lock,
    LockClient,
    LockTimeout,
    ServerUnreachable,
    _clock,
)
from tests import crowd, leaks
from tests.chaos import journal
from tests.chaos.journal import NEVER_NS, Pen, at_ns, now_ns
from tests.chaos.order import Order
from tests.chaos.resource import RefusedError, Resource

TICK_S = 0.005
LAG_TICK_S = 0.01
LAG_TOLD_S = 0.005
PAUSE_MAX_S = 0.01
SLOW_EVERY = 20
"""One section in so many lasts some ttls: somebody is in one most of the time."""
SLOW_MAX_S = 2.5


@dataclass(frozen=True)
class Style:
    """How a task acquires, and what it does of what users are told to do.

    Attributes:
        gives_up_s: It is cancelled after a random time up to this (`asyncio.timeout`).
        wait_timeout: Of each acquisition.
        tries: By `try_acquire`.
        checks: It calls `check()` before it writes.
    """

    options: dict[str, Any]
    gives_up_s: float | None = None
    wait_timeout: float | None = None
    tries: bool = False
    checks: bool = True


POLLING = {"retry": Backoff(initial=0.01, maximum=0.3)}
STYLES = [
    Style({}),
    Style({**POLLING}),
    Style({"on_lost": "raise"}, checks=False),
    Style({}, gives_up_s=0.5, checks=False),
    Style({**POLLING, "on_lost": "raise"}, wait_timeout=2.0),
    Style({}, wait_timeout=0.5, tries=True, checks=False),
    Style({"auto_extend": False}),
    Style({**POLLING}, gives_up_s=0.5),
]


def is_patient(task: int) -> bool:
    """Whether it waits for as long as it takes."""
    style = STYLES[task % len(STYLES)]
    return style.gives_up_s is None and style.wait_timeout is None


def is_proxied(task: int) -> bool:
    """Whether it uses the second client, which is the one behind a proxy if there is one."""
    return task % 2 == 1


class Hold(Protocol):
    """What a section knows of its grant."""

    token: int

    def deadline_ns(self) -> int: ...

    def is_held(self) -> bool: ...

    def check(self) -> None: ...


class LeaseHold:
    """The library's grant."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.token = lease.fencing_token
        self.check = lease.check

    def deadline_ns(self) -> int:
        return at_ns(self._lease.deadline)

    def is_held(self) -> bool:
        return self._lease.is_held


class NaiveHold:
    """A naive lock's grant, which is believed in for ever."""

    def __init__(self) -> None:
        self.token = now_ns() // 1000

    def deadline_ns(self) -> int:
        return NEVER_NS

    def is_held(self) -> bool:
        return True

    def check(self) -> None:
        return


class NotGotError(Exception):
    """`try_acquire` returned None."""


Section = Callable[[], contextlib.AbstractAsyncContextManager[Hold]]


class Work:
    """What all tasks of this process share."""

    def __init__(self, order: Order) -> None:
        self.order = order
        folder = Path(order.folder)
        self.pen = Pen(journal.path_of(folder, order.number))
        self.resource = Resource(folder / "resource")
        self.is_calm = self.is_over = False

    async def run(self) -> None:
        """Compete until told to finish; then leave nothing."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._complain)
        threading.Thread(target=self._obey, daemon=True).start()
        async with AsyncExitStack() as stack:
            clients = await self._clients(stack)
            lag = asyncio.create_task(self._watch_lag())
            self.pen.say("ready")
            async with asyncio.TaskGroup() as group:
                for task in range(self.order.tasks):
                    group.create_task(self._compete(task, clients))
            lag.cancel()
            await asyncio.wait((lag,))
        if left := await leaks.settled(Counter()):
            self.pen.say("error", f"tasks left: {dict(left)}")
        self.pen.say("closed")

    async def _clients(self, stack: AsyncExitStack) -> list[LockClient]:
        if self.order.lock != "aiodlock":
            return []
        return await self.order.servers.clients(stack, f"w{self.order.number}")

    async def _compete(self, task: int, clients: list[LockClient]) -> None:
        style = STYLES[task % len(STYLES)]
        chance = random.Random(f"{self.order.seed} {self.order.number} {task}")
        async with self._sections(style, clients[task % 2] if clients else None) as section:
            while not self.is_over:
                await self._once(task, style, chance, section)
                await asyncio.sleep(chance.uniform(0, PAUSE_MAX_S))

    async def _once(self, task: int, style: Style, chance: random.Random, section: Section) -> None:
        """One acquisition with what follows, and what came out of it."""
        gives_up_s = style.gives_up_s and chance.uniform(0, style.gives_up_s)
        visit = Visit(self, task, style, self._work_s(chance))
        try:
            async with asyncio.timeout(gives_up_s):
                await visit.pay(section)
        except LeaseLostError as error:
            visit.end(f"lost:{error.reason.name}")
        except (LockTimeout, NotGotError):
            visit.end("not-got")
        except ServerUnreachable:
            visit.end("ServerUnreachable")
        except TimeoutError:
            visit.end("timeout")
        except RefusedError:
            visit.end("refused")
        except Exception as error:
            visit.end("unexpected")
            self.pen.say("error", f"task {task}: {error!r} {getattr(error, '__notes__', '')}")

    @asynccontextmanager
    async def _sections(self, style: Style, client: LockClient | None) -> AsyncIterator[Section]:
        if client is not None:
            lock = client.lock(self.order.name, ttl=self.order.ttl, **style.options)
            yield lambda: _leased(lock, style)
            return
        order = self.order
        naive = crowd.LOCKS[order.lock]
        url = order.servers.urls[0]
        async with naive(crowd.Order(url, order.lock, tasks=order.tasks, ttl=order.ttl)) as inner:
            yield lambda: _naively(inner)

    async def _watch_lag(self) -> None:
        """Note when the loop does not run: what it is told then comes late."""
        while True:
            due = _clock.now() + LAG_TICK_S
            await asyncio.sleep(LAG_TICK_S)
            if (woke := _clock.now()) - due > LAG_TOLD_S:
                self.pen.say("lag", at_ns(due), at_ns(woke))

    def _work_s(self, chance: random.Random) -> float:
        """How long a section is to last: mostly short, now and then some ttls."""
        if self.is_calm or chance.randrange(SLOW_EVERY):
            return chance.uniform(0, TICK_S)
        return min(SLOW_MAX_S, self.order.ttl * chance.uniform(0.5, 4.0))

    def _obey(self) -> None:
        """Do what the parent says; without a parent there is nothing to do."""
        for order in sys.stdin:
            self.is_calm = True
            self.is_over = self.is_over or order == "finish\n"
        os._exit(0)

    def _complain(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.pen.say("error", f"loop: {context.get('message')}: {context.get('exception')!r}")


@asynccontextmanager
async def _leased(lock: Lock, style: Style) -> AsyncIterator[Hold]:
    """The block in which a lease is had, which was got as *style* says."""
    if not style.tries:
        async with lock.acquire(wait_timeout=style.wait_timeout) as lease:
            yield LeaseHold(lease)
        return
    tried = await lock.try_acquire(wait_timeout=style.wait_timeout)
    if tried is None:
        raise NotGotError
    async with tried as lease:
        yield LeaseHold(lease)


@asynccontextmanager
async def _naively(inner: crowd.Section) -> AsyncIterator[Hold]:
    """The same under a naive lock."""
    async with inner():
        yield NaiveHold()


class Visit:
    """One acquisition and the section that follows; says each step before or after it is made."""

    def __init__(self, work: Work, task: int, style: Style, work_s: float) -> None:
        self._pen = work.pen
        self._resource = work.resource
        self._task = task
        self._style = style
        self._work_s = work_s
        self._step = "begun"
        self._deadline_ns = 0

    async def pay(self, section: Section) -> None:
        self._pen.say("want", self._task, now_ns())
        self._step = "waiting"
        async with section() as hold:
            # Before the check: if it passes, the lease was held at this instant.
            enter_ns = now_ns()
            hold.check()
            self._deadline_ns = hold.deadline_ns()
            self._pen.say("enter", self._task, enter_ns, hold.token, self._deadline_ns)
            self._step = "inside"
            why = "cancelled"
            try:
                await self._use(hold)
                why = "done"
            except LeaseLostError as error:
                why = f"lost:{error.reason.name}"
                raise
            except RefusedError:
                why = "refused"
                raise
            finally:
                told_ns = now_ns()
                # The lease's own, for the last extension may have come since the last look.
                self._pen.say("leave", self._task, told_ns, hold.deadline_ns(), why)
                self._step = "left"

    def end(self, why: str) -> None:
        """What came out: of the wait, or of the section."""
        if self._step == "waiting":
            self._pen.say("quit", self._task, now_ns(), why)
        else:
            self._pen.say("exit", self._task, now_ns(), why)

    async def _use(self, hold: Hold) -> None:
        """Read, work, write: an update that is lost if another did so meanwhile."""
        self._resource.claim(hold.token)
        value, loose_value = self._resource.read(hold.token)
        end = _clock.now() + self._work_s
        while (left := end - _clock.now()) > 0:
            await asyncio.sleep(min(TICK_S, left))
            self._note_extension(hold)
            if self._style.options.get("on_lost") == "raise":
                hold.check()
        if self._style.checks:
            hold.check()
        self._resource.write(hold.token, value + 1, loose_value + 1)

    def _note_extension(self, hold: Hold) -> None:
        if (deadline_ns := hold.deadline_ns()) != self._deadline_ns:
            self._deadline_ns = deadline_ns
            self._pen.say("extended", self._task, deadline_ns)


def main() -> None:
    """Work as the argument says."""
    order = Order.from_json(sys.argv[1])
    pen = Pen(journal.path_of(Path(order.folder), order.number))

    def complain(told: Any) -> None:
        pen.say("error", f"unraisable: {told.exc_value!r} in {told.object!r}")

    sys.unraisablehook = complain
    try:
        asyncio.run(_worked(order))
    except BaseException as error:
        pen.say("error", f"process: {error!r}")
        raise


async def _worked(order: Order) -> None:
    await Work(order).run()


if __name__ == "__main__":
    main()
