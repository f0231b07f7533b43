"""Cancels a scenario at every one of its awaits, in every way there is to cancel."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import anyio

from tests import leaks

STEPS_LIMIT = 1000
RUN_LIMIT_S = 15.0

told: list[str] = []
"""What was printed, for the summary at the end of the test run."""

Scenario = Callable[[], Coroutine[Any, Any, object]]
Check = Callable[[], Awaitable[object]]


class Mode(StrEnum):
    """How the cancel comes."""

    NATIVE = "native"
    """``task.cancel()`` once the scenario waits."""
    LATE = "native, with the result"
    """``task.cancel()`` when what it waits for is there but the task has not run yet."""
    TWICE = "native twice"
    """The second ``task.cancel()`` one turn of the loop after the first."""
    SCOPE = "anyio scope"
    """An ``anyio.CancelScope`` around the scenario, which goes on cancelling each await."""
    DEADLINE = "asyncio.timeout"
    """An ``asyncio.timeout`` around the scenario expires."""


@dataclass(frozen=True)
class Steps:
    """What :func:`cancel_at_every_step` did."""

    steps: int
    """At how many awaits the scenario suspends; the most that were seen."""
    runs: int
    """How many times it was cancelled, over all modes."""


async def cancel_at_every_step(
    scenario: Scenario,
    after: Check,
    *,
    before: Check | None = None,
    modes: tuple[Mode, ...] = tuple(Mode),
    allowed: tuple[type[Exception], ...] = (),
    instead: Callable[[], object] | None = None,
    label: str | None = None,
) -> Steps:
    """Run *scenario* undisturbed, then once per mode and step with the cancel injected there.

    It prints and returns the number of steps. A run fails unless the cancel comes out of the
    scenario, *after* passes, no task is left that was not there after the undisturbed runs, and
    the loop's exception handler heard nothing.

    Args:
        scenario: Makes a new coroutine for each run; its own suspensions are the steps.
        after: Awaited after every run, to assert that nothing is left.
        before: Awaited before every run, not counted as steps.
        modes: The ways to cancel.
        allowed: Errors that may come out instead of the cancel.
        instead: Done at each step in place of a cancel: a client that hangs up, say. Nothing but
            what is allowed may come out then. One way, whatever *modes* says.
        label: Printed beside the count. Default: the scenario's name.
    """
    label = label or getattr(scenario, "__qualname__", repr(scenario))
    modes = (Mode.NATIVE,) if instead else modes
    steps = 0
    for _ in range(2):  # the first may connect, and start what stays: it counts too many
        probe = _Run(scenario, None, 0)
        await _checked(probe, before, after, None, allowed)
        if probe.error is not None:
            raise AssertionError(f"{label} fails undisturbed: {probe.error!r}") from probe.error
        steps = probe.steps
    tasks = leaks.tasks()
    runs = 0
    for mode in modes:
        for step in range(1, STEPS_LIMIT):
            run = _Run(scenario, mode, step, instead)
            try:
                await _checked(run, before, after, tasks, allowed)
            except BaseException as failure:
                failure.add_note(f"{label}: {mode} cancel at step {step} of {steps}")
                raise
            runs += run.injected
            # Timing adds awaits to a run or takes some away.
            if run.injected:
                steps = max(steps, step)
            elif step > steps:
                break
        else:
            raise AssertionError(f"{label} has more than {STEPS_LIMIT} steps")
    told.append(f"cancel-steps {label}: {steps} steps x {len(modes)} ways, {runs} runs")
    print(told[-1])
    return Steps(steps, runs)


async def _checked(
    run: _Run,
    before: Check | None,
    after: Check,
    tasks_before: Counter[str] | None,
    allowed: tuple[type[Exception], ...],
) -> None:
    with leaks.loop_errors() as errors:
        if before is not None:
            await before()
        await run.to_the_end()
        await after()
        if tasks_before is not None:
            left = await leaks.settled(tasks_before)
            assert not left, f"tasks left: {dict(left)}"
    assert not errors, f"errors in the loop: {errors}"
    if run.instead:
        assert run.error is None or isinstance(run.error, allowed), f"it ended with {run.error!r}"
    elif run.injected and not run.was_cancelled and not isinstance(run.error, allowed):
        assert run.is_too_late, f"the cancel did not come out, but {run.error!r}"


class _Run:
    """One run of the scenario, cancelled at one step."""

    def __init__(
        self,
        scenario: Scenario,
        mode: Mode | None,
        at_step: int,
        instead: Callable[[], object] | None = None,
    ) -> None:
        self._scenario = scenario
        self.instead = instead
        self._mode = mode
        self._at_step = at_step
        self._loop = asyncio.get_running_loop()
        self.steps = 0
        self.injected = False
        self.was_cancelled = False
        self._was_struck = False
        self.error: BaseException | None = None

    @property
    def is_too_late(self) -> bool:
        """Whether it succeeded because anyio cancels no await whose result is there already."""
        return self._mode is Mode.SCOPE and self.error is None and not self._was_struck

    async def to_the_end(self) -> None:
        around = {Mode.SCOPE: self._in_scope, Mode.DEADLINE: self._in_deadline}
        body = around.get(self._mode, self._plain) if self._mode else self._plain
        self._task = asyncio.create_task(body(), name=f"scenario {self._mode} {self._at_step}")
        self._cancel: Callable[[], object] = self.instead or self._task.cancel
        try:
            done, _ = await asyncio.wait({self._task}, timeout=RUN_LIMIT_S)
        finally:
            if not self._task.done():
                self._task.print_stack()
                self._task.cancel()
        assert done, f"not over after {RUN_LIMIT_S} s; see its stack on stderr"
        if self._task.cancelled():
            self.was_cancelled = True
        else:
            self.error = self._task.exception()

    async def _plain(self) -> None:
        await self._stepped()

    async def _in_scope(self) -> None:
        with anyio.CancelScope() as scope:
            self._cancel = scope.cancel
            await self._stepped()
        self.was_cancelled = scope.cancelled_caught

    async def _in_deadline(self) -> None:
        deadline = asyncio.timeout(None)
        self._cancel = partial(deadline.reschedule, 0)
        try:
            async with deadline:
                await self._stepped()
        except TimeoutError:
            self.was_cancelled = deadline.expired()

    def _stepped(self) -> _Stepped:
        return _Stepped(self._scenario(), self._on_step, self._on_cancel)

    def _on_step(self, waits_for: object) -> None:
        """Called at each suspension, before the task knows what the scenario waits for."""
        self.steps += 1
        if self.steps != self._at_step:
            return
        self.injected = True
        if self._mode is Mode.DEADLINE:
            self._cancel()  # it cancels in the next turn of the loop by itself
        elif self._mode is Mode.LATE and isinstance(waits_for, asyncio.Future):
            # First in its list of callbacks: it runs just before the one that resumes the task.
            waits_for.add_done_callback(lambda _: self._cancel())
        else:
            self._loop.call_soon(self._inject)

    def _inject(self) -> None:
        self._cancel()
        if self._mode is Mode.TWICE:
            self._loop.call_soon(self._cancel)

    def _on_cancel(self) -> None:
        self._was_struck = True


class _Stepped:
    """Awaits a coroutine by hand, and tells of each suspension and each cancel."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, object],
        on_step: Callable[[object], None],
        on_cancel: Callable[[], None],
    ) -> None:
        self._coro = coro
        self._on_step = on_step
        self._on_cancel = on_cancel

    def __await__(self) -> Generator[Any, Any, object]:
        resume = partial(self._coro.send, None)
        while True:
            try:
                waits_for = resume()
            except StopIteration as end:
                return end.value
            self._on_step(waits_for)
            try:
                yield waits_for
            except GeneratorExit:
                self._coro.close()
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    self._on_cancel()
                resume = partial(self._coro.throw, error)
            else:
                resume = partial(self._coro.send, None)
