"""A quorum whose nodes fail: a minority costs nothing, a majority is told of in time."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from redis.asyncio import Redis

from aiodlock import (
    Lease,
    LeaseLostError,
    LockClient,
    LostReason,
    NotAllowedError,
    QuorumError,
    ServerUnreachable,
)
from aiodlock._store._ballot import Part
from aiodlock._store._node import Node
from aiodlock._store._quorum import QuorumStore
from tests import topologies, wire
from tests.holders import holding
from tests.mutants import Mutant, function_mutant, sha_of
from tests.quorums import KEY, Nodes, store_of, warm
from tests.until import until

pytestmark = pytest.mark.deep

TTL_S = 0.8
"""Of a lease that is to be extended several times while a test looks on."""

SLACK_S = 0.3
"""What a loaded machine may add to a deadline."""

STALL_S = 0.08
"""A deadline that is noticed later than this may be called a stall of the loop."""

SOON_S = 1.0
"""Far less than `request_timeout`, which is 2 s."""

Strike: TypeAlias = Callable[[Nodes, int], AbstractAsyncContextManager[None]]


@pytest.fixture
async def locks(nodes: Nodes) -> AsyncIterator[LockClient]:
    """A client on all five, through the proxies, connected to all."""
    async with nodes.open() as client:
        await warm(client)
        yield client


# What can befall a node.


@asynccontextmanager
async def stopped(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """SIGSTOP: it keeps its connections and says nothing."""
    nodes.servers[node].pause()
    yield
    nodes.servers[node].resume()


@asynccontextmanager
async def killed(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """SIGKILL: it refuses connections; it comes back empty."""
    nodes.servers[node].kill()
    yield
    nodes.servers[node].restart()


@asynccontextmanager
async def slow(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """150 ms for each request."""
    nodes.proxies[node].delay_requests(0.15, n=None)
    yield
    nodes.proxies[node].heal()


@asynccontextmanager
async def black_holed(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """Nothing gets through, neither way, until it is over."""
    nodes.proxies[node].black_hole()
    yield
    nodes.proxies[node].heal()


@asynccontextmanager
async def read_only(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """Made a replica, of a primary that is not there."""
    await topologies.ask(nodes.servers[node], "REPLICAOF", "127.0.0.1", 1)
    yield
    await topologies.ask(nodes.servers[node], "REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def full(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """No memory for anything new, and nothing may be evicted."""
    await topologies.ask(nodes.servers[node], "CONFIG", "SET", "maxmemory", 1)
    yield
    await topologies.ask(nodes.servers[node], "CONFIG", "SET", "maxmemory", 0)


@asynccontextmanager
async def new_password(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """Another one than the clients have; those who are connected have to log in again."""
    server = nodes.servers[node]
    await topologies.ask(server, "CONFIG", "SET", "requirepass", "another")
    async with Redis.from_url(server.url, password="another") as admin:
        await wire.command(admin, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        yield
        await wire.command(admin, "CONFIG", "SET", "requirepass", "")


@asynccontextmanager
async def forbidden(nodes: Nodes, node: int) -> AsyncIterator[None]:
    """Scripts are taken from its user while it runs: NOPERM."""
    await topologies.ask(nodes.servers[node], "ACL", "SETUSER", "default", "-@scripting")
    yield
    await topologies.ask(nodes.servers[node], "ACL", "SETUSER", "default", "+@all")


@dataclass(frozen=True)
class Fault:
    """One of these, and what a majority that has it means.

    Attributes:
        loses: Why a lease is lost then; None: it is not.
        refuses: What who acquires is told; None: nothing.
        is_on_the_way: Not the server is struck, but the proxy before it.
    """

    strike: Strike
    loses: LostReason | None = LostReason.UNREACHABLE
    refuses: type[Exception] | None = QuorumError
    is_on_the_way: bool = False

    def urls(self, nodes: Nodes) -> list[str]:
        """What a client is given to meet it."""
        return [proxy.url for proxy in nodes.proxies] if self.is_on_the_way else nodes.urls

    @asynccontextmanager
    async def on(self, nodes: Nodes, *which: int) -> AsyncIterator[None]:
        """These have it, and have it no more at the end."""
        strikes = [self.strike(nodes, node) for node in which]
        for strike in strikes:
            await strike.__aenter__()
        try:
            yield
        finally:
            for strike in strikes:
                await strike.__aexit__(None, None, None)


FAULTS = {
    "stopped": Fault(stopped),
    "killed": Fault(killed),
    "slow": Fault(slow, loses=None, refuses=None, is_on_the_way=True),
    "black hole": Fault(black_holed, is_on_the_way=True),
    "read-only": Fault(read_only),
    # An extension needs no memory.
    "full": Fault(full, loses=None),
    "new password": Fault(new_password, refuses=NotAllowedError),
    "forbidden": Fault(forbidden, refuses=NotAllowedError),
}

MINORITIES = {"one of five": (4,), "two of five": (0, 3)}


# A minority.


@pytest.mark.parametrize("minority", MINORITIES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_minority_that_fails_is_not_noticed_by_who_acquires_holds_or_releases(
    nodes: Nodes, fault: str, minority: str
) -> None:
    """One lease outlasts its ttl twice; others come and go; what was held before is released."""
    struck, which = FAULTS[fault], MINORITIES[minority]
    async with nodes.open(nodes=struck.urls(nodes), ttl=TTL_S) as locks:
        await warm(locks)
        before = await locks.lock("before").acquire(wait_timeout=5)
        async with locks.lock("n").acquire(wait_timeout=5) as lease:
            async with struck.on(nodes, *which):
                cycles = await cycles_until(time.monotonic() + 2 * TTL_S, locks)
                assert lease.state == "held"
                assert 0 < lease.remaining <= TTL_S
                released_at = time.monotonic()
                assert await before.release() is True
                assert time.monotonic() - released_at < SOON_S
            assert lease.is_held
        # More than a client could do that waited for the slowest, or for its time-out.
        assert cycles >= 5
    await nodes.free()


async def cycles_until(end: float, locks: LockClient) -> int:
    """How often a lock can be got, extended and given back until then."""
    for cycle in itertools.count():
        if time.monotonic() > end:
            return cycle
        async with locks.lock("m").acquire(wait_timeout=5) as lease:
            await lease.extend()
    raise AssertionError


@pytest.mark.parametrize("fault", FAULTS)
async def test_minority_that_failed_before_the_client_came_is_not_noticed(
    nodes: Nodes, fault: str
) -> None:
    """Cold connections: the first acquire takes a moment, no time-out."""
    struck = FAULTS[fault]
    async with (
        struck.on(nodes, 1, 2),
        nodes.open(nodes=struck.urls(nodes), ttl=10, request_timeout=4) as locks,
    ):
        started_at = time.monotonic()
        async with locks.lock("n").acquire(wait_timeout=8) as lease:
            assert await lease.extend() > 9
        assert time.monotonic() - started_at < 3
        for server in nodes.servers:
            server.resume()
        for proxy in nodes.proxies:
            proxy.heal()


async def test_stopped_node_costs_a_cycle_little(nodes: Nodes) -> None:
    """Loosely: 300 cycles with and without; the benchmark measures it."""
    took_s = []
    async with nodes.open(nodes=nodes.urls) as locks:
        await warm(locks)
        for is_stopped in (False, True):
            if is_stopped:
                nodes.servers[4].pause()
            started_at = time.monotonic()
            for _ in range(300):
                async with locks.lock("n").acquire(wait_timeout=5):
                    pass
            took_s.append(time.monotonic() - started_at)
        nodes.servers[4].resume()
    print(f"\n300 cycles: {took_s[0]:.2f} s, with one of five stopped {took_s[1]:.2f} s")
    assert took_s[1] < 3 * took_s[0] + 1


# A majority.


@pytest.mark.parametrize("fault", [name for name in FAULTS if FAULTS[name].loses])
async def test_majority_that_fails_loses_the_lease_at_its_deadline_at_the_latest(
    nodes: Nodes, fault: str
) -> None:
    """UNREACHABLE; at risk before; whoever acquires is told what keeps him from it."""
    struck = FAULTS[fault]
    async with nodes.open(nodes=struck.urls(nodes), ttl=TTL_S, request_timeout=0.5) as locks:
        await warm(locks)
        async with holding(locks.lock("n")) as holder:
            lease = await holder.entered()
            async with struck.on(nodes, 0, 2, 4):
                await until(lambda: lease.state in ("at_risk", "lost"))
                lost = await holder.lost()
                assert holder.late_s < SLACK_S
                # On a machine so busy that the news came late, it is the loop that stood still.
                is_stalled = holder.late_s > STALL_S and lost.reason is LostReason.LOOP_STALLED
                assert is_stalled or lost.reason is struck.loses
                assert struck.refuses is not None
                with pytest.raises(struck.refuses):
                    await locks.lock("m").acquire(wait_timeout=0.3)
        async with locks.lock("n").acquire(wait_timeout=10):
            pass
    await nodes.free()


@pytest.mark.parametrize("fault", [name for name in FAULTS if not FAULTS[name].loses])
async def test_majority_that_is_slow_or_full_keeps_the_lease(nodes: Nodes, fault: str) -> None:
    """Slow nodes do all of it; full ones extend and release, and grant nothing new."""
    struck = FAULTS[fault]
    async with nodes.open(nodes=struck.urls(nodes), ttl=1.5) as locks:
        await warm(locks)
        lease = await locks.lock("n").acquire(wait_timeout=5)
        async with struck.on(nodes, 0, 2, 4):
            await asyncio.sleep(2.0)
            assert lease.is_held
            if struck.refuses:
                with pytest.raises(struck.refuses):
                    await locks.lock("m").acquire(wait_timeout=0.3)
            else:
                async with locks.lock("m").acquire(wait_timeout=5) as other:
                    assert other.is_held
            assert await lease.release() is True


WHAT_STANDS = {"nothing": (None, LostReason.DELETED), "another's": ("x", LostReason.STOLEN)}


@pytest.mark.parametrize("stands", WHAT_STANDS)
async def test_majority_that_says_not_yours_loses_the_lease_at_once(
    nodes: Nodes, locks: LockClient, stands: str
) -> None:
    """By its next extension, long before its deadline; nothing is created, what is left removed."""
    value, reason = WHAT_STANDS[stands]
    lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
    await stands_everywhere(nodes, lease)
    await nodes.delete(KEY, 0, 1, 2)
    if value is not None:
        await nodes.put(KEY, value, 0, 1, 2)
    with pytest.raises(LeaseLostError) as lost:
        await lease.extend()
    assert lost.value.reason is reason
    assert lease.state == "lost"
    await lease.release()
    await until(lambda: has_values(nodes, [value] * 3 + [None] * 2))
    await asyncio.sleep(0.1)  # A heal would be on its way.
    assert await nodes.values() == [value] * 3 + [None] * 2


async def test_watchdog_learns_of_a_majority_that_says_not_yours(
    nodes: Nodes, locks: LockClient
) -> None:
    """The body is told with the next extension, DELETED."""
    async with holding(locks.lock("n", ttl=1.5)) as holder:
        lease = await holder.entered()
        await stands_everywhere(nodes, lease)
        await nodes.delete(KEY, 1, 2, 3)
        lost = await holder.lost(1.4)
        assert lost.reason is LostReason.DELETED
        assert holder.told_at < holder.deadline
    await nodes.free()


async def stands_everywhere(nodes: Nodes, lease: Lease) -> None:
    """Wait until each node has the lease with its fencing token: the slowest was not waited for."""
    value = f"{lease.owner_token}/{lease.fencing_token}"
    await until(lambda: has_values(nodes, [value] * len(nodes.servers)))


async def has_values(nodes: Nodes, values: list[str | None]) -> bool:
    """Whether that stands in the key of "n"."""
    return await nodes.values() == values


# Healing.


async def delete(nodes: Nodes, node: int) -> None:
    """As an operator would, or an eviction."""
    await nodes.delete(KEY, node)


async def flush(nodes: Nodes, node: int) -> None:
    """With its counter."""
    await nodes.admins[node].flushall()


async def restart(nodes: Nodes, node: int) -> None:
    """Without what was on no disk."""
    nodes.servers[node].restart()


@pytest.mark.parametrize("loss", [delete, flush, restart], ids=lambda loss: loss.__name__)
async def test_minority_that_lost_its_keys_is_given_them_again_and_counts_from_then_on(
    nodes: Nodes, loss: Callable[[Nodes, int], Awaitable[None]]
) -> None:
    """With the lease's value; then two others may be lost, with which the healed ones are three."""
    async with nodes.open(nodes=nodes.urls) as locks:
        lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
        await stands_everywhere(nodes, lease)
        for node in (0, 1):
            await loss(nodes, node)

        async def is_healed() -> bool:
            await lease.extend()
            return None not in await nodes.values()

        await until(is_healed, 5.0)
        await stands_everywhere(nodes, lease)
        await nodes.delete(KEY, 2, 3)
        assert await lease.extend() > 20
        assert await lease.release() is True
        await nodes.free()


