"""``tf.train``'s input pipelines of queues: producers that give out elements, and batches of what a tensor gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import runtime as rt
from harness.tf1.inputs.queue_runner import QueueRunner, add_queue_runner
from harness.tf1.inputs.queues import FIFOQueue, RandomShuffleQueue
from harness.tf1.ops import array_ops
from harness.tf1.ops.join_ops import gather
from harness.tf1.ops.lift import Public
from harness.tf1.ops.random_ops import random_shuffle
from harness.tf1.ops.shapes import ShapeLike
from harness.tf1.ops.value_ops import convert_to_tensor

public = Public("tf.train")

Tensors = Any
"""A tensor, or a list or dictionary of them."""
Size = rt.TensorLike

Queue = FIFOQueue | RandomShuffleQueue


def _known_shape(tensor: rt.Tensor, what: str) -> list[int]:
    """Returns the static shape, which a queue needs."""
    if tensor.shape is None or None in tensor.shape:
        raise ValueError(
            f"{what}: the shape of {tensor.name!r} must be known, and it is {tensor.shape}"
        )
    return [int(size or 0) for size in tensor.shape]


@public.add()
def input_producer(
    input_tensor: rt.TensorLike,
    element_shape: object = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    summary_name: str | None = None,
    name: str | None = None,
    cancel_op: rt.Operation | None = None,
) -> FIFOQueue:
    """Returns a queue that a queue runner fills with the rows of a tensor again and again.

    Args:
        input_tensor: [n, ...].
        element_shape: not needed.
        num_epochs: how often each row is given out, for each runner; then the queue is closed. For
            ever by default.
        shuffle: draws the order anew each time.
        seed: of the draw.
        capacity: of the queue.
        shared_name: one queue for all who give this name.
        summary_name: not used.
        name: of the operations.
        cancel_op: see ``tf.train.QueueRunner``.

    Raises:
        ValueError: the shape of a row is not known, there are no rows, or ``num_epochs`` is below
            1.
    """
    if num_epochs is not None and num_epochs < 1:
        raise ValueError(f"input_producer: num_epochs must be > 0, not {num_epochs}")
    with rt.name_scope(name or "input_producer"):
        rows = convert_to_tensor(input_tensor)
        shape = _known_shape(rows, "input_producer")
        if not shape or not shape[0]:
            raise ValueError(
                f"input_producer needs at least one row: {rows.name!r} has shape {tuple(shape)}"
            )
        queue = FIFOQueue(capacity, [rows.dtype], [shape[1:]], shared_name=shared_name)
        given = random_shuffle(rows, seed) if shuffle else rows
        enqueue = queue.enqueue_many([given])
        add_queue_runner(QueueRunner(queue, [enqueue], cancel_op=cancel_op, rounds=num_epochs))
        return queue


@public.add()
def string_input_producer(
    string_tensor: rt.TensorLike,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
    cancel_op: rt.Operation | None = None,
) -> FIFOQueue:
    """Calls ``input_producer`` for strings, such as file names.

    The order is drawn once, as the graph is built.

    Raises:
        ValueError: there are no strings.
    """
    names = [string_tensor] if isinstance(string_tensor, str | bytes) else string_tensor
    if isinstance(names, list | tuple) and not names:
        raise ValueError("string_input_producer requires a non-null input tensor")
    if shuffle and isinstance(names, list | tuple):
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    return input_producer(
        names,
        None,
        num_epochs,
        False,
        seed,
        capacity,
        shared_name,
        None,
        name or "input_producer",
        cancel_op,
    )


@public.add()
def range_input_producer(
    limit: int,
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
) -> FIFOQueue:
    """Calls ``input_producer`` for the numbers from 0 to ``limit - 1``, int32."""
    numbers = array_ops.range(limit)
    return input_producer(numbers, [], num_epochs, shuffle, seed, capacity, shared_name, None, name)


@public.add()
def slice_input_producer(
    tensor_list: Sequence[rt.TensorLike],
    num_epochs: int | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    capacity: int = 32,
    shared_name: str | None = None,
    name: str | None = None,
) -> list[rt.Tensor]:
    """Returns one row of each tensor, of the same place; every step takes the next place.

    Raises:
        ValueError: no tensors.
    """
    if not tensor_list:
        raise ValueError("Expected at least one tensor in slice_input_producer().")
    with rt.name_scope(name or "input_producer"):
        tensors = [convert_to_tensor(each) for each in tensor_list]
        limit = _known_shape(tensors[0], "slice_input_producer")[0]
        place = range_input_producer(
            limit, num_epochs, shuffle, seed, capacity, shared_name
        ).dequeue()
        return [gather(each, place) for each in tensors]


def _make_batches(
    tensors: Tensors,
    batch_size: Size,
    num_threads: int,
    enqueue_many: bool,
    shapes: Sequence[ShapeLike] | None,
    smaller: bool,
    name: str,
    make: Callable[[list[rt.lowlevel.DType], Sequence[ShapeLike]], Queue],
) -> Tensors:
    """Batches of what ``tensors``, a tensor, a list or a dictionary, give; ``make`` makes the queue."""
    keys = sorted(tensors) if isinstance(tensors, Mapping) else None
    listed = (
        [tensors[key] for key in keys]
        if keys
        else list(tensors)
        if isinstance(tensors, list | tuple)
        else [tensors]
    )
    with rt.name_scope(name):
        values = [convert_to_tensor(each) for each in listed]
        known = shapes or [_known_shape(each, name)[1 if enqueue_many else 0 :] for each in values]
        queue: Queue = make([each.dtype for each in values], known)
        enqueue = queue.enqueue_many(values) if enqueue_many else queue.enqueue(values)
        add_queue_runner(QueueRunner(queue, [enqueue] * num_threads))
        taken = queue.dequeue_up_to(batch_size) if smaller else queue.dequeue_many(batch_size)
    if keys is None:
        return taken
    return dict(zip(keys, taken if isinstance(taken, list) else [taken], strict=True))


@public.add()
def batch(
    tensors: Tensors,
    batch_size: Size,
    num_threads: int = 1,
    capacity: int = 32,
    enqueue_many: bool = False,
    shapes: Sequence[ShapeLike] | None = None,
    dynamic_pad: bool = False,
    allow_smaller_final_batch: bool = False,
    shared_name: str | None = None,
    name: str | None = None,
) -> Tensors:
    """Batches of what tensors give, by a queue that a queue runner fills.

    Args:
        tensors: a tensor, or a list or dictionary of them; the result is of the same kind, but a
            tensor for a list of one, as in TensorFlow.
        batch_size: elements in a batch.
        num_threads: how many threads fill the queue.
        capacity: of the queue.
        enqueue_many: each tensor gives several elements at once, along its first dimension.
        shapes: of the elements; by default those of the tensors, which must be known.
        dynamic_pad: must be False.
        allow_smaller_final_batch: what is left at the end is a batch too.
        shared_name: one queue for all who give this name.
        name: of the operations.

    Raises:
        ValueError: a shape is not known, or ``dynamic_pad``.
    """
    if dynamic_pad:
        raise ValueError("batch: dynamic_pad is not in harness.tf1: use a tf.PaddingFIFOQueue")

    def make(dtypes: list[rt.lowlevel.DType], known: Sequence[ShapeLike]) -> FIFOQueue:
        return FIFOQueue(capacity, dtypes, known, shared_name=shared_name)

    smaller = allow_smaller_final_batch
    return _make_batches(
        tensors, batch_size, num_threads, enqueue_many, shapes, smaller, name or "batch", make
    )


@public.add()
def shuffle_batch(
    tensors: Tensors,
    batch_size: Size,
    capacity: int,
    min_after_dequeue: int,
    num_threads: int = 1,
    seed: int | None = None,
    enqueue_many: bool = False,
    shapes: Sequence[ShapeLike] | None = None,
    allow_smaller_final_batch: bool = False,
    shared_name: str | None = None,
    name: str | None = None,
) -> Tensors:
    """Makes batches in random order, drawn from at least ``min_after_dequeue`` elements."""

    def make(dtypes: list[rt.lowlevel.DType], known: Sequence[ShapeLike]) -> RandomShuffleQueue:
        return RandomShuffleQueue(
            capacity, min_after_dequeue, dtypes, known, seed=seed, shared_name=shared_name
        )

    smaller = allow_smaller_final_batch
    return _make_batches(
        tensors,
        batch_size,
        num_threads,
        enqueue_many,
        shapes,
        smaller,
        name or "shuffle_batch",
        make,
    )


def prefetch_queue(
    tensors: Sequence[rt.TensorLike] | rt.TensorLike,
    capacity: int = 8,
    num_threads: int = 1,
    dynamic_pad: bool = False,
    shared_name: str | None = None,
    name: str | None = None,
) -> FIFOQueue:
    """Makes the queue of ``slim.prefetch_queue``, which a queue runner fills with the values of tensors.

    Raises:
        TypeError: ``tensors`` is a dictionary.
        ValueError: ``dynamic_pad`` is set, or a shape is not known.
    """
    if isinstance(tensors, Mapping):
        raise TypeError("prefetch_queue: give a list of tensors, not a dictionary")
    if dynamic_pad:
        raise ValueError(
            "prefetch_queue: dynamic_pad is not possible, elements of a queue have one shape"
        )
    with rt.name_scope(name or "prefetch_queue"):
        listed: Sequence[Any] = tensors if isinstance(tensors, list | tuple) else [tensors]
        values = [convert_to_tensor(each) for each in listed]
        shapes = [_known_shape(each, "prefetch_queue") for each in values]
        queue = FIFOQueue(
            capacity, [each.dtype for each in values], shapes, shared_name=shared_name
        )
        add_queue_runner(QueueRunner(queue, [queue.enqueue(values)] * num_threads))
    return queue
