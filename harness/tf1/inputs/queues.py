"""Queues and accumulators by TensorFlow's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public, is_tensor
from harness.tf1.ops.shapes import ShapeLike
from harness.tf1.ops.static import static_number
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf", "Queues")


def _as_dtypes(dtypes: object) -> Any:
    return (
        [as_dtype(d).dtype for d in dtypes]
        if isinstance(dtypes, list | tuple)
        else as_dtype(dtypes).dtype
    )


def _as_shapes(shapes: object) -> Any:
    return None if shapes is None else static_number(shapes, "the shapes of a queue")


def _no_names(names: object) -> None:
    if names is not None:
        raise ValueError("names= is not in harness.tf1: components of a queue go by their order")


class _Components:
    """As TensorFlow has it: a list of values is a list of components, and several components are given as a list."""

    dtypes: tuple[rt.lowlevel.DType, ...]

    def enqueue(
        self, vals: rt.TensorLike | Sequence[rt.TensorLike], name: str | None = None
    ) -> rt.Operation:
        """Adds one element; waits while the queue is full."""
        made: rt.Operation = super().enqueue(self._as_components(vals), name)  # type: ignore[misc]
        return made

    def enqueue_many(
        self, vals: rt.TensorLike | Sequence[rt.TensorLike], name: str | None = None
    ) -> rt.Operation:
        """Adds the slices of ``vals`` along the first dimension; waits while the queue is full."""
        made: rt.Operation = super().enqueue_many(self._as_components(vals), name)  # type: ignore[misc]
        return made

    def dequeue(self, name: str | None = None) -> Any:
        """Removes an element, and waits for the first.

        Returns a list where there are several components.
        """
        return _one_or_list(super().dequeue(name))  # type: ignore[misc]

    def dequeue_many(self, n: rt.TensorLike, name: str | None = None) -> Any:
        """Removes ``n`` elements, stacked; waits until there are so many, or raises OutOfRangeError once closed."""
        return _one_or_list(super().dequeue_many(n, name))  # type: ignore[misc]

    def dequeue_up_to(self, n: rt.TensorLike, name: str | None = None) -> Any:
        """Takes elements as ``dequeue_many`` does, but of a closed queue the fewer that are left, if there is one."""
        return _one_or_list(super().dequeue_up_to(n, name))  # type: ignore[misc]

    def _as_components(self, vals: rt.TensorLike | Sequence[rt.TensorLike]) -> Any:
        values: list[Any] = list(vals) if isinstance(vals, list | tuple) else [vals]
        if len(values) != len(self.dtypes):
            raise ValueError(
                f"this queue has {len(self.dtypes)} components, {len(values)} were given"
            )
        typed = [
            convert_to_tensor(v, None if is_tensor(v) else d)
            for v, d in zip(values, self.dtypes, strict=True)
        ]
        return typed[0] if len(typed) == 1 else typed


def _one_or_list(found: rt.Tensor | tuple[rt.Tensor, ...]) -> rt.Tensor | list[rt.Tensor]:
    return list(found) if isinstance(found, tuple) else found


@public.add()
class FIFOQueue(_Components, rt.FIFOQueue):
    """``rt.FIFOQueue``: elements come back in the order in which they came."""

    def __init__(
        self,
        capacity: int,
        dtypes: Any,
        shapes: Any = None,
        names: object = None,
        shared_name: str | None = None,
        name: str = "fifo_queue",
    ) -> None:
        _no_names(names)
        super().__init__(
            capacity, _as_dtypes(dtypes), _as_shapes(shapes), name, shared_name=shared_name
        )


@public.add()
class PaddingFIFOQueue(_Components, rt.PaddingFIFOQueue):
    """``rt.PaddingFIFOQueue``: smaller elements of a batch are padded."""

    def __init__(
        self,
        capacity: int,
        dtypes: Any,
        shapes: Any,
        names: object = None,
        shared_name: str | None = None,
        name: str = "padding_fifo_queue",
    ) -> None:
        _no_names(names)
        super().__init__(
            capacity, _as_dtypes(dtypes), _as_shapes(shapes), name, shared_name=shared_name
        )


@public.add()
class RandomShuffleQueue(_Components, rt.RandomShuffleQueue):
    """``rt.RandomShuffleQueue``: elements come back in random order."""

    def __init__(
        self,
        capacity: int,
        min_after_dequeue: int,
        dtypes: Any,
        shapes: Any = None,
        names: object = None,
        seed: int | None = None,
        shared_name: str | None = None,
        name: str = "random_shuffle_queue",
    ) -> None:
        _no_names(names)
        super().__init__(
            capacity,
            min_after_dequeue,
            _as_dtypes(dtypes),
            _as_shapes(shapes),
            seed,
            name,
            shared_name=shared_name,
        )


@public.add()
class ConditionalAccumulator(rt.ConditionalAccumulator):
    """``rt.ConditionalAccumulator``: the mean of gradients of one step, stale ones dropped."""

    def __init__(
        self,
        dtype: DTypeLike,
        shape: ShapeLike | None = None,
        shared_name: str | None = None,
        name: str = "conditional_accumulator",
        reduction_type: str = "MEAN",
    ) -> None:
        super().__init__(
            _as_dtypes(dtype), _as_shapes(shape), name, reduction_type, shared_name=shared_name
        )
