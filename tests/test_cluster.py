"""Locks on a cluster: slots that move, primaries that fail, messages that cross nodes."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.cluster import LoadBalancingStrategy
from redis.crc import key_slot

from aiodlock import (
    LeaseLostError,
    LockClient,
    LostReason,
    NotAllowedError,
    ServerUnreachable,
    _names,
)
from aiodlock.testing import LockServer, _free_port
from tests import fork_of, topologies
from tests.holders import hears
from tests.leaks import tasks
from tests.permissions import CLUSTER_PERMISSIONS, LEAST_PERMISSIONS
from tests.topologies import Cluster, ask, extended, slot_of
from tests.until import until

SOON_S = 1.0
"""Sooner than any waiter polls by itself when the ttl is 30 s."""

SLACK_S = 0.5
"""What a loaded machine may add to a bound of the contract."""

OUTAGE_S = 10.0
"""More than a failover takes, on a loaded machine, too."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Cluster]:
    """Three primaries with a replica each."""
    async with topologies.cluster(replicas=True) as made:
        yield made


@pytest.fixture
async def cluster(servers: Cluster) -> Cluster:
    """The same, well and empty, however the test before left it."""
    for node in servers.nodes:
        if node.process.poll() is None:
            node.resume()
        else:
            node.restart()
    await servers.healed()
    await servers.flush()
    return servers


@asynccontextmanager
async def client(
    cluster: Cluster, who: str = "ours", *, balancing: Any = None, **options: Any
) -> AsyncIterator[LockClient]:
    """A client on a `RedisCluster` of its own, which the servers know by the name *who*."""
    redis = cluster.client(client_name=who, load_balancing_strategy=balancing)
    async with aclosing(redis), LockClient(redis, **options) as locks:
        yield locks


async def homes(cluster: Cluster) -> dict[LockServer, str]:
    """A name on each primary."""
    owners = await cluster.owners()
    return {node: cluster.name_on(node, owners) for node in set(owners.values())}


async def connections(cluster: Cluster, who: str = "ours") -> dict[LockServer, list[str]]:
    """What each node tells about the connections of *who*."""
    found = {}
    for node in cluster.nodes:
        clients = str(await ask(node, "CLIENT", "LIST")).splitlines()
        found[node] = [line for line in clients if f" name={who} " in line]
    return found


async def inbox_of(cluster: Cluster, who: str) -> LockServer | None:
    """The node at which the inbox of *who* is subscribed."""
    for node, lines in (await connections(cluster, who)).items():
        if any(" sub=1 " in line for line in lines):
            return node
    return None


async def waiters(locks: LockClient, name: str, n: int) -> bool:
    """Whether so many wait for *name*."""
    return (await locks.lock(name).inspect()).waiters == n


async def gone(node: LockServer, name: str) -> bool:
    """Whether *node* has no key of the lock *name*; asked of that node, wherever the slot is."""
    keys = await ask(node, "CLUSTER", "GETKEYSINSLOT", slot_of(name), 100)
    return _names.keys("aiodlock:", name).lock not in keys


# Names, slots, connections.


async def test_client_of_a_cluster_locks_any_name(cluster: Cluster) -> None:
    """Fifty random names with every trap in them: each operation works, each in one slot."""
    rng = random.Random(50)
    names = ["".join(rng.choices("{}%:/ aé鍵\n", k=rng.randint(1, 12))) for _ in range(50)]
    assert len({slot_of(name) for name in names}) > 40
    async with client(cluster) as ours, client(cluster, "others") as others:

        async def use(name: str) -> None:
            lock = ours.lock(name)
            lease = await lock.acquire(wait_timeout=10)
            assert await lease.extend() > 20
            assert (await others.lock(name).inspect()).fencing_token == lease.fencing_token
            waiting = asyncio.create_task(others.lock(name).acquire(wait_timeout=10))
            await until(lambda: waiters(ours, name, 1))
            assert await lease.release() is True
            next_lease = await waiting
            assert next_lease.fencing_token > lease.fencing_token
            assert await lock.break_lock() is True
            assert await next_lease.release() is False

        for name in set(names):
            await use(name)
    for name in names:
        assert len({key_slot(key.encode()) for key in _names.keys("aiodlock:", name)}) == 1


