"""The evaluator of programs that run too seldom for a compilation: numpy computes one equation after the other.

The jaxpr is the one that XLA would compile, so the values are the same, apart from the rounding of
reals. An operation that is not in the table here runs in JAX, which compiles that operation alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from runtime.graph.op_kinds import Attrs
from runtime.tensor_spec import AnyArray, Array

MOST_IN_JAX = 8
"""Operations without a row that a program may have; more take as long as a compilation of the program."""
_ELEMENTWISE = dict(
    pair.split(":")
    for pair in """
abs:abs add:add add_any:add and:bitwise_and div:true_divide eq:equal exp:exp ge:greater_equal
gt:greater le:less_equal log:log log1p:log1p lt:less max:maximum min:minimum mul:multiply
ne:not_equal neg:negative not:invert or:bitwise_or pow:power sign:sign sqrt:sqrt square:square
sub:subtract tanh:tanh
""".split()
)
"""Operations of JAX, each with the numpy function that takes the same arrays."""
_DTYPES = frozenset(map(np.dtype, "bool int32 int64 float32 float64".split()))
"""The dtypes that numpy computes as XLA does; numpy sums narrower reals less exactly."""
_ONLY_REALS = frozenset("div integer_pow logistic pow rsqrt".split())
"""Operations that numpy computes as XLA does for floating point numbers only."""
_CALLS = {
    **dict.fromkeys(("jit", "operation"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Operations that run another jaxpr once, each with the parameter that holds the jaxpr."""
_operation = Primitive("operation")
"""The call of a whole operation of the graph. No compiler knows this primitive."""
_operation.multiple_results = True
_operation.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)


def call_whole(jaxpr: ClosedJaxpr, arguments: Sequence[AnyArray]) -> Sequence[AnyArray]:
    """Adds a jaxpr to a program to evaluate as one equation, since each equation takes JAX some time."""
    results: Sequence[AnyArray] = _operation.bind(*arguments, jaxpr=jaxpr)
    return results


def _elementwise(function: Callable[..., object]) -> Callable[..., object]:
    return lambda _, *arrays: function(*arrays)


def _broadcast(p: Attrs, x: Array) -> Array:
    shape = [1] * len(p["shape"])
    for axis, place in enumerate(p["broadcast_dimensions"]):
        shape[place] = x.shape[axis]
    return np.broadcast_to(x.reshape(shape), p["shape"])


def _multiply_matrices(p: Attrs, x: Array, y: Array) -> Array:
    (sum_x, sum_y), (batch_x, batch_y) = p["dimension_numbers"]
    free_x = [i for i in range(x.ndim) if i not in (*sum_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*sum_y, *batch_y)]
    batch, summed = [x.shape[i] for i in batch_x], math.prod(x.shape[i] for i in sum_x)
    left = x.transpose(*batch_x, *free_x, *sum_x).reshape(*batch, -1, summed)
    return left @ y.transpose(*batch_y, *sum_y, *free_y).reshape(*batch, summed, -1)


IN_NUMPY: Final[Mapping[str, Callable[..., object]]] = {
    **{name: _elementwise(getattr(np, to)) for name, to in _ELEMENTWISE.items()},
    **dict.fromkeys(("convert_element_type", "reshape", "squeeze"), lambda _, x: x),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda p, *arrays: np.concatenate(arrays, p["dimension"]),
    "dot_general": _multiply_matrices,
    "integer_pow": lambda p, x: x ** p["y"],
    "logistic": lambda _, x: 1 / (1 + np.exp(-x)),
    "reduce_max": lambda p, x: x.max(tuple(p["axes"])),
    "reduce_min": lambda p, x: x.min(tuple(p["axes"])),
    "reduce_sum": lambda p, x: x.sum(tuple(p["axes"])),
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "select_n": lambda _, which, no, yes: np.where(which, yes, no),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
}
"""The operations that numpy computes, each with its parameters and its arrays.

Shape and dtype of the result come from the equation.
"""
assert IN_NUMPY.keys() >= _ONLY_REALS and IN_NUMPY.keys().isdisjoint(_CALLS)


def _aval(atom: Var | Literal) -> jax.ShapeDtypeStruct:
    return cast(jax.ShapeDtypeStruct, atom.aval)


def fits_numpy(equation: JaxprEqn) -> bool:
    """Returns True if numpy computes this equation as XLA does."""
    name = equation.primitive.name
    avals = [_aval(atom) for atom in (*equation.invars, *equation.outvars)]
    # A reduction of no element is an error in numpy.
    if (
        name not in IN_NUMPY
        or not {aval.dtype for aval in avals} <= _DTYPES
        or any(0 in aval.shape for aval in avals)
    ):
        return False
    kinds = "".join(aval.dtype.kind for aval in avals)
    if name in _ONLY_REALS:
        return set(kinds) == {"f"}
    if name == "dot_general":
        return len({aval.dtype for aval in avals}) == 1
    # XLA saturates, and numpy does not.
    if name == "convert_element_type":
        return kinds != "fi"
    return name != "select_n" or (len(kinds), kinds[0]) == (4, "b")


def pays(jaxpr: ClosedJaxpr) -> bool:
    """Returns True if an evaluation takes less time than a compilation, and calls no Python."""
    return not jaxpr.effects and _count_in_jax(jaxpr.jaxpr) <= MOST_IN_JAX


def _count_in_jax(jaxpr: Jaxpr) -> float:
    count = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            count += _count_in_jax(equation.params[_CALLS[name]].jaxpr)
        elif not fits_numpy(equation):
            # A loop compiles its whole body.
            has_body = any(hasattr(p, "eqns") for p in jax.tree.leaves(equation.params))
            count += math.inf if has_body or "callback" in name else 1
    return count


def evaluate(jaxpr: ClosedJaxpr, device: jax.Device, *arguments: AnyArray) -> list[jax.Array]:
    """Returns the results of a program as new arrays, which share no memory with the arguments."""
    # A named device costs on every later use of a result.
    place = None if device == jax.local_devices()[0] else device
    # XLA gives inf and NaN without a warning.
    with np.errstate(all="ignore"), jax.enable_x64(True):
        return [jax.device_put(np.array(r), place) for r in _evaluate(jaxpr, arguments)]


def _evaluate(jaxpr: ClosedJaxpr, arguments: Sequence[AnyArray]) -> list[AnyArray]:
    inner = jaxpr.jaxpr
    values: dict[Var, AnyArray] = dict(
        zip((*inner.constvars, *inner.invars), (*jaxpr.consts, *arguments), strict=True)
    )

    def find(atom: Var | Literal) -> AnyArray:
        if isinstance(atom, Var):
            return values[atom]
        return np.array(atom.val, _aval(atom).dtype)

    for equation in inner.eqns:
        given = [find(atom) for atom in equation.invars]
        primitive, params, made = equation.primitive, equation.params, equation.outvars
        if primitive.name in _CALLS:
            results = _evaluate(params[_CALLS[primitive.name]], given)
        elif fits_numpy(equation):
            result = np.asarray(IN_NUMPY[primitive.name](params, *map(np.asarray, given)))
            aval = _aval(made[0])
            results = [result.reshape(aval.shape).astype(aval.dtype, copy=False)]
        else:
            found = primitive.bind(*given, **params)
            results = found if primitive.multiple_results else [found]
        values.update(zip(made, results, strict=True))
    return [find(atom) for atom in inner.outvars]
