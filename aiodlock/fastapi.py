"""Locks in FastAPI: a lease as a dependency, with an HTTP answer for each of its outcomes."""

# Without `from __future__ import annotations`: FastAPI has to see the types of inner functions.

import functools
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

try:
    import fastapi
except ModuleNotFoundError:
    raise ImportError("aiodlock.fastapi needs FastAPI: pip install 'aiodlock[fastapi]'") from None
from fastapi import Depends, FastAPI, WebSocket
from fastapi.requests import HTTPConnection
from fastapi.responses import JSONResponse
from fastapi.websockets import WebSocketState

from . import _names
from ._client import LockClient
from ._errors import LeaseLostError, LockError, LockTimeout, ServerUnreachable
from ._lease import Lease
from ._path_name import PathName, invalid
from .fencing import StaleFenceError

__all__ = ["Locked", "install"]

_log = logging.getLogger("aiodlock")

if "scope" not in inspect.signature(Depends).parameters:
    raise ImportError(
        "aiodlock.fastapi needs FastAPI 0.121 or newer, the first with Depends(scope=...); "
        f"this is {fastapi.__version__}"
    )


def install(
    app: FastAPI, locks: LockClient, *, timeout_status: int = 423, retry_after: int = 1
) -> None:
    """Let the routes of *app* use `Locked`, on the client *locks*.

    No server calls. The client is kept as `app.state.aiodlock` and stays yours to close:
    `async with locks` in the app's lifespan. A mounted app needs a call of its own. Errors of locks
    that a handler takes itself are answered too; an exception handler of yours for one of them
    wins.

    Args:
        app: Not started yet.
        locks: Need not be open yet.
        timeout_status: Status for `LockTimeout`, 400 to 599.
        retry_after: Whole seconds, at least 0, in the header `Retry-After` of `LockTimeout` and
            `ServerUnreachable` (503). `LeaseLostError` and `fencing.StaleFenceError` are a 409,
            other errors of a lock a 500.

    Raises:
        TypeError, ValueError: An argument is not what is allowed.
        RuntimeError: The app has started: it would not see the handlers any more.
    """
    if not isinstance(locks, LockClient):
        raise TypeError(f"locks must be a LockClient; got {locks!r}")
    if type(timeout_status) is not int or not 400 <= timeout_status <= 599:
        raise ValueError(f"timeout_status must be an int from 400 to 599; got {timeout_status!r}")
    if type(retry_after) is not int or retry_after < 0:
        raise ValueError(f"retry_after must be whole seconds, at least 0; got {retry_after!r}")
    if app.middleware_stack is not None:
        raise RuntimeError("the app has started: call install(app, locks) where you make the app")
    app.state.aiodlock = locks
    again = {"Retry-After": str(retry_after)}
    for error, answer in {
        LockTimeout: _Answer(timeout_status, "Another holds this lock; try again.", again),
        ServerUnreachable: _Answer(503, "The lock server gave no answer; try again.", again),
        LeaseLostError: _Answer(409, "The lock was lost while the work was under way."),
        StaleFenceError: _Answer(409, "The lock was lost, and another has begun."),
        LockError: _Answer(500, "The lock cannot be used; the log says why."),
    }.items():
        if isinstance(app.exception_handlers.get(error, answer), _Answer):
            app.add_exception_handler(error, cast(Any, answer))  # It serves both kinds.


