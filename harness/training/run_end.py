"""The mark of the end: what a chief leaves in the run directory for those who see nothing else of the run."""

from __future__ import annotations

import json
import os

from absl import logging

import runtime as rt
from runtime.lowlevel import storage

END_FILE = "finished.json"
"""In the run directory: the step of the last checkpoint. A later one makes it worthless, so nobody need delete it."""


def end_mark(logdir: str) -> tuple[int, int] | None:
    """The mark that the run of a directory has ended; None where there is none, or a checkpoint has come since.

    Returns:
        The step, and when it was written as the file system tells it: what tells this mark from another.
    """
    from harness.checkpoints.saver import latest_checkpoint

    path = os.path.join(logdir, END_FILE)
    try:
        step = int(json.loads(storage.small_text(path))["step"])
        written = os.stat(path).st_mtime_ns
        newest = os.path.basename(latest_checkpoint(logdir) or "")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, rt.OpError):
        return None  # nothing that anybody could read
    return (step, written) if newest.isdigit() and int(newest) == step else None


def note_end(logdir: str, step: int | None) -> None:
    """Writes, as the chief, that training is over and which checkpoint is its last; nothing where there is none."""
    from etils import epath

    if step is None:
        return

    path = epath.Path(logdir) / END_FILE
    try:
        if not storage.is_local(logdir):
            path.write_text(json.dumps({"step": step}) + "\n")
            return
        temporary = path.with_name(f"{END_FILE}.new")
        temporary.write_text(json.dumps({"step": step}) + "\n")
        temporary.replace(path)
    except OSError as error:
        logging.warning("%s is not written, an evaluator may wait for more checkpoints: %s", path, error)
