"""Optimizers of tables: any optax transformation, applied to each touched row as to a variable of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import runtime as rt
from harness.optimizers.separable import dependences, split_clip
from harness.optimizers.slot_names import is_key, slot_name
from runtime.lowlevel import ArraySlice, PagedArray


class RowwiseAdagradState(NamedTuple):
    """The state of ``rowwise_adagrad``.

    Attributes:
        sum_of_squares: for each row, the sum of the means of the squares of its gradients.
    """

    sum_of_squares: optax.Updates


def rowwise_adagrad(
    learning_rate: float, initial_accumulator_value: float = 0.0, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Makes Adagrad with one number of state for each row, as recommenders use for large tables.

    The state is a ``dim``-th of Adagrad's.

    Args:
        learning_rate: the rate.
        initial_accumulator_value: first value of the state.
        eps: number added to the root.

    Examples:
        >>> transformation = rowwise_adagrad(0.1)
        >>> row, gradient = jnp.array([1.0, 1.0]), jnp.array([3.0, 4.0])
        >>> change, state = transformation.update(gradient, transformation.init(row), row)
        >>> [round(float(number), 4) for number in change]
        [-0.0849, -0.1131]
    """

    def begin(leaf: jax.Array) -> jax.Array:
        return jnp.full((*leaf.shape[:-1], 1), initial_accumulator_value, leaf.dtype)

    def init(params: optax.Params) -> RowwiseAdagradState:
        return RowwiseAdagradState(jax.tree.map(begin, params))

    def update(
        gradients: optax.Updates, state: RowwiseAdagradState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RowwiseAdagradState]:
        del params
        total = jax.tree.map(
            lambda g, s: s + jnp.mean(g * g, axis=-1, keepdims=True),
            gradients,
            state.sum_of_squares,
        )
        changes = jax.tree.map(
            lambda g, s: -learning_rate * g / (jnp.sqrt(s) + eps), gradients, total
        )
        return changes, RowwiseAdagradState(total)

    return optax.GradientTransformation(init, update)


class _Leaf(NamedTuple):
    """A leaf of the state of one row.

    Attributes:
        name: name of the slot.
        spec: shape and dtype for one row.
        is_shared: True if the leaf is the same for all rows, such as a count.
    """

    name: str
    spec: jax.ShapeDtypeStruct
    is_shared: bool


def variables_of(trained: rt.Variable | rt.Table) -> list[rt.Variable]:
    """Returns a variable on each task of what is trained: the variable itself, or pages of a table."""
    if not isinstance(trained, rt.Table):
        return [trained]
    return [trained.array.pages[shard.pages[0]] for shard in trained.array.shards]


def table_of(update: rt.Operation) -> str:
    """Returns the name of the table that an operation updates; "" for an update of variables."""
    if update.type != "TableUpdate":
        return ""
    assert isinstance(update.body, rt.lowlevel.op_kinds.Host)
    return str(update.body.attrs["table"])


