"""The model alone, where no real server can be led: clocks that step, lives that end at will."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from aiodlock import _names
from tests import by_hand
from tests.model import Kept, Model, Reply, ServerError, _Members, _Name
from tests.mutants import function_mutant

KEYS: Final = [key.encode() for key in _names.keys(by_hand.PREFIX, "name")]
LOCK, FENCE, QUEUE, ALIVE = KEYS
INBOXES: Final = _names.inbox_prefix(by_hand.PREFIX).encode()
TOKENS: Final = [token.encode() for token in (by_hand.A, by_hand.B, by_hand.C, by_hand.D)]
A, B, C, D = TOKENS
BEGAN_AT_US: Final = 1_700_000_000_000_000
HOUR_MS: Final = 3_600_000


class Hand:
    """A model whose clock we turn, and what it published."""

    def __init__(self) -> None:
        self.now_us = BEGAN_AT_US
        self.said: list[tuple[bytes, bytes]] = []
        self.model = Model(lambda: self.now_us, lambda *message: self.said.append(message))

    def step(self, ms: int) -> None:
        """Time passes; less than 0: somebody sets the clock back."""
        self.now_us += ms * 1000

    def acquire(self, token: bytes, ttl_ms: int = 30_000, alive_ms: int = 6_000) -> Reply:
        args = [token, b"%d" % ttl_ms, b"%d" % alive_ms, INBOXES]
        return self.model.run("acquire", KEYS, args)

    def release(self, token: bytes, *, tombstone: bool = False) -> Reply:
        return self.model.run("release", KEYS, [token, b"%d" % tombstone, INBOXES, b"nobody"])

    def extend(self, value: bytes, ttl_ms: int = 30_000) -> Reply:
        return self.model.run("extend", [LOCK], [b"%d" % ttl_ms, value])

    @property
    def keys(self) -> dict[bytes, Kept]:
        return self.model.dump()

    @property
    def value(self) -> bytes | None:
        value = self.keys[LOCK].value if LOCK in self.keys else None
        assert value is None or isinstance(value, bytes)
        return value

    @property
    def holder(self) -> bytes | None:
        return None if self.value is None else self.value.partition(b"/")[0]

    def members(self, key: bytes) -> list[bytes]:
        return members_of(self.keys, key)


def members_of(keys: dict[bytes, Kept], key: bytes) -> list[bytes]:
    """A zset's members in their order."""
    value = keys[key].value if key in keys else ()
    return [entry[0] for entry in value if isinstance(entry, tuple)]


@pytest.fixture
def hand() -> Hand:
    """Nothing stands in it."""
    return Hand()


def test_key_at_the_end_of_its_life_is_gone_a_millisecond_later(hand: Hand) -> None:
    """As on a real server: at the very millisecond it is still there, with 0 ms left."""
    hand.acquire(A, ttl_ms=100)
    hand.step(100)
    assert hand.model.run("inspect", [LOCK, QUEUE], [])[1] == 0
    hand.step(1)
    assert hand.model.run("inspect", [LOCK, QUEUE], []) == [None, -2, 0]


def test_fencing_token_after_the_clock_stepped_back_is_larger(hand: Hand) -> None:
    """On each way to a grant."""
    granted = [hand.acquire(A)[1]]
    hand.step(-HOUR_MS)
    hand.release(A)
    granted.append(hand.acquire(B)[1])
    hand.acquire(C)
    hand.release(B)
    granted.append(int((hand.value or b"").rpartition(b"/")[2]))
    assert granted == [BEGAN_AT_US, BEGAN_AT_US + 1, BEGAN_AT_US + 2]


def test_liveness_from_before_the_clock_stepped_back_lasts_6_s_more(hand: Hand) -> None:
    """Else a waiter that is dead would keep the lock from the others for an hour."""
    hand.acquire(A)
    hand.acquire(B)
    hand.step(-HOUR_MS)
    hand.acquire(C)  # Whoever polls looks at the head.
    hand.step(5_999)
    hand.acquire(C)
    assert hand.members(QUEUE) == [B, C]
    hand.step(1)
    hand.acquire(C)
    assert hand.members(QUEUE) == [C]


