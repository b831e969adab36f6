"""QueueRunner: threads that fill a queue beside training, and close the queue at the end of the input."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, create_threads, underlying
from harness.training.run.monitored_session import MonitoredSession
from harness.training.start.managed_session import ManagedSession
from runtime import concurrency


class ClosableQueue(Protocol):
    """A queue of a queue runner: a queue of the runtime, or any object with the same ``close``."""

    @property
    def name(self) -> str:
        """The name of the queue."""
        ...

    def close(self, cancel_pending_enqueues: bool = False) -> rt.Operation:
        """Returns an operation that closes the queue."""
        ...


class QueueRunner:
    """Threads that run enqueue operations, one each, until the queue is closed or the coordinator stops.

    Args:
        queue: The queue that the operations fill.
        enqueue_ops: Operations that add to the queue.
        close_op: Operation that closes the queue when all threads have ended; pending enqueues
            still happen. Made by default.
        cancel_op: Operation that closes the queue at a stop; pending enqueues are cancelled. Made
            by default.
        queue_closed_exception_types: Errors that mean the end of the input or a closed queue.
        rounds: Number of runs of each operation at most; then the input has ended. Without limit by
            default.

    Raises:
        ValueError: There is no queue, or there are no enqueue operations.
        TypeError: ``queue_closed_exception_types`` is not a non-empty tuple of error types of the
            runtime.

    Examples:
        >>> import runtime as rt
        >>> from harness.tf1.inputs.queue_runner import QueueRunner
        >>> with rt.Graph().as_default():
        ...     queue = rt.FIFOQueue(10, ["float32"])
        ...     runner = QueueRunner(queue, [queue.enqueue([1.0])])
        >>> len(runner.enqueue_ops)
        1
    """

    def __init__(
        self,
        queue: ClosableQueue | None = None,
        enqueue_ops: Sequence[rt.Operation] | None = None,
        close_op: rt.Operation | None = None,
        cancel_op: rt.Operation | None = None,
        queue_closed_exception_types: tuple[type[BaseException], ...] | None = None,
        *,
        rounds: int | None = None,
    ) -> None:
        if queue is None or not enqueue_ops:
            raise ValueError("a QueueRunner needs a queue and enqueue_ops")
        types = (
            (rt.OutOfRangeError,)
            if queue_closed_exception_types is None
            else queue_closed_exception_types
        )
        if (
            not isinstance(types, tuple)
            or not types
            or not all(issubclass(t, rt.OpError) for t in types)
        ):
            raise TypeError(
                "queue_closed_exception_types, when provided, must be a non-empty tuple of error "
                "types"
            )
        self._queue = queue
        self._enqueue_ops = list(enqueue_ops)
        self._close_op = queue.close() if close_op is None else close_op
        self._cancel_op = (
            queue.close(cancel_pending_enqueues=True) if cancel_op is None else cancel_op
        )
        self._closed_types = types
        self._rounds = rounds
        self._lock = concurrency.Lock()
        self._running: dict[rt.SessionLike, int] = {}
        # Sessions in which all rounds were added: a second call must not add them again.
        self._through: weakref.WeakSet[rt.SessionLike] = weakref.WeakSet()
        self._raised: list[BaseException] = []

    @property
    def name(self) -> str:
        """The name of the queue."""
        return str(self._queue.name)

    @property
    def queue(self) -> ClosableQueue:
        """The queue."""
        return self._queue

    @property
    def enqueue_ops(self) -> list[rt.Operation]:
        """The operations that add to the queue."""
        return self._enqueue_ops

    @property
    def exceptions_raised(self) -> list[BaseException]:
        """The errors of threads that had no coordinator."""
        return self._raised

    def create_threads(
        self,
        sess: rt.SessionLike,
        coord: Coordinator | None = None,
        daemon: bool = False,
        start: bool = False,
    ) -> list[concurrency.Thread]:
        """Makes a thread for each enqueue operation, and a thread that cancels at a stop.

        Args:
            sess: Session of the threads.
            coord: Coordinator that receives the errors of the threads and stops the threads.
            daemon: True for threads that may be left behind when the process ends.
            start: True to start the threads.

        Returns:
            The threads; none while threads of an earlier call for this session run, or have added
            all rounds.
        """
        with self._lock:
            if self._running.get(sess, 0) > 0 or sess in self._through:
                return []
            self._running[sess] = len(self._enqueue_ops)
            self._raised = []
        calls = {
            f"queue-{self.name}-{i}": functools.partial(self._run, sess, op, coord)
            for i, op in enumerate(self._enqueue_ops)
        }
        if coord is not None:
            calls[f"queue-{self.name}-cancel"] = functools.partial(
                self._cancel_on_stop, sess, coord
            )
        return create_threads(calls, f"queue {self.name}", coord, daemon=daemon, start=start)

    def _run(
        self, sess: rt.SessionLike, enqueue_op: rt.Operation, coord: Coordinator | None
    ) -> None:
        through = False
        try:
            for _ in itertools.count() if self._rounds is None else range(self._rounds):
                if coord is not None and coord.should_stop():
                    return
                try:
                    sess.run(enqueue_op)
                except self._closed_types:
                    break
            through = True
        except Exception as error:
            if coord is not None and coord.should_stop() and isinstance(error, rt.CancelledError):
                # The thread waited for room when the stop closed the queue.
                return
            if coord is not None:
                coord.request_stop(error)
                return
            logging.error("error in QueueRunner %s: %s", self.name, error)
            with self._lock:
                self._raised.append(error)
            raise
        finally:
            with self._lock:
                self._running[sess] -= 1
                last = self._running[sess] == 0
                if last:
                    del self._running[sess]
                    if through and self._rounds is not None:
                        self._through.add(sess)
            # The last thread closes, outside the lock: the queue's task may be slow to answer.
            if through and last:
                self._close(sess, self._close_op)

    def _cancel_on_stop(self, sess: rt.SessionLike, coord: Coordinator) -> None:
        coord.wait_for_stop()
        # In the session underneath: a managed one runs nothing more after the stop of a failure.
        self._close(underlying(sess), self._cancel_op)

    def _close(self, sess: rt.SessionLike, op: rt.Operation) -> None:
        try:
            sess.run(op)
        except (rt.OpError, RuntimeError) as error:
            # The session or the task is gone, and the queue with it.
            logging.info("closing the queue %s: %s", self.name, error)


def add_queue_runner(qr: QueueRunner, collection: str = rt.GraphKeys.QUEUE_RUNNERS) -> None:
    """Adds a queue runner to a collection of the default graph."""
    rt.get_default_graph().add_to_collection(collection, qr)


def start_queue_runners(
    sess: rt.SessionLike | None = None,
    coord: Coordinator | None = None,
    daemon: bool = True,
    start: bool = True,
    collection: str = rt.GraphKeys.QUEUE_RUNNERS,
) -> list[concurrency.Thread]:
    """Starts all queue runners of a collection.

    Args:
        sess: Session of the threads; the default session when not given. A monitored session starts
            its own.
        coord: Coordinator that stops the threads.
        daemon: True for threads that may be left behind.
        start: True to start the threads.
        collection: Collection of the default graph.

    Returns:
        The threads.

    Raises:
        ValueError: No session was given and there is no default one.
        TypeError: ``sess`` is no session.
    """
    sess = rt.get_default_session() if sess is None else sess
    if sess is None:
        raise ValueError(
            "Cannot start queue runners: No default session is registered. Use `with "
            "sess.as_default()` or pass one."
        )
    if not isinstance(sess, rt.Session | ManagedSession):
        if isinstance(sess, MonitoredSession):
            return []
        raise TypeError(f"sess must be a `Session` object, not {type(sess).__name__}")
    runners = rt.get_default_graph().get_collection(collection)
    if not runners:
        logging.warning(
            "start_queue_runners() found no queue runners in the collection %r", collection
        )
    return [
        thread
        for runner in runners
        for thread in runner.create_threads(sess, coord=coord, daemon=daemon, start=start)
    ]
