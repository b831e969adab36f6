"""Compiling programs: once per process for each SHA-256 and device, however many sessions register them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from runtime.errors import InvalidArgumentError
from runtime.execution.allow import load_program
from runtime.plan.plan import Program

Executable = Callable[..., list[Any]]


class Compiler:
    """A cache of executables. Thread safe; programs that differ compile at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, jax.Device, tuple[int, ...]], _Entry] = {}
        self.compilations = 0
        """How many programs were compiled, for tests that count."""

    def executable(self, program: Program, donate: Sequence[int], device: jax.Device) -> Executable:
        """The compiled program, whose arguments ``donate`` are updated in place.

        Raises:
            InvalidArgumentError: the program is damaged or does what a stage must not do.
        """
        key = (program.sha256, device, tuple(donate))
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
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
    exported = load_program(program)
    # Only a device other than the default one is named: naming it costs on every call.
    sharding = None if device == jax.local_devices()[0] else jax.sharding.SingleDeviceSharding(device)
    avals: list[Any] = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in ((spec.shape, spec.dtype) for spec in program.arguments)
    ]

    def run(*arguments: Any) -> Any:
        return exported.call(*arguments)

    on_device = contextlib.nullcontext() if sharding is None else jax.default_device(device)
    try:
        with jax.enable_x64(True), on_device:
            return jax.jit(run, donate_argnums=tuple(donate)).lower(*avals).compile()
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        raise InvalidArgumentError(f"the program could not be compiled for {device}: {text}") from error
