"""From what was seen of one server to findings: pure, so that every fault can be made up."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

from aiodlock.cli import _doctor_words as words
from aiodlock.cli._doctor_facts import Facts, Leftovers, Plan
from aiodlock.cli._doctor_kinds import KINDS, Finding

CLOCK_OFF_S: Final = 1.0
"""Beyond this a difference between two clocks is told."""

_STEP_S: Final = 0.1  # more than slewing moves a clock while we look
_LAG_S: Final = 5.0  # replicas report every second
_NEARLY: Final = 0.9
_LATELY_S: Final = 3600.0
_SMALL_BUFFER: Final = 1 << 20
_SLOTS: Final = 16384

# What each question would have told.
_ASKED_FOR: Final = {
    "INFO": "memory, persistence, replicas, connections",
    "CONFIG GET": "how often it writes to disk, min-replicas-to-write, limits and timeouts",
    "CLUSTER INFO": "the state of the cluster, and which slots are served",
    "TIME": "its clock",
    "PUBLISH": "whether waiters hear of hand-offs",
    "TYPE": "what is left under the prefix",
    "PING": "how long an answer takes",
    "EVALSHA": "how long an answer takes",
    "SLOWLOG GET": "commands that kept it busy",
    "PUBSUB NUMSUB": "whether Sentinels watch it",
    "SCAN": "what is left under the prefix",
    "GETRANGE": "whether another library wrote a lock",
    "out of time": "what is missing here",
}


def findings(facts: Facts, plan: Plan, *, is_node: bool = False) -> list[Finding]:
    """What endangers a lock on this server, and what it promises.

    Args:
        facts: What was seen.
        plan: What the locks are to be.
        is_node: Whether it is one node of a quorum, where nobody queues or fails over.
    """
    parts = [_server(facts), _cluster(facts), _memory(facts), _restart(facts, is_node=is_node)]
    parts += [_failover(facts, is_node=is_node), _clock(facts), _permissions(facts)]
    if not is_node:
        parts.append(_messages(facts))
    parts += [_latency(facts, plan), _leftovers(facts), _connections(facts), _unseen(facts)]
    found = [(kind, text) for part in parts for kind, text in part]
    return [Finding(KINDS[kind], text, facts.address) for kind, text in found]


# Each yields the ids of kinds with what was seen; that of its check, where all is well.
_Part = Iterator[tuple[str, str]]


def _server(facts: Facts) -> _Part:
    if facts.trouble is not None:
        yield facts.trouble
    if not facts.info:
        return
    if facts.mode == "sentinel":
        yield "sentinel", "a Sentinel, not a server that keeps locks"
        return
    product, version = words.product(facts.info)
    told = " ".join(filter(None, (product, version, facts.mode)))
    if product.lower() in words.OTHERS:
        yield "untested-server", told
    elif product == "Redis" and words.is_older(version, (6, 2)):
        yield "old-server", told
    elif facts.trouble is None:
        yield "server", told
    if facts.sentinels:
        yield "sentinels", f"{words.count(facts.sentinels, 'Sentinel')} listening to its channel"


def _cluster(facts: Facts) -> _Part:
    if not facts.is_clustered:
        return
    served, state = facts.number("cluster_slots_ok"), facts.cluster.get("cluster_state")
    if served is not None:
        told = f"state {state}, {served:.0f} of {_SLOTS} slots served"
        is_well = state == "ok" and served == _SLOTS
        yield ("cluster" if is_well else "slots-uncovered"), told
    if (facts.number("cluster_known_nodes") or 0) > 1:
        yield "one-node-of-many", f"one of {facts.number('cluster_known_nodes'):.0f} nodes"


def _memory(facts: Facts) -> _Part:
    policy, limit = facts.info.get("maxmemory_policy"), facts.number("maxmemory")
    used = facts.number("used_memory")
    if policy is None or limit is None or used is None:
        return
    amount = words.size(used) + (f" of {words.size(limit)} used" if limit else ", no limit")
    if policy != "noeviction":
        thrown = facts.number("evicted_keys") or 0
        lost = f"; {words.count(thrown, 'key')} thrown out" if thrown else ""
        yield ("evicts" if limit else "may-evict"), f"{policy}; {amount}{lost}"
    elif limit and used >= limit:
        yield "full", f"noeviction; {amount}"
    elif limit and used >= _NEARLY * limit:
        yield "nearly-full", f"noeviction; {amount}"
    else:
        yield "memory", f"noeviction; {amount}"


def _restart(facts: Facts, *, is_node: bool) -> _Part:
    appends = facts.number("aof_enabled")
    if appends is None:
        return
    for what in ("rdb_last_bgsave_status", "aof_last_write_status"):
        if facts.info.get(what, "ok") != "ok":
            yield "disk", f"{what} is {facts.info[what]}"
    kind, told = _keeps(facts.config) if appends else ("forgets", _snapshots(facts.config))
    if kind:
        yield ("restart-delay" if is_node and kind != "restart" else kind), told


def _keeps(config: dict[str, str]) -> tuple[str, str]:
    sync = config.get("appendfsync", "")
    kind = {"always": "restart", "everysec": "loses-seconds", "no": "fsync-no"}.get(sync, "")
    return kind, f"append-only file, written to disk: {sync}"


def _snapshots(config: dict[str, str]) -> str:
    if "save" not in config:
        return "no append-only file; snapshots could not be seen"
    return f"snapshots only: {config['save']}" if config["save"] else "nothing on disk"


def _failover(facts: Facts, *, is_node: bool) -> _Part:
    if "connected_slaves" not in facts.info:
        return
    if facts.is_replica:
        link = facts.info.get("master_link_status", "unknown")
        yield "replica", f"a replica, its link to the primary is {link}"
    elif not is_node:
        yield from _followed(facts)


def _followed(facts: Facts) -> _Part:
    least, good = facts.number("min-replicas-to-write"), facts.number("min_slaves_good_slaves")
    count = words.count(len(facts.replicas), "replica")
    if least and good is not None and good < least:
        yield "too-few-replicas", f"{good:.0f} keep up, min-replicas-to-write is {least:.0f}"
    for replica in facts.replicas:
        if replica.state != "online" or replica.lag_s > _LAG_S:
            yield "replica-lags", f"{replica.address}: {replica.state}, {replica.lag_s:.0f} s ago"
    if not facts.replicas:
        if not least:
            yield "failover", "no replicas: while it is down, nobody locks"
        return
    yield "failover-loses", count
    if least is not None and not (least and facts.number("min-replicas-max-lag")):
        yield "cut-off-primary", f"{count}, min-replicas-to-write is not in force"


def _clock(facts: Facts) -> _Part:
    if facts.clock is None:
        return
    ahead_s, within_s = facts.clock.ahead_s, facts.clock.within_s
    later = facts.clock_later or facts.clock
    moved_s = abs(later.ahead_s - ahead_s)
    if moved_s > _STEP_S + within_s + later.within_s:
        yield "clock-steps", f"set by {moved_s:.1f} s while we watched"
    elif abs(ahead_s) > CLOCK_OFF_S + within_s:
        side = "ahead of" if ahead_s > 0 else "behind"
        yield "clock-off", f"{abs(ahead_s):.1f} s {side} ours"
    else:
        # Below its own uncertainty the figure would be noise.
        yield "clock", f"within {words.seconds(max(abs(ahead_s), within_s))} of ours"


def _permissions(facts: Facts) -> _Part:
    if facts.refused is None:
        return
    asking = facts.refused.get("asking")
    refused = [rule for rule in facts.refused if rule != "asking"]
    if refused:
        yield "not-allowed", "missing: " + " ".join(refused)
    if asking is not None:
        yield "no-asking", "missing: +asking"
    if facts.write_trouble:
        yield "writes-refused", facts.write_trouble
    for commands, reason in facts.failed.items():
        yield "commands-fail", f"{commands}: {reason}"
    if not refused and not facts.failed and facts.write_trouble == "":
        yield "permissions", "all that a lock needs, and a key was written"


def _messages(facts: Facts) -> _Part:
    if facts.message_trouble:
        yield "no-messages", facts.message_trouble
    elif facts.message_delays_s:
        yield "messages", f"heard after {words.seconds(statistics.median(facts.message_delays_s))}"


def _latency(facts: Facts, plan: Plan) -> _Part:
    too_slow_s = min(plan.ttl / 3, plan.request_timeout)
    slow_s = min(plan.ttl / 10, plan.request_timeout / 2)
    if facts.latencies_s:
        worst_s = max(facts.latencies_s)
        told = (
            f"median {words.seconds(statistics.median(facts.latencies_s))};"
            f" worst of {len(facts.latencies_s)}: {words.seconds(worst_s)}"
        )
        if worst_s >= too_slow_s:
            yield "too-slow", told
        elif worst_s >= slow_s:
            yield "slow", told
        else:
            yield "latency", told
    limits = ("busy-reply-threshold", "lua-time-limit")
    if any(facts.config.get(limit) == "0" for limit in limits):
        yield "script-limit", "no limit after which a script counts as stuck"
    slow = [one for one in facts.slow_commands if one.seconds >= slow_s]
    if lately := [one for one in slow if one.age_s <= _LATELY_S]:
        longest = max(lately, key=lambda one: one.seconds)
        told = f"the longest {longest.command} with {words.seconds(longest.seconds)}"
        yield "slow-commands", f"{len(lately)} in the last hour, {told}"


def _leftovers(facts: Facts) -> _Part:
    left = facts.leftovers
    if left is None:
        return
    odd = list(_odd_keys(left))
    yield from odd
    if not left.is_whole:
        yield "not-all-keys", f"{words.count(left.seen, 'key')} looked at; not all keys were seen"
    elif not odd:
        yield "leftovers", f"{words.count(left.seen, 'key')} under the prefix, none left over"


def _odd_keys(left: Leftovers) -> _Part:
    for kind, what, keys in (
        ("no-ttl", "without a ttl", left.no_ttl),
        ("not-a-lock", "of another type", left.wrong_type),
        ("foreign-values", "of another library", left.foreign),
        ("dead-queues", "queued for by the dead", left.dead_queues),
        ("strangers", "of no lock", left.strangers),
    ):
        if keys:
            yield kind, f"{len(keys)} {what}: {words.some(keys)}"


def _connections(facts: Facts) -> _Part:
    used, most = facts.number("connected_clients"), facts.number("maxclients")
    if used is not None and most:
        is_near = used >= _NEARLY * most
        told = f"{used:.0f} of {most:.0f} in use"
        yield ("connections-near-limit" if is_near else "connections"), told
    if idle_s := facts.number("timeout"):
        yield "idle-timeout", f"timeout {idle_s:.0f} s"
    hard = words.message_buffer(facts.config.get("client-output-buffer-limit", ""))
    if 0 < hard < _SMALL_BUFFER:
        yield "message-buffer", f"at most {words.size(hard)} for a subscriber"


def _unseen(facts: Facts) -> _Part:
    for question, reason in facts.unseen.items():
        yield "could-not-see", f"{_ASKED_FOR.get(question, question)} ({question}: {reason})"
