"""Recurrent cells: ``tf.nn.rnn_cell``. A cell is a JAX function of its parameters, the inputs and the state."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from harness.tf1.graph.initializers import constant_initializer, zeros_initializer
from harness.tf1.graph.scopes import get_variable, variable_scope
from harness.tf1.ops import array_ops
from harness.tf1.ops.lift import Public

public = Public("tf.nn.rnn_cell")
_contrib = Public("tf.contrib.rnn")

State = Any
"""A tensor or array [batch, n], or a tuple of these."""
Sizes = Any
"""An int, or a tuple of these: the sizes of a state."""


@public.add()
class LSTMStateTuple(NamedTuple):
    """The state of an LSTM: the memory c and the output h."""

    c: Any
    h: Any


def _unlift_activation(activation: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns an activation as a function of arrays; of ``tf.nn`` the function that was lifted."""
    inner, parameters = (
        getattr(activation, "__wrapped__", None),
        inspect.signature(activation).parameters,
    )
    # A function of JAX's, or of the program, takes arrays as it is.
    if inner is None or "name" not in parameters:
        return activation
    return lambda x: inner(**{next(iter(parameters)): x})


@public.add()
class RNNCell:
    """The base of all cells: ``output, state = cell(inputs, state)``; of a program's own cells too."""

    @property
    def state_size(self) -> Sizes:
        """The sizes of the state."""
        raise NotImplementedError(f"{type(self).__name__} does not say its state_size")

    @property
    def output_size(self) -> int:
        """The size of the output."""
        raise NotImplementedError(f"{type(self).__name__} does not say its output_size")

    def zero_state(self, batch_size: Any, dtype: Any = np.float32) -> State:
        """Returns a state of zeros; ``batch_size`` may be a tensor."""
        return _map_sizes(lambda size: array_ops.zeros([batch_size, size], dtype), self.state_size)


class Cell(RNNCell):
    """A cell whose computation is a JAX function."""

    _scope = "rnn_cell"
    _reuse: Any = None

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        raise NotImplementedError

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state.

        Args:
            parameters: the values of ``parameters``.
            inputs: [batch, input_size].
            state: arrays.
            time: which step it is: a number, or an int32 scalar in a loop.
        """
        raise NotImplementedError

    def scoped_parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the parameters, made in the variable scope of the cell."""
        with variable_scope(self._scope, reuse=self._reuse):
            return self.parameters(input_size, dtype)

    def __call__(self, inputs: rt.TensorLike, state: State, scope: Any = None) -> tuple[Any, State]:
        """Runs one step. The first step makes the variables."""
        x = rt.as_tensor(inputs)
        made: dict[rt.Graph, Any] = self.__dict__.setdefault("_made", weakref.WeakKeyDictionary())
        if x.graph not in made:
            with variable_scope(scope) if scope is not None else contextlib.nullcontext():
                made[x.graph] = [0, self.scoped_parameters(size_of_inputs(x), x.dtype)]
        time, parameters = made[x.graph]
        # The number of the call is the step, by which a wrapper with dropout draws anew.
        made[x.graph][0] += 1
        output, after = rt.call(
            functools.partial(self.compute, time=time), parameters, x, state, name=self._scope
        )
        return output, after


def size_of_inputs(x: rt.Tensor) -> int:
    """Returns the size of the last dimension. Raises ValueError where it is not known."""
    size = x.shape[-1] if x.shape else None
    if size is None:
        raise ValueError(
            f"Could not infer input size from inputs.get_shape()[-1]: {x.name!r} has shape "
            f"{x.shape}"
        )
    return int(size)


def _map_sizes(fn: Callable[[int], Any], sizes: Sizes) -> State:
    # LSTMStateTuple is a tuple whose class must stay: programs read its c and h.
    if isinstance(sizes, int):
        return fn(sizes)
    mapped = [_map_sizes(fn, size) for size in sizes]
    return type(sizes)(*mapped) if hasattr(sizes, "_fields") else tuple(mapped)


