"""Checkpoints of a cluster of processes: whole steps only, any number of ps, and no harm from any death."""

import os
import pathlib
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import harness
import runtime as rt
from runtime.lowlevel import RunRecords
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.kit.processes import Program
from tests.runtime import kit

pytestmark = pytest.mark.chaos

ROOT = pathlib.Path(__file__).resolve().parents[3]


def _ones(n: int = 1000) -> np.ndarray:
    return np.ones(n, np.float32)


def test_checkpoints_hold_whole_steps(tmp_path: pathlib.Path) -> None:
    """Every checkpoint holds whole steps of all workers."""
    graph, v = ckit.make_graph(
        {"a": 0 * _ones(), "b": 0 * _ones(), "c": 0 * _ones(), "global_step": np.int64(0)},
        {"b": 1, "c": 1},
    )
    with (
        ckit.cluster(2, processes=True) as (server, _),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(v.values()))
        train = rt.group(*[v[n].assign_add(_ones()) for n in "abc"], v["global_step"].assign_add(1))
        stop = threading.Event()

        def work() -> None:
            with ckit.session(server, graph) as mine:
                while not stop.is_set():
                    mine.run(train)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        try:
            saver = harness.Saver(max_to_keep=None)
            paths = [saver.save(sess, tmp_path / "m", v["global_step"]) for _ in range(10)]
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    assert len(set(paths)) > 5
    for path in paths:
        version = int(os.path.basename(path))
        for name in ("a", "b", "c", "global_step"):
            assert np.unique(harness.load_variable(path, name)).tolist() == [version], (path, name)
    assert {
        n: np.unique(a).tolist() for n, a in ckit.plain_orbax(tmp_path / "m")[1].items()
    } == dict.fromkeys(("a", "b", "c", "global_step"), [int(os.path.basename(paths[-1]))])


def test_any_number_of_ps_restores(tmp_path: pathlib.Path) -> None:
    """A checkpoint restores into any number of ps."""
    table = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)
    slot = np.float64(0.25) * np.arange(7)
    path = None
    for saved_as, ps in enumerate([1, 2, 3, 1]):
        graph = rt.Graph()
        with ckit.cluster(ps) as (server, _), graph.as_default():
            rows = 24 // ps
            parts = []
            for i in range(ps):
                with rt.device(f"/job:ps/task:{i}"):
                    initial = table[i * rows : (i + 1) * rows] * (path is None)
                    part = rt.Variable(initial, name=f"table/part_{i}", trainable=False)
                part.save_slice_info = rt.lowlevel.ArraySlice(
                    "table", part.shape, part.dtype, table.shape, (i * rows, 0)
                )
                parts.append(part)
            with rt.device(f"/job:ps/task:{ps - 1}"):
                other = rt.Variable(
                    slot * (path is None), dtype=np.float64, name="slot", trainable=False
                )
            saver = harness.Saver()
            with ckit.session(server, graph) as sess:
                if path is None:
                    ckit.initialize(sess, [*parts, other])
                else:
                    saver.restore(sess, path)
                assert np.array_equal(np.concatenate(sess.run(parts)), table)
                assert np.array_equal(sess.run(other), slot)
                path = saver.save(sess, tmp_path / "m", saved_as)
    _, found = ckit.plain_orbax(tmp_path / "m")
    assert np.array_equal(found["table"], table) and np.array_equal(found["slot"], slot)


def test_remote_master_saves_and_restores(tmp_path: pathlib.Path) -> None:
    """A session whose master is in another process saves and restores."""
    graph, v = ckit.make_graph({"a": _ones(), "b": 2 * _ones()}, {"b": 1})
    addresses = kit.addresses(ps=2, worker=1)
    with kit.processes(addresses, ("ps", 0), ("ps", 1), ("worker", 0)), graph.as_default():
        config = rt.SessionConfig(start_timeout_secs=60)
        with rt.Session(f"grpc://{addresses['worker'][0]}", graph, config) as sess:
            ckit.initialize(sess, list(v.values()))
            saver = harness.Saver()
            path = saver.save(sess, tmp_path / "m", 1)
            sess.run([x.assign(0 * _ones()).op for x in v.values()])
            saver.restore(sess, path)
            assert [x[0] for x in sess.run([v["a"], v["b"]])] == [1, 2]


