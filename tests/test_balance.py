"""Thousands of cycles of every kind leave nothing: no task, timer, connection, byte, word."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis

from aiodlock import Backoff, LeaseLostError, LockClient, LockTimeout
from aiodlock.testing import LockServer
from tests import balance
from tests.balance import Cycle, imbalance, noted_blocking
from tests.conftest import MakeClient
from tests.until import until

pytestmark = pytest.mark.deep

KEY = "aiodlock:{x}"
QUEUE = f"{KEY}:queue"

AT_ONCE = 25
"""How many wait together in cycles that are about waiting."""


class Stage:
    """Two clients of one server, and a look at it from outside."""

    def __init__(self, ours: LockClient, others: LockClient, redis: Redis, url: str) -> None:
        self.ours = ours
        self.others = others
        self.redis = redis
        self.url = url
        self.port = int(url.rpartition(":")[2])

    async def queued(self, count: int) -> None:
        """Until so many wait."""

        async def is_so() -> bool:
            return int(await self.redis.zcard(QUEUE)) == count

        await until(is_so)


@pytest.fixture
async def stage(make_client: MakeClient, redis: Redis, server: LockServer) -> AsyncIterator[Stage]:
    """Both clients are connected."""
    async with make_client() as ours, make_client() as others:
        yield Stage(ours, others, redis, server.url)


# The cycles.


async def acquired_and_released(stage: Stage) -> None:
    """`async with lock`."""
    async with stage.ours.lock("x"):
        pass


async def extended(stage: Stage) -> None:
    """Held, extended by hand, given up by hand."""
    lease = await stage.ours.lock("x").acquire()
    await lease.extend()
    await lease.release()


async def extended_by_its_watchdog(stage: Stage) -> None:
    """Many leases at the same time, each until its watchdog has extended it."""
    locks = [stage.ours.lock(f"x{n}", ttl=1) for n in range(2 * AT_ONCE)]
    leases = await asyncio.gather(*(lock.acquire() for lock in locks))
    deadlines = [lease.deadline for lease in leases]
    await asyncio.sleep(0.4)
    for lease, deadline in zip(leases, deadlines, strict=True):
        assert lease.deadline > deadline
        await lease.release()


async def refused_at_once(stage: Stage) -> None:
    """`try_acquire` on what another holds."""
    async with stage.others.lock("x"):
        assert await stage.ours.lock("x").try_acquire() is None


async def timed_out(stage: Stage) -> None:
    """Waits that end by `wait_timeout`."""
    async with stage.others.lock("x"):
        waits = (stage.ours.lock("x").acquire(wait_timeout=0.02) for _ in range(AT_ONCE))
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert {type(end) for end in ends} == {LockTimeout}
        await stage.queued(0)


async def timed_out_while_polling(stage: Stage) -> None:
    """The same with `retry=Backoff(...)`."""
    polling = Backoff(initial=0.01, maximum=0.01)
    async with stage.others.lock("x"):
        lock = stage.ours.lock("x", retry=polling)
        ends = await asyncio.gather(*(lock.try_acquire(wait_timeout=0.02) for _ in range(AT_ONCE)))
        assert set(ends) == {None}
        await stage.queued(0)


async def cancelled_in_the_queue(stage: Stage) -> None:
    """Tasks that wait and are cancelled."""
    async with stage.others.lock("x"):
        waiting = [asyncio.create_task(stage.ours.lock("x").acquire()) for _ in range(AT_ONCE)]
        await stage.queued(AT_ONCE)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def cancelled_with_the_request_on_its_way(stage: Stage) -> None:
    """Free locks, and tasks that are cancelled before they hear."""
    names = (f"x{n}" for n in range(AT_ONCE))
    asking = [asyncio.create_task(stage.ours.lock(name).acquire()) for name in names]
    await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def lost(stage: Stage) -> None:
    """The key is gone, which the holder finds by itself."""
    with suppress(LeaseLostError):
        async with stage.ours.lock("x") as lease:
            await stage.redis.delete(KEY)
            await lease.extend()


async def handed_over(stage: Stage) -> None:
    """From one client to another, and back."""
    first = await stage.ours.lock("x").acquire()
    waiting = asyncio.create_task(stage.others.lock("x").acquire())
    await stage.queued(1)
    again = asyncio.create_task(stage.ours.lock("x").acquire())
    await stage.queued(2)
    await first.release()
    await (await waiting).release()
    await (await again).release()


async def opened_and_closed(stage: Stage) -> None:
    """A client with a life of its own: a lease, a waiter, a body that is told."""
    async with LockClient.from_url(stage.url) as locks:
        lease = await locks.lock("x").acquire()
        waiting = asyncio.create_task(locks.lock("x").acquire())
        await stage.queued(1)
    assert lease.state == "released"
    with suppress(RuntimeError):
        await waiting


async def looked_at_and_broken(stage: Stage) -> None:
    """What an operator does."""
    lease = await stage.ours.lock("x").acquire()
    assert (await stage.others.lock("x").inspect()).held
    assert await stage.others.lock("x").break_lock()
    assert not await lease.release()


CYCLES: list[tuple[Callable[[Stage], Awaitable[None]], int]] = [
    (acquired_and_released, 1500),
    (extended, 600),
    (extended_by_its_watchdog, 6),
    (refused_at_once, 600),
    (timed_out, 25),
    (timed_out_while_polling, 25),
    (cancelled_in_the_queue, 60),
    (cancelled_with_the_request_on_its_way, 80),
    (lost, 700),
    (handed_over, 300),
    (opened_and_closed, 60),
    (looked_at_and_broken, 300),
]

# What goes wrong on purpose is logged, one INFO for each lease that is lost.
LOUD = {lost}


@pytest.mark.parametrize(
    ("cycle", "times"), [pytest.param(*case, id=case[0].__name__) for case in CYCLES]
)
async def test_cycles_of_every_kind_leave_nothing(
    stage: Stage, cycle: Callable[[Stage], Awaitable[None]], times: int
) -> None:
    """Neither in the loop nor at the server nor in memory, and without a word."""
    quiet = cycle not in LOUD
    left = await imbalance(lambda: cycle(stage), stage.redis, times=times, quiet=quiet)
    assert left == {}


# Negative controls: one thing that is kept, and the finding that names it.

KEPT: list[object] = []


async def a_task() -> None:
    """Nobody waits for it."""
    KEPT.append(asyncio.create_task(asyncio.Event().wait()))


async def a_timer() -> None:
    """It is set and forgotten."""
    KEPT.append(asyncio.get_running_loop().call_later(3600, lambda: None))


async def bytes_kept() -> None:
    """A small object for each cycle."""
    KEPT.append([None] * 10)


async def a_word() -> None:
    """Somebody says INFO on the ordinary path."""
    logging.getLogger("some.library").info("here I am")


async def a_warning() -> None:
    """A socket that is collected unclosed."""
    socket.socket()


async def an_error() -> None:
    """A callback that raises where nobody looks."""
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)


CONTROLS: dict[str, tuple[Cycle, int]] = {
    "tasks": (a_task, 5),
    "timers": (a_timer, 5),
    "bytes": (bytes_kept, 1000),
    "records": (a_word, 5),
    "warnings": (a_warning, 5),
    "errors": (an_error, 5),
}


@pytest.fixture
def _nothing_is_kept() -> Iterator[None]:
    """After the control, what it kept is let go."""
    yield
    for kept in KEPT:
        if isinstance(kept, asyncio.Task | asyncio.TimerHandle):
            kept.cancel()
    KEPT.clear()


@pytest.mark.usefixtures("_nothing_is_kept")
@pytest.mark.parametrize("kind", CONTROLS)
async def test_check_sees_what_is_kept(
    stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of finding, by a cycle that leaves just that."""
    monkeypatch.setattr(balance, "SETTLE_S", 0.1)
    cycle, times = CONTROLS[kind]
    left = await imbalance(cycle, stage.redis, times=times)
    assert list(left) == [kind], left


