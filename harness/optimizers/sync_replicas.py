"""Synchronous training: the gradients of several workers are averaged and applied once."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

import runtime as rt
from harness.optimizers.optimizer import (
    AnyOptimizer,
    GradientAndVariable,
    Optimizer,
    WrappedOptimizer,
    mean_is_clipped,
    updates_of,
)
from harness.optimizers.separable import what_mixes
from harness.optimizers.sync_chief import SyncRunner, make_orders
from harness.optimizers.tables import table_of, variables_of
from harness.tensorboard import summary

_TASK = re.compile(r"/task:(\d+)")
_ALL = rt.lowlevel.ALL_WORKERS


class _MadeOperations(NamedTuple):
    step: rt.Tensor
    accepted: rt.Tensor
    counted: rt.Tensor
    dropped: rt.Tensor
    status: rt.Tensor
    runner: SyncRunner


class SyncReplicas(WrappedOptimizer):
    """A synchronous optimizer: ``replicas_to_aggregate`` gradients are averaged and applied as one step.

    A worker pushes all its gradients for one ps in one message, and the rows of each table in one
    more, with the step at which it read the variables, and is answered when that step is over.
    Gradients of another step are dropped and counted. Each of the gradients in an aggregate comes
    from another worker, unless there are more to aggregate than workers. See ``docs/sync.md``.

        opt = harness.SyncReplicas(harness.Optimizer(optax.sgd(0.5)), replicas_to_aggregate=3, total_num_replicas=4)
        train_op = opt.minimize(loss, global_step=global_step)

    ``optax.clip_by_global_norm`` at the front of the optimizer's chain clips the mean, over all ps.

    A Supervisor or a monitored session runs the work of the chief, which is in the graph's
    collection of queue runners.

    Args:
        optimizer: the optimizer that applies the mean.
        replicas_to_aggregate: gradients in one aggregate. Below ``total_num_replicas``, the other
            workers are backups: the step does not wait for the slowest. Above
            ``total_num_replicas``, each worker adds several gradients to one aggregate. None, with
            ``elastic``: one gradient of each worker that is there.
        total_num_replicas: workers; ``replicas_to_aggregate`` by default.
        worker: this worker's number, below ``total_num_replicas``. By default the task number of
            the device on which the gradients are computed; without a device, the session tells
            workers apart. A task of a job called chief has the last number.
        is_chief: True on the worker that chooses the aggregates when there are several ps. By
            default the chief of the Supervisor or the monitored session; with a plain session
            worker 0, or the task of a job called chief.
        sync_timeout_secs: seconds for which a step waits for a missing worker. Then the step
            continues with the mean of the gradients that are there. Later steps do not wait for
            that worker until the worker is back. None waits for ever.
        elastic: True if workers come and go while training runs; ``total_num_replicas`` has no
            meaning then. A step waits for each worker that has pushed gradients, until the worker
            is done or gives no sign of life. While there are fewer workers, an aggregate has fewer
            than ``replicas_to_aggregate`` gradients.
        name: name of the optimizer, the same in all workers.

    Raises:
        InvalidArgumentError: a number is below 1, or ``worker`` is not below
            ``total_num_replicas``, or ``replicas_to_aggregate`` is None without ``elastic``.
    """

    drops_gradients = True

    def __init__(
        self,
        optimizer: AnyOptimizer,
        replicas_to_aggregate: int | None = None,
        total_num_replicas: int | None = None,
        *,
        worker: int | None = None,
        is_chief: bool | None = None,
        sync_timeout_secs: float | None = None,
        elastic: bool = False,
        name: str = "sync_replicas",
    ) -> None:
        if elastic:
            if total_num_replicas is not None:
                raise rt.InvalidArgumentError(
                    f"{name}: with elastic nobody knows total_num_replicas: leave it out"
                )
            total_num_replicas = _ALL
            replicas_to_aggregate = _ALL if replicas_to_aggregate is None else replicas_to_aggregate
        elif replicas_to_aggregate is None:
            raise rt.InvalidArgumentError(
                f"{name}: give replicas_to_aggregate, or elastic=True for all who are there"
            )
        total = replicas_to_aggregate if total_num_replicas is None else total_num_replicas
        if replicas_to_aggregate < 1 or total < 1:
            raise rt.InvalidArgumentError(
                f"{name}: cannot aggregate {replicas_to_aggregate} gradients of {total} workers"
            )
        if worker is not None and not 0 <= worker < total:
            raise rt.InvalidArgumentError(
                f"{name}: worker {worker} is not among the {total} workers"
            )
        super().__init__(optimizer, name)
        self._warn_of_clip()
        self._needed = replicas_to_aggregate
        self._total = total
        self._worker = worker
        self._is_chief = is_chief
        self._elastic = elastic
        self._timeout_secs = sync_timeout_secs
        self._made: _MadeOperations | None = None

    def _warn_of_clip(self) -> None:
        """Warns of a transformation of all gradients, such as a clip, that acts on each worker's alone."""
        inner = self._innermost
        mixing = inner.before_push and what_mixes(inner.before_push, {})
        if mixing:
            logging.warning(
                "%s: before_push=%s acts on the gradients of each worker and not on their mean, so "
                "the workers do not train as one process; optax.clip_by_global_norm at the front of "
                "the optimizer's chain acts on the mean",
                *(self.name, mixing[0]),
            )

    # -- building ----------------------------------------------------------------------------------

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes an operation that sends gradients to the aggregate.

        The operation is done when the step of these gradients is finished.

        Args:
            grads_and_vars: pairs of ``compute_gradients``, possibly changed: a change, such as
                clipping, precedes averaging.
            global_step: variable that counts the aggregates. A step that fetches the variable too
                gets the value after the step.
            name: operation name.

        Raises:
            InvalidArgumentError: no variables, or no global step, or the worker's number is too
                large.
        """
        if not grads_and_vars:
            raise rt.InvalidArgumentError("Must supply at least one variable")
        if global_step is None:
            raise rt.InvalidArgumentError("Global step is required to check staleness")
        graph = global_step.graph
        with graph.as_default():
            token = mean_is_clipped.set(True)
            try:
                train = self.optimizer.apply_gradients(grads_and_vars, global_step, name)
            finally:
                mean_is_clipped.reset(token)
            updates = updates_of(train)
            worker = self._worker_number(grads_and_vars)
            with rt.name_scope(None), rt.control_dependencies(None):
                return self._make_pushes(updates, grads_and_vars, global_step, worker)

    @property
    def _innermost(self) -> Optimizer:
        inner = self.optimizer
        while isinstance(inner, WrappedOptimizer):
            inner = inner.optimizer
        return inner

    def _worker_number(self, grads_and_vars: Sequence[GradientAndVariable]) -> int | None:
        if self._worker is not None:
            return self._worker
        number = worker_of(grads_and_vars)
        if number is None and on_chief(grads_and_vars):
            # Workers count from 0, whether there is a chief's job or not. So the chief takes the
            # last number.
            return self._total - 1
        if number is not None and number >= self._total:
            raise rt.InvalidArgumentError(
                f"{self.name}: this is worker {number}, but total_num_replicas is {self._total}: "
                "give the number of workers, or worker="
            )
        return number

    def _make_pushes(
        self,
        applied: Sequence[rt.Operation],
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable,
        worker: int | None,
    ) -> rt.Operation:
        assert worker is None or 0 <= worker < self._total, "a worker beyond the last"
        groups = _group_updates(applied, global_step)
        alone = len(groups) == 1
        quorums = self._make_quorums(list(groups), grads_and_vars, global_step)
        # Gradients carry the step at which their variables were read.
        stamp = global_step.read_value()
        pairs = zip(quorums, groups.values(), strict=True)
        pushes = [quorum.push(updates, stamp, worker) for quorum, updates in pairs]
        step, accepted = pushes[0].outputs
        _, counted, dropped, _ = quorums[0].counts()
        runner = SyncRunner(
            [] if alone else make_orders(quorums),
            needed=self._needed,
            total=self._total,
            timeout_secs=self._timeout_secs,
            name=self.name,
            elastic=self._elastic,
            clips=self._innermost.clip_norm is not None,
            leads=bool(self._is_chief) or worker == 0 or on_chief(grads_and_vars),
        )
        self._made = _MadeOperations(step, accepted, counted, dropped, quorums[0].status(), runner)
        if self._is_chief is not False:
            global_step.graph.add_to_collection(rt.GraphKeys.QUEUE_RUNNERS, runner)
        with rt.device(None):
            summary.scalar(f"{self.name}/dropped_gradients", dropped)
        return rt.group(*pushes, name=f"{self.name}/train")

    def _make_quorums(
        self,
        parts: Sequence[tuple[str, str]],
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable,
    ) -> list[rt.lowlevel.Quorum]:
        """Makes a quorum for each device and table, "" for variables, beside a variable of that device."""
        # A quorum lies where its variable lies.
        trained = [v for g, v in grads_and_vars if g is not None]
        beside = {v.device: v for of in trained for v in variables_of(of)}
        beside[global_step.device] = global_step
        # The gradients are the first inputs of a task's updates, one for each pair.
        clipped = Counter(v.device for v in trained if not isinstance(v, rt.Table))
        shared_name = self.shared_name(grads_and_vars)
        return [
            rt.lowlevel.Quorum(
                beside[device],
                needed=self._needed,
                total=self._total,
                alone=len(parts) == 1,
                leads=device == global_step.device and not table,
                timeout_secs=self._timeout_secs,
                tasks=[d.split("/device:")[0] for d, _ in parts],
                elastic=self._elastic,
                clip_norm=self._innermost.clip_norm,
                clipped=1 if table else clipped[device],
                name=shared_name,
                table=table,
            )
            for device, table in parts
        ]

    @property
    def _made_operations(self) -> _MadeOperations:
        if self._made is None:
            raise rt.InvalidArgumentError(
                f"{self.name}: apply_gradients should be called before this"
            )
        return self._made

    # -- what it knows -----------------------------------------------------------------------------

    @property
    def accepted(self) -> rt.Tensor:
        """Returns a bool tensor: true if the gradients of this step counted.

        Fetch it beside the training operation.
        """
        return self._made_operations.accepted

    @property
    def step(self) -> rt.Tensor:
        """Returns the global step after the aggregate to which this step's gradients belong."""
        return self._made_operations.step

    @property
    def dropped_gradients(self) -> rt.Tensor:
        """Returns an int64 tensor: the gradients of all workers that were dropped as stale so far."""
        return self._made_operations.dropped

    @property
    def accepted_gradients(self) -> rt.Tensor:
        """Returns an int64 tensor: the gradients of all workers that were applied so far."""
        return self._made_operations.counted

    @property
    def waiting_for(self) -> rt.Tensor:
        """Returns a string tensor: the workers that the present step waits for, or empty."""
        return self._made_operations.status

    def get_chief_queue_runner(self) -> SyncRunner:
        """Returns the work that the chief runs beside training.

        With one ps there is none.

        Raises:
            InvalidArgumentError: ``apply_gradients`` was not called yet.
        """
        return self._made_operations.runner


