"""Makes graph functions with TensorFlow's argument names, orders and defaults out of JAX functions of arrays.

The annotation of a parameter says what it takes: ``Array`` a tensor or anything that becomes one,
``Arrays`` a list of these, ``Static`` a value that XLA needs before the step runs (shape, axis),
``Type`` a data type, ``Seed`` the seed of a random key; ``Array | float`` counts as ``Array``.
Others are passed on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.names.table import add_names
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.shapes import ShapeLike
from harness.tf1.ops.static import Deferred, fill_deferred, known_on_host, static

Array = jax.Array
Arrays = Sequence[jax.Array]
Static = Any
Type = DTypeLike
Seed = Any

Function = Callable[..., Any]
_Defined = TypeVar("_Defined", bound=Callable[..., Any])


def is_tensor(value: object) -> TypeGuard[rt.Tensor | rt.Variable]:
    """Returns True for tensors and for variables, which stand for their value."""
    return isinstance(value, rt.lowlevel.Operators)


def constant(
    value: rt.TensorLike,
    dtype: DTypeLike | None = None,
    shape: ShapeLike | None = None,
    name: str = "Const",
    verify_shape: bool = False,
) -> Any:
    """Makes a literal.

    A numpy array keeps its dtype, 64 bits included; Python numbers become int32 and float32.
    """
    # Callers pass literals and tensors alike.
    if is_tensor(value):
        return value
    array = to_array(value, dtype, name)
    if shape is not None:
        wanted = tuple(static(shape)) if not isinstance(shape, int) else (shape,)
        if verify_shape and array.shape != wanted:
            raise TypeError(f"{name}: the value has shape {array.shape}, not {wanted}")
        array = _filled(array, wanted, name)
    return rt.constant(array, None if array.dtype.kind in "SUO" else array.dtype, name=name)


def _filled(array: rt.lowlevel.Array, shape: tuple[int, ...], name: str) -> rt.lowlevel.Array:
    size = int(np.prod(shape))
    if array.size > size or not array.size and size:
        raise ValueError(f"{name}: {array.size} elements do not fit the shape {shape}")
    # TensorFlow's rule: the last element of a short value fills the rest of the shape.
    return np.pad(array.ravel(), (0, size - array.size), "edge").reshape(shape)


def operand(value: Any) -> Any:
    """Converts an argument of an ``Array`` parameter: to a tensor, a Python number, or a small array, a literal."""
    # A Python number stays one: JAX then gives it the dtype of the array beside it.
    if value is None or is_tensor(value) or isinstance(value, bool | int | float | complex):
        return value
    if holds_tensors(value):
        return rt.call(_stack_arrays, [operand(v) for v in value], name="packed")
    array = to_array(value)
    if array.dtype.kind in "SUO" or array.dtype.itemsize == 8 and array.dtype.kind in "iuf":
        return constant(array)  # as a tensor it keeps its width
    return array


def either(**given: Static) -> Static:
    """Returns the argument that was given of two names, None for neither. Raises ValueError for both."""
    found = [value for value in given.values() if value is not None]
    if len(found) > 1:
        raise ValueError(f"give {' or '.join(given)}, not both")
    return found[0] if found else None


def _flatten(value: Iterable[Any]) -> Iterator[Any]:
    for item in value:
        yield from _flatten(item) if isinstance(item, list | tuple) else [item]


def _stack_arrays(items: Any) -> Any:
    return jnp.stack([jnp.asarray(i) for i in items])


class Lift(Protocol):
    """A decorator that turns a function of arrays into a function of tensors, with as many results."""

    @overload
    def __call__(self, fn: Callable[..., jax.Array]) -> Callable[..., rt.Tensor]: ...

    @overload
    def __call__(
        self, fn: Callable[..., tuple[jax.Array, ...]]
    ) -> Callable[..., tuple[rt.Tensor, ...]]: ...


def op(kind: str, takes: str = "") -> Lift:
    """Lifts a JAX function, whose last argument is ``name=None`` where it takes none; see ``make``."""
    return lambda fn: make(kind, fn, _with_name(inspect.signature(fn)), takes=takes)


def _with_name(signature: inspect.Signature) -> inspect.Signature:
    given = signature.parameters
    name = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    return signature if "name" in given else signature.replace(parameters=[*given.values(), name])


def named(fn: _Defined, name: str, doc: str | None) -> _Defined:
    """Gives a function that another one has made its name and its docstring."""
    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = doc
    return fn


class Public:
    """Adds what one module makes to the table of names.

    Args:
        namespace: such as "tf.nn".
        heading: the heading of docs/tf1_names.md, for names of ``tf`` itself.
    """

    def __init__(self, namespace: str = "tf", heading: str = "") -> None:
        self._namespace, self._heading = namespace, heading

    def op(self, kind: str, *names: str, takes: str = "") -> Lift:
        """Lifts a JAX function as ``op`` does, and adds the result under ``names``, or under the function's own."""

        def decorate(fn: Function) -> Function:
            # Errors say the name that programs use.
            shown = names or (fn.__name__,)
            return self.add(*shown)(op(kind, takes)(named(fn, shown[0], fn.__doc__)))

        return decorate

    def add(self, *names: str) -> Callable[[_Defined], _Defined]:
        """Adds a function or a class as it is under ``names``, or under its own."""

        def decorate(defined: _Defined) -> _Defined:
            self.update(dict.fromkeys(names or (defined.__name__,), defined))
            return defined

        return decorate

    def define(self, name: str, fn: Function, doc: str) -> None:
        """Adds a function that another one has made, with its docstring."""
        self.add(name)(named(fn, name, doc))

    def rows(self, table: Mapping[str, tuple[str, Function, str]], parameters: str) -> None:
        """Adds a function for each row: its name, TensorFlow's type of it, the function of arrays, its dtypes."""
        for name, (kind, fn, takes) in table.items():
            self.update({name: from_table(kind, fn, parameters, name, takes)})

    def update(self, names: Mapping[str, Any]) -> None:
        """Adds several names."""
        add_names(self._namespace, names, self._heading)


