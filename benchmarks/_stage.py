"""How a worker process takes turns with the process that measures it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

READY: Final = "ready"
GO: Final = "go"
DONE: Final = "done"
END: Final = "end"


class Stage:
    """Says a word, hears a word; the loop goes on meanwhile."""

    async def ready(self) -> None:
        """All is prepared and warm; returns when the time that counts begins."""
        await self._exchange(READY, GO)

    async def done(self) -> None:
        """The time that counts is over; returns when the other side has looked at the server."""
        await self._exchange(DONE, END)

    def report(self, result: dict[str, Any]) -> None:
        """The last word."""
        print(json.dumps(result), flush=True)  # noqa: T201 - this is what stdout is for

    async def _exchange(self, said: str, awaited: str) -> None:
        print(said, flush=True)  # noqa: T201
        heard = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        if heard.strip() != awaited:
            raise SystemExit(f"said {said!r}, heard {heard!r} instead of {awaited!r}")
