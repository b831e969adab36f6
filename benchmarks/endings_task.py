"""The program of the tests of endings, and of ``make endings``: counts up, and ends in one of the ways that there are.

What each task does is told by environment variables, so that it can differ between tasks and
between starts. Every worker's step adds 1 to the global step and to ``total``; with two ps they
live on different ones. A ledger in the log directory has a line for each step that was begun and
done, and for all that is logged.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from absl import app, flags, logging

import harness
import runtime as rt
from benchmarks.chaos_ledger import OPENED, Ledger
from harness.launch.tasks import ATTEMPT_VARIABLE

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "Comma-separated host:port of the parameter servers.")
flags.DEFINE_list("worker_hosts", [], "Comma-separated host:port of the workers.")
flags.DEFINE_enum("job_name", "worker", ["ps", "worker"], "What this process is.")
flags.DEFINE_integer(
    "task_index", 0, "Which one of its job this process is, from 0. Worker 0 is the chief."
)
flags.DEFINE_string(
    "logdir", "", "Directory of the checkpoints and ledgers; $ENDING_LOGDIR by default."
)


def option(name: str, default: Any) -> Any:
    """Returns an option of the environment, with the type of the default."""
    return type(default)(os.environ.get(f"ENDING_{name}", default))


def logdir() -> str:
    """Returns the directory of the checkpoints and ledgers."""
    return FLAGS.logdir or option("LOGDIR", "")


def main(argv: list[str]) -> None:
    """Serves as a ps, or trains as a worker."""
    del argv
    # no launcher ends the ps tasks: they end by themselves
    attempt = os.environ.pop(ATTEMPT_VARIABLE, "0")
    cluster = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts}
    server = rt.Server(cluster, FLAGS.job_name, FLAGS.task_index)
    if FLAGS.job_name == "ps":
        if option("QUEUE", 0):
            wait_for_tokens(server)
        else:
            server.join(late_secs=option("LATE_SECS", 3.0))
        say("LEFT")
        return
    with harness.preemptible(option("PREEMPT_SECS", 20.0)):
        Worker(server, attempt).work()
    say("ENDED")


def done_queue(index: int) -> rt.FIFOQueue:
    """Returns the queue on a ps, in which each worker puts a token when it has trained."""
    with rt.device(f"/job:ps/task:{index}"):
        return rt.FIFOQueue(
            len(FLAGS.worker_hosts), np.int32, [()], shared_name=f"done_queue_{index}"
        )


def wait_for_tokens(server: rt.Server) -> None:
    """Waits as the ps of old programs: for a token of each worker."""
    token = done_queue(FLAGS.task_index).dequeue()
    with rt.Session(server.target) as session:
        for _ in FLAGS.worker_hosts:
            session.run(token)


def say(text: str) -> None:
    """Writes a line that the tests wait for."""
    print(text, flush=True)


class SlowSaver(harness.Saver):
    """A saver whose saves take long, and are reported."""

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Saves."""
        say("SAVING")
        time.sleep(option("SAVE_SECS", 0.0))
        saved = super().save(*args, **kwargs)
        say("SAVED")
        time.sleep(option("SAVED_SECS", 0.0))
        return saved


class SlowHook(harness.SessionRunHook):
    """A hook that evaluates at the end."""

    def end(self, session: rt.Session) -> None:
        """Evaluates."""
        evaluate(session, option("HOOK_SECS", 0.0))


