"""A number of permits that a name has."""

from __future__ import annotations

from typing import Final

from ._lock import Lock
from ._shared import Shared

_PERMITS_MAX: Final = 1_000_000_000


class Semaphore(Shared):
    """At most *permits* hold the name at once. Made by `LockClient.semaphore`.

    Each lease is one permit, with its own ttl: a crashed holder's comes back when that is over. Who
    asks with another number of permits shares the name all the same: nobody enters where more would
    be inside than the smallest number that anybody inside, or entering, allows. It is used as
    `Lock` is.
    """

    def __init__(self, like: Lock, permits: int) -> None:
        super().__init__(like, f"s{permits}")
        self._permits = permits

    @property
    def permits(self) -> int:
        """How many may hold it at once, as far as this one is concerned."""
        return self._permits


def checked_permits(permits: object) -> int:
    """*permits* if there may be so many."""
    allowed = f"permits must be an int from 1 to {_PERMITS_MAX}"
    if not isinstance(permits, int) or isinstance(permits, bool):
        raise TypeError(f"{allowed}; got {permits!r}")
    if not 1 <= permits <= _PERMITS_MAX:
        raise ValueError(f"{allowed}; got {permits!r}")
    return int(permits)
