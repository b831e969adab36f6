"""The way to other tasks by an HTTP CONNECT proxy, for both planes.

Fault tests cut the proxy, and some firewalls ask for one.
"""

import os
import socket

from runtime import concurrency
from runtime.cluster.spec import join_address, split_address
from runtime.errors import InvalidArgumentError

PROXY_VARIABLE = "BELLWETHER_PROXY"
"""Name of an environment variable: ``host:port`` of an HTTP proxy by which this process reaches all other tasks."""
_MAX_ANSWER_BYTES = 4096


def proxy() -> tuple[str, int] | None:
    """Returns host and port of the proxy that the environment names, or None.

    Raises:
        InvalidArgumentError: The variable is not ``host:port``.
    """
    text = os.environ.get(PROXY_VARIABLE, "")
    if not text:
        return None
    try:
        return split_address(text)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"{PROXY_VARIABLE}={text}: write it as host:port") from None


def grpc_options() -> list[tuple[str, str | int]]:
    """Returns the channel options that make gRPC use the proxy.

    Empty without a proxy.
    """
    found = proxy()
    if found is None:
        return []
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{join_address(*found)}")]


def request_tunnel(sock: socket.socket, host: str, port: int, deadline: float) -> None:
    """Asks a proxy to connect a socket to ``host:port``.

    Args:
        sock: Socket connected to the proxy.
        host: Host of the task.
        port: Port of the task.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        ConnectionRefusedError: The proxy cannot reach the task.
        OSError: The connection broke, or the answer took too long.
    """
    # The plain methods: on a TLS socket these bytes come before the handshake.
    there = join_address(host, port)
    socket.socket.sendall(sock, f"CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
    answer = bytearray()
    while not answer.endswith(b"\r\n\r\n"):
        left = deadline - concurrency.monotonic()
        if left <= 0:
            raise TimeoutError("the proxy did not answer in time")
        sock.settimeout(left)
        # Byte by byte: the bytes after the answer belong to the task.
        byte = socket.socket.recv(sock, 1)
        if not byte or len(answer) > _MAX_ANSWER_BYTES:
            raise ConnectionResetError("the proxy closed the connection before it was made")
        answer += byte
    status = bytes(answer).split(None, 2)
    if len(status) < 2 or not status[1].startswith(b"2"):
        raise ConnectionRefusedError(
            f"the proxy says {bytes(answer[:60]).decode('ascii', 'replace').splitlines()[0]!r}"
        )