@pytest.mark.parametrize("kind", ["connections", "keys"])
async def test_check_sees_what_is_kept_at_the_server(
    stage: Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is not closed, a key that is not deleted."""
    monkeypatch.setattr(balance, "SETTLE_S", 0.1)
    opened: list[asyncio.StreamWriter] = []

    async def keep() -> None:
        if kind == "connections":
            _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            opened.append(writer)
        else:
            await stage.redis.set(f"aiodlock:{{{time.monotonic_ns()}}}", "x", ex=60)

    try:
        left = await imbalance(keep, stage.redis, times=5)
        assert list(left) == [kind], left
    finally:
        for writer in opened:
            writer.close()
            await writer.wait_closed()


async def test_connections_of_a_client_are_closed_with_it(server: LockServer, redis: Redis) -> None:
    """Two while it is open, commands and inbox; none, a moment after it is closed."""

    async def ours(count: int) -> bool:
        names = [client["name"] for client in await redis.client_list()]
        return names.count("balance") == count

    for _ in range(3):
        async with LockClient.from_url(f"{server.url}?client_name=balance") as locks:
            async with locks.lock("x"):
                waiting = asyncio.create_task(locks.lock("x").acquire())
                await until(lambda: ours(2))
            await (await waiting).release()
        await until(lambda: ours(0))


# The loop is never blocked.


async def whole_use(locks: LockClient) -> None:
    """First use, every call, a watchdog at work, a hand-off, the end of the client."""
    async with locks:
        async with locks.lock("x", ttl=0.1) as lease:
            await lease.extend()
            await asyncio.sleep(0.15)
            assert await locks.lock("x").try_acquire() is None
            waiting = asyncio.create_task(locks.lock("x").acquire(wait_timeout=10))
            await until(lambda: is_waited_for(locks))
        second = await waiting
        cancelled = asyncio.create_task(locks.lock("x").acquire())
        await until(lambda: is_waited_for(locks))
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await second.release()
        await locks.lock("x").break_lock()


async def is_waited_for(locks: LockClient) -> bool:
    """Whether somebody stands in the queue."""
    return (await locks.lock("x").inspect()).waiters > 0


@pytest.mark.parametrize("where", ["server", "memory"])
async def test_no_call_blocks_the_loop(server: LockServer, where: str) -> None:
    """From the first await of a client to its last.

    Constructing one is outside: redis-py looks at files for it.
    """
    # Read once in a process: its scripts are files.
    locks = LockClient.from_url(server.url if where == "server" else "memory://")
    if where == "memory":
        async with locks, locks.lock("warm"):  # fakeredis reads a file at its first command.
            pass
    with noted_blocking() as blocking:
        await whole_use(locks)
    assert blocking == []


async def test_check_sees_a_call_that_blocks() -> None:
    """Negative control: a sleep and a file, although somebody swallows their refusal."""
    with noted_blocking() as blocking:
        with suppress(Exception):
            time.sleep(0)  # noqa: ASYNC251 - it must be seen
        with suppress(Exception):
            Path(__file__).read_bytes()  # noqa: ASYNC240
    assert [seen.partition(" at ")[0] for seen in blocking] == [
        "time.sleep",
        "io.BufferedReader.read",
    ]
    assert __file__ in blocking[0]
    with noted_blocking() as blocking:
        await asyncio.sleep(0)
    assert blocking == []


def test_first_use_in_a_process_reads_no_file_in_the_loop(server: LockServer) -> None:
    """The scripts are read when the client is made."""
    program = (
        "import asyncio, os, sys\n"
        "from aiodlock import LockClient\n"
        "from tests.balance import noted_blocking\n"
        "locks = LockClient.from_url(sys.argv[1])\n"
        "async def main():\n"
        "    with noted_blocking() as blocking:\n"
        "        async with locks, locks.lock('x'): pass\n"
        "    assert blocking == [], blocking\n"
        "asyncio.run(main())\n"
        "os._exit(0)"  # What was patched to note it may crash an interpreter that ends.
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", program, server.url]
    subprocess.run(command, check=True, timeout=60, cwd=root)
