"""The benchmarks: their arithmetic, their checkers, one short real run; no time is asserted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import benchmarks.clients
from aiodlock.testing import LockServer, lock_server
from benchmarks import _server, _stays
from benchmarks.__main__ import ROUNDS
from benchmarks._gates import GATES, MET, MISSED, UNKNOWN, WITHIN, Gate, judged, judgement
from benchmarks._hand import Failed
from benchmarks._measure import measure
from benchmarks._orders import Order
from benchmarks._plots import COLORS, PLOTS, draw
from benchmarks._reduce import REDUCTIONS, Raw
from benchmarks._report import BEGIN, END, after, before, markdown, write_into
from benchmarks._results import Results, Run, Summary, ratios
from benchmarks._rows import QUORUM_PEERS, QUORUMS, ROWS, Row, chosen
from benchmarks._run import Plan, absences, run, steps_of
from benchmarks._server import Habits, Look, Observer
from benchmarks._stays import Stay
from benchmarks._trouble import SLOW_S, TROUBLES, befalling
from benchmarks.clients import CLIENTS, LEFT_OUT
from benchmarks.work import WORKS

pytestmark = pytest.mark.deep

DOCS = Path(__file__).parents[1] / "docs"
OTHERS = {"aioredlock", "coredis", "pottery", "redis_fifo_lock", "redis_lock", "redlock"}


def stay(who: str, entered: int, left: int, asked: int = 0) -> Stay:
    """Somebody inside, in ms."""
    return Stay(who, asked * 1_000_000, entered * 1_000_000, left * 1_000_000)


def about_of(**more: Any) -> dict[str, Any]:
    """What is to be known about some results."""
    return {
        "machine": {"cpu": "a cpu", "cores": 2, "kernel": "Linux"},
        "packages": {"redis": "8"},
        "python": "CPython 3",
        "node": None,
        "server": "valkey 9",
        "date": "2026-01-01",
        "commit": "abc",
        **more,
    }


def results_of(*runs: Run, rounds: int = 3) -> Results:
    """A file of results with nothing but these runs."""
    rows = {row.name: {"title": row.title} for row in ROWS}
    return Results(about_of(), {"rounds": rounds, "rows": rows}, {}, list(runs))


def runs_of(row: str, client: str, figure: str, *values: float) -> list[Run]:
    """One run a round."""
    return [Run(row, client, turn, {figure: value}) for turn, value in enumerate(values, 1)]


# Arithmetic.


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([5, 5, 5, 5], 1.0), ([9, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([0, 0], 0.0)],
)
def test_jain_of_shares_is_the_index(shares: list[float], expected: float) -> None:
    """1 for equal shares, 1/n where one has all."""
    assert _stays.jain(shares) == pytest.approx(expected)


def test_percentile_of_values_is_one_of_them() -> None:
    """The median and the tail; of nothing there is none."""
    assert _stays.percentile([4, 1, 3, 2, 5], 50) == 3
    assert _stays.percentile(list(range(100)), 99) == 99
    assert _stays.percentile([7], 99) == 7
    assert math.isnan(_stays.percentile([], 50))


def test_handoffs_are_counted_only_to_another() -> None:
    """From just before the release to the next one's being inside."""
    stays = [stay("b", 14, 15), stay("a", 0, 10), stay("b", 17, 20), stay("a", 25, 30)]
    assert _stays.handoffs_ms(stays) == [4.0, 5.0]


def test_longest_wait_includes_those_who_never_got_in() -> None:
    """A waiter that starved is not left out of the figure."""
    stays = [stay("a", 30, 31, asked=10), stay("b", 5, 6, asked=1)]
    assert _stays.longest_wait_ms(stays, []) == 20
    assert _stays.longest_wait_ms(stays, [99.0]) == 99
    assert _stays.longest_wait_ms([], []) == 0


def test_counts_include_those_who_never_were_inside() -> None:
    """Else an unfair lock would look fair."""
    assert _stays.counts([stay("a", 1, 2), stay("a", 3, 4)], ["a", "b"]) == [2, 0]


