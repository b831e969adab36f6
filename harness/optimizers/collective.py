"""Collective training: every process holds the whole model, and XLA's collectives average the gradients.

For dense models where no ps is wanted. Joining, averaging and noticing a lost process are `jax.distributed`'s and XLA's
(gloo on CPU, NCCL on GPU). What is here fits them under the same optimizer, Supervisor, Saver and summaries:

    group = harness.join_group(worker_hosts, task_index)
    with group.member():
        train_op = harness.CollectiveReplicas(harness.Optimizer(optax.adam(1e-3))).minimize(loss, global_step)
        supervisor = harness.Supervisor(logdir=group.logdir(logdir), global_step=global_step)
        with supervisor.managed_session("") as session: ...

A group does not survive the loss of a process: the others end, with the exit code of
``exit_codes.LOST`` (75), and whoever started them (the
launcher, a cluster manager) starts all of them again. They go on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging as std_logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from absl import logging

import runtime as rt
from harness import exit_codes
from harness.optimizers.optimizer import AnyOptimizer, GradientAndVariable, WrappedOptimizer


@dataclass(frozen=True)
class Group:
    """The processes that train together.

    Attributes:
        index: this process's number.
        size: how many there are.
    """

    index: int
    size: int

    def logdir(self, directory: str | None) -> str | None:
        """``directory`` in process 0, which restores, saves and writes summaries for all; None elsewhere."""
        return directory if self.index == 0 else None

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """Ends the process, with an error that asks to be started again, when the group is lost inside.

        Any other error ends it too, so that the rest of the group does not wait for it.
        """
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            if isinstance(error, rt.lowlevel.GroupLostError):
                logging.error("process %d: %s", self.index, error)
            else:
                logging.exception("process %d of the group fails", self.index)
            self._leave(exit_codes.of_error(error))
        if self.size > 1:
            jax.distributed.shutdown()

    def _leave(self, how: exit_codes.ExitCode) -> None:
        # Not sys.exit: leaving in order would wait, at a barrier, for the processes that are lost.
        std_logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes.code(how))


def join_group(
    hosts: Sequence[str],
    index: int,
    *,
    start_timeout_secs: int = 300,
    heartbeat_timeout_secs: int = 20,
    local_device_ids: Sequence[int] | None = None,
    security: rt.Security | None = None,
) -> Group:
    """Joins this process with the others; waits until all are there. Must come before anything uses JAX.

    Args:
        hosts: host:port of every process, the same everywhere; the first one's port is used to meet.
        index: this process's number.
        start_timeout_secs: how long to wait for the others.
        heartbeat_timeout_secs: after so long without a sign of life from a process, the group is lost.
        local_device_ids: the accelerators that this process uses, where several processes share a host.
        security: has to be ``runtime.Security.insecure()`` where the hosts are others than this one, or
            ``BELLWETHER_SECURITY`` ``insecure``: `jax.distributed` asks nobody who they are.

    Raises:
        InvalidArgumentError: ``index`` is not below the number of hosts, or others are to be let in without a word.
    """
    if not 0 <= index < len(hosts):
        raise rt.InvalidArgumentError(f"process {index} is not among the {len(hosts)} of the group")
    others = [host for host in hosts if not _is_loopback(host)]
    security = security or rt.Security.from_environ(os.environ)
    if others and len(hosts) > 1:
        if security is None or not security.lets_everybody_in:
            raise rt.InvalidArgumentError(
                f"collective training on {others[0]} lets in whoever reaches it, whatever certificates there are, as "
                "jax.distributed knows none: say that this is wanted by BELLWETHER_SECURITY=insecure on every process"
            )
        logging.warning("process %d of the group is insecure: whoever reaches %s can join it", index, hosts[0])
    if len(hosts) > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(
                hosts[0],
                len(hosts),
                index,
                local_device_ids,
                initialization_timeout=start_timeout_secs,
                heartbeat_timeout_seconds=heartbeat_timeout_secs,
                shutdown_timeout_seconds=heartbeat_timeout_secs,
            )
        except Exception as error:
            logging.error("process %d cannot join the group at %s: %s", index, hosts[0], error)
            Group(index, len(hosts))._leave(exit_codes.LOST)
    return Group(index, len(hosts))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class CollectiveReplicas(WrappedOptimizer):
    """Makes an optimizer apply the mean of all processes' gradients, the same in every process.

    Args:
        optimizer: what applies the mean. Its variables, as all others, live in each process.
        name: first part of the names of operations.
    """

    def __init__(self, optimizer: AnyOptimizer, *, name: str = "collective_replicas") -> None:
        super().__init__(optimizer, name)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that averages gradients over the group and applies the mean.

        Make all variables of the graph before: what is added to the graph's local initialisation here gives every
        process the values that process 0 has restored or initialised.

        Args:
            grads_and_vars: what ``compute_gradients`` gave, possibly changed.
            global_step: counts the updates, the same in every process.
            name: operation name.
        """
        given = [(g, v) for g, v in grads_and_vars if g is not None]
        means = rt.lowlevel.group_mean([g for g, _ in given], name=f"{self.name}/mean") if given else []
        train = self.optimizer.apply_gradients(
            [*zip(means, (v for _, v in given), strict=True)] or grads_and_vars, global_step, name
        )
        with rt.control_dependencies(None), rt.name_scope(None):
            rt.get_default_graph().add_to_collection(rt.GraphKeys.LOCAL_INIT_OP, self._agree())
        return train

    def _agree(self) -> rt.Operation:
        """Initialises the local variables, and takes over all global ones from process 0."""
        variables = rt.global_variables()
        broadcast = rt.lowlevel.group_broadcast([v.read_value() for v in variables], name=f"{self.name}/broadcast")
        assigned = [v.assign(value).op for v, value in zip(variables, broadcast, strict=True)]
        return rt.group(*assigned, rt.local_variables_initializer(), name=f"{self.name}/agree")
