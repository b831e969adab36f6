"""Plan: the stages of a step.

The planner makes a plan, and a master runs the plan. A plan is frozen and refers to no graph.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr

from runtime.graph.op_kinds import UPDATING, Attrs, VariableSpec, kernel_may_wait
from runtime.plan.packing import Pack
from runtime.plan.place import Device
from runtime.tensor_spec import Array, TensorSpec

PULL, COMPUTE, PUSH = 0, 1, 2
"""The parts of a training step: read variables, compute on the worker, update variables."""


class ProgramIdentity(NamedTuple):
    """The identity of a program: its bytes, and its sender's description of the program.

    A task believes a description for its own sender only.

    Attributes:
        sha256: SHA-256 of the program's bytes, in hexadecimal digits.
        arguments: shape and dtype of each argument.
        results: shape and dtype of each result.
        is_own: True for a program of the task's own process, which is no expression list.
    """

    sha256: str
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    is_own: bool


@dataclass(frozen=True)
class Program:
    """One XLA program: ``(variables read, inputs) -> (variables written, outputs)``.

    Attributes:
        blob: an expression list (``runtime.expressions``), or the text of JAX's module of the
            jaxpr.
        arguments: shape and dtype of each argument.
        results: shape and dtype of each result.
        jaxpr: the computation of a program that stays in its process; None for an expression list.
        sha256: SHA-256 of the blob, in hexadecimal digits; computed by default, given where the
            blob may be missing.
        is_evaluated: True for a jaxpr that is not compiled (``runtime.plan.evaluator``).
    """

    blob: bytes
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    jaxpr: ClosedJaxpr | None = field(default=None, compare=False, repr=False)
    sha256: str = ""
    is_evaluated: bool = False

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.blob).hexdigest())

    @property
    def identity(self) -> ProgramIdentity:
        """Returns the identity under which a task keeps the program and compiles the program once."""
        return ProgramIdentity(self.sha256, self.arguments, self.results, self.jaxpr is not None)


@dataclass(frozen=True)
class HostCall:
    """One call of a host kernel inside a host stage.

    Attributes:
        kernel: registered name.
        attrs: the kernel's attributes, JSON-compatible.
        arguments: for each argument, an index into the stage's inputs followed by all results so
            far.
        results: number of results.
        op: name of the operation, for errors.
    """

    kernel: str
    attrs: Attrs
    arguments: tuple[int, ...]
    results: int
    op: str = ""


@dataclass(frozen=True)
class VariableOutput:
    """An output by reference: the value of a variable after the stage.

    The program does not compute the output.
    """

    index: int


@dataclass(frozen=True)
class ProgramOutput:
    """An output that the program computes.

    ``index`` counts the program's results behind the written variables. For a host stage ``index``
    counts the inputs, and then all results.
    """

    index: int


@dataclass(frozen=True)
class Stage:
    """The operations of a step that run together on one device.

    A task registers a stage once, and runs the stage in each step.

    Attributes:
        device: full name of the device.
        variables: the variables that the stage touches.
        reads: indices of the variables that are the program's first arguments.
        writes: indices of the variables that are the program's first results.
        inputs: shape and dtype of each input; None when the layout is not fixed (host stages).
        outputs: the source of each output.
        output_specs: shape and dtype of each output; None when the layout is not fixed.
        program: the XLA program, or None when nothing is computed.
        host: the kernels of a host stage, in order. A deferred update, or an update of a table, has
            one kernel and a program: the kernel decides when to run the program, and with which
            inputs.
        writes_state: True if running the stage twice differs from running the stage once.
        operations: names of the operations, for traces and errors; not part of the stage's
            identity.
    """

    device: Device
    variables: tuple[VariableSpec, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    inputs: tuple[TensorSpec, ...] | None = ()
    outputs: tuple[VariableOutput | ProgramOutput, ...] = ()
    output_specs: tuple[TensorSpec, ...] | None = ()
    program: Program | None = None
    host: tuple[HostCall, ...] = ()
    writes_state: bool = False
    operations: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_accelerated(self) -> bool:
        """Returns True if the stage is a program for a device with memory of its own."""
        return self.device.is_accelerator and not self.host

    @property
    def updates(self) -> bool:
        """Returns True if the task passes the write gate for the stage.

        A deferred update passes the gate by itself.
        """
        if self.host:
            return any(call.kernel in UPDATING for call in self.host)
        return bool(self.writes)

    @property
    def may_wait(self) -> bool:
        """Returns True if the stage may wait for effects of other stages."""
        return any(kernel_may_wait(call.kernel) for call in self.host)

    @property
    def joins_bundle(self) -> bool:
        """Returns True if the stage may travel with others: it does not wait, and changes variables alone."""
        return not self.may_wait and (self.updates or not self.writes_state)


@dataclass(frozen=True)
class RemoteInput:
    """An input that the running task fetches from the task that holds the input."""

    task: str
    slot: int


class HeldOutput(NamedTuple):
    """An output that a task holds until other tasks have fetched the output.

    Attributes:
        times: number of fetches.
        by: the tasks that fetch the output; empty if an earlier version of the client does not say.
    """

    times: int
    by: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageCall:
    """One stage of a plan, with its slots in the step's table of values.

    Attributes:
        stage: the stage to run.
        wave: stages of one wave are independent of each other.
        inputs: the slot of each input.
        outputs: the slot of each output.
        remote: the inputs that come straight from another task, by input index.
        holds: the outputs that other tasks will fetch, by output index.
        replies: indices of the outputs that the master needs.
        owned: the inputs that an accelerator receives as copies, because a host makes them.
        packs: the packs among the inputs and the outputs.
    """

    stage: Stage
    wave: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    remote: Mapping[int, RemoteInput] = field(default_factory=dict)
    holds: Mapping[int, HeldOutput] = field(default_factory=dict)
    replies: tuple[int, ...] = ()
    owned: tuple[int, ...] = ()
    packs: tuple[Pack, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All stages for one (fetches, feed shapes).

    The edges between the stages are slots of a table of values.

    Slots come in this order: the feeds, the constants, the step's own id, then the outputs of the
    stages.

    Attributes:
        feeds: number of feeds.
        constants: values that travel with the step, too large to be literals of a program.
        stages: in the order of their waves.
        fetches: the slot of each fetched tensor, or -1 for an operation (its value is None).
        slots: the size of the table of values.
        after: for each stage, the numbers of the stages to wait for.
    """

    feeds: int
    constants: tuple[Array, ...]
    stages: tuple[StageCall, ...]
    fetches: tuple[int, ...]
    slots: int
    after: tuple[tuple[int, ...], ...]

    @property
    def step_id_slot(self) -> int:
        """Returns the slot of the step's own id."""
        return self.feeds + len(self.constants)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Returns the tasks that the step touches."""
        return tuple(dict.fromkeys(call.stage.device.task_name for call in self.stages))

    @property
    def is_training(self) -> bool:
        """Returns True if the step trains.

        A training step computes new values of variables from the old values, or acts on resources
        (an accumulator, a queue).
        """
        stages = [call.stage for call in self.stages]
        # A variable that is only written is initialised, not trained.
        return any(set(s.reads) & set(s.writes) or (s.host and s.writes_state) for s in stages)

    @property
    def is_evaluated(self) -> bool:
        """Returns True if a program of the step is evaluated and not compiled."""
        programs = [call.stage.program for call in self.stages]
        return any(p.is_evaluated for p in programs if p is not None)

    def parts(self) -> list[int]:
        """Returns for each wave, in order, its part of the step: PULL, COMPUTE or PUSH."""
        waves: dict[int, list[Stage]] = {}
        for call in self.stages:
            waves.setdefault(call.wave, []).append(call.stage)
        ordered = [waves[wave] for wave in sorted(waves)]
        computing = [
            i
            for i, stages in enumerate(ordered)
            if any(s.program and not s.variables and not s.host for s in stages)
        ]
        if not computing:
            return [PUSH if any(s.writes_state for s in stages) else PULL for stages in ordered]
        # Between the first and the last computation all waves count as computing, such as a pull in
        # the middle.
        first, last = computing[0], computing[-1]
        return [PULL if i < first else PUSH if i > last else COMPUTE for i in range(len(ordered))]

    def wire_bytes(self, own_task: str) -> int:
        """Counts the bytes of tensors of fixed size that a step's master sends and receives.

        Args:
            own_task: the master's task.
        """
        return sum(
            s.nbytes for _, s in self._carried(own_task) if s is not None and not s.is_string
        )

    def described_slots(self, own_task: str) -> tuple[int, ...]:
        """Returns the slots of further such tensors, whose size only a step knows, such as the rows of a table."""
        return tuple(slot for slot, spec in self._carried(own_task) if spec is None)

    def _carried(self, own_task: str) -> Iterator[tuple[int, TensorSpec | None]]:
        """Yields slot and spec of each tensor that a step's master sends and receives."""
        for call in self.stages:
            stage = call.stage
            if stage.device.task_name == own_task:
                continue
            for number, slot in enumerate(call.inputs):
                # Inputs from other tasks do not pass the master.
                if number not in call.remote:
                    yield slot, None if stage.inputs is None else stage.inputs[number]
            for number in call.replies:
                specs = stage.output_specs
                yield call.outputs[number], None if specs is None else specs[number]
