"""Queue runners, with a queue made of variables: it holds as many elements as it has room for, then it is closed."""

import threading
from typing import Any

import numpy as np
import pytest

import harness
import runtime as rt
from harness.tf1.inputs import queue_runner as tf1_queues

pytestmark = pytest.mark.usefixtures("graph")


class FullQueue:
    """As much of a queue as a runner needs: enqueuing into it fails with OutOfRangeError once it is full."""

    name = "full"

    def __init__(self) -> None:
        self.count = rt.Variable(np.int32(0), name="count")
        self.closed = rt.Variable(np.int32(0), name="closed")
        self.cancelled = rt.Variable(np.int32(0), name="cancelled")
        self.enqueue = self.count.assign_add(np.int32(1))

    def close(self, cancel_pending_enqueues: bool = False) -> rt.Tensor:
        return (self.cancelled if cancel_pending_enqueues else self.closed).assign_add(np.int32(1))


class Room(rt.Session):
    """A session in which enqueuing ends after ten elements, as on a closed queue."""

    def __init__(self, queue: FullQueue, error: Exception) -> None:
        super().__init__("")
        self._queue = queue
        self._error = error
        super().run(rt.global_variables_initializer())

    def run(self, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        if fetches is self._queue.enqueue and super().run(self._queue.count) >= 10:
            raise self._error
        return super().run(fetches, *args, **kwargs)


def test_queue_runner_checks_its_arguments() -> None:
    """A queue runner refuses missing operations and wrong exception types."""
    queue = FullQueue()
    for given, ops in ((None, [queue.enqueue]), (queue, []), (queue, None)):
        with pytest.raises(ValueError, match="needs a queue and enqueue_ops"):
            tf1_queues.QueueRunner(given, ops)
    for types in ((), (ValueError,), rt.OutOfRangeError):
        with pytest.raises(TypeError, match="queue_closed_exception_types"):
            tf1_queues.QueueRunner(queue, [queue.enqueue], queue_closed_exception_types=types)  # type: ignore[arg-type]


def test_last_thread_closes_the_queue() -> None:
    """The last thread of a runner closes the queue."""
    queue = FullQueue()
    runner = tf1_queues.QueueRunner(queue, [queue.enqueue] * 2)
    with Room(queue, rt.OutOfRangeError("closed")) as sess:
        for thread in runner.create_threads(sess, start=True):
            thread.join(60)
        assert sess.run([queue.closed, queue.cancelled]) == [1, 0]
        assert runner.exceptions_raised == []


def test_stop_cancels_the_queue() -> None:
    """A stop cancels the queue's pending operations."""
    queue = FullQueue()
    runner = tf1_queues.QueueRunner(queue, [queue.enqueue])
    coord = harness.Coordinator()
    with Room(queue, rt.OutOfRangeError("closed")) as sess:
        threads = runner.create_threads(sess, coord=coord, start=True)
        assert len(threads) == 2
        coord.request_stop()
        coord.join(stop_grace_period_secs=10)
        assert sess.run(queue.cancelled) == 1


def test_error_reaches_the_coordinator() -> None:
    """An error of a runner reaches the coordinator."""
    queue = FullQueue()
    runner = tf1_queues.QueueRunner(queue, [queue.enqueue])
    coord = harness.Coordinator()
    with Room(queue, rt.DataLossError("bad file")) as sess:
        runner.create_threads(sess, coord=coord, start=True)
        assert coord.wait_for_stop(10)
        with pytest.raises(rt.DataLossError, match="bad file"):
            coord.join()


def test_running_threads_are_not_doubled() -> None:
    """A second call makes no threads while those of the first exist."""
    queue = FullQueue()
    runner = tf1_queues.QueueRunner(queue, [queue.enqueue])
    with Room(queue, rt.OutOfRangeError("closed")) as sess:
        threads = runner.create_threads(sess)
        assert runner.create_threads(sess) == []
        for thread in threads:
            thread.start()
            thread.join(60)
        assert len(runner.create_threads(sess, start=True)) == 1


def test_start_queue_runners_needs_session() -> None:
    """start_queue_runners starts the runners of the graph and needs a session."""
    with pytest.raises(ValueError, match="No default session"):
        tf1_queues.start_queue_runners()
    with pytest.raises(TypeError, match="must be a `Session`"):
        tf1_queues.start_queue_runners(object())  # type: ignore[arg-type]
    queue = FullQueue()
    tf1_queues.add_queue_runner(tf1_queues.QueueRunner(queue, [queue.enqueue]))
    with Room(queue, rt.OutOfRangeError("closed")) as sess:
        threads = tf1_queues.start_queue_runners(sess)
        threads[0].join(60)
        assert sess.run(queue.closed) == 1


def test_supervisor_starts_queue_runners() -> None:
    """A Supervisor starts the queue runners."""
    queue = FullQueue()
    tf1_queues.add_queue_runner(tf1_queues.QueueRunner(queue, [queue.enqueue]))
    sv = harness.Supervisor(saver=None)
    moved = threading.Event()
    with sv.managed_session() as sess:
        while not moved.is_set():
            if sess.run(queue.count) > 3:
                moved.set()
    assert sv.should_stop()
