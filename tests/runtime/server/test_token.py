"""Who has not the token of a task is refused at each of its ports, and nobody else notices."""

import contextlib
import logging
import os
import pathlib
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import harness
import runtime as rt
from harness.monitoring import status
from runtime.cluster.endpoint import Endpoint
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc
from runtime.rpc import rpc
from runtime.trust.security import VARIABLE, Security, find_token
from runtime.trust.token_files import Token
from runtime.wire import frames
from runtime.wire.greeting import tensor_proof
from runtime.wire.peer import Peer
from tests.kit.changes import SetVariables
from tests.kit.processes import Program, Task
from tests.runtime import kit
from tests.runtime.stranger import challenge, key_of, shown
from tests.runtime.wire.kit import read, say_hello, send

pytestmark = pytest.mark.cluster

TASK = "/job:local/task:0"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
WAYS = ("tcp", "unix")
NOBODY = 65534


@pytest.fixture(autouse=True)
def place(tmp_path: pathlib.Path, set_variables: SetVariables) -> pathlib.Path:
    """Tokens of these tests lie in a directory of their own."""
    tmp_path.chmod(0o700)
    set_variables(XDG_RUNTIME_DIR=str(tmp_path))
    set_variables({VARIABLE: None})
    return tmp_path / "bellwether"


@pytest.fixture
def server(place: pathlib.Path) -> Iterator[rt.Server]:
    with rt.Server(kit.addresses(local=1), "local", 0) as made:
        yield made


def other_token(tmp_path: pathlib.Path) -> Security:
    path = tmp_path / "other"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return Security(path)


@contextlib.contextmanager
def connected(server: rt.Server, way: str) -> Iterator[Any]:
    """A connection to the tensor channel, as a file."""
    family = socket.AF_UNIX if way == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(
            server.tensors.unix_path if way == "unix" else ("127.0.0.1", server.tensors.port)
        )
        with sock.makefile("rwb") as file:
            yield file


def refused(answer: tuple[int, bytes]) -> bool:
    kind, payload = answer
    return kind == frames.ERROR and isinstance(
        frames.decode_error(payload, ""), rt.UnauthenticatedError
    )


def elsewhere(server: rt.Server, *, host: bool = False) -> str:
    """The target of a server that this process is to reach as any other would, or as one of another host."""
    kit.set_apart(server, host=host)
    return server.target


# -- the control plane -----------------------------------------------------------------------------------------


def every_call(channel: grpc.Channel) -> Iterator[tuple[str, Any]]:
    """All methods of both services, each with its empty request."""
    stubs = {
        "WorkerService": services_pb2_grpc.WorkerServiceStub(channel),
        "MasterService": services_pb2_grpc.MasterServiceStub(channel),
    }
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            request = GetMessageClass(method.input_type)()
            stub = getattr(stubs[service.name], method.name)
            yield (
                method.name,
                lambda stub=stub, request=request, **options: stub(request, timeout=60, **options),
            )


@pytest.mark.parametrize("shown", [None, "", ".", "nonsense", "x" * 5000])
def test_call_without_proof_is_refused(server: rt.Server, shown: str | None) -> None:
    """Every call without the proof of the token is refused and opens no session."""
    with grpc.insecure_channel(server.address) as channel:
        calls = list(every_call(channel))
        assert {"Status", "Register", "Checkpoint", "Metrics", "RunStep", "Reset"} <= {
            name for name, _ in calls
        }
        for name, call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call(metadata=None if shown is None else [("bellwether-proof", shown)])
            assert caught.value.code() is UNAUTHENTICATED, name
    assert server.report().values["sessions"] == 0


