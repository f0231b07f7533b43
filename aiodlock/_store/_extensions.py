"""Extends leases: those that fall due in one turn of the loop share a call."""

from __future__ import annotations

import asyncio
from typing import Any, Final, NamedTuple

from .._errors import LockError
from ._api import Acquisition, NoAnswer
from ._calls import Caller
from ._wire import Call, Script, count_of, pack

EXTEND: Final = Script("extend")

# A script stops the server for everybody else: so many take about half a millisecond.
_SHARERS_MAX: Final = 100


class _Extension(NamedTuple):
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

    __slots__ = ("_asked", "_extensions", "_ttl_ms")

    def __init__(self, extensions: list[_Extension], ttl_ms: int) -> None:
        first = extensions[0].acquisition
        super().__init__(EXTEND, first.name, first.keys.lock, b"", parts=0)
        self._extensions = extensions
        self._ttl_ms = ttl_ms
        self._asked: dict[int, list[_Extension]] = {}

    def body(self, number: int) -> bytes:
        # Not for who was released meanwhile: no extension may leave after its release.
        asked = [extension for extension in self._extensions if not extension.answer.done()]
        self._asked[number] = asked
        keys = [extension.acquisition.keys.lock for extension in asked]
        values = [extension.value for extension in asked]
        self.count = count_of(2 + 2 * len(asked))
        return pack(str(len(keys)), *keys, str(self._ttl_ms), *values)

    def heard(self, number: int, reply: Any) -> None:
        if isinstance(reply, list):
            for n, extension in enumerate(self._asked[number]):
                extension.settle(reply[2 * n : 2 * n + 2])

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return all(extension.answer.done() for extension in self._extensions)

    def fail(self, error: LockError | NoAnswer) -> None:
        """Nobody who still waits gets an answer."""
        for extension in self._extensions:
            extension.settle(error)


class Extensions:
    """Ten thousand leases of one client are a hundred calls in each third of their ttl.

    Args:
        may_share: Whether all keys are on one server.
    """

    def __init__(self, caller: Caller, *, may_share: bool) -> None:
        self._caller = caller
        self._sharers_max = _SHARERS_MAX if may_share else 1
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[_Extension]] = {}  # By ttl, in ms; emptied in each turn.
        self._asking: set[asyncio.Task[None]] = set()

    async def ask(
        self, acquisition: Acquisition, value: str, ttl_ms: int, within: float
    ) -> list[Any]:
        """1 with the ms left, or 0 with what stands in the key.

        Raises:
            NoAnswer, NotAllowedError: As a store does.
        """
        answer = self._loop.create_future()
        self._add(_Extension(acquisition, value, self._loop.time() + within, answer), ttl_ms)
        reply: list[Any] | LockError | NoAnswer = await answer
        # Anew, for each of those who share it.
        if isinstance(reply, LockError):
            raise type(reply)(str(reply), name=acquisition.name) from reply.__cause__
        if isinstance(reply, NoAnswer):
            raise NoAnswer(str(reply)) from reply.__cause__
        return reply

    async def aclose(self) -> None:
        """Every task has ended."""
        for task in tuple(self._asking):
            task.cancel()
        if self._asking:
            await asyncio.wait(tuple(self._asking))

    def _add(self, extension: _Extension, ttl_ms: int) -> None:
        sharers = self._due.get(ttl_ms)
        if sharers is None:
            sharers = self._due[ttl_ms] = []
            self._loop.call_soon(self._send, ttl_ms, sharers)
        sharers.append(extension)
        if len(sharers) == self._sharers_max:
            del self._due[ttl_ms]

    def _send(self, ttl_ms: int, sharers: list[_Extension]) -> None:
        if self._due.get(ttl_ms) is sharers:
            del self._due[ttl_ms]
        asking = self._ask(_Shared(sharers, ttl_ms), min(sharer.ends_at for sharer in sharers))
        task = self._loop.create_task(asking, name="aiodlock extending")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, call: _Shared, ends_at: float) -> None:
        if call.is_over:
            return
        try:
            await self._caller.reply(call, ends_at - self._loop.time())
        except (NoAnswer, LockError) as error:
            call.fail(error)
        finally:
            call.fail(NoAnswer("the client was closed meanwhile"))
