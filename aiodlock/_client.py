"""What every lock is made from."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import socket
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, Self, TypeVar, Unpack

from . import _clock, _names
from ._all import AllLocks
from ._cleanup import outlast
from ._election import Election
from ._lease import Terms
from ._lock import (
    UNSET,
    Lock,
    LockOptions,
    SharedOptions,
    Unset,
    checked_hold,
    checked_on_lost,
    checked_reentrant,
    checked_wait,
    wait_of,
)
from ._observed import Audience
from ._observer import Observer, checked_observer
from ._readers import Reader, Writer
from ._running import may_await, running_loop, running_task
from ._semaphore import Semaphore, checked_permits
from ._session import BODIES_S, Session
from ._store._api import Store
from ._template import Template
from ._waiting import Backoff

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

_P = ParamSpec("_P")
_T = TypeVar("_T")

_log = logging.getLogger("aiodlock")

# What closing may take beside its requests: bodies that are told to leave.
_CLOSE_S: Final = BODIES_S + 1.0


class LockClient:
    """Makes locks on one Redis or Valkey, over two connections however many there are.

    Constructing needs no running event loop: the client binds to the loop of its first await.
    `async with client` closes it at the end; it may then be entered again, in another loop too.

    Args:
        redis: A `redis.asyncio.Redis` (also of Sentinel's `master_for`) or `RedisCluster` of
            yours, which stays yours to close.
        prefix: What every key and channel begins with; at most 128 bytes, without `{` and `}`.
        ttl: Seconds that a lease lasts unless it is extended; at least 0.01.
        wait_timeout: Seconds that acquiring may take; None: for ever; 0: one request.
        request_timeout: Seconds that one request may take; at least 0.001.
        label: Shown to people as the first part of a holder; 1 to 64 of `[A-Za-z0-9._-]`.
            Default: host name and process id.
        observer: An `Observer` of yours, told what happens to each lock. Default: nobody is.

    Raises:
        TypeError, ValueError: An argument is not what is allowed.
    """

    def __init__(
        self,
        redis: Redis | RedisCluster,
        *,
        prefix: str = "aiodlock:",
        ttl: float = 30.0,
        wait_timeout: float | None = None,
        request_timeout: float = 2.0,
        label: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        # redis-py takes half a second to import; who never locks anything need not wait for it. Nor
        # is a loop to wait for the scripts, which are read by this.
        from ._store import _server

        self._servers = [_server.Server(redis)]
        self._new_store: Callable[..., Store] = _server.store_of
        self._prefix = _names.checked_prefix(prefix)
        self._ttl = _clock.ttl_seconds("ttl", ttl)
        self._wait_timeout = checked_wait(wait_timeout)
        self._request_timeout = _clock.seconds(
            "request_timeout", request_timeout, minimum=0.001, maximum=_clock.TTL_MAX_S
        )
        self._label = None if label is None else _names.checked_label(label)
        self._audience = Audience(checked_observer(observer))
        self._session: Session | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_closed = False
        _clients.add(self)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "aiodlock:",
        ttl: float = 30.0,
        wait_timeout: float | None = None,
        request_timeout: float = 2.0,
        label: str | None = None,
        observer: Observer | None = None,
    ) -> Self:
        """A client with a connection pool of its own, which it closes.

        `redis://`, `rediss://` and `unix://` as redis-py reads them, its options in the query.
        `memory://` runs on fakeredis in this process, for tests; clients with the same
        `memory://<word>` share one memory, and `memory://` alone is shared with nobody.

        Args:
            url: Where the server is.
            prefix: As for the class, like the rest.
            ttl: Seconds.
            wait_timeout: Seconds, or None.
            request_timeout: Seconds.
            label: Shown to people.
            observer: Told what happens to the locks.

        Raises:
            TypeError, ValueError: An argument is not what is allowed, or redis-py does not know the
                scheme.
            RuntimeError: `memory://` without fakeredis.
        """
        from ._store import _server

        server = _server.Server.of_url(url)
        client = cls(
            server.redis,
            prefix=prefix,
            ttl=ttl,
            wait_timeout=wait_timeout,
            request_timeout=request_timeout,
            label=label,
            observer=observer,
        )
        client._servers = [server]
        return client

    @classmethod
    def quorum(
        cls,
        nodes: Sequence[Redis | str],
        *,
        fencing: bool = True,
        prefix: str = "aiodlock:",
        ttl: float = 30.0,
        wait_timeout: float | None = None,
        request_timeout: float = 2.0,
        label: str | None = None,
        observer: Observer | None = None,
    ) -> Self:
        """A client whose leases stand on a majority of independent servers.

        It goes on while a minority is down. Each call of a `Lock` or `Lease` is one to every node;
        to acquire with fencing is two. Nobody queues: waiters try again, by `Backoff()` where a
        lock has no `retry` of its own.

        Args:
            nodes: At least 3 servers that are no replicas of each other: a `redis.asyncio.Redis`
                of yours, which stays yours to close, or a URL. An odd number is best.
            fencing: Whether leases have fencing tokens, which grow from grant to grant.
            prefix: As for the class, like the rest.
            ttl: Seconds.
            wait_timeout: Seconds, or None.
            request_timeout: Seconds.
            label: Shown to people.
            observer: Told what happens to the locks.

        Raises:
            TypeError, ValueError: An argument is not what is allowed, or a server is there twice.

        Source: "Distributed Locks with Redis" (Redis documentation), the Redlock algorithm.
        """
        from ._store import _server

        servers = _server.checked_nodes(nodes)
        if not isinstance(fencing, bool):
            raise TypeError(f"fencing must be True or False; got {fencing!r}")
        client = cls(
            servers[0].redis,
            prefix=prefix,
            ttl=ttl,
            wait_timeout=wait_timeout,
            request_timeout=request_timeout,
            label=label,
            observer=observer,
        )
        client._servers = servers
        client._new_store = functools.partial(_server.quorum_of, fencing=fencing)
        return client

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        wait_timeout: float | Unset | None = UNSET,
        auto_extend: bool = True,
        retry: Backoff | None = None,
        on_lost: Literal["cancel", "raise"] = "cancel",
        max_hold: float | None = None,
        reentrant: bool = False,
        hold_at_least: float | None = None,
    ) -> Lock:
        """A lock on *name*. No server calls.

        Args:
            name: Any non-empty str of at most 512 UTF-8 bytes.
            ttl: Seconds, at least 0.01. Default: the client's.
            wait_timeout: Seconds that acquiring may take, at least 0; None: for ever. Default:
                the client's.
            auto_extend: Whether a watchdog extends the lease until it is released.
            retry: None: woken by hand-off (over a quorum, where nobody queues: `Backoff()`). A
                `Backoff`: waits by polling, in the same queue.
            on_lost: "cancel": the body of `async with` is cancelled when the lease is lost, and
                `LeaseLostError` raised in place of that; "raise": only raised at its end.
            max_hold: Seconds, at least ttl, after which the lease is lost however alive its
                holder is. Default: no limit.
            reentrant: Whether the task that has the lease may enter again, by any lock of this
                client with that name and reentrant=True: the same lease, without a server call,
                until as many blocks are left, or releases made. The options of the first stay.
            hold_at_least: Seconds from the grant, at least 0.001 and at most max_hold, until which
                the name stays taken after the release. Default: it is free at once.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        terms = self._terms(ttl, auto_extend, on_lost, max_hold)
        if reentrant is not False or hold_at_least is not None:
            terms = terms._replace(
                reentrant=checked_reentrant(reentrant),
                hold_at_least=checked_hold(hold_at_least, max_hold),
            )
        if retry is not None and not isinstance(retry, Backoff):
            raise TypeError(f"retry must be a Backoff or None; got {retry!r}")
        return Lock(
            self._bound,
            name,
            _names.keys(self._prefix, _names.checked_name(name)),
            terms,
            wait_timeout=wait_of(wait_timeout, self._wait_timeout),
            retry=retry,
        )

    def all(
        self,
        *names: str,
        ttl: float | None = None,
        wait_timeout: float | Unset | None = UNSET,
        auto_extend: bool = True,
        retry: Backoff | None = None,
        on_lost: Literal["cancel", "raise"] = "cancel",
        max_hold: float | None = None,
    ) -> AllLocks:
        """A lock on all of *names*, or on none. No server calls.

        Args:
            names: At least one, as for `lock`; one that is there twice counts once.
            ttl: Seconds, as for `lock`, like the rest.
            wait_timeout: Seconds that acquiring all of them may take; 0: one request for each.
            auto_extend: Whether the leases are extended until they are released.
            retry: How each is waited for.
            on_lost: What happens to the body of `async with` when one of the leases is lost.
            max_hold: Seconds after which each lease is lost.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        if not names:
            raise ValueError("all() takes at least one name; got none")
        tells_body = checked_on_lost(on_lost) == "cancel"
        locks = {
            _names.checked_name(name): self.lock(
                name, ttl=ttl, auto_extend=auto_extend, retry=retry, max_hold=max_hold
            )
            for name in names
        }
        return AllLocks(
            list(locks.values()),
            wait_timeout=wait_of(wait_timeout, self._wait_timeout),
            tells_body=tells_body,
        )

    def election(
        self,
        name: str,
        *,
        ttl: float | None = None,
        wait_timeout: float | Unset | None = UNSET,
        retry: Backoff | None = None,
        on_lost: Literal["cancel", "raise"] = "cancel",
        max_hold: float | None = None,
    ) -> Election:
        """An election of one leader for *name*. No server calls.

        Args:
            name: As for `lock`; a lock of that name and the election exclude each other.
            ttl: Seconds until the next one leads where a leader died; as for `lock`, like the rest.
            wait_timeout: Seconds that a candidate waits.
            retry: How candidates are woken.
            on_lost: What happens to the body of `async with` when its term ends.
            max_hold: Seconds that a term lasts at most.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        lock = self.lock(
            name,
            ttl=ttl,
            wait_timeout=wait_timeout,
            retry=retry,
            on_lost=on_lost,
            max_hold=max_hold,
        )
        return Election(lock)

    def reader(self, name: str, **options: Unpack[SharedOptions]) -> Reader:
        """A lock on *name* that readers share, and that keeps writers out. No server calls.

        Args:
            name: As for `lock`, but of another kind: one name is only ever locked in one way.
            options: As those of `lock`.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        return Reader(self._like(name, options), "r")

    def writer(self, name: str, **options: Unpack[SharedOptions]) -> Writer:
        """A lock on *name* that keeps readers and other writers out. No server calls.

        Args:
            name: As for `reader`.
            options: As those of `lock`.

        Raises:
            TypeError, ValueError: An argument is not what is allowed.
        """
        return Writer(self._like(name, options), "w")

    def semaphore(self, name: str, *, permits: int, **options: Unpack[SharedOptions]) -> Semaphore:
        """A lock on *name* that at most *permits* hold at once. No server calls.

        Args:
            name: As for `lock`, but of another kind: one name is only ever locked in one way.
            permits: From 1 to 1,000,000,000; the cost of acquiring grows with those in use.
            options: As those of `lock`.

        Raises:
            TypeError, ValueError: An argument is not what is allowed; or the client is a quorum.
        """
        permits = checked_permits(permits)
        if len(self._servers) > 1:
            raise ValueError(
                "a semaphore is unsound over a quorum: each holder needs a majority of the nodes "
                "only, so that more than `permits` of them can have one; use one server"
            )
        return Semaphore(self._like(name, options), permits)

    def locked(
        self, template: str, **options: Unpack[LockOptions]
    ) -> Callable[[Callable[_P, Awaitable[_T]]], Callable[_P, Coroutine[Any, Any, _T]]]:
        """A decorator: each call of the async function runs under the lock that *template* names.

        No server calls here; a call makes those of `Lock.acquire` and `Lease.release`, and raises
        what they do.

        Args:
            template: A name with fields like `{customer_id}` or `{order.id}`, which the call's
                arguments fill in.
            options: Those of `lock`.

        Raises:
            TypeError: The function is not async, or an option is not what is allowed.
            ValueError: A field is not a parameter, or an option is out of range.
        """
        if not isinstance(template, str):
            raise TypeError(
                'locked() takes a template, as in @locks.locked("customer:{customer_id}"); '
                f"got {template!r}"
            )
        self.lock("options are checked here", **options)

        def decorate(
            function: Callable[_P, Awaitable[_T]],
        ) -> Callable[_P, Coroutine[Any, Any, _T]]:
            if not inspect.iscoroutinefunction(function):
                raise TypeError(f"locked() takes async functions; got {function!r}")
            names = Template(template, function)

            @functools.wraps(function)
            async def under_lock(*args: _P.args, **kwargs: _P.kwargs) -> _T:
                async with self.lock(names.name(args, kwargs), **options):
                    return await function(*args, **kwargs)

            return under_lock

        return decorate

    async def aclose(self) -> None:
        """Leave the queues, then release the leases, then end every task and connection.

        Waiters and new acquisitions get `RuntimeError`. A lease with a running body is lost
        (CLOSED), and released when its body has left, at most 5 s later, else left to its ttl.

        At most 6 s and three times `request_timeout`.

        Raises:
            RuntimeError: It is bound to another event loop that is still open.

        Cancellation: it is finished all the same, and waited for.
        """
        closing = self._begin_closing()
        cancelled = await outlast(closing, within=_CLOSE_S + 3 * self._request_timeout)
        if cancelled is not None:
            raise cancelled
        if closing.done() and not closing.cancelled():
            closing.result()  # Its own errors, a user's pool's for example, are the caller's.

    async def __aenter__(self) -> Self:
        self._forget_closed_loop()
        if self._closing is not None:
            raise RuntimeError("this LockClient is being closed")
        self._is_closed = False
        self._bound()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if may_await(error):
            await self.aclose()
        elif self._session is not None and running_loop() is self._session.loop:
            self._begin_closing()
        elif self._session is not None:
            self._session.disown()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "new" if self._session is None else "open"
        return f"<LockClient {state} prefix={self._prefix!r}>"

    def _like(self, name: str, options: SharedOptions) -> Lock:
        unknown = options.keys() - SharedOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"this kind of lock has no option {min(unknown)!r}")
        return self.lock(name, **options)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop | None:
        return None if self._session is None else self._session.loop

    def _terms(
        self, ttl: float | None, auto_extend: bool, on_lost: str, max_hold: float | None
    ) -> Terms:
        ttl = self._ttl if ttl is None else _clock.ttl_seconds("ttl", ttl)
        if not isinstance(auto_extend, bool):
            raise TypeError(f"auto_extend must be True or False; got {auto_extend!r}")
        if max_hold is not None:
            max_hold = _clock.seconds("max_hold (at least ttl)", max_hold, minimum=ttl)
        return Terms(ttl, auto_extend, checked_on_lost(on_lost), max_hold, self._request_timeout)

    def _bound(self) -> Session:
        """The session of the running loop; begun by the first await.

        Raises:
            RuntimeError: Closed, or bound to another loop.
        """
        loop = asyncio.get_running_loop()
        session = self._session
        if session is not None and session.loop is loop:
            return session
        if self._is_closed:
            raise RuntimeError("this LockClient is closed; `async with client` opens it again")
        if session is not None:
            self._leave_closed_loop(session)
        self._session = session = self._new_session()
        return session

    def _leave_closed_loop(self, session: Session) -> None:
        """A loop that was closed under us counts as left; any other is still in use."""
        if not session.loop.is_closed():
            raise RuntimeError(
                "this LockClient is bound to another event loop, that of its first await; "
                "close it there, or use one client for each loop"
            )
        _log.warning("an event loop was closed before its LockClient: await aclose() first")
        session.disown()
        self._session = None
        self._renew_servers()

    def _begin_closing(self) -> asyncio.Task[None]:
        self._forget_closed_loop()
        loop = asyncio.get_running_loop()
        if self._closing is None:
            if self._session is not None and self._session.loop is not loop:
                self._leave_closed_loop(self._session)
            session, self._session, self._is_closed = self._session, None, True
            self._closing = loop.create_task(
                self._close(session, running_task()), name="aiodlock closing"
            )
        return self._closing

    def _forget_closed_loop(self) -> None:
        """A close that its loop did not live to see is over, as is one that has ended."""
        closing = self._closing
        if closing is not None and (closing.done() or closing.get_loop().is_closed()):
            self._closing = None
            if not closing.done():
                self._renew_servers()

    def _renew_servers(self) -> None:
        for server in self._servers:
            server.renew()

    def _new_session(self) -> Session:
        client_id = _names.new_client_id()
        label = self._label or _names.label_of_host(socket.gethostname(), os.getpid())
        store = self._new_store(
            self._servers,
            prefix=self._prefix,
            client_id=client_id,
            request_timeout=self._request_timeout,
        )
        return Session(store, _names.holder_of(label, client_id), self._audience)

    async def _close(self, session: Session | None, caller: asyncio.Task[Any] | None) -> None:
        async with contextlib.AsyncExitStack() as stack:  # Each is closed, whichever of them fails.
            for server in self._servers:
                stack.push_async_callback(server.aclose)
            if session is not None:
                await session.close(caller)

    def _forget_parent(self) -> None:
        """In a forked child: nothing inherited is closed or written, for the parent uses it."""
        if self._session is not None:
            self._session.disown()
        _inherited.append((self._session, [server.inherit() for server in self._servers]))
        self._session = self._closing = None


def _forget_parents() -> None:
    for client in tuple(_clients):
        try:
            client._forget_parent()
        except Exception:  # One that fails must not keep the others from it.
            _log.exception("a LockClient could not be taken over by a forked child")


_clients: weakref.WeakSet[LockClient] = weakref.WeakSet()
# What a forked child inherited stays alive: its destruction would close the parent's sockets.
# Bound: one for each client and fork.
_inherited: list[object] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)
