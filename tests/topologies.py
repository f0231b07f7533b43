"""Servers as people run them: a cluster, Sentinels, TLS, a Unix socket, users with few rights."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import Sentinel
from redis.crc import key_slot
from redis.exceptions import RedisError

from aiodlock import Lease, ServerUnreachable, _names, testing
from aiodlock.testing import LockServer, lock_server

HOST = "127.0.0.1"
SLOTS = 16384
NODE_TIMEOUT_S = 1.0
"""After which the nodes of a cluster take one that is silent for dead."""
DOWN_AFTER_S = 0.3
"""After which Sentinels take a silent master for dead."""
START_LIMIT_S = 20.0
SERVICE = "locks"


def admin(server: LockServer) -> Redis:
    """Looks at one server from outside; with the shortest of handshakes, for it is made often."""
    return Redis.from_url(server.url, decode_responses=True, driver_info=None)


async def ask(server: LockServer, *command: str | int) -> Any:
    """The reply of one server to one command, over a connection of its own."""
    async with admin(server) as redis:
        return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


async def info(server: LockServer, section: str) -> dict[str, Any]:
    """What one server tells about itself."""
    async with admin(server) as redis:
        return dict(await redis.info(section))


async def well(trouble: Callable[[], Awaitable[str]]) -> None:
    """Return once *trouble* has nothing more to tell; it looks at the clock itself.

    (Not `until`: on 3.11 redis-py swallows a cancel now and then, and with it a timeout.)
    """
    give_up_at = time.monotonic() + START_LIMIT_S
    while what := await trouble():
        assert time.monotonic() < give_up_at, f"the servers did not get there: {what}"
        await asyncio.sleep(0.01)


async def extended(lease: Lease) -> None:
    """Extend it as often as no server answers, which may be so during an outage."""
    while True:
        try:
            assert await lease.extend() > lease.ttl * 0.9
        except ServerUnreachable:
            assert lease.is_held
        else:
            return


# A cluster.


class Cluster:
    """Three primaries, each with a third of the slots, and perhaps a replica of each.

    Who is primary may change; `nodes` are the servers in the order in which they were started.
    """

    def __init__(self, nodes: list[LockServer], ids: list[str]) -> None:
        self.nodes = nodes
        self.ids = ids

    def client(self, **options: Any) -> RedisCluster:
        """A new client of redis-py; the caller closes it."""
        return RedisCluster(
            startup_nodes=[ClusterNode(HOST, node.port) for node in self.nodes], **options
        )

    async def owner(self, slot: int) -> LockServer:
        """The primary of *slot*, as the first node that answers sees it."""
        return self._at(await self._shard(slot), 0)

    async def replica(self, slot: int) -> LockServer:
        """The first replica that is there for *slot*."""
        return self._at(await self._shard(slot), 1)

    async def has_moved(self, slot: int, primary: LockServer) -> bool:
        """Whether, in the eyes of the others, *slot* has another primary than that one."""
        for node in self.nodes:
            if node is not primary:
                shards = await ask(node, "CLUSTER", "SLOTS")
                return self._at(_shard_of(shards, slot), 0) is not primary
        raise AssertionError("a cluster of one node")

    def name_on(self, node: LockServer, owners: dict[int, LockServer], *, nth: int = 0) -> str:
        """The *nth* name whose keys *node* has; *owners* as `owners()` gave them."""
        found = (name for name in map("job {}".format, range(1000)))
        on_node = [name for name in found if owners[slot_of(name)] is node]
        return on_node[nth]

    async def owners(self) -> dict[int, LockServer]:
        """Who has which slot."""
        shards = await self._shards()
        return {
            slot: self._at(shard, 0)
            for shard in shards
            for slot in range(int(shard[0]), int(shard[1]) + 1)
        }

    async def begin_move(self, slot: int, source: LockServer, target: LockServer) -> None:
        """From now on *slot* is half there and half here; no key has moved yet."""
        await ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        await ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(target))

    async def move_keys(self, slot: int, source: LockServer, target: LockServer) -> list[str]:
        """Send the keys that *slot* has now; returns them."""
        keys: list[str] = await ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        if keys:
            await ask(source, "MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *keys)
        return sorted(keys)

    async def end_move(self, slot: int, source: LockServer, target: LockServer) -> None:
        """*slot* is *target*'s; the keys that came meanwhile are moved first."""
        await self.move_keys(slot, source, target)
        for node in (target, source):
            await ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self._id(target))
        await well(functools.partial(self._dissent_on, slot, target))

    async def cancel_move(self, slot: int, source: LockServer, target: LockServer) -> None:
        """*slot* stays whole where it was."""
        await self.move_keys(slot, target, source)
        for node in (source, target):
            await ask(node, "CLUSTER", "SETSLOT", slot, "STABLE")

    async def healed(self) -> None:
        """Wait until every node is there, agrees with the others, and has what it is to have."""
        await well(self._trouble)

    async def flush(self) -> None:
        """Drop every key, and with them the copies at the replicas."""
        for node in self.nodes:
            if (await info(node, "replication"))["role"] == "master":
                await ask(node, "FLUSHALL")

    async def _trouble(self) -> str:
        maps = []
        for node in self.nodes:
            try:
                told = await ask(node, "CLUSTER", "INFO")
                known = _lines(await ask(node, "CLUSTER", "NODES"))
                replication = await info(node, "replication")
                shards = await ask(node, "CLUSTER", "SLOTS")
            except (RedisError, OSError) as error:
                return f"{node}: {error}"
            if "cluster_state:ok" not in told:
                return f"{node}: {told}"
            if len(known) != len(self.nodes) or any("fail" in flags for _, flags in known):
                return f"{node}: {known}"
            if replication["role"] == "slave" and replication["master_link_status"] != "up":
                return f"{node}: its replication is down"
            maps.append(sorted((s[0], s[1], s[2][1], sorted(r[1] for r in s[3:])) for s in shards))
        copies = len(self.nodes) // 3 - 1
        if any(one != maps[0] for one in maps) or any(len(s[3]) != copies for s in maps[0]):
            return f"the maps are {maps}"
        return ""

    async def _dissent_on(self, slot: int, owner: LockServer) -> str:
        for node in self.nodes:
            shards = await ask(node, "CLUSTER", "SLOTS")
            if self._at(_shard_of(shards, slot), 0) is not owner:
                return f"{node}: {shards}"
        return ""

    async def _shard(self, slot: int) -> list[Any]:
        return _shard_of(await self._shards(), slot)

    async def _shards(self) -> list[list[Any]]:
        for node in self.nodes:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(0.3):
                    shards: list[list[Any]] = await ask(node, "CLUSTER", "SLOTS")
                    return shards
        raise AssertionError("no node of the cluster answers")

    def _at(self, shard: list[Any], place: int) -> LockServer:
        port = int(shard[2 + place][1])
        return next(node for node in self.nodes if node.port == port)

    def _id(self, node: LockServer) -> str:
        return self.ids[self.nodes.index(node)]


