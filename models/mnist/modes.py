"""How the workers of the example train together: asynchronously, with a bound, in step over ps, or collectively."""

import contextlib

import harness
import runtime as rt
from models.mnist.config import COLLECTIVE, PS, Config

Together = harness.Optimizer | harness.SyncReplicas | harness.CollectiveReplicas | harness.StaleSynchronous


def server(config: Config) -> rt.Server:
    """The server of a task, with a backup if it is a ps and that is wanted."""
    hosts = {"ps": config.ps_hosts, "worker": config.worker_hosts or ["localhost:0"]}
    cluster = rt.ClusterSpec({job: list(tasks) for job, tasks in hosts.items() if tasks})
    if config.job_name != "ps":
        return rt.Server(cluster, config.job_name, config.task_index, checkpoint_root=config.checkpoint_root)
    lag = 0 if config.ps_backups_sync else config.ps_backups_lag
    return rt.Server(
        cluster,
        "ps",
        config.task_index,
        ps_backups=config.ps_backups,
        ps_backups_lag=lag,
        checkpoint_root=config.checkpoint_root,
    )


def where(cluster: rt.ClusterSpec | None, task_index: int) -> contextlib.AbstractContextManager[None]:
    """The device scope of the graph: variables on the ps and computation on this worker, or all in this process."""
    if cluster is None:
        return rt.device(None)
    return rt.device(rt.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{task_index}"))


def together(optimizer: harness.Optimizer, config: Config) -> Together:
    """The optimizer as the mode wants it: it has the same methods."""
    if config.sync == PS:
        needed = config.replicas_to_aggregate or config.workers
        return harness.SyncReplicas(optimizer, needed, config.workers, sync_timeout_secs=config.sync_timeout_secs)
    if config.sync == COLLECTIVE:
        return harness.CollectiveReplicas(optimizer)
    if config.max_staleness is not None:
        return harness.StaleSynchronous(optimizer, config.max_staleness)
    return optimizer
