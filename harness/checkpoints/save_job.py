"""One save, from the snapshot on the tasks until the checkpoint is on disk."""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from absl import logging
from etils import epath

from harness.checkpoints import layout, names
from harness.checkpoints.manifest import FILE_NAME, UNCHECKED, CheckpointManifest
from harness.checkpoints.retention import RetentionRule
from runtime import (
    AbortedError,
    DataLossError,
    GraphKeys,
    InvalidArgumentError,
    OpError,
    Session,
    Tensor,
    Variable,
    concurrency,
)
from runtime.lowlevel import (
    ArraySlice,
    CheckpointCoordinator,
    CheckpointFile,
    durability,
    in_thread,
    storage,
)
from runtime.lowlevel import metrics as process_metrics


class SaveHandle(Future[str]):
    """A save in the background, whose result is the path of the checkpoint.

    Attributes:
        step: step that is saved.
        blocked_secs: seconds for which ``Saver.save`` held up the caller.
        paused_secs: seconds of these for which the tasks held updates back.
    """

    def __init__(self, step: int, paused_secs: float) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.step = step
        self.blocked_secs = 0.0
        self.paused_secs = paused_secs

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has succeeded or failed; returns False after ``timeout`` seconds."""
        return self in wait([self], timeout).done


@dataclass
class SaveHistory:
    """The results of earlier saves of a Saver.

    Attributes:
        failed: number of saves that failed.
        with_nan: names of the variables with a NaN in the last checkpoint.
        states: by task, the last known states of the trainer.
    """

    failed: int = 0
    with_nan: Sequence[str] = ()
    states: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class SaveJob:
    """One save, whose methods are the phases in order.

    ``take`` holds the caller up for milliseconds. ``start`` starts a thread, in which Orbax calls
    the phases from ``begin`` to ``confirm``, renames the checkpoint, and deletes older checkpoints.

    Attributes:
        sess: a session of the cluster.
        series: directory of checkpoints.
        saved: variables to save, with their places in the checkpoint.
        stream: True if the tasks send their arrays and this process writes.
        retention: rule of the checkpoints to keep.
        history: results of the Saver's saves, which this save updates.
        with_nan: names of the variables with a NaN, after the tasks have written.
    """

    sess: Session
    series: str
    saved: Mapping[Variable, ArraySlice]
    stream: bool
    retention: RetentionRule
    history: SaveHistory
    with_nan: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Name of the directory of the arrays below that of the checkpoint.
        self._item = ""
        self._files: list[CheckpointFile] = []

    @property
    def _coordinator(self) -> CheckpointCoordinator:
        # After a recovery a managed session has another coordinator.
        return self.sess.checkpoint_coordinator

    def take(self, global_step: object) -> SaveHandle:
        """Takes references to the variables as of one instant; raises the errors of ``Saver.save``."""
        slices = names.slices_of(self.sess, self.saved, stream=self.stream)
        step, key = _step_of(self.sess, self.saved, global_step)
        # The states are requested while updates pause, so that they fit the values.
        self._snapshot = self._coordinator.snapshot(slices, key, when_paused=self._begin_states)
        if step is None:
            step = (
                _next_step(self.series) if self._snapshot.number is None else self._snapshot.number
            )
        self.handle = SaveHandle(step, self._snapshot.paused_secs)
        return self.handle

    def _begin_states(self) -> None:
        self._states = in_thread(self._ask_states, "checkpoint-states")

    def _ask_states(self) -> dict[str, dict[str, Any]]:
        """Returns the states of all tasks.

        A thread asks while the snapshot is taken, so that a task that does not answer holds no step
        up.
        """
        found: dict[str, dict[str, Any]] = {}
        try:
            for task, states in self._coordinator.states().items():
                found[task] = {name: json.loads(value) for name, value in states.items()}
        except (OpError, ValueError) as error:
            logging.warning("the trainer's states are not in this checkpoint: %s", error)
        return found

    def start(self) -> None:
        """Starts the thread that writes the snapshot."""
        # The process waits for this thread at its end, so the thread is no daemon. A daemon that
        # waits in tensorstore while the interpreter shuts down would end the process by SIGABRT.
        threads = concurrency.ThreadGroup(f"save of step {self.handle.step}", daemon=False)
        threads.start(self._save_all, name="checkpoint-save")

    def _save_all(self) -> None:
        started = concurrency.monotonic()
        try:
            # The import takes a second, which only a process that saves spends.
            from harness.checkpoints import orbax

            orbax.open_directory(self.series).save(self.handle.step, self, self.retention)
            self._tell_divergence()
            process_metrics.add("checkpoints_total")
            process_metrics.add("checkpoint_seconds_total", concurrency.monotonic() - started)
            process_metrics.add("checkpoint_bytes_total", self._snapshot.nbytes)
            tell = functools.partial(self.handle.set_result, f"{self.series}/{self.handle.step}")
        # The error belongs to the handle, whose owner raises it.
        except BaseException as error:
            self.history.failed += 1
            process_metrics.add("checkpoints_failed_total")
            logging.error("saving step %d to %s failed: %s", self.handle.step, self.series, error)
            tell = functools.partial(self.handle.set_exception, error)
        try:
            self._coordinator.release(self._snapshot)
        except OpError as error:
            logging.info("releasing what was saved: %s", error)
        finally:
            # The result comes after the release: a caller who saves again at once finds no old job
            # on the tasks.
            tell()

    def _tell_divergence(self) -> None:
        """Warns of NaN in variables, again only when other variables have them."""
        if self.with_nan and self.with_nan != self.history.with_nan:
            sound = layout.newest_without_nan(layout.rank_steps(layout.steps_in(self.series)))
            logging.warning(
                "training has diverged: in the checkpoint of step %d there are NaN in %s; %s",
                self.handle.step,
                replace(self._manifest, with_nan=self.with_nan).nan_text,
                "there is none without"
                if sound is None
                else f"that of step {sound} has none, and is kept",
            )
        self.history.with_nan = self.with_nan

    # -- called by Orbax, in this order ------------------------------------------------------------

    def begin(self, sequence: int) -> CheckpointManifest:
        """Returns the manifest without its files.

        Args:
            sequence: number in the order of saves.
        """
        assert sequence >= 1, "saves are counted from 1"
        snapshot = self._snapshot
        # A task that is dead now keeps its last known states, with which the task resumes later.
        self.history.states.update(self._states.result())
        self._manifest = CheckpointManifest(
            self.handle.step,
            sequence,
            snapshot.epoch,
            concurrency.wall_time(),
            names.described(snapshot.slices),
            states=dict(self.history.states),
            snapshot=snapshot.job,
        )
        return self._manifest

    def write(self, item: str) -> Future[None]:
        """Starts to write: every task writes its variables into a store below a directory."""
        assert not self._item, "a save writes once"
        # Orbax gives a temporary name, and the manifest has the final one.
        self._item = os.path.basename(item).partition(layout.TEMPORARY)[0]
        return in_thread(lambda: self._write_arrays(item), "checkpoint-write")

    def _write_arrays(self, item: str) -> None:
        written = self._coordinator.write(self._snapshot, item, stream=self.stream)
        self._files = [replace(f, path=f"{self._item}/{f.path}") for f in written.files]
        self.with_nan = sorted(
            name for name, v in self._manifest.variables.items() if v.key in written.with_nan
        )
        self._check_writers(item)

    def _check_writers(self, item: str) -> None:
        found = {
            c.name for c in epath.Path(item).iterdir() if c.name.startswith(layout.STORE_OF_TASK)
        }
        wanted = set(self._snapshot.stores(stream=self.stream))
        if found != wanted:
            raise AbortedError(
                f"{item} was written by {sorted(found)} instead of {sorted(wanted)}: two chiefs "
                "are at work"
            )

    def merge(self, item: epath.Path) -> None:
        """Makes one store of the stores of the tasks."""
        storage.merge(str(item), self._snapshot.stores(stream=self.stream))

    def complete(self, temporary: str) -> None:
        """Checks a checkpoint that is complete but for its name, and adds the manifest.

        Raises:
            DataLossError: An array is missing, so the checkpoint could not be restored.
        """
        assert self._item, "the arrays come before the manifest"
        item = str(epath.Path(temporary) / self._item)
        self._check_writers(item)
        problems = storage.lacking(item, [v.stored for v in self._manifest.variables.values()])
        if problems:
            raise DataLossError(
                f"what was written for step {self.handle.step} cannot be read again: "
                f"{'; '.join(problems[:3])}"
            )
        known = {f.path for f in self._files}
        rest = []
        # Orbax adds files to those of the tasks.
        if storage.is_local(temporary):
            for path in durability.files_below(temporary):
                if path not in known and path not in UNCHECKED:
                    rest.append(
                        CheckpointFile(path, *durability.checksum(os.path.join(temporary, path)))
                    )
        manifest = replace(self._manifest, files=[*self._files, *rest], with_nan=self.with_nan)
        (epath.Path(temporary) / FILE_NAME).write_text(manifest.to_json())

    def confirm(self) -> None:
        """Raises AbortedError if another chief came while this process wrote, or was frozen.

        Without this check, a chief that wakes up late would add its checkpoint to those of its
        successor.
        """
        self._coordinator.confirm(self._snapshot)


def _next_step(series: str) -> int:
    """Returns the step of a checkpoint for which no step is given."""
    return max((s.number for s in layout.steps_in(series)), default=-1) + 1


def _step_of(
    sess: Session, saved: Mapping[Variable, ArraySlice], given: Any
) -> tuple[int | None, str]:
    """Returns (step, ""), or (None, key of the variable whose value in the snapshot is the step)."""
    if given is None:
        collected = sess.graph.get_collection(GraphKeys.GLOBAL_STEP)
        given = collected[0] if collected else None
        if given is None:
            return None, ""
    if isinstance(given, str):
        given = sess.graph.as_graph_element(given)
    # The value in the snapshot is the step of the saved variables. A value read now may be of a
    # later step.
    if isinstance(given, Variable | Tensor):
        for variable, place in saved.items():
            if given is variable or (isinstance(given, Tensor) and given.name == variable.name):
                return None, place.key
        given = sess.run(given)
    try:
        step = int(given)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"global_step must be a number, a variable or its name, not {given!r}"
        ) from error
    if step < 0:
        raise InvalidArgumentError(f"global_step {step} is negative: it cannot name a checkpoint")
    return step, ""