@public.add()
class BasicRNNCell(Cell):
    """``activation([inputs, state] @ kernel + bias)``."""

    _scope = "basic_rnn_cell"

    def __init__(
        self,
        num_units: int,
        input_size: object = None,
        activation: Any = jnp.tanh,
        reuse: Any = None,
    ) -> None:
        self._units, self._activation, self._reuse = (
            num_units,
            _unlift_activation(activation or jnp.tanh),
            reuse,
        )

    @property
    def state_size(self) -> Sizes:
        """``num_units``."""
        return self._units

    @property
    def output_size(self) -> int:
        """``num_units``."""
        return self._units

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        return _linear_variables(input_size + self._units, self._units, dtype)

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        output = self._activation(_apply_linear(parameters, inputs, state))
        return output, output


def _linear_variables(size: int, units: int, dtype: Any, bias: float = 0.0) -> dict[str, Any]:
    made = constant_initializer(bias) if bias else zeros_initializer()
    return {
        "kernel": get_variable("kernel", [size, units], dtype),
        "bias": get_variable("bias", [units], dtype, made),
    }


def _apply_linear(parameters: Mapping[str, jax.Array], *inputs: jax.Array) -> jax.Array:
    return jnp.concatenate(inputs, 1) @ parameters["kernel"] + parameters["bias"]


@public.add()
class GRUCell(BasicRNNCell):
    """A gated recurrent unit."""

    _scope = "gru_cell"

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        size = input_size + self._units
        with variable_scope("gates"):
            gates = _linear_variables(size, 2 * self._units, dtype, 1.0)
        with variable_scope("candidate"):
            return {"gates": gates, "candidate": _linear_variables(size, self._units, dtype)}

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        reset, update = jnp.split(
            jax.nn.sigmoid(_apply_linear(parameters["gates"], inputs, state)), 2, 1
        )
        candidate = self._activation(_apply_linear(parameters["candidate"], inputs, reset * state))
        output = update * state + (1 - update) * candidate
        return output, output


@public.add()
class BasicLSTMCell(Cell):
    """A long short-term memory without peepholes.

    Args:
        num_units: size of the output and of each half of the state.
        forget_bias: is added to the forget gate.
        input_size: not needed.
        state_is_tuple: the state is an ``LSTMStateTuple``; False for c and h beside each other in
            one tensor.
        activation: of the state; tanh by default.
        reuse: take the variables of a cell of this scope.
    """

    _scope = "basic_lstm_cell"

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        input_size: object = None,
        state_is_tuple: bool = True,
        activation: Any = jnp.tanh,
        reuse: Any = None,
    ) -> None:
        self._units, self._forget_bias, self._tuple = num_units, forget_bias, state_is_tuple
        self._activation, self._reuse = _unlift_activation(activation or jnp.tanh), reuse

    @property
    def state_size(self) -> Sizes:
        """The sizes of c and h; their sum where the state is one tensor."""
        return LSTMStateTuple(self._units, self._units) if self._tuple else 2 * self._units

    @property
    def output_size(self) -> int:
        """``num_units``."""
        return self._units

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        return _linear_variables(input_size + self._units, 4 * self._units, dtype)

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        c, h = state if self._tuple else jnp.split(state, 2, 1)
        i, j, f, o = jnp.split(_apply_linear(parameters, inputs, h), 4, 1)
        c = c * jax.nn.sigmoid(f + self._forget_bias) + jax.nn.sigmoid(i) * self._activation(j)
        h = self._activation(c) * jax.nn.sigmoid(o)
        return h, LSTMStateTuple(c, h) if self._tuple else jnp.concatenate([c, h], 1)


