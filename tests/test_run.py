"""`aiodlock run`: a command under a lock, whatever becomes of either."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable
from pathlib import Path
from signal import Signals
from typing import cast

import pytest
from redis.asyncio import Redis

from aiodlock import LeaseLostError, LockClient
from aiodlock.cli import _child, main
from aiodlock.cli._connecting import shown
from aiodlock.cli._run_course import _end_in_time
from aiodlock.cli._signals import Inbox
from aiodlock.testing import LockServer
from tests.holders import script_digest
from tests.keys import leftovers, ttls
from tests.proxy import ChaosProxy
from tests.quorums import Nodes
from tests.runs import FAMILY, LIMIT_S, STUBBORN, Run, is_alive, run, state_of
from tests.until import until

pytestmark = pytest.mark.deep

KEY = "aiodlock:{n}"
TTL_S = 1.5
# It tells the instants, on the clock that all processes of a machine share, for as long as it can.
TICKING_PROGRAM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    print(time.monotonic(), flush=True)
    time.sleep(0.005)
"""
TICKING = ("python3", "-S", "-c", TICKING_PROGRAM)
THREE_URLS = ("--url", "redis://h", "--url", "redis://i", "--url", "redis://j")
# It ends with 0 when it gets SIGUSR1.
UNTIL_TOLD = ("sh", "-c", "trap 'exit 0' USR1; echo ready; while :; do sleep 0.01; done")


# What the command has, and what its end means


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 3"], 3),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-program-anywhere"], 127),
        (["/etc/passwd"], 126),
    ],
)
async def test_run_ends_with_the_status_that_a_shell_would_give(
    server: LockServer, redis: Redis, command: list[str], code: int
) -> None:
    """It is released, however the command ended."""
    assert (await run(server.url, "n", "--", *command))[0] == code
    assert await leftovers(redis) == []


async def test_run_that_cannot_start_the_command_says_why(server: LockServer) -> None:
    """In one line, also with -q."""
    _, out, err = await run(server.url, "-q", "n", "--", "/nowhere/program")
    assert (out, err) == ("", "aiodlock: /nowhere/program: No such file or directory\n")


async def test_script_without_an_interpreter_line_is_run_by_the_shell(
    server: LockServer, tmp_path: Path
) -> None:
    """With its arguments and status, by its path or found in PATH: as `flock` has it."""
    script = tmp_path / "job"
    script.write_text('echo "$0 $1"; exit 5')
    script.chmod(0o755)
    path = {"PATH": f"{os.environ['PATH']}:{tmp_path}"}
    for name in (str(script), "job"):
        ended = await run(server.url, "n", "--", name, "one", environment=path)
        assert ended == (5, f"{script} one\n", "")


async def test_run_on_a_machine_that_lacks_something_ends_71(
    server: LockServer, redis: Redis
) -> None:
    """No process can be started: a sentence, and no lock stays."""
    python = """
import os, sys
from aiodlock.cli import main
def fail(*_, **__):
    raise OSError(11, "Resource temporarily unavailable")
os.posix_spawn = fail
sys.exit(main())
"""
    arguments = ("-c", python, "run", "--url", server.url, "n", "--", "true")
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=PIPE)
    _, err = await process.communicate()
    assert err == b"aiodlock: [Errno 11] Resource temporarily unavailable\n"
    assert process.returncode == 71
    assert await leftovers(redis) == []


