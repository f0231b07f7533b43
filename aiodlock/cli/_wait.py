"""`aiodlock wait`: until a name is free, without taking it."""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from aiodlock import ServerUnreachable
from aiodlock.cli._connecting import ExitCode, Failure, log, speak
from aiodlock.cli._operating import add_options, check_is_lock, print_json, say, seconds
from aiodlock.cli._screen import quoted, span

if TYPE_CHECKING:
    from aiodlock.cli._site import Site
    from aiodlock.cli._standing import Standing

_MOST: Final = 100  # Waiters looked at: whether one of them is alive.
_PATIENCE_S: Final = 30.0
"""How long a server may be silent; a failover takes less."""


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `wait` to the command line."""
    parser = subparsers.add_parser(
        "wait",
        help="wait until a name is free, without taking it",
        description="Waits until nobody holds a name and nobody waits for it, without taking it:"
        " somebody may hold it a moment later. (To do something while nobody else does, use"
        " `aiodlock run`.) It asks again every 0.1 to 2 s, the less often the more time is left.",
        epilog="Exit code: 0 it is free; 75 it is not, in time; 64 usage, 69 no answer for 30 s, 70"
        " its key is no lock, 77 the server forbids it.",
    )
    parser.add_argument("name", metavar="NAME", help="what is locked")
    parser.add_argument(
        "-w",
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="wait so long at most; 0: ask once. Default: for ever",
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def pause_s(standing: Standing | None) -> float:
    """How long to wait before asking again: a release may come at any time, the end at its own.

    None: the server is silent.
    """
    if standing is None:
        return 0.5
    if not standing.look.grants:
        return 0.1  # Soon the first waiter has it.
    left = standing.look.grants[0].ttl_left
    return 2.0 if left is None else min(left + 0.005, max(0.1, min(2.0, left / 15)))


def _run(args: argparse.Namespace) -> int:
    speak(args)
    return asyncio.run(_wait(args))


async def _wait(args: argparse.Namespace) -> int:
    from aiodlock.cli._site import named
    from aiodlock.cli._telling import as_json

    named(args.name, args.prefix)
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        standing = await _Waiting(stack, args, started).until_free()
    waited = time.monotonic() - started
    if args.json:
        found: dict[str, Any] = {"free": standing.is_free, "waited": waited}
        print_json(found | as_json(standing))
    return _ended(args, standing, waited)


class _Waiting:
    """Asks again and again."""

    def __init__(self, stack: AsyncExitStack, args: argparse.Namespace, started: float) -> None:
        self._stack = stack
        self._site: Site | None = None
        self._args = args
        self._end = float("inf") if args.wait is None else started + args.wait
        self._heard_at = started
        self._told: str | None = None  # Of which owner.

    async def until_free(self) -> Standing:
        """What stood there last: nothing, or what does when the time is over.

        Raises:
            Failure: It is no lock, so that it cannot become free.
        """
        # Bound: until it is free, or the time is over, or nobody has answered for 30 s.
        while True:
            standing = await self._asked()
            now = time.monotonic()
            if standing is not None:
                check_is_lock(standing)
                if standing.is_free or now >= self._end:
                    return standing
                self._tell(standing)
            await asyncio.sleep(min(pause_s(standing), max(0.0, self._end - now)))

    async def _asked(self) -> Standing | None:
        """What stands there; None: nobody answered, and there is time to ask again."""
        from aiodlock.cli._site import site_of
        from aiodlock.cli._standing import standing_of

        try:
            if self._site is None:
                self._site = await self._stack.enter_async_context(site_of(self._args))
            standing = await standing_of(self._site, self._args.name, most=_MOST)
        except (ServerUnreachable, Failure) as error:
            is_other = isinstance(error, Failure) and error.exit_code != ExitCode.UNREACHABLE
            if is_other or time.monotonic() >= min(self._end, self._heard_at + _PATIENCE_S):
                raise
            log.info("%s; asking again", error)
            return None
        self._heard_at = time.monotonic()
        return standing

    def _tell(self, standing: Standing) -> None:
        """Once; of each further holder if more is to be said."""
        from aiodlock.cli._telling import in_words

        owner = standing.look.grants[0].owner if standing.look.grants else ""
        if self._told is None:
            say(self._args, f"waiting for {quoted(standing.name)}: {in_words(standing)}")
        elif owner != self._told:
            log.info("%s is now %s", quoted(standing.name), in_words(standing))
        self._told = owner


def _ended(args: argparse.Namespace, standing: Standing, waited: float) -> int:
    from aiodlock.cli._telling import in_words

    name = quoted(args.name)
    if standing.is_free:
        say(args, f"{name} is free, after {span(waited)}")
        return 0
    say(args, f"{name} is not free after {span(waited)}: {in_words(standing)}")
    return ExitCode.CONFLICT
