"""Certificates of a process: which pair in a directory is its own, and contexts that hold what the files hold now.

The directory is what ``python -m harness.certs`` makes, or what cert-manager and SPIFFE mount. Its files are looked at
whenever a connection is made, so whoever replaces them need tell nobody. Connections that stand already stay.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import ipaddress
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from absl import logging

from runtime.errors import PermissionDeniedError, UnauthenticatedError
from runtime.trust import roles, token_files

AUTHORITIES: Final = ("ca.pem", "ca.crt", "svid_bundle.pem", "bundle.0.pem", "bundle.pem")
"""Names that the file with the certificates of the CA may have: ours, cert-manager's and SPIFFE's."""
_CERTIFICATES: Final = (".pem", ".crt")
_KEYS: Final = (".key", "_key.pem", "-key.pem")
_READS: Final = 5
"""How often files that change meanwhile are read at most."""
NEAR_END_SECS: Final = 7 * 86400.0
_NEAR_END_SHARE: Final = 0.1
_TELL_AGAIN_SECS: Final = 3600.0

Context = Callable[[], ssl.SSLContext]
"""Returns the context for a connection that is about to be made."""
_Signature = tuple[tuple[int, int, int], ...]


class Pair(NamedTuple):
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Credential:
    """What the files held.

    Attributes:
        certificate: and what leads from it to the CA, as PEM.
        key: as PEM.
        authorities: certificates of the CA, as PEM.
        begin: since when the certificate holds, seconds since the epoch.
        end: until when.
        names: that it has, its role among them.
        server: context of the side that accepts.
        client: context of the side that connects.
        spectator: The same for a look at a server that takes any name in its certificate.
    """

    certificate: bytes
    key: bytes
    authorities: bytes
    begin: float
    end: float
    names: tuple[str, ...]
    server: ssl.SSLContext
    client: ssl.SSLContext
    spectator: ssl.SSLContext


class Certificates:
    """The certificate of this process, its key and its CA, as their files are.

    Args:
        directory: with the files.
        host: name or address that the certificate must have, when there are several; None takes that of this machine,
            else any: a client is known by its CA alone.

    Attributes:
        pair: the files.

    Raises:
        UnauthenticatedError: there is none, it cannot be used, others can read its key, or it has ended.
    """

    def __init__(self, directory: str | os.PathLike[str], host: str | None = None) -> None:
        self._directory = Path(directory)
        self._authorities = _authorities(self._directory)
        self.pair = choose(self._directory, host)
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._told = 0.0
        self._credential = self._load()
        self.check()

    @property
    def current(self) -> Credential:
        """What the files hold; what they held before, while they are no good."""
        with self._lock, contextlib.suppress(OSError):  # a file is missing just now
            seen = self._signature()
            if seen != self._seen:
                try:
                    self._credential = self._load()
                    logging.info("%s: read again, it ends %s", self.pair.certificate, _date(self._credential.end))
                except UnauthenticatedError as error:
                    logging.warning("going on with the certificate of before: %s", error.message)
                self._seen = seen
        return self._credential

    def server_context(self) -> ssl.SSLContext:
        """The context for a connection that was accepted: TLS 1.2 at least, and a certificate of our CA."""
        return self.current.server

    def client_context(self) -> ssl.SSLContext:
        """The context for a connection to a task: the same, and the task must have the name that is connected to.

        Raises:
            UnauthenticatedError: our own certificate has ended.
        """
        self.check()
        return self._credential.client

    def check(self) -> None:
        """Raises UnauthenticatedError when the certificate has ended, and nothing has replaced it."""
        credential, now = self.current, time.time()
        if now >= credential.end:
            raise UnauthenticatedError(
                f"the certificate {self.pair.certificate} has ended, {_date(credential.end)}: replace it, as `python "
                f"-m harness.certs --out={self._directory} --hosts={self.pair.certificate.stem} --renew` does"
            )
        if now < credential.begin:
            raise UnauthenticatedError(
                f"the certificate {self.pair.certificate} begins {_date(credential.begin)}: is the clock of this "
                "machine right?"
            )

    def name_of(self, task: str) -> str:
        """Returns the name that the certificate of a task must have; empty where the name of its host will do.

        Args:
            task: such as "/job:ps/task:0"; empty where it may be any.
        """
        return roles.server_name(self.current.names, task)

    def left_secs(self) -> float:
        """Seconds until the certificate ends; below 0 when it has."""
        return self.current.end - time.time()

    def is_near_end(self) -> bool:
        """Whether a tenth of its life is left of the certificate, or seven days if that is less."""
        credential = self.current
        return is_near_end(credential.begin, credential.end, time.time())

    def tell_near_end(self, task: str) -> None:
        """Warns, once an hour, when the certificate is near its end or beyond it.

        Args:
            task: whose certificate it is.
        """
        now = time.monotonic()
        with self._lock:
            due = not self._told or now - self._told >= _TELL_AGAIN_SECS
        if not due or not self.is_near_end():
            return
        self._told = now
        left, path = self.left_secs(), self.pair.certificate
        if left <= 0:
            logging.error("%s: the certificate %s has ended: nobody new can connect; replace its files", task, path)
        else:
            logging.warning("%s: the certificate %s ends in %s: replace its files", task, path, words(left))

    def _signature(self) -> _Signature:
        found = [os.stat(path) for path in (*self.pair, self._authorities)]
        return tuple((about.st_mtime_ns, about.st_ino, about.st_size) for about in found)

    def _load(self) -> Credential:
        try:
            for _ in range(_READS):
                before = self._signature()
                with contextlib.suppress(OSError):  # it has been replaced since: once more
                    credential = self._read()
                    if self._signature() == before:
                        return credential
            return self._read()
        except PermissionDeniedError as error:
            raise UnauthenticatedError(f"{self.pair.certificate} is not safe there: {error.message}") from None
        except (OSError, ValueError) as error:  # ssl.SSLError is one
            reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
            raise UnauthenticatedError(
                f"{self.pair.certificate}, {self.pair.key.name} and {self._authorities.name} do not make a credential: "
                f"{reason}"
            ) from None

    def _read(self) -> Credential:
        for path in (self._directory, self._authorities, *self.pair):
            token_files.check_only_ours(path)
        key = _private(self.pair.key)
        certificate, authorities = self.pair.certificate.read_bytes(), self._authorities.read_bytes()
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a bundle may hold no root; gRPC takes it too
            context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
            context.load_cert_chain(self.pair.certificate, self.pair.key, _no_password)
            contexts.append(context)
        # Tickets would lie unread in the sockets of clients, which then reset their connections when they close them.
        contexts[0].num_tickets = 0
        for client in contexts[1:]:  # gRPC hangs up on a client that does not ask for it
            client.set_alpn_protocols(["h2"])
        contexts[2].check_hostname = False
        begin, end, names = _about(certificate)
        return Credential(certificate, key, authorities, begin, end, names, *contexts)


@functools.lru_cache(maxsize=64)
def certificates_in(directory: str, host: str | None) -> Certificates:
    """The certificates of this process in a directory; one object for all that use them."""
    return Certificates(directory, host)


def choose(directory: Path, host: str | None) -> Pair:
    """The pair of a host: NAME.pem and NAME.key, or the one that names it, or the only one.

    Args:
        directory: with the files.
        host: name or address; None for a client, which takes that of this machine or any.

    Raises:
        UnauthenticatedError: there is none.
    """
    try:
        pairs = _pairs(directory)
    except OSError as error:
        raise UnauthenticatedError(f"{directory} cannot be read: {error.strerror or error}") from None
    if not pairs:
        raise UnauthenticatedError(
            f"{directory} has no certificate with a key that this user can read, as NAME.pem and NAME.key: `python -m "
            "harness.certs` makes them"
        )
    own = socket.gethostname()
    for name in [host] if host else [own, own.partition(".")[0]]:
        found = [pair for pair in pairs if pair.certificate.stem == name] or [p for p in pairs if _names(p, name)]
        if found:
            return found[0]
    if len(pairs) == 1 or host is None:
        return pairs[0]
    known = ", ".join(pair.certificate.stem for pair in pairs)
    raise UnauthenticatedError(
        f"{directory} has certificates of {known} and none of {host}: add it by `python -m harness.certs "
        f"--out={directory} --hosts={host}`"
    )


def is_near_end(begin: float, end: float, now: float) -> bool:
    """Whether a life is near its end: a tenth of it is left, or seven days if that is less. All in seconds."""
    return end - now < min((end - begin) * _NEAR_END_SHARE, NEAR_END_SECS)


def shown_names(sock: ssl.SSLSocket) -> tuple[str, ...]:
    """The names in the certificate that the other side of a connection has shown, as gRPC writes them, too."""
    shown = sock.getpeercert() or {}
    return tuple(_plain(*entry) for entry in cast(Any, shown.get("subjectAltName", ())))


def _plain(kind: str, name: str) -> str:
    return str(ipaddress.ip_address(name.strip())) if kind == "IP Address" else name


def words(seconds: float) -> str:
    """A time in words: its largest unit."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next(f"{seconds / unit:.0f} {name}" for name, unit in units if seconds >= 2 * unit or unit == 1.0)


