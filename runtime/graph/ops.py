"""Placeholders, constants, and ``call``, which makes one operation of any JAX function of pytrees of tensors."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.graph import misuse
from runtime.graph.graph import Graph, Operation, Tensor, get_default_graph
from runtime.graph.mesh import within_mesh
from runtime.graph.op_kinds import (
    EMBED_BYTES,
    Constant,
    Feed,
    Host,
    Pure,
    Shape,
)
from runtime.graph.operators import Operators, TensorLike, make_operations_with
from runtime.graph.tracing import infer, is_64_bit, x64_enabled
from runtime.tensor_spec import AnyArray, Array, DType


def as_dtype(dtype: DTypeLike) -> DType:
    """Converts ``dtype`` to a numpy dtype.

    ``str``, ``bytes``, ``'string'`` and numpy's string kinds become ``object``.
    """
    if dtype in (str, bytes, "string"):
        return np.dtype(object)
    found = np.dtype(dtype)
    return np.dtype(object) if found.kind in "SUO" else found


def as_array(value: object, dtype: DTypeLike | None = None, what: str = "value") -> Array:
    """Converts ``value`` to a numpy array with JAX's default widths.

    Python and numpy 64-bit values become 32 bits wide, but for ``dtype`` or JAX's 64-bit mode.
    Strings become an object array of bytes. The result may share the memory of ``value``.

    Raises:
        InvalidArgumentError: ragged nesting, or a type that no tensor can hold.
    """
    try:
        array = np.asarray(value)
    # Numpy would decode bytes that lie beside strings.
    except UnicodeDecodeError:
        array = np.array(value, object)
    except ValueError as error:
        raise InvalidArgumentError(f"{what}: cannot be made an array: {error}") from None
    # numpy's own string kinds drop zero bytes at the end, so strings are taken from the value
    # itself.
    if array.dtype.kind in "SUO":
        return _make_string_array(
            array if isinstance(value, np.ndarray) else np.asarray(value, object), what
        )
    if dtype is not None:
        wanted = as_dtype(dtype)
        if wanted.hasobject:
            raise InvalidArgumentError(f"{what}: {array.dtype.name} given for a string tensor")
        return _cast_array(array, wanted, what)
    # JAX itself would cut the values of a numpy array without an error.
    if is_64_bit(array.dtype) and not x64_enabled():
        if (
            array.dtype.kind in "iu"
            and array.size
            and (array.max() > 2**31 - 1 or array.min() < -(2**31))
        ):
            raise InvalidArgumentError(
                f"{what}: {array.max()} does not fit int32; give dtype=jnp.int64 to keep 64 bits"
            )
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return array


def _cast_array(array: Array, wanted: DType, what: str) -> Array:
    """Converts ``array`` to ``wanted``.

    Raises InvalidArgumentError if more than precision would be lost.
    """
    if kind_of(array.dtype) > kind_of(wanted):
        raise InvalidArgumentError(
            f"{what}: {array.dtype.name} does not become {wanted.name} by itself: cast it first"
        )
    if wanted.kind in "iu" and array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise InvalidArgumentError(
                f"{what} does not fit {wanted.name}: it goes from {array.min()} to {array.max()}"
            )
    return array.astype(wanted, copy=False)


def kind_of(dtype: DType) -> int:
    """Returns 0 for booleans, 1 for integers, 2 for reals, 3 for complex numbers, 4 for other dtypes."""
    kinds: tuple[type[np.generic], ...] = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), 4)


def _make_string_array(array: Array, what: str) -> Array:
    flat = []
    for item in array.ravel().tolist():
        if not isinstance(item, str | bytes):
            raise InvalidArgumentError(
                f"{what}: {type(item).__name__} is neither a number nor a string"
            )
        flat.append(item.encode() if isinstance(item, str) else item)
    out = np.empty(array.shape, object)
    out.ravel()[:] = flat if out.size else []
    return out


def placeholder(
    dtype: DTypeLike,
    shape: Sequence[int | None] | None = None,
    name: str | None = None,
    *,
    casting: str = "same_value",
) -> Tensor:
    """Makes a tensor whose value is fed with each step.

    Args:
        dtype: Dtype of the tensor.
        shape: Static shape. A dimension ``None`` may differ from step to step, and each size
            compiles a program. ``None`` as a whole accepts any shape.
        name: Operation name, "Placeholder" by default.
        casting: Treatment of values of another dtype. "same_value" converts values that the dtype
            can hold, with reals rounded, and refuses all other values. "unsafe" cuts these to fit,
            as numpy does, and warns once.

    Raises:
        InvalidArgumentError: no such casting.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     x = rt.placeholder("float32", [None, 2])
        ...     session.run(rt.numpy.sum(x, axis=0), {x: [[1, 2], [3, 4], [5, 6]]}).tolist()
        [9.0, 12.0]
    """
    if casting not in ("same_value", "unsafe"):
        raise InvalidArgumentError(
            f"placeholder {name!r}: casting is 'same_value' or 'unsafe', not {casting!r}"
        )
    static: Shape | None = (
        None if shape is None else tuple(None if d is None else int(d) for d in shape)
    )
    op = get_default_graph().add_operation(
        "Placeholder",
        Feed(casting),
        outputs=[(static, as_dtype(dtype))],
        name=name or "Placeholder",
    )
    return op.outputs[0]


def constant(
    value: TensorLike,
    dtype: DTypeLike | None = None,
    shape: Sequence[int] | None = None,
    name: str | None = None,
) -> Tensor:
    """Makes a literal array, of numbers or strings.

    Args:
        value: A number, string, bytes, array or nested list. Strings and bytes become string
            tensors.
        dtype: Wanted dtype; JAX's default for ``value`` by default.
        shape: Shape to which a single value is broadcast, or an array reshaped.
        name: Operation name, "Const" by default.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     session.run(rt.constant(7.0, shape=[2])).tolist()
        [7.0, 7.0]
    """
    # The value is converted once here, and never again in a step.
    array = as_array(value, dtype, name or "constant")
    if shape is not None:
        array = _give_shape(array, tuple(shape), name or "constant")
    # A copy, because the caller may change the array afterwards.
    array = np.array(array, order="C")
    array.flags.writeable = False
    op = get_default_graph().add_operation(
        "Const", Constant(array), outputs=[(array.shape, array.dtype)], name=name or "Const"
    )
    return op.outputs[0]


def _give_shape(array: Array, shape: tuple[int, ...], what: str) -> Array:
    try:
        return np.broadcast_to(array, shape) if array.size == 1 else array.reshape(shape)
    except ValueError:
        raise InvalidArgumentError(
            f"{what}: a value of shape {array.shape} cannot get the shape {shape}"
        ) from None


@runtime_checkable
class StandsForTensor(Protocol):
    """An object with a tensor for arithmetic, such as a variable with its value."""

    def _as_tensor(self) -> Tensor: ...


def as_tensor(value: TensorLike, dtype: DTypeLike | None = None, name: str | None = None) -> Tensor:
    """Returns ``value`` as a tensor: a tensor itself, the value of a variable, or a constant.

    Args:
        value: A tensor, a variable, or an array or number.
        dtype: Dtype of a constant.
        name: Operation name of a constant.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     rt.as_tensor([1, 2], "float32", name="pair")
        <Tensor 'pair:0' shape=(2) dtype=float32>
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, StandsForTensor):
        tensor: Tensor = value._as_tensor()
        return tensor
    return constant(value, dtype, name=name)


