"""Holds each lease against what the design promises to users."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tests.model import Model
from tests.simulation.scripts import ScriptReferee, is_nobodys, short
from tests.simulation.world import Host, World

# Two holders at once for less than this is how floats differ.
_GRAIN_S: Final = 1e-6
_BY_TIME: Final = ("EXPIRED", "UNREACHABLE", "LOOP_STALLED")
# The clean-up of a cancelled acquisition is waited for for 1 s.
_CANCELLED_S: Final = 1.5
# A body hears of its deadline within that time.
_TOLD_S: Final = 0.05
# In good times whom a lock was handed hears of it within that time; with a Backoff, it polls.
_HEARD_S: Final = 0.1
_BACKOFF_S: Final = 1.0
# In good times nothing of an acquisition is left so long after its end; else what is, lingers.
CLEANED_S: Final = 0.5
_LINGERS_S: Final = 1000.0


@dataclass(eq=False)
class Asking:
    """One acquisition of a user's, from its call to its end."""

    host: Host
    name: str
    since: float
    wait_timeout: float | None
    request_timeout: float
    stopped_s: float  # How long its host had stood still before.
    since_on_host: float  # By its clock.
    cancelled_at: float | None = None

    def limit_s(self) -> float | None:
        """How long it may take in true time; None: as long as it likes."""
        if self.wait_timeout is None:
            return None
        return self.wait_timeout + self.request_timeout + self.host.stopped_s - self.stopped_s + 0.5


@dataclass(eq=False)
class Belief:
    """One lease, as long as its holder may believe in it; in true time."""

    host: Host
    name: str
    token: str
    fencing_token: int
    since: float
    asked_at: float
    stopped_s: float
    has_block: bool
    polls: bool  # Its lock has a Backoff: messages do not wake it.
    extends: bool
    until: float | None = None

    @property
    def value(self) -> str:
        """What the server has for it."""
        return f"{self.token}/{self.fencing_token}"

    def __str__(self) -> str:
        until = "now" if self.until is None else f"{self.until:.6f}"
        return f"{short(self.token)}/{self.fencing_token} [{self.since:.6f}, {until}]"


