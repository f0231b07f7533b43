"""Claims in PostgreSQL and SQLite, over every kind of connection that is allowed."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError

from aiodlock import LockClient, LockError
from aiodlock.fencing import Grant, SqlFence, StaleFenceError, _sql
from tests.fencing_databases import (
    POSTGRES_KINDS,
    SQLITE_KINDS,
    Desk,
    Postgres,
    alchemy_engine,
    alchemy_url,
    over_asyncpg,
    postgres_server,
)

NAME = "account:1"
FIRST, SECOND, THIRD = (Grant(NAME, token) for token in (101, 102, 103))
TOTAL = "SELECT total FROM accounts"
TOKEN = "SELECT token FROM aiodlock_fence"
LOCKED = (sqlite3.OperationalError, OperationalError)
SERIALIZATION = (asyncpg.SerializationError, psycopg.errors.SerializationFailure)

fence = SqlFence()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One for the whole run."""
    with postgres_server() as running:
        yield running


class World:
    """An empty database, and connections to it of one kind."""

    def __init__(self, kind: str, url: str, postgres: Postgres | None) -> None:
        self._open = (POSTGRES_KINDS | SQLITE_KINDS)[kind]
        self._url = url
        self.postgres = postgres

    def desk(self) -> AbstractAsyncContextManager[Desk]:
        """A new connection."""
        return self._open(self._url)

    async def after(self, older: AbstractAsyncContextManager[Any], newer: Any) -> Any:
        """What *newer* (a function) gives, begun while the transaction *older* is open.

        On PostgreSQL it must wait for it; on SQLite, which is told not to wait, it is refused
        while that one is open.
        """
        if self.postgres is None:
            async with older:
                with pytest.raises(LOCKED, match="locked"):
                    await newer()
            return await newer()
        async with older:
            waiting = asyncio.create_task(newer())
            await self.postgres.somebody_waits()
            assert not waiting.done()
        return await waiting


@pytest.fixture(params=[*POSTGRES_KINDS, *SQLITE_KINDS])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Every kind of connection in turn, with a table of fences and one account."""
    kind: str = request.param
    postgres = request.getfixturevalue("postgres") if kind in POSTGRES_KINDS else None
    url = await postgres.fresh() if postgres else str(tmp_path / "database")
    made = World(kind, url, postgres)
    async with made.desk() as desk, desk.transaction():
        await fence.create_tables(desk.connection)
        await desk.rows("CREATE TABLE accounts (id INTEGER PRIMARY KEY, total INTEGER)")
        await desk.rows("INSERT INTO accounts VALUES (1, 100)")
    return made


@pytest.fixture
async def a(world: World) -> AsyncIterator[Desk]:
    """The connection of the section that is first."""
    async with world.desk() as desk:
        yield desk


@pytest.fixture
async def b(world: World) -> AsyncIterator[Desk]:
    """The connection of the section that is second."""
    async with world.desk() as desk:
        yield desk


async def claim(desk: Desk, grant: Grant) -> None:
    """In a transaction of its own."""
    async with desk.transaction():
        await fence.claim(desk.connection, grant)


async def check(desk: Desk, grant: Grant) -> None:
    """In a transaction of its own."""
    async with desk.transaction():
        await fence.check(desk.connection, grant)


async def test_claim_with_a_larger_token_is_stored(a: Desk) -> None:
    """The first one of a name, too."""
    await claim(a, FIRST)
    await claim(a, THIRD)
    async with a.transaction():
        assert await a.value(TOKEN) == THIRD.fencing_token


@pytest.mark.parametrize("late", [FIRST, SECOND])
async def test_claim_with_no_larger_token_rolls_the_transaction_back(a: Desk, late: Grant) -> None:
    """A smaller one, and the same one again: what the transaction wrote before is undone."""
    await claim(a, SECOND)
    with pytest.raises(StaleFenceError) as refused:
        async with a.transaction():
            await a.rows("UPDATE accounts SET total = 0")
            await fence.claim(a.connection, late)
    assert (refused.value.fencing_token, refused.value.stored_token) == (late.fencing_token, 102)
    async with a.transaction():
        assert (await a.value(TOTAL), await a.value(TOKEN)) == (100, 102)


async def test_claim_that_is_rolled_back_gives_the_old_token_back(a: Desk) -> None:
    """So the section may begin its transaction again."""
    await claim(a, FIRST)
    with pytest.raises(ZeroDivisionError):
        async with a.transaction():
            await fence.claim(a.connection, SECOND)
            assert await a.value(TOKEN) == 102
            raise ZeroDivisionError
    async with a.transaction():
        assert await a.value(TOKEN) == 101
    await claim(a, SECOND)


async def test_check_with_the_claimed_token_passes_again_and_again(a: Desk) -> None:
    """Twice in the claim's transaction, once in a later one."""
    async with a.transaction():
        await fence.claim(a.connection, FIRST)
        await fence.check(a.connection, FIRST)
        await fence.check(a.connection, FIRST)
    async with a.transaction():
        await fence.check(a.connection, FIRST)
        await a.rows("UPDATE accounts SET total = 1")
    async with a.transaction():
        assert await a.value(TOTAL) == 1


