"""Claims in Redis or Valkey, for data that lives there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final, cast

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.client import Pipeline

from ._grant import Fenced, Grant, StaleFenceError, checked_name, grant_of

_PREFIX_BYTES_MAX: Final = 128
_TTL_S_MIN: Final = 0.01
_TTL_S_MAX: Final = 1e12  # its ms stay exact with the server's clock added
_WORDS_MAX: Final = 1000  # of one command; Lua's unpack ends at about 8000
_ESCAPES: Final = str.maketrans({"{": "%7B", "}": "%7D", "%": "%25"})

Word = str | bytes | int | float


class RedisFence:
    """Claims on the server where the data is, beside the data.

    The fence of the name `invoice:42` is the key `aiodlock-fence:{invoice:42}`. On a cluster, data
    that it guards needs the same hash tag, as in `{invoice:42}:paid`. It has no TTL, for a fence
    that expires lets latecomers in: delete it together with the data.

    Args:
        redis: A `redis.asyncio.Redis` or `RedisCluster`; it stays yours to close. Its server need
            not be the lock's.
        prefix: What every key begins with: at most 128 UTF-8 bytes, without `{` and `}`.

    Raises:
        TypeError, ValueError: An argument is not what is allowed.
    """

    def __init__(self, redis: Redis | RedisCluster, *, prefix: str = "aiodlock-fence:") -> None:
        if not isinstance(redis, Redis | RedisCluster):
            raise TypeError(f"redis must be a redis.asyncio.Redis or RedisCluster; got {redis!r}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str; got {prefix!r}")
        if len(prefix.encode()) > _PREFIX_BYTES_MAX or set("{}") & set(prefix):
            raise ValueError(
                f"prefix must be at most {_PREFIX_BYTES_MAX} UTF-8 bytes without {{ and }}; "
                f"got {prefix!r}"
            )
        self._redis = redis
        self._prefix = prefix

    def key(self, name: str) -> str:
        """The fence's key for *name*; no server call.

        Override it where your data's keys have another hash tag. `{`, `}` and `%` in the name are
        percent-encoded.
        """
        return f"{self._prefix}{{{name.translate(_ESCAPES)}}}"

    async def claim(self, lease: Fenced) -> None:
        """Let this section in if nobody newer, or it itself, was: call it before the first read.

        One script call, which may be sent again after a lost reply. A section claims once: refused
        with its own token as the stored one, an earlier call of the section has claimed.

        Args:
            lease: A `Lease`, or a `Grant`.

        Raises:
            StaleFenceError: The stored token is as large, or larger.
            TypeError, ValueError: *lease* is not what is allowed.
            redis.RedisError: The server did not answer, or refused.

        Cancellation: the server may or may not have stored the claim. Nothing but a newer lease can
        claim then.
        Source: Kleppmann, "How to do distributed locking" (2016), on fencing; the claim before the
            first read is this library's.
        """
        grant = grant_of(lease)
        stored = await self._call(_CLAIM, self.key(grant.name), grant.fencing_token, _new_id())
        if stored is not None:
            raise _stale(grant, stored)

    async def write(self, lease: Fenced, *commands: Sequence[Word]) -> list[Any]:
        """Run *commands* in one step, if the token of this section still stands.

        One script call. A check apart from its writes would protect nothing, in a pipeline or MULTI
        as well: an error there does not stop the other commands. A command that fails ends the
        call, and those before it stay done. redis-py may send a call again after a lost reply:
        prefer commands that may be run twice, or a client without retries.

        Args:
            lease: The one that claimed.
            commands: Each a list or tuple of at most 1000 words, as in `("HSET", key, "paid", 1)`.
                None of them: only the check.

        Returns:
            The reply of each, as a script gets it.

        Raises:
            StaleFenceError: Another token is stored, or none; nothing was run.
            TypeError, ValueError: An argument is not what is allowed.
            redis.RedisError: The server did not answer, or refused a command.

        Cancellation: the server may or may not have run them all.
        """
        grant = grant_of(lease)
        reply = await self._call(_WRITE, self.key(grant.name), *_guarded(grant, commands))
        return self.replies(lease, reply)

    def queue(self, pipeline: Pipeline, lease: Fenced, *commands: Sequence[Word]) -> None:
        """Put a `write` into a pipeline of yours, as one of its commands.

        No server call. It guards the commands given here, and nothing else in the pipeline, which
        goes on also where this write is refused. What `execute()` returns in its place is for
        `replies`.

        Args:
            pipeline: Of a `redis.asyncio.Redis`, with or without a transaction. (Clients of a
                cluster allow no scripts in pipelines.)
            lease: The one that claimed.
            commands: As for `write`.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        if not isinstance(pipeline, Pipeline):
            raise TypeError(f"pipeline must be one of redis.asyncio.Redis; got {pipeline!r}")
        grant = grant_of(lease)
        words = cast(Any, _guarded(grant, commands))
        pipeline.eval(_WRITE, 1, self.key(grant.name), *words)

    def replies(self, lease: Fenced, reply: list[Any] | Exception) -> list[Any]:
        """What the commands of a `queue` returned, out of its *reply* in a pipeline's.

        Raises:
            StaleFenceError: Another token is stored, or none; nothing of it was run.
            redis.RedisError: The reply itself, where `execute(raise_on_error=False)` left one.
        """
        if isinstance(reply, Exception):
            raise reply
        done, answer = reply
        if not done:
            raise _stale(grant_of(lease), answer)
        return list(answer)

    async def claim_once(self, name: str, *, ttl: float | None = None) -> bool:
        """Whether this is the first claim of *name*: a task's id, to do the task at most once.

        One script call, which may be sent again after a lost reply. Who dies after it has claimed,
        and not done the task. Needs no lock. The key is `aiodlock-fence:once:{name}`.

        Args:
            name: 1 to 512 UTF-8 bytes.
            ttl: Seconds for which the claim stands, at least 0.01: longer than a task may come
                again. Default: for ever.

        Returns:
            True for the first, False for all others.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
            redis.RedisError: The server did not answer, or refused.

        Cancellation: the server may or may not have stored the claim.
        """
        key = f"{self._prefix}once:{{{checked_name(name).translate(_ESCAPES)}}}"
        return bool(await self._call(_ONCE, key, _new_id(), _ttl_ms(ttl)))

    async def _call(self, script: str, key: str, *arguments: Word) -> Any:
        # By text: no NOSCRIPT to come back from, and the text is short.
        return await self._redis.eval(script, 1, key, *cast(Any, arguments))


