"""What a tensor looks like from outside: its shape, its dtype and its memory, and which dtypes there are."""

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
"""A numpy array; or a JAX array, which may be on any device and may still be being computed."""
DType: TypeAlias = np.dtype[Any]
"""A numpy dtype; which one is known when the program runs."""

ALIGNMENT: Final = 64
"""Bytes. XLA reads an array in place that starts at a multiple of this, and copies another first."""
STRING: Final[DType] = np.dtype(object)
"""The dtype of string tensors: numpy object arrays whose elements are `bytes`."""

_STRING_NAME: Final = "string"


def _numeric_dtypes() -> Mapping[str, DType]:
    builtin = [np.dtype(code) for code in "?bhiqBHIQefdFD"]
    extended = [getattr(ml_dtypes, name) for name in sorted(dir(ml_dtypes))]
    types = [t for t in extended if isinstance(t, type) and issubclass(t, np.generic)]
    return MappingProxyType({d.name: d for d in [*builtin, *map(np.dtype, types)]})


NUMERIC_DTYPES: Final = _numeric_dtypes()
"""Every dtype whose elements are plain bytes, by name: numpy's booleans and numbers, and all of ml_dtypes."""


def canonical_dtype(dtype: Any) -> DType:
    """Gives the one dtype object, in native byte order, that tensors of this dtype carry.

    Args:
        dtype: anything that `numpy.dtype` understands, or a name that `dtype_name` gives ("bfloat16", "string").

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
        raise InvalidArgumentError(f"dtype {found} is not a tensor dtype; make it an object array of bytes")
    known = NUMERIC_DTYPES.get(found.name)
    if known is None or known.itemsize != found.itemsize:
        raise InvalidArgumentError(f"dtype {found} is not a tensor dtype; use one of numpy's numbers or of ml_dtypes")
    return known


def dtype_name(dtype: DType) -> str:
    """Name of a dtype: "float32", "bfloat16", ..., or "string"; ``canonical_dtype`` gives the dtype of the name."""
    return _STRING_NAME if dtype.hasobject else str(dtype.name)


def shape_fits(shape: Sequence[int | None], wanted: Sequence[int | None]) -> bool:
    """Whether an array of one shape may be one of the other; None stands for any size."""
    if len(shape) != len(wanted):
        return False
    for a, b in zip(shape, wanted, strict=True):  # a loop costs a step less than a generator
        if a != b and a is not None and b is not None:
            return False
    return True


def aligned_buffer(nbytes: int) -> Array:
    """A fresh uint8 array [nbytes] whose memory starts at a multiple of 64; its contents are arbitrary."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def aligned(shape: tuple[int, ...], dtype: DType) -> Array:
    """Memory for an array of numbers that XLA takes without a copy; its contents are arbitrary."""
    return aligned_buffer(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The static shape and the dtype of a tensor.

    Attributes:
        shape: the length of every dimension; `()` is a scalar.
        dtype: one of `NUMERIC_DTYPES`, or `STRING` for arrays of bytes.
    """

    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        """Checks the shape and brings the dtype to its canonical form.

        Raises:
            InvalidArgumentError: a dimension is negative or not an integer, or the dtype is unknown.
        """
        try:
            shape = tuple(int(n.__index__()) for n in self.shape)
        except (AttributeError, TypeError) as error:
            raise InvalidArgumentError(f"shape {self.shape!r} is not a tuple of integers") from error
        if any(n < 0 for n in shape):
            raise InvalidArgumentError(f"shape {shape} has a negative dimension")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))

    @classmethod
    def of(cls, array: Any) -> "TensorSpec":
        """The spec of anything that has `.shape` and `.dtype`, such as a numpy or JAX array."""
        return cls(tuple(array.shape), array.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_string(self) -> bool:
        """Whether the elements are byte strings, which have no fixed size."""
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
        """The short form that messages use, such as "float32[2,3]"."""
        return f"{self.name}[{','.join(map(str, self.shape))}]"
