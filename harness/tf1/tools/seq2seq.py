"""``tf.contrib.seq2seq``: losses of padded sequences, and decoders that run step by step.

XLA needs the size of what a loop writes, so the outputs of ``dynamic_decode`` have as many steps as
``maximum_iterations`` says, or as the inputs of a ``TrainingHelper`` have. Steps behind the end of
the longest sequence are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import harness.tf1 as tf
from harness.tf1.layers.rnn_cells import RNNCell, State
from harness.tf1.ops.lift import Public

public = Public("tf.contrib.seq2seq")

Nest = Any
"""A tensor, or a nest of tensors."""


@public.add()
def sequence_loss(
    logits: Nest,
    targets: Nest,
    weights: Nest,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable[..., Nest] | None = None,
    name: str | None = None,
) -> Nest:
    """Computes the weighted cross entropy of sequences: a number, [batch], [time] or [batch, time].

    Args:
        logits: [batch, time, classes].
        targets: classes, [batch, time].
        weights: [batch, time].
        average_across_timesteps: divide the sum over time by the sum of the weights.
        average_across_batch: as well over the batch.
        softmax_loss_function: of ``labels`` and ``logits``; sparse softmax cross entropy by
            default.
        name: name scope.

    Raises:
        ValueError: another rank.
    """
    scores, labels, factors = map(tf.convert_to_tensor, (logits, targets, weights))
    for value, rank, said in (
        (scores, 3, "Logits must be a [batch_size x sequence_length x logits] tensor"),
        (labels, 2, "Targets must be a [batch_size x sequence_length] tensor"),
        (factors, 2, "Weights must be a [batch_size x sequence_length] tensor"),
    ):
        if len(value.get_shape()) != rank:
            raise ValueError(said)
    entropy = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
    over = [
        axis
        for axis, average in enumerate((average_across_batch, average_across_timesteps))
        if average
    ]
    with tf.name_scope(name, "sequence_loss"):
        flat = entropy(
            labels=tf.reshape(labels, [-1]),
            logits=tf.reshape(scores, [-1, tf.shape(scores)[2]]),
        )
        losses = tf.reshape(flat, tf.shape(labels)) * factors
        if not over:
            return losses
        # TensorFlow's guard against weights that are all zero.
        return tf.reduce_sum(losses, over) / (tf.reduce_sum(factors, over) + 1e-12)


@public.add()
class Helper:
    """The base of what chooses the inputs of a ``BasicDecoder``; of a program's own helpers too."""

    sample_ids_shape: Nest = tf.TensorShape([])
    """The shape of one sample."""
    sample_ids_dtype: Nest = tf.int32
    """The data type of the samples."""

    @property
    def batch_size(self) -> Nest:
        """The number of sequences."""
        raise NotImplementedError("batch_size has not been implemented")

    def initialize(self, name: str | None = None) -> tuple[Nest, Nest]:
        """Returns which sequences are finished at first, and the first inputs."""
        raise NotImplementedError

    def sample(self, time: Nest, outputs: Nest, state: State, name: str | None = None) -> Nest:
        """Returns the symbols of the outputs."""
        raise NotImplementedError

    def next_inputs(
        self, time: Nest, outputs: Nest, state: State, sample_ids: Nest, name: str | None = None
    ) -> tuple[Nest, Nest, State]:
        """Returns which sequences are finished, the next inputs and the state."""
        raise NotImplementedError


