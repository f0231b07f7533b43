"""Many callers, one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from .. import _clock
from ._api import NoAnswer
from ._wire import FAILURES, Call, Held, Script, Source, as_reply

# A timer that is later than this says that the loop stood still, not the server.
_STALL_S: Final = 0.05
_GRAIN_S: Final = 0.005
# The longest pause before a connection is tried again: a last try of 0.1 s has room for it.
_PACE_S: Final = 0.05
# So many requests are written before the loop's turn is over: the server begins while we go on. (Of
# 8 to 100, 32 gave the most cycles per second with 100 and with 1000 tasks.)
_BATCH: Final = 32


class Request:
    """One copy of a call, answered through a future or by the clock."""

    __slots__ = (
        "answer",
        "call",
        "ends_at",
        "evaluates",
        "fallback",
        "late_at",
        "on_late",
        "sent_at",
    )

    def __init__(
        self,
        call: Call,
        answer: asyncio.Future[Any],
        sent_at: float,
        ends_at: float,
        on_late: Callable[[Request], None] | None,
    ) -> None:
        self.call = call
        self.answer = answer
        self.sent_at = sent_at
        self.ends_at = ends_at
        self.late_at = ends_at if on_late is None else (sent_at + ends_at) / 2
        self.on_late = on_late
        self.evaluates = False
        self.fallback: object = None  # What to settle for, if no reply of its own comes.

    def settle(self, reply: object) -> None:
        """Answer, unless the caller has left."""
        if not self.answer.done():
            self.answer.set_result(reply)


class Link:
    """One connection: few writes for many callers, one reader, replies in order.

    Bound: as many requests wait here as there are callers, plus what was abandoned within the
    last `request_timeout`: a connection that is silent for longer is given up.
    """

    def __init__(
        self, number: int, held: Held, *, request_timeout: float, on_lost: Callable[[Link], None]
    ) -> None:
        self.number = number
        self.has_answered = False
        self.is_suspect = False  # A request ran out of time, and nothing was heard since.
        self._held = held
        self._request_timeout = request_timeout
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outstanding: deque[Request] = deque()
        self._unwritten: list[bytes] = []
        self._loading: set[Script] = set()
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._heard_at = self._loop.time()
        self._quiet_from = self._heard_at  # Since when a reply could have come.
        self._has_grace = True
        self.closing: asyncio.Task[None] | None = None
        # An eager task may end before it is known here.
        self._reader: asyncio.Task[None] | None = None
        self._reader = self._loop.create_task(self._read(), name="aiodlock reader")

    def call(
        self, call: Call, ends_at: float, on_late: Callable[[Request], None] | None = None
    ) -> asyncio.Future[Any]:
        """Hand *call* over, without a pause; the future brings a reply, or an exception.

        *on_late* is called once when half of the time is over and the connection was silent
        since: it may find the answer elsewhere, and `settle` the request.
        """
        now = self._loop.time()
        request = Request(call, self._loop.create_future(), now, ends_at, on_late)
        if self.closing is not None:
            request.settle(NoAnswer("the connection was lost"))
            return request.answer
        call.sent(self.number)
        if self._timer is None or self._due_at > request.late_at:
            self._watch(request.late_at)
        self._queue(request, call.request(self.number))
        return request.answer

    def drop(self, cause: Exception | str) -> None:
        """Give the connection up; whoever waits for a reply learns that there is none."""
        if self.closing is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        for request in self._outstanding:
            request.settle(request.fallback or _lost(cause))
        self._outstanding.clear()
        self.closing = self._loop.create_task(self._close(), name="aiodlock closing")
        self._on_lost(self)

    def _queue(self, request: Request, packed: bytes) -> None:
        """Alone, it is written at once; among others with them, in this turn of the loop."""
        self._outstanding.append(request)
        self._unwritten.append(packed)
        if len(self._outstanding) == 1:
            self._write()
        elif len(self._unwritten) == 1:
            self._loop.call_soon(self._write)
        elif len(self._unwritten) == _BATCH:
            self._write()

    def _write(self) -> None:
        """Send what is unwritten: at once, but for a transport that is full."""
        if not self._unwritten or self._sending is not None or self.closing is not None:
            return
        if not self._held.is_connected:
            # redis-py would connect it anew, in whichever task we are, and behind our back.
            self.drop("the connection was closed")
            return
        if len(self._outstanding) <= len(self._unwritten):
            self._quiet_from = self._loop.time()
        packed = self._unwritten[0] if len(self._unwritten) == 1 else b"".join(self._unwritten)
        self._unwritten.clear()
        sending = self._held.send(packed)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            pass  # It is done.
        except Exception as error:  # A transport may fail in ways of its own.
            self.drop(error)
        else:
            rest = self._send_rest(_Begun(sending, waits_for))
            self._sending = self._loop.create_task(rest, name="aiodlock writer")

    async def _send_rest(self, sending: _Begun) -> None:
        try:
            await sending
        except Exception as error:
            self.drop(error)
        except asyncio.CancelledError:
            self.drop("its writer was cancelled")
            raise
        self._sending = None
        self._write()

    async def _read(self) -> None:
        try:
            while self.closing is None:
                try:
                    reply = await self._held.read_or_raise()
                except RedisError as error:
                    reply = as_reply(error)
                self._answer(reply)
        except Exception as error:
            self.drop(error)
        except asyncio.CancelledError:
            self.drop("its reader was cancelled")
            raise

    async def _close(self) -> None:
        tasks = [task for task in (self._sending, self._reader) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._held.give_back()

    def _answer(self, reply: Any) -> None:
        if not self._outstanding:
            return self.drop("the server sent a reply that nobody asked for")
        request = self._outstanding.popleft()
        self._heard_at = self._loop.time()
        self._has_grace = True
        self.has_answered = True
        self.is_suspect = False
        if request.evaluates:
            self._loading.discard(request.call.script)
        if isinstance(reply, NoScriptError) and not request.evaluates:
            # Never for a caller who left: an abandoned acquire must not arrive after its release.
            return None if request.answer.done() else self._send_again(request)
        if isinstance(reply, Exception) and _is_displaced(reply):
            # New credentials, or a new primary, come with a new connection only.
            request.settle(_lost(reply))
            # The requests behind it were not answered: what they asked for may have been done.
            return self.drop(str(reply))
        reply = request.call.checked(reply)
        if isinstance(reply, NoAnswer):
            request.settle(reply)
            return self.drop(reply)
        try:
            request.call.heard(self.number, reply)
        except Exception as error:
            request.settle(_lost(error))  # Nothing else would: it is not outstanding any more.
            raise
        return request.settle(reply)

    def _send_again(self, request: Request) -> None:
        """With the text once per script; the rest go by its digest behind it."""
        request.evaluates = request.call.script not in self._loading
        if request.evaluates:
            self._loading.add(request.call.script)
        packed = request.call.request(self.number, by_text=request.evaluates)
        self._queue(request, packed)

    def _watch(self, at: float) -> None:
        """See to it that `_on_time` runs at *at* or before: one timer for all requests."""
        if self._timer is not None:
            if self._due_at <= at:
                return
            self._timer.cancel()
        # Kept by us: uvloop's timers do not tell, where they are due at once.
        self._due_at = at
        self._timer = self._loop.call_at(at, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = self._loop.time()
        is_late = now - self._due_at > _STALL_S
        if is_late and self._has_grace:
            # The loop stood still, not the server: replies may lie unread in the socket, and
            # requests unwritten. Once: a loop that is always late must time out as well.
            self._has_grace = False
            self._quiet_from = now
            self._watch(now + _STALL_S)
        else:
            self._has_grace = self._has_grace or not is_late
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Answer who ran out of time; drop a connection that is silent."""
        if not self._outstanding:
            return
        for request in self._outstanding:
            if request.late_at <= now and not request.answer.done():
                self._judge_late(request, now)
        silent_at = max(self._heard_at, self._quiet_from) + self._request_timeout
        if silent_at <= now:
            self.drop(f"no reply for {self._request_timeout:g} s")
        else:
            lates = (r.late_at for r in self._outstanding if not r.answer.done())
            # Thousands of deadlines a moment apart are one look.
            self._watch(max(now + _GRAIN_S, min(itertools.chain(lates, (silent_at,)))))

    def _judge_late(self, request: Request, now: float) -> None:
        is_silent = self._heard_at <= request.sent_at
        self.is_suspect = self.is_suspect or is_silent
        if request.ends_at <= now:
            request.settle(request.fallback or NoAnswer("no reply in time"))
            return
        request.late_at = request.ends_at
        if is_silent and request.on_late is not None:
            request.on_late(request)


