"""tf.Variable, tf.get_variable and scopes: argument orders, sharing by name, collections."""

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate


@pytest.fixture(autouse=True)
def own_graph():
    with tf.Graph().as_default():
        yield


def test_variable_arguments_have_tensorflows_order() -> None:
    """The arguments of Variable have TensorFlow's order, and impossible arguments are refused."""
    tf.Variable([1.0], False, ["mine"], name="a")
    b = tf.Variable(initial_value=2, name="b", dtype=tf.float32)
    assert [v.name for v in tf.get_collection("mine")] == ["a:0"]
    assert tf.trainable_variables() == [b] == tf.all_variables() and b.dtype == tf.float32
    with pytest.raises(ValueError, match="initial_value must be specified"):
        tf.Variable()
    with pytest.raises(ValueError, match="expected shape"):
        tf.Variable([1.0, 2.0], expected_shape=[3])
    with pytest.raises(ValueError, match="one static shape"):
        tf.Variable([1.0], validate_shape=False)


def test_every_variable_is_tf_variable() -> None:
    """Every variable, of the runtime too, is an instance of tf.Variable."""
    import runtime as rt

    assert isinstance(rt.Variable(1.0), tf.Variable) and isinstance(tf.Variable(1.0), tf.Variable)
    assert not isinstance(tf.constant(1.0), tf.Variable)
    assert tf.Variable(np.zeros((2, 3))).get_shape().as_list() == [2, 3]


def test_assignments_accept_use_locking() -> None:
    """Assignments accept use_locking where TensorFlow does."""
    v = tf.Variable([1.0, 2.0])
    n = tf.Variable(0, name="n")
    ops = {
        "assign": lambda: v.assign([3.0, 4.0], True),
        "add": lambda: v.assign_add([1, 1], use_locking=True),
        "sub": lambda: tf.assign_sub(v, tf.constant([0.5, 0.5]), False, "less"),
        "assign function": lambda: tf.assign(v, v * 2.0, None, True),
        "count": lambda: tf.assign_add(n, 1),
    }
    made = {name: make() for name, make in ops.items()}
    with tf.Session() as sess:
        sess.run(tf.initialize_all_variables())
        got = {name: sess.run(op).tolist() for name, op in made.items()}
    assert got == {
        "assign": [3, 4],
        "add": [4, 5],
        "sub": [3.5, 4.5],
        "assign function": [7, 9],
        "count": 1,
    }
    assert made["sub"].op.name == "less"


def test_rows_are_updated_in_place() -> None:
    """The scatter functions update rows in place."""
    v = tf.Variable(np.zeros((3, 2), np.float32))
    rows = tf.placeholder(tf.int32, [None])
    ones = np.ones((2, 2))
    ops = [
        tf.scatter_update(v, [0], [[5.0, 6.0]]),
        tf.scatter_add(v, rows, ones),
        tf.scatter_sub(v, [1], tf.constant([[2.0, 2.0]])),
        tf.scatter_mul(v, [0], [[2.0, 2.0]]),
    ]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        for op in ops[:1]:
            sess.run(op)
        assert sess.run(ops[1], {rows: [1, 1]}).tolist() == [[5, 6], [2, 2], [0, 0]]
        assert sess.run(ops[2]).tolist() == [[5, 6], [0, 0], [0, 0]]
        assert sess.run(ops[3]).tolist()[0] == [10, 12]


def test_load_adds_nothing_to_graph() -> None:
    """load sets a value without an addition to the graph."""
    v = tf.Variable([1.0, 2.0])
    tf.get_default_graph().finalize()
    with tf.Session():
        v.load([5, 6])
        assert v.eval().tolist() == [5, 6]


def test_variable_may_begin_with_anothers_value() -> None:
    """A variable may begin with another variable's initial value."""
    w = tf.Variable(tf.random_normal([3]), name="w")
    twice = tf.Variable(w.initialized_value() * 2.0, name="twice")
    assert tf.Variable(tf.truncated_normal([2, 2], stddev=0.1)).get_shape() == [2, 2]
    with tf.Session() as sess:
        sess.run(w.initializer)
        sess.run(twice.initializer)
        first, second = sess.run([w, twice])
    np.testing.assert_allclose(second, first * 2)


def test_get_variable_makes_and_finds() -> None:
    """get_variable makes a variable or finds it, as the scope's reuse says."""

    def layer() -> tf.Variable:
        return tf.get_variable("w", [2, 3], initializer=tf.ones_initializer())

    with tf.variable_scope("net") as scope:
        made = layer()
        assert made.name == "net/w:0" and tf.get_variable_scope().name == "net"
        with pytest.raises(ValueError, match="net/w already exists, disallowed"):
            layer()
        scope.reuse_variables()
        assert layer() is made
        with pytest.raises(ValueError, match="net/new does not exist"):
            tf.get_variable("new", [1])
    with tf.variable_scope("net", reuse=True):
        assert layer() is made
        with pytest.raises(ValueError, match=r"specified shape \(3, 3\) and found shape \(2, 3\)"):
            tf.get_variable("w", [3, 3])
        with pytest.raises(ValueError, match="specified dtype int32"):
            tf.get_variable("w", [2, 3], tf.int32)
    with tf.variable_scope(scope):
        assert tf.get_variable_scope().reuse is True
    with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
        assert layer() is made and tf.get_variable("bias", [3]).name == "net/bias:0"
    assert tf.get_variable_scope().name == "" and len(tf.global_variables()) == 2


