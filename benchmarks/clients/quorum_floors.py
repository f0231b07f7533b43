"""The floor of a quorum: a write to every server at once, done at the reply of a majority."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiodlock._names import inbox_prefix, keys, new_client_id, owner_token

from .._orders import Order
from ._api import Lender, Pair
from ._scripts import COMPARE_AND_DELETE, own, sha
from .aiodlocks import PREFIX
from .floors import OverRedisPy, Wire, pack

IsYes = Callable[[Any], bool]


class Majority:
    """So many connections, one to each server."""

    def __init__(self, wires: Sequence[Wire | OverRedisPy], *, of_all: bool) -> None:
        self._wires = wires
        self._needed = len(wires) if of_all else len(wires) // 2 + 1
        self._loop = asyncio.get_running_loop()

    def ask(self, request: bytes, is_yes: IsYes) -> asyncio.Future[bool]:
        """Whether a majority says yes; who answers later, or never, is not waited for."""
        answer: asyncio.Future[bool] = self._loop.create_future()
        yes, no, needed = 0, 0, self._needed

        def heard(reply: Any) -> None:
            nonlocal yes, no
            if is_yes(reply):
                yes += 1
                if yes == needed and not answer.done():
                    answer.set_result(True)
            else:
                no += 1
                if no == len(self._wires) - needed + 1 and not answer.done():
                    answer.set_result(False)

        for wire in self._wires:
            wire.tell(request, heard)
        return answer

    def close(self) -> None:
        for wire in self._wires:
            wire.transport.close()


class Floor(Lender):
    """What both floors share: tokens, and what no majority is.

    Args:
        of_all: Wait for every server: what the rows of trouble must find.
        over_redis_py: Over its connections, for who asks alone.
    """

    def __init__(self, *, of_all: bool = False, over_redis_py: bool = False) -> None:
        self._of_all = of_all
        self._wire: type[Wire | OverRedisPy] = OverRedisPy if over_redis_py else Wire

    async def _open(self, order: Order, *scripts: str) -> None:
        is_alone = order.tasks == 1
        wires = [await self._wire.connect(port, at_once=is_alone) for port in order.ports]
        for wire in wires:
            for script in scripts:
                await wire.ask(pack(("SCRIPT", "LOAD", script)))
        self._majority = Majority(wires, of_all=self._of_all)
        self._holder = f"floor:{new_client_id()}"
        self._count = 0

    def _token(self) -> str:
        self._count += 1
        return owner_token(self._holder, self._count)

    async def _ask(self, request: bytes, is_yes: IsYes) -> None:
        if not await self._majority.ask(request, is_yes):
            raise RuntimeError(f"a majority said no to {request!r}")

    async def aclose(self) -> None:
        self._majority.close()


class TrivialQuorum(Floor):
    """SET NX PX, then a script that compares and deletes."""

    async def open(self, order: Order) -> None:
        await self._open(order, COMPARE_AND_DELETE)

    def pair(self, name: str, ttl_s: float) -> Pair:
        digest, ttl = sha(COMPARE_AND_DELETE), str(int(ttl_s * 1000))

        async def acquire() -> str:
            token = self._token()
            await self._ask(pack(("SET", name, token, "NX", "PX", ttl)), _is_ok)
            return token

        async def release(token: str) -> None:
            await self._ask(pack(("EVALSHA", digest, "1", name, token)), _is_one)

        return Pair(acquire, release)


class OwnQuorum(Floor):
    """aiodlock's scripts with the arguments of one who does not queue, without a second round."""

    async def open(self, order: Order) -> None:
        acquire, release = own("acquire"), own("release")
        await self._open(order, acquire, release)
        self._acquire, self._release = sha(acquire), sha(release)
        self._client_id = self._holder.partition(":")[2]

    def pair(self, name: str, ttl_s: float) -> Pair:
        places = keys(PREFIX, name)
        ttl, channels = str(int(ttl_s * 1000)), inbox_prefix(PREFIX)
        acquire_head = ("EVALSHA", self._acquire, "4", *places)
        release_head = ("EVALSHA", self._release, "4", *places)

        async def acquire() -> str:
            token = self._token()
            await self._ask(pack((*acquire_head, token, ttl, "0", channels)), _begins_with_one)
            return token

        async def release(token: str) -> None:
            request = pack((*release_head, token, "0", channels, self._client_id))
            await self._ask(request, _begins_with_one)

        return Pair(acquire, release)

    def key(self, name: str) -> str:
        return keys(PREFIX, name).lock


def _is_ok(reply: Any) -> bool:
    return bool(reply == b"OK")


def _is_one(reply: Any) -> bool:
    return bool(reply == 1)


def _begins_with_one(reply: Any) -> bool:
    return bool(reply[0] == 1)