async def test_round_without_a_majority_heals_nothing(nodes: Nodes, locks: LockClient) -> None:
    """Two lost it and one is silent: no majority extended, so that another may hold it by now."""
    lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
    await stands_everywhere(nodes, lease)
    await nodes.delete(KEY, 0, 1)
    nodes.proxies[2].black_hole()
    with pytest.raises(ServerUnreachable):
        await lease.extend()
    value = f"{lease.owner_token}/{lease.fencing_token}"
    assert await nodes.values() == [None, None, value, value, value]
    await asyncio.sleep(0.1)
    assert await nodes.values() == [None, None, value, value, value]
    assert lease.is_held
    nodes.proxies[2].heal()

    async def is_healed() -> bool:
        try:
            await lease.extend()
        except ServerUnreachable:
            return False
        return None not in await nodes.values()

    await until(is_healed, 5.0)
    assert await lease.release() is True
    await nodes.free()


async def test_round_without_a_majority_heals_where_the_rule_is_put_out(
    nodes: Nodes, locks: LockClient
) -> None:
    """Negative control: a store that heals before it knows re-creates the keys."""
    original = QuorumStore._confirm

    async def heal_first(
        self: QuorumStore, ballot: Any, ttl_ms: int, within: float, **options: Any
    ) -> Any:
        try:
            return await original(self, ballot, ttl_ms, within=within, **options)
        finally:
            self._heal(ballot, ttl_ms, within)

    lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
    await stands_everywhere(nodes, lease)
    await nodes.delete(KEY, 0, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuorumStore, "_confirm", heal_first)
        with pytest.raises(LeaseLostError):
            await lease.extend()
    await until(lambda: all_stand(nodes))
    await lease.release()
    await nodes.free()


