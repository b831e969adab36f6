"""Who is let in, as one table: each kind of stranger at each port, by which credential, refused by whom and how.

Each cell is tried twice with real sockets and real certificates, for each role that the stranger's
certificate may say, beside a worker that trains: it hears its code, one line of the log says so,
and training loses no step.
"""

import contextlib
import hashlib
import hmac
import os
import pathlib
import secrets
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import pytest

import runtime as rt
from harness.certs import CA
from runtime.cluster.endpoint import Endpoint
from runtime.observe.process_metrics import metrics
from runtime.proto import run_record_pb2, services_pb2_grpc
from runtime.proto import services_pb2 as pb
from runtime.rpc import rpc
from runtime.trust.roles import ClientRole
from runtime.trust.security import VARIABLE, Security, observer_key
from runtime.wire import frames
from runtime.wire.codec import TensorLayout
from runtime.wire.dial import ChannelOptions
from runtime.wire.greeting import tensor_proof
from runtime.wire.handles import BACKUP, PULL
from runtime.wire.peer import Peer
from tests.kit import certificates
from tests.kit.waits import until
from tests.runtime import kit
from tests.runtime.server.kit import (
    PS,
    Training,
    context_of,
    forget_refusals,
    greeting,
    port_of,
    told,
)
from tests.runtime.stranger import challenge, shown
from tests.runtime.wire.kit import read, say_hello, send

pytestmark = pytest.mark.cluster

PORTS: Final = ("grpc", "tensors", "unix", "metrics")
ROLES: Final = ("", *ClientRole)
ELSE: Final = 1
"""An incarnation that no task has."""
KEY: Final = bytes(range(32))


@dataclass(frozen=True)
class Refused:
    """What becomes of a stranger.

    Attributes:
        code: what it hears: an error's code, a status of HTTP, the alert of TLS, or that it is hung
            up on.
        log: what the one line says that the task logs; None where it logs none of its own, see
            ``silent``.
        silent: why it does not.
    """

    code: str
    log: str | None = "refuses a client at"
    silent: str = ""


@dataclass(frozen=True)
class DoesNotApply:
    """A kind of stranger that there is not at a port, and why."""

    reason: str


Cell = Mapping[str, Refused] | DoesNotApply
"""By the credential of the task, "token" or "certificates"."""

BY_GRPC: Final = "gRPC makes and ends TLS connections itself, and writes to its own log"
BY_US: Final = "it is the stranger's own side that refuses, before it says anything"
NOT_OURS: Final = "who asks is Prometheus, and it is the one that refuses"
SAME_USER: Final = DoesNotApply(
    "only processes of the task's user can open the socket; it shows no certificates"
)
HUNG_UP: Final = Refused("hung up", None, BY_GRPC)
UNAUTHENTICATED: Final = Refused("UNAUTHENTICATED")
NO_CERTIFICATE: Final = Refused("TLSV13_ALERT_CERTIFICATE_REQUIRED", "it shows no certificate")
OTHER_CA: Final = Refused("TLSV1_ALERT_UNKNOWN_CA", "its certificate is of another CA")
ENDED: Final = Refused("SSLV3_ALERT_CERTIFICATE_EXPIRED", "its certificate has ended")
DENIED: Final = Refused("PERMISSION_DENIED", "refuses a client at")
ASKED_AGAIN: Final = Refused(
    "UNAUTHENTICATED",
    None,
    "clients that have outlived a task's process show the same, and are asked for another",
)
RESTARTED: Final = Refused(
    "ABORTED", None, "a client of an earlier life of the task is no stranger: it recovers"
)

