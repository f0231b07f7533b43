"""The contract of Lock and Lease, kept by readers, by a writer, by a semaphore of one permit.

Each lets one in at a time where another kind would be second: so every rule of a lock is theirs.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
import pytest_asyncio

from aiodlock import Lock, LockClient
from aiodlock.testing import LockServer
from tests.by_hand import THIRD
from tests.test_contract import RULES
from tests.worlds import (
    STORES,
    AnyRedis,
    Network,
    Remap,
    Standing,
    Store,
    World,
    key_of,
    standing_servers,
)

READER: Final = "reader, among writers"
"""The first client of a rule reads, the others write: they exclude each other as locks do."""
MAKERS: Final[dict[str, Callable[..., Lock]]] = {
    READER: LockClient.reader,
    "writer": LockClient.writer,
    "semaphore of one": functools.partial(LockClient.semaphore, permits=1),
}
_NO_OPTION: Final = "such a lock takes neither `reentrant` nor `hold_at_least`"
_OF_LOCKS: Final = "`all` and `election` are made of locks"
_NO_THIEF: Final = "where several may hold, whoever else does is no thief: the loss is DELETED"
WITHOUT: Final = {
    "a_lock_of_another_library_is_respected": (
        "another library knows one kind of lock only; for these the name is taken"
    ),
    "a_thief_is_told_of_and_left_alone": _NO_THIEF,
    "an_operator_breaks_it_for_the_next": _NO_THIEF,
    "a_task_enters_its_own_lock_again": _NO_OPTION,
    "a_name_stays_taken_for_as_long_as_was_asked": _NO_OPTION,
    "several_names_are_got_all_or_none": _OF_LOCKS,
    "a_leader_is_seen_and_succeeded": _OF_LOCKS,
}

_SHARE: Final = "two readers of one client: they share"
WITHOUT_OF_READERS: Final = {
    "one_holds_and_others_do_not": _SHARE,
    "many_tasks_of_many_clients_go_one_by_one": _SHARE,
    "clients_of_two_prefixes_do_not_meet": _SHARE,
    "a_closing_client_leaves_the_queue_before_it_releases": _SHARE,
}
NOT_ON: Final = {
    "Sentinel": "one server to what differs here, once the master is known",
    "quorum of 5": "a quorum of 3 to what differs here: how many, the lock's own rows know",
    "quorum in memory": "the same, without connections",
}


class OfKind:
    """A client whose locks are of one kind; else as it is."""

    def __init__(self, client: LockClient, make: Callable[..., Lock]) -> None:
        self._client = client
        self._make = make

    def lock(self, name: str, **options: Any) -> Lock:
        return self._make(self._client, name, **options)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._client, attribute)


class SharedNetwork(Network):
    """Knows the scripts by the names of those for a lock."""

    def lose_replies(self, script: str) -> Callable[[], int]:
        return super().lose_replies(f"share_{script}")


@dataclass
class SharedWorld(World):
    """The same store; what stands there is looked at as what several may hold."""

    async def value(self, name: str) -> str | None:
        found = [await _value(admin, name) for admin in self.admins]
        return max(found, key=found.count)

    async def behind_proxies(self) -> tuple[LockClient, Network]:
        client, network = await super().behind_proxies()
        return client, SharedNetwork(network._proxies)

    async def put(self, name: str, value: str) -> None:
        for admin in self.admins:
            seconds, _ = await admin.time()
            await admin.delete(key_of(name))
            await admin.zadd(key_of(name), {f"{THIRD}:1w": (int(seconds) + 30) * 1000})
            await admin.pexpire(key_of(name), 30_000)

    async def left(self, *, ignoring_tombstones: bool = False) -> list[str]:
        found = await super().left(ignoring_tombstones=ignoring_tombstones)
        # Beside a holder its grant; alone it would be left.
        return [key for key in found if key.removesuffix(":grants") == key or len(found) == 1]


async def _value(admin: AnyRedis, name: str) -> str | None:
    for holder in await admin.zrange(key_of(name), 0, 0):
        fencing_token = await admin.zscore(f"{key_of(name)}:grants", str(holder))
        return f"{holder!s}/{fencing_token:.0f}"
    return None


def of_kind(world: World, make: Callable[..., Lock]) -> SharedWorld:
    """*world*, with clients whose locks are made so."""

    made = 0

    async def new(**options: Any) -> LockClient:
        nonlocal made
        made += 1
        of_this = LockClient.writer if make is LockClient.reader and made > 1 else make
        return OfKind(await world.new(**options), of_this)  # type: ignore[return-value]

    async def new_through(remap: Remap) -> LockClient:
        assert world.new_through is not None
        return OfKind(await world.new_through(remap), make)  # type: ignore[return-value]

    through = new_through if world.new_through is not None else None
    return SharedWorld(
        new,
        world.admins,
        world.servers,
        world.users_own,
        through,
        world.stack,
        extension=world.extension,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(session_server: LockServer) -> AsyncIterator[Standing]:
    """Every server, started at once, and once."""
    async with standing_servers(session_server) as servers:
        yield servers


@pytest.mark.deep
@pytest.mark.parametrize(
    ("store", "kind", "name"),
    [
        pytest.param(store, kind, name, id=f"{store.name}-{kind}-{name}")
        for store in STORES
        if store.name not in NOT_ON
        for kind in MAKERS
        if kind != "semaphore of one" or not store.name.startswith("quorum")  # Refused there.
        for name in RULES
        if name not in store.without and name not in WITHOUT
        if kind != READER or name not in WITHOUT_OF_READERS
    ],
)
async def test_kind_that_lets_one_in_keeps_the_contract_of_a_lock(
    store: Store, kind: str, name: str, standing: Standing
) -> None:
    """The rule holds on this store, on the real thing."""
    async with store.open(standing) as plain:
        world = of_kind(plain, MAKERS[kind])
        world.name = f"{store.name}, {kind}"
        await world.flush()
        await RULES[name](world)


def test_rules_that_are_left_out_are_rules() -> None:
    """One that was renamed would be left out no more, or for ever."""
    assert set(RULES) > set(WITHOUT) | set(WITHOUT_OF_READERS)
    assert {store.name for store in STORES} > set(NOT_ON)
