"""From what was seen of several servers to findings about the quorum they are to be: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from aiodlock.cli._doctor_facts import Facts
from aiodlock.cli._doctor_findings import CLOCK_OFF_S
from aiodlock.cli._doctor_kinds import KINDS, Finding


def between(nodes: Sequence[Facts]) -> list[Finding]:
    """What keeps *nodes* from being a quorum of independent servers."""
    parts = (_answering, _number, _pairs, _each)
    found = [Finding(KINDS[kind], text) for part in parts for kind, text in part(nodes)]
    if found:
        return found
    bears = (len(nodes) - 1) // 2
    return [Finding(KINDS["quorum"], f"{len(nodes)} nodes, bears the loss of {bears}")]


def _answering(nodes: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    answering = sum(not node.trouble for node in nodes)
    majority = len(nodes) // 2 + 1
    told = f"{answering} of {len(nodes)} nodes are well"
    if answering < majority:
        yield "no-majority", f"{told}, and a majority is {majority}"
    elif answering < len(nodes):
        yield "nodes-missing", f"{told}: bears the loss of {answering - majority} more"


def _number(nodes: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    if len(nodes) == 2:
        yield "too-few-nodes", "2 nodes"
    elif len(nodes) % 2 == 0:
        bears = (len(nodes) - 1) // 2
        yield "even-nodes", f"{len(nodes)} nodes bear the loss of {bears}"


def _pairs(nodes: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    for one, other in combinations(nodes, 2):
        both = f"{one.address} and {other.address}"
        if _shares(one, other, "run_id"):
            yield "same-server", f"{both} are one server"
        # A primary and its replicas have the same id of their history.
        elif _shares(one, other, "master_replid"):
            yield "nodes-replicate", f"{both} have one history"
        elif (apart_s := _apart_s(one, other)) > CLOCK_OFF_S:
            yield "clocks-differ", f"{both} differ by {apart_s:.1f} s"


def _each(nodes: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if node.replicas or node.sentinels:
            yield "node-with-replicas", f"{node.address} has replicas or Sentinels"
        if node.is_clustered:
            yield "node-in-cluster", f"{node.address} is in a cluster"


def _shares(one: Facts, other: Facts, key: str) -> bool:
    return key in one.info and one.info[key] == other.info.get(key)


def _apart_s(one: Facts, other: Facts) -> float:
    """How far their clocks are apart at least."""
    if one.clock is None or other.clock is None:
        return 0.0
    apart_s = abs(one.clock.ahead_s - other.clock.ahead_s)
    return apart_s - one.clock.within_s - other.clock.within_s
