"""A Redis of ours behind the network: the model of the scripts, RESP, messages, crashes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import hiredis

from aiodlock._store._wire import Script, digest
from tests.model import Kept, Model, ServerError
from tests.simulation.network import Wire
from tests.simulation.world import World

Answer: TypeAlias = "int | bytes | str | ServerError | list[Answer] | None"
# Told of each script that ran: its name, keys, arguments, reply (None: an error).
OnScript: TypeAlias = Callable[[str, list[bytes], list[bytes], "list[Any] | None"], None]

_SCRIPTS: Final = (
    *("acquire", "extend", "release", "retire", "discard", "inspect", "probe", "confirm"),
)
# Somewhere in 2023; true time 0 of every simulation.
_BEGAN_AT_US: Final = 1_700_000_000_000_000
_SHARED: Final = tuple(
    f"share_{name}" for name in ("acquire", "extend", "release", "discard", "inspect")
)
_DIGESTS: Final = {digest(Script(name).text).encode(): name for name in _SCRIPTS + _SHARED}


class SimulatedServer:
    """One server: it may be paused, crash with or without what it knew, lose scripts or keys.

    Args:
        rate: Of its clock.
        ahead_us: How far its wall clock is ahead when all begins.
    """

    def __init__(self, world: World, *, rate: float, ahead_us: int = 0) -> None:
        self.is_up = True
        self.stepped_us = ahead_us
        self.refusal: str | None = None  # What it answers to every script, while it does.
        self.on_script: OnScript
        self._world = world
        self._rate = rate
        self.model = Model(self.wall_us, self._publish)
        self._loaded: set[bytes] = set()
        self._peers: dict[int, ServerPeer] = {}
        self._paused_until = 0.0
        self._waiting: list[tuple[ServerPeer, bytes | None]] = []

    def wall_us(self) -> int:
        """The wall clock, which may be stepped."""
        return _BEGAN_AT_US + int(self._world.now * self._rate * 1e6) + self.stepped_us

    def accept(self, wire: Wire) -> ServerPeer | None:
        if not self.is_up:
            return None
        peer = self._peers[wire.number] = ServerPeer(self, wire)
        return peer

    @property
    def is_paused(self) -> bool:
        return self._world.now < self._paused_until

    # What chaos does to it.

    def pause(self, for_s: float) -> None:
        """As by SIGSTOP: the kernel still takes what arrives."""
        self._paused_until = max(self._paused_until, self._world.now + for_s)
        self._world.at(self._paused_until, self._go_on)

    def resume(self) -> None:
        self._paused_until = self._world.now
        self._go_on()

    def crash(self, *, tells: bool) -> None:
        """Every connection is lost; *tells*: the clients hear of it, else they find out."""
        self.is_up = False
        self._waiting.clear()
        for peer in self._peers.values():
            if tells:
                peer.wire.vanish(ConnectionResetError("crash"))
            else:
                peer.wire.silence(up=True, down=True)
        self._peers.clear()
        self._loaded.clear()

    def start(self, kept: Mapping[bytes, Kept] | None) -> None:
        """Up again, with what the disk or a replica has of its keys."""
        self.model.load(kept or {})
        self.is_up = True

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH."""
        self._loaded.clear()

    def hears(self, number: int) -> bool:
        """Whether that connection has subscribed to something."""
        peer = self._peers.get(number)
        return peer is not None and bool(peer.channels)

    def disconnect(self, number: int) -> None:
        """CLIENT KILL."""
        peer = self._peers.pop(number, None)
        if peer is not None:
            peer.wire.vanish(None)

    # What arrives.

    def take(self, peer: ServerPeer, data: bytes | None) -> None:
        """Data of a connection, or its end (None); in order, also while paused."""
        if self.is_paused or self._waiting:
            self._waiting.append((peer, data))
        else:
            self._handle(peer, data)

    def _go_on(self) -> None:
        while self._waiting and not self.is_paused:
            self._handle(*self._waiting.pop(0))

    def _handle(self, peer: ServerPeer, data: bytes | None) -> None:
        if data is None:
            self._peers.pop(peer.wire.number, None)
        elif peer.wire.number in self._peers:
            peer.handle(data)

    def execute(self, peer: ServerPeer, parts: list[bytes]) -> Answer:
        """The reply to one command."""
        command = parts[0].upper()
        if self.refusal is not None and command in (b"EVAL", b"EVALSHA"):
            return ServerError(self.refusal)
        if command == b"EVALSHA" and parts[1] not in self._loaded:
            return ServerError("NOSCRIPT No matching script. Please use EVAL.")
        if command == b"EVAL":
            sha = digest(parts[1].decode()).encode()
            self._loaded.add(sha)
            return self._run(sha, parts)
        if command == b"EVALSHA":
            return self._run(parts[1], parts)
        if command == b"SUBSCRIBE":
            peer.channels.add(parts[1])
            peer.push([b"subscribe", parts[1], len(peer.channels)])
            return _SAID
        if command == b"PING":
            return [b"pong", b""] if peer.channels and peer.protocol == 2 else "PONG"
        if command == b"HELLO":
            peer.protocol = int(parts[1])
            return _HELLO
        raise AssertionError(f"no client of ours sends {parts!r}")

    def _run(self, sha: bytes, parts: list[bytes]) -> Answer:
        count = int(parts[2])
        name, keys, args = _DIGESTS[sha], parts[3 : 3 + count], parts[3 + count :]
        try:
            reply = self.model.run(name, keys, args)
        except ServerError as error:
            self.on_script(name, keys, args, None)
            return error
        self.on_script(name, keys, args, reply)
        return list(reply)

    def _publish(self, channel: bytes, text: bytes) -> None:
        self._world.note("publish", text.split(b" ")[0].decode())
        for peer in tuple(self._peers.values()):
            if channel in peer.channels:
                peer.push([b"message", channel, text])


class ServerPeer:
    """The server's end of one connection."""

    def __init__(self, server: SimulatedServer, wire: Wire) -> None:
        self.wire = wire
        self.channels: set[bytes] = set()
        self.protocol = 2
        self._server = server
        self._reader = hiredis.Reader()

    def receive(self, data: bytes) -> None:
        self._server.take(self, data)

    def lose(self) -> None:
        self._server.take(self, None)

    def handle(self, data: bytes) -> None:
        """Execute what is whole, and answer it all in one write."""
        self._reader.feed(data)
        out = []
        while (parts := self._reader.gets()) is not False:
            answer = self._server.execute(self, parts)
            if answer is not _SAID:
                out.append(_packed(answer))
        if out:
            self.wire.down.send(b"".join(out))

    def push(self, parts: list[Answer]) -> None:
        kind = b">" if self.protocol == 3 else b"*"
        self.wire.down.send(kind + _packed(parts)[1:])


# A reply that went out already.
_SAID: Final = "said"
_HELLO: Final[list[Answer]] = [b"server", b"redis", b"proto", 3]


def _packed(answer: Answer) -> bytes:
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, str):
        return b"+%b\r\n" % answer.encode()
    if isinstance(answer, ServerError):
        return b"-%b\r\n" % str(answer).encode()
    if answer is _HELLO:
        return b"%%%d\r\n" % (len(answer) // 2) + b"".join(map(_packed, answer))
    return b"*%d\r\n" % len(answer) + b"".join(map(_packed, answer))
