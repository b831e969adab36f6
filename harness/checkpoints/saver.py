"""Saver: checkpoints of the variables of a session, written by the tasks that hold them, readable by plain Orbax."""

import functools
import os
from typing import Any

from absl import logging

from harness.checkpoints import layout, names
from harness.checkpoints.layout import find_checkpoint
from harness.checkpoints.manifest import quick_problems, read_manifest, wrong_files
from harness.checkpoints.reader import CheckpointReader
from harness.checkpoints.retention import RetentionRule
from harness.checkpoints.save_job import SaveHandle, SaveHistory, SaveJob
from harness.checkpoints.states import restore_states
from harness.coordinator import underlying
from runtime import DataLossError, Graph, GraphKeys, NotFoundError, Session, Variable, concurrency
from runtime.lowlevel import ArraySlice, explains_arguments, storage
from runtime.lowlevel import metrics as process_metrics

TF_NEVER_HOURS = 10000.0
"""TF1's default of ``keep_checkpoint_every_n_hours``, which keeps no further checkpoints."""


class Saver:
    """The saving and restoring of variables, as checkpoints that plain Orbax reads.

    ``save(sess, "logdir/model.ckpt", step)`` makes ``logdir/model.ckpt/<step>``, in which a
    partitioned variable is one array. Whatever process dies during the save, the checkpoint exists
    as a whole or not at all.

        saver = harness.Saver(max_to_keep=3)
        path = saver.save(sess, "logdir/model.ckpt", global_step)
        saver.restore(sess, path)

    Args:
        var_list: variables to save: None for all global variables of the graph, a list, or a
            dictionary from names in the checkpoint to variables.
        max_to_keep: number of last checkpoints to keep; None or 0 keeps all.
        keep_checkpoint_every_n_hours: hours between further checkpoints to keep; None keeps no
            further ones.
        sharded: not used, as every task writes its own variables; TF1 scripts pass this argument.
        allow_empty: True makes it no error to save nothing.
        defer_build: True looks for the variables at the first save or restore.
        partial: True restores also from a checkpoint that lacks variables, such as one of an
            earlier version of the model. Those variables get their initial values. The next
            checkpoint has them, so this happens once.
        transfer: "shared" if all tasks see the directory. "stream" if only the chief does: the
            chief then writes, and the tasks send a few MiB at a time.

    Raises:
        ValueError: There is nothing to save, a variable has two names, or an argument has an
            unknown value.
        TypeError: ``var_list`` is neither a list nor a dictionary of variables.
    """

    @explains_arguments
    def __init__(
        self,
        var_list: Any = None,
        *,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        sharded: bool = True,
        allow_empty: bool = False,
        defer_build: bool = False,
        partial: bool = False,
        transfer: str = "shared",
    ) -> None:
        if transfer not in ("shared", "stream"):
            raise ValueError(f"transfer is 'shared' or 'stream', not {transfer!r}")
        if defer_build and var_list:
            raise ValueError(
                "If `var_list` is provided then build cannot be deferred: leave one of them out"
            )
        hours = keep_checkpoint_every_n_hours
        # TF1 programs pass on the default of TF1, which means no further checkpoints.
        self._retention = RetentionRule(
            max_to_keep, None if hours is None or hours >= TF_NEVER_HOURS else hours
        )
        self._var_list = var_list
        self._allow_empty = allow_empty
        self._partial = partial
        self._stream = transfer == "stream"
        self._saved: dict[Variable, ArraySlice] | None = None
        self._lock = concurrency.Lock()
        self._running: SaveHandle | None = None
        self._series: str | None = None
        self._history = SaveHistory()
        self.skipped = 0
        """Number of saves that were skipped because another save was still running."""
        if not defer_build:
            self.build()

    @property
    def failed(self) -> int:
        """Number of saves that failed."""
        return self._history.failed

    def build(self) -> None:
        """Looks for the variables to save in the default graph; raises the errors of the constructor."""
        if self._saved is None:
            saved = names.saved_variables(self._var_list)
            if not saved and not self._allow_empty:
                raise ValueError("No variables to save")
            self._saved = saved

    def _find_variables(self, graph: Graph) -> dict[Variable, ArraySlice]:
        # The default graph belongs to a thread, and any thread may save.
        with graph.as_default():
            self.build()
        assert self._saved is not None
        return self._saved

    def not_saved(self, graph: Graph) -> list[Variable]:
        """Returns the global variables of a graph that are in no checkpoint of this Saver."""
        saved = self._find_variables(graph)
        return [v for v in graph.get_collection(GraphKeys.GLOBAL_VARIABLES) if v not in saved]

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        sess: Session,
        save_path: str | os.PathLike[str],
        global_step: Any = None,
        *,
        wait: bool = True,
    ) -> Any:
        """Saves the variables as of one instant between two steps of every worker.

        The tasks take references to their variables within milliseconds. The rest happens in the
        background while training continues; only ``wait`` holds the caller up.

        Args:
            sess: a session of the cluster.
            save_path: directory of the series, such as ``logdir/model.ckpt``; created if needed.
            global_step: step in the name: a number, or a variable (or its name) whose value in this
                checkpoint counts. None takes the graph's global step, or the next free number.
            wait: True returns when the checkpoint is on disk.

        Returns:
            The checkpoint's path with ``wait``, else a ``SaveHandle``. None if there is nothing to
            save, or if another save is still running and this one was skipped.

        Raises:
            FailedPreconditionError: A variable is not initialised; the message names the variable.
            ResourceExhaustedError: The disk is full. Earlier checkpoints are not touched.
            AbortedError: Another chief has taken over, or a task restarted.
            ValueError: The path cannot be a directory.
        """
        started = concurrency.monotonic()
        sess = underlying(sess)
        saved = self._find_variables(sess.graph)
        if not saved:
            return None
        series = os.fspath(save_path).rstrip("/")
        check_path(series)
        # One save at a time, also of several threads: a second snapshot would take memory of every
        # task, and could get the number of the first.
        if not self._lock.acquire(blocking=wait):
            return self._skip("save of another thread")
        try:
            running = self._running
            if running is not None:
                if not wait and not running.done():
                    return self._skip(f"save of step {running.step}")
                running.wait()
            job = SaveJob(
                sess,
                series,
                names.written_variables(saved),
                stream=self._stream,
                retention=self._retention,
                history=self._history,
            )
            handle = job.take(global_step)
            self._running = handle
            self._series = series
            job.start()
        finally:
            self._lock.release()
        handle.blocked_secs = concurrency.monotonic() - started
        return handle.result() if wait else handle

    def _skip(self, running: str) -> None:
        self.skipped += 1
        process_metrics.add("checkpoints_skipped_total")
        logging.info("the %s still runs: this one is skipped", running)

    def wait(self) -> None:
        """Waits until no save is running; a failed save raises nothing here."""
        if self._running is not None:
            self._running.wait()

    def check_for_errors(self) -> None:
        """Raises the error of the last background save if that save failed."""
        if self._running is not None and self._running.done():
            self._running.result()

    # -- restoring ---------------------------------------------------------------------------------

    def restore(
        self, sess: Session, save_path: str | None, *, partial: bool = False, verify: bool = True
    ) -> None:
        """Restores the variables from a checkpoint, all at once on each task.

        Every task reads its own parts, however many tasks wrote the checkpoint. States of
        ``harness.checkpointable`` do not change, because a model that begins with trained weights
        is another run. ``restore_latest`` sets them.

            saver.restore(sess, harness.latest_checkpoint("logdir"))

        Args:
            sess: a session of the cluster.
            save_path: path of the checkpoint, from ``save`` or ``latest_checkpoint``.
            partial: True leaves variables unchanged that the checkpoint lacks.
            verify: True compares the files with their checksums first.

        Raises:
            ValueError: There is no such checkpoint.
            NotFoundError: The checkpoint lacks variables; the message lists all misfits.
            InvalidArgumentError: Shapes or dtypes differ; the message lists all misfits.
            DataLossError: The checkpoint is damaged. No variable has changed.
            FailedPreconditionError: A task does not see the checkpoint, although this process does.
        """
        if save_path is None:
            raise ValueError("Can't load save_path when it is None.")
        sess = underlying(sess)
        if not self._find_variables(sess.graph):
            return
        path = _path_of_save(save_path)
        self._restore_variables(sess, path, partial=partial, verify=verify)
        # A checkpoint of another program belongs to no series.
        if os.path.basename(path).isdigit():
            self._series = self._series or layout.series_of(path)

    def _restore_variables(
        self, sess: Session, path: str, *, partial: bool = False, verify: bool = True
    ) -> None:
        saved = self._find_variables(sess.graph)
        # The tasks may have been started in other directories.
        path = storage.absolute(path)
        reader = CheckpointReader(path)
        pairs = names.match_arrays(reader, saved, partial=partial or self._partial)
        slices = names.restore_slices(sess, saved, pairs)
        manifest = reader.manifest
        # Tasks read only files that tasks have written. Files of other programs may be packed.
        stream = self._stream or manifest is None
        check = None
        if manifest is not None and verify and storage.is_local(path):
            problems = quick_problems(path, manifest)
            if problems:
                raise DataLossError(f"checkpoint {path} is damaged: {'; '.join(problems[:5])}")
            check = functools.partial(wrong_files, path, manifest.files)
        if slices:
            try:
                sess.checkpoint_coordinator.restore(
                    slices,
                    reader.source,
                    stream=stream,
                    check=check,
                    origin=manifest.snapshot if manifest is not None else 0,
                )
            except (DataLossError, NotFoundError) as error:
                # The checkpoint's own list has all names, so a missing array is damage.
                raise DataLossError(
                    f"checkpoint {path} is damaged: {error.message}", task=error.task
                ) from None
        lacking = [v for v in saved if v not in pairs] if self._partial else []
        if lacking:
            told = ", ".join(v.op.name for v in lacking)
            logging.warning("checkpoint %s lacks %s: initial values are taken for them", path, told)
            sess.run([v.initializer for v in lacking])

    def restore_latest(self, sess: Session, checkpoint_dir: str) -> str | None:
        """Resumes from the newest whole checkpoint of a directory that holds the variables.

        An error is logged for each newer checkpoint that is damaged or lacks variables. Checkpoints
        of the run itself come before those of other Savers. States of ``harness.checkpointable`` in
        this process are set too.

            path = saver.restore_latest(sess, "logdir")

        Args:
            sess: a session of the cluster.
            checkpoint_dir: the directory, or one checkpoint to resume from.

        Returns:
            The path of the checkpoint, or None if the directory has no checkpoints at all.

        Raises:
            DataLossError: There are checkpoints, and all are damaged. A run never begins anew
                unnoticed.
            FailedPreconditionError: A task does not see the newest checkpoint, although this
                process does.
            UnavailableError, PermissionDeniedError: The directory cannot be read now, or may not be
                read.
            NotFoundError, InvalidArgumentError: No checkpoint fits the graph; see ``restore``.
        """
        sess = underlying(sess)
        step, refused = layout.newest_usable(
            str(checkpoint_dir), lambda step: self._restore_variables(sess, step.path)
        )
        if step is not None:
            self._series = layout.series_of(step.path)
            self._take_states(step)
            restore_states(step.path, sess.task, sess.target)
            return step.path
        # A checkpoint of another model is a mistake of the program, which comes before damage.
        misfits = [error for error in refused.values() if not isinstance(error, DataLossError)]
        if misfits:
            raise misfits[0]
        if refused:
            raise DataLossError(
                f"all checkpoints in {checkpoint_dir} are damaged: {', '.join(refused)}; bring "
                "back a copy of one, or start afresh in another directory"
            )
        return None

    def take_states(self, checkpoint_dir: str) -> None:
        """Reads the states of the newest whole checkpoint, for the next checkpoints.

        A checkpoint has these states of a task until the task reports newer ones.

        Args:
            checkpoint_dir: directory of the run's checkpoints, or one checkpoint.
        """
        layout.newest_usable(str(checkpoint_dir), self._take_states)

    def _take_states(self, step: layout.StoredStep) -> None:
        manifest = read_manifest(step.path)
        self._history.states = (
            {t: dict(s) for t, s in manifest.states.items()} if manifest is not None else {}
        )

    def changed_since(self, sess: Session, save_path: str) -> bool | None:
        """Returns True if a variable was written since a checkpoint was saved or restored.

        Args:
            sess: a session of the cluster.
            save_path: path of the checkpoint.

        Returns:
            None if this is unknown: another program wrote the checkpoint, or a task has restarted
            since.

        Raises:
            ValueError: There is no such checkpoint.
        """
        manifest = read_manifest(_path_of_save(save_path))
        if manifest is None or not manifest.snapshot:
            return None
        sess = underlying(sess)
        return sess.checkpoint_coordinator.changed(
            names.slices_of(sess, names.written_variables(self._find_variables(sess.graph))),
            manifest.snapshot,
        )

    # -- what there is -----------------------------------------------------------------------------

    @property
    def last_checkpoints(self) -> list[str]:
        """Paths of the checkpoints in the directory, oldest first, including those of earlier runs."""
        steps = [] if self._series is None else layout.steps_in(self._series)
        return [step.path for _, step, _ in layout.rank_steps(steps)]


def _path_of_save(save_path: str) -> str:
    path = find_checkpoint(save_path)
    if path is None:
        raise ValueError(f"The passed save_path is not a valid checkpoint: {save_path}")
    return path


def check_path(series: str) -> None:
    """Raises ValueError unless ``series`` can be a directory of checkpoints."""
    if not os.path.basename(series):
        raise ValueError(
            f"save_path {series!r} has no last part: write something like logdir/model.ckpt"
        )
    if "\\" in storage.absolute(series):
        raise ValueError(
            f"the path of checkpoints {series!r} has a backslash, which tensorstore takes for a /: "
            "rename it"
        )
    if storage.is_local(series):
        for parent in (series, os.path.dirname(series) or "."):
            if os.path.exists(parent) and not os.path.isdir(parent):
                raise ValueError(
                    f"Parent directory of {series} doesn't exist, can't save: {parent} is a file"
                )
