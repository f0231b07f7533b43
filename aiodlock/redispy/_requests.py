"""Script calls through a user's client, each copy of which we know of."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

Client = Redis | RedisCluster
Key = str | bytes
Word = str | bytes

UNANSWERED: Final = (RedisConnectionError, RedisTimeoutError, OSError)
_ELSEWHERE: Final = (AskError, MovedError, ClusterDownError, TryAgainError, RedisClusterException)


class Script:
    """A Lua script, with the digest by which servers know it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def script(name: str) -> Script:
    """The one in `lua/<name>.lua`."""
    return Script(resources.files(__package__).joinpath(f"lua/{name}.lua").read_text("utf-8"))


class Reply(NamedTuple):
    """What a script returned, to this copy of the request or to one before it."""

    value: Any
    is_of_a_copy: bool
    """Whether an earlier copy was not answered: it may have done what this one found done."""


async def ask(client: Client, script: Script, key: Key, *arguments: Word) -> Reply:
    """Call *script*, again after a lost reply: as often as *client* would, at least once more.

    redis-py's own retries send copies that nobody hears of. So each is sent from here, and who
    asks can tell a lock that somebody else has released from one that it has released itself.

    Raises:
        redis.RedisError, OSError: As redis-py's own commands do.
    """
    copies = _Copies(client, script, key, arguments)
    value = await _retry(client).call_with_retry(copies.next, _ignore)
    return Reply(value, copies.sent > 1)


def _retry(client: Client) -> Retry:
    retry = None if isinstance(client, RedisCluster) else client.get_retry()
    if retry is None or retry.get_retries() == 0:
        return Retry(NoBackoff(), 1)
    return retry


async def _ignore(_: Exception) -> None:
    """redis-py disconnects what failed by itself."""


class _Copies:
    """One request, each copy of it sent once and counted."""

    def __init__(
        self, client: Client, script: Script, key: Key, arguments: tuple[Word, ...]
    ) -> None:
        self._client = client
        self._script = script
        self._words = ("1", key, *arguments)
        self._key = key
        self._tries = 0
        self.sent = 0

    async def next(self) -> Any:
        self._tries += 1
        try:
            return await self._send("EVALSHA", self._script.digest)
        except NoScriptError:
            self.sent -= 1  # It did nothing.
            # By text, which needs no permission for SCRIPT LOAD.
            return await self._send("EVAL", self._script.text)

    async def _send(self, command: str, which: str) -> Any:
        client, words = self._client, (command, which, *self._words)
        if isinstance(client, RedisCluster):
            return await self._to_node(client, words)
        if client.single_connection_client:
            self.sent += 1
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        return await self._over_pool(client, words)

    async def _over_pool(self, client: Redis, words: tuple[Word, ...]) -> Any:
        pool = client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            self.sent += 1
            await connection.send_command(*words)
            return await client.parse_response(connection, str(words[0]))
        finally:
            await pool.release(connection)

    async def _to_node(self, cluster: RedisCluster, words: tuple[Word, ...]) -> Any:
        await cluster.initialize()
        self.sent += 1
        # After a failure in redis-py's way, which draws the map of slots anew.
        if self._tries == 1:
            try:
                node = cluster.get_node_from_key(self._key)  # type: ignore[arg-type]
                assert node is not None
                return await node.execute_command(*words)
            except _ELSEWHERE:
                pass  # Nobody did anything yet.
        return await cluster.execute_command(*words)
