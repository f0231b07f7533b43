"""Over which connection requests go on a cluster: one for each primary that holds a name."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from redis.asyncio import Connection, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import AskError, MovedError, RedisClusterException

from ._api import NoAnswer
from ._mux import Link, Multiplexer
from ._wire import FAILURES, Source


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

    def __init__(
        self, cluster: RedisCluster, on_lost: Callable[[], None], *, request_timeout: float
    ) -> None:
        self._cluster = cluster
        self._on_lost = on_lost
        self._request_timeout = request_timeout
        self._numbers = itertools.count(1)
        self._muxes: dict[str, Multiplexer] = {}  # Bound: one for each node ever seen.
        self._is_doubtful = True  # The map may be wrong; at first there is none.
        self._drawing: asyncio.Task[BaseException | None] | None = None

    def link(self, key: str) -> Link | None:
        if self._is_doubtful:
            return None
        mux = self._muxes.get(self._node(key).name)
        return None if mux is None else mux.link

    async def linked(self, key: str, within: float) -> Link:
        loop = asyncio.get_running_loop()
        end = loop.time() + within
        if self._is_doubtful:
            await self._draw(within)
        node = self._node(key)
        mux = self._muxes.get(node.name)
        if mux is None:
            mux = self._muxes[node.name] = Multiplexer(
                NodeSource(node),
                self._numbers,
                request_timeout=self._request_timeout,
                on_lost=self._doubt,
            )
        try:
            return await mux.linked(end - loop.time())
        except FAILURES:
            self._is_doubtful = True
            self._cluster.nodes_manager.move_node_to_end_of_cached_nodes(node.name)
            raise

    def is_current(self, number: int) -> bool:
        links = (mux.link for mux in self._muxes.values())
        return any(link is not None and link.number == number for link in links)

    def source(self, key: str) -> Source:
        return NodeSource(self._node(key))

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
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.wait((self._drawing,))
        for mux in self._muxes.values():
            await mux.aclose()

    def _node(self, key: str) -> ClusterNode:
        try:
            node = self._cluster.get_node_from_key(key)
        except RedisClusterException as error:
            self._is_doubtful = True
            raise NoAnswer(f"no node of the cluster has the slot of {key}") from error
        assert node is not None
        return node

    def _doubt(self) -> None:
        """A connection was lost: perhaps its node is no primary any more."""
        self._is_doubtful = True
        self._on_lost()

    async def _draw(self, within: float) -> None:
        """Draw the map, once for all who ask at the same time."""
        if self._drawing is None:
            self._drawing = asyncio.get_running_loop().create_task(
                self._draw_once(), name="aiodlock cluster map"
            )
        drawing = self._drawing
        await asyncio.wait((drawing,), timeout=within)
        if not drawing.done() or drawing.cancelled():
            raise NoAnswer("no map of the cluster in time")
        if (error := drawing.result()) is not None:
            raise NoAnswer(f"no map of the cluster: {error}") from error

    async def _draw_once(self) -> BaseException | None:
        """Never raises: several may wait for this, or nobody."""
        try:
            async with asyncio.timeout(self._request_timeout):
                await self._cluster.initialize()
                await self._cluster.nodes_manager.initialize()
        except (RedisClusterException, *FAILURES) as error:
            return error
        finally:
            self._drawing = None
        self._is_doubtful = False
        return None