def test_command_whose_output_finds_no_room_ends_71() -> None:
    """Also where only the end of the program would have written it."""
    command = f'"{sys.executable}" -m aiodlock doctor --url redis://127.0.0.1:1 >/dev/full'
    ended = subprocess.run(
        command, check=False, shell=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 71
    assert ended.stderr == "aiodlock: [Errno 28] No space left on device\n"


async def test_command_has_the_lease_in_its_environment(server: LockServer, redis: Redis) -> None:
    """The name, the fencing token, the holder; and no more of the owner token than that."""
    shell = "echo $AIODLOCK_NAME $AIODLOCK_FENCING_TOKEN $AIODLOCK_HOLDER; read _ || sleep 600"
    async with Run(server.url, "n", "--", "sh", "-c", shell) as running:
        name, fencing_token, holder = (await running.line()).split()
        value = str(await redis.get(KEY))
        assert name == "n"
        assert value.startswith(f"{holder}:")
        assert value.endswith(f"/{fencing_token}")


async def test_command_has_our_stdin_and_stdout_to_itself(server: LockServer) -> None:
    """Every word of ours goes to stderr, and without -v there is none where all goes well."""
    everything = "cat; echo out; echo err >&2"
    process = await asyncio.create_subprocess_shell(
        f'printf in | "$PYTHON" -m aiodlock run --url {server.url} n -- sh -c "{everything}"',
        env=os.environ | {"PYTHON": sys.executable},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert await process.communicate() == (b"inout\n", b"err\n")


async def test_command_has_the_descriptors_that_we_were_given(
    server: LockServer, tmp_path: Path
) -> None:
    """As with `flock` and `3>file`."""
    process = await asyncio.create_subprocess_shell(
        f'"$PYTHON" -m aiodlock run --url {server.url} n -- sh -c "echo three >&3" 3>three',
        env=os.environ | {"PYTHON": sys.executable},
        cwd=tmp_path,
    )
    assert await process.wait() == 0
    assert (tmp_path / "three").read_text() == "three\n"


async def test_command_is_told_of_a_closed_pipe_as_ever(server: LockServer) -> None:
    """SIGPIPE, which Python ignores, has its effect on the command."""
    code, out, _ = await run(server.url, "n", "--", "sh", "-c", "yes | head -n 1; echo $?")
    assert (code, out) == (0, "y\n0\n")
    shell = 'trap "" USR1; sh -c "kill -PIPE \\$\\$"; echo $?'
    assert (await run(server.url, "n", "--", "sh", "-c", shell))[1] == "141\n"


async def test_verbose_run_says_what_it_does(server: LockServer) -> None:
    """Waiting, got, ended: with the fencing token, without the owner token."""
    _, out, err = await run(server.url, "-v", "n", "--", "sh", "-c", "echo $AIODLOCK_FENCING_TOKEN")
    waiting, got, ended = err.splitlines()
    assert waiting == "aiodlock: waiting for 'n'"
    assert re.fullmatch(
        rf"aiodlock: got 'n' after [\d.]+ s, fencing token {out.strip()}, ttl 30 s", got
    )
    assert ended == "aiodlock: the command ended with 0, 'n' is released"


async def test_run_without_dashes_takes_the_rest_as_the_command(server: LockServer) -> None:
    """As `flock` does; the command's own options are its own."""
    assert (await run(server.url, "n", "echo", "-n", "a", "--", "b"))[1] == "a -- b"
    assert (await run(server.url, "n", "--", "echo", "--", "-n"))[1] == "-- -n\n"


# Wrong usage


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: NAME"),
        (["n"], "no COMMAND"),
        (["n", "--"], "no COMMAND"),
        (["n", "--", "", "argument"], "no COMMAND"),
        (["n", "-n", "--", "true"], "-n stands behind NAME"),
        (["-n", "-w", "1", "n", "--", "true"], "not allowed with"),
        (["-w", "soon", "n", "--", "true"], "invalid float"),
        (["-w", "-1", "n", "--", "true"], "wait_timeout"),
        (["-E", "256", "n", "--", "true"], "from 0 to 255"),
        (["--ttl", "soon", "n", "--", "true"], "invalid float"),
        (["--ttl", "0", "n", "--", "true"], "at least 0.01"),
        (["--ttl", "nan", "n", "--", "true"], "at least 0.01"),
        (["--max-hold", "1", "n", "--", "true"], "max_hold (at least ttl)"),
        (["--hold-at-least", "0", "n", "--", "true"], "hold_at_least"),
        (["--prefix", "{", "n", "--", "true"], "prefix"),
        (["", "--", "true"], "non-empty"),
        (["-q", "-v", "n", "--", "true"], "not allowed with"),
        (["--permits", "2", "--reader", "n", "--", "true"], "not allowed with"),
        (["--reader", "--writer", "n", "--", "true"], "not allowed with"),
        (["--permits", "0", "n", "--", "true"], "permits"),
        (["--permits", "some", "n", "--", "true"], "invalid int"),
        (["--permits", "2", "--hold-at-least", "9", "n", "--", "true"], "not for --permits"),
        (["--reader", "--hold-at-least", "9", "n", "--", "true"], "not for --reader"),
        (["--writer", "--hold-at-least", "9", "n", "--", "true"], "not for --writer"),
        (["--permits", "2", *THREE_URLS, "n", "--", "true"], "a semaphore is unsound"),
        (["--url", "http://h", "n", "--", "true"], "--url: not the URL of a server"),
        *(
            (["--url", url, "n", "--", "true"], "--url: not the URL of a server")
            for url in (
                *("redis://h?colour=red", "redis://h/prod", "redis://h/0/extra"),
                *("redis://h?protocol=9", "redis://h?encoding=nonsense", "redis://h?retry=3"),
                *("redis://h?credential_provider=x", "rediss://h?ssl_cert_reqs=foo"),
                *("redis://h/0?db=1&event_dispatcher=x", "redis://h?maint_notifications_config=x"),
            )
        ),
        (["--url", "redis://h", "--url", "redis://i", "n", "--", "true"], "3 or more"),
    ],
)
def test_run_used_wrongly_exits_64_and_says_what_is_allowed(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No server is asked: there is none."""
    monkeypatch.setenv("AIODLOCK_URL", "redis://localhost:1")
    assert _code_of_main("run", *argv) == 64
    assert message in capsys.readouterr().err


def test_run_without_a_server_exits_64_and_says_how_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is assumed: a machine without the variable must not lock a server of its own."""
    monkeypatch.delenv("AIODLOCK_URL", raising=False)
    assert main(["run", "n", "--", "true"]) == 64
    assert "AIODLOCK_URL" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["someone:hidden@{}", "{}/99"])
