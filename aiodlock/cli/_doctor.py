"""`aiodlock doctor` on the command line: its options, its outcome as an exit code.

What this server promises a lock, and what endangers it. Nothing is changed, and no key stays.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from typing import TYPE_CHECKING

from aiodlock import _names
from aiodlock._clock import TTL_MAX_S, TTL_MIN_S
from aiodlock.cli import _connecting
from aiodlock.cli._table import can_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodlock.cli._doctor_facts import Facts, Plan
    from aiodlock.cli._doctor_kinds import Finding


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="see what a server promises a lock, and what endangers it",
        description="Connects, and says what this server promises a lock and what endangers it:"
        " its memory, disk, replicas, clock, speed, what this user may do, and what is left under"
        " the prefix. It changes no setting, leaves no key, and takes 20 s at most.",
        epilog="Exit code: 0 nothing worse than a note, 1 a warning, 2 a danger, 69 no server"
        " answers, 64 wrong options. Each finding is explained in docs/reference/doctor.md.",
    )
    _connecting.add_connection_options(parser)
    parser.add_argument(
        "--ttl",
        type=_ttl,
        default=30.0,
        metavar="SECONDS",
        help="of the locks that will be here; default: %(default)g",
    )
    parser.add_argument("--json", action="store_true", help="say it to a program")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # Here and not above: `--help` can do without redis-py.
    from aiodlock.cli import _doctor_show as show
    from aiodlock.cli._doctor_facts import Plan
    from aiodlock.cli._doctor_kinds import Severity

    _connecting.speak(args)
    urls = _connecting.urls_of(args)
    try:
        plan = Plan(args.ttl, _names.checked_prefix(args.prefix))
    except ValueError as error:
        raise _connecting.Failure(str(error), _connecting.ExitCode.USAGE) from None
    found, code = asyncio.run(examined(urls, plan))
    if args.json:
        print(show.as_json(found, plan, code))
        return code
    told = [one for one in found if not args.quiet or one.kind.severity is not Severity.OK]
    if told:
        print(show.as_text(told, plan, coloured=can_colour(sys.stdout)))
    return code


async def examined(urls: Sequence[str], plan: Plan) -> tuple[list[Finding], int]:
    """What is found at *urls*, all of them asked at once, with the exit code for that."""
    from aiodlock.cli._doctor_ask import facts_of
    from aiodlock.cli._doctor_findings import findings
    from aiodlock.cli._doctor_quorum import between

    nodes = await asyncio.gather(*(facts_of(url, plan) for url in urls))
    are_many = len(nodes) > 1
    found = [one for node in nodes for one in findings(node, plan, is_node=are_many)]
    if are_many:
        found += between(nodes)
    return found, exit_code(nodes, found)


_SILENT = ("unreachable", "not-redis", "certificate")


def exit_code(nodes: Sequence[Facts], found: Sequence[Finding]) -> int:
    """1 and 2 are what monitoring takes for a warning and for worse; no lock at all is 69."""
    from aiodlock.cli._doctor_kinds import Severity, worst

    silent = [node for node in nodes if node.trouble is not None and node.trouble[0] in _SILENT]
    if len(nodes) - len(silent) < len(nodes) // 2 + 1:
        return _connecting.ExitCode.UNREACHABLE
    return {Severity.WARNING: 1, Severity.DANGER: 2}.get(worst(found), 0)


def _ttl(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not TTL_MIN_S <= seconds <= TTL_MAX_S:  # also refuses nan
        raise argparse.ArgumentTypeError(f"must be from {TTL_MIN_S:g} to {TTL_MAX_S:g}")
    return seconds