@pytest.mark.parametrize(("grant", "stored"), [(FIRST, 102), (THIRD, 102), (Grant("x", 7), None)])
async def test_check_with_another_token_is_refused(
    a: Desk, grant: Grant, stored: int | None
) -> None:
    """An older one, one that has not claimed, and one of a name that nobody claimed."""
    await claim(a, SECOND)
    with pytest.raises(StaleFenceError) as refused:
        await check(a, grant)
    assert (refused.value.name, refused.value.stored_token) == (grant.name, stored)


async def test_names_have_tokens_of_their_own(a: Desk) -> None:
    """Names of any characters; the largest token there is."""
    largest = Grant("100% {of} $1 ? 'quoted' \"ü\" :name %s", 2**63 - 1)
    await claim(a, FIRST)
    await claim(a, largest)
    await check(a, FIRST)
    await check(a, largest)


async def test_newer_claim_waits_for_the_section_that_has_checked(
    world: World, a: Desk, b: Desk
) -> None:
    """Between check and commit nothing newer comes in; it sees what the older one wrote."""
    await claim(a, FIRST)

    @contextlib.asynccontextmanager
    async def older() -> AsyncIterator[None]:
        async with a.transaction():
            await fence.check(a.connection, FIRST)
            yield
            await a.rows("UPDATE accounts SET total = total + 1")

    async def newer() -> int:
        async with b.transaction():
            await fence.claim(b.connection, SECOND)
            return int(await b.value(TOTAL))

    assert await world.after(older(), newer) == 101
    with pytest.raises(StaleFenceError):
        await check(a, FIRST)


async def test_older_claim_waits_for_the_newer_one_then_is_refused(
    world: World, a: Desk, b: Desk
) -> None:
    """The first claims of a name: there is no row yet that could be locked."""

    @contextlib.asynccontextmanager
    async def newer() -> AsyncIterator[None]:
        async with b.transaction():
            await fence.claim(b.connection, SECOND)
            yield

    async def older() -> StaleFenceError:
        with pytest.raises(StaleFenceError) as refused:
            await claim(a, FIRST)
        return refused.value

    assert (await world.after(newer(), older)).stored_token == 102


async def test_older_claim_passes_once_the_newer_one_is_rolled_back(
    world: World, a: Desk, b: Desk
) -> None:
    """Nothing newer was ever seen by anybody."""

    @contextlib.asynccontextmanager
    async def newer() -> AsyncIterator[None]:
        with contextlib.suppress(ZeroDivisionError):
            async with b.transaction():
                await fence.claim(b.connection, SECOND)
                yield
                raise ZeroDivisionError

    await world.after(newer(), lambda: claim(a, FIRST))
    await check(a, FIRST)


