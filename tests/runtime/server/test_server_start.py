"""The start of a server: what a port that is taken leaves behind, and addresses of IPv6."""

import contextlib
import pathlib
import socket
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import runtime as rt
from runtime.cluster.spec import split_address
from runtime.master import tasks
from tests.kit import certificates
from tests.kit.changes import SetVariables
from tests.runtime.kit import addresses

WAIT = rt.SessionConfig(start_timeout_secs=20)


def test_taken_data_port_leaves_nothing() -> None:
    """A data port in use is named, and nothing stays behind."""
    cluster = addresses(ps=1)
    (address,) = cluster["ps"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            rt.UnknownError, match=f"/job:ps/task:0.*data port {port}.*[Aa]ddress already in use"
        ) as caught:
            rt.Server(cluster, "ps", 0, data_port=port)
    assert tasks.find_local(address) is None
    with pytest.raises(rt.DeadlineExceededError, match="nobody listens"):
        rt.Session(f"grpc://{address}", config=rt.SessionConfig(start_timeout_secs=0.5))
    # both ports are free
    with rt.Server(cluster, "ps", 0, data_port=port) as server, rt.Graph().as_default():
        with rt.Session(server.target, config=WAIT) as session:
            assert session.run(rt.constant(7)) == 7
    assert caught.value.task == "/job:ps/task:0"  # the error lived on until here


def test_unstarted_server_returns_its_port() -> None:
    """A server that was never started gives its port back."""
    cluster = addresses(ps=1)
    waiting = rt.Server(cluster, "ps", 0, start=False)
    waiting.stop()
    rt.Server(cluster, "ps", 0).stop()


def test_server_without_socket_room_uses_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server without room for its Unix socket serves by TCP."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with rt.Server(addresses(ps=1), "ps", 0) as server:
        assert server.tensors.unix_path is None
        assert server.tensors.port


def test_unix_socket_is_optional() -> None:
    """A server may go without a Unix socket."""
    spec = addresses(ps=1, worker=1)
    with (
        rt.Graph().as_default(),
        rt.Server(spec, "ps", 0, unix_socket=False) as ps,
        rt.Server(spec, "worker", 0) as worker,
    ):
        assert (ps.tensors.unix_path, worker.tensors.unix_path is None) == (None, False)
        tasks.withdraw(ps.address, ps)  # over sockets, as from another process
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(np.arange(4.0, dtype=np.float32), name="v")
        with rt.Session(worker.target, config=WAIT) as session:
            session.run(v.initializer)
            assert session.run(v).tolist() == [0, 1, 2, 3]
        assert ps.tensors.counters.accepted


def _hosts() -> Iterator[str]:
    """The loopback address of IPv6 and one of another interface, where there are any."""
    for found in psutil.net_if_addrs().values():
        for address in found:
            if address.family == socket.AF_INET6 and not address.address.startswith("fe80"):
                with (
                    contextlib.suppress(OSError),
                    socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe,
                ):
                    probe.bind((address.address, 0))
                    yield address.address


HOSTS = sorted(set(_hosts()), key=lambda host: host != "::1")[:2]


@pytest.mark.skipif(not HOSTS, reason="this machine has no IPv6 address")
@pytest.mark.parametrize("sockets", [False, True], ids=["in process", "over sockets"])
@pytest.mark.parametrize("host", HOSTS)
def test_cluster_of_ipv6_addresses_works(
    host: str, sockets: bool, set_variables: SetVariables, tmp_path: pathlib.Path
) -> None:
    """A cluster of IPv6 addresses works in one process and over sockets."""
    set_variables(BELLWETHER_SECURITY=str(certificates.make(tmp_path / "certs", names=[host])))
    set_variables(BELLWETHER_FAST_PATH="0")  # no way around the tensor port
    ports = [split_address(address)[1] for address in addresses(any=2)["any"]]
    cluster = {"ps": [f"[{host}]:{ports[0]}"], "worker": [f"[{host}]:{ports[1]}"]}
    with (
        rt.Graph().as_default(),
        rt.Server(cluster, "ps", 0) as ps,
        rt.Server(cluster, "worker", 0) as worker,
    ):
        for server, address in ((ps, cluster["ps"][0]), (worker, cluster["worker"][0])):
            assert server.address == server.worker.store.run.environment.address() == address
            assert server.target == f"grpc://{address}"
            assert tasks.find_local(address) is server
            assert rt.probe(address).cluster == rt.ClusterSpec(cluster)
        if sockets:
            tasks.withdraw(ps.address, ps)
        with rt.device("/job:ps/task:0"):
            v = rt.Variable(np.arange(4.0, dtype=np.float32), name="v")
        with rt.Session(worker.target, config=WAIT) as session:
            session.run(v.initializer)
            assert session.run(v).tolist() == [0, 1, 2, 3]
        assert bool(ps.tensors.counters.accepted) == sockets


@pytest.mark.skipif("::1" not in HOSTS, reason="this machine has no IPv6 loopback")
def test_ipv6_loopback_stays_on_machine() -> None:
    """A server on the IPv6 loopback takes a free port and is reached by IPv6 from its machine only."""
    with rt.Server({"local": ["[::1]:0"]}, "local", 0) as server:
        host, port = split_address(server.address)
        assert (host, port > 0) == ("::1", True)
        for number in (port, server.tensors.port):
            with socket.create_connection(("::1", number), timeout=10):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", number), timeout=10)
