"""The floor: what any asyncio client must pay, with no client library at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import hiredis
from redis.asyncio import Connection

from aiodlock._clock import alive, extension_delay
from aiodlock._names import inbox, inbox_prefix, keys, new_client_id, owner_token

from .._orders import Order
from ._api import Lender, Pair
from ._scripts import COMPARE_AND_DELETE, own, sha
from .aiodlocks import PREFIX

OnReply = Callable[[Any], None]


class Wire(asyncio.Protocol):
    """One connection: what is asked in one turn of the loop goes out in one write.

    Args:
        at_once: There is only one who asks: do not wait for the others' requests.
    """

    def __init__(self, *, at_once: bool = False, on_push: OnReply | None = None) -> None:
        self._at_once = at_once
        self._on_push = on_push
        self._reader = hiredis.Reader()
        self._asked: deque[tuple[asyncio.Future[Any] | None, OnReply | None]] = deque()
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, **options: Any) -> Wire:
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_connection(lambda: cls(**options), "127.0.0.1", port)
        return wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # (uvloop's does not say that it is one.)
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if self._on_push is not None:
                self._on_push(reply)
                continue
            answer, on_reply = self._asked.popleft()
            if on_reply is not None:
                on_reply(reply)
            if answer is not None and not answer.done():
                answer.set_result(reply)

    def ask(self, request: bytes, on_reply: OnReply | None = None) -> asyncio.Future[Any]:
        """*request*, packed; the reply."""
        answer = self._loop.create_future()
        self._asked.append((answer, on_reply))
        self._send(request)
        return answer

    def tell(self, request: bytes, on_reply: OnReply) -> None:
        """The same for who wants no future of each connection."""
        self._asked.append((None, on_reply))
        self._send(request)

    def _send(self, request: bytes) -> None:
        if self._at_once:
            self.transport.write(request)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(request)

    def _flush(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent.clear()


class OverRedisPy:
    """The same for one who asks alone, over a connection of redis-py: its send, its read.

    aiodlock keeps to redis-py's public methods, so this is the floor that it stands on.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._asked: deque[tuple[asyncio.Future[Any] | None, OnReply | None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._reader = self._loop.create_task(self._read())
        self.transport = self

    @classmethod
    async def connect(cls, port: int, **_options: Any) -> OverRedisPy:
        connection = Connection(port=port, socket_timeout=None)
        await connection.connect()  # type: ignore[no-untyped-call]
        return cls(connection)

    def ask(self, request: bytes, on_reply: OnReply | None = None) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._asked.append((answer, on_reply))
        self._send(request)
        return answer

    def tell(self, request: bytes, on_reply: OnReply) -> None:
        self._asked.append((None, on_reply))
        self._send(request)

    def _send(self, request: bytes) -> None:
        sending = self._connection.send_packed_command((request,), check_health=False)
        with contextlib.suppress(StopIteration):  # One small request at a time never has to wait.
            sending.send(None)

    def close(self) -> None:
        self._reader.cancel()

    async def _read(self) -> None:
        while True:
            reply = await self._connection.read_response(disable_decoding=True)
            answer, on_reply = self._asked.popleft()
            if on_reply is not None:
                on_reply(reply)
            if answer is not None:
                answer.set_result(reply)


pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command


class Trivial(Lender):
    """SET NX PX, then a script that compares and deletes."""

    async def open(self, order: Order) -> None:
        self._wire = await Wire.connect(order.port, at_once=order.tasks == 1)
        await self._wire.ask(pack(("SCRIPT", "LOAD", COMPARE_AND_DELETE)))
        self._client_id = new_client_id()
        self._count = 0

    def pair(self, name: str, ttl_s: float) -> Pair:
        wire, digest, ttl = self._wire, sha(COMPARE_AND_DELETE), str(int(ttl_s * 1000))

        async def acquire() -> str:
            self._count += 1
            token = owner_token(self._client_id, self._count)
            reply = await wire.ask(pack(("SET", name, token, "NX", "PX", ttl)))
            if reply != b"OK":
                raise RuntimeError(f"{name} is held: {reply!r}")
            return token

        async def release(token: str) -> None:
            reply = await wire.ask(pack(("EVALSHA", digest, "1", name, token)))
            if reply != 1:
                raise RuntimeError(f"{name} was lost: {reply!r}")

        return Pair(acquire, release)

    async def aclose(self) -> None:
        self._wire.transport.close()