def is_tensor(value: object) -> TypeGuard[Operators[Tensor]]:
    """Returns True for tensors and variables."""
    return isinstance(value, Operators)


def call(
    fn: Callable[..., object], *args: object, name: str | None = None, **kwargs: object
) -> Any:
    """Makes one operation of any JAX function of pytrees: ``rt.call(loss_fn, params, x, y)``.

    Tensors and variables anywhere in ``args`` and ``kwargs`` become the operation's inputs. Large
    arrays become constants. Small arrays, numbers and other Python values reach ``fn`` unchanged,
    so static arguments such as ``axis`` work.

    Args:
        fn: A pure function that JAX can trace.
        *args: Positional arguments, pytrees.
        name: Operation name; by default the function's own, which is the operation's type in any
            case.
        **kwargs: Keyword arguments, pytrees.

    Returns:
        The result of ``fn`` with a ``Tensor`` in the place of each array.

    Raises:
        InvalidArgumentError: JAX cannot trace ``fn`` for these shapes and dtypes.
        ValueError: The tensors are of two graphs. The message names both graphs.

    Examples:
        >>> import runtime as rt
        >>> def norms(tree, axis):
        ...     return {name: (array**2).sum(axis) ** 0.5 for name, array in tree.items()}
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     x = rt.placeholder("float32", [2, 2])
        ...     session.run(rt.call(norms, {"x": x}, axis=1), {x: [[3, 4], [6, 8]]})["x"].tolist()
        [5.0, 10.0]
    """
    label = name or _function_name(fn)
    leaves, tree = jax.tree.flatten((args, kwargs))
    for leaf in leaves:
        if is_tensor(leaf):
            misuse.check_not_traced(leaf.name)
    with Graph.of(*leaves).as_default():
        return _add_call(fn, leaves, tree, label)


