"""Credentials by which the processes of a cluster trust each other: a token, or certificates.

The token is never sent. The checking side sends random bytes, and the peer answers with their HMAC.
So a stranger who listens at the port of a task learns nothing of use.

A task on the loopback needs no setting. The task draws a token and leaves the token in a file for
processes of the same user (`runtime.trust.token_files`). A task on a network needs a token given by
the user to all processes, or certificates (`runtime.trust.certificates`). Only certificates
encrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import ssl
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from absl import logging

from runtime import concurrency
from runtime.cluster import addresses
from runtime.cluster.spec import split_address
from runtime.errors import InvalidArgumentError
from runtime.observe.audit import AuditLog
from runtime.observe.process_metrics import metrics
from runtime.trust import times, token_files
from runtime.trust.certificates import Certificates, certificates_in
from runtime.trust.token_files import Token, TokenFile

VARIABLE = "BELLWETHER_SECURITY"
"""Environment variable of tasks and clients: a directory with certificates, a file with a token, or ``insecure``."""
INSECURE = "insecure"
WAYS_OUT = (
    f"set {VARIABLE} for all tasks and their clients to a directory with certificates (`python -m "
    "harness.certs` makes "
    f"one), or to {INSECURE} to let everybody in"
)
FindToken = Callable[[float], Token | None]
"""Function that finds the token of one task within a number of seconds; None if this process has no token for it."""
# Each secret that is made from the token is the HMAC of a label of its own, so none is good in
# place of another.
BEARER_OF = b"metrics"
OBSERVER_OF = b"observer"
TLS_ALERT = b"\x15\x03"
"""First bytes of the answer of a TLS server to a client that does not speak TLS."""
NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""Reasons of the TLS library for a peer that does not speak TLS."""
CUT_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The errors of a TLS connection that was cut in the middle."""
_OTHER_CA = "its certificate is of another CA: give both sides the same ca.pem"
_HANDSHAKES = {
    **dict.fromkeys(
        NOT_TLS, "it does not speak TLS: start it with the directory of certificates, too"
    ),
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
"""Messages for the user, by the reason that the TLS library reports."""
# A client that connects from many addresses must not fill the memory of the task.
_MOST_PEERS = 1024


@dataclass(frozen=True, slots=True)
class Security:
    """The credential shared by a task and its clients.

    Exactly one of ``token_file``, ``certificates`` and ``lets_everybody_in`` is set.

    Attributes:
        token_file: Path of a file with 64 hexadecimal digits, as ``openssl rand -hex 32`` prints
            them. Only its user may be able to read the file. All tasks of the cluster and all
            clients need the same token. Nothing is encrypted.
        certificates: Directory with the certificate of a CA, and a certificate of this host with
            its key. ``python -m harness.certs`` makes the directory, or cert-manager or SPIFFE
            mounts one. All connections except Unix sockets are TLS, and both sides show a
            certificate of the CA.
        lets_everybody_in: True if every client may use the task.
        host: Name or address of the certificate to use if ``certificates`` has several; by default
            the host of the task in the cluster.

    Raises:
        InvalidArgumentError: None or several of the three are given, a path is empty, or ``host``
            is given without ``certificates``.

    Examples:
        >>> Security(certificates="certs", host="ps0").token() is None
        True
    """

    token_file: str | os.PathLike[str] | None = None
    certificates: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    lets_everybody_in: bool = field(default=False, kw_only=True)
    host: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        paths = [path for path in (self.token_file, self.certificates) if path is not None]
        if len(paths) + self.lets_everybody_in != 1 or (
            self.host is not None and self.certificates is None
        ):
            raise InvalidArgumentError(
                "Security takes a token_file, or certificates (and a host), or is "
                "Security.insecure()"
            )
        if not all(os.fspath(path) for path in paths):
            raise InvalidArgumentError(
                "Security(token_file=...) and (certificates=...) take a path that is not empty"
            )

    @classmethod
    def insecure(cls) -> Security:
        """Returns settings with ``lets_everybody_in``.

        A task with such settings warns at each start.
        """
        return cls(lets_everybody_in=True)

    @classmethod
    def from_text(cls, text: str) -> Security:
        """Returns the settings in the text of a flag or environment variable.

        Args:
            text: A directory with certificates, ``insecure``, or the path of a file with a token.
        """
        if text == INSECURE:
            return cls.insecure()
        return cls(certificates=text) if os.path.isdir(text) else cls(text)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Security | None:
        """Returns the settings in ``BELLWETHER_SECURITY``, or None if the variable is not set."""
        text = environ.get(VARIABLE)
        return cls.from_text(text) if text else None

    def of_host(self, host: str) -> Security:
        """Returns a copy with a host for the certificate, unless a host is set.

        Examples:
            >>> Security(certificates="certs", host="ps0").of_host("10.0.0.7").host
            'ps0'
        """
        return (
            self
            if self.certificates is None or self.host
            else replace(self, host=addresses.settled(host))
        )

    def token(self) -> Token | None:
        """Reads the token; returns None without a token file.

        Raises:
            UnauthenticatedError: The file cannot be read, is readable by other users, or holds no
                token.
        """
        return None if self.token_file is None else token_files.read(os.fspath(self.token_file))

    def bearer(self) -> str | None:
        """Returns the bearer token for the figures over HTTP, or None.

        The bearer token is an HMAC of the token, because HTTP sends the bearer token in clear. A
        listener on the network can read figures with the bearer token and cannot compute the token.

        Raises:
            UnauthenticatedError: The token cannot be read.
        """
        token = self.token()
        return None if token is None else hmac.digest(token.key, BEARER_OF, hashlib.sha256).hex()

    def tls(self) -> Certificates | None:
        """Returns the certificates, or None without a directory of certificates.

        Raises:
            UnauthenticatedError: The directory has no usable certificate. The message names the
                remedy.
        """
        return (
            None
            if self.certificates is None
            else certificates_in(os.fspath(self.certificates), self.host)
        )


_of_servers: list[Security] = []
"""Settings of the servers that run in this process, in the order of their start."""


def in_force(given: Security | None, environ: Mapping[str, str]) -> Security | None:
    """Returns the security settings for a client in this process, or None.

    Uses, in this order: ``given``, ``BELLWETHER_SECURITY``, the settings of the newest running
    server of the process. The last choice is right because the tasks and clients in a process
    belong to the same cluster.

    Args:
        given: Settings passed by the program, or None.
        environ: The environment variables.

    Examples:
        >>> in_force(None, {"BELLWETHER_SECURITY": "insecure"}).lets_everybody_in
        True
    """
    return given or Security.from_environ(environ) or (_of_servers[-1] if _of_servers else None)


def share(given: Security) -> Callable[[], None]:
    """Makes the settings of a server the default for clients in this process.

    Returns:
        A function to end the sharing.
    """
    # Several servers of a notebook may share equal settings, and each one ends its own entry.
    _of_servers.append(given)
    return lambda: _of_servers.remove(given) if given in _of_servers else None


def find_token(address: str, security: Security | None, timeout: float) -> Token | None:
    """Finds the token for the connection of a client to a task.

    A token left for this user by a task on the loopback comes first, then the token of
    ``security``.

    Args:
        address: ``host:port`` of the task's control plane.
        security: Settings of this process, or None.
        timeout: Most seconds for the lookup of the host.

    Returns:
        The token. None with certificates, and if there is no token.

    Raises:
        UnauthenticatedError: The token of ``security`` cannot be read.
    """
    if security is not None and security.certificates is not None:
        return None
    try:
        host, port = split_address(address)
    except InvalidArgumentError:
        # Only gRPC can resolve this name, so no task of this user has left a token under it.
        return None if security is None else security.token()
    for here in _loopback(host, timeout):
        left = token_files.read_left(token_files.name_of(here, port))
        if left is not None:
            return left
    return None if security is None else security.token()


def leave_token(key: bytes, hosts: Sequence[str], port: int) -> list[TokenFile]:
    """Leaves the token of a server in files for ``find_token``.

    Every process of the same user can read the files.

    Args:
        key: The token, 32 bytes.
        hosts: Numeric loopback addresses of the server.
        port: Port of the server's control plane.

    Returns:
        A file per address. Each file lasts until ``close`` or the end of this process.
    """
    assert all(ipaddress.ip_address(host).is_loopback for host in hosts), "others reach the task"
    return [TokenFile(token_files.name_of(host, port), key) for host in hosts]


def none_found() -> str:
    """Returns the message of a client without a token about a task that wants a token."""
    return (
        f"it asks for a token and this process has none for it: set {VARIABLE} to the file with "
        "the cluster's token; "
        "a task that only its own host reaches leaves it for its own user in "
        f"{token_files.places()}"
    )


def wrong(token: Token) -> str:
    """Returns the client's message about the refusal of a token."""
    return f"it has another token than {token.source}: set {VARIABLE} to the file with this cluster's token"


