"""Leases on five independent servers: what a majority says is so."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import random
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis, RedisCluster

from aiodlock import (
    Backoff,
    LeaseLostError,
    LockClient,
    LockTimeout,
    LostReason,
    NameTakenError,
    NotAllowedError,
    QuorumError,
    Vote,
)
from aiodlock._store import _round
from aiodlock._store._quorum import QuorumStore
from aiodlock._store._round import Tally
from aiodlock.cli._history import out_of_order, overlaps
from aiodlock.testing import LockServer
from tests import crowd, leaks, quorums, topologies, wire
from tests.mutants import Mutant, sha_of
from tests.proxy import ChaosProxy
from tests.quorums import FENCE, KEY, Nodes, store_of, warm
from tests.until import until

ADDRESSES = [f"redis://node{number}:6379" for number in range(5)]
"""Of servers that nobody asks: for what is refused at construction."""

SOON_S = 1.0
"""Far less than `request_timeout`, which is 2 s."""


@pytest.fixture
async def locks(nodes: Nodes) -> AsyncIterator[LockClient]:
    """A client on all five, connected to all."""
    async with nodes.open() as client:
        await warm(client)
        yield client


# What it is made of.


@pytest.mark.parametrize("count", range(3))
def test_quorum_of_fewer_than_three_is_refused(count: int) -> None:
    """With two, the loss of either is the loss of both."""
    with pytest.raises(ValueError, match="at least 3 independent servers"):
        LockClient.quorum(ADDRESSES[:count])


def test_quorum_of_an_even_number_is_made_with_a_warning() -> None:
    """It is shown where the user's call is."""
    with pytest.warns(UserWarning, match="quorum of 4 bears .* one of 3") as seen:
        LockClient.quorum(ADDRESSES[:4])
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize("count", [3, 5])
def test_quorum_of_an_odd_number_is_made_without_a_warning(count: int) -> None:
    """Constructing needs no running loop either."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert repr(LockClient.quorum(ADDRESSES[:count])).startswith("<LockClient new")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("redis://a:1", "redis://a:1"),
        ("redis://localhost:1", "redis://127.0.0.1:1"),
        ("redis://localhost:1", "redis://[::1]:1"),
        ("redis://a", "redis://a:6379/0"),
        ("redis://a:1/0", "redis://a:1/1"),
        ("redis://:secret@a:1", "redis://user:secret@a:1"),
        ("redis://LOCALHOST:1", "redis://localhost:1"),
        ("unix:///tmp/s", "unix:///tmp/s?db=1"),
        ("memory://one", "memory://one"),
    ],
)
def test_quorum_with_a_server_twice_is_refused(one: str, other: str) -> None:
    """However its address is written; the message names it, without its password."""
    with pytest.raises(ValueError, match=r"each once; got .* twice") as refused:
        LockClient.quorum([one, "redis://b:2", other])
    assert "secret" not in str(refused.value)


def test_quorum_with_a_client_twice_is_refused() -> None:
    """Or with a client and the URL of the same server."""
    redis: Redis = Redis(host="a", password="secret")
    for other in (redis, "redis://a:6379"):
        with pytest.raises(ValueError, match="got a:6379 twice") as refused:
            LockClient.quorum([redis, "redis://b", other])
        assert "secret" not in str(refused.value)


def test_quorum_of_databases_in_memory_without_a_name_are_three() -> None:
    """`memory://` alone is shared with nobody."""
    assert LockClient.quorum(["memory://"] * 3)


def test_quorum_with_a_cluster_is_refused() -> None:
    """Its replicas may lose a lock, so that it is no server of its own to the others."""
    cluster = RedisCluster(host="a", require_full_coverage=False)
    with pytest.raises(ValueError, match="got a RedisCluster"):
        LockClient.quorum(["redis://b", cluster, "redis://c"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "wrong",
    [
        "redis://:secret@a,redis://b,redis://c",
        b"redis://:secret@a",
        Redis(password="secret"),
        {"redis://:secret@a", "redis://b", "redis://c"},
        None,
        5,
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_quorum_of_something_that_is_no_list_is_refused(wrong: Any) -> None:
    """Above all one URL, which is a sequence, too."""
    with pytest.raises(TypeError, match=f"in a list; got a {type(wrong).__qualname__}") as refused:
        LockClient.quorum(wrong)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("wrong", [b"redis://:secret@a", None, 6379, ("a", 6379)])
def test_quorum_with_something_that_is_no_node_is_refused(wrong: Any) -> None:
    """By its type; the message does not show it."""
    with pytest.raises(TypeError, match=type(wrong).__qualname__) as refused:
        LockClient.quorum(["redis://b", wrong, "redis://c"])
    assert "secret" not in str(refused.value)


def test_quorum_with_a_url_of_another_kind_is_refused() -> None:
    """As for `from_url`; the password is not told."""
    with pytest.raises(ValueError, match="redis://") as refused:
        LockClient.quorum(["redis://b", "http://:secret@a", "redis://c"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_quorum_with_fencing_that_is_no_bool_is_refused(wrong: Any) -> None:
    """The message says what is allowed."""
    with pytest.raises(TypeError, match="fencing must be True or False"):
        LockClient.quorum(ADDRESSES, fencing=wrong)


def test_quorum_refuses_the_options_that_every_client_refuses() -> None:
    """One of each kind."""
    for error, options in (
        (ValueError, {"ttl": 0}),
        (ValueError, {"label": "a b"}),
        (TypeError, {"prefix": None}),
        (ValueError, {"wait_timeout": -1}),
        (TypeError, {"request_timeout": None}),
    ):
        with pytest.raises(error):
            LockClient.quorum(ADDRESSES, **options)


@pytest.mark.parametrize("count", [3, 5])
async def test_quorum_with_a_server_by_two_addresses_is_refused_when_it_acquires(
    nodes: Nodes, count: int
) -> None:
    """`RuntimeError` at the first acquire and at each after it; nothing is left anywhere."""
    twin = [nodes.servers[0].url, nodes.proxies[0].url, *nodes.urls[1:]][:count]
    async with nodes.open(nodes=twin) as locks:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="same server"):
                await locks.lock("n").acquire(wait_timeout=5)
            await nodes.free()


async def test_quorum_of_the_users_clients_leaves_them_open(nodes: Nodes) -> None:
    """What the user made still works; the connections of our own are closed."""
    async with AsyncExitStack() as stack:
        theirs = [
            await stack.enter_async_context(Redis.from_url(f"{url}?client_name=theirs"))
            for url in nodes.urls[:2]
        ]
        ours = [f"{url}?client_name=ours" for url in nodes.urls[2:]]
        async with LockClient.quorum([*theirs, *ours]) as locks:
            await warm(locks)
            for admin in nodes.admins[2:]:
                assert len(await wire.connections(admin, "ours")) == 1
        for admin in nodes.admins[2:]:
            await until(functools.partial(has_connections, admin, "ours", 0))
        for redis in theirs:
            assert await redis.ping()
    await nodes.free()


async def has_connections(redis: Redis, name: str, count: int) -> bool:
    """Whether so many clients of that name are connected."""
    return len(await wire.connections(redis, name)) == count


# Acquiring.


async def test_holder_stands_on_every_node_with_one_value(nodes: Nodes, locks: LockClient) -> None:
    """Five keys with the same fencing token, each with a TTL; none when it is released."""
    async with locks.lock("n").acquire(wait_timeout=5) as lease:
        value = f"{lease.owner_token}/{lease.fencing_token}"
        await until(functools.partial(has_values, nodes, [value] * 5))
        assert min([await admin.pttl(KEY) for admin in nodes.admins]) > 20_000
        assert 20 < lease.remaining < 30
    await nodes.free()


async def has_values(nodes: Nodes, values: list[str | None]) -> bool:
    """Whether that stands in the key of "n"."""
    return await nodes.values() == values


async def test_try_on_a_busy_lock_brings_none_and_leaves_nothing(
    nodes: Nodes, locks: LockClient
) -> None:
    """At once, with one call to each node."""
    async with nodes.open() as others:
        await warm(others)
        async with locks.lock("n").acquire(wait_timeout=5) as lease:
            value = f"{lease.owner_token}/{lease.fencing_token}"
            await until(functools.partial(has_values, nodes, [value] * 5))
            started_at = time.monotonic()
            assert await others.lock("n").try_acquire() is None
            assert time.monotonic() - started_at < SOON_S
            assert await nodes.values() == [value] * 5
        await nodes.free()


async def test_wait_for_a_busy_lock_ends_in_time_and_tells_who_holds(
    nodes: Nodes, locks: LockClient
) -> None:
    """`LockTimeout`, with who stands on most of the nodes."""
    async with nodes.open() as others:
        async with locks.lock("n").acquire(wait_timeout=5) as lease:
            await nodes.put(KEY, "another", 0)
            started_at = time.monotonic()
            with pytest.raises(LockTimeout) as refused:
                await others.lock("n").acquire(wait_timeout=0.3)
            assert 0.29 < time.monotonic() - started_at < 0.3 + SOON_S
        assert refused.value.holder == lease.holder
        assert refused.value.ttl_left is not None
        assert 20 < refused.value.ttl_left <= 30
        assert refused.value.waiters == 0


async def test_wait_for_a_busy_lock_on_slow_nodes_is_a_timeout_and_not_an_outage(
    nodes: Nodes, locks: LockClient
) -> None:
    """The last try has less time than a reply takes; what the tries before were told counts."""
    async with nodes.open() as others:
        await warm(others)
        async with locks.lock("n").acquire(wait_timeout=5):
            for proxy in nodes.proxies:
                proxy.delay_requests(0.15, n=None)
            with pytest.raises(LockTimeout):
                await others.lock("n").acquire(wait_timeout=1.0)
            for proxy in nodes.proxies:
                proxy.heal()


async def test_waiter_gets_a_lock_that_is_released(nodes: Nodes, locks: LockClient) -> None:
    """By trying again; nobody queues, on no node."""
    async with nodes.open() as others:
        held = await locks.lock("n").acquire(wait_timeout=5)
        waiting = asyncio.create_task(others.lock("n").acquire(wait_timeout=20))
        await asyncio.sleep(0.3)
        assert await nodes.values(f"{KEY}:queue") == [None] * 5
        assert not waiting.done()
        holder = (await others.lock("n").inspect()).holder
        assert holder is not None
        assert await locks.lock("n").break_lock() is True
        async with await waiting as lease:
            assert lease.is_held
    assert await held.release() is False
    await nodes.free()


async def test_waiters_pauses_are_those_of_the_locks_backoff(
    nodes: Nodes, locks: LockClient
) -> None:
    """0.2 s: five tries, each perhaps with a release where no answer came in time."""
    await nodes.put(KEY, "another", *range(5))
    before = await nodes.calls()
    with pytest.raises(LockTimeout):
        await locks.lock("n", retry=Backoff(initial=0.2, maximum=0.2, jitter=0)).acquire(
            wait_timeout=0.7
        )
    tried = [after - calls for after, calls in zip(await nodes.calls(), before, strict=True)]
    assert max(tried) <= 10


async def test_minority_that_was_granted_is_given_back_before_the_next_try(
    nodes: Nodes, locks: LockClient
) -> None:
    """Another stands on three of five: the two others are free again, at once."""
    await nodes.put(KEY, "another", 0, 2, 4)
    assert await locks.lock("n").try_acquire() is None
    await until(functools.partial(has_values, nodes, ["another", None, "another", None, "another"]))


async def test_minority_of_a_waiter_is_given_back_between_two_tries(
    nodes: Nodes, locks: LockClient
) -> None:
    """While it pauses, nothing of it stands in anybody's way."""
    await nodes.put(KEY, "another", 0, 2, 4)
    retry = Backoff(initial=0.5, maximum=0.5, jitter=0)
    waiting = asyncio.create_task(locks.lock("n", retry=retry).acquire(wait_timeout=60))
    await until(lambda: locks._session is not None and locks._session._acquired > 1)
    await until(functools.partial(has_values, nodes, ["another", None, "another", None, "another"]))
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_two_who_split_the_votes_both_get_in(nodes: Nodes) -> None:
    """However often they meet: each gives its minority back, and pauses at random."""
    async with nodes.open() as ours, nodes.open() as others:
        for turn in range(20):
            got = await asyncio.gather(*(work(locks.lock(f"n{turn}")) for locks in (ours, others)))
            assert got == [True, True]
    await nodes.free()


