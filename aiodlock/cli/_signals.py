"""The signals that are sent to `aiodlock run`: who hears them, from the wait to the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from signal import Signals
from typing import Final, Self

# Each of them ends a process that has nothing to say to it; so it ends our wait.
ENDING: Final = (
    Signals.SIGHUP,
    Signals.SIGINT,
    Signals.SIGQUIT,
    Signals.SIGTERM,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
    Signals.SIGALRM,
)
# What becomes of a command.
OF_COMMANDS: Final = (Signals.SIGCHLD, Signals.SIGCONT)
# These mean something only to who asked for them; the rest goes to a whole process group.
PERSONAL: Final = frozenset({Signals.SIGUSR1, Signals.SIGUSR2, Signals.SIGALRM})


class Inbox:
    """Hears the signals of `ENDING`, and those of `hear`, while the block lasts.

    One that was ignored from the start, as `nohup` has it, stays so, for us and for the command;
    but not those of `OF_COMMANDS`, without which nobody learns that a command has ended. Whoever
    started us may also have blocked some: then the command has them blocked, and we hear them.
    """

    def __init__(self) -> None:
        self.first: Signals | None = None
        """The first that came."""
        self._listener: Callable[[Signals], object] | None = None
        self._loop = asyncio.get_running_loop()
        self._heard: list[Signals] = []
        self.mask: set[int] = set()
        """What was blocked before."""

    def __enter__(self) -> Self:
        self.mask = {*signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        self.hear(ENDING)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number in self._heard:
            self._loop.remove_signal_handler(number)

    def hear(self, numbers: Iterable[Signals]) -> None:
        """From now on these too."""
        for number in numbers:
            if number in OF_COMMANDS or signal.getsignal(number) is not signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._come, number)
                self._heard.append(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._heard)

    @contextlib.contextmanager
    def told_to(self, listener: Callable[[Signals], object]) -> Iterator[None]:
        """*listener* gets each that comes during the block, and nobody those after it."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    @contextlib.contextmanager
    def deaf_to(self, number: Signals) -> Iterator[None]:
        """During the block *number* does what it does to others."""
        was_heard = self._loop.remove_signal_handler(number)
        try:
            yield
        finally:
            if was_heard:
                self._loop.add_signal_handler(number, self._come, number)

    def _come(self, number: Signals) -> None:
        self.first = self.first or number
        if self._listener is not None:
            self._listener(number)
