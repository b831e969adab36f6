"""A process of a collective training job; run by tests, alone or under the launcher."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from absl import app, flags, logging

import harness
import runtime as rt
from tests.sync.task import FEATURES, OUTPUTS, RULES, STEPS, batches, initial, loss_fn

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "Unused.")
flags.DEFINE_list("worker_hosts", [], "host:port of each process.")
flags.DEFINE_string("job_name", "worker", "Unused.")
flags.DEFINE_integer("task_index", 0, "Which process this is.")
flags.DEFINE_string("logdir", "", "Checkpoints.")
flags.DEFINE_string("rule", "sgd", "Update rule.")
flags.DEFINE_integer("steps", STEPS, "Where to end.")
flags.DEFINE_float("save_secs", 0.0, "Seconds between checkpoints.")
flags.DEFINE_integer("die_at", -1, "Process 1 kills itself at this step, in its first life.")


def main(argv: list[str]) -> None:
    """Trains to the end; process 0 prints the variables."""
    index, size = FLAGS.task_index, len(FLAGS.worker_hosts)
    group = harness.join_group(FLAGS.worker_hosts, index, heartbeat_timeout_secs=60)
    with group.member():
        step_variable = harness.get_or_create_global_step()
        w, b = initial()
        # The processes begin with different values: those of process 0 count.
        variables = [rt.Variable(w + index, name="w"), rt.Variable(b + index, name="b")]
        x, y = rt.placeholder(np.float32, [None, FEATURES]), rt.placeholder(np.float32, [None, OUTPUTS])
        loss = rt.call(loss_fn, *variables, x, y)
        optimizer = harness.CollectiveReplicas(harness.Optimizer(RULES[FLAGS.rule]()))
        train = optimizer.minimize(loss, step_variable)
        supervisor = harness.Supervisor(
            logdir=group.logdir(FLAGS.logdir), global_step=step_variable, save_model_secs=FLAGS.save_secs
        )
        inputs, targets = batches(size)
        with supervisor.managed_session("") as session:
            step = int(session.run(step_variable))
            print(json.dumps({"start": step}), flush=True)
            while step < FLAGS.steps:
                if index == 1 and step == FLAGS.die_at and os.environ.get("BELLWETHER_ATTEMPT") == "0":
                    os.kill(os.getpid(), 9)
                k = step % STEPS
                _, step = session.run([train, step_variable], {x: inputs[k, index], y: targets[k, index]})
                step = int(step)
            values = [v.tolist() for v in session.run(variables)]
        print(json.dumps({"end": step, "values": values}), flush=True)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.path.insert(0, os.getcwd())
    app.run(main)
