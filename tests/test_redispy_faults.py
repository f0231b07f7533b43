"""The drop-in for redis-py's lock under cancels, under lost replies, in crowds, beside the old."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, LockNotOwnedError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from aiodlock.redispy import Lock as OurLock
from aiodlock.redispy import _acquisition, _lock
from aiodlock.testing import LockServer
from tests.crowd import Crowd, Order
from tests.proxy import ChaosProxy
from tests.steps import cancel_at_every_step
from tests.test_processes import overlaps_of_the_living
from tests.until import until

pytestmark = pytest.mark.deep

NAME = "reports"
FAR_S = 20.0
# What a request may take on a busy machine before it counts as unanswered.
PATIENT_S = 5.0

OURS: dict[str, Any] = {"lock_class": OurLock, "timeout": FAR_S}
ACQUISITIONS: list[dict[str, Any]] = [{}, {"timeout": None}, {"token": "job"}]


def options(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of the lock and of its acquire."""
    token = {"token": more["token"]} if "token" in more else {}
    return {**OURS, **{key: more[key] for key in more if key != "token"}}, token


# Cancels.


async def assert_free(redis: Redis) -> None:
    """At once: nothing waits for a time to be over."""
    assert await redis.get(NAME) is None


@pytest.mark.parametrize("more", ACQUISITIONS, ids=str)
async def test_acquire_cancelled_at_any_step_leaves_no_key(
    redis: Redis, more: dict[str, Any]
) -> None:
    """Also where the server has done it, and its reply is on the way."""
    await cancel_acquisitions(redis, *options(more), label=f"drop-in {more}")


async def test_acquire_of_redis_pys_lock_cancelled_at_some_step_leaves_a_key(
    redis: Redis,
) -> None:
    """Negative control: the check of the test above can fail. On 3.11 it swallows a cancel, too."""
    with pytest.raises(AssertionError, match=r"a key is left|cancel did not come out"):
        await cancel_acquisitions(redis, {**OURS, "lock_class": RedisPyLock}, {}, label="redis-py")


async def cancel_acquisitions(
    redis: Redis, of_lock: dict[str, Any], of_acquire: dict[str, Any], *, label: str
) -> None:
    """Whoever did not get the lock has not left it there."""
    got = False

    async def acquire() -> None:
        nonlocal got
        got = await redis.lock(NAME, **of_lock).acquire(**of_acquire)

    async def after() -> None:
        nonlocal got
        assert got or await is_free(redis), "a key is left"
        got = False
        await redis.delete(NAME)

    await cancel_at_every_step(acquire, after, label=label)


async def test_wait_cancelled_at_any_step_leaves_no_key_nor_place(redis: Redis) -> None:
    """The holder releases while it waits."""

    async def wait() -> None:
        holder, waiter = (redis.lock(NAME, sleep=0.02, **OURS) for _ in range(2))
        await holder.acquire()
        releasing = asyncio.create_task(release_soon(holder))
        try:
            await waiter.acquire()
            await waiter.release()
        finally:
            await asyncio.wait([releasing])

    async def after() -> None:
        await until(lambda: is_free(redis))
        lock = redis.lock(NAME, **OURS)
        assert await lock.acquire(blocking_timeout=0)
        await lock.release()

    await cancel_at_every_step(wait, after, label="drop-in waits")


async def release_soon(lock: RedisPyLock) -> None:
    """Once another has had the time to ask."""
    await asyncio.sleep(0.03)
    await lock.release()


async def is_free(redis: Redis) -> bool:
    """Whether no key is there."""
    return not await redis.exists(NAME)


async def test_release_cancelled_at_any_step_has_released(redis: Redis) -> None:
    """And the object knows it: a second release says that there is nothing."""
    lock = redis.lock(NAME, **OURS)

    async def after() -> None:
        await assert_free(redis)
        with pytest.raises(LockError, match="already unlocked"):
            await lock.release()

    async def before() -> None:
        lock.local.token = b"mine"
        await redis.set(NAME, "mine", px=60_000)

    await cancel_at_every_step(lock.release, after, before=before, label="drop-in releases")


async def test_release_cancelled_before_the_server_has_its_request_waits_for_it(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """The key is gone when the cancel comes out, not later."""
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, **OURS)
        await warmed(lock)
        await lock.acquire()
        late = proxy.delay_requests(0.2, NAME.encode())
        releasing = asyncio.create_task(lock.release())
        await late.used.wait()
        releasing.cancel()
        await asyncio.wait([releasing])
        assert releasing.cancelled()
        await assert_free(redis)