def _script(name: str) -> str:
    return resources.files(__package__).joinpath(f"lua/{name}.lua").read_text("utf-8")


_CLAIM: Final = _script("claim")
_WRITE: Final = _script("write")
_ONCE: Final = _script("once")


def _new_id() -> str:
    return secrets.token_hex(8)


def _stale(grant: Grant, stored: str | bytes | None) -> StaleFenceError:
    return StaleFenceError(
        name=grant.name,
        fencing_token=grant.fencing_token,
        stored_token=None if stored is None else int(stored),
    )


def _guarded(grant: Grant, commands: Sequence[Sequence[Word]]) -> list[Word]:
    """The arguments of `write.lua`."""
    words = (word for command in commands for word in (len(_checked(command)), *command))
    return [grant.fencing_token, *words]


def _checked(command: Sequence[Word]) -> Sequence[Word]:
    if not isinstance(command, list | tuple):
        raise TypeError(f"a command must be a list or tuple of words; got {command!r}")
    if not 0 < len(command) <= _WORDS_MAX:
        raise ValueError(f"a command must have 1 to {_WORDS_MAX} words; got {len(command)}")
    return command


def _ttl_ms(ttl: float | None) -> int:
    if ttl is None:
        return 0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise TypeError(f"ttl must be a number of seconds, or None; got {ttl!r}")
    if not _TTL_S_MIN <= ttl <= _TTL_S_MAX:
        raise ValueError(
            f"ttl must be at least {_TTL_S_MIN} and at most {_TTL_S_MAX:g} s; got {ttl!r}"
        )
    return round(ttl * 1000)
