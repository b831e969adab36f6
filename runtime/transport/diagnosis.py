"""Why a task that listens cannot be reached: one side speaks TLS and the other does not, or refuses a certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Final

from runtime.cluster.spec import split_address
from runtime.errors import InvalidArgumentError, UnauthenticatedError
from runtime.transport import addresses, http_proxy, security
from runtime.transport.certificates import Certificates

LOOK_SECS: Final = 1.0
"""How long one look may take."""
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins (RFC 9113, 3.4): a server answers it, or does not take the client."""
_LOOKS: Final = 2


def problem(address: str, certificates: Certificates | None) -> str | None:
    """Looks at the control plane of a task by a connection of its own.

    Args:
        address: ``host:port``.
        certificates: of this process; None where it has none.

    Returns:
        Why it and we do not come together; None when they do, or when nobody answers.
    """
    if http_proxy.proxy() is not None:
        return None  # whose connections are not ours to make
    try:
        host, port = split_address(address)
    except InvalidArgumentError:
        return None  # a name of gRPC's own
    deadline = time.monotonic() + LOOK_SECS
    if certificates is None:
        return security.speaks_tls() if _hangs_up(host, port, deadline) and _speaks_tls(host, port, deadline) else None
    # A task that dies at this moment hangs up, too: once.
    looks = [_refuses(host, port, certificates, deadline) for _ in range(_LOOKS)]
    return looks[-1] if all(looks) else None


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


def _refuses(host: str, port: int, certificates: Certificates, deadline: float) -> str | None:
    """Why a task and we refuse each other's certificates; None when they are good, or nobody answers."""
    try:
        context = certificates.client_context()
    except UnauthenticatedError as error:
        return error.message
    try:
        with _connected(host, port, deadline) as sock, context.wrap_socket(sock, server_hostname=host) as secure:
            secure.sendall(_GREETING)
            # With TLS 1.3 a server looks at our certificate after the handshake, and gRPC's just hangs up then.
            return None if secure.recv(1) else security.refuses_us(certificates)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
        return security.refuses_us(certificates)
    except ssl.SSLError as error:
        return security.no_handshake(error)
    except OSError:
        return None
