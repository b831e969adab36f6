"""``tf.contrib.legacy_seq2seq``: recurrent encoders and decoders over lists of steps, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import harness.tf1 as tf
from harness.tf1.layers.rnn_cells import OutputProjectionWrapper, State
from harness.tf1.ops.lift import Public

public = Public("tf.contrib.legacy_seq2seq")

Value = Any
"""A tensor, or what TensorFlow takes for one."""

Steps = Sequence[Value]
"""A tensor for each step, [batch, n]; of symbols [batch]."""
Decoded = tuple[list[Value], State]
"""The outputs of a decoder and its last state."""
Loss = Callable[..., Value]
"""A function of ``labels`` and ``logits`` such as ``tf.nn.sparse_softmax_cross_entropy_with_logits``."""

_NO_STEPS = 1e-12
"""What TensorFlow adds to a sum of weights that it divides by."""


@public.add()
def rnn_decoder(
    decoder_inputs: Steps,
    initial_state: State,
    cell: Value,
    loop_function: Callable[[Value, int], Value] | None = None,
    scope: Value = None,
) -> Decoded:
    """Runs a cell over a list of inputs; with ``loop_function(output, i)`` each input but the first is its result."""
    with tf.variable_scope(scope or "rnn_decoder"):
        state = initial_state
        outputs: list[Value] = []
        for i, x in enumerate(decoder_inputs):
            if i and loop_function is not None:
                with tf.variable_scope("loop_function", reuse=True):
                    x = loop_function(outputs[-1], i)
            if i:
                tf.get_variable_scope().reuse_variables()
            output, state = cell(x, state)
            outputs.append(output)
        return outputs, state


@public.add()
def basic_rnn_seq2seq(
    encoder_inputs: Steps,
    decoder_inputs: Steps,
    cell: Value,
    dtype: Value = tf.float32,
    scope: Value = None,
) -> Decoded:
    """Encodes with a cell, and decodes from the last state with other variables of the same cell."""
    with tf.variable_scope(scope or "basic_rnn_seq2seq"):
        # TensorFlow copies the cell. A loop leaves nothing in a cell of ours, and the decoder makes its
        # variables in its own scope.
        _, state = tf.nn.static_rnn(cell, encoder_inputs, dtype=dtype)
        return rnn_decoder(decoder_inputs, state, cell)


@public.add()
def tied_rnn_seq2seq(
    encoder_inputs: Steps,
    decoder_inputs: Steps,
    cell: Value,
    loop_function: Callable[[Value, int], Value] | None = None,
    dtype: Value = tf.float32,
    scope: Value = None,
) -> Decoded:
    """Encodes and decodes with the same variables."""
    scope = scope or "tied_rnn_seq2seq"
    with tf.variable_scope("combined_tied_rnn_seq2seq"):
        _, state = tf.nn.static_rnn(cell, encoder_inputs, dtype=dtype, scope=scope)
        tf.get_variable_scope().reuse_variables()
        return rnn_decoder(decoder_inputs, state, cell, loop_function, scope)


@public.add()
def embedding_rnn_decoder(
    decoder_inputs: Steps,
    initial_state: State,
    cell: Value,
    num_symbols: int,
    embedding_size: int,
    output_projection: tuple[Value, Value] | None = None,
    feed_previous: bool = False,
    update_embedding_for_previous: bool = True,
    scope: Value = None,
) -> Decoded:
    """Decodes symbols, each by its row of the variable ``embedding``.

    Args:
        decoder_inputs: symbols.
        initial_state: of the cell.
        cell: one of ``tf.nn.rnn_cell``.
        num_symbols: how many there are.
        embedding_size: of a row.
        output_projection: weights and biases that make scores of an output that is fed back.
        feed_previous: every input but the first is the symbol that the last output scores highest.
        update_embedding_for_previous: False keeps the derivative of these from the embedding.
        scope: "embedding_rnn_decoder" by default.
    """
    with tf.variable_scope(scope or "embedding_rnn_decoder"):
        embedding = tf.get_variable("embedding", [num_symbols, embedding_size])

        def fed_back(scores: Value, _: int) -> Value:
            if output_projection is not None:
                scores = tf.nn.xw_plus_b(scores, *output_projection)
            x = tf.nn.embedding_lookup(embedding, tf.argmax(scores, 1))
            return x if update_embedding_for_previous else tf.stop_gradient(x)

        rows = [tf.nn.embedding_lookup(embedding, symbols) for symbols in decoder_inputs]
        return rnn_decoder(rows, initial_state, cell, fed_back if feed_previous else None)


@public.add()
def embedding_rnn_seq2seq(
    encoder_inputs: Steps,
    decoder_inputs: Steps,
    cell: Value,
    num_encoder_symbols: int,
    num_decoder_symbols: int,
    embedding_size: int,
    output_projection: tuple[Value, Value] | None = None,
    feed_previous: bool = False,
    dtype: Value = tf.float32,
    scope: Value = None,
) -> Decoded:
    """Encodes symbols and decodes with ``embedding_rnn_decoder``; the outputs are scores without a projection."""
    with tf.variable_scope(scope or "embedding_rnn_seq2seq"):
        # The names of tf.contrib.rnn.EmbeddingWrapper in a loop, which checkpoints hold.
        with tf.variable_scope("rnn/embedding_wrapper"):
            embedding = tf.get_variable("embedding", [num_encoder_symbols, embedding_size])
        rows = [tf.nn.embedding_lookup(embedding, symbols) for symbols in encoder_inputs]
        _, state = tf.nn.static_rnn(cell, rows, dtype=dtype, scope="rnn/embedding_wrapper")
        if output_projection is None:
            cell = OutputProjectionWrapper(cell, num_decoder_symbols)
        return embedding_rnn_decoder(
            decoder_inputs,
            state,
            cell,
            num_decoder_symbols,
            embedding_size,
            output_projection,
            feed_previous,
        )


@public.add()
def sequence_loss_by_example(
    logits: Steps,
    targets: Steps,
    weights: Steps,
    average_across_timesteps: bool = True,
    softmax_loss_function: Loss | None = None,
    name: str | None = None,
) -> Value:
    """Adds up the weighted cross entropies of the steps, divided by the sum of the weights: [batch].

    Raises:
        ValueError: the lists have not one length.
    """
    if not len(logits) == len(targets) == len(weights):
        raise ValueError(
            "Lengths of logits, weights, and targets must be the same "
            f"{len(logits)}, {len(weights)}, {len(targets)}."
        )
    entropy = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
    with tf.name_scope(name, "sequence_loss_by_example"):
        losses = [
            entropy(labels=tf.reshape(labels, [-1]), logits=scores) * weight
            for scores, labels, weight in zip(logits, targets, weights, strict=True)
        ]
        total = tf.add_n(losses)
        return total / (tf.add_n(list(weights)) + _NO_STEPS) if average_across_timesteps else total


@public.add()
def sequence_loss(
    logits: Steps,
    targets: Steps,
    weights: Steps,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Loss | None = None,
    name: str | None = None,
) -> Value:
    """Adds up ``sequence_loss_by_example``, divided by the number of examples."""
    with tf.name_scope(name, "sequence_loss"):
        cost = tf.reduce_sum(
            sequence_loss_by_example(
                logits, targets, weights, average_across_timesteps, softmax_loss_function
            )
        )
        return cost / tf.cast(tf.shape(targets[0])[0], cost.dtype) if average_across_batch else cost


@public.add()
def model_with_buckets(
    encoder_inputs: Steps,
    decoder_inputs: Steps,
    targets: Steps,
    weights: Steps,
    buckets: Sequence[tuple[int, int]],
    seq2seq: Callable[[Steps, Steps], Decoded],
    softmax_loss_function: Loss | None = None,
    per_example_loss: bool = False,
    name: str | None = None,
) -> tuple[list[Value], list[Value]]:
    """Makes a model for each bucket, a pair of lengths, with the same variables: outputs and losses of each.

    Raises:
        ValueError: a bucket is longer than the inputs.
    """
    source, length = buckets[-1]
    for what, given, least in (
        ("encoder_inputs", encoder_inputs, source),
        ("targets", targets, length),
        ("weights", weights, length),
    ):
        if len(given) < least:
            raise ValueError(
                f"Length of {what} ({len(given)}) must be at least that of last bucket ({least})."
            )
    loss = sequence_loss_by_example if per_example_loss else sequence_loss
    outputs, losses = [], []
    with tf.name_scope(name, "model_with_buckets"):
        for number, (source, length) in enumerate(buckets):
            with tf.variable_scope(tf.get_variable_scope(), reuse=True if number else None):
                decoded, _ = seq2seq(encoder_inputs[:source], decoder_inputs[:length])
                outputs.append(decoded)
                losses.append(
                    loss(
                        decoded,
                        targets[:length],
                        weights[:length],
                        softmax_loss_function=softmax_loss_function,
                    )
                )
    return outputs, losses
