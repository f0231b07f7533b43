"""Extensions that fall due in one turn of the loop share a call, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from aiodlock import Lease, LeaseLostError, LockClient, LostReason, NotAllowedError
from aiodlock._store import _extensions
from aiodlock._store._api import NoAnswer
from aiodlock.testing import LockServer, lock_server
from tests import topologies, wire
from tests.conftest import MakeClient
from tests.proxy import ChaosProxy
from tests.until import until


@asynccontextmanager
async def held(locks: LockClient, count: int, *, ttl: float = 30) -> AsyncIterator[list[Lease]]:
    """As many leases, each of its own name, with every script known to the server."""
    leases = await asyncio.gather(*(locks.lock(f"n{i}", ttl=ttl).acquire() for i in range(count)))
    await leases[0].extend()
    yield leases
    await asyncio.gather(*(lease.release() for lease in leases))


async def calls(redis: Redis) -> int:
    """How many script calls the server has had."""
    return await wire.calls(redis, "evalsha") + await wire.calls(redis, "eval")


async def ttls_ms(redis: Redis, leases: list[Lease]) -> list[int]:
    """What is left of the keys."""
    async with redis.pipeline() as pipe:
        for lease in leases:
            pipe.pttl(f"aiodlock:{{{lease.name}}}")
        return list(await pipe.execute())


async def test_extensions_of_one_turn_share_calls_of_a_hundred(
    locks: LockClient, redis: Redis
) -> None:
    """250 leases are three calls, and each gets its own answer."""
    async with held(locks, 250) as leases:
        before = await calls(redis)
        left = await asyncio.gather(*(lease.extend(60) for lease in leases))
        assert await calls(redis) - before == 3
        assert all(58 < seconds < 60 for seconds in left)
        assert all(59_000 < ms <= 60_000 for ms in await ttls_ms(redis, leases))


async def test_extensions_by_different_ttls_do_not_mix(locks: LockClient, redis: Redis) -> None:
    """One call for each ttl that is asked for; a lease is never shortened by its neighbour."""
    async with held(locks, 6) as leases:
        before = await calls(redis)
        await asyncio.gather(*(lease.extend(40 + 20 * (i % 3)) for i, lease in enumerate(leases)))
        assert await calls(redis) - before == 3
        wanted = [40_000, 60_000, 80_000] * 2
        found = await ttls_ms(redis, leases)
        assert all(want - 1000 < ms <= want for want, ms in zip(wanted, found, strict=True))


async def test_watchdogs_that_fall_due_together_share_calls(
    locks: LockClient, redis: Redis
) -> None:
    """200 leases through three extensions each need far fewer than 600 calls."""
    async with held(locks, 200, ttl=1.5) as leases:
        before = await calls(redis)
        await asyncio.sleep(1.6)
        assert await calls(redis) - before <= 150
        assert all(lease.is_held for lease in leases)


async def test_lease_that_is_gone_costs_its_neighbours_nothing(
    locks: LockClient, redis: Redis
) -> None:
    """Deleted, stolen, or a list: told to its holder; the others of the call live on."""
    async with held(locks, 5) as leases:
        await redis.delete("aiodlock:{n0}", "aiodlock:{n2}")
        await redis.set("aiodlock:{n1}", "theirs", px=5000)
        await redis.rpush("aiodlock:{n2}", "an item")
        results = await asyncio.gather(*(x.extend(60) for x in leases), return_exceptions=True)
        reasons = [getattr(result, "reason", None) for result in results]
        assert reasons == [LostReason.DELETED, LostReason.STOLEN, LostReason.STOLEN, None, None]
        assert all(ms > 59_000 for ms in await ttls_ms(redis, leases[3:]))
        assert await redis.pttl("aiodlock:{n1}") <= 5000
        await redis.delete("aiodlock:{n2}")


async def test_extension_whose_caller_left_is_not_sent(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis
) -> None:
    """Cancelled in the turn in which it was asked for, with a release behind it: nothing leaves."""
    locks = make_client(proxy.url)
    async with held(locks, 2) as leases:
        seen = proxy.delay_replies(0.0, wire.sha("extend"))
        tasks = [asyncio.create_task(lease.extend()) for lease in leases]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        released = [await lease.release() for lease in leases]
        assert released == [True, True]
        assert await asyncio.gather(*tasks, return_exceptions=True) != []
        assert all(task.cancelled() for task in tasks)
        assert seen.hits == 0


@pytest.mark.parametrize("fault", ["the connection breaks", "the reply is lost"])
async def test_call_that_fails_is_asked_again_by_each(
    make_client: MakeClient, proxy: ChaosProxy, redis: Redis, fault: str
) -> None:
    """A trouble of the shared call is nobody's loss: each goes its own way, in its own time."""
    locks = make_client(proxy.url)
    async with held(locks, 20) as leases:
        if fault == "the reply is lost":
            rule = proxy.drop_replies(1, matching=wire.sha("extend"), close=True)
            left = await asyncio.gather(*(lease.extend(60) for lease in leases))
            assert rule.hits == 1
        else:
            waiting = [asyncio.ensure_future(lease.extend(60)) for lease in leases]
            await asyncio.sleep(0)
            assert proxy.kill_connections() > 0
            left = await asyncio.gather(*waiting)
        assert all(58 < seconds < 60 for seconds in left)
        assert all(ms > 59_000 for ms in await ttls_ms(redis, leases))


