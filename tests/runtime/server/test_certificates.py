"""Off the loopback by certificates: who shows none of the CA is refused at each port, and training does not notice.

Real sockets and real certificates; strangers are clients of ours with other certificates, and
Python's ssl module.
"""

import contextlib
import os
import pathlib
import re
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import runtime as rt
from harness.certs import CA
from harness.monitoring import status
from harness.monitoring.prometheus import MetricsServer
from runtime.cluster.endpoint import Endpoint
from runtime.cluster.spec import split_address
from runtime.concurrency import every
from runtime.master import tasks
from runtime.server import times
from runtime.trust.certificates import Certificates
from runtime.trust.security import VARIABLE, Security
from runtime.wire.peer import Peer
from tests.kit import certificates
from tests.kit.changes import SetTimes, SetVariables
from tests.kit.processes import ROOT
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.server.kit import (
    PORTS,
    PS,
    Training,
    answer,
    context_of,
    figures,
    forget_refusals,
    told,
)
from tests.runtime.wire.kit import is_unix

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def authority() -> CA:
    return CA.make()


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, authority: CA) -> Iterator[Training]:
    before = os.environ.pop(VARIABLE, None)
    made = Training(
        Security(
            certificates=certificates.make(tmp_path_factory.mktemp("certs") / "certs", authority)
        )
    )
    try:
        yield made
        made.close()
    finally:
        made.stack.close()
        if before is not None:
            os.environ[VARIABLE] = before


# -- strangers -------------------------------------------------------------------------------------------------


def strangers(kind: str, tmp_path: pathlib.Path, authority: CA) -> Security | None:
    """What a client of a kind has; None for one without anything."""
    other = CA.make()
    match kind:
        case "plain":
            return Security.insecure()
        case "token":
            path = tmp_path / "token"
            path.touch(mode=0o600)
            path.write_text("ab" * 32)
            return Security(path)
        case "knows another CA":
            return Security(certificates=certificates.make(tmp_path / "c", other))
        case "of another CA":
            certificates.write(tmp_path / "c", "here", other, certificates.pair_of(other))
            (tmp_path / "c" / "ca.pem").write_bytes(authority.pem()[1])
            return Security(certificates=tmp_path / "c")
    raise AssertionError(kind)


