"""Worker processes whose tasks compete for one name: started, watched, killed, started again.

The processes run this file: ``python -m tests.crowd <order>``. Each says on stdout who is inside
from when to when, one line an event, and dies with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import LockError

from aiodlock import LeaseLostError, Lock, LockClient
from aiodlock.cli._history import Interval
from aiodlock.redispy import Lock as DropIn

NAME = "crowd"
KEY = "aiodlock:{crowd}"
READY_WITHIN_S = 30.0
PERMITS = 3


@dataclass(frozen=True)
class Order:
    """What one worker process is to do.

    Attributes:
        lock: One of `LOCKS`.
        slow_every: One section in so many outlasts the ttl; 0: none does.
    """

    url: str
    lock: str
    tasks: int
    ttl: float
    number: int = 0
    work_s: float = 0.001
    slow_every: int = 0


# In the worker process.


class Grant(NamedTuple):
    """A stay that begins: its number, and until when it may be believed in."""

    fencing_token: int
    deadline_ns: int
    is_held: Callable[[], bool]


Section = Callable[[], AbstractAsyncContextManager[Grant]]
NEVER_NS = 1 << 62


def one(locks: LockClient, order: Order) -> Lock:
    """A plain lock."""
    return locks.lock(NAME, ttl=order.ttl)


def reader_or_writer(locks: LockClient, order: Order) -> Lock:
    """The first process writes, the others read."""
    return (locks.reader if order.number else locks.writer)(NAME, ttl=order.ttl)


def permits_of(number: int) -> int:
    """The first process is of another deployment, which has one less."""
    return PERMITS if number else PERMITS - 1


def semaphore(locks: LockClient, order: Order) -> Lock:
    """With `permits_of` it."""
    return locks.semaphore(NAME, permits=permits_of(order.number), ttl=order.ttl)


@contextlib.asynccontextmanager
async def aiodlocks(
    order: Order, make: Callable[[LockClient, Order], Lock] = one
) -> AsyncIterator[Section]:
    """The library, as users are told to use it."""
    async with LockClient.from_url(order.url, label=f"worker-{order.number}") as locks:
        lock = make(locks, order)

        @contextlib.asynccontextmanager
        async def section() -> AsyncIterator[Grant]:
            async with lock as lease:
                lease.check()
                deadline_ns = time.monotonic_ns() + int(lease.remaining * 1e9)
                yield Grant(lease.fencing_token, deadline_ns, lambda: lease.is_held)

        yield section


@contextlib.asynccontextmanager
async def several_names(order: Order) -> AsyncIterator[Section]:
    """The same with others beside it, named in any order."""
    async with LockClient.from_url(order.url, label=f"worker-{order.number}") as locks:

        @contextlib.asynccontextmanager
        async def section() -> AsyncIterator[Grant]:
            names = random.sample([NAME, "a", "z"], 3)
            async with locks.all(*names, ttl=order.ttl) as leases:
                lease = leases[NAME]
                leases.check()
                deadline_ns = time.monotonic_ns() + int(lease.remaining * 1e9)
                yield Grant(lease.fencing_token, deadline_ns, lambda: leases.is_held)

        yield section


@contextlib.asynccontextmanager
async def check_then_set(order: Order) -> AsyncIterator[Section]:
    """Naive: looks whether the key is there, then sets it; two may look before either sets."""

    @contextlib.asynccontextmanager
    async def section() -> AsyncIterator[Grant]:
        while await redis.exists(KEY):  # noqa: ASYNC110
            await asyncio.sleep(random.uniform(0.001, 0.01))
        await redis.set(KEY, "locked", px=round(order.ttl * 1000))
        yield Grant(0, NEVER_NS, lambda: True)
        await redis.delete(KEY)

    async with Redis.from_url(order.url) as redis:
        yield section


@contextlib.asynccontextmanager
async def unchecked_delete(order: Order) -> AsyncIterator[Section]:
    """Naive: one whose ttl ran out deletes the key of the next holder."""

    @contextlib.asynccontextmanager
    async def section() -> AsyncIterator[Grant]:
        px = round(order.ttl * 1000)
        while not await redis.set(KEY, "locked", nx=True, px=px):  # noqa: ASYNC110
            await asyncio.sleep(random.uniform(0.001, 0.01))
        yield Grant(0, NEVER_NS, lambda: True)
        await redis.delete(KEY)

    async with Redis.from_url(order.url) as redis:
        yield section


@contextlib.asynccontextmanager
async def old_and_new(order: Order) -> AsyncIterator[Section]:
    """redis-py's lock in every even worker, the drop-in for it in every odd one."""
    lock_class = DropIn if order.number % 2 else RedisPyLock

    @contextlib.asynccontextmanager
    async def section() -> AsyncIterator[Grant]:
        lock = redis.lock(KEY, timeout=order.ttl, lock_class=lock_class)
        await lock.acquire(token=f"worker-{order.number}:{uuid.uuid4().hex}")
        # It tells no deadline: a round trip less than what it asked for.
        deadline_ns = time.monotonic_ns() + int((order.ttl - 0.1) * 1e9)
        yield Grant(0, deadline_ns, lambda: time.monotonic_ns() < deadline_ns)
        with contextlib.suppress(LockError):
            await lock.release()

    async with Redis.from_url(order.url) as redis:
        yield section


