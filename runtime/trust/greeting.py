"""The greeting by which a client introduces itself to a tensor server. Does no I/O.

The thread of the listener receives the greetings of plain connections: a client without a proof costs no thread.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from runtime.errors import DataLossError, InvalidArgumentError, UnauthenticatedError
from runtime.trust.security import tensor_proof
from runtime.wire import frames

_MOST: Final = {frames.HELLO: frames.HELLO_BYTES, frames.PROOF: frames.PROOF_BYTES}


class Greeting:
    """The bytes that a client has sent before the welcome.

    Args:
        task: the task of the server.
        key: the token that the client must have; None lets everybody in.
        incarnation: of the server.
        of_other_user: it is known to be a process of another user, who is told after the hello that it is not welcome.

    Attributes:
        wanted: number of bytes to receive next; 0 when the greeting is complete and the client is welcome.
    """

    def __init__(self, task: str, key: bytes | None, incarnation: int, *, of_other_user: bool = False) -> None:
        self.wanted = frames.HEADER_BYTES
        self._task = task
        self._key = key
        self._incarnation = incarnation
        self._of_other_user = of_other_user
        self._kind = frames.HELLO
        self._in_payload = False
        self._said = bytearray()
        self._nonce = b""
        self._hello: frames.Hello | None = None

    @property
    def hello(self) -> frames.Hello:
        """The hello of the client; set when ``wanted`` is 0."""
        assert self._hello is not None
        return self._hello

    def hear(self, data: bytes | memoryview) -> bytes:
        """Takes received bytes, ``wanted`` at most, and returns the answer to send.

        Raises:
            UnauthenticatedError: The client does not have the token, or belongs to another user.
            InvalidArgumentError: The id of the client is 0.
            DataLossError: The bytes are no greeting.
        """
        self._said += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        said, self._said = bytes(self._said), bytearray()
        if not self._in_payload:
            fields = frames.unpack_header(said)
            frames.check_header(fields, _MOST[self._kind])
            if fields[1] != self._kind:
                raise DataLossError(f"a frame before the welcome has kind {fields[1]}, expected {self._kind}")
            self._in_payload, self.wanted = True, fields[6]
            return b"" if self.wanted else self._heard(b"")
        return self._heard(said)

    def _heard(self, payload: bytes) -> bytes:
        """Takes a whole frame."""
        if self._kind == frames.PROOF:
            if not hmac.compare_digest(payload, self._proof(b"client")):
                raise UnauthenticatedError("it has not shown that it has the token")
            return b""
        self._hello = frames.decode_hello(payload)
        if self._of_other_user:
            raise UnauthenticatedError("it is a process of another user")
        if not self._hello.client:
            raise InvalidArgumentError("a client's id is not 0: that stands for nobody")
        if self._key is None:
            return b""
        self._kind, self._in_payload, self.wanted = frames.PROOF, False, frames.HEADER_BYTES
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        challenge = self._nonce + self._proof(b"server")
        head = frames.pack_header(frames.MAGIC, frames.CHALLENGE, 0, 0, 0, self._incarnation, len(challenge))
        return head + challenge

    def _proof(self, side: bytes) -> bytes:
        assert self._key is not None
        return tensor_proof(self._key, side, self._nonce, self.hello, self._task, self._incarnation)