async def work(lock: Any) -> bool:
    """Be inside for a moment."""
    async with lock.acquire(wait_timeout=20) as lease:
        await asyncio.sleep(0.002)
        return bool(lease.is_held)


async def test_nobody_overlaps_among_tasks_of_four_clients(nodes: Nodes) -> None:
    """Twenty tasks on one name: one at a time, each gets in, tokens in the order of the grants."""
    inside: list[int] = []
    tokens: list[int] = []

    async def compete(locks: LockClient, number: int) -> None:
        for _ in range(3):
            async with locks.lock("n").acquire(wait_timeout=60) as lease:
                inside.append(number)
                assert inside == [number]
                await asyncio.sleep(0.001)
                tokens.append(lease.fencing_token)
                inside.remove(number)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(nodes.open()) for _ in range(4)]
        await asyncio.gather(*(compete(clients[n % 4], n) for n in range(20)))
    assert len(tokens) == 60
    assert tokens == sorted(set(tokens))
    await nodes.free()


@pytest.mark.parametrize("tasks", [1, 10])
async def test_nobody_overlaps_among_two_processes(
    servers: list[LockServer], nodes: Nodes, tasks: int
) -> None:
    """Two contenders, then twenty, with a node that is down, and back, for a while of it."""
    order = crowd.Order(" ".join(nodes.urls), "quorum", tasks=tasks, ttl=1.0)
    workers = [await quorums.worker(replace(order, number=number)) for number in range(2)]
    try:
        for worker in workers:
            await worker.ready()
        for _ in range(2):
            await asyncio.sleep(2.0)
            servers[4].kill()
            await asyncio.sleep(0.5)
            servers[4].restart()

        def everybody_was_inside() -> bool:
            return all(len({stay.worker for stay in w.ended}) == tasks for w in workers)

        await until(everybody_was_inside, 30.0)
    finally:
        await asyncio.gather(*(worker.kill(counts_as_killed=False) for worker in workers))
    stays = [stay for worker in workers for stay in worker.ended]
    print(f"\n{len(stays)} stays of {2 * tasks} contenders in two processes")
    assert sum(worker.losses for worker in workers) == 0
    assert overlaps(stays) == []
    assert out_of_order(stays) == []