LOCKS: dict[str, Callable[[Order], AbstractAsyncContextManager[Section]]] = {
    "redis-py, old and new": old_and_new,
    "aiodlock": aiodlocks,
    "several names": several_names,
    "readers, writer": functools.partial(aiodlocks, make=reader_or_writer),
    "semaphore": functools.partial(aiodlocks, make=semaphore),
    "check then set": check_then_set,
    "SET NX, DEL": unchecked_delete,
}
SHARED = ("readers, writer", "semaphore")


async def _serve(order: Order) -> None:
    async with LOCKS[order.lock](order) as section, asyncio.TaskGroup() as group:
        _say("ready")
        for task in range(order.tasks):
            group.create_task(_compete(order, task, section))


async def _compete(order: Order, task: int, section: Section) -> None:
    sections = 0
    while True:
        sections += 1
        is_slow = order.slow_every and sections % order.slow_every == 0
        work_s = 1.5 * order.ttl if is_slow else order.work_s * random.random()
        try:
            async with section() as grant:
                _say(f"enter {task} {time.monotonic_ns()} {grant.fencing_token}")
                await asyncio.sleep(work_s)
                left_ns = time.monotonic_ns()
                # After its deadline a holder knows (`check`) that it is none: that ends its stay.
                if not grant.is_held():
                    left_ns = min(left_ns, grant.deadline_ns)
                _say(f"leave {task} {left_ns}")
        except LeaseLostError:
            _say(f"lost {task}")


def _say(event: str) -> None:
    # One unbuffered write per line: a SIGKILL after it loses nothing, and none is torn.
    os.write(1, event.encode() + b"\n")


def _die_with_parent() -> None:
    """The parent holds the other end of stdin, and writes nothing."""
    sys.stdin.buffer.read()
    os._exit(0)


def _main() -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    asyncio.run(_serve(Order(**json.loads(sys.argv[1]))))


# In the test.


