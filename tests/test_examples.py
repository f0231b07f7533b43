"""The examples of the documentation, each run as a reader would, in processes of its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from aiodlock.cli import _parser
from aiodlock.testing import LockServer
from tests.fencing_databases import Postgres, postgres_server
from tests.programs import ROOT, output_of

pytestmark = pytest.mark.deep

EXAMPLES = ROOT / "docs/examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A database for the example that writes to one."""
    with postgres_server() as running:
        yield running


async def run(name: str, **env: str) -> list[str]:
    """The lines of one example, which ended in good order."""
    return await output_of("-W", "error::ResourceWarning", str(EXAMPLES / name), env=env)


@pytest.mark.parametrize("name", FILES)
def test_example_says_how_it_is_run_and_stands_on_the_page(name: str) -> None:
    """At its top; the page shows all of it."""
    text = (EXAMPLES / name).read_text()
    assert text.startswith('"""')
    assert f"python {name}" in text.partition('"""\n')[0]
    assert f'--8<-- "{name}"' in (EXAMPLES / "index.md").read_text()


def test_page_shows_every_example_and_no_other() -> None:
    """Each that it names is there."""
    shown = re.findall(r'--8<-- "(.*)"', (EXAMPLES / "index.md").read_text())
    assert sorted(shown) == FILES


@pytest.mark.parametrize("is_own", [False, True], ids=["embedded", "own"])
async def test_two_instances_of_the_service_charge_one_after_the_other(
    is_own: bool, server: LockServer
) -> None:
    """In the order of their tokens, from both processes; on either kind of server."""
    lines = await run("fastapi_service.py", **({"AIODLOCK_URL": server.url} if is_own else {}))
    found = [re.fullmatch(r"process (\d+) charged with token (\d+)", line) for line in lines]
    turns = [(int(match[1]), int(match[2])) for match in found if match]
    assert len(turns) == 6
    assert len({process for process, _ in turns}) == 2
    tokens = [token for _, token in turns]
    assert tokens == sorted(set(tokens))


async def test_worker_that_is_killed_leaves_its_row_to_the_other() -> None:
    """Row 3 is begun again by the other, with a larger token; no row is done twice."""
    lines = await run("surviving_worker.py")
    begun = re.findall(r"worker (\d+) begins row 3 with token (\d+)", "\n".join(lines))
    (dead, early), (heir, late) = begun
    assert dead != heir
    assert int(late) > int(early)
    assert f"worker {dead} is killed" in lines
    assert "each row was done so many times: [1, 1, 1, 1, 1, 1, 1, 1]" in lines
    assert lines[-1].startswith("a write with the dead one's token is refused: ")


async def test_paused_worker_is_refused_by_postgresql(postgres: Postgres) -> None:
    """And the deposit of the one that came in between stands."""
    lines = await run("fenced_postgres.py", DATABASE_URL=await postgres.fresh())
    assert lines[0] == "B is done"
    assert re.fullmatch(r"A is refused: it has \d+, and \d+ stands", lines[1])
    assert lines[2:] == ["total: 101"]


async def test_example_with_a_postgresql_leaves_there_what_it_found(postgres: Postgres) -> None:
    """A reader's own tables, with whatever names and rows; twice, and only the fence's are new."""
    url = await postgres.fresh()
    async with postgres.admin() as admin:
        for name in ("accounts", "account", "todo"):
            await admin.execute(f"CREATE TABLE {name} (id BIGINT, owner TEXT)")
            await admin.execute(f"INSERT INTO {name} VALUES (7, 'a customer')")
        for _ in range(2):
            await run("fenced_postgres.py", DATABASE_URL=url)
        found = await admin.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        tables = {row["tablename"] for row in found}
        for name in ("accounts", "account", "todo"):
            assert [tuple(row) for row in await admin.fetch(f"SELECT * FROM {name}")] == [
                (7, "a customer")
            ]
    assert tables == {"accounts", "account", "todo", "aiodlock_fence", "aiodlock_fence_once"}


async def test_example_that_finds_a_table_of_its_name_touches_it_not(postgres: Postgres) -> None:
    """It fails; whose it is nobody knows."""
    url = await postgres.fresh()
    async with postgres.admin() as admin:
        await admin.execute("CREATE TABLE aiodlock_example AS SELECT 7 AS total")
        with pytest.raises(AssertionError, match="already exists"):
            await run("fenced_postgres.py", DATABASE_URL=url)
        assert await admin.fetchval("SELECT total FROM aiodlock_example") == 7


async def test_tick_of_three_crontabs_is_worked_on_by_one(server: LockServer) -> None:
    """Also when the last machine comes after the job is done; to be locked out is no failure."""
    lines = await run("cron_job.py", AIODLOCK_URL=server.url)
    assert len([line for line in lines if line.startswith("the report is made")]) == 1
    ends = sorted(line for line in lines if line.startswith("machine"))
    assert ends == [f"machine {name}: exit code 0" for name in "ABC"]
    assert len(lines) == 4


@pytest.mark.parametrize("page", ["how-to/cron.md", "examples/cron_job.py"])
def test_lines_for_crontabs_are_understood_by_the_command_line(page: str) -> None:
    """Each, with its options; what follows the name is the command."""
    lines = re.findall(r"\* +aiodlock (run .*)", (ROOT / "docs" / page).read_text())
    assert lines
    for line in lines:
        args = _parser().parse_args(shlex.split(line))
        assert args.command[-1].startswith("/srv/")
