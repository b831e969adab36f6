"""Names with several addresses: one that swallows packets, one that refuses, a name server that does not answer."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from runtime import timeouts
from runtime.cluster.endpoint import Endpoint
from runtime.errors import CancelledError, UnavailableError
from runtime.trust.certificates import Certificates
from runtime.wire.dial import ChannelOptions
from runtime.wire.listener import TensorServer
from runtime.wire.peer import Peer
from tests.kit.certificates import make
from tests.kit.changes import SetTimes
from tests.runtime.wire import kit
from tests.runtime.wire.kit import make_peer, make_server

pytestmark = pytest.mark.usefixtures("no_open_ends")

NAME = "two-addresses.test"
TCP = ChannelOptions(prefer_unix=False)


@contextlib.contextmanager
def black_hole() -> Iterator[tuple[str, int]]:
    """An address to which connections are never made: the kernel drops first packets while an accept queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        while True:
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.3)
            try:
                filler.connect(address)
            except TimeoutError:
                break
        yield address


@contextlib.contextmanager
def refusing() -> Iterator[tuple[str, int]]:
    """An address at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


def resolved_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """Makes the name server say that the name has these addresses, in this order."""
    ask = socket.getaddrinfo

    def answer(host: Any, *args: Any, flags: int = 0, **kwargs: Any) -> Sequence[Any]:
        if host != NAME or flags & socket.AI_NUMERICHOST:
            return ask(host, *args, flags=flags, **kwargs)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address)
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def endpoint(server: TensorServer) -> Endpoint:
    return server.endpoint(NAME)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_silent_address_does_not_hide_next(
    tls: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, set_times: SetTimes
) -> None:
    """A client reaches the second address of a name when the first one swallows packets."""
    certificates = Certificates(make(tmp_path / "certs", names=[NAME])) if tls else None
    server, _ = make_server(tls=certificates and certificates.server_context)
    set_times(timeouts, ATTEMPT_SECS=7200.0)
    with black_hole() as first:
        resolved_to(monkeypatch, first, ("127.0.0.1", server.port))
        peer = make_peer(lambda timeout: endpoint(server), options=TCP, certificates=certificates)
        lane = peer.acquire()  # by the first attempt: a second one would come hours later
        assert lane.call(kit.SUM, 1, [], kit.NUMBER) == [0]
        peer.release(lane)
        peer.close()
    server.stop()


def test_refusing_address_is_passed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client goes to the second address of a name when the first one refuses."""
    server, _ = make_server()
    with refusing() as first:
        resolved_to(monkeypatch, first, ("127.0.0.1", server.port))
        peer = make_peer(lambda timeout: endpoint(server), options=TCP)
        peer.release(peer.acquire())
        peer.close()
    server.stop()


def test_refusal_beside_silence_resolves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client asks again where the task is when one address refuses and the other is silent."""
    server, _ = make_server()
    asked: list[float] = []

    def resolve(timeout: float) -> Endpoint:
        asked.append(timeout)
        found = endpoint(server)
        return Endpoint(
            NAME if len(asked) == 1 else "127.0.0.1",
            found.port,
            None,
            found.host_id,
            found.incarnation,
        )

    with black_hole() as first, refusing() as second:
        resolved_to(monkeypatch, first, second)
        peer = make_peer(resolve, options=TCP)
        peer.release(peer.acquire())
        assert len(asked) == 2
        peer.close()
    server.stop()


def _acquired(peer: Peer, errors: list[BaseException]) -> threading.Thread:
    def acquire() -> None:
        try:
            peer.acquire()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    return thread


def test_close_ends_connect_to_silent_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing a peer cancels a connect to several silent addresses."""
    with black_hole() as first, black_hole() as second:
        resolved_to(monkeypatch, first, second)
        there = Endpoint(NAME, first[1], None, "", 1)
        began = threading.Event()
        peer = make_peer(
            lambda timeout: (began.set(), there)[1], options=ChannelOptions(reconnect_secs=60)
        )
        errors: list[BaseException] = []
        thread = _acquired(peer, errors)
        assert began.wait(60)
        peer.close()
        thread.join(60)
        assert [type(error) for error in errors] == [CancelledError]


def test_silent_name_server_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call ends after reconnect_secs while the name server is silent, and all attempts share one
    look-up.
    """
    ask, over = socket.getaddrinfo, threading.Event()
    asked: list[str] = []

    def silent(host: Any, *args: Any, flags: int = 0, **kwargs: Any) -> Sequence[Any]:
        if host != NAME or flags & socket.AI_NUMERICHOST:
            return ask(host, *args, flags=flags, **kwargs)
        asked.append(host)
        assert over.wait(60)
        return ask("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    server, _ = make_server()
    options = ChannelOptions(prefer_unix=False, reconnect_secs=1.0)
    peer = make_peer(lambda timeout: endpoint(server), options=options)
    errors: list[BaseException] = []
    thread = _acquired(peer, errors)
    thread.join(100)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [UnavailableError]
    assert f"no address of {NAME}" in str(errors[0])
    assert len(asked) == 1  # the attempts wait for one look-up
    over.set()
    peer.release(peer.acquire())
    peer.close()
    server.stop()


CLUSTER = """
import sys, time, numpy as np, runtime as rt
from runtime.master import tasks
cluster = {"ps": ["dual:7001"], "worker": ["dual:7002"]}
with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 0) as worker:
    tasks.withdraw(ps.address, ps)  # as if it were in another process
    with rt.device("/job:ps/task:0"):
        v = rt.Variable(np.arange(4.0), name="v")
    config = rt.SessionConfig(start_timeout_secs=60, reconnect_secs=8)
    with rt.Session(worker.target, config=config) as session:
        session.run(v.initializer)
        print("VALUES", session.run(v).tolist())
"""
SWALLOW = (
    "ip link set lo up && ip link add hole type veth peer name gone && ip addr add 10.98.0.1/24 "
    "dev hole && "
    "ip -6 addr add 2001:db8::2/64 dev hole nodad && ip link set hole up && ip link set gone up && "
    "ip -6 neigh add 2001:db8::1 lladdr 02:00:00:00:00:01 dev hole && mount --bind {hosts} "
    "/etc/hosts"
)


def _possible() -> bool:
    command = ["unshare", "-rnm", "sh", "-c", SWALLOW.format(hosts="/etc/hosts")]
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.cluster
@pytest.mark.skipif(
    not _possible(),
    reason="needs unshare and ip, and the right to make namespaces with IPv6 in them",
)
def test_session_passes_silent_ipv6_address(tmp_path: Any) -> None:
    """A session reaches by IPv4 a host whose IPv6 address comes first and does not answer."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n2001:db8::1 dual\n10.98.0.1 dual\n")
    command = ["unshare", "-rnm", "sh", "-c", SWALLOW.format(hosts=hosts) + ' && exec "$0" -c "$1"']
    done = subprocess.run(
        [*command, sys.executable, CLUSTER],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "BELLWETHER_FAST_PATH": "0",
            "BELLWETHER_SECURITY": "insecure",
        },
    )
    assert "VALUES [0.0, 1.0, 2.0, 3.0]" in done.stdout, done.stdout + done.stderr[-4000:]
