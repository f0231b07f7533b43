"""Loops of every make, threads, processes and interpreter flags: the same contract on each."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as BlockingRedis

from aiodlock import Lock, LockClient
from aiodlock.testing import LockServer
from tests import fork_of, leaks, test_kinds
from tests.until import until
from tests.whole_life import WHOLE_LIFE, whole_life

PROGRAM_LIMIT_S = 60


def uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes loops of uvloop; skips the test where there is no uvloop, and nowhere else."""
    if sys.platform == "win32" or sys.implementation.name != "cpython":
        pytest.skip("there is no uvloop for this platform")
    import uvloop

    return uvloop.new_event_loop


def runner(kind: str) -> asyncio.Runner:
    """What runs coroutines on a new loop of that kind."""
    if kind == "uvloop":
        return asyncio.Runner(loop_factory=uvloop_factory())
    return asyncio.Runner(debug=kind == "debug")


LOOPS = ["uvloop", "debug"]


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task survives, and the loop's exception handler hears nothing."""
    with leaks.loop_errors() as errors:
        yield
        left = await leaks.settled(Counter())
    assert dict(left) == {}
    assert errors == []


async def waiters(lock: Lock, n: int) -> bool:
    """Whether so many wait for it."""
    return (await lock.inspect()).waiters == n


@pytest.mark.parametrize("rule", test_kinds.RULES)
@pytest.mark.parametrize("kind", LOOPS)
def test_loop_of_another_make_keeps_the_contract(kind: str, rule: str, server: LockServer) -> None:
    """The rule of `test_kinds` on uvloop, and in asyncio's debug mode."""

    async def run() -> None:
        async with nothing_left(), test_kinds.of_url(server.url, server) as world:
            await test_kinds.RULES[rule](world)

    with runner(kind) as loop:
        loop.run(run())


@pytest.mark.parametrize(
    ("flags", "loop"),
    [
        (["-O"], "asyncio"),
        (["-W", "error", "-X", "dev"], "asyncio"),
        (["-W", "error", "-X", "dev", "-O"], "uvloop"),
    ],
    ids=["-O", "-W error -X dev", "uvloop, all of them"],
)
def test_program_under_flags_of_the_interpreter_does_the_same(
    flags: list[str], loop: str, server: LockServer
) -> None:
    """A whole program: what it sees is what it should, and it says nothing on stderr."""
    if loop == "uvloop":
        uvloop_factory()
    done = subprocess.run(
        [sys.executable, *flags, "-m", "tests.whole_life", server.url, loop],
        capture_output=True,
        check=False,
        text=True,
        timeout=PROGRAM_LIMIT_S,
        cwd=Path(__file__).parent.parent,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(done.stdout) == WHOLE_LIFE


def test_module_level_client_serves_one_loop_after_the_other(server: LockServer) -> None:
    """Client, lock and decorated function made where there is no loop; used in four (case 104)."""
    locks = LockClient.from_url(server.url)
    lock = locks.lock("a")
    tokens: list[int] = []

    @locks.locked("b")
    async def decorated() -> None:
        assert (await locks.lock("b").inspect()).held

    async def use() -> None:
        async with nothing_left(), locks:
            async with lock as lease:
                tokens.append(lease.fencing_token)
                waiting = asyncio.create_task(lock.acquire(wait_timeout=10))
                await until(functools.partial(waiters, lock, 1))
            async with await waiting as lease:
                tokens.append(lease.fencing_token)
            await decorated()

    for kind in ("uvloop", "plain", "debug", "uvloop"):
        with runner(kind) as loop:
            loop.run(use())
    assert len(tokens) == 8
    assert tokens == sorted(set(tokens))


def test_two_threads_with_a_loop_and_a_client_each_take_turns(server: LockServer) -> None:
    """Two loops at the same time, and never two holders; each waits for the other's releases."""
    inside = 0
    order: list[tuple[str, int]] = []
    failures: list[BaseException] = []
    both_are_up = threading.Barrier(2, timeout=30)

    async def use(who: str) -> None:
        nonlocal inside
        async with nothing_left(), LockClient.from_url(server.url) as locks:
            await locks.lock("warm").inspect()
            await asyncio.to_thread(both_are_up.wait)
            for _ in range(30):
                async with locks.lock("a").acquire(wait_timeout=30) as lease:
                    inside += 1
                    await asyncio.sleep(0.001)
                    assert inside == 1
                    order.append((who, lease.fencing_token))
                    inside -= 1

    def run(who: str, kind: str) -> None:
        try:
            with runner(kind) as loop:
                loop.run(use(who))
        except BaseException as failure:
            failures.append(failure)
            both_are_up.abort()

    threads = [threading.Thread(target=run, args=at) for at in (("one", "plain"), ("two", "debug"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROGRAM_LIMIT_S)
    assert failures == []
    assert sorted(who for who, _ in order) == ["one"] * 30 + ["two"] * 30
    assert [token for _, token in order] == sorted(token for _, token in order)
    turns = sum(one != two for (one, _), (two, _) in itertools.pairwise(order))
    assert turns > 10  # Whoever releases is behind the one who waits, if that one is awake.


def test_spawned_processes_lock_with_clients_of_their_own(server: LockServer) -> None:
    """`spawn`, while the parent's loop runs and holds: they wait for it, and go one by one."""

    async def hold_and_spawn() -> tuple[int, list[int]]:
        async with AsyncExitStack() as stack:
            locks = await stack.enter_async_context(LockClient.from_url(server.url))
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(2))
            lock = locks.lock("a")
            async with lock as lease:
                working = pool.starmap_async(tokens_of_child, [(server.url, 5)] * 2)
                await until(functools.partial(waiters, lock, 2), PROGRAM_LIMIT_S)
                assert not working.ready()
            results = await asyncio.to_thread(working.get, PROGRAM_LIMIT_S)
            return lease.fencing_token, [token for tokens in results for token in tokens]

    ours, theirs = asyncio.run(hold_and_spawn())
    assert len(set(theirs)) == 10
    assert min(theirs) > ours


def tokens_of_child(url: str, times: int) -> list[int]:
    """What a spawned process runs: the fencing tokens that it was given."""

    async def use() -> list[int]:
        tokens = []
        async with LockClient.from_url(url) as locks:
            for _ in range(times):
                async with locks.lock("a").acquire(wait_timeout=PROGRAM_LIMIT_S) as lease:
                    tokens.append(lease.fencing_token)
        return tokens

    return asyncio.run(use())


@pytest.mark.parametrize("kind", ["blocking pool", "own pool", "single connection"])
async def test_child_forked_from_a_client_of_the_users_can_lock(
    kind: str, server: LockServer
) -> None:
    """With a pool of its own, of the same make; the parent's lease and connections stay well."""
    assert await fork_of.outcome(kind, [server]) == ["child: held", "parent: held"]


def test_life_that_the_programs_are_compared_with_is_that_of_this_process(
    server: LockServer,
) -> None:
    """The same steps here, with asserts on; afterwards only the fence key is there."""
    seen: dict[str, Any] = asyncio.run(whole_life(server.url))
    assert seen == WHOLE_LIFE
    with BlockingRedis.from_url(server.url) as admin:
        assert admin.keys() == [b"aiodlock:{life}:fence"]
