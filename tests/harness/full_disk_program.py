"""Trains in a directory whose disk runs full, gets room again, and is full at the end.

python -m tests.harness.full_disk_program supervisor|monitored DIRECTORY
"""

import os
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np
from absl import logging

import harness
import runtime as rt

SIZE = 1 << 17
SECS = 60.0


def _fill(path: pathlib.Path) -> None:
    """Takes what room there is; to be called again for what a save that failed has given back."""
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def main() -> None:
    """Trains."""
    kind, directory = sys.argv[1], pathlib.Path(sys.argv[2])
    logging.set_verbosity(logging.INFO)
    v = rt.Variable(np.zeros(SIZE, np.float32), name="v")
    step = harness.get_or_create_global_step()
    train = rt.group(v.assign_add(np.ones(SIZE, np.float32)).op, step.assign_add(1).op)
    saver = harness.Saver(max_to_keep=2)
    if kind == "supervisor":
        session = harness.Supervisor(
            logdir=str(directory), global_step=step, saver=saver, save_model_secs=0.1, summary_op=None
        ).managed_session("")
    else:
        session = harness.MonitoredTrainingSession(
            "",
            checkpoint_dir=str(directory),
            scaffold=harness.Scaffold(saver=saver),
            save_checkpoint_steps=20,
            save_summaries_steps=None,
            log_step_count_steps=None,
        )
    filler = directory / "filler"
    try:
        with session as sess:

            def until(condition: Callable[[], bool]) -> None:
                deadline = time.monotonic() + SECS
                while not condition():
                    sess.run(train)
                    assert time.monotonic() < deadline, "waited too long"

            def fill() -> None:
                goal = saver.failed + 2  # the first may have had its room already

                def failed() -> bool:
                    _fill(filler)
                    return saver.failed >= goal

                until(failed)

            until(lambda: len(saver.last_checkpoints) >= 2)
            fill()
            for _ in range(50):
                sess.run(train)
            print("TRAINED ON", flush=True)
            good = harness.latest_checkpoint(str(directory))
            assert good is not None
            assert np.unique(harness.load_variable(good, "v")).tolist() == [int(os.path.basename(good))]
            print("KEPT", flush=True)
            filler.unlink()
            until(lambda: harness.latest_checkpoint(str(directory)) not in (good, None))
            print("SAVED AGAIN", flush=True)
            fill()
    except rt.OpError as error:
        print(f"ENDED WITH {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
