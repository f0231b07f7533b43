"""The scripts that the floors send."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

COMPARE_AND_DELETE: Final = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
)


def own(name: str) -> str:
    """The text of one of aiodlock's scripts."""
    return resources.files("aiodlock._store").joinpath(f"lua/{name}.lua").read_text()


def sha(text: str) -> str:
    """By which EVALSHA knows it."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
