"""Code with one line spoilt, to see that a check notices."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from aiodlock._store import _extensions, _requests, _shares
from aiodlock._store._wire import Script, digest, pack


@dataclass(frozen=True)
class Mutant:
    """One change of one script, for as long as it is ``applied()``.

    Attributes:
        script: The script's name.
        old: Text that occurs exactly once in it.
        new: What stands there instead.
    """

    script: str
    old: str
    new: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Whoever calls the script in this process calls the spoilt one."""
        script = script_of(self.script)
        sound = vars(script).copy()
        text = script.text
        spoilt = text.replace(self.old, self.new)
        assert (text.count(self.old), spoilt != text) == (1, True), f"no mutant: {self}"
        script.text = spoilt
        script.evalsha = _replaced(script.evalsha, digest(text), digest(spoilt))
        script.eval = _replaced(script.eval, text, spoilt)
        try:
            yield
        finally:
            vars(script).update(sound)


@contextmanager
def function_mutant(owner: type | ModuleType, name: str, old: str, new: str) -> Iterator[None]:
    """The function *name* of a class or a module with *new* where *old* stood, exactly once."""
    sound = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(sound))
    assert source.count(old) == 1, f"no mutant: {old!r} in {owner.__name__}.{name}"
    # As the module that it comes from, where annotations are not evaluated.
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(old, new), f"<mutant of {name}>", "exec", flags=flags)
    module = owner if isinstance(owner, ModuleType) else sys.modules[owner.__module__]
    space: dict[str, Any] = {}
    exec(code, vars(module), space)
    if isinstance(owner, ModuleType) and inspect.isfunction(sound):
        # Other modules have imported it by its name.
        sound_code, sound.__code__ = sound.__code__, space[name].__code__
        try:
            yield
        finally:
            sound.__code__ = sound_code
        return
    setattr(owner, name, space[name])
    try:
        yield
    finally:
        setattr(owner, name, sound)


def script_of(name: str) -> Script:
    """The script that every store in this process calls by that name."""
    (found,) = {
        value
        for module in (_requests, _extensions, _shares)
        for value in vars(module).values()
        if isinstance(value, Script) and value.name == name
    }
    return found


def text_of(name: str) -> str:
    """The script's text as it is sent now."""
    return script_of(name).text


def sha_of(name: str) -> bytes:
    """What its calls contain, for the rules of the proxy."""
    return digest(text_of(name)).encode()


def _replaced(packed: bytes, old: str, new: str) -> bytes:
    assert packed.count(pack(old)) == 1
    return packed.replace(pack(old), pack(new))
