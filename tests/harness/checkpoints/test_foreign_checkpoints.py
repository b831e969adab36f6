"""Checkpoints of plain Orbax, packed as it packs them: this process reads them, and no task opens them."""

import pathlib
from collections.abc import Iterator
from contextlib import ExitStack

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import harness
import runtime as rt
from runtime.lowlevel import ArraySlice
from tests.runtime import kit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(100)]

WEIGHTS = np.arange(6000, dtype=np.float32).reshape(60, 100)
ROWS = np.arange(50, dtype=np.int32).reshape(10, 5)


@pytest.fixture(scope="module", params=["in a store", "in files of their own"])
def orbax(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> pathlib.Path:
    """The checkpoint, by default settings but for where its arrays lie."""
    path = tmp_path_factory.mktemp("orbax") / "1"
    tree = {"w": jnp.asarray(WEIGHTS), "rows": np.asarray(ROWS), "scale": jnp.bfloat16(1.5)}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=request.param == "in a store")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
    return path


@pytest.fixture
def target(tmp_path: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """A worker of two ps that may read and write one directory, which is not that of the checkpoint."""
    root = tmp_path / "run"
    root.mkdir()
    cluster = kit.addresses(ps=2, worker=1)
    with ExitStack() as stack:
        for index in range(2):
            stack.enter_context(
                kit.serve(cluster, "ps", index, env={"BELLWETHER_CHECKPOINT_ROOT": str(root)})
            )
        yield stack.enter_context(rt.Server(cluster, "worker", 0)).target, root


def variables() -> list[rt.Variable]:
    """Makes the variables of the checkpoint on two ps: w, the two halves of rows, scale."""
    with rt.device(rt.replica_device_setter(ps_tasks=2)):
        made = [rt.Variable(np.zeros_like(WEIGHTS), name="w")]
        for start in (0, 5):
            part = rt.Variable(np.zeros((5, 5), np.int32), name=f"rows/part_{start}")
            part.save_slice_info = ArraySlice(
                "rows", part.shape, part.dtype, ROWS.shape, (start, 0)
            )
            made.append(part)
        return [*made, rt.Variable(jnp.bfloat16(0), name="scale")]


def check(session: rt.Session, made: list[rt.Variable]) -> None:
    weights, first, second, scale = session.run(made)
    assert weights.tolist() == WEIGHTS.tolist()
    assert np.concatenate([first, second]).tolist() == ROWS.tolist()
    assert float(scale) == 1.5


def test_saver_restores_what_tasks_cannot_open(
    orbax: pathlib.Path, target: tuple[str, pathlib.Path]
) -> None:
    """A Saver restores a checkpoint of plain Orbax that no task can open."""
    with rt.Graph().as_default() as graph:
        made = variables()
        saver = harness.Saver()
        with rt.Session(target[0], graph) as session:
            saver.restore(session, str(orbax))
            check(session, made)


def test_supervisor_begins_with_foreign_checkpoint(
    orbax: pathlib.Path, target: tuple[str, pathlib.Path]
) -> None:
    """A Supervisor begins with a checkpoint of plain Orbax."""
    logdir = target[1] / orbax.parent.name
    with rt.Graph().as_default():
        made = variables()
        step = harness.get_or_create_global_step()
        saver = harness.Saver(made)
        supervisor = harness.Supervisor(
            is_chief=True,
            logdir=str(logdir),
            global_step=step,
            init_op=step.initializer,
            init_fn=lambda session: saver.restore(session, str(orbax)),
            ready_op=None,
        )
        with supervisor.managed_session(target[0]) as session:
            check(session, made)