class _Begun:
    """The rest of a coroutine that was begun outside of a task.

    What its first step waits for is handed on to the task that awaits this. (redis-py's send may
    not ask for its task, then: its time-outs are off, see `Held`.)
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(sent)
        except StopIteration:
            return


def _is_displaced(reply: Exception) -> bool:
    """Whether *reply* says that this connection, or its server, is not the right one any more."""
    if isinstance(reply, AuthenticationError | ReadOnlyError):
        return True
    # What a demoted primary of a cluster says to a connection that may read from replicas.
    return isinstance(reply, ResponseError) and "non local key" in str(reply)


def _lost(cause: Exception | str) -> NoAnswer:
    lost = NoAnswer(f"the connection was lost: {cause}")
    lost.__cause__ = cause if isinstance(cause, Exception) else None
    return lost


class Multiplexer:
    """The link that carries requests now, made anew when it was lost and one is needed."""

    def __init__(
        self,
        source: Source,
        numbers: Iterator[int],
        *,
        request_timeout: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.link: Link | None = None
        self._source = source
        self._request_timeout = request_timeout
        self._on_lost = on_lost
        self._numbers = numbers  # None is used twice.
        self._connecting: asyncio.Task[BaseException | None] | None = None
        self._failures = 0
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    async def linked(self, within: float) -> Link:
        """The link, connected for all who ask at once.

        Raises:
            NoAnswer: Not within *within* seconds.
            Exception: What redis-py said when it failed.
        """
        if self._is_closed:
            raise NoAnswer("the client was closed meanwhile")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.get_running_loop().create_task(
                self._connect(), name="aiodlock connecting"
            )
        connecting = self._connecting
        await asyncio.wait((connecting,), timeout=within)
        if self.link is not None:
            return self.link
        if not connecting.done() or connecting.cancelled():
            raise NoAnswer("no connection in time")
        raise connecting.result() or NoAnswer("the connection was lost at once")

    async def aclose(self) -> None:
        """Every task has ended, and every connection is back in the pool."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
            self._connecting = None
        if self.link is not None:
            self.link.drop("closed")
        while self._closing:
            await asyncio.wait(tuple(self._closing))

    async def _connect(self) -> BaseException | None:
        """Never raises: several may wait for this, or nobody.

        Paced, for every waiter has a pace of its own: thousands would storm a server that comes up.
        """
        try:
            if self._failures:
                await asyncio.sleep(_clock.growing(self._failures, first_s=0.01, most_s=_PACE_S))
            held = await self._take()
        except FAILURES as error:
            self._failures += 1
            return error
        link = Link(
            next(self._numbers),
            held,
            request_timeout=self._request_timeout,
            on_lost=self._forget,
        )
        if link.closing is None:
            self.link = link
        return None

    async def _take(self) -> Held:
        """A connection, in `request_timeout`; the first try has a quarter of it.

        From 3.12 on, asyncio books a write to a transport that was lost under its descriptor. A
        new socket with that number then hears nothing; to give it up clears the books.
        """
        try:
            async with asyncio.timeout(self._request_timeout / 4):
                return await Held.take(self._source)
        except TimeoutError:
            async with asyncio.timeout(self._request_timeout * 3 / 4):
                return await Held.take(self._source)

    def _forget(self, link: Link) -> None:
        if self.link is link:
            self.link = None
        self._failures = 0 if link.has_answered else self._failures + 1
        assert link.closing is not None
        self._closing.add(link.closing)
        link.closing.add_done_callback(self._closing.discard)
        self._on_lost()