MATRIX: Final[Mapping[str, Mapping[str, Cell]]] = {
    "no credential": {
        "grpc": {"token": UNAUTHENTICATED, "certificates": HUNG_UP},
        "tensors": {"token": UNAUTHENTICATED, "certificates": NO_CERTIFICATE},
        "unix": {"token": UNAUTHENTICATED},
        "metrics": {"token": Refused("401"), "certificates": NO_CERTIFICATE},
    },
    "wrong CA": {
        "grpc": {"certificates": HUNG_UP},
        "tensors": {"certificates": OTHER_CA},
        "unix": SAME_USER,
        "metrics": {"certificates": OTHER_CA},
    },
    "expired": {
        "grpc": {"certificates": HUNG_UP},
        "tensors": {"certificates": ENDED},
        "unix": SAME_USER,
        "metrics": {"certificates": ENDED},
    },
    "wrong name": {
        "grpc": {"certificates": Refused("UNAUTHENTICATED", None, BY_US)},
        "tensors": {"certificates": Refused("UNAUTHENTICATED")},
        "unix": SAME_USER,
        "metrics": {"certificates": Refused("CERTIFICATE_VERIFY_FAILED")},
    },
    "wrong role": {
        "grpc": {"certificates": DENIED, "token": DENIED},
        "tensors": {"certificates": DENIED, "token": UNAUTHENTICATED},
        "unix": {"token": UNAUTHENTICATED},
        "metrics": DoesNotApply("figures are for every role"),
    },
    "wrong token": {
        "grpc": {"token": UNAUTHENTICATED},
        "tensors": {"token": UNAUTHENTICATED},
        "unix": {"token": UNAUTHENTICATED},
        "metrics": {"token": Refused("401")},
    },
    "plain to TLS": {
        "grpc": {"certificates": HUNG_UP},
        "tensors": {"certificates": Refused("UNAUTHENTICATED", "it does not speak TLS")},
        "unix": DoesNotApply(
            "the socket is plain, whatever the task has: nothing crosses a network"
        ),
        "metrics": {"certificates": Refused("hung up", "it does not speak TLS")},
    },
    "TLS to plain": {
        "grpc": {"token": Refused("UNAUTHENTICATED", None, BY_US)},
        "tensors": {"token": Refused("UNAUTHENTICATED")},
        "unix": DoesNotApply("nobody speaks TLS there"),
        "metrics": {"token": Refused("WRONG_VERSION_NUMBER", None, NOT_OURS)},
    },
    "replayed hello": {
        "grpc": {"token": ASKED_AGAIN, "certificates": HUNG_UP},
        "tensors": {"token": UNAUTHENTICATED, "certificates": Refused("hung up")},
        "unix": {"token": UNAUTHENTICATED},
        "metrics": {"certificates": Refused("hung up")},
    },
    "old incarnation": {
        "grpc": {"token": RESTARTED, "certificates": RESTARTED},
        "tensors": {"token": UNAUTHENTICATED, "certificates": Refused("UNAVAILABLE", None, BY_US)},
        "unix": {"token": UNAUTHENTICATED},
        "metrics": DoesNotApply("figures say of which process they are, and change nothing"),
    },
}
"""What becomes of each kind of stranger at each port.

A proof that was seen at the gRPC port is good for the same
process there (docs/security.md): "replayed hello" shows it to the next one. So is a bearer token
for figures."""
NAMES: Final = (
    *certificates.HERE,
    "*.ps.run.bellwether",
    "*.worker.run.bellwether",
    "run.bellwether",
)
"""The names of the tasks' host, and those by which clients with a role know the tasks."""
PER_ROLE: Final = ("wrong CA", "expired", "wrong name", "wrong role", "old incarnation")
"""Kinds that show a certificate: each role's is tried."""
FORBIDDEN: Final = {
    "observer": "register",
    "worker": "claim",
    "chief": "clear",
    "ps": "register",
    "admin": "register",
}
"""By role an order that it may not give."""


# -- the tasks -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> CA:
    return CA.make()