def _authorities(directory: Path) -> Path:
    for name in AUTHORITIES:
        if (directory / name).exists():
            return directory / name
    raise UnauthenticatedError(
        f"{directory} has no certificate of a CA ({', '.join(AUTHORITIES)}): `python -m harness.certs "
        f"--out={directory} --hosts=...` makes one"
    )


def _pairs(directory: Path) -> list[Pair]:
    found = []
    for path in sorted(directory.iterdir()):
        if path.suffix not in _CERTIFICATES or path.name in AUTHORITIES:
            continue
        keys = [path.with_name(path.stem + ending) for ending in _KEYS]
        found += [Pair(path, key) for key in keys if key.exists() and os.access(key, os.R_OK)][:1]
    return found


def _names(pair: Pair, host: str) -> bool:
    try:
        names = _about(pair.certificate.read_bytes())[2]
    except (OSError, ValueError):
        return False  # whoever uses it says what is wrong with it
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host.lower() in map(str.lower, names)


def _about(certificate: bytes) -> tuple[float, float, tuple[str, ...]]:
    """Since when it holds, until when, and the names in it."""
    # Not at the top: a process without certificates does not pay for its import.
    from cryptography import x509

    about = x509.load_pem_x509_certificate(certificate)
    try:
        names = about.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = tuple(str(name.value) for name in names if not isinstance(name, x509.OtherName))
    except x509.ExtensionNotFound:
        found = ()
    return about.not_valid_before_utc.timestamp(), about.not_valid_after_utc.timestamp(), found


def _private(path: Path) -> bytes:
    token_files.forbid_core_dumps()
    with open(path, "rb") as file:
        if token_files.others_read(os.fstat(file.fileno())):
            raise UnauthenticatedError(f"others can read the key in {path}: chmod 600 it, and make another one")
        return file.read()


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to be asked for the password")


def _date(unix_secs: float) -> str:
    return datetime.datetime.fromtimestamp(unix_secs, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
