"""Certificates of a process, in TLS contexts for the connections of servers and clients.

``python -m harness.certs`` makes the directory of the files, or cert-manager or SPIFFE mounts the
directory. Each new connection uses the present content of the files. So a user replaces the files
and does nothing else. Open connections continue with the old certificate.
"""

import contextlib
import datetime
import functools
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from absl import logging

from runtime import concurrency
from runtime.errors import PermissionDeniedError, UnauthenticatedError
from runtime.trust import roles, times, token_files

AUTHORITIES = ("ca.pem", "ca.crt", "svid_bundle.pem", "bundle.0.pem", "bundle.pem")
"""File names for the certificates of the CA: of harness.certs, of cert-manager and of SPIFFE tools."""
_CERTIFICATES = (".pem", ".crt")
_KEYS = (".key", "_key.pem", "-key.pem")
_READS = 5
"""Most attempts to read all files without a change of a file in between."""
_NEAR_END_SHARE = 0.1

Context = Callable[[], ssl.SSLContext]
"""Function that returns the TLS context for a new connection."""
_Signature = tuple[tuple[int, int, int], ...]


class CertificatePair(NamedTuple):
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Credential:
    """The content of the files at one time.

    Attributes:
        certificate: Certificate and the chain to the CA, as PEM.
        key: Private key, as PEM.
        authorities: Certificates of the CA, as PEM.
        begin: Begin of the certificate, seconds since the epoch.
        end: End of the certificate, seconds since the epoch.
        names: Names in the certificate, the role among them.
        server: Context of the accepting side.
        client: Context of the connecting side.
        spectator: Context of the connecting side that accepts a server's certificate with any name,
            for a diagnosis.
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
    """The certificate of this process, with its key and CA. Thread safe.

    Args:
        directory: Directory of the files.
        host: Name or address in the certificate, for a directory with several certificates. None
            chooses the certificate of this machine, else any: servers check only the CA of a
            client.

    Attributes:
        pair: Files of the certificate and its key.

    Raises:
        UnauthenticatedError: There is no certificate, or the certificate is invalid, or expired, or
            other users can read its key.
    """

    def __init__(self, directory: str | os.PathLike[str], host: str | None = None) -> None:
        self._directory = Path(directory)
        self._authorities = _authorities(self._directory)
        self.pair = choose(self._directory, host)
        self._lock = concurrency.Lock()
        self._seen = self._signature()
        self._told = 0.0
        self._credential = self._load()
        self.check()

    @property
    def current(self) -> Credential:
        """The credential in the files.

        Loads the files again after a change. While a file is missing or invalid, the last valid
        credential stays.
        """
        # A file may be missing for a moment while the user or a tool replaces the files.
        with self._lock, contextlib.suppress(OSError):
            seen = self._signature()
            if seen != self._seen:
                try:
                    self._credential = self._load()
                    logging.info(
                        "%s: read again, it ends %s",
                        self.pair.certificate,
                        _date(self._credential.end),
                    )
                except UnauthenticatedError as error:
                    logging.warning("going on with the certificate of before: %s", error.message)
                self._seen = seen
        return self._credential

    def server_context(self) -> ssl.SSLContext:
        """Returns the context for an accepted connection: TLS 1.2 or newer, and a client certificate of the CA."""
        return self.current.server

    def client_context(self) -> ssl.SSLContext:
        """Returns the context for a connection to a task.

        The task needs TLS 1.2 or newer, and a certificate of the CA for the name in the connection.

        Raises:
            UnauthenticatedError: The certificate of this process has expired or has not begun.
        """
        # A server hangs up on an expired certificate without a reason, so the client looks at the
        # date first.
        self.check()
        return self._credential.client

    def check(self) -> None:
        """Checks that the certificate is valid now.

        Raises:
            UnauthenticatedError: The certificate has expired or has not begun, and the files hold
                no newer one.
        """
        credential, now = self.current, concurrency.wall_time()
        if now >= credential.end:
            raise UnauthenticatedError(
                f"the certificate {self.pair.certificate} has ended, {_date(credential.end)}: "
                "replace it, as `python "
                f"-m harness.certs --out={self._directory} --hosts={self.pair.certificate.stem} "
                "--renew` does"
            )
        if now < credential.begin:
            raise UnauthenticatedError(
                f"the certificate {self.pair.certificate} begins {_date(credential.begin)}: is the "
                "clock of this "
                "machine right?"
            )

    def name_of(self, task: str) -> str:
        """Returns the name required in the certificate of a task.

        The name is empty if the name of the task's host is enough.

        Args:
            task: Task, such as "/job:ps/task:0"; empty for any task.
        """
        return roles.server_name(self.current.names, task)

    def left_secs(self) -> float:
        """Returns the seconds until the end of the certificate; below 0 after the end."""
        return self.current.end - concurrency.wall_time()

    def is_near_end(self) -> bool:
        """Returns True near the end of the certificate's life, as `is_near_end` of this module."""
        credential = self.current
        return is_near_end(credential.begin, credential.end, concurrency.wall_time())

    def tell_near_end(self, task: str) -> None:
        """Warns of the end of the certificate, at most once an hour.

        Args:
            task: Task with the certificate, for the message.
        """
        now = concurrency.monotonic()
        with self._lock:
            due = not self._told or now - self._told >= times.CERTIFICATE_LOG_SECS
        if not due or not self.is_near_end():
            return
        self._told = now
        left, path = self.left_secs(), self.pair.certificate
        if left <= 0:
            logging.error(
                "%s: the certificate %s has ended: nobody new can connect; replace its files",
                task,
                path,
            )
        else:
            logging.warning(
                "%s: the certificate %s ends in %s: replace its files", task, path, words(left)
            )

    def _signature(self) -> _Signature:
        found = [os.stat(path) for path in (*self.pair, self._authorities)]
        return tuple((about.st_mtime_ns, about.st_ino, about.st_size) for about in found)

    def _load(self) -> Credential:
        try:
            for _ in range(_READS):
                before = self._signature()
                # In the middle of a replacement a file is missing, or a key does not fit its
                # certificate. So a read counts only if no file has changed meanwhile.
                with contextlib.suppress(OSError):
                    credential = self._read()
                    if self._signature() == before:
                        return credential
            return self._read()
        except PermissionDeniedError as error:
            raise UnauthenticatedError(
                f"{self.pair.certificate} is not safe there: {error.message}"
            ) from None
        # ssl.SSLError is an OSError.
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
            raise UnauthenticatedError(
                f"{self.pair.certificate}, {self.pair.key.name} and {self._authorities.name} do "
                "not make a credential: "
                f"{reason}"
            ) from None

    def _read(self) -> Credential:
        for path in (self._directory, self._authorities, *self.pair):
            token_files.check_only_ours(path)
        key = _private(self.pair.key)
        certificate, authorities = (
            self.pair.certificate.read_bytes(),
            self._authorities.read_bytes(),
        )
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.verify_mode = ssl.CERT_REQUIRED
            # A bundle may hold an intermediate CA without the root. gRPC accepts this as well.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
            context.load_cert_chain(self.pair.certificate, self.pair.key, _no_password)
            contexts.append(context)
        # No client reads the tickets of a server. Unread data would turn the close of a connection
        # into a reset.
        contexts[0].num_tickets = 0
        # gRPC hangs up on a client that does not offer HTTP/2.
        for client in contexts[1:]:
            client.set_alpn_protocols(["h2"])
        contexts[2].check_hostname = False
        begin, end, names = _about(certificate)
        return Credential(certificate, key, authorities, begin, end, names, *contexts)