FORK = """
import asyncio, os, sys
from redis.asyncio import Redis
from aiodlock import LockClient
from tests.fork_of import hold, say

async def main(*urls):
    theirs = Redis.from_url(urls[0])
    nodes = [theirs, *urls[1:]]
    async with LockClient.quorum(nodes) as locks, locks.lock("parent").acquire() as lease:
        pid = os.fork()
        if not pid:
            try:
                say("child", f"parent's: {lease.state}, own: {asyncio.run(hold(locks))}")
            except BaseException as error:
                say("child", f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        await lease.extend()
        say("parent", f"{lease.state} until {await lease.release()}")
    await theirs.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_fork_of_a_holder_locks_by_itself_and_leaves_the_parents_alone(nodes: Nodes) -> None:
    """The child has lost the parent's lease, and locks over connections of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", FORK, *nodes.urls),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert said.decode().splitlines() == [
        "child: parent's: lost, own: held",
        "parent: held until True",
    ]
    await nodes.free()


# Outcomes that are neither got nor busy.


async def test_acquire_with_every_node_refusing_is_unreachable_at_once(
    servers: list[LockServer], nodes: Nodes
) -> None:
    """With what each node said; and for a wait, not before its end."""
    for server in servers:
        server.kill()
    async with nodes.open(nodes=nodes.urls) as locks:
        started_at = time.monotonic()
        with pytest.raises(QuorumError) as error:
            await locks.lock("n").try_acquire()
        assert time.monotonic() - started_at < SOON_S
        assert error.value.outcome == "unreachable"
        assert error.value.name == "n"
        assert set(error.value.nodes) == {f"localhost:{server.port}" for server in servers}
        assert all("Connect call failed" in said for said in error.value.nodes.values())
        assert "Connect call failed" in str(error.value)
        with pytest.raises(QuorumError):
            await locks.lock("n").acquire(wait_timeout=0.3)
        assert 0.3 < time.monotonic() - started_at < 0.3 + 2 * SOON_S
        with pytest.raises(QuorumError) as error:
            await locks.lock("n").inspect()
        assert error.value.outcome == "unreachable"
        with pytest.raises(QuorumError):
            await locks.lock("n").break_lock()


