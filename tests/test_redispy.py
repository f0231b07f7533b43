"""The drop-in for redis-py's lock: what both do alike, on the same tests; then what is better.

The behaviours are those of `tests/test_asyncio/test_lock.py` of redis-py 8.1, in words of our own.
`nox -s redispy` runs that file itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
from redis import Redis as BlockingRedis
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.lock import Lock as RedisPyLock
from redis.exceptions import LockError, LockNotOwnedError, ResponseError

from aiodlock.redispy import Lock as OurLock
from aiodlock.redispy import _line
from aiodlock.testing import LockServer
from tests import topologies
from tests.topologies import Cluster

NAME = "reports:daily"
FREE = LockError("Cannot release a lock that's not owned or is already unlocked.")
# Where a test waits for what should never be waited for, and what a busy machine adds.
FAR_S = 20.0

Client: TypeAlias = Redis | RedisCluster
Make: TypeAlias = Callable[..., RedisPyLock]

LOCKS = pytest.mark.parametrize("lock_class", [RedisPyLock, OurLock], ids=["redis-py", "drop-in"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[Cluster]:
    """Three primaries."""
    async with topologies.cluster() as made:
        yield made


@pytest.fixture(params=["bytes", "decoded", "cluster"])
async def client(
    request: pytest.FixtureRequest, server: LockServer, nodes: Cluster
) -> AsyncIterator[Client]:
    """Each kind of client that a code base may have."""
    if request.param == "cluster":
        await nodes.flush()
        cluster = nodes.client()
        async with aclosing(cluster):
            yield cluster
    else:
        decodes = request.param == "decoded"
        async with Redis.from_url(server.url, decode_responses=decodes) as redis:
            yield redis


@pytest.fixture(params=[RedisPyLock, OurLock], ids=["redis-py", "drop-in"])
def make(request: pytest.FixtureRequest, client: Client) -> Make:
    """Makes locks of either class, as a code base does."""

    def lock(name: Any = NAME, **options: Any) -> RedisPyLock:
        return client.lock(name, lock_class=request.param, **options)

    return lock


async def stored(client: Client, name: Any = NAME) -> bytes | None:
    """What stands in the key."""
    value = await client.get(name)
    return value.encode() if isinstance(value, str) else value


# What both do.


async def test_lock_that_was_acquired_stands_under_its_name_with_its_token(
    client: Client, make: Make
) -> None:
    """The key is the name, the value the token: what old and new instances agree on."""
    lock = make(timeout=10)
    assert lock.local.token is None
    assert await lock.acquire() is True
    assert await stored(client) == lock.local.token
    assert 8000 < await client.pttl(NAME) <= 10_000
    await lock.release()
    assert await stored(client) is None
    assert lock.local.token is None


async def test_lock_without_timeout_never_expires(client: Client, make: Make) -> None:
    """It stays until somebody releases it."""
    lock = make()
    assert await lock.acquire(blocking=False)
    assert await client.pttl(NAME) == -1
    assert await stored(client) == lock.local.token
    await lock.release()
    assert await stored(client) is None


@pytest.mark.parametrize("life", [None, 10])
@pytest.mark.parametrize("thread_local", [True, False])
@pytest.mark.parametrize("token", ["job-7", b"job-7"])
async def test_lock_with_a_token_of_the_users_has_that_token(
    client: Client, make: Make, token: Any, thread_local: bool, life: int | None
) -> None:
    """As text or bytes, for one that another process is to release."""
    lock = make(timeout=life, thread_local=thread_local)
    assert await lock.acquire(token=token)
    assert await stored(client) == b"job-7" == lock.local.token
    assert (await client.pttl(NAME) > 0) is (life is not None)
    other = make()
    other.local.token = b"job-7"
    assert await other.owned()
    await other.release()
    assert await stored(client) is None
    with pytest.raises(LockNotOwnedError):
        await lock.release()


async def test_lock_with_a_token_that_another_has_waits_like_any_other(make: Make) -> None:
    """Two that were given one token exclude each other."""
    one, two = make(timeout=10), make(timeout=10)
    assert await one.acquire(token="same")
    assert not await two.acquire(token="same", blocking=False)
    assert not await two.acquire(token="same", blocking_timeout=0.05)
    assert await one.owned()
    await one.release()


async def test_lock_is_locked_for_all_and_owned_by_one(make: Make) -> None:
    """Before, while and after."""
    one, two = make(), make()
    assert (await one.locked(), await one.owned(), await two.owned()) == (False, False, False)
    await one.acquire()
    assert (await two.locked(), await one.owned(), await two.owned()) == (True, True, False)
    await one.release()
    assert (await one.locked(), await one.owned(), await two.owned()) == (False, False, False)


async def test_lock_that_is_held_is_not_got(make: Make) -> None:
    """Neither by the one nor by the other, until its release."""
    one, two = make(), make()
    assert await one.acquire(blocking=False)
    assert await two.acquire(blocking=False) is False
    await one.release()
    assert await two.acquire(blocking=False)
    assert await one.acquire(blocking=False) is False
    await two.release()


@pytest.mark.parametrize("left", [0, -0.2, -60])
async def test_waiter_whose_time_is_over_asks_once(
    make: Make, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`blocking_timeout=deadline - now`, for a caller who is late: got if it is free, else not."""
    monkeypatch.setattr(_line, "LAST_ANSWER_S", FAR_S)
    one, two = make(timeout=10), make(timeout=10, blocking_timeout=left)
    assert await one.acquire(blocking_timeout=left) is True
    assert await two.acquire() is False
    await one.release()
    assert await two.acquire() is True
    await two.release()