async def all_stand(nodes: Nodes) -> bool:
    """Whether every node has something in the key of "n"."""
    return None not in await nodes.values()


async def released_while_it_is_extended(nodes: Nodes, locks: LockClient) -> list[str | None]:
    """What stands after a release that overtook the reply of an extension; one node had lost it."""
    lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
    await stands_everywhere(nodes, lease)
    await nodes.delete(KEY, 0)
    delays = [proxy.delay_replies(0.15, sha_of("confirm"), 1) for proxy in nodes.proxies]
    extending = asyncio.create_task(lease.extend())
    await until(lambda: all(delay.hits for delay in delays))
    await lease.release()
    await asyncio.wait({extending})
    assert isinstance(extending.exception(), RuntimeError | None)
    await asyncio.sleep(0.1)  # A heal would be on its way.
    return await nodes.values()


async def test_lease_that_was_released_meanwhile_is_healed_nowhere(
    nodes: Nodes, locks: LockClient
) -> None:
    """The extension was answered by a majority, and one node had lost the key: it stays so."""
    assert await released_while_it_is_extended(nodes, locks) == [None] * 5


async def test_lease_that_was_released_meanwhile_is_healed_where_the_rule_is_put_out(
    nodes: Nodes, locks: LockClient
) -> None:
    """Negative control: then a ghost stands on the node that had lost it."""
    with function_mutant(QuorumStore, "extend", " and not ballot.is_over", ""):
        assert (await released_while_it_is_extended(nodes, locks))[0] is not None
    await nodes.delete(KEY, 0)