async def test_acquire_with_a_majority_refusing_is_unreachable_and_gives_the_rest_back(
    servers: list[LockServer], nodes: Nodes
) -> None:
    """Three of five are down: nothing stays on the other two."""
    for server in servers[:3]:
        server.kill()
    async with nodes.open(nodes=nodes.urls) as locks:
        with pytest.raises(QuorumError) as error:
            await locks.lock("n").try_acquire()
        assert error.value.outcome == "unreachable"
        said = list(error.value.nodes.values())
        assert ["Connect call failed" in words for words in said] == [True] * 3 + [False] * 2
        await until(functools.partial(is_absent, nodes, 3, 4))


async def is_absent(nodes: Nodes, *which: int) -> bool:
    """Whether these have no key of "n"."""
    return [await nodes.admins[node].exists(KEY) for node in which] == [0] * len(which)


async def test_acquire_that_nobody_can_decide_is_undecided(
    servers: list[LockServer], nodes: Nodes
) -> None:
    """Two granted, two held, one down: it may be anybody's, and nothing of ours stays."""
    servers[0].kill()
    async with nodes.open(nodes=nodes.urls) as locks:
        await nodes.put(KEY, "another", 1, 2)
        with pytest.raises(QuorumError) as error:
            await locks.lock("n").acquire(wait_timeout=0.5)
        assert error.value.outcome == "undecided"
        said = list(error.value.nodes.values())
        assert "Connect call failed" in said[0]
        assert said[1:] == ["another holds it"] * 2 + ["granted"] * 2
        await until(functools.partial(is_absent, nodes, 3, 4))


@pytest.mark.parametrize("count", [2, 3])
async def test_nodes_that_forbid_are_borne_as_a_minority_and_told_as_a_majority(
    nodes: Nodes, count: int
) -> None:
    """A user without EVALSHA on two, or three, of five."""
    async with AsyncExitStack() as stack:
        urls = nodes.urls
        for number in range(count):
            user = await stack.enter_async_context(
                topologies.user(nodes.servers[number], "+@all", "-@scripting", "~*", "&*")
            )
            urls[number] = user.url(nodes.servers[number])
        async with nodes.open(nodes=urls) as locks:
            if count < 3:
                for _ in range(5):
                    async with locks.lock("n").acquire(wait_timeout=5) as lease:
                        await lease.extend()
            else:
                for call in (
                    lambda: locks.lock("n").acquire(wait_timeout=5),
                    lambda: locks.lock("n").try_acquire(),
                    lambda: locks.lock("n").inspect(),
                ):
                    with pytest.raises(NotAllowedError) as error:
                        await call()
                    assert error.value.name == "n"
        await nodes.free()


async def test_minority_with_a_wrong_password_costs_nothing(nodes: Nodes) -> None:
    """Two of five: no error, no wait; the password is in no message."""
    urls = [url.replace("//", "//nobody:secret@") for url in nodes.urls[:2]] + nodes.urls[2:]
    async with nodes.open(nodes=urls) as locks:
        started_at = time.monotonic()
        for _ in range(20):
            async with locks.lock("n").acquire(wait_timeout=5) as lease:
                assert await lease.extend() > 20
        assert time.monotonic() - started_at < 2 * SOON_S
        info = await locks.lock("n").inspect()
        assert [vote.error is None for vote in info.votes] == [False] * 2 + [True] * 3
        assert "secret" not in repr(info)
    await nodes.free()


