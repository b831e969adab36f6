"""Programs with conditionals, loops and TensorArrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.harness.tf1.oracle.programs import run

Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
"""As in ``programs``."""

PAIR = [1.0, 2.0]
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def case(fn: Case) -> Case:
    """Adds a program under its own name."""
    CASES[fn.__name__] = fn
    return fn


def cases(**programs: Case) -> None:
    """Adds several short ones."""
    CASES.update(programs)


def both(build: Callable[[Any, Any, Any], Any]) -> Case:
    """``build(tf, pred, x)`` with a fed predicate: what it gives when that is true, and when it is false."""

    def program(tf: Any) -> Any:
        pred, x = tf.placeholder(tf.bool, []), tf.placeholder(tf.float32, [2])
        fetches = build(tf, pred, x)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            return [sess.run(fetches, {pred: value, x: PAIR}) for value in (True, False)]

    return program


def given(
    value: Any, build: Callable[[Any, Any], Any], dtype: Any = np.float32, shape: Any = ()
) -> Case:
    """``build(tf, x)`` of a fed ``x``; its own shape if none is given."""

    def program(tf: Any) -> Any:
        x = tf.placeholder(dtype, np.shape(value) if shape == () else shape)
        return run(tf, build(tf, x), {x: value})

    return program


def slopes(tf: Any, y: Any, *xs: Any) -> Any:
    """``y``, and its derivatives."""
    return [y, *tf.gradients(y, list(xs))]


def _until_large(tf: Any, x: Any) -> Any:
    """A loop with a counter, a vector, and a weight that the body uses; the slopes of all that have one."""
    w = tf.Variable([1.5, -0.5])
    turns, last = tf.while_loop(
        lambda i, a: tf.reduce_sum(tf.abs(a)) < 60.0,
        lambda i, a: (i + 1, a * w + tf.cast(i, tf.float32) * tf.sin(x)),
        [tf.constant(1), x * 2.0],
    )
    return [turns, *slopes(tf, tf.reduce_sum(last * last), x, w)]


# -- cond ----------------------------------------------------------------------------------------------------------

cases(
    cond_of_a_fed_predicate=both(lambda tf, p, x: tf.cond(p, lambda: x * 2.0, lambda: x - 1.0)),
    cond_slopes=both(lambda tf, p, x: slopes(tf, tf.cond(p, lambda: x * x, lambda: 3.0 * x), x)),
    cond_slope_of_what_only_one_side_uses=both(
        lambda tf, p, x: slopes(tf, tf.cond(p, lambda: x * x, lambda: tf.constant(PAIR)), x)
    ),
    cond_slope_is_finite_where_the_other_side_is_not=both(
        lambda tf, p, x: tf.gradients(tf.cond(p, lambda: x * 2.0, lambda: tf.sqrt(x - x)), x)
    ),
    cond_of_several=both(lambda tf, p, x: tf.cond(p, lambda: (x, x + 1.0), lambda: (x * 3.0, x))),
    cond_of_a_list=both(lambda tf, p, x: tf.cond(p, lambda: [x, x + 1.0], lambda: [x * 3.0, x])),
    cond_of_a_nest=both(
        lambda tf, p, x: tf.cond(p, lambda: (x, (x, x)), lambda: (x * 3.0, (x, x - 1.0)))[1]
    ),
    cond_of_one_in_a_list=both(lambda tf, p, x: tf.cond(p, lambda: [x], lambda: [x * 3.0])),
    cond_strict=both(lambda tf, p, x: tf.cond(p, lambda: [x], lambda: [x * 3.0], strict=True)),
    cond_of_numbers=both(lambda tf, p, x: tf.cond(p, lambda: 1, lambda: 2)),
    cond_of_constants=both(
        lambda tf, p, x: tf.cond(p, lambda: tf.constant(1.5), lambda: tf.constant(2.5))
    ),
    cond_of_what_is_outside=both(lambda tf, p, x: tf.cond(p, lambda: x, lambda: x)),
    cond_of_64_bits=both(
        lambda tf, p, x: tf.cond(
            p, lambda: tf.cast(x, tf.float64) * 2, lambda: tf.constant(PAIR, tf.float64)
        )
    ),
    cond_that_casts_inside=both(
        lambda tf, p, x: tf.cond(
            p, lambda: tf.cast(tf.cast(x, tf.int64) * 3, tf.float32), lambda: x
        )
    ),
    cond_of_old_names=both(lambda tf, p, x: tf.cond(p, fn1=lambda: x, fn2=lambda: -x)),
    cond_of_a_computed_predicate=both(
        lambda tf, p, x: tf.cond(tf.reduce_sum(x) > 2.0, lambda: x * 2.0, lambda: x - 1.0)
    ),
    cond_within_cond=both(
        lambda tf, p, x: tf.cond(
            p,
            lambda: tf.cond(x[0] > 5.0, lambda: x, lambda: -x),
            lambda: tf.cond(p, lambda: x, lambda: x * 10.0),
        )
    ),
    cond_shapes_of_the_outside=both(
        lambda tf, p, x: tf.cond(p, lambda: tf.zeros(tf.shape(x)), lambda: tf.ones([tf.size(x)]))
    ),
    cond_names=both(
        lambda tf, p, x: (
            tf.cond(p, lambda: x, lambda: x, name="mine").name.partition("/")[0].partition(":")[0]
            and x
        )
    ),
    cond_true_is_a_python_bool=lambda tf: tf.cond(True, lambda: 1, lambda: 2),
    cond_fn_is_no_function=both(lambda tf, p, x: tf.cond(p, x, x)),
    cond_predicate_is_a_number=both(lambda tf, p, x: tf.cond(x[0], lambda: x, lambda: x)),
    cond_predicate_is_a_vector=both(lambda tf, p, x: tf.cond(x > 1.0, lambda: x, lambda: x)),
    cond_of_two_types=both(lambda tf, p, x: tf.cond(p, lambda: x, lambda: tf.cast(x, tf.int32))),
    cond_of_two_structures=both(lambda tf, p, x: tf.cond(p, lambda: (x, x), lambda: x)),
    cond_of_two_lengths=both(lambda tf, p, x: tf.cond(p, lambda: [x, x], lambda: [x, x, x])),
    cond_of_none=both(lambda tf, p, x: tf.cond(p, lambda: None, lambda: None)),
)


@case
def cond_reads_variables(tf: Any) -> Any:
    v, w, pred = tf.Variable(2.0), tf.Variable(5.0), tf.placeholder(tf.bool, [])
    y = tf.cond(pred, lambda: v * 3.0, lambda: w + v)
    grads = [g for g in tf.gradients(y, [v, w])]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        return [sess.run([y, *grads], {pred: value}) for value in (True, False)]


def _counts(tf: Any, make: Callable[[Any, Any, Any], Any], fetched: bool = False) -> Any:
    """Two variables after steps with a true, a false and a true predicate."""
    a, b, pred = tf.Variable(1.0), tf.Variable(10.0), tf.placeholder(tf.bool, [])
    done = make(a, b, pred)
    seen = []
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for value in (True, False, True):
            got = sess.run(done, {pred: value})
            seen.append([*([got] if fetched else []), sess.run(a), sess.run(b)])
    return seen


cases(
    cond_assigns_on_the_taken_side=lambda tf: _counts(
        tf,
        lambda a, b, p: tf.cond(p, lambda: tf.assign_add(a, 1.0), lambda: tf.assign_add(b, 1.0)),
        True,
    ),
    cond_assigns_a_value=lambda tf: _counts(
        tf,
        lambda a, b, p: tf.cond(p, lambda: tf.assign(a, b * 2.0), lambda: tf.assign_sub(b, a)),
        True,
    ),
    cond_of_operations=lambda tf: _counts(
        tf, lambda a, b, p: tf.cond(p, lambda: tf.group(tf.assign_add(a, 1.0)), lambda: tf.no_op())
    ),
    cond_assign_under_control=lambda tf: _counts(
        tf, lambda a, b, p: tf.cond(p, _then(tf, a, b), lambda: b + 0.0), True
    ),
    cond_assigns_one_after_the_other=lambda tf: _counts(
        tf, lambda a, b, p: tf.cond(p, _twice(tf, a), lambda: tf.identity(a)), True
    ),
    cond_assigns_in_a_cond=lambda tf: _counts(
        tf,
        lambda a, b, p: tf.cond(
            p,
            lambda: tf.cond(a > 1.5, lambda: tf.assign_add(a, 10.0), lambda: tf.assign_add(a, 1.0)),
            lambda: tf.assign_add(b, 1.0),
        ),
        True,
    ),
    cond_what_is_made_outside_runs_in_any_case=lambda tf: _counts(tf, _outside(tf), True),
    cond_what_nobody_needs_does_not_run=lambda tf: _counts(
        tf,
        lambda a, b, p: tf.cond(p, lambda: (tf.assign_add(a, 1.0), b + 1.0)[1], lambda: b + 2.0),
        True,
    ),
    cond_trains=lambda tf: _counts(
        tf,
        lambda a, b, p: tf.cond(
            p,
            lambda: tf.train.GradientDescentOptimizer(0.5).minimize(
                tf.square(a - 3.0), var_list=[a]
            ),
            lambda: tf.no_op(),
        ),
    ),
)


def _then(tf: Any, a: Any, b: Any) -> Callable[[], Any]:
    def fn() -> Any:
        with tf.control_dependencies([tf.assign_add(a, 1.0)]):
            return b * 2.0

    return fn


def _twice(tf: Any, a: Any) -> Callable[[], Any]:
    def fn() -> Any:
        with (
            tf.control_dependencies([tf.assign_add(a, 1.0)]),
            tf.control_dependencies([tf.assign(a, a.read_value() * 2)]),
        ):
            return a.read_value()

    return fn


def _outside(tf: Any) -> Callable[[Any, Any, Any], Any]:
    def make(a: Any, b: Any, p: Any) -> Any:
        update = tf.assign_add(a, 1.0)
        return tf.cond(p, lambda: tf.identity(update), lambda: b)

    return make


@case
def cond_after_an_update(tf: Any) -> Any:
    v = tf.Variable(1.0)
    with tf.control_dependencies([tf.assign_add(v, 1.0)]):
        y = tf.cond(v.read_value() > 1.5, lambda: v.read_value() * 10.0, lambda: tf.constant(0.0))
    return run(tf, y)


@case
def cond_makes_variables(tf: Any) -> Any:
    pred = tf.placeholder(tf.bool, [])

    def make() -> Any:
        return tf.get_variable("w", [], initializer=tf.constant_initializer(4.0)) * 2.0

    y = tf.cond(pred, make, lambda: 1.0)
    names = [v.op.name for v in tf.global_variables()]
    with tf.Session() as sess:
        sess.run([v.initializer for v in tf.global_variables()])
        return [names, sess.run(y, {pred: True}), sess.run(y, {pred: False})]


@case
def cond_enqueues(tf: Any) -> Any:
    pred, queue = tf.placeholder(tf.bool, []), tf.FIFOQueue(10, tf.float32, shapes=[[]])
    add = tf.cond(pred, lambda: tf.group(queue.enqueue(3.0)), lambda: tf.no_op())
    with tf.Session() as sess:
        for value in (True, False, True):
            sess.run(add, {pred: value})
        return [sess.run(queue.size()), sess.run(queue.dequeue())]


@case
def cond_dequeues(tf: Any) -> Any:
    pred, queue = tf.placeholder(tf.bool, []), tf.FIFOQueue(10, tf.float32, shapes=[[]])
    fill = queue.enqueue_many([[1.0, 2.0, 3.0]])
    taken = tf.cond(pred, lambda: queue.dequeue(), lambda: tf.constant(-1.0))
    with tf.Session() as sess:
        sess.run(fill)
        return [
            *(sess.run(taken, {pred: value}) for value in (True, False, True)),
            sess.run(queue.size()),
        ]


@case
def cond_asserts(tf: Any) -> Any:
    pred, x = tf.placeholder(tf.bool, []), tf.placeholder(tf.float32, [])

    def checked() -> Any:
        with tf.control_dependencies([tf.Assert(x > 0.0, [x])]):
            return tf.identity(x)

    y = tf.cond(pred, checked, lambda: -x)
    seen: list[Any] = []
    with tf.Session() as sess:
        for feeds in ((True, 1.0), (False, -1.0), (True, -1.0)):
            try:
                seen.append(sess.run(y, dict(zip((pred, x), feeds, strict=True))))
            except tf.errors.InvalidArgumentError:
                seen.append("InvalidArgumentError")
    return seen


@case
def cond_of_one_that_waits_for_all(tf: Any) -> Any:
    total, pred = tf.Variable(0.0), tf.placeholder(tf.bool, [])
    y = tf.cond(pred, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
    with tf.control_dependencies([y]):
        after = tf.assign_add(total, y)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        return [sess.run(after, {pred: True}), sess.run(after, {pred: False})]


# -- case ----------------------------------------------------------------------------------------------------------


def _case(value: float, **kwargs: Any) -> Case:
    def program(tf: Any) -> Any:
        x = tf.placeholder(tf.float32, [])
        pairs = [(x < 1.0, lambda: x * 10.0), (x < 2.0, lambda: x * 100.0)]
        found = tf.case(
            pairs,
            **{k: (lambda v=v: tf.constant(v)) if k == "default" else v for k, v in kwargs.items()},
        )
        return run(tf, found, {x: value})

    return program


cases(
    case_first=_case(0.5, default=7.0),
    case_second=_case(1.5, default=7.0),
    case_default=_case(2.5, default=7.0),
    case_none_is_true=_case(2.5),
    case_without_default=_case(1.5),
    case_exclusive=_case(1.5, default=7.0, exclusive=True),
    case_two_are_true=_case(0.5, default=7.0, exclusive=True),
    case_of_a_dictionary=given(
        2.0, lambda tf, x: tf.case({x > 1.0: lambda: x * 2.0}, default=lambda: x, exclusive=True)
    ),
    case_of_nothing=lambda tf: tf.case([], default=lambda: tf.constant(1.0)),
)

# -- while_loop ----------------------------------------------------------------------------------------------------

cases(
    while_counts=given(
        5, lambda tf, n: tf.while_loop(lambda i: i < n, lambda i: i + 1, [0]), np.int32
    ),
    while_of_two=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), [tf.constant(0), x]
        ),
    ),
    while_gives_a_list=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < 3, lambda i, a: [i + 1, a * x], (tf.constant(0), x)
        ),
    ),
    while_slopes=given(
        PAIR,
        lambda tf, x: slopes(
            tf, tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * x), [0, x])[1], x
        ),
    ),
    while_slopes_by_a_shape=given(
        ROWS,
        lambda tf, x: slopes(
            tf,
            tf.while_loop(
                lambda i, a: i < tf.shape(x)[0],
                lambda i, a: (i + 1, a * 0.5 + x[i]),
                [0, tf.zeros([2])],
            )[1],
            x,
        ),
        shape=[None, 2],
    ),
    while_slopes_by_a_constant=given(
        PAIR,
        lambda tf, x: slopes(
            tf,
            tf.while_loop(lambda i, a: i > 0, lambda i, a: (i - 2, tf.sin(a)), [tf.constant(7), x])[
                1
            ],
            x,
        ),
    ),
    while_slopes_with_a_limit=given(
        0.3,
        lambda tf, x: slopes(
            tf, tf.while_loop(lambda a: a < 3.0, lambda a: a * 2.0, [x], maximum_iterations=20), x
        ),
    ),
    while_slopes_cut_by_the_limit=given(
        0.3,
        lambda tf, x: slopes(
            tf, tf.while_loop(lambda a: a < 3.0, lambda a: a * 2.0, [x], maximum_iterations=2), x
        ),
    ),
    while_slopes_that_depend_on_the_data=given(
        0.3, lambda tf, x: slopes(tf, tf.while_loop(lambda a: a < 3.0, lambda a: a * 2.0, [x]), x)
    ),
    while_slopes_of_several_that_depend_on_the_data=given(PAIR, lambda tf, x: _until_large(tf, x)),
    while_slopes_of_no_turn_by_the_data=given(
        9.0, lambda tf, x: slopes(tf, tf.while_loop(lambda a: a < 3.0, lambda a: a * x, [x]), x)
    ),
    while_slopes_up_to_a_fed_limit=given(
        3,
        lambda tf, n: slopes(
            tf,
            *(
                lambda x: [
                    tf.while_loop(
                        lambda a: a < 100.0, lambda a: a * x + 1.0, [x], maximum_iterations=n
                    ),
                    x,
                ]
            )(tf.constant(1.5)),
        ),
        np.int32,
    ),
    while_without_back_prop=given(
        0.3,
        lambda tf, x: (
            tf.gradients(
                tf.while_loop(
                    lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), [0, x], back_prop=False
                )[1],
                x,
            )[0]
            is None
            and x
        ),
    ),
    while_no_turn=given(
        9.0,
        lambda tf, x: slopes(
            tf, tf.while_loop(lambda a: a < 3.0, lambda a: a * 2.0, [x], maximum_iterations=3), x
        ),
    ),
    while_counted_no_turn=given(
        9.0,
        lambda tf, x: slopes(
            tf, tf.while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * 2.0), [0, x])[1], x
        ),
    ),
    while_limit_zero=given(
        0.3,
        lambda tf, x: tf.while_loop(
            lambda a: a < 3.0, lambda a: a * 2.0, [x], maximum_iterations=0
        ),
    ),
    while_limit_is_fed=given(
        3,
        lambda tf, n: tf.while_loop(
            lambda a: a < 100.0, lambda a: a * 2.0, [1.0], maximum_iterations=n
        ),
        np.int32,
    ),
    while_limit_and_counter=given(
        3.0,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < 9, lambda i, a: [i + 1, a * 2.0], [0, x], maximum_iterations=4
        ),
    ),
    while_of_a_nest=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda i, pair: i < 3,
            lambda i, pair: (i + 1, (pair[1], pair[0] + pair[1])),
            (0, (x, x * 2.0)),
        )[1],
    ),
    while_of_a_dictionary=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda i, d: i < 3,
            lambda i, d: (i + 1, {"a": d["b"], "b": d["a"] + 1.0}),
            (0, {"a": x, "b": x * 2.0}),
        )[1]["a"],
    ),
    while_return_same_structure=given(
        1.0,
        lambda tf, x: tf.while_loop(
            lambda a: a < 9.0, lambda a: [a * 2.0], [x], return_same_structure=True
        ),
    ),
    while_body_gives_a_list_of_one=given(
        1.0, lambda tf, x: tf.while_loop(lambda a: a < 9.0, lambda a: [a * 2.0], [x])
    ),
    while_body_gives_a_tuple_of_one=given(
        1.0, lambda tf, x: tf.while_loop(lambda a: a < 9.0, lambda a: (a * 2.0,), (x,))
    ),
    while_of_64_bits=given(
        1, lambda tf, x: tf.while_loop(lambda a: a < 2**40, lambda a: a * 3, [x]), np.int64
    ),
    while_of_two_widths=given(
        1.0,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < tf.constant(3, tf.int64),
            lambda i, a: (i + 1, a * 1.5),
            [tf.constant(0, tf.int64), x],
        ),
    ),
    while_within_while=given(
        PAIR,
        lambda tf, x: slopes(
            tf,
            tf.while_loop(
                lambda i, a: i < 3,
                lambda i, a: (
                    i + 1,
                    tf.while_loop(lambda j, b: j < 2, lambda j, b: (j + 1, b * x), [0, a])[1] + 1.0,
                ),
                [0, x],
            )[1],
            x,
        ),
    ),
    while_within_while_by_the_outer_counter=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < 3,
            lambda i, a: (
                i + 1,
                tf.while_loop(lambda j, b: j < i, lambda j, b: (j + 1, b * x), [0, a])[1] + 1.0,
            ),
            [0, x],
        )[1],
    ),
    while_with_cond=given(
        PAIR,
        lambda tf, x: slopes(
            tf,
            tf.while_loop(
                lambda i, a: i < 4,
                lambda i, a: (i + 1, tf.cond(tf.equal(i % 2, 0), lambda: a * x, lambda: a + 1.0)),
                [0, x],
            )[1],
            x,
        ),
    ),
    cond_with_while=both(
        lambda tf, p, x: tf.cond(
            p,
            lambda: tf.while_loop(lambda i, a: i < 4, lambda i, a: (i + 1, a * x), [0, x])[1],
            lambda: x,
        )
    ),
    while_true_to_the_shape=given(
        ROWS,
        lambda tf, x: tf.while_loop(
            lambda i, a: i < 2,
            lambda i, a: (i + 1, a + x),
            [0, x],
            [tf.TensorShape([]), tf.TensorShape([None, 2])],
        )[1],
    ),
    while_condition_gives_a_number=given(
        1, lambda tf, x: tf.while_loop(lambda i: i, lambda i: i + 1, [x]), np.int32
    ),
    while_condition_gives_a_vector=given(
        PAIR, lambda tf, x: tf.while_loop(lambda a: a < 9.0, lambda a: a * 2.0, [x])
    ),
    while_condition_is_no_function=given(1.0, lambda tf, x: tf.while_loop(True, lambda a: a, [x])),
    while_body_is_no_function=given(1.0, lambda tf, x: tf.while_loop(lambda a: a < 1.0, x, [x])),
    while_without_variables=lambda tf: tf.while_loop(lambda: True, lambda: None, []),
    while_body_gives_fewer=given(
        1.0,
        lambda tf, x: tf.while_loop(lambda i, a: i < 3, lambda i, a: i + 1, [tf.constant(0), x]),
    ),
    while_body_gives_more=given(
        1.0, lambda tf, x: tf.while_loop(lambda a: a < 3.0, lambda a: (a, a), [x])
    ),
    while_body_changes_the_type=given(
        1,
        lambda tf, x: tf.while_loop(lambda a: a < 3, lambda a: tf.cast(a, tf.float32), [x]),
        np.int32,
    ),
    while_body_changes_the_shape=given(
        PAIR,
        lambda tf, x: tf.while_loop(lambda a: tf.size(a) < 9, lambda a: tf.concat([a, a], 0), [x]),
    ),
    while_invariants_do_not_fit=given(
        PAIR,
        lambda tf, x: tf.while_loop(
            lambda a: a[0] < 9.0, lambda a: a * 2.0, [x], [tf.TensorShape([3])]
        ),
    ),
)


@case
def while_reads_variables(tf: Any) -> Any:
    w = tf.Variable([[0.5, 0.1], [0.2, 0.5]])
    state = tf.while_loop(
        lambda i, s: i < 5, lambda i, s: (i + 1, tf.tanh(tf.matmul(s, w))), [0, tf.ones([1, 2])]
    )[1]
    return run(tf, slopes(tf, tf.reduce_sum(state), w))


@case
def while_trains(tf: Any) -> Any:
    w = tf.Variable([[0.5, 0.1], [0.2, 0.5]])
    state = tf.while_loop(
        lambda i, s: i < 5, lambda i, s: (i + 1, tf.tanh(tf.matmul(s, w))), [0, tf.ones([1, 2])]
    )[1]
    train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.square(state - 1.0)))
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(train)
        sess.run(train)
        return sess.run(w)


@case
def while_draws_other_numbers_in_each_turn(tf: Any) -> Any:
    drawn = tf.while_loop(
        lambda i, a: i < 4,
        lambda i, a: (i + 1, tf.concat([a[1:], tf.random_uniform([1])], 0)),
        [0, tf.zeros([4])],
    )[1]
    found = run(tf, drawn)
    return [len(set(found.tolist())), bool(np.all((found > 0) & (found < 1)))]


@case
def while_after_an_update(tf: Any) -> Any:
    v = tf.Variable(1.0)
    with tf.control_dependencies([tf.assign_add(v, 1.0)]):
        y = tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * v.read_value()), [0, 1.0])[1]
    return run(tf, y)


@case
def while_makes_variables(tf: Any) -> Any:
    def body(i: Any, a: Any) -> Any:
        with tf.variable_scope("layer", reuse=tf.AUTO_REUSE):
            w = tf.get_variable("w", [], initializer=tf.constant_initializer(2.0))
        return i + 1, a * w

    with tf.variable_scope("layer"):
        tf.get_variable("w", [], initializer=tf.constant_initializer(2.0))
    y = tf.while_loop(lambda i, a: i < 3, body, [0, 1.0])[1]
    return [[v.op.name for v in tf.global_variables()], run(tf, y)]


# -- map_fn, scan, folds -------------------------------------------------------------------------------------------

cases(
    map_fn_of_rows=given(ROWS, lambda tf, x: slopes(tf, tf.map_fn(lambda r: r * r, x), x)),
    map_fn_of_an_unknown_number=given(
        ROWS, lambda tf, x: tf.map_fn(tf.reduce_sum, x), shape=[None, 2]
    ),
    map_fn_of_two=given(
        ROWS, lambda tf, x: tf.map_fn(lambda p: p[0] * p[1], (x, x + 1.0), dtype=tf.float32)
    ),
    map_fn_gives_two=given(
        ROWS, lambda tf, x: tf.map_fn(lambda r: (r, -r), x, dtype=(tf.float32, tf.float32))
    ),
    map_fn_gives_another_type=given(
        ROWS, lambda tf, x: tf.map_fn(lambda r: tf.cast(r, tf.int32), x, dtype=tf.int32)
    ),
    map_fn_type_not_said=given(ROWS, lambda tf, x: tf.map_fn(lambda r: tf.cast(r, tf.int32), x)),
    map_fn_type_said_wrong=given(ROWS, lambda tf, x: tf.map_fn(lambda r: r, x, dtype=tf.int32)),
    map_fn_of_a_literal=lambda tf: run(
        tf, tf.map_fn(lambda n: n * n, np.array([1, 2, 3], np.int32))
    ),
    map_fn_of_a_scalar=given(1.0, lambda tf, x: tf.map_fn(lambda r: r, x)),
    map_fn_of_no_rows=given(
        np.zeros([0, 2]), lambda tf, x: tf.map_fn(lambda r: r * 2.0, x), shape=[None, 2]
    ),
    map_fn_is_no_function=given(ROWS, lambda tf, x: tf.map_fn(x, x)),
    map_fn_without_back_prop=given(
        PAIR,
        lambda tf, x: (
            tf.gradients(tf.map_fn(lambda r: r * r, x, back_prop=False), x)[0] is None and x
        ),
    ),
    scan_sums=given(ROWS, lambda tf, x: slopes(tf, tf.scan(lambda a, r: a * r, x), x)),
    scan_from_a_value=given(
        ROWS, lambda tf, x: tf.scan(lambda a, r: a + r, x, initializer=tf.constant([10.0, 20.0]))
    ),
    scan_of_another_shape=given(
        ROWS, lambda tf, x: tf.scan(lambda a, r: a + tf.reduce_sum(r), x, initializer=0.0)
    ),
    scan_backwards=given(ROWS, lambda tf, x: tf.scan(lambda a, r: a - 2.0 * r, x, reverse=True)),
    scan_backwards_from_a_value=given(
        ROWS, lambda tf, x: tf.scan(lambda a, r: a - r, x, tf.zeros([2]), reverse=True)
    ),
    scan_of_two=given(
        PAIR,
        lambda tf, x: tf.scan(
            lambda a, r: (a[0] + r[0], a[1] * r[1]), (x, x), initializer=(0.0, 1.0)
        ),
    ),
    scan_changes_the_type=given(PAIR, lambda tf, x: tf.scan(lambda a, r: tf.cast(a, tf.int32), x)),
    scan_of_an_unknown_number=given(
        ROWS, lambda tf, x: tf.scan(lambda a, r: a + r, x), shape=[None, 2]
    ),
    foldl_subtracts=given(
        PAIR + [5.0], lambda tf, x: slopes(tf, tf.foldl(lambda a, r: a - r * 2.0, x), x)
    ),
    foldl_from_a_value=given(
        PAIR, lambda tf, x: tf.foldl(lambda a, r: a - r, x, initializer=100.0)
    ),
    foldr_subtracts=given(PAIR + [5.0], lambda tf, x: tf.foldr(lambda a, r: a - r * 2.0, x)),
    foldr_from_a_value=given(
        PAIR, lambda tf, x: tf.foldr(lambda a, r: a - r, x, initializer=100.0)
    ),
    foldl_is_no_function=given(PAIR, lambda tf, x: tf.foldl(1, x)),
)


@case
def scan_is_a_recurrent_network(tf: Any) -> Any:
    w = tf.Variable([[0.5, 0.1], [0.2, 0.5]])
    x = tf.placeholder(tf.float32, [None, 3, 2])
    states = tf.scan(lambda h, r: tf.tanh(tf.matmul(h, w) + r), x, initializer=tf.zeros([3, 2]))
    loss = tf.reduce_sum(states[-1])
    return run(
        tf, [states, *tf.gradients(loss, [w, x])], {x: np.arange(24.0).reshape(4, 3, 2) / 24}
    )


# -- TensorArray ---------------------------------------------------------------------------------------------------


def _squares(tf: Any, x: Any, size: Any, **kwargs: Any) -> Any:
    rows = tf.TensorArray(tf.float32, size=size, **kwargs)
    return tf.while_loop(
        lambda i, _: i < size, lambda i, a: (i + 1, a.write(i, x[i] * x[i])), [0, rows]
    )[1].stack()


def _written(tf: Any, value: Any, **kwargs: Any) -> Any:
    return tf.TensorArray(tf.float32, size=2, **kwargs).write(0, value).write(1, value + 1.0)


cases(
    array_in_a_loop=given(ROWS, lambda tf, x: slopes(tf, _squares(tf, x, 3), x)),
    array_in_a_loop_by_a_shape=given(
        ROWS, lambda tf, x: slopes(tf, _squares(tf, x, tf.shape(x)[0]), x), shape=[None, 2]
    ),
    array_of_rows_of_unknown_size=given(
        ROWS, lambda tf, x: slopes(tf, _squares(tf, x, tf.shape(x)[0]), x), shape=[None, None]
    ),
    array_of_a_known_shape=given(ROWS, lambda tf, x: _squares(tf, x, 3, element_shape=[2])),
    array_of_scalars=given(PAIR, lambda tf, x: _squares(tf, x, 2)),
    array_outside=given(PAIR, lambda tf, x: slopes(tf, _written(tf, x).stack(), x)),
    array_read=given(PAIR, lambda tf, x: _written(tf, x).read(1)),
    array_gather=given(PAIR, lambda tf, x: _written(tf, x).gather([1, 0])),
    array_concat=given(PAIR, lambda tf, x: _written(tf, x).concat()),
    array_size=given(PAIR, lambda tf, x: _written(tf, x).size()),
    array_unstack=given(ROWS, lambda tf, x: tf.TensorArray(tf.float32, 3).unstack(x).read(1)),
    array_scatter=given(
        PAIR, lambda tf, x: tf.TensorArray(tf.float32, 2).scatter([1, 0], x).stack()
    ),
    array_unstack_in_a_loop=given(
        ROWS,
        lambda tf, x: slopes(
            tf,
            tf.while_loop(
                lambda i, total, _: i < 3,
                lambda i, total, a: (i + 1, total * 0.5 + a.read(i), a),
                [0, tf.zeros([2]), tf.TensorArray(tf.float32, 3).unstack(x)],
            )[1],
            x,
        ),
    ),
    array_captured_by_a_loop=given(
        ROWS,
        lambda tf, x: (
            lambda rows: tf.while_loop(
                lambda i, total: i < 3,
                lambda i, total: (i + 1, total + rows.read(i)),
                [0, tf.zeros([2])],
            )[1]
        )(tf.TensorArray(tf.float32, 3, clear_after_read=False).unstack(x)),
    ),
    array_of_two_types=given(
        PAIR, lambda tf, x: tf.TensorArray(tf.int32, size=2).write(0, x).stack()
    ),
    array_of_two_shapes=given(
        PAIR, lambda tf, x: tf.TensorArray(tf.float32, size=2).write(0, x).write(1, 1.0).stack()
    ),
    array_of_another_shape=given(
        PAIR,
        lambda tf, x: tf.TensorArray(tf.float32, size=1, element_shape=[3]).write(0, x).stack(),
    ),
    array_without_a_size=lambda tf: tf.TensorArray(tf.float32),
    array_that_grows=given(
        PAIR,
        lambda tf, x: tf.TensorArray(tf.float32, size=0, dynamic_size=True).write(0, x).stack(),
    ),
    array_write_beyond=given(
        2,
        lambda tf, n: tf.TensorArray(tf.float32, size=1, element_shape=[]).write(n, 1.0).stack(),
        np.int32,
    ),
    array_read_beyond=given(
        2, lambda tf, n: tf.TensorArray(tf.float32, 2).unstack([1.0, 2.0]).read(n), np.int32
    ),
    array_read_unwritten=lambda tf: run(
        tf, tf.TensorArray(tf.float32, size=2, element_shape=[]).write(1, 5.0).read(0)
    ),
)


@case
def array_in_a_loop_in_a_loop(tf: Any) -> Any:
    x = tf.placeholder(tf.float32, [3, 2])

    def row(i: Any, rows: Any) -> Any:
        inner = tf.TensorArray(tf.float32, size=2)
        _, inner = tf.while_loop(
            lambda j, _: j < 2, lambda j, a: (j + 1, a.write(j, x[i, j] * 10.0)), [0, inner]
        )
        return i + 1, rows.write(i, inner.stack())

    _, rows = tf.while_loop(lambda i, _: i < 3, row, [0, tf.TensorArray(tf.float32, size=3)])
    return run(tf, slopes(tf, rows.stack(), x), {x: ROWS})


@case
def array_is_a_recurrent_network(tf: Any) -> Any:
    w = tf.Variable([[0.5, 0.1], [0.2, 0.5]])
    x = tf.placeholder(tf.float32, [None, None, 2])
    steps = tf.shape(x)[0]
    inputs = tf.TensorArray(tf.float32, size=steps).unstack(x)

    def step(t: Any, h: Any, outputs: Any) -> Any:
        h = tf.tanh(tf.matmul(h, w) + inputs.read(t))
        return t + 1, h, outputs.write(t, h)

    begin = [tf.constant(0), tf.zeros([tf.shape(x)[1], 2]), tf.TensorArray(tf.float32, size=steps)]
    _, last, outputs = tf.while_loop(lambda t, *_: t < steps, step, begin)
    loss = tf.reduce_sum(outputs.stack() * 2.0) + tf.reduce_sum(last)
    return run(tf, [last, *tf.gradients(loss, [w, x])], {x: np.arange(24.0).reshape(4, 3, 2) / 24})


@case
def array_in_a_cond(tf: Any) -> Any:
    pred, x = tf.placeholder(tf.bool, []), tf.placeholder(tf.float32, [])
    rows = tf.TensorArray(tf.float32, size=2, element_shape=[]).write(0, x)
    y = tf.cond(
        pred, lambda: rows.write(1, x * 2.0).stack(), lambda: rows.write(1, x * 3.0).stack()
    )
    with tf.Session() as sess:
        return [sess.run(y, {pred: value, x: 1.0}) for value in (True, False)]


# -- slices from computed places -----------------------------------------------------------------------------------

TEN = np.arange(10.0)
GRID = np.arange(12.0).reshape(3, 4)


def at(value: Any, place: int, build: Callable[[Any, Any, Any], Any], shape: Any = ()) -> Case:
    """``build(tf, x, i)`` of a fed ``x`` and a fed place."""

    def program(tf: Any) -> Any:
        x = tf.placeholder(tf.float32, np.shape(value) if shape == () else shape)
        i = tf.placeholder(tf.int32, [])
        return run(tf, build(tf, x, i), {x: value, i: place})

    return program


cases(
    slice_from_a_fed_place=at(TEN, 3, lambda tf, x, i: tf.slice(x, [i], [4])),
    slice_from_a_fed_vector=at(TEN, 3, lambda tf, x, i: tf.slice(x, tf.expand_dims(i, 0), [4])),
    slice_from_a_stack=at(GRID, 1, lambda tf, x, i: tf.slice(x, tf.stack([i, 0]), [2, 3])),
    slice_slopes=at(TEN, 3, lambda tf, x, i: tf.gradients(tf.slice(x, [i], [4]) ** 2.0, x)),
    slice_of_rows=at(GRID, 1, lambda tf, x, i: tf.slice(x, [i, 1], [2, 2])),
    slice_of_rows_to_the_end_of_others=at(GRID, 1, lambda tf, x, i: tf.slice(x, [i, 1], [2, -1])),
    slice_of_unknown_rows=at(
        GRID, 1, lambda tf, x, i: tf.slice(x, [i, 0], [2, -1]), shape=[None, 4]
    ),
    slice_by_a_shape=at(
        GRID, 0, lambda tf, x, i: tf.slice(x, [i, 0], [tf.shape(x)[0], 2]), shape=[None, 4]
    ),
    slice_beyond=at(TEN, 8, lambda tf, x, i: tf.slice(x, [i], [4])),
    slice_below=at(TEN, -1, lambda tf, x, i: tf.slice(x, [i], [4])),
    slice_of_more_than_there_is=at(TEN, 0, lambda tf, x, i: tf.slice(x, [i], [11])),
    slice_of_a_fed_size=at(TEN, 3, lambda tf, x, i: tf.slice(x, [0], [i])),
    slice_to_the_end_from_a_fed_place=at(TEN, 3, lambda tf, x, i: tf.slice(x, [i], [-1])),
    getitem_from_to=at(TEN, 3, lambda tf, x, i: x[i : i + 2]),
    getitem_blocks=at(TEN, 1, lambda tf, x, i: x[i * 3 : (i + 1) * 3]),
    getitem_blocks_by_functions=at(
        TEN, 1, lambda tf, x, i: x[tf.multiply(i, 3) : tf.add(tf.multiply(tf.add(i, 1), 3), -1)]
    ),
    getitem_before=at(TEN, 5, lambda tf, x, i: x[i - 2 : i]),
    getitem_of_64_bits=at(
        TEN, 5, lambda tf, x, i: x[tf.cast(i, tf.int64) : tf.cast(i, tf.int64) + 2]
    ),
    getitem_of_columns=at(GRID, 1, lambda tf, x, i: x[:, i : i + 2]),
    getitem_of_last_columns=at(GRID, 1, lambda tf, x, i: x[..., i : i + 2]),
    getitem_of_rows_and_columns=at(GRID, 1, lambda tf, x, i: x[i : i + 2, 1:3]),
    getitem_of_rows_and_a_column=at(GRID, 1, lambda tf, x, i: x[i : i + 2, 2]),
    getitem_of_rows_and_a_computed_column=at(GRID, 1, lambda tf, x, i: x[i : i + 2, i]),
    getitem_with_a_new_axis=at(GRID, 1, lambda tf, x, i: x[None, i : i + 2]),
    getitem_slopes=at(GRID, 1, lambda tf, x, i: tf.gradients(x[i : i + 2] ** 2.0, x)),
    getitem_of_nothing=at(TEN, 3, lambda tf, x, i: x[i:i]),
    getitem_of_a_variable=at(TEN, 3, lambda tf, x, i: tf.Variable(TEN)[i : i + 2]),
    getitem_partly_beyond=at(TEN, 9, lambda tf, x, i: x[i : i + 2]),
    getitem_to_a_computed_end=at(TEN, 3, lambda tf, x, i: x[:i]),
    getitem_from_a_computed_begin=at(TEN, 3, lambda tf, x, i: x[i:]),
    getitem_between_two=at(TEN, 3, lambda tf, x, i: x[i : i * 2]),
    strided_slice_blocks=at(
        GRID, 1, lambda tf, x, i: tf.strided_slice(x, [0, i * 2], [3, (i + 1) * 2])
    ),
    strided_slice_with_strides=at(TEN, 1, lambda tf, x, i: tf.strided_slice(x, [i], [i + 2], [1])),
    strided_slice_of_a_computed_size=at(TEN, 1, lambda tf, x, i: tf.strided_slice(x, [0], [i])),
)


@case
def slices_are_batches_of_a_producer(tf: Any) -> Any:
    data, steps = tf.constant(np.arange(24).reshape(2, 12)), 3
    i = tf.placeholder(tf.int64, [])
    x = tf.strided_slice(data, [0, i * steps], [2, (i + 1) * steps])
    y = tf.slice(data, [0, i * steps + 1], [2, steps])
    x.set_shape([2, steps])
    with tf.Session() as sess:
        return [sess.run([x, y], {i: n}) for n in range(3)]


@case
def losses_over_a_sample_train(tf: Any) -> Any:
    weights, offsets = (
        tf.Variable(np.arange(12.0).reshape(6, 2) / 10, dtype=tf.float32),
        tf.Variable(tf.zeros([6])),
    )
    inputs = tf.Variable([[1.0, -2.0], [3.0, 4.0]])
    sample = (
        tf.constant([0, 3, 1], tf.int64),
        tf.constant([[0.5], [0.25]]),
        tf.constant([0.9, 0.4, 0.7]),
    )
    kwargs = {"num_sampled": 3, "num_classes": 6, "sampled_values": sample}
    labels = tf.constant([[4], [5]], tf.int64)
    loss = tf.reduce_mean(
        tf.nn.nce_loss(weights, offsets, labels, inputs, **kwargs)
    ) + tf.reduce_mean(tf.nn.sampled_softmax_loss(weights, offsets, labels, inputs, **kwargs))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(train)
        return sess.run([loss, weights, offsets, inputs])


cases(
    gradients_of_what_is_not_connected=lambda tf: [
        g is None
        for x in [tf.Variable([1.5, -2.5])]
        for y in (
            tf.floor(x), tf.ceil(x), tf.round(x), tf.rint(x), tf.stop_gradient(x), tf.floordiv(x, 2.0), tf.sign(x),
            tf.cast(tf.cast(x, tf.int32), tf.float32), tf.constant([1.0, 2.0]), tf.ones_like(x), tf.zeros_like(x),
            tf.cast(x > 0.0, tf.float32), tf.cast(tf.argmax(x, 0), tf.float32), tf.stop_gradient(x) * x,
            x * tf.floor(x),
        )
        for g in tf.gradients(y, x)
    ],
    gradients_of_labels=lambda tf: [
        g is None
        for labels, logits in [(tf.Variable([[0.5, 0.5]]), tf.Variable([[1.0, 2.0]]))]
        for loss in (
            tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits),
            tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits),
            tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits),
        )
        for g in tf.gradients(loss, [labels, logits])
    ],
)  # fmt: skip
