"""How processes show each other that they belong to one cluster: a token that all of them can read.

Nobody sends the token. The side that is to be convinced sends random bytes, and the other answers with their HMAC. So
whoever listens at a port in a task's place learns nothing that any task would take.

A task that only its own host reaches has a token without being told: it draws one and leaves it in a file for the other
processes of its user (`runtime.transport.token_files`). Elsewhere it has one if it is given one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from absl import logging

from runtime.cluster.spec import split_address
from runtime.errors import InvalidArgumentError
from runtime.transport import addresses, token_files
from runtime.transport.frames import Hello
from runtime.transport.token_files import Token, TokenFile

VARIABLE: Final = "BELLWETHER_SECURITY"
"""Environment variable: path of the file with the token, for tasks and their clients."""
FindToken = Callable[[float], Token | None]
"""Finds the token of one task, given the seconds that it may take; None when this process has none."""
_LOOK_UP_SECS: Final = 2.0
_TELL_AGAIN_SECS: Final = 60.0
_MOST_PEERS: Final = 1024
_ABOUT: Final = struct.Struct("<QQQI")


@dataclass(frozen=True, slots=True)
class Security:
    """What a task and those who want to talk to it must have in common.

    Attributes:
        token_file: path of a file with 64 hexadecimal digits, as ``openssl rand -hex 32`` makes them, that its user
            alone can read. It must hold the same for all tasks of the cluster and their clients.
    """

    token_file: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not os.fspath(self.token_file):
            raise InvalidArgumentError("Security(token_file=...) is the path of a file, and not empty")

    def token(self) -> Token:
        """The token.

        Raises:
            UnauthenticatedError: the file cannot be read, others can read it, or it holds no token.
        """
        return token_files.read(os.fspath(self.token_file))


def from_environ(environ: Mapping[str, str]) -> Security | None:
    """What ``BELLWETHER_SECURITY`` says, None when it is not set."""
    path = environ.get(VARIABLE)
    return Security(path) if path else None


def find_token(address: str, security: Security | None, timeout: float) -> Token | None:
    """The token that a task should ask for: the one that it has left for this user, else the one that was given.

    Args:
        address: ``host:port`` of its control plane.
        security: what this process was given.
        timeout: seconds that looking the host up may take.

    Raises:
        UnauthenticatedError: there is one, and it cannot be read.
    """
    host, port = split_address(address)
    for here in _loopback(host, timeout):
        left = token_files.read_left(token_files.name_of(here, port))
        if left is not None:
            return left
    return None if security is None else security.token()


def leave_token(key: bytes, hosts: Sequence[str], port: int) -> list[TokenFile]:
    """Leaves a server's token where ``find_token`` of its user's other processes finds it.

    Args:
        key: the token.
        hosts: numeric addresses of the loopback.
        port: of its control plane.
    """
    return [TokenFile(token_files.name_of(host, port), key) for host in hosts]


def none_found() -> str:
    """The message of a process that has no token and was asked for one."""
    return (
        f"it asks for a token and this process has none for it: set {VARIABLE} to the file with the cluster's token; "
        f"a task that only its own host reaches leaves it for its own user in {token_files.places()}"
    )


def wrong(token: Token) -> str:
    """The message of a process whose token was refused."""
    return f"it has another token than {token.source}: set {VARIABLE} to the file with this cluster's token"


def not_asked(token: Token) -> str:
    """The message of a process that has a token for a task that does not know it."""
    return (
        f"it cannot show that it has the token of {token.source}, so it may be anybody: start it with {VARIABLE} "
        "set to the file with this cluster's token"
    )


def tensor_proof(key: bytes, side: bytes, nonce: bytes, hello: Hello, task: str, incarnation: int) -> bytes:
    """What one side of a tensor connection shows the other: 32 bytes, good for this connection alone.

    Args:
        key: the token.
        side: b"client" or b"server".
        nonce: what the server has drawn for this connection.
        hello: what the client says; its own proof does not count.
        task: which both mean.
        incarnation: of the server.
    """
    about = _ABOUT.pack(incarnation, hello.client, hello.lane, hello.attempt)
    return _proof(key, b"tensors", side, nonce, hello.nonce, about, task.encode())


def call_proof(key: bytes, nonce: str, port: int) -> str:
    """What a client shows the control plane with each call: hexadecimal, good for one process of one task.

    Args:
        key: the token.
        nonce: what that process has drawn.
        port: of its control plane.
    """
    return _proof(key, b"calls", nonce.encode(), str(port).encode()).hex()


def _proof(key: bytes, *parts: bytes) -> bytes:
    text = b"".join(struct.pack("<I", len(part)) + part for part in (b"bellwether", *parts))
    return hmac.digest(key, text, hashlib.sha256)


def _loopback(host: str, timeout: float) -> list[str]:
    try:
        found = addresses.look_up(addresses.settled(host), 0, time.monotonic() + min(timeout, _LOOK_UP_SECS))
    except OSError:
        return []  # whoever connects says what is wrong with it
    numeric = dict.fromkeys(str(address.sockaddr[0]) for address in found)
    return [one for one in numeric if ipaddress.ip_address(one).is_loopback]


class Refusals:
    """Tells of clients that were refused: of each address once in a while.

    Args:
        task: which refuses them.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()

    def tell(self, peer: str, why: str) -> None:
        """Logs that a client was refused, unless that was done for its address lately.

        Args:
            peer: its address, without a port.
            why: in words.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._told.get(peer, -_TELL_AGAIN_SECS) < _TELL_AGAIN_SECS:
                return
            if len(self._told) >= _MOST_PEERS:
                self._told.clear()
            self._told[peer] = now
        logging.warning(
            "%s refuses a client at %s: %s (said once a minute for each address)", self._task or "a server", peer, why
        )
