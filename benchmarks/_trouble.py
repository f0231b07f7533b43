"""What befalls one server of a quorum while its clients are at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self, cast

from redis.asyncio import Redis

from aiodlock.testing import LockServer

SLOW_S: Final = 0.02
PASSWORD: Final = "nobody has been told"


class Trouble:
    """None at all; `async with trouble` is how long it lasts.

    Attributes:
        port: Where clients find the server.
    """

    def __init__(self, server: LockServer) -> None:
        self.server = server
        self.port = server.port

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.end()

    async def begin(self) -> None:
        """It befalls the server."""

    async def end(self) -> None:
        """It is over, unless the server is not needed any more."""

    async def _tell(self, *command: str) -> None:
        async with Redis(port=self.server.port, driver_info=None) as redis:
            await redis.execute_command(*command)  # type: ignore[no-untyped-call]


class Stopped(Trouble):
    """It keeps its connections, and answers nobody."""

    async def begin(self) -> None:
        self.server.pause()

    async def end(self) -> None:
        self.server.resume()


class Refusing(Trouble):
    """It is gone, and so are its connections."""

    async def begin(self) -> None:
        self.server.kill()


class ReadOnly(Trouble):
    """It is the replica of a server that is not there."""

    async def begin(self) -> None:
        await self._tell("REPLICAOF", "127.0.0.1", "1")


class Full(Trouble):
    """It has no room for another key."""

    async def begin(self) -> None:
        await self._tell("CONFIG", "SET", "maxmemory", "1")


class Password(Trouble):
    """It wants a password that no client has."""

    async def begin(self) -> None:
        await self._tell("CONFIG", "SET", "requirepass", PASSWORD)
        # Who is connected stays welcome otherwise.
        async with Redis(port=self.server.port, password=PASSWORD, driver_info=None) as redis:
            await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]


class Slow(Trouble):
    """Requests reach it late; on their way they do not wait for each other."""

    def __init__(self, server: LockServer) -> None:
        super().__init__(server)
        self.delay_s = 0.0

    async def begin(self) -> None:
        self.delay_s = SLOW_S

    async def listen(self) -> asyncio.Server:
        """From now on clients come this way, late or not."""
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(lambda: _Way(self), "127.0.0.1", 0)
        self.port = int(listening.sockets[0].getsockname()[1])
        return listening


class _Way(asyncio.Protocol):
    """One client's connection, and behind it one to the server."""

    def __init__(self, trouble: Slow) -> None:
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._early: list[bytes] = []
        self._onward: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.WriteTransport, transport)
        self._connecting = self._loop.create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        if self._trouble.delay_s:
            self._loop.call_later(self._trouble.delay_s, self._send, data)
        else:
            self._send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connecting.cancel()
        if self._onward is not None:
            self._onward.close()

    def _send(self, data: bytes) -> None:
        if self._onward is None:
            self._early.append(data)
        elif not self._onward.is_closing():
            self._onward.write(data)

    async def _connect(self) -> None:
        port = self._trouble.server.port
        onward, _ = await self._loop.create_connection(
            lambda: _Back(self._client), "127.0.0.1", port
        )
        onward.write(b"".join(self._early))
        self._onward = onward


class _Back(asyncio.Protocol):
    """What the server says, which is not delayed."""

    def __init__(self, client: asyncio.WriteTransport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        if not self._client.is_closing():
            self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


TROUBLES: Final[dict[str, type[Trouble]]] = {
    "": Trouble,
    "stopped": Stopped,
    "refusing": Refusing,
    "read-only": ReadOnly,
    "full": Full,
    "password": Password,
    "slow": Slow,
}


@asynccontextmanager
async def befalling(server: LockServer, kind: str) -> AsyncIterator[Trouble]:
    """A trouble that *server* may get into."""
    trouble = TROUBLES[kind](server)
    if not isinstance(trouble, Slow):
        yield trouble
        return
    listening = await trouble.listen()
    try:
        yield trouble
    finally:
        listening.close()
