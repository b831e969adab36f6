"""A server listens where the cluster says it is, at both of its ports, and nowhere else."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

import runtime as rt
from runtime.cluster.spec import ClusterSpec, TaskId, split_address
from runtime.master import tasks
from runtime.server.binding import BIND_VARIABLE, listen_on
from runtime.wire.connection import Handler, ServerContext
from runtime.wire.listener import TensorServer
from runtime.wire.reply_cache import LaneTable
from tests.kit.changes import SetVariables
from tests.kit.processes import ROOT
from tests.runtime import kit

NOBODY = "192.0.2.77"
"""An address for documentation (RFC 5737)."""


def _outer() -> Iterator[str]:
    """Addresses of this machine that others may reach."""
    for found in psutil.net_if_addrs().values():
        for address in found:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                yield address.address


OUTER = list(_outer())[:1]
Opened = Callable[[int], set[str]]


@pytest.fixture(autouse=True)
def insecure(set_variables: SetVariables) -> None:
    """Here it is about who can reach a server, not about whom it lets in."""
    set_variables(BELLWETHER_SECURITY="insecure")


def listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=30):
            return True
    except ConnectionRefusedError:
        return False


def listening() -> set[tuple[int, str, int]]:
    """What this process listens at: descriptor, address, port.

    Other processes may have the port at other addresses.
    """
    found = psutil.Process().net_connections("tcp")
    return {(c.fd, c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.fixture(autouse=True)
def opened() -> Opened:
    """The addresses at which this process listens at a port since the test began; servers of other tests may too."""
    before = listening()
    return lambda port: {
        ip.removeprefix("::ffff:") for _, ip, at in listening() - before if at == port
    }


def check(server: rt.Server, at: Sequence[str], opened: Opened, everywhere: bool = False) -> None:
    """Both ports of a server are reached at some addresses, and are open at no others."""
    for port in (split_address(server.address)[1], server.tensors.port):
        assert [host for host in at if not listens(host, port)] == []
        here = opened(port)
        expected = (
            {"0.0.0.0", "::"}
            if everywhere
            else {socket.gethostbyname(host) for host in at} | {"::1"}
        )
        assert here and here <= expected, here


def name(monkeypatch: pytest.MonkeyPatch, **names: Sequence[str]) -> None:
    """Gives addresses to names on this machine, as its file of names does."""
    ask = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host in names and not _numeric(arguments, options):
            return [entry for a in names[host] for entry in ask(a, port, *arguments, **options)]
        return ask(host, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def _numeric(arguments: Sequence[Any], options: dict[str, Any]) -> bool:
    return bool(
        options.get("flags", arguments[3] if len(arguments) > 3 else 0) & socket.AI_NUMERICHOST
    )


@pytest.mark.parametrize("host", [*OUTER, "127.0.0.3"])
def test_server_listens_at_own_address(host: str, opened: Opened) -> None:
    """A server listens at its own address only."""
    with rt.Server({"local": [f"{host}:0"]}, "local", 0) as server:
        check(server, [host], opened)
        with rt.Graph().as_default() as graph, rt.Session(server.target, graph) as sess:
            assert sess.run(rt.constant(5)) == 5


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_localhost_server_stays_on_machine(host: str, opened: Opened) -> None:
    """A server on localhost is reached from its own machine only."""
    with rt.Server({"local": [f"{host}:0"]}, "local", 0) as server:
        check(server, ["127.0.0.1", "localhost"], opened)


def test_loopback_names_stay_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name of the loopback makes no server listen on all interfaces."""
    name(
        monkeypatch,
        **{"ip6-localhost": ["::1"], "a.localhost": ["127.0.0.1", "::1"], "me": ["127.0.1.1"]},
    )
    others = {"worker": ["elsewhere:1"]}
    for host, wanted in (("ip6-localhost", ("::1",)), ("a.localhost", ("127.0.0.1", "::1"))):
        spec = ClusterSpec({"ps": [f"{host}:5"], **others})
        try:
            assert listen_on(spec, TaskId("ps", 0)) == wanted
        except rt.InvalidArgumentError:
            pytest.skip("this machine has no IPv6")
    one_host = ClusterSpec({"ps": ["me:5"], "worker": ["me:6"]})
    assert listen_on(one_host, TaskId("ps", 0)) == ("127.0.1.1",)


def test_loopback_host_listens_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, opened: Opened
) -> None:
    """A host whose name is a loopback address listens on all interfaces and warns, if other hosts
    belong to the cluster.
    """
    name(monkeypatch, me=["127.0.1.1"])
    caplog.set_level(logging.WARNING)
    with rt.Server({"ps": ["me:0"], "worker": ["elsewhere:1"]}, "ps", 0) as server:
        check(server, ["127.0.0.1", "127.0.1.1", *OUTER], opened, everywhere=True)
    (line,) = [r.getMessage() for r in caplog.records if "all interfaces" in r.getMessage()]
    assert "me is 127.0.1.1" in line and "bind" in line and BIND_VARIABLE in line