class Worker:
    """One worker."""

    def __init__(self, server: rt.Server, attempt: str) -> None:
        self.server = server
        self.is_chief = FLAGS.task_index == 0
        self.ledger = Ledger(logdir(), f"worker-{FLAGS.task_index}", attempt)
        logging.get_absl_logger().addHandler(self.ledger)
        here = f"/job:worker/task:{FLAGS.task_index}"
        with rt.device(rt.replica_device_setter(cluster=server.cluster, worker_device=here)):
            self.global_step = harness.get_or_create_global_step()
            total = rt.Variable(np.zeros(4, np.float32), name="total")
            self.fetches = self._train_op(total)
        queues = map(done_queue, range(len(FLAGS.ps_hosts)) if option("QUEUE", 0) else ())
        self.tokens = [queue.enqueue(FLAGS.task_index) for queue in queues]
        self.grace_secs = option("GRACE_SECS", 1.0)

    def _train_op(self, total: rt.Variable) -> list[Any]:
        sync = option("SYNC", "")
        if not sync:
            return [
                self.global_step.assign_add(1),
                rt.group(total.assign_add(np.ones(4, np.float32))),
            ]
        loss = rt.call(lambda t: -t.sum(), total, name="loss")
        optimizer: Any = harness.Optimizer(optax.sgd(1.0))
        if sync == "stale":
            optimizer = harness.StaleSynchronous(optimizer, max_staleness=2)
        else:
            optimizer = harness.SyncReplicas(optimizer, len(FLAGS.worker_hosts))
        return [self.global_step, optimizer.minimize(loss, self.global_step)]

    def config(self) -> rt.SessionConfig | None:
        """Returns the options of the session."""
        start_secs = option("START_SECS", 0.0)
        return rt.SessionConfig(start_timeout_secs=start_secs) if start_secs else None

    def work(self) -> None:
        """Trains, and ends in this task's style."""
        style = option("STYLE", "stop")
        if style in ("monitored", "saver_hook"):
            hooks: list[harness.SessionRunHook] = [SlowHook()]
            timer_secs = option("TIMER_SECS", 3600.0)
            scaffold = harness.Scaffold(saver=SlowSaver())
            if style == "saver_hook":
                hooks.append(harness.CheckpointSaverHook(logdir(), timer_secs, scaffold=scaffold))
            with harness.MonitoredTrainingSession(
                self.server.target,
                self.is_chief,
                checkpoint_dir=logdir(),
                hooks=hooks,
                scaffold=scaffold,
                save_checkpoint_secs=0 if style == "saver_hook" else timer_secs,
                save_summaries_steps=None,
                config=self.config(),
                log_step_count_steps=None,
                stop_grace_period_secs=self.grace_secs,
            ) as monitored:
                if not monitored.should_stop():  # it may have come late
                    self.train(monitored, monitored.should_stop)
                self.hand_in(monitored.raw)
                if option("STOPS", 0):
                    monitored.request_stop()
            return
        sv = harness.Supervisor(
            is_chief=self.is_chief,
            logdir=logdir(),
            saver=SlowSaver() if self.is_chief else None,
            save_model_secs=option("TIMER_SECS", 3600.0),
            save_summaries_secs=0,
            stop_grace_secs=self.grace_secs,
        )
        config = self.config()
        if style in ("managed", "should_stop"):
            with sv.managed_session(self.server.target, config) as session:
                self.train(session, sv.should_stop if style == "should_stop" else None)
                self.hand_in(session)
                if option("STOPS", 0):
                    sv.request_stop()
                if option("EVALUATE_SECS", 0.0):
                    sv.request_stop()
                    evaluate(session, option("EVALUATE_SECS", 0.0))
                if option("ERROR", ""):
                    sv.request_stop()
                    raise ValueError(option("ERROR", ""))
        elif style == "close":
            closed = sv.prepare_or_wait_for_session(self.server.target, config)
            self.train(closed, None)
            self.hand_in(closed)
            closed.close()
        elif style == "after_stop":
            opened = sv.prepare_or_wait_for_session(self.server.target, config)
            self.train(opened, None)
            self.hand_in(opened)
            sv.stop()
            time.sleep(option("EVALUATE_SECS", 0.0))
            say(f"AFTER STOP {int(opened.run(self.global_step))}")
            if option("CLOSES", 0):
                opened.close()
        else:
            with sv.prepare_or_wait_for_session(self.server.target, config) as prepared:
                self.train(prepared, None)
                self.hand_in(prepared)
        if option("EXITS", 0):
            return
        if style != "block":
            began = time.monotonic()
            sv.stop()
            say(f"STOPPED within {time.monotonic() - began:.1f} s")

    def hand_in(self, session: Any) -> None:
        """Tells each ps by its queue that this worker has trained."""
        for token in self.tokens:
            session.run(token)

    def train(self, session: Any, should_stop: Callable[[], bool] | None) -> None:
        """Trains for the steps of this worker."""
        self.ledger.enter("log", text=OPENED)
        say(f"READY {int(session.run(self.global_step))}")
        last = option("LAST_STEP", 0)
        for number in range(option("STEPS", 10)):
            if number == option("PAUSE_AT", -1):
                say("PAUSED")
                while not os.path.exists(os.path.join(logdir(), f"go-{FLAGS.task_index}")):
                    time.sleep(0.02)
            if should_stop is not None and should_stop():
                break
            self.ledger.enter("begin")
            step = int(session.run(self.fetches)[0])
            self.ledger.enter("done", step)
            if last and step >= last:
                break
            time.sleep(option("STEP_SECS", 0.0))
        say("TRAINED")
        if option("EXITS", 0):
            self.hand_in(session)
            with contextlib.suppress(ValueError):
                sys.stdout.flush()
            sys.exit(0) if option("EXITS", 0) == 1 else os._exit(0)


def evaluate(session: Any, secs: float) -> None:
    """Runs many short steps that only read, for so long."""
    if not secs:
        return
    say("EVALUATING")
    until = time.monotonic() + secs
    step = session.graph.get_tensor_by_name("global_step:0")
    while time.monotonic() < until:
        session.run(step)
        time.sleep(0.05)
    say("EVALUATED")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.set_verbosity(logging.INFO)
    sys.exit(app.run(main))
