"""Compiling programs: once per process for each identity and device, however many sessions register them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import jax

from runtime.errors import InvalidArgumentError, OpError, ResourceExhaustedError, meaning, one_line
from runtime.expressions.reader import jax_settings, read_expressions
from runtime.plan.plan import Program, ProgramIdentity
from runtime.tensor_spec import TensorSpec

Executable = Callable[..., list[jax.Array]]

KEPT = 512
"""Executables that the cache keeps, the latest asked for; a stage that is registered keeps its own besides."""


class Compiler:
    """A cache of executables. Thread safe; programs that differ compile at the same time.

    Args:
        kept: how many executables are kept.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[ProgramIdentity, jax.Device, tuple[int, ...]], _Entry] = OrderedDict()
        self.compilations = 0
        """How many programs were compiled, for tests that count."""

    def __len__(self) -> int:
        """How many executables are kept."""
        return len(self._entries)

    def executable(self, program: Program, donate: Sequence[int], device: jax.Device) -> Executable:
        """The compiled program, whose arguments ``donate`` are updated in place.

        Raises:
            InvalidArgumentError: the program is damaged or does what a stage must not do.
        """
        key = (program.identity, device, tuple(donate))
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        with entry.lock:
            if entry.executable is None:
                entry.executable = _compile(program, donate, device)
                with self._lock:
                    self.compilations += 1
            return entry.executable


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.executable: Executable | None = None


def _compile(program: Program, donate: Sequence[int], device: jax.Device) -> Executable:
    with contextlib.ExitStack() as settings:
        settings.enter_context(jax.enable_x64(True))
        if program.jaxpr is not None:
            compute: Callable[..., Sequence[jax.Array]] = jax.extend.core.jaxpr_as_fun(program.jaxpr)
        else:
            expressions = read_expressions(program.blob)
            if expressions.arguments != program.arguments:
                raise InvalidArgumentError("the program's arguments are not those that its stage declares")
            settings.enter_context(jax_settings(expressions))
            compute = expressions.compute
        return _compiled(compute, program, donate, device)


def _compiled(
    compute: Callable[..., Sequence[jax.Array]], program: Program, donate: Sequence[int], device: jax.Device
) -> Executable:
    # Only a device other than the default one is named: naming it costs on every call.
    sharding = None if device == jax.local_devices()[0] else jax.sharding.SingleDeviceSharding(device)
    avals = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in ((spec.shape, spec.dtype) for spec in program.arguments)
    ]

    def run(*arguments: jax.Array) -> Sequence[jax.Array]:
        return compute(*arguments)

    on_device = contextlib.nullcontext() if sharding is None else jax.default_device(device)
    try:
        with on_device:
            traced = jax.jit(run, donate_argnums=tuple(donate)).trace(*avals)
            results = tuple(TensorSpec.of(result) for result in jax.tree.leaves(traced.out_info))
            if results != program.results:
                raise InvalidArgumentError(
                    f"the program gives ({', '.join(map(str, results))}), its stage declares "
                    f"({', '.join(map(str, program.results))})"
                )
            executable: Executable = traced.lower().compile()
            return executable
    except OpError:
        raise
    except Exception as error:
        kind = ResourceExhaustedError if meaning(error) is ResourceExhaustedError else InvalidArgumentError
        raise kind(f"the program could not be compiled for {device}: {one_line(error)}") from error
