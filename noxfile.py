"""One session per promise: ``nox -s lint typing layers tests``."""

from __future__ import annotations

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True  # skipped is not passed

PYTHONS = ["3.11", "3.12", "3.13"]


def install(session: nox.Session) -> None:
    """The package, editable, with what development needs."""
    session.install("-e", ".", "--group", "dev")


@nox.session(python=PYTHONS[0])
def lint(session: nox.Session) -> None:
    """The code reads as agreed."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=PYTHONS[0])
def typing(session: nox.Session) -> None:
    """Everything is annotated, and the annotations are true."""
    install(session)
    session.run("mypy")


@nox.session(python=PYTHONS[0])
def layers(session: nox.Session) -> None:
    """The rooms import one way."""
    install(session)
    session.run("lint-imports")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests pass; arguments behind ``--`` go to pytest."""
    install(session)
    session.run("pytest", *session.posargs)
