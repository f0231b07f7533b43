"""`aiodlock ls`, `show`, `wait` and `break` on a cluster, over a quorum, and in a terminal."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
import pytest_asyncio

from aiodlock import LockClient
from aiodlock.cli._look import Grant, Look
from aiodlock.cli._standing import Standing, Vote, decided
from aiodlock.testing import LockServer
from tests import operators, topologies
from tests.by_hand import A, B
from tests.operators import PROGRAM, Operator, Terminal
from tests.quorums import KEY, Nodes
from tests.runs import Run
from tests.test_operating import names_of
from tests.topologies import Cluster

pytestmark = pytest.mark.deep

# A cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """Three primaries."""
    async with topologies.cluster() as made:
        yield made


@pytest.fixture
def anyone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operator]:
    """Calls commands that say themselves which servers they are about."""
    with operators.as_before():
        yield Operator(capsys, monkeypatch)


async def test_operator_of_a_cluster_sees_and_breaks_what_any_primary_has(
    cluster: Cluster, anyone: Operator
) -> None:
    """The URL of one node is enough."""
    owners = await cluster.owners()
    names = sorted(cluster.name_on(node, owners) for node in cluster.nodes)
    url = ("--url", cluster.nodes[0].url)
    async with aclosing(cluster.client()) as redis, LockClient(redis) as locks:
        leases = [await locks.lock(name, auto_extend=False).acquire() for name in names]
        assert names_of((await anyone("ls", "--json", *url)).json) == names
        for lease in leases:
            told = await anyone("show", lease.name, "--json", *url)
            assert told.json["fencing_token"] == lease.fencing_token
            assert (await anyone("break", lease.name, "--yes", *url)).code == 0
            assert (await anyone("wait", lease.name, *url)).code == 0
            await lease.release()


async def test_run_on_a_cluster_locks_a_name_wherever_it_is(cluster: Cluster) -> None:
    """By the URL of any node, as the other commands do; nothing stays."""
    owners = await cluster.owners()
    for node in cluster.nodes:
        name = cluster.name_on(node, owners)
        key = f"aiodlock:{{{name}}}"
        command = ("sh", "-c", "echo $AIODLOCK_FENCING_TOKEN; read _ || sleep 600")
        async with Run(cluster.nodes[0].url, "-n", name, "--", *command) as running:
            fencing_token = await running.line()
            assert str(await topologies.ask(node, "GET", key)).endswith(f"/{fencing_token}")
            running.process.terminate()
            await running.ended()
            assert await topologies.ask(node, "EXISTS", key) == 0


async def test_ls_on_a_cluster_with_a_silent_primary_tells_what_the_others_have(
    cluster: Cluster, anyone: Operator
) -> None:
    """And which of them it did not hear."""
    owners = await cluster.owners()
    first, silent, _ = cluster.nodes
    name, lost = cluster.name_on(first, owners), cluster.name_on(silent, owners)
    for node, each in ((first, name), (silent, lost)):
        await topologies.ask(node, "SET", f"aiodlock:{{{each}}}", "x", "PX", 60_000)
    silent.pause()
    try:
        told = await anyone("ls", "--url", first.url)
    finally:
        silent.resume()
        await cluster.healed()
    assert told.code == 0
    assert name in told.out
    assert f"127.0.0.1:{silent.port} does not answer" in told.err


# A quorum


@pytest.fixture
async def operator(
    nodes: Nodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Operator]:
    """Calls commands about the first three of the servers."""
    with operators.as_before():
        yield Operator(capsys, monkeypatch, *nodes.urls[:3])


async def test_operator_of_a_quorum_sees_each_name_once_and_breaks_it_everywhere(
    nodes: Nodes, operator: Operator
) -> None:
    """What a majority has, with what each node says."""
    async with LockClient.quorum(nodes.urls[:3]) as locks:
        lease = await locks.lock("n", auto_extend=False).acquire(wait_timeout=5)
        (only,) = (await operator("ls", "--json")).json["names"]
        assert only["holder"] == lease.holder
        assert only["fencing_token"] == lease.fencing_token
        told, text = await operator("show", "n", "--json"), await operator("show", "n")
        assert [bool(node["holders"]) for node in told.json["nodes"]] == [True] * 3
        assert all(f"127.0.0.1:{server.port}" in text.out for server in nodes.servers[:3])
        assert lease.owner_token not in told.out + text.out
        assert (await operator("break", "n", "--yes")).code == 0
        assert (await nodes.values())[:3] == [None] * 3
        await lease.release()


async def test_operator_of_a_quorum_with_a_dead_minority_sees_the_rest(
    nodes: Nodes, operator: Operator
) -> None:
    """What a majority has; and who is silent."""
    await nodes.put(KEY, f"{A}/1795992912345678", 0, 1)
    nodes.servers[2].kill()
    listed, shown = await operator("ls"), await operator("show", "n", "--json")
    assert "1795992912345678" in listed.out
    assert f"127.0.0.1:{nodes.servers[2].port} does not answer" in listed.err
    assert shown.json["held"] is True
    assert [node["trouble"] is None for node in shown.json["nodes"]] == [True, True, False]


async def test_operator_of_a_quorum_that_cannot_decide_is_told_so(
    nodes: Nodes, operator: Operator
) -> None:
    """Who is silent may make a majority of what one of the others has: it is not free."""
    await nodes.put(KEY, f"{A}/1795992912345678", 0)
    nodes.servers[2].kill()
    assert (await operator("show", "n", "--json")).json["held"] is None
    assert (await operator("wait", "n", "--wait", "0")).code == 75
    assert "unknown" in (await operator("ls")).out
    assert (await operator("break", "n", "--yes")).code == 3


async def test_operator_of_a_quorum_without_a_majority_gets_69(
    nodes: Nodes, operator: Operator
) -> None:
    """With what each node said."""
    for server in nodes.servers[1:3]:
        server.kill()
    for argv in (["ls"], ["show", "n"], ["wait", "n", "--wait", "0"], ["break", "n", "--yes"]):
        told = await operator(*argv)
        assert told.code == 69
        assert "too few nodes" in told.err
        assert told.err.count(f"redis://127.0.0.1:{nodes.servers[2].port}") == 1


def look(*grants: Grant, not_a_lock: str | None = None) -> Look:
    """What one node has."""
    return Look(0, not_a_lock, grants, len(grants), (), 0, None)


def grant(token: str, number: int, ttl_left: float = 9.0) -> Grant:
    """A plain grant."""
    return Grant(f"{token}/{number}", token.rpartition(":")[0], ttl_left, number)


def votes_of(*looks: Look | None) -> list[Vote]:
    """A vote of each."""
    return [Vote(str(index), each) for index, each in enumerate(looks)]


def stand(*looks: Look | None) -> Standing:
    """What these nodes make together."""
    return decided("n", KEY, votes_of(*looks))


def test_decided_by_a_majority_lasts_as_long_as_a_majority_of_it() -> None:
    """Two of three are left until the second last of them ends."""
    found = stand(look(grant(A, 7, 9.0)), look(grant(A, 7, 5.0)), look(grant(A, 7, 1.0)))
    assert [(each.ttl_left, each.fencing_token) for each in found.look.grants] == [(5.0, 7)]


def test_decided_by_nodes_with_numbers_of_their_own_has_no_fencing_token() -> None:
    """A quorum without fencing: the numbers mean nothing."""
    found = stand(look(grant(A, 7)), look(grant(A, 8)), look(grant(A, 9)))
    assert [each.fencing_token for each in found.look.grants] == [None]


def test_decided_by_no_majority_is_nobodys() -> None:
    """Three nodes, two owners and a free one."""
    found = stand(look(grant(A, 7)), look(grant(B, 7)), look())
    assert (found.look.grants, found.is_undecided, found.is_idle) == ((), False, False)


def test_decided_with_a_silent_node_that_matters_is_undecided() -> None:
    """It could have what one of the others has."""
    assert stand(look(grant(A, 7)), look(), None).is_undecided
    assert not stand(look(), look(), None).is_undecided
    assert not stand(look(grant(A, 7)), look(grant(A, 7)), None).is_undecided


def test_decided_of_what_is_no_lock_needs_a_majority() -> None:
    """One node's foreign key is no reason to stop."""
    assert stand(look(not_a_lock="hash"), look(), look()).look.not_a_lock is None
    assert stand(look(not_a_lock="hash"), look(not_a_lock="hash"), look()).look.not_a_lock == "hash"


