"""The terminal that we were started from, which only one process group at a time may use."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Self


class Terminal:
    """Lends our terminal, if we have one, to the process group *group*.

    While the block lasts SIGTTOU is blocked: who takes a terminal back, or writes to it where
    `stty tostop` is set, would be stopped by it, with a lease to extend. `mask` was blocked before.
    """

    def __init__(self, group: int) -> None:
        self._group = group
        self._fd: int | None = None
        self.mask: set[int] = set()
        self.is_wanted = False
        """Whether it was asked for once: then it is again after a stop."""
        self._is_lent = False

    def __enter__(self) -> Self:
        self.mask = {*signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})}
        with contextlib.suppress(OSError):  # A cron job has none.
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.take_back()
        if self._fd is not None:
            os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def lend(self) -> bool:
        """Whether it has become the group's: only who has it can lend it."""
        self.is_wanted = True
        with contextlib.suppress(OSError):  # A terminal that was hung up.
            if self._fd is not None and os.tcgetpgrp(self._fd) == os.getpgrp():
                os.tcsetpgrp(self._fd, self._group)
                self._is_lent = True
                return True
        return False

    def take_back(self) -> bool:
        """Whether it was lent, and is ours again."""
        was_lent, self._is_lent = self._is_lent, False
        if was_lent and self._fd is not None:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._fd, os.getpgrp())
        return was_lent


def talks_to_people() -> bool:
    """Whether both stdin and stdout are a terminal, so that no pipeline needs it too."""
    return os.isatty(0) and os.isatty(1)


def interrupt_our_group() -> None:
    """Let Ctrl-C, which only the command got, end a script or a loop around us too, and us."""
    if talks_to_people() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.killpg(os.getpgrp(), signal.SIGINT)


def stop_with(group: int) -> bool:
    """Stop as Ctrl-Z does, *group* being ours or 0 for this process alone; go on with SIGCONT.

    Whether we were stopped: the kernel does not stop a group that no shell looks after. SIGTSTP
    must have its default effect.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
    try:
        if group:
            os.killpg(group, signal.SIGTSTP)
        else:
            os.kill(os.getpid(), signal.SIGTSTP)
        # It made us go on although it is blocked; that it is pending proves that we had stopped.
        return signal.SIGCONT in signal.sigpending()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCONT})
