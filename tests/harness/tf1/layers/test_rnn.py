"""Recurrent cells and loops over time, against the same recurrences written in numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf

pytestmark = pytest.mark.cluster  # loops, forwards and backwards: much to compile

BATCH, TIME, SIZE, UNITS = 2, 5, 3, 4
X = np.random.default_rng(0).normal(size=(BATCH, TIME, SIZE)).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def lstm(x: np.ndarray, state: Any, kernel: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, Any]:
    c, h = state
    i, j, f, o = np.split(np.concatenate([x, h], 1) @ kernel + bias, 4, 1)
    c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(j)
    h = np.tanh(c) * sigmoid(o)
    return h, (c, h)


def rnn(x: np.ndarray, h: Any, kernel: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, Any]:
    h = np.maximum(np.concatenate([x, h], 1) @ kernel + bias, 0)
    return h, h


def gru(
    x: np.ndarray, h: Any, gates: np.ndarray, bias: np.ndarray, kernel: np.ndarray, own: np.ndarray
) -> Any:
    r, u = np.split(sigmoid(np.concatenate([x, h], 1) @ gates + bias), 2, 1)
    h = u * h + (1 - u) * np.tanh(np.concatenate([x, r * h], 1) @ kernel + own)
    return h, h


def loop(
    step: Callable[..., Any], x: np.ndarray, state: Any, weights: list[np.ndarray]
) -> tuple[np.ndarray, Any]:
    outputs = []
    for t in range(x.shape[1]):
        output, state = step(x[:, t], state, *weights)
        outputs.append(output)
    return np.stack(outputs, 1), state


def zeros() -> np.ndarray:
    return np.zeros((BATCH, UNITS), np.float32)


CELLS: dict[str, tuple[Callable[[], Any], Callable[..., Any], Any]] = {
    "lstm": (lambda: tf.nn.rnn_cell.BasicLSTMCell(UNITS), lstm, (zeros(), zeros())),
    "relu": (lambda: tf.contrib.rnn.BasicRNNCell(UNITS, activation=tf.nn.relu), rnn, zeros()),
    "gru": (lambda: tf.nn.rnn_cell.GRUCell(UNITS), gru, zeros()),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_loops_match_the_formula(name: str) -> None:
    """Dynamic and static loops match the recurrence in NumPy."""
    make, step, begin = CELLS[name]
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, TIME, SIZE])
        with tf.variable_scope("one"):
            outputs, state = tf.nn.dynamic_rnn(make(), x, dtype=tf.float32)
        weights = tf.trainable_variables()
        with tf.variable_scope("one", reuse=True):
            unrolled, last = tf.nn.static_rnn(make(), tf.unstack(x, TIME, 1), dtype=tf.float32)
        cell = make()
        with tf.variable_scope("one/rnn", reuse=True):
            by_hand = cell(x[:, 0], cell.zero_state(BATCH, tf.float32))[0]
        assert len(tf.trainable_variables()) == len(weights) == (4 if name == "gru" else 2)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            values = sess.run(weights)
            got, end, apart, end_too, first = sess.run(
                [outputs, state, unrolled, last, by_hand], {x: X}
            )
    expected, after = loop(step, X, begin, values)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.stack(apart, 1), got, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(first, expected[:, 0], rtol=1e-4, atol=1e-6)
    for one, other, wanted in zip(*(np.ravel(s) for s in (end, end_too, after)), strict=True):
        assert one == pytest.approx(wanted, rel=1e-4, abs=1e-6) and other == pytest.approx(
            one, rel=1e-5, abs=1e-7
        )


def test_sequence_lengths_are_obeyed() -> None:
    """Lengths end a sequence, and the backward loop begins at the end."""
    lengths = [2, TIME]
    with tf.Graph().as_default():
        with tf.variable_scope("a"):
            outputs, state = tf.nn.dynamic_rnn(
                tf.nn.rnn_cell.BasicLSTMCell(UNITS), X, lengths, dtype=tf.float32
            )
        (_, back), (_, last) = tf.nn.bidirectional_dynamic_rnn(
            tf.nn.rnn_cell.GRUCell(UNITS), tf.nn.rnn_cell.BasicRNNCell(UNITS, activation=tf.nn.relu), X, lengths,
            dtype=tf.float32,
        )  # fmt: skip
        weights = [v for v in tf.trainable_variables() if "bw" in v.name]
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            got, end, backwards, final, values = sess.run([outputs, state, back, last, weights])
    assert not got[0, 2:].any() and got[1].all()
    np.testing.assert_array_equal(end.h, [got[0, 1], got[1, -1]])
    for row, length in enumerate(lengths):
        expected, after = loop(rnn, X[row : row + 1, :length][:, ::-1], zeros()[:1], values)
        np.testing.assert_allclose(backwards[row, :length], expected[0, ::-1], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(final[row], after[0], rtol=1e-4, atol=1e-6)
    assert not backwards[0, 2:].any()


@pytest.mark.nightly
def test_stacked_cells_with_dropout_train() -> None:
    """Stacked cells with dropout are trained."""
    with tf.Graph().as_default():
        keep = tf.placeholder(tf.float32, [])
        cells = [
            tf.contrib.rnn.DropoutWrapper(tf.contrib.rnn.BasicLSTMCell(UNITS), keep, keep)
            for _ in range(2)
        ]
        outputs, state = tf.nn.dynamic_rnn(tf.contrib.rnn.MultiRNNCell(cells), X, dtype=tf.float32)
        loss = tf.reduce_mean(tf.square(outputs[:, -1] - 0.5))
        train = tf.train.AdamOptimizer(0.05).minimize(loss)
        assert {v.name for v in tf.trainable_variables()} == {
            f"rnn/multi_rnn_cell/cell_{i}/basic_lstm_cell/{kind}:0"
            for i in (0, 1)
            for kind in ("kernel", "bias")
        }
        assert [type(s).__name__ for s in state] == ["LSTMStateTuple"] * 2
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            before = sess.run(loss, {keep: 1.0})
            for _ in range(60):
                sess.run(train, {keep: 0.9})
            assert sess.run(loss, {keep: 1.0}) < before / 2
            dropped = sess.run(outputs, {keep: 0.5}) == 0
            assert 0.2 < dropped.mean() < 0.8 and not (dropped[:, 0] == dropped[:, 1]).all()


def test_own_cell_is_called_stepwise() -> None:
    """A program's own cell is called step by step, and unsupported cells are refused."""

    class Sum(tf.nn.rnn_cell.RNNCell):  # type: ignore[misc]
        state_size = output_size = SIZE

        def __call__(self, inputs: Any, state: Any, scope: Any = None) -> Any:
            return inputs + state, inputs + state

    with tf.Graph().as_default(), tf.Session() as sess:
        outputs, state = tf.nn.dynamic_rnn(Sum(), X, dtype=tf.float32)
        got, end = sess.run([outputs, state])
        np.testing.assert_allclose(got, np.cumsum(X, 1), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(end, got[:, -1])
        with pytest.raises(TypeError, match="known number of steps"):
            tf.nn.dynamic_rnn(Sum(), tf.placeholder(tf.float32, [2, None, SIZE]), dtype=tf.float32)
        with pytest.raises(ValueError, match="initial_state"):
            tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(2), X)
        with pytest.raises(ValueError, match="peepholes"):
            tf.nn.rnn_cell.LSTMCell(2, use_peepholes=True)
        with pytest.raises(
            AttributeError, match=r"tf\.nn\.rnn_cell\.\w+ is not in harness\.tf1: .*jax\.lax\.scan"
        ):
            tf.nn.rnn_cell.NASCell  # noqa: B018
