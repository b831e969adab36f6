"""``tf.cond`` and ``tf.case``: each becomes one operation, a ``jax.lax.cond``.

The functions of the program are called once, while the graph is built. What they make is looked
through and becomes a function of arrays (``harness.tf1.loops.subgraph``); what they take from outside
becomes the inputs of the operation. ``while_loops`` and ``row_loops`` beside this module do the
same for loops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

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
    shapes_agree,
    unflatten_nest,
    unpack_single,
)
from harness.tf1.loops.subgraph import Condition, Subgraph, make_subgraph
from harness.tf1.ops.array_ops import as_tensor
from harness.tf1.ops.lift import Public

public = Public("tf", "Conditionals and loops")


@public.add()
def cond(
    pred: rt.TensorLike,
    true_fn: Made | None = None,
    false_fn: Made | None = None,
    strict: bool | str = False,
    name: str | None = None,
    fn1: Made | None = None,
    fn2: Made | None = None,
) -> Nest:
    """Calls both functions now; a step computes the chosen one and does what is done in that one."""
    # In TensorFlow 1.0 the name stood in the fourth place.
    if isinstance(strict, str):
        name = strict
    yes, no = true_fn or fn1, false_fn or fn2
    # Both functions would be built for nothing, and TensorFlow refuses a bool as well.
    if isinstance(pred, bool):
        raise TypeError("pred must not be a Python bool: use an if")
    check_callable(true_fn=yes, false_fn=no)
    assert yes is not None and no is not None
    asked = as_tensor(pred)
    if asked.dtype != np.bool_:
        raise TypeError(f"tf.cond: {asked.name!r} must be a bool, not {asked.dtype.name}")
    if asked.shape not in ((), None):
        raise ValueError(f"tf.cond: {asked.name!r} must be a scalar, not of shape {asked.shape}")
    with asked.graph.as_default(), rt.name_scope(name or "cond") as scope:
        # All that is made from this operation on belongs to one of the two functions.
        chosen = rt.identity(asked, "pred_id")
        found = []
        for function, value in ((yes, True), (no, False)):
            what = f"{'true' if value else 'false'}_fn of tf.cond"
            results, structure = as_tensors(function(), what)
            part = make_subgraph(
                results, first=chosen.op.id, what=what, condition=Condition(chosen, value)
            )
            found.append((part, structure))
        (true, structure), (false, other) = found
        _check_alike(true, structure, false, other)

        def run(given: jax.Array, of_true: Arrays, of_false: Arrays) -> object:
            return jax.lax.cond(given, lambda: true((), of_true), lambda: false((), of_false))

        results = add_operation(run, scope, (true, false), chosen)
    return unpack_single(unflatten_nest(structure, results), strict is True)


def _check_alike(true: Subgraph, structure: PyTreeDef, false: Subgraph, other: PyTreeDef) -> None:
    if structure != other:
        raise ValueError(f"tf.cond: true_fn gives {structure}, false_fn {other}")
    for one, two in zip(true.results, false.results, strict=True):
        if one.dtype != two.dtype:
            raise ValueError(
                f"tf.cond: true_fn gives {one.dtype.name} where false_fn gives {two.dtype.name}"
            )
        if not shapes_agree(one, two):
            raise ValueError(
                f"tf.cond: true_fn gives the shape {one.shape} where false_fn gives {two.shape}, "
                "and XLA needs one: tf.pad the smaller one"
            )


@public.add()
def case(
    pred_fn_pairs: Sequence[tuple[rt.TensorLike, Made]] | Mapping[rt.Tensor, Made],
    default: Made | None = None,
    exclusive: bool = False,
    strict: bool = False,
    name: str = "case",
) -> Nest:
    """Returns the result of the function of the first true predicate; see ``tf.cond``."""
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, Mapping) else pred_fn_pairs)
    if not pairs:
        raise ValueError("tf.case: give at least one pair of a predicate and a function")
    with rt.name_scope(name or "case"):
        checks = []
        count = rt.call(
            lambda given: sum(jnp.asarray(g, np.int32) for g in given),
            [p for p, _ in pairs],
            name="count",
        )
        if exclusive:
            checks.append(
                rt.check(count < 2, "tf.case: more than one of the predicates is true: ", [count])
            )
        if default is None:
            checks.append(rt.check(count > 0, "tf.case: none of the predicates is true: ", [count]))
            # One predicate is true, so the last function needs no condition of its own.
            *pairs, (_, default) = pairs
        with rt.control_dependencies(checks):
            chosen = default
            # The first pair comes outermost, so that its function is asked first.
            for pred, function in reversed(pairs):
                chosen = functools.partial(cond, pred, function, chosen, True)
            return unpack_single(chosen(), strict)