def _group_updates(
    updates: Sequence[rt.Operation], global_step: rt.Variable
) -> dict[tuple[str, str], list[rt.Operation]]:
    """Returns the updates of each quorum by device and table, "" for variables."""
    # The task with the global step comes first, and leads.
    groups: dict[tuple[str, str], list[rt.Operation]] = {(global_step.device, ""): []}
    for op in updates:
        groups.setdefault((op.device, table_of(op)), []).append(op)
    return groups


def worker_of(grads_and_vars: Sequence[GradientAndVariable]) -> int | None:
    """Returns the number of the worker on whose device the gradients are computed.

    Returns None if the device tells no worker.

    The task of a job called chief has no number, since its index, 0, is the index of a worker too.
    """
    if on_chief(grads_and_vars):
        return None
    found = {
        match.group(1)
        for g, v in grads_and_vars
        if (match := _TASK.search(_device_elsewhere(g, v)))
    }
    return int(found.pop()) if len(found) == 1 else None


def on_chief(grads_and_vars: Sequence[GradientAndVariable]) -> bool:
    """Returns True if gradients are computed by the task of a job that is called chief."""
    return any(
        _device_elsewhere(g, v).startswith(("/job:chief/", "/job:master/"))
        for g, v in grads_and_vars
    )


def _device_elsewhere(gradient: rt.Tensor | rt.RowGradient | None, of: rt.Variable) -> str:
    """Returns the device of a gradient; "" if its variable lies there, or there is no gradient."""
    if gradient is None or gradient.device in {v.device for v in variables_of(of)}:
        return ""
    return gradient.device