async def test_run_with_a_login_that_is_refused_ends_77_at_once(
    server: LockServer, place: str
) -> None:
    """It would wait for ever, and it can never be had."""
    url = f"redis://{place.format(f'127.0.0.1:{server.port}')}"
    code, _, err = await run(url, "n", "--", "true")
    assert (code, "the server refuses this login: " in err) == (77, True)


# Waiting


async def test_two_runs_of_one_name_are_never_inside_together(
    server: LockServer, tmp_path: Path
) -> None:
    """Each in its turn."""
    shell = "echo in >> journal; sleep 0.05; echo out >> journal"
    command = ("n", "--", "sh", "-c", f"cd {tmp_path}; {shell}")
    ended = await asyncio.gather(*(run(server.url, *command) for _ in range(4)))
    assert [code for code, _, _ in ended] == [0] * 4
    assert (tmp_path / "journal").read_text() == "in\nout\n" * 4


@pytest.mark.parametrize(
    ("options", "code"),
    [(["-n"], 75), (["--no-wait"], 75), (["-w", "0.2"], 75), (["-n", "-E", "9"], 9)],
)
async def test_run_that_does_not_get_the_lock_in_time_ends_without_the_command(
    server: LockServer, locks: LockClient, redis: Redis, options: list[str], code: int
) -> None:
    """75 or what -E says, and who holds it; nobody is left in the queue."""
    async with locks.lock("n") as lease:
        ended = await run(server.url, *options, "n", "--", "echo", "ran")
        assert ended[:2] == (code, "")
        assert lease.holder in ended[2]
        quiet = await run(server.url, "-q", *options, "n", "--", "echo", "ran")
        assert quiet == (code, "", "")
        assert await leftovers(redis, ignoring_tombstones=True) == [KEY]


async def test_run_waits_for_its_turn_and_begins_with_the_whole_ttl(
    server: LockServer, locks: LockClient, redis: Redis
) -> None:
    """A hand-off alone would leave it 6 s."""
    async with contextlib.AsyncExitStack() as stack:
        async with locks.lock("n"):
            command = (server.url, "-w", "60", "n", "--", *FAMILY)
            waiting = await stack.enter_async_context(Run(*command))
            await until(lambda: redis.pubsub_channels("aiodlock:inbox:*"), limit_s=10)
            # A poll that was answered since then is what a hand-off is trusted by.
            await _polled(redis)
            await _polled(redis)
        await waiting.began()
        assert await redis.pttl(KEY) > 20_000


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM", "USR1"])
async def test_signal_to_a_waiting_run_ends_it_and_its_place(
    server: LockServer, locks: LockClient, redis: Redis, name: str
) -> None:
    """128 + n, as if it had been the command; nothing of it is left in the queue."""
    number = Signals[f"SIG{name}"]
    async with locks.lock("n"), Run(server.url, "n", "--", "echo", "ran") as waiting:
        await until(lambda: _waiters(locks), limit_s=10)
        waiting.process.send_signal(number)
        assert await waiting.ended() == (128 + number, "", "")
        assert not await _waiters(locks)
        assert await leftovers(redis, ignoring_tombstones=True) == [KEY]


