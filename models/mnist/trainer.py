r"""MNIST by between-graph parameter-server training, with everything a real run wants; `minimal` is the short version.

Every process of the cluster runs this program. A ps only serves; each worker builds the same graph,
with the variables on the ps and the computation on itself, and trains on its own shard of the data.
Worker 0, or the task of a job called chief, is the chief: it initialises or restores, checkpoints,
writes summaries, and at the end prints the accuracy on the test set. An evaluator does none of
this: it follows the checkpoints.

    # a cluster on this machine
    python -m harness.launch --ps=1 --workers=2 -- python -m models.mnist.trainer
    # one task of a cluster of several hosts
    python -m models.mnist.trainer --ps_hosts=a:2222 --worker_hosts=b:2222,c:2222 \
        --job_name=worker --task_index=1
    # one process, no cluster
    python -m models.mnist.trainer

Flags may come from files: --flagfile=configs/mnist_async.flags; further flags after it have the
last word.
"""

# Annotations are not evaluated, so a ps imports no module of the training loop.
from __future__ import annotations

# isort: split
# Imported before JAX, so that the garbage collector pauses while both are imported.
import runtime as rt

# isort: split
import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from numpy.typing import NDArray

import harness
from harness import exit_codes, monitoring
from models.mnist import config as config_flags
from models.mnist import data, model
from models.mnist.config import RunConfig
from models.mnist.files import DataError

flags.adopt_module_key_flags(config_flags)  # --help lists them


def main(argv: list[str]) -> None:
    """Reads the flags, then serves, trains or evaluates as they say."""
    if len(argv) > 1:
        exit_codes.leave(
            exit_codes.CONFIGURATION, f"no arguments but flags are taken, not {argv[1:]}"
        )
    exit_codes.use(config_flags.chosen_exit_codes())
    try:
        config = RunConfig.from_flags()
    # The environment of the engine names no cluster, or a limit is invalid.
    except rt.InvalidArgumentError as error:
        exit_codes.leave(exit_codes.CONFIGURATION, error.message)
    monitoring.configure_logging(f"{config.me.job}/{config.me.index}", config.log_json)
    if wrong := config.problem():
        exit_codes.leave(exit_codes.CONFIGURATION, wrong)
    with harness.preemptible(config.preempt_grace_secs), errors_of(config.me):
        if config.me.job == "evaluator":
            evaluate_checkpoints(config)
        else:
            between_graph(config)


@contextlib.contextmanager
def errors_of(me: harness.Member) -> Iterator[None]:
    """Ends the process with one line and the code for an error of the cluster."""
    try:
        yield
    except rt.OpError as error:
        logging.debug("where it happened:", exc_info=True)
        exit_codes.leave(exit_codes.of_error(error), f"{me.job} {me.index}: {error}")


def between_graph(config: RunConfig) -> None:
    """Serves as a ps, or trains as a worker, until training is over."""
    if config.logdir:
        harness.keep_compilations()
    with (
        make_server(config) as server,
        monitoring.watched_at(server, config.metrics_port, config.log_json, config.metrics_host),
    ):
        if config.me.job == "ps":
            sys.exit(exit_codes.of_join(server.join()))
        train(config, dataclasses.replace(config.me, cluster=server.cluster, server=server))


def evaluate_checkpoints(config: RunConfig) -> None:
    """Evaluates the checkpoints of the chief on the test set, until training is over."""
    split = load_data(config).test
    graph = build_graph(config, config.me, 1, 1)

    def evaluate(session: rt.Session, step: int) -> dict[str, float]:
        accuracy, cost = mean_over(session, graph, split, [graph.accuracy, graph.loss])
        return {"accuracy": float(accuracy), "cost": float(cost)}

    harness.Evaluator(
        evaluate,
        config.logdir,
        master=config.me.target,
        best_by="accuracy",
        patience=config.patience,
    ).run()


