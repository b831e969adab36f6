"""Scaffold, the operations that make a model ready, and session creators: what a monitored session is made of."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Protocol

import runtime as rt
from harness.coordinator import GracePeriod
from harness.training import times
from harness.training.start import readiness
from harness.training.start.policy import TaskRole
from harness.training.start.readiness import CheckpointSaver, Element, Feeds
from harness.training.start.session_manager import SessionManager
from harness.training.start.session_source import ManagerSource
from runtime.lowlevel import RunRecords

ScaffoldInitFn = Callable[["Scaffold", rt.Session], object]


_DEFAULTS = ("init_op", "ready_op", "local_init_op", "summary_op", "saver")
"""Parts of a scaffold that are found or made where they were not given."""
assert {*_DEFAULTS, "ready_for_local_init_op"} == readiness.PARTS.keys(), "a part is never made"


class Scaffold:
    """The operations of a graph that a monitored session needs.

    ``finalize`` makes those that are not given.

    Args:
        init_op: Operation that gives the global variables their first values.
        init_feed_dict: Feeds of ``init_op``.
        init_fn: Function of the scaffold and the session, called after ``init_op``.
        ready_op: String tensor with the names of variables that are not ready.
        ready_for_local_init_op: The same for ``local_init_op``; by default the global variables.
        local_init_op: Operation of every new session.
        summary_op: String tensor of a serialized summary.
        saver: The saver.
        copy_from_scaffold: Scaffold with the parts that are not given.

    Raises:
        TypeError: ``copy_from_scaffold`` is no Scaffold.

    Examples:
        >>> import harness
        >>> first = harness.Scaffold(init_feed_dict={"x": 1.0})
        >>> harness.Scaffold(copy_from_scaffold=first).init_feed_dict
        {'x': 1.0}
    """

    def __init__(
        self,
        init_op: Element | None = None,
        init_feed_dict: Feeds | None = None,
        init_fn: ScaffoldInitFn | None = None,
        ready_op: Element | None = None,
        ready_for_local_init_op: Element | None = None,
        local_init_op: Element | None = None,
        summary_op: Element | None = None,
        saver: CheckpointSaver | None = None,
        copy_from_scaffold: Scaffold | None = None,
    ) -> None:
        if not isinstance(copy_from_scaffold, Scaffold | None):
            raise TypeError(
                f"copy_from_scaffold is not a Scaffold instance: {copy_from_scaffold!r}"
            )
        self.init_op = init_op
        self.init_feed_dict = init_feed_dict
        self.ready_op = ready_op
        self.ready_for_local_init_op = ready_for_local_init_op
        self.local_init_op = local_init_op
        self.summary_op = summary_op
        self.saver = saver
        self._user_init_fn = init_fn
        if copy_from_scaffold is not None:
            # A part that was given here counts, so one scaffold can vary another.
            for name, given in list(vars(self).items()):
                if given is None:
                    setattr(self, name, getattr(copy_from_scaffold, name))

    @property
    def init_fn(self) -> Callable[[rt.Session], object] | None:
        """The user's ``init_fn`` as a function of the session alone."""
        user = self._user_init_fn
        return None if user is None else lambda session: user(self, session)

    def finalize(self) -> Scaffold:
        """Makes the missing operations and finalizes the graph.

        Raises:
            RuntimeError: The collection of a default holds more than one item.
        """
        graph = rt.get_default_graph()
        # Each part that is missing is looked for in the graph's collections before it is made.
        for name in _DEFAULTS:
            if getattr(self, name) is not None:
                continue
            key, _ = readiness.PARTS[name]
            if len(graph.get_collection(key)) > 1:
                raise RuntimeError(
                    f"More than one item in the collection {key!r}. Please indicate which one to "
                    "use by passing it to the Scaffold constructor."
                )
            setattr(self, name, readiness.default_part(graph, name))
        if self.ready_for_local_init_op is None and self.local_init_op is not None:
            self.ready_for_local_init_op = readiness.default_part(graph, "ready_for_local_init_op")
        # From here on a training step cannot add to the graph by mistake, which would slow each
        # step.
        graph.finalize()
        return self


class SessionCreator:
    """Base of session creators; a monitored session takes any object with ``create_session()``."""

    def create_session(self) -> rt.Session:
        """Opens a session that is ready for training."""
        raise TypeError(
            f"{type(self).__name__} does not say how to create a session: define create_session()"
        )


