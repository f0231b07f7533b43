"""The task inside an `async with` block, cancelled once when its lease is lost."""

from __future__ import annotations

import asyncio
import math
import weakref

import anyio

from ._running import running_task


class _Cancel:
    """One cancel of one task, for all of its leases that are lost at the same time."""

    def __init__(self) -> None:
        self.sharers = 0


_cancels: weakref.WeakKeyDictionary[asyncio.Task[object], _Cancel] = weakref.WeakKeyDictionary()


class Body:
    """A block that a task entered, from there to its end."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._shared: _Cancel | None = None
        # As asyncio.timeout does: a cancel that somebody asked for later is not ours.
        self._cancels_before = task.cancelling() - (task in _cancels)

    def cancel(self) -> None:
        """Cancel the task, once for all of its leases; not one that found out, or has ended."""
        if self._shared is not None or self.task.done() or running_task() is self.task:
            return
        shared = _cancels.get(self.task)
        if shared is None:
            if not self.task.cancel():
                return
            shared = _cancels[self.task] = _Cancel()
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
        is_cancel = isinstance(error, asyncio.CancelledError)
        shared.sharers -= 1
        if shared.sharers:
            return is_cancel and not self._others(self.task.cancelling() - 1)
        del _cancels[self.task]
        others = self._others(self.task.uncancel())
        if not is_cancel and self.task is running_task():
            # 3.11 and 3.12 keep a cancel that was not delivered, although it is taken back.
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                if self._others(self.task.cancelling()):
                    self.cancel_again(cancelled)
        return is_cancel and not others

    def cancel_again(self, cancelled: asyncio.CancelledError) -> None:
        """Give *cancelled*, which must make room for the body's own error, to the next await.

        An anyio scope cancels again by itself. The count of cancels stays as it is. In the next
        turn of the loop, for who asked for it (an asyncio.timeout) may take it back until then.
        """
        task = asyncio.current_task()
        assert task is not None
        if anyio.current_effective_deadline() == -math.inf:
            return
        count = task.cancelling()

        def again() -> None:
            if not task.done() and task.cancelling() >= count:
                task.cancel(*cancelled.args)
                task.uncancel()

        task.get_loop().call_soon(again)

    def _others(self, cancels: int) -> bool:
        return cancels > self._cancels_before
