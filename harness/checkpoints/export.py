"""A model without its cluster: the parameters of a checkpoint as a pytree, and as files for other programs."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from harness.checkpoints.reader import load_checkpoint
from runtime import InvalidArgumentError, NotFoundError, Variable
from runtime.lowlevel import Array, path_name, storage

_SAFETENSORS = ".safetensors"


def load_pytree(path: str | os.PathLike[str], like: object, name: str = "", slot: str = "") -> Any:
    """Returns the values of a checkpoint as a pytree, ready for ``model.apply(params, ...)``.

        params = harness.load_pytree("logdir", like=model.init(key, x), name="mlp")
        averages = harness.load_pytree("logdir", like=params, name="mlp", slot="ema/average")

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the newest is read; see ``load_checkpoint``.
        like: pytree of variables, whose names count; or of arrays or ``jax.ShapeDtypeStruct``s, whose names are those
            of ``rt.variables(like, name)``.
        name: first part of the names, as given to ``rt.variables``.
        slot: slot to read for each variable in its place: ``adam/mu``, ``ema/average``; empty for the variables.

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
    names = [leaf.spec.name if isinstance(leaf, Variable) else path_name(name, at) for at, leaf in leaves]
    names = [f"{base}/{slot}" if slot else base for base in names]
    missing = [wanted for wanted in names if wanted not in shapes]
    if missing:
        raise NotFoundError(
            f"checkpoint {reader.path} has no {', '.join(missing)}; it has {', '.join(shapes)}: give the name that "
            "rt.variables was given"
        )
    wrong = [
        f"{wanted} is {list(shapes[wanted])} there and {list(np.shape(leaf))} in like"
        for wanted, (_, leaf) in zip(names, leaves, strict=True)
        if hasattr(leaf, "shape") and tuple(leaf.shape) != shapes[wanted]
    ]
    if wrong:
        raise InvalidArgumentError(f"checkpoint {reader.path} is of another model: {'; '.join(wrong)}")
    return jax.tree.unflatten(structure, [reader.get_tensor(wanted) for wanted in names])


def save_pytree(path: str | os.PathLike[str], tree: object) -> None:
    """Writes a pytree of arrays for other programs.

        harness.save_pytree("model.safetensors", params)

    Args:
        path: ``model.safetensors`` for a file of that format (package ``safetensors``), with names such as
            ``Dense_0/kernel``. Any other path is a new directory, which Orbax's ``StandardCheckpointer`` restores.
        tree: pytree of arrays, such as that of ``load_pytree``.

    Raises:
        ImportError: The format needs a package that is not installed; the message names the package.
        ValueError: The directory exists already.
    """
    target = storage.absolute(os.fspath(path))
    if target.endswith(_SAFETENSORS):
        try:
            from safetensors.numpy import save_file
        except ImportError as error:
            raise ImportError(f"{path}: pip install safetensors to write this format") from error
        save_file({path_name("", at): _whole(leaf) for at, leaf in jax.tree.leaves_with_path(tree)}, target)
        return
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, jax.tree.map(_whole, tree))


def _whole(leaf: npt.ArrayLike) -> Array:
    array: Array = np.ascontiguousarray(leaf)
    # ``ascontiguousarray`` makes a scalar an array of one dimension.
    return array.reshape(np.shape(leaf))


def export_function(
    path: str | os.PathLike[str],
    fn: Callable[..., object],
    params: object,
    *inputs: object,
    platforms: tuple[str, ...] = ("cpu",),
) -> None:
    """Writes a function with its parameters as StableHLO.

    ``jax.export.deserialize`` reads the file without the source of the function.

        harness.export_function("model.jax", logits, params, jax.ShapeDtypeStruct((1, 784), jnp.float32))
        served = jax.export.deserialize(bytearray(pathlib.Path("model.jax").read_bytes())).call

    Args:
        path: path of the file.
        fn: function of ``params`` and the inputs.
        params: pytree of arrays, such as that of ``load_pytree``.
        *inputs: an array or a ``jax.ShapeDtypeStruct`` for each further argument. Sizes of
            ``jax.export.symbolic_shape`` leave dimensions open.
        platforms: platforms on which the function may run: "cpu", "cuda", "rocm", "tpu".
    """
    from jax import export

    exported = export.export(jax.jit(lambda *given: fn(params, *given)), platforms=platforms)(*inputs)
    pathlib.Path(path).write_bytes(bytes(exported.serialize()))
