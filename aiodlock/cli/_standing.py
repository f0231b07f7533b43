"""What stands under a name, as all servers of a site tell it: over a quorum, by majority."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aiodlock import LockError, NotAllowedError, QuorumError, ServerUnreachable, _names
from aiodlock._store._api import NoAnswer
from aiodlock.cli._look import Grant, Look
from aiodlock.cli._site import Node, Site


@dataclass(frozen=True, slots=True)
class Vote:
    """What one node says; `error` is why it says nothing."""

    node: str
    look: Look | None
    error: LockError | NoAnswer | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands under *name*.

    Over a quorum `look` has the grants of a majority, and `votes` all that each node has;
    `is_undecided`: nodes that do not answer could make a majority of what the others have.
    """

    name: str
    key: str
    look: Look
    votes: tuple[Vote, ...] = ()
    is_undecided: bool = False

    @property
    def is_free(self) -> bool:
        """Whether who asks now gets it."""
        return self.look.is_free and not self.is_undecided

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to tell, of any node."""
        return all(look.is_idle for look in (self.look, *_looks(self.votes)))


async def standing_of(site: Site, name: str, *, most: int) -> Standing:
    """What stands under *name* now. One script call for each node.

    Raises:
        ServerUnreachable, NotAllowedError: The server, or too many nodes, do not tell.
    """
    keys = _names.keys(site.prefix, name)
    votes = await asyncio.gather(*(_vote(node, keys, most) for node in site.nodes))
    return decided(name, keys.lock, votes)


def decided(name: str, key: str, votes: Sequence[Vote]) -> Standing:
    """What *votes* make together.

    Raises:
        ServerUnreachable, NotAllowedError: They are too few.
    """
    looks = _looks(votes)
    majority = len(votes) // 2 + 1
    if len(looks) < majority:
        for vote in votes:
            if isinstance(vote.error, LockError):
                raise vote.error
        raise untold(name, {vote.node: str(vote.error or "") for vote in votes})
    if len(votes) == 1:
        return Standing(name, key, looks[0])
    found = _by_owner(looks)
    grants = [_agreed(theirs, majority) for theirs in found.values() if len(theirs) >= majority]
    silent = len(votes) - len(looks)
    return Standing(
        name,
        key,
        _merged(looks, grants, majority),
        tuple(votes),
        is_undecided=not grants
        and any(len(theirs) + silent >= majority for theirs in found.values()),
    )


async def _vote(node: Node, keys: _names.Keys, most: int) -> Vote:
    try:
        return Vote(node.label, await node.look(keys, most=most))
    except (NotAllowedError, NoAnswer) as error:
        return Vote(node.label, None, error)


def untold(name: str, troubles: Mapping[str, str]) -> ServerUnreachable:
    """The error where too few nodes tell; *troubles* has what each said, "" if all is well."""
    if len(troubles) == 1:
        return ServerUnreachable(f"no answer: {min(troubles.values())}", name=name)
    nodes = {node: trouble or "answers" for node, trouble in troubles.items()}
    said = "; ".join(f"{node}: {words}" for node, words in nodes.items())
    message = f"too few nodes of the quorum answer ({said})"
    return QuorumError(message, name=name, outcome="unreachable", nodes=nodes)


def _looks(votes: Iterable[Vote]) -> list[Look]:
    return [vote.look for vote in votes if vote.look is not None]


def _by_owner(looks: Iterable[Look]) -> dict[str, list[Grant]]:
    """The grants that one owner has on the nodes, the first to end first."""
    found: dict[str, list[Grant]] = {}
    for look in looks:
        for grant in look.grants:
            found.setdefault(grant.owner, []).append(grant)
    return found


def _agreed(theirs: list[Grant], majority: int) -> Grant:
    """One grant out of those of a majority, which is over when too few of them are left."""
    lefts = sorted((_left(grant) for grant in theirs), reverse=True)
    left = lefts[majority - 1]
    number, nodes = Counter(grant.fencing_token for grant in theirs).most_common(1)[0]
    return replace(
        next(grant for grant in theirs if grant.fencing_token == number),
        ttl_left=None if left == float("inf") else left,
        # Without fencing each node has a number of its own, which means nothing.
        fencing_token=number if nodes >= majority else None,
    )


def _merged(looks: Sequence[Look], grants: list[Grant], majority: int) -> Look:
    grants.sort(key=_left)
    wrong = [look.not_a_lock for look in looks if look.not_a_lock is not None]
    return Look(
        now_us=max(look.now_us for look in looks),
        not_a_lock=wrong[0] if len(wrong) >= majority else None,
        grants=tuple(grants),
        inside=len(grants),
        waiters=(),  # Nobody queues there.
        queued=0,
        last_fencing_token=max((look.last_fencing_token or 0 for look in looks), default=0) or None,
    )


def _left(grant: Grant) -> float:
    return float("inf") if grant.ttl_left is None else grant.ttl_left
