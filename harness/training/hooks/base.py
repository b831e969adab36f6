"""What a hook is: code that a monitored session calls around its life and around every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import runtime as rt
from harness.coordinator import Coordinator
from harness.training.global_step import get_global_step

if TYPE_CHECKING:
    from harness.tensorboard.writer import FileWriter


@dataclass(frozen=True)
class SessionRunArgs:
    """What a hook adds to a step.

    Attributes:
        fetches: fetched beside the caller's own, as in ``Session.run``; None for nothing.
        feed_dict: fed beside the caller's own.
        options: ``runtime.RunOptions``, merged with the caller's.
    """

    fetches: Any = None
    feed_dict: Mapping[Any, Any] | None = None
    options: rt.RunOptions | None = None


@dataclass(frozen=True)
class SessionRunValues:
    """What a step gave a hook.

    Attributes:
        results: the values of the hook's own fetches, in their structure; None when it asked for none.
        options: the options that the step ran with, or None.
        run_metadata: the ``runtime.RunMetadata`` of the step, or None when nobody asked for it.
    """

    results: Any = None
    options: rt.RunOptions | None = None
    run_metadata: rt.RunMetadata | None = None


@dataclass
class SessionRunContext:
    """The step that a hook is called for.

    Attributes:
        original_args: what the caller of ``run`` asked for.
        session: the session underneath, without hooks and recovery.
    """

    original_args: SessionRunArgs
    session: rt.Session
    _stop: bool = field(default=False, repr=False)

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked training to stop."""
        return self._stop

    def request_stop(self) -> None:
        """Stops training: this ``run`` still returns its value, then ``should_stop`` is true."""
        self._stop = True


class SessionRunHook:
    """Base of all hooks: each method does nothing here."""

    def begin(self) -> None:
        """Called once before the session is made; the last chance to add to the graph."""

    def after_create_session(self, session: rt.Session, coord: Coordinator) -> None:
        """Called with every new session, also after a recovery; the graph is final."""

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before every step; what it returns is added to the step."""
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after every step that did not raise."""

    def end(self, session: rt.Session) -> None:
        """Called at the end when no error but the end of the input ended training; the session is open."""


class GlobalStepHook(SessionRunHook):
    """Base of the hooks that fetch the global step with every step of training."""

    _step: rt.Tensor | rt.Variable

    def begin(self) -> None:
        """Finds the global step. Raises RuntimeError, naming the hook, when there is none."""
        step = get_global_step()
        if step is None:
            name = type(self).__name__
            raise RuntimeError(f"Global step should be created to use {name}: call harness.get_or_create_global_step()")
        self._step = step

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the global step."""
        return SessionRunArgs(self._step)


class EventsHook(GlobalStepHook):
    """Base of the hooks that write events.

    The hooks of a process share one writer for each directory. A session owns the file of that writer: the file is
    closed at the end of the session. A writer that the caller has given stays open.

    Args:
        output_dir: Directory of the events; None for none.
        summary_writer: Writer of the caller's own, used instead.
    """

    def __init__(self, output_dir: str | None, summary_writer: FileWriter | None = None) -> None:
        self._output_dir = None if summary_writer is not None else output_dir
        self.writer = summary_writer

    def begin(self) -> None:
        """Finds the global step and opens the writer."""
        super().begin()
        if self._output_dir:
            from harness.tensorboard.writer import FileWriterCache

            self.writer = FileWriterCache.get(self._output_dir)

    def rest(self) -> None:
        """Closes the file of the directory's writer until something is added to it."""
        if self._output_dir and self.writer is not None:
            self.writer.rest()


@runtime_checkable
class FollowsLeader(Protocol):
    """A hook that acts only while the chief leads.

    Attributes:
        leads: whether this chief still leads; a monitored session sets it.
    """

    leads: Callable[[], bool]


@runtime_checkable
class StopsEverybody(Protocol):
    """A hook that may end training on all tasks.

    Attributes:
        stop_everybody: orders all who take part to stop, with a reason; a monitored session sets it.
    """

    stop_everybody: Callable[[str], None]


@runtime_checkable
class KeepsState(Protocol):
    """A hook with values that are part of each checkpoint: from before the first of a session, to after the last."""

    def register_state(self, session: rt.Session, checkpoint_dir: str | None) -> None:
        """Adds the values to checkpoints, and continues with those of the newest one in the chief's directory."""

    def forget_state(self, session: rt.Session) -> None:
        """Takes the values out of the checkpoints of later runs of this process."""
