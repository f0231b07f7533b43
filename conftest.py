"""The server that all tests share, and the rule that every Python block of the documents runs."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

from aiodlock.testing import LockServer, lock_server

URL_IN_DOCUMENTS = "redis://localhost:6379"


@pytest.fixture(scope="session")
def session_server() -> Iterator[LockServer]:
    """One real server for the whole run; tests take the fixture ``server``, which empties it."""
    with lock_server() as server:
        yield server


def run_block(example: Example) -> None:
    """Run one code block as a program that may ``await``, against the test server.

    All blocks of a document share one namespace and one loop, as the reader imagines it.
    """
    space = example.namespace
    url = space["session_server"].url
    source = str(example.parsed).replace(URL_IN_DOCUMENTS, url)
    # The line numbers of a failure are the document's.
    padding = "\n" * (example.line + example.parsed.line_offset)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(padding + source, example.path, "exec", flags=flags, dont_inherit=True)
    space["__name__"] = "__main__"
    if code.co_flags & inspect.CO_COROUTINE:
        space["_runner"].run(eval(code, space))
    else:
        exec(code, space)


def open_document(space: dict[str, Any]) -> None:
    """Give a document its loop."""
    space["_runner"] = asyncio.Runner()


def close_document(space: dict[str, Any]) -> None:
    """End it, with whatever tasks the blocks left."""
    space["_runner"].close()


pytest_collect_file = Sybil(
    parsers=[CodeBlockParser(language="python", evaluator=run_block)],
    patterns=["README.md", "docs/**/*.md", "docs/*.md"],
    setup=open_document,
    teardown=close_document,
    fixtures=["session_server"],
).pytest()
