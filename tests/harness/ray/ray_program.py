"""A driver of ``harness.ray``: starts a Ray of this machine, or joins the one of RAY_ADDRESS, and trains on it.

python -m tests.harness.ray.ray_program WHAT LOGDIR [further arguments]

Ends with a line "RESULTS [...]", or with what has gone wrong: "FAILED task exit-code message / type
of the cause".
"""

import functools
import os
import pathlib
import sys
import threading
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

import harness
import harness.ray
import runtime as rt
from models.mnist import minimal

WIDTH = 1000
TRAINER = (
    "python",
    "-m",
    "models.mnist.trainer",
    "--train_steps=1000000000",
    "--save_model_secs=1",
)


def count(logdir: str, steps: int) -> tuple[str, int, int]:
    """Adds ones to a vector, as often as the file "steps" of the log directory says, or ``steps``; checks the sums.

    Gives the task, which start of it this is, and the final step.
    """
    with harness.join_cluster() as me:
        with me.device():
            step = harness.get_or_create_global_step()
            weights = rt.Variable(np.zeros(WIDTH, np.float32), name="weights")
            train = rt.group(step.assign_add(1), weights.assign_add(np.ones(WIDTH, np.float32)))
        supervisor = harness.Supervisor(
            is_chief=me.is_chief,
            logdir=logdir,
            global_step=step,
            save_model_secs=1,
            save_summaries_secs=0,
        )
        told = pathlib.Path(logdir, "steps")
        done = 0
        with supervisor.managed_session(me.target) as session:
            while done < (int(told.read_text()) if told.exists() else steps):
                session.run(train)
                done, values = session.run([step, weights])
                if done % 200 < 2:
                    print(f"step {done} of start {os.environ['BELLWETHER_ATTEMPT']}", flush=True)
            done, values = session.run([step, weights])
            assert len(set(values)) == 1, values
        return f"{me.job}/{me.index}", int(os.environ["BELLWETHER_ATTEMPT"]), int(done)


def wrong_value() -> None:
    with harness.join_cluster() as me:
        if me.index == 0:
            raise rt.InvalidArgumentError(f"the value of {me.job}/{me.index} is wrong")


def gpu_variables() -> list[str | None]:
    """Gives the variables that divide the GPUs of a node."""
    with harness.join_cluster():
        return [os.environ.get(n) for n in ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION")]


def no_pickle() -> Any:
    with harness.join_cluster():
        return threading.Lock()


def start_ray() -> None:
    """Starts a Ray of this machine; once more where a busy one takes longer than the half minute that Ray gives it."""
    for left in (2, 1, 0):
        try:
            ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
        except Exception as error:  # it has no type of its own
            if not left or "timed out during startup" not in str(error):
                raise
            print(f"once more: {error}", file=sys.stderr, flush=True)
            ray.shutdown()
        else:
            return


def main(what: str, logdir: str, *further: str) -> None:
    if "RAY_ADDRESS" not in os.environ:
        start_ray()
    # As functions of a script: Ray's workers need not find this module.
    cloudpickle.register_pickle_by_value(sys.modules[count.__module__])
    run = functools.partial(harness.ray.run, ps=1, workers=2)
    results: list[Any]
    match what:
        case "mnist":
            options = minimal.parser.parse_args([f"--logdir={logdir}", *further])
            results = run(functools.partial(minimal.main, options, []))
        case "trainer":
            results = run([*TRAINER, f"--logdir={logdir}", *further])
        case "evaluator":
            results = run([*TRAINER, f"--logdir={logdir}", *further], evaluators=1)
        case "count":
            results = run(functools.partial(count, logdir, int(further[0])))
        case "nodes":
            nodes = {job: {"CPU": 1, job: 1} for job in ("ps", "worker")}
            results = run(functools.partial(count, logdir, int(further[0])), resources=nodes)
        case "wrong value":
            results = run(wrong_value)
        case "no pickle":
            results = run(no_pickle)
        case "gpus":
            needed = {"CPU": 1, "GPU": float(further[0])}
            results = run(gpu_variables, resources={"worker": needed})
        case "too large":
            results = run(wrong_value, resources={"worker": {"CPU": 1, "unobtainium": 1}})
    print("RESULTS", results, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except harness.ray.TaskFailedError as error:
        print(
            f"FAILED {error.task} {error.exit_code} {error} / {type(error.__cause__).__name__}",
            flush=True,
        )
        sys.exit(error.exit_code)
