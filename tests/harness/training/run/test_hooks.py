"""The hooks one by one, in real sessions."""

import json
import math
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from absl import logging

import harness
import runtime as rt
from harness.tf1.train import training as tf1_training
from harness.training.run.hooks import SecondOrStepTimer
from tests.harness.training.run.test_supervisor import events


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made
    from harness.tensorboard.writer import FileWriterCache

    FileWriterCache.clear()


def run(hooks: list[Any], steps: int, fetch: Any = None, feed: Any = None) -> list[Any]:
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    results: list[Any] = []
    with harness.MonitoredSession(hooks=hooks) as sess:
        while not sess.should_stop() and len(results) < steps:
            results.append(sess.run([more, *([fetch] if fetch is not None else [])], feed))
    return results


def test_stop_at_last_step() -> None:
    """StopAtStepHook ends training at the last step and takes exactly one limit."""
    assert len(run([harness.StopAtStepHook(last_step=3)], 10)) == 3
    with pytest.raises(ValueError, match="Exactly one"):
        harness.StopAtStepHook()
    with pytest.raises(ValueError, match="Exactly one"):
        harness.StopAtStepHook(num_steps=1, last_step=1)


def test_stop_after_steps() -> None:
    """StopAtStepHook ends training after a number of steps."""
    assert len(run([harness.StopAtStepHook(num_steps=4)], 10)) == 4


