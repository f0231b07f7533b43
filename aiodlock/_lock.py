"""From a name to a lease and back."""

from __future__ import annotations

import asyncio
import enum
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Final, Literal, NamedTuple, TypedDict, TypeVar

from . import _clock, _names
from ._errors import LockTimeout
from ._lease import Lease, Terms
from ._names import Keys
from ._running import running_task
from ._session import Session
from ._store._api import Acquisition, NoAnswer, Standing
from ._waiting import Backoff

_T = TypeVar("_T")


class Unset(enum.Enum):
    """Stands for "as the lock says", since None means "for ever"."""

    UNSET = "the default"


UNSET: Final = Unset.UNSET


class SharedOptions(TypedDict, total=False):
    """The options of `LockClient.reader`, `writer` and `semaphore`."""

    ttl: float | None
    wait_timeout: float | Unset | None
    auto_extend: bool
    retry: Backoff | None
    on_lost: Literal["cancel", "raise"]
    max_hold: float | None


class LockOptions(SharedOptions, total=False):
    """The options of `LockClient.lock`."""

    reentrant: bool
    hold_at_least: float | None


class Vote(NamedTuple):
    """What one node of a quorum said: who holds there, for how many seconds; or its `error`."""

    node: str
    holder: str | None
    ttl_left: float | None
    error: str | None


class _Info(NamedTuple):
    held: bool
    holder: str | None
    ttl_left: float | None
    fencing_token: int | None
    waiters: int


class LockInfo(_Info):
    """What stood under a name when the server was asked.

    `holder` is `<label>:<client id>`, or the text in the key where another library wrote it;
    `ttl_left` is in seconds, None without a TTL; `fencing_token` is None where nobody holds, or
    another library does, or a quorum without fencing.

    Over a quorum all of it is what a majority says, and `votes` is what each node says; elsewhere
    there are no votes.
    """

    votes: tuple[Vote, ...] = ()

    def __repr__(self) -> str:
        votes = "".join(f"\n  {vote}" for vote in self.votes)
        return super().__repr__() + votes


_Described = TypeVar("_Described", bound=LockInfo)


class Lock:
    """A name with options; shared by as many tasks as you like. Made by `LockClient.lock`.

    Each entry of `async with lock` is an acquisition of its own.
    """

    _tail = ""  # Of its owner tokens: what they ask for, where several may hold.

    def __init__(
        self,
        bound: Callable[[], Session],
        name: str,
        keys: Keys,
        terms: Terms,
        *,
        wait_timeout: float | None,
        retry: Backoff | None,
    ) -> None:
        self._bound = bound
        self._name = name
        self._keys = keys
        self._terms = terms
        self._wait_timeout = wait_timeout
        self._retry = retry
        self._entries: list[tuple[asyncio.Task[Any] | None, Lease]] = []

    @property
    def name(self) -> str:
        """What is locked."""
        return self._name

    @property
    def ttl(self) -> float:
        """Seconds that a lease lasts unless it is extended."""
        return self._terms.ttl

    def acquire(self, *, wait_timeout: float | Unset | None = UNSET) -> Acquiring:
        """Wait for the lease: `await lock.acquire()`, or `async with lock.acquire() as lease`.

        One script call where the lock is free (a client's first asks each primary what it may do:
        one more). A waiter sends about three in min(6, max(ttl, 1)) seconds, more with a `Backoff`.
        Over a quorum each try is two to every node, or one without fencing.

        Args:
            wait_timeout: Seconds that acquiring may take, at least 0 (one request); None: for
                ever. Default: the lock's.

        Raises:
            LockTimeout: Held by another until then.
            ServerUnreachable: The server gave no usable answer.
            NotAllowedError, NameTakenError: Waiting is no use.
            RuntimeError: The client is closed, or bound to another event loop.
            TypeError, ValueError: wait_timeout is not what is allowed.

        Cancellation: what may be on the server is released, and waited for, 1 s at most.
        """
        return Acquiring(self._acquire(wait_of(wait_timeout, self._wait_timeout)))

    async def try_acquire(self, *, wait_timeout: float | Unset | None = 0.0) -> Lease | None:
        """The lease, or None if it was not got in time.

        One script call by default, which does not queue: None also on a free lock that others
        wait for. A lost reply is asked for again within `request_timeout`.

        Args:
            wait_timeout: As for `acquire`. Default: 0, one request.

        Raises:
            ServerUnreachable, NotAllowedError, NameTakenError, RuntimeError: As for `acquire`.

        Cancellation: as for `acquire`.
        """
        try:
            return await self._acquire(wait_of(wait_timeout, self._wait_timeout))
        except LockTimeout:
            return None

    async def inspect(self) -> LockInfo:
        """What stands under the name now.

        One script call (over a quorum to each node); changes nothing.

        Raises:
            ServerUnreachable: No answer within `request_timeout`.
            NotAllowedError, NameTakenError: The server forbids it; not a lock.

        Cancellation: changes nothing.
        """
        standing = await self._inspect()
        return described(LockInfo, standing)

    async def break_lock(self, *, fencing_token: int | None = None) -> bool:
        """Take the lock from its holder, for the next waiter: for operators.

        Two script calls. The holder learns of it at its next extension.

        Args:
            fencing_token: Break only this grant. Default: whichever stands now.

        Returns:
            Whether that grant stood, and is broken.

        Raises:
            ServerUnreachable: No answer within `request_timeout`: it may be broken or not.
            NotAllowedError, NameTakenError: The server forbids it; not a lock.
            TypeError: fencing_token is not an int.

        Cancellation: it may be broken or not.
        """
        check_fencing_token(fencing_token)
        standing = await self._inspect()
        if standing.value is None:
            return False
        if fencing_token is not None and standing.fencing_token != fencing_token:
            return False
        return await self._break(standing.value)

    async def __aenter__(self) -> Lease:
        lease = await (await self._acquire(self._wait_timeout)).__aenter__()
        self._entries.append((asyncio.current_task(), lease))
        return lease

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        lease = newest_entry(self._entries, self._name, "async with lock.acquire()")
        await lease.__aexit__(exc_type, error, traceback)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r} ttl={self.ttl:g}>"

    async def _acquire(self, wait_timeout: float | None) -> Lease:
        return await self._bound().acquire(
            self._name,
            self._keys,
            self._terms,
            wait_timeout=wait_timeout,
            retry=self._retry,
            tail=self._tail,
        )

    async def _break(self, standing: str) -> bool:
        value = _names.read_value(standing)
        token = value.owner_token if value else standing
        grant = Acquisition(self._name, self._keys, token, is_shared=bool(self._tail))
        store = self._bound().store
        within = self._terms.request_timeout
        released = await self._answered(store.release(grant, within=within))
        # It stood a moment ago, and an earlier copy of this release was not answered.
        return released.removed or released.repeated

    async def _inspect(self) -> Standing:
        store = self._bound().store
        within = self._terms.request_timeout
        standing = store.inspect(self._name, self._keys, within=within, is_shared=bool(self._tail))
        return await self._answered(standing)

    async def _answered(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except NoAnswer as error:
            raise error.unreachable(
                f"no usable answer about the lock {self._name!r}", name=self._name
            ) from error.origin


class Acquiring(Coroutine[Any, Any, Lease]):
    """An acquisition under way: to be awaited, or entered with `async with`; once."""

    def __init__(self, coroutine: Coroutine[Any, Any, Lease]) -> None:
        self._coroutine = coroutine
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, Any, Lease]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    async def __aenter__(self) -> Lease:
        self._lease = await (await self._coroutine).__aenter__()
        return self._lease

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        assert self._lease is not None
        await self._lease.__aexit__(exc_type, error, traceback)


