"""Gets a script call answered, over whichever connection can do it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from redis.exceptions import AskError, ClusterDownError, MovedError, NoScriptError, ResponseError

from .._cleanup import Background
from .._errors import LockError
from ._api import NoAnswer
from ._mux import Link, Request
from ._router import Router
from ._wire import FAILURES, Held, Script, Source, command, pack, text, trouble

_T = TypeVar("_T")

_PAUSE_S: Final = 0.05
# Who stands further back in the queue for the borrowed connection has no chance in its time.
_BORROWERS_MAX: Final = 100
_NOT_NEEDED: Final = NoAnswer("it is not needed any more")
# By its text, which a server that has lost its scripts will want, and which may be forbidden.
_PROBE: Final = Script("probe", keys=1, args=1, by_text=True)


class Call:
    """One script call. Copies of it may go over several connections, each with its number."""

    may_repeat = True
    """Whether a copy may go over another connection while the first is not answered."""
    takes = False
    """Whether it may get a lock, which somebody must then be allowed to release."""

    def __init__(self, script: Script, key: str, name: str, body: bytes) -> None:
        self.script = script
        self.key = key
        self.name = name
        self._body = body

    def body(self, number: int) -> bytes:
        """What is sent over connection *number*."""
        return self._body

    def is_certain(self, reply: Any) -> bool:
        """Whether a copy's reply is the answer, while the first copy has none."""
        return True

    def sent(self, number: int) -> None:
        """A copy goes out."""

    def heard(self, number: int, reply: Any) -> None:
        """A copy was answered, although the caller may have left."""