def test_overlaps_of_one_after_the_other_are_none() -> None:
    """Also where one enters at the instant at which another left."""
    assert _stays.overlaps([stay("b", 10, 20), stay("a", 0, 10), stay("c", 21, 22)]) == 0


def test_overlaps_of_two_inside_are_found() -> None:
    """Also of a short stay inside a long one that began earlier."""
    assert _stays.overlaps([stay("a", 0, 10), stay("b", 9, 12)]) == 1
    assert _stays.overlaps([stay("a", 0, 100), stay("b", 1, 2), stay("c", 50, 51)]) == 2


def look(cpu_s: float = 0.0, **calls: int) -> Look:
    """A server, at one moment."""
    return Look(cpu_s, 1, 0, 0, 0, 0, calls)


def test_calls_between_two_looks_are_the_difference() -> None:
    """Without what did not grow, and without what the observer asked."""
    grown = _server.calls_between(look(get=1, set=5, info=1), look(get=4, set=5, del_=2, info=9))
    assert grown == {"get": 3, "del_": 2}


def test_sent_commands_are_told_from_calls_in_scripts() -> None:
    """The server counts both alike; what a client is known to send makes the difference."""
    calls = {"evalsha": 10, "set": 10, "get": 20, "del": 10, "blpop": 3}
    assert _server.sent_of(calls, Habits()) == 13
    assert _server.sent_of(calls, Habits(frozenset({"set"}))) == 23
    both = Habits(frozenset({"set", "get"}), repeats=frozenset({"get"}))
    assert _server.sent_of(calls, both) == 33


def test_cost_of_a_cycle_is_the_difference_by_cycles() -> None:
    """CPU in µs, commands."""
    figures = _server.per_cycle(look(1.0), look(1.5, evalsha=20, get=30), 10, Habits())
    assert figures["server_cpu_us"] == pytest.approx(50_000)
    assert (figures["evalsha"], figures["sent"], figures["calls"]) == (2, 2, 5)


def test_cost_of_a_cycle_on_a_quorum_is_that_of_all_its_servers() -> None:
    """In a cluster each node has figures of its own."""
    looks = [(look(1.0), look(1.5, evalsha=20)), (look(0.0), look(0.1, evalsha=10))]
    quorum = Row("q", "", "cycles", 1, (), quorum=2)
    figures = Raw(quorum, Habits(), looks, 1, []).per_cycle(10)
    assert figures["evalsha"] == 3
    assert figures["server_cpu_us"] == pytest.approx(60_000)
    cluster = dataclasses.replace(quorum, quorum=0, nodes=2)
    figures = Raw(cluster, Habits(), looks, 1, []).per_cycle(10)
    assert (figures["node0_evalsha"], figures["node1_evalsha"]) == (2, 1)


def spell(cycles: int, seconds: float, longest_ms: float) -> dict[str, float]:
    """What a worker tells of the time before, or of that in trouble."""
    return {"cycles": cycles, "seconds": seconds, "cpu_s": seconds / 2, "longest_ms": longest_ms}


@pytest.mark.parametrize(
    ("troubled", "cycle_ms", "ratio"),
    [(spell(500, 1.0, 5.0), 2.0, 2.0), (spell(0, 9.0, 9000.0), 9000.0, 9000.0)],
)
def test_cycle_in_trouble_is_held_against_those_before(
    troubled: dict[str, float], cycle_ms: float, ratio: float
) -> None:
    """One that hung for all of the time is as long as that: it must not look unmeasured."""
    row = Row("trouble-stopped", "", "trouble", 1, (), quorum=5, trouble="stopped")
    told = {"calm": spell(1000, 1.0, 3.0), "troubled": troubled}
    figures = REDUCTIONS["trouble"](Raw(row, Habits(), [], 1, [told]))
    assert figures["cycle_ms"] == pytest.approx(cycle_ms)
    assert figures["cycle_ratio"] == pytest.approx(ratio)
    assert figures["longest_ms"] == troubled["longest_ms"]
    results = results_of(Run("trouble-stopped", "quorum", 1, figures))
    gates = [one for one in GATES if one.row == row.name and one.client == "quorum"]
    assert judged(results, gates)[0].gate_says == MISSED


