"""The plans: which servers there are, which faults strike them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.chaos import faults
from tests.chaos.faults import Kind

PAUSED = "client paused"
AWAY = "server away for a while, memory kept"
FORGOTTEN = "eviction"
WELL = "all is well"


@dataclass(frozen=True)
class Plan:
    """One set-up with the faults that strike it.

    Attributes:
        where: "server" is one, with a proxy before it for every second client.
        server_args: Of that one.
    """

    name: str
    kinds: tuple[Kind, ...]
    where: Literal["server", "sentinel", "cluster"] = "server"
    server_args: tuple[str, ...] = ()


KILL = Kind("kill a worker", faults.kill_worker, WELL)
PAUSE = Kind("pause a worker beyond ttl", faults.pause_worker, PAUSED, needs_loss=True)
PAUSE_BRIEFLY = Kind("pause a worker", faults.pause_worker_briefly, PAUSED)
SERVER_PAUSE = Kind("pause the server beyond ttl", faults.pause_server, AWAY, needs_loss=True)
SERVER_PAUSE_BRIEFLY = Kind("pause the server", faults.pause_server_briefly, AWAY)
SCRIPTS = Kind("SCRIPT FLUSH", faults.flush_scripts, WELL)
CLIENT_KILL = Kind("CLIENT KILL", faults.kill_connections, AWAY)
FLUSHALL = Kind("FLUSHALL", faults.flush_all, FORGOTTEN)
DELETE = Kind("delete keys", faults.delete_keys, FORGOTTEN)
EVICT = Kind("evict keys", faults.evict, FORGOTTEN)
RESTART_KEPT = Kind("restart, AOF always", faults.restart_server, "restart, AOF always")
RESTART_EMPTY = Kind("restart, empty", faults.restart_server, "restart, nothing on disk")
FAILOVER = Kind("fail over", faults.fail_over, "failover to a replica")
FAILOVER_UNCOPIED = Kind(
    "fail over, not copied", faults.fail_over_without_copy, "failover to a replica"
)
MOVE = Kind("move the slot", faults.move_slot, AWAY)
LINKS = (
    Kind("reset connections", faults.reset_links, AWAY, needs_holder=False),
    Kind("lose replies", faults.lose_replies, AWAY, needs_holder=False),
    Kind("delay replies", faults.delay_replies, AWAY, needs_holder=False),
    Kind("delay requests", faults.delay_requests, AWAY, needs_holder=False),
    Kind("lose messages", faults.lose_messages, AWAY, needs_holder=False),
    Kind("delay messages", faults.delay_messages, AWAY, needs_holder=False),
    Kind("half-open inboxes", faults.half_open_inboxes, AWAY, needs_holder=False),
    Kind("black hole", faults.black_hole, AWAY),
)
# Everything on one server after which no two may hold.
KEPT = (
    *(KILL, PAUSE, PAUSE_BRIEFLY),
    *(SERVER_PAUSE, SERVER_PAUSE_BRIEFLY, SCRIPTS, CLIENT_KILL, RESTART_KEPT),
    *LINKS,
)
NO_DISK = tuple(kind for kind in KEPT if kind is not RESTART_KEPT)
AOF = ("--appendonly", "yes", "--appendfsync", "always")

PLANS = {
    plan.name: plan
    for plan in (
        Plan("calm", ()),
        Plan("kill", (KILL,)),
        Plan("pause", (PAUSE, PAUSE_BRIEFLY)),
        Plan("links", LINKS),
        Plan("server", (SERVER_PAUSE, SERVER_PAUSE_BRIEFLY, SCRIPTS, CLIENT_KILL)),
        Plan("restart-kept", (RESTART_KEPT,), server_args=AOF),
        Plan("forget", (FLUSHALL, DELETE, EVICT, RESTART_EMPTY)),
        Plan("failover", (FAILOVER, FAILOVER_UNCOPIED), "sentinel"),
        Plan("move", (MOVE,), "cluster"),
        Plan("kept", KEPT, server_args=AOF),
        Plan("all", (*NO_DISK, FLUSHALL, DELETE, EVICT, RESTART_EMPTY)),
    )
}
