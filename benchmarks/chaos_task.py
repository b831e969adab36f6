"""The training program of the chaos run: the MNIST model of the trainer, and a ledger of every step.

It trains until the file ``end_step`` of the chaos directory tells at which global step to stop. Constant learning rate:
nobody knows beforehand how many steps there will be.
"""

import logging as std_logging
import os
import sys
import threading
import time

from absl import app, flags, logging

import harness
import runtime as rt
from benchmarks.chaos_ledger import OPENED, Entry
from harness.launcher.tasks import ATTEMPT_VARIABLE
from models.mnist import data, trainer

FLAGS = flags.FLAGS
flags.DEFINE_string("chaos_dir", None, "Directory of the ledgers, checkpoints and of the file end_step.", required=True)
_LOOK_SECS = 0.2


class Ledger(std_logging.Handler):
    """Appends to this life's file; what was written survives a kill."""

    def __init__(self, directory: str, task: str) -> None:
        super().__init__()
        attempt = os.environ.get(ATTEMPT_VARIABLE, "0")
        path = os.path.join(directory, f"{task}-{attempt}.ledger")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._write = threading.Lock()

    def enter(self, what: str, step: int = 0, text: str = "") -> None:
        """Writes one entry."""
        line = Entry(time.monotonic(), what, step, text).line()
        with self._write:
            os.write(self._file, f"{line}\n".encode())

    def emit(self, record: std_logging.LogRecord) -> None:
        """Writes what is logged."""
        self.enter("log", text=record.getMessage().replace("\n", " "))


def main(argv: list[str]) -> None:
    """Does this task's part."""
    del argv
    with rt.Server(trainer.cluster(), FLAGS.job_name, FLAGS.task_index) as server:
        if FLAGS.job_name == "ps":
            server.join()
        else:
            work(server)


def work(server: rt.Server) -> None:
    """Trains until it is told to stop, then (on the chief) tests."""
    ledger = Ledger(FLAGS.chaos_dir, f"worker-{FLAGS.task_index}")
    logging.get_absl_logger().addHandler(ledger)
    mnist = data.load(FLAGS.data_dir)
    # Another order in every life: a worker that is killed often would else see the same first batches again and again.
    seed = FLAGS.seed + 1000 * int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    workers = server.cluster.num_tasks("worker")
    batches = data.Batches(mnist.train, FLAGS.batch_size, seed, FLAGS.task_index, workers)
    is_chief = FLAGS.task_index == 0
    graph = trainer.build(server, 1)
    count = next(op for op in graph.global_step.graph.get_operations() if op.name.endswith("/count_step")).outputs[0]
    supervisor = harness.Supervisor(
        is_chief=is_chief,
        logdir=os.path.join(FLAGS.chaos_dir, "run"),
        global_step=graph.global_step,
        save_model_secs=FLAGS.save_model_secs,
        save_summaries_secs=FLAGS.save_summaries_secs,
        summary_op=None,
        stop_grace_secs=60,
    )
    accuracy = 0.0
    with supervisor.managed_session(server.target) as session:
        ledger.enter("log", text=OPENED)
        end, look_at = None, 0.0
        while not supervisor.should_stop():
            if (now := time.monotonic()) >= look_at:
                end, look_at = end_step(), now + _LOOK_SECS
                if end is not None and int(session.run(graph.global_step)) >= end:
                    break
            images, labels = batches.next()
            ledger.enter("begin")
            _, step = session.run([graph.train_op, count], {graph.images: images, graph.labels: labels})
            ledger.enter("done", int(step))
            if end is not None and step >= end:
                break
        if is_chief and not supervisor.should_stop():
            accuracy = trainer.test(session, graph, mnist.test)
    if is_chief:
        print(f"Test-Accuracy: {accuracy:.4f}", flush=True)


def end_step() -> int | None:
    """The global step at which training is to stop; None when that is not known yet."""
    try:
        with open(os.path.join(FLAGS.chaos_dir, "end_step"), encoding="utf-8") as file:
            return int(file.read())
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