@pytest.mark.parametrize("count", [2, 3])
async def test_keys_that_are_no_locks_are_borne_as_a_minority_and_told_as_a_majority(
    nodes: Nodes, locks: LockClient, count: int
) -> None:
    """A list under the name on two, or three, of five; it stays."""
    for admin in nodes.admins[:count]:
        assert await admin.rpush(KEY, "not a lock") == 1
    if count < 3:
        async with locks.lock("n").acquire(wait_timeout=5) as lease:
            await lease.extend()
        await until(functools.partial(is_absent, nodes, 2, 3, 4))
    else:
        for call in (locks.lock("n").acquire(wait_timeout=5), locks.lock("n").try_acquire()):
            with pytest.raises(NameTakenError) as error:
                await call
            assert error.value.name == "n"
        await until(functools.partial(is_absent, nodes, 3, 4))
    for admin in nodes.admins[:count]:
        assert await admin.lrange(KEY, 0, -1) == ["not a lock"]


# Looking, and breaking.


async def test_inspection_shows_every_vote_with_a_dead_and_a_dissenting_node(
    servers: list[LockServer], nodes: Nodes
) -> None:
    """What a majority says, and who differs."""
    async with (
        nodes.open(nodes=nodes.urls) as locks,
        locks.lock("n").acquire(wait_timeout=5) as lease,
    ):
        holder = lease.holder
        await until(lambda: all_stand(nodes))
        servers[0].kill()
        await nodes.put(KEY, "another", 1)
        info = await locks.lock("n").inspect()
        assert (info.held, info.holder, info.waiters) == (True, holder, 0)
        assert info.fencing_token == lease.fencing_token
        assert info.ttl_left is not None
        assert 20 < info.ttl_left <= 30
        labels = [f"localhost:{server.port}" for server in servers]
        assert [vote.node for vote in info.votes] == labels
        assert [vote.holder for vote in info.votes] == [None, "another", holder, holder, holder]
        assert [vote.error is None for vote in info.votes] == [False, True, True, True, True]
        assert isinstance(info.votes[0], Vote)
        assert all(label in repr(info) for label in labels)


async def all_stand(nodes: Nodes) -> bool:
    """Whether every node has something in the key of "n"."""
    return None not in await nodes.values()


async def test_inspection_of_a_free_lock_says_so_whatever_a_minority_says(
    nodes: Nodes, locks: LockClient
) -> None:
    """Two of five have something there: nobody holds it."""
    await nodes.put(KEY, "another", 0, 1)
    info = await locks.lock("n").inspect()
    assert (info.held, info.holder, info.ttl_left, info.fencing_token) == (False, None, None, None)
    assert [vote.holder for vote in info.votes] == ["another"] * 2 + [None] * 3


@pytest.mark.parametrize(("endless", "left_s"), [(1, 30), (2, 30), (3, None)])
async def test_inspection_of_keys_without_ttl_says_how_long_a_majority_stands(
    nodes: Nodes, locks: LockClient, endless: int, left_s: int | None
) -> None:
    """Those without one stand the longest; the majority is over when the first of its keys is."""
    for index, admin in enumerate(nodes.admins[:3]):
        await admin.set(KEY, "another", px=None if index < endless else 30_000)
    ttl_left = (await locks.lock("n").inspect()).ttl_left
    assert ttl_left is None if left_s is None else 20 < (ttl_left or 0) <= left_s


async def test_inspection_that_nobody_can_decide_is_undecided(
    servers: list[LockServer], nodes: Nodes
) -> None:
    """One more vote would make it held, and that node is down."""
    servers[0].kill()
    async with nodes.open(nodes=nodes.urls) as locks:
        await nodes.put(KEY, "another", 1, 2)
        with pytest.raises(QuorumError) as error:
            await locks.lock("n").inspect()
        assert error.value.outcome == "undecided"


@pytest.mark.parametrize("lost", ["the replies", "the connections"])
async def test_inspection_whose_replies_are_lost_is_asked_for_again(
    nodes: Nodes, locks: LockClient, lost: str
) -> None:
    """On every node at once: it changes nothing, so that it can be repeated while there is time."""
    for proxy in nodes.proxies:
        if lost == "the replies":
            wire.lose(proxy, "inspect")
        else:
            assert proxy.kill_connections() > 0
    assert (await locks.lock("n").inspect()).held is False


