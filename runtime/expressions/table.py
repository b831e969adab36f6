"""The table of operations: what an expression list may hold, with attributes and the function of jax.lax.

A row's name is that of a JAX primitive, and its attributes are those parameters of the primitive that say what it
computes. The task makes the operation with the public function of ``jax.lax``, which checks operands and attributes and
infers the result; with the primitive itself where there is none. So a list means the same to every version of JAX that
has the function, whatever its primitives are given besides.

Not in the table, and never to be: what has effects (callbacks, prints, infeeds), what is for several devices, what is
not JAX's own (Pallas, foreign functions), and what needs shapes that are not known.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extend_random
from jax.extend.core import Primitive, jaxpr_as_fun, primitives
from jax.lax import linalg

from runtime.expressions.kinds import (
    AXES,
    AXIS,
    COMPUTATION,
    COMPUTATIONS,
    DTYPE,
    FILL,
    FLAG,
    LARGEST,
    LARGEST_DIMENSION,
    NUMBER,
    PARTS,
    SHAPE,
    AttributeKind,
    groups,
    integer,
    integers,
    member_of,
    one_of,
    optional,
    rows,
)

Value: TypeAlias = Any
"""An array that JAX traces, or several, or a parameter of a primitive: jax.lax tells no more of them."""
Make: TypeAlias = Callable[..., Value]
"""Makes an operation: ``make(*operands, **attributes)``."""
Function: TypeAlias = Callable[..., tuple[jax.Array, ...]]
"""A computation among the attributes: of arrays, giving a tuple of arrays."""


@dataclass(frozen=True)
class Row:
    """An operation.

    Attributes:
        make: ``make(*operands, **attributes)`` gives an array or several. A computation among the attributes is a
            function of arrays that gives a tuple of arrays.
        attributes: the parameters that are sent, by name.
        implied: the parameters that follow from the rest. Value other must be None.
        cost: what it costs XLA to compile, in kernels of a plain operation.
    """

    make: Make
    attributes: Mapping[str, AttributeKind] = field(default_factory=dict)
    implied: frozenset[str] = frozenset()
    cost: int = 1


def _bound(primitive: Primitive) -> Make:
    return primitive.bind


# -- loops and branches ----------------------------------------------------------------------------------------------


def _while(*operands: Value, cond_nconsts: int, body_nconsts: int, cond_jaxpr: Function, body_jaxpr: Function) -> Value:
    of_cond, rest = operands[:cond_nconsts], operands[cond_nconsts:]
    of_body, state = rest[:body_nconsts], tuple(rest[body_nconsts:])

    def flag_of(now: tuple[Value, ...]) -> Value:
        (flag,) = cond_jaxpr(*of_cond, *now)
        return flag

    # It is traced once, whatever asks for it: a condition may hold loops that have conditions.
    traced, flags = jax.make_jaxpr(flag_of, return_shape=True)(state)
    # Of a loop that was mapped over arrays (vmap) there are several, and those that have ended keep their values.
    rank = len(flags.shape)

    def condition(now: tuple[Value, ...]) -> Value:
        (flag,) = jaxpr_as_fun(traced)(*now)
        return flag

    def goes_on(now: tuple[Value, ...]) -> Value:
        return lax.reduce_or(condition(now), tuple(range(rank))) if rank else condition(now)

    def body(now: tuple[Value, ...]) -> tuple[Value, ...]:
        after = body_jaxpr(*of_body, *now)
        if not rank:
            return after
        flag = condition(now)
        return tuple(
            lax.select_n(lax.broadcast_in_dim(flag, new.shape, range(rank)), old, new)
            for old, new in zip(now, after, strict=True)
        )

    return lax.while_loop(goes_on, body, state)


def _scan(
    *operands: Value, jaxpr: Function, length: int, reverse: bool, unroll: int, num_consts: int, num_carry: int
) -> Value:
    consts, rest = operands[:num_consts], operands[num_consts:]

    def body(carry: tuple[Value, ...], x: tuple[Value, ...]) -> tuple[Value, Value]:
        results = jaxpr(*consts, *carry, *x)
        return tuple(results[:num_carry]), tuple(results[num_carry:])

    carry, ys = lax.scan(body, tuple(rest[:num_carry]), tuple(rest[num_carry:]), length, reverse, unroll)
    return *carry, *ys


def _cond(index: Value, *operands: Value, branches: Sequence[Function]) -> Value:
    return lax.switch(lax.convert_element_type(index, "int32"), branches, *operands)


def _combining(jaxpr: Function) -> Callable[[Value, Value], Value]:
    return lambda a, b: tuple(jaxpr(*a, *b))


def _reduce(*operands: Value, jaxpr: Function, dimensions: Sequence[int]) -> Value:
    half = len(operands) // 2
    return lax.reduce(tuple(operands[:half]), tuple(operands[half:]), _combining(jaxpr), dimensions)


def _reduce_window(*operands: Value, jaxpr: Function, **window: Value) -> Value:
    half = len(operands) // 2
    return lax.reduce_window(tuple(operands[:half]), tuple(operands[half:]), _combining(jaxpr), **window)


# -- what differs from the function of jax.lax -------------------------------------------------------------------------


def _scatter_apply(
    operand: Value, indices: Value, updates: Value, update_jaxpr: Function | None, **attributes: Value
) -> Value:
    if update_jaxpr is None:
        return lax.scatter(operand, indices, updates, **attributes)
    return lax.scatter_apply(
        operand, indices, lambda x: update_jaxpr(x, x)[0], update_shape=updates.shape, **attributes
    )


def _dividing(make: Make, x: Value, y: Value) -> Value:
    """Divides, and hides a constant divisor of zero.

    MLIR ends the process when it divides a constant integer by a constant zero.
    """
    if not jnp.issubdtype(y.dtype, jnp.integer) or isinstance(y, np.ndarray) and y.all():
        return make(x, y)
    return make(x, lax.optimization_barrier(y))


def _rng_uniform(low: Value, high: Value, shape: Sequence[int]) -> Value:
    """Draws numbers, and refuses dtypes that XLA cannot draw.

    XLA ends the process at such a dtype.
    """
    drawn = "float16 bfloat16 float32 float64 int32 int64 uint32 uint64".split()
    if low.dtype.name not in drawn:
        raise TypeError(f"numbers are drawn of {', '.join(drawn)}, not of {low.dtype}")
    return lax.rng_uniform(low, high, shape)


def _along_one(make: Make, x: Value, axes: tuple[int, ...], index_dtype: Value) -> Value:
    return make(x, *axes, index_dtype=index_dtype)


def _approx_top_k(operand: Value, is_max_k: bool, **attributes: Value) -> Value:
    return (lax.approx_max_k if is_max_k else lax.approx_min_k)(operand, **attributes)


def _dot_dimensions(*rows: tuple[int, ...]) -> Value:
    return (rows[0], rows[1]), (rows[2], rows[3])


def _svd(x: Value, compute_uv: bool, **attributes: Value) -> Value:
    made = linalg.svd(x, compute_uv=compute_uv, **attributes)
    return (made[1], made[0], made[2]) if compute_uv else made  # as the primitive orders them


def _ragged_dot(*operands: Value, **attributes: Value) -> Value:
    return lax.ragged_dot_general(*operands, **attributes)


def _ragged_dimensions(*rows: tuple[int, ...]) -> Value:
    return lax.RaggedDotDimensionNumbers(_dot_dimensions(*rows[:4]), rows[4], rows[5])


def _ragged_rows(value: Value) -> Sequence[Sequence[int]]:
    contracting, batch = value.dot_dimension_numbers
    return [*contracting, *batch, value.lhs_ragged_dimensions, value.rhs_group_dimensions]


PRECISIONS = {
    **{f"{a.name},{b.name}": (a, b) for a in lax.Precision for b in lax.Precision},
    **{preset.name: preset for preset in lax.DotAlgorithmPreset},
}


def _precision_name(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(str(lax.Precision(part).name) for part in value)
    return str(value.name) if isinstance(value, lax.DotAlgorithmPreset) else f"{value.name},{value.name}"


def _bit_width(value: Value) -> int:
    if operator.index(value) not in (8, 16, 32, 64):
        raise ValueError(f"{value} is not 8, 16, 32 or 64")
    return int(value)


GENERATORS = {
    "threefry2x32": extend_random.threefry_prng_impl,
    "rbg": extend_random.rbg_prng_impl,
    "unsafe_rbg": extend_random.unsafe_rbg_prng_impl,
}
"""JAX's own random number generators."""