async def test_signal_while_the_lease_is_made_ready_keeps_the_command_from_beginning(
    server: LockServer, proxy: ChaosProxy, redis: Redis
) -> None:
    """The lock is ours by then, and is given up."""
    digest = await script_digest(redis, "extend")
    extension = proxy.delay_replies(1.5, matching=digest.encode(), n=1)
    async with Run(proxy.url, "n", "--", "echo", "ran") as running:
        await asyncio.wait_for(extension.used.wait(), 30)
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == (143, "", "")
        assert await leftovers(redis) == []


# Signals


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "TERM"])
async def test_signal_to_a_run_reaches_the_command_and_its_own(
    server: LockServer, redis: Redis, name: str
) -> None:
    """Both end of it; then the lock is free."""
    # A shell has its background processes ignore SIGINT and SIGQUIT; this one does not.
    code = "import subprocess, os; c = subprocess.Popen(['sleep', '600'])"
    python = f"{code}; print(os.getpid(), c.pid, flush=True); os.execvp('sleep', ['sleep', '600'])"
    number = Signals[f"SIG{name}"]
    async with Run(server.url, "n", "--", "python3", "-S", "-c", python) as running:
        await running.began()
        running.process.send_signal(number)
        assert (await running.ended())[0] == 128 + number
        await running.family_gone()
        assert await leftovers(redis) == []


async def test_signal_that_the_command_handles_leaves_its_status(server: LockServer) -> None:
    """A run passes the signal on and waits; it does not end by itself."""
    shell = "trap 'echo cleaned; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    async with Run(server.url, "n", "--", "sh", "-c", shell) as running:
        assert await running.line() == "ready"
        running.process.send_signal(signal.SIGTERM)
        assert (await running.ended())[:2] == (5, "cleaned\n")


@pytest.mark.parametrize("name", ["USR1", "ALRM"])
async def test_personal_signal_reaches_the_command_alone(server: LockServer, name: str) -> None:
    """A child that knows nothing of it would die of it."""
    python = f"""
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
def hear(*_):
    try:
        print(child.wait(0.2))
    except subprocess.TimeoutExpired:
        print("alive")
    child.kill()
    sys.exit(4)
signal.signal(signal.SIG{name}, hear)
print("ready", flush=True)
while True:
    signal.pause()
"""
    async with Run(server.url, "n", "--", "python3", "-S", "-c", python) as running:
        assert await running.line() == "ready"
        running.process.send_signal(Signals[f"SIG{name}"])
        assert (await running.ended())[:2] == (4, "alive\n")


async def test_signal_that_was_ignored_from_the_start_stays_so(server: LockServer) -> None:
    """As `nohup` wants it: for the run, and for the command."""
    process = await asyncio.create_subprocess_shell(
        f'trap "" HUP; exec "$PYTHON" -m aiodlock run --url {server.url} n --'
        ' sh -c "echo ready; kill -HUP \\$\\$; read _; echo alive"',
        env=os.environ | {"PYTHON": sys.executable},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    assert (await process.communicate(b"\n"))[0] == b"alive\n"
    assert process.returncode == 0


IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})"


def started_with(before: str, url: str, *arguments: str) -> Awaitable[Process]:
    """`aiodlock run`, by somebody who did *before* and has left it so."""
    python = f"""
import os, signal, sys
{before}
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    return asyncio.create_subprocess_exec(
        *(sys.executable, "-c", python, "-m", "aiodlock", "run", "--url", url, *arguments),
        stdout=PIPE,
    )


@pytest.mark.parametrize("before", [IGNORED, BLOCKED])
async def test_run_by_who_is_deaf_to_its_children_hears_the_end_of_the_command(
    server: LockServer, before: str
) -> None:
    """It is inherited, from daemons and from threads of other runtimes."""
    process = await started_with(before, server.url, "n", "--", "sh", "-c", "echo begun; exit 7")
    async with asyncio.timeout(LIMIT_S):
        assert (await process.communicate())[0] == b"begun\n"
    assert process.returncode == 7


async def test_run_by_who_has_blocked_sigterm_hears_it_and_the_command_has_it_blocked(
    server: LockServer, locks: LockClient
) -> None:
    """While it waits it ends of it; what it starts, it starts as it was started."""
    status = ("n", "--", "grep", "SigBlk", "/proc/self/status")
    process = await started_with(BLOCKED, server.url, *status)
    out, _ = await process.communicate()
    blocked = int(out.split()[1], 16)
    assert {number for number in Signals if blocked >> (number - 1) & 1} == {
        *(Signals.SIGCHLD, Signals.SIGTERM)
    }
    async with locks.lock("n"):
        process = await started_with(BLOCKED, server.url, "n", "--", "true")
        await until(lambda: _is_queued(locks), limit_s=LIMIT_S)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            assert await process.wait() == 143


async def test_stop_and_continue_reach_the_command(server: LockServer) -> None:
    """SIGTSTP stops it where nobody could make it go on: so it goes on at once, by SIGCONT."""
    # No shell, which is not stopped while it starts a process.
    python = """
