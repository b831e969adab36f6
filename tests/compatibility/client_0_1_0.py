"""A client as version 0.1.0 has it, wire version 3, in one file that imports nothing of ours: it must never be changed.

python client_0_1_0.py HOST:PORT TASK TOKEN [WIRE]

says hello to a ps on both planes, takes part in its run, initialises two variables, trains two
steps, reads them, leaves, and prints what it has seen as JSON. What is refused is printed as
{"refused": [code, text]}. WIRE is what it says of itself instead of "3 0.1.0".
"""

import hashlib
import hmac
import json
import pathlib
import secrets
import socket
import struct
import sys
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

HERE = pathlib.Path(__file__).parent / "0.1.0"
# magic and wire version, kind, flags, handle, seq, step, payload length
HEADER = struct.Struct("<HBBIQQQ")
MAGIC = 0xB703
HELLO, WELCOME, CALL, REPLY, ERROR, PING, PONG, GOODBYE, CHALLENGE, PROOF = range(1, 11)


def messages() -> dict[str, Any]:
    """The message classes of 0.1.0, by name."""
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString((HERE / "messages.binpb").read_bytes())
    for file in files.file:
        pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name for file in files.file], pool)


MESSAGES = messages()


def message(name: str, **fields: Any) -> Any:
    """A message."""
    return MESSAGES[f"bellwether.{name}"](**fields)


def proof(key: bytes, *parts: bytes) -> bytes:
    """An HMAC over parts of any length."""
    text = b"".join(struct.pack("<I", len(part)) + part for part in (b"bellwether", *parts))
    return hmac.digest(key, text, hashlib.sha256)


class Control:
    """The control plane."""

    def __init__(self, address: str, key: bytes, wire: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._port = address.rpartition(":")[2]
        self._key = key
        self._wire = wire
        self._proof = "."

    def call(self, method: str, request: Any, reply: str) -> Any:
        """Makes a call; the first one is refused, with what the proof is to be about."""
        stub = self._channel.unary_unary(
            f"/bellwether.WorkerService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=MESSAGES[f"bellwether.{reply}"].FromString,
        )
        for _ in range(2):
            metadata = [("bellwether-wire", self._wire), ("bellwether-proof", self._proof)]
            try:
                return stub(request, timeout=60, metadata=metadata)
            except grpc.RpcError as error:
                told = {entry.key: entry.value for entry in error.trailing_metadata() or ()}
                nonce = told.get("bellwether-nonce")
                if nonce is None or self._proof != ".":
                    raise
                self._proof = f"{nonce}.{proof(self._key, b'calls', nonce.encode(), self._port.encode()).hex()}"
        raise AssertionError("refused twice")


class Tensors:
    """A lane of the tensor channel."""

    def __init__(self, host: str, port: int, key: bytes, task: str, client: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=60)
        self._seq = 0
        lane, attempt, nonce = 1, 1, secrets.token_bytes(16)
        self._send(HELLO, struct.pack("<QQI16s", client, lane, attempt, nonce))
        kind, incarnation, challenge = self._receive()
        assert kind == CHALLENGE and len(challenge) == 48, (kind, challenge)
        about = struct.pack("<QQQI", incarnation, client, lane, attempt)
        drawn, shown = challenge[:16], challenge[16:]
        assert shown == proof(key, b"tensors", b"server", drawn, nonce, about, task.encode()), (
            "the server's proof"
        )
        self._send(PROOF, proof(key, b"tensors", b"client", drawn, nonce, about, task.encode()))
        kind, self.incarnation, _ = self._receive()
        assert kind == WELCOME, kind

    def _send(self, kind: int, payload: bytes = b"", handle: int = 0, seq: int = 0) -> None:
        self._socket.sendall(HEADER.pack(MAGIC, kind, 0, handle, seq, 0, len(payload)) + payload)

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            assert part, "the server has closed the connection"
            found += part
        return found

    def _receive(self) -> tuple[int, int, bytes]:
        magic, kind, _, _, _, step, length = HEADER.unpack(self._read(HEADER.size))
        assert magic == MAGIC, hex(magic)
        payload = self._read(length)
        assert kind != ERROR, payload
        return kind, step, payload

    def call(self, handle: int, payload: bytes = b"") -> bytes:
        """Runs a stage."""
        self._seq += 1
        self._send(CALL, payload, handle, self._seq)
        kind, _, answer = self._receive()
        assert kind == REPLY, kind
        return answer

    def ping(self) -> bool:
        """Whether the server lives."""
        self._send(PING)
        return self._receive()[0] == PONG

    def close(self) -> None:
        """Says goodbye."""
        self._send(GOODBYE)
        self._socket.close()


def order(incarnation: int, **of: Any) -> Any:
    """An order to the run record."""
    return message(
        "RunOrder",
        incarnation=incarnation,
        sender="/job:worker/task:0",
        address="127.0.0.1:1",
        **of,
    )


def session(address: str, task: str, token: str, wire: str) -> dict[str, Any]:
    """A whole session; what was seen in it."""
    key, client = bytes.fromhex(token), secrets.randbits(63)
    control = Control(address, key, wire)
    seen: dict[str, Any] = {}
    status = control.call("Status", message("StatusRequest"), "StatusResponse")
    seen["task"] = status.task
    kind = MESSAGES["bellwether.RunOrder"]
    join = order(status.incarnation, join=kind.Join(session=client))
    seen["joined"] = list(control.call("Run", join, "RunReply").joined)
    handles = {}
    for name in ("init", "step", "read"):
        request = text_format.Parse(
            (HERE / f"{name}.txtpb").read_text(), message("RegisterRequest")
        )
        request.incarnation, request.session, request.generation = (
            status.incarnation,
            client,
            status.generation,
        )
        handles[name] = control.call("Register", request, "RegisterResponse").handle
    lane = Tensors(address.rpartition(":")[0], status.data_port, key, task, client)
    assert lane.incarnation == status.incarnation
    lane.call(handles["init"])
    for _ in range(2):
        lane.call(handles["step"], struct.pack("<3f", 1, 2, 3))
    answer = lane.call(handles["read"])
    seen["weights"], seen["count"] = (
        struct.unpack_from("<3f", answer),
        *struct.unpack_from("<i", answer, 64),
    )
    seen["pong"] = lane.ping()
    lane.close()
    metrics = control.call("Metrics", message("MetricsRequest", variables=True), "MetricsResponse")
    seen["variables"] = sorted(variable.name for variable in metrics.variables)
    done = order(status.incarnation, done=kind.Done(session=client, states={"data": b"7"}))
    seen["done"] = list(control.call("Run", done, "RunReply").done)
    return seen


if __name__ == "__main__":
    try:
        print(json.dumps(session(*sys.argv[1:4], sys.argv[4] if len(sys.argv) > 4 else "3 0.1.0")))
    except grpc.RpcError as error:
        print(json.dumps({"refused": [error.code().name, error.details()]}))