class Caller:
    """Sends calls over the link of their key; past it where it is silent, or sends us away."""

    def __init__(
        self,
        router: Router,
        background: Background,
        *,
        channel: str,
        request_timeout: float,
        on_mute: Callable[[str], None],
    ) -> None:
        self._router = router
        self._request_timeout = request_timeout
        self._background = background
        self._channel = channel
        self._on_mute = on_mute
        self._allowed: set[str] = set()
        self._probes: dict[str, asyncio.Task[object]] = {}
        # One borrowed connection at a time: the pool may have room for no more.
        self._borrowing = asyncio.Lock()
        self._borrowers = 0

    async def reply(self, call: Call, within: float) -> Any:
        """What the script returned, from one try.

        Raises:
            NoAnswer, NotAllowedError, NameTakenError: As a store does.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        link = self._router.link(call.key) or await self._linked(call, within)
        if call.takes and (node := self._router.node(call.key)) not in self._allowed:
            await self._probe(node, call, end)
            link = self._router.link(call.key) or await self._linked(call, end - loop.time())
        reply = await self._around(call, link, end) if link.is_suspect else None
        if reply is None:
            call.sent(link.number)
            reply = await link.call(
                call.script,
                call.body(link.number),
                within=end - loop.time(),
                on_reply=functools.partial(call.heard, link.number),
                on_late=functools.partial(self._repeat, call) if call.may_repeat else None,
            )
        if isinstance(reply, AskError):
            reply = await self._redirected(call, reply, end)
        return self._usable(reply, call.name)

    async def _linked(self, call: Call, within: float) -> Link:
        try:
            return await self._router.linked(call.key, within)
        except FAILURES as error:  # A NoAnswer is fit to be raised as it is.
            raise trouble(error, call.name) from error

    async def _around(self, call: Call, link: Link, end: float) -> Any:
        """The reply from elsewhere, in half of the time; None: let the silent link try.

        It may only be slow, and there may be no room for another connection.
        """
        if not call.may_repeat or self._borrowers >= _BORROWERS_MAX:
            return None
        half = (asyncio.get_running_loop().time() + end) / 2
        try:
            source = await self._source(call, half)
        except NoAnswer:
            return None
        reply = await self._elsewhere(call, source, half, unless=lambda: not link.is_suspect)
        is_reply = not isinstance(reply, Exception) or isinstance(reply, ResponseError)
        return reply if is_reply else None

    async def _probe(self, node: str, call: Call, end: float) -> None:
        """Once for each node: may we do what locks need? Refused, it is asked again next time."""
        probe = self._probes.get(node)
        if probe is None:
            about = Call(_PROBE, call.key, call.name, pack(f"{call.key}:probe", self._channel))
            probe = self._background.start(self._rights(about), "asking what we may do")
            self._probes[node] = probe
            probe.add_done_callback(lambda _: self._probes.pop(node, None))
        await asyncio.wait((probe,), timeout=end - asyncio.get_running_loop().time())
        if not probe.done() or probe.cancelled():
            raise NoAnswer("no reply in time")
        problem = probe.result()
        if isinstance(problem, LockError):  # Anew, for each with the name that it asked for.
            raise type(problem)(str(problem), name=call.name) from problem.__cause__
        if isinstance(problem, NoAnswer):
            raise NoAnswer(str(problem)) from problem.__cause__
        self._allowed.add(node)

    async def _rights(self, about: Call) -> Exception | None:
        """Why we may not do what locks need, for all who wait for it."""
        try:
            (refusal,) = await insist(lambda left: self.reply(about, left), self._request_timeout)
        except (NoAnswer, LockError) as error:
            return error
        if refusal:
            self._on_mute(text(refusal))
        return None

    async def _source(self, call: Call, end: float) -> Source:
        try:
            async with asyncio.timeout_at(end):
                return await self._router.source(call.key)
        except FAILURES as error:
            raise trouble(error, call.name) from error

    def _repeat(self, call: Call, request: Request) -> None:
        if self._borrowers < _BORROWERS_MAX:
            self._background.start(self._settle(call, request), f"asking again about {call.name!r}")

    async def _settle(self, call: Call, request: Request) -> None:
        """Answer *request* from elsewhere, unless its own reply comes first."""
        try:
            source = await self._source(call, request.ends_at)
        except (NoAnswer, LockError):
            return
        reply = await self._elsewhere(call, source, request.ends_at, unless=request.answer.done)
        if isinstance(reply, Exception):
            return
        if call.is_certain(reply):
            request.settle(reply)
        else:
            request.fallback = reply

    async def _redirected(self, call: Call, error: AskError, end: float) -> Any:
        """One try where *error* says that the key is; the next ones go there by themselves."""
        try:
            async with asyncio.timeout_at(end):
                source = await self._router.redirect(error)
        except FAILURES as failure:
            raise trouble(failure, call.name) from failure
        asking = () if isinstance(error, MovedError) else (command("ASKING"),)
        return await self._elsewhere(call, source, end, before=asking)

    async def _elsewhere(
        self,
        call: Call,
        source: Source,
        end: float,
        *,
        before: tuple[bytes, ...] = (),
        unless: Callable[[], bool] = lambda: False,
    ) -> Any:
        """One try over a connection of its own: the reply, or why there is none."""
        self._borrowers += 1
        try:
            async with asyncio.timeout_at(end), self._borrowing:
                if unless():
                    return _NOT_NEEDED
                held = await Held.take(source)
                try:
                    # Again, with no pause before it is sent: the caller may have left meanwhile.
                    return _NOT_NEEDED if unless() else await self._ask(call, held, before)
                finally:
                    await held.give_back()
        except FAILURES as error:
            return error
        finally:
            self._borrowers -= 1

    async def _ask(self, call: Call, held: Held, before: tuple[bytes, ...]) -> Any:
        number = self._router.next_number()
        body = call.body(number)
        call.sent(number)
        reply = await _exchange(held, call.script.evalsha + body, before)
        if isinstance(reply, NoScriptError):
            reply = await _exchange(held, call.script.eval + body, before)
        call.heard(number, reply)
        return reply

    def _usable(self, reply: Any, name: str) -> Any:
        """*reply*, if it is what a script returns."""
        if not isinstance(reply, Exception):
            return reply
        if isinstance(reply, NoAnswer):
            raise reply
        if isinstance(reply, ClusterDownError):
            self._router.doubt()
        raise trouble(reply, name) from reply


async def insist(attempt: Callable[[float], Awaitable[_T]], within: float) -> _T:
    """Try until there is an answer, or *within* seconds are over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while True:
        try:
            return await attempt(end - loop.time())
        except NoAnswer:
            if loop.time() + _PAUSE_S >= end:
                raise
        await asyncio.sleep(_PAUSE_S)


async def _exchange(held: Held, request: bytes, before: tuple[bytes, ...]) -> Any:
    """The reply to *request*; those to what goes *before* it do not matter."""
    await held.send(*before, request)
    for _ in before:
        await held.read()
    return await held.read()
