"""Parts that the tests of the transport share: a handler, a server process, and a proxy that cuts connections."""

import contextlib
import os
import random
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from runtime.cluster.endpoint import Endpoint
from runtime.errors import CancelledError, FailedPreconditionError, NotFoundError, UnavailableError
from runtime.tensor_spec import TensorSpec
from runtime.trust.security import FindToken
from runtime.trust.token_files import Token
from runtime.wire import frames
from runtime.wire.channel import Lane
from runtime.wire.codec import TensorLayout
from runtime.wire.connection import Reply, ServerContext, current_lane
from runtime.wire.greeting import tensor_proof
from runtime.wire.listener import TensorServer
from runtime.wire.peer import Peer
from runtime.wire.reply_cache import LaneTable
from tests.kit.processes import Task
from tests.kit.waits import until

TASK = "/job:ps/task:0"
SECRET = b"secret"
CLIENT = 0xC0FFEE

ADD, SUM, ECHO, BLOCK, FAIL, BUG, LANE, ECHO_FIXED, WRONG, STRIDED, NOTHING, SLOW_ADD = range(1, 13)

NUMBER = TensorLayout([TensorSpec((), np.dtype(np.int64))])
PADDED_NUMBER = TensorLayout(
    [TensorSpec((), np.dtype(np.int64)), TensorSpec((4096,), np.dtype(np.uint8))]
)
EMPTY = TensorLayout([])
MIXED = TensorLayout(
    [
        TensorSpec((3,), "bfloat16"),  # type: ignore[arg-type]
        TensorSpec((), np.dtype(bool)),
        TensorSpec((0, 5), np.dtype(np.float32)),
        TensorSpec((2, 3), np.dtype(np.int64)),
        TensorSpec((1000,), np.dtype(np.float32)),
    ]
)
INPUTS: dict[int, TensorLayout | None] = {
    ADD: PADDED_NUMBER,
    SUM: EMPTY,
    ECHO: None,
    BLOCK: EMPTY,
    FAIL: EMPTY,
    BUG: EMPTY,
    LANE: EMPTY,
    ECHO_FIXED: MIXED,
    WRONG: EMPTY,
    STRIDED: EMPTY,
    NOTHING: EMPTY,
    SLOW_ADD: PADDED_NUMBER,
}


def number(value: int) -> Any:
    return np.array(value, np.int64)


def addend(value: int) -> list[Any]:
    return [number(value), np.zeros(4096, np.uint8)]


