"""The worker processes of one run: started, stopped, killed, told to finish."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from aiodlock import testing
from tests.chaos import journal
from tests.chaos.journal import Diary, now_ns
from tests.chaos.order import Order, Servers

TASKS = 8
TTLS_S = (0.5, 1.0, 1.5)
READY_LIMIT_S = 40.0
FINISH_LIMIT_S = 40.0
POLL_S = 0.02


class Worker:
    """One process, from its start to its end."""

    def __init__(self, order: Order) -> None:
        self.number = order.number
        self.killed_ns: int | None = None
        self.diary = Diary(order.number)
        self._path = journal.path_of(Path(order.folder), order.number)
        with self._path.with_suffix(".stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.chaos.worker", order.to_json()],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                preexec_fn=testing._death_pact(),  # noqa: PLW1509 - as in aiodlock.testing
            )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, in whatever way."""
        return self._process.poll() is None

    def read(self) -> Diary:
        """What it wrote so far."""
        self.diary = journal.read(self._path, self.number, killed_ns=self.killed_ns)
        if self.killed_ns is None and self._process.poll():
            said = self._path.with_suffix(".stderr").read_text(errors="replace")
            self.diary.errors.append(f"it ended by itself: {said[-2000:]}")
        return self.diary

    def pause(self) -> None:
        """SIGSTOP; when this returns it does nothing more."""
        self._process.send_signal(signal.SIGSTOP)
        if sys.platform == "linux":
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; what it wrote stays."""
        if self.is_running:
            self.pause()  # So that the instant is one at which it did nothing any more.
            self.killed_ns = now_ns()
        self.end()

    def end(self) -> None:
        """Have it gone."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def tell(self, what: str) -> None:
        """Have it do so: "calm" or "finish"."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()


class Crew:
    """``async with Crew(...) as crew``: all workers ready, and none left afterwards.

    Attributes:
        everybody: All workers there were, also the dead ones.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        lock: str,
        name: str,
        folder: Path,
        seed: int,
        workers: int,
    ) -> None:
        self.everybody: list[Worker] = []
        self._chance = random.Random(seed)
        self._workers = workers
        self._order = Order(
            servers,
            lock,
            name,
            str(folder),
            number=0,
            seed=seed,
            tasks=TASKS,
            ttl=TTLS_S[0],
        )

    async def __aenter__(self) -> Self:
        try:
            for _ in range(self._workers):
                self.start()
            await self.ready()
        except BaseException:
            self.dismiss()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.dismiss()

    @property
    def living(self) -> list[Worker]:
        """Those not killed, by number."""
        return [worker for worker in self.everybody if worker.killed_ns is None]

    @property
    def diaries(self) -> list[Diary]:
        """What all wrote, read now."""
        return [worker.read() for worker in self.everybody]

    def start(self) -> Worker:
        """One more; it takes a moment to be ready."""
        number = len(self.everybody)
        ttl = TTLS_S[number % len(TTLS_S)]
        worker = Worker(dataclasses.replace(self._order, number=number, ttl=ttl))
        self.everybody.append(worker)
        return worker

    def any(self) -> Worker:
        """One of the living, by chance."""
        return self._chance.choice(self.living)

    async def ready(self) -> None:
        """Until all the living work."""
        give_up_at = time.monotonic() + READY_LIMIT_S
        while not all(worker.read().is_ready for worker in self.living):
            for worker in self.living:
                assert not worker.diary.errors, worker.diary.errors
            assert time.monotonic() < give_up_at, "the workers were not ready in time"
            await asyncio.sleep(POLL_S)

    async def finish(self) -> list[int]:
        """Have the living end by themselves; returns the numbers of those that did not."""
        self.tell("finish")
        give_up_at = time.monotonic() + FINISH_LIMIT_S
        while stuck := [worker.number for worker in self.living if not worker.read().is_closed]:
            running = [worker for worker in self.living if worker.is_running]
            if time.monotonic() > give_up_at or not running:
                return stuck
            await asyncio.sleep(POLL_S)
        return []

    def tell(self, what: str) -> None:
        """Have the living do so: "calm" (no more slow sections) or "finish"."""
        for worker in self.living:
            if worker.is_running:
                worker.tell(what)

    def kill_all(self) -> None:
        """Kill the living, as a fault does."""
        for worker in self.living:
            worker.kill()

    def dismiss(self) -> None:
        """Kill every process there is."""
        for worker in self.everybody:
            worker.end()
