"""The same calls on independent servers: what a majority of them says is so."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from .. import _clock, _names
from .._cleanup import Background
from .._errors import LockError, NameTakenError, NotAllowedError
from .._names import Keys
from ._api import (
    Acquisition,
    Granted,
    Holding,
    NoAnswer,
    NodeStanding,
    NoMajority,
    NotOurs,
    Refused,
    Released,
    Standing,
)
from ._ballot import Ballot
from ._node import Node, ignore, was_said
from ._requests import INSPECT, NOT_A_LOCK, Acquire, Confirm, Release, Us, releasing
from ._round import Round
from ._router import Router
from ._shares import ShareConfirm, ShareInspect, agreed, holdings, standing_of
from ._wire import SimpleCall, anew, maybe_text

_T = TypeVar("_T")

# What a node answers, or why it did not.
_Answer: TypeAlias = "list[Any] | LockError | NoAnswer"

# Between two rounds of what is asked until it is answered.
_PAUSE_S: Final = 0.05
# What is left for a round, and less, is given to it as a whole.
_TRY_S: Final = 0.3


class QuorumStore:
    """Servers that know nothing of each other; a lease is what stands on a majority of them.

    Nobody queues here: each server would have a queue of its own, in another order.

    Args:
        nodes: What people call each, and what makes its router.
        fencing: Whether a second round makes the fencing tokens grow from grant to grant.
    """

    has_queue = False

    def __init__(
        self,
        nodes: Mapping[str, Callable[[Callable[[], None]], Router]],
        *,
        fencing: bool,
        prefix: str,
        client_id: str,
        request_timeout: float,
    ) -> None:
        self._background = Background()
        self._fencing = fencing
        self._request_timeout = request_timeout
        self._us = Us(prefix, client_id)
        channel = _names.inbox(prefix, client_id)
        self._nodes = [
            Node(label, router, self._background, channel=channel, request_timeout=request_timeout)
            for label, router in nodes.items()
        ]
        # By acquisition, not by owner token: whoever breaks a lock of ours is not its holder. Each
        # lives as long as its acquisition, for a second release is to know of the first.
        self._ballots: weakref.WeakKeyDictionary[Acquisition, Ballot] = weakref.WeakKeyDictionary()
        self._is_new = True
        self._twin = ""  # Says which node is another one by another address.

    async def acquire(
        self, acquisition: Acquisition, *, ttl_ms: int, alive_ms: int, within: float
    ) -> Granted | Refused:
        """One try. Whoever is not granted the lock is to release what stands on a minority."""
        ballot = self._ballots[acquisition] = Ballot(acquisition, len(self._nodes))
        sent_at = _clock.now()
        # Once, for all to be heard: two addresses may turn out to be one server.
        first: Round[Granted | Refused] = Round(len(self._nodes), within, wants_all=self._is_new)
        asked = self._worth_asking()
        for index, node in enumerate(self._nodes):
            if index in asked:
                self._take(ballot, index, ttl_ms, within, first)
            else:
                first.fail(index, node.spared)
        outcome = await first.settled()
        sent = sum(part.acquisition.was_sent for part in ballot.parts)
        # Fewer could not have granted it: a single try gives up at once, then.
        acquisition.was_sent = sent >= first.tally.majority
        self._is_new = False
        if self._twin:
            raise RuntimeError(f"{self._twin}; give LockClient.quorum() each server once")
        if outcome == "no":
            return _likeliest(first.of(is_yes=False).values())
        if outcome != "yes":
            raise self._undecided(first, _said_of_acquire)
        grants = [answer for answer in first.of(is_yes=True).values() if type(answer) is Granted]
        deadline = min(grant.deadline for grant in grants)
        if not self._fencing:
            return Granted(acquisition.token, None, deadline, already=False)
        ballot.fencing_token = max(grant.fencing_token or 0 for grant in grants)
        until = min(sent_at + within, deadline)
        confirmed = await self._confirm(ballot, ttl_ms, within=until - _clock.now())
        if isinstance(confirmed, NotOurs):
            raise NoAnswer("it was granted, and gone again before its second round")
        if deadline <= _clock.now():
            raise NoAnswer("it was granted, but its second round came after its deadline")
        value = _names.value_of(acquisition.token, ballot.fencing_token)
        return Granted(value, ballot.fencing_token, confirmed, already=False)

    async def extend(
        self, acquisition: Acquisition, value: str, *, ttl_ms: int, within: float
    ) -> float | NotOurs:
        """Extended on a majority; then those who lost it are given it again.

        They count from the next round only. A round without a majority heals nothing: another may
        have held the lock meanwhile.
        """
        ballot = self._ballots[acquisition]
        if self._twin:
            raise NoAnswer(self._twin)
        answer = await self._confirm(ballot, ttl_ms, within=within, heals=True)
        if not isinstance(answer, NotOurs) and not ballot.is_over:
            self._heal(ballot, ttl_ms, within)
        return answer

    async def release(
        self, acquisition: Acquisition, *, within: float, keep_until: float | None = None
    ) -> Released:
        """Sent to every node where something may stand; the slow ones are not waited for.

        Each has the time of a request, also where the caller has less.
        """
        ballot = self._ballots.get(acquisition)
        if ballot is None:
            ballot = Ballot.of_another(acquisition, len(self._nodes))
        was_over, ballot.is_over = ballot.is_over, True
        kind = releasing(is_shared=ballot.is_shared, keep_until=keep_until)
        round_: Round[Released] = Round(len(self._nodes), within)
        for index, part in enumerate(ballot.parts):
            part.give_up()
            # Where it does not, a late copy may still come, and needs a tombstone.
            if part.may_stand or part.acquisition.asked:
                call = kind(part.acquisition, self._us, may_repeat=False, notice=ignore)
                then = partial(self._hear_release, ballot, index, call, round_)
                self._nodes[index].ask(call, self._request_timeout, then, insists=True)
            else:
                round_.vote(index, Released(False, None, False), is_yes=False)
        outcome = await round_.settled()
        if outcome == "unreachable":
            raise self._undecided(round_, _said_of_release)
        others = list(round_.of(is_yes=False).values())
        standing = None if outcome == "yes" else _most(released.value for released in others)
        # An earlier copy may have done it on a node that says no.
        repeated = was_over or any(released.repeated for released in others)
        # Undecided: nobody can say that it was not ours.
        return Released(outcome != "no", standing, repeated)

    async def downgrade(self, acquisition: Acquisition, *, within: float) -> NotOurs | None:
        """Readers get a majority once one of the nodes that they need knows of it."""
        ballot = self._ballots[acquisition]
        for part in ballot.parts:
            part.acquisition.reads_only = True
        answer = await _insist(partial(self._confirm, ballot, 0), within)
        return answer if isinstance(answer, NotOurs) else None

    async def inspect(
        self, name: str, keys: Keys, *, within: float, is_shared: bool = False
    ) -> Standing:
        """What a majority says; asked again until one says something, for *within* seconds."""
        inspect = self._inspect_shared if is_shared else self._inspect
        return await _insist(partial(inspect, name, keys), within)

    async def _inspect(self, name: str, keys: Keys, *, within: float) -> Standing:
        """The votes are of all who are not much slower than the majority."""
        call = SimpleCall(INSPECT, name, [keys.lock, keys.queue])
        round_ = await self._ask_all(call, within, _hear_inspect)
        votes = tuple(
            _vote(node.label, round_.answers.get(index), round_.troubles.get(index))
            for index, node in enumerate(self._nodes)
        )
        owners = Counter(_owner(vote.value) for vote in votes if vote.trouble is None)
        owner, count = owners.most_common(1)[0] if owners else (None, 0)
        if count < round_.tally.majority:
            unknown = len(votes) - sum(owners.values())
            held = max((n for owner, n in owners.items() if owner is not None), default=0)
            if held + unknown >= round_.tally.majority:
                raise self._undecided(round_, _said_of_inspect)
            owner = None
        if owner == NOT_A_LOCK:
            raise NameTakenError(f"a key of {name!r} holds something that is not a lock", name=name)
        return self._standing(owner, [vote for vote in votes if vote.trouble is None], votes)

    async def _inspect_shared(self, name: str, keys: Keys, *, within: float) -> Standing:
        """Who holds on a majority, as far as is known."""
        round_ = await self._ask_all(ShareInspect(name, keys), within, _hear_share_inspect)
        if not round_.tally.has_answers:
            raise self._undecided(round_, _said_of_share_inspect)
        parts = {index: holdings(reply) for index, reply in round_.answers.items()}
        votes = tuple(
            _share_vote(node.label, parts.get(index), round_.troubles.get(index))
            for index, node in enumerate(self._nodes)
        )
        majority = round_.tally.majority
        holders = agreed(parts.values(), majority=majority, fencing=self._fencing)
        return standing_of(holders, waiters=0, votes=votes)

    async def _ask_all(
        self,
        call: SimpleCall,
        within: float,
        hear: Callable[[int, Round[list[Any]], _Answer], None],
    ) -> Round[list[Any]]:
        round_: Round[list[Any]] = Round(len(self._nodes), within, wants_all=True)
        asked = self._worth_asking()
        for index, node in enumerate(self._nodes):
            if index in asked:
                node.ask(call, within, partial(hear, index, round_))
            else:
                round_.fail(index, node.spared)
        await round_.settled()
        return round_

    def hold(self, token: str) -> None:
        """Nobody hands anything over here."""

    def forget(self, token: str) -> None:
        """What is known of an acquisition goes with it."""

    async def aclose(self) -> None:
        await asyncio.gather(*(node.aclose() for node in self._nodes))
        await self._background.drain()

    def _worth_asking(self) -> set[int]:
        """The nodes that are not spared; all of them where these cannot be a majority."""
        well = {index for index, node in enumerate(self._nodes) if not node.is_spared}
        return well if 2 * len(well) > len(self._nodes) else set(range(len(self._nodes)))

    def _take(
        self,
        ballot: Ballot,
        index: int,
        ttl_ms: int,
        within: float,
        round_: Round[Granted | Refused] | None,
    ) -> None:
        part = ballot.parts[index]
        call = Acquire(
            part.acquisition,
            self._us,
            ttl_ms=ttl_ms,
            alive_ms=0,
            may_repeat=False,
            notice=ignore,
        )
        then = partial(self._hear_acquire, ballot, index, call, round_)
        part.take(call, self._nodes[index].ask(call, within, then))

    def _hear_acquire(
        self,
        ballot: Ballot,
        index: int,
        call: Acquire,
        round_: Round[Granted | Refused] | None,
        reply: _Answer,
    ) -> None:
        """`round_` is None where a node is healed, which does not vote."""
        part = ballot.parts[index]
        if isinstance(reply, list) and reply[0] >= 0:
            answer = call.answer(reply)
            part.may_stand = isinstance(answer, Granted)
            if round_ is None or part.is_late:
                self._confirm_late(ballot, index)
            if round_ is None:
                return
            # Of a token that was asked for here once, this tells of a second way to the server.
            is_twin = isinstance(answer, Granted) and answer.already
            if is_twin:
                label = self._nodes[index].label
                self._twin = f"the node {label} of the quorum is the same server as another node"
            round_.vote(index, answer, is_yes=part.may_stand and not is_twin)
            return
        if isinstance(reply, list):
            reply = NoAnswer("it was given up")
        if was_said(reply) or not call.sent_at:
            part.may_stand = False
        if round_ is not None:
            round_.fail(index, reply)

    async def _confirm(
        self, ballot: Ballot, ttl_ms: int, *, within: float, heals: bool = False
    ) -> float | NotOurs:
        """The new deadline, if a majority says that it is ours; they know its fencing token now.

        With *heals*, who says later that it has lost it is given it again at once.
        """
        sent_at = _clock.now()
        round_: Round[int | str | None] = Round(len(self._nodes), within)
        asked = self._worth_asking()
        for index, part in enumerate(ballot.parts):
            node = self._nodes[index]
            if not part.may_stand:
                round_.vote(index, None, is_yes=False)
            elif index not in asked:
                round_.fail(index, node.spared)
            elif part.is_unsent:
                part.is_late = True
                round_.fail(index, NoAnswer("not asked yet"))
            else:
                call = _confirming(ballot, part.acquisition, ttl_ms)
                heal = partial(self._heal, ballot, ttl_ms, within) if heals else None
                node.ask(call, within, partial(self._hear_confirm, ballot, index, round_, heal))
        outcome = await round_.settled()
        if outcome == "yes":
            left_ms = min(left for left in round_.of(is_yes=True).values() if type(left) is int)
            return _clock.deadline(sent_at, left_ms)
        if outcome == "no":
            found = round_.of(is_yes=False).values()
            return NotOurs(_most(value for value in found if not isinstance(value, int)))
        raise self._undecided(round_, _said_of_confirm)

    def _hear_confirm(
        self,
        ballot: Ballot,
        index: int,
        round_: Round[int | str | None],
        heal: Callable[[], None] | None,
        reply: _Answer,
    ) -> None:
        if isinstance(reply, NameTakenError):
            reply = [0, NOT_A_LOCK]
        if not isinstance(reply, list):
            round_.fail(index, reply)
        elif reply[0] == 1:
            round_.vote(index, reply[1], is_yes=True)
        else:
            ballot.parts[index].find_absent()
            standing = None if ballot.is_shared else maybe_text(reply[1])
            round_.vote(index, standing, is_yes=False)
            if heal is not None and round_.has_majority and not ballot.is_over:
                heal()

    def _confirm_late(self, ballot: Ballot, index: int) -> None:
        """Who granted it by a counter of its own is to know the quorum's; it counts later."""
        part, node = ballot.parts[index], self._nodes[index]
        if part.may_stand and ballot.fencing_token and not ballot.is_over:
            call = _confirming(ballot, part.acquisition, ttl_ms=1)
            node.ask(call, self._request_timeout, ignore)

    def _heal(self, ballot: Ballot, ttl_ms: int, within: float) -> None:
        for index, part in enumerate(ballot.parts):
            if not part.may_stand and not self._nodes[index].is_spared:
                self._take(ballot, index, ttl_ms, within, None)

    def _hear_release(
        self,
        ballot: Ballot,
        index: int,
        call: Release,
        round_: Round[Released],
        reply: _Answer,
    ) -> None:
        if isinstance(reply, NameTakenError):
            reply = [0, NOT_A_LOCK]
        if not isinstance(reply, list):
            round_.fail(index, reply)
            return
        released = call.answer(reply)
        ballot.parts[index].may_stand = False
        round_.vote(index, released, is_yes=released.removed)

    def _standing(
        self, owner: str | None, known: list[NodeStanding], votes: tuple[NodeStanding, ...]
    ) -> Standing:
        if owner is None:
            return Standing(None, -2, 0, None, votes)
        theirs = [vote for vote in known if _owner(vote.value) == owner]
        # A node that was just healed may still have one of its own.
        value = _names.read_value(_most(vote.value for vote in theirs) or "")
        fencing_token = value.fencing_token if value and self._fencing else None
        # The majority is over when so many have run out that too few are left.
        lefts = sorted((vote.ttl_left_ms for vote in theirs), key=_life, reverse=True)
        left_ms = lefts[len(self._nodes) // 2]
        return Standing(theirs[0].value, left_ms, 0, fencing_token, votes)

    def _undecided(self, round_: Round[Any], said: Callable[[Any], str]) -> LockError | NoAnswer:
        """What keeps most of the nodes from answering, if it is one thing; else what each said."""
        for kind in (NotAllowedError, NameTakenError):
            refusals = [error for error in round_.troubles.values() if isinstance(error, kind)]
            if len(refusals) >= round_.tally.blocking:
                return anew(refusals[0], refusals[0].name)
        nodes = {}
        for index, node in enumerate(self._nodes):
            trouble = round_.troubles.get(index, "no reply in time")
            answer = round_.answers.get(index, _SILENT)
            nodes[node.label] = str(trouble) if answer is _SILENT else said(answer)
        outcome = round_.tally.outcome
        return NoMajority("unreachable" if outcome == "unreachable" else "undecided", nodes)


_SILENT: Final = object()


async def _insist(ask: Callable[..., Awaitable[_T]], within: float) -> _T:
    """The first answer; bounded by *within* seconds, of which each try has half of what is left."""
    ends_at = _clock.now() + within
    while True:
        left = ends_at - _clock.now()
        try:
            return await ask(within=left if left < _TRY_S else left / 2)
        except NoAnswer:
            if _clock.now() + _PAUSE_S >= ends_at:
                raise
        await asyncio.sleep(_PAUSE_S)


def _hear_inspect(index: int, round_: Round[list[Any]], reply: _Answer) -> None:
    if isinstance(reply, NameTakenError):
        reply = [NOT_A_LOCK, -1, 0]
    if isinstance(reply, list):
        round_.vote(index, reply, is_yes=True)
    else:
        round_.fail(index, reply)


def _hear_share_inspect(index: int, round_: Round[list[Any]], reply: _Answer) -> None:
    if isinstance(reply, list):
        round_.vote(index, reply, is_yes=True)
    else:
        round_.fail(index, reply)


def _share_vote(
    label: str, holders: list[Holding] | None, trouble: Exception | None
) -> NodeStanding:
    if holders is None:
        return NodeStanding(label, None, -2, str(trouble or "no reply in time"))
    if not holders:
        return NodeStanding(label, None, -2, None)
    return NodeStanding(label, holders[0].value, holders[0].ttl_left_ms, None)


def _confirming(ballot: Ballot, acquisition: Acquisition, ttl_ms: int) -> Confirm | ShareConfirm:
    fencing_token = ballot.fencing_token
    if not ballot.is_shared:
        return Confirm(acquisition, ttl_ms=ttl_ms, fencing_token=fencing_token)
    return ShareConfirm(acquisition, ttl_ms=ttl_ms, fencing_token=fencing_token)


def _vote(label: str, reply: list[Any] | None, trouble: Exception | None) -> NodeStanding:
    if reply is None:
        return NodeStanding(label, None, -2, str(trouble or "no reply in time"))
    return NodeStanding(label, maybe_text(reply[0]), reply[1], None)


def _life(ttl_left_ms: int) -> float:
    """For how long; a key without a TTL stands for ever."""
    return math.inf if ttl_left_ms == -1 else ttl_left_ms


def _owner(value: str | None) -> str | None:
    """Whose *value* is; each node may have given it another fencing token."""
    read = _names.read_value(value or "")
    return read.owner_token if read else value


def _likeliest(refusals: Iterable[Granted | Refused]) -> Refused:
    """Of the refusals, one that names who stands on most of the nodes."""
    known = [refusal for refusal in refusals if isinstance(refusal, Refused)]
    owner = _most(_owner(refusal.value) for refusal in known)
    return next(refusal for refusal in known if _owner(refusal.value) == owner)


def _most(values: Iterable[str | None]) -> str | None:
    """The most frequent of *values*, nothing only where there is nothing else."""
    found = Counter(value for value in values if value is not None).most_common(1)
    return found[0][0] if found else None


# What a node said, in words for people.


def _stands(value: str | None) -> str:
    return "nothing stands there" if value is None else f"{_names.holder(value)} holds it"


def _said_of_acquire(answer: Granted | Refused) -> str:
    return "granted" if isinstance(answer, Granted) else _stands(answer.value)


def _said_of_confirm(answer: int | str | None) -> str:
    return "ours" if isinstance(answer, int) else _stands(answer)


def _said_of_release(answer: Released) -> str:
    return "released" if answer.removed else _stands(answer.value)


def _said_of_inspect(answer: list[Any]) -> str:
    return _stands(maybe_text(answer[0]))


def _said_of_share_inspect(answer: list[Any]) -> str:
    return f"{len(holdings(answer))} hold it"
