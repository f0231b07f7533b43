"""The command `aiodlock`: one subcommand per file of this room.

A subcommand is a module with `add_to(subparsers)`, which sets `run` to a function from the
parsed arguments to an exit code. To add one, write the module and put it into `_COMMANDS`.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn, cast

from aiodlock.cli import _break, _demo, _doctor, _ls, _run, _show, _wait
from aiodlock.cli._connecting import ExitCode, Failure

__all__ = ["main"]

_COMMANDS = (_run, _ls, _show, _wait, _break, _doctor, _demo)
_INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
_READER_GONE = 141  # the same for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that *argv* names; its exit code."""
    args = _parser().parse_args(argv)
    try:
        code = cast(int, args.run(args))
        sys.stdout.flush()  # Here, so that what it raises is told below.
        return code
    except Failure as failure:
        print(f"aiodlock: {failure}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print("\naiodlock: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return _READER_GONE
    except OSError as error:  # No file can be opened, no process started; the disk is full.
        print(f"aiodlock: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            _drop_stdout()
        return ExitCode.MACHINE


class _Parser(argparse.ArgumentParser):
    """Exits as the other commands do that run a command: 2 is one that theirs may end with."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(ExitCode.USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aiodlock", description="Distributed locks on Redis and Valkey, for asyncio."
    )
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(subparsers)
    return parser


def _version() -> str:
    try:
        return f"aiodlock {version('aiodlock')}"
    except PackageNotFoundError:
        return "aiodlock, run from a source tree that is not installed"


def _drop_stdout() -> None:
    # Python flushes stdout once more at exit; that would print a second BrokenPipeError.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
