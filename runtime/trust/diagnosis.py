"""Says why a task that listens cannot be reached, by a look after a connection has failed.

gRPC says little of connections that fail: one side speaks TLS and the other does not, a certificate is refused, or
another task answers. Both planes look here then, by a connection of their own.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from runtime.cluster.spec import split_address
from runtime.errors import (
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from runtime.limits import VARIABLE
from runtime.trust import roles, security
from runtime.trust.certificates import Certificates, shown_names
from runtime.wire import addresses, http_proxy

LOOK_SECS: Final = 1.0
"""How long a look may take that nobody waits for."""
_GREETING: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins (RFC 9113, 3.4): a server answers it, or does not take the client."""
_LOOKS: Final = 2
NO_ROOM: Final = (
    "it hangs up at once: it is just ending, or has as many connections as it may (--limit_connections, "
    f"Server(limits=), {VARIABLE})"
)
_STRANGER: Final = "what answers in its place has a certificate that is not for this server"


class Look(NamedTuple):
    """A look at a task.

    Attributes:
        answered: True if a server is there, and takes connections.
        problem: the error by which the task and this process do not come together; None where nothing is known.
    """

    answered: bool = False
    problem: OpError | None = None


def look(address: str, certificates: Certificates | None, task: str = "", secs: float = LOOK_SECS) -> Look:
    """Looks at a task as its clients see it.

    Args:
        address: ``host:port``; at another name, which gRPC alone knows, nothing is seen.
        certificates: of this process; None for a client without.
        task: that is to be there, such as "/job:ps/task:0"; empty where it may be any.
        secs: how long it may take.
    """
    try:
        host, port = split_address(address)
    except InvalidArgumentError:
        return Look(answered=True)
    if http_proxy.proxy() is not None:  # which makes the connections
        return Look(answered=True)
    # A task without TLS says nothing to a handshake.
    deadline = time.monotonic() + (min(secs, LOOK_SECS) if certificates is None else secs)
    if certificates is None:
        return Look(True, UnauthenticatedError(security.speaks_tls()) if _speaks_tls(host, port, deadline) else None)
    found = Look()
    for _ in range(_LOOKS):  # a task that dies at this moment hangs up, too: once
        found = _look(host, port, certificates, task, deadline)
        if not isinstance(found.problem, UnavailableError):
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


def _speaks_tls(host: str, port: int, deadline: float) -> bool:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    try:
        with _connected(host, port, deadline) as sock, anybody.wrap_socket(sock, server_hostname=host):
            return True
    except ssl.SSLError as error:
        return not isinstance(error, ssl.SSLEOFError) and error.reason not in security.NOT_TLS
    except OSError:
        return False


def _look(host: str, port: int, certificates: Certificates, task: str, deadline: float) -> Look:
    """Looks whether a task and this process take each other's certificates."""
    wanted = certificates.name_of(task)
    try:
        context = certificates.client_context()
        if wanted:
            context = certificates.current.spectator
        with (
            _connected(host, port, deadline) as sock,
            context.wrap_socket(sock, server_hostname=wanted or host, do_handshake_on_connect=False) as secure,
        ):
            try:
                secure.do_handshake()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError, BrokenPipeError):
                return Look(problem=UnavailableError(NO_ROOM))
            names = shown_names(secure)
            if wanted and not roles.has_name(names, wanted):
                text = f"{_STRANGER}: {roles.not_for_this_server(names, wanted)}"
                return Look(True, PermissionDeniedError(text))
            secure.sendall(_GREETING)
            # With TLS 1.3 a server looks at our certificate after the handshake, and gRPC's just hangs up then.
            if not secure.recv(1):
                return Look(True, UnauthenticatedError(security.refuses_us(certificates)))
            return Look(True)
    except UnauthenticatedError as error:
        return Look(True, error)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
        return Look(True, UnauthenticatedError(security.refuses_us(certificates)))
    except ssl.SSLError as error:
        return Look(True, UnauthenticatedError(security.no_handshake(error)))
    except OSError:
        return Look()
