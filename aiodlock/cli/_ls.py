"""`aiodlock ls`: the names that are held or waited for."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from aiodlock import ServerUnreachable
from aiodlock.cli._connecting import shown, speak, urls_of
from aiodlock.cli._operating import add_options, print_json, say, seconds
from aiodlock.cli._screen import harmless, shortened

if TYPE_CHECKING:
    from aiodlock.cli._listing import Listing
    from aiodlock.cli._site import Site

_EVERY_S: Final = 2.0
_LIMIT: Final = 1000
_LIMIT_MOST: Final = 100_000


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `ls` to the command line."""
    parser = subparsers.add_parser(
        "ls",
        help="list the names that are held or waited for",
        description="Lists the names that are held or waited for: as what, by whom (the first 8"
        " digits of the client's id; `show` has all), the time left, the fencing token, how many"
        " wait, and for how long the first of them has. Of several holders it is the one whose time"
        " ends first.",
        epilog="It looks through all keys of the server with SCAN, 1000 at a time, whether they are"
        " locks or not, then asks about each name that it found; it never uses KEYS and changes"
        " nothing. Exit code: 0 it was told, 64 usage, 69 no answer, 77 the server forbids it"
        " (besides what a lock needs, it needs +scan).",
    )
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="?",
        default="*",
        help="only names like this: * stands for any text, ? for one character, [abc] for one of"
        " them, [!abc] for any other; quote it from the shell. Default: all",
    )
    parser.add_argument(
        "--limit",
        type=_limit,
        default=_LIMIT,
        metavar="N",
        help=f"stop searching when more than N names were found, 1 to {_LIMIT_MOST}; default:"
        " %(default)s",
    )
    parser.add_argument(
        "--watch",
        type=_interval,
        nargs="?",
        const=_EVERY_S,
        metavar="SECONDS",
        help="tell it again and again, with a pause of so many seconds (at least 0.1, and at least"
        f" as long as the search took; alone: {_EVERY_S:g}), until Ctrl-C. With --json, a line each"
        " time",
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def _limit(text: str) -> int:
    value = int(text)
    if not 1 <= value <= _LIMIT_MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_LIMIT_MOST}; got {text}")
    return value


def _interval(text: str) -> float:
    try:
        return max(0.1, seconds(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be seconds; got {text!r} (a pattern goes before --watch)"
        ) from None


def _run(args: argparse.Namespace) -> int:
    speak(args)
    return asyncio.run(_list(args))


async def _list(args: argparse.Namespace) -> int:
    # Here: they load redis-py, which `--help` can do without.
    from aiodlock.cli._listing import listing_of
    from aiodlock.cli._site import site_of

    async with site_of(args) as site:
        if args.watch is not None:
            with _until_signal() as ended:
                await _watch(site, args, ended)
            return 0
        listing = await listing_of(site, args.pattern, limit=args.limit)
    if args.json:
        print_json(_as_json(listing, args))
    else:
        print("\n".join(_table(listing)))
        for text in _missing(listing, args):
            say(args, text)
    return 0


async def _watch(site: Site, args: argparse.Namespace, ended: asyncio.Event) -> None:
    """Until *ended*; a server that is silent for a while, after the first time, is waited for."""
    from aiodlock.cli._listing import listing_of

    screen = _Screen()
    listing, trouble = await listing_of(site, args.pattern, limit=args.limit), ""
    took = 0.0
    while not ended.is_set():
        if args.json:
            print_json(_as_json(listing, args) | {"trouble": trouble or None}, indent=None)
        else:
            screen.show(_block(listing, trouble, args, screen.columns))
        # A large keyspace is searched for half of the time at most.
        await asyncio.sleep(max(args.watch, took))
        started = time.monotonic()
        try:
            listing, trouble = await listing_of(site, args.pattern, limit=args.limit), ""
        except ServerUnreachable as error:
            trouble = str(error)
        took = time.monotonic() - started


@contextlib.contextmanager
def _until_signal() -> Iterator[asyncio.Event]:
    """End the block, without an error, when Ctrl-C or SIGTERM comes.

    The event says so, too: on Python 3.11 redis-py swallows a cancel now and then.
    """
    loop, task, ended = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert task is not None

    def end() -> None:
        ended.set()
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        yield ended
    except asyncio.CancelledError:
        task.uncancel()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Screen:
    """Where block after block is shown: in a terminal in one place, elsewhere one after another."""

    def __init__(self) -> None:
        self._is_drawn_over = sys.stdout.isatty()
        self._is_first = True

    @property
    def columns(self) -> int | None:
        """How wide a line may be; one column stays free, because a full line would wrap."""
        return shutil.get_terminal_size().columns - 1 if self._is_drawn_over else None

    def show(self, block: list[str]) -> None:
        """Show *block*, in a terminal as much of it as fits."""
        if not self._is_drawn_over:
            print("\n".join([*block, ""]), flush=True)
            return
        columns, rows = self.columns or 0, shutil.get_terminal_size().lines
        if len(block) > rows - 1:
            hidden = len(block) - (rows - 2)
            block = [*block[: rows - 2], f"... and {hidden} more: the terminal is too small"]
        # Each line is overwritten and the rest of it erased, so that nothing flickers. One row
        # stays free, because a full one would scroll.
        drawn = "".join(f"{shortened(line, columns)}\x1b[K\n" for line in block)
        start = "\x1b[2J\x1b[H" if self._is_first else "\x1b[H"
        print(f"{start}{drawn}\x1b[J", end="", flush=True)
        self._is_first = False


def _table(listing: Listing, columns: int | None = None) -> list[str]:
    from aiodlock.cli._table import table
    from aiodlock.cli._telling import HEAD, MAY_CUT, row

    rows = [row(standing) for standing in listing.standings]
    return table(HEAD, rows, coloured=False, columns=columns, may_cut=MAY_CUT)


def _block(
    listing: Listing, trouble: str, args: argparse.Namespace, columns: int | None
) -> list[str]:
    servers = ", ".join(map(shown, urls_of(args)))
    title = f"{time.strftime('%H:%M:%S')}  {servers}  {harmless(args.prefix + args.pattern)}"
    told = _table(listing, columns)
    if trouble:
        return [title, f"no answer now; what follows is old: {harmless(trouble)}", *told]
    return [title, *_missing(listing, args), *told]


def _missing(listing: Listing, args: argparse.Namespace) -> list[str]:
    """What the table does not tell by itself."""
    told = [f"{node} does not answer: {harmless(why)}" for node, why in listing.silent.items()]
    if not listing.is_complete:
        told.append(f"there are more than {args.limit} names: give a PATTERN, or a larger --limit")
    if not listing.standings:
        told.append(f"no name like {harmless(args.pattern)} is held or waited for")
    return told


def _as_json(listing: Listing, args: argparse.Namespace) -> dict[str, Any]:
    from aiodlock.cli._telling import as_json

    return {
        "at": time.time(),
        "prefix": args.prefix,
        "pattern": args.pattern,
        "is_complete": listing.is_complete,
        "silent": listing.silent,
        "names": [as_json(standing) for standing in listing.standings],
    }
