"""The tool that cancels at every step: it counts right, and it sees what it must see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock.testing import LockServer
from tests import steps
from tests.keys import leftovers
from tests.steps import Mode, Steps, cancel_at_every_step

KEY = "aiodlock:{x}"
Scenario = Callable[[], Coroutine[Any, Any, object]]


@pytest.fixture
async def redis(server: LockServer) -> AsyncIterator[Redis]:
    """A client without a timeout.

    With one, redis-py sends inside ``asyncio.wait_for``, which on Python 3.11 swallows a cancel
    that meets the result; the tool sees that at once.
    """
    async with Redis.from_url(server.url, decode_responses=True, socket_timeout=None) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_report() -> Iterator[None]:
    """What is cancelled here says nothing about the library."""
    before = len(steps.told)
    yield
    del steps.told[before:]


async def nothing() -> None:
    """A check that always passes."""


def careful(redis: Redis) -> Scenario:
    """Takes a key, works, gives it back whatever happens."""

    async def scenario() -> None:
        try:
            await redis.set(KEY, 1)
            await asyncio.sleep(0)
        finally:
            await finished(redis.delete(KEY))

    return scenario


async def finished(work: Awaitable[object]) -> None:
    """Wait for *work* although cancelled any number of times; the cancel comes out afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled


def careless(redis: Redis) -> Scenario:
    """The same without the ``finally``."""

    async def scenario() -> None:
        await redis.set(KEY, 1)
        await asyncio.sleep(0)
        await redis.delete(KEY)

    return scenario


async def attempt(scenario: Scenario, redis: Redis, *modes: Mode) -> Steps:
    """Run the tool with the check of the real tests."""

    async def after() -> None:
        assert await leftovers(redis) == []

    async def before() -> None:
        await redis.ping()  # reconnects, so that this is no step
        await redis.delete(KEY)

    return await cancel_at_every_step(
        scenario, after, before=before, modes=modes or tuple(Mode), label="steps"
    )


async def test_careful_scenario_passes_in_every_mode(
    redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step is cancelled once per mode, and the count is printed."""
    done = await attempt(careful(redis), redis)
    assert done.steps >= 3
    assert done.runs >= done.steps * len(Mode)
    expected = f"cancel-steps steps: {done.steps} steps x {len(Mode)} ways, {done.runs} runs"
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("mode", Mode)
async def test_careless_scenario_fails_in_every_mode(redis: Redis, mode: Mode) -> None:
    """Negative control: the key left behind is seen."""
    with pytest.raises(AssertionError) as failure:
        await attempt(careless(redis), redis, mode)
    assert f"{mode} cancel at step" in failure.value.__notes__[0]
    await redis.delete(KEY)


async def test_swallowed_cancel_fails() -> None:
    """Negative control: going on as if nothing had happened is not what was asked for."""

    async def scenario() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    for mode in Mode:
        with pytest.raises(AssertionError, match="did not come out"):
            await cancel_at_every_step(scenario, nothing, modes=(mode,))


async def test_masked_cancel_fails_unless_allowed() -> None:
    """Negative control: another error in the cancel's place."""

    async def scenario() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise KeyError("masked") from None

    with pytest.raises(AssertionError, match="masked"):
        await cancel_at_every_step(scenario, nothing)
    assert (await cancel_at_every_step(scenario, nothing, allowed=(KeyError,))).steps == 1


async def test_what_is_done_instead_of_a_cancel_is_done_at_each_step() -> None:
    """Somebody else acts at each of the awaits; what comes out must be allowed."""
    gone: list[int] = []
    seen: list[int] = []

    async def scenario() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if gone:
                seen.append(len(gone))
                raise ConnectionError("the client has gone")

    async def before() -> None:
        gone.clear()

    def leave() -> None:
        gone.append(1)

    with pytest.raises(AssertionError, match="the client has gone"):
        await cancel_at_every_step(scenario, nothing, before=before, instead=leave)
    seen.clear()
    done = await cancel_at_every_step(
        scenario, nothing, before=before, instead=leave, allowed=(ConnectionError,)
    )
    assert done.steps == done.runs == 6
    assert len(seen) >= 5  # At the last step there is no await left that could see it.


async def test_task_left_behind_fails() -> None:
    """Negative control: a task that nobody waits for."""
    left: list[asyncio.Task[None]] = []

    async def scenario() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            left.append(asyncio.create_task(asyncio.sleep(60)))
            raise

    with pytest.raises(AssertionError, match="tasks left"):
        await cancel_at_every_step(scenario, nothing, modes=(Mode.NATIVE,))
    for task in left:
        task.cancel()


async def test_error_in_the_loop_fails() -> None:
    """Negative control: a callback that raises where nobody looks."""

    async def scenario() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            raise

    async def a_turn_later() -> None:
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        await cancel_at_every_step(scenario, a_turn_later, modes=(Mode.NATIVE,))


async def test_late_cancel_meets_the_result() -> None:
    """In that mode the work is done each time, and only its result is lost."""
    done: list[int] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        result = loop.create_future()

        def finish() -> None:
            done.append(1)
            result.set_result(None)

        loop.call_soon(loop.call_soon, finish)
        await result

    assert await cancel_at_every_step(scenario, nothing, modes=(Mode.LATE,)) == Steps(1, 1)
    # Twice undisturbed, once cancelled at its only step, once to see that there is no second.
    assert len(done) == 4


async def test_second_native_cancel_reaches_a_clean_up_that_awaits() -> None:
    """A clean-up of one turn survives one cancel, and not two."""

    async def scenario() -> None:
        held.append(1)
        try:
            await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            held.clear()

    held: list[int] = []

    async def after() -> None:
        assert held == []

    async def before() -> None:
        held.clear()

    with pytest.raises(AssertionError):
        await cancel_at_every_step(scenario, after, before=before, modes=(Mode.TWICE,))
