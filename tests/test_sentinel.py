"""Locks on a master that Sentinels watch: what its failover does to holders and waiters."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from aiodlock import LeaseLostError, LockClient, LostReason, ServerUnreachable, _names
from aiodlock.testing import LockServer
from tests import fork_of, topologies
from tests.keys import leftovers, ttls
from tests.topologies import Watched, ask, extended
from tests.until import until

SLACK_S = 0.25
"""What a loaded machine may add to a bound of the contract."""

OUTAGE_S = 10.0
"""More than a failover takes, on a loaded machine, too."""
KEY = _names.keys("aiodlock:", "a").lock


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Watched]:
    """A master, a replica and three Sentinels."""
    async with topologies.watched() as made:
        yield made


@pytest.fixture
async def watched(servers: Watched) -> Watched:
    """The same, well and empty, however the test before left it."""
    await servers.heal()
    return servers


@asynccontextmanager
async def client(watched: Watched, **options: Any) -> AsyncIterator[LockClient]:
    """A client on `Sentinel(...).master_for(...)`."""
    async with watched.client() as redis, LockClient(redis, **options) as locks:
        yield locks


async def fail_over(watched: Watched, how: str) -> LockServer:
    """Make the master fail, or the Sentinels demote it; returns who it was, at once."""
    master = await watched.master()
    if how == "SENTINEL FAILOVER":
        await watched.fail_over()
    elif how == "SIGKILL":
        master.kill()
    else:
        master.pause()
    return master


async def copied(watched: Watched) -> None:
    """Wait until the replica has all that the master has."""
    master, replica = await watched.master(), await watched.replica()

    async def is_copied() -> bool:
        offsets = [
            (await topologies.info(server, "replication"))["master_repl_offset"]
            for server in (master, replica)
        ]
        return bool(offsets[0] == offsets[1])

    await until(is_copied)


async def waiters(locks: LockClient, n: int) -> bool:
    """Whether so many wait for "a"."""
    return (await locks.lock("a").inspect()).waiters == n


@pytest.mark.parametrize("how", ["SENTINEL FAILOVER", "SIGKILL", "SIGSTOP"])
async def test_lease_that_was_copied_outlives_the_master(watched: Watched, how: str) -> None:
    """The replica has it: the same grant goes on there, and is handed to the waiters in order."""
    order: list[int] = []

    async def queue(locks: LockClient, place: int) -> None:
        async with locks.lock("a", ttl=OUTAGE_S).acquire(wait_timeout=30):
            order.append(place)

    quick: dict[str, Any] = {"request_timeout": 1.0}
    async with client(watched, **quick) as ours, client(watched, **quick) as others:
        async with ours.lock("a", ttl=OUTAGE_S).acquire(wait_timeout=10) as lease:
            queued = []
            for place, locks in enumerate([others, ours]):
                queued.append(asyncio.create_task(queue(locks, place)))
                await until(functools.partial(waiters, ours, place + 1))
            await copied(watched)
            master = await fail_over(watched, how)
            await watched.moved_from(master)
            await extended(lease)
            assert await ask(await watched.master(), "GET", KEY) == (
                f"{lease.owner_token}/{lease.fencing_token}"
            )
            assert lease.is_held
        async with asyncio.timeout(OUTAGE_S):
            await asyncio.gather(*queued)
    assert order == [0, 1]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
async def test_lease_that_was_not_copied_is_told_by_its_deadline(
    watched: Watched, how: str
) -> None:
    """The new master knows nothing of it: nobody believes in it beyond its deadline.

    Another may get it as soon as the new master is there, which may be sooner: that is what a
    lock on one server with replicas cannot help, and what the fencing token is for.
    """
    ttl = 3.0
    async with client(watched) as ours, client(watched) as others:
        for locks in (ours, others):  # So that no handshake falls into the failover.
            async with locks.lock("warm").acquire(wait_timeout=10):
                pass
        await copied(watched)
        # It hears nothing from now on, and the Sentinels do not know yet.
        await ask(await watched.replica(), "REPLICAOF", topologies.HOST, 1)
        failed_at = told_at = 0.0
        with pytest.raises(LeaseLostError) as lost:
            async with ours.lock("a", ttl=ttl).acquire(wait_timeout=10) as lease:
                waiting = asyncio.create_task(others.lock("a", ttl=ttl).acquire(wait_timeout=30))
                await until(lambda: waiters(ours, 1))
                await fail_over(watched, how)
                failed_at = time.monotonic()
                try:
                    await asyncio.sleep(30)
                finally:
                    told_at = time.monotonic()
        assert told_at - failed_at < ttl + SLACK_S
        assert lost.value.reason in (LostReason.DELETED, LostReason.UNREACHABLE, LostReason.STOLEN)
        async with await waiting as next_lease:
            assert next_lease.fencing_token > lease.fencing_token


async def test_master_that_is_a_replica_for_a_second_loses_nobody(watched: Watched) -> None:
    """READONLY, then a master again: the lease goes on, the waiter is served (case 075)."""
    async with client(watched) as ours, client(watched) as others:
        master = await watched.master()
        lease = await ours.lock("a", ttl=3.0).acquire(wait_timeout=10)
        waiting = asyncio.create_task(others.lock("a", ttl=3.0).acquire(wait_timeout=30))
        await until(lambda: waiters(ours, 1))
        await ask(master, "REPLICAOF", topologies.HOST, 1)
        releasing = asyncio.create_task(lease.extend())
        newcomer = asyncio.create_task(others.lock("b").acquire(wait_timeout=10))
        await asyncio.sleep(1.0)
        assert not newcomer.done()
        await ask(master, "REPLICAOF", "NO", "ONE")
        assert await releasing > 2.0
        assert lease.state == "held"
        assert await lease.release() is True
        for got in (waiting, newcomer):
            assert await (await got).release() is True
    async with Redis.from_url(master.url, decode_responses=True) as admin:
        assert await leftovers(admin, ignoring_tombstones=True) == []
        assert min((await ttls(admin)).values()) > 0


async def test_release_while_the_master_is_a_replica_is_sent_again(watched: Watched) -> None:
    """READONLY at the end of a body: nothing is raised, and the key is gone afterwards."""
    async with client(watched) as locks:
        master = await watched.master()
        async with locks.lock("a").acquire(wait_timeout=10):
            await ask(master, "REPLICAOF", topologies.HOST, 1)
            back = asyncio.create_task(promoted_after(master, 0.5))
        await back
        assert await ask(master, "GET", KEY) is None


async def promoted_after(server: LockServer, seconds: float) -> None:
    """Make *server* a master again, a little later."""
    await asyncio.sleep(seconds)
    await ask(server, "REPLICAOF", "NO", "ONE")


async def test_service_that_no_sentinel_knows_is_unreachable(watched: Watched) -> None:
    """A wrong name for the service: said, with redis-py's own words, when the wait is over."""
    async with watched.client("no such service") as redis, LockClient(redis) as locks:
        with pytest.raises(ServerUnreachable, match="no such service") as error:
            await locks.lock("a").acquire(wait_timeout=0.3)
        assert "MasterNotFound" in type(error.value.__cause__).__name__


async def test_child_forked_from_a_client_on_sentinels_is_told_to_make_one(
    watched: Watched,
) -> None:
    """It has connections to the Sentinels, too, which are the parent's."""
    said = await fork_of.outcome("sentinel", watched.sentinels)
    assert said[0].startswith("child: RuntimeError: ")
    assert "does not outlive a fork" in said[0]
    assert said[1:] == ["parent: held"]