def mean_over(
    session: rt.SessionLike, graph: TrainingGraph, split: data.DataSplit, fetches: list[rt.Tensor]
) -> NDArray:
    """Returns the means of tensors over a split, each tensor being the mean of a batch."""
    sums = np.zeros(len(fetches))
    for images, labels in split.chunks(1000):
        feeds = {graph.images: images, graph.labels: labels}
        sums += np.array(session.run(fetches, feeds)) * len(labels)
    return sums / len(split)


def make_server(config: RunConfig) -> rt.Server:
    """Returns the running server of this task; only a ps may have a backup."""
    return rt.Server(
        config.me.cluster,
        config.me.job,
        config.me.index,
        ps_backups=config.ps_backups if config.me.job == "ps" else 0,
        ps_backups_lag=config.ps_backups_lag,
        checkpoint_root=config.checkpoint_root,
        security=config.given_security,
        limits=config.limits,
    )


def train(config: RunConfig, me: harness.Member) -> None:
    """Trains until the global step has reached the end, then (on the chief) tests.

    Args:
        config: the run.
        me: this task, with its server.
    """
    mnist = load_data(config)
    last, per_epoch = config.last_step(len(mnist.train)), config.steps_per_epoch(len(mnist.train))
    graph = build_graph(config, me, last, len(mnist.train))
    batches = None
    if not config.elastic:
        size = config.batch_size * config.accumulate
        batches = data.Batches(mnist.train, size, config.seed, me.number, config.workers)
    if me.is_chief and batches is not None:
        # The restore of the checkpoint sets this state too, so the state is registered before.
        register_position(batches)
    supervisor = make_supervisor(config, graph)
    progress = harness.Progress(last, every=config.log_every_steps)
    profiler = monitoring.StepProfiler.from_text(
        config.profile_steps, config.logdir, here=me.is_chief
    )
    options = rt.SessionConfig(
        start_timeout_secs=config.start_timeout_secs,
        prefetch=config.prefetch,
        # The lines of Progress tell the same.
        log_secs=0,
    )
    accuracy = None
    with supervisor.managed_session(me.target, config=options) as session, profiler:
        if not me.is_chief and batches is not None:
            # The checkpoints of the chief hold this state. Registered earlier, the state would be
            # that of the start.
            register_position(batches)
        step = int(session.run(graph.global_step))
        if step:
            resume_run(session, step, last, config.logdir)
        writer = supervisor.summary_writer
        tests = ChiefTests(config, session, graph, writer, mnist.test, step, per_epoch)
        with deal_feeds(graph, session, mnist.train, batches) as feeds_of_steps:
            while not supervisor.should_stop() and (step < last or config.trains_all_data):
                profiler.step(step)
                try:
                    feeds = next(feeds_of_steps, None)
                    if feeds is None:
                        # All workers together have finished all epochs.
                        break
                    _, loss, count = session.run(
                        [graph.train_op, graph.loss, graph.global_step], feeds
                    )
                except rt.OutOfRangeError:
                    # An evaluator has ended training. The workers that this step waited for have
                    # stopped already.
                    break
                except rt.CancelledError:
                    if not supervisor.should_stop():
                        raise
                    break
                step = int(count)
                progress.update(step, epoch=step / per_epoch, cost=float(loss))
                tests.after(step, feeds)
        if me.is_chief:
            accuracy = tests.test(step)
    progress.close()
    if accuracy is not None:
        print(f"Test-Accuracy: {accuracy:.4f}", flush=True)


Feeds = Mapping[rt.Tensor, NDArray]


@contextlib.contextmanager
def deal_feeds(
    graph: TrainingGraph,
    session: rt.SessionLike,
    split: data.DataSplit,
    batches: data.Batches | None,
) -> Iterator[Iterator[Feeds]]:
    """Yields the feeds of this worker's steps: a fixed share, or leases on shards if workers come and go."""
    if batches is not None:
        # The stream has no end: `next` never returns None.
        pairs = iter(batches.next, None)
        yield ({graph.images: images, graph.labels: labels} for images, labels in pairs)
        return
    assert graph.shards is not None
    with graph.shards.open(session) as leased:
        yield (
            {
                graph.images: data.scale(split.pixels[b.examples]),
                graph.labels: split.labels[b.examples],
                **b.feed,
            }
            for b in leased
        )


