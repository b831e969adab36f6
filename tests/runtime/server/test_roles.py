"""Roles: which client may give which order, over real sockets with real certificates, as one table.

Requests are of no consequence where they are let through: they mean another process of the task, or
nothing at all.
"""

import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

import runtime as rt
from harness.certs import CA
from harness.monitoring import status
from runtime.backup.holder import packed_message, read_message
from runtime.cluster.endpoint import Endpoint
from runtime.cluster.spec import split_address
from runtime.plan.plan import HeldOutput
from runtime.proto import cluster_pb2, run_record_pb2, services_pb2_grpc, stage_pb2
from runtime.proto import services_pb2 as pb
from runtime.rpc import rpc
from runtime.server.calls import CHIEFS_KERNELS, METHODS
from runtime.state.leadership import Leadership
from runtime.trust import roles
from runtime.trust.roles import ClientRole, identity_of
from runtime.trust.security import VARIABLE, Security
from runtime.wire.codec import TensorLayout
from runtime.wire.handles import BACKUP, FETCH, PULL, PUSH
from runtime.wire.peer import Peer
from tests.kit import certificates
from tests.kit.changes import SetVariables
from tests.kit.waits import until
from tests.runtime import kit

pytestmark = pytest.mark.cluster

PS, HOLDER, WORKER = "/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0"
ELSE = 1
"""An incarnation that no task has."""
EVERY = "observer worker chief ps admin"
TRAIN, LEAD, TASKS = "worker chief", "chief", "worker chief ps"

TABLE = {
    "status": EVERY,
    "introduce": TASKS,
    "metrics": EVERY,
    "run.inspect": EVERY,
    **dict.fromkeys(("register", "unregister", "trace", "session", "step", "stage"), TRAIN),
    **dict.fromkeys(("run.join", "run.rest", "run.done", "run.stop"), TRAIN),
    **dict.fromkeys(("run.wait_stop", "run.wait_loaded", "run.wait_done"), TRAIN),
    **dict.fromkeys(("checkpoint.states", "checkpoint.changed"), TRAIN),
    **dict.fromkeys(("run.claim", "run.load", "run.open", "run.finish", "quorum"), LEAD),
    **dict.fromkeys(
        ("checkpoint.pause", "checkpoint.let_through", "checkpoint.take", "checkpoint.write"), LEAD
    ),
    **dict.fromkeys(("checkpoint.confirm", "checkpoint.read", "checkpoint.receive"), LEAD),
    **dict.fromkeys(("checkpoint.commit", "checkpoint.drop", "checkpoint.bytes"), LEAD),
    "tensors": TASKS,
    "fetch": TASKS,
    "backup": "ps",
    "clear": "admin",
}
"""What the documentation says, by order."""


def uri(role: str, task: str = "", run: str = "run") -> str:
    return f"bellwether://{run}/{role}{task and '/'}{task}"


class Cluster:
    """A ps and the holder of its backup, each with a certificate of its task, reached as if in other processes."""

    def __init__(self, directory: pathlib.Path, authority: CA) -> None:
        self.directory, self.authority = directory, authority
        self.log = directory / "audit.jsonl"
        self.stack = contextlib.ExitStack()
        spec = kit.addresses(ps=2, worker=1)
        self.servers = {}
        for job, index in (("ps", 0), ("ps", 1), ("worker", 0)):
            role = "chief" if job == "worker" else job
            server = rt.Server(
                spec,
                job,
                index,
                security=self.security(role, f"{job}/{index}"),
                ps_backups=0,
                audit_log=self.log,
            )
            self.servers[f"/job:{job}/task:{index}"] = self.stack.enter_context(server)
            kit.set_apart(server)

    def security(self, role: str, task: str = "", run: str = "run") -> Security:
        """What a client of a role has; of no role at all when it is empty."""
        name = f"{role or 'none'}-{task.replace('/', '-')}-{run}"
        said = uri(role, task, run) if role else ""
        return Security(
            certificates=certificates.make(self.directory / name, self.authority, role=said)
        )

    @contextlib.contextmanager
    def stubs(self, security: Security, of: str = PS) -> Iterator[tuple[Any, Any]]:
        """Both services of a task."""
        with rpc.open_channel(self.servers[of].address, security) as channel:
            yield (
                services_pb2_grpc.WorkerServiceStub(channel),
                services_pb2_grpc.MasterServiceStub(channel),
            )

    @contextlib.contextmanager
    def stranger(self, security: Security) -> Iterator[tuple[Any, Any]]:
        """The same of the ps, as one has them who does not look at the server's certificate for more than its host."""
        server, held = self.servers[PS], security.tls()
        assert held is not None
        shown = held.current
        credentials = grpc.ssl_channel_credentials(shown.authorities, shown.key, shown.certificate)
        with grpc.secure_channel(server.address, credentials) as plain:
            channel = grpc.intercept_channel(
                plain, rpc._TokenProver(plain, server.address, security, "")
            )
            yield (
                services_pb2_grpc.WorkerServiceStub(channel),
                services_pb2_grpc.MasterServiceStub(channel),
            )

    @contextlib.contextmanager
    def lane(self, security: Security, of: str = PS, client: int = 0) -> Iterator[Any]:
        """A connection of the tensor channel of a task, over TCP; of a new client unless one is named."""
        server = self.servers[of]
        there = server.tensors.endpoint("127.0.0.1")
        there = Endpoint(there.host, there.port, None, there.host_id, there.incarnation)
        held = security.tls()
        assert held is not None
        client = client or secrets.randbits(62) | 1
        peer = Peer(of, lambda timeout: there, client, lambda timeout: None, certificates=held)
        with contextlib.closing(peer):
            lane = peer.acquire()
            try:
                yield lane
            finally:
                peer.release(lane)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def authority() -> CA:
    return CA.make()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: CA) -> Iterator[Cluster]:
    before = os.environ.pop(VARIABLE, None)
    made = Cluster(tmp_path_factory.mktemp("roles"), authority)
    try:
        yield made
    finally:
        made.stack.close()
        if before is not None:
            os.environ[VARIABLE] = before


