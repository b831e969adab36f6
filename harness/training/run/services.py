"""The services of a chief: threads that save checkpoints, write summaries and count steps.

The Supervisor starts the threads. A ``CheckpointSaverHook`` shares ``SeriesCheckpoints``, and a
``StepCounterHook`` shares ``StepCounter``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from absl import logging

import runtime as rt
from harness.checkpoints.layout import step_of
from harness.checkpoints.saver import Saver
from harness.coordinator import Coordinator, LooperThread, underlying, while_open
from harness.training.start.managed_session import ManagedSession, StepRate
from harness.training.start.readiness import CheckpointSaver, Element
from harness.training.start.session_start import LOST_CONTACT
from runtime import concurrency

if TYPE_CHECKING:
    from harness.checkpoints.save_job import SaveHandle


class EventWriter(Protocol):
    """A writer of events: a ``FileWriter``, or the user's own."""

    def add_summary(self, summary: Any, global_step: int | None = None) -> None:
        """Adds a summary that a step gave."""

    def add_scalars(self, values: Mapping[str, float], global_step: int | None = None) -> None:
        """Adds one number for each tag."""

    def add_session_log(
        self, session_log: str, global_step: int | None = None, checkpoint_path: str = ""
    ) -> None:
        """Adds a mark of the run's life: START, CHECKPOINT or STOP."""

    def add_graph(self, graph: rt.Graph) -> None:
        """Adds a graph."""

    def flush(self) -> object:
        """Writes what was added."""

    def close(self) -> None:
        """Ends the writing."""

    def reopen(self) -> object:
        """Begins to write again."""


class CreatesThreads(Protocol):
    """A queue runner: of ``harness.tf1``, or the user's own."""

    def create_threads(
        self, sess: rt.SessionLike, coord: Coordinator, *, daemon: bool, start: bool
    ) -> list[concurrency.Thread]:
        """Makes the threads of a queue; with ``start`` the threads begin at once."""


def start_queue_runners(
    runners: Iterable[CreatesThreads], session: rt.SessionLike, coord: Coordinator
) -> list[concurrency.Thread]:
    """Starts the threads that fill queues, and returns them.

    Args:
        runners: The queue runners.
        session: Session of the threads.
        coord: Coordinator that stops the threads.
    """
    return [
        thread
        for runner in runners
        for thread in runner.create_threads(session, coord, daemon=True, start=True)
    ]


