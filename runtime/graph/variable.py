"""Variables: named mutable arrays that live on one task and are shared by every session of the cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, GraphKeys, Operation, SessionLike, Tensor, get_default_graph
from runtime.graph.op_kinds import ArrayFn, Attrs, Host, Read, Update, VariableSpec
from runtime.graph.operators import Operators, TensorLike
from runtime.graph.ops import as_array, as_dtype, as_tensor, constant, identity, is_tensor
from runtime.tensor_spec import AnyArray, DType, dtype_name, shape_fits


class Variable(Operators[Tensor]):
    """A named mutable array on one task of the cluster.

    The name and the device are its identity: two sessions, or two graphs, that make a variable of the same name on
    the same device share its value. A variable ``w`` adds the operations ``w`` (its value), ``w/initial_value``,
    ``w/Assign`` (its initialiser) and ``w/read``.

    Arithmetic and ``rt.call`` take a variable for its value: ``w/read``, which a step reads once. Under
    ``control_dependencies`` that is a new read, after the operations it names, as with every operation that is made
    there: ``with rt.control_dependencies([train_op]): after = rt.identity(w)`` is the trained value. What is made under
    the same dependencies shares one read.

    Args:
        initial_value: array, number, string, tensor, or a function of no arguments that makes one of these (it is
            called on the variable's device, so that a random initial value is drawn where it will live).
        name: "Variable" by default; made unique in its graph.
        dtype: wanted dtype.
        trainable: whether optimizers update it by default.
        collections: collections to add it to; by default the global variables (and the trainable ones).
        local: keep it on the session's own task, not on a task that all share (TF1's local variables).
        container: named container of the store; sessions can clear one container and keep the others.

    Raises:
        InvalidArgumentError: the initial value has no fully known shape.
    """

    save_slice_info: Any = None
    """The array in checkpoints that it is a slice of (``harness.partitioned``); None: an array of its own."""

    def __init__(
        self,
        initial_value: TensorLike | Callable[[], TensorLike],
        *,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        trainable: bool = True,
        collections: Sequence[str] | None = None,
        local: bool = False,
        container: str = "",
    ) -> None:
        graph = get_default_graph()
        static, wanted = _static_spec(initial_value, dtype, name or "Variable")
        # The shape of a function's value shows only when the function is called.
        if callable(initial_value) and static is None:
            static, wanted = _call_elsewhere(initial_value, dtype, name or "Variable")
        assert static is not None
        with graph.control_dependencies(None):
            # The name is taken now, so that another thread gets another name.
            full = graph.unique_name(name or "Variable")
            self.spec = VariableSpec(full, static, wanted, container, local)
            self.op = graph.add_operation("Variable", Read(self.spec), outputs=[(static, wanted)], name=full + "/")
            """The operation ``w``."""
            with graph.name_scope(full + "/"):
                with graph.device(lambda op: self.op.device):
                    value = initial_value() if callable(initial_value) else initial_value
                    self.initial_value = self._initial_tensor(value, wanted)
                self.initializer = self._update(
                    "Assign", None, lambda value: (value, value), self.initial_value, overwrites=True
                ).op
                """The operation ``w/Assign``, which gives the variable its initial value."""
                self._snapshot = identity(self.op.outputs[0], "read", colocate_with=self.op)
        self._reads_after: dict[tuple[Operation, ...], Tensor] = {}
        self.trainable = trainable
        if collections is None:
            collections = [GraphKeys.LOCAL_VARIABLES if local else GraphKeys.GLOBAL_VARIABLES]
        if trainable and not local and GraphKeys.TRAINABLE_VARIABLES not in collections:
            collections = [*collections, GraphKeys.TRAINABLE_VARIABLES]
        for key in collections:
            graph.add_to_collection(key, self)

    def _initial_tensor(self, value: TensorLike, wanted: DType) -> Tensor:
        if isinstance(value, Operators):
            tensor = as_tensor(value)
            if tensor.dtype != wanted:
                raise InvalidArgumentError(
                    f"variable {self.spec.name!r}: initial value {tensor.name!r} is {dtype_name(tensor.dtype)}, "
                    f"not {dtype_name(wanted)}"
                )
            return identity(tensor, "initial_value", colocate_with=self.op)
        return constant(value, wanted, shape=None if np.ndim(value) else self.spec.shape, name="initial_value")

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Returns ``w:0``, the name of the tensor that is the variable's value."""
        return self.op.outputs[0].name

    @property
    def graph(self) -> Graph:
        """Returns the graph in which the variable was made."""
        return self.op.graph

    @property
    def device(self) -> str:
        """Returns the device that was asked for, or ``""``."""
        return self.op.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the static shape."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """Returns the dtype; ``object`` for strings."""
        return self.spec.dtype

    def initialize_from(self, value: TensorLike) -> None:
        """Makes the initialiser give ``value`` from now on: an array or tensor of the variable's shape and dtype.

        Operations that were made of the old initialiser (an ``init`` group) are not changed.
        """
        graph = self.graph
        with graph.as_default(), graph.control_dependencies(None), graph.name_scope(self.op.name + "/"):
            self.initializer = self.assign(value, name="Assign").op

    def value(self) -> Tensor:
        """Returns the tensor that stands for the variable in arithmetic.

        This is ``w/read``, or a read after the open ``control_dependencies``.
        """
        before = self.graph.under_control
        if not before:
            return self._snapshot
        if before not in self._reads_after:
            with self.graph.name_scope(None):
                self._reads_after[before] = self._read(f"{self.op.name}/read")
        return self._reads_after[before]

    def read_value(self) -> Tensor:
        """Makes a read that shares nothing with other reads.

        Under ``control_dependencies`` the read comes after those operations.
        """
        return self._read(f"{self.op.name.rsplit('/', 1)[-1]}/ReadVariable")

    def _read(self, name: str) -> Tensor:
        graph = self.graph
        op = graph.add_operation(
            "ReadVariable",
            Read(self.spec),
            outputs=[(self.spec.shape, self.spec.dtype)],
            name=name,
            colocate_with=self.op,
        )
        return op.outputs[0]

    def initialized_value(self) -> Tensor:
        """Returns the value if the variable has one, else the initial value.

        For initial values that depend on other variables' initial values: the initialisers then need no order.
        """
        op = self.graph.add_operation(
            "InitializedValue",
            Host("value_or", _attrs(self.spec), resource=self.spec.name),
            [self.initial_value],
            [(self.spec.shape, self.spec.dtype)],
            name=f"{self.op.name}/initialized_value",
            colocate_with=self.op,
        )
        return op.outputs[0]

    def _as_tensor(self) -> Tensor:
        return self.value()

    def _as_graph_element(self) -> Tensor:
        return self.op.outputs[0]

    def __repr__(self) -> str:
        at = f" device={self.device!r}" if self.device else ""
        return f"<Variable {self.name!r} shape={self.shape} dtype={dtype_name(self.dtype)}{at}>"

    def eval(self, session: SessionLike | None = None) -> Any:
        """Returns the value in ``session`` or in the default session."""
        return self.op.outputs[0].eval(session=session)

    # -- changing it -------------------------------------------------------------------------------------------

    def assign(self, value: TensorLike, name: str | None = None) -> Tensor:
        """Replaces the value; gives the new value. Needs no initialised variable."""
        return self._update("Assign", name, lambda new: (new, new), value, overwrites=True)

    def assign_add(self, delta: TensorLike, name: str | None = None) -> Tensor:
        """Adds ``delta`` in one atomic step on the variable's task; returns the new value."""
        return self._update("AssignAdd", name, lambda old, d: (old + d,) * 2, delta)

    def assign_sub(self, delta: TensorLike, name: str | None = None) -> Tensor:
        """Subtracts ``delta`` in one atomic step on the variable's task; returns the new value."""
        return self._update("AssignSub", name, lambda old, d: (old - d,) * 2, delta)

    def update(self, fn: Callable[..., AnyArray], *inputs: TensorLike, name: str | None = None) -> Tensor:
        """Replaces the value by ``fn(value, *inputs)`` in one atomic step on the variable's task; gives the new value.

        Args:
            fn: a JAX function; its result has the variable's shape and dtype.
            *inputs: tensors, variables or arrays.
            name: operation name.
        """

        def replaced(*arrays: jax.Array) -> tuple[list[AnyArray], list[AnyArray]]:
            new = fn(*arrays)
            return [new], [new]

        return update([self], replaced, inputs, outputs=[(self.shape, self.dtype)], name=name or "Update").outputs[0]

    def _update(self, kind: str, name: str | None, fn: ArrayFn, value: TensorLike, overwrites: bool = False) -> Tensor:
        with Graph.of(self, value).as_default(), self.graph.device(lambda op: self.op.device):
            if is_tensor(value):
                tensor = as_tensor(value)
            else:
                tensor = constant(value, self.dtype, name=f"{kind}/value")
        _check_fits(self, tensor)
        if self.dtype.hasobject and not overwrites:
            raise InvalidArgumentError(f"variable {self.spec.name!r} holds strings: {kind} works on numbers only")
        op = self.graph.add_operation(
            kind,
            Host("assign", _attrs(self.spec), True, self.spec.name)
            if self.dtype.hasobject
            else Update((self.spec,), fn, overwrites),
            [tensor],
            [(self.spec.shape, self.spec.dtype)],
            name=name or kind,
            colocate_with=self.op,
        )
        return op.outputs[0]


