"""Two workers on one list of rows: one is killed at work, the other goes on, none is written twice.

Run it:

    pip install 'aiodlock[embedded]'
    python surviving_worker.py

It starts a lock server (AIODLOCK_URL takes yours) with two workers, kills the one that is at work
on row 3 (SIGKILL), and at the end writes with the dead one's fencing token, which is refused.
"""

import asyncio
import contextlib
import os
import sqlite3
import sys
import tempfile
from asyncio.subprocess import PIPE, Process

from aiodlock import LockClient
from aiodlock.fencing import Grant, SqlFence, StaleFenceError
from aiodlock.testing import lock_server

NAME = "import"
ROWS = 8
fence = SqlFence()


async def work(url: str, path: str) -> None:
    """Do one row after the other, until none is left."""
    database = sqlite3.connect(path)
    async with LockClient.from_url(url, ttl=3) as locks:
        while True:
            async with locks.lock(NAME) as lease:
                with database:  # a transaction
                    await fence.claim(database, lease)  # before the first read
                    number = next_row(database)
                if number is None:
                    return
                print(number, lease.fencing_token, flush=True)
                await asyncio.sleep(0.1)  # the work
                with database:
                    await fence.check(database, lease)
                    database.execute(
                        "UPDATE todo SET times = times + 1, token = ? WHERE number = ?",
                        (lease.fencing_token, number),
                    )


def next_row(database: sqlite3.Connection) -> int | None:
    row = database.execute("SELECT min(number) FROM todo WHERE times = 0").fetchone()
    return None if row[0] is None else int(row[0])


# From here on: two workers, and somebody who kills one of them.


async def watch(worker: Process) -> int | None:
    """Kill *worker* if it is the one that has row 3; the fencing token that it had then."""
    assert worker.stdout is not None
    while line := await worker.stdout.readline():
        number, token = map(int, line.split())
        print(f"worker {worker.pid} begins row {number} with token {token}")
        if number == 3 and not killed.is_set():
            killed.set()
            worker.kill()
            await worker.wait()
            print(f"worker {worker.pid} is killed")
            return token
    await worker.wait()
    return None


killed = asyncio.Event()


async def main(path: str) -> None:
    database = sqlite3.connect(path)
    with database:
        await fence.create_tables(database)
        database.execute("CREATE TABLE todo (number INTEGER, times INTEGER, token INTEGER)")
        database.executemany(
            "INSERT INTO todo VALUES (?, 0, 0)", [(n,) for n in range(1, ROWS + 1)]
        )
    with contextlib.ExitStack() as stack:
        url = os.environ.get("AIODLOCK_URL") or stack.enter_context(lock_server()).url
        command = (sys.executable, __file__, url, path)
        workers = [await asyncio.create_subprocess_exec(*command, stdout=PIPE) for _ in range(2)]
        tokens = await asyncio.gather(*(watch(worker) for worker in workers))
    times = [row[0] for row in database.execute("SELECT times FROM todo ORDER BY number")]
    print("each row was done so many times:", times)
    (dead,) = (token for token in tokens if token is not None)
    try:
        with database:
            await fence.check(database, Grant(NAME, dead))
    except StaleFenceError as error:
        print(f"a write with the dead one's token is refused: {error.stored_token} stands")
    database.close()


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(work(*sys.argv[1:]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(main(f"{directory}/todo.db"))
