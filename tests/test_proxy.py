"""The proxy, against the real server with plain redis-py: what it is told to lose, it loses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.proxy import ChaosProxy, frame_end
from tests.until import until

ANSWER_LIMIT_S = 0.15


@asynccontextmanager
async def client_of(proxy: ChaosProxy) -> AsyncIterator[Redis]:
    """A client on one connection, ready for use, that never sends anything twice."""
    once = Retry(NoBackoff(), 0)
    async with Redis.from_url(
        proxy.url, socket_timeout=ANSWER_LIMIT_S, retry=once, single_connection_client=True
    ) as client:
        await client.ping()
        yield client


async def pipelined(client: Redis, *commands: tuple[str | bytes | int, ...]) -> list[object]:
    """Send all of them in one write; their replies."""
    pipe = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    return list(await pipe.execute())


async def test_healthy_proxy_passes_requests_and_counts_them(proxy: ChaosProxy) -> None:
    """Pipelines, nested replies and large values arrive whole."""
    async with client_of(proxy) as client:
        big = b"x" * 300_000
        sent = [("SET", "big", big), ("RPUSH", "list", "a", "b"), ("GET", "big")]
        replies = await pipelined(client, *sent, ("LRANGE", "list", 0, -1))
        assert replies == [True, 2, big, [b"a", b"b"]]
        script = "return {1, {'a', {}}, false, redis.status_reply('ok')}"
        assert await client.eval(script, 0) == [1, [b"a", []], None, b"ok"]
    assert proxy.requests["SET"] == 1
    assert proxy.requests["EVAL"] == 1
    assert proxy.connections == 2  # a pipeline takes its own
    await until(lambda: proxy.open_connections == 0)


async def test_drop_replies_loses_only_the_matching_reply(proxy: ChaosProxy, redis: Redis) -> None:
    """The server has done it, the connection stays, and the next reply is the next request's."""
    async with client_of(proxy) as client:
        fault = proxy.drop_replies(1, matching=b"lost")
        with pytest.raises(RedisTimeoutError):
            await pipelined(client, ("SET", "lost", 1), ("GET", "lost"))
        assert fault.used.is_set()
        assert await client.get("lost") == b"1"
    assert await redis.get("lost") == "1"


async def test_drop_replies_with_close_resets_the_connection(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """The client sees an error instead of silence; the server has done the request all the same."""
    async with client_of(proxy) as client:
        proxy.drop_replies(1, matching=b"lost", close=True)
        with pytest.raises(RedisConnectionError):
            await client.set("lost", 1)
    assert await redis.get("lost") == "1"


async def test_delay_replies_are_late_but_all_arrive_in_order(proxy: ChaosProxy) -> None:
    """A delayed reply holds back those behind it, and each is late once, not all in a row."""
    async with client_of(proxy) as client:
        proxy.delay_replies(0.06, matching=b"INCR", n=3)
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await pipelined(client, *[("INCR", "n")] * 4) == [1, 2, 3, 4]
        assert 0.06 <= loop.time() - started < 0.12


async def test_delay_requests_reach_the_server_after_their_client_hung_up(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """A ghost: sent, given up, its connection closed, and done later all the same."""
    async with client_of(proxy) as client:
        fault = proxy.delay_requests(0.3, matching=b"ghost")
        with pytest.raises(RedisTimeoutError):
            await client.set("ghost", 1)
        assert fault.hits == 1
    await until(lambda: proxy.open_connections == 0)
    assert await redis.get("ghost") is None
    await until(lambda: redis.exists("ghost"))


@pytest.mark.parametrize("deliver", [True, False])
async def test_black_hole_holds_everything_until_healed(
    proxy: ChaosProxy, redis: Redis, deliver: bool
) -> None:
    """Nothing passes either way; what was held is delivered or lost, as told."""
    async with client_of(proxy) as client:
        proxy.black_hole()
        with pytest.raises(RedisTimeoutError):
            await client.set("held", 1)
        proxy.heal(deliver=deliver)
        if deliver:
            await until(lambda: redis.exists("held"))
        assert await client.exists("held") == int(deliver)


async def test_black_hole_swallows_new_connections(proxy: ChaosProxy) -> None:
    """They are accepted, as by a host behind a broken route, and never answered."""
    proxy.black_hole()
    with pytest.raises(RedisTimeoutError):
        async with client_of(proxy):
            pass
    proxy.heal()
    async with client_of(proxy) as client:
        assert await client.ping()


async def test_half_open_inboxes_are_deaf_while_commands_and_new_inboxes_work(
    proxy: ChaosProxy, redis: Redis
) -> None:
    """Only connections that had subscribed lose what the server sends, PONGs included."""
    async with client_of(proxy) as client, client.pubsub() as deaf, client.pubsub() as fresh:
        await deaf.subscribe("news")
        assert await deaf.get_message(timeout=1) is not None
        assert proxy.half_open_inboxes() == 1
        await fresh.subscribe("news")
        assert await fresh.get_message(timeout=1) is not None
        assert await redis.publish("news", "hello") == 2
        message = await fresh.get_message(timeout=1)
        assert message is not None
        assert message["data"] == b"hello"
        assert await deaf.get_message(timeout=0.05) is None
        assert await client.ping()


async def test_messages_are_dropped_and_delayed_as_told(proxy: ChaosProxy, redis: Redis) -> None:
    """Faults on messages strike what is published, and not the confirmation of a subscription."""
    async with client_of(proxy) as client, client.pubsub() as inbox:
        lost = proxy.drop_messages(1)
        proxy.delay_messages(0.06, matching=b"late")
        await inbox.subscribe("news")
        assert await inbox.get_message(timeout=1) is not None
        await redis.publish("news", "lost")
        await redis.publish("news", "late")
        await lost.used.wait()
        assert await inbox.get_message(timeout=0.02) is None
        message = await inbox.get_message(timeout=1)
        assert message is not None
        assert message["data"] == b"late"


async def test_kill_connections_resets_only_the_kind_asked_for(proxy: ChaosProxy) -> None:
    """Commands go on while the inbox is cut, and the other way round."""
    async with client_of(proxy) as client, client.pubsub() as inbox:
        await inbox.subscribe("news")
        assert await inbox.get_message(timeout=1) is not None
        assert proxy.kill_connections("inbox") == 1
        assert await client.ping()
        assert proxy.kill_connections("commands") == 1
        with pytest.raises(RedisConnectionError):
            await client.ping()


async def test_server_that_dies_closes_the_clients(proxy: ChaosProxy) -> None:
    """The end of the server's side is passed on, and a dead server refuses."""
    async with client_of(proxy) as client:
        proxy.server_port = 1
        with pytest.raises(RedisConnectionError):
            async with client_of(proxy):
                pass
        assert await client.ping()


@pytest.mark.parametrize(
    "value",
    [
        b"+OK\r\n",
        b"$-1\r\n",
        b"$4\r\na\r\nb\r\n",
        b"*-1\r\n",
        b"*2\r\n*1\r\n:1\r\n$0\r\n\r\n",
        b"%1\r\n+a\r\n~2\r\n_\r\n#t\r\n",
        b">2\r\n+message\r\n=5\r\ntxt:a\r\n",
    ],
)
def test_frame_end_finds_the_end_of_every_kind_and_of_no_prefix(value: bytes) -> None:
    """Also with another value behind it, and starting in the middle."""
    assert frame_end(value, 0) == len(value)
    assert frame_end(b":0\r\n" + value + b"+", 4) == 4 + len(value)
    assert [frame_end(value[:cut], 0) for cut in range(len(value))] == [None] * len(value)
