"""Claims in a SQL database, inside the user's own transaction."""

from __future__ import annotations

import re
from typing import Any, Final

from ._connections import Gate, Row, gate_of
from ._grant import Fenced, Grant, StaleFenceError, checked_name, grant_of

# Room for "_once" within the 63 bytes of an identifier of PostgreSQL.
_TABLE: Final = re.compile(r"(?:[A-Za-z_][A-Za-z0-9_]{0,62}\.)?[A-Za-z_][A-Za-z0-9_]{0,57}")

_CREATE: Final = """\
CREATE TABLE IF NOT EXISTS {fence} (
    name TEXT NOT NULL PRIMARY KEY,
    token BIGINT NOT NULL,
    claimed_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS {once} (
    name TEXT NOT NULL PRIMARY KEY,
    claimed_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP
);
"""
_CLAIM: Final = (
    "INSERT INTO {fence} AS held (name, token) VALUES ({0}, {1}) ON CONFLICT (name) "
    "DO UPDATE SET token = excluded.token, claimed_at = CURRENT_TIMESTAMP "
    "WHERE held.token < excluded.token RETURNING token"
)
# An UPDATE although nothing changes: it locks the row, on SQLite the file, until the transaction
# ends, so that no newer claim comes between this check and the commit.
_CHECK: Final = "UPDATE {fence} SET token = token WHERE name = {0} AND token = {1} RETURNING token"
_STORED: Final = "SELECT token FROM {fence} WHERE name = {0}"
_CLAIM_ONCE: Final = (
    "INSERT INTO {once} (name) VALUES ({0}) ON CONFLICT (name) DO NOTHING RETURNING name"
)


class SqlFence:
    """Claims in PostgreSQL or SQLite (3.35 or newer), in a table of their own.

    Every method takes an `AsyncSession` or `AsyncConnection` of SQLAlchemy (over asyncpg, psycopg
    or aiosqlite), a connection of asyncpg or of its pool, an `AsyncConnection` of psycopg, or a
    connection of aiosqlite or of sqlite3 (whose calls block the event loop). Each is one statement
    in the transaction that is open there, or that the library begins by itself; you commit it.

    Args:
        table: The table of claims, `schema.table` if you like: letters, digits and `_`, the table
            at most 58 of them. `claim_once` has its own beside it, with `_once` behind the name.

    Raises:
        TypeError, ValueError: An argument is not what is allowed.
    """

    def __init__(self, table: str = "aiodlock_fence") -> None:
        if not isinstance(table, str):
            raise TypeError(f"table must be a str; got {table!r}")
        if not _TABLE.fullmatch(table):
            raise ValueError(
                "table must be an identifier of letters, digits and _, at most 58 of them, "
                f"with or without a schema before it; got {table!r}"
            )
        self._tables = {"fence": _quoted(table), "once": _quoted(f"{table}_once")}

    @property
    def ddl(self) -> str:
        """Two statements that make the tables where they are missing, for your migrations."""
        return _CREATE.format(**self._tables)

    async def create_tables(self, connection: object) -> None:
        """Run `ddl`, in the transaction that is open, if one is.

        Two statements. Two processes that do it at the same moment may get an error of PostgreSQL.

        Raises:
            TypeError: *connection* is none of those that the class takes.
            Exception: What the database's library raises.

        Cancellation: as of any statement of the connection.
        """
        gate = await gate_of(connection)
        for statement in filter(str.strip, self.ddl.split(";")):
            await gate.fetch(statement, ())

    async def claim(self, connection: object, lease: Fenced) -> None:
        """Let this section in if nobody newer, or it itself, was: call it before the first read.

        One statement, two where it is refused. Waits for an open transaction that has claimed the
        name, or checked it. A rollback takes the claim back. A section claims once: where the
        answer to a commit was lost, a claim that is refused with its own token as the stored one
        says that the commit was done.

        Args:
            connection: In a transaction, and not inside a savepoint that may be rolled back alone.
            lease: A `Lease`, or a `Grant`.

        Raises:
            StaleFenceError: The stored token is as large, or larger. Let it leave the transaction's
                block, which rolls back.
            RuntimeError: The connection commits each statement by itself.
            TypeError, ValueError: An argument is not what is allowed.
            Exception: What the database's library raises; under REPEATABLE READ or SERIALIZABLE a
                serialization error, where another section committed since the transaction began:
                begin it again.

        Cancellation: as of any statement of the connection; roll back.
        Source: Kleppmann, "How to do distributed locking" (2016), on fencing; the claim before the
            first read is this library's.
        """
        grant = grant_of(lease)
        await self._demand(connection, _CLAIM, grant)

    async def check(self, connection: object, lease: Fenced) -> None:
        """Hold the claim of this section until the transaction ends, if its token still stands.

        One statement, two where it is refused. For each later transaction of a section, before
        its first read. A newer claim waits for the transaction's end, so checks of one section
        run one after the other, too.

        Args:
            connection: In a transaction.
            lease: The one that claimed.

        Raises:
            StaleFenceError: Another token is stored, or none.
            RuntimeError, TypeError, ValueError, Exception: As of `claim`.

        Cancellation: as of any statement of the connection; roll back.
        """
        grant = grant_of(lease)
        await self._demand(connection, _CHECK, grant)

    async def claim_once(self, connection: object, name: str) -> bool:
        """Whether this is the first claim of *name* ever: a task's id, to do the task once.

        One statement. It stands or falls with the transaction, so put the work into the same one; a
        second claim waits for the first one's transaction. Needs no lock.

        Args:
            connection: In a transaction.
            name: 1 to 512 UTF-8 bytes.

        Returns:
            True for the first that commits, False for all others.

        Raises:
            RuntimeError, TypeError, ValueError, Exception: As of `claim`.

        Cancellation: as of any statement of the connection; roll back.
        """
        gate = await self._gate(connection, checked_name(name))
        return await self._run(gate, _CLAIM_ONCE, name) is not None

    async def _demand(self, connection: object, statement: str, grant: Grant) -> None:
        gate = await self._gate(connection, grant.name)
        if await self._run(gate, statement, grant.name, grant.fencing_token) is None:
            stored = await self._run(gate, _STORED, grant.name)
            raise StaleFenceError(
                name=grant.name,
                fencing_token=grant.fencing_token,
                stored_token=None if stored is None else int(stored[0]),
            )

    async def _gate(self, connection: object, name: str) -> Gate:
        if "\0" in name:  # PostgreSQL's TEXT cannot hold it.
            raise ValueError(f"name must be without NUL in a SQL database; got {name!r}")
        gate = await gate_of(connection)
        if not gate.may_write():
            raise RuntimeError(_NO_TRANSACTION)
        return gate

    async def _run(self, gate: Gate, statement: str, *parameters: Any) -> Row:
        row = await gate.fetch(statement.format(*gate.placeholders, **self._tables), parameters)
        if not gate.in_transaction():
            # A mode that could not be seen before; better said late than never.
            raise RuntimeError(_NO_TRANSACTION)
        return row


_NO_TRANSACTION: Final = (
    "no transaction is open on this connection, which commits each statement by itself: "
    "a fence protects only what is in the same transaction"
)


def _quoted(table: str) -> str:
    return ".".join(f'"{part}"' for part in table.split("."))
