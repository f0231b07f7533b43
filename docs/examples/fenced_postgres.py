"""A write to PostgreSQL that a worker who was paused cannot do any more.

Run it, with the URL of a PostgreSQL of yours, in which it makes a table `accounts`:

    pip install 'aiodlock[embedded]' asyncpg
    DATABASE_URL=postgresql://localhost/test python fenced_postgres.py

It starts a lock server; AIODLOCK_URL takes yours.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable

import asyncpg

from aiodlock import LeaseLostError, LockClient
from aiodlock.fencing import SqlFence, StaleFenceError
from aiodlock.testing import lock_server

fence = SqlFence()


async def deposit(
    pool: asyncpg.Pool, locks: LockClient, amount: int, *, pause: float = 0.0
) -> None:
    # Without extension, and not cancelled at a loss: so a pause is like that of a whole process.
    lock = locks.lock("account:1", ttl=1, auto_extend=False, on_lost="raise")
    async with lock as lease:
        await asyncio.sleep(pause)
        async with pool.acquire() as connection, connection.transaction():
            await fence.claim(connection, lease)  # before the first read
            total = await connection.fetchval("SELECT total FROM accounts WHERE id = 1")
            await connection.execute("UPDATE accounts SET total = $1 WHERE id = 1", total + amount)


# From here on: worker A pauses for longer than its lease, and worker B comes in between.


async def play(worker: str, depositing: Awaitable[None]) -> None:
    try:
        await depositing
        print(worker, "is done")
    except StaleFenceError as error:
        print(
            worker, "is refused: it has", error.fencing_token, "and", error.stored_token, "stands"
        )
    except LeaseLostError as error:
        print(worker, "is told:", error.reason.value)


async def main() -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = os.environ.get("AIODLOCK_URL") or stack.enter_context(lock_server()).url
        locks = await stack.enter_async_context(LockClient.from_url(url))
        pool = await stack.enter_async_context(asyncpg.create_pool(os.environ["DATABASE_URL"]))
        await pool.execute("DROP TABLE IF EXISTS accounts")
        await pool.execute("CREATE TABLE accounts (id BIGINT PRIMARY KEY, total BIGINT)")
        await pool.execute("INSERT INTO accounts VALUES (1, 100)")
        async with pool.acquire() as connection, connection.transaction():
            await fence.create_tables(connection)
        await asyncio.gather(
            play("A", deposit(pool, locks, 10, pause=2)),
            play("B", deposit(pool, locks, 1)),
        )
        print("total:", await pool.fetchval("SELECT total FROM accounts"))


if __name__ == "__main__":
    asyncio.run(main())
