"""A command that runs under a lock: a process group that signals reach and that ends with us."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Final, Self

from aiodlock.cli._connecting import ExitCode, Failure, log
from aiodlock.cli._guard import kill_all
from aiodlock.cli._signals import OF_COMMANDS, PERSONAL, Inbox
from aiodlock.cli._terminal import Terminal, stop_with, talks_to_people

_SHELL: Final = "/bin/sh"
_GUARD: Final = str(Path(__file__).with_name("_guard.py"))
# Which Python ignores, and a command is not to.
_PYTHONS: Final = (Signals.SIGPIPE, Signals.SIGXFSZ)
_HEARD: Final = (*OF_COMMANDS, Signals.SIGTSTP, Signals.SIGWINCH)
_END: Final = (Signals.SIGHUP, Signals.SIGTERM)
_WANT_TERMINAL: Final = (Signals.SIGTTIN, Signals.SIGTTOU)


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    inbox: Inbox,
    may_run: Callable[[], bool],
) -> AsyncIterator[Child]:
    """*command* in a process group of its own; it has ended when the block has.

    It is killed at the end of the block if it runs still, and with us however we end. Signals that
    *inbox* hears go to it. One that was stopped goes on only if it *may_run*.

    Raises:
        Failure: It cannot be started.
    """
    inbox.hear(_HEARD)
    with Guard() as guard, Terminal(guard.pid) as terminal:
        if talks_to_people():
            terminal.lend()
        try:
            child = Child(command, environment, guard, terminal, inbox, may_run)
        except OSError as error:
            raise _not_started(command[0], error) from None
        with inbox.told_to(child.hear):
            try:
                yield child
            finally:
                if not child.ended.done():
                    child.kill()
                await asyncio.wait({child.ended})


class Guard:
    """A process that kills its group as soon as we are gone; the group has its number."""

    def __enter__(self) -> Self:
        read_end, self._pipe = os.pipe()
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", _GUARD],
                {key: text for key, text in os.environ.items() if key != "AIODLOCK_URL"},
                # Not our stdout: who reads it waits for the last one that has it.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, read_end, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=signal.valid_signals(),
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read_end)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)

    def watch(self, pid: int) -> None:
        """Kill *pid* too, if it left the group."""
        with contextlib.suppress(BrokenPipeError):  # Somebody killed the guard.
            os.write(self._pipe, b"%d" % pid)


class Child:
    """The command's process; `ended` is its status as a shell counts: 128 + n for signal n."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        terminal: Terminal,
        inbox: Inbox,
        may_run: Callable[[], bool],
    ) -> None:
        self._group = guard.pid
        self._is_guarded = True
        self._terminal = terminal
        self._inbox = inbox
        self._may_run = may_run
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pid = self._begun(command, environment)
        guard.watch(self._pid)

    def _begun(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        try:
            return os.posix_spawnp(
                command[0],
                list(command),
                environment,
                setpgroup=self._group,
                setsigdef=_PYTHONS,
                setsigmask=self._inbox.mask,
            )
        except OSError as error:
            if error.errno != errno.ENOEXEC or command[0] == _SHELL:
                raise
            # A script without `#!`: for the shell, as execvp and so `flock` have it.
            script = shutil.which(command[0]) or command[0]
            return self._begun([_SHELL, script, *command[1:]], environment)

    def hear(self, number: Signals) -> None:
        """Do what *number*, sent to us, means to the command."""
        if number is Signals.SIGCHLD:
            self._look()
        elif number is Signals.SIGCONT:
            self._go_on()
        else:
            self._send(number)

    def end(self) -> None:
        """SIGTERM."""
        self._send(Signals.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, to the command and to all that are left of its group, the guard among them."""
        self._is_guarded = False
        if not self.ended.done():
            with contextlib.suppress(OSError):  # Of another user, by way of sudo.
                kill_all(self._pid)
        os.killpg(self._group, signal.SIGKILL)

    def _send(self, number: Signals) -> None:
        """Send it to the command, wherever it is; and to its group, unless it is personal."""
        self._send_as_it_is(number)
        if number in _END:
            # One that is stopped hears of it no sooner; shells and init systems do the same.
            self._send_as_it_is(Signals.SIGCONT)

    def _send_as_it_is(self, number: Signals) -> None:
        with contextlib.suppress(OSError):
            if number not in PERSONAL:
                os.killpg(self._group, number)
            if self.ended.done():
                return
            if os.getpgid(self._pid) == self._pid:
                os.killpg(self._pid, number)
            elif number in PERSONAL:
                os.kill(self._pid, number)

    def _look(self) -> None:
        """Something became of it, or of its guard."""
        if self.ended.done():
            return
        pid, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            self._stopped(Signals(os.WSTOPSIG(status)))
        elif pid:
            code = os.waitstatus_to_exitcode(status)
            self.ended.set_result(code if code >= 0 else 128 - code)
        else:
            self._look_at_guard()

    def _look_at_guard(self) -> None:
        unseen = os.WEXITED | os.WNOHANG | os.WNOWAIT  # Its number stays taken.
        if self._is_guarded and os.waitid(os.P_PID, self._group, unseen):
            self._is_guarded = False
            log.warning("the command's guard was killed: if we are too, the command runs on")

    def _stopped(self, by: Signals) -> None:
        """As a shell expects it of its jobs; somebody's SIGSTOP is left to that somebody."""
        if by in _WANT_TERMINAL and self._terminal.lend():
            self._send(Signals.SIGCONT)
        elif by in _WANT_TERMINAL or by is Signals.SIGTSTP:
            self._stop_too(by)

    def _stop_too(self, by: Signals) -> None:
        group = os.getpgrp() if self._terminal.take_back() else 0
        with self._inbox.deaf_to(Signals.SIGTSTP):
            if stop_with(group):
                return  # We go on, and what made us go on is to be heard yet.
        # Nobody looks after us who could make both go on, so the command does at once; one that
        # wants a terminal which it can never have is told what the kernel would tell it.
        if by in _WANT_TERMINAL:
            self._send(Signals.SIGHUP)
        self._go_on()

    def _go_on(self) -> None:
        if self._terminal.is_wanted:
            self._terminal.lend()
        if self._may_run():
            self._send(Signals.SIGCONT)


def _not_started(program: str, error: OSError) -> Failure:
    """As shells have it; a script whose interpreter is missing counts as not found, too."""
    is_missing = isinstance(error, FileNotFoundError)
    exit_code = ExitCode.NOT_FOUND if is_missing else ExitCode.NOT_EXECUTABLE
    return Failure(f"{program}: {error.strerror}", exit_code)
