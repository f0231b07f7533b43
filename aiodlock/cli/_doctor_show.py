"""Shows the findings of `aiodlock doctor` to people, or as JSON to programs."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from aiodlock.cli._doctor_facts import Plan
from aiodlock.cli._doctor_kinds import Finding, Kind, Severity, worst
from aiodlock.cli._table import Cell, Tone, table

_T = TypeVar("_T")

_HEAD: Final = ("", "check", "what was seen")
_WIDEST: Final = 100  # beyond this lines are hard to read
_NARROWEST: Final = 60
_TONES: Final = {
    Severity.OK: Tone.GOOD,
    Severity.NOTE: Tone.PLAIN,
    Severity.WARNING: Tone.BAD,
    Severity.DANGER: Tone.BAD,
}


def as_text(findings: Sequence[Finding], plan: Plan, *, coloured: bool) -> str:
    """A table for each server, then each kind that is not ok, with its why and remedy."""
    width = max(_NARROWEST, min(shutil.get_terminal_size((80, 24)).columns - 1, _WIDEST))
    lines: list[str] = []
    addresses = _in_order(finding.address for finding in findings)
    are_many = len(addresses) > 1
    for address in addresses:
        here = [finding for finding in findings if finding.address == address]
        lines += [address or "all of them, as a quorum", ""]
        lines += table(_HEAD, list(_rows(here, width)), coloured=coloured)
        lines.append("")
    kinds = _in_order(finding.kind for finding in findings)
    for kind in sorted(kinds, key=lambda kind: kind.severity.rank, reverse=True):
        if kind.severity is not Severity.OK:
            places = [one.address for one in findings if one.kind is kind and one.address]
            lines += _explained(kind, _in_order(places) if are_many else (), width)
    lines.append(_verdict(findings, plan))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding], plan: Plan, exit_code: int) -> str:
    """The same for a program."""
    return json.dumps(
        {
            "worst": worst(findings),
            "exit_code": exit_code,
            "ttl": plan.ttl,
            "prefix": plan.prefix,
            "findings": [
                {
                    "server": finding.address or None,
                    "check": finding.kind.check,
                    "kind": finding.kind.id,
                    "severity": finding.kind.severity,
                    "seen": finding.text,
                    "why": finding.kind.why,
                    "remedy": finding.kind.remedy,
                    "link": finding.kind.link,
                }
                for finding in findings
            ],
        },
        indent=2,
    )


def _rows(findings: Sequence[Finding], width: int) -> Iterator[list[Cell]]:
    severities = max(len(finding.kind.severity) for finding in findings)
    checks = max(len(_HEAD[1]), *(len(finding.kind.check) for finding in findings))
    room = width - severities - checks - 4
    for finding in findings:
        kind = finding.kind
        first, *rest = textwrap.wrap(_printable(finding.text), room, break_on_hyphens=False) or [""]
        yield [Cell(kind.severity, _TONES[kind.severity]), Cell(kind.check), Cell(first)]
        for line in rest:
            yield [Cell(""), Cell(""), Cell(line)]


def _printable(text: str) -> str:
    """What a key or a server's words must not do: move the cursor, or change colours."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _explained(kind: Kind, places: Sequence[str], width: int) -> list[str]:
    return [
        f"{kind.severity}: {kind.id} ({kind.check})",
        *(_wrapped("at", ", ".join(places), width) if places else ()),
        *_wrapped("why", kind.why, width),
        *_wrapped("do", kind.remedy, width),
        f"  see  {kind.link}",
        "",
    ]


def _wrapped(word: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {word:<3}  ",
        subsequent_indent=" " * 7,
        break_on_hyphens=False,
    )


def _verdict(findings: Sequence[Finding], plan: Plan) -> str:
    counts = {
        severity: sum(finding.kind.severity is severity for finding in findings)
        for severity in reversed(Severity)
        if severity is not Severity.OK
    }
    told = [f"{count} {severity}{'s'[: count != 1]}" for severity, count in counts.items() if count]
    for_whom = f"For locks with a ttl of {plan.ttl:g} s under {plan.prefix!r}: "
    return for_whom + (", ".join(told) or "all is well")


def _in_order(items: Iterable[_T]) -> list[_T]:
    """Each once."""
    return list(dict.fromkeys(items))
