"""What each lock does when something goes wrong, tried on a real server behind a proxy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from aiodlock.testing import LockServer, lock_server
from tests.proxy import ChaosProxy
from tests.until import until

from ._orders import Order
from .clients import CLIENTS
from .clients._api import Client, Pair

ASYNC_CLIENTS: Final = (
    *("aiodlock", "redis-py", "fifo", "pottery", "coredis", "redis-lock-py"),
    *("aioredlock", "redlock-ng"),
)
"""Those whose calls are awaited; what blocks cannot be cancelled."""
TTL_S: Final = 20.0
LIMIT_S: Final = 8.0
"""For a call that may hang; well below the ttl, so that nothing came by expiry."""
SETTLE_S: Final = 1.0
"""Time for clean-up in the background, before a key counts as left."""
TURNS: Final = 40
"""At so many turns of the loop a release is cancelled; more than a release takes."""
ROUNDS: Final = 3
WAITERS: Final = 5
APART_S: Final = 0.05
SHORT_TTL_S: Final = 2.0
GOT: Final = "got"
NOT_GOT: Final = "`False`"
ANSWERED: Final = (GOT, NOT_GOT)


@dataclass
class Bench:
    """One client behind a proxy, with a look at its server past the proxy."""

    client: Client
    proxy: ChaosProxy
    redis: Redis
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def fresh(self, ttl_s: float = TTL_S) -> tuple[str, Pair]:
        """A name that nobody had, on a connection that is there and knows the scripts."""
        for _ in range(2):
            pair = self.client.pair(f"trial-{next(self.numbers)}", ttl_s)
            await pair.release(await pair.acquire())
        name = f"trial-{next(self.numbers)}-x"
        return name, self.client.pair(name, ttl_s)

    async def is_taken(self, name: str) -> bool:
        return bool(await self.redis.exists(self.client.key(name)))

    async def end_of(self, name: str) -> str:
        """What became of the key, a moment later."""
        await asyncio.sleep(SETTLE_S)
        return "left until its ttl" if await self.is_taken(name) else "free"


async def cancelled_release(bench: Bench) -> str:
    """A release is cancelled at one turn of the loop after the other."""
    names = []
    for turn in range(1, TURNS + 1):  # At 0 it would not even begin.
        name, pair = await bench.fresh()
        names.append(name)
        releasing = asyncio.ensure_future(pair.release(await pair.acquire()))
        for _ in range(turn):
            await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
    await asyncio.sleep(SETTLE_S)
    left = [name for name in names if await bench.is_taken(name)]
    return "at some of them left until its ttl" if left else "free, each time"


async def cancelled_acquire(bench: Bench) -> str:
    """An acquisition is cancelled when the server has granted, and the reply is on its way."""
    name, pair = await bench.fresh()
    bench.proxy.delay_replies(SETTLE_S, name.encode())
    acquiring = asyncio.ensure_future(pair.acquire())
    await until(lambda: bench.is_taken(name), LIMIT_S)
    acquiring.cancel()
    await asyncio.wait([acquiring])
    bench.proxy.heal()
    await asyncio.sleep(SETTLE_S)
    return await bench.end_of(name)


async def lost_reply_to_acquire(bench: Bench) -> str:
    """The server grants; its reply is lost, and with it the connection."""
    name, pair = await bench.fresh()
    bench.proxy.drop_replies(1, name.encode(), close=True)
    said, held = await _said(pair.acquire())
    if said == GOT:
        await pair.release(held)
        return said
    return f"{said}; {await bench.end_of(name)}"


async def lost_reply_to_release(bench: Bench) -> str:
    """The server releases; its reply is lost, and with it the connection."""
    name, pair = await bench.fresh()
    held = await pair.acquire()
    bench.proxy.drop_replies(1, name.encode(), close=True)
    said, _ = await _said(pair.release(held))
    return f"{'no error' if said in ANSWERED else said}; {await bench.end_of(name)}"


async def order_of_waiters(bench: Bench) -> str:
    """Five tasks come one after the other; the lock is released, and each releases at once."""
    in_order = 0
    for _ in range(ROUNDS):
        name, first = await bench.fresh()
        came: list[int] = []
        held = await first.acquire()
        waiting = []
        for number in range(WAITERS):
            waiting.append(asyncio.create_task(_wait_turn(bench, name, number, came)))
            await asyncio.sleep(APART_S)
        await first.release(held)
        await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)
        in_order += came == sorted(came)
    return "in order of arrival" if in_order == ROUNDS else "in any order"


async def long_work(bench: Bench) -> str:
    """The work takes three times the ttl, with the options that the benchmarks use."""
    name, pair = await bench.fresh(SHORT_TTL_S)
    held = await pair.acquire()
    await asyncio.sleep(3 * SHORT_TTL_S)
    is_kept = await bench.is_taken(name)
    await _said(pair.release(held))
    return "extended" if is_kept else "over after the ttl"


TRIALS: Final[dict[str, Callable[[Bench], Awaitable[str]]]] = {
    "release cancelled, at each of its steps": cancelled_release,
    "acquire cancelled when already granted": cancelled_acquire,
    "reply to acquire lost": lost_reply_to_acquire,
    "reply to release lost": lost_reply_to_release,
    "five waiters": order_of_waiters,
    "work of three ttls": long_work,
}
"""By the words for it in the table."""


async def _wait_turn(bench: Bench, name: str, number: int, came: list[int]) -> None:
    pair = bench.client.pair(name, TTL_S)
    held = await pair.acquire()
    came.append(number)
    await pair.release(held)


async def _said(call: Awaitable[Any]) -> tuple[str, Any]:
    """How a call ended, in a word; what it returned."""
    try:
        answer = await asyncio.wait_for(call, LIMIT_S)
    except TimeoutError:
        return f"nothing for {LIMIT_S:.0f} s", None
    except Exception as error:
        return f"`{type(error).__name__}`", None
    return (NOT_GOT if answer is False else GOT), answer


async def tried(client: str, server: LockServer) -> dict[str, str]:
    """What one client did in each trial."""
    outcomes = {}
    async with Redis.from_url(server.url) as redis:
        for title, trial in TRIALS.items():
            await redis.flushall()
            async with ChaosProxy(server.port) as proxy:
                made = CLIENTS[client].make()
                await made.open(Order(client, "cycles", (proxy.port,), WAITERS + 1, 0, 0))
                try:
                    outcomes[title] = await trial(Bench(made, proxy, redis))
                finally:
                    proxy.heal()
                    await made.aclose()
    return outcomes


def try_one(client: str) -> dict[str, str]:
    """The same, with a server of its own."""
    with lock_server() as server:
        return asyncio.run(tried(client, server))
