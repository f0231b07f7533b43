"""Claims in Redis: on one server, on a cluster, in memory, with lost replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import fakeredis
import pytest
import pytest_asyncio
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from aiodlock import LockClient
from aiodlock.fencing import Grant, RedisFence, StaleFenceError
from aiodlock.testing import LockServer
from tests import topologies
from tests.proxy import ChaosProxy

NAME = "account:1"
KEY = "aiodlock-fence:{account:1}"
TOTAL = "{account:1}:total"
FIRST, SECOND, THIRD = (Grant(NAME, token) for token in (101, 102, 103))
STORES = ["server", "server-decoding", "cluster", "memory"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[topologies.Cluster]:
    """A cluster of three primaries."""
    async with topologies.cluster() as made:
        yield made


@pytest.fixture(params=STORES)
async def store(
    request: pytest.FixtureRequest, server: LockServer, servers: topologies.Cluster
) -> AsyncIterator[Redis | RedisCluster]:
    """An empty server, seen by a client of each kind."""
    if request.param == "cluster":
        await servers.flush()
        async with servers.client() as cluster:  # not lazily: redis-py cannot when many ask at once
            yield cluster
    elif request.param == "memory":
        async with contextlib.aclosing(fakeredis.FakeAsyncRedis()) as memory:
            yield memory
    else:
        decodes = request.param == "server-decoding"
        async with Redis.from_url(server.url, decode_responses=decodes) as redis:
            yield redis


@pytest.fixture
def fence(store: Redis | RedisCluster) -> RedisFence:
    """Made as a user makes it."""
    return RedisFence(store)


async def stored(redis: Any, key: str) -> str | None:
    """The text of a key."""
    value = await redis.get(key)
    return value.decode() if isinstance(value, bytes) else value


async def test_claim_with_a_larger_token_is_stored_for_ever(
    store: Redis | RedisCluster, fence: RedisFence
) -> None:
    """The first of a name, too; a fence that expired would let latecomers in."""
    await fence.claim(FIRST)
    await fence.claim(THIRD)
    text = await stored(store, KEY)
    assert text is not None
    assert text.startswith("103/")
    assert await store.pttl(KEY) == -1


@pytest.mark.parametrize("late", [FIRST, SECOND])
async def test_claim_with_no_larger_token_is_refused(fence: RedisFence, late: Grant) -> None:
    """A smaller one, and the same one again."""
    await fence.claim(SECOND)
    with pytest.raises(StaleFenceError) as refused:
        await fence.claim(late)
    error = refused.value
    assert (error.name, error.fencing_token, error.stored_token) == (
        NAME,
        late.fencing_token,
        102,
    )


@pytest.mark.parametrize(
    ("smaller", "larger"), [(9, 10), (2**53, 2**53 + 1), (2**63 - 2, 2**63 - 1)]
)
async def test_tokens_are_compared_exactly(fence: RedisFence, smaller: int, larger: int) -> None:
    """Not as text, not as numbers of Lua."""
    await fence.claim(Grant(NAME, smaller))
    await fence.claim(Grant(NAME, larger))
    with pytest.raises(StaleFenceError) as refused:
        await fence.claim(Grant(NAME, smaller))
    assert refused.value.stored_token == larger
    with pytest.raises(StaleFenceError):
        await fence.write(Grant(NAME, smaller))
    assert await fence.write(Grant(NAME, larger)) == []


async def test_write_runs_all_commands_and_returns_their_replies(
    store: Redis | RedisCluster, fence: RedisFence
) -> None:
    """Words of every type; a reply of nothing in the middle."""
    await fence.claim(FIRST)
    replies = await fence.write(
        FIRST,
        ("SET", TOTAL, 7),
        ["GET", b"{account:1}:nothing"],
        ("INCRBY", TOTAL, "3"),
        ("INCRBYFLOAT", "{account:1}:share", 0.5),
    )
    assert replies[1:3] == [None, 10]
    assert await stored(store, TOTAL) == "10"
    assert await stored(store, "{account:1}:share") == "0.5"


@pytest.mark.parametrize(("grant", "token"), [(FIRST, 102), (THIRD, 102), (Grant("x", 7), None)])
async def test_write_with_another_token_runs_nothing(
    store: Redis | RedisCluster, fence: RedisFence, grant: Grant, token: int | None
) -> None:
    """An older one, one that has not claimed, and one of a name that nobody claimed."""
    await fence.claim(SECOND)
    with pytest.raises(StaleFenceError) as refused:
        await fence.write(grant, ("SET", f"{{{grant.name}}}:total", 1))
    assert refused.value.stored_token == token
    assert await stored(store, f"{{{grant.name}}}:total") is None


@pytest.mark.parametrize("transaction", [False, True])
async def test_write_in_a_pipeline_guards_its_own_commands(redis: Redis, transaction: bool) -> None:
    """The stale one's are not run; the rest of the pipeline is."""
    fence = RedisFence(redis)
    await fence.claim(SECOND)
    key = f"{{{SECOND.name}}}:rows"
    async with redis.pipeline(transaction=transaction) as pipeline:
        pipeline.set("seen", "1")
        fence.queue(pipeline, SECOND, ("RPUSH", key, "b"), ("LLEN", key))
        fence.queue(pipeline, FIRST, ("RPUSH", key, "a"))
        _, sound, stale = await pipeline.execute()

    assert fence.replies(SECOND, sound) == [1, 1]
    with pytest.raises(StaleFenceError) as caught:
        fence.replies(FIRST, stale)
    assert (caught.value.fencing_token, caught.value.stored_token) == (
        FIRST.fencing_token,
        SECOND.fencing_token,
    )
    assert (await redis.lrange(key, 0, -1), await redis.get("seen")) == (["b"], "1")


