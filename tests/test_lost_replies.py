"""Replies that are lost, requests that arrive twice or after their end: nothing is guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LockClient, LockTimeout, ServerUnreachable
from aiodlock.testing import LockServer
from tests import wire
from tests.keys import leftovers
from tests.proxy import ChaosProxy, Fault
from tests.until import until

SLACK_S = 0.25
"""What a loaded machine may add to a bound of the contract."""
REQUEST_TIMEOUT_S = 0.6
LATE_S = 0.33
"""Half of that, and the time in which a copy may be sent elsewhere."""

Damage = Callable[[ChaosProxy, str], Fault]


def reset(proxy: ChaosProxy, script: str) -> Fault:
    """The server did it; instead of its reply comes a reset."""
    return wire.lose(proxy, script)


def silent(proxy: ChaosProxy, script: str) -> Fault:
    """The server did it; the connection brings nothing any more."""
    return wire.stall(proxy, script)


def late(proxy: ChaosProxy, script: str) -> Fault:
    """The reply comes, half a `request_timeout` later."""
    return proxy.delay_replies(LATE_S, wire.sha(script), 1)


def unsent(proxy: ChaosProxy, script: str) -> Fault:
    """The request never arrives, nor what is behind it."""
    return proxy.delay_requests(wire.FOR_EVER_S, wire.sha(script), 1)


EVERY_DAMAGE = (reset, silent, late, unsent)


@dataclass
class Case:
    """One client behind a proxy of its own, with keys of its own."""

    proxy: ChaosProxy
    locks: LockClient
    prefix: str
    damage: Damage

    def key(self, name: str = "a") -> str:
        """The key of a name that needs no escapes."""
        return f"{self.prefix}{{{name}}}"

    def strike(self, script: str) -> Fault:
        """Damage the next call of *script*."""
        return self.damage(self.proxy, script)

    def others(self, **options: Any) -> LockClient:
        """Another client, on the server itself, for the same keys."""
        server_url = f"redis://127.0.0.1:{self.proxy.server_port}"
        return LockClient.from_url(server_url, prefix=self.prefix, **options)


@asynccontextmanager
async def case(
    server: LockServer, prefix: str = "", damage: Damage = reset, **options: Any
) -> AsyncIterator[Case]:
    """A connected client that has used every script."""
    options = {"request_timeout": REQUEST_TIMEOUT_S, "prefix": f"{prefix}:", **options}
    async with (
        ChaosProxy(server.port) as proxy,
        LockClient.from_url(proxy.url, **options) as locks,
    ):
        async with locks.lock("warm") as lease:
            await lease.extend()
            await locks.lock("warm").inspect()
        try:
            yield Case(proxy, locks, f"{prefix}:", damage)
        finally:
            proxy.heal()


async def for_each(
    server: LockServer,
    scenario: Callable[[Case], Awaitable[object]],
    damages: Iterable[Damage] = EVERY_DAMAGE,
    **options: Any,
) -> None:
    """Run *scenario* under each damage, all at the same time."""

    async def run(damage: Damage) -> None:
        async with case(server, getattr(damage, "__name__", ""), damage, **options) as prepared:
            await scenario(prepared)

    await wire.at_once({repr(damage): run(damage) for damage in damages})


async def stands(redis: Redis, case: Case, lease: Lease) -> bool:
    """Whether the server has this grant, with a TTL."""
    value = await redis.get(case.key(lease.name))
    is_ours = value == f"{lease.owner_token}/{lease.fencing_token}"
    return is_ours and int(await redis.pttl(case.key(lease.name))) > 0


async def left_of(redis: Redis, case: Case) -> list[str]:
    """The keys that nobody should need any more."""
    return await leftovers(redis, case.prefix, ignoring_tombstones=True)


# Acquire.


@pytest.mark.parametrize("wait_timeout", [0.0, 2.0])
async def test_acquire_whose_reply_is_lost_is_granted(
    server: LockServer, redis: Redis, wait_timeout: float
) -> None:
    """Asked again, the server says that it is ours; after the release nothing is left."""

    async def scenario(case: Case) -> None:
        fault = case.strike("acquire")
        lease = await case.locks.lock("a", ttl=5).acquire(wait_timeout=wait_timeout)
        assert fault.hits == 1
        assert await stands(redis, case, lease)
        assert await lease.release()
        assert await left_of(redis, case) == []

    await for_each(server, scenario)


async def test_second_copy_is_not_sent_once_the_first_was_answered(
    server: LockServer, redis: Redis
) -> None:
    """The reply comes while a connection for the copy is made; the lease is over before that is."""
    async with case(server, request_timeout=0.8) as slow:
        slow.proxy.delay_replies(0.5, wire.sha("acquire"), 1)  # the copy is thought of at 0.4
        slow.proxy.delay_replies(0.3, b"HELLO")
        before = slow.proxy.connections
        lease = await slow.locks.lock("a", ttl=20).acquire(wait_timeout=0)
        assert slow.proxy.connections == before + 1
        assert await lease.release()
        await until(lambda: slow.proxy.open_connections == 1)  # what was borrowed is given back
        assert await left_of(redis, slow) == []


@pytest.mark.parametrize("wait_timeout", [0.0, 2.0])
async def test_first_acquire_of_a_client_whose_first_reply_is_lost_is_granted(
    server: LockServer, redis: Redis, wait_timeout: float
) -> None:
    """Whatever it asks first, losing the reply to that is like losing any other."""

    async def scenario(case: Case) -> None:
        async with LockClient.from_url(
            case.proxy.url, prefix=case.prefix, request_timeout=REQUEST_TIMEOUT_S
        ) as locks:
            fault = case.strike("")
            lease = await locks.lock("a", ttl=5).acquire(wait_timeout=wait_timeout)
            assert fault.hits == 1
            assert await stands(redis, case, lease)
            assert await lease.release()

    await for_each(server, scenario, (first_lost, first_silent))


def first_lost(proxy: ChaosProxy, script: str) -> Fault:
    """The reply to the first script of any kind is a reset."""
    return proxy.drop_replies(1, b"EVAL", close=True)


def first_silent(proxy: ChaosProxy, script: str) -> Fault:
    """There is none."""
    return proxy.delay_replies(wire.FOR_EVER_S, b"EVAL", 1)


@pytest.mark.parametrize("wait_timeout", [0.0, 3.0])
async def test_grant_that_arrives_after_its_ttl_is_not_believed(
    server: LockServer, redis: Redis, wait_timeout: float
) -> None:
    """It is over when its reply comes; asked again, the lock is granted anew."""
    async with case(server, request_timeout=2) as slow:
        fault = slow.proxy.delay_replies(0.4, wire.sha("acquire"), 1)
        lease = await slow.locks.lock("a", ttl=0.3).acquire(wait_timeout=wait_timeout)
        assert fault.hits == 1
        assert lease.is_held
        assert await stands(redis, slow, lease)
        assert await lease.release()


async def test_grants_that_all_arrive_after_their_ttl_are_given_up(
    server: LockServer, redis: Redis
) -> None:
    """On a server slower than the ttl there is no lease, and nothing is left of the tries."""
    async with case(server, request_timeout=2) as slow:
        slow.proxy.delay_replies(0.3, wire.sha("acquire"))
        with wire.Watch() as watch, pytest.raises(ServerUnreachable):
            await slow.locks.lock("a", ttl=0.15).acquire(wait_timeout=0.8)
        assert 0.8 <= watch.s < 0.8 + 0.1 + SLACK_S
        await slow.locks.aclose()
        assert await left_of(redis, slow) == []


async def test_waiter_whose_grant_is_lost_is_granted(server: LockServer, redis: Redis) -> None:
    """No message comes either: the poll that found the lock free has to be repeated."""

    async def scenario(case: Case) -> None:
        async with case.others() as others:
            theirs = await others.lock("a").acquire()
            case.proxy.drop_messages()
            waiting = asyncio.create_task(case.locks.lock("a").acquire())
            await until(lambda: redis.zcard(f"{case.key()}:queue"))
            await until(lambda: case.proxy.requests["SUBSCRIBE"])
            releasing = asyncio.create_task(theirs.release())
            fault = case.strike("acquire")
            assert await releasing
            lease = await waiting
            assert fault.hits == 1
            assert await stands(redis, case, lease)
            assert lease.fencing_token > theirs.fencing_token
            assert await lease.release()
            assert await left_of(redis, case) == []

    await for_each(server, scenario, ttl=1)


async def test_try_acquire_whose_reply_is_lost_says_none_only_of_a_lock_that_another_has(
    server: LockServer,
) -> None:
    """A refusal that was lost is asked for again, and comes out as it was."""

    async def scenario(case: Case) -> None:
        async with case.others() as others, others.lock("a"):
            fault = case.strike("acquire")
            assert await case.locks.lock("a").try_acquire() is None
            assert fault.hits == 1

    await for_each(server, scenario)


async def test_try_acquire_without_any_answer_raises_and_leaves_nothing(
    server: LockServer, redis: Redis
) -> None:
    """It may have been granted: that is no `None`, and it is given back."""
    async with case(server, damage=silent) as hole:
        fault = hole.strike("acquire")
        trying = asyncio.create_task(hole.locks.lock("a").try_acquire())
        await until(lambda: fault.hits == 1)
        hole.proxy.black_hole()
        with wire.Watch() as watch, pytest.raises(ServerUnreachable):
            await trying
        assert watch.s < REQUEST_TIMEOUT_S + SLACK_S
        assert await redis.exists(hole.key()) == 1
        hole.proxy.heal(deliver=False)
        await until(lambda: gone(redis, hole))
        await hole.locks.aclose()
        assert await left_of(redis, hole) == []


async def gone(redis: Redis, case: Case) -> bool:
    """Whether nobody has it."""
    return int(await redis.exists(case.key())) == 0


# Release.


async def test_release_whose_reply_is_lost_frees_the_lock_without_an_exception(
    server: LockServer, redis: Redis
) -> None:
    """Called by hand: within `request_timeout` it is sent again, over a connection that works."""

    async def scenario(case: Case) -> None:
        lease = await case.locks.lock("a").acquire()
        fault = case.strike("release")
        with wire.Watch() as watch:
            was_removed = await lease.release()
        assert fault.hits == 1
        assert watch.s < REQUEST_TIMEOUT_S + SLACK_S
        # Of two copies that arrive, either may be the one that is heard.
        assert was_removed or case.damage is not unsent
        assert lease.state == "released"
        assert await left_of(redis, case) == []
        assert await lease.release() is False

    await for_each(server, scenario)


async def test_block_whose_release_is_lost_ends_without_an_exception(
    server: LockServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """The body succeeded under the lock; the next one gets it at once."""

    async def scenario(case: Case) -> None:
        async with case.locks.lock("a") as lease:
            fault = case.strike("release")
        assert fault.hits == 1
        assert await lease.wait_lost() is None
        assert await left_of(redis, case) == []

    await for_each(server, scenario)
    assert wire.warnings_of(caplog) == []


async def test_release_whose_reply_is_lost_has_handed_over_once(
    server: LockServer, redis: Redis
) -> None:
    """The second copy must not take the lock from the waiter who got it by the first."""

    async def scenario(case: Case) -> None:
        lease = await case.locks.lock("a").acquire()
        async with case.others() as others:
            waiting = asyncio.create_task(others.lock("a").acquire())
            await until(lambda: redis.zcard(f"{case.key()}:queue"))
            fault = case.strike("release")
            assert await lease.release() is False
            assert fault.hits == 1
            theirs = await waiting
            assert await stands(redis, case, theirs)
            assert await theirs.extend() > 0
            assert await theirs.release()

    await for_each(server, scenario, (reset, silent))


# Extend, inspect.


async def test_extend_whose_reply_is_lost_is_no_loss(server: LockServer, redis: Redis) -> None:
    """Called by hand: within `request_timeout` it is sent again, over a connection that works."""

    async def scenario(case: Case) -> None:
        async with case.locks.lock("a", ttl=5) as lease:
            fault = case.strike("extend")
            assert await lease.extend(20) > 18
            assert fault.hits == 1
            assert lease.state == "held"
            assert await stands(redis, case, lease)

    await for_each(server, scenario)


async def test_watchdog_whose_reply_is_lost_keeps_the_lease(
    server: LockServer, redis: Redis
) -> None:
    """A body of twice the ttl ends with its lock."""

    async def scenario(case: Case) -> None:
        async with case.locks.lock("a", ttl=0.6) as lease:
            fault = case.strike("extend")
            await asyncio.sleep(1.2)
            assert lease.state == "held"
            assert await stands(redis, case, lease)
            assert fault.hits == 1
        assert await left_of(redis, case) == []

    await for_each(server, scenario, request_timeout=2)


async def test_inspect_whose_reply_is_lost_answers(server: LockServer) -> None:
    """It changes nothing, so it is asked again within `request_timeout`."""

    async def scenario(case: Case) -> None:
        async with case.locks.lock("a") as lease:
            fault = case.strike("inspect")
            info = await case.locks.lock("a").inspect()
            assert fault.hits == 1
            assert (info.held, info.fencing_token) == (True, lease.fencing_token)

    await for_each(server, scenario)


# Many.


class EveryNth(Fault):
    """Strikes one of *n* acquires, extensions and releases."""

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__(b"", None, **options)
        self._n = n
        self._seen = 0
        self._scripts = [wire.sha(script) for script in ("acquire", "extend", "release")]

    def strikes(self, frame: bytes) -> bool:
        if not any(script in frame for script in self._scripts):
            return False
        self._seen += 1
        if self._seen % self._n:
            return False
        self.hits += 1
        return True


async def test_cycles_that_lose_every_nth_reply_all_succeed(
    server: LockServer, redis: Redis
) -> None:
    """Acquire, extend and release are hit in turn; tokens grow, nothing is left, none is lost."""

    async def cycles(n: int) -> None:
        async with case(server, f"every {n}") as lossy:
            fault = EveryNth(n, close=True)
            lossy.proxy.reply_drops.append(fault)
            tokens = []
            for _ in range(7):
                async with lossy.locks.lock("a", ttl=5) as lease:
                    assert await lease.extend() > 0
                    assert await stands(redis, lossy, lease)
                    tokens.append(lease.fencing_token)
                assert await left_of(redis, lossy) == []
            assert tokens == sorted(set(tokens))
            assert fault.hits >= 3

    await wire.at_once({f"every {n}": cycles(n) for n in (2, 3, 4, 5, 7)})


# With a reset for fewer than the six callers, who are all in one write at times, they may starve.
@pytest.mark.parametrize("n", [7, 11])
async def test_contenders_that_lose_every_nth_reply_never_overlap(
    server: LockServer, redis: Redis, n: int
) -> None:
    """Two clients of three tasks each, on one name: everyone gets through, one at a time."""
    inside = 0
    tokens: list[int] = []

    async def contend(case: Case, locks: LockClient) -> None:
        nonlocal inside
        for _ in range(3):
            async with locks.lock("a", ttl=5) as lease:
                inside += 1
                assert inside == 1
                tokens.append(lease.fencing_token)
                await asyncio.sleep(0.005)
                assert await stands(redis, case, lease)
                inside -= 1

    async with (
        case(server) as lossy,
        LockClient.from_url(lossy.proxy.url, prefix=lossy.prefix) as second,
    ):
        fault = EveryNth(n, close=True)
        lossy.proxy.reply_drops.append(fault)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            for locks in (lossy.locks, second) * 3:
                group.create_task(contend(lossy, locks))
        assert len(tokens) == 18
        assert tokens == sorted(set(tokens))
        assert fault.hits >= 4
        assert await left_of(redis, lossy) == []


# Ghosts: requests that arrive after their end.


class Ghost:
    """A request that is held back by the proxy, for so long."""

    def __init__(self, case: Case, script: str, seconds: float) -> None:
        self._fault = case.proxy.delay_requests(seconds, wire.sha(script))
        self._seconds = seconds
        self._now = asyncio.get_running_loop().time

    async def is_sent(self) -> None:
        """Until the client has sent it, and believes that it is under way."""
        await until(lambda: self._fault.hits == 1)
        self._due = self._now() + self._seconds

    async def has_come(self, redis: Redis) -> None:
        """Until the server has done it; the proxy runs in this loop, and was due before us."""
        assert self._now() < self._due, "the test was too slow: it has come before"
        await asyncio.sleep(self._due - self._now() + 0.02)
        for _ in range(3):  # what lay in another socket before is done by then
            await redis.ping()


async def test_acquire_that_arrives_after_its_end_takes_nothing(
    server: LockServer, redis: Redis
) -> None:
    """The clean-up went another way and was first: it left word that this one is over."""

    async def scenario(name: str, wait_timeout: float, *, is_cut: bool) -> None:
        async with case(server, name, request_timeout=0.3) as late:
            ghost = Ghost(late, "acquire", 0.9)
            lock = late.locks.lock("a")
            acquiring = asyncio.create_task(lock.try_acquire(wait_timeout=wait_timeout))
            await ghost.is_sent()
            late.proxy.black_hole()
            with pytest.raises(ServerUnreachable):
                await acquiring
            late.proxy.heal()
            if is_cut:
                late.proxy.kill_connections("commands")
            await until(lambda: redis.zcard(f"{late.key()}:alive"))  # the tombstone
            await ghost.has_come(redis)
            assert await left_of(redis, late) == []
            assert await redis.exists(f"{late.key()}:fence") == 0  # never granted to anybody
            async with late.others() as others, others.lock("a").acquire(wait_timeout=0):
                pass

    cases = {"by wait": (0.2, False), "by request": (0.0, False)}
    cases |= {"by wait, cut": (0.2, True), "by request, cut": (0.0, True)}
    await wire.at_once({n: scenario(n, wait, is_cut=cut) for n, (wait, cut) in cases.items()})


async def test_acquire_that_arrives_after_its_cancel_takes_nothing(
    server: LockServer, redis: Redis
) -> None:
    """The release goes behind it, over the same connection, and takes what it took."""
    async with case(server, request_timeout=2) as late:
        ghost = Ghost(late, "acquire", 0.4)
        acquiring = asyncio.create_task(late.locks.lock("a").acquire())
        await ghost.is_sent()
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        assert await redis.exists(f"{late.key()}:fence") == 1  # it did arrive
        assert await leftovers(redis, late.prefix) == []


async def test_acquire_that_arrives_after_its_cancel_and_a_cut_takes_nothing(
    server: LockServer, redis: Redis
) -> None:
    """The connection is cut before the cancel: only the tombstone can hold the copy off."""
    async with case(server, request_timeout=2) as late:
        ghost = Ghost(late, "acquire", 0.6)
        acquiring = asyncio.create_task(late.locks.lock("a").acquire())
        await ghost.is_sent()
        before = late.proxy.connections
        late.proxy.kill_connections("commands")
        await until(lambda: late.proxy.connections > before or acquiring.done())
        if acquiring.done():  # It was quicker than we looked: then it is released.
            await acquiring.result().release()
        else:
            acquiring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await acquiring
        assert await left_of(redis, late) == []
        await ghost.has_come(redis)
        assert await left_of(redis, late) == []


async def test_first_copy_of_an_acquire_that_arrives_after_the_release_takes_nothing(
    server: LockServer, redis: Redis
) -> None:
    """Granted by a second copy over a new connection, held, released; then comes the first."""
    async with case(server, request_timeout=2) as late:
        ghost = Ghost(late, "acquire", 0.7)
        acquiring = asyncio.create_task(late.locks.lock("a").acquire())
        await ghost.is_sent()
        late.proxy.kill_connections("commands")
        lease = await acquiring
        assert await lease.release()
        await ghost.has_come(redis)
        assert await left_of(redis, late) == []


async def test_first_copy_of_an_acquire_that_arrives_during_the_lease_changes_nothing(
    server: LockServer, redis: Redis
) -> None:
    """Same owner token: the grant, its number and its holder stay as they are."""
    async with case(server, request_timeout=2) as late:
        ghost = Ghost(late, "acquire", 0.5)
        acquiring = asyncio.create_task(late.locks.lock("a").acquire())
        await ghost.is_sent()
        late.proxy.kill_connections("commands")
        async with await acquiring as lease:
            await ghost.has_come(redis)
            assert await stands(redis, late, lease)
            assert await redis.exists(f"{late.key()}:queue") == 0
        assert await left_of(redis, late) == []


async def test_try_acquire_whose_first_copy_is_late_does_not_take_the_lock_it_was_refused(
    server: LockServer, redis: Redis
) -> None:
    """Told `None`, the caller is gone; the copy comes when the lock is free again."""
    async with case(server, request_timeout=2) as late, late.others() as others:
        ghost = Ghost(late, "acquire", 0.7)
        trying = asyncio.create_task(late.locks.lock("a").try_acquire())
        await ghost.is_sent()
        async with others.lock("a"):
            late.proxy.kill_connections("commands")
            assert await trying is None
            await until(lambda: redis.zcard(f"{late.key()}:alive"))  # it told of itself
        await ghost.has_come(redis)
        assert await left_of(redis, late) == []


async def test_copy_that_arrives_late_leaves_the_next_holder_alone(
    server: LockServer, redis: Redis
) -> None:
    """The first copy was held back and its connection cut; the second did the work."""

    async def scenario(script: str) -> None:
        async with case(server, script, request_timeout=2) as late, late.others() as others:
            lease = await late.locks.lock("a", ttl=20).acquire()
            ghost = Ghost(late, script, 0.6)
            call = lease.release() if script == "release" else extended(lease)
            calling = asyncio.create_task(call)
            await ghost.is_sent()
            late.proxy.kill_connections("commands")
            assert await calling
            if script == "extend":
                assert await lease.release()
            theirs = await others.lock("a", ttl=5).acquire(wait_timeout=0)
            await ghost.has_come(redis)
            assert await stands(redis, late, theirs)
            assert int(await redis.pttl(late.key())) <= 5000
            assert await theirs.release()

    await wire.at_once({script: scenario(script) for script in ("release", "extend")})


async def extended(lease: Lease) -> bool:
    """Whether an extension by hand left the lease held."""
    return await lease.extend() > 0 and lease.is_held


# Requests that arrive twice.


async def test_requests_that_arrive_twice_are_done_once(server: LockServer, redis: Redis) -> None:
    """Each script is run again, by somebody else, right behind: nothing differs."""
    tap = wire.Tap()
    async with wire.tapped(server.url, tap) as client, LockClient(client) as locks:
        async with locks.lock("warm") as lease:
            await lease.extend()

        async def stands_after_a_copy(lease: Lease) -> bool:
            await wire.command(redis, *last_script(tap.writes))
            value = await redis.get(f"aiodlock:{{{lease.name}}}")
            return bool(value == f"{lease.owner_token}/{lease.fencing_token}")

        lease = await locks.lock("a", ttl=5).acquire()
        assert await stands_after_a_copy(lease)
        assert await leftovers(redis) == ["aiodlock:{a}"]
        await lease.extend()
        assert await stands_after_a_copy(lease)
        assert await lease.release()
        releasing = last_script(tap.writes)
        theirs = await locks.lock("a").acquire()
        await wire.command(redis, *releasing)
        assert await stands_after_a_copy(theirs)
        with pytest.raises(LockTimeout):
            await locks.lock("a").acquire(wait_timeout=0)
        assert await theirs.release()
        assert await leftovers(redis) == []


def last_script(writes: list[bytes]) -> list[bytes]:
    """The last script call among *writes*, as its arguments."""
    parts = next(w for w in reversed(writes) if b"\r\nEVALSHA\r\n" in w).split(b"\r\n")
    assert len(parts) == 2 * int(parts[0][1:]) + 2  # one call, no line break in an argument
    return parts[2::2]
