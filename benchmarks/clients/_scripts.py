"""The scripts that the floors send."""

from __future__ import annotations

from typing import Final

from aiodlock._store._wire import Script
from aiodlock._store._wire import digest as sha

__all__ = ["COMPARE_AND_DELETE", "own", "sha"]

COMPARE_AND_DELETE: Final = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


def own(name: str) -> str:
    """The text of one of aiodlock's scripts."""
    return Script(name).text
