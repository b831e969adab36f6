"""Sequence losses and decoders of contrib, against the same formulas written in numpy.

TensorFlow 2 has no contrib. The formulas are those of tensorflow/contrib/legacy_seq2seq/python/ops/seq2seq.py,
contrib/seq2seq/python/ops/{loss,decoder,helper,basic_decoder}.py and contrib/rnn/python/ops/rnn_cell.py of r1.15.
"""

from typing import Any

import numpy as np
import pytest

import harness.tf1 as tf

pytestmark = pytest.mark.cluster  # loops, forwards and backwards: much to compile

legacy, seq2seq = tf.contrib.legacy_seq2seq, tf.contrib.seq2seq

BATCH, TIME, CLASSES, UNITS = 3, 4, 5, 6
DRAW = np.random.default_rng(1)
LOGITS = DRAW.normal(size=(BATCH, TIME, CLASSES)).astype(np.float32)
TARGETS = DRAW.integers(0, CLASSES, (BATCH, TIME))
WEIGHTS = DRAW.random((BATCH, TIME)).astype(np.float32)
WEIGHTS[1, 2:] = 0
INPUTS = DRAW.normal(size=(BATCH, TIME, UNITS)).astype(np.float32)


def entropy() -> np.ndarray:
    """The cross entropy of each step."""
    scores = LOGITS - LOGITS.max(-1, keepdims=True)
    log = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return -np.take_along_axis(log, TARGETS[..., None], -1)[..., 0]


def steps(array: np.ndarray) -> list[Any]:
    """A tensor for each step."""
    return [tf.constant(array[:, t]) for t in range(array.shape[1])]


def run(fetches: Any, feeds: Any = None) -> Any:
    """Values in a session with new variables."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetches, feeds)


def tanh_steps(x: np.ndarray, state: np.ndarray, weights: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs of a BasicRNNCell."""
    outputs = []
    for t in range(x.shape[1]):
        state = np.tanh(np.concatenate([x[:, t], state], 1) @ weights[0] + weights[1])
        outputs.append(state)
    return outputs


def zeros() -> np.ndarray:
    return np.zeros((BATCH, UNITS), np.float32)


@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize("over_batch", [True, False])
def test_sequence_loss_matches_the_formula(over_time: bool, over_batch: bool) -> None:
    """The loss of padded sequences is the weighted mean over the axes asked for."""
    with tf.Graph().as_default():
        logits = tf.placeholder(tf.float32, [None, None, CLASSES])
        loss = seq2seq.sequence_loss(logits, TARGETS, WEIGHTS, over_time, over_batch)
        got = run(loss, {logits: LOGITS})
    axes = tuple(i for i, on in enumerate((over_batch, over_time)) if on)
    wanted = entropy() * WEIGHTS
    if axes:
        wanted = wanted.sum(axes) / (WEIGHTS.sum(axes) + 1e-12)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_wrong_ranks_are_refused() -> None:
    """A sequence loss names the argument whose rank is wrong."""
    for arguments, text in (
        ((LOGITS[0], TARGETS, WEIGHTS), "Logits must be a"),
        ((LOGITS, TARGETS[0], WEIGHTS), "Targets must be a"),
        ((LOGITS, TARGETS, WEIGHTS[0]), "Weights must be a"),
    ):
        with tf.Graph().as_default(), pytest.raises(ValueError, match=text):
            seq2seq.sequence_loss(*arguments)
    with pytest.raises(ValueError, match="must be the same 4, 3, 4"):
        legacy.sequence_loss_by_example([1] * 4, [1] * 4, [1] * 3)
    with pytest.raises(
        ValueError, match=r"targets \(1\) must be at least that of last bucket \(4\)"
    ):
        legacy.model_with_buckets([1] * 4, [1] * 4, [1], [1] * 4, [(2, 2), (4, 4)], None)
    with tf.Graph().as_default(), pytest.raises(TypeError, match="Expected decoder"):
        seq2seq.dynamic_decode(tf.no_op())


