"""``tf.data``: datasets and their iterators, as host stages of the worker."""

from __future__ import annotations

from collections.abc import Callable

from harness.tf1.inputs import iterators
from harness.tf1.inputs.datasets import (
    Dataset,
    FixedLengthRecordDataset,
    TextLineDataset,
    TFRecordDataset,
)
from harness.tf1.inputs.elements import Nest, Number
from harness.tf1.names.missing import Namespace, namespace
from harness.tf1.names.table import add_names
from harness.tf1.ops.lift import Public

public = Public("tf.data.experimental")

Transformation = Callable[[Dataset], Dataset]


@public.add()
def shuffle_and_repeat(
    buffer_size: Number, count: Number = None, seed: Number = None
) -> Transformation:
    """Returns a function for ``Dataset.apply``: ``shuffle`` and then ``repeat``."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


@public.add()
def map_and_batch(
    map_func: Callable[..., Nest],
    batch_size: Number,
    num_parallel_batches: object = None,
    drop_remainder: bool = False,
    num_parallel_calls: object = None,
) -> Transformation:
    """Returns a function for ``Dataset.apply``: ``map`` and then ``batch``."""
    return lambda dataset: dataset.map(map_func).batch(batch_size, drop_remainder)


@public.add()
def batch_and_drop_remainder(batch_size: Number) -> Transformation:
    """Returns a function for ``Dataset.apply``: ``batch`` without a smaller one at the end."""
    return lambda dataset: dataset.batch(batch_size, True)


@public.add()
def parallel_interleave(
    map_func: Callable[..., Dataset],
    cycle_length: Number,
    block_length: Number = 1,
    sloppy: object = False,
    buffer_output_elements: object = None,
    prefetch_input_elements: object = None,
) -> Transformation:
    """Returns a function for ``Dataset.apply``: ``interleave``."""
    return lambda dataset: dataset.interleave(map_func, cycle_length, block_length)


add_names(
    "tf.data",
    {
        "Dataset": Dataset,
        "FixedLengthRecordDataset": FixedLengthRecordDataset,
        "Iterator": iterators.Iterator,
        "TFRecordDataset": TFRecordDataset,
        "TextLineDataset": TextLineDataset,
        "experimental": Namespace("tf.data.experimental"),
    },
)

__getattr__, __dir__ = namespace("tf.data")