async def test_waiter_gets_the_lock_once_it_is_released(make: Make) -> None:
    """It waits for ever by default."""
    one, two = make(), make()
    await one.acquire()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await one.release()
    assert await waiting
    two.local.token = await stored(two.redis)
    await two.release()


async def test_waiter_gives_up_after_blocking_timeout(make: Make) -> None:
    """`acquire` says False, `async with` raises."""
    loop = asyncio.get_running_loop()
    holder = make()
    await holder.acquire()
    waiter = make(sleep=0.05, blocking_timeout=0.2)
    began = loop.time()
    assert await waiter.acquire() is False
    assert 0.15 < loop.time() - began < FAR_S
    with pytest.raises(LockError, match="Unable to acquire lock within the time specified"):
        async with waiter:
            raise AssertionError("entered without the lock")
    assert await make(blocking=False).acquire() is False
    await holder.release()


async def test_block_holds_the_lock_for_its_length(client: Client, make: Make) -> None:
    """And releases it when its body raises."""
    with pytest.raises(ZeroDivisionError):
        async with make(timeout=10, blocking_timeout=1) as lock:
            assert await stored(client) == lock.local.token
            raise ZeroDivisionError
    assert await stored(client) is None


async def test_block_that_lost_the_lock_raises_unless_told_otherwise(
    client: Client, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """`raise_on_release_error=False` logs it."""
    with pytest.raises(LockNotOwnedError):
        async with make(timeout=10):
            await client.delete(NAME)
    async with make(timeout=10, raise_on_release_error=False):
        await client.delete(NAME)
    assert "no longer owned when exiting context manager" in caplog.text


async def test_release_of_what_is_not_held_raises(client: Client, make: Make) -> None:
    """Never acquired; taken by another, after which the token is gone."""
    lock = make()
    with pytest.raises(LockError) as never:
        await lock.release()
    assert str(never.value) == str(FREE)
    assert getattr(never.value, "lock_name", None) == NAME
    await lock.acquire()
    await client.set(NAME, "another")
    with pytest.raises(LockNotOwnedError, match="Cannot release a lock that's no longer owned"):
        await lock.release()
    assert lock.local.token is None
    assert await stored(client) == b"another"


async def test_extension_adds_or_replaces(client: Client, make: Make) -> None:
    """`extend(10)` of ten seconds are twenty; replaced, they are ten again."""
    lock = make(timeout=10)
    await lock.acquire()
    assert await lock.extend(10) is True
    assert 16_000 < await client.pttl(NAME) <= 20_000
    assert await lock.extend(9.5, replace_ttl=True) is True
    assert 8000 < await client.pttl(NAME) <= 9500
    await client.pexpire(NAME, 5000)
    assert await lock.reacquire() is True
    assert 8000 < await client.pttl(NAME) <= 10_000
    await lock.release()


@pytest.mark.parametrize("word", ["extend", "reacquire"])
async def test_extension_of_what_is_not_held_raises(client: Client, make: Make, word: str) -> None:
    """Unlocked or without timeout at once, before anything is awaited; lost when it is known."""

    def change(lock: RedisPyLock) -> Any:
        return lock.extend(10) if word == "extend" else lock.reacquire()

    with pytest.raises(LockError, match=f"Cannot {word} an unlocked lock"):
        change(make(timeout=10))
    endless = make()
    await endless.acquire()
    with pytest.raises(LockError, match=f"Cannot {word} a lock with no timeout"):
        change(endless)
    await endless.release()
    lock = make(timeout=10)
    await lock.acquire()
    await client.set(NAME, "another", px=5000)
    with pytest.raises(LockNotOwnedError, match=f"Cannot {word} a lock that's no longer owned"):
        await change(lock)
    assert await client.pttl(NAME) <= 5000


@pytest.mark.parametrize("name", ["ünï{x}", b"\xff\x00bytes"])
async def test_lock_takes_any_name(client: Client, make: Make, name: Any) -> None:
    """Text and bytes that are no text."""
    async with make(name, timeout=10) as lock:
        assert lock.name == name
        assert await client.exists(name)
    assert not await client.exists(name)


async def test_key_that_is_no_lock_counts_as_held(client: Client, make: Make) -> None:
    """As SET NX has it."""
    await client.rpush(NAME, "a job")
    assert await make(timeout=10).acquire(blocking=False) is False


async def test_timeout_below_a_millisecond_is_refused_by_the_server(make: Make) -> None:
    """It would be 0."""
    with pytest.raises(ResponseError, match="invalid expire"):
        await make(timeout=0.0001).acquire()


async def test_one_try_and_one_release_can_be_made_by_hand(client: Client, make: Make) -> None:
    """`do_acquire` and `do_release`, which leave `local.token` alone."""
    lock = make(timeout=10)
    assert await lock.do_acquire(b"by hand") is True
    assert await lock.do_acquire(b"another") is False
    assert await stored(client) == b"by hand"
    assert lock.local.token is None
    with pytest.raises(LockNotOwnedError):
        await lock.do_release(b"another")
    await lock.do_release(b"by hand")
    assert await stored(client) is None


@LOCKS
def test_lock_has_the_attributes_of_its_arguments(
    lock_class: type[RedisPyLock], server: LockServer
) -> None:
    """Under redis-py's names; no loop is needed."""
    redis = Redis.from_url(server.url)
    lock = redis.lock(
        "n",
        lock_class=lock_class,
        timeout=3.5,
        sleep=0.2,
        blocking=False,
        blocking_timeout=4,
        thread_local=False,
        raise_on_release_error=False,
    )
    assert type(lock) is lock_class
    assert isinstance(lock, RedisPyLock)
    told = (lock.redis, lock.name, lock.timeout, lock.sleep, lock.blocking)
    assert told == (redis, "n", 3.5, 0.2, False)
    assert (lock.blocking_timeout, lock.thread_local) == (4, False)
    assert lock.raise_on_release_error is False


def test_drop_in_has_redis_pys_signatures() -> None:
    """Every public method, with the same parameters and defaults."""

    def parameters(lock_class: type[RedisPyLock], name: str) -> list[tuple[str, object]]:
        signature = inspect.signature(getattr(lock_class, name))
        return [(each.name, each.default) for each in signature.parameters.values()]

    methods = [name for name in vars(RedisPyLock) if inspect.isroutine(getattr(RedisPyLock, name))]
    public = [name for name in methods if not name.startswith("_")]
    assert {"acquire", "release", "extend", "reacquire", "owned", "locked"} <= set(public)
    for name in ("__init__", *public):
        assert parameters(OurLock, name) == parameters(RedisPyLock, name), name


def test_drop_in_on_a_blocking_client_says_what_is_allowed(server: LockServer) -> None:
    """Its requests could not be awaited."""
    with BlockingRedis.from_url(server.url) as blocking:
        wrong: Any = blocking
        with pytest.raises(TypeError, match=r"must be a redis\.asyncio\.Redis or RedisCluster"):
            OurLock(wrong, "n")


# Where they differ: each is in the table of docs/how-to/move-from-redis-py.md.


@pytest.mark.parametrize(("lock_class", "gets_it"), [(RedisPyLock, False), (OurLock, True)])
async def test_waiter_whose_sleep_is_longer_than_its_wait_still_gets_a_lock_that_expires(
    redis: Redis, lock_class: type[RedisPyLock], gets_it: bool
) -> None:
    """redis-py gives up at once; here no sleep passes the holder's expiry, nor the end."""
    await redis.set(NAME, "another", px=150)
    lock = redis.lock(NAME, 10, sleep=60, blocking_timeout=50, lock_class=lock_class)
    async with asyncio.timeout(FAR_S):
        assert await lock.acquire() is gets_it


@pytest.mark.parametrize(("lock_class", "gets_it"), [(RedisPyLock, False), (OurLock, True)])
async def test_waiter_tries_a_last_time_at_its_end(
    redis: Redis, lock_class: type[RedisPyLock], gets_it: bool
) -> None:
    """A lock that was freed behind our back, by another process, since the last look."""
    await redis.set(NAME, "another")
    lock = redis.lock(NAME, 10, sleep=60, blocking_timeout=0.5, lock_class=lock_class)
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0.1)
    await redis.delete(NAME)
    assert await waiting is gets_it