def make(
    kind: str, fn: Function, signature: inspect.Signature, doc: str | None = None, takes: str = ""
) -> Function:
    """Lifts ``fn``, called by keyword with the parameters of ``signature`` except ``name``.

    Args:
        kind: TensorFlow's type of the operation, and its name when the caller gives none.
        fn: the function of arrays.
        signature: the arguments, whose annotations say how each is converted.
        doc: the docstring, by default that of ``fn``.
        takes: kinds of dtypes, as in ``"int float"``: all ``Array`` arguments have one dtype of
            these, literals that of the tensor beside them. "" for any mixture.
    """
    assert takes == ANY or set(takes.split()) <= set(_KINDS.values()), takes
    kinds = {p.name: str(p.annotation).partition(" |")[0] for p in signature.parameters.values()}
    shown = fn.__name__

    @functools.wraps(fn)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{shown}: {error}") from None
        bound.apply_defaults()
        arguments = bound.arguments
        label = arguments.pop("name", None) or kind
        # TensorFlow refuses two dtypes, where JAX would promote one of them.
        if takes:
            arguments |= _of_one_dtype(shown, arguments, kinds, takes)
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        # Literals must go into the graph of the tensors beside them, which need not be the default.
        with rt.Graph.of(*_flatten(arguments.values())).as_default():
            for parameter, value in arguments.items():
                kind_of_argument = kinds[parameter]
                if kind_of_argument == "Seed":
                    tensors[parameter] = rt.random_key(value, f"{label}/key")
                elif kind_of_argument in _CONVERT:
                    tensors[parameter] = _CONVERT[kind_of_argument](value)
                else:
                    others[parameter] = _convert_other(kind_of_argument, value)
            return run(kind, fn, tensors, others, label)

    lifted.__signature__ = signature  # type: ignore[attr-defined]
    lifted.__doc__ = doc or fn.__doc__
    return lifted


_CONVERT: Mapping[str, Function] = {
    "Array": operand,
    "Arrays": lambda values: [operand(v) for v in values],
}


def _convert_other(kind: str, value: object) -> Any:
    if kind == "Static":
        return static(value)
    if kind == "Type" and value is not None:
        return as_dtype(value).dtype
    return value


class WrongType(TypeError):
    """The error of a lifted function for a dtype that is not taken; every other error is a ValueError."""


FLAT = frozenset({"Ceil", "Floor", "Rint", "Round", "floordiv", "ones_like", "zeros_like"})
"""Operations whose derivative is zero everywhere: ``tf.gradients`` gives None through them."""