async def test_message_crosses_from_any_node_to_the_inbox(cluster: Cluster) -> None:
    """Three names on three nodes, one inbox: two of the three messages come from elsewhere."""
    async with client(cluster) as ours, client(cluster, "others") as others:
        names = (await homes(cluster)).values()
        leases = [await ours.lock(name).acquire(wait_timeout=10) for name in names]
        waiting = [asyncio.create_task(others.lock(name).acquire()) for name in names]
        for name in names:
            await until(functools.partial(waiters, ours, name, 1))
        await until(lambda: hears(others))
        for lease, waiter in zip(leases, waiting, strict=True):
            started_at = time.monotonic()
            assert await lease.release() is True
            assert await (await waiter).release() is True
            assert time.monotonic() - started_at < SOON_S


async def test_client_has_one_connection_for_each_node_and_one_inbox(cluster: Cluster) -> None:
    """Sixty names and sixty waiters: four connections that lock, and none when it is closed.

    redis-py keeps one or two more of its own, which last asked for something else.
    """
    redis = cluster.client(client_name="ours")
    async with aclosing(redis), client(cluster, "others") as others:
        names = [f"job {n}" for n in range(60)]
        leases = [await others.lock(name).acquire(wait_timeout=10) for name in names]
        before = tasks()
        locks = LockClient(redis)
        async with locks:
            waiting = [asyncio.create_task(locks.lock(name).acquire()) for name in names]
            for name in names:
                await until(functools.partial(waiters, others, name, 1))
            await until(lambda: hears(locks))
            lines = [line for each in (await connections(cluster)).values() for line in each]
            assert sum(" cmd=evalsha " in line for line in lines) == 3
            assert sum(" sub=1 " in line for line in lines) == 1
            for lease in leases:
                await lease.release()
            for waiter in waiting:
                await (await waiter).release()
        assert tasks() - before == {}
        lines = [line for each in (await connections(cluster)).values() for line in each]
        assert [line for line in lines if " cmd=eval" in line or " sub=1 " in line] == []
        # It is the user's, and still open.
        assert await redis.set("mine", "1") is True
    assert [line for each in (await connections(cluster)).values() for line in each] == []


async def test_client_of_a_cluster_that_is_not_there_says_so() -> None:
    """No node answers: the wait is waited out, and the cause is told."""
    redis = RedisCluster(host=topologies.HOST, port=_free_port())
    async with aclosing(redis), LockClient(redis) as locks:
        started_at = time.monotonic()
        with pytest.raises(ServerUnreachable, match=r"(?i)connect") as error:
            await locks.lock("a").acquire(wait_timeout=0.5)
        assert 0.5 <= time.monotonic() - started_at < 0.5 + SOON_S
        assert error.value.__cause__ is not None


async def test_client_of_one_node_of_a_cluster_is_told_what_to_use(cluster: Cluster) -> None:
    """A plain `Redis` knows one node: for a name of another, the error names `RedisCluster`."""
    node, *others = await homes(cluster)
    async with LockClient.from_url(node.url, request_timeout=0.5) as locks:
        async with locks.lock((await homes(cluster))[node]).acquire(wait_timeout=5):
            pass
        with pytest.raises(ServerUnreachable, match="RedisCluster"):
            await locks.lock((await homes(cluster))[others[0]]).acquire(wait_timeout=0.3)


async def test_cluster_client_of_a_server_that_is_none_is_told(server: LockServer) -> None:
    """The other way round: redis-py's own words come out."""
    redis = RedisCluster(host=topologies.HOST, port=server.port)
    async with aclosing(redis), LockClient(redis) as locks:
        with pytest.raises(ServerUnreachable, match="Cluster mode is not enabled"):
            await locks.lock("a").acquire(wait_timeout=0.3)


async def test_child_forked_from_a_cluster_client_is_told_to_make_one(cluster: Cluster) -> None:
    """redis-py cannot copy it without its connections, which are the parent's: said, not tried."""
    said = await fork_of.outcome("cluster", cluster.nodes)
    assert said[0].startswith("child: RuntimeError: ")
    assert "does not outlive a fork" in said[0]
    assert said[1:] == ["parent: held"]


# Users.


@asynccontextmanager
async def user(cluster: Cluster, *rules: str) -> AsyncIterator[topologies.User]:
    """Somebody whom every node knows."""
    somebody = topologies.User("somebody", "secret")
    for node in cluster.nodes:
        await ask(node, "ACL", "SETUSER", somebody.name, "reset", "on", ">secret", *rules)
    try:
        yield somebody
    finally:
        for node in cluster.nodes:
            await ask(node, "ACL", "DELUSER", somebody.name)