@pytest.fixture(scope="module")
def trainings(
    tmp_path_factory: pytest.TempPathFactory, authority: CA
) -> Iterator[dict[str, Training]]:
    """Training with each credential."""
    before = os.environ.pop(VARIABLE, None)
    directory = tmp_path_factory.mktemp("credentials")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: os.environ.update({} if before is None else {VARIABLE: before}))
        token = Security(write_token(directory / "token", KEY))
        made = {}
        for name, given in (
            ("token", token),
            (
                "certificates",
                Security(certificates=certificates.make(directory / "c", authority, NAMES)),
            ),
        ):
            made[name] = Training(given)
            stack.callback(made[name].stack.close)
            for server in (made[name].ps, made[name].worker):
                kit.set_apart(server, host=True)
        yield made
        for training in made.values():
            training.close()


def write_token(path: pathlib.Path, key: bytes) -> pathlib.Path:
    path.touch(mode=0o600)
    path.write_text(key.hex())
    return path


# -- the strangers ---------------------------------------------------------------------------------------------


@dataclass
class Stranger:
    """One attempt's means.

    Attributes:
        training: whose ps it comes to.
        credential: of that ps.
        port: at which.
        role: that its certificate says; empty for none.
        authority: the CA of the cluster.
        place: for files.
    """

    training: Training
    credential: str
    port: str
    role: str
    authority: CA
    place: pathlib.Path

    def uri(self) -> str:
        return f"bellwether://run/{self.role}" if self.role else ""

    def pair(self, authority: CA | None = None, ends: float = 86400.0) -> tuple[bytes, bytes]:
        return certificates.pair_of(
            authority or self.authority, begins=-7200.0, ends=ends, role=self.uri()
        )

    def certified(self) -> Security:
        """A good certificate."""
        place = self.place / f"good-{self.role}"
        return Security(certificates=certificates.make(place, self.authority, role=self.uri()))

    def tokened(self, key: bytes) -> Security:
        return Security(write_token(self.place / "token", key))

    def raw(self, context: ssl.SSLContext | None, name: str | None = None) -> str:
        """What who begins as is usual at the port hears: "hung up", the alert, or the code of our own answer."""
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", self.number), timeout=60)
            )
            try:
                if context is not None:
                    sock = stack.enter_context(context.wrap_socket(sock, server_hostname=name))
                else:  # what nobody reads when it hangs up would take the alert along
                    sock.sendall(greeting(self.port))
                heard = sock.recv(1000)
            except ssl.SSLEOFError:
                return "hung up"
            except ssl.SSLError as error:
                return str(error.reason)
            except ConnectionError:
                return "hung up"
        if not heard or heard.startswith(b"\x15\x03"):
            return "hung up"
        head = frames.unpack_header(heard[: frames.HEADER_BYTES])
        assert self.port == "tensors" and head[1] == frames.ERROR, heard
        return code_of(frames.decode_error(heard[frames.HEADER_BYTES :], ""))

    @property
    def number(self) -> int:
        return port_of(self.training, self.port)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """A plain connection of the tensor channel, as a file."""
        unix = self.port == "unix"
        with socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(60)
            sock.connect(self.training.ps.tensors.unix_path if unix else ("127.0.0.1", self.number))
            with sock.makefile("rwb") as file:
                yield file

    def ours(
        self,
        given: Security,
        host: str = "127.0.0.1",
        incarnation: int | None = None,
        call: int | None = None,
        reconnect_secs: float = 60.0,
    ) -> str:
        """The code by which a client of ours fails at the tensor channel, when it connects or by its first call."""
        there = self.training.endpoint(self.port if self.port == "unix" else "tcp")
        there = Endpoint(
            host, there.port, there.unix_path, there.host_id, incarnation or there.incarnation
        )
        held, token = given.tls(), given.token()
        options = ChannelOptions(reconnect_secs=reconnect_secs)
        client = secrets.randbits(60) | 1
        peer = Peer(
            PS,
            lambda timeout: there,
            client,
            lambda timeout: token,
            options=options,
            certificates=held,
        )
        with contextlib.closing(peer):
            try:
                lane = peer.acquire()
                try:
                    if call is not None:
                        lane.call(
                            call,
                            0,
                            [],
                            None if call == BACKUP else TensorLayout([]),
                            dynamic=call == BACKUP,
                        )
                finally:
                    peer.release(lane)
            except rt.OpError as error:
                return code_of(error)
        return "OK"

    def calls(self, given: Security, host: str = "127.0.0.1") -> str:
        """The code by which a client of ours fails at the gRPC port, when it asks for what all may know."""
        try:
            rt.probe(f"{host}:{self.number}", 30, security=given)
        except rt.OpError as error:
            return code_of(error)
        return "OK"

    def orders(self, given: Security, order: str, incarnation: int = ELSE) -> str:
        """The code of an order at the gRPC port, of no consequence if it is let through."""
        with rpc.open_channel(f"127.0.0.1:{self.number}", given) as channel:
            stub = services_pb2_grpc.WorkerServiceStub(channel)
            try:
                if order == "register":
                    stub.Register(pb.RegisterRequest(incarnation=incarnation), timeout=60)
                elif order == "claim":
                    claim = run_record_pb2.RunOrder.Claim()
                    stub.Run(
                        run_record_pb2.RunOrder(incarnation=incarnation, claim=claim), timeout=60
                    )
                else:
                    stub.Clear(pb.ClearRequest(containers=["none"]), timeout=60)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def figures(self, bearer: str | None, context: ssl.SSLContext | None) -> str:
        url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.number}/metrics"
        request = urllib.request.Request(
            url, headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return str(error.code)
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ssl.SSLError)
            return str(error.reason.reason)


