"""Reader: an expression list of another process becomes a function of jax.lax, or is refused.

JAX sees nothing of the list before the whole list was read. Operations must be rows of the table,
attributes must be of their kinds, and operands must be earlier values. The cost of the list is
limited as far as the list shows the cost. A list holds no shapes: JAX infers the shapes here, one
equation after the other. Each shape is checked as soon as JAX has inferred the shape.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from google.protobuf.message import DecodeError

from runtime import concurrency
from runtime.errors import InvalidArgumentError, OpError, one_line
from runtime.expressions.kinds import RANK, WORD, AttributeKind, is_narrow, is_unknown_to_xla
from runtime.expressions.table import TABLE, TableRow, Value
from runtime.proto import expressions_pb2 as pb
from runtime.proto import stage_pb2
from runtime.tensor_spec import Array, TensorSpec, canonical_dtype

LIST_BYTES = 48 << 20
"""Bytes of the largest list, with constants.

Large constants are fed, and travel beside the list.
"""
PART = 1 << 10
"""The cost of what XLA compiles at once; a longer list is compiled and run in parts.

A kernel of its own for each equation takes XLA 4 to 9 ms, and a chain of 20,000 equations in one
kernel overflows the stack of a thread.
"""
OPERANDS = 4
"""Number of operands and results that cost as much as an equation."""
SPECIAL = PART
"""The cost of all operations of a list that are each many to XLA: a part of 15 `igamma` takes XLA 6 s, and each part is
compiled. A body that is unrolled counts as often as the body is written out."""
DRAW_COST = 4
"""The highest cost of an operation that is not many to XLA: logarithms and initial values, of which a program may
compute thousands."""
COMPUTATION_COST = 2
"""The cost of a computation inside an operation, beside that of its equations."""
VALUES = 1 << 21
"""Most values of a list."""
LARGE_BYTES = 1 << 20
"""Lists from this size on are read one after the other: reading holds Python's lock for a second or more."""
DEPTH = 20
"""How deep loops and branches may lie in each other: as messages do, four for each, of which protobuf reads 100."""
VALUE_BYTES = 16 << 30
"""Bytes of the largest value. A larger variable is partitioned."""
TRIPS = 1 << 40
"""Most trips of a loop with a known number of trips, times those of the loops around."""
WINDOW_ELEMENTS = 1 << 24
"""Most elements of the window of an operation."""
NUMBER_BYTES = 16
"""Bytes that count for an element that is no number: a random key."""


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """An operation of the table with what it is applied to.

    Attributes:
        name: name of the row.
        row: the row of the table.
        operands: from 0 on values of the computation, below 0 constants.
        attributes: by name; ``Computation``s among them.
        results: number of results.
        cost: cost to trace and to compile, with computations inside; a plain operation costs 1.
        message: the message from which the equation was read.
    """

    name: str
    row: TableRow
    operands: tuple[int, ...]
    attributes: Mapping[str, Value]
    results: int
    cost: int = 1
    message: pb.EquationDef | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Computation:
    """Equations in the order of evaluation, between arguments and results."""

    arguments: int
    equations: tuple[Equation, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExpressionList:
    """An expression list that was read.

    Attributes:
        arguments: shape and dtype of each argument.
        main: the computation.
        constants: the constants of all computations.
        threefry_partitionable: JAX's setting of that name where the list was written.
    """

    arguments: tuple[TensorSpec, ...]
    main: Computation
    constants: tuple[Array, ...]
    threefry_partitionable: bool

    def compute(self, *arguments: Value) -> list[Value]:
        """Computes; to be traced by JAX, within ``jax_settings``.

        Raises:
            InvalidArgumentError: operands and attributes of an equation do not fit, or a value is
                too large.
        """
        return list(_evaluate_computation(self.main, self.constants, arguments))


def read_expressions(data: bytes) -> ExpressionList:
    """Reads an expression list. Nothing is traced.

    Args:
        data: Result of ``write_expressions``, or any bytes.

    Raises:
        InvalidArgumentError: The bytes are no expression list, or break one of the rules above. The
            error says which.
    """
    if len(data) > LIST_BYTES:
        raise InvalidArgumentError(
            f"the program has {len(data):,} bytes, {LIST_BYTES:,} are allowed: feed large constants"
        )
    # A step of another session would wait for Python's lock twice as long if two were read at once.
    with _reading_large if len(data) >= LARGE_BYTES else contextlib.nullcontext():
        return _read_list(data)


_reading_large = concurrency.Lock()


def _read_list(data: bytes) -> ExpressionList:
    try:
        message = pb.ExpressionsDef.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"not a program that this task can read: {one_line(error)}"
        ) from error
    arguments = tuple(_read_spec(spec, "an argument") for spec in message.arguments)
    constants = tuple(_read_constant(c) for c in message.constants)
    reading = _ListReader(len(constants))
    main, _ = reading.computation(message.main, 0, 1, 1)
    if main.arguments != len(arguments):
        raise InvalidArgumentError(
            f"the program takes {main.arguments} arguments and describes {len(arguments)}"
        )
    return ExpressionList(arguments, main, constants, message.threefry_partitionable)