class SeriesCheckpoints:
    """The checkpoints of one series, saved when the step or a variable has changed.

    Args:
        saver: The saver.
        path: Path without the step, such as ``logdir/model.ckpt``.
        global_step: The global step; None saves under the bare path every time.
        writer: Writer of a CHECKPOINT mark for each save, or None.
        leads: Returns True while this chief leads; called before each save.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        path: str,
        global_step: Element | None,
        writer: EventWriter | None,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._saver = saver
        self._path = path
        self._global_step = global_step
        self._writer = writer
        self._leads = leads
        self._lock = concurrency.Lock()
        self._step: int | None = None
        self._saved_step: int | None = None
        self._saved_path: str | None = None
        # True after variables changed while the global step stood at the step of the last
        # checkpoint.
        self._stands = False
        self._logged_standing = False
        self._running: SaveHandle | None = None
        self._within: rt.SessionLike | None = None

    def save(self, session: rt.SessionLike) -> str | None:
        """Saves and waits for the end of the save.

        Returns:
            Path of the checkpoint; None when the last checkpoint holds all values.

        Raises:
            PermissionDeniedError: Another chief has taken the lead.
            ResourceExhaustedError: The disk is full.
        """
        with self._lock:
            self._inspect_save(session, wait=True)
            if not self._is_due(session):
                return None
            path = str(self._save_once(session, wait=True))
            self._note_save(path, session)
            return path

    def begin(self, session: rt.SessionLike) -> None:
        """Begins a save beside training; skips the save while another save is under way.

        Raises:
            PermissionDeniedError: Another chief has taken the lead.
        """
        with self._lock:
            self._inspect_save(session)
            if not self._is_due(session):
                return
            if isinstance(self._saver, Saver):
                self._start_save(session)
            else:
                # A saver of the user's own cannot save in the background.
                self._note_save(str(self._save_once(session, wait=True)), session)

    def changed(self, session: rt.SessionLike) -> bool:
        """Returns True if a variable was written since the last save, whatever the global step says."""
        with self._lock:
            last = self._saved_path or self._on_disk()
            return last is None or self._has_changed(session, last)

    def inspect(self, session: rt.SessionLike) -> None:
        """Notes the end of a save that was begun.

        A full disk or a lost task costs this checkpoint, not the training. The log tells of the
        disk, and the session notices the task.

        Raises:
            OpError: The save failed for another reason.
        """
        # Looked at without the lock first: this is called with every step.
        if self._running is not None:
            with self._lock:
                self._inspect_save(session)

    def settle(self, secs: float) -> None:
        """Waits for the end of a save that was begun, ``secs`` seconds at most; its result does not matter."""
        if self._running is not None:
            self._running.wait(secs)

    def skip(self, count: int) -> None:
        """Counts saves that came due during another save."""
        logging.info("%d saves were due while the last one was running: skipped", count)
        if isinstance(self._saver, Saver):
            self._saver.skipped += count
        rt.lowlevel.metrics.add("checkpoints_skipped_total", count)

    def _inspect_save(self, session: rt.SessionLike, *, wait: bool = False) -> None:
        assert self._lock.locked(), "two threads would note one save"
        handle = self._running
        if handle is None or not (wait or handle.done()):
            return
        # Cleared first: whatever the result is, the next save may begin.
        self._running = None
        try:
            path = handle.result()
        except rt.ResourceExhaustedError as error:
            _log_full(error)
        except LOST_CONTACT as error:
            _log_lost(error)
        except (rt.CancelledError, RuntimeError) as error:
            if isinstance(error, rt.lowlevel.TakeoverError):
                # A backup took the place of a ps. Its session goes on, so nobody else would begin
                # this save again.
                logging.info("this checkpoint is begun again: %s", error)
                self._start_save(session)
                self._inspect_save(session, wait=wait)
            elif self._within is not underlying(session):
                logging.warning(
                    "this checkpoint was not saved: its session was replaced meanwhile: %s", error
                )
            else:
                raise
        else:
            self._note_save(path, session)

    def _is_due(self, session: rt.SessionLike) -> bool:
        if self._global_step is not None:
            self._step = int(session.run(self._global_step))
            last = self._saved_path or self._on_disk()
            if (
                last is not None
                and self._step == step_of(last)
                and not self._has_changed(session, last)
            ):
                return False
        # Asked last, and before each save: a chief that was frozen must not delete the checkpoints
        # of the next one.
        if not self._leads():
            raise rt.PermissionDeniedError(
                "no checkpoint is saved: another chief has taken the lead of this run"
            )
        return True

    def _has_changed(self, session: rt.SessionLike, last: str) -> bool:
        """Returns True unless the last checkpoint has all values, for a step that stands still."""
        self._stands = False
        # A saver of the user's own does not compare. Then a standing step means that all is saved,
        # as in TF1.
        if not isinstance(self._saver, Saver):
            return False
        raw = underlying(session)
        try:
            changed = self._saver.changed_since(raw, last)
            self._stands = changed is True
            return changed is not False
        except (ValueError, rt.DataLossError):
            # The checkpoint was deleted or is damaged, so it does not hold the values.
            return True
        except rt.lowlevel.DiskAwayError:
            # The save itself raises the error, and says for which checkpoint.
            return True
        except (rt.CancelledError, RuntimeError) as error:
            _raise_if_replaced(error, raw, session)
            raise

    def _start_save(self, session: rt.SessionLike) -> None:
        raw = underlying(session)
        handle = self._save_once(session, wait=False)
        if handle is not None:  # None: the save was skipped
            # The save before may have ended since it was looked at.
            self._inspect_save(session)
            self._running, self._within = handle, raw

    def _save_once(self, session: rt.SessionLike, *, wait: bool) -> Any:
        """Saves; begins again where a backup took the place of a ps, which a session does not notice."""
        raw = underlying(session)
        options = {} if wait else {"wait": False}
        while True:
            try:
                return self._saver.save(raw, self._path, global_step=self._global_step, **options)
            except (rt.CancelledError, RuntimeError) as error:
                if isinstance(error, rt.lowlevel.TakeoverError):
                    logging.info("this checkpoint is begun again: %s", error)
                else:
                    _raise_if_replaced(error, raw, session)
                    raise

    def _note_save(self, path: str, session: rt.SessionLike) -> None:
        # The name has the step of the checkpoint; other workers have moved the global step since it
        # was read.
        before, self._saved_path = self._saved_step, path
        found = step_of(path)
        self._saved_step = found if self._step is not None and found is not None else self._step
        if self._writer is not None:
            self._writer.add_session_log("CHECKPOINT", self._saved_step, checkpoint_path=self._path)
        logging.info("saved %s", path)
        if (
            self._stands
            and before is not None
            and before == self._saved_step
            and not self._logged_standing
        ):
            self._tell_if_it_stands(session, before)

    def _tell_if_it_stands(self, session: rt.SessionLike, step: int) -> None:
        # The checkpoint may have come between the first update of a step and its global step: no
        # reason to warn.
        if int(session.run(self._global_step)) != step:
            return
        self._logged_standing = True
        logging.warning(
            "variables change but the global step stays at %d: each checkpoint replaces the one "
            "before; pass "
            "global_step to minimize() or apply_gradients(), or count it in a step of your own",
            step,
        )

    def _on_disk(self) -> str | None:
        """Returns the newest checkpoint of this path: a restored run is saved already."""
        try:
            # A Protocol would not do: before Python 3.12 its check reads the property, and so the
            # disk, once more.
            found: Sequence[str] = getattr(self._saver, "last_checkpoints", ())
        except rt.UnavailableError:
            # The disk is away, and the save itself raises that.
            return None
        absolute = rt.lowlevel.storage.absolute
        here = bool(found) and absolute(os.path.dirname(found[-1])) == absolute(self._path)
        return found[-1] if here else None


def check_basename(name: str) -> None:
    """Raises ValueError unless checkpoints of this name lie right below the directory of the run."""
    if os.path.basename(name) != name or name in ("", ".", "..", "replaced"):
        raise ValueError(
            "checkpoint_basename is the first part of the checkpoints' names, such as model.ckpt, "
            f"not {name!r}: they lie right below the log directory"
        )


def _log_full(error: rt.ResourceExhaustedError) -> None:
    logging.error("%s; training goes on, without this checkpoint: make room", error)


def _log_lost(error: rt.OpError) -> None:
    logging.warning("this checkpoint was not saved: %s", error)


@contextlib.contextmanager
def costs_one_checkpoint(session: rt.SessionLike) -> Iterator[None]:
    """Logs an error of a save that costs one checkpoint and says nothing of the session.

    The disk is full, a disk or a store does not answer, or the tasks could not be held still
    together for long enough.

    Args:
        session: The session that is saved.

    Raises:
        OpError: The save failed for another reason, such as a lost task.
    """
    raw = underlying(session)
    try:
        yield
    except rt.ResourceExhaustedError as error:
        _log_full(error)
    except rt.OpError as error:
        away = isinstance(error, LOST_CONTACT) and not raw.lost(error)
        if not away and not isinstance(error, rt.lowlevel.SnapshotError):
            raise
        _log_lost(error)


def _raise_if_replaced(error: Exception, raw: rt.SessionLike, session: rt.SessionLike) -> None:
    """Raises AbortedError if a recovery in another thread has closed the used session."""
    if raw is not underlying(session):
        raise rt.AbortedError(f"its session was replaced meanwhile: {error}") from error


class CheckpointThread(LooperThread):
    """A thread that saves a checkpoint at the start and then at intervals."""

    def __init__(
        self,
        coord: Coordinator,
        secs: float,
        session: ManagedSession,
        checkpoints: SeriesCheckpoints,
    ) -> None:
        super().__init__(coord, secs)
        self.name = "save-checkpoints"
        self._secs = secs
        self._session = session
        self._checkpoints = checkpoints
        self._late = False

    def run_loop(self) -> None:
        """Saves, and skips the next call where this save took longer than the interval."""
        # LooperThread makes up for a call whose time passed while a save was running. That call is
        # skipped, so that a save that takes longer than its interval does not fill the time.
        if self._late:
            self._late = False
            return
        began = concurrency.monotonic()
        if not self.save():
            return
        missed = int((concurrency.monotonic() - began) // self._secs)
        if missed:
            self._late = True
            self._checkpoints.skip(missed)

    def save(self) -> bool:
        """Saves, in the caller's thread; returns False where an error cost this checkpoint."""
        raw = self._session.raw
        try:
            with while_open(self._session), costs_one_checkpoint(self._session):
                self._checkpoints.save(self._session)
                return True
        except LOST_CONTACT as error:
            _log_lost(error)
            self._session.recover(raw, error)
        return False


