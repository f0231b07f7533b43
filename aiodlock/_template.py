"""A lock's name with fields that a function's arguments fill in."""

from __future__ import annotations

import inspect
import re
import string
from collections.abc import Callable
from typing import Any, Final

from . import _names

_FIELD: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class Template:
    """`"customer:{customer.id}"`, checked against the parameters of one function.

    Raises:
        ValueError: It is no format string, a field is not a (dotted) name of a parameter, or it
            cannot become a lock's name.
    """

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self._text = text
        self._signature = inspect.signature(function)
        if not self._has_fields(text):
            _names.checked_name(text.format())

    def name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The name for one call."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._text.format(**bound.arguments)

    def _has_fields(self, text: str) -> bool:
        """Check the fields of *text*, those inside format specs too: are there any?"""
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ValueError(
                f'template {self._text!r} must be a format string like "order:{{order_id}}" '
                f"({{{{ and }}}} stand for braces): {error}"
            ) from None
        found = False
        for _, field, spec, _ in parts:
            if field is not None:
                found = True
                self._check(field)
                self._has_fields(spec or "")
        return found

    def _check(self, field: str) -> None:
        parameters = self._signature.parameters
        if not _FIELD.fullmatch(field) or field.partition(".")[0] not in parameters:
            raise ValueError(
                f"template {self._text!r}: {{{field}}} is no parameter of the function; its "
                f"fields must be its parameters ({', '.join(parameters)}), dotted or not"
            )
