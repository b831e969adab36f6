"""Plan: the value the planner makes and a master runs. Frozen, and nothing in it refers to a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from runtime.graph.op_kinds import WAITING, VariableSpec
from runtime.plan.place import Device
from runtime.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Program:
    """One XLA program: ``(variables read, inputs) -> (variables written, outputs)``.

    Attributes:
        blob: serialized ``jax.export.Exported``, no donation in it.
        arguments: shape and dtype of each argument.
        results: shape and dtype of each result.
    """

    blob: bytes
    arguments: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]

    @cached_property
    def sha256(self) -> str:
        """What the program is known by: tasks compile equal programs once."""
        return hashlib.sha256(self.blob).hexdigest()


@dataclass(frozen=True)
class HostCall:
    """One call of a host kernel inside a host stage.

    Attributes:
        kernel: registered name.
        attrs: its attributes, JSON-compatible.
        arguments: for each argument, an index into the stage's inputs followed by all results so far.
        results: how many results it gives.
        op: name of the operation, for errors.
    """

    kernel: str
    attrs: Mapping[str, Any]
    arguments: tuple[int, ...]
    results: int
    op: str = ""


@dataclass(frozen=True)
class VariableOutput:
    """An output that is the value of a variable after the stage: handed out by reference, never computed."""

    index: int


@dataclass(frozen=True)
class ProgramOutput:
    """An output that the program computes.

    ``index`` counts its results behind the written variables; for a host stage, the inputs followed by all results.
    """

    index: int


@dataclass(frozen=True)
class Stage:
    """The operations of one step that run together on one device: what a task registers and runs.

    Attributes:
        device: full name of the device.
        variables: the variables it touches.
        reads: indices of the variables that are the program's first arguments.
        writes: indices of the variables that are the program's first results.
        inputs: shape and dtype of each input; None when the layout is not fixed (host stages).
        outputs: what each output is.
        output_specs: shape and dtype of each output; None when the layout is not fixed.
        program: the XLA program, or None when nothing is computed.
        host: the kernels of a host stage, in order. With a program too, a guarded update: one kernel, that runs the
            program with inputs of its own when it sees fit.
        writes_state: whether running it twice differs from running it once.
        operations: names of the operations in it, for traces and errors; not part of its identity.
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
    def may_wait(self) -> bool:
        """Whether it may wait for what others do."""
        return any(call.kernel in WAITING for call in self.host)


@dataclass(frozen=True)
class Remote:
    """An input that the running task fetches itself from the task that holds it."""

    task: str
    slot: int


@dataclass(frozen=True)
class StageCall:
    """One stage of a plan with its place in the step's table of values (its slots).

    Attributes:
        stage: what runs.
        wave: stages of one wave are independent of each other.
        inputs: the slot of each input.
        outputs: the slot of each output.
        remote: for inputs that come straight from another task, by input index.
        holds: for outputs that other tasks will fetch, by output index: how many times.
        replies: indices of the outputs that the master needs.
    """

    stage: Stage
    wave: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    remote: Mapping[int, Remote] = field(default_factory=dict)
    holds: Mapping[int, int] = field(default_factory=dict)
    replies: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All stages for one (fetches, feed shapes), with the edges between them as slots of a table of values.

    Slots come in this order: the feeds, the constants, the step's own id, then the outputs of the stages.

    Attributes:
        feeds: how many feeds.
        constants: values that travel with the step because they are too large to be literals of a program.
        stages: in the order of their waves.
        fetches: the slot of each fetched tensor, or -1 for an operation (its value is None).
        slots: the size of the table.
        after: for each stage, the numbers of the stages that must be over before it begins.
    """

    feeds: int
    constants: tuple[np.ndarray[Any, Any], ...]
    stages: tuple[StageCall, ...]
    fetches: tuple[int, ...]
    slots: int
    after: tuple[tuple[int, ...], ...]

    @property
    def step_id_slot(self) -> int:
        """The slot of the step's own id."""
        return self.feeds + len(self.constants)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the step touches."""
        return tuple(dict.fromkeys(call.stage.device.task_name for call in self.stages))
