"""``tf.summary`` and the older ``tf.*_summary``: the harness's summaries by TensorFlow's argument orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import runtime as rt
from harness.tensorboard import summary as _summary
from harness.tensorboard.summary import audio as audio
from harness.tensorboard.summary import histogram as histogram
from harness.tensorboard.summary import image as image
from harness.tensorboard.summary import merge as merge
from harness.tensorboard.summary import merge_all as merge_all
from harness.tensorboard.summary import scalar as scalar
from harness.tensorboard.summary import text as text
from harness.tensorboard.writer import FileWriterCache as FileWriterCache
from harness.tf1.messages import Event as Event
from harness.tf1.messages import SessionLog as SessionLog
from harness.tf1.messages import Summary as Summary
from harness.tf1.messages import SummaryDescription as SummaryDescription
from harness.tf1.messages import TaggedRunMetadata as TaggedRunMetadata
from harness.tf1.missing import absent as _absent
from harness.tf1.saver import FileWriter as FileWriter

SummaryWriter = FileWriter


def _tag(tags: object) -> str:
    """The one tag of the old functions, which took a list too."""
    if isinstance(tags, list | tuple) and len(tags) == 1:
        tags = tags[0]
    if not isinstance(tags, str):
        raise TypeError(f"one summary has one tag, a string, not {tags!r}: make one summary for each tag")
    return tags


def scalar_summary(
    tags: str | Sequence[str], values: rt.TensorLike, collections: Sequence[str] | None = None, name: str | None = None
) -> rt.Tensor:
    """``tf.summary.scalar``."""
    return _summary.scalar(_tag(tags), values, collections)


def histogram_summary(
    tag: str | Sequence[str], values: rt.TensorLike, collections: Sequence[str] | None = None, name: str | None = None
) -> rt.Tensor:
    """``tf.summary.histogram``."""
    return _summary.histogram(_tag(tag), values, collections)


def image_summary(
    tag: str | Sequence[str],
    tensor: rt.TensorLike,
    max_images: int = 3,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``tf.summary.image``."""
    return _summary.image(_tag(tag), tensor, max_images, collections)


def audio_summary(
    tag: str | Sequence[str],
    tensor: rt.TensorLike,
    sample_rate: rt.TensorLike,
    max_outputs: int = 3,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """``tf.summary.audio``."""
    return _summary.audio(_tag(tag), tensor, sample_rate, max_outputs, collections)


def merge_summary(
    inputs: Sequence[rt.TensorLike], collections: Sequence[str] | None = None, name: str | None = None
) -> rt.Tensor:
    """``tf.summary.merge``."""
    return _summary.merge(inputs, collections, name)


def merge_all_summaries(key: str = "summaries") -> rt.Tensor | None:
    """``tf.summary.merge_all``."""
    return _summary.merge_all(key)


OLD: dict[str, Callable[..., rt.Tensor | None]] = {
    "audio_summary": audio_summary,
    "histogram_summary": histogram_summary,
    "image_summary": image_summary,
    "merge_all_summaries": merge_all_summaries,
    "merge_summary": merge_summary,
    "scalar_summary": scalar_summary,
}
"""The names before 1.0, which stood in ``tf`` itself."""


def __getattr__(name: str) -> Any:
    raise AttributeError(name) if name.startswith("__") else _absent("tf.summary", name)
