"""Arithmetic by TensorFlow's names: argument orders and results, against numpy."""

import math

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import check_all, evaluate

A = np.array([[1.5, -2.0, 0.25], [3.0, 0.5, -1.0]], np.float32)
B = np.array([[2.0, 4.0, -0.5], [1.0, -2.0, 8.0]], np.float32)
P = np.abs(A) + 0.1
I = np.array([[7, -7, 5], [1, 2, 3]], np.int32)  # noqa: E741
J = np.array([[2, 2, -3], [1, 1, 2]], np.int32)
T = np.array([True, False, True])
F = np.array([True, True, False])
vec = np.vectorize


def _cases() -> dict:
    a, b, p, i, j = (tf.constant(v) for v in (A, B, P, I, J))
    return {
        # element by element
        "abs": (tf.abs(a), np.abs(A)),
        "acos": (tf.acos(a / 4.0), np.arccos(A / 4)),
        "asin": (tf.asin(a / 4.0), np.arcsin(A / 4)),
        "atan": (tf.atan(a), np.arctan(A)),
        "ceil": (tf.ceil(a), np.ceil(A)),
        "cos": (tf.cos(a), np.cos(A)),
        "cosh": (tf.cosh(a), np.cosh(A)),
        "erf": (tf.erf(a), vec(math.erf)(A).astype(np.float32)),
        "erfc": (tf.erfc(a), vec(math.erfc)(A).astype(np.float32)),
        "exp": (tf.exp(x=a, name="by_name"), np.exp(A)),
        "expm1": (tf.expm1(a), np.expm1(A)),
        "floor": (tf.floor(a), np.floor(A)),
        "lgamma": (tf.lgamma(p), vec(math.lgamma)(P).astype(np.float32)),
        "log": (tf.log(p), np.log(P)),
        "log1p": (tf.log1p(p), np.log1p(P)),
        "neg": (tf.neg(a), -A),
        "negative": (tf.negative(a), -A),
        "inv": (tf.inv(p), 1 / P),
        "reciprocal": (tf.reciprocal(p), 1 / P),
        "rint": (tf.rint(a), np.rint(A)),
        "round": (tf.round(tf.constant([0.5, 1.5, -2.5])), np.array([0, 2, -2], np.float32)),
        "rsqrt": (tf.rsqrt(p), 1 / np.sqrt(P)),
        "sigmoid": (tf.sigmoid(a), 1 / (1 + np.exp(-A))),
        "sign": (tf.sign(i), np.sign(I)),
        "sin": (tf.sin(a), np.sin(A)),
        "sinh": (tf.sinh(a), np.sinh(A)),
        "sqrt": (tf.sqrt(p), np.sqrt(P)),
        "square": (tf.square(i), I * I),
        "tan": (tf.tan(a), np.tan(A)),
        "tanh": (tf.tanh(a), np.tanh(A)),
        "is_finite": (
            tf.is_finite(tf.constant([1.0, math.inf, math.nan])),
            np.array([True, False, False]),
        ),
        "is_inf": (
            tf.is_inf(tf.constant([1.0, math.inf, math.nan])),
            np.array([False, True, False]),
        ),
        "is_nan": (
            tf.is_nan(tf.constant([1.0, math.inf, math.nan])),
            np.array([False, False, True]),
        ),
        # two by two: the order of the arguments shows
        "add": (tf.add(a, b), A + B),
        "sub": (tf.sub(a, b), A - B),
        "subtract": (tf.subtract(x=a, y=b), A - B),
        "mul": (tf.mul(a, b), A * B),
        "multiply": (tf.multiply(a, 2), A * 2),
        "scalar_mul": (tf.scalar_mul(3.0, a), A * 3),
        "div": (tf.div(a, b), A / B),
        "div of integers": (tf.div(i, j), I // J),
        "divide": (tf.divide(a, b), A / B),
        "truediv of integers": (tf.truediv(i, j), (I / J).astype(np.float32)),
        "realdiv": (tf.realdiv(a, b), A / B),
        "floordiv": (tf.floordiv(i, j), I // J),
        "truncatediv": (tf.truncatediv(i, j), np.trunc(I / J).astype(np.int32)),
        "mod": (tf.mod(i, j), I % J),
        "floormod": (tf.floormod(i, j), I % J),
        "truncatemod": (tf.truncatemod(i, j), np.fmod(I, J)),
        "pow": (tf.pow(p, b), np.power(P, B)),
        "maximum": (tf.maximum(a, b), np.maximum(A, B)),
        "minimum": (tf.minimum(a, b), np.minimum(A, B)),
        "squared_difference": (tf.squared_difference(a, b), (A - B) ** 2),
        "atan2": (tf.atan2(a, b), np.arctan2(A, B)),
        "equal": (
            tf.equal(i, [[7, 0, 5], [1, 0, 3]]),
            np.array([[True, False, True], [True, False, True]]),
        ),
        "not_equal": (tf.not_equal(i, j), I != J),
        "less": (tf.less(a, b), A < B),
        "less_equal": (tf.less_equal(a, a), A <= A),  # noqa: PLR0124
        "greater": (tf.greater(a, b), A > B),
        "greater_equal": (tf.greater_equal(b, a), B >= A),
        "logical_and": (tf.logical_and(T, F), T & F),
        "logical_or": (tf.logical_or(T, F), T | F),
        "logical_xor": (tf.logical_xor(T, F), T ^ F),
        "logical_not": (tf.logical_not(T), ~T),
        "complex": (tf.real(tf.complex(a, b)) + tf.imag(tf.complex(a, b)), A + B),
        # reductions
        "reduce_sum": (tf.reduce_sum(a), A.sum()),
        "reduce_sum axis": (tf.reduce_sum(a, 1), A.sum(1)),
        "reduce_sum old": (
            tf.reduce_sum(a, reduction_indices=[1], keep_dims=True),
            A.sum(1, keepdims=True),
        ),
        "reduce_sum both": (tf.reduce_sum(a, [0, 1], True), A.sum(keepdims=True)),
        "reduce_sum of integers": (
            tf.reduce_sum(i, axis=0, keepdims=True),
            I.sum(0, keepdims=True, dtype=np.int32),
        ),
        "reduce_sum of nothing": (tf.reduce_sum(a, []), A),
        "reduce_mean": (tf.reduce_mean(a, 0), A.mean(0)),
        "reduce_mean of integers": (tf.reduce_mean(i, 1), np.array([1, 2], np.int32)),
        "reduce_max": (tf.reduce_max(i, 1), I.max(1)),
        "reduce_min": (tf.reduce_min(a, -1), A.min(-1)),
        "reduce_prod": (tf.reduce_prod(i), np.int32(I.prod())),
        "reduce_all": (tf.reduce_all([T, F], 0), T & F),
        "reduce_any": (tf.reduce_any(tf.stack([T, F]), 1), np.array([True, True])),
        "reduce_logsumexp": (tf.reduce_logsumexp(a, 1), np.log(np.exp(A).sum(1))),
        "argmax": (tf.argmax(a, 1), A.argmax(1)),
        "argmax old": (tf.arg_max(a, dimension=1), A.argmax(1)),
        "argmax default": (tf.argmax(a), A.argmax(0)),
        "argmax int32": (tf.argmax(a, 1, output_type=tf.int32), A.argmax(1).astype(np.int32)),
        "argmin": (tf.argmin(a, axis=0), A.argmin(0)),
        "cumsum": (tf.cumsum(a, 1), A.cumsum(1)),
        "cumsum exclusive": (tf.cumsum([1, 2, 3], exclusive=True), np.array([0, 1, 3], np.int32)),
        "cumsum reverse": (tf.cumsum([1, 2, 3], 0, False, True), np.array([6, 5, 3], np.int32)),
        "cumsum both": (
            tf.cumsum([1, 2, 3], exclusive=True, reverse=True),
            np.array([5, 3, 0], np.int32),
        ),
        "cumprod": (tf.cumprod([2, 3, 4], exclusive=True), np.array([1, 2, 6], np.int32)),
        # types
        "cast": (tf.cast(a, tf.int32), A.astype(np.int32)),
        "cast wide": (tf.cast(a, tf.float64), A.astype(np.float64)),
        "cast bool": (tf.cast(tf.greater(a, 0), "float32"), (A > 0).astype(np.float32)),
        "to_int64": (tf.to_int64(a), A.astype(np.int64)),
        "to_int32": (tf.to_int32(a), A.astype(np.int32)),
        "to_double": (tf.to_double(i), I.astype(np.float64)),
        "to_float": (tf.to_float(i), I.astype(np.float32)),
        "saturate_cast": (
            tf.saturate_cast(tf.constant([300.0, -5.0]), tf.uint8),
            np.array([255, 0], np.uint8),
        ),
        "bitcast": (tf.bitcast(tf.constant(1.0), tf.int32), np.float32(1.0).view(np.int32)),
        # matrices
        "matmul": (tf.matmul(a, b, False, True), A @ B.T),
        "matmul ta": (tf.matmul(a, b, transpose_a=True), A.T @ B),
        "matmul operator": (a @ tf.transpose(b), A @ B.T),
        "batch_matmul": (tf.batch_matmul([A, B], [B, A], adj_y=True), np.stack([A @ B.T, B @ A.T])),
        "tensordot": (tf.tensordot(a, b, [[0], [0]]), np.tensordot(A, B, [[0], [0]])),
        "einsum": (tf.einsum("ij,kj->ik", a, b), A @ B.T),
        "add_n": (tf.add_n([a, b, a]), A + B + A),
        "cross": (tf.cross(a, b), np.cross(A, B)),
        "norm": (tf.norm(a), np.linalg.norm(A)),
        "norm axis": (tf.norm(a, 1, 1), np.abs(A).sum(1)),
        "trace": (tf.trace(tf.matmul(a, b, transpose_b=True)), np.trace(A @ B.T)),
        "unsorted_segment_sum": (
            tf.unsorted_segment_sum(tf.constant([1.0, 2.0, 3.0]), [1, 0, 1], 3),
            np.array([2, 4, 0], np.float32),
        ),
        # limits
        "clip_by_value": (tf.clip_by_value(a, -1, 1), np.clip(A, -1, 1)),
        "clip_by_norm": (tf.clip_by_norm(a, 1.0), A / np.linalg.norm(A)),
        "clip_by_norm small": (tf.clip_by_norm(a, 100.0), A),
        "clip_by_average_norm": (
            tf.clip_by_average_norm(a, 0.1),
            A * (0.1 / (np.linalg.norm(A) / 6)),
        ),
        "clip_by_global_norm": (
            tf.clip_by_global_norm([a, None, b], 1.0)[0][2],
            B / np.sqrt((A**2 + B**2).sum()),
        ),
        "clip_by_global_norm norm": (
            tf.clip_by_global_norm([a, b], 1.0)[1],
            np.sqrt((A**2 + B**2).sum()),
        ),
        "global_norm": (tf.global_norm([a, b]), np.sqrt((A**2 + B**2).sum())),
        # operators
        "operators": ((a + b) * 2.0 - b / 4.0, (A + B) * 2 - B / 4),
        "reflected": (1.0 - a, 1 - A),
        "index": (a[1, :2], A[1, :2]),
    }


def test_math_functions_match_numpy() -> None:
    """Every mathematical function matches NumPy."""
    with tf.Graph().as_default():
        cases = _cases()
        with tf.Session() as sess:
            check_all(cases, sess.run({name: tensor for name, (tensor, _) in cases.items()}))


def test_same_cast_adds_nothing() -> None:
    """A cast to the same dtype returns the tensor."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [2])
        assert tf.cast(x, tf.float32) is x


def test_literals_take_tensor_dtype() -> None:
    """Literals take the dtype of the tensor beside them."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [2])
        wide = tf.placeholder(tf.float64, [2])
        half = tf.placeholder(tf.float16, [2])
        assert tf.add(x, np.array([1.0, 2.0])).dtype == tf.float32
        assert tf.multiply(wide, [0.1, 0.2]).dtype == tf.float64
        assert tf.multiply(half, [0.1, 0.2]).dtype == tf.float16
        assert tf.multiply(x, np.float64(2)).dtype == tf.float32
    got = evaluate(lambda: tf.multiply(tf.constant(np.array([1.0, 2.0])), [0.1, 0.2]))
    assert got.dtype == np.float64 and got[0] == 0.1


def test_wrong_argument_names_the_function() -> None:
    """A wrong argument is refused with the function's name."""
    with (
        tf.Graph().as_default(),
        pytest.raises(TypeError, match="reduce_sum: got an unexpected keyword argument 'dim'"),
    ):
        tf.reduce_sum([1.0], dim=0)
    with (
        tf.Graph().as_default(),
        pytest.raises(TypeError, match="add: missing a required argument: 'y'"),
    ):
        tf.add(1.0)


def test_operation_names_are_tensorflows() -> None:
    """Operations have TensorFlow's names and types."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [2, 2])
        assert tf.matmul(x, x).name == "MatMul:0"
        named = tf.matmul(x, x, name="product")
        assert (named.op.name, named.op.type) == ("product", "MatMul")
        assert tf.add(x, x).name == "Add:0" and tf.reduce_mean(x).op.type == "Mean"


def test_absolute_value_by_operator_has_slope() -> None:
    """The derivative of ``abs(x)`` is that of ``tf.abs(x)``: 0 at 0."""

    def slopes() -> list[tf.Tensor]:
        x = tf.constant([-2.0, 0.0, 3.0])
        return tf.gradients(abs(x), [x]) + tf.gradients(tf.abs(x), [x])

    assert [found.tolist() for found in evaluate(slopes)] == [[-1, 0, 1]] * 2


def test_constant_derivatives_are_none() -> None:
    """There is no gradient through ``//``, and no second one through the first one of a tensor by itself."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [2])
        assert tf.gradients(x // 0.5, [x]) == [None]
        assert tf.gradients(tf.gradients(x, [x])[0], [x]) == [None]
        assert tf.gradients(tf.gradients(x * x, [x])[0], [x]) != [None]