@public.add()
class LSTMCell(BasicLSTMCell):
    """``BasicLSTMCell`` by the arguments of ``tf.nn.rnn_cell.LSTMCell``.

    Raises:
        ValueError: peepholes, clipping or a projection is asked for.
    """

    _scope = "lstm_cell"

    def __init__(
        self,
        num_units: int,
        input_size: object = None,
        use_peepholes: bool = False,
        cell_clip: float | None = None,
        initializer: Any = None,
        num_proj: int | None = None,
        proj_clip: float | None = None,
        num_unit_shards: object = None,
        num_proj_shards: object = None,
        forget_bias: float = 1.0,
        state_is_tuple: bool = True,
        activation: Any = jnp.tanh,
        reuse: Any = None,
    ) -> None:
        if use_peepholes or cell_clip is not None or num_proj is not None or proj_clip is not None:
            raise ValueError(
                "LSTMCell: use_peepholes, cell_clip, num_proj and proj_clip are not in harness.tf1"
            )
        super().__init__(num_units, forget_bias, input_size, state_is_tuple, activation, reuse)
        self._initializer = initializer

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        size = [input_size + self._units, 4 * self._units]
        return {
            "kernel": get_variable("kernel", size, dtype, self._initializer),
            "bias": get_variable("bias", size[1:], dtype, zeros_initializer()),
        }


@_contrib.add()
class NASCell(Cell):
    """The cell that a search for architectures has found (https://arxiv.org/abs/1611.01578).

    Args:
        num_units: size of the memory.
        num_proj: size of the output; ``num_units`` without a projection.
        use_biases: whether there is a bias.
        reuse: take the variables of a cell of this scope.
    """

    _scope = "nas_cell"

    def __init__(
        self,
        num_units: int,
        num_proj: int | None = None,
        use_biases: bool = False,
        reuse: Any = None,
    ) -> None:
        self._units, self._projected, self._biased = num_units, num_proj, use_biases
        self._reuse = reuse

    @property
    def state_size(self) -> Sizes:
        """The sizes of the memory and of the output."""
        return LSTMStateTuple(self._units, self.output_size)

    @property
    def output_size(self) -> int:
        """``num_proj``, or ``num_units``."""
        return self._projected or self._units

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        gates = 8 * self._units
        sizes = {"recurrent_kernel": [self.output_size, gates], "kernel": [input_size, gates]}
        if self._projected:
            sizes["projection_weights"] = [self._units, self._projected]
        found = {name: get_variable(name, size, dtype) for name, size in sizes.items()}
        if self._biased:
            found["bias"] = get_variable("bias", [gates], dtype, zeros_initializer())
        return found

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        memory, before = state
        given = jnp.split(inputs @ parameters["kernel"], 8, 1)
        kept = jnp.split(
            before @ parameters["recurrent_kernel"] + parameters.get("bias", 0.0), 8, 1
        )
        sigmoid, tanh, relu = jax.nn.sigmoid, jnp.tanh, jax.nn.relu
        # The tree of figure 8 in the paper. Its fourth leaf multiplies where the others add.
        kinds = (sigmoid, relu, sigmoid, relu, tanh, sigmoid, tanh, sigmoid)
        leaves = [
            kind(x * h if place == 3 else x + h)
            for place, (kind, x, h) in enumerate(zip(kinds, given, kept, strict=True))
        ]
        first = tanh(tanh(leaves[0] * leaves[1]) + memory)
        memory = first * tanh(leaves[2] + leaves[3])
        last = tanh(tanh(leaves[4] * leaves[5]) + sigmoid(leaves[6] + leaves[7]))
        output = tanh(memory * last)
        if self._projected:
            output = output @ parameters["projection_weights"]
        return output, LSTMStateTuple(memory, output)


@public.add()
class MultiRNNCell(Cell):
    """Cells on top of each other; the state is a tuple of the cells' states.

    Raises:
        ValueError: no cells, ``state_is_tuple=False``, or a cell that a program defines.
    """

    _scope = "multi_rnn_cell"

    def __init__(self, cells: Sequence[Any], state_is_tuple: bool = True) -> None:
        if not cells or not state_is_tuple:
            raise ValueError("MultiRNNCell: give at least one cell, and leave state_is_tuple=True")
        if others := [cell for cell in cells if not isinstance(cell, Cell)]:
            raise ValueError(
                f"MultiRNNCell takes the cells of tf.nn.rnn_cell; {others[0]!r} is another: call "
                "it yourself"
            )
        self._cells: tuple[Cell, ...] = tuple(cells)

    @property
    def state_size(self) -> Sizes:
        """A tuple of those of the cells."""
        return tuple(cell.state_size for cell in self._cells)

    @property
    def output_size(self) -> int:
        """The size of the last cell's output."""
        return self._cells[-1].output_size

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        found = []
        for number, cell in enumerate(self._cells):
            with variable_scope(f"cell_{number}"):
                found.append(cell.scoped_parameters(input_size, dtype))
            input_size = cell.output_size
        return found

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        after = []
        for cell, own, before in zip(self._cells, parameters, state, strict=True):
            inputs, now = cell.compute(own, inputs, before, time)
            after.append(now)
        return inputs, tuple(after)


