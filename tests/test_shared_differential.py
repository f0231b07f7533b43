"""The scripts of names that several may hold: the same random calls on a real server and the model.

How it is done, and how long a run is, says `test_differential`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aiodlock.testing import LockServer, lock_server
from tests import shared_model
from tests.by_hand import ONE, OTHER, THIRD, client_id
from tests.model import Model
from tests.mutants import Mutant, function_mutant
from tests.shared_model import SharedModel, _Shared
from tests.test_differential import (
    EXAMPLES_FOR_MUTANT,
    FENCES,
    INBOXES,
    SCRIPTS,
    Add,
    Branches,
    Delete,
    Difference,
    Expire,
    Flush,
    Mute,
    Script,
    Set,
    Sleep,
    Step,
    World,
    WrongType,
    weighted,
)

pytestmark = pytest.mark.deep

EXAMPLES: Final = int(os.environ.get("AIODLOCK_EXAMPLES", "150"))

R1, R2, R3 = f"{ONE}:1r", f"{OTHER}:1r", f"{ONE}:12r"
W1, W2 = f"{ONE}:2w", f"{THIRD}:2w"
S1, S2, S3 = f"{ONE}:3s1", f"{OTHER}:3s2", f"{THIRD}:3s2"
PLAIN = f"{ONE}:7"
READERS: Final = [R1, R2, R3, W1, W2]
T1, T2 = f"{THIRD}:4s3", f"{OTHER}:5s3"
SEMAPHORES: Final = [S1, S2, S3, f"{ONE}:33s2", T1]
KINDS: Final = ("lock", "fence", "queue", "alive", "grants")
AHEAD: Final = str(2**52).encode()


class SharedWorld(World):
    """A server and a model that knows these scripts too."""

    def __init__(
        self,
        server: LockServer,
        texts: Mapping[str, str] = MappingProxyType(SCRIPTS),
        branches: Branches | None = None,
    ) -> None:
        super().__init__(server, texts, branches)
        self._model = SharedModel(lambda: self._model_us, self._publish)

    def fencing_token(self, grants: bytes, token: str) -> int:
        """What *token* was granted, as far as stood there after the last step."""
        kept = self._keys.get(grants)
        for item in kept.value if kept is not None else ():
            if isinstance(item, tuple) and item[0] == token.encode():
                return int(item[1])
        return 1


@dataclass(frozen=True)
class Share(Script):
    def keys(self) -> list[bytes]:
        return [self.key(kind) for kind in KINDS]


@dataclass(frozen=True)
class Acquire(Share):
    token: str
    ttl_ms: int = 30_000
    alive_ms: int = 6_000
    reads: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        args = [self.token.encode(), b"%d" % self.ttl_ms, b"%d" % self.alive_ms, INBOXES]
        return "share_acquire", self.keys(), [*args, b"r"] if self.reads else args


@dataclass(frozen=True)
class Members(Step):
    """A sorted set of somebody else's stands in the lock's key."""

    member: bytes
    score: int

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        return [(b"ZADD", self.key("lock"), b"%d" % self.score, self.member)]

    def apply(self, model: Model, world: World) -> object:
        model.zadd(self.key("lock"), {self.member: self.score})
        return ...


@dataclass(frozen=True)
class Release(Share):
    token: str
    how: bytes = b"0"
    by_other_client: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        client = client_id(R1 if self.by_other_client else self.token)
        args = [self.token.encode(), self.how, INBOXES, client.encode()]
        return "share_release", self.keys(), args


@dataclass(frozen=True)
class Extend(Share):
    token: str
    ttl_ms: int = 30_000
    stale: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        assert isinstance(world, SharedWorld)
        fencing_token = world.fencing_token(self.key("grants"), self.token) - self.stale
        args = [self.token.encode(), b"%d" % self.ttl_ms, b"%d" % fencing_token]
        return "share_extend", [self.key("lock"), self.key("grants")], args


@dataclass(frozen=True)
class Confirm(Share):
    token: str
    ttl_ms: int = 30_000
    more: int = 0
    reads: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        assert isinstance(world, SharedWorld)
        own = world.fencing_token(self.key("grants"), self.token)
        fencing_token = own + self.more if self.more >= 0 else 0
        args = [self.token, str(self.ttl_ms), str(fencing_token), str(int(self.reads))]
        keys = [self.key("lock"), self.key("fence"), self.key("grants")]
        return "share_confirm", keys, [arg.encode() for arg in args]


@dataclass(frozen=True)
class Discard(Share):
    token: str

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        return "share_discard", [self.key("lock")], [self.token.encode()]


@dataclass(frozen=True)
class Inspect(Share):
    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        return "share_inspect", [self.key("lock"), self.key("queue"), self.key("grants")], []


name = st.sampled_from([0, 0, 0, 1])
kind = st.sampled_from(KINDS)
ttl_ms = st.sampled_from([30_000, 10_000, 150])
lives = st.sampled_from([-1_000, 0, 3_000, 3_600_000, None])


def steps_of(tokens: list[str]) -> st.SearchStrategy[Step]:
    """Mostly of one kind of token, among what strangers and the world do."""
    token = st.sampled_from(tokens)
    any_token = st.sampled_from([*READERS, *SEMAPHORES])
    how = st.sampled_from([b"0", b"0", b"0", b"1", b"r"])
    return weighted(
        (30, st.builds(Acquire, name, token, ttl_ms, st.sampled_from([6_000, 6_000, 150, 0]))),
        (18, st.builds(Release, name, token, how, st.booleans())),
        (5, st.builds(Extend, name, token, ttl_ms, st.sampled_from([False, False, True]))),
        (3, st.builds(Confirm, name, token, ttl_ms, st.sampled_from([-1, 0, 5]), st.booleans())),
        (2, st.builds(Discard, name, token)),
        (2, st.builds(Inspect, name)),
        (2, st.builds(Acquire, name, any_token)),
        (2, st.builds(Acquire, name, st.just(W1), ttl_ms, st.just(0), st.just(True))),
        (1, st.builds(Mute, name, st.booleans())),
        (1, st.builds(Set, name, st.just("lock"), st.just(b"foreign"), st.just(150))),
        (2, st.builds(Set, name, st.just("fence"), st.sampled_from(FENCES), st.just(10_000))),
        (5, st.builds(Delete, name, kind)),
        (2, st.builds(WrongType, name, kind)),
        (2, st.builds(Add, name, token, lives, st.sampled_from([None, 5, 2**52]))),
        (1, st.builds(Add, name, st.just(PLAIN), lives, st.sampled_from([None, 5, 2**52]))),
        (1, st.builds(Add, name, token.map("!{}".format), lives)),
        (2, st.builds(Expire, name, kind, st.sampled_from([60_000, 100]))),
        (1, st.builds(Sleep, name)),
    )


halves = st.sampled_from([READERS, SEMAPHORES]).flatmap(
    lambda tokens: st.lists(steps_of(tokens), min_size=10, max_size=40)
)

DEAD_W, DEAD_S = f"{OTHER}:1", f"{OTHER}:1s"
OPEN = [f"{THIRD}:{n}r" for n in (20, 21, 22)]
BY_HAND: Final[list[list[Step]]] = [
    # Readers share, a writer does not; neighbours enter together, of one client and of another.
    [*(Acquire(0, t) for t in (R1, R2, W1, R3, W2)), Inspect(0)],
    [*(Acquire(0, t) for t in (W1, R1, R2, R3, W2)), Release(0, W1), Inspect(0)],
    [*(Acquire(0, t) for t in (W1, R1, R2, R3)), Mute(0, True), Release(0, W1), Acquire(0, R1)],
    [*(Acquire(0, t) for t in (R1, W1, R2, *OPEN)), Release(0, W1), Inspect(0)],
    [*(Acquire(0, t) for t in (R1, W1)), Release(0, R1, by_other_client=True), Extend(0, W1)],
    [Acquire(0, R1, alive_ms=0), Acquire(0, W1, alive_ms=0), Acquire(0, R2, alive_ms=0)],
    # The poll of another finds room, and lets in who stands before it; itself, too.
    [*(Acquire(0, t) for t in (W1, R1, R2, R3)), Delete(0, "lock"), Acquire(0, R2), Inspect(0)],
    [*(Acquire(0, t) for t in (W1, R1, R2)), Delete(0, "lock"), Acquire(0, W2), Acquire(0, W1)],
    [*(Acquire(0, t) for t in (W1, R1)), Delete(0, "lock"), Acquire(0, R2, alive_ms=0)],
    [*(Acquire(0, t) for t in (W1, R1, R2)), Mute(0, True), Delete(0, "lock"), Acquire(0, R2)],
    [Acquire(0, W1), Acquire(0, R1), Acquire(0, R2, 30_000, 150), Release(0, W1), Inspect(0)],
    # A writer that reads from now on.
    [*(Acquire(0, t) for t in (W1, R1, R2, W2)), Release(0, W1, b"r"), Inspect(0), Release(0, W1)],
    [Acquire(0, W1), Release(0, W1, b"r"), Acquire(0, R1), Acquire(0, W2), Extend(0, W1, 60_000)],
    [Acquire(0, W1), Acquire(0, W2), Release(0, W2, b"r"), Release(0, R1, b"r"), Inspect(0)],
    [Acquire(0, W1), Acquire(0, R1), Delete(0, "grants"), Release(0, W1, b"r"), Inspect(0)],
    [Acquire(0, W1), Acquire(0, R1), WrongType(0, "grants"), Release(0, W1, b"r")],
    [Acquire(0, W1, reads=True), Acquire(0, R1), Acquire(0, W2), Inspect(0)],
    [Acquire(0, R1), Acquire(0, W1, 30_000, 0, True), Inspect(0), Acquire(0, W2)],
    [Acquire(0, W2), Acquire(0, W1, reads=True), Release(0, W2), Acquire(0, W1, reads=True)],
    # Permits, the same and others.
    [*(Acquire(0, t) for t in SEMAPHORES), Release(0, S1), Inspect(0), Acquire(0, S1)],
    [*(Acquire(0, t) for t in SEMAPHORES[1:]), Release(0, S2), Release(0, S3), Inspect(0)],
    [*(Acquire(0, t) for t in (S2, S3, SEMAPHORES[4], S1)), Release(0, S2), Release(0, S3)],
    # The one that ends first bears more than another inside does.
    [Acquire(0, T1, 10_000), *(Acquire(0, t) for t in (S2, T2, S1)), Release(0, S1), Inspect(0)],
    # Another kind, inside or before us.
    [Acquire(0, R1), Acquire(0, S1), Release(0, S1, b"1"), Acquire(0, S1), Inspect(0)],
    [Acquire(0, S1), Acquire(0, W1), Acquire(0, S2), Release(0, W1), Release(0, R1, b"r")],
    [Acquire(0, W1), Acquire(0, R1), Delete(0, "lock"), Acquire(0, S1), Release(0, S1, b"1")],
    [Add(0, PLAIN, 3_000, 5), Acquire(0, R1), Release(0, R1), Delete(0, "queue"), Acquire(0, R1)],
    [Acquire(0, R1), Add(0, PLAIN, 3_000, 5), Acquire(0, R2), Release(0, R1), Inspect(0)],
    [Set(0, "lock", b"foreign"), Acquire(0, R1), Inspect(0), Release(0, R1), Discard(0, R1)],
    [Acquire(0, R1), Acquire(0, W1), Add(0, PLAIN, 3_000, 2**52), Release(0, R1), Release(0, W1)],
    [Acquire(0, W1), Acquire(0, R1), Add(0, PLAIN, 3_000, 2**52), Delete(0, "lock"),
     Acquire(0, R1)],
    [Add(0, PLAIN, -1, 5), Acquire(0, R1), Inspect(0)],
    [Members(0, b"stranger", 5), Acquire(0, R1), Inspect(0), Release(0, R1, b"1"), Extend(0, R1)],
    # Asked again; evicted in part.
    [Acquire(0, R1), Acquire(0, R1, 10_000), Acquire(0, R1, 60_000), Extend(0, R1, 10_000)],
    [Acquire(0, R1), Extend(0, R1, stale=True), Extend(0, R2), Extend(0, R1, 60_000), Inspect(0)],
    [Acquire(0, R1), Delete(0, "grants"), Extend(0, R1), Acquire(0, R1), Inspect(0)],
    [Acquire(0, R1), Delete(0, "grants"), Extend(0, R1, stale=True)],  # By the number 0.
    [Acquire(0, R1, 60_000), Acquire(0, R2, 10_000), Extend(0, R2), Confirm(0, R2, 40_000)],
    [Acquire(0, R1), Acquire(0, R2), Delete(0, "grants"), Inspect(0), Acquire(0, R2)],
    [Acquire(0, R1), Delete(0, "lock"), Acquire(0, R2), Inspect(0), Acquire(0, R1)],
    [Acquire(0, R1), Acquire(0, W1), Delete(0, "fence"), Acquire(0, W1), Release(0, R1)],
    [Acquire(0, W1), Acquire(0, R1), Add(0, R1, None, 5), Release(0, W1), Add(0, R1, 9, 5),
     Acquire(0, R1)],
    # On a node of a quorum.
    [Acquire(0, W1), Confirm(0, W1, 60_000, 5, True), Acquire(0, R1), Confirm(0, R1, 10, 0)],
    [Acquire(0, W1), Confirm(0, R1), Confirm(0, W1, 10, -1), Confirm(1, W1), Acquire(0, W1)],
    [Acquire(0, W1), Delete(0, "grants"), Confirm(0, W1), Inspect(0)],
    # Dead ones; a thousand of them, and one more.
    [*(Acquire(0, t) for t in (R1, W1, R2, R3)), Add(0, W1, -1), Acquire(0, R3), Inspect(0)],
    [*(Acquire(0, t) for t in (R1, W1, R2)), Add(0, W1, -1), Release(0, R2, b"0"), Inspect(0)],
    [*(Acquire(0, t) for t in (R1, W1, R2)), Add(0, W1, -1), Acquire(0, W1), Inspect(0)],
    [Acquire(0, W1), Add(0, DEAD_W, -1, 1, 1_001), Release(0, W1), Inspect(0)],
    [Acquire(0, S1), Add(0, DEAD_S, -1, 1, 1_001), Delete(0, "lock"), Acquire(0, S2, alive_ms=0)],
    [Acquire(0, S1), Add(0, DEAD_S, -1, 1, 1_000), Acquire(0, S2), Release(0, S2), Inspect(0)],
    # A tombstone, its refusal, and its end.
    [Release(0, R1, b"1"), Acquire(0, R1), Acquire(0, R2), Add(0, f"!{R1}", -1), Acquire(0, R1)],
    [Add(0, "!x:y:", -1, None, 1_001), Acquire(0, R1), Acquire(0, W1), Acquire(0, W1)],
    # One that holds, and is queued too, as after a failover: it is not granted again.
    [Acquire(0, S3), Add(0, S3, 3_000, 5), Acquire(0, S2), Inspect(0)],
    [Acquire(0, R1), Acquire(0, R2), Add(0, R1, 3_000, 5), Release(0, R2), Inspect(0)],
    # What stood before the clock stepped back, or was evicted.
    [*(Acquire(0, t) for t in (R1, W1)), Add(0, W1, 3_600_000, 2**52), Acquire(0, W2)],
    [*(Acquire(0, t) for t in (R1, W1)), Delete(0, "alive"), Acquire(0, R2, alive_ms=0)],
    [*(Acquire(0, t) for t in (R1, W1, R2)), Delete(0, "alive"), Release(0, R2), Inspect(0)],
    [*(Acquire(0, t) for t in (W1, R1, W2)), Delete(0, "alive"), Delete(0, "lock"),
     Acquire(0, R1)],
    # Fencing tokens that are none, or ahead of the clock.
    *([Set(0, "fence", last), Acquire(0, R1), Acquire(0, W1), Release(0, R1)] for last in FENCES),
    [Set(0, "fence", AHEAD), *(Acquire(0, t) for t in (W1, R1, R2, R3)), Release(0, W1)],
    # Keys of another type.
    *([Acquire(0, R1), Acquire(0, W1), WrongType(0, kind), Release(0, R1)] for kind in KINDS),
    *(
        [Acquire(0, R1), Acquire(0, W1), WrongType(0, kind), Acquire(0, W1), Release(0, W1, b"1")]
        for kind in KINDS
    ),
    *([WrongType(0, kind), Acquire(0, R1), Release(0, R1), Extend(0, R1)] for kind in KINDS),
    *([Acquire(0, W1), WrongType(0, kind), Confirm(0, W1), Inspect(0)] for kind in KINDS),
    # Last, since they take their time: what is over by itself.
    [Acquire(0, R1, 150), Acquire(0, R2), Acquire(0, W1), Sleep(0), Inspect(0), Acquire(0, W2)],
    [Acquire(0, R1, 150), Acquire(0, R2), Sleep(0), Extend(0, R1), Confirm(0, R1), Release(0, R1)],
    [Acquire(0, S1, 150), Acquire(0, R1, alive_ms=0), Acquire(0, S2, 150), Sleep(0), Inspect(0)],
    [Acquire(0, S3), Acquire(0, S2, 150), Acquire(0, S1), Sleep(0), Release(0, S2, b"r")],
    [Acquire(0, R1, 150), Acquire(0, R2), Sleep(0), Acquire(0, R1), Inspect(0)],
    [Acquire(0, W1, 150), Acquire(0, W2), Sleep(0), Release(0, W1, b"r"), Release(0, W1)],
]  # fmt: skip


@pytest.fixture(scope="module")
def own_server() -> Iterator[LockServer]:
    """A server whose users and keys nobody else looks at."""
    with lock_server() as server:
        yield server


def compare(world: SharedWorld, *, examples: int, repeatable: bool = False) -> None:
    """As `test_differential.compare`.

    Raises:
        Difference: The smallest sequence, or the first.
    """
    for sequence in BY_HAND:
        world.run(sequence)

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=repeatable,
        report_multiple_bugs=False,
        phases=[Phase.generate] if repeatable else [Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(halves)
    def agree(sequence: list[Step]) -> None:
        world.run(sequence)

    agree()


def test_model_and_server_after_any_calls_on_shared_names_agree(own_server: LockServer) -> None:
    """Answers, messages and keys; and there is no branch of the model that was not compared."""
    branches = Branches(shared_model)
    with SharedWorld(own_server, branches=branches) as world:
        compare(world, examples=EXAMPLES)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(world.calls.items()))
    print(f"{world.runs} sequences, {world.calls.total()} calls and steps: {counts}")
    assert branches.missed == [], "\n".join(branches.missed)


MUTANTS: Final = [
    Mutant("share_acquire", "return {-1}", "local _"),
    Mutant("share_acquire", "tonumber(end_ms) > now_ms then", "true then"),
    Mutant("share_acquire", "  if left < ttl_ms then", "  if true then"),
    Mutant("share_acquire", "if end_ms and not granted then", "if false then"),
    Mutant("share_acquire", "    left = ttl_ms\n", ""),
    Mutant("share_acquire", "if most == 0 then", "if false then"),
    Mutant("share_acquire", "if first and not own_text and limit_of(first) == 0", "if false"),
    Mutant("share_acquire", "if first and not own_text and limit_of", "if first and limit_of"),
    Mutant("share_acquire", "  set_liveness(token, now_ms + alive_ms)\nend\nloc", "end\nloc"),
    Mutant("share_acquire", "if is_empty and not own_text and", "if"),
    Mutant("share_acquire", "if is_empty and not own_text and", "if is_empty and"),
    Mutant("share_acquire", "  if ARGV[5] then\n", "  if false then\n"),
    Mutant("share_acquire", "local reads = ARGV[5] == 'r'", "local reads = false"),
    Mutant("share_acquire", "if reads and member == token then", "if false then"),
    Mutant("share_inspect", "if one and not", "if false and not"),
    Mutant("share_acquire", "not own_text and may_enter(token) then", "not own_text then"),
    Mutant("share_acquire", "if not redis.call('ZSCORE', KEYS[3], member) then", "if true then"),
    Mutant("share_acquire", "math.max(highest + 1, now_us)", "now_us"),
    Mutant("share_acquire", "  if not place then\n", "  if true then\n"),
    Mutant("share_acquire", "  redis.call('EXPIRE', KEYS[3], 12)\n", ""),
    Mutant("share_acquire", "token) or -1,", "token) or 0,"),
    Mutant("share_acquire", "last > 0 and last or now_us", "last"),
    Mutant("share_acquire", "if last >= fencing_token then", "if false then"),
    Mutant("share_release", "'+' .. token)\n  return {removed}", "'')\n  return {removed}"),
    Mutant("share_release", "if was_ours == 0 or ARGV[2] == 'r' then", "if was_ours == 0 then"),
    Mutant("share_release", "if was_ours == 0 or ARGV[2] == 'r' then", "if true then"),
    Mutant("share_release", "if ARGV[2] == '1' then", "if true then"),
    Mutant("share_release", "if redis.call('PTTL', KEYS[4]) < 60000 then", "if false then"),
    Mutant("share_release", "granted and was_ours == 1 and", "was_ours == 1 and"),
    Mutant("share_release", "was_ours == 1 and tonumber(end_ms) > now_ms", "was_ours == 1"),
    Mutant("share_release", "\nlet_in()\n", "\n"),
    Mutant("share_release", "if client_id == own_client_id then", "if false then"),
    Mutant("share_discard", "ARGV[1])}", "'x')}"),
    Mutant("share_extend", "or tonumber(end_ms) <= now_ms", ""),
    Mutant("share_extend", "or tonumber(granted) ~= tonumber(ARGV[3])", ""),
    Mutant("share_extend", "or not granted or tonumber(granted)", "or tonumber(granted or 0)"),
    Mutant("share_extend", "if left < ttl_ms then", "if true then"),
    Mutant("share_extend", "redis.call('PTTL', key) < ttl_ms", "true"),
    Mutant("share_extend", "for _, key in ipairs(KEYS) do", "for _, key in ipairs({KEYS[1]}) do"),
    Mutant("share_confirm", "or tonumber(end_ms) <= now_ms", ""),
    Mutant("share_confirm", "or not granted then", "then"),
    Mutant("share_confirm", "redis.call('ZREM', KEYS[3], ARGV[1], '+' .. ARGV[1])", ""),
    Mutant("share_confirm", "if ARGV[4] == '1' then", "if false then"),
    Mutant("share_confirm", "if left < ttl_ms then", "if true then"),
    Mutant("share_confirm", "or 0) or 0) < tonumber(ARGV[3])", "or 0) or 0) ~= tonumber(ARGV[3])"),
    Mutant("share_inspect", "and 1 or 0", "and 0 or 1"),
    *(
        Mutant(script, old, new)
        for script in ("share_acquire", "share_release")
        for old, new in (
            ("  redis.call('ZREM', KEYS[5], member, '+' .. member)\n", ""),
            ("(kind == 's') ~= is_semaphore", "false"),
            (" or redis.call('ZSCORE', KEYS[5], '+' .. member)", ""),
            ("if one and not", "if false and not"),
            ("is_semaphore and -1 or 0", "0"),
            ("  redis.call('DEL', KEYS[5])  -- What an evicted lock left.\n", ""),
            ("return inside < math.min(most, limit_of(member))", "return inside < most"),
            ("return inside < math.min(most,", "return inside < math.min(math.huge,"),
            ("math.max(last + 1, now_us)", "now_us"),
            ("  redis.call('ZREM', KEYS[4], member)\n  inside", "  inside"),
            ("  inside, most = inside + 1,", "  inside, most = inside,"),
            ("longest_ms = math.max(longest_ms, life_ms)", "longest_ms = life_ms"),
            ("if redis.call('PTTL', KEYS[4]) < 12000 then", "if true then"),
            ("or now_ms + 6001)", "or now_ms)"),
            ("    set_liveness(member, until_ms)\n", ""),
            ("(until_ms <= now_ms or redis", "(false or redis"),
            (" or redis.call('ZSCORE', KEYS[1], head)", ""),
            ("enter(head, until_ms - now_ms)", "enter(head, 6000)"),
            ("redis.pcall('PUBLISH'", "redis.call('PUBLISH'"),
            ("if redis.call('PTTL', key) < longest_ms then", "if true then"),
            ("for _ = 1, 1000 do", "for _ = 1, 1001 do"),
        )
    ),
]


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=f"{m.script}: {m.old.strip()} -> {m.new}") for m in MUTANTS]
)
def test_shared_script_with_a_spoilt_line_differs(own_server: LockServer, mutant: Mutant) -> None:
    """The negative control: each of them is found."""
    text = SCRIPTS[mutant.script]
    assert text.count(mutant.old) == 1, f"no mutant: {mutant}"
    spoilt = {**SCRIPTS, mutant.script: text.replace(mutant.old, mutant.new)}
    with SharedWorld(own_server, spoilt) as world, pytest.raises(Difference):
        compare(world, examples=EXAMPLES_FOR_MUTANT, repeatable=True)


@pytest.mark.parametrize(
    ("owner", "method", "old", "new"),
    [
        (_Shared, "has_room_for", "self.limit(), ", "math.inf, "),
        (_Shared, "let_in", "if not self.has_room_for(head):", "if False:"),
        (SharedModel, "_share_release", "name.drop_ended()", "pass"),
    ],
)
def test_shared_model_with_a_spoilt_line_differs(
    own_server: LockServer, owner: type, method: str, old: str, new: str
) -> None:
    """And so is a fault of the model's own."""
    spoilt = function_mutant(owner, method, old, new)
    with spoilt, SharedWorld(own_server) as world, pytest.raises(Difference):
        compare(world, examples=EXAMPLES_FOR_MUTANT, repeatable=True)


def test_common_part_of_the_two_shared_scripts_is_the_same() -> None:
    """Who is let in by a poll is let in by a release."""
    line = "-- " + "-" * 93 + "\n"
    parts = [SCRIPTS[script].split(line)[1] for script in ("share_acquire", "share_release")]
    assert len(parts[0]) > 2000
    assert parts[0] == parts[1]


def test_flush_leaves_nothing_to_compare(own_server: LockServer) -> None:
    """The negative control of the count of branches."""
    branches = Branches(shared_model)
    with SharedWorld(own_server, branches=branches) as world:
        world.run([Acquire(0, R1), Flush(0)])
    assert len(branches.missed) > 20
