"""Saver: checkpoints of the variables of a session, written by the tasks that hold them, readable by plain Orbax."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from harness.checkpoints import layout, names
from harness.checkpoints.layout import (
    CheckpointState,
    checkpoint_exists,
    find_checkpoint,
    get_checkpoint_state,
    latest_checkpoint,
)
from harness.checkpoints.manifest import quick_problems, read_manifest, wrong_files
from harness.checkpoints.reader import (
    CheckpointReader,
    list_variables,
    load_checkpoint,
    load_variable,
)
from harness.checkpoints.retention import Retention
from harness.checkpoints.save_job import History, SaveHandle, SaveJob
from harness.checkpoints.states import restore_states
from harness.coordinator import underlying
from runtime import DataLossError, Graph, GraphKeys, NotFoundError, Session, Variable
from runtime.lowlevel import ArraySlice, storage
from runtime.lowlevel import metrics as process_metrics

__all__ = [
    "CheckpointReader",
    "CheckpointState",
    "SaveHandle",
    "Saver",
    "checkpoint_exists",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]

_NO_METRIC = (
    "the checkpoint of step %d has no metric %r and counts as the worst: tell it by saver.report() before it is saved"
)
TF_NEVER_HOURS = 10000.0
"""TF1's default of ``keep_checkpoint_every_n_hours``, which means: do not."""


