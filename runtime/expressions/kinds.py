"""Kinds of attributes: the writing of a primitive's parameter into an expression list, and the reading."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.proto import expressions_pb2 as pb
from runtime.tensor_spec import DType, canonical_dtype, dtype_name

Parameter: TypeAlias = Any
"""A parameter of a primitive: of whatever type JAX gives it; what is sent of it, too."""

RANK = 64
"""The most dimensions of a value: those of numpy."""
LARGEST = (1 << 31) - 1
"""The largest integer; a dimension may be larger."""
LARGEST_DIMENSION = 1 << 62
"""The largest dimension."""
PARTS = 1 << 12
"""The most pieces of one split of an array."""
WORD = 64
"""How many characters a word may have."""


@dataclass(frozen=True)
class AttributeKind:
    """A kind of attribute.

    Attributes:
        field: the field of ``AttributeDef`` that holds the attribute.
        write: converts a parameter to the value that is sent.
        read: converts a received value to a parameter; raises ValueError for a value that is not
            allowed.
        optional: True if the parameter may be None. None is not sent.
        operations: the operations that computations of the attribute may hold; None if they may
            hold any.
    """

    field: str
    write: Callable[[Parameter], Parameter]
    read: Callable[[Parameter], Parameter]
    optional: bool = False
    operations: frozenset[str] | None = None

    def __post_init__(self) -> None:
        assert self.field in pb.AttributeDef.DESCRIPTOR.fields_by_name

    def problem(self, computation: pb.ComputationDef) -> str | None:
        """Says why a computation may not be one of this attribute's.

        Returns None if it may.
        """
        for equation in computation.equations:
            if self.operations is not None and equation.operation not in self.operations:
                return (
                    f"{equation.operation[:WORD]!r} is no operation by which elements are combined"
                )
        return None


def is_narrow(dtype: DType) -> bool:
    """Returns True if elements have less than a byte.

    XLA ends the process at some constants of such dtypes, JAX's own too.
    """
    return not (
        dtype.kind == "b"
        or dtype.itemsize > 1
        or dtype.name in ("int8", "uint8")
        or dtype.name.startswith("float8")
    )


def is_unknown_to_xla(dtype: DType) -> bool:
    """Returns True if XLA has no such elements.

    XLA refuses most programs with such elements, and ends the process at some. JAX takes elements
    of one bit for truth values, which are stored in another way: no such program runs.
    """
    return dtype.name.startswith("float6_") or dtype.name in ("int1", "uint1")


def _check_range(value: Parameter, low: int, high: int) -> int:
    # A float has no ``__index__``: its digits would be lost without an error.
    number = int(value.__index__())
    if not low <= number <= high:
        raise ValueError(f"{number} is not between {low:,} and {high:,}")
    return number


def integer(low: int = -LARGEST, high: int = LARGEST) -> AttributeKind:
    """Makes the kind of an integer in a range."""
    return AttributeKind(
        "integer",
        lambda value: _check_range(value, low, high),
        lambda value: _check_range(value, low, high),
    )


def integers(low: int = -LARGEST, high: int = LARGEST, count: int = RANK) -> AttributeKind:
    """Makes the kind of a row of integers in a range, a tuple."""

    def checked(values: Sequence[Parameter]) -> tuple[int, ...]:
        # The length comes first, because the row of a stranger may hold millions of numbers.
        if len(values) > count:
            raise ValueError(f"{len(values):,} numbers, {count:,} are allowed")
        return tuple(_check_range(value, low, high) for value in values)

    return AttributeKind("integers", checked, checked)


def rows(width: int) -> AttributeKind:
    """Makes the kind of rows of integers, each of the same width.

    Example: ``((low, high), (low, high))``.
    """
    flat = integers(count=RANK * width)

    def read(values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        numbers = flat.read(values)
        # A row that is cut off would shift the rows behind.
        if len(numbers) % width:
            raise ValueError(f"{len(numbers)} numbers do not make rows of {width}")
        return tuple(numbers[i : i + width] for i in range(0, len(numbers), width))

    return AttributeKind(
        "integers", lambda value: flat.write([n for row in value for n in row]), read
    )


def groups(
    count: int,
    make: Callable[..., Parameter],
    take: Callable[[Parameter], Sequence[Sequence[int]]] = lambda value: value,
) -> AttributeKind:
    """Makes the kind of several rows of axes of any length.

    Each row has its length before it. Such are the dimension numbers of an operation.

    Args:
        count: how many rows.
        make: makes the parameter of the rows.
        take: gives the rows of the parameter.
    """
    axes = integers(0, RANK, count * (RANK + 1))

    def read(values: Sequence[int]) -> Parameter:
        numbers, found, at = axes.read(values), [], 0
        while at < len(numbers):
            length = numbers[at]
            found.append(numbers[at + 1 : at + 1 + length])
            at += 1 + length
        # A length that is too large has moved the place behind the end.
        if len(found) != count or at != len(numbers):
            raise ValueError(f"its numbers do not make {count} rows")
        return make(*found)

    return AttributeKind(
        "integers",
        lambda value: axes.write([n for row in take(value) for n in (len(row), *row)]),
        read,
    )


def one_of(choices: Mapping[str, Parameter], name: Callable[[Parameter], str]) -> AttributeKind:
    """Makes the kind of a word that is one of a few.

    Args:
        choices: what each word stands for.
        name: the word for a parameter.
    """

    def read(word: str) -> Parameter:
        if word not in choices:
            raise ValueError(f"{word[:WORD]!r} is none of {', '.join(choices)}")
        return choices[word]

    def write(value: Parameter) -> str:
        # A word that the task would refuse is not sent.
        word = name(value)
        read(word)
        return word

    return AttributeKind("word", write, read)


def member_of(members: type[enum.Enum], leaving_out: frozenset[str] = frozenset()) -> AttributeKind:
    """Makes the kind of a member of an enumeration, by its name."""
    # A member that is left out is unknown to the reader and to the writer.
    known = {
        name: member for name, member in members.__members__.items() if name not in leaving_out
    }
    return one_of(known, lambda value: str(value.name))


def _read_dtype(word: str) -> Parameter:
    try:
        # The word comes back in an error, and may be as long as a message.
        found = canonical_dtype(word[:WORD])
    except InvalidArgumentError as error:
        raise ValueError(error.message) from None
    # XLA has no strings.
    if found.hasobject:
        raise ValueError("strings cannot be computed with")
    if is_unknown_to_xla(found):
        raise ValueError(f"{found} cannot be computed with")
    return found


def _fill_word(value: Parameter) -> str:
    value = np.asarray(value)[()]
    if isinstance(value, np.bool_ | np.integer):
        return str(int(value))
    if isinstance(value, np.complexfloating):
        # Hexadecimal digits keep all bits of a float.
        return f"{float(value.real).hex()} {float(value.imag).hex()}"
    return float(value).hex()


def _fill_value(word: str) -> Parameter:
    if len(word) > WORD:
        raise ValueError("it is too long")
    try:
        # An integer of 64 bits does not fit a float, so integers are tried first.
        return _check_range(int(word), -(1 << 63), (1 << 64) - 1)
    except ValueError:
        parts = [float.fromhex(part) for part in word.split(" ", 1)]
        return parts[0] if len(parts) == 1 else complex(*parts)


def _one_computation(values: Sequence[Parameter]) -> Parameter:
    # A loop or a reduction has one body, and only a condition has several.
    if len(values) != 1:
        raise ValueError(f"{len(values)} computations where one computation is needed")
    return values[0]


def _check_flag(value: Parameter) -> bool:
    # Truth of another value would be a guess: every text that is not empty is true.
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{value!r} is neither true nor false")
    return bool(value)


AXIS = integer(-RANK, RANK)
"""One dimension of an array."""
AXES = integers(-RANK, RANK)
"""Dimensions of an array."""
SHAPE = integers(0, LARGEST_DIMENSION)
"""The shape of an array."""
FLAG = AttributeKind("flag", _check_flag, _check_flag)
"""True or false."""
NUMBER = AttributeKind("number", float, float)
"""A number that is not of an array."""
DTYPE = AttributeKind("word", lambda value: dtype_name(canonical_dtype(value)), _read_dtype)
"""The dtype of an array of numbers."""
FILL = AttributeKind("word", _fill_word, _fill_value)
"""A number as what is missing in an array; the two parts of a complex number are two words."""
COMPUTATION = AttributeKind("computations", lambda value: (value,), _one_computation)
"""A computation inside an operation. What is written and read are jaxprs and ``Computation``s."""
COMPUTATIONS = AttributeKind("computations", tuple, tuple)
"""Several computations."""
