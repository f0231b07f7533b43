"""Every library that is measured, by the name that rows call it by."""

from __future__ import annotations

from typing import Final

from ._api import Client, Pair
from ._catalogue import CLIENTS as _CLIENTS
from ._catalogue import LEFT_OUT, Entry

CLIENTS: Final[dict[str, Entry]] = _CLIENTS

__all__ = ["CLIENTS", "LEFT_OUT", "Client", "Entry", "Pair"]
