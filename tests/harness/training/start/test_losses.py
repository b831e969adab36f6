"""An error is a lost task where the session's own tasks raise it, and an error of its own anywhere else."""

import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness.training.start.managed_session import TRIES
from runtime.server.local_cluster import InProcessCluster
from tests.kit.losses import loss_of

pytestmark = pytest.mark.cluster
AWAY = 3
"""How often a store or another cluster does not answer: where a session takes that for a loss, the test still ends."""


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with rt.local_cluster(ps=1, workers=1) as made, rt.Graph().as_default(), made.device():
        yield made


class Away:
    """Something outside the cluster that does not answer at first."""

    def __init__(self, kind: type[rt.OpError] = rt.UnavailableError) -> None:
        self.calls = 0
        self.kind = kind

    def ask(self) -> None:
        self.calls += 1
        if self.calls <= AWAY:
            raise self.kind("the store is away", task="/job:ps/task:0")


class Ends(harness.SessionRunHook):
    def __init__(self, away: Away | None = None) -> None:
        self.away, self.ends = away, 0

    def end(self, session: rt.Session) -> None:
        self.ends += 1
        if self.away is not None:
            self.away.ask()


def newest(directory: pathlib.Path) -> int:
    path = harness.latest_checkpoint(str(directory))
    assert path is not None
    return int(pathlib.Path(path).name)


@pytest.mark.parametrize("kind", [rt.UnavailableError, rt.AbortedError])
def test_failing_end_costs_itself(
    cluster: InProcessCluster, tmp_path: pathlib.Path, kind: type[rt.OpError]
) -> None:
    """A hook whose end fails costs neither the other ends nor the last save."""
    more = harness.get_or_create_global_step().assign_add(1)
    hooks = [Ends(Away(kind)), Ends()]
    session = harness.MonitoredTrainingSession(
        cluster.target, checkpoint_dir=str(tmp_path), hooks=hooks
    )
    with pytest.raises(kind, match="the store is away"), session:
        for _ in range(5):
            session.run(more)
    assert [hook.ends for hook in hooks] == [1, 1] and newest(tmp_path) == 5


class AsksTeacher(harness.SessionRunHook):
    """Asks another cluster after each step."""

    def __init__(self, teacher: rt.Session, value: Any) -> None:
        self.teacher, self.value, self.calls = teacher, value, 0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.calls += 1
        if self.calls <= AWAY:
            self.teacher.run(self.value)


def test_applied_step_is_not_repeated(cluster: InProcessCluster) -> None:
    """A step that was applied is not repeated when a hook then fails by another cluster."""
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    with rt.local_cluster(ps=1, workers=1) as other:
        with rt.Graph().as_default() as graph, other.device():
            value = rt.Variable(1.0)
            teacher = rt.Session(other.target, graph, rt.SessionConfig(reconnect_secs=0.5))
            teacher.run([value.initializer, value])
        other.servers["ps", 0].stop()
        hook = AsksTeacher(teacher, value)
        with harness.MonitoredTrainingSession(cluster.target, hooks=[hook]) as session:
            for _ in range(AWAY):
                with pytest.raises((rt.UnavailableError, rt.AbortedError)):
                    session.run(more)
            assert int(session.run(more)) == AWAY + 1 == hook.calls
            assert session.managed.recoveries == 0


