"""MNIST by between-graph parameter-server training: the example that the whole project exists for.

Every process of the cluster runs this program. A ps only serves; each worker builds the same graph, with the variables
on the ps and the computation on itself, and trains on its own shard of the data. Worker 0 is the chief: it initialises
or restores, checkpoints, writes summaries, and at the end prints the accuracy on the test set.

    python -m harness.launch --ps=1 --workers=2 -- python -m models.mnist.trainer       # a cluster on this machine
    python -m models.mnist.trainer --ps_hosts=a:2222 --worker_hosts=b:2222,c:2222 --job_name=worker --task_index=1
    python -m models.mnist.trainer                                                        # one process, no cluster

Flags may come from files: --flagfile=configs/mnist_async.flags; further flags after it have the last word.
"""

import math
import os
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from numpy.typing import NDArray

import harness
import runtime as rt
from harness import monitoring
from models.mnist import data, modes
from models.mnist.idx import DataError
from models.mnist.model import MODELS
from models.mnist.pictures import Pictures

FLAGS = flags.FLAGS
flags.DEFINE_list("ps_hosts", [], "Comma-separated host:port of the parameter servers, the same on every task.")
flags.DEFINE_list(
    "worker_hosts", [], "Comma-separated host:port of the workers, the same on every task. Empty: one process."
)
flags.DEFINE_enum("job_name", "worker", ["ps", "worker"], "What this process is.")
flags.DEFINE_integer(
    "task_index", 0, "Which one of its job this process is, from 0. Worker 0 is the chief.", lower_bound=0
)
flags.DEFINE_string("logdir", "runs/mnist", "Directory for checkpoints and TensorBoard events; empty writes nothing.")
flags.DEFINE_string(
    "data_dir", None, "Directory with the four MNIST files. Default: $MNIST_DIR, else a download cache."
)
flags.DEFINE_enum("model", "mlp", sorted(MODELS), "mlp: 784-hidden-10 with sigmoid. cnn: two convolutions, two layers.")
flags.DEFINE_integer("hidden_units", 100, "Width of the hidden layer, in units.", lower_bound=1)
flags.DEFINE_float(
    "epochs",
    20.0,
    "Passes over the training data, by all workers together. 1e9 for a run that is stopped by hand.",
    lower_bound=0.0,
)
flags.DEFINE_integer("train_steps", None, "Global step at which training ends, instead of --epochs.", lower_bound=0)
flags.DEFINE_integer("batch_size", 100, "Examples in one worker's step.", lower_bound=1)
flags.DEFINE_enum("optimizer", "adam", ["sgd", "momentum", "adagrad", "adam"], "Update rule.")
flags.DEFINE_float("learning_rate", None, "Learning rate. Default: 0.5 sgd, 0.05 momentum, 0.1 adagrad, 0.005 adam.")
flags.DEFINE_enum(
    "decay", None, ["none", "linear"], "Learning rate over the run. Default: linear to 0 for adam, else none."
)
flags.DEFINE_float(
    "clip_norm", None, "Clip each worker's gradients to this global norm before the push. Default: no clipping."
)
flags.DEFINE_integer(
    "prefetch", 0, "1 overlaps push and pull with computing: faster, gradients are one step older.", 0, 1
)
flags.DEFINE_bool("bfloat16_wire", False, "Parameters and gradients cross the wire in bfloat16: half the bytes.")
flags.DEFINE_integer("accumulate", 1, "Batches to each pull and push of a worker.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Seed of the initial values and the order of the data.", lower_bound=0)
flags.DEFINE_float(
    "save_model_secs",
    60.0,
    "Seconds between checkpoints, beside the last one at the end; 0 saves only that one.",
    lower_bound=0.0,
)
flags.DEFINE_enum(
    "checkpoint_transfer",
    "shared",
    ["shared", "stream"],
    "shared: every ps writes its part into --logdir, which all see. stream: the ps send it to the chief, which writes.",
)
flags.DEFINE_float("save_summaries_secs", 10.0, "Seconds between summaries; 0 writes none.", lower_bound=0.0)
flags.DEFINE_float(
    "test_epochs", 1.0, "Epochs between the chief's tests for TensorBoard; 0: only the one at the end.", lower_bound=0.0
)
flags.DEFINE_float(
    "preempt_grace_secs",
    30.0,
    "Seconds that a worker has after SIGTERM, the chief for a last checkpoint. What kills it later (--grace_secs of "
    "harness.launch, a cluster manager) must give it more.",
    lower_bound=0.0,
)
flags.DEFINE_integer(
    "log_every_steps", 500, "Global steps (those of all workers) between each worker's progress lines.", lower_bound=1
)
flags.DEFINE_float(
    "start_timeout_secs",
    None,
    "Seconds to wait for the cluster to start, 7200 at most. Default: 7200. Recoveries are not bounded by it.",
    lower_bound=0.0,
)

