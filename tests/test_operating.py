"""`aiodlock ls`, `show`, `wait` and `break` on one server."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from aiodlock import LockClient, _names
from aiodlock.cli._listing import glob_of, name_of
from aiodlock.cli._look import Grant, Look
from aiodlock.cli._standing import Standing
from aiodlock.cli._wait import pause_s
from aiodlock.testing import LockServer
from tests import operators, topologies
from tests.by_hand import ONE, OTHER, A, B, ByHand
from tests.conftest import MakeClient
from tests.operators import Operator
from tests.until import until

OPERATOR_PERMISSIONS = (
    "~aiodlock:*",
    *("+eval", "+scan"),
    *("+exists", "+get", "+pttl", "+time", "+zcard", "+zrange", "+zrangebyscore", "+zscore"),
)
"""What `ls`, `show` and `wait` need."""

OF_CONNECTIONS = {"hello", "client|setinfo", "client|maint_notifications", "cluster|slots"} | {
    *("client", "cluster", "config", "config|resetstat", "info")
}
"""What redis-py sends on its own account, and this test; servers count it in different words."""


@pytest.fixture
def operator(
    server: LockServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Operator]:
    """Calls commands about the server."""
    with operators.as_before():
        yield Operator(capsys, monkeypatch, server.url)


@asynccontextmanager
async def waiting(locks: LockClient, name: str) -> AsyncIterator[asyncio.Task[Any]]:
    """Somebody who stands in the queue."""
    before = (await locks.lock(name).inspect()).waiters
    task = asyncio.create_task(_hold(locks, name))

    async def is_queued() -> bool:
        return (await locks.lock(name).inspect()).waiters > before

    try:
        await until(is_queued)
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _hold(locks: LockClient, name: str) -> None:
    async with locks.lock(name):
        await asyncio.Event().wait()


def names_of(listing: Any) -> list[str]:
    """The names that `ls --json` lists."""
    return [each["name"] for each in listing["names"]]


# ls


async def test_ls_of_held_and_waited_for_names_tells_what_stands(
    operator: Operator, locks: LockClient, make_client: MakeClient
) -> None:
    """Holder, time, number, queue and longest wait, as the client itself sees them."""
    other = make_client(label="other")
    async with locks.lock("a") as lease, locks.lock("b"), waiting(other, "a"):
        info = await locks.lock("a").inspect()
        (first, second) = (await operator("ls", "--json")).json["names"]
    assert (first["name"], first["kind"], first["held"]) == ("a", "lock", True)
    assert (first["holder"], first["fencing_token"]) == (info.holder, lease.fencing_token)
    assert 0 < first["ttl_left"] <= 30.0
    assert (first["waiters"], second["name"], second["waiters"]) == (1, "b", 0)
    assert 0 <= first["longest_wait"] < operators.LIMIT_S
    assert second["longest_wait"] is None


async def test_ls_of_an_expired_lock_with_waiters_lists_it_as_nobodys(
    operator: Operator, redis: Redis
) -> None:
    """Nobody holds, somebody waits: the queue is all that there is."""
    world = ByHand(redis)
    await world.granted(A)
    await world.refused(B)
    await world.let_expire()
    (only,) = (await operator("ls", "--json")).json["names"]
    assert (only["name"], only["held"], only["waiters"]) == ("name", False, 1)
    told = await operator("ls")
    assert told.out.splitlines()[2].split()[:3] == ["name", "lock", "nobody"]


async def test_ls_of_names_that_are_free_lists_none_and_says_so(
    operator: Operator, locks: LockClient
) -> None:
    """What remembers the last fencing token is no lock; nor is a key outside of the prefix."""
    async with locks.lock("a"):
        pass
    told = await operator("ls")
    assert told.code == 0
    assert len(told.out.splitlines()) == 2
    assert "no name like * is held or waited for" in told.err
    assert (await operator("ls", "-q")).err == ""


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a[b]*", "a\\b", "job:1", "job:2", "{x}%"]),
        ("job:?", ["job:1", "job:2"]),
        ("job:[!1]", ["job:2"]),
        ("job:[^1]", ["job:2"]),
        ("job:1", ["job:1"]),
        ("{*", ["{x}%"]),
        ("a[[]b]*", ["a[b]*"]),
        ("job", []),
    ],
)
async def test_ls_with_a_pattern_lists_the_names_that_it_fits(
    operator: Operator, make_client: MakeClient, pattern: str, found: list[str]
) -> None:
    """As a shell's, whatever signs stand in names and in the prefix."""
    locks = make_client(prefix="app[1]*:")
    async with locks.all("a[b]*", "a\\b", "job:1", "job:2", "{x}%"):
        told = await operator("ls", pattern, "--json", "--prefix", "app[1]*:")
    assert names_of(told.json) == found