# In processes of their own


async def test_ls_watching_without_a_terminal_tells_block_after_block(
    server: LockServer, locks: LockClient
) -> None:
    """Without an escape sequence; SIGTERM ends it well."""
    async with locks.lock("a"):
        lines = await asyncio.to_thread(_watched, server.url, "--watch", "0.1")
    heads = [line for line in lines if server.url in line]
    assert len(heads) >= 3
    assert "\x1b" not in "".join(lines)


async def test_ls_watching_with_json_tells_a_line_each_time(
    server: LockServer, locks: LockClient
) -> None:
    """Each is a document."""
    async with locks.lock("a"):
        lines = await asyncio.to_thread(_watched, server.url, "--watch", "0.1", "--json")
    rounds = [json.loads(line) for line in lines]
    assert len(rounds) >= 3
    assert all(names_of(each) == ["a"] for each in rounds)
    assert all(first["at"] < second["at"] for first, second in itertools.pairwise(rounds))


def _watched(url: str, *options: str, lines: int = 20) -> list[str]:
    """So many lines of a watching `ls`, which is then told to end."""
    environment = os.environ | {"AIODLOCK_URL": url}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*PROGRAM, "ls", *options], stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        found = [process.stdout.readline() for _ in range(lines)]
        process.terminate()
        _, complaint = process.communicate(timeout=operators.LIMIT_S)
    assert (process.returncode, complaint) == (0, "")
    return found


