"""The app of which the tests run two processes; it writes down who is at work when.

The environment gives JOURNAL, a file, and LOCK_SERVER, a URL.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated

from aiodlock import Lease, LockClient
from aiodlock.fastapi import Locked
from tests.web import an_app

# How long a killed process still holds; far more than a busy machine lets the other stand still.
TTL_S = 1.5
WORK_S = 0.01

app = an_app(LockClient.from_url(os.environ["LOCK_SERVER"], ttl=TTL_S))
# Opened to append: each line is written whole, whichever process it comes from.
_journal = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


async def _work(invoice: int, token: int, work_s: float = WORK_S) -> None:
    _note("begin", invoice, token)
    await asyncio.sleep(work_s)
    _note("end", invoice, token)


def _note(what: str, invoice: int, token: int) -> None:
    line = f"{what} {invoice} {token} {os.getpid()} {time.monotonic_ns()}\n"
    os.write(_journal, line.encode())


@app.get("/pid")
async def pid() -> int:
    """Who answers."""
    return os.getpid()


@app.post("/wait/{invoice_id}")
async def wait(
    invoice_id: int,
    lease: Annotated[Lease, Locked("invoice:{invoice_id}", wait_timeout=8)],
    work_s: float = WORK_S,
) -> None:
    """Under the lock, which is waited for."""
    await _work(invoice_id, lease.fencing_token, work_s)


@app.post("/try/{invoice_id}")
async def try_it(
    invoice_id: int, lease: Annotated[Lease, Locked("invoice:{invoice_id}", wait_timeout=0)]
) -> None:
    """Under the lock, if it is free."""
    await _work(invoice_id, lease.fencing_token)


@app.post("/unlocked/{invoice_id}")
async def unlocked(invoice_id: int) -> None:
    """The negative control."""
    await _work(invoice_id, time.monotonic_ns())
