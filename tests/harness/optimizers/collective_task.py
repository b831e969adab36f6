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
from harness.checkpoints.saver import latest_checkpoint
from harness.optimizers.collective import Group
from tests.harness.optimizers.task import FEATURES, OUTPUTS, RULES, STEPS, batches, initial, loss_fn

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "Unused.")
flags.DEFINE_list("worker_hosts", [], "host:port of each process.")
flags.DEFINE_string("job_name", "worker", "Unused.")
flags.DEFINE_integer("task_index", 0, "Which process this is.")
flags.DEFINE_string("logdir", "", "Checkpoints.")
flags.DEFINE_list("rules", ["sgd"], "Update rules, one training run each.")
flags.DEFINE_integer("steps", STEPS, "Where to end.")
flags.DEFINE_float("save_secs", 0.0, "Seconds between checkpoints.")
flags.DEFINE_integer(
    "die_at", -1, "A process kills itself from this step on, in its first life, once there is a checkpoint of a step."
)
flags.DEFINE_integer("dies", 1, "Which one.")


def main(argv: list[str]) -> None:
    """Trains to the end with each rule; prints the variables."""
    group = harness.join_group(FLAGS.worker_hosts, FLAGS.task_index, heartbeat_timeout_secs=60)
    with group.member():
        for rule in FLAGS.rules:
            with rt.Graph().as_default():
                train(group, rule)


def train(group: Group, rule: str) -> None:
    """Trains to the end with one rule."""
    index, size = group.index, group.size
    step_variable = harness.get_or_create_global_step()
    w, b = initial()
    # The processes begin with different values: those of process 0 count.
    variables = [rt.Variable(w + index, name="w"), rt.Variable(b + index, name="b")]
    x, y = rt.placeholder(np.float32, [None, FEATURES]), rt.placeholder(np.float32, [None, OUTPUTS])
    loss = rt.call(loss_fn, *variables, x, y)
    optimizer = harness.CollectiveReplicas(harness.Optimizer(RULES[rule]()))
    train_op = optimizer.minimize(loss, step_variable)
    supervisor = harness.Supervisor(
        logdir=group.logdir(FLAGS.logdir), global_step=step_variable, save_model_secs=FLAGS.save_secs
    )
    inputs, targets = batches(size)
    with supervisor.managed_session("") as session:
        step = int(session.run(step_variable))
        print(json.dumps({"start": step}), flush=True)
        while step < FLAGS.steps:
            if index == FLAGS.dies and 0 <= FLAGS.die_at <= step and os.environ.get("BELLWETHER_ATTEMPT") == "0":
                newest = latest_checkpoint(FLAGS.logdir)
                if newest and int(os.path.basename(newest)) > 0:
                    os.kill(os.getpid(), 9)
            k = step % STEPS
            _, after = session.run([train_op, step_variable], {x: inputs[k, index], y: targets[k, index]})
            step = int(after)
        values = [v.tolist() for v in session.run(variables)]
    print(json.dumps({"end": step, "values": values}), flush=True)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.path.insert(0, os.getcwd())
    app.run(main)
