"""What was trained is saved, also where the global step does not tell that anything was."""

import logging as stdlib_logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.checkpoints.save_job import SaveHandle
from harness.training.run.services import SeriesCheckpoints
from tests.harness.checkpoints import checkpoint_kit as ckit
from tests.kit.losses import loss_of
from tests.kit.waits import until

pytestmark = pytest.mark.disk


def _until(condition: Callable[[], bool], work: Callable[[], object]) -> None:
    for _ in range(100_000):
        if condition():
            return
        work()
    raise AssertionError("it never came")


def _graph() -> tuple[rt.Variable, rt.Variable, rt.Operation]:
    step = harness.get_or_create_global_step()
    v = rt.Variable(np.float32(0), name="v")
    loss = -v

    # the classic mistake: global_step is not given
    return v, step, harness.Optimizer(optax.sgd(1.0)).minimize(loss)


def _saved(logdir: pathlib.Path) -> float:
    """What the newest checkpoint has; -1 while there is none, or while it is replaced by one of the same step."""
    try:
        path = harness.latest_checkpoint(str(logdir))
        return -1.0 if path is None else float(harness.load_variable(path, "v"))
    except (rt.DataLossError, rt.NotFoundError, ValueError):
        return -1.0


def test_end_saves_a_standing_step(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The end saves what was trained although the global step stands still, and warns of the step."""
    for run in range(2):
        with rt.Graph().as_default():
            v, step, train = _graph()
            supervisor = harness.Supervisor(logdir=str(tmp_path), global_step=step, summary_op=None)
            with caplog.at_level(stdlib_logging.WARNING), supervisor.managed_session() as sess:
                assert sess.run(v) == 10 * run
                until(lambda: _saved(tmp_path) >= 0)  # the checkpoint that the last one replaces
                for _ in range(10):
                    sess.run(train)
        assert _saved(tmp_path) == 10 * (run + 1)
    told = [r.message for r in caplog.records if "global step stays at 0" in r.message]
    assert told and "pass global_step to minimize()" in told[0]


def test_save_before_step_update_is_silent(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save between an update and its step raises no warning of a standing step."""

    class BetweenTheTwo(harness.Saver):
        def save(self, sess: rt.Session, *args: Any, **kwargs: Any) -> Any:
            sess.run(v.assign_add(1.0).op)
            path = super().save(sess, *args, **kwargs)
            sess.run(step.assign_add(1).op)
            return path

    with rt.Graph().as_default(), caplog.at_level(stdlib_logging.WARNING):
        v, step, _ = _graph()
        with rt.Session() as sess:
            sess.run(rt.global_variables_initializer())
            path = str(tmp_path / "model.ckpt")
            checkpoints = SeriesCheckpoints(BetweenTheTwo(), path, step, None)
            checkpoints.save(sess)
            sess.run(step.assign(0).op)
            checkpoints.save(sess)
            assert not caplog.records
            sess.run(step.assign(0).op)  # as nothing counts it
            standing = SeriesCheckpoints(harness.Saver(), path, step, None)
            for _ in range(2):
                sess.run(v.assign_add(1.0).op)
                standing.save(sess)
    assert ["global step stays at 0" in record.message for record in caplog.records] == [True]


def test_timer_saves_a_standing_step_again(
    tmp_path: pathlib.Path,
) -> None:
    """The timer saves a standing step again when something was trained, under the same step."""
    with rt.Graph().as_default():
        v, step, train = _graph()
        saver = harness.Saver()
        supervisor = harness.Supervisor(
            logdir=str(tmp_path),
            global_step=step,
            saver=saver,
            save_model_secs=0.1,
            summary_op=None,
        )
        with supervisor.managed_session() as sess:
            _until(lambda: _saved(tmp_path) >= 5, lambda: sess.run(train))
    assert os.listdir(tmp_path / "model.ckpt") == ["0"]


def test_hook_saves_a_standing_step(tmp_path: pathlib.Path) -> None:
    """A checkpoint hook saves what was trained although the global step stands still."""
    told = []

    class Listener(harness.CheckpointSaverListener):
        def after_save(self, session: rt.Session, global_step_value: int) -> None:
            told.append(float(session.run("v:0")))

    def last_value(logdir: pathlib.Path, listeners: list[harness.CheckpointSaverListener]) -> float:
        with rt.Graph().as_default():
            v, _, train = _graph()
            hook = harness.CheckpointSaverHook(str(logdir), save_secs=0.05, listeners=listeners)
            creator = harness.ChiefSessionCreator(checkpoint_dir=str(logdir))
            with harness.MonitoredSession(creator, [hook]) as sess:
                _until(lambda: _saved(logdir) >= 3, lambda: sess.run(train))
                last = float(sess.run(v)) + 1
                sess.run(train)
        return last

    assert last_value(tmp_path / "alone", []) == _saved(tmp_path / "alone")
    last = last_value(tmp_path / "told", [Listener()])
    assert last == _saved(tmp_path / "told")
    assert told[-1] == last and len(told) >= 3


def test_unchanged_model_is_not_saved_again(tmp_path: pathlib.Path) -> None:
    """A model that has not changed is not saved again, also after a restart."""
    written = []
    # initialised, then restored twice; in the last one the path is written in another way
    for run in range(3):
        with rt.Graph().as_default():
            v, step, _ = _graph()
            saver = harness.Saver()
            logdir = str(tmp_path) if run < 2 else f"{tmp_path}/../{tmp_path.name}//."
            supervisor = harness.Supervisor(
                logdir=logdir, global_step=step, saver=saver, save_model_secs=0.02, summary_op=None
            )
            with supervisor.managed_session() as sess:
                until(lambda: _saved(tmp_path) >= 0)
                checkpoints = SeriesCheckpoints(saver, supervisor.save_path or "", step, None)
                assert [checkpoints.save(sess) for _ in range(20)] == [None] * 20
        manifest = tmp_path / "model.ckpt" / "0" / "bellwether.json"
        written.append(manifest.stat().st_mtime_ns)
    assert len(set(written)) == 1


def test_changed_since_knows_changed_variables(tmp_path: pathlib.Path) -> None:
    """changed_since knows which variables have changed since a checkpoint, and returns None after a
    restart.
    """
    graph, v = ckit.make_graph(
        {"a": np.zeros(3), "b": np.array([b"x"], object), "c": np.float32(1)}, {"b": 1}
    )
    with graph.as_default():
        with ckit.cluster(2) as (server, _), ckit.session(server, graph) as sess:
            ckit.initialize(sess, list(v.values()))
            savers = [harness.Saver([v["a"], v["b"]]), harness.Saver()]
            first, all_of_it = (s.save(sess, tmp_path / f"m{i}", 1) for i, s in enumerate(savers))
            assert [
                s.changed_since(sess, p) for s, p in zip(savers, (first, all_of_it), strict=True)
            ] == [False, False]
            sess.run(v["c"].assign(2.0).op)
            assert [
                s.changed_since(sess, p) for s, p in zip(savers, (first, all_of_it), strict=True)
            ] == [False, True]
            sess.run(v["b"].assign(np.array([b"y"], object)).op)
            assert savers[0].changed_since(sess, first) is True
            savers[0].restore(sess, first)
            assert savers[0].changed_since(sess, first) is False
            sess.run(v["a"].assign_add(np.ones(3)).op)
            assert savers[0].changed_since(sess, first) is True
        with ckit.cluster(2) as (server, _), ckit.session(server, graph) as sess:
            ckit.initialize(sess, list(v.values()))
            assert savers[0].changed_since(sess, first) is None


class HeldSaver(harness.Saver):
    """Ends a save in the background only when told to."""

    held: list[tuple[SaveHandle, str]]

    def save(self, sess: rt.Session, *args: Any, wait: bool = True, **kwargs: Any) -> Any:
        path = super().save(sess, *args, **kwargs)
        self.held.append((SaveHandle(int(os.path.basename(path)), 0.0), path))
        return path if wait else self.held[-1][0]

    def release(self) -> bool:
        while self.held:
            handle, path = self.held.pop()
            handle.set_result(path)
        return True


class Marks:
    """A writer of events that keeps the steps of the marks."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def add_session_log(self, _: str, step: int | None = None, checkpoint_path: str = "") -> None:
        self.steps.append(step)


def test_save_that_ends_meanwhile_is_noted(tmp_path: pathlib.Path) -> None:
    """A save that ends while the next save begins is noted, too."""
    with rt.Graph().as_default() as graph:
        step = harness.get_or_create_global_step()
        saver, marks = HeldSaver(), Marks()
        saver.held = []
        writer: Any = marks
        checkpoints = SeriesCheckpoints(saver, f"{tmp_path}/m", step, writer, saver.release)
        with rt.Session("", graph) as sess:
            sess.run(step.initializer)
            for _ in range(2):
                sess.run(step.assign_add(1).op)
                checkpoints.begin(sess)
            saver.release()
            checkpoints.inspect(sess)
    assert marks.steps == [1, 2]


class RecoversMeanwhile(harness.Saver):
    """Asks whether anything has changed at the moment when another thread replaces the session."""

    session: harness.ManagedSession | None = None

    def changed_since(self, sess: rt.Session, save_path: str) -> bool | None:
        if self.session is not None:
            self.session.recover(sess, loss_of(sess))
        return super().changed_since(sess, save_path)


def test_replaced_session_costs_one_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    """A session that is replaced during a save costs that checkpoint, and the next save succeeds."""
    with rt.Graph().as_default():
        _, step, train = _graph()
        saver = RecoversMeanwhile()
        supervisor = harness.Supervisor(
            logdir=str(tmp_path), global_step=step, summary_op=None, saver=saver, save_model_secs=0
        )
        with supervisor.managed_session() as sess:
            checkpoints = SeriesCheckpoints(saver, supervisor.save_path or "", step, None)
            assert checkpoints.save(sess) is not None
            sess.run(train)
            saver.session = sess
            with pytest.raises(
                rt.AbortedError, match="its session was replaced meanwhile: the session was closed"
            ):
                checkpoints.save(sess)
            saver.session = None
            sess.run(train)
            assert checkpoints.save(sess) is not None
