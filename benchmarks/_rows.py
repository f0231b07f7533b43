"""What is measured: each row is one kind of work, with those who do it side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

WARM_UP_S: Final = 0.3
QUICK_WARM_UP_S: Final = 0.1


@dataclass(frozen=True)
class Row:
    """One kind of work.

    Attributes:
        work: One of `work.WORKS`.
        tasks: In each process: tasks, waiters or leases.
        quick: Those of `clients` who are asked by `--quick`; none: it leaves the row out.
        nodes: Servers: 1, or the nodes of a cluster.
        quorum: So many independent servers, of which a majority decides; 0: it is no quorum.
        trouble: One of `_trouble.TROUBLES`: what befalls the last server of the quorum.
        most_rounds: More would only repeat it: bytes and messages have next to no noise.
    """

    name: str
    title: str
    work: str
    tasks: int
    clients: tuple[str, ...]
    window_s: float = 0.6
    quick: tuple[str, ...] = ()
    quick_window_s: float = 0.5
    processes: int = 1
    ttl_s: float = 10.0
    nodes: int = 1
    quorum: int = 0
    trouble: str = ""
    most_rounds: int = 1000


_OURS: Final = ("aiodlock",)
_BASE: Final = ("aiodlock", "redis-py", "floor-own")
_LOOPS: Final = ("aiodlock-uvloop", "redis-py-uvloop", "floor-own-uvloop")
_PEERS: Final = (
    *("fifo", "python-redis-lock", "pottery", "coredis", "redis-lock-py", "node-redlock"),
)
_CYCLES: Final = (
    *_BASE,
    *("aiodlock-with", "raw", "floor", "floor-uvloop"),
    *_PEERS,
    *_LOOPS,
)
_COMPETE: Final = (
    *_BASE,
    *("aiodlock-with", "fifo", "python-redis-lock", "redis-lock-py", "coredis", "drop-in"),
)
_QUEUES: Final = ("aiodlock", "redis-py", "floor-own", "fifo")
QUORUMS: Final = ("quorum", "quorum-fenced")
"""aiodlock's, without fencing and with it."""
QUORUM_PEERS: Final = ("aioredlock", "redlock-ng", "pottery")
"""The Python peers with a quorum."""
_MAJORITY: Final = (
    *QUORUMS,
    *("floor-quorum", "floor-quorum-own"),
    *QUORUM_PEERS,
    "node-redlock",
)


def _troubled(trouble: str, title: str, clients: tuple[str, ...], **more: Any) -> Row:
    """One of five servers is in trouble; the same task has cycled before, when it was not."""
    return Row(
        f"trouble-{trouble}", f"1 task, a quorum of 5: {title}", "trouble", 1, clients,
        window_s=4.0, quorum=5, trouble=trouble, **more,
    )  # fmt: skip


