"""The lock of redis-py, kept safe where tasks are cancelled or replies are lost."""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Final, Literal, Self

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import LockError, LockNotOwnedError

from .._running import running_task
from ._acquisition import Acquisition, named, released
from ._line import Line
from ._requests import Client, Script, ask
from ._tokens import OneToken, Owner, TaskTokens

_log = logging.getLogger("aiodlock")

_EXTEND: Final = Script(RedisPyLock.LUA_EXTEND_SCRIPT)
_REACQUIRE: Final = Script(RedisPyLock.LUA_REACQUIRE_SCRIPT)

Lines = dict[str | bytes, Line]

# By loop: a loop that was thrown away may have left waiters that nobody wakes.
_lines: Final[
    weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakKeyDictionary[Client, Lines]]
] = weakref.WeakKeyDictionary()
_warned: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


class Lock(RedisPyLock):
    """A `redis.asyncio.lock.Lock` with the same key, value, methods and errors.

    Old and new instances exclude each other. What differs: `docs/how-to/move-from-redis-py.md`.

    Args:
        redis: A `redis.asyncio.Redis` or `RedisCluster`; it stays yours to close.
        name: The key.
        timeout: Seconds that the key lives; None or 0: until it is released, and if its holder
            dies, for ever (one warning in the log for each client).
        sleep: Seconds between two looks at a lock that another holds, up to 10 % fewer; less where
            the holder's time is over sooner.
        blocking: Whether `acquire` waits.
        blocking_timeout: Seconds that it waits at most; None: for ever.
        thread_local: True: each task has its own token. False: the object has one.
        raise_on_release_error: Whether leaving the block raises when the lock was lost.

    Raises:
        TypeError: *redis* is no async client.
    """

    local: TaskTokens | OneToken

    def __init__(
        self,
        redis: Redis | RedisCluster,
        name: str | bytes | memoryview,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:
        if not isinstance(redis, Redis | RedisCluster):
            raise TypeError(
                "redis must be a redis.asyncio.Redis or RedisCluster; "
                f"got a {type(redis).__module__}.{type(redis).__qualname__}"
            )
        super().__init__(
            redis,
            name,
            timeout=timeout,
            sleep=sleep,
            blocking=blocking,
            blocking_timeout=blocking_timeout,
            thread_local=thread_local,
            raise_on_release_error=raise_on_release_error,
        )
        self.local = TaskTokens() if thread_local else OneToken()

    async def __aenter__(self) -> Self:
        """Acquire, or raise redis-py's `LockError`."""
        await super().__aenter__()  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; a cancel that ended the block comes out, whatever the release says."""
        try:
            await super().__aexit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        except LockError as error:
            if exc_value is None or isinstance(exc_value, Exception):
                raise
            exc_value.add_note(f"when it was released: {error}")

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """Wait for the lock, first come first served among the tasks that use this client.

        One script call where it is free; two without a timeout or with a token of yours. While it
        is held, one for all waiting tasks of this client every `sleep` seconds.

        Args:
            blocking: Default: the lock's. False: one request.
            blocking_timeout: Seconds. Default: the lock's.
            token: What stands in the key. Default: one made for this acquisition.

        Returns:
            Whether it was got.

        Raises:
            redis.RedisError, OSError: The server did not answer, or refused.

        Cancellation: what the server has done is undone: waited for at most 1 s, else finished in
        the background.
        Source: "Distributed Locks with Redis" (Redis documentation), on a single instance.
        """
        # Here, not in the coroutine: `wait_for` may run that in a task of its own.
        owner = running_task()
        return self._acquire(owner, blocking, blocking_timeout, token)

    async def do_acquire(self, token: str | bytes) -> bool:
        """Ask once, with *token*; two script calls. `local.token` stays as it is.

        Errors and cancellation as in `acquire`.
        """
        return await self._acquisition(token).ask() is None

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether the token of the calling task stands in the key; one `GET`.

        Raises:
            redis.RedisError, OSError: The server did not answer, or refused.
        """
        return self._owned(self.local.token)

    def release(self) -> Coroutine[Any, Any, None]:
        """Give up the lock of the calling task; one script call.

        Raises:
            redis.LockError: There is none to give up.
            redis.LockNotOwnedError: It was lost before.
            redis.RedisError, OSError: The server did not answer, or refused.

        Cancellation: it is released all the same: waited for at most 1 s, else finished in the
        background.
        """
        return self._release(self.local.token)

    async def do_release(self, expected_token: str | bytes) -> None:
        """Delete the key if *expected_token* stands there; one script call.

        Errors and cancellation as in `release`.
        """
        if not await released(self.redis, self._key, expected_token):
            raise LockNotOwnedError("Cannot release a lock that's no longer owned")

    def extend(
        self, additional_time: float, replace_ttl: bool = False
    ) -> Coroutine[Any, Any, Literal[True]]:
        """Add *additional_time* seconds to what the key has left, or set it; one script call.

        Raises:
            redis.LockError: At once, where there is nothing to extend.
            redis.LockNotOwnedError: It was lost.
            redis.RedisError, OSError: The server did not answer, or refused.

        Cancellation: the server may or may not have extended; after a lost reply it may have done
        so twice.
        """
        return self._extend(self._held_token("extend"), additional_time, replace_ttl)

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend without a look at what the calling task has; one script call.

        Errors of the server, and cancellation, as in `extend`.
        """
        return await self._extend(self.local.token, additional_time, replace_ttl)

    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Let the key live `timeout` seconds from now; one script call.

        Errors as in `extend`.

        Cancellation: the server may or may not have done it.
        """
        return self._reacquire(self._held_token("reacquire"))

    async def do_reacquire(self) -> Literal[True]:
        """Reacquire without a look at what the calling task has; one script call.

        Errors of the server, and cancellation, as in `reacquire`.
        """
        return await self._reacquire(self.local.token)

    async def _acquire(
        self,
        owner: Owner,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: str | bytes | None,
    ) -> bool:
        self._warn_of_no_timeout()
        acquisition = self._acquisition(token)
        if self.blocking if blocking is None else blocking:
            limit = self.blocking_timeout if blocking_timeout is None else blocking_timeout
            got = await self._wait(acquisition, math.inf if limit is None else limit)
        else:
            got = await acquisition.ask() is None
        if got:
            self.local.grant(owner, acquisition.token)
        else:
            self.local.refuse(owner)
        return got

    async def _wait(self, acquisition: Acquisition, limit: float) -> bool:
        loop = asyncio.get_running_loop()
        lines = _lines_of(loop, self.redis)
        line = lines.setdefault(self._key, Line())
        try:
            return await line.wait(acquisition, self.sleep, loop.time() + limit)
        finally:
            if line.is_empty and lines.get(self._key) is line:
                del lines[self._key]

    def _acquisition(self, token: str | bytes | None) -> Acquisition:
        return Acquisition(
            self.redis,
            self._key,
            token=None if token is None else self._bytes(token),
            timeout_ms=int(self.timeout * 1000) if self.timeout else None,
        )

    async def _owned(self, token: bytes | None) -> bool:
        stored = await self.redis.get(self.name)
        return token is not None and stored is not None and self._bytes(stored) == token

    async def _release(self, token: bytes | None) -> None:
        if token is None:
            raise LockError(
                "Cannot release a lock that's not owned or is already unlocked.",
                lock_name=self.name,  # type: ignore[arg-type]
            )
        try:
            await self.do_release(token)
        except (LockNotOwnedError, asyncio.CancelledError):
            self._let_go(token)
            raise
        self._let_go(token)

    def _let_go(self, token: bytes) -> None:
        self.local.forget(token)
        line = _lines_of(asyncio.get_running_loop(), self.redis).get(self._key)
        if line is not None:
            line.freed()

    async def _extend(
        self, token: bytes | None, additional_time: float, replace_ttl: bool
    ) -> Literal[True]:
        words = (token or b"", str(int(additional_time * 1000)), "1" if replace_ttl else "0")
        if not (await ask(self.redis, _EXTEND, self._key, *words)).value:
            raise LockNotOwnedError("Cannot extend a lock that's no longer owned")
        return True

    async def _reacquire(self, token: bytes | None) -> Literal[True]:
        words = (token or b"", str(int((self.timeout or 0) * 1000)))
        if not (await ask(self.redis, _REACQUIRE, self._key, *words)).value:
            raise LockNotOwnedError("Cannot reacquire a lock that's no longer owned")
        return True

    def _held_token(self, what: str) -> bytes:
        token = self.local.token
        if token is None:
            raise LockError(f"Cannot {what} an unlocked lock")
        if self.timeout is None:
            raise LockError(f"Cannot {what} a lock with no timeout")
        return token

    def _bytes(self, word: str | bytes | memoryview) -> bytes:
        # The client of a cluster has one of its own.
        redis = self.redis
        keeper = redis if isinstance(redis, RedisCluster) else redis.connection_pool
        encoded = keeper.get_encoder().encode(word)
        return bytes(encoded)

    @property
    def _key(self) -> str | bytes:
        return bytes(self.name) if isinstance(self.name, memoryview) else self.name

    def _warn_of_no_timeout(self) -> None:
        if self.timeout or self.redis in _warned:
            return
        _warned.add(self.redis)
        name = named(self._key)
        _log.warning(
            "the lock %r has no timeout: if its holder dies it stays locked for ever",
            name,
            extra={"lock_name": name},
        )


def _lines_of(loop: asyncio.AbstractEventLoop, client: Client) -> Lines:
    clients = _lines.setdefault(loop, weakref.WeakKeyDictionary())
    return clients.setdefault(client, {})
