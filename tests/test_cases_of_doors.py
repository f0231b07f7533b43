"""The cases of other users about servers, clients, frameworks and loops: where each is tested."""

from __future__ import annotations

import importlib

import pytest
from redis.asyncio import Redis

from aiodlock import LeaseLostError, LockClient, LostReason
from aiodlock.testing import lock_server
from tests.until import until

# Numbers of the catalogue (it counts in steps of two from 071, and of two from 104), and the test
# that has the right behaviour as its expectation.
TESTED = {
    71: "test_cluster.test_client_of_a_cluster_locks_any_name",
    73: "test_watchdog.test_bodies_of_five_ttl_keep_their_keys_whatever_happens_twice",
    75: "test_sentinel.test_master_that_is_a_replica_for_a_second_loses_nobody",
    77: "test_permissions.test_user_without_one_of_the_least_permissions_gets_no_lock",
    79: "test_permissions.test_user_with_the_least_permissions_can_do_everything",
    81: "test_cases_of_doors.test_case_081_lock_that_is_evicted_is_told_to_its_holder",
    83: "test_kinds.test_client_of_every_kind_keeps_the_contract",
    104: "test_loops.test_module_level_client_serves_one_loop_after_the_other",
    106: "test_fastapi.test_lock_is_released_where_its_scope_says",
    108: "test_fastapi.test_client_that_hangs_up_in_a_stream_frees_the_lock_within_a_second",
    110: "test_kinds.test_client_of_every_kind_keeps_the_contract",
    112: "test_fastapi.test_requests_for_other_names_run_side_by_side_and_for_one_in_turn",
    114: "test_invariants.test_scripts_as_they_are_keep_the_invariant",
}


def test_every_case_about_doors_is_tested() -> None:
    """No number is forgotten, and each points to a test that exists."""
    assert list(TESTED) == [*range(71, 84, 2), *range(104, 115, 2)]
    for place in TESTED.values():
        module, _, function = place.partition(".")
        assert callable(getattr(importlib.import_module(f"tests.{module}"), function))


@pytest.mark.parametrize("policy", ["volatile-ttl", "allkeys-random"])
async def test_case_081_lock_that_is_evicted_is_told_to_its_holder(policy: str) -> None:
    """A server that is full and may evict locks: DELETED, at the next extension."""
    async with (
        lock_server("--maxmemory", "4mb", "--maxmemory-policy", policy) as server,
        Redis.from_url(server.url) as redis,
        LockClient.from_url(server.url, ttl=0.9) as locks,
    ):
        with pytest.raises(LeaseLostError) as lost:
            async with locks.lock("n") as lease:
                await evict(redis, b"aiodlock:{n}")
                await lease.wait_lost()
                await until(lambda: False)
        assert lost.value.reason == LostReason.DELETED


async def evict(redis: Redis, key: bytes) -> None:
    """Fill the memory until *key* is gone; 64 kB at a time, so 2000 rounds are plenty."""
    for n in range(2000):
        if not await redis.exists(key):
            return
        await redis.set(f"filler {n}", b"x" * 65536, ex=1000)
    raise AssertionError(f"{key!r} is there still")
