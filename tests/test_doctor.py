"""`aiodlock doctor` without a server: from facts to findings, to a page, to a screen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from aiodlock.cli import _doctor_words as words
from aiodlock.cli import main
from aiodlock.cli._doctor import exit_code
from aiodlock.cli._doctor_ask import trouble_of
from aiodlock.cli._doctor_facts import (
    Clock,
    Facts,
    Leftovers,
    Plan,
    SlowCommand,
    lines_of,
    replicas_of,
)
from aiodlock.cli._doctor_findings import findings
from aiodlock.cli._doctor_kinds import CHECKS, KINDS, PAGE, Finding, Severity, worst
from aiodlock.cli._doctor_quorum import between
from aiodlock.cli._doctor_show import as_json, as_text

PLAN = Plan()
ROOT = Path(__file__).parent.parent

GOOD_INFO = """
aof_enabled:1
aof_last_write_status:ok
cluster_enabled:0
connected_clients:10
connected_slaves:0
evicted_keys:0
maxclients:10000
maxmemory:1000000
maxmemory_policy:noeviction
rdb_last_bgsave_status:ok
redis_version:7.2.4
role:master
server_mode:standalone
server_name:valkey
used_memory:500000
valkey_version:9.1.2
"""

# A fault, or what is nearly one.
Change = Callable[[Facts], Any]


def good(address: str = "redis://good:6379") -> Facts:
    """What a server without any fault tells."""
    facts = Facts(
        address=address,
        info=lines_of(GOOD_INFO),
        config={
            "appendfsync": "always",
            "busy-reply-threshold": "5000",
            "client-output-buffer-limit": "normal 0 0 0 slave 0 0 0 pubsub 33554432 8388608 60",
            "min-replicas-max-lag": "10",
            "min-replicas-to-write": "0",
            "save": "",
            "timeout": "0",
        },
        clock=Clock(0.01, 0.001),
        clock_later=Clock(0.011, 0.001),
        refused={},
        write_trouble="",
        message_delays_s=[0.001],
        latencies_s=[0.001, 0.002],
        sentinels=0,
        leftovers=Leftovers(seen=3),
    )
    facts.info.update(run_id=address, master_replid=address)
    return facts


def seen(change: Change, *, is_node: bool = False) -> set[str]:
    """The kinds that are found after *change*."""
    facts = good()
    change(facts)
    return {finding.kind.id for finding in findings(facts, PLAN, is_node=is_node)}


def info(**values: str) -> Change:
    """`INFO` says so."""
    return lambda facts: facts.info.update(values)


def config(**values: str) -> Change:
    """`CONFIG GET` says so; `_` stands for `-`."""
    settings = {key.replace("_", "-"): value for key, value in values.items()}
    return lambda facts: facts.config.update(settings)


def having(**values: Any) -> Change:
    """These facts are so."""

    def change(facts: Facts) -> None:
        for name, value in values.items():
            setattr(facts, name, value)

    return change


def both(*changes: Change) -> Change:
    """One after the other."""

    def change(facts: Facts) -> None:
        for one in changes:
            one(facts)

    return change


def followed(state: str = "online", lag: int = 0, **settings: str) -> Change:
    """A replica follows it."""
    replica = f"ip=10.0.0.7,port=6379,state={state},offset=1,lag={lag}"

    def change(facts: Facts) -> None:
        facts.info.update(connected_slaves="1", slave0=replica, min_slaves_good_slaves="1")
        facts.replicas = replicas_of(facts.info)

    return both(change, config(min_replicas_to_write="1"), config(**settings))


def clustered(ok: str = "16384", state: str = "ok", nodes: str = "1") -> Change:
    """It is in a cluster."""
    told = {"cluster_state": state, "cluster_slots_ok": ok, "cluster_known_nodes": nodes}
    return both(info(cluster_enabled="1", server_mode="cluster"), having(cluster=told))


def left(**odd: Any) -> Change:
    """This is under the prefix."""
    return having(leftovers=Leftovers(**{"seen": 7, **odd}))


NOTHING: Change = both()

# By kind: what shows it, and what comes near but does not.
CASES: dict[str, tuple[Change, Change]] = {
    "unreachable": (having(trouble=("unreachable", "refused")), having(trouble=("busy", "BUSY"))),
    "not-redis": (having(trouble=("not-redis", 'got "H"')), having(trouble=("login", "no"))),
    "certificate": (
        having(trouble=("certificate", "self-signed")),
        having(trouble=("not-redis", "wrong version number")),
    ),
    "login": (having(trouble=("login", "WRONGPASS")), having(trouble=("unreachable", "no"))),
    "busy": (having(trouble=("busy", "BUSY")), having(trouble=("loading", "LOADING"))),
    "loading": (having(trouble=("loading", "LOADING")), having(trouble=("busy", "BUSY"))),
    "connections-full": (
        having(trouble=("connections-full", "max number of clients reached")),
        info(connected_clients="9999"),
    ),
    "old-server": (
        info(server_name="redis", valkey_version="", redis_version="6.0.16"),
        info(server_name="redis", redis_version="6.2.0"),
    ),
    "untested-server": (info(dragonfly_version="df-1.2"), info(valkey_version="99.0")),
    "sentinel": (info(server_mode="sentinel"), info(server_mode="standalone")),
    "sentinels": (having(sentinels=3), having(sentinels=None)),
    "could-not-see": (having(unseen={"INFO": "NOPERM"}), NOTHING),
    "slots-uncovered": (clustered(ok="16383"), clustered()),
    "one-node-of-many": (clustered(nodes="3"), clustered(nodes="1")),
    "evicts": (info(maxmemory_policy="volatile-ttl"), info(maxmemory_policy="noeviction")),
    "may-evict": (
        info(maxmemory_policy="allkeys-lru", maxmemory="0"),
        info(maxmemory_policy="allkeys-lru"),
    ),
    "full": (info(used_memory="1000000"), info(used_memory="999999")),
    "nearly-full": (info(used_memory="900000"), info(used_memory="899999")),
    "disk": (info(aof_last_write_status="err"), info(aof_last_write_status="ok")),
    "forgets": (info(aof_enabled="0"), config(save="3600 1")),
    "fsync-no": (config(appendfsync="no"), config(appendfsync="everysec")),
    "loses-seconds": (config(appendfsync="everysec"), config(appendfsync="always")),
    "replica": (info(role="slave"), followed()),
    "too-few-replicas": (
        both(followed(), info(min_slaves_good_slaves="0")),
        both(followed(), info(min_slaves_good_slaves="1")),
    ),
    "replica-lags": (followed(lag=6), followed(lag=5)),
    "cut-off-primary": (followed(min_replicas_to_write="0"), followed()),
    "failover-loses": (followed(), NOTHING),
    "clock-steps": (having(clock_later=Clock(3.0, 0.001)), having(clock_later=Clock(0.1, 0.001))),
    "clock-off": (
        having(clock=Clock(1.1, 0.05), clock_later=None),
        having(clock=Clock(-1.1, 0.2), clock_later=None),
    ),
    "not-allowed": (having(refused={"+eval": "NOPERM"}), having(refused={"asking": "NOPERM"})),
    "no-asking": (having(refused={"asking": "NOPERM"}), having(refused={"+eval": "NOPERM"})),
    "writes-refused": (having(write_trouble="OOM"), having(write_trouble=None)),
    "commands-fail": (having(failed={"GET": "ERR"}), having(write_trouble="READONLY")),
    "no-messages": (having(message_trouble="not heard"), having(message_delays_s=[1.0])),
    "too-slow": (having(latencies_s=[0.001, 2.0]), having(latencies_s=[1.999])),
    "slow": (having(latencies_s=[0.001, 1.0]), having(latencies_s=[0.999])),
    "slow-commands": (
        having(slow_commands=[SlowCommand("KEYS", 1.0, 60)]),
        having(slow_commands=[SlowCommand("KEYS", 1.0, 3601), SlowCommand("KEYS", 0.9, 60)]),
    ),
    "script-limit": (config(busy_reply_threshold="0"), config(busy_reply_threshold="1")),
    "no-ttl": (left(no_ttl=["aiodlock:{a}"]), left()),
    "not-a-lock": (left(wrong_type=["aiodlock:{a}"]), left()),
    "foreign-values": (left(foreign=["aiodlock:{a}"]), left()),
    "dead-queues": (left(dead_queues=["aiodlock:{a}:queue"]), left()),
    "strangers": (left(strangers=["aiodlock:a"]), left()),
    "not-all-keys": (left(is_whole=False), left(seen=100_000)),
    "connections-near-limit": (info(connected_clients="9000"), info(connected_clients="8999")),
    "message-buffer": (
        config(client_output_buffer_limit="normal 0 0 0 pubsub 1048575 0 0"),
        config(client_output_buffer_limit="normal 1 1 1 pubsub 0 0 0"),
    ),
    "idle-timeout": (config(timeout="300"), config(timeout="0")),
}


@pytest.mark.parametrize("kind", CASES)
def test_findings_of_a_fault_name_it(kind: str) -> None:
    """Each kind of one server, by a change of one fact or two."""
    assert kind in seen(CASES[kind][0])


@pytest.mark.parametrize("kind", CASES)
def test_findings_of_what_is_nearly_that_fault_do_not_name_it(kind: str) -> None:
    """The next value that is well, or another fault."""
    assert kind not in seen(CASES[kind][1])


def test_findings_of_a_good_server_are_all_ok() -> None:
    """One for each check of a single server; the text says what is promised."""
    found = findings(good(), PLAN)
    assert worst(found) is Severity.OK
    assert [one.kind.id for one in found] == [
        check for check in CHECKS if check not in ("cluster", "quorum")
    ]
    assert all(one.text and one.address == "redis://good:6379" for one in found)


def test_findings_of_nothing_seen_guess_nothing() -> None:
    """Neither a fault nor a promise: only what could not be seen."""
    facts = Facts("x", unseen={"INFO": "NOPERM", "CONFIG GET": "NOPERM", "SCAN": "NOPERM"})
    assert [one.kind.id for one in findings(facts, PLAN)] == ["could-not-see"] * 3


def test_findings_of_half_a_fact_guess_nothing() -> None:
    """An append-only file of whose fsync nothing is known, replicas without the setting."""
    assert not {"restart", "loses-seconds", "fsync-no"} & seen(lambda f: f.config.clear())
    assert "cut-off-primary" not in seen(both(followed(), lambda f: f.config.clear()))
    found = findings(_changed(both(info(aof_enabled="0"), lambda f: f.config.clear())), PLAN)
    (text,) = [one.text for one in found if one.kind.id == "forgets"]
    assert "could not be seen" in text


def test_findings_are_judged_by_the_ttl() -> None:
    """What is quick for half a minute is slow for half a second."""
    facts = _changed(having(latencies_s=[0.06]))
    assert worst(findings(facts, Plan(ttl=30))) is Severity.OK
    assert worst(findings(facts, Plan(ttl=0.5))) is Severity.WARNING
    assert worst(findings(facts, Plan(ttl=0.15))) is Severity.DANGER


def _changed(change: Change) -> Facts:
    facts = good()
    change(facts)
    return facts


# Between the nodes of a quorum


def nodes(*changes: Change, count: int = 3) -> list[Facts]:
    """So many good ones, the first of them with these changes."""
    made = [good(f"redis://node-{number}:6379") for number in range(count)]
    for node, change in zip(made, changes, strict=False):
        change(node)
    return made


FIRST = "redis://node-0:6379"

# By kind: nodes that show it, and nodes that nearly do.
SILENT = having(trouble=("unreachable", "refused"))

QUORUMS: dict[str, tuple[list[Facts], list[Facts]]] = {
    "no-majority": (nodes(SILENT, SILENT), nodes(SILENT)),
    "nodes-missing": (nodes(SILENT), nodes(NOTHING)),
    "too-few-nodes": (nodes(count=2), nodes(count=3)),
    "even-nodes": (nodes(count=4), nodes(count=5)),
    "same-server": (nodes(NOTHING, info(run_id=FIRST)), nodes(info(run_id="x"), info(run_id="y"))),
    "nodes-replicate": (
        nodes(NOTHING, info(master_replid=FIRST)),
        nodes(NOTHING, info(run_id=FIRST, master_replid=FIRST)),
    ),
    "node-in-cluster": (nodes(clustered()), nodes(info(cluster_enabled="0"))),
    "node-with-replicas": (nodes(followed()), nodes(having(sentinels=0))),
    "clocks-differ": (
        nodes(having(clock=Clock(1.2, 0.01))),
        nodes(having(clock=Clock(1.2, 0.3))),
    ),
}


@pytest.mark.parametrize("kind", QUORUMS)
def test_findings_between_nodes_name_the_fault(kind: str) -> None:
    """And not what nearly is one."""
    shows, does_not = QUORUMS[kind]
    assert kind in {one.kind.id for one in between(shows)}
    assert kind not in {one.kind.id for one in between(does_not)}


def test_findings_between_good_nodes_say_what_they_bear() -> None:
    """And how many more, where one of them cannot be asked."""
    (found,) = between(nodes(count=5))
    assert (found.kind.severity, found.text) == (Severity.OK, "5 nodes, bears the loss of 2")
    (found,) = between(nodes(SILENT, count=5))
    assert found.text == "4 of 5 nodes are well: bears the loss of 1 more"


@pytest.mark.parametrize("sync", ["everysec", "no", None])
def test_findings_of_a_node_that_may_forget_ask_for_a_delay(sync: str | None) -> None:
    """Where a single server would be told to keep more."""
    change = info(aof_enabled="0") if sync is None else config(appendfsync=sync)
    assert "restart-delay" in seen(change, is_node=True)
    assert not {"forgets", "fsync-no", "loses-seconds"} & seen(change, is_node=True)
    assert "restart-delay" not in seen(change)
    assert "restart-delay" not in seen(NOTHING, is_node=True)


def test_findings_of_a_node_leave_out_what_a_quorum_has_not() -> None:
    """No failover and no messages; but a replica takes no votes."""
    assert not {"failover", "failover-loses", "no-messages"} & seen(
        both(followed(), having(message_trouble="refused")), is_node=True
    )
    assert "replica" in seen(info(role="slave"), is_node=True)


# Kinds, and the page that explains them


def test_kinds_each_have_a_case() -> None:
    """Whoever adds a kind adds what shows it, and what does not."""
    bad = {id_ for id_, kind in KINDS.items() if kind.severity is not Severity.OK}
    assert bad == {*CASES, *QUORUMS, "restart-delay"}


def _sections() -> dict[str, str]:
    """The page, by the anchor of each heading."""
    parts = re.split(r"^##+ (.+)$", (ROOT / PAGE).read_text(), flags=re.MULTILINE)
    return dict(zip(map(_slug, parts[1::2]), parts[2::2], strict=True))


def _slug(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


@pytest.mark.parametrize("id_", KINDS)
def test_page_explains_every_kind_under_its_anchor(id_: str) -> None:
    """With the same why and remedy as the command, word for word."""
    kind = KINDS[id_]
    assert kind.link == f"{PAGE}#{id_}"
    section = " ".join(_sections()[id_].split())
    assert kind.why in section
    assert kind.remedy in section
    if kind.severity is not Severity.OK:
        assert f"**{kind.severity}**" in section


def test_page_explains_nothing_that_is_not_found() -> None:
    """A kind that went leaves the page as well."""
    general = {"use", "exit-code", "what-it-does-to-the-server"}
    assert set(_sections()) - general == KINDS.keys()


# What is read


def test_lines_of_info_are_read_as_they_stand() -> None:
    """Headings are none; an id of digits stays one."""
    assert lines_of("# Server\r\nrun_id:00e1\r\nos:Linux: x\r\n\r\n") == {
        "run_id": "00e1",
        "os": "Linux: x",
    }


def test_number_of_what_was_not_seen_is_none() -> None:
    """Nor of a word."""
    facts = Facts("x", info={"a": "1.5", "b": "yes"}, config={"c": "2"}, cluster={"d": "3"})
    assert [facts.number(key) for key in "abcde"] == [1.5, None, 2.0, 3.0, None]


@pytest.mark.parametrize(
    ("error", "has_answered", "kind"),
    [
        (InvalidResponse('got "H"'), False, "not-redis"),
        (RedisConnectionError("Connection closed by server."), False, "not-redis"),
        (RedisConnectionError("Connection closed by server."), True, "unreachable"),
        (RedisConnectionError("max number of clients reached"), False, "connections-full"),
        (BusyLoadingError("Redis is loading", status_code="LOADING"), True, "loading"),
        (OSError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), False, "certificate"),
        (OSError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), False, "not-redis"),
        (AuthenticationError("invalid password"), False, "login"),
        (ResponseError("BUSY Redis is busy"), False, "busy"),
        (OSError("no route"), False, "unreachable"),
    ],
)
def test_trouble_is_told_by_what_was_raised(
    error: Exception, has_answered: bool, kind: str
) -> None:
    """Who hangs up in the middle has shown before that it is a Redis."""
    assert trouble_of(error, has_answered=has_answered)[0] == kind


def test_amounts_are_said_as_people_do() -> None:
    """Never with an exponent."""
    assert [words.seconds(s) for s in (0.0000213, 0.00996, 0.0999, 0.9999, 1, 59.96)] == [
        *("0.021 ms", "10 ms", "100 ms", "1000 ms", "1.0 s", "60.0 s")
    ]
    assert [words.size(n) for n in (0, 999.6, 1536, 100 << 20, 5 << 30, 3 << 40)] == [
        *("0 B", "0.976 kB", "1.5 kB", "100 MB", "5 GB", "3072 GB")
    ]


# What is shown


def shown(*changes: Change) -> list[Finding]:
    """Findings of servers with these changes."""
    made = nodes(*changes, count=len(changes))
    return [finding for facts in made for finding in findings(facts, PLAN)]


def test_text_fits_into_80_columns_and_explains_the_worst_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long a key or the server's words are."""
    monkeypatch.setenv("COLUMNS", "80")
    change = both(
        left(no_ttl=["aiodlock:{" + "x" * 200 + "}"], strangers=["aiodlock:ä\udcff\x1b[31m"]),
        info(maxmemory_policy="allkeys-lru"),
        config(timeout="5"),
    )
    text = as_text(shown(change), PLAN, coloured=False)
    assert max(map(len, text.splitlines())) < 80
    heads = re.findall(r"^(\w+): ([\w-]+) \(", text, re.MULTILINE)
    assert heads == [
        ("danger", "evicts"),
        ("warning", "no-ttl"),
        ("note", "strangers"),
        ("note", "idle-timeout"),
    ]
    assert r"aiodlock:ä\xff\x1b[31m" in text
    assert text.endswith("1 danger, 1 warning, 2 notes")