def slot_of(name: str, prefix: str = "aiodlock:") -> int:
    """The hash slot in which the keys of *name* are."""
    return int(key_slot(_names.keys(prefix, name).lock.encode()))


def _shard_of(shards: list[list[Any]], slot: int) -> list[Any]:
    return next(shard for shard in shards if int(shard[0]) <= slot <= int(shard[1]))


@asynccontextmanager
async def cluster(*, replicas: bool = False) -> AsyncIterator[Cluster]:
    """Three primaries, and with *replicas* one of each; ready after about 2 s."""
    options = (
        *("--cluster-enabled", "yes", "--cluster-node-timeout", str(int(NODE_TIMEOUT_S * 1000))),
        *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
    )
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(lock_server(*options))
            for _ in range(6 if replicas else 3)
        ]
        ids = [await ask(node, "CLUSTER", "MYID") for node in nodes]
        made = Cluster(nodes, ids)
        for number, node in enumerate(nodes):
            await ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                first, last = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
                await ask(node, "CLUSTER", "ADDSLOTS", *range(first, last + 1))
        for node in nodes[1:]:
            await ask(node, "CLUSTER", "MEET", HOST, nodes[0].port)
        for number, node in enumerate(nodes[3:]):
            await well(functools.partial(_ignorance, node, ids[number]))
            await ask(node, "CLUSTER", "REPLICATE", ids[number])
        await made.healed()
        yield made


