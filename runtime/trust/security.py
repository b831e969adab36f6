"""How processes show each other that they belong to one cluster: by a token, or by certificates.

Nobody sends the token. The side that is to be convinced sends random bytes, and the other answers with their HMAC. So
whoever listens at a port in a task's place learns nothing that any task would take.

A task that only its own host reaches has a token without being told: it draws one and leaves it in a file for the other
processes of its user (`runtime.trust.token_files`). Elsewhere it needs one that all are given, or certificates
(`runtime.trust.certificates`): these encrypt, too.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from absl import logging

from runtime.cluster.spec import split_address
from runtime.errors import InvalidArgumentError
from runtime.observe.audit import AuditLog
from runtime.observe.process_metrics import metrics
from runtime.trust import token_files
from runtime.trust.certificates import Certificates, certificates_in
from runtime.trust.token_files import Token, TokenFile
from runtime.wire import addresses
from runtime.wire.frames import Hello

VARIABLE: Final = "BELLWETHER_SECURITY"
"""Environment variable, for tasks and their clients: a directory with certificates, a file with a token, or
``insecure``."""
INSECURE: Final = "insecure"
WAYS_OUT: Final = (
    f"set {VARIABLE} for all tasks and their clients to a directory with certificates (`python -m harness.certs` makes "
    f"one), or to {INSECURE} to let everybody in"
)
FindToken = Callable[[float], Token | None]
"""Finds the token of one task, given the seconds that it may take; None when this process has none."""
BEARER_OF: Final = b"metrics"
OBSERVER_OF: Final = b"observer"
TLS_ALERT: Final = b"\x15\x03"
"""How what a TLS server says begins that has been told something else than TLS."""
NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""What the TLS library says of a peer that does not speak TLS."""
_OTHER_CA: Final = "its certificate is of another CA: give both sides the same ca.pem"
_HANDSHAKES: Final = {
    **dict.fromkeys(NOT_TLS, "it does not speak TLS: start it with the directory of certificates, too"),
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate and this process has shown none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has ended",
    "SSLV3_ALERT_BAD_CERTIFICATE": "our certificate is not good there",
    "certificate has expired": "its certificate has ended",
    "certificate is not yet valid": "its certificate has not begun: are the clocks right?",
    "unable to get local issuer certificate": _OTHER_CA,
    "self-signed certificate in certificate chain": _OTHER_CA,
    "self signed certificate in certificate chain": _OTHER_CA,
    "self-signed certificate": "its certificate is of no CA",
}
"""What the TLS library says, in words of ours."""
_LOOK_UP_SECS: Final = 2.0
_TELL_AGAIN_SECS: Final = 60.0
_MOST_PEERS: Final = 1024
_ABOUT: Final = struct.Struct("<QQQI")