def update(
    variables: Sequence[Variable],
    fn: Callable[..., tuple[Sequence[AnyArray], Sequence[AnyArray]]],
    inputs: Sequence[TensorLike],
    *,
    outputs: Sequence[tuple[tuple[int, ...], DTypeLike]] = (),
    name: str = "Update",
) -> Operation:
    """Updates several variables of one task in one atomic read-modify-write.

    Optimizers are made of such updates.

    Args:
        variables: variables on one device, at least one.
        fn: ``fn(*values, *inputs) -> (new values, outputs)``, a JAX function.
        inputs: tensors, variables or arrays.
        outputs: (shape, dtype) of the outputs besides the new values.
        name: operation name.

    Raises:
        InvalidArgumentError: no variables, or variables on different devices.
    """
    if not variables:
        raise InvalidArgumentError(f"{name}: no variables to update")
    devices = sorted({v.device for v in variables})
    if len(devices) > 1:
        raise InvalidArgumentError(f"{name}: one update works on one device, these variables are on {devices}")
    specs = tuple(v.spec for v in variables)

    def body(*arrays: jax.Array) -> tuple[AnyArray, ...]:
        new, out = fn(*arrays)
        return (*new, *out)

    with Graph.of(*variables, *inputs).as_default() as graph:
        tensors = [as_tensor(i) for i in inputs]
    return graph.add_operation(
        name.rsplit("/", 1)[-1],
        Update(specs, body),
        tensors,
        [(tuple(s), as_dtype(d)) for s, d in outputs],
        name=name,
        colocate_with=variables[0].op,
    )


