"""One name on a real server, worked by single script calls with hand-made owner tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis.asyncio import Redis

from aiodlock import _names
from tests.mutants import text_of

PREFIX = "aiodlock:"

# Three clients. Their tokens begin alike on purpose: `...:1` must not pass for `...:12`.
ONE, OTHER, THIRD = (
    f"{label}:{digit * 32}" for label, digit in (("a", "1"), ("b", "2"), ("c", "3"))
)
A, B, C, D = f"{ONE}:1", f"{OTHER}:1", f"{ONE}:12", f"{THIRD}:1"


class Grant(NamedTuple):
    """An acquire that was granted."""

    fencing_token: int
    ttl_left_ms: int
    already: bool


class Refusal(NamedTuple):
    """An acquire that was refused."""

    value: str
    ttl_left_ms: int
    place: int
    waiters: int
    last_fencing_token: int


class State(NamedTuple):
    """What stands in the four keys; `ttls_ms` has those that exist, -1: without a TTL."""

    value: str | None
    fencing_token: int | None
    queue: list[str]
    alive: dict[str, int]
    ttls_ms: dict[str, int]

    @property
    def holder(self) -> str | None:
        """The owner token in the lock's key."""
        return None if self.value is None else self.value.partition("/")[0]


class ByHand:
    """The scripts, called for one name; what they answer, and what they leave.

    Args:
        redis: A client with ``decode_responses=True``.
        name: The name, or another one for a second world on the same server.
    """

    def __init__(self, redis: Redis, name: str = "name", prefix: str = PREFIX) -> None:
        self.redis = redis
        self.keys = _names.keys(prefix, name)
        self._inboxes = _names.inbox_prefix(prefix)

    async def acquire(
        self, token: str, *, ttl_ms: int = 30_000, alive_ms: int = 6_000
    ) -> Grant | Refusal | None:
        """One poll; ``None``: the token has a tombstone."""
        reply = await self._call(
            "acquire", self.keys, token, str(ttl_ms), str(alive_ms), self._inboxes
        )
        if reply[0] == -1:
            return None
        if reply[0] == 1:
            assert len(reply) == 4, f"a broken answer: {reply}"
            return Grant(reply[1], reply[2], bool(reply[3]))
        return Refusal(*reply[1:])

    async def granted(self, token: str, *, ttl_ms: int = 30_000, alive_ms: int = 6_000) -> Grant:
        """A poll that must be granted."""
        answer = await self.acquire(token, ttl_ms=ttl_ms, alive_ms=alive_ms)
        assert isinstance(answer, Grant), f"{token} was refused: {answer}"
        return answer

    async def refused(self, token: str, *, ttl_ms: int = 30_000, alive_ms: int = 6_000) -> Refusal:
        """A poll that must be refused."""
        answer = await self.acquire(token, ttl_ms=ttl_ms, alive_ms=alive_ms)
        assert isinstance(answer, Refusal), f"{token} was not refused: {answer}"
        return answer

    async def extend(self, value: str, *, ttl_ms: int = 30_000) -> int | str | None:
        """The ms left; or what stands in the key instead of *value*, if anything does."""
        ours, answer = await self._call("extend", (self.keys.lock,), str(ttl_ms), value)
        return int(answer) if ours else answer

    async def release(
        self, token: str, *, tombstone: bool = False, client_id: str = "nobody"
    ) -> tuple[bool, str | None]:
        """Whether the lock was the token's, and what stands in the key now."""
        removed, value = await self._call(
            "release", self.keys, token, str(int(tombstone)), self._inboxes, client_id
        )
        return bool(removed), value

    async def hand_over(
        self, holder: str, waiter: str, *, tombstone: bool = False, client_id: str = "nobody"
    ) -> str:
        """The holder's release, which must hand the lock to *waiter*; the new value."""
        removed, value = await self.release(holder, tombstone=tombstone, client_id=client_id)
        assert removed, f"{holder} did not hold"
        assert value is not None, f"handed to nobody, not to {waiter}"
        assert value.startswith(f"{waiter}/"), f"handed to {value}, not to {waiter}"
        return value

    async def state(self) -> State:
        """All four keys, read in one transaction."""
        lock, fence, queue, alive = self.keys
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.get(lock)
            pipe.get(fence)
            pipe.zrange(queue, 0, -1)
            pipe.zrange(alive, 0, -1, withscores=True)
            for key in self.keys:
                pipe.pttl(key)
            value, last, waiters, lives, *ttls = await pipe.execute()
        return State(
            value,
            None if last is None else int(last),
            list(waiters),
            {member: int(score) for member, score in lives},
            {
                kind: ttl
                for kind, ttl in zip(self.keys._fields, ttls, strict=True)
                if ttl != -2  # no such key
            },
        )

    async def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def let_expire(self) -> None:
        """As if the holder's time were over."""
        await self.redis.delete(self.keys.lock)

    async def let_die(self, *tokens: str) -> None:
        """As if the liveness of these waiters had passed a moment ago."""
        past = await self.now_ms() - 1
        await self.redis.zadd(self.keys.alive, dict.fromkeys(tokens, past))

    async def _call(self, script: str, keys: tuple[str, ...], *args: str) -> Any:
        return await self.redis.eval(text_of(script), len(keys), *keys, *args)


def client_id(token: str) -> str:
    """The part of an owner token that names its client's inbox."""
    return token.split(":")[1]