async def test_claim_once_twice_at_once_is_won_by_one(world: World, a: Desk, b: Desk) -> None:
    """The second waits for the first one's transaction; other names are free."""

    @contextlib.asynccontextmanager
    async def first() -> AsyncIterator[None]:
        async with a.transaction():
            assert await fence.claim_once(a.connection, "task:1") is True
            yield

    async def second() -> tuple[bool, bool]:
        async with b.transaction():
            lost = await fence.claim_once(b.connection, "task:1")
            return lost, await fence.claim_once(b.connection, "task:2")

    assert await world.after(first(), second) == (False, True)


async def test_claim_once_of_a_task_that_failed_is_free_again(a: Desk) -> None:
    """Claim and work stand or fall together."""
    with pytest.raises(ZeroDivisionError):
        async with a.transaction():
            assert await fence.claim_once(a.connection, "task:1") is True
            raise ZeroDivisionError
    async with a.transaction():
        assert await fence.claim_once(a.connection, "task:1") is True
        assert await fence.claim_once(a.connection, "task:1") is False


async def add(desk: Desk, read: int, amount: int) -> None:
    """Write what a section computed from what it had read."""
    await desk.rows(f"UPDATE accounts SET total = {read + amount}")


async def test_checking_only_writes_loses_an_update_and_claiming_first_does_not(
    a: Desk, b: Desk
) -> None:
    """Two sections read before either writes, their writes in the order of their tokens."""

    async def write_only(desk: Desk, grant: Grant, read: int, amount: int) -> None:
        async with desk.transaction():
            token = grant.fencing_token
            passed = await desk.rows(
                f"INSERT INTO aiodlock_fence AS held (name, token) VALUES ('write-only', {token}) "
                "ON CONFLICT (name) DO UPDATE SET token = excluded.token "
                "WHERE held.token <= excluded.token RETURNING token"
            )
            assert passed, "the tokens are in order: the check sees nothing wrong"
            await add(desk, read, amount)

    async def read(desk: Desk) -> int:
        async with desk.transaction():
            return int(await desk.value(TOTAL))

    # Only writes are checked: a's 10 are gone, and nobody was told.
    of_a, of_b = await read(a), await read(b)
    await write_only(a, FIRST, of_a, 10)
    await write_only(b, SECOND, of_b, 1)
    assert await read(a) == 101

    # Claims come first: a is told, so it can do its work again.
    await claim(a, FIRST)
    of_a = await read(a)
    await claim(b, SECOND)
    of_b = await read(b)
    with pytest.raises(StaleFenceError):
        async with a.transaction():
            await fence.check(a.connection, FIRST)
            await add(a, of_a, 10)
    async with b.transaction():
        await fence.check(b.connection, SECOND)
        await add(b, of_b, 1)
    async with a.transaction():
        await fence.claim(a.connection, THIRD)
        await add(a, await a.value(TOTAL), 10)
    assert await read(a) == 112


async def test_holder_paused_past_its_ttl_is_refused_by_the_storage(
    a: Desk, b: Desk, locks: LockClient
) -> None:
    """Real leases: the second holder has claimed before the first one goes on."""
    lock = locks.lock(NAME, ttl=0.2, auto_extend=False, on_lost="raise")
    with pytest.raises(StaleFenceError) as refused:
        async with lock as paused:
            await claim_of(a, paused)
            async with locks.lock(NAME).acquire(wait_timeout=10) as lease:
                await claim_of(b, lease)
            async with a.transaction():
                await a.rows("UPDATE accounts SET total = 0")
                await fence.check(a.connection, paused)
    assert refused.value.stored_token == lease.fencing_token
    async with a.transaction():
        assert await a.value(TOTAL) == 100


async def claim_of(desk: Desk, lease: Any) -> None:
    """By a real lease."""
    async with desk.transaction():
        await fence.claim(desk.connection, lease)


