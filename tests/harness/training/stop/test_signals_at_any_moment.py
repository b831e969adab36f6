"""SIGTERM at any moment, from the first line of a program to its last save: it ends by that, and has saved its step."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harness
import runtime as rt
from harness.exit_codes import PREEMPTED
from harness.training.stop import preemption

pytestmark = pytest.mark.chaos

SIGNALS = 60
LATEST_SECS = 0.4
"""By then the program has compiled, and saves now and then."""


class Run:
    """One start of a program, which trains until it is told to end."""

    def __init__(self, logdir: Path) -> None:
        self.logdir = str(logdir)
        self.reached = 0
        """The newest step that the program knows of."""

    def trains(
        self, session: Any, over: Callable[[], bool], fetches: list[Any], x: rt.Tensor
    ) -> None:
        while not over():
            self.reached = int(session.run(fetches, {x: np.ones((5, 20), np.float32)})[1])

    def supervisor(self) -> None:
        (train, step), x = model()
        supervisor = harness.Supervisor(
            logdir=self.logdir, global_step=step, save_model_secs=0.1, summary_op=None
        )
        with supervisor.managed_session() as session:
            self.trains(session, supervisor.should_stop, [train, step], x)

    def monitored_session(self) -> None:
        fetches, x = model()
        with harness.MonitoredTrainingSession(
            checkpoint_dir=self.logdir,
            save_checkpoint_secs=0.1,
            save_summaries_steps=None,
            save_summaries_secs=None,
        ) as session:
            self.trains(session, session.should_stop, fetches, x)


def model() -> tuple[list[Any], rt.Tensor]:
    """What a step runs, the global step last, and the input."""
    step = harness.get_or_create_global_step()
    weights = rt.Variable(np.ones((20, 10), np.float32))
    x = rt.placeholder(np.float32, [None, 20])
    loss = rt.call(lambda x, w: jnp.mean((x @ w) ** 2), x, weights)
    return [harness.Optimizer(optax.adam(1e-3)).minimize(loss, global_step=step), step], x


# files are dropped, not closed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "program", [Run.supervisor, pytest.param(Run.monitored_session, marks=pytest.mark.nightly)]
)
def test_sigterm_loses_no_step(
    program: Callable[[Run], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM at any moment ends the program and loses no step."""
    monkeypatch.setattr(preemption, "SWALLOWED_SHARE", 0.001)
    chance = random.Random(1)
    for number in range(SIGNALS):
        run = Run(tmp_path / str(number // 2))  # each second one takes up the run of the one before
        jax.clear_caches()
        killer = threading.Timer(
            chance.uniform(0, LATEST_SECS), os.kill, (os.getpid(), signal.SIGTERM)
        )
        with (
            pytest.raises(SystemExit) as ended,
            rt.Graph().as_default(),
            harness.preemptible(grace_secs=100),
        ):
            killer.start()
            try:
                program(run)
            finally:
                killer.cancel()  # what failed by itself gets none
                killer.join()
        assert ended.value.code == PREEMPTED.plain
        newest = harness.latest_checkpoint(run.logdir)
        assert run.reached == 0 or (newest is not None and int(Path(newest).name) >= run.reached), (
            number,
            newest,
        )
