"""`aiodlock demo`: its checker on histories made by hand, its words, and whole runs."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis

from aiodlock.cli import _history, main
from aiodlock.cli._demo_job import SLOW_EVERY_S, SLOW_S, TTL_S, Job
from aiodlock.cli._demo_journal import Journal
from aiodlock.cli._demo_part import Outcome, Part
from aiodlock.cli._demo_report import HEAD, complaints, row
from aiodlock.cli._history import NS_PER_S, Interval, Overlap
from aiodlock.cli._progress import Progress, bar
from aiodlock.cli._table import Cell, Tone, can_colour, table
from aiodlock.testing import LockServer

DEMO = (sys.executable, "-m", "aiodlock", "demo")

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def stay(
    enter: float, leave: float, token: int | None = None, *, worker: int = 0, killed: bool = False
) -> Interval:
    """A stay from second *enter* to second *leave*."""
    return Interval(worker, round(enter * NS_PER_S), round(leave * NS_PER_S), token, killed)


# The checker


def test_overlaps_of_stays_one_after_another_are_none() -> None:
    """A hand-over at one instant is none either."""
    assert _history.overlaps([stay(0, 1), stay(1, 2), stay(3, 4)]) == []


def test_overlaps_of_two_inside_at_once_name_both() -> None:
    """In whichever order the history comes."""
    early, late = stay(0, 1.1), stay(1, 2, worker=1)
    assert _history.overlaps([late, early]) == [Overlap(early, late)]


def test_overlaps_under_one_long_stay_count_every_entry() -> None:
    """Also those that come after a short one which itself was under the long one."""
    long, first, second = stay(0, 10), stay(1, 2, worker=1), stay(3, 4, worker=2)
    assert _history.overlaps([long, first, second]) == [
        Overlap(long, first),
        Overlap(long, second),
    ]


def test_overlaps_of_a_killed_stay_end_at_its_kill() -> None:
    """Whoever enters after the kill is alone; before it, not."""
    victim = stay(0, 1, killed=True)
    assert _history.overlaps([victim, stay(1.5, 2, worker=1)]) == []
    assert len(_history.overlaps([victim, stay(0.9, 2, worker=1)])) == 1


def test_overlaps_of_nothing_are_none() -> None:
    """A history without a stay has no overlap."""
    assert _history.overlaps([]) == []


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [((3, 7, 8), 0), ((3, 3), 1), ((3, 2, 4), 1), ((3, None, 4), 2), ((), 0), ((5,), 0)],
)
def test_out_of_order_counts_neighbours_that_do_not_grow(
    tokens: tuple[int | None, ...], wrong: int
) -> None:
    """A missing token is as bad as a repeated one."""
    history = [stay(at, at + 0.5, token) for at, token in enumerate(tokens)]
    assert len(_history.out_of_order(history)) == wrong
    assert len(_history.out_of_order(list(reversed(history)))) == wrong


def test_longest_gap_after_several_kills_is_the_longest() -> None:
    """From a kill to the next entry, whoever it is."""
    history = [stay(0, 1, killed=True), stay(1.25, 2, killed=True), stay(2.75, 3), stay(9, 10)]
    assert _history.longest_gap_after_kill(history) == 0.75


def test_longest_gap_without_a_kill_or_without_a_next_entry_is_none() -> None:
    """A gap that has no end has no length."""
    assert _history.longest_gap_after_kill([stay(0, 1), stay(2, 3)]) is None
    assert _history.longest_gap_after_kill([stay(0, 1), stay(2, 3, killed=True)]) is None


# What the workers are told, what they say


def test_job_goes_through_its_line_unchanged() -> None:
    """What the worker reads is what it was told."""
    job = Job("aiodlock", "redis://h/0", "p:", 1, 4)
    assert Job.from_line(job.to_line()) == job


def test_job_slow_due_gives_the_workers_one_slow_job_each_in_turn() -> None:
    """None at the start, one more in each period, and slow means longer than the ttl."""
    jobs = [Job("aiodlock", "redis://h/0", "p:", worker, 3) for worker in range(3)]
    due = [[job.slow_due(0.5 + period * SLOW_EVERY_S) for job in jobs] for period in range(5)]
    assert due == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]
    assert [job.slow_due(0.0) for job in jobs] == [0, 0, 0]
    assert SLOW_S > TTL_S


def test_journal_of_lines_gives_intervals() -> None:
    """With a fencing token where the lock has one."""
    journal = Journal()
    for line in ("want", "enter 10 7", "leave 20", "want", "enter 30", "leave 40", "want", "lost"):
        journal.read(2, line + "\n")
    assert journal.ended == [Interval(2, 10, 20, 7), Interval(2, 30, 40)]
    assert (journal.waiting, journal.losses, journal.grants) == ({2}, 1, 2)


def test_journal_of_a_killed_worker_ends_its_stay_at_the_kill() -> None:
    """One that was not inside leaves no stay, and waits no more."""
    journal = Journal()
    journal.read(0, "enter 10")
    journal.read(1, "want")
    journal.gone(0, 15, was_killed=True)
    journal.gone(1, 16, was_killed=True)
    assert journal.ended == [Interval(0, 10, 15, None, was_killed=True)]
    assert journal.waiting == set()


def test_journal_holder_is_who_is_alone_inside_and_entered_last() -> None:
    """Who others have overtaken may have lost a lock that leaks."""
    journal = Journal()
    assert journal.holder is None
    journal.read(0, "enter 10")
    assert journal.holder == (0, 10, None)
    journal.read(1, "enter 20")
    assert journal.holder is None
    journal.read(1, "leave 30")
    assert (journal.inside, journal.holder) == (1, None)


def test_journal_of_nonsense_raises() -> None:
    """A worker that says something else is a bug, not a quiet zero."""
    with pytest.raises(ValueError, match="not a line"):
        Journal().read(0, "hello")


# What is made of it


def outcome(
    lock: str, history: Iterable[Interval], *, waiting: int = 3, losses: int = 0
) -> Outcome:
    """What was seen of a lock until second 10."""
    return Outcome(Part(lock, lock, 5.0, 0), list(history), 10 * NS_PER_S, waiting, losses)


STUCK = (stay(0, 0.5), stay(1, 1.5, killed=True))
LEAKY = (stay(0, 1.5), stay(1, 2, worker=1), stay(3, 3.5, killed=True), stay(4, 4.5))
SOUND = (stay(0, 1.5, 1), stay(2, 2.5, 2, killed=True), stay(3.25, 4, 3))


def told(
    naive: Iterable[Interval] = STUCK,
    unchecked: Iterable[Interval] = LEAKY,
    ours: Iterable[Interval] = SOUND,
) -> str:
    """The complaints about a run with these histories, one a line."""
    outcomes = outcome("naive", naive), outcome("unchecked", unchecked), outcome("ours", ours)
    return "\n".join(complaints(*outcomes))


def test_complaints_about_a_run_as_it_should_be_are_none() -> None:
    """The control of the tests below."""
    assert told() == ""


def test_complaints_name_a_control_that_went_well() -> None:
    """If the checker finds nothing wrong with the naive locks, it may be blind."""
    assert "naive: nobody was stuck" in told(naive=(*STUCK, stay(2, 3)))
    nobody_waits = outcome("naive", STUCK, waiting=0)
    found = complaints(nobody_waits, outcome("unchecked", LEAKY), outcome("ours", SOUND))
    assert "nobody was stuck" in "".join(found)
    assert "unchecked: no overlap" in told(unchecked=LEAKY[2:])


@pytest.mark.parametrize("who", ["naive", "unchecked", "ours"])
def test_complaints_name_a_part_in_which_nothing_happened(who: str) -> None:
    """No grant, or no holder killed, shows nothing."""
    assert f"{who}: nobody was granted" in told(**{who: ()})
    assert f"{who}: no holder was killed" in told(**{who: (stay(0, 1.5, 1),)})


def test_complaints_name_every_fault_of_ours() -> None:
    """Overlap, order, nobody going on, no extension shown, a lost lease."""
    assert "ours: 1 times two" in told(ours=(*SOUND, stay(3.5, 5, 4)))
    assert "ours: 1 fencing tokens" in told(ours=(*SOUND, stay(5, 6, 3)))
    assert "ours: 2 fencing tokens" in told(ours=[stay(s.enter_ns, s.leave_ns) for s in SOUND])
    assert "ours: nobody went on in the 7.5 s" in told(ours=SOUND[:2])
    assert "ours: no job outlasted" in told(ours=SOUND[1:])
    lossy = outcome("ours", SOUND, losses=2)
    found = complaints(outcome("naive", STUCK), outcome("unchecked", LEAKY), lossy)
    assert found == ["ours: 2 leases were lost before their job was done"]


def test_rows_say_what_was_seen() -> None:
    """One of each kind, bad ones marked so."""
    stuck, leaky, sound = outcome("a", STUCK), outcome("b", LEAKY), outcome("c", SOUND)
    assert row(stuck)[1:] == [
        Cell("2"),
        Cell("0", Tone.GOOD),
        Cell("3 stuck for 8.5 s", Tone.BAD),
        Cell("none"),
    ]
    assert row(leaky)[2:4] == [Cell("1", Tone.BAD), Cell("next after 0.50 s", Tone.GOOD)]
    assert row(sound)[2:] == [
        Cell("0", Tone.GOOD),
        Cell("next after 0.75 s", Tone.GOOD),
        Cell("in order", Tone.GOOD),
    ]
    assert row(outcome("d", LEAKY[:1]))[3] == Cell("no holder killed")


def test_table_is_aligned_and_colours_take_no_room() -> None:
    """Figures stand to the right, words to the left."""
    rows = [[Cell("one"), Cell("7", Tone.BAD)], [Cell("three"), Cell("1234")]]
    plain = table(("lock", "n"), rows, coloured=False)
    assert plain == ["lock   n", "-----  ----", "one       7", "three  1234"]
    coloured = table(("lock", "n"), rows, coloured=True)
    assert coloured[2] == "one    \x1b[31m   7\x1b[0m"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_without_a_terminal_is_lines_only() -> None:
    """A log file gets no carriage returns."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.show(0.5, "half")
    progress.line("done")
    progress.clear()
    assert stream.getvalue() == "done\n"


