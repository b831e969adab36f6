"""Serialized examples become tensors, on the host: ``tf.parse_example`` and its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.inputs import example_pb2 as pb
from harness.tf1.inputs.elements import padded_batch
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public
from harness.tf1.ops.python_ops import host_ops, strings
from harness.tf1.ops.shapes import TensorShape
from harness.tf1.ops.sparse import SparseTensor, matrix_of_rows
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array, DType, dtype_name

public = Public("tf", "Examples, text and sparse tensors")

_KINDS: dict[DType, str] = {
    np.dtype(object): "bytes_list",
    np.dtype(np.float32): "float_list",
    np.dtype(np.int64): "int64_list",
}
"""The dtype of a feature -> where an example keeps it."""
Sizes = int | Sequence[int]
"""A shape, or the only size of one."""
Values = Any
"""A number, a string, or lists of them."""
Parsed = dict[str, Any]
"""Tensors and sparse tensors by key."""
_SHOWN = {"bytes_list": "string", "float_list": "float", "int64_list": "int64"}


def _feature_dtype(dtype: object, key: str) -> DType:
    found = as_dtype(dtype).dtype
    if found not in _KINDS:
        raise TypeError(
            f"feature {key!r}: an example holds tf.string, tf.float32 and tf.int64, not "
            f"{found.name}"
        )
    return found


@public.add()
@dataclass(frozen=True)
class FixedLenFeature:
    """A feature of one known shape.

    Attributes:
        shape: of the values in one example.
        dtype: tf.string, tf.float32 or tf.int64.
        default_value: for an example without the feature, which is refused where there is no
            default.
    """

    shape: Sizes
    dtype: DTypeLike
    default_value: Values = None


@public.add()
@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values, which becomes a sparse tensor."""

    dtype: DTypeLike


@public.add()
@dataclass(frozen=True)
class FixedLenSequenceFeature:
    """A feature with any number of values of one shape, which becomes a dense tensor.

    Attributes:
        shape: of one value.
        dtype: tf.string, tf.float32 or tf.int64.
        allow_missing: an example, or a sequence, without the feature has no values.
        default_value: the filler of the shorter rows of a batch.
    """

    shape: Sizes
    dtype: DTypeLike
    allow_missing: bool = False
    default_value: Values = None


Spec = FixedLenFeature | VarLenFeature | FixedLenSequenceFeature


def _shape_sizes(shape: Sizes) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)


def _feature_values(feature: pb.Feature | None, dtype: DType, key: str) -> Array | None:
    """Returns the values of a key in an example; None where the example lacks the key."""
    held = feature.WhichOneof("kind") if feature is not None else None
    if feature is None or held is None:
        return None
    wanted = _KINDS[dtype]
    if held != wanted:
        told = (
            f"Data types don't match. Data type: {_SHOWN[held]} but expected type: {_SHOWN[wanted]}"
        )
        raise rt.InvalidArgumentError(f"Key: {key}.  {told}")
    values = getattr(feature, wanted).value
    return strings(values) if dtype.hasobject else np.array(values, dtype)


def _of_shape(key: str, values: Array, shape: tuple[int, ...]) -> Array:
    if values.size != int(np.prod(shape)):
        raise rt.InvalidArgumentError(
            f"Key: {key}.  Number of {dtype_name(values.dtype)} values != expected.  Values size: "
            f"{values.size} but "
            f"output shape: {list(shape)}"
        )
    return values.reshape(shape)


def _fixed_values(
    key: str, spec: FixedLenFeature, dtype: DType, feature: pb.Feature | None
) -> Array:
    shape = _shape_sizes(spec.shape)
    values = _feature_values(feature, dtype, key)
    if values is None:
        if spec.default_value is None:
            raise rt.InvalidArgumentError(
                f"Feature: {key} (data type: {dtype_name(dtype)}) is required but could not be "
                "found."
            )
        return _default_values(spec.default_value, dtype).reshape(shape)
    return _of_shape(key, values, shape)


def _default_values(value: Values, dtype: DType) -> Array:
    array = np.asarray(value, object) if dtype.hasobject else np.asarray(value, dtype)
    return strings(array.ravel().tolist(), array.shape) if dtype.hasobject else array