def _add_call(fn: Callable[..., object], leaves: list[object], tree: PyTreeDef, label: str) -> Any:
    # A large array becomes an input, since a literal would make the program as large as the array.
    places, tensors = [], []
    for i, leaf in enumerate(leaves):
        if is_tensor(leaf) or (
            isinstance(leaf, np.ndarray | jax.Array) and leaf.nbytes > EMBED_BYTES
        ):
            places.append(i)
            tensors.append(as_tensor(leaf))
        elif isinstance(leaf, np.ndarray):
            # The array is read when a step is planned. The caller may have changed it by then.
            leaves[i] = leaf.copy()

    on_mesh = within_mesh(fn, label)

    def flat_fn(*arrays: jax.Array) -> object:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return on_mesh(*inner_args, **inner_kwargs)

    # An argument such as ``dtype=jnp.int64`` asks for 64-bit mode.
    wide = True if any(_names_64_bits(leaf) for leaf in leaves) else None
    out_tree, outputs = infer(flat_fn, [(t.shape, t.dtype) for t in tensors], label, wide)
    # A lambda has no name that would help a reader.
    kind = None if "<" in getattr(fn, "__name__", "<") else _function_name(fn)
    # JAX keeps the trace of a function object. So a plan with the shapes of the graph traces
    # nothing anew.
    op = pure(flat_fn, tensors, outputs, label, type=kind, wide=bool(wide))
    assert out_tree.num_leaves == len(op.outputs), "an array of the result is no output"
    return jax.tree.unflatten(out_tree, list(op.outputs))


def pure(
    fn: Callable[..., object],
    inputs: Sequence[Tensor],
    outputs: Sequence[tuple[Shape | None, DType]],
    name: str,
    *,
    type: str | None = None,  # noqa: A002
    colocate_with: Operation | None = None,
    wide: bool = False,
) -> Operation:
    """Adds an operation of a flat function whose output shapes are known."""
    return Graph.of(*inputs).add_operation(
        type or name.rsplit("/", 1)[-1],
        Pure(fn),
        inputs,
        outputs,
        name=name,
        colocate_with=colocate_with,
        wide=wide,
    )


def identity(
    value: TensorLike, name: str | None = None, *, colocate_with: Operation | None = None
) -> Tensor:
    """Makes an operation that returns its input on the current device.

    So a tensor receives a name, or goes to a device.

    Args:
        value: A tensor, a variable, or an array or number.
        name: Operation name.
        colocate_with: The operation whose device the new operation takes.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     with rt.device("/job:worker"):
        ...         print(rt.identity(rt.constant(1.0), "here").device)
        /job:worker
    """
    tensor = as_tensor(value)
    body = Host("identity") if tensor.dtype == object else Pure(_same)
    op = tensor.graph.add_operation(
        "Identity",
        body,
        [tensor],
        [(tensor.shape, tensor.dtype)],
        name=name,
        colocate_with=colocate_with,
    )
    return op.outputs[0]


def _same(array: AnyArray) -> AnyArray:
    return array


def _names_64_bits(leaf: object) -> bool:
    """Returns True if a static argument is a dtype of JAX's 64-bit mode, such as ``jnp.int64``."""
    if isinstance(leaf, type):
        # ``jnp.int64`` is a class with a dtype, and ``np.int64`` a class that is one.
        leaf = np.dtype(leaf) if issubclass(leaf, np.generic) else getattr(leaf, "dtype", None)
    return isinstance(leaf, np.dtype) and is_64_bit(leaf)


def _function_name(fn: Callable[..., object]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    # A function may have any name, as a lambda has, and an operation may not.
    cleaned = "".join(c if c.isalnum() or c in "_.-" else "_" for c in name).lstrip("_-")
    return cleaned or "call"


# The module of the operators cannot import this module, which imports the operators.
make_operations_with(call)