def test_text_of_several_servers_explains_a_kind_once() -> None:
    """A table for each, one why, and where it was found."""
    text = as_text(shown(config(timeout="5"), config(timeout="5")), PLAN, coloured=False)
    places = {one.address for one in shown(NOTHING, NOTHING)}
    assert f"\n  at   {', '.join(sorted(places))}\n" in text
    assert text.count("timeout 5 s") == 2
    assert text.count("note: idle-timeout (connections)") == 1
    assert text.count("what was seen") == 2


def test_text_of_a_good_server_says_that_all_is_well() -> None:
    """In a line of its own at the end."""
    assert as_text(shown(NOTHING), PLAN, coloured=False).endswith("all is well")


def test_json_has_every_finding_with_its_reasons() -> None:
    """For a program; a quorum's own findings are of no server."""
    found = [*shown(config(timeout="5")), *between(nodes(count=4))]
    told = json.loads(as_json(found, PLAN, 0))
    assert (told["worst"], told["exit_code"], told["ttl"]) == ("note", 0, 30.0)
    assert len(told["findings"]) == len(found)
    by_kind = {one["kind"]: one for one in told["findings"]}
    assert by_kind["even-nodes"]["server"] is None
    assert by_kind["idle-timeout"] == {
        "server": FIRST,
        "check": "connections",
        "kind": "idle-timeout",
        "severity": "note",
        "seen": "timeout 5 s",
        "why": KINDS["idle-timeout"].why,
        "remedy": KINDS["idle-timeout"].remedy,
        "link": "docs/reference/doctor.md#idle-timeout",
    }


