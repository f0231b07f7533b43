"""The page on workers: its files, run by the real workers of Taskiq, arq and SAQ."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import conftest
from aiodlock.testing import LockServer
from tests.programs import Program, blocks_of, output_of

pytestmark = pytest.mark.deep

PAGE = "how-to/workers.md"
WORK = "asyncio.sleep(0.1)"
WORKERS = {
    "Taskiq": ("-m", "taskiq", "worker", "tasks:broker", "--workers", "2"),
    "arq": ("-m", "arq", "tasks.WorkerSettings"),
    "SAQ": ("-m", "saq", "tasks.settings"),
}


def write_files(section: str, url: str, directory: Path, *changes: tuple[str, str]) -> None:
    """tasks.py and enqueue.py, as the section has them, with *changes* to the former."""
    tasks, enqueue, *_ = blocks_of(PAGE, f"## {section}")
    for old, new in ((conftest.URL_IN_DOCUMENTS, url), *changes):
        assert old in tasks
        tasks = tasks.replace(old, new)
    (directory / "tasks.py").write_text(tasks)
    (directory / "enqueue.py").write_text(enqueue)


@pytest.mark.parametrize("section", WORKERS)
async def test_worker_with_three_tasks_for_one_invoice_does_one_after_the_other(
    section: str, server: LockServer, tmp_path: Path
) -> None:
    """None begins before the one before it has ended, and each has a larger fencing token."""
    write_files(section, server.url, tmp_path)
    async with Program(*WORKERS[section], cwd=tmp_path) as worker:
        await output_of("enqueue.py", cwd=tmp_path)
        for _ in range(3):
            await worker.says("end 42")
    turns = [line.split() for line in worker.lines if line.startswith(("begin ", "end "))]
    assert [what for what, *_ in turns] == ["begin", "end"] * 3
    tokens = [int(token) for what, _, token in turns if what == "begin"]
    assert tokens == sorted(set(tokens))


async def test_taskiq_worker_killed_at_work_leaves_its_task_to_another(
    server: LockServer, tmp_path: Path
) -> None:
    """The lock is free after its ttl, its tasks come again beside new ones, with larger tokens."""
    changes = (("idle_timeout=60_000", "idle_timeout=1_000"), ("ttl=10", "ttl=3"))
    hangs = (WORK, "asyncio.sleep(60)")
    write_files("Taskiq", server.url, tmp_path, *changes, hangs)
    async with Program(*WORKERS["Taskiq"], cwd=tmp_path) as doomed:
        await output_of("enqueue.py", cwd=tmp_path)
        *_, before = (await doomed.says("begin 42")).split()
    write_files("Taskiq", server.url, tmp_path, *changes)
    async with Program(*WORKERS["Taskiq"], cwd=tmp_path) as other:
        await asyncio.sleep(1.0)  # idle_timeout: by the server's clock
        await output_of("enqueue.py", cwd=tmp_path)
        for _ in range(6):
            *_, after = (await other.says("end 42")).split()
            assert int(after) > int(before)
