"""`aiodlock ls`, `show` and `break` about names that several may hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, Lock, LockClient
from aiodlock.testing import LockServer
from tests import operators
from tests.by_hand import ONE
from tests.conftest import MakeClient
from tests.operators import Operator
from tests.quorums import Nodes
from tests.until import until


@pytest.fixture
def operator(
    server: LockServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operator]:
    """Calls commands about the server."""
    with operators.as_before():
        yield Operator(capsys, monkeypatch, server.url)


@asynccontextmanager
async def waiting(lock: Lock) -> AsyncIterator[asyncio.Task[Lease]]:
    """Somebody who stands in its queue."""
    task = asyncio.create_task(_acquired(lock))

    async def is_queued() -> bool:
        return (await lock.inspect()).waiters > 0

    try:
        await until(is_queued)
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            await task.result().release()


async def _acquired(lock: Lock) -> Lease:
    return await lock.acquire()


async def test_ls_of_names_that_several_hold_tells_how_many_do(
    operator: Operator, locks: LockClient
) -> None:
    """A line for each name; the number of permits as the holders see it."""
    pool = locks.semaphore("pool", permits=3)
    async with locks.reader("doc"), locks.reader("doc"), locks.writer("w"), pool, pool:
        told = await operator("ls")
        doc, many, writer = (await operator("ls", "--json")).json["names"]
    lines = told.out.splitlines()[2:]
    kinds = ["2 readers", "2 of 3 permits", "writer"]
    assert [kind in line for kind, line in zip(kinds, lines, strict=True)] == [True] * 3
    assert [each["kind"] for each in (doc, many, writer)] == ["readers", "semaphore", "writer"]
    assert (doc["inside"], many["inside"], many["permits"]) == (2, 2, 3)
    assert all("and 1 more" in line for line in lines[:2])


async def test_show_of_a_name_that_several_hold_tells_what_each_does(
    operator: Operator, locks: LockClient, make_client: MakeClient
) -> None:
    """A writer who only reads now, too; and what those who wait ask for."""
    async with locks.writer("doc") as lease, waiting(make_client().writer("doc")):
        await lease.downgrade()
        async with waiting(make_client().reader("doc")):
            told, text = await operator("show", "doc", "--json"), await operator("show", "doc")
    (holder,) = told.json["holders"]
    assert (holder["access"], holder["fencing_token"]) == ("reading", lease.fencing_token)
    assert 0 <= holder["held_for"] < operators.LIMIT_S
    lines = text.out.splitlines()
    assert ", reading" in next(line for line in lines if line.startswith("holder"))
    assert [line.split()[2] for line in lines[-2:]] == ["writing", "reading"]
    assert lease.owner_token not in told.out + text.out


async def test_ls_of_permits_that_are_only_waited_for_tells_the_kind(
    operator: Operator, redis: Redis
) -> None:
    """The holder's time is over, the next poll has not come yet."""
    await redis.zadd("aiodlock:{pool}:queue", {f"{ONE}:1s3": 1})
    (only,) = (await operator("ls", "--json")).json["names"]
    assert (only["kind"], only["held"], only["permits"]) == ("semaphore", False, 3)
    assert "0 of 3 permits" in (await operator("ls")).out


async def test_break_of_one_permit_lets_the_next_waiter_in_and_leaves_the_others(
    operator: Operator, locks: LockClient, make_client: MakeClient
) -> None:
    """By its fencing token; without one, all that were shown."""
    lock = locks.semaphore("pool", permits=2, auto_extend=False)
    first, second = await lock.acquire(), await lock.acquire()
    async with waiting(make_client(label="next").semaphore("pool", permits=2)) as task:
        told = await operator("break", "pool", "--yes", "--fencing-token", str(first.fencing_token))
        third = await asyncio.wait_for(task, operators.LIMIT_S)
        assert told.code == 0
        now = {each.fencing_token for each in (await lock.inspect()).holders}
        assert now == {second.fencing_token, third.fencing_token}
        assert (await operator("break", "pool", "--yes")).code == 0
        assert (await lock.inspect()).holders == ()
    await first.release()
    await second.release()


async def test_break_of_all_readers_lets_the_writer_in(
    operator: Operator, locks: LockClient, make_client: MakeClient
) -> None:
    """It tells how many it broke, and who has it then."""
    lock = locks.reader("doc", auto_extend=False)
    readers = [await lock.acquire() for _ in range(3)]
    async with waiting(make_client(label="next").writer("doc")) as task:
        told = await operator("break", "doc", "--yes", "--json")
        writer = await asyncio.wait_for(task, operators.LIMIT_S)
    assert told.code == 0
    assert "3 of 3 grants are broken" in told.err
    assert {each["fencing_token"] for each in told.json["broken"]} == {
        lease.fencing_token for lease in readers
    }
    assert told.json["now"]["fencing_token"] == writer.fencing_token
    for lease in readers:
        await lease.release()


async def test_operator_of_a_quorum_sees_and_breaks_its_readers(
    nodes: Nodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a majority of its own."""
    urls = nodes.urls[:3]
    with operators.as_before():
        operator = Operator(capsys, monkeypatch, *urls)
        async with LockClient.quorum(urls) as locks:
            lock = locks.reader("doc", auto_extend=False)
            readers = [await lock.acquire(wait_timeout=5) for _ in range(2)]
            told = await operator("show", "doc", "--json")
            assert {each["fencing_token"] for each in told.json["holders"]} == {
                lease.fencing_token for lease in readers
            }
            assert (await operator("break", "doc", "--yes")).code == 0
            assert not (await lock.inspect()).held
            for lease in readers:
                await lease.release()
