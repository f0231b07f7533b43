"""What a holder has: a time-limited, numbered, extended right to one name."""

from __future__ import annotations

import asyncio
import logging
import types
import warnings
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, Self

from . import _clock, _names
from ._body import Body
from ._cleanup import Background
from ._errors import LeaseLostError, LockError, LostReason
from ._observed import Observed
from ._running import may_await, running_loop
from ._store._api import Acquisition, Granted, NoAnswer, NotOurs, Released, Store
from ._validity import Asked, State, Validity

_log = logging.getLogger("aiodlock")

_RETRY_S: Final = 0.05


class Terms(NamedTuple):
    """The options of a lock that its leases go by."""

    ttl: float
    auto_extend: bool
    on_lost: Literal["cancel", "raise"]
    max_hold: float | None
    request_timeout: float
    reentrant: bool = False
    hold_at_least: float | None = None


class Extension(NamedTuple):
    """What is to be sent; without the lease, which nobody but its holder keeps alive."""

    acquisition: Acquisition
    value: str
    asked: Asked

    async def send(self, store: Store, *, within: float) -> float | NotOurs:
        """The new deadline, or what stands in the key."""
        return await store.extend(
            self.acquisition, self.value, ttl_ms=self.asked.ttl_ms, within=within
        )


class Keeper(Protocol):
    """What keeps the leases of a client alive, and notices their deadlines; by owner token."""

    def stop(self, token: str) -> asyncio.Task[None] | None:
        """Extend it no more; the task that is still to end, if there is one."""

    def forget(self, token: str) -> None:
        """Nothing of it is left that we could remove."""