class _ListReader:
    """The reader of the computations of one list, which counts their cost.

    Args:
        constants: Number of constants in the list.
    """

    def __init__(self, constants: int) -> None:
        self._constants = constants
        self._values = 0
        self._special = 0

    def computation(
        self, message: pb.ComputationDef, depth: int, trips: int, copies: int
    ) -> tuple[Computation, int]:
        """Reads a computation; returns the computation with its cost.

        Args:
            message: The computation.
            depth: Number of computations around this one.
            trips: Trips of the loops around, multiplied.
            copies: Number of times that XLA compiles the computation.
        """
        if depth > DEPTH:
            raise InvalidArgumentError(
                f"loops and branches lie more than {DEPTH} deep in each other"
            )
        if trips > TRIPS:
            raise InvalidArgumentError(f"a loop runs more than {TRIPS:,} times")
        values, cost, equations = self._count_values(0, message.arguments), 0, []
        for equation in message.equations:
            made = self._read_equation(equation, values, depth, trips, copies)
            values = self._count_values(values, made.results)
            equations.append(made)
            cost += made.cost
            # Only the main computation can be cut into parts.
            if depth and cost > PART:
                raise InvalidArgumentError(
                    f"a computation inside an operation costs more than {PART:,} equations"
                )
        # A result may be an argument or a constant, which needs no equation.
        results = tuple(self._check_operand(n, values, "a result") for n in message.results)
        self._count_values(0, len(results))
        return Computation(message.arguments, tuple(equations), results), cost

    def _count_values(self, values: int, more: int) -> int:
        # A number of values costs its sender nothing, so the limit comes before the memory.
        self._values += more
        if more < 0 or self._values > VALUES:
            raise InvalidArgumentError(f"the program has more than {VALUES:,} values")
        return values + more

    def _check_operand(self, number: int, values: int, of: str) -> int:
        # A list that refers to earlier values only has no circle.
        if not -self._constants <= number < values:
            raise InvalidArgumentError(
                f"{of} is value {number} of {values} values and {self._constants} constants that "
                "come before"
            )
        return number

    def _read_equation(
        self, message: pb.EquationDef, values: int, depth: int, trips: int, copies: int
    ) -> Equation:
        name = message.operation
        row = TABLE.get(name)
        if row is None:
            raise InvalidArgumentError(
                f"operation {name[:WORD]!r} is not in the table of operations"
            )
        operands = tuple(
            self._check_operand(n, values, f"an operand of {name!r}") for n in message.operands
        )
        given, attributes, inner = _read_attributes(name, row, message)
        # A loop that is unrolled is compiled as often as its body is written out. The trips count
        # through nested loops.
        if math.prod(attributes.get("window_dimensions", ())) > WINDOW_ELEMENTS:
            raise InvalidArgumentError(
                f"the window of {name!r} has more than {WINDOW_ELEMENTS:,} elements"
            )
        times = attributes.get("unroll", 1)
        trips *= max(1, attributes.get("length", 1))
        cost = row.cost + (len(operands) + message.results) // OPERANDS
        if row.cost > DRAW_COST:
            self._special += copies * row.cost
            if self._special > SPECIAL:
                raise InvalidArgumentError(
                    f"operations such as {name!r} cost more than {SPECIAL:,} equations; leave some "
                    "to the client"
                )
        # Computations come last, because their limit of trips needs the length of the loop.
        for key, kind in inner.items():
            _check_computations(name, key, kind, given[key])
            read = [
                self.computation(one, depth + 1, trips, copies * times)
                for one in given[key].computations.values
            ]
            cost += times * sum(COMPUTATION_COST + own for _, own in read)
            try:
                attributes[key] = kind.read([one for one, _ in read])
            except ValueError as error:
                raise InvalidArgumentError(
                    f"attribute {key!r} of {name!r}: {one_line(error)}"
                ) from None
        if cost > PART:
            raise InvalidArgumentError(
                f"operation {name!r} costs as much as {cost:,} equations, {PART:,} are allowed"
            )
        return Equation(name, row, operands, attributes, message.results, cost, message)


