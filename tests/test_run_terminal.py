"""`aiodlock run` at a terminal: who may read from it, and what its keys do."""

from __future__ import annotations

import asyncio
import os
import pty
import shlex
import signal
import sys
from pathlib import Path
from typing import Self

import pytest
from redis.asyncio import Redis

from aiodlock.testing import LockServer
from tests.keys import leftovers
from tests.runs import state_of
from tests.until import until

pytestmark = pytest.mark.deep

LIMIT_S = 30.0
CTRL_C, CTRL_Z = b"\x03", b"\x1a"
RUN = (sys.executable, "-m", "aiodlock", "run")
READS = ("sh", "-c", "echo re''ady; read line; echo got:$line")


# No shell, which may overhear a signal while it starts a process.
WAITS = ("python3", "-S", "-c", "import time; print('rea' + 'dy', flush=True); time.sleep(600)")
# The leader of a new session takes its stdin for its terminal, then becomes the program.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Screen:
    """A terminal of its own with *program* before it; killed at the end if it runs still."""

    def __init__(self, url: str, *program: str) -> None:
        self._program = program
        self._environment = os.environ | {"AIODLOCK_URL": url, "PS1": "prompt> ", "ENV": ""}
        self.text = ""

    async def __aenter__(self) -> Self:
        self._terminal, theirs = pty.openpty()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", TAKE_TERMINAL, *self._program),
            env=self._environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(self._terminal, False)
        asyncio.get_running_loop().add_reader(self._terminal, self._read)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        asyncio.get_running_loop().remove_reader(self._terminal)
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        os.close(self._terminal)

    def type(self, keys: bytes) -> None:
        """Press *keys*."""
        os.write(self._terminal, keys)

    async def shows(self, words: str) -> None:
        """Once it shows *words*, which are taken off what is looked at next time."""
        await until(lambda: words in self.text, limit_s=LIMIT_S)
        self.text = self.text.partition(words)[2]

    async def ended(self) -> int:
        """The exit code of the program; -n: signal n ended it."""
        return await asyncio.wait_for(self.process.wait(), LIMIT_S)

    def _read(self) -> None:
        try:
            self.text += os.read(self._terminal, 65536).decode(errors="replace")
        except OSError:  # The last one that had it open has ended.
            asyncio.get_running_loop().remove_reader(self._terminal)


async def test_command_reads_from_the_terminal(server: LockServer) -> None:
    """Although it is in a process group of its own."""
    async with Screen(server.url, *RUN, "n", "--", *READS) as screen:
        await screen.shows("ready")
        screen.type(b"word\n")
        await screen.shows("got:word")
        assert await screen.ended() == 0


async def test_command_in_a_pipeline_gets_the_terminal_when_it_reads(
    server: LockServer, tmp_path: Path
) -> None:
    """Not before, for the rest of the pipeline may be who uses it."""
    command = shlex.join([*RUN, "n", "--", "sh", "-c", "echo ready >&2; read line; echo $line"])
    async with Screen(server.url, "sh", "-c", f"{command} > {tmp_path}/out") as screen:
        await screen.shows("ready")
        screen.type(b"word\n")
        assert await screen.ended() == 0
        assert (tmp_path / "out").read_text() == "word\n"


async def test_ctrl_c_ends_the_command_then_us(server: LockServer, redis: Redis) -> None:
    """By the same signal, as a shell expects of what it runs; the lock is free."""
    async with Screen(server.url, *RUN, "n", "--", *WAITS) as screen:
        await screen.shows("ready")
        screen.type(CTRL_C)
        assert await screen.ended() == -signal.SIGINT
        assert await leftovers(redis) == []


async def test_ctrl_c_ends_a_loop_around_us(server: LockServer) -> None:
    """It was the loop that the reader of the terminal wanted to end."""
    command = shlex.join([*RUN, "n", "--", *WAITS])
    loop = f"for i in 1 2; do {command}; done; echo after"
    async with Screen(server.url, "sh", "-c", loop) as screen:
        await screen.shows("ready")
        screen.type(CTRL_C)
        assert await screen.ended() == -signal.SIGINT
        assert "ready" not in screen.text
        assert "after" not in screen.text


async def test_ctrl_c_that_the_command_handles_is_its_own_affair(server: LockServer) -> None:
    """Its status is ours then."""
    shell = "trap 'exit 4' INT; echo ready; while :; do sleep 0.01; done"
    async with Screen(server.url, *RUN, "n", "--", "sh", "-c", shell) as screen:
        await screen.shows("ready")
        screen.type(CTRL_C)
        assert await screen.ended() == 4