async def test_table_in_a_schema_works_under_any_name(world: World, a: Desk) -> None:
    """Words of SQL, and capital letters, too."""
    elsewhere = SqlFence("main.Order" if world.postgres is None else "public.Order")
    async with a.transaction():
        await elsewhere.create_tables(a.connection)
        await elsewhere.create_tables(a.connection)  # they are there: nothing
        await elsewhere.claim(a.connection, FIRST)
        assert await elsewhere.claim_once(a.connection, "task:1") is True
        assert await a.value('SELECT token FROM "Order"') == 101
        assert await a.value('SELECT name FROM "Order_once"') == "task:1"


class TestIsolationOnPostgres:
    """What the stricter isolation levels of PostgreSQL add: errors that say "begin again"."""

    @pytest.fixture(params=["repeatable_read", "serializable"])
    async def pair(
        self, request: pytest.FixtureRequest, postgres: Postgres
    ) -> AsyncIterator[tuple[Any, Any, str]]:
        """Two connections of asyncpg, and the level."""
        url = await postgres.fresh()
        async with over_asyncpg(url) as a, over_asyncpg(url) as b:
            await fence.create_tables(a.connection)
            yield a.connection, b.connection, request.param

    async def test_claim_that_waited_for_another_is_to_be_begun_again(
        self, pair: tuple[Any, Any, str], postgres: Postgres
    ) -> None:
        """Its view of the data is older than the other one's commit."""
        a, b, level = pair

        async def newer() -> None:
            async with b.transaction(isolation=level):
                await fence.claim(b, SECOND)

        async with a.transaction(isolation=level):
            await fence.claim(a, FIRST)
            waiting = asyncio.create_task(newer())
            await postgres.somebody_waits()
        with pytest.raises(SERIALIZATION):
            await waiting
        await newer()
        assert await a.fetchval(TOKEN) == 102

    async def test_check_with_an_old_view_of_the_fence_does_not_pass(
        self, pair: tuple[Any, Any, str]
    ) -> None:
        """The newer claim was committed after the transaction's first read."""
        a, b, level = pair
        async with a.transaction():
            await fence.claim(a, FIRST)
        with pytest.raises(SERIALIZATION):
            async with a.transaction(isolation=level):
                assert await a.fetchval(TOKEN) == 101
                async with b.transaction():
                    await fence.claim(b, SECOND)
                await fence.check(a, FIRST)

    async def test_claim_once_that_waited_for_another_is_to_be_begun_again(
        self, pair: tuple[Any, Any, str], postgres: Postgres
    ) -> None:
        """Begun again it is told that it was not the first."""
        a, b, level = pair

        async def second() -> bool:
            async with b.transaction(isolation=level):
                return await fence.claim_once(b, "task:1")

        async with a.transaction(isolation=level):
            assert await fence.claim_once(a, "task:1") is True
            waiting = asyncio.create_task(second())
            await postgres.somebody_waits()
        with pytest.raises(SERIALIZATION):
            await waiting
        assert await second() is False


