"""`aiodlock doctor` on real servers: each fault is named, and a good server shows none."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from aiodlock import LockClient
from aiodlock.cli import _doctor_ask, _doctor_asker, _doctor_measure
from aiodlock.cli._doctor import examined
from aiodlock.cli._doctor_ask import facts_of
from aiodlock.cli._doctor_facts import Plan
from aiodlock.cli._doctor_findings import findings
from aiodlock.cli._doctor_show import as_json
from aiodlock.testing import LockServer, lock_server
from tests import topologies
from tests.permissions import CLUSTER_PERMISSIONS, LEAST_PERMISSIONS
from tests.proxy import ChaosProxy
from tests.topologies import ask, user
from tests.until import until

pytestmark = pytest.mark.deep

SAFE = ("--appendonly", "yes", "--appendfsync", "always")
"""What makes a server good."""

NODES = 3
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Told:
    """What the command said: its exit code, JSON, and all of its output."""

    code: int
    findings: list[dict[str, Any]]
    output: str

    @property
    def bad(self) -> dict[str, str]:
        """By kind what was seen, of what is not ok."""
        return {one["kind"]: one["seen"] for one in self.findings if one["severity"] != "ok"}

    @property
    def kinds(self) -> set[str]:
        """Of what is not ok."""
        return set(self.bad)

    @property
    def ok(self) -> dict[str, str]:
        """The same, of what is."""
        return {one["kind"]: one["seen"] for one in self.findings if one["severity"] == "ok"}


async def doctor(*urls: str) -> Told:
    """What it finds there; in this process, for most of a run is the start of a Python."""
    found, code = await examined(urls, Plan())
    output = as_json(found, Plan(), code)
    return Told(code, json.loads(output)["findings"], output)


async def run(*argv: str, **environment: str) -> tuple[int, str, str]:
    """The command, as a process of its own: its exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aiodlock", "doctor", *argv),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **environment},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def good_server(*options: str) -> AsyncIterator[LockServer]:
    """One without a fault but those of *options*."""
    async with lock_server(*SAFE, *options) as server:
        yield server


async def keys_of(server: LockServer) -> list[str]:
    """All of them, in every database."""
    return [str(key) for key in await ask(server, "KEYS", "*")]


# A good server, and what doctor does to it


async def test_good_server_shows_no_fault_and_is_left_as_it_was() -> None:
    """Exit code 0; no setting has changed, no key is left, and nothing that burdens was sent."""
    async with good_server() as server:
        before = await ask(server, "CONFIG", "GET", "*")
        code, out, err = await run("--json", "--url", server.url)
        told = Told(code, json.loads(out)["findings"], out)
        assert (code, err, told.bad) == (0, "", {})
        assert set(told.ok) == {
            *("server", "memory", "restart", "failover", "clock", "permissions"),
            *("messages", "latency", "leftovers", "connections"),
        }
        used = await topologies.info(server, "commandstats")
        assert await ask(server, "CONFIG", "GET", "*") == before
        assert await keys_of(server) == []
        assert not {"cmdstat_keys", "cmdstat_config|set", "cmdstat_monitor"} & used.keys()