async def _ignorance(node: LockServer, other_id: str) -> str:
    """What *node* knows, unless it has met the other."""
    known = dict(_lines(await ask(node, "CLUSTER", "NODES")))
    return str(known) if "handshake" in known.get(other_id, "handshake") else ""


def _lines(nodes: str) -> list[tuple[str, str]]:
    """The id and the flags of each node, out of ``CLUSTER NODES``."""
    return [(words[0], words[2]) for words in map(str.split, nodes.splitlines())]


# Sentinels.


class _SentinelServer(LockServer):
    """One Sentinel: a server that insists on a file of its own to write to."""

    def __init__(self, master_port: int) -> None:
        super().__init__()
        self._config = (
            f"sentinel monitor {SERVICE} {HOST} {master_port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {int(DOWN_AFTER_S * 1000)}\n"
            f"sentinel failover-timeout {SERVICE} 1500\n"
        )

    def _fork(self, port: int) -> None:
        if self._dir is None:
            super()._fork(port)  # For what it prepares beside the process.
            self.kill()
        assert self._dir is not None
        file = self._dir / "sentinel.conf"
        file.write_text(f"port {port}\nbind {HOST}\ndir {self._dir}\n{self._config}")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [testing._binary(), str(file), "--sentinel"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=testing._death_pact(),  # noqa: PLW1509 - as in aiodlock.testing
            )


