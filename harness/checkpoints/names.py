"""The names of variables in checkpoints, and their match with the arrays that a checkpoint holds.

A partitioned variable is several variables that are one array in checkpoints, whatever the number
of parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.checkpoints.manifest import StoredArray
from harness.checkpoints.reader import CheckpointReader
from runtime import InvalidArgumentError, NotFoundError, Session, Variable, global_variables
from runtime.lowlevel import ArraySlice, VariableSlice, dtype_name

CHUNK_BYTES = 64 << 20
"""Bytes of a chunk, about: a larger array has several chunks, so that a part can be read alone."""
STREAM_CHUNK_BYTES = 8 << 20
"""Bytes of a chunk, about, if the tasks send their arrays and the chief writes."""
_WITH_SLOTS = "bellwether_variables_with_slots"
FORMER_KEYS = "bellwether_former_keys_of_slots"
"""A collection of slots, each with its key in the checkpoints of an older version."""


class MisfitError(NotFoundError, InvalidArgumentError):
    """A checkpoint that lacks variables of the graph: a wrong argument, so no start is tried again."""


def saved_variables(var_list: Any) -> dict[Variable, ArraySlice]:
    """Returns the variables that ``var_list`` names, with their places in checkpoints.

    Args:
        var_list: None for all global variables of the default graph, a list of variables, or a
            dictionary from names in checkpoints to variables or lists of slices.

    Returns:
        The place of each variable. The slices of a partitioned variable share a key.

    Raises:
        TypeError: ``var_list`` has another type, or holds something else than variables.
        ValueError: A variable has two names, or two variables have one name.
    """
    if var_list is None:
        # A variable may be in the collection twice.
        var_list = list(dict.fromkeys(global_variables()))
    if isinstance(var_list, Mapping):
        items = [
            (str(n), v)
            for n, vs in var_list.items()
            for v in (vs if isinstance(vs, list | tuple) else [vs])
        ]
    elif isinstance(var_list, list | tuple | set | frozenset):
        items = [("", v) for v in var_list]
    else:
        raise TypeError(
            f"var_list must be a list or a dictionary of variables, not {type(var_list).__name__}"
        )
    found: dict[Variable, ArraySlice] = {}
    for given, variable in items:
        if not isinstance(variable, Variable):
            raise TypeError(f"var_list holds {variable!r}: only variables can be saved")
        place = variable.save_slice_info or ArraySlice.whole(
            variable.op.name, variable.shape, variable.dtype
        )
        place = replace(place, key=given or place.key)
        if variable in found:
            raise ValueError(
                f"The same variable would be restored with two names: {found[variable].key!r} and "
                f"{place.key!r}"
            )
        found[variable] = place
    # Parts of one array fill the array. Two whole variables of one name do not.
    for name, parts in _by_key(found).items():
        size = sum(math.prod(s.shape) for s in written_variables(parts).values())
        wholes = {s.full_shape for s in parts.values()}
        if len(wholes) > 1 or (len(parts) > 1 and size != math.prod(wholes.pop())):
            raise ValueError(f"At least two variables have the same name: {name}")
    return found


def _by_key(saved: Mapping[Variable, ArraySlice]) -> dict[str, dict[Variable, ArraySlice]]:
    found: dict[str, dict[Variable, ArraySlice]] = {}
    for variable, place in saved.items():
        found.setdefault(place.key, {})[variable] = place
    return found


def written_variables(saved: Mapping[Variable, ArraySlice]) -> dict[Variable, ArraySlice]:
    """Returns the variables to write: all but repeated slots.

    A slot such as a count has the same value for all parts of a variable, so the first slot is
    written alone.
    """
    chosen: dict[Variable, ArraySlice] = {}
    shared: set[str] = set()
    for variable, place in saved.items():
        if variable.save_slice_info is not None and place.shape == place.full_shape:
            if place.key in shared:
                continue
            shared.add(place.key)
        chosen[variable] = place
    assert _by_key(chosen).keys() == _by_key(saved).keys(), "an array is never written"
    return chosen


def slices_of(
    session: Session, saved: Mapping[Variable, ArraySlice], *, stream: bool = False
) -> list[VariableSlice]:
    """Returns the slices of variables: their devices, and the chunks of their arrays on disk."""
    placement = session.placement(list(saved))
    limit = STREAM_CHUNK_BYTES if stream else CHUNK_BYTES
    chunks = {
        key: chunk_shape(list(parts.values()), limit) for key, parts in _by_key(saved).items()
    }
    return [
        VariableSlice(variable.spec, placement[variable], replace(place, chunk=chunks[place.key]))
        for variable, place in saved.items()
    ]


def chunk_shape(parts: Sequence[ArraySlice], limit: int) -> tuple[int, ...]:
    """Returns the shape of an array's chunks.

    No chunk crosses the boundary of two slices, and most chunks have about ``limit`` bytes.
    """
    full = parts[0].full_shape
    if not full:
        return ()
    # The greatest length that divides every boundary between two parts. The end of the array is no
    # boundary: its last chunk may be shorter.
    chunk = [math.gcd(*(p.offset[d] for p in parts)) or full[d] for d in range(len(full))]
    # From the outer dimension inwards, until a row is small enough.
    itemsize = max(parts[0].dtype.itemsize, 1)
    for d in range(len(full)):
        row = math.prod(chunk[d + 1 :]) * itemsize
        rows = max(1, limit // max(row, 1))
        if chunk[d] > rows:
            # The new size must divide the boundaries of the slices, as the old size does.
            if len(parts) > 1:
                rows = next(n for n in range(rows, 0, -1) if chunk[d] % n == 0)
            chunk[d] = rows
        if row <= limit:
            break
    found = tuple(max(c, 1) for c in chunk)
    assert all(b % c == 0 for part in parts for b, c in zip(part.offset, found, strict=True)), (
        "a part begins with a chunk"
    )
    return found


def described(slices: Sequence[VariableSlice]) -> dict[str, StoredArray]:
    """Returns the manifest's entries for the variables of a snapshot."""
    found: dict[str, StoredArray] = {}
    for s in slices:
        key, dtype, shape = s.array.key, dtype_name(s.array.dtype), s.array.full_shape
        known = found.get(key, StoredArray(key, key, dtype, shape, s.encoded))
        assert (known.dtype, known.shape) == (dtype, shape), "parts of one array are alike"
        found[key] = replace(known, slices=(*known.slices, (s.task, s.array.offset, s.array.shape)))
    return found


