"""Summaries: operations that give a serialized Summary message, evaluated as part of a step like any tensor.

Summaries run on the target of the session, in any device scope. The tag of a summary is its name
inside the open name scope, with ``_1``, ``_2`` ... if the graph has a summary of that tag already.

    harness.summary.scalar("loss", loss)
    merged = harness.summary.merge_all()
    writer.add_summary(sess.run(merged), step)
"""

import itertools
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

import runtime as rt

_tags: weakref.WeakKeyDictionary[rt.Graph, set[str]] = weakref.WeakKeyDictionary()
"""The tags of the summaries of each graph."""
_ILLEGAL = re.compile(r"[^-/\w.]")
_STRING = np.dtype(object)


def scalar(
    name: str,
    tensor: rt.TensorLike,
    collections: Iterable[str] | None = None,
    family: str | None = None,
) -> rt.Tensor:
    """Makes a summary of a number.

    Args:
        name: the tag, inside the open name scope.
        tensor: a number of any numeric dtype, shape ``()`` (or unknown until the step runs).
        collections: keys of the graph collections for the summary; ``SUMMARIES`` by default.
        family: a prefix that groups tags in TensorBoard.

    Returns:
        A string tensor of shape ``()``.

    Raises:
        InvalidArgumentError: The tensor is not a number. An unknown shape is checked when the step
            runs.
    """
    value = rt.as_tensor(tensor)
    if value.shape is not None and any(size != 1 for size in value.shape):
        raise rt.InvalidArgumentError(
            f"summary.scalar({name!r}) takes one number, not a tensor of shape {value.shape}"
        )
    return _make_summary("scalar", "ScalarSummary", name, [value], {}, collections, family)


def histogram(
    name: str,
    values: rt.TensorLike,
    collections: Iterable[str] | None = None,
    family: str | None = None,
) -> rt.Tensor:
    """Makes a summary of the distribution of ``values``, of any shape and numeric dtype.

    Args:
        name: the tag.
        values: the numbers to count.
        collections: as in ``scalar``.
        family: as in ``scalar``.

    Raises:
        InvalidArgumentError: An element is NaN or infinite when the step runs; the error names the
            tag.
    """
    return _make_summary("histogram", "HistogramSummary", name, [values], {}, collections, family)


def image(
    name: str,
    tensor: rt.TensorLike,
    max_outputs: int = 3,
    collections: Iterable[str] | None = None,
    family: str | None = None,
) -> rt.Tensor:
    """Makes a summary of pictures.

    Args:
        name: the tag; the pictures get ``/image`` (one) or ``/image/0``, ``/image/1`` ... appended.
        tensor: ``[batch, height, width, channels]`` with 1 (grey), 3 (RGB) or 4 (RGBA) channels.
            ``uint8`` is not scaled. Other dtypes are scaled so that the largest value is 255, or 0
            is grey if some are negative.
        max_outputs: most pictures of the batch.
        collections: as in ``scalar``.
        family: as in ``scalar``.

    Raises:
        InvalidArgumentError: The tensor has another rank or number of channels.
    """
    value = _check_rank(name, tensor, (4,), "[batch, height, width, channels]")
    attrs = {"max_outputs": _check_outputs(max_outputs)}
    return _make_summary("image", "ImageSummary", name, [value], attrs, collections, family)


def audio(
    name: str,
    tensor: rt.TensorLike,
    sample_rate: rt.TensorLike,
    max_outputs: int = 3,
    collections: Iterable[str] | None = None,
    family: str | None = None,
) -> rt.Tensor:
    """Makes a summary of sound clips.

    Args:
        name: the tag; the clips get ``/audio`` (one) or ``/audio/0`` ... appended.
        tensor: ``[batch, frames]`` or ``[batch, frames, channels]``, floats from -1 to 1.
        sample_rate: samples per second, a number or a tensor.
        max_outputs: most clips of the batch.
        collections: as in ``scalar``.
        family: as in ``scalar``.

    Raises:
        InvalidArgumentError: The tensor has another rank.
    """
    value = _check_rank(name, tensor, (2, 3), "[batch, frames] or [batch, frames, channels]")
    attrs = {"max_outputs": _check_outputs(max_outputs)}
    return _make_summary(
        "audio", "AudioSummaryV2", name, [value, sample_rate], attrs, collections, family
    )