import os, signal, sys
def go_on(*_):
    print("went on")
    sys.exit(6)
signal.signal(signal.SIGCONT, go_on)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
    async with Run(server.url, "n", "--", "python3", "-S", "-c", python) as running:
        await running.began()
        running.process.send_signal(signal.SIGTSTP)
        assert (await running.ended())[:2] == (6, "went on\n")


async def test_command_that_somebody_stops_keeps_its_lock(server: LockServer, redis: Redis) -> None:
    """SIGSTOP is an operator's, who lets it go on when he likes; SIGTERM still ends it."""
    async with Run(server.url, "--ttl", "0.5", "n", "--", *FAMILY) as running:
        await running.began()
        os.kill(running.pids[0], signal.SIGSTOP)
        value = await redis.get(KEY)
        first = await _extended(redis)
        second = await _extended(redis)
        assert (value, state_of(running.pids[0])) == (await redis.get(KEY), "T")
        assert first < second
        running.process.send_signal(signal.SIGTERM)
        assert (await running.ended())[0] == 143


# The end of a run that nobody can hear


async def test_killed_run_takes_the_command_and_its_own_along(
    server: LockServer, redis: Redis
) -> None:
    """Also where SIGTERM would not end them. The key is left to its ttl."""
    async with Run(server.url, "n", "--", *STUBBORN) as running:
        await running.began()
        assert len(running.pids) == 2
        running.process.kill()
        await running.family_gone()
        assert 0 < (await ttls(redis))[KEY] <= 30_000


async def test_killed_run_takes_a_command_along_that_left_its_group(server: LockServer) -> None:
    """Servers like to lead a session of their own; those they start are in it."""
    async with Run(server.url, "n", "--", "setsid", *STUBBORN) as running:
        await running.began()
        assert os.getsid(running.pids[0]) == running.pids[0] == os.getpgid(running.pids[1])
        running.process.kill()
        await running.family_gone()


async def test_command_dies_with_whatever_fails_in_us() -> None:
    """Before the error goes on, and with it the lock."""
    with Inbox() as inbox:
        with pytest.raises(ZeroDivisionError):
            async with (
                asyncio.timeout(LIMIT_S),
                _child.running(STUBBORN, os.environ, inbox, lambda: True) as child,
            ):
                raise ZeroDivisionError
        assert child.ended.result() == 137


async def test_run_leaves_no_guard_behind(server: LockServer) -> None:
    """It ends with the command; and with us, if we are killed."""
    async with Run(server.url, "n", "--", *FAMILY) as running:
        await running.began()
        guard = os.getpgid(running.pids[0])
        assert is_alive(guard)
        running.process.send_signal(signal.SIGTERM)
        await running.ended()
        assert not is_alive(guard)
    async with Run(server.url, "n", "--", *FAMILY) as running:
        await running.began()
        running.pids.append(os.getpgid(running.pids[0]))
        running.process.kill()
        await running.family_gone()


async def test_run_whose_guard_was_killed_says_so_once(server: LockServer) -> None:
    """It goes on: nobody but us could end the command with us."""
    async with Run(server.url, "-q", "n", "--", *FAMILY) as quiet:
        await quiet.began()
        quiet.process.terminate()
        assert (await quiet.ended())[2] == ""
    async with Run(server.url, "n", "--", *FAMILY) as running:
        await running.began()
        os.kill(os.getpgid(running.pids[0]), signal.SIGKILL)
        assert "the command's guard was killed" in await running.told("guard")
        running.process.terminate()
        assert "guard" not in (await running.ended())[2]


async def test_guard_outlives_the_signals_that_its_group_gets(server: LockServer) -> None:
    """A command that did not end of them still ends with us."""
    shell = "trap 'echo heard' HUP INT QUIT TERM; echo $$; while :; do sleep 0.01; done"
    async with Run(server.url, "n", "--", "sh", "-c", shell) as running:
        await running.began()
        for name in ("HUP", "INT", "QUIT", "TERM"):
            running.process.send_signal(Signals[f"SIG{name}"])
            assert await running.line() == "heard"
        assert is_alive(os.getpgid(running.pids[0]))
        running.process.kill()
        await running.family_gone()


