"""The program of the test of all hooks: one MonitoredTrainingSession per worker, every hook in it.

python -m tests.harness.training.run.hooks_program --directory=... --last_step=... + the cluster
flags
"""

import itertools
import os
import sys
import threading
from typing import Any

import numpy as np
from absl import app, flags, logging

import harness
import runtime as rt
from harness.tf1.train import training as tf1_training

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "")
flags.DEFINE_list("worker_hosts", [], "")
flags.DEFINE_string("job_name", "", "")
flags.DEFINE_integer("task_index", 0, "")
flags.DEFINE_string("directory", "", "")
flags.DEFINE_integer("last_step", 300, "")
flags.DEFINE_bool("nan", False, "The chief's loss becomes NaN at step 50.")
flags.DEFINE_string(
    "gate", "", "The file without which no worker does more than a quarter of the steps."
)
WAIT_UNTIL = 20


class Listener(harness.CheckpointSaverListener):
    """Says what it is told."""

    def begin(self) -> None:
        print("LISTENER begin", flush=True)

    def before_save(self, session: rt.Session, global_step_value: int) -> None:
        print(f"LISTENER before {global_step_value}", flush=True)

    def after_save(self, session: rt.Session, global_step_value: int) -> None:
        print(f"LISTENER after {global_step_value}", flush=True)

    def end(self, session: rt.Session, global_step_value: int) -> None:
        print(f"LISTENER end {global_step_value}", flush=True)


class Leash(harness.SessionRunHook):
    """Keeps a worker near the chief, so that on a busy machine too the chief's hooks see all parts of the training."""

    def __init__(self, step: rt.Variable, chiefs: rt.Variable) -> None:
        self._counts = [step, chiefs]

    def before_run(self, run_context: harness.SessionRunContext) -> None:
        while True:
            step, chiefs = run_context.session.run(self._counts)
            if step - 2 * chiefs < FLAGS.last_step // 10 or step >= FLAGS.last_step:
                return
            threading.Event().wait(0.01)


def main(argv: list[str]) -> None:
    del argv
    cluster = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}
    with rt.Server(cluster, FLAGS.job_name, FLAGS.task_index) as server:
        if FLAGS.job_name == "ps":
            server.join()
        else:
            work(server, cluster)
    print("ENDED", flush=True)


def work(server: rt.Server, cluster: dict[str, list[str]]) -> None:
    worker = f"/job:worker/task:{FLAGS.task_index}"
    with rt.device(rt.replica_device_setter(cluster=cluster, worker_device=worker)):
        global_step = harness.get_or_create_global_step()
        total = rt.Variable(np.zeros(4, np.float32), name="total")
        x = rt.placeholder(np.float32, [4], name="x")
        loss = rt.numpy.sum(x * 2.0)
        summary = harness.summary.scalar("loss", loss)
        chiefs = rt.Variable(0, name="steps_of_the_chief", trainable=False)
        chief = FLAGS.task_index == 0
        counted = [chiefs.assign_add(1)] if chief else []
        step = rt.group(total.assign_add(x), global_step.assign_add(1), *counted)
    directory = FLAGS.directory
    fed = [0]

    def feed() -> dict[Any, Any]:
        fed[0] += 1
        return {x: np.full(4, np.nan if FLAGS.nan and chief and fed[0] > 50 else 1, np.float32)}

    final = tf1_training.FinalOpsHook(global_step)
    hooks = [
        tf1_training.FeedFnHook(feed),
        # The chief does the last quarter alone, so there is something for its hooks to see however
        # busy the host is.
        harness.StopAtStepHook(last_step=FLAGS.last_step if chief else FLAGS.last_step * 3 // 4),
        harness.LoggingTensorHook({"loss": loss}, every_n_iter=1000, at_end=False),
        harness.NanTensorHook(loss),
        final,
        *(
            []
            if chief
            else [
                tf1_training.GlobalStepWaiterHook(WAIT_UNTIL, poll_secs=0.05),
                Leash(global_step, chiefs),
            ]
        ),
    ]
    only = [
        tf1_training.ProfilerHook(save_steps=1000, output_dir=os.path.join(directory, "traces")),
        harness.StepCounterHook(250, output_dir=os.path.join(directory, "rates")),
        harness.CheckpointSaverHook(
            os.path.join(directory, "own"), save_steps=700, listeners=[Listener()]
        ),
        harness.SummarySaverHook(
            250, output_dir=os.path.join(directory, "own-summaries"), summary_op=summary
        ),
    ]
    with harness.MonitoredTrainingSession(
        server.target,
        chief,
        checkpoint_dir=directory,
        hooks=hooks,
        chief_only_hooks=only,
        save_checkpoint_steps=500,
        save_summaries_steps=250,
        log_step_count_steps=250,
        stop_grace_period_secs=20,
        max_wait_secs=60,
    ) as session:
        for done in itertools.count(1):
            if session.should_stop():
                break
            session.run(step)
            if done == 1:
                print("FIRST", flush=True)
            while FLAGS.gate and done == FLAGS.last_step // 4 and not os.path.exists(FLAGS.gate):
                threading.Event().wait(0.01)
    print("FINAL", final.final_ops_values, flush=True)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