def run(
    kind: str, fn: Function, tensors: Mapping[str, Any], others: Mapping[str, Any], label: str
) -> Any:
    """Adds the operation ``fn(**tensors, **others)``, called ``label``."""
    sources = {k: v.sources for k, v in others.items() if isinstance(v, Deferred)}
    # A compiled program needs its shapes before the values are there, the host does not.
    if any(v.found_on_host for v in others.values() if isinstance(v, Deferred)):
        return _run_on_host(kind, fn, tensors, others, label)
    # shown to rt.call: they ask for 64-bit mode
    types = [v for v in others.values() if isinstance(v, np.dtype)]

    def body(arrays: Mapping[str, Any], shapes: Mapping[str, Any], *_: Any) -> Any:
        return fn(**arrays, **fill_deferred(others, shapes))

    # The runtime takes the type of an operation from the name of the function.
    body.__name__ = kind
    only_sizes = bool(sources) and not any(map(is_tensor, jax.tree.leaves(tensors)))
    # The tensor whose size is taken may be 64 bits wide. A Python number beside the size is not.
    operands = jax.tree.map(to_array, dict(tensors)) if only_sizes else dict(tensors)
    try:
        made = rt.call(body, operands, sources, *types, name=label)
        # JAX gives zeros for these derivatives, where TensorFlow gives None.
        return rt.lowlevel.without_derivative(made) if kind in FLAT or only_sizes else made
    except rt.InvalidArgumentError as error:
        if isinstance(error.__cause__, WrongType):
            raise TypeError(error.message) from None
        raise


def _run_on_host(
    kind: str, fn: Function, tensors: Mapping[str, Any], others: Mapping[str, Any], label: str
) -> rt.Tensor:
    """Does as ``run``, on the client's host, where values are known that are sizes: of a picture in a file, say."""
    sources = {k: v.sources for k, v in others.items() if isinstance(v, Deferred)}
    leaves, structure = jax.tree.flatten((dict(tensors), sources))
    places = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]

    def body(_: object, arrays: Sequence[rt.lowlevel.Array]) -> list[object]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        # Arrays of 64 bits on the host would lose half of their digits in JAX's default mode.
        with jax.enable_x64(True):
            values, known = jax.tree.unflatten(structure, filled)
            return [
                np.asarray(fn(**values, **fill_deferred(others, known))).astype(dtype, copy=False)
            ]

    dtype, shape = _dtype_on_host(tensors, others), _shape_on_host(others)
    op = rt.lowlevel.python_call(
        body, [leaves[i] for i in places], [(shape, dtype)], name=label, type=kind
    )
    # What is computed from this value may be a shape as well.
    known_on_host(op)
    return op.outputs[0]


