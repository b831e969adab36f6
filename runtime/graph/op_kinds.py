"""The bodies of operations: a small closed set of frozen values, one for each kind that the planner knows.

The client describes, the planner lowers, the task obeys. A pure body holds a JAX function, which
becomes a part of the XLA program of its stage. A host body names a kernel of the task, with
plain-data attributes, because no code crosses the wire. A Python call stays in the client's
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from runtime.tensor_spec import AnyArray, Array, DType, TensorSpec

Shape = tuple[int | None, ...]
"""A static shape.

A dimension ``None`` is known only in a step. ``None`` as a whole is an unknown rank.
"""

ArrayFn = Callable[..., tuple[AnyArray, ...]]
"""A traceable JAX function from flat arrays to a tuple of arrays."""

Attrs = Mapping[str, Any]
"""The attributes of a host kernel, by name: JSON values."""


@dataclass(frozen=True)
class VariableSpec:
    """The identity of a variable, for a task to find, check or create the variable.

    Attributes:
        name: name in its container, the same for every session of the cluster.
        shape: static shape.
        dtype: numpy dtype; ``object`` for strings.
        container: the variable's named container of the store; ``""`` is the default container.
        local: True for a variable on the session's own task, not on a shared task (TF1's local
            variables).
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    container: str = ""
    local: bool = False


@dataclass(frozen=True)
class Feed:
    """A placeholder, whose value comes with the step.

    Attributes:
        casting: numpy's word for the treatment of a value of another dtype: "same_value" or
            "unsafe".
    """

    casting: str = "same_value"

    def __post_init__(self) -> None:
        assert self.casting in ("same_value", "unsafe")


# Compared by identity, because arrays have no equality of one truth value.
@dataclass(frozen=True, eq=False)
class Constant:
    """A literal array (or object array of bytes for strings)."""

    value: Array


# Compared by identity, because the equality of two functions cannot be known.
@dataclass(frozen=True, eq=False)
class Pure:
    """A pure JAX function of the operation's inputs.

    Attributes:
        fn: returns a pytree with one array for each output.
    """

    fn: Callable[..., object]

    def __call__(self, *arrays: AnyArray) -> tuple[AnyArray, ...]:
        """Returns the outputs of the function for these inputs."""
        return tuple(jax.tree.leaves(self.fn(*arrays)))


@dataclass(frozen=True, eq=False)
class RandomKey(Pure):
    """A random key of its own in every step.

    Attributes:
        make: ``make(seeds, step id)`` returns the key's words, as does ``fn(step id)``. Alike keys
            have one ``make``.
        seeds: numbers of 32 bits that distinguish this key from other keys.
    """

    make: ArrayFn
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        assert all(0 <= seed < 2**32 for seed in self.seeds), "a key takes words of 32 bits"


@dataclass(frozen=True)
class Read:
    """The value of one variable at the operation's place in the step's order."""

    variable: VariableSpec


@dataclass(frozen=True, eq=False)
class Update:
    """An atomic read-modify-write of variables of one task.

    ``fn(*old values, *inputs)`` returns ``(*new values, *outputs)``. With ``overwrites`` the
    function takes the inputs alone, and the variables need no values before.
    """

    variables: tuple[VariableSpec, ...]
    fn: ArrayFn
    overwrites: bool = False


@dataclass(frozen=True, eq=False)
class Deferred(Update):
    """A deferred update. A kernel of the task decides when the update runs, and with which inputs.

    The kernel receives all inputs of the operation. The inputs behind the kernel's own are the
    inputs of the update. The outputs of the operation are the outputs of the kernel.

    Attributes:
        kernel: the registered name.
        attrs: JSON-compatible attributes.
        kernel_inputs: number of inputs, at the front, for the kernel alone.
        returns_step: True if the first output is the value of the first variable after the update.
    """

    kernel: str = ""
    attrs: Attrs = field(default_factory=dict)
    kernel_inputs: int = 0
    returns_step: bool = False

    def __post_init__(self) -> None:
        assert self.kernel and self.variables, "a kernel decides on an update of variables"


@dataclass(frozen=True)
class StepId:
    """The step's own randomness: uint32[4] = (session nonce, 2 words; number of the step in its session, 2 words)."""


@dataclass(frozen=True)
class Nothing:
    """A point in the order of control, without a value: ``no_op`` and ``group``. The planner dissolves the point."""


@dataclass(frozen=True, eq=False)
class Host:
    """A kernel of the task (runtime/task/host_kernels.py), called by name with plain-data attributes.

    Attributes:
        kernel: the registered name.
        attrs: JSON-compatible attributes.
        stateful: True if the kernel runs for its effect.
        resource: name of the kernel's store resource, or ``""``.
        find_shapes: a function from the shapes of the inputs in a step to the shapes of the
            outputs, where None is a shape that only the kernel knows; None if the declared shapes
            are all that is known.
    """

    kernel: str
    attrs: Attrs = field(default_factory=dict)
    stateful: bool = False
    resource: str = ""
    find_shapes: Callable[[Sequence[Shape | None]], Sequence[Shape | None]] | None = None


@dataclass(frozen=True, eq=False)
class HostProgram(Host):
    """A kernel with an XLA program of fixed shapes, which the kernel runs on arrays that it makes.

    Attributes:
        fn: the function of the program, from flat arrays to a tuple of arrays.
        arguments: shape and dtype of each argument.
    """

    fn: ArrayFn = field(kw_only=True)
    arguments: Sequence[TensorSpec] = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class PythonCall:
    """A Python function of the client's process, called between the parts of a step.

    The call never reaches a task: the planner receives its results as feeds
    (``runtime/plan/substeps.py``).

    Attributes:
        function: ``function(session, arrays)`` returns a value for each output. ``session`` runs
            the step.
    """

    function: Callable[[Any, Sequence[Array]], Sequence[object]]


EMBED_BYTES = 1024
"""Bytes of the largest array that is a literal of a program.

A larger constant travels with the step.
"""
WAITING = frozenset(
    {
        "accumulator/take_grad",
        "queue/dequeue",
        "queue/dequeue_many",
        "queue/enqueue",
        "queue/enqueue_many",
        "quorum/gather",
        "quorum/push",
        "quorum/tick",
        "table/push_mean",
        "wait_initialized",
    }
)
"""The kernels that may wait, for another step or for another stage of their own step."""
UPDATING = frozenset({"table/push"})
"""The kernels that update variables, and pass the write gate as a program does that updates variables."""


WHEN = "when/"
"""The prefix of a kernel under a condition: the first input, a bool scalar.

The attributes are "value" (the value of the input for a call), "attrs" (the attributes of the
kernel) and "outputs" ([shape, dtype] of each output, which is zeros without a call).
"""


def kernel_may_wait(kernel: str) -> bool:
    """Returns True if the kernel may wait, also under a condition."""
    return kernel.removeprefix(WHEN) in WAITING


def may_wait(body: Body) -> bool:
    """Returns True if an operation may wait for other operations.

    The planner gives the operation its own stage.
    """
    return isinstance(body, Host | Deferred) and kernel_may_wait(body.kernel)


def runs_alone(body: Body) -> bool:
    """Returns True if an operation shares its stage with no operation: its kernel has the program of the stage."""
    return isinstance(body, Deferred | HostProgram)


def runs_on_host(body: Body) -> bool:
    """Returns True for an operation of a host kernel, not of XLA: host calls, and reads of string variables."""
    return isinstance(body, Host) or isinstance(body, Read) and body.variable.dtype.hasobject


Body = Feed | Constant | Pure | Read | Update | StepId | Nothing | Host | PythonCall
