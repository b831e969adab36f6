"""Stopping everybody: one task's word ends training on all, early or not, and is forgotten in the next run."""

import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import harness
import runtime as rt
from harness.checkpoints import layout, manifest
from harness.checkpoints.manifest import FILE_NAME
from tests.kit.processes import Program
from tests.kit.waits import TIMEOUT_SECS

pytestmark = pytest.mark.chaos

PROGRAM = """
import sys
import harness, runtime as rt
from absl import logging

logging.set_verbosity(logging.INFO)
with harness.join_cluster() as me:
    with me.device():
        step = harness.get_or_create_global_step()
        count = step.assign_add(1)
    if sys.argv[1] == "supervisor":
        sv = harness.Supervisor(is_chief=me.is_chief)
        with sv.managed_session(me.target) as session:
            while not sv.should_stop():
                if int(session.run(count)) >= 300 and me.index == 1:  # not the chief
                    sv.request_stop(everybody=True)
    else:
        values = iter([5.0, 4.0, 4.5, 4.0, 3.99])
        hook = harness.EarlyStoppingHook(lambda session: next(values), patience=3, every_n_steps=100, min_delta=0.1)
        with harness.MonitoredTrainingSession(me.target, me.is_chief, hooks=[hook]) as session:
            while not session.should_stop():
                session.run(count)
        if me.is_chief:
            print("BEST", hook.best, hook.best_step, flush=True)
    print("STOPPED", me.index, flush=True)
"""


@pytest.mark.parametrize("kind", ["supervisor", pytest.param("hook", marks=pytest.mark.nightly)])
def test_one_task_stops_all_workers(tmp_path: pathlib.Path, kind: str) -> None:
    """One task's request stops all workers."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = (
        "python",
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=3",
        "--",
        sys.executable,
        "train.py",
        kind,
    )
    with Program(*command, cwd=tmp_path, cold=True) as program:
        assert program.wait() == 0, program.story()
        assert len(program.lines("STOPPED")) == 3
        if kind == "hook":
            program.expect("training stops early at step")
            program.expect(r"BEST 4\.0 \d+")


FAILS_ONCE = """
import os, sys
import harness
from absl import logging

logging.set_verbosity(logging.INFO)
with harness.join_cluster() as me:
    with me.device():
        count = harness.get_or_create_global_step().assign_add(1)
    sv = harness.Supervisor(is_chief=me.is_chief)
    steps = 0
    with sv.managed_session(me.target) as session:
        while not sv.should_stop():
            steps += 1
            if int(session.run(count)) >= 300 and not me.is_chief:
                sv.request_stop(everybody=True)
    attempt = int(os.environ["BELLWETHER_ATTEMPT"])
    print("STEPS", me.index, attempt, steps, flush=True)
    sys.exit(me.is_chief and attempt == 0)  # what comes after training goes wrong