class TableOptimizer:
    """The updates of tables by one optax transformation, row by row.

    A row is a variable of its own: its state is read, updated and written when a step has looked the
    row up, and stays otherwise. A count in the state counts the updates of the whole table.

    Args:
        transformation: an optax transformation; None trains no table.
        extra_args: keyword arguments of its update, as abstract arrays.
        name: first part of the names of operations.

    Raises:
        InvalidArgumentError: The transformation clips the norm of all gradients.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation | None,
        extra_args: Mapping[str, jax.ShapeDtypeStruct],
        name: str,
    ) -> None:
        self._is_given = transformation is not None
        transformation = transformation or optax.identity()
        if split_clip(transformation)[0] is not None:
            raise rt.InvalidArgumentError(
                f"{name}: tables= begins with clip_by_global_norm, which needs all gradients of a "
                "step; the rows of a table are updated one by one"
            )
        self._transformation = optax.with_extra_args_support(transformation)
        self._extra_args = dict(extra_args)
        self._name = name
        self._slots: dict[rt.Table, tuple[list[PagedArray], list[list[rt.Variable]]]] = {}

    def find(self, graph: rt.Graph) -> list[rt.Table]:
        """Finds the tables to train.

        Raises:
            InvalidArgumentError: There are some, and there is no transformation.
        """
        tables = [t for t in graph.get_collection(rt.GraphKeys.TABLES) if t.trainable]
        for table in tables:
            self._check_given(table)
        return tables

    def update_all(
        self, gradients: Sequence[rt.RowGradient], given: Sequence[rt.Tensor], whole: bool
    ) -> list[rt.Operation]:
        """Makes the updates of tables, one for each table and task.

        Args:
            gradients: gradients of the tables.
            given: the extra arguments.
            whole: True if the gradients of variables are changed together before the push.

        Raises:
            InvalidArgumentError: There is no transformation, or ``whole`` is true.
        """
        done: list[rt.Operation] = []
        for gradient in gradients:
            table = gradient.table
            self._check_given(table)
            # A device computes the norm, and the rows of a step have no fixed number.
            if whole:
                raise rt.InvalidArgumentError(
                    f"{self._name}: clip_by_global_norm and before_push see gradients of variables "
                    f"only, and table {table.name!r} is trained: they are not supported with tables"
                )
            leaves = self._describe_leaves(table)
            if table not in self._slots:
                self._slots[table] = self._make_slots(table, leaves)
            update_row = self._row_update(table, leaves)
            done += table.update(gradient, update_row, *self._slots[table], given, "apply")
        return done

    def _check_given(self, table: rt.Table) -> None:
        if not self._is_given:
            raise rt.InvalidArgumentError(
                f"{self._name}: tables= is missing, the transformation of the rows of table "
                f"{table.name!r}, such as harness.rowwise_adagrad(0.01); a table with "
                "trainable=False stays as it is"
            )

    def _describe_leaves(self, table: rt.Table) -> list[_Leaf]:
        row = jax.ShapeDtypeStruct((table.dim,), table.dtype)
        found = dependences(self._transformation, row, self._extra_args)
        if found is None:
            raise rt.InvalidArgumentError(
                f"{self._name}: the transformation of tables= does not take one row of table "
                f"{table.name!r}, {row.dtype}[{table.dim}]"
            )
        state = jax.eval_shape(self._transformation.init, row)
        leaves: list[_Leaf] = []
        for (path, spec), of in zip(jax.tree.flatten_with_path(state)[0], found[1], strict=True):
            name = slot_name(state, path)
            while any(leaf.name == name for leaf in leaves):
                name += "_"
            if is_key(spec) or (not of and spec.shape):
                raise rt.InvalidArgumentError(
                    f"{self._name}: {name} in the state of tables= is no number and belongs to no "
                    f"row of table {table.name!r}: random keys and arrays for all rows are not "
                    "supported"
                )
            leaves.append(_Leaf(name, spec, not of))
        return leaves

    def _make_slots(
        self, table: rt.Table, leaves: Sequence[_Leaf]
    ) -> tuple[list[PagedArray], list[list[rt.Variable]]]:
        """Makes the slots: arrays with a row for each id, and for each task the shared variables."""
        arrays: list[PagedArray] = []
        shared: list[list[rt.Variable]] = [[] for _ in table.array.shards]
        for index, leaf in enumerate(leaves):
            name = f"{table.name}/{leaf.name}"
            if not leaf.is_shared:
                arrays.append(
                    table.slot(name, leaf.spec.shape, leaf.spec.dtype, self._first(table, index))
                )
                continue
            begin = np.asarray(self._first(table, index)())
            for number, shard in enumerate(table.array.shards):
                with rt.name_scope(None), rt.control_dependencies(None):
                    with rt.device(None), rt.device(shard.beside.device or None):
                        slot = rt.Variable(
                            begin, name=f"{name}/task_{number}", dtype=begin.dtype, trainable=False
                        )
                # All tasks have the same value, so checkpoints have the value once.
                slot.save_slice_info = ArraySlice.whole(name, slot.shape, slot.dtype)
                shared[number].append(slot)
        return arrays, shared

    def _first(self, table: rt.Table, index: int) -> Callable[[], jax.Array]:
        """Returns a function that makes the first value of a leaf."""

        def make() -> jax.Array:
            state = self._transformation.init(jnp.zeros((table.dim,), table.dtype))
            value: jax.Array = jax.tree.leaves(state)[index]
            return value

        return make

    def _row_update(
        self, table: rt.Table, leaves: Sequence[_Leaf]
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns the update of one row, in the order of arguments of ``Table.update``."""
        row = jax.ShapeDtypeStruct((table.dim,), table.dtype)
        structure = jax.tree.structure(jax.eval_shape(self._transformation.init, row))
        places = [i for i, leaf in enumerate(leaves) if leaf.is_shared]
        places += [i for i, leaf in enumerate(leaves) if not leaf.is_shared]
        counts = sum(leaf.is_shared for leaf in leaves)

        def update_row(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            value, gradient = arrays[counts], arrays[len(leaves) + 1]
            given = dict(zip(self._extra_args, arrays[len(leaves) + 2 :], strict=True))
            kept = (*arrays[:counts], *arrays[counts + 1 : len(leaves) + 1])
            by_place = dict(zip(places, kept, strict=True))
            state = jax.tree.unflatten(structure, [by_place[i] for i in range(len(leaves))])
            change, state = self._transformation.update(gradient, state, value, **given)
            new = jax.tree.leaves(state)
            return (
                *(new[i] for i in places[:counts]),
                optax.apply_updates(value, change),
                *(new[i] for i in places[counts:]),
            )

        return update_row
