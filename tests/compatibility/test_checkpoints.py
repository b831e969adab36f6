"""A checkpoint of each version that was released is read as it was written, by whatever reads checkpoints."""

import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import harness
import runtime as rt
from tests.compatibility import model

HERE = pathlib.Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/checkpoint"))
CHIEF = "/job:worker/task:0"


@pytest.fixture(params=RELEASES)
def directory(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[str]:
    """A copy of the log directory of a release, which a run may go on in."""
    yield str(shutil.copytree(HERE / request.param / "checkpoint", tmp_path / "run"))


def same(found: Any, wanted: Any) -> None:
    assert np.asarray(found).dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_releases_are_kept() -> None:
    """At least one released version is kept for comparison."""
    assert RELEASES


def test_old_checkpoint_reads_without_session(directory: str) -> None:
    """A checkpoint of a release is read without a session."""
    path = harness.latest_checkpoint(directory)
    assert path is not None and path.endswith(f"model.ckpt/{model.STEPS}")
    reader = harness.load_checkpoint(directory)
    wanted = model.expected()
    assert reader.get_variable_to_shape_map() == {
        name: np.shape(value) for name, value in wanted.items()
    }
    for name, value in wanted.items():
        same(reader.get_tensor(name), value)
    found = harness.load_pytree(directory, like={"kernel": model.KERNEL}, name="net")
    same(found["kernel"], wanted["net/kernel"])


def test_orbax_reads_old_checkpoint(directory: str) -> None:
    """Orbax by itself reads a checkpoint of a release."""
    with ocp.CheckpointManager(f"{directory}/model.ckpt") as manager:
        found = manager.restore(model.STEPS)
    same(found["table"], model.expected()["table"])


@pytest.mark.parametrize(("ps", "parts"), [(1, 1), (2, 3), (3, 2)])
def test_run_continues_old_checkpoint(directory: str, ps: int, parts: int) -> None:
    """A run on any number of ps continues from a checkpoint of a release."""
    states: list[Any] = []
    harness.checkpointable("input", lambda: None, states.append, task=CHIEF)
    try:
        with rt.Graph().as_default() as graph, rt.local_cluster(ps=ps, workers=1) as cluster:
            with cluster.device():
                global_step, train_op = model.build(ps, parts)
            supervisor = harness.Supervisor(
                logdir=directory, global_step=global_step, summary_op=None
            )
            with supervisor.managed_session(cluster.target) as session:
                wanted = model.expected()
                for name in ("words", "half", "flags", "net/kernel", "net/kernel/trace/trace"):
                    same(session.run(f"{name}:0"), wanted[name])
                table = [v for v in rt.global_variables() if v.op.name.startswith("table/part_")]
                same(
                    np.concatenate(session.run([v for v in table if v.op.name.count("/") == 1])),
                    wanted["table"],
                )
                assert session.run(global_step) == model.STEPS
                session.run(train_op)
            assert graph.finalized
    finally:
        harness.forget_checkpointable("input", task=CHIEF)
    assert states[0]["epoch"] == model.STATE["epoch"] and states[0]["key"] == model.STATE["key"]
    same(states[0]["order"], model.STATE["order"])
    assert states[0]["nested"] == model.STATE["nested"]
    moved = harness.load_variable(directory, "net/kernel")  # the momentum went on too
    same(moved, model.expected()["net/kernel"] - np.float32(0.5 * 1.875))