# -- the table ---------------------------------------------------------------------------------------------------


def _stage(kernel: str) -> stage_pb2.StageCallDef:
    return stage_pb2.StageCallDef(
        stage=stage_pb2.StageDef(host=[stage_pb2.HostCallDef(kernel=kernel)])
    )


def _orders(message: Any) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.oneofs_by_name["order"].fields]


def _requests() -> Iterator[tuple[str, str, Any]]:
    """Every order, with a method that takes it and a request: of a task that is not there, of a session that is not."""
    yield "status", "Status", pb.StatusRequest()
    yield "introduce", "Status", pb.StatusRequest(cluster=cluster_pb2.ClusterDef())
    yield "metrics", "Metrics", pb.MetricsRequest()
    yield "register", "Register", pb.RegisterRequest(incarnation=ELSE)
    for kernel in (*sorted(CHIEFS_KERNELS), "when/quorum/claim"):
        yield "quorum", "Register", pb.RegisterRequest(incarnation=ELSE, call=_stage(kernel))
        yield (
            "quorum",
            "RegisterPlan",
            pb.RegisterPlanRequest(session=5, plan=stage_pb2.PlanDef(stages=[_stage(kernel)])),
        )
    yield "register", "Register", pb.RegisterRequest(incarnation=ELSE, call=_stage("quorum/push"))
    yield "register", "RegisterPlan", pb.RegisterPlanRequest(session=5)
    yield "unregister", "Unregister", pb.UnregisterRequest(session=5)
    yield "trace", "Trace", pb.TraceRequest(session=5)
    yield "clear", "Clear", pb.ClearRequest(containers=["none"])
    yield "session", "RenewSession", pb.RenewSessionRequest(session=5)
    yield "session", "CloseSession", pb.CloseSessionRequest(session=5)
    yield "session", "AdoptGenerations", pb.AdoptGenerationsRequest(session=5)
    yield (
        "session",
        "CreateSession",
        pb.CreateSessionRequest(
            options=pb.SessionOptions(device_filters=["/job:ps/task:0"], start_timeout_secs=0.2)
        ),
    )
    yield "step", "RunStep", pb.RunStepRequest(session=5)
    yield "checkpoint.bytes", "ForwardBytes", pb.ForwardBytesRequest(session=5, byte_range=[0] * 6)
    for name in _orders(run_record_pb2.RunOrder):
        order = run_record_pb2.RunOrder(incarnation=ELSE, **{name: {}})
        yield f"run.{name}", "Run", order
        yield (
            f"run.{name}",
            "ForwardRunOrder",
            pb.ForwardRunOrderRequest(session=5, order=order, answer_secs=1.0),
        )
    for name in _orders(pb.CheckpointOrder):
        checkpoint = pb.CheckpointOrder(incarnation=ELSE, **{name: {}})
        yield f"checkpoint.{name}", "Checkpoint", checkpoint
        yield (
            f"checkpoint.{name}",
            "ForwardCheckpoint",
            pb.ForwardCheckpointRequest(session=5, order=checkpoint),
        )


def _answer(stubs: tuple[Any, Any], method: str, request: Any) -> tuple[str, str]:
    stub = next(stub for stub in stubs if hasattr(stub, method))
    try:
        getattr(stub, method)(request, timeout=60)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@pytest.mark.parametrize("role", ["", *ClientRole])
def test_role_gives_its_orders_only(cluster: Cluster, role: str) -> None:
    """A role gives the orders of the table and no others."""
    wrong = []
    with cluster.stubs(cluster.security(role)) as stubs:
        for order, method, request in _requests():
            code, text = _answer(stubs, method, request)
            allowed = not role or role in TABLE[order].split()
            refused = code == "PERMISSION_DENIED"
            needed = TABLE[order].replace(" ", " or ")
            expected = f"{order!r} is for the role {needed}, and this client has the role {role}"
            if refused is allowed or (refused and text != expected) or code == "UNAUTHENTICATED":
                wrong.append((order, method, code, text))
    assert not wrong


