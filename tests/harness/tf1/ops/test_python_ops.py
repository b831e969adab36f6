"""``tf.py_func``: the errors of its function are errors of the step."""

import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate

ERRORS = [
    (ValueError("a value"), tf.errors.InvalidArgumentError),
    (TypeError("a type"), tf.errors.InvalidArgumentError),
    (StopIteration(), tf.errors.OutOfRangeError),
    (MemoryError(), tf.errors.ResourceExhaustedError),
    (NotImplementedError(), tf.errors.UnimplementedError),
    (ZeroDivisionError("by zero"), tf.errors.UnknownError),
    (tf.errors.DataLossError("lost"), tf.errors.DataLossError),
]


@pytest.mark.parametrize(("raised", "wanted"), ERRORS, ids=lambda e: getattr(e, "__name__", ""))
def test_function_error_is_step_error(raised: Exception, wanted: type[Exception]) -> None:
    """An exception of the function becomes TensorFlow's kind of error, with the exception as its cause."""

    def fail() -> None:
        raise raised

    with pytest.raises(wanted) as found:
        evaluate(lambda: tf.py_func(fail, [], tf.int64))
    assert raised in (found.value, found.value.__cause__)


def test_function_receives_fed_constant() -> None:
    """A value that is fed for a constant reaches the function that takes the constant."""
    with tf.Graph().as_default(), tf.Session() as sess:
        x = tf.constant([1.0, 2.0])
        given = tf.py_func(lambda a: a, [x], tf.float32)
        assert sess.run(given, {x: [5.0, 6.0]}).tolist() == [5.0, 6.0]
        assert sess.run(given).tolist() == [1.0, 2.0]