def test_name_listens_at_its_local_addresses(
    monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    """A server whose name has several addresses listens at those of its machine."""
    name(monkeypatch, me=["127.0.0.5", NOBODY, "127.0.0.6"])
    (port,) = {split_address(a)[1] for a in kit.addresses(ps=1)["ps"]}
    with rt.Server({"ps": [f"me:{port}"]}, "ps", 0) as server:
        check(server, ["127.0.0.5", "127.0.0.6"], opened)


def test_foreign_address_names_way_out() -> None:
    """An address of another machine is refused with the argument that helps."""
    cluster = {"ps": [f"{NOBODY}:2222"]}
    with pytest.raises(
        rt.InvalidArgumentError,
        match=rf"{NOBODY} is no address of this machine.*bind=.*{BIND_VARIABLE}",
    ):
        rt.Server(cluster, "ps", 0)
    with pytest.raises(
        rt.InvalidArgumentError, match=r"no\.such\.host\.invalid cannot be listened on.*bind="
    ):
        rt.Server({"ps": ["no.such.host.invalid:2222"]}, "ps", 0)


def test_foreign_name_tells_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name of another machine is refused with its address."""
    name(monkeypatch, them=[NOBODY])
    with pytest.raises(
        rt.InvalidArgumentError, match=f"them is {NOBODY}, which is not this machine"
    ):
        rt.Server({"ps": ["them:2222"]}, "ps", 0)


@pytest.mark.parametrize("said", ["argument", "environment"])
def test_bind_chooses_the_address(said: str, set_variables: SetVariables, opened: Opened) -> None:
    """A server listens where its argument or environment says, and keeps the cluster's address."""
    (port,) = {split_address(a)[1] for a in kit.addresses(ps=1)["ps"]}
    if said == "environment":
        set_variables({BIND_VARIABLE: "127.0.0.3"})
    with rt.Server(
        {"ps": [f"{NOBODY}:{port}"]}, "ps", 0, bind="127.0.0.3" if said == "argument" else None
    ) as server:
        assert server.address == f"{NOBODY}:{port}"
        check(server, ["127.0.0.3"], opened)
    with pytest.raises(rt.InvalidArgumentError, match=NOBODY):
        rt.Server(kit.addresses(ps=1), "ps", 0, bind=NOBODY)


def test_all_interfaces_need_a_request(opened: Opened) -> None:
    """A server listens on all interfaces if it is asked to."""
    with rt.Server({"local": ["127.0.0.1:0"]}, "local", 0, bind="0.0.0.0") as server:
        check(server, ["127.0.0.1", "127.0.0.9", *OUTER], opened, everywhere=True)


@pytest.mark.skipif(not OUTER, reason="this machine has the loopback only")
def test_tasks_of_two_interfaces_train() -> None:
    """Tasks at the addresses of two interfaces train together."""
    ports = [split_address(a)[1] for a in kit.addresses(any=2)["any"]]
    cluster = {"ps": [f"{OUTER[0]}:{ports[0]}"], "worker": [f"127.0.0.3:{ports[1]}"]}
    with rt.Server(cluster, "ps", 0) as ps, rt.Server(cluster, "worker", 0) as worker:
        tasks.withdraw(ps.address, ps)
        with rt.Graph().as_default() as graph, rt.Session(worker.target, graph) as sess:
            with rt.device("/job:ps/task:0"):
                w = rt.Variable(np.zeros(3, np.float32), name="w")
            sess.run(rt.global_variables_initializer())
            assert sess.run(w.assign_add(np.ones(3, np.float32))).tolist() == [1.0] * 3


class _Echo(Handler):
    def input_layout(self, handle: int) -> None:
        return None

    def call(self, handle: int, client: int, step: int, inputs: Any) -> Any:
        raise NotImplementedError


def _context() -> ServerContext:
    return ServerContext(handler=_Echo(), key=None, incarnation=1, lanes=LaneTable())


def test_several_addresses_share_one_free_port(opened: Opened) -> None:
    """The addresses of a server share one free port."""
    hosts = ["127.0.0.5", "127.0.0.6", "127.0.0.7"]
    server = TensorServer(_context(), hosts=hosts, unix=False)
    server.start()
    try:
        assert all(listens(host, server.port) for host in hosts) and opened(server.port) == set(
            hosts
        )
    finally:
        server.stop()


def test_taken_port_leaves_none_open(opened: Opened) -> None:
    """A port that is taken at one address leaves no other address open."""
    with socket.create_server(("127.0.0.6", 0)) as taken:
        port = taken.getsockname()[1]
        server = TensorServer(_context(), hosts=["127.0.0.5", "127.0.0.6"], port=port)
        with pytest.raises(OSError, match="in use"):
            server.start()
        assert opened(port) == {"127.0.0.6"}


@pytest.mark.cluster
def test_environment_binds_any_program() -> None:
    """The environment chooses the address of a program that says nothing of it."""
    program = (
        f"import runtime as rt\nwith rt.Server({{'local': ['{NOBODY}:0']}}, 'local', 0) as s: "
        "print(s.listens_on)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, BIND_VARIABLE: "127.0.0.1"},
    )
    assert done.stdout.strip() == "('127.0.0.1',)"
