"""redis-py's own tests of its async lock, out of its source distribution, run on the drop-in.

`nox -s redispy` fetches the distribution. The file is run as it is, first on redis-py's class, then
on ours in its place; only its fixtures are these here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio.lock
from redis.asyncio import Redis

from aiodlock.redispy import Lock
from aiodlock.testing import LockServer, lock_server

FILE = "tests/test_asyncio/test_lock.py"
# It puts a clock of its own into redis-py's module. What it says of the wait stands in
# tests/test_redispy.py, for both classes.
LEFT_OUT = "TestLock::test_blocking_timeout"
OURS = "AIODLOCK_DROP_IN"

MakeRedis = Callable[..., Awaitable[Redis]]


def pytest_configure(config: pytest.Config) -> None:
    """Before the file imports the class."""
    config.addinivalue_line("markers", "onlynoncluster: needs no cluster")
    if os.environ.get(OURS):
        redis.asyncio.lock.Lock = Lock  # type: ignore[misc]


@pytest.fixture(scope="session")
def lone_server() -> Iterator[LockServer]:
    """A real one."""
    with lock_server() as server:
        yield server


@pytest_asyncio.fixture
async def create_redis(lone_server: LockServer) -> AsyncIterator[MakeRedis]:
    """Makes clients."""
    made: list[Redis] = []

    async def make(**options: Any) -> Redis:
        made.append(Redis.from_url(lone_server.url, **options))
        return made[-1]

    yield make
    for client in made:
        await client.flushall()
        await client.aclose()


@pytest_asyncio.fixture
async def r(create_redis: MakeRedis) -> Redis:
    """The client of most of its tests."""
    return await create_redis()


def main(distribution: str) -> int:
    """Run the file of that distribution on both classes; 0: all passed."""
    with tempfile.TemporaryDirectory() as directory, tarfile.open(distribution) as archive:
        member = next(name for name in archive.getnames() if name.endswith(FILE))
        content = archive.extractfile(member)
        assert content is not None
        file = Path(directory, "test_lock.py")
        file.write_bytes(content.read())
        return max(_run(file, ours=ours) for ours in (False, True))


def _run(file: Path, *, ours: bool) -> int:
    print(f"redis-py's tests on {'the drop-in' if ours else 'its own lock'}", flush=True)
    options = ("-c", os.devnull, "-o", "asyncio_mode=auto", "--rootdir", file.parent)
    plugins = ("-p", "tests.redis_py_own", "-p", "no:valkey", "-p", "no:cacheprovider")
    left_out = ("--deselect", f"{file.name}::{LEFT_OUT}") if ours else ()
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *plugins, *left_out, file],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), OURS: "1" if ours else ""},
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
