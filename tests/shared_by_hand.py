"""One name that several may hold, worked by single script calls with hand-made owner tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.asyncio import Redis

from aiodlock import _names
from tests.by_hand import PREFIX, Grant, Refusal
from tests.mutants import text_of


class SharedState(NamedTuple):
    """What stands in the keys; `ttls_ms` has those that exist, -1: without a TTL."""

    holders: dict[str, int]
    grants: dict[str, int]
    queue: list[str]
    alive: dict[str, int]
    ttls_ms: dict[str, int]


class SharedByHand:
    """The scripts, called for one name; what they answer, and what they leave.

    Args:
        redis: A client with ``decode_responses=True``.
    """

    def __init__(self, redis: Redis, name: str = "x") -> None:
        self.redis = redis
        self.keys = _names.keys(PREFIX, name)
        self.all_keys = (*self.keys, self.keys.grants)
        self._inboxes = _names.inbox_prefix(PREFIX)

    async def acquire(
        self, token: str, *, ttl_ms: int = 30_000, alive_ms: int = 6_000
    ) -> Grant | Refusal | None:
        """One poll; ``None``: the token has a tombstone."""
        args = token, str(ttl_ms), str(alive_ms), self._inboxes
        reply = await self._call("share_acquire", self.all_keys, *args)
        if reply[0] == -1:
            return None
        return Grant(reply[1], reply[2], bool(reply[3])) if reply[0] else Refusal(*reply[1:])

    async def enter(self, *tokens: str, ttl_ms: int = 30_000) -> list[int]:
        """Polls that must all be granted; their fencing tokens."""
        grants = [await self.acquire(token, ttl_ms=ttl_ms) for token in tokens]
        assert all(isinstance(grant, Grant) for grant in grants), grants
        return [grant.fencing_token for grant in grants if isinstance(grant, Grant)]

    async def queue(self, *tokens: str) -> None:
        """Polls that must all be refused."""
        for token in tokens:
            answer = await self.acquire(token)
            assert isinstance(answer, Refusal), f"{token} was not refused: {answer}"

    async def release(
        self, token: str, *, how: str = "0", client_id: str = "nobody"
    ) -> tuple[bool, list[str]]:
        """Whether it held, and which of the client's own waiters entered."""
        reply = await self._call(
            "share_release", self.all_keys, token, how, self._inboxes, client_id
        )
        return bool(reply[0]), [value.partition("/")[0] for value in reply[1:]]

    async def extend(self, token: str, fencing_token: int, *, ttl_ms: int = 30_000) -> int | None:
        """The ms left; None: that grant does not stand."""
        keys = self.keys.lock, self.keys.grants
        args = token, str(ttl_ms), str(fencing_token)
        ours, *left_ms = await self._call("share_extend", keys, *args)
        return int(left_ms[0]) if ours else None

    async def state(self) -> SharedState:
        """All five keys, read in one transaction."""
        lock, _, queue, alive = self.keys
        async with self.redis.pipeline(transaction=True) as pipe:
            for key in (lock, self.keys.grants, queue, alive):
                pipe.zrange(key, 0, -1, withscores=True)
            for key in self.all_keys:
                pipe.pttl(key)
            holders, grants, waiters, lives, *ttls = await pipe.execute()
        kinds = (*self.keys._fields, "grants")
        return SharedState(
            {member: int(score) for member, score in holders},
            {member: int(score) for member, score in grants},
            [member for member, _ in waiters],
            {member: int(score) for member, score in lives},
            {kind: ttl for kind, ttl in zip(kinds, ttls, strict=True) if ttl != -2},
        )

    async def holders(self) -> list[str]:
        """Their owner tokens, sorted."""
        return sorted((await self.state()).holders)

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def let_end(self, *tokens: str) -> None:
        """As if the lives of these holders had ended a moment ago."""
        past = await self.now_ms() - 1
        await self.redis.zadd(self.keys.lock, dict.fromkeys(tokens, past), xx=True)

    async def let_die(self, *tokens: str) -> None:
        """As if the liveness of these waiters had passed a moment ago."""
        past = await self.now_ms() - 1
        await self.redis.zadd(self.keys.alive, dict.fromkeys(tokens, past))

    async def let_live(self, token: str, alive_ms: int) -> None:
        """As if this waiter had polled a moment ago."""
        until_ms = await self.now_ms() + alive_ms
        await self.redis.zadd(self.keys.alive, {token: until_ms})
        await self.redis.pexpire(self.keys.alive, 12_000)
        await self.redis.pexpire(self.keys.queue, 12_000)

    async def _call(self, script: str, keys: tuple[str, ...], *args: str) -> Any:
        return await self.redis.eval(text_of(script), len(keys), *keys, *args)
