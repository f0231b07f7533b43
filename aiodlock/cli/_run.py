"""`aiodlock run` on the command line: a command under a lock, as `flock` has it for one machine."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from aiodlock import LockClient, LockError, ServerUnreachable
from aiodlock.cli._connecting import (
    ExitCode,
    Failure,
    add_connection_options,
    client_of,
    failure_of,
    speak,
    urls_of,
)
from aiodlock.cli._help import HelpFormatter

if TYPE_CHECKING:
    from redis.asyncio import RedisCluster

    from aiodlock import Lock
    from aiodlock.cli._run_course import Course

_INTERRUPTED = 130  # 128 + SIGINT
_USAGE = "aiodlock run [OPTION ...] NAME -- COMMAND [ARGUMENT ...]"

_DESCRIPTION = """\
Wait for the lock NAME, run COMMAND under it, and give it up when COMMAND has ended. The lock is
extended while COMMAND runs. If it is lost all the same, COMMAND is ended."""

_EPILOG = """\
COMMAND has our stdin, stdout and stderr. Its environment says AIODLOCK_NAME, AIODLOCK_HOLDER and
AIODLOCK_FENCING_TOKEN, a number that grows with every grant of the lock.

COMMAND runs in a process group of its own. Signals that come to aiodlock go on to it; while
aiodlock still waits they end the wait. On a loss the group gets SIGTERM, a moment later SIGKILL.
If aiodlock itself is killed, so is the group.

exit code: that of COMMAND, or 128 + n if signal n ended it (or the wait); or
   64  wrong usage
   69  the server cannot be reached
   70  NAME is in use by another kind of lock, or by no lock at all
   71  this machine lacks something: open files, processes, memory
   74  the lock was lost
   75  the lock was not got in time (-n, -w), or what -E says
   77  the server does not allow what a lock needs
  126  COMMAND cannot be executed
  127  COMMAND was not found

examples:
  aiodlock run -n nightly -- ./report.sh          on one machine; the others let it be
  aiodlock run -w 600 deploy -- ./deploy.sh v42   one after the other, in 10 minutes at most
  aiodlock run --permits 3 import -- ./load.sh a  three at once at most"""


def add_to(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a command under a lock",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="what is locked")
    parser.add_argument(
        "command", metavar="COMMAND", nargs=argparse.REMAINDER, help="with its arguments"
    )
    _add_waiting(parser)
    _add_holding(parser)
    _add_kinds(parser)
    add_connection_options(parser)
    parser.set_defaults(run=_run)


def _add_waiting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("waiting, as long as it takes unless told otherwise")
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument(
        "-n",
        "--no-wait",
        dest="wait",
        action="store_const",
        const=0.0,
        help="do not wait: if the lock is not free, end with exit code 75",
    )
    one_of.add_argument("-w", "--wait", type=float, metavar="SECONDS", help="wait so long at most")
    group.add_argument(
        "-E",
        "--conflict-exit-code",
        type=_exit_code,
        default=int(ExitCode.CONFLICT),
        metavar="N",
        help="end with N instead of 75, from 0 to 255",
    )


def _add_holding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("holding")
    group.add_argument(
        "--ttl",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how soon the lock is free again if this machine dies; while COMMAND runs it is"
        " extended in time. Default: %(default)g",
    )
    group.add_argument(
        "--max-hold",
        type=float,
        metavar="SECONDS",
        help="COMMAND is ended by then, as if the lock was lost; at least the ttl",
    )
    group.add_argument(
        "--hold-at-least",
        type=float,
        metavar="SECONDS",
        help="nobody gets the lock again so soon after it was got, although COMMAND may have ended:"
        " for a job that several machines start, whose clocks differ",
    )


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "locks that several may hold; all who use NAME must use the same kind"
    )
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument(
        "--permits", type=int, metavar="N", help="at most N at once; on one server only"
    )
    one_of.add_argument("--reader", action="store_true", help="share the lock with other readers")
    one_of.add_argument(
        "--writer", action="store_true", help="have the lock alone, without readers"
    )


def _run(args: argparse.Namespace) -> int:
    speak(args)
    command = _command(args)
    _check_kind(args)
    client = client_of(args, ttl=args.ttl)
    try:
        lock = _lock(client, args)
    except (TypeError, ValueError) as error:
        _refuse(str(error))
    from aiodlock.cli import _run_course, _terminal

    course = _run_course.Course(client, lock, command, urls_of(args), args.conflict_exit_code)
    code = asyncio.run(_ran(course, args))
    if code == _INTERRUPTED:
        _terminal.interrupt_our_group()
    return code


async def _ran(course: Course, args: argparse.Namespace) -> int:
    """The exit code; on a cluster, if the server is a node of one."""
    async with AsyncExitStack() as stack:
        if len(course.urls) == 1 and (cluster := await _cluster(stack, course.urls[0], args)):
            client = LockClient(cluster, prefix=args.prefix, ttl=args.ttl)
            course = replace(course, client=client, lock=_lock(client, args))
        return await course.run()


async def _cluster(
    stack: AsyncExitStack, url: str, args: argparse.Namespace
) -> RedisCluster | None:
    from aiodlock.cli._cluster import REQUEST_S, cluster_at

    try:
        return await stack.enter_async_context(cluster_at(url))
    except LockError as error:
        has_time = args.wait is None or args.wait > REQUEST_S
        if isinstance(error, ServerUnreachable) and has_time:
            return None  # Who waits for the lock waits for the server too.
        raise failure_of(error, [url]) from None


def _command(args: argparse.Namespace) -> list[str]:
    command: list[str] = args.command
    # Whether argparse leaves it there depends on the version of Python.
    if command[:1] == ["--"]:
        command = command[1:]
    if not command or not command[0]:  # "": the variable that it was to come from is not set.
        _refuse("no COMMAND: give it after --, as in `aiodlock run nightly -- ./report.sh`")
    if command == args.command and command[0].startswith("-"):
        _refuse(f"{command[0]} stands behind NAME, where COMMAND begins: options come before it")
    return command


def _check_kind(args: argparse.Namespace) -> None:
    shared = "--permits" if args.permits is not None else "--reader" if args.reader else "--writer"
    is_shared = args.permits is not None or args.reader or args.writer
    if is_shared and args.hold_at_least is not None:
        _refuse(f"--hold-at-least is not for {shared}: only a lock of one holder can keep a name")


def _lock(client: LockClient, args: argparse.Namespace) -> Lock:
    options = {"wait_timeout": args.wait, "max_hold": args.max_hold, "on_lost": "raise"}
    if args.permits is not None:
        return client.semaphore(args.name, permits=args.permits, **options)
    if args.reader:
        return client.reader(args.name, **options)
    if args.writer:
        return client.writer(args.name, **options)
    return client.lock(args.name, hold_at_least=args.hold_at_least, **options)


def _exit_code(text: str) -> int:
    code = int(text)
    if not 0 <= code <= 255:
        raise argparse.ArgumentTypeError("must be from 0 to 255")
    return code


def _refuse(message: str) -> NoReturn:
    raise Failure(message, ExitCode.USAGE)