class Watched:
    """A master with its replica, watched by three Sentinels; the two may change places."""

    def __init__(self, servers: list[LockServer], sentinels: list[LockServer]) -> None:
        self.servers = servers
        self.sentinels = sentinels

    @asynccontextmanager
    async def client(self, service: str = SERVICE, **options: Any) -> AsyncIterator[Redis]:
        """A client of redis-py on whoever is master, as an application makes it."""
        addresses = [(HOST, sentinel.port) for sentinel in self.sentinels]
        manager = Sentinel(addresses)  # type: ignore[no-untyped-call]
        async with AsyncExitStack() as stack:
            for sentinel in manager.sentinels:
                stack.push_async_callback(sentinel.aclose)
            yield await stack.enter_async_context(manager.master_for(service, **options))

    async def master(self) -> LockServer:
        """Who is master in the eyes of the first Sentinel."""
        _, port = await ask(self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    async def replica(self) -> LockServer:
        """The other one."""
        master = await self.master()
        return next(server for server in self.servers if server is not master)

    async def fail_over(self) -> None:
        """Have the Sentinels swap the two, both well; returns at once."""
        await ask(self.sentinels[0], "SENTINEL", "FAILOVER", SERVICE)

    async def moved_from(self, server: LockServer) -> None:
        """Wait until every Sentinel names another master."""

        async def trouble() -> str:
            for sentinel in self.sentinels:
                address = await ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                if int(address[1]) == server.port:
                    return f"{sentinel}: {server} is master"
            return ""

        await well(trouble)

    async def heal(self) -> None:
        """Both are up, the master of the Sentinels is one and the other follows it; empty."""
        for server in self.servers:
            if server.process.poll() is None:
                server.resume()
            else:
                server.restart()
        master, replica = await self.master(), await self.replica()
        # The Sentinels would do this too, after ten seconds.
        await ask(master, "REPLICAOF", "NO", "ONE")
        await ask(replica, "REPLICAOF", HOST, master.port)
        await well(self.trouble)
        await ask(master, "FLUSHALL")

    async def trouble(self) -> str:
        """What keeps everybody from seeing one master, with one replica that follows it."""
        try:
            return await self._trouble()
        except (RedisError, OSError) as error:
            return str(error)  # It changes sides at this moment.

    async def _trouble(self) -> str:
        master = await self.master()
        for sentinel in self.sentinels:
            seen = await ask(sentinel, "SENTINEL", "MASTER", SERVICE)
            known = (seen["port"], seen["num-slaves"], seen["num-other-sentinels"], seen["flags"])
            if known != (str(master.port), "1", "2", "master"):
                return f"{sentinel}: {known}"
            replicas = await ask(sentinel, "SENTINEL", "REPLICAS", SERVICE)
            if [one["flags"] for one in replicas] != ["slave"]:
                return f"{sentinel}: {replicas}"
        status = (await info(await self.replica(), "replication")).get("master_link_status")
        return "" if status == "up" else f"the replica's link to its master is {status}"


@asynccontextmanager
async def watched() -> AsyncIterator[Watched]:
    """A master, a replica and three Sentinels; ready after about 2 s."""
    options = ("--repl-diskless-sync-delay", "0")
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(lock_server(*options))
        replica = await stack.enter_async_context(
            lock_server(*options, "--replicaof", f"{HOST} {master.port}")
        )
        sentinels = [
            await stack.enter_async_context(_SentinelServer(master.port)) for _ in range(3)
        ]
        made = Watched([master, replica], list(sentinels))
        await well(made.trouble)
        yield made


# TLS.


@dataclass(frozen=True)
class Tls:
    """What terminates TLS before a server; `ca_file` signed it, `wrong_ca_file` did not."""

    port: int
    ca_file: Path
    wrong_ca_file: Path

    def url(self, ca_file: Path) -> str:
        """What a client that checks certificates is given."""
        return f"rediss://{HOST}:{self.port}?ssl_ca_certs={ca_file}&ssl_check_hostname=true"


@asynccontextmanager
async def tls(server_port: int) -> AsyncIterator[Tls]:
    """TLS before *server_port*: the servers in wheels are built without it."""
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(context)
    ends: set[asyncio.Task[Any]] = set()

    async def accept(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ends.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            server, to_server = await asyncio.open_connection(HOST, server_port)
            await _joined((client, to_server), (server, to_client))
        to_client.close()
        ends.discard(task)

    with tempfile.TemporaryDirectory(prefix="aiodlock-") as folder:
        files = Path(folder, "ca.pem"), Path(folder, "wrong.pem")
        authority.cert_pem.write_to_path(str(files[0]))
        stranger.cert_pem.write_to_path(str(files[1]))
        listener = await asyncio.start_server(accept, HOST, 0, ssl=context)
        try:
            yield Tls(int(listener.sockets[0].getsockname()[1]), *files)
        finally:
            listener.close()
            for task in ends:
                task.cancel()
            if ends:
                await asyncio.wait(ends)
            await listener.wait_closed()


async def _joined(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Carry bytes both ways until one of the ends is over."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    tasks = [asyncio.create_task(carry(*way)) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for _, writer in ways:
            writer.close()


# A Unix socket, and users.


@asynccontextmanager
async def unix_socket() -> AsyncIterator[tuple[LockServer, str]]:
    """A server that also listens on a socket in the file system, with its URL."""
    with tempfile.TemporaryDirectory(prefix="aiodlock-") as folder:
        path = f"{folder}/s"
        async with lock_server("--unixsocket", path) as server:
            yield server, f"unix://{path}"


@dataclass(frozen=True)
class User:
    """Somebody whom a server knows, and what that one may do there."""

    name: str
    password: str

    def url(self, server: LockServer) -> str:
        """How that one logs in."""
        return f"redis://{self.name}:{self.password}@{HOST}:{server.port}"


@asynccontextmanager
async def user(server: LockServer, *rules: str) -> AsyncIterator[User]:
    """Somebody new who may do what *rules* of the ACL say, and nothing else."""
    somebody = User(f"u{secrets.token_hex(4)}", secrets.token_hex(8))
    with acl_errors_tell(somebody, rules):
        await ask(
            *(server, "ACL", "SETUSER", somebody.name, "reset", "on", "resetchannels"),
            *(f">{somebody.password}", *rules),
        )
    try:
        yield somebody
    finally:
        await ask(server, "ACL", "DELUSER", somebody.name)


@contextlib.contextmanager
def acl_errors_tell(somebody: User, rules: tuple[str, ...]) -> Iterator[None]:
    """A rule that the server does not know is a mistake in the test: say which rules they were."""
    try:
        yield
    except RedisError as error:
        error.add_note(f"the rules of {somebody.name}: {rules}")
        raise