GENERATOR = one_of(GENERATORS, lambda value: str(value.name))
PRECISION = optional(one_of(PRECISIONS, _precision_name))
MODE = optional(member_of(lax.GatherScatterMode, leaving_out=frozenset({"ONE_HOT"})))
WIDTH = AttributeKind("integer", _bit_width, _bit_width)
COUNT = integer(0)
POSITIVE = integer(1)
SIZES = integers(0)
POSITIVES = integers(1)

_SCATTER_DIMENSIONS = (
    "update_window_dims",
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
)
_GATHER_DIMENSIONS = (
    "offset_dims",
    "collapsed_slice_dims",
    "start_index_map",
    "operand_batching_dims",
    "start_indices_batching_dims",
)

_WINDOW = {
    "window_dimensions": POSITIVES,
    "window_strides": POSITIVES,
    "padding": rows(2),
    "base_dilation": POSITIVES,
    "window_dilation": POSITIVES,
}
_SCATTER = {
    "dimension_numbers": groups(
        5, lax.ScatterDimensionNumbers, lambda d: [tuple(getattr(d, name)) for name in _SCATTER_DIMENSIONS]
    ),
    "indices_are_sorted": FLAG,
    "unique_indices": FLAG,
    "mode": MODE,
}
_REDUCED = {"axes": AXES}
_ARG = {"axes": AXES, "index_dtype": DTYPE}
_ALONG = {"axis": AXIS, "reverse": FLAG}