def _read_attributes(
    name: str, row: TableRow, message: pb.EquationDef
) -> tuple[dict[str, pb.AttributeDef], dict[str, Value], dict[str, AttributeKind]]:
    """Reads the attributes of an equation.

    Returns:
        The messages of all attributes, the values of those without computations, and the kinds of
        the others.
    """
    # A second attribute of one name would hide the first, so the lengths are compared.
    given = {attribute.name: attribute for attribute in message.attributes}
    if len(given) < len(message.attributes) or not given.keys() <= row.attributes.keys():
        names = ", ".join(attribute.name for attribute in message.attributes)
        raise InvalidArgumentError(
            f"operation {name!r} has no attribute {names[:WORD]!r}, or twice"
        )
    attributes: dict[str, Value] = {}
    inner: dict[str, AttributeKind] = {}
    for key, kind in row.attributes.items():
        if key not in given:
            if not kind.optional:
                raise InvalidArgumentError(f"operation {name!r} needs the attribute {key!r}")
            attributes[key] = None
        elif kind.field == "computations":
            inner[key] = kind
        else:
            attributes[key] = _read_attribute(name, key, kind, given[key])
    return given, attributes, inner


def _check_computations(name: str, key: str, kind: AttributeKind, message: pb.AttributeDef) -> None:
    if message.WhichOneof("value") != "computations" or not message.computations.values:
        raise InvalidArgumentError(f"attribute {key!r} of {name!r} is no computation")
    for one in message.computations.values:
        if problem := kind.problem(one):
            raise InvalidArgumentError(f"attribute {key!r} of {name!r}: {problem}")


def _read_attribute(name: str, key: str, kind: AttributeKind, message: pb.AttributeDef) -> Value:
    # A field that is not set would read as zero.
    if message.WhichOneof("value") != kind.field:
        raise InvalidArgumentError(f"attribute {key!r} of {name!r} is no {kind.field}")
    value = getattr(message, kind.field)
    try:
        return kind.read(value.values if kind.field == "integers" else value)
    except (ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"attribute {key!r} of {name!r}: {one_line(error)}") from None


def _read_spec(message: stage_pb2.TensorSpecDef, of: str) -> TensorSpec:
    spec = TensorSpec(tuple(message.shape), canonical_dtype(message.dtype))
    if spec.is_string:
        raise InvalidArgumentError(f"{of} is of strings, which cannot be computed with")
    if is_unknown_to_xla(spec.dtype):
        raise InvalidArgumentError(f"{of} is of {spec.dtype}, which cannot be computed with")
    _check_value(spec.shape, spec.dtype.itemsize, of)
    return spec