def load_data(config: RunConfig) -> data.MnistData:
    """Returns the data set; ends the process with the reason if there is none."""
    try:
        mnist = data.load(config.data_dir)
    except DataError as error:
        exit_codes.leave(exit_codes.DATA, f"{config.me.job} {config.me.index}: {error}")
    if config.me.index == 0:
        logging.info("data: %s", mnist)
    return mnist


@dataclass(frozen=True)
class TrainingGraph:
    """The tensors and operations that the training loop uses."""

    images: rt.Tensor
    labels: rt.Tensor
    loss: rt.Tensor
    accuracy: rt.Tensor
    train_op: rt.Operation
    global_step: rt.Variable
    summaries: rt.Tensor
    shards: harness.DataShards | None


def build_graph(config: RunConfig, me: harness.Member, steps: int, examples: int) -> TrainingGraph:
    """Builds the graph, the same on every worker: variables on the ps, computation on this worker."""
    with me.device():
        global_step = harness.get_or_create_global_step()
        params = rt.variables(model.init(config.seed, config.hidden_units), name="mlp")
        images = rt.placeholder(jnp.float32, [None, data.IMAGE_PIXELS], name="images")
        labels = rt.placeholder(jnp.int32, [None], name="labels")
        pulled = harness.on_wire(params) if config.bfloat16_wire else params
        loss = rt.call(
            harness.accumulated(model.loss_fn, config.accumulate),
            pulled,
            images,
            labels,
            name="loss",
        )
        accuracy = rt.call(model.accuracy, params, images, labels, name="accuracy")
        rule = harness.Optimizer(update_rule(config, steps))
        shards = make_shards(config, examples) if config.elastic else None
        optimizer = wrap_optimizer(rule if shards is None else shards.counted(rule), config)
        train_op = optimizer.minimize(loss, global_step=global_step)
        harness.summary.scalar("cost", loss)
        harness.summary.scalar("batch_accuracy", accuracy)
        summaries = harness.summary.merge_all()
        # Two summaries were made above.
        assert summaries is not None
    return TrainingGraph(
        images,
        labels,
        loss,
        accuracy,
        train_op,
        global_step,
        summaries,
        shards,
    )


def make_shards(config: RunConfig, examples: int) -> harness.DataShards:
    """Returns the object that deals the training data out to workers that come and go."""
    return harness.DataShards(
        examples,
        config.batch_size * config.accumulate,
        epochs=config.epochs if config.trains_all_data else None,
        seed=config.seed,
    )


def wrap_optimizer(optimizer: harness.AnyOptimizer, config: RunConfig) -> harness.AnyOptimizer:
    """Wraps the optimizer for the mode of --sync; the wrapper has the same methods."""
    if config.sync:
        workers = None if config.elastic else config.workers
        return harness.SyncReplicas(
            optimizer,
            workers,
            workers,
            worker=config.me.number,
            is_chief=config.me.is_chief,
            elastic=config.elastic,
        )
    if config.max_staleness is not None:
        return harness.StaleSynchronous(optimizer, config.max_staleness, worker=config.me.number)
    return optimizer


def update_rule(config: RunConfig, steps: int) -> optax.GradientTransformation:
    """Returns the optax transformation of a run of ``steps`` global steps."""
    # With workers that come and go, the number of synchronous steps is not known before the end.
    is_known = not (config.elastic and config.sync) or config.train_steps is not None
    # Optax counts updates in int32 and stops at the largest count, so a longer schedule would never
    # end.
    last = min(max(steps, 1), np.iinfo(np.int32).max)
    falls = config.optimizer == "adam" and is_known
    schedule = optax.linear_schedule(config.rate, 0.0, last) if falls else config.rate
    return config_flags.UPDATE_RULES[config.optimizer][1](schedule)