async def test_ls_of_foreign_keys_shows_them_as_what_they_are(
    operator: Operator, redis: Redis
) -> None:
    """Another library's lock, other types, bytes that are no text, keys of no name: no crash."""
    async with redis.lock("aiodlock:{old}", timeout=30):
        await redis.hset("aiodlock:{hash}", "field", "value")
        await redis.zadd("aiodlock:{board}", {"player": 7})
        await redis.set("aiodlock:{bytes}", b"\xff\x00")
        await redis.set("aiodlock:{big}", "x" * 100_000)
        for key in (b"aiodlock:{\xff}", "aiodlock:{100%}", "aiodlock:{}", "aiodlock:plain"):
            await redis.set(key, "x")
        await redis.rpush("aiodlock:{list}:queue", "x")
        told = await operator("ls", "--json")
        text = await operator("ls")
    assert told.code == text.code == 0
    kinds = {each["name"]: (each["kind"], each["not_a_lock"]) for each in told.json["names"]}
    assert kinds == {
        "old": ("foreign", None),
        "hash": ("not a lock", "hash"),
        "board": ("not a lock", "zset"),
        "bytes": ("foreign", None),
        "big": ("foreign", None),
    }


async def test_ls_of_names_with_control_characters_keeps_them_from_the_terminal(
    operator: Operator, locks: LockClient
) -> None:
    """A name may have an escape sequence, a line break, or turn the direction of writing."""
    names = ("\x1b[31mred", "two\nlines", "back\u202ewards", "日本", "\x9b0m")
    async with locks.all(*names):
        told, found = await operator("ls"), await operator("ls", "--json")
    lines = told.out.splitlines()
    assert len(lines) == 2 + len(names)
    assert all(line.isprintable() for line in lines)
    assert sorted(names_of(found.json)) == sorted(names)
    # Where the wide characters are, the column begins as many characters earlier.
    assert {line.index("lock") for line in lines[2:] if "日" not in line} == {
        next(line.index("lock") for line in lines if "日" in line) + 2
    }


async def test_ls_of_a_large_keyspace_asks_by_scan_and_changes_nothing(
    operator: Operator, locks: LockClient, redis: Redis
) -> None:
    """One SCAN for each 1000 keys, never KEYS, and no command that writes."""
    await redis.eval("for n = 1, 100000 do redis.call('SET', 'other:' .. n, n) end", 0)
    async with locks.lock("a"):
        await redis.config_resetstat()
        told = await operator("ls", "--json")
        stats = await redis.info("commandstats")
    assert names_of(told.json) == ["a"]
    # SCAN may look at somewhat fewer keys than it is asked to.
    assert 100 <= stats["cmdstat_scan"]["calls"] <= 150
    allowed = {rule[1:] for rule in OPERATOR_PERMISSIONS if rule[0] == "+"}
    used = {name.removeprefix("cmdstat_") for name in stats}
    assert used - allowed <= OF_CONNECTIONS


async def test_ls_with_more_names_than_the_limit_says_that_there_are_more(
    operator: Operator, locks: LockClient
) -> None:
    """It does not list, nor ask about, more than it may."""
    async with locks.all(*(f"n{number}" for number in range(5))):
        told = await operator("ls", "--limit", "3")
        assert len(told.out.splitlines()) == 2 + 3
        assert "more than 3 names" in told.err
        assert (await operator("ls", "--limit", "3", "--json")).json["is_complete"] is False
        assert (await operator("ls", "--limit", "5", "--json")).json["is_complete"] is True