async def test_ctrl_z_stops_the_job_and_fg_lets_it_go_on(server: LockServer) -> None:
    """The shell sees one job, which is stopped; it may read again when it is in front again."""
    async with Screen(server.url, "sh", "-i") as screen:
        await screen.shows("prompt>")
        screen.type(f"{shlex.join([*RUN, 'n', '--', *READS])}\n".encode())
        await screen.shows("ready")
        screen.type(CTRL_Z)
        await screen.shows("Stopped")
        await screen.shows("prompt>")
        screen.type(b"fg\n")
        screen.type(b"word\n")
        await screen.shows("got:word")


async def test_command_has_the_terminal_again_after_fg(server: LockServer) -> None:
    """Before it goes on: one that ignores SIGTTIN would be told that it cannot read."""
    python = (
        "import signal, sys; signal.signal(signal.SIGTTIN, signal.SIG_IGN)\n"
        "print('rea' + 'dy', flush=True); print('got:' + sys.stdin.readline(), flush=True)"
    )
    async with Screen(server.url, "sh", "-i") as screen:
        await screen.shows("prompt>")
        command = shlex.join([*RUN, "n", "--", "python3", "-S", "-c", python])
        screen.type(command.replace("\n", "; ").encode() + b"\n")
        await screen.shows("ready")
        screen.type(CTRL_Z)
        await screen.shows("Stopped")
        await screen.shows("prompt>")
        screen.type(b"fg\n")
        screen.type(b"word\n")
        await screen.shows("got:word")


async def test_job_in_the_background_that_reads_is_stopped_as_any(server: LockServer) -> None:
    """Until it is brought to the front."""
    async with Screen(server.url, "sh", "-i") as screen:
        await screen.shows("prompt>")
        screen.type(f"{shlex.join([*RUN, 'n', '--', *READS])} &\n".encode())
        await screen.shows("ready")
        await until(lambda: _state_of_a_child(screen.process.pid) == "T", limit_s=LIMIT_S)
        screen.type(b"fg\n")
        screen.type(b"word\n")
        await screen.shows("got:word")


async def test_ctrl_z_without_a_shell_does_nothing(server: LockServer) -> None:
    """Nobody could let it go on, as the kernel knows: a container's first process, for one."""
    async with Screen(server.url, *RUN, "n", "--", *READS) as screen:
        await screen.shows("ready")
        screen.type(CTRL_Z)
        await screen.shows("^Z")
        screen.type(b"word\n")
        await screen.shows("got:word")
        assert await screen.ended() == 0


async def test_stopped_job_whose_lease_is_over_does_not_go_on(
    server: LockServer, redis: Redis, tmp_path: Path
) -> None:
    """While it was stopped nobody extended it: the next holder may be at work."""
    python = (
        f"import time; out = open('{tmp_path}/out', 'a', 1); print('re' + 'ady', flush=True)\n"
        "while True: out.write('more\\n'); time.sleep(0.01)"
    )
    command = shlex.join([*RUN, "--ttl", "1", "n", "--", "python3", "-S", "-c", python])
    async with Screen(server.url, "sh", "-i") as screen:
        await screen.shows("prompt>")
        screen.type(f"{command}\n".encode())
        await screen.shows("ready")
        screen.type(CTRL_Z)
        await screen.shows("Stopped")
        done = (tmp_path / "out").read_text()
        assert done
        await until(lambda: _is_free(redis))
        screen.type(b"fg\n")
        await screen.shows("the command gets SIGTERM")
        await screen.shows("prompt>")
        assert (tmp_path / "out").read_text() == done


@pytest.mark.parametrize("tostop", [False, True])
async def test_we_can_speak_while_the_command_has_the_terminal(
    server: LockServer, redis: Redis, tostop: bool
) -> None:
    """Also where `stty tostop` would stop who speaks from the background."""
    stty = "stty tostop; " if tostop else ""
    shell = f"{stty}echo ready; while :; do sleep 0.01; done"
    options = ("--ttl", "1", "n", "--")
    async with Screen(server.url, *RUN, *options, "sh", "-c", shell) as screen:
        await screen.shows("ready")
        await redis.delete("aiodlock:{n}")
        await screen.shows("the command gets SIGTERM")
        assert await screen.ended() == 74


async def _is_free(redis: Redis) -> bool:
    return not await redis.exists("aiodlock:{n}")


def _state_of_a_child(pid: int) -> str:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return state_of(int(children[0]))
