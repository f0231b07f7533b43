"""The worker processes of one part of the demo: started, listened to, killed, dismissed."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from aiodlock.cli._demo_job import Job
from aiodlock.cli._demo_journal import Journal

_READY_WITHIN_S = 30.0
_GONE_WITHIN_S = 5.0


class WorkerCrashed(Exception):
    """A worker ended that nobody had told to; its stderr is the message."""


class Crew:
    """The workers of one part, by number."""

    def __init__(self, workers: list["_Worker"], journal: Journal) -> None:
        self.journal = journal
        self._workers = workers

    def begin(self) -> int:
        """Tell every worker to start; the instant."""
        for worker in self._workers:
            worker.begin(self.journal)
        return time.monotonic_ns()

    async def kill(self, number: int) -> int:
        """SIGKILL a worker, take down all that it said before; the instant of the kill."""
        worker = self._workers[number]
        at_ns = time.monotonic_ns()
        await worker.kill()
        self.journal.gone(number, at_ns, was_killed=True)
        return at_ns

    async def dismiss(self) -> int:
        """End every worker that is left, wherever it is; the instant."""
        at_ns = time.monotonic_ns()
        await asyncio.gather(*(worker.dismiss() for worker in self._workers))
        for number in range(len(self._workers)):
            self.journal.gone(number, at_ns, was_killed=False)
        return at_ns

    async def check(self) -> None:
        """Raise `WorkerCrashed` if a worker ended by itself."""
        for worker in self._workers:
            await worker.check()


@asynccontextmanager
async def crew(jobs: list[Job]) -> AsyncIterator[Crew]:
    """A worker per job, each ready to begin; none is left afterwards."""
    workers: list[_Worker] = []
    try:
        for job in jobs:
            # One by one, so that a cancel in between leaves none behind.
            workers += [await _Worker.start(job)]
        for worker in workers:
            await worker.ready()
        yield Crew(workers, Journal())
    finally:
        await asyncio.gather(*(worker.dismiss() for worker in workers))


class _Worker:
    def __init__(self, job: Job, process: Process) -> None:
        # All three are pipes; the types do not say so.
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._job = job
        self._process = process
        self._orders = process.stdin
        self._words = process.stdout
        self._complaint = asyncio.create_task(process.stderr.read())
        self._listener: asyncio.Task[None] | None = None
        self._told_to_end = False

    @classmethod
    async def start(cls, job: Job) -> Self:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiodlock.cli._demo_worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,  # Ctrl-C is ours to answer: they end when stdin does
        )
        worker = cls(job, process)
        # In the pipe and not an argument: the URL may hold a password, which `ps` would show.
        worker._orders.write(job.to_line())
        return worker

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                is_ready = await self._words.readline()
        except TimeoutError:
            self._process.kill()
            is_ready = b""
        if not is_ready:
            raise WorkerCrashed(await self._last_words())

    def begin(self, journal: Journal) -> None:
        self._listener = asyncio.create_task(self._listen(journal))
        self._orders.write(b"begin\n")

    async def kill(self) -> None:
        self._told_to_end = True
        self._process.kill()
        await self._gone()

    async def dismiss(self) -> None:
        self._told_to_end = True
        self._orders.close()
        await self._gone()

    async def check(self) -> None:
        if self._process.returncode is not None and not self._told_to_end:
            raise WorkerCrashed(await self._last_words())

    async def _listen(self, journal: Journal) -> None:
        async for line in self._words:
            journal.read(self._job.worker, line.decode())

    async def _gone(self) -> None:
        try:
            async with asyncio.timeout(_GONE_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        if self._listener is not None:
            await self._listener  # to the end of the pipe: its last line counts

    async def _last_words(self) -> str:
        lines = (await self._complaint).decode(errors="replace").strip().splitlines()
        return f"process {self._job.worker + 1} crashed: {lines[-1] if lines else 'no message'}"
