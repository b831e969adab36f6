"""Exporting: a JAX function becomes a program, whose bytes are equal in every process that plans the same graph.

For another process the program is an expression list. For a task of this process it is whatever JAX compiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.expressions.reader import read_expressions
from runtime.expressions.writer import write_expressions
from runtime.graph.op_kinds import ArrayFn
from runtime.graph.tracing import aval, trace
from runtime.plan.plan import Program
from runtime.tensor_spec import TensorSpec

_CALLBACK = re.compile(r"custom_call @\w*callback")


def own_program(run: ArrayFn, arguments: Sequence[TensorSpec], platform: str) -> Program:
    """Makes a program for a task of this process, in 64-bit mode.

    Args:
        run: a JAX function of arrays giving a tuple of arrays.
        arguments: shape and dtype of each argument.
        platform: XLA's name of the platform that it will be compiled for.

    Raises:
        InvalidArgumentError: the program calls Python, or wants several devices.
    """
    with jax.enable_x64(True):
        traced = jax.jit(run).trace(*(aval(s.shape, s.dtype) for s in arguments))
        module = traced.lower(lowering_platforms=(platform,)).as_text()
    # A step may run again after it was cut off. The effects of a Python callback cannot be taken back.
    if traced.jaxpr.effects or _CALLBACK.search(module):
        raise InvalidArgumentError("it has a callback; a program of a step calls no Python: rt.Print prints in a step")
    if "mhlo.num_partitions = 1 " not in module:
        raise InvalidArgumentError("a stage runs on one device, this program wants several")
    return Program(module.encode(), tuple(arguments), _results(traced.jaxpr), traced.jaxpr)


def write_program(run: ArrayFn, arguments: Sequence[TensorSpec], platform: str) -> Program:
    """Writes a function down for a task of another process, traced in 64-bit mode.

    Args:
        run: a JAX function of arrays giving a tuple of arrays.
        arguments: shape and dtype of each argument.
        platform: XLA's name of the platform that it will be compiled for.

    Raises:
        NotInTableError: something in it is not in the table of operations; names it.
        InvalidArgumentError: it breaks one of the rules of ``runtime.expressions.reader``; says which.
    """
    jaxpr = trace(run, [aval(s.shape, s.dtype) for s in arguments], True)
    data = write_expressions(jaxpr, platform)
    # A program that is too large or too deep for any task fails here, with the name of its stage, and is not sent.
    read_expressions(data)
    return Program(data, tuple(arguments), _results(jaxpr))


def _results(jaxpr: jax.extend.core.ClosedJaxpr) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(a.shape, np.dtype(a.dtype)) for a in jaxpr.out_avals)