async def test_user_with_the_least_permissions_locks_on_a_cluster(cluster: Cluster) -> None:
    """What one server asks for, and what redis-py needs to find its way: no more."""
    async with user(cluster, *LEAST_PERMISSIONS, *CLUSTER_PERMISSIONS) as who:
        redis = cluster.client(username=who.name, password=who.password)
        async with aclosing(redis), LockClient(redis) as locks:
            for name in (await homes(cluster)).values():
                lease = await locks.lock(name).acquire(wait_timeout=10)
                waiting = asyncio.create_task(locks.lock(name).acquire(wait_timeout=10))
                await until(functools.partial(waiters, locks, name, 1))
                await lease.release()
                async with await waiting:
                    pass
            await until(lambda: not locks_wait(locks))


def locks_wait(locks: LockClient) -> bool:
    """Whether any acquisition of the client is under way."""
    return locks._session is not None and bool(locks._session._waits)


@pytest.mark.parametrize("missing", CLUSTER_PERMISSIONS)
async def test_user_who_may_not_see_the_cluster_is_not_allowed(
    cluster: Cluster, missing: str
) -> None:
    """Without any one of these redis-py finds no node: refused at once, the word is named."""
    rules = [rule for rule in CLUSTER_PERMISSIONS if rule != missing]
    async with user(cluster, *LEAST_PERMISSIONS, *rules) as who:
        redis = cluster.client(username=who.name, password=who.password)
        async with aclosing(redis), LockClient(redis) as locks:
            started_at = time.monotonic()
            with pytest.raises(NotAllowedError, match=missing.lstrip("+")):
                await locks.lock("a").acquire(wait_timeout=20)
            assert time.monotonic() - started_at < SOON_S


async def test_user_with_a_wrong_password_is_not_allowed_on_a_cluster(cluster: Cluster) -> None:
    """Nobody waits for a password to become right."""
    async with user(cluster, "+@all", "~*", "&*") as who:
        redis = cluster.client(username=who.name, password="wrong")
        async with aclosing(redis), LockClient(redis) as locks:
            started_at = time.monotonic()
            with pytest.raises(NotAllowedError, match="password"):
                await locks.lock("a").acquire(wait_timeout=20)
            assert time.monotonic() - started_at < SOON_S


# Slots that move.


async def a_move(cluster: Cluster) -> tuple[str, int, LockServer, LockServer]:
    """A name, its slot, where that is, and where it will go."""
    source, target, *_ = sorted(await homes(cluster), key=lambda node: node.port)
    name = (await homes(cluster))[source]
    return name, slot_of(name), source, target


async def test_lease_and_waiter_follow_a_slot_that_moves(cluster: Cluster) -> None:
    """The slot goes to another node, with its keys: the lease is kept, and then handed over."""
    name, slot, source, target = await a_move(cluster)
    async with client(cluster) as ours, client(cluster, "others") as others:
        lease = await ours.lock(name, ttl=5).acquire(wait_timeout=10)
        waiting = asyncio.create_task(others.lock(name, ttl=5).acquire(wait_timeout=20))
        await until(lambda: waiters(ours, name, 1))
        await cluster.begin_move(slot, source, target)
        assert len(await cluster.move_keys(slot, source, target)) == 4
        await cluster.end_move(slot, source, target)
        assert await lease.extend() > 4
        assert await gone(source, name)
        assert await lease.release() is True
        async with await waiting as next_lease:
            assert next_lease.fencing_token > lease.fencing_token
            assert not await gone(target, name)
        assert await gone(target, name)


async def test_first_lock_on_a_node_whose_slot_has_moved_is_got(cluster: Cluster) -> None:
    """The client knows the map, has no connection there yet, and the map is old."""
    name, slot, source, target = await a_move(cluster)
    owners = await cluster.owners()
    elsewhere = cluster.name_on(target, owners)
    async with client(cluster) as locks:
        async with locks.lock(elsewhere).acquire(wait_timeout=10):
            pass
        await cluster.begin_move(slot, source, target)
        await cluster.end_move(slot, source, target)
        async with locks.lock(name).acquire(wait_timeout=SOON_S):
            assert not await gone(target, name)


