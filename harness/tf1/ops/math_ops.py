"""Arithmetic: element-wise functions, comparisons, reductions and matrix products, by TensorFlow's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.names.table import TABLE
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.indices import check_known, inside, literal
from harness.tf1.ops.lift import (
    Array,
    Arrays,
    Function,
    Public,
    Static,
    Type,
    either,
    named,
    op,
    operand,
)

public = Public("tf", "Arithmetic")


def _div(x: Array, y: Array) -> Array:
    """Divides by Python 2's rules: integers stay integers, rounded down."""
    both_whole = all(jnp.issubdtype(jnp.result_type(v), np.integer) for v in (x, y))
    return jnp.floor_divide(x, y) if both_whole else jnp.true_divide(x, y)


def _floordiv(x: Array, y: Array) -> Array:
    """Computes the quotient rounded down; of an infinite number it is infinite."""
    # jax.numpy gives NaN for the quotient of an infinite number.
    whole = jnp.issubdtype(jnp.result_type(x, y), np.integer)
    return jnp.floor_divide(x, y) if whole else jnp.floor(jnp.true_divide(x, y))


def _truncatediv(x: Array, y: Array) -> Array:
    """Divides, and rounds towards zero."""
    kind = jnp.result_type(x, y)
    # jax.numpy divides integers downwards; lax.div cuts off, as TensorFlow's truncatediv does.
    if jnp.issubdtype(kind, np.integer):
        return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x, kind), jnp.asarray(y, kind)))
    return jnp.trunc(jnp.true_divide(x, y)).astype(kind)


def _abs(x: Array) -> Array:
    """Computes the absolute value; the derivative at 0 is 0."""
    # JAX's derivative of abs at 0 is 1, TensorFlow's is 0.
    return jnp.where(jnp.equal(x, 0), jnp.zeros_like(jnp.abs(x)), jnp.abs(x))


def _is_nan(x: Array) -> Array | bool:
    return jnp.isnan(x) if jnp.issubdtype(jnp.result_type(x), np.inexact) else False


def maximum(x: Array, y: Array) -> Array:
    """Returns the larger value; of two equal values ``x``, to which the whole derivative goes."""
    # jax.numpy.maximum shares the derivative of two equal values out, half to each.
    return jnp.where(jnp.greater_equal(x, y) | _is_nan(x), x, y)


def minimum(x: Array, y: Array) -> Array:
    """Returns the smaller value; of two equal values ``x``, to which the whole derivative goes."""
    return jnp.where(jnp.less_equal(x, y) | _is_nan(x), x, y)


def _squared_difference(x: Array, y: Array) -> Array:
    """Computes (x - y) squared; of complex numbers their distance squared."""
    apart = jnp.subtract(x, y)
    return apart * jnp.conj(apart)


def _scaled(scalar: Array, x: Array) -> Array:
    """Computes ``jax.numpy.multiply`` by a scalar."""
    # Multiplication would broadcast, where TensorFlow takes a scalar alone.
    if jnp.ndim(scalar):
        raise ValueError(f"only a scalar multiplies here, not one of shape {jnp.shape(scalar)}")
    return jnp.multiply(scalar, x)


_NUMBER = "int float complex"
_ANY = f"{_NUMBER} bool"

