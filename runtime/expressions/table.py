"""The table of operations: what an expression list may hold, with attributes and the function of jax.lax.

A row's name is that of a JAX primitive, and its attributes are those parameters of the primitive
that say what it computes. The task makes the operation with the public function of ``jax.lax``,
which checks operands and attributes and infers the result; with the primitive itself where there is
none. So a list means the same to every version of JAX that has the function, whatever its
primitives are given besides.

Not in the table, and never to be: what has effects (callbacks, prints, infeeds), what is for
several devices, what is not JAX's own (Pallas, foreign functions), and what needs shapes that are
not known.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as extend_random
from jax.extend.core import jaxpr_as_fun, primitives
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
    rows,
)

Value: TypeAlias = Any
"""An array that JAX traces, or several, or a parameter of a primitive: jax.lax tells no more of them."""
Make: TypeAlias = Callable[..., Value]
"""Makes an operation: ``make(*operands, **attributes)``."""
Function: TypeAlias = Callable[..., tuple[jax.Array, ...]]
"""A computation among the attributes: of arrays, giving a tuple of arrays."""


@dataclass(frozen=True)
class TableRow:
    """An operation.

    Attributes:
        make: ``make(*operands, **attributes)`` gives an array or several. A computation among the
            attributes is a function of arrays that gives a tuple of arrays.
        attributes: the parameters that are sent, by name.
        implied: the parameters that follow from the rest. Value other must be None.
        cost: what it costs XLA to compile, in kernels of a plain operation.
    """

    make: Make
    attributes: Mapping[str, AttributeKind] = field(default_factory=dict)
    implied: frozenset[str] = frozenset()
    cost: int = 1


def _make_while(
    *operands: Value,
    cond_nconsts: int,
    body_nconsts: int,
    cond_jaxpr: Function,
    body_jaxpr: Function,
) -> Value:
    of_cond, rest = operands[:cond_nconsts], operands[cond_nconsts:]
    of_body, state = rest[:body_nconsts], tuple(rest[body_nconsts:])

    def flag_of(now: tuple[Value, ...]) -> Value:
        (flag,) = cond_jaxpr(*of_cond, *now)
        return flag

    # It is traced once, whatever asks for it: a condition may hold loops that have conditions.
    traced, flags = jax.make_jaxpr(flag_of, return_shape=True)(state)
    # Of a loop that was mapped over arrays (vmap) there are several, and those that have ended keep
    # their values.
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


def _make_scan(
    *operands: Value,
    jaxpr: Function,
    length: int,
    reverse: bool,
    unroll: int,
    num_consts: int,
    num_carry: int,
) -> Value:
    consts, rest = operands[:num_consts], operands[num_consts:]

    def body(carry: tuple[Value, ...], x: tuple[Value, ...]) -> tuple[Value, Value]:
        results = jaxpr(*consts, *carry, *x)
        return tuple(results[:num_carry]), tuple(results[num_carry:])

    carry, ys = lax.scan(
        body, tuple(rest[:num_carry]), tuple(rest[num_carry:]), length, reverse, unroll
    )
    return *carry, *ys


def _make_cond(index: Value, *operands: Value, branches: Sequence[Function]) -> Value:
    # The index of a condition is a bool, and a switch takes an integer.
    return lax.switch(lax.convert_element_type(index, "int32"), branches, *operands)


def _make_combining(jaxpr: Function) -> Callable[[Value, Value], Value]:
    return lambda a, b: tuple(jaxpr(*a, *b))


def _make_reduce(*operands: Value, jaxpr: Function, dimensions: Sequence[int]) -> Value:
    half = len(operands) // 2
    return lax.reduce(
        tuple(operands[:half]), tuple(operands[half:]), _make_combining(jaxpr), dimensions
    )


def _reduce_window(*operands: Value, jaxpr: Function, **window: Value) -> Value:
    half = len(operands) // 2
    return lax.reduce_window(
        tuple(operands[:half]), tuple(operands[half:]), _make_combining(jaxpr), **window
    )


# -- what differs from the function of jax.lax -------------------------------------------------------------------------


def _scatter_apply(
    operand: Value,
    indices: Value,
    updates: Value,
    update_jaxpr: Function | None,
    **attributes: Value,
) -> Value:
    if update_jaxpr is None:
        return lax.scatter(operand, indices, updates, **attributes)
    return lax.scatter_apply(
        operand, indices, lambda x: update_jaxpr(x, x)[0], update_shape=updates.shape, **attributes
    )


def _divide_safely(make: Make, x: Value, y: Value) -> Value:
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


def _make_svd(x: Value, compute_uv: bool, **attributes: Value) -> Value:
    made = linalg.svd(x, compute_uv=compute_uv, **attributes)
    # The primitive has the singular values first, and the function has them in the middle.
    return (made[1], made[0], made[2]) if compute_uv else made


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
    return (
        str(value.name)
        if isinstance(value, lax.DotAlgorithmPreset)
        else f"{value.name},{value.name}"
    )


def _bit_width(value: Value) -> int:
    # JAX draws words of these widths only.
    if operator.index(value) not in (8, 16, 32, 64):
        raise ValueError(f"{value} is not 8, 16, 32 or 64")
    return int(value)


GENERATORS = {
    "threefry2x32": extend_random.threefry_prng_impl,
    "rbg": extend_random.rbg_prng_impl,
    "unsafe_rbg": extend_random.unsafe_rbg_prng_impl,
}
"""JAX's own random number generators."""

