"""One of the independent servers of a quorum: asked once, spared while it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from redis.exceptions import ResponseError

from .. import _clock
from .._cleanup import Background
from .._errors import LockError, NameTakenError, NotAllowedError
from ._api import NoAnswer
from ._calls import Caller
from ._router import Router
from ._wire import Call, trouble

# Who has been silent for so long is not asked more until it says something: a dead node must not
# collect requests. Bound: what is asked in this time, of each node.
_PATIENCE_S: Final = 0.1
# Who failed is asked again after a pause, which doubles with each failure in a row.
_PAUSE_FIRST_S: Final = 0.02
_PAUSE_MOST_S: Final = 1.0

# Is told the reply, or why there is none.
OnAnswer: TypeAlias = Callable[["list[Any] | LockError | NoAnswer"], None]


class Node:
    """A server with the connection to it.

    Args:
        label: What people call it: its address.
        router: Makes the router, given what to call when a connection was lost.
    """

    def __init__(
        self,
        label: str,
        router: Callable[[Callable[[], None]], Router],
        background: Background,
        *,
        channel: str,
        request_timeout: float,
    ) -> None:
        self.label = label
        self._loop = asyncio.get_running_loop()
        self._background = background
        self._router = router(ignore)
        self._caller = Caller(
            self._router,
            background,
            channel=channel,
            request_timeout=request_timeout,
            on_mute=ignore,  # Nobody is handed anything here.
            asks_once=True,  # One that is read-only or full is as good as dead.
        )
        # What is not answered yet, the oldest first: since when, and how it will be.
        self._asked: dict[int, tuple[float, asyncio.Future[Any]]] = {}
        self._number = 0
        self._heard_at = self._loop.time()
        self._failures = 0  # In a row.
        self._again_at = 0.0
        self._trouble: LockError | NoAnswer = NoAnswer("it has not answered yet")  # The last one.

    @property
    def is_spared(self) -> bool:
        """Whether it is better not to ask now."""
        now = self._loop.time()
        if self._failures:
            return now < self._again_at or bool(self._asked)  # One finds out for all.
        for asked_at, _ in self._asked.values():
            return now - max(asked_at, self._heard_at) > _PATIENCE_S
        return False

    @property
    def spared(self) -> LockError | NoAnswer:
        """Why it is not asked."""
        if isinstance(self._trouble, NotAllowedError):
            return self._trouble
        return NoAnswer(f"not asked, for {self._trouble}")

    def ask(
        self, call: Call, within: float, then: OnAnswer, *, insists: bool = False
    ) -> asyncio.Future[Any]:
        """Send *call*, and call *then* once; what insists is sent again until it is answered.

        What is returned can be cancelled, unless it insists: then nothing more is sent for it.
        """
        self._number += 1
        number, now = self._number, self._loop.time()
        answer = self._caller.begin(call, within)
        if answer is None:
            answer = self._patiently(call, within, insists=insists)
            insists = False
        self._asked[number] = now, answer
        ends_at = now + within
        answer.add_done_callback(partial(self._hear, number, call, ends_at, then, insists))
        return answer

    async def aclose(self) -> None:
        """Everything is answered, each in its own time; the connection is given back."""
        while self._asked:
            await asyncio.wait([answer for _, answer in self._asked.values()])
        await self._router.aclose()

    def _patiently(self, call: Call, within: float, *, insists: bool) -> asyncio.Future[Any]:
        """With all that it takes: connecting, asking what we may do."""
        work = self._reply(call, within, insists=insists)
        return self._background.start(work, f"asking {self.label} about", call.name)

    async def _reply(self, call: Call, within: float, *, insists: bool) -> object:
        try:
            return await self._caller.reply(call, within, insists=insists)
        except Exception as error:  # Also what a user's credentials raise: `_hear` names it.
            return error

    def _hear(
        self,
        number: int,
        call: Call,
        ends_at: float,
        then: OnAnswer,
        insists: bool,
        answered: asyncio.Future[Any],
    ) -> None:
        asked_at, _ = self._asked.pop(number)
        if answered.cancelled():
            then(NoAnswer("it was given up"))
            return
        answer = answered.result()
        if isinstance(answer, Exception) and not isinstance(answer, LockError | NoAnswer):
            answer, cause = trouble(answer, call.name), answer
            answer.__cause__ = cause
        within = ends_at - self._loop.time()
        if insists and isinstance(answer, NoAnswer) and within > 0:
            again = self._patiently(call, within, insists=True)
            self._asked[number] = self._loop.time(), again
            again.add_done_callback(partial(self._hear, number, call, ends_at, then, False))
            return
        self._note(answer, asked_at)
        then(answer)

    def _note(self, answer: list[Any] | LockError | NoAnswer, asked_at: float) -> None:
        """Its state of health."""
        now = self._loop.time()
        # A key that is not a lock says nothing about the server.
        if isinstance(answer, list | NameTakenError):
            self._heard_at = now
            self._failures, self._again_at = 0, 0.0
            return
        if was_said(answer):
            self._heard_at = now
        elif answer.__cause__ is None and now - asked_at < _PATIENCE_S:
            return  # It was given too little time.
        if now >= self._again_at:  # Those that fail together are one failure.
            self._failures += 1
            pause = _clock.growing(self._failures, first_s=_PAUSE_FIRST_S, most_s=_PAUSE_MOST_S)
            self._again_at = now + pause
        self._trouble = answer


def was_said(error: LockError | NoAnswer) -> bool:
    """Whether the server itself said so: then what was asked was not done."""
    return isinstance(error.__cause__, ResponseError)


def ignore(*_: object) -> None:
    """Nobody waits here: for a message, for a connection, in a queue."""