_UNARY: dict[str, tuple[str, Function, str]] = {
    "abs": ("Abs", _abs, _NUMBER),
    "acos": ("Acos", jnp.arccos, "float complex"),
    "asin": ("Asin", jnp.arcsin, "float complex"),
    "atan": ("Atan", jnp.arctan, "float complex"),
    "ceil": ("Ceil", jnp.ceil, "float"),
    "conj": ("Conj", jnp.conj, _NUMBER),
    "cos": ("Cos", jnp.cos, "float complex"),
    "cosh": ("Cosh", jnp.cosh, "float complex"),
    "digamma": ("Digamma", special.digamma, "float"),
    "erf": ("Erf", special.erf, "float"),
    "erfc": ("Erfc", special.erfc, "float"),
    "exp": ("Exp", jnp.exp, "float complex"),
    "expm1": ("Expm1", jnp.expm1, "float complex"),
    "floor": ("Floor", jnp.floor, "float"),
    "is_finite": ("IsFinite", jnp.isfinite, "float"),
    "is_inf": ("IsInf", jnp.isinf, "float"),
    "is_nan": ("IsNan", jnp.isnan, "float"),
    "lgamma": ("Lgamma", special.gammaln, "float"),
    "log": ("Log", jnp.log, "float complex"),
    "log1p": ("Log1p", jnp.log1p, "float complex"),
    "logical_not": ("LogicalNot", jnp.logical_not, "bool"),
    "negative": ("Neg", jnp.negative, _NUMBER),
    "reciprocal": ("Reciprocal", jnp.reciprocal, "float complex"),
    "rint": ("Rint", jnp.rint, "float"),
    "round": ("Round", jnp.round, "int float"),
    "rsqrt": ("Rsqrt", jax.lax.rsqrt, "float complex"),
    "sigmoid": ("Sigmoid", jax.nn.sigmoid, "float complex"),
    "sign": ("Sign", jnp.sign, _NUMBER),
    "sin": ("Sin", jnp.sin, "float complex"),
    "sinh": ("Sinh", jnp.sinh, "float complex"),
    "sqrt": ("Sqrt", jnp.sqrt, "float complex"),
    "square": ("Square", jnp.square, _NUMBER),
    "tan": ("Tan", jnp.tan, "float complex"),
    "tanh": ("Tanh", jnp.tanh, "float complex"),
}
_BINARY: dict[str, tuple[str, Function, str]] = {
    "add": ("Add", jnp.add, _NUMBER),
    "atan2": ("Atan2", jnp.arctan2, "float"),
    "div": ("div", _div, _NUMBER),
    "divide": ("truediv", jnp.true_divide, _NUMBER),
    "equal": ("Equal", jnp.equal, _ANY),
    "floordiv": ("floordiv", _floordiv, "int float"),
    "floormod": ("FloorMod", jnp.mod, "int float"),
    "greater": ("Greater", jnp.greater, "int float"),
    "greater_equal": ("GreaterEqual", jnp.greater_equal, "int float"),
    "less": ("Less", jnp.less, "int float"),
    "less_equal": ("LessEqual", jnp.less_equal, "int float"),
    "logical_and": ("LogicalAnd", jnp.logical_and, "bool"),
    "logical_or": ("LogicalOr", jnp.logical_or, "bool"),
    "logical_xor": ("LogicalXor", jnp.logical_xor, "bool"),
    "maximum": ("Maximum", maximum, "int float"),
    "minimum": ("Minimum", minimum, "int float"),
    "mod": ("FloorMod", jnp.mod, "int float"),
    "multiply": ("Mul", jnp.multiply, _NUMBER),
    "not_equal": ("NotEqual", jnp.not_equal, _ANY),
    "pow": ("Pow", jnp.power, _NUMBER),
    "squared_difference": ("SquaredDifference", _squared_difference, _NUMBER),
    "subtract": ("Sub", jnp.subtract, _NUMBER),
    "truediv": ("truediv", jnp.true_divide, _NUMBER),
    "truncatediv": ("TruncateDiv", _truncatediv, "int float"),
    "truncatemod": ("TruncateMod", jnp.fmod, "int float"),
}

public.rows(_UNARY, "x")
public.rows(_BINARY, "x, y")
public.rows({"imag": ("Imag", jnp.imag, _NUMBER), "real": ("Real", jnp.real, _NUMBER)}, "input")
public.rows({"bitcast": ("Bitcast", jax.lax.bitcast_convert_type, "")}, "input, type: Type")
public.rows({"tensordot": ("Tensordot", jnp.tensordot, "")}, "a, b, axes: Static")
public.rows({"scalar_mul": ("Mul", _scaled, _NUMBER)}, "scalar, x")


# -- reductions ------------------------------------------------------------------------------------


Axes = int | tuple[int, ...] | None


def as_axes(axis: Static) -> Axes:
    """Converts axes to JAX's form: a list becomes a tuple."""
    return tuple(axis) if isinstance(axis, list | tuple) else axis


