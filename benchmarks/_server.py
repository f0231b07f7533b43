"""What the server says about the work of its clients: the difference of two looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

Figures = dict[str, float]
LOOK_WITHIN_S = 10.0


@dataclass(frozen=True)
class Look:
    """What one server said at one moment.

    Attributes:
        calls: Of each command, those inside scripts included.
    """

    cpu_s: float
    connections: int
    net_out_bytes: int
    memory_bytes: int
    keys_bytes: int
    published: int
    calls: Mapping[str, int] = field(default_factory=dict)


class Observer:
    """Looks at one server over a connection of its own; `async with Observer(port) as observer`."""

    def __init__(self, port: int) -> None:
        self._redis = Redis(
            port=port,
            decode_responses=True,
            driver_info=None,
            socket_timeout=LOOK_WITHIN_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def __aenter__(self) -> Self:
        await self._redis.ping()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._redis.aclose()

    async def look(self, *, keys: bool = False) -> Look:
        """*keys*: add up what every key takes, which asks for each."""
        info = await self._redis.info("everything")
        return Look(
            cpu_s=info["used_cpu_sys"] + info["used_cpu_user"],
            connections=info["connected_clients"] - 1,
            net_out_bytes=info["total_net_output_bytes"],
            memory_bytes=info["used_memory"],
            keys_bytes=await self._keys_bytes() if keys else 0,
            published=await self._published(),
            calls=_calls(info),
        )

    async def version(self) -> str:
        info = await self._redis.info("server")
        name = info.get("server_name", "redis")
        return f"{name} {info.get(f'{name}_version', info['redis_version'])}"

    async def connections(self) -> int:
        """How many there are but ours."""
        return int((await self._redis.info("clients"))["connected_clients"]) - 1

    async def _keys_bytes(self) -> int:
        pipeline = self._redis.pipeline(transaction=False)
        async for key in self._redis.scan_iter(count=1000):
            pipeline.memory_usage(key, samples=0)
        return sum(size or 0 for size in await pipeline.execute())

    async def _published(self) -> int:
        """Messages sent to other nodes of a cluster; 0 where there is none."""
        if not (await self._redis.info("cluster"))["cluster_enabled"]:
            return 0
        told: dict[str, Any] = await self._redis.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
        return int(told.get("cluster_stats_messages_publish_sent", 0))


def _calls(info: Mapping[str, Any]) -> dict[str, int]:
    prefix = "cmdstat_"
    return {
        key.removeprefix(prefix): stat["calls"]
        for key, stat in info.items()
        if key.startswith(prefix)
    }


OURS: Final = frozenset({"info", "cluster|info", "scan", "memory|usage"})
"""Commands that only the observer sends."""
SENT: Final = frozenset({"evalsha", "eval", "blpop", "subscribe", "unsubscribe", "ping"})
"""Commands that scripts never call."""


@dataclass(frozen=True)
class Habits:
    """How to tell what a client sends from what its scripts call: the server counts both alike.

    Attributes:
        sends: What it sends besides `SENT`.
        repeats: Those of them that each of its scripts calls once.
    """

    sends: frozenset[str] = frozenset()
    repeats: frozenset[str] = frozenset()


def calls_between(before: Look, after: Look) -> dict[str, int]:
    """Calls of each command meanwhile, inside scripts too; without the observer's."""
    grown = {
        command: calls - before.calls.get(command, 0)
        for command, calls in after.calls.items()
        if command not in OURS
    }
    return {command: calls for command, calls in grown.items() if calls}


def sent_of(calls: Mapping[str, int], habits: Habits) -> int:
    """How many of *calls* came over a connection."""
    outside = sum(calls.get(command, 0) for command in SENT | habits.sends)
    scripts = calls.get("evalsha", 0) + calls.get("eval", 0)
    return outside - scripts * len(habits.repeats)


def per_cycle(before: Look, after: Look, cycles: int, habits: Habits) -> Figures:
    """What one cycle cost the server, and what it was asked."""
    calls = calls_between(before, after)
    return {
        "server_cpu_us": (after.cpu_s - before.cpu_s) / cycles * 1e6,
        "sent": sent_of(calls, habits) / cycles,
        "evalsha": calls.get("evalsha", 0) / cycles,
        "published": calls.get("publish", 0) / cycles,
        "calls": sum(calls.values()) / cycles,
        "net_out_bytes": (after.net_out_bytes - before.net_out_bytes) / cycles,
    }


def per_second(
    before: Look, after: Look, seconds: float, clients: int, habits: Habits
) -> Figures:  # fmt: skip
    """What the server spends in a second, and what each of so many waiters or leases sends."""
    sent = sent_of(calls_between(before, after), habits)
    return {
        "server_cpu_s_per_s": (after.cpu_s - before.cpu_s) / seconds,
        "sent_per_s": sent / seconds / clients,
    }


def memory(before: Look, after: Look, count: int) -> Figures:
    """Bytes that each of *count* takes on the server: its share of the keys, and of everything."""
    return {
        "keys_bytes": (after.keys_bytes - before.keys_bytes) / count,
        "server_bytes": (after.memory_bytes - before.memory_bytes) / count,
    }


def connections(looks: Sequence[Look], midway: int) -> Figures:
    """The most connections that a server was seen to have."""
    return {"connections": max(midway, *(look.connections for look in looks))}
