"""Extends leases: those that fall due in one turn of the loop share a call."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, NamedTuple

from redis.exceptions import ClusterCrossSlotError, ResponseError

from .._errors import LockError
from ._api import Acquisition, NoAnswer
from ._calls import Caller
from ._wire import Call, Script, anew, pack, trouble

EXTEND: Final = Script("extend")

# A script stops the server for everybody else: so many take about half a millisecond.
_SHARERS_MAX: Final = 100
_CLOSED: Final = NoAnswer("the client was closed meanwhile")


class _Sharer(NamedTuple):
    """One lease in a call: its two items of the answer come through a future."""

    acquisition: Acquisition
    value: str
    ends_at: float
    answer: asyncio.Future[list[Any] | LockError | NoAnswer]

    def settle(self, answer: list[Any] | LockError | NoAnswer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class _Shared(Call):
    """One call for all of them: each copy of it is for those who still wait when it leaves."""

    __slots__ = ("_asked", "_sharers", "_ttl_ms")

    def __init__(self, sharers: list[_Sharer], ttl_ms: int) -> None:
        first = sharers[0].acquisition
        super().__init__(EXTEND, first.name, first.keys.lock)
        self._sharers = sharers
        self._ttl_ms = ttl_ms
        self._asked: dict[int, list[_Sharer]] = {}

    def parts(self, number: int) -> tuple[int, bytes]:
        # Not for who was released meanwhile: no extension may leave after its release.
        asked = self._asked[number] = self.waiting
        keys = [sharer.acquisition.keys.lock for sharer in asked]
        values = [sharer.value for sharer in asked]
        parts = (str(len(keys)), *keys, str(self._ttl_ms), *values)
        return len(parts), pack(*parts)

    def fits(self, reply: list[Any]) -> bool:
        return len(reply) in [2 * len(asked) for asked in self._asked.values()]

    def heard(self, number: int, reply: Any) -> None:
        if not isinstance(reply, list):
            return
        for n, sharer in enumerate(self._asked[number]):
            is_ours, answer = reply[2 * n : 2 * n + 2]
            # A proxy may send a call to the server of its first key: "not ours" is asked alone.
            if is_ours or self.is_alone:
                sharer.settle([is_ours, answer])

    @property
    def waiting(self) -> list[_Sharer]:
        """Those who have no answer, and have not left."""
        return [sharer for sharer in self._sharers if not sharer.answer.done()]

    @property
    def is_alone(self) -> bool:
        """Whether it was made for one lease."""
        return len(self._sharers) == 1

    def apart(self) -> list[_Shared]:
        """A call for each of those who still wait."""
        return [_Shared([sharer], self._ttl_ms) for sharer in self.waiting]

    def fail(self, error: LockError | NoAnswer) -> None:
        """Nobody who still waits gets an answer."""
        for sharer in self._sharers:
            sharer.settle(error)


class Extensions:
    """Asks for extensions: those that fall due in one turn of the loop share a call.

    They must ask for the same ttl, and have about as much time. Bound: as many wait here as there
    are extensions under way.

    Args:
        may_share: Whether all keys are on one server.
    """

    def __init__(self, caller: Caller, *, may_share: bool) -> None:
        self._caller = caller
        self._sharers_max = _SHARERS_MAX if may_share else 1
        self._loop = asyncio.get_running_loop()
        # By ttl, in ms, with the power of two of the seconds that each has: the call lasts as long
        # as the shortest of them. Emptied in each turn.
        self._due: dict[tuple[int, int], list[_Sharer]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def ask(
        self, acquisition: Acquisition, value: str, ttl_ms: int, within: float
    ) -> list[Any]:
        """1 with the ms left, or 0 with what stands in the key.

        Raises:
            NoAnswer, NotAllowedError, NameTakenError: As a store does.
        """
        answer = self._loop.create_future()
        sharer = _Sharer(acquisition, value, self._loop.time() + within, answer)
        self._add(sharer, ttl_ms, within)
        reply: list[Any] | LockError | NoAnswer = await answer
        if isinstance(reply, LockError | NoAnswer):
            raise anew(reply, acquisition.name)
        if isinstance(reply[1], Exception):
            raise trouble(reply[1], acquisition.name) from reply[1]
        return reply

    async def aclose(self) -> None:
        """Every task has ended."""
        self._is_closed = True
        for task in tuple(self._asking):
            task.cancel()
        if self._asking:
            await asyncio.wait(tuple(self._asking))

    def _add(self, sharer: _Sharer, ttl_ms: int, within: float) -> None:
        kind = ttl_ms, math.frexp(within)[1]
        sharers = self._due.get(kind)
        if sharers is None:
            sharers = self._due[kind] = []
            self._loop.call_soon(self._send, kind, sharers)
        sharers.append(sharer)
        if len(sharers) >= self._sharers_max:
            del self._due[kind]

    def _send(self, kind: tuple[int, int], sharers: list[_Sharer]) -> None:
        if self._due.get(kind) is sharers:
            del self._due[kind]
        call = _Shared(sharers, kind[0])
        if self._is_closed:
            call.fail(_CLOSED)
        else:
            self._begin(call, min(sharer.ends_at for sharer in sharers))

    def _begin(self, call: _Shared, ends_at: float) -> None:
        task = self._loop.create_task(self._ask(call, ends_at), name="aiodlock extending")
        self._asking.add(task)

        def end(task: asyncio.Task[None]) -> None:
            # Not by the task itself: it may be cancelled before its first step.
            self._asking.discard(task)
            call.fail(_CLOSED)

        task.add_done_callback(end)

    async def _ask(self, call: _Shared, ends_at: float) -> None:
        if not call.waiting:
            return
        try:
            await self._caller.reply(call, ends_at - self._loop.time())
        except (NoAnswer, LockError) as error:
            # What the server says about one key must not end the leases of the others.
            if call.is_alone or not isinstance(error.__cause__, ResponseError):
                call.fail(error)
            elif isinstance(error.__cause__, ClusterCrossSlotError):
                self._sharers_max = 1  # A cluster behind a client that knows only one server.
        await asyncio.gather(*(self._ask(one, ends_at) for one in call.apart()))
