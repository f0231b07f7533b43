"""What tests ask for: the server, clients on it, a proxy before it, and that nothing is left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import LockClient
from aiodlock.testing import LockServer
from tests import leaks, quorums, steps
from tests.proxy import ChaosProxy
from tests.quorums import Nodes

MakeClient: TypeAlias = Callable[..., LockClient]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was cancelled; a count that fell is a test that no longer tests."""
    if steps.told:
        terminalreporter.section("cancelled at every step")
        terminalreporter.write_line("\n".join(steps.told))


@pytest.fixture(autouse=True)
async def nothing_leaks() -> AsyncIterator[None]:
    """Every test: no task survives it, and the loop's exception handler hears nothing."""
    before = leaks.tasks()
    with leaks.loop_errors() as errors:
        yield
        left = await leaks.settled(before)
    assert not left, f"tasks left: {dict(left)}"
    assert not errors, f"errors in the loop: {errors}"


@pytest.fixture
def server(session_server: LockServer) -> LockServer:
    """The shared server: running, empty, however the test before left it."""
    if session_server.process.poll() is not None:
        session_server.restart()
    session_server.resume()
    with BlockingRedis.from_url(session_server.url) as admin:
        admin.flushall()
    return session_server


@pytest.fixture
async def redis(server: LockServer) -> AsyncIterator[Redis]:
    """A plain client, for looking at keys."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def proxy(server: LockServer) -> AsyncIterator[ChaosProxy]:
    """A proxy before the server, healthy at first."""
    async with ChaosProxy(server.port) as chaos:
        yield chaos


@pytest.fixture
async def make_client(server: LockServer, proxy: ChaosProxy) -> AsyncIterator[MakeClient]:
    """Makes clients, with any option of ``from_url``; all are closed at the end.

    ``url=proxy.url`` makes one behind the proxy, which is asked for here so that it outlives them.
    """
    clients: list[LockClient] = []

    def make(url: str = server.url, **options: Any) -> LockClient:
        clients.append(LockClient.from_url(url, **options))
        return clients[-1]

    yield make
    proxy.heal()
    for client in clients:
        await client.aclose()


@pytest.fixture
async def locks(make_client: MakeClient) -> AsyncIterator[LockClient]:
    """One client on the server, entered."""
    async with make_client() as client:
        yield client


@pytest.fixture(scope="module")
def servers() -> Iterator[list[LockServer]]:
    """Five that know nothing of each other, started once."""
    with quorums.servers(5) as made:
        yield made


@pytest.fixture
async def nodes(servers: list[LockServer]) -> AsyncIterator[Nodes]:
    """The same, well and empty, with a proxy before each."""
    async with quorums.nodes_of(servers) as made:
        yield made
