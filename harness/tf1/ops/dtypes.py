"""Data types by TensorFlow's names; numpy and JAX take each of them for their own dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt


class DType:
    """A data type of tensors: ``tf.float32``.

    It equals, and hashes like, the numpy dtype that tensors carry as ``.dtype``, and numpy and JAX
    accept it wherever they take a dtype.

    Attributes:
        name: such as "float32"; "string" for strings.
        dtype: the numpy dtype; ``object`` for strings.
    """

    __slots__ = ("name", "dtype")

    def __init__(self, name: str, dtype: DTypeLike) -> None:
        self.name = name
        self.dtype: rt.lowlevel.DType = np.dtype(dtype)

    @property
    def as_numpy_dtype(self) -> type[Any]:
        """The scalar type: ``numpy.float32``."""
        return self.dtype.type

    @property
    def base_dtype(self) -> DType:
        """Itself: there are no reference types here."""
        return self

    @property
    def real_dtype(self) -> DType:
        """The dtype of the real part."""
        return as_dtype(np.empty((), self.dtype).real.dtype) if self.is_complex else self

    @property
    def is_floating(self) -> bool:
        """True for a real floating point type."""
        return bool(jnp.issubdtype(self.dtype, np.floating))

    @property
    def is_complex(self) -> bool:
        """True for a complex type."""
        return self.dtype.kind == "c"

    @property
    def is_integer(self) -> bool:
        """True for an integer type (bool is none)."""
        return self.dtype.kind in "iu"

    @property
    def is_unsigned(self) -> bool:
        """True for an unsigned integer type."""
        return self.dtype.kind == "u"

    @property
    def is_bool(self) -> bool:
        """True for bool."""
        return self.dtype.kind == "b"

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def min(self) -> Any:
        """The smallest finite value. Raises TypeError for a type without one."""
        return _limits(self).min

    @property
    def max(self) -> Any:
        """The largest finite value. Raises TypeError for a type without one."""
        return _limits(self).max

    def is_compatible_with(self, other: object) -> bool:
        """Returns True if a value of ``other`` can be used as this type without a cast."""
        return bool(self == other)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DType):
            return self.dtype == other.dtype
        if other is None:
            return False
        try:
            # A dtype equals its name and its numpy type, as in TensorFlow.
            return bool(self.dtype == as_dtype(other).dtype)
        except TypeError:
            return False

    def __hash__(self) -> int:
        return hash(self.dtype)

    def __repr__(self) -> str:
        return f"tf.{self.name}"


def _limits(dtype: DType) -> Any:
    if dtype.is_integer:
        return np.iinfo(dtype.dtype)
    if dtype.is_floating:
        return jnp.finfo(dtype.dtype)  # type: ignore[no-untyped-call]
    raise TypeError(f"{dtype!r} has no smallest and largest value")


DTYPES = {
    name: DType(name, name) for width in (8, 16, 32, 64) for name in (f"int{width}", f"uint{width}")
}
DTYPES |= {name: DType(name, name) for name in ("float16", "float32", "float64", "bool")}
DTYPES |= {name: DType(name, name) for name in ("complex64", "complex128")}
DTYPES |= {"bfloat16": DType("bfloat16", jnp.bfloat16), "string": DType("string", object)}
"""TensorFlow's name -> the dtype."""
for _alias, _name in {"half": "float16", "double": "float64"}.items():
    DTYPES[_alias] = DTYPES[_name]
_BY_NUMPY = {dtype.dtype: dtype for dtype in DTYPES.values()}
_BY_NAME = {**DTYPES, "float": DTYPES["float32"]}
_BY_PYTHON_TYPE: dict[type, str] = {
    float: "float32",  # numpy has 64 bits here, TensorFlow has not
    bool: "bool",
    str: "string",
    bytes: "string",
    object: "string",
}


