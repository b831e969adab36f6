"""Frames of the tensor channel: a 32-byte header, and the payloads without tensors.

Header, little-endian: magic and version u16, kind u8, flags u8, handle u32, seq u64, step u64,
payload length u64.

    client                                  server
    HELLO   client, lane, nonce         ->
                                        <-  CHALLENGE  nonce, proof, step = incarnation
    PROOF   of the token                ->
                                        <-  WELCOME  step = incarnation, RESUMED if the lane is known
    CALL    handle, seq, step, tensors  ->
                                        <-  REPLY tensors, or ERROR code, task, message
    PING                                ->
                                        <-  PONG
    GOODBYE  forget the lane            ->  (no answer)
                                        <-  GOODBYE  the server leaves for good (no answer)

Only a server with a token sends CHALLENGE. REPLY and ERROR have the seq of their call. At most one
call is under way on a connection. So after a whole frame there is nothing more to read.
"""

import struct
from typing import NamedTuple

from runtime.errors import DataLossError, OpError, error_from_code, wire_code
from runtime.wire.versions import WIRE_VERSION

MAGIC = 0xB700 | WIRE_VERSION
"""A fixed high byte, and the wire version in the low byte."""

HELLO = 1
WELCOME = 2
CALL = 3
REPLY = 4
ERROR = 5
PING = 6
PONG = 7
GOODBYE = 8
CHALLENGE = 9
PROOF = 10

DYNAMIC = 1
"""Flag of CALL and REPLY: the payload describes itself."""
RESUMED = 2
"""Flag of WELCOME: the server still knows this lane."""
WHOLE_CLIENT = 4
"""Flag of GOODBYE: forget every lane of this client."""

HEADER = struct.Struct("<HBBIQQQ")
HEADER_BYTES = HEADER.size
pack_header = HEADER.pack
unpack_header = HEADER.unpack_from

LEAVES = pack_header(MAGIC, GOODBYE, 0, 0, 0, 0, 0)
"""The frame by which a server leaves for good, and a client ends a lane."""
CLIENT_LEAVES = pack_header(MAGIC, GOODBYE, WHOLE_CLIENT, 0, 0, 0, 0)
"""The frame by which a client ends all its lanes."""
MAX_CONTROL_BYTES = 64 << 10
"""Longest payload of a frame that is neither a call nor a reply."""
NONCE_BYTES = 16
PROOF_BYTES = 32
NO_PROOF = bytes(PROOF_BYTES)
"""The answer of a client without the token to a challenge."""

_HELLO = struct.Struct(f"<QQI{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
_ERROR = struct.Struct("<II")


class LaneHello(NamedTuple):
    """The first message of a client.

    Attributes:
        client: Random id of the client, u64.
        lane: Number of the lane within the client, u64.
        attempt: Count of the lane's connections, u32. A late connection has a lower count than the
            newest.
        nonce: 16 random bytes.
    """

    client: int
    lane: int
    attempt: int
    nonce: bytes


def encode_hello(hello: LaneHello) -> bytes:
    """Returns the payload of a HELLO."""
    return _HELLO.pack(*hello)


def decode_hello(payload: bytes) -> LaneHello:
    """Reads the payload of a HELLO.

    Raises:
        DataLossError: The payload has another length.
    """
    if len(payload) != HELLO_BYTES:
        raise DataLossError(f"a hello has {HELLO_BYTES} bytes, and not {len(payload)}")
    return LaneHello(*_HELLO.unpack(payload))


def pack_error(seq: int, error: OpError) -> bytes:
    """Returns an ERROR frame. Cuts a text that is too long.

    Examples:
        >>> frame = pack_error(7, DataLossError("a frame is damaged", task="/job:ps/task:0"))
        >>> decode_error(frame[HEADER_BYTES:], "/job:ps/task:1").task
        '/job:ps/task:0'
    """
    task = error.task.encode(errors="replace")[:1024]
    message = error.message.encode(errors="replace")[: MAX_CONTROL_BYTES - 2048]
    payload = _ERROR.pack(wire_code(error), len(task)) + task + message
    return pack_header(MAGIC, ERROR, 0, 0, seq, 0, len(payload)) + payload


def decode_error(payload: bytes, task: str) -> OpError:
    """Returns the error in the payload of an ERROR frame.

    Args:
        payload: Payload of a frame of `pack_error`.
        task: Name of the peer, for an error without a task.

    Raises:
        DataLossError: The payload is damaged.
    """
    if len(payload) < _ERROR.size:
        raise DataLossError(f"an error frame of {len(payload)} bytes is too short", task=task)
    code, length = _ERROR.unpack_from(payload)
    end = _ERROR.size + length
    if code == 0 or end > len(payload):
        raise DataLossError("an error frame is damaged", task=task)
    named = payload[_ERROR.size : end].decode(errors="replace")
    return error_from_code(code, payload[end:].decode(errors="replace"), named or task)


def too_long(length: int) -> str:
    """Returns the error text for a self-describing payload over the limit.

    Only calls with self-describing tensors need a limit. The length of a call with a fixed layout
    is checked exactly, and the client asked for the reply.
    """
    return f"{length} bytes of tensors that describe themselves in one call (send them in several steps)"


def check_header(fields: tuple[int, int, int, int, int, int, int], limit: int) -> None:
    """Checks a header before any memory is allocated for its payload.

    Args:
        fields: Fields returned by `unpack_header`.
        limit: Longest payload allowed here, in bytes.

    Raises:
        DataLossError: The magic, the version or the kind is unknown, or the payload is longer than
            `limit`.
    """
    magic, kind, _, _, _, _, length = fields
    if magic != MAGIC:
        # A peer of another wire version deserves an error with both versions.
        if magic >> 8 == MAGIC >> 8:
            ours, theirs = MAGIC & 0xFF, magic & 0xFF
            raise DataLossError(
                f"the peer speaks wire version {theirs}, and this process {ours}: install one "
                "version of Bellwether on "
                "all tasks of the cluster"
            )
        raise DataLossError(
            "what arrived is not a frame of the tensor channel (is one side TLS and the other not?)"
        )
    if not HELLO <= kind <= PROOF:
        raise DataLossError(f"a frame has the unknown kind {kind}")
    if length > limit:
        raise DataLossError(f"a frame announces a payload of {length} bytes, the limit is {limit}")