@_contrib.add()
class OutputProjectionWrapper(Cell):
    """A cell whose outputs are multiplied by a kernel of its own, with a bias.

    Args:
        cell: one of ``tf.nn.rnn_cell``.
        output_size: of the result.
        activation: of the result.
        reuse: take the variables of a cell of this scope.
    """

    _scope = "output_projection_wrapper"

    def __init__(
        self, cell: Any, output_size: int, activation: Any = None, reuse: Any = None
    ) -> None:
        if not isinstance(cell, Cell):
            raise ValueError(
                f"OutputProjectionWrapper takes a cell of tf.nn.rnn_cell, not {cell!r}"
            )
        self._cell, self._size, self._reuse = cell, output_size, reuse
        self._activation = _unlift_activation(activation) if activation else lambda x: x

    @property
    def state_size(self) -> Sizes:
        """That of the cell."""
        return self._cell.state_size

    @property
    def output_size(self) -> int:
        """The size of the result."""
        return self._size

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        cell = self._cell.scoped_parameters(input_size, dtype)
        return {"cell": cell, "out": _linear_variables(self._cell.output_size, self._size, dtype)}

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        output, after = self._cell.compute(parameters["cell"], inputs, state, time)
        return self._activation(_apply_linear(parameters["out"], output)), after


@public.add()
class DropoutWrapper(Cell):
    """Drops parts of a cell's inputs and outputs, others in every step of time.

    Args:
        cell: one of ``tf.nn.rnn_cell``.
        input_keep_prob: a number or a tensor.
        output_keep_prob: a number or a tensor.
        seed: of the draw.
    """

    def __init__(
        self,
        cell: Any,
        input_keep_prob: Any = 1.0,
        output_keep_prob: Any = 1.0,
        seed: int | None = None,
    ) -> None:
        if not isinstance(cell, Cell):
            raise ValueError(f"DropoutWrapper takes a cell of tf.nn.rnn_cell, not {cell!r}")
        self._cell, self._keep, self._seed = cell, (input_keep_prob, output_keep_prob), seed

    @property
    def state_size(self) -> Sizes:
        """That of the cell."""
        return self._cell.state_size

    @property
    def output_size(self) -> int:
        """That of the cell."""
        return self._cell.output_size

    def scoped_parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the parameters, made in the variable scope of the cell."""
        return {
            "cell": self._cell.scoped_parameters(input_size, dtype),
            "keep": self._keep,
            "key": rt.random_key(self._seed, "dropout_key"),
        }

    def parameters(self, input_size: int, dtype: Any) -> Any:
        """Returns the variables of the open variable scope, keys and numbers that ``compute`` needs."""
        return self.scoped_parameters(input_size, dtype)

    def compute(
        self, parameters: Any, inputs: jax.Array, state: State, time: Any
    ) -> tuple[jax.Array, State]:
        """Computes the output and the next state."""
        into, out_of = jax.random.split(jax.random.fold_in(parameters["key"], time))
        kept = [jnp.asarray(keep, inputs.dtype) for keep in parameters["keep"]]
        output, after = self._cell.compute(
            parameters["cell"], _drop_parts(into, inputs, kept[0]), state, time
        )
        return _drop_parts(out_of, output, kept[1]), after


def _drop_parts(key: jax.Array, values: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, keep, values.shape), values / keep, 0)
