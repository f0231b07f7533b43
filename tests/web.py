"""Apps for the tests of the FastAPI door, and the servers that run them."""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import anyio
import httpx2
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aiodlock import LockClient
from aiodlock.fastapi import install
from aiodlock.testing import LockServer
from tests.until import until

REQUEST_LIMIT_S = 10.0
START_LIMIT_S = 30.0


def an_app(locks: LockClient, *, options: dict[str, Any] | None = None, **settings: Any) -> FastAPI:
    """An app without routes whose lifespan opens *locks*.

    Args:
        locks: The client to install.
        options: Those of `install`.
        settings: Those of `FastAPI`.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with locks:
            yield

    app = FastAPI(lifespan=lifespan, **settings)
    install(app, locks, **(options or {}))
    return app


@asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    """*app* without a server or its lifespan; what would be a 500 is raised."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(base_url="http://app", transport=transport) as client:
        yield client


class Site:
    """An app that is being served; `client` asks it, `uvicorn` serves it, in this loop."""

    def __init__(self, client: httpx2.AsyncClient, server: uvicorn.Server) -> None:
        self.client = client
        self.uvicorn = server

    async def get(self, path: str, **options: Any) -> httpx2.Response:
        """One whole response."""
        return await self.client.get(path, **options)

    def begin(self, path: str, **options: Any) -> asyncio.Task[httpx2.Response]:
        """A request that the test does something else beside."""
        return asyncio.create_task(self.get(path, **options))


@asynccontextmanager
async def serving(app: FastAPI, **config: Any) -> AsyncIterator[Site]:
    """*app* behind a real uvicorn for the length of a block; *config* is uvicorn's."""
    # Without a log_config of its own, what it logs reaches the tests by the root logger.
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, **config))
    running = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started or running.done())
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx2.AsyncClient(
            base_url=url, timeout=REQUEST_LIMIT_S, trust_env=False
        ) as client:
            yield Site(client, server)
    finally:
        server.should_exit = True
        await running


class Work:
    """What a handler does: it says that it has begun, and goes on when it is let.

    Attributes:
        begun: What was given to each call so far.
        cancelled: What was given to those that were cancelled.
        gate: Set: they go on.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, what: str) -> None:
        self.begun.append(what)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(what)
            raise


class Passing(BaseHTTPMiddleware):
    """Passes on what it gets, by tasks and queues of its own, as such middleware does."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)


class Cancelling:
    """Middleware that cancels its requests when it is told, natively or by an anyio scope."""

    def __init__(self, app: ASGIApp, *, give_up: asyncio.Event, how: str) -> None:
        self.app, self.give_up, self.how = app, give_up, how

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.how == "native":
            request = asyncio.create_task(self._run(scope, receive, send))
            await self.give_up.wait()
            request.cancel()
            await asyncio.wait([request])
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(self._run, scope, receive, send)
                await self.give_up.wait()
                group.cancel_scope.cancel()
        await JSONResponse("given up", 504)(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class Uvicorn:
    """A process of its own that serves `tests.web_app`; it is killed at the end."""

    def __init__(self, server: LockServer, journal: pathlib.Path) -> None:
        self._environment = os.environ | {"LOCK_SERVER": server.url, "JOURNAL": str(journal)}
        self.killed_ns: int | None = None
        self.statuses: Counter[tuple[str, int]] = Counter()

    async def __aenter__(self) -> Self:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.set_inheritable(True)
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "uvicorn", "tests.web_app:app", "--log-level", "error"),
                *("--fd", str(listener.fileno())),
                env=self._environment,
                pass_fds=[listener.fileno()],
            )
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = httpx2.AsyncClient(base_url=url, trust_env=False, timeout=REQUEST_LIMIT_S)
        try:
            await until(self._answers, START_LIMIT_S)
        except BaseException:
            self.process.kill()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.killed_ns is None:
            await self.kill()
        await self.client.aclose()

    async def kill(self) -> None:
        """SIGKILL, and note when nothing of it can be at work any more."""
        self.process.kill()
        await self.process.wait()
        self.killed_ns = time.monotonic_ns()

    async def post(self, path: str) -> bool:
        """Whether it answered; counted by route and status."""
        try:
            answer = await self.client.post(path)
            self.statuses[path.split("/")[1], answer.status_code] += 1
        except httpx2.TransportError:
            assert self.process.returncode is not None or await self._dies()
            return False
        return True

    async def _answers(self) -> bool:
        assert self.process.returncode is None, "uvicorn did not start"
        try:
            return (await self.client.get("/pid")).status_code == 200
        except httpx2.TransportError:
            return False

    async def _dies(self) -> bool:
        await asyncio.wait_for(self.process.wait(), 1)
        return True


class Turn(NamedTuple):
    """One handler at work on one invoice."""

    invoice: str
    token: int
    pid: int
    begin_ns: int
    end_ns: int


def turns_of(journal: pathlib.Path, killed: Uvicorn | None = None) -> list[Turn]:
    """Who was at work when, by invoice and begin; what was killed ended by its death."""
    begun, turns = dict[tuple[str, ...], int](), list[Turn]()
    for line in journal.read_text().splitlines():
        what, *who, at_ns = line.split()
        if what == "begin":
            begun[tuple(who)] = int(at_ns)
        else:
            invoice, token, pid = who
            began_ns = begun.pop(tuple(who))
            turns.append(Turn(invoice, int(token), int(pid), began_ns, int(at_ns)))
    for (invoice, token, pid), began_ns in begun.items():
        assert killed is not None
        assert killed.killed_ns is not None
        assert killed.process.pid == int(pid)
        turns.append(Turn(invoice, int(token), int(pid), began_ns, killed.killed_ns))
    return sorted(turns, key=lambda turn: (turn.invoice, turn.begin_ns))


def overlaps(turns: list[Turn]) -> list[tuple[Turn, Turn]]:
    """Neighbours on one invoice of which the second began too early, or with a smaller number."""
    return [
        (one, other)
        for one, other in itertools.pairwise(turns)
        if one.invoice == other.invoice
        and (other.begin_ns < one.end_ns or other.token <= one.token)
    ]