# Ratios, and what they are held against.


def test_ratios_are_taken_within_each_round() -> None:
    """A round that one of the two has not is left out."""
    assert ratios({1: 10, 2: 40, 3: 60}, {1: 20, 2: 50}) == [0.5, 0.8]


def test_summary_is_the_median_with_the_extremes() -> None:
    """Of nothing there is none."""
    assert Summary.of([3.0, 1.0, 9.0]) == Summary(3.0, 1.0, 9.0)
    assert Summary.of([]) is None


AT_MOST = Gate("r", "f", gate=1.0)
AT_LEAST = Gate("r", "f", gate=1.0, at_least=True)
COUNT = Gate("r", "f", gate=1.0, is_count=True)


@pytest.mark.parametrize(
    ("gate", "summary", "expected"),
    [
        (AT_MOST, Summary(1.0, 0.5, 9.0), MET),
        (AT_MOST, Summary(1.1, 0.9, 1.2), WITHIN),
        (AT_MOST, Summary(1.1, 1.05, 1.2), MISSED),
        (AT_LEAST, Summary(1.0, 0.1, 1.0), MET),
        (AT_LEAST, Summary(0.9, 0.8, 1.1), WITHIN),
        (AT_LEAST, Summary(0.9, 0.8, 0.95), MISSED),
        (COUNT, Summary(1.0, 1.0, 1.0), MET),
        (COUNT, Summary(1.0, 1.0, 1.1), MISSED),
        (AT_MOST, None, UNKNOWN),
    ],
)
def test_gate_is_judged_by_median_spread_and_kind(
    gate: Gate, summary: Summary | None, expected: str
) -> None:
    """A time fails only beyond the spread, a count in a single round."""
    assert judgement(summary, gate, 1.0) == expected
    assert judgement(summary, gate, None) == ""


def test_gates_of_rows_that_were_not_measured_are_left_out() -> None:
    """Those of a row that was, but not against the other, say so."""
    results = results_of(*runs_of("cycle-1", "aiodlock", "client_cpu_us", 10))
    verdicts = judged(results, GATES)
    assert {verdict.gate.row for verdict in verdicts} == {"cycle-1"}
    assert {verdict.gate_says for verdict in verdicts} == {UNKNOWN}


def test_gate_against_another_row_compares_the_same_rounds() -> None:
    """Flat from 2 to 100 waiters."""
    results = results_of(
        *runs_of("handoff-100", "aiodlock", "handoff_median_ms", 3, 6),
        *runs_of("handoff-2", "aiodlock", "handoff_median_ms", 2, 3),
    )
    gate = Gate("handoff-100", "handoff_median_ms", "aiodlock", against_row="handoff-2", gate=1.75)
    (verdict,) = judged(results, [gate])
    assert verdict.summary == Summary(1.75, 1.5, 2.0)
    assert verdict.gate_says == MET


def test_gate_against_several_takes_the_best_of_each_round() -> None:
    """The least, or the most where more is better; who was not there is not missed."""
    results = results_of(
        *runs_of("r", "quorum", "f", 10, 10),
        *runs_of("r", "pottery", "f", 20, 50),
        *runs_of("r", "aioredlock", "f", 40, 25),
    )
    several = ("pottery", "aioredlock", "redlock-ng")
    gate = Gate("r", "f", several, gate=0.5, client="quorum")
    assert gate.values(results) == [0.5, 0.4]
    assert dataclasses.replace(gate, at_least=True).values(results) == [0.25, 0.2]


# What there is to measure.


def test_gates_name_rows_and_clients_that_are_measured() -> None:
    """A gate against nobody would never be judged."""
    rows = {row.name: row for row in ROWS}
    for gate in GATES:
        assert gate.client in rows[gate.row].clients
        assert set(gate.others) <= set(rows[gate.against_row or gate.row].clients)