async def test_what_is_no_pipeline_is_refused(redis: Redis) -> None:
    """A client would run the command at once, unawaited."""
    with pytest.raises(TypeError, match="pipeline must be one of"):
        RedisFence(redis).queue(redis, FIRST, ("SET", "a", "b"))  # type: ignore[arg-type]


async def test_command_that_fails_ends_the_write(
    store: Redis | RedisCluster, fence: RedisFence
) -> None:
    """Those before it stay done, those behind it are not."""
    await fence.claim(FIRST)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await fence.write(
            FIRST,
            ("SET", TOTAL, 1),
            ("HSET", TOTAL, "field", 1),
            ("SET", TOTAL, 2),
        )
    assert await stored(store, TOTAL) == "1"


async def test_claim_once_is_won_by_one_of_many(
    store: Redis | RedisCluster, fence: RedisFence
) -> None:
    """All at once; its key lives for ever, unless it was given an end."""
    won = await asyncio.gather(*(fence.claim_once("task:1") for _ in range(20)))
    assert sorted(won) == [False] * 19 + [True]
    assert await store.pttl("aiodlock-fence:once:{task:1}") == -1
    assert await fence.claim_once("task:2", ttl=60) is True
    assert await fence.claim_once("task:2", ttl=120) is False
    assert 50_000 < await store.pttl("aiodlock-fence:once:{task:2}") <= 60_000


