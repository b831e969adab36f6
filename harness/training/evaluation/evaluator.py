"""Evaluator: a process that evaluates the checkpoints of a training run.

The evaluator trains nothing and takes part in no run record, so no task waits for the evaluator.
Only the run directory is needed. With a task of the cluster as ``master`` the end of training is
known at once, and can be ordered early.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

import runtime as rt
from harness import timeouts
from harness.checkpoints.layout import RUN_FILE
from harness.training import times
from harness.training.evaluation import evaluations
from harness.training.evaluation.evaluations import EvaluationGoal, RunStanding, StepEvaluation
from harness.training.start import log_directory, readiness
from harness.training.start.readiness import CheckpointSaver
from harness.training.stop.run_end import end_mark
from runtime import concurrency
from runtime.lowlevel import RunRecords, storage

if TYPE_CHECKING:
    from harness.tensorboard.writer import FileWriter

STATE_FILE = "evaluations.json"
BEST = "best"
HELD = "held"
"""Sub-directory of the evaluator's in which a checkpoint lies while it is evaluated."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)


class Evaluator:
    """A process that evaluates every checkpoint of a run once and keeps the best.

        with rt.device(None):           # the model lies in this process, which trains nothing
            ...
            accuracy = rt.call(...)

        def evaluate(session, step):
            return {"accuracy": float(session.run(accuracy, {images: ..., labels: ...}))}

        harness.Evaluator(evaluate, "/tmp/run", master="grpc://ps0:2222", best_by="accuracy", patience=5).run()

    The directory ``logdir/eval`` gets events for TensorBoard, the best checkpoint, and a file of
    all evaluations. The best one is ``best/<step>``, which ``Saver.restore`` and
    ``latest_checkpoint`` read as any other. An evaluator that is started again continues from
    ``evaluations.json``.

    Hard links hold a checkpoint while it is evaluated, and the best one for good, whatever the
    trainer deletes. They take no room while the trainer has the checkpoint too. Where there are no
    hard links the files are copied.

    Args:
        evaluate: Function of a session with the values of a checkpoint, and of its global step. It
            returns metrics: one number for each name.
        logdir: The run directory, in a file system that this process sees.
        master: Target of any task of the cluster, such as ``grpc://ps0:2222``; empty when there is
            none.
        name: Sub-directory of ``logdir`` for the evaluator's files, and the name of its run in
            TensorBoard.
        best_by: Name of the metric that says which checkpoint is best; empty keeps none.
        best_mode: "max" or "min": the direction of an improvement.
        min_delta: The least improvement that counts.
        patience: Number of evaluations without an improvement after which training is asked to end;
            None never asks.
        graph: The graph; by default the default graph. It is finalized.
        saver: The saver that restores; by default a ``Saver`` of all global variables.
        silence_secs: Seconds without an answer of the cluster after which an old mark of the end
            counts. A run directory may have such a mark when the evaluator starts, while its run is
            about to continue.

    Raises:
        ValueError: There is ``patience`` without ``best_by`` or ``master``, a bad mode, or a
            ``logdir`` in a cloud store.
    """

    def __init__(
        self,
        evaluate: Callable[[rt.Session, int], Mapping[str, float]],
        logdir: str | os.PathLike[str],
        *,
        master: str = "",
        name: str = "eval",
        best_by: str = "",
        best_mode: str = "max",
        min_delta: float = 0.0,
        patience: int | None = None,
        graph: rt.Graph | None = None,
        saver: CheckpointSaver | None = None,
        silence_secs: float = times.END_SILENCE_SECS,
    ) -> None:
        self._goal = EvaluationGoal(best_by, best_mode, min_delta, patience)
        # Without a cluster there is no task that could end training.
        if patience is not None and not master:
            raise ValueError(
                "patience needs master, a task of the cluster that can be asked to end training"
            )
        if not os.fspath(logdir) or not storage.is_local(os.fspath(logdir)):
            raise ValueError(
                "the evaluator needs a run directory that is mounted here, not "
                f"{os.fspath(logdir)!r}"
            )
        # The name becomes a directory, and a name with a slash could leave the run directory.
        if os.sep in name or name in ("", ".", ".."):
            raise ValueError(f"name is that of one sub-directory of logdir, not {name!r}")
        self._evaluate = evaluate
        self._logdir = storage.absolute(os.fspath(logdir))
        self._own = os.path.join(self._logdir, name)
        self._graph = graph if graph is not None else rt.get_default_graph()
        with self._graph.as_default():
            self._local_init_op = readiness.default_part(self._graph, "local_init_op")
            restores = saver if saver is not None else readiness.default_part(self._graph, "saver")
        if restores is None:
            raise ValueError("the graph has no variables: build the model before the evaluator")
        self._saver: CheckpointSaver = restores
        self._graph.finalize()
        self._run = _TrainingRun(self._logdir, master, silence_secs)
        self._evaluations: tuple[StepEvaluation, ...] = ()
        self._passed_over: set[tuple[int, float]] = set()
        self._saved_at: dict[tuple[str, int, int], float] = {}
        """When each checkpoint was saved, by its path, inode and time of change: manifests are read once."""

    @property
    def evaluations(self) -> tuple[StepEvaluation, ...]:
        """The evaluations so far, by this process and earlier processes."""
        return self._evaluations

    @property
    def standing(self) -> RunStanding:
        """The best evaluation, and the reason to end training, if any."""
        return evaluations.standing(self._evaluations, self._goal)

    @property
    def best_checkpoint(self) -> str | None:
        """The directory of the best checkpoint; None while there is none."""
        best = self.standing.best
        # A user may have deleted the directory: then there is none to return.
        path = None if best is None else self._best_path(best)
        return path if path is not None and os.path.isdir(path) else None

    def run(self) -> RunStanding:
        """Evaluates until training is over and its last checkpoint was evaluated.

        Returns:
            The standing of the run then.

        Raises:
            DataLossError: The file of the evaluations is damaged.
            OSError: The directory of this evaluator cannot be made, or be written.
            BaseException: An error of ``evaluate``.
        """
        lock = log_directory.DirectoryLock()
        os.makedirs(self._own, exist_ok=True)
        # Raises where nothing can be written there; the lock below only logs that, for the sake of
        # a chief.
        open(self._own_path(RUN_FILE), "ab").close()
        # The record of the lock names tasks. This name keeps two evaluators apart.
        own = f"evaluator {os.getpid()} on {socket.gethostname()}"
        while reason := lock.take(self._own, [own]):
            logging.log_every_n_seconds(logging.WARNING, "%s", timeouts.LOG_EVERY_SECS, reason)
            concurrency.Event().wait(times.POLL_SECS)
        try:
            return self._follow_run()
        finally:
            lock.release()

    def _follow_run(self) -> RunStanding:
        from harness.tensorboard.writer import FileWriter  # takes a second to import

        self._evaluations = evaluations.load(self._own_path(STATE_FILE))
        self._remove_leftovers()
        if self._evaluations:
            logging.info("%d checkpoints have been evaluated before", len(self._evaluations))
        with (
            contextlib.closing(FileWriter(self._own)) as writer,
            rt.Session("", self._graph) as session,
        ):
            if self._local_init_op is not None:
                session.run(self._local_init_op)
            while True:
                # Asked before the directory is read: a run that is over has all its checkpoints
                # then.
                over = self._run.over()
                # With each round, as a task that was started again has forgotten the order.
                if (stop := self.standing.stop) and not over:
                    self._run.stop(stop)
                found = self._find_checkpoints()
                key = evaluations.next_key(
                    found.keys() - self._passed_over, self._evaluations, over
                )
                if key is not None:
                    self._evaluate_checkpoint(session, writer, key, found[key])
                elif over:
                    break
                else:
                    text = "waiting for a new checkpoint in %s%s"
                    logging.log_every_n_seconds(
                        logging.INFO,
                        text,
                        timeouts.LOG_EVERY_SECS,
                        self._logdir,
                        self._run.trouble(),
                    )
                    # File systems that several hosts share send no events of new directories.
                    concurrency.Event().wait(times.POLL_SECS)
        end = self.standing
        if end.best is not None:
            value = end.best.metrics[self._goal.best_by]
            logging.info(
                "training is over; best %s: %.6g at step %d",
                self._goal.best_by,
                value,
                end.best.step,
            )
        return end

    def _find_checkpoints(self) -> dict[tuple[int, float], str]:
        """Returns the paths of the run's checkpoints, by their step and time."""
        from harness.checkpoints import layout

        found: dict[tuple[int, float], str] = {}
        seen: dict[tuple[str, int, int], float] = {}
        try:
            steps = [
                step
                for directory in layout.series_in(self._logdir)
                for step in layout.steps_in(directory)
            ]
        # The file system may be away for a while. A round without checkpoints costs nothing.
        except rt.UnavailableError as error:
            logging.log_every_n_seconds(logging.WARNING, "%s", timeouts.LOG_EVERY_SECS, error)
            return {}
        for step in steps:
            # A checkpoint may be deleted between the two looks; one that is damaged is an error in
            # the trainer's log.
            with contextlib.suppress(OSError, rt.DataLossError):
                stat = os.stat(step.path)
                known = step.path, stat.st_ino, stat.st_mtime_ns
                saved_at = self._saved_at.get(known)
                seen[known] = layout.saved_at(step) if saved_at is None else saved_at
                found[step.number, seen[known]] = step.path
        self._saved_at = seen
        return found

    def _evaluate_checkpoint(
        self, session: rt.Session, writer: FileWriter, key: tuple[int, float], path: str
    ) -> None:
        assert all(one.key != key for one in self._evaluations), "a checkpoint is evaluated once"
        step, saved_at = key
        with self._hold_checkpoint(path, step) as held:
            if held is None:
                logging.warning("%s was deleted before it was evaluated", path)
                self._passed_over.add(key)
                return
            try:
                self._saver.restore(session, held)
            except rt.DataLossError as error:
                logging.error("not evaluated: %s", error)
                self._passed_over.add(key)
                return
            metrics = _check_metrics(self._evaluate(session, step))
            if self._goal.best_by and self._goal.best_by not in metrics:
                told = ", ".join(metrics) or "nothing"
                raise ValueError(
                    f"evaluate() gave no {self._goal.best_by!r}, which is best_by: it gave {told}"
                )
            new = StepEvaluation(step, saved_at, metrics)
            after = evaluations.added(self._evaluations, new)
            shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            logging.info("step %d: %s", step, shown)
            # Kept before the evaluation is noted: a best checkpoint in the file always lies on the
            # disk.
            if evaluations.standing(after, self._goal).best == new:
                self._keep_best(held, new)
            writer.add_scalars(metrics, step)
            writer.flush()
            # Written last: an evaluator that dies before evaluates this checkpoint once more, and
            # misses none.
            evaluations.store(self._own_path(STATE_FILE), after)
            self._evaluations = after
        self._remove_leftovers()

    @contextlib.contextmanager
    def _hold_checkpoint(self, path: str, step: int) -> Iterator[str | None]:
        """Holds a checkpoint for the length of the block; yields the path, or None for a deleted checkpoint."""
        from harness.checkpoints import layout

        held = os.path.join(self._own_path(HELD), str(step))
        try:
            _link_tree(path, held)
            # The trainer may delete a checkpoint while its files are linked.
            gone = bool(layout.problems_of(layout.StoredStep(step, held)))
        except FileNotFoundError:
            gone = True
        try:
            yield None if gone and not os.path.isdir(path) else held
        finally:
            shutil.rmtree(self._own_path(HELD), ignore_errors=True)

    def _keep_best(self, held: str, evaluation: StepEvaluation) -> None:
        """Links the held checkpoint as the best.

        The best checkpoint before stays until ``_remove_leftovers``.
        """
        place = self._best_path(evaluation)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        # One of the same step may lie there: of before that step was lost, or of an evaluator that
        # died.
        if os.path.isdir(place):
            shutil.rmtree(place)
        _link_tree(held, place)

    def _remove_leftovers(self) -> None:
        """Removes the files of a process that died, and all but the best checkpoint."""
        shutil.rmtree(self._own_path(HELD), ignore_errors=True)
        best = self.standing.best
        keep = None if best is None else os.path.basename(self._best_path(best))
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self._own_path(BEST)):
                if entry != keep:
                    shutil.rmtree(os.path.join(self._own_path(BEST), entry), ignore_errors=True)

    def _own_path(self, name: str) -> str:
        return os.path.join(self._own, name)

    def _best_path(self, evaluation: StepEvaluation) -> str:
        return os.path.join(self._own_path(BEST), str(evaluation.step))