class TimedSummaries:
    """The summaries that a timer writes.

    Args:
        summary_op: Scalar string tensor of a serialized summary.
        global_step: The global step, or None.
        writer: Writer of the events.
    """

    def __init__(
        self, summary_op: Element, global_step: Element | None, writer: EventWriter
    ) -> None:
        self._summary_op = summary_op
        self._global_step = global_step
        self._writer = writer
        self._needs_feed = False

    def write(self, session: rt.SessionLike) -> None:
        """Writes a summary. An operation in need of a feed is logged once, and then left out."""
        # Logged once. To try again would fail with each period.
        if self._needs_feed:
            return
        try:
            if self._global_step is None:
                self._writer.add_summary(session.run(self._summary_op))
            else:
                summary, step = session.run([self._summary_op, self._global_step])
                self._writer.add_summary(summary, int(step))
        except rt.lowlevel.MissingFeedError as error:
            self._needs_feed = True
            logging.warning(
                "the summaries depend on a fed placeholder, so they cannot be written by a timer "
                "(%s): fetch them in a training step and pass them to Supervisor.summary_computed, "
                "and give the Supervisor summary_op=None",
                error,
            )


def service(
    coord: Coordinator,
    name: str,
    secs: float,
    session: ManagedSession,
    act: Callable[[rt.SessionLike], object],
) -> LooperThread:
    """Returns a thread that calls a function with the session at its start and then at intervals.

    Args:
        coord: The coordinator that stops the thread.
        name: Name of the thread.
        secs: Seconds between calls.
        session: The session of training.
        act: Function to call.
    """

    def call() -> None:
        with while_open(session):
            act(session)

    thread = LooperThread(coord, secs, call)
    thread.name = name
    return thread


class StepCounter(StepRate):
    """The rate of global steps, ``global_step/sec``, written to the events.

    Args:
        name: Name of the global step's operation.
        writer: Writer of the rate; None only returns the rate.
    """

    def __init__(self, name: str, writer: EventWriter | None) -> None:
        self._tag = f"{name}/sec"
        self._writer = writer

    def count(self, step: int, now: float) -> float | None:
        """Returns the rate since the last call as ``StepRate`` does, and writes the rate."""
        rate = super().count(step, now)
        if rate is not None and self._writer is not None:
            self._writer.add_scalars({self._tag: rate}, step)
        return rate
