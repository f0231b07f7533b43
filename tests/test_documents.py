"""How the blocks of README.md and docs/ are run: as a program that may await."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

import conftest
from aiodlock.testing import LockServer

Run = Callable[[str], dict[str, object]]


@pytest.fixture
def run_document(session_server: LockServer, tmp_path: Path) -> Iterator[Run]:
    """Runs every Python block of a text; gives back the namespace."""
    parser = CodeBlockParser(language="python", evaluator=conftest.run_block)
    opened: list[Document] = []

    def run(text: str) -> dict[str, object]:
        path = tmp_path / "page.md"
        path.write_text(text)
        document = Document.parse(str(path), parser)
        opened.append(document)
        document.namespace["session_server"] = session_server
        conftest.open_document(document.namespace)
        for example in document.examples():
            example.evaluate()
        return dict(document.namespace)

    yield run
    for document in opened:
        conftest.close_document(document.namespace)


def test_block_with_await_runs_in_the_loop_of_the_document(run_document: Run) -> None:
    """Two blocks share names and the loop; a shell block is not run."""
    seen = run_document(
        "```python\nimport asyncio\n"
        "first = asyncio.get_running_loop()\nawait asyncio.sleep(0)\n```\n"
        "```sh\nexit 1\n```\n"
        "```python\nasync with asyncio.timeout(1):\n"
        "    same = asyncio.get_running_loop() is first\n```\n"
    )
    assert seen["same"] is True


def test_block_with_a_main_program_runs_as_it_stands(run_document: Run) -> None:
    """``asyncio.run`` under ``if __name__ == "__main__"``, as in a file of its own."""
    seen = run_document(
        "```python\nimport asyncio\n\nasync def main():\n    return 7\n\n"
        'if __name__ == "__main__":\n    result = asyncio.run(main())\n```\n'
    )
    assert seen["result"] == 7


def test_block_that_names_the_usual_server_gets_the_test_server(
    run_document: Run, session_server: LockServer
) -> None:
    """With and without a database number behind it."""
    seen = run_document('```python\nurl = "redis://localhost:6379/0"\n```\n')
    assert seen["url"] == f"{session_server.url}/0"


def test_block_that_fails_shows_the_line_of_the_document(run_document: Run) -> None:
    """Where the reader would look for it."""
    with pytest.raises(ZeroDivisionError) as failure:
        run_document("# Title\n\nText.\n\n```python\na = 1\nawait_nothing = a / 0\n```\n")
    assert failure.traceback[-1].lineno + 1 == 7
