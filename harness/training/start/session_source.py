"""The sessions of a run: opened by a source, and entered in the run records before training uses them.

``Supervisor`` has a ``ManagerSource``, and so has each session creator of ``scaffold``.
``Lifecycle`` makes ``RunSessions`` of the source. ``ManagedSession`` opens its first session, and a
new one in each recovery, with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from absl import logging

import runtime as rt
from harness.coordinator import GracePeriod
from harness.training import times
from harness.training.start import readiness
from harness.training.start.policy import TaskRole
from harness.training.start.session_manager import SessionManager
from harness.training.start.session_start import LOST_CONTACT, TrainingOver
from runtime.lowlevel import RunRecords


class SessionSource(Protocol):
    """A source of sessions for one run.

    Attributes:
        records: Run records of the cluster; None when no other task takes part.
        probe: Tensor with the names of variables without a value, which touches every ps; None
            where none is known.
        give_up_secs: Seconds that ``ready`` waits at most, for the log.
    """

    records: RunRecords | None
    probe: rt.Tensor | None
    give_up_secs: float

    def ready(self, recovering: bool) -> rt.Session:
        """Opens a session that is ready for training.

        Args:
            recovering: True in a recovery, False at the start.

        Raises:
            TrainingOver: The run has finished.
        """

    def bare(self) -> rt.Session:
        """Opens a session that need not be ready."""


@dataclass
class ManagerSource:
    """The sessions of a session manager, for a task of one role.

    Attributes:
        manager: Manager that makes a session ready. One of the user's own knows neither run records
            nor a probe.
        role: Role of the task.
        graph: Graph of the sessions.
        master: Session target.
        config: Session options.
        give_up_secs: Seconds that ``ready`` waits at most.
        operations: Further arguments of the chief's ``prepare_session``.
        records: Run records of the cluster; None when no other task takes part.
        probe: Tensor that touches every task with variables; None where none is known.
    """

    manager: SessionManager
    role: TaskRole
    graph: rt.Graph
    master: str
    config: rt.SessionConfig | None
    give_up_secs: float
    operations: Mapping[str, object]
    records: RunRecords | None = None
    probe: rt.Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.manager, SessionManager):
            self.records = self.manager.records(self.master, self.config, self.role)
            self.probe = self.manager.probe

    def ready(self, recovering: bool) -> rt.Session:
        """Opens a session that is ready, as the chief or as another task.

        Args:
            recovering: True in a recovery, False at the start.
        """
        config, secs = self.config, self.give_up_secs
        # The limit of the options is about the start of the cluster.
        if recovering and config is not None:
            config = replace(config, start_timeout_secs=None)
        # Only the chief has the operations that give variables their values.
        if self.role is TaskRole.OTHER:
            return self.manager.wait_for_session(self.master, config=config, max_wait_secs=secs)
        operations: dict[str, Any] = dict(self.operations)
        if isinstance(self.manager, SessionManager):
            operations["recovering"] = recovering
        return self.manager.prepare_session(
            self.master, config=config, max_wait_secs=secs, **operations
        )

    def bare(self) -> rt.Session:
        """Opens a session that need not be ready."""
        return rt.Session(
            self.master, self.graph, readiness.filtered(self.config, self.graph, self.give_up_secs)
        )


class RunSessions:
    """The sessions of a run, each entered in the run records.

    Args:
        source: Source of the sessions.
        grace_period: Grace period that ends the tries.
        probes: True to note the variables that have no value at first, for ``check_values``.
    """

    def __init__(self, source: SessionSource, grace_period: GracePeriod, probes: bool) -> None:
        self._source = source
        self.grace_period = grace_period
        """Grace period that ends the tries."""
        self._probe = source.probe if probes and source.records is not None else None
        self._without_value: frozenset[str] = frozenset()
        self.give_up_secs = source.give_up_secs
        """Seconds that ``open`` waits at most, for the log."""
        self.late = False
        """True if the run had finished before this task came."""

    @property
    def probes(self) -> bool:
        """True if ``check_values`` finds lost values."""
        return self._probe is not None

    def open(self, recovering: bool) -> rt.Session:
        """Opens a session for training.

        The session is ready, unless the run has finished: then ``late`` is True and nothing is left
        to train.

        Args:
            recovering: True in a recovery, False at the start.

        Raises:
            TrainingOver: The run has finished during a recovery.
            RuntimeError: The model could not be made ready.
            UnavailableError, AbortedError: Tasks were lost until the grace period was over.
        """
        while True:
            session = self._open_ready(recovering)
            try:
                # Entered before the first step: a chief that ends now has to wait for this task.
                if self._source.records is not None:
                    self._source.records.join(session.id, again=recovering)
                if self._probe is not None:
                    self._without_value = self._missing_names(session, times.ANSWER_SECS)
                return session
            except LOST_CONTACT as error:
                # A task was lost just after the session was ready: another session, while there is
                # time.
                session.close()
                if self.grace_period.exhausted():
                    raise
                logging.info("lost contact again: %s", error)
            except BaseException:
                # The caller does not receive the session, and so cannot close it.
                session.close()
                raise

    def restore(self) -> None:
        """Makes the model ready for the other tasks, as in a recovery, and closes the session at once."""
        # Each loss has a grace period of its own, also long after the stop.
        self.grace_period.start_again()
        self._open_ready(recovering=True).close()

    def _open_ready(self, recovering: bool) -> rt.Session:
        try:
            return self._source.ready(recovering)
        except TrainingOver as error:
            if recovering:
                raise
            logging.info("nothing left to do: %s", error)
            self.late = True
            # The block of the program runs all the same, and finds a stop requested.
            return self._source.bare()
        except rt.TaskLeftError:
            raise
        except rt.OutOfRangeError as error:
            # An ``init_fn`` has met the end of its data. In a training loop that error would be a
            # clean end.
            raise RuntimeError(f"The model could not be made ready: {error}") from error

    def check_values(self, raw: rt.Session, secs: float) -> None:
        """Raises UnavailableError or AbortedError when any task, or the value of any variable, is lost.

        Args:
            raw: Session that asks.
            secs: Seconds that the question may take.
        """
        assert self._probe is not None, "only a session that probes checks values"
        lost = sorted(self._missing_names(raw, secs) - self._without_value)
        if lost:
            # The task lives, but an update that failed has taken the values along: a new session
            # restores them.
            error = rt.AbortedError(f"variables have lost their values: {', '.join(lost)}")
            error.session = raw.id
            raise error

    def _missing_names(self, session: rt.Session, secs: float) -> frozenset[str]:
        return frozenset(name.decode() for name in session.run(self._probe, timeout_secs=secs))