def _read_constant(message: pb.ConstantDef) -> Array:
    spec = _read_spec(message.spec, "a constant")
    if is_narrow(spec.dtype):
        raise InvalidArgumentError(
            f"a constant is of {spec.dtype}, whose elements have less than a byte: convert a wider "
            "one"
        )
    shape, dtype = spec.shape, spec.dtype
    if math.prod(shape) * dtype.itemsize != len(message.data):
        raise InvalidArgumentError(
            f"a constant of {len(message.data):,} bytes is not {dtype}{list(shape)}"
        )
    # Constants are sent in little-endian order, whatever the hosts are.
    array: Array = np.frombuffer(message.data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    # A truth value is a byte of 0 or 1, and XLA does not check that.
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise InvalidArgumentError(f"the bytes of a constant are not of {dtype}")
    return array


def _check_value(shape: Sequence[int], itemsize: int, of: str) -> None:
    if len(shape) > RANK:
        raise InvalidArgumentError(f"{of} has {len(shape)} dimensions, {RANK} are allowed")
    # A dimension of zero does not excuse the others: XLA multiplies some of them alone.
    if math.prod(max(1, n) for n in shape) * itemsize > VALUE_BYTES:
        raise InvalidArgumentError(
            f"{of} is larger than the {VALUE_BYTES:,} bytes that are allowed; partition a variable "
            "that is larger"
        )


# -- with JAX --------------------------------------------------------------------------------------------------------


def _evaluate_computation(
    computation: Computation, constants: Sequence[Array], arguments: Sequence[Value]
) -> tuple[Value, ...]:
    if len(arguments) != computation.arguments:
        raise InvalidArgumentError(
            f"a computation of {computation.arguments} arguments is given {len(arguments)}"
        )
    values = list(arguments)

    def value(number: int) -> Value:
        return values[number] if number >= 0 else constants[-1 - number]

    for equation in computation.equations:
        operands = [value(number) for number in equation.operands]
        # JAX's functions take computations as Python functions.
        attributes = {
            key: _make_function(one, constants) for key, one in equation.attributes.items()
        }
        try:
            made = equation.row.make(*operands, **attributes)
        # A computation inside the operation has named its own operation.
        except OpError:
            raise
        except Exception as error:
            raise InvalidArgumentError(f"operation {equation.name!r}: {one_line(error)}") from error
        results = tuple(made) if isinstance(made, tuple | list) else (made,)
        if len(results) != equation.results:
            raise InvalidArgumentError(
                f"operation {equation.name!r} gives {len(results)} results, the program says "
                f"{equation.results}"
            )
        for result in results:
            # The dtype of a random key is JAX's own, and has no size.
            itemsize = (
                getattr(result.dtype, "itemsize", 0)
                if isinstance(result.dtype, np.dtype)
                else NUMBER_BYTES
            )
            _check_value(result.shape, itemsize, f"a result of {equation.name!r}")
        values.extend(results)
    return tuple(value(number) for number in computation.results)


def _make_function(attribute: Value, constants: Sequence[Array]) -> Value:
    """Converts computations to functions of arrays, and leaves anything else as it is."""
    if isinstance(attribute, Computation):
        computation: Computation = attribute

        def function(*arguments: Value) -> tuple[Value, ...]:
            return _evaluate_computation(computation, constants, arguments)

        return function
    if isinstance(attribute, tuple) and attribute and isinstance(attribute[0], Computation):
        return [_make_function(one, constants) for one in attribute]
    return attribute


@contextlib.contextmanager
def jax_settings(expressions: ExpressionList) -> Iterator[None]:
    """Applies the JAX settings of the process that wrote a list, while the list is traced and lowered.

    Only settings that change the meaning of a list count.
    """
    # The first setting decides the bits of random numbers. The second is a default of this process,
    # and a list says the precision of each product.
    with (
        jax.threefry_partitionable(expressions.threefry_partitionable),
        jax.default_matmul_precision(None),
    ):
        yield