def test_loss_after_step_keeps_results(cluster: InProcessCluster) -> None:
    """After a loss that follows the step the results are returned, and the step is not repeated."""
    more = harness.get_or_create_global_step().assign_add(1)
    seen: list[rt.Session] = []

    class Loses(harness.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            seen.append(run_context.session)
            if len(seen) == 1:
                raise loss_of(run_context.session)

    with harness.MonitoredTrainingSession(cluster.target, hooks=[Loses(), Loses()]) as session:
        assert [int(session.run(more)) for _ in range(3)] == [1, 2, 3]
        assert session.managed.recoveries == 1 and seen[1] is session.raw is not seen[0]


def test_failing_step_function_runs_once(cluster: InProcessCluster) -> None:
    """A step function that fails by itself is called once."""
    harness.get_or_create_global_step()
    away = Away(rt.AbortedError)
    with harness.MonitoredTrainingSession(cluster.target) as session:
        with pytest.raises(rt.AbortedError, match="the store is away"):
            session.run_step_fn(lambda step_context: away.ask())
        assert away.calls == 1 and session.managed.recoveries == 0


def test_failing_python_call_runs_once(cluster: InProcessCluster) -> None:
    """A Python call of the graph that fails is called once."""
    away = Away()

    def ask(session: Any, arrays: Any) -> list[Any]:
        away.ask()
        return [np.float32(1.0)]

    value = rt.lowlevel.python_call(
        ask, [rt.constant(1.0)], [((), np.float32)], name="ask"
    ).outputs[0]
    supervisor = harness.Supervisor(logdir=None)
    with supervisor.managed_session(cluster.target) as session:
        with pytest.raises(rt.UnavailableError, match="the store is away"):
            session.run(value)
        assert away.calls == 1 and session.recoveries == 0


class OwnSaver(harness.Saver):
    """A saver whose store does not answer at the end."""

    away: Away | None = None

    def save(self, *arguments: Any, **options: Any) -> Any:
        if self.away is not None:
            self.away.ask()
        return super().save(*arguments, **options)


def test_failing_last_save_runs_once(cluster: InProcessCluster, tmp_path: pathlib.Path) -> None:
    """A saver that fails at the end is called once."""
    more = harness.get_or_create_global_step().assign_add(1)
    saver = OwnSaver()
    supervisor = harness.Supervisor(
        logdir=str(tmp_path), saver=saver, save_model_secs=0, summary_op=None
    )
    with pytest.raises(rt.UnavailableError, match="the store is away"):
        with supervisor.managed_session(cluster.target) as session:
            session.run(more)
            saver.away = Away()
    assert saver.away is not None and saver.away.calls == 1


def test_save_of_closed_session_fails_nothing(
    cluster: InProcessCluster, tmp_path: pathlib.Path
) -> None:
    """A timed save that a ps refuses, because the program has closed the session, is no error of the stop."""
    harness.get_or_create_global_step()
    saving, closed = threading.Event(), threading.Event()

    class Slow(harness.Saver):
        def save(self, session: Any, *arguments: Any, **options: Any) -> Any:
            saving.set()
            assert closed.wait(60)
            raise loss_of(session)

    supervisor = harness.Supervisor(
        logdir=str(tmp_path), saver=Slow(), save_model_secs=1, summary_op=None
    )
    session = supervisor.prepare_or_wait_for_session(cluster.target)
    assert saving.wait(60)
    session.close()
    closed.set()
    supervisor.stop()


def test_useless_recoveries_end(cluster: InProcessCluster) -> None:
    """Recoveries that find no difference end with an error."""
    more = harness.get_or_create_global_step().assign_add(1)

    class LosesAlways(harness.SessionRunHook):
        def before_run(self, run_context: Any) -> None:
            raise loss_of(run_context.session)

    session = harness.MonitoredTrainingSession(cluster.target, hooks=[LosesAlways()])
    with pytest.raises(
        rt.UnavailableError, match=f"also after {TRIES} recoveries, which found nothing different"
    ):
        with session:
            session.run(more)
    with pytest.raises(RuntimeError, match="already closed"):
        _ = session.managed


def test_other_clusters_end_is_input_end(cluster: InProcessCluster, tmp_path: pathlib.Path) -> None:
    """The end of another cluster ends the block as the end of the input does, and the run saves."""
    more = harness.get_or_create_global_step().assign_add(1)
    session = harness.MonitoredTrainingSession(cluster.target, checkpoint_dir=str(tmp_path))

    def ask(step_context: Any) -> None:
        step_context.session.run(more)
        raise rt.TaskLeftError("training is over there", task="/job:ps/task:0")

    with session:
        session.run(more)
        session.run_step_fn(ask)
    assert newest(tmp_path) == 2
