"""The program of the preemption tests: training as the MNIST example does it, with data that can be taken up again.

python -m tests.harness.training.stop.preemption_program --logdir=... --steps=500 + the cluster
flags
"""

import sys

import numpy as np
from absl import app, flags, logging

import harness
import runtime as rt
from harness import exit_codes
from models.mnist.data import Batches, DataSplit

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "")
flags.DEFINE_list("worker_hosts", [], "")
flags.DEFINE_string("job_name", "", "")
flags.DEFINE_integer("task_index", 0, "")
flags.DEFINE_string("logdir", "", "")
flags.DEFINE_integer("steps", 1_000_000, "Global step at which training ends.")
flags.DEFINE_float("grace_secs", 20.0, "As --preempt_grace_secs of the example.")
EXAMPLES, BATCH_SIZE = 100, 7


def main(argv: list[str]) -> None:
    del argv
    cluster = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}
    with rt.Server(cluster, FLAGS.job_name, FLAGS.task_index) as server:
        if FLAGS.job_name == "ps":
            sys.exit(exit_codes.of_join(server.join()))
        else:
            work(server)
    print("ENDED", flush=True)


def work(server: rt.Server) -> None:
    split = DataSplit(np.zeros((EXAMPLES, 784), np.uint8), np.arange(EXAMPLES, dtype=np.int32))
    batches = Batches(split, BATCH_SIZE, 1, FLAGS.task_index, len(FLAGS.worker_hosts))
    harness.checkpointable("data", batches.state, batches.restore)
    here = f"/job:worker/task:{FLAGS.task_index}"
    with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=here)):
        global_step = harness.get_or_create_global_step()
        total = rt.Variable(np.zeros(4, np.float32), name="total")
        train_op = rt.group(total.assign_add(np.ones(4, np.float32)))
        count = global_step.assign_add(1)
    supervisor = harness.Supervisor(
        is_chief=FLAGS.task_index == 0,
        logdir=FLAGS.logdir,
        save_model_secs=3600,
        save_summaries_secs=0,
    )
    try:
        with harness.preemptible(FLAGS.grace_secs):
            print("OPENING", flush=True)
            with supervisor.managed_session(server.target) as session:
                step = int(session.run(global_step))
                # The step may be above 0 without a checkpoint: another worker has trained already.
                if checkpoint := harness.latest_checkpoint(FLAGS.logdir):
                    harness.restore_states(checkpoint, session.task)
                print(f"FROM {step} {where(batches)}", flush=True)
                while not supervisor.should_stop() and step < FLAGS.steps:
                    batches.next()
                    _, step = session.run([train_op, count])
    finally:
        print(f"AT {where(batches)}", flush=True)


def where(batches: Batches) -> str:
    """The place in the data, in words without a space."""
    state = batches.state()
    return f"{state['epoch']}/{state['position']}"


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
