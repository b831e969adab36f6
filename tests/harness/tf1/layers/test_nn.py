"""Neural network functions: argument orders and results, against numpy."""

import numpy as np
import pytest

import harness.tf1 as tf
from tests.harness.tf1.kit import check_all, evaluate

RNG = np.random.RandomState(0)
X = RNG.randn(2, 5, 6, 3).astype(np.float32)
K = RNG.randn(3, 3, 3, 4).astype(np.float32)
L = RNG.randn(4, 3).astype(np.float32)
Y = np.array([2, 0, 1, 1])
ONE_HOT = np.eye(3, dtype=np.float32)[Y]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _convolve(x: np.ndarray, kernel: np.ndarray, stride: int, padding: str) -> np.ndarray:
    """The definition: a sum over the window at every place."""
    height, width = kernel.shape[:2]
    if padding == "SAME":
        pads = [(0, 0)]
        for size, k in zip(x.shape[1:3], (height, width), strict=True):
            total = max((-(-size // stride) - 1) * stride + k - size, 0)
            pads.append((total // 2, total - total // 2))
        x = np.pad(x, [*pads, (0, 0)])
    rows, columns = (x.shape[1] - height) // stride + 1, (x.shape[2] - width) // stride + 1
    out = np.zeros((x.shape[0], rows, columns, kernel.shape[3]), np.float32)
    for r in range(rows):
        for c in range(columns):
            window = x[:, r * stride : r * stride + height, c * stride : c * stride + width]
            out[:, r, c] = np.tensordot(window, kernel, 3)
    return out


def _depthwise(kernel: np.ndarray) -> np.ndarray:
    """The kernel of a full convolution that keeps the channels apart."""
    full = np.zeros((*kernel.shape[:3], kernel.shape[2] * kernel.shape[3]), np.float32)
    for channel in range(kernel.shape[2]):
        for m in range(kernel.shape[3]):
            full[:, :, channel, channel * kernel.shape[3] + m] = kernel[:, :, channel, m]
    return full


def _pooled(x: np.ndarray, fn: str) -> np.ndarray:
    return getattr(x[:, :4, :6].reshape(2, 2, 2, 3, 2, 3), fn)((2, 4))


def _cases() -> dict:
    x, k, logits = tf.constant(X), tf.constant(K), tf.constant(L)
    xent = -np.log(_softmax(L))[np.arange(4), Y]
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    point = RNG.randn(1, 1, 12, 2).astype(np.float32)
    small = np.arange(9, dtype=np.float32).reshape(1, 3, 3, 1)
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    return {
        "relu": (tf.nn.relu(features=logits), np.maximum(L, 0)),
        "relu6": (tf.nn.relu6(logits * 9.0), np.clip(L * 9, 0, 6)),
        "elu": (tf.nn.elu(logits), np.where(L > 0, L, np.expm1(L))),
        "leaky_relu": (tf.nn.leaky_relu(logits, 0.1), np.where(L > 0, L, 0.1 * L)),
        "softplus": (tf.nn.softplus(logits), np.log1p(np.exp(L))),
        "softsign": (tf.nn.softsign(logits), L / (1 + abs(L))),
        "sigmoid": (tf.nn.sigmoid(logits), 1 / (1 + np.exp(-L))),
        "tanh": (tf.nn.tanh(logits), np.tanh(L)),
        "softmax": (tf.nn.softmax(logits), _softmax(L)),
        "softmax dim": (tf.nn.softmax(tf.transpose(logits), 0), _softmax(L).T),
        "log_softmax": (tf.nn.log_softmax(logits), np.log(_softmax(L))),
        "l2_loss": (tf.nn.l2_loss(logits), (L**2).sum() / 2),
        "l2_normalize": (
            tf.nn.l2_normalize(logits, 1),
            L / np.linalg.norm(L, axis=1, keepdims=True),
        ),
        "zero_fraction": (tf.nn.zero_fraction([0.0, 1.0, 0.0, 2.0]), np.float32(0.5)),
        "bias_add": (tf.nn.bias_add(x, [1.0, 2.0, 3.0]), X + [1, 2, 3]),
        "bias_add first": (tf.nn.bias_add(x, np.ones(5, np.float32) * 2, "NCHW"), X + 2),
        "xw_plus_b": (tf.nn.xw_plus_b(logits, L.T, np.ones(4, np.float32)), L @ L.T + 1),
        "relu_layer": (
            tf.nn.relu_layer(logits, L.T, np.ones(4, np.float32)),
            np.maximum(L @ L.T + 1, 0),
        ),
        "sparse xent": (
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=Y, logits=logits),
            xent,
        ),
        "sparse xent old": (tf.nn.sparse_softmax_cross_entropy_with_logits(logits, Y), xent),
        "xent": (tf.nn.softmax_cross_entropy_with_logits(logits=logits, labels=ONE_HOT), xent),
        "xent old": (tf.nn.softmax_cross_entropy_with_logits(logits, ONE_HOT), xent),
        "xent v2": (
            tf.nn.softmax_cross_entropy_with_logits_v2(labels=ONE_HOT, logits=logits),
            xent,
        ),
        "sigmoid xent": (
            tf.nn.sigmoid_cross_entropy_with_logits(labels=ONE_HOT, logits=logits),
            np.log1p(np.exp(L)) - L * ONE_HOT,
        ),
        "sigmoid xent old": (
            tf.nn.sigmoid_cross_entropy_with_logits(logits, ONE_HOT),
            np.log1p(np.exp(L)) - L * ONE_HOT,
        ),
        "weighted xent": (
            tf.nn.weighted_cross_entropy_with_logits(ONE_HOT, logits, 2.0),
            2 * ONE_HOT * np.log1p(np.exp(-L)) + (1 - ONE_HOT) * np.log1p(np.exp(L)),
        ),
        "in_top_k": (
            tf.nn.in_top_k(np.array([[3.0, 1, 2], [1, 2, 3]], np.float32), [2, 0], 2),
            np.array([True, False]),
        ),
        "top_k": (tf.nn.top_k([1.0, 5.0, 3.0], 2)[1], np.array([1, 2], np.int32)),
        "conv2d same": (tf.nn.conv2d(x, k, [1, 1, 1, 1], "SAME"), _convolve(X, K, 1, "SAME")),
        "conv2d valid": (
            tf.nn.conv2d(x, filter=k, strides=[1, 2, 2, 1], padding="VALID"),
            _convolve(X, K, 2, "VALID"),
        ),
        "conv2d stride same": (
            tf.nn.conv2d(x, k, [1, 2, 2, 1], padding="SAME"),
            _convolve(X, K, 2, "SAME"),
        ),
        "conv2d first": (
            tf.nn.conv2d(X.transpose(0, 3, 1, 2), k, [1, 1, 1, 1], "SAME", data_format="NCHW"),
            _convolve(X, K, 1, "SAME").transpose(0, 3, 1, 2),
        ),
        "depthwise": (
            tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME"),
            _convolve(X, _depthwise(K), 1, "SAME"),
        ),
        "separable": (
            tf.nn.separable_conv2d(x, k, point, [1, 1, 1, 1], "SAME"),
            _convolve(_convolve(X, _depthwise(K), 1, "SAME"), point, 1, "VALID"),
        ),
        "atrous": (
            tf.nn.atrous_conv2d(x, K[:2, :2], 2, "VALID"),
            _convolve(
                X,
                np.stack(
                    [
                        np.stack([K[0, 0], 0 * K[0, 0], K[0, 1]]),
                        0 * K[:, 0],
                        np.stack([K[1, 0], 0 * K[0, 0], K[1, 1]]),
                    ]
                ),
                1,
                "VALID",
            ),
        ),
        "max_pool": (tf.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"), _pooled(X, "max")),
        "avg_pool": (tf.nn.avg_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"), _pooled(X, "mean")),
        "avg_pool same": (
            tf.nn.avg_pool(small, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")[
                0, :, :, 0
            ],
            np.array([[2.0, 3.5], [6.5, 8.0]], np.float32),
        ),
        "max_pool same": (
            tf.nn.max_pool(small, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")[
                0, :, :, 0
            ],
            np.array([[4, 5], [7, 8]], np.float32),
        ),
        "moments": (mean, X.mean((0, 1, 2))),
        "moments variance": (variance, X.var((0, 1, 2))),
        "batch_normalization": (
            tf.nn.batch_normalization(x, mean, variance, 0.5, 2.0, 1e-3),
            (X - X.mean((0, 1, 2))) / np.sqrt(X.var((0, 1, 2)) + 1e-3) * 2 + 0.5,
        ),
        "lrn": (tf.nn.lrn(x, 1, 2.0, 0.5, 0.75), _lrn(X)),
        "embedding_lookup": (tf.nn.embedding_lookup(table, [[3, 1]]), table[[[3, 1]]]),
        "embedding_lookup mod": (
            tf.nn.embedding_lookup([table[0::2], table[1::2]], [3, 4, 0]),
            table[[3, 4, 0]],
        ),
        "embedding_lookup div": (
            tf.nn.embedding_lookup([table[:3], table[3:]], [3, 4, 0], "div"),
            table[[3, 4, 0]],
        ),
        "embedding_lookup norm": (
            tf.nn.embedding_lookup(np.array([[3.0, 4.0]]), [0], max_norm=1.0),
            [[0.6, 0.8]],
        ),
        "dropout of all kept": (tf.nn.dropout(logits, 1.0), L),
    }


def _lrn(x: np.ndarray) -> np.ndarray:
    squares = np.pad(x * x, [(0, 0)] * 3 + [(1, 1)])
    total = squares[..., :-2] + squares[..., 1:-1] + squares[..., 2:]
    return x / (2 + 0.5 * total) ** 0.75


def test_nn_functions_match_numpy() -> None:
    """Every function of tf.nn matches NumPy."""
    with tf.Graph().as_default():
        cases = _cases()
        with tf.Session() as sess:
            results = sess.run({name: tensor for name, (tensor, _) in cases.items()})
    check_all(
        {
            name: (
                t,
                np.asarray(e, np.float32)
                if np.asarray(e).dtype == np.float64 and results[name].dtype == np.float32
                else e,
            )
            for name, (t, e) in cases.items()
        },
        results,
        2e-4,
    )


def test_dropout_keeps_the_mean() -> None:
    """Dropout keeps the mean, by a fed probability or by rows."""
    with tf.Graph().as_default():
        keep = tf.placeholder(tf.float32, name="keep")
        dropped = tf.nn.dropout(tf.ones([1000]), keep, seed=1)
        whole_rows = tf.nn.dropout(tf.ones([100, 10]), 0.5, noise_shape=[100, 1])
        with tf.Session() as sess:
            half, rows = sess.run([dropped, whole_rows], {keep: 0.5})
            assert sess.run(dropped, {keep: 1.0}).tolist() == [1.0] * 1000
    assert set(half.tolist()) == {0.0, 2.0} and abs(half.mean() - 1) < 0.2
    assert {tuple(r) for r in rows.tolist()} == {(0.0,) * 10, (2.0,) * 10}
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"keep_prob must be in \(0, 1\], not 1.5"),
    ):
        tf.nn.dropout([1.0], 1.5)


def test_conv2d_transpose_is_the_transpose() -> None:
    """conv2d_transpose is the transpose of conv2d."""

    def make() -> tuple:
        down = tf.nn.conv2d(X, K, [1, 2, 2, 1], "SAME")
        g = tf.constant(RNG.randn(2, 3, 3, 4).astype(np.float32))
        up = tf.nn.conv2d_transpose(g, K, tf.shape(tf.constant(X)), [1, 2, 2, 1])
        return tf.reduce_sum(down * g), tf.reduce_sum(up * tf.constant(X))

    forward, backward = evaluate(make)
    assert forward == pytest.approx(backward, rel=1e-4)


def test_losses_have_gradients() -> None:
    """Losses have gradients by logits and none by labels."""

    def make() -> list:
        logits = tf.constant(L)
        loss = tf.reduce_sum(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=Y, logits=logits)
        )
        labels = tf.constant(ONE_HOT)
        stopped = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        assert tf.gradients(tf.reduce_sum(stopped), [labels]) == [None]
        return [tf.gradients(loss, logits)[0]]

    (by_logits,) = evaluate(make)
    np.testing.assert_allclose(by_logits, _softmax(L) - ONE_HOT, rtol=1e-4, atol=1e-6)


def test_mixed_up_arguments_are_refused() -> None:
    """Mixed-up arguments are refused with advice."""
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match="give labels= and logits= by name"):
            tf.nn.softmax_cross_entropy_with_logits(L, labels=ONE_HOT)
        with pytest.raises(ValueError, match="both labels and logits must be given"):
            tf.nn.sparse_softmax_cross_entropy_with_logits(logits=L)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"labels of shape \(4,\) go with these logits, not \(4, 1\)",
        ):
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=Y[:, None], logits=L)
        with pytest.raises(ValueError, match="must be 1"):
            tf.nn.conv2d(X, K, [2, 1, 1, 1], "SAME")
        with pytest.raises(ValueError, match="'other' on 1 parts"):
            tf.nn.embedding_lookup([L], [0], "other")


def test_unknown_label_shape_broadcasts() -> None:
    """A label of unknown shape broadcasts in the step, and a known wrong shape is refused."""
    with tf.Graph().as_default(), tf.Session() as sess:
        labels, logits = tf.placeholder(tf.float32), tf.placeholder(tf.float32, [None, 1])
        found = sess.run(
            tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits),
            {labels: [1.0, 0.0], logits: [[1.0], [2.0]]},
        )
        wanted = np.log1p(np.exp([[1.0], [2.0]])) - np.array([[1.0], [2.0]]) * [1.0, 0.0]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        with pytest.raises(ValueError, match=r"must have the same shape \(\(2, 1\) vs \(2,\)\)"):
            tf.nn.sigmoid_cross_entropy_with_logits(
                labels=tf.placeholder(tf.float32, [2]), logits=tf.placeholder(tf.float32, [2, 1])
            )


def test_full_shape_scales_the_part() -> None:
    """A part of a variable is scaled by the shape of the whole."""
    with tf.Graph().as_default(), tf.Session() as sess:
        part = sess.run(tf.uniform_unit_scaling_initializer(full_shape=[300, 4])([3, 40]))
        assert 0.05 < np.abs(part).max() <= 0.1
