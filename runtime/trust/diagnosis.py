"""The diagnosis of a failed connection to a task that listens.

gRPC reports no reason for many failures: only one side speaks TLS, a certificate is refused, or
another task answers. After a failure, clients of both planes call `look`, which makes a connection
of its own and returns the reason.
"""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

from runtime import concurrency
from runtime.cluster import addresses, http_proxy
from runtime.cluster.spec import split_address
from runtime.errors import (
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from runtime.limits import VARIABLE
from runtime.trust import roles, security, times
from runtime.trust.certificates import Certificates, shown_names

_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Preface of an HTTP/2 client (RFC 9113, 3.4).

A server answers, or hangs up on a client that it refuses.
"""
_LOOKS = 2
NO_ROOM = (
    "it hangs up at once: it is just ending, or has as many connections as it may "
    "(--limit_connections, "
    f"Server(limits=), {VARIABLE})"
)
_STRANGER = "what answers in its place has a certificate that is not for this server"


class TaskLook(NamedTuple):
    """The result of a look at a task.

    Attributes:
        answered: True if a server listens and accepts connections.
        problem: Reason why this process cannot use the task; None if no reason was found.
    """

    answered: bool = False
    problem: OpError | None = None


def look(
    address: str, certificates: Certificates | None, task: str = "", secs: float = times.LOOK_SECS
) -> TaskLook:
    """Connects to a task as clients do, and returns the problem of the connection.

    Args:
        address: ``host:port`` of the task. Behind an HTTP proxy, and for a name known to gRPC only,
            no problem is found.
        certificates: Certificates of this process; None for a client without certificates.
        task: Expected task, such as "/job:ps/task:0"; empty for any task.
        secs: Most seconds for the look; `times.LOOK_SECS` at most without certificates.
    """
    try:
        host, port = split_address(address)
    except InvalidArgumentError:
        return TaskLook(answered=True)
    # gRPC connects by the proxy. A direct connection would test another path.
    if http_proxy.proxy() is not None:
        return TaskLook(answered=True)
    # A task without TLS does not answer a handshake, so the look would take all its time.
    deadline = concurrency.monotonic() + (
        min(secs, times.LOOK_SECS) if certificates is None else secs
    )
    if certificates is None:
        return TaskLook(
            True,
            UnauthenticatedError(security.speaks_tls())
            if _speaks_tls(host, port, deadline)
            else None,
        )
    found = TaskLook()
    # A task that dies at this moment hangs up as a full one does, but not on a second look.
    for _ in range(_LOOKS):
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
            found,
            lambda address: socket.socket(address.family, address.kind, address.protocol),
            deadline,
            adopt,
        )
        sock.settimeout(max(deadline - concurrency.monotonic(), 0.01))
        yield sock


def _speaks_tls(host: str, port: int, deadline: float) -> bool:
    # The look only asks for the protocol, so the certificate of the task does not matter.
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    anybody.set_alpn_protocols(["h2"])
    try:
        with (
            _connected(host, port, deadline) as sock,
            anybody.wrap_socket(sock, server_hostname=host),
        ):
            return True
    except ssl.SSLError as error:
        return not isinstance(error, ssl.SSLEOFError) and error.reason not in security.NOT_TLS
    except OSError:
        return False


def _look(host: str, port: int, certificates: Certificates, task: str, deadline: float) -> TaskLook:
    """Checks that a task and this process accept each other's certificates."""
    wanted = certificates.name_of(task)
    try:
        context = certificates.client_context()
        # The message shall name the certificate of a wrong task, so the handshake has to pass with
        # any name.
        if wanted:
            context = certificates.current.spectator
        with (
            _connected(host, port, deadline) as sock,
            context.wrap_socket(
                sock, server_hostname=wanted or host, do_handshake_on_connect=False
            ) as secure,
        ):
            try:
                secure.do_handshake()
            except (*security.CUT_TLS, ConnectionResetError, BrokenPipeError):
                return TaskLook(problem=UnavailableError(NO_ROOM))
            names = shown_names(secure)
            if wanted and not roles.has_name(names, wanted):
                text = f"{_STRANGER}: {roles.not_for_this_server(names, wanted)}"
                return TaskLook(True, PermissionDeniedError(text))
            secure.sendall(_GREETING)
            # With TLS 1.3 a server checks the client's certificate after the handshake. gRPC hangs
            # up without a reason.
            if not secure.recv(1):
                return TaskLook(True, UnauthenticatedError(security.refuses_us(certificates)))
            return TaskLook(True)
    except UnauthenticatedError as error:
        return TaskLook(True, error)
    # The handshake has passed, so the end of the connection is a refusal of the client's
    # certificate.
    except (*security.CUT_TLS, ConnectionResetError):
        return TaskLook(True, UnauthenticatedError(security.refuses_us(certificates)))
    except ssl.SSLError as error:
        return TaskLook(True, UnauthenticatedError(security.no_handshake(error)))
    except OSError:
        return TaskLook()