def test_gates_of_a_quorum_are_for_it_with_fencing_and_without() -> None:
    """No error anywhere; in trouble no cycle that costs much more than before."""
    judges = {
        (one.row, one.client, one.figure): one.aim if one.gate is None else one.gate
        for one in GATES
    }
    rows = [row for row in ROWS if row.quorum and row.name != "quorum-tasks"]
    for row in rows:
        for client in QUORUMS:
            assert judges[row.name, client, "errors"] == 0
            if row.trouble:
                assert judges[row.name, client, "cycle_ratio"] == 1.3
            elif row.work == "compete":
                assert judges[row.name, client, "overlaps"] == 0
            else:
                assert (judges[row.name, client, "cycle_ms"] or 9) <= 2
    assert {row.trouble for row in rows} == set(TROUBLES)


def test_rows_name_works_and_clients_that_exist() -> None:
    """And the quick clients are among all."""
    assert set(REDUCTIONS) == set(WORKS)
    for row in ROWS:
        assert row.work in WORKS
        assert set(row.clients) <= set(CLIENTS)
        assert set(row.quick) <= set(row.clients)
        assert len(set(row.clients)) == len(row.clients)
        assert row.trouble in TROUBLES
        assert bool(row.trouble) == (row.work == "trouble")
        assert row.quorum >= (3 if row.trouble else 0)
        assert row.nodes == 1 or not row.quorum


def test_peers_that_are_left_out_are_named_with_the_reason() -> None:
    """And are not measured after all."""
    text = markdown(dataclasses.replace(results_of(), about=about_of(left_out=LEFT_OUT)))
    for name, reason in LEFT_OUT.items():
        assert f"{name} {reason}" in text
        assert name not in CLIENTS
    assert set(QUORUM_PEERS) <= set(CLIENTS)


def test_rows_are_chosen_by_name_or_beginning() -> None:
    """Whoever asks for one that is not there is told."""
    assert [row.name for row in chosen(["idle"])] == ["idle-10", "idle-100", "idle-1000"]
    assert [row.name for row in chosen(["cycle-1", "memory"])] == ["cycle-1", "memory"]
    with pytest.raises(ValueError, match="no row 'cycles'"):
        chosen(["cycles"])


