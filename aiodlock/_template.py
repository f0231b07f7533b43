"""A lock's name with fields that a function's arguments fill in."""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable
from typing import Any, Final

_FIELD: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Template:
    """`"customer:{customer.id}"`, checked against the parameters of one function.

    Raises:
        ValueError: A field is not a (dotted) name of a parameter.
    """

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        if not isinstance(text, str):
            raise TypeError(f"a template must be a str; got {text!r}")
        self._text = text
        self._signature = inspect.signature(function)
        for _, field, _, _ in string.Formatter().parse(text):
            if field is not None:
                self._check(field)

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name for one call."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._text.format(**bound.arguments)

    def _check(self, field: str) -> None:
        parameters = self._signature.parameters
        allowed = f"its fields must be parameters ({', '.join(parameters)}), dotted or not"
        if not _FIELD.fullmatch(field) or field.partition(".")[0] not in parameters:
            raise ValueError(f"template {self._text!r}: {{{field}}} is none; {allowed}")
