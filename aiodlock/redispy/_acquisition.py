"""One acquisition: asking for the lock, without ever leaving it behind."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import _clock
from .._cleanup import Background
from .._waiting import rest, rouse
from ._requests import UNANSWERED, Client, Key, Script, ask, script

T = TypeVar("T")

# How long a claim stands that is still to get its token, or its life without an end.
CLAIM_MS: Final = 10_000
# How long the answer to the last try may take, after the wait is over.
LAST_ANSWER_S: Final = 0.1
_CLAIM: Final = script("claim")
_SETTLE: Final = script("settle")
_RELEASE: Final = Script(RedisPyLock.LUA_RELEASE_SCRIPT)

_background: Final = Background()


class Acquisition:
    """From the first request until the lock is got, or certainly not left behind.

    A token that is made here is of this acquisition alone, so a second copy of the request
    recognises it: one request. A token of the user's may be another's too; and what never expires
    must not be taken by a request that nobody waits for any more. These are claimed for 10 s with a
    token of ours, and settled by a second request.

    Args:
        token: The user's, or None.
        timeout_ms: None: it is to live for ever.
    """

    def __init__(
        self, client: Client, key: Key, *, token: bytes | None, timeout_ms: int | None
    ) -> None:
        self._client = client
        self._key = key
        self._timeout_ms = timeout_ms
        self._claim = _claim(token)
        self._has_own_token = token is not None
        self._settles_until = 0.0
        self.token = self._claim if token is None else token

    @property
    def lives(self) -> float:
        """Seconds that it is ours for, once it is."""
        return math.inf if self._timeout_ms is None else self._timeout_ms / 1000

    async def ask(self, *, answer_by: float = math.inf) -> float | None:
        """Ask once; None: it is ours.

        Args:
            answer_by: An instant of the running loop.

        Returns:
            Seconds that it is another's for; infinite where its key has no expiry.

        Raises:
            redis.TimeoutError: No answer in time.
            redis.RedisError, OSError: What redis-py says; after up to 1 s in which it is undone.

        Cancellation: what the server has done is undone, within 1 s, or later in the background.
        """
        request, name = _started(self._ask(), "acquire"), named(self._key)
        try:
            await _done(request, by=answer_by)
        except asyncio.CancelledError:
            await _background.finish(self._undo(request), "giving up", name)
            raise
        if not request.done():
            _background.start(self._undo(request), "giving up", name)
            raise RedisTimeoutError("no answer before the end of blocking_timeout")
        error = request.exception()
        # A refusal of the claim is an answer: nothing stands there.
        if error is not None and (isinstance(error, UNANSWERED) or self._settles_until):
            cancelled = await _background.finish(self._undo(request), "giving up", name)
            if cancelled is not None:
                raise cancelled
        return request.result()

    async def _ask(self) -> float | None:
        claimed_at = _clock.now()
        settles = self._timeout_ms is None or self._has_own_token
        life_ms = CLAIM_MS if settles else self._timeout_ms
        reply = await ask(self._client, _CLAIM, self._key, self._claim, str(life_ms))
        is_ours, left_ms = reply.value
        if is_ours:
            return await self._settle(_clock.deadline(claimed_at, CLAIM_MS)) if settles else None
        return math.inf if left_ms == -1 else left_ms / 1000

    async def _settle(self, until: float) -> float | None:
        self._settles_until = until
        life_ms = "" if self._timeout_ms is None else str(self._timeout_ms)
        reply = await ask(self._client, _SETTLE, self._key, self._claim, self.token, life_ms)
        # While nobody else could have claimed it, the token in the key is this acquisition's.
        if reply.value == 1 or (reply.value == 2 and _clock.now() < until):
            return None
        return 0.0

    async def _undo(self, request: asyncio.Task[float | None]) -> None:
        """Once *request* has ended, so that no copy of it comes after the release."""
        await asyncio.wait((request,))
        is_answered = not request.cancelled() and request.exception() is None
        if is_answered and request.result() is not None:
            return  # Another's.
        await ask(self._client, _RELEASE, self._key, self._claim)
        # A token of the user's may be another's lock, too.
        if self._has_own_token and _clock.now() < self._settles_until:
            await ask(self._client, _RELEASE, self._key, self.token)


def named(key: Key) -> str:
    """*key* as the log tells it."""
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def _claim(token: bytes | None) -> bytes:
    """What nobody else can have in the key; whose it is shows."""
    unique = uuid.uuid4().hex.encode()
    return unique if token is None else token + b":claim:" + unique


async def released(client: Client, key: Key, token: str | bytes) -> bool:
    """Whether *token* stood there; it does not any more.

    Cancellation: it goes on; waited for at most 1 s.
    """
    request = _started(ask(client, _RELEASE, key, token), "release")
    try:
        await _done(request)
    except asyncio.CancelledError:
        await _background.finish(_ended(request), "releasing", named(key))
        raise
    reply = request.result()
    # After a lost reply, the copy before this one will have done it.
    return bool(reply.value) or reply.is_of_a_copy


def _started(request: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """In a task of its own, so that no cancel reaches redis-py.

    It would hang up, and the request might still arrive, after what undoes it; and on Python 3.11
    it may swallow the cancel.
    """
    return asyncio.get_running_loop().create_task(request, name=f"aiodlock.redispy {name}")


async def _done(request: asyncio.Task[T], *, by: float = math.inf) -> None:
    """Wait for it until *by*, an instant of the loop."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    request.add_done_callback(lambda _: rouse(done))
    await (done if by == math.inf else rest(done, by - loop.time()))


async def _ended(request: asyncio.Task[T]) -> T:
    await asyncio.wait((request,))
    return request.result()
