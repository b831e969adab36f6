"""``tf.summary`` and the older ``tf.*_summary``: the harness's summaries by TensorFlow's argument orders."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboardX.proto import event_pb2, summary_pb2

import runtime as rt
from harness.tensorboard import summary as _summary
from harness.tensorboard.writer import FileWriterCache
from harness.tf1.names.missing import namespace
from harness.tf1.names.table import add_names
from harness.tf1.ops.lift import Public
from harness.tf1.train.saver import FileWriter

OLD_NAMES = "Summaries by their old names"
public = Public("tf", OLD_NAMES)

add_names(
    "tf.summary",
    {
        **{
            n: getattr(_summary, n)
            for n in ("audio", "histogram", "image", "merge", "merge_all", "scalar", "text")
        },
        "Event": event_pb2.Event,
        "FileWriter": FileWriter,
        "FileWriterCache": FileWriterCache,
        "SessionLog": event_pb2.SessionLog,
        "Summary": summary_pb2.Summary,
        "SummaryDescription": summary_pb2.SummaryDescription,
        "TaggedRunMetadata": event_pb2.TaggedRunMetadata,
    },
)


def _tag(tags: object) -> str:
    """Returns the one tag of the old functions, which took a list too."""
    if isinstance(tags, list | tuple) and len(tags) == 1:
        tags = tags[0]
    if not isinstance(tags, str):
        raise TypeError(
            f"one summary has one tag, a string, not {tags!r}: make one summary for each tag"
        )
    return tags


@public.add()
def scalar_summary(
    tags: str | Sequence[str],
    values: rt.TensorLike,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``tf.summary.scalar``."""
    return _summary.scalar(_tag(tags), values, collections)


@public.add()
def histogram_summary(
    tag: str | Sequence[str],
    values: rt.TensorLike,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``tf.summary.histogram``."""
    return _summary.histogram(_tag(tag), values, collections)


@public.add()
def image_summary(
    tag: str | Sequence[str],
    tensor: rt.TensorLike,
    max_images: int = 3,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``tf.summary.image``."""
    return _summary.image(_tag(tag), tensor, max_images, collections)


@public.add()
def audio_summary(
    tag: str | Sequence[str],
    tensor: rt.TensorLike,
    sample_rate: rt.TensorLike,
    max_outputs: int = 3,
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``tf.summary.audio``."""
    return _summary.audio(_tag(tag), tensor, sample_rate, max_outputs, collections)


@public.add()
def merge_summary(
    inputs: Sequence[rt.TensorLike],
    collections: Sequence[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Calls ``tf.summary.merge``."""
    return _summary.merge(inputs, collections, name)


@public.add()
def merge_all_summaries(key: str = "summaries") -> rt.Tensor | None:
    """Calls ``tf.summary.merge_all``."""
    return _summary.merge_all(key)


__getattr__, __dir__ = namespace("tf.summary")
