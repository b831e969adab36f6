"""The planner: a graph becomes a plan.

A session calls ``make_plan`` once for each structure of fetches and each set of feed shapes. The
phases are: prune, place, trace, partition, lower, and lay the edges between the stages. Equal
graphs have equal plans in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr

from runtime.expressions.kinds import is_narrow
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import (
    Constant,
    Deferred,
    Host,
    Read,
    Shape,
    StepId,
    runs_alone,
    runs_on_host,
)
from runtime.graph.tracing import aval, make_symbols
from runtime.plan.lower import (
    SizelessStep,
    StageSource,
    TracedStep,
    lower_stage,
    static_spec,
    trace_all,
    trace_sizeless,
)
from runtime.plan.packing import SMALL, Pack, Value
from runtime.plan.partition import StagePartition, find_awaited_stages, partition_operations
from runtime.plan.place import Device, DeviceChoices, place_operations
from runtime.plan.plan import HeldOutput, Plan, RemoteInput, StageCall
from runtime.plan.prune import NeededOperations, drop_identities, prune_graph
from runtime.tensor_spec import Array, TensorSpec

SizelessTraces: TypeAlias = "dict[Hashable, Mapping[Operation, ClosedJaxpr] | None]"
"""The jaxprs of a step by its feeds with symbols for sizes; None for feeds of one step so far."""


def make_plan(
    fetches: Sequence[Tensor | Operation],
    feeds: Mapping[Tensor, TensorSpec],
    devices: DeviceChoices,
    done: Collection[Operation] = frozenset(),
    sizeless: SizelessTraces | None = None,
) -> Plan:
    """Plans one step.

    Args:
        fetches: the tensors and operations of the client's request.
        feeds: the fed tensors with this step's shapes, in the order in which a step feeds the
            values.
        devices: the devices of the session.
        done: operations of an earlier substep (``runtime/plan/substeps.py``).
        sizeless: the traces of these fetches for rare shapes, to which this step may add one; None
            for shapes that are worth a compilation.

    Raises:
        InvalidArgumentError: a placeholder is not fed, a device is missing, or shapes do not fit.
            The message names the operation.
    """
    needed = prune_graph(fetches, feeds, done)
    # Another fetch may need other operations, so the step is pruned anew.
    if any(isinstance(op.body, Deferred) for op in needed.operations):
        fetches = _fetch_updated_counters(fetches, needed.operations)
        needed = prune_graph(fetches, feeds, done)
    # Identities are dropped after placement, because an identity may carry a value to another
    # device.
    placed = place_operations(needed.operations, devices)
    needed = drop_identities(needed, lambda a, b: placed[a] == placed[b], feeds)
    traced = _trace_needed(needed, feeds, sizeless)

    def find_place(op: Operation) -> Hashable:
        # Another session may run a deferred update.
        return placed[op], op if runs_alone(op.body) else runs_on_host(op.body)

    partitions = partition_operations(
        needed.operations, needed.waits_for, find_place, lambda op: placed[op].task_name
    )
    assembly = _PlanAssembly(fetches, feeds, needed.given, partitions, placed, traced, devices)
    return assembly.make_plan(find_awaited_stages(partitions, needed.waits_for))


def find_specs(
    fetches: Sequence[Tensor | Operation],
    feeds: Mapping[Tensor, TensorSpec],
    done: Collection[Operation] = frozenset(),
) -> Mapping[Tensor, TensorSpec]:
    """Finds the concrete shape and dtype of every tensor of a step, as far as known before the step runs."""
    needed = prune_graph(fetches, feeds, done)
    return _trace_needed(needed, feeds).specs


def find_sizeless(
    fetches: Sequence[Tensor | Operation], feeds: Collection[Tensor]
) -> frozenset[Tensor]:
    """Finds the feeds of which kernels alone see the sizes, such as the ids of bags: one plan serves all their sizes."""
    needed = prune_graph(fetches, feeds)
    return frozenset(tensor for tensor in feeds if not _sizes_a_program(tensor, needed))


def _sizes_a_program(feed: Tensor, needed: NeededOperations) -> bool:
    """Returns True if the size of a feed may be that of an argument of a program."""
    # Operations come after those whose results they take, so one pass follows the feed.
    unknown = {feed}
    for op in needed.operations:
        inputs = [needed.alias.get(tensor, tensor) for tensor in op.inputs]
        if unknown.isdisjoint(inputs):
            continue
        if not isinstance(op.body, Host):
            return True
        shapes = [t.shape for t in op.outputs]
        if op.body.find_shapes is not None:
            # Any number stands for the sizes of the other feeds.
            given = [
                None if t in unknown else t.shape and _replace_unknown(t.shape) for t in inputs
            ]
            shapes = list(op.body.find_shapes(given))
        unknown |= {
            tensor
            for tensor, shape in zip(op.outputs, shapes, strict=True)
            if shape is None or None in shape
        }
    return False


def _replace_unknown(shape: Shape) -> Shape:
    return tuple(1 if size is None else size for size in shape)


def _fetch_updated_counters(
    fetches: Sequence[Tensor | Operation], operations: Sequence[Operation]
) -> list[Tensor | Operation]:
    """Replaces a fetched step counter by the output of the deferred update of the counter.

    The update returns the new value. A read of the counter would cost another round trip.
    """
    after_update = {
        (op.body.variables[0], op.device): op.outputs[0]
        for op in operations
        if isinstance(op.body, Deferred) and op.body.returns_step
    }

    def replace_read(fetch: Tensor | Operation) -> Tensor | Operation:
        if isinstance(fetch, Tensor) and isinstance(fetch.op.body, Read):
            return after_update.get((fetch.op.body.variable, fetch.op.device), fetch)
        return fetch

    return [replace_read(fetch) for fetch in fetches]


def _trace_needed(
    needed: NeededOperations,
    feeds: Mapping[Tensor, TensorSpec],
    traces: SizelessTraces | None = None,
) -> TracedStep:
    operations = needed.operations
    specs = {**feeds, **{t: static_spec(t) for t in needed.given}}
    if traces is None:
        return trace_all(operations, specs, needed.alias)
    avals, sizes = _replace_sizes(feeds)
    key = tuple(avals.values())
    traced = trace_all(operations, specs, needed.alias, SizelessStep(traces.get(key) or {}, sizes))
    # Many programs have two sizes only, so the first of the rare sizes is not traced with symbols.
    if key not in traces:
        traces[key] = None
    elif traces[key] is None:
        traces[key] = trace_sizeless(operations, avals, traced)
    return traced


def _replace_sizes(
    feeds: Mapping[Tensor, TensorSpec],
) -> tuple[dict[Tensor, jax.ShapeDtypeStruct], dict[Any, int]]:
    """Returns the feeds with a symbol for each unknown size, equal for equal sizes, and the sizes by symbol."""
    shapes = {t: t.shape or (None,) * len(spec.shape) for t, spec in feeds.items()}
    pairs = {t: list(zip(shapes[t], spec.shape, strict=True)) for t, spec in feeds.items()}
    numbers = list(dict.fromkeys(n for pair in pairs.values() for d, n in pair if d is None))
    symbols = dict(zip(numbers, make_symbols(len(numbers)), strict=True))
    avals = {
        t: aval([symbols[n] if d is None else n for d, n in pair], t.dtype)
        for t, pair in pairs.items()
    }
    return avals, dict(zip(symbols.values(), symbols, strict=True))


def _number_given(
    feeds: Collection[Tensor], given: Sequence[Tensor]
) -> tuple[dict[Value, int], tuple[Array, ...]]:
    """Returns the slots of the values that come with a step, and the values of the constants among them."""
    bodies = [(t, t.op.body) for t in given]
    constants = [(t, body.value) for t, body in bodies if isinstance(body, Constant)]
    slots: dict[Value, int] = {t: i for i, t in enumerate((*feeds, *(t for t, _ in constants)))}
    # All tensors of the step's own id share one slot.
    id_slot = len(slots)
    slots |= {t: id_slot for t, body in bodies if isinstance(body, StepId)}
    return slots, tuple(value for _, value in constants)


class _PlanAssembly:
    """The numbered values of a step, and the edges between its stages.

    The number of a stage is its index among the partitions. The number of a value is its slot.
    """

    def __init__(
        self,
        fetches: Sequence[Tensor | Operation],
        feeds: Mapping[Tensor, TensorSpec],
        given: Sequence[Tensor],
        partitions: Sequence[StagePartition],
        placed: Mapping[Operation, Device],
        traced: TracedStep,
        devices: DeviceChoices,
    ) -> None:
        self._fetches = [traced.real(f) if isinstance(f, Tensor) else f for f in fetches]
        self._fed = len(feeds)
        self._partitions = partitions
        self._placed = placed
        self._traced = traced
        self._tasks = [self._find_device(i).task_name for i in range(len(partitions))]
        self._master_task = f"/job:{devices.target[0]}/task:{devices.target[1]}"
        self._slots, self._constants = _number_given(feeds, given)
        made_in = [
            [t for op in c.operations for t in op.outputs if t not in self._slots]
            for c in partitions
        ]
        self._makers: dict[Value, int] = {
            t: index for index, made in enumerate(made_in) for t in made
        }
        # A tensor is an output of a stage if another stage reads the tensor, so the inputs of all
        # stages come first.
        inputs = [self._find_inputs(index) for index in range(len(partitions))]
        self._readers: dict[Value, list[int]] = {}
        for index, tensors in enumerate(inputs):
            for tensor in tensors:
                self._readers.setdefault(tensor, []).append(index)
        self._fetched = set(self._fetches)
        outputs = [
            [t for t in made if t in self._readers or t in self._fetched] for made in made_in
        ]
        # The slot before the first output is the slot of the step's own id, whether the step uses
        # the id or not.
        first = self._fed + len(self._constants) + 1
        numbered = [t for made in outputs for t in made]
        self._slots |= {t: slot for slot, t in enumerate(numbered, first)}
        self._size = first + len(numbered)
        assert len({*numbered}) == len(numbered), "two stages make one tensor"
        # An alias has no slot of its own.
        assert all(slot < self._size for slot in self._slots.values())
        self._packs: list[tuple[Pack, ...]] = [()] * len(partitions)
        self._inputs, self._outputs = self._pack_stages(inputs), self._pack_stages(outputs)

    def make_plan(self, after: tuple[tuple[int, ...], ...]) -> Plan:
        """Returns the plan.

        Args:
            after: for each stage, the stages to wait for.
        """
        stages = tuple(self._connect_stage(index) for index in range(len(self._partitions)))
        fetch_slots = tuple(self._slots[f] if isinstance(f, Tensor) else -1 for f in self._fetches)
        assert all(before < i for i, found in enumerate(after) for before in found), (
            "a stage waits for a later one"
        )
        return Plan(self._fed, self._constants, stages, fetch_slots, self._size, after)

    def _connect_stage(self, index: int) -> StageCall:
        """Lowers a stage, and lays the edges that lead to the stage and away."""
        inputs, outputs = self._inputs[index], self._outputs[index]
        partition, device = self._partitions[index], self._find_device(index)
        source = StageSource(device, partition.operations, inputs, outputs, self._traced)
        makers = [(i, t, self._makers[t]) for i, t in enumerate(inputs) if t in self._makers]
        remote = {
            i: RemoteInput(self._tasks[m], self._slots[t])
            for i, t, m in makers
            if self._goes_direct(m, index)
        }
        readers = [self._readers.get(t, []) for t in outputs]
        # A task holds an output until each of these readers has fetched the output.
        direct = [[self._tasks[r] for r in by if self._goes_direct(index, r)] for by in readers]
        return StageCall(
            lower_stage(source),
            partition.wave,
            tuple(self._slots[t] for t in inputs),
            tuple(self._slots[t] for t in outputs),
            remote,
            holds={i: HeldOutput(len(by), frozenset(by)) for i, by in enumerate(direct) if by},
            # The master needs fetched outputs, and outputs for readers to which no direct edge
            # leads.
            replies=tuple(
                i
                for i, t in enumerate(outputs)
                if t in self._fetched or len(direct[i]) < len(readers[i])
            ),
            owned=self._find_owned(index),
            packs=self._packs[index],
        )

    def _pack_stages(self, tensors: Sequence[Sequence[Tensor]]) -> list[list[Value]]:
        return [self._pack(index, of_stage) for index, of_stage in enumerate(tensors)]

    def _pack(self, index: int, tensors: Sequence[Tensor]) -> list[Value]:
        """Puts the small inputs, or outputs, of a stage on an accelerator of this process into packs."""
        groups: dict[Hashable, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(self._find_group(index, tensor), []).append(tensor)
        values: list[Value] = []
        for key, members in groups.items():
            if key is members[0]:
                values += members
                continue
            pack = Pack(self._size, (*members,), (*map(self._traced.spec_of, members),))
            slots = (*map(self._slots.__getitem__, members),)
            self._packs[index] += (pack._replace(members=slots),)
            self._slots[pack] = self._size
            self._makers[pack] = self._makers[members[0]]
            self._readers[pack] = self._readers[members[0]]
            self._size += 1
            values.append(pack)
        return values

    def _find_group(self, index: int, tensor: Tensor) -> Hashable:
        """Returns the stage at the other end, and the dtype; the tensor itself if the tensor travels alone."""
        device = self._find_device(index)
        (other, *more) = {self._makers.get(tensor), *self._readers.get(tensor, ())} - {index} or (
            None,
        )
        is_packed = (
            device.is_own
            and device.is_accelerator
            and other is not None
            and not more
            and self._tasks[other] != self._tasks[index] == self._master_task
            and tensor not in self._fetched
            # The kernel of a deferred update takes its inputs one by one.
            and not isinstance(self._partitions[index].operations[0].body, Deferred)
            # A kernel may give another shape than the kernel declares.
            and not runs_on_host(tensor.op.body)
            and not is_narrow(tensor.dtype)
            and self._traced.specs[tensor].nbytes <= SMALL
        )
        return (other, tensor.dtype) if is_packed else tensor

    def _find_device(self, index: int) -> Device:
        return self._placed[self._partitions[index].operations[0]]

    def _find_owned(self, index: int) -> tuple[int, ...]:
        makers = [self._makers.get(tensor) for tensor in self._inputs[index]]
        return tuple(
            i
            for i, maker in enumerate(makers)
            if maker is not None and not self._find_device(maker).is_accelerator
        )

    def _find_inputs(self, index: int) -> list[Tensor]:
        """Finds the tensors of a stage that come from outside."""
        taken = (
            self._traced.real(t) for op in self._partitions[index].operations for t in op.inputs
        )
        return list(dict.fromkeys(t for t in taken if self._makers.get(t) != index))

    def _goes_direct(self, maker: int, consumer: int) -> bool:
        """Returns True if a tensor does not pass the master.

        The tensor goes directly if neither its maker nor its consumer runs on the master's task.
        Both may run on the same task.
        """
        return self._master_task not in (self._tasks[maker], self._tasks[consumer])