# The order is that of the fields of JAX's classes, which the reader makes of the rows.
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

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter not
    one_minus_square optimization_barrier or polygamma polynomial population_count pow real
    regularized_incomplete_beta rem rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square sub tan tanh xor zeta
""".split()
_ITERATIVE = {"igamma", "igamma_grad_a", "igammac", "polynomial", "regularized_incomplete_beta"}
"""Elementwise operations that are loops to XLA: it ends the process where one is to combine elements."""
_CONVERSIONS = {
    "bitcast_convert_type",
    "convert_element_type",
    "integer_pow",
    "reduce_precision",
    "round",
}
COMBINING = replace(COMPUTATION, operations=frozenset(_ELEMENTWISE) - _ITERATIVE | _CONVERSIONS)
"""A computation by which elements are combined."""

_ATTRIBUTES = {
    **dict.fromkeys("axis dimension reduction_dimension".split(), AXIS),
    **dict.fromkeys("axes broadcast_dimensions dimensions permutation".split(), AXES),
    **dict.fromkeys("limit_indices new_sizes shape slice_sizes start_indices".split(), SHAPE),
    **dict.fromkeys("dtype index_dtype new_dtype preferred_element_type".split(), DTYPE),
    **dict.fromkeys("alpha beta recall_target".split(), NUMBER),
    **dict.fromkeys(
        "body_nconsts cond_nconsts k num_carry num_consts permutation_size".split(), integer(0)
    ),
    **dict.fromkeys("batch_group_count feature_group_count num_keys".split(), integer(1)),
    **dict.fromkeys(
        "base_dilation fft_lengths lhs_dilation rhs_dilation strides".split(), integers(1)
    ),
    **dict.fromkeys("window_dilation window_dimensions window_strides".split(), integers(1)),
    **dict.fromkeys("body_jaxpr cond_jaxpr jaxpr".split(), COMPUTATION),
    **dict.fromkeys("jaxpr:combining update_jaxpr".split(), COMBINING),
    **dict.fromkeys(
        """
        aggregate_to_topk compute_left_eigenvectors compute_right_eigenvectors compute_schur_vectors compute_uv
        conjugate_a full_matrices indices_are_sorted is_max_k is_stable left left_side log_space lower perturb_singular
        pivoting reverse sort_eig_vals sort_eigenvalues transpose transpose_a unique_indices unit_diagonal
        """.split(),
        FLAG,
    ),
    "algorithm:numbers": member_of(lax.RandomAlgorithm),
    "algorithm:svd": member_of(linalg.SvdAlgorithm, leaving_out=frozenset({"JACOBI", "POLAR"})),
    "bit_width": AttributeKind("integer", _bit_width, _bit_width),
    "branches": COMPUTATIONS,
    "dimension_numbers:conv": groups(3, lax.ConvDimensionNumbers),
    "dimension_numbers:dot": groups(4, _dot_dimensions, lambda d: [*d[0], *d[1]]),
    "dimension_numbers:gather": groups(
        5,
        lax.GatherDimensionNumbers,
        lambda d: [tuple(getattr(d, name)) for name in _GATHER_DIMENSIONS],
    ),
    "dimension_numbers:scatter": groups(
        5,
        lax.ScatterDimensionNumbers,
        lambda d: [tuple(getattr(d, name)) for name in _SCATTER_DIMENSIONS],
    ),
    # The bits of a double are the most.
    "exponent_bits": integer(1, 11),
    "fft_type": member_of(lax.FftType),
    "fill_value": FILL,
    "impl": one_of(GENERATORS, lambda value: str(value.name)),
    "length": integer(0, LARGEST_DIMENSION),
    "mantissa_bits": integer(0, 52),
    "mode": member_of(lax.GatherScatterMode, leaving_out=frozenset({"ONE_HOT"})),
    "padding": rows(2),
    "padding_config": rows(3),
    "precision": one_of(PRECISIONS, _precision_name),
    "ragged_dot_dimension_numbers": groups(6, _ragged_dimensions, _ragged_rows),
    "reduction_input_size_override": integer(-1),
    "reps": integers(0),
    "rounding_method": member_of(lax.RoundingMethod),
    "select_prim": one_of({"ge": primitives.ge_p, "le": primitives.le_p}, lambda p: str(p.name)),
    "sizes": integers(0, count=PARTS),
    "unroll": integer(1, LARGEST),
    "y": integer(-1024, 1024),
}
"""Kinds by the name of the attribute; behind a colon is the use of a name that has several kinds."""

_MAKES: dict[str, Make] = {
    "add_any": lax.add,
    "and": lax.bitwise_and,
    "approx_top_k": _approx_top_k,
    "argmax": functools.partial(_along_one, lax.argmax),
    "argmin": functools.partial(_along_one, lax.argmin),
    # The primitive takes the matrix as it is.
    "cholesky": functools.partial(linalg.cholesky, symmetrize_input=False),
    "concatenate": lambda *operands, dimension: lax.concatenate(operands, dimension),
    "cond": _make_cond,
    "div": functools.partial(_divide_safely, lax.div),
    # JAX has added the size to negative indices before the primitive.
    "dynamic_slice": lambda x, *at, slice_sizes: lax.dynamic_slice(
        x, at, slice_sizes, allow_negative_indices=False
    ),
    "dynamic_update_slice": lambda x, new, *at: lax.dynamic_update_slice(
        x, new, at, allow_negative_indices=False
    ),
    "eigh": functools.partial(linalg.eigh, symmetrize_input=False),
    "empty": lambda shape, dtype: lax.convert_element_type(lax.full(shape, False), dtype),
    "iota": lax.broadcasted_iota,
    "not": lax.bitwise_not,
    "optimization_barrier": lambda *operands: lax.optimization_barrier(operands),
    "or": lax.bitwise_or,
    "random_unwrap": jax.random.key_data,
    "random_wrap": lambda data, impl: jax.random.wrap_key_data(data, impl=impl.name),
    "reduce": _make_reduce,
    "reduce_window": _reduce_window,
    "regularized_incomplete_beta": lax.betainc,
    "rem": functools.partial(_divide_safely, lax.rem),
    "rng_uniform": _rng_uniform,
    "scaled_dot": lambda a, b, left, right, **attributes: lax.scaled_dot(
        a, b, lhs_scale=left, rhs_scale=right, **attributes
    ),
    "scan": _make_scan,
    "scatter": _scatter_apply,
    "sort": lambda *operands, **attributes: lax.sort(operands, **attributes),
    "stack": lambda *operands, axis: jnp.stack(operands, axis),
    "svd": _make_svd,
    "tile": jnp.tile,
    "unstack": lambda x, axis: jnp.unstack(x, axis=axis),
    "while": _make_while,
    "xor": lax.bitwise_xor,
}
"""Functions of operations that no function of jax.lax makes of operands and attributes as they are."""
# Older versions of JAX have no such function.
if (polynomial := getattr(lax, "polynomial", None)) is not None:
    _MAKES["polynomial"] = functools.partial(lambda make, x, *factors: make(x, factors), polynomial)

_ROWS = """
    conj -input_dtype
    polynomial -unroll

    reduce_and,reduce_max,reduce_min,reduce_or,reduce_prod,reduce_sum,reduce_xor axes
    cumlogsumexp,cummax,cummin,cumprod,cumsum axis reverse
    reduce_window_max,reduce_window_min,reduce_window_sum WINDOW
    argmax,argmin axes index_dtype
    reduce jaxpr:combining dimensions -computation -consts
    reduce_window WINDOW jaxpr:combining -consts
    select_and_scatter_add select_prim window_dimensions window_strides padding
    select_and_gather_add select_prim WINDOW
    sort dimension is_stable num_keys
    top_k k axis -is_stable
    approx_top_k k reduction_dimension recall_target is_max_k reduction_input_size_override aggregate_to_topk

    broadcast_in_dim shape broadcast_dimensions
    reshape new_sizes dimensions?
    squeeze,rev dimensions
    transpose permutation
    concatenate dimension
    stack,unstack axis
    split sizes axis
    tile reps
    pad padding_config
    slice start_indices limit_indices strides?
    dynamic_slice slice_sizes
    dynamic_update_slice
    gather dimension_numbers:gather slice_sizes unique_indices indices_are_sorted mode? fill_value?
    scatter SCATTER update_jaxpr? -update_consts
    scatter-add,scatter-max,scatter-min,scatter-mul,scatter-sub SCATTER -update_jaxpr -update_consts
    iota dtype shape dimension
    empty shape dtype
    convert_element_type new_dtype -weak_type
    bitcast_convert_type new_dtype
    reduce_precision exponent_bits mantissa_bits
    round rounding_method
    integer_pow y

    dot_general dimension_numbers:dot precision? preferred_element_type?
    conv_general_dilated window_strides padding lhs_dilation rhs_dilation dimension_numbers:conv CONV
    ragged_dot_general ragged_dot_dimension_numbers precision? preferred_element_type?
    scaled_dot dimension_numbers:dot preferred_element_type?
    fft fft_type fft_lengths

    cholesky,cholesky_update,hessenberg,householder_product,lu
    eig compute_left_eigenvectors compute_right_eigenvectors -enable_eigvec_derivs
    eigh lower sort_eigenvalues
    lu_pivots_to_permutation permutation_size
    qr pivoting full_matrices
    schur compute_schur_vectors sort_eig_vals
    svd full_matrices compute_uv algorithm:svd?
    symmetric_product alpha beta
    triangular_solve left_side lower transpose_a conjugate_a unit_diagonal
    ormqr left transpose
    tridiagonal lower
    tridiagonal_solve perturb_singular

    random_seed,random_wrap impl
    random_unwrap,random_fold_in,threefry2x32
    random_bits bit_width shape
    random_split,rng_uniform shape
    random_gamma log_space
    rng_bit_generator shape dtype algorithm:numbers

    cond branches
    while cond_nconsts body_nconsts cond_jaxpr body_jaxpr
    scan jaxpr length reverse unroll num_consts num_carry -linear -_split_transpose -ft_in -ft_out