def _mean(x: Array, axis: Axes, keepdims: bool) -> Array:
    """Computes the mean; of integers an integer, rounded towards zero, as in TensorFlow."""
    kind = jnp.result_type(x)
    if not jnp.issubdtype(kind, np.integer):
        return jnp.mean(x, axis, keepdims=keepdims)
    # The sum of many numbers may not fit their type, where the mean does.
    with jax.enable_x64(True):
        total = jnp.sum(jnp.asarray(x).astype(np.int64), axis, keepdims=keepdims)
        count = jnp.full(total.shape, jnp.size(x) // max(total.size, 1), np.int64)
        return jax.lax.div(total, count).astype(kind)


def _same_type(fn: Function) -> Function:
    def reduce(x: Array, axis: Axes, keepdims: bool) -> Array:
        found: Array = fn(x, axis, keepdims=keepdims)
        # jax.numpy adds small integers as int32, and TensorFlow as what they are.
        return found.astype(jnp.result_type(x))

    return named(reduce, fn.__name__, f"``jax.numpy.{fn.__name__}``; the dtype stays.")


def _extreme(fn: Function, low: bool) -> Function:
    """Returns a reduction to the smallest or the largest element."""

    def reduce(x: Array, axis: Axes, keepdims: bool) -> Array:
        # TensorFlow's maximum of no element is the least number, where JAX raises.
        more = {"initial": _limits(jnp.result_type(x), True)[low]} if jnp.size(x) == 0 else {}
        found: Array = fn(x, axis, keepdims=keepdims, **more)
        return found

    doc = f"``jax.numpy.{fn.__name__}``; of nothing the furthest number the other way."
    return named(reduce, fn.__name__, doc)


def _logsumexp(x: Array, axis: Axes, keepdims: bool) -> Array:
    """Calls ``jax.scipy.special.logsumexp``."""
    return special.logsumexp(x, axis, keepdims=keepdims)


_REDUCTIONS: dict[str, tuple[str, Function, str]] = {
    "reduce_all": ("All", _same_type(jnp.all), "bool"),
    "reduce_any": ("Any", _same_type(jnp.any), "bool"),
    "reduce_logsumexp": ("ReduceLogSumExp", _logsumexp, "float"),
    "reduce_max": ("Max", _extreme(jnp.max, low=False), "int float"),
    "reduce_mean": ("Mean", _mean, _NUMBER),
    "reduce_min": ("Min", _extreme(jnp.min, low=True), "int float"),
    "reduce_prod": ("Prod", _same_type(jnp.prod), _NUMBER),
    "reduce_sum": ("Sum", _same_type(jnp.sum), _NUMBER),
}


def _add_reduction(shown: str, kind: str, fn: Function, takes: str) -> None:
    def reduce(
        input_tensor: Array,
        axis: Static = None,
        keep_dims: bool | None = None,
        name: str | None = None,
        reduction_indices: Static = None,
        keepdims: bool | None = None,
    ) -> Any:
        # Programs give the arguments by the names of either release.
        over = either(axis=axis, reduction_indices=reduction_indices)
        return fn(input_tensor, as_axes(over), bool(either(keepdims=keepdims, keep_dims=keep_dims)))

    doc = f"{fn.__doc__} ``axis`` (``reduction_indices`` in older releases): all axes by default."
    public.op(kind, shown, takes=takes)(named(reduce, shown, doc))


for _shown, _row in _REDUCTIONS.items():
    _add_reduction(_shown, *_row)


@public.op("count_nonzero", takes=_ANY)
def count_nonzero(
    input_tensor: Array,
    axis: Static = None,
    keep_dims: bool | None = None,
    dtype: Type = np.int64,
    name: str | None = None,
    reduction_indices: Static = None,
    keepdims: bool | None = None,
) -> Array:
    """Counts the elements that are not zero, int64 by default."""
    over = as_axes(either(axis=axis, reduction_indices=reduction_indices))
    kept = bool(either(keepdims=keepdims, keep_dims=keep_dims))
    return jnp.sum(jnp.asarray(input_tensor) != 0, over, dtype, keepdims=kept)


def _add_place_of(kind: str, *names: str, low: bool) -> None:
    """Adds ``argmax`` or ``argmin``."""
    fn = jnp.argmin if low else jnp.argmax

    def place(
        input: Array,
        axis: Static = None,
        name: str | None = None,
        dimension: Static = None,
        output_type: Type = np.int64,
    ) -> Array:
        over = either(axis=axis, dimension=dimension)
        # Every comparison with NaN is false in TensorFlow's kernels, so NaN is never the place.
        if jnp.issubdtype(jnp.result_type(input), np.floating):
            input = jnp.where(jnp.isnan(input), jnp.inf if low else -jnp.inf, input)
        return fn(input, over or 0).astype(output_type)

    doc = f"``jax.numpy.{fn.__name__}`` that passes over NaN, over axis 0 by default; int64 by default."
    public.op(kind, *names, takes="int float bool")(named(place, names[0], doc))


_add_place_of("ArgMax", "argmax", "arg_max", low=False)
_add_place_of("ArgMin", "argmin", "arg_min", low=True)


def _cumulate(kind: str, fn: Function, neutral: int, doc: str) -> None:
    """Adds ``cumsum`` or ``cumprod``; ``neutral`` is the sum or the product of nothing."""

    def cumulate(
        x: Array,
        axis: Static = 0,
        exclusive: bool = False,
        reverse: bool = False,
        name: str | None = None,
    ) -> Array:
        x = jnp.flip(x, axis) if reverse else jnp.asarray(x)
        if exclusive and x.shape[axis]:
            first = jnp.full_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis), neutral)
            rest = jax.lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis)
            x = jnp.concatenate([first, rest], axis)
        x = fn(x, axis)
        return jnp.flip(x, axis) if reverse else x

    public.op(kind, fn.__name__, takes=_NUMBER)(named(cumulate, fn.__name__, doc))


