"""Small programs, each run both by TensorFlow and by harness.tf1: what takes more than one call."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
"""Name -> a function of the module ``tf`` that builds a graph, runs it, and gives what came out."""

ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def case(fn: Case) -> Case:
    """Adds a program under its own name."""
    CASES[fn.__name__] = fn
    return fn


def cases(**programs: Case) -> None:
    """Adds several short ones."""
    CASES.update(programs)


def run(tf: Any, fetches: Any, feeds: Any = None, steps: int = 1) -> Any:
    """Runs ``fetches`` so often in a session with initialised variables; what the last time gives."""
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for _ in range(steps - 1):
            sess.run(fetches, feeds)
        return sess.run(fetches, feeds)


def fed(tf: Any, value: Any, build: Callable[[Any], Any], dtype: Any = np.int32) -> Any:
    """``build`` of a placeholder that is fed with ``value``, so that nothing is known before the step."""
    x = tf.placeholder(dtype, np.shape(value))
    return run(tf, build(x), {x: value})


def slope(tf: Any, value: Any, build: Callable[[Any], Any]) -> Any:
    """The derivative of ``build`` (of a fed float32 tensor) at ``value``."""
    return fed(tf, value, lambda x: tf.gradients(build(x), x)[0], np.float32)


# -- control dependencies: gradients, and reads of variables -------------------------------------------------------


@case
def gradients_run_what_they_were_made_under(tf: Any) -> Any:
    w, counter = tf.Variable(3.0), tf.Variable(0, trainable=False)
    loss = tf.square(w)
    with tf.control_dependencies([tf.assign_add(counter, 1)]):
        (pair,) = tf.train.GradientDescentOptimizer(0.1).compute_gradients(loss)
        direct = tf.gradients(loss, [w])[0]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        seen = [sess.run(pair[0]), sess.run(counter), sess.run(direct), sess.run(counter)]
        sess.run(loss)
        return [*seen, sess.run(counter)]


@case
def gradients_of_a_tensor_itself_run_what_they_were_made_under(tf: Any) -> Any:
    x, counter = tf.constant(2.0), tf.Variable(0)
    with tf.control_dependencies([tf.assign_add(counter, 1)]):
        g = tf.gradients(x, x)[0]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        return [sess.run(g), sess.run(counter)]


@case
def minimize_runs_what_it_was_made_under(tf: Any) -> Any:
    w, counter = tf.Variable(3.0), tf.Variable(0, trainable=False)
    loss = tf.square(w)
    with tf.control_dependencies([tf.assign_add(counter, 1)]):
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(train)
        return sess.run([w, counter])


def _read_after(read: Callable[[Any, Any], Any]) -> Case:
    def program(tf: Any) -> Any:
        v = tf.Variable([1.0, 2.0])
        with tf.control_dependencies([tf.assign_add(v, [10.0, 10.0])]):
            after = read(tf, v)
        return run(tf, after)

    return program


cases(
    identity_after_an_update=_read_after(lambda tf, v: tf.identity(v)),
    sum_after_an_update=_read_after(lambda tf, v: v + 1.0),
    operand_after_an_update=_read_after(lambda tf, v: tf.multiply(v, 2.0)),
    slice_after_an_update=_read_after(lambda tf, v: v[0]),
    value_after_an_update=_read_after(lambda tf, v: v.value() + 0.0),
    read_value_after_an_update=_read_after(lambda tf, v: v.read_value()),
    convert_after_an_update=_read_after(lambda tf, v: tf.convert_to_tensor(v) * 1.0),
    twice_after_an_update=_read_after(lambda tf, v: [v + 1.0, v * 2.0]),
    list_after_an_update=_read_after(lambda tf, v: tf.stack([v, v])),
)


@case
def copy_after_an_update(tf: Any) -> Any:
    v, copy = tf.Variable(1.0), tf.Variable(0.0)
    with tf.control_dependencies([tf.assign_add(v, 10.0)]):
        done = tf.assign(copy, v)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(done)
        return sess.run([v, copy])


@case
def read_after_training(tf: Any) -> Any:
    v = tf.Variable(1.0)
    train = tf.train.GradientDescentOptimizer(1.0).minimize(-10.0 * v)
    with tf.control_dependencies([train]):
        after = tf.identity(v)
    return run(tf, after, steps=2)


@case
def gradient_through_a_read_after_an_update(tf: Any) -> Any:
    v = tf.Variable(3.0)
    with tf.control_dependencies([tf.assign_add(v, 1.0)]):
        loss = tf.square(v)
    return run(tf, [loss, tf.gradients(loss, v)[0]])


def _averages(optimizer: Callable[[Any], Any], counted: bool) -> Case:
    def program(tf: Any) -> Any:
        v = tf.Variable([1.0, -2.0])
        step = tf.Variable(0, trainable=False)
        train = optimizer(tf.train).minimize(
            tf.reduce_sum(tf.square(v) * [1.0, 2.0]), global_step=step
        )
        ema = tf.train.ExponentialMovingAverage(0.5, num_updates=step if counted else None)
        with tf.control_dependencies([train]):
            both = ema.apply([v])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            for _ in range(3):
                sess.run(both)
            return sess.run([v, ema.average(v), step])

    return program


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda train: train.GradientDescentOptimizer(0.1),
    "momentum": lambda train: train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda train: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda train: train.AdagradOptimizer(0.1),
    "adam": lambda train: train.AdamOptimizer(0.1),
    "rmsprop": lambda train: train.RMSPropOptimizer(0.1),
    "centered": lambda train: train.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "adadelta": lambda train: train.AdadeltaOptimizer(0.5),
}
for _name, _optimizer in OPTIMIZERS.items():
    CASES[f"average_after_{_name}"] = _averages(_optimizer, False)
CASES["average_with_num_updates"] = _averages(OPTIMIZERS["sgd"], True)


def _variable_in_two_pairs(optimizer: Callable[[Any], Any]) -> Case:
    def program(tf: Any) -> Any:
        v = tf.Variable([1.0, -1.0])
        opt = optimizer(tf.train)
        train = opt.apply_gradients([(tf.constant([1.0, 2.0]), v), (tf.constant([1.0, 2.0]), v)])
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(train)
            return sess.run(v)

    return program


for _name in ("sgd", "momentum", "adagrad", "rmsprop", "adadelta"):
    CASES[f"variable_in_two_pairs_{_name}"] = _variable_in_two_pairs(OPTIMIZERS[_name])


# -- joining and cutting -------------------------------------------------------------------------------------------


def _split_unknown(tf: Any, size: int) -> Any:
    x = tf.placeholder(np.float32, [None])
    return run(tf, tf.split(x, [2, 3]), {x: np.arange(size)})


def _index_unknown(tf: Any, index: int) -> Any:
    x = tf.placeholder(np.float32, [None, 2])
    return run(tf, x[index], {x: ROWS})


cases(
    split_by_sizes=lambda tf: run(tf, tf.split(np.arange(5), [2, 3])),
    split_by_sizes_and_rest=lambda tf: run(tf, tf.split(np.arange(10), [2, -1, 3])),
    split_by_sizes_that_are_too_few=lambda tf: run(tf, tf.split(np.arange(10), [2, 3])),
    split_by_sizes_that_are_too_many=lambda tf: run(tf, tf.split(np.arange(10), [8, 3])),
    split_with_a_rest_below_zero=lambda tf: run(tf, tf.split(np.arange(10), [8, -1, 3])),
    split_in_uneven_parts=lambda tf: run(tf, tf.split(np.arange(10), 3)),
    split_of_unknown_size=lambda tf: _split_unknown(tf, 5),
    split_of_unknown_size_by_sizes_that_are_too_few=lambda tf: _split_unknown(tf, 10),
    slice_beyond_the_end=lambda tf: run(tf, tf.slice(tf.constant(ROWS), [1, 0], [3, 2])),
    slice_to_the_end=lambda tf: run(tf, tf.slice(tf.constant(ROWS), [1, 0], [-1, 1])),
    slice_from_below_zero=lambda tf: run(tf, tf.slice(tf.constant(ROWS), [-1, 0], [1, 2])),
    index_literal=lambda tf: run(tf, tf.constant(ROWS)[-1]),
    index_literal_beyond=lambda tf: run(tf, tf.constant(ROWS)[5]),
    index_literal_below=lambda tf: run(tf, tf.constant(ROWS)[-4]),
    index_beyond_in_a_later_axis=lambda tf: run(tf, tf.constant(ROWS)[:, 2]),
    index_beyond_after_an_ellipsis=lambda tf: run(tf, tf.constant(ROWS)[..., 2]),
    index_beyond_after_a_new_axis=lambda tf: run(tf, tf.constant(ROWS)[None, 3]),
    index_of_unknown_size=lambda tf: _index_unknown(tf, -3),
    index_of_unknown_size_beyond=lambda tf: _index_unknown(tf, 3),
    index_computed=lambda tf: fed(tf, 1, lambda i: tf.constant(ROWS)[i]),
    index_computed_negative=lambda tf: fed(tf, -1, lambda i: tf.constant(ROWS)[i]),
    index_computed_beyond=lambda tf: fed(tf, 5, lambda i: tf.constant(ROWS)[i]),
    index_computed_below=lambda tf: fed(tf, -4, lambda i: tf.constant(ROWS)[i]),
    index_of_a_variable_beyond=lambda tf: run(tf, tf.Variable(ROWS)[3]),
    slice_beyond_in_python=lambda tf: run(tf, tf.constant(ROWS)[1:100]),
    gather_literal=lambda tf: run(tf, tf.gather(tf.constant(ROWS), [2, 0])),
    gather_literal_negative=lambda tf: run(tf, tf.gather(tf.constant(ROWS), [-1])),
    gather_literal_beyond=lambda tf: run(tf, tf.gather(tf.constant(ROWS), [3])),
    gather_negative=lambda tf: fed(tf, [0, -1], lambda i: tf.gather(tf.constant(ROWS), i)),
    gather_beyond=lambda tf: fed(tf, [0, 3], lambda i: tf.gather(tf.constant(ROWS), i)),
    gather_of_integers_beyond=lambda tf: fed(
        tf, [0, 3], lambda i: tf.gather(tf.constant([7, 8, 9]), i)
    ),
    gather_of_a_later_axis_negative=lambda tf: fed(
        tf, [-1], lambda i: tf.gather(tf.constant(ROWS), i, axis=1)
    ),
    gather_nd_literal=lambda tf: run(tf, tf.gather_nd(tf.constant(ROWS), [[0, 1], [2, 0]])),
    gather_nd_rows=lambda tf: run(tf, tf.gather_nd(tf.constant(ROWS), [[2], [0]])),
    gather_nd_literal_negative=lambda tf: run(tf, tf.gather_nd(tf.constant(ROWS), [[-1]])),
    gather_nd_literal_beyond=lambda tf: run(tf, tf.gather_nd(tf.constant([1.0, 2.0, 3.0]), [[5]])),
    gather_nd_negative=lambda tf: fed(
        tf, [[0, 1], [-1, 0]], lambda i: tf.gather_nd(tf.constant(ROWS), i)
    ),
    gather_nd_beyond=lambda tf: fed(
        tf, [[0, 1], [0, 2]], lambda i: tf.gather_nd(tf.constant(ROWS), i)
    ),
    scatter_nd_adds=lambda tf: run(tf, tf.scatter_nd([[1], [1], [3]], [1.0, 2.0, 4.0], [5])),
    scatter_nd_literal_negative=lambda tf: run(tf, tf.scatter_nd([[-1]], [1.0], [3])),
    scatter_nd_negative=lambda tf: fed(
        tf, [[0], [-1]], lambda i: tf.scatter_nd(i, [1.0, 2.0], [3])
    ),
    scatter_nd_beyond=lambda tf: fed(tf, [[0], [3]], lambda i: tf.scatter_nd(i, [1.0, 2.0], [3])),
    embedding_negative=lambda tf: fed(
        tf, [0, -1], lambda i: tf.nn.embedding_lookup(tf.constant(ROWS), i)
    ),
    embedding_beyond=lambda tf: fed(
        tf, [0, 3], lambda i: tf.nn.embedding_lookup(tf.constant(ROWS), i)
    ),
    embedding_literal_negative=lambda tf: run(
        tf, tf.nn.embedding_lookup(tf.constant(ROWS), [0, -1])
    ),
    embedding_of_parts=lambda tf: fed(
        tf,
        [0, 1, 2, 3],
        lambda i: tf.nn.embedding_lookup([tf.constant(ROWS), tf.constant(ROWS)], i),
    ),
    embedding_of_parts_negative=lambda tf: fed(
        tf, [0, -1], lambda i: tf.nn.embedding_lookup([tf.constant(ROWS), tf.constant(ROWS)], i)
    ),
    invert_permutation=lambda tf: run(tf, tf.invert_permutation([2, 0, 1])),
    invert_no_permutation=lambda tf: run(tf, tf.invert_permutation([2, 0, 0])),
    reverse_axis=lambda tf: run(tf, tf.reverse(tf.constant(ROWS), [-1])),
    segment_sum_unsorted=lambda tf: fed(
        tf, [0, 2, 0], lambda i: tf.unsorted_segment_sum(tf.constant(ROWS), i, 3)
    ),
    segment_sum_negative_is_dropped=lambda tf: fed(
        tf, [0, -1, 0], lambda i: tf.unsorted_segment_sum(tf.constant(ROWS), i, 3)
    ),
    segment_sum_beyond=lambda tf: fed(
        tf, [0, 3, 0], lambda i: tf.unsorted_segment_sum(tf.constant(ROWS), i, 3)
    ),
    segment_sum_literal_beyond=lambda tf: run(
        tf, tf.unsorted_segment_sum(tf.constant(ROWS), [0, 3, 0], 3)
    ),
)


def _scattered(kind: str, indices: Any, literal: bool) -> Case:
    def program(tf: Any) -> Any:
        v = tf.Variable(ROWS)
        where = tf.constant(indices) if literal else tf.placeholder(np.int32, [None])
        updates = tf.constant([[10.0, 10.0]] * len(indices))
        change = getattr(tf, f"scatter_{kind}")(v, indices if literal else where, updates)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            try:
                sess.run(change, {} if literal else {where: indices})
                return sess.run(v)
            except tf.errors.InvalidArgumentError:
                return ["InvalidArgumentError", sess.run(v)]

    return program


for _kind in ("add", "sub", "update", "mul"):
    CASES[f"scatter_{_kind}"] = _scattered(_kind, [2, 0, 2] if _kind != "update" else [2, 0], False)
    CASES[f"scatter_{_kind}_negative"] = _scattered(_kind, [0, -1], False)
    CASES[f"scatter_{_kind}_beyond"] = _scattered(_kind, [0, 3], False)
    CASES[f"scatter_{_kind}_literal_negative"] = _scattered(_kind, [-1], True)


# -- arithmetic ----------------------------------------------------------------------------------------------------

NUMERATORS, DENOMINATORS = [7, -7, 7, -7, 16777217, 0], [2, 2, -2, -2, 1, 5]


def _divided(kind: str, dtype: Any) -> Case:
    def program(tf: Any) -> Any:
        x, y = tf.placeholder(dtype, [None]), tf.placeholder(dtype, [None])
        return run(tf, getattr(tf, kind)(x, y), {x: NUMERATORS, y: DENOMINATORS})

    return program


for _kind in (
    "truncatediv",
    "truncatemod",
    "floordiv",
    "floormod",
    "div",
    "mod",
    "divide",
    "truediv",
):
    for _dtype in (np.int32, np.int64, np.float32):
        if not (_kind in ("truncatediv", "truncatemod") and _dtype == np.float32):
            CASES[f"{_kind}_{np.dtype(_dtype).name}"] = _divided(_kind, _dtype)
for _kind in ("floordiv", "floormod", "div", "mod", "truncatediv", "truncatemod"):
    CASES[f"{_kind}_by_zero"] = lambda tf, kind=_kind: fed(
        tf, [0, 1], lambda y: getattr(tf, kind)([3, 4], y)
    )


def _reduced(kind: str, dtype: Any, values: Any, axis: Any = None) -> Case:
    return lambda tf: fed(tf, values, lambda x: getattr(tf, f"reduce_{kind}")(x, axis), dtype)


for _kind in ("mean", "sum", "prod", "max", "min"):
    CASES[f"reduce_{_kind}_of_int32"] = _reduced(_kind, np.int32, [-1, -2])
    CASES[f"reduce_{_kind}_of_int64_rows"] = _reduced(
        _kind, np.int64, [[-1, -2], [3, -4], [2, 3]], 1
    )
    CASES[f"reduce_{_kind}_of_uint8"] = _reduced(_kind, np.uint8, [200, 100, 51])
    CASES[f"reduce_{_kind}_of_int8"] = _reduced(_kind, np.int8, [100, 100, 51])
    CASES[f"reduce_{_kind}_of_float16"] = _reduced(_kind, np.float16, [1.5, 2.5, 4.0])
    CASES[f"reduce_{_kind}_with_nan"] = _reduced(_kind, np.float32, [1.0, np.nan, 2.0])
cases(
    reduce_mean_that_overflows=_reduced("mean", np.int32, [2**31 - 1, 2**31 - 1, 2]),
    cumsum_of_int8=lambda tf: fed(tf, [100, 100], lambda x: tf.cumsum(x), np.int8),
    cumsum_exclusive_reverse=lambda tf: fed(
        tf, [1, 2, 3], lambda x: tf.cumsum(x, exclusive=True, reverse=True)
    ),
    cumprod_exclusive=lambda tf: fed(tf, [2, 3, 4], lambda x: tf.cumprod(x, exclusive=True)),
    argmax_tie=lambda tf: fed(tf, [1.0, 3.0, 3.0], lambda x: tf.argmax(x, 0), np.float32),
    saturate_int64=lambda tf: fed(tf, [1, -2], lambda x: tf.saturate_cast(x, tf.int64)),
    saturate_uint8=lambda tf: fed(tf, [1, -2, 300], lambda x: tf.saturate_cast(x, tf.uint8)),
    saturate_float_to_int32=lambda tf: fed(
        tf, [1.7, -2.7, 3e10, -3e10], lambda x: tf.saturate_cast(x, tf.int32), np.float32
    ),
    saturate_float_to_uint8=lambda tf: fed(
        tf, [1.7, -2.7, 300.0], lambda x: tf.saturate_cast(x, tf.uint8), np.float32
    ),
    saturate_int64_to_int32=lambda tf: fed(
        tf, [2**40, -(2**40), 5], lambda x: tf.saturate_cast(x, tf.int32), np.int64
    ),
    saturate_uint8_to_int8=lambda tf: fed(
        tf, [1, 200], lambda x: tf.saturate_cast(x, tf.int8), np.uint8
    ),
    saturate_int8_to_uint32=lambda tf: fed(
        tf, [1, -100], lambda x: tf.saturate_cast(x, tf.uint16), np.int8
    ),
    saturate_to_float=lambda tf: fed(tf, [1, -100], lambda x: tf.saturate_cast(x, tf.float32)),
    saturate_double_to_float=lambda tf: fed(
        tf, [1e300, -1.0], lambda x: tf.saturate_cast(x, tf.float32), np.float64
    ),
    cast_fraction=lambda tf: fed(tf, [1.7, -1.7], lambda x: tf.cast(x, tf.int32), np.float32),
    cast_int64_wraps=lambda tf: fed(tf, [2**32 + 5, -1], lambda x: tf.cast(x, tf.int32), np.int64),
    cast_to_bool=lambda tf: fed(tf, [0.0, 0.5, -1.0], lambda x: tf.cast(x, tf.bool), np.float32),
    round_half=lambda tf: fed(tf, [0.5, 1.5, 2.5, -0.5], lambda x: tf.round(x), np.float32),
    pow_int=lambda tf: fed(tf, [2, -3], lambda x: tf.pow(x, 3)),
    sign_of_nan=lambda tf: fed(tf, [np.nan, -0.0, 2.0], lambda x: tf.sign(x), np.float32),
    maximum_with_nan=lambda tf: fed(
        tf, [np.nan, 1.0], lambda x: [tf.maximum(x, 0.0), tf.minimum(0.0, x)], np.float32
    ),
    relu_of_nan=lambda tf: fed(
        tf, [np.nan, -1.0], lambda x: [tf.nn.relu(x), tf.nn.relu6(x)], np.float32
    ),
    norm_of_axes=lambda tf: fed(tf, [ROWS, ROWS], lambda x: tf.norm(x, axis=[1, 2]), np.float32),
    norm_of_an_axis=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, axis=1), np.float32),
    norm_of_an_axis_in_a_list=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, axis=[1]), np.float32),
    norm_of_all=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, keepdims=True), np.float32),
    norm_1_of_axes=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, 1, axis=[0, 1]), np.float32),
    norm_inf=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, np.inf, axis=(0, 1)), np.float32),
    norm_euclidean_of_three=lambda tf: fed(tf, [ROWS, ROWS], lambda x: tf.norm(x), np.float32),
    norm_fro=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, "fro", axis=[0, 1]), np.float32),
    norm_3=lambda tf: fed(tf, ROWS, lambda x: tf.norm(x, 3), np.float32),
)


# -- other values --------------------------------------------------------------------------------------------------

cases(
    one_hot=lambda tf: fed(tf, [0, 2, -1, 5], lambda i: tf.one_hot(i, 3), np.int64),
    one_hot_on_value=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, on_value=1), np.int64),
    one_hot_on_and_off=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, 5.0, -1.0), np.int64),
    one_hot_off_value=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, off_value=7), np.uint8),
    one_hot_bool=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, True, False), np.int32),
    one_hot_dtype=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, dtype=tf.int64), np.int32),
    one_hot_axis=lambda tf: fed(tf, [0, 2], lambda i: tf.one_hot(i, 3, axis=0), np.int32),
    piecewise_of_ints=lambda tf: fed(
        tf, 7, lambda s: tf.train.piecewise_constant(s, [5, 10], [1, 2, 3])
    ),
    piecewise_of_floats=lambda tf: fed(
        tf, 7, lambda s: tf.train.piecewise_constant(s, [5, 10], [1.0, 0.5, 0.25])
    ),
    piecewise_at_the_boundary=lambda tf: fed(
        tf, 5, lambda s: tf.train.piecewise_constant(s, [5, 10], [1.0, 0.5, 0.25]), np.int64
    ),
    piecewise_of_doubles=lambda tf: fed(
        tf,
        7.0,
        lambda s: tf.train.piecewise_constant(s, [5.0], [np.float64(1.0), np.float64(2.5)]),
        np.float32,
    ),
    exponential_decay_of_double=lambda tf: fed(
        tf, 0.5, lambda r: tf.train.exponential_decay(r, tf.constant(3), 2, 0.5), np.float64
    ),
    polynomial_decay_dtype=lambda tf: fed(
        tf, 3, lambda s: tf.train.polynomial_decay(0.5, s, 10, cycle=True), np.int64
    ),
    cosine_decay_dtype=lambda tf: fed(tf, 3, lambda s: tf.train.cosine_decay(0.5, s, 10), np.int64),
    inverse_time_decay_staircase=lambda tf: fed(
        tf, 7, lambda s: tf.train.inverse_time_decay(0.5, s, 5, 0.5, staircase=True), np.int64
    ),
    natural_exp_decay_staircase=lambda tf: fed(
        tf, 7, lambda s: tf.train.natural_exp_decay(0.5, s, 5, 0.5, staircase=True), np.int64
    ),
    unknown_distribution=lambda tf: run(
        tf, tf.variance_scaling_initializer(distribution="banana")([2, 2])
    ),
    scale_of_variance_scaling=lambda tf: np.round(
        np.std(run(tf, tf.variance_scaling_initializer(100.0, distribution="normal")([100, 400]))),
        1,
    ),
    scale_of_untruncated_variance_scaling=lambda tf: np.round(
        np.std(
            run(
                tf,
                tf.variance_scaling_initializer(100.0, distribution="untruncated_normal")(
                    [100, 400]
                ),
            )
        ),
        1,
    ),
    unknown_mode=lambda tf: run(tf, tf.variance_scaling_initializer(mode="banana")([2, 2])),
    scale_below_zero=lambda tf: run(tf, tf.variance_scaling_initializer(scale=-1.0)([2, 2])),
)


# -- neural networks -----------------------------------------------------------------------------------------------

LOGITS = [[1.0, 2.0, 3.0], [3.0, 1.0, 0.0]]


def _sparse(labels: Any) -> Case:
    def program(tf: Any) -> Any:
        logits, classes = tf.placeholder(np.float32, [2, 3]), tf.placeholder(np.int32, [2])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=classes, logits=logits)
        return run(tf, [loss, tf.gradients(loss, logits)[0]], {logits: LOGITS, classes: labels})

    return program


def _dense(labels: Any, version: str) -> Case:
    def program(tf: Any) -> Any:
        logits, wanted = tf.placeholder(np.float32, [2, 3]), tf.placeholder(np.float32, [2, 3])
        loss = getattr(tf.nn, f"softmax_cross_entropy_with_logits{version}")(
            labels=wanted, logits=logits
        )
        # TensorFlow has none for the labels in the first version
        by = [logits, wanted] if version else [logits]
        return run(
            tf,
            [loss, *tf.gradients(tf.reduce_sum(loss * [1.0, 2.0]), by)],
            {logits: LOGITS, wanted: labels},
        )

    return program


def _in_top(predictions: Any, targets: Any, k: int) -> Case:
    def program(tf: Any) -> Any:
        p, t = tf.placeholder(np.float32, [None, 3]), tf.placeholder(np.int32, [None])
        return run(tf, tf.nn.in_top_k(p, t, k), {p: predictions, t: targets})

    return program


NOT_FINITE = [
    [np.nan, 1.0, 2.0],
    [1.0, np.nan, 0.0],
    [np.inf, 1.0, 2.0],
    [-np.inf, 1.0, 2.0],
    [np.nan] * 3,
]
cases(
    sparse_xent=_sparse([2, 0]),
    sparse_xent_negative=_sparse([2, -1]),
    sparse_xent_beyond=_sparse([3, 0]),
    softmax_xent=_dense([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], ""),
    softmax_xent_of_labels_that_are_no_distribution=_dense([[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]], ""),
    softmax_xent_v2_of_labels_that_are_no_distribution=_dense(
        [[2.0, 0.0, 1.0], [0.0, 0.0, 0.5]], "_v2"
    ),
    in_top_1=_in_top(LOGITS, [2, 1], 1),
    in_top_2_with_ties=_in_top([[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]], [2, 2], 2),
    in_top_1_not_finite_target_0=_in_top(NOT_FINITE, [0] * 5, 1),
    in_top_1_not_finite_target_2=_in_top(NOT_FINITE, [2] * 5, 1),
    in_top_3_not_finite=_in_top(NOT_FINITE, [1] * 5, 3),
    in_top_k_target_negative=_in_top(LOGITS, [-1, 0], 3),
    in_top_k_target_beyond=_in_top(LOGITS, [3, 0], 3),
    top_k_values=lambda tf: fed(tf, LOGITS, lambda x: tf.nn.top_k(x, 2).values, np.float32),
    top_k_indices=lambda tf: fed(
        tf, [1.0, 3.0, 3.0], lambda x: tf.nn.top_k(x, 2).indices, np.float32
    ),
    top_k_too_many=lambda tf: fed(tf, LOGITS, lambda x: tf.nn.top_k(x, 4)[0], np.float32),
    moments=lambda tf: fed(tf, ROWS, lambda x: list(tf.nn.moments(x, [0])), np.float32),
    zero_fraction=lambda tf: fed(tf, [0.0, 1.0, 2.0], lambda x: tf.nn.zero_fraction(x), np.float32),
    l2_normalize_of_zeros=lambda tf: fed(
        tf, [0.0, 0.0], lambda x: tf.nn.l2_normalize(x, 0), np.float32
    ),
)


# -- slopes where a function has a corner --------------------------------------------------------------------------

AROUND = [-1.0, 0.0, 1.0, 6.0, 7.0]
cases(
    slope_of_maximum_with_0=lambda tf: slope(tf, AROUND, lambda x: tf.maximum(x, 0.0)),
    slope_of_0_with_maximum=lambda tf: slope(tf, AROUND, lambda x: tf.maximum(0.0, x)),
    slope_of_minimum=lambda tf: slope(tf, AROUND, lambda x: tf.minimum(x, 1.0)),
    slope_of_minimum_second=lambda tf: slope(tf, AROUND, lambda x: tf.minimum(1.0, x)),
    slopes_of_maximum_of_equals=lambda tf: fed(
        tf,
        [1.0, 2.0],
        lambda x: tf.gradients(tf.maximum(tf.identity(x), x * 1.0), x)[0],
        np.float32,
    ),
    slope_of_maximum_of_a_row=lambda tf: slope(
        tf, [[1.0, 0.0], [0.0, 0.0]], lambda x: tf.maximum(x, [0.0, 0.0])
    ),
    slope_of_clip_by_value=lambda tf: slope(tf, AROUND, lambda x: tf.clip_by_value(x, 0.0, 6.0)),
    slope_of_clip_by_equal_values=lambda tf: slope(
        tf, AROUND, lambda x: tf.clip_by_value(x, 1.0, 1.0)
    ),
    slope_of_relu=lambda tf: slope(tf, AROUND, lambda x: tf.nn.relu(x)),
    slope_of_relu6=lambda tf: slope(tf, AROUND, lambda x: tf.nn.relu6(x)),
    slope_of_elu=lambda tf: slope(tf, AROUND, lambda x: tf.nn.elu(x)),
    slope_of_selu=lambda tf: slope(tf, AROUND, lambda x: tf.nn.selu(x)),
    slope_of_leaky_relu=lambda tf: slope(tf, AROUND, lambda x: tf.nn.leaky_relu(x)),
    slope_of_softplus=lambda tf: slope(tf, AROUND, lambda x: tf.nn.softplus(x)),
    slope_of_softsign=lambda tf: slope(tf, AROUND, lambda x: tf.nn.softsign(x)),
    slope_of_abs=lambda tf: slope(tf, AROUND, lambda x: tf.abs(x)),
    slope_of_sqrt=lambda tf: slope(tf, [0.0, 4.0], lambda x: tf.sqrt(x)),
    slope_of_norm_at_zero=lambda tf: slope(tf, [0.0, 0.0], lambda x: tf.norm(x)),
    slope_of_clip_by_norm_at_its_edge=lambda tf: slope(
        tf, [3.0, 4.0], lambda x: tf.clip_by_norm(x, 5.0)
    ),
    slope_of_clip_by_norm_within=lambda tf: slope(
        tf, [3.0, 4.0], lambda x: tf.clip_by_norm(x, 6.0)
    ),
    clip_by_global_norm_of_infinity=lambda tf: fed(
        tf,
        [1.0, np.inf],
        lambda x: tf.clip_by_global_norm([x, tf.constant([2.0])], 1.0),
        np.float32,
    ),
    slope_of_clip_by_norm_beyond=lambda tf: slope(
        tf, [3.0, 4.0], lambda x: tf.clip_by_norm(x, 4.0)
    ),
    slope_of_clip_by_norm_at_zero=lambda tf: slope(
        tf, [0.0, 0.0], lambda x: tf.clip_by_norm(x, 4.0)
    ),
    slope_of_reduce_max_of_equals=lambda tf: slope(tf, [1.0, 3.0, 3.0], lambda x: tf.reduce_max(x)),
    slope_of_reduce_min_of_equals=lambda tf: slope(tf, [1.0, 1.0, 3.0], lambda x: tf.reduce_min(x)),
    slope_of_reduce_prod_with_zero=lambda tf: slope(
        tf, [0.0, 2.0, 3.0], lambda x: tf.reduce_prod(x)
    ),
    slope_of_squared_difference=lambda tf: slope(
        tf, [1.0, 2.0], lambda x: tf.squared_difference(x, 1.0)
    ),
    slope_of_sigmoid_xent=lambda tf: slope(
        tf,
        [-1.0, 0.0, 1.0],
        lambda x: tf.nn.sigmoid_cross_entropy_with_logits(labels=[0.0, 0.3, 1.0], logits=x),
    ),
    slope_of_weighted_xent=lambda tf: slope(
        tf,
        [-1.0, 0.0, 1.0],
        lambda x: tf.nn.weighted_cross_entropy_with_logits([0.0, 0.3, 1.0], x, 2.0),
    ),
    slope_of_max_pool_of_equals=lambda tf: slope(
        tf,
        np.zeros([1, 2, 4, 1]).tolist(),
        lambda x: tf.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"),
    ),
    slope_of_max_pool_that_overlaps=lambda tf: slope(
        tf,
        np.ones([1, 3, 3, 1]).tolist(),
        lambda x: tf.nn.max_pool(x, [1, 2, 2, 1], [1, 1, 1, 1], "VALID"),
    ),
    slope_of_top_k=lambda tf: slope(tf, [1.0, 3.0, 3.0], lambda x: tf.nn.top_k(x, 1)[0]),
    slope_of_pow_at_zero=lambda tf: slope(tf, [0.0, 2.0], lambda x: tf.pow(x, 2.0)),
    slope_of_exponent_at_zero=lambda tf: slope(tf, [1.0, 2.0], lambda x: tf.pow([0.0, 3.0], x)),
    slope_of_atan2=lambda tf: slope(tf, [1.0, -1.0], lambda x: tf.atan2(x, 2.0)),
    slope_of_floormod=lambda tf: slope(tf, [5.5, -5.5], lambda x: tf.floormod(x, 2.0)),
    slope_of_sign_and_floor=lambda tf: slope(
        tf, [0.5, 1.0], lambda x: x + tf.sign(x) + tf.floor(x) + tf.round(x)
    ),
    slope_of_l2_normalize_of_zeros=lambda tf: slope(
        tf, [0.0, 0.0], lambda x: tf.nn.l2_normalize(x, 0)
    ),
    slope_of_l2_loss=lambda tf: slope(tf, [1.0, 2.0], lambda x: tf.nn.l2_loss(x)),
    slope_of_gather_twice=lambda tf: slope(
        tf, [1.0, 2.0, 3.0], lambda x: tf.gather(tf.square(x), [0, 0, 2])
    ),
    slope_of_reduce_logsumexp=lambda tf: slope(
        tf, [1.0, 2.0, 2.0], lambda x: tf.reduce_logsumexp(x)
    ),
)


# -- names, scopes and lists of variables --------------------------------------------------------------------------


def _named(variables: Any) -> list[str]:
    return [v.op.name for v in variables]


@case
def scopes_and_names(tf: Any) -> Any:
    with tf.variable_scope("a") as a:
        first = tf.get_variable("w", [2])
        with tf.name_scope("n"):
            plain, found = tf.Variable(1.0, name="v"), tf.get_variable("x", [1])
            sum_name = tf.add(first, 1.0).name
    with tf.variable_scope(a, reuse=True):
        again = tf.get_variable("w", [2])
        scope_name = tf.get_variable_scope().name
    with tf.variable_scope(None, default_name="d"):
        default = tf.get_variable("w", [1])
    with tf.variable_scope(None, default_name="d"):
        second = tf.get_variable("w", [1])
    return [
        *_named([first, plain, found, again, default, second]),
        sum_name,
        scope_name,
        str(first is again),
    ]


@case
def name_scopes_are_made_unique(tf: Any) -> Any:
    names = []
    for _ in range(2):
        with tf.name_scope("s") as scope:
            names += [scope, tf.constant(1, name="c").name, tf.constant(1, name="c").name]
    with tf.name_scope("s/"):
        names.append(tf.constant(1, name="c").name)
    with tf.name_scope(None, "default", []):
        names.append(tf.constant(1).name)
    return names


@case
def variables_by_kind(tf: Any) -> Any:
    with tf.variable_scope("m"):
        tf.get_variable("trained", [1])
        tf.get_variable("fixed", [1], trainable=False)
    tf.Variable(1.0, name="local", collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
    tf.add_to_collection("mine", tf.constant(1, name="kept"))
    tf.add_to_collection(tf.GraphKeys.MODEL_VARIABLES, tf.global_variables()[0])
    tf.get_collection_ref("mine").append(tf.constant(2, name="too"))
    lists = (tf.global_variables, tf.trainable_variables, tf.local_variables, tf.all_variables)
    more = (tf.model_variables, tf.moving_average_variables)
    return [
        *(_named(f()) for f in (*lists, *more)),
        [t.name for t in tf.get_collection("mine")],
        _named(tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, "m/t")),
    ]


@case
def variables_without_a_value(tf: Any) -> Any:
    v, w = tf.Variable(1.0, name="v"), tf.Variable(2.0, name="w")
    local = tf.Variable(3.0, name="l", collections=[tf.GraphKeys.LOCAL_VARIABLES], trainable=False)
    told = tf.report_uninitialized_variables()
    with tf.Session() as sess:
        seen = [[n.decode() for n in sess.run(told)]]
        sess.run([tf.variables_initializer([v]), tf.tables_initializer()])
        seen.append([n.decode() for n in sess.run(told)])
        sess.run([tf.initialize_variables([w]), tf.local_variables_initializer()])
        seen.append([n.decode() for n in sess.run(told)])
        return [*seen, sess.run([v, w, local])]


@case
def reuse_of_what_is_not_there(tf: Any) -> Any:
    with tf.variable_scope("s", reuse=True):
        return tf.get_variable("w", [1]).op.name


@case
def a_variable_made_twice(tf: Any) -> Any:
    tf.get_variable("w", [1])
    return tf.get_variable("w", [1]).op.name


@case
def reuse_with_another_shape(tf: Any) -> Any:
    tf.get_variable("w", [1])
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        return tf.get_variable("w", [2]).op.name


@case
def reuse_with_another_dtype(tf: Any) -> Any:
    tf.get_variable("w", [1])
    with tf.variable_scope(tf.get_variable_scope(), reuse=True):
        return tf.get_variable("w", [1], tf.int32).op.name


@case
def a_scope_that_finds_or_makes(tf: Any) -> Any:
    names = []
    for _ in range(2):
        with tf.variable_scope("s", reuse=tf.AUTO_REUSE):
            names += [tf.get_variable("w", [1]).op.name, tf.get_variable("x", [1]).op.name]
    return [*names, str(len(tf.global_variables()))]


@case
def data_types_by_any_name(tf: Any) -> Any:
    return [
        tf.as_dtype(d).name
        for d in ("float", "int32", np.int64, np.dtype("uint8"), bool, float, tf.float16, "half")
    ]


@case
def the_learning_step_is_counted(tf: Any) -> Any:
    step = tf.train.get_or_create_global_step()
    train = tf.train.GradientDescentOptimizer(0.1).minimize(
        tf.square(tf.Variable(1.0)), global_step=step
    )
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run([train])
        sess.run([train])
        return [step.op.name, str(tf.train.global_step(sess, step)), sess.run(step)]


@case
def colocated_and_placed(tf: Any) -> Any:
    with tf.device("/job:ps/task:1"):
        a = tf.constant(1.0)
    with tf.colocate_with(a):
        b = tf.add(a, 1.0)
    return [a.device, str(b.op is not None)]


@case
def norm_of_a_row_that_is_looked_up_twice(tf: Any) -> Any:
    table = tf.Variable([[3.0, 4.0], [1.0, 2.0]])
    gradient = tf.gradients(tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 0])), table)
    clipped, norm = tf.clip_by_global_norm(gradient, 1.0)
    return run(tf, [norm, tf.convert_to_tensor(clipped[0])])


@case
def gradients_by_nothing_and_of_nothing(tf: Any) -> Any:
    x, whole = tf.constant(1.0), tf.constant(1)
    return [
        str(tf.gradients(x * x, [])),
        str(tf.gradients(whole, [])),
        str(tf.gradients([], [x])),
        str(tf.gradients([], [])),
    ]


@case
def gradients_of_no_derivative(tf: Any) -> Any:
    x, y = tf.constant(1.0), tf.constant(2.0)
    return tf.gradients(tf.gradients(y, x)[0], x)


@case
def names_of_slots(tf: Any) -> Any:
    v = tf.Variable(1.0, name="v")
    loss = tf.square(v)
    makers = (
        lambda: tf.train.MomentumOptimizer(0.1, 0.5),
        lambda: tf.train.AdagradOptimizer(0.1),
        lambda: tf.train.AdadeltaOptimizer(0.1),
        lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5),
        tf.train.AdamOptimizer,
        tf.train.AdamOptimizer,
        lambda: tf.train.AdamOptimizer(name="Mine"),
        lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5, centered=True, name="Centered"),
    )
    names = []
    for number, make in enumerate(makers):
        with tf.variable_scope("net" if number % 2 else tf.get_variable_scope()):
            optimizer = make()
            optimizer.minimize(loss)
        names += [f"{s} {optimizer.get_slot(v, s).name}" for s in optimizer.get_slot_names()]
    return names


@case
def derivative_of_a_fed_result(tf: Any) -> Any:
    x = tf.constant(0.0)
    y = tf.exp(x)
    return run(tf, tf.gradients(y, x), {y: 2.0})


@case
def where_of_unknown_rank_and_sizes(tf: Any) -> Any:
    found = []
    for condition in ([1, 3], [None], [], None):
        mask = tf.placeholder(tf.bool, condition)
        for one in (None, [None, None], [None, 3], [2, None], [1, 3]):
            for other in ([None, None], [None, 3], [1, 3]):
                x, y = tf.placeholder(tf.float32, one), tf.placeholder(tf.float32, other)
                try:
                    found.append(str(tf.where(mask, x, y).get_shape()))
                except ValueError:
                    found.append("refused")
    x = tf.py_func(lambda a: a, [tf.constant([[1.0, 2.0, 3.0]])], tf.float32)
    y = tf.placeholder_with_default([[7.0, 8.0, 9.0]], [1, 3])
    chosen = tf.where(tf.constant([[True, False, True]]), x, y)
    return [found, run(tf, chosen), run(tf, tf.gradients(chosen, y))]


@case
def turns_by_a_placeholder_with_default(tf: Any) -> Any:
    n = tf.placeholder_with_default(1, [])
    turns = tf.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, 2.0 * x), [0, 1.0])
    return [run(tf, turns), run(tf, turns, {n: 4})]


@case
def feeds_of_wrong_shape_and_dtype(tf: Any) -> Any:
    texts = tf.placeholder(tf.string, [2])
    return run(tf, tf.identity(texts), {texts: np.zeros(3, np.float32)})


@case
def lists_of_tensors_are_packed(tf: Any) -> Any:
    n = tf.placeholder_with_default(1, [])
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    v = tf.Variable([1.0, 2.0])
    with tf.control_dependencies([tf.assert_equal([n, 1], [1, n]), tf.assert_positive([n])]):
        found = [
            tf.identity([n, 5]),
            tf.gather(x, [[n, 0]]),
            tf.gather_nd(x, [[0, n], [n, n]]),
            tf.scatter_nd([[n]], [1.0], [3]),
            tf.nn.embedding_lookup(x, [[n], [0]]),
            tf.pad(x, [[0, 1], [0, 0]], constant_values=tf.to_float(n)),
            tf.losses.sparse_softmax_cross_entropy([n, 0], x),
            tf.convert_to_tensor(tf.IndexedSlices([1.0], [n], [3])),
        ]
    added = tf.scatter_add(v, [n], [tf.to_float(n)])
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        return [sess.run(found), sess.run(added)]


@case
def slots_of_partitioned_variables(tf: Any) -> Any:
    train = tf.train

    def build(parts: int) -> None:
        v = tf.get_variable(
            "v",
            [6],
            initializer=tf.zeros_initializer(),
            partitioner=tf.fixed_size_partitioner(parts),
        )
        loss = tf.reduce_sum(tf.square(tf.convert_to_tensor(v) - 1.0))
        for _ in range(2):
            train.MomentumOptimizer(0.1, 0.5).minimize(loss)
        train.RMSPropOptimizer(0.1, momentum=0.5, centered=True).minimize(loss)

    with tempfile.TemporaryDirectory() as directory:
        with tf.Graph().as_default(), tf.Session() as sess:
            build(2)
            names = [v.op.name for v in tf.global_variables()]
            sess.run(tf.global_variables_initializer())
            saved = train.Saver().save(sess, os.path.join(directory, "model"))
        with tf.Graph().as_default(), tf.Session() as sess:
            build(3)
            train.Saver().restore(sess, saved)
        return [names, [key for key, _ in train.list_variables(saved)]]


@case
def numbers_of_optimizers_are_float32(tf: Any) -> Any:
    train = tf.train
    makers = (
        lambda: train.GradientDescentOptimizer(0.1),
        lambda: train.MomentumOptimizer(0.1, 0.9),
        train.AdamOptimizer,
        lambda: train.RMSPropOptimizer(0.1, momentum=0.7),
        lambda: train.RMSPropOptimizer(0.1, centered=True),
        lambda: train.AdadeltaOptimizer(0.3),
    )
    variables = [tf.Variable(np.float64(2.0)) for _ in makers]
    steps = [make().minimize(tf.square(v)) for make, v in zip(makers, variables, strict=True)]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(steps)
        sess.run(steps)
        return [round(float(value), 11) for value in sess.run(variables)]


@case
def none_for_placeholders(tf: Any) -> Any:
    found = []
    for dtype, shape in ((tf.int64, [None, 4]), (tf.int32, []), (tf.float32, [None, 4])):
        x = tf.placeholder(dtype, shape)
        try:
            found.append(run(tf, tf.identity(x), {x: None}))
        except (TypeError, ValueError) as error:
            found.append("type" if isinstance(error, TypeError) else "value")
    return found


@case
def text_for_a_placeholder_with_default(tf: Any) -> Any:
    x = tf.placeholder_with_default(np.float32(1.0), [])
    return run(tf, tf.identity(x), {x: "text"})


@case
def several_components_of_a_queue_are_a_list(tf: Any) -> Any:
    queue = tf.FIFOQueue(3, [tf.float32, tf.int32], [[], [2]])
    alone = tf.RandomShuffleQueue(3, 0, [tf.float32], [[]])
    given = [queue.dequeue(), queue.dequeue_many(2), queue.dequeue_up_to(2)]
    shapes = [str(part.get_shape()) for parts in given for part in parts]
    return (
        [type(parts).__name__ for parts in given]
        + shapes
        + [alone.dequeue().op.name.rpartition("/")[0]]
    )


@case
def average_of_a_variable_after_reuse_variables(tf: Any) -> Any:
    with tf.variable_scope("tower") as scope:
        w = tf.get_variable("w", initializer=tf.constant([4.0, 8.0]))
        scope.reuse_variables()
        average = tf.train.ExponentialMovingAverage(0.5)
        update = average.apply([w])
    changed = tf.assign(w, [0.0, 0.0])
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(changed)
        sess.run(update)
        return sess.run(average.average(w))


@case
def losses_of_a_program(tf: Any) -> Any:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    tf.losses.compute_weighted_loss(x, [[1.0], [0.5]])
    for reduction in ("NONE", "SUM", "MEAN", "SUM_OVER_BATCH_SIZE", "SUM_BY_NONZERO_WEIGHTS"):
        how = getattr(tf.losses.Reduction, reduction)
        tf.losses.compute_weighted_loss(
            x, [[0.0], [0.5]], scope=reduction, loss_collection=reduction, reduction=how
        )
    tf.losses.add_loss(tf.constant(7.0))
    tf.get_variable(
        "w", [2], initializer=tf.ones_initializer(), regularizer=lambda w: 0.5 * tf.reduce_sum(w)
    )
    kept = [
        *tf.losses.get_losses(),
        *tf.losses.get_losses(loss_collection="NONE"),
        *tf.losses.get_losses("no such"),
    ]
    kept += [
        *tf.losses.get_losses(loss_collection="SUM"),
        *tf.losses.get_losses(loss_collection="MEAN"),
    ]
    kept += tf.losses.get_losses(loss_collection="SUM_OVER_BATCH_SIZE")
    kept += tf.losses.get_losses(loss_collection="SUM_BY_NONZERO_WEIGHTS")
    kept += [*tf.losses.get_regularization_losses(), tf.losses.get_regularization_loss()]
    kept += [tf.losses.get_total_loss(), tf.losses.get_total_loss(add_regularization_losses=False)]
    return run(tf, kept)


# -- devices -----------------------------------------------------------------------------------------------------------

TOWERS, TOWER_STEPS = 4, 5


def four_towers(tf: Any, **traced: Any) -> Any:
    """Averages the gradients of a tower on each of four GPUs; ``traced`` is given to the last step."""
    inputs = np.reshape(np.sin(np.arange(48.0)), [16, 3]).astype(np.float32)
    targets = np.reshape(np.cos(np.arange(16.0)), [16, 1]).astype(np.float32)
    losses, slopes = [], []
    with tf.device("/cpu:0"):
        step = tf.train.get_or_create_global_step()
        opt = tf.train.MomentumOptimizer(0.1, 0.9)
        x, y = tf.placeholder(tf.float32, [16, 3]), tf.placeholder(tf.float32, [16, 1])
        shares = zip(tf.split(x, TOWERS), tf.split(y, TOWERS), strict=True)
        with tf.variable_scope(tf.get_variable_scope()):
            for i, (rows, wanted) in enumerate(shares):
                with tf.device(f"/gpu:{i}"), tf.name_scope(f"tower_{i}"):
                    with tf.device("/cpu:0"):
                        w = tf.get_variable("w", [3, 1], initializer=tf.ones_initializer())
                        b = tf.get_variable("b", [1], initializer=tf.zeros_initializer())
                    found = tf.tanh(tf.matmul(rows, w) + b)
                    losses.append(tf.reduce_mean(tf.square(found - wanted)))
                    tf.get_variable_scope().reuse_variables()
                    slopes.append(opt.compute_gradients(losses[-1]))
        averaged = [
            (tf.reduce_mean(tf.stack([slope for slope, _ in pairs]), 0), pairs[0][1])
            for pairs in zip(*slopes, strict=True)
        ]
        train = opt.apply_gradients(averaged, global_step=step)
    feeds = {x: inputs, y: targets}
    with tf.Session(config=tf.ConfigProto(allow_soft_placement=True)) as sess:
        sess.run(tf.global_variables_initializer())
        seen = [sess.run([train, *losses], feeds)[1:] for _ in range(TOWER_STEPS - 1)]
        seen.append(sess.run([train, *losses], feeds, **traced)[1:])
        return [*seen, *sess.run([step, *tf.trainable_variables()])]


@case
def towers_on_missing_gpus(tf: Any) -> Any:
    return four_towers(tf)


@case
def missing_gpu_without_soft_placement(tf: Any) -> Any:
    with tf.device("/gpu:7"):
        x = tf.constant(1.0)
    return run(tf, x)


# -- pictures ----------------------------------------------------------------------------------------------------------

_BGR = bytes(range(0, 180, 10))
"""A picture of two rows of three pixels, from the lowest row on, as a BMP file holds it."""
BMP = (
    struct.pack("<2sIII", b"BM", 54 + 24, 0, 54)
    + struct.pack("<IiiHHIIiiII", 40, 3, 2, 1, 24, 0, 24, 0, 0, 0, 0)
    + b"".join(_BGR[row : row + 9] + b"\0" * 3 for row in (0, 9))
)

cases(
    bmp=lambda tf: run(tf, tf.image.decode_bmp(BMP)),
    bmp_of_three_channels=lambda tf: run(tf, tf.image.decode_bmp(BMP, channels=3)),
    any_picture=lambda tf: run(tf, tf.image.decode_image(BMP)),
    any_picture_by_io=lambda tf: run(tf, tf.io.decode_image(BMP, channels=3)),
    bicubic=lambda tf: run(
        tf, tf.image.resize_bicubic(np.reshape(np.sin(np.arange(24.0)), [1, 4, 6, 1]), [7, 3])
    ),
    bicubic_by_corners=lambda tf: run(
        tf,
        tf.image.resize_bicubic(
            np.float32(np.reshape(np.arange(8) ** 2, [1, 2, 2, 2])), [3, 5], align_corners=True
        ),
    ),
)


# -- partitioned variables and sparse ids ------------------------------------------------------------------------------


@case
def partitioners(tf: Any) -> Any:
    """The number of parts along each axis."""
    made = [
        tf.fixed_size_partitioner(3),
        tf.fixed_size_partitioner(9),
        tf.fixed_size_partitioner(2, axis=1),
        tf.variable_axis_size_partitioner(40),
        tf.variable_axis_size_partitioner(16, max_shards=2),
        tf.variable_axis_size_partitioner(1),
        tf.min_max_variable_partitioner(5, min_slice_size=16),
        tf.min_max_variable_partitioner(3, min_slice_size=16),
        tf.min_max_variable_partitioner(3),
    ]
    shape = tf.TensorShape([7, 2])
    return [list(partition(shape=shape, dtype=tf.float32)) for partition in made]


def rows_of_part(tf: Any) -> Any:
    """An initializer of consecutive numbers, which asks for the place of its part."""

    def initializer(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
        whole = np.arange(np.prod(partition_info.full_shape), dtype=np.float32)
        first = partition_info.var_offset[0]
        return tf.constant(whole.reshape(partition_info.full_shape)[first : first + shape[0]])

    return initializer


@case
def partitioned_variables(tf: Any) -> Any:
    """The parts of variables in names, values, lookups, gradients and a training step."""
    with tf.variable_scope("s", partitioner=tf.fixed_size_partitioner(3)):
        w = tf.get_variable("w", [7, 2], initializer=rows_of_part(tf))
        bias = tf.get_variable("bias", [], initializer=tf.ones_initializer())
    with tf.variable_scope("s", reuse=True, partitioner=tf.fixed_size_partitioner(3)):
        again = tf.get_variable("w", [7, 2])
    with tf.variable_scope("s", reuse=True):
        part = tf.get_variable("w/part_1", [2, 2])
    plain = tf.create_partitioned_variables([5, 2], [2, 1], tf.zeros_initializer(), name="plain")
    by_rows = tf.nn.embedding_lookup(w, [0, 3, 6], partition_strategy="div")
    by_parts = tf.nn.embedding_lookup(w, [0, 3, 6])
    loss = tf.reduce_sum(tf.square(by_rows)) + tf.reduce_sum(tf.matmul(w, [[1.0], [2.0]])) * bias
    slopes = tf.gradients(loss, [*w, bias])
    train = tf.train.GradientDescentOptimizer(0.5).minimize(loss)
    told = [again is w, part.name, w.name, w.get_shape().as_list(), bias.name]
    told += [[v.name, v.get_shape().as_list()] for v in [*w, *plain, *tf.trainable_variables()]]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        slopes = [tf.convert_to_tensor(slope) for slope in slopes]
        before = sess.run([by_rows, by_parts, loss, w.as_tensor(), *slopes])
        sess.run(train)
        return [*told, *before, *sess.run([tf.convert_to_tensor(w), bias])]


@case
def partitioned_variables_with_mistakes(tf: Any) -> Any:
    """A number of parts that does not fit."""
    return tf.get_variable("w", [2, 2], partitioner=lambda **unused: [5, 1])


IDS, SHAPE = [[0, 0], [0, 1], [2, 0]], [4, 2]


@case
def lookups_of_sparse_ids(tf: Any) -> Any:
    """Rows that are combined, and the gradients of table and weights."""
    table = tf.Variable(np.reshape(np.sin(np.arange(12.0)), [4, 3]).astype(np.float32))
    numbers = tf.constant([1.0, 2.0, 0.5])
    ids = tf.SparseTensor(IDS, [1, 3, 1], SHAPE)
    weights = tf.SparseTensor(IDS, numbers, SHAPE)
    found = []
    for combiner in ("sum", "mean", "sqrtn"):
        plain = tf.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner)
        weighted = tf.nn.embedding_lookup_sparse(table, ids, weights, combiner=combiner)
        parts = tf.nn.embedding_lookup_sparse([table, table], ids, weights, combiner=combiner)
        limited = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum", max_norm=0.5)
        slopes = tf.gradients(tf.reduce_sum(tf.square(weighted)), [table, numbers])
        found += [plain, weighted, parts, limited, *map(tf.convert_to_tensor, slopes)]
    return run(tf, found)


@case
def safe_lookups_of_sparse_ids(tf: Any) -> Any:
    """Negative ids, weights of zero, examples without an id, and three dimensions."""
    table = tf.Variable(np.reshape(np.sin(np.arange(12.0)), [4, 3]).astype(np.float32))
    ids = tf.SparseTensor([*IDS, [2, 1]], [1, 3, 1, -1], SHAPE)
    weights = tf.SparseTensor([*IDS, [2, 1]], [1.0, 0.0, 2.0, 3.0], SHAPE)
    deep = tf.SparseTensor([[0, 0, 1], [1, 1, 0], [1, 1, 1]], [2, 0, 3], [2, 2, 2])
    found = []
    for combiner in ("sum", "mean", "sqrtn"):
        for default in (None, 2):
            options = {"combiner": combiner, "default_id": default}
            found.append(tf.nn.safe_embedding_lookup_sparse([table], ids, **options))
            found.append(tf.nn.safe_embedding_lookup_sparse([table], ids, weights, **options))
            found.append(tf.nn.safe_embedding_lookup_sparse([table], deep, **options))
    slopes = tf.gradients(tf.reduce_sum(tf.square(found[-2])), [table])
    return run(tf, [*found, *map(tf.convert_to_tensor, slopes)])


@case
def lookup_with_another_combiner(tf: Any) -> Any:
    ids = tf.SparseTensor(IDS, [1, 3, 1], SHAPE)
    return tf.nn.embedding_lookup_sparse(tf.constant([[1.0]]), ids, None, combiner="max")


@case
def products_of_sparse_tensors(tf: Any) -> Any:
    """A sparse tensor that is fed in both forms, products, gradients, an order and a choice."""
    dense = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    fed = tf.sparse_placeholder(tf.float32, [None, 2])
    product = tf.sparse_tensor_dense_matmul(fed, dense)
    slopes = tf.gradients(tf.square(product), [fed.values, dense])
    known = tf.SparseTensor([[1, 0], [0, 1], [0, 0]], [1.0, 2.0, 3.0], [2, 2])
    turned = tf.sparse_tensor_dense_matmul(known, dense, adjoint_a=True, adjoint_b=True)
    value = tf.SparseTensorValue(np.array([[0, 1], [2, 0]]), np.float32([5, 7]), np.array([3, 2]))
    fetches = [product, *slopes, turned, tf.sparse_reorder(known)]
    fetches.append(tf.sparse_retain(known, [True, False, True]))
    with tf.Session() as sess:
        once = sess.run(fetches, {fed: value})
        twice = sess.run(product, {fed: (value.indices, value.values, value.dense_shape)})
    return [*once[:4], *once[4], *once[5], twice]


@case
def hashes_of_strings(tf: Any) -> Any:
    """Strings of every length at which the hash takes another way."""
    texts = ["".join(chr(97 + i * i % 26) for i in range(size)) for size in range(0, 200, 3)]
    buckets = [
        tf.string_to_hash_bucket_fast(texts, 2**62),
        tf.string_to_hash_bucket_fast([texts], 7),
    ]
    return run(tf, buckets)
