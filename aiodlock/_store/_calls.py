"""Gets a script call answered, over whichever connection can do it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    ResponseError,
    TryAgainError,
)

from .._cleanup import Background
from .._errors import LockError
from ._api import NoAnswer
from ._mux import Link, Request
from ._router import Router
from ._wire import FAILURES, Call, Held, Script, SimpleCall, Source, anew, command, text, trouble

_PAUSE_S: Final = 0.05
# Who stands further back in the queue for the borrowed connection has no chance in its time.
_BORROWERS_MAX: Final = 100
_NOT_NEEDED: Final = NoAnswer("it is not needed any more")
# By its text, which a server that has lost its scripts will want, and which may be forbidden.
_PROBE: Final = Script("probe", by_text=True)


class Caller:
    """Sends calls over the link of their key; past it where it is silent, or sends us away.

    Args:
        asks_once: Whether it gives up asking what we may do at the first refusal.
    """

    def __init__(
        self,
        router: Router,
        background: Background,
        *,
        channel: str,
        request_timeout: float,
        on_mute: Callable[[str], None],
        asks_once: bool = False,
    ) -> None:
        self._router = router
        self._asks_once = asks_once
        self._request_timeout = request_timeout
        self._background = background
        self._channel = channel
        self._on_mute = on_mute
        self._loop = asyncio.get_running_loop()
        self._allowed: set[str] = set()
        self._probes: dict[str, asyncio.Task[object]] = {}
        self._heard: dict[str, NoAnswer] = {}  # By node: what its last probe met, last of all.
        # One borrowed connection at a time: the pool may have room for no more.
        self._borrowing = asyncio.Lock()
        self._borrowers = 0

    async def reply(
        self,
        call: Call,
        within: float,
        *,
        insists: bool = False,
        on_trouble: Callable[[NoAnswer], object] | None = None,
    ) -> Any:
        """What the script returned, from one try; from as many as there is time for, if it insists.

        Args:
            call: What is asked.
            within: Seconds.
            insists: Whether it tries again after a NoAnswer.
            on_trouble: Is then told of it.

        Raises:
            NoAnswer, NotAllowedError, NameTakenError: As a store does.
        """
        end = self._loop.time() + within
        while True:
            try:
                link = self._router.link(call.key) or await self._linked(call, end)
                if call.takes and self._router.node(call.key) not in self._allowed:
                    await self._probe(call, end)
                    link = self._router.link(call.key) or await self._linked(call, end)
                reply = await self._around(call, link, end) if link.is_suspect else None
                if reply is None:
                    reply = await link.call(call, end, self._repeat if call.may_repeat else None)
                if isinstance(reply, Exception):
                    return await self._troubled(call, reply, end)
                return reply
            except NoAnswer as error:
                if not insists or self._loop.time() + _PAUSE_S >= end:
                    raise
                if on_trouble is not None:
                    on_trouble(error)
            await asyncio.sleep(_PAUSE_S)

    def begin(self, call: Call, within: float) -> asyncio.Future[Any] | None:
        """Send *call* now, without a pause; the future brings a reply, or an exception.

        None: its link cannot carry it now. `reply` finds out why, and does what is needed.
        """
        link = self._router.link(call.key)
        if link is None or link.is_suspect:
            return None
        if call.takes and self._router.node(call.key) not in self._allowed:
            return None
        return link.call(call, self._loop.time() + within)

    async def _linked(self, call: Call, end: float) -> Link:
        try:
            return await self._router.linked(call.key, end - self._loop.time())
        except FAILURES as error:  # A NoAnswer is fit to be raised as it is.
            raise trouble(error, call.name) from error

    async def _around(self, call: Call, link: Link, end: float) -> Any:
        """The reply from elsewhere, in half of the time; None: let the silent link try.

        It may only be slow, and there may be no room for another connection.
        """
        if not call.may_repeat or self._borrowers >= _BORROWERS_MAX:
            return None
        half = (self._loop.time() + end) / 2
        try:
            source = await self._source(call, half)
        except NoAnswer:
            return None
        reply = await self._elsewhere(call, source, half, unless=lambda: not link.is_suspect)
        is_reply = not isinstance(reply, Exception) or isinstance(reply, ResponseError)
        return reply if is_reply else None

    async def _probe(self, call: Call, end: float) -> None:
        """Once for each node: may we do what locks need? Refused, it is asked again next time."""
        node = self._router.node(call.key)
        probe = self._probes.get(node)
        if probe is None:
            about = SimpleCall(_PROBE, call.name, [f"{call.key}:probe"], self._channel)
            self._heard[node] = NoAnswer("no reply in time")
            probe = self._background.start(self._rights(about, node), "asking what we may do")
            self._probes[node] = probe
            probe.add_done_callback(lambda _: self._probes.pop(node, None))
        await asyncio.wait((probe,), timeout=end - self._loop.time())
        if not probe.done() or probe.cancelled():
            # It goes on for longer than some of those who wait for it.
            raise anew(self._heard[node], call.name)
        problem = probe.result()
        if isinstance(problem, LockError | NoAnswer):
            raise anew(problem, call.name)
        if isinstance(problem, Exception):
            raise problem
        self._allowed.add(node)

    async def _rights(self, about: Call, node: str) -> Exception | None:
        """Why we may not do what locks need, for all who wait for it."""
        try:
            (refusal,) = await self.reply(
                about,
                self._request_timeout,
                insists=not self._asks_once,
                on_trouble=functools.partial(self._heard.__setitem__, node),
            )
        except Exception as error:  # Also what a user's credentials raise: not a permission.
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

    def _repeat(self, request: Request) -> None:
        if self._borrowers < _BORROWERS_MAX:
            self._background.start(self._settle(request), "asking again about", request.call.name)

    async def _settle(self, request: Request) -> None:
        """Answer *request* from elsewhere, unless its own reply comes first."""
        call = request.call
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
        call.sent(number)
        reply = await _exchange(held, call.request(number), before)
        if isinstance(reply, NoScriptError):
            reply = await _exchange(held, call.request(number, by_text=True), before)
        reply = call.checked(reply)
        if not isinstance(reply, NoAnswer):
            call.heard(number, reply)
        return reply

    async def _troubled(self, call: Call, reply: Exception, end: float) -> Any:
        """The reply from where *reply* sends us; else *reply* as the trouble that it is."""
        if isinstance(reply, AskError):
            answer = await self._redirected(call, reply, end)
            if not isinstance(answer, Exception):
                return answer
            reply = answer
        if isinstance(reply, TryAgainError) and (smaller := call.with_one_key()) is not None:
            return await self.reply(smaller, end - self._loop.time())
        if isinstance(reply, NoAnswer):
            raise reply
        if isinstance(reply, ClusterDownError):
            self._router.doubt()
        raise trouble(reply, call.name) from reply


async def _exchange(held: Held, request: bytes, before: tuple[bytes, ...]) -> Any:
    """The reply to *request*; those to what goes *before* it do not matter."""
    await held.send(b"".join((*before, request)))
    for _ in before:
        await held.read()
    return await held.read()