def code_of(error: rt.OpError) -> str:
    return str(
        grpc.StatusCode(next(c.value for c in grpc.StatusCode if c.value[0] == error.code)).name
    )


def no_credential(who: Stranger) -> str:
    if who.credential == "certificates":
        return who.raw(context_of(who.authority, None, who.place))
    match who.port:
        case "metrics":
            return who.figures(None, None)
        case "grpc":
            with grpc.insecure_channel(f"127.0.0.1:{who.number}") as channel:
                return status_of(channel, None)
    with who.connected() as file:
        return said(say_hello(file, 7, b"", PS))


def wrong_ca(who: Stranger) -> str:
    return who.raw(context_of(who.authority, who.pair(CA.make()), who.place))


def expired(who: Stranger) -> str:
    return who.raw(context_of(who.authority, who.pair(ends=-60.0), who.place))


def wrong_name(who: Stranger) -> str:
    """A client that means another host than the one in the task's certificate: another name of this one."""
    given = who.certified()
    match who.port:
        case "grpc":
            return who.calls(given, "127.1")
        case "tensors":
            return who.ours(given, "127.1")
    held = given.tls()
    assert held is not None
    return who.raw(held.client_context(), "ps9")


def wrong_role(who: Stranger) -> str:
    if who.credential == "token":
        given = who.tokened(observer_key(KEY))
        return who.orders(given, "register") if who.port == "grpc" else who.ours(given)
    given = who.certified()
    if who.port == "grpc":
        return who.orders(given, FORBIDDEN[who.role])
    return who.ours(given, call=BACKUP if who.role == "chief" else PULL)


def wrong_token(who: Stranger) -> str:
    other = secrets.token_bytes(32)
    match who.port:
        case "metrics":
            return who.figures(hmac.digest(other, b"metrics", hashlib.sha256).hex(), None)
        case "grpc":
            return who.calls(who.tokened(other))
    return who.ours(who.tokened(other))


def plain_to_tls(who: Stranger) -> str:
    return who.raw(None)


def tls_to_plain(who: Stranger) -> str:
    given = who.certified()
    match who.port:
        case "grpc":
            return who.calls(given)
        case "tensors":
            return who.ours(given)
    held = given.tls()
    assert held is not None
    return who.figures(None, held.client_context())