async def test_checking_only_writes_loses_an_update_and_claiming_first_does_not(
    store: Redis | RedisCluster, fence: RedisFence
) -> None:
    """Two sections read before either writes, their writes in the order of their tokens."""

    async def write_only(grant: Grant, total: int) -> None:
        script = (
            "if tonumber(redis.call('GET', KEYS[1]) or 0) > tonumber(ARGV[1]) then return 0 end "
            "redis.call('SET', KEYS[1], ARGV[1]) redis.call('SET', KEYS[2], ARGV[2]) return 1"
        )
        call: Any = store.eval(
            script, 2, "{account:1}:seen", TOTAL, str(grant.fencing_token), str(total)
        )
        assert await call == 1, "the tokens are in order: the check sees nothing wrong"

    async def read() -> int:
        return int(await stored(store, TOTAL) or 0)

    # Only writes are checked: the first one's 10 are gone, and nobody was told.
    of_first, of_second = await read(), await read()
    await write_only(FIRST, of_first + 10)
    await write_only(SECOND, of_second + 1)
    assert await read() == 1

    # Claims come first: the older one is told, so it can do its work again.
    await fence.claim(FIRST)
    of_first = await read()
    await fence.claim(SECOND)
    of_second = await read()
    with pytest.raises(StaleFenceError):
        await fence.write(FIRST, ("SET", TOTAL, of_first + 10))
    await fence.write(SECOND, ("SET", TOTAL, of_second + 1))
    await fence.claim(THIRD)
    await fence.write(THIRD, ("SET", TOTAL, await read() + 10))
    assert await read() == 12


async def test_holder_paused_past_its_ttl_is_refused_by_the_storage(
    store: Redis | RedisCluster, fence: RedisFence, locks: LockClient
) -> None:
    """Real leases: the second holder has claimed before the first one goes on."""
    lock = locks.lock(NAME, ttl=0.2, auto_extend=False, on_lost="raise")
    with pytest.raises(StaleFenceError) as refused:
        async with lock as paused:
            await fence.claim(paused)
            async with locks.lock(NAME).acquire(wait_timeout=10) as lease:
                await fence.claim(lease)
                await fence.write(lease, ("SET", TOTAL, "of the second"))
            await fence.write(paused, ("SET", TOTAL, "of the first"))
    assert refused.value.stored_token == lease.fencing_token
    assert await stored(store, TOTAL) == "of the second"


class TestLostReplies:
    """What redis-py sends again by itself, because the reply did not come."""

    @pytest.fixture
    async def lossy(self, proxy: ChaosProxy) -> AsyncIterator[RedisFence]:
        """A fence whose client retries, behind the proxy, connected."""
        async with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 3)) as redis:
            await redis.ping()
            yield RedisFence(redis)

    async def test_claim_that_is_sent_again_is_no_second_one(
        self, lossy: RedisFence, proxy: ChaosProxy, redis: Redis
    ) -> None:
        """It is not refused because of itself."""
        proxy.drop_replies(1, close=True)
        await lossy.claim(FIRST)
        assert (await redis.info("commandstats"))["cmdstat_eval"]["calls"] >= 2
        with pytest.raises(StaleFenceError):
            await lossy.claim(FIRST)

    async def test_claim_once_that_is_sent_again_is_still_the_first(
        self, lossy: RedisFence, proxy: ChaosProxy, redis: Redis
    ) -> None:
        """Or nobody would do the task."""
        proxy.drop_replies(1, close=True)
        assert await lossy.claim_once("task:1") is True
        assert (await redis.info("commandstats"))["cmdstat_eval"]["calls"] >= 2
        assert await lossy.claim_once("task:1") is False


async def test_key_that_holds_something_else_is_left_alone(redis: Redis) -> None:
    """Text that is no fence, and no text at all."""
    fence = RedisFence(redis)
    await redis.set(KEY, "mine")
    with pytest.raises(ResponseError, match="not a fence"):
        await fence.claim(FIRST)
    assert await redis.get(KEY) == "mine"
    await redis.delete(KEY)
    await redis.lpush(KEY, "mine")
    for call in (fence.claim(FIRST), fence.write(FIRST, ("SET", TOTAL, 1))):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await call
    assert await redis.exists(TOTAL) == 0


