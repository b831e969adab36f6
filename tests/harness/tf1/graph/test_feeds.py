"""What a session makes of an array of another dtype: TensorFlow 2.21's compat.v1 is the measure of every value here."""

import logging
import warnings
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf


def _fed(dtype: Any, value: Any) -> Any:
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = tf.placeholder(dtype, name="x")
        with tf.Session() as sess:
            return sess.run(tf.identity(x), {x: value})


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (tf.int32, np.ones([4]), [1, 1, 1, 1]),
        (tf.int64, np.float32(3), 3),
        (tf.int32, True, 1),
        (tf.bool, 1, True),
        (tf.bool, np.array([0.0, 1.0]), [False, True]),
        (tf.int32, [], []),
        (tf.uint8, np.array([255], np.int64), [255]),
        (tf.float32, 2**40, np.float32(2**40)),
        (tf.float32, np.array([0.1]), [np.float32(0.1)]),
        (tf.int32, np.array([1.0, 2.0], object), [1, 2]),
        (tf.float32, np.array([0.1, 2], object), np.float32([0.1, 2])),
        (tf.float16, 300, 300),
        (tf.complex64, np.ones([1]), [1]),
        (tf.bfloat16, [1.5], [1.5]),
    ],
    ids=repr,
)
def test_fitting_feeds_are_converted(dtype: Any, value: Any, expected: Any, caplog: Any) -> None:
    """A fed value that fits the placeholder's dtype is converted silently."""
    with caplog.at_level(logging.WARNING):
        got = _fed(dtype, value)
    assert got.dtype == dtype and np.array_equal(got, expected)
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        (tf.int32, 1.7, 1),
        (tf.int32, [-1.7], [-1]),
        (tf.int32, np.array([2**40]), [0]),
        (tf.int32, [2**40], [0]),
        (tf.uint8, np.array([300, 1]), [44, 1]),
        (tf.bool, [1.7], [True]),
        (tf.bool, [-1], [True]),
        (tf.int32, 1 + 2j, 1),
        (tf.float32, np.array([1 + 2j]), [1]),
        (tf.float32, [None, 1.0], [np.nan, 1]),
        (tf.int32, ["3"], [3]),
        (tf.float32, b"3.5", 3.5),
        (tf.int32, np.array([np.nan]), [-(2**31)]),
    ],
    ids=repr,
)
def test_unfitting_feeds_are_cast_and_logged(
    dtype: Any, value: Any, expected: Any, caplog: Any
) -> None:
    """A fed value that does not fit is cast as in TensorFlow, with one warning."""
    with caplog.at_level(logging.WARNING):
        got = _fed(dtype, value)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, expected)
    (told,) = [r.getMessage() for r in caplog.records]
    assert "'x:0'" in told and dtype.name in told and "\n" not in told, told


def test_cast_is_logged_once_per_placeholder(caplog: Any) -> None:
    """A cast is logged once for each placeholder."""
    with tf.Graph().as_default(), tf.Session() as sess, caplog.at_level(logging.WARNING):
        x, y = tf.placeholder(tf.int32, name="x"), tf.placeholder(tf.int32, name="y")
        for _ in range(3):
            assert sess.run([x + y], {x: 1.7, y: 2.2}) == [3]
    assert sorted(r.getMessage().split("'")[1] for r in caplog.records) == ["x:0", "y:0"]
    assert "1.7 became 1" in caplog.text and "2.2 became 2" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "value", "error", "said"),
    [
        (tf.int32, 2**40, TypeError, "does not fit int32"),
        (tf.uint8, 300, TypeError, "does not fit uint8"),
        (tf.bool, -1, TypeError, "does not become bool"),
        (tf.int32, "three", ValueError, "invalid literal"),
        (tf.int32, None, TypeError, "NoneType"),
        (tf.string, 1, TypeError, "takes strings"),
        (tf.float32, [[1.0], [1.0, 2.0]], ValueError, "cannot be made an array"),
    ],
    ids=repr,
)
def test_refused_feeds_name_the_placeholder(
    dtype: Any, value: Any, error: type[Exception], said: str
) -> None:
    """A value that TensorFlow refuses is refused with the placeholder's name."""
    with pytest.raises(error, match=f"'x:0'.*{said}"):
        _fed(dtype, value)


def test_every_session_converts_feeds() -> None:
    """Monitored and remote sessions convert feeds too."""
    with tf.Graph().as_default():
        labels = tf.placeholder(tf.int32, [None], name="labels")
        doubled = labels * 2
        step = tf.train.get_or_create_global_step()
        server = tf.train.Server.create_local_server()
        with tf.train.MonitoredTrainingSession(server.target) as sess:
            assert sess.run(doubled, {labels: np.array([1.7, 2.0])}).tolist() == [2, 4]
        with tf.Session(server.target) as sess:
            assert sess.run([doubled, step], {labels: np.ones(2)})[0].tolist() == [2, 2]
        server.stop()
