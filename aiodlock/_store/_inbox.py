"""One subscriber per client: brings the messages that wake its waiters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from .. import _clock
from ._api import NoAnswer
from ._wire import FAILURES, Held, Source, command, text, trouble

_log = logging.getLogger("aiodlock")

_PAUSE_MIN_S: Final = 0.05
_PAUSE_MAX_S: Final = 5.0


class Inbox:
    """A subscription that is kept while somebody needs it: made anew when it was lost.

    Without it waiting goes on by polling: nothing here is fatal to a waiter.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        channel: str,
        *,
        request_timeout: float,
        on_message: Callable[[str], None],
        on_hear: Callable[[], None],
        on_deaf: Callable[[str], None],
        is_needed: Callable[[], bool],
    ) -> None:
        self.hears = False
        self._source = source
        self._channel = channel
        self._request_timeout = request_timeout
        self._on_message = on_message
        self._on_hear = on_hear
        self._on_deaf = on_deaf
        self._is_needed = is_needed
        self._task: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._pong: asyncio.Future[None] | None = None
        self._held: Held | None = None
        self._failures = 0
        self._is_closed = False

    def start(self) -> None:
        """Subscribe, if that is not done or under way."""
        if self._is_closed:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="aiodlock inbox")

    def doubt(self) -> None:
        """A message is missing: ask whether the server still hears us; one question at a time."""
        if self.hears and self._pong is None:
            loop = asyncio.get_running_loop()
            self._pong = loop.create_future()
            self._probe = loop.create_task(self._ask(self._pong), name="aiodlock inbox probe")

    async def aclose(self) -> None:
        """Every task has ended; the connection is back in the pool."""
        self._is_closed = True
        for task in (self._probe, self._task):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))

    async def _run(self) -> None:
        """Until nobody needs it any more; pauses grow to `_PAUSE_MAX_S` while it cannot be had."""
        loop = asyncio.get_running_loop()
        while self._is_needed():
            if self._failures:
                await asyncio.sleep(
                    _clock.growing(self._failures, first_s=_PAUSE_MIN_S, most_s=_PAUSE_MAX_S)
                )
            began_at = loop.time()
            was_heard, cause = await self._listen()
            # One that is cut again and again must not be had anew again and again.
            stood = was_heard and loop.time() - began_at > _PAUSE_MAX_S
            self._failures = 1 if stood else self._failures + 1
            if not was_heard:
                self._on_deaf(str(cause) or type(cause).__name__)

    async def _listen(self) -> tuple[bool, BaseException]:
        """One subscription from its beginning to its end: did it stand, and why is it over."""
        was_heard = False
        try:
            async with asyncio.timeout(self._request_timeout):
                self._held = held = await Held.take(self._source())
                await held.send(command("SUBSCRIBE", self._channel))
                _checked(await held.read(pushed=True), self._channel)
            was_heard = self.hears = True
            self._on_hear()
            while True:
                self._read(await held.read(pushed=True))
        except (NoAnswer, *FAILURES) as error:
            return was_heard, error
        finally:
            self.hears = False
            if self._held is not None:
                held, self._held = self._held, None
                await held.give_back()

    def _read(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] in (b"message", "message"):
            self._on_message(text(reply[2]))
        elif self._pong is not None and not self._pong.done():
            self._pong.set_result(None)

    async def _ask(self, pong: asyncio.Future[None]) -> None:
        try:
            async with asyncio.timeout(self._request_timeout):
                if self._held is not None:
                    await self._held.send(command("PING"))
                await pong
        except FAILURES:
            _log.warning("the inbox is deaf, though connected: subscribing again")
            if self._held is not None:
                await self._held.cut()
        finally:
            self._pong = None


def _checked(reply: Any, channel: str) -> None:
    """Raise NoAnswer unless *reply* confirms the subscription."""
    if isinstance(reply, BaseException):
        raise NoAnswer(str(trouble(reply, channel))) from reply