async def test_block_cancelled_at_any_step_leaves_no_key(redis: Redis) -> None:
    """Whatever it was about to do."""

    async def block() -> None:
        async with redis.lock(NAME, **OURS):
            await asyncio.sleep(0)

    await cancel_at_every_step(block, lambda: assert_free(redis), label="drop-in block")


async def test_cancel_with_a_server_that_does_not_answer_comes_out_within_a_second(
    server: LockServer, proxy: ChaosProxy, redis: Redis
) -> None:
    """The clean-up goes on behind it."""
    async with Redis.from_url(proxy.url) as far:
        await far.ping()
        proxy.delay_replies(1.5, b"EVALSHA", n=1)
        await redis.ping()
        acquiring = asyncio.create_task(far.lock(NAME, **OURS).acquire())
        await until(lambda: redis.exists(NAME))
        began = time.monotonic()
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert acquiring.cancelled()
        assert time.monotonic() - began < 1.5
        await until(lambda: is_free(redis), limit_s=PATIENT_S)
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)


@pytest.mark.parametrize(("lock_class", "leaves_it"), [(RedisPyLock, True), (OurLock, False)])
async def test_acquire_cancelled_while_its_reply_is_on_the_way_leaves_no_key(
    proxy: ChaosProxy, redis: Redis, lock_class: type[RedisPyLock], leaves_it: bool
) -> None:
    """The server has done it; redis-py's lock is nobody's then, for its whole time."""
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, FAR_S, lock_class=lock_class)
        await warmed(lock)
        proxy.delay_replies(0.2, NAME.encode())
        acquiring = asyncio.create_task(lock.acquire())
        await until(lambda: redis.exists(NAME))
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert acquiring.cancelled()
        assert await redis.exists(NAME) == int(leaves_it)


@pytest.mark.parametrize("more", ACQUISITIONS, ids=str)
async def test_acquire_cancelled_before_the_server_has_its_request_leaves_no_key(
    proxy: ChaosProxy, redis: Redis, more: dict[str, Any]
) -> None:
    """It arrives all the same, and its release behind it."""
    of_lock, of_acquire = options(more)
    async with Redis.from_url(proxy.url) as far:
        await warmed(far.lock(NAME, **of_lock))
        late = proxy.delay_requests(0.2, NAME.encode())
        acquiring = asyncio.create_task(far.lock(NAME, **of_lock).acquire(**of_acquire))
        await late.used.wait()
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert acquiring.cancelled()
        await assert_free(redis)


async def test_acquire_cancelled_while_it_settles_leaves_neither_claim_nor_token(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """The second request of an acquisition with a token of the user's."""
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, **OURS)
        await warmed(lock)
        proxy.delay_replies(0.2, _acquisition._SETTLE.digest.encode())
        acquiring = asyncio.create_task(lock.acquire(token="job"))
        await until(lambda: stands(redis, "job"))
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert acquiring.cancelled()
        await assert_free(redis)


async def test_acquire_whose_settling_is_refused_leaves_no_claim(redis: Redis) -> None:
    """A timeout of 0 ms, which the server takes in no script."""
    lock = redis.lock(NAME, timeout=0.0001, lock_class=OurLock)
    with pytest.raises(ResponseError, match="invalid expire"):
        await lock.acquire(token="job")
    await assert_free(redis)


async def test_acquire_that_fails_leaves_another_with_the_same_token_alone(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """What it undoes is its claim."""
    await redis.set(NAME, "same")
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, **OURS)
        await far.ping()
        proxy.drop_replies(2, b"EVAL", close=True)
        with pytest.raises(RedisConnectionError):
            await lock.acquire(token="same")
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)
        assert await stands(redis, "same")


async def stands(redis: Redis, value: str) -> bool:
    """Whether that is in the key."""
    return bool(await redis.get(NAME) == value)


async def warmed(lock: RedisPyLock) -> None:
    """Connected, and the server knows the scripts: the next request is the one that counts."""
    for token in (None, "warm"):
        await lock.acquire(token=token)
        await lock.release()


def _of_ours() -> list[str]:
    names = (task.get_name() for task in asyncio.all_tasks())
    return [name for name in names if name.startswith("aiodlock")]


# Lost replies.


def clients(proxy: ChaosProxy) -> list[Redis]:
    """Behind the proxy: one that tries again by itself, as `Redis()` does, and one not."""
    return [Redis(port=proxy.port), Redis.from_url(proxy.url)]


