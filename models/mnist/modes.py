"""How the workers of the example train together: asynchronously, with a bound, in step over ps, or collectively."""

from typing import Any

from absl import flags

import harness
import runtime as rt

ASYNC, PS, COLLECTIVE = "async", "ps", "collective"
FLAGS = flags.FLAGS


class _ModeParser(flags.EnumParser):
    """Also takes what a flag without a value means: ``--sync`` is ``--sync=ps``, ``--nosync`` is ``--sync=async``."""

    def parse(self, argument: str) -> str:
        mode: str = super().parse({"true": PS, "false": ASYNC}.get(argument, argument))
        return mode


def _define_sync() -> None:
    parser = _ModeParser([ASYNC, PS, COLLECTIVE])
    flag: flags.Flag[str] = flags.Flag(
        parser,
        flags.ArgumentSerializer(),
        "sync",
        ASYNC,
        "Synchronous training. --sync or --sync=ps: gradients are averaged on the ps. --sync=collective: no ps, every "
        "process holds the model (start with --ps=0). --sync=async: each worker for itself.",
        boolean=True,
    )
    flags.DEFINE_flag(flag)


_define_sync()
flags.DEFINE_integer(
    "replicas_to_aggregate",
    None,
    "With --sync: gradients averaged in one step. Default: one of each worker. Fewer: the slowest are not waited for.",
    lower_bound=1,
)
flags.DEFINE_float(
    "sync_timeout_secs",
    None,
    "With --sync: seconds after which a step goes on without workers that are missing. Default: it waits for them.",
    lower_bound=0.0,
)
flags.DEFINE_integer(
    "max_staleness",
    None,
    "Without --sync: steps that a worker may be ahead of the slowest. Default: no bound.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "ps_backups",
    0,
    "1 backs the variables of each ps up on the next one: a ps that dies goes on from there, without a checkpoint.",
    0,
    1,
)
flags.DEFINE_integer(
    "ps_backups_lag",
    100,
    "With --ps_backups: how many of its last steps a ps that dies may lose; it waits for its backup before it is more.",
    lower_bound=0,
)
flags.DEFINE_bool(
    "ps_backups_sync", False, "With --ps_backups: lose no step. Each one waits for the backup, as --ps_backups_lag=0."
)


def problem(ps: int) -> str | None:
    """What is wrong with the flags of this module together, None when they fit.

    Args:
        ps: how many ps tasks there are.
    """
    if FLAGS.sync == COLLECTIVE and ps:
        return "--sync=collective has no use for --ps_hosts: start it without ps, as in harness.launch --ps=0"
    if FLAGS.sync != ASYNC and FLAGS.max_staleness is not None:
        return "--max_staleness bounds asynchronous training: leave it out with --sync"
    if FLAGS.ps_backups and ps < 2:
        return f"--ps_backups=1 backs each ps up on the next one: it needs two --ps_hosts at least, and there are {ps}"
    if FLAGS.ps_backups and (FLAGS.sync != ASYNC or FLAGS.max_staleness is not None):
        return "--ps_backups backs variables up, not who waits for whom: leave it out with --sync and --max_staleness"
    if FLAGS.sync != PS and (FLAGS.replicas_to_aggregate is not None or FLAGS.sync_timeout_secs is not None):
        return "--replicas_to_aggregate and --sync_timeout_secs belong to --sync=ps"
    return None


def server(cluster: Any, job: str, index: int) -> rt.Server:
    """The server of a task, with a backup if it is a ps and that is wanted."""
    if job != "ps":
        return rt.Server(cluster, job, index)
    lag = 0 if FLAGS.ps_backups_sync else FLAGS.ps_backups_lag
    return rt.Server(cluster, job, index, ps_backups=FLAGS.ps_backups, ps_backups_lag=lag)


def together(optimizer: harness.Optimizer, workers: int) -> Any:
    """The optimizer as the mode wants it: it has the same methods."""
    if FLAGS.sync == PS:
        needed = FLAGS.replicas_to_aggregate or workers
        return harness.SyncReplicas(optimizer, needed, workers, sync_timeout_secs=FLAGS.sync_timeout_secs)
    if FLAGS.sync == COLLECTIVE:
        return harness.CollectiveReplicas(optimizer)
    if FLAGS.max_staleness is not None:
        return harness.StaleSynchronous(optimizer, FLAGS.max_staleness)
    return optimizer


def batches_per_step(workers: int) -> int:
    """How many workers' batches one global step stands for."""
    if FLAGS.sync == PS:
        return int(FLAGS.replicas_to_aggregate or workers)
    return workers if FLAGS.sync == COLLECTIVE else 1


def where(cluster: rt.ClusterSpec | None, task_index: int) -> Any:
    """The device scope of the graph: variables on the ps and computation on this worker, or all in this process."""
    if cluster is None:
        return rt.device(None)
    return rt.device(rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{task_index}"))
