"""The program of the fault tests: every worker adds 1 to a number on each ps, until a file is there.

python -m tests.harness.training.start.fault_program --until=FILE --logdir=... + the cluster flags

Each worker writes its number of additions beside the file. The chief reads the sums when all have:
"SUMS additions global_step least greatest least greatest ..".
"""

import os
import pathlib
import sys
import threading

import numpy as np
from absl import app, flags, logging

import harness
import runtime as rt

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "")
flags.DEFINE_list("worker_hosts", [], "")
flags.DEFINE_string("job_name", "", "")
flags.DEFINE_integer("task_index", 0, "")
flags.DEFINE_string("logdir", "", "")
flags.DEFINE_float("save_secs", 0, "")
flags.DEFINE_string("until", "", "The file whose appearance ends all workers.")
_BYTES = 1 << 12


def main(argv: list[str]) -> None:
    del argv
    cluster = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}
    with rt.Server(cluster, FLAGS.job_name, FLAGS.task_index) as server:
        if FLAGS.job_name == "ps":
            server.join()
        else:
            work(server, len(FLAGS.ps_hosts))
    print("ENDED", flush=True)


def work(server: rt.Server, ps: int) -> None:
    with rt.device("/job:ps/task:0"):
        global_step = harness.get_or_create_global_step()
    sums = []
    for task in range(ps):
        with rt.device(f"/job:ps/task:{task}"):
            sums.append(rt.Variable(np.zeros(_BYTES // 4, np.float32), name=f"sum{task}"))
    one = np.ones(_BYTES // 4, np.float32)
    add = rt.group(*[s.assign_add(one) for s in sums])
    with rt.device("/job:ps/task:0"):
        count = global_step.assign_add(1)
    supervisor = harness.Supervisor(
        is_chief=FLAGS.task_index == 0,
        logdir=FLAGS.logdir,
        saver=harness.Supervisor.USE_DEFAULT if FLAGS.logdir else None,
        save_model_secs=FLAGS.save_secs,
        save_summaries_secs=0,
        stop_grace_secs=20,
    )
    with supervisor.managed_session(server.target, max_wait_secs=60) as session:
        print("READY", flush=True)
        done = 0
        while not supervisor.should_stop():
            session.run([count, add])
            done += 1
            if os.path.exists(FLAGS.until):
                break
        mine = pathlib.Path(f"{FLAGS.until}-{FLAGS.task_index}")
        mine.with_suffix(".part").write_text(str(done))
        mine.with_suffix(".part").rename(mine)
        if FLAGS.task_index == 0:
            additions = sum(count_of(worker) for worker in range(len(FLAGS.worker_hosts)))
            values = session.run([global_step, *sums])
            print(
                "SUMS",
                additions,
                int(values[0]),
                *[f"{v.min():g} {v.max():g}" for v in values[1:]],
                flush=True,
            )


def count_of(worker: int) -> int:
    """Waits for the number of additions of a worker."""
    path = pathlib.Path(f"{FLAGS.until}-{worker}")
    while not path.exists():
        threading.Event().wait(0.02)
    return int(path.read_text())


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
