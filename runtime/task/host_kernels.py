"""Host kernels: the operations of a task that are not XLA programs.

A stage names its kernels, and the executor calls them. No code crosses the wire.
"""

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from runtime import concurrency
from runtime.errors import InternalError, InvalidArgumentError, NotFoundError, printable
from runtime.graph.op_kinds import WHEN, Attrs
from runtime.state.cancellation import Cancellation
from runtime.state.store import Key, Store
from runtime.state.write_gate import WriteGate
from runtime.tensor_spec import AnyArray, Array, TensorSpec


class UpdateTarget(Protocol):
    """The values that a deferred update changes."""

    @property
    def generation(self) -> int:
        """Generation of the task's variables."""

    def step(self) -> int:
        """Returns the value of the update's first variable."""

    def apply(
        self,
        inputs: Sequence[AnyArray],
        key: tuple[int, int] = ...,
        expected: Mapping[str, int] | None = ...,
    ) -> None:
        """Runs the update and waits until it is done."""


class DeferredProgram(UpdateTarget, Protocol):
    """The program of a stage, which a kernel may run; see ``executor.PreparedStage``."""

    gate: WriteGate
    """The write gate of the task, for updates that a kernel makes itself."""

    def compute(self, inputs: Sequence[AnyArray], client: int) -> Sequence[Array]:
        """Runs a program without variables, and returns its results."""

    def check_generation(self) -> None:
        """Raises AbortedError if the variables were restored since the stage was registered."""


@dataclass(frozen=True)
class Context:
    """The objects that a kernel may use.

    Attributes:
        store: State of the task.
        task: Name of the task.
        attrs: Attributes of the operation.
        inputs: Arguments, lent for the time of the call. The next call overwrites their memory, so
            a kernel copies the values that stay. Results need no copy, because the executor makes
            the outputs of a stage own their memory.
        op: Name of the operation, for errors and output.
        client: Session of the call.
        cancelled: End of the call's waits, when the session has ended or the caller is gone. Its
            ``memory`` is that of the call.
        deferred: Program that the kernel may run; None for an operation without a program.
    """

    store: Store
    task: str
    attrs: Attrs
    inputs: Sequence[Array]
    op: str = ""
    client: int = 0
    cancelled: Cancellation = field(default_factory=Cancellation)
    deferred: DeferredProgram | None = None


Kernel = Callable[[Context], Sequence[AnyArray]]

