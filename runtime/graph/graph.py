"""Graph, Operation and Tensor: the description of a computation, built on the client without a network.

A session plans a step from a graph (``runtime/plan``). Nothing here runs a step or knows a task.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

from runtime import concurrency
from runtime.graph.op_kinds import Body, Nothing, Shape
from runtime.graph.operators import Operators, pick_item
from runtime.graph.placement import (
    DeviceScopes,
    OpInfo,
    OutputInfo,
    current_device,
    device,
    device_scopes,
    within_device_scopes,
)
from runtime.graph.tracing import x64_enabled
from runtime.tensor_spec import Array, DType, dtype_name

# TensorFlow 1's rule: the names become parts of event files and of checkpoints.
_VALID_NAME = re.compile(r"^[A-Za-z0-9.][A-Za-z0-9_.\\/\-]*$")


FeedDict: TypeAlias = Mapping[Any, object]
"""The values of a step's feeds, by tensor, variable or name.

A mapping has keys of one type, so the type is Any.
"""


@runtime_checkable
class SessionLike(Protocol):
    """A session: an object that runs the steps of a graph.

    A ``Session`` is such an object. The sessions of ``harness`` that recover lost tasks or call
    hooks wrap a session, and are no ``Session``. So a program asks
    ``isinstance(sess, rt.SessionLike)`` for both.
    """

    @property
    def graph(self) -> Graph:
        """The graph of the steps."""

    def run(
        self, fetches: object, feed_dict: FeedDict | None = None, *arguments: Any, **options: Any
    ) -> Any:
        """Runs one step and returns the values of ``fetches``.

        Further arguments are those of ``Session.run``.
        """


AnySession = TypeVar("AnySession", bound=SessionLike)
"""The type of a session that a function receives and returns."""


class GraphKeys:
    """Names of the standard collections (TF1's names and values)."""

    GLOBAL_VARIABLES = "variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    LOCAL_VARIABLES = "local_variables"
    SUMMARIES = "summaries"
    GLOBAL_STEP = "global_step"
    QUEUE_RUNNERS = "queue_runners"
    INIT_OP = "init_op"
    LOCAL_INIT_OP = "local_init_op"
    READY_OP = "ready_op"
    READY_FOR_LOCAL_INIT_OP = "ready_for_local_init_op"
    SUMMARY_OP = "summary_op"
    SAVERS = "savers"
    LOSSES = "losses"
    TABLES = "tables"
    CHECKS = "checks"


class Tensor(Operators["Tensor"]):
    """One output of an operation: a value that exists only in a running step.

    Attributes:
        op: the operation of the output.
        index: number among the operation's outputs.
        shape: static shape; ``None`` for a dimension (or a whole shape) without a static size.
        dtype: numpy dtype; ``object`` stands for strings.
    """

    __slots__ = ("op", "index", "shape", "dtype")
    shape: Shape | None
    dtype: DType

    def __init__(self, op: Operation, index: int, shape: Shape | None, dtype: DType) -> None:
        self.op = op
        self.index = index
        self.shape = shape
        self.dtype = dtype

    @property
    def name(self) -> str:
        """``operation:index``, the name for fetches and feeds by string."""
        return f"{self.op.name}:{self.index}"

    @property
    def graph(self) -> Graph:
        """The graph of the tensor."""
        return self.op.graph

    @property
    def device(self) -> str:
        """The requested device, merged from the scopes, or ``""``."""
        return self.op.device

    @property
    def ndim(self) -> int | None:
        """Number of dimensions, or None."""
        return None if self.shape is None else len(self.shape)

    def __repr__(self) -> str:
        return (
            f"<Tensor {self.name!r} shape={show_shape(self.shape)} dtype={dtype_name(self.dtype)}>"
        )

    # Python takes any object for true, so an `if` on a tensor would always take one branch.
    def __bool__(self) -> bool:
        raise TypeError(
            f"the value of {self.name!r} is known only when a step runs: use rt.numpy.where, or "
            "jax.lax.cond in rt.call"
        )

    # Numpy would take the tensor for a sequence, and add an operation for each element.
    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"{self.name!r} is a tensor of a graph, not an array: fetch it with Session.run"
        )

    def __len__(self) -> int:
        if not self.shape or self.shape[0] is None:
            raise TypeError(f"the length of {self.name!r} is not known before the step runs")
        return self.shape[0]

    # Without this method Python counts up an index until an IndexError, which a tensor of unknown
    # size never raises.
    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def eval(self, feed_dict: FeedDict | None = None, session: SessionLike | None = None) -> Any:
        """Runs the tensor in ``session`` or the default session and returns its value."""
        return _session_or_default(session, "Tensor.eval").run(self, feed_dict)


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Operation:
    """A node of the graph. Made by the functions of this package, never by hand.

    Attributes:
        name: unique in its graph.
        type: the kind of operation ("Placeholder", "Variable", "Assign", "matmul" ...), which
            device functions see.
        body: the work of the operation (see ``runtime.graph.op_kinds``).
        inputs: the input tensors.
        control_inputs: the operations that must run before.
        device: the requested device, merged from the scopes. The planner chooses the device that
            runs the operation.
        wide: True if JAX was in 64-bit mode when the operation was made. The function is then
            traced in that mode.
        outputs: the output tensors.
    """

    graph: Graph
    id: int
    name: str
    type: str
    body: Body
    inputs: tuple[Tensor, ...]
    control_inputs: tuple[Operation, ...]
    device: str
    wide: bool
    specs: InitVar[Sequence[tuple[Shape | None, DType]]]
    outputs: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self, specs: Sequence[tuple[Shape | None, DType]]) -> None:
        before = (*self.control_inputs, *(tensor.op for tensor in self.inputs))
        assert all(op.id < self.id for op in before), "the numbers are no topological order"
        self.outputs = tuple(Tensor(self, i, *spec) for i, spec in enumerate(specs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.graph.extra_attribute(self, name)

    def __repr__(self) -> str:
        at = f" device={self.device!r}" if self.device else ""
        return f"<Operation {self.name!r} type={self.type}{at}>"

    def run(self, feed_dict: FeedDict | None = None, session: SessionLike | None = None) -> None:
        """Runs the operation in ``session`` or the default session."""
        _session_or_default(session, "Operation.run").run(self, feed_dict)


@runtime_checkable
class StandsForElement(Protocol):
    """An object that stands for a tensor or operation of a graph, such as a variable for its value."""

    def _as_graph_element(self) -> Tensor | Operation: ...


class _ThreadScopes(concurrency.local):
    """The open scopes of one thread in one graph.

    Attributes:
        name: the open name scope, with a slash at its end; empty at the top.
        control: the operations of the open ``control_dependencies``.
        devices: the device scopes that the thread had open when it left for another graph.
    """

    name: str = ""
    control: tuple[Operation, ...] = ()
    devices: DeviceScopes = ()


class Graph:
    """A set of operations with unique names, collections and a seed. Any thread may add operations.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default() as graph:
        ...     x = rt.constant(1.0, name="x")
        >>> graph.get_tensor_by_name("x:0") is x
        True
    """

    def __init__(self) -> None:
        # Re-entrant: a device function is called within ``add_operation``, and may look at the
        # graph.
        self._lock = concurrency.RLock()
        self._operations: list[Operation] = []
        self._by_name: dict[str, Operation] = {}
        self._names_in_use: dict[str, int] = {}
        self._collections: dict[str, list[Any]] = {}
        self._scopes = _ThreadScopes()
        self.finalized = False
        """True after ``finalize``."""
        self.seed: int | None = None
        """Graph-level random seed. With a seed, every run of the program draws the same numbers."""
        self.fixed: dict[Tensor, Array] = {}
        """Tensors that gave sizes of operations, with the value of each; None for one that depends on shapes."""

    # -- what a subclass may add to ----------------------------------------------------------------------------

    def extra_attribute(self, owner: object, name: str) -> Any:
        """Returns an attribute that the class of ``owner`` lacks: a tensor, operation or session of this graph.

        Raises:
            AttributeError: always; a subclass may know the name.
        """
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")

    def pick_item(self, tensor: Operators[Tensor], item: object) -> Tensor:
        """Adds the operation ``tensor[item]``."""
        return pick_item(tensor, item)

    # -- scopes ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def as_default(self) -> Iterator[Graph]:
        """Makes this graph the default for new operations of this thread.

        An operation with inputs belongs to the graph of its inputs. Scopes (devices, names, control
        dependencies) belong to the graph of their block.
        """
        graphs, outer = _defaults.graphs, get_default_graph()._scopes
        left = outer.devices
        graphs.append(self)
        # The block may enter the outer graph again, and finds its device scopes then.
        outer.devices = device_scopes()
        try:
            with within_device_scopes(self._scopes.devices):
                yield self
        finally:
            outer.devices = left
            # Graphs that were entered within the block and never left end with the block.
            del graphs[_find_last(graphs, self) :]

    @staticmethod
    def of(*inputs: object) -> Graph:
        """Returns the graph of the inputs of an operation, or the default graph.

        Args:
            *inputs: Tensors, operations, variables and other elements of a graph. All other values
                do not count.

        Raises:
            ValueError: Two inputs are of different graphs. The message names both graphs.
        """
        first = None
        for item in inputs:
            element = _find_element(item)
            if element is None:
                continue
            if first is None:
                first = element
            elif element.graph is not first.graph:
                raise ValueError(
                    f"{element.name!r} is of another graph than {first.name!r} ({element.graph} "
                    f"and {first.graph}): an operation takes inputs of one graph"
                )
        # An operation without inputs, such as a constant, is built where the thread builds.
        return get_default_graph() if first is None else first.graph

    @contextlib.contextmanager
    def name_scope(self, name: str | None) -> Iterator[str]:
        """Prefixes the names of operations of the block with ``name/``.

        ``None`` or ``""`` is the top.
        """
        scopes = self._scopes
        old = scopes.name
        if not name:
            scopes.name = ""
        # A name with a slash at its end enters a scope of an earlier block again.
        elif name.endswith("/"):
            scopes.name = name
        else:
            scopes.name = self.unique_name(name) + "/"
        try:
            yield scopes.name
        finally:
            scopes.name = old

    @contextlib.contextmanager
    def control_dependencies(self, before: Iterable[object] | None) -> Iterator[None]:
        """Makes the operations of the block run after all of ``before``.

        ``None`` clears the outer dependencies.
        """
        scopes = self._scopes
        old = scopes.control
        scopes.control = () if before is None else (*old, *map(self.as_operation, before))
        try:
            yield
        finally:
            scopes.control = old

    @property
    def under_control(self) -> tuple[Operation, ...]:
        """Returns the operations of this thread's open ``control_dependencies``."""
        return self._scopes.control

    device = staticmethod(device)

    def get_name_scope(self) -> str:
        """Returns the open name scope without the slash at its end, ``""`` at the top."""
        return self._scopes.name.removesuffix("/")

    # -- names -------------------------------------------------------------------------------------------------

    def unique_name(self, name: str, mark_as_used: bool = True) -> str:
        """Returns ``name`` within the current scope. A used name ends with ``_1``, ``_2`` ...

        Args:
            name: Wanted name.
            mark_as_used: False to leave the name free.
        """
        full = self._scopes.name + name
        with self._lock:
            # As in TF1: names that differ only in case would clash as files and in TensorBoard.
            key = full.lower()
            count = self._names_in_use.get(key, 0)
            # The count of a name stays, so that the n-th equal name is found at once.
            candidate = full
            while count and candidate.lower() in self._names_in_use:
                candidate = f"{full}_{count}"
                count += 1
            if mark_as_used:
                self._names_in_use[key] = max(count, 1)
                self._names_in_use.setdefault(candidate.lower(), 1)
        return candidate

    # -- building ----------------------------------------------------------------------------------------------

    def add_operation(
        self,
        type: str,  # noqa: A002
        body: Body,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[tuple[Shape | None, DType]] = (),
        *,
        name: str | None = None,
        control_inputs: Sequence[Operation] = (),
        colocate_with: Operation | None = None,
        wide: bool = False,
    ) -> Operation:
        """Adds one operation. Every function that makes tensors calls this method.

        Args:
            type: The kind of operation, for readers and device functions.
            body: The work of the operation.
            inputs: Tensors of this graph.
            outputs: (static shape, dtype) of each output.
            name: Wanted name, made unique; ``type`` by default. A slash at its end marks a result
                of ``unique_name``, which stays as it is.
            control_inputs: Operations to run before, besides those of the enclosing scopes.
            colocate_with: The operation whose device the new operation takes, in place of the
                scopes' device.
            wide: True to trace the function in JAX's 64-bit mode, as also within that mode.

        Raises:
            RuntimeError: The graph is finalized.
            ValueError: The name is not valid or not unique, or an input belongs to another graph.
        """
        for tensor in inputs:
            if tensor.graph is not self:
                raise ValueError(
                    f"{tensor.name!r} is of another graph than {name or type!r} ({tensor.graph} "
                    f"and {self})"
                )
        with self._lock:
            if self.finalized:
                raise RuntimeError(
                    f"Graph is finalized and cannot be modified: {name or type!r} was not added; "
                    "make all operations before the session is opened"
                )
            wanted = name or type
            if not _VALID_NAME.match(wanted):
                raise ValueError(
                    f"{wanted!r} is not a valid operation name: use letters, digits, '.', '_', '-' "
                    "and '/'"
                )
            # A variable takes its name before its value is made.
            full = wanted[:-1] if wanted.endswith("/") else self.unique_name(wanted)
            if full in self._by_name:
                raise ValueError(f"Duplicate node name in graph: {full!r}")
            # Name and number are taken under one lock. The planner relies on the numbers: an
            # operation has a larger number than its inputs.
            # An operation in two scopes with one dependency waits once.
            control = tuple(dict.fromkeys((*self._scopes.control, *control_inputs)))
            where = (
                colocate_with.device
                if colocate_with is not None
                else self._requested_device(
                    OpInfo(type, full, [OutputInfo(*output) for output in outputs])
                )
            )
            wide = wide or x64_enabled()
            number = len(self._operations)
            op = Operation(
                self, number, full, type, body, tuple(inputs), control, where, wide, outputs
            )
            self._operations.append(op)
            self._by_name[full] = op
            return op

    def _requested_device(self, op: OpInfo) -> str:
        """Returns the device that the scopes of this graph request."""
        # Outside of its block, a graph has the scopes that were open at the last exit.
        if get_default_graph() is self:
            return current_device(op)
        with within_device_scopes(self._scopes.devices):
            return current_device(op)

    def finalize(self) -> None:
        """Makes the graph read only.

        A step loop that adds operations by mistake then fails, and does not slow down.
        """
        # Threads that are adding an operation may still finish: the check is made under the lock.
        self.finalized = True

    def unsafe_unfinalize(self) -> None:
        """Opens a finalized graph again, as a monitored session does at its end."""
        self.finalized = False

    # -- looking up --------------------------------------------------------------------------------------------

    def get_operations(self) -> list[Operation]:
        """Returns all operations, the oldest first."""
        with self._lock:
            return list(self._operations)

    def get_operation_by_name(self, name: str) -> Operation:
        """Returns the operation called ``name``. Raises KeyError without such an operation."""
        try:
            # A single lookup needs no lock.
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"the graph has no operation {name!r}") from None

    def get_tensor_by_name(self, name: str) -> Tensor:
        """Returns the tensor called ``operation:index``. Raises KeyError without such a tensor."""
        op_name, _, index = name.rpartition(":")
        if not op_name or not index.isdigit():
            raise ValueError(f"{name!r} is not a tensor name: it needs the form 'operation:index'")
        op = self.get_operation_by_name(op_name)
        if int(index) >= len(op.outputs):
            raise KeyError(
                f"the operation {op_name!r} has {len(op.outputs)} outputs, so there is no {name!r}"
            )
        return op.outputs[int(index)]

    def as_graph_element(self, item: object) -> Tensor | Operation:
        """Returns the tensor or operation of a name or an element. A variable stands for its value.

        Raises:
            ValueError: The element belongs to another graph, or the graph has no such name.
            TypeError: ``item`` is neither a name nor an element.
        """
        if isinstance(item, str):
            try:
                return (
                    self.get_tensor_by_name(item)
                    if ":" in item
                    else self.get_operation_by_name(item)
                )
            except KeyError as error:
                raise ValueError(str(error.args[0])) from None
        # A variable or a wrapper of another package stands for an element by its method.
        element = _find_element(item)
        if element is None:
            raise TypeError(
                f"{item!r} has invalid type {type(item).__name__}: not a tensor, operation, "
                "variable or name"
            )
        if element.graph is not self:
            raise ValueError(f"{element.name!r} is not an element of this graph")
        return element

    def as_operation(self, item: object) -> Operation:
        """Returns the operation of a name or an element, like ``as_graph_element``."""
        element = self.as_graph_element(item)
        return element.op if isinstance(element, Tensor) else element

    # -- collections -------------------------------------------------------------------------------------------

    def add_to_collection(self, key: str, value: object) -> None:
        """Adds ``value`` to the collection ``key``."""
        with self._lock:
            self._collections.setdefault(key, []).append(value)

    def get_collection(self, key: str, scope: str | None = None) -> list[Any]:
        """Copies the collection.

        With ``scope`` the copy has only items whose name begins with ``scope``.
        """
        with self._lock:
            items = list(self._collections.get(key, ()))
        if scope is None:
            return items
        # TensorFlow 1 takes a scope for a pattern at the beginning of the name.
        pattern = re.compile(scope)
        return [item for item in items if hasattr(item, "name") and pattern.match(item.name)]

    def get_collection_ref(self, key: str) -> list[Any]:
        """Returns the collection, not a copy. A change to the list changes the collection."""
        with self._lock:
            # Programs append to the list of a collection that is empty so far.
            return self._collections.setdefault(key, [])

    def get_all_collection_keys(self) -> list[str]:
        """Returns the keys of all collections with items."""
        with self._lock:
            return [key for key, items in self._collections.items() if items]

    def variables(self) -> list[Any]:
        """Returns all variables (``rt.Variable``): global ones, then local ones."""
        return self.get_collection(GraphKeys.GLOBAL_VARIABLES) + self.get_collection(
            GraphKeys.LOCAL_VARIABLES
        )


def reachable(
    starts: Iterable[Operation], before: Callable[[Operation], Iterable[Operation]]
) -> set[Operation]:
    """Returns ``starts`` and all operations behind.

    Args:
        starts: Operations.
        before: The function that returns the operations directly behind an operation.
    """
    seen: set[Operation] = set()
    # A stack, because a chain of operations may be longer than Python's limit of recursion.
    stack = list(starts)
    while stack:
        if (op := stack.pop()) not in seen:
            seen.add(op)
            stack.extend(before(op))
    return seen


def _find_element(item: object) -> Tensor | Operation | None:
    """Returns the tensor or operation of an object, or None."""
    # The class is looked at first: the check of a protocol looks up attributes, which is slow.
    if isinstance(item, Tensor | Operation):
        return item
    return item._as_graph_element() if isinstance(item, StandsForElement) else None


def show_shape(shape: Shape | None) -> str:
    """Returns a static shape in words, such as ``(?, 784)``."""
    return (
        "<unknown>"
        if shape is None
        else "(" + ", ".join("?" if d is None else str(d) for d in shape) + ")"
    )


# -- the default graph, and the default session that `eval` uses ---------------------------------------------------


class _ThreadDefaults(concurrency.local):
    """The default graphs and the default sessions of one thread, the present ones last."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.sessions: list[SessionLike] = []


_defaults = _ThreadDefaults()
# Threads without a graph of their own build into this graph.
_process_graph = Graph()


def _find_last(stack: Sequence[object], item: object) -> int:
    """Finds the last place of ``item`` in a list; the end of the list without the item."""
    return next((i for i in reversed(range(len(stack))) if stack[i] is item), len(stack))


def get_default_graph() -> Graph:
    """Returns the graph for new operations of this thread."""
    return _defaults.graphs[-1] if _defaults.graphs else _process_graph


def reset_default_graph() -> None:
    """Replaces the process-wide default graph with an empty one.

    Raises:
        RuntimeError: this thread is within a block of ``as_default``.
    """
    global _process_graph
    # The graph of the block would stay the default, and hide the new one.
    if _defaults.graphs:
        raise RuntimeError(
            "reset_default_graph() inside Graph.as_default() would leave that graph in use"
        )
    _process_graph = type(_process_graph)()


def set_default_graph_type(graph_type: type[Graph]) -> None:
    """Turns the process-wide default graph, and those that replace it, into graphs of another class.

    Args:
        graph_type: A subclass of ``Graph`` that adds methods only. The default graph keeps its
            identity and all operations.
    """
    # A new graph would lose the operations that were made before.
    _process_graph.__class__ = graph_type


def default_session_stack() -> list[SessionLike]:
    """Returns the default sessions of this thread, the present session last."""
    return _defaults.sessions


def push_default_session(session: SessionLike) -> None:
    """Makes ``session`` the default session of this thread."""
    _defaults.sessions.append(session)


def pop_default_session(session: SessionLike) -> None:
    """Takes back the last ``push_default_session`` of this session in this thread."""
    # Sessions may close in another order than they were opened.
    place = _find_last(_defaults.sessions, session)
    del _defaults.sessions[place : place + 1]


@contextlib.contextmanager
def default_session(session: AnySession) -> Iterator[AnySession]:
    """Makes a session the default of this thread for a ``with`` block.

    The end of the block closes nothing.

    Args:
        session: The session, also the value of the block.
    """
    push_default_session(session)
    try:
        yield session
    finally:
        pop_default_session(session)


def get_default_session() -> SessionLike | None:
    """Returns the default session of ``eval`` and ``run`` in this thread, or None."""
    return _defaults.sessions[-1] if _defaults.sessions else None


def _session_or_default(session: SessionLike | None, what: str) -> SessionLike:
    session = get_default_session() if session is None else session
    if session is None:
        raise ValueError(
            f"{what}: no session was given and there is no default session: use 'with "
            "Session(...):'"
        )
    return session


def name_scope(name: str | None) -> contextlib.AbstractContextManager[str]:
    """Opens ``Graph.name_scope`` of the default graph."""
    return get_default_graph().name_scope(name)


def control_dependencies(
    before: Iterable[object] | None,
) -> contextlib.AbstractContextManager[None]:
    """Opens ``Graph.control_dependencies`` of the default graph."""
    return get_default_graph().control_dependencies(before)


def no_op(name: str | None = None) -> Operation:
    """Makes an operation without effect, for control dependencies."""
    return get_default_graph().add_operation("NoOp", Nothing(), name=name)


def group(*items: object, name: str | None = None) -> Operation:
    """Makes an operation that runs after all ``items``.

    Args:
        *items: Operations, tensors, variables, and nested lists of these.
        name: Operation name.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     a, b = rt.Variable(1.0), rt.Variable(2.0)
        ...     session.run(rt.group(a.initializer, b.initializer, name="init"))
        ...     print(session.run(a + b))
        3.0
    """
    flat: list[object] = []

    def collect(item: object) -> None:
        if isinstance(item, list | tuple):
            for inner in item:
                collect(inner)
        else:
            flat.append(item)

    collect(items)
    with Graph.of(*flat).as_default() as graph:
        before = [graph.as_operation(item) for item in flat]
        return graph.add_operation(
            "NoOp", Nothing(), name=name or "group_deps", control_inputs=before
        )
