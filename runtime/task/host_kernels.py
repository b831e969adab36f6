"""Host kernels: the operations of a task that are no XLA programs, by name. No code crosses the wire."""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from runtime import concurrency
from runtime.errors import InvalidArgumentError, NotFoundError, printable
from runtime.graph.op_kinds import WHEN, Attrs
from runtime.state.cancellation import Cancellation
from runtime.state.store import Key, Store
from runtime.tensor_spec import AnyArray, Array, TensorSpec


class DeferredProgram(Protocol):
    """The update of variables that a kernel may run (see ``executor.PreparedStage``)."""

    @property
    def generation(self) -> int:
        """Of the task's variables."""

    def step(self) -> int:
        """The value of the update's first variable."""

    def apply(
        self, inputs: Sequence[AnyArray], key: tuple[int, int] = ..., expected: Mapping[str, int] | None = ...
    ) -> None:
        """Runs the update and waits until it is done."""


@dataclass(frozen=True)
class Context:
    """The objects that a kernel may use.

    Attributes:
        store: the task's state.
        task: the task's name.
        attrs: the attributes of the operation.
        inputs: the arguments. They are lent, for as long as the call lasts: they lie in memory that the next call
            overwrites. What a kernel keeps of them it copies. What it hands on need not be copied: a stage's outputs
            own their memory (see ``executor``).
        op: name of the operation, for errors and output.
        client: the session that the call belongs to.
        cancelled: ends the call's waits: the session has ended, or its caller is gone. Its ``memory`` is the call's.
        deferred: the update that the kernel may run, when its operation has one.
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
}
"""First part of a kernel's name -> the module that registers it, imported when first asked for."""


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Registers a host kernel. One that may wait is named in ``runtime.graph.op_kinds.WAITING``.

    Args:
        name: what stages call it by.
    """

    def register(fn: Kernel) -> Kernel:
        KERNELS[name] = fn
        return fn

    return register


def find_kernel(name: str) -> Kernel:
    """Returns the kernel called ``name``; raises NotFoundError if there is none."""
    if name.startswith(WHEN):
        return _under_condition(find_kernel(name.removeprefix(WHEN)))
    home = _HOMES.get(name.partition("/")[0])
    if home is not None:
        importlib.import_module(home)
    try:
        return KERNELS[name]
    except KeyError:
        raise NotFoundError(f"this task has no kernel {name!r}; it has {', '.join(sorted(KERNELS))}") from None


def _under_condition(kernel: Kernel) -> Kernel:
    """Runs ``kernel`` if its first input is true; returns zeros otherwise (see ``op_kinds.WHEN``)."""

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
    return [strings(context.store.wait_initialized(_keys(context), float(context.inputs[0]), context.cancelled))]


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
            raise InvalidArgumentError(f"{variable!r} is a variable of strings and cannot hold a {type(item).__name__}")
    return value


@kernel("assign")
def _assign(context: Context) -> Sequence[Array]:
    key = _key(context)
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
        shown = "".join(f"[{_show(array, int(context.attrs['summarize']))}]" for array in context.inputs)
        # Another process may have made the text: no line of it may pass for one of the task's own.
        lines = f"{context.attrs['message']}{shown}".split("\n")
        print(*(f"Print: {printable(line)}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    return []


_printed: OrderedDict[tuple[int, str, str], int] = OrderedDict()  # how often a limited Print of a session has run
_printed_lock = concurrency.Lock()
_MAX_PRINTED = 10_000


def _may_print(key: tuple[int, str, str], first_n: int) -> bool:
    if first_n < 0:
        return True
    with _printed_lock:
        count = _printed[key] = _printed.pop(key, 0) + 1
        if len(_printed) > _MAX_PRINTED:
            _printed.popitem(last=False)
    return count <= first_n


def _show(array: Array, limit: int) -> str:
    flat = np.asarray(array).ravel()
    more = "..." if flat.size > limit else ""
    items = (i.decode(errors="replace") if isinstance(i, bytes) else str(i) for i in flat[:limit].tolist())
    return " ".join(items) + more


@kernel("check")
def _check(context: Context) -> Sequence[Array]:
    if not bool(np.all(context.inputs[0])):
        shown = "".join(f"[{_show(array, int(context.attrs.get('summarize', 3)))}]" for array in context.inputs[1:])
        raise InvalidArgumentError(
            f"check failed at {context.op!r}: {context.attrs.get('message', '')}{shown}", task=context.task
        )
    return []
