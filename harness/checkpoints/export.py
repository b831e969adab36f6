"""A model without its cluster: the parameters of a checkpoint as a pytree."""

import os
from typing import Any

import jax
import numpy as np

from harness.checkpoints.reader import load_checkpoint
from runtime import InvalidArgumentError, NotFoundError, Variable
from runtime.lowlevel import path_name


def load_pytree(path: str | os.PathLike[str], like: object, name: str = "", slot: str = "") -> Any:
    """Returns the values of a checkpoint as a pytree, ready for ``model.apply(params, ...)``.

        params = harness.load_pytree("logdir", like=model.init(key, x), name="mlp")
        averages = harness.load_pytree("logdir", like=params, name="mlp", slot="ema/average")

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the newest is read; see
            ``load_checkpoint``.
        like: pytree of variables, whose names count; or of arrays or ``jax.ShapeDtypeStruct``s,
            whose names are those of ``rt.variables(like, name)``.
        name: first part of the names, as given to ``rt.variables``.
        slot: slot to read for each variable in its place: ``adam/mu``, ``ema/average``; empty for
            the variables.

    Returns:
        Numpy arrays in the structure of ``like``, each with the dtype of the checkpoint.

    Raises:
        ValueError: There is no checkpoint.
        NotFoundError: The checkpoint lacks names; the message lists these and the existing names.
        InvalidArgumentError: Shapes differ; the message lists the names.
        DataLossError: The checkpoint is damaged.
    """
    reader = load_checkpoint(os.fspath(path))
    shapes = reader.get_variable_to_shape_map()
    leaves, structure = jax.tree.flatten_with_path(like)
    # A variable knows its name; an array has the name of its place in the tree.
    names = [
        leaf.spec.name if isinstance(leaf, Variable) else path_name(name, at) for at, leaf in leaves
    ]
    # A slot lies beside its variable, under the name that the optimizer gave it.
    names = [f"{base}/{slot}" if slot else base for base in names]
    missing = [wanted for wanted in names if wanted not in shapes]
    if missing:
        raise NotFoundError(
            f"checkpoint {reader.path} has no {', '.join(missing)}; it has {', '.join(shapes)}: "
            "give the name that rt.variables was given"
        )
    # A leaf without a shape, such as a Python number, takes any array.
    wrong = [
        f"{wanted} is {list(shapes[wanted])} there and {list(np.shape(leaf))} in like"
        for wanted, (_, leaf) in zip(names, leaves, strict=True)
        if hasattr(leaf, "shape") and tuple(leaf.shape) != shapes[wanted]
    ]
    if wrong:
        raise InvalidArgumentError(
            f"checkpoint {reader.path} is of another model: {'; '.join(wrong)}"
        )
    return jax.tree.unflatten(structure, [reader.get_tensor(wanted) for wanted in names])
