"""Tracing: a JAX function becomes a jaxpr, or the shapes of its results.

No other module traces user code.

Each operation is traced by itself, in 64-bit mode if an array of the operation is 64 bits wide, or
if JAX was in 64-bit mode at the making of the operation. So a program may count an int64 global
step and compute in 32 bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError, one_line
from runtime.graph import misuse
from runtime.graph.op_kinds import Shape
from runtime.tensor_spec import DType

_SIZE, _OTHER_SIZE, _SMALLEST = 5040, 10080, 1
"""Numbers for unknown dimensions.

Most reshapes divide the first two. JAX allocates no array of these sizes, but NumPy in a function
may, so the numbers are small.
"""
_RATIO_BASES = 16, 48
_NO_MESH = jax.sharding.AbstractMesh((), ())
_FAR = 10**9
"""A size beyond all numbers of a program, such as the number of ``x[50000:]``."""


def is_64_bit(dtype: DType) -> bool:
    """Returns True if JAX holds ``dtype`` only in 64-bit mode."""
    return bool(dtype.kind in "iuf" and dtype.itemsize == 8) or dtype == np.complex128


def x64_enabled() -> bool:
    """Returns True if the caller runs JAX in 64-bit mode, for the process or in a context."""
    return jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8


def needs_64_bit(dtypes: Sequence[DType]) -> bool:
    """Returns True if any of ``dtypes`` needs JAX's 64-bit mode."""
    return any(is_64_bit(dtype) for dtype in dtypes)


def aval(shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Makes the abstract array of a tensor."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def trace(
    fn: Callable[..., object], avals: Sequence[jax.ShapeDtypeStruct], wide: bool
) -> ClosedJaxpr:
    """Traces ``fn`` for these arguments, in 64-bit mode if ``wide``, and returns the jaxpr."""
    with jax.enable_x64(wide):
        jaxpr: ClosedJaxpr = jax.jit(fn).trace(*avals).jaxpr
        return jaxpr


