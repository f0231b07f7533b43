"""Over which connection requests go on a cluster: one for each primary that holds a name."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable

from redis.asyncio import Connection, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import (
    AskError,
    MovedError,
    RedisClusterException,
)

from ._api import NoAnswer
from ._mux import Link, Multiplexer
from ._wire import FAILURES, REFUSALS, Source


class NodeSource:
    """The connections of one node, which a client of redis-py for clusters keeps."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    def pick(self) -> Connection:
        return self._node.acquire_connection()

    async def connect(self, connection: Connection) -> None:
        await self._node.disconnect_if_needed(connection)
        await connection.connect()  # type: ignore[no-untyped-call]

    async def give_back(self, connection: Connection) -> None:
        self._node.release(connection)


class Cluster:
    """Follows redis-py's map of slots, and has it drawn anew where it turned out to be wrong.

    Messages come by plain publish over any node: a sharded one would need a channel, and a
    subscription, in the slot of every name, where one inbox for each client is enough.
    """

    has_one_primary = False

    def __init__(
        self, cluster: RedisCluster, on_lost: Callable[[], None], *, request_timeout: float
    ) -> None:
        self._cluster = cluster
        self._on_lost = on_lost
        self._request_timeout = request_timeout
        self._numbers = itertools.count(1)
        self._muxes: dict[str, Multiplexer] = {}  # Bound: one for each node ever seen.
        self._is_doubtful = True  # The map may be wrong; at first there is none.
        self._is_closed = False
        self._failed: str | None = None  # The node to be asked last.
        self._drawing: asyncio.Task[Exception | None] | None = None

    def link(self, key: str) -> Link | None:
        # Even in doubt: where the map is wrong, the node says MOVED, or its link is lost.
        node = self._known_node(key)
        mux = None if node is None else self._muxes.get(node.name)
        return None if mux is None else mux.link

    async def linked(self, key: str, within: float) -> Link:
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        if self._is_doubtful:
            problem = await self._draw(within)
            is_refusal = problem is not None and not isinstance(problem, NoAnswer)
            if problem is not None and (is_refusal or self._known_node(key) is None):
                raise problem
        node = self._known_node(key)
        if node is None:
            self._is_doubtful = True
            raise NoAnswer(f"no node of the cluster has the slot of {key}")
        try:
            return await self._mux(node).linked(end - loop.time())
        except (NoAnswer, *FAILURES):
            self._doubt(node.name)
            raise

    def is_current(self, number: int) -> bool:
        links = (mux.link for mux in self._muxes.values())
        return any(link is not None and link.number == number for link in links)

    def node(self, key: str) -> str:
        node = self._known_node(key)
        return "" if node is None else node.name

    async def source(self, key: str) -> Source:
        node = self._known_node(key)
        self._doubt("" if node is None else node.name)
        await self._draw(self._request_timeout)
        node = self._known_node(key)
        if node is None:
            raise NoAnswer(f"no node of the cluster has the slot of {key}")
        return NodeSource(node)

    async def redirect(self, error: AskError) -> Source:
        manager = self._cluster.nodes_manager
        if isinstance(error, MovedError):
            await manager.move_slot(error)
        node = self._cluster.get_node(host=error.host, port=error.port)
        if node is None:
            self._is_doubtful = True
            raise NoAnswer(f"the cluster sends us to {error.host}:{error.port}, an unknown node")
        return NodeSource(node)

    def doubt(self) -> None:
        self._is_doubtful = True

    def next_number(self) -> int:
        return next(self._numbers)

    def inbox_source(self) -> Source:
        primaries = self._cluster.get_primaries()
        if not primaries:
            raise NoAnswer("no node of the cluster is known yet")
        return NodeSource(self._cluster.get_random_primary_node())

    async def aclose(self) -> None:
        self._is_closed = True
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.wait((self._drawing,))
        for mux in self._muxes.values():
            await mux.aclose()

    def _known_node(self, key: str) -> ClusterNode | None:
        try:
            return self._cluster.get_node_from_key(key)
        except RedisClusterException:
            return None

    def _mux(self, node: ClusterNode) -> Multiplexer:
        if self._is_closed:
            raise NoAnswer("the client was closed meanwhile")
        mux = self._muxes.get(node.name)
        if mux is None:
            mux = self._muxes[node.name] = Multiplexer(
                NodeSource(node),
                self._numbers,
                request_timeout=self._request_timeout,
                on_lost=functools.partial(self._lose, node.name),
            )
        return mux

    def _doubt(self, node: str) -> None:
        """Perhaps *node* is no primary any more; it is not the one to ask."""
        self._is_doubtful, self._failed = True, node or None

    def _lose(self, node: str) -> None:
        """The connection to *node* was lost."""
        self._doubt(node)
        self._on_lost()

    async def _draw(self, within: float) -> Exception | None:
        """Draw the map, once for all who ask at the same time: what went wrong?"""
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.get_running_loop().create_task(
                self._draw_once(), name="aiodlock cluster map"
            )
        drawing = self._drawing
        await asyncio.wait((drawing,), timeout=within)
        if not drawing.done() or drawing.cancelled():
            return NoAnswer("no map of the cluster in time")
        return drawing.result()

    async def _draw_once(self) -> Exception | None:
        """Never raises: several may wait for this, or nobody."""
        try:
            async with asyncio.timeout(self._request_timeout):
                await self._cluster.initialize()
                await self._cluster.nodes_manager.initialize(last_failed_node_name=self._failed)
        except (RedisClusterException, *FAILURES) as error:
            return _root(error)
        self._is_doubtful = False
        return None


def _root(error: Exception) -> Exception:
    """What redis-py wrapped, where that is the server's refusal; else a failure like any other."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, REFUSALS):
            return cause
        cause = cause.__cause__ or cause.__context__
    failure = NoAnswer(f"no map of the cluster: {error}")
    failure.__cause__ = error
    return failure