def elsewhere(address: str, theirs: str) -> str:
    """Returns the client's message about a task dialled at a wrong address.

    Args:
        address: Address dialled by the client.
        theirs: Address of the task in the cluster.
    """
    return (
        f"it does not answer for {address}: its address in the cluster is {theirs}, and "
        "with a token a task is dialled by that one only, not by a forwarded port"
    )


def not_asked(token: Token) -> str:
    """Returns the client's message about a server without proof of the client's token."""
    return (
        f"it cannot show that it has the token of {token.source}, so it may be anybody: start it "
        f"with {VARIABLE} "
        "set to the file with this cluster's token"
    )


def no_handshake(error: Exception) -> str:
    """Returns the message about a failed TLS handshake."""
    told = str(getattr(error, "verify_message", "") or getattr(error, "reason", None) or error)
    said = _HANDSHAKES.get(told)
    if said is None:
        said = (
            "its certificate is not good here"
            if isinstance(error, ssl.SSLCertVerificationError)
            else "no TLS"
        )
    return f"{said} ({told})"


def speaks_tls() -> str:
    """Returns the message of a client without a certificate about a task with TLS."""
    return f"it speaks TLS and this process has no certificate: set {VARIABLE} to the directory with the cluster's"


def refuses_us(certificates: Certificates) -> str:
    """Returns the client's message about the refusal of a certificate."""
    return (
        f"it does not take the certificate {certificates.pair.certificate}, which may be of "
        f"another CA: set {VARIABLE} "
        "to the directory with this cluster's certificates"
    )


