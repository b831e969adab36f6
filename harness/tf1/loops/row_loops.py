"""Loops over the rows of tensors, each one ``jax.lax.scan``: ``tf.map_fn``, ``tf.scan``, ``tf.foldl``, ``tf.foldr``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

import runtime as rt
from harness.tf1.loops.nests import (
    Arrays,
    Made,
    Nest,
    add_operation,
    as_tensors,
    check_callable,
    unflatten_nest,
)
from harness.tf1.loops.subgraph import Subgraph, make_subgraph
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public

public = Public("tf", "Conditionals and loops")


def _stand_for_row(tensor: rt.Tensor, what: str) -> rt.Tensor:
    """Returns the placeholder that stands for a row."""
    if tensor.shape == ():
        raise ValueError(f"{what}: {tensor.name!r} is a scalar, and has no rows")
    return rt.placeholder(tensor.dtype, None if tensor.shape is None else tensor.shape[1:], "row")


@dataclass(frozen=True)
class _RowLoop:
    """A loop of ``jax.lax.scan`` over a function of the program.

    Attributes:
        what: "tf.scan".
        reverse: True from the last row to the first.
        carries: True if a result is carried to the next row; the function takes it before the row.
        last: True where the last result is wanted alone, not all.
    """

    what: str
    reverse: bool = False
    carries: bool = True
    last: bool = False

    def add(
        self,
        fn: Made,
        elems: Nest,
        carried: Nest,
        name: str | None,
        back_prop: bool,
        gives: Nest = None,
    ) -> Nest:
        """Adds the loop over the rows of ``elems`` to the graph.

        ``fn`` is a function of what is carried, at first ``carried`` or the first row, and of a
        row. ``gives`` has the data types of the results; those of ``elems`` by default.
        """
        what = self.what
        check_callable(fn=fn)
        rows, structure = as_tensors(elems, f"{what}: elems")
        from_row = self.carries and carried is None
        scope_name = name or what.removeprefix("tf.")
        with rt.Graph.of(*rows).as_default(), rt.name_scope(scope_name) as scope:
            begin, shape = list[rt.Tensor](), structure
            if carried is not None:
                begin, shape = as_tensors(carried, f"{what}: initializer")
            # The function runs once, on placeholders for a row and for the carried values.
            stands = [_stand_for_row(t, what) for t in rows]
            like = stands if from_row else begin
            before = [rt.placeholder(t.dtype, t.shape, "carried") for t in like]
            carry = [unflatten_nest(shape, before)] if self.carries else []
            results, made = as_tensors(fn(*carry, unflatten_nest(structure, stands)), f"{what}: fn")
            part = make_subgraph(
                results, [*before, *stands], first=stands[0].op.id, what=f"the function of {what}"
            )
            _check_row(what, before, shape, results, made, gives, rows)
            run = functools.partial(self._run, part, from_row)
            out = add_operation(run, scope, (part,), begin, rows)
            # back_prop=False promises no derivative: tf.gradients gives None through the loop.
            if not back_prop:
                rt.lowlevel.without_derivative(out[0])
        return unflatten_nest(made, out)

    def _run(
        self, part: Subgraph, from_row: bool, begin: Arrays, rows: Arrays, captured: Arrays
    ) -> Arrays:
        # TensorFlow starts from the first row where there is no initializer, and gives that row as
        # the first result.
        if from_row:
            begin = [r[-1 if self.reverse else 0] for r in rows]
            rows = [r[:-1] if self.reverse else r[1:] for r in rows]

        def step(now: Arrays, row: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
            out = list(part([*now, *row[1]], part.with_step(captured, row[0])))
            return out if self.carries else [], [] if self.last else out

        # The number of the row is mixed into random keys: TensorFlow draws other numbers for each
        # row.
        turns = jnp.arange(rows[0].shape[0], dtype=np.int32)
        end, every = jax.lax.scan(step, list(begin), (turns, list(rows)), reverse=self.reverse)
        if self.last or not from_row:
            return end if self.last else every
        pairs = ((b[None], e) for b, e in zip(begin, every, strict=True))
        return [jnp.concatenate(pair[::-1] if self.reverse else pair) for pair in pairs]


def _check_row(
    what: str,
    before: Sequence[rt.Tensor],
    shape: PyTreeDef,
    results: Sequence[rt.Tensor],
    made: PyTreeDef,
    gives: Nest,
    rows: Sequence[rt.Tensor],
) -> None:
    if before and shape != made:
        raise ValueError(f"{what}: fn makes {shape} {made}")
    found = [t.dtype.name for t in results]
    if before:
        wanted, told = [t.dtype.name for t in before], f"fn makes {{}} {found}: use tf.cast"
    else:
        # TensorFlow's rule: the results of map_fn have the dtypes of the rows unless dtype= says others.
        given = [t.dtype for t in rows] if gives is None else jax.tree.leaves(gives)
        wanted = [as_dtype(each).dtype.name for each in given]
        told = f"fn gives {found}, and not {{}}: give dtype="
    if found != wanted:
        raise rt.InvalidArgumentError(f"{what}: {told.format(wanted)}")


@public.add()
def map_fn(
    fn: Made,
    elems: Nest,
    dtype: Nest = None,
    parallel_iterations: object = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
) -> Nest:
    """Applies ``fn`` to each row of ``elems``, and stacks the results."""
    loop = _RowLoop("tf.map_fn", carries=False)
    return loop.add(fn, elems, None, name or "map", back_prop, dtype)


@public.add()
def scan(
    fn: Made,
    elems: Nest,
    initializer: Nest = None,
    parallel_iterations: object = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
    name: str | None = None,
) -> Nest:
    """Computes ``a = fn(a, row)`` for each row of ``elems``, and stacks all ``a``."""
    return _RowLoop("tf.scan", reverse).add(fn, elems, initializer, name, back_prop)


def _add_fold(shown: str, reverse: bool) -> None:
    loop = _RowLoop(f"tf.{shown}", reverse, last=True)

    def fold(
        fn: Made,
        elems: Nest,
        initializer: Nest = None,
        parallel_iterations: object = 10,
        back_prop: bool = True,
        swap_memory: bool = False,
        name: str | None = None,
    ) -> Nest:
        return loop.add(fn, elems, initializer, name, back_prop)

    way = ", from the last row to the first" if reverse else ""
    public.define(shown, fold, f"``tf.scan``{way}; gives the last ``a`` alone.")


_add_fold("foldl", reverse=False)
_add_fold("foldr", reverse=True)
