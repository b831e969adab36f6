"""Feeds: the values of the user become arrays for their tensors, or an error that names the tensor."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from runtime import concurrency
from runtime.errors import InvalidArgumentError, OpError, ResourceExhaustedError, one_line
from runtime.graph.graph import FeedDict, Graph, Operation, Tensor, show_shape
from runtime.graph.op_kinds import Feed
from runtime.graph.ops import as_array, is_tensor, kind_of
from runtime.plan.planner import SizelessTraces
from runtime.plan.substeps import Substep
from runtime.session.recent import RecentValues
from runtime.tensor_spec import AnyArray, Array, DType, TensorSpec, shape_fits

COMPILED_AT_STEP = 8
"""The step at which shapes have a compiled program.

An evaluated step takes some milliseconds, and a compilation half a second.
"""
MOST_EVALUATED = 2**16
"""Elements of the feeds of a step that may be evaluated.

A compiled program computes more elements so much faster that the compilation pays at once.
"""
WARN_SHAPES = 32
"""Shapes of one placeholder after which a session warns that each shape is compiled anew."""
_warned: weakref.WeakSet[Operation] = weakref.WeakSet()
"""Placeholders with a logged warning: a fed value did not fit their dtype."""


def read_feeds(graph: Graph, feed_dict: FeedDict) -> tuple[tuple[Tensor, ...], list[AnyArray]]:
    """Returns the tensors and the arrays of a ``feed_dict``.

    Args:
        graph: the graph of the step.
        feed_dict: the user's values, by tensor, variable or name.

    Raises:
        TypeError: a key is no tensor of the graph, or a value does not suit its tensor.
        InvalidArgumentError: a tensor is fed twice, a shape does not fit, or the graph was built with
            another value.
    """
    if not isinstance(feed_dict, Mapping):
        raise TypeError(
            f"feed_dict must be a dict of tensors to values, not {type(feed_dict).__name__}"
        )
    # A name and its tensor are one key here, so that a tensor that is fed twice is found.
    fed: dict[Tensor, AnyArray] = {}
    for given, values in feed_dict.items():
        for key, value in (
            ((given, values),) if type(given) is Tensor else _flatten_feed(given, values)
        ):
            tensor = (
                key
                if type(key) is Tensor and key.op.graph is graph
                else _find_fed_tensor(graph, key)
            )
            if tensor in fed:
                raise InvalidArgumentError(f"{tensor.name!r} is fed twice, under two of its names")
            fed[tensor] = feed_value(tensor, value)
    if graph.fixed:
        for tensor in graph.fixed.keys() & fed.keys():
            if not np.array_equal(graph.fixed[tensor], fed[tensor]):
                raise InvalidArgumentError(
                    f"{tensor.name!r} cannot be fed with another value: a size or an axis of the "
                    "graph was made of its own. Build a graph for each value, or take the size "
                    "from the shape of a fed tensor"
                )
    return tuple(fed), list(fed.values())


def _flatten_feed(key: object, value: object) -> Iterator[tuple[object, object]]:
    """Yields the feeds of a key; a tuple of keys, or a pytree of tensors, has a value of the same structure.

    Raises:
        ValueError: The structures differ.
    """
    # A pytree other than a tuple, such as a sparse tensor, has the values of its leaves.
    if not isinstance(key, tuple) and (leaves := jax.tree.leaves(key)) != [key]:
        key = tuple(leaves)
    if isinstance(key, tuple) and isinstance(value, Mapping):
        # TensorFlow takes the values of a dict in the order of its keys.
        value = [value[name] for name in sorted(value)]
    if not isinstance(key, tuple):
        yield key, value
    elif isinstance(value, tuple | list) and len(value) == len(key):
        for part, its_value in zip(key, value, strict=True):
            yield from _flatten_feed(part, its_value)
    else:
        raise ValueError(f"feed_dict: {value!r} does not have the structure of its key {key!r}")


def _find_fed_tensor(graph: Graph, key: object) -> Tensor:
    try:
        element = graph.as_graph_element(key)
    except (TypeError, ValueError) as error:
        fed = ", ".join(op.name for op in graph.get_operations() if op.type == "Placeholder")
        raise TypeError(
            f"Cannot interpret feed_dict key as Tensor: {error}; the placeholders are {fed}"
        ) from None
    if not isinstance(element, Tensor):
        raise TypeError(
            f"Cannot interpret feed_dict key as Tensor: {key!r} is an operation; feed one of its "
            "outputs"
        )
    return element


class ShapeWatch:
    """The shapes that each tensor was fed with. The shapes decide between a compilation and an evaluation.

    Thread safe.
    """

    def __init__(self) -> None:
        self._lock = concurrency.Lock()
        self._seen: dict[Tensor, set[tuple[int, ...]]] = {}
        self._step_counts: RecentValues[int] = RecentValues()
        """Numbers of the steps without a compiled plan, by substep and shapes."""
        self._traces: RecentValues[SizelessTraces] = RecentValues()

    def find_traces(
        self, key: Hashable, part: Substep, values: Sequence[AnyArray]
    ) -> SizelessTraces | None:
        """Counts a step, and returns the traces of its substep; None for shapes that are worth a compilation."""
        family = part, tuple(v.ndim for v in values)
        traces = self._traces.find(family)
        # Most substeps have one size for ever, so the first size is compiled.
        times = COMPILED_AT_STEP if traces is None else (self._step_counts.find(key) or 0) + 1
        traces = {} if traces is None else traces
        self._traces.keep(family, traces)
        self._step_counts.keep(key, times)
        is_rare = times < COMPILED_AT_STEP and sum(v.size for v in values) <= MOST_EVALUATED
        return traces if is_rare else None

    def note(self, specs: Mapping[Tensor, TensorSpec]) -> None:
        """Counts the shapes of a step, and logs a warning at each multiple of ``WARN_SHAPES``."""
        with self._lock:
            for tensor, spec in specs.items():
                seen = self._seen.setdefault(tensor, set())
                before = len(seen)
                seen.add(spec.shape)
                if before < len(seen) and len(seen) % WARN_SHAPES == 0:
                    logging.warning(
                        "%r was fed with %d different shapes, and each one is compiled anew: pad "
                        "to a few sizes",
                        tensor.name,
                        len(seen),
                    )


def feed_value(tensor: Tensor, value: object) -> AnyArray:
    """Returns ``value`` as an array that fits ``tensor``.

    An array of another dtype is converted if no value changes, apart from the rounding of reals. A
    placeholder with "unsafe" casting cuts other values to fit, except for a Python int.

    Args:
        tensor: the fed tensor, whose static shape and dtype the array must have.
        value: array, number, string, or nested lists of these.

    Raises:
        TypeError: the value is a tensor, or the dtype cannot hold the value.
        InvalidArgumentError: the shape does not fit, the value is no array, or text is fed for numbers.
    """
    # A training loop feeds arrays that fit, and each step pays for this line only.
    if type(value) is np.ndarray and value.dtype == tensor.dtype and not value.dtype.hasobject:
        array: AnyArray = value
    elif is_tensor(value):
        raise TypeError(
            f"the value fed for {tensor.name!r} cannot be a tensor: feed an array, number or string"
        )
    # A batch on an accelerator stays there. A tracer has no value, which numpy says.
    elif (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and value.dtype == tensor.dtype
    ):
        array = value
    else:
        return _convert_value(tensor, value)
    # Written out, because a step pays for each call of a function here.
    if tensor.shape is not None and not shape_fits(array.shape, tensor.shape):
        _check_shape(tensor, array)
    return array


def _check_shape(tensor: Tensor, array: AnyArray) -> None:
    if tensor.shape is not None and not shape_fits(array.shape, tensor.shape):
        raise InvalidArgumentError(
            f"Cannot feed value of shape {array.shape} for {tensor.name!r}, which has shape "
            f"{show_shape(tensor.shape)}"
        )


def _convert_value(tensor: Tensor, value: object) -> Array:
    what = f"the value fed for {tensor.name!r}"
    if tensor.dtype.hasobject:
        array = as_array(value, None, what)
        _check_shape(tensor, array)
        if not array.dtype.hasobject:
            raise TypeError(f"{what} is {array.dtype.name}, but the placeholder takes strings")
        return array
    try:
        array = np.asarray(value)
        # Numbers in an array of objects have a dtype of their own.
        if array.dtype.kind == "O":
            array = np.asarray(array.tolist())
    except ValueError as error:
        raise InvalidArgumentError(f"{what} cannot be made an array: {error}") from None
    unsafe = isinstance(tensor.op.body, Feed) and tensor.op.body.casting == "unsafe"
    if array.dtype.kind in "SUO" and not unsafe:
        # Numpy raises ValueError for a word, and so does TensorFlow.
        raise (TypeError if array.dtype.kind == "O" else InvalidArgumentError)(
            f"{what} is not numeric, but the placeholder takes {tensor.dtype.name}"
        )
    try:
        cast = _cast_array(array, tensor.dtype)
    # A word is no number, and None is no integer.
    except (TypeError, ValueError) as error:
        raise (InvalidArgumentError if isinstance(error, ValueError) else TypeError)(
            f"{what}: {error}"
        ) from None
    _check_shape(tensor, cast)
    # A cast of numpy changes values without an error.
    changed = _find_change(array, cast)
    if changed is None:
        return cast
    if unsafe and not isinstance(value, int):
        if tensor.op not in _warned:
            _warned.add(tensor.op)
            logging.warning(
                "%s: %s does not fit %s: %s; told once",
                what,
                array.dtype.name,
                tensor.dtype.name,
                changed,
            )
        return cast
    try:
        return as_array(array, tensor.dtype, what)
    except InvalidArgumentError as error:
        raise TypeError(error.message) from None


def _cast_array(array: Array, dtype: DType) -> Array:
    """Returns ``array`` as ``dtype``, by numpy's unsafe casting."""
    # Numpy warns about the lost part, which the caller reports as a change.
    if array.dtype.kind == "c" and dtype.kind not in "cb":
        array = array.real
    # The caller compares the values, and reports a change in better words than numpy.
    with np.errstate(invalid="ignore"):
        return array.astype(dtype)


