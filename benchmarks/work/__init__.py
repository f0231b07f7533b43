"""The kinds of work that a client is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from .._orders import Order
from .._stage import Stage
from ..clients import Client
from ._compete import compete
from ._cycles import cycles
from ._hold import hold, names, traced
from ._trouble import trouble
from ._wait import queue, wait

WORKS: Final[dict[str, Callable[[Client, Order, Stage], Awaitable[dict[str, Any]]]]] = {
    "cycles": cycles,
    "compete": compete,
    "trouble": trouble,
    "wait": wait,
    "queue": queue,
    "hold": hold,
    "names": names,
    "traced": traced,
}
