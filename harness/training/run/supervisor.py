"""Supervisor: the training helper of TF1, around one session that is ready, recovers and ends well.

A training program makes a ``Supervisor`` and trains in its session. ``supervisor_parts`` checks the
arguments, ``lifecycle`` brings the run from its session to its end, and ``services`` saves and
summarises beside training.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from absl import logging

import runtime as rt
from harness import timeouts
from harness.coordinator import Coordinator, ExcInfo, LooperThread
from harness.training import times
from harness.training.run import services, supervisor_parts
from harness.training.run.chief_services import ChiefServices
from harness.training.run.supervisor_end import SupervisorEnd
from harness.training.start import readiness
from harness.training.start.global_step import GlobalStep
from harness.training.start.managed_session import ManagedSession
from harness.training.start.policy import TaskRole
from harness.training.start.readiness import CheckpointSaver, Element, Feeds
from harness.training.start.session_manager import SessionManager
from harness.training.start.session_source import ManagerSource
from harness.training.stop.lifecycle import Lifecycle
from runtime.concurrency import Thread


class Supervisor:
    """A training helper that saves checkpoints, writes summaries and recovers lost tasks.

        sv = Supervisor(is_chief=True, logdir="/tmp/run", global_step=global_step)
        with sv.managed_session(server.target) as sess:
            while not sv.should_stop():
                sess.run(train_op)

    The chief is one task of the cluster. The chief keeps a model that is alive on the ps tasks,
    else restores the newest checkpoint, else initialises. The other tasks wait for the chief.
    ``USE_DEFAULT`` picks the default that is described below; None turns a part off. The Supervisor
    finalizes the graph: make operations before.

    Args:
        graph: Graph of the model. Default: the default graph.
        ready_op: String tensor with the names of what is not ready. Default: the uninitialised
            variables.
        ready_for_local_init_op: The same for what ``local_init_op`` needs. Default: nothing is
            checked.
        is_chief: True on the task that initialises, saves and summarises.
        init_op: Operation that gives all variables values. Default: every global variable its
            initial value.
        init_feed_dict: Feeds of ``init_op``.
        local_init_op: Operation of each new session of every task. Default: for local variables.
        logdir: Directory to which the chief writes checkpoints and events; None or "" for neither.
        summary_op: String tensor of a serialized summary, run by a timer. Default: all summaries
            merged.
        saver: Any object with ``save(sess, path, global_step=)`` and ``restore(sess, path)``.
            Default: a ``Saver`` of all variables.
        global_step: Variable that counts the steps. Default: the graph's global step.
        save_summaries_secs: Seconds between summaries and step rates; 0 for none. With ``math.inf``
            they are written once, at the start.
        save_model_secs: Seconds between checkpoints; ``math.inf`` for one at the start. With 0 the
            chief saves only at a clean end, and before a ps stops that was sent SIGTERM.
        recovery_wait_secs: Seconds between looks at a ready operation of the user's own.
        stop_grace_secs: Seconds that threads, steps and other tasks have to end after a stop.
        checkpoint_basename: First part of the checkpoints' names.
        session_manager: Manager that opens sessions instead of the Supervisor's own.
        summary_writer: Writer of events. Default: a ``FileWriter`` into ``logdir``.
        init_fn: Function that is called with the session after ``init_op``.

    Raises:
        TypeError: An argument is of another type, or an object lacks a method.
        ValueError: A number of seconds is negative, or an operation is not in the graph.
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
        stop_grace_secs: float = timeouts.STOP_GRACE_SECS,
        checkpoint_basename: str = "model.ckpt",
        session_manager: SessionManager | None = None,
        summary_writer: services.EventWriter | Literal[0] | None = USE_DEFAULT,
        init_fn: Callable[[rt.Session], object] | None = None,
    ) -> None:
        # This call comes first: here ``locals()`` holds the arguments, and below further names.
        parts = supervisor_parts.assemble_parts(locals())
        self._graph = parts.graph
        self.is_chief = is_chief
        """True on the chief."""
        self.coord = Coordinator()
        """The coordinator that stops the threads."""
        self._life = Lifecycle(self.coord, is_chief, min(stop_grace_secs, timeouts.LONGEST_SECS))
        self.logdir = parts.logdir
        """Absolute path of the log directory; None for none."""
        self.ready_op = parts.ready_op
        """String tensor with the names of what is not ready."""
        self.ready_for_local_init_op = parts.ready_for_local_init_op
        """The same for what ``local_init_op`` needs."""
        self.init_op = parts.init_op
        """The operation that gives the variables their first values."""
        self.session_manager = session_manager or parts.session_manager(recovery_wait_secs)
        """The manager that opens sessions."""
        if isinstance(self.session_manager, SessionManager):
            self.session_manager.grace_period = self._life.grace_period
            self.session_manager.series = checkpoint_basename
        self.init_feed_dict = init_feed_dict
        """Feeds of ``init_op``."""
        self.init_fn = init_fn
        """The function that is called with the session after ``init_op``."""
        self.save_model_secs = save_model_secs if is_chief else None
        """Seconds between checkpoints; None on tasks that are not the chief."""
        self.save_summaries_secs = save_summaries_secs if is_chief else None
        """Seconds between summaries; None on tasks that are not the chief."""
        self._parts = parts
        self._save_path = (
            os.path.join(parts.logdir, checkpoint_basename) if is_chief and parts.logdir else None
        )
        self._services = ChiefServices(self.coord, parts, self._save_path, self._life.leads)
        self._end = SupervisorEnd(self.coord, self._life, self._services, parts.logdir)
        # A training step that adds to the graph by mistake would be slower with each step.
        self._graph.finalize()

    # The services have these already, so they cannot be set, as in TF1.

    @property
    def global_step(self) -> GlobalStep | None:
        """The global step."""
        return self._parts.global_step

    @property
    def summary_op(self) -> Element | None:
        """The operation that the summary timer runs."""
        return self._parts.summary_op

    @property
    def saver(self) -> CheckpointSaver | None:
        """The saver; on tasks that are not the chief only one that was given, else None."""
        return self._parts.saver

    @property
    def save_path(self) -> str | None:
        """First part of the checkpoints' paths; None where none are written."""
        return self._save_path

    @property
    def summary_writer(self) -> Any:
        """The writer of events: a ``FileWriter``, or the user's own; None on tasks that are not the chief."""
        return self._parts.summary_writer

    @contextlib.contextmanager
    def managed_session(
        self,
        master: str = "",
        config: rt.SessionConfig | None = None,
        start_standard_services: bool = True,
        close_summary_writer: bool = True,
        *,
        recover: bool = True,
        max_wait_secs: float = times.GIVE_UP_SECS,
    ) -> Iterator[ManagedSession]:
        """Opens a session that is ready, for the length of a ``with`` block.

        The end of the block stops the threads. After a block without an error the chief waits for
        the other tasks, saves a last checkpoint and reports the end of training to every task. The
        end of the input, OutOfRangeError, is no error. An error of the block or of a service thread
        is raised.

        Args:
            master: Session target.
            config: Session options. Without device filters the session needs only the tasks that
                the graph uses; ``("/job:*",)`` asks for all.
            start_standard_services: True to start the chief's checkpoint, summary and step-rate
                threads, and the queue runners.
            close_summary_writer: True to close the writer at the end.
            recover: True to open a new session when a task is lost, and to run the step again.
                False raises the error.
            max_wait_secs: Seconds to wait for the model, at the start and in each recovery.
        """
        with self._end.of_block(close_summary_writer):
            session = self.prepare_or_wait_for_session(
                master,
                config,
                max_wait_secs=max_wait_secs,
                start_standard_services=start_standard_services,
                recover=recover,
            )
            # The end of this block ends training. With ``on_exit`` the end of an inner block
            # ``with session:`` would end training, too.
            session.on_exit = None
            yield session

    def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: rt.SessionConfig | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float = times.GIVE_UP_SECS,
        start_standard_services: bool = True,
        *,
        recover: bool = True,
    ) -> ManagedSession:
        """Opens a session that is ready.

        The chief makes the model ready; another task waits for the chief. Where the session is used
        in a ``with`` block, training ends with the block as in ``stop``. Two things differ: threads
        of the program's own need not have ended, and the summary writer stays open. After an error
        that leaves the block no task is informed that training is over.

        Args:
            master: Session target.
            config: Session options.
            wait_for_checkpoint: True makes a chief without a checkpoint wait for a checkpoint
                before it initialises.
            max_wait_secs: Seconds to wait.
            start_standard_services: True to start services and queue runners.
            recover: As in ``managed_session``.

        Raises:
            RuntimeError: Nothing can make the model ready.
            DeadlineExceededError: The model was not ready in time. The message names what or which
                task was missing.
        """
        self.coord.clear_stop()
        self._services.reopen_writer()
        if recover:
            # A silent task is waited for: its step is neither lost nor doubled when the task
            # answers again.
            config = readiness.with_start_timeout(config, max_wait_secs)
        source = ManagerSource(
            self.session_manager,
            TaskRole.CHIEF if self.is_chief else TaskRole.OTHER,
            self._graph,
            master,
            config,
            max_wait_secs,
            {
                "init_op": self.init_op,
                "saver": self.saver,
                "checkpoint_dir": self.logdir,
                "wait_for_checkpoint": wait_for_checkpoint,
                "init_feed_dict": self.init_feed_dict,
                "init_fn": self.init_fn,
            },
        )
        session = self._life.open(
            source,
            self._graph,
            recover=recover,
            global_step=self.global_step,
            saves=self._save_path is not None,
        )
        session.on_exit = self._end.leave_session
        try:
            self._services.write_graph()
            if start_standard_services and not self._life.late:
                if self.is_chief and self.logdir is not None:
                    self.start_standard_services(session)
                self.start_queue_runners(session)
        except BaseException as error:
            # The caller does not receive the session, and so cannot close it.
            self.coord.request_stop(error if isinstance(error, Exception) else None)
            self._life.abandon()
            self._life.close()
            raise
        return session

    def start_standard_services(self, sess: ManagedSession) -> list[Thread] | None:
        """Starts the threads that save checkpoints, write summaries and count steps.

        Args:
            sess: The session in which the threads run.

        Returns:
            The threads, or None without a ``logdir``.

        Raises:
            RuntimeError: This task is not the chief.
        """
        if not self.is_chief:
            raise RuntimeError(
                "Only chief supervisor can start standard services, because only the chief writes"
            )
        if self.logdir is None:
            logging.warning("Standard services need a 'logdir' passed to the Supervisor")
            return None
        threads = self._services.start(
            sess, self.save_model_secs or 0, self.save_summaries_secs or 0
        )
        self._life.save = self._services.save
        return threads

    def start_queue_runners(
        self, sess: rt.SessionLike, queue_runners: Sequence[services.CreatesThreads] | None = None
    ) -> list[Thread]:
        """Starts the threads that fill queues.

        Args:
            sess: The session in which the threads run.
            queue_runners: The queue runners. Default: the graph's collection QUEUE_RUNNERS.
        """
        # Read from the graph with each session, as TF1 does.
        if queue_runners is None:
            queue_runners = self._graph.get_collection(rt.GraphKeys.QUEUE_RUNNERS)
        return services.start_queue_runners(queue_runners, sess, self.coord)

    def loop(
        self,
        timer_interval_secs: float | None,
        target: Callable[..., object],
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> LooperThread:
        """Starts a thread that calls ``target`` at once and then every interval, until a stop.

        An error of ``target`` stops the Supervisor.

        Args:
            timer_interval_secs: Seconds between calls; None for no pause.
            target: Function that the thread calls.
            args: Positional arguments of ``target``.
            kwargs: Keyword arguments of ``target``.
        """
        return LooperThread.loop(self.coord, timer_interval_secs, target, args, kwargs)

    def summary_computed(
        self, sess: rt.SessionLike, summary: object, global_step: int | None = None
    ) -> None:
        """Writes a summary that was computed in a training step.

        Args:
            sess: Session in which the global step is fetched when none is given.
            summary: Value of the summary operation.
            global_step: Step of the summary.

        Raises:
            RuntimeError: There is no summary writer.
        """
        if self.summary_writer is None:
            raise RuntimeError("Writing a summary requires a summary writer.")
        if global_step is None and self.global_step is not None:
            global_step = int(sess.run(self.global_step))
        self.summary_writer.add_summary(summary, global_step)

    # -- the end -----------------------------------------------------------------------------------

    def stop(
        self,
        threads: Sequence[Thread] | None = None,
        close_summary_writer: bool = True,
        ignore_live_threads: bool = False,
    ) -> None:
        """Stops threads and services, and ends training. Closes no session.

        At a clean end the chief waits for the other tasks, saves, and reports the end to them.
        After the end of the session's block, or an earlier ``stop``, nothing is done a second time.

        Args:
            threads: Threads to join beside the Supervisor's own.
            close_summary_writer: True to close the writer.
            ignore_live_threads: True to only log threads that outlive the grace period.

        Raises:
            BaseException: The error that a thread, or ``request_stop``, has reported.
            RuntimeError: Threads are alive after the grace period. The message names them.
        """
        self._end.run(True, close_summary_writer, threads, ignore_live_threads)

    def request_stop(
        self, ex: BaseException | ExcInfo | None = None, *, everybody: bool = False
    ) -> None:
        """Stops every thread of the task; see ``Coordinator.request_stop``.

        Args:
            ex: Error to raise at the end of the task; None for no error.
            everybody: True to stop the other tasks of the run, too, each after the present step.
                Without an open session, or without other tasks, only the own task stops.

        Raises:
            OpError: The order reached no ps. The task stops all the same.
        """
        try:
            if everybody:
                self._life.stop_everybody(
                    f"{type(ex).__name__}: {ex}" if isinstance(ex, Exception) else ""
                )
        finally:
            self.coord.request_stop(ex)

    def should_stop(self) -> bool:
        """Returns True if training is to stop."""
        return self.coord.should_stop()

    def stop_on_exception(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that turns an exception into a stop; ``stop`` raises the exception."""
        return self.coord.stop_on_exception()

    def wait_for_stop(self) -> None:
        """Waits until a stop is requested."""
        self.coord.wait_for_stop()

    # -- TF1's older names -------------------------------------------------------------------------

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