class Desk:
    """A handler with one of everything."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0
        self.runs = 0
        self.blocked = threading.Semaphore(0)
        self.release = threading.Event()
        self.hung_up: list[tuple[int, int]] = []
        self.seen: Callable[[list[Any]], None] = lambda inputs: None
        self.reply: Callable[[], Reply] | None = None

    def input_layout(self, handle: int) -> TensorLayout | None:
        if handle not in INPUTS:
            raise NotFoundError(f"no stage has the handle {handle}")
        return INPUTS[handle]

    def call(self, handle: int, client: int, step: int, inputs: list[Any]) -> Reply:
        self.seen(inputs)
        if self.reply is not None:
            return self.reply()
        if handle in (ADD, SLOW_ADD):
            if handle == SLOW_ADD:
                self.blocked.release()
                self.release.wait(100)
            with self.lock:
                self.runs += 1
                self.total += int(inputs[0])
                return Reply([number(self.total)], remember=True)
        if handle == BLOCK:
            self.blocked.release()
            if not self.release.wait(100):
                raise CancelledError("nobody released it")
            return Reply([number(1)])
        replies: dict[int, Callable[[], Reply]] = {
            SUM: lambda: Reply([number(self.total)]),
            ECHO: lambda: Reply([np.array(a) for a in inputs], dynamic=True),
            LANE: lambda: Reply([number(current_lane())]),
            ECHO_FIXED: lambda: Reply([np.array(a) for a in inputs]),
            WRONG: lambda: Reply([np.zeros(3, np.uint8)]),
            STRIDED: lambda: Reply([np.arange(20, dtype=np.int64).reshape(4, 5)[:, 1]]),
            NOTHING: lambda: Reply([]),
        }
        if handle == FAIL:
            raise FailedPreconditionError(f"variable w is not initialised (step {step})")
        if handle == BUG:
            raise ZeroDivisionError("oops")
        return replies[handle]()

    def permit(self, handle: int, client: int) -> None:
        """Lets every client call every handle."""

    def gone(self, client: int, goodbye: bool) -> None:
        """Keeps nothing of clients."""

    def disconnected(self, client: int, lane: int) -> None:
        self.hung_up.append((client, lane))
        self.release.set()


def make_server(desk: Desk | None = None, **options: Any) -> tuple[TensorServer, Desk]:
    desk = desk or Desk()
    shared = {
        name: options.pop(name) for name in ("incarnation", "limits", "tls") if name in options
    }
    lanes = LaneTable[Reply](shared.get("limits"))
    context = ServerContext(
        handler=desk, lanes=lanes, **{"task": TASK, "key": SECRET, "incarnation": 77, **shared}
    )
    server = TensorServer(context, hosts=["127.0.0.1"], **options)
    server.start()
    return server, desk


def is_unix(lane: Lane) -> bool:
    """Returns True if a lane goes by a Unix socket."""
    return lane.link.sock is not None and lane.link.sock.family == socket.AF_UNIX


def is_tls(lane: Lane) -> bool:
    """Returns True if a lane goes by TLS."""
    return isinstance(lane.link.sock, ssl.SSLSocket)


def until_heart_beats(server: TensorServer) -> None:
    """Waits for two signs of life of the only client, the later one by its heartbeat."""
    heard = until(lambda: server.lanes.heard_at(CLIENT))
    until(lambda: (server.lanes.heard_at(CLIENT) or 0.0) > heard)


class ServerProcess(Task):
    """A server in a process of its own, with the handler above."""

    def __init__(self) -> None:
        super().__init__(serve)
        self.endpoint = Endpoint(**self.hear("SERVING")[1])

    def resolve(self, timeout: float) -> Endpoint:
        if self.code is not None:
            raise UnavailableError("connection refused", task=TASK)
        return self.endpoint

    def close(self) -> None:
        if self.code is None:
            self.thaw()
            self.tell("end")
            self.wait()
        super().close()
        assert self.endpoint.unix_path is not None
        # it stays after kill -9
        shutil.rmtree(os.path.dirname(self.endpoint.unix_path), ignore_errors=True)


class CuttingProxy:
    """Forwards TCP connections, and closes each after a random number of bytes in one of the directions."""

    def __init__(self, port: int, seed: int, most_bytes: int) -> None:
        self.cuts = 0
        self.most_bytes: int | None = most_bytes
        self._random = random.Random(seed)
        self._target = port
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def close(self) -> None:
        self._shut(self._listener)
        # from now on nobody accepts: a client that connects again at once is not left open
        self._threads[0].join(10)
        for sock in self._sockets:
            self._shut(sock)
        for thread in self._threads:
            thread.join(100)
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _shut(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            budget = [self._random.randrange(self.most_bytes) if self.most_bytes else 1 << 60]
            self._start(self._pump, near, far, budget)
            self._start(self._pump, far, near, budget)

    def _pump(self, source: socket.socket, sink: socket.socket, budget: list[int]) -> None:
        with contextlib.suppress(OSError):  # the other direction has shut both
            while data := source.recv(1500):
                with self._lock:
                    part = data[: max(budget[0], 0)]
                    budget[0] -= len(data)
                sink.sendall(part)
                if len(part) < len(data):
                    self.cuts += 1
                    break
        self._shut(source)
        self._shut(sink)


def make_peer(resolve: Callable[[float], Endpoint], **options: Any) -> Peer:
    return Peer(TASK, resolve, CLIENT, finds(options.pop("key", SECRET)), **options)


def finds(key: bytes | None) -> FindToken:
    """A way to find a token that always finds this one, or none."""
    return lambda timeout: None if key is None else Token(key, "a test")


def say_hello(
    file: Any, client: int, key: bytes, task: str = TASK, *, lane: int = 1, attempt: int = 1
) -> tuple[int, bytes]:
    """Says hello to a server as a client with the token; gives kind and payload of the answer.

    Args:
        file: the connection, as ``makefile("rwb")`` gives it.
        client: id of the client.
        key: the token.
        task: that is meant.
        lane: number of the lane.
        attempt: number of the connection of that lane.
    """
    hello = frames.LaneHello(client, lane, attempt, bytes(frames.NONCE_BYTES))
    send(file, frames.HELLO, frames.encode_hello(hello))
    kind, incarnation, payload = read(file)
    if kind != frames.CHALLENGE:
        return kind, payload
    nonce = payload[: frames.NONCE_BYTES]
    send(file, frames.PROOF, tensor_proof(key, b"client", nonce, hello, task, incarnation))
    kind, _, payload = read(file)
    return kind, payload


def send(file: Any, kind: int, payload: bytes) -> None:
    """Sends a frame."""
    file.write(frames.pack_header(frames.MAGIC, kind, 0, 0, 0, 0, len(payload)) + payload)
    file.flush()


def read(file: Any) -> tuple[int, int, bytes]:
    """Kind, incarnation and payload of the next frame; (0, 0, b"") at the end."""
    head = file.read(frames.HEADER_BYTES)
    if not head:
        return 0, 0, b""
    fields = frames.unpack_header(head)
    return fields[1], fields[5], file.read(fields[6])


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left, right, strict=True)
    )


def in_thread(call: Callable[[], Any]) -> "Future[Any]":
    """What a call gives or raises that runs on a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def serve(pipe: Any) -> None:
    """What a ``ServerProcess`` runs, until the test says that this is the end."""
    server, desk = make_server(incarnation=int.from_bytes(os.urandom(8), "little"))
    endpoint = server.endpoint("127.0.0.1")
    pipe.send(("SERVING", {name: getattr(endpoint, name) for name in Endpoint.__slots__}))
    pipe.recv()
    desk.release.set()
    server.stop()
