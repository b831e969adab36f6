"""Bounded staleness: no worker runs ahead of the slowest by more than a given number of steps."""

from dataclasses import dataclass

from absl import logging

from runtime import concurrency, timeouts
from runtime.errors import CancelledError
from runtime.state.cancellation import Cancellation
from runtime.state.store import Resource


@dataclass
class _WorkerSteps:
    steps: int
    client: int


class StalenessBound(Resource):
    """The step counts of the workers. A worker too far ahead waits. Thread safe.

    A worker takes part from the first step until the end of the session. The first count is the
    count of the slowest worker. The bound is that of stale synchronous parallel training (Ho et
    al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
    2013).

    Args:
        name: for messages.
        bound: steps that a worker may be ahead of the slowest.

    Examples:
        >>> bound = StalenessBound("train", 2)
        >>> [bound.tick(worker, client, Cancellation()) for worker, client in [(0, 10), (1, 11), (1, 11)]]
        [0, 1, 2]
    """

    def __init__(self, name: str, bound: int) -> None:
        self._name = name
        self._bound = bound
        self._changed = concurrency.Condition()
        self._workers: dict[int, _WorkerSteps] = {}
        self._cleared = False
        self._finished = False

    def tick(self, worker: int, client: int, cancelled: Cancellation) -> int:
        """Counts a step of a worker, and waits while the worker is too far ahead of the slowest.

        Args:
            worker: number of the worker.
            client: session of the worker.
            cancelled: ends the wait; the step stays counted.

        Returns:
            Steps that the worker is ahead of the slowest now.
        """
        with self._changed:
            entry = self._workers.get(worker)
            if entry is None or entry.client != client:
                # The worker is new, or was started again: both begin at the count of the slowest.
                others = [c.steps for w, c in self._workers.items() if w != worker]
                entry = self._workers[worker] = _WorkerSteps(min(others, default=0), client)
            # The update is applied already. So the step counts before the wait, and a call that
            # ends early repeats no step.
            entry.steps += 1
            self._changed.notify_all()
            log_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS
            while not cancelled.wait_for(
                self._changed,
                lambda: self._cleared or self._finished or self._steps_ahead(entry) <= self._bound,
                f"waiting for slower workers in {self._name}",
                log_at,
            ):
                log_at = concurrency.monotonic() + timeouts.LOG_EVERY_SECS
                slowest = min(self._workers, key=lambda w: self._workers[w].steps)
                logging.warning(
                    "%s: worker %d is %d steps ahead and waits for worker %d (max_staleness=%d)",
                    self._name,
                    worker,
                    self._steps_ahead(entry),
                    slowest,
                    self._bound,
                )
            # The end of a run ends the wait without an error, as slower workers may not come again.
            if self._cleared:
                raise CancelledError(f"{self._name} was cleared away")
            return self._steps_ahead(entry)

    def end_client(self, client: int) -> None:
        """Stops waiting for the worker of a session that has ended."""
        with self._changed:
            # A worker that was started again has another session, and stays.
            self._workers = {w: c for w, c in self._workers.items() if c.client != client}
            self._changed.notify_all()

    def retire(self, client: int, index: int) -> None:
        """Stops waiting for the worker of a session that trains no more, until the next step of the worker."""
        self.end_client(client)

    def set_finished(self, finished: bool) -> None:
        """Notes the end of training, after which no worker waits, or the next beginning."""
        with self._changed:
            self._finished = finished
            self._changed.notify_all()

    def clear(self) -> None:
        """Ends all waits: the container was cleared."""
        with self._changed:
            self._cleared = True
            self._changed.notify_all()

    def _steps_ahead(self, entry: _WorkerSteps) -> int:
        return entry.steps - min((c.steps for c in self._workers.values()), default=entry.steps)
