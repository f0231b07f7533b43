"""Leases on a primary: runs a script, reads its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    TryAgainError,
)

from .. import _clock, _names
from .._cleanup import Background
from .._errors import NameTakenError
from .._names import Keys
from ._api import (
    Acquisition,
    Granted,
    NoAnswer,
    NotOurs,
    Refused,
    Released,
    Standing,
    Waiter,
)
from ._inbox import Inbox
from ._mux import Link
from ._router import Router
from ._wire import FAILURES, Held, Script, Source, command, maybe_text, pack, text, trouble

_ACQUIRE: Final = Script("acquire", keys=4, args=4)
_EXTEND: Final = Script("extend", keys=1, args=2)
_RELEASE: Final = Script("release", keys=4, args=4)
_DISCARD: Final = Script("discard", keys=1, args=1)
_INSPECT: Final = Script("inspect", keys=2, args=0)

# Stands for a connection that served one try, among the numbers of links.
_BORROWED: Final = 0

_NOT_A_LOCK: Final = "(a key that is not a lock)"
_RELEASE_PAUSE_S: Final = 0.05


class RedisStore:
    """Redis or Valkey, over one connection to each primary and one for messages.

    Args:
        router: Makes the router, given what to call when a connection was lost.
    """

    def __init__(
        self,
        router: Callable[[Callable[[], None]], Router],
        *,
        prefix: str,
        client_id: str,
        request_timeout: float,
    ) -> None:
        self._client_id = client_id
        self._inbox_prefix = _names.inbox_prefix(prefix)
        self._request_timeout = request_timeout
        self._ours: dict[str, Waiter | None] = {}  # None: it holds, or is being released.
        self._listening: set[str] = set()
        self._borrowing = asyncio.Lock()  # One borrowed connection at a time.
        self._background = Background()
        self._router = router(self._poke_all)
        self._inbox = Inbox(
            self._router.inbox_source,
            _names.inbox(prefix, client_id),
            request_timeout=request_timeout,
            on_message=self._receive,
            on_change=self._poke_all,
            is_needed=self._is_listening,
        )

    def is_current(self, link: int) -> bool:
        return self._router.is_current(link)

    @property
    def hears(self) -> bool:
        return self._inbox.hears

    async def acquire(
        self, acquisition: Acquisition, *, ttl_ms: int, alive_ms: int, within: float
    ) -> Granted | Refused:
        link = await self._link(acquisition.keys.lock, acquisition.name, within)
        body = pack(
            *acquisition.keys, acquisition.token, str(ttl_ms), str(alive_ms), self._inbox_prefix
        )
        sent_at = _clock.now()
        acquisition.was_sent = True
        acquisition.asked.add(link.number)
        answer = link.call(_ACQUIRE, body, within=within, on_reply=self._notice_refused)
        reply = await answer
        if not isinstance(reply, NoAnswer):
            # Replies come in order: whatever went over this link before has arrived, too.
            acquisition.asked.discard(link.number)
        if isinstance(reply, AskError):
            acquisition.asked.add(_BORROWED)
            reply = await self._redirected(reply, _ACQUIRE, body, acquisition.name, within)
            acquisition.asked.discard(_BORROWED)
            self._notice_refused(reply)
        reply = self._usable(reply, acquisition.name)
        return _acquired(reply, acquisition.token, sent_at, link.number)

    async def extend(
        self, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
    ) -> float | NotOurs:
        sent_at = _clock.now()
        body = pack(acquisition.keys.lock, value, str(ttl_ms))
        try:
            reply = await self._call(_EXTEND, body, acquisition.keys.lock, acquisition.name, within)
        except NameTakenError:
            return NotOurs(_NOT_A_LOCK)
        if reply[0] == 1:
            return _clock.deadline(sent_at, reply[1])
        standing = maybe_text(reply[1])
        self._notice(standing)
        return NotOurs(standing)

    async def release(self, acquisition: Acquisition, *, within: float) -> Released:
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        while True:
            try:
                return await self._release_once(acquisition, end - loop.time())
            except NoAnswer:
                if loop.time() + _RELEASE_PAUSE_S >= end:
                    raise
            await asyncio.sleep(_RELEASE_PAUSE_S)

    async def inspect(self, name: str, keys: Keys, *, within: float) -> Standing:
        body = pack(keys.lock, keys.queue)
        reply = await self._call(_INSPECT, body, keys.lock, name, within)
        return Standing(maybe_text(reply[0]), reply[1], reply[2])

    def enlist(self, token: str, waiter: Waiter) -> None:
        self._ours[token] = waiter

    def listen(self, token: str) -> None:
        self._listening.add(token)
        self._inbox.start()

    def hold(self, token: str) -> None:
        self._ours[token] = None
        self._listening.discard(token)

    def forget(self, token: str) -> None:
        self._ours.pop(token, None)
        self._listening.discard(token)

    def doubt_inbox(self) -> None:
        self._inbox.doubt()

    async def aclose(self) -> None:
        await self._background.drain()
        await self._inbox.aclose()
        await self._router.aclose()

    async def _link(self, key: str, name: str, within: float) -> Link:
        try:
            return self._router.link(key) or await self._router.linked(key, within)
        except NoAnswer:
            raise
        except FAILURES as error:
            raise trouble(error, name) from error

    async def _release_once(self, acquisition: Acquisition, within: float) -> Released:
        repeated = acquisition.release_unanswered
        link = await self._link(acquisition.keys.lock, acquisition.name, within)
        elsewhere = link.is_suspect
        # A late copy of an acquire may come by a connection that this release does not follow.
        followed = set() if elsewhere else {link.number}
        tombstone = "1" if acquisition.asked - followed else "0"
        body = pack(
            *acquisition.keys, acquisition.token, tombstone, self._inbox_prefix, self._client_id
        )
        notice = self._notice_released(acquisition.keys)
        acquisition.release_unanswered = True
        key, name = acquisition.keys.lock, acquisition.name
        try:
            if elsewhere:
                reply = await self._borrowed(self._router.source(key), _RELEASE, body, within)
                notice(reply)
            else:
                reply = await link.call(_RELEASE, body, within=within, on_reply=notice)
            if isinstance(reply, AskError):
                reply = await self._redirected(reply, _RELEASE, body, name, within)
                notice(reply)
            if isinstance(reply, TryAgainError):
                reply = await self._call(_DISCARD, pack(key, acquisition.token), key, name, within)
            reply = self._usable(reply, name)
        except NameTakenError:
            acquisition.release_unanswered = False
            return Released(False, _NOT_A_LOCK, repeated)
        acquisition.release_unanswered = False
        return Released(reply[0] == 1, maybe_text(reply[1]), repeated)

    async def _call(self, script: Script, body: bytes, key: str, name: str, within: float) -> Any:
        """A call that may be sent over any connection, however often."""
        link = await self._link(key, name, within)
        if link.is_suspect:
            reply = await self._borrowed(self._router.source(key), script, body, within)
        else:
            reply = await link.call(script, body, within=within)
        if isinstance(reply, AskError):
            reply = await self._redirected(reply, script, body, name, within)
        return self._usable(reply, name)

    async def _redirected(
        self, error: AskError, script: Script, body: bytes, name: str, within: float
    ) -> Any:
        """One try where *error* says that the key is; the next ones go there by themselves."""
        try:
            async with asyncio.timeout(within):
                source = await self._router.redirect(error)
        except FAILURES as failure:
            raise trouble(failure, name) from failure
        asking = () if isinstance(error, MovedError) else (command("ASKING"),)
        return await self._borrowed(source, script, body, within, *asking)

    async def _borrowed(
        self, source: Source, script: Script, body: bytes, within: float, *before: bytes
    ) -> Any:
        """One try over a connection of its own: the reply, or why there is none."""
        try:
            async with asyncio.timeout(within), self._borrowing:
                held = await Held.take(source)
                try:
                    reply = await _ask(held, script.evalsha + body, *before)
                    if isinstance(reply, NoScriptError):
                        reply = await _ask(held, script.eval + body, *before)
                    return reply
                finally:
                    await held.give_back()
        except FAILURES as error:
            return error

    def _usable(self, reply: Any, name: str) -> Any:
        """*reply*, if it is what a script returns."""
        if isinstance(reply, NoAnswer):
            raise reply
        if isinstance(reply, ClusterDownError):
            self._router.doubt()
        if isinstance(reply, Exception):
            raise trouble(reply, name) from reply
        return reply

    # What replies and messages say about our own waiters; called where they are read, so that a
    # cancelled caller cannot keep the news from the one whom it concerns.

    def _notice_refused(self, reply: Any) -> None:
        if isinstance(reply, list) and reply[0] == 0:
            self._notice(text(reply[1]))

    def _notice_released(self, keys: Keys) -> Callable[[Any], None]:
        def notice(reply: Any) -> None:
            if not isinstance(reply, list):
                return
            if reply[0] == 1:
                self._hand_over(maybe_text(reply[1]), keys)
            else:
                self._notice(maybe_text(reply[1]))

        return notice

    def _receive(self, message: str) -> None:
        value, _, lock_key = message.partition(" ")
        self._hand_over(value, Keys.of_lock_key(lock_key))

    def _notice(self, standing: str | None) -> None:
        """*standing* holds: if that is a waiter of ours, it does not know yet."""
        if standing and self._client_id in standing and (value := _names.read_value(standing)):
            waiter = self._ours.get(value.owner_token)
            if waiter is not None:
                waiter.poke()

    def _hand_over(self, standing: str | None, keys: Keys) -> None:
        value = _names.read_value(standing) if standing else None
        if standing is None or value is None or value.client_id != self._client_id:
            return
        if value.owner_token not in self._ours:
            stray = Acquisition(keys.lock, keys, value.owner_token)
            self._background.start(
                self.release(stray, within=self._request_timeout), "giving back a stray hand-off"
            )
        elif (waiter := self._ours[value.owner_token]) is not None:
            waiter.hand_over(standing)

    def _poke_all(self) -> None:
        for waiter in tuple(self._ours.values()):
            if waiter is not None:
                waiter.poke()

    def _is_listening(self) -> bool:
        return bool(self._listening)


async def _ask(held: Held, request: bytes, *before: bytes) -> Any:
    """The reply to *request*; those to what goes *before* it do not matter."""
    await held.send(*before, request)
    for _ in before:
        await held.read()
    return await held.read()


def _acquired(reply: Any, token: str, sent_at: float, link: int) -> Granted | Refused:
    if reply[0] == 1:
        _, fencing_token, ttl_left_ms, already = reply
        return Granted(
            f"{token}/{fencing_token}",
            fencing_token,
            _clock.deadline(sent_at, ttl_left_ms),
            bool(already),
        )
    if reply[0] == -1:
        raise AssertionError(f"an acquisition was given up and then went on: {token}")
    _, value, ttl_left_ms, place, waiters, last_fencing_token = reply
    return Refused(text(value), ttl_left_ms, place, waiters, last_fencing_token, sent_at, link)