@pytest.mark.parametrize("more", ACQUISITIONS, ids=str)
async def test_acquire_whose_replies_are_lost_one_by_one_has_the_lock(
    proxy: ChaosProxy, redis: Redis, more: dict[str, Any]
) -> None:
    """Asked again, it is recognised by its token; also where its settling is lost."""
    of_lock, of_acquire = options(more)
    for script in (_acquisition._CLAIM, _acquisition._SETTLE):
        for far in clients(proxy):
            async with far:
                lock = far.lock(NAME, **of_lock)
                await warmed(lock)
                lost = proxy.drop_replies(1, script.digest.encode(), close=True)
                assert await lock.acquire(blocking=False, **of_acquire)
                settles = of_lock["timeout"] is None or bool(of_acquire)
                assert lost.hits == (script is _acquisition._CLAIM or settles)
                proxy.heal()
                assert await redis.get(NAME) == lock.local.token.decode()
                assert await redis.pttl(NAME) == -1 if of_lock["timeout"] is None else True
                await lock.release()
                await assert_free(redis)


async def test_acquire_of_redis_pys_lock_whose_reply_is_lost_locks_itself_out(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Negative control: it says False, and the key has its token."""
    async with Redis(port=proxy.port) as far:
        lock = far.lock(NAME, FAR_S, lock_class=RedisPyLock)
        await warmed(lock)
        proxy.drop_replies(1, b"SET", close=True)
        assert await lock.acquire(blocking=False) is False
        assert await redis.exists(NAME)


@pytest.mark.parametrize(("lock_class", "fails"), [(RedisPyLock, True), (OurLock, False)])
async def test_release_whose_reply_is_lost_is_no_loss(
    proxy: ChaosProxy, redis: Redis, lock_class: type[RedisPyLock], fails: bool
) -> None:
    """Its second copy finds nothing: the first has released it."""
    async with Redis(port=proxy.port) as far:
        lock = far.lock(NAME, FAR_S, lock_class=lock_class)
        await warmed(lock)
        await lock.acquire()
        proxy.drop_replies(1, b"EVALSHA", close=True)
        if fails:
            with pytest.raises(LockNotOwnedError):
                await lock.release()
        else:
            await lock.release()
        await assert_free(redis)


async def test_acquire_that_is_never_answered_raises_and_leaves_no_key(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Both its copies were done by the server."""
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, **OURS)
        await warmed(lock)
        proxy.drop_replies(2, _acquisition._CLAIM.digest.encode(), close=True)
        with pytest.raises(RedisConnectionError):
            await lock.acquire()
        await until(lambda: is_free(redis), limit_s=PATIENT_S)
        assert lock.local.token is None


async def test_wait_for_a_silent_server_ends_in_time(proxy: ChaosProxy, redis: Redis) -> None:
    """False where another was seen to hold it, else an error; nothing stands there afterwards."""
    async with Redis.from_url(proxy.url) as far:
        lock = far.lock(NAME, blocking_timeout=0.3, sleep=0.05, **OURS)
        await warmed(lock)
        proxy.black_hole()
        with pytest.raises(RedisTimeoutError, match="no answer"):
            await lock.acquire()
        proxy.heal()
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)
        await assert_free(redis)

        await redis.set(NAME, "another")
        waiting = asyncio.create_task(lock.acquire())
        await until(lambda: proxy.requests["EVALSHA"] > 10)
        proxy.black_hole()
        assert await waiting is False
        proxy.heal()
        await redis.delete(NAME)
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)
        await assert_free(redis)