def test_progress_on_a_terminal_draws_over_and_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter text leaves nothing of the longer one, and none wraps."""
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    progress = Progress(stream)
    progress.show(0.5, "long text that does not fit")
    progress.show(1.5, "x")
    progress.line("done")
    first, second, blank, line = stream.getvalue().split("\r")[1:]
    assert first == "[##########..........]  long "
    assert second == f"[{'#' * 20}]  x    "
    assert (blank, line) == (" " * len(second.rstrip()), "done\n")


def test_bar_beyond_its_ends_is_empty_or_full() -> None:
    """Its length never changes."""
    assert [bar(-1).count("#"), bar(0.5).count("#"), bar(7).count("#")] == [0, 10, 20]
    assert {len(bar(fraction)) for fraction in (-1, 0.33, 7)} == {22}


def test_colour_is_for_terminals_whose_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR and dumb terminals are respected."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert can_colour(Terminal())
    assert not can_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not can_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not can_colour(Terminal())


# The command line


def test_help_of_demo_names_its_options() -> None:
    """As `python -m aiodlock`, from outside."""
    done = subprocess.run([*DEMO, "--help"], capture_output=True, text=True, check=True)
    assert "--seconds" in done.stdout
    assert "--url" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice"),
        (["demo", "--seconds", "1"], "must be from 10 to 600"),
        (["demo", "--seconds", "nan"], "must be from 10 to 600"),
        (["demo", "--seconds", "soon"], "invalid"),
        (["demo", "--url", "memory://"], "must begin with redis://"),
    ],
)
def test_main_with_bad_arguments_exits_64_and_says_why(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 64
    assert message in capsys.readouterr().err


def test_demo_without_a_server_binary_exits_69_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, no traceback."""
    monkeypatch.setenv("AIODLOCK_SERVER", "/nowhere/redis-server")
    assert main(["demo"]) == 69
    assert "AIODLOCK_SERVER" in capsys.readouterr().err


