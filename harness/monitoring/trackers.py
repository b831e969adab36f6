"""Experiment trackers: Weights & Biases and MLflow get the scalars that the chief writes for TensorBoard.

    tracker = harness.WandbTracker(project="mnist", config=vars(options))
    supervisor = harness.Supervisor(is_chief=me.is_chief, logdir=options.logdir, tracker=tracker)

Another tracker is an object with the three methods of `Tracker`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from absl import logging

if TYPE_CHECKING:
    from etils import epath

Outcome = Literal["finished", "failed", "interrupted"]
"""How a run has ended: training is over, it has failed, or it will be taken up again."""

MOST_WAITING = 4096
"""What is written while so many writes wait for a tracker is lost to it."""
RETRY_SECS = 60.0
"""A tracker that could not begin is tried again after so long."""
FINISH_SECS = 30.0
"""So long the end of training waits for a tracker."""
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Tracker(Protocol):
    """What keeps the figures of a run elsewhere. One thread calls it, and its errors are logged, never raised.

    Attributes:
        name: what the tracker is called, in log lines and in the name of the file with the id of its run.
    """

    name: str

    def begin(self, logdir: str, run_id: str | None) -> str:
        """Begins to track, on the chief, when training begins.

        Args:
            logdir: the log directory of the run.
            run_id: what ``begin`` gave when a chief of the same log directory began before, so that its run goes on;
                None the first time.

        Returns:
            The id of the run: up to 128 letters, digits, ``-`` and ``_``.
        """
        ...

    def log(self, scalars: Mapping[str, float], step: int | None) -> None:
        """Gives it one number for each tag. Steps go back where training goes on from a checkpoint.

        Args:
            scalars: by tag, such as ``loss`` or ``pull_ms/worker_1``; NaN and infinities among them.
            step: the global step; None where there is none.
        """
        ...

    def finish(self, outcome: Outcome) -> None:
        """Ends tracking; what was given is kept when it returns."""
        ...


@runtime_checkable
class TellsScalars(Protocol):
    """What writes scalars and tells of each: a ``FileWriter``.

    Attributes:
        on_scalars: called with each number that is written, by tag, and its step.
    """

    on_scalars: Callable[[Mapping[str, float], int | None], object] | None


class TrackedRun:
    """Gives a tracker what is written, from a thread of its own: one that is slow or fails costs training nothing.

    Args:
        tracker: the tracker.
        logdir: where the id of its run is kept, so that a chief that starts again goes on with it.
    """

    def __init__(self, tracker: Tracker, logdir: str) -> None:
        self._tracker = tracker
        self._logdir = logdir
        self._waiting: queue.Queue[tuple[Mapping[str, float], int | None] | None] = queue.Queue(MOST_WAITING)
        self._outcome: Outcome = "interrupted"
        self._ending = threading.Event()
        self._failing = False
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"track-{tracker.name}", daemon=True)
        self._thread.start()

    def put(self, scalars: Mapping[str, float], step: int | None) -> None:
        """Takes what was written; never waits."""
        try:
            self._waiting.put_nowait((scalars, step))
        except queue.Full:
            self._lost += 1

    def finish(self, outcome: Outcome) -> None:
        """Ends tracking, waiting a while for what was not given yet. Does nothing the second time."""
        if self._ending.is_set():
            return
        self._outcome = outcome
        self._ending.set()
        with contextlib.suppress(queue.Full):  # then the thread is awake, and finds out when it has taken the last
            self._waiting.put_nowait(None)
        self._thread.join(FINISH_SECS)
        if self._thread.is_alive():
            logging.warning("%s is still busy after %g s: the run goes without it", self._tracker.name, FINISH_SECS)
        if self._lost:
            logging.warning("%s lacks %d of the writes of this run", self._tracker.name, self._lost)

    def _work(self) -> None:
        while not self._try(self._begin):
            if self._ending.wait(RETRY_SECS):
                self._lost += self._waiting.qsize() - 1
                return
        while True:
            try:
                item = self._waiting.get(block=not self._ending.is_set())
            except queue.Empty:
                break
            if item is not None and not self._try(functools.partial(self._tracker.log, *item)):
                self._lost += 1
        self._try(lambda: self._tracker.finish(self._outcome))

    def _try(self, call: Callable[[], object]) -> bool:
        """Whether the tracker did it; the first failure of a row of them is logged."""
        try:
            call()
        except Exception as error:  # a library's own kinds
            if not self._failing:
                logging.warning(
                    "%s does not take what this run writes (training goes on without it): %s: %s",
                    self._tracker.name,
                    type(error).__name__,
                    error,
                )
            self._failing = True
            return False
        if self._failing:
            logging.info("%s takes what this run writes again", self._tracker.name)
        self._failing = False
        return True

    def _begin(self) -> None:
        path = self._path()
        before = path.read_text()[:256].strip() if path.exists() else None
        if before is not None and not _RUN_ID.fullmatch(before):
            logging.warning("%s holds no id of a run: %s begins a new one", path, self._tracker.name)
            before = None
        run_id = self._tracker.begin(self._logdir, before)
        if run_id != before:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            unfinished.write_text(run_id)
            unfinished.replace(path)
        logging.info("%s tracks this run as %s", self._tracker.name, run_id)

    def _path(self) -> epath.Path:
        from etils import epath

        return epath.Path(self._logdir) / f"{self._tracker.name}.run_id"


class WandbTracker:
    """Weights & Biases (``pip install wandb``). ``WANDB_MODE=offline`` needs no account and no network.

    Args:
        config: the settings of the run, such as ``vars(options)`` or ``flags.FLAGS.flag_values_dict()``.
        **init: further arguments of ``wandb.init``, such as ``project``, ``name``, ``tags``, ``mode``.

    Raises:
        ImportError: wandb is not installed.
    """

    name = "wandb"

    def __init__(self, config: Mapping[str, object] | None = None, **init: Any) -> None:
        _check_installed("wandb")
        self._config = config
        self._init = init
        self._run: Any = None

    def begin(self, logdir: str, run_id: str | None) -> str:
        """Begins a run, or goes on with one; see ``Tracker``."""
        import wandb

        place = {} if "://" in logdir else {"dir": logdir}
        if place:
            os.makedirs(logdir, exist_ok=True)
        self._run = wandb.init(**{**place, "id": run_id, "resume": "allow", **self._init})
        if self._config:
            self._run.config.update(dict(self._config), allow_val_change=True)
        # Its own steps never go back; ours do where training goes on from a checkpoint.
        self._run.define_metric("*", step_metric="global_step")
        return str(self._run.id)

    def log(self, scalars: Mapping[str, float], step: int | None) -> None:
        """Logs them under ``global_step``; see ``Tracker``."""
        self._run.log(dict(scalars) if step is None else {**scalars, "global_step": step})

    def finish(self, outcome: Outcome) -> None:
        """Finishes the run; see ``Tracker``."""
        if outcome == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class MlflowTracker:
    """MLflow (``pip install mlflow-skinny``).

    Args:
        experiment: the name of the experiment, made if it is not there.
        config: the settings of the run, such as ``vars(options)``. MLflow keeps the first value of each.
        run_name: the name of the run.
        tracking_uri: where MLflow keeps runs; ``MLFLOW_TRACKING_URI`` by default.
        tags: of the run.

    Raises:
        ImportError: mlflow is not installed.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment: str = "Default",
        config: Mapping[str, object] | None = None,
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        _check_installed("mlflow")
        self._experiment = experiment
        self._config = dict(config or {})
        self._run_name = run_name
        self._tracking_uri = tracking_uri
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run_id = ""

    def begin(self, logdir: str, run_id: str | None) -> str:
        """Begins a run, or goes on with one; see ``Tracker``."""
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        given = {_legal(name): str(value)[:_MOST_CHARACTERS] for name, value in self._config.items()}
        before = self._found(run_id)
        if before is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            tags = {"bellwether.logdir": logdir, **self._tags}
            self._run_id = self._client.create_run(experiment, tags=tags, run_name=self._run_name).info.run_id
        else:
            self._run_id = before.info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            known = before.data.params
            if changed := sorted(name for name in given.keys() & known.keys() if given[name] != known[name]):
                logging.warning("mlflow keeps the first values of %s of run %s", ", ".join(changed), self._run_id)
            given = {name: value for name, value in given.items() if name not in known}
        params = [Param(name, value) for name, value in given.items()]
        for at in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[at : at + _MOST_PARAMS])
        return self._run_id

    def _found(self, run_id: str | None) -> Any:
        """The run that goes on; None where there is none, or it is in another store."""
        from mlflow.exceptions import MlflowException

        try:
            return None if run_id is None else self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logging.warning("mlflow does not know run %s: it begins a new one", run_id)
            return None

    def log(self, scalars: Mapping[str, float], step: int | None) -> None:
        """Logs them; see ``Tracker``."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_legal(tag), value, now, step or 0) for tag, value in scalars.items()]
        for at in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + _MOST_METRICS])

    def finish(self, outcome: Outcome) -> None:
        """Ends the run; see ``Tracker``."""
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[outcome]
        self._client.set_terminated(self._run_id, status)


def _check_installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{module} is not installed: pip install {module}")


_MOST_PARAMS, _MOST_METRICS, _MOST_CHARACTERS = 100, 1000, 6000
"""What MLflow takes in one request, and of one parameter."""


def _legal(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w\-. /:]", "_", name)[:250]