def make_supervisor(config: RunConfig, graph: TrainingGraph) -> harness.Supervisor:
    """Returns the Supervisor, which initialises, restores and saves."""
    if config.me.is_chief:
        kept = f"checkpoints and TensorBoard events go to {config.logdir}"
        logging.info(
            "%s",
            kept
            if config.logdir
            else "--logdir is empty: no summaries and no checkpoints are written",
        )
    return harness.Supervisor(
        is_chief=config.me.is_chief,
        logdir=config.logdir,
        global_step=graph.global_step,
        saver=harness.Saver(transfer=config.checkpoint_transfer),
        save_model_secs=config.save_model_secs,
        save_summaries_secs=config.save_summaries_secs,
        # The summaries need a batch, so the training loop computes them.
        summary_op=None,
    )


def register_position(batches: data.Batches) -> None:
    """Registers the position in this worker's data as a state of every checkpoint."""
    harness.checkpointable("data", batches.state, lambda state: resume_data(batches, state))


def resume_data(batches: data.Batches, state: dict[str, int]) -> None:
    """Resumes the data at a saved position, unless the shares are different now."""
    # The chief sets its state when it restores the model, and again when it resumes.
    if batches.state() == state:
        return
    try:
        batches.restore(state)
    except ValueError as error:
        logging.warning("starting the data anew: %s", error)
    else:
        logging.info("going on with the data at epoch %.4f", batches.epoch)


def resume_run(session: harness.ManagedSession, step: int, steps: int, logdir: str | None) -> None:
    """Logs that a run is resumed, and restores the states of this worker."""
    end = (
        ""
        if step < steps
        else f": training ends at {steps}, so nothing is left; give more --epochs for more"
    )
    logging.info("going on from global step %d%s", step, end)
    newest = harness.latest_checkpoint(logdir) if logdir else None
    if newest is not None:
        harness.restore_states(newest, session.task)


class ChiefTests:
    """The summaries and tests that the chief runs between training steps.

    The results go to TensorBoard. Other tasks own such an object too, which writes nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        session: rt.SessionLike,
        graph: TrainingGraph,
        writer: harness.FileWriter | None,
        split: data.DataSplit,
        step: int,
        steps_per_epoch: float,
    ) -> None:
        """Starts the schedule at a global step; records the hyperparameters of a new run."""
        self._session = session
        self._graph = graph
        self._split = split
        self._writer = writer
        self._summary_secs, self._next_summary = config.save_summaries_secs, time.monotonic()
        self._test_steps = config.test_epochs * steps_per_epoch or math.inf
        self._next_test = step + self._test_steps
        # A run that is resumed has its row already.
        if self._writer is not None and not step:
            self._writer.add_hparams(hyperparameters(config), ["test_accuracy", "cost"])

    def after(self, step: int, feeds: Mapping[rt.Tensor, NDArray]) -> None:
        """Writes summaries and tests the model if they are due after a training step.

        Args:
            step: the global step.
            feeds: the feeds of that step, which the summaries are computed with.
        """
        if self._writer is None or not self._summary_secs:
            return
        if time.monotonic() >= self._next_summary:
            self._writer.add_summary(self._session.run(self._graph.summaries, feeds), step)
            self._next_summary = time.monotonic() + self._summary_secs
        if step >= self._next_test:
            self.test(step)
            self._next_test = step + self._test_steps

    def test(self, step: int) -> float:
        """Tests the model, writes the accuracy for TensorBoard, and returns the accuracy, 0 to 1."""
        graph = self._graph
        accuracy = float(mean_over(self._session, graph, self._split, [graph.accuracy])[0])
        if self._writer is not None:
            self._writer.add_scalars({"test_accuracy": accuracy}, step)
        return accuracy


def hyperparameters(config: RunConfig) -> dict[str, bool | float | int | str]:
    """Returns the settings that distinguish runs in TensorBoard's table of runs."""
    names = ("hidden_units", "optimizer", "rate", "batch_size", "workers", "epochs", "seed")
    return {{"rate": "learning_rate"}.get(name, name): getattr(config, name) for name in names}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own start-up chatter
    logging.set_verbosity(logging.INFO)
    app.run(main, flags_parser=exit_codes.parse_flags)