@public.add()
class TrainingHelper(Helper):
    """Reads the inputs one step after the other.

    Args:
        inputs: [batch, time, n], or [time, batch, n] with ``time_major``.
        sequence_length: [batch].
        time_major: see above.
        name: not needed.

    Raises:
        ValueError: ``sequence_length`` is not a vector.
    """

    def __init__(
        self, inputs: Nest, sequence_length: Nest, time_major: bool = False, name: str | None = None
    ) -> None:
        x = tf.convert_to_tensor(inputs)
        order = [1, 0, *range(2, len(x.get_shape()))]
        self._inputs = x if time_major else tf.transpose(x, order)
        self._lengths = tf.convert_to_tensor(sequence_length)
        if self._lengths.get_shape().ndims != 1:
            raise ValueError(
                "Expected sequence_length to be a vector, but received shape: "
                f"{self._lengths.get_shape()}"
            )

    @property
    def batch_size(self) -> Nest:
        """The number of sequences."""
        return tf.size(self._lengths)

    @property
    def steps(self) -> Nest:
        """The number of steps of the inputs, known before the step runs."""
        return tf.shape(self._inputs)[0]

    def initialize(self, name: str | None = None) -> tuple[Nest, Nest]:
        """Returns which sequences are finished at first, and the first inputs."""
        return tf.equal(self._lengths, 0), self._inputs[0]

    def sample(self, time: Nest, outputs: Nest, state: State, name: str | None = None) -> Nest:
        """Returns the symbols that score highest."""
        return tf.cast(tf.argmax(outputs, -1), tf.int32)

    def next_inputs(
        self, time: Nest, outputs: Nest, state: State, sample_ids: Nest, name: str | None = None
    ) -> tuple[Nest, Nest, State]:
        """Returns which sequences are finished, the next inputs and the state."""
        after = time + 1
        # After the last step the inputs have no row; what is read then is not used.
        row = tf.gather(self._inputs, tf.minimum(after, self.steps - 1))
        return after >= tf.cast(self._lengths, tf.int32), row, state


@public.add()
class GreedyEmbeddingHelper(Helper):
    """Reads the embedding of the symbol that the last output scores highest.

    Args:
        embedding: a function of symbols, or rows for ``tf.nn.embedding_lookup``.
        start_tokens: [batch]: the first symbols.
        end_token: the symbol that ends a sequence.

    Raises:
        ValueError: ``start_tokens`` is not a vector, or ``end_token`` not a scalar.
    """

    def __init__(self, embedding: Nest, start_tokens: Nest, end_token: Nest) -> None:
        self._embed = (
            embedding
            if callable(embedding)
            else lambda symbols: tf.nn.embedding_lookup(embedding, symbols)
        )
        self._start = tf.convert_to_tensor(start_tokens, tf.int32)
        self._end = tf.convert_to_tensor(end_token, tf.int32)
        if self._start.get_shape().ndims != 1:
            raise ValueError("start_tokens must be a vector")
        if self._end.get_shape().ndims != 0:
            raise ValueError("end_token must be a scalar")

    @property
    def batch_size(self) -> Nest:
        """The number of sequences."""
        return tf.size(self._start)

    def initialize(self, name: str | None = None) -> tuple[Nest, Nest]:
        """Returns which sequences are finished at first, and the first inputs."""
        return tf.zeros_like(self._start, tf.bool), self._embed(self._start)

    def sample(self, time: Nest, outputs: Nest, state: State, name: str | None = None) -> Nest:
        """Returns the symbols that score highest."""
        return tf.cast(tf.argmax(outputs, -1), tf.int32)

    def next_inputs(
        self, time: Nest, outputs: Nest, state: State, sample_ids: Nest, name: str | None = None
    ) -> tuple[Nest, Nest, State]:
        """Returns which sequences are finished, the next inputs and the state."""
        return tf.equal(sample_ids, self._end), self._embed(sample_ids), state


