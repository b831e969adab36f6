"""The network between the tasks of a test cluster, in which any pair of tasks can be cut.

Each task has a proxy. The proxies speak HTTP CONNECT, which the runtime uses for both planes when
BELLWETHER_PROXY names a proxy. So the addresses of the cluster stay as they are, and the proxy
knows both ends of each connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from runtime import concurrency

_PIECE_BYTES = 1 << 18
_HEAD_BYTES = 4096
_CLOSE_SECS = 10.0


@dataclass
class _TaskLink:
    """The connections between two tasks, in both directions."""

    healed: asyncio.Event = field(default_factory=asyncio.Event)
    reset: bool = False
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.healed.set()


class Links:
    """The proxies of all tasks, in one thread.

        links = Links(["worker:0", "ps:0"], lambda port: "ps:0")
        links.cut("worker:0", "ps:0", reset=True)

    Args:
        tasks: Names of the tasks.
        owner: Function that returns the task that listens on a port, "" for none of them.
    """

    def __init__(self, tasks: list[str], owner: Callable[[int], str]) -> None:
        self._owner = owner
        self._links: dict[frozenset[str], _TaskLink] = {}
        self._servers: list[asyncio.Server] = []
        self._relays: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self.ports: dict[str, int] = {}
        """Port of the proxy of each task, on 127.0.0.1."""
        self._threads = concurrency.ThreadGroup("links")
        self._threads.start(self._loop.run_forever, name="links")
        self._run_in_loop(self._listen_for_tasks(tasks))

    def cut(self, one: str, other: str, reset: bool = False) -> None:
        """Cuts the link between two tasks, both ways, until ``heal``.

        Nothing gets through, as when packets are lost. What was sent arrives when the link heals.

        Args:
            one: Name of a task.
            other: Name of the other task.
            reset: True resets connections instead, and new ones, too.
        """
        self._run_in_loop(self._cut_link(one, other, reset))

    def heal(self, one: str, other: str) -> None:
        """Ends a cut. Does nothing when there is none."""
        self._run_in_loop(self._heal_link(one, other))

    def close(self) -> None:
        """Closes everything and ends the thread."""
        self._run_in_loop(self._shut_proxies(), _CLOSE_SECS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads.close()
        self._loop.close()

    def _run_in_loop(self, work: Coroutine[None, None, None], secs: float | None = None) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(secs)

    # -- in the loop's thread ----------------------------------------------------------------------

    async def _listen_for_tasks(self, tasks: list[str]) -> None:
        for task in tasks:
            server = await asyncio.start_server(
                lambda reader, writer, task=task: self._accept_connection(task, reader, writer),  # type: ignore[misc]
                "127.0.0.1",
                0,
                limit=_PIECE_BYTES,
            )
            self._servers.append(server)
            self.ports[task] = server.sockets[0].getsockname()[1]

    def _link_between(self, one: str, other: str) -> _TaskLink:
        return self._links.setdefault(frozenset((one, other)), _TaskLink())

    async def _cut_link(self, one: str, other: str, reset: bool) -> None:
        link = self._link_between(one, other)
        link.reset = reset
        link.healed.clear()
        # Open connections are reset here, and new ones by `_tunnel_connection`.
        if reset:
            for writer in link.writers:
                _reset_connection(writer)

    async def _heal_link(self, one: str, other: str) -> None:
        link = self._link_between(one, other)
        link.reset = False
        link.healed.set()

    async def _accept_connection(
        self, task: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._relays.add(current)
        try:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                await self._tunnel_connection(task, reader, writer)
        finally:
            writer.close()
            self._relays.discard(current)

    async def _tunnel_connection(
        self, task: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host, _, port = head.split()[1].decode().rpartition(":")
        # In another thread: the search reads all sockets of all tasks.
        peer = await self._loop.run_in_executor(None, self._owner, int(port))
        assert self._loop is asyncio.get_running_loop(), "links belong to the thread of the loop"
        link = self._link_between(task, peer or f"{host}:{port}")
        if link.reset:
            _reset_connection(writer)
            return
        link.writers.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            await link.healed.wait()
            try:
                back, there = await asyncio.open_connection(
                    host.strip("[]"), int(port), limit=_PIECE_BYTES
                )
            except OSError:
                writer.write(b"HTTP/1.1 502 Nobody listens there\r\n\r\n")
                return
            link.writers.add(there)
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            await asyncio.gather(
                _relay_bytes(link, reader, there), _relay_bytes(link, back, writer)
            )
        finally:
            link.writers.discard(writer)
            if there is not None:
                link.writers.discard(there)
                there.close()

    async def _shut_proxies(self) -> None:
        for server in self._servers:
            server.close()
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await self._loop.shutdown_default_executor()


async def _relay_bytes(
    link: _TaskLink, source: asyncio.StreamReader, sink: asyncio.StreamWriter
) -> None:
    try:
        while data := await source.read(_PIECE_BYTES):
            await link.healed.wait()
            sink.write(data)
            await sink.drain()
    # The end of a stream is a packet, too, which a cut holds back.
    finally:
        await link.healed.wait()
        with contextlib.suppress(OSError, RuntimeError):
            sink.close()


def _reset_connection(writer: asyncio.StreamWriter) -> None:
    """Resets a connection. What was under way is lost."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