@pytest.mark.parametrize("role", ["", *ClientRole])
def test_role_uses_channel_by_table(cluster: Cluster, role: str) -> None:
    """A role uses the tensor channel as the table says."""
    security = cluster.security(role)
    if role and role not in TASKS.split():
        with pytest.raises(
            rt.PermissionDeniedError, match=f"'tensors' is for the role .*has the role {role}"
        ):
            with cluster.lane(security):
                pass
        return
    leadership = np.array([1, 1, 1, 0, 0, 0], np.uint64)
    # Of a stage that nobody has registered everybody hears that.
    calls: dict[str, tuple[int, list[Any], bool]] = {
        "fetch": (FETCH, [np.array([1, 2], np.uint64)], True),  # one number too few
        "backup": (
            BACKUP,
            packed_message({"kind": "take", "of": PS, "index": 0, "process_id": 1}, []),
            True,
        ),
    }
    for order, (handle, arrays, dynamic) in calls.items():
        with cluster.lane(security) as lane, pytest.raises(rt.OpError) as caught:
            lane.call(handle, 0, arrays, None, dynamic=dynamic)
        assert isinstance(caught.value, rt.PermissionDeniedError) is (
            bool(role) and role not in TABLE[order].split()
        )
    for handle, arrays in ((PULL, [leadership]), (PUSH, [leadership, np.zeros(1, np.uint8)])):
        with cluster.lane(security) as lane, pytest.raises(rt.OpError) as caught:
            lane.call(handle, 0, arrays, TensorLayout([]), dynamic=handle == PUSH)
        assert isinstance(caught.value, rt.PermissionDeniedError) is (
            bool(role) and role != "chief"
        )


def test_documented_table_is_the_code() -> None:
    """The table of roles in the code is that of the documentation."""
    may = {order: set(given) for order, given in roles.MAY.items() if order != "unknown"}
    assert may == {order: set(given.split()) for order, given in TABLE.items()}


def test_every_order_has_a_row() -> None:
    """Every method is an order, and every order has a row in the table."""
    methods = {
        f"/{service.full_name}/{method.name}"
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert METHODS.keys() == methods
    for plane, message in (("run", run_record_pb2.RunOrder), ("checkpoint", pb.CheckpointOrder)):
        assert {f"{plane}.{name}" for name in _orders(message)} <= roles.MAY.keys()


def test_unknown_order_is_invalid(cluster: Cluster) -> None:
    """An unknown order is INVALID_ARGUMENT and not a question of roles."""
    with cluster.stubs(cluster.security("observer")) as stubs:
        assert _answer(stubs, "Checkpoint", pb.CheckpointOrder())[0] == "INVALID_ARGUMENT"


# -- refusals are told -------------------------------------------------------------------------------------------


def test_refusal_is_audited_with_reason(cluster: Cluster) -> None:
    """A refusal is audited once, with the identity and the reason."""
    security = cluster.security("observer", run="audited")
    cluster.servers[PS].worker  # noqa: B018  # it serves
    with cluster.stubs(cluster.security("ps")) as stubs:
        for _ in range(3):
            _answer(stubs, "Clear", pb.ClearRequest(all=True))
    lines = [
        line for line in cluster.lines() if line["action"] == "clear" and uri("ps") in line["who"]
    ]
    assert len(lines) <= 1  # the matrix may have been first
    assert all(line["outcome"] == "refused" and "the role ps" in line["what"] for line in lines)
    with cluster.stranger(security) as stubs:
        code, text = _answer(stubs, "Status", pb.StatusRequest())
    assert (
        code == "PERMISSION_DENIED"
        and text == "this task is of the run 'run', and the client's certificate of 'audited'"
    )
    (line,) = [
        line for line in cluster.lines() if line["action"] == "status" and "audited" in line["who"]
    ]
    assert (line["outcome"], line["task"]) == ("refused", PS) and line["peer"] == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        "bellwether://run/king",
        "bellwether://run",
        "bellwether://run/ps/ps/x",
        "bellwether://run/PS",
    ],
)
def test_invalid_role_allows_nothing(cluster: Cluster, tmp_path: pathlib.Path, said: str) -> None:
    """A certificate whose role does not exist allows nothing."""
    security = Security(
        certificates=certificates.make(tmp_path / "c", cluster.authority, role=f"{said}")
    )
    with cluster.stubs(security) as stubs:
        code, text = _answer(stubs, "Status", pb.StatusRequest())
    assert code == "PERMISSION_DENIED" and "which is no role" in text and said in text
    with pytest.raises(rt.PermissionDeniedError, match="which is no role"), cluster.lane(security):
        pass