@pytest.mark.parametrize("lock_key_is", ["here", "there"])
async def test_slot_that_is_half_moved_for_long_is_waited_out(
    cluster: Cluster, lock_key_is: str
) -> None:
    """Two ttls between two nodes: extended, released by its one key, and got when it is whole."""
    name, slot, source, target = await a_move(cluster)
    ttl = 0.8
    key = _names.keys("aiodlock:", name).lock
    async with client(cluster) as ours, client(cluster, "others") as others:
        lease = await ours.lock(name, ttl=ttl).acquire(wait_timeout=10)
        await cluster.begin_move(slot, source, target)
        if lock_key_is == "there":
            await ask(source, "MIGRATE", topologies.HOST, target.port, "", 0, 5000, "KEYS", key)
        waiting = asyncio.create_task(others.lock(name, ttl=ttl).acquire(wait_timeout=20))
        held_until = time.monotonic() + 2 * ttl
        while time.monotonic() < held_until:
            assert lease.is_held
            await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await lease.release() is True
        assert [await gone(node, name) for node in (source, target)] == [True, True]
        assert not waiting.done()
        await cluster.end_move(slot, source, target)
        async with await waiting as next_lease:
            assert next_lease.fencing_token > lease.fencing_token
            assert next_lease.is_held
    assert [await gone(node, name) for node in (source, target)] == [True, True]


async def test_waiter_in_a_slot_that_begins_to_move_gets_it_when_the_holder_leaves(
    cluster: Cluster,
) -> None:
    """All four keys are there, so nothing is refused: the hand-off works as ever."""
    name, slot, source, target = await a_move(cluster)
    async with client(cluster) as ours, client(cluster, "others") as others:
        lease = await ours.lock(name).acquire(wait_timeout=10)
        waiting = [asyncio.create_task(others.lock(name).acquire()) for _ in range(2)]
        await until(lambda: waiters(ours, name, 2))
        await until(lambda: hears(others))
        await cluster.begin_move(slot, source, target)
        started_at = time.monotonic()
        assert await lease.release() is True
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert time.monotonic() - started_at < SOON_S
        # The side keys are gone from here now: the release of this one hands over to nobody.
        assert await done.pop().result().release() is True
        await cluster.end_move(slot, source, target)
        assert await (await asyncio.gather(*waiting))[1].release() in (True, False)
    assert await gone(target, name)


# Nodes that fail.


async def fail_over(cluster: Cluster, slot: int, how: str) -> LockServer:
    """Have the replica take over the primary of *slot*; returns who was the primary.

    What the primary has written by now is at the replica before.
    """
    primary, replica = await cluster.owner(slot), await cluster.replica(slot)
    await until(lambda: in_step(primary, replica))
    if how == "CLUSTER FAILOVER":
        await ask(replica, "CLUSTER", "FAILOVER")
    elif how == "SIGKILL":
        primary.kill()
    else:
        primary.pause()
    return primary


async def in_step(primary: LockServer, replica: LockServer) -> bool:
    """Whether the replica has all that the primary has."""
    offsets = [
        (await topologies.info(node, "replication"))["master_repl_offset"]
        for node in (primary, replica)
    ]
    return bool(offsets[0] == offsets[1])


async def taken_over(cluster: Cluster, slot: int, primary: LockServer) -> None:
    """Wait until another is the primary of *slot*."""
    await until(lambda: cluster.has_moved(slot, primary), OUTAGE_S)


@pytest.mark.parametrize(
    ("how", "balancing"),
    [
        ("CLUSTER FAILOVER", None),
        # Its connections say READONLY at their beginning: the old primary sends nobody away.
        ("CLUSTER FAILOVER", LoadBalancingStrategy.ROUND_ROBIN),
        ("SIGKILL", None),
        ("SIGSTOP", None),
    ],
)
async def test_lease_and_waiters_outlive_the_primary(
    cluster: Cluster, how: str, balancing: Any
) -> None:
    """The replica takes over: held all the time, waiters in order, others never disturbed.

    All had been copied to the replica. A node that stands still, or is gone, must not keep a
    lease of one second on another node from being extended, nor a new one from being got.
    """
    owners = await cluster.owners()
    victim, other = sorted(set(owners.values()), key=lambda node: node.port)[:2]
    name = cluster.name_on(victim, owners)
    on_other = [cluster.name_on(other, owners, nth=nth) for nth in range(2)]
    slot = slot_of(name)
    order: list[int] = []

    async def queue(locks: LockClient, place: int) -> None:
        async with locks.lock(name, ttl=OUTAGE_S).acquire(wait_timeout=30):
            order.append(place)

    quick: dict[str, Any] = {"request_timeout": 1.0, "balancing": balancing}
    async with client(cluster, **quick) as ours, client(cluster, "others", **quick) as others:
        lease = await ours.lock(name, ttl=OUTAGE_S).acquire(wait_timeout=10)
        bystander = await ours.lock(on_other[0], ttl=1.0).acquire(wait_timeout=10)
        queued = []
        for place, locks in enumerate([others, ours, others]):
            queued.append(asyncio.create_task(queue(locks, place)))
            await until(functools.partial(waiters, ours, name, place + 1))
        primary = await fail_over(cluster, slot, how)
        taking_over = asyncio.create_task(taken_over(cluster, slot, primary))
        while not taking_over.done():
            assert bystander.is_held
            async with others.lock(on_other[1]).acquire(wait_timeout=SOON_S):
                await asyncio.sleep(0.05)
        await taking_over
        await extended(lease)
        assert bystander.is_held
        assert await bystander.release() is True
        assert await lease.release() is True
        async with asyncio.timeout(OUTAGE_S):
            await asyncio.gather(*queued)
        assert order == [0, 1, 2]


