"""Checkpoints without a shared directory: what crosses the tensor channel, what is held, and deaths on the way."""

import contextlib
import json
import os
import pathlib
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import harness
import runtime as rt
from harness.checkpoints import names
from runtime.checkpoint import pacing, streaming, times
from runtime.lowlevel import RunRecords
from runtime.master import tasks
from runtime.proto import services_pb2 as pb
from runtime.proto import services_pb2_grpc
from runtime.rpc import rpc
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.harness.checkpoints import stream_chief
from tests.kit.changes import SetTimes
from tests.kit.processes import Program
from tests.runtime import kit

pytestmark = pytest.mark.cluster

MIB = 1 << 20


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and pieces of 1 MiB, so that small models have many."""
    for name in ("BLOCK_BYTES", "READ_BYTES", "CHUNK_BYTES"):
        monkeypatch.setattr(streaming, name, MIB)
    monkeypatch.setattr(names, "STREAM_CHUNK_BYTES", MIB)


def _after(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, action: Callable[[Any], object]
) -> list[int]:
    """Calls ``action`` with the stream once ``pull`` or ``push`` has been called so many times; gives the calls."""
    original = getattr(streaming.ChannelStream, name)
    calls: list[int] = []

    def wrapped(self: streaming.ChannelStream, *arguments: Any) -> Any:
        result = original(self, *arguments)
        calls.append(1)
        if len(calls) == count:
            action(self)
        return result

    monkeypatch.setattr(streaming.ChannelStream, name, wrapped)
    return calls


def _sent(cluster: dict[str, list[str]], ps: int) -> dict[str, float]:
    """The figures of a ps in another process."""
    channel = rpc.open_channel(cluster["ps"][ps])
    try:
        found = services_pb2_grpc.WorkerServiceStub(channel).Metrics(
            pb.MetricsRequest(), timeout=20
        )
        return dict(found.values)
    finally:
        channel.close()


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "rows": rng.standard_normal((3 * MIB // 4096, 1024), np.float32),
        "wide": rng.standard_normal((1, 5 * MIB // 4), np.float32),
        "half": rng.standard_normal((700, 999), np.float32).astype(ml_dtypes.bfloat16),
        "truth": rng.integers(0, 2, 12345).astype(bool),
        "words": np.array([b"x", "\N{GREEK SMALL LETTER ALPHA}".encode(), b""], object),
        "n": np.int64(2**40 + 5),
        "empty": np.zeros((0, 2), np.float32),
    }


def test_streams_use_the_tensor_channel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    """Streamed variables of every kind cross the tensor channel, not gRPC, and the ps write no
    file.
    """
    values = _values()
    graph, v = ckit.make_graph(values, {"wide": 1, "words": 1, "truth": 1})
    messages: list[int] = []
    call = rpc.call

    def counted(method: Any, request: Any, **options: Any) -> Any:
        answer = call(method, request, **options)
        messages.append(request.ByteSize() + answer.ByteSize())
        return answer

    cluster = kit.addresses(ps=2, worker=1)
    wheres = [tmp_path / f"ps{i}" for i in (0, 1)]  # each has a disk of its own
    with _processes(cluster, wheres), rt.Server(cluster, "worker", 0) as server, graph.as_default():
        with ckit.session(server, graph) as sess:
            ckit.initialize(sess, list(v.values()))
            before = [_sent(cluster, i) for i in (0, 1)]
            monkeypatch.setattr(rpc, "call", counted)
            saver = harness.Saver(transfer="stream")
            path = saver.save(sess, tmp_path / "chief" / "m", 1)
            nbytes = sum(a.nbytes for a in values.values() if a.dtype != object)
            after = [_sent(cluster, i) for i in (0, 1)]
            assert (
                sum(
                    a["bytes_sent_total"] - b["bytes_sent_total"]
                    for a, b in zip(after, before, strict=True)
                )
                > nbytes
            )
            assert 0 < sum(messages) < 100_000 < nbytes
            sess.run(
                [x.assign(np.zeros(x.shape, x.dtype)).op for n, x in v.items() if n != "words"]
            )
            sess.run(v["words"].assign(values["words"][::-1]).op)
            saver.restore(sess, path)
            restored = sess.run(v)
            got = [_sent(cluster, i) for i in (0, 1)]
            assert sum(
                a["bytes_received_total"] - b["bytes_received_total"]
                for a, b in zip(got, after, strict=True)
            ) > (
                2 * nbytes  # what was assigned, and what was restored
            )
            assert sum(messages) < 200_000
    for name, expected in values.items():
        assert restored[name].dtype == expected.dtype and np.array_equal(
            restored[name], expected
        ), name
    arrays = ckit.plain_orbax(tmp_path / "chief" / "m")[1]
    for name in set(values) - {"words"}:
        assert arrays[name].dtype == values[name].dtype and np.array_equal(
            arrays[name], values[name]
        ), name
    assert harness.load_variable(path, "words").tolist() == values["words"].tolist()
    assert [list(where.iterdir()) for where in wheres] == [[], []]


@contextlib.contextmanager
def _processes(cluster: dict[str, list[str]], wheres: list[pathlib.Path]) -> Iterator[None]:
    """The ps as processes, each in a directory of its own."""
    with contextlib.ExitStack() as stack:
        for i, where in enumerate(wheres):
            where.mkdir()
            stack.enter_context(kit.serve(cluster, "ps", i, cwd=where))
        yield


@pytest.mark.chaos
def test_stream_holds_few_blocks(tmp_path: pathlib.Path) -> None:
    """A stream holds a few blocks in memory, whatever the size of the model."""
    graph = rt.Graph()
    with graph.as_default(), rt.device("/job:ps/task:0"):
        wide = rt.Variable(
            lambda: rt.random.normal(rt.random_key(), (1, 48 * MIB)), name="wide", trainable=False
        )
        rows = rt.Variable(
            lambda: rt.random.normal(rt.random_key(), (48, MIB)), name="rows", trainable=False
        )
    with (
        ckit.cluster(1, processes=True) as (server, ps),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, [wide, rows])
        with graph.as_default(), rt.device("/job:ps/task:0"):
            small = rt.Variable(np.zeros(3, np.float32), name="small", trainable=False)
        ckit.initialize(sess, [small])
        # imports what a save needs
        harness.Saver([small], transfer="stream").save(sess, tmp_path / "warm", 1)
        saver = harness.Saver([wide, rows], transfer="stream")
        pids = (os.getpid(), ps[0].pid)
        base = [_reset_peak(pid) for pid in pids]
        path = saver.save(sess, tmp_path / "m", 1)
        chief, task = (_peak(pid) - b for pid, b in zip(pids, base, strict=True))
        assert chief < 160 * MIB, f"{chief >> 20} MiB"  # of 384
        assert task < 48 * MIB, f"{task >> 20} MiB"
        base = [_reset_peak(pid) for pid in pids]
        saver.restore(sess, path)
        chief, task = (_peak(pid) - b for pid, b in zip(pids, base, strict=True))
        assert chief < 160 * MIB, f"{chief >> 20} MiB"
        assert task < (384 + 64) * MIB, f"{task >> 20} MiB"  # the new values, beside the old ones


def _reset_peak(pid: int) -> int:
    """Bytes that a process has now; its peak counts from here."""
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _peak(pid: int) -> int:
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_cut_streams_lose_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    """Streams whose connections are cut lose and repeat no bytes."""
    values = {
        n: np.random.default_rng(i).integers(0, 256, 5 * MIB, np.uint8) for i, n in enumerate("ab")
    }
    graph, v = ckit.make_graph(values)
    with ckit.cluster(1) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver(transfer="stream")
        pulls = _after(monkeypatch, "pull", 3, lambda stream: stream.lane.link.interrupt())
        pushes = _after(monkeypatch, "push", 7, lambda stream: stream.lane.link.interrupt())
        path = saver.save(sess, tmp_path / "m", 1)
        sess.run([x.assign(ckit.filled(0, 5 * MIB)).op for x in v.values()])
        saver.restore(sess, path)
        found = sess.run(v)
    assert len(pulls) == len(pushes) == 10
    for name, expected in values.items():
        assert np.array_equal(found[name], expected)
        assert np.array_equal(harness.load_variable(path, name), expected)


@pytest.mark.chaos
@pytest.mark.parametrize("what", ["save", "restore"])
def test_ps_death_in_stream_changes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None, what: str
) -> None:
    """A ps that dies in a streamed save or restore leaves no checkpoint and no changed variable."""
    graph, v = ckit.make_graph(
        {"a": ckit.filled(1, 5 * MIB), "b": ckit.filled(1, 5 * MIB)}, {"b": 1}
    )
    with ckit.cluster(2, processes=True) as (server, ps), graph.as_default():
        saver = harness.Saver(transfer="stream")
        with ckit.session(server, graph) as sess:
            ckit.initialize(sess, list(v.values()))
            good = saver.save(sess, tmp_path / "m", 1)
            sess.run([x.assign(ckit.filled(2, 5 * MIB)).op for x in v.values()])
            _after(monkeypatch, "pull" if what == "save" else "push", 3, lambda _: ps[1].kill())
            with pytest.raises((rt.UnavailableError, rt.AbortedError), match="/job:ps/task:1"):
                saver.save(sess, tmp_path / "m", 2) if what == "save" else saver.restore(sess, good)
            assert os.listdir(tmp_path / "m") == ["1"] and saver.last_checkpoints == [good]
            assert sess.run(v["a"])[0] == 2  # nothing was restored on the other one either
        ps[1].restart()
        with ckit.session(server, graph) as sess:
            assert saver.restore_latest(sess, str(tmp_path)) == good
            assert sess.run([v["a"], v["b"]])[1][0] == 1
            assert saver.save(sess, tmp_path / "m", 2) == f"{tmp_path}/m/2"


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("save", marks=pytest.mark.chaos),
        pytest.param("restore", marks=pytest.mark.nightly),
    ],
)
def test_chief_death_frees_the_ps(tmp_path: pathlib.Path, small_blocks: None, what: str) -> None:
    """A ps frees what it holds for a chief that died in a stream, and the next chief saves and
    restores.
    """
    cluster = kit.addresses(ps=1, worker=1)
    with rt.Server(cluster, "ps", 0) as ps:
        command = [
            "python",
            "-m",
            "tests.harness.checkpoints.stream_chief",
            json.dumps(cluster),
            f"{tmp_path}/m",
            what,
        ]
        with Program(*command) as chief:
            chief.expect("^in the middle$")
            (job,) = ps.worker.checkpoint_participant.jobs.list_jobs()
            assert any(isinstance(a, np.ndarray) for a in job.arrays) or job.incoming
        assert job.ended.wait(60)  # ten seconds after its connections broke
        assert "gone for too long" in job.why
        # The next chief finds one whole checkpoint, and what the dead one had begun is in nobody's
        # way.
        graph, v = ckit.make_graph(
            {"a": ckit.filled(0, stream_chief.SIZE), "b": ckit.filled(0, stream_chief.SIZE)}
        )
        tasks.withdraw(ps.address, ps)  # over sockets
        with (
            rt.Server(cluster, "worker", 0) as server,
            graph.as_default(),
            ckit.session(server, graph) as sess,
        ):
            saver = harness.Saver(transfer="stream")
            assert saver.restore_latest(sess, str(tmp_path)) == f"{tmp_path}/m/1"
            assert [x[0] for x in sess.run([v["a"], v["b"]])] == [1, 2]
            assert saver.save(sess, tmp_path / "m", 2) == f"{tmp_path}/m/2"
            assert not ps.worker.checkpoint_participant.jobs.list_jobs()
    assert sorted(n for n in os.listdir(tmp_path / "m") if n.isdigit()) == ["1", "2"]
    assert not [n for n in os.listdir(tmp_path / "m") if "tmp" in n]


def test_full_disk_frees_the_ps(tmp_path: pathlib.Path, small_blocks: None) -> None:
    """A full disk of the chief ends the save and frees what the ps holds."""
    graph, v = ckit.make_graph({"a": ckit.filled(1, 8 * MIB)})
    with kit.servers(sockets=True, ps=1, worker=1) as made, graph.as_default():
        ps = made["/job:ps/task:0"]
        with ckit.session(made[kit.TARGET], graph) as sess:
            ckit.initialize(sess, list(v.values()))
            saver = harness.Saver(transfer="stream")
            good = saver.save(sess, tmp_path / "m", 1)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            # No file of this process may grow beyond half a block: what the kernel says is what a
            # full disk says.
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, limits[1]))
            try:
                with pytest.raises(rt.ResourceExhaustedError, match=f"{tmp_path}.* is full"):
                    saver.save(sess, tmp_path / "m", 2)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert not ps.worker.checkpoint_participant.jobs.list_jobs()
            assert os.listdir(tmp_path / "m") == ["1"] and saver.last_checkpoints == [good]
            sess.run(v["a"].assign(ckit.filled(2, 8 * MIB)).op)
            assert harness.load_variable(saver.save(sess, tmp_path / "m", 2), "a")[0] == 2


def test_replaced_chief_is_refused_midstream(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    """A chief that is replaced during a streamed save is refused."""
    graph, v = ckit.make_graph({"a": ckit.filled(1, 5 * MIB)})
    with ckit.cluster(1) as (server, _), graph.as_default(), ckit.session(server, graph) as old:
        ckit.initialize(old, list(v.values()))
        saver = harness.Saver(transfer="stream")
        saver.save(old, tmp_path / "m", 1)

        def take_over(_: object) -> None:
            RunRecords(server.target, is_chief=True).claim()

        _after(monkeypatch, "pull", 2, take_over)
        with pytest.raises(rt.AbortedError, match="has taken the lead"):
            saver.save(old, tmp_path / "m", 2)
        assert saver.last_checkpoints == [f"{tmp_path}/m/1"]


def test_client_without_channel_streams(tmp_path: pathlib.Path, small_blocks: None) -> None:
    """A client without a tensor channel saves and restores by stream."""
    values = _values()
    with kit.target_of_kind("remote master") as target:
        graph, v = ckit.make_graph(values)
        config = rt.SessionConfig(start_timeout_secs=60, operation_timeout_secs=60)
        with graph.as_default(), rt.Session(target, graph, config) as sess:
            ckit.initialize(sess, list(v.values()))
            saver = harness.Saver(transfer="stream")
            path = saver.save(sess, tmp_path / "m", 1)
            sess.run(
                [x.assign(np.zeros(x.shape, x.dtype)).op for n, x in v.items() if n != "words"]
            )
            saver.restore(sess, path)
            found = sess.run(v)
    for name, expected in values.items():
        assert np.array_equal(found[name], expected), name


def test_stream_rests_during_training(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None, set_times: SetTimes
) -> None:
    """A stream rests while training goes on, and only then."""
    monkeypatch.setattr(pacing, "CORES_TO_SHARE", 1 << 20)  # as on a machine with few cores
    set_times(times, REST_SECS=0.001)
    rests: list[float] = []
    rest = pacing.Pace.rest

    def counted(self: pacing.Pace, worked_secs: float) -> None:
        rests.append(worked_secs)
        rest(self, worked_secs)

    monkeypatch.setattr(pacing.Pace, "rest", counted)
    graph, v = ckit.make_graph({"a": ckit.filled(1, 8 * MIB), "n": np.int32(0)})
    with ckit.cluster(1) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver(transfer="stream")
        saver.save(sess, tmp_path / "m", 1)
        assert not rests  # nobody trained
        train = v["n"].assign_add(1).op
        _after(monkeypatch, "pull", 2, lambda _: sess.run(train))
        saver.save(sess, tmp_path / "m", 2)
        assert len(rests) == 1


def test_unused_job_is_ended(tmp_path: pathlib.Path) -> None:
    """A job that no order has named for long is ended by the next order."""
    graph, v = ckit.make_graph({"a": ckit.filled(1, MIB)})
    with kit.servers(sockets=True, ps=1, worker=1) as made, graph.as_default():
        with ckit.session(made[kit.TARGET], graph) as sess:
            ckit.initialize(sess, list(v.values()))
            snapshot = sess.checkpoint_coordinator.snapshot(
                names.slices_of(sess, names.saved_variables(list(v.values())), stream=True)
            )
            participant = made["/job:ps/task:0"].worker.checkpoint_participant
            (job,) = participant.jobs.list_jobs()
            job.used_at -= times.UNUSED_SECS + 1
            saver = harness.Saver(transfer="stream")
            saver.save(sess, tmp_path / "m", 1)
            assert job.ended.is_set() and not participant.jobs.list_jobs()
            (tmp_path / "late").mkdir()
            with pytest.raises(rt.AbortedError, match="/job:ps/task:0: .*no order has named it"):
                sess.checkpoint_coordinator.write(snapshot, str(tmp_path / "late"), stream=True)
            sess.checkpoint_coordinator.release(snapshot)


def test_job_waits_for_late_orders(tmp_path: pathlib.Path) -> None:
    """A job serves its own orders, however late."""
    graph, v = ckit.make_graph({"a": ckit.filled(1, MIB)})
    with kit.servers(sockets=True, ps=1, worker=1) as made, graph.as_default():
        with ckit.session(made[kit.TARGET], graph) as sess:
            ckit.initialize(sess, list(v.values()))
            coordinator = sess.checkpoint_coordinator
            snapshot = coordinator.snapshot(
                names.slices_of(sess, names.saved_variables(list(v.values())))
            )
            coordinator.write(snapshot, str(tmp_path))
            (job,) = made["/job:ps/task:0"].worker.checkpoint_participant.jobs.list_jobs()
            job.used_at -= times.UNUSED_SECS + 1
            coordinator.confirm(snapshot)
            assert not job.ended.is_set()
            coordinator.release(snapshot)
            assert job.ended.is_set()


def test_stream_connections_end(tmp_path: pathlib.Path, small_blocks: None) -> None:
    """The connections of a stream end with the stream."""
    graph, v = ckit.make_graph({"a": ckit.filled(1, 3 * MIB)})
    with kit.servers(sockets=True, ps=1, worker=1) as made, graph.as_default():
        ps = made["/job:ps/task:0"]
        with ckit.session(made[kit.TARGET], graph) as sess:
            ckit.initialize(sess, list(v.values()))
            saver = harness.Saver(transfer="stream")
            path = saver.save(sess, tmp_path / "m", 1)
            saver.restore(sess, path)
            deadline = time.monotonic() + 30
            while ps.tensors.counters.connections > 2 and time.monotonic() < deadline:
                # the listener closes what has said goodbye when it gets to it
                threading.Event().wait(0.02)
            assert ps.tensors.counters.connections <= 2  # the session's own, and its heartbeat
