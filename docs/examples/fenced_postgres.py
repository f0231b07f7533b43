"""A write to PostgreSQL that a worker who was paused cannot do any more.

Run it, with the URL of a PostgreSQL of yours. It makes a table `aiodlock_example` there, which it
drops at its end, and the fence's own tables, which stay:

    pip install 'aiodlock[embedded]' asyncpg
    DATABASE_URL=postgresql://localhost/test python fenced_postgres.py

It starts a lock server; AIODLOCK_URL takes yours.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable

import asyncpg

from aiodlock import Lock, LockClient
from aiodlock.fencing import SqlFence, StaleFenceError
from aiodlock.testing import lock_server

fence = SqlFence()


async def deposit(
    pool: asyncpg.Pool, lock: Lock, amount: int, pause: Awaitable[object] | None = None
) -> None:
    async with lock as lease:
        if pause is not None:
            await pause
        async with pool.acquire() as connection, connection.transaction():
            await fence.claim(connection, lease)  # before the first read
            total = await connection.fetchval("SELECT total FROM aiodlock_example")
            await connection.execute("UPDATE aiodlock_example SET total = $1", total + amount)


# From here on: worker A pauses until its lease is over, and worker B has been there.


async def worker_a(pool: asyncpg.Pool, locks: LockClient, b_was_there: asyncio.Event) -> None:
    # Neither extended nor cancelled at a loss: like a whole process that stands still.
    lock = locks.lock("account:1", ttl=1, auto_extend=False, on_lost="raise")
    try:
        await deposit(pool, lock, 10, pause=b_was_there.wait())
    except StaleFenceError as error:
        print(f"A is refused: it has {error.fencing_token}, and {error.stored_token} stands")


async def worker_b(pool: asyncpg.Pool, locks: LockClient, b_was_there: asyncio.Event) -> None:
    await deposit(pool, locks.lock("account:1"), 1)
    print("B is done")
    b_was_there.set()


async def main(database_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("AIODLOCK_URL") or stack.enter_context(lock_server()).url
        locks = await stack.enter_async_context(LockClient.from_url(url))
        pool = await stack.enter_async_context(asyncpg.create_pool(database_url))
        await pool.execute("CREATE TABLE aiodlock_example (total BIGINT)")
        # Only now: one of that name that stood there before is somebody's.
        stack.push_async_callback(pool.execute, "DROP TABLE aiodlock_example")
        await pool.execute("INSERT INTO aiodlock_example VALUES (100)")
        async with pool.acquire() as connection, connection.transaction():
            await fence.create_tables(connection)
        b_was_there = asyncio.Event()
        await asyncio.gather(worker_a(pool, locks, b_was_there), worker_b(pool, locks, b_was_there))
        print("total:", await pool.fetchval("SELECT total FROM aiodlock_example"))


if __name__ == "__main__":
    if "DATABASE_URL" not in os.environ:
        sys.exit("DATABASE_URL: a PostgreSQL of yours")
    asyncio.run(main(os.environ["DATABASE_URL"]))