async def test_key_of_a_doctor_that_is_cut_off_does_not_stay(
    server: LockServer, redis: Redis, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted although the answer was lost; and where that fails too, its ttl ends it."""
    lost = proxy.drop_replies(1, b"PX", close=True)
    facts = await facts_of(proxy.url, Plan())
    assert (lost.hits, facts.trouble is not None) == (1, True)
    assert await keys_of(server) == []

    async def fail(*keys: str) -> None:
        raise RedisError("cut off")

    monkeypatch.setattr(Redis, "delete", fail)
    await facts_of(server.url, Plan())
    (key,) = await keys_of(server)
    assert key.startswith("aiodlock:{doctor:")
    assert 0 < await redis.pttl(key) <= 5000


async def test_locks_in_use_are_no_leftovers() -> None:
    """Held by one or several, waited for, released: every key of theirs is as it should be."""
    async with good_server() as server, LockClient.from_url(server.url) as locks:
        async with locks.lock("released"):
            pass
        async with locks.lock("held"), locks.reader("read"), locks.semaphore("s", permits=2):
            waiting = asyncio.create_task(locks.lock("held").acquire(wait_timeout=20))
            await until(lambda: _is_waited_for(locks))
            told = await doctor(server.url)
        await (await waiting).release()
    assert (told.code, told.bad) == (0, {})
    assert told.ok["leftovers"].startswith("11 keys")


async def _is_waited_for(locks: LockClient) -> bool:
    return (await locks.lock("held").inspect()).waiters == 1


async def test_text_of_a_real_server_fits_into_80_columns() -> None:
    """As a terminal shows it."""
    async with lock_server("--maxmemory", "10mb", "--maxmemory-policy", "volatile-ttl") as server:
        code, out, err = await run("--url", server.url, COLUMNS="80")
    assert (code, err) == (2, "")
    assert max(map(len, out.splitlines())) < 80
    assert "danger   memory" in out
    assert "docs/reference/doctor.md#evicts" in out
    assert out.endswith("1 danger, 1 warning\n")


# Bad servers


async def test_server_that_evicts_and_forgets_is_named() -> None:
    """A cache: a limit, a policy, nothing on disk, idle clients closed, small buffers."""
    async with lock_server(
        *("--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru", "--timeout", "60"),
        *("--client-output-buffer-limit", "pubsub 1kb 1kb 1", "--maxclients", "10"),
        *("--lua-time-limit", "0"),
    ) as server:
        told = await doctor(server.url)
    assert told.code == 2
    assert told.kinds == {
        *("evicts", "forgets", "idle-timeout", "message-buffer", "script-limit"),
    }
    assert "allkeys-lru" in told.bad["evicts"]
    assert told.bad["forgets"] == "nothing on disk"


async def test_full_server_is_named() -> None:
    """By its figures, and by the write that it refuses."""
    async with good_server("--maxmemory", "1") as server:
        told = await doctor(server.url)
    assert (told.code, told.kinds) == (2, {"full", "writes-refused"})
    assert "OOM" in told.bad["writes-refused"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--appendonly", "yes", "--appendfsync", "everysec"), "loses-seconds"),
        (("--appendonly", "yes", "--appendfsync", "no"), "fsync-no"),
        (("--save", "3600 1"), "forgets"),
    ],
)
async def test_server_that_keeps_too_little_is_named(options: tuple[str, ...], kind: str) -> None:
    """By what it writes to its disk, and when."""
    async with lock_server(*options) as server:
        told = await doctor(server.url)
    assert told.kinds == {kind}


async def test_primary_and_replica_under_sentinels_are_told_apart() -> None:
    """The primary can be cut off; the replica takes no writes; a Sentinel keeps no locks."""
    async with topologies.watched() as watched:
        primary, replica, sentinel = await asyncio.gather(
            doctor((await watched.master()).url),
            doctor((await watched.replica()).url),
            doctor(watched.sentinels[0].url),
        )
    assert primary.code == 1
    assert primary.kinds == {"forgets", "sentinels", "failover-loses", "cut-off-primary"}
    assert primary.bad["sentinels"].startswith("3 Sentinels")
    assert replica.code == 2
    assert {"replica", "writes-refused"} <= replica.kinds
    assert "up" in replica.bad["replica"]
    assert "READONLY" in replica.bad["writes-refused"]
    assert (sentinel.code, sentinel.kinds) == (2, {"sentinel"})


async def test_primary_without_the_replicas_that_it_needs_is_named() -> None:
    """It refuses all writes; and one that has just come is behind."""
    options = ("--min-replicas-to-write", "1", "--repl-diskless-sync-delay", "60")
    async with good_server(*options) as primary:
        alone = await doctor(primary.url)
        async with lock_server("--replicaof", f"127.0.0.1 {primary.port}"):
            await until(lambda: _has_replica(primary), 10)
            behind = await doctor(primary.url)
    assert (alone.code, alone.kinds) == (2, {"too-few-replicas", "writes-refused"})
    assert "NOREPLICAS" in alone.bad["writes-refused"]
    assert {"too-few-replicas", "replica-lags", "failover-loses"} <= behind.kinds
    assert "wait_bgsave" in behind.bad["replica-lags"]


async def _has_replica(primary: LockServer) -> bool:
    told = await topologies.info(primary, "replication")
    return bool(told["connected_slaves"])


async def test_cluster_that_is_whole_shows_no_fault() -> None:
    """Any of its primaries, with a key in a slot of its own; a replica says what it is."""
    async with topologies.cluster(replicas=True) as cluster:
        told = [await doctor(node.url) for node in cluster.nodes[:NODES]]
        replica = await doctor((await cluster.replica(0)).url)
    expected = {"forgets", "one-node-of-many", "failover-loses", "cut-off-primary"}
    assert [one.kinds for one in told] == [expected] * NODES
    assert all(one.ok["cluster"] == "state ok, 16384 of 16384 slots served" for one in told)
    assert all("permissions" in one.ok for one in told)
    assert (replica.code, replica.kinds) == (2, {"forgets", "one-node-of-many", "replica"})


async def test_cluster_with_an_uncovered_slot_is_named() -> None:
    """One slot of 16384 that is nobody's stops all of it, by the server's default."""
    async with good_server("--cluster-enabled", "yes") as server:
        await ask(server, "CLUSTER", "ADDSLOTS", *range(16383))
        told = await doctor(server.url)
    assert told.code == 2
    assert told.bad["slots-uncovered"] == "state fail, 16383 of 16384 slots served"
    assert "CLUSTERDOWN" in told.bad["writes-refused"]


# What this user may do


async def test_user_with_the_least_permissions_shows_no_fault(server: LockServer) -> None:
    """What such a one may not ask is said, and not guessed."""
    async with user(server, *LEAST_PERMISSIONS) as somebody:
        told = await doctor(somebody.url(server))
    assert (told.code, told.kinds) == (0, {"could-not-see"})
    assert told.ok.keys() == {"server", "clock", "permissions", "messages", "latency"}
    assert told.ok["server"] == "Valkey 9.1.2 standalone" or "Redis" in told.ok["server"]
    assert "INFO" in told.output
    assert "NOPERM" in told.output


WITHOUT = dict.fromkeys(LEAST_PERMISSIONS, "not-allowed") | {
    "&aiodlock:*": "no-messages",
    "+publish": "no-messages",
    "+subscribe": "no-messages",
}


@pytest.mark.parametrize("missing", WITHOUT)
async def test_user_without_one_permission_is_told_which(server: LockServer, missing: str) -> None:
    """Each of the least that a lock needs; and nothing is left behind."""
    rules = [rule for rule in LEAST_PERMISSIONS if rule != missing]
    async with user(server, *rules) as somebody:
        facts = await facts_of(somebody.url(server), Plan())
    found = {one.kind.id: one.text for one in findings(facts, Plan())}
    kind = WITHOUT[missing]
    assert {"not-allowed", "no-messages"} & found.keys() == {kind}
    if kind == "not-allowed":
        assert found[kind] == f"missing: {missing}"
    else:
        assert "permissions" in found
        assert missing.strip("+&").split(":")[0] in found[kind] or "channel" in found[kind]
    assert await keys_of(server) == []


async def test_user_without_scripts_is_told(server: LockServer) -> None:
    """What administrators like to take away."""
    async with user(server, "+@all", "~*", "&*", "-@scripting") as somebody:
        told = await doctor(somebody.url(server))
    assert told.code == 2
    assert told.bad["not-allowed"] == "missing: +eval +evalsha"


async def test_user_without_a_database_is_refused_there(server: LockServer) -> None:
    """Any other than 0 needs `+select`."""
    async with user(server, *LEAST_PERMISSIONS) as somebody:
        told = await doctor(f"{somebody.url(server)}/3")
    assert (told.code, told.kinds) == (2, {"login"})
    assert "select" in told.bad["login"]


async def test_user_of_a_cluster_is_told_what_a_cluster_needs() -> None:
    """The map of slots; and `ASKING`, without which a move is waited out."""
    async with good_server("--cluster-enabled", "yes") as server:
        await ask(server, "CLUSTER", "ADDSLOTS", *range(16384))
        await until(lambda: _is_up(server), 10)
        async with user(server, *LEAST_PERMISSIONS) as plain:
            without = await doctor(plain.url(server))
        rules = (*LEAST_PERMISSIONS, *CLUSTER_PERMISSIONS, "+asking")
        async with user(server, *rules) as knowing:
            with_ = await doctor(knowing.url(server))
    assert without.bad["not-allowed"] == "missing: +cluster|slots +command"
    assert without.bad["no-asking"] == "missing: +asking"
    assert (with_.code, with_.kinds) == (0, {"could-not-see"})


async def _is_up(server: LockServer) -> bool:
    return "cluster_state:ok" in await ask(server, "CLUSTER", "INFO")


# Messages, clock, speed


async def test_server_without_messages_is_named(proxy: ChaosProxy) -> None:
    """Published, but dropped on the way; or the command does not exist."""
    proxy.drop_messages()
    lost = await doctor(f"{proxy.url}")
    assert "not heard" in lost.bad["no-messages"]
    async with lock_server("--rename-command", "SUBSCRIBE", "") as server:
        unknown = await doctor(server.url)
    assert "unknown command" in unknown.bad["no-messages"]


async def test_clock_that_is_off_is_named(
    server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ours, which is set here: only the difference is seen."""
    monkeypatch.setattr(_doctor_measure, "wall_clock", lambda: time.time() + 60)
    facts = await facts_of(server.url, Plan())
    found = {one.kind.id: one.text for one in findings(facts, Plan())}
    assert found["clock-off"] == "60.0 s behind ours"


async def test_clock_that_is_stepped_meanwhile_is_named(
    server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a second reading, after everything else."""
    whole = _doctor_ask._sentinels

    async def step(asker: _doctor_asker.Asker) -> None:
        monkeypatch.setattr(_doctor_measure, "wall_clock", lambda: time.time() - 3)
        await whole(asker)

    monkeypatch.setattr(_doctor_ask, "_sentinels", step)
    facts = await facts_of(server.url, Plan())
    found = {one.kind.id: one.text for one in findings(facts, Plan())}
    assert found["clock-steps"] == "set by 3.0 s while we watched"


async def test_slow_server_is_named(proxy: ChaosProxy) -> None:
    """Its scripts take a good half of `request_timeout`."""
    proxy.delay_replies(1.1, b"EVALSHA")
    told = await doctor(proxy.url)
    assert "slow" in told.bad
    assert told.code == 1


async def test_command_that_kept_the_server_busy_is_named_without_its_arguments() -> None:
    """Somebody's, a moment ago."""
    async with good_server("--enable-debug-command", "yes") as server:
        await ask(server, "DEBUG", "SLEEP", "1.1")
        await ask(server, "CONFIG", "SET", "slowlog-log-slower-than", 0)
        await ask(server, "ECHO", "a-secret-of-somebody")
        await ask(server, "CONFIG", "SET", "slowlog-log-slower-than", 10_000)
        told = await doctor(server.url)
    assert told.kinds == {"slow-commands"}
    assert "DEBUG with 1.1 s" in told.bad["slow-commands"]
    assert "a-secret" not in told.output


async def test_server_that_drips_is_left_in_time(
    proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers each question in time, but there is none for all; what was seen is told."""
    monkeypatch.setattr(_doctor_asker, "LIMIT_S", 1.0)
    proxy.delay_replies(0.2)
    facts = await facts_of(proxy.url, Plan())
    assert facts.trouble is None
    assert "out of time" in facts.unseen
    assert facts.info
    assert facts.leftovers is None


# What is left under the prefix


async def test_leftovers_are_named(redis: Redis, server: LockServer) -> None:
    """Each oddity once, and nothing of another prefix, whatever characters it has."""
    await redis.set("aiodlock:{no-ttl}", "x")
    await redis.rpush("aiodlock:{a-list}", "x")
    await redis.set("aiodlock:{foreign}", "a-secret-of-redis-py", px=60_000)
    await redis.set("aiodlock:stray", "x", px=60_000)
    await redis.set("aiodlock:{odd}:gone", "x", px=60_000)
    await redis.zadd("aiodlock:{dead}:queue", {"w:1": 1})
    await redis.zadd("aiodlock:{dead}:alive", {"w:1": 1})
    for key in ("aiodlock:{a-list}", "aiodlock:{dead}:queue", "aiodlock:{dead}:alive"):
        await redis.pexpire(key, 60_000)
    await redis.set("aiodlock:{100%}", "x")  # As a name it would be written in another way.
    await redis.set("another:{no-ttl}", "x")
    told = await doctor(server.url)
    assert told.code == 1
    expected = {
        "no-ttl": "1 without a ttl: aiodlock:{no-ttl}",
        "not-a-lock": "1 of another type: aiodlock:{a-list}",
        "foreign-values": "2 of another library: aiodlock:{foreign}, aiodlock:{no-ttl}",
        "dead-queues": "1 queued for by the dead: aiodlock:{dead}:queue",
        "strangers": "3 of no lock: aiodlock:stray, aiodlock:{100%}, aiodlock:{odd}:gone",
    }
    assert {kind: told.bad[kind] for kind in expected} == expected
    assert "a-secret" not in told.output
    assert len(await keys_of(server)) == 9


async def test_prefix_with_special_characters_means_itself(
    redis: Redis, server: LockServer
) -> None:
    """`*` and `[` are no patterns."""
    await redis.set("a*[x]:{one}", "x")
    await redis.set("abc[x]:{two}", "x")
    _, out, _ = await run("--json", "--url", server.url, "--prefix", "a*[x]:")
    (no_ttl,) = [one for one in json.loads(out)["findings"] if one["kind"] == "no-ttl"]
    assert no_ttl["seen"] == "1 without a ttl: a*[x]:{one}"


async def test_more_keys_than_doctor_looks_at_are_said_to_be_more(
    redis: Redis, server: LockServer
) -> None:
    """It stops, and does not burden the server with all."""
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(2100):
            pipe.set(f"aiodlock:{{{number}}}:fence", "1", px=60_000)
        await pipe.execute()
    told = await doctor(server.url)
    assert told.bad["not-all-keys"] == "2000 keys looked at; not all keys were seen"


# Who cannot be asked


async def test_wrong_password_is_named_and_not_shown() -> None:
    """Refused by the server, so not unreachable; nor is a right one shown."""
    async with good_server("--requirepass", "right-secret") as server:
        url = server.url.replace("//", "//:{}@")
        wrong = await doctor(url.format("wrong-secret"))
        assert (wrong.code, wrong.kinds) == (2, {"login"})
        assert "secret" not in wrong.output
        without = await doctor(server.url)
        assert (without.code, without.kinds) == (2, {"login"})
        code, out, err = await run("-v", AIODLOCK_URL=url.format("right-secret"))
        assert (code, "all is well" in out) == (0, True)
        assert "secret" not in out + err
        code, out, err = await run("-v", AIODLOCK_URL=url.format("wrong-secret"))
        assert (code, "login" in out) == (2, True)
        assert "secret" not in out + err


async def test_server_of_http_is_named() -> None:
    """What answers is no Redis."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as http:
        port = http.sockets[0].getsockname()[1]
        told = await doctor(f"redis://127.0.0.1:{port}")
    assert (told.code, told.kinds) == (69, {"not-redis"})


async def test_port_of_tls_that_is_asked_in_plain_is_named(server: LockServer) -> None:
    """And the reverse."""
    async with topologies.tls(server.port) as tls:
        plain = await doctor(f"redis://127.0.0.1:{tls.port}")
        well = await doctor(tls.url(tls.ca_file))
    reverse = await doctor(server.url.replace("redis://", "rediss://"))
    assert (plain.code, plain.kinds) == (69, {"not-redis"})
    assert reverse.code == 69
    assert "server" in well.ok


async def test_quiet_doctor_says_nothing_of_what_is_well() -> None:
    """A mail of cron's has the faults alone, and where there are none, there is no mail."""
    async with good_server() as server:
        assert await run("-q", "--url", server.url) == (0, "", "")
        await ask(server, "SET", "aiodlock:{n}", "x")
        code, out, _ = await run("-q", "--url", server.url)
    assert (code, "no-ttl" in out, "\nok " in out) == (1, True, False)


async def test_certificate_that_is_not_trusted_is_named(server: LockServer) -> None:
    """Not as a wrong port."""
    async with topologies.tls(server.port) as tls:
        told = await doctor(f"rediss://localhost:{tls.port}")
    assert (told.code, told.kinds) == (69, {"certificate"})


async def test_password_where_none_is_set_is_well(server: LockServer) -> None:
    """As it is for locks, which log in by another handshake than the questions."""
    url = f"redis://:secret@127.0.0.1:{server.port}"
    async with LockClient.from_url(url) as locks, locks.lock("n"):
        told = await doctor(url)
    assert "login" not in told.kinds
    assert {"server", "permissions", "messages"} <= told.ok.keys()


async def test_server_without_the_handshake_of_locks_is_named() -> None:
    """Whatever else it answers."""
    async with good_server("--rename-command", "HELLO", "") as server:
        told = await doctor(server.url)
    assert (told.code, told.kinds) == (2, {"login"})
    assert "HELLO" in told.bad["login"]


STRANGE = "no Redis gives"


@pytest.mark.parametrize("question", ["INFO", "TIME", "SLOWLOG GET", "PUBSUB NUMSUB", "SCAN"])
async def test_answer_of_a_strange_shape_is_noted_and_the_rest_is_asked(
    server: LockServer, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """As imitations give it; a number in place of a list, or of a text."""
    whole = _doctor_asker.Asker.ask

    async def ask_(asker: _doctor_asker.Asker, asked: str, *command: str | int) -> Any:
        return 5 if asked == question else await whole(asker, asked, *command)

    monkeypatch.setattr(_doctor_asker.Asker, "ask", ask_)
    told = await doctor(server.url)
    assert STRANGE in told.bad["could-not-see"]
    assert {"permissions", "messages"} <= told.ok.keys()


@pytest.mark.parametrize(
    ("command", "kind"), [("CONFIG", "could-not-see"), ("ZRANK", "commands-fail")]
)
async def test_command_that_a_proxy_does_not_know_is_noted(
    server: LockServer, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    """It answers by an error of its own, which is not about permissions."""
    whole = _doctor_asker.Asker.ask_all

    async def ask_all(asker: _doctor_asker.Asker, *commands: tuple[str | int, ...]) -> list[Any]:
        replies = await whole(asker, *commands)
        pairs = zip(commands, replies, strict=True)
        error = ResponseError("unsupported")
        return [error if asked[0] == command else reply for asked, reply in pairs]

    monkeypatch.setattr(_doctor_asker.Asker, "ask_all", ask_all)
    told = await doctor(server.url)
    assert "unsupported" in told.bad[kind]
    assert ("permissions" in told.ok) == (kind == "could-not-see")


async def test_dead_port_is_unreachable() -> None:
    """At once."""
    told = await doctor("redis://127.0.0.1:1")
    assert (told.code, told.kinds) == (69, {"unreachable"})


async def test_server_that_falls_silent_is_unreachable(proxy: ChaosProxy) -> None:
    """From the start, and in the middle: what was seen before is told all the same."""
    proxy.delay_replies(60, b"TIME")
    middle = await doctor(proxy.url)
    assert middle.code == 69
    assert "unreachable" in middle.bad
    assert "memory" in middle.ok
    proxy.black_hole()
    start = await doctor(proxy.url)
    assert (start.code, start.kinds) == (69, {"unreachable"})


async def test_server_with_an_endless_script_is_named() -> None:
    """It says BUSY to everybody."""
    async with good_server("--lua-time-limit", "5") as server, topologies.admin(server) as redis:
        endless = asyncio.create_task(_endless(redis))
        await until(lambda: _is_busy(server), 10)
        told = await doctor(server.url)
        await ask(server, "SCRIPT", "KILL")
        await asyncio.wait({endless})
        assert endless.exception() is not None
    assert (told.code, told.kinds) == (2, {"busy"})


async def _endless(redis: Redis) -> None:
    await redis.eval("while true do end", 0)


async def _is_busy(server: LockServer) -> bool:
    try:
        await ask(server, "PING")
    except Exception as error:
        return "BUSY" in str(error)
    return False


async def test_server_without_room_for_a_connection_is_named() -> None:
    """Or with hardly any."""
    async with good_server("--maxclients", "10") as server, AsyncExitStack() as stack:
        for _ in range(8):
            redis = await stack.enter_async_context(topologies.admin(server))
            await redis.ping()
        near = await doctor(server.url)
        for _ in range(2):
            redis = await stack.enter_async_context(topologies.admin(server))
            await redis.ping()
        full = await doctor(server.url)
    assert (near.code, near.kinds) == (1, {"connections-near-limit"})
    assert (full.code, full.kinds) == (2, {"connections-full"})


# A quorum


async def test_quorum_of_good_nodes_shows_no_fault() -> None:
    """Three independent ones."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(good_server()) for _ in range(NODES)]
        told = await doctor(*(node.url for node in nodes))
        assert (told.code, told.bad) == (0, {})
        assert told.ok["quorum"] == "3 nodes, bears the loss of 1"
        nodes[0].kill()
        less = await doctor(*(node.url for node in nodes))
        assert (less.code, less.kinds) == (2, {"unreachable", "nodes-missing"})
        nodes[1].kill()
        none = await doctor(*(node.url for node in nodes))
        assert (none.code, none.kinds) == (69, {"unreachable", "no-majority"})


async def test_quorum_of_nodes_that_are_not_independent_is_named(servers: list[LockServer]) -> None:
    """The same server twice by two names, one that follows another, and an even number."""
    one, other, third = servers[:NODES]
    alias = one.url.replace("127.0.0.1", "localhost")
    try:
        await ask(third, "REPLICAOF", "127.0.0.1", other.port)
        await until(lambda: _follows(third), 10)
        told = await doctor(one.url, alias, other.url, third.url)
    finally:
        await ask(third, "REPLICAOF", "NO", "ONE")
    assert told.code == 2
    assert {
        *("same-server", "nodes-replicate", "even-nodes", "replica"),
        *("node-with-replicas", "restart-delay"),
    } <= told.kinds
    assert told.bad["same-server"] == f"{one.url} and {alias} are one server"
    assert told.bad["nodes-replicate"] == f"{other.url} and {third.url} have one history"
    assert "no-messages" not in told.bad


async def _follows(server: LockServer) -> bool:
    told = await topologies.info(server, "replication")
    return bool(told.get("master_link_status") == "up")


# The page that shows it


def shown_on_the_page() -> list[str]:
    """Its blocks of the command's output."""
    page = (ROOT / "docs/how-to/check-a-server.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if block.startswith("redis://")]


def without_figures(text: str) -> list[str]:
    """What does not change from run to run, or with the server's make."""
    text = re.sub(r"redis://\S+|Valkey|Redis(?= )", "-", text)
    return [re.sub(r"[\d.]+|-{2,}|\b[kM]B", "#", line).rstrip() for line in text.splitlines()]


async def test_page_shows_what_the_command_says() -> None:
    """A cache with a key that nobody deletes, then a server for locks; but for the figures."""
    cache, better = shown_on_the_page()
    async with lock_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        await ask(server, "SET", "aiodlock:{nightly-report}", "worker-3")
        code, out, _ = await run("--url", server.url, COLUMNS="80")
        assert (code, without_figures(out)) == (2, without_figures(cache))
    async with lock_server("--maxmemory", "100mb", "--appendonly", "yes") as server:
        code, out, _ = await run("--url", server.url, COLUMNS="80")
        assert (code, without_figures(out)) == (0, without_figures(better))
