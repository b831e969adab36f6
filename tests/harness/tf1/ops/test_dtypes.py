"""Data types by TensorFlow's names and rules; what TensorFlow 2.21's ``tf.as_dtype`` gives is the measure."""

import numpy as np
import pytest

import harness.tf1 as tf


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float", "float32"),
        ("double", "float64"),
        ("half", "float16"),
        ("bool", "bool"),
        ("string", "string"),
        (float, "float32"),
        (bool, "bool"),
        (object, "string"),
        (np.float64, "float64"),
        (np.dtype("f4"), "float32"),
        (np.str_, "string"),
        (np.dtype("S3"), "string"),
        ("float32_ref", "float32"),
        (tf.int64, "int64"),
    ],
    ids=repr,
)
def test_as_dtype_knows_tensorflows_names(given: object, expected: str) -> None:
    """as_dtype knows the names and types that TensorFlow knows."""
    assert tf.as_dtype(given).name == expected
    assert tf.placeholder(given).dtype == tf.as_dtype(expected)


@pytest.mark.parametrize(
    "given", ["int", "complex", "long", "f4", "single", int, complex, None], ids=repr
)
def test_as_dtype_refuses_other_names(given: object) -> None:
    """as_dtype refuses names and types that TensorFlow refuses."""
    with pytest.raises(TypeError, match="is not a data type.*"):
        tf.as_dtype(given)


def test_float_stays_at_32_bits() -> None:
    """A tutorial that says "float" stays at 32 bits."""
    with tf.Graph().as_default():
        x = tf.placeholder("float", [None, 3])
        w = tf.Variable(tf.zeros([3, 2], "float"))
        y = tf.nn.softmax(tf.matmul(x, w))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(y, 1), [0, 0]), "float"))
        ones = tf.ones([2], dtype=float)
        kept = tf.get_variable("kept", [2], "float")
        assert {t.dtype.name for t in (x, w, y, accuracy, ones, kept)} == {"float32"}
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            got = sess.run(accuracy, {x: np.ones([2, 3])})
            assert (got.dtype, got) == (np.float32, 1)


def test_dtypes_compare_with_names() -> None:
    """Dtypes compare with names and NumPy's types."""
    assert all(tf.float32 == same for same in ("float", np.float32, float, np.dtype("f4")))
    assert tf.float64 == "double" and all(
        tf.float64 != other for other in ("float", float, int, None)
    )