async def test_inspection_after_a_node_was_healed_tells_the_leases_fencing_token(
    nodes: Nodes, locks: LockClient
) -> None:
    """Its counter is far ahead of what the quorum agreed on; the grant can still be broken."""
    lease = await locks.lock("n").acquire(wait_timeout=5)
    await until(lambda: all_stand(nodes))
    await nodes.delete(KEY, 0)
    await nodes.put(FENCE, 8 * 10**15, 0)
    await lease.extend()
    await until(lambda: all_stand(nodes))
    assert (await locks.lock("n").inspect()).fencing_token == lease.fencing_token
    assert await locks.lock("n").break_lock(fencing_token=lease.fencing_token) is True
    with pytest.raises(LeaseLostError):
        await lease.extend()
    assert await lease.release() is False


async def test_break_of_a_lock_frees_it_everywhere_and_the_holder_learns(
    nodes: Nodes, locks: LockClient
) -> None:
    """Only the grant that was meant; DELETED at its next extension."""
    async with nodes.open() as operator:
        lease = await locks.lock("n").acquire(wait_timeout=5)
        assert await operator.lock("n").break_lock(fencing_token=lease.fencing_token - 1) is False
        assert await operator.lock("n").break_lock(fencing_token=lease.fencing_token) is True
        await nodes.free()
        assert await operator.lock("n").break_lock() is False
        with pytest.raises(LeaseLostError) as lost:
            await lease.extend()
        assert lost.value.reason is LostReason.DELETED
        assert await lease.release() is False


async def test_break_of_a_foreign_lock_frees_it_everywhere(nodes: Nodes, locks: LockClient) -> None:
    """What another library wrote to most of the nodes."""
    await nodes.put(KEY, "another", 0, 1, 2)
    assert await locks.lock("n").break_lock() is True
    await nodes.free()


# Fencing.

DRIFTS = [0, 5 * 10**14, 10**15, 2 * 10**15, 3 * 10**15]
"""How far the counters of the nodes are ahead of the clock, in microseconds: years."""

MAJORITIES = list(itertools.combinations(range(5), 3))


async def drift(nodes: Nodes) -> None:
    """As if each node's clock went differently, or had lost its counter."""
    now_us = time.time_ns() // 1000
    for node, ahead in enumerate(DRIFTS):
        await nodes.put(FENCE, now_us + ahead, node)


async def grant_on(nodes: Nodes, locks: LockClient, majority: tuple[int, ...]) -> int:
    """The fencing token of a grant that only *majority* could give."""
    others = [node for node in range(5) if node not in majority]
    await nodes.put(KEY, "another", *others)
    async with locks.lock("n").acquire(wait_timeout=10) as lease:
        token = lease.fencing_token
    await until(functools.partial(is_absent, nodes, *majority))
    await nodes.delete(KEY, *others)
    return token


async def test_fencing_tokens_grow_over_grants_of_every_two_majorities(
    nodes: Nodes, locks: LockClient
) -> None:
    """From each majority of five to each other one, with counters that are years apart."""
    for first, second in itertools.permutations(MAJORITIES, 2):
        await nodes.delete_fences()
        await drift(nodes)
        earlier = await grant_on(nodes, locks, first)
        assert earlier < await grant_on(nodes, locks, second), (first, second)


async def test_fencing_tokens_grow_while_minorities_lose_their_counters(
    nodes: Nodes, locks: LockClient
) -> None:
    """Forty grants on random majorities; before each, one node outside the last one is emptied.

    Such a node did not know the last token, so that nothing is lost with it.
    """
    chance = random.Random(7)
    await drift(nodes)
    last, majority = 0, MAJORITIES[0]
    for turn in range(40):
        emptied = chance.choice([node for node in range(5) if node not in majority])
        await nodes.admins[emptied].flushall()
        majority = chance.choice(MAJORITIES)
        token = await grant_on(nodes, locks, majority)
        assert token > last, turn
        last = token


SECOND_ROUNDS_SPOILT = {
    "the counter is not written back": Mutant(
        "confirm", "redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)", "redis.call('PING')"
    ),
    "a larger counter is overwritten": Mutant(
        "confirm",
        "if (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) < tonumber(ARGV[3]) then",
        "if false then",
    ),
}


@pytest.mark.parametrize("spoilt", SECOND_ROUNDS_SPOILT)
async def test_fencing_tokens_go_back_without_the_second_round(nodes: Nodes, spoilt: str) -> None:
    """The counter-example: nodes 2, 3, 4 give what node 4 knows, then 0, 1, 2 know nothing of it.

    The largest counter of a majority is not enough, for the next majority may not have it.
    """
    with SECOND_ROUNDS_SPOILT[spoilt].applied():
        async with nodes.open() as locks:
            await warm(locks)
            await drift(nodes)
            first = await grant_on(nodes, locks, (2, 3, 4))
            second = await grant_on(nodes, locks, (0, 1, 2))
    assert second < first


async def test_fencing_token_stands_on_a_majority_when_the_body_begins(
    nodes: Nodes, locks: LockClient
) -> None:
    """In the lock and in the counter; on the others a moment later."""
    await drift(nodes)
    async with locks.lock("n").acquire(wait_timeout=5) as lease:
        counters = [int(value or 0) for value in await nodes.values(FENCE)]
        assert sum(counter >= lease.fencing_token for counter in counters) >= 3
        value = f"{lease.owner_token}/{lease.fencing_token}"
        assert (await nodes.values()).count(value) >= 3
        await until(functools.partial(has_values, nodes, [value] * 5))


