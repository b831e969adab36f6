"""Loops over time: ``tf.nn.dynamic_rnn``, ``tf.nn.static_rnn``, ``tf.nn.bidirectional_dynamic_rnn``.

With a cell of ``tf.nn.rnn_cell`` a loop is one operation, a ``jax.lax.scan``, however long it is. A
cell that a program defines itself, by ``__call__``, is called step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import runtime as rt
from harness.tf1.graph import scopes
from harness.tf1.graph.scopes import variable_scope
from harness.tf1.layers.rnn_cells import Cell, State, size_of_inputs
from harness.tf1.ops import array_ops
from harness.tf1.ops.join_ops import stack, unstack
from harness.tf1.ops.lift import Public

public = Public("tf.nn")


def _scan_cell(
    cell: Cell,
    parameters: Any,
    inputs: rt.TensorLike,
    state: State,
    lengths: rt.TensorLike | None,
    time_major: bool,
    backwards: bool = False,
) -> tuple[Any, State]:
    """Runs a cell over time as one operation; gives the outputs and the last state."""

    def scan(
        parameters: Any, inputs: jax.Array, state: State, lengths: jax.Array | None
    ) -> tuple[jax.Array, State]:
        steps = inputs if time_major else jnp.swapaxes(inputs, 0, 1)
        count = steps.shape[0]
        if backwards:
            steps = _reverse_steps(steps, lengths)

        def step(before: State, now: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
            time, x = now
            output, after = cell.compute(parameters, x, before, time)
            if lengths is None:
                return after, output
            # Behind the end of a sequence TensorFlow gives zeros and keeps the last state.
            going = (time < lengths)[:, None]
            kept = jax.tree.map(lambda new, old: jnp.where(going, new, old), after, before)
            return kept, jnp.where(going, output, 0)

        last, outputs = jax.lax.scan(step, state, (jnp.arange(count, dtype=jnp.int32), steps))
        if backwards:
            outputs = _reverse_steps(outputs, lengths)
        return outputs if time_major else jnp.swapaxes(outputs, 0, 1), last

    ends = None if lengths is None else rt.as_tensor(lengths)
    return rt.call(scan, parameters, inputs, state, ends, name="scan")  # type: ignore[no-any-return]


def _reverse_steps(steps: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Reverses each sequence of [time, batch, n]; padding behind the end stays in place."""
    if lengths is None:
        return steps[::-1]
    time = jnp.arange(steps.shape[0])[:, None]
    # As tf.reverse_sequence: only the part before the end is turned round.
    places = jnp.where(time < lengths, lengths - 1 - time, time)
    return jnp.take_along_axis(steps, places[..., None], 0)


def _first_state(cell: Any, initial_state: State, dtype: Any, batch: Any) -> State:
    if initial_state is not None:
        return initial_state
    if dtype is None:
        raise ValueError("If there is no initial_state, you must give a dtype.")
    return cell.zero_state(batch, dtype)


def _batch_size(x: rt.Tensor, axis: int) -> Any:
    known = None if x.shape is None else x.shape[axis]
    return array_ops.shape(x)[axis] if known is None else known


