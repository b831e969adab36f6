"""From a graph to a plan: prune, place, partition, lower, and lay the edges between the stages."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import Constant, Deferred, Read, StepId, runs_on_host
from runtime.plan.lower import Traced, lower_stage, static_spec, trace_all
from runtime.plan.partition import Partition, after, partition
from runtime.plan.place import Device, Devices, place
from runtime.plan.plan import Hold, Plan, Remote, StageCall
from runtime.plan.prune import Needed, prune, without_identities
from runtime.tensor_spec import TensorSpec


def make_plan(
    fetches: Sequence[Tensor | Operation],
    feeds: Mapping[Tensor, TensorSpec],
    devices: Devices,
    done: Collection[Operation] = frozenset(),
) -> Plan:
    """Plans one step.

    Args:
        fetches: what the client asked for.
        feeds: the fed tensors, in the order their values will be given, with this step's shapes.
        devices: what there is to run on.
        done: operations that have run in an earlier substep (``runtime/plan/substeps.py``).

    Raises:
        InvalidArgumentError: a placeholder is not fed, a device is missing, or shapes do not fit; names the operation.
    """
    needed = prune(fetches, feeds, done)
    if any(isinstance(op.body, Deferred) for op in needed.operations):
        fetches = _after_deferred(fetches, needed.operations)
        needed = prune(fetches, feeds, done)
    placed = place(needed.operations, devices)
    needed = without_identities(needed, lambda a, b: placed[a] == placed[b], feeds)
    traced = _traced(needed, feeds)

    def place_of(op: Operation) -> Hashable:
        # A deferred update may run for others: it shares its stage with nothing.
        return placed[op], op if isinstance(op.body, Deferred) else runs_on_host(op.body)

    partitions = partition(needed.operations, needed.waits_for, place_of)
    return _Assembly(fetches, feeds, needed.given, partitions, placed, traced, devices).plan(
        after(partitions, needed.waits_for)
    )


def tensor_specs(
    fetches: Sequence[Tensor | Operation],
    feeds: Mapping[Tensor, TensorSpec],
    done: Collection[Operation] = frozenset(),
) -> Mapping[Tensor, TensorSpec]:
    """Finds the concrete shape and dtype of every tensor of a step, as far as they are known before it runs."""
    needed = prune(fetches, feeds, done)
    return _traced(needed, feeds).specs


def _after_deferred(fetches: Sequence[Tensor | Operation], operations: Sequence[Operation]) -> list[Tensor | Operation]:
    """Replaces a fetched step counter by its value after a deferred update.

    The update returns the value. Another read would be another round trip.
    """
    after_update = {
        (op.body.variables[0], op.device): op.outputs[0]
        for op in operations
        if isinstance(op.body, Deferred) and op.body.returns_step
    }

    def after(fetch: Tensor | Operation) -> Tensor | Operation:
        if isinstance(fetch, Tensor) and isinstance(fetch.op.body, Read):
            return after_update.get((fetch.op.body.variable, fetch.op.device), fetch)
        return fetch

    return [after(fetch) for fetch in fetches]


def _traced(needed: Needed, feeds: Mapping[Tensor, TensorSpec]) -> Traced:
    return trace_all(needed.operations, {**feeds, **{t: static_spec(t) for t in needed.given}}, needed.alias)


class _Assembly:
    """Numbers the values of a step and lays the edges between its stages."""

    def __init__(
        self,
        fetches: Sequence[Tensor | Operation],
        feeds: Mapping[Tensor, TensorSpec],
        given: Sequence[Tensor],
        partitions: Sequence[Partition],
        placed: Mapping[Operation, Device],
        traced: Traced,
        devices: Devices,
    ) -> None:
        self.fetches = [traced.real(f) if isinstance(f, Tensor) else f for f in fetches]
        self.feeds = feeds
        self.partitions = partitions
        self.placed = placed
        self.traced = traced
        self.tasks = [placed[c.operations[0]].task_name for c in partitions]
        self.master_task = f"/job:{devices.target[0]}/task:{devices.target[1]}"
        bodies = [(t, t.op.body) for t in given]
        self.constants = [(t, body.value) for t, body in bodies if isinstance(body, Constant)]
        self.slot: dict[Tensor, int] = {t: i for i, t in enumerate((*feeds, *(t for t, _ in self.constants)))}
        for tensor, body in bodies:
            if isinstance(body, StepId):
                self.slot[tensor] = len(feeds) + len(self.constants)

    def plan(self, after: tuple[tuple[int, ...], ...]) -> Plan:
        # Every output needs its consumers, so the inputs of all stages come first.
        inputs = [self._inputs(c) for c in self.partitions]
        wanted_by: dict[Tensor, list[int]] = {}
        for index, tensors in enumerate(inputs):
            for tensor in tensors:
                wanted_by.setdefault(tensor, []).append(index)
        made_by = {
            t: i for i, c in enumerate(self.partitions) for op in c.operations for t in op.outputs if t not in self.slot
        }
        # The first slots are those of the feeds and constants; the last slot before the outputs is the step's id.
        fetched = {t for t in self.fetches if isinstance(t, Tensor)}
        next_slot = len(self.feeds) + len(self.constants) + 1
        stages: list[StageCall] = []
        all_outputs: list[tuple[Tensor, ...]] = []
        for c in self.partitions:
            outputs = tuple(
                t for op in c.operations for t in op.outputs if t not in self.slot and (t in wanted_by or t in fetched)
            )
            for tensor in outputs:
                self.slot[tensor] = next_slot
                next_slot += 1
            all_outputs.append(outputs)
        for index, (c, tensors, outputs) in enumerate(zip(self.partitions, inputs, all_outputs, strict=True)):
            # All operations of a partition have one device.
            stage = lower_stage(self.placed[c.operations[0]], c.operations, tensors, outputs, self.traced)
            makers = [(i, t, made_by[t]) for i, t in enumerate(tensors) if t in made_by]
            remote = {i: Remote(self.tasks[m], self.slot[t]) for i, t, m in makers if self._goes_direct(m, index)}
            readers = [wanted_by.get(t, []) for t in outputs]
            direct = [[self.tasks[r] for r in by if self._goes_direct(index, r)] for by in readers]
            holds = {i: Hold(len(by), frozenset(by)) for i, by in enumerate(direct) if by}
            replies = tuple(i for i, t in enumerate(outputs) if t in fetched or len(direct[i]) < len(readers[i]))
            stages.append(
                StageCall(
                    stage,
                    c.wave,
                    tuple(self.slot[t] for t in tensors),
                    tuple(self.slot[t] for t in outputs),
                    remote,
                    holds,
                    replies,
                )
            )
        fetch_slots = tuple(self.slot[f] if isinstance(f, Tensor) else -1 for f in self.fetches)
        constants = tuple(value for _, value in self.constants)
        return Plan(len(self.feeds), constants, tuple(stages), fetch_slots, next_slot, after)

    def _inputs(self, c: Partition) -> list[Tensor]:
        """Finds the tensors that a stage takes from outside."""
        inside = {t for op in c.operations for t in op.outputs if t not in self.slot}
        taken = (self.traced.real(t) for op in c.operations for t in op.inputs)
        return list(dict.fromkeys(t for t in taken if t not in inside))

    def _goes_direct(self, maker: int, consumer: int) -> bool:
        """Returns True if a tensor does not pass the master.

        The tensor goes directly if neither its maker nor its consumer runs on the master's task. Both may run on the
        same task.
        """
        return self.master_task not in (self.tasks[maker], self.tasks[consumer])
