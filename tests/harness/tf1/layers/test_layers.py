"""tf.layers, tf.losses, tf.contrib and slim: the variables that they make, what they compute, and what they refuse."""

from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import evaluate

slim = tf.contrib.slim


def names() -> dict[str, tuple[int, ...]]:
    return {v.name: v.shape for v in tf.global_variables()}


def test_layers_make_tensorflows_variables() -> None:
    """Layers make TensorFlow's variables, by name and shape."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 8, 8, 3])
        h = tf.layers.conv2d(x, 4, 3, padding="same", activation=tf.nn.relu)
        h = tf.layers.max_pooling2d(h, 2, 2)
        h = tf.layers.batch_normalization(h, training=True)
        h = tf.layers.dense(tf.layers.flatten(h), 10)
        with tf.variable_scope("head"):
            out = tf.layers.dense(tf.layers.dense(h, 5, name="hidden", use_bias=False), 2)
        assert h.get_shape().as_list() == [None, 10] and out.get_shape().as_list() == [None, 2]
        assert names() == {
            "conv2d/kernel:0": (3, 3, 3, 4),
            "conv2d/bias:0": (4,),
            "batch_normalization/gamma:0": (4,),
            "batch_normalization/beta:0": (4,),
            "batch_normalization/moving_mean:0": (4,),
            "batch_normalization/moving_variance:0": (4,),
            "dense/kernel:0": (64, 10),
            "dense/bias:0": (10,),
            "head/hidden/kernel:0": (10, 5),
            "head/dense/kernel:0": (5, 2),
            "head/dense/bias:0": (2,),
        }
        assert len(tf.trainable_variables()) == 9
        assert len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)) == 2


def test_dense_computes_and_shares_weights() -> None:
    """dense is a product and a sum, and shares its weights by name."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)

    def build() -> Any:
        first = tf.layers.dense(x, 5, name="layer", bias_initializer=tf.constant_initializer(2.0))
        again = tf.layers.dense(x, 5, name="layer", reuse=True)
        return first, again, tf.trainable_variables()[0]

    first, again, kernel = evaluate(build, init=True)
    np.testing.assert_allclose(first, x @ kernel + 2, rtol=1e-5)
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_pooling_and_convolution_know_layouts(data_format: str) -> None:
    """Pooling and convolution work in either layout."""
    image = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    first = data_format == "channels_first"
    x = image.transpose(0, 3, 1, 2) if first else image

    def build() -> Any:
        pooled = tf.layers.average_pooling2d(x, 2, 2, data_format=data_format)
        ones = tf.ones_initializer()
        return pooled, tf.layers.conv2d(
            x, 1, (2, 2), 2, data_format=data_format, kernel_initializer=ones
        )

    pooled, convolved = evaluate(build, init=True)
    np.testing.assert_allclose(pooled.ravel(), [2.5, 4.5, 10.5, 12.5])
    np.testing.assert_allclose(convolved, 4 * pooled, rtol=1e-6)


def test_batch_normalization_follows_fed_switch() -> None:
    """Batch normalization follows a fed switch between training and use."""
    data = np.random.default_rng(1).normal(3, 2, (64, 5)).astype(np.float32)
    with tf.Graph().as_default():
        training = tf.placeholder(tf.bool, [])
        out = tf.layers.batch_normalization(data, momentum=0.9, training=training)
        mean, variance = (v for v in tf.global_variables() if "moving" in v.name)
        update = tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            trained, _ = sess.run([out, update], {training: True})
            np.testing.assert_allclose(
                trained, (data - data.mean(0)) / np.sqrt(data.var(0) + 1e-3), rtol=1e-4, atol=1e-5
            )
            m, v = sess.run([mean, variance])
            np.testing.assert_allclose(m, 0.1 * data.mean(0), rtol=1e-5)
            np.testing.assert_allclose(v, 0.9 + 0.1 * data.var(0), rtol=1e-5)
            tested, _ = sess.run([out, update], {training: False})
            np.testing.assert_allclose(tested, (data - m) / np.sqrt(v + 1e-3), rtol=1e-4)
            np.testing.assert_array_equal(sess.run(mean), m)


