"""What every command that talks to servers shares: which they are, what it says, how it ends.

A command's `run` may raise `Failure`, and any `LockError` by way of `failure_of`; `main` prints
the one as a line on stderr, with its exit code.
"""

from __future__ import annotations

import argparse
import codecs
import enum
import logging
import os
import re
import sys
import warnings
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from aiodlock import LockClient, NameTakenError, NotAllowedError, QuorumError, ServerUnreachable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodlock import LockError

log = logging.getLogger("aiodlock.cli")

_VARIABLE: Final = "AIODLOCK_URL"
# A comma within a URL is none between two of them.
_BETWEEN_URLS: Final = re.compile(r"[\s,]+(?=\w+://)|\s+")
# Options of redis-py that are objects: a text in their place fails later, in its midst.
_OBJECTS: Final = re.compile(
    r"[?&](credential_provider|retry|redis_connect_func|event_dispatcher|\w+_class"
    r"|maint_\w+|maintenance_\w+|driver_info|himport_registry|socket_keepalive_options)="
)
_ALLOWED: Final = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://... or unix://PATH"


class ExitCode(enum.IntEnum):
    """What our own endings are called in sysexits.h; 75 is what cron and mailers try again."""

    USAGE = 64
    UNREACHABLE = 69
    FAULT = 70
    MACHINE = 71
    LOST = 74
    CONFLICT = 75
    NOT_ALLOWED = 77
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


class Failure(Exception):
    """The command cannot go on: what to say, without a password, and how to exit."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, `--prefix`, `-q` and `-v`."""
    group = parser.add_argument_group("where the locks are, and what is said")
    group.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="the server: redis://host:6379/0, rediss://... or unix://...; given three times or"
        " more, a quorum of independent servers. Default: AIODLOCK_URL, with a space or a comma"
        " between several. A password belongs there: everybody on the machine can read the"
        " options of a command",
    )
    group.add_argument(
        "--prefix",
        default="aiodlock:",
        metavar="TEXT",
        help="what every key begins with. Default: %(default)s",
    )
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="say what is done, too; all of it on stderr"
    )


def speak(args: argparse.Namespace) -> None:
    """Let warnings come out on stderr; with `-v` news too, with `-q` errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("aiodlock: %(message)s"))
    logger = logging.getLogger("aiodlock")
    logger.addHandler(handler)
    logger.setLevel(
        logging.INFO if args.verbose else logging.ERROR if args.quiet else logging.WARNING
    )


def urls_of(args: argparse.Namespace) -> list[str]:
    """The servers that the options, or else the environment, name.

    Raises:
        Failure: There is none, or one that is no URL of a server.
    """
    urls: list[str] = args.url or _split(os.environ.get(_VARIABLE, ""))
    if not urls:
        # No default: on a machine that lost its variable a job would lock a server of its own.
        raise Failure(
            "which server? Give --url redis://localhost:6379/0, or set AIODLOCK_URL",
            ExitCode.USAGE,
        )
    for url in urls:
        _check(url, "--url" if args.url else _VARIABLE)
    return urls


def client_of(
    args: argparse.Namespace, *, ttl: float = 30.0, wait_timeout: float | None = None
) -> LockClient:
    """A client on those servers: on one, or on a quorum of several.

    Raises:
        Failure: The servers, or an option, are not what is allowed.
    """
    urls = urls_of(args)
    if len(urls) == 2:
        raise Failure(
            "2 URLs: give that of one server, or those of 3 or more for a quorum; 2 would bear the"
            " loss of none",
            ExitCode.USAGE,
        )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            if len(urls) == 1:
                client = LockClient.from_url(
                    urls[0], prefix=args.prefix, ttl=ttl, wait_timeout=wait_timeout
                )
            else:
                client = LockClient.quorum(
                    urls, prefix=args.prefix, ttl=ttl, wait_timeout=wait_timeout
                )
        except (TypeError, ValueError) as error:
            raise Failure(str(error), ExitCode.USAGE) from None
    for warning in heard:
        log.warning("%s", warning.message)
    return client


def shown(url: str) -> str:
    """*url* for people: without user, password and options, whatever is wrong with it."""
    try:
        parts = urlsplit(url)
        place = f":{parts.port}" if parts.port is not None else ""
    except ValueError:  # Perhaps a password with a character that should have been escaped.
        return "an unreadable URL"
    path = parts.path.rpartition("@")[2]
    if parts.scheme == "unix":
        return f"unix://{path}"
    database = path if re.fullmatch(r"/\d+", path) else ""
    return f"{parts.scheme}://{parts.hostname or 'localhost'}{place}{database}"


def failure_of(error: LockError, urls: Sequence[str]) -> Failure:
    """The end of a command that *error* came out of, other than what it waits or works for."""
    if isinstance(error, NameTakenError):
        return Failure(f"{error}; `aiodlock show` says what it is", ExitCode.FAULT)
    # Over a quorum the words name the nodes.
    place = "" if isinstance(error, QuorumError) else f"{', '.join(map(shown, urls))}: "
    if isinstance(error, ServerUnreachable):
        return Failure(f"{place}{error}; `aiodlock doctor` says more", ExitCode.UNREACHABLE)
    if isinstance(error, NotAllowedError):
        return Failure(f"{place}{error}; `aiodlock doctor` says more", ExitCode.NOT_ALLOWED)
    return Failure(str(error), ExitCode.FAULT)


def _split(text: str) -> list[str]:
    return [url for url in _BETWEEN_URLS.split(text.strip(" \t\n,")) if url]


def _check(url: str, where: str) -> None:
    """Nothing that redis-py says about a URL is shown: it may be a part of the password."""
    from redis.exceptions import RedisError

    from aiodlock._store import _source

    try:
        if not url.startswith(("redis://", "rediss://", "unix://")) or _OBJECTS.search(url):
            raise ValueError
        # Only a connection knows which options there are.
        pool = _source.of_url(url).connection_pool
        pool.connection_class(**pool.connection_kwargs)
        codecs.lookup(pool.connection_kwargs.get("encoding", "utf-8"))
    except (AttributeError, LookupError, TypeError, ValueError, RedisError):
        raise Failure(
            f"{where}: not the URL of a server. Allowed is {_ALLOWED}; special characters in a"
            " password are percent-encoded, options after ? are those of redis-py",
            ExitCode.USAGE,
        ) from None