async def test_quorum_without_fencing_has_no_tokens_and_one_round(nodes: Nodes) -> None:
    """Two calls to each node for a cycle in place of three; the rest is the same."""
    cost = {}
    for fencing in (False, True):
        async with nodes.open(fencing=fencing) as locks:
            await warm(locks)
            before = await nodes.calls()
            for _ in range(10):
                lease = await locks.lock("n").acquire(wait_timeout=5)
                if not fencing:
                    with pytest.raises(RuntimeError, match="fencing"):
                        _ = lease.fencing_token
                    assert "fencing_token" not in repr(lease)
                assert await lease.release() is True
            await nodes.free()
            after = await nodes.calls()
        cost[fencing] = [b - a for a, b in zip(before, after, strict=True)]
    assert cost == {False: [20] * 5, True: [30] * 5}


async def test_quorum_without_fencing_extends_is_shown_and_is_lost_like_another(
    nodes: Nodes,
) -> None:
    """`fencing_token` is None where it is told."""
    async with nodes.open(fencing=False) as locks:
        lease = await locks.lock("n").acquire(wait_timeout=5)
        assert await lease.extend(60) > 50
        info = await locks.lock("n").inspect()
        assert (info.held, info.fencing_token) == (True, None)
        assert info.holder == lease.holder
        await until(lambda: all_stand(nodes))
        await nodes.delete(KEY, *range(5))
        with pytest.raises(LeaseLostError) as lost:
            await lease.extend()
        assert (lost.value.reason, lost.value.fencing_token) == (LostReason.DELETED, None)
        assert await lease.release() is False
        with pytest.raises(LeaseLostError):  # Its client broke it, but it did not know.
            async with locks.lock("n").acquire(wait_timeout=5):
                assert await locks.lock("n").break_lock() is True


# Odd worlds.


async def test_loop_that_stood_still_takes_the_replies_that_lie_there(nodes: Nodes) -> None:
    """Longer than a request may take: as on one server, it was the loop and not the nodes."""
    async with nodes.open(nodes=nodes.urls, request_timeout=0.3) as locks:
        await warm(locks)
        acquiring = asyncio.create_task(locks.lock("n").try_acquire())
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - the loop stands still, on purpose
        lease = await acquiring
        assert lease is not None
        releasing = asyncio.create_task(lease.release())
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - again
        assert await releasing is True
    await nodes.free()


async def test_clients_that_decode_and_speak_differently_make_one_quorum(nodes: Nodes) -> None:
    """RESP 2 and 3, str and bytes, two encodings, a URL: values are compared as the same text."""
    options: list[dict[str, Any]] = [
        {"decode_responses": True, "protocol": 3},
        {"protocol": 2, "encoding": "latin-1"},
        {"protocol": 3},
        {"decode_responses": True, "protocol": 2},
    ]
    name = "ключ é"
    async with AsyncExitStack() as stack:
        theirs = [
            await stack.enter_async_context(Redis.from_url(url, **each))
            for url, each in zip(nodes.urls, options, strict=False)
        ]
        locks = await stack.enter_async_context(LockClient.quorum([*theirs, nodes.urls[4]]))
        async with locks.lock(name).acquire(wait_timeout=5) as lease:
            assert await lease.extend(60) > 50
            assert await locks.lock(name).try_acquire() is None
            info = await locks.lock(name).inspect()
            assert (info.fencing_token, info.holder) == (
                lease.fencing_token,
                lease.holder,
            )
            assert len({vote.holder for vote in info.votes}) == 1
        await nodes.free()


async def test_majority_of_one_less_would_let_two_hold_at_once(nodes: Nodes) -> None:
    """Negative control: what counts as a majority is what keeps a second holder out."""

    class Careless(Tally):
        def __init__(self, nodes: int) -> None:
            super().__init__(nodes)
            self.majority = nodes // 2
            self.blocking = nodes - self.majority + 1

    async with nodes.open() as ours, nodes.open() as others:
        await nodes.put(KEY, "another", 2, 3, 4)
        assert await ours.lock("n").try_acquire() is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_round, "Tally", Careless)
            first = await ours.lock("n").acquire(wait_timeout=5)
            await nodes.delete(KEY, 2, 3, 4)
            second = await others.lock("n").acquire(wait_timeout=5)
            assert (first.is_held, second.is_held) == (True, True)
            await first.release()
            await second.release()
    await nodes.free()


# The end of a client, and another beginning.


