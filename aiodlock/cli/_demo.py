"""`aiodlock demo` on the command line: its options, its outcome as an exit code.

Two locks as they are often written by hand, then aiodlock's, under the same load and the same
kill. Every figure is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack

_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h: there is no server to show it on
_SECONDS = 15.0
_SHORTEST_S, _LONGEST_S = 10.0, 600.0


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="see what goes wrong with locks made by hand, and that it does not here",
        description="Two locks as they are often written by hand, then aiodlock's, under the"
        " same load and the same kill of a holder. Every figure is measured.",
        epilog="Exit code: 0 all went as it should, 1 not so, 69 no server to show it on.",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=_SECONDS,
        metavar="S",
        help=f"how long it may take, about; {_SHORTEST_S:g} to {_LONGEST_S:g}, else {_SECONDS:g}",
    )
    parser.add_argument(
        "--url",
        type=_url,
        help="a server of yours instead of an embedded one; the demo's keys begin with"
        " 'aiodlock-demo:' and are deleted at its end",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # Here and not above: they load half of redis-py, which `--help` and the workers' own import
    # of this room can do without.
    from aiodlock.cli._demo_crew import WorkerCrashed
    from aiodlock.cli._demo_run import run_demo
    from aiodlock.cli._demo_server import Unreachable
    from aiodlock.testing import lock_server

    with ExitStack() as stack:
        try:
            url = args.url or stack.enter_context(lock_server()).url
        except RuntimeError as error:
            return _give_up(error, _UNAVAILABLE)
        try:
            return 0 if asyncio.run(run_demo(url, args.seconds)) else 1
        except Unreachable as error:
            return _give_up(error, _UNAVAILABLE)
        except WorkerCrashed as error:
            return _give_up(error, 1)


def _give_up(error: Exception, code: int) -> int:
    print(f"aiodlock demo: {error}", file=sys.stderr)
    return code


def _seconds(text: str) -> float:
    seconds = float(text)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:  # also refuses nan
        raise argparse.ArgumentTypeError(f"must be from {_SHORTEST_S:g} to {_LONGEST_S:g}")
    return seconds


def _url(text: str) -> str:
    if not text.startswith(("redis://", "rediss://", "unix://")):
        raise argparse.ArgumentTypeError("must begin with redis://, rediss:// or unix://")
    return text
