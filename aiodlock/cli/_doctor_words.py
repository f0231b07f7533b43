"""How `aiodlock doctor` says what it has seen: makes and versions, keys, amounts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

OTHERS: Final = ("dragonfly", "kvrocks", "garnet", "keydb")
"""Servers that speak the same protocol, and are not tested."""

_SHOWN: Final = 3


def product(info: dict[str, str]) -> tuple[str, str]:
    """Who made it, with the version; those who imitate Redis give themselves away by a key."""
    for other in OTHERS:
        if f"{other}_version" in info:
            return other.capitalize(), info[f"{other}_version"]
    if info.get("valkey_version"):
        return "Valkey", info["valkey_version"]
    if "keydb" in info.get("executable", ""):
        return "Keydb", info.get("redis_version", "")
    return "Redis", info.get("redis_version", "")


def is_older(version: str, than: tuple[int, int]) -> bool:
    """Whether *version* is before *than*; one that is no version is not."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return False
    return (int(parts[0]), int(parts[1])) < than


def message_buffer(limits: str) -> float:
    """The hard limit for pubsub out of `normal 0 0 0 slave ... pubsub 33554432 8388608 60`."""
    words = limits.split()
    if "pubsub" not in words[:-1]:
        return 0
    hard = words[words.index("pubsub") + 1]
    return int(hard) if hard.isdecimal() else 0


def count(number: float, word: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number:.0f} {word}" if number == 1 else f"{number:.0f} {word}s"


def some(keys: Iterable[str]) -> str:
    """The first of *keys*, whatever bytes are in them."""
    shown = [key.encode(errors="surrogateescape").decode(errors="backslashreplace") for key in keys]
    return ", ".join(sorted(shown)[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")


def size(number: float) -> str:
    """Bytes, as people say it."""
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.0f} GB"


def seconds(number: float) -> str:
    """Seconds, or milliseconds where that is more to read."""
    if number >= 1:
        return f"{number:.1f} s"
    number *= 1000
    return f"{number:.0f} ms" if number >= 10 else f"{number:.2g} ms"
