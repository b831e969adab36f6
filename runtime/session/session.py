"""Sessions: a session plans the steps of a graph, and has a master run the steps.

One step, in order: ``run`` finds the plan of its fetches and feed shapes, or makes and registers a
plan. The master (``runtime/master/master.py``) sends the stages to their tasks. A task
(``runtime/task/worker.py``) runs a stage on its store. The values return the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from absl import logging
from jax.tree_util import PyTreeDef

from runtime.checkpoint.coordinator import CheckpointCoordinator
from runtime.errors import (
    AbortedError,
    ClosedSessionError,
    DiskAwayError,
    InvalidArgumentError,
    NotFoundError,
    OpError,
    UnavailableError,
)
from runtime.graph.graph import (
    AnySession,
    FeedDict,
    Graph,
    Operation,
    SessionLike,
    Tensor,
    default_session,
    default_session_stack,
    get_default_graph,
    pop_default_session,
    push_default_session,
)
from runtime.graph.op_kinds import Constant
from runtime.graph.python_calls import run_python_call
from runtime.master.config import SessionConfig
from runtime.master.dropped import when_dropped
from runtime.master.master import Master
from runtime.master.tasks import find_local
from runtime.plan.place import Device, DeviceChoices, place_operations
from runtime.plan.plan import Plan
from runtime.plan.planner import find_sizeless, find_specs, make_plan
from runtime.plan.prune import prune_graph
from runtime.plan.substeps import Substep, split_step
from runtime.session.engine import Engine, PlanHandle, RemoteEngine, sign_errors
from runtime.session.engine import reset as reset_master
from runtime.session.feeds import ShapeWatch, name_batch, read_feeds
from runtime.session.in_process import PrivateServer
from runtime.session.lead import Authority
from runtime.session.recent import MOST, RecentValues
from runtime.session.run_options import RunMetadata, RunOptions, describe_outputs
from runtime.state.forks import HomeProcess
from runtime.state.interrupts import uninterrupted
from runtime.tensor_spec import AnyArray, TensorSpec
from runtime.trust.security import Security

if TYPE_CHECKING:
    from runtime.graph.variable import Variable

_Placed = TypeVar("_Placed", bound="Variable | Tensor")


@dataclass(frozen=True)
class _PreparedSubstep:
    """A substep with its feed shapes, planned and registered.

    Attributes:
        handle: the engine's handle of the plan.
        plan: the plan.
        part: the substep.
        given: positions of the fetches that are feeds or constants. The caller receives copies.
    """

    handle: PlanHandle
    plan: Plan
    part: Substep
    given: tuple[int, ...]


@dataclass(frozen=True)
class _SplitFetches:
    """A fetch structure: its leaves, and the substeps of the step.

    Without Python calls there is one substep.
    """

    elements: tuple[Tensor | Operation, ...]
    substeps: tuple[Substep, ...]
    sizeless: frozenset[Tensor] = frozenset()
    """The feeds whose sizes do not matter to the plan of the one substep."""


class _TreeKey(NamedTuple):
    """The key of a fetch structure that is neither a leaf nor a list of leaves."""

    tree: PyTreeDef
    leaves: tuple[object, ...]


class Session:
    """A session that runs steps of a graph on a cluster. Any number of threads may use one session.

    ``close``, or the end of the ``with`` block, ends the session. A session without references is
    closed some time later.

    Args:
        target: ``""`` for a private engine in this process; ``server.target`` of a server in this
            process; or ``grpc://host:port`` of any server, whose master then runs the steps.
        graph: Graph of the steps; the default graph by default.
        config: Options; by default those of the target's server if the server is in this process,
            else ``SessionConfig()``.
        security: Certificates or token of the cluster, for a target in another process; by default
            from ``BELLWETHER_SECURITY``, else from a server of this process.

    Raises:
        UnauthenticatedError: A task refuses this client's credential, or this client refuses a
            task's. The message says what to do.
        DeadlineExceededError: Tasks did not join within ``config.start_timeout_secs``. The message
            names the tasks.
        InvalidArgumentError: The tasks know different clusters. The message names the difference.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default() as graph, rt.Session("", graph) as session:
        ...     x = rt.placeholder("float32", [3])
        ...     session.run(x * 2, {x: [1, 2, 3]}).tolist()
        [2.0, 4.0, 6.0]
    """

    _entered: AbstractContextManager[Graph] | None = None

    def __init__(
        self,
        target: str = "",
        graph: Graph | None = None,
        config: SessionConfig | None = None,
        *,
        security: Security | None = None,
    ) -> None:
        # TF1 programs pass the target of a server as bytes.
        if isinstance(target, bytes):
            target = target.decode()
        if not isinstance(target, str):
            raise TypeError(
                f"target must be a string, not {type(target).__name__}; pass options as config="
            )
        if graph is not None and not isinstance(graph, Graph):
            raise TypeError(f"graph must be a Graph, not {type(graph).__name__}")
        if config is not None and not isinstance(config, SessionConfig):
            raise TypeError(f"config must be a SessionConfig, not {type(config).__name__}")
        self.graph = graph or get_default_graph()
        self._home = HomeProcess("the session")
        engine, self.config = _open_engine(target, config, security)
        self._engine = sign_errors(engine)
        # The finalizer refers to the engine only, or the session would never be dropped.
        self._when_dropped = when_dropped(
            self, functools.partial(_close_dropped, self._engine, target)
        )
        self.target = target
        self._devices = DeviceChoices(
            self._engine.devices,
            self._engine.target,
            self._engine.home,
            self.config.allow_soft_placement,
        )
        self.authority = Authority(self._engine.send_run_order)
        """The leadership of this session's orders to tasks."""
        self.checkpoint_coordinator = CheckpointCoordinator(self._engine, self.authority.over)
        """The coordinator that saves and restores variables on their tasks."""
        self._plans: RecentValues[_PreparedSubstep] = RecentValues()
        self._splits: RecentValues[_SplitFetches] = RecentValues()
        self._taken: dict[Hashable, Plan] = {}
        """Plans that another session has made, and that this session has not registered yet."""
        self._shapes = ShapeWatch()
        self._closed = False

    # -- running -----------------------------------------------------------------------------------------------

    def run(
        self,
        fetches: object,
        feed_dict: FeedDict | None = None,
        options: RunOptions | None = None,
        run_metadata: RunMetadata | None = None,
        *,
        timeout_secs: float | None = None,
    ) -> Any:
        """Runs one step and returns the values of ``fetches``.

        Args:
            fetches: A tensor, variable, operation or name, or any pytree (list, tuple, dict,
                dataclass ...) of these. The value of an operation is None.
            feed_dict: Values for placeholders, or for any other tensor. Keys are tensors, variables
                or names.
            options: Options such as ``RunOptions(trace_level=RunOptions.FULL_TRACE)``.
            run_metadata: Receives the statistics of a traced step. A step without a trace empties
                the message.
            timeout_secs: Time limit of this step; the session's own by default. A step with Python
                calls has this limit for each of its substeps.

        Returns:
            The structure of ``fetches`` with a numpy array (a numpy scalar for shape ``()``,
            ``bytes`` for a string) in each place. The caller may write into the arrays.

        Raises:
            RuntimeError: The session is closed.
            FailedPreconditionError: The session was made before a fork, in the parent process.
            OpError: A step failed. The class is the kind of failure, and the message names the
                task, variable or placeholder.

        Examples:
            >>> import runtime as rt
            >>> with rt.Graph().as_default() as graph, rt.Session(graph=graph) as session:
            ...     x = rt.placeholder("float32", [])
            ...     found = session.run({"double": x * 2, "square": [x * x]}, {x: 3.0})
            >>> float(found["double"]), float(found["square"][0])
            (6.0, 9.0)
        """
        if self._closed:
            # TensorFlow 1 raises RuntimeError, which a loop of a Supervisor tells from a lost task.
            raise ClosedSessionError(self.id)
        # A forked child shares the connections of its parent, so a step would break both.
        self._home.check()
        if timeout_secs is None:
            timeout_secs = self.config.operation_timeout_secs
        if options is not None or run_metadata is not None:
            timeout_secs, run_metadata = _read_options(options, run_metadata, timeout_secs)
        tensors, values = read_feeds(self.graph, feed_dict) if feed_dict else ((), [])
        # Shapes and not specs: a fed array has the dtype of its tensor.
        fetch_key = _fetch_key(fetches)
        key = fetch_key, tuple([(t, v.shape) for t, v in zip(tensors, values, strict=True)])
        try:
            prepared = self._plans.find(key)
        # A leaf that cannot be hashed is no element of a graph. The lookup of the elements names
        # the leaf.
        except TypeError:
            self._find_elements(fetches)
            raise
        if prepared is None:
            split = self._split(fetch_key, fetches, tensors)
            first = split.substeps[0]
            if first is not split.substeps[-1] or first.calls:
                fed = dict(zip(tensors, values, strict=True))
                return _pack_values(
                    fetch_key, self._run_split(split, fed, timeout_secs, run_metadata)
                )
            prepared = self._find_sizeless(fetch_key, split.sizeless, first, values)
            prepared = prepared or self._prepare(key, first, values)
        results = self._run_prepared(prepared, values, timeout_secs, run_metadata)
        out = [None if r is None else _to_user(r) for r in results]
        # A list of leaves, as a training loop fetches, is the result already.
        return out if type(fetch_key) is tuple else _pack_values(fetch_key, out)

    def _find_sizeless(
        self,
        fetch_key: Hashable,
        sizeless: frozenset[Tensor],
        part: Substep,
        values: Sequence[AnyArray],
    ) -> _PreparedSubstep | None:
        """Returns the plan for any sizes of some feeds, made at the first of the sizes; None without such feeds."""
        if not sizeless:
            return None
        # Ids come in another number in each step, and each number would cost a plan.
        pairs = zip(part.feeds, values, strict=True)
        key = fetch_key, tuple([(t, None if t in sizeless else v.shape) for t, v in pairs])
        return self._plans.find(key) or self._prepare(key, part, values)

    def _split(
        self, fetch_key: Hashable, fetches: object, tensors: tuple[Tensor, ...]
    ) -> _SplitFetches:
        key = fetch_key, tensors
        found = self._splits.find(key)
        if found is None:
            elements = tuple(self._find_elements(fetches))
            substeps = split_step(elements, tensors)
            alone = len(substeps) == 1 and not substeps[0].calls
            sizeless = find_sizeless(elements, tensors) if alone and tensors else frozenset()
            found = _SplitFetches(elements, substeps, sizeless)
            self._splits.keep(key, found)
        return found

    def _run_split(
        self,
        split: _SplitFetches,
        fed: Mapping[Tensor, AnyArray],
        timeout_secs: float | None,
        run_metadata: RunMetadata | None,
    ) -> list[object]:
        """Runs a step with Python calls, one substep after the other.

        A trace shows the last substep.
        """
        known: dict[Tensor, Any] = dict(fed)
        for part in split.substeps:
            if part.fetches:
                # A plan is made for the shapes of its feeds, so the results of JAX become arrays
                # first.
                values = [np.asarray(known[t]) for t in part.feeds]
                key = part, tuple(v.shape for v in values)
                prepared = self._plans.find(key) or self._prepare(key, part, values)
                traced = run_metadata if part is split.substeps[-1] else None
                results = self._run_prepared(prepared, values, timeout_secs, traced)
                known |= {
                    f: r
                    for f, r in zip(part.fetches, results, strict=True)
                    if isinstance(f, Tensor)
                }
            for op in part.calls:
                arrays = [
                    t.op.body.value
                    if isinstance(t.op.body, Constant) and t not in fed
                    else known[t]
                    for t in op.inputs
                ]
                known |= zip(
                    op.outputs,
                    run_python_call(op, self, [np.asarray(a) for a in arrays]),
                    strict=True,
                )
        # The caller may change a fetched value, but neither the array that was fed nor an array
        # that a Python function has returned or received, and may keep.
        return [
            None if isinstance(e, Operation) else _to_user(np.array(known[e]))
            for e in split.elements
        ]

    def _run_prepared(
        self,
        prepared: _PreparedSubstep,
        values: Sequence[AnyArray],
        timeout_secs: float | None,
        run_metadata: RunMetadata | None,
    ) -> list[AnyArray | None]:
        """Runs a registered plan, and with ``run_metadata`` traces the step."""
        part = prepared.part
        try:
            if run_metadata is None:
                results = self._engine.run(prepared.handle, values, timeout_secs)
            else:
                results, stats = self._engine.run_traced(prepared.handle, values, timeout_secs)
                describe_outputs(
                    stats, find_specs(part.fetches, _describe_feeds(part, values), part.done)
                )
                run_metadata.step_stats.CopyFrom(stats)
        except OpError as error:
            name_batch(error, part.feeds, values)
            raise
        for i in prepared.given:
            results[i] = np.array(results[i])
        return results

    def _prepare(
        self, key: Hashable, part: Substep, values: Sequence[AnyArray]
    ) -> _PreparedSubstep:
        """Plans a substep and registers the plan; a plan for rare shapes is evaluated until the shapes return."""
        traces = self._shapes.find_traces(key, part, values)
        rare_key = key, "rare"
        if traces is not None and (known := self._plans.find(rare_key)):
            return known
        specs = _describe_feeds(part, values)
        # Stages name their devices. JAX would compile all for a mesh that the program has set.
        with jax.set_mesh(None):
            plan = self._taken.pop(key if traces is None else rare_key, None) or make_plan(
                part.fetches, specs, self._devices, part.done, traces
            )
            assert traces is not None or not plan.is_evaluated, "a compiled plan was due"
            if not plan.is_evaluated:
                # Each new shape compiles a program.
                self._shapes.note(specs)
            if self.config.log_device_placement:
                needed = prune_graph(part.fetches, specs, part.done)
                for op, device in place_operations(needed.operations, self._devices).items():
                    logging.info("%s: (%s): %s", op.name, op.type, device.name)
            given = tuple(i for i, slot in enumerate(plan.fetches) if 0 <= slot < plan.step_id_slot)
            # Another thread may adopt a generation meanwhile. The plan then goes into the plans that
            # the thread has put aside, because the tasks refuse its stages.
            plans = self._plans
            prepared = _PreparedSubstep(self._engine.prepare(plan), plan, part, given)
        plans.keep(rare_key if plan.is_evaluated else key, prepared)
        return prepared

    def take_plans(self, other: Session) -> None:
        """Takes over the plans of another session of this graph.

        A step with such a plan needs only the registration. Planning traces and exports every
        computation of a step. After the loss of a task, planning would take most of the time to the
        next step. Nothing is taken if the two sessions see different devices.

        Args:
            other: a session of the same graph, which ends.
        """
        # A plan names devices and tasks, so it fits equal devices only.
        own, others = self._devices, other._devices
        same = (
            set(own.all) == set(others.all)
            and own.target == others.target
            and own.home == others.home
        )
        if same and own.soft == others.soft and self.graph is other.graph:
            self._take_plans(other)
            # The substeps of a split are the keys of plans.
            self._splits = other._splits

    def _take_plans(self, other: Session) -> None:
        plans = {
            **other._taken,
            **{key: prepared.plan for key, prepared in other._plans.list_items().items()},
        }
        # The plans that were used last stand at the end.
        self._taken = dict(list(plans.items())[-MOST:])

    def _find_elements(self, fetches: object) -> list[Tensor | Operation]:
        """Finds the tensors and operations that the leaves of a fetch structure mean."""
        found = []
        for leaf in _flatten_fetches(fetches)[0]:
            if leaf is None:
                raise TypeError(
                    "Fetch argument None has invalid type: not a tensor, operation, variable or "
                    "name"
                )
            try:
                found.append(self.graph.as_graph_element(leaf))
            except TypeError as error:
                raise TypeError(f"Fetch argument {error}") from None
        return found

    def make_callable(
        self: SessionLike, fetches: object, feed_list: Sequence[object] | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs ``fetches``.

        Args:
            fetches: As for ``run``.
            feed_list: The fed tensors. The positional arguments of the function are the values of
                these tensors.

        Examples:
            >>> import runtime as rt
            >>> with rt.Graph().as_default() as graph, rt.Session(graph=graph) as session:
            ...     x, y = rt.placeholder("float32", []), rt.placeholder("float32", [])
            ...     multiply = session.make_callable(x * y, [x, y])
            ...     float(multiply(3.0, 4.0))
            12.0
        """
        if feed_list is not None and not isinstance(feed_list, list | tuple):
            raise TypeError(f"feed_list must be a list, not {type(feed_list).__name__}")
        keys = list(feed_list or ())

        def run(*values: object) -> Any:
            if len(values) != len(keys):
                raise InvalidArgumentError(
                    f"this callable takes {len(keys)} values, {len(values)} were given"
                )
            return self.run(fetches, dict(zip(keys, values, strict=True)))

        return run

    # -- the cluster -------------------------------------------------------------------------------------------

    def adopt_generations(self, generations: Mapping[str, int]) -> None:
        """Continues with new generations of tasks, which the chief of this process has begun.

        The chief is about to replace the values. The tasks have cut off all sessions with stages of
        an earlier generation. This session registers its stages anew.

        Args:
            generations: By task, the generation in the task's run record.
        """
        if self._engine.adopt_generations(generations):
            self._take_plans(self)
            self._plans = RecentValues()

    def list_devices(self) -> list[Device]:
        """Returns the devices of all tasks that the session may touch."""
        return list(self._engine.devices)

    @property
    def value_ids(self) -> dict[str, str]:
        """By task, an id of the values in use.

        The id changes if the task loses its values, or a chief replaces the values.
        """
        return dict(self._engine.value_ids)

    @property
    def task(self) -> str:
        """The task of the session's target, such as ``/job:worker/task:0``."""
        job, index = self._engine.target
        return f"/job:{job}/task:{index}"

    @property
    def id(self) -> int:
        """The number of the session on all tasks."""
        return self._engine.id

    @property
    def silent_secs(self) -> float | None:
        """Seconds without a sign of life of the longest silent task.

        0 if all tasks answer. None if the session's master is in another process, which does not
        report silence.
        """
        return self._engine.silent_secs()

    @property
    def left_tasks(self) -> list[str]:
        """The tasks that have left at the end of training; none if the master is in another process."""
        return self._engine.left()

    def raised(self, error: BaseException | None) -> bool:
        """Returns True if an error, or its cause, comes from this session or its tasks.

        The class of an error does not tell the origin: a hook, a Python call or a session of
        another cluster may raise the same class.

        Args:
            error: The error of a block that used the session.
        """
        # A hook may raise its own error from an error of the session.
        while error is not None:
            if isinstance(error, OpError | ClosedSessionError) and error.session == self.id:
                return True
            error = error.__cause__
        return False

    def lost(self, error: BaseException) -> bool:
        """Returns True if an error says that this session has lost a task or the values there.

        A new session helps against such an error, and against no other.

        Args:
            error: The error of a block that used the session.

        Examples:
            >>> import runtime as rt
            >>> with rt.Session("") as session:
            ...     try:
            ...         raise ValueError("an error of the program")
            ...     except ValueError as error:
            ...         session.lost(error)
            False
        """
        loss = isinstance(error, UnavailableError | AbortedError) and not isinstance(
            error, DiskAwayError
        )
        return loss and self.raised(error)

    def cancel_steps(self) -> None:
        """Ends the steps under way with CancelledError.

        If the master is in another process, the session ends too.
        """
        self._engine.cancel_steps()

    @staticmethod
    def reset(
        target: str, containers: Sequence[str] | None = None, timeout_secs: float = 10.0
    ) -> None:
        """Closes all sessions of the target's master, and clears containers on every task.

        Args:
            target: ``grpc://host:port`` of a server.
            containers: Names of the containers to clear; all by default.
            timeout_secs: Time limit of each call to a task.
        """
        reset_master(target, containers, timeout_secs)

    def placement(self, variables: Sequence[_Placed]) -> dict[_Placed, Device]:
        """Returns the device of each variable."""
        placed = place_operations(
            prune_graph([v.op for v in variables], {}).operations, self._devices
        )
        return {v: placed[v.op] for v in variables}

    # -- life --------------------------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Ends the session.

        Blocked operations end with CancelledError. Never waits for a dead task.

        Ctrl-C and SIGTERM take effect after the end of the session, since a half closed session
        would keep its connections. In a forked child the connections of the parent's session stay
        as they are.
        """
        if not self._closed:
            self._closed = True
            if self._home.was_left:
                return
            # A closed session needs no finalizer.
            self._when_dropped.detach()
            self._engine.close()

    def as_default(self: AnySession) -> AbstractContextManager[AnySession]:
        """Makes this session the default of ``Tensor.eval`` and ``Operation.run`` for a block.

        Closes nothing.
        """
        return default_session(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "graph":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.graph.extra_attribute(self, name)

    def __enter__(self) -> Session:
        """Makes the session and its graph the defaults of this thread."""
        # The end of the inner block would close the session of the outer block.
        if self._entered is not None:
            raise RuntimeError(
                "Session context managers are not re-entrant: use Session.as_default() for nesting"
            )
        self._entered = self.graph.as_default()
        self._entered.__enter__()
        push_default_session(self)
        return self

    @uninterrupted
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Restores the defaults and closes the session."""
        pop_default_session(self)
        entered, self._entered = self._entered, None
        assert entered is not None
        entered.__exit__(kind, error, at)
        self.close()


class InteractiveSession(Session):
    """A session for notebooks: the default session from its making to its closing.

    Args:
        target: As for ``Session``.
        graph: As for ``Session``.
        config: As for ``Session``.
        security: As for ``Session``.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default():
        ...     session = rt.InteractiveSession()
        ...     x = rt.constant(2.0)
        ...     print((x * 3.0).eval())
        ...     session.close()
        6.0
    """

    def __init__(
        self,
        target: str = "",
        graph: Graph | None = None,
        config: SessionConfig | None = None,
        *,
        security: Security | None = None,
    ) -> None:
        super().__init__(target, graph, config, security=security)
        if any(isinstance(s, InteractiveSession) for s in default_session_stack()):
            logging.error(
                "an InteractiveSession is still open in this thread; close it to free its resources"
            )
        # There is no `with` block whose end would take the defaults back.
        self._graph_context = self.graph.as_default()
        self._graph_context.__enter__()
        push_default_session(self)

    def close(self) -> None:
        """Ends the session, and takes back the defaults.

        A thread other than the opener only ends the session.
        """
        if self in default_session_stack():
            pop_default_session(self)
            self._graph_context.__exit__(None, None, None)
        super().close()


def _open_engine(
    target: str, config: SessionConfig | None, security: Security | None
) -> tuple[Engine, SessionConfig]:
    chosen = config or SessionConfig()
    # A private cluster has one session, and ends with it.
    if not target:
        return PrivateServer().create_session(chosen), chosen
    if not target.startswith("grpc://"):
        raise NotFoundError(
            f"{target!r} is not a session target: it needs the form grpc://host:port, or '' for "
            "this process"
        )
    # A server of this process runs steps without a socket.
    local = find_local(target.removeprefix("grpc://"))
    if local is None:
        return RemoteEngine(target, chosen, security), chosen
    assert isinstance(local.master, Master)
    chosen = config or local.config or chosen
    return local.master.create_session(chosen), chosen


def _close_dropped(engine: Engine, target: str) -> None:
    logging.info(
        "a session of %s was dropped without close(): it is closed now", target or "this process"
    )
    engine.close()


def _read_options(
    options: RunOptions | None, run_metadata: RunMetadata | None, timeout_secs: float | None
) -> tuple[float | None, RunMetadata | None]:
    """Returns the time limit of a step, and the metadata to fill: None for a step without a trace."""
    options = options or RunOptions()
    # TensorFlow 1 replaces the content of the message in each step.
    if run_metadata is not None:
        run_metadata.Clear()
    is_traced = options.trace_level != RunOptions.NO_TRACE
    return options.timeout_in_ms / 1000 or timeout_secs, run_metadata if is_traced else None


def _describe_feeds(part: Substep, values: Sequence[AnyArray]) -> dict[Tensor, TensorSpec]:
    return {t: TensorSpec(v.shape, v.dtype) for t, v in zip(part.feeds, values, strict=True)}


def _is_leaf(item: object) -> bool:
    # A variable, or a wrapper of another package, stands for an element by its method.
    return isinstance(item, Tensor | Operation | str) or hasattr(item, "_as_graph_element")


def _flatten_fetches(fetches: object) -> tuple[list[object], PyTreeDef]:
    return jax.tree.flatten(fetches, is_leaf=lambda x: x is None or _is_leaf(x))


def _fetch_key(fetches: object) -> Hashable:
    """Returns a key of a fetch structure: the leaf, a tuple of leaves for a list, else a ``_TreeKey``."""
    # A training loop fetches a list of leaves in each step, and JAX takes longer to flatten a list.
    if type(fetches) is list:
        try:
            key = tuple(fetches)
            hash(key)
            if all(map(_is_leaf, key)):
                return key
        # A dict or a list in the list cannot be hashed.
        except TypeError:
            pass
    elif _is_leaf(fetches):
        return fetches
    leaves, tree = _flatten_fetches(fetches)
    return _TreeKey(tree, tuple(leaves))


def _pack_values(fetch_key: Hashable, values: list[object]) -> object:
    """Returns the fetched values in the structure of the fetches."""
    # The caller has asked for a list, so the list of values is the result.
    if type(fetch_key) is tuple:
        return values
    return (
        jax.tree.unflatten(fetch_key.tree, values) if isinstance(fetch_key, _TreeKey) else values[0]
    )


def _to_user(value: AnyArray) -> object:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.ndim == 0:
        return array[()]
    # JAX and the store may share the memory of a read-only array, and the caller may write into the
    # result.
    return array if array.flags.writeable else array.copy()
