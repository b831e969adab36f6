"""SupervisorEnd: the end of a Supervisor's training, whether its block, its session or a call of ``stop`` ends it."""

import contextlib
from collections.abc import Iterator, Sequence

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.run.chief_services import ChiefServices
from harness.training.stop.lifecycle import Lifecycle
from harness.training.stop.policy import RunPhase
from runtime.concurrency import Thread

_OF_THE_STOP = (rt.CancelledError, rt.OutOfRangeError)
"""Errors that a stop, or the end of the input, causes in steps that are under way."""


class SupervisorEnd:
    """The end of training of one Supervisor.

    Args:
        coord: Coordinator of the threads.
        life: The way of the task through the run.
        services: Services of the chief.
        logdir: The log directory; None for none.
    """

    def __init__(
        self, coord: Coordinator, life: Lifecycle, services: ChiefServices, logdir: str | None
    ) -> None:
        self._coord = coord
        self._life = life
        self._services = services
        self._logdir = logdir

    @contextlib.contextmanager
    def of_block(self, closes_writer: bool) -> Iterator[None]:
        """Ends training and closes the session with a block. The end raises the error of the block.

        Args:
            closes_writer: True to close the writer of events.
        """
        over, after_the_stop = True, None
        try:
            yield
        except Exception as error:
            if (
                self._coord.should_stop()
                and not self._coord.failed
                and not isinstance(error, _OF_THE_STOP)
            ):
                logging.error(
                    "error of the block after the stop, raised when training has ended: %r", error
                )
                after_the_stop = error
            else:
                self._coord.request_stop(error)
        except BaseException:
            # Ctrl-C and SIGTERM save, but training is not over: the same command continues later.
            over = False
            raise
        finally:
            try:
                self.run(over, closes_writer, ignores_threads=False)
            finally:
                self._life.close()
        if after_the_stop is not None:
            raise after_the_stop

    def run(
        self,
        over: bool,
        closes_writer: bool,
        threads: Sequence[Thread] | None = None,
        ignores_threads: bool = True,
    ) -> None:
        """Ends training: waits for the other tasks, stops the threads, saves and reports.

        Args:
            over: True when training is done; False when it was interrupted and continues later.
            closes_writer: True to close the writer of events.
            threads: Threads to join beside those of the coordinator.
            ignores_threads: True to only log threads that outlive the grace period.
        """
        interruption: BaseException | None = None
        directory = None if self._services.checkpoints is None else self._logdir
        try:
            while True:
                try:
                    if interruption is None:
                        self._stop_and_join(over, threads, ignores_threads)
                    self._life.finish(
                        self._services.write_final, over=over, checkpoint_dir=directory
                    )
                    break
                except (KeyboardInterrupt, SystemExit) as error:
                    # A first interruption of the end saves, but training is not over; a second one
                    # ends at once.
                    if (
                        self._life.phase is RunPhase.OVER
                        or self._coord.failed
                        or interruption is not None
                    ):
                        raise
                    interruption, over = error, False
                    self._coord.request_stop()
            if interruption is not None:
                raise interruption
        finally:
            # Also after an error of the end: threads of the program wait for this stop.
            self._coord.request_stop()
            if closes_writer:
                self._services.close_writer()

    def _stop_and_join(
        self, over: bool, threads: Sequence[Thread] | None, ignores_threads: bool
    ) -> None:
        if over and not self._coord.failed:
            # The services are still at work: a long wait for other workers has checkpoints, too.
            self._life.wait_for_others()
        self._coord.request_stop()
        self._life.limit_silence()
        self._services.join()
        self._coord.join(threads, self._life.grace_secs, ignores_threads)

    def leave_session(self, error: BaseException | None) -> None:
        """Ends training with the block of a session, where ``error`` is that of the block."""
        # The end of the input is no error.
        if isinstance(error, Exception) and not isinstance(error, rt.OutOfRangeError):
            self._life.abandon()
        else:
            # Ctrl-C and SIGTERM leave training open.
            is_over = error is None or isinstance(error, Exception)
            self.run(over=is_over, closes_writer=False)