async def test_close_waits_for_the_nodes_that_are_slow(nodes: Nodes) -> None:
    """What they are to do is done when it returns: no key, task, timer or connection is left."""
    tasks, timers = leaks.tasks(), len(leaks.timers())
    async with nodes.open() as locks:
        await warm(locks)
        for proxy in nodes.proxies[:2]:
            proxy.delay_requests(0.06, n=None)
        for _ in range(5):
            async with locks.lock("n").acquire(wait_timeout=5):
                pass
        lease = await locks.lock("n").acquire(wait_timeout=5)
        await locks.aclose()
        assert lease.state == "released"
        assert await nodes.left() == {}
    assert leaks.tasks() - tasks == {} or not await leaks.settled(tasks)
    assert len(leaks.timers()) <= timers + 2 * len(nodes.proxies)
    for proxy in nodes.proxies:
        await until(functools.partial(is_unused, proxy))


def is_unused(proxy: ChaosProxy) -> bool:
    """Whether nobody is connected to it."""
    return proxy.open_connections == 0


async def test_close_with_a_stopped_node_leaves_no_task(nodes: Nodes) -> None:
    """It is waited for no longer than a request may take; nothing of ours runs afterwards."""
    async with nodes.open(nodes=nodes.urls, request_timeout=0.5) as locks:
        await warm(locks)
        nodes.servers[4].pause()
        for _ in range(5):
            async with locks.lock("n").acquire(wait_timeout=5):
                pass
        started_at = time.monotonic()
        await locks.aclose()
        assert time.monotonic() - started_at < 0.5 + SOON_S
        left = [task.get_name() for task in asyncio.all_tasks()]
        assert [name for name in left if name.startswith("aiodlock")] == []


async def test_close_keeps_the_loop_of_ballots_empty(nodes: Nodes, locks: LockClient) -> None:
    """Whatever became of the leases: released, lost, not got, thrown away."""
    store = store_of(locks)
    held = await locks.lock("n").acquire(wait_timeout=5)
    assert await locks.lock("n").try_acquire() is None
    with pytest.raises(LockTimeout):
        await locks.lock("n").acquire(wait_timeout=0.1)
    waiting = asyncio.create_task(locks.lock("n").acquire())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait({waiting})
    await until(lambda: ballots_of(store) == 1)
    await held.release()
    lost = await locks.lock("n", ttl=0.1, auto_extend=False).acquire(wait_timeout=5)
    assert await lost.wait_lost() is LostReason.EXPIRED
    await lost.release()
    del held, lost, waiting  # A ballot lives as long as its acquisition.
    await until(lambda: ballots_of(store) == 0)


def ballots_of(store: QuorumStore) -> int:
    """How many are kept alive, by more than the traceback of an error that nobody has."""
    gc.collect()
    return len(store._ballots)


async def test_release_after_one_that_nobody_answered_is_no_loss(nodes: Nodes) -> None:
    """The first one did it, as the second one finds out."""
    async with nodes.open(request_timeout=0.3) as locks:
        await warm(locks)
        async with locks.lock("n").acquire(wait_timeout=5) as lease:
            lost = [proxy.drop_replies(1, sha_of("release")) for proxy in nodes.proxies]
            with pytest.raises(QuorumError):
                await lease.release()
            assert all(fault.hits for fault in lost)
            for proxy in nodes.proxies:
                proxy.heal(deliver=False)
    await nodes.free()


async def test_client_that_was_closed_can_be_entered_again(nodes: Nodes) -> None:
    """In the same loop."""
    locks = LockClient.quorum(nodes.urls)
    for _ in range(3):
        async with locks, locks.lock("n").acquire(wait_timeout=5) as lease:
            assert lease.is_held
        with pytest.raises(RuntimeError, match="closed"):
            await locks.lock("n").acquire()
    await nodes.free()


def test_client_that_was_closed_can_be_entered_in_another_loop(servers: list[LockServer]) -> None:
    """And says so where it was not closed."""
    quorums.make_well(servers)
    locks = LockClient.quorum([server.url for server in servers])

    async def use() -> None:
        async with locks, locks.lock("n").acquire(wait_timeout=5) as lease:
            assert lease.is_held

    for _ in range(2):
        asyncio.run(use())


async def test_body_in_a_closing_client_is_told_and_released(
    nodes: Nodes, locks: LockClient
) -> None:
    """CLOSED; its keys are gone from every node when `aclose` returns."""
    entered = asyncio.Event()

    async def body() -> None:
        async with locks.lock("n").acquire(wait_timeout=5):
            entered.set()
            await asyncio.sleep(10)

    task = asyncio.create_task(body())
    await entered.wait()
    await locks.aclose()
    assert await nodes.left() == {}
    with pytest.raises(LeaseLostError) as lost:
        await task
    assert lost.value.reason is LostReason.CLOSED


async def test_waiter_in_a_closing_client_is_told(nodes: Nodes, locks: LockClient) -> None:
    """`RuntimeError`, at once; nothing of it is left."""
    await nodes.put(KEY, "another", *range(5))
    waiting = asyncio.create_task(locks.lock("n", retry=Backoff(initial=5, maximum=5)).acquire())
    await asyncio.sleep(0.1)
    started_at = time.monotonic()
    await locks.aclose()
    assert time.monotonic() - started_at < SOON_S
    with pytest.raises(RuntimeError, match="closed"):
        await waiting
    assert await nodes.values() == ["another"] * 5