def match_arrays(
    reader: CheckpointReader, saved: Mapping[Variable, ArraySlice], *, partial: bool
) -> dict[Variable, StoredArray]:
    """Pairs variables with the arrays of a checkpoint.

    Args:
        reader: the checkpoint.
        saved: the variables.
        partial: True leaves out variables that the checkpoint lacks.

    Raises:
        MisfitError: Names are missing; the message has the first five misfits of each kind.
        InvalidArgumentError: Shapes or dtypes differ; the message has as many.
    """
    missing, wrong = [], []
    pairs: dict[Variable, StoredArray] = {}
    former = _former_keys(saved)
    for variable, place in saved.items():
        stored = reader.arrays.get(place.key) or reader.arrays.get(former.get(variable, ""))
        described = f"{dtype_name(place.dtype)}{list(place.full_shape)}"
        if stored is None:
            missing.append(f"{place.key} {described}")
        elif (there := f"{stored.dtype}{list(stored.shape)}") != described:
            wrong.append(f"{place.key}: the variable is {described}, the checkpoint has {there}")
        else:
            pairs[variable] = stored
    if not wrong and (partial or not missing):
        return pairs
    names = {place.key for place in saved.values()}
    # Names that only the checkpoint has are often the old names of missing variables.
    extra = [
        f"{a.name} {a.dtype}{list(a.shape)}" for a in reader.arrays.values() if a.name not in names
    ]
    parts = [f"Restoring from checkpoint failed: {reader.path} does not fit the graph."]
    if missing:
        parts.append(f"Key {_list_first(sorted(set(missing)))} not found in checkpoint.")
    if wrong:
        parts.append(
            f"Different shape or dtype (shapes of both tensors must match): {_list_first(wrong)}."
        )
    if extra:
        parts.append(f"In the checkpoint only: {_list_first(extra)}.")
    if missing:
        parts.append(
            "Saver(partial=True), also as saver= of a Supervisor, restores what is there and "
            "begins the rest with initial values; a var_list maps names."
        )
    parts.append("Another model needs a log directory of its own.")
    raise (InvalidArgumentError if wrong else MisfitError)(" ".join(parts))