def resize(jaxpr: ClosedJaxpr, sizes: Mapping[Any, int]) -> ClosedJaxpr:
    """Returns a jaxpr with numbers for symbols.

    Args:
        jaxpr: a jaxpr that was traced with symbols.
        sizes: the number for each symbol.

    Raises:
        KeyError: the jaxpr computes with a symbol, or has a symbol without a number.
    """
    made: dict[Var, Var] = {}

    def find_size(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return resize(value, sizes)
        return sizes[value] if jax.export.is_symbolic_dim(value) else value

    def renew(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return atom
        if atom not in made:
            made[atom] = Var(atom.aval.update(shape=tuple(map(find_size, atom.aval.shape))))
        return made[atom]

    def renew_all(atoms: Sequence[Any]) -> list[Any]:
        return [renew(atom) for atom in atoms]

    inner = jaxpr.jaxpr
    equations = []
    for equation in inner.eqns:
        # The size is a value here. The same function has a literal for a number.
        if equation.primitive.name == "dim_as_value":
            raise KeyError(equation.params["dim"])
        equations.append(
            equation.replace(
                invars=renew_all(equation.invars),
                outvars=renew_all(equation.outvars),
                params=jax.tree.map(find_size, equation.params),
            )
        )
    resized = inner.replace(
        constvars=renew_all(inner.constvars),
        invars=renew_all(inner.invars),
        outvars=renew_all(inner.outvars),
        eqns=equations,
    )
    return ClosedJaxpr(resized, jaxpr.consts)


_guessing: ContextVar[bool] = ContextVar("guessing", default=False)


def sizes_are_guesses() -> bool:
    """Returns True while a function is traced with made-up sizes, to find a static shape.

    A function then accepts sizes that do not fit, and returns an array of the shape for sizes that
    fit.
    """
    return _guessing.get()


def infer(
    fn: Callable[..., object],
    inputs: Sequence[tuple[Shape | None, DType]],
    what: str,
    wide: bool | None = None,
) -> tuple[PyTreeDef, list[tuple[Shape | None, DType]]]:
    """Infers the output structure, static shapes and dtypes of ``fn``.

    Args:
        fn: a JAX function from flat arrays to a pytree of arrays.
        inputs: (static shape, dtype) of each argument.
        what: name of the operation in errors.
        wide: True or False for 64-bit mode on or off; by default on for a 64-bit input.

    Returns:
        The tree structure of the result, and (static shape, dtype) of its leaves.

    Raises:
        InvalidArgumentError: JAX cannot trace the function with these shapes. The text is JAX's
            own, after ``what``.
    """
    if any(dtype.hasobject for _, dtype in inputs):
        raise InvalidArgumentError(
            f"{what}: a string tensor cannot be an argument of a numeric function"
        )
    if wide is None:
        wide = needs_64_bit([dtype for _, dtype in inputs]) or x64_enabled()
    failed: list[Exception] = []
    # The errors are kept, because the first one says most if no call succeeds.
    found: list[object] = []
    # An input of unknown rank is tried with each rank, of 0 to 4 dimensions.
    ranks = 5 if any(shape is None for shape, _ in inputs) else 1
    for rank in range(ranks):
        shapes = [(None,) * rank if shape is None else shape for shape, _ in inputs]
        found += _trace_sizes(
            _TrialRun(fn, what, wide, shapes, [dtype for _, dtype in inputs], failed)
        )
    if not found:
        assert failed, "no result, and no error"
        raise _describe_failure(failed[0], inputs, what)
    leaves, tree = jax.tree.flatten(found[0])
    structure: object = tree
    # A result of another structure says nothing about the shapes of this structure.
    alike = [jax.tree.leaves(result) for result in found if structure == jax.tree.structure(result)]
    shapes_of = [_common_shape([leaf.shape for leaf in same]) for same in zip(*alike, strict=True)]
    return tree, [(shape, leaf.dtype) for shape, leaf in zip(shapes_of, leaves, strict=True)]


def _describe_failure(
    error: Exception, inputs: Sequence[tuple[Shape | None, DType]], what: str
) -> InvalidArgumentError:
    # The error of a misuse names the tensor and the cure already.
    if isinstance(error, misuse.TensorInsideError):
        return error
    given = ", ".join(
        f"{dtype.name}{'?' if shape is None else list(shape)}" for shape, dtype in inputs
    )
    described = InvalidArgumentError(f"{what}({given}): {type(error).__name__}: {one_line(error)}")
    described.__cause__ = error
    return described


_Place = tuple[int, int]
"""(input, axis) of an unknown dimension."""
_Sizes = Mapping[_Place, Any]


@dataclass(frozen=True)
class _TrialRun:
    """A function to trace with sizes for its unknown dimensions, and the errors so far."""

    fn: Callable[..., object]
    what: str
    wide: bool
    shapes: Sequence[Shape]
    dtypes: Sequence[DType]
    failed: list[Exception]

    def __call__(self, sizes: _Sizes) -> list[object]:
        """Returns a list of the result, which is empty if JAX refuses these sizes."""
        avals = [
            aval([sizes[i, axis] if d is None else d for axis, d in enumerate(shape)], dtype)
            for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]
        # Without unknown dimensions the sizes are those of every step.
        token = _guessing.set(bool(sizes))
        try:
            # A plan has the same mesh and mode, so JAX finds this trace again.
            with (
                jax.sharding.use_abstract_mesh(_NO_MESH),
                jax.enable_x64(self.wide),
                misuse.traced(self.what, self.fn),
            ):
                return [jax.eval_shape(self.fn, *avals)]
        except Exception as error:
            self.failed.append(error)
            return []
        finally:
            _guessing.reset(token)


def _trace_sizes(run: _TrialRun) -> list[object]:
    """Traces a function with different sizes for its unknown dimensions.

    A dimension is static if all results have the same number there. So each unknown dimension is a
    symbol of its own (shape polymorphism of ``jax.export``). Some functions accept no symbols,
    because they need a number (``len(x)``) or compare two sizes. Such a function is traced with
    numbers in every order.
    """
    places = [
        (i, axis) for i, shape in enumerate(run.shapes) for axis, d in enumerate(shape) if d is None
    ]
    if not places:
        return run({})
    # Equal sizes come first, since most functions combine their inputs.
    equal: _Sizes = dict.fromkeys(places, _SIZE)
    found = run(equal)
    errors = len(run.failed)
    symbolic = _trace_symbols(places, run)
    # JAX 0.10.0 has this class under no public name.
    undecided = any(
        type(error).__name__ == "InconclusiveDimensionOperation" for error in run.failed[errors:]
    )
    # An error of a program speaks of numbers, not of symbols.
    del run.failed[errors:]
    if symbolic and not undecided:
        return found + symbolic
    accepted = [equal] * len(found)
    for sizes in _order_sizes(places):
        results = run(sizes)
        found += results
        accepted += [sizes] * len(results)
    assert len(accepted) == len(found), "a result has no sizes"
    if _leaves_size_open(places, accepted):
        # A dimension of a shape of its own has another size in each call.
        found.append(
            jax.tree.map(
                lambda leaf: aval([make_symbols(1)[0]] * len(leaf.shape), leaf.dtype), found[0]
            )
        )
    # A size of 1 fits all others, and says nothing about them.
    if all(size == 1 for sizes in accepted for size in sizes.values()):
        found += _trace_fitting(places, run)
    return found


def _leaves_size_open(places: Sequence[_Place], accepted: Sequence[_Sizes]) -> bool:
    """Returns True if a dimension had the same size in all accepted calls, which says nothing about other sizes.

    The size 1 says something: the function may take one element only.
    """
    return any(
        len({sizes[place] for sizes in accepted}) == 1 != accepted[0][place]
        for place in places
        if accepted
    )


def _trace_symbols(places: Sequence[_Place], run: _TrialRun) -> list[object]:
    """Traces with a symbol for each unknown dimension, or for each axis, or for all, if sizes must be equal."""
    distinct = dict(zip(places, make_symbols(len(places)), strict=True))
    if (found := run(distinct)) or len(places) == 1:
        return found
    # Most functions that refuse different sizes combine their inputs axis by axis.
    of_axis = {place: distinct[next(p for p in places if p[1] == place[1])] for place in places}
    found = run(of_axis)
    if not found:
        return run(dict.fromkeys(places, distinct[places[0]]))
    # One input may differ from the rest, so each has sizes of its own in turn.
    for own in _several_inputs(places):
        found += run(
            {place: distinct[place] if place[0] == own else of_axis[place] for place in places}
        )
    return found


def _order_sizes(places: Sequence[_Place]) -> Iterator[_Sizes]:
    """Yields numbers for unknown dimensions: equal, then falling, rising, and with one different input."""
    yield from (dict.fromkeys(places, size) for size in (_OTHER_SIZE, _SMALLEST))
    falling = [_OTHER_SIZE >> min(n, 3) for n in range(len(places))]
    steep = [_SIZE] + [_SIZE // _RATIO_BASES[1]] * (len(places) - 1)
    for sizes in (falling, falling[::-1], steep, steep[::-1]) if len(places) > 1 else ():
        yield dict(zip(places, sizes, strict=True))
    for own, (size, others) in itertools.product(
        _several_inputs(places), itertools.permutations((_SIZE, _OTHER_SIZE))
    ):
        yield {place: size if place[0] == own else others for place in places}


def _several_inputs(places: Sequence[_Place]) -> Sequence[int]:
    """Returns the inputs with unknown dimensions if more than two.

    Two may be equal then, and a third different.
    """
    inputs = list(dict.fromkeys(i for i, _ in places))
    return inputs if len(inputs) > 2 else []


def _trace_fitting(places: Sequence[_Place], run: _TrialRun) -> list[object]:
    """Traces with sizes equal to a known size (``[None] + [3]``), with multiples, or with very large sizes."""
    # A function may need a multiple of a size that is known, as a reshape to rows does.
    known = dict.fromkeys(d for shape in run.shapes for d in shape if d is not None and d > 1)
    found = [result for size in known for result in run(dict.fromkeys(places, size))]
    for size, larger, base in (
        [] if found else itertools.product(known, (places[0], places[-1]), _RATIO_BASES)
    ):
        found += run({**dict.fromkeys(places, base), larger: base * size})
    return found or run(dict(zip(places, make_symbols(len(places), _FAR), strict=True)))


@functools.cache
def make_symbols(count: int, least: int = 1) -> Sequence[Any]:
    """Returns ``count`` symbols for dimensions of ``least`` or more."""
    # JAX refuses symbols of two scopes in one function. Each call makes a scope, so the result is
    # kept.
    names = [f"d{n}" for n in range(count)]
    return jax.export.symbolic_shape(
        ",".join(names), constraints=[f"{name} >= {least}" for name in names]
    )


def _common_shape(shapes: Sequence[tuple[Any, ...]]) -> Shape | None:
    """Returns the shape with the dimensions that all ``shapes`` share."""
    # Even the rank depends on the sizes.
    if len({len(shape) for shape in shapes}) > 1:
        return None
    return tuple(_common_dimension(dims) for dims in zip(*shapes, strict=True))


def _common_dimension(dims: Sequence[Any]) -> int | None:
    # A symbol is no int: a dimension that depends on a symbol is unknown.
    numbers = {d if isinstance(d, int) else None for d in dims}
    return numbers.pop() if len(numbers) == 1 else None
