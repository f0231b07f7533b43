"""A lock's name with fields that a request's path fills in: what `aiodlock.fastapi` needs of it."""

# Without `from __future__ import annotations`: FastAPI has to see the types of `__call__`.

import contextlib
import functools
import inspect
import string
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, get_args, get_origin

from fastapi import params
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.requests import HTTPConnection
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from . import _names
from ._template import Template


class PathName:
    """A dependency: the name that a template and the path parameters of a request make."""

    def __init__(self, text: str) -> None:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        self._text = _names.checked_name(text)
        self._fields = sorted({name.partition(".")[0] for name in fields})
        self._template = Template(text, _function_of(filter(str.isidentifier, self._fields)))

    async def __call__(self, _connection: HTTPConnection) -> str:
        # Its underscore keeps the parameter from being taken for one of the path.
        given = _connection.path_params
        for name in self._fields:
            if name not in given:
                raise ValueError(
                    f"the lock's name {self._text!r} has the field {{{name}}}, but the path "
                    f"parameters of this route are: {', '.join(given) or 'none'}"
                )
        return self._template.name((), {name: _read(_connection, name) for name in self._fields})


def invalid(connection: HTTPConnection, problems: list[Any]) -> Exception:
    """What FastAPI raises itself where a request is not what was declared: a 422."""
    if connection.scope["type"] == "websocket":
        return WebSocketRequestValidationError(problems)
    return RequestValidationError(problems)


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
        raise invalid(connection, problems) from error


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