def test_scopes_pass_on_their_defaults() -> None:
    """Nested scopes pass on initializer, regularizer and dtype."""
    with tf.variable_scope(
        "outer",
        initializer=tf.constant_initializer(4.0),
        regularizer=tf.nn.l2_loss,
        dtype=tf.float64,
    ):
        with tf.variable_scope("inner"):
            v = tf.get_variable("v", [2])
            product = tf.multiply(v, 2.0)
        u = tf.get_variable("u", initializer=np.array([1.0, 2.0]), regularizer=lambda _: None)
    assert (v.name, v.dtype, product.name) == ("outer/inner/v:0", tf.float64, "outer/inner/Mul:0")
    assert u.get_shape().as_list() == [2]
    losses = tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES)
    assert [loss.name for loss in losses] == ["outer/inner/v/Regularizer/L2Loss:0"]
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        assert sess.run(losses) == [16.0]


def test_name_scopes_are_new_each_time() -> None:
    """A name scope does not count for get_variable, and is numbered each time."""
    with tf.name_scope("shown"):
        v = tf.get_variable("v", [1])
        made = tf.Variable(1.0, name="made")
    with tf.variable_scope("s"):
        first = tf.constant(1)
    with tf.variable_scope("s"):
        second = tf.constant(1)
    assert (v.name, made.name) == ("v:0", "shown/made:0")
    assert (first.name, second.name) == ("s/Const:0", "s_1/Const:0")
    with tf.variable_scope(None, "block"), tf.variable_scope(None, "block"):
        assert tf.get_variable("w", [1]).name == "block/block/w:0"
    with tf.variable_scope(None, default_name="block"):
        assert tf.get_variable("w", [1]).name == "block_1/w:0"
    with tf.variable_op_scope([v], "old", "unused"):
        assert tf.get_variable("w", [1]).name == "old/w:0"


def test_initializers_fill_their_shapes() -> None:
    """Each initializer fills its shape by its formula."""
    got = evaluate(
        lambda: {
            "zeros": tf.zeros_initializer()([2]),
            "ones": tf.ones_initializer(tf.float64)([2]),
            "constant": tf.constant_initializer([1, 2, 3])([3]),
            "uniform": tf.random_uniform_initializer(-2, -1, seed=1)([100]),
            "normal": tf.random_normal_initializer(5.0, 0.1)([100]),
            "truncated": tf.truncated_normal_initializer(stddev=0.1)([100]),
            "glorot": tf.glorot_uniform_initializer()([30, 20]),
            "scaling": tf.variance_scaling_initializer(2.0)([3, 3, 10, 20]),
            "unit": tf.uniform_unit_scaling_initializer()([12, 4]),
        }
    )
    assert got["zeros"].tolist() == [0, 0] and got["ones"].dtype == np.float64
    assert got["constant"].tolist() == [1, 2, 3]
    assert -2 <= got["uniform"].min() and got["uniform"].max() < -1
    assert abs(got["normal"].mean() - 5) < 0.1 and abs(got["truncated"]).max() <= 0.2
    assert (
        abs(got["glorot"]).max() <= (6 / 50) ** 0.5
        and abs(got["glorot"]).max() > 0.8 * (6 / 50) ** 0.5
    )
    # cut at two standard deviations, then widened
    assert abs(got["scaling"]).max() <= 2 * (2 / 90) ** 0.5 / 0.8796
    assert abs(got["unit"]).max() <= 0.5
    with pytest.raises(ValueError, match="its shape must be given"):
        tf.get_variable("x", initializer=tf.zeros_initializer())
    with pytest.raises(ValueError, match="not fully defined"):
        tf.get_variable("y", [None, 2])
    assert tf.get_variable("count", [2], tf.int32).dtype == tf.int32


def test_local_variables_are_apart() -> None:
    """Local variables are apart from the global ones and initialized by their own operation."""
    tf.Variable(1.0, name="shared")
    mine = tf.Variable(0, False, [tf.GraphKeys.LOCAL_VARIABLES], name="mine")
    assert tf.local_variables() == [mine] and [v.name for v in tf.global_variables()] == [
        "shared:0"
    ]
    with tf.Session() as sess:
        assert sess.run(tf.report_uninitialized_variables()).tolist() == [b"shared", b"mine"]
        sess.run(
            [
                tf.global_variables_initializer(),
                tf.initialize_local_variables(),
                tf.initialize_all_tables(),
            ]
        )
        assert sess.run(tf.report_uninitialized_variables()).size == 0
        assert sess.run(tf.is_variable_initialized(mine))


def test_initial_value_keeps_its_dtype() -> None:
    """get_variable with an initial value takes the dtype of the value, whatever dtype is asked for."""
    with tf.Graph().as_default():
        made = [
            tf.get_variable(f"v{i}", initializer=value, dtype=tf.float32)
            for i, value in enumerate((0, 1.5, np.zeros(2), tf.constant(True)))
        ]
    assert [v.dtype for v in made] == [tf.int32, tf.float32, tf.float64, tf.bool]
