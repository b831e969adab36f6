"""A worker that sends a ps a loop without an end: an outage with an end, in a cluster that the launcher has started."""

import pathlib

import pytest

from tests.kit.processes import Program

SCRIPT = """
import os, pathlib

import jax, numpy as np
import harness
import runtime as rt

ended = pathlib.Path(os.environ["ENDED"])


def endless(value):
    return jax.lax.while_loop(lambda now: (now < np.inf).all(), lambda now: now * 0.5 + 1, value)


with harness.join_cluster() as me:
    with me.device():
        step = harness.get_or_create_global_step()
        w = rt.Variable(np.zeros(3, np.float32), name="w")
        train = rt.group(w.assign_add(np.ones(3, np.float32)), step.assign_add(1))
        with rt.device("/job:ps/task:0"):
            hang = w.assign(rt.call(endless, w, name="hang")).op
    with harness.MonitoredTrainingSession(
        me.target, me.is_chief, checkpoint_dir=os.environ["LOGDIR"], save_checkpoint_steps=20
    ) as session:
        if me.is_chief:
            while not ended.exists():
                session.run(train)
            for _ in range(50):
                session.run(train)
            steps, values = session.run([step, w])
            assert values.tolist() == [steps] * 3
            print("TRAINED ON", flush=True)
        else:
            while session.run(step) < 50:
                pass
            with rt.Session(me.target) as other:
                try:
                    other.run(hang)
                except rt.OpError as error:
                    print("ENDED", type(error).__name__, flush=True)
            ended.touch()
"""


@pytest.mark.nightly
def test_training_continues_after_endless_program(tmp_path: pathlib.Path) -> None:
    """A ps that runs an endless program ends itself, is started again, and training continues."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {
        "BELLWETHER_LIMITS": "program_secs=3",
        "ENDED": str(tmp_path / "ended"),
        "LOGDIR": str(tmp_path / "run"),
    }
    command = (
        "python",
        "-m",
        "harness.launch",
        "--ps=1",
        "--workers=2",
        "--",
        "python",
        str(script),
    )
    with Program(*command, env=env) as launch:
        launch.expect("ps/0 +. .*/job:ps/task:0 ends itself: the program [0-9a-f]{64} of ")
        launch.expect("ps/0 was killed by SIGKILL; restart 1 of 3")
        launch.expect("worker/0 +. TRAINED ON")
        assert launch.wait() == 0, launch.story()
        assert "ENDED AbortedError" in launch.story() or "ENDED UnavailableError" in launch.story()
