"""What a client has while it is bound to one event loop."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Final, cast

from . import _names
from ._cleanup import Background
from ._errors import LostReason
from ._lease import Lease, Terms
from ._names import Keys
from ._observed import Audience, Observed
from ._reentrant import ReentrantLease, Reentries
from ._running import running_loop, running_task
from ._self_wait import check_leaves_room
from ._store._api import Acquisition, Granted, QueueStore, Store
from ._trying import Tries
from ._waiting import Backoff, Wait, closed_error
from ._watchdog import Watchdogs

_log = logging.getLogger("aiodlock")

# How long a closing client waits for the bodies that hold its leases.
BODIES_S: Final = 5.0


class Session:
    """The store of one loop, who waits on it, and who holds."""

    def __init__(self, store: Store, holder: str, audience: Audience) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.is_closing = False
        self.background = Background()
        self._watchdogs = Watchdogs(store)
        self._holder = holder
        self._audience = audience
        self._acquired = 0
        self._reentries = Reentries()
        # Those of names that several may hold; who waits for one looks at all of them.
        self._sharing: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._waits: set[Wait | Tries] = set()  # Bound: as many as tasks that acquire.
        self._no_waits: asyncio.Event | None = None

    async def acquire(
        self,
        name: str,
        keys: Keys,
        terms: Terms,
        *,
        wait_timeout: float | None,
        retry: Backoff | None,
        tail: str = "",
    ) -> Lease:
        """A new acquisition, from its first poll to its lease; nothing is left where it fails.

        Or another entry of a reentrant lease that the current task has.
        """
        if terms.reentrant and (again := self._reentries.enter_again(name)) is not None:
            return again
        wait = self._wait(name, keys, terms, wait_timeout, retry, tail)
        observed = self._audience.begin(name, tail, self._holder)
        self._waits.add(wait)
        try:
            granted = await wait.run()
            if self.is_closing:
                raise closed_error(name)
            return self._lease(wait.acquisition, terms, granted, observed)
        except BaseException as error:
            if observed is not None:
                observed.not_acquired(error, is_closing=self.is_closing)
            await self._failed(wait, terms, error)
            raise
        finally:
            self._waits.discard(wait)
            if self._no_waits is not None and not self._waits:
                self._no_waits.set()

    def _wait(
        self,
        name: str,
        keys: Keys,
        terms: Terms,
        wait_timeout: float | None,
        retry: Backoff | None,
        tail: str,
    ) -> Wait | Tries:
        def new_acquisition() -> Acquisition:
            self._acquired += 1
            token = _names.owner_token(self._holder, self._acquired)
            if tail:  # Several may hold: it says what it asks for.
                return Acquisition(name, keys, token + tail, is_shared=True)
            return Acquisition(name, keys, token)

        on_refused = self._refusal(tail, is_endless=wait_timeout is None)
        if not self.store.has_queue:
            return Tries(
                self.store,
                new_acquisition,
                ttl=terms.ttl,
                wait_timeout=wait_timeout,
                request_timeout=terms.request_timeout,
                retry=retry,
                on_refused=on_refused,
            )
        return Wait(
            cast(QueueStore, self.store),
            new_acquisition(),
            ttl=terms.ttl,
            wait_timeout=wait_timeout,
            request_timeout=terms.request_timeout,
            retry=retry,
            on_refused=on_refused,
            # A message leaves the lease short; where nothing extends it, a poll must do it.
            trusts_messages=terms.auto_extend,
        )

    def _refusal(self, tail: str, *, is_endless: bool) -> Callable[[Acquisition, str], None]:
        """What is done when it has to wait: it may be for its own task."""
        if tail:
            return self._refuse_wait_for_own_share
        return self._refuse_wait_for_own_lock if is_endless else _go_on

    def _refuse_wait_for_own_share(self, acquisition: Acquisition, standing: str) -> None:
        check_leaves_room(acquisition, self._sharing, running_task())

    async def _failed(self, wait: Wait | Tries, terms: Terms, error: BaseException) -> None:
        """Release what may stand: in the background, or waited for by a cancelled caller.

        As by a task that would wait for itself: its refused place must not be in its own way.
        """
        acquisition = wait.acquisition
        if not wait.may_stand or running_loop() is not self.loop:
            self.store.forget(acquisition.token)
            return
        work, what = self._give_up(acquisition, terms), "giving up"
        if not isinstance(error, asyncio.CancelledError | RuntimeError):
            self.background.start(work, what, acquisition.name)
            return
        cancelled = await self.background.finish(work, what, acquisition.name)
        if cancelled is not None and isinstance(error, RuntimeError):
            raise cancelled

    def _lease(
        self,
        acquisition: Acquisition,
        terms: Terms,
        granted: Granted,
        observed: Observed | None,
    ) -> Lease:
        self.store.hold(acquisition.token)
        kind = ReentrantLease if terms.reentrant else Lease
        lease = kind(self.store, self.background, self._watchdogs, acquisition, terms, granted)
        if observed is not None:
            lease._begin_telling(observed)
        self._watchdogs.watch(lease)
        if isinstance(lease, ReentrantLease):
            self._reentries.add(lease)
        if acquisition.is_shared:
            self._sharing.add(lease)
        return lease

    def _refuse_wait_for_own_lock(self, acquisition: Acquisition, standing: str) -> None:
        """Raise if *standing* is of a lease that ends only when the current task goes on."""
        value = _names.read_value(standing) if standing.startswith(self._holder) else None
        lease = self._watchdogs.lease(value.owner_token) if value else None
        if lease is not None and lease.is_endless and lease.body_task is running_task():
            raise RuntimeError(
                f"this task holds the lock {lease.name!r} already and would wait for itself for "
                "ever; a lock with reentrant=True may be entered again by the task that holds it"
            )

    async def _give_up(self, acquisition: Acquisition, terms: Terms) -> None:
        self.store.hold(acquisition.token)  # A hand-off on its way is no stray.
        try:
            await self.store.release(acquisition, within=terms.request_timeout)
        finally:
            self.store.forget(acquisition.token)

    async def close(self, caller: asyncio.Task[object] | None) -> None:
        """Waiters leave, then leases, then the store.

        In this order: a release would hand a lock to a waiter of ours. Bound: a request's time
        for each step, and 5 s for bodies.
        """
        self.is_closing = True
        await self._end_waits()
        leases = self._watchdogs.leases()
        bodies = [lease for lease in leases if lease.body_task not in (None, caller)]
        for lease in leases:
            if lease.body_task is not None:
                lease._lose(LostReason.CLOSED, tell_body=lease.body_task is not caller)
            else:
                lease._retire()  # Now: nobody is to enter it until the task begins.
                self.background.start(lease.release(), "releasing", lease.name)
        await self._end_bodies(bodies)
        await self.background.drain()
        for lease in leases:
            if lease.is_gone:
                continue
            if lease.body_task is not None:  # Of the others it was said that releasing failed.
                _log.warning(
                    "the client was closed; the lease of %r stands until its ttl is over",
                    lease.name,
                    extra=lease.log_fields,
                )
            lease._abandon()
        self._watchdogs.close()
        await self.store.aclose()

    async def _end_waits(self) -> None:
        for wait in self._waits:
            wait.close()
        if self._waits:
            self._no_waits = asyncio.Event()
            await self._no_waits.wait()
        await self.background.drain()

    async def _end_bodies(self, leases: list[Lease]) -> None:
        if leases:
            left = [asyncio.ensure_future(lease.wait_body_left()) for lease in leases]
            _, late = await asyncio.wait(left, timeout=BODIES_S)
            for waiting in late:
                waiting.cancel()

    def disown(self) -> None:
        """In a forked child, or after its loop: everything here is another's, or gone."""
        for lease in self._watchdogs.leases():
            lease._disown()


def _go_on(acquisition: Acquisition, standing: str) -> None:
    """Who gives up in time may wait for itself."""