@pytest.mark.parametrize(("lock_class", "kept"), [(RedisPyLock, False), (OurLock, True)])
async def test_task_that_lost_a_shared_lock_leaves_it_to_the_next_one(
    redis: Redis, lock_class: type[RedisPyLock], kept: bool
) -> None:
    """One object, two tasks: A's time runs out, B acquires, A releases. redis-py frees B's."""
    shared = redis.lock(NAME, timeout=10, lock_class=lock_class)
    await shared.acquire()
    await redis.delete(NAME)  # its time is over
    has_acquired, may_leave = asyncio.Event(), asyncio.Event()

    async def next_one() -> None:
        async with shared:
            has_acquired.set()
            await may_leave.wait()

    following = asyncio.create_task(next_one())
    await has_acquired.wait()
    try:
        await shared.release()
    except LockNotOwnedError:
        assert await redis.exists(NAME)
    assert bool(await redis.exists(NAME)) is kept
    may_leave.set()
    await asyncio.wait([following])
    assert (following.exception() is None) is kept


async def test_task_that_was_refused_cannot_release_anothers(redis: Redis) -> None:
    """A `finally: await lock.release()` after an `acquire` that said False."""
    shared = redis.lock(NAME, timeout=10, lock_class=OurLock)
    await shared.acquire()

    async def refused() -> None:
        assert not await shared.acquire(blocking=False)
        assert shared.local.token is None
        assert not await shared.owned()
        await shared.release()

    with pytest.raises(LockError):
        await asyncio.create_task(refused())
    assert await shared.owned()
    await shared.release()


