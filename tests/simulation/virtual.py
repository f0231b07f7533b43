"""Puts the clock, the chance, the client ids of aiodlock under the seed."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from aiodlock import Lease, _clock, _names, _trying, _waiting, _watchdog
from tests.simulation.world import HostLoop


class Chance(random.Random):
    """What aiodlock draws from: in place of its modules `random` and `secrets`."""

    def token_hex(self, count: int) -> str:
        return f"{self.getrandbits(count * 8):0{count * 2}x}"


def now() -> float:
    """The clock of deadlines of the host whose loop runs."""
    loop = asyncio._get_running_loop()
    return loop.host.now() if isinstance(loop, HostLoop) else 0.0


@contextmanager
def under_seed(seed: int) -> Iterator[list[str]]:
    """What aiodlock does depends on *seed* only; brings what was raised where nobody listens.

    Sets of waits and of leases are walked in an order that the process does not choose.
    """
    chance = Chance(f"product {seed}")
    ignored: list[str] = []

    def note(unraisable: Any) -> None:
        ignored.append(f"{unraisable.err_msg or ''} {unraisable.exc_value!r}".strip())

    with ExitStack() as stack:
        for owner, name, value in (
            (_clock, "now", now),
            (_trying, "random", chance),
            (_waiting, "random", chance),
            (_watchdog, "random", chance),
            (_names, "secrets", chance),
            (_waiting.Wait, "__hash__", lambda wait: _stable(wait.acquisition.token)),
            # Its token changes from try to try.
            (_trying.Tries, "__hash__", lambda tries: hash(tries._started_at)),
            (Lease, "__hash__", lambda lease: _stable(lease.owner_token)),
            (sys, "unraisablehook", note),
            (logging.getLogger("aiodlock"), "disabled", True),
            (logging.getLogger("asyncio"), "disabled", True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)  # Users here do throw leases away.
        stack.callback(gc.enable)
        gc.disable()
        yield ignored


def _stable(token: str) -> int:
    return zlib.crc32(token.encode())