def _check_metrics(metrics: object) -> dict[str, float]:
    """Returns the metrics of ``evaluate`` as floats. Raises TypeError for anything else."""
    try:
        found = {str(name): np.asarray(value) for name, value in metrics.items()}  # type: ignore[attr-defined]
        return {name: float(value.item()) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"evaluate() returns a dict with one number for each name, not {metrics!r}"
        ) from None


class _TrainingRun:
    """The training run as the evaluator sees it, by run records and the run directory."""

    def __init__(self, logdir: str, master: str, silence_secs: float) -> None:
        self._logdir = logdir
        self._silence_secs = silence_secs
        self._records = RunRecords(master) if master else None
        # An evaluator has time, but must not hang in one question while the run ends.
        if self._records is not None:
            self._records.answer_secs = times.SHORT_ANSWER_SECS
        self._answered_at = concurrency.monotonic()
        self._before = end_mark(logdir)
        """The mark of the end at the start of the evaluator: of an earlier run in this directory, or of this one."""
        self._trouble = ""
        self._stopped = ""

    def over(self) -> bool:
        """Returns True if training is over, as far as the evaluator can know now."""
        # The mark first: it holds also when no task is left to be asked.
        mark = end_mark(self._logdir)
        if mark is not None and mark != self._before:
            return True
        if self._records is not None:
            try:
                records = self._records.inspect().values()
            except rt.TaskLeftError:
                return True
            except rt.OpError as error:
                # These are mistakes of the caller, and last. Everything else may pass.
                if isinstance(
                    error, rt.UnauthenticatedError | rt.InvalidArgumentError | rt.NotFoundError
                ):
                    raise
                self._trouble = str(error)
            else:
                self._answered_at, self._trouble = concurrency.monotonic(), ""
                return any(record.phase == "finished" for record in records)
        return (
            mark is not None and concurrency.monotonic() - self._answered_at >= self._silence_secs
        )

    def stop(self, reason: str) -> None:
        """Orders training to end, again with each call: a task that was started anew has forgotten the order."""
        assert self._records is not None  # patience needs a master
        if reason != self._stopped:
            logging.info("training is asked to end: %s", reason)
            self._stopped = reason
        try:
            self._records.stop(reason)
        except rt.OpError as error:
            logging.info("training is asked to end again soon: %s", error)

    def trouble(self) -> str:
        """Returns the reason why the cluster does not answer, as the end of a line of the log."""
        return f"; the cluster does not answer: {self._trouble}" if self._trouble else ""


def _link_tree(source: str, target: str) -> None:
    """Makes a second name for a directory of files that never change; copies them where there are no hard links.

    Raises:
        FileNotFoundError: The directory is being deleted.
    """

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copy2(one, other)

    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=link)
    except shutil.Error as error:  # a list of what went wrong with each file
        causes = error.args[0]
        if any(not os.path.exists(one) for one, _, _ in causes):
            raise FileNotFoundError(f"{source} is being deleted") from None
        raise OSError(f"{source} cannot be linked or copied to {target}: {causes[0][2]}") from None