def dialled(address: str) -> str:
    """Returns an address in the form for dialling: with 127.0.0.1 in place of "localhost".

    Examples:
        >>> dialled("localhost:2222")
        '127.0.0.1:2222'
    """
    host, _, port = address.rpartition(":")
    return f"{addresses.settled(host)}:{port}"


def about(address: str, task: str) -> str:
    """Returns the hash of address and task for both proofs of the control plane, in hexadecimal.

    Args:
        address: ``host:port`` dialled by the client.
        task: Task expected by the client, such as "/job:ps/task:0"; empty for any task.
    """
    return hashlib.sha256(f"{address.lower()} {task}".encode()).hexdigest()


def call_proof(key: bytes, side: bytes, nonce: str, theirs: str, about: str) -> str:
    """Returns the proof of a client or server on the control plane, in hexadecimal.

    The proof is good for a single process of a single task.

    Args:
        key: The token.
        side: b"client" or b"server".
        nonce: Random text drawn by the process of the server.
        theirs: Random text drawn by the client.
        about: Hash of the dialled address and task, from `about`.
    """
    assert side in (b"client", b"server")
    return proof_of(key, b"calls", side, nonce.encode(), theirs.encode(), about.encode()).hex()


def proof_of(key: bytes, *parts: bytes) -> bytes:
    """Returns the proof that a process has a key, 32 bytes, for one list of parts only."""
    # Each part follows its length, so that no two different lists of parts make the same text.
    text = b"".join(struct.pack("<I", len(part)) + part for part in (b"bellwether", *parts))
    return hmac.digest(key, text, hashlib.sha256)


def _loopback(host: str, timeout: float) -> list[str]:
    try:
        found = addresses.look_up(
            addresses.settled(host), 0, concurrency.monotonic() + min(timeout, times.LOOK_UP_SECS)
        )
    except OSError:
        # The connection that follows fails by the same problem, and reports the problem.
        return []
    numeric = dict.fromkeys(str(address.sockaddr[0]) for address in found)
    return [one for one in numeric if ipaddress.ip_address(one).is_loopback]


def observer_key(key: bytes) -> bytes:
    """Returns the observer's token, an HMAC of the token of the cluster.

    A client with the observer's token may only read the state of tasks. The token of the cluster
    cannot be computed from the observer's token.
    """
    return hmac.digest(key, OBSERVER_OF, hashlib.sha256)


class RefusalLog:
    """The log of refused clients. Thread safe.

    Each client and action gets at most one line a minute.

    Args:
        task: Name of the refusing task; empty for a server without a task.
        audit: Audit log of the task, or None.
    """

    def __init__(self, task: str, audit: AuditLog | None = None) -> None:
        self._task = task
        self._audit = audit
        self._told: dict[str, float] = {}
        self._lock = concurrency.Lock()

    def tell(self, peer: str, why: str, action: str = "connect", names: Sequence[str] = ()) -> None:
        """Counts a refused client and logs the refusal.

        Nothing is logged if a refusal of the same client and action was logged less than a minute
        ago.

        Args:
            peer: Address of the client, without a port.
            why: Reason, in words.
            action: "connect" for a refused connection, "limit" for a client over a limit
                (``runtime.limits``), else the refused order, as in ``roles.MAY``.
            names: Names in the client's certificate; none for a refused connection.
        """
        metrics.add("refused_total")
        who = " ".join(names)
        if not self._is_due(f"{peer} {who} {action}"):
            return
        if self._audit is not None:
            self._audit.write(action, peer=peer, who=who, what=why, outcome="refused")
        logging.warning(
            "%s refuses a client at %s: %s (said once a minute for each address)",
            self._task or "a server",
            peer,
            why,
        )

    def report_failure(self, peer: str, call: str, error: Exception) -> None:
        """Logs the traceback of an unexpected error in a call.

        Nothing is logged if an error of the same client was logged less than a minute ago.

        Args:
            peer: Address of the client, without a port.
            call: The call, in words.
            error: The unexpected error.
        """
        if self._is_due(f"{peer} failure"):
            logging.error(
                "%s of %s failed (said once a minute)", call.capitalize(), peer, exc_info=error
            )

    def _is_due(self, about: str) -> bool:
        now = concurrency.monotonic()
        with self._lock:
            if now - self._told.get(about, -times.REFUSAL_LOG_SECS) < times.REFUSAL_LOG_SECS:
                return False
            # To forget all costs at most one line more for each client.
            if len(self._told) >= _MOST_PEERS:
                self._told.clear()
            self._told[about] = now
            assert len(self._told) <= _MOST_PEERS
            return True
