"""What stands under one name, as one server tells it in one script call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from aiodlock import _names
from aiodlock._names import Access
from aiodlock._store._wire import maybe_text, text

BYTES_MOST: Final = 512
"""Of a value; ours are shorter than 150 bytes."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Who holds, for `ttl_left` seconds (None: a key without a TTL).

    `value` has the owner token and is shown to nobody; `access` is None for a plain lock.
    `is_kept`: released, but taken until its time is over. `is_foreign`: another library wrote it.
    """

    value: str
    holder: str
    ttl_left: float | None
    fencing_token: int | None
    access: Access | None = None
    is_kept: bool = False
    is_foreign: bool = False

    @property
    def owner(self) -> str:
        """The owner token: over a quorum, the same on every node."""
        return self.value if self.is_foreign else self.value.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who waits: since when, and for how long it counts as alive (negative: it does not), in s."""

    holder: str
    waited: float
    alive_for: float
    access: Access | None
    permits: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """What stands under a name.

    Args:
        now_us: The server's clock, as far as fencing tokens are made from it.
        not_a_lock: The type of a key that no lock has ("hash"), None where there is none.
        grants: The first to end first, and not all where `inside` is more.
        waiters: The first to come first, and not all where `queued` is more.
    """

    now_us: int
    not_a_lock: str | None
    grants: tuple[Grant, ...]
    inside: int
    waiters: tuple[Waiter, ...]
    queued: int
    last_fencing_token: int | None

    @property
    def is_free(self) -> bool:
        """Whether who asks now gets it: nobody holds, nobody alive waits."""
        waited_for = any(waiter.alive_for > 0 for waiter in self.waiters)
        return not (self.grants or self.not_a_lock or waited_for)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.grants or self.not_a_lock or self.queued)

    @property
    def longest_wait(self) -> float | None:
        """Seconds, of the first who is alive."""
        return next((waiter.waited for waiter in self.waiters if waiter.alive_for > 0), None)

    @property
    def permits(self) -> int | None:
        """How many may hold, as far as those who do, or else those who wait, allow."""
        allowed = [_permits_of(grant.owner) for grant in self.grants]
        allowed = allowed or [waiter.permits for waiter in self.waiters]
        return min((permits for permits in allowed if permits is not None), default=None)

    @property
    def kind(self) -> str:
        """What the name is locked as, in a word or two; "free" where nobody holds it, or waits."""
        if self.not_a_lock is not None:
            return "not a lock"
        if self.grants and self.grants[0].is_foreign:
            return "foreign"
        if self.grants and self.grants[0].is_kept:
            return "kept"
        asked = self.grants or self.waiters
        return _KINDS[asked[0].access] if asked else "free"


_KINDS: Final[dict[Access | None, str]] = {
    None: "lock",
    "reading": "readers",
    "writing": "writer",
    "permit": "semaphore",
}


def granted_ago(grant: Grant, now_us: int) -> float | None:
    """Seconds since the grant, about: a fencing token is the time of its grant, or a little more.

    None: not to be told.
    """
    if grant.fencing_token is None or grant.fencing_token > now_us:
        return None
    return (now_us - grant.fencing_token) / 1e6


def look_of(reply: list[Any]) -> Look:
    """The answer of `lua/look.lua`."""
    now_us, is_, value, length, ttl_left_ms, last, inside, holders, queued, waiters = reply
    type_ = text(is_)
    grants: tuple[Grant, ...] = ()
    not_a_lock = None if type_ in ("none", "string", "zset") else type_
    if type_ == "string":
        grants = (_of_string(text(value), length, ttl_left_ms),)
        inside = 1
    elif type_ == "zset":
        shared = [_of_member(*holder) for holder in holders]
        grants = tuple(grant for grant in shared if grant is not None)
        if len(grants) < len(shared):
            grants, not_a_lock = (), "zset"
        grants = tuple(grant for grant in grants if (grant.ttl_left or 0.0) > 0)
    fence = maybe_text(last) or ""
    return Look(
        now_us=now_us,
        not_a_lock=not_a_lock,
        grants=grants,
        inside=max(inside, len(grants)),
        waiters=tuple(_waiter(text(token), came, until, now_us) for token, came, until in waiters),
        queued=queued,
        last_fencing_token=int(fence) if fence.isascii() and fence.isdecimal() else None,
    )


def _of_string(value: str, length: int, ttl_left_ms: int) -> Grant:
    ttl_left = ttl_left_ms / 1000 if ttl_left_ms >= 0 else None
    read = _names.read_value(value)
    if read is None:
        # What another library wrote proves its ownership, too: the beginning is enough to know it.
        holder = f"{value[:8]}... ({length} bytes)" if length > 8 else value
        return Grant(value, holder, ttl_left, None, is_foreign=True)
    is_kept = read.owner_token == _names.retired(read.owner_token)
    return Grant(value, read.holder, ttl_left, read.fencing_token, is_kept=is_kept)


def _of_member(
    member: bytes | str, ttl_left_ms: int, fencing_token: bytes | str | None, reads_only: int
) -> Grant | None:
    value = _names.value_of(text(member), int(float(text(fencing_token or "0"))))
    read = _names.read_value(value)
    if read is None:
        return None
    access = "reading" if reads_only else _names.access_of(read.owner_token)
    token = read.fencing_token or None
    return Grant(value, read.holder, ttl_left_ms / 1000, token, access)


def _waiter(token: str, came_us: int, until_ms: bytes | str | None, now_us: int) -> Waiter:
    read = _names.read_value(_names.value_of(token, 0))
    # Without an entry it counts as alive until a poll gives it one, 6 s ahead.
    alive_for = 6.0 if until_ms is None else float(text(until_ms)) / 1e3 - now_us / 1e6
    return Waiter(
        holder=read.holder if read else "(unknown)",
        waited=max(0.0, (now_us - came_us) / 1e6),
        alive_for=alive_for,
        access=_names.access_of(token),
        permits=_permits_of(token),
    )


def _permits_of(owner_token: str) -> int | None:
    if _names.access_of(owner_token) != "permit":
        return None
    return int(_names.limit_of(owner_token))