def test_stream_needs_no_shared_directory(tmp_path: pathlib.Path) -> None:
    """Variables of all kinds are saved and restored by streams, without a shared directory."""
    big = np.arange(6 << 20, dtype=np.float32).reshape(-1, 1024)
    words = np.array([b"x", b"yy"], object)
    graph, v = ckit.make_graph(
        {"big": big, "words": words, "n": np.int64(5), "empty": np.zeros((0, 2), np.float32)},
        {"words": 1, "n": 1},
    )
    with ckit.cluster(2) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver(transfer="stream")
        path = saver.save(sess, tmp_path / "m", 1)
        sess.run(
            [v["big"].assign(0 * big).op, v["words"].assign(words[::-1]).op, v["n"].assign(6).op]
        )
        saver.restore(sess, path)
        found = sess.run(v)
        assert np.array_equal(found["big"], big)
        assert (
            found["words"].tolist() == words.tolist()
            and found["n"] == 5
            and found["empty"].shape == (0, 2)
        )
    assert np.array_equal(ckit.plain_orbax(tmp_path / "m")[1]["n"], 5)


def test_unseen_directory_is_named_by_ps(tmp_path: pathlib.Path) -> None:
    """A ps that does not see the directory says so and advises the stream transfer."""
    graph, v = ckit.make_graph({"a": _ones()})
    with ckit.cluster(1) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        snapshot = sess.checkpoint_coordinator.snapshot(_slices(sess, v))
        with pytest.raises(
            rt.FailedPreconditionError, match=r"/job:ps/task:0: .*transfer='stream'"
        ):
            sess.checkpoint_coordinator.write(snapshot, str(tmp_path / "not" / "there"))


def _slices(sess: rt.Session, v: dict[str, rt.Variable]) -> list[rt.lowlevel.VariableSlice]:
    from harness.checkpoints import names

    return names.slices_of(sess, names.saved_variables(list(v.values())))


def test_replaced_chief_is_refused(tmp_path: pathlib.Path) -> None:
    """A replaced chief can neither save nor restore."""
    graph, v = ckit.make_graph({"a": _ones(), "b": _ones()}, {"b": 1})
    with ckit.cluster(2) as (server, _), graph.as_default():
        with ckit.session(server, graph) as old, ckit.session(server, graph) as new:
            ckit.initialize(old, list(v.values()))
            saver = harness.Saver()
            old.authority.lead_with(RunRecords(server.target, is_chief=True).claim())
            saver.save(old, tmp_path / "m", 1)
            late = old.checkpoint_coordinator.snapshot(_slices(old, v))
            new.authority.lead_with(RunRecords(server.target, is_chief=True).claim())
            saver.save(new, tmp_path / "m", 2)
            (tmp_path / "late").mkdir()
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                old.checkpoint_coordinator.write(late, str(tmp_path / "late"))
            assert os.listdir(tmp_path / "late") == []
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                saver.save(old, tmp_path / "m", 3)
            with pytest.raises(rt.AbortedError, match="has taken the lead"):
                saver.restore(old, f"{tmp_path}/m/1")
            saver.save(new, tmp_path / "m", 4)
            assert [os.path.basename(p) for p in saver.last_checkpoints] == ["1", "2", "4"]


def test_ps_death_in_save_hides_it(tmp_path: pathlib.Path) -> None:
    """A ps that dies in a save leaves no visible checkpoint, and later saves succeed."""
    graph, v = ckit.make_graph(
        {"a": np.ones(40 << 20, np.uint8), "b": np.ones(40 << 20, np.uint8)}, {"b": 1}
    )
    with ckit.cluster(2, processes=True) as (server, tasks), graph.as_default():
        with ckit.session(server, graph) as sess:
            ckit.initialize(sess, list(v.values()))
            saver = harness.Saver()
            good = saver.save(sess, tmp_path / "m", 1)
            handle = saver.save(sess, tmp_path / "m", 2, wait=False)
            tasks[1].kill()
            with pytest.raises((rt.UnavailableError, rt.AbortedError), match="/job:ps/task:1"):
                handle.result(60)
            assert saver.last_checkpoints == [good]
        tasks[1].restart()
        with ckit.session(server, graph) as sess:
            assert saver.restore_latest(sess, str(tmp_path)) == good
            assert saver.save(sess, tmp_path / "m", 2) == f"{tmp_path}/m/2"
            assert sorted(os.listdir(tmp_path / "m")) == ["1", "2"]


