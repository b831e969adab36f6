"""ModelInspector: the questions of a session manager about a model, before the decision.

``SessionManager`` asks with each new session. ``policy.decide`` receives the report.
"""

import contextlib
import math
from collections.abc import Iterator

import runtime as rt
from harness.training import times
from harness.training.start import readiness
from harness.training.start.global_step import get_global_step
from harness.training.start.policy import ClusterReport
from runtime.lowlevel import RunRecords


class ModelInspector:
    """The questions about the model of a graph.

    Args:
        graph: The graph. The operations of the questions are added, so the graph is not final yet.
    """

    def __init__(self, graph: rt.Graph) -> None:
        self.graph = graph
        """The graph."""
        self.missing, self._awaited, self._await_secs = readiness.operations(graph)
        """Tensor that names the variables without a value, and so touches every task with variables."""
        self._variables = len(graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES))

    def own(self, session: rt.Session) -> set[str]:
        """Returns the names of the global variables on the session's own task, which no chief initialises.

        The ready operation says if these must have a value. A worker may keep a copy of the network
        on its own task, and initialise the copy when the session is open.
        """
        # The device of a variable may lack parts. Only one that names this very task is the
        # session's own.
        own = rt.DeviceSpec.parse(session.task)
        variables = self.graph.get_collection(rt.GraphKeys.GLOBAL_VARIABLES)
        places = {v.op.name: rt.DeviceSpec.parse(v.device) for v in variables}
        return {name for name, at in places.items() if (at.job, at.task) == (own.job, own.task)}

    def wait(
        self, session: rt.Session, records: RunRecords | None, last: ClusterReport, secs: float
    ) -> None:
        """Waits for the variables or the restore missing in the last report.

        Args:
            session: Session that asks.
            records: Run records; None for a session that shares nothing.
            last: The last report.
            secs: The longest wait, in seconds.
        """
        # The tasks hold this question until a value appears, which is quicker than to ask again and
        # again.
        if last.missing:
            with silence_is_loss():
                session.run(
                    self._awaited, {self._await_secs: secs}, timeout_secs=secs + times.ATTEMPT_SECS
                )
        elif "loading" in last.phases.values() and records is not None:
            records.wait_loaded(secs)

    def report(
        self, session: rt.Session, records: RunRecords | None, checkpoint: str | None
    ) -> ClusterReport:
        """Returns the report of the cluster about the model.

        Args:
            session: Session for the question.
            records: Run records; None for a session that shares nothing.
            checkpoint: Checkpoint that could be restored; None for none.
        """
        with silence_is_loss():
            names = session.run(self.missing, timeout_secs=times.ATTEMPT_SECS)
        found = {} if records is None else records.inspect()
        return ClusterReport(
            variables=self._variables,
            missing=[name.decode() for name in names],
            phases={task: record.phase for task, record in found.items()},
            addresses={task: record.address for task, record in found.items() if record.address},
            chief=(chief := next((record.chief for record in found.values() if record.chief), "")),
            chief_silent_secs=min(
                (record.silent.get(chief.partition(" ")[0], math.inf) for record in found.values()),
                default=math.inf,
            ),
            origins=[record.origin for record in found.values() if record.origin],
            checkpoint=checkpoint,
            logdirs=[record.logdir for record in found.values() if record.logdir],
        )

    def live_step(self, session: rt.Session, report: ClusterReport) -> int | None:
        """Returns the global step's value on its task; None when the value is lost or there is no step."""
        step = get_global_step(self.graph)
        # A chief has died while it restored: the value may be the restored one already.
        if "loading" in report.phases.values():
            return None
        if step is None or step.op.name in report.missing:
            return None
        try:
            return int(session.run(step))
        except rt.FailedPreconditionError:
            return None


@contextlib.contextmanager
def silence_is_loss() -> Iterator[None]:
    """Turns DeadlineExceededError into UnavailableError: a task that does not answer in time counts as lost."""
    try:
        yield
    except rt.DeadlineExceededError as error:
        raise rt.UnavailableError(error.message, task=error.task) from None