def test_newcomer_after_the_clock_stepped_back_stands_behind(hand: Hand) -> None:
    """The queue goes by arrival, not by what the clock said then."""
    hand.acquire(A)
    hand.acquire(B)
    hand.step(-HOUR_MS)
    hand.acquire(C)
    assert hand.members(QUEUE) == [B, C]


def test_tombstone_is_purged_when_its_minute_is_over(hand: Hand) -> None:
    """By the poll of another; its own acquire is refused until then."""
    hand.release(A, tombstone=True)
    hand.step(59_999)
    assert hand.acquire(A) == [-1]
    hand.acquire(B)
    hand.step(1)
    hand.acquire(C)
    assert hand.members(ALIVE) == [C]


def test_server_that_refuses_to_publish_hands_on_all_the_same() -> None:
    """The message is lost, the grant stands; the probe tells why."""

    def refuse(channel: bytes, text: bytes) -> None:
        raise ServerError(f"NOPERM {channel.decode()}")

    hand = Hand()
    hand.model = Model(lambda: hand.now_us, refuse)
    hand.acquire(A)
    hand.acquire(B)
    hand.release(A)
    assert hand.holder == B
    assert hand.model.run("probe", [LOCK + b":probe"], [b"inbox"]) == [b"NOPERM inbox"]


def test_model_loaded_with_an_older_dump_is_as_it_was(hand: Hand) -> None:
    """A failover to a replica that lags."""
    hand.acquire(A)
    hand.acquire(B)
    hand.model.push(b"other", b"item")
    older = hand.keys
    hand.release(A)
    assert hand.keys != older
    hand.model.load(older)
    assert hand.keys == older
    assert hand.release(A)[0] == 1
    assert hand.holder == B


def test_strangers_leave_what_redis_would_leave(hand: Hand) -> None:
    """SET takes a TTL away, DEL counts, a list is refused by each script that reads it."""
    hand.acquire(A)
    hand.model.set(LOCK, b"foreign")
    assert hand.acquire(B)[:3] == [0, b"foreign", -1]
    assert hand.model.delete(LOCK, b"no such key") == 1
    hand.model.push(LOCK, b"item")
    calls: list[Callable[[], Reply]] = [
        lambda: hand.acquire(A),
        lambda: hand.release(A),
        lambda: hand.model.run("inspect", [LOCK, QUEUE], []),
        lambda: hand.model.run("discard", [LOCK], [A]),
    ]
    for call in calls:
        with pytest.raises(ServerError, match="WRONGTYPE"):
            call()
    answer = hand.extend(A + b"/1")
    assert answer[0] == 0
    assert isinstance(answer[1], ServerError)
    hand.model.flushall()
    assert hand.keys == {}


@given(st.lists(st.tuples(st.binary(max_size=2), st.integers(-3, 3) | st.none()), max_size=40))
def test_members_after_any_changes_are_in_the_order_of_redis(
    changes: list[tuple[bytes, int | None]],
) -> None:
    """By score, then by their bytes."""
    members, plain = _Members(), dict[bytes, float]()
    for member, score in changes:
        if score is None:
            members.drop(member)
            plain.pop(member, None)
        else:
            members.put(member, score)
            plain[member] = score
    expected = sorted(plain.items(), key=lambda item: (item[1], item[0]))
    assert list(members) == expected
    assert [members.rank(member) for member, _ in expected] == list(range(len(expected)))
    assert members.up_to(1, 5) == [member for member, score in expected if score <= 1][:5]
    assert members.first() == (expected[0][0] if expected else None)


# Five nodes, of which the clock of one is ahead: the counter-example of the page on quorums.

AHEAD_US: Final = 5_000_000


def two_grants(*, writes_back: bool) -> list[int]:
    """The fencing tokens of one grant by the nodes 0, 1, 2, and a later one by 2, 3, 4."""
    nodes = [Hand() for _ in range(5)]
    nodes[0].now_us += AHEAD_US
    largest = []
    for token, majority in ((A, nodes[:3]), (B, nodes[2:])):
        counters = [reply[1] for reply in (node.acquire(token) for node in majority)]
        fencing_token = max(counter for counter in counters if isinstance(counter, int))
        largest.append(fencing_token)
        for node in majority:
            args = [token, b"30000", b"%d" % fencing_token]
            if writes_back:
                assert node.model.run("confirm", [LOCK, FENCE], args) == [1, 30_000]
            node.release(token)
        for node in nodes:
            node.step(1_000)
    return largest