def _sequence_values(
    key: str, spec: FixedLenSequenceFeature, dtype: DType, feature: pb.Feature | None
) -> Array:
    shape = _shape_sizes(spec.shape)
    values = _feature_values(feature, dtype, key)
    if values is None:
        return np.empty((0, *shape), dtype)
    each = int(np.prod(shape))
    if not each or values.size % each:
        raise rt.InvalidArgumentError(
            f"Key: {key}.  {values.size} values are no multiple of the shape {list(shape)}"
        )
    return values.reshape(-1, *shape)


def _parse_message(text: object) -> pb.Example:
    example = pb.Example()
    try:
        example.ParseFromString(text if isinstance(text, bytes) else bytes(str(text), "utf-8"))
    except DecodeError:
        raise rt.InvalidArgumentError(
            "Could not parse example input, value: not a tf.train.Example"
        ) from None
    return example


def _parse_batch(
    features: Mapping[str, Spec],
    kinds: Mapping[str, DType],
    examples: Sequence[Mapping[str, pb.Feature]],
) -> list[object]:
    found: list[object] = []
    for key, spec in sorted(features.items()):
        kind = kinds[key]
        given = [example.get(key) for example in examples]
        if isinstance(spec, FixedLenFeature):
            rows = [_fixed_values(key, spec, kind, feature) for feature in given]
            found.append(np.stack(rows) if rows else np.empty((0, *_shape_sizes(spec.shape)), kind))
        elif isinstance(spec, VarLenFeature):
            none = np.empty(0, kind)
            held = [_feature_values(feature, kind, key) for feature in given]
            found += matrix_of_rows([none if row is None else row for row in held], kind)
        else:
            sequences = [_sequence_values(key, spec, kind, feature) for feature in given]
            shape = TensorShape([None, *_shape_sizes(spec.shape)])
            empty = np.empty((0, 0, *_shape_sizes(spec.shape)), kind)
            found.append(
                padded_batch(sequences, shape, spec.default_value, kind) if sequences else empty
            )
    return found


def _output_specs(
    features: Mapping[str, Spec], kinds: Mapping[str, DType], batch: tuple[int | None, ...]
) -> list[tuple[tuple[int | None, ...], DType]]:
    out: list[tuple[tuple[int | None, ...], DType]] = []
    rank = 1 + len(batch)
    for key, spec in sorted(features.items()):
        if isinstance(spec, VarLenFeature):
            integer = np.dtype(np.int64)
            out += [((None, rank), integer), ((None,), kinds[key]), ((rank,), integer)]
        elif isinstance(spec, FixedLenFeature):
            out.append(((*batch, *_shape_sizes(spec.shape)), kinds[key]))
        else:
            out.append(((*batch, None, *_shape_sizes(spec.shape)), kinds[key]))
    return out


def _by_key(features: Mapping[str, Spec], tensors: Sequence[rt.Tensor]) -> Parsed:
    """Returns the tensors by key; three tensors make a sparse one."""
    left = iter(tensors)
    named = {
        key: SparseTensor(next(left), next(left), next(left))
        if isinstance(spec, VarLenFeature)
        else next(left)
        for key, spec in sorted(features.items())
    }
    assert next(left, None) is None, "every tensor belongs to a key"
    return named


def _check_features(features: Mapping[str, Spec]) -> dict[str, DType]:
    if not features:
        raise ValueError("Missing: features was {}.")
    for key, spec in features.items():
        if not isinstance(spec, Spec):
            raise ValueError(f"Invalid feature {key}:{spec}.")
        if isinstance(spec, FixedLenFeature) and spec.default_value is not None:
            shape, values = _shape_sizes(spec.shape), np.size(spec.default_value)
            if values != int(np.prod(shape)):
                raise ValueError(
                    f"Feature {key}: {values} default values do not fit the shape {list(shape)}"
                )
    return {key: _feature_dtype(spec.dtype, key) for key, spec in features.items()}


@public.add()
def parse_example(
    serialized: rt.TensorLike,
    features: Mapping[str, Spec],
    name: str | None = None,
    example_names: object = None,
) -> Parsed:
    """Parses a vector of serialized examples.

    Args:
        serialized: strings, [n].
        features: what they hold: ``FixedLenFeature``, ``VarLenFeature``,
            ``FixedLenSequenceFeature`` by key.
        name: operation name.
        example_names: not used.

    Returns:
        By key [n, ...]; a ``SparseTensor`` for a feature of variable length.

    Raises:
        InvalidArgumentError: in the step, an example lacks a feature or has another dtype or size.
    """
    kinds, texts = _check_features(features), convert_to_tensor(serialized)
    size = texts.shape[0] if texts.shape else None

    def parse(given: Array) -> list[object]:
        return _parse_batch(
            features, kinds, [_parse_message(text).features.feature for text in given.ravel()]
        )

    outputs = _output_specs(features, kinds, (size,))
    return _by_key(features, host_ops(parse, [texts], outputs, name, "ParseExample"))


