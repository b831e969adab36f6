"""``tf.Variable`` with TensorFlow's argument order, and functions that change variables or list them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import runtime as rt
from harness.tf1.ops.dtypes import as_dtype, to_array
from harness.tf1.ops.indices import check_known, literal
from harness.tf1.ops.lift import Public, constant, holds_tensors, is_tensor, operand
from harness.tf1.ops.shapes import TensorShape

public = Public("tf", "Variables")


class _AnyVariable(type):
    """The class that makes ``isinstance(v, tf.Variable)`` true for every variable."""

    def __instancecheck__(cls, instance: object) -> bool:
        # Programs ask this of variables that the runtime has made, such as the slots of optimizers.
        return isinstance(type(instance), _AnyVariable) or isinstance(instance, rt.Variable)


@public.add()
class Variable(rt.Variable, metaclass=_AnyVariable):
    """A variable, by TensorFlow's arguments.

    With ``LOCAL_VARIABLES`` among its collections, each session has a copy of its own.
    """

    def __init__(
        self,
        initial_value: rt.TensorLike | None = None,
        trainable: bool = True,
        collections: Sequence[str] | None = None,
        validate_shape: bool = True,
        caching_device: object = None,
        name: str | None = None,
        variable_def: object = None,
        dtype: DTypeLike | None = None,
        expected_shape: object = None,
        import_scope: str | None = None,
    ) -> None:
        if initial_value is None:
            raise ValueError("initial_value must be specified.")
        if not validate_shape:
            raise ValueError(
                f"variable {name!r}: validate_shape=False is not possible: a variable has one "
                "static shape"
            )
        wanted = None if dtype is None else as_dtype(dtype).dtype
        if not is_tensor(initial_value) and not callable(initial_value):
            initial_value = to_array(initial_value, wanted, name or "Variable")
            wanted = wanted or initial_value.dtype
        local = collections is not None and rt.GraphKeys.LOCAL_VARIABLES in collections
        super().__init__(
            initial_value,
            name=name,
            dtype=wanted,
            trainable=trainable,
            collections=collections,
            local=local,
        )
        if expected_shape is not None and not TensorShape(self.shape).is_compatible_with(
            expected_shape
        ):
            raise ValueError(
                f"variable {self.name!r}: expected shape {expected_shape}, got {self.shape}"
            )

    def _ref(self) -> Variable:
        return self

    def assign(  # type: ignore[override]
        self, value: rt.TensorLike, use_locking: object = False, name: str | None = None
    ) -> rt.Tensor:
        """Replaces the value; gives the new value. Updates are atomic in any case."""
        return super().assign(_as_value(value, self), _find_name(use_locking, name))

    def assign_add(  # type: ignore[override]
        self, delta: rt.TensorLike, use_locking: object = False, name: str | None = None
    ) -> rt.Tensor:
        """Adds; gives the new value."""
        return super().assign_add(_as_value(delta, self), _find_name(use_locking, name))

    def assign_sub(  # type: ignore[override]
        self, delta: rt.TensorLike, use_locking: object = False, name: str | None = None
    ) -> rt.Tensor:
        """Subtracts; gives the new value."""
        return super().assign_sub(_as_value(delta, self), _find_name(use_locking, name))

    def load(self, value: rt.TensorLike, session: rt.Session | None = None) -> None:
        """Assigns a value in ``session`` or the default session, without adding to the graph."""
        chosen = session or rt.get_default_session()
        if chosen is None:
            raise ValueError(
                f"loading {self.name!r} needs a session: give one, or use 'with tf.Session():'"
            )
        # The initializer is there already, so that a final graph can load values too.
        chosen.run(self.initializer, {self.initial_value: to_array(value, self.dtype)})


def _find_name(use_locking: object, name: str | None) -> str | None:
    """Returns the name: callers of ``rt`` give it second, callers of TensorFlow give a bool there."""
    return use_locking if isinstance(use_locking, str) else name


def _as_value(value: rt.TensorLike, variable: rt.Variable) -> Any:
    """Returns a literal by the variable's dtype.

    Raises TypeError for a tensor of a different dtype.
    """
    if is_tensor(value):
        if value.dtype != variable.dtype:
            mine, other = as_dtype(variable.dtype).name, as_dtype(value.dtype).name
            raise TypeError(
                f"variable {variable.name!r} is {mine}, and {value.name!r} is {other}: use tf.cast"
            )
        return value
    if variable.dtype.hasobject:
        return value
    # The default graph may be another one, as in a function that changes the variables of a model.
    with variable.graph.as_default():
        return constant(value, variable.dtype)


@public.add()
def assign(
    ref: Any,
    value: rt.TensorLike,
    validate_shape: object = None,
    use_locking: object = None,
    name: str | None = None,
) -> Any:
    """Returns ``ref.assign(value)``."""
    return rt.assign(ref, _as_value(value, ref), name)


@public.add()
def assign_add(
    ref: Any, value: rt.TensorLike, use_locking: object = None, name: str | None = None
) -> Any:
    """Returns ``ref.assign_add(value)``: atomic, on the variable's task."""
    return rt.assign_add(ref, _as_value(value, ref), name)