def _check_fits(variable: Variable, tensor: Tensor) -> None:
    if tensor.dtype != variable.dtype:
        raise InvalidArgumentError(
            f"variable {variable.spec.name!r} holds {dtype_name(variable.dtype)}, but {tensor.name!r} is "
            f"{dtype_name(tensor.dtype)}: cast it with rt.numpy.astype"
        )
    if tensor.shape is not None and not shape_fits(tensor.shape, variable.shape):
        raise InvalidArgumentError(
            f"variable {variable.spec.name!r} has shape {variable.shape}, but {tensor.name!r} has shape {tensor.shape}"
        )


def _attrs(spec: VariableSpec) -> Attrs:
    """Returns the attributes by which a host kernel finds a variable."""
    return {"variable": spec.name, "container": spec.container, "local": spec.local}


def _static_spec(
    value: TensorLike | Callable[[], TensorLike], dtype: DTypeLike | None, name: str
) -> tuple[tuple[int, ...] | None, DType]:
    """Returns shape and dtype of an initial value without making operations.

    The shape is None if only a call of the value can tell.
    """
    if callable(value) and not is_tensor(value):
        return None, np.dtype(np.float32)
    if is_tensor(value):
        tensor = as_tensor(value)
        if tensor.shape is None or None in tensor.shape:
            raise InvalidArgumentError(
                f"variable {name!r}: the shape {tensor.shape} of its initial value is not fully known"
            )
        return tuple(d for d in tensor.shape if d is not None), tensor.dtype if dtype is None else as_dtype(dtype)
    array = as_array(value, dtype, f"variable {name!r}")
    return array.shape, array.dtype


def _call_elsewhere(
    make: Callable[[], TensorLike], dtype: DTypeLike | None, name: str
) -> tuple[tuple[int, ...], DType]:
    """Learns the shape of ``make()`` by calling it in a scratch graph; the real call happens on its device."""
    with type(get_default_graph())().as_default():
        static, wanted = _static_spec(make(), dtype, name)
    if static is None:
        raise InvalidArgumentError(f"variable {name!r}: its initial value is a function that gives a function")
    return static, wanted


def variables(
    tree: object, name: str, *, trainable: bool = True, collections: Sequence[str] | None = None, container: str = ""
) -> Any:
    """Makes a pytree of variables from a pytree of arrays.

    The path in the tree is the name: ``mlp/layer1/w``.

    Args:
        tree: pytree of arrays (or functions of no arguments that make tensors).
        name: first part of all names.
        trainable: whether optimizers update them by default.
        collections: collections to add them to, as in ``Variable``.
        container: named container of the store.
    """
    paths, structure = jax.tree.flatten_with_path(tree)
    made = [
        Variable(
            leaf,
            name=path_name(name, path),
            trainable=trainable,
            collections=collections,
            container=container,
        )
        for path, leaf in paths
    ]
    return jax.tree.unflatten(structure, made)


def path_name(name: str, path: Sequence[object]) -> str:
    """Returns the name that ``variables`` gives to the leaf at ``path`` of a tree called ``name``.

    The path is as ``jax.tree_util`` gives it.
    """
    return "/".join([*([name] if name else []), *(_key_name(key) for key in path)])


def _key_name(key: object) -> str:
    """Converts a part of a tree's path to a part of a name.

    A character that no name may hold (Haiku's ``mlp/~/linear``) becomes ``_``.
    """
    told = next((getattr(key, attribute) for attribute in ("key", "name", "idx") if hasattr(key, attribute)), key)
    return re.sub(r"[^A-Za-z0-9_.\\/\-]", "_", str(told))


def assign(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign(value)``."""
    return ref.assign(value, name)


def assign_add(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign_add(value)``."""
    return ref.assign_add(value, name)


def assign_sub(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign_sub(value)``."""
    return ref.assign_sub(value, name)