async def test_task_that_never_acquired_may_release_for_the_one_that_did(redis: Redis) -> None:
    """One task acquires, another goes on with it: as in redis-py."""
    lock = redis.lock(NAME, timeout=10, lock_class=OurLock)
    acquiring = asyncio.create_task(acquired_by(lock))
    token = await acquiring
    assert lock.local.token == token
    await lock.extend(5)
    await lock.release()
    assert not await lock.locked()
    assert lock.local.token is None


async def acquired_by(lock: RedisPyLock) -> bytes:
    """The token of a task that acquires and ends."""
    assert await lock.acquire()
    token: bytes = lock.local.token
    return token


async def test_calls_made_into_tasks_belong_to_the_task_that_made_them(redis: Redis) -> None:
    """`wait_for` and `gather` run a coroutine in a task of its own."""
    lock = redis.lock(NAME, timeout=10, lock_class=OurLock)
    assert await asyncio.create_task(lock.acquire())
    token = lock.local.token
    assert await redis.get(NAME) == token.decode()
    assert await asyncio.create_task(acquired_elsewhere(lock)) is False
    assert lock.local.token == token
    assert await asyncio.create_task(coroutine(lock.owned()))
    await asyncio.create_task(coroutine(lock.extend(5)))
    await asyncio.create_task(lock.release())
    assert not await redis.exists(NAME)


async def coroutine(awaitable: Any) -> Any:
    """As a coroutine, which `create_task` takes."""
    return await awaitable


async def acquired_elsewhere(lock: RedisPyLock) -> bool:
    """Whether another task gets it, too."""
    return bool(await lock.acquire(blocking=False))


async def test_one_token_for_all_is_had_by_thread_local_false(redis: Redis) -> None:
    """As redis-py has it: who was refused may release."""
    lock = redis.lock(NAME, timeout=10, thread_local=False, lock_class=OurLock)
    await lock.acquire()
    assert await asyncio.create_task(acquired_elsewhere(lock)) is False
    await asyncio.create_task(lock.release())
    assert not await lock.locked()
    assert lock.local.token is None


async def test_cancel_of_a_body_that_lost_the_lock_comes_out(redis: Redis) -> None:
    """redis-py raises LockNotOwnedError in its place, and no timeout of the caller's works."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), redis.lock(NAME, timeout=10, lock_class=OurLock):
            await redis.delete(NAME)
            await asyncio.sleep(FAR_S)
    with pytest.raises(LockNotOwnedError):
        async with asyncio.timeout(0.05), redis.lock(NAME, timeout=10, lock_class=RedisPyLock):
            await redis.delete(NAME)
            await asyncio.sleep(FAR_S)


async def test_lock_without_timeout_is_warned_of_once_for_a_client(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """It works as in redis-py; the log says what it means."""
    with caplog.at_level(logging.WARNING, logger="aiodlock"):
        for _ in range(2):
            async with redis.lock(NAME, lock_class=OurLock):
                pass
        async with redis.lock(NAME, timeout=10, lock_class=OurLock):
            pass
    said = [record.getMessage() for record in caplog.records if record.name == "aiodlock"]
    assert said == [
        f"the lock {NAME!r} has no timeout: if its holder dies it stays locked for ever"
    ]


async def test_acquisition_has_a_token_of_its_own_each_time(redis: Redis) -> None:
    """None is used twice."""
    lock = redis.lock(NAME, timeout=10, lock_class=OurLock)
    tokens = set()
    for _ in range(5):
        async with lock:
            tokens.add(uuid.UUID(lock.local.token.decode()))
    assert len(tokens) == 5
