"""A way to other tasks by an HTTP CONNECT proxy, for both planes: what fault tests cut, and some firewalls ask for."""

import os
import socket
import time

from runtime.cluster.spec import join_address, split_address
from runtime.errors import InvalidArgumentError

PROXY_VARIABLE = "BELLWETHER_PROXY"
"""Environment variable: ``host:port`` of an HTTP proxy by which this process reaches all other tasks."""
_MAX_ANSWER_BYTES = 4096


def proxy() -> tuple[str, int] | None:
    """Host and port of the proxy that the environment names, None without one.

    Raises:
        InvalidArgumentError: the variable is not ``host:port``.
    """
    text = os.environ.get(PROXY_VARIABLE, "")
    if not text:
        return None
    try:
        return split_address(text)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"{PROXY_VARIABLE}={text}: write it as host:port") from None


def grpc_options() -> list[tuple[str, str | int]]:
    """Channel options that make gRPC use the proxy; none without one."""
    found = proxy()
    if found is None:
        return []
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", f"http://{join_address(*found)}")]


def request_tunnel(sock: socket.socket, host: str, port: int, deadline: float) -> None:
    """Has the proxy at the other end of a connected socket connect it to ``host:port``.

    Args:
        sock: connected to the proxy.
        host: host of the task.
        port: its port.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        ConnectionRefusedError: the proxy cannot reach the task.
        OSError: the connection broke, or it took too long.
    """
    # The plain methods: on a TLS socket these bytes come before the handshake.
    there = join_address(host, port)
    socket.socket.sendall(sock, f"CONNECT {there} HTTP/1.1\r\nHost: {there}\r\n\r\n".encode())
    answer = bytearray()
    while not answer.endswith(b"\r\n\r\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the proxy did not answer in time")
        sock.settimeout(left)
        byte = socket.socket.recv(sock, 1)  # one by one: what comes after the answer is the task's
        if not byte or len(answer) > _MAX_ANSWER_BYTES:
            raise ConnectionResetError("the proxy closed the connection before it was made")
        answer += byte
    status = bytes(answer).split(None, 2)
    if len(status) < 2 or not status[1].startswith(b"2"):
        raise ConnectionRefusedError(
            f"the proxy says {bytes(answer[:60]).decode('ascii', 'replace').splitlines()[0]!r}"
        )