@functools.lru_cache(maxsize=64)
def certificates_in(directory: str, host: str | None) -> Certificates:
    """Returns the certificates in a directory: the same object for all callers in this process.

    Args:
        directory: Directory of the files.
        host: Name or address in the certificate, as for `Certificates`.
    """
    return Certificates(directory, host)


def choose(directory: Path, host: str | None) -> CertificatePair:
    """Returns the files for a host.

    Tries in this order: a pair with the name of the host as file name, a pair with the name in the
    certificate, the only pair of the directory.

    Args:
        directory: Directory of the files.
        host: Name or address. None, for a client, chooses the pair of this machine, else the first.

    Raises:
        UnauthenticatedError: The directory cannot be read, or has no pair for the host.
    """
    try:
        pairs = _pairs(directory)
    except OSError as error:
        raise UnauthenticatedError(
            f"{directory} cannot be read: {error.strerror or error}"
        ) from None
    if not pairs:
        raise UnauthenticatedError(
            f"{directory} has no certificate with a key that this user can read, as NAME.pem and "
            "NAME.key: `python -m "
            "harness.certs` makes them"
        )
    own = socket.gethostname()
    for name in [host] if host else [own, own.partition(".")[0]]:
        found = [pair for pair in pairs if pair.certificate.stem == name] or [
            p for p in pairs if _names(p, name)
        ]
        if found:
            return found[0]
    if len(pairs) == 1 or host is None:
        return pairs[0]
    known = ", ".join(pair.certificate.stem for pair in pairs)
    raise UnauthenticatedError(
        f"{directory} has certificates of {known} and none of {host}: add it by `python -m "
        "harness.certs "
        f"--out={directory} --hosts={host}`"
    )