def _elementwise() -> dict[str, Row]:
    names = """
        abs acos acosh add asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj cos cosh
        digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag is_finite le
        lgamma log log1p log2 logistic lt max min mul mulhi ne neg nextafter one_minus_square optimization_barrier
        polygamma population_count pow real rem rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
        sign sin sinh sqrt square sub tan tanh zeta
    """.split()
    made = {name: Row(getattr(lax, name)) for name in names if hasattr(lax, name)}  # an older JAX lacks some
    made["conj"] = Row(lax.conj, implied=frozenset({"input_dtype"}))
    made["optimization_barrier"] = Row(lambda *operands: lax.optimization_barrier(operands))
    others: dict[str, Make] = {
        "add_any": lax.add,
        "div": functools.partial(_dividing, lax.div),
        "rem": functools.partial(_dividing, lax.rem),
        "and": lax.bitwise_and,
        "not": lax.bitwise_not,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "regularized_incomplete_beta": lax.betainc,
        "eq_to": _bound(primitives.eq_to_p),
        "le_to": _bound(primitives.le_to_p),
        "lt_to": _bound(primitives.lt_to_p),
    }
    if (polynomial := getattr(lax, "polynomial", None)) is not None:
        made["polynomial"] = Row(lambda x, *factors: polynomial(x, factors), implied=frozenset({"unroll"}))
    return made | {name: Row(make) for name, make in others.items()}


_ITERATIVE = frozenset({"igamma", "igamma_grad_a", "igammac", "polynomial", "regularized_incomplete_beta"})
"""Elementwise operations that are loops to XLA: it ends the process where one is to combine elements."""
COMBINING = replace(
    COMPUTATION,
    operations=(frozenset(_elementwise()) - _ITERATIVE)
    | {"bitcast_convert_type", "convert_element_type", "integer_pow", "reduce_precision", "round"},
)
"""A computation by which elements are combined."""