KERNELS: dict[str, Kernel] = {}
_HOMES = {
    "accumulator": "runtime.kernels.resources",
    "queue": "runtime.kernels.resources",
    "quorum": "runtime.kernels.quorum_kernels",
    "summary": "runtime.kernels.summaries",
    "table": "runtime.tables.kernels",
}
"""The modules that register kernels, by the first part of a kernel's name.

The first kernel imports its module.
"""


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Registers a function as a host kernel.

    `runtime.graph.op_kinds.WAITING` names the kernels that may wait.

    Args:
        name: Name of the kernel in stages.
    """

    def register(fn: Kernel) -> Kernel:
        assert name not in KERNELS, f"two kernels have the name {name!r}"
        KERNELS[name] = fn
        return fn

    return register


def find_kernel(name: str) -> Kernel:
    """Returns the kernel of a name.

    Raises:
        NotFoundError: No kernel has the name.
    """
    if name.startswith(WHEN):
        return _under_condition(find_kernel(name.removeprefix(WHEN)))
    # A task without queues and quorums does not pay for the import of their modules.
    home = _HOMES.get(name.partition("/")[0])
    if home is not None:
        importlib.import_module(home)
    try:
        return KERNELS[name]
    except KeyError:
        raise NotFoundError(
            f"this task has no kernel {name!r}; it has {', '.join(sorted(KERNELS))}"
        ) from None


def _under_condition(kernel: Kernel) -> Kernel:
    """Returns a kernel that runs ``kernel`` on a condition, and returns zeros otherwise; see ``op_kinds.WHEN``."""

    def called(context: Context) -> Sequence[AnyArray]:
        condition, *inputs = context.inputs
        if bool(condition) is bool(context.attrs["value"]):
            return kernel(replace(context, attrs=context.attrs["attrs"], inputs=inputs))
        return [np.zeros(shape, dtype) for shape, dtype in context.attrs["outputs"]]

    return called


def strings(items: Sequence[str | bytes]) -> Array:
    """Returns a 1-D string tensor."""
    out = np.empty((len(items),), object)
    out[:] = [i.encode() if isinstance(i, str) else i for i in items]
    return out


def _keys(context: Context) -> list[Key]:
    return [(container, name) for container, name in context.attrs["variables"]]


@kernel("update")
def _update(context: Context) -> Sequence[AnyArray]:
    """Assigns the inputs to the variables of the update, and returns the inputs."""
    if context.deferred is None:
        raise InternalError(f"{context.op!r} came without its update", task=context.task)
    context.deferred.apply(context.inputs)
    return context.inputs


@kernel("identity")
def _identity(context: Context) -> Sequence[Array]:
    return [context.inputs[0]]


@kernel("concat")
def _concat(context: Context) -> Sequence[Array]:
    return [np.concatenate(list(context.inputs))]


@kernel("is_initialized")
def _is_initialized(context: Context) -> Sequence[Array]:
    return [np.asarray(not context.store.uninitialized(_keys(context)))]


@kernel("uninitialized")
def _uninitialized(context: Context) -> Sequence[Array]:
    return [strings(context.store.uninitialized(_keys(context)))]


@kernel("wait_initialized")
def _wait_initialized(context: Context) -> Sequence[Array]:
    return [
        strings(
            context.store.wait_initialized(
                _keys(context), float(context.inputs[0]), context.cancelled
            )
        )
    ]


def _key(context: Context) -> Key:
    return context.attrs["container"], context.attrs["variable"]


@kernel("value_or")
def _value_or(context: Context) -> Sequence[AnyArray]:
    if context.store.uninitialized([_key(context)]):
        return [context.inputs[0]]
    return _read(context)


def _string_array(array: Array, variable: str) -> Array:
    """Returns a copy of the new value of a string variable, with bytes as elements."""
    value = np.array(array, dtype=object)
    flat = value.reshape(-1)
    for index, item in enumerate(flat):
        if isinstance(item, str):
            flat[index] = item.encode()
        elif not isinstance(item, bytes):
            raise InvalidArgumentError(
                f"{variable!r} is a variable of strings and cannot hold a {type(item).__name__}"
            )
    return value


@kernel("assign")
def _assign(context: Context) -> Sequence[Array]:
    key = _key(context)
    # The input is lent, and the variable keeps the copy.
    value = _string_array(context.inputs[0], key[1])
    context.store.replace({key: (value, TensorSpec(value.shape, value.dtype))})
    return [value]


@kernel("read")
def _read(context: Context) -> Sequence[Array]:
    key = _key(context)
    return [context.store.snapshot([key])[key]]


@kernel("print")
def _print(context: Context) -> Sequence[Array]:
    if _may_print((context.client, context.task, context.op), int(context.attrs["first_n"])):
        shown = "".join(
            f"[{_show(array, int(context.attrs['summarize']))}]" for array in context.inputs
        )
        # Another process may have made the text, so no line of the text may pass for a line of the
        # task's own.
        lines = f"{context.attrs['message']}{shown}".split("\n")
        print(
            *(f"Print: {printable(line)}" for line in lines), sep="\n", file=sys.stderr, flush=True
        )
    return []


# Number of the runs of each limited Print, by session, task and operation.
_printed: OrderedDict[tuple[int, str, str], int] = OrderedDict()
_printed_lock = concurrency.Lock()
_MAX_PRINTED = 10_000


def _may_print(key: tuple[int, str, str], first_n: int) -> bool:
    if first_n < 0:
        return True
    with _printed_lock:
        # A key that is used moves to the end, so the table drops the operations of old sessions.
        count = _printed[key] = _printed.pop(key, 0) + 1
        if len(_printed) > _MAX_PRINTED:
            _printed.popitem(last=False)
    return count <= first_n


def _show(array: Array, limit: int) -> str:
    flat = np.asarray(array).ravel()
    more = "..." if flat.size > limit else ""
    items = (
        i.decode(errors="replace") if isinstance(i, bytes) else str(i)
        for i in flat[:limit].tolist()
    )
    return " ".join(items) + more


@kernel("check")
def _check(context: Context) -> Sequence[Array]:
    if not bool(np.all(context.inputs[0])):
        shown = "".join(
            f"[{_show(array, int(context.attrs.get('summarize', 3)))}]"
            for array in context.inputs[1:]
        )
        raise InvalidArgumentError(
            f"check failed at {context.op!r}: {context.attrs.get('message', '')}{shown}",
            task=context.task,
        )
    return []
