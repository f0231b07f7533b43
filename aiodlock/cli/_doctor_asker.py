"""A connection to one server for `aiodlock doctor`: replies as they stand, bounds on everything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from aiodlock.cli._doctor_facts import Facts, Plan, said

LIMIT_S: Final = 15.0
"""No question is asked after so long; the last one may take a request's time more."""


class Asker:
    """A connection to one server; refusals are noted in the facts, an end of it is raised.

    Raises:
        RedisError, OSError: The server does not answer, or no longer.
        OutOfTimeError: The time for this server is over.
    """

    def __init__(self, url: str, plan: Plan, facts: Facts) -> None:
        self._url = url
        self.plan = plan
        self.facts = facts
        # One that subscribes is another's connection, as with a lock.
        self.redis, self.listener = self._clients()
        self.has_answered = False
        self._end = time.monotonic() + LIMIT_S

    def check_time(self) -> None:
        """Go on only while there is time."""
        if time.monotonic() > self._end:
            raise OutOfTimeError

    def _clients(self, **login: None) -> tuple[Redis, Redis]:
        limit_s = self.plan.request_timeout
        return _client(self._url, limit_s, **login), _client(self._url, limit_s, **login)

    async def log_in(self) -> None:
        """Connect as a lock does, by a handshake of its own; raises what is refused.

        Where that is well, but the other handshake is not, no password is set: the one is borne
        with a password all the same, the other is not.
        """
        as_locks = Redis.from_url(self._url)
        _bound(as_locks, self.plan.request_timeout)
        async with as_locks:
            await _connect(as_locks)
        try:
            await _connect(self.redis)
        except AuthenticationError:
            await self.aclose()
            self.redis, self.listener = self._clients(username=None, password=None)
            await _connect(self.redis)

    @contextlib.contextmanager
    def noting(self, question: str) -> Iterator[None]:
        """Note under *question* an answer of a shape that no Redis gives."""
        try:
            yield
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.facts.unseen[question] = f"an answer that no Redis gives: {error}"

    async def ask(self, question: str, *command: str | int) -> Any:
        """The reply to *command*; None where it is refused, which is noted under *question*."""
        self.check_time()
        try:
            return await self.redis.execute_command(*command)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            self.facts.unseen[question] = said(error)
            return None

    async def ask_all(self, *commands: tuple[str | int, ...]) -> list[Any]:
        """The reply to each, or the error that it is, in one round trip."""
        self.check_time()
        async with self.redis.pipeline(transaction=False) as pipe:
            for command in commands:
                _put(pipe, command)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
        return replies

    async def aclose(self) -> None:
        """End both connections, whatever state they are in."""
        for redis in (self.redis, self.listener):
            with contextlib.suppress(RedisError, OSError):
                await redis.aclose()


class OutOfTimeError(Exception):
    """The server answers, but so slowly that there was no time for all."""


def _client(url: str, request_timeout: float, **login: None) -> Redis:
    redis = Redis.from_url(url)
    _bound(redis, request_timeout)
    # Whatever the URL says: text that turns back into the same bytes.
    redis.connection_pool.connection_kwargs.update(
        decode_responses=True,
        encoding="utf-8",
        encoding_errors="surrogateescape",
        protocol=2,
        driver_info=None,
        **login,
    )
    # As the server says it: redis-py would make numbers of ids.
    redis.response_callbacks.clear()
    return redis


def _bound(redis: Redis, request_timeout: float) -> None:
    # Whatever the URL says.
    redis.connection_pool.connection_kwargs.update(
        socket_timeout=request_timeout, socket_connect_timeout=request_timeout
    )


async def _connect(redis: Redis) -> None:
    """Whatever is refused meanwhile is about the user, or the database."""
    pool = redis.connection_pool
    await pool.release(await pool.get_connection())  # type: ignore[no-untyped-call]


def _put(pipe: Pipeline, command: tuple[str | int, ...]) -> None:
    pipe.execute_command(*command)
