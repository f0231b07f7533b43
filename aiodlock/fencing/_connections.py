"""One way to run a statement on each kind of connection, inside the user's own transaction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

_ALLOWED: Final = (
    "connection must be an AsyncSession or AsyncConnection of SQLAlchemy (over asyncpg, psycopg or "
    "aiosqlite), a connection of asyncpg or its pool, an AsyncConnection of psycopg, a connection "
    "of aiosqlite or of sqlite3"
)

Row = Sequence[Any] | None


class Gate(Protocol):
    """A connection, seen as little as a fence needs it."""

    placeholders: tuple[str, str]
    """Of a statement's first and second parameter."""

    def may_write(self) -> bool:
        """Whether a statement sent now would be in a transaction; no I/O."""

    def in_transaction(self) -> bool:
        """Whether one is open; no I/O."""

    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        """Run *statement*; its first row, if it has one."""


async def gate_of(connection: object) -> Gate:
    """What to run statements through.

    A class can only be a connection's if its library has been imported, so nothing is imported.
    """
    if _is_a(connection, "sqlalchemy.ext.asyncio", "AsyncSession", "async_scoped_session"):
        connection = await connection.connection()  # type: ignore[attr-defined]
    if _is_a(connection, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        return await _SqlAlchemy.on(connection)
    return _driver(connection)


def _driver(connection: object) -> Gate:
    if _is_a(connection, "asyncpg", "Connection"):
        return _Asyncpg(connection)
    if _is_a(connection, "asyncpg.pool", "PoolConnectionProxy"):
        return _Asyncpg(connection)
    if _is_a(connection, "psycopg", "AsyncConnection"):
        return _Psycopg(connection)
    if _is_a(connection, "aiosqlite", "Connection"):
        return _Aiosqlite(connection)
    if _is_a(connection, "sqlite3", "Connection"):
        return _Sqlite(connection)
    raise TypeError(f"{_ALLOWED}; got {connection!r}")


def _is_a(connection: object, module: str, *names: str) -> bool:
    imported = sys.modules.get(module)
    classes = tuple(getattr(imported, name) for name in names if hasattr(imported, name))
    return isinstance(connection, classes)


class _Asyncpg:
    placeholders = ("$1", "$2")

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def may_write(self) -> bool:
        return self.in_transaction()

    def in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())

    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        row: Row = await self._connection.fetchrow(statement, *parameters)
        return row


class _Psycopg:
    placeholders = ("%s", "%s")

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def may_write(self) -> bool:
        return self.in_transaction() or not self._connection.autocommit

    def in_transaction(self) -> bool:
        return int(self._connection.info.transaction_status) != 0  # IDLE

    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        from psycopg import AsyncCursor
        from psycopg.rows import tuple_row

        # Not connection.execute(): the user may have set other rows, or other placeholders.
        async with AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
            await cursor.execute(statement.encode(), parameters or None)
            # Only the DDL has neither. (A cursor in pipeline mode knows of no rows before it asks.)
            return await cursor.fetchone() if parameters else None


class _Sqlite:
    """Its calls block the event loop, as every call of that connection does."""

    placeholders = ("?", "?")

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def may_write(self) -> bool:
        # By default sqlite3 begins a transaction before the first statement that writes. Its other
        # mode, since Python 3.12, aiosqlite does not show.
        begins = self._connection.isolation_level is not None
        begins = begins and getattr(self._connection, "autocommit", None) is not True
        return self.in_transaction() or begins

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        cursor = self._connection.cursor()
        cursor.row_factory = None  # the user's would be applied to our rows
        try:
            row: Row = cursor.execute(statement, parameters).fetchone()
            return row
        finally:
            cursor.close()


class _Aiosqlite(_Sqlite):
    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        async with self._connection.cursor() as cursor:
            cursor.row_factory = None
            await cursor.execute(statement, parameters)
            row: Row = await cursor.fetchone()
            return row


class _SqlAlchemy:
    """Statements go through SQLAlchemy, so that it knows of the transaction that they are in."""

    def __init__(self, connection: Any, driver: Gate, *, autocommits: bool) -> None:
        self.placeholders = driver.placeholders
        self._connection = connection
        self._driver = driver
        self._autocommits = autocommits

    @classmethod
    async def on(cls, connection: Any) -> Gate:
        if not connection.in_transaction():
            await connection.begin()  # as its first statement would
        raw = await connection.get_raw_connection()
        # Over asyncpg a transaction begins with its first statement; only the setting shows it.
        autocommits = getattr(raw.dbapi_connection, "autocommit", False) is True
        return cls(connection, _driver(raw.driver_connection), autocommits=autocommits)

    def may_write(self) -> bool:
        if isinstance(self._driver, _Asyncpg):
            return self._driver.in_transaction() or not self._autocommits
        return self._driver.may_write()

    def in_transaction(self) -> bool:
        return self._driver.in_transaction()

    async def fetch(self, statement: str, parameters: tuple[Any, ...]) -> Row:
        result = await self._connection.exec_driver_sql(statement, parameters or None)
        row: Row = result.first() if result.returns_rows else None
        return row