class Own:
    """aiodlock's scripts with aiodlock's arguments, and as little else as works when nothing fails.

    A waiter sends no heartbeats, so no wait may last longer than a queue remembers it (6 s).
    """

    in_threads = False

    def __init__(self, wire: type[Wire | OverRedisPy] = Wire) -> None:
        self._kind_of_wire = wire

    async def open(self, order: Order) -> None:
        self._loop = asyncio.get_running_loop()
        self._holder = f"floor:{new_client_id()}"
        self._client_id = self._holder.partition(":")[2]
        self._count = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._early: set[str] = set()
        self._lost: set[str] = set()
        self._extends = order.work in ("hold", "traced")
        self._tasks: set[asyncio.Task[None]] = set()
        self._wire = await self._kind_of_wire.connect(order.port, at_once=order.tasks == 1)
        self._inbox: Wire | None = None
        for name in ("acquire", "release", "extend"):
            await self._wire.ask(pack(("SCRIPT", "LOAD", own(name))))
        self._acquire, self._release = sha(own("acquire")), sha(own("release"))
        self._again = sha(own("extend"))
        if order.work == "compete":
            self._inbox = await Wire.connect(order.port, on_push=self._on_message)
            channel = inbox(PREFIX, self._client_id)
            self._inbox.transport.write(pack(("SUBSCRIBE", channel)))

    def pair(self, name: str, ttl_s: float) -> Pair:
        wire, ttl, channels = self._wire, str(int(ttl_s * 1000)), inbox_prefix(PREFIX)
        alive_ms = str(int(alive(ttl_s) * 1000))
        places = keys(PREFIX, name)
        acquire_head = ("EVALSHA", self._acquire, "4", *places)
        release_head = ("EVALSHA", self._release, "4", *places)

        async def acquire() -> str:
            self._count += 1
            token = owner_token(self._holder, self._count)
            request = pack((*acquire_head, token, ttl, alive_ms, channels))
            reply = await wire.ask(request)
            if reply[0] != 1:
                await self._turn_of(token)
            elif self._extends:
                value = f"{token}/{reply[1]}"
                self._keep(self._extend(places.lock, token, value, ttl, reply[2]))
            return token

        async def release(token: str) -> None:
            request = pack((*release_head, token, "0", channels, self._client_id))
            reply = await wire.ask(request, self._on_released)
            if reply[0] != 1:
                raise RuntimeError(f"{name} was lost: {reply!r}")

        return Pair(acquire, release)

    def key(self, name: str) -> str:
        return keys(PREFIX, name).lock

    def is_held(self, held: Any) -> bool:
        return held not in self._lost

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._wire.transport.close()
        if self._inbox is not None:
            self._inbox.transport.close()

    async def _turn_of(self, token: str) -> None:
        if token in self._early:  # The news was read in one go with the refusal.
            self._early.discard(token)
            return
        turn = self._waiting[token] = self._loop.create_future()
        await turn

    def _on_released(self, reply: Any) -> None:
        if reply[0] == 1 and reply[1]:
            self._wake(reply[1])

    def _on_message(self, message: Any) -> None:
        if message[0] == b"message":
            self._wake(message[2])

    def _wake(self, value: bytes) -> None:
        token = value.partition(b"/")[0].decode()
        if token.split(":")[1] != self._client_id:
            return
        turn = self._waiting.pop(token, None)
        if turn is None:
            self._early.add(token)
        elif not turn.done():
            turn.set_result(None)

    def _keep(self, extension: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(self._loop.create_task(extension))

    async def _extend(self, key: str, token: str, value: str, ttl: str, left_ms: int) -> None:
        request = pack(("EVALSHA", self._again, "1", key, ttl, value))
        while True:
            await asyncio.sleep(extension_delay(left_ms / 1000, random.random()))
            reply = await self._wire.ask(request)
            if reply[0] != 1:
                self._lost.add(token)
                return
            left_ms = reply[1]


class OwnOverRedisPy(Own):
    """The same over a connection of redis-py."""

    def __init__(self) -> None:
        super().__init__(OverRedisPy)
