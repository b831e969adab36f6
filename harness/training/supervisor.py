"""Supervisor: opens a session that is ready, recovers it, saves and summarises beside training, and ends the run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Thread
from typing import Any, Final, Literal

from absl import logging

import runtime as rt
from harness.coordinator import LONGEST_SECS, STOP_GRACE_SECS, Coordinator, ExcInfo, LooperThread, failed
from harness.monitoring.cluster_scalars import SeriesThread, SeriesWriter
from harness.training import readiness, services, supervisor_parts
from harness.training.global_step import GlobalStep
from harness.training.lifecycle import Lifecycle, RunPhase
from harness.training.managed_session import ManagedSession
from harness.training.policy import Role
from harness.training.queue_runner import QueueRunner
from harness.training.readiness import CheckpointSaver, Element, Feeds
from harness.training.session_manager import GIVE_UP_SECS, SessionManager

_LOG_SECS = 10.0
_OF_THE_STOP = (rt.CancelledError, rt.OutOfRangeError)
"""Errors that a stop, or the end of the input, causes in steps that are under way."""


class Supervisor:
    """A training helper that checkpoints models and computes summaries, and recovers what dies.

        sv = Supervisor(is_chief=True, logdir="/tmp/run", global_step=global_step)
        with sv.managed_session(server.target) as sess:
            while not sv.should_stop():
                sess.run(train_op)

    The chief (one task of the cluster) keeps the model that it finds alive on the ps tasks, else restores the newest
    checkpoint, else initialises; the others wait for that. ``USE_DEFAULT`` picks what is described here, None turns a
    thing off. The graph is finalized: operations must be made before.

    Args:
        graph: the graph; the default graph when not given.
        ready_op: string tensor with the names of what is not ready. Default: the uninitialised variables.
        ready_for_local_init_op: the same for what ``local_init_op`` needs. Default: nothing is checked.
        is_chief: whether this task is the one that initialises, saves and summarises.
        init_op: gives all variables values. Default: every global variable its initial value.
        init_feed_dict: feeds of ``init_op``.
        local_init_op: run in every new session of every task. Default: initialises the local variables.
        logdir: directory of checkpoints and events; None or "" for neither. Only the chief writes there.
        summary_op: string tensor of a serialized summary, run by a timer. Default: all summaries merged.
        saver: saves and restores: any object with ``save(sess, path, global_step=)`` and ``restore(sess, path)``.
            Default: a ``Saver`` of all variables.
        global_step: variable that counts the steps. Default: the graph's global step.
        save_summaries_secs: seconds between summaries and step rates; 0 for none. Here and below ``math.inf`` is a
            period like any other: once at the start, and never again.
        save_model_secs: seconds between checkpoints; 0 for none but a last one at a clean end, and
            those for a ps that is told to go.
        recovery_wait_secs: seconds between looks at a ready operation of the user's own.
        stop_grace_secs: seconds that threads, steps and other tasks have to end after a stop.
        checkpoint_basename: first part of the checkpoints' names.
        session_manager: opens sessions instead of the Supervisor's own manager.
        summary_writer: writes events. Default: a ``FileWriter`` into ``logdir``.
        init_fn: called with the session after ``init_op``.

    Raises:
        ValueError: a number of seconds is negative.
    """

    USE_DEFAULT: Final = supervisor_parts.USE_DEFAULT
    """Stands for "the default"; compared by identity, as None means "off"."""

    @rt.lowlevel.explains_arguments
    def __init__(
        self,
        graph: rt.Graph | None = None,
        ready_op: Element | Literal[0] | None = USE_DEFAULT,
        ready_for_local_init_op: Element | Literal[0] | None = USE_DEFAULT,
        is_chief: bool = True,
        init_op: Element | Literal[0] | None = USE_DEFAULT,
        init_feed_dict: Feeds | None = None,
        local_init_op: Element | Literal[0] | None = USE_DEFAULT,
        logdir: str | os.PathLike[str] | None = None,
        summary_op: Element | Literal[0] | None = USE_DEFAULT,
        saver: CheckpointSaver | Literal[0] | None = USE_DEFAULT,
        global_step: GlobalStep | Literal[0] | None = USE_DEFAULT,
        save_summaries_secs: float = 120,
        save_model_secs: float = 600,
        recovery_wait_secs: float = 30,
        stop_grace_secs: float = STOP_GRACE_SECS,
        checkpoint_basename: str = "model.ckpt",
        session_manager: SessionManager | None = None,
        summary_writer: services.EventWriter | Literal[0] | None = USE_DEFAULT,
        init_fn: Callable[[rt.Session], object] | None = None,
    ) -> None:
        parts = supervisor_parts.assemble(locals())
        self._graph = parts.graph
        self.is_chief = is_chief
        """True on the chief."""
        self._stop_grace_secs = min(stop_grace_secs, LONGEST_SECS)
        self.coord = Coordinator()
        """The coordinator that stops the threads."""
        self._life = Lifecycle(self.coord, is_chief, self._stop_grace_secs)
        self._logdir = parts.logdir
        self.ready_op = parts.ready_op
        """String tensor with the names of what is not ready."""
        self.ready_for_local_init_op = parts.ready_for_local_init_op
        """The same for what ``local_init_op`` needs."""
        self.init_op = parts.init_op
        """The operation that gives the variables their first values."""
        self.global_step = parts.global_step
        """The global step."""
        self.summary_op = parts.summary_op
        """The operation that the summary timer runs."""
        self.saver = parts.saver
        """The saver; None on tasks that are not the chief."""
        self.session_manager = session_manager or parts.session_manager(recovery_wait_secs, self._life.grace_period)
        """The manager that opens sessions."""
        if isinstance(self.session_manager, SessionManager):
            self.session_manager.stop_with(self._life.grace_period)
            self.session_manager.series = checkpoint_basename
        self.init_feed_dict = init_feed_dict
        """Feeds of ``init_op``."""
        self._init_fn = init_fn
        self.save_model_secs = save_model_secs if is_chief else None
        """Seconds between checkpoints; None on tasks that are not the chief."""
        self.save_summaries_secs = save_summaries_secs if is_chief else None
        """Seconds between summaries; None on tasks that are not the chief."""
        self.save_path = os.path.join(parts.logdir, checkpoint_basename) if is_chief and parts.logdir else None
        """First part of the checkpoints' paths; None where none are written."""
        self.summary_writer = parts.summary_writer
        """The writer of events: a ``FileWriter``, or the user's own; None on tasks that are not the chief."""
        self._writer_closed = False
        self._graph_written = False
        self._checkpoints: services.Checkpoints | None = None
        self._summaries: services.Summaries | None = None
        self._services: Sequence[Thread] = ()
        self._graph.finalize()

    # -- a session ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def managed_session(
        self,
        master: str = "",
        config: rt.SessionConfig | None = None,
        start_standard_services: bool = True,
        close_summary_writer: bool = True,
        *,
        recover: bool = True,
        max_wait_secs: float = GIVE_UP_SECS,
    ) -> Iterator[ManagedSession]:
        """A session that is ready, for the length of a ``with`` block.

        At the end of the block threads are stopped, and if it ended without an error (the end of the input,
        OutOfRangeError, is none) the chief waits for the others, saves a last checkpoint and tells everybody that
        training is over. An error of the block or of a service thread is raised.

        Args:
            master: session target.
            config: session options; without device filters absent tasks that are not needed block nobody
                (``("/job:*",)`` asks for all).
            start_standard_services: whether the chief's checkpoint, summary and step-rate threads are started, and the
                queue runners.
            close_summary_writer: whether the writer is closed at the end.
            recover: open a new session when a task is lost, and run the step again. False: the error comes out.
            max_wait_secs: how long to wait for the model at the start, and in each recovery.
        """
        over, after_the_stop = True, None
        try:
            session = self.prepare_or_wait_for_session(
                master,
                config,
                max_wait_secs=max_wait_secs,
                start_standard_services=start_standard_services,
                recover=recover,
            )
            session.on_exit = None  # this block ends it
            yield session
        except Exception as error:
            if self.coord.should_stop() and not failed(self.coord) and not isinstance(error, _OF_THE_STOP):
                logging.error("error of the block after the stop, raised when training has ended: %r", error)
                after_the_stop = error
            else:
                self.coord.request_stop(error)
        except BaseException:  # Ctrl-C and the like: save, but training is not over
            over = False
            raise
        finally:
            try:
                self._end(over=over, close_summary_writer=close_summary_writer)
            finally:
                self._life.close()
        if after_the_stop is not None:
            raise after_the_stop

    def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: rt.SessionConfig | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float = GIVE_UP_SECS,
        start_standard_services: bool = True,
        *,
        recover: bool = True,
    ) -> ManagedSession:
        """Opens a session that is ready: as the chief makes it so, as another task waits for the chief.

        Where the session is used in a ``with`` block, training ends with the block as in ``stop``, but threads of the
        program's own need not have ended; the summary writer stays open. An error that leaves the block ends nothing:
        nobody is told that training is over.

        Args:
            master: session target.
            config: session options.
            wait_for_checkpoint: a chief without a checkpoint waits for one before it initialises.
            max_wait_secs: how long to wait.
            start_standard_services: whether services and queue runners are started.
            recover: as in ``managed_session``.

        Raises:
            RuntimeError: nothing can make the model ready.
            DeadlineExceededError: it was not ready in time; says what or who was missing.
        """
        self.coord.clear_stop()
        writer = self.summary_writer
        if writer is not None and self._writer_closed:
            writer.reopen()
            self._writer_closed = False
        manager = self.session_manager
        role = Role.CHIEF if self.is_chief else Role.OTHER
        if recover:  # a silent task is waited for: its step is neither lost nor doubled when it answers again
            config = readiness.with_start_timeout(config, max_wait_secs)
        own = isinstance(manager, SessionManager)

        recovering_config = readiness.for_recovery(config)

        def open_ready(recovering: bool) -> rt.Session:
            chosen = recovering_config if recovering else config
            if not self.is_chief:
                return manager.wait_for_session(master, config=chosen, max_wait_secs=max_wait_secs)
            extra: dict[str, Any] = {"recovering": recovering} if own else {}
            return manager.prepare_session(
                master,
                self.init_op,
                saver=self.saver,
                checkpoint_dir=self._logdir,
                wait_for_checkpoint=wait_for_checkpoint,
                max_wait_secs=max_wait_secs,
                config=chosen,
                init_feed_dict=self.init_feed_dict,
                init_fn=self._init_fn,
                **extra,
            )

        session = self._life.open(
            open_ready,
            lambda: rt.Session(master, self._graph, readiness.filtered(config, self._graph, max_wait_secs)),
            self._graph,
            records=manager.records(master, config, role) if own else None,
            recover=recover,
            global_step=self.global_step,
            probe=manager.probe if own else None,
            give_up_secs=max_wait_secs,
        )
        session.on_exit = self._leave_block
        self._services = []
        try:
            if writer is not None and not self._graph_written:
                writer.add_graph(self._graph)
                self._graph_written = True
                if self._logdir is not None:
                    readiness.write_graph_text(self._graph, self._logdir)
            if start_standard_services and not self._life.late:
                if self.is_chief and self._logdir is not None:
                    self.start_standard_services(session)
                self.start_queue_runners(session)
        except BaseException as error:  # nobody gets this session, so nobody will close it
            self.coord.request_stop(error if isinstance(error, Exception) else None)
            self._life.abandon()
            self._life.close()
            raise
        return session

    # -- services ----------------------------------------------------------------------------------------------

    def start_standard_services(self, sess: ManagedSession) -> list[Thread] | None:
        """Starts the threads that save checkpoints, write summaries and count steps.

        Returns:
            The threads, or None without a ``logdir``.

        Raises:
            RuntimeError: this is not the chief.
        """
        if not self.is_chief:
            raise RuntimeError("Only chief supervisor can start standard services, because only the chief writes")
        if self._logdir is None:
            logging.warning("Standard services need a 'logdir' passed to the Supervisor")
            return None
        writer = self.summary_writer
        if writer is not None and self.global_step is not None:
            writer.add_session_log("START", int(sess.run(self.global_step)))
        threads: list[Thread] = []
        if self.save_summaries_secs and writer is not None:
            if self.summary_op is not None:
                self._summaries = services.Summaries(self.summary_op, self.global_step, writer)
                write = self._summaries.write
                threads.append(services.service(self.coord, "write-summaries", self.save_summaries_secs, sess, write))
            if self.global_step is not None:
                count = services.StepCounter(self.global_step.op.name, writer).count_in(self.global_step)
                threads.append(services.service(self.coord, "count-steps", self.save_summaries_secs, sess, count))
                if sess.target and isinstance(writer, SeriesWriter):
                    threads.append(SeriesThread(self.coord, self.save_summaries_secs, sess, self.global_step, writer))
        if self.saver is not None and self.save_path is not None:
            self._checkpoints = services.Checkpoints(
                self.saver, self.save_path, self.global_step, writer, self._life.leads
            )
            saves = services.CheckpointThread(self.coord, self.save_model_secs or 0, sess, self._checkpoints)
            self._life.save = saves.save
            if self.save_model_secs:
                threads.append(saves)
        for thread in threads:
            thread.start()
        self._services = threads
        return threads

    def start_queue_runners(self, sess: rt.Session, queue_runners: Sequence[QueueRunner] | None = None) -> list[Thread]:
        """Starts the threads that fill queues.

        Args:
            sess: the session that they run in.
            queue_runners: the graph's collection QUEUE_RUNNERS when not given.
        """
        if queue_runners is None:
            queue_runners = self._graph.get_collection(rt.GraphKeys.QUEUE_RUNNERS)
        threads: list[Thread] = []
        for runner in queue_runners:
            threads.extend(runner.create_threads(sess, coord=self.coord, daemon=True, start=True))
        return threads

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> LooperThread:
        """Starts a thread that calls ``target`` at once and then every interval, until a stop; its error stops all.

        Args:
            timer_interval_secs: seconds between calls; None for no pause.
            target: what is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        return LooperThread.loop(self.coord, timer_interval_secs, target, args, kwargs)

    def summary_computed(self, sess: rt.Session, summary: object, global_step: int | None = None) -> None:
        """Writes a summary that was computed in a training step.

        Args:
            sess: fetches the global step when it is not given.
            summary: what the summary operation gave.
            global_step: its step.

        Raises:
            RuntimeError: there is no summary writer.
        """
        if self.summary_writer is None:
            raise RuntimeError("Writing a summary requires a summary writer.")
        if global_step is None and self.global_step is not None:
            global_step = int(sess.run(self.global_step))
        self.summary_writer.add_summary(summary, global_step)

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(
        self,
        threads: Sequence[Thread] | None = None,
        close_summary_writer: bool = True,
        ignore_live_threads: bool = False,
    ) -> None:
        """Stops threads and services; at a clean end waits for the others, saves and tells them. Closes no session.

        What the end of the session's block, or an earlier ``stop``, has done already is not done again.

        Args:
            threads: threads to join beside the Supervisor's own.
            close_summary_writer: whether the writer is closed.
            ignore_live_threads: only log threads that outlive the grace period.

        Raises:
            BaseException: what a thread, or ``request_stop``, has reported.
            RuntimeError: threads are alive after the grace period; names them.
        """
        self._end(
            over=True,
            close_summary_writer=close_summary_writer,
            threads=threads,
            ignore_live_threads=ignore_live_threads,
        )

    def _end(
        self,
        *,
        over: bool,
        close_summary_writer: bool,
        threads: Sequence[Thread] | None = None,
        ignore_live_threads: bool = False,
    ) -> None:
        interruption: BaseException | None = None
        directory = None if self._checkpoints is None else self._logdir
        try:
            while True:
                try:
                    if interruption is None:
                        self._stop_and_join(threads, over=over, ignore_live_threads=ignore_live_threads)
                    self._life.finish(self._final, over=over, checkpoint_dir=directory)
                    break
                except (KeyboardInterrupt, SystemExit) as error:  # save, but training is not over
                    if self._life.phase is RunPhase.ENDED or failed(self.coord) or interruption is not None:
                        raise
                    interruption, over = error, False
                    self.coord.request_stop()
            if interruption is not None:
                raise interruption
        finally:
            self.coord.request_stop()
            if close_summary_writer and self.summary_writer is not None and not self._writer_closed:
                self.summary_writer.add_session_log("STOP")
                self.summary_writer.close()
                self._writer_closed = True

    def _stop_and_join(self, threads: Sequence[Thread] | None, *, over: bool, ignore_live_threads: bool) -> None:
        if over and not failed(self.coord):
            self._life.wait_for_others()  # with the services still at work
        self.coord.request_stop()
        self._life.limit_silence()
        self._join_services()
        self.coord.join(threads, self._stop_grace_secs, ignore_live_threads)

    def _leave_block(self, error: BaseException | None) -> None:
        """The block of a session from ``prepare_or_wait_for_session`` ends."""
        if error is None or isinstance(error, rt.OutOfRangeError):
            self._end(over=True, close_summary_writer=False, ignore_live_threads=True)
        elif not isinstance(error, Exception):
            self._end(over=False, close_summary_writer=False, ignore_live_threads=True)
        else:
            self._life.abandon()

    def _join_services(self) -> None:
        """Waits for the services: a save that is under way takes what it takes. After a failure, as for any thread."""
        for thread in self._services:
            while thread.is_alive() and thread is not threading.current_thread() and not failed(self.coord):
                saves = isinstance(thread, services.CheckpointThread)
                thread.join(_LOG_SECS)
                if thread.is_alive():
                    logging.warning("stopping: waiting for thread %s", thread.name)
                if not saves:
                    break

    def _final(self, session: rt.Session) -> None:
        """The last checkpoint and the last summaries, with what was done since the last timer; a summary may fail."""
        if self._checkpoints is not None:
            self._checkpoints.save(session)
        if self._summaries is not None:
            self._summaries.write(session)
        if self.summary_writer is not None and not self._writer_closed:
            self.summary_writer.flush()

    def request_stop(self, ex: BaseException | ExcInfo | None = None, *, everybody: bool = False) -> None:
        """Asks everything in this task to stop; see ``Coordinator.request_stop``.

        Args:
            ex: why, if it is an error; this task raises it at its end.
            everybody: order training to end: the other tasks that take part stop too, each after its step. Without an
                open session, or without other tasks, there is nobody else to stop.

        Raises:
            OpError: no ps could be told; this task stops all the same.
        """
        try:
            if everybody:
                self._life.stop_everybody(f"{type(ex).__name__}: {ex}" if isinstance(ex, Exception) else "")
        finally:
            self.coord.request_stop(ex)

    def should_stop(self) -> bool:
        """Whether training is to stop."""
        return self.coord.should_stop()

    def stop_on_exception(self) -> contextlib.AbstractContextManager[None]:
        """A context that turns an exception into a stop; ``stop`` raises it."""
        return self.coord.stop_on_exception()

    def wait_for_stop(self) -> None:
        """Waits until a stop is requested."""
        self.coord.wait_for_stop()

    # -- TF1's older names -------------------------------------------------------------------------------------

    PrepareSession = prepare_or_wait_for_session
    StartQueueRunners = start_queue_runners
    StartStandardServices = start_standard_services
    Stop = stop
    RequestStop = request_stop
    Loop = loop
    ShouldStop = should_stop
    StopOnException = stop_on_exception
    WaitForStop = wait_for_stop
    SummaryComputed = summary_computed