async def test_waiters_of_a_server_that_fails_hear_of_it_together(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Not one after the other."""
    await redis.set(NAME, "another")
    async with Redis.from_url(proxy.url, socket_timeout=0.5) as far:
        locks = [far.lock(NAME, sleep=0.05, **OURS) for _ in range(20)]
        waiting = [asyncio.create_task(lock.acquire()) for lock in locks]
        await until(lambda: proxy.requests["EVALSHA"] > 2)
        proxy.black_hole()
        # One after the other it would be twice 0.5 s, and the same to undo it, for each.
        done, _ = await asyncio.wait(waiting, timeout=2 * PATIENT_S)
        assert len(done) == 20
        assert all(isinstance(task.exception(), RedisTimeoutError) for task in done)
        proxy.heal()
        await until(lambda: not _of_ours(), limit_s=PATIENT_S)


# Crowds.


async def calls(redis: Redis, *commands: str) -> int:
    """How many of these the server was asked for."""
    stats = await redis.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in commands)


@pytest.mark.parametrize("lock_class", [RedisPyLock, OurLock])
async def test_hundred_waiting_tasks_ask_once_for_all(
    redis: Redis, server: LockServer, lock_class: type[RedisPyLock]
) -> None:
    """One request for each `sleep`, whoever waits; of redis-py's lock each task has its own."""
    await redis.set(NAME, "another")
    sleep = 0.1
    async with Redis.from_url(server.url) as client:
        before, began = await calls(redis, "set", "evalsha", "eval"), time.monotonic()
        waiting = [
            asyncio.create_task(
                client.lock(NAME, FAR_S, sleep=sleep, lock_class=lock_class).acquire()
            )
            for _ in range(100)
        ]
        await asyncio.sleep(5 * sleep)
        asked = await calls(redis, "set", "evalsha", "eval") - before
        seconds = time.monotonic() - began
        left = set(waiting)
        async with asyncio.timeout(FAR_S):
            while left:  # redis-py swallows a cancel now and then, on Python 3.11.
                for task in left:
                    task.cancel()
                _, left = await asyncio.wait(left, timeout=0.1)
    print(f"\n{lock_class.__module__}: {asked} requests of 100 waiters in {seconds:.2f} s")
    # The scripts' own SET counts too; a first EVALSHA may be followed by an EVAL.
    at_most = 2 * (2 + seconds / (0.9 * sleep))
    assert (asked <= at_most) is (lock_class is OurLock)


async def test_hundred_tasks_take_turns_in_order_for_two_requests_each(
    redis: Redis, server: LockServer
) -> None:
    """First come, first served, over and over."""
    turns, order = 5, []
    sleep = 0.1
    await redis.set(NAME, "another")
    async with Redis.from_url(server.url) as client:

        async def take_turns(number: int) -> None:
            lock = client.lock(NAME, sleep=sleep, **OURS)
            for _ in range(turns):
                async with lock:
                    order.append(number)

        before, began = await calls(redis, "evalsha"), time.monotonic()
        tasks = [asyncio.create_task(take_turns(number)) for number in range(100)]
        await asyncio.sleep(0)
        await redis.delete(NAME)
        await asyncio.gather(*tasks)
        asked, seconds = await calls(redis, "evalsha") - before, time.monotonic() - began
    assert order == [*range(100)] * turns
    print(f"\n{asked / len(order):.2f} requests for each of {len(order)} turns")
    # Each poll may be followed by a second one, where a release came in between.
    assert asked <= 2 * len(order) + 2 * (1 + seconds / (0.9 * sleep))


async def test_waiter_that_leaves_makes_room_for_the_next(redis: Redis) -> None:
    """The first is cancelled, the second's time ends: the third has the lock."""
    await redis.set(NAME, "another")
    locks = [redis.lock(NAME, sleep=0.02, **OURS) for _ in range(3)]
    first = asyncio.create_task(locks[0].acquire())
    await asyncio.sleep(0)
    second = asyncio.create_task(locks[1].acquire(blocking_timeout=0.05))
    await asyncio.sleep(0)
    third = asyncio.create_task(locks[2].acquire())
    assert await second is False
    first.cancel()
    await asyncio.wait([first])
    await redis.delete(NAME)
    async with asyncio.timeout(FAR_S):
        assert await third
    assert await redis.get(NAME) == locks[2].local.token.decode()


async def test_impatient_waiter_behind_a_patient_one_sets_the_pace(redis: Redis) -> None:
    """The first would look again in a minute."""
    await redis.set(NAME, "another")
    patient, impatient = redis.lock(NAME, sleep=60, **OURS), redis.lock(NAME, sleep=0.02, **OURS)
    first = asyncio.create_task(patient.acquire())
    await asyncio.sleep(0.1)
    second = asyncio.create_task(impatient.acquire())
    await asyncio.sleep(0.1)
    await redis.delete(NAME)
    async with asyncio.timeout(FAR_S):
        assert await first
        await asyncio.create_task(patient.release())
        assert await second


async def test_waiter_keeps_its_pace_however_many_come_behind_it(redis: Redis) -> None:
    """Each of them asks for the pace anew."""
    await redis.set(NAME, "another")
    first = asyncio.create_task(redis.lock(NAME, sleep=0.2, **OURS).acquire())
    await asyncio.sleep(0.05)
    await redis.delete(NAME)
    behind = []
    async with asyncio.timeout(PATIENT_S):
        while not first.done():
            lock = redis.lock(NAME, sleep=0.2, **OURS)
            behind.append(asyncio.create_task(lock.acquire()))
            await asyncio.sleep(0.02)
    assert await first
    for task in behind:
        task.cancel()
    await asyncio.wait(behind)


async def test_waiter_asks_when_the_time_of_the_one_before_it_is_over(redis: Redis) -> None:
    """Who got the lock while this one waited, and never releases."""
    holder = redis.lock(NAME, **OURS)
    await holder.acquire()
    before, behind = (redis.lock(NAME, sleep=60, lock_class=OurLock, timeout=0.3) for _ in range(2))
    waiting = [asyncio.create_task(lock.acquire()) for lock in (before, behind)]
    await asyncio.sleep(0.05)
    await holder.release()
    async with asyncio.timeout(FAR_S):
        assert await asyncio.gather(*waiting) == [True, True]


async def test_waiter_that_was_told_and_is_cancelled_tells_the_next(redis: Redis) -> None:
    """Who would look by itself in a minute."""
    holder, second, third = (redis.lock(NAME, sleep=60, **OURS) for _ in range(3))
    await holder.acquire()
    waiting = [asyncio.create_task(lock.acquire()) for lock in (second, third)]
    await asyncio.sleep(0.1)
    await holder.release()
    waiting[0].cancel()
    async with asyncio.timeout(FAR_S):
        assert await waiting[1]
    assert waiting[0].cancelled()


async def test_tasks_that_hand_it_on_among_themselves_leave_gaps_for_others(redis: Redis) -> None:
    """Longer than the `sleep` of those who poll for it in other processes, and again and again."""
    sleep, freed_at = 0.1, 0.0
    pauses: list[float] = []
    loop = asyncio.get_running_loop()

    async def take_turns() -> None:
        nonlocal freed_at
        lock = redis.lock(NAME, sleep=sleep, **OURS)
        while sum(pause >= sleep for pause in pauses) < 5:
            async with lock:
                pauses.append(loop.time() - freed_at if freed_at else 0.0)
                await asyncio.sleep(0.005)
            freed_at = loop.time()

    async with asyncio.timeout(FAR_S):
        await asyncio.gather(*(take_turns() for _ in range(3)))


async def test_old_instance_elsewhere_gets_its_turns(redis: Redis, server: LockServer) -> None:
    """While tasks here would have the lock at any moment."""
    stop = False

    async def take_turns() -> None:
        lock = redis.lock(NAME, sleep=0.05, **OURS)
        while not stop:
            async with lock:
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(take_turns()) for _ in range(3)]
    async with Redis.from_url(server.url) as elsewhere:
        for _ in range(3):
            async with elsewhere.lock(NAME, FAR_S, sleep=0.05, blocking_timeout=FAR_S):
                pass
    stop = True
    await asyncio.gather(*tasks)


