"""Tries whatever a lock needs to be allowed, on a key of a random name that is gone afterwards.

Trying is better than asking (`ACL DRYRUN`): it works on every server, for every user, and also
finds a server that takes no writes from anybody.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import MovedError, RedisError, ResponseError

from aiodlock import NotAllowedError, _names
from aiodlock._store._wire import Script, digest, trouble
from aiodlock.cli._doctor_facts import said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodlock.cli._doctor_asker import Asker

_INSPECT: Final = Script("inspect")
_SHA: Final = digest(_INSPECT.text)
_NAMES: Final = 256  # of which one is in a slot of this node's, in clusters of a usual size
_LIFE_MS: Final = 5000  # of the key that is written, should we end before we can delete it

# On a key that is not there, and without effect: XX writes to what exists only.
_TRIES: Final[tuple[tuple[str, ...], ...]] = (
    ("EXISTS", "key"),
    ("GET", "key"),
    ("SET", "key", "", "XX", "GET"),
    ("DEL", "key"),
    ("PTTL", "key"),
    ("EXPIRE", "key", "12"),
    ("PEXPIRE", "key", "12000"),
    ("ZADD", "key", "XX", "0", ""),
    ("ZREM", "key", ""),
    ("ZSCORE", "key", ""),
    ("ZRANK", "key", ""),
    ("ZRANGE", "key", "0", "0"),
    ("ZRANGEBYSCORE", "key", "0", "0"),
    ("ZCARD", "key"),
    ("TIME",),
    ("EVAL", _INSPECT.text, "2", "key", "key"),
    ("EVALSHA", _SHA, "2", "key", "key"),
)
# The last one says something about the command behind it, so none may follow that minds.
_IN_A_CLUSTER: Final = (("CLUSTER", "SLOTS"), ("COMMAND", "COUNT"), ("ASKING",))


async def try_all(asker: Asker) -> Sequence[str]:
    """Note what is refused, and whether a key can be written.

    Returns:
        The call by which to measure: a script of ours that only reads, where that is possible.
    """
    facts = asker.facts
    key, is_here = await _key(asker)
    tries = _TRIES + (_IN_A_CLUSTER if facts.is_clustered else ())
    commands = [tuple(key if word == "key" else word for word in one) for one in tries]
    replies = await asker.ask_all(*commands)
    facts.refused = _refused(commands, replies, asker.plan.prefix)
    rules = facts.refused.keys()
    if is_here and not {"+set", "+del", f"~{asker.plan.prefix}*"} & rules:
        await _write(asker, key)
    if is_here and not facts.write_trouble:
        _note_failures(asker, commands, replies)
    by_script = {"+evalsha", "+eval", "+get", "+pttl", "+zcard", f"~{asker.plan.prefix}*"}
    if is_here and not by_script & rules:
        return ("EVALSHA", _SHA, "2", key, key)
    return ("PING",)


async def _key(asker: Asker) -> tuple[str, bool]:
    """A key that nobody has, in a slot of this node's; with whether there is one."""
    names = [f"doctor:{_names.new_client_id()}" for _ in range(_NAMES)]
    keys = [_names.keys(asker.plan.prefix, name).lock for name in names]
    if not asker.facts.is_clustered:
        return keys[0], True
    replies = await asker.ask_all(*(("EXISTS", key) for key in keys))
    for key, reply in zip(keys, replies, strict=True):
        if not isinstance(reply, MovedError):
            return key, True
    return keys[0], False


def _refused(commands: list[tuple[str, ...]], replies: list[Any], prefix: str) -> dict[str, str]:
    """By the rule that is missing, the server's words."""
    refused = {}
    for command, reply in zip(commands, replies, strict=True):
        if not isinstance(reply, Exception):
            continue
        if not isinstance(trouble(reply, ""), NotAllowedError):
            continue
        words = str(reply)
        # A refusal inside the script is not of the script: its own command is refused by itself.
        if command[0].startswith("EVAL") and command[0].lower() not in words.lower():
            continue
        refused[_rule(command, words, prefix)] = words
    return refused


def _note_failures(asker: Asker, commands: list[tuple[str, ...]], replies: list[Any]) -> None:
    """Note what failed although it is not forbidden: some proxies know few commands."""
    failed: dict[str, list[str]] = {}
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, Exception) and not isinstance(trouble(reply, ""), NotAllowedError):
            failed.setdefault(said(reply), []).append(command[0])
    for words, names in failed.items():
        asker.facts.failed[", ".join(names)] = words


def _rule(command: tuple[str, ...], words: str, prefix: str) -> str:
    if "access a key" in words or "of the keys" in words:
        return f"~{prefix}*"
    name = command[0].lower()
    if name == "asking":
        return name
    return f"+{name}|{command[1].lower()}" if name == "cluster" else f"+{name}"


async def _write(asker: Asker, key: str) -> None:
    """Write the key, with a ttl from the same command, and delete it."""
    asker.check_time()
    try:
        await asker.redis.set(key, "", px=_LIFE_MS)
        asker.facts.write_trouble = ""
    except ResponseError as error:
        asker.facts.write_trouble = said(error)
    finally:
        with contextlib.suppress(RedisError, OSError):
            await asker.redis.delete(key)
