"""What `ls`, `show`, `wait` and `break` have in common on the command line."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from aiodlock.cli._connecting import ExitCode, Failure, add_connection_options
from aiodlock.cli._screen import harmless

if TYPE_CHECKING:
    from aiodlock.cli._standing import Standing


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and what says where the locks are."""
    parser.add_argument("--json", action="store_true", help="say it as JSON, on stdout")
    add_connection_options(parser)


def say(args: argparse.Namespace, text: str) -> None:
    """News on stderr, unless `-q` forbids them."""
    if not args.quiet:
        print(f"aiodlock: {text}", file=sys.stderr, flush=True)


def check_is_lock(standing: Standing) -> None:
    """Go on only if no key of another type is in the place of the lock.

    Raises:
        Failure: One is.
    """
    from aiodlock.cli._telling import something

    type_ = standing.look.not_a_lock
    if type_ is not None:
        raise Failure(
            f"the key {harmless(standing.key)} is no lock but {something(type_)}: whose it is,"
            " only its writer knows; delete it with DEL if it is in the way",
            ExitCode.FAULT,
        )


def print_json(value: dict[str, Any], *, indent: int | None = 2) -> None:
    """*value* on stdout, in one document."""
    # ASCII: a name may have a lone surrogate, which no stream can write.
    print(json.dumps(value, indent=indent), flush=True)


def seconds(text: str) -> float:
    """A number of seconds, at least 0."""
    value = float(text)
    if not 0 <= value <= 1e9:  # Refuses nan, too.
        raise argparse.ArgumentTypeError(f"must be seconds, at least 0; got {text!r}")
    return value
