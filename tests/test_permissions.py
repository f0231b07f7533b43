"""What a user must be allowed: no less, no more, and no lock for whom could not give it back."""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from aiodlock import LockClient, NotAllowedError, _store
from aiodlock.testing import LockServer
from tests import topologies, wire
from tests.keys import leftovers
from tests.permissions import LEAST_PERMISSIONS
from tests.topologies import ask
from tests.until import until

SOON_S = 1.0

TTL_S = 1.0
"""Short, for a waiter without messages polls three times in it."""

MESSAGES = ("&aiodlock:*", "+publish", "+subscribe")
"""Without one of these waiters poll; without any other of the least nothing is locked."""


@asynccontextmanager
async def client(
    server: LockServer, *rules: str, prefix: str = "aiodlock:", path: str = ""
) -> AsyncIterator[LockClient]:
    """A client of a user who may do what *rules* say, and nothing else."""
    async with (
        topologies.user(server, *rules) as user,
        LockClient.from_url(user.url(server) + path, prefix=prefix, ttl=TTL_S) as locks,
    ):
        yield locks


def naming(word: str) -> str:
    """A pattern for a refusal that names *word*; Redis 6.2 and 7.0 do not say what a script may."""
    return rf"{word}|script can't run this command or subcommand"


def least(without: str) -> list[str]:
    """The least permissions, but one."""
    assert without in LEAST_PERMISSIONS
    return [rule for rule in LEAST_PERMISSIONS if rule != without]


async def use(locks: LockClient, others: LockClient) -> None:
    """All that a lock can do, between a client and another one: held, extended, handed both ways,
    looked at, broken.
    """
    for holder, waiter in ((locks, others), (others, locks)):
        lease = await holder.lock("a").acquire(wait_timeout=5)
        waiting = asyncio.create_task(waiter.lock("a").acquire(wait_timeout=5))
        await until(functools.partial(waiters, holder, 1))
        assert await lease.extend() > TTL_S / 2
        assert await lease.release() is True
        next_lease = await waiting
        assert next_lease.fencing_token > lease.fencing_token
        assert await next_lease.release() is True
    broken = await others.lock("a").acquire(wait_timeout=5)
    assert await locks.lock("a").break_lock(fencing_token=broken.fencing_token) is True
    assert await broken.release() is False


async def waiters(locks: LockClient, n: int) -> bool:
    """Whether so many wait for "a"."""
    return (await locks.lock("a").inspect()).waiters == n


