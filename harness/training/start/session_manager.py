"""SessionManager: opens a session and makes the model ready, by keeping, restoring, initialising or waiting.

``Supervisor`` and the session creators of a monitored session ask it for each session. A
``SessionStart`` tries until the session is ready.
"""

import math
import os
from collections.abc import Callable

import runtime as rt
from harness.coordinator import Coordinator, GracePeriod
from harness.launch.tasks import attempt
from harness.training import times
from harness.training.start import policy, readiness
from harness.training.start.inspection import ModelInspector
from harness.training.start.policy import TaskRole
from harness.training.start.readiness import CheckpointSaver, Element, Feeds, ReadyOperations
from harness.training.start.session_start import SessionRequest, SessionStart
from runtime import concurrency
from runtime.lowlevel import RunRecords


class SessionManager:
    """Opens sessions for training.

    Args:
        local_init_op: Operation that runs in every new session, of the chief and of the other
            tasks.
        ready_op: String tensor with the names of what is not ready, empty when all is. None checks
            nothing.
        ready_for_local_init_op: The same for what ``local_init_op`` needs. None checks nothing.
        graph: Graph of the sessions. Default: the default graph.
        recovery_wait_secs: Seconds between two looks at a ready operation of the user's own.
            Variables need no looks: their tasks report them ready at once.
        local_init_feed_dict: Feeds of ``local_init_op``.

    Raises:
        ValueError: ``ready_for_local_init_op`` was given without ``local_init_op``.

    Examples:
        >>> import harness
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     v = rt.Variable(1.0, name="v")
        ...     with harness.SessionManager().prepare_session("", init_op=v.initializer) as session:
        ...         float(session.run(v))
        1.0
    """

    def __init__(
        self,
        local_init_op: Element | None = None,
        ready_op: Element | None = None,
        ready_for_local_init_op: Element | None = None,
        graph: rt.Graph | None = None,
        recovery_wait_secs: float = 30,
        local_init_feed_dict: Feeds | None = None,
    ) -> None:
        if ready_for_local_init_op is not None and local_init_op is None:
            raise ValueError(
                "If you pass a ready_for_local_init_op, you must also pass a local_init_op: it is "
                "what it is for"
            )
        self._graph = graph or rt.get_default_graph()
        self.operations = ReadyOperations(
            local_init_op,
            local_init_feed_dict,
            ready_op,
            ready_for_local_init_op,
            recovery_wait_secs,
        )
        """Operations that run in every new session, and say if the model is ready."""
        self.grace_period = GracePeriod(Coordinator())
        """Grace period whose end ends waits.

        A run sets its own. The waits of a manager that a program uses alone end by their limits.
        """
        # Kept by target, as the leadership of a chief must outlive the session that has claimed it.
        self._records: dict[tuple[str, TaskRole], RunRecords] = {}
        self._model = ModelInspector(self._graph)
        self.series = ""
        """Name of the series of checkpoints that the run saves (``checkpoint_basename``); empty where not known."""

    @property
    def probe(self) -> rt.Tensor:
        """A tensor that touches every task with variables: to fetch the tensor finds a lost task."""
        return self._model.missing

    # -- the three ways ----------------------------------------------------------------------------

    def prepare_session(
        self,
        master: str,
        init_op: Element | None = None,
        saver: CheckpointSaver | None = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float | None = times.GIVE_UP_SECS,
        config: rt.SessionConfig | None = None,
        init_feed_dict: Feeds | None = None,
        init_fn: Callable[[rt.Session], object] | None = None,
        *,
        recovering: bool = False,
    ) -> rt.Session:
        """Opens a session as the chief: keeps a live model, else restores, else initialises.

        No task trains while variables get values. The ps tasks are informed first, and cut off
        sessions that used older values (docs/guarantees.md). Lost steps are logged.

        Args:
            master: Session target.
            init_op: Operation that gives all variables values.
            saver: Saver that restores; None restores nothing.
            checkpoint_dir: Directory of the checkpoints.
            checkpoint_filename_with_path: Path of one checkpoint, instead of the newest of a
                directory.
            wait_for_checkpoint: True to wait for a checkpoint before the model is initialised.
            max_wait_secs: Seconds to wait for tasks, and for a checkpoint.
            config: Session options. Without device filters ``readiness.default_filters`` are used.
            init_feed_dict: Feeds of ``init_op``.
            init_fn: Function that is called with the session after ``init_op``; not for a restored
                or live model.
            recovering: True if this process has trained in the run before; for the log.

        Raises:
            RuntimeError: Nothing can make the model ready, or the model is not ready after all.
            TrainingOver: The run has finished, and a launcher has started this task again since.
            DeadlineExceededError: Tasks did not answer in time. The message names them.
            ValueError: Both kinds of checkpoint location were given.
        """
        # TF1 has the same check, with these words.
        if checkpoint_dir and checkpoint_filename_with_path:
            raise ValueError(
                "Can not provide both checkpoint_dir and checkpoint_filename_with_path."
            )
        options = policy.StartOptions(
            concurrency.monotonic() + readiness.limit_secs(config, max_wait_secs),
            init_op is not None or init_fn is not None or self.operations.local_init_op is not None,
            wait_for_checkpoint,
            recovering,
            # A launcher counts the starts of a task. A task that is started by hand counts as a new
            # run.
            attempt(os.environ) > 0,
        )
        return self._start_session(
            SessionRequest(
                TaskRole.CHIEF,
                master,
                config,
                options,
                self.records(master, config, TaskRole.CHIEF),
                init_op,
                init_feed_dict,
                init_fn,
                saver,
                checkpoint_dir,
                checkpoint_filename_with_path,
                self.series,
            )
        )

    def wait_for_session(
        self,
        master: str,
        config: rt.SessionConfig | None = None,
        max_wait_secs: float | None = math.inf,
    ) -> rt.Session:
        """Opens a session as a task that is not the chief: waits until the chief has made the model ready.

        Args:
            master: Session target.
            config: Session options. Without device filters ``readiness.default_filters`` are used.
            max_wait_secs: Seconds to wait; None is without a limit.

        Raises:
            TrainingOver: The chief has finished training.
            DeadlineExceededError: The model was not ready in time. The message names what was
                missing.
        """
        options = policy.StartOptions(
            concurrency.monotonic() + readiness.limit_secs(config, max_wait_secs)
        )
        records = self.records(master, config, TaskRole.OTHER)
        return self._start_session(SessionRequest(TaskRole.OTHER, master, config, options, records))

    # -- their parts -------------------------------------------------------------------------------

    def records(
        self, master: str, config: rt.SessionConfig | None, role: TaskRole
    ) -> RunRecords | None:
        """Returns the run records behind a target; None for a session that shares nothing.

        Args:
            master: Session target.
            config: Session options of the user's.
            role: Role of this task.
        """
        if not master:
            return None
        # A process may play both parts, as tests do, and only a chief's records may lead.
        key = (master, role)
        if key not in self._records:
            self._records[key] = RunRecords(
                master,
                readiness.filtered(config, self._graph, times.ATTEMPT_SECS),
                is_chief=role is TaskRole.CHIEF,
            )
        return self._records[key]

    def _start_session(self, request: SessionRequest) -> rt.Session:
        return SessionStart(request, self._model, self.operations, self.grace_period).run()