# Late copies.


@pytest.mark.parametrize("is_cut", [False, True], ids=["one connection", "cut in between"])
async def test_acquire_that_arrives_after_its_release_leaves_no_ghost(
    nodes: Nodes, locks: LockClient, *, is_cut: bool
) -> None:
    """On one connection it is before the release; on two, the tombstone refuses it."""
    await late_acquire(nodes, locks, is_cut=is_cut)
    assert await nodes.left() == {}
    async with locks.lock("n").acquire(wait_timeout=5):
        pass
    await nodes.free()


async def test_acquire_that_arrives_after_its_release_leaves_a_ghost_without_tombstones(
    nodes: Nodes, locks: LockClient
) -> None:
    """Negative control: the same with the line of the script taken out."""
    spoilt = Mutant(
        "acquire", "if redis.call('ZSCORE', KEYS[4], '!' .. token) then", "if false then"
    )
    with spoilt.applied():
        await warm(locks)
        await late_acquire(nodes, locks, is_cut=True)
    assert await nodes.left() == {4: [KEY]}


async def late_acquire(nodes: Nodes, locks: LockClient, *, is_cut: bool) -> None:
    """One acquisition whose acquire reaches node 4 half a second late."""
    delay = nodes.proxies[4].delay_requests(0.5, sha_of("acquire"))
    lease = await locks.lock("n", ttl=30).acquire(wait_timeout=5)
    await until(lambda: delay.hits == 1)
    if is_cut:
        assert nodes.proxies[4].kill_connections() > 0
    assert await lease.release() is True
    before = await wire.calls(nodes.admins[4], "evalsha")
    # The late copy, and the release, whichever comes first.
    await until(functools.partial(has_called, nodes, 4, before + 2 - is_cut))
    await asyncio.sleep(0.6)


