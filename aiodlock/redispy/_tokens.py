"""Whose token is whose, where several tasks share one lock object."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

from .._running import running_task

Owner = asyncio.Task[Any] | None


class TaskTokens(SimpleNamespace):
    """What `lock.local` is: a token for each task.

    A task that never acquired through this object sees the newest token, as all do in redis-py:
    one task may acquire, and another release. Bound: one entry for each living task.
    """

    def __init__(self) -> None:
        self._of_task: weakref.WeakKeyDictionary[asyncio.Task[Any], bytes | None] = (
            weakref.WeakKeyDictionary()
        )
        self._newest: bytes | None = None

    @property
    def token(self) -> bytes | None:
        task = running_task()
        return self._newest if task is None else self._of_task.get(task, self._newest)

    @token.setter
    def token(self, token: bytes | None) -> None:
        """Code that carries a token from one process to another writes it here."""
        if token is not None:
            self.grant(running_task(), token)
        elif (old := self.token) is not None:
            self.forget(old)

    def grant(self, owner: Owner, token: bytes) -> None:
        """*owner* has acquired with *token*."""
        self._newest = token
        if owner is not None:
            self._of_task[owner] = token

    def refuse(self, owner: Owner) -> None:
        """*owner* has not got it; from now on another's token is none of its business."""
        if owner is not None:
            self._of_task.setdefault(owner, None)

    def forget(self, token: bytes) -> None:
        """*token* holds nothing any more."""
        for task, known in list(self._of_task.items()):
            if known == token:
                self._of_task[task] = None
        if self._newest == token:
            self._newest = None


class OneToken(SimpleNamespace):
    """One token for all, as in redis-py: `thread_local=False` asks for it."""

    def __init__(self) -> None:
        self.token: bytes | None = None

    def grant(self, owner: Owner, token: bytes) -> None:
        self.token = token

    def refuse(self, owner: Owner) -> None:
        """Who has it has it."""

    def forget(self, token: bytes) -> None:
        if self.token == token:
            self.token = None
