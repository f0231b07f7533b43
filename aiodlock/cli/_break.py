"""`aiodlock break`: take a name from who holds it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Final

from aiodlock.cli._connecting import ExitCode, Failure, speak
from aiodlock.cli._operating import add_options, check_is_lock, print_json, say
from aiodlock.cli._screen import quoted

if TYPE_CHECKING:
    from aiodlock.cli._look import Grant
    from aiodlock.cli._site import Site
    from aiodlock.cli._standing import Standing

_DECLINED: Final = 1
_NOT_HELD: Final = 3
_ANOTHER: Final = 4
_MOST: Final = 1000
"""Of holders that are broken at once."""
_WAITERS_SHOWN: Final = 5


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `break` to the command line."""
    parser = subparsers.add_parser(
        "break",
        help="take a name from its holder, for the next waiter",
        description="Shows who holds a name, asks, then takes it away, for the next waiter. Only"
        " the grants that it showed are broken: if another one stands by then, it is left alone."
        " The holder learns of it at its next extension, after a third of its ttl at the latest;"
        " until then it works on, beside the next one, unless fencing tokens keep it out.",
        epilog=f"Exit code: 0 broken; {_DECLINED} the answer was no; {_NOT_HELD} nobody held it;"
        f" {_ANOTHER} another grant stands now, and was left alone; 64 usage, 69 no answer, 70 its"
        " key is no lock, 77 the server forbids it.",
    )
    parser.add_argument("name", metavar="NAME", help="what is locked")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--fencing-token",
        type=int,
        metavar="N",
        help="break only the grant with this fencing token: one of several holders, or the one that"
        " `show` showed a while ago",
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    speak(args)
    # Two loops: in one that runs, Ctrl-C would not end the question.
    standing = asyncio.run(_seen(args))
    check_is_lock(standing)
    grants = _meant(standing, args)
    if not grants:
        return _nothing(standing, args)
    if not _may(standing, args):
        say(args, "nothing was broken")
        if args.json:
            _print_json([], standing)
        return _DECLINED
    return asyncio.run(_break(args, grants))


def _meant(standing: Standing, args: argparse.Namespace) -> tuple[Grant, ...]:
    """The grants that are to be broken."""
    if args.fencing_token is None:
        return standing.look.grants
    return tuple(
        grant for grant in standing.look.grants if grant.fencing_token == args.fencing_token
    )


def _nothing(standing: Standing, args: argparse.Namespace) -> int:
    from aiodlock.cli._telling import in_words

    if args.json:
        _print_json([], standing)
    name = quoted(args.name)
    if not standing.look.grants:
        say(args, f"nothing to break: {name} is {in_words(standing)}")
        return _NOT_HELD
    over = f"no grant has the fencing token {args.fencing_token} (any more)"
    now = ", ".join(
        str(grant.fencing_token or "none") for grant in standing.look.grants[:_WAITERS_SHOWN]
    )
    say(args, f"not broken: {over}; {name} is {in_words(standing)}, fencing token: {now}")
    return _ANOTHER


def _may(standing: Standing, args: argparse.Namespace) -> bool:
    """Whether the person at the terminal agrees, or has done so before."""
    from aiodlock.cli._telling import lines

    if not args.yes and not sys.stdin.isatty():
        raise Failure("break asks before it breaks: without a terminal give --yes", ExitCode.USAGE)
    if not args.quiet or not args.yes:
        print("\n".join(lines(standing, waiters=_WAITERS_SHOWN)), file=sys.stderr)
    if args.yes:
        return True
    count = len(_meant(standing, args))
    which = f"all {count} of them (one alone: --fencing-token N)" if count > 1 else "it"
    # On stderr, so that stdout stays the result's.
    print(f"\nBreak {which}? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):  # Ctrl-D leaves the cursor behind the question.
        print(file=sys.stderr)
    return answer.strip().lower() in ("y", "yes")


async def _seen(args: argparse.Namespace) -> Standing:
    # Here: they load redis-py, which `--help` can do without.
    from aiodlock.cli._site import named, site_of
    from aiodlock.cli._standing import standing_of

    named(args.name, args.prefix)
    async with site_of(args) as site:
        return await standing_of(site, args.name, most=_MOST)


async def _break(args: argparse.Namespace, grants: tuple[Grant, ...]) -> int:
    from aiodlock.cli._site import site_of
    from aiodlock.cli._standing import standing_of
    from aiodlock.cli._telling import in_words

    async with site_of(args) as site:
        broken = [grant for grant in grants if await _is_broken(site, args.name, grant)]
        now = await standing_of(site, args.name, most=_MOST)
    if args.json:
        _print_json(broken, now)
    name = quoted(args.name)
    if broken:
        which = f"{len(broken)} of {len(grants)} grants are" if len(grants) > 1 else "the grant is"
        say(args, f"{which} broken; {name} is now {in_words(now)}")
        return 0
    say(args, f"nothing was broken: what was shown had ended; {name} is now {in_words(now)}")
    return _ANOTHER if now.look.grants else _NOT_HELD


def _print_json(broken: list[Grant], now: Standing) -> None:
    from aiodlock.cli._telling import all_as_json

    tokens = [{"holder": grant.holder, "fencing_token": grant.fencing_token} for grant in broken]
    print_json({"broken": tokens, "now": all_as_json(now)})


async def _is_broken(site: Site, name: str, grant: Grant) -> bool:
    """Break *grant* and no other; whether it stood."""
    lock = site.locks.lock(name) if grant.access is None else site.locks.reader(name)
    if grant.fencing_token is not None:
        return await lock.break_lock(fencing_token=grant.fencing_token)
    # What another library wrote has no number; its own value tells it from the next one.
    return await lock._break(grant.value)
