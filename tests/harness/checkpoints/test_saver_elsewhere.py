"""Tasks that were started in other directories, or on hosts that see other files than the chief."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from runtime.checkpoint.coordinator import CheckpointCoordinator
from runtime.proto import services_pb2 as pb
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.runtime import kit

pytestmark = pytest.mark.cluster


@pytest.fixture
def chief_directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The working directory of this process, the chief; the tasks that ``kit`` starts have another one."""
    (tmp_path / "chief").mkdir()
    with contextlib.chdir(tmp_path / "chief"):
        yield tmp_path / "chief"


@pytest.mark.parametrize("face", ["supervisor", "monitored session"])
def test_relative_logdir_is_the_chiefs(chief_directory: pathlib.Path, face: str) -> None:
    """A relative logdir is below the chief's working directory."""
    for expected in (0, 5):
        with ckit.cluster(1, processes=True) as (server, _), rt.Graph().as_default():
            with rt.device("/job:ps/task:0"):
                step = harness.get_or_create_global_step()
                op = step.assign_add(1)
            if face == "supervisor":
                supervisor = harness.Supervisor(logdir="runs/x", global_step=step, summary_op=None)
                with supervisor.managed_session(server.target) as sess:
                    assert sess.run(step) == expected
                    for _ in range(5):
                        sess.run(op)
            else:
                with harness.MonitoredTrainingSession(
                    server.target,
                    checkpoint_dir="runs/x",
                    save_summaries_steps=None,
                    log_step_count_steps=None,
                ) as monitored:
                    assert monitored.run(step) == expected
                    for _ in range(5):
                        monitored.run(op)
    assert harness.latest_checkpoint("runs/x") == "runs/x/model.ckpt/10"
    assert os.listdir(chief_directory) == ["runs"]


def test_saver_keeps_relative_paths(chief_directory: pathlib.Path) -> None:
    """A Saver saves and restores by paths relative to its own directory."""
    graph, v = ckit.make_graph({"a": np.arange(4.0)})
    with (
        ckit.cluster(1, processes=True) as (server, _),
        graph.as_default(),
        ckit.session(server, graph) as sess,
    ):
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver()
        assert saver.save(sess, "m", 1) == "m/1"
        sess.run(v["a"].assign(np.zeros(4)).op)
        saver.restore(sess, "m/1")
        assert sess.run(v["a"]).tolist() == [0, 1, 2, 3]
        assert saver.restore_latest(sess, ".") == "m/1"
        assert saver.last_checkpoints == ["m/1"]


@pytest.fixture
def host(tmp_path: pathlib.Path) -> Iterator[tuple[rt.Server, pathlib.Path]]:
    """A worker here, and a ps for which /proc/self/cwd is another directory, as if it were on another host."""
    cluster = kit.addresses(ps=1, worker=1)
    (tmp_path / "ps").mkdir()
    with (
        kit.serve(cluster, "ps", 0, cwd=tmp_path / "ps") as process,
        rt.Server(cluster, "worker", 0) as server,
    ):
        yield server, tmp_path / "ps"
        process.stop()


def test_unseen_files_are_not_damaged(
    chief_directory: pathlib.Path, host: tuple[rt.Server, pathlib.Path]
) -> None:
    """Files that a task does not see raise FailedPreconditionError and are not called damaged."""
    server, theirs = host
    logdir = "/proc/self/cwd/run"
    graph, v = ckit.make_graph({"a": np.arange(4.0)})
    with graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver(transfer="stream")  # the chief alone writes
        path = saver.save(sess, f"{logdir}/m", 1)
        assert not os.listdir(theirs)
        shared = harness.Saver()
        for restore in (
            lambda: shared.restore(sess, path),
            lambda: shared.restore_latest(sess, logdir),
        ):
            with pytest.raises(rt.FailedPreconditionError) as told:
                restore()
            assert told.value.task == "/job:ps/task:0"
            assert f"{logdir}/m/1/default/manifest.ocdbt is not there on this machine" in str(
                told.value
            )
            assert "damage" not in str(told.value) and "remove" not in str(told.value)
        # the directory alone is not enough
        (theirs / "run" / "m" / "1" / "default").mkdir(parents=True)
        with pytest.raises(
            rt.FailedPreconditionError, match="manifest.ocdbt is not there on this machine"
        ):
            shared.restore(sess, path)
        with pytest.raises(
            rt.FailedPreconditionError, match="default.* is not there on this machine"
        ):
            shared.save(sess, f"{logdir}/m", 2)
        saver.restore(sess, path)


def test_tasks_receive_links_unresolved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks receive a directory that is a link as it was given."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    told: list[str] = []
    ask = CheckpointCoordinator._request

    def listen(
        self: CheckpointCoordinator, task: str, order: pb.CheckpointOrder, *rest: Any
    ) -> pb.CheckpointReply:
        said = getattr(order, order.WhichOneof("order") or "")
        if "directory" in said.DESCRIPTOR.fields_by_name:
            told.append(said.directory)
        return ask(self, task, order, *rest)

    monkeypatch.setattr(CheckpointCoordinator, "_request", listen)
    graph, v = ckit.make_graph({"a": np.arange(4.0)})
    with ckit.cluster(1) as (server, _), graph.as_default(), ckit.session(server, graph) as sess:
        ckit.initialize(sess, list(v.values()))
        saver = harness.Saver()
        for step, parent in enumerate(["link", "real", "link"]):
            path: Any = saver.save(sess, tmp_path / parent / "m", step)
            saver.restore(sess, path)
            assert told and all(d.startswith(f"{tmp_path}/{parent}/m/") for d in told)
            told.clear()
    assert sorted(os.listdir(tmp_path / "real" / "m")) == ["0", "1", "2"]
