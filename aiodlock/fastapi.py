"""Locks in FastAPI: a lease as a dependency, with an HTTP answer for each of its outcomes."""

# Without `from __future__ import annotations`: FastAPI has to see the types of inner functions.

import contextlib
import functools
import inspect
import logging
import string
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import fastapi
from fastapi import Depends, FastAPI, WebSocket, params
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.requests import HTTPConnection
from fastapi.responses import JSONResponse
from fastapi.websockets import WebSocketState
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from . import _names
from ._client import LockClient
from ._errors import LeaseLostError, LockError, LockTimeout, ServerUnreachable
from ._lease import Lease
from ._template import Template

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
            `ServerUnreachable` (503). `LeaseLostError` is a 409, other errors of a lock a 500.

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
        options: Those of `LockClient.lock`.

    Raises:
        TypeError, ValueError: An argument is not what is allowed. A field that is no path
            parameter is a ValueError at the first request, when FastAPI first shows the route.

    In a request: LockTimeout, ServerUnreachable, LeaseLostError, NotAllowedError, NameTakenError;
    RuntimeError without `install`, or when the client is closed.

    Cancellation: the lock, or the place in the queue, is given back at once. FastAPI cancels
    nothing because a client has gone, except a response that is being streamed.
    """
    if wait_timeout is None:
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
        _log.log(level, "%r answered with %d: %s", connection.url.path, self.status, error)
        websocket = connection if isinstance(connection, WebSocket) else None
        if websocket and websocket.application_state is WebSocketState.CONNECTED:
            await websocket.close(1013 if self.headers else 1011, self.detail)
            return None
        return JSONResponse({"detail": self.detail}, self.status, self.headers)


@functools.lru_cache(maxsize=1024)
def _holding(
    name: str | Callable[..., Any], locks: LockClient | None, options: tuple[tuple[str, Any], ...]
) -> Callable[..., AsyncIterator[Lease]]:
    """The dependency; the same one for equal arguments, for FastAPI to share."""
    name_of = _PathName(name) if isinstance(name, str) else name
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
            raise _invalid(_connection, [problem]) from error
        async with client.lock(_name, **dict(options)).acquire() as lease:
            yield lease

    return locked


class _PathName:
    """A dependency: the name that a template and the path parameters of a request make."""

    def __init__(self, text: str) -> None:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        self._text = _names.checked_name(text)
        self._fields = sorted({name.partition(".")[0] for name in fields})
        self._template = Template(text, _function_of(filter(str.isidentifier, self._fields)))

    async def __call__(self, _connection: HTTPConnection) -> str:
        given = _connection.path_params
        for name in self._fields:
            if name not in given:
                raise ValueError(
                    f"the lock's name {self._text!r} has the field {{{name}}}, but the path "
                    f"parameters of this route are: {', '.join(given) or 'none'}"
                )
        return self._template.name((), {name: _read(_connection, name) for name in self._fields})


def _function_of(parameters: Iterable[str]) -> Callable[..., None]:
    """A function with these parameters, as a template wants to see one."""

    def function() -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _read(connection: HTTPConnection, name: str) -> object:
    """A path parameter as the route reads it: 042 and 42, two texts, may be one number."""
    try:
        reader = _reader(connection.scope["endpoint"], name)
        return reader.validate_python(connection.path_params[name])
    except ValidationError as error:
        problems = [
            {**problem, "loc": ("path", name, *problem["loc"])}
            for problem in error.errors(include_url=False)
        ]
        raise _invalid(connection, problems) from error


@functools.lru_cache(maxsize=1024)
def _reader(endpoint: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(next(_types(endpoint, name), Any))


def _types(function: Callable[..., Any], name: str) -> Iterator[Any]:
    """The types that *function*, then its dependencies, give to the path parameter *name*."""
    dependencies = []
    for parameter in inspect.signature(function).parameters.values():
        hint = _evaluated(parameter.annotation, function)
        base, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        infos = [mark for mark in (*marks, parameter.default) if isinstance(mark, FieldInfo)]
        depends = [mark for mark in (*marks, parameter.default) if isinstance(mark, params.Depends)]
        if depends:
            dependencies.append(depends[-1].dependency or base)
        elif name == next((info.alias for info in infos if info.alias), parameter.name):
            yield functools.reduce(
                lambda inner, mark: Annotated[inner, mark],
                (mark for mark in marks if not isinstance(mark, FieldInfo)),
                Any if base is parameter.empty else base,
            )
    for dependency in dependencies:
        yield from _types(dependency, name)


def _evaluated(hint: Any, function: Callable[..., Any]) -> Any:
    """As FastAPI does it, which lets a name pass that is there for type checkers only."""
    if isinstance(hint, str):
        with contextlib.suppress(NameError):
            hint = eval(hint, getattr(inspect.unwrap(function), "__globals__", {}))
    return getattr(hint, "__value__", hint)  # What stands behind a `type` statement.


def _invalid(connection: HTTPConnection, problems: list[Any]) -> Exception:
    """What FastAPI raises itself where a request is not what was declared: a 422."""
    if connection.scope["type"] == "websocket":
        return WebSocketRequestValidationError(problems)
    return RequestValidationError(problems)
