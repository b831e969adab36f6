"""``tf.train``: initial values from a checkpoint, and the checkpoints of a directory as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from absl import logging

from harness import timeouts
from harness.checkpoints import layout
from harness.checkpoints.manifest import StoredArray
from harness.checkpoints.reader import CheckpointReader, load_checkpoint
from harness.training import times
from runtime import UnavailableError, Variable, concurrency, get_default_graph
from runtime.lowlevel import dtype_name


def init_from_checkpoint(ckpt_dir_or_file: str, assignment_map: Mapping[str, Any]) -> None:
    """Makes values of a checkpoint the initial values of variables of the default graph.

    Call this function before the init operation is made. A restore after the initialisation
    replaces these values.

        tf.train.init_from_checkpoint("logdir", {"encoder/": "model/encoder/"})

    Args:
        ckpt_dir_or_file: the checkpoint, as for ``load_checkpoint``; plain Orbax's checkpoints
            count too.
        assignment_map: from names in the checkpoint to variables:
            ``"old/scope/": "new/scope/"`` for all below a scope (``"/"`` is the whole checkpoint),
            ``"old/name": "new/name"`` or ``"old/name": variable`` for one array,
            ``"old/name": [parts]`` for the slices of a partitioned variable, in order along the
                first dimension.

    Raises:
        ValueError: There is no such checkpoint, or arrays and variables do not fit; the message
            lists all misfits.
        DataLossError: The checkpoint is damaged.
    """
    reader = load_checkpoint(ckpt_dir_or_file)
    variables = {v.op.name: v for v in get_default_graph().variables()}
    problems: list[str] = []
    chosen: list[tuple[StoredArray, list[Variable]]] = []
    for source, target in assignment_map.items():
        try:
            chosen.extend(_matching_pairs(reader, variables, source, target))
        except ValueError as error:
            problems.append(str(error))
    for stored, parts in chosen:
        problems.extend(_find_misfits(stored, parts))
    if problems:
        raise ValueError(f"init_from_checkpoint({reader.path}): {'; '.join(problems)}")
    for stored, parts in chosen:
        value = reader.get_tensor(stored.name)
        first = 0
        for part in parts:
            if len(parts) == 1:
                _initialize_from(part, value)
            else:
                _initialize_from(part, value[first : first + part.shape[0]])
                first += part.shape[0]


def _initialize_from(variable: Variable, value: Any) -> None:
    """Replaces a variable's initialiser; operations made of the old one, such as an ``init`` group, stay."""
    graph = variable.graph
    # An initialiser runs by itself, so it waits for no operation of the open scopes.
    with (
        graph.as_default(),
        graph.control_dependencies(None),
        graph.name_scope(variable.op.name + "/"),
    ):
        variable.initializer = variable.assign(value, name="Assign").op


def _matching_pairs(
    reader: CheckpointReader, variables: Mapping[str, Variable], source: str, target: object
) -> Iterator[tuple[StoredArray, list[Variable]]]:
    if source.endswith("/"):
        if not isinstance(target, str) or not target.endswith("/"):
            raise ValueError(
                f"{source!r} is a scope, so where it goes must be one too, with a / at its end: "
                f"{target!r}"
            )
        old, new = source.lstrip("/"), target.lstrip("/")
        found = False
        for name, variable in variables.items():
            if name.startswith(new):
                wanted = old + name.removeprefix(new)
                if wanted not in reader.arrays:
                    raise ValueError(f"{wanted!r} for variable {name!r} is not in the checkpoint")
                found = True
                yield reader.arrays[wanted], [variable]
        if not found:
            raise ValueError(f"there are no variables in scope {target!r}")
        return
    name = source.removesuffix(":0")
    if name not in reader.arrays:
        raise ValueError(
            f"{source!r} is not in the checkpoint, which has {', '.join(reader.arrays)}"
        )
    parts = target if isinstance(target, list | tuple) else [target]
    found_parts = []
    for part in parts:
        if isinstance(part, str):
            if part.removesuffix(":0") not in variables:
                raise ValueError(f"there is no variable {part!r}")
            part = variables[part.removesuffix(":0")]
        if not isinstance(part, Variable):
            raise ValueError(f"{source!r} goes to {part!r}, which is no variable")
        found_parts.append(part)
    yield reader.arrays[name], found_parts


def _find_misfits(stored: StoredArray, parts: list[Variable]) -> Iterator[str]:
    shape = parts[0].shape
    if len(parts) > 1:
        shape = (sum(p.shape[0] for p in parts), *shape[1:])
    if shape != stored.shape:
        yield f"{stored.name!r} has shape {stored.shape}, {parts[0].op.name!r} has {shape}"
    for part in parts:
        if dtype_name(part.dtype) != stored.dtype:
            yield f"{stored.name!r} is {stored.dtype}, {part.op.name!r} is {dtype_name(part.dtype)}"


def checkpoints_iterator(
    checkpoint_dir: str,
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the newest checkpoint of a directory each time there is a newer one.

    The directory is read once a second. A warning is logged every 10 s of the wait.

        for path in tf.train.checkpoints_iterator("logdir", timeout=600):
            evaluate(path)

    Args:
        checkpoint_dir: the directory.
        min_interval_secs: shortest time between two checkpoints, in seconds.
        timeout: seconds to wait for a new checkpoint; None waits for ever.
        timeout_fn: called after ``timeout``; True ends the iteration, False waits again. None ends
            the iteration.
    """
    last: str | None = None
    given_at = -min_interval_secs
    while True:
        found = _wait_for_newer(checkpoint_dir, last, timeout)
        if found is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        left = given_at + min_interval_secs - concurrency.monotonic()
        if left > 0:
            # The event is never set: a directory sends no signal of a new checkpoint.
            concurrency.Event().wait(left)
        last, given_at = found, concurrency.monotonic()
        yield found


def _wait_for_newer(directory: str, last: str | None, timeout: float | None) -> str | None:
    started = concurrency.monotonic()
    logged_at = started
    while True:
        reason = ""
        try:
            newest, _ = layout.newest_usable(directory, layout.check_files)
            if newest is not None and newest.path != last:
                return newest.path
        except UnavailableError as error:
            reason = f": {error.message}"
        now = concurrency.monotonic()
        if timeout is not None and now - started >= timeout:
            return None
        if now - logged_at >= timeouts.LOG_EVERY_SECS:
            logged_at = now
            logging.warning("still waiting for a new checkpoint in %s%s", directory, reason)
        concurrency.Event().wait(
            times.POLL_SECS if timeout is None else min(times.POLL_SECS, timeout)
        )
