"""Parts of a save: its handle, its progress, the states that ride along, and the step that it is called by."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from harness.checkpoints import layout, names
from runtime import GraphKeys, InvalidArgumentError, OpError, Session, Tensor, Variable
from runtime.lowlevel import Snapshot, storage

PROGRESS_SECS = 2.0
"""A save that takes longer says every so many seconds how far it is."""


class SaveHandle:
    """A save that goes on in the background.

    Attributes:
        step: the step that is saved.
        blocked_secs: how long ``Saver.save`` held up its caller.
        paused_secs: how long the tasks held back updates, within that.
    """

    def __init__(self, step: int, paused_secs: float) -> None:
        self.step = step
        self.blocked_secs = 0.0
        self.paused_secs = paused_secs
        self._done = threading.Event()
        self._path = ""
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the end of the save and gives the checkpoint's path.

        Raises:
            TimeoutError: it did not end within ``timeout`` seconds.
            OpError: why the save failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} has not ended after {timeout} s")
        if self._error is not None:
            raise self._error
        return self._path

    def exception(self) -> BaseException | None:
        """Why the save failed; None while it runs and when it has not."""
        return self._error

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the save, well or not; gives whether it has come within ``timeout`` seconds."""
        return self._done.wait(timeout)

    def end(self, path: str, error: BaseException | None) -> None:
        """Tells that the save has ended."""
        self._path, self._error = path, error
        self._done.set()


def log_progress(handle: SaveHandle, sess: Session, snapshot: Snapshot) -> None:
    """Says every so many seconds how far a save is, until it has ended."""
    started = time.monotonic()
    while not handle.wait(PROGRESS_SECS):
        try:
            done = sess.checkpoint_coordinator.progress(snapshot)
        except OpError:
            continue  # the save itself will say what is wrong
        logging.info(
            "saving step %d: %.0f%% of %.1f MB after %.0f s",
            handle.step,
            100 * done / max(snapshot.nbytes, 1),
            snapshot.nbytes / 1e6,
            time.monotonic() - started,
        )


class RequestedStates:
    """The states of all tasks, asked for at once and awaited later: a task that does not answer holds nobody up."""

    def __init__(self, sess: Session) -> None:
        self._states: dict[str, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._request, args=(sess,), name="checkpoint-states")
        self._thread.start()

    def _request(self, sess: Session) -> None:
        try:
            for task, states in sess.checkpoint_coordinator.states().items():
                self._states[task] = {name: json.loads(value) for name, value in states.items()}
        except OpError as error:
            logging.warning("the trainer's states are not in this checkpoint: %s", error)

    def result(self) -> dict[str, dict[str, Any]]:
        """By task, the states that have come."""
        self._thread.join()
        return self._states


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


def next_step(series: str) -> int:
    """The number of a checkpoint that is given none."""
    return max((s.number for s in layout.steps_in(series)), default=-1) + 1


def step_of(sess: Session, saved: Sequence[names.Saved], given: Any) -> tuple[int | None, str]:
    """(step, ""), or (None, key of the variable whose value in the cut is the step)."""
    if given is None:
        collected = sess.graph.get_collection(GraphKeys.GLOBAL_STEP)
        given = collected[0] if collected else None
        if given is None:
            return None, ""
    if isinstance(given, str):
        given = sess.graph.as_graph_element(given)
    if isinstance(given, Variable | Tensor):
        for s in saved:
            if given is s.variable or (isinstance(given, Tensor) and given.name == s.variable.name):
                return None, s.name
        given = sess.run(given)
    try:
        step = int(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"global_step must be a number, a variable or its name, not {given!r}") from error
    if step < 0:
        raise InvalidArgumentError(f"global_step {step} is negative: it cannot name a checkpoint")
    return step, ""
