"""Exporting: a JAX function becomes a program. Processes with equal graphs export equal bytes.

For another process the program is an expression list. For a task of this process the program is a
jaxpr of any kind.
"""

import functools
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime import concurrency
from runtime.errors import InvalidArgumentError
from runtime.expressions.reader import read_expressions
from runtime.expressions.writer import write_expressions
from runtime.graph.op_kinds import ArrayFn
from runtime.graph.tracing import aval, trace
from runtime.plan.evaluator import call_whole, pays
from runtime.plan.plan import Program
from runtime.tensor_spec import TensorSpec

_CALLBACK = re.compile(r"custom_call @xla_\w*python\w*callback|stablehlo\.send")
"""The calls of Python in the text of a module; on a TPU a program sends to the host."""
_CALLBACK_NAME = re.compile(r"\b(debug_print|\w+_callback)\[")
"""The calls of Python in the text of a jaxpr."""


def calls_python(jaxpr: jax.extend.core.ClosedJaxpr | None) -> bool:
    """Returns True if a function has a callback, such as ``jax.debug.print`` or ``jax.pure_callback``."""
    return bool(_CALLBACK_NAME.search(str(jaxpr)))


def own_program(
    run: ArrayFn,
    arguments: Sequence[TensorSpec],
    platform: str,
    is_rare: bool = False,
    mesh: Mesh | None = None,
) -> Program:
    """Makes a program for a task of this process, in 64-bit mode.

    Args:
        run: a JAX function from arrays to a tuple of arrays. ``apply(jaxpr, arrays)`` is its way to
            call a jaxpr.
        arguments: shape and dtype of each argument.
        platform: XLA's name of the platform of the task's device.
        is_rare: True for shapes that are not worth a compilation yet.
        mesh: the devices of the program; None for one device.

    Raises:
        InvalidArgumentError: the program calls Python, or needs other devices.
    """
    with jax.enable_x64(True):
        avals = [aval(s.shape, s.dtype) for s in arguments]
        if is_rare and platform == "cpu" and mesh is None:
            jaxpr = trace(functools.partial(run, apply=call_whole), avals, True)
            if pays(jaxpr):
                # The text of the module is the identity of a compiled program only, and takes
                # longer than the trace.
                name = f"evaluated {concurrency.random_id(63):x}".encode()
                results = _describe_results(jaxpr)
                return Program(name, tuple(arguments), results, jaxpr, is_evaluated=True)
        # A program without arguments knows its devices by its results.
        results_on = mesh and NamedSharding(mesh, PartitionSpec())
        traced = jax.jit(run, out_shardings=results_on).trace(*avals)
        module = traced.lower(lowering_platforms=(platform,)).as_text()
    # A step that was cut off may run again. The effects of a Python callback cannot be taken back.
    if _CALLBACK.search(module):
        raise InvalidArgumentError(
            "it has a callback; a program of a step calls no Python: rt.Print prints in a step, and "
            "a value that Python computes is fed"
        )
    count = mesh.size if mesh else 1
    if f"mhlo.num_partitions = {count} " not in module:
        raise InvalidArgumentError(
            f"its stage runs on {mesh or 'one device'}, this program wants "
            "others: me.device(mesh=...) takes the devices of a mesh"
        )
    results = _describe_results(traced.jaxpr)
    return Program(module.encode(), tuple(arguments), results, traced.jaxpr)


def write_program(run: ArrayFn, arguments: Sequence[TensorSpec], platform: str) -> Program:
    """Writes a function down for a task of another process, traced in 64-bit mode.

    Args:
        run: a JAX function from arrays to a tuple of arrays.
        arguments: shape and dtype of each argument.
        platform: XLA's name of the platform of the task's device.

    Raises:
        NotInTableError: an operation is missing in the table of operations. The message names the
            operation.
        InvalidArgumentError: the program breaks a rule of ``runtime.expressions.reader``. The
            message says the rule.
    """
    jaxpr = trace(run, [aval(s.shape, s.dtype) for s in arguments], True)
    data = write_expressions(jaxpr, platform)
    # A program that is too large or too deep for any task fails here, with the name of its stage,
    # and is not sent.
    read_expressions(data)
    return Program(data, tuple(arguments), _describe_results(jaxpr))


def _describe_results(jaxpr: jax.extend.core.ClosedJaxpr) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(a.shape, np.dtype(a.dtype)) for a in jaxpr.out_avals)