async def has_called(nodes: Nodes, node: int, count: int) -> bool:
    """Whether that node has done so many scripts."""
    return await wire.calls(nodes.admins[node], "evalsha") >= count


@pytest.mark.parametrize("count", [2, 3, 5])
async def test_release_whose_replies_are_lost_is_done_and_is_no_loss(
    nodes: Nodes, locks: LockClient, count: int
) -> None:
    """It is sent again; that the second copy finds nothing does not mean that it was not ours."""
    async with locks.lock("n").acquire(wait_timeout=5) as lease:
        await stands_everywhere(nodes, lease)
        lost = [wire.lose(proxy, "release") for proxy in nodes.proxies[:count]]
    assert lease.state == "released"
    await until(lambda: [fault.hits for fault in lost] == [1] * count)
    await nodes.free()


@pytest.mark.parametrize("count", [2, 5])
async def test_extension_whose_replies_are_lost_is_a_missing_vote(
    nodes: Nodes, locks: LockClient, count: int
) -> None:
    """Of a minority it is not noticed; of all it is asked for again."""
    async with locks.lock("n", ttl=30).acquire(wait_timeout=5) as lease:
        await stands_everywhere(nodes, lease)
        lost = [wire.lose(proxy, "confirm") for proxy in nodes.proxies[:count]]
        assert await lease.extend() > 25
        assert lease.state == "held"
        await until(lambda: [fault.hits for fault in lost] == [1] * count)
    await nodes.free()


async def test_acquire_whose_replies_are_lost_is_given_back_everywhere(
    nodes: Nodes, locks: LockClient
) -> None:
    """On three of five: there was no majority, and the keys are gone before the next try."""
    lost = [wire.lose(proxy, "acquire") for proxy in nodes.proxies[:3]]
    async with locks.lock("n").acquire(wait_timeout=10) as lease:
        assert [fault.hits for fault in lost] == [1] * 3
        await until(lambda: count_of(nodes, lease, 3))
    await nodes.free()