async def test_ls_stops_its_search_when_there_are_more_names_than_the_limit(
    operator: Operator, redis: Redis
) -> None:
    """One SCAN finds them, and no more are asked about than are told."""
    await redis.eval("for n = 1, 9999 do redis.call('SET', 'aiodlock:{' .. n .. '}', n) end", 0)
    await redis.config_resetstat()
    assert len((await operator("ls", "--limit", "10", "--json")).json["names"]) == 10
    stats = await redis.info("commandstats")
    assert (stats["cmdstat_scan"]["calls"], stats["cmdstat_eval"]["calls"]) == (1, 10)


async def test_operator_with_few_permissions_looks_but_may_not_break(
    server: LockServer,
    locks: LockClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading needs the reading commands, and SCAN for `ls` alone."""
    async with locks.lock("a") as lease:
        async with topologies.user(server, *OPERATOR_PERMISSIONS) as user:
            reader = Operator(capsys, monkeypatch, user.url(server))
            with operators.as_before():
                assert names_of((await reader("ls", "--json")).json) == ["a"]
                assert (await reader("show", "a")).code == 0
                assert (await reader("wait", "a", "--wait", "0")).code == 75
                refused = await reader("break", "a", "--yes")
        assert refused.code == 77
        assert "forbids this user what is needed" in refused.err
        assert "`aiodlock doctor` says more" in refused.err
        without_scan = [rule for rule in OPERATOR_PERMISSIONS if rule != "+scan"]
        async with topologies.user(server, *without_scan) as user:
            reader = Operator(capsys, monkeypatch, user.url(server))
            with operators.as_before():
                assert (await reader("ls")).code == 77
                assert (await reader("show", "a")).code == 0
        assert lease.is_held


@pytest.mark.parametrize("without", [rule for rule in OPERATOR_PERMISSIONS if rule[0] == "+"])
async def test_operator_without_one_of_the_permissions_is_refused(
    server: LockServer,
    redis: Redis,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without: str,
) -> None:
    """None of them is named in vain."""
    world = ByHand(redis)
    await world.granted(A)
    await world.refused(B)
    await redis.zadd("aiodlock:{several}", {f"{ONE}:1r": await world.now_ms() + 30_000})
    rules = [rule for rule in OPERATOR_PERMISSIONS if rule != without]
    async with topologies.user(server, *rules) as user:
        with operators.as_before():
            told = await Operator(capsys, monkeypatch, user.url(server))("ls")
    assert told.code == 77, told


# show


async def test_show_of_a_held_name_tells_all_but_the_owner_token(
    operator: Operator, locks: LockClient, make_client: MakeClient, redis: Redis
) -> None:
    """The holder, its number, each waiter in order; what proves ownership, nowhere."""
    one, other = make_client(label="one"), make_client(label="other")
    async with locks.lock("a") as lease, waiting(one, "a"), waiting(other, "a"):
        tokens = [lease.owner_token, *await redis.zrange("aiodlock:{a}:queue", 0, -1)]
        told, text = await operator("show", "a", "--json"), await operator("show", "a")
    found = told.json
    assert (found["key"], found["fencing_token"]) == ("aiodlock:{a}", lease.fencing_token)
    assert 0 <= found["holders"][0]["held_for"] < operators.LIMIT_S
    queue = found["queue"]
    assert [each["holder"].partition(":")[0] for each in queue] == ["one", "other"]
    assert queue[0]["waited"] >= queue[1]["waited"] >= 0
    assert all(0 < each["alive_for"] <= 6.0 for each in queue)
    assert str(lease.fencing_token) in text.out
    assert len(tokens) == 3
    assert not [token for token in tokens if token in told.out + text.out]
    assert all(token.rpartition(":")[0] in text.out for token in tokens)


async def test_show_of_a_waiter_that_is_dead_says_that_its_turn_is_skipped(
    operator: Operator, redis: Redis
) -> None:
    """It stands in the queue until the next poll finds it."""
    world = ByHand(redis)
    await world.granted(A)
    await world.refused(B)
    await world.let_die(B)
    before = await world.state()
    told = await operator("show", "name")
    assert "overdue" in told.out
    (only,) = (await operator("show", "name", "--json")).json["queue"]
    assert only["holder"] == OTHER
    assert only["alive_for"] < 0
    after = await world.state()
    assert after._replace(ttls_ms={}) == before._replace(ttls_ms={})


async def test_show_of_a_free_name_says_that_it_is_free(
    operator: Operator, locks: LockClient
) -> None:
    """With the last fencing token, if it was ever held."""
    async with locks.lock("a") as lease:
        pass
    told = await operator("show", "a")
    assert told.code == 0
    assert "nothing: it is free" in told.out
    assert str(lease.fencing_token) in told.out
    never = (await operator("show", "never", "--json")).json
    assert (never["held"], never["kind"], never["last_fencing_token"]) == (False, "free", None)


async def test_show_of_a_name_that_is_kept_says_who_released_it(
    operator: Operator, locks: LockClient
) -> None:
    """Held by nobody, and not to be had."""
    lease = await locks.lock("tick", hold_at_least=30).try_acquire()
    assert lease is not None
    await lease.release()
    told = await operator("show", "tick")
    assert "released" in told.out
    found = (await operator("show", "tick", "--json")).json
    assert (found["kind"], found["fencing_token"]) == ("kept", lease.fencing_token)


async def test_show_of_another_librarys_lock_shows_no_more_than_the_beginning_of_its_value(
    operator: Operator, redis: Redis
) -> None:
    """That value is what releases it."""
    async with redis.lock("aiodlock:{old}", timeout=30) as theirs:
        value = theirs.local.token.decode()
        told, text = await operator("show", "old", "--json"), await operator("show", "old")
    assert value not in told.out + text.out
    assert told.json["holder"].startswith(value[:8])
    assert told.json["fencing_token"] is None


# wait


async def test_wait_for_a_free_name_ends_at_once_and_takes_nothing(
    operator: Operator, redis: Redis
) -> None:
    """Nothing is left on the server."""
    assert (await operator("wait", "a")).code == 0
    assert await redis.keys("*") == []
    assert (await operator("wait", "a", "-q")).err == ""


async def test_wait_for_a_held_name_ends_75_when_the_time_is_over(
    operator: Operator, locks: LockClient
) -> None:
    """It says whom it waits for."""
    async with locks.lock("a"):
        holder = (await locks.lock("a").inspect()).holder
        told = await operator("wait", "a", "--wait", "0.3", "--json")
        assert told.code == 75
        assert f"waiting for 'a': held by {holder}" in told.err
        assert (told.json["free"], told.json["holder"]) == (False, holder)
        assert told.json["waited"] >= 0.3
        assert (await operator("wait", "a", "--wait", "0", "-q")).err == ""


async def test_wait_for_a_held_name_ends_when_it_is_released(
    operator: Operator, locks: LockClient
) -> None:
    """Long before its ttl is over."""
    lease = await locks.lock("a", ttl=3600).acquire()
    told = asyncio.create_task(operator("wait", "a", "--wait", "20"))
    await asyncio.sleep(0.2)  # A release that comes first is well, too.
    await lease.release()
    assert (await told).code == 0


async def test_wait_for_a_name_that_only_the_dead_wait_for_ends(
    operator: Operator, redis: Redis
) -> None:
    """A waiter who is alive is about to have it; a dead one never will."""
    world = ByHand(redis)
    await world.granted(A)
    await world.refused(B)
    await world.let_expire()
    told = await operator("wait", "name", "--wait", "0")
    assert (told.code, "waited for" in told.err) == (75, True)
    await world.let_die(B)
    assert (await operator("wait", "name", "--wait", "0")).code == 0


async def test_wait_over_an_outage_goes_on(
    operator: Operator, server: LockServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Who does not answer is asked again; here it comes back empty."""
    await redis.set("aiodlock:{a}", "x", px=60_000)
    waiting = asyncio.create_task(operator("wait", "a", "-v", "--wait", "20"))
    await until(lambda: "waiting for" in operator.heard(), operators.LIMIT_S)
    server.kill()
    await until(lambda: "asking again" in caplog.text, operators.LIMIT_S)
    server.restart()
    assert (await waiting).code == 0


async def test_wait_for_a_key_that_is_no_lock_ends_at_once(
    operator: Operator, redis: Redis
) -> None:
    """It could wait for ever: no lock comes of a list."""
    await redis.rpush("aiodlock:{a}", "x")
    told = await operator("wait", "a")
    assert (told.code, "no lock but a list" in told.err) == (70, True)


@pytest.mark.parametrize(
    ("ttl_left", "pause"), [(None, 2.0), (3600.0, 2.0), (15.0, 1.0), (0.03, 0.035), (0.6, 0.1)]
)
def test_pause_of_a_wait_is_bounded_and_never_beyond_the_end(
    ttl_left: float | None, pause: float
) -> None:
    """At most ten questions a second, at least one in two seconds."""
    assert pause_s(held_for(Grant(A, ONE, ttl_left, 7))) == pytest.approx(pause)


def test_pause_of_a_wait_for_nobody_is_short_but_not_nothing() -> None:
    """Where only waiters are, or no server answers."""
    assert pause_s(held_for()) == 0.1
    assert pause_s(None) == 0.5


def held_for(*grants: Grant) -> Standing:
    """What a server tells of a name."""
    return Standing("a", "aiodlock:{a}", Look(0, None, grants, len(grants), (), 0, None))


# Breaking


async def test_break_with_yes_hands_the_lock_to_the_next_waiter(
    operator: Operator, locks: LockClient, make_client: MakeClient
) -> None:
    """Who has it then is told."""
    other = make_client(label="other")
    lease = await locks.lock("a", auto_extend=False).acquire()
    async with waiting(other, "a"):
        told = await operator("break", "a", "--yes", "--json")
        assert told.code == 0
        info = await locks.lock("a").inspect()
        assert info.holder is not None
        assert info.holder.startswith("other:")
    await lease.release()
    assert [each["fencing_token"] for each in told.json["broken"]] == [lease.fencing_token]
    assert told.json["now"]["holder"] == info.holder
    assert lease.owner_token not in told.out + told.err


async def test_break_without_a_terminal_and_without_yes_is_a_usage_error(
    operator: Operator, locks: LockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is not asked must have said so."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    async with locks.lock("a") as lease:
        told = await operator("break", "a")
        await lease.extend()
    assert told.code == 64
    assert "--yes" in told.err


async def test_break_of_a_name_that_nobody_holds_says_so(operator: Operator) -> None:
    """An ending of its own."""
    told = await operator("break", "a", "--yes")
    assert (told.code, "nothing to break" in told.err) == (3, True)
    assert (await operator("break", "a", "--yes", "--json")).json["broken"] == []


class Person:
    """Answers the question, after having done something else."""

    def __init__(self, answer: str, meanwhile: Any) -> None:
        self._answer, self._meanwhile = answer, meanwhile

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        self._meanwhile()
        return self._answer


@pytest.mark.parametrize("value", [f"{B}/1795992912345678", "another library's"])
@pytest.mark.parametrize("shown", [f"{A}/1795992912345600", "a library's"])
async def test_break_of_a_grant_that_ended_meanwhile_leaves_the_next_one_alone(
    operator: Operator,
    server: LockServer,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    shown: str,
    value: str,
) -> None:
    """Another holds when the answer comes: an ending of its own."""
    await redis.set("aiodlock:{a}", shown, px=60_000)
    with BlockingRedis.from_url(server.url) as admin:
        swap = lambda: admin.set("aiodlock:{a}", value, px=60_000)  # noqa: E731
        monkeypatch.setattr(sys, "stdin", Person("y\n", swap))
        told = await operator("break", "a")
    assert told.code == 4
    assert "nothing was broken" in told.err
    assert await redis.get("aiodlock:{a}") == value


async def test_break_of_a_grant_that_was_released_meanwhile_says_so(
    operator: Operator, server: LockServer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody holds when the answer comes."""
    await redis.set("aiodlock:{a}", f"{A}/1795992912345600", px=60_000)
    with BlockingRedis.from_url(server.url) as admin:
        monkeypatch.setattr(sys, "stdin", Person("yes\n", lambda: admin.delete("aiodlock:{a}")))
        assert (await operator("break", "a")).code == 3


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "maybe\n"])
async def test_break_that_is_not_agreed_to_breaks_nothing(
    operator: Operator, locks: LockClient, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """No, nothing, Ctrl-D."""
    monkeypatch.setattr(sys, "stdin", Person(answer, lambda: None))
    async with locks.lock("a") as lease:
        assert (await operator("break", "a")).code == 1
        assert (await operator("break", "a", "--json")).json["broken"] == []
        await lease.extend()


async def test_break_of_a_name_that_many_wait_for_shows_some_of_them(
    operator: Operator, redis: Redis
) -> None:
    """The question stays in sight; `show` has them all."""
    world = ByHand(redis)
    await world.granted(A)
    for number in range(7):
        await world.refused(f"{OTHER}:{number + 1}")
    told, shown = await operator("break", "name", "--yes"), await operator("show", "name")
    assert (told.err.count(OTHER), "and 2 more" in told.err) == (5 + 1, True)  # One has it now.
    assert shown.out.count(OTHER) == 1 + 6


async def test_break_of_another_librarys_lock_breaks_it(operator: Operator, redis: Redis) -> None:
    """By its value, of which only the beginning is shown."""
    theirs = redis.lock("aiodlock:{old}", timeout=30)
    assert await theirs.acquire()
    told = await operator("break", "old", "--yes")
    assert told.code == 0
    assert theirs.local.token.decode() not in told.err
    assert await redis.get("aiodlock:{old}") is None


async def test_break_of_a_key_that_is_no_lock_leaves_it(operator: Operator, redis: Redis) -> None:
    """It may be somebody's data."""
    await redis.hset("aiodlock:{hash}", "field", "value")
    told = await operator("break", "hash", "--yes")
    assert (told.code, "no lock but a hash" in told.err) == (70, True)
    assert await redis.hgetall("aiodlock:{hash}") == {"field": "value"}


async def test_break_of_a_name_that_is_kept_frees_it(operator: Operator, locks: LockClient) -> None:
    """An operator may let a job run once more."""
    lease = await locks.lock("tick", hold_at_least=30).try_acquire()
    assert lease is not None
    await lease.release()
    assert (await operator("break", "tick", "--yes")).code == 0
    assert not (await locks.lock("tick").inspect()).held


async def test_break_by_a_fencing_token_that_does_not_stand_breaks_nothing(
    operator: Operator, locks: LockClient
) -> None:
    """For scripts: what `show` showed a while ago, or nothing."""
    async with locks.lock("a", auto_extend=False) as lease:
        number = str(lease.fencing_token - 1)
        told = await operator("break", "a", "--yes", "--fencing-token", number)
        assert told.code == 4
        assert f"not broken: no grant has the fencing token {number}" in told.err
        assert f"fencing token: {lease.fencing_token}" in told.err
        await lease.extend()
        told = await operator("break", "a", "--yes", "--fencing-token", str(lease.fencing_token))
        assert told.code == 0
        assert not (await locks.lock("a").inspect()).held
        await lease.release()


# All of them


@pytest.mark.parametrize("command", ["show", "wait", "break"])
@pytest.mark.parametrize("name", ["", "x" * 513, "\udcff"])
async def test_commands_with_a_name_that_cannot_be_locked_are_a_usage_error(
    operator: Operator, command: str, name: str
) -> None:
    """With what is allowed."""
    told = await operator(command, name)
    assert told.code == 64
    assert "non-empty str of at most 512" in told.err


@pytest.mark.parametrize("argv", [["ls"], ["show", "a"], ["break", "a", "--yes"]])
async def test_commands_without_a_server_end_69_and_show_no_password(
    operator: Operator, argv: list[str]
) -> None:
    """The address, and what was seen."""
    told = await operator(*argv, "--url", "redis://someone:hidden@127.0.0.1:1/0")
    assert told.code == 69
    assert "redis://127.0.0.1:1/0" in told.err
    assert "hidden" not in told.err + told.out


@pytest.mark.parametrize("place", ["someone:hidden@{}/0", "{}/99"])
@pytest.mark.parametrize("argv", [["ls"], ["show", "a"]])
async def test_commands_with_a_login_that_is_refused_end_77_at_once_and_say_so(
    operator: Operator, server: LockServer, argv: list[str], place: str
) -> None:
    """A user, a password, a number of a database: none of them is a missing permission."""
    url = f"redis://{place.format(f'127.0.0.1:{server.port}')}"
    told = await operator(argv[0], "--url", url, *argv[1:])
    assert told.code == 77
    assert "the server refuses this login: " in told.err
    assert "hidden" not in told.err


@pytest.mark.parametrize(
    "argv",
    [
        *(["ls"], ["show", "a"], ["break", "a", "--yes"], ["wait", "a", "--wait", "0.1"]),
        *(["run", "-n", "a", "--", "true"], ["run", "-w", "0.1", "a", "--", "true"]),
    ],
)
async def test_commands_on_a_server_that_never_answers_ask_it_once(
    operator: Operator, argv: list[str]
) -> None:
    """They take as long as one request, not as several one after the other."""
    black_hole = BlackHole()
    server = await asyncio.start_server(black_hole.take, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        told = await operator(argv[0], "--url", f"redis://127.0.0.1:{port}", *argv[1:])
        black_hole.close()
    assert (told.code, black_hole.taken) == (69, 1)
    assert "`aiodlock doctor` says more" in told.err


class BlackHole:
    """Takes connections, and what comes over them, and answers nothing."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def taken(self) -> int:
        """How many."""
        return len(self._writers)

    def take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One more."""
        self._writers.append(writer)

    def close(self) -> None:
        """End all of them."""
        for writer in self._writers:
            writer.close()


async def test_commands_on_a_silent_server_end_69(operator: Operator, server: LockServer) -> None:
    """It keeps its connections and answers nobody."""
    server.pause()
    told = await operator("ls")
    server.resume()
    assert told.code == 69


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "--watch", "job:*"], "a pattern goes before --watch"),
        (["ls", "--watch", "nan"], "must be seconds"),
        (["ls", "--limit", "0"], "must be from 1 to"),
        (["wait", "a", "--wait", "-1"], "at least 0"),
        (["show"], "NAME"),
    ],
)
async def test_commands_with_bad_options_are_a_usage_error(
    operator: Operator, argv: list[str], message: str
) -> None:
    """A sentence, and nothing is asked."""
    told = await operator(*argv)
    assert told.code == 64
    assert message in told.err


# From keys to names


@given(name=st.text(min_size=1, max_size=40), prefix=st.text("ab:*[]\\%?", max_size=5))
def test_name_of_a_key_is_the_name_that_it_was_made_from(name: str, prefix: str) -> None:
    """Both ways, of the lock and of its queue; the other keys are of no name."""
    keys = _names.keys(prefix, name)
    assert name_of(keys.lock, prefix) == name_of(keys.queue, prefix) == name
    assert name_of(keys.fence, prefix) is name_of(keys.alive, prefix) is None


def test_glob_of_a_pattern_escapes_what_scan_takes_for_a_sign() -> None:
    """In the prefix, and in the pattern up to its own first sign."""
    assert glob_of("a*[x]:", "job{:?2*") == "a\\*\\[x\\]:{job%7B:*"