def test_demo_on_a_url_that_nobody_serves_exits_69(capsys: pytest.CaptureFixture[str]) -> None:
    """Before any worker is started."""
    assert main(["demo", "--url", "redis://127.0.0.1:1"]) == 69
    assert "does not answer" in capsys.readouterr().err


# Whole runs


@contextmanager
def running_demo(*options: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process of its own, in a session of its own; ended at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*DEMO, *options], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_demo_shows_what_it_promises(server: LockServer) -> None:
    """Two naive locks that fail, ours that does not; and it leaves no key on a user's server."""
    done = subprocess.run(
        [*DEMO, "--seconds", "10", "--url", server.url], capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) < 80
    naive, unchecked, ours = _rows(done.stdout)
    assert naive[2:4] == ["0", naive[3]]
    assert re.fullmatch(r"3 stuck for \d+\.\d s", naive[3])
    assert int(unchecked[2]) > 0
    assert ours[2] == "0"
    assert re.fullmatch(r"next after \d\.\d\d s", ours[3])
    assert ours[4] == "in order"
    assert min(int(cells[1]) for cells in (naive, unchecked, ours)) > 0
    with BlockingRedis.from_url(server.url) as admin:
        assert admin.keys("*") == []


@needs_proc
def test_demo_interrupted_exits_130_and_leaves_no_process() -> None:
    """Ctrl-C reaches the whole foreground, so the server gets it too."""
    with running_demo() as process:
        children = _children_once_working(process)
        os.killpg(process.pid, signal.SIGINT)
        _, complaint = process.communicate(timeout=10)
    assert process.returncode == 130
    assert complaint == "\naiodlock: interrupted\n"
    assert _eventually(lambda: not any(map(_is_alive, children)))


