"""The course of one simulation over a quorum of servers."""

from __future__ import annotations

import random
from typing import Final

from aiodlock import Backoff
from tests.simulation.course import Simulation
from tests.simulation.quorum_chaos import QuorumChaos
from tests.simulation.quorum_referee import QuorumReferee
from tests.simulation.users import client_of, redis_of
from tests.simulation.world import Host

# What a newcomer needs beside the ttl that may stand, and a pause between its tries.
_SLACK_S: Final = 0.5


class QuorumSimulation(Simulation):
    """The world of one seed: a quorum of servers."""

    chaos: QuorumChaos
    referee: QuorumReferee

    def _check_at_end(self) -> None:
        """No lease came back to life; who comes now gets the lock when the last ttl is over."""
        self.referee.check_revived()
        self._has_newcomers = True
        self.world.run(until=max(self.world.now, self.chaos.up_at) + 0.1)
        options = self.setting.options
        for name in options.names:
            host = self.add_host(f"newcomer-{name}", random.Random(name))
            task = host.loop.create_task(self._come(host, name))
            began_at = self.world.now
            most_s = options.ttl_most_s * 1.01 + Backoff().maximum + _SLACK_S
            if not self.world.run(until=began_at + most_s, is_over=task.done):
                self.world.breach("7 live", f"a newcomer waits for {most_s:.3f} s for {name!r}")
            elif error := task.exception():
                self.world.breach("7 live", f"a newcomer had {error!r}")
            task.cancel()
            self.world.run(until=self.world.now + 1.0)

    async def _come(self, host: Host, name: str) -> None:
        options = self.setting.options
        servers = [redis_of(node, options) for node in options.nodes]
        async with client_of(servers, options, label=host.name) as client, client.lock(name):
            self.world.note("newcomer", name)
        for server in servers:
            await server.aclose()

    def _referee(self) -> QuorumReferee:
        return QuorumReferee(self.world, *(site.scripts for site in self.sites.values()))

    def _chaos(self) -> QuorumChaos:
        options = self.setting.options
        chaos = QuorumChaos(
            self.world,
            list(self.sites.values()),
            self.referee,
            self.crews,
            names=options.names,
            ttl_s=options.ttl_s,
        )
        chaos.clocks_apart_s = self.setting.clocks_apart_s
        chaos.ttl_most_s = options.ttl_most_s
        chaos.is_hasty = self.setting.is_hasty
        return chaos