def text(name: str, tensor: rt.TensorLike, collections: Iterable[str] | None = None) -> rt.Tensor:
    """Makes a summary of strings, shown as Markdown; a vector or matrix becomes a table.

    Args:
        name: the tag.
        tensor: strings.
        collections: as in ``scalar``.

    Raises:
        ValueError: ``tensor`` has no strings.
    """
    value = rt.as_tensor(tensor)
    if value.dtype != _STRING:
        raise ValueError(f"summary.text({name!r}) takes a tensor of strings, not of {value.dtype}")
    return _make_summary("text", "TensorSummaryV2", name, [value], {}, collections, None)


def merge(
    inputs: Sequence[rt.TensorLike],
    collections: Iterable[str] | None = None,
    name: str | None = None,
) -> rt.Tensor:
    """Merges summaries into one summary with all their values.

    Args:
        inputs: summaries (string tensors); a repeated summary counts once.
        collections: keys of the graph collections for the merged summary; none by default.
        name: operation name, "Merge" by default.
    """
    # A summary that is merged twice would write its point twice.
    tensors = list(dict.fromkeys(rt.as_tensor(i) for i in inputs))
    wrong = [t.name for t in tensors if t.dtype != _STRING]
    if wrong:
        raise rt.InvalidArgumentError(
            f"summary.merge takes summaries, which are strings; {', '.join(wrong)} is not one"
        )
    with rt.device(None):
        op = rt.lowlevel.host_call(
            "summary/merge",
            tensors,
            [((), object)],
            type="MergeSummary",
            name=name or "Merge/MergeSummary",
        )
    return _add_to_collections(op.outputs[0], () if collections is None else collections)


def merge_all(
    key: str = rt.GraphKeys.SUMMARIES, scope: str | None = None, name: str | None = None
) -> rt.Tensor | None:
    """Merges the summaries in a collection of the default graph; returns None for an empty collection.

    Args:
        key: the collection.
        scope: regular expression for the beginning of the names.
        name: operation name.
    """
    found = rt.get_default_graph().get_collection(key, scope)
    return merge(found, name=name) if found else None


def _make_summary(
    kind: str,
    type: str,  # noqa: A002 - the field's own name
    name: str,
    inputs: Sequence[rt.TensorLike],
    attrs: Mapping[str, object],
    collections: Iterable[str] | None,
    family: str | None,
) -> rt.Tensor:
    tensors = [rt.as_tensor(i) for i in inputs]
    graph = tensors[0].graph
    name = _clean_name(name)
    if family:
        family = _clean_name(family)
        name = f"{family}/{name}"
    # As in TF1, the family stands before the scope, and again before the name.
    tag = "/".join(filter(None, [family, graph.get_name_scope(), name]))
    taken = _tags.setdefault(graph, set())
    tag = _free_tag(tag, taken)
    taken.add(tag)
    # Not where the values are: the step's target writes its own summaries.
    with rt.device(None):
        op = rt.lowlevel.host_call(
            f"summary/{kind}",
            tensors,
            [((), object)],
            attrs={**attrs, "tag": tag},
            type=type,
            name=name,
        )
    return _add_to_collections(
        op.outputs[0], (rt.GraphKeys.SUMMARIES,) if collections is None else collections
    )


def _add_to_collections(tensor: rt.Tensor, collections: Iterable[str]) -> rt.Tensor:
    for key in collections:
        tensor.graph.add_to_collection(key, tensor)
    return tensor


def _clean_name(name: str) -> str:
    """Replaces the illegal characters of a name by ``_``, as in TensorFlow 1."""
    cleaned = _ILLEGAL.sub("_", name).lstrip("/-_")
    if not cleaned:
        raise rt.InvalidArgumentError(f"{name!r} is not a tag: give it a letter or a digit")
    return cleaned


def _free_tag(tag: str, taken: Collection[str]) -> str:
    candidates = itertools.chain([tag], (f"{tag}_{count}" for count in itertools.count(1)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _check_rank(name: str, tensor: rt.TensorLike, ranks: tuple[int, ...], wanted: str) -> rt.Tensor:
    value = rt.as_tensor(tensor)
    if value.shape is not None and len(value.shape) not in ranks:
        raise rt.InvalidArgumentError(
            f"summary {name!r} takes {wanted}, not a tensor of shape {value.shape}"
        )
    return value


def _check_outputs(max_outputs: int) -> int:
    if max_outputs < 1:
        raise rt.InvalidArgumentError(f"max_outputs is {max_outputs}, but at least 1 is needed")
    return int(max_outputs)