def _reductions() -> dict[str, Row]:
    names = "and max min or prod sum xor".split()
    windows = "reduce_window_max reduce_window_min reduce_window_sum".split()
    return {
        **{f"reduce_{name}": Row(getattr(lax, f"reduce_{name}"), _REDUCED) for name in names},
        **{name: Row(getattr(lax, name), _ALONG) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
        **{name: Row(_bound(getattr(primitives, f"{name}_p")), _WINDOW) for name in windows},
        "argmax": Row(functools.partial(_along_one, lax.argmax), _ARG),
        "argmin": Row(functools.partial(_along_one, lax.argmin), _ARG),
        "reduce": Row(_reduce, {"jaxpr": COMBINING, "dimensions": AXES}, frozenset({"computation", "consts"})),
        "reduce_window": Row(_reduce_window, {**_WINDOW, "jaxpr": COMBINING}, frozenset({"consts"})),
        "select_and_scatter_add": Row(
            _bound(primitives.select_and_scatter_add_p),
            {
                "select_prim": one_of({"ge": primitives.ge_p, "le": primitives.le_p}, lambda p: str(p.name)),
                **{name: _WINDOW[name] for name in ("window_dimensions", "window_strides", "padding")},
            },
        ),
        "select_and_gather_add": Row(
            _bound(primitives.select_and_gather_add_p),
            {
                "select_prim": one_of({"ge": primitives.ge_p, "le": primitives.le_p}, lambda p: str(p.name)),
                **_WINDOW,
            },
        ),
        "sort": Row(
            lambda *operands, **attributes: lax.sort(operands, **attributes),
            {"dimension": AXIS, "is_stable": FLAG, "num_keys": POSITIVE},
        ),
        "top_k": Row(lax.top_k, {"k": COUNT, "axis": AXIS}, frozenset({"is_stable"})),  # which it always is here
        "approx_top_k": Row(
            _approx_top_k,
            {
                "k": COUNT,
                "reduction_dimension": AXIS,
                "recall_target": NUMBER,
                "is_max_k": FLAG,
                "reduction_input_size_override": integer(-1),
                "aggregate_to_topk": FLAG,
            },
        ),
    }


def _shapes() -> dict[str, Row]:
    return {
        "broadcast_in_dim": Row(lax.broadcast_in_dim, {"shape": SHAPE, "broadcast_dimensions": AXES}),
        "reshape": Row(lax.reshape, {"new_sizes": SHAPE, "dimensions": optional(AXES)}),
        "squeeze": Row(lax.squeeze, {"dimensions": AXES}),
        "transpose": Row(lax.transpose, {"permutation": AXES}),
        "rev": Row(lax.rev, {"dimensions": AXES}),
        "concatenate": Row(lambda *operands, dimension: lax.concatenate(operands, dimension), {"dimension": AXIS}),
        "stack": Row(lambda *operands, axis: jnp.stack(operands, axis), {"axis": AXIS}),
        "unstack": Row(lambda x, axis: jnp.unstack(x, axis=axis), {"axis": AXIS}),
        "split": Row(lax.split, {"sizes": integers(0, count=PARTS), "axis": AXIS}),
        "tile": Row(jnp.tile, {"reps": SIZES}),
        "pad": Row(lax.pad, {"padding_config": rows(3)}),
        "slice": Row(lax.slice, {"start_indices": SHAPE, "limit_indices": SHAPE, "strides": optional(POSITIVES)}),
        "dynamic_slice": Row(
            lambda x, *at, slice_sizes: lax.dynamic_slice(x, at, slice_sizes, allow_negative_indices=False),
            {"slice_sizes": SHAPE},
        ),
        "dynamic_update_slice": Row(
            lambda x, update, *at: lax.dynamic_update_slice(x, update, at, allow_negative_indices=False)
        ),
        "gather": Row(
            lax.gather,
            {
                "dimension_numbers": groups(
                    5, lax.GatherDimensionNumbers, lambda d: [tuple(getattr(d, name)) for name in _GATHER_DIMENSIONS]
                ),
                "slice_sizes": SHAPE,
                "unique_indices": FLAG,
                "indices_are_sorted": FLAG,
                "mode": MODE,
                "fill_value": optional(FILL),
            },
        ),
        "scatter": Row(_scatter_apply, {**_SCATTER, "update_jaxpr": optional(COMBINING)}, frozenset({"update_consts"})),
        **{
            f"scatter{how}": Row(
                getattr(lax, f"scatter{how}".replace("-", "_")), _SCATTER, frozenset({"update_jaxpr", "update_consts"})
            )
            for how in ("-add", "-max", "-min", "-mul", "-sub")
        },
        "iota": Row(lax.broadcasted_iota, {"dtype": DTYPE, "shape": SHAPE, "dimension": AXIS}),
        "empty": Row(
            lambda shape, dtype: lax.convert_element_type(lax.full(shape, False), dtype),
            {"shape": SHAPE, "dtype": DTYPE},
        ),
        "convert_element_type": Row(lax.convert_element_type, {"new_dtype": DTYPE}, frozenset({"weak_type"})),
        "bitcast_convert_type": Row(lax.bitcast_convert_type, {"new_dtype": DTYPE}),
        "reduce_precision": Row(
            lax.reduce_precision, {"exponent_bits": integer(1, 11), "mantissa_bits": integer(0, 52)}
        ),
        "round": Row(lax.round, {"rounding_method": member_of(lax.RoundingMethod)}),
        "integer_pow": Row(lax.integer_pow, {"y": integer(-1024, 1024)}),
    }


def _products() -> dict[str, Row]:
    return {
        "dot_general": Row(
            lax.dot_general,
            {
                "dimension_numbers": groups(4, _dot_dimensions, lambda d: [*d[0], *d[1]]),
                "precision": PRECISION,
                "preferred_element_type": optional(DTYPE),
            },
        ),
        "conv_general_dilated": Row(
            lax.conv_general_dilated,
            {
                "window_strides": POSITIVES,
                "padding": rows(2),
                "lhs_dilation": POSITIVES,
                "rhs_dilation": POSITIVES,
                "dimension_numbers": groups(3, lax.ConvDimensionNumbers),
                "feature_group_count": POSITIVE,
                "batch_group_count": POSITIVE,
                "precision": PRECISION,
                "preferred_element_type": optional(DTYPE),
            },
        ),
        "ragged_dot_general": Row(
            _ragged_dot,
            {
                "ragged_dot_dimension_numbers": groups(6, _ragged_dimensions, _ragged_rows),
                "precision": PRECISION,
                "preferred_element_type": optional(DTYPE),
            },
        ),
        "scaled_dot": Row(
            lambda a, b, *scales, **attributes: lax.scaled_dot(
                a, b, lhs_scale=scales[0], rhs_scale=scales[1], **attributes
            ),
            {
                "dimension_numbers": groups(4, _dot_dimensions, lambda d: [*d[0], *d[1]]),
                "preferred_element_type": optional(DTYPE),
            },
        ),
        "fft": Row(lax.fft, {"fft_type": member_of(lax.FftType), "fft_lengths": POSITIVES}),
    }


def _linear_algebra() -> dict[str, Row]:
    """Makes decompositions by the functions of jax.lax, which check shapes: no list names a kernel of LAPACK's."""
    algorithm = optional(member_of(linalg.SvdAlgorithm, leaving_out=frozenset({"JACOBI", "POLAR"})))
    names = "cholesky_update hessenberg householder_product lu".split()
    return {
        **{name: Row(getattr(linalg, name)) for name in names},
        "cholesky": Row(functools.partial(linalg.cholesky, symmetrize_input=False)),
        "eig": Row(
            linalg.eig,
            {"compute_left_eigenvectors": FLAG, "compute_right_eigenvectors": FLAG},
            frozenset({"enable_eigvec_derivs"}),
        ),
        "eigh": Row(functools.partial(linalg.eigh, symmetrize_input=False), {"lower": FLAG, "sort_eigenvalues": FLAG}),
        "lu_pivots_to_permutation": Row(linalg.lu_pivots_to_permutation, {"permutation_size": COUNT}),
        "qr": Row(linalg.qr, {"pivoting": FLAG, "full_matrices": FLAG}),
        "schur": Row(linalg.schur, {"compute_schur_vectors": FLAG, "sort_eig_vals": FLAG}),
        "svd": Row(_svd, {"full_matrices": FLAG, "compute_uv": FLAG, "algorithm": algorithm}),
        "symmetric_product": Row(linalg.symmetric_product, {"alpha": NUMBER, "beta": NUMBER}),
        "triangular_solve": Row(
            linalg.triangular_solve,
            dict.fromkeys(["left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"], FLAG),
        ),
        "ormqr": Row(linalg.ormqr, {"left": FLAG, "transpose": FLAG}),
        "tridiagonal": Row(linalg.tridiagonal, {"lower": FLAG}),
        "tridiagonal_solve": Row(linalg.tridiagonal_solve, {"perturb_singular": FLAG}),
    }


def _random() -> dict[str, Row]:
    impl = {"impl": GENERATOR}
    return {
        "random_seed": Row(_bound(primitives.random_seed_p), impl),
        "random_wrap": Row(lambda data, impl: jax.random.wrap_key_data(data, impl=impl.name), impl),
        "random_unwrap": Row(jax.random.key_data),
        "random_bits": Row(_bound(primitives.random_bits_p), {"bit_width": WIDTH, "shape": SHAPE}),
        "random_split": Row(_bound(primitives.random_split_p), {"shape": SHAPE}),
        "random_fold_in": Row(_bound(primitives.random_fold_in_p)),
        "random_gamma": Row(_bound(primitives.random_gamma_p), {"log_space": FLAG}),
        "threefry2x32": Row(_bound(primitives.threefry2x32_p)),
        "rng_bit_generator": Row(
            lax.rng_bit_generator,
            {"shape": SHAPE, "dtype": DTYPE, "algorithm": member_of(lax.RandomAlgorithm)},
        ),
        "rng_uniform": Row(_rng_uniform, {"shape": SHAPE}),
    }


def _control() -> dict[str, Row]:
    return {
        "cond": Row(_cond, {"branches": COMPUTATIONS}),
        "while": Row(
            _while, {"cond_nconsts": COUNT, "body_nconsts": COUNT, "cond_jaxpr": COMPUTATION, "body_jaxpr": COMPUTATION}
        ),
        "scan": Row(
            _scan,
            {
                "jaxpr": COMPUTATION,
                "length": integer(0, LARGEST_DIMENSION),
                "reverse": FLAG,
                "unroll": integer(1, LARGEST),
                "num_consts": COUNT,
                "num_carry": COUNT,
            },
            frozenset({"linear", "_split_transpose", "ft_in", "ft_out"}),
        ),
    }


_COSTS = {
    2: "random_bits random_fold_in random_split threefry2x32",
    4: "acosh asinh atanh bessel_i0e bessel_i1e digamma erf_inv lgamma log1p",
    8: """
        approx_top_k cholesky cumlogsumexp eig eigh hessenberg householder_product lu
        ormqr polynomial qr ragged_dot_general scaled_dot schur svd triangular_solve
        tridiagonal tridiagonal_solve
    """,
    64: "cholesky_update igamma igammac igamma_grad_a lu_pivots_to_permutation regularized_incomplete_beta",
    256: "polygamma zeta",
}
"""Operations that are many to XLA, by what they cost: docs/security.md has what was measured, and what is a guess."""
_COST = {name: cost for cost, names in _COSTS.items() for name in names.split()}

TABLE: Mapping[str, Row] = {
    name: replace(row, cost=_COST.get(name, 1))
    for rows_ in (
        *(_elementwise(), _reductions(), _shapes(), _products()),
        *(_linear_algebra(), _random(), _control()),
    )
    for name, row in rows_.items()
}
"""Every operation by the name of its primitive."""

INLINED: Mapping[str, str] = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "call_hi_primitive": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat2": "jaxpr",
}
"""Primitives that only call: the parameter that holds what is written in their place."""