def test_non_messages_are_refused_shortly(
    server: rt.Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that are no messages are refused without a traceback, and the connection goes on."""
    with rpc.open_channel(server.address) as channel:
        call = channel.unary_unary(
            "/bellwether.WorkerService/Status",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        for _ in range(500):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert call(b"", timeout=60)
    assert "Traceback" not in caplog.text and not [r for r in caplog.records if r.exc_info]


def test_health_says_no_more(server: rt.Server) -> None:
    """A health check is answered without a token and says only that the task serves."""
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        found = health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert found == health_pb2.HealthCheckResponse(
            status=health_pb2.HealthCheckResponse.SERVING
        )


def test_health_serves_no_streams(server: rt.Server) -> None:
    """A stream of a stranger held a thread and 20 kB for as long as it liked."""
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(watch))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_strangers_share_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without a proof, and those of the health service, had a thread each while they were answered."""
    names: set[str] = set()
    answer = rpc.ClientCheck._refuse_call

    def refuse(check: rpc.ClientCheck, shown: str, context: grpc.ServicerContext) -> None:
        names.add(threading.current_thread().name)
        answer(check, shown, context)

    monkeypatch.setattr(rpc.ClientCheck, "_refuse_call", refuse)
    with (
        rt.Server(kit.addresses(ps=1), "ps", 0) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = services_pb2_grpc.WorkerServiceStub(channel)
        calls = [stub.Status.future(pb.StatusRequest(), timeout=60) for _ in range(300)]
        assert {call.exception().code() for call in calls} == {UNAUTHENTICATED}
    assert 0 < len(names) <= 4 and all(name.startswith("grpc strangers") for name in names)


def code_of(address: str) -> grpc.StatusCode:
    """What becomes of a call without a token."""
    with grpc.insecure_channel(address) as channel:
        try:
            services_pb2_grpc.WorkerServiceStub(channel).Status(pb.StatusRequest(), timeout=60)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return grpc.StatusCode.OK


def call_with(server: rt.Server, proof: str) -> grpc.StatusCode:
    with grpc.insecure_channel(server.address) as channel:
        stub = services_pb2_grpc.WorkerServiceStub(channel)
        try:
            stub.Status(pb.StatusRequest(), timeout=60, metadata=[("bellwether-proof", proof)])
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def nonce_of(server: rt.Server) -> str:
    with grpc.insecure_channel(server.address) as channel:
        return challenge(channel)


def test_proof_is_for_one_process(server: rt.Server) -> None:
    """The proof holds for one process of one task at one address, with one token."""
    host, _, port = server.address.rpartition(":")
    nonce, key = nonce_of(server), key_of(server)
    for task in ("", TASK):
        assert call_with(server, shown(key, nonce, server.address, task)) is grpc.StatusCode.OK
    for wrong in (
        shown(key, nonce, f"{host}:{int(port) + 1}"),
        shown(key, nonce, f"127.0.0.2:{port}"),
        shown(key, nonce, server.address, "/job:ps/task:0"),
        shown(secrets.token_bytes(32), nonce, server.address),
        shown(key, secrets.token_hex(16), server.address),
    ):
        assert call_with(server, wrong) is UNAUTHENTICATED
    with rt.Server(kit.addresses(local=1), "local", 0) as another:
        assert call_with(another, shown(key, nonce, another.address)) is UNAUTHENTICATED
        assert nonce_of(another) != nonce and key_of(another) != key


class Relay(grpc.GenericRpcHandler):
    """A process without the token at the port of a dead task: it answers with what a living task answers it."""

    def __init__(self, living: str) -> None:
        self.living = grpc.insecure_channel(living)
        self.requests: list[bytes] = []
        self.stolen: list[grpc.StatusCode] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        metadata = [
            entry
            for entry in handler_call_details.invocation_metadata
            if entry.key.startswith("bellwether")
        ]
        method = handler_call_details.method

        def relay(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.requests.append(request)
            self._steal(metadata)
            try:
                return cast(
                    bytes,
                    self.living.unary_unary(method, bytes, bytes)(
                        request, timeout=60, metadata=metadata
                    ),
                )
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())  # type: ignore[attr-defined]
                context.abort(error.code(), error.details())  # type: ignore[attr-defined]
                raise

        return grpc.unary_unary_rpc_method_handler(relay)

    def _steal(self, metadata: Any) -> None:
        """Has the living task forget its variables, with the proof of who has called."""
        try:
            clear = self.living.unary_unary("/bellwether.WorkerService/Clear", bytes, bytes)
            clear(pb.ClearRequest(all=True).SerializeToString(), timeout=60, metadata=metadata)
            self.stolen.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            self.stolen.append(error.code())  # type: ignore[attr-defined]


def test_proof_is_not_relayed(tmp_path: pathlib.Path) -> None:
    """A proof that a stranger relays to another task is refused there."""
    security = other_token(tmp_path)
    port = kit.addresses(ps=1)["ps"][0].rpartition(":")[2]
    cluster = {"ps": [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]}
    with rt.Server(cluster, "ps", 1, security=security) as living:
        kit.set_apart(living, host=True)
        relay = Relay(living.address)
        stand_in = grpc.server(
            ThreadPoolExecutor(4), handlers=[relay], options=[("grpc.so_reuseport", 0)]
        )
        assert stand_in.add_insecure_port(cluster["ps"][0])
        stand_in.start()
        try:
            with pytest.raises(
                rt.UnauthenticatedError, match="does not answer for 127.0.0.1:.*127.0.0.2:"
            ):
                rt.probe(cluster["ps"][0], 60, security=security)
        finally:
            stand_in.stop(0).wait(60)
            relay.living.close()
        assert relay.stolen and set(relay.stolen) == {UNAUTHENTICATED}
        assert set(relay.requests) == {b""}, "nothing is sent before the server has shown who it is"
        assert rt.probe(living.address, 60, security=security).task == "/job:ps/task:1"


def test_server_without_token_gets_nothing(tmp_path: pathlib.Path) -> None:
    """A server that cannot show the token gets no request."""
    security, address = other_token(tmp_path), kit.addresses(local=1)
    with rt.Server(address, "local", 0, security=Security.insecure()) as stranger:
        kit.set_apart(stranger)
        with pytest.raises(rt.UnauthenticatedError, match="cannot show that it has the token"):
            rt.probe(stranger.address, 60, security=security)
        with pytest.raises(rt.UnauthenticatedError, match="cannot show that it has the token"):
            rt.Session(stranger.target, security=security)


# -- the tensor channel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_tensor_channel_takes_token_only(server: rt.Server, way: str) -> None:
    """The tensor channel takes the token and nothing else."""
    key = key_of(server)
    with connected(server, way) as file:
        assert say_hello(file, 7, key, TASK)[0] == frames.WELCOME
    for wrong in (secrets.token_bytes(32), b"", bytes(32)):
        with connected(server, way) as file:
            assert refused(say_hello(file, 7, wrong, TASK))
            assert file.read() == b""  # and closed
    with connected(server, way) as file:
        assert refused(say_hello(file, 7, key, "/job:ps/task:0"))
    with connected(server, way) as file:  # no proof at all, but a call
        send(file, frames.HELLO, frames.encode_hello(frames.LaneHello(7, 1, 1, bytes(16))))
        assert read(file)[0] == frames.CHALLENGE
        send(file, frames.CALL, b"")
        assert read(file)[0] == frames.ERROR
    assert server.tensors.counters.calls == 0


@pytest.mark.parametrize("way", WAYS)
def test_replayed_hello_is_refused(server: rt.Server, way: str) -> None:
    """A hello and proof that were seen on the wire cannot be used again."""
    key, hello = key_of(server), frames.LaneHello(7, 1, 1, secrets.token_bytes(16))
    proofs = []
    with connected(server, way) as file:
        send(file, frames.HELLO, frames.encode_hello(hello))
        _, incarnation, payload = read(file)
        about = payload[:16], hello, TASK, incarnation
        # the server shows that it has it, too
        assert payload[16:] == tensor_proof(key, b"server", *about)
        proofs += [tensor_proof(key, b"client", *about), payload[16:]]
        send(file, frames.PROOF, proofs[0])
        assert read(file)[0] == frames.WELCOME
    for proof in proofs:  # again, and the server's own words
        with connected(server, way) as file:
            send(file, frames.HELLO, frames.encode_hello(hello))
            assert read(file)[0] == frames.CHALLENGE
            send(file, frames.PROOF, proof)
            kind, _, payload = read(file)
            assert refused((kind, payload))


@pytest.mark.parametrize("field", ["incarnation", "client", "lane", "attempt"])
def test_proof_is_for_one_connection(server: rt.Server, field: str) -> None:
    """A proof holds for its own incarnation, client, lane and attempt."""
    key, hello = key_of(server), frames.LaneHello(7, 1, 1, secrets.token_bytes(16))
    with connected(server, "tcp") as file:
        send(file, frames.HELLO, frames.encode_hello(hello))
        _, incarnation, payload = read(file)
        if field == "incarnation":
            incarnation -= 1
        else:
            hello = hello._replace(**{field: getattr(hello, field) + 1})
        send(
            file, frames.PROOF, tensor_proof(key, b"client", payload[:16], hello, TASK, incarnation)
        )
        kind, _, payload = read(file)
        assert refused((kind, payload))


# -- our own clients -------------------------------------------------------------------------------------------


def test_client_without_token_knows_why(
    server: rt.Server, tmp_path: pathlib.Path, set_variables: SetVariables
) -> None:
    """A client without the right token says which variable to set."""
    key_hex = key_of(server).hex()
    target = elsewhere(server, host=True)
    with pytest.raises(
        rt.UnauthenticatedError, match=f"this process has none for it: set {VARIABLE}"
    ) as caught:
        rt.Session(target)
    assert server.address in caught.value.task and "\n" not in str(caught.value)
    with pytest.raises(rt.UnauthenticatedError, match="has none"):
        rt.probe(server.address)
    other = other_token(tmp_path)
    set_variables({VARIABLE: str(other.token_file)})
    with pytest.raises(
        rt.UnauthenticatedError, match=rf"another token than {other.token_file}: set {VARIABLE}"
    ):
        rt.Session(target)
    (tmp_path / "other").write_text(key_hex)
    assert rt.probe(server.address).task == TASK
    with rt.Session(target):
        pass
    (tmp_path / "other").unlink()
    with pytest.raises(
        rt.UnauthenticatedError, match="there is no .*: give a directory with certificates"
    ) as caught:
        rt.Session(target)
    assert key_hex not in str(caught.value)


@pytest.mark.parametrize("is_chief", [True, False])
def test_supervisor_gives_up_without_token(server: rt.Server, is_chief: bool) -> None:
    """A supervisor does not try again without the token."""
    target = elsewhere(server, host=True)
    with rt.Graph().as_default():
        harness.get_or_create_global_step()
        sv = harness.Supervisor(is_chief=is_chief, logdir="")
        with (
            pytest.raises(rt.UnauthenticatedError, match=f"set {VARIABLE}"),
            sv.managed_session(target),
        ):
            raise AssertionError("a session without the token")


def test_status_needs_a_token(server: rt.Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The status command says in one line that it has no token."""
    elsewhere(server)
    assert status.main([f"--target={server.address}", "--interval=0.01"]) == 0
    elsewhere(server, host=True)
    assert status.main([f"--target={server.address}", "--interval=0.01"]) != 0
    told = capsys.readouterr().err
    assert server.address in told and f"set {VARIABLE}" in told and told.count("\n") == 1
    status.main([f"--cluster=local={server.address}", "--interval=0.01"])
    assert f"set {VARIABLE}" in capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("token", ["none", "wrong"])
def test_connection_without_token_knows_why(server: rt.Server, token: str, way: str) -> None:
    """A connection without the right token says what to do."""
    endpoint = server.tensors.endpoint("127.0.0.1")
    if way == "tcp":
        endpoint = Endpoint(
            "127.0.0.1", endpoint.port, None, endpoint.host_id, endpoint.incarnation
        )
    found = None if token == "none" else Token(secrets.token_bytes(32), "a file")
    peer = Peer(TASK, lambda timeout: endpoint, 7, lambda timeout: found)
    expected = f"set {VARIABLE}" if token == "none" else "another token than a file"
    with pytest.raises(rt.UnauthenticatedError, match=f"{TASK}: .*{expected}"):
        peer.acquire()
    peer.close()
    assert server.tensors.counters.lanes == 0


def test_client_tests_its_server() -> None:
    """A client with a token sends nothing to a server that lacks the token."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def welcome_anybody() -> None:
            sock, _ = listening.accept()
            with sock, sock.makefile("rwb") as file:
                read(file)
                file.write(frames.pack_header(frames.MAGIC, frames.WELCOME, 0, 0, 0, 77, 0))
                file.flush()
                heard.append(file.read())

        heard: list[bytes] = []
        thread = threading.Thread(target=welcome_anybody)
        thread.start()
        there = Endpoint("127.0.0.1", listening.getsockname()[1], None, "", 77)
        peer = Peer(
            "/job:ps/task:0", lambda timeout: there, 7, lambda timeout: Token(bytes(32), "a file")
        )
        with pytest.raises(
            rt.UnauthenticatedError, match="cannot show that it has the token of a file"
        ):
            peer.acquire()
        peer.close()
        thread.join(60)
    assert heard == [b""]


def test_given_token_serves_the_cluster(tmp_path: pathlib.Path) -> None:
    """A token that is given is that of the whole cluster."""
    security = other_token(tmp_path)
    cluster = kit.addresses(ps=1, worker=1)
    with (
        rt.Server(cluster, "ps", 0, security=security) as ps,
        rt.Server(cluster, "worker", 0, security=security) as w,
    ):
        assert key_of(ps) == key_of(w) == security.token().key  # it is left for this user, too
        kit.set_apart(ps, host=True)
        with rt.Graph().as_default() as graph, rt.device("/job:ps/task:0"):
            w0 = rt.Variable(np.zeros(3, np.float32), name="w")
            step = w0.assign_add(np.ones(3, np.float32))
            with rt.Session(w.target, graph) as sess:
                sess.run(rt.global_variables_initializer())
                sess.run(step)
                assert sess.run(w0).tolist() == [1.0] * 3


def test_readable_token_starts_no_server(tmp_path: pathlib.Path) -> None:
    """A server with a token file that others can read does not start."""
    security = other_token(tmp_path)
    pathlib.Path(security.token_file).chmod(0o644)
    with pytest.raises(rt.UnauthenticatedError, match="others can read the token"):
        rt.Server(kit.addresses(local=1), "local", 0, security=security)


def test_public_server_asks_for_token(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server off the loopback asks for its token and says that nothing is encrypted."""
    caplog.set_level(logging.INFO)
    with rt.Server(
        kit.addresses(local=1), "local", 0, bind="0.0.0.0", security=other_token(tmp_path)
    ) as server:
        assert find_token(server.address, None, 60) is None
        assert code_of(server.address) is UNAUTHENTICATED
        with connected(server, "tcp") as file:
            send(file, frames.HELLO, frames.encode_hello(frames.LaneHello(7, 1, 1, bytes(16))))
            assert read(file)[0] == frames.CHALLENGE
    (line,) = [r.getMessage() for r in caplog.records if "asks for a token" in r.getMessage()]
    assert TASK in line and "nothing is encrypted" in line


# -- what is left, and what is told ----------------------------------------------------------------------------


def test_token_goes_with_its_server(server: rt.Server, place: pathlib.Path) -> None:
    """The file of a token goes with its server."""
    (file,) = place.iterdir()
    assert file.name.startswith(server.address.replace("localhost", "127.0.0.1") + "@")
    assert file.stat().st_mode & 0o777 == 0o600 and place.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert list(place.iterdir()) == []


def test_restarted_ps_is_joined_secretly(
    place: pathlib.Path,
) -> None:
    """A killed ps that starts again has a new token, is joined and shows no token."""
    cluster = kit.addresses(ps=1, worker=1)
    keys = []
    with rt.Server(cluster, "worker", 0) as worker, rt.Graph().as_default() as graph:
        with rt.device("/job:ps/task:0"):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
            step = w.assign_add(np.ones(3, np.float32))
        with kit.serve(cluster, "ps", 0) as ps:
            for life in range(2):
                with rt.Session(worker.target, graph) as sess:
                    token = find_token(cluster["ps"][0], None, 60)
                    assert token is not None
                    keys.append(token.key.hex())
                    sess.run(rt.global_variables_initializer())
                    sess.run(step)
                    process = psutil.Process(ps.pid)
                    shown = " ".join([*process.cmdline(), *process.environ().values(), ps.output()])
                    assert not any(key in shown for key in keys)
                    if life == 0:
                        ps.kill()
                        with pytest.raises((rt.UnavailableError, rt.AbortedError)):
                            sess.run(step)
                        ps.restart()
            assert keys[0] != keys[1]
            # the worker's and the second ps's: nothing of the first is left
            assert len(list(place.iterdir())) == 2


TASK_OF_A_LAUNCHER = """
import sys, runtime as rt
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if argument.startswith("--"))
cluster = {job: flags[f"{job}_hosts"].split(",") for job in ("ps", "worker")}
server = rt.Server(cluster, flags["job_name"], int(flags["task_index"]))
print("SERVES", server.address, flush=True)
server.join()
"""


def test_launched_tasks_ask_for_tokens(
    place: pathlib.Path,
) -> None:
    """The launcher's tasks ask for tokens, which count for nothing after kill -9."""
    command = ["harness.launch", "--ps=1", "--workers=1", "--", "python", "-c", TASK_OF_A_LAUNCHER]
    with Program("python", "-m", *command) as launcher:
        addresses = [launcher.expect(r"SERVES (\S+)")[1] for _ in range(2)]
        keys = []
        for address in addresses:
            assert code_of(address) is UNAUTHENTICATED
            assert rt.probe(address, 60).values  # a process of the same user needs nothing
            token = find_token(address, None, 60)
            assert token is not None
            keys.append(token.key.hex())
        assert keys[0] != keys[1]
        processes = [
            psutil.Process(launcher.pid),
            *psutil.Process(launcher.pid).children(recursive=True),
        ]
        shown = [
            text
            for process in processes
            for text in (*process.cmdline(), *process.environ().values())
        ]
        assert len(processes) >= 5  # the launcher, two guards, two tasks
        assert not any(key in text for key in keys for text in [*shown, launcher.output()])
        launcher.kill()
        _, alive = psutil.wait_procs(processes[1:], timeout=60)
        assert alive == []
    assert len(list(place.iterdir())) == 2  # nobody was there to remove them
    assert [find_token(address, None, 60) for address in addresses] == [None, None]
    with rt.Server(kit.addresses(local=1), "local", 0):
        assert len(list(place.iterdir())) == 1


def _as_nobody(server: dict[str, Any], pipe: Any) -> None:
    """As another user of the host: what each port says."""
    with rt.Session(server["target"]):  # as the same user first: everything is imported then
        pass
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    said: dict[str, str] = {}

    def attempt(name: str, action: Any) -> None:
        try:
            action()
            said[name] = "let in"
        except (OSError, rt.OpError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("session", lambda: rt.Session(server["target"]))
    attempt("probe", lambda: rt.probe(server["target"]))
    attempt("reset", lambda: rt.Session.reset(server["target"]))
    for way, unix in (("tcp", None), ("unix", server["unix"])):
        there = Endpoint(
            "127.0.0.1", server["port"], unix, server["host_id"], server["incarnation"]
        )
        peer = Peer(
            TASK,
            lambda timeout, there=there: there,
            7,
            lambda timeout: find_token(server["target"][7:], None, 1),
        )
        attempt(way, peer.acquire)
        peer.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        attempt("socket", lambda: sock.connect(server["unix"]))
    for path in server["files"]:
        attempt("file", lambda path=path: open(path).close())
    pipe.send(("SAID", said))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_is_refused(server: rt.Server, place: pathlib.Path) -> None:
    """Another user of the host is refused at every port and file."""
    endpoint = server.tensors.endpoint("127.0.0.1")
    about = {
        "target": server.target.replace("localhost", "127.0.0.1"),
        "address": server.address,
        "port": server.tensors.port,
        "unix": server.tensors.unix_path,
        "host_id": endpoint.host_id,
        "incarnation": endpoint.incarnation,
        "files": [str(path) for path in place.iterdir()],
    }
    with Task(_as_nobody, about) as nobody:
        said = nobody.hear("SAID")[1]
        nobody.wait()
    assert about["files"]
    for name in ("session", "probe", "reset", "tcp", "unix"):
        assert said[name].startswith("UnauthenticatedError") and VARIABLE in said[name], said
    assert said["socket"].startswith("PermissionError") and said["file"].startswith(
        "PermissionError"
    ), said
    assert server.tensors.counters.lanes == 0 or server.report().values["sessions"] == 0
