"""Which libraries there are, how each is used here, what each cannot do."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from .._server import Habits
from . import _apart
from ._api import Client


@dataclass(frozen=True)
class Entry:
    """One library in one manner of use.

    Attributes:
        module: Of this package, with the class `adapter`; or a program for `node`.
        needs: The distribution to have installed, and the module to find; None: only our own.
        apart: Where it is, if it cannot share the environment.
        cannot: What it has no answer to, with the reason.
    """

    label: str
    module: str
    adapter: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    apart: _apart.Place | None = None
    uvloop: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)
    habits: Habits = field(default_factory=Habits)

    @property
    def is_node(self) -> bool:
        return self.module.endswith(".mjs")

    def make(self) -> Client:
        """The adapter; only a worker process calls this."""
        if self.apart is not None:
            sys.path.insert(0, str(self.apart.path))
        module = importlib.import_module(f"{__package__}.{self.module}")
        return cast(Client, getattr(module, self.adapter)(**self.options))

    def absence(self) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if self.apart is not None:
            return self.apart.absence()
        for distribution, module in filter(None, (self.needs, UVLOOP if self.uvloop else None)):
            if importlib.util.find_spec(module) is None:
                return f"{distribution} is not installed"
        return None

    def version(self) -> str | None:
        """Of its distribution."""
        if self.apart is not None:
            return self.apart.version()
        return importlib.metadata.version(self.needs[0]) if self.needs else None


UVLOOP: Final = ("uvloop", "uvloop")
NO_WATCHDOG: Final = "does not extend by itself"
NO_QUEUE: Final = "nobody waits here: it is no lock"
_NO_WATCHDOG: Final = {"hold": NO_WATCHDOG, "traced": NO_WATCHDOG}
_NO_QUEUE: Final = {"compete": NO_QUEUE, "wait": NO_QUEUE, "queue": NO_QUEUE, **_NO_WATCHDOG}
_SETS: Final = Habits(frozenset({"set"}))
_POOL: Final = {"max_connections": 5000}


def _on_uvloop(entry: Entry) -> Entry:
    return replace(entry, label=f"{entry.label}, uvloop", uvloop=True)


_AIODLOCK: Final = Entry("aiodlock, acquire and release", "aiodlocks", "ByHand")
_REDIS_PY: Final = Entry("redis-py Lock", "redis_py", "OwnLock", cannot=_NO_WATCHDOG, habits=_SETS)
_FLOOR: Final = Entry("floor, trivial scripts", "floors", "Trivial", cannot=_NO_QUEUE, habits=_SETS)
_FLOOR_OWN: Final = Entry("floor, aiodlock's scripts", "floors", "Own")

CLIENTS: Final[dict[str, Entry]] = {
    "aiodlock": _AIODLOCK,
    "aiodlock-with": Entry("aiodlock, async with", "aiodlocks", "Block"),
    "aiodlock-uvloop": _on_uvloop(_AIODLOCK),
    "quorum": Entry("aiodlock, quorum without fencing", "aiodlocks", "Quorum", {"fencing": False}),
    "quorum-fenced": Entry(
        "aiodlock, quorum with fencing", "aiodlocks", "Quorum", {"fencing": True}
    ),
    "redis-py": _REDIS_PY,
    "redis-py-pool": replace(_REDIS_PY, label="redis-py Lock, larger pool", options=_POOL),
    "redis-py-uvloop": _on_uvloop(_REDIS_PY),
    "drop-in": Entry(
        "aiodlock.redispy, for redis-py's Lock",
        "redis_py",
        "OwnLock",
        {"drop_in": True},
        cannot=_NO_WATCHDOG,
    ),
    "raw": Entry(
        "redis-py, two commands", "redis_py", "Commands", _POOL, cannot=_NO_QUEUE, habits=_SETS
    ),
    "fifo": Entry(
        "redis-fifo-lock, larger pool",
        "fifo",
        "Fifo",
        _POOL,
        needs=("redis-fifo-lock", "redis_fifo_lock"),
    ),
    "python-redis-lock": Entry(
        "python-redis-lock, in threads",
        "threads",
        "InThreads",
        needs=("python-redis-lock", "redis_lock"),
        habits=Habits(frozenset({"get", "set"}), repeats=frozenset({"get"})),
    ),
    "pottery": Entry(
        "pottery AIORedlock, larger pool",
        "potteries",
        "Pottery",
        _POOL,
        needs=("pottery", "pottery"),
        cannot=_NO_WATCHDOG,
        habits=_SETS,
    ),
    "coredis": Entry(
        "coredis Lock",
        "core",
        "Core",
        needs=("coredis", "coredis"),
        cannot=_NO_WATCHDOG,
        habits=_SETS,
    ),
    "redis-lock-py": Entry(
        "redis-lock-py, larger pool",
        "pubsub",
        "PubSubLock",
        _POOL,
        apart=_apart.REDIS_LOCK_PY,
        cannot=_NO_WATCHDOG,
        habits=_SETS,
    ),
    "aioredlock": Entry(
        "aioredlock", "aioredlocks", "AioRedlock", apart=_apart.AIOREDLOCK, cannot=_NO_WATCHDOG
    ),
    "redlock-ng": Entry(
        "redlock-ng AsyncRedlock",
        "redlock_ng",
        "RedlockNg",
        apart=_apart.REDLOCK_NG,
        cannot=_NO_WATCHDOG,
        habits=_SETS,
    ),
    "node-redlock": Entry(
        "node redlock with ioredis",
        "redlock.mjs",
        apart=_apart.REDLOCK,
        cannot={
            **_NO_WATCHDOG,
            "names": "the worker for node has no such work",
            "queue": "the worker for node has no such work",
        },
    ),
    "floor": _FLOOR,
    "floor-uvloop": _on_uvloop(_FLOOR),
    "floor-own": _FLOOR_OWN,
    "floor-redis-py": Entry(
        "floor, aiodlock's scripts over redis-py's connection",
        "floors",
        "OwnOverRedisPy",
        cannot=_NO_QUEUE,
    ),
    "floor-own-uvloop": _on_uvloop(_FLOOR_OWN),
    "floor-quorum": Entry(
        "floor of a quorum, trivial scripts",
        "quorum_floors",
        "TrivialQuorum",
        cannot=_NO_QUEUE,
        habits=_SETS,
    ),
    "floor-quorum-own": Entry(
        "floor of a quorum, aiodlock's scripts", "quorum_floors", "OwnQuorum", cannot=_NO_QUEUE
    ),
    "floor-quorum-redis-py": Entry(
        "floor of a quorum, aiodlock's scripts over redis-py's connections",
        "quorum_floors",
        "OwnQuorum",
        {"over_redis_py": True},
        cannot=_NO_QUEUE,
    ),
    "floor-quorum-all": Entry(
        "floor of a quorum, waiting for every server",
        "quorum_floors",
        "TrivialQuorum",
        {"of_all": True},
        cannot=_NO_QUEUE,
        habits=_SETS,
    ),
    "none": Entry("no lock at all, which the checker must find", "nothing", "Nothing"),
}

LEFT_OUT: Final = {
    "aioredlock-py": "is for one server only, and its aioredis 2 cannot be imported on Python 3.11",
    "configurable-redlock": "is pottery's AIORedlock with other arguments",
    "pyredlock": "asks one server after the other, so it is slower than all that are measured",
    "redlock": "blocks, and asks one server after the other: slower than all that are measured",
    "redlock-plus": "blocks, and makes new threads for each question: slower still",
    "redlock-py": "blocks, and asks one server after the other: slower than all that are measured",
}
"""Peers for a quorum that were tried, and are in no row, with the reason."""
