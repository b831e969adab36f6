"""Evaluator: a process that follows the checkpoints of a training run and says what each is worth.

It trains nothing, holds nobody up and is waited for by nobody: it takes part in no run record. All it needs is the run
directory, and, to know at once that training is over or to end it early, any task of the cluster.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

import runtime as rt
from harness.checkpoints.layout import RUN_FILE
from harness.training import evaluations, log_directory, readiness
from harness.training.evaluations import Evaluation, Goal, Standing
from harness.training.run_end import end_mark
from runtime.lowlevel import RunRecords, storage

POLL_SECS = 1.0
"""How often the run directory and the run records are looked at."""
LOG_EVERY_SECS = 10.0
ANSWER_SECS = 5.0
SILENCE_SECS = 30.0
"""The mark of the end that an evaluator finds when it starts counts when the tasks with the variables have not answered
for so long: they come up within that time where the run goes on."""
STATE_FILE = "evaluations.json"
BEST = "best"
HELD = "held"
"""Sub-directory of the evaluator's in which a checkpoint lies while it is evaluated."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.EMLINK, errno.ENOSYS)


class Evaluator:
    """Evaluates every checkpoint of a run once, keeps the best, and can end training early.

        with rt.device(None):                      # the model, all in this process: it trains nothing
            ...
            accuracy = rt.call(...)

        def evaluate(session, step):
            return {"accuracy": float(session.run(accuracy, {images: ..., labels: ...}))}

        harness.Evaluator(evaluate, "/tmp/run", master="grpc://ps0:2222", best_by="accuracy", patience=5).run()

    ``logdir/eval`` gets events for TensorBoard, ``evaluations.json`` (what was evaluated: an evaluator that is started
    again goes on from there) and ``best/<step>``, which ``Saver.restore`` and ``latest_checkpoint`` read as any other.
    A checkpoint is held by hard links while it is evaluated, and so is the best one: whatever the trainer deletes, they
    stay, and they take no room as long as the trainer has them too. Where there are no hard links they are copied.

    Args:
        evaluate: called with a session whose variables have the values of a checkpoint, and its global step; gives
            metrics, one number for each name.
        logdir: the run directory, in a file system that this process sees.
        master: target of any task of the cluster, such as ``grpc://ps0:2222``; empty when there is none.
        name: sub-directory of ``logdir`` for what the evaluator writes, and the name of its run in TensorBoard.
        best_by: name of the metric that says which checkpoint is best; empty keeps none.
        best_mode: whether "max" or "min" of it is best.
        min_delta: how much better than the best so far counts as better.
        patience: training is asked to end after so many evaluations without a better one; None never asks.
        graph: the graph; by default the default graph. It is finalized.
        saver: what restores; by default a ``Saver`` of all global variables.
        silence_secs: a run directory says by itself that training is over. One that says so already when the evaluator
            starts is believed after so long without an answer of the cluster: its run may be about to go on.

    Raises:
        ValueError: ``patience`` without ``best_by`` or ``master``, a bad mode, or a ``logdir`` in a cloud store.
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
        saver: Any = None,
        silence_secs: float = SILENCE_SECS,
    ) -> None:
        self._goal = Goal(best_by, best_mode, min_delta, patience)
        if patience is not None and not master:
            raise ValueError("patience needs master, a task of the cluster that can be asked to end training")
        if not os.fspath(logdir) or not storage.is_local(os.fspath(logdir)):
            raise ValueError(f"the evaluator needs a run directory that is mounted here, not {os.fspath(logdir)!r}")
        if os.sep in name or name in ("", ".", ".."):
            raise ValueError(f"name is that of one sub-directory of logdir, not {name!r}")
        self._evaluate = evaluate
        self._logdir = storage.absolute(os.fspath(logdir))
        self._own = os.path.join(self._logdir, name)
        self._graph = graph if graph is not None else rt.get_default_graph()
        with self._graph.as_default():
            self._local_init_op = readiness.local_init_op(self._graph)
            restores = saver if saver is not None else readiness.saver(self._graph)
        if restores is None:
            raise ValueError("the graph has no variables: build the model before the evaluator")
        self._saver: Any = restores
        self._graph.finalize()
        self._run = _Run(self._logdir, master, silence_secs)
        self._evaluations: tuple[Evaluation, ...] = ()
        self._passed_over: set[tuple[int, float]] = set()
        self._saved_at: dict[tuple[str, int, int], float] = {}
        """When each checkpoint was saved, by its path, inode and time of change: manifests are read once."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """What was evaluated so far, by this process and those before it."""
        return self._evaluations

    @property
    def standing(self) -> Standing:
        """The best evaluation, and whether training is asked to end."""
        return evaluations.standing(self._evaluations, self._goal)

    @property
    def best_checkpoint(self) -> str | None:
        """Directory of the best checkpoint; None while there is none."""
        best = self.standing.best
        path = None if best is None else self._best_path(best)
        return path if path is not None and os.path.isdir(path) else None

    def run(self) -> Standing:
        """Evaluates until training is over and its last checkpoint was evaluated.

        Returns:
            Where the run stands then.

        Raises:
            DataLossError: the file of what was evaluated is damaged.
            OSError: the directory of this evaluator cannot be made, or be written.
            BaseException: what ``evaluate`` raises.
        """
        lock = log_directory.DirectoryLock()
        os.makedirs(self._own, exist_ok=True)
        open(self._path(RUN_FILE), "ab").close()  # a hold says nothing of what it cannot open
        own = f"evaluator {os.getpid()} on {socket.gethostname()}"
        while reason := lock.take(self._own, [own]):
            logging.log_every_n_seconds(logging.WARNING, "%s", LOG_EVERY_SECS, reason)
            threading.Event().wait(POLL_SECS)
        try:
            return self._follow()
        finally:
            lock.release()

    def _follow(self) -> Standing:
        from harness.tensorboard.writer import FileWriter  # takes a second to import

        self._evaluations = evaluations.load(self._path(STATE_FILE))
        self._tidy()
        if self._evaluations:
            logging.info("%d checkpoints have been evaluated before", len(self._evaluations))
        with contextlib.closing(FileWriter(self._own)) as writer, rt.Session("", self._graph) as session:
            if self._local_init_op is not None:
                session.run(self._local_init_op)
            while True:
                over = self._run.over()  # asked first: when it is over, all its checkpoints are there
                if (stop := self.standing.stop) and not over:
                    self._run.stop(stop)
                found = self._checkpoints()
                key = evaluations.next_key(found.keys() - self._passed_over, self._evaluations, over)
                if key is not None:
                    self._one(session, writer, key, found[key])
                elif over:
                    break
                else:
                    text = "waiting for a new checkpoint in %s%s"
                    logging.log_every_n_seconds(logging.INFO, text, LOG_EVERY_SECS, self._logdir, self._run.trouble())
                    threading.Event().wait(POLL_SECS)  # nothing tells of a new directory
        end = self.standing
        if end.best is not None:
            value = end.best.metrics[self._goal.best_by]
            logging.info("training is over; best %s: %.6g at step %d", self._goal.best_by, value, end.best.step)
        return end

    def _checkpoints(self) -> dict[tuple[int, float], str]:
        """The checkpoints of the run, by what tells them from each other."""
        from harness.checkpoints import layout

        found: dict[tuple[int, float], str] = {}
        seen: dict[tuple[str, int, int], float] = {}
        try:
            steps = [step for directory in layout.series_in(self._logdir) for step in layout.steps_in(directory)]
        except rt.UnavailableError as error:
            logging.log_every_n_seconds(logging.WARNING, "%s", LOG_EVERY_SECS, error)
            return {}
        for step in steps:
            with contextlib.suppress(OSError, rt.DataLossError):  # deleted just now, or damaged: the trainer tells
                stat = os.stat(step.path)
                known = step.path, stat.st_ino, stat.st_mtime_ns
                saved_at = self._saved_at.get(known)
                seen[known] = layout.saved_at(step) if saved_at is None else saved_at
                found[step.number, seen[known]] = step.path
        self._saved_at = seen
        return found

    def _one(self, session: rt.Session, writer: Any, key: tuple[int, float], path: str) -> None:
        step, saved_at = key
        with self._holding(path, step) as held:
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
            metrics = _numbers(self._evaluate(session, step))
            if self._goal.best_by and self._goal.best_by not in metrics:
                told = ", ".join(metrics) or "nothing"
                raise ValueError(f"evaluate() gave no {self._goal.best_by!r}, which is best_by: it gave {told}")
            new = Evaluation(step, saved_at, metrics)
            after = evaluations.added(self._evaluations, new)
            shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            logging.info("step %d: %s", step, shown)
            if evaluations.standing(after, self._goal).best == new:
                self._keep(held, new)
            writer.add_scalars(metrics, step)
            writer.flush()
            evaluations.store(self._path(STATE_FILE), after)
            self._evaluations = after
        self._tidy()

    @contextlib.contextmanager
    def _holding(self, path: str, step: int) -> Iterator[str | None]:
        """A checkpoint under a name of our own, as long as the block runs; None when it is not there any more."""
        from harness.checkpoints import layout

        held = os.path.join(self._path(HELD), str(step))
        try:
            _link_tree(path, held)
            gone = bool(layout.problems_of(layout.Step(step, held)))
        except FileNotFoundError:
            gone = True
        try:
            yield None if gone and not os.path.isdir(path) else held
        finally:
            shutil.rmtree(self._path(HELD), ignore_errors=True)

    def _keep(self, held: str, evaluation: Evaluation) -> None:
        """Gives the checkpoint that is held a place among the best; the one before it stays until that is on disk."""
        place = self._best_path(evaluation)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place):  # of the same step before it was lost and trained again, or of a process that died
            shutil.rmtree(place)
        _link_tree(held, place)

    def _tidy(self) -> None:
        """Removes what a process that died has left, and what is not the best any more."""
        shutil.rmtree(self._path(HELD), ignore_errors=True)
        best = self.standing.best
        keep = None if best is None else os.path.basename(self._best_path(best))
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(self._path(BEST)):
                if entry != keep:
                    shutil.rmtree(os.path.join(self._path(BEST), entry), ignore_errors=True)

    def _path(self, name: str) -> str:
        return os.path.join(self._own, name)

    def _best_path(self, evaluation: Evaluation) -> str:
        return os.path.join(self._path(BEST), str(evaluation.step))


def _numbers(metrics: object) -> dict[str, float]:
    """Returns what ``evaluate`` has returned, with a float for each name. Raises TypeError for anything else."""
    try:
        found = {str(name): np.asarray(value) for name, value in metrics.items()}  # type: ignore[attr-defined]
        return {name: float(value.item()) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"evaluate() returns a dict with one number for each name, not {metrics!r}") from None


class _Run:
    """Whether training is over, by its run records and its directory; and the order that it end."""

    def __init__(self, logdir: str, master: str, silence_secs: float) -> None:
        self._logdir = logdir
        self._silence_secs = silence_secs
        self._records = RunRecords(master) if master else None
        if self._records is not None:
            self._records.answer_secs = ANSWER_SECS
        self._answered_at = time.monotonic()
        self._before = end_mark(logdir)
        """The mark of the end that was there already: that of an earlier run in this directory, or of this one."""
        self._trouble = ""
        self._stopped = ""

    def over(self) -> bool:
        """Whether training is over, as far as anybody can tell now."""
        mark = end_mark(self._logdir)
        if mark is not None and mark != self._before:
            return True
        if self._records is not None:
            try:
                records = self._records.inspect().values()
            except rt.TaskLeftError:
                return True
            except rt.OpError as error:
                if isinstance(error, rt.UnauthenticatedError | rt.InvalidArgumentError | rt.NotFoundError):
                    raise
                self._trouble = str(error)
            else:
                self._answered_at, self._trouble = time.monotonic(), ""
                return any(record.phase == "finished" for record in records)
        return mark is not None and time.monotonic() - self._answered_at >= self._silence_secs

    def stop(self, reason: str) -> None:
        """Orders training to end; again each time, as a task that was started anew has forgotten it."""
        assert self._records is not None  # who has patience has a master
        if reason != self._stopped:
            logging.info("training is asked to end: %s", reason)
            self._stopped = reason
        try:
            self._records.stop(reason)
        except rt.OpError as error:
            logging.info("training is asked to end again soon: %s", error)

    def trouble(self) -> str:
        """What keeps the cluster from answering, to be added to a line of the log."""
        return f"; the cluster does not answer: {self._trouble}" if self._trouble else ""


def _link_tree(source: str, target: str) -> None:
    """Gives a directory of files that nobody changes a second name; copies them where there are no hard links.

    Raises:
        FileNotFoundError: it is being deleted.
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
