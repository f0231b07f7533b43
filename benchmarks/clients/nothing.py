"""No lock at all: what the checker of overlaps must find."""

from __future__ import annotations

from .._orders import Order
from ._api import Lender, Pair


class Nothing(Lender):
    """Everybody is let in at once."""

    async def open(self, order: Order) -> None:
        pass

    def pair(self, name: str, ttl_s: float) -> Pair:
        async def step(_: object = None) -> None:
            pass

        return Pair(step, step)

    async def aclose(self) -> None:
        pass
