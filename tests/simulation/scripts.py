"""Holds each script call against the rules of the protocol."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiodlock import _clock, _names
from tests.model import Model
from tests.simulation.world import World


@dataclass
class _Waiter:
    number: int  # By arrival.
    live_until_ms: int
    has_lapsed: bool = False  # It was dead for a while: it may have lost its place, or not.


@dataclass
class _Name:
    """What the referee knows of one name, from the script calls alone."""

    waiters: dict[str, _Waiter] = field(default_factory=dict)
    value: str | None = None
    ends_at_ms: int = 0
    last_fencing_token: int = 0
    fence_was_lost: bool = False
    has_stepped_back: bool = False
    is_tainted: bool = False  # Keys went, or the clock stepped: its order proves nothing.
    released: dict[str, float] = field(default_factory=dict)
    # When what happened: a lock was broken; the clock stepped; tombstones went.
    breaks: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    exhumed: list[float] = field(default_factory=list)


class ScriptReferee:
    """Knows what the server did, from the calls alone, and what went wrong by nature.

    Args:
        node: What the server is called, if it is one of a quorum: there its keys are not the lock,
            so that to lose them breaks nothing, and its counter begins anew.
    """

    def __init__(self, world: World, model: Model, *, node: str = "") -> None:
        self.model = model
        self.node = node
        self.lost_at: list[float] = []  # When keys of a node went.
        self.taken: dict[str, float] = {}  # When each owner token first stood here.
        self.confirmed: list[tuple[float, str]] = []  # When which owner token was, on a node.
        self.grants: dict[str, float] = {}  # By value: when the server made it.
        self.stepped_back_s = 0.0  # In all: keys live so much longer.
        self.broken: set[str] = set()  # Keys of locks that a user has told to break.
        self.is_believed: Callable[[str], bool]  # Whether somebody holds by that token.
        self._world = world
        self._told = (node,) if node else ()
        self._names: dict[str, _Name] = {}
        self._numbers = itertools.count()

    @property
    def locks(self) -> list[str]:
        """The keys of all locks that were ever asked for."""
        return list(self._names)

    def is_broken(self, lock: str, value: str, asked_at: float, until: float) -> bool:
        """Whether something that breaks a lock by its nature befell the grant *value*."""
        name = self._names.get(lock)
        if name is None:
            return False
        granted_at = self.granted_at(value, asked_at)
        # A hand-off is believed in from the last poll on: a step since then makes it shorter.
        return _between(name.breaks, granted_at, until) or _between(
            name.steps, granted_at - _clock.ALIVE_MAX_S, until
        )

    def granted_at(self, value: str, asked_at: float) -> float:
        """When the server granted it; not when its holder learnt of it."""
        return self.grants.get(value, asked_at)

    # What chaos tells.

    def keys_went(self, key: str | None) -> None:
        """Keys were lost against the rules: *key*, or all of them."""
        if self.node:
            self.lost_at.append(self._world.now)
        for lock, name in self._names.items():
            if key is not None and not key.startswith(lock):
                continue
            name.is_tainted = True
            name.waiters.clear()
            if key in (None, lock):
                name.value = None
                if not self.node:
                    name.breaks.append(self._world.now)
            if key in (None, f"{lock}:fence"):
                name.fence_was_lost = True
                if self.node:
                    name.last_fencing_token = 0
            if key in (None, f"{lock}:alive"):
                name.exhumed.append(self._world.now)

    def restored(self) -> None:
        """The server began anew, with keys of before: what stands there is no new grant."""
        standing = self.model.dump()
        for lock, name in self._names.items():
            kept = standing.get(lock.encode())
            name.value = None
            if kept is not None and isinstance(kept.value, bytes):
                name.value = kept.value.decode()
                name.ends_at_ms = kept.ends_at_ms or 0

    def clock_steps(self, by_s: float) -> None:
        """In a moment: what has expired by now is gone for good."""
        self.restored()
        self.stepped_back_s += max(0.0, -by_s)
        for name in self._names.values():
            name.is_tainted = True
            name.waiters.clear()
            name.has_stepped_back = name.has_stepped_back or by_s < 0
            name.steps.append(self._world.now)
            name.exhumed.append(self._world.now)

    # What the server did.

    def on_script(
        self, script: str, keys: list[bytes], args: list[bytes], reply: list[Any] | None
    ) -> None:
        """A script ran, and *reply* is what it answered."""
        if script in ("probe", "inspect") or reply is None:
            return
        if script == "extend":
            for key in keys:
                self._look_at(self._names.setdefault(key.decode(), _Name()), key.decode(), "")
            return
        lock, token = keys[0].decode(), args[0].decode().partition("/")[0]
        name = self._names.setdefault(lock, _Name())
        self._world.note(script, *self._told, short(token), *_readable(reply))
        if reply[0] == -1:
            return  # A tombstone: nothing was looked at.
        if script == "confirm":
            self._check_confirmed(name, keys, token, is_ours=reply[0] == 1)
            return
        self._check_late_copy(name, script, token)
        if script in ("release", "retire"):
            name.waiters.pop(token, None)
            self._check_break(name, lock, token)
            # Who was broken while it waited for the news is no ghost when it polls again.
            if lock not in self.broken:
                name.released[token] = self._world.now
        may_end = script in ("release", "retire", "discard")
        self._look_at(name, lock, token, may_end=may_end)
        if script == "acquire":
            self._queue(name, token, int(args[2]), reply)
        self._check_keys(name, lock, keys)

    def _check_confirmed(
        self, name: _Name, keys: list[bytes], token: str, *, is_ours: bool
    ) -> None:
        """It changes a fencing token at most, and only the owner's own."""
        lock, fence = keys
        standing = self.model.string(lock)
        value = None if standing is None else standing.decode()
        ends_at_ms = self.model.now_ms + self.model.ttl_left_ms(lock)
        if value is not None and (name.value is None or owner(name.value) != owner(value)):
            self._world.breach("2 owner", f"{short(value)} was confirmed over {name.value}")
        if value is not None and ends_at_ms < name.ends_at_ms:
            self._world.breach("1 ttl", f"that of {short(value)} was cut by a confirmation")
        counter = int(self.model.string(fence) or 0)
        if counter < name.last_fencing_token:
            self._world.breach("6 fencing", f"the counter fell to {counter}")
        name.value, name.ends_at_ms = value, ends_at_ms
        name.last_fencing_token = counter
        if is_ours:
            self.confirmed.append((self._world.now, token))
        self._check_ttls(keys)

    def _check_late_copy(self, name: _Name, script: str, token: str) -> None:
        """A tombstone keeps what was given up from coming back, unless it was lost."""
        at = name.released.get(token)
        if script != "acquire" or at is None:
            return
        if not _between(name.exhumed, at, self._world.now):
            self._world.breach("late copy", f"{short(token)} came back after its release")

    def _check_break(self, name: _Name, lock: str, token: str) -> None:
        """Who releases what its holder believes in breaks it, or is mad."""
        if lock in self.broken:
            # By whom does not show; in a simulation with breaks each release may be one.
            name.breaks.append(self._world.now)
        elif self.is_believed(token):
            self._world.breach("2 owner", f"{short(token)} was released under its holder")

    def _look_at(self, name: _Name, lock: str, caller: str, *, may_end: bool = False) -> None:
        """What the script that *caller* called has made of the lock's key."""
        standing = self.model.string(lock.encode())
        value = None if standing is None else standing.decode()
        before, is_over = name.value, self.model.now_ms > name.ends_at_ms
        if value != before:
            if before is not None and not is_over and not (may_end and owner(before) == caller):
                self._world.breach(
                    "2 owner", f"{short(before)} was ended by a call of {short(caller)}"
                )
            if value is not None and not _is_kept(before, value):
                self._check_grant(name, value, caller)
        name.value = value
        name.ends_at_ms = self.model.now_ms + self.model.ttl_left_ms(lock.encode())

    def _check_grant(self, name: _Name, value: str, caller: str) -> None:
        token, fencing_token = owner(value), int(value.rpartition("/")[2])
        self._world.note("grant", *self._told, short(token), fencing_token)
        self.grants[value] = self._world.now
        self.taken.setdefault(token, self._world.now)
        is_excused = name.fence_was_lost and name.has_stepped_back
        if fencing_token <= name.last_fencing_token and not is_excused:
            self._world.breach("6 fencing", f"{fencing_token} after {name.last_fencing_token}")
        name.last_fencing_token = fencing_token
        grantee = name.waiters.pop(token, None)
        if name.is_tainted or (grantee is not None and grantee.has_lapsed):
            return
        now_ms = self.model.now_ms
        if grantee is not None and grantee.live_until_ms <= now_ms and token != caller:
            self._world.breach("4 order", f"granted to {short(token)}, which is dead")
        earlier = self._earliest_live(name)
        if earlier is None:
            return
        if grantee is None or name.waiters[earlier].number < grantee.number:
            self._world.breach("4 order", f"{short(token)} overtook {short(earlier)}")

    def _earliest_live(self, name: _Name) -> str | None:
        now_ms = self.model.now_ms
        for token, waiter in name.waiters.items():
            if waiter.live_until_ms > now_ms and not waiter.has_lapsed:
                return token
        return None

    def _queue(self, name: _Name, token: str, alive_ms: int, reply: list[Any]) -> None:
        if reply[0] != 0 or alive_ms == 0:
            name.waiters.pop(token, None)
            return
        waiter = name.waiters.get(token)
        until_ms = self.model.now_ms + alive_ms
        if waiter is None:
            name.waiters[token] = _Waiter(next(self._numbers), until_ms)
        else:
            if waiter.live_until_ms <= self.model.now_ms:
                waiter.has_lapsed = True
            waiter.live_until_ms = until_ms

    def _check_keys(self, name: _Name, lock: str, keys: list[bytes]) -> None:
        self._check_ttls(keys)
        model = self.model
        if len(keys) < 4:
            return
        queue = model.members(keys[2]).scores
        if name.value is not None and owner(name.value).encode() in queue:
            self._world.breach("3 holder", f"{short(name.value)} waits although it holds")
        if name.value is None and not name.is_tainted and (waiting := self._earliest_live(name)):
            self._world.breach("5 free", f"the lock was left free while {short(waiting)} waits")
        if name.is_tainted and not queue and not model.members(keys[3]).scores:
            name.is_tainted = False
            name.waiters.clear()

    def _check_ttls(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.model.ttl_left_ms(key) == -1:
                self._world.breach("1 ttl", f"{key.decode()} has none")


def owner(value: str) -> str:
    """The owner token in a lock's value."""
    return value.rpartition("/")[0]


def _is_kept(before: str | None, value: str) -> bool:
    """Whether *value* is what a release of *before* writes for a name that stays taken."""
    if before is None:
        return False
    token, _, fencing_token = before.rpartition("/")
    return value == f"{_names.retired(token)}/{fencing_token}"


def is_nobodys(value: str) -> bool:
    """Whether the name only stays taken: there is no acquisition of number 0."""
    return owner(value).endswith(":0")


def short(token: str) -> str:
    """A token (or a value) for people: host, client, number."""
    if not token:
        return "nobody"
    host, client_id, number = token.split(":")
    return f"{host}:{client_id[:3]}:{number}"


def _between(times: list[float], first: float, last: float) -> bool:
    return any(first <= at <= last for at in times)


def _readable(reply: list[Any]) -> list[object]:
    return [short(part.decode()) if isinstance(part, bytes) and part else part for part in reply]