def test_dropout_follows_fed_switch() -> None:
    """Dropout follows a constant or a fed switch."""
    x = np.ones((100, 100), np.float32)
    with tf.Graph().as_default():
        training = tf.placeholder(tf.bool, [])
        fed = tf.layers.dropout(x, 0.25, training=training)
        kept = slim.dropout(x, 0.75)
        with tf.Session() as sess:
            for out in (sess.run(fed, {training: True}), sess.run(kept)):
                assert (
                    set(np.unique(out)) == {np.float32(0), np.float32(1 / 0.75)}
                    and 0.7 < np.mean(out > 0) < 0.8
                )
            np.testing.assert_array_equal(sess.run(fed, {training: False}), x)
            np.testing.assert_array_equal(sess.run(tf.layers.dropout(x, 0.25)), x)


def test_unusable_layer_inputs_are_named() -> None:
    """A layer names the input or argument that it cannot use."""
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="last dimension.*dense.*'Placeholder:0'"):
            tf.layers.dense(tf.placeholder(tf.float32, [2, None]), 3)
        with pytest.raises(ValueError, match="conv2d.*needs 4 dimensions"):
            tf.layers.conv2d(tf.placeholder(tf.float32, [2, 3]), 3, 3)
        with pytest.raises(ValueError, match="channel dimension"):
            tf.layers.conv2d(tf.placeholder(tf.float32, [2, 3, 3, None]), 3, 3)
        with pytest.raises(ValueError, match="constraints are not in harness.tf1"):
            tf.layers.dense(tf.zeros([2, 3]), 3, kernel_constraint=tf.nn.relu)
        with pytest.raises(ValueError, match="data_format is channels_first or channels_last"):
            tf.layers.max_pooling2d(tf.zeros([1, 2, 2, 1]), 2, 2, data_format="NHWC")
        with pytest.raises(AttributeError, match=r"tf\.layers\.conv3d is not in harness\.tf1"):
            tf.layers.conv3d  # noqa: B018