REFUSED = {
    "plain": "it speaks TLS and this process has no certificate: set BELLWETHER_SECURITY",
    "token": "it speaks TLS and this process has no certificate: set BELLWETHER_SECURITY",
    "knows another CA": "its certificate is of another CA: give both sides the same ca.pem",
    "of another CA": "it does not (take|know)|does not know the CA",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_client_is_refused_with_reason(
    training: Training, kind: str, tmp_path: pathlib.Path, authority: CA
) -> None:
    """A client with a bad certificate is refused at once and in one line with the reason."""
    given = strangers(kind, tmp_path, authority)
    with pytest.raises(rt.UnauthenticatedError, match=REFUSED[kind]) as caught:
        rt.probe(training.ps.address, 30, security=given)
    assert "\n" not in str(caught.value) and training.ps.address in str(caught.value)
    # at once, not after a time limit
    with pytest.raises(rt.UnauthenticatedError, match=REFUSED[kind]):
        rt.Session(training.worker.target, security=given)
    training.goes_on()


@pytest.mark.parametrize("kind", REFUSED)
def test_lane_is_refused_with_reason(
    training: Training,
    kind: str,
    tmp_path: pathlib.Path,
    authority: CA,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lane with a bad certificate is refused with the reason, and the server logs the refusal."""
    given = strangers(kind, tmp_path, authority)
    assert given is not None
    held = given.tls()
    forget_refusals(training.ps)
    lanes = training.ps.tensors.counters.lanes
    peer = Peer(
        PS,
        lambda timeout: training.endpoint("tcp"),
        7,
        lambda timeout: None,
        certificates=held,
    )
    expected = (
        "our CA|CA of our certificate|not good there" if kind == "of another CA" else REFUSED[kind]
    )
    with pytest.raises(rt.UnauthenticatedError, match=expected):
        peer.acquire()
    peer.close()
    until(lambda: bool(told(caplog, f"{PS} refuses a client at 127.0.0.1: .*tensors")))
    assert training.ps.tensors.counters.lanes == lanes
    training.goes_on()


@pytest.mark.parametrize("way", PORTS)
def test_early_certificate_is_refused(
    training: Training, way: str, tmp_path: pathlib.Path, authority: CA
) -> None:
    """A certificate that is not yet valid is refused at every port."""
    early, good = certificates.pair_of(authority, begins=3600), certificates.pair_of(authority)
    assert answer(training, way, context_of(authority, early, tmp_path)) == b""
    assert answer(training, way, context_of(authority, good, tmp_path)) != b""


@pytest.mark.parametrize("way", PORTS)
@pytest.mark.parametrize(
    "version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
)
@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
def test_tls_has_a_least_version(
    training: Training, way: str, version: ssl.TLSVersion, tmp_path: pathlib.Path, authority: CA
) -> None:
    """A port speaks TLS 1.2 and later, and nothing before."""
    context = context_of(authority, certificates.pair_of(authority), tmp_path)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    assert bool(answer(training, way, context)) == (version >= ssl.TLSVersion.TLSv1_2)


def test_unix_socket_stays_plain(training: Training) -> None:
    """The Unix socket serves the same user without TLS."""
    peer = Peer(PS, lambda timeout: training.endpoint("unix"), 7, lambda timeout: None)
    lane = peer.acquire()
    assert is_unix(lane)
    peer.release(lane)
    peer.close()


def test_figures_need_a_certificate(
    training: Training, tmp_path: pathlib.Path, authority: CA
) -> None:
    """The figures are shown to clients with a certificate only."""
    held = training.security.of_host("127.0.0.1").tls()
    assert held is not None
    shown = figures(training, held.client_context())
    assert "bellwether_certificate_left_seconds" in shown and "bellwether_insecure" not in shown
    with pytest.raises(OSError):
        figures(training, None)
    with pytest.raises(OSError):
        figures(training, context_of(authority, None, tmp_path))


# -- servers that a client does not take -----------------------------------------------------------------------


IMPOSTORS: dict[str, tuple[Callable[[CA], tuple[bytes, bytes]], str]] = {
    "of another CA": (
        lambda authority: certificates.pair_of(CA.make()),
        "its certificate is of another CA",
    ),
    "that has ended": (
        lambda authority: certificates.pair_of(authority, begins=-9, ends=-1),
        "certificate has ended",
    ),
    "of another name": (
        lambda authority: certificates.pair_of(authority, ["ps1"]),
        "not good here .*mismatch",
    ),
}


@pytest.mark.parametrize("way", ["grpc", "tensors"])
@pytest.mark.parametrize("kind", [*IMPOSTORS, "without TLS"])
def test_client_takes_its_server_only(
    kind: str, way: str, tmp_path: pathlib.Path, authority: CA
) -> None:
    """A client refuses a server that is not the one it means, and sends nothing to such a server."""
    make, message = IMPOSTORS.get(kind, (None, "it does not speak TLS"))
    context = None
    if make is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = make(authority)
        (tmp_path / "key").write_bytes(pair[0])
        (tmp_path / "pem").write_bytes(pair[1])
        context.load_cert_chain(tmp_path / "pem", tmp_path / "key")
        context.set_alpn_protocols(["h2"])
    heard: list[bytes] = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)

        def serve() -> None:
            while not over.is_set():
                # ssl.SSLError is one: the client has not taken us
                with contextlib.suppress(OSError):
                    sock, _ = listening.accept()
                    with sock:
                        sock.settimeout(10)
                        if context is None:
                            sock.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # as HTTP/2 servers do
                            sock.recv(1000)
                        else:
                            with context.wrap_socket(sock, server_side=True) as secure:
                                heard.append(secure.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        security = Security(certificates=certificates.make(tmp_path / "ours", authority))
        held = security.tls()
        assert held is not None
        try:
            with pytest.raises(rt.UnauthenticatedError, match=message):
                if way == "grpc":
                    rt.probe(address, 30, security=security)
                else:
                    there = Endpoint("127.0.0.1", listening.getsockname()[1], None, "", 77)
                    peer = Peer(
                        PS, lambda timeout: there, 7, lambda timeout: None, certificates=held
                    )
                    try:
                        peer.acquire()
                    finally:
                        peer.close()
        finally:
            over.set()
            thread.join(60)
    assert [said for said in heard if said] == []  # nobody told it anything


def test_absent_task_stays_unavailable(
    tmp_path: pathlib.Path,
) -> None:
    """A task that is gone is UnavailableError, whatever security the client has."""
    (address,) = kit.addresses(ps=1)["ps"]
    security = Security(certificates=certificates.make(tmp_path / "certs"))
    for given in (security, None):
        with pytest.raises(rt.UnavailableError):
            rt.probe(address, 30, security=given)


# -- starting --------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_said(set_variables: SetVariables) -> None:
    set_variables({VARIABLE: None})


@pytest.mark.usefixtures("nothing_said")
def test_public_server_needs_security() -> None:
    """A server off the loopback does not start unless its security is said."""
    with pytest.raises(rt.InvalidArgumentError) as caught:
        rt.Server(kit.addresses(local=1), "local", 0, bind="0.0.0.0")
    said = str(caught.value)
    assert "\n" not in said and "/job:local/task:0" in said and "0.0.0.0" in said
    assert "python -m harness.certs" in said and "insecure" in said and VARIABLE in said


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("said", ["in code", "environment"])
def test_insecure_server_says_so(
    said: str,
    set_variables: SetVariables,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An insecure server starts and warns each time, and its status says so."""
    security = Security.insecure() if said == "in code" else None
    if said == "environment":
        set_variables({VARIABLE: "insecure"})
    for round in range(1, 3):
        with rt.Server(
            kit.addresses(local=1), "local", 0, bind="0.0.0.0", security=security
        ) as server:
            tasks.withdraw(server.address, server)
            assert status.main([f"--target={server.address}", "--interval=0.01"]) == 0
        assert ", insecure" in capsys.readouterr().out
        assert (
            len(told(caplog, "/job:local/task:0 is insecure: whoever reaches its ports")) == round
        )


@pytest.mark.usefixtures("nothing_said")
@pytest.mark.parametrize("said", ["directory", "token"])
def test_status_flag_gives_security(
    said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag --security of the status command gives the certificates or token that the server
    wants.
    """
    if said == "directory":
        given = certificates.make(tmp_path / "given")
    else:
        given = tmp_path / "given"
        given.touch(mode=0o600)
        given.write_text("cd" * 32)
    with rt.Server(
        kit.addresses(local=1), "local", 0, bind="0.0.0.0", security=Security.from_text(str(given))
    ) as server:
        kit.set_apart(server)
        assert (
            status.main([f"--target={server.address}", "--interval=0.01", f"--security={given}"])
            == 0
        )
        assert "up" in capsys.readouterr().out
        assert status.main([f"--target={server.address}", "--interval=0.01"]) == 2
        assert f"set {VARIABLE}" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_said")
def test_process_uses_its_servers_security(tmp_path: pathlib.Path) -> None:
    """A process without security of its own uses that of its server."""
    with rt.Server(
        kit.addresses(local=1),
        "local",
        0,
        security=Security(certificates=certificates.make(tmp_path / "certs")),
    ) as server:
        tasks.withdraw(server.address, server)
        assert rt.probe(server.address, 30).task == "/job:local/task:0"
        address = server.address
    with rt.Server({"local": [address]}, "local", 0) as server:  # a token that is found again
        tasks.withdraw(server.address, server)
        assert rt.probe(server.address, 30).task == "/job:local/task:0"


@pytest.mark.usefixtures("nothing_said")
def test_figures_token_is_derived(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bearer token of figures is derived from the token, as the documentation says, and is the
    only one allowed.
    """
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("cd" * 32)
    security = Security(path)
    bearer = security.bearer()
    assert bearer is not None and "cdcd" not in bearer
    (line,) = re.findall(
        r"^ *(printf metrics \| .*)> bearer", (ROOT / "docs/security.md").read_text(), re.M
    )
    made = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert made.stdout.strip() == bearer
    with rt.Server(kit.addresses(local=1), "local", 0, security=security) as server:
        with MetricsServer(server, 0, "0.0.0.0") as endpoint:
            url = f"http://127.0.0.1:{endpoint.port}/metrics"

            def ask(shown: str) -> str:
                request = urllib.request.Request(
                    url, headers={"Authorization": shown} if shown else {}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return str(answer.read().decode())

            assert "bellwether_started_unix_secs" in ask(f"Bearer {bearer}")
            for shown in (
                "",
                "Bearer",
                f"Bearer {'cd' * 32}",
                f"Basic {bearer}",
                f"Bearer {bearer}0",
                "Bearer \xff",
            ):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    ask(shown)
                assert caught.value.code == 401
                caught.value.close()
    assert told(
        caplog, r"refuses a client at 127.0.0.1: it has not shown the bearer token .*\(metrics\)"
    )


# -- the end of a certificate ----------------------------------------------------------------------------------


def test_ended_certificate_starts_no_server(tmp_path: pathlib.Path) -> None:
    """A server whose certificate has ended does not start and says what to do."""
    directory = certificates.make(tmp_path / "certs", begins=-7200, ends=-1)
    with pytest.raises(
        rt.UnauthenticatedError, match=r"here\.pem has ended, 20.* UTC: replace it.*--renew"
    ) as caught:
        rt.Server(kit.addresses(local=1), "local", 0, security=Security(certificates=directory))
    assert "\n" not in str(caught.value)


def test_near_end_is_logged_and_shown(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The near end of a certificate is in the log and in the status."""
    directory = certificates.make(tmp_path / "certs", begins=-3600 * 24 * 200, ends=3600 * 24 * 3)
    security = Security(certificates=directory)
    with rt.Server(kit.addresses(local=1), "local", 0, security=security) as server:
        tasks.withdraw(server.address, server)
        until(
            lambda: bool(
                told(caplog, r"/job:local/task:0: the certificate .*here\.pem ends in 3 days")
            )
        )
        assert status.main([f"--target={server.address}", "--interval=0.01"]) == 0
        assert re.search(r"certificate ends in 7[12]h\d\dm", capsys.readouterr().out)


def test_client_learns_of_ended_certificate(training: Training, tmp_path: pathlib.Path) -> None:
    """A client whose own certificate has ended is told so."""
    directory = certificates.make(tmp_path / "certs", begins=-7200, ends=-1)
    with pytest.raises(rt.UnauthenticatedError, match="has ended"):
        rt.probe(training.ps.address, security=Security(certificates=directory))


# -- rotation --------------------------------------------------------------------------------------------------


def shown_serial(port: int, directory: pathlib.Path, tmp_path: pathlib.Path) -> int:
    """The serial number of the certificate that a new connection to a port is shown."""
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(directory / "here.pem", directory / "here.key")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
        context.wrap_socket(sock) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def serial(directory: pathlib.Path) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate((directory / "here.pem").read_bytes()).serial_number


ROUNDS = 10


def test_replaced_certificates_cost_no_step(
    tmp_path: pathlib.Path, set_variables: SetVariables, authority: CA
) -> None:
    """Certificates and their CA that are replaced during training cost no step."""
    set_variables(BELLWETHER_FAST_PATH="0")
    set_variables({VARIABLE: None})
    directory = certificates.make(tmp_path / "certs", authority)
    new = CA.make()
    training = Training(Security(certificates=directory))
    serials = set()
    try:
        for round in range(ROUNDS):
            signer = authority if round < ROUNDS // 2 else new
            trusted = authority.pem()[1] + new.pem()[1] if round < ROUNDS - 1 else new.pem()[1]
            for name, content in zip(
                ("ca.pem", "here.key", "here.pem"),
                (trusted, *certificates.pair_of(signer)),
                strict=True,
            ):
                fresh = tmp_path / name
                fresh.touch(mode=0o600)
                fresh.write_bytes(content)
                os.replace(fresh, directory / name)
                training.goes_on(3)  # with half of it replaced, too
            for port in (
                split_address(training.ps.address)[1],
                training.ps.tensors.port,
                training.metrics.port,
            ):
                assert shown_serial(port, directory, tmp_path) == serial(directory)
            serials.add(serial(directory))
            # they must connect again, by what the files hold now
            for lane in lanes_to(training.worker):
                lane.link.interrupt()
            training.goes_on()
            with rt.Session(training.worker.target, rt.Graph(), security=training.security):
                pass  # a new client, and new connections of the master for it
            assert rt.probe(training.ps.address, 30, security=training.security).task == PS
            training.goes_on()
        training.close()
    finally:
        training.stack.close()
    assert len(serials) == ROUNDS


def lanes_to(worker: rt.Server) -> list[Any]:
    sessions = list(worker.master._sessions.values())
    others = [task for session in sessions for task in session.tasks.values()]
    return [
        lane for task in others if isinstance(task, tasks.RemoteTask) for lane in task.peer.lanes()
    ]


class Clock:
    """A count of the periods of the timer."""

    ticks = 0

    def tick(self) -> None:
        self.ticks += 1


def test_certificate_is_watched_while_serving(
    tmp_path: pathlib.Path, authority: CA, monkeypatch: pytest.MonkeyPatch, set_times: SetTimes
) -> None:
    """A server without clients looks at its certificate again and again, and no more once it has stopped."""
    looks: list[str] = []
    set_times(times, CERTIFICATE_LOOK_SECS=0.01)
    monkeypatch.setattr(Certificates, "tell_near_end", lambda self, task: looks.append(task))
    security = Security(certificates=certificates.make(tmp_path / "certs", authority))
    with rt.Server(kit.addresses(ps=1), "ps", 0, security=security):
        until(lambda: len(looks) > 3)
        assert set(looks) == {PS}
    clock = Clock()
    ticking = every(0.01, clock.tick)
    # A look may have been under way at the stop.
    until(lambda: clock.ticks > 3)
    made = len(looks)
    until(lambda: clock.ticks > 10)
    assert len(looks) == made
    ticking.stop()