class Saver:
    """Saves and restores variables.

    ``save(sess, "logdir/model.ckpt", step)`` makes ``logdir/model.ckpt/<step>``: a plain Orbax checkpoint, in which a
    partitioned variable is one array. It is there as a whole or not at all, whatever dies when.

    Args:
        var_list: what to save: None for all global variables there are now, a list of variables, or a dictionary from
            names in the checkpoint to variables.
        max_to_keep: the last so many checkpoints are kept; None or 0 keeps all.
        keep_checkpoint_every_n_hours: besides, one is kept for every so many hours.
        sharded: every task writes its own variables whatever is given here; TF1 scripts pass it.
        pad_step_number: pad the step in the name with zeros to eight digits, in a series that is new.
        allow_empty: saving nothing is no error.
        defer_build: look for the variables when the first save or restore comes.
        max_to_keep_best: besides, the best so many by ``best_metric`` are kept.
        best_metric: name of the metric among those given to ``save`` or ``report``.
        best_mode: whether "min" or "max" is best.
        partial: restore also from a checkpoint that lacks variables, such as one of an earlier version of the model. A
            variable that it lacks gets its initial value. The next checkpoint has it, so this happens once.
        transfer: "shared" when all tasks see the directory; "stream" when only the chief does: the tasks send it
            what it writes, a few MiB at a time.

    Raises:
        ValueError: there is nothing to save, or a variable has two names.
        TypeError: ``var_list`` is something else.
    """

    def __init__(
        self,
        var_list: Any = None,
        *,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        sharded: bool = True,
        pad_step_number: bool = False,
        allow_empty: bool = False,
        defer_build: bool = False,
        max_to_keep_best: int = 0,
        best_metric: str = "",
        best_mode: str = "min",
        partial: bool = False,
        transfer: str = "shared",
    ) -> None:
        if transfer not in ("shared", "stream"):
            raise ValueError(f"transfer is 'shared' or 'stream', not {transfer!r}")
        if max_to_keep_best and not best_metric:
            raise ValueError("max_to_keep_best needs best_metric, the name of a metric given to save()")
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode is 'min' or 'max', not {best_mode!r}")
        if defer_build and var_list:
            raise ValueError("If `var_list` is provided then build cannot be deferred: leave one of them out")
        hours = keep_checkpoint_every_n_hours
        self._retention = Retention(
            max_to_keep,
            None if hours is None or hours >= TF_NEVER_HOURS else hours,
            max_to_keep_best,
            best_metric,
            best_mode,
            8 if pad_step_number else None,
        )
        self._var_list = var_list
        self._allow_empty = allow_empty
        self._partial = partial
        self._stream = transfer == "stream"
        self._saved: dict[Variable, ArraySlice] | None = None
        self._lock = threading.Lock()
        self._running: SaveHandle | None = None
        self._series: str | None = None
        self._reported: dict[str, float] = {}
        self._history = History()
        self.skipped = 0
        """Saves that were due while another one was still running."""
        if not defer_build:
            self.build()

    @property
    def failed(self) -> int:
        """Saves that failed."""
        return self._history.failed

    def build(self) -> None:
        """Looks for the variables to save in the default graph; raises as the constructor does."""
        if self._saved is None:
            saved = names.saved_variables(self._var_list)
            if not saved and not self._allow_empty:
                raise ValueError("No variables to save")
            self._saved = saved

    def _variables(self, graph: Graph) -> dict[Variable, ArraySlice]:
        with graph.as_default():  # whatever thread saves
            self.build()
        assert self._saved is not None
        return self._saved

    def not_saved(self, graph: Graph) -> list[Variable]:
        """Returns the global variables of a graph that are in no checkpoint of this Saver."""
        saved = self._variables(graph)
        return [v for v in graph.get_collection(GraphKeys.GLOBAL_VARIABLES) if v not in saved]

    # -- saving ------------------------------------------------------------------------------------------------

    def save(
        self,
        sess: Session,
        save_path: str | os.PathLike[str],
        global_step: Any = None,
        *,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
    ) -> Any:
        """Saves the variables as they are at this instant, between two steps of every worker.

        The caller is held up for the milliseconds in which the tasks take references to their variables; the rest
        happens in the background, while training goes on.

        Args:
            sess: a session of the cluster.
            save_path: ``logdir/model.ckpt``; made when it is not there.
            global_step: the step in the name: a number, or the variable (or its name) whose value in this checkpoint
                it is. Without it the graph's global step, or the next free number.
            metrics: what ``best_metric`` is looked up in; by default what was reported since the checkpoint before.
            wait: return when the checkpoint is on disk.

        Returns:
            With ``wait`` the checkpoint's path; else a ``SaveHandle``, or None when a save is still running and this
            one was skipped. None when there is nothing to save and ``allow_empty``.

        Raises:
            FailedPreconditionError: a variable is not initialised; names it.
            ResourceExhaustedError: the disk is full; earlier checkpoints are not touched.
            AbortedError: another chief has taken over, or a task restarted.
            ValueError: the path cannot be a directory, or ``metrics`` lacks ``best_metric``.
        """
        started = time.monotonic()
        sess = underlying(sess)
        saved = self._variables(sess.graph)
        if not saved:
            return None
        series = os.fspath(save_path).rstrip("/")
        check_path(series)
        if metrics is not None:
            self._check_metrics(metrics)
        with self._lock:
            running = self._running
            metrics = metrics or self._reported or None
            if running is not None and not running.done() and not wait:
                self.skipped += 1
                process_metrics.add("checkpoints_skipped_total")
                logging.info("the save of step %d still runs: this one is skipped", running.step)
                return None
        if running is not None:
            running.wait()
        job = SaveJob(
            sess,
            series,
            names.written(saved),
            stream=self._stream,
            retention=self._retention,
            metrics=metrics,
            history=self._history,
        )
        handle = job.take(global_step)
        with self._lock:
            self._running = handle
            self._series = series
            if self._reported is metrics:
                self._reported = {}
        if metrics is None and self._retention.best:
            logging.log_first_n(logging.WARNING, _NO_METRIC, 1, handle.step, self._retention.metric)
        job.start()
        handle.blocked_secs = time.monotonic() - started
        return handle.result() if wait else handle

    def report(self, **metrics: float) -> None:
        """Tells how good the model is now: the next checkpoint has these metrics, whoever begins to save it.

        So the best are kept where a Supervisor, a monitored session or a hook saves by the clock:
        ``Supervisor(saver=saver)``, and in the loop ``saver.report(loss=test_loss)`` after each test.

        Raises:
            ValueError: ``best_metric`` is not among them, or one is no number.
        """
        self._check_metrics(metrics)
        with self._lock:
            self._reported = dict(metrics)

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        best = self._retention.metric
        if best and best not in metrics:
            raise ValueError(f"metrics has no {best!r}, which is best_metric: it has {', '.join(metrics) or 'nothing'}")
        for name, value in metrics.items():
            try:
                float(value)
            except (TypeError, ValueError):
                raise ValueError(f"the metric {name!r} must be a number, not {value!r}") from None

    def wait(self) -> None:
        """Waits for the end of the save that is running, if there is one, well or not."""
        if self._running is not None:
            self._running.wait()

    def check_for_errors(self) -> None:
        """Raises what made the last background save fail, if it failed."""
        if self._running is not None and self._running.done():
            self._running.result()

    # -- restoring ---------------------------------------------------------------------------------------------

    def restore(self, sess: Session, save_path: str | None, *, partial: bool = False, verify: bool = True) -> None:
        """Gives the variables the values of a checkpoint, all at once on each task.

        Every task reads what it needs, however many tasks wrote it. States that are ``harness.checkpointable`` stay:
        a model that begins with trained weights is another run. ``restore_latest`` sets them.

        Args:
            sess: a session of the cluster.
            save_path: the checkpoint, as ``save`` or ``latest_checkpoint`` gave it.
            partial: leave variables alone that the checkpoint does not hold.
            verify: compare the files with their checksums first.

        Raises:
            ValueError: there is no such checkpoint.
            NotFoundError: variables are missing in it; lists all that does not fit.
            InvalidArgumentError: shapes or dtypes differ; lists all that does not fit.
            DataLossError: it is damaged; names it. No variable has changed then.
            FailedPreconditionError: a task does not see it, though this process does; names the task.
        """
        if save_path is None:
            raise ValueError("Can't load save_path when it is None.")
        sess = underlying(sess)
        if not self._variables(sess.graph):
            return
        path = _found(save_path)
        self._restore(sess, path, partial=partial, verify=verify)
        if os.path.basename(path).isdigit():
            self._series = self._series or layout.series_of(path)

    def _restore(self, sess: Session, path: str, *, partial: bool = False, verify: bool = True) -> None:
        saved = self._variables(sess.graph)
        path = storage.absolute(path)  # the tasks may have been started in other directories
        reader = CheckpointReader(path)
        pairs = names.match(reader, saved, partial=partial or self._partial)
        slices = names.restore_slices(sess, saved, pairs)
        manifest = reader.manifest
        stream = self._stream or manifest is None  # tasks read what tasks have written, and nothing else
        check = None
        if manifest is not None and verify and storage.is_local(path):
            problems = quick_problems(path, manifest)
            if problems:
                raise DataLossError(f"checkpoint {path} is damaged: {'; '.join(problems[:5])}")
            tasks = list(dict.fromkeys(s.task for s in slices))
            if stream:
                check = functools.partial(wrong_files, path, manifest.files)
            else:
                check = functools.partial(sess.checkpoint_coordinator.verify, tasks, path, manifest.files)
        if slices:
            try:
                sess.checkpoint_coordinator.restore(
                    slices,
                    reader.item,
                    ocdbt=reader.ocdbt,
                    zarr3=reader.zarr3,
                    stream=stream,
                    check=check,
                    origin=manifest.snapshot if manifest is not None else 0,
                )
            except (DataLossError, NotFoundError) as error:  # its own list of names says that all are there
                raise DataLossError(f"checkpoint {path} is damaged: {error.message}", task=error.task) from None
        lacking = [v for v in saved if v not in pairs] if self._partial else []
        if lacking:
            told = ", ".join(v.op.name for v in lacking)
            logging.warning("checkpoint %s lacks %s: initial values are taken for them", path, told)
            sess.run([v.initializer for v in lacking])

    def restore_latest(self, sess: Session, checkpoint_dir: str) -> str | None:
        """Resumes from the newest checkpoint of a directory that is whole and holds the variables.

        A newer one that is damaged or lacks variables is named in an error that is logged. What the run itself has
        saved counts first. States of this process that are ``harness.checkpointable`` are set too.

            path = saver.restore_latest(sess, "logdir")

        Args:
            sess: a session of the cluster.
            checkpoint_dir: the directory, or one checkpoint to resume from.

        Returns:
            The path of the checkpoint; None when the directory has no checkpoints at all.

        Raises:
            DataLossError: there are checkpoints, and all are damaged: nothing is initialised silently.
            FailedPreconditionError: a task does not see the newest one, though this process does.
            UnavailableError, PermissionDeniedError: the directory cannot be looked into now, or may not be.
            NotFoundError, InvalidArgumentError: none fits the graph; as ``restore``.
        """
        sess = underlying(sess)
        step, refused = layout.newest_usable(str(checkpoint_dir), lambda step: self._restore(sess, step.path))
        if step is not None:
            self._series = layout.series_of(step.path)
            self._take_states(step)
            restore_states(step.path, sess.task, sess.target)
            return step.path
        misfits = [error for error in refused.values() if not isinstance(error, DataLossError)]
        if misfits:
            raise misfits[0]
        if refused:
            raise DataLossError(
                f"all checkpoints in {checkpoint_dir} are damaged: {', '.join(refused)}; bring back a copy of one, or "
                "start afresh in another directory"
            )
        return None

    def take_states(self, checkpoint_dir: str) -> None:
        """Takes the states of the newest checkpoint that is whole: later ones hold them until their task has others.

        Args:
            checkpoint_dir: The directory of the run's checkpoints, or one checkpoint.
        """
        layout.newest_usable(str(checkpoint_dir), self._take_states)

    def _take_states(self, step: layout.Step) -> None:
        manifest = read_manifest(step.path)
        self._history.states = {t: dict(s) for t, s in manifest.states.items()} if manifest is not None else {}

    def changed_since(self, sess: Session, save_path: str) -> bool | None:
        """Whether a variable has been given a value since a checkpoint was saved, or since it was restored from it.

        Args:
            sess: a session of the cluster.
            save_path: the checkpoint.

        Returns:
            None where nobody knows: another program wrote it, or a task has restarted since.

        Raises:
            ValueError: there is no such checkpoint.
        """
        manifest = read_manifest(_found(save_path))
        if manifest is None or not manifest.snapshot:
            return None
        sess = underlying(sess)
        return sess.checkpoint_coordinator.changed(
            names.slices_of(sess, names.written(self._variables(sess.graph))), manifest.snapshot
        )

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def last_checkpoints(self) -> list[str]:
        """The checkpoints that are kept, oldest first: what the directory holds, also from runs before this one."""
        steps = [] if self._series is None else layout.steps_in(self._series)
        return [step.path for step, _ in layout.in_order(steps)]

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Tells of checkpoints of an earlier run; the directory tells as much once something is saved or restored."""
        for path in checkpoint_paths:
            if self._series is None and (found := find_checkpoint(path)) is not None:
                self._series = layout.series_of(found)


def _found(save_path: str) -> str:
    path = find_checkpoint(save_path)
    if path is None:
        raise ValueError(f"The passed save_path is not a valid checkpoint: {save_path}")
    return path


def check_path(series: str) -> None:
    """Raises ValueError unless ``series`` can be a directory of checkpoints."""
    if not os.path.basename(series):
        raise ValueError(f"save_path {series!r} has no last part: write something like logdir/model.ckpt")
    if "\\" in storage.absolute(series):
        raise ValueError(
            f"the path of checkpoints {series!r} has a backslash, which tensorstore takes for a /: rename it"
        )
    if storage.is_local(series):
        for parent in (series, os.path.dirname(series) or "."):
            if os.path.exists(parent) and not os.path.isdir(parent):
                raise ValueError(f"Parent directory of {series} doesn't exist, can't save: {parent} is a file")