def _dtype_on_host(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> rt.lowlevel.DType:
    """Returns the dtype of the result: the one that was asked for, else that of the first tensor or literal."""
    # A dtype among the arguments is the one of the result: ``dtype`` of tf.zeros.
    wanted = [v for v in others.values() if isinstance(v, np.dtype)]
    typed = [leaf.dtype for leaf in jax.tree.leaves(tensors) if is_tensor(leaf)]
    first = next(iter(jax.tree.leaves(tensors)), np.float32(0))
    return (wanted or typed or [to_array(first).dtype])[0]


def _shape_on_host(others: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Returns the static shape of the result, as far as a shape argument has numbers."""
    listed = others.get("shape", others.get("dims"))
    if not isinstance(listed, Deferred) or not isinstance(listed.structure, list):
        return None
    return tuple(n if isinstance(n, int) and n >= 0 else None for n in listed.structure)


def from_table(kind: str, fn: Function, parameters: str, shown: str, takes: str) -> Function:
    """Lifts a JAX function of positional arrays, called ``shown``; see ``make``.

    ``parameters`` are Python's, without defaults, such as ``"a, axes: Static"``: an ``Array``
    without an annotation.
    """
    pairs = [each.partition(":") for each in parameters.replace(" ", "").split(",")]
    either_way = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [inspect.Parameter(n, either_way, annotation=kind or "Array") for n, _, kind in pairs]

    def body(**given: Any) -> Any:
        # JAX sorts the keys of a dictionary, so the order is that of the parameters.
        return fn(*(given[name] for name, _, _ in pairs))

    ours = fn.__module__.startswith("harness")
    doc = fn.__doc__ if ours else f"``{origin(fn)}``."
    return make(kind, named(body, shown, doc), _with_name(inspect.Signature(found)), takes=takes)


def origin(fn: Function) -> str:
    """Names the place where a reader finds ``fn``: ``jax.numpy.exp``."""
    module = str(fn.__module__)
    for public in ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy.special"):
        if getattr(importlib.import_module(public), fn.__name__, None) is fn:
            module = public
            break
    return f"{module}.{fn.__name__}"


ANY = "any"
"""Of ``takes``: one dtype, whichever it is."""
_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex", "O": "string"}


def _kind_of(dtype: rt.lowlevel.DType) -> str:
    """Returns the word for ``dtype`` in ``takes``; numpy knows nothing of bfloat16."""
    return "float" if jnp.issubdtype(dtype, np.floating) else _KINDS.get(dtype.kind, dtype.name)


def _of_one_dtype(
    shown: str, arguments: Mapping[str, Any], kinds: Mapping[str, str], takes: str
) -> dict[str, object]:
    """Returns the tensors of ``arguments``; literals are as wide as the first one: ``x / np.float64(2)`` as wide as x.

    Raises TypeError for two dtypes, or one that ``shown`` does not take.
    """
    alone = {k: [v] for k, v in arguments.items() if kinds[k] == "Array" and v is not None}
    found = alone | {k: list(v) for k, v in arguments.items() if kinds[k] == "Arrays"}
    lead = next((v.dtype for vs in found.values() for v in vs if is_tensor(v)), None)
    if lead is not None:
        found = {k: [_become(v, lead) for v in values] for k, values in found.items()}
    _check_dtypes(shown, [(k, v) for k, values in found.items() for v in values], lead, takes)
    return {k: values[0] if k in alone else values for k, values in found.items()}


def _check_dtypes(
    shown: str,
    tensors: Iterable[tuple[str, rt.TensorLike]],
    first: rt.lowlevel.DType | None,
    takes: str,
) -> None:
    lead = first
    for parameter, value in tensors:
        dtype = _dtype_of(value, lead)
        # A list of tensors has no dtype yet; its tensors are checked when they are stacked.
        if dtype is None:
            continue
        wrong = f"{shown}: {parameter} is {as_dtype(dtype).name}, and "
        if takes != ANY and _kind_of(dtype) not in takes.split():
            raise TypeError(f"{wrong}it takes {takes}: use tf.cast")
        first = dtype if first is None else first
        if dtype != first:
            raise TypeError(f"{wrong}beside it is {as_dtype(first).name}: use tf.cast")


_HOLDERS = {
    "bool": ["bool"],
    "int": ["int", "float", "complex"],
    "float": ["float", "complex"],
    "complex": ["complex"],
}
"""Kind of a Python number -> kinds of the tensors beside which the number takes their dtype."""


def _dtype_of(value: rt.TensorLike, lead: rt.lowlevel.DType | None) -> rt.lowlevel.DType | None:
    """Returns the dtype of an argument; a Python number takes that of the tensor beside it, if that can hold it."""
    if is_tensor(value):
        return value.dtype
    if holds_tensors(value):
        return None
    own = to_array(value).dtype
    if lead is None or not isinstance(value, bool | int | float | complex):
        return own
    return lead if _kind_of(lead) in _HOLDERS[_kind_of(own)] else own


def _become(value: rt.TensorLike, dtype: rt.lowlevel.DType) -> rt.TensorLike:
    if (
        not isinstance(value, list | tuple | np.ndarray | np.generic)
        or holds_tensors(value)
        or dtype.hasobject
    ):
        return value
    # TensorFlow's rule: a literal takes the dtype of the tensor beside it, but no integer takes a
    # fraction.
    array = to_array(value)
    floating = jnp.issubdtype(dtype, np.floating)
    fits = (
        array.dtype.kind in "iu"
        and (floating or dtype.kind in "iu")
        or array.dtype.kind == "f"
        and floating
    )
    return np.asarray(value).astype(dtype) if fits else value


def holds_tensors(value: object) -> bool:
    """Returns True for a list, nested or not, with a tensor inside."""
    return isinstance(value, list | tuple) and any(is_tensor(v) for v in _flatten(value))
