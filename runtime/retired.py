"""Names of earlier versions that are gone: flags, values, arguments, environment variables, classes and methods.

A server looks its arguments and its environment up here, a command line the flags that it could not
parse, and a package its missing names. Each says what to use instead. A name is written as it was
typed: ``--flag``, ``--flag=value``, ``BELLWETHER_NAME``, ``Server(argument=)``, ``harness.Name``,
``runtime.Name``, ``Class.method``.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Final, ParamSpec, TypeVar

from runtime.errors import InvalidArgumentError

_LISTS = "since 0.2 programs of other processes are lists of operations, whose table has what was missing"
_TRACKER = "since 0.2 use on_scalars of the FileWriter (docs/monitoring.md, Experiment trackers)"
_COLLECTIVE = (
    "since 0.2 use jax.distributed for a model without ps, or a mesh in a worker (docs/sync.md)"
)
_SYNC = (
    "since 0.2 leave it out, or use tf.train.SyncReplicasOptimizer of harness.tf1 (docs/sync.md)"
)
_LIMITS: Final[Mapping[str, str]] = {
    "client_connections": "a client has a sixteenth of connections",
    "client_lanes": "a client has a quarter of connections",
    "rpc_connections": "the gRPC port has a quarter of connections",
    "client_waiting_calls": "a connection has a quarter of waiting_calls",
    "client_sessions": "a connection has a sixteenth of sessions",
    "stage_sessions": "four times sessions have stages",
    "held_bytes": "use task_bytes",
    "client_held_bytes": "use client_bytes",
    **dict.fromkeys(
        "frame_secs frame_rate calls orders checkpoint_orders order_secs run_order_secs pause_secs".split()
        + "session_plans plan_slots session_stages spare_stages".split(),
        "this is a constant",
    ),
}
REPLACEMENTS: Final[Mapping[str, str]] = {
    "--sync=collective": _COLLECTIVE,
    "harness.CollectiveReplicas": _COLLECTIVE,
    "harness.join_group": _COLLECTIVE,
    "harness.testing": "since 0.2 it is tests.faults of the repository, outside of the package",
    "harness.Tracker": _TRACKER,
    "harness.MlflowTracker": _TRACKER,
    "harness.WandbTracker": _TRACKER,
    "SyncReplicas.chief_init_op": _SYNC,
    "SyncReplicas.get_init_tokens_op": _SYNC,
    "SyncReplicas.local_step_init_op": _SYNC,
    "SyncReplicas.make_session_run_hook": _SYNC,
    "SyncReplicas.ready_for_local_init_op": _SYNC,
    "ManagedSession.last_step": "since 0.2 it is seen.last of the session",
    "ManagedSession.reached": "since 0.2 it is seen.reached of the session",
    "ManagedSession.note": "since 0.2 use seen.note of the session",
    **{
        f"harness.{name}": f"since 0.2 use tf.train.{name} of harness.tf1 (docs/tf1.md)"
        for name in "FeedFnHook FinalOpsHook GlobalStepWaiterHook ProfilerHook QueueRunner SingularMonitoredSession "
        "add_queue_runner start_queue_runners".split()
    },
    "BELLWETHER_TURNS": "since 0.2 workers that crowd the cores of a host all train at once; leave the variable out",
    "MonitoredTrainingSession(tracker=)": _TRACKER,
    "Supervisor(tracker=)": _TRACKER,
    "Server(admission=)": "since 0.2 workers that crowd the cores of a host all train at once; leave the argument out",
    "--ps_programs": f"{_LISTS}; leave the flag out",
    "BELLWETHER_PS_PROGRAMS": f"{_LISTS}; unset the variable",
    "Server(programs=)": f"{_LISTS}; leave the argument out",
    "--model": "since 0.2 the example has one model, the mlp; leave the flag out",
    "--cluster_from": "since 0.2 the example finds its place as join_cluster does; leave the flag out",
    **dict.fromkeys(
        "--clip_norm --best_by --decay --replicas_to_aggregate --sync_timeout_secs --lease_secs".split(),
        "since 0.2 leave the flag out of the example; a program of your own has the argument of harness or optax",
    ),
    "DataShards(shuffle=)": "since 0.2 every epoch has an order of its own; leave the argument out",
    "--color": "since 0.2 a terminal has colours, unless NO_COLOR is set; leave the flag out",
    "--sync=ps": "since 0.2 use --sync",
    "--sync=async": "since 0.2 use --nosync",
    "--insecure": "since 0.2 use --security=insecure",
    "--ps_backups_sync": "since 0.2 use --ps_backups_lag=0",
    **dict.fromkeys(
        map(
            "SlurmClusterResolver({}=)".format,
            "gpus_per_node gpus_per_task tasks_per_node auto_set_gpu rpc_layer".split(),
        ),
        "since 0.2 the variables of Slurm alone count; leave the argument out",
    ),
    **dict.fromkeys(
        map("Saver({}=)".format, "max_to_keep_best best_metric best_mode".split()),
        "since 0.2 an evaluator keeps the best checkpoint: Evaluator(best_by=) (docs/evaluator.md)",
    ),
    "Saver(pad_step_number=)": "since 0.2 the step in a name has no zeros before it; leave the argument out",
    "harness.export_function": "since 0.2 use jax.export (docs/checkpoints.md)",
    "harness.save_pytree": "since 0.2 use orbax.checkpoint.StandardCheckpointer (docs/checkpoints.md)",
    **dict.fromkeys(
        map(
            "harness.{}".format,
            "CheckpointState checkpoint_exists checkpoints_iterator get_checkpoint_state init_from_checkpoint".split(),
        ),
        "since 0.2 use tf.train of harness.tf1 (docs/checkpoints.md)",
    ),
    **dict.fromkeys(
        "runtime.RandomStrategy runtime.GreedyLoadBalancingStrategy runtime.byte_size_load_fn".split(),
        "since 0.2 give replica_device_setter a function as ps_strategy",
    ),
    "runtime.KubernetesClusterResolver": "since 0.2 use JobSetClusterResolver (docs/kubernetes.md)",
    "runtime.SimpleClusterResolver": "since 0.2 use ClusterSpec",
    "runtime.UnionClusterResolver": "since 0.2 merge the dictionaries of ClusterSpec.as_dict",
    "--exit_codes=skypilot": "since 0.2 there are no codes for SkyPilot; use recover_on_exit_codes: [75, 143]",
    "--for=skypilot": "since 0.2 no task for SkyPilot is printed; write one that uses --ps_hosts and --worker_hosts",
} | {
    form.format(name): f"since 0.2 {instead} (docs/limits.md)"
    for name, instead in _LIMITS.items()
    for form in ("--limit_{}", "Limits({}=)")
}
"""Replacements by name: since which version the name is gone, and what to use instead."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def explain_name(name: str) -> str | None:
    """Returns the line about a name, None for a name that is not gone."""
    line = REPLACEMENTS.get(name)
    return None if line is None else f"{name} is gone: {line}"


def explain_flags(arguments: Iterable[str]) -> str | None:
    """Returns the line about the first flag of a command line that is gone; the flags end at ``--``.

    Examples:
        >>> explain_flags(["--ps=1", "--for", "skypilot"])[:27]
        '--for=skypilot is gone: sin'
    """
    for word, following in pairwise([*arguments, ""]):
        if word == "--":
            break
        flag, equals, value = word.lstrip("-").partition("=")
        for name in (f"--{flag}", f"--{flag}={value if equals else following}"):
            if word.startswith("-") and (line := explain_name(name)):
                return line
    return None


def check_environment(environ: Mapping[str, str]) -> None:
    """Checks that an environment sets no variable that is gone.

    Raises:
        InvalidArgumentError: a variable is gone; names what to use instead.
    """
    for line in filter(None, map(explain_name, environ)):
        raise InvalidArgumentError(line)


def explains_arguments(init: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Returns a constructor that refuses arguments that are gone, where Python would call them unexpected.

    Raises:
        InvalidArgumentError: by the constructor: an argument is gone; names what to use instead.
    """
    owner = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for line in filter(None, (explain_name(f"{owner}({name}=)") for name in kwargs)):
            raise InvalidArgumentError(line)
        return init(*args, **kwargs)

    return checked