class Worker:
    """One process; what it said so far is in `ended` and `inside`."""

    def __init__(self, order: Order, process: Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.order = order
        self.ended: list[Interval] = []
        self.losses = 0
        self._inside: dict[int, tuple[int, int]] = {}
        self._process = process
        self._words = process.stdout
        self._stdin = process.stdin
        self._is_ready = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, order: Order) -> Self:
        """A new process; await `ready` before counting on it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.crowd", json.dumps(asdict(order))),
            stdin=PIPE,
            stdout=PIPE,
        )
        return cls(order, process)

    async def ready(self) -> None:
        """Until it works."""
        async with asyncio.timeout(READY_WITHIN_S):
            await self._is_ready.wait()

    @property
    def is_running(self) -> bool:
        """Whether it has neither crashed nor been killed."""
        return self._process.returncode is None

    def pause(self) -> None:
        """Stop it (SIGSTOP); when this returns it does nothing more."""
        self._process.send_signal(signal.SIGSTOP)
        if sys.platform == "linux":
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    async def kill(self, *, counts_as_killed: bool = True) -> int:
        """SIGKILL it, and take down all that it said before; the instant."""
        at_ns = time.monotonic_ns()
        if self.is_running:
            self._process.kill()
        await self._process.wait()
        await self._listening
        self._stdin.close()
        for task in tuple(self._inside):
            enter_ns, _ = self._inside[task]
            self._leave(task, max(enter_ns, at_ns), was_killed=counts_as_killed)
        return at_ns

    async def _listen(self) -> None:
        async for line in self._words:
            match line.decode().split():
                case ["ready"]:
                    self._is_ready.set()
                case ["enter", task, at_ns, token]:
                    self._inside[int(task)] = int(at_ns), int(token)
                case ["leave", task, at_ns]:
                    self._leave(int(task), int(at_ns), was_killed=False)
                case ["lost", _]:
                    self.losses += 1
                case _:
                    raise AssertionError(f"not a line of a worker: {line!r}")

    def _leave(self, task: int, at_ns: int, *, was_killed: bool) -> None:
        enter_ns, token = self._inside.pop(task)
        who = self.order.number * 1000 + task
        self.ended.append(Interval(who, enter_ns, at_ns, token, was_killed))


class Kill(NamedTuple):
    """A worker was killed; did the lock stand in its name then?"""

    at_ns: int
    hit_holder: bool


class Crowd:
    """``async with Crowd(order, workers=4, redis=redis) as crowd``: all of them ready."""

    def __init__(self, order: Order, *, workers: int, redis: Redis) -> None:
        self.kills: list[Kill] = []
        self._order = order
        self._count = workers
        self._redis = redis
        self._working: dict[int, Worker] = {}
        self._all: list[Worker] = []

    async def __aenter__(self) -> Self:
        try:
            for number in range(self._count):
                await self._start(number)
            for worker in self._all:
                await worker.ready()
        except BaseException:
            await self.dismiss()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.dismiss()

    async def dismiss(self) -> None:
        """End every process; those inside are counted as having left then."""
        await asyncio.gather(*(w.kill(counts_as_killed=False) for w in self._working.values()))
        self._working.clear()

    async def kill_a_holder(self) -> None:
        """Kill the worker in whose name the lock stands, and start it again.

        It is stopped for the moment in which the key is read again: with sections of a
        millisecond it would hold no longer when the signal comes.
        """
        async with asyncio.timeout(2):
            while True:
                number = await self._holder()
                if number is None:
                    await asyncio.sleep(0.001)
                    continue
                self._working[number].pause()
                if await self._holder() == number:
                    return await self.kill(number)
                self._working[number].resume()

    async def kill(self, number: int) -> None:
        """Kill this one, whatever it does, and start it again."""
        at_ns = await self._working[number].kill()
        self.kills.append(Kill(at_ns, await self._holder() == number))
        await self._start(number)

    @property
    def history(self) -> list[Interval]:
        """Every stay that has ended."""
        return [interval for worker in self._all for interval in worker.ended]

    @property
    def losses(self) -> int:
        """How many leases were lost while they were held."""
        return sum(worker.losses for worker in self._all)

    @property
    def crashed(self) -> int:
        """How many processes ended by themselves."""
        return sum(not worker.is_running for worker in self._working.values())

    async def _start(self, number: int) -> None:
        worker = await Worker.start(Order(**{**asdict(self._order), "number": number}))
        self._working[number] = worker
        self._all.append(worker)

    async def _holder(self) -> int | None:
        if self._order.lock in SHARED:
            value = str((await self._redis.zrange(KEY, 0, 0) or [""])[0])
        else:
            value = str(await self._redis.get(KEY) or "")
        label, _, _ = value.partition(":")
        return int(label.removeprefix("worker-")) if label else None


if __name__ == "__main__":
    _main()
