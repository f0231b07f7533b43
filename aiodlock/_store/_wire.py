"""What is said over one connection: taking it from the pool, packing scripts, naming errors."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Coroutine, Sequence
from importlib import resources
from typing import Any, Final, Protocol

from redis.asyncio import Connection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from .._errors import LockError, NameTakenError, NotAllowedError
from .._running import running_loop
from ._api import NoAnswer

# What the server says when it forbids a script, or something inside one (6.2 has other words).
_FORBIDDEN: Final = re.compile(
    r"NOPERM|ACL failure|user executing the script can't|unknown command|no permissions"
)


# A login that redis-py does not take for a refused one: the number of a database in the URL.
_NO_DATABASE: Final = re.compile(r"DB index is out of range|SELECT is not allowed")

REFUSALS: Final = (NoPermissionError, AuthenticationError, AuthorizationError)


class Source(Protocol):
    """Where connections come from: only public methods of redis-py stand behind it."""

    def pick(self) -> Connection:
        """One that nobody uses, connected or not; raises where there is no room for more."""

    async def connect(self, connection: Connection) -> None:
        """Make it ready for a command."""

    async def give_back(self, connection: Connection) -> None:
        """It is free again."""


class Held:
    """A connection that is ours until `give_back`.

    redis-py wraps each send and read in a timeout, and a first failure in retries with pauses,
    which costs more than a lease does. Our own timers bound requests, so both are put aside.
    (On 3.11 its timeout around a send may also swallow a cancel.)
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.connection = source.pick()
        self._settings = self.connection.socket_timeout, self.connection.retry
        self.connection.socket_timeout = None
        self.connection.retry = Retry(NoBackoff(), 0)

    @classmethod
    async def take(cls, source: Source) -> Held:
        """A connected one; the caller bounds the time."""
        held = cls(source)
        try:
            await source.connect(held.connection)
        except BaseException:
            await held.give_back()
            raise
        return held

    async def give_back(self) -> None:
        """Disconnected: nobody else can know which replies are still on their way."""
        if running_loop() is None:
            return  # Its task is destroyed, after its loop: nothing can be given back.
        self.connection.socket_timeout, self.connection.retry = self._settings
        # redis-py would log it in anew, behind our back, if its credentials have changed.
        self.connection.set_re_auth_token(None)  # type: ignore[arg-type]
        try:
            await self.cut()
        finally:
            await self._source.give_back(self.connection)

    async def cut(self) -> None:
        """Disconnect; whoever reads learns of it."""
        await self.connection.disconnect(nowait=True)

    @property
    def is_connected(self) -> bool:
        return bool(self.connection.is_connected)

    def send(self, packed: bytes) -> Coroutine[Any, Any, None]:
        return self.connection.send_packed_command((packed,), check_health=False)

    async def read(self, *, pushed: bool = False) -> Any:
        """The next reply, an error reply as its exception; *pushed* messages too if asked."""
        try:
            return await self.read_or_raise(pushed=pushed)
        except RedisError as error:
            return as_reply(error)

    def read_or_raise(self, *, pushed: bool = False) -> Coroutine[Any, Any, Any]:
        """The next reply, and *pushed* messages if asked; `as_reply` takes what is raised.

        No coroutine of ours around redis-py's: this is for who reads thousands in a second.
        """
        return self.connection.read_response(
            disable_decoding=True, disconnect_on_error=False, push_request=pushed
        )


def as_reply(error: RedisError) -> RedisError:
    """*error*, if it is a reply of the server's; raises it if it is the end of a connection."""
    # LOADING, NOAUTH and others are replies, although their classes say otherwise.
    is_reply = isinstance(error, RedisConnectionError) and type(error) is not RedisConnectionError
    if is_reply or isinstance(error, ResponseError):
        return error
    raise error


class Script:
    """A Lua script, packed.

    Args:
        items: So many at least are in its reply, which is a list.
        by_text: Never by its digest: to see whether the text may be sent.
    """

    def __init__(self, name: str, *, items: int = 1, by_text: bool = False) -> None:
        self.name = name
        self.items = items
        self.text = resources.files(__package__).joinpath(f"lua/{name}.lua").read_text("utf-8")
        self.eval = pack("EVAL", self.text)
        self.evalsha = self.eval if by_text else pack("EVALSHA", digest(self.text))


