"""The task inside an `async with` block, cancelled once when its lease is lost."""

from __future__ import annotations

import asyncio
import math
import weakref

import anyio


class _Cancel:
    """One cancel of one task, for all of its leases that are lost at the same time."""

    def __init__(self, before: int) -> None:
        self.before = before  # Cancels that others had asked for.
        self.sharers = 0


_cancels: weakref.WeakKeyDictionary[asyncio.Task[object], _Cancel] = weakref.WeakKeyDictionary()


class Body:
    """A block that a task entered, from there to its end."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._shared: _Cancel | None = None

    def cancel(self) -> None:
        """Cancel the task, unless it has ended, it is the one that found out, or it is told."""
        if self.task.done() or running_task() is self.task:
            return
        shared = _cancels.get(self.task)
        if shared is None:
            shared = _Cancel(self.task.cancelling())
            if not self.task.cancel():
                return
            _cancels[self.task] = shared
        shared.sharers += 1
        self._shared = shared

    async def leave(self, error: BaseException | None) -> bool:
        """Take our cancel back, if no outer block of the task shares it.

        Returns:
            Whether *error* is our cancel and nothing but that.
        """
        shared, self._shared = self._shared, None
        if shared is None:
            return False
        is_ours = isinstance(error, asyncio.CancelledError)
        shared.sharers -= 1
        if shared.sharers:
            return is_ours
        del _cancels[self.task]
        others = self.task.uncancel() > shared.before
        if not is_ours and self.task is running_task():
            # 3.11 and 3.12 keep a cancel that was not delivered, although it is taken back.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                others = others or self.task.cancelling() > shared.before
                if others:
                    self.cancel_again(cancelled)
        return is_ours and not others

    def cancel_again(self, cancelled: asyncio.CancelledError) -> None:
        """Give *cancelled*, which must make room for the body's own error, to the next await.

        An anyio scope cancels again by itself. The count of cancels stays as it is.
        """
        if anyio.current_effective_deadline() != -math.inf:
            task = asyncio.current_task()
            assert task is not None
            task.cancel(*cancelled.args)
            task.uncancel()


def is_loop_running() -> bool:
    """Whether anything can be awaited here."""
    return asyncio._get_running_loop() is not None


def running_task() -> asyncio.Task[object] | None:
    """The current task, if there is one."""
    return asyncio.current_task() if is_loop_running() else None
