"""What is not logged: warnings about runs that are as they should be."""

import threading

import numpy as np
import pytest

import harness
import runtime as rt
from harness.tf1.inputs import queue_runner as tf1_queues

pytestmark = pytest.mark.usefixtures("graph")


def test_stopped_runners_report_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Queue runners that wait at the stop log no error."""
    queue = rt.FIFOQueue(2, [np.int32], shapes=[()])
    ops = [queue.enqueue(rt.constant(np.int32(1))) for _ in range(4)]
    runner = tf1_queues.QueueRunner(queue, ops)
    coord = harness.Coordinator()
    size = queue.size()
    with rt.Session("") as sess:
        threads = runner.create_threads(sess, coord, daemon=True, start=True)
        while sess.run(size) < 2:
            threading.Event().wait(0.01)
        coord.request_stop()
        coord.join(threads, stop_grace_period_secs=30)
    assert "not raised" not in caplog.text and "CancelledError" not in caplog.text


def test_cancelled_runner_is_an_error() -> None:
    """A queue runner that is cancelled without a stop is an error."""
    queue = rt.FIFOQueue(1, [np.int32], shapes=[()])
    runner = tf1_queues.QueueRunner(queue, [queue.enqueue(rt.constant(np.int32(1)))])
    cancel = queue.close(cancel_pending_enqueues=True)
    coord = harness.Coordinator()
    with rt.Session("") as sess:
        threads = runner.create_threads(sess, coord, daemon=True, start=True)
        sess.run(cancel)
        with pytest.raises(rt.CancelledError):
            coord.join(threads, stop_grace_period_secs=30)