def test_rounds_are_interleaved_in_differing_orders() -> None:
    """Each has every client once; so no client always comes after the same."""
    plan = Plan(rows=chosen(["cycle-100"]), rounds=4)
    steps = list(steps_of(plan, {}))
    orders = [[client for turn, _, client in steps if turn == at] for at in (1, 2, 3, 4)]
    assert [turn for turn, _, _ in steps] == sorted(turn for turn, _, _ in steps)
    assert all(sorted(order) == sorted(ROWS[2].clients) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_client_without_an_answer_to_a_row_is_named_with_the_reason() -> None:
    """It is not left out in silence."""
    row = Row("held", "", "hold", 1, ("aiodlock", "redis-py", "floor"))
    reasons = absences(Plan(rows=[row], rounds=1))
    assert reasons["held"]["redis-py"] == "does not extend by itself"
    assert "aiodlock" not in reasons["held"]


def test_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what would have to be installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert CLIENTS["coredis"].absence() == "coredis is not installed"
    assert CLIENTS["aiodlock-uvloop"].absence() == "uvloop is not installed"
    assert CLIENTS["aiodlock"].absence() is None


def test_every_adapter_that_can_be_imported_has_what_is_asked_of_it() -> None:
    """Those whose library is not there are left; the package imports without any."""
    made = 0
    for entry in CLIENTS.values():
        if entry.apart is not None or entry.absence() is not None:
            continue
        client = entry.make()
        made += 1
        assert isinstance(client.in_threads, bool)
        for method in ("open", "pair", "key", "is_held", "aclose"):
            assert callable(getattr(client, method)), (entry.label, method)
    assert made >= 9


def test_benchmarks_import_no_peer_before_it_is_measured() -> None:
    """Else they could not be run where one is missing."""
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if ".clients." in module.name or module.name.endswith("__main__"):
            continue
        names = set(vars(importlib.import_module(module.name)))
        assert not names & (OTHERS | {"pygal"}), module.name


# Real runs.

SHORT = Row("handoff-2", "", "compete", 2, ("aiodlock", "redis-py"), window_s=0.3)


async def test_short_run_yields_a_file_of_results_of_the_right_shape(tmp_path: Path) -> None:
    """Two clients, one row, one round; saved, loaded, reported."""
    said: list[str] = []
    file = tmp_path / "results.json"
    await run(Plan(rows=[SHORT], rounds=1), said.append, lambda results: results.save(file))
    loaded = Results.load(file)
    assert sorted(one.client for one in loaded.runs) == ["aiodlock", "redis-py"]
    assert [one.failed for one in loaded.runs] == ["", ""]
    for one in loaded.runs:
        assert one.figures["errors"] == one.figures["overlaps"] == 0
        assert one.figures["client_cpu_us"] > 0
        assert one.figures["server_cpu_us"] >= 0
        assert 0 < one.figures["jain"] <= 1
        assert 1 <= one.figures["evalsha"] <= one.figures["sent"] <= one.figures["calls"]
    head = json.loads(file.read_text())
    assert {"date", "commit", "machine", "python", "packages", "absent", "server", "gc"} <= set(
        head["about"]
    )
    assert head["parameters"]["rows"]["handoff-2"]["window_s"] == 0.3
    assert len(said) == 2
    assert "aiodlock, acquire and release" in markdown(loaded)


async def test_run_without_a_lock_shows_overlaps() -> None:
    """The control: a checker that finds none here would find none anywhere."""
    row = dataclasses.replace(SHORT, clients=("none",))
    measured = await measure(row, "none", window_s=0.1, warm_up_s=0.0)
    assert measured.figures["overlaps"] > 10


QUORUM = Row(
    "quorum-3",
    "",
    "cycles",
    1,
    (*QUORUMS, "floor-quorum", "floor-quorum-own", "floor-quorum-redis-py"),
    quorum=3,
)


async def test_quorum_is_asked_by_clients_and_floors() -> None:
    """A majority at least, to acquire and to release."""
    for client in QUORUM.clients:
        measured = await measure(QUORUM, client, window_s=0.3, warm_up_s=0.1)
        assert measured.errors == {}
        assert measured.figures["cycle_ms"] > 0
        assert measured.figures["sent"] >= 4
        assert measured.figures["connections"] >= 1


async def test_quorum_in_trouble_is_at_work_before_and_in_it() -> None:
    """Over the same connections, and without an error."""
    row = dataclasses.replace(QUORUM, work="trouble", quorum=5, trouble="stopped")
    measured = await measure(row, "quorum-fenced", window_s=0.5, warm_up_s=0.1)
    assert measured.errors == {}
    figures = measured.figures
    assert figures["cycle_ratio"] == pytest.approx(figures["cycle_ms"] / figures["calm_ms"])
    assert figures["longest_ms"] >= figures["cycle_ms"] > 0


async def test_quorum_that_waits_for_every_server_shows_the_trouble() -> None:
    """The control: both of its rounds wait for the slow one."""
    row = dataclasses.replace(QUORUM, work="trouble", trouble="slow")
    measured = await measure(row, "floor-quorum-all", window_s=0.3, warm_up_s=0.1)
    assert measured.figures["cycle_ms"] >= 2 * SLOW_S * 1e3
    assert measured.figures["cycle_ms"] > measured.figures["calm_ms"]


@pytest.mark.parametrize(("held", "expected"), [(1, "got"), (2, "refused")])
async def test_floor_of_a_quorum_needs_a_majority(held: int, expected: str) -> None:
    """What is held on one of three does not matter, on two it does."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(lock_server()) for _ in range(3)]
        for server in servers[:held]:
            async with redis.asyncio.Redis(port=server.port) as other:
                await other.set("name", "another's")
        ports = tuple(server.port for server in servers)
        floor = CLIENTS["floor-quorum"].make()
        await floor.open(Order("floor-quorum", "cycles", ports, 1, 1.0, 0.0))
        stack.push_async_callback(floor.aclose)
        pair = floor.pair("name", 10.0)
        try:
            await pair.release(await pair.acquire())
        except RuntimeError:
            said = "refused"
        else:
            said = "got"
    assert said == expected


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("stopped", redis.exceptions.TimeoutError),
        ("refusing", redis.exceptions.ConnectionError),
        ("read-only", redis.exceptions.ReadOnlyError),
        ("full", redis.exceptions.OutOfMemoryError),
        ("password", redis.exceptions.AuthenticationError),
    ],
)
async def test_trouble_befalls_who_is_connected(kind: str, error: type[Exception]) -> None:
    """Each in its own way; before it nobody is refused."""
    async with lock_server() as server, befalling(server, kind) as trouble:
        connected = redis.asyncio.Redis(
            port=trouble.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0)
        )
        async with connected:
            assert await connected.set("a", "1")
            async with trouble:
                if kind == "password":
                    with pytest.raises(redis.exceptions.ConnectionError):
                        await connected.set("b", "1")
                with pytest.raises(error):
                    await connected.set("b", "1")


async def test_stopped_server_goes_on_afterwards() -> None:
    """Nothing of ours is left stopped."""
    async with lock_server() as server, redis.asyncio.Redis(port=server.port) as connected:
        async with befalling(server, "stopped") as trouble, trouble:
            pass
        assert await connected.ping()


async def test_slow_server_answers_all_later_but_all() -> None:
    """Requests on their way together are late together."""
    async with lock_server() as server, befalling(server, "slow") as trouble:
        reader, writer = await asyncio.open_connection("127.0.0.1", trouble.port)
        writer.write(b"PING\r\n")
        assert await reader.readline() == b"+PONG\r\n"
        async with trouble:
            began_s = time.monotonic()
            for _ in range(20):
                writer.write(b"PING\r\n")
            assert await reader.readexactly(20 * 7) == b"+PONG\r\n" * 20
            assert time.monotonic() - began_s >= SLOW_S
        writer.close()
        await writer.wait_closed()


async def test_leases_held_are_extended_by_client_and_floor() -> None:
    """The floor speaks the scripts' language; none is lost within more than a ttl."""
    row = Row("leases-5", "", "hold", 5, ("aiodlock", "floor-own"), ttl_s=3.0)
    for client in row.clients:
        measured = await measure(row, client, window_s=3.5, warm_up_s=0.0)
        assert measured.figures["lost"] == 0
        assert measured.figures["sent_per_s"] > 0


async def test_client_that_cannot_begin_is_named_with_its_error() -> None:
    """One that fails must not end the others' measurement."""
    row = dataclasses.replace(SHORT, work="no such work")
    with pytest.raises(Failed, match="ended before saying 'ready': KeyError: 'no such work'"):
        await measure(row, "aiodlock", window_s=0.1, warm_up_s=0.0)


async def test_client_that_hangs_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here because it is given no time at all."""
    monkeypatch.setattr("benchmarks._measure.READY_WITHIN_S", 0.01)
    with pytest.raises(Failed, match=r"hung for 0.01 s before saying 'ready'"):
        await measure(SHORT, "aiodlock", window_s=0.1, warm_up_s=0.0)


async def test_observer_sees_the_work_of_others_only(session_server: LockServer) -> None:
    """What it asks itself is in no figure."""
    async with (
        Observer(session_server.port) as observer,
        redis.asyncio.Redis(port=session_server.port) as other,
    ):
        await other.ping()
        first = await observer.look(keys=True)
        await other.set("seen", "x" * 1000)
        await other.eval("return redis.call('GET', 'seen')", 0)
        last = await observer.look(keys=True)
        await other.delete("seen")
    assert _server.calls_between(first, last) == {"set": 1, "eval": 1, "get": 1}
    assert 1000 < last.keys_bytes - first.keys_bytes < 1500
    assert last.connections >= 1


# What people see.


def drawn_results() -> Results:
    """Enough for every plot."""
    runs: list[Run] = []
    for plot in PLOTS:
        for size in (10, 100):
            runs += runs_of(f"{plot.rows}-{size}", "aiodlock", plot.figure, 1.5, 2.5)
    return results_of(*runs)


def test_plots_contain_no_script_and_load_nothing(tmp_path: Path) -> None:
    """Nothing runs or is fetched where the page is read."""
    pytest.importorskip("pygal")
    # It leaves an importer there that warns at everybody's next import.
    left = [finder for finder in sys.meta_path if type(finder).__name__ != "PluginImportFixer"]
    sys.meta_path[:] = left
    paths = draw(drawn_results(), tmp_path)
    assert [path.name for path in paths] == [plot.file for plot in PLOTS]
    for path in paths:
        for element in ElementTree.fromstring(path.read_text()).iter():
            assert not element.tag.endswith("script")
            links = [value for name, value in element.attrib.items() if name.endswith("href")]
            assert not [link for link in links if not link.startswith("#")]
        assert "aiodlock" in path.read_text()


def test_plots_show_clients_that_are_measured_each_in_its_color() -> None:
    """A line of nobody would not be missed."""
    for plot in PLOTS:
        rows = [row for row in ROWS if row.name.startswith(f"{plot.rows}-")]
        measured = {client for row in rows for client in row.clients}
        assert len(rows) >= 3
        assert set(plot.clients) <= measured
        assert set(plot.clients) <= set(COLORS)


def test_report_of_a_failure_names_it() -> None:
    """Also the errors in a run that has figures, and who was not there."""
    failed = Run("cycle-1", "coredis", 1, failed="hung for 5 s before saying 'done'")
    shaky = Run("cycle-1", "aiodlock", 1, {"errors": 3.0}, {"ConnectionError": 3})
    results = dataclasses.replace(
        results_of(failed, shaky), absent={"cycle-1": {"pottery": "pottery is not installed"}}
    )
    text = markdown(results)
    assert "* coredis Lock, round 1: hung for 5 s before saying 'done'" in text
    assert "* aiodlock, acquire and release, round 1: 3 x ConnectionError" in text
    assert "not measured, pottery is not installed" in text


def test_page_gets_the_report_between_its_marks(tmp_path: Path) -> None:
    """What stands around it stays, and a second time changes nothing."""
    page = tmp_path / "page.md"
    page.write_text(f"# Top\n\n{BEGIN}\nold\n{END}\n\nBottom\n")
    results = results_of(*runs_of("cycle-1", "aiodlock", "cycles_per_s", 1))
    write_into(page, results)
    once = page.read_text()
    write_into(page, results)
    assert page.read_text() == once
    assert "old" not in once
    assert once.startswith("# Top\n\n")
    assert once.endswith("\n\nBottom\n")
    assert markdown(results) in once


def test_page_of_the_documentation_says_what_the_results_say(tmp_path: Path) -> None:
    """No figure on it was written by hand."""
    text = (DOCS / "benchmarks.md").read_text()
    copy = tmp_path / "page.md"
    copy.write_text(f"{before(text)}{BEGIN}\n{END}{after(text)}")
    write_into(copy, Results.load(DOCS / "benchmarks" / "results.json"))
    assert copy.read_text() == text


def test_results_of_the_documentation_are_five_rounds_of_a_commit() -> None:
    """Neither a quick look nor a tree that nobody can get again."""
    results = Results.load(DOCS / "benchmarks" / "results.json")
    assert (results.parameters["rounds"], results.parameters["quick"]) == (ROUNDS, False)
    assert "dirty" not in results.about["commit"]


def test_plots_of_the_documentation_are_there() -> None:
    """And the page shows each."""
    text = (DOCS / "benchmarks.md").read_text()
    for plot in PLOTS:
        assert (DOCS / "benchmarks" / plot.file).exists()
        assert f"benchmarks/{plot.file}" in text


def test_order_survives_the_way_to_the_worker() -> None:
    """As JSON on a command line."""
    order = Order("aiodlock", "cycles", (1, 2), 3, 0.5, 0.1)
    assert Order.from_json(order.as_json()) == order
    assert asyncio.iscoroutinefunction(WORKS[order.work])
