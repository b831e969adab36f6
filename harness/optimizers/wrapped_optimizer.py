"""What the optimizers that wrap another one have in common."""

from __future__ import annotations

from collections.abc import Sequence

import runtime as rt
from harness.optimizers.optimizer import GradientAndVariable, Optimizer


def updates_of(train: rt.Operation) -> list[rt.Operation]:
    """The updates that ``train``, just made by ``Optimizer.apply_gradients``, stands for.

    What the caller's open ``control_dependencies`` hold goes before them and is none of them.
    """
    before = train.graph.under_control
    return [op for op in train.control_inputs if op not in before]


class WrappedOptimizer:
    """An optimizer that changes how the updates of another one come together: what is not that is the other's.

    Args:
        optimizer: what applies gradients to variables.
        name: first part of the names of operations.
    """

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.name = name
        self.optimizer = optimizer

    def minimize(
        self,
        loss: rt.Tensor,
        global_step: rt.Variable | None = None,
        var_list: Sequence[rt.Variable] | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that computes this worker's gradients and applies them as ``apply_gradients`` does."""
        return self.apply_gradients(self.compute_gradients(loss, var_list), global_step, name)

    def compute_gradients(
        self, loss: rt.Tensor, var_list: Sequence[rt.Variable] | None = None
    ) -> list[GradientAndVariable]:
        """Pairs of (gradient, variable) of this worker; the wrapped optimizer's."""
        return self.optimizer.compute_gradients(loss, var_list)

    def apply_gradients(
        self,
        grads_and_vars: Sequence[GradientAndVariable],
        global_step: rt.Variable | None = None,
        name: str | None = None,
    ) -> rt.Operation:
        """One operation that applies gradients, each on its variable's task; the wrapped optimizer's."""
        return self.optimizer.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, variable: rt.Variable, name: str) -> rt.Variable | None:
        """The wrapped optimizer's slot."""
        return self.optimizer.get_slot(variable, name)

    def get_slot_names(self) -> list[str]:
        """The wrapped optimizer's slot names."""
        return self.optimizer.get_slot_names()

    def variables(self) -> list[rt.Variable]:
        """The wrapped optimizer's variables."""
        return self.optimizer.variables()
