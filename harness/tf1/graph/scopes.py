"""``tf.variable_scope`` and ``tf.get_variable``: variables made once and found again by name."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.graph.initializers import glorot_uniform_initializer, zeros_initializer
from harness.tf1.graph.partitions import Partitioner, count_parts, make_parts
from harness.tf1.graph.variables import Variable
from harness.tf1.ops.dtypes import as_dtype
from harness.tf1.ops.lift import Public, is_tensor
from harness.tf1.ops.shapes import ShapeLike, TensorShape
from harness.tf1.ops.static import static_number
from runtime import concurrency

public = Public("tf", "Variable scopes")

AUTO_REUSE = "AUTO_REUSE"
public.update({"AUTO_REUSE": AUTO_REUSE})
"""Value of ``reuse``: take the variable if it is there, else make it."""
REGULARIZATION_LOSSES = "regularization_losses"

Regularizer = Callable[[Any], Any]


@public.add()
@dataclass(eq=False)
class VariableScope:
    """The settings that ``get_variable`` takes from the scope of the call.

    Attributes:
        name: names of variables begin with ``name/``; ``""`` at the top.
        reuse: False to make variables, True to find them, ``AUTO_REUSE`` for either.
        initializer: default initializer.
        regularizer: default regularizer.
        dtype: default dtype.
        original_name_scope: the name scope that it opened, with a slash at its end.
        custom_getter: a function around ``get_variable``.
        partitioner: default partitioner.
    """

    name: str = ""
    reuse: Any = False
    initializer: Any = None
    regularizer: Regularizer | None = None
    dtype: DTypeLike = np.float32
    original_name_scope: str = ""
    custom_getter: Callable[..., Any] | None = None
    partitioner: Partitioner | None = None

    def reuse_variables(self) -> None:
        """Finds variables in this scope from here on, and makes none."""
        self.reuse = True

    def set_initializer(self, initializer: Any) -> None:
        """Changes the default initializer."""
        self.initializer = initializer

    def set_regularizer(self, regularizer: Regularizer | None) -> None:
        """Changes the default regularizer."""
        self.regularizer = regularizer

    def set_partitioner(self, partitioner: Partitioner | None) -> None:
        """Changes the default partitioner."""
        self.partitioner = partitioner

    def get_variable(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls ``tf.get_variable`` in this scope."""
        # The scope need not be open: programs keep one and make variables in it later.
        with _inside(self):
            return get_variable(name, *args, **kwargs)

    def global_variables(self) -> list[Any]:
        """Returns the global variables made in this scope."""
        return _variables_in(rt.GraphKeys.GLOBAL_VARIABLES, self.name)

    def trainable_variables(self) -> list[Any]:
        """Returns the trainable variables made in this scope."""
        return _variables_in(rt.GraphKeys.TRAINABLE_VARIABLES, self.name)


def _variables_in(key: str, name: str) -> list[Any]:
    prefix = f"{name}/" if name else ""
    return [v for v in rt.get_default_graph().get_collection(key) if v.name.startswith(prefix)]