async def test_leases_on_a_server_that_stops_are_lost_together_and_in_time(
    make_client: MakeClient, proxy: ChaosProxy
) -> None:
    """A hundred of them: each is told by its own deadline, not by the shared call's end."""
    locks = make_client(proxy.url)
    async with held(locks, 100, ttl=0.6) as leases:
        waits = [asyncio.ensure_future(lease.wait_lost()) for lease in leases]
        proxy.black_hole()
        await until(lambda: all(wait.done() for wait in waits))
        assert {wait.result() for wait in waits} <= {
            LostReason.UNREACHABLE,
            LostReason.LOOP_STALLED,
        }
        with pytest.raises(LeaseLostError):
            leases[0].check()
        proxy.heal(deliver=False)


@pytest.mark.parametrize("command", ["get", "pttl", "pexpire"])
async def test_lease_whose_user_loses_a_permission_is_not_lost(
    server: LockServer, command: str
) -> None:
    """An extension that is forbidden is a trouble that may end: nothing else stands in the key."""
    async with (
        topologies.user(server, "~*", "&*", "+@all") as user,
        LockClient.from_url(user.url(server)) as locks,
        held(locks, 2) as leases,
    ):
        await topologies.ask(server, "ACL", "SETUSER", user.name, f"-{command}")
        for lease in leases:
            with pytest.raises(NotAllowedError):
                await lease.extend(60)
        assert [lease.state for lease in leases] == ["held", "held"]
        await topologies.ask(server, "ACL", "SETUSER", user.name, f"+{command}")
        assert min(await asyncio.gather(*(lease.extend(60) for lease in leases))) > 58


async def test_leases_beside_a_forbidden_one_live_on(server: LockServer) -> None:
    """They fall due with it and share its calls: each of them is asked alone then."""
    async with (
        topologies.user(server, "~*", "&*", "+@all") as user,
        LockClient.from_url(user.url(server)) as locks,
        held(locks, 4, ttl=1.5) as leases,
    ):
        rules = ("resetkeys", *(f"~aiodlock:{{{lease.name}}}*" for lease in leases[1:]))
        await topologies.ask(server, "ACL", "SETUSER", user.name, *rules)
        assert await leases[0].wait_lost() is LostReason.UNREACHABLE
        await asyncio.sleep(0.6)
        assert [lease.state for lease in leases[1:]] == ["held"] * 3
        await topologies.ask(server, "ACL", "SETUSER", user.name, "~*")


async def test_lease_with_little_time_hurries_nobody(locks: LockClient, server: LockServer) -> None:
    """One has 50 ms for its extension, the other 2 s: the server answers after 150."""
    async with held(locks, 2) as (slow, hasty):
        store = slow._store

        async def extend(lease: Lease, within: float) -> object:
            return await store.extend(
                lease._acquisition, lease._value, ttl_ms=60_000, within=within
            )

        server.pause()
        asyncio.get_running_loop().call_later(0.15, server.resume)
        results = await asyncio.gather(
            extend(slow, 2.0), extend(hasty, 0.05), return_exceptions=True
        )
        assert isinstance(results[0], float)
        assert isinstance(results[1], NoAnswer)


async def test_leases_on_a_cluster_of_one_shard_behind_a_plain_client_live_on() -> None:
    """CROSSSLOT says that calls cannot be shared there: each is asked alone from then on."""
    async with lock_server("--cluster-enabled", "yes") as server:
        await topologies.ask(server, "CLUSTER", "ADDSLOTS", *range(16384))

        async def is_well() -> bool:
            return "cluster_state:ok" in str(await topologies.ask(server, "CLUSTER", "INFO"))

        await until(is_well)
        async with LockClient.from_url(server.url) as locks, held(locks, 20, ttl=1.2) as leases:
            await asyncio.sleep(1.5)
            assert [lease.state for lease in leases] == ["held"] * 20
            assert min(await asyncio.gather(*(lease.extend(60) for lease in leases))) > 58


async def test_not_ours_in_a_shared_answer_is_asked_again_alone(
    locks: LockClient, redis: Redis
) -> None:
    """A proxy may have sent the call to the server of its first key; the lease stands elsewhere."""
    async with held(locks, 3) as leases:
        heard = _extensions._Shared.heard

        def of_another_server(call: _extensions._Shared, number: int, reply: Any) -> None:
            heard(call, number, reply if call.is_alone else [*reply[:2], 0, None, 0, None])

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_extensions._Shared, "heard", of_another_server)
            before = await calls(redis)
            left = await asyncio.gather(*(lease.extend(60) for lease in leases))
            assert (
                await calls(redis) - before == 3
            )  # one for all, and one for each that was not there
        assert min(left) > 58
        await redis.delete("aiodlock:{n1}")
        with pytest.raises(LeaseLostError):
            await asyncio.gather(*(lease.extend(60) for lease in leases))


@pytest.mark.parametrize("turns", range(5))
async def test_extension_under_way_when_the_client_closes_ends(
    locks: LockClient, turns: int
) -> None:
    """Whichever step it has come to: nobody waits for ever."""
    async with held(locks, 2) as leases:
        extending = [asyncio.ensure_future(lease.extend(60)) for lease in leases]
        for _ in range(turns):
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(locks.aclose())
        async with asyncio.timeout(5):
            results = await asyncio.gather(*extending, return_exceptions=True)
            await closing
    assert all(isinstance(result, float | LeaseLostError | RuntimeError) for result in results)