def _find_change(array: Array, cast: Array) -> str | None:
    """Returns, in words, the first value that a cast has changed by more than rounding, or None."""
    assert cast.shape == array.shape
    if array.dtype.kind not in "SUO" and kind_of(cast.dtype) >= max(2, kind_of(array.dtype)):
        return None
    if array.dtype.kind in "SU":
        differs = np.full(array.shape, True)
    elif kind_of(cast.dtype) == 2 and array.dtype.kind == "c":
        differs = array.imag != 0
    else:
        differs = np.asarray(cast != array)
    if not differs.any():
        return None
    where = np.unravel_index(int(differs.argmax()), differs.shape)
    return f"{array[where]} became {cast[where]}"


def name_batch(error: OpError, tensors: Sequence[Tensor], values: Sequence[AnyArray]) -> None:
    """Adds the feeds of a step to an error that a smaller batch would cure.

    Args:
        error: error of the step.
        tensors: fed tensors.
        values: their values.
    """
    # With lost values the cure is a restored checkpoint, which the error names already.
    if not isinstance(error, ResourceExhaustedError) or not error.out_of_memory:
        return
    batch = ", ".join(
        f"{t.op.name} {v.dtype.name}{show_shape(v.shape)}"
        for t, v in zip(tensors, values, strict=True)
    )
    named = batch and f"; the batch was {one_line(batch)}"
    error.message += (
        f"{named}; no variable has lost its value: feed a smaller batch, or give the task more "
        "memory (docs/gpu.md)"
    )