async def test_ls_watching_in_a_terminal_draws_over_what_it_drew(
    server: LockServer, locks: LockClient
) -> None:
    """No wider and no higher than the terminal; Ctrl-C ends it well."""
    async with locks.all(*(f"a rather long name {number}" for number in range(9))):
        await asyncio.to_thread(_watch_in_a_terminal, server.url)


def _watch_in_a_terminal(url: str) -> None:
    with Terminal(url, "ls", "--watch", "0.1", columns=50, rows=8) as terminal:
        seen = terminal.until(lambda seen: seen.count("\x1b[H") >= 3)
        terminal.type("\x03")
        assert terminal.ended() == 0
    first = seen.split("\x1b[H")[1]
    lines = first.replace("\x1b[K", "").replace("\x1b[J", "").split("\r\n")
    assert seen.startswith("\x1b[2J\x1b[H")
    assert len(lines) == 8
    assert lines[-1] == ""
    assert max(map(len, lines)) < 50
    assert "and 6 more" in lines[-2]


async def test_ls_watching_in_a_usual_terminal_shows_every_number_whole(
    server: LockServer, locks: LockClient
) -> None:
    """80 columns, however long a name is."""
    async with locks.lock("a") as one, locks.lock("n" * 400) as other:
        with Terminal(server.url, "ls", "--watch", "0.1") as terminal:
            seen = await asyncio.to_thread(terminal.until, lambda seen: seen.count("\x1b[H") >= 3)
    for lease in (one, other):
        assert f"{lease.fencing_token}\x1b[K" in seen
    assert "nn> " in seen


async def test_ls_watching_through_an_outage_goes_on(server: LockServer) -> None:
    """It says that what it shows is old."""
    with Terminal(server.url, "ls", "--watch", "0.1") as terminal:
        await asyncio.to_thread(terminal.until, lambda seen: "held as" in seen)
        server.kill()
        await asyncio.to_thread(terminal.until, lambda seen: "no answer now" in seen)
        server.restart()  # Here: what a thread starts dies with it.
        async with topologies.admin(server) as redis:
            await redis.set("aiodlock:{again}", "x", px=60_000)
        await asyncio.to_thread(terminal.until, lambda seen: "again" in seen)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert await asyncio.to_thread(terminal.ended) == 0


@pytest.mark.parametrize(("keys", "code", "is_held"), [("y\n", 0, False), ("n\n", 1, True)])
async def test_break_in_a_terminal_asks_and_does_as_it_is_told(
    server: LockServer, locks: LockClient, keys: str, code: int, is_held: bool
) -> None:
    """It shows what it would break, first."""
    lease = await locks.lock("a", auto_extend=False).acquire()
    seen = await asyncio.to_thread(_answer, server.url, keys, code)
    assert (await locks.lock("a").inspect()).held is is_held
    await lease.release()
    assert seen.index(str(lease.fencing_token)) < seen.index("Break it? [y/N]")


async def test_break_in_a_terminal_is_ended_by_one_ctrl_c(
    server: LockServer, locks: LockClient
) -> None:
    """While it asks; nothing is broken."""
    async with locks.lock("a") as lease:
        seen = await asyncio.to_thread(_answer, server.url, "\x03", 130)
        await lease.extend()
    assert "interrupted" in seen


def _answer(url: str, keys: str, code: int) -> str:
    """Call `break`, press *keys* at its question; what was seen."""
    with Terminal(url, "break", "a") as terminal:
        terminal.until(lambda seen: "[y/N]" in seen)
        terminal.type(keys)
        assert terminal.ended() == code
        return terminal.seen
