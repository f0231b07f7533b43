"""Which names are in use under a prefix."""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiodlock import _names
from aiodlock._store._api import NoAnswer
from aiodlock._store._wire import text
from aiodlock.cli._site import AT_ONCE, Node, Site
from aiodlock.cli._standing import Standing, standing_of, untold

# Keys that one SCAN looks at: the server is ours for some 0.2 ms, and others come in between.
_COUNT: Final = 1000
_WAITERS_MOST: Final = 100  # Of each name; the first who is alive has waited longest.
_MAGIC: Final = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Listing:
    """The names in use, sorted.

    `is_complete`: there are no more; `silent` is what the nodes say that could not be asked.
    """

    standings: tuple[Standing, ...]
    is_complete: bool
    silent: dict[str, str]


async def listing_of(site: Site, pattern: str, *, limit: int) -> Listing:
    """The names under the prefix that match *pattern* and are held, or waited for.

    One SCAN for each 1000 keys that each server has, whatever they are; then one script call for
    each name and node.

    Args:
        site: The servers; what too few of them tell is an error.
        pattern: As a shell's: `*`, `?`, `[abc]`, `[!abc]`.
        limit: How many names at most; of more, those that were found first.

    Raises:
        ServerUnreachable, NotAllowedError: As `standing_of`.
    """
    found: set[str] = set()
    silent: dict[str, str] = {}
    nodes = dict.fromkeys([node.label for node in site.nodes], "")
    for node in site.nodes:
        nodes[node.label] = await _search(node, site.prefix, pattern, limit, found, silent)
        if sum(not trouble for trouble in nodes.values()) < site.majority:
            raise untold(pattern, nodes)
    standings = await _looked_at(site, sorted(found)[:limit])
    return Listing(
        tuple(standing for standing in standings if not standing.is_idle),
        is_complete=len(found) <= limit,
        silent=silent,
    )


def name_of(key: str, prefix: str) -> str | None:
    """The name whose lock, or queue, *key* is; None: another key."""
    lock = key.removesuffix(":queue")
    inner = lock.removeprefix(prefix)[1:-1]
    name = re.sub("%(7B|7D|25)", lambda found: chr(int(found[1], 16)), inner)
    try:
        # The way back decides: `{a}b}` and `{100%}` are keys of no name.
        return name if _names.keys(prefix, _names.checked_name(name)).lock == lock else None
    except ValueError:
        return None


def glob_of(prefix: str, pattern: str) -> str:
    """What SCAN is to match: the prefix, and the pattern as far as it has no sign of its own."""
    begin = _MAGIC.split(pattern, maxsplit=1)[0]
    return literal(_names.keys(prefix, begin).lock.removesuffix("}")) + "*"


def literal(text: str) -> str:
    """*text* as it stands, within a pattern of SCAN."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


async def _search(
    node: Node, prefix: str, pattern: str, limit: int, found: set[str], silent: dict[str, str]
) -> str:
    """Add its names to *found*, until there are more than *limit*; "", or why it told nothing.

    The primaries of a cluster that tell nothing are noted in *silent*, too.
    """
    try:
        primaries = await node.primaries()
    except NoAnswer as error:
        silent[node.label] = str(error)
        return str(error)
    troubles = []
    for label, primary in primaries.items():
        try:
            await _find(node, primary, prefix, pattern, limit, found)
        except NoAnswer as error:
            silent[label] = str(error)
            troubles.append(str(error))
    return "; ".join(troubles) if len(troubles) == len(primaries) else ""


async def _find(
    node: Node, primary: Any, prefix: str, pattern: str, limit: int, found: set[str]
) -> None:
    glob, cursor = glob_of(prefix, pattern), 0
    # Bound: the cursor comes back to 0 when all keys were looked at.
    while len(found) <= limit:
        cursor, keys = await node.scan(primary, cursor, glob, _COUNT)
        found.update(_matching(keys, prefix, pattern))
        if cursor == 0:
            return


def _matching(keys: Iterable[Any], prefix: str, pattern: str) -> set[str]:
    pattern = pattern.replace("[^", "[!")  # As SCAN has it, and many a shell.
    names = (name_of(text(key), prefix) for key in keys)
    return {name for name in names if name is not None and fnmatch.fnmatchcase(name, pattern)}


async def _looked_at(site: Site, names: list[str]) -> list[Standing]:
    standings: list[Standing] = []
    for first in range(0, len(names), AT_ONCE):
        together = names[first : first + AT_ONCE]
        looks = (standing_of(site, name, most=_WAITERS_MOST) for name in together)
        for standing in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(standing, BaseException):
                raise standing
            standings.append(standing)
    return standings
