"""The sessions in the page for operators, held in a real terminal on a server as it tells of."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from redis.asyncio import Redis

from aiodlock import Lock, LockClient
from tests.operators import Terminal
from tests.until import until

PAGE: Final = Path(__file__).parent.parent / "docs/how-to/see-and-break-locks.md"
_BLOCK: Final = re.compile(r"```console\n(.*?)```", re.DOTALL)
_WIDE: Final = 120


class Session(NamedTuple):
    """A command, and what was seen of it in the terminal."""

    command: str
    seen: str


def sessions() -> list[Session]:
    """Those in the page, in its order: each begins with `$ aiodlock`."""
    text = "".join(_BLOCK.findall(PAGE.read_text("utf-8")))
    parts = re.split(r"^\$ (aiodlock .*)\n", text, flags=re.MULTILINE)[1:]
    return [Session(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def held(session: Session, url: str) -> Session:
    """The same command in a terminal of now, with the answers that the page gives."""
    with Terminal(url, *shlex.split(session.command)[1:], columns=_WIDE) as terminal:
        if (answer := re.search(r"\[y/N\] (.+)", session.seen)) is not None:
            terminal.until(lambda seen: "[y/N]" in seen)
            terminal.type(f"{answer[1]}\n")
        terminal.ended()
        return Session(session.command, terminal.seen.replace("\r\n", "\n"))


def alike(text: str) -> str:
    """*text* without what differs each time: times, numbers, ids, the room that they take."""
    text = re.sub(r"\b[0-9a-f]{32}\b|(?<=:)[0-9a-f]{8}\b", "ID", text)
    text = re.sub(r"(\d+ (min|h|d) )?\d+(\.\d+)? (s|min|h)\b", "TIME", text)
    text = re.sub(r"\b\d{16}\b", "NUMBER", text)
    return re.sub(r" +", " ", re.sub(r"-{3,}", "---", text)).strip()


@asynccontextmanager
async def world(url: str) -> AsyncIterator[None]:
    """What the page tells of: a name that two wait for, a job, one that is kept, an old lock."""
    async with AsyncExitStack() as stack:

        async def client(label: str) -> LockClient:
            return await stack.enter_async_context(LockClient.from_url(url, label=label))

        redis = await stack.enter_async_context(Redis.from_url(url))
        web = await client("web-3-4711")
        await stack.enter_async_context(_held_by(web, "invoice:42"))
        for label in ("web-5-902", "web-1-77"):
            await stack.enter_async_context(_held_by(await client(label), "invoice:42"))
        await stack.enter_async_context(_held_by(await client("job-1-80"), "nightly-report"))
        tick = await (await client("cron-2-613")).lock("tick", hold_at_least=300).try_acquire()
        assert tick is not None
        await tick.release()
        await redis.set("aiodlock:{old-import}", "9f86d081884c7d659a2feaa0c55ad015")
        yield


@asynccontextmanager
async def _held_by(locks: LockClient, name: str) -> AsyncIterator[None]:
    """Somebody holds *name*, or waits for it, and may lose it."""
    lock = locks.lock(name)
    before = await lock.inspect()
    task = asyncio.create_task(_hold(lock))

    async def is_there() -> bool:
        now = await lock.inspect()
        return now.waiters > before.waiters if before.held else now.held

    try:
        await until(is_there)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _hold(lock: Lock) -> None:
    async with lock:
        await asyncio.Event().wait()
