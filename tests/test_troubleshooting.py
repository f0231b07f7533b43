"""The page on trouble: every exception of ours and every message of the core stands on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiodlock
import aiodlock.fencing
from tests.programs import ROOT

PAGE = (ROOT / "docs/reference/troubleshooting.md").read_text()
ALL_CODE = re.findall(r"`([^`\n]+)`", PAGE)
TELLERS = {"info", "warning", "error", "exception", "warn", "_warn"}
"""What logs or warns."""
ERRORS = {"RuntimeError", "LockTimeout", "NotAllowedError", "NameTakenError"}
"""What is raised with a text of its own; other errors name what they were given."""
VARIABLE = re.compile(r"%[-.\d]*[a-z]")
DOORS = {"cli", "fencing"}


def core_files() -> Iterator[Path]:
    """Every module but the doors."""
    package = ROOT / "aiodlock"
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        is_door = inside[0] in DOORS or (len(inside) == 1 and not inside[0].startswith("_"))
        if not is_door:
            yield path


def messages_of(source: str) -> Iterator[str]:
    """Each text that is logged, warned of or raised, with `...` for what varies."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args and called(node) in TELLERS | ERRORS:
            text = text_of(node.args[0])
            if text is not None:
                yield text


def called(call: ast.Call) -> str:
    """The last part of what is called."""
    function = call.func
    return str(getattr(function, "attr", None) or getattr(function, "id", ""))


def text_of(node: ast.expr) -> str | None:
    """A literal text, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return VARIABLE.sub("...", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values
        )
    return None


def is_told(message: str) -> bool:
    """Whether some code on the page is that message; `...` at its end may cut it short."""
    return any(
        message == code or (code.endswith("; ...") and message.startswith(code.removesuffix("...")))
        for code in ALL_CODE
    )


MESSAGES = sorted({text for path in core_files() for text in messages_of(path.read_text())})


@pytest.mark.parametrize("message", MESSAGES)
def test_page_tells_of_every_message_of_the_core(message: str) -> None:
    """Who meets one finds it by its words."""
    assert is_told(message)


@pytest.mark.parametrize(
    "error",
    [
        name
        for module in (aiodlock, aiodlock.fencing)
        for name in module.__all__
        if isinstance(getattr(module, name), type) and issubclass(getattr(module, name), Exception)
    ],
)
def test_page_tells_of_every_public_exception(error: str) -> None:
    """In the table by exception, at the begin of its own line."""
    assert f"\n| `{error}` | " in PAGE


def test_collector_finds_what_is_logged_warned_of_and_raised() -> None:
    """With one mark for each thing that varies; an error that is passed on has no text."""
    source = (
        '_log.warning("%s failed: %.1f s", a, b)\n'
        'warnings.warn(f"{a} is odd")\n'
        'raise RuntimeError("one " "text")\n'
        "raise RuntimeError(text)\n"
        'print("not this")\n'
    )
    assert sorted(messages_of(source)) == ["... failed: ... s", "... is odd", "one text"]


def test_collector_finds_messages_in_several_rooms() -> None:
    """A collector that looked at nothing would be content with any page."""
    assert len(MESSAGES) > 15
    assert not is_told("a message that nobody ever wrote")
