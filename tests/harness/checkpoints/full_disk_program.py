"""Trains in a directory whose disk runs full, gets room again, and is full at the end.

    python -m tests.harness.checkpoints.full_disk_program FACE END DIRECTORY

FACE is supervisor or monitored, and END is room, none or SIGTERM.

While the last save waits for room, it gets some; or there is none, for as long as it waits; or a
signal comes.
"""

import logging as std_logging
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable

import numpy as np
from absl import logging
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import harness
import runtime as rt
from harness.training import times

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


class _Told(std_logging.Handler):
    """What has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self.at_the_end: Callable[[], object] | None = None
        """Done while the last save waits for room."""

    def emit(self, record: std_logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
        if self.at_the_end is not None and "the last checkpoint waits for room" in self._lines[-1]:
            print("WAITED", flush=True)
            self.at_the_end()

    def has(self, text: str) -> bool:
        return any(text in line for line in self._lines)


class _Ends(harness.SessionRunHook):
    """Says that it has ended."""

    def end(self, session: rt.Session) -> None:
        print("HOOK ENDED", flush=True)


def main() -> None:
    """Trains."""
    kind, end, directory = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    logging.set_verbosity(logging.INFO)
    told = _Told()
    logging.get_absl_logger().addHandler(told)
    v = rt.Variable(np.zeros(SIZE, np.float32), name="v")
    step = harness.get_or_create_global_step()
    harness.summary.scalar("mean", rt.call(lambda v: v.mean(), v))
    train = rt.group(v.assign_add(np.ones(SIZE, np.float32)).op, step.assign_add(1).op)
    saver = harness.Saver(max_to_keep=2)
    if kind == "supervisor":
        session = harness.Supervisor(
            logdir=str(directory),
            global_step=step,
            saver=saver,
            save_model_secs=0.1,
            save_summaries_secs=0.05,
        ).managed_session("")
    else:
        session = harness.MonitoredTrainingSession(
            "",
            checkpoint_dir=str(directory),
            scaffold=harness.Scaffold(saver=saver),
            hooks=[_Ends()],
            save_checkpoint_steps=20,
            save_summaries_steps=10,
            log_step_count_steps=10,
        )
    filler = directory / "filler"
    told.at_the_end = {
        "room": filler.unlink,
        "none": lambda: None,
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }[end]
    if end == "none":
        times.ROOM_SECS = 1.0
    try:
        with harness.preemptible(), session as sess:

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

            def no_room_for_events() -> bool:
                _fill(filler)
                return told.has("events cannot be written")

            until(no_room_for_events)
            full_at = int(sess.run(step))
            for _ in range(50):
                sess.run(train)
            print("TRAINED ON", flush=True)
            good = harness.latest_checkpoint(str(directory))
            assert good is not None
            assert np.unique(harness.load_variable(good, "v")).tolist() == [
                int(os.path.basename(good))
            ]
            print("KEPT", flush=True)
            filler.unlink()
            until(lambda: harness.latest_checkpoint(str(directory)) not in (good, None))
            until(lambda: told.has("events are written again"))
            print("SAVED AGAIN", flush=True)
            fill()
            ended_at = int(sess.run(step))
        print("ENDED WELL", flush=True)
    except rt.OpError as error:
        print(f"ENDED WITH {type(error).__name__}: {error}", flush=True)
    except SystemExit as error:
        print(f"ENDED BY {error.code}", flush=True)
    saved = harness.latest_checkpoint(str(directory))
    assert saved is not None and (int(os.path.basename(saved)) == ended_at) == (end == "room"), (
        saved,
        ended_at,
    )
    (path,) = directory.glob("events.out.tfevents.*")
    steps = [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert min(steps) < full_at < max(steps), (steps, full_at)
    print("EVENTS GO ON", flush=True)


if __name__ == "__main__":
    main()
