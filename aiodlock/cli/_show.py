"""`aiodlock show`: everything about one name."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from aiodlock.cli._connecting import speak
from aiodlock.cli._operating import add_options, print_json

_MOST: Final = 1000
"""Of holders, and of waiters, that are shown."""


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `show` to the command line."""
    parser = subparsers.add_parser(
        "show",
        help="everything about one name: who holds it, who waits, and for how long",
        description="Everything about one name: its key, who holds it, how long for, the fencing"
        " token, each waiter by its place with how long it has waited and whether it still gives"
        " signs of life; over a quorum, what each node says. One request to each server, which"
        " changes nothing.",
        epilog="Exit code: 0 it was told, whether somebody holds it or not; 64 usage, 69 no answer,"
        " 77 the server forbids it.",
    )
    parser.add_argument("name", metavar="NAME", help="what is locked")
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    speak(args)
    return asyncio.run(_show(args))


async def _show(args: argparse.Namespace) -> int:
    # Here: they load redis-py, which `--help` can do without.
    from aiodlock.cli._site import named, site_of
    from aiodlock.cli._standing import standing_of
    from aiodlock.cli._telling import all_as_json, lines

    named(args.name, args.prefix)
    async with site_of(args) as site:
        standing = await standing_of(site, args.name, most=_MOST)
    if args.json:
        print_json(all_as_json(standing))
    else:
        print("\n".join(lines(standing, waiters=_MOST)))
    return 0
