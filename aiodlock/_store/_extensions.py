"""Extends leases: those that fall due in one turn of the loop share a call."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ._api import Acquisition, NoAnswer
from ._calls import Caller
from ._wire import Call, Script

EXTEND: Final = Script("extend")

# A script stops the server for everybody else: so many take about half a millisecond.
_SHARERS_MAX: Final = 100


class _Extension(NamedTuple):
    """One lease of several in a call; `answer` is None where it is to ask alone."""

    acquisition: Acquisition
    value: str
    ends_at: float
    answer: asyncio.Future[Sequence[Any] | None]

    def settle(self, answer: Sequence[Any] | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Extensions:
    """Ten thousand leases of one client are a hundred calls in each third of their ttl.

    Args:
        may_share: Whether all keys are on one server.
    """

    def __init__(self, caller: Caller, *, may_share: bool) -> None:
        self._caller = caller
        self._may_share = may_share
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, list[_Extension]] = {}  # By ttl, in ms; emptied in each turn.

    async def ask(
        self, acquisition: Acquisition, value: str, ttl_ms: int, within: float
    ) -> Sequence[Any]:
        """1 with the ms left, or 0 with what stands in the key.

        Raises:
            NoAnswer, NotAllowedError: As a store does.
        """
        if self._may_share:
            ends_at = self._loop.time() + within
            answer = await self._share(acquisition, value, ttl_ms, ends_at)
            if answer is not None:
                return answer
            within = ends_at - self._loop.time()
            if within <= 0:
                raise NoAnswer("no reply in time")
        alone: list[Any] = await self._caller.reply(_call([(acquisition, value)], ttl_ms), within)
        return alone

    def _share(
        self, acquisition: Acquisition, value: str, ttl_ms: int, ends_at: float
    ) -> asyncio.Future[Sequence[Any] | None]:
        sharers = self._due.get(ttl_ms)
        if sharers is None:
            sharers = self._due[ttl_ms] = []
            self._loop.call_soon(self._send, ttl_ms, sharers)
        extension = _Extension(acquisition, value, ends_at, self._loop.create_future())
        sharers.append(extension)
        if len(sharers) == _SHARERS_MAX:
            del self._due[ttl_ms]
        return extension.answer

    def _send(self, ttl_ms: int, sharers: list[_Extension]) -> None:
        if self._due.get(ttl_ms) is sharers:
            del self._due[ttl_ms]
        # Whose watchdog was stopped meanwhile: no extension may leave after the release.
        sharers = [extension for extension in sharers if not extension.answer.done()]
        if not sharers:
            return
        call = _call([(extension.acquisition, extension.value) for extension in sharers], ttl_ms)
        ends_at = min(extension.ends_at for extension in sharers)
        reply = self._caller.begin(call, ends_at)
        if reply is None:
            _share_out(sharers, None)
        else:
            reply.add_done_callback(functools.partial(_share_reply, sharers))


def _call(leases: Sequence[tuple[Acquisition, str]], ttl_ms: int) -> Call:
    keys = [acquisition.keys.lock for acquisition, _ in leases]
    values = [value for _, value in leases]
    return Call.of(EXTEND, leases[0][0].name, keys, str(ttl_ms), *values)


def _share_reply(sharers: list[_Extension], reply: asyncio.Future[Any]) -> None:
    answers = reply.result()
    _share_out(sharers, None if isinstance(answers, Exception) else answers)


def _share_out(sharers: list[_Extension], answers: Sequence[Any] | None) -> None:
    """Two items for each; where a call of several failed, each of them is to ask alone."""
    for n, extension in enumerate(sharers):
        extension.settle(None if answers is None else answers[2 * n : 2 * n + 2])