@public.add()
def dynamic_rnn(
    cell: Any,
    inputs: rt.TensorLike,
    sequence_length: rt.TensorLike | None = None,
    initial_state: State = None,
    dtype: Any = None,
    parallel_iterations: object = None,
    swap_memory: bool = False,
    time_major: bool = False,
    scope: Any = None,
) -> tuple[Any, State]:
    """Runs a cell over time.

    Args:
        cell: one of ``tf.nn.rnn_cell``.
        inputs: [batch, time, n], or [time, batch, n] with ``time_major``; n must be known.
        sequence_length: [batch]: behind these lengths the outputs are 0 and the state stays.
        initial_state: zeros of ``dtype`` by default.
        dtype: see above.
        parallel_iterations: not needed.
        swap_memory: not needed.
        time_major: see above.
        scope: the variable scope; "rnn" by default.

    Returns:
        The outputs, laid out as the inputs, and the last state.

    Raises:
        TypeError: the cell is one that the program defines itself, and the number of steps is not
            known.
        ValueError: neither ``initial_state`` nor ``dtype``, or n is not known.
    """
    x = rt.as_tensor(inputs)
    with variable_scope(scope or "rnn"):
        state = _first_state(cell, initial_state, dtype, _batch_size(x, 1 if time_major else 0))
        # A cell of this package computes on arrays, so the loop is a single scan. A program's own
        # cell makes operations step by step.
        if isinstance(cell, Cell):
            parameters = cell.scoped_parameters(size_of_inputs(x), x.dtype)
            return _scan_cell(cell, parameters, x, state, sequence_length, time_major)
        axis = 0 if time_major else 1
        if x.shape is None or x.shape[axis] is None or sequence_length is not None:
            raise TypeError(
                "dynamic_rnn: a cell that the program defines itself needs a known number of steps "
                "and no "
                "sequence_length; derive it from tf.nn.rnn_cell's cells, or write the loop with "
                "jax.lax.scan in rt.call"
            )
        outputs, state = _unroll_cell(cell, unstack(x, axis=axis), state)
        return stack(outputs, axis), state


def _unroll_cell(cell: Any, inputs: Sequence[Any], state: State) -> tuple[list[Any], State]:
    outputs = []
    for number, x in enumerate(inputs):
        if number:
            # All steps share the variables that the first one makes.
            scopes.get_variable_scope().reuse_variables()
        output, state = cell(x, state)
        outputs.append(output)
    return outputs, state


@public.add()
def static_rnn(
    cell: Any,
    inputs: Sequence[rt.TensorLike],
    initial_state: State = None,
    dtype: Any = None,
    sequence_length: rt.TensorLike | None = None,
    scope: Any = None,
) -> tuple[list[Any], State]:
    """Runs ``dynamic_rnn`` on a list of [batch, n], one for each step; returns a list of outputs and the last state.

    Raises:
        ValueError: no inputs, or as ``dynamic_rnn``.
    """
    if not inputs:
        raise ValueError("static_rnn: inputs must not be empty")
    x = stack(list(inputs))
    outputs, state = dynamic_rnn(
        cell, x, sequence_length, initial_state, dtype, time_major=True, scope=scope
    )
    return unstack(outputs, len(inputs)), state


@public.add()
def bidirectional_dynamic_rnn(
    cell_fw: Any,
    cell_bw: Any,
    inputs: rt.TensorLike,
    sequence_length: rt.TensorLike | None = None,
    initial_state_fw: State = None,
    initial_state_bw: State = None,
    dtype: Any = None,
    parallel_iterations: object = None,
    swap_memory: bool = False,
    time_major: bool = False,
    scope: Any = None,
) -> tuple[tuple[Any, Any], tuple[State, State]]:
    """Runs ``dynamic_rnn`` both ways; returns both outputs, in the order of the inputs, and both states."""
    x = rt.as_tensor(inputs)
    found = []
    with variable_scope(scope or "bidirectional_rnn"):
        for name, cell, first in (
            ("fw", cell_fw, initial_state_fw),
            ("bw", cell_bw, initial_state_bw),
        ):
            if not isinstance(cell, Cell):
                raise TypeError(
                    f"bidirectional_dynamic_rnn takes the cells of tf.nn.rnn_cell, not {cell!r}"
                )
            with variable_scope(name):
                state = _first_state(cell, first, dtype, _batch_size(x, 1 if time_major else 0))
                parameters = cell.scoped_parameters(size_of_inputs(x), x.dtype)
                found.append(
                    _scan_cell(
                        cell, parameters, x, state, sequence_length, time_major, name == "bw"
                    )
                )
    (forwards, last), (backwards, first_) = found
    return (forwards, backwards), (last, first_)