# Loss of the lease


@pytest.mark.parametrize("command", [FAMILY, STUBBORN], ids=["willing", "stubborn"])
@pytest.mark.parametrize("taken_by", [None, "another"])
async def test_run_whose_key_is_taken_ends_the_command(
    server: LockServer, redis: Redis, taken_by: str | None, command: tuple[str, ...]
) -> None:
    """SIGTERM, soon SIGKILL, 74; what stands in the key is not touched."""
    async with Run(server.url, "--ttl", str(TTL_S), "-q", "n", "--", *command) as running:
        await running.began()
        if taken_by is None:
            await redis.delete(KEY)
        else:
            await redis.set(KEY, taken_by)
        code, _, err = await running.ended()
        await running.family_gone()
        assert code == 74
        assert "deleted" in err if taken_by is None else "something else stands" in err
        assert await redis.get(KEY) == taken_by


async def test_run_tells_the_command_first_and_lets_it_end_in_order(
    server: LockServer, redis: Redis
) -> None:
    """It has a moment to put away what it does; its own status is not ours any more."""
    shell = "trap 'echo put away; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    async with Run(server.url, "--ttl", str(TTL_S), "n", "--", "sh", "-c", shell) as running:
        assert await running.line() == "ready"
        await redis.delete(KEY)
        assert (await running.ended())[:2] == (74, "put away\n")


async def test_run_ends_what_is_left_of_the_group_with_the_command(
    server: LockServer, redis: Redis
) -> None:
    """A command that ends at SIGTERM may leave one that does not."""
    shell = "sh -c 'trap \"\" TERM; echo $PPID $$; sleep 600' & wait"
    async with Run(server.url, "--ttl", str(TTL_S), "n", "--", "sh", "-c", shell) as running:
        await running.began()
        await redis.delete(KEY)
        assert (await running.ended())[0] == 74
        await running.family_gone()


@pytest.mark.parametrize("stops", ["freeze", "kill"])
async def test_run_whose_server_stops_ends_the_command(server: LockServer, stops: str) -> None:
    """By its own clock, for the server says nothing; 74."""
    async with Run(server.url, "--ttl", str(TTL_S), "n", "--", *STUBBORN) as running:
        await running.began()
        if stops == "freeze":
            os.kill(server.process.pid, signal.SIGSTOP)
        else:
            server.process.kill()
        try:
            code, _, err = await running.ended()
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        await running.family_gone()
        assert code == 74
        assert "no server extends it; the command gets SIGTERM, and SIGKILL in" in err


async def test_command_is_dead_before_the_next_holder_begins(
    server: LockServer, proxy: ChaosProxy, locks: LockClient
) -> None:
    """Although it will not hear SIGTERM, and we hear no more of the server."""
    async with Run(proxy.url, "--ttl", str(TTL_S), "n", "--", *TICKING) as running:
        await running.line()
        proxy.black_hole()
        async with locks.lock("n"):
            next_began = time.monotonic()
        code, ticks, _ = await running.ended()
        assert code == 74
        assert float(ticks.splitlines()[-1]) < next_began


async def test_command_that_was_told_in_time_is_killed_if_another_has_the_lock(
    locks: LockClient, redis: Redis
) -> None:
    """Its grace was the end of a lease that was ours; it is not any more."""
    lease = await locks.lock("n", ttl=60).acquire()
    child = ChildByHand()
    lost = asyncio.create_task(lease.wait_lost())
    ending = asyncio.create_task(_end_in_time(cast(_child.Child, child), lease, lost, 20))
    await until(lambda: child.heard == ["end"])
    await redis.set(KEY, "another")
    with pytest.raises(LeaseLostError):
        await lease.extend()
    await asyncio.wait_for(ending, 10)  # Its lease had 58 s.
    assert child.heard == ["end", "kill"]


async def test_run_holds_no_longer_than_max_hold(
    server: LockServer, locks: LockClient, redis: Redis
) -> None:
    """However alive the command is; the name is free then."""
    options = ("--ttl", "0.5", "--max-hold", "1")
    async with Run(server.url, *options, "n", "--", *TICKING) as running:
        first = float(await running.line())
        async with locks.lock("n"):
            next_began = time.monotonic()
        code, ticks, err = await running.ended()
        assert code == 74
        assert "it was held for --max-hold" in err
        assert float(ticks.splitlines()[-1]) < min(next_began, first + 1)