def test_summaries_use_the_users_step(tmp_path: pathlib.Path) -> None:
    """SummarySaverHook writes summaries from the user's own step, with its feeds."""
    x = rt.placeholder(np.float32, [], name="x")
    harness.summary.scalar("x", x)
    scaffold = harness.Scaffold(summary_op=harness.summary.merge_all())
    hook = harness.SummarySaverHook(save_steps=8, output_dir=str(tmp_path), scaffold=scaffold)
    run([hook], 30, feed={x: 5.0})
    found = [(e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert found == [(1, 5.0), (9, 5.0), (17, 5.0), (25, 5.0)]
    with pytest.raises(ValueError, match="Exactly one of scaffold or summary_op"):
        harness.SummarySaverHook(save_steps=1)


def test_step_rate_is_written(tmp_path: pathlib.Path) -> None:
    """StepCounterHook writes the steps per second."""
    run([harness.StepCounterHook(every_n_steps=10, output_dir=str(tmp_path))], 31)
    from harness.tensorboard.writer import FileWriterCache

    FileWriterCache.get(str(tmp_path)).flush()
    rates = [(e.step, v.tag) for e in events(tmp_path) for v in e.summary.value]
    assert rates == [(11, "global_step/sec"), (21, "global_step/sec"), (31, "global_step/sec")]


def test_step_rate_in_own_writer(tmp_path: pathlib.Path) -> None:
    """A writer of the caller's own has all its events on disk at the end of the session."""
    writer = harness.FileWriter(str(tmp_path), flush_secs=1000)
    run([harness.StepCounterHook(every_n_steps=10, summary_writer=writer)], 31)
    assert [e.step for e in events(tmp_path) for _ in e.summary.value] == [11, 21, 31]
    writer.close()


class Heard:
    """What was logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> list[str]:
        import logging as python_logging

        lines = self.lines

        class Handler(python_logging.Handler):
            def emit(self, record: Any) -> None:
                lines.append(record.getMessage())

        self._handler = Handler()
        self._level = logging.get_verbosity()
        logging.set_verbosity(logging.INFO)
        logging.get_absl_logger().addHandler(self._handler)
        return lines

    def __exit__(self, *_: object) -> None:
        logging.get_absl_logger().removeHandler(self._handler)
        logging.set_verbosity(self._level)


def test_tensors_are_logged() -> None:
    """LoggingTensorHook logs tensors by steps, by time and at the end."""
    v = rt.Variable(7.0, name="v")
    with Heard() as lines:
        run([harness.LoggingTensorHook({"vee": v}, every_n_iter=4, at_end=True)], 9)
    # 0, 4, 8, end
    assert [line.split(" (")[0] for line in lines if line.startswith("vee")] == ["vee = 7.0"] * 4
    with Heard() as lines:
        with rt.Graph().as_default():
            rt.Variable(1.0, name="w")
            run(
                [
                    harness.LoggingTensorHook(
                        ["w:0"], every_n_secs=1000, formatter=lambda d: f"w is {d['w:0']}"
                    )
                ],
                3,
            )
    assert "w is 1.0" in lines


@pytest.mark.parametrize("bad", [{}, {"every_n_iter": 1, "every_n_secs": 1.0}, {"every_n_iter": 0}])
def test_wrong_logging_arguments_are_refused(bad: dict[str, Any]) -> None:
    """Wrong arguments of LoggingTensorHook are refused."""
    with pytest.raises(ValueError):
        harness.LoggingTensorHook([], **bad)


@pytest.mark.parametrize("fails", [True, False])
def test_nan_stops_or_fails(fails: bool) -> None:
    """NanTensorHook ends training at a NaN, with an error if asked to."""
    x = rt.placeholder(np.float32, [], name="x")
    loss = x * 1.0
    hook = harness.NanTensorHook(loss, fail_on_nan_loss=fails)
    if fails:
        with pytest.raises(harness.NanLossDuringTrainingError):
            run([hook], 2, feed={x: math.nan})
    else:
        assert len(run([hook], 2, feed={x: math.nan})) == 1


def test_final_ops_are_kept() -> None:
    """FinalOpsHook keeps the values of the end."""
    v = rt.Variable(3.0)
    hook = tf1_training.FinalOpsHook([v])
    run([hook], 1)
    assert hook.final_ops_values == [3.0]


def test_feeds_come_from_a_function() -> None:
    """FeedFnHook feeds each step from a function."""
    x = rt.placeholder(np.float32, [], name="x")
    fed = iter(range(10))
    got = run([tf1_training.FeedFnHook(lambda: {x: next(fed)})], 3, fetch=x * 1.0)
    assert [value for _, value in got] == [0.0, 1.0, 2.0]


def test_worker_waits_for_global_step() -> None:
    """GlobalStepWaiterHook waits until the other workers have reached a step."""
    step = harness.get_or_create_global_step()
    more = step.assign_add(1)
    server = rt.Server.create_local_server()
    with rt.Session(server.target) as other:
        other.run(step.initializer)
        advance = threading.Timer(0.1, lambda: [other.run(more) for _ in range(5)])
        advance.start()
        hook = tf1_training.GlobalStepWaiterHook(5, poll_secs=0.01)
        with harness.MonitoredTrainingSession(server.target, is_chief=False, hooks=[hook]) as sess:
            assert sess.run(more) == 6
        advance.join()
    server.stop()


class Listener(harness.CheckpointSaverListener):
    def __init__(self) -> None:
        self.story: list[Any] = []
        self.stops_at: int | None = None

    def begin(self) -> None:
        self.story.append("begin")

    def before_save(self, session: rt.Session, global_step_value: int) -> None:
        self.story.append(("before", global_step_value))

    def after_save(self, session: rt.Session, global_step_value: int) -> bool:
        self.story.append(("after", global_step_value))
        return global_step_value == self.stops_at

    def end(self, session: rt.Session, global_step_value: int) -> None:
        self.story.append(("end", global_step_value))


def test_listeners_see_every_save(tmp_path: pathlib.Path) -> None:
    """A listener sees the begin, every save and the end."""
    listener = Listener()
    run([harness.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=[listener])], 3)
    saved = [0, 2, 3]
    assert listener.story == [
        "begin",
        *[(w, s) for s in saved for w in ("before", "after")],
        ("end", 3),
    ]
    assert {int(p.name) for p in (tmp_path / "model.ckpt").iterdir() if p.name.isdigit()} == set(
        saved
    )


def test_listener_stops_training(tmp_path: pathlib.Path) -> None:
    """A listener may stop training."""
    listener = Listener()
    listener.stops_at = 4
    assert (
        len(
            run(
                [harness.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=[listener])], 10
            )
        )
        == 4
    )


def test_wrong_checkpoint_arguments_are_refused(tmp_path: pathlib.Path) -> None:
    """Contradictory arguments of CheckpointSaverHook are refused."""
    with pytest.raises(ValueError, match="both saver and scaffold"):
        harness.CheckpointSaverHook("d", save_steps=1, saver=object(), scaffold=object())
    with pytest.raises(ValueError, match="exactly one"):
        harness.CheckpointSaverHook("d", save_steps=1, save_secs=1)


def test_traces_are_written(tmp_path: pathlib.Path) -> None:
    """ProfilerHook writes traces, and never of the first step."""
    run([tf1_training.ProfilerHook(save_steps=3, output_dir=str(tmp_path))], 8)
    files = sorted(tmp_path.glob("timeline-*.json"))
    # never the first, which compiles
    assert [f.name for f in files] == ["timeline-4.json", "timeline-7.json"]
    assert json.loads(files[0].read_text())["traceEvents"]


def test_timer_counts_seconds() -> None:
    """A timer in seconds triggers once for a step and after its period."""
    now = [0.0]
    timer = SecondOrStepTimer(every_secs=1.0, clock=lambda: now[0])
    assert timer.should_trigger_for_step(1)
    assert timer.update_last_triggered_step(1) == (None, None)
    now[0] = 5.0
    assert not timer.should_trigger_for_step(1)  # never twice for one step
    assert timer.should_trigger_for_step(2)
    assert timer.update_last_triggered_step(2) == (5.0, 1)
    now[0] = 5.9
    assert not timer.should_trigger_for_step(3)
    timer.reset()
    assert timer.should_trigger_for_step(3)


def test_timer_counts_steps() -> None:
    """A timer in steps triggers at every so many steps, and takes exactly one period."""
    timer = SecondOrStepTimer(every_steps=3)
    due = []
    for step in range(8):
        if timer.should_trigger_for_step(step):
            timer.update_last_triggered_step(step)
            due.append(step)
    assert due == [0, 3, 6]
    for bad in ({}, {"every_secs": 1.0, "every_steps": 1}):
        with pytest.raises(ValueError, match="exactly one"):
            SecondOrStepTimer(**bad)  # type: ignore[arg-type]
