"""A check that a gradient transformation treats every variable by itself, by tracing the update."""

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval

_SHAPES = ((), (2,), (2, 3), (2, 2, 2, 3))
"""Shapes of the variables that are tried, each twice: what a transformation does may depend on the rank."""
CLIP = "clip_by_global_norm"


def split_clip(
    transformation: optax.GradientTransformation,
) -> tuple[float | None, optax.GradientTransformation]:
    """Takes ``optax.clip_by_global_norm`` from the front of a transformation.

    Returns:
        The largest norm, None without such a clip; and the rest, whose state has the same leaves
        under the same names.
    """
    held, name = _held_variables(transformation.update), _transformation_name(transformation)
    if name == CLIP and "max_norm" in held:
        return float(held["max_norm"]), optax.identity()
    # A chain wraps parts that take no extra arguments.
    parts = [held["tx"]] if name == "with_extra_args_support" else _chained_parts(transformation)
    if not parts:
        return None, transformation
    norm, rest = split_clip(parts[0])
    return norm, transformation if norm is None else optax.chain(rest, *parts[1:])


def what_mixes(
    transformation: optax.GradientTransformation, extra_args: Mapping[str, object]
) -> tuple[str, bool] | None:
    """Finds the part of ``transformation`` whose update of one variable depends on other variables.

    The update is traced for several variables and not run, since dependences are the same for all
    values.

    Args:
        transformation: an optax transformation, or a chain or a wrapper of some.
        extra_args: keyword arguments of its update, as abstract arrays.

    Returns:
        The name of the smallest such part, and True if the part keeps a state. None if every
        variable is updated alone, or if the transformation can be traced for one variable only and
        no part of the transformation mixes variables.
    """
    found = dependences(transformation, _trial_variables(), extra_args)
    if found is not None and all(of <= {i} for i, of in enumerate(found[0])):
        return None
    for part in _find_parts(transformation):
        mixing = what_mixes(part, extra_args)
        if mixing is not None:
            return mixing
    if found is None:
        return None
    state = jax.eval_shape(transformation.init, _trial_variables())
    return _transformation_name(transformation), bool(jax.tree.leaves(state))


def _trial_variables() -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in _SHAPES for _ in range(2)]


def dependences(
    transformation: optax.GradientTransformation, params: Any, extra_args: Mapping[str, object]
) -> tuple[list[set[int]], list[set[int]]] | None:
    """Returns which variables each update, and each leaf of the state, depends on.

    Args:
        transformation: an optax transformation.
        params: a pytree of abstract arrays, the variables.
        extra_args: keyword arguments of its update, as abstract arrays.

    Returns:
        Numbers of variables, for the leaves of the updates and for those of the state: through a
        gradient, through the value, or through the state, in however many steps. None where the
        transformation cannot be traced.
    """
    count = len(jax.tree.leaves(params))
    try:
        begun, stepped = _trace_step(transformation, params, extra_args)
    except Exception:
        # A function of the user's may raise any error for a tree other than its own.
        return None
    # For each leaf of the state, the numbers of the variables that the leaf depends on at the first
    # step.
    behind = [_used_inputs(begun, i) for i in range(len(begun.out_avals))]
    used = [_used_inputs(stepped, i) for i in range(len(stepped.out_avals))]
    # The outputs of the traced step are the updates, then the state.
    if len(used) != count + len(behind):
        return None

    def variables(of: set[int]) -> set[int]:
        # The inputs of the traced step are the gradients, then the values, then the state.
        direct = {i % count for i in of if i < 2 * count}
        return direct.union(
            *(behind[i - 2 * count] for i in of if 2 * count <= i < 2 * count + len(behind))
        )

    # A leaf may take another leaf up one step later, so the sets grow until a step adds nothing.
    while (
        now := [old | variables(new) for old, new in zip(behind, used[count:], strict=True)]
    ) != behind:
        behind = now
    return [variables(of) for of in used[:count]], behind


def _trace_step(
    transformation: optax.GradientTransformation, params: Any, extra_args: Mapping[str, object]
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Traces the making of the state, and one update."""
    update = optax.with_extra_args_support(transformation).update

    def step(
        gradients: object, values: object, state: optax.OptState, extra: Mapping[str, object]
    ) -> object:
        return update(gradients, state, values, **extra)

    begun, state = jax.make_jaxpr(transformation.init, return_shape=True)(params)
    return begun, jax.make_jaxpr(step)(params, params, state, dict(extra_args))


def _used_inputs(closed: ClosedJaxpr, output: int) -> set[int]:
    """Finds the numbers of the inputs from which output number ``output`` of a jaxpr is computed."""
    wanted = [i == output for i in range(len(closed.out_avals))]
    # Without dead code the inputs are left that the output depends on.
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
    return {i for i, is_used in enumerate(used) if is_used}


def _find_parts(
    transformation: optax.GradientTransformation,
) -> Iterator[optax.GradientTransformation]:
    """Finds the transformations of which a transformation is made.

    They are among the variables that its two functions refer to.
    """
    yield from _chained_parts(transformation)
    held = {**_held_variables(transformation.init), **_held_variables(transformation.update)}
    for value in held.values():
        for leaf in jax.tree.leaves(
            value, is_leaf=lambda v: isinstance(v, optax.GradientTransformation)
        ):
            if isinstance(leaf, optax.GradientTransformation):
                yield leaf


def _chained_parts(
    transformation: optax.GradientTransformation,
) -> list[optax.GradientTransformation]:
    """Finds the transformations of a chain, in their order; none of another transformation."""
    held = {**_held_variables(transformation.init), **_held_variables(transformation.update)}
    # ``optax.chain`` keeps the functions of its parts in two lists.
    kept = (held.get("init_fns", ()), held.get("update_fns", ()))
    return list(map(optax.GradientTransformationExtraArgs, *kept))


def _held_variables(fn: Callable[..., object]) -> dict[str, Any]:
    """Finds the variables that a function or method refers to besides its arguments."""
    # A decorator, such as the one for extra arguments, hides the function.
    fn = getattr(fn, "__wrapped__", fn)
    if hasattr(fn, "__self__"):
        return dict(getattr(fn.__self__, "__dict__", {}))
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    cells = zip(names, getattr(fn, "__closure__", None) or (), strict=True)
    # An empty cell has no value yet.
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def _transformation_name(transformation: optax.GradientTransformation) -> str:
    update = getattr(transformation.update, "__wrapped__", transformation.update)
    return str(getattr(update, "__qualname__", type(update).__name__)).split(".")[0]
