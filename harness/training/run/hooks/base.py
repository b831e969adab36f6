"""The base of hooks: code around the life of a monitored session, and around every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.start.global_step import get_global_step
from harness.training.start.readiness import Feeds

if TYPE_CHECKING:
    from harness.tensorboard.writer import FileWriter


@dataclass(frozen=True)
class SessionRunArgs:
    """The addition of a hook to a step.

    Attributes:
        fetches: Structure of fetches beside the caller's own, as in ``Session.run``; None for
            nothing.
        feed_dict: Feeds beside the caller's own.
        options: ``runtime.RunOptions``, merged with the caller's.

    Examples:
        >>> import harness
        >>> harness.SessionRunArgs("loss:0").fetches
        'loss:0'
    """

    fetches: object = None
    feed_dict: Feeds | None = None
    options: rt.RunOptions | None = None


@dataclass(frozen=True)
class SessionRunValues:
    """The result of a step for one hook.

    Attributes:
        results: Values of the hook's own fetches, in their structure; None when the hook asked for
            none.
        options: Options of the step, or None.
        run_metadata: The ``runtime.RunMetadata`` of the step; None when nobody asked for metadata.
    """

    results: Any = None
    options: rt.RunOptions | None = None
    run_metadata: rt.RunMetadata | None = None


@dataclass
class SessionRunContext:
    """The step for which a hook is called.

    Attributes:
        original_args: Arguments of the caller's ``run``.
        session: The session underneath, without hooks and recovery.
        stop_requested: True after a hook has asked training to stop.
    """

    original_args: SessionRunArgs
    session: rt.Session
    stop_requested: bool = False

    def request_stop(self) -> None:
        """Stops training.

        The present ``run`` still returns its value; then ``should_stop`` is true.
        """
        self.stop_requested = True


class SessionRunHook:
    """Base of all hooks; the methods do nothing."""

    def begin(self) -> None:
        """Adds to the graph.

        The call comes once, before the session is made and the graph is final.
        """

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Begins a session. The call comes with every new session, also after a recovery."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Returns the addition of the hook to the next step; None for nothing."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Receives the results of a step that did not raise."""

    def end(self, session: rt.Session) -> None:
        """Ends the hook while the session is still open.

        The call does not come when an error other than the end of the input ended training.
        """


class GlobalStepHook(SessionRunHook):
    """Base of the hooks that fetch the global step with every step of training."""

    _step: rt.Tensor | rt.Variable

    def begin(self) -> None:
        """Finds the global step.

        Raises RuntimeError, with the name of the hook, when there is none.
        """
        # Found here and not in the constructor: TF1 programs make hooks before the graph is whole.
        step = get_global_step()
        if step is None:
            name = type(self).__name__
            raise RuntimeError(
                f"Global step should be created to use {name}: call "
                "harness.get_or_create_global_step()"
            )
        self._step = step

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Returns the global step as a fetch."""
        return SessionRunArgs(self._step)


class EventsHook(GlobalStepHook):
    """Base of the hooks that write events.

    The hooks of a process share one writer for each directory. A session owns the file of that
    writer: the file is closed at the end of the session. A writer that the caller has given stays
    open.

    Args:
        output_dir: Directory of the events; None for none.
        summary_writer: Writer of the caller's own, used instead.
    """

    def __init__(self, output_dir: str | None, summary_writer: FileWriter | None = None) -> None:
        # A writer of the caller's own wins, and is the caller's to close.
        self._output_dir = None if summary_writer is not None else output_dir
        self.writer = summary_writer

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        if self._output_dir:
            from harness.tensorboard.writer import FileWriterCache

            self.writer = FileWriterCache.get(self._output_dir)

    def rest(self) -> None:
        """Closes the file of the directory's writer until something is added to it; flushes a writer of the caller."""
        if self.writer is None:
            return
        # The writer opens its file again when something is added, so a later session may go on with
        # it.
        if self._output_dir:
            self.writer.close()
        else:
            self.writer.flush()


@runtime_checkable
class FollowsLeader(Protocol):
    """A hook that acts only while the chief leads.

    Attributes:
        leads: Function that returns True while the chief leads; set by a monitored session.
    """

    leads: Callable[[], bool]


@runtime_checkable
class StopsEverybody(Protocol):
    """A hook that may end training on all tasks.

    Attributes:
        stop_everybody: Function that orders all tasks of the run to stop, with a reason; set by a
            monitored session.
    """

    stop_everybody: Callable[[str], None]
