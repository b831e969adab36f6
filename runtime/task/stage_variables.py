"""The variables of a stage: the values that enter its program, and the slots for the values that leave it.

The executor finds the variables when it prepares the stage, so that a run looks up no name.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from runtime.plan.plan import Stage, VariableOutput
from runtime.state.store import Store, VariableClaim, VariableSlot
from runtime.tensor_spec import AnyArray, TensorSpec


@functools.lru_cache(4096)
def _same_object(spec: TensorSpec) -> TensorSpec:
    """Returns one object for equal specs: stages that share a variable compare specs by identity in every step."""
    return spec


@dataclass(frozen=True, slots=True)
class StageVariables:
    """The variables of one stage in the store of the task.

    Attributes:
        slots: slots of all variables.
        claim: right to all variables, for a run of the program.
        reads: slot and spec of the variables that enter the program, and True for those that the
            program writes.
        writes: slot and spec of the variables that the program writes.
        made: slot and bytes of the variables that may have no value before.
        handed_out: slot and spec of the variables that are outputs of the stage.
        handed_slots: slots of these variables.
    """

    slots: list[VariableSlot]
    claim: VariableClaim
    reads: list[tuple[VariableSlot, TensorSpec, bool]]
    writes: list[tuple[VariableSlot, TensorSpec]]
    made: list[tuple[VariableSlot, int]]
    handed_out: list[tuple[VariableSlot, TensorSpec]]
    handed_slots: list[VariableSlot]

    @classmethod
    def find(cls, store: Store, stage: Stage) -> "StageVariables":
        """Finds the variables of a stage in a store; makes empty slots for new variables."""
        slots = [store.slot(v.container, v.name) for v in stage.variables]
        specs = [_same_object(TensorSpec(v.shape, v.dtype)) for v in stage.variables]
        pairs = list(zip(slots, specs, strict=True))
        # A variable that is read has a value already, and keeps its size.
        made = [i for i in stage.writes if i not in stage.reads and not specs[i].is_string]
        outputs = [o.index for o in stage.outputs if isinstance(o, VariableOutput)]
        return cls(
            slots,
            VariableClaim(slots),
            [(*pairs[i], i in stage.writes) for i in stage.reads],
            [pairs[i] for i in stage.writes],
            [(slots[i], specs[i].nbytes) for i in made],
            [pairs[i] for i in outputs],
            [slots[i] for i in outputs],
        )

    def take(self, task: str) -> list[AnyArray]:
        """Returns the values that enter the program; the claim must be held.

        Raises:
            FailedPreconditionError: A variable is not initialised.
            AbortedError: The value of a variable was lost.
            InvalidArgumentError: A variable has another shape or dtype.
        """
        arguments = []
        for slot, spec, written in self.reads:
            value = slot.checked(spec, task)
            # A reader has the array and has not pinned the array yet, so the program updates a
            # copy.
            arguments.append(value.copy() if written and slot.readers else value)
        return arguments

    def exchange(self, results: Sequence[jax.Array], store: Store, task: str) -> list[AnyArray]:
        """Stores the new values and returns the values that are handed out; the claim must be held."""
        fresh = False
        with store.lock:
            for (slot, spec), new in zip(self.writes, results, strict=False):
                if slot.value is None:
                    fresh, slot.lost = True, ""
                slot.value, slot.spec = new, spec
            if fresh:
                store.changed.notify_all()
            handed = [slot.checked(spec, task) for slot, spec in self.handed_out]
            # Until the readers have pinned the arrays, an update must not donate them.
            for slot in self.handed_slots:
                slot.readers += 1
            return handed
