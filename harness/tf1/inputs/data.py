"""``tf.data``: datasets and their iterators, as host stages of the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.tf1.inputs import iterators
from harness.tf1.inputs.datasets import Dataset, FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
from harness.tf1.inputs.elements import Nest, Number
from harness.tf1.names.missing import Namespace, namespace
from harness.tf1.ops.lift import Names

EXTRAS = Names()
"""TensorFlow's name in ``tf.contrib.data`` and ``tf.data.experimental`` -> the function."""

Transformation = Callable[[Dataset], Dataset]


@EXTRAS.add()
def shuffle_and_repeat(buffer_size: Number, count: Number = None, seed: Number = None) -> Transformation:
    """For ``Dataset.apply``: ``shuffle`` and then ``repeat``."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


@EXTRAS.add()
def map_and_batch(
    map_func: Callable[..., Nest],
    batch_size: Number,
    num_parallel_batches: object = None,
    drop_remainder: bool = False,
    num_parallel_calls: object = None,
) -> Transformation:
    """For ``Dataset.apply``: ``map`` and then ``batch``."""
    return lambda dataset: dataset.map(map_func).batch(batch_size, drop_remainder)


@EXTRAS.add()
def batch_and_drop_remainder(batch_size: Number) -> Transformation:
    """For ``Dataset.apply``: ``batch`` without a smaller one at the end."""
    return lambda dataset: dataset.batch(batch_size, True)


@EXTRAS.add()
def parallel_interleave(
    map_func: Callable[..., Dataset],
    cycle_length: Number,
    block_length: Number = 1,
    sloppy: object = False,
    buffer_output_elements: object = None,
    prefetch_input_elements: object = None,
) -> Transformation:
    """For ``Dataset.apply``: ``interleave``."""
    return lambda dataset: dataset.interleave(map_func, cycle_length, block_length)


NAMES: dict[str, Any] = {
    "Dataset": Dataset,
    "FixedLengthRecordDataset": FixedLengthRecordDataset,
    "Iterator": iterators.Iterator,
    "TFRecordDataset": TFRecordDataset,
    "TextLineDataset": TextLineDataset,
    "experimental": Namespace("tf.data.experimental", EXTRAS),
}
"""TensorFlow's name in ``tf.data`` -> what it is here."""

__getattr__, __dir__ = namespace("tf.data", NAMES)