"""


def test_finished_chief_trains_no_more(tmp_path: pathlib.Path) -> None:
    """A chief that fails after the end does not train again."""
    (tmp_path / "train.py").write_text(textwrap.dedent(FAILS_ONCE))
    command = (
        "python",
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=2",
        "--",
        sys.executable,
        "train.py",
    )
    with Program(*command, cwd=tmp_path, cold=True) as program:
        assert program.wait() == 0, program.story()
        program.expect(
            "nothing left to do: the run has finished before this task was started again"
        )
        program.expect(r"STEPS 0 1 0$")


def test_next_run_is_not_stopped() -> None:
    """The next run on the same tasks is not stopped by the request of the run before."""
    with rt.local_cluster(ps=1, workers=1) as cluster:
        for _ in range(2):
            with rt.Graph().as_default(), cluster.device():
                count = harness.get_or_create_global_step().assign_add(1)
                supervisor = harness.Supervisor()
                with supervisor.managed_session(cluster.target) as session:
                    session.run(count)
                    assert not supervisor.coord.wait_for_stop(2.5)  # by an order of the run before
                    supervisor.request_stop(everybody=True)
                    assert supervisor.should_stop()


def test_lone_task_stops_itself() -> None:
    """A lone task stops itself, before and during a session."""
    with rt.Graph().as_default(), rt.Server.create_local_server() as server:
        harness.get_or_create_global_step()
        supervisor = harness.Supervisor()
        supervisor.request_stop(everybody=True)  # before there is a session
        assert supervisor.should_stop()
        supervisor = harness.Supervisor()
        with supervisor.managed_session(server.target):
            supervisor.request_stop(everybody=True)
            assert supervisor.should_stop()


def test_senseless_early_stopping_is_refused() -> None:
    """Options of EarlyStoppingHook that make no sense are refused."""
    for options, text in (
        ({"mode": "up"}, "'max' or 'min', not 'up'"),
        ({"every_n_steps": 0}, "1 at least"),
    ):
        with pytest.raises(ValueError, match=text):
            harness.EarlyStoppingHook(lambda _: 0.0, patience=1, **options)  # type: ignore[arg-type]


def test_tensor_may_be_the_metric() -> None:
    """A tensor may be the metric of early stopping."""
    with rt.Graph().as_default():
        step = harness.get_or_create_global_step()
        more = step.assign_add(1)
        loss = rt.numpy.maximum(5.0 - rt.call(lambda s: s.astype("float32"), more), 1.0)
        hook = harness.EarlyStoppingHook(loss, patience=2, every_n_steps=1)
        steps = 0
        with harness.MonitoredSession(hooks=[hook]) as session:
            while not session.should_stop():
                steps = int(session.run(more))
    assert (hook.best, hook.best_step, steps) == (1.0, 4, 6)


class Metric:
    """A metric that has one given value after the other."""

    values: Iterator[float]

    def __call__(self, session: object) -> float:
        return next(self.values)


def looks(values: list[float], **options: object) -> tuple[harness.EarlyStoppingHook, int]:
    """Trains until early stopping, or until there are no values; returns the hook, and the steps of this process."""
    metric = options.pop("metric", None) or Metric()
    assert isinstance(metric, Metric)
    metric.values = iter(values)
    directory = options.pop("checkpoint_dir", None)
    with rt.Graph().as_default():
        more = harness.get_or_create_global_step().assign_add(1)
        hook = options.pop("hook", None) or harness.EarlyStoppingHook(
            metric, patience=3, every_n_steps=1
        )
        assert isinstance(hook, harness.EarlyStoppingHook)
        steps = 0
        with harness.MonitoredTrainingSession(checkpoint_dir=directory, hooks=[hook]) as session:  # type: ignore[arg-type]
            while not session.should_stop() and steps < len(values):
                session.run(more)
                steps += 1
    return hook, steps


def test_nan_is_no_best_value() -> None:
    """A NaN as the first value is no best value."""
    hook, steps = looks([float("nan"), 9.0, 8.0, 7.0, 6.0, 5.0])
    assert (hook.best, steps) == (5.0, 6)


def test_patience_outlives_the_chief(tmp_path: pathlib.Path) -> None:
    """The count of patience outlives the process of the chief."""
    assert looks([1.0, 2.0, 3.0], checkpoint_dir=str(tmp_path))[1] == 3
    hook, steps = looks([2.9, 2.8, 2.7], checkpoint_dir=str(tmp_path))
    assert (hook.best, hook.best_step, steps) == (1.0, 1, 1)


CHIEF_RESTARTS = """
import os, signal, sys
import harness
from harness.checkpoints import layout, manifest

first = os.environ["BELLWETHER_ATTEMPT"] == "0"
with harness.join_cluster() as me:
    with me.device():
        step = harness.get_or_create_global_step()
        count = step.assign_add(1)
    hook = harness.EarlyStoppingHook(lambda s: float(s.run(step)), patience=50, every_n_steps=1)
    listeners = [harness.CheckpointSaverListener()]  # so each save has ended when the step has
    hooks = [harness.CheckpointSaverHook(sys.argv[1], save_steps=2, listeners=listeners)]
    if sys.argv[2] == "hook":
        hooks.append(hook)
    elif first:
        harness.checkpointable("data", lambda: 17, print)  # the next process has it only later
    creator = harness.ChiefSessionCreator(master=me.target, checkpoint_dir=sys.argv[1])
    session = harness.MonitoredSession(creator, hooks)
    if first:
        for _ in range(6):
            session.run(count)
        os.kill(os.getpid(), signal.SIGKILL)
    newest = layout.latest_checkpoint(sys.argv[1])
    print("STATES", manifest.read_manifest(newest).states, hook.best, flush=True)
    session.close()
