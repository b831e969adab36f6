"""Tensors from outside: shape, dtype and memory, and the table of dtypes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from runtime.errors import InvalidArgumentError

if TYPE_CHECKING:
    import jax

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of any shape and dtype."""
AnyArray: TypeAlias = "Array | jax.Array"
"""A numpy array, or a JAX array on any device, whose computation may still be under way."""
DType: TypeAlias = np.dtype[Any]
"""A numpy dtype, known when the program runs."""

ALIGNMENT = 64
"""Bytes.

XLA reads an array in place if its memory starts at a multiple, and copies any other array.
"""
STRING: Final[DType] = np.dtype(object)
"""The dtype of string tensors: numpy object arrays of `bytes`."""

_STRING_NAME = "string"


def _numeric_dtypes() -> Mapping[str, DType]:
    builtin = [np.dtype(code) for code in "?bhiqBHIQefdFD"]
    extended = [getattr(ml_dtypes, name) for name in sorted(dir(ml_dtypes))]
    types = [t for t in extended if isinstance(t, type) and issubclass(t, np.generic)]
    return MappingProxyType({d.name: d for d in [*builtin, *map(np.dtype, types)]})


NUMERIC_DTYPES = _numeric_dtypes()
"""Every dtype with elements of plain bytes, by name: numpy's booleans and numbers, and all of ml_dtypes."""


def canonical_dtype(dtype: Any) -> DType:
    """Returns the dtype object of tensors of a dtype, in native byte order.

    Args:
        dtype: any argument of `numpy.dtype`, or a result of `dtype_name` ("bfloat16", "string").

    Raises:
        InvalidArgumentError: tensors cannot have this dtype.
    """
    if isinstance(dtype, str) and dtype in NUMERIC_DTYPES:
        return NUMERIC_DTYPES[dtype]
    if isinstance(dtype, str) and dtype == _STRING_NAME:
        return STRING
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise InvalidArgumentError(f"{dtype!r} is not a dtype") from error
    if found == STRING:
        return STRING
    if found.kind in "SU":
        raise InvalidArgumentError(
            f"dtype {found} is not a tensor dtype; make it an object array of bytes"
        )
    known = NUMERIC_DTYPES.get(found.name)
    if known is None or known.itemsize != found.itemsize:
        raise InvalidArgumentError(
            f"dtype {found} is not a tensor dtype; use one of numpy's numbers or of ml_dtypes"
        )
    return known


def dtype_name(dtype: DType) -> str:
    """Returns the name of a dtype: "float32", "bfloat16", ..., or "string". ``canonical_dtype`` reads the name."""
    return _STRING_NAME if dtype.hasobject else str(dtype.name)


def shape_fits(shape: Sequence[int | None], wanted: Sequence[int | None]) -> bool:
    """Returns True if an array of a shape suits a wanted shape. None stands for any size."""
    if len(shape) != len(wanted):
        return False
    # Each step checks its feeds, and a loop takes less time than a generator.
    for a, b in zip(shape, wanted, strict=True):
        if a != b and a is not None and b is not None:
            return False
    return True


def aligned_buffer(nbytes: int) -> Array:
    """Returns a new uint8 array [nbytes] whose memory starts at a multiple of 64.

    The contents are arbitrary.
    """
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def aligned(shape: tuple[int, ...], dtype: DType) -> Array:
    """Returns a new array of numbers that XLA reads without a copy. The contents are arbitrary."""
    return aligned_buffer(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The static shape and the dtype of a tensor.

    Attributes:
        shape: the length of every dimension; `()` for a scalar.
        dtype: one of `NUMERIC_DTYPES`, or `STRING` for arrays of bytes.
    """

    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        """Checks the shape, and replaces the dtype by its canonical form.

        Raises:
            InvalidArgumentError: a dimension is negative or not an integer, or the dtype is
                unknown.
        """
        try:
            shape = tuple(int(n.__index__()) for n in self.shape)
        except (AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"shape {self.shape!r} is not a tuple of integers"
            ) from error
        if any(n < 0 for n in shape):
            raise InvalidArgumentError(f"shape {shape} has a negative dimension")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))

    @classmethod
    def of(cls, array: Any) -> "TensorSpec":
        """Returns the spec of an object with `.shape` and `.dtype`, such as a numpy or JAX array."""
        return cls(tuple(array.shape), array.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_string(self) -> bool:
        """True for byte strings, which have no fixed size."""
        return self.dtype is STRING

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes.

        Raises:
            InvalidArgumentError: a string tensor, whose size depends on its value.
        """
        if self.is_string:
            raise InvalidArgumentError("a string tensor has no fixed size in bytes")
        return self.size * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Name of the dtype: "float32", "bfloat16", ..., or "string"."""
        return dtype_name(self.dtype)

    def __str__(self) -> str:
        """Returns the short form for messages, such as "float32[2,3]"."""
        return f"{self.name}[{','.join(map(str, self.shape))}]"