def test_both_planes_give_one_identity(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """Both planes and the files give one identity to a client."""
    names = ("127.0.0.1", "localhost", "::1", "w-0.mnist", "*.mnist")
    directory = certificates.make(
        tmp_path / "c", cluster.authority, names, role=uri("worker", "worker/3")
    )
    security = Security(certificates=directory)
    held = security.tls()
    assert held is not None
    ours = identity_of(held.current.names)
    assert (ours.role, ours.run, ours.task) == (ClientRole.WORKER, "run", "/job:worker/task:3")
    with cluster.lane(security, client=99), cluster.stubs(security) as (worker, _):
        lanes = cluster.servers[PS].tensors.lanes
        lanes.check_client(99, ours)
        with pytest.raises(rt.PermissionDeniedError, match=f"is that of {re.escape(str(ours))}"):
            lanes.check_client(99, identity_of(("w1", uri("worker", "worker/1"))))
        worker.Trace(pb.TraceRequest(session=99), timeout=60)  # over gRPC it is the same client


# -- who speaks for whom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["join", "rest", "done", "claim", "load", "open", "finish"])
def test_run_order_speaks_for_own_task(cluster: Cluster, name: str) -> None:
    """An order to the run record speaks for the task of its certificate only."""
    order = run_record_pb2.RunOrder(incarnation=ELSE, sender="/job:worker/task:1", **{name: {}})
    with cluster.stubs(cluster.security("chief", "worker/0")) as stubs:
        code, text = _answer(stubs, "Run", order)
        assert (
            code == "PERMISSION_DENIED"
            and "/job:worker/task:0" in text
            and "/job:worker/task:1" in text
        )
        order.sender = "/job:worker/task:0"
        # it is let through, and means another process
        assert _answer(stubs, "Run", order)[0] == "ABORTED"


@pytest.mark.parametrize("name", ["join", "rest", "done", "claim", "load", "open", "finish"])
def test_no_master_speaks_for_another(cluster: Cluster, name: str) -> None:
    """A worker that had the chief's master send `done` for the chief ended the run of all."""
    order = run_record_pb2.RunOrder(incarnation=ELSE, **{name: {}})
    request = pb.ForwardRunOrderRequest(session=5, order=order, answer_secs=1.0)
    may_lead = ClientRole.WORKER in roles.MAY[f"run.{name}"]
    with cluster.stubs(
        cluster.security("worker" if may_lead else "chief", "worker/1"), WORKER
    ) as stubs:
        code, text = _answer(stubs, "ForwardRunOrder", request)
    assert (
        code == "PERMISSION_DENIED"
        and "is that of /job:worker/task:1, and the order speaks for" in text
    )
    with cluster.stubs(cluster.security("chief", "worker/0"), WORKER) as stubs:
        assert _answer(stubs, "ForwardRunOrder", request)[0] != "PERMISSION_DENIED"


def test_worker_registers_nothing_on_another(cluster: Cluster) -> None:
    """A worker registers stages on itself and on ps, and not on another worker."""
    requests = (
        ("Register", pb.RegisterRequest(incarnation=ELSE)),
        ("RegisterPlan", pb.RegisterPlanRequest(session=5)),
    )
    for role, task, to, may in (
        ("worker", "worker/1", WORKER, False),
        ("worker", "worker/1", PS, True),
        ("worker", "worker/0", WORKER, True),
        ("chief", "worker/1", WORKER, True),
    ):
        with cluster.stubs(cluster.security(role, task), to) as stubs:
            for method, request in requests:
                code, text = _answer(stubs, method, request)
                assert (code != "PERMISSION_DENIED") is may, (role, task, to, text)


@pytest.fixture
def holder(cluster: Cluster) -> Iterator[rt.Server]:
    """The task that holds backups of others; empty."""
    from runtime.backup.holder import BackupHolder

    server = cluster.servers[HOLDER]
    server.worker._backups = BackupHolder(None, server._parts.peers.check_is_task)
    yield server
    server.worker._backups = None


def push_of(task: str) -> list[Any]:
    header = {
        **{
            "kind": "push",
            "of": task,
            "hello": True,
            "process_id": 1,
            "version": 1,
            "base": None,
            "index": 0,
        },
        **{"put": [], "keep": [], "about": {}, "unusable_because": ""},
    }
    return packed_message(header, [])


def take_of(task: str) -> list[Any]:
    return packed_message({"kind": "take", "of": task, "index": 0, "process_id": 2}, [])


@pytest.mark.usefixtures("holder")
def test_forged_backup_is_refused(cluster: Cluster) -> None:
    """A ps gives and takes its own backup only."""
    with cluster.lane(cluster.security("ps", "ps/0"), HOLDER) as lane:
        assert read_message(lane.call(BACKUP, 0, push_of(PS), None, dynamic=True))[0] == {}
    for security in (cluster.security("ps", "ps/1"), cluster.security("ps", "ps/7")):
        for message in (push_of(PS), take_of(PS)):
            with cluster.lane(security, HOLDER) as lane:
                with pytest.raises(
                    rt.PermissionDeniedError, match="the order speaks for /job:ps/task:0"
                ):
                    lane.call(BACKUP, 0, message, None, dynamic=True)
    with cluster.lane(cluster.security("ps", "ps/0"), HOLDER) as lane:
        assert read_message(lane.call(BACKUP, 0, take_of(PS), None, dynamic=True))[0]["found"]
        with pytest.raises(rt.PermissionDeniedError, match="the cluster has no /job:ps/task:9"):
            lane.call(BACKUP, 0, push_of("/job:ps/task:9"), None, dynamic=True)


@pytest.mark.usefixtures("holder")
def test_backup_without_role_follows_host(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """Without a role a backup belongs to the host in the certificate."""
    for names, good in ((("127.0.0.1", "localhost"), True), (("w7", "10.0.0.7"), False)):
        directory = certificates.make(tmp_path / names[0], cluster.authority, names)
        with cluster.lane(Security(certificates=directory), HOLDER) as lane:
            if good:
                assert read_message(lane.call(BACKUP, 0, push_of(PS), None, dynamic=True))[0] == {}
                continue
            for message in (push_of(PS), take_of(PS)):
                with pytest.raises(
                    rt.PermissionDeniedError, match="is that of 10.0.0.7 w7.*has at localhost"
                ):
                    lane.call(BACKUP, 0, message, None, dynamic=True)


def test_learned_addresses_allow_no_backup() -> None:
    """Addresses that a client told allow no task to give a backup."""
    with rt.Server(kit.addresses(ps=1), "ps", 0) as server:
        server._parts.peers.learn_addresses(rt.ClusterSpec({"ps": [server.address, "w7:2222"]}))
        with pytest.raises(rt.PermissionDeniedError, match="the cluster has no /job:ps/task:1"):
            server._parts.peers.check_is_task("/job:ps/task:1")


def test_server_needs_its_own_certificate(cluster: Cluster) -> None:
    """A server serves with a certificate of its own task only."""
    spec = kit.addresses(ps=2)
    for role, task, why in (
        ("ps", "ps/1", "bellwether://run/ps/ps/1"),
        ("observer", "", "bellwether://run/observer"),
        ("worker", "", "bellwether://run/worker"),
        ("chief", "", "bellwether://run/chief"),
    ):
        with pytest.raises(rt.PermissionDeniedError, match=IS_NOT.format(why=why)):
            rt.Server(spec, "ps", 0, security=cluster.security(role, task), start=False)


IS_NOT = "is not for this server: it is that of .*{why}.* has not the name 0.ps.run"
STAND_INS = [
    ("worker", "worker/1", "run", "bellwether://run/worker/worker/1"),
    ("ps", "ps/1", "run", "bellwether://run/ps/ps/1"),
    ("worker", "", "run", "bellwether://run/worker"),
    ("chief", "", "run", "bellwether://run/chief"),
    ("king", "", "run", "bellwether://run/king"),
    ("ps", "ps/0", "other", "bellwether://other/ps/ps/0"),
    ("", "", "", "127.0.0.1 localhost, "),
    ("ps", "", "run", ""),
    ("ps", "ps/0", "run", ""),
]
"""The certificate of a server, and how the refusal names it; empty where the server may be /job:ps/task:0."""


@pytest.fixture(scope="module")
def stand_in(cluster: Cluster) -> Iterator[Callable[..., rt.Server]]:
    """A server at the place of /job:ps/task:0 whose host is right, and whose certificate says what one likes.

    It has begun with one of that task: ours do not with another.
    """
    directory = certificates.make(
        cluster.directory / "stand-in", cluster.authority, role=uri("ps", "ps/0")
    )
    with rt.Server(
        kit.addresses(ps=1), "ps", 0, security=Security(certificates=directory)
    ) as server:
        kit.set_apart(server)

        def now(role: str, task: str, run: str) -> rt.Server:
            pair = certificates.pair_of(
                cluster.authority, role=uri(role, task, run) if role else ""
            )
            certificates.write(directory, "here", cluster.authority, pair)
            return server

        yield now


@pytest.mark.parametrize(("role", "task", "run", "why"), STAND_INS)
def test_lane_needs_the_meant_task(
    cluster: Cluster, stand_in: Callable[..., rt.Server], role: str, task: str, run: str, why: str
) -> None:
    """No lane is opened to a server that is another task."""
    server = stand_in(role, task, run)
    held = cluster.security("worker", "worker/0").tls()
    there = server.tensors.endpoint("127.0.0.1")
    assert held is not None
    peer = Peer(
        *(
            PS,
            lambda timeout: Endpoint(
                there.host, there.port, None, there.host_id, there.incarnation
            ),
            7,
        ),
        lambda timeout: None,
        certificates=held,
    )
    lanes = server.tensors.counters.lanes
    with contextlib.closing(peer):
        if not why:
            peer.release(peer.acquire())
            return
        with pytest.raises(
            rt.PermissionDeniedError,
            match=f"^{PS}: .*{IS_NOT.format(why=why)}",
        ):
            peer.acquire()
    assert server.tensors.counters.lanes == lanes


def ask(channel: grpc.Channel, *, wait: bool = False, timeout: float = 60.0) -> str:
    """Asks a task that should be the ps who it is."""
    stub = services_pb2_grpc.WorkerServiceStub(channel)
    found = rpc.call(stub.Status, pb.StatusRequest(), timeout=timeout, task=PS, wait_for_ready=wait)
    return str(found.task)


@pytest.mark.parametrize(("role", "task", "run", "why"), STAND_INS)
def test_order_needs_the_meant_task(
    cluster: Cluster, stand_in: Callable[..., rt.Server], role: str, task: str, run: str, why: str
) -> None:
    """No order is given to a server that is another task."""
    server = stand_in(role, task, run)
    with rpc.open_channel(server.address, cluster.security("worker", "worker/0"), PS) as channel:
        if not why:
            assert ask(channel) == PS
            return
        for wait in (False, True):
            with pytest.raises(
                rt.PermissionDeniedError,
                match=f"^{PS}: .*{IS_NOT.format(why=why)}",
            ):
                ask(channel, wait=wait)


@contextlib.contextmanager
def a_ps(cluster: Cluster, spec: Any, directory: pathlib.Path, role: str) -> Iterator[rt.Server]:
    """A server at the place of the ps that shows a certificate with a role; it has begun with a good one."""
    certificates.make(directory, cluster.authority, role=uri("ps", "ps/0"))
    server = rt.Server(spec, "ps", 0, security=Security(certificates=directory), start=False)
    certificates.make(directory, cluster.authority, role=role)
    with server:
        server.start()
        kit.set_apart(server)
        yield server


def test_channel_stays_with_its_task(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """A channel goes on with the same task after a restart, and with no other."""
    spec, good, bad = kit.addresses(ps=1), uri("ps", "ps/0"), uri("worker", "worker/1")
    with rpc.open_channel(spec["ps"][0], cluster.security("worker", "worker/0"), PS) as channel:
        with pytest.raises(rt.UnavailableError):
            ask(channel)  # nobody is there
        for number, role in enumerate((good, good, uri("ps"), good)):
            with a_ps(cluster, spec, tmp_path / f"{number}", role):
                assert ask(channel, wait=True) == ask(channel) == PS
        with a_ps(cluster, spec, tmp_path / "bad", bad):
            for wait in (False, True):
                with pytest.raises(
                    rt.PermissionDeniedError, match=f"{PS}: .* it is that of .*worker/1"
                ):
                    ask(channel, wait=wait)
        with a_ps(cluster, spec, tmp_path / "again", good):

            def answers() -> bool:
                try:
                    return ask(channel) == PS
                except rt.UnavailableError:  # gRPC connects anew after a pause
                    return False

            until(answers)


def test_session_names_the_stand_in(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """A session names the task whose certificate answers in place of another."""
    spec, orders = kit.addresses(ps=1, worker=1), cluster.security("chief", "worker/0")
    with a_ps(cluster, spec, tmp_path / "bad", uri("worker", "worker/1")) as stand_in:
        with (
            rt.Server(spec, "worker", 0, security=orders) as worker,
            rt.Graph().as_default() as graph,
        ):
            with rt.device(PS):
                w = rt.Variable(np.zeros(3, np.float32), name="w")
            with pytest.raises(
                rt.PermissionDeniedError, match=f"^{PS}: .* it is that of .*worker/1"
            ):
                rt.Session(worker.target, graph, rt.SessionConfig(start_timeout_secs=60)).run(
                    w.initializer
                )
        assert not stand_in.worker.store.variables() and not len(stand_in.worker.registry)


@pytest.mark.parametrize("role", ["ps", "worker"])
def test_waiting_client_waits_for_task(cluster: Cluster, tmp_path: pathlib.Path, role: str) -> None:
    """A client that waits for a task takes that task and no other."""
    spec = kit.addresses(ps=1)
    with rpc.open_channel(spec["ps"][0], cluster.security("worker", "worker/0"), PS) as channel:
        thread, heard = kit.in_thread(lambda: ask(channel, wait=True))
        with a_ps(cluster, spec, tmp_path / "late", uri(role, f"{role}/0")):
            thread.join(60)
    assert heard == [PS] if role == "ps" else isinstance(heard[0], rt.PermissionDeniedError), heard


def test_waiting_for_nobody_ends(cluster: Cluster) -> None:
    """A wait for a task that never comes ends in time or when the channel is closed."""
    spec, security = kit.addresses(ps=1), cluster.security("worker", "worker/0")
    with (
        rpc.open_channel(spec["ps"][0], security, PS) as channel,
        pytest.raises(rt.DeadlineExceededError),
    ):
        ask(channel, wait=True, timeout=0.5)
    with socket.create_server(split_address(spec["ps"][0]), backlog=8):  # and says nothing
        with (
            rpc.open_channel(spec["ps"][0], security, PS) as channel,
            pytest.raises(rt.DeadlineExceededError),
        ):
            ask(channel, timeout=0.5)
    channel = rpc.open_channel(spec["ps"][0], security, PS)
    thread, heard = kit.in_thread(lambda: ask(channel, wait=True, timeout=600.0))
    channel.close()
    thread.join(60)
    assert isinstance(heard[0], rt.CancelledError), heard


def test_tasks_have_different_names() -> None:
    """The names of two tasks in certificates are never the same."""
    said = [
        "run/ps/ps/0",
        "Run/ps/ps/0",
        "run/ps/PS/0",
        "run/ps/a.ps/0",
        "ps.run/ps/a/0",
        "run/ps/ps/1",
        "other/ps/ps/0",
    ]
    names = [roles.server_names(f"bellwether://{each}")[0] for each in said]
    assert names[0] == "0.ps.run.bellwether" and len(set(names)) == len(names)
    assert {roles.server_name([f"bellwether://{each}"], "")[-11:] for each in said} == {
        ".bellwether"
    }
    assert roles.server_names("bellwether://run/observer") == []
    assert (
        roles.server_name(["bellwether://run/observer"], PS) == roles.server_name(["w1"], PS) == ""
    )


def test_old_certificate_says_what_to_do(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """A certificate of 0.1 without the task's name is refused with what to do."""
    directory = certificates.make(tmp_path / "old", cluster.authority, role="")
    made = x509.load_pem_x509_certificate((directory / "here.pem").read_bytes())
    builder = x509.CertificateBuilder(
        made.issuer, made.subject, made.public_key(), made.serial_number
    )
    builder = builder.not_valid_before(made.not_valid_before_utc).not_valid_after(
        made.not_valid_after_utc
    )
    names = [x509.DNSName("localhost"), x509.UniformResourceIdentifier(uri("ps", "ps/0"))]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = builder.sign(cluster.authority.key, SHA256()).public_bytes(Encoding.PEM)
    (directory / "here.pem").write_bytes(pem)
    with pytest.raises(
        rt.PermissionDeniedError, match=r"has not the name 0.ps.run.bellwether.*0\.2 .*--renew"
    ):
        rt.Server(
            kit.addresses(ps=1), "ps", 0, security=Security(certificates=directory), start=False
        )


WORKER_1 = identity_of(("w1", uri("worker", "worker/1")))
OF_HOST = identity_of(("w1", "10.0.0.1"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (WORKER_1, WORKER_1, True),
        # renewed, with another name
        (WORKER_1, identity_of(("w1", "w1.local", uri("worker", "worker/1"))), True),
        (WORKER_1, identity_of(("w1", uri("worker", "worker/2"))), False),
        (WORKER_1, identity_of(("w1", uri("chief", "worker/1"))), False),
        (WORKER_1, identity_of(("w1", uri("worker", "worker/1", run="other"))), False),
        (WORKER_1, identity_of(("w1",)), False),
        (WORKER_1, roles.ANYBODY, True),  # on the Unix socket
        (OF_HOST, identity_of(("w1", "w1.local")), True),
        (OF_HOST, identity_of(("w2", "10.0.0.2")), False),
        (identity_of(("w1", uri("worker"))), identity_of(("w2", uri("worker"))), False),
        (identity_of(("w1", uri("worker"))), identity_of(("w1", "w2", uri("worker"))), True),
    ],
)
def test_renewed_client_stays_the_same(
    one: roles.Identity, other: roles.Identity, same: bool
) -> None:
    """A client is the same after its certificate is renewed, and another client is not."""
    assert one.is_as(other) is other.is_as(one) is same


# -- what belongs to whom ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def training(cluster: Cluster) -> Iterator[tuple[Any, rt.Variable, Callable[[], Any]]]:
    """A session of the chief, in another process as far as the ps can tell, that trains."""
    chief = cluster.servers[WORKER]
    with rt.Graph().as_default() as graph:
        with rt.device(PS):
            w = rt.Variable(np.zeros(3, np.float32), name="w")
            step = w.assign_add(np.ones(3, np.float32))
        with rt.Session(
            chief.target, graph, security=cluster.security("chief", "worker/0")
        ) as sess:
            sess.run(w.initializer)
            yield sess, w, lambda: sess.run(step)


def test_stages_run_for_their_session(cluster: Cluster) -> None:
    """The stages of a session are not run by others."""
    with training(cluster) as (sess, w, step):
        step()
        handles = list(cluster.servers[PS].worker.registry.kept()[0])
        assert handles
        for role in ("worker", "chief", ""):
            with cluster.lane(cluster.security(role), client=4711) as lane:
                for handle in handles:
                    with pytest.raises(
                        rt.PermissionDeniedError,
                        match=f"stage {handle} is not one of this session's",
                    ):
                        lane.call(handle, 1, [], TensorLayout([]))
        step()
        assert sess.run(w).tolist() == [2.0] * 3


def test_held_tensors_go_to_receivers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held tensor is given to the tasks for which it is held and to no others."""
    held = cluster.servers[PS].worker.rendezvous
    key, value = (4711, 1, 0), np.arange(3, dtype=np.float32)
    monkeypatch.setitem(cluster.servers[PS]._parts.peers._known, "/job:worker/task:2", "w2:2222")
    for by, may in (
        ({HOLDER}, {"ps/1", ""}),  # "" says no task, and is of the host that all of them are at
        ({HOLDER, "/job:worker/task:1"}, {"ps/1", "worker/1", ""}),
        ({"/job:worker/task:1"}, {"worker/1", ""}),  # the cluster does not say where that is
        ({"/job:worker/task:2"}, set()),  # and that is elsewhere
        (set(), {"ps/0", "ps/1", "worker/1", ""}),
    ):
        for task in ("ps/0", "ps/1", "worker/1", ""):
            held.put(key, value, HeldOutput(1, frozenset(by)))
            with cluster.lane(
                cluster.security("ps" if task.startswith("ps") else "worker", task)
            ) as lane:
                if task in may:
                    (found,) = lane.call(FETCH, 1, [np.array(key, np.uint64)], None, dynamic=True)
                    assert found.tolist() == value.tolist()
                else:
                    named = ", ".join(sorted(by))
                    with pytest.raises(
                        rt.PermissionDeniedError,
                        match=f"held for {named}, and the certificate is that",
                    ):
                        lane.call(FETCH, 1, [np.array(key, np.uint64)], None, dynamic=True)
                assert len(held) == (task not in may), "who may not have it takes it from nobody"
            held.drop_session(key[0])


def test_lanes_belong_to_their_session(cluster: Cluster) -> None:
    """The lanes of a session are not taken by others."""
    with training(cluster) as (sess, w, step):
        step()
        context = cluster.servers[PS].tensors._context
        # What the session has connected by is the Unix socket; over TCP it would show the worker's
        # certificate.
        own = identity_of(("127.0.0.1", "localhost", uri("chief", "worker/0")))
        clients = set(context.lanes._clients)
        for client in clients:
            context.lanes._who[client] = own
            with pytest.raises(
                rt.PermissionDeniedError, match="this session is that of .*chief/worker/0"
            ):
                with cluster.lane(cluster.security("worker", "worker/1"), client=client):
                    pass
            with cluster.stubs(cluster.security("worker", "worker/1")) as stubs:
                for method, request in (
                    ("Trace", pb.TraceRequest(session=client)),
                    ("Unregister", pb.UnregisterRequest(session=client, handles=[1, 2, 3])),
                ):
                    assert _answer(stubs, method, request)[0] == "PERMISSION_DENIED"
        step()
        assert sess.run(w).tolist() == [2.0] * 3


def test_session_belongs_to_its_client(cluster: Cluster) -> None:
    """The session of a master is not used or ended by other clients."""
    with training(cluster) as (sess, w, step):
        step()
        (number,) = cluster.servers[PS].worker.registry.kept()[2]
        with cluster.stubs(cluster.security("chief", "worker/5"), WORKER) as stubs:
            for method, request in (
                ("RenewSession", pb.RenewSessionRequest(session=number)),
                ("RunStep", pb.RunStepRequest(session=number, plan=1)),
                ("RegisterPlan", pb.RegisterPlanRequest(session=number)),
            ):
                code, text = _answer(stubs, method, request)
                # as of one that is not there
                assert code == "ABORTED" and "is not found here" in text
            assert _answer(stubs, "CloseSession", pb.CloseSessionRequest(session=number))[0] == "OK"
        step()
        assert sess.run(w).tolist() == [2.0] * 3


def test_worker_cannot_lead(cluster: Cluster) -> None:
    """A worker that has seen the leadership cannot give orders under it."""
    with training(cluster) as (sess, _, step):
        step()
        with cluster.stubs(cluster.security("chief", "worker/0")) as stubs:
            incarnation = cluster.servers[PS].incarnation
            claim = run_record_pb2.RunOrder(
                incarnation=incarnation,
                sender=WORKER,
                leadership=Leadership(9, 9).to_proto(),
                claim=run_record_pb2.RunOrder.Claim(),
            )
            assert _answer(stubs, "Run", claim)[0] == "OK"
        with cluster.stubs(cluster.security("worker", "worker/1")) as stubs:
            seen = (
                stubs[0]
                .Run(
                    run_record_pb2.RunOrder(
                        incarnation=incarnation, inspect=run_record_pb2.RunOrder.Inspect()
                    ),
                    timeout=60,
                )
                .leadership
            )
            assert seen == Leadership(9, 9).to_proto()
            order = pb.CheckpointOrder(
                leadership=seen, pause=pb.CheckpointOrder.Pause(job=1, seconds=9.0)
            )
            assert _answer(stubs, "Checkpoint", order)[0] == "PERMISSION_DENIED"
        step()


def test_only_admin_clears_variables(cluster: Cluster, set_variables: SetVariables) -> None:
    """An admin clears the variables of a cluster, and no other role does."""
    target = cluster.servers[WORKER].target
    with training(cluster) as (_, w, step):
        step()
        for role in ("observer", "worker", "chief", "ps"):
            set_variables({VARIABLE: str(cluster.security(role).certificates)})
            with pytest.raises(rt.PermissionDeniedError, match="'clear' is for the role admin"):
                rt.Session.reset(target)
        step()
        set_variables({VARIABLE: str(cluster.security("admin").certificates)})
        rt.Session.reset(target)
        assert not cluster.servers[PS].worker.store.variables()
        with pytest.raises(rt.AbortedError):
            step()


# -- tokens ------------------------------------------------------------------------------------------------------


def test_observer_token_only_looks(
    tmp_path: pathlib.Path, set_variables: SetVariables, capsys: pytest.CaptureFixture[str]
) -> None:
    """The observer's token looks and does nothing else."""
    set_variables({VARIABLE: None})
    key = bytes(range(32))
    # what the documentation has openssl make
    observers = hmac.digest(key, b"observer", hashlib.sha256)
    files = {}
    for name, content in (("token", key), ("observer", observers)):
        files[name] = tmp_path / name
        files[name].touch(mode=0o600)
        files[name].write_text(content.hex())
    spec = kit.addresses(ps=1)
    with rt.Server(spec, "ps", 0, security=Security(files["token"])) as server:
        kit.set_apart(server, host=True)
        given = Security(files["observer"])
        assert rt.probe(server.address, 30, security=given).task == PS
        wrong = []
        with rpc.open_channel(server.address, given) as channel:
            stubs = (
                services_pb2_grpc.WorkerServiceStub(channel),
                services_pb2_grpc.MasterServiceStub(channel),
            )
            for order, method, request in _requests():
                code, text = _answer(stubs, method, request)
                if (code == "PERMISSION_DENIED") is (
                    "observer" in TABLE[order]
                ) or code == "UNAUTHENTICATED":
                    wrong.append((order, method, code, text))
        assert not wrong
        there = server.tensors.endpoint("127.0.0.1")
        for endpoint in (
            there,
            Endpoint(there.host, there.port, None, there.host_id, there.incarnation),
        ):
            peer = Peer(PS, lambda timeout, found=endpoint: found, 7, lambda timeout: given.token())
            with pytest.raises(rt.UnauthenticatedError):
                peer.acquire()
            peer.close()
        assert (
            status.main([f"--cluster=ps={spec['ps'][0]}", f"--security={files['observer']}"]) == 0
        )
        assert re.search(r"/job:ps/task:0 +up", capsys.readouterr().out)
