"""Draws: one loop for the random numbers that a stage draws alike, so that XLA compiles one draw.

The keys of these draws are made together, without a loop.

A program may have hundreds of draws: one for each weight matrix, or for each share of a secret. XLA
takes a quarter of a second to compile a random key and a draw, as long as for a thousand additions.
So the first step of a program with a hundred draws takes 2.7 s of processor time instead of 24 s.
The numbers are the same. A cache of compiled programs does not replace this module, because the
cache is empty at the first launch.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var

from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import Constant, Pure, RandomKey
from runtime.plan.packing import Value
from runtime.tensor_spec import AnyArray, TensorSpec

FEWEST = 4
"""The least number of operations of a group. A smaller group stays as written."""
LARGEST = 2**20
"""Bytes of the largest draw in a loop.

A larger draw stays as written, since a loop needs twice its memory.
"""


def draw_alike(
    operations: Sequence[Operation],
    jaxprs: Mapping[Operation, ClosedJaxpr],
    specs: Mapping[Tensor, TensorSpec],
    values: dict[Value, AnyArray],
) -> None:
    """Computes the random keys of a stage, and the draws from these keys, where many are alike.

    Args:
        operations: the operations of the stage, in their order.
        jaxprs: the computation of each operation.
        specs: the shape and dtype of each tensor.
        values: the known values by tensor, to which the drawn values are added.
    """
    keys = [op for op in operations if isinstance(op.body, RandomKey)]
    if len(keys) < FEWEST:
        return
    # Draws take constants too, such as a bound. The constants are evaluated here already.
    for op in operations:
        if isinstance(op.body, Constant):
            values.setdefault(op.outputs[0], op.body.value)
    for alike in _group_alike(keys, lambda op: (getattr(op.body, "make", None), op.inputs[0])):
        _draw_keys(alike, values)
    made = {op.outputs[0] for op in keys}

    def describe_draw(op: Operation) -> Hashable:
        # A draw takes a key, and its other inputs are known.
        is_draw = (
            isinstance(op.body, Pure)
            and made.intersection(op.inputs)
            and values.keys() >= {*op.inputs}
        )
        if not is_draw or sum(specs[t].nbytes for t in op.outputs) > LARGEST:
            return None
        form = describe_jaxpr(jaxprs[op])
        return form and (form, *(None if t in made else t for t in op.inputs))

    for alike in _group_alike(operations, describe_draw):
        _draw_values(alike, jaxprs[alike[0]], made, values)


def _group_alike(
    operations: Iterable[Operation], describe: Callable[[Operation], Hashable]
) -> list[list[Operation]]:
    """Groups operations of one description.

    Operations without a description, and small groups, are left out.
    """
    groups: dict[Hashable, list[Operation]] = {}
    for op in operations:
        if (key := describe(op)) is not None:
            groups.setdefault(key, []).append(op)
    return [group for group in groups.values() if len(group) >= FEWEST]


def _draw_keys(alike: Sequence[Operation], values: dict[Value, AnyArray]) -> None:
    bodies = [op.body for op in alike if isinstance(op.body, RandomKey)]
    assert len(bodies) == len(alike), "an operation of the group makes no key"
    step = values[alike[0].inputs[0]]
    seeds = jnp.asarray(np.array([body.seeds for body in bodies], np.uint32))
    # On an accelerator a loop would be many tiny kernels, one after the other.
    _store_results(alike, jax.vmap(bodies[0].make, (0, None))(seeds, step), values)


def _draw_values(
    alike: Sequence[Operation],
    jaxpr: ClosedJaxpr,
    made: set[Tensor],
    values: dict[Value, AnyArray],
) -> None:
    function = jax.extend.core.jaxpr_as_fun(jaxpr)
    # Alike operations differ in their keys only, so the first operation has the other inputs of
    # all.
    inputs = alike[0].inputs
    places = [i for i, tensor in enumerate(inputs) if tensor in made]
    assert places, "a draw takes a key"
    stacked = [jnp.stack([jnp.asarray(values[op.inputs[i]]) for op in alike]) for i in places]

    def draw_one(own: Sequence[jax.Array]) -> Sequence[jax.Array]:
        arguments = [None if tensor in made else values[tensor] for tensor in inputs]
        for place, key in zip(places, own, strict=True):
            arguments[place] = key
        return tuple(function(*arguments))

    _store_results(alike, jax.lax.map(draw_one, stacked), values)


def _store_results(
    alike: Sequence[Operation], drawn: Sequence[AnyArray], values: dict[Value, AnyArray]
) -> None:
    for place, op in enumerate(alike):
        for tensor, results in zip(op.outputs, drawn, strict=True):
            # A fed tensor keeps its fed value.
            values.setdefault(tensor, results[place])


def describe_jaxpr(jaxpr: ClosedJaxpr) -> Hashable:
    """Describes a jaxpr. Jaxprs that compute the same have equal descriptions.

    Returns None if the jaxpr cannot be described. The jitted functions in a jaxpr are compared by
    identity: JAX traces each once for arguments of one kind.
    """
    # Arrays cannot be hashed.
    if jaxpr.consts:
        return None
    numbers: dict[Var, int] = {}

    def describe_atom(atom: Var | Literal) -> Hashable:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return str(atom.aval), value.dtype.str, value.tobytes()
        return numbers.setdefault(atom, len(numbers))

    def describe_atoms(atoms: Iterable[Var | Literal]) -> Hashable:
        return tuple(map(describe_atom, atoms))

    inner = jaxpr.jaxpr
    form = (
        tuple((describe_atom(v), str(v.aval)) for v in inner.invars),
        tuple(
            (
                e.primitive,
                describe_atoms(e.invars),
                tuple(sorted(e.params.items())),
                describe_atoms(e.outvars),
            )
            for e in inner.eqns
        ),
        describe_atoms(inner.outvars),
    )
    # A parameter of an equation may be unhashable.
    try:
        hash(form)
    except TypeError:
        return None
    return form
