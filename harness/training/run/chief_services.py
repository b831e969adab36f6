"""ChiefServices: the threads of a chief's Supervisor beside training, the last work of each, and the writer of events.

``Supervisor`` starts the threads with a session, and calls ``write_final`` when training has ended.
"""

from collections.abc import Callable, Sequence

from absl import logging

import runtime as rt
from harness import timeouts
from harness.coordinator import Coordinator
from harness.monitoring.cluster_scalars import SeriesThread, SeriesWriter
from harness.training.run import services
from harness.training.run.supervisor_parts import SupervisorParts
from harness.training.start.managed_session import ManagedSession
from runtime import concurrency
from runtime.concurrency import Thread


class ChiefServices:
    """The services of a Supervisor.

    Args:
        coord: Coordinator that stops the threads.
        parts: Parts of the Supervisor.
        save_path: First part of the checkpoints' paths; None where none are written.
        leads: Function that returns True while this chief leads.
    """

    def __init__(
        self,
        coord: Coordinator,
        parts: SupervisorParts,
        save_path: str | None,
        leads: Callable[[], bool],
    ) -> None:
        self._coord = coord
        self._parts = parts
        self._writer = parts.summary_writer
        self._save_path = save_path
        self._leads = leads
        self._writer_closed = False
        self._graph_written = False
        self._threads: Sequence[Thread] = ()
        self._summaries: services.TimedSummaries | None = None
        self.checkpoints: services.SeriesCheckpoints | None = None
        """The checkpoints; None before ``start``, and where none are written."""
        self.save: Callable[[], object] | None = None
        """Function that saves at once; None before ``start``, and where nothing is saved."""

    def reopen_writer(self) -> None:
        """Begins to write again, after the end of an earlier session."""
        # The threads of an earlier session have ended with it.
        self._threads = ()
        if self._writer is not None and self._writer_closed:
            self._writer.reopen()
            self._writer_closed = False

    def write_graph(self) -> None:
        """Writes the graph into the events, once."""
        if self._writer is not None and not self._graph_written:
            self._writer.add_graph(self._parts.graph)
            self._graph_written = True

    def start(self, session: ManagedSession, save_secs: float, summary_secs: float) -> list[Thread]:
        """Starts the threads for checkpoints, summaries and step rates; returns the threads.

        Args:
            session: Session in which the threads run.
            save_secs: Seconds between checkpoints; 0 for saves on request only.
            summary_secs: Seconds between summaries; 0 for none.
        """
        parts, step = self._parts, self._parts.global_step
        if self._writer is not None and step is not None:
            self._writer.add_session_log("START", int(session.run(step)))
        threads = self._make_summary_threads(session, summary_secs)
        if parts.saver is not None and self._save_path is not None:
            self.checkpoints = services.SeriesCheckpoints(
                parts.saver, self._save_path, step, self._writer, self._leads
            )
            saves = services.CheckpointThread(self._coord, save_secs, session, self.checkpoints)
            self.save = saves.save
            # Without a period the thread never runs. Its ``save`` still saves for a ps that is
            # about to leave.
            if save_secs:
                threads.append(saves)
        for thread in threads:
            thread.start()
        self._threads = threads
        return threads

    def _make_summary_threads(self, session: ManagedSession, secs: float) -> list[Thread]:
        writer, step = self._writer, self._parts.global_step
        threads: list[Thread] = []
        # A program that writes summaries itself turns these off.
        if not secs or writer is None:
            return threads
        if self._parts.summary_op is not None:
            self._summaries = services.TimedSummaries(self._parts.summary_op, step, writer)
            threads.append(
                services.service(
                    self._coord, "write-summaries", secs, session, self._summaries.write
                )
            )
        if step is not None:
            counter = services.StepCounter(step.op.name, writer)
            threads.append(
                services.service(
                    self._coord,
                    "count-steps",
                    secs,
                    session,
                    lambda session: counter.count(int(session.run(step)), concurrency.monotonic()),
                )
            )
            # The series of a cluster need a cluster, and a writer that knows TensorBoard's layouts.
            if session.target and isinstance(writer, SeriesWriter):
                threads.append(SeriesThread(self._coord, secs, session, step, writer))
        return threads

    def join(self) -> None:
        """Waits for the threads, for a save without a limit.

        After a failure no thread is waited for here; ``Coordinator.join`` gives all threads the
        grace period.
        """
        for thread in self._threads:
            while (
                thread.is_alive()
                and thread is not concurrency.current_thread()
                and not self._coord.failed
            ):
                saves = isinstance(thread, services.CheckpointThread)
                thread.join(timeouts.LOG_EVERY_SECS)
                if thread.is_alive():
                    logging.warning("stopping: waiting for thread %s", thread.name)
                # The other services have little to finish: the coordinator gives them the grace
                # period.
                if not saves:
                    break

    def write_final(self, session: rt.SessionLike) -> None:
        """Writes the last checkpoint, then the last summaries."""
        # The checkpoint comes first: a summary that fails costs less than the last steps.
        if self.checkpoints is not None:
            self.checkpoints.save(session)
        if self._summaries is not None:
            self._summaries.write(session)
        if self._writer is not None and not self._writer_closed:
            self._writer.flush()

    def close_writer(self) -> None:
        """Ends the events with a mark, once for each session."""
        if self._writer is not None and not self._writer_closed:
            self._writer.add_session_log("STOP")
            self._writer.close()
            self._writer_closed = True
