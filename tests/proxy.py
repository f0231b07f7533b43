"""A TCP proxy between client and server that loses, delays and withholds what a test asks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Self

Kind = Literal["commands", "inbox"]
SUBSCRIBE = ("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time at all
BUFFER = 1 << 16


@dataclass(eq=False)
class Fault:
    """A rule for what contains *matching*; the methods of the proxy that make one return it.

    Attributes:
        left: How many it will still strike; ``None`` for all.
        hits: How many it has struck.
        used: Set once ``left`` is 0.
    """

    matching: bytes
    left: int | None
    seconds: float = 0.0
    close: bool = False
    hits: int = 0
    used: asyncio.Event = field(default_factory=asyncio.Event)

    def strikes(self, frame: bytes) -> bool:
        """Whether it applies to this one, counting it if so."""
        if self.left == 0 or self.matching not in frame:
            return False
        self.hits += 1
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.used.set()
        return True


class ChaosProxy:
    """``async with ChaosProxy(server.port) as proxy``; clients connect to ``proxy.url``.

    A connection that has subscribed is an inbox: faults on replies pass it by, those on messages
    concern it alone.

    Attributes:
        port: Where it listens on 127.0.0.1.
        connections: How many were accepted so far.
        requests: How many of each command arrived so far, by its upper-case name.
    """

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.connections = 0
        self.requests: Counter[str] = Counter()
        self.server_port = server_port
        self.clear = asyncio.Event()
        self.clear.set()
        self.reply_drops: list[Fault] = []
        self.reply_delays: list[Fault] = []
        self.request_delays: list[Fault] = []
        self.message_drops: list[Fault] = []
        self.message_delays: list[Fault] = []
        self._links: set[_Link] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        """How many clients are connected now."""
        return len(self._open())

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        await asyncio.gather(*(link.end() for link in self._links))
        await self._server.wait_closed()

    def drop_replies(self, n: int = 1, matching: bytes = b"", *, close: bool = False) -> Fault:
        """Swallow the reply to each of the next *n* such requests, which the server has done.

        Args:
            n: How many.
            matching: What the request's bytes must contain.
            close: Reset the connection when the reply comes, rather than stay silent. Without it,
                the next reply on that connection answers an earlier request, which no TCP
                connection does: only where no other request follows.
        """
        return _added(self.reply_drops, Fault(matching, n, close=close))

    def delay_replies(self, seconds: float, matching: bytes = b"", n: int | None = None) -> Fault:
        """Deliver replies to such requests late; those behind them on the connection wait too."""
        return _added(self.reply_delays, Fault(matching, n, seconds))

    def delay_requests(self, seconds: float, matching: bytes = b"", n: int | None = 1) -> Fault:
        """Hold such requests back; they reach the server even if their client has hung up since.

        What the same connection sends behind them waits too, in order.
        """
        return _added(self.request_delays, Fault(matching, n, seconds))

    def drop_messages(self, n: int | None = None, matching: bytes = b"message") -> Fault:
        """Swallow the next *n* (``None``: all) such messages to inboxes."""
        return _added(self.message_drops, Fault(matching, n))

    def delay_messages(
        self, seconds: float, matching: bytes = b"message", n: int | None = 1
    ) -> Fault:
        """Deliver such messages to inboxes late; those behind them wait too."""
        return _added(self.message_delays, Fault(matching, n, seconds))

    def black_hole(self) -> None:
        """Forward nothing either way, on old and new connections alike; heal() delivers it."""
        self.clear.clear()

    def half_open_inboxes(self) -> int:
        """Make the inboxes there are deaf for ever, new ones not; returns how many there were."""
        deaf = self._open("inbox")
        for link in deaf:
            link.is_deaf = True
        return len(deaf)

    def heal(self, *, deliver: bool = True) -> None:
        """End the black hole, and every fault for what arrives from now on.

        Args:
            deliver: ``False`` loses what the black hole held, and resets its connections.
        """
        rules = (self.reply_drops, self.reply_delays, self.request_delays)
        for faults in (*rules, self.message_drops, self.message_delays):
            faults.clear()
        if not deliver:
            for link in self._links:
                link.is_lost = True
                link.reset()
        self.clear.set()

    def kill_connections(self, only: Kind | None = None) -> int:
        """Reset (RST) the clients' connections, all or of one kind; returns how many there were.

        Requests that are held back are still delivered.
        """
        doomed = self._open(only)
        for link in doomed:
            link.reset()
        return len(doomed)

    def _open(self, only: Kind | None = None) -> list[_Link]:
        wanted = (False, True) if only is None else (only == "inbox",)
        return [link for link in self._links if link.is_open and link.is_inbox in wanted]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, writer)
        self._links.add(link)
        # Cancelled by end() only; asyncio would report that as an error of this callback.
        with contextlib.suppress(asyncio.CancelledError):
            await link.run(reader)
        self._links.discard(link)


class _Link:
    """One client's connection, paired with one to the server."""

    def __init__(self, proxy: ChaosProxy, client: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = client
        self._task = asyncio.current_task()
        # What becomes of the replies still to come: (the fault that drops it, seconds of delay).
        self._verdicts: deque[tuple[Fault | None, float]] = deque()
        self.is_open = True
        self.is_inbox = False
        self.is_deaf = False
        self.is_lost = False

    async def run(self, from_client: asyncio.StreamReader) -> None:
        try:
            from_server, server = await asyncio.open_connection(
                "127.0.0.1", self._proxy.server_port
            )
        except OSError:
            return self.reset()
        try:
            async with asyncio.TaskGroup() as group:
                to_server = _Line(self, server)
                to_client = _Line(self, self._client)
                group.create_task(self._take_requests(from_client, to_server))
                group.create_task(self._take_replies(from_server, to_client))
                group.create_task(to_server.run())
                group.create_task(to_client.run())
        finally:
            self.is_open = False
            self._client.close()
            server.close()

    async def end(self) -> None:
        self.reset()
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    def reset(self) -> None:
        self.is_open = False
        if not self._client.is_closing():
            sock = self._client.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._client.transport.abort()

    async def _take_requests(self, reader: asyncio.StreamReader, line: _Line) -> None:
        async for request in _frames(reader):
            command = request.split(b"\r\n", 3)[2].decode().upper()
            self._proxy.requests[command] += 1
            self.is_inbox = self.is_inbox or command in SUBSCRIBE
            drop = _first(self._proxy.reply_drops, request)
            self._verdicts.append((drop, _delay(self._proxy.reply_delays, request)))
            line.put(request, _delay(self._proxy.request_delays, request))
        self.is_open = False
        line.put(None)

    async def _take_replies(self, reader: asyncio.StreamReader, line: _Line) -> None:
        async for frame in _frames(reader):
            if self.is_inbox:
                if not self.is_deaf and not _first(self._proxy.message_drops, frame):
                    line.put(frame, _delay(self._proxy.message_delays, frame))
            elif frame.startswith(b">"):  # a push answers nothing
                line.put(frame)
            else:
                self._answer(frame, line)
        line.put(None)

    def _answer(self, frame: bytes, line: _Line) -> None:
        drop, delay = self._verdicts.popleft()
        if drop is None:
            line.put(frame, delay)
        elif drop.close:
            self.reset()


class _Line:
    """One direction: delivers in order, nothing before it is due."""

    def __init__(self, link: _Link, writer: asyncio.StreamWriter) -> None:
        self._link = link
        self._writer = writer
        self._waiting: asyncio.Queue[tuple[bytes | None, float]] = asyncio.Queue()
        self._now = asyncio.get_running_loop().time

    def put(self, frame: bytes | None, delay_s: float = 0.0) -> None:
        """Add a frame, or ``None`` for the end."""
        self._waiting.put_nowait((frame, self._now() + delay_s))

    async def run(self) -> None:
        while True:
            frame, due = await self._waiting.get()
            if due > self._now():
                await asyncio.sleep(due - self._now())
            await self._link._proxy.clear.wait()
            if frame is None:
                break
            if not self._link.is_lost and not self._writer.is_closing():
                self._writer.write(frame)
        self._writer.close()


def _added(faults: list[Fault], fault: Fault) -> Fault:
    faults.append(fault)
    return fault


def _first(faults: list[Fault], frame: bytes) -> Fault | None:
    return next((fault for fault in faults if fault.strikes(frame)), None)


def _delay(faults: list[Fault], frame: bytes) -> float:
    fault = _first(faults, frame)
    return 0.0 if fault is None else fault.seconds


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Each whole RESP value as its bytes, until the end or a reset."""
    pending = b""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(BUFFER):
            pending += chunk
            start = 0
            while (end := frame_end(pending, start)) is not None:
                yield pending[start:end]
                start = end
            pending = pending[start:]


def frame_end(data: bytes, start: int) -> int | None:
    r"""Where the RESP2 or RESP3 value that begins at *start* ends; ``None``: not all of it is here.

    >>> frame_end(b"*2\r\n$1\r\na\r\n:1\r\n+OK\r\n", 0)
    15
    """
    eol = data.find(b"\r\n", start)
    if eol < 0:
        return None
    kind, end = data[start : start + 1], eol + 2
    if kind in b"$=!":
        length = int(data[start + 1 : eol])
        end += length + 2 if length >= 0 else 0
        return end if end <= len(data) else None
    if kind in b"*~>%":
        count = int(data[start + 1 : eol]) * (2 if kind == b"%" else 1)
        for _ in range(count):
            inner = frame_end(data, end)
            if inner is None:
                return None
            end = inner
    return end
