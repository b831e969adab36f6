"""Loops over the rows of tensors, each one ``jax.lax.scan``: ``tf.map_fn``, ``tf.scan``, ``tf.foldl``, ``tf.foldr``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

import runtime as rt
from harness.tf1.loops.nests import Arrays, Made, Nest, callables, operation, tensors, unflatten
from harness.tf1.loops.subgraph import subgraph
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public

public = Public("tf", "Conditionals and loops")


def _row(tensor: rt.Tensor, what: str) -> rt.Tensor:
    """Returns the placeholder that stands for a row."""
    if tensor.shape == ():
        raise ValueError(f"{what}: {tensor.name!r} is a scalar, and has no rows")
    return rt.placeholder(tensor.dtype, None if tensor.shape is None else tensor.shape[1:], "row")


def _over_rows(
    what: str,
    fn: Made,
    elems: Nest,
    carried: Nest,
    name: str | None,
    *,
    reverse: bool = False,
    gives: Nest = None,
    carries: bool = True,
    last: bool = False,
    back_prop: bool = True,
) -> Nest:
    """Runs ``jax.lax.scan`` over a function of the program.

    Args:
        what: "tf.scan".
        fn: a function of what is carried and of a row; of a row alone without ``carries``.
        elems: a nest whose rows are gone through.
        carried: at first; None for the first row.
        name: name scope.
        reverse: from the last row to the first.
        gives: a nest of the data types of the results; those of ``elems`` by default.
        carries: whether a result is carried to the next row.
        last: give the last result, not all.
        back_prop: False for no derivative.
    """
    callables(fn=fn)
    rows, structure = tensors(elems, f"{what}: elems")
    from_row = carries and carried is None
    with rt.Graph.of(*rows).as_default(), rt.name_scope(name or what.removeprefix("tf.")) as scope:
        begin, shape = (
            ([], structure) if carried is None else tensors(carried, f"{what}: initializer")
        )
        # The function runs once, on placeholders for a row and for the carried values.
        stands = [_row(t, what) for t in rows]
        before = [
            rt.placeholder(t.dtype, t.shape, "carried") for t in (stands if from_row else begin)
        ]
        carry = [unflatten(shape, before)] if carries else []
        results, made = tensors(fn(*carry, unflatten(structure, stands)), f"{what}: fn")
        part = subgraph(
            results, [*before, *stands], first=stands[0].op.id, what=f"the function of {what}"
        )
        _check_row(what, before, shape, results, made, gives, rows)

        def run(begin: Arrays, rows: Arrays, captured: Arrays) -> Arrays:
            # TensorFlow starts from the first row where there is no initializer, and gives that row
            # as the first result.
            if from_row:
                begin, rows = (
                    [r[-1 if reverse else 0] for r in rows],
                    [r[:-1] if reverse else r[1:] for r in rows],
                )

            def step(now: Arrays, row: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
                out = list(part([*now, *row[1]], part.with_step(captured, row[0])))
                return out if carries else [], [] if last else out

            # The number of the row is mixed into random keys: TensorFlow draws other numbers for
            # each row.
            turns = jnp.arange(rows[0].shape[0], dtype=np.int32)
            end, every = jax.lax.scan(step, list(begin), (turns, list(rows)), reverse=reverse)
            if last or not from_row:
                return end if last else every
            pairs = [
                (e, b[None]) if reverse else (b[None], e) for b, e in zip(begin, every, strict=True)
            ]
            return [jnp.concatenate(pair) for pair in pairs]

        out = operation(run, scope, (part,), begin, rows)
        if not back_prop:
            rt.lowlevel.without_derivative(out[0])
    return unflatten(made, out)


def _check_row(
    what: str,
    before: Sequence[rt.Tensor],
    shape: PyTreeDef,
    results: Sequence[rt.Tensor],
    made: PyTreeDef,
    gives: Nest,
    rows: Sequence[rt.Tensor],
) -> None:
    if before:
        if shape != made:
            raise ValueError(f"{what}: fn makes {shape} {made}")
        wanted: list[object] = [t.dtype for t in before]
    else:
        wanted = list(jax.tree.leaves(gives)) if gives is not None else [t.dtype for t in rows]
    kinds = [as_dtype(w).dtype for w in wanted]
    if [t.dtype for t in results] != kinds:
        raise rt.InvalidArgumentError(
            f"{what}: fn gives {[t.dtype.name for t in results]}, and not "
            f"{[k.name for k in kinds]}: give dtype="
            if not before
            else f"{what}: fn makes {[k.name for k in kinds]} {[t.dtype.name for t in results]}: use tf.cast"
        )


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
    """Applies ``fn`` to each row of ``elems``, and stacks the results.

    Args:
        fn: a function of a row of each.
        elems: a nest of tensors with rows.
        dtype: the nest of types that ``fn`` gives, where they are not those of ``elems``.
        parallel_iterations: not needed.
        back_prop: False for no derivative.
        swap_memory: not needed.
        infer_shape: not needed.
        name: name scope.
    """
    return _over_rows(
        "tf.map_fn", fn, elems, None, name or "map", gives=dtype, carries=False, back_prop=back_prop
    )


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
    """Computes ``a = fn(a, row)`` for each row of ``elems``, and stacks all ``a``.

    Args:
        fn: a function of what it gave last and of a row.
        elems: a nest of tensors with rows.
        initializer: the first ``a``; the first row by default.
        parallel_iterations: not needed.
        back_prop: False for no derivative.
        swap_memory: not needed.
        infer_shape: not needed.
        reverse: from the last row to the first.
        name: name scope.
    """
    return _over_rows("tf.scan", fn, elems, initializer, name, reverse=reverse, back_prop=back_prop)


def _fold(shown: str, reverse: bool) -> Made:
    def fold(
        fn: Made,
        elems: Nest,
        initializer: Nest = None,
        parallel_iterations: object = 10,
        back_prop: bool = True,
        swap_memory: bool = False,
        name: str | None = None,
    ) -> Nest:
        return _over_rows(
            f"tf.{shown}",
            fn,
            elems,
            initializer,
            name,
            reverse=reverse,
            last=True,
            back_prop=back_prop,
        )

    fold.__name__ = fold.__qualname__ = shown
    fold.__doc__ = f"``tf.scan``{', from the last row to the first' if reverse else ''}; gives the last ``a`` alone."
    return fold


public.update({"foldl": _fold("foldl", False), "foldr": _fold("foldr", True)})