"""
"""Operations besides the elementwise ones, with their attributes in the order in which they are sent: ``?`` stands
behind an attribute that may be None, ``-`` before a parameter that is not sent, because the others
imply it."""
_SEVERAL = {
    "CONV": "feature_group_count batch_group_count precision? preferred_element_type?",
    "SCATTER": "dimension_numbers:scatter indices_are_sorted unique_indices mode?",
    "WINDOW": "window_dimensions window_strides padding base_dilation window_dilation",
}
"""Attributes that rows share, or that do not fit in a line."""

_COSTS = {
    2: """
        atan atan2 cos cosh cumprod cumsum erfc expm1 logistic pow random_bits random_fold_in random_split
        rem rsqrt sin sinh tan tanh threefry2x32
    """,
    4: "erf_inv log sqrt",
    8: """
        approx_top_k atanh bessel_i0e bessel_i1e cholesky cumlogsumexp digamma eig eigh hessenberg
        householder_product lgamma lu nextafter ormqr polynomial qr ragged_dot_general scaled_dot schur svd
        triangular_solve tridiagonal tridiagonal_solve
    """,
    16: "acos acosh asin asinh log1p",
    64: """
        cholesky_update igamma igammac igamma_grad_a lu_pivots_to_permutation random_gamma
        regularized_incomplete_beta
    """,
    256: "polygamma zeta",
}
"""Operations that are many to XLA, by what they cost of the dtype that costs most: docs/threat_model.md says which
are measured or guessed."""
_COST = {name: cost for cost, names in _COSTS.items() for name in names.split()}
assert len(_COST) == len(" ".join(_COSTS.values()).split()), "an operation has two costs"


def _make_of(name: str) -> Make | None:
    """Returns the function of an operation: ours, one of jax.lax, or the primitive itself; None if JAX has none."""
    public = name.replace("-", "_")
    primitive = getattr(primitives, f"{public}_p", None)
    # A function of jax.lax checks its operands, so the primitive itself comes last.
    found: Make | None = (
        _MAKES.get(name) or getattr(lax, public, None) or getattr(linalg, public, None)
    )
    return found or getattr(primitive, "bind", None)


def _make_rows() -> Iterator[tuple[str, TableRow]]:
    for line in filter(None, map(str.split, [*_ELEMENTWISE, *_ROWS.split("\n")])):
        words = [word for first in line[1:] for word in _SEVERAL.get(first, first).split()]
        attributes = {}
        for word in (word for word in words if word[0] != "-"):
            kind = _ATTRIBUTES[word.removesuffix("?")]
            attributes[word.removesuffix("?").split(":")[0]] = replace(
                kind, optional=word[-1] == "?"
            )
        implied = frozenset(word[1:] for word in words if word[0] == "-")
        for name in line[0].split(","):
            # An older JAX lacks some operations.
            if make := _make_of(name):
                yield name, TableRow(make, attributes, implied, _COST.get(name, 1))


TABLE: Mapping[str, TableRow] = dict(_make_rows())
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


def _expand_params(params: Mapping[str, Value]) -> Mapping[str, Value]:
    """Expands an operation that JAX 0.12 keeps whole until JAX lowers the operation (searchsorted)."""
    whole = params["_prim"]

    def call(*operands: Value) -> Value:
        return jax.tree.leaves(whole.expand(*jax.tree.unflatten(whole.in_tree, operands)))

    # JAX would narrow operands of 64 bits outside of its 64-bit mode.
    with jax.enable_x64(True):
        return {"jaxpr": jax.make_jaxpr(call)(*whole.in_avals_flat)}


RENAMED: Mapping[str, Callable[[Mapping[str, Value]], Mapping[str, Value]]] = {
    "call_hi_primitive": _expand_params,
    # JAX 0.12 has another name for the parameter.
    "composite": lambda params: {"jaxpr": params.get("call_jaxpr"), **params},
    "scan": _scan_counts,
}
"""Operations whose parameters a newer JAX has renamed: makes the parameters of the table of those of the primitive."""

IDENTITIES = frozenset({"copy", "device_put", "name", "random_clone", "stop_gradient"})
"""Primitives that give their operands as they are."""

assert TABLE.keys().isdisjoint({*INLINED, *IDENTITIES}), "an operation is written in two ways"
assert RENAMED.keys() <= TABLE.keys() | INLINED.keys()
assert _MAKES.keys() <= TABLE.keys(), "a function belongs to no row"
