"""Peers that live in folders of their own."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INSTALL_WITHIN_S = 120.0


@dataclass(frozen=True)
class Place:
    """A folder inside the environment, for one peer.

    Attributes:
        name: The distribution's, except for node.
        proof: What is there once it is installed.
        because: Why it is apart.
    """

    name: str
    requirements: tuple[str, ...]
    proof: str
    because: str

    @property
    def path(self) -> Path:
        return Path(sys.prefix) / "aiodlock-peers" / self.name

    @property
    def is_node(self) -> bool:
        return self.proof.endswith("package.json")

    def prepare(self) -> None:
        """Install it, unless it is there; what went wrong stands in `absence`."""
        if not self._is_there:
            self.path.mkdir(parents=True, exist_ok=True)
            self._failure_path.write_text(self._install())

    def absence(self) -> str | None:
        """Why it is not there; None if it is."""
        if self._is_there:
            return None
        if self._failure_path.exists():
            return self._failure_path.read_text()
        return "was not installed"

    def version(self) -> str | None:
        if not self._is_there:
            return None
        if self.is_node:
            return str(json.loads((self.path / self.proof).read_text())["version"])
        found = importlib.metadata.distributions(path=[str(self.path)], name=self.name)
        return next((one.version for one in found), None)

    @property
    def _is_there(self) -> bool:
        return (self.path / self.proof).exists()

    @property
    def _failure_path(self) -> Path:
        return self.path / "why-not.txt"

    def _install(self) -> str:
        """Why it failed, in one line."""
        command = self._node_command() if self.is_node else self._python_command()
        if command is None:
            return "node or npm is not on this machine"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return repr(error)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1] if done.returncode else ""

    def _node_command(self) -> list[str] | None:
        npm = shutil.which("npm")
        if npm is None or shutil.which("node") is None:
            return None
        quiet = ("--no-audit", "--no-fund", "--no-save")
        return [npm, "install", *quiet, "--prefix", str(self.path), *self.requirements]

    def _python_command(self) -> list[str]:
        uv = shutil.which("uv")
        pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
        python = ["--python", sys.executable] if uv else []
        # redis-py is here, in the version that all share; what else one needs it names.
        target = ["--no-deps", "--target", str(self.path)]
        return [*pip, "install", *python, *target, *self.requirements]


REDIS_LOCK_PY: Final = Place(
    "redis-lock-py",
    ("redis-lock-py>=1.3,<2",),
    "redis_lock/asyncio/__init__.py",
    "its module has the name of python-redis-lock's",
)
AIOREDLOCK: Final = Place(
    "aioredlock",
    ("aioredlock>=0.7.3,<0.8", "aioredis>=1.3.1,<2", "async-timeout>=4,<6", "attrs>=23"),
    "aioredlock/__init__.py",
    "it needs aioredis 1, of before redis-py had asyncio",
)
REDLOCK_NG: Final = Place(
    "redlock-ng",
    ("redlock-ng>=2.0.4,<3",),
    "redlock/client.py",
    "it asks for redis-py below 6, although it works with the version here",
)
REDLOCK: Final = Place(
    "node", ("redlock@^4.2", "ioredis@^5"), "node_modules/redlock/package.json", "it is for node"
)
PLACES: Final = (REDIS_LOCK_PY, AIOREDLOCK, REDLOCK_NG, REDLOCK)
