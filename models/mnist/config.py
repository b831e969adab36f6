"""The configuration of a run of the example: a frozen dataclass with a flag for each field.

The trainer calls ``RunConfig.from_flags`` once and ``RunConfig.problem`` before anything starts. A field
is declared together with its flag, so defaults and help stand in one place.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import optax
from absl import flags

import harness
import runtime as rt
from harness import exit_codes, monitoring

_NO_FLAGS = ("me", "checkpoint_root", "limits")
_LIMIT = "limit_"
"""Prefix of the flag for a field of ``rt.Limits``."""
UPDATE_RULES: Mapping[str, tuple[float, Callable[..., optax.GradientTransformation]]] = {
    "sgd": (0.5, optax.sgd),
    "momentum": (0.05, partial(optax.sgd, momentum=0.9)),
    "adagrad": (0.1, optax.adagrad),
    "adam": (0.005, optax.adam),
}
"""The default rate of each update rule, and its function of a rate."""


def _flag_field(define: Callable[..., object], *rest: object, **bounds: float) -> Any:
    """Returns a dataclass field that carries the definition of its flag.

    The field has no default: a config comes from the command line.

    Args:
        define: function of absl that defines the flag.
        *rest: arguments of ``define`` after the name: the default, the values of a choice, the
            help.
        **bounds: ``lower_bound`` and ``upper_bound`` of a number.
    """
    return field(metadata={"define": lambda name: define(name, *rest, **bounds)})


_text, _switch = (
    partial(_flag_field, define) for define in (flags.DEFINE_string, flags.DEFINE_bool)
)
_count, _number, _choice = (
    partial(_flag_field, define)
    for define in (flags.DEFINE_integer, flags.DEFINE_float, flags.DEFINE_enum)
)


@dataclass(frozen=True)
class RunConfig:
    """A run of the example.

    Each field is the flag of its name. ``harness.monitoring`` defines the flags of the fields
    without a help text.
    """

    me: harness.Member
    """This task in its cluster, by the flags of a task or the environment of an engine; without its server."""
    metrics_port: int | None
    metrics_host: str
    log_json: bool
    profile_steps: str | None
    checkpoint_root: str | tuple[()] | None
    """Directory below which clients may let this task write and read checkpoints; not a flag.

    The directory is --logdir. ``()`` allows none, for an empty --logdir. None means that this task
    was given no --logdir: only the chief needs one.
    """
    limits: rt.Limits | None
    """Limits on the resources of this task that clients may use; None if no --limit_NAME is given.

    Each field of the limits is a flag of its own.
    """
    security: str | None = _text(
        None,
        "Directory of certificates (python -m harness.certs makes one), or file with a token, the "
        "same on every task. insecure lets everybody in. Default: $BELLWETHER_SECURITY. Needed "
        "where tasks are on several hosts.",
    )
    logdir: str = _text(
        "runs/mnist",
        "Directory for checkpoints and TensorBoard events; empty writes nothing. A task that is "
        "given one keeps checkpoints nowhere else, whoever asks.",
    )
    data_dir: str | None = _text(
        None, "Directory with the four MNIST files. Default: $MNIST_DIR, else a download cache."
    )
    hidden_units: int = _count(100, "Width of the hidden layer, in units.", lower_bound=1)
    epochs: float = _number(
        20.0,
        "Passes over the training data, by all workers together. 1e9 for a run that is stopped by "
        "hand.",
        lower_bound=0.0,
    )
    train_steps: int | None = _count(
        None, "Global step at which training ends, instead of --epochs.", lower_bound=0
    )
    batch_size: int = _count(100, "Examples in one worker's step.", lower_bound=1)
    optimizer: str = _choice("adam", list(UPDATE_RULES), "Update rule.")
    learning_rate: float | None = _number(
        None, "Learning rate. Default: 0.5 sgd, 0.05 momentum, 0.1 adagrad, 0.005 adam."
    )
    prefetch: int = _count(
        0,
        "1 overlaps push, computing and pull: faster, gradients are one step older; 2: two steps.",
        lower_bound=0,
        upper_bound=2,
    )
    bfloat16_wire: bool = _switch(
        False, "Parameters and gradients cross the wire in bfloat16: half the bytes."
    )
    accumulate: int = _count(1, "Batches to each pull and push of a worker.", lower_bound=1)
    seed: int = _count(1, "Seed of the initial values and the order of the data.", lower_bound=0)
    save_model_secs: float = _number(
        60.0,
        "Seconds between checkpoints, beside the last one at the end; 0 saves only that one.",
        lower_bound=0.0,
    )
    checkpoint_transfer: str = _choice(
        "shared",
        ["shared", "stream"],
        "shared: every ps writes its part into --logdir, which all see. stream: the ps send it to "
        "the chief, which writes.",
    )
    patience: int | None = _count(
        None,
        "Evaluations without a better one after which an evaluator ends training. Default: it "
        "never does.",
        lower_bound=1,
    )
    save_summaries_secs: float = _number(
        10.0, "Seconds between summaries; 0 writes none.", lower_bound=0.0
    )
    test_epochs: float = _number(
        1.0,
        "Epochs between the chief's tests for TensorBoard; 0: only the one at the end.",
        lower_bound=0.0,
    )
    preempt_grace_secs: float = _number(
        30.0,
        "Seconds that a worker has after SIGTERM, the chief for a last checkpoint. What kills it "
        "later (--grace_secs of harness.launch, a cluster manager) must give it more.",
        lower_bound=0.0,
    )
    exit_codes: str = _choice(
        "plain",
        list(exit_codes.SCHEMES),
        "Whose exit codes the process ends with (docs/launch.md): of an engine that starts it "
        "without a launcher.",
    )
    log_every_steps: int = _count(
        500,
        "Global steps (those of all workers) between each worker's progress lines.",
        lower_bound=1,
    )
    start_timeout_secs: float | None = _number(
        None,
        "Seconds to wait for the cluster to start, 7200 at most. Default: 7200. Recoveries are not "
        "bounded by it.",
        lower_bound=0.0,
    )
    sync: bool = _switch(
        False, "Synchronous training: the gradients of a step are averaged on the ps."
    )
    elastic: bool = _switch(
        False,
        "Workers join and leave while training runs: the data is dealt out to those who are there, "
        "and a step of --sync takes their gradients. The same on every task.",
    )
    max_staleness: int | None = _count(
        None,
        "Without --sync: steps that a worker may be ahead of the slowest. Default: no bound.",
        lower_bound=0,
    )
    ps_backups: int = _count(
        0,
        "1 mirrors the variables of each ps on the next one: a ps that dies goes on from there, "
        "without a checkpoint.",
        lower_bound=0,
        upper_bound=1,
    )
    ps_backups_lag: int = _count(
        100,
        "With --ps_backups: how many of its last steps a ps that dies may lose; it waits for its "
        "backup before it is more. 0 loses no step: each one waits for the backup.",
        lower_bound=0,
    )

    @classmethod
    def from_flags(cls) -> "RunConfig":
        """Returns the config of the command line.

        Raises:
            InvalidArgumentError: A limit is invalid, or the cluster is not described whole.
        """
        values: dict[str, Any] = {
            name: flags.FLAGS[name].value
            for name in cls.__dataclass_fields__
            if name not in _NO_FLAGS
        }
        root = (values["logdir"] or ()) if flags.FLAGS["logdir"].present else None
        found = harness.find_identity([], os.environ)
        cluster = (
            rt.ClusterSpec({"worker": ["localhost:0"]}) if found.cluster is None else found.cluster
        )
        # The server starts when all flags were checked.
        me = harness.Member(cluster, found.job, found.index, server=None)
        return cls(**values, me=me, checkpoint_root=root, limits=_given_limits())

    @property
    def given_security(self) -> rt.Security | None:
        """The security that the flags ask for; None leaves it to the environment."""
        return rt.Security.from_text(self.security) if self.security else None

    @property
    def workers(self) -> int:
        """The number of tasks that train.

        The cluster may leave tasks out, so the number is at least that of this task plus one.
        """
        return max(self.me.workers, self.me.number + 1)

    @property
    def rate(self) -> float:
        """The learning rate at the start."""
        return UPDATE_RULES[self.optimizer][0] if self.learning_rate is None else self.learning_rate

    @property
    def batches_per_step(self) -> int:
        """Number of batches, each of one worker, that one global step consumes."""
        # With workers that come and go, the number at the start stands for the run.
        return self.workers if self.sync else 1

    def steps_per_epoch(self, examples: int) -> float:
        """Returns the number of global steps in one pass over ``examples`` training examples."""
        return examples / (self.batch_size * self.accumulate * self.batches_per_step)

    def last_step(self, examples: int) -> int:
        """Returns the global step at which training on ``examples`` examples ends."""
        return (
            round(self.epochs * self.steps_per_epoch(examples))
            if self.train_steps is None
            else self.train_steps
        )

    @property
    def trains_all_data(self) -> bool:
        """True if training ends when all data is dealt out, and not at a global step."""
        return self.elastic and self.train_steps is None

    def problem(self) -> str | None:
        """Returns a message about the first flags that do not fit together, or None."""
        try:
            monitoring.StepProfiler.from_text(self.profile_steps, self.logdir)
        except ValueError as error:
            return str(error)
        return next((line for is_wrong, line in self._find_conflicts() if is_wrong), None)

    def _find_conflicts(self) -> Iterator[tuple[object, str]]:
        """Yields pairs (is wrong, message) for flags that do not fit together."""
        bounded, evaluates = self.max_staleness is not None, self.me.job == "evaluator"
        ps, chiefs = (len(self.me.cluster.as_dict().get(job, ())) for job in ("ps", "chief"))
        yield (
            self.sync and bounded,
            "--max_staleness bounds asynchronous training: leave it out with --sync",
        )
        yield (
            self.ps_backups and ps < 2,
            "--ps_backups=1 mirrors each ps on the next one: it needs two --ps_hosts at least, "
            f"and there are {ps}",
        )
        yield (
            self.ps_backups and (self.sync or bounded),
            "--ps_backups mirrors variables, not who waits for whom: leave it out with --sync and "
            "--max_staleness",
        )
        yield (
            self.elastic and self.prefetch,
            "--elastic counts a batch with its own step: leave --prefetch out",
        )
        yield chiefs > 1, f"--chief_hosts names {chiefs} tasks: a run has one chief"
        yield (
            evaluates and not self.logdir,
            "--logdir is empty: an evaluator follows the checkpoints of one",
        )
        yield (
            evaluates and self.patience is not None and not ps,
            "--patience asks a ps to end training: it needs --ps_hosts",
        )
        yield (
            not evaluates and not ps and self.me.workers > 1,
            "--ps_hosts is empty: a cluster needs at least one parameter server, as in "
            "--ps_hosts=localhost:2222",
        )


def chosen_exit_codes() -> str:
    """Returns the value of ``--exit_codes``, which also counts where no config can be made."""
    return str(flags.FLAGS["exit_codes"].value)


def _given_limits() -> rt.Limits | None:
    told = {row.name: flags.FLAGS[_LIMIT + row.name].value for row in rt.Limits.rows()}
    given = {name: value for name, value in told.items() if value is not None}
    # A limit that is not given keeps the value of the environment.
    return replace(rt.Limits.from_environ(os.environ), **given) if given else None


# Flags of a task, which `find_identity` reads.
for _job in ("ps", "worker", "chief"):
    flags.DEFINE_list(f"{_job}_hosts", [], f"host:port of each {_job}, the same on every task.")
flags.DEFINE_string(
    "job_name",
    None,
    "What this process is: ps, worker, chief or evaluator, which follows --logdir.",
)
flags.DEFINE_integer(
    "task_index", None, "Which one of its job this process is, from 0.", lower_bound=0
)
for _row in rt.Limits.rows():
    _define = flags.DEFINE_float if _row.kind is float else flags.DEFINE_integer
    _define(_LIMIT + _row.name, None, f"Limit ({_row.of}): {_row.help} Default: {_row.default}.")
for _field in fields(RunConfig):
    if _field.metadata:
        _field.metadata["define"](_field.name)
flags.register_validator(
    "epochs",
    math.isfinite,
    "give a number; 1e9 is more than anybody waits for, where a run is to be stopped by hand",
)
flags.register_validator(
    "learning_rate", lambda rate: rate is None or math.isfinite(rate), "give a number"
)
flags.adopt_module_key_flags(monitoring)  # --help lists them too
