"""Semi-synchronous training: no worker runs ahead of the slowest by more than a bound."""

from collections.abc import Sequence

import runtime as rt
from harness.optimizers.optimizer import (
    AnyOptimizer,
    GradientAndVariable,
    WrappedOptimizer,
    updates_of,
)
from harness.optimizers.sync_replicas import worker_of
from harness.optimizers.tables import table_of


class StaleSynchronous(WrappedOptimizer):
    """A semi-synchronous optimizer: updates are applied at once, but no worker runs far ahead of the slowest.

    After its update, a worker that is more than ``max_staleness`` steps ahead of the slowest
    connected worker waits on the ps that holds the global step.

        optimizer = harness.StaleSynchronous(harness.Optimizer(optax.sgd(0.1)), max_staleness=3)
        train_op = optimizer.minimize(loss, global_step=global_step)

    Args:
        optimizer: the optimizer that applies the gradients.
        max_staleness: number of steps; with 0, all workers are at the same step.
        worker: number of this worker; by default as in ``SyncReplicas``.
        name: name of the optimizer, the same in all workers.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        max_staleness: int,
        *,
        worker: int | None = None,
        name: str = "stale_synchronous",
    ) -> None:
        super().__init__(optimizer, name)
        self._max_staleness = max_staleness
        self._worker = worker

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """Makes an operation that applies gradients and waits for slower workers.

        Raises:
            InvalidArgumentError: There is no global step. Workers meet on the ps that holds the
                global step.
        """
        if global_step is None:
            raise rt.InvalidArgumentError(
                f"{self.name}: a global step is needed: workers meet on the ps that holds it"
            )
        train = self.optimizer.apply_gradients(grads_and_vars, global_step, name)
        updates = updates_of(train)
        for op in updates:
            if table := table_of(op):
                raise rt.InvalidArgumentError(
                    f"{self.name}: table {table!r} is trained, and max_staleness bounds no age of "
                    "rows: it is not supported with tables"
                )
        # The wait is part of the update on one ps, so a worker that waits has pushed all its
        # gradients.
        beside = [op for op in updates if op.device == global_step.device]
        others = [op for op in updates if op.device != global_step.device]
        worker = worker_of(grads_and_vars) if self._worker is None else self._worker
        with global_step.graph.as_default(), rt.name_scope(None), rt.control_dependencies(None):
            meet = rt.lowlevel.bounded_update(
                global_step,
                beside,
                self._max_staleness,
                worker,
                name=self.shared_name(grads_and_vars),
            )
            return rt.group(meet, *others, name=f"{self.name}/train")
