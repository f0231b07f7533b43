"""A lease that the task which acquired it may enter again."""

from __future__ import annotations

import asyncio
import types
import weakref
from typing import Any

from ._body import Body
from ._lease import Lease
from ._running import may_await, running_task


class ReentrantLease(Lease):
    """One lease for every entry of its task; undoing the last entry releases it.

    An entry is an acquisition. A block takes the newest that has none, and undoes it at its end,
    unless a release within the block did so.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._entries: list[Body | None] = [None]  # Not undone, the newest last.
        self._blocks: list[Body] = []  # Not left, the innermost last.

    @property
    def is_entered(self) -> bool:
        """Whether an acquisition is one more entry; a lost one hides that from no block."""
        return bool(self._entries) and (bool(self._blocks) or self.is_held)

    def enter_again(self) -> None:
        """One more acquisition.

        Raises:
            LeaseLostError: It is lost: a new lease would hide that from the blocks around.
        """
        self.check()
        self._entries.append(None)

    async def release(self) -> bool:
        if not self._is_gone:
            self._check_loop()
        if len(self._entries) > 1 and self._validity.state != "released":
            self._entries.pop()
            return False
        self._entries.clear()
        return await super().release()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        body = self._body = self._blocks[-1]
        self._notice_deadline(tell_body=False)
        if self._undo_entry(body) or self._is_gone:
            self._entries.clear()
            return await super().__aexit__(exc_type, error, traceback)
        is_our_cancel = False
        try:
            if may_await(error):
                is_our_cancel = await body.leave(error)
        finally:
            self._leave_block()
        if may_await(error):
            self._conclude(error, None, is_our_cancel=is_our_cancel)
        return None

    def _undo_entry(self, body: Body) -> bool:
        """That of a block which is left, unless it is undone: is it held for nothing more?"""
        if body in self._entries:
            self._entries.remove(body)
        if self._validity.is_open:
            return not self._entries
        # Nobody enters a lost one; but a closing client extends it until every block is left.
        return len(self._blocks) == 1

    def _enter(self, body: Body) -> None:
        self._check_loop()
        self._raise_unless_open()
        if None not in self._entries:
            raise RuntimeError(f"this lease of {self.name!r} is entered already")
        newest = len(self._entries) - 1 - self._entries[::-1].index(None)
        self._entries[newest] = self._body = body
        self._blocks.append(body)

    def _tell_body(self, body: Body) -> None:
        """Every block, so that the cancel is taken back by the outermost."""
        for block in self._blocks:
            block.cancel()

    def _leave_block(self) -> None:
        self._blocks.pop()
        if self._blocks:
            self._body = self._blocks[-1]
        else:
            super()._leave_block()


class Reentries:
    """The reentrant leases of a client, by the task that acquired each and by name.

    Both are held weakly: one that is thrown away must end like any other. Bound: one entry for
    each of those leases that lives.
    """

    def __init__(self) -> None:
        self._leases: weakref.WeakKeyDictionary[
            asyncio.Task[object], weakref.WeakValueDictionary[str, ReentrantLease]
        ] = weakref.WeakKeyDictionary()

    def add(self, lease: ReentrantLease) -> None:
        """From now on the current task may enter *lease* again."""
        task = running_task()
        if task is not None:
            leases = self._leases.setdefault(task, weakref.WeakValueDictionary())
            leases[lease.name] = lease

    def enter_again(self, name: str) -> ReentrantLease | None:
        """The current task's lease of *name*, entered once more; None if it has none.

        Raises:
            LeaseLostError: It is lost.
        """
        task = running_task()
        leases = None if task is None else self._leases.get(task)
        lease = None if leases is None else leases.get(name)
        if lease is None or not lease.is_entered:
            return None
        lease.enter_again()
        return lease