@pytest.mark.parametrize(
    ("troubles", "kinds", "code"),
    [
        ([None], ["server"], 0),
        ([None], ["server", "loses-seconds"], 0),
        ([None], ["forgets", "loses-seconds"], 1),
        ([None], ["forgets", "evicts"], 2),
        (["unreachable"], ["unreachable"], 69),
        (["not-redis"], ["not-redis"], 69),
        (["login"], ["login"], 2),
        (["unreachable", None, None], ["unreachable"], 2),
        (["unreachable", "not-redis", None], ["unreachable"], 69),
    ],
)
def test_exit_code_goes_by_the_worst(troubles: list[Any], kinds: list[str], code: int) -> None:
    """69 only where no lock could be had, for nobody answers."""
    facts = [Facts("x", trouble=trouble and (trouble, "words")) for trouble in troubles]
    assert exit_code(facts, [Finding(KINDS[kind], "seen") for kind in kinds]) == code


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which server"),
        (["--url", "http://localhost"], "not the URL of a server"),
        (["--ttl", "0", "--url", "redis://localhost"], "must be from 0.01"),
        (["--ttl", "nan", "--url", "redis://localhost"], "must be from 0.01"),
        (["--ttl", "soon", "--url", "redis://localhost"], "must be from 0.01"),
        (["--prefix", "a{b}", "--url", "redis://localhost"], "without { and }"),
    ],
)
def test_doctor_with_bad_options_exits_64_and_says_what_is_allowed(
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never 1 or 2, which are findings."""
    monkeypatch.delenv("AIODLOCK_URL", raising=False)
    assert _code_of(argv) == 64
    assert message in capsys.readouterr().err


def _code_of(argv: list[str]) -> object:
    try:
        return main(["doctor", *argv])
    except SystemExit as end:  # argparse's own way
        return end.code
