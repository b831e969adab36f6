"""Exporting: a JAX function becomes a program, whose bytes are equal in every process that plans the same graph.

For another process it becomes an expression list, for this one a module of StableHLO; and for another, too, that says
that it takes these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax import export

from runtime.expressions.reader import read_expressions
from runtime.expressions.writer import write_expressions
from runtime.graph.op_kinds import ArrayFn
from runtime.graph.tracing import aval, trace
from runtime.plan.place import ProgramForm
from runtime.plan.plan import Program
from runtime.tensor_spec import TensorSpec

_set: Callable[[str, object], None] = jax.config.update
_LOCATIONS = "jax_traceback_in_locations_limit"
_lock = threading.Lock()
_exporting = 0
_locations_before = 0


def export_program(run: ArrayFn, arguments: Sequence[TensorSpec], platform: str) -> Program:
    """Exports ``run`` for arguments of these specs, in 64-bit mode.

    Args:
        run: a JAX function of arrays giving a tuple of arrays.
        arguments: shape and dtype of each argument.
        platform: XLA's name of the platform that it will be compiled for.
    """
    with jax.enable_x64(True), _without_locations():
        exported = export.export(jax.jit(run), platforms=[platform])(*(aval(s.shape, s.dtype) for s in arguments))
        blob = bytes(exported.serialize())
    return Program(blob, tuple(arguments), tuple(TensorSpec(a.shape, np.dtype(a.dtype)) for a in exported.out_avals))


def write_program(run: ArrayFn, arguments: Sequence[TensorSpec]) -> Program:
    """Writes ``run`` down for arguments of these specs, traced in 64-bit mode.

    Args:
        run: a JAX function of arrays giving a tuple of arrays.
        arguments: shape and dtype of each argument.

    Raises:
        NotInTableError: something in it is not in the table of operations; names it.
        InvalidArgumentError: it breaks one of the rules of ``runtime.expressions.reader``; says which.
    """
    jaxpr = trace(run, [aval(s.shape, s.dtype) for s in arguments], True)
    results = tuple(TensorSpec(a.shape, np.dtype(a.dtype)) for a in jaxpr.out_avals)
    data = write_expressions(jaxpr)
    read_expressions(data)  # what is too large or too deep for any task is told here, before it is sent
    return Program(data, tuple(arguments), results, ProgramForm.EXPRESSIONS)


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Leaves the names and lines of source files out of what is lowered meanwhile.

    Two workers whose checkouts lie at different paths would otherwise have different programs for one stage, and tell
    everybody where they lie. The setting is JAX's and holds for the process; another thread that lowers something at
    the same moment only has less to print in a dump.
    """
    global _exporting, _locations_before
    with _lock:
        if not _exporting:
            _locations_before = getattr(jax.config, _LOCATIONS)
            _set(_LOCATIONS, 0)
        _exporting += 1
    try:
        yield
    finally:
        with _lock:
            _exporting -= 1
            if not _exporting:
                _set(_LOCATIONS, _locations_before)
