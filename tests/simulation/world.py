"""True time, which gives each host its turn."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.history import History

# Rates differ by so much at most: less than the drift that aiodlock allows for.
RATE_SHARE: Final = 0.0045
# What the turns of a loop that follow at once cost, in true seconds. One that spins is seen.
_TURN_S: Final = 30e-6
_AT_ONCE_MAX: Final = 20
_BURSTS_MAX: Final = 5
# A simulation of some dozens of seconds takes a few thousand turns.
TURNS_MAX: Final = 200_000


class Endless(Exception):
    """The simulation did not come to its end."""


class Clock:
    """A host's view of true time: another beginning, another rate."""

    def __init__(self, *, offset_s: float, rate: float) -> None:
        self.offset_s = offset_s
        self.rate = rate

    def at(self, true_s: float) -> float:
        return self.offset_s + true_s * self.rate

    def true(self, at: float) -> float:
        return (at - self.offset_s) / self.rate


class HostLoop(asyncio.BaseEventLoop):
    """An event loop that the world turns, on its host's clock; there is no I/O in it."""

    _clock_resolution: float
    _ready: Any
    _scheduled: list[Any]
    _thread_id: int | None
    _timer_cancelled_count: int
    _run_once: Callable[[], None]

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self._selector = _NoSelector()
        self._clock_resolution = 1e-6  # More than a float loses on its way through a clock.
        self._thread_id = threading.get_ident()

    def time(self) -> float:
        return self.host.monotonic()

    def turn(self) -> int:
        """Run what is ready, with what that makes ready in turn: how many turns it took."""
        asyncio._set_running_loop(self)
        try:
            turns = 0
            while turns < _AT_ONCE_MAX and (self._ready or not turns):
                self._run_once()
                turns += 1
            return turns
        finally:
            asyncio._set_running_loop(None)

    def due_at(self) -> float | None:
        """On this loop's clock; None: nothing is planned. -inf: something is ready."""
        if self._ready:
            return float("-inf")
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        return timers[0]._when if timers else None

    def timers(self) -> list[str]:
        """What is planned still, cancelled timers apart."""
        return [repr(timer) for timer in self._scheduled if not timer._cancelled]

    def leave(self) -> None:
        """No more turns: its host is gone."""
        self._thread_id = None
        self._ready.clear()
        self._scheduled.clear()
        self.close()

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        return await self.host.connect(args[0], args[1])

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""


class _NoSelector:
    def select(self, timeout: float | None) -> list[object]:
        return []

    def close(self) -> None:
        """Nothing is open."""


class Host:
    """A machine with one process of a user's: it may be stopped, suspended, killed."""

    def __init__(self, world: World, name: str, clock: Clock) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.stopped_until = 0.0
        self.stopped_s = 0.0  # In all, in true time.
        self.errors: list[str] = []
        self._bursts = 0  # In a row, after which something was ready still.
        # By what makes the protocol, and the name of the server.
        self.connect: Callable[[Callable[[], asyncio.Protocol], str], Any]
        self._clock = clock
        self._suspended_s = 0.0
        self._busy_until = 0.0
        self.loop = HostLoop(self)
        self.loop.set_exception_handler(self._note_error)

    def now(self) -> float:
        """The clock of deadlines, which goes on while the machine sleeps."""
        return self._clock.at(self.world.now)

    def monotonic(self) -> float:
        """The clock of timers, which does not."""
        return self._clock.at(self.world.now) - self._suspended_s

    def true(self, at: float) -> float:
        """When the clock of deadlines shows *at*, in true time."""
        return self._clock.true(at)

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Something arrived from outside; it waits while the host is stopped."""
        if not self.is_dead:
            self.loop.call_soon(callback, *args)

    def stop(self, for_s: float, *, suspend: bool) -> None:
        """It stands still, as by SIGSTOP; or sleeps, in which time timers do not go on."""
        self.stopped_until = max(self.stopped_until, self.world.now + for_s)
        self.stopped_s += for_s
        if suspend:
            self._suspended_s += for_s * self._clock.rate

    def resume(self) -> None:
        self.stopped_until = min(self.stopped_until, self.world.now)

    def kill(self) -> None:
        self.is_dead = True

    def due_at(self) -> float | None:
        """When it wants its next turn, in true time."""
        if self.is_dead:
            return None
        at = self.loop.due_at()
        if at is None:
            return None
        earliest = max(self._busy_until, self.stopped_until, self.world.now)
        return max(earliest, self._clock.true(at + self._suspended_s))

    def turn(self) -> int:
        """How many turns of its loop it took.

        Raises:
            Endless: It is never idle.
        """
        self._busy_until = self.world.now + _TURN_S
        turns = self.loop.turn()
        self._bursts = self._bursts + 1 if turns == _AT_ONCE_MAX else 0
        if self._bursts > _BURSTS_MAX:
            raise Endless(f"the loop of {self.name} spins")
        return turns

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context['message']}: {error!r}")


class World:
    """Moves time to the next event, for the network and for every host.

    Order: events by their time, those of one time as they were planned; hosts that are due at one
    time by lot. Within a host asyncio's own order stands, for it promises that.
    """

    def __init__(self, seed: int, history: History) -> None:
        self.now = 0.0
        self.random = random.Random(f"world {seed}")
        self.history = history
        self.hosts: list[Host] = []
        self.turns = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, callback: Callable[..., object], *args: Any) -> None:
        """Call it at that true time."""
        heapq.heappush(self._events, (time, next(self._numbers), callback, args))

    def after(self, pause_s: float, callback: Callable[..., object], *args: Any) -> None:
        self.at(self.now + pause_s, callback, *args)

    def note(self, kind: str, *details: object) -> None:
        """Write it into the history, with the time."""
        self.history.add(self.now, kind, *details)

    def breach(self, rule: str, what: str) -> None:
        """A rule was broken."""
        self.history.breaches.append(f"{rule}: {what} (at {self.now:.6f})")
        self.note("BREACH", rule, what)

    def run(self, *, until: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Until that true time, or until it is over: was it over?

        Raises:
            Endless: It took too many turns.
        """
        while not is_over():
            if not self._step(until):
                self.now = max(self.now, until)
                return is_over()
        return True

    def _step(self, until: float) -> bool:
        at, host = self._next_host()
        event_at = self._events[0][0] if self._events else float("inf")
        if min(at, event_at) > until:
            return False
        if event_at <= at:
            self.now = max(self.now, event_at)
            _, _, callback, args = heapq.heappop(self._events)
            callback(*args)
            return True
        assert host is not None
        if self.turns > TURNS_MAX:
            raise Endless(f"{TURNS_MAX} turns of loops, at {self.now:.3f} s")
        self.now = max(self.now, at)
        self.turns += host.turn()
        return True

    def _next_host(self) -> tuple[float, Host | None]:
        best, chosen, ties = float("inf"), None, 1
        for host in self.hosts:
            at = host.due_at()
            if at is None or at > best:
                continue
            ties = ties + 1 if at == best else 1
            if at < best or self.random.random() * ties < 1:
                best, chosen = at, host
        return best, chosen