@dataclass(frozen=True, slots=True)
class Security:
    """What a task and those who want to talk to it must have in common: one of the three, and only one.

    Attributes:
        token_file: path of a file with 64 hexadecimal digits, as ``openssl rand -hex 32`` makes them, that its user
            alone can read. It must hold the same for all tasks of the cluster and their clients. Nothing is encrypted.
        certificates: directory with the certificate of a CA, and one of this host with its key, as ``python -m
            harness.certs`` makes them, or cert-manager or SPIFFE mounts them. All connections but those of the Unix
            socket are TLS then, and both sides show a certificate of the CA.
        lets_everybody_in: see ``insecure``.
        host: with ``certificates``, the name or address that our certificate must have where there are several; by
            default that of the task in the cluster.

    Raises:
        InvalidArgumentError: it is none of the three, or more than one.
    """

    token_file: str | os.PathLike[str] | None = None
    certificates: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    lets_everybody_in: bool = field(default=False, kw_only=True)
    host: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        paths = [path for path in (self.token_file, self.certificates) if path is not None]
        if len(paths) + self.lets_everybody_in != 1 or (self.host is not None and self.certificates is None):
            raise InvalidArgumentError(
                "Security takes a token_file, or certificates (and a host), or is Security.insecure()"
            )
        if not all(os.fspath(path) for path in paths):
            raise InvalidArgumentError("Security(token_file=...) and (certificates=...) take a path that is not empty")

    @classmethod
    def insecure(cls) -> Security:
        """Whoever reaches a task may use it, and it says so at each start."""
        return cls(lets_everybody_in=True)

    @classmethod
    def from_text(cls, text: str) -> Security:
        """What a flag or the environment says: a directory, else a file, or ``insecure``."""
        if text == INSECURE:
            return cls.insecure()
        return cls(certificates=text) if os.path.isdir(text) else cls(text)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Security | None:
        """What ``BELLWETHER_SECURITY`` says, None when it is not set."""
        text = environ.get(VARIABLE)
        return cls.from_text(text) if text else None

    def of_host(self, host: str) -> Security:
        """The same, with the certificate of a host unless another one was asked for."""
        return self if self.certificates is None or self.host else replace(self, host=addresses.settled(host))

    def token(self) -> Token | None:
        """The token; None without.

        Raises:
            UnauthenticatedError: the file cannot be read, others can read it, or it holds no token.
        """
        return None if self.token_file is None else token_files.read(os.fspath(self.token_file))

    def bearer(self) -> str | None:
        """What a client of an HTTP endpoint shows in place of the token, which nobody sends; None without a token.

        It is an HMAC of the token, so that who sees it on the network has not the token. Raises as ``token``.
        """
        token = self.token()
        return None if token is None else hmac.digest(token.key, BEARER_OF, hashlib.sha256).hex()

    def tls(self) -> Certificates | None:
        """The certificates; None without.

        Raises:
            UnauthenticatedError: there are none, or they cannot be used; says what to do.
        """
        return None if self.certificates is None else certificates_in(os.fspath(self.certificates), self.host)


_of_servers: list[Security] = []
"""What the servers of this process were given; of each until it stops."""


def in_force(given: Security | None, environ: Mapping[str, str]) -> Security | None:
    """What a process goes by.

    Args:
        given: to whoever asks, in code.
        environ: has ``BELLWETHER_SECURITY`` or not, which counts when nothing was given.

    Returns:
        That, else what a server of this process was given: its tasks and clients are of one cluster. None without.
    """
    return given or Security.from_environ(environ) or (_of_servers[-1] if _of_servers else None)


def share(given: Security) -> Callable[[], None]:
    """Has the clients of this process go by what a server of it was given; gives what ends that."""
    _of_servers.append(given)
    return lambda: _of_servers.remove(given) if given in _of_servers else None


def find_token(address: str, security: Security | None, timeout: float) -> Token | None:
    """The token that a task should ask for: the one that it has left for this user, else the one that was given.

    Args:
        address: ``host:port`` of its control plane.
        security: what this process was given; with certificates there is none.
        timeout: seconds that looking the host up may take.

    Raises:
        UnauthenticatedError: there is one, and it cannot be read.
    """
    if security is not None and security.certificates is not None:
        return None
    try:
        host, port = split_address(address)
    except InvalidArgumentError:  # a name of gRPC's own: no task of this user has left a token for it
        return None if security is None else security.token()
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


def elsewhere(address: str, theirs: str) -> str:
    """The message of a process that has dialled a task by an address that is not its own."""
    return (
        f"it does not answer for {address}: its address in the cluster is {theirs}, and "
        "with a token a task is dialled by that one only, not by a forwarded port"
    )


def not_asked(token: Token) -> str:
    """The message of a process that has a token for a task that does not know it."""
    return (
        f"it cannot show that it has the token of {token.source}, so it may be anybody: start it with {VARIABLE} "
        "set to the file with this cluster's token"
    )


