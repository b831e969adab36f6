"""A model outside of its cluster: the parameters of a checkpoint as a pytree, and as files for other programs."""

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
    """The values of a checkpoint in the structure of a pytree, ready for ``model.apply(params, ...)``.

        params = harness.load_pytree("logdir", like=model.init(key, x), name="mlp")
        averages = harness.load_pytree("logdir", like=params, name="mlp", slot="ema/average")

    Args:
        path: a checkpoint, or a directory of checkpoints, of which the newest is taken; as in ``load_checkpoint``.
        like: a pytree of variables, whose names count; or of arrays or ``jax.ShapeDtypeStruct``s, whose names are those
            that ``rt.variables(like, name)`` gives.
        name: first part of the names, as it was given to ``rt.variables``.
        slot: of each variable this slot instead of the variable: ``adam/mu``, ``ema/average``.

    Returns:
        Numpy arrays in the structure of ``like``, each with the dtype of the checkpoint.

    Raises:
        ValueError: there is no checkpoint.
        NotFoundError: it lacks some of the names; lists them, with what it has.
        InvalidArgumentError: shapes differ; lists them.
        DataLossError: it is damaged.
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

    Args:
        path: ``model.safetensors`` for one file of that format, with names such as ``Dense_0/kernel`` (package
            ``safetensors``); any other is a new directory, which Orbax's ``StandardCheckpointer`` restores.
        tree: the pytree, as ``load_pytree`` gives it.

    Raises:
        ImportError: the format needs a package that is not here; names it.
        ValueError: the directory is there already.
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
    return array.reshape(np.shape(leaf))  # a scalar stays one


def export_function(
    path: str | os.PathLike[str],
    fn: Callable[..., object],
    params: object,
    *inputs: object,
    platforms: tuple[str, ...] = ("cpu",),
) -> None:
    """Writes a function with its parameters as StableHLO, which ``jax.export.deserialize`` reads without its source.

        harness.export_function("model.jax", logits, params, jax.ShapeDtypeStruct((1, 784), jnp.float32))
        served = jax.export.deserialize(bytearray(pathlib.Path("model.jax").read_bytes())).call

    Args:
        path: the file.
        fn: called with ``params`` and the inputs.
        params: a pytree of arrays, as ``load_pytree`` gives it.
        *inputs: for each further argument an array, or a ``jax.ShapeDtypeStruct``; sizes from
            ``jax.export.symbolic_shape`` leave them open.
        platforms: what it may run on: "cpu", "cuda", "rocm", "tpu".
    """
    from jax import export

    exported = export.export(jax.jit(lambda *given: fn(params, *given)), platforms=platforms)(*inputs)
    pathlib.Path(path).write_bytes(bytes(exported.serialize()))
