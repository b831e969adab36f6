"""The way by a proxy: what is asked of it and what its answers mean; whole clusters go by it in the fault tests."""

import socket
import time

import pytest

import runtime as rt
from runtime.cluster import http_proxy
from runtime.cluster.endpoint import Endpoint
from tests.kit.changes import SetVariables


@pytest.mark.parametrize("text", ["nowhere", ":80", "host:", "host:x"])
def test_proxy_is_host_and_port(text: str, set_variables: SetVariables) -> None:
    """A proxy that is not written as host:port is refused."""
    set_variables({http_proxy.PROXY_VARIABLE: text})
    with pytest.raises(rt.InvalidArgumentError, match="write it as host:port"):
        http_proxy.proxy()


def test_without_proxy_nothing_changes(set_variables: SetVariables) -> None:
    """No proxy and no option of gRPC is set if the variable is unset."""
    set_variables({http_proxy.PROXY_VARIABLE: None})
    assert http_proxy.proxy() is None
    assert http_proxy.grpc_options() == []


def ask(reply: bytes, secs: float = 5.0) -> bytes:
    """What the proxy is asked, when it answers with `reply`; and one byte more is left for the caller."""
    mine, its = socket.socketpair()
    with mine, its:
        its.sendall(reply)
        http_proxy.request_tunnel(mine, "there", 7, time.monotonic() + secs)
        assert mine.recv(10) == b"x"
        return its.recv(1000)


def test_tunnel_request_and_its_answers() -> None:
    """A tunnel asks with CONNECT, and refusals, silence and long headers become errors."""
    asked = ask(b"HTTP/1.1 200 Connected\r\nVia: me\r\n\r\nx")
    assert asked == b"CONNECT there:7 HTTP/1.1\r\nHost: there:7\r\n\r\n"
    with pytest.raises(ConnectionRefusedError, match="502 Nobody"):
        ask(b"HTTP/1.1 502 Nobody\r\n\r\nx")
    with pytest.raises(ConnectionRefusedError, match="the proxy says"):
        ask(b"\r\n\r\n")
    with pytest.raises(TimeoutError):
        ask(b"HTTP/1.1 200", secs=0.05)
    with pytest.raises(ConnectionResetError):
        ask(b"HTTP/1.1 200 " + b"x" * 5000)


def test_ipv6_addresses_have_brackets(
    set_variables: SetVariables,
) -> None:
    """An IPv6 address stands in brackets wherever a port follows."""
    mine, its = socket.socketpair()
    with mine, its:
        its.sendall(b"HTTP/1.1 200 Connected\r\n\r\nx")
        http_proxy.request_tunnel(mine, "fd00::7", 7, time.monotonic() + 5)
        assert its.recv(1000) == b"CONNECT [fd00::7]:7 HTTP/1.1\r\nHost: [fd00::7]:7\r\n\r\n"
    set_variables({http_proxy.PROXY_VARIABLE: "[::1]:3128"})
    assert http_proxy.proxy() == ("::1", 3128)
    assert ("grpc.http_proxy", "http://[::1]:3128") in http_proxy.grpc_options()
    assert str(Endpoint("fd00::7", 7, None, "", 1)) == "[fd00::7]:7"