_cumulate(
    "Cumsum",
    jnp.cumsum,
    0,
    "Calls ``jax.numpy.cumsum``; ``exclusive`` leaves each element's own value out, ``reverse`` goes from the end.",
)
_cumulate(
    "Cumprod", jnp.cumprod, 1, "Calls ``jax.numpy.cumprod``, with the arguments of ``cumsum``."
)


# -- types -----------------------------------------------------------------------------------------


@op("Cast")
def _cast_op(x: Array, dtype: Type) -> Array:
    to_real = not jnp.issubdtype(dtype, np.complexfloating) and dtype != np.bool_
    # JAX warns where a cast drops the imaginary part, which TensorFlow drops silently.
    real = to_real and jnp.issubdtype(jnp.result_type(x), np.complexfloating)
    return (jnp.real(x) if real else jnp.asarray(x)).astype(dtype)


@public.add("cast")
def _cast(x: rt.TensorLike, dtype: DTypeLike, name: str | None = None) -> rt.Tensor:
    """Converts ``x`` to ``dtype``, fractions cut off; returns ``x`` where the dtypes are equal."""
    value = operand(x)
    # TensorFlow adds no operation for a cast to the dtype that the tensor has.
    if isinstance(value, rt.Tensor | rt.Variable) and value.dtype == as_dtype(dtype).dtype:
        return rt.as_tensor(value)
    return _cast_op(value, dtype, name)


@public.op("saturate_cast", "saturate_cast")
def _saturate_cast(value: Array, dtype: Type) -> Array:
    """Converts ``value`` to ``dtype``, limited to the range of ``dtype``."""
    # The tighter limits of both dtypes: an int8 cannot be clipped to 300.
    own = jnp.result_type(value)
    (low, high), (least, most) = _limits(own), _limits(dtype)
    limits = max(low, least), min(high, most)
    if jnp.issubdtype(own, np.floating):
        limits = tuple(_towards_zero(limit, own) for limit in limits)
    return jnp.clip(value, *limits).astype(dtype)


def _limits(dtype: DTypeLike, infinite: bool = False) -> tuple[Any, ...]:
    """Returns the smallest and the largest value: of all finite ones, or of all."""
    if jnp.issubdtype(dtype, np.integer):
        whole: Any = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        return int(whole.min), int(whole.max)
    finite: Any = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    return (-np.inf, np.inf) if infinite else (float(finite.min), float(finite.max))


def _towards_zero(limit: Any, dtype: Any) -> Any:
    """Converts ``limit`` to a floating point dtype; between two of its numbers, to the one nearer to zero."""
    rounded = np.asarray(limit, dtype)
    return (
        np.nextafter(rounded, np.zeros((), dtype)) if abs(float(rounded)) > abs(limit) else rounded
    )


def _add_caster(shown: str, label: str, dtype: str) -> None:
    def cast(x: rt.TensorLike, name: str | None = None) -> rt.Tensor:
        return _cast(x, dtype, name or label)

    public.define(shown, cast, f"``tf.cast(x, tf.{dtype})``.")


_add_caster("to_bfloat16", "ToBFloat16", "bfloat16")
_add_caster("to_double", "ToDouble", "float64")
_add_caster("to_float", "ToFloat", "float32")
_add_caster("to_int32", "ToInt32", "int32")
_add_caster("to_int64", "ToInt64", "int64")


