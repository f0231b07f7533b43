"""Commands as a test calls them: in this process, or in a terminal of their own."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import pytest

from aiodlock.cli import main

PROGRAM = (sys.executable, "-m", "aiodlock")
LIMIT_S = 20.0
"""Far more than a command takes: a bound on hanging."""


class Told(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it said on stdout, which must be one document."""
        return json.loads(self.out)


class Operator:
    """Calls commands in this process, each in a thread, while the test's loop goes on.

    Args:
        capsys: Catches what they say.
        url: What AIODLOCK_URL is; several are a quorum.
    """

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *url: str
    ) -> None:
        self._capsys = capsys
        self._heard = ["", ""]
        monkeypatch.setenv("AIODLOCK_URL", " ".join(url))

    async def __call__(self, *argv: str) -> Told:
        """Its end; a wrong usage too."""
        self._heard = ["", ""]
        self._capsys.readouterr()
        code = await asyncio.to_thread(_exit_code, argv)
        self.heard()
        return Told(code, *self._heard)

    def heard(self) -> str:
        """What it has said on stderr up to now."""
        for index, text in enumerate(self._capsys.readouterr()):
            self._heard[index] += text
        return self._heard[1]


@contextmanager
def as_before() -> Iterator[None]:
    """Put back what the commands set up for a process that is theirs alone."""
    logger = logging.getLogger("aiodlock")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


class Terminal:
    """A command in a terminal of its own: what is seen there, what is typed."""

    def __init__(self, url: str, *argv: str, columns: int = 80, rows: int = 24) -> None:
        self._fd, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.set_blocking(self._fd, False)
        self.process = subprocess.Popen(
            [*PROGRAM, *argv],
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"AIODLOCK_URL": url},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one call
        )
        os.close(end)
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def until(self, condition: Callable[[str], bool]) -> str:
        """What was seen since the start, once *condition* holds of it."""
        give_up_at = time.monotonic() + LIMIT_S
        while not condition(self.seen):
            assert time.monotonic() < give_up_at, f"only this was seen: {self.seen!r}"
            self._read()
        return self.seen

    def type(self, keys: str) -> None:
        """Press *keys*."""
        os.write(self._fd, keys.encode())

    def ended(self) -> int:
        """Its exit code; what it still says is seen."""
        give_up_at = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up_at, f"it does not end: {self.seen!r}"
            self._read()
        self._read()
        return self.process.returncode

    def _read(self) -> None:
        try:
            self.seen += os.read(self._fd, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # Nobody has the other end open: EIO.
            time.sleep(0.01)


def _exit_code(argv: tuple[str, ...]) -> int:
    try:
        return main(argv)
    except SystemExit as exit_:
        return int(exit_.code or 0)
