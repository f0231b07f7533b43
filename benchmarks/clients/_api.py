"""What the harness asks of every lock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from .._orders import Order


class Pair(NamedTuple):
    """How one task takes one name, and gives it back: `await release(await acquire())`.

    The library's own methods, with nothing of ours around them where that can be had.
    """

    acquire: Callable[[], Awaitable[Any]]
    release: Callable[[Any], Awaitable[object]]


class Client(Protocol):
    """A library in use in one process.

    Attributes:
        in_threads: Its calls block; what is awaited never suspends, so it is used in threads.
    """

    in_threads: bool

    async def open(self, order: Order) -> None:
        """Be ready for so many tasks."""

    def pair(self, name: str, ttl_s: float) -> Pair:
        """For one task: whoever has no use for a lock object of its own shares nothing."""

    def key(self, name: str) -> str:
        """The key whose existence is the lock."""

    def is_held(self, held: Any) -> bool:
        """Whether the client believes in what acquiring returned."""

    async def aclose(self) -> None:
        """Leave."""


class Lender:
    """A client of what redis-py lends: the parts that are alike."""

    in_threads = False

    def key(self, name: str) -> str:
        return name

    def is_held(self, held: Any) -> bool:
        return True