async def test_check_that_only_reads_would_let_a_newer_section_in_before_the_commit(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a check is a write: the newer claim does not wait, as other tests say it must."""
    reading = "SELECT token FROM {fence} WHERE name = {0} AND token = {1}"
    monkeypatch.setattr(_sql, "_CHECK", reading)
    url = await postgres.fresh()
    async with over_asyncpg(url) as a, over_asyncpg(url) as b:
        await fence.create_tables(a.connection)
        await claim(a, FIRST)
        async with a.transaction():
            await fence.check(a.connection, FIRST)
            await claim(b, SECOND)  # does not wait: committed between a's check and its commit
        assert await a.value(TOKEN) == 102


async def test_psycopg_in_pipeline_mode_gets_its_answers(postgres: Postgres) -> None:
    """Its statements leave in a batch; ours ends the batch."""
    async with await psycopg.AsyncConnection.connect(await postgres.fresh()) as connection:
        await fence.create_tables(connection)
        async with connection.pipeline():
            await fence.claim(connection, SECOND)
            await connection.execute("SELECT 1")
            await fence.check(connection, SECOND)
            with pytest.raises(StaleFenceError):
                await fence.claim(connection, FIRST)


class TestSqliteReader:
    """A deferred transaction of SQLite that has read before it claims."""

    async def test_claim_behind_a_read_that_is_out_of_date_is_refused_by_sqlite(
        self, tmp_path: Path
    ) -> None:
        """In WAL mode a reader's view is older than a commit that came meanwhile."""
        path = str(tmp_path / "database")
        async with AsyncExitStack() as stack:
            a, b = [
                await stack.enter_async_context(
                    aiosqlite.connect(path, timeout=0, isolation_level=None)
                )
                for _ in range(2)
            ]
            await a.execute("PRAGMA journal_mode = WAL")
            await fence.create_tables(a)
            await a.execute("BEGIN")
            await a.execute_fetchall(TOKEN)
            await b.execute("BEGIN")
            await fence.claim(b, FIRST)
            await b.commit()
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await fence.claim(a, SECOND)
            await a.rollback()


NO_TRANSACTION = "no transaction is open"


@contextlib.asynccontextmanager
async def bare_connections(postgres: Postgres, path: str) -> AsyncIterator[dict[str, Any]]:
    """Connections that commit each statement by themselves."""
    url = await postgres.fresh()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        made: dict[str, Any] = {"asyncpg": (await enter(over_asyncpg(url))).connection}
        made["psycopg"] = await enter(await psycopg.AsyncConnection.connect(url, autocommit=True))
        made["aiosqlite"] = await enter(aiosqlite.connect(path, isolation_level=None))
        made["sqlite3"] = sqlite3.connect(path, isolation_level=None)
        stack.callback(made["sqlite3"].close)
        for driver, where in [("asyncpg", url), ("psycopg", url), ("aiosqlite", path)]:
            engine = await enter(
                alchemy_engine(alchemy_url(where, driver), isolation_level="AUTOCOMMIT")
            )
            made[f"sqlalchemy-{driver}"] = await enter(engine.connect())
        yield made


async def test_connection_that_commits_each_statement_is_refused(
    postgres: Postgres, tmp_path: Path
) -> None:
    """Before anything is written, whatever the library."""
    async with bare_connections(postgres, str(tmp_path / "database")) as connections:
        await fence.create_tables(connections["asyncpg"])
        await fence.create_tables(connections["sqlite3"])
        for kind, connection in connections.items():
            with pytest.raises(RuntimeError, match=NO_TRANSACTION):
                await fence.claim(connection, FIRST)
            with pytest.raises(RuntimeError, match=NO_TRANSACTION):
                await fence.check(connection, FIRST)
            with pytest.raises(RuntimeError, match=NO_TRANSACTION):
                await fence.claim_once(connection, kind)
        for look in (connections["asyncpg"].fetch, connections["aiosqlite"].execute_fetchall):
            assert list(await look(TOKEN)) == []
            assert list(await look("SELECT name FROM aiodlock_fence_once")) == []


if sys.version_info >= (3, 12):  # sqlite3 has this mode since then

    async def test_autocommit_mode_of_sqlite3_is_found_out(tmp_path: Path) -> None:
        """Over aiosqlite, which does not show it, behind the statement; with BEGIN it is fine."""
        path = str(tmp_path / "database")
        options: dict[str, Any] = {"autocommit": True}
        with contextlib.closing(sqlite3.connect(path, **options)) as connection:
            await fence.create_tables(connection)
            with pytest.raises(RuntimeError, match=NO_TRANSACTION):
                await fence.claim(connection, FIRST)
            assert connection.execute(TOKEN).fetchall() == []
            connection.execute("BEGIN")
            await fence.claim(connection, FIRST)
            connection.execute("COMMIT")
        async with aiosqlite.connect(path, **options) as hidden:
            with pytest.raises(RuntimeError, match=NO_TRANSACTION):
                await fence.claim(hidden, SECOND)


async def test_sqlalchemy_that_begins_on_sqlite_by_an_event_is_allowed(tmp_path: Path) -> None:
    """The recipe of its documentation: SQLite commits by itself but for a BEGIN of the event."""
    async with alchemy_engine(alchemy_url(str(tmp_path / "database"))) as engine:

        @event.listens_for(engine.sync_engine, "connect")
        def connected(connection: Any, record: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(engine.sync_engine, "begin")
        def begins(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

        async with engine.connect() as connection:
            await fence.create_tables(connection)
            await fence.claim(connection, FIRST)
            await connection.rollback()
            with pytest.raises(DBAPIError, match="no such table"):
                await fence.check(connection, FIRST)


async def test_unknown_connection_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    """Blocking ones of other libraries, and things that are none."""
    engine = create_engine("sqlite://")
    with engine.connect() as blocking:
        for stranger in (blocking, engine, "sqlite://", None, object()):
            with pytest.raises(TypeError, match=r"must be an AsyncSession or .* sqlite3; got"):
                await fence.claim(stranger, FIRST)
    engine.dispose()


@pytest.mark.parametrize("table", ["", "a-b", 'a"b', "1a", "a.b.c", "a b", "ä", "a" * 59, "a."])
def test_table_that_is_no_identifier_is_refused(table: str) -> None:
    """It becomes part of a statement."""
    with pytest.raises(ValueError, match="identifier"):
        SqlFence(table)


def test_table_that_is_no_text_is_refused() -> None:
    """As every option of a wrong type."""
    with pytest.raises(TypeError, match="str"):
        SqlFence(b"fence")  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [True, 1.0, "1", None])
def test_token_of_another_type_is_refused(token: Any) -> None:
    """A bool is no int here."""
    with pytest.raises(TypeError, match="fencing_token must be an int"):
        Grant(NAME, token)


@pytest.mark.parametrize("token", [0, -1, 2**63])
def test_token_out_of_range_is_refused(token: int) -> None:
    """A BIGINT could not hold it, or no lock gives it."""
    with pytest.raises(ValueError, match="fencing_token must be from 1"):
        Grant(NAME, token)


@pytest.mark.parametrize(
    ("name", "error"), [("", ValueError), ("ü" * 257, ValueError), (b"a", TypeError)]
)
async def test_name_that_is_none_is_refused(name: Any, error: type[Exception]) -> None:
    """In a grant, and for what is to be done once."""
    with pytest.raises(error, match="name must be"):
        Grant(name, 1)
    connection = sqlite3.connect(":memory:")
    with contextlib.closing(connection), pytest.raises(error, match="name must be"):
        await fence.claim_once(connection, name)


async def test_name_with_nul_or_lease_that_is_none_is_refused() -> None:
    """PostgreSQL could not hold the one; the other has no token."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        with pytest.raises(ValueError, match="NUL"):
            await fence.claim(connection, Grant("a\0b", 1))
        with pytest.raises(TypeError, match="must be a Lease or a Grant"):
            await fence.claim(connection, NAME)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (None, "never claimed here"),
        (6, "not claimed with fencing token 7, but 6"),
        (7, "claimed with fencing token 7 before"),
        (8, "fencing token 7 of 'a' is stale: 8 has claimed"),
    ],
)
def test_error_survives_pickling_and_says_what_stands(stored: int | None, told: str) -> None:
    """A worker's error reaches the pool as it was."""
    error = StaleFenceError(name="a", fencing_token=7, stored_token=stored)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(error, LockError)
    assert (again.name, again.fencing_token, again.stored_token) == ("a", 7, stored)
    assert told in str(again)


def test_tables_are_those_that_the_how_to_shows() -> None:
    """What is documented is what is made."""
    page = Path(__file__).parent.parent / "docs" / "how-to" / "fence-a-database-write.md"
    assert fence.ddl in page.read_text()


def test_door_loads_no_library_of_databases() -> None:
    """Whoever needs one has imported it."""
    program = (
        "import sys, aiodlock.fencing\n"
        "print({'sqlalchemy', 'asyncpg', 'psycopg', 'aiosqlite', 'sqlite3'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"
