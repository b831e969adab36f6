"""The greeting of a client at a tensor server, without any I/O.

The thread of the listener receives the greetings of plain connections. So a client without a proof
costs no thread.
"""

import hmac
import struct

from runtime import concurrency
from runtime.errors import DataLossError, InvalidArgumentError, UnauthenticatedError
from runtime.trust.security import proof_of
from runtime.wire import frames

# The fields of a hello that a proof covers: incarnation of the server, client, lane and attempt.
_ABOUT = struct.Struct("<QQQI")
# The most bytes of each kind of frame. A stranger must not choose how much memory the server takes.
_MOST = {frames.HELLO: frames.HELLO_BYTES, frames.PROOF: frames.PROOF_BYTES}


class ClientGreeting:
    """The greeting of one connection: the frames of the client before the welcome.

    Args:
        task: Task of the server.
        key: Token that the client must have; None lets every client in.
        incarnation: Incarnation of the server.
        of_other_user: True for a process of another user. The server refuses such a client after
            the hello.

    Attributes:
        wanted: Number of bytes to receive next; 0 when the greeting is complete and the client is
            welcome.
    """

    def __init__(
        self, task: str, key: bytes | None, incarnation: int, *, of_other_user: bool = False
    ) -> None:
        self.wanted = frames.HEADER_BYTES
        self._task = task
        self._key = key
        self._incarnation = incarnation
        self._of_other_user = of_other_user
        self._kind = frames.HELLO
        self._in_payload = False
        self._said = bytearray()
        self._nonce = b""
        self._hello: frames.LaneHello | None = None

    @property
    def hello(self) -> frames.LaneHello:
        """The hello of the client. Present once ``wanted`` is 0."""
        assert self._hello is not None
        return self._hello

    def hear(self, data: bytes | memoryview) -> bytes:
        """Takes received bytes and returns the answer to send, often empty.

        Args:
            data: Received bytes, ``wanted`` at most.

        Raises:
            UnauthenticatedError: The client does not have the token, or belongs to another user.
            InvalidArgumentError: The id of the client is 0.
            DataLossError: The bytes are no greeting.
        """
        assert len(data) <= self.wanted
        self._said += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        said, self._said = bytes(self._said), bytearray()
        if not self._in_payload:
            fields = frames.unpack_header(said)
            frames.check_header(fields, _MOST[self._kind])
            if fields[1] != self._kind:
                raise DataLossError(
                    f"a frame before the welcome has kind {fields[1]}, expected {self._kind}"
                )
            self._in_payload, self.wanted = True, fields[6]
            return b"" if self.wanted else self._heard(b"")
        return self._heard(said)

    def _heard(self, payload: bytes) -> bytes:
        """Takes the payload of a whole frame and returns the answer to send."""
        if self._kind == frames.PROOF:
            if not hmac.compare_digest(payload, self._proof(b"client")):
                raise UnauthenticatedError("it has not shown that it has the token")
            return b""
        self._hello = frames.decode_hello(payload)
        # To close with the hello unread would reset the connection, and the client would not see
        # the reason.
        if self._of_other_user:
            raise UnauthenticatedError("it is a process of another user")
        if not self._hello.client:
            raise InvalidArgumentError("a client's id is not 0: that stands for nobody")
        if self._key is None:
            return b""
        self._kind, self._in_payload, self.wanted = frames.PROOF, False, frames.HEADER_BYTES
        # The server proves first that it has the token, so a stranger in its place receives no
        # proof of the client.
        self._nonce = concurrency.random_bytes(frames.NONCE_BYTES)
        challenge = self._nonce + self._proof(b"server")
        head = frames.pack_header(
            frames.MAGIC, frames.CHALLENGE, 0, 0, 0, self._incarnation, len(challenge)
        )
        return head + challenge

    def _proof(self, side: bytes) -> bytes:
        assert self._key is not None
        return tensor_proof(self._key, side, self._nonce, self.hello, self._task, self._incarnation)


def tensor_proof(
    key: bytes, side: bytes, nonce: bytes, hello: frames.LaneHello, task: str, incarnation: int
) -> bytes:
    """Returns the proof of a client or server for a tensor connection: 32 bytes, of no use on a second connection.

    Args:
        key: The token.
        side: b"client" or b"server". With equal proofs a stranger could return the server's proof
            to the server.
        nonce: Random bytes drawn by the server for the connection.
        hello: Hello of the client.
        task: Task dialled by the client, the server's own.
        incarnation: Incarnation of the server.
    """
    assert side in (b"client", b"server")
    about = _ABOUT.pack(incarnation, hello.client, hello.lane, hello.attempt)
    return proof_of(key, b"tensors", side, nonce, hello.nonce, about, task.encode())