async def test_user_with_the_least_permissions_can_do_everything(
    server: LockServer, locks: LockClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation, every script sent by its text first, without a word in the log."""
    await ask(server, "SCRIPT", "FLUSH")
    async with client(server, *LEAST_PERMISSIONS) as ours:
        await use(ours, locks)
    assert wire.warnings_of(caplog) == []


async def test_user_with_the_least_permissions_can_share(
    server: LockServer, locks: LockClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers, a writer and permits need nothing more than a lock does."""
    await ask(server, "SCRIPT", "FLUSH")
    async with client(server, *LEAST_PERMISSIONS) as ours:
        for holder, waiter in ((ours, locks), (locks, ours)):
            lease = await holder.writer("a").acquire(wait_timeout=5)
            waiting = asyncio.create_task(waiter.reader("a").acquire(wait_timeout=5))
            await until(functools.partial(reader_waits, holder))
            assert await lease.extend() > TTL_S / 2
            await lease.downgrade()
            assert await (await waiting).release() is True
            assert await lease.release() is True
            permit = await holder.semaphore("s", permits=2).acquire(wait_timeout=5)
            assert await waiter.semaphore("s", permits=2).break_lock() is True
            assert await permit.release() is False
    assert wire.warnings_of(caplog) == []


async def reader_waits(locks: LockClient) -> bool:
    """Whether one waits to read "a"."""
    return (await locks.reader("a").inspect()).waiters == 1


@pytest.mark.parametrize("missing", [rule for rule in LEAST_PERMISSIONS if rule not in MESSAGES])
@pytest.mark.parametrize("cache", ["cold", "warm"])
async def test_user_without_one_of_the_least_permissions_gets_no_lock(
    server: LockServer, redis: Redis, missing: str, cache: str
) -> None:
    """Refused at once, naming what is missing, and nothing stands on the server.

    Also for what only a release or a wait needs: nobody gets what they could not give back. Also
    while the scripts are in the server's cache, for it can be emptied before the release.
    """
    if cache == "cold":
        await ask(server, "SCRIPT", "FLUSH")
    else:
        async with (
            LockClient.from_url(server.url, ttl=TTL_S) as locks,
            client(server, *LEAST_PERMISSIONS) as others,
        ):
            await use(locks, others)
    async with client(server, *least(missing)) as ours:
        started_at = time.monotonic()
        word = "key" if missing.startswith("~") else rf"\b{missing[1:]}\b"
        with pytest.raises(NotAllowedError, match=naming(word)):
            await ours.lock("a").acquire(wait_timeout=20)
        assert time.monotonic() - started_at < SOON_S
        with pytest.raises(NotAllowedError, match=naming(word)):
            await ours.lock("a").try_acquire()
        assert await leftovers(redis) == []


@pytest.mark.parametrize("missing", MESSAGES)
async def test_user_without_messages_polls_after_one_warning(
    server: LockServer, locks: LockClient, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    """All works, both ways, more slowly; the log says it once, with the server's own words.

    `&...` missing is what a user has whom nobody gave channels, since Redis 7.
    """
    async with client(server, *least(missing)) as ours:
        for _ in range(2):
            await use(ours, locks)
    assert len(wire.warnings_of(caplog)) == 1, wire.warnings_of(caplog)
    word = "channel" if missing.startswith("&") else rf"{missing[1:]}"
    assert word in wire.warnings_of(caplog)[0]


async def test_user_of_another_prefix_is_not_allowed(server: LockServer, redis: Redis) -> None:
    """The prefix is in every key and channel: with that one allowed it works, else not at all."""
    rules = [rule.replace("aiodlock:", "app1:locks:") for rule in LEAST_PERMISSIONS]
    async with client(server, *rules) as strangers:
        with pytest.raises(NotAllowedError, match="key"):
            await strangers.lock("a").acquire(wait_timeout=20)
    async with (
        client(server, *rules, prefix="app1:locks:") as ours,
        client(server, *rules, prefix="app1:locks:") as others,
    ):
        await use(ours, others)
    assert [key async for key in redis.scan_iter()] == ["app1:locks:{a}:fence"]


async def test_user_who_may_not_select_a_database_is_not_allowed_there(server: LockServer) -> None:
    """A database other than 0 needs `+select`, and nothing more."""
    async with client(server, *LEAST_PERMISSIONS, path="/3") as strangers:
        with pytest.raises(NotAllowedError, match="select"):
            await strangers.lock("a").acquire(wait_timeout=20)
    rules = (*LEAST_PERMISSIONS, "+select")
    async with client(server, *rules, path="/3") as ours, client(server, *rules, path="/3") as two:
        await use(ours, two)


@pytest.mark.parametrize(
    ("rules", "word"),
    [
        (("-@scripting",), "eval"),
        (("+evalsha", "-eval"), "eval"),
        (("-@write",), "set"),
        (("-@dangerous", "-@admin", "-@blocking"), None),
        (("-script",), None),
    ],
)
async def test_user_with_a_common_restriction(
    server: LockServer, locks: LockClient, rules: tuple[str, ...], word: str | None
) -> None:
    """What administrators take away from everybody (case 077): it works wholly, or not at all."""
    async with client(server, "+@all", "~*", "&*", *rules) as ours:
        if word is None:
            await use(ours, locks)
            return
        with pytest.raises(NotAllowedError, match=naming(word)):
            await ours.lock("a").acquire(wait_timeout=20)


async def test_user_who_may_only_look_can_inspect(server: LockServer, locks: LockClient) -> None:
    """For a dashboard: who holds, without the right to hold."""
    rules = ("~aiodlock:*", "+eval", "+evalsha", "+get", "+pttl", "+zcard")
    async with client(server, *rules) as onlooker, locks.lock("a") as lease:
        assert (await onlooker.lock("a").inspect()).fencing_token == lease.fencing_token
        with pytest.raises(NotAllowedError):
            await onlooker.lock("a").break_lock()
        with pytest.raises(NotAllowedError):
            await onlooker.lock("b").try_acquire()
        await lease.extend()


async def test_user_whose_rights_shrink_while_it_holds_is_told(
    server: LockServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A release that is refused raises; at the end of a body it is a warning: the ttl frees it."""
    async with (
        topologies.user(server, *LEAST_PERMISSIONS) as user,
        LockClient.from_url(user.url(server), ttl=TTL_S) as locks,
    ):
        lease = await locks.lock("a").acquire(wait_timeout=5)
        async with locks.lock("b"):
            await ask(server, "ACL", "SETUSER", user.name, "-del")
        assert len(wire.warnings_of(caplog)) == 1
        assert re.search(naming("del"), wire.warnings_of(caplog)[0])
        with pytest.raises(NotAllowedError, match=naming("del")):
            await lease.release()
        await until(lambda: is_free(redis), 3 * TTL_S)


async def is_free(redis: Redis) -> bool:
    """Whether nothing is locked."""
    return await leftovers(redis) == []


def test_least_permissions_name_no_command_that_no_script_uses() -> None:
    """Whoever takes a command out of the scripts takes it out of this list as well."""
    lua = Path(_store.__file__).parent / "lua"
    scripts = "\n".join(path.read_text() for path in lua.glob("*.lua"))
    commands = [rule[1:] for rule in LEAST_PERMISSIONS if rule.startswith("+")]
    for command in set(commands) - {"eval", "evalsha", "subscribe"}:
        assert f"call('{command.upper()}'" in scripts, command