@public.add()
def assign_sub(
    ref: Any, value: rt.TensorLike, use_locking: object = None, name: str | None = None
) -> Any:
    """Returns ``ref.assign_sub(value)``: atomic, on the variable's task."""
    return rt.assign_sub(ref, _as_value(value, ref), name)


_ROW_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda rows, given: rows.set(given),
    "add": lambda rows, given: rows.add(given),
    "sub": lambda rows, given: rows.add(-given),
    "mul": lambda rows, given: rows.multiply(given),
    "div": lambda rows, given: _divide_rows(rows, given),
    "min": lambda rows, given: rows.min(given),
    "max": lambda rows, given: rows.max(given),
}
"""End of the name of a ``tf.scatter_`` function -> the change of ``array.at[rows]`` by the given rows."""


def _divide_rows(rows: Any, given: Any) -> Any:
    found = rows.get()
    # Integers are cut towards zero; of two quotients for one row, the last one stays.
    if found.dtype.kind in "iu":
        return rows.set(jax.lax.div(found, jnp.broadcast_to(given, found.shape)))
    return rows.divide(given)


def _add_scatter(kind: str, change_rows: Callable[[Any, Any], Any]) -> None:
    def scatter(
        ref: rt.Variable,
        indices: Any,
        updates: Any,
        use_locking: object = None,
        name: str | None = None,
    ) -> rt.Tensor:
        def change(value: Any, where: Any, what: Any) -> Any:
            return change_rows(value.at[where], what)

        # Lists of tensors are packed.
        given = operand(updates) if holds_tensors(updates) else updates
        given = _as_value(given, ref) if is_tensor(given) else to_array(given).astype(ref.dtype)
        places = operand(indices) if holds_tensors(indices) else indices
        places = places if is_tensor(places) else to_array(places)
        rows, what = ref.shape[0], f"scatter_{kind} of {ref.op.name!r}"
        check_known(indices, rows, what)
        checks = []
        # A compiled program cannot raise, so a check of its own runs before the variable is changed.
        if literal(indices) is None:
            inside = rt.call(lambda i: (i >= 0) & (i < rows), places, name=f"scatter_{kind}_inside")
            checks = [rt.check(inside, f"{what}: not all in [0, {rows}): ", [places])]
        with rt.control_dependencies(checks):
            return ref.update(change, places, given, name=name or f"Scatter{kind.capitalize()}")

    public.define(
        f"scatter_{kind}",
        scatter,
        f"``ref.update`` of the rows ``indices``: {kind}, in one atomic step; gives the new value. "
        "InvalidArgumentError, and nothing is changed, when one of them is no row.",
    )


for _kind, _change in _ROW_CHANGES.items():
    _add_scatter(_kind, _change)


@public.add()
def moving_average_variables() -> list[Any]:
    """Returns the variables that have a moving average."""
    return rt.get_default_graph().get_collection("moving_average_variables")


@public.add()
def model_variables() -> list[Any]:
    """Returns the variables of the collection "model_variables"."""
    return rt.get_default_graph().get_collection("model_variables")


@public.add("initialize_all_tables", "tables_initializer")
def no_tables(name: str | None = "init_all_tables") -> rt.Operation:
    """Returns an operation that does nothing: there are no lookup tables to initialise."""
    return rt.no_op(name)


public.update(
    {
        "all_variables": rt.global_variables,
        "initialize_all_variables": rt.global_variables_initializer,
        "initialize_local_variables": rt.local_variables_initializer,
        "initialize_variables": rt.variables_initializer,
    }
)
for _same in (
    "global_variables",
    "global_variables_initializer",
    "is_variable_initialized",
    "local_variables",
    "local_variables_initializer",
    "report_uninitialized_variables",
    "trainable_variables",
    "variables_initializer",
):
    public.update({_same: getattr(rt, _same)})