def _former_keys(variables: Mapping[Variable, ArraySlice]) -> dict[Variable, str]:
    """Returns the keys that slots have in checkpoints of an older version, where these are others."""
    return dict(*(v.graph.get_collection(FORMER_KEYS) for v in list(variables)[:1]))


def _list_first(found: Sequence[str]) -> str:
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more


def restore_slices(
    session: Session, saved: Mapping[Variable, ArraySlice], pairs: Mapping[Variable, StoredArray]
) -> list[VariableSlice]:
    """Returns the slices that the tasks read."""
    placement = session.placement(list(pairs))
    return [
        VariableSlice(
            variable.spec,
            placement[variable],
            replace(saved[variable], key=stored.key),
            stored.encoded,
        )
        for variable, stored in pairs.items()
    ]


def partitioned(name: str, parts: Sequence[Variable]) -> None:
    """Makes variables the parts of one array in checkpoints, in order along the first dimension.

    The checkpoint has one array ``name``, and can be restored into any other number of parts. Slots
    that an optimizer makes afterwards are parts of one array too. Call this function before
    ``Saver`` and ``minimize``.

        harness.partitioned("table", [part_0, part_1])

    Args:
        name: name of the array.
        parts: variables [n_i, ...] of one dtype, whose shapes differ only in the first dimension.

    Raises:
        InvalidArgumentError: There are no parts, the parts do not fit together, or an optimizer has
            made slots.
    """
    if not parts or any(not p.shape for p in parts):
        raise InvalidArgumentError(f"{name!r} needs parts of at least one dimension")
    told = ", ".join(f"{p.op.name} {p.dtype.name}{list(p.shape)}" for p in parts)
    if len({(p.shape[1:], p.dtype) for p in parts}) > 1:
        raise InvalidArgumentError(
            f"the parts of {name!r} may differ in their first dimension only: {told}"
        )
    # Slots that exist have names of their own in checkpoints already.
    if not set(parts).isdisjoint(parts[0].graph.get_collection(_WITH_SLOTS)):
        raise InvalidArgumentError(
            f"an optimizer has slots of parts of {name!r}: call partitioned before it: {told}"
        )
    full_shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
    first = 0
    for part in parts:
        part.save_slice_info = ArraySlice(
            name, part.shape, part.dtype, full_shape, (first, *(0 for _ in part.shape[1:]))
        )
        first += part.shape[0]
    assert first == full_shape[0], "the parts fill the array"


def slot_of(variable: Variable, slot: Variable, *, shared: bool) -> None:
    """Gives a slot the place in checkpoints that goes with its variable's.

    Args:
        variable: variable of the slot.
        slot: slot of an optimizer. A slot of the shape of a part is a part of one array, as the
            variable is.
        shared: True if all parts of a variable have the same value, such as a count. The checkpoint
            then has the slot once. Any other slot is an array of its own, and is restored only into
            the same number of parts.
    """
    variable.graph.add_to_collection(_WITH_SLOTS, variable)
    info = variable.save_slice_info
    title = slot.spec.name.rpartition(f"{variable.spec.name}/")[2]
    if info is None:
        return
    key = f"{info.key}/{title}"
    if slot.shape == variable.shape:
        slot.save_slice_info = replace(info, key=key, dtype=slot.dtype)
    elif shared:
        slot.save_slice_info = ArraySlice.whole(key, slot.shape, slot.dtype)