flags.register_validator(
    "epochs", math.isfinite, "give a number; 1e9 is more than anybody waits for, where a run is to be stopped by hand"
)
flags.register_validator(
    "clip_norm", lambda norm: norm is None or norm > 0, "give a norm above 0, or leave it out for no clipping"
)
flags.register_validator("learning_rate", lambda rate: rate is None or math.isfinite(rate), "give a number")

flags.adopt_module_key_flags(modes)  # --help lists them too
flags.adopt_module_key_flags(monitoring)

LEARNING_RATES = {"sgd": 0.5, "momentum": 0.05, "adagrad": 0.1, "adam": 0.005}


@dataclass(frozen=True)
class Graph:
    """The tensors and operations that the training loop uses."""

    images: rt.Tensor
    labels: rt.Tensor
    loss: rt.Tensor
    accuracy: rt.Tensor
    predictions: rt.Tensor
    train_op: rt.Operation
    global_step: rt.Variable
    summaries: rt.Tensor
    pictures: Pictures


def main(argv: list[str]) -> None:
    """Joins the cluster and does this task's part."""
    if len(argv) > 1:
        raise app.UsageError(f"no arguments but flags are taken, not {argv[1:]}")
    monitoring.configure_logging(f"{FLAGS.job_name}/{FLAGS.task_index}", FLAGS.log_json)
    if wrong := modes.problem(len(FLAGS.ps_hosts)):
        sys.exit(wrong)
    try:
        monitoring.StepProfiler.from_flags(FLAGS.logdir)
    except ValueError as error:
        sys.exit(str(error))
    if FLAGS.sync == modes.COLLECTIVE:
        collective()
        return
    if FLAGS.logdir:
        harness.keep_compilations(FLAGS.logdir)
    if FLAGS.job_name == "ps":
        jax.config.update("jax_platforms", "cpu")  # a ps adds numbers; the accelerators are for workers
    try:
        server = modes.server(cluster(), FLAGS.job_name, FLAGS.task_index)
    except rt.OpError as error:
        sys.exit(f"{FLAGS.job_name} {FLAGS.task_index}: {error}")
    with server, monitoring.watched(server):
        if FLAGS.job_name == "ps":
            server.join()
            return
        try:
            work(server.target, server.cluster, FLAGS.task_index == 0, FLAGS.logdir)
        except rt.OpError as error:
            logging.debug("where it happened:", exc_info=True)
            sys.exit(f"worker {FLAGS.task_index}: {error}")


def collective() -> None:
    """Does this process's part where every process holds the whole model."""
    hosts = FLAGS.worker_hosts or ["localhost:0"]
    if FLAGS.task_index >= len(hosts):
        sys.exit(f"--task_index={FLAGS.task_index}: --worker_hosts names {len(hosts)} tasks")
    group = harness.join_group(hosts, FLAGS.task_index)
    with group.member():
        # Each process leads the small world of its own; only process 0 has files, and gives the others what is in them.
        work("", None, True, group.logdir(FLAGS.logdir))


def cluster() -> rt.ClusterSpec:
    """The cluster that the flags describe."""
    hosts = {"ps": FLAGS.ps_hosts, "worker": FLAGS.worker_hosts or ["localhost:0"]}
    if FLAGS.worker_hosts and not FLAGS.ps_hosts:
        sys.exit("--ps_hosts is empty: a cluster needs at least one parameter server, as in --ps_hosts=localhost:2222")
    if FLAGS.ps_hosts and not FLAGS.worker_hosts:
        sys.exit("--worker_hosts is empty: a cluster needs at least one worker, as in --worker_hosts=localhost:2223")
    if FLAGS.task_index >= len(hosts[FLAGS.job_name]):
        sys.exit(f"--task_index={FLAGS.task_index}: --{FLAGS.job_name}_hosts names {len(hosts[FLAGS.job_name])} tasks")
    return rt.ClusterSpec({job: tasks for job, tasks in hosts.items() if tasks})


