"""Which variables a Saver saves, under which names, and how they match what a checkpoint holds.

A partitioned variable is several variables that are one array in checkpoints, whatever the number of parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.checkpoints.manifest import SavedVariable
from harness.checkpoints.reader import CheckpointReader, Stored
from runtime import InvalidArgumentError, NotFoundError, Session, Variable, global_variables
from runtime.lowlevel import VariableSlice, dtype_name

CHUNK_BYTES = 64 << 20
"""Arrays larger than this are stored in chunks of about this size, so that a part can be read alone."""
STREAM_CHUNK_BYTES = 8 << 20
"""The same where the chief writes what the tasks send."""


@dataclass(frozen=True)
class Saved:
    """A variable, or one slice of a partitioned variable, under its name in checkpoints.

    Attributes:
        name: the name in checkpoints; the slices of one partitioned variable share it.
        variable: the variable.
        full_shape: shape of the whole.
        offset: where this slice begins in it.
    """

    name: str
    variable: Variable
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]


def saved_variables(var_list: Any) -> list[Saved]:
    """The variables that ``var_list`` names.

    Args:
        var_list: None for all global variables of the default graph, a list of variables, or a dictionary from names in
            checkpoints to variables or lists of slices.

    Raises:
        TypeError: something else.
        ValueError: one variable under two names, or two variables under one name.
    """
    if var_list is None:
        var_list = list(dict.fromkeys(global_variables()))
    if isinstance(var_list, Mapping):
        items = [(str(n), v) for n, vs in var_list.items() for v in (vs if isinstance(vs, list | tuple) else [vs])]
    elif isinstance(var_list, list | tuple | set | frozenset):
        items = [("", v) for v in var_list]
    else:
        raise TypeError(f"var_list must be a list or a dictionary of variables, not {type(var_list).__name__}")
    found: list[Saved] = []
    names: dict[Variable, str] = {}
    for given, variable in items:
        if not isinstance(variable, Variable):
            raise TypeError(f"var_list holds {variable!r}: only variables can be saved")
        info = variable.save_slice_info
        name = given or (info.full_name if info is not None else variable.op.name)
        if variable in names:
            raise ValueError(f"The same variable would be restored with two names: {names[variable]!r} and {name!r}")
        names[variable] = name
        if info is None:
            found.append(Saved(name, variable, variable.shape, (0,) * len(variable.shape)))
        else:
            found.append(Saved(name, variable, tuple(info.full_shape), tuple(info.var_offset)))
    _check_unique(found)
    return found


def _check_unique(saved: Sequence[Saved]) -> None:
    parts: dict[str, list[Saved]] = {}
    for s in saved:
        parts.setdefault(s.name, []).append(s)
    for name, same in parts.items():
        size = sum(math.prod(s.variable.shape) for s in written(same))
        whole = math.prod(same[0].full_shape)
        if len({s.full_shape for s in same}) > 1 or (len(same) > 1 and size != whole):
            raise ValueError(f"At least two variables have the same name: {name}")


def written(saved: Sequence[Saved]) -> list[Saved]:
    """What is written: of slots that all parts of a variable have alike, such as a count, the first one."""
    chosen: list[Saved] = []
    shared: set[str] = set()
    for s in saved:
        if s.variable.save_slice_info is not None and s.variable.shape == s.full_shape:
            if s.name in shared:
                continue
            shared.add(s.name)
        chosen.append(s)
    return chosen


def slices_of(session: Session, saved: Sequence[Saved], *, stream: bool = False) -> list[VariableSlice]:
    """Where the variables live, and how their arrays are cut on disk."""
    placement = session.placement([s.variable for s in saved])
    boundaries: dict[str, list[Saved]] = {}
    for s in saved:
        boundaries.setdefault(s.name, []).append(s)
    return [
        VariableSlice(
            s.variable.spec,
            placement[s.variable],
            s.name,
            s.full_shape,
            s.offset,
            _chunk(boundaries[s.name], STREAM_CHUNK_BYTES if stream else CHUNK_BYTES),
        )
        for s in saved
    ]


def _chunk(parts: Sequence[Saved], limit: int) -> tuple[int, ...]:
    """Chunk shape of one array: no chunk crosses the boundary of two slices, most are about ``limit`` bytes."""
    full = parts[0].full_shape
    if not full:
        return ()
    chunk = [
        math.gcd(*(b for p in parts for b in (p.offset[d], p.variable.shape[d]) if b)) if len(parts) > 1 else full[d]
        for d in range(len(full))
    ]
    itemsize = max(parts[0].variable.dtype.itemsize, 1)
    for d in range(len(full)):
        row = math.prod(chunk[d + 1 :]) * itemsize
        rows = max(1, limit // max(row, 1))
        if chunk[d] > rows:
            if len(parts) > 1:  # must go on dividing the boundaries
                rows = next(n for n in range(rows, 0, -1) if chunk[d] % n == 0)
            chunk[d] = rows
        if row <= limit:
            break
    return tuple(max(c, 1) for c in chunk)


def described(
    saved: Sequence[Saved], slices: Sequence[VariableSlice], sizes: Mapping[str, int]
) -> dict[str, SavedVariable]:
    """What the manifest says of the variables; ``sizes`` are the bytes of string variables on disk."""
    parts: dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = {}
    for s, piece in zip(saved, slices, strict=True):
        parts.setdefault(s.name, []).append((piece.task, s.offset, s.variable.shape))
    return {
        s.name: SavedVariable(dtype_name(s.variable.dtype), s.full_shape, tuple(parts[s.name]), sizes.get(s.name, 0))
        for s in saved
    }


def match(reader: CheckpointReader, saved: Sequence[Saved], *, partial: bool) -> list[tuple[Saved, Stored]]:
    """Pairs variables with what a checkpoint holds.

    Args:
        reader: the checkpoint.
        saved: the variables.
        partial: leave out variables that the checkpoint does not hold.

    Raises:
        NotFoundError: names are missing; lists all that does not fit.
        InvalidArgumentError: shapes or dtypes differ; lists all that does not fit.
    """
    missing, wrong, pairs = [], [], []
    for s in saved:
        stored = reader.arrays.get(s.name)
        if stored is None:
            missing.append(f"{s.name} {dtype_name(s.variable.dtype)}{list(s.full_shape)}")
        elif (stored.shape, stored.dtype) != (s.full_shape, dtype_name(s.variable.dtype)):
            wrong.append(
                f"{s.name}: the variable is {dtype_name(s.variable.dtype)}{list(s.full_shape)}, "
                f"the checkpoint has {stored.dtype}{list(stored.shape)}"
            )
        else:
            pairs.append((s, stored))
    if not wrong and (partial or not missing):
        return pairs
    names = {s.name for s in saved}
    extra = [f"{a.name} {a.dtype}{list(a.shape)}" for a in reader.arrays.values() if a.name not in names]
    parts = [f"Restoring from checkpoint failed: {reader.path} does not fit the graph."]
    if missing:
        parts.append(f"Key {'; '.join(sorted(set(missing)))} not found in checkpoint.")
    if wrong:
        parts.append(f"Different shape or dtype (shapes of both tensors must match): {'; '.join(wrong)}.")
    if extra:
        parts.append(f"In the checkpoint only: {'; '.join(extra)}.")
    if missing:
        parts.append("To restore what is there, pass partial=True, or a var_list that maps names.")
    raise (InvalidArgumentError if wrong else NotFoundError)(" ".join(parts))


def restore_slices(session: Session, pairs: Sequence[tuple[Saved, Stored]]) -> list[VariableSlice]:
    """What each task reads."""
    placement = session.placement([s.variable for s, _ in pairs])
    return [
        VariableSlice(
            s.variable.spec,
            placement[s.variable],
            stored.key,
            (stored.encoded,) if s.variable.dtype == np.dtype(object) else s.full_shape,
            (0,) if s.variable.dtype == np.dtype(object) else s.offset,
        )
        for s, stored in pairs
    ]


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
        told = ", ".join(f"{p.op.name} {p.dtype.name}{list(p.shape)}" for p in parts)
        raise InvalidArgumentError(f"the parts of {name!r} may differ in their first dimension only: {told}")
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