def test_legacy_losses_match_the_formula() -> None:
    """The losses of lists of steps are those of the formula."""
    with tf.Graph().as_default():
        lists = [steps(LOGITS), steps(TARGETS), steps(WEIGHTS)]
        got = run(
            [
                legacy.sequence_loss_by_example(*lists),
                legacy.sequence_loss_by_example(*lists, average_across_timesteps=False),
                legacy.sequence_loss(*lists),
                legacy.sequence_loss(*lists, average_across_batch=False),
            ]
        )
    sums = (entropy() * WEIGHTS).sum(1)
    means = sums / (WEIGHTS.sum(1) + 1e-12)
    for found, wanted in zip(got, (means, sums, means.mean(), means.sum()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_rnn_decoder_feeds_outputs_back() -> None:
    """A loop function makes each input but the first of the output before it."""
    with tf.Graph().as_default():
        cell = tf.nn.rnn_cell.BasicRNNCell(UNITS)
        with tf.variable_scope("a"):
            plain, last = legacy.rnn_decoder(steps(INPUTS), tf.constant(zeros()), cell)
        with tf.variable_scope("a", reuse=True):
            fed, _ = legacy.rnn_decoder(
                steps(INPUTS), tf.constant(zeros()), cell, lambda output, i: output * float(i)
            )
        weights = tf.trainable_variables()
        assert [v.op.name for v in weights] == [
            "a/rnn_decoder/basic_rnn_cell/kernel",
            "a/rnn_decoder/basic_rnn_cell/bias",
        ]
        plain_, last_, fed_, w = run([plain, last, fed, weights])
    expected = tanh_steps(INPUTS, zeros(), w)
    np.testing.assert_allclose(plain_, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(last_, plain_[-1])
    x, state = INPUTS[:, 0], zeros()
    for i in range(TIME):
        if i:
            x = state * i
        (state,) = tanh_steps(x[:, None], state, w)
        np.testing.assert_allclose(fed_[i], state, rtol=1e-4, atol=1e-6)


def test_encoders_share_variables_when_tied() -> None:
    """A basic model has variables for each part, a tied one has one set; buckets share theirs."""
    with tf.Graph().as_default():
        x, cell = steps(INPUTS), tf.nn.rnn_cell.BasicRNNCell(UNITS)
        basic, _ = legacy.basic_rnn_seq2seq(x, x, cell)
        apart = tf.trainable_variables()
        tied, _ = legacy.tied_rnn_seq2seq(x, x, tf.nn.rnn_cell.BasicRNNCell(UNITS))
        one = tf.trainable_variables()[len(apart) :]
        assert [v.op.name for v in apart[::2]] == [
            "basic_rnn_seq2seq/rnn/basic_rnn_cell/kernel",
            "basic_rnn_seq2seq/rnn_decoder/basic_rnn_cell/kernel",
        ]
        assert [v.op.name for v in one] == [
            "combined_tied_rnn_seq2seq/tied_rnn_seq2seq/basic_rnn_cell/kernel",
            "combined_tied_rnn_seq2seq/tied_rnn_seq2seq/basic_rnn_cell/bias",
        ]
        basic_, tied_, of_basic, of_tied = run([basic, tied, apart, one])
    for got, encoder, decoder in ((basic_, of_basic[:2], of_basic[2:]), (tied_, of_tied, of_tied)):
        state = tanh_steps(INPUTS, zeros(), encoder)[-1]
        np.testing.assert_allclose(got, tanh_steps(INPUTS, state, decoder), rtol=1e-4, atol=1e-6)


def test_embedding_model_trains_in_buckets() -> None:
    """A model of symbols in two buckets has one set of variables, and learns."""
    with tf.Graph().as_default():
        symbols, cell = steps(TARGETS), tf.nn.rnn_cell.BasicLSTMCell(UNITS)

        def model(encode: Any, decode: Any) -> Any:
            return legacy.embedding_rnn_seq2seq(encode, decode, cell, CLASSES, CLASSES, 7)

        outputs, losses = legacy.model_with_buckets(
            symbols, symbols, symbols, steps(np.ones_like(WEIGHTS)), [(2, 2), (4, 4)], model
        )
        shapes = {v.op.name: v.get_shape().as_list() for v in tf.trainable_variables()}
        top = "embedding_rnn_seq2seq"
        decoder = f"{top}/embedding_rnn_decoder"
        wrapper = f"{decoder}/rnn_decoder/output_projection_wrapper"
        assert shapes == {
            f"{top}/rnn/embedding_wrapper/embedding": [CLASSES, 7],
            f"{top}/rnn/embedding_wrapper/basic_lstm_cell/kernel": [7 + UNITS, 4 * UNITS],
            f"{top}/rnn/embedding_wrapper/basic_lstm_cell/bias": [4 * UNITS],
            f"{decoder}/embedding": [CLASSES, 7],
            f"{wrapper}/basic_lstm_cell/kernel": [7 + UNITS, 4 * UNITS],
            f"{wrapper}/basic_lstm_cell/bias": [4 * UNITS],
            f"{wrapper}/kernel": [UNITS, CLASSES],
            f"{wrapper}/bias": [CLASSES],
        }
        assert [len(out) for out in outputs] == [2, 4]
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            greedy, _ = legacy.embedding_rnn_seq2seq(
                symbols, symbols, cell, CLASSES, CLASSES, 7, feed_previous=True
            )
        train = tf.train.AdamOptimizer(0.1).minimize(losses[1])
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            before = session.run(losses)
            for _ in range(60):
                session.run(train)
            after, first, fed = session.run([losses, outputs[1][0], greedy])
    assert all(b < a / 2 for a, b in zip(before, after, strict=True))
    np.testing.assert_allclose(fed[0], first, rtol=1e-4)  # the first symbol is the program's


LENGTHS = np.array([4, 2, 3], np.int32)


def test_training_decoder_matches_the_loop() -> None:
    """A training decoder gives the outputs, symbols, states and lengths of the loop, and a gradient."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, None, UNITS])
        lengths = tf.placeholder(tf.int32, [None])
        cell = tf.nn.rnn_cell.BasicRNNCell(UNITS)
        layer = tf.layers.Dense(CLASSES, name="out")
        decoder = seq2seq.BasicDecoder(
            cell,
            seq2seq.TrainingHelper(x, lengths),
            cell.zero_state(tf.shape(x)[0], tf.float32),
            layer,
        )
        limit = tf.reduce_max(lengths)
        (made, symbols), state, ends = seq2seq.dynamic_decode(
            decoder, impute_finished=True, maximum_iterations=limit
        )
        variables = tf.trainable_variables()
        assert {v.op.name for v in variables} == {
            "decoder/basic_rnn_cell/kernel",
            "decoder/basic_rnn_cell/bias",
            "decoder/out/kernel",
            "decoder/out/bias",
        }
        slopes = tf.gradients(tf.reduce_sum(made), variables)
        feeds = {x: INPUTS, lengths: LENGTHS}
        made_, symbols_, state_, ends_, w, g = run(
            [made, symbols, state, ends, variables, slopes], feeds
        )
    states = np.stack(tanh_steps(INPUTS, zeros(), w[:2]), 1)
    mask = np.arange(TIME) < LENGTHS[:, None]
    wanted = np.where(mask[..., None], states @ w[2] + w[3], 0)
    np.testing.assert_allclose(made_, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(symbols_, np.where(mask, wanted.argmax(-1), 0))
    np.testing.assert_array_equal(ends_, LENGTHS)
    np.testing.assert_allclose(state_, states[range(BATCH), LENGTHS - 1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(g[3], mask.sum() * np.ones(CLASSES), rtol=1e-5)
    kept = np.where(mask[..., None], states, 0).sum((0, 1))
    np.testing.assert_allclose(g[2], kept[:, None] * np.ones(CLASSES), rtol=1e-3, atol=1e-4)


def test_greedy_decoder_follows_its_choice() -> None:
    """A greedy decoder reads the symbol that it scored highest until the last symbol."""
    most = 7
    with tf.Graph().as_default():
        table = tf.get_variable("table", [CLASSES, UNITS])
        cell = tf.nn.rnn_cell.BasicRNNCell(UNITS)
        layer = tf.layers.Dense(CLASSES)
        helper = seq2seq.GreedyEmbeddingHelper(table, [1, 2, 3], 0)
        decoder = seq2seq.BasicDecoder(cell, helper, cell.zero_state(BATCH, tf.float32), layer)
        outputs, _, ends = seq2seq.dynamic_decode(
            decoder, output_time_major=True, maximum_iterations=most
        )
        names = "table decoder/basic_rnn_cell/kernel decoder/basic_rnn_cell/bias "
        names += "decoder/dense/kernel decoder/dense/bias"
        by_name = {v.op.name: v for v in tf.trainable_variables()}
        assert set(by_name) == set(names.split())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            # With this draw two sequences end, at different steps, and one does not.
            draw = np.random.default_rng(70)
            for name in names.split():
                variable = by_name[name]
                variable.load(draw.normal(size=variable.shape).astype(np.float32), session)
            found, symbols, ends_, w = session.run(
                [outputs.rnn_output, outputs.sample_id, ends, [by_name[n] for n in names.split()]]
            )
    state, symbol, finished, length = zeros(), np.array([1, 2, 3]), np.zeros(BATCH, bool), 0
    lengths = np.zeros(BATCH, int)
    while length < most and not finished.all():
        (state,) = tanh_steps(w[0][symbol][:, None], state, w[1:3])
        scores = state @ w[3] + w[4]
        np.testing.assert_allclose(found[length], scores, rtol=1e-4, atol=1e-5)
        symbol = scores.argmax(-1)
        np.testing.assert_array_equal(symbols[length], symbol)
        length += 1
        lengths = np.where(finished, lengths, length)
        finished |= symbol == 0
    np.testing.assert_array_equal(ends_, lengths)
    assert found.shape[0] == most and not found[length:].any()
    assert len({*lengths}) == BATCH and most in lengths


def test_sampling_decoder_draws_symbols() -> None:
    """A sampling decoder draws, and nearly greedily at a low temperature."""
    with tf.Graph().as_default():
        scores = tf.constant(np.log([[0.7, 0.2, 0.1]]).astype(np.float32))
        many = tf.tile(scores, [2000, 1])
        start = tf.fill([2000], 1)
        drawn = seq2seq.SampleEmbeddingHelper(tf.eye(3), start, 0, seed=5).sample(0, many, None)
        cold = seq2seq.SampleEmbeddingHelper(tf.eye(3), start, 0, 0.01).sample(0, many, None)
        drawn_, cold_ = run([drawn, cold])
    np.testing.assert_allclose(np.bincount(drawn_) / 2000, [0.7, 0.2, 0.1], atol=0.05)
    assert not cold_.any() and drawn_.dtype == np.int32


def test_decoders_name_what_is_missing() -> None:
    """A decoder says what it lacks: a limit, a class, a rank."""
    with tf.Graph().as_default():
        cell = tf.nn.rnn_cell.BasicRNNCell(UNITS)
        helper = seq2seq.GreedyEmbeddingHelper(tf.eye(UNITS), [1, 1], 0)
        state = cell.zero_state(2, tf.float32)
        with pytest.raises(ValueError, match="give maximum_iterations"):
            seq2seq.dynamic_decode(seq2seq.BasicDecoder(cell, helper, state))
        with pytest.raises(TypeError, match="helper must be a Helper"):
            seq2seq.BasicDecoder(cell, None, state)
        with pytest.raises(TypeError, match="cell must be an RNNCell"):
            seq2seq.BasicDecoder(None, helper, state)
        with pytest.raises(ValueError, match="to be a vector"):
            seq2seq.TrainingHelper(INPUTS, 3)
        with pytest.raises(ValueError, match="start_tokens must be a vector"):
            seq2seq.GreedyEmbeddingHelper(tf.eye(UNITS), 1, 0)
        with pytest.raises(ValueError, match="end_token must be a scalar"):
            seq2seq.GreedyEmbeddingHelper(tf.eye(UNITS), [1], [0])


@pytest.mark.parametrize("projected", [None, 2])
def test_nas_cell_matches_the_formula(projected: int | None) -> None:
    """The cell of the search is the tree of its paper, with the variables of TensorFlow's."""
    out = projected or UNITS
    with tf.Graph().as_default():
        cell = tf.contrib.rnn.NASCell(UNITS, projected, use_biases=True)
        assert cell.state_size == (UNITS, out) and cell.output_size == out
        _, state = tf.nn.dynamic_rnn(cell, INPUTS[:, :1], dtype=tf.float32)
        before = tuple(DRAW.normal(size=(BATCH, n)).astype(np.float32) for n in (UNITS, out))
        with tf.variable_scope("rnn", reuse=True):
            _, after = cell(tf.constant(INPUTS[:, 0]), before)
        v = {v.op.name.removeprefix("rnn/nas_cell/"): v for v in tf.trainable_variables()}
        more = {"projection_weights"} if projected else set()
        assert set(v) == {"recurrent_kernel", "kernel", "bias"} | more
        w, (c, m), first = run([v, after, state])

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def wanted(x: np.ndarray, c: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        i = np.split(x @ w["kernel"], 8, 1)
        h = np.split(m @ w["recurrent_kernel"] + w["bias"], 8, 1)
        one = np.tanh(sigmoid(i[0] + h[0]) * np.maximum(i[1] + h[1], 0))
        two = np.tanh(sigmoid(i[2] + h[2]) + np.maximum(i[3] * h[3], 0))
        three = np.tanh(np.tanh(i[4] + h[4]) * sigmoid(i[5] + h[5]))
        four = sigmoid(np.tanh(i[6] + h[6]) + sigmoid(i[7] + h[7]))
        c = np.tanh(one + c) * two
        m = np.tanh(c * np.tanh(three + four))
        return c, m @ w["projection_weights"] if projected else m

    for got, expected in (
        ((c, m), wanted(INPUTS[:, 0], *before)),
        (first, wanted(INPUTS[:, 0], zeros(), np.zeros((BATCH, out), np.float32))),
    ):
        for one, two in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_dense_object_keeps_its_variables() -> None:
    """A dense layer as an object has one kernel for all calls."""
    with tf.Graph().as_default():
        layer = tf.layers.Dense(2, tf.nn.relu, use_bias=False)
        with tf.variable_scope("a"):
            one = layer(tf.constant(INPUTS[:, 0]))
        two = layer(tf.constant(INPUTS[:, 1]))
        (kernel,) = tf.trainable_variables()
        assert kernel.op.name == "a/dense/kernel"
        w, one_, two_ = run([kernel, one, two])
    for got, x in ((one_, INPUTS[:, 0]), (two_, INPUTS[:, 1])):
        np.testing.assert_allclose(got, np.maximum(x @ w, 0), rtol=1e-4, atol=1e-6)