def work(target: str, cluster: rt.ClusterSpec | None, leads: bool, logdir: str | None) -> None:
    """Trains until the global step has reached the end, then (on the chief) tests.

    Args:
        target: what sessions connect to.
        cluster: the cluster, None where there are no ps.
        leads: whether this process restores or initialises.
        logdir: for checkpoints and events; None or empty writes none.
    """
    try:
        mnist = data.load(FLAGS.data_dir)
    except DataError as error:
        sys.exit(f"worker {FLAGS.task_index}: {error}")
    if FLAGS.task_index == 0:
        logging.info("data: %s", mnist)
    workers = len(FLAGS.worker_hosts) or 1
    pushed = FLAGS.batch_size * FLAGS.accumulate
    batch = pushed * modes.batches_per_step(workers)
    batches = data.Batches(mnist.train, pushed, FLAGS.seed, FLAGS.task_index, workers)

    def checkpoint_data() -> None:
        harness.checkpointable("data", batches.state, lambda state: go_on_with(batches, state))

    if leads:
        checkpoint_data()  # before the checkpoint is restored
    total = FLAGS.train_steps
    if total is None:
        total = round(FLAGS.epochs * len(mnist.train) / batch)
    is_chief = FLAGS.task_index == 0
    graph = build(cluster, total, workers)
    supervisor = harness.Supervisor(
        is_chief=leads,
        logdir=logdir,
        global_step=graph.global_step,
        saver=harness.Saver(transfer=FLAGS.checkpoint_transfer),
        save_model_secs=FLAGS.save_model_secs,
        save_summaries_secs=FLAGS.save_summaries_secs,
        summary_op=None,  # its tensors need a batch: the loop runs it
    )
    summarises = is_chief and supervisor.summary_writer is not None and FLAGS.save_summaries_secs > 0
    if is_chief:
        kept = f"checkpoints and TensorBoard events go to {logdir}"
        logging.info("%s", kept if logdir else "--logdir is empty: no summaries and no checkpoints are written")
    progress = harness.Progress(total, every=FLAGS.log_every_steps)
    next_summary = time.monotonic()
    test_steps = FLAGS.test_epochs * len(mnist.train) / batch or float("inf")
    accuracy = 0.0
    config = rt.SessionConfig(start_timeout_secs=FLAGS.start_timeout_secs, prefetch=FLAGS.prefetch)
    profiler = monitoring.StepProfiler.from_flags(FLAGS.logdir, here=is_chief)
    preemptible = harness.preemptible(FLAGS.preempt_grace_secs)
    with preemptible, supervisor.managed_session(target, config=config) as session, profiler:
        step = int(session.run(graph.global_step))
        if not leads:
            checkpoint_data()  # not earlier: no checkpoint is to hold the beginning for a worker that goes on
        if step:
            end = "" if step < total else f": training ends at {total}, so nothing is left; give more --epochs for more"
            logging.info("going on from global step %d%s", step, end)
            checkpoint = harness.latest_checkpoint(logdir) if logdir else None
            if checkpoint is not None:
                harness.restore_states(checkpoint, session.task)
        next_test = step + test_steps
        if is_chief and supervisor.summary_writer is not None and not step:
            supervisor.summary_writer.add_hparams(hyperparameters(workers), ["test_accuracy", "cost"])
        while not supervisor.should_stop() and step < total:
            profiler.step(int(step))
            images, labels = batches.next()
            feeds = {graph.images: images, graph.labels: labels}
            _, loss, step = session.run([graph.train_op, graph.loss, graph.global_step], feeds)
            progress.update(int(step), epoch=step * batch / len(mnist.train), cost=float(loss))
            if summarises and time.monotonic() >= next_summary:
                supervisor.summary_computed(session, session.run(graph.summaries, feeds), step)
                next_summary = time.monotonic() + FLAGS.save_summaries_secs
            if summarises and step >= next_test:
                write_test(session, graph, supervisor, mnist.test, int(step))
                next_test = step + test_steps
        if is_chief:
            accuracy = write_test(session, graph, supervisor, mnist.test, int(step))
    progress.close()
    if is_chief:
        if logdir:
            tell_newest(logdir)
        print(f"Test-Accuracy: {accuracy:.4f}", flush=True)


def tell_newest(logdir: str) -> None:
    """Logs where the newest checkpoint is; a directory that cannot be looked into just now is no failure of the run."""
    try:
        logging.info("the newest checkpoint is %s", harness.latest_checkpoint(logdir))
    except rt.OpError as error:
        logging.warning("which checkpoint is the newest is not known: %s", error)


