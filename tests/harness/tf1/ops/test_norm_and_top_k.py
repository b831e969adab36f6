"""tf.norm over one axis, all, or two, and what tf.nn.top_k gives: the figures are TensorFlow 2.21's."""

from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate

X = np.arange(6, dtype=np.float32).reshape(2, 3) - 2


@pytest.mark.parametrize(
    ("ord", "axis", "expected"),
    [
        ("euclidean", None, 4.358899),
        (3, None, 3.556893),
        ("euclidean", 0, [2.236068, 2.236068, 3]),
        (np.inf, 1, [2, 3]),
        ("euclidean", [0, 1], 4.358899),
        ("fro", (0, 1), 4.358899),
        ("fro", [-2, -1], 4.358899),
        (1, (0, 1), 3),
        (np.inf, [0, 1], 6),
    ],
)
def test_norms_match_tensorflow(ord: Any, axis: Any, expected: Any) -> None:  # noqa: A002 - tf.norm's own name
    """Norms over axes match TensorFlow."""
    got, kept = evaluate(lambda: [tf.norm(X, ord, axis), tf.norm(X, ord, axis, keep_dims=True)])
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert kept.shape == (
        (1, 1) if axis is None or isinstance(axis, list | tuple) else {0: (1, 3), 1: (2, 1)}[axis]
    )
    np.testing.assert_allclose(kept.ravel(), np.ravel(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("ord", "axis", "said"),
    [
        ("euclidean", [1], "'axis' must be None, an integer, or a tuple of 2 unique integers"),
        (1, (0, 0), "'axis' must be None"),
        (3, (0, 1), "'ord' must be a supported matrix norm"),
        ("fro", 1, "'ord' must be a supported vector norm, got fro"),
    ],
)
def test_impossible_norms_are_refused(ord: Any, axis: Any, said: str) -> None:  # noqa: A002
    """Impossible norms are refused with TensorFlow's messages."""
    with tf.Graph().as_default(), pytest.raises(ValueError, match=said):
        tf.norm(X, ord, axis)


def test_top_k_has_values_and_indices() -> None:
    """top_k has values and indices, as a tuple and by name."""
    with tf.Graph().as_default():
        found = tf.nn.top_k(tf.constant([1.0, 3.0, 2.0]), 2)
        values, indices = found
        assert (values, indices) == (found.values, found.indices)
        with tf.Session() as sess:
            assert sess.run(found.values).tolist() == [3, 2]
            fetched = sess.run(found)
    assert fetched.values.tolist() == [3, 2] and fetched.indices.tolist() == [1, 2]
    assert fetched.indices.dtype == np.int32