def test_failed_restore_changes_nothing(tmp_path: pathlib.Path) -> None:
    """A restore that fails on one ps changes no variable on any ps."""
    graph, v = ckit.make_graph({"a": _ones(5000), "b": _ones(5000)}, {"b": 1})
    with (
        ckit.cluster(2, processes=True) as (server, _),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver()
        path = saver.save(sess, tmp_path / "m", 1)
        sess.run([x.assign(7 * _ones(5000)).op for x in v.values()])
        damaged = next(
            p
            for p in pathlib.Path(path).rglob("ocdbt.process_*jobpstask1/d/*")
            if p.stat().st_size > 9000
        )
        data = bytearray(damaged.read_bytes())
        damaged.write_bytes(data[:1000])
        with pytest.raises(rt.DataLossError):
            saver.restore(sess, path, verify=False)
        assert [x[0] for x in sess.run([v["a"], v["b"]])] == [7, 7]


def test_full_disk_is_reported(tmp_path: pathlib.Path) -> None:
    """A full disk is reported, and the next save succeeds once there is room."""
    graph, v = ckit.make_graph({"a": np.ones(8 << 20, np.uint8)})
    with (
        ckit.cluster(1, processes=True) as (server, tasks),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver()
        good = saver.save(sess, tmp_path / "m", 1)
        # Files of this ps may not grow any more: what the kernel says is what a full disk says.
        resource.prlimit(tasks[0].pid, resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
        with pytest.raises(rt.ResourceExhaustedError, match="is full"):
            saver.save(sess, tmp_path / "m", 2)
        assert saver.last_checkpoints == [good] and os.listdir(tmp_path / "m") == ["1"]
        sess.run(v["a"].assign(2 * np.ones(8 << 20, np.uint8)).op)
        resource.prlimit(
            tasks[0].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        assert harness.load_variable(saver.save(sess, tmp_path / "m", 2), "a")[0] == 2


def test_updates_continue_during_a_save(tmp_path: pathlib.Path) -> None:
    """Updates continue during a save, which holds the values of its beginning."""
    size = 16 << 20
    graph, v = ckit.make_graph({"a": np.zeros(size, np.float32), "n": np.int32(0)})
    with (
        ckit.cluster(1, processes=True) as (server, _),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(v.values()))
        count = v["n"].assign_add(1)
        sess.run(count)
        handle = harness.Saver().save(sess, tmp_path / "m", 1, wait=False)
        updates = 0
        while not handle.done():
            sess.run(count.op)
            updates += 1
        assert harness.load_variable(handle.result(), "n") == 1
        assert updates > 3


def test_states_of_workers_are_saved(tmp_path: pathlib.Path) -> None:
    """The states of other workers are saved with the variables."""
    graph, v = ckit.make_graph({"a": _ones()})
    code = (
        "import harness, json, sys, runtime as rt\n"
        "harness.checkpointable('data', lambda: {'position': 17}, lambda value: None)\n"
        "rt.Server(json.loads(sys.argv[1]), 'worker', 1).join()\n"
    )
    import json

    addresses = kit.addresses(ps=1, worker=3)  # worker 2 never comes
    try:
        other = Program("python", "-c", code, json.dumps(addresses))
        with (
            other,
            kit.processes(addresses, ("ps", 0)),
            rt.Server(addresses, "worker", 0) as server,
            graph.as_default(),
        ):
            config = rt.SessionConfig(device_filters=("/job:ps",), start_timeout_secs=60)
            with rt.Session(server.target, graph, config) as sess:
                ckit.initialize(sess, list(v.values()))
                deadline = time.monotonic() + 60
                while (
                    not sess.checkpoint_coordinator.states().get("/job:worker/task:1")
                    and time.monotonic() < deadline
                ):
                    threading.Event().wait(0.05)  # nobody tells when another worker has come up
                path = harness.Saver().save(sess, tmp_path / "m", 1)
        taken: list[object] = []
        harness.checkpointable("data", lambda: None, taken.append)
        assert harness.restore_states(path, "/job:worker/task:1") == ["data"]
        assert taken == [{"position": 17}]
    finally:
        harness.forget_checkpointable("data")


def test_random_kills_damage_no_checkpoint() -> None:
    """Random kills of chief and ps leave every checkpoint whole."""
    seed = int.from_bytes(os.urandom(4), "big")
    command = [sys.executable, "-m", "benchmarks.checkpoint_kills", "--kills=10", f"--seed={seed}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, f"--seed={seed}: {done.stdout[-500:]} {done.stderr[-2000:]}"