@public.add()
def parse_single_example(
    serialized: rt.TensorLike,
    features: Mapping[str, Spec],
    name: str | None = None,
    example_names: object = None,
) -> Parsed:
    """Parses one example as ``parse_example`` does; the tensors have no first dimension."""
    kinds = _check_features(features)

    def parse(given: Array) -> list[object]:
        return _parse_one(features, kinds, _parse_message(given.item()).features.feature)

    outputs = _output_specs(features, kinds, ())
    return _by_key(features, host_ops(parse, [serialized], outputs, name, "ParseSingleExample"))


def _parse_one(
    features: Mapping[str, Spec], kinds: Mapping[str, DType], held: Mapping[str, pb.Feature]
) -> list[object]:
    found: list[object] = []
    for key, spec in sorted(features.items()):
        kind, feature = kinds[key], held.get(key)
        if isinstance(spec, FixedLenFeature):
            found.append(_fixed_values(key, spec, kind, feature))
        elif isinstance(spec, VarLenFeature):
            values = _feature_values(feature, kind, key)
            values = np.empty(0, kind) if values is None else values
            found += [
                np.arange(len(values), dtype=np.int64)[:, None],
                values,
                np.array([len(values)], np.int64),
            ]
        else:
            found.append(_sequence_values(key, spec, kind, feature))
    return found


@public.add()
def parse_single_sequence_example(
    serialized: rt.TensorLike,
    context_features: Mapping[str, Spec] | None = None,
    sequence_features: Mapping[str, Spec] | None = None,
    example_name: object = None,
    name: str | None = None,
) -> tuple[Parsed, Parsed]:
    """Parses one serialized ``SequenceExample``.

    Args:
        serialized: a string.
        context_features: the features of the whole example.
        sequence_features: the features over time: ``FixedLenSequenceFeature`` or ``VarLenFeature``.
        example_name: not used.
        name: operation name.

    Returns:
        The context and the sequences, [time, ...], by key.
    """
    context, sequences = dict(context_features or {}), dict(sequence_features or {})
    if not context and not sequences:
        raise ValueError("Missing features.")
    kinds = {**_check_features(context or sequences), **_check_features(sequences or context)}

    def parse(given: Array) -> list[object]:
        example = pb.SequenceExample()
        try:
            example.ParseFromString(given.item())
        except DecodeError:
            raise rt.InvalidArgumentError(
                "Invalid protocol message input: not a tf.train.SequenceExample"
            ) from None
        found = _parse_one(context, kinds, example.context.feature)
        for key, spec in sorted(sequences.items()):
            found += _over_time(key, spec, kinds[key], example.feature_lists.feature_list)
        return found

    outputs = _output_specs(context, kinds, ())
    for key, spec in sorted(sequences.items()):
        outputs += _output_specs(
            {key: spec}, kinds, (None,) if isinstance(spec, VarLenFeature) else ()
        )
    tensors = host_ops(parse, [serialized], outputs, name, "ParseSingleSequenceExample")
    middle = sum(3 if isinstance(spec, VarLenFeature) else 1 for spec in context.values())
    return _by_key(context, tensors[:middle]), _by_key(sequences, tensors[middle:])


def _over_time(
    key: str, spec: Spec, kind: DType, held: Mapping[str, pb.FeatureList]
) -> list[object]:
    steps = (
        [_feature_values(feature, kind, key) for feature in held[key].feature]
        if key in held
        else None
    )
    rows = [np.empty(0, kind) if row is None else row for row in steps or ()]
    if isinstance(spec, VarLenFeature):
        return list(matrix_of_rows(rows, kind))
    if steps is None and not getattr(spec, "allow_missing", False):
        raise rt.InvalidArgumentError(f"Feature list '{key}' is required but could not be found.")
    shape = _shape_sizes(spec.shape)
    return [
        np.stack([_of_shape(key, row, shape) for row in rows])
        if rows
        else np.empty((0, *shape), kind)
    ]
