"""Partitioned variables: several variables that are one array in checkpoints, whatever the number of parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime import InvalidArgumentError, Variable


@dataclass(frozen=True)
class SaveSliceInfo:
    """Where a variable belongs in an array of a checkpoint.

    Attributes:
        full_name: name of the array.
        full_shape: its shape.
        var_offset: where the variable begins in it.
    """

    full_name: str
    full_shape: tuple[int, ...]
    var_offset: tuple[int, ...]


def partitioned(name: str, parts: Sequence[Variable]) -> None:
    """Makes some variables the parts of one array in checkpoints, in order along the first dimension.

    The checkpoint has one array ``name``, and can be restored into any other number of parts. Slots that an optimizer
    makes afterwards are parts of one array too. Call it before ``Saver`` and ``minimize``.

    Args:
        name: of the array.
        parts: one variable each, float [n_i, ...], with the same dtype and the same shape but for the first dimension.

    Raises:
        InvalidArgumentError: there are no parts, or they do not fit together.
    """
    if not parts or any(not p.shape for p in parts):
        raise InvalidArgumentError(f"{name!r} needs parts of at least one dimension")
    if len({(p.shape[1:], p.dtype) for p in parts}) > 1:
        described = ", ".join(f"{p.op.name} {p.dtype.name}{list(p.shape)}" for p in parts)
        raise InvalidArgumentError(f"the parts of {name!r} may differ in their first dimension only: {described}")
    full_shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
    first = 0
    for part in parts:
        part.save_slice_info = SaveSliceInfo(name, full_shape, (first, *(0 for _ in part.shape[1:])))
        first += part.shape[0]


def slot_of(variable: Variable, slot: Variable, name: str) -> None:
    """Gives a slot the place in checkpoints that goes with its variable's.

    A slot of the variable's shape is a part of one array, as the variable is; others, such as a count, are the same in
    all parts, and the checkpoint has one of them.
    """
    info = variable.save_slice_info
    if info is None:
        return
    full_name = f"{info.full_name}/{name}"
    if slot.shape == variable.shape:
        slot.save_slice_info = SaveSliceInfo(full_name, info.full_shape, info.var_offset)
    else:
        slot.save_slice_info = SaveSliceInfo(full_name, slot.shape, (0,) * len(slot.shape))
