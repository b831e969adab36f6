"""The mark of the end: a file that a chief leaves in the run directory, with the step of the last checkpoint.

An evaluator that sees only the directory reads the mark, and waits for no further checkpoint.
"""

import json
import os

from absl import logging

import runtime as rt
from runtime.lowlevel import durability, storage

END_FILE = "finished.json"
"""Name of the file in the run directory.

A later checkpoint makes the mark void, so no task deletes it.
"""


def end_mark(logdir: str) -> tuple[int, int] | None:
    """Returns the mark of a directory whose run has ended; None without a mark, or after a later checkpoint.

    Args:
        logdir: Directory of the run.

    Returns:
        The step, and the time of the file in nanoseconds, which tells two marks apart.
    """
    from harness.checkpoints.layout import latest_checkpoint, step_of

    path = os.path.join(logdir, END_FILE)
    try:
        step = int(json.loads(durability.small_text(path))["step"])
        written = os.stat(path).st_mtime_ns
        newest = step_of(latest_checkpoint(logdir) or "")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, rt.OpError):
        # A file that cannot be read is no mark.
        return None
    return (step, written) if newest == step else None


def note_end(logdir: str, step: int | None) -> None:
    """Writes the mark, as the chief; does nothing without a checkpoint.

    Args:
        logdir: Directory of the run.
        step: Step of the last checkpoint; None where there is none.
    """
    from etils import epath

    if step is None:
        return

    path = epath.Path(logdir) / END_FILE
    try:
        # A cloud store has no rename, and writes a small object whole.
        if not storage.is_local(logdir):
            path.write_text(json.dumps({"step": step}) + "\n")
            return
        temporary = path.with_name(f"{END_FILE}.new")
        temporary.write_text(json.dumps({"step": step}) + "\n")
        temporary.replace(path)
    except OSError as error:
        logging.warning(
            "%s is not written, an evaluator may wait for more checkpoints: %s", path, error
        )
