"""The records under `aiodlock`: none unless they are wanted, each with fields for machines."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from aiodlock import LeaseLostError, LockClient
from aiodlock.redispy import Lock as DropIn
from aiodlock.testing import LockServer
from tests.conftest import MakeClient
from tests.proxy import ChaosProxy
from tests.until import until

KEY = "aiodlock:{x}"
OF_A_RECORD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record has beyond what every record has."""
    return {name: value for name, value in vars(record).items() if name not in OF_A_RECORD}


@contextmanager
def at(caplog: pytest.LogCaptureFixture, level: int) -> Iterator[list[logging.LogRecord]]:
    """The records of aiodlock from that level up."""
    caplog.clear()
    with caplog.at_level(level, "aiodlock"):
        yield caplog.records


async def test_log_of_a_lost_lease_says_which_and_why(
    locks: LockClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Once."""
    with at(caplog, logging.INFO) as records:
        lease = await locks.lock("x", ttl=0.1, auto_extend=False).acquire()
        await lease.wait_lost()
    (record,) = records
    assert fields(record) == {
        "lock_name": "x",
        "lock_holder": lease.holder,
        "lock_fencing_token": lease.fencing_token,
        "lock_reason": "EXPIRED",
    }
    await lease.release()


async def test_log_of_a_wait_for_a_key_without_a_ttl_says_who_holds_it(
    locks: LockClient, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It would never end."""
    await redis.set(KEY, "somebody else")
    with at(caplog, logging.WARNING) as records:
        assert await locks.lock("x").try_acquire(wait_timeout=0.05) is None
    (record,) = records
    assert record.levelno == logging.WARNING
    found = fields(record)
    assert 0 <= found.pop("lock_waited") < 5
    assert found == {
        "lock_name": "x",
        "lock_holder": "somebody else",
        "lock_ttl_left": None,
        "lock_waiters": 1,
    }


async def test_log_of_a_release_that_failed_says_of_which_lease(
    make_client: MakeClient, proxy: ChaosProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The work was done under the lock; its ttl frees it."""
    with at(caplog, logging.WARNING) as records:
        async with make_client(proxy.url, request_timeout=0.1).lock("x") as lease:
            proxy.black_hole()
        (record,) = [record for record in records if "release of" in record.message]
    assert fields(record) == {
        "lock_name": "x",
        "lock_holder": lease.holder,
        "lock_fencing_token": lease.fencing_token,
    }


async def test_log_of_a_clean_up_that_failed_says_of_which_lock(
    make_client: MakeClient, proxy: ChaosProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a waiter that gave up while the server was away."""
    locks = make_client(proxy.url, request_timeout=0.1)
    async with locks.lock("warm"):
        pass
    with at(caplog, logging.WARNING) as records:
        waiting = asyncio.create_task(locks.lock("x").acquire())
        proxy.black_hole()
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: records)
    assert records[0].message.startswith("giving up 'x' failed: ")
    assert fields(records[0]) == {"lock_name": "x"}


@pytest.mark.parametrize(("key", "name"), [("x", "x"), (b"x\xff", r"x\xff"), (7, "7")])
async def test_log_of_the_drop_in_says_of_which_key(
    proxy: ChaosProxy, caplog: pytest.LogCaptureFixture, key: Any, name: str
) -> None:
    """That it has no timeout; that what is left of a failed request could not be cleared away."""
    async with Redis.from_url(proxy.url, socket_timeout=0.1) as far:
        lock = far.lock(key, lock_class=DropIn)
        proxy.black_hole()
        with at(caplog, logging.WARNING) as records:
            with pytest.raises(RedisTimeoutError):
                await lock.acquire()
            lock.local.token = b"mine"
            releasing = asyncio.create_task(lock.release())
            await asyncio.sleep(0)
            releasing.cancel()
            await asyncio.wait([releasing])
            await until(lambda: len(records) == 3)
    assert [record.message.partition(": ")[0] for record in records] == [
        f"the lock {name!r} has no timeout",
        f"giving up {name!r} failed",
        f"releasing {name!r} failed",
    ]
    assert [fields(record) for record in records] == [{"lock_name": name}] * 3


async def test_log_at_debug_has_each_state_of_an_acquisition(
    locks: LockClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss has its own record, at INFO, and no second one."""
    with at(caplog, logging.DEBUG) as records:
        async with locks.lock("x", ttl=5) as lease:
            await lease.extend()
            assert await locks.lock("x").try_acquire() is None
        with pytest.raises(LeaseLostError):
            async with locks.lock("x", ttl=5) as lease:
                await locks.lock("x").break_lock()
                await lease.extend()
    assert [record.message for record in records] == [
        "waiting: 'x'",
        "acquired: 'x'",
        "extended: 'x'",
        "waiting: 'x'",
        "not acquired: 'x'",
        "released: 'x'",
        "waiting: 'x'",
        "acquired: 'x'",
        f"lost the lease of 'x': {lease_reason()}",
    ]
    ours = [fields(record) for record in records[:3]]
    assert len({found["lock_acquisition"] for found in ours}) == 1
    assert ours[1] == {
        "lock_name": "x",
        "lock_kind": "lock",
        "lock_holder": lease.holder,
        "lock_fencing_token": ours[1]["lock_fencing_token"],
        "lock_acquisition": ours[0]["lock_acquisition"],
        "lock_waited": ours[1]["lock_waited"],
        "lock_held": ours[1]["lock_held"],
    }


def lease_reason() -> str:
    """Why a lease was lost whose lock was broken."""
    return "its key was deleted before its time was over"


async def test_log_above_debug_makes_no_event_of_an_acquisition(locks: LockClient) -> None:
    """So that it costs nothing."""
    assert locks._audience.begin("x", "lock", "us") is None


def test_log_without_any_configuration_says_nothing(server: LockServer) -> None:
    """Not even a loss, or a warning, reaches stderr."""
    code = f"""
import asyncio
from redis.asyncio import Redis
from aiodlock import LockClient

async def main():
    url = {server.url!r}
    async with LockClient.from_url(url) as locks, Redis.from_url(url) as redis:
        lease = await locks.lock("x", ttl=0.1, auto_extend=False).acquire()
        print(await lease.wait_lost())
        await lease.release()
        await redis.set({KEY!r}, "somebody else")
        print(await locks.lock("x").try_acquire(wait_timeout=0.05))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("LostReason.EXPIRED\nNone\n", "")
