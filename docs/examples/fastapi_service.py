"""A FastAPI service of which two instances run, behind one lock.

Run it:

    pip install 'aiodlock[fastapi,embedded]' uvicorn
    python fastapi_service.py

It starts a lock server (AIODLOCK_URL takes yours) with two instances of the app, and asks both to
charge the same invoice at the same time. To serve one instance: `uvicorn fastapi_service:app`.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI

from aiodlock import Lease, LockClient
from aiodlock.fastapi import Locked, install
from aiodlock.testing import lock_server

locks = LockClient.from_url(os.environ.get("AIODLOCK_URL", "redis://localhost:6379"), ttl=10)


@contextlib.asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with locks:
        yield


app = FastAPI(lifespan=lifespan)
install(app, locks)


@app.post("/invoices/{invoice_id}/charge")
async def charge(
    invoice_id: int, lease: Annotated[Lease, Locked("invoice:{invoice_id}", wait_timeout=5)]
) -> dict[str, int]:
    begin_ns = time.monotonic_ns()
    await charge_customer(invoice_id)
    lease.check()
    return {"process": os.getpid(), "token": lease.fencing_token, "begin_ns": begin_ns}


async def charge_customer(_invoice_id: int) -> None:
    await asyncio.sleep(0.1)  # the payment provider is slow


# From here on: two instances, and somebody who asks them.


def start_instance(url: str) -> tuple[subprocess.Popen[bytes], int]:
    """One instance, with its port; requests that come before it is up wait for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "fastapi_service:app"),
                *("--fd", str(listener.fileno()), "--log-level", "warning"),
            ],
            cwd=Path(__file__).parent,
            env={**os.environ, "AIODLOCK_URL": url},
            pass_fds=[listener.fileno()],
        )
        return process, listener.getsockname()[1]


def charge_at(port: int) -> dict[str, int]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/invoices/42/charge", method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.load(answer))


async def main() -> None:
    with contextlib.ExitStack() as stack:
        url = os.environ.get("AIODLOCK_URL") or stack.enter_context(lock_server()).url
        instances = [start_instance(url) for _ in range(2)]
        for process, _ in instances:
            stack.enter_context(process)
            stack.callback(process.terminate)
        ports = [port for _, port in instances] * 3
        answers = await asyncio.gather(*(asyncio.to_thread(charge_at, port) for port in ports))
    for answer in sorted(answers, key=lambda answer: answer["begin_ns"]):
        print(f"process {answer['process']} charged with token {answer['token']}")


if __name__ == "__main__":
    asyncio.run(main())
