"""Holds each lease over a quorum against what the design promises to users."""

from __future__ import annotations

from tests.simulation.referee import CLEANED_S, Belief, Referee
from tests.simulation.scripts import ScriptReferee, is_nobodys, owner, short
from tests.simulation.world import World


class QuorumReferee(Referee):
    """The same where servers are nodes: what a minority of them loses breaks no lease."""

    def __init__(self, world: World, *scripts: ScriptReferee) -> None:
        super().__init__(world, *scripts)
        self._largest: dict[str, Belief] = {}  # By name: the last lease that has a fencing token.

    def believe(self, belief: Belief) -> None:
        """Its fencing token is larger than that of every lease there was."""
        super().believe(belief)
        if not belief.fencing_token:
            return
        last = self._largest.get(belief.name)
        if last is not None and belief.fencing_token <= last.fencing_token:
            self._world.breach("6 fencing", f"{belief} after {last}")
        self._largest[belief.name] = belief

    def look_for_orphans(self) -> None:
        """Nor does a try leave anything that failed."""
        super().look_for_orphans()
        for node in self.scripts:
            for lock in node.locks:
                value = node.model.string(lock.encode())
                if value is not None and not is_nobodys(value.decode()):
                    self._check_try(node, lock, owner(value.decode()))

    def _check_try(self, node: ScriptReferee, lock: str, token: str) -> None:
        since = node.taken[token]
        if any(belief.token == token for belief in self.beliefs) or not self._is_good_since(since):
            return
        late_s = self._world.now - since - CLEANED_S
        if late_s > 0 and not self._is_of_dead(token):
            self._world.breach("orphan", f"{short(token)}, a try, stands in {node.node}{lock}")

    def _is_of_dead(self, token: str) -> bool:
        label = token.partition(":")[0]
        return any(host.is_dead and host.name == label for host in self._world.hosts)

    def check_revived(self) -> None:
        """A lease that another has followed is over: no majority says again that it stands."""
        majority = len(self.scripts) // 2 + 1
        for n, first in enumerate(self.beliefs):
            later = [other for other in self.beliefs[n + 1 :] if other.name == first.name]
            if not later:
                continue
            said = [
                any(at > later[0].since and token == first.token for at, token in node.confirmed)
                for node in self.scripts
            ]
            if sum(said) >= majority:
                self._world.breach("revived", f"{first} after {later[0]}")

    def _may_be_gone(self, belief: Belief) -> bool:
        is_lost = any(at >= belief.asked_at for node in self.scripts for at in node.lost_at)
        return is_lost or super()._may_be_gone(belief)

    def _granted_at(self, belief: Belief) -> float:
        """When its holder learnt of it: before, it was no lease."""
        return belief.since
