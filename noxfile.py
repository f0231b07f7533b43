"""One session per promise: ``nox -s lint typing layers tests``."""

from __future__ import annotations

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True  # skipped is not passed

PYTHONS = ["3.11", "3.12", "3.13"]
FASTAPI_IS_REFUSED = """
try:
    import aiodlock.fastapi
except ImportError as error:
    assert "needs FastAPI 0.121" in str(error), error
else:
    raise SystemExit("a FastAPI without scopes was not refused")
"""


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


@nox.session(python=PYTHONS[0])
def docs(session: nox.Session) -> None:
    """The pages build, and no link on them is broken; the result is in site/."""
    session.install("--group", "docs")
    session.run("zensical", "build", "--clean", "--strict")
    session.run("python", ".ci/check_site.py", "site")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The tests pass; arguments behind ``--`` go to pytest."""
    install(session)
    session.run("pytest", *session.posargs)


@nox.session(python=PYTHONS[0])
@nox.parametrize("version", ["0.121.0", "newest"])
def fastapi(session: nox.Session, version: str) -> None:
    """The FastAPI door works with the oldest FastAPI that has scopes, and with the newest."""
    install(session)
    arguments = session.posargs or ["tests/test_fastapi.py", "docs/how-to/fastapi.md"]
    if version == "newest":
        session.install("--upgrade", "fastapi", "httpx2", "uvicorn")
    else:
        session.install("fastapi==0.120.4", "httpx")  # Its TestClient knows no httpx2.
        session.run("python", "-c", FASTAPI_IS_REFUSED)
        session.install(f"fastapi=={version}")
        # Its TestClient asks anyio for a name that has moved since.
        moved = "ignore:The anyio.abc.BlockingPortal:DeprecationWarning"
        arguments = ["-W", moved, *arguments]
    session.run("pytest", *arguments)