async def test_lost_reply_without_a_retry_is_said_by_redis_itself(proxy: ChaosProxy) -> None:
    """Its errors come out as they are; the claim may stand or not, and no other can use it."""
    async with Redis.from_url(proxy.url, retry=Retry(NoBackoff(), 0)) as redis:
        await redis.ping()
        proxy.drop_replies(1, close=True)
        with pytest.raises(RedisConnectionError):
            await RedisFence(redis).claim(FIRST)
        with pytest.raises(StaleFenceError) as refused:
            await RedisFence(redis).claim(FIRST)
        assert refused.value.stored_token == FIRST.fencing_token


def test_key_of_a_name_keeps_one_hash_tag() -> None:
    """Whatever the name, under the prefix that was asked for."""
    fence = RedisFence(Redis(), prefix="app:")
    assert fence.key("a{b}%") == "app:{a%7Bb%7D%25}"


async def test_other_layout_of_keys_is_a_method_to_override(redis: Redis) -> None:
    """Where the data's hash tag is not the lock's name."""

    class ByUser(RedisFence):
        def key(self, name: str) -> str:
            return f"fence:{{{name.split(':')[1]}}}"

    await ByUser(redis).claim(Grant("cart:7", 5))
    assert await ByUser(redis).write(Grant("cart:7", 5), ("SET", "{7}:cart", 1)) != []
    assert set(await redis.keys()) == {"fence:{7}", "{7}:cart"}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: RedisFence(None), TypeError),  # type: ignore[arg-type]
        (lambda: RedisFence(Redis(), prefix=b"a"), TypeError),  # type: ignore[arg-type]
        (lambda: RedisFence(Redis(), prefix="a{"), ValueError),
        (lambda: RedisFence(Redis(), prefix="a" * 129), ValueError),
    ],
)
def test_bad_option_is_refused_at_once(
    make: Callable[[], RedisFence], error: type[Exception]
) -> None:
    """What is allowed stands in the message."""
    with pytest.raises(error, match="must be"):
        make()


@pytest.mark.parametrize(
    ("command", "error"),
    [("SET a 1", TypeError), (None, TypeError), ((), ValueError), (("DEL",) * 1001, ValueError)],
)
async def test_bad_command_is_refused_and_nothing_is_run(
    redis: Redis, command: Any, error: type[Exception]
) -> None:
    """Also the good ones before it."""
    fence = RedisFence(redis)
    await fence.claim(FIRST)
    with pytest.raises(error, match="a command must"):
        await fence.write(FIRST, ("SET", TOTAL, 1), command)
    assert await redis.exists(TOTAL) == 0


async def test_command_of_the_most_words_is_run(redis: Redis) -> None:
    """The bound is one that Lua can keep."""
    fence = RedisFence(redis)
    await fence.claim(FIRST)
    assert await fence.write(FIRST, ("DEL", *map(str, range(999)))) == [0]


@pytest.mark.parametrize(
    ("ttl", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (True, TypeError),
        ("60", TypeError),
    ],
)
async def test_bad_ttl_of_a_claim_is_refused(
    redis: Redis, ttl: Any, error: type[Exception]
) -> None:
    """A claim without end is ttl=None, and the default."""
    with pytest.raises(error, match="ttl must be"):
        await RedisFence(redis).claim_once("task:1", ttl=ttl)


@pytest.mark.parametrize("name", ["", "a" * 513, None])
async def test_bad_name_of_a_claim_is_refused(redis: Redis, name: Any) -> None:
    """The same names as a lock has."""
    with pytest.raises((TypeError, ValueError), match="name must be"):
        await RedisFence(redis).claim_once(name)


async def test_error_in_a_pipelines_reply_is_raised_as_it_is(redis: Redis) -> None:
    """A pipeline that was told not to raise leaves it there."""
    fence = RedisFence(redis)
    await fence.claim(SECOND)
    async with redis.pipeline() as pipeline:
        fence.queue(pipeline, SECOND, ("NO-SUCH-COMMAND",))
        (reply,) = await pipeline.execute(raise_on_error=False)
    with pytest.raises(ResponseError):
        fence.replies(SECOND, reply)
