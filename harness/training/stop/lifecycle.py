"""Lifecycle: one task's way through a training run, from its session to an end that leaves no task behind.

Supervisor and MonitoredTrainingSession are two faces of ``Lifecycle``. A run passes through the
phases of ``policy.RunPhase``:

1. ``open`` makes the session that recovers by itself, and enters this task in the run records.
2. ``wait_for_others``: the chief waits for the tasks that still train.
3. ``finish`` has the caller write the last checkpoint, and then reports the end of training to
    every task.
4. ``close`` ends the session and the helper threads.

Wanted: every task of a run ends, no step that was trained is lost without a word, and no task waits
for a task that is gone. Three simpler ways do not do that:

* Each task ends when its own loop ends. The variables are on the ps tasks, which a chief that ends
  first takes along: the other workers then wait for a model that no task restores.
* The chief ends the run at once, or after a fixed time. Workers that still train lose their last
  steps. And no time is right: a last save or an evaluation may take a minute or an hour.
* Every task waits for every other task at a barrier. A worker that has died never comes to the
  barrier.

So no work is limited here, only silence: a living task gives a sign of life every second, and a
task is given up after the grace period without one. The chief alone waits for the other tasks. It
restores meanwhile what they lose, saves, and only then says that training is over. The ps tasks
keep the model until then. A signal during the last save waits for it. Where steps are lost all the
same the end is an error, which names them and which no task takes for the end of training.

It still fails where a living task makes no progress: its signs of life come, and the chief waits
without a limit. And a worker that is cut off for longer than the grace period is given up while it
trains: its last steps are not saved, which it logs when it is back.

docs/endings.md has the table of the ways in which a run can end.
"""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator, GracePeriod
from harness.launch.tasks import attempt
from harness.training import times
from harness.training.start.global_step import GlobalStep, warn_if_uncounted
from harness.training.start.managed_session import ManagedSession
from harness.training.start.session_source import RunSessions, SessionSource
from harness.training.start.session_start import LOST_CONTACT
from harness.training.stop.ending import end_part
from harness.training.stop.policy import RunEvent, RunPhase, StopAction, after_stop, next_phase
from harness.training.stop.preemption import interrupt_between_locks, shielded
from harness.training.stop.stop_orders import StopOrders
from harness.training.stop.task_run import ELASTIC, TaskRun
from harness.training.stop.waiting import wait_for_others
from runtime import concurrency

_WITHOUT_SESSION = (RunPhase.OPENING, RunPhase.OVER)
"""Phases in which there is nothing to wait for, to save or to report."""