@public.add()
class SampleEmbeddingHelper(GreedyEmbeddingHelper):
    """Reads the embedding of a symbol that is drawn by its score.

    Args:
        embedding: as in ``GreedyEmbeddingHelper``, as are ``start_tokens`` and ``end_token``.
        start_tokens: see ``embedding``.
        end_token: see ``embedding``.
        softmax_temperature: the scores are divided by this number before the draw.
        seed: of the draw.
    """

    def __init__(
        self,
        embedding: Nest,
        start_tokens: Nest,
        end_token: Nest,
        softmax_temperature: Nest = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(embedding, start_tokens, end_token)
        self._temperature, self._seed = softmax_temperature, seed

    def sample(self, time: Nest, outputs: Nest, state: State, name: str | None = None) -> Nest:
        """Draws symbols."""
        scores = outputs if self._temperature is None else outputs / self._temperature
        return tf.cast(tf.squeeze(tf.multinomial(scores, 1, self._seed), [1]), tf.int32)


@public.add()
class Decoder:
    """The base of what ``dynamic_decode`` runs; of a program's own decoders too."""

    tracks_own_finished = False
    """True for a decoder that says of every sequence in each step if it is finished."""

    @property
    def output_dtype(self) -> Nest:
        """The data types of the outputs of a step, in a nest."""
        raise NotImplementedError

    def initialize(self, name: str | None = None) -> tuple[Nest, Nest, State]:
        """Returns which sequences are finished at first, the first inputs and the first state."""
        raise NotImplementedError

    def step(
        self, time: Nest, inputs: Nest, state: State, name: str | None = None
    ) -> tuple[Nest, State, Nest, Nest]:
        """Returns outputs, the next state, the next inputs, and which sequences are finished."""
        raise NotImplementedError

    def finalize(
        self, outputs: Nest, final_state: State, sequence_lengths: Nest
    ) -> tuple[Nest, Nest]:
        """Returns what becomes of the outputs of all steps and of the last state."""
        return outputs, final_state


@public.add()
class BasicDecoderOutput(NamedTuple):
    """The outputs of a ``BasicDecoder``, and the symbols that its helper made of them."""

    rnn_output: Nest
    sample_id: Nest


@public.add()
class BasicDecoder(Decoder):
    """Runs a cell on the inputs that a helper chooses.

    Args:
        cell: one of ``tf.nn.rnn_cell``, or a program's own.
        helper: chooses the inputs.
        initial_state: of the cell.
        output_layer: a function of the outputs, such as a ``tf.layers.Dense``.

    Raises:
        TypeError: ``cell`` or ``helper`` is of another class.
    """

    def __init__(
        self, cell: Nest, helper: Helper, initial_state: State, output_layer: Nest = None
    ) -> None:
        if not isinstance(cell, RNNCell):
            raise TypeError(f"cell must be an RNNCell, received: {type(cell)}")
        if not isinstance(helper, Helper):
            raise TypeError(f"helper must be a Helper, received: {type(helper)}")
        self._cell: Nest = cell
        self._helper, self._state = helper, initial_state
        self._layer = output_layer or tf.identity

    @property
    def batch_size(self) -> Nest:
        """The number of sequences."""
        return self._helper.batch_size

    @property
    def steps(self) -> Nest:
        """The number of steps of the helper's inputs; None for a helper that makes its inputs."""
        return getattr(self._helper, "steps", None)

    @property
    def output_dtype(self) -> BasicDecoderOutput:
        """The data types of the outputs of a step."""
        first = jax.tree.leaves(self._state)[0]
        return BasicDecoderOutput(first.dtype, self._helper.sample_ids_dtype)

    def initialize(self, name: str | None = None) -> tuple[Nest, Nest, State]:
        """Returns which sequences are finished at first, the first inputs and the first state."""
        return (*self._helper.initialize(), self._state)

    def step(
        self, time: Nest, inputs: Nest, state: State, name: str | None = None
    ) -> tuple[BasicDecoderOutput, State, Nest, Nest]:
        """Returns outputs, the next state, the next inputs, and which sequences are finished."""
        with tf.name_scope(name, "BasicDecoderStep"):
            made, state = self._cell(inputs, state)
            outputs = self._layer(made)
            symbols = self._helper.sample(time=time, outputs=outputs, state=state)
            finished, following, state = self._helper.next_inputs(
                time=time, outputs=outputs, state=state, sample_ids=symbols
            )
        return BasicDecoderOutput(outputs, symbols), state, following, finished


@public.add()
def dynamic_decode(
    decoder: Decoder,
    output_time_major: bool = False,
    impute_finished: bool = False,
    maximum_iterations: Nest = None,
    parallel_iterations: object = 32,
    swap_memory: bool = False,
    scope: Nest = None,
) -> tuple[Nest, State, Nest]:
    """Runs a decoder until all sequences are finished; gives the outputs, the last state and the lengths.

    Args:
        decoder: a ``BasicDecoder``, or a program's own.
        output_time_major: outputs are [time, batch, ...], not [batch, time, ...].
        impute_finished: outputs of finished sequences are 0, and their states stay.
        maximum_iterations: ends after so many steps. With a ``TrainingHelper`` it may be computed;
            without one it is needed, as a number.
        parallel_iterations: not needed.
        swap_memory: not needed.
        scope: the variable scope; "decoder" by default.

    Raises:
        TypeError: ``decoder`` is of another class.
        ValueError: nothing says how many steps there are at most.
    """
    if not isinstance(decoder, Decoder):
        raise TypeError(f"Expected decoder to be type Decoder, but saw: {type(decoder)}")
    # Only the inputs of a TrainingHelper say how many steps there are at most.
    steps = getattr(decoder, "steps", None)
    most = maximum_iterations if steps is None else steps
    if most is None:
        raise ValueError(
            "dynamic_decode: XLA needs the largest number of steps: give maximum_iterations"
        )
    with tf.variable_scope(scope or "decoder"):
        finished, inputs, state = decoder.initialize()
        arrays = jax.tree.map(lambda kind: tf.TensorArray(kind, most), decoder.output_dtype)

        def going(
            time: Nest, arrays: Nest, state: Nest, inputs: Nest, finished: Nest, _: Nest
        ) -> Nest:
            more = tf.logical_not(tf.reduce_all(finished))
            if maximum_iterations is None:
                return more
            return tf.logical_and(more, time < maximum_iterations)

        def step(
            time: Nest, arrays: Nest, state: Nest, inputs: Nest, finished: Nest, lengths: Nest
        ) -> Nest:
            outputs, after, following, ends = decoder.step(time, inputs, state)
            if not decoder.tracks_own_finished:
                ends = tf.logical_or(ends, finished)
            lengths = tf.where(finished, lengths, tf.fill(tf.shape(lengths), time + 1))
            if impute_finished:
                outputs, after = _imputed(finished, outputs, state, after)
            arrays = jax.tree.map(
                lambda array, out: array.write(time, out), arrays, outputs, is_leaf=_is_array
            )
            return time + 1, arrays, after, following, ends, lengths

        begin = (tf.constant(0), arrays, state, inputs, finished, tf.zeros_like(finished, tf.int32))
        # A limit that is known before the step makes the derivative as cheap as the loop.
        _, arrays, state, _, _, lengths = tf.while_loop(going, step, begin, maximum_iterations=most)
        outputs, state = decoder.finalize(_stacked(arrays), state, lengths)
        if not output_time_major:
            outputs = jax.tree.map(_batch_first, outputs)
        return outputs, state, lengths


def _stacked(arrays: Nest) -> Nest:
    return jax.tree.map(lambda array: array.stack(), arrays, is_leaf=_is_array)


def _imputed(finished: Nest, outputs: Nest, before: State, after: State) -> tuple[Nest, State]:
    """Returns outputs that are 0, and states that stay, where a sequence is finished."""
    kept = jax.tree.map(
        lambda new, old: new if new.shape == () else tf.where(finished, old, new), after, before
    )
    return jax.tree.map(lambda out: tf.where(finished, tf.zeros_like(out), out), outputs), kept


def _is_array(value: object) -> bool:
    return isinstance(value, tf.TensorArray)


def _batch_first(steps: Nest) -> Nest:
    return tf.transpose(steps, [1, 0, *range(2, len(steps.get_shape()))])
