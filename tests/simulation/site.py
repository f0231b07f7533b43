"""A server in its place: with the network around it, watched by its referee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.simulation.network import Network
from tests.simulation.scripts import ScriptReferee
from tests.simulation.server import SimulatedServer

# What a simulation of one server calls it.
ONLY: Final = "server"


@dataclass(frozen=True, eq=False)
class Site:
    """One server."""

    name: str
    server: SimulatedServer
    network: Network
    scripts: ScriptReferee
