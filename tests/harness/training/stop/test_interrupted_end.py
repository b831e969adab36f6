"""A signal that comes in the part of a task's end that makes the last save costs no step."""

import pathlib
import signal

import numpy as np
import pytest

import harness
import runtime as rt
from harness import exit_codes
from harness.training.stop import ending, lifecycle, preemption
from tests.kit.interruptions import interruptions

STEPS = 3


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, exit_codes.PREEMPTED), (signal.SIGINT, exit_codes.INTERRUPTED)],
)
def test_interrupted_end_saves_last_step(
    number: int, code: exit_codes.ExitCode, tmp_path: pathlib.Path
) -> None:
    """A signal at any line of the end costs no step."""
    # it is ignored where the tests run in background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = Training(tmp_path / "whole")
        files = [str(module.__file__) for module in (lifecycle, ending, preemption)]
        for i, interruption in enumerate(interruptions(number, run.end, *files)):
            run = Training(tmp_path / str(i))
            with (
                pytest.raises(SystemExit) as ended,
                harness.preemptible(),
                exit_codes.interruptible(),
            ):
                interruption(run.end)
            assert ended.value.code == exit_codes.code(code), interruption.came
            assert harness.latest_checkpoint(run.logdir) == f"{run.logdir}/model.ckpt/{STEPS}", (
                interruption.came
            )
    finally:
        signal.signal(signal.SIGINT, before)


class Training:
    """A chief that has trained."""

    def __init__(self, logdir: pathlib.Path) -> None:
        self.logdir = str(logdir)
        with rt.Graph().as_default():
            step = harness.get_or_create_global_step()
            v = rt.Variable(np.zeros(2, np.float32), name="v")
            count = rt.group(v.assign_add(np.ones(2, np.float32)), step.assign_add(1))
            made = harness.Supervisor(
                is_chief=True,
                logdir=self.logdir,
                global_step=step,
                save_summaries_secs=0,
                summary_op=None,
            )
        self._managed = made.managed_session("")
        session = self._managed.__enter__()
        for _ in range(STEPS):
            session.run(count)

    def end(self) -> None:
        """Leaves the block of the session."""
        self._managed.__exit__(None, None, None)
