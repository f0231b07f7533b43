"""What the rooms above ask of a place where leases live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from .._errors import QuorumError, ServerUnreachable
from .._names import Access, Keys


@dataclass(slots=True, eq=False, weakref_slot=True)
class Acquisition:
    """One try to get one name, from its first request to its release.

    `was_sent`: an acquire has left, so that something may stand on the server. `asked` has the
    connections of the acquires that were not answered: a late copy may still arrive there, after a
    release that went over another one. `releases` counts the releases that were sent. `packed` is
    what the store makes of keys and token for its wire; it lives as long as the acquisition.
    `is_shared`: several may hold the name, as the tail of the token says; `reads_only`: it is a
    writer that has downgraded.
    """

    name: str
    keys: Keys
    token: str
    was_sent: bool = False
    asked: list[int] = field(default_factory=list)
    releases: int = 0
    packed: bytes = b""
    is_shared: bool = False
    reads_only: bool = False


class Granted(NamedTuple):
    """The lock is ours until *deadline* at least (on our clock).

    `value` is what the key holds; `fencing_token` is None over a quorum without fencing; `already`
    says that it was ours before this request.
    """

    value: str
    fencing_token: int | None
    deadline: float
    already: bool


class Refused(NamedTuple):
    """Another holds the lock.

    `place` in the queue (0 = head, -1 = not in it); `link` is the connection that answered a
    request sent at `sent_at`; `last_fencing_token` is the name's, as the server knows it.
    """

    value: str
    ttl_left_ms: int
    place: int
    waiters: int
    last_fencing_token: int
    sent_at: float
    link: int


class NotOurs(NamedTuple):
    """This grant does not stand any more; `value` stands in the key (None: nothing)."""

    value: str | None


class Released(NamedTuple):
    """The answer to a release.

    `removed` says that the lock was ours until then; `value` stands in the key now; `repeated`
    that an earlier copy of this release was never answered, so that it may have done the work.
    """

    removed: bool
    value: str | None
    repeated: bool


class NodeStanding(NamedTuple):
    """What stands on one node of a quorum; `trouble` is why it is not known."""

    node: str
    value: str | None
    ttl_left_ms: int
    trouble: str | None


class Holding(NamedTuple):
    """One of several holders."""

    value: str
    ttl_left_ms: int
    fencing_token: int | None
    access: Access | None


class Standing(NamedTuple):
    """What stands under a name; `value` is None where nothing does.

    `fencing_token` is None where another library's value stands, or a quorum knows of none. Over a
    quorum, `value` is what a majority holds, and `votes` are those of the nodes. Where several may
    hold, it is that of the one that ends first, and `holders` has at most 1000.
    """

    value: str | None
    ttl_left_ms: int
    waiters: int
    fencing_token: int | None
    votes: tuple[NodeStanding, ...] = ()
    holders: tuple[Holding, ...] = ()


class NoAnswer(Exception):
    """This try brought no usable answer; a later one may. `__cause__` says what was seen."""

    def unreachable(self, message: str, *, name: str) -> ServerUnreachable:
        """What the user gets when this was the last try: from what was seen, not from us."""
        error = ServerUnreachable(f"{message}: {self}", name=name)
        error.__cause__ = self.origin
        return error

    @property
    def origin(self) -> BaseException:
        """What was seen first."""
        return self.__cause__ or self


class NoMajority(NoAnswer):
    """The nodes of a quorum did not decide; `nodes` is what each said."""

    def __init__(
        self, outcome: Literal["unreachable", "undecided"], nodes: Mapping[str, str]
    ) -> None:
        said = "; ".join(f"{node}: {words}" for node, words in nodes.items())
        super().__init__(f"the quorum is {outcome} ({said})")
        self.outcome = outcome
        self.nodes = nodes

    def unreachable(self, message: str, *, name: str) -> QuorumError:
        error = QuorumError(f"{message}: {self}", name=name, outcome=self.outcome, nodes=self.nodes)
        error.__cause__ = self.origin
        return error


class Waiter(Protocol):
    """Who is to be woken."""

    def hand_over(self, value: str) -> None:
        """The lock was handed to this waiter: *value* was written to its key."""

    def poke(self) -> None:
        """Something changed: poll."""


class Store(Protocol):
    """Where leases live.

    `acquire` and `extend` are one try, the others are repeated until answered; each is bounded by
    *within* seconds.

    Raises:
        NoAnswer: Try again while there is time.
        NotAllowedError, NameTakenError: Trying again is no use.
    """

    @property
    def has_queue(self) -> bool:
        """Whether waiters queue here: it is a `QueueStore` then."""

    async def acquire(
        self, acquisition: Acquisition, *, ttl_ms: int, alive_ms: int, within: float
    ) -> Granted | Refused: ...

    async def extend(
        self, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
    ) -> float | NotOurs:
        """The new deadline, or what stands in the key."""

    async def release(
        self, acquisition: Acquisition, *, within: float, keep_until: float | None = None
    ) -> Released:
        """Give up; repeated until answered, for *within* seconds in all.

        Before *keep_until* (an instant on our clock) the name stays taken until then, by nobody.
        """

    async def downgrade(self, acquisition: Acquisition, *, within: float) -> NotOurs | None:
        """A writer only reads from now on, if it holds; repeated until answered."""

    async def inspect(
        self, name: str, keys: Keys, *, within: float, is_shared: bool = False
    ) -> Standing: ...

    def hold(self, token: str) -> None:
        """*token* waits no longer; hand-offs to it are expected and change nothing."""

    def forget(self, token: str) -> None:
        """*token* is done with: a hand-off to it is given back."""

    async def aclose(self) -> None:
        """Give back the connections; every task has ended."""


class QueueStore(Store, Protocol):
    """A store in which waiters queue, and are handed the lock."""

    def is_current(self, link: int) -> bool:
        """Whether the connection that answered a `Refused` is still there."""

    @property
    def hears(self) -> bool:
        """Whether messages reach our waiters now."""

    def enlist(self, token: str, waiter: Waiter) -> None:
        """Tell *waiter* what concerns *token*."""

    def listen(self, token: str) -> None:
        """Hear the messages of other clients, for as long as *token* waits."""

    def doubt_inbox(self) -> None:
        """A message that should have come did not."""