def is_near_end(begin: float, end: float, now: float) -> bool:
    """Returns True near the end of a certificate's life.

    The last tenth of the life counts as near, or the last seven days if shorter.

    Args:
        begin: Begin of the certificate, seconds since the epoch.
        end: End of the certificate, seconds since the epoch.
        now: Present time, seconds since the epoch.

    Examples:
        >>> is_near_end(begin=0.0, end=100.0, now=91.0)
        True
    """
    return end - now < min((end - begin) * _NEAR_END_SHARE, times.NEAR_END_SECS)


def shown_names(sock: ssl.SSLSocket) -> tuple[str, ...]:
    """Returns the names in the peer's certificate, in the form that gRPC reports.

    Args:
        sock: Socket after the handshake.
    """
    shown = sock.getpeercert() or {}
    return tuple(_plain(*entry) for entry in cast(Any, shown.get("subjectAltName", ())))


def _plain(kind: str, name: str) -> str:
    return str(ipaddress.ip_address(name.strip())) if kind == "IP Address" else name


def words(seconds: float) -> str:
    """Returns a time in words, in the largest unit that fits twice.

    Examples:
        >>> words(3 * 86400.0)
        '3 days'
    """
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    return next(
        f"{seconds / unit:.0f} {name}" for name, unit in units if seconds >= 2 * unit or unit == 1.0
    )


def _authorities(directory: Path) -> Path:
    for name in AUTHORITIES:
        if (directory / name).exists():
            return directory / name
    raise UnauthenticatedError(
        f"{directory} has no certificate of a CA ({', '.join(AUTHORITIES)}): `python -m "
        "harness.certs "
        f"--out={directory} --hosts=...` makes one"
    )


def _pairs(directory: Path) -> list[CertificatePair]:
    found = []
    for path in sorted(directory.iterdir()):
        if path.suffix not in _CERTIFICATES or path.name in AUTHORITIES:
            continue
        keys = [path.with_name(path.stem + ending) for ending in _KEYS]
        found += [
            CertificatePair(path, key) for key in keys if key.exists() and os.access(key, os.R_OK)
        ][:1]
    return found


def _names(pair: CertificatePair, host: str) -> bool:
    try:
        names = _about(pair.certificate.read_bytes())[2]
    except (OSError, ValueError):
        # The process that uses the pair reports the problem.
        return False
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return host.lower() in map(str.lower, names)


def _about(certificate: bytes) -> tuple[float, float, tuple[str, ...]]:
    """Returns begin, end (both seconds since the epoch) and names of a certificate in PEM."""
    # A process without certificates should not pay for the import of cryptography.
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
            raise UnauthenticatedError(
                f"others can read the key in {path}: chmod 600 it, and make another one"
            )
        return file.read()


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to be asked for the password")


def _date(unix_secs: float) -> str:
    return datetime.datetime.fromtimestamp(unix_secs, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
