"""What is not logged: warnings about runs that are as they should be."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import harness
import runtime as rt


@pytest.fixture(autouse=True)
def graph() -> Iterator[rt.Graph]:
    with rt.Graph().as_default() as made:
        yield made


def test_steps_that_only_evaluate_need_not_move_the_global_step(caplog: pytest.LogCaptureFixture) -> None:
    harness.get_or_create_global_step()
    v = rt.Variable(2.0, name="v")
    doubled = v * 2.0
    with harness.MonitoredSession(hooks=[harness.StepCounterHook()]) as sess:
        for _ in range(10):
            assert sess.run({"value": [v, doubled], "again": doubled.op}) is not None
        sess.run_step_fn(lambda step_context: step_context.run_with_hooks("v/read:0"))
    assert "did not move" not in caplog.text


@pytest.mark.parametrize("through", ["fetched", "control", "input"])
def test_steps_that_train_beside_the_global_step_are_told_of(caplog: pytest.LogCaptureFixture, through: str) -> None:
    harness.get_or_create_global_step()
    v = rt.Variable(2.0, name="v")
    train = v.assign_add(1.0)
    if through == "fetched":
        fetch = train
    elif through == "input":
        fetch = train * 2.0
    else:
        with rt.control_dependencies([train]):
            fetch = rt.no_op()
    with harness.MonitoredSession(hooks=[harness.StepCounterHook()]) as sess:
        for _ in range(10):
            sess.run([fetch])
    assert caplog.text.count("did not move") == 5


def test_runner_threads_that_wait_at_the_stop_report_nothing(caplog: pytest.LogCaptureFixture) -> None:
    queue = rt.FIFOQueue(2, [np.int32], shapes=[()])
    ops = [queue.enqueue(rt.constant(np.int32(1))) for _ in range(4)]
    runner = harness.QueueRunner(queue, ops)
    coord = harness.Coordinator()
    size = queue.size()
    with rt.Session("") as sess:
        threads = runner.create_threads(sess, coord, daemon=True, start=True)
        while sess.run(size) < 2:
            threading.Event().wait(0.01)
        coord.request_stop()
        coord.join(threads, stop_grace_period_secs=30)
    assert "not raised" not in caplog.text and "CancelledError" not in caplog.text


def test_a_cancelled_runner_without_a_stop_is_an_error() -> None:
    queue = rt.FIFOQueue(1, [np.int32], shapes=[()])
    runner = harness.QueueRunner(queue, [queue.enqueue(rt.constant(np.int32(1)))])
    cancel = queue.close(cancel_pending_enqueues=True)
    coord = harness.Coordinator()
    with rt.Session("") as sess:
        threads = runner.create_threads(sess, coord, daemon=True, start=True)
        sess.run(cancel)
        with pytest.raises(rt.CancelledError):
            coord.join(threads, stop_grace_period_secs=30)
