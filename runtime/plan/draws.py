"""Draws: where a stage draws many random numbers alike, one loop draws them all, and XLA compiles one draw.

A program may have hundreds of draws: one for each weight matrix, or for each share of a secret. XLA takes a quarter of
a second to compile a random key and a draw, as long as for a thousand additions. So the first step of a program with
a hundred draws takes 2.7 s of processor time instead of 24 s. The numbers are the same. A cache of compiled programs
does not replace this module, because the cache is empty at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import Constant, Pure, RandomKey
from runtime.tensor_spec import AnyArray, TensorSpec

FEWEST = 4
"""As many operations that draw alike become one loop; fewer are left as they are."""
LARGEST = 2**20
"""Draws of more bytes are left as they are: in a loop they would lie in memory twice."""


def draw_alike(
    operations: Sequence[Operation],
    jaxprs: Mapping[Operation, ClosedJaxpr],
    specs: Mapping[Tensor, TensorSpec],
    values: dict[Tensor, AnyArray],
) -> None:
    """Computes the keys of a stage, and what is drawn from them, where there are many alike.

    Args:
        operations: of the stage, in their order.
        jaxprs: what each of them computes.
        specs: the shape and dtype of each tensor.
        values: the tensors that are given; gets those that were drawn.
    """
    keys = [op for op in operations if isinstance(op.body, RandomKey)]
    if len(keys) < FEWEST:
        return
    for op in operations:
        if isinstance(op.body, Constant):
            values.setdefault(op.outputs[0], op.body.value)
    for alike in _alike(keys, lambda op: (getattr(op.body, "make", None), op.inputs[0])):
        _draw_keys(alike, values)
    made = {op.outputs[0] for op in keys}

    def form(op: Operation) -> Hashable:
        given = isinstance(op.body, Pure) and made.intersection(op.inputs) and values.keys() >= {*op.inputs}
        if not given or sum(_size(specs[t]) for t in op.outputs) > LARGEST:
            return None
        own = _form(jaxprs[op])
        return own and (own, *(None if t in made else t for t in op.inputs))

    for alike in _alike(operations, form):
        _draw(alike, jaxprs[alike[0]], made, values)


def _alike(operations: Iterable[Operation], form: Callable[[Operation], Hashable]) -> list[list[Operation]]:
    groups: dict[Hashable, list[Operation]] = {}
    for op in operations:
        if (key := form(op)) is not None:
            groups.setdefault(key, []).append(op)
    return [group for group in groups.values() if len(group) >= FEWEST]


def _draw_keys(alike: Sequence[Operation], values: dict[Tensor, AnyArray]) -> None:
    bodies = [op.body for op in alike if isinstance(op.body, RandomKey)]
    step = values[alike[0].inputs[0]]
    seeds = jnp.asarray(np.array([body.seeds for body in bodies], np.uint32))
    drawn = jax.lax.map(lambda own: bodies[0].make(own, step), seeds)
    _hand_out(alike, drawn, values)


def _draw(alike: Sequence[Operation], jaxpr: ClosedJaxpr, made: set[Tensor], values: dict[Tensor, AnyArray]) -> None:
    function = jax.extend.core.jaxpr_as_fun(jaxpr)
    inputs = alike[0].inputs
    places = [i for i, tensor in enumerate(inputs) if tensor in made]
    stacked = [jnp.stack([jnp.asarray(values[op.inputs[i]]) for op in alike]) for i in places]

    def one(own: Sequence[jax.Array]) -> Sequence[jax.Array]:
        arguments = [None if tensor in made else values[tensor] for tensor in inputs]
        for place, key in zip(places, own, strict=True):
            arguments[place] = key
        return tuple(function(*arguments))

    _hand_out(alike, jax.lax.map(one, stacked), values)


def _hand_out(alike: Sequence[Operation], drawn: Sequence[jax.Array], values: dict[Tensor, AnyArray]) -> None:
    for place, op in enumerate(alike):
        for tensor, results in zip(op.outputs, drawn, strict=True):
            values.setdefault(tensor, results[place])  # a fed tensor keeps its fed value


def _size(spec: TensorSpec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize


def _form(jaxpr: ClosedJaxpr) -> Hashable:
    """Describes a jaxpr; equal for jaxprs that compute the same of their arguments.

    Returns None if that cannot be told. The jitted functions in a jaxpr are compared by identity: JAX traces each once
    for arguments of one kind.
    """
    if jaxpr.consts:
        return None
    numbers: dict[Var, int] = {}

    def atom(one: Var | Literal) -> Hashable:
        if isinstance(one, Literal):
            value = np.asarray(one.val)
            return str(one.aval), value.dtype.str, value.tobytes()
        return numbers.setdefault(one, len(numbers))

    inner = jaxpr.jaxpr
    form = (
        tuple((atom(v), str(v.aval)) for v in inner.invars),
        tuple(
            (e.primitive, tuple(map(atom, e.invars)), tuple(sorted(e.params.items())), tuple(map(atom, e.outvars)))
            for e in inner.eqns
        ),
        tuple(map(atom, inner.outvars)),
    )
    try:
        hash(form)
    except TypeError:
        return None
    return form