ROWS: Final = (
    Row(
        "cycle-1", "1 task, nobody else", "cycles", 1, (*_CYCLES, "floor-redis-py", "drop-in"),
        quick=(*_CYCLES, "floor-redis-py"),
    ),
    Row("cycle-10", "10 tasks, own names", "cycles", 10, (*_BASE, "fifo"), most_rounds=3),
    Row(
        "cycle-100", "100 tasks, own names", "cycles", 100,
        (*_BASE, *_LOOPS, "aiodlock-with", "raw", "floor", "fifo", "node-redlock"),
        quick=(*_BASE, "raw", "floor", "fifo", "node-redlock"),
    ),
    Row(
        "cycle-1000", "1000 tasks, own names", "cycles", 1000,
        (*_BASE, "aiodlock-with", "aiodlock-uvloop", "redis-py-pool", "floor", "fifo"),
        quick=("aiodlock", "redis-py-pool", "floor-own"),
    ),
    Row("handoff-2", "2 tasks, one name", "compete", 2, _QUEUES, quick=_QUEUES),
    Row(
        "handoff-10", "10 tasks, one name", "compete", 10, _QUEUES, quick=_BASE, most_rounds=3,
    ),
    Row(
        "handoff-100", "100 tasks, one name", "compete", 100,
        (*_COMPETE, "redis-py-pool", "aiodlock-uvloop"), window_s=2.0,
        quick=(*_QUEUES, "python-redis-lock"), quick_window_s=1.0,
    ),
    Row(
        "handoff-1000", "1000 tasks, one name", "compete", 1000,
        ("aiodlock", "redis-py-pool", "floor-own", "fifo"), window_s=2.0, most_rounds=3,
    ),
    Row(
        "processes", "4 processes with 5 tasks each, one name", "compete", 5,
        (*_COMPETE, "aiodlock-uvloop"), window_s=1.5, processes=4,
        quick=_QUEUES, quick_window_s=1.0,
    ),
    Row(
        "idle-10", "10 waiters, nothing happens", "wait", 10, ("aiodlock", "redis-py", "fifo"),
        window_s=6.0, most_rounds=3,
    ),
    Row(
        "idle-100", "100 waiters, nothing happens", "wait", 100,
        ("aiodlock", "redis-py-pool", "fifo"), window_s=6.0,
        quick=("aiodlock", "redis-py-pool"), quick_window_s=4.0,
    ),
    Row(
        "idle-1000", "1000 waiters, nothing happens", "wait", 1000,
        ("aiodlock", "redis-py-pool"), window_s=6.0,
        quick=("aiodlock",), quick_window_s=4.0,
    ),
    Row(
        "leases-100", "100 leases held, ttl 3 s", "hold", 100,
        ("aiodlock", "floor-own", "fifo"), window_s=4.0, ttl_s=3.0, most_rounds=3,
    ),
    Row(
        "leases-1000", "1000 leases held, ttl 3 s", "hold", 1000,
        ("aiodlock", "floor-own", "fifo"), window_s=4.0, ttl_s=3.0, most_rounds=3,
    ),
    Row(
        "leases-10000", "10,000 leases held, ttl 3 s", "hold", 10_000,
        ("aiodlock", "floor-own"),
        window_s=4.0, ttl_s=3.0, quick=("aiodlock", "floor-own"), quick_window_s=4.0,
    ),
    Row(
        "memory", "2000 leases held, allocations traced", "traced", 2000,
        ("aiodlock", "floor-own", "fifo"), ttl_s=3.0, quick=_OURS, most_rounds=2,
    ),
    Row(
        "names", "1000 more names held, the server's memory", "names", 1000,
        _QUEUES, ttl_s=60.0, quick=_OURS, most_rounds=2,
    ),
    Row(
        "queue", "1000 more waiters on one name, the server's memory", "queue", 1000,
        ("aiodlock", "redis-py-pool", "fifo"), quick=_OURS, most_rounds=2,
    ),
    Row(
        "cluster", "2 processes with 5 tasks each, one name, a cluster of 3 nodes", "compete", 5,
        ("aiodlock", "redis-py"), window_s=2.0, processes=2, nodes=3,
        most_rounds=2,
    ),
    Row(
        "quorum-3", "1 task, nobody else, a quorum of 3", "cycles", 1,
        (*_MAJORITY, "floor-quorum-redis-py"), window_s=1.0, quorum=3,
    ),
    Row(
        "quorum-5", "1 task, nobody else, a quorum of 5", "cycles", 1,
        (*_MAJORITY, "floor-quorum-redis-py"), window_s=1.0, quorum=5,
        quick=(*QUORUMS, "floor-quorum", "floor-quorum-redis-py", QUORUM_PEERS[0]),
    ),
    Row(
        "quorum-tasks", "100 tasks, own names, a quorum of 5", "cycles", 100, _MAJORITY,
        window_s=1.0, quorum=5, quick=QUORUMS,
    ),
    Row(
        "quorum-contest", "10 tasks, one name, a quorum of 5", "compete", 10,
        (*QUORUMS, *QUORUM_PEERS, "node-redlock"), window_s=2.0, quorum=5, most_rounds=3,
    ),
    _troubled("stopped", "one stops (SIGSTOP)", _MAJORITY, quick=QUORUMS, quick_window_s=2.0),
    _troubled("refusing", "one refuses connections", QUORUMS, most_rounds=3),
    _troubled("read-only", "one is read-only", QUORUMS, most_rounds=3),
    _troubled("full", "one is full", QUORUMS, most_rounds=3),
    _troubled("password", "one wants a password", QUORUMS, most_rounds=3),
    _troubled("slow", "one answers 20 ms late", QUORUMS, most_rounds=3),
)  # fmt: skip


def chosen(patterns: Iterable[str]) -> tuple[Row, ...]:
    """The rows that have one of those names, or whose names begin with one of them and a dash.

    Raises:
        ValueError: One of them is no row.
    """
    wanted = tuple(patterns)
    for pattern in wanted:
        if not any(_fits(row, pattern) for row in ROWS):
            raise ValueError(f"no row {pattern!r}; there are {', '.join(row.name for row in ROWS)}")
    return tuple(row for row in ROWS if any(_fits(row, pattern) for pattern in wanted))


def _fits(row: Row, pattern: str) -> bool:
    return row.name == pattern or row.name.startswith(f"{pattern}-")