class Referee:
    """Who waits, who holds, who has left; writes down each breach.

    Args:
        scripts: What is known of each server.
    """

    def __init__(self, world: World, *scripts: ScriptReferee) -> None:
        self.askings: list[Asking] = []  # Under way.
        self.beliefs: list[Belief] = []
        self.scripts = scripts
        self._trouble_until = -1.0
        self._leaving: dict[tuple[str, str], list[float]] = {}
        self._world = world
        for one in scripts:
            one.is_believed = self._is_believed

    def trouble(self, for_s: float) -> None:
        """For so long what is asked may go unanswered."""
        now = self._world.now
        self._trouble_until = max(self._trouble_until, now + for_s)
        for leaving in self._leaving.values():
            leaving[:] = [now + _LINGERS_S if until >= now else until for until in leaving]

    @property
    def stepped_back_s(self) -> float:
        """How long keys may live on, since clocks were set back."""
        return max(scripts.stepped_back_s for scripts in self.scripts)

    # What the users did.

    def will_break(self, key: str) -> None:
        """Somebody tells us to break that lock."""
        for scripts in self.scripts:
            scripts.broken.add(key)

    def ask(self, asking: Asking) -> None:
        self.askings.append(asking)

    def end_ask(self, asking: Asking, outcome: str) -> None:
        """It came out with a lease, or without; it must have been in time."""
        self.askings.remove(asking)
        took_s, limit_s = self._world.now - asking.since, asking.limit_s()
        if asking.cancelled_at is not None:
            stopped_s = asking.host.stopped_s - asking.stopped_s
            took_s, limit_s = self._world.now - asking.cancelled_at, _CANCELLED_S + stopped_s
        elif outcome == "cancelled" and limit_s is not None:
            limit_s += _CANCELLED_S  # By the loss of the lease around it.
        if outcome != "got":
            self.ended(asking.host, asking.name, asking.since)
        waited_s = asking.host.now() - asking.since_on_host
        if outcome in ("LockTimeout", "None") and waited_s < (asking.wait_timeout or 0) - _GRAIN_S:
            self._world.breach(
                "in time", f"{outcome} after {waited_s:.3f} s of {asking.wait_timeout} s"
            )
        if limit_s is not None and took_s > limit_s:
            self._world.breach(
                "in time", f"{outcome} after {took_s:.3f} s, at most {limit_s:.3f} s"
            )

    def believe(self, belief: Belief) -> None:
        """It has the lease; in good times it heard of its grant at once."""
        self.beliefs.append(belief)
        late_s = self._world.now - self._granted_at(belief)
        most_s = _HEARD_S + (_BACKOFF_S if belief.polls else 0.0)
        if late_s > most_s and self._is_good_since(belief.asked_at):
            self._world.breach("heard", f"{belief} {late_s:.3f} s after its grant")

    def end_belief(self, belief: Belief, deadline: float) -> None:
        """It was given up now, or its deadline (of its host's clock) was before."""
        if belief.until is None:
            belief.until = min(self._world.now, belief.host.true(deadline))

    def unreachable(self, asking: Asking) -> None:
        """It was told that no server answers."""
        if self._is_good_since(asking.since):
            self._world.breach(
                "unreachable", f"{asking.host.name} heard nothing, though all was well"
            )

    def told(self, belief: Belief, deadline: float) -> None:
        """Its body has ended: not long after the deadline, as far as its host ran at all."""
        stopped_s = belief.host.stopped_s - belief.stopped_s
        late_s = self._world.now - belief.host.true(deadline) - stopped_s
        if late_s > _TOLD_S:
            self._world.breach("told", f"{belief} ran on for {late_s:.3f} s after its deadline")

    def lost(self, belief: Belief, reason: str, deadline: float, *, has_max_hold: bool) -> None:
        """The holder was told that its lease is lost: was there a reason?"""
        is_over = belief.host.now() >= deadline
        what = f"{belief} {reason}"
        if reason in ("STOLEN", "DELETED") and not self._may_be_gone(belief):
            self._world.breach("lost", f"{what}, and nothing broke it")
        elif reason in (*_BY_TIME, "MAX_HOLD") and not is_over:
            self._world.breach("lost", f"{what} before its deadline")
        elif reason == "LOOP_STALLED" and belief.host.stopped_s == belief.stopped_s:
            self._world.breach("lost", f"{what}, though its host did not stop")
        elif reason == "MAX_HOLD" and not has_max_hold:
            self._world.breach("lost", f"{what} without one")
        elif reason in _BY_TIME and belief.extends and self._is_good_since(belief.asked_at):
            self._world.breach("lost", f"{what}, though all was well")

    def ended(self, host: Host, name: str, since: float, *, is_excused: bool = False) -> None:
        """An acquisition is over; how long something of it may stand depends on how it went."""
        is_troubled = is_excused or not self._is_good_since(since)
        last_s = _LINGERS_S if is_troubled else CLEANED_S
        self._leaving.setdefault((host.name, name), []).append(self._world.now + last_s)

    def forget(self, host: Host) -> None:
        """It was killed."""
        self.askings = [asking for asking in self.askings if asking.host is not host]

    def look_for_orphans(self) -> None:
        """What stands in a server is somebody's, or was until a moment ago."""
        for scripts in self.scripts:
            scripts.model.delete()  # Nothing; but the model reads its clock.
            for lock in scripts.locks:
                standing = _standing(scripts.model, lock)
                for host in self._world.hosts:
                    if not host.is_dead and standing[host.name]:
                        self._check_owners(host, lock, standing[host.name], scripts.node)

    def _check_owners(self, host: Host, lock: str, standing: int, node: str) -> None:
        leaving = self._leaving.setdefault((host.name, lock), [])
        leaving[:] = [until for until in leaving if until >= self._world.now]
        known = len(leaving) + sum(
            (other.host, other.name) == (host, lock) for other in self._under_way()
        )
        if standing > known:
            self._world.breach(
                "orphan", f"{host.name} has {standing} in {node}{lock}, and knows of {known}"
            )

    def concerned(self) -> list[Host]:
        """The host of each who waits or holds now."""
        return [one.host for one in self._under_way()]

    def _under_way(self) -> list[Asking | Belief]:
        return [*self.askings, *self._open()]

    def _open(self) -> list[Belief]:
        return [belief for belief in self.beliefs if belief.until is None]

    # At the end.

    def check_overlaps(self) -> None:
        """No two holders of one name at once, unless a fault broke the lock of the first."""
        by_name: dict[str, list[Belief]] = {}
        for belief in self.beliefs:
            by_name.setdefault(belief.name, []).append(belief)
        for beliefs in by_name.values():
            beliefs.sort(key=self._granted_at)
            for n, first in enumerate(beliefs):
                for second in beliefs[n + 1 :]:
                    self._check_pair(first, second)

    def _check_pair(self, first: Belief, second: Belief) -> None:
        assert first.until is not None
        assert second.until is not None
        overlap_s = min(first.until, second.until) - max(first.since, second.since)
        if overlap_s <= _GRAIN_S:
            return
        self._world.note("overlap", first, second)
        if not self._is_broken(first, max(first.since, second.since)):
            self._world.breach("two holders", f"{first} and {second} for {overlap_s:.6f} s")

    def check_waits(self, calm_since: float, most_s: float) -> None:
        """Invariant 7: once nothing fails any more, a waiter gets what is not held."""
        for belief in self.beliefs:
            others = [
                other.until or 0.0
                for other in self.beliefs
                if other.name == belief.name and other.since < belief.since
            ]
            waited_s = belief.since - max([belief.asked_at, calm_since, *others])
            if waited_s > most_s:
                self._world.breach(
                    "7 live", f"{belief} waited {waited_s:.3f} s for a lock nobody held"
                )

    def _is_believed(self, token: str) -> bool:
        return any(belief.token == token for belief in self._open())

    def _may_be_gone(self, belief: Belief) -> bool:
        """Whether its keys may be gone by now."""
        return self._is_broken(belief, self._world.now)

    def _is_good_since(self, since: float) -> bool:
        return self._trouble_until < since

    def _is_broken(self, belief: Belief, until: float) -> bool:
        return any(
            scripts.is_broken(belief.name, belief.value, belief.asked_at, until)
            for scripts in self.scripts
        )

    def _granted_at(self, belief: Belief) -> float:
        """When the only server granted it."""
        return self.scripts[0].granted_at(belief.value, belief.asked_at)


def _standing(model: Model, lock: str) -> Counter[str]:
    """How many of each host hold or wait there."""
    value = model.string(lock.encode())
    tokens = [] if value is None or is_nobodys(value.decode()) else [value]
    tokens += model.members(f"{lock}:queue".encode()).scores
    return Counter(token.decode().partition(":")[0] for token in tokens)