def test_slim_takes_arguments_from_scopes() -> None:
    """Layers of slim have their own names and take arguments from a scope."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 8, 8, 3])
        with slim.arg_scope(
            [slim.conv2d, slim.fully_connected], weights_regularizer=slim.l2_regularizer(0.5)
        ) as given:
            with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm, stride=2):
                h = slim.conv2d(x, 4, [3, 3], scope="conv")
            h = slim.flatten(slim.max_pool2d(h, 2))
        with slim.arg_scope(given):
            h = slim.fully_connected(h, 6)
        out = tf.contrib.layers.linear(h, 2, scope="out")
        assert out.get_shape().as_list() == [None, 2]
        assert names() == {
            "conv/weights:0": (3, 3, 3, 4),
            "conv/BatchNorm/beta:0": (4,),
            "conv/BatchNorm/moving_mean:0": (4,),
            "conv/BatchNorm/moving_variance:0": (4,),
            "fully_connected/weights:0": (16, 6),
            "fully_connected/biases:0": (6,),
            "out/weights:0": (6, 2),
            "out/biases:0": (2,),
        }
        losses = tf.losses.get_regularization_losses()
        assert [loss.name.partition("/Reg")[0] for loss in losses] == [
            "conv/weights",
            "fully_connected/weights",
        ]
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            weights = [
                v
                for v in tf.trainable_variables()
                if v.name in ("conv/weights:0", "fully_connected/weights:0")
            ]
            for loss, value in zip(*sess.run([losses, weights]), strict=True):
                np.testing.assert_allclose(loss, 0.25 * np.sum(value**2), rtol=1e-5)
        with pytest.raises(ValueError, match="not decorated"):
            with slim.arg_scope([tf.nn.relu], name="x"):
                pass


def test_contrib_finds_the_global_step() -> None:
    """tf.contrib.framework finds the global step."""
    with tf.Graph().as_default():
        step = tf.contrib.framework.get_or_create_global_step()
        assert step is tf.train.get_global_step() is tf.contrib.framework.get_global_step()
        tf.contrib.framework.assert_global_step(step)
        with pytest.raises(TypeError):
            tf.contrib.framework.assert_global_step(tf.Variable(1.0))


LABELS = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], np.float32)
GUESSES = np.array([[0.5, 0.5], [0.9, 0.1], [0.2, 3.0]], np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean_squared_error", (LABELS - GUESSES) ** 2),
        ("absolute_difference", np.abs(LABELS - GUESSES)),
        (
            "huber_loss",
            np.where(
                np.abs(LABELS - GUESSES) <= 1,
                (LABELS - GUESSES) ** 2 / 2,
                np.abs(LABELS - GUESSES) - 0.5,
            ),
        ),
        ("hinge_loss", np.maximum(0, 1 - (2 * LABELS - 1) * GUESSES)),
        ("sigmoid_cross_entropy", np.logaddexp(0, GUESSES) - LABELS * GUESSES),
    ],
)
def test_loss_averages_weighted_elements(name: str, expected: np.ndarray) -> None:
    """A loss is the mean over the elements with a weight."""
    weights = np.array([[1.0], [0.0], [2.0]], np.float32)
    fn = getattr(tf.losses, name)

    def build() -> Any:
        made = [
            fn(LABELS, GUESSES),
            fn(LABELS, GUESSES, weights),
            fn(LABELS, GUESSES, reduction=tf.losses.Reduction.NONE),
        ]
        assert tf.losses.get_losses() == made
        return made

    plain, weighted, elements = evaluate(build)
    np.testing.assert_allclose(plain, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(weighted, (expected * weights).sum() / 4, rtol=1e-5)
    np.testing.assert_allclose(elements, expected, rtol=1e-5, atol=1e-6)


def test_cross_entropies_match_numpy() -> None:
    """The cross entropies of classes match NumPy and add up to the total loss."""
    onehot = np.eye(2, dtype=np.float32)[[1, 0, 1]]
    expected = -np.log(softmax(GUESSES)[np.arange(3), [1, 0, 1]])

    def build() -> Any:
        dense = tf.losses.softmax_cross_entropy(onehot, GUESSES)
        sparse = tf.losses.sparse_softmax_cross_entropy(
            [[1], [0], [1]], GUESSES, weights=[1.0, 0.0, 1.0]
        )
        smooth = tf.losses.softmax_cross_entropy(onehot, GUESSES, label_smoothing=0.2)
        return (
            dense,
            sparse,
            smooth,
            tf.losses.get_total_loss(),
            tf.losses.get_regularization_loss(),
        )

    dense, sparse, smooth, total, none = evaluate(build)
    np.testing.assert_allclose(dense, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(sparse, expected[[0, 2]].mean(), rtol=1e-5)
    mixed = -((onehot * 0.8 + 0.1) * np.log(softmax(GUESSES))).sum(-1)
    np.testing.assert_allclose(smooth, mixed.mean(), rtol=1e-5)
    np.testing.assert_allclose(total, dense + sparse + smooth, rtol=1e-6)
    assert none == 0


def test_impossible_losses_are_refused() -> None:
    """Losses that cannot be are refused."""
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="mean_squared_error.*incompatible"):
            tf.losses.mean_squared_error(np.zeros((2, 3)), np.zeros((2, 4)))
        with pytest.raises(ValueError, match="ReductionKey"):
            tf.losses.mean_squared_error([1.0], [2.0], reduction="mean")
        with pytest.raises(ValueError, match="no losses"):
            tf.losses.get_total_loss()
