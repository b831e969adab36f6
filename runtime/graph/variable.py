"""Variables: named mutable arrays on one task, shared by every session of the cluster."""

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
from runtime.graph.placement import fixed_device
from runtime.tensor_spec import AnyArray, DType, dtype_name, shape_fits


class Variable(Operators[Tensor]):
    """A named mutable array on one task of the cluster.

    The name and the device are the identity of a variable. Two sessions, or two graphs, with a
    variable of the same name on the same device share its value. A variable ``w`` adds the
    operations ``w`` (its value), ``w/initial_value``, ``w/Assign`` (its initialiser) and
    ``w/read``.

    Arithmetic and ``rt.call`` take a variable for its value ``w/read``, which a step reads once.
    Under ``control_dependencies`` the value is a new read, after the operations of the
    dependencies: ``with rt.control_dependencies([train_op]): after = rt.identity(w)`` is the
    trained value. Operations under the same dependencies share one read.

    Args:
        initial_value: An array, number, string or tensor, or a function without arguments that
            makes an initial value. The function is called on the variable's device, so a random
            value is drawn on the variable's task.
        name: Name, made unique in the graph; "Variable" by default.
        dtype: Wanted dtype.
        trainable: True if optimizers update the variable by default.
        collections: Collections for the variable; by default the global variables (and the
            trainable variables).
        local: True to keep the variable on the session's own task, not on a shared task (TF1's
            local variables).
        container: Named container of the store. Sessions can clear one container and keep all other
            variables.

    Raises:
        InvalidArgumentError: The initial value has no fully known shape.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     weights = rt.Variable([1.0, 2.0], name="weights")
        ...     step = weights.assign_add([0.5, 0.5])
        ...     session.run(weights.initializer)
        ...     session.run(step).tolist()
        [1.5, 2.5]
    """

    save_slice_info: Any = None
    """The whole array in checkpoints of which the variable is a slice (``harness.partitioned``); None for no slice."""

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
        # A variable outlives each step, so its operations wait for none.
        with graph.control_dependencies(None):
            # The name is taken now, so that another thread gets another name.
            full = graph.unique_name(name or "Variable")
            self.spec = VariableSpec(full, static, wanted, container, local)
            self.op = graph.add_operation(
                "Variable", Read(self.spec), outputs=[(static, wanted)], name=full + "/"
            )
            """The operation ``w``."""
            with graph.name_scope(full + "/"):
                with fixed_device(self.op.device):
                    value = initial_value() if callable(initial_value) else initial_value
                    self.initial_value = self._initial_tensor(value, wanted)
                self.initializer = self._make_update(
                    "Assign",
                    None,
                    _replace,
                    self.initial_value,
                    overwrites=True,
                ).op
                """The operation ``w/Assign``, which gives the variable its initial value."""
                self._snapshot = identity(self.op.outputs[0], "read", colocate_with=self.op)
        self._reads_after: dict[tuple[Operation, ...], Tensor] = {}
        self.trainable = trainable
        if collections is None:
            collections = [GraphKeys.LOCAL_VARIABLES if local else GraphKeys.GLOBAL_VARIABLES]
        # TensorFlow 1 adds a variable to the trainable variables also beside other collections.
        # A local variable belongs to one worker, so no optimizer of the cluster updates it.
        if trainable and not local and GraphKeys.TRAINABLE_VARIABLES not in collections:
            collections = [*collections, GraphKeys.TRAINABLE_VARIABLES]
        for key in collections:
            graph.add_to_collection(key, self)

    def _initial_tensor(self, value: TensorLike, wanted: DType) -> Tensor:
        if isinstance(value, Operators):
            tensor = as_tensor(value)
            if tensor.dtype != wanted:
                raise InvalidArgumentError(
                    f"variable {self.spec.name!r}: initial value {tensor.name!r} is "
                    f"{dtype_name(tensor.dtype)}, not {dtype_name(wanted)}"
                )
            return identity(tensor, "initial_value", colocate_with=self.op)
        return constant(
            value, wanted, shape=None if np.ndim(value) else self.spec.shape, name="initial_value"
        )

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Returns ``w:0``, the name of the tensor of the variable's value."""
        return self.op.outputs[0].name

    @property
    def graph(self) -> Graph:
        """Returns the graph in which the variable was made."""
        return self.op.graph

    @property
    def device(self) -> str:
        """Returns the requested device, or ``""``."""
        return self.op.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the static shape."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        """Returns the dtype; ``object`` for strings."""
        return self.spec.dtype

    def value(self) -> Tensor:
        """Returns the variable's tensor for arithmetic.

        The tensor is ``w/read``, or a read after the open ``control_dependencies``.
        """
        before = self.graph.under_control
        if not before:
            return self._snapshot
        # Operations under the same dependencies share the read, as arithmetic does elsewhere.
        # The read is named from the top, since operations of several scopes share it.
        if before not in self._reads_after:
            with self.graph.name_scope(None):
                self._reads_after[before] = self._make_read(f"{self.op.name}/read")
        return self._reads_after[before]

    def read_value(self) -> Tensor:
        """Makes a read of its own, shared with no other operation.

        Under ``control_dependencies`` the read comes after the operations of the dependencies.
        """
        return self._make_read(f"{self.op.name.rsplit('/', 1)[-1]}/ReadVariable")

    def _make_read(self, name: str) -> Tensor:
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
        """Returns the value if the variable is initialised, else the initial value.

        So an initial value can depend on another variable, and the initialisers of both need no
        order.
        """
        op = self.graph.add_operation(
            "InitializedValue",
            Host("value_or", _describe_spec(self.spec), resource=self.spec.name),
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
        """Replaces the value, and returns the new value. The variable needs no value before."""
        return self._make_update("Assign", name, _replace, value, overwrites=True)

    def assign_add(self, delta: TensorLike, name: str | None = None) -> Tensor:
        """Adds ``delta`` in one atomic step on the variable's task, and returns the new value."""
        return self._make_update("AssignAdd", name, _add, delta)

    def assign_sub(self, delta: TensorLike, name: str | None = None) -> Tensor:
        """Subtracts ``delta`` in one atomic step on the variable's task, and returns the new value."""
        return self._make_update("AssignSub", name, _subtract, delta)

    def update(
        self, fn: Callable[..., AnyArray], *inputs: TensorLike, name: str | None = None
    ) -> Tensor:
        """Replaces the value by ``fn(value, *inputs)`` in one atomic step, and returns the new value.

        Args:
            fn: A JAX function. Its result has the variable's shape and dtype.
            *inputs: Tensors, variables or arrays.
            name: Operation name.

        Examples:
            >>> import jax
            >>> import runtime as rt
            >>> with rt.Graph().as_default(), rt.Session() as session:
            ...     best = rt.Variable(3.0)
            ...     session.run(best.initializer)
            ...     print(session.run(best.update(jax.numpy.maximum, 5.0)))
            5.0
        """

        def replace_value(*arrays: jax.Array) -> tuple[list[AnyArray], list[AnyArray]]:
            new = fn(*arrays)
            return [new], [new]

        return update(
            [self], replace_value, inputs, outputs=[(self.shape, self.dtype)], name=name or "Update"
        ).outputs[0]

    def _make_update(
        self, kind: str, name: str | None, fn: ArrayFn, value: TensorLike, overwrites: bool = False
    ) -> Tensor:
        # A constant is made on the variable's device, so that no stage on another task is needed.
        with Graph.of(self, value).as_default(), fixed_device(self.op.device):
            if is_tensor(value):
                tensor = as_tensor(value)
            else:
                tensor = constant(value, self.dtype, name=f"{kind}/value")
        _check_fits(self, tensor)
        if self.dtype.hasobject and not overwrites:
            raise InvalidArgumentError(
                f"variable {self.spec.name!r} holds strings: {kind} works on numbers only"
            )
        # Strings live outside of XLA, so a host kernel assigns a string variable.
        op = self.graph.add_operation(
            kind,
            Host("assign", _describe_spec(self.spec), True, self.spec.name)
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
        variables: Variables on one device, at least one.
        fn: A JAX function, ``fn(*values, *inputs) -> (new values, outputs)``.
        inputs: Tensors, variables or arrays.
        outputs: (shape, dtype) of the outputs besides the new values.
        name: Operation name.

    Raises:
        InvalidArgumentError: no variables, or variables on different devices.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     a, b = rt.Variable(1.0), rt.Variable(2.0)
        ...     swap = rt.update([a, b], lambda x, y: ([y, x], [x + y]), [], outputs=[((), "float32")])
        ...     session.run([a.initializer, b.initializer])
        ...     print(session.run(swap.outputs[0]), *session.run([a, b]))
        [None, None]
        3.0 2.0 1.0
    """
    if not variables:
        raise InvalidArgumentError(f"{name}: no variables to update")
    # An update is atomic on one task, and no lock spans two tasks.
    devices = sorted({v.device for v in variables})
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"{name}: one update works on one device, these variables are on {devices}"
        )
    specs = tuple(v.spec for v in variables)

    def update_values(*arrays: jax.Array) -> tuple[AnyArray, ...]:
        new, out = fn(*arrays)
        return (*new, *out)

    with Graph.of(*variables, *inputs).as_default() as graph:
        tensors = [as_tensor(i) for i in inputs]
    return graph.add_operation(
        name.rsplit("/", 1)[-1],
        Update(specs, update_values),
        tensors,
        [(tuple(s), as_dtype(d)) for s, d in outputs],
        name=name,
        colocate_with=variables[0].op,
    )


# JAX keeps the trace of a function object, so the variables of one shape share one trace.
def _replace(new: AnyArray) -> tuple[AnyArray, AnyArray]:
    return new, new


def _add(old: AnyArray, delta: AnyArray) -> tuple[AnyArray, AnyArray]:
    return (old + delta,) * 2


def _subtract(old: AnyArray, delta: AnyArray) -> tuple[AnyArray, AnyArray]:
    return (old - delta,) * 2


def _check_fits(variable: Variable, tensor: Tensor) -> None:
    if tensor.dtype != variable.dtype:
        raise InvalidArgumentError(
            f"variable {variable.spec.name!r} holds {dtype_name(variable.dtype)}, but "
            f"{tensor.name!r} is {dtype_name(tensor.dtype)}: cast it with rt.numpy.astype"
        )
    if tensor.shape is not None and not shape_fits(tensor.shape, variable.shape):
        raise InvalidArgumentError(
            f"variable {variable.spec.name!r} has shape {variable.shape}, but {tensor.name!r} has "
            f"shape {tensor.shape}"
        )


def _describe_spec(spec: VariableSpec) -> Attrs:
    """Returns the attributes of a variable for a host kernel."""
    return {"variable": spec.name, "container": spec.container, "local": spec.local}


def _static_spec(
    value: TensorLike | Callable[[], TensorLike], dtype: DTypeLike | None, name: str
) -> tuple[tuple[int, ...] | None, DType]:
    """Returns shape and dtype of an initial value without making operations.

    The shape is None for a function, which must be called first.
    """
    if callable(value) and not is_tensor(value):
        return None, np.dtype(np.float32)
    if is_tensor(value):
        tensor = as_tensor(value)
        if tensor.shape is None or None in tensor.shape:
            raise InvalidArgumentError(
                f"variable {name!r}: the shape {tensor.shape} of its initial value is not fully "
                "known"
            )
        return tuple(
            d for d in tensor.shape if d is not None
        ), tensor.dtype if dtype is None else as_dtype(dtype)
    array = as_array(value, dtype, f"variable {name!r}")
    return array.shape, array.dtype


def _call_elsewhere(
    make: Callable[[], TensorLike], dtype: DTypeLike | None, name: str
) -> tuple[tuple[int, ...], DType]:
    """Finds the shape of ``make()`` by a call in a scratch graph.

    The real call happens on the variable's device.
    """
    # The operations of this call must not stay in the graph. A subclass of Graph may have methods
    # that the function calls.
    with type(get_default_graph())().as_default():
        static, wanted = _static_spec(make(), dtype, name)
    if static is None:
        raise InvalidArgumentError(
            f"variable {name!r}: its initial value is a function that gives a function"
        )
    return static, wanted


def variables(
    tree: object,
    name: str,
    *,
    trainable: bool = True,
    collections: Sequence[str] | None = None,
    container: str = "",
) -> Any:
    """Makes a pytree of variables from a pytree of arrays.

    The path in the tree is the name: ``mlp/layer1/w``.

    Args:
        tree: Pytree of arrays, or of functions without arguments that make tensors.
        name: First part of all names.
        trainable: True if optimizers update the variables by default.
        collections: Collections for the variables, as in ``Variable``.
        container: Named container of the store.

    Examples:
        >>> import numpy as np
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     made = rt.variables({"layer1": {"w": np.ones((2, 2)), "b": np.zeros(2)}}, "mlp")
        >>> made["layer1"]["w"].name
        'mlp/layer1/w:0'
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
    """Returns the name of a variable of ``variables``.

    Args:
        name: Name of the tree.
        path: Path of the leaf, as of ``jax.tree_util``.
    """
    return "/".join([*([name] if name else []), *(_key_name(key) for key in path)])


def _key_name(key: object) -> str:
    """Converts a part of a tree's path to a part of a name.

    A character outside the rules for names (as in Haiku's ``mlp/~/linear``) becomes ``_``.
    """
    # JAX has a class of keys for each of dicts, attributes, sequences and other containers.
    told = next(
        (
            getattr(key, attribute)
            for attribute in ("key", "name", "idx")
            if hasattr(key, attribute)
        ),
        key,
    )
    return re.sub(r"[^A-Za-z0-9_.\\/\-]", "_", str(told))


# TensorFlow 1 has these three as functions, too.
def assign(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign(value)``.

    Args:
        ref: The variable.
        value: The new value.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     print(session.run(rt.assign(rt.Variable(1.0), 4.0)))
        4.0
    """
    return ref.assign(value, name)


def assign_add(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign_add(value)``.

    Args:
        ref: The variable.
        value: The number or array to add.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     count = rt.Variable(1)
        ...     session.run(count.initializer)
        ...     print(session.run(rt.assign_add(count, 4)))
        5
    """
    return ref.assign_add(value, name)


def assign_sub(ref: Variable, value: TensorLike, name: str | None = None) -> Tensor:
    """Calls ``ref.assign_sub(value)``.

    Args:
        ref: The variable.
        value: The number or array to subtract.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     left = rt.Variable(9)
        ...     session.run(left.initializer)
        ...     print(session.run(rt.assign_sub(left, 4)))
        5
    """
    return ref.assign_sub(value, name)