async def test_holder_on_a_node_that_stands_still_is_told_by_its_deadline(
    cluster: Cluster,
) -> None:
    """SIGSTOP for longer than the ttl: UNREACHABLE at the deadline, not later; then got again."""
    by_node = await homes(cluster)
    victim = min(by_node, key=lambda node: node.port)
    timeout = 1.0
    async with client(cluster, request_timeout=timeout) as locks:
        paused_at = 0.0
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock(by_node[victim], ttl=0.8).acquire(wait_timeout=10) as lease:
                victim.pause()
                paused_at = time.monotonic()
                await asyncio.sleep(10)
        assert lost.value.reason is LostReason.UNREACHABLE
        # Leaving the block may take a request's time: the release is sent all the same.
        assert time.monotonic() - paused_at < 0.8 + timeout + SLACK_S
        async with locks.lock(by_node[victim]).acquire(wait_timeout=OUTAGE_S) as next_lease:
            assert next_lease.fencing_token > lease.fencing_token


def is_linked(locks: LockClient, name: str) -> bool:
    """Whether the client has a connection that it believes in for *name*."""
    assert locks._session is not None
    store: Any = locks._session.store
    return store._router.link(_names.keys("aiodlock:", name).lock) is not None


async def test_node_that_was_lost_is_asked_last_for_the_map(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still, and redis-py's shuffle would have it asked first, each time.

    A lock on another node, to which there is no connection yet, must not wait for it.
    """
    by_node = await homes(cluster)
    victim, other = sorted(by_node, key=lambda node: node.port)[:2]

    def victim_first(nodes: list[ClusterNode]) -> None:
        nodes.sort(key=lambda node: node.port != victim.port)

    timeout = 1.0
    async with client(cluster, request_timeout=timeout) as locks:
        lease = await locks.lock(by_node[victim]).acquire(wait_timeout=10)
        victim.pause()
        with pytest.raises(ServerUnreachable):
            await lease.extend()
        await until(lambda: not is_linked(locks, by_node[victim]))
        monkeypatch.setattr(random, "shuffle", victim_first)
        started_at = time.monotonic()
        async with locks.lock(by_node[other]).acquire(wait_timeout=OUTAGE_S):
            assert time.monotonic() - started_at < timeout / 2
        victim.resume()


async def test_first_lock_on_a_primary_that_stands_still_is_got_from_its_replica(
    cluster: Cluster,
) -> None:
    """The client knows the map and has no connection there; it is got once the replica is primary.

    Connecting to what stands still does not fail: the kernel answers for it.
    """
    by_node = await homes(cluster)
    victim, other = sorted(by_node, key=lambda node: node.port)[:2]
    async with (
        client(cluster, request_timeout=1.0) as locks,
        locks.lock(by_node[other]).acquire(wait_timeout=10),
    ):
        victim.pause()
        async with locks.lock(by_node[victim]).acquire(wait_timeout=OUTAGE_S) as lease:
            assert await cluster.has_moved(slot_of(lease.name), victim)


async def test_node_that_pauses_for_less_than_a_failover_is_ridden_out(cluster: Cluster) -> None:
    """Half a second without any answer: no lease of two seconds is lost, no waiter fails."""
    by_node = await homes(cluster)
    victim = min(by_node, key=lambda node: node.port)
    name = by_node[victim]
    async with client(cluster) as ours, client(cluster, "others") as others:
        lease = await ours.lock(name, ttl=2.0).acquire(wait_timeout=10)
        waiting = asyncio.create_task(others.lock(name, ttl=2.0).acquire(wait_timeout=20))
        await until(lambda: waiters(ours, name, 1))
        victim.pause()
        await asyncio.sleep(topologies.NODE_TIMEOUT_S / 2)
        victim.resume()
        assert await lease.extend() > 1.5
        assert await lease.release() is True
        async with await waiting as next_lease:
            assert next_lease.fencing_token > lease.fencing_token


async def test_waiters_go_on_when_the_node_of_their_inbox_is_killed(cluster: Cluster) -> None:
    """The lock is elsewhere and stays; the messages come over another node from then on."""
    async with client(cluster) as ours, client(cluster, "others") as others:
        async with ours.lock("warm").acquire(wait_timeout=10):
            waiting = asyncio.create_task(others.lock("warm").acquire(wait_timeout=10))
            await until(lambda: hears(others))
        await (await waiting).release()
        inbox = await inbox_of(cluster, "others")
        by_node = await homes(cluster)
        names = [by_node[node] for node in by_node if node is not inbox]
        leases = [await ours.lock(name).acquire(wait_timeout=10) for name in names]
        queued = [asyncio.create_task(others.lock(name).acquire()) for name in names]
        for name in names:
            await until(functools.partial(waiters, ours, name, 1))
        assert inbox is not None
        inbox.kill()
        await until(lambda: not hears(others))
        await until(lambda: hears(others), OUTAGE_S)
        for lease, waiter in zip(leases, queued, strict=True):
            started_at = time.monotonic()
            assert await lease.release() is True
            assert await (await waiter).release() is True
            assert time.monotonic() - started_at < SOON_S


def is_beyond(things: list[int], n: int) -> bool:
    """Whether there are more than *n* of them by now."""
    return len(things) > n


async def test_workers_through_failovers_and_moves_never_overlap(cluster: Cluster) -> None:
    """Two orderly failovers and a slot moved there and back, under load: nobody loses, no overlap.

    (A failover on command hands over all that was written; one after a crash need not.)
    """
    name, slot, source, target = await a_move(cluster)
    inside = 0
    tokens: list[int] = []
    is_over = False

    async def work(locks: LockClient) -> None:
        nonlocal inside
        while not is_over:
            async with locks.lock(name, ttl=OUTAGE_S).acquire(wait_timeout=30) as lease:
                assert inside == 0, "two holders"
                inside += 1
                tokens.append(lease.fencing_token)
                await asyncio.sleep(0.002)
                inside -= 1

    async with client(cluster) as ours, client(cluster, "others") as others:
        workers = [asyncio.create_task(work(locks)) for locks in (ours, others) * 3]
        for there, back in ((source, target), (target, source)):
            done = len(tokens)
            await until(functools.partial(is_beyond, tokens, done + 20), OUTAGE_S)
            await cluster.begin_move(slot, there, back)
            await asyncio.sleep(0.1)
            await cluster.end_move(slot, there, back)
        for _ in range(2):
            done = len(tokens)
            await until(functools.partial(is_beyond, tokens, done + 20), OUTAGE_S)
            primary = await cluster.owner(slot)
            await ask(await cluster.replica(slot), "CLUSTER", "FAILOVER")
            await taken_over(cluster, slot, primary)
            await cluster.healed()
        done = len(tokens)
        await until(functools.partial(is_beyond, tokens, done + 20), OUTAGE_S)
        is_over = True
        async with asyncio.timeout(OUTAGE_S):
            await asyncio.gather(*workers)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("keys_are", ["here", "there"])
async def test_reader_in_a_slot_that_is_half_moved_is_extended_and_released(
    cluster: Cluster, keys_are: str
) -> None:
    """Its entry and its grant go over one after the other; its release needs one key only."""
    name, slot, source, target = await a_move(cluster)
    keys = _names.keys("aiodlock:", name)
    async with client(cluster) as ours, client(cluster, "others") as others:
        lease = await ours.reader(name, ttl=0.8).acquire(wait_timeout=10)
        await cluster.begin_move(slot, source, target)
        if keys_are == "there":
            moved = ("KEYS", keys.lock, keys.grants)
            await ask(source, "MIGRATE", topologies.HOST, target.port, "", 0, 5000, *moved)
        waiting = asyncio.create_task(others.writer(name, ttl=0.8).acquire(wait_timeout=20))
        held_until = time.monotonic() + 1.6
        while time.monotonic() < held_until:
            assert lease.is_held
            await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await lease.release() is True
        assert [await gone(node, name) for node in (source, target)] == [True, True]
        await cluster.end_move(slot, source, target)
        async with await waiting as next_lease:
            assert next_lease.is_held
    assert [await gone(node, name) for node in (source, target)] == [True, True]
