"""Masks and labels of optax for single variables: the place of a variable in the tree of the masks."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import runtime as rt


class VariableTree:
    """The pytree of variables that masks and labels are written for.

    Args:
        params: a pytree of variables; of a list or tuple of variables, the dictionary of their
            names.

    Raises:
        InvalidArgumentError: a leaf is no variable.
    """

    def __init__(self, params: object) -> None:
        # By name, as masks of a list would depend on the order of the variables.
        if isinstance(params, list | tuple) and all(isinstance(v, rt.Variable) for v in params):
            params = {v.spec.name: v for v in params}
        found, self._structure = jax.tree.flatten_with_path(params)
        for path, leaf in found:
            if not isinstance(leaf, rt.Variable):
                raise rt.InvalidArgumentError(
                    f"params{jax.tree_util.keystr(path)} is no variable but {leaf!r}"
                )
        self.variables: list[rt.Variable] = [leaf for _, leaf in found]
        self._paths = [path for path, _ in found]
        self._places = {variable: place for place, variable in enumerate(self.variables)}

    def path(self, variable: rt.Variable) -> tuple[object, ...]:
        """Returns the place of a variable in the tree, as ``jax.tree_util`` names it."""
        return tuple(self._paths[self._place_of(variable)])

    def only(self, variable: rt.Variable, value: object) -> Any:
        """Returns the tree with ``value`` in place of a variable.

        All other places hold ``optax.MaskedNode``, which optax passes over.
        """
        leaves: list[object] = [optax.MaskedNode()] * len(self.variables)
        leaves[self._place_of(variable)] = value
        return jax.tree.unflatten(self._structure, leaves)

    def _place_of(self, variable: rt.Variable) -> int:
        if variable not in self._places:
            raise rt.InvalidArgumentError(
                f"variable {variable.spec.name!r} is trained but is not in the params that the "
                "optimizer was given"
            )
        return self._places[variable]


def by_name(rules: Mapping[str, object]) -> Callable[[object], Any]:
    """Returns a function that makes labels, or a mask, of the names of variables.

    ``optax.multi_transform`` and the argument ``mask`` take such functions.

        harness.Optimizer(
            optax.adamw(1e-3, mask=harness.by_name({"bias$|scale$": False, "": True})),
            params=params
        )

    Args:
        rules: by regular expression, the label (a string), or True for a variable of the mask. The
            first expression that is found in the name of a variable counts. The name is the path in
            ``params``, as in ``Dense_0/bias``. ``""`` is found in every name.

    Returns:
        A function from a tree to the tree of labels.

    Raises:
        InvalidArgumentError: No expression is found in a name; the returned function raises the
            error.
    """

    def label(path: tuple[object, ...], _: object) -> object:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for expression, given in rules.items():
            if re.search(expression, name):
                return given
        raise rt.InvalidArgumentError(
            f'by_name: no rule is for {name!r}; the rule "" is for all others'
        )

    return lambda tree: jax.tree.map_with_path(label, tree)
