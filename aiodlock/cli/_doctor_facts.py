"""What `aiodlock doctor` has seen of one server, before anybody judges it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Trouble = Literal[
    "unreachable", "not-redis", "certificate", "login", "busy", "loading", "connections-full"
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the locks are to be: the options that the facts are judged by."""

    ttl: float = 30.0
    prefix: str = "aiodlock:"
    request_timeout: float = 2.0


@dataclass(frozen=True, slots=True)
class Clock:
    """How far the server's clock is ahead of ours, known to within so much."""

    ahead_s: float
    within_s: float


@dataclass(frozen=True, slots=True)
class SlowCommand:
    """One that the server noted as slow, without its arguments, which are nobody's business."""

    command: str
    seconds: float
    age_s: float


@dataclass(slots=True)
class Leftovers:
    """Keys under the prefix, by what is odd about them.

    Attributes:
        seen: How many were looked at.
        is_whole: Whether that was all of them.
        no_ttl: Keys of locks that never expire.
        wrong_type: Keys of locks that hold something of another type.
        foreign: Locks that another library wrote.
        dead_queues: Queues of a free lock in which nobody is alive.
        strangers: Keys under the prefix that are no lock's.
    """

    seen: int = 0
    is_whole: bool = True
    no_ttl: list[str] = field(default_factory=list)
    wrong_type: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    dead_queues: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """What was seen of one server; what is missing was not seen, and `unseen` says why.

    Attributes:
        address: Where it is, without a password.
        trouble: Why it could not be asked, or not to the end, with its own words.
        info: `INFO`, or what `HELLO` told where that is refused.
        config: `CONFIG GET` of what matters to a lock.
        cluster: `CLUSTER INFO`, where it is in a cluster.
        replicas: For each replica its state, with how many seconds it is behind.
        unseen: By question, why the server did not answer it.
        clock, clock_later: Two readings, with all other questions between them.
        refused: By command, the words in which this user is forbidden what a lock needs.
        failed: By commands that a lock needs, why they fail although they are allowed.
        write_trouble: Why the server takes no write from anybody, in its words; "": it does.
        message_delays_s: From publishing to hearing, each; None: not tried.
        message_trouble: Why messages do not come; "": they do.
        latencies_s: Of calls of a script that locks use.
        slow_commands: Out of the server's own log.
        sentinels: How many listen to the channel of Sentinels.
        leftovers: Keys under the prefix; None: not seen.
    """

    address: str
    trouble: tuple[Trouble, str] | None = None
    info: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    cluster: dict[str, str] = field(default_factory=dict)
    replicas: Sequence[Replica] = ()
    unseen: dict[str, str] = field(default_factory=dict)
    clock: Clock | None = None
    clock_later: Clock | None = None
    refused: dict[str, str] | None = None
    failed: dict[str, str] = field(default_factory=dict)
    write_trouble: str | None = None
    message_delays_s: list[float] | None = None
    message_trouble: str = ""
    latencies_s: list[float] = field(default_factory=list)
    slow_commands: list[SlowCommand] = field(default_factory=list)
    sentinels: int | None = None
    leftovers: Leftovers | None = None

    def number(self, key: str) -> float | None:
        """The figure that `INFO`, `CONFIG GET` or `CLUSTER INFO` gives for *key*, if seen."""
        for source in (self.info, self.config, self.cluster):
            try:
                return float(source[key])
            except (KeyError, ValueError):
                continue
        return None

    @property
    def is_replica(self) -> bool:
        return self.info.get("role") in ("slave", "replica")

    @property
    def is_clustered(self) -> bool:
        return self.info.get("cluster_enabled") == "1" or self.mode == "cluster"

    @property
    def mode(self) -> str:
        """Standalone, cluster or sentinel; Valkey has a key of its own for it."""
        return self.info.get("redis_mode") or self.info.get("server_mode", "")


@dataclass(frozen=True, slots=True)
class Replica:
    """One that follows the server."""

    address: str
    state: str
    lag_s: float


def lines_of(reply: str) -> dict[str, str]:
    """The `key:value` lines of `INFO` and of `CLUSTER INFO`."""
    pairs = (line.strip().partition(":") for line in reply.splitlines())
    return {key: value for key, colon, value in pairs if colon and not key.startswith("#")}


def replicas_of(info: dict[str, str]) -> list[Replica]:
    """The replicas that `INFO` names, as `slave0:ip=10.0.0.7,port=6379,state=online,lag=1`."""
    found = []
    for number in range(int(info.get("connected_slaves", 0))):
        parts = dict(
            part.split("=", 1) for part in info.get(f"slave{number}", "").split(",") if "=" in part
        )
        address = f"{parts.get('ip', '?')}:{parts.get('port', '?')}"
        found.append(Replica(address, parts.get("state", "?"), float(parts.get("lag", 0))))
    return found


def said(error: BaseException) -> str:
    """The server's words, with the code before them, which redis-py takes away."""
    code = getattr(error, "status_code", None)
    words = str(error) or type(error).__name__
    return f"{code} {words}" if code else words
