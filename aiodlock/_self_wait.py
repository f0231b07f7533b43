"""Finds tasks that would wait for what they hold themselves, where several may hold a name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from . import _names
from ._lease import Lease
from ._names import Access
from ._store._api import Acquisition

_ADVICE: Final[dict[tuple[Access | None, Access | None], str]] = {
    ("reading", "writing"): (
        "a reader cannot become the writer, for two who tried would wait for each other; "
        "release the reader's lease first, or begin as the writer and downgrade()"
    ),
    ("writing", "reading"): "await lease.downgrade() makes a reader of the writer",
    ("reading", "reading"): "a writer waits between the two; enter once",
    ("writing", "writing"): "enter once",
    ("permit", "permit"): "it has every permit that there may be; enter once",
}


def check_leaves_room(
    acquisition: Acquisition, leases: Iterable[Lease], task: asyncio.Task[object] | None
) -> None:
    """Return unless *task*, which asks for *acquisition*, holds what it will be waiting for.

    Args:
        acquisition: What was refused.
        leases: All of the client; only those that a task entered with `async with` count.
        task: Who asks.

    Raises:
        RuntimeError: It would wait for itself, for ever.
    """
    name = acquisition.name
    own = [lease for lease in leases if lease.name == name and _lasts_while_it_waits(lease, task)]
    tokens = [acquisition.token, *(lease.owner_token for lease in own)]
    if not own or len(own) < min(map(_names.limit_of, tokens)):
        return
    access = own[0].access
    advice = _ADVICE.get((access, _names.access_of(acquisition.token)), "enter once")
    raise RuntimeError(
        f"this task holds {name!r} already ({access}), so that it would wait for itself: {advice}"
    )


def _lasts_while_it_waits(lease: Lease, task: asyncio.Task[object] | None) -> bool:
    return lease.body_task is task is not None and lease.is_endless