def no_handshake(error: Exception) -> str:
    """The message of a side whose TLS handshake has failed."""
    told = str(getattr(error, "verify_message", "") or getattr(error, "reason", None) or error)
    said = _HANDSHAKES.get(told)
    if said is None:
        said = "its certificate is not good here" if isinstance(error, ssl.SSLCertVerificationError) else "no TLS"
    return f"{said} ({told})"


def speaks_tls() -> str:
    """The message of a process that has no certificate, for a task that asks for one."""
    return f"it speaks TLS and this process has no certificate: set {VARIABLE} to the directory with the cluster's"


def refuses_us(certificates: Certificates) -> str:
    """The message of a process whose certificate was refused."""
    return (
        f"it does not take the certificate {certificates.pair.certificate}, which may be of another CA: set {VARIABLE} "
        "to the directory with this cluster's certificates"
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


def dialled(address: str) -> str:
    """Returns ``host:port`` as it is dialled; another name of gRPC's own as it is."""
    host, _, port = address.rpartition(":")
    return f"{addresses.settled(host)}:{port}"


def about(address: str, task: str) -> str:
    """Returns what both proofs of the control plane are about: hexadecimal, of any address and task.

    Args:
        address: ``host:port`` that the client has dialled.
        task: that it means, such as "/job:ps/task:0"; empty where it may be any.
    """
    return hashlib.sha256(f"{address.lower()} {task}".encode()).hexdigest()


def call_proof(key: bytes, side: bytes, nonce: str, theirs: str, about: str) -> str:
    """Returns what one side of the control plane shows the other: hexadecimal, good for one process of one task.

    Args:
        key: the token.
        side: b"client" or b"server".
        nonce: what the server's process has drawn.
        theirs: what the client has drawn.
        about: what the client has dialled, as `about` returns it.
    """
    return _proof(key, b"calls", side, nonce.encode(), theirs.encode(), about.encode()).hex()


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


def observer_key(key: bytes) -> bytes:
    """The token of those who may look and do nothing, made from the cluster's: who has it has not that."""
    return hmac.digest(key, OBSERVER_OF, hashlib.sha256)


class Refusals:
    """Tells of clients that were refused: of each address once in a while.

    Args:
        task: which refuses them.
        audit: its log.
    """

    def __init__(self, task: str, audit: AuditLog | None = None) -> None:
        self._task = task
        self._audit = audit
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()

    def tell(self, peer: str, why: str, action: str = "connect", names: Sequence[str] = ()) -> None:
        """Logs that a client was refused, unless that was done for this client and action lately.

        Args:
            peer: The client's address, without a port.
            why: in words.
            action: "connect" where the client was not let in, "limit" where it was over one (``runtime.limits``), the
                order as in ``roles.MAY`` where it may not give that.
            names: in the certificate of a client that was let in.
        """
        metrics.add("refused_total")
        who = " ".join(names)
        if not self._is_due(f"{peer} {who} {action}"):
            return
        if self._audit is not None:
            self._audit.write(action, peer=peer, who=who, what=why, outcome="refused")
        logging.warning(
            "%s refuses a client at %s: %s (said once a minute for each address)", self._task or "a server", peer, why
        )

    def report_failure(self, peer: str, call: str, error: Exception) -> None:
        """Logs the traceback of a call that failed by no error of ours, of each client once in a while.

        Args:
            peer: The client's address, without a port.
            call: The call, in words.
            error: The error.
        """
        if self._is_due(f"{peer} failure"):
            logging.error("%s of %s failed (said once a minute)", call.capitalize(), peer, exc_info=error)

    def _is_due(self, about: str) -> bool:
        now = time.monotonic()
        with self._lock:
            if now - self._told.get(about, -_TELL_AGAIN_SECS) < _TELL_AGAIN_SECS:
                return False
            if len(self._told) >= _MOST_PEERS:
                self._told.clear()
            self._told[about] = now
            return True