def _scan_counts(params: Mapping[str, Value]) -> Mapping[str, Value]:
    """Returns the parameters of a scan with the numbers that JAX keeps in a tree of the operands since 0.11."""
    if "ft_in" not in params:
        return params
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return {**params, "num_consts": consts, "num_carry": carry}


def _expanded(params: Mapping[str, Value]) -> Mapping[str, Value]:
    """Expands an operation that JAX 0.12 keeps whole until JAX lowers the operation (searchsorted)."""
    whole = params["_prim"]

    def call(*operands: Value) -> Value:
        return jax.tree.leaves(whole.expand(*jax.tree.unflatten(whole.in_tree, operands)))

    with jax.enable_x64(True):
        return {"jaxpr": jax.make_jaxpr(call)(*whole.in_avals_flat)}


RENAMED: Mapping[str, Callable[[Mapping[str, Value]], Mapping[str, Value]]] = {
    "call_hi_primitive": _expanded,
    "composite": lambda params: {"jaxpr": params.get("call_jaxpr"), **params},  # since 0.12
    "scan": _scan_counts,
}
"""Operations whose parameters a newer JAX has renamed: makes the parameters of the table of those of the primitive."""

IDENTITIES = frozenset({"copy", "device_put", "name", "random_clone", "stop_gradient"})
"""Primitives that give their operands as they are."""
