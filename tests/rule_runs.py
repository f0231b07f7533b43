"""Runs our tests in processes of their own, with at most one fault each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from tests.rules import Proof

ROOT: Final = Path(__file__).parent.parent
# Most of a test's time is waiting, so that there may be more processes than cores.
PROCESSES: Final = 6
RUN_LIMIT_S: Final = 20.0
ALL_LIMIT_S: Final = 240.0

_TOLD: Final = pytest.StashKey[list[BaseException]]()


class Outcome(NamedTuple):
    """What one run of a test came to.

    Attributes:
        proof: The fault's number in the register; -1: the code as it is.
        errors: The types of what failed, with their bases; empty: it passed.
        text: The first line of what failed.
        took_s: Seconds.
    """

    check: str
    proof: int
    errors: list[str]
    text: str
    took_s: float


def outcomes(numbers: Sequence[int], register: str = "tests.rules:PROOFS") -> list[Outcome]:
    """Run the check of each of these proofs: once as the code is, once with each fault.

    Args:
        numbers: Which of them.
        register: The module of the proofs and their name there.

    Raises:
        AssertionError: A process failed as a whole, or did not end.
    """
    proofs, checks = _proofs(register), dict[str, list[int]]()
    for number in numbers:
        checks.setdefault(proofs[number].check, []).append(number)
    shares: list[list[str]] = [[] for _ in range(min(PROCESSES, len(checks)))]
    for index, check in enumerate(sorted(checks, key=lambda check: -len(checks[check]))):
        shares[index % len(shares)].append(check)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        runs = []
        for index, share in enumerate(shares):
            wanted = [number for check in share for number in checks[check]]
            runs.append(stack.enter_context(_run(share, wanted, register, Path(place, f"{index}"))))
        end = time.monotonic() + ALL_LIMIT_S
        return [outcome for run in runs for outcome in run.outcomes(end - time.monotonic())]


class _Run(NamedTuple):
    process: subprocess.Popen[str]
    told: Path

    def outcomes(self, within: float) -> Iterator[Outcome]:
        try:
            output, _ = self.process.communicate(timeout=within)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"tests with faults did not end in {ALL_LIMIT_S} s") from error
        assert self.process.returncode == 0, output
        for line in self.told.read_text().splitlines():
            yield Outcome(*json.loads(line))


@contextmanager
def _run(
    checks: Sequence[str], numbers: Sequence[int], register: str, told: Path
) -> Iterator[_Run]:
    # A native traceback, for CPython 3.11 may fail to parse what pytest would show.
    plugin = ("-p", "tests.rule_runs", "-p", "no:cacheprovider", "-q", "--tb=native")
    which = ("--faults", ",".join(map(str, numbers)), "--faults-of", register)
    where = ("--faults-told", str(told))
    files = {check.partition("::")[0] for check in checks}
    process = subprocess.Popen(
        # Whole files, for pytest stops at a test that there is not.
        [sys.executable, "-m", "pytest", "-m", "", *plugin, *which, *where, *sorted(files)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _Run(process, told)
    finally:
        process.kill()
        process.communicate()


def _proofs(register: str) -> Sequence[Proof]:
    module, _, name = register.partition(":")
    proofs: Sequence[Proof] = getattr(importlib.import_module(module), name)
    return proofs


# From here on a plugin of the process with the faults.


class StuckError(Exception):
    """A test with a fault hangs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the process is told what to do."""
    parser.addoption("--faults", default="")
    parser.addoption("--faults-of")
    parser.addoption("--faults-told")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Each test as the code is, and then with each of its faults."""
    told = Path(session.config.getoption("--faults-told"))
    items = {item.nodeid: item for item in session.items if isinstance(item, pytest.Function)}
    proofs = _proofs(session.config.getoption("--faults-of"))
    numbers = [int(number) for number in session.config.getoption("--faults").split(",")]
    with told.open("w") as file:
        for check in dict.fromkeys(proofs[number].check for number in numbers):
            item = items.get(check)
            outcomes = [_sound(check, item)]
            for number in numbers:
                if proofs[number].check == check:
                    fault = proofs[number].fault.applied()
                    outcomes.append(_outcome(check, number, item, fault))
            for outcome in outcomes:
                print(json.dumps(outcome), file=file)
    session.testsfailed = 0
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """No test hangs for ever."""

    def stuck(signum: int, frame: FrameType | None) -> None:
        raise StuckError(f"it hangs for {RUN_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stuck)
    # Again and again, for the loop may take an exception for that of a callback.
    signal.setitimer(signal.ITIMER_REAL, RUN_LIMIT_S, 1.0)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what was raised, at the end of a test's fixtures too."""
    if call.excinfo is not None:
        item.stash.setdefault(_TOLD, []).append(call.excinfo.value)
    return (yield)


def _sound(check: str, item: pytest.Function | None) -> Outcome:
    """As the code is; tried twice, for other processes make this one wait."""
    outcome = _outcome(check, -1, item, nullcontext())
    return _outcome(check, -1, item, nullcontext()) if outcome.errors else outcome


def _outcome(
    check: str, number: int, item: pytest.Function | None, fault: AbstractContextManager[Any]
) -> Outcome:
    if item is None:
        return Outcome(check, number, ["LookupError"], "no such test", 0.0)
    began = time.monotonic()
    item.stash[_TOLD] = []
    item._initrequest()
    with ExitStack() as stack:
        try:
            stack.enter_context(fault)
        except Exception as error:
            return Outcome(check, number, ["LookupError"], f"no such line: {error!r}", 0.0)
        # Whatever it shares with other tests ends too, but for the server of the session.
        following: Any = item.session
        runtestprotocol(item, log=False, nextitem=following)
    told = item.stash[_TOLD]
    errors = [name for error in told for name in names_of(error)]
    text = repr(told[0])[:200] if told else ""
    return Outcome(check, number, errors, text, time.monotonic() - began)


def names_of(error: BaseException) -> list[str]:
    """The names of an error's types, those within a group too."""
    if isinstance(error, BaseExceptionGroup):
        return [name for inner in error.exceptions for name in names_of(inner)]
    if isinstance(error, pytest.fail.Exception):  # As `raises` does where nothing was raised.
        return ["AssertionError"]
    return [cls.__name__ for cls in type(error).__mro__]
