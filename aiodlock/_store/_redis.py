"""Leases on a primary: whom the answers of the scripts concern."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

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
from ._calls import Caller
from ._extensions import Extensions
from ._inbox import Inbox
from ._requests import INSPECT, NOT_A_LOCK, Acquire, Us, releasing
from ._router import Router
from ._shares import Downgrade, ShareExtend, ShareInspect
from ._wire import SimpleCall, maybe_text

_log = logging.getLogger("aiodlock")

# Of so many the copies are remembered that may still come: a minute of an outage.
_GIVEN_UP_MAX: Final = 1000


class RedisStore:
    """Redis or Valkey, over one connection to each primary and one for messages.

    Args:
        router: Makes the router, given what to call when a connection was lost.
    """

    has_queue = True

    def __init__(
        self,
        router: Callable[[Callable[[], None]], Router],
        *,
        prefix: str,
        client_id: str,
        request_timeout: float,
    ) -> None:
        self._client_id = client_id
        self._us = Us(prefix, client_id)
        self._request_timeout = request_timeout
        # None: it holds, or is being released. Bound: as many as acquire or hold.
        self._ours: dict[str, Waiter | None] = {}
        self._listening: set[str] = set()
        self._given_up: dict[str, list[int]] = {}  # Releases without an answer: what `asked` was.
        self._background = Background()
        self._router = router(self._poke_all)
        channel = _names.inbox(prefix, client_id)
        self._is_warned = False
        self._caller = Caller(
            self._router,
            self._background,
            channel=channel,
            request_timeout=request_timeout,
            on_mute=self._warn_of_polling,
        )
        self._extensions = Extensions(self._caller, may_share=self._router.has_one_primary)
        self._inbox = Inbox(
            self._router.inbox_source,
            channel,
            request_timeout=request_timeout,
            on_message=self._receive,
            on_hear=self._inbox_hears,
            on_deaf=self._warn_of_polling,
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
        call = Acquire(
            acquisition,
            self._us,
            ttl_ms=ttl_ms,
            alive_ms=alive_ms,
            # A waiter keeps to one connection, in order; it polls again by itself.
            may_repeat=alive_ms == 0,
            notice=self._notice,
        )
        return call.answer(await self._caller.reply(call, within))

    async def extend(
        self, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
    ) -> float | NotOurs:
        sent_at = _clock.now()
        try:
            if acquisition.is_shared:
                call = ShareExtend(acquisition, value, ttl_ms=ttl_ms)
                is_ours, answer = call.answer(await self._caller.reply(call, within))
            else:
                is_ours, answer = await self._extensions.ask(acquisition, value, ttl_ms, within)
        except NameTakenError:
            return NotOurs(NOT_A_LOCK)
        if is_ours:
            return _clock.deadline(sent_at, answer)
        standing = maybe_text(answer)
        self._notice(standing)
        return NotOurs(standing)

    async def release(
        self, acquisition: Acquisition, *, within: float, keep_until: float | None = None
    ) -> Released:
        kind = releasing(is_shared=acquisition.is_shared, keep_until=keep_until)
        call = kind(acquisition, self._us, may_repeat=True, notice=self._notice_released)
        try:
            reply = await self._caller.reply(call, within, insists=True)
        except NameTakenError:
            return Released(False, NOT_A_LOCK, acquisition.releases > 1)
        except NoAnswer:
            self._remember(acquisition)
            raise
        return call.answer(reply)

    async def downgrade(self, acquisition: Acquisition, *, within: float) -> NotOurs | None:
        call = Downgrade(acquisition, self._us, notice=self._notice_released)
        try:
            reply = await self._caller.reply(call, within, insists=True)
        except NameTakenError:
            return NotOurs(NOT_A_LOCK)
        return None if reply[0] else NotOurs(None)

    async def inspect(
        self, name: str, keys: Keys, *, within: float, is_shared: bool = False
    ) -> Standing:
        if is_shared:
            share_call = ShareInspect(name, keys)
            reply = await self._caller.reply(share_call, within, insists=True)
            return share_call.answer(reply)
        call = SimpleCall(INSPECT, name, [keys.lock, keys.queue])
        reply = await self._caller.reply(call, within, insists=True)
        standing = maybe_text(reply[0])
        value = _names.read_value(standing or "")
        fencing_token = value.fencing_token if value else None
        return Standing(standing, reply[1], reply[2], fencing_token)

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
        await self._extensions.aclose()
        await self._background.drain()
        await self._inbox.aclose()
        await self._router.aclose()

    def _remember(self, acquisition: Acquisition) -> None:
        """Where copies of its acquires may still be, for it may be handed the lock after this."""
        if acquisition.asked:
            self._given_up[acquisition.token] = acquisition.asked
            if len(self._given_up) > _GIVEN_UP_MAX:
                del self._given_up[next(iter(self._given_up))]

    # What replies and messages say about our own waiters; called where they are read, so that a
    # cancelled caller cannot keep the news from the one whom it concerns.

    def _notice_released(self, answer: int, standing: str, keys: Keys) -> None:
        if answer == 0:
            self._notice(standing)
        else:
            self._hand_over(standing, keys)

    def _receive(self, message: str) -> None:
        value, _, lock_key = message.partition(" ")
        self._hand_over(value, Keys.of_lock_key(lock_key))

    def _notice(self, standing: str | None) -> None:
        """*standing* holds: if that is a waiter of ours, it does not know yet."""
        if standing and self._client_id in standing and (value := _names.read_value(standing)):
            waiter = self._ours.get(value.owner_token)
            if waiter is not None:
                waiter.poke()
            if value.owner_token in self._listening:
                self._inbox.doubt()  # A message should have told it.

    def _hand_over(self, standing: str, keys: Keys) -> None:
        value = _names.read_value(standing)
        if value is None or value.client_id != self._client_id:
            return
        if value.owner_token not in self._ours:
            # Only the key is known here; it stands in for the name, in a log line at most.
            is_shared = _names.access_of(value.owner_token) is not None
            stray = Acquisition(keys.lock, keys, value.owner_token, is_shared=is_shared)
            stray.asked.extend(self._given_up.pop(value.owner_token, ()))
            self._background.start(
                self.release(stray, within=self._request_timeout), "giving back a stray hand-off"
            )
        elif (waiter := self._ours[value.owner_token]) is not None:
            waiter.hand_over(standing)

    def _poke_all(self) -> None:
        for waiter in tuple(self._ours.values()):
            if waiter is not None:
                waiter.poke()

    def _inbox_hears(self) -> None:
        """What was published before, nobody heard."""
        self._is_warned = False
        self._poke_all()

    def _warn_of_polling(self, cause: str) -> None:
        """Once for each outage, whether it is about hearing or about telling."""
        if not self._is_warned:
            self._is_warned = True
            _log.warning("no hand-off messages, waiters poll instead: %s", cause)

    def _is_listening(self) -> bool:
        return bool(self._listening)