def go_on_with(batches: data.Batches, state: dict[str, int]) -> None:
    """Goes on with the data that this worker had not seen, unless the data is dealt out in another way now."""
    if batches.state() == state:  # the chief's, when it has restored the model itself
        return
    try:
        batches.restore(state)
    except ValueError as error:
        logging.warning("starting the data anew: %s", error)
    else:
        logging.info("going on with the data at epoch %.4f", batches.epoch)


def build(cluster: rt.ClusterSpec | None, total: int, workers: int) -> Graph:
    """The same graph on every worker: variables on the ps, computation on this worker."""
    model = MODELS[FLAGS.model]
    with modes.where(cluster, FLAGS.task_index):
        global_step = harness.get_or_create_global_step()
        params = rt.variables(model.init(FLAGS.seed, FLAGS.hidden_units), name=FLAGS.model)
        images = rt.placeholder(jnp.float32, [None, data.IMAGE_PIXELS], name="images")
        labels = rt.placeholder(jnp.int32, [None], name="labels")
        pulled = harness.on_wire(params) if FLAGS.bfloat16_wire else params
        loss = rt.call(harness.accumulated(model.loss_fn, FLAGS.accumulate), pulled, images, labels, name="loss")
        accuracy = rt.call(model.accuracy, params, images, labels, name="accuracy")
        predictions = rt.call(model.predictions, params, images, name="predictions")
        clip = None if FLAGS.clip_norm is None else optax.clip_by_global_norm(FLAGS.clip_norm)
        optimizer = modes.together(harness.Optimizer(update_rule(total), before_push=clip), workers)
        train_op = optimizer.minimize(loss, global_step=global_step)
        harness.summary.scalar("cost", loss)
        harness.summary.scalar("batch_accuracy", accuracy)
        summaries = harness.summary.merge_all()
        assert summaries is not None  # there are two
        pictures = Pictures.build(params.get("w1") if FLAGS.model == "mlp" else None)
    return Graph(images, labels, loss, accuracy, predictions, train_op, global_step, summaries, pictures)


def update_rule(total: int) -> optax.GradientTransformation:
    """The optax transformation that the flags describe."""
    rate = LEARNING_RATES[FLAGS.optimizer] if FLAGS.learning_rate is None else FLAGS.learning_rate
    decay = FLAGS.decay or ("linear" if FLAGS.optimizer == "adam" else "none")
    # Optax counts updates in int32, and its count stays at the largest.
    last = min(max(total, 1), np.iinfo(np.int32).max)
    schedule = optax.linear_schedule(rate, 0.0, last) if decay == "linear" else rate
    rules = {
        "sgd": optax.sgd,
        "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
        "adagrad": optax.adagrad,
        "adam": optax.adam,
    }
    return rules[FLAGS.optimizer](schedule)


def hyperparameters(workers: int) -> dict[str, bool | float | int | str]:
    """What tells this run from others, for TensorBoard's table of runs."""
    rate = LEARNING_RATES[FLAGS.optimizer] if FLAGS.learning_rate is None else FLAGS.learning_rate
    return {
        "model": FLAGS.model,
        "hidden_units": FLAGS.hidden_units,
        "optimizer": FLAGS.optimizer,
        "learning_rate": rate,
        "batch_size": FLAGS.batch_size,
        "workers": workers,
        "epochs": FLAGS.epochs,
        "seed": FLAGS.seed,
    }


def predict(session: rt.Session, graph: Graph, split: data.Split) -> NDArray[np.int32]:
    """The digits that the model sees in a data set, int32 [N]; in chunks that fit any memory."""
    return np.concatenate([session.run(graph.predictions, {graph.images: images}) for images, _ in split.chunks(1000)])


def write_test(
    session: rt.Session, graph: Graph, supervisor: harness.Supervisor, split: data.Split, step: int
) -> float:
    """Tests, writes what TensorBoard shows of it, and gives the accuracy, 0 to 1."""
    predicted = predict(session, graph, split)
    if supervisor.summary_writer is not None:
        summary = graph.pictures.evaluate(session, split.images, split.labels, predicted)
        supervisor.summary_computed(session, summary, step)
    return float((predicted == split.labels).mean())


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own start-up chatter
    logging.set_verbosity(logging.INFO)
    app.run(main)
