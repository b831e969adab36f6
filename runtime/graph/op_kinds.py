"""The bodies of operations: a small closed set of frozen values, one for each kind that the planner knows.

The client describes, the planner lowers, the task obeys. A pure body holds a JAX function and is compiled into the
XLA program of its stage; a host body names one of the task's own kernels with plain-data attributes, because no code
crosses the wire; a Python call stays in the client's process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.tensor_spec import AnyArray, Array, DType

Shape = tuple[int | None, ...]
"""A static shape; ``None`` is a dimension known only when the step runs. ``None`` itself is an unknown rank."""

ArrayFn = Callable[..., tuple[AnyArray, ...]]
"""A traceable JAX function from flat arrays to a tuple of arrays."""

Attrs = Mapping[str, Any]
"""The attributes of a host kernel, by name: what JSON can say."""


@dataclass(frozen=True)
class VariableSpec:
    """The identity of a variable, by which a task finds, checks or creates the variable.

    Attributes:
        name: name in its container, the same for every session of the cluster.
        shape: static shape.
        dtype: numpy dtype; ``object`` for strings.
        container: the named container of the store that holds it, ``""`` is the default one.
        local: True when it lives on the session's own task instead of a shared one (TF1's local variables).
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    container: str = ""
    local: bool = False


@dataclass(frozen=True)
class Feed:
    """A placeholder: its value comes with the step.

    Attributes:
        casting: numpy's word for what may be done to a value of another dtype: "same_value" or "unsafe".
    """

    casting: str = "same_value"


@dataclass(frozen=True, eq=False)
class Constant:
    """A literal array (or object array of bytes for strings)."""

    value: Array


@dataclass(frozen=True, eq=False)
class Pure:
    """A pure JAX function of the operation's inputs, giving one array for each output."""

    fn: ArrayFn


@dataclass(frozen=True, eq=False)
class RandomKey(Pure):
    """A random key of its own in every step.

    Attributes:
        make: ``make(seeds, step id)`` gives the key's words, as does ``fn(step id)``; one function for all keys that
            are made alike.
        seeds: numbers of 32 bits that distinguish this key from other keys.
    """

    make: ArrayFn
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """The value of one variable at the operation's place in the step's order."""

    variable: VariableSpec


@dataclass(frozen=True, eq=False)
class Update:
    """An atomic read-modify-write of variables of one task.

    ``fn(*old values, *inputs)`` gives ``(*new values, *outputs)``; with ``overwrites`` it is called with the inputs
    alone and the variables need not be initialised.
    """

    variables: tuple[VariableSpec, ...]
    fn: ArrayFn
    overwrites: bool = False


@dataclass(frozen=True, eq=False)
class Deferred(Update):
    """A deferred update: a kernel of the task decides when it runs, and with which inputs.

    The kernel gets all inputs of the operation. Those behind the kernel's own are the inputs of the update. The
    operation's outputs are the kernel's.

    Attributes:
        kernel: the registered name.
        attrs: JSON-compatible attributes.
        kernel_inputs: how many of the operation's inputs, at the front, are the kernel's alone.
        returns_step: the first output is the value of the first variable after the update.
    """

    kernel: str = ""
    attrs: Attrs = field(default_factory=dict)
    kernel_inputs: int = 0
    returns_step: bool = False


@dataclass(frozen=True)
class StepId:
    """The step's own randomness: uint32[4] = (session nonce, 2 words; number of the step in its session, 2 words)."""


@dataclass(frozen=True)
class Nothing:
    """A point in the order of control, with no value: ``no_op`` and ``group``. The planner dissolves it."""


@dataclass(frozen=True, eq=False)
class Host:
    """One of the task's own kernels (runtime/task/host_kernels.py), called by name with plain-data attributes.

    Attributes:
        kernel: the registered name.
        attrs: JSON-compatible attributes.
        stateful: runs for its effect; never merged or dropped while something needs it.
        resource: name of the store resource it works on, or ``""``.
    """

    kernel: str
    attrs: Attrs = field(default_factory=dict)
    stateful: bool = False
    resource: str = ""


@dataclass(frozen=True, eq=False)
class PythonCall:
    """A Python function of the client's process, which a session calls between the parts of a step.

    The call never reaches a task: the planner receives its results as feeds (``runtime/plan/substeps.py``).

    Attributes:
        function: ``function(session, arrays)`` gives a value for each output; ``session`` is what runs the step.
    """

    function: Callable[[Any, Sequence[Array]], Sequence[object]]


EMBED_BYTES = 1024
"""Arrays up to this size are literals of the compiled program; larger ones are constants that travel with the step."""
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
        "wait_initialized",
    }
)
"""The kernels that may wait: for another step, or for another stage of their own step."""


WHEN = "when/"
"""Before the name of a kernel: its first input, a bool scalar, tells whether it is called at all.

Its attributes are "value" (which of the two it must be), "attrs" (those of the kernel) and "outputs" ([shape, dtype] of
each: zeros when it is not called).
"""


def kernel_may_wait(kernel: str) -> bool:
    """Returns True if the kernel may wait, also under a condition."""
    return kernel.removeprefix(WHEN) in WAITING


def may_wait(body: Body) -> bool:
    """Returns True if an operation may wait for other operations.

    Such an operation is a stage of its own.
    """
    return isinstance(body, Host | Deferred) and kernel_may_wait(body.kernel)


def runs_on_host(body: Body) -> bool:
    """Returns True if a host kernel runs the operation, and not XLA.

    Host calls do, and reads of string variables.
    """
    return isinstance(body, Host) or isinstance(body, Read) and body.variable.dtype.hasobject


Body = Feed | Constant | Pure | Read | Update | StepId | Nothing | Host | PythonCall
