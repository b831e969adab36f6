"""A run restores what it has saved itself, beside anything else that lies in its log directory."""

import logging
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness import tf1, timeouts
from harness.checkpoints import layout
from tests.kit.changes import SetTimes

pytestmark = pytest.mark.usefixtures("graph")


def train(logdir: pathlib.Path, steps: int, names: str = "w", **options: Any) -> dict[str, float]:
    """Trains a new graph as a chief of its own; returns the values that training began with."""
    monitored = options.pop("monitored", False)
    beside = options.pop("beside", None)
    saver = options.pop("saver", lambda: harness.Saver())
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        variables = {name: rt.Variable(np.float32(0), name=name) for name in names}
        more = rt.group(
            step.assign_add(1), *(v.assign_add(np.float32(1)) for v in variables.values())
        )
        best = harness.Saver([variables["w"]], max_to_keep=1)
        if monitored:
            session = harness.MonitoredTrainingSession(
                checkpoint_dir=str(logdir), save_checkpoint_steps=1000
            )
        else:
            supervisor = harness.Supervisor(
                logdir=logdir, saver=saver(), summary_op=None, **options
            )
            session = supervisor.managed_session()
        with session as sess:
            values = sess.run({"step": step, **variables})
            for _ in range(steps):
                sess.run(more)
        if beside:  # saved last, so it is the newest below the directory
            with rt.Session() as other:
                other.run(variables["w"].initializer)
                best.save(other, logdir / beside, 99)
    return {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("monitored", [False, True])
def test_users_saver_makes_no_series(tmp_path: pathlib.Path, monitored: bool) -> None:
    """Checkpoints of a user's own Saver are not the run's series."""
    assert train(tmp_path, 5, beside="best", monitored=monitored)["step"] == 0
    assert harness.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/model.ckpt/5"
    assert train(tmp_path, 1, monitored=monitored)["step"] == 5


def test_series_has_the_runs_name(tmp_path: pathlib.Path) -> None:
    """The series of a run has the name that the run gave."""
    train(tmp_path, 3, beside="model.ckpt", checkpoint_basename="net")
    assert harness.latest_checkpoint(str(tmp_path)) == f"{tmp_path}/net/3"
    assert train(tmp_path, 0, checkpoint_basename="net")["step"] == 3


def test_hook_names_the_series(tmp_path: pathlib.Path) -> None:
    """A checkpoint hook gives the series its name."""
    for expected in (0, 2):
        with rt.Graph().as_default():
            step = harness.get_or_create_global_step()
            more = step.assign_add(1)
            hook = harness.CheckpointSaverHook(
                str(tmp_path), save_steps=1000, checkpoint_basename="net"
            )
            creator = harness.ChiefSessionCreator(checkpoint_dir=str(tmp_path))
            with harness.MonitoredSession(creator, [hook]) as sess:
                assert sess.run(step) == expected
                sess.run(more)
                sess.run(more)
        train(tmp_path / "other", 1)
        shutil.copytree(
            tmp_path / "other" / "model.ckpt", tmp_path / "model.ckpt", dirs_exist_ok=True
        )


def test_other_series_begin_a_run(tmp_path: pathlib.Path) -> None:
    """A run without checkpoints of its own begins with another series."""
    train(tmp_path, 4, checkpoint_basename="old")
    assert train(tmp_path, 0)["step"] == 4


def test_incomplete_checkpoint_is_passed_over(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint without all variables is passed over with a log line."""
    train(tmp_path, 4, checkpoint_basename="old", beside="best")
    (tmp_path / layout.RUN_FILE).unlink()
    with caplog.at_level(logging.ERROR):
        assert train(tmp_path, 0, checkpoint_basename="new")["step"] == 4
    assert "a checkpoint is passed over: Restoring from checkpoint failed" in caplog.text


def test_renamed_series_continues_newest_step(tmp_path: pathlib.Path) -> None:
    """A run that changes the name of its series continues from the newest step."""
    train(tmp_path, 1, checkpoint_basename="a")
    train(tmp_path, 2, checkpoint_basename="b", beside="best")
    for expected in (3, 4, 5):
        assert train(tmp_path, 1, checkpoint_basename="a")["step"] == expected


def test_evaluator_reads_the_runs_series(tmp_path: pathlib.Path) -> None:
    """An evaluator evaluates the checkpoints of the run's series only."""
    train(tmp_path, 5, beside="best")
    steps = []
    with rt.Graph().as_default() as other:
        step = harness.get_or_create_global_step()
        rt.Variable(np.float32(0), name="w")

    def evaluate(session: rt.Session, at: int) -> dict[str, float]:
        steps.append(int(session.run(step)))
        return {"step": float(at)}

    harness.Evaluator(evaluate, tmp_path, graph=other, silence_secs=0.0).run()
    saved = [int(path.name) for path in (tmp_path / "model.ckpt").iterdir() if path.name.isdigit()]
    assert sorted(steps) == sorted(saved) and max(saved) == 5


def test_unrecorded_series_all_count(tmp_path: pathlib.Path) -> None:
    """All series count where no run has written a record, and a chief prefers its own."""
    variable = rt.Variable(np.float32(0), name="w")
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    saver = harness.Saver([variable, step])
    with rt.Session() as session:
        session.run(rt.global_variables_initializer())
        session.run(more)
        saver.save(session, tmp_path / "model.ckpt", 1)
        session.run(more)
        newest = saver.save(session, tmp_path / "finetune.ckpt", 2)
    assert harness.latest_checkpoint(str(tmp_path)) == newest
    assert train(tmp_path, 0)["step"] == 1


def test_no_fitting_checkpoint_is_error(tmp_path: pathlib.Path) -> None:
    """A start fails when no checkpoint fits the graph."""
    train(tmp_path, 2)
    with pytest.raises(
        rt.NotFoundError, match=r"model.ckpt/2 does not fit the graph.*Saver\(partial=True\)"
    ):
        train(tmp_path, 1, names="wb")


def test_unsaved_variables_are_named(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables that no checkpoint holds are named at the start."""

    def weights_only() -> harness.Saver:
        return harness.Saver(rt.trainable_variables())

    train(tmp_path, 1, saver=weights_only)
    assert (
        "1 global variables are in no checkpoint: global_step; a chief that is started again"
        in caplog.text
    )
    with pytest.raises(
        RuntimeError, match="Restored: .*model.ckpt/1.*not initialized: global_step"
    ):
        train(tmp_path, 1, saver=weights_only)
    caplog.clear()
    train(tmp_path / "other", 1)
    assert "in no checkpoint" not in caplog.text


def test_missing_variables_begin_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a partial Saver a missing variable takes its initial value once."""

    def partial() -> harness.Saver:
        return harness.Saver(partial=True)

    train(tmp_path, 3, saver=partial)
    assert train(tmp_path, 2, "wb", saver=partial) == {"step": 3, "w": 3, "b": 0}
    assert "lacks b: initial values are taken" in caplog.text
    assert train(tmp_path, 0, "wb", saver=partial) == {"step": 5, "w": 5, "b": 2}


def test_deferred_saver_uses_session_graph(tmp_path: pathlib.Path) -> None:
    """A deferred Saver saves the variables of the session's graph."""
    assert train(tmp_path, 2, saver=lambda: harness.Saver(defer_build=True))["step"] == 0
    assert train(tmp_path, 0)["step"] == 2


def test_tensorflow_checkpoints_are_named(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, set_times: SetTimes
) -> None:
    """Checkpoints of TensorFlow are named as unreadable."""
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1200"\n')
    for kind in ("index", "data-00000-of-00001"):
        (tmp_path / f"model.ckpt-1200.{kind}").write_bytes(b"x")
    set_times(timeouts, LOG_EVERY_SECS=0)
    assert harness.latest_checkpoint(str(tmp_path)) is None
    with pytest.raises(ValueError, match="Couldn't find a checkpoint"):
        harness.load_checkpoint(f"{tmp_path}/model.ckpt-1200")
    for name in ("", "/model.ckpt-1200"):
        assert (
            f"the checkpoints at {tmp_path}{name} are TensorFlow's, which cannot be read"
            in caplog.text
        )


def test_plain_restore_leaves_states(tmp_path: pathlib.Path) -> None:
    """restore leaves the trainer's states alone, and restore_latest restores them."""
    place = {"example": 2000}
    taken: list[Any] = []
    harness.checkpointable("data", lambda: place, taken.append)
    try:
        train(tmp_path / "old", 1)
        old = harness.latest_checkpoint(str(tmp_path / "old"))
        saver = harness.Saver([rt.Variable(np.float32(0), name="w")])
        with rt.Session() as sess:
            saver.restore(sess, old)
            assert not taken
            saver.restore_latest(sess, str(old))
            assert taken == [place]
    finally:
        harness.forget_checkpointable("data")


@pytest.mark.parametrize(
    "ask", [harness.latest_checkpoint, harness.load_checkpoint, "iterator", "restore"]
)
def test_deleted_step_is_no_error(
    tmp_path: pathlib.Path,
    ask: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step that is deleted during the search is no error."""
    train(tmp_path, 2)
    series = tmp_path / "model.ckpt"
    shutil.copytree(series / "2", series / "3")  # without a manifest it is dated by the file system
    (series / "3" / "bellwether.json").unlink()
    found = layout.steps_in

    def then_deleted(directory: str) -> list[layout.StoredStep]:
        steps = found(directory)
        shutil.rmtree(series / "3", ignore_errors=True)
        return steps

    monkeypatch.setattr(layout, "steps_in", then_deleted)
    monkeypatch.setattr(layout, "managers_below", lambda logdir: [str(series)])
    if ask == "iterator":
        assert next(iter(tf1.train.checkpoints_iterator(str(tmp_path)))) == str(series / "2")
    elif ask == "restore":
        step = harness.get_or_create_global_step()
        with rt.Session() as sess:
            assert harness.Saver([step]).restore_latest(sess, str(tmp_path)) == str(series / "2")
    elif ask is harness.load_checkpoint:
        assert ask(str(tmp_path)).path == str(series / "2")
    else:
        assert ask(str(tmp_path)) == str(series / "2")
    assert "damaged" not in caplog.text
