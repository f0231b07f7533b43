"""The model's server with the scripts of names that several may hold, written from their design."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Final

from tests.model import (
    DEAD_MAX,
    FENCE_MS,
    LIVENESS_MS_MAX,
    SIDE_KEYS_MS,
    Model,
    OnPublish,
    Reply,
    ServerError,
    _client_id,
    _Name,
    _nobody,
)

HOLDERS_MAX: Final = 1_000
_ASKS: Final = re.compile(rb":\d+(?:(r)|(w)|s(\d+))$")


class SharedModel(Model):
    """A server that knows all of our scripts."""

    def __init__(self, now_us: Callable[[], int], on_publish: OnPublish = _nobody) -> None:
        super().__init__(now_us, on_publish)
        self._scripts |= {
            "share_acquire": self._share_acquire,
            "share_release": self._share_release,
            "share_discard": self._share_discard,
            "share_extend": self._share_extend,
            "share_confirm": self._share_confirm,
            "share_inspect": self._share_inspect,
        }

    def _share_acquire(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, ttl_ms, alive_ms, inboxes = args[0], int(args[1]), int(args[2]), args[3]
        name = _Shared(self, keys, token, reads=len(args) > 4)
        if not self.exists(name.lock, name.queue, name.alive, name.grants):
            return [1, name.enter(token, ttl_ms), ttl_ms, 0]
        if name.has_tombstone(token):
            return [-1]
        # Whatever could be of another type is looked at before anything is written.
        name.look_at_all()
        is_queued = name.is_queued(token)
        if name.holds(token):
            return name.confirm_holder(ttl_ms)
        name.forget_unless_granted(token)
        name.drop_ended()
        name.refuse_holders_of_another_kind()
        if is_queued and alive_ms:
            name.set_liveness(token, alive_ms)
        entered = name.let_in(inboxes, own_client_id=None, own_life_ms=ttl_ms)
        if token not in entered and not self.exists(name.queue) and name.has_room_for(token):
            entered[token] = name.enter(token, ttl_ms)
        if token not in entered:
            name.refuse_head_of_another_kind()
        name.purge()
        if token in entered:
            return [1, entered[token], ttl_ms, 0]
        if alive_ms:
            if not is_queued:
                name.set_liveness(token, alive_ms)
            name.enqueue(token, is_queued=is_queued)
        return name.refusal_of_many(token)

    def _share_release(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, how, inboxes, client_id = args
        name = _Shared(self, keys, token)
        if how == b"0" and not self.exists(name.queue, name.alive):
            return [name.remove_holder(token)]
        wrong = name.error_of_lock()
        was_ours = wrong is None and name.end_ms(token) is not None
        if error := name.error_of_sides():
            if not was_ours or how == b"r":
                raise error
            return [name.remove_holder(token)]
        name.leave(token)
        if how == b"1":
            name.set_tombstone(token)
        if wrong:
            raise wrong
        if how == b"r":
            was_ours = name.holds(token)
            if was_ours:
                self.add(name.grants, b"+" + token, 0)
        else:
            name.remove_holder(token)
        name.drop_ended()
        entered = name.let_in(inboxes, own_client_id=client_id, own_life_ms=0)
        told = [member for member in entered if _client_id(member) == client_id]
        return [int(was_ours), *(b"%s/%d" % (member, entered[member]) for member in told)]

    def _share_discard(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        was_there = args[0] in self.members(keys[0]).scores
        self.remove(keys[0], args[0])
        return [int(was_there)]

    def _share_extend(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, ttl_ms, fencing_token = args[0], int(args[1]), int(args[2])
        name = _Shared(self, (keys[0], b"", b"", b"", keys[1]), token)
        if not name.holds(token) or name.fencing_token(token) != fencing_token:
            return [0]
        return [1, name.live_holder(ttl_ms)]

    def _share_confirm(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        token, ttl_ms, fencing_token, reads = args[0], int(args[1]), int(args[2]), args[3] == b"1"
        name = _Shared(self, (keys[0], keys[1], b"", b"", keys[2]), token)
        if not name.holds(token):
            self.remove(name.grants, token)
            self.remove(name.grants, b"+" + token)
            return [0]
        if fencing_token:
            if name.last_fencing_token() < fencing_token:
                self.put(name.fence, b"%d" % fencing_token, FENCE_MS)
            self.add(name.grants, token, fencing_token)
        if reads:
            self.add(name.grants, b"+" + token, 0)
        return [1, name.live_holder(ttl_ms)]

    def _share_inspect(self, keys: Sequence[bytes], args: Sequence[bytes]) -> Reply:
        name = _Shared(self, (keys[0], b"", keys[1], b"", keys[2]), b"")
        name.look_at_holders()
        reply: Reply = [len(self.members(keys[1]))]
        for member, left_ms in name.living()[:HOLDERS_MAX]:
            reads_only = b"+" + member in self.members(name.grants).scores
            reply += [name.value_of(member), left_ms, int(reads_only)]
        return reply


class _Shared(_Name):
    """The five keys of one name, for the length of one script that *token* asks for."""

    __slots__ = ("grants", "reads", "token")

    def __init__(
        self, server: Model, keys: Sequence[bytes], token: bytes, *, reads: bool = False
    ) -> None:
        super().__init__(server, keys[:4])
        self.grants = keys[4]
        self.token = token
        self.reads = reads

    # Who holds.

    def look_at_all(self) -> None:
        for key in (self.lock, self.grants, self.queue):
            self._server.members(key)
        self.last_fencing_token()

    def look_at_holders(self) -> None:
        first = self._server.members(self.lock).first()
        if first is not None and _ASKS.search(first) is None:
            raise ServerError("WRONGTYPE The key holds something else")

    def error_of_lock(self) -> ServerError | None:
        try:
            self._server.members(self.lock)
        except ServerError as error:
            return error
        return None

    def error_of_sides(self) -> ServerError | None:
        try:
            self._server.members(self.grants)
        except ServerError as error:
            return error
        return self.error_of_side_keys(self.token)

    def end_ms(self, member: bytes) -> float | None:
        return self._server.members(self.lock).scores.get(member)

    def fencing_token(self, member: bytes) -> int | None:
        found = self._server.members(self.grants).scores.get(member)
        return None if found is None else int(found)

    def holds(self, member: bytes) -> bool:
        end_ms, granted = self.end_ms(member), self.fencing_token(member)
        return end_ms is not None and granted is not None and end_ms > self._server.now_ms

    def living(self) -> list[tuple[bytes, int]]:
        """Each with its ms left, the first to end first."""
        now_ms = self._server.now_ms
        ends = self._server.members(self.lock)
        return [(member, int(end_ms) - now_ms) for member, end_ms in ends if end_ms > now_ms]

    def value_of(self, member: bytes) -> bytes:
        return b"%s/%d" % (member, self.fencing_token(member) or 0)

    def confirm_holder(self, ttl_ms: int) -> Reply:
        self.leave(self.token)
        left_ms = self.live_holder(ttl_ms)
        return [1, self.fencing_token(self.token), left_ms, 1]

    def live_holder(self, ttl_ms: int) -> int:
        """Never a shorter life; what is left, ms."""
        now_ms = self._server.now_ms
        end_ms = self.end_ms(self.token)
        assert end_ms is not None
        left_ms = int(end_ms) - now_ms
        if left_ms >= ttl_ms:
            return left_ms
        self._server.add(self.lock, self.token, now_ms + ttl_ms)
        self._keep_holders(ttl_ms)
        return ttl_ms

    def remove_holder(self, member: bytes) -> int:
        """Whether it was there, dead or alive."""
        was_there = self.end_ms(member) is not None
        self._server.remove(self.lock, member)
        try:
            self._server.remove(self.grants, member)
            self._server.remove(self.grants, b"+" + member)
        except ServerError:
            pass  # Nobody can be kept there.
        return int(was_there)

    def forget_unless_granted(self, member: bytes) -> None:
        if self.fencing_token(member) is None:
            self._server.remove(self.lock, member)

    def drop_ended(self) -> None:
        self.look_at_holders()
        for member in self._server.members(self.lock).up_to(self._server.now_ms, DEAD_MAX):
            self.remove_holder(member)
        if not self._server.members(self.lock):
            self._server.drop(self.grants)

    # Who may enter.

    def limit_of(self, member: bytes) -> float:
        """How many holders it bears; 0: it is of another kind than the caller."""
        asks = _ASKS.search(member)
        if asks is None or bool(asks[3]) != self.is_semaphore():
            return 0
        if asks[3]:
            return int(asks[3])
        if asks[2] and self._has_downgraded(member):
            return math.inf
        return 1 if asks[2] else math.inf

    def _has_downgraded(self, member: bytes) -> bool:
        if self.reads and member == self.token:
            return True
        return b"+" + member in self._server.members(self.grants).scores

    def is_semaphore(self) -> bool:
        asks = _ASKS.search(self.token)
        assert asks is not None
        return bool(asks[3])

    def limit(self) -> float:
        """The smallest of those inside; of readers and writers, the first stands for all."""
        members = [member for member, _ in self._server.members(self.lock)]
        looked_at = members if self.is_semaphore() else members[:1]
        return min(map(self.limit_of, looked_at), default=math.inf)

    def has_room_for(self, member: bytes) -> bool:
        inside = len(self._server.members(self.lock))
        return inside + 1 <= min(self.limit(), self.limit_of(member))

    def refuse_holders_of_another_kind(self) -> None:
        if self.limit() == 0:
            raise ServerError("WRONGTYPE The name is locked as something else")

    def refuse_head_of_another_kind(self) -> None:
        head = self._server.members(self.queue).first()
        if head is not None and self.limit_of(head) == 0:
            raise ServerError("WRONGTYPE The name is locked as something else")

    def enter(self, member: bytes, life_ms: int) -> int:
        fencing_token = self._next_fencing_token()
        self._server.add(self.lock, member, self._server.now_ms + life_ms)
        self._server.add(self.grants, member, fencing_token)
        if self.reads and member == self.token:
            self._server.add(self.grants, b"+" + member, 0)
        self.leave(member)
        self._keep_holders(life_ms)
        return fencing_token

    def let_in(
        self, inboxes: bytes, *, own_client_id: bytes | None, own_life_ms: int
    ) -> dict[bytes, int]:
        """Head after head while there is room; who entered, with its fencing token."""
        entered: dict[bytes, int] = {}
        for _ in range(DEAD_MAX):
            head, left_ms = self._head()
            if head is None:
                break
            if left_ms <= 0 or self.end_ms(head) is not None:
                self.leave(head)
                continue
            if not self.has_room_for(head):
                break
            entered[head] = self.enter(head, own_life_ms if head == self.token else left_ms)
            if head != self.token and _client_id(head) != own_client_id:
                self.tell(inboxes, head, b"%s/%d" % (head, entered[head]))
        return entered

    def set_liveness(self, token: bytes, alive_ms: int) -> None:
        assert alive_ms <= LIVENESS_MS_MAX
        super().set_liveness(token, alive_ms)
        self.keep_lives(SIDE_KEYS_MS)

    def refusal_of_many(self, token: bytes) -> Reply:
        waiters = self._server.members(self.queue)
        place = waiters.rank(token) if token in waiters.scores else -1
        last = self.last_fencing_token()
        last = last if last > 0 else self._server.now_us
        value, left_ms = b"", 0
        for member, end_ms in self._server.members(self.lock):
            value, left_ms = self.value_of(member), int(end_ms) - self._server.now_ms
            break
        return [0, value, left_ms, place, len(waiters), int(last)]

    def _keep_holders(self, life_ms: int) -> None:
        for key in (self.lock, self.grants):
            self._server.live_at_least(key, life_ms)
