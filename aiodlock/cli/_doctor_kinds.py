"""Every kind of finding of `aiodlock doctor`, out of doctor.toml beside this file."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Final

PAGE: Final = "docs/reference/doctor.md"


class Severity(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    DANGER = "danger"

    @property
    def rank(self) -> int:
        """Larger is worse."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that may be found.

    Attributes:
        id: Its anchor on the page; a kind that is ok has that of its check.
        check: What was looked at.
        why: What it does to a lock; "" where all is well.
        remedy: What to do.
    """

    id: str
    check: str
    severity: Severity
    why: str = ""
    remedy: str = ""

    @property
    def link(self) -> str:
        """Where the documentation tells more."""
        return f"{PAGE}#{self.id}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen that makes it one of its kind; *address* is "" for what concerns all nodes."""

    kind: Kind
    text: str
    address: str = ""


def worst(findings: Iterable[Finding]) -> Severity:
    """How bad the worst of them is."""
    severities = [finding.kind.severity for finding in findings]
    return max(severities, key=lambda severity: severity.rank, default=Severity.OK)


CHECKS: Final = (
    *("server", "cluster", "memory", "restart", "failover", "clock", "permissions"),
    *("messages", "latency", "leftovers", "connections", "quorum"),
)


def _read() -> dict[str, Kind]:
    """By id; for each check there is one besides that says all is well."""
    text = resources.files(__package__).joinpath("doctor.toml").read_text("utf-8")
    kinds = {check: Kind(check, check, Severity.OK) for check in CHECKS}
    for id_, told in tomllib.loads(text).items():
        why, remedy = (" ".join(told[words].split()) for words in ("why", "remedy"))
        kinds[id_] = Kind(id_, told["check"], Severity(told["severity"]), why, remedy)
    return kinds


KINDS: Final = _read()
