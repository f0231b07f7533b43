"""Connections between hosts and the server: ordered, late, cut, silent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tests.simulation.world import Host, World


class Weather:
    """How long messages take now; one for all connections."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.most_s = 0.001
        self.slow_share = 0.0  # Of messages that take up to a hundred times as long.
        self.refuses_share = 0.0
        self.swallows_share = 0.0  # Of connects that are never answered.

    def delay_s(self) -> float:
        longest = self.most_s * (100 if self._chance.random() < self.slow_share else 1)
        return 20e-6 + longest * self._chance.random()

    def split(self, length: int) -> int:
        """After how many bytes a message is split; 0: it is not."""
        return self._chance.randrange(length) if self._chance.random() < 0.05 else 0

    def fate_of_connect(self) -> str:
        lot = self._chance.random()
        if lot < self.refuses_share:
            return "refused"
        return "swallowed" if lot < self.refuses_share + self.swallows_share else "made"

    def clear(self) -> None:
        self.most_s = 0.001
        self.slow_share = self.refuses_share = self.swallows_share = 0.0


class Pipe:
    """One direction of a connection: in order, each message late by its own delay."""

    def __init__(self, world: World, weather: Weather, arrive: Callable[[Any], None]) -> None:
        self.is_dead = False
        self._world = world
        self._weather = weather
        self._arrive = arrive
        self._last_at = 0.0
        self._stalled_until = 0.0

    def send(self, what: object) -> None:
        """Data, or the end; data may come in two parts."""
        if isinstance(what, bytes) and (cut := self._weather.split(len(what))):
            self.send_whole(what[:cut])
            what = what[cut:]
        self.send_whole(what)

    def send_whole(self, what: object) -> None:
        at = max(self._last_at, self._stalled_until, self._world.now + self._weather.delay_s())
        self._last_at = at
        self._world.at(at, self._come, what)

    def stall(self, for_s: float) -> None:
        """What is sent from now on arrives after that time; nothing is lost."""
        self._stalled_until = self._world.now + for_s

    def die(self) -> None:
        """What has not arrived by now never will."""
        self.is_dead = True

    def _come(self, what: object) -> None:
        if not self.is_dead:
            self._arrive(what)


class Peer(Protocol):
    """The server's end of a connection."""

    def receive(self, data: bytes) -> None: ...

    def lose(self) -> None:
        """The other end has closed, or the connection broke."""


class Server(Protocol):
    def accept(self, wire: Wire) -> Peer | None:
        """The server's end; None: nobody listens."""


class Wire:
    """One TCP connection, from the client's `connect` until both ends know that it is over."""

    def __init__(
        self,
        host: Host,
        weather: Weather,
        protocol: asyncio.Protocol,
        number: int,
    ) -> None:
        self.host = host
        self.number = number
        self.peer: Peer | None = None
        self.transport = WireTransport(self, protocol)
        self.up = Pipe(host.world, weather, self._reach_server)
        self.down = Pipe(host.world, weather, self._reach_client)

    @property
    def is_dead(self) -> bool:
        return self.up.is_dead and self.down.is_dead

    def _reach_server(self, data: bytes | None) -> None:
        assert self.peer is not None
        if data is None:
            self.down.die()
            self.peer.lose()
        else:
            self.peer.receive(data)

    def _reach_client(self, data: bytes | Exception | None) -> None:
        if isinstance(data, bytes):
            self.host.deliver(self.transport.feed, data)
        else:
            self.host.deliver(self.transport.end, data)

    # What chaos does to it.

    def cut(self, chance: random.Random, *, up_lives: bool) -> None:
        """It breaks: replies on their way are lost, and requests too unless *up_lives*."""
        self.down.die()
        if not up_lives:
            self.up.die()
        error = ConnectionResetError("cut") if chance.random() < 0.5 else None
        self.host.world.after(chance.random() * 0.01, self._tell_client, error)
        self.host.world.after(0.02 + chance.random() * 0.5, self._tell_server)

    def silence(self, *, up: bool, down: bool) -> None:
        """Half-open: nobody is told."""
        for pipe, dies in ((self.up, up), (self.down, down)):
            if dies:
                pipe.die()

    def vanish(self, error: Exception | None) -> None:
        """The server's end is gone; the client is told in order, after what was on its way."""
        self.up.die()
        self.down.send(error)

    def _tell_client(self, error: Exception | None) -> None:
        self.host.deliver(self.transport.end, error)

    def _tell_server(self) -> None:
        self.up.die()
        if self.peer is not None:
            self.peer.lose()


class WireTransport(asyncio.Transport):
    """What asyncio's streams see of a connection."""

    def __init__(self, wire: Wire, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._wire = wire
        self._protocol = protocol
        self._is_closing = False

    def begin(self) -> None:
        self._protocol.connection_made(self)

    def feed(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def end(self, error: Exception | None) -> None:
        """The other side closed (None), or the connection broke."""
        if self._is_closing:
            return
        if error is None:
            self._protocol.eof_received()
        self._is_closing = True
        self._wire.host.loop.call_soon(self._protocol.connection_lost, error)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing and not self._wire.host.is_dead:
            self._wire.up.send(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        """What was written is on its way still, and may arrive late."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wire.up.send(None)
        self._wire.host.deliver(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def pause_reading(self) -> None:
        """Replies are short."""

    def resume_reading(self) -> None:
        """Replies are short."""

    def get_write_buffer_size(self) -> int:
        return 0


class Network:
    """Every connection that was ever made, and the way to make one."""

    def __init__(self, world: World, server: Server, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.wires: list[Wire] = []
        self._cut_off: dict[str, tuple[float, str]] = {}  # By host: until when, and how.
        self._server = server
        self._made = 0

    def live(self) -> list[Wire]:
        """Those that still carry something."""
        self.wires = [wire for wire in self.wires if not wire.is_dead and wire.peer is not None]
        return self.wires

    def cut_off(self, host: Host, for_s: float, *, fate: str) -> None:
        """No new connection from there: each is "refused", or "swallowed"."""
        self._cut_off[host.name] = (self.world.now + for_s, fate)

    def join(self) -> None:
        """Nobody is cut off any more."""
        self._cut_off.clear()

    async def connect(
        self, host: Host, factory: Callable[[], asyncio.Protocol]
    ) -> tuple[WireTransport, asyncio.Protocol]:
        """As `create_connection` does: SYN there, SYN-ACK back.

        Raises:
            ConnectionRefusedError: Nobody listens.
        """
        done: asyncio.Future[None] = host.loop.create_future()
        protocol = factory()
        self._made += 1
        wire = Wire(host, self.weather, protocol, self._made)
        fate = self.weather.fate_of_connect()
        until, fate_of_host = self._cut_off.get(host.name, (0.0, ""))
        if self.world.now < until:
            fate = fate_of_host
        if fate != "swallowed":
            self.world.after(self.weather.delay_s(), self._reach, wire, done, fate == "made")
        await done
        wire.transport.begin()
        return wire.transport, protocol

    def _reach(self, wire: Wire, done: asyncio.Future[None], is_open: bool) -> None:
        if is_open:
            wire.peer = self._server.accept(wire)
        error = None if wire.peer is not None else ConnectionRefusedError(111, "refused")
        if error is None:
            self.wires.append(wire)
        self.world.after(self.weather.delay_s(), wire.host.deliver, self._answer, wire, done, error)

    def _answer(
        self, wire: Wire, done: asyncio.Future[None], error: ConnectionRefusedError | None
    ) -> None:
        if done.done():  # It was given up meanwhile.
            if wire.peer is not None:
                wire.up.send(None)
        elif error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