async def count_of(nodes: Nodes, lease: Lease, least: int) -> bool:
    """Whether at least so many nodes have the lease."""
    values = [value or "" for value in await nodes.values()]
    return sum(value.startswith(f"{lease.owner_token}/") for value in values) >= least


async def given_up_unsent(nodes: Nodes) -> list[str]:
    """What is on node 4, to which no connection could be made until an acquisition was over."""
    nodes.proxies[4].black_hole()
    async with nodes.open() as locks:
        async with locks.lock("n", ttl=30).acquire(wait_timeout=5):
            pass
        nodes.proxies[4].heal()
        await until(lambda: store_of(locks)._nodes[4]._router.link(KEY) is not None)
        await asyncio.sleep(0.1)
        return sorted(map(str, await nodes.admins[4].keys()))


async def test_acquire_that_waits_for_its_connection_when_it_is_given_up_is_never_sent(
    nodes: Nodes,
) -> None:
    """Not even a counter is on that node, which every grant leaves."""
    assert await given_up_unsent(nodes) == []


async def test_acquire_that_waits_for_its_connection_is_sent_where_it_is_not_given_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the node grants it then."""
    monkeypatch.setattr(Part, "give_up", lambda _: None)
    assert f"{KEY}:fence" in await given_up_unsent(nodes)


# A node that says nothing for long.


@contextmanager
def nobody_spared() -> Iterator[None]:
    """The rule put out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "is_spared", False)
        yield


async def asked_of_a_dead_node(nodes: Nodes, cycles: int) -> tuple[int, int, int]:
    """How many acquires it was sent; how many requests, and tasks, there were at most."""
    acquires = most_asked = most_tasks = 0
    async with nodes.open(request_timeout=20) as locks:
        await warm(locks)
        node = store_of(locks)._nodes[4]
        log = nodes.proxies[4].delay_replies(60, sha_of("acquire"), None)
        nodes.proxies[4].black_hole()
        for _ in range(cycles):
            async with locks.lock("n").acquire(wait_timeout=5):
                pass
            most_asked = max(most_asked, len(node._asked))
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))
        gc.collect()  # What the tracebacks of errors keep alive.
        assert len(store_of(locks)._ballots) == 0
        acquires = log.hits
        nodes.proxies[4].heal(deliver=False)
    return acquires, most_asked, most_tasks


async def test_node_that_is_dead_collects_no_requests(nodes: Nodes) -> None:
    """2000 cycles: what was asked in its first tenth of a second, and hardly anything after it."""
    acquires, most_asked, most_tasks = await asked_of_a_dead_node(nodes, 2000)
    print(f"\n2000 cycles: {acquires} acquires sent to a dead node, {most_asked} outstanding")
    assert acquires < 500
    assert most_asked < 1000
    assert most_tasks < 60


async def test_node_that_is_dead_collects_requests_where_it_is_not_spared(nodes: Nodes) -> None:
    """Negative control: each cycle asks it, and waits for its reply to the release."""
    with nobody_spared():
        acquires, most_asked, _ = await asked_of_a_dead_node(nodes, 600)
    assert acquires == 600
    assert most_asked >= 600


async def test_node_that_comes_back_is_asked_again(nodes: Nodes) -> None:
    """Soon: within the longest pause, and by one request."""
    async with nodes.open(nodes=nodes.urls) as locks:
        await warm(locks)
        nodes.servers[4].kill()
        node = store_of(locks)._nodes[4]

        async def cycle() -> bool:
            async with locks.lock("n").acquire(wait_timeout=5):
                return node.is_spared

        await until(cycle)
        nodes.servers[4].restart()

        async def is_back() -> bool:
            await cycle()
            return await nodes.admins[4].exists(f"{KEY}:fence") == 1

        await until(is_back, 5.0)
        assert not node._failures