def digest(text: str) -> str:
    """By which EVALSHA knows the script *text*."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Call:
    """One script call. Copies of it may go over several connections, each with its number.

    Args:
        name: Whom it is about, for errors.
        key: What it is routed by.
    """

    __slots__ = ("key", "name", "script")

    may_repeat = True
    """Whether a copy may go over another connection while the first is not answered."""
    takes = False
    """Whether it may get a lock, which somebody must then be allowed to release."""

    def __init__(self, script: Script, name: str, key: str) -> None:
        self.script = script
        self.name = name
        self.key = key

    def parts(self, number: int) -> tuple[int, bytes]:
        """How many bulk strings stand behind the script, and they, for connection *number*.

        The number of keys, the keys, the arguments.
        """
        raise NotImplementedError

    def request(self, number: int, *, by_text: bool = False) -> bytes:
        """The whole of it, packed for connection *number*."""
        count, parts = self.parts(number)
        return count_of(count) + (self.script.eval if by_text else self.script.evalsha) + parts

    def fits(self, reply: list[Any]) -> bool:
        """Whether the script gives such a reply."""
        return len(reply) >= self.script.items

    def checked(self, reply: Any) -> Any:
        """*reply*, if the script gives such a one, or an error; else what to say in its place.

        Something between us and the server may have lost the thread.
        """
        if isinstance(reply, Exception) or (isinstance(reply, list) and self.fits(reply)):
            return reply
        return NoAnswer(f"a reply that is none of the script {self.script.name}: {reply!r:.60}")

    def with_one_key(self) -> Call | None:
        """What to ask instead while a cluster moves the slot, and takes scripts with one key only.

        None: to wait is better.
        """
        return None

    def is_certain(self, reply: Any) -> bool:
        """Whether a copy's reply is the answer, while the first copy has none."""
        return True

    def sent(self, number: int) -> None:
        """A copy goes out."""

    def heard(self, number: int, reply: Any) -> None:
        """A copy was answered, although the caller may have left."""


class SimpleCall(Call):
    """One that is made too seldom for its packing to matter."""

    __slots__ = ("_parts",)

    def __init__(self, script: Script, name: str, keys: Sequence[str], *args: str) -> None:
        super().__init__(script, name, keys[0])
        self._parts = (str(len(keys)), *keys, *args)

    def parts(self, number: int) -> tuple[int, bytes]:
        return len(self._parts), pack(*self._parts)


# Kept: there are few counts.
@functools.lru_cache(maxsize=256)
def count_of(parts: int) -> bytes:
    """What a request begins with that has a command, a script and so many bulk strings behind."""
    return b"*%d\r\n" % (2 + parts)


def pack(*parts: str) -> bytes:
    """*parts* as RESP bulk strings, without the count before them."""
    return b"".join([bulk(part) for part in parts])


def bulk(part: str) -> bytes:
    """*part* as a RESP bulk string."""
    data = part.encode(errors="surrogateescape")
    return b"$%d\r\n%b\r\n" % (len(data), data)


def command(*parts: str) -> bytes:
    """*parts* as one RESP command."""
    return b"*%d\r\n" % len(parts) + pack(*parts)


def text(reply: bytes | str) -> str:
    """A reply as text that `pack` turns into the same bytes, UTF-8 or not."""
    return reply if isinstance(reply, str) else reply.decode(errors="surrogateescape")


def maybe_text(reply: bytes | str | None) -> str | None:
    """The same for a reply that may be nil."""
    return None if reply is None else text(reply)


def trouble(error: BaseException, name: str) -> LockError | NoAnswer:
    """The exception that *error* (an error reply, or a failure to connect) is to us."""
    # A timer of ours that ended says nothing by itself.
    words = str(error) or ("" if type(error) is TimeoutError else type(error).__name__)
    words = words or "no answer in time"
    if isinstance(error, AuthenticationError) or (
        isinstance(error, ResponseError) and _NO_DATABASE.search(words)
    ):
        return NotAllowedError(f"the server refuses this login: {words}", name=name)
    if isinstance(error, REFUSALS) or (
        isinstance(error, ResponseError) and _FORBIDDEN.search(words)
    ):
        return NotAllowedError(f"the server forbids this user what is needed: {words}", name=name)
    if "WRONGTYPE" in words:
        return NameTakenError(
            f"a key of {name!r} holds something that is not a lock, or not one of this kind",
            name=name,
        )
    return NoAnswer(words)


def anew(error: LockError | NoAnswer, name: str) -> LockError | NoAnswer:
    """*error*, for one of several who share it: with the name that this one asked for."""
    again: LockError | NoAnswer
    if isinstance(error, LockError):
        again = type(error)(str(error), name=name)
    else:
        again = NoAnswer(str(error))
    again.__cause__ = error.__cause__
    return again


# Whatever redis-py or the operating system says when a connection fails. (TimeoutError, of our own
# timers, is an OSError.)
FAILURES: Final = (RedisError, OSError)
