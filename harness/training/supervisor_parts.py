"""What a Supervisor is made of: its constructor, with the defaults filled in, and its read-only properties."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import runtime as rt
from harness.coordinator import LONGEST_SECS, STOP_GRACE_SECS, Coordinator
from harness.training import readiness, supervisor_checks
from harness.training.global_step import get_global_step
from harness.training.lifecycle import Lifecycle
from harness.training.session_manager import SessionManager


class SupervisorParts:
    """The constructor and the properties of ``Supervisor``, whose docstring explains the arguments."""

    USE_DEFAULT: Final = 0
    """Stands for "the default"; compared by identity, as None means "off"."""

    def __init__(
        self,
        graph: rt.Graph | None = None,
        ready_op: Any = USE_DEFAULT,
        ready_for_local_init_op: Any = USE_DEFAULT,
        is_chief: bool = True,
        init_op: Any = USE_DEFAULT,
        init_feed_dict: Mapping[Any, Any] | None = None,
        local_init_op: Any = USE_DEFAULT,
        logdir: str | os.PathLike[str] | None = None,
        summary_op: Any = USE_DEFAULT,
        saver: Any = USE_DEFAULT,
        global_step: Any = USE_DEFAULT,
        save_summaries_secs: float = 120,
        save_model_secs: float = 600,
        recovery_wait_secs: float = 30,
        stop_grace_secs: float = STOP_GRACE_SECS,
        checkpoint_basename: str = "model.ckpt",
        session_manager: SessionManager | None = None,
        summary_writer: Any = USE_DEFAULT,
        init_fn: Callable[[rt.Session], object] | None = None,
    ) -> None:
        check = supervisor_checks
        check.seconds(off=True, save_summaries_secs=save_summaries_secs, save_model_secs=save_model_secs)
        check.seconds(recovery_wait_secs=recovery_wait_secs, stop_grace_secs=stop_grace_secs)
        stop_grace_secs = min(stop_grace_secs, LONGEST_SECS)
        check.values(
            graph=graph,
            is_chief=is_chief,
            logdir=logdir,
            checkpoint_basename=checkpoint_basename,
            init_feed_dict=init_feed_dict,
            init_fn=init_fn,
        )
        check.parts(self.USE_DEFAULT, saver=saver, session_manager=session_manager, summary_writer=summary_writer)
        self._graph = graph if graph is not None else rt.get_default_graph()
        self._is_chief = is_chief
        self._coord = Coordinator()
        self._life = Lifecycle(self._coord, is_chief, stop_grace_secs)
        self._stop_grace_secs = stop_grace_secs
        self._logdir = rt.zarr.absolute(os.fspath(logdir)) if logdir else None  # tasks may run in other directories
        writes = is_chief and self._logdir is not None
        with self._graph.as_default():
            self._ready_op = readiness.ready_op(self._graph) if ready_op is self.USE_DEFAULT else ready_op
            self._ready_for_local_init_op = (
                readiness.first_of(self._graph, rt.GraphKeys.READY_FOR_LOCAL_INIT_OP)
                if ready_for_local_init_op is self.USE_DEFAULT
                else ready_for_local_init_op
            )
            self._init_op = readiness.init_op(self._graph) if init_op is self.USE_DEFAULT else init_op
            self._local_init_op = (
                readiness.local_init_op(self._graph) if local_init_op is self.USE_DEFAULT else local_init_op
            )
            self._global_step = get_global_step(self._graph) if global_step is self.USE_DEFAULT else global_step
            self._summary_op = readiness.summary_op(self._graph) if summary_op is self.USE_DEFAULT else summary_op
            self._saver = readiness.saver(self._graph) if saver is self.USE_DEFAULT and is_chief else saver
            if self._saver is self.USE_DEFAULT:
                self._saver = None  # the others neither save nor restore
            check.operations(
                self._graph,
                ready_op=self._ready_op,
                ready_for_local_init_op=self._ready_for_local_init_op,
                init_op=self._init_op,
                local_init_op=self._local_init_op,
                summary_op=self._summary_op,
                global_step=self._global_step,
            )
            asked = ready_for_local_init_op is not self.USE_DEFAULT and ready_for_local_init_op is not None
            if asked and self._local_init_op is None and local_init_op is self.USE_DEFAULT:
                self._local_init_op = rt.no_op()  # there are no local variables; what was asked for is looked at still
            self._session_manager = session_manager or SessionManager(
                local_init_op=self._local_init_op,
                ready_op=self._ready_op,
                ready_for_local_init_op=self._ready_for_local_init_op
                if asked or self._local_init_op is not None
                else None,
                graph=self._graph,
                recovery_wait_secs=recovery_wait_secs,
                patience=self._life.patience,
            )
            if isinstance(session_manager, SessionManager):
                session_manager.stop_with(self._life.patience)
        self._init_feed_dict = init_feed_dict
        self._init_fn = init_fn
        self._save_path = os.path.join(self._logdir, checkpoint_basename) if writes and self._logdir else None
        self._save_model_secs = save_model_secs if is_chief else None
        self._save_summaries_secs = save_summaries_secs if is_chief else None
        self._summary_writer: Any = None
        if summary_writer is not self.USE_DEFAULT:
            self._summary_writer = summary_writer if is_chief else None
        elif writes:
            from harness.tensorboard.writer import FileWriter

            self._summary_writer = FileWriter(str(self._logdir))
        self._writer_closed = False
        self._graph_written = False
        self._graph.finalize()

    @property
    def is_chief(self) -> bool:
        """Whether this task is the chief."""
        return self._is_chief

    @property
    def session_manager(self) -> SessionManager:
        """What opens sessions."""
        return self._session_manager

    @property
    def coord(self) -> Coordinator:
        """What stops the threads."""
        return self._coord

    @property
    def init_op(self) -> Any:
        """What gives the variables their first values."""
        return self._init_op

    @property
    def init_feed_dict(self) -> Mapping[Any, Any] | None:
        """Feeds of ``init_op``."""
        return self._init_feed_dict

    @property
    def ready_op(self) -> Any:
        """What tells whether the model is ready."""
        return self._ready_op

    @property
    def ready_for_local_init_op(self) -> Any:
        """What tells whether ``local_init_op`` may run."""
        return self._ready_for_local_init_op

    @property
    def summary_writer(self) -> Any:
        """What writes events; None on tasks that are not the chief."""
        return self._summary_writer

    @property
    def summary_op(self) -> Any:
        """What the summary timer runs."""
        return self._summary_op

    @property
    def save_summaries_secs(self) -> float | None:
        """Seconds between summaries; None on tasks that are not the chief."""
        return self._save_summaries_secs

    @property
    def global_step(self) -> Any:
        """The global step."""
        return self._global_step

    @property
    def saver(self) -> Any:
        """What saves and restores; None on tasks that are not the chief."""
        return self._saver

    @property
    def save_model_secs(self) -> float | None:
        """Seconds between checkpoints; None on tasks that are not the chief."""
        return self._save_model_secs

    @property
    def save_path(self) -> str | None:
        """First part of the checkpoints' paths; None where none are written."""
        return self._save_path
