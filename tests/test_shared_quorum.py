"""Readers and a writer on independent servers: what a majority of them knows of each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import AsyncIterator

import pytest

from aiodlock import LockClient, QuorumError
from aiodlock._store._api import Holding
from aiodlock._store._shares import agreed
from tests.by_hand import ONE, OTHER, THIRD
from tests.mutants import Mutant
from tests.quorums import KEY, Nodes, store_of
from tests.test_quorum import MAJORITIES, drift, is_absent
from tests.until import until

pytestmark = pytest.mark.deep

ALL = range(5)
GRANTS = f"{KEY}:grants"


@pytest.fixture
async def locks(nodes: Nodes) -> AsyncIterator[LockClient]:
    """A client on all five, through the proxies, connected to all."""
    async with nodes.open() as client:
        async with client.writer("warm").acquire(wait_timeout=10) as lease:
            await lease.extend()
        await until(lambda: all(not node._asked for node in store_of(client)._nodes), 10.0)
        yield client


async def stands(nodes: Nodes, *, reads: bool) -> bool:
    """Whether every node has the one writer, and knows whether it only reads."""
    marks = [True, False] if reads else [False]
    found = [await admin.zrange(GRANTS, 0, -1) for admin in nodes.admins]
    return [[str(m).startswith("+") for m in members] for members in found] == [marks] * 5


async def write_on(nodes: Nodes, locks: LockClient, majority: tuple[int, ...]) -> int:
    """The fencing token of a writer whom only *majority* could let in."""
    others = [node for node in ALL if node not in majority]
    await nodes.put(KEY, "another", *others)
    async with locks.writer("n").acquire(wait_timeout=10) as lease:
        token = lease.fencing_token
    await until(functools.partial(is_absent, nodes, *majority))
    await nodes.delete(KEY, *others)
    return token


async def test_writers_numbers_grow_over_grants_of_every_two_majorities(
    nodes: Nodes, locks: LockClient
) -> None:
    """From each majority of five to each other one, with counters that are years apart."""
    for first, second in itertools.permutations(MAJORITIES, 2):
        await nodes.delete_fences()
        await drift(nodes)
        earlier = await write_on(nodes, locks, first)
        assert earlier < await write_on(nodes, locks, second), (first, second)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("redis.call('SET', KEYS[2], ARGV[3], 'EX', 86400)", "redis.call('PING')"),
        ("(tonumber(redis.call('GET', KEYS[2]) or 0) or 0) < tonumber(ARGV[3])", "false"),
    ],
)
async def test_writers_numbers_go_back_without_the_second_round(
    nodes: Nodes, old: str, new: str
) -> None:
    """The negative control."""
    with Mutant("share_confirm", old, new).applied():
        async with nodes.open() as locks:
            await drift(nodes)
            first = await write_on(nodes, locks, (2, 3, 4))
            assert await write_on(nodes, locks, (0, 1, 2)) < first


async def test_writers_number_stands_on_every_node_a_moment_later(
    nodes: Nodes, locks: LockClient
) -> None:
    """That of the quorum, not the node's own: whoever looks at any node sees the same."""
    await drift(nodes)
    async with locks.writer("n").acquire(wait_timeout=5) as lease:

        async def have_it() -> bool:
            found = [await admin.zscore(GRANTS, lease.owner_token) for admin in nodes.admins]
            return found == [lease.fencing_token] * 5

        await until(have_it)
        assert await lease.extend() > 20
    await nodes.free()


async def test_writer_that_reads_is_healed_as_a_reader(nodes: Nodes, locks: LockClient) -> None:
    """Two nodes lost it and have it again: then a majority with both of them lets a reader in."""
    async with locks.writer("n").acquire(wait_timeout=5) as lease:
        await until(lambda: stands(nodes, reads=False))
        await lease.downgrade()
        await until(lambda: stands(nodes, reads=True))
        for node in (0, 1):
            await nodes.admins[node].flushall()

        async def is_healed() -> bool:
            await lease.extend()
            return await stands(nodes, reads=True)

        await until(is_healed, 5.0)
        for node in (3, 4):
            await nodes.admins[node].delete(KEY)
            await nodes.put(KEY, "another", node)
        async with locks.reader("n").acquire(wait_timeout=5) as reader:
            assert reader.fencing_token > lease.fencing_token
            assert await lease.extend() > 20
        await nodes.delete(KEY, 3, 4)
    await until(functools.partial(is_absent, nodes, *ALL))


async def test_downgrade_without_a_majority_raises_and_can_be_repeated(
    nodes: Nodes, locks: LockClient
) -> None:
    """Until it is done, no reader is in; the lease goes on."""
    async with (
        nodes.open(nodes=nodes.urls, request_timeout=1.0) as others,
        locks.writer("n").acquire(wait_timeout=5) as lease,
    ):
        await until(lambda: stands(nodes, reads=False))
        for proxy in nodes.proxies[:3]:
            proxy.black_hole()
        with pytest.raises(QuorumError, match="downgrade"):
            await lease.downgrade()
        assert lease.is_held
        assert await others.reader("n").try_acquire() is None
        for proxy in nodes.proxies[:3]:
            proxy.heal()
        await lease.extend()
        await lease.downgrade()
        async with others.reader("n").acquire(wait_timeout=5):
            assert lease.is_held
    await nodes.free()


# Who is shown as a holder.

R, W, S = f"{ONE}:1r", f"{OTHER}:1w", f"{THIRD}:1r"


def holding(token: str, left_ms: int, fencing_token: int, *, reads: bool = True) -> Holding:
    """What one node says of one holder."""
    return Holding(
        f"{token}/{fencing_token}", left_ms, fencing_token, "reading" if reads else "writing"
    )


def shown(*parts: list[Holding], fencing: bool = True) -> list[Holding]:
    """Who holds on two of three nodes."""
    return agreed(parts, majority=2, fencing=fencing)


def test_holder_on_a_minority_is_not_shown() -> None:
    """It was let in by one node, and will be told that it is not."""
    assert shown([holding(R, 9, 1), holding(S, 5, 2)], [holding(R, 9, 1)], []) == [holding(R, 9, 1)]
    assert shown([holding(R, 9, 1)], [holding(S, 9, 1)], []) == []


def test_holder_is_shown_with_the_time_after_which_no_majority_has_it() -> None:
    """Of three nodes the second to end; the first to end of all holders comes first."""
    nodes = ([holding(R, left, 1), holding(S, 8, 2)] for left in (9, 3, 7))
    assert shown(*nodes) == [holding(R, 7, 1), holding(S, 8, 2)]


def test_holder_is_shown_with_the_largest_number_that_a_node_gave_it() -> None:
    """A node that was healed may have one of its own still; without fencing there is none."""
    nodes = [[holding(R, 9, 5)], [holding(R, 9, 7)], [holding(R, 9, 6)]]
    assert shown(*nodes) == [holding(R, 9, 7)]
    assert [holder.fencing_token for holder in shown(*nodes, fencing=False)] == [None]


def test_writer_is_shown_as_reading_where_one_node_knows_of_it() -> None:
    """It has said so, and goes on telling the others."""
    nodes = [[holding(W, 9, 5, reads=False)], [holding(W, 9, 5)], []]
    assert [holder.access for holder in shown(*nodes)] == ["reading"]
    nodes = [[holding(W, 9, 5, reads=False)]] * 2
    assert [holder.access for holder in shown(*nodes)] == ["writing"]