def newest_entry(
    entries: list[tuple[asyncio.Task[Any] | None, _T]], what: object, instead: str
) -> _T:
    """Of this task; or, as in fixtures that end in another task, what all of them are.

    It is taken off *entries*, which are of *what*; *instead* would have been clear in any task.
    """
    task = running_task()
    for index in range(len(entries) - 1, -1, -1):
        if entries[index][0] is task or len(entries) == 1:
            return entries.pop(index)[1]
    if all(entry is entries[0][1] for _, entry in entries):
        return entries.pop()[1]
    raise RuntimeError(
        f"the lock {what!r} was entered {len(entries)} times by other tasks: "
        f"which one to leave is unclear; use `{instead}`"
    )


def described(new: type[_Described], standing: Standing) -> _Described:
    """What the store found, for people."""
    info = new(
        held=standing.value is not None,
        holder=_holder(standing.value),
        ttl_left=_ttl_left(standing.ttl_left_ms),
        fencing_token=standing.fencing_token,
        waiters=standing.waiters,
    )
    info.votes = tuple(
        Vote(vote.node, _holder(vote.value), _ttl_left(vote.ttl_left_ms), vote.trouble)
        for vote in standing.votes
    )
    return info


def _holder(value: str | None) -> str | None:
    return None if value is None else _names.holder(value)


def _ttl_left(ttl_left_ms: int) -> float | None:
    return ttl_left_ms / 1000 if ttl_left_ms >= 0 else None


def check_fencing_token(fencing_token: object) -> None:
    """Return if it is one, or None."""
    if fencing_token is not None and type(fencing_token) is not int:
        raise TypeError(f"fencing_token must be an int or None; got {fencing_token!r}")


def checked_wait(wait_timeout: object) -> float | None:
    """*wait_timeout* if it is one: seconds, at least 0, or None for ever."""
    if wait_timeout is None:
        return None
    return _clock.seconds("wait_timeout (None: for ever)", wait_timeout, minimum=0)


def wait_of(wait_timeout: float | Unset | None, default: float | None) -> float | None:
    """*wait_timeout* if it is one, *default* where none was given."""
    return default if wait_timeout is UNSET else checked_wait(wait_timeout)


def checked_on_lost(on_lost: object) -> Literal["cancel", "raise"]:
    """*on_lost* if it is one of the two."""
    if on_lost == "cancel":
        return "cancel"
    if on_lost == "raise":
        return "raise"
    raise ValueError(f'on_lost must be "cancel" or "raise"; got {on_lost!r}')


def checked_reentrant(reentrant: object) -> bool:
    """*reentrant* if it is one of the two."""
    if not isinstance(reentrant, bool):
        raise TypeError(f"reentrant must be True or False; got {reentrant!r}")
    return reentrant


def checked_hold(hold_at_least: object, max_hold: float | None) -> float | None:
    """*hold_at_least* if a lease of at most *max_hold* can keep it."""
    if hold_at_least is None:
        return None
    most = _clock.TTL_MAX_S if max_hold is None else max_hold
    what = "hold_at_least" if max_hold is None else "hold_at_least (at most max_hold)"
    return _clock.seconds(what, hold_at_least, minimum=0.001, maximum=most)