def replayed_hello(who: Stranger) -> str:
    if who.credential == "certificates":
        return replayed_bytes(who, recorded(who))
    if who.port == "grpc":  # a proof that another process has taken
        with rt.Server(kit.addresses(other=1), "other", 0, security=who.training.security) as other:
            with grpc.insecure_channel(other.address) as channel:
                proof = shown(KEY, challenge(channel), other.address)
                assert status_of(channel, proof) == "OK"
        with grpc.insecure_channel(f"127.0.0.1:{who.number}") as channel:
            return status_of(channel, proof)
    hello = frames.LaneHello(
        secrets.randbits(60) | 1, 1, 1, secrets.token_bytes(frames.NONCE_BYTES)
    )
    with who.connected() as file:
        send(file, frames.HELLO, frames.encode_hello(hello))
        _, incarnation, payload = read(file)
        proof = tensor_proof(KEY, b"client", payload[: frames.NONCE_BYTES], hello, PS, incarnation)
        send(file, frames.PROOF, proof)
        assert read(file)[0] == frames.WELCOME
    with who.connected() as file:
        send(file, frames.HELLO, frames.encode_hello(hello))
        assert read(file)[0] == frames.CHALLENGE
        send(file, frames.PROOF, proof)
        kind, _, payload = read(file)
        return said((kind, payload))


def recorded(who: Stranger) -> bytes:
    """What a client with a good certificate sends, as it crosses the network."""
    seen = bytearray()
    context = context_of(who.authority, who.pair(), who.place)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def relay() -> None:
            near, _ = listening.accept()
            with near, socket.create_connection(("127.0.0.1", who.number), timeout=60) as far:
                back = threading.Thread(target=pump, args=(far, near))
                back.start()
                pump(near, far, seen)
                back.join(60)

        thread = threading.Thread(target=relay)
        thread.start()
        address = "127.0.0.1", listening.getsockname()[1]
        with (
            socket.create_connection(address, timeout=60) as sock,
            context.wrap_socket(sock) as secure,
        ):
            secure.sendall(greeting(who.port))
            assert secure.recv(1000)  # it is let in
        thread.join(60)
    assert greeting(who.port) not in seen, "it is encrypted"
    return bytes(seen)


def pump(source: socket.socket, sink: socket.socket, seen: bytearray | None = None) -> None:
    with contextlib.suppress(OSError):  # it is reset
        while data := source.recv(65536):
            if seen is not None:
                seen += data
            sink.sendall(data)
    with contextlib.suppress(OSError):  # the other direction has ended
        sink.shutdown(socket.SHUT_RDWR)


def replayed_bytes(who: Stranger, seen: bytes) -> str:
    """What becomes of the same bytes on another connection: its keys are others, so none of them is understood."""
    lanes = who.training.ps.tensors.counters.lanes
    with socket.create_connection(("127.0.0.1", who.number), timeout=60) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(seen)  # and stays: who hangs up before the handshake is not told of
            while sock.recv(65536):
                pass
    assert who.training.ps.tensors.counters.lanes == lanes
    return "hung up"


def old_incarnation(who: Stranger) -> str:
    if who.credential == "certificates":
        given = who.certified()
        if who.port == "grpc":
            return who.orders(given, "register")
        # for so long it asks where the task is now
        return who.ours(given, incarnation=ELSE, reconnect_secs=0.5)
    if who.port == "grpc":
        return who.orders(who.training.security, "register")
    hello = frames.LaneHello(
        secrets.randbits(60) | 1, 1, 1, secrets.token_bytes(frames.NONCE_BYTES)
    )
    with who.connected() as file:
        send(file, frames.HELLO, frames.encode_hello(hello))
        _, _, payload = read(file)
        send(
            file,
            frames.PROOF,
            tensor_proof(KEY, b"client", payload[: frames.NONCE_BYTES], hello, PS, ELSE),
        )
        kind, _, payload = read(file)
        return said((kind, payload))


def said(answer: tuple[int, bytes]) -> str:
    kind, payload = answer
    return (
        code_of(frames.decode_error(payload, ""))
        if kind == frames.ERROR
        else f"a frame of kind {kind}"
    )