class Lease:
    """The right that one holder has, from one acquisition. Made by a `Lock`.

    `async with lease` releases it at the end of the block.
    """

    _is_gone = False  # Nothing of this acquisition is left that we could remove.
    _body: Body | None = None
    _body_left: asyncio.Event | None = None
    _over: asyncio.Event | None = None
    _keep_until: float | None = None  # Until when its name stays taken after the release.

    def __init__(
        self,
        store: Store,
        background: Background,
        keeper: Keeper,
        acquisition: Acquisition,
        terms: Terms,
        granted: Granted,
    ) -> None:
        self._store = store
        self._background = background
        self._keeper = keeper
        self._acquisition = acquisition
        self._terms = terms
        self._value = granted.value
        self._fencing_token = granted.fencing_token
        self._validity = Validity(
            granted.deadline, auto_extend=terms.auto_extend, max_hold=terms.max_hold
        )
        self._loop = asyncio.get_running_loop()
        if terms.hold_at_least is not None:
            # From now, for a hand-off was asked for long before: never less than since the grant.
            self._keep_until = _clock.now() + terms.hold_at_least

    # What a holder asks without I/O.

    @property
    def name(self) -> str:
        """What is locked."""
        return self._acquisition.name

    @property
    def ttl(self) -> float:
        """Seconds that each extension gives the lease again."""
        return self._terms.ttl

    @property
    def holder(self) -> str:
        """Who holds, as it is shown to people: this client, `<label>:<client id>`."""
        return _names.holder_in(self.owner_token)

    @property
    def owner_token(self) -> str:
        """Proves ownership to Redis; unique to this acquisition."""
        return self._acquisition.token

    @property
    def fencing_token(self) -> int:
        """Grows with every grant of the name: storage can refuse a smaller one.

        Raises:
            RuntimeError: The client is a quorum without fencing.
        """
        if self._fencing_token is None:
            raise RuntimeError(
                "this lease has no fencing token: its LockClient.quorum() has fencing=False"
            )
        return self._fencing_token

    @property
    def state(self) -> State:
        """`held`, `at_risk` (an extension failed), `lost` or `released`; by the clock, no I/O."""
        is_over = self._validity.is_open and self._validity.left <= 0
        return "lost" if is_over else self._validity.state

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, a little less than the server has; 0 when it is over."""
        return max(0.0, self._validity.left) if self._validity.is_open else 0.0

    @property
    def is_held(self) -> bool:
        """Whether it may still be believed in, by the clock; no I/O."""
        return self._validity.is_open and self._validity.left > 0

    def check(self, min_left: float = 0.0) -> None:
        """Return if it is held for *min_left* seconds more.

        Call it before what cannot be undone. No I/O: the clock decides, so it is right even when
        the event loop stood still. A lease got by hand-off starts with 2 to 6 s (a third to the
        whole of max(ttl, 1) where the ttl is under 6 s); `await extend()` first if you need more.

        Args:
            min_left: Seconds, at least 0.

        Raises:
            LeaseLostError: It is lost; or (TOO_LITTLE_TIME) held, but not for that long.
            RuntimeError: It was released.
            TypeError, ValueError: min_left is not what is allowed.
        """
        min_left = _clock.seconds("min_left", min_left, minimum=0)
        self._raise_unless_open()
        left = self._validity.left
        if left <= 0:
            reason = self._validity.reason_at_deadline()
            if running_loop() is self._loop:  # In a thread, only the answer is given.
                self._lose(reason)
            raise self._lost_error(reason)
        if left < min_left:
            raise self._lost_error(LostReason.TOO_LITTLE_TIME)

    # What talks to the server.

    async def extend(self, ttl: float | None = None) -> float:
        """Make the time left at least *ttl*, if this lease is still ours.

        One script call, shared with what else this client extends in the same turn of the event
        loop (over a quorum to each node); repeated, within `request_timeout`, while there is no
        answer. Never shortens a lease, and never makes it longer than `max_hold` allows.

        Args:
            ttl: Seconds, at least 0.01. Default: the lock's ttl.

        Returns:
            Seconds that may still be relied on, counted from before the call.

        Raises:
            LeaseLostError: It expired, or someone else has it.
            ServerUnreachable: No answer in time; the deadline stays as it was.
            NotAllowedError: The server forbids it.
            RuntimeError: It was released, or belongs to another event loop.
            TypeError, ValueError: ttl is not what is allowed.

        Cancellation: the server may or may not have extended; the deadline stays as it was.

        Source: "Distributed Locks with Redis" (Redis documentation), on extending.
        """
        asked = self._terms.ttl if ttl is None else _clock.ttl_seconds("ttl", ttl)
        self._check_loop()
        started = _clock.now()
        end = started + self._terms.request_timeout
        while True:
            self.check()
            if self._validity.is_final:
                return self.deadline - started
            within = min(end, self.deadline) - _clock.now()
            extension = self._begin_extension(asked)
            try:
                answer = await extension.send(self._store, within=within)
            except NoAnswer as error:
                self._validity.endanger()
                self.check()
                if _clock.now() + _RETRY_S >= end:
                    raise error.unreachable(
                        f"the lease of {self.name!r} could not be extended", name=self.name
                    ) from error.origin
                await asyncio.sleep(_RETRY_S)
            else:
                self._end_extension(extension, answer)
                self.check()
                return self.deadline - started

    async def downgrade(self) -> None:
        """Go on as a reader: those who wait next, and only read, enter at once.

        For the lease of a writer. One script call (over a quorum to each node); repeated, within
        `request_timeout`, while there is no answer. The fencing token stays.

        Raises:
            LeaseLostError: It expired, or was taken.
            ServerUnreachable: No answer in time; it reads or writes, so only read.
            NotAllowedError: The server forbids it.
            RuntimeError: It is no writer's, was released, or belongs to another event loop.

        Cancellation: it reads or writes, so only read.
        """
        if _names.access_of(self.owner_token) != "writing":
            raise RuntimeError(f"only a writer can downgrade; this is a lease of {self.name!r}")
        self._check_loop()
        self.check()
        self._acquisition.reads_only = True  # It may be so from now on.
        try:
            not_ours = await self._store.downgrade(
                self._acquisition, within=self._terms.request_timeout
            )
        except NoAnswer as error:
            raise error.unreachable(
                f"the downgrade of {self.name!r} was not answered", name=self.name
            ) from error.origin
        if not_ours is not None:
            self._lose(self._validity.find_taken(not_ours.value))
        self.check()

    async def release(self) -> bool:
        """Give the lease up: to the first waiter, or to nobody.

        With `hold_at_least`, to nobody until that time is over. A reentrant lease is given up by
        the last release of as many as there were acquisitions.

        One script call (over a quorum to each node); repeated, within `request_timeout`, while
        there is no answer. Idempotent. The watchdog has ended when this returns.

        Returns:
            Whether this call removed it. False says only that it did not, for it was released
            before, or was lost, or an earlier try whose reply was lost did it.

        Raises:
            ServerUnreachable: No answer in time: it may stand until its ttl is over.
            NotAllowedError: The server forbids it.
            RuntimeError: It belongs to another event loop.

        Cancellation: the release is sent all the same, and waited for, 1 s at most.

        Source: "Distributed Locks with Redis" (Redis documentation), on releasing.
        """
        if self._is_gone:
            return False
        self._check_loop()
        try:
            return (await self._release()).removed
        except NoAnswer as error:
            raise error.unreachable(
                f"the release of {self.name!r} was not answered; it may stand until its ttl ends",
                name=self.name,
            ) from error.origin

    async def wait_lost(self) -> LostReason | None:
        """Why it was lost, as soon as it is; None when it was released.

        No server calls. Cancellation: changes nothing.
        """
        if self._validity.is_open:
            self._check_loop()
            if self._over is None:
                self._over = asyncio.Event()
            await self._over.wait()
        return self._validity.reason

    async def __aenter__(self) -> Self:
        self._enter(Body())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        body = self._body
        assert body is not None
        self._notice_deadline(tell_body=False)
        if not may_await(error):
            return self._leave_without_awaiting()
        failure: BaseException | None = None
        is_our_cancel = False
        try:
            is_our_cancel = await body.leave(error)
            if not self._is_gone:
                self._judge(await self._release())
        except (NoAnswer, LockError) as problem:
            failure = problem
        except asyncio.CancelledError as cancelled:
            if error is None or is_our_cancel or isinstance(error, asyncio.CancelledError):
                self._note_loss(cancelled)
                raise
            body.cancel_again(cancelled)
            error.add_note(f"aiodlock: cancelled while the lease of {self.name!r} was released")
        finally:
            self._leave_block()
        return self._conclude(error, failure, is_our_cancel=is_our_cancel)

    def __repr__(self) -> str:
        fencing = "" if self._fencing_token is None else f" fencing_token={self._fencing_token}"
        return f"<Lease {self.name!r} {self.state}{fencing} {self.remaining:.1f} s left>"

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if self._is_gone or not hasattr(self, "_loop"):
            return
        keeper, token, store = self._keeper, self.owner_token, self._store
        validity = self._validity

        def let_go() -> None:
            keeper.stop(token)
            keeper.forget(token)
            store.forget(token)
            validity.lose(LostReason.EXPIRED)  # Nothing extends it any more.

        if not self._loop.is_closed():
            # The garbage collector may run in any thread.
            self._loop.call_soon_threadsafe(let_go)
        if self._validity.is_open:
            _warn(
                f"a lease of {self.name!r} was thrown away while held; it stands until its ttl "
                "is over. Release it, or use `async with`.",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    # From here on not for users: what `_session` and `_watchdog` do with it.

    @property
    def access(self) -> _names.Access | None:
        """What it is for, where several may hold the name."""
        if self._acquisition.reads_only:
            return "reading"
        return _names.access_of(self.owner_token)

    @property
    def terms(self) -> Terms:
        """The options that it goes by."""
        return self._terms

    @property
    def log_fields(self) -> dict[str, object]:
        """What records about it carry."""
        return {
            "lock_name": self.name,
            "lock_holder": self.holder,
            "lock_fencing_token": self._fencing_token,
        }

    @property
    def deadline(self) -> float:
        """Instant on our clock until which it may be believed in."""
        return self._validity.deadline

    @property
    def wants_extension(self) -> bool:
        """Whether the watchdog is to go on: also for a body that a closing client waits for."""
        is_closed = self._validity.reason is LostReason.CLOSED and self._body is not None
        is_wanted = self._validity.is_open or (is_closed and self._validity.left > 0)
        return is_wanted and not self._validity.is_final and not self._is_gone

    @property
    def is_endless(self) -> bool:
        """Whether it is held until somebody releases it, as far as we can tell."""
        return self._terms.auto_extend and self._terms.max_hold is None and self.is_held

    @property
    def is_gone(self) -> bool:
        """Whether nothing of this acquisition is left that we could remove."""
        return self._is_gone

    @property
    def body_task(self) -> asyncio.Task[object] | None:
        """The task inside the `async with` block, if there is a block."""
        return None if self._body is None else self._body.task

    async def wait_body_left(self) -> None:
        """Until no block is entered."""
        if self._body is not None:
            if self._body_left is None:
                self._body_left = asyncio.Event()
            await self._body_left.wait()

    def _enter(self, body: Body) -> None:
        self._check_loop()
        self._raise_unless_open()
        if self._body is not None:
            raise RuntimeError(f"this lease of {self.name!r} is entered already")
        self._body = body

    def _begin_extension(self, ttl: float) -> Extension:
        return Extension(self._acquisition, self._value, self._validity.ask(ttl))

    def _end_extension(self, extension: Extension, answer: float | NotOurs) -> None:
        if self._validity.is_open and not self._notice_deadline():
            return  # It was asked for in time; but who looked meanwhile was told that it is over.
        if isinstance(answer, NotOurs):
            self._lose(self._validity.find_taken(answer.value))
        else:
            self._validity.prolong(answer, is_last=extension.asked.is_last)

    def _begin_telling(self, observed: Observed) -> None:
        """Now, and of all that happens from now on."""
        self._validity.observed = observed
        observed.acquired(self._fencing_token, self._validity.left)

    def _tell_end(self, released: Released | None) -> None:
        """The end that `_judge` will find; None: no answer, or nobody waited for it."""
        observed = self._validity.observed
        if observed is None:
            return
        if released is not None and _found_gone(released) and self._validity.left > 0:
            observed.lost(self._validity.reason_for(released.value))
        else:
            observed.released()

    def _endanger(self) -> None:
        self._validity.endanger()

    def _notice_deadline(self, *, tell_body: bool = True) -> bool:
        """Lose it if its deadline is over: is it open still?"""
        if self._validity.is_open and self._validity.left <= 0:
            self._lose(self._validity.reason_at_deadline(), tell_body=tell_body)
        return self._validity.is_open

    def _lose(self, reason: LostReason, *, tell_body: bool = True) -> None:
        """Once: tell the body, and whoever waits for it."""
        if not self._validity.lose(reason):
            return
        fields = {**self.log_fields, "lock_reason": reason.name}
        _log.info("lost the lease of %r: %s", self.name, reason.value, extra=fields)
        self._tell_over()
        if reason is not LostReason.CLOSED:
            self._keeper.stop(self.owner_token)
        if tell_body and self._body is not None and self._terms.on_lost == "cancel":
            self._tell_body(self._body)

    def _tell_body(self, body: Body) -> None:
        body.cancel()

    def _retire(self) -> None:
        """It is not held any more from now on, whatever the server will say."""
        if self._validity.release():
            self._tell_over()

    def _disown(self) -> None:
        """In a forked child, or after its loop: no task, timer or future is touched."""
        self._is_gone = True
        self._validity.lose(LostReason.CLOSED)

    def _abandon(self) -> None:
        """Nothing can be sent any more: it stands until its ttl is over, or is the parent's."""
        self._is_gone = True
        self._lose(LostReason.CLOSED, tell_body=False)
        self._keeper.stop(self.owner_token)
        self._keeper.forget(self.owner_token)

    def _leave_without_awaiting(self) -> None:
        """The coroutine is destroyed: its loop, if it still runs, finishes the work."""
        if self._is_gone:
            # Also in a forked child, where the loop is the parent's and must not be written to.
            self._body = None
            return
        self._leave_block()
        if self._loop.is_running():
            self._retire()
            # Whoever collects the garbage may do so in any thread, and under any loop.
            self._loop.call_soon_threadsafe(
                self._background.start, self._release(), "releasing", self.name
            )
        else:
            self._abandon()

    def _leave_block(self) -> None:
        self._body = None
        if self._body_left is not None and not self._loop.is_closed():
            self._body_left.set()

    async def _release(self) -> Released:
        self._retire()
        ending = self._keeper.stop(self.owner_token)
        released = None
        try:
            released = await self._give_up()
            if ending is not None:  # It is cancelled: one turn of the loop.
                await asyncio.wait((ending,))
            return released
        except asyncio.CancelledError:
            await self._background.finish(self._give_up(), "releasing", self.name)
            raise
        finally:
            self._tell_end(released)

    async def _give_up(self) -> Released:
        try:
            within = self._terms.request_timeout
            released = await self._store.release(
                self._acquisition, within=within, keep_until=self._keep_until
            )
            self._is_gone = True
            self._keeper.forget(self.owner_token)
            return released
        finally:
            self._store.forget(self.owner_token)

    def _judge(self, released: Released) -> None:
        """A release that found nothing of ours says that the lease was lost before."""
        if _found_gone(released):
            self._validity.find_gone(released.value)

    def _conclude(
        self, error: BaseException | None, failure: BaseException | None, *, is_our_cancel: bool
    ) -> None:
        """Say what the end of the body was: its own error wins, then the loss, then the rest."""
        if error is not None and not is_our_cancel:
            self._note_loss(error)
            if failure is not None:
                error.add_note(f"aiodlock: the release of {self.name!r} failed: {failure}")
            return
        if failure is not None:
            _log.warning(
                "the release of %r failed, its ttl will free it: %s",
                self.name,
                failure,
                extra=self.log_fields,
            )
        if self._validity.reason is not None:
            raise self._lost_error()

    def _note_loss(self, error: BaseException) -> None:
        if self._validity.reason is not None and not isinstance(error, LeaseLostError):
            error.add_note(f"aiodlock: {self._lost_error()}")

    def _tell_over(self) -> None:
        if self._over is not None and not self._loop.is_closed():
            self._over.set()

    def _check_loop(self) -> None:
        if running_loop() is not self._loop:
            raise RuntimeError(f"this lease of {self.name!r} belongs to another event loop")

    def _raise_unless_open(self) -> None:
        if self._validity.state == "released":
            raise RuntimeError(f"this lease of {self.name!r} was released")
        if self._validity.state == "lost":
            raise self._lost_error()

    def _lost_error(self, reason: LostReason | None = None) -> LeaseLostError:
        reason = reason or self._validity.reason
        assert reason is not None
        return LeaseLostError(name=self.name, fencing_token=self._fencing_token, reason=reason)


def _found_gone(released: Released) -> bool:
    """Whether a release found nothing of ours."""
    return not released.removed and not released.repeated