class Lifecycle:
    """The life of one task in a run.

    A session has three helper threads. ``watch-stop`` cancels a step that outlives a stop,
    ``await-stop`` waits for the order of another task to stop, and ``probe-tasks`` finds lost tasks
    on the chief.

    Args:
        coord: Coordinator that stops the task.
        is_chief: True on the chief, which waits for the other tasks at the end and then ends the
            run.
        stop_grace_secs: Seconds that a task may be silent at the end, and that a step may take
            after a stop.
    """

    def __init__(self, coord: Coordinator, is_chief: bool, stop_grace_secs: float) -> None:
        self.coord = coord
        self.is_chief = is_chief
        self.grace_secs = stop_grace_secs
        self.grace_period = GracePeriod(coord, stop_grace_secs)
        self.phase = RunPhase.OPENING
        """Place of the task on its way through the run."""
        self.story: list[tuple[float, RunEvent, RunPhase]] = []
        """Changes of the phase since the last ``open``: ``time.monotonic()``, the event, and the phase after it."""
        self.save: Callable[[], object] | None = None
        """Function that saves, now or soon.

        The chief calls it when a ps is about to leave; a face with a saver sets it.
        """
        self.run: TaskRun | None = None
        """Part of the task in the run; None before the first session."""
        self._orders: StopOrders | None = None
        self._closed = concurrency.Event()
        atexit.register(_report_at_exit, weakref.ref(self))

    @property
    def late(self) -> bool:
        """True if the run had finished before the task came."""
        return self.run is not None and self.run.late

    def _note(self, event: RunEvent) -> None:
        """Moves to the phase after an event, and keeps a change for a reader of the story."""
        before, self.phase = self.phase, next_phase(self.phase, event)
        if before is self.phase:
            return
        self.story.append((concurrency.monotonic(), event, self.phase))
        logging.debug("%s: %s", self.phase.name.lower(), event.value)

    def open(
        self,
        source: SessionSource,
        graph: rt.Graph,
        *,
        recover: bool,
        global_step: GlobalStep | None,
        saves: bool,
        on_recovery: Callable[[rt.Session], object] | None = None,
    ) -> ManagedSession:
        """Opens the session, and starts the helper threads.

        A task that comes after the end of the run gets a session too, with a stop requested
        already.

        Args:
            source: Source of the sessions.
            graph: Graph of the session.
            recover: True for a session that recovers by itself.
            global_step: Variable that counts the steps, or None.
            saves: True if the chief writes checkpoints.
            on_recovery: Function that is called with each new session after a recovery.
        """
        # From the first wait on Ctrl-C has to leave no lock behind.
        interrupt_between_locks()
        # An earlier session of this object may have used its grace period up.
        self.grace_period.renew()
        self.story.clear()
        self._note(RunEvent.OPENS)
        if before := attempt(os.environ):
            logging.info("this is start number %d of this task", before + 1)
        sessions = RunSessions(source, self.grace_period, probes=recover and self.is_chief)
        session = ManagedSession(
            sessions,
            graph,
            recover=recover,
            global_step=global_step,
            on_recovery=on_recovery,
            is_chief=self.is_chief,
        )
        is_elastic = bool(graph.get_collection(ELASTIC))
        self.run = TaskRun(
            session, sessions, source.records, self.is_chief, is_elastic, self.grace_secs
        )
        self._note(RunEvent.OPENED)
        warn_if_uncounted(global_step, graph)
        # A session without a cluster has its variables in this process.
        if self.is_chief and source.records is not None and not saves:
            logging.warning(
                "no checkpoints are written: the death of a ps can cost all steps; "
                "give the Supervisor a logdir (MonitoredTrainingSession: checkpoint_dir)"
            )
        # The loop of the program ends at once, and its end finds nothing to save.
        if self.late:
            self.coord.request_stop()
        self._start_threads(self.run)
        return session

    def _start_threads(self, run: TaskRun) -> None:
        # The threads of a session before this one end by their own event.
        self._closed.set()
        self._closed = concurrency.Event()
        threads = concurrency.ThreadGroup("the lifecycle of a session")
        # A late task has no chief to help and no order to wait for: its run has ended.
        if run.sessions.probes and not run.late:
            threads.start(_probe, run, name="probe-tasks")
        threads.start(self._watch, run, self._closed, name="watch-stop")
        if run.records is not None and not run.late:
            self._orders = StopOrders(run.records, self.coord, lambda: self.save)
            self._orders.start()

    def _watch(self, run: TaskRun, closed: concurrency.Event) -> None:
        """Cancels, after a stop, a step that runs too long; closes the session when a task is silent too long."""
        self.coord.wait_for_stop()
        stopped_at = concurrency.monotonic()
        # The thread that waits for orders of others has done its work: this task stops already.
        if run.records is not None:
            run.records.close()
        limit = (
            min(times.FAILURE_GRACE_SECS, self.grace_secs) if self.coord.failed else self.grace_secs
        )
        while not closed.wait(max(0.05, min(times.STEPS_LOOK_SECS, limit / 4))):
            phase = self.phase
            # The stop may have been cleared: a thread of its own watches the next session.
            if phase is RunPhase.OVER or not self.coord.should_stop():
                return
            took = min(run.session.step_secs(), concurrency.monotonic() - stopped_at)
            # While training goes on the silence of a task is a matter of its steps, which recover.
            silent = run.silent_secs() if phase is RunPhase.ENDING else 0.0
            action = after_stop(
                phase, took, silent, step_limit=limit, silence_limit=run.silence_secs
            )
            if action is StopAction.CANCEL_STEPS:
                logging.warning("a step still runs %.3g s after the stop: it is cancelled", took)
                run.session.raw.cancel_steps()
                run.session.end_steps()
            elif action is StopAction.CLOSE_SESSION:
                run.silenced = (
                    f"a task has given no sign of life for {silent:.0f} s while training was ending"
                )
                logging.warning("%s: what waits for it is cancelled", run.silenced)
                run.session.close()
                return

    def stop_everybody(self, reason: str = "") -> None:
        """Orders all tasks that take part to stop, by the run records.

        Without a session of a cluster there is no other task, and nothing is done.

        Args:
            reason: Reason in words, for the logs of the other tasks.

        Raises:
            OpError: The order did not reach a ps.
        """
        # A program that has closed its session takes part no more, so it speaks for nobody.
        if self.run is not None and self.run.records is not None and not self.run.session.closed:
            self.run.records.stop(reason)

    def limit_silence(self) -> None:
        """Starts the end: from here on the silence of a ps closes the session, and so cancels every wait.

        Services may still be at work, and a save of theirs may wait for that ps.
        """
        self._note(RunEvent.ENDS)

    def leads(self) -> bool:
        """Returns True while this chief leads the run, and so may write checkpoints."""
        return self.run is None or self.run.records is None or self.run.records.leads()

    def wait_for_others(self) -> None:
        """Waits, as the chief, until all tasks that take part are done, or give no sign of life for too long.

        The other tasks may lose a ps meanwhile, which the wait restores.
        """
        run = self.run
        if run is None or self.phase in _WITHOUT_SESSION:
            return
        run.note_reached(run.session.seen.reached)
        # The other tasks do not wait: the chief alone can restore, and the chief alone ends the
        # run.
        if run.records is None or not run.is_chief or run.late:
            return
        self._note(RunEvent.WAITS)
        try:
            wait_for_others(run, run.records)
        finally:
            self._note(RunEvent.WAITED)

    def finish(
        self,
        final: Callable[[rt.SessionLike], object],
        *,
        over: bool,
        checkpoint_dir: str | None = None,
        shield: bool = True,
    ) -> None:
        """Ends this task's part: saves, then reports the end to the other tasks.

        Does nothing the second time.

        Args:
            final: Function that writes the last checkpoint and summaries. Called again when a task
                was lost meanwhile.
            over: True when training is done; False when training was interrupted and will continue
                later.
            checkpoint_dir: Directory of the chief's checkpoints; None when there are none.
            shield: True to hold SIGTERM and Ctrl-C back until the end of this call
                (``preemption.shielded``). With False ``finish`` may be called again after an
                interruption.

        Raises:
            AbortedError, UnavailableError: A task was lost, and steps with it (``save_the_end``);
                or a task was silent for too long to be saved. The end of training is not reported
                then.
        """
        run = self.run
        if run is None or self.phase in _WITHOUT_SESSION:
            return
        held: contextlib.AbstractContextManager[list[int]] = (
            shielded() if shield else contextlib.nullcontext([])
        )
        with held as signals:
            self._note(RunEvent.ENDS)
            # Read before the save, which compares: a recovery within the save must not lower it.
            run.note_reached(run.session.seen.reached)
            if run.records is not None:
                run.records.answer_secs = run.answer_secs
            try:
                end_part(run, final, over=over, checkpoint_dir=checkpoint_dir, signals=signals)
            except BaseException as error:
                # With a shield no signal interrupts the end, so whatever comes out is final.
                self._note(
                    RunEvent.DONE
                    if shield or isinstance(error, Exception)
                    else RunEvent.INTERRUPTED
                )
                raise
            self._note(RunEvent.DONE)
            if over:
                run.session.seen.log_end(checkpoint_dir)

    def abandon(self) -> None:
        """Ends the run after an error: nothing is saved, and the end of training is not reported."""
        self._note(RunEvent.DONE)

    def at_exit(self) -> None:
        """Logs, when the process ends, that training was not brought to an end before."""
        # First of all: that thread in the middle of a call would abort the process.
        if self._orders is not None:
            self._orders.end()
        run = self.run
        if run is None or run.records is None or run.late:
            return
        if self.phase in _WITHOUT_SESSION or self._closed.is_set():
            return
        run.note_reached(run.session.seen.reached)
        reached = "" if run.reached is None else f" (step {run.reached} was the last seen here)"
        logging.warning(
            "this process ends without having come through Supervisor.stop() or the end of its "
            "session's block: nobody is told that it is done%s",
            f", and what was trained since the last checkpoint is not saved{reached}"
            if self.is_chief
            else "",
        )

    def close(self) -> None:
        """Closes the session; never waits for a dead task."""
        # The threads end by the event. To join them could wait for a dead task.
        self._closed.set()
        self.grace_period.end()
        if self.run is not None:
            if self.run.records is not None:
                self.run.records.close()
            self.run.session.close()


def _probe(run: TaskRun) -> None:
    """Makes the chief restore lost variables even while its training loop is busy elsewhere."""
    session = run.session
    while not session.coord.wait_for_stop(times.PROBE_SECS):
        raw = session.raw
        try:
            run.sessions.check_values(raw, times.ANSWER_SECS)
        except RuntimeError:
            # The session was closed, unless another thread has replaced it meanwhile.
            if raw is session.raw:
                return
        except LOST_CONTACT as error:
            try:
                session.recover(raw, error)
            except Exception as failure:
                # The next training step raises this error too, in the thread of the user.
                logging.error("recovery failed: %s", failure)
                return
        except rt.OpError as error:
            logging.info("probing the tasks: %s", error)


def _report_at_exit(life: weakref.ref[Lifecycle]) -> None:
    known = life()
    if known is not None:
        known.at_exit()