async def test_command_that_ends_in_time_is_not_lost(server: LockServer, redis: Redis) -> None:
    """A run that is longer than its ttl, extended by the watchdog."""
    code, _, err = await run(server.url, "--ttl", "0.5", "n", "--", "sleep", "1.2")
    assert (code, err) == (0, "")
    assert await leftovers(redis) == []


async def test_lease_that_was_lost_unnoticed_is_told_at_the_end(
    server: LockServer, redis: Redis
) -> None:
    """The release finds out what no extension did: 74, for the work was not under the lock."""
    async with Run(server.url, "n", "--", *UNTIL_TOLD) as running:
        await running.line()
        await redis.delete(KEY)
        running.process.send_signal(signal.SIGUSR1)
        code, _, err = await running.ended()
        assert code == 74
        assert "deleted" in err
        assert "the command had ended with 0 by then" in err


# Servers that are not there, or do not allow it


async def test_run_without_an_answer_exits_69_and_says_which_server(tmp_path: Path) -> None:
    """One line; and the command does not run."""
    code, out, err = await run("redis://localhost:1/3", "-n", "n", "--", "echo", "ran")
    assert (code, out, err.count("\n")) == (69, "", 1)
    assert err.startswith("aiodlock: redis://localhost:1/3: ")


async def test_run_whose_server_died_at_the_end_has_the_status_of_the_command(
    server: LockServer,
) -> None:
    """The work was done under the lock, which its ttl will free; with a warning."""
    async with Run(server.url, "n", "--", *UNTIL_TOLD) as running:
        await running.line()
        server.process.kill()
        server.process.wait()
        running.process.send_signal(signal.SIGUSR1)
        code, _, err = await running.ended()
        assert code == 0
        assert "release" in err


async def test_run_that_is_not_allowed_exits_77_and_says_what_is_missing(
    server: LockServer, redis: Redis
) -> None:
    """Nobody needs to try again, unlike with a server that is away."""
    await redis.acl_setuser("poor", enabled=True, passwords=["+geheim"], commands=["+ping"])
    url = server.url.replace("redis://", "redis://poor:geheim@")
    try:
        code, out, err = await run(url, "n", "--", "echo", "ran")
    finally:
        await redis.acl_deluser("poor")
    assert (code, out) == (77, "")
    assert "eval" in err.lower()
    assert "geheim" not in err


async def test_run_on_a_key_of_another_kind_exits_70(server: LockServer, redis: Redis) -> None:
    """It will not become one by waiting."""
    await redis.rpush(KEY, "item")
    code, out, err = await run(server.url, "n", "--", "echo", "ran")
    assert (code, out) == (70, "")
    assert "'n'" in err


@pytest.mark.parametrize("by_option", [False, True])
async def test_password_is_shown_nowhere(server: LockServer, by_option: bool) -> None:
    """Not in what we say, nor to those who look at the processes that we start."""
    url = server.url.replace("redis://", "redis://default:geheim@")  # Any will do.
    options = ["--url", url] if by_option else []
    async with Run(None if by_option else url, "-v", *options, "n", "--", *FAMILY) as running:
        await running.began()
        guard = os.getpgid(running.pids[0])
        seen = _seen_of(guard)
        if by_option:
            seen += _seen_of(running.pids[0])
        running.process.send_signal(signal.SIGTERM)
        _, out, err = await running.ended()
        assert "got 'n' after" in err
        assert "geheim" not in seen + out + err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", "redis://h"),
        ("redis://:geheim@h:7/3?password=geheim", "redis://h:7/3"),
        ("rediss://user:geheim@h", "rediss://h"),
        ("redis://:geheim", "an unreadable URL"),
        ("redis://:geh/eim@h", "an unreadable URL"),
        ("redis://:1geheim@h/x", "redis://h"),
        ("unix://user:geheim@/run/valkey.sock?db=1", "unix:///run/valkey.sock"),
        ("unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ],
)
def test_shown_url_has_no_password(url: str, expected: str) -> None:
    """However wrong it is."""
    assert shown(url) == expected


# Options of the lock