# -- matrices --------------------------------------------------------------------------------------


@public.op("MatMul", "matmul", takes=_NUMBER)
def _matmul(
    a: Array,
    b: Array,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
) -> Array:
    """Calls ``jax.numpy.matmul``, of the last two axes; the ``is_sparse`` hints change nothing."""
    # jax.numpy multiplies vectors too, which TensorFlow refuses.
    if min(jnp.ndim(a), jnp.ndim(b)) < 2:
        raise ValueError(f"matrices have at least two axes: {jnp.shape(a)} by {jnp.shape(b)}")
    return jnp.matmul(_turned(a, transpose_a, adjoint_a), _turned(b, transpose_b, adjoint_b))


def _turned(matrix: Array, transpose: bool, adjoint: bool) -> Array:
    matrix = jnp.asarray(matrix)
    if transpose and adjoint:
        raise ValueError("only one of transpose and adjoint can be set")
    turned = jnp.swapaxes(matrix, -1, -2) if transpose or adjoint else matrix
    return jnp.conj(turned) if adjoint else turned


@public.op("BatchMatMul", "batch_matmul")
def _batch_matmul(x: Array, y: Array, adj_x: bool = False, adj_y: bool = False) -> Array:
    """Calls ``jax.numpy.matmul`` of the last two axes."""
    return jnp.matmul(_turned(x, False, adj_x), _turned(y, False, adj_y))


@public.add("einsum")
def _einsum(equation: str, *inputs: rt.TensorLike, name: str | None = None) -> rt.Tensor:
    """Calls ``jax.numpy.einsum``."""
    return _einsum_op(list(inputs), equation, name)


@op("einsum")
def _einsum_op(inputs: Arrays, equation: object) -> Array:
    return jnp.einsum(equation, *inputs)


@public.op("AddN", "accumulate_n", "add_n", takes=_NUMBER)
def _add_n(inputs: Arrays) -> Array:
    """Adds a list of tensors of one shape."""
    # The sum would broadcast, which TensorFlow's AddN does not.
    if len({jnp.shape(i) for i in inputs}) != 1:
        raise ValueError(f"these are not of one shape: {[jnp.shape(i) for i in inputs]}")
    return sum(inputs[1:], start=jnp.asarray(inputs[0]))


@public.add()
def confusion_matrix(
    labels: rt.TensorLike,
    predictions: rt.TensorLike,
    num_classes: int | None = None,
    dtype: DTypeLike = np.int32,
    name: str | None = None,
    weights: rt.TensorLike | None = None,
) -> rt.Tensor:
    """Counts how often each class, a row, was taken for each class, a column; a step fails where one is no class."""
    if num_classes is None:
        known = [literal(labels), literal(predictions)]
        if any(each is None for each in known):
            raise ValueError(
                "confusion_matrix: give num_classes, on which the shape of the result depends"
            )
        num_classes = max(int(each.max(initial=-1)) for each in known if each is not None) + 1
    tf, checks = TABLE["tf"], []
    for what, values in (("labels", labels), ("predictions", predictions)):
        within = tf["logical_and"](tf["greater_equal"](values, 0), tf["less"](values, num_classes))
        told = f"{what} are classes in [0, {num_classes}): "
        checks.append(rt.check(within, told, [operand(values)]))
    counted = 1 if weights is None else weights
    with rt.control_dependencies(checks):
        return _confusion(labels, predictions, counted, num_classes, dtype, name)


@op("confusion_matrix")
def _confusion(
    labels: Array, predictions: Array, weights: Array, classes: object, dtype: Type
) -> Array:
    # TensorFlow drops a last dimension of 1 that only one of the two has.
    labels, predictions = jnp.asarray(labels), jnp.asarray(predictions)
    if predictions.ndim == 2 and predictions.shape[1] == 1 and labels.ndim == 1:
        predictions = predictions[:, 0]
    elif labels.ndim == 2 and labels.shape[1] == 1 and predictions.ndim == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.shape != predictions.shape:
        raise ValueError(
            f"labels and predictions are vectors of one length: {labels.shape}, {predictions.shape}"
        )
    # A scalar weight counts for every label.
    added = jnp.broadcast_to(jnp.asarray(weights, dtype), labels.shape)
    return jnp.zeros((classes, classes), dtype).at[labels, predictions].add(added)