_made: weakref.WeakKeyDictionary[rt.Graph, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The variables of each graph that ``get_variable`` made, by name."""


class _OfThread(concurrency.local):
    """The scopes that each thread has opened.

    Attributes:
        scopes: the variable scopes that are open, each with its graph.
        opened: by graph, how often each variable scope was opened, by its full name.
    """

    def __init__(self) -> None:
        self.scopes: list[tuple[rt.Graph, VariableScope]] = []
        self.opened: weakref.WeakKeyDictionary[rt.Graph, dict[str, int]] = (
            weakref.WeakKeyDictionary()
        )


_threads = _OfThread()


def _count_openings() -> dict[str, int]:
    """Counts how often this thread has opened each variable scope of the default graph, by full name.

    Default names are numbered by it. Leaving a scope forgets those below it, so that a model built
    a second time, in the same scope opened again, finds its layers under the names that they had.
    """
    return _threads.opened.setdefault(rt.get_default_graph(), {})


_tops: weakref.WeakKeyDictionary[rt.Graph, VariableScope] = weakref.WeakKeyDictionary()


@public.add()
def get_variable_scope() -> VariableScope:
    """Returns the open variable scope; at the top the one without a name."""
    graph = rt.get_default_graph()
    # Scopes of other graphs may be open around this one.
    for of, scope in reversed(_threads.scopes):
        if of is graph:
            return scope
    return _tops.setdefault(graph, VariableScope())


@contextlib.contextmanager
def _inside(scope: VariableScope) -> Iterator[None]:
    entry = (rt.get_default_graph(), scope)
    # Scopes are open by thread, as in TensorFlow: towers may be built by several threads.
    _threads.scopes.append(entry)
    try:
        yield
    finally:
        _threads.scopes.remove(entry)


@public.add()
@contextlib.contextmanager
def variable_scope(
    name_or_scope: Any = None,
    default_name: str | None = None,
    values: rt.TensorLike | None = None,
    initializer: Any = None,
    regularizer: Regularizer | None = None,
    caching_device: object = None,
    partitioner: Partitioner | None = None,
    custom_getter: Callable[..., Any] | None = None,
    reuse: Any = None,
    dtype: DTypeLike | None = None,
    use_resource: object = None,
) -> Iterator[VariableScope]:
    """Opens a variable scope, and a name scope of the same name."""
    if name_or_scope is None and default_name is None:
        raise ValueError("variable_scope: give a name or a default_name")
    # TensorFlow's rule: a scope with a made-up name never reuses, since the name is new.
    if name_or_scope is None and reuse:
        raise ValueError("reuse=True cannot be used without a name_or_scope")
    outer = get_variable_scope()
    again = isinstance(name_or_scope, VariableScope)
    if again:
        # A scope object goes back to its own variables, under a new name scope of the last part of
        # the name.
        base, name, shown = name_or_scope, name_or_scope.name, name_or_scope.name.rsplit("/", 1)[-1]
    else:
        prefix = f"{outer.name}/" if outer.name else ""
        shown = default_name if name_or_scope is None else name_or_scope
        # A default name gets its number in the names of variables; name scopes number themselves.
        own = _find_unique(prefix, str(default_name)) if name_or_scope is None else name_or_scope
        base, name = outer, prefix + own
    with _counted(name, again), _open_name_scope(shown) as opened:
        scope = replace(
            base,
            name=name,
            reuse=reuse or base.reuse,  # never back to making below one that finds
            initializer=base.initializer if initializer is None else initializer,
            regularizer=base.regularizer if regularizer is None else regularizer,
            dtype=base.dtype if dtype is None else as_dtype(dtype).dtype,
            custom_getter=base.custom_getter if custom_getter is None else custom_getter,
            partitioner=base.partitioner if partitioner is None else partitioner,
            original_name_scope=base.original_name_scope if again else opened,
        )
        with _inside(scope):
            yield scope


def _open_name_scope(name: str) -> Any:
    """Returns the name scope of a variable scope; one without a name stays in the name scope that is open."""
    if name:
        return rt.name_scope(name)
    scope = rt.get_default_graph().get_name_scope()
    return contextlib.nullcontext(f"{scope}/" if scope else "")


@contextlib.contextmanager
def _counted(name: str, again: bool) -> Iterator[None]:
    """Counts the opening of the scope ``name``, and puts the counts below it back when it is left.

    TensorFlow's rule: after a scope that was given by name they are 0; after a scope object that
    was opened ``again`` all counts are what they were before.
    """
    counts = _count_openings()
    counts[name] = counts.get(name, 0) + 1
    before = dict(counts) if again else None
    try:
        yield
    finally:
        if before is None:
            for key in [k for k in counts if k.startswith(f"{name}/")]:
                del counts[key]
        else:
            counts.clear()
            counts.update(before)


def _find_unique(prefix: str, name: str) -> str:
    """Returns ``name``, with the first number that gives the name of a scope without a count."""
    counts = _count_openings()
    candidate, number = name, 0
    while counts.get(prefix + candidate, 0):
        number += 1
        candidate = f"{name}_{number}"
    return candidate


@public.add()
def variable_op_scope(
    values: rt.TensorLike,
    name_or_scope: Any,
    default_name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls ``variable_scope``, with the argument order of before 1.0."""
    return variable_scope(name_or_scope, default_name, values, *args, **kwargs)


@public.add()
def get_variable(
    name: str,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    initializer: Any = None,
    regularizer: Regularizer | None = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    caching_device: object = None,
    partitioner: Partitioner | None = None,
    validate_shape: bool = True,
    use_resource: object = None,
    custom_getter: Callable[..., Any] | None = None,
) -> Any:
    """Makes the variable ``scope/name``, or finds it where the scope says so.

    Without an initializer here or in the scope, floating point variables begin by Glorot's uniform
    initializer, all others with zeros. An initial value keeps its own dtype.
    """
    scope = get_variable_scope()
    getter = custom_getter or scope.custom_getter
    options = dict(
        shape=shape,
        dtype=dtype,
        initializer=initializer,
        regularizer=regularizer,
        trainable=trainable,
        collections=collections,
        partitioner=scope.partitioner if partitioner is None else partitioner,
    )
    full = f"{scope.name}/{name}" if scope.name else name
    # TensorFlow gives a custom getter the full name, and takes the name that the getter passes on
    # as it is.
    if getter is not None:
        return getter(
            lambda name, **kw: _get_or_make(scope, name, **(options | kw)), full, **options
        )
    return _get_or_make(scope, full, **options)


@public.add()
def get_local_variable(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls ``get_variable`` for a variable of which each session has a copy; collections are not taken."""
    # A local variable is never trained: each session would train its own copy.
    collections = [*(kwargs.pop("collections", None) or ()), rt.GraphKeys.LOCAL_VARIABLES]
    return get_variable(name, *args, **(kwargs | {"collections": collections, "trainable": False}))


def _get_or_make(
    scope: VariableScope,
    full: str,
    shape: object = None,
    dtype: object = None,
    initializer: object = None,
    regularizer: Regularizer | None = None,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    partitioner: Partitioner | None = None,
    **unused: Any,
) -> Any:
    variables = _made.setdefault(rt.get_default_graph(), {})
    wanted = as_dtype(scope.dtype if dtype is None else dtype).dtype
    sizes = None
    if shape is not None:
        listed = [shape] if isinstance(shape, int) else shape
        sizes = static_number(listed, f"{full}: the shape")
    # Names are looked up by graph, so that two graphs may have variables of one name.
    found = variables.get(full)
    if found is not None:
        if not scope.reuse:
            raise ValueError(
                f"Variable {full} already exists, disallowed. Did you mean to set reuse=True in "
                "variable_scope?"
            )
        return _check_found(found, full, sizes, wanted if dtype is not None else None)
    if scope.reuse is True:
        raise ValueError(
            f"Variable {full} does not exist, or was not created with tf.get_variable(). Did you "
            "mean to set reuse=None in variable_scope?"
        )
    initializer = scope.initializer if initializer is None else initializer
    # A scalar is never divided.
    if partitioner is not None and sizes != []:
        if sizes is None or None in sizes:
            raise ValueError(
                f"variable {full}: a partitioned variable needs a fully defined shape and an "
                "initializer that is a function"
            )

        def make_part(name: str, shape: tuple[int, ...], own: object) -> Any:
            # Each part is a variable that reuse finds by the part's own name.
            return _get_or_make(
                scope, name, shape, wanted, own, regularizer, trainable, collections
            )

        counts = count_parts(partitioner, sizes, wanted)
        whole = make_parts(full, sizes, counts, initializer, make_part)
        variables[full] = whole
        return whole
    made = _make_variable(full, sizes, wanted, initializer, trainable, collections)
    variables[full] = made
    chosen = scope.regularizer if regularizer is None else regularizer
    if chosen is not None:
        # The slash at the end re-enters exactly this name scope, as TensorFlow does.
        with rt.name_scope(f"{full}/Regularizer/"):
            loss = chosen(made)
        if loss is not None:
            rt.get_default_graph().add_to_collection(REGULARIZATION_LOSSES, loss)
    return made


def _check_found(found: Any, full: str, sizes: Any, dtype: DTypeLike | None) -> Any:
    if sizes is not None and not TensorShape(found.shape).is_compatible_with(sizes):
        raise ValueError(
            f"Trying to share variable {full}, but specified shape {tuple(sizes)} and found shape "
            f"{found.shape}."
        )
    if dtype is not None and found.dtype != dtype:
        raise ValueError(
            f"Trying to share variable {full}, but specified dtype {dtype} and found dtype "
            f"{found.dtype}."
        )
    return found


def _make_variable(
    full: str,
    sizes: Any,
    dtype: rt.lowlevel.DType,
    initializer: Any,
    trainable: bool,
    collections: Sequence[str] | None,
) -> Any:
    if initializer is None:
        # numpy does not count bfloat16 among the floating point types.
        floating = dtype.kind == "f" or dtype.name == "bfloat16"
        if not floating and dtype.kind not in "iub":
            raise ValueError(f"variable {full} of dtype {dtype} needs an initializer")
        # TensorFlow 1.1 and later: Glorot's initializer for floating point, zeros for integers and
        # bools.
        initializer = glorot_uniform_initializer() if floating else zeros_initializer()
    value: Any = initializer
    # Programs give the class of an initializer, too: tf.zeros_initializer without parentheses.
    if isinstance(initializer, type):
        initializer = initializer()
    if callable(initializer) and not is_tensor(initializer):
        if sizes is None:
            raise ValueError(f"variable {full}: its shape must be given, the initializer needs it")
        if None in sizes:
            raise ValueError(f"variable {full}: shape {tuple(sizes)} is not fully defined")
        make = initializer
        value = lambda: make(sizes, dtype=dtype)  # noqa: E731 - called where the variable lives
    elif sizes is not None and not is_tensor(value):
        raise ValueError(f"variable {full}: give an initial value or a shape, not both")
    # The name of a variable has the variable scope and no name scope in front.
    with rt.name_scope(None):
        return Variable(
            value,
            trainable=trainable,
            collections=collections,
            name=full,
            dtype=dtype if callable(initializer) and not is_tensor(initializer) else None,
        )


@public.add()
def create_partitioned_variables(
    shape: ShapeLike,
    slicing: Sequence[int],
    initializer: Any,
    dtype: DTypeLike = np.float32,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    name: str | None = None,
    reuse: Any = None,
) -> list[Any]:
    """Makes a partitioned variable with ``slicing`` parts along each axis; returns the parts."""
    with variable_scope(name, "PartitionedVariable", reuse=reuse) as scope:
        whole = _get_or_make(
            scope,
            scope.name,
            shape=shape,
            dtype=dtype,
            initializer=initializer,
            trainable=trainable,
            collections=collections,
            partitioner=lambda **unused: slicing,
        )
        return list(whole)