async def test_run_with_hold_at_least_ends_and_leaves_the_name_taken(
    server: LockServer, locks: LockClient, redis: Redis
) -> None:
    """It does not wait for the time itself."""
    assert (await run(server.url, "--hold-at-least", "60", "n", "--", "true"))[0] == 0
    assert 30_000 < await redis.pttl(KEY) <= 60_000
    assert await locks.lock("n").try_acquire() is None


async def test_runs_with_permits_are_inside_together_up_to_that_many(server: LockServer) -> None:
    """The next one is refused, or waits."""
    options = ("--permits", "2", "n", "--")
    async with (
        Run(server.url, *options, *FAMILY) as one,
        Run(server.url, *options, *FAMILY) as other,
    ):
        await one.began()
        await other.began()
        assert (await run(server.url, "-n", *options, "true"))[0] == 75
        one.process.send_signal(signal.SIGTERM)
        assert (await run(server.url, *options, "true"))[0] == 0


async def test_readers_run_together_and_writers_alone(server: LockServer) -> None:
    """Each has a holder and a number, as with any lock."""
    told = ("sh", "-c", 'test "$AIODLOCK_FENCING_TOKEN" -gt 0 && echo $AIODLOCK_HOLDER')
    async with Run(server.url, "--reader", "n", "--", *FAMILY) as reader:
        await reader.began()
        code, holder, _ = await run(server.url, "-n", "--reader", "n", "--", *told)
        assert (code, holder.count(":")) == (0, 1)
        assert (await run(server.url, "-n", "--writer", "n", "--", "true"))[0] == 75
        reader.process.send_signal(signal.SIGTERM)
        await reader.ended()
    code, holder, _ = await run(server.url, "-n", "--writer", "n", "--", *told)
    assert (code, holder.count(":")) == (0, 1)


async def test_run_of_a_name_that_is_locked_in_another_way_exits_70(server: LockServer) -> None:
    """One name, one kind of lock."""
    async with Run(server.url, "--permits", "2", "n", "--", *FAMILY) as holder:
        await holder.began()
        code, out, err = await run(server.url, "-w", "5", "n", "--", "echo", "ran")
        assert (code, out) == (70, "")
        assert "'n'" in err


async def test_run_with_a_prefix_locks_under_it(server: LockServer, redis: Redis) -> None:
    """And under no other."""
    async with Run(server.url, "--prefix", "jobs:", "n", "--", *FAMILY) as running:
        await running.began()
        assert await redis.exists("jobs:{n}")
        assert await leftovers(redis) == []


@pytest.mark.parametrize("between", [" ", ","])
async def test_run_on_several_urls_locks_a_majority(nodes: Nodes, between: str) -> None:
    """Each node has the key of the grant that the command was told of."""
    url = between.join(nodes.urls)
    command = ("sh", "-c", "echo $AIODLOCK_FENCING_TOKEN; sleep 600")
    async with Run(url, "n", "--", *command) as running:
        fencing_token = await running.line()
        values = await nodes.values(KEY)
        holding = [value for value in values if f"/{fencing_token}" in str(value)]
        assert len(holding) > len(values) / 2


class ChildByHand:
    """A command that ends at SIGKILL only."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        self.heard.append("end")

    def kill(self) -> None:
        self.heard.append("kill")
        self.ended.set_result(137)


def _code_of_main(*argv: str) -> object:
    try:
        return main(argv)
    except SystemExit as exit_:  # By argparse.
        return exit_.code


async def _is_queued(locks: LockClient) -> bool:
    return await _waiters(locks) > 0


async def _waiters(locks: LockClient) -> int:
    return (await locks.lock("n").inspect()).waiters


async def _polled(redis: Redis) -> None:
    """Once the only waiter has said anew that it is alive."""
    alive = await redis.zrange("aiodlock:{n}:alive", 0, -1, withscores=True)

    async def has_polled() -> bool:
        return bool(alive != await redis.zrange("aiodlock:{n}:alive", 0, -1, withscores=True))

    await until(has_polled, limit_s=10)


async def _extended(redis: Redis) -> float:
    """Once the key has more time than it had: until when, on our clock."""
    end = time.monotonic() + await redis.pttl(KEY) / 1000

    async def is_extended() -> bool:
        nonlocal end
        earlier, end = end, time.monotonic() + await redis.pttl(KEY) / 1000
        return end > earlier + 0.05

    await until(is_extended, limit_s=10)
    return end


def _seen_of(pid: int) -> str:
    proc = Path(f"/proc/{pid}")
    return (proc / "cmdline").read_text() + (proc / "environ").read_text()
