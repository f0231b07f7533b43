"""The script calls of an acquisition: what they ask, and what their answers mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from .. import _clock, _names
from .._names import Keys
from ._api import Acquisition, Granted, Refused, Released
from ._wire import Call, Script, SimpleCall, bulk, maybe_text, pack, text

ACQUIRE: Final = Script("acquire")
RELEASE: Final = Script("release")
RETIRE: Final = Script("retire")
DISCARD: Final = Script("discard", items=2)
INSPECT: Final = Script("inspect", items=3)
CONFIRM: Final = Script("confirm", items=2)
SHARE_ACQUIRE: Final = Script("share_acquire")
SHARE_RELEASE: Final = Script("share_release")
SHARE_DISCARD: Final = Script("share_discard")

# In place of what stands in a key that holds something else.
NOT_A_LOCK: Final = "(a key that is not a lock)"

# Of an acquire, and of a release: how many keys, four keys, four arguments. Where several may hold
# there is a key more.
_PARTS: Final = 1 + 4 + 4
# The types of a reply, by the first of it.
_ACQUIRE_SHAPES: Final = {1: (int,) * 4, 0: (int, bytes, *(int,) * 4), -1: (int,)}
_RELEASE_SHAPES: Final = ((int, bytes), (int, type(None)))
_FLAG: Final = {False: bulk("0"), True: bulk("1")}
READ: Final = bulk("r")


class Us:
    """What is said of this client in every call, packed."""

    def __init__(self, prefix: str, client_id: str) -> None:
        self.inbox_prefix = bulk(_names.inbox_prefix(prefix))
        self.all = self.inbox_prefix + bulk(client_id)


class Acquire(Call):
    """Idempotent, but a late copy is a ghost: it notes where each one went, unanswered."""

    __slots__ = ("_acquisition", "_notice", "_packed", "link", "may_repeat", "sent_at")

    takes = True

    def __init__(
        self,
        acquisition: Acquisition,
        us: Us,
        *,
        ttl_ms: int,
        alive_ms: int,
        may_repeat: bool,
        notice: Callable[[str | None], None],
    ) -> None:
        script = SHARE_ACQUIRE if acquisition.is_shared else ACQUIRE
        super().__init__(script, acquisition.name, acquisition.keys.lock)
        self._packed = packed_of(acquisition) + _packed_ms(ttl_ms, alive_ms) + us.inbox_prefix
        if acquisition.reads_only:
            self._packed += READ
        self.may_repeat = may_repeat
        self.sent_at = 0.0
        self.link = 0
        self._acquisition = acquisition
        self._notice = notice

    def parts(self, number: int) -> tuple[int, bytes]:
        return _PARTS + self._acquisition.is_shared + self._acquisition.reads_only, self._packed

    def fits(self, reply: list[Any]) -> bool:
        shape = tuple(map(type, reply))
        return shape[:1] == (int,) and shape == _ACQUIRE_SHAPES.get(reply[0])

    def sent(self, number: int) -> None:
        self._acquisition.asked.append(number)
        self._acquisition.was_sent = True
        if not self.sent_at:  # What a later copy finds, the first one may have done.
            self.sent_at = _clock.now()

    def heard(self, number: int, reply: Any) -> None:
        self._acquisition.asked.remove(number)
        self.link = number
        if isinstance(reply, list) and reply[0] == 0:
            self._notice(text(reply[1]))

    def answer(self, reply: list[Any]) -> Granted | Refused:
        """What *reply* says."""
        if reply[0] == 1:
            _, fencing_token, ttl_left_ms, already = reply
            value = _names.value_of(self._acquisition.token, fencing_token)
            deadline = _clock.deadline(self.sent_at, ttl_left_ms)
            return Granted(value, fencing_token, deadline, bool(already))
        if reply[0] == -1:
            raise AssertionError(f"given up, and then asked for again: {self.name!r}")
        _, standing, ttl_left_ms, place, waiters, last = reply
        return Refused(text(standing), ttl_left_ms, place, waiters, last, self.sent_at, self.link)


class Release(Call):
    """Leaves a tombstone where a copy of an acquire may still come by another connection."""

    __slots__ = ("_notice", "_us", "acquisition", "may_repeat")

    def __init__(
        self,
        acquisition: Acquisition,
        us: Us,
        *,
        may_repeat: bool,
        notice: Callable[[int, str, Keys], None],
    ) -> None:
        script = SHARE_RELEASE if acquisition.is_shared else RELEASE
        super().__init__(script, acquisition.name, acquisition.keys.lock)
        self.acquisition = acquisition
        self.may_repeat = may_repeat
        self._us = us
        self._notice = notice

    def parts(self, number: int) -> tuple[int, bytes]:
        asked = self.acquisition.asked
        leaves_tombstone = bool(asked) and any(other != number for other in asked)
        packed = packed_of(self.acquisition) + _FLAG[leaves_tombstone] + self._us.all
        return _PARTS + self.acquisition.is_shared, packed

    def fits(self, reply: list[Any]) -> bool:
        return tuple(map(type, reply)) in _RELEASE_SHAPES

    def with_one_key(self) -> Call | None:
        return SimpleCall(DISCARD, self.name, [self.key], self.acquisition.token)

    def is_certain(self, reply: Any) -> bool:
        return bool(reply[0] == 1)  # Else it may have been the first copy that removed it.

    def sent(self, number: int) -> None:
        self.acquisition.releases += 1

    def heard(self, number: int, reply: Any) -> None:
        if isinstance(reply, list) and reply[1] is not None:
            self._notice(reply[0], text(reply[1]), self.acquisition.keys)

    def answer(self, reply: list[Any]) -> Released:
        """What *reply* says."""
        standing = None if reply[0] == 2 else maybe_text(reply[1])
        return Released(reply[0] == 1, standing, self.acquisition.releases > 1)


class ShareRelease(Release):
    """Lets in whoever may enter then, several of ours perhaps."""

    __slots__ = ()

    def fits(self, reply: list[Any]) -> bool:
        return says_who_entered(reply)

    def with_one_key(self) -> Call:
        return SimpleCall(SHARE_DISCARD, self.name, [self.key], self.acquisition.token)

    def heard(self, number: int, reply: Any) -> None:
        tell_entered(self._notice, reply, self.acquisition.keys)

    def answer(self, reply: list[Any]) -> Released:
        """What *reply* says: others that hold are no sign that ours was stolen."""
        return Released(reply[0] == 1, None, self.acquisition.releases > 1)


class Retire(Release):
    """A release after which the name stays taken until an instant on our clock.

    Each copy says how long that is from when it is sent; the first one counts.
    """

    __slots__ = ("_keep_until", "_leaves_tombstone")

    def __init__(
        self,
        acquisition: Acquisition,
        us: Us,
        *,
        may_repeat: bool,
        notice: Callable[[int, str, Keys], None],
        keep_until: float,
    ) -> None:
        super().__init__(acquisition, us, may_repeat=may_repeat, notice=notice)
        self.script = RETIRE
        self._keep_until = keep_until
        self._leaves_tombstone = True

    def parts(self, number: int) -> tuple[int, bytes]:
        asked, keys = self.acquisition.asked, [self.key]
        if self._leaves_tombstone and any(other != number for other in asked):
            keys.append(self.acquisition.keys.alive)
        left_ms = max(1, _clock.ttl_ms(self._keep_until - _clock.now()))
        token = self.acquisition.token
        parts = (str(len(keys)), *keys, token, _names.retired(token), str(left_ms))
        return len(parts), pack(*parts)

    def with_one_key(self) -> Call | None:
        if not self._leaves_tombstone:
            return None
        self._leaves_tombstone = False
        return self


def releasing(*, is_shared: bool, keep_until: float | None) -> Callable[..., Release]:
    """What makes the release of a name, which is to stay taken until then, if that is to come."""
    if is_shared:
        return ShareRelease
    if keep_until is None or keep_until <= _clock.now():
        return Release
    return functools.partial(Retire, keep_until=keep_until)


def says_who_entered(reply: list[Any]) -> bool:
    """Whether *reply* is 0 or 1, with the values of those who entered."""
    return bool(reply) and reply[0] in (0, 1) and all(type(value) is bytes for value in reply[1:])


def tell_entered(notice: Callable[[int, str, Keys], None], reply: Any, keys: Keys) -> None:
    """*notice* hears of those of our waiters who entered, as *reply* says."""
    if isinstance(reply, list):
        for value in reply[1:]:
            notice(1, text(value), keys)


class Confirm(Call):
    """On a node of a quorum: does it stand there, and with which fencing token from now on?"""

    __slots__ = ("_packed",)

    may_repeat = False

    def __init__(self, acquisition: Acquisition, *, ttl_ms: int, fencing_token: int) -> None:
        keys = acquisition.keys
        super().__init__(CONFIRM, acquisition.name, keys.lock)
        self._packed = pack(
            "2", keys.lock, keys.fence, acquisition.token, str(ttl_ms), str(fencing_token)
        )

    def parts(self, number: int) -> tuple[int, bytes]:
        return 6, self._packed


def packed_of(acquisition: Acquisition) -> bytes:
    """The keys and the owner token, with which the calls of an acquisition begin."""
    if not acquisition.packed:
        packed_keys = _packed_shared_keys if acquisition.is_shared else _packed_keys
        acquisition.packed = packed_keys(acquisition.keys) + bulk(acquisition.token)
    return acquisition.packed


# Kept: a name is often locked again.
@functools.lru_cache(maxsize=1024)
def _packed_keys(keys: Keys) -> bytes:
    """*keys*, behind their number."""
    return pack(str(len(keys)), *keys)


@functools.lru_cache(maxsize=1024)
def _packed_shared_keys(keys: Keys) -> bytes:
    """The same where several may hold."""
    return pack(str(len(keys) + 1), *keys, keys.grants)


# Kept: a process has few ttls.
@functools.lru_cache(maxsize=64)
def _packed_ms(ttl_ms: int, alive_ms: int) -> bytes:
    """Both."""
    return pack(str(ttl_ms), str(alive_ms))
