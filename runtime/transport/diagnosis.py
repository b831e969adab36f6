"""Looks at the control plane of a task by connections of our own, because gRPC tells little of those that it makes.

Why a task that listens cannot be reached: one side speaks TLS and the other does not, or refuses a certificate. And
which certificate it shows.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from runtime.cluster.spec import split_address
from runtime.errors import InvalidArgumentError, UnauthenticatedError
from runtime.transport import addresses, http_proxy, security
from runtime.transport.certificates import Certificates, shown_names

LOOK_SECS: Final = 1.0
"""How long a look may take that nobody waits for."""
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins (RFC 9113, 3.4): a server answers it, or does not take the client."""
_LOOKS: Final = 2


class Look(NamedTuple):
    """What a look has found; nothing where nobody answers.

    Attributes:
        problem: why the task and we do not come together.
        certificate: that it has shown, as PEM.
        names: in the certificate.
        hung_up: it has hung up before it has shown one: it has no room for one more connection, or is just ending.
    """

    problem: str = ""
    certificate: bytes = b""
    names: tuple[str, ...] = ()
    hung_up: bool = False


def can_look(address: str) -> bool:
    """Whether connections to an address are ours to make: it is no name of gRPC's own, and no proxy makes them."""
    try:
        split_address(address)
    except InvalidArgumentError:
        return False
    return http_proxy.proxy() is None


def look_plainly(address: str) -> Look:
    """Looks at a task as one that has no certificate.

    Args:
        address: ``host:port``.
    """
    if not can_look(address):
        return Look()
    host, port = split_address(address)
    deadline = time.monotonic() + LOOK_SECS
    refused = _hangs_up(host, port, deadline) and _speaks_tls(host, port, deadline)
    return Look(security.speaks_tls()) if refused else Look()


def look(address: str, certificates: Certificates, secs: float = LOOK_SECS) -> Look:
    """Looks at a task as one that has a certificate.

    Args:
        address: ``host:port`` at which we can look.
        certificates: of this process.
        secs: how long it may take.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + secs
    found = Look()
    for _ in range(_LOOKS):  # a task that dies at this moment hangs up, too: once
        found = _look(host, port, certificates, deadline)
        if not (found.problem or found.hung_up):
            break
    return found


@contextlib.contextmanager
def _connected(host: str, port: int, deadline: float) -> Iterator[socket.socket]:
    found = addresses.look_up(host, port, deadline)
    with contextlib.ExitStack() as stack:

        def adopt(made: socket.socket) -> None:
            stack.callback(made.close)

        sock = addresses.connect(
            found, lambda address: socket.socket(address.family, address.kind, address.protocol), deadline, adopt
        )
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        yield sock


def _hangs_up(host: str, port: int, deadline: float) -> bool:
    """Whether a task hangs up on who does not speak TLS."""
    try:
        with _connected(host, port, deadline) as sock:
            sock.sendall(_GREETING)
            said = sock.recv(len(security.TLS_ALERT))
            return not said or security.TLS_ALERT.startswith(said)
    except ConnectionResetError:
        return True
    except OSError:
        return False


def _speaks_tls(host: str, port: int, deadline: float) -> bool:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    try:
        with _connected(host, port, deadline) as sock, anybody.wrap_socket(sock, server_hostname=host):
            return True
    except ssl.SSLError as error:
        return not isinstance(error, ssl.SSLEOFError) and error.reason != "WRONG_VERSION_NUMBER"
    except OSError:
        return False


def _look(host: str, port: int, certificates: Certificates, deadline: float) -> Look:
    """Whether a task and we take each other's certificates."""
    try:
        context = certificates.client_context()
    except UnauthenticatedError as error:
        return Look(error.message)
    try:
        with (
            _connected(host, port, deadline) as sock,
            context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False) as secure,
        ):
            try:
                secure.do_handshake()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError):
                return Look(hung_up=True)
            secure.sendall(_GREETING)
            # With TLS 1.3 a server looks at our certificate after the handshake, and gRPC's just hangs up then.
            if not secure.recv(1):
                return Look(security.refuses_us(certificates))
            shown = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
            return Look("", shown.encode(), shown_names(secure))
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
        return Look(security.refuses_us(certificates))
    except ssl.SSLError as error:
        return Look(security.no_handshake(error))
    except OSError:
        return Look()