def status_of(channel: grpc.Channel, proof: str | None) -> str:
    metadata = None if proof is None else [("bellwether-proof", proof)]
    try:
        services_pb2_grpc.WorkerServiceStub(channel).Status(
            pb.StatusRequest(), timeout=60, metadata=metadata
        )
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


ATTEMPTS: Final[Mapping[str, Callable[[Stranger], str]]] = {
    "no credential": no_credential,
    "wrong CA": wrong_ca,
    "expired": expired,
    "wrong name": wrong_name,
    "wrong role": wrong_role,
    "wrong token": wrong_token,
    "plain to TLS": plain_to_tls,
    "TLS to plain": tls_to_plain,
    "replayed hello": replayed_hello,
    "old incarnation": old_incarnation,
}
CELLS: Final = [
    (kind, port, credential)
    for kind, row in MATRIX.items()
    for port, cell in row.items()
    if not isinstance(cell, DoesNotApply)
    for credential in cell
]


def roles_of(kind: str, credential: str, port: str) -> tuple[str, ...]:
    """The roles with which a cell is tried."""
    if credential == "token" or kind not in PER_ROLE:
        return ("",)
    if kind == "wrong role":
        return tuple(ClientRole)
    # tasks of a role ask for the name of the task and not of the host (test_roles.py)
    if kind == "wrong name":
        return ("", "observer", "admin")
    if kind == "old incarnation":  # an order that is refused for the role never comes to that
        return ("", "worker", "chief") if port == "grpc" else ("", "worker", "chief", "ps")
    return ROLES


def refusals(least: float = 0.0) -> float:
    """How many the tasks here have counted, when it is so many at least: a client may hear of its own before that."""
    until(lambda: metrics.read().get("refused_total", 0.0) >= least)
    return metrics.read().get("refused_total", 0.0)


@pytest.mark.parametrize(
    ("kind", "port", "credential"), CELLS, ids=["-".join(cell).replace(" ", "_") for cell in CELLS]
)
def test_stranger_is_refused_training_continues(
    trainings: dict[str, Training],
    kind: str,
    port: str,
    credential: str,
    authority: CA,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stranger is refused and logged once, and training continues."""
    training, cell = trainings[credential], MATRIX[kind][port]
    assert not isinstance(cell, DoesNotApply)
    expected = cell[credential]
    for role in roles_of(kind, credential, port):
        caplog.clear()
        forget_refusals(training.ps)
        for _ in range(2):
            who = Stranger(training, credential, port, role, authority, tmp_path)
            before = refusals()
            assert ATTEMPTS[kind](who) == expected.code, role
            if expected.log is not None:
                refusals(before + 1)  # else it may be told of when the next role is looked at
        if expected.log is None:
            assert expected.silent
        else:
            until(lambda: bool(told(caplog, f"^{PS} refuses ")))
            (line,) = told(caplog, f"^{PS} refuses ")
            assert expected.log in line, role
    training.goes_on()


def test_every_stranger_has_its_cells() -> None:
    """Every kind of stranger has a cell at every port."""
    assert MATRIX.keys() == ATTEMPTS.keys() and len(MATRIX) == 10
    for row in MATRIX.values():
        assert tuple(row) == PORTS
        for cell in row.values():
            assert cell.reason if isinstance(cell, DoesNotApply) else cell
    assert FORBIDDEN.keys() == set(ClientRole)


def test_credential_lets_its_owner_in(
    trainings: dict[str, Training], authority: CA, tmp_path: pathlib.Path
) -> None:
    """A client with the whole credential is let in at every port."""
    for credential, training in trainings.items():
        for port in PORTS:
            who = Stranger(training, credential, port, "", authority, tmp_path)
            given = training.security.of_host("127.0.0.1")
            held = given.tls()
            if port == "grpc":
                assert who.calls(given) == "OK"
            elif port == "metrics":
                assert (
                    who.figures(given.bearer(), None if held is None else held.client_context())
                    == "200"
                )
            else:
                assert who.ours(given) == "OK"
        training.goes_on()
