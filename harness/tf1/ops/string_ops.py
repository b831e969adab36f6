"""Text and bytes become tensors, and tensors text, on the host: ``tf.decode_raw``, ``decode_csv``, ``string_split``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.fingerprints import fingerprint64
from harness.tf1.ops.lift import Public
from harness.tf1.ops.python_ops import each_string, host_op, host_ops, strings
from harness.tf1.ops.sparse import SparseTensor, matrix_of_rows
from harness.tf1.ops.value_ops import convert_to_tensor
from runtime.lowlevel import Array, DType, dtype_name

public = Public("tf", "Examples, text and sparse tensors")

Values = Any
"""A number, a string, or lists of them."""


@public.add()
def decode_raw(
    bytes: rt.TensorLike, out_type: DTypeLike, little_endian: bool = True, name: str | None = None
) -> rt.Tensor:
    """Decodes the numbers that strings of bytes hold, in a last dimension of unknown size."""
    dtype = as_dtype(out_type).dtype
    texts = convert_to_tensor(bytes)
    order = dtype.newbyteorder("<" if little_endian else ">")

    def decode(given: Array) -> Array:
        # One row of numbers for each string needs strings of one length.
        sizes = {len(text) for text in given.ravel()}
        if len(sizes) > 1:
            raise rt.InvalidArgumentError(
                f"DecodeRaw requires input strings to all be the same size: {sorted(sizes)}"
            )
        size = sizes.pop() if sizes else 0
        if size % dtype.itemsize:
            raise rt.InvalidArgumentError(
                f"Input to DecodeRaw has length {size} that is not a multiple of {dtype.itemsize}, "
                f"the size of {dtype_name(dtype)}"
            )
        numbers = np.frombuffer(b"".join(given.ravel()), order).astype(dtype)
        return numbers.reshape(*given.shape, size // dtype.itemsize)

    shape = None if texts.shape is None else (*texts.shape, None)
    return host_op(decode, [texts], shape, dtype, name, "DecodeRaw")


def _field(text: str, default: Array, dtype: DType, place: int, na_value: str) -> object:
    if text == na_value or not text:
        if not default.size:
            raise rt.InvalidArgumentError(f"Field {place} is required but missing in record!")
        return default.ravel()[0]
    if dtype.hasobject:
        return text.encode("utf-8", "surrogateescape")
    return _number(text, dtype, f"Field {place} in record is not a valid {dtype.name}")


def _number(text: str | bytes, dtype: DType, wrong: str) -> object:
    try:
        return dtype.type(int(text) if dtype.kind in "iu" else float(text))
    except (ValueError, OverflowError):
        told = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise rt.InvalidArgumentError(f"{wrong}: {told}") from None


def _default_of_column(default: Values) -> tuple[Array, DType]:
    tensor = convert_to_tensor(default)
    value = getattr(tensor.op.body, "value", None)
    if value is None:
        raise ValueError("decode_csv: record_defaults must be known when the graph is built")
    flat = value.ravel()
    return strings(flat.tolist()) if tensor.dtype.hasobject else flat, tensor.dtype


@public.add()
def decode_csv(
    records: rt.TensorLike,
    record_defaults: Sequence[Values],
    field_delim: str = ",",
    use_quote_delim: bool = True,
    name: str | None = None,
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
) -> list[rt.Tensor]:
    """Decodes the columns of lines of text."""
    lines = convert_to_tensor(records)
    defaults = [_default_of_column(each) for each in record_defaults]
    wanted = None if select_cols is None else list(select_cols)
    quoting: Any = csv.QUOTE_MINIMAL if use_quote_delim else csv.QUOTE_NONE

    def decode(given: Array) -> list[object]:
        columns: list[Array] = [np.empty(given.size, dtype) for _, dtype in defaults]
        for row, line in enumerate(given.ravel()):
            # Bytes that are no UTF-8 go through text and back unchanged.
            text = line.decode("utf-8", "surrogateescape")
            fields = next(csv.reader([text], delimiter=field_delim, quoting=quoting), [""])
            if wanted is not None:
                fields = [fields[i] for i in wanted if i < len(fields)]
            if len(fields) != len(defaults):
                raise rt.InvalidArgumentError(
                    f"Expect {len(defaults)} fields but have {len(fields)} in record {row}: {text}"
                )
            for place, (field, (default, dtype)) in enumerate(zip(fields, defaults, strict=True)):
                columns[place][row] = _field(field, default, dtype, place, na_value)
        return [column.reshape(given.shape) for column in columns]

    return list(
        host_ops(decode, [lines], [(lines.shape, d) for _, d in defaults], name, "DecodeCSV")
    )


@public.add()
def string_to_number(
    string_tensor: rt.TensorLike, out_type: DTypeLike = np.float32, name: str | None = None
) -> rt.Tensor:
    """Parses the numbers that are written in strings."""
    texts = convert_to_tensor(string_tensor)
    dtype = as_dtype(out_type).dtype
    wrong = "StringToNumberOp could not correctly convert string"

    def numbers(given: Array) -> Array:
        return each_string(lambda text: _number(text, dtype, wrong), given, dtype)

    return host_op(numbers, [texts], texts.shape, dtype, name, "StringToNumber")


@public.add()
def string_join(
    inputs: Sequence[rt.TensorLike], separator: str = "", name: str | None = None
) -> rt.Tensor:
    """Strings of the same places put together; one alone is put together with each."""
    tensors = [convert_to_tensor(each) for each in inputs]
    between = separator.encode()

    def join(*given: Array) -> Array:
        parts = np.broadcast_arrays(*given) if given else []
        return strings(
            [between.join(each) for each in zip(*(p.ravel() for p in parts), strict=True)],
            parts[0].shape,
        )

    # Scalars are put together with every element of the others.
    shape = next((t.shape for t in tensors if t.shape != ()), ())
    return host_op(join, tensors, shape, object, name, "StringJoin")


@public.add()
def string_split(
    source: rt.TensorLike, delimiter: str = " ", skip_empty: bool = True, name: str | None = None
) -> SparseTensor:
    """Splits [n] strings into words, the rows of a sparse matrix; each character of ``delimiter`` ends a word."""
    marks = delimiter.encode()

    # TensorFlow splits at each character of the delimiter; without any, behind every byte.
    def words(text: bytes) -> Array:
        if not marks:
            return strings([text[i : i + 1] for i in range(len(text))])
        for i in range(1, len(marks)):
            text = text.replace(marks[i : i + 1], marks[:1])
        return strings([word for word in text.split(marks[:1]) if word or not skip_empty])

    def split(given: Array) -> list[object]:
        return list(matrix_of_rows([words(text) for text in given.ravel()], np.dtype(object)))

    outputs = [((None, 2), np.int64), ((None,), object), ((2,), np.int64)]
    return SparseTensor(*host_ops(split, [source], outputs, name, "StringSplit"))


@public.add()
def as_string(
    input: rt.TensorLike,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> rt.Tensor:
    """Numbers written down."""
    tensor = convert_to_tensor(input)
    kind = "d" if tensor.dtype.kind in "iu" else "e" if scientific else "g" if shortest else "f"
    digits = f".{precision}" if precision >= 0 and kind != "d" else ""
    # TensorFlow writes numbers as printf of C does, and so does Python's operator.
    form = f"%{fill}{width if width >= 0 else ''}{digits}{kind}"

    def write(value: Values) -> bytes:
        return (str(bool(value)).lower() if tensor.dtype.kind == "b" else form % value).encode()

    def written(given: Array) -> Array:
        return strings([write(value) for value in given.ravel().tolist()], given.shape)

    return host_op(written, [tensor], tensor.shape, object, name, "AsString")


@public.add()
def string_to_hash_bucket_fast(
    input: rt.TensorLike, num_buckets: int, name: str | None = None
) -> rt.Tensor:
    """Converts each string to a number in [0, ``num_buckets``): the remainder of the string's Fingerprint64."""
    if num_buckets < 1:
        raise ValueError(f"string_to_hash_bucket_fast: num_buckets={num_buckets} must be positive")
    texts = convert_to_tensor(input)

    def hash_each(given: Array) -> Array:
        return each_string(lambda text: fingerprint64(text) % num_buckets, given, np.int64)

    return host_op(hash_each, [texts], texts.shape, np.int64, name, "StringToHashBucketFast")