class TrainingSessionCreator(SessionCreator):
    """Base of the session creators of the chief and of the other tasks.

    Args:
        scaffold: Scaffold of the graph; a new one by default.
        master: Target of the sessions.
        config: Options of the sessions.
        max_wait_secs: The longest wait for the model and for tasks, in seconds, at the start and in
            each recovery.
    """

    role = TaskRole.OTHER
    checkpoint_dir: str | None = None
    """Directory of the checkpoints to restore from; None for none."""
    records: RunRecords | None = None
    """Run records behind the target; None without a cluster, and before ``equip``."""
    probe: rt.Tensor | None = None
    """Tensor that touches every task with variables; None before ``equip``."""

    def __init__(
        self,
        scaffold: Scaffold | None = None,
        master: str = "",
        config: rt.SessionConfig | None = None,
        max_wait_secs: float = times.GIVE_UP_SECS,
    ) -> None:
        self.scaffold = scaffold or Scaffold()
        """The scaffold of the graph."""
        self._master = master
        self._config = config
        self.give_up_secs = max_wait_secs
        """Seconds that a recovery takes at most; at the start ``start_timeout_secs`` counts too."""
        self._manager: SessionManager | None = None
        self._recovering = False

    def equip(self, grace_period: GracePeriod, series: str, *, recovers: bool) -> None:
        """Prepares the creator for a monitored session, when the graph is complete.

        Args:
            grace_period: The end of this period ends waits.
            series: Name of the series of checkpoints that the session saves; empty for none.
            recovers: True where a silent task is waited for, so that no step is lost or doubled.
        """
        manager = self.manager()
        # The series is known only now: it is the basename of the hook that saves.
        manager.grace_period, manager.series = grace_period, series
        # A step of a session that recovers waits for a silent task: it must be neither lost nor run
        # twice.
        if recovers:
            self._config = readiness.with_start_timeout(self._config, self.give_up_secs)
        source = self._session_source()
        self.records, self.probe = source.records, source.probe

    def manager(self) -> SessionManager:
        """Returns the session manager, and finalizes the scaffold at the first call."""
        if self._manager is None:
            graph = rt.get_default_graph()
            # The manager's own operations have to be in the graph before the scaffold finalizes it.
            if not graph.finalized:
                readiness.operations(graph)
            self.scaffold.finalize()
            self._manager = SessionManager(
                local_init_op=self.scaffold.local_init_op,
                ready_op=self.scaffold.ready_op,
                ready_for_local_init_op=self.scaffold.ready_for_local_init_op,
                graph=graph,
            )
        return self._manager

    def create_session(self) -> rt.Session:
        """Opens a session that is ready for training."""
        return self._session_source().ready(self._recovering)

    def ready(self, recovering: bool) -> rt.Session:
        """Opens a session that is ready for training, for a monitored session.

        Args:
            recovering: True in a recovery, False at the start.
        """
        self._recovering = recovering
        # A creator of the user's own may replace this method.
        return self.create_session()

    def bare(self) -> rt.Session:
        """Opens a session that need not be ready."""
        return self._session_source().bare()

    def _session_source(self) -> ManagerSource:
        graph = rt.get_default_graph()
        return ManagerSource(
            self.manager(),
            self.role,
            graph,
            self._master,
            self._config,
            self.give_up_secs,
            self._chief_operations(),
        )

    def _chief_operations(self) -> dict[str, object]:
        """Returns the further arguments of the chief's ``prepare_session``."""
        return {}


class ChiefSessionCreator(TrainingSessionCreator):
    """The maker of the chief's sessions: it keeps the live model, else restores, else initialises.

    Args:
        scaffold: Scaffold of the graph; a new one by default.
        master: Target of the sessions.
        config: Options of the sessions.
        checkpoint_dir: Directory of the checkpoints to restore from.
        checkpoint_filename_with_path: Path of the one checkpoint to restore from.
        max_wait_secs: The longest wait for tasks, in seconds.

    Examples:
        >>> import harness
        >>> creator = harness.ChiefSessionCreator(checkpoint_dir="/tmp/run")
        >>> creator.checkpoint_dir
        '/tmp/run'
    """

    role = TaskRole.CHIEF

    def __init__(
        self,
        scaffold: Scaffold | None = None,
        master: str = "",
        config: rt.SessionConfig | None = None,
        checkpoint_dir: str | None = None,
        checkpoint_filename_with_path: str | None = None,
        max_wait_secs: float = times.GIVE_UP_SECS,
    ) -> None:
        super().__init__(scaffold, master, config, max_wait_secs)
        self.checkpoint_dir = (
            rt.lowlevel.storage.absolute(os.fspath(checkpoint_dir)) if checkpoint_dir else None
        )
        self._checkpoint = checkpoint_filename_with_path

    def _chief_operations(self) -> dict[str, object]:
        scaffold = self.scaffold
        return {
            "init_op": scaffold.init_op,
            "saver": scaffold.saver,
            "checkpoint_dir": self.checkpoint_dir,
            "checkpoint_filename_with_path": self._checkpoint,
            "init_feed_dict": scaffold.init_feed_dict,
            "init_fn": scaffold.init_fn,
        }


class WorkerSessionCreator(TrainingSessionCreator):
    """The maker of the sessions of other tasks, which wait for the chief to make the model ready.

    Args:
        scaffold: Scaffold of the graph; a new one by default.
        master: Target of the sessions.
        config: Options of the sessions.
        max_wait_secs: The longest wait, in seconds.
    """

    def __init__(
        self,
        scaffold: Scaffold | None = None,
        master: str = "",
        config: rt.SessionConfig | None = None,
        max_wait_secs: float = 30 * 60,
    ) -> None:
        super().__init__(scaffold, master, config, max_wait_secs)


class OpensSessions(Protocol):
    """An object that opens the sessions of a monitored session."""

    def create_session(self) -> rt.Session:
        """Opens a session that is ready for training."""
        ...


class OwnSessionCreator(TrainingSessionCreator):
    """The face of a creator of the user's own, which counts as the chief's and takes part in no run.

    Args:
        creator: The user's creator.
    """

    role = TaskRole.CHIEF

    def __init__(self, creator: OpensSessions) -> None:
        # The user's creator may take its time; no limit of this package is meant for it.
        super().__init__(max_wait_secs=math.inf)
        self._creator = creator
        # A creator may say where its checkpoints are. It then gets the last save, as the chief's
        # does.
        self.checkpoint_dir = getattr(creator, "checkpoint_dir", None)

    def equip(self, grace_period: GracePeriod, series: str, *, recovers: bool) -> None:
        """Prepares nothing: the user's creator knows how to open a session."""

    def create_session(self) -> rt.Session:
        """Opens a session as the user's creator does."""
        return self._creator.create_session()

    bare = create_session