"""


@pytest.mark.parametrize("kind", ["hook", pytest.param("late", marks=pytest.mark.nightly)])
def test_live_model_keeps_the_states(tmp_path: pathlib.Path, kind: str) -> None:
    """A chief that finds its model alive restores the states."""
    (tmp_path / "train.py").write_text(textwrap.dedent(CHIEF_RESTARTS))
    train = (sys.executable, "train.py", str(tmp_path / "checkpoints"), kind)
    command = ("python", "-m", "harness.launch", "--ps=1", "--workers=1", "--", *train)
    with Program(*command, cwd=tmp_path, cold=True) as program:
        assert program.wait() == 0, program.story()
        program.expect(
            "STATES .*'early_stopping': .* 1.0$" if kind == "hook" else "STATES .*'data': 17"
        )


@pytest.mark.parametrize("place", ["hooks", "chief_only_hooks"])
def test_last_checkpoint_has_metric_values(tmp_path: pathlib.Path, place: str) -> None:
    """The last checkpoint holds all values of the metric, and the next run continues with them."""
    values = iter([1.0, 2.0, 3.0, 4.0])
    for last in (2, 3):  # and the next run of this process continues with these
        with rt.Graph().as_default():
            more = harness.get_or_create_global_step().assign_add(1)
            hook = harness.EarlyStoppingHook(lambda _: next(values), patience=9, every_n_steps=1)
            arguments: dict[str, Any] = {place: [hook]}
            with harness.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), **arguments
            ) as session:
                while int(session.run(more)) < last:
                    pass
        saved = manifest.read_manifest(str(layout.latest_checkpoint(str(tmp_path))))
        assert saved is not None
        (held,) = saved.states.values()
        assert held["early_stopping"][0] == [1, 1.0] and len(held["early_stopping"]) == last


def test_own_hook_stops_everybody() -> None:
    """A user's own hook stops all tasks by the attribute stop_everybody alone."""

    class Hook(harness.SessionRunHook):
        def __init__(self) -> None:
            self.stop_everybody: Callable[[str], None] = pytest.fail

        def after_run(self, run_context: object, run_values: object) -> None:
            self.stop_everybody("enough")

    with rt.Graph().as_default(), rt.Server.create_local_server() as server:
        more = harness.get_or_create_global_step().assign_add(1)
        with harness.MonitoredSession(
            harness.ChiefSessionCreator(master=server.target), [Hook()]
        ) as session:
            session.run(more)
            assert session.coord.wait_for_stop(TIMEOUT_SECS)


def test_hook_begins_anew() -> None:
    """A hook begins anew in another run."""
    metric = Metric()
    hook, steps = looks([1.0, 2.0, 3.0, 4.0, 5.0], metric=metric)
    assert steps == 4
    again, steps = looks([8.0, 9.0, 7.0], metric=metric, hook=hook)
    assert (again.best, steps) == (7.0, 3)


def test_damaged_checkpoints_reset_the_count(tmp_path: pathlib.Path) -> None:
    """With a live model and damaged checkpoints training continues, and the count begins anew."""
    with rt.Server.create_local_server() as server, rt.Graph().as_default():
        more = harness.get_or_create_global_step().assign_add(1)
        for start in range(2):
            hook = harness.EarlyStoppingHook(lambda _: 1.0, patience=9, every_n_steps=1)
            with harness.MonitoredTrainingSession(
                server.target,
                checkpoint_dir=str(tmp_path),
                hooks=[hook],
                save_checkpoint_secs=600 if start == 0 else None,
            ) as session:
                reached = int(session.run(more))
            for manifest in tmp_path.rglob(FILE_NAME):
                manifest.write_text("{")
    assert (reached, hook.best_step) == (2, 2)
