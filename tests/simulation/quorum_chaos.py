"""Faults by lot that a quorum of servers bears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.simulation.chaos import Chaos
from tests.simulation.world import RATE_SHARE


class QuorumChaos(Chaos):
    """The same for a quorum, within what it bears.

    At most a minority is down at a time; who lost its keys is away until each lease that it knew is
    over, and its clock has passed what every other clock showed by then.
    """

    clocks_apart_s = 0.0  # At most.
    ttl_most_s = 0.0
    is_hasty = False  # Who lost its keys comes back at once.
    up_at = 0.0  # When everybody is back.

    def crash(self) -> bool:
        """It comes back with all of its keys."""
        return self._is_bearable() and super().crash()

    def crash_empty(self) -> bool:
        """It comes back with nothing, but not at once."""
        return self._is_bearable() and super().crash_empty()

    def partition(self) -> bool:
        """One host and one server hear nothing of each other for a while."""
        crew, site = self._crew(), self._site()
        if crew is None:
            return False
        for_s = 0.2 + self._chance.choice((0.3, 3.0)) * self._chance.random()
        self._concerns("partition", crew.host)
        self._referee.trouble(for_s + 2.0)
        site.network.cut_off(crew.host, for_s, fate=self._chance.choice(("refused", "swallowed")))
        for wire in site.network.live():
            if wire.host is crew.host:
                wire.silence(up=True, down=True)
        return True

    def _inject(self, fault: str) -> bool:
        return QUORUM_FAULTS[fault](self)

    def _is_bearable(self) -> bool:
        down = sum(not site.server.is_up for site in self._sites)
        return 2 * (down + 1) < len(self._sites)

    def _down_s(self, *, loses: bool) -> float:
        for_s = super()._down_s(loses=loses)
        if loses and not self.is_hasty:
            drift_s = 2 * RATE_SHARE * (self._world.now + self.ttl_most_s)
            for_s = self.ttl_most_s * (1 + RATE_SHARE) + self.clocks_apart_s + drift_s + 0.01
        self.up_at = max(self.up_at, self._world.now + for_s)
        return for_s


QUORUM_FAULTS: Final[dict[str, Callable[[QuorumChaos], bool]]] = {
    fault.__name__: fault
    for fault in (
        QuorumChaos.cut,
        QuorumChaos.silence,
        QuorumChaos.stall,
        QuorumChaos.slow,
        QuorumChaos.uneven,
        QuorumChaos.refuse,
        QuorumChaos.pause_server,
        QuorumChaos.refusals,
        QuorumChaos.crash,
        QuorumChaos.crash_empty,
        QuorumChaos.partition,
        QuorumChaos.script_flush,
        QuorumChaos.client_kill,
        QuorumChaos.stop_host,
        QuorumChaos.suspend_host,
        QuorumChaos.kill_host,
    )
}
