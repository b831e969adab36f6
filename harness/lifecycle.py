"""Lifecycle: one task's way through a training run, from its session to an end that leaves nobody behind.

Supervisor and MonitoredTrainingSession are two faces of this. It opens the session that recovers by itself, tells the
run records that this task takes part, and at the end waits, as the chief, for those who still train, lets the caller
write what is final, and tells everybody that training is over.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging

import runtime as rt
from harness.coordinator import Coordinator
from harness.ending import save_the_end
from harness.launcher.tasks import ATTEMPT_VARIABLE
from harness.managed_session import ManagedSession
from harness.opening import LOST_CONTACT, PROBE_SECS, TrainingOver
from harness.patience import Patience, failed
from harness.run_records import RunRecords, others

_WAIT_SECS = 10.0
FAILURE_GRACE_SECS = 10.0
"""How long a step may go on after a service has failed: what it waits for may never come then."""


class Lifecycle:
    """The life of one task in a run.

    Args:
        coord: stops it.
        is_chief: the chief waits for the others at the end, and ends the run.
        stop_grace_secs: how long the end may take once nothing moves any more.
    """

    def __init__(self, coord: Coordinator, is_chief: bool, stop_grace_secs: float) -> None:
        self.coord = coord
        self.is_chief = is_chief
        self.grace_secs = stop_grace_secs
        self._answer_secs = min(_WAIT_SECS, max(0.5, stop_grace_secs))
        self.patience = Patience(coord, stop_grace_secs)
        self.session: ManagedSession | None = None
        self.late = False
        """Whether the run had finished before this task came."""
        self._records: RunRecords | None = None
        self._global_step: Any = None
        self._reached: int | None = None
        self._without_value: frozenset[str] = frozenset()
        self._ending = threading.Event()

    def open(
        self,
        ready: Callable[[bool], rt.Session],
        bare: Callable[[], rt.Session],
        graph: rt.Graph,
        *,
        records: RunRecords | None,
        recover: bool,
        global_step: Any,
        on_recovery: Callable[[rt.Session], object] | None = None,
        probe: Any = None,
        give_up_secs: float = math.inf,
    ) -> ManagedSession:
        """Opens the session.

        A task that comes after the end of the run gets a session too, with a stop requested already.

        Args:
            ready: opens a session that is ready for training; told whether it recovers one. TrainingOver means
                that the run has finished.
            bare: opens a session that need not be ready.
            graph: the graph.
            records: the run records; None when nobody else takes part.
            recover: whether the session recovers by itself.
            global_step: the global step, or None.
            on_recovery: called with each new session after a recovery.
            probe: names of variables without a value, fetched now and then by the chief, so that it finds out which and
                who is lost while it does something else.
            give_up_secs: how long ``ready`` waits at most, for the log.
        """
        self.patience.renew()
        self._records, self._global_step, self.late = records, global_step, False
        self._reached = None
        attempt = os.environ.get(ATTEMPT_VARIABLE, "0")
        if attempt != "0":
            logging.info("this is start number %d of this task", int(attempt) + 1)

        probes = recover and self.is_chief and records is not None and probe is not None

        def opener(recovering: bool) -> rt.Session:
            while True:
                try:
                    session = ready(recovering)
                except TrainingOver as error:
                    if recovering:
                        raise
                    logging.info("nothing left to do: %s", error)
                    self.late = True
                    return bare()
                except rt.OutOfRangeError as error:  # of a function of the user's own: no end of a training to come
                    raise RuntimeError(f"The model could not be made ready: {error}") from error
                try:
                    if records is not None:
                        records.join()
                    if probes:
                        self._without_value = _names(session, probe)
                    return session
                except LOST_CONTACT as error:  # a task was lost just after it was ready
                    session.close()
                    if self.patience.exhausted():
                        raise
                    logging.info("lost contact again: %s", error)

        self.session = ManagedSession(
            opener,
            graph,
            self.patience,
            recover=recover,
            global_step=global_step,
            on_recovery=on_recovery,
            give_up_secs=give_up_secs,
        )
        if self.late:
            self.coord.request_stop()
        self._ending = threading.Event()
        if probes and not self.late:
            threading.Thread(target=self._probe, args=(self.session, probe), name="probe-tasks", daemon=True).start()
        threading.Thread(target=self._watch, args=(self.session, self._ending), name="watch-stop", daemon=True).start()
        return self.session

    def _watch(self, session: ManagedSession, ending: threading.Event) -> None:
        """A step that waits for a dead task, or for a service that has failed, must not wait for ever."""
        self.coord.wait_for_stop()
        secs = min(FAILURE_GRACE_SECS, self.grace_secs) if failed(self.coord) else self.grace_secs
        if not ending.wait(secs):
            logging.warning("a step still runs %g s after the stop: it is cancelled", secs)
            session.close()

    def _probe(self, session: ManagedSession, probe: Any) -> None:
        """Makes the chief restore what is lost even while its training loop is busy elsewhere."""
        while not self.coord.wait_for_stop(PROBE_SECS):
            raw = session.raw
            try:
                lost = sorted(_names(raw, probe) - self._without_value)
                if lost:  # an update that failed has taken them along
                    raise rt.AbortedError(f"variables have lost their values: {', '.join(lost)}")
            except RuntimeError:
                if raw is session.raw:
                    return  # it is closed: this is the end
            except LOST_CONTACT as error:
                try:
                    session.recover(raw, error)
                except Exception as failure:  # training's own next step raises it too
                    logging.error("recovery failed: %s", failure)
                    return
            except rt.OpError as error:
                logging.info("probing the tasks: %s", error)

    def leave_loop(self) -> None:
        """Notes that training's loop is over: from here on the session is needed for what is left to do."""
        self._ending.set()

    def leads(self) -> bool:
        """Whether this chief may write checkpoints: no other one has taken its place."""
        return self._records is None or self._records.leads()

    def wait_for_others(self) -> None:
        """As the chief, waits until all who take part are done; they may need what only a chief can restore.

        The wait ends early when nobody has moved the global step for the grace period, and when a service fails.
        """
        records, session = self._records, self.session
        self._ending.set()
        self._note_reached()
        if records is not None:
            records.answer_secs = self._answer_secs  # from here on a dead task is not waited for any longer
        if records is None or session is None or session.closed or not self.is_chief or self.late:
            return
        moved_at, wait = time.monotonic(), 0.0
        self.patience.deadline = moved_at + self.grace_secs
        last = self._step(session)
        while not failed(self.coord):
            try:
                left = records.wait_done(wait)
            except LOST_CONTACT as error:
                logging.info("while waiting for the others: %s", error)
                self.patience.wait(0.2)
                left = ["tasks that cannot be asked for"]
            if not left:
                return
            now = self._step(session)
            if now != last:
                moved_at, last = time.monotonic(), now
                self.patience.deadline = moved_at + self.grace_secs
            names = ", ".join(left)
            if time.monotonic() - moved_at >= self.grace_secs:
                logging.warning("not waiting any longer for %s: no step was done for %g s", names, self.grace_secs)
                return
            logging.info("waiting for %s to finish training (step %s)", names, last)
            wait = min(_WAIT_SECS, max(0.1, self.grace_secs))

    def _step(self, session: ManagedSession) -> int | None:
        """The global step now; a lost ps is recovered on the way, as the others need it too."""
        if self._global_step is None:
            return None
        try:
            step = int(session.run(self._global_step, timeout_secs=self._answer_secs))
            self._reached = max(step, self._reached or 0)
            return step
        except (rt.DeadlineExceededError, *LOST_CONTACT) as error:
            logging.info("while waiting for the others: %s", error)
            return None

    def _note_reached(self) -> None:
        if self.session is not None and (step := self.session.reached()) is not None:
            self._reached = max(step, self._reached or 0)

    def finish(self, final: Callable[[rt.Session], object], *, over: bool, checkpoint_dir: str | None = None) -> None:
        """Ends this task's part: does what is final, then tells the others; bounded by the grace period.

        Args:
            final: writes the last checkpoint and summaries; called again when a task was lost meanwhile.
            over: training is done; False when it was interrupted and will be taken up again.
            checkpoint_dir: where the chief's checkpoints lie; None when it writes none.

        Raises:
            AbortedError, UnavailableError: a task was lost meanwhile, and steps with it (``harness/ending.py``). The
                others are not told that training is over.
        """
        session, records = self.session, self._records
        self._ending.set()
        self._note_reached()
        if session is None:
            return
        limit = threading.Timer(self.grace_secs, session.close)
        limit.daemon = True
        limit.start()
        try:
            if session.closed:
                logging.info("the session was closed before the stop: what was done since the last save is not saved")
            elif not self.late:
                if self.is_chief and checkpoint_dir is not None and self._global_step is not None:
                    save_the_end(session, final, self._global_step, self._reached, checkpoint_dir, over=over)
                else:
                    final(session)
            if records is not None and over:
                self._tell_done(records)
        finally:
            limit.cancel()

    def _tell_done(self, records: RunRecords) -> None:
        try:
            if self.is_chief and not self.late:
                # Whoever was given up by now will not say that it is done.
                records.finish(others(records.look(), records.task))
            records.done(leave=ATTEMPT_VARIABLE not in os.environ)
        except (rt.PermissionDeniedError, *LOST_CONTACT) as error:
            logging.warning("could not tell the others that this task is done: %s", error)

    def close(self) -> None:
        """Closes the session; never waits for a dead task."""
        self._ending.set()
        self.patience.end()
        if self.session is not None:
            self.session.close()


def _names(session: rt.Session, probe: rt.Tensor) -> frozenset[str]:
    return frozenset(name.decode() for name in session.run(probe, timeout_secs=_WAIT_SECS))