@public.op("Cross", "cross")
def _cross(a: Array, b: Array) -> Array:
    """Calls ``jax.numpy.cross``."""
    # jax.numpy takes vectors of two elements too, which TensorFlow refuses.
    if {jnp.shape(v)[-1:] for v in (a, b)} != {(3,)}:
        raise ValueError(f"the last axis must have three elements: {jnp.shape(a)}, {jnp.shape(b)}")
    return jnp.cross(a, b)


@public.op("norm", "norm", takes="float complex")
def _norm(
    tensor: Array,
    ord: Any = "euclidean",
    axis: Static = None,
    keep_dims: bool | None = None,
    name: str | None = None,
    keepdims: bool | None = None,
) -> Array:
    """Computes the norm of vectors or of all elements: "euclidean", inf or a number; of matrices for a pair of axes."""
    x = jnp.asarray(tensor)
    over = tuple(range(x.ndim)) if axis is None else axis
    over = tuple(over) if isinstance(over, list | tuple) else (over,)
    # TensorFlow's rule: the form of ``axis``, not its length, chooses between vectors and matrices.
    pair = isinstance(axis, list | tuple)
    _check_norm(ord, over, axis, pair)
    if ord in ("euclidean", "fro", 2):
        found = jnp.sqrt(jnp.sum(x * jnp.conj(x), over, keepdims=True))
    elif pair:
        # The norm 1 of a matrix is the largest sum of a column, the norm inf that of a row.
        first, second = over if ord == 1 else over[::-1]
        found = jnp.max(jnp.sum(jnp.abs(x), first, keepdims=True), second, keepdims=True)
    elif ord == np.inf:
        found = jnp.max(jnp.abs(x), over, keepdims=True)
    else:
        found = jnp.sum(jnp.abs(x) ** ord, over, keepdims=True) ** (1.0 / ord)
    return found if keep_dims or keepdims else jnp.squeeze(found, over)


def _check_norm(ord: Any, over: tuple[int, ...], axis: Static, pair: bool) -> None:
    if pair and (len(over) != 2 or over[0] == over[1]):
        raise ValueError(
            f"'axis' must be None, an integer, or a tuple of 2 unique integers, got {axis}"
        )
    # The largest singular value (2) of a matrix needs LAPACK, which a task refuses.
    if pair and ord not in ("euclidean", "fro", 1, np.inf):
        raise ValueError(
            f"'ord' must be a supported matrix norm in ['euclidean', 'fro', 1, inf], got {ord}"
        )
    if not pair and ord != "euclidean" and (not isinstance(ord, int | float) or ord <= 0):
        raise ValueError(f"'ord' must be a supported vector norm, got {ord}")


@public.op("Complex", "complex", takes="float")
def _complex(real: Array, imag: Array) -> Array:
    """Calls ``jax.lax.complex``."""
    return jax.lax.complex(jnp.asarray(real), jnp.asarray(imag))


@public.op("Trace", "trace")
def _trace(x: Array) -> Array:
    """Calls ``jax.numpy.trace`` of the last two axes."""
    return jnp.trace(x, axis1=-2, axis2=-1)


@op("UnsortedSegmentSum")
def _segment_sum_op(data: Array, segment_ids: Array, num_segments: Static) -> Array:
    ids = inside(jnp.ravel(segment_ids), num_segments)
    # The numbers may have several axes; each number stands for the rest of the data.
    rows = jnp.reshape(data, (ids.size, *jnp.shape(data)[jnp.ndim(segment_ids) :]))
    return jax.ops.segment_sum(rows, ids, num_segments)


@public.add("unsorted_segment_sum")
def _unsorted_segment_sum(
    data: rt.TensorLike,
    segment_ids: rt.TensorLike,
    num_segments: rt.TensorLike,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``jax.ops.segment_sum``; rows with a negative number, or one too large that is computed, are left out."""
    if isinstance(num_segments, int | np.integer):
        check_known(segment_ids, int(num_segments), "unsorted_segment_sum", lowest=None)
    return _segment_sum_op(data, segment_ids, num_segments, name)


_OTHER_NAMES = {
    "complex_abs": "abs",
    "inv": "reciprocal",
    "mul": "multiply",
    "neg": "negative",
    "realdiv": "truediv",
    "sub": "subtract",
}
public.update({name: TABLE["tf"][same] for name, same in _OTHER_NAMES.items()})