async def test_line_is_gone_with_its_last_waiter(redis: Redis) -> None:
    """Thousands of names leave nothing behind in the process."""
    for number in range(50):
        async with redis.lock(f"{NAME}:{number}", **OURS):
            pass
    assert not _lock._lines_of(asyncio.get_running_loop(), redis)


async def test_old_and_new_instances_in_several_processes_never_overlap(
    server: LockServer, redis: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers of each, killed now and then: as in a rollout."""
    workers, tasks, kills = 4, 5, 6
    order = Order(server.url, "redis-py, old and new", tasks=tasks, ttl=0.5)
    async with Crowd(order, workers=workers, redis=redis) as crowd:
        for count in range(kills):
            await asyncio.sleep(1.0)
            if count % 2:
                await crowd.kill(random.randrange(workers))
            else:
                await crowd.kill_a_holder()
        await asyncio.sleep(1.0)
        assert crowd.crashed == 0
    history = crowd.history
    of_old = sum(interval.worker // 1000 % 2 == 0 for interval in history)
    hits = sum(kill.hit_holder for kill in crowd.kills)
    with capsys.disabled():
        print(
            f"\n{workers} processes x {tasks} tasks: {of_old} grants of redis-py's lock, "
            f"{len(history) - of_old} of the drop-in, {kills} kills, {hits} of a holder"
        )
    assert overlaps_of_the_living(history) == []
    assert hits >= kills // 2
    assert min(of_old, len(history) - of_old) >= 20