def as_dtype(type_value: Any) -> DType:
    """Returns the data type that ``type_value`` names, by TensorFlow's rules: "float" and ``float`` are float32.

    Raises TypeError for no dtype, or one that no tensor can have.
    """
    if isinstance(type_value, DType):
        return type_value
    if isinstance(type_value, str):
        # Old programs name reference types, which are the types of the values here.
        found = _BY_NAME.get(type_value.removesuffix("_ref"))
    elif isinstance(type_value, type) and type_value in _BY_PYTHON_TYPE:
        found = DTYPES[_BY_PYTHON_TYPE[type_value]]
    else:
        found = _of_numpy(type_value)
    if found is None:
        plain = type_value is int or type_value is complex
        widths = "; give one with a width, such as tf.int32 or tf.complex64" if plain else ""
        raise TypeError(f"{type_value!r} is not a data type of tensors{widths}")
    return found


def _of_numpy(type_value: Any) -> DType | None:
    if type_value is None or type_value is int or type_value is complex:
        return None  # numpy has widths for these, TensorFlow has none
    try:
        dtype = np.dtype(type_value)
    except TypeError:
        return None
    return DTYPES["string"] if dtype.kind in "SU" else _BY_NUMPY.get(dtype)


def _is_mixed(value: Any) -> bool:
    """Returns True if a list holds strings and other things: numpy would write the numbers down."""
    if isinstance(value, list | tuple):
        return any(map(_is_mixed, value))
    return not isinstance(value, str | bytes | np.ndarray | np.generic)


def to_array(
    value: rt.TensorLike, dtype: DTypeLike | None = None, what: str = "value"
) -> rt.lowlevel.Array:
    """Converts ``value`` to an array by TensorFlow's rules.

    A numpy array or scalar keeps its dtype. Python numbers, and lists of them, become int32 (int64
    when one does not fit), float32, complex128 or bool. Strings become an object array of bytes.
    Raises TypeError for strings mixed with numbers, and for fractions given for an integer type.
    """
    plain = not isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise rt.InvalidArgumentError(f"{what}: cannot be made an array: {error}") from None
    if array.dtype.kind in "SUO":
        _check_text(value, array, plain, what)
        if dtype is not None and as_dtype(dtype) != DTYPES["string"]:
            raise TypeError(f"{what}: {value!r} is not {as_dtype(dtype).name}")
        # numpy's own string kinds drop zero bytes at the end
        return np.asarray(value, object) if plain else array
    if dtype is not None:
        wanted = as_dtype(dtype)
        if wanted.dtype.hasobject or plain and array.size and _loses(array.dtype, wanted):
            raise TypeError(f"{what}: {array.dtype.name} given where {wanted.name} is wanted")
        return array.astype(wanted.dtype, copy=False)
    return _narrow(array) if plain else array


def _narrow(array: rt.lowlevel.Array) -> rt.lowlevel.Array:
    """Returns Python numbers as TensorFlow takes them: floats as float32, ints that fit as int32."""
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype != np.int64:
        return array
    limits = np.iinfo(np.int32)
    fits = limits.min <= array.min(initial=0) and array.max(initial=0) <= limits.max
    return array.astype(np.int32) if fits else array


def _check_text(value: object, array: rt.lowlevel.Array, plain: bool, what: str) -> None:
    """Raises an error unless all elements are strings or bytes."""
    if value is None:
        raise ValueError(f"{what}: None is no value")
    others = array.dtype == object and any(not isinstance(v, str | bytes) for v in array.ravel())
    if others or plain and isinstance(value, list | tuple) and _is_mixed(value):
        raise TypeError(f"{what}: {value!r} is neither numbers that fit 64 bits nor strings")


def _loses(dtype: rt.lowlevel.DType, wanted: DType) -> bool:
    """Returns True if Python numbers would be cut to fit; an array of numpy's is cast as TensorFlow casts it."""
    fraction = wanted.is_integer and dtype.kind in "fc"
    return fraction or wanted.is_bool and dtype.kind != "b"
