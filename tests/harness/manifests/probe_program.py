"""A ps with large variables, and a chief that saves them or restores them: the cluster flags, --logdir and --mib."""

import sys

import numpy as np
from absl import app, flags, logging

import harness
import runtime as rt
from harness import exit_codes

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "")
flags.DEFINE_list("worker_hosts", [], "")
flags.DEFINE_string("job_name", "", "")
flags.DEFINE_integer("task_index", 0, "")
flags.DEFINE_string("logdir", "", "")
flags.DEFINE_integer("mib", 1, "Of all variables together.")
PARTS = 8


def main(argv: list[str]) -> None:
    del argv
    with rt.Server(
        {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}, FLAGS.job_name, FLAGS.task_index
    ) as server:
        if FLAGS.job_name == "ps":
            sys.exit(exit_codes.of_join(server.join()))
        train(server)


def train(server: rt.Server) -> None:
    with rt.device(
        rt.replica_device_setter(cluster=server.cluster, worker_device="/job:worker/task:0")
    ):
        global_step = harness.get_or_create_global_step()
        elements = FLAGS.mib * 2**20 // 4 // PARTS
        for part in range(PARTS):
            rt.Variable(lambda: rt.random.normal(rt.random_key(), (elements,)), name=f"part{part}")
        count = global_step.assign_add(np.int64(1))
    supervisor = harness.Supervisor(
        logdir=FLAGS.logdir, save_model_secs=3600, save_summaries_secs=0
    )
    with harness.preemptible(300), supervisor.managed_session(server.target) as session:
        while not supervisor.should_stop():
            session.run(count)


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
