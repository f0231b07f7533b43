"""One client at its work, in a process of its own: ``python -m benchmarks.worker <order>``.

It says `ready`, waits for `go`, works, says `done`, waits for `end`, says its result as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from . import clients
from ._orders import Order
from ._stage import Stage
from .work import WORKS

CLOSE_WITHIN_S = 3.0


async def serve(order: Order) -> None:
    """Do as told."""
    stage = Stage()
    client = clients.CLIENTS[order.client].make()
    await client.open(order)
    gc.collect()
    result = await WORKS[order.work](client, order, stage)
    stage.report(result)
    try:
        async with asyncio.timeout(CLOSE_WITHIN_S):
            await client.aclose()
    except Exception as error:  # The result stands; how a peer closes is not measured.
        print(f"closing: {error!r}", file=sys.stderr)  # noqa: T201


def raise_limit_of_files() -> None:
    """A connection for each task, where a peer wants that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(text: str) -> None:
    """Do as told in *text*; the process ends here."""
    order = Order.from_json(text)
    raise_limit_of_files()
    factory: Callable[[], Any] | None = None
    if clients.CLIENTS[order.client].uvloop:
        factory = importlib.import_module("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(order))
        sys.stdout.flush()
        os._exit(0)  # At once: threads of a peer may wait for ever.


if __name__ == "__main__":
    main(sys.argv[1])