def Locked(  # noqa: N802 - reads as FastAPI's own Depends does
    name: str | Callable[..., Any],
    *,
    wait_timeout: float = 5.0,
    scope: Literal["function", "request"] = "function",
    locks: LockClient | None = None,
    **options: Any,
) -> Any:
    """A dependency: the request holds a lock, and its lease is the value.

    As in `lease: Annotated[Lease, Locked("invoice:{invoice_id}")]`. The server calls of
    `LockClient.lock`. Equal ones of one request share one lease.

    Args:
        name: A template whose fields are path parameters of the route, as it declares their types
            (`042` and `42` are one `int`), or a dependency that returns the name.
        wait_timeout: Seconds that acquiring may take, at least 0; never for ever.
        scope: "function": released before the response is sent, so that a lost lease becomes an
            error response. "request": after a streamed body and background tasks; a loss then
            breaks the body off.
        locks: Another client than the installed one.
        options: Those of `LockClient.lock`. In a `def` handler, a thread that cannot be
            cancelled, `on_lost` is "raise" by default.

    Raises:
        TypeError, ValueError: An argument is not what is allowed. A field that is no path
            parameter is a ValueError at the first request, when FastAPI first shows the route.

    In a request: LockTimeout, ServerUnreachable, LeaseLostError, NotAllowedError, NameTakenError;
    RuntimeError without `install`, or when the client is closed.

    Cancellation: the lock, or the place in the queue, is given back at once. FastAPI cancels
    nothing because a client has gone, except a response that is being streamed.
    """
    if wait_timeout in (None, math.inf):
        raise ValueError("wait_timeout must be in seconds: a request may not wait for ever")
    if scope not in ("function", "request"):
        raise ValueError(f'scope must be "function" or "request"; got {scope!r}')
    if locks is not None and not isinstance(locks, LockClient):
        raise TypeError(f"locks must be a LockClient; got {locks!r}")
    options["wait_timeout"] = wait_timeout
    # Mistakes come out here, rather than in a request. This client is never connected; the real
    # one's ttl is not known yet, so max_hold is measured at the smallest.
    LockClient.from_url("redis://", ttl=0.01).lock("options are checked here", **options)
    return Depends(_holding(name, locks, tuple(sorted(options.items()))), scope=scope)


@dataclass(frozen=True)
class _Answer:
    """An exception handler; says nothing of names or owner tokens, which are the log's."""

    status: int
    detail: str
    headers: dict[str, str] = field(default_factory=dict)

    async def __call__(self, connection: HTTPConnection, error: Exception) -> JSONResponse | None:
        level = logging.ERROR if self.status >= 500 else logging.INFO
        _log.log(
            level,
            "%r answered with %d: %s",
            connection.url.path,
            self.status,
            error,
            extra={"lock_name": getattr(error, "name", None)},
        )
        answer = JSONResponse({"detail": self.detail}, self.status, self.headers)
        if not isinstance(connection, WebSocket):
            return answer
        state, can_deny = connection.application_state, connection.scope.get("extensions") or {}
        if state is WebSocketState.CONNECTING and "websocket.http.response" in can_deny:
            await connection.send_denial_response(answer)
        elif state in (WebSocketState.CONNECTING, WebSocketState.CONNECTED):
            await connection.close(1013 if self.headers else 1011, self.detail)
        return None


@functools.lru_cache(maxsize=1024)
def _holding(
    name: str | Callable[..., Any], locks: LockClient | None, options: tuple[tuple[str, Any], ...]
) -> Callable[..., AsyncIterator[Lease]]:
    """The dependency; the same one for equal arguments, for FastAPI to share."""
    name_of = PathName(name) if isinstance(name, str) else name
    if not callable(name_of):
        raise TypeError(f"the name must be a template or a dependency; got {name!r}")

    async def locked(
        _connection: HTTPConnection, _name: Annotated[str, Depends(name_of)]
    ) -> AsyncIterator[Lease]:
        client: LockClient | None = locks or getattr(_connection.app.state, "aiodlock", None)
        if client is None:
            raise RuntimeError("call aiodlock.fastapi.install(app, locks) for this app first")
        try:
            _names.checked_name(_name)
        except ValueError as error:
            problem = {"type": "value_error", "loc": ("lock",), "msg": str(error), "input": _name}
            raise invalid(_connection, [problem]) from error
        own = dict(options)
        if not _is_async(_connection.scope["endpoint"]):
            # A thread goes on when its request is cancelled, without the dependencies it uses.
            own.setdefault("on_lost", "raise")
        async with client.lock(_name, **own).acquire() as lease:
            yield lease

    return locked


def _is_async(function: Callable[..., Any]) -> bool:
    called = (function, inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f) for f in called)
