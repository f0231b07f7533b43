"""One server in plain Python: what each script should answer, publish or leave in the keys.

It is written from the design of the protocol, not from the Lua, and the differential test compares
the two. There is no I/O in it: the caller gives the clock, so a simulation may use it as a server.

What it leaves out, since no client of ours does it: arguments that are not what the scripts' heads
say, queue members that are no owner tokens, fencing tokens beyond 2**53 or not in decimal.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

Reply: TypeAlias = "list[int | bytes | ServerError | None]"
OnPublish: TypeAlias = Callable[[bytes, bytes], None]
Plain: TypeAlias = bytes | tuple[tuple[bytes, float], ...] | tuple[bytes, ...]

LIVENESS_MS_MAX: Final = 6_000
SIDE_KEYS_MS: Final = 12_000
TOMBSTONE_MS: Final = 60_000
FENCE_MS: Final = 86_400_000
# How many dead waiters or old tombstones one call clears away.
DEAD_MAX: Final = 1_000

# The owner token of one who shares a name.
_SHARES: Final = re.compile(rb":\d+[rws]\d*\Z")
_DECIMAL: Final = re.compile(rb"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*")


class ServerError(Exception):
    """An error reply; its text is what the server says."""


class Kept(NamedTuple):
    """What stands in one key.

    Attributes:
        value: A string; or a zset's members with their scores, in its order; or a list's items.
        ends_at_ms: When its life is over, on the server's clock; None: it has no TTL.
    """

    value: Plain
    ends_at_ms: int | None


def _nobody(channel: bytes, text: bytes) -> None:
    """Hears what is published."""


class Model:
    """A server with our scripts, empty at first.

    Args:
        now_us: The server's clock, read once in each call. It may step back.
        on_publish: Gets the channel and the text of each message. A `ServerError` that it raises
            is the server's refusal to publish.
    """

    def __init__(self, now_us: Callable[[], int], on_publish: OnPublish = _nobody) -> None:
        self._clock = now_us
        self._entries: dict[bytes, _Entry] = {}
        self._scripts: dict[str, Callable[[Sequence[bytes], Sequence[bytes]], Reply]] = {
            "acquire": self._acquire,
            "extend": self._extend,
            "release": self._release,
            "retire": self._retire,
            "discard": self._discard,
            "inspect": self._inspect,
            "probe": self._probe,
            "confirm": self._confirm,
        }
        self._on_publish = on_publish
        self.now_us = 0
        self.now_ms = 0

    def run(self, script: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        """What the script *script* (its file's name without ``.lua``) answers.

        Raises:
            ServerError: It answers with an error.
        """
        self._look_at_clock()
        return self._scripts[script](keys, args)

    # What others do to the keys.

    def set(self, key: bytes, value: bytes, *, px: int | None = None) -> None:
        """SET, with PX or without a TTL."""
        self._look_at_clock()
        self.put(key, value, px)

    def delete(self, *keys: bytes) -> int:
        """DEL; an eviction, too. How many there were."""
        self._look_at_clock()
        return sum(self.drop(key) for key in keys)

    def flushall(self) -> None:
        """FLUSHALL; also a restart."""
        self._entries.clear()

    def push(self, key: bytes, item: bytes) -> None:
        """DEL with RPUSH: puts a value of a type that is none of ours in the key."""
        self._entries[key] = _Entry((item,), None)

    def zadd(self, key: bytes, scores: Mapping[bytes, float]) -> None:
        """ZADD, as a script of another version might."""
        self._look_at_clock()
        for member, score in scores.items():
            self.add(key, member, score)

    def pexpire(self, key: bytes, life_ms: int) -> None:
        """PEXPIRE."""
        self._look_at_clock()
        self.live(key, life_ms)

    # For whoever compares.

    def dump(self) -> dict[bytes, Kept]:
        """Every key that stands now."""
        self._look_at_clock()
        return {
            key: Kept(_plain(entry.value), entry.ends_at_ms)
            for key in tuple(self._entries)
            if (entry := self._entry(key)) is not None
        }

    def load(self, dumped: Mapping[bytes, Kept]) -> None:
        """Let exactly those keys stand: the other half of `dump`."""
        self._entries = {
            key: _Entry(_own(value), ends_at_ms) for key, (value, ends_at_ms) in dumped.items()
        }

    # The scripts.

    def _acquire(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, ttl_ms, alive_ms, inboxes = args[0], int(args[1]), int(args[2]), args[3]
        name = _Name(self, keys)
        if name.is_free_and_alone():
            return [1, name.grant(token, ttl_ms), ttl_ms, 0]
        if name.has_tombstone(token):
            return [-1]
        value = name.value()
        if value is not None and _is_of(token, value):
            return name.confirm(token, value, ttl_ms)
        # Whatever could be of another type is looked at before anything is written.
        is_queued = name.is_queued(token)
        name.last_fencing_token()
        if alive_ms:
            name.set_liveness(token, alive_ms)
        head, head_left_ms = name.earliest_live()
        name.purge()
        if value is None:
            if head in (None, token):
                return [1, name.grant(token, ttl_ms), ttl_ms, 0]
            assert head is not None
            if _SHARES.search(head):
                self.remove(name.alive, token)
                name.keep_lives(SIDE_KEYS_MS)
                raise ServerError("WRONGTYPE The name is locked as something else")
            value = name.hand_over(head, max(1, head_left_ms))
            name.tell(inboxes, head, value)
        if alive_ms:
            name.enqueue(token, is_queued=is_queued)
        name.keep_lives(SIDE_KEYS_MS)
        return name.refusal(token, value)

    def _extend(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        ttl_ms, values = int(args[0]), args[1:]
        reply: Reply = []
        for lock, value in zip(keys, values, strict=True):
            try:
                standing = self.string(lock)
            except ServerError as error:
                reply += [0, error]
                continue
            ours = standing == value
            reply += [1, self.live_at_least(lock, ttl_ms)] if ours else [0, standing]
        return reply

    def _release(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, leaves_tombstone, inboxes, client_id = args[0], args[1] == b"1", args[2], args[3]
        name = _Name(self, keys)
        value, wrong = name.value_or_error()
        ours = value is not None and (value == token or _is_of(token, value))
        if not leaves_tombstone and not self.exists(name.queue, name.alive):
            return name.free(value, wrong, ours=ours)
        if error := name.error_of_side_keys(token):
            # Nobody can be waiting there, and what is ours goes all the same.
            return name.free(value, error, ours=ours)
        name.leave(token)
        if leaves_tombstone:
            name.set_tombstone(token)
        if not ours and (value is not None or wrong):
            return name.free(value, wrong, ours=False)
        head, head_left_ms = name.take_earliest_live()
        if head is None:
            return name.free(value, None, ours=ours)
        value = name.hand_over(head, head_left_ms)
        if _client_id(head) != client_id:
            name.tell(inboxes, head, value)
        return [1 if ours else 2, value]

    def _retire(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        lock, token, nobody, life_ms = keys[0], args[0], args[1], int(args[2])
        for alive in keys[1:]:
            self._refuse_late_copies(alive, token)
        value = self.string(lock)
        if value is None or not _is_of(token, value):
            return [2, None] if value is None else [0, value]
        self.put(lock, nobody + value[len(token) :], life_ms)
        return [1, None]

    def _refuse_late_copies(self, alive: bytes, token: bytes) -> None:
        with suppress(ServerError):
            self.add(alive, b"!" + token, self.now_ms + TOMBSTONE_MS)
        self.live_at_least(alive, TOMBSTONE_MS)

    def _discard(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        (lock,), (token,) = keys, args
        value = self.string(lock)
        if value is None or not _is_of(token, value):
            return [0, value]
        self.drop(lock)
        return [1, None]

    def _inspect(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        lock, queue = keys
        return [self.string(lock), self.ttl_left_ms(lock), len(self.members(queue))]

    def _probe(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        (key,), (inbox,) = keys, args
        self.string(key)
        self.drop(key)
        return [self.publish(inbox, b"")]

    def _confirm(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        """On a node of a quorum: its fencing token never falls, and nothing is made anew."""
        (lock, fence), (token, ttl_ms, fencing_token) = keys, args
        value = self.string(lock)
        if value is None or not _is_of(token, value):
            return [0, value]
        if fencing_token != b"0":
            if (_number(self.string(fence)) or 0) < int(fencing_token):
                self.put(fence, fencing_token, FENCE_MS)
            self.change(lock, b"%s/%s" % (token, fencing_token))
        return [1, self.live_at_least(lock, int(ttl_ms))]

    # The server's own commands, as far as the scripts need them.

    def string(self, key: bytes) -> bytes | None:
        value = self._value(key)
        if value is None or isinstance(value, bytes):
            return value
        raise _wrong_type()

    def members(self, key: bytes) -> _Members:
        """The zset; an empty one that stands nowhere if there is none. Only to be read."""
        value = self._value(key)
        if value is None:
            return _NO_MEMBERS
        if isinstance(value, _Members):
            return value
        raise _wrong_type()

    def exists(self, *keys: bytes) -> bool:
        return any(self._entry(key) is not None for key in keys)

    def put(self, key: bytes, value: bytes, life_ms: int | None) -> None:
        ends_at_ms = None if life_ms is None else self.now_ms + life_ms
        self._entries[key] = _Entry(value, ends_at_ms)

    def change(self, key: bytes, value: bytes) -> None:
        """With the life that it has."""
        self._entries[key].value = value

    def drop(self, key: bytes) -> bool:
        was_there = self._entry(key) is not None
        self._entries.pop(key, None)
        return was_there

    def add(self, key: bytes, member: bytes, score: float) -> None:
        members = self.members(key)
        if members is _NO_MEMBERS:
            members = _Members()
            self._entries[key] = _Entry(members, None)
        members.put(member, score)

    def remove(self, key: bytes, member: bytes) -> None:
        members = self.members(key)
        members.drop(member)
        if not members:
            self._entries.pop(key, None)

    def ttl_left_ms(self, key: bytes) -> int:
        """-1: no TTL; -2: no key."""
        entry = self._entry(key)
        if entry is None:
            return -2
        return -1 if entry.ends_at_ms is None else entry.ends_at_ms - self.now_ms

    def live(self, key: bytes, life_ms: int) -> None:
        entry = self._entry(key)
        if entry is not None:
            entry.ends_at_ms = self.now_ms + life_ms

    def live_at_least(self, key: bytes, life_ms: int) -> int:
        """Never a shorter life; what is left, ms."""
        left_ms = self.ttl_left_ms(key)
        if left_ms >= life_ms:
            return left_ms
        self.live(key, life_ms)
        return life_ms

    def publish(self, channel: bytes, text: bytes) -> bytes:
        """Why it was refused, or b""."""
        try:
            self._on_publish(channel, text)
        except ServerError as error:
            return str(error).encode()
        return b""

    def _look_at_clock(self) -> None:
        self.now_us = self._clock()
        self.now_ms = self.now_us // 1000

    def _entry(self, key: bytes) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None or entry.ends_at_ms is None or self.now_ms <= entry.ends_at_ms:
            return entry
        del self._entries[key]
        return None

    def _value(self, key: bytes) -> _Value | None:
        entry = self._entry(key)
        return None if entry is None else entry.value


class _Name:
    """The four keys of one name, for the length of one script."""

    __slots__ = ("_server", "alive", "fence", "lock", "queue")

    def __init__(self, server: Model, keys: Sequence[bytes]) -> None:
        self._server = server
        self.lock, self.fence, self.queue, self.alive = keys

    def value(self) -> bytes | None:
        return self._server.string(self.lock)

    def value_or_error(self) -> tuple[bytes | None, ServerError | None]:
        """The error is kept for later: it must not keep anybody in the queue."""
        try:
            return self.value(), None
        except ServerError as error:
            return None, error

    def error_of_side_keys(self, token: bytes) -> ServerError | None:
        try:
            self.last_fencing_token()
            self.is_queued(token)
            self._server.members(self.alive)
        except ServerError as error:
            return error
        return None

    def is_free_and_alone(self) -> bool:
        return not self._server.exists(self.lock, self.queue, self.alive)

    def is_queued(self, token: bytes) -> bool:
        return token in self._server.members(self.queue).scores

    def has_tombstone(self, token: bytes) -> bool:
        return b"!" + token in self._server.members(self.alive).scores

    def last_fencing_token(self) -> float:
        """0 where the key is gone, or is no number."""
        return _number(self._server.string(self.fence)) or 0

    # The lock.

    def grant(self, token: bytes, ttl_ms: int) -> int:
        """*token* holds, for *ttl_ms*; its fencing token."""
        fencing_token = self._next_fencing_token()
        self.leave(token)
        self._server.put(self.lock, b"%s/%d" % (token, fencing_token), ttl_ms)
        return fencing_token

    def hand_over(self, head: bytes, life_ms: int) -> bytes:
        """*head* holds, although it did not ask; the lock's new value."""
        self.grant(head, life_ms)
        value = self.value()
        assert value is not None
        return value

    def tell(self, inboxes: bytes, head: bytes, value: bytes) -> None:
        """A refused message is one that is lost: the head finds out when it polls."""
        self._server.publish(inboxes + _client_id(head), b"%s %s" % (value, self.lock))

    def confirm(self, token: bytes, value: bytes, ttl_ms: int) -> Reply:
        """It is *token*'s already, perhaps without its knowing."""
        self.leave(token)
        left_ms = self._server.live_at_least(self.lock, ttl_ms)
        fencing_token = _number(value[len(token) + 1 :])
        # A Lua table ends at its first nil.
        return [1] if fencing_token is None else [1, int(fencing_token), left_ms, 1]

    def free(self, value: bytes | None, wrong: ServerError | None, *, ours: bool) -> Reply:
        """The end of a release that hands the lock to nobody."""
        if ours:
            self._server.drop(self.lock)
            return [1, None]
        if wrong:
            raise wrong
        return [2, None] if value is None else [0, value]

    def refusal(self, token: bytes, value: bytes) -> Reply:
        waiters = self._server.members(self.queue)
        place = waiters.rank(token) if token in waiters.scores else -1
        last = self.last_fencing_token()
        last = last if last > 0 else self._server.now_us
        left_ms = self._server.ttl_left_ms(self.lock)
        return [0, value, left_ms, place, len(waiters), int(last)]

    def _next_fencing_token(self) -> int:
        fencing_token = int(max(self.last_fencing_token() + 1, self._server.now_us))
        self._server.put(self.fence, b"%d" % fencing_token, FENCE_MS)
        return fencing_token

    # The queue.

    def enqueue(self, token: bytes, *, is_queued: bool) -> None:
        """Behind everybody, unless it has a place."""
        if not is_queued:
            highest = self._server.members(self.queue).highest()
            self._server.add(self.queue, token, max(highest + 1, self._server.now_us))
        self._server.live(self.queue, SIDE_KEYS_MS)

    def leave(self, token: bytes) -> None:
        self._server.remove(self.queue, token)
        self._server.remove(self.alive, token)

    def set_liveness(self, token: bytes, alive_ms: int) -> None:
        self._server.add(self.alive, token, self._server.now_ms + alive_ms)

    def set_tombstone(self, token: bytes) -> None:
        self._server.add(self.alive, b"!" + token, self._server.now_ms + TOMBSTONE_MS)
        self.keep_lives(TOMBSTONE_MS)

    def keep_lives(self, life_ms: int) -> None:
        """Whoever needs the key: never a shorter life than it has."""
        self._server.live_at_least(self.alive, life_ms)

    def earliest_live(self) -> tuple[bytes | None, int]:
        """The first waiter that is not dead, and the ms it lives on; drops those before it.

        Behind 1000 dead ones comes the next waiter, dead or not.
        """
        for _ in range(DEAD_MAX):
            head, left_ms = self._head()
            if head is None or left_ms > 0:
                return head, left_ms
            self.leave(head)
        return self._head()

    def take_earliest_live(self) -> tuple[bytes | None, int]:
        """The same for a release, which leaves the lock free behind 1000 dead ones.

        And before one who would share it: a lock cannot be handed to that one.
        """
        for _ in range(DEAD_MAX):
            head, left_ms = self._head(keeps=False)
            if head is None or (left_ms > 0 and _SHARES.search(head)):
                break
            self.leave(head)
            if left_ms > 0:
                return head, left_ms
        return None, 0

    def purge(self) -> None:
        """Old tombstones go, and what an evicted queue left; a waiter keeps its place."""
        waiters = self._server.members(self.queue).scores
        for member in self._server.members(self.alive).up_to(self._server.now_ms, DEAD_MAX):
            if member not in waiters:
                self._server.remove(self.alive, member)

    def _head(self, *, keeps: bool = True) -> tuple[bytes | None, int]:
        """The head with the ms it lives on: at most 6 s, whatever is known of it."""
        head = self._server.members(self.queue).first()
        if head is None:
            return None, 0
        until_ms = self._server.members(self.alive).scores.get(head)
        if until_ms is None or until_ms - self._server.now_ms > LIVENESS_MS_MAX:
            # An eviction took it, or the clock stepped back since: as if it had polled just now.
            if keeps:
                self.set_liveness(head, LIVENESS_MS_MAX)
            return head, LIVENESS_MS_MAX
        return head, int(until_ms) - self._server.now_ms


class _Members:
    """A zset: members by score, those of one score by their bytes."""

    __slots__ = ("_order", "scores")

    def __init__(self, scores: Mapping[bytes, float] = MappingProxyType({})) -> None:
        self.scores = dict(scores)
        self._order = sorted((score, member) for member, score in scores.items())

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[bytes, float]]:
        return ((member, score) for score, member in self._order)

    def put(self, member: bytes, score: float) -> None:
        self.drop(member)
        self.scores[member] = score
        bisect.insort(self._order, (score, member))

    def drop(self, member: bytes) -> None:
        if member in self.scores:
            del self._order[self.rank(member)]
            del self.scores[member]

    def rank(self, member: bytes) -> int:
        return bisect.bisect_left(self._order, (self.scores[member], member))

    def first(self) -> bytes | None:
        return self._order[0][1] if self._order else None

    def highest(self) -> float:
        return self._order[-1][0] if self._order else 0

    def up_to(self, score: float, most: int) -> list[bytes]:
        """The members with at most *score*, at most so many."""
        end = bisect.bisect_right(self._order, score, key=lambda place: place[0])
        return [member for _, member in self._order[: min(end, most)]]


_NO_MEMBERS: Final = _Members()

_Value: TypeAlias = bytes | _Members | tuple[bytes, ...]


@dataclass(slots=True)
class _Entry:
    value: _Value
    ends_at_ms: int | None


def _plain(value: _Value) -> Plain:
    return tuple(value) if isinstance(value, _Members) else value


def _own(value: Plain) -> _Value:
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return _Members(dict(value))
    return value


def _wrong_type() -> ServerError:
    return ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")


def _is_of(token: bytes, value: bytes) -> bool:
    """Whether the lock's *value* says that *token* holds."""
    return value.startswith(token + b"/")


def _client_id(token: bytes) -> bytes:
    return token.split(b":", 2)[1]


def _number(text: bytes | None) -> float | None:
    if text is None:
        return None
    return float(text) if text.isdigit() or _DECIMAL.fullmatch(text) else None