@needs_proc
def test_demo_killed_leaves_no_process() -> None:
    """Workers see their pipe close; the kernel takes the server."""
    with running_demo() as process:
        children = _children_once_working(process)
        process.kill()
    assert len(children) == 5
    assert _eventually(lambda: not any(map(_is_alive, children)))


def test_demo_whose_reader_goes_away_ends_quietly() -> None:
    """As in `aiodlock demo | head -1`."""
    with running_demo() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(timeout=20), process.stderr.read()) == (141, "")


def _rows(text: str) -> list[list[str]]:
    """The cells of the table's three rows."""
    lines = text.splitlines()
    top = next(number for number, line in enumerate(lines) if line.split("  ")[0] == HEAD[0])
    return [re.split(r" {2,}", line) for line in lines[top + 2 : top + 5]]


def _children_once_working(process: subprocess.Popen[str]) -> list[int]:
    """The server and the four workers, once the first part has begun."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("1/3"):
            break
    assert _eventually(lambda: len(_children(process.pid)) == 5)
    return _children(process.pid)


def _children(pid: int) -> list[int]:
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [number for number in numbers if _state_and_parent(number)[1:] == [str(pid)]]


def _is_alive(pid: int) -> bool:
    # A zombie is dead: who is to collect it is not ours to say.
    return _state_and_parent(pid)[:1] not in ([], ["Z"], ["X"])


def _state_and_parent(pid: int) -> list[str]:
    try:
        # The command's name before them stands in parentheses, and may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    give_up_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True