def test_largest_counter_of_a_majority_may_be_smaller_than_the_last_one() -> None:
    """The next majority has not got the node whose counter it was; nothing has failed."""
    first, second = two_grants(writes_back=False)
    assert (first, second) == (BEGAN_AT_US + AHEAD_US, BEGAN_AT_US + 1_000_000)


def test_largest_counter_written_back_to_a_majority_grows() -> None:
    """Each later majority has a node that knows it."""
    first, second = two_grants(writes_back=True)
    assert (first, second) == (BEGAN_AT_US + AHEAD_US, BEGAN_AT_US + AHEAD_US + 1)


# Any calls, while the clock does what it likes.


@dataclass(frozen=True)
class Move:
    """A call, and how far the clock goes before it."""

    call: str
    token: bytes
    ms: int
    ttl_ms: int
    alive_ms: int


moves = st.builds(
    Move,
    st.sampled_from(["acquire", "acquire", "acquire", "release", "bury", "extend"]),
    st.sampled_from(TOKENS),
    st.sampled_from([0, 0, 1, 500, 2_000, 7_000, -1, -2_000, -HOUR_MS, HOUR_MS]),
    st.sampled_from([100, 10_000, 30_000]),
    st.sampled_from([0, 1_000, 6_000, 6_000]),
)


def keeps_the_rules(sequence: list[Move]) -> None:
    """Whatever holds without trust in the clock, after each call."""
    hand = Hand()
    largest = 0
    for move in sequence:
        hand.step(move.ms)
        before, had = hand.value, hand.keys
        granted = make(hand, move)
        keys, value = hand.keys, hand.value
        told = f"{move}\n  before {had}\n  after  {keys}"
        assert all(kept.ends_at_ms is not None for kept in keys.values()), told
        assert hand.holder not in {*hand.members(QUEUE), *hand.members(ALIVE)}, told
        if value is not None and value != before:
            assert before is None or move.call in ("release", "bury"), told
            fencing_token = int(value.rpartition(b"/")[2])
            assert fencing_token > largest, told
            largest = fencing_token
        elif value is not None:
            ended_at_ms, ends_at_ms = had[LOCK].ends_at_ms, keys[LOCK].ends_at_ms
            assert (ends_at_ms or 0) >= (ended_at_ms or 0), told
        assert not granted or hand.holder == move.token, told
        stay = [waiter for waiter in members_of(had, QUEUE) if waiter in hand.members(QUEUE)]
        assert hand.members(QUEUE)[: len(stay)] == stay, told


def make(hand: Hand, move: Move) -> bool:
    """Whether the call says that its token holds."""
    if move.call == "acquire":
        return hand.acquire(move.token, move.ttl_ms, move.alive_ms)[0] == 1
    if move.call == "extend":
        value = hand.value if hand.holder == move.token else None
        return hand.extend(value or move.token + b"/1", move.ttl_ms)[0] == 1
    hand.release(move.token, tombstone=move.call == "bury")
    return False


# The fence key lives for a day: no sequence may last that long.
sequences = st.lists(moves, min_size=5, max_size=20)


@settings(max_examples=300, deadline=None)
@given(sequences)
def test_model_whose_clock_steps_keeps_the_rules(sequence: list[Move]) -> None:
    """TTLs, the holder's absence from the queue, tokens that grow, lives that are not cut."""
    keeps_the_rules(sequence)


@pytest.mark.parametrize(
    ("owner", "method", "old", "new"),
    [
        (_Name, "_next_fencing_token", "self.last_fencing_token() + 1", "0"),
        (_Name, "grant", "self.leave(token)", "pass"),
        (_Name, "enqueue", "highest + 1", "0"),
        (_Name, "keep_lives", "self._server.live_at_least(self.alive, life_ms)", "pass"),
        (Model, "live_at_least", "if left_ms >= life_ms:", "if False:"),
        (Model, "_acquire", "if value is None:", "if True:"),
    ],
)
def test_model_with_a_spoilt_line_breaks_a_rule(
    owner: type, method: str, old: str, new: str
) -> None:
    """The negative control."""
    check = settings(
        max_examples=2000,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )(given(sequences)(keeps_the_rules))
    with function_mutant(owner, method, old, new), pytest.raises(AssertionError):
        check()
