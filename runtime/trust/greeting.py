"""How a client introduces itself to a server of the tensor channel, as far as it has come. Does no I/O.

The listener hears the greetings of plain connections itself: who has not shown who it is costs no thread.
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
    """What a client has said before the welcome.

    Args:
        task: whose server it is.
        key: the token that the client must have; None lets everybody in.
        incarnation: of the server.
        of_other_user: it is known to be a process of another user, who is told after the hello that it is not welcome.

    Attributes:
        wanted: how many bytes are to be heard next; 0 when the greeting is over, and the client welcome.
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
        """What the client has said that it is; there when nothing more is wanted."""
        assert self._hello is not None
        return self._hello

    def hear(self, data: bytes | memoryview) -> bytes:
        """Takes what the client has said, ``wanted`` bytes at most; gives what it is to be told.

        Raises:
            UnauthenticatedError: it has not the token, or is another user's.
            InvalidArgumentError: it says that it is nobody.
            DataLossError: what it says is no greeting.
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
