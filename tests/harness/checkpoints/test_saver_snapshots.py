"""A checkpoint is of one instant, whatever comes between the pause of the tasks and the taking of the references."""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import names
from runtime.checkpoint import coordinator as coordinator
from runtime.master.tasks import RemoteTask
from runtime.proto import services_pb2 as pb
from runtime.server.server import Server
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.runtime import kit

pytestmark = pytest.mark.disk

PS = ("/job:ps/task:0", "/job:ps/task:1")


class Training:
    """Three threads that count in two variables, one on each ps, while the block lasts."""

    def __init__(self, server: Server, sess: rt.Session, variables: dict[str, rt.Variable]) -> None:
        self.sess = sess
        self.variables = list(variables.values())
        self.steps = 0
        self.server = server
        self._op = rt.group(*[v.assign_add(1) for v in variables.values()])
        self._stop = threading.Event()

    def _work(self) -> None:
        with ckit.session(self.server, self.sess.graph) as mine:
            while not self._stop.is_set():
                mine.run(self._op)
                self.steps += 1

    def wait_for_steps(self, count: int, secs: float) -> bool:
        """Waits until so many more steps are done; False when they are not after so many seconds."""
        wanted, until = self.steps + count, time.monotonic() + secs
        while self.steps < wanted and time.monotonic() < until:
            time.sleep(0.002)
        return self.steps >= wanted

    def __enter__(self) -> "Training":
        self._threads = [threading.Thread(target=self._work) for _ in range(3)]
        for thread in self._threads:
            thread.start()
        assert self.wait_for_steps(10, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def training(**options: Any) -> Iterator[Training]:
    addresses = kit.addresses(ps=2, worker=1)
    graph, v = ckit.make_graph({"a": np.int64(0), "b": np.int64(0)}, {"b": 1})
    with contextlib.ExitStack() as stack:
        for index in range(2):
            ps = stack.enter_context(rt.Server(addresses, "ps", index, **options))
            coordinator_sees_as_remote(ps)
        server = stack.enter_context(rt.Server(addresses, "worker", 0))
        stack.enter_context(graph.as_default())
        sess = stack.enter_context(ckit.session(server, graph))
        ckit.initialize(sess, list(v.values()))
        yield stack.enter_context(Training(server, sess, v))


def coordinator_sees_as_remote(server: Server) -> None:
    from runtime.master import tasks

    tasks.withdraw(server.address, server)


def assert_of_one_instant(path: str) -> None:
    assert harness.load_variable(path, "a") == harness.load_variable(path, "b")


class Between(coordinator.CheckpointCoordinator):
    """A coordinator to whom something happens between its pause and its taking, once.

    The second ps is asked last for its references, and only when training has gone on, if it can.
    """

    def __init__(
        self,
        train: Training,
        event: Callable[[], object],
        *,
        pause_secs: float | None = None,
        always: bool = False,
    ) -> None:
        super().__init__(train.sess._engine, train.sess.authority.over)
        self._train = train
        self._event = event
        self._pause_secs = pause_secs
        self._always = always
        self._first_taken = threading.Event()
        self.pauses = 0
        train.sess.checkpoint_coordinator = self

    @property
    def _happens(self) -> bool:
        return self._always or self.pauses == 1

    def _pause(self, *args: Any) -> None:
        self.pauses += 1
        self._first_taken.clear()
        super()._pause(*args)
        if self._happens:
            self._event()

    def _request(self, task: str, order: pb.CheckpointOrder, *rest: Any) -> pb.CheckpointReply:
        if order.HasField("pause") and self._pause_secs is not None and self._happens:
            order.pause.seconds = self._pause_secs
        if not order.HasField("take") or not self._happens:
            return super()._request(task, order, *rest)
        if task == PS[1]:
            assert self._first_taken.wait(60)
            self._train.wait_for_steps(10, 0.5)
            return super()._request(task, order, *rest)
        try:
            return super()._request(task, order, *rest)
        finally:
            self._first_taken.set()


def test_stalled_coordinator_cuts_again(tmp_path: pathlib.Path) -> None:
    """A coordinator that stalls in a pause cuts again, and the checkpoint is of one instant."""
    with training() as train:
        stalled = Between(train, lambda: train.wait_for_steps(10, 60), pause_secs=0.2)
        path = harness.Saver().save(train.sess, tmp_path / "m", 1)
        assert stalled.pauses == 2
    assert_of_one_instant(path)


def test_always_stalled_coordinator_fails(tmp_path: pathlib.Path) -> None:
    """A coordinator that stalls in every try fails with the reason, and training continues."""
    with training() as train:
        stalled = Between(train, lambda: train.wait_for_steps(10, 60), pause_secs=0.2, always=True)
        with pytest.raises(
            rt.DeadlineExceededError,
            match="no consistent snapshot: the pause of this checkpoint has ended",
        ):
            harness.Saver().save(train.sess, tmp_path / "m", 1)
        assert stalled.pauses == coordinator.SNAPSHOT_TRIES
        assert harness.latest_checkpoint(str(tmp_path)) is None
        assert train.wait_for_steps(10, 60)


def test_release_opens_only_own_gate(tmp_path: pathlib.Path) -> None:
    """A Saver that releases its snapshot opens no gate of another Saver."""
    with training() as train, ckit.session(train.server, train.sess.graph) as second:
        saver = harness.Saver()
        snapshot = second.checkpoint_coordinator.snapshot(
            names.slices_of(second, names.saved_variables(train.variables))
        )
        ours = Between(train, lambda: second.checkpoint_coordinator.release(snapshot))
        path = saver.save(train.sess, tmp_path / "m", 1)
        assert ours.pauses == 1
    assert_of_one_instant(path)


def test_concurrent_savers_cut_consistently(tmp_path: pathlib.Path) -> None:
    """Two Savers that cut at once each hold values of one instant."""
    with training() as train, ckit.session(train.server, train.sess.graph) as second:
        savers = [harness.Saver(), harness.Saver()]
        paths: list[str] = []
        other = threading.Thread(
            target=lambda: paths.append(savers[1].save(second, tmp_path / "second", 1))
        )

        def begin_another() -> None:
            other.start()
            train.wait_for_steps(10, 0.5)

        Between(train, begin_another)
        paths.append(savers[0].save(train.sess, tmp_path / "first", 1))
        other.join(60)
    assert len(paths) == 2
    for path in paths:
        assert_of_one_instant(path)


class LostReply:
    """gRPC's method, whose first replies to some orders get lost with the connection after they were carried out."""

    def __init__(self, stub: Any, kinds: set[str], then: Callable[[], object]) -> None:
        self._shard = stub.Checkpoint
        self._kinds = kinds
        self._then = then
        self.lost: list[str] = []
        stub.Checkpoint = self

    def __call__(self, order: pb.CheckpointOrder, **options: Any) -> pb.CheckpointReply:
        reply = self._shard(order, **options)
        kind = order.WhichOneof("order")
        if kind in self._kinds and kind not in self.lost:
            self.lost.append(kind)
            self._then()
            raise Unavailable()
        return reply


class Unavailable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Socket closed"

    def trailing_metadata(self) -> None:
        return None


def test_repeated_orders_get_same_answer(tmp_path: pathlib.Path) -> None:
    """An order whose reply was lost is answered as the first time."""
    kinds = {"take", "write", "commit"}
    with training(ps_backups=1) as train:
        task = train.sess._engine.tasks[PS[1]]
        assert isinstance(task, RemoteTask) and task.has_backup
        reply = LostReply(task._stub, kinds, lambda: train.wait_for_steps(10, 0.5))
        saver = harness.Saver()
        path = saver.save(train.sess, tmp_path / "m", 1)
        saver.restore(train.sess, path)
        assert set(reply.lost) == kinds
    assert_of_one_instant(path)
