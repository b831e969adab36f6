"""Session: a client's connection to a cluster. Fetches in, values out."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from absl import logging
from jax.tree_util import PyTreeDef

from runtime import concurrency
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
from runtime.plan.place import Device, Devices, place_operations
from runtime.plan.plan import Plan
from runtime.plan.planner import find_specs, make_plan
from runtime.plan.prune import prune_graph
from runtime.plan.substeps import Substep, split_step
from runtime.session.engine import Engine, PlanHandle, RemoteEngine, sign_errors
from runtime.session.engine import reset as reset_master
from runtime.session.feeds import feed_value
from runtime.session.in_process import PrivateServer
from runtime.session.lead import Authority
from runtime.session.run_options import RunMetadata, RunOptions, describe_outputs
from runtime.state.forks import HomeProcess
from runtime.state.interrupts import uninterrupted
from runtime.tensor_spec import AnyArray, Array, TensorSpec
from runtime.trust.security import Security

if TYPE_CHECKING:
    from runtime.graph.variable import Variable

_Placed = TypeVar("_Placed", bound="Variable | Tensor")

MAX_PLANS = 256
"""Plans that a session keeps; the least recently used plan goes first."""
WARN_SHAPES = 32
"""Shapes of one placeholder after which a session warns that each shape is compiled anew."""


@dataclass(frozen=True)
class _Prepared:
    """A fetch structure with these feed shapes, planned and registered."""

    handle: PlanHandle
    plan: Plan
    flat: bool  # the fetches are a list of single things
    given: tuple[int, ...]  # fetches whose values come with the step: the caller gets copies of them


@dataclass(frozen=True)
class _Split:
    """A fetch structure with Python calls: its leaves, and the substeps in which it is run."""

    elements: tuple[Tensor | Operation, ...]
    substeps: tuple[Substep, ...]


class Session:
    """A session that runs steps of a graph on a cluster. Any number of threads may use one session.

    ``close``, or the end of the ``with`` block, ends the session. A session without references is closed some time
    later.

    Args:
        target: ``""`` for a private engine in this process; ``server.target`` of a server in this process; or
            ``grpc://host:port`` of any server, whose master then runs the steps.
        graph: Graph of the steps; the default graph by default.
        config: Options; those of the target's server by default.
        security: Certificates or token of the cluster, for a target in another process; by default from
            ``BELLWETHER_SECURITY``, else from a server of this process.

    Raises:
        UnauthenticatedError: A task refuses this client's credential, or this client refuses a task's. The message
            says what to do.
        DeadlineExceededError: Tasks did not join within ``config.start_timeout_secs``. The message names the tasks.
        InvalidArgumentError: The tasks know different clusters. The message names the difference.

    Example:
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
        if isinstance(target, bytes):
            target = target.decode()
        if not isinstance(target, str):
            raise TypeError(f"target must be a string, not {type(target).__name__}; pass options as config=")
        if graph is not None and not isinstance(graph, Graph):
            raise TypeError(f"graph must be a Graph, not {type(graph).__name__}")
        if config is not None and not isinstance(config, SessionConfig):
            raise TypeError(f"config must be a SessionConfig, not {type(config).__name__}")
        self.graph = graph or get_default_graph()
        self._home = HomeProcess("the session")
        engine, self.config = _open(target, config, security)
        self._engine = sign_errors(engine)
        self._when_dropped = when_dropped(self, functools.partial(_close_dropped, self._engine, target))
        self.target = target
        self._devices = Devices(
            self._engine.devices,
            self._engine.target,
            self._engine.home,
            self.config.allow_soft_placement,
        )
        self._authority = Authority(self._engine.send_run_order)
        self._checkpoint_coordinator = CheckpointCoordinator(self._engine, self._authority.over)
        self._lock = concurrency.Lock()
        self._plans: OrderedDict[Hashable, _Prepared] = OrderedDict()
        self._splits: OrderedDict[Hashable, _Split] = OrderedDict()
        self._taken: dict[Hashable, Plan] = {}
        self._shapes_seen: dict[Tensor, set[tuple[int, ...]]] = {}
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
            fetches: a tensor, variable, operation or name of one, or any pytree (list, tuple, dict, dataclass ...) of
                these. An operation gives None.
            feed_dict: values for placeholders, or for any other tensor; keys are tensors, variables or names.
            options: such as ``RunOptions(trace_level=RunOptions.FULL_TRACE)``.
            run_metadata: filled with what a traced step did; emptied by one that is not traced.
            timeout_secs: time limit of this step; the session's own by default.

        Returns:
            The structure of ``fetches`` with a numpy array (a numpy scalar for shape ``()``, ``bytes`` for a string)
            in each place. Arrays may be read-only views.

        Raises:
            FailedPreconditionError: The session was made before a fork, in the parent process.
            OpError: A step failed: the class says how, and the message names the task, variable or placeholder.
        """
        if self._closed:
            raise ClosedSessionError(self.id)
        self._home.check()
        if self.config.operation_timeout_secs is not None and timeout_secs is None:
            timeout_secs = self.config.operation_timeout_secs
        tensors, values = self._feeds(feed_dict) if feed_dict else ((), [])
        key = (_fetch_key(fetches), tuple([(t, v.shape) for t, v in zip(tensors, values, strict=True)]))
        prepared = self._planned(key, fetches)
        if prepared is None:
            split = self._split(key[0], fetches, tensors)
            if split is not None:
                out = self._run_split(split, tensors, values, options, run_metadata, timeout_secs)
                return out[0] if _is_leaf(fetches) else jax.tree.unflatten(_structure(fetches)[1], out)
            prepared = self._prepare(key, fetches, tensors, values)
        if options is None and run_metadata is None:
            results = self._engine.run(prepared.handle, values, timeout_secs)
        else:
            results = self._run_with(options, run_metadata, prepared, fetches, tensors, values, timeout_secs)
        for i in prepared.given:
            results[i] = np.array(results[i])
        out = [None if r is None else _to_user(r) for r in results]
        if prepared.flat:
            return out
        return out[0] if _is_leaf(fetches) else jax.tree.unflatten(_structure(fetches)[1], out)

    def _split(self, fetch_key: Hashable, fetches: object, tensors: tuple[Tensor, ...]) -> _Split | None:
        """Returns the substeps of a step with Python calls; None for any other step, which pays for this once."""
        key = (fetch_key, tensors)
        with self._lock:
            found = self._splits.get(key)
            if found is not None:
                self._splits.move_to_end(key)
                return found
        elements = [self._element(leaf) for leaf in _structure(fetches)[0]]
        parts = split_step(elements, tensors)
        if not parts:
            return None
        found = _Split(tuple(elements), parts)
        with self._lock:
            self._splits[key] = found
            while len(self._splits) > MAX_PLANS:
                self._splits.popitem(last=False)
        return found

    def _run_split(
        self,
        step: _Split,
        tensors: Sequence[Tensor],
        values: list[Array],
        options: RunOptions | None,
        run_metadata: RunMetadata | None,
        timeout_secs: float | None,
    ) -> list[Any]:
        """Runs a step with Python calls, one substep after the other; ``options`` are those of the last one."""
        known: dict[Tensor, Any] = dict(zip(tensors, values, strict=True))
        for part in step.substeps:
            if part.fetches:
                given = [np.asarray(known[t]) for t in part.feeds]
                key = (part, tuple(v.shape for v in given))
                fetched = list(part.fetches)
                prepared = self._planned(key, fetched) or self._prepare(key, fetched, part.feeds, given, part.done)
                if part is not step.substeps[-1] or options is None and run_metadata is None:
                    results = self._engine.run(prepared.handle, given, timeout_secs)
                else:
                    results = self._run_with(
                        options, run_metadata, prepared, fetched, part.feeds, given, timeout_secs, part.done
                    )
                known |= {f: r for f, r in zip(part.fetches, results, strict=True) if isinstance(f, Tensor)}
            for op in part.calls:
                arrays = [t.op.body.value if isinstance(t.op.body, Constant) else known[t] for t in op.inputs]
                known |= zip(op.outputs, run_python_call(op, self, [np.asarray(a) for a in arrays]), strict=True)
        fed = set(tensors)
        return [
            None if isinstance(e, Operation) else _to_user(np.array(known[e]) if e in fed else known[e])
            for e in step.elements
        ]

    def _run_with(
        self,
        options: RunOptions | None,
        run_metadata: RunMetadata | None,
        prepared: _Prepared,
        fetches: object,
        tensors: Sequence[Tensor],
        values: list[Array],
        timeout_secs: float | None,
        done: Collection[Operation] = frozenset(),
    ) -> list[AnyArray | None]:
        options = options or RunOptions()
        if options.timeout_in_ms:
            timeout_secs = options.timeout_in_ms / 1000
        if run_metadata is not None:
            run_metadata.Clear()
        if run_metadata is None or options.trace_level == RunOptions.NO_TRACE:
            return self._engine.run(prepared.handle, values, timeout_secs)
        results, stats = self._engine.run_traced(prepared.handle, values, timeout_secs)
        feeds = {t: TensorSpec(v.shape, v.dtype) for t, v in zip(tensors, values, strict=True)}
        describe_outputs(stats, find_specs([self._element(leaf) for leaf in _structure(fetches)[0]], feeds, done))
        run_metadata.step_stats.CopyFrom(stats)
        return results

    def _planned(self, key: Hashable, fetches: object) -> _Prepared | None:
        try:
            prepared = self._plans.get(key)
            if prepared is not None:
                self._plans.move_to_end(key)  # the least recently used plan goes first
        except TypeError:  # something in it cannot be hashed, so it is nothing that a graph holds
            for leaf in _structure(fetches)[0]:
                self._element(leaf)
            raise
        except KeyError:  # another thread has just dropped it: this run still has it
            return prepared
        return prepared

    def _prepare(
        self,
        key: Hashable,
        fetches: object,
        tensors: tuple[Tensor, ...],
        values: list[Array],
        done: Collection[Operation] = frozenset(),
    ) -> _Prepared:
        leaves, _ = _structure(fetches)
        elements = [self._element(leaf) for leaf in leaves]
        specs = {t: TensorSpec(v.shape, v.dtype) for t, v in zip(tensors, values, strict=True)}
        self._watch_shapes(specs)
        plan = self._taken.pop(key, None) or make_plan(elements, specs, self._devices, done)
        if self.config.log_device_placement:
            self._log_placement(elements, specs, done)
        given = tuple(i for i, slot in enumerate(plan.fetches) if 0 <= slot < plan.step_id_slot)
        flat = type(fetches) is list and all(map(_is_leaf, fetches))
        prepared = _Prepared(self._engine.prepare(plan), plan, flat, given)
        with self._lock:
            self._plans[key] = prepared
            while len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        return prepared

    def take_plans(self, other: Session) -> None:
        """Takes over the plans of another session of this graph, so that steps are only registered again.

        Planning traces and exports every computation of a step; after the loss of a task that would be most of the time
        to the next step. Nothing is taken when the two sessions see different devices.

        Args:
            other: a session of the same graph.
        """
        own, others = self._devices, other._devices
        same = set(own.all) == set(others.all) and own.target == others.target and own.home == others.home
        if same and own.soft == others.soft and self.graph is other.graph:
            with other._lock:
                self._take(other)
                self._splits = OrderedDict(other._splits)  # their substeps are the keys of plans

    def _take(self, other: Session) -> None:
        plans = {**other._taken, **{key: prepared.plan for key, prepared in other._plans.items()}}
        self._taken = dict(list(plans.items())[-MAX_PLANS:])

    def _element(self, leaf: object) -> Tensor | Operation:
        if leaf is None:
            raise TypeError("Fetch argument None has invalid type: not a tensor, operation, variable or name")
        try:
            return self.graph.as_graph_element(leaf)
        except TypeError as error:
            raise TypeError(f"Fetch argument {error}") from None

    def _feeds(self, feed_dict: FeedDict) -> tuple[tuple[Tensor, ...], list[Array]]:
        if not isinstance(feed_dict, Mapping):
            raise TypeError(f"feed_dict must be a dict of tensors to values, not {type(feed_dict).__name__}")
        fed: dict[Tensor, Array] = {}
        for key, value in feed_dict.items():
            tensor = key if type(key) is Tensor and key.op.graph is self.graph else self._feed_key(key)
            if tensor in fed:
                raise InvalidArgumentError(f"{tensor.name!r} is fed twice, under two of its names")
            fed[tensor] = feed_value(tensor, value)
        return tuple(fed), list(fed.values())

    def _feed_key(self, key: object) -> Tensor:
        try:
            element = self.graph.as_graph_element(key)
        except (TypeError, ValueError) as error:
            raise TypeError(f"Cannot interpret feed_dict key as Tensor: {error}") from None
        if not isinstance(element, Tensor):
            raise TypeError(
                f"Cannot interpret feed_dict key as Tensor: {key!r} is an operation; feed one of its outputs"
            )
        return element

    def _watch_shapes(self, specs: Mapping[Tensor, TensorSpec]) -> None:
        with self._lock:
            for tensor, spec in specs.items():
                seen = self._shapes_seen.setdefault(tensor, set())
                before = len(seen)
                seen.add(spec.shape)
                if before < len(seen) and len(seen) % WARN_SHAPES == 0:
                    logging.warning(
                        "%r was fed with %d different shapes, and each one is compiled anew: pad to a few sizes",
                        tensor.name,
                        len(seen),
                    )

    def _log_placement(
        self,
        elements: Sequence[Tensor | Operation],
        feeds: Mapping[Tensor, TensorSpec],
        done: Collection[Operation],
    ) -> None:
        needed = prune_graph(elements, feeds, done)
        for op, device in place_operations(needed.operations, self._devices).items():
            logging.info("%s: (%s): %s", op.name, op.type, device.name)

    def make_callable(
        self: SessionLike, fetches: object, feed_list: Sequence[object] | None = None
    ) -> Callable[..., Any]:
        """Returns a function that runs ``fetches``; its positional arguments are the values of ``feed_list``."""
        if feed_list is not None and not isinstance(feed_list, list | tuple):
            raise TypeError(f"feed_list must be a list, not {type(feed_list).__name__}")
        keys = list(feed_list or ())

        def run(*values: object) -> Any:
            if len(values) != len(keys):
                raise InvalidArgumentError(f"this callable takes {len(keys)} values, {len(values)} were given")
            return self.run(fetches, dict(zip(keys, values, strict=True)))

        return run

    # -- the cluster -------------------------------------------------------------------------------------------

    def adopt_generations(self, generations: Mapping[str, int]) -> None:
        """Continues after a chief in this process has begun new generations of tasks to replace their values.

        All other sessions of these tasks are cut off then. This one registers its stages anew.

        Args:
            generations: by task, as its run record tells them.
        """
        if self._engine.adopt_generations(generations):
            with self._lock:
                self._take(self)
                self._plans.clear()

    def list_devices(self) -> list[Device]:
        """Returns the devices of all tasks that the session may touch."""
        return list(self._engine.devices)

    @property
    def value_ids(self) -> dict[str, str]:
        """By task, an id of the values that this session uses.

        A session that is opened after the task lost its values, or after a chief replaced them, has another id there.
        """
        return dict(self._engine.value_ids)

    @property
    def task(self) -> str:
        """The task of the session's target, such as ``/job:worker/task:0``."""
        job, index = self._engine.target
        return f"/job:{job}/task:{index}"

    @property
    def id(self) -> int:
        """The number by which the tasks know the session."""
        return self._engine.id

    @property
    def silent_secs(self) -> float | None:
        """Seconds without a sign of life of the task that is silent longest.

        0 when all of them answer; None when the session's master is in another process, which does not tell.
        """
        return self._engine.silent_secs()

    @property
    def left_tasks(self) -> list[str]:
        """The tasks that have left at the end of training; none when the master is in another process."""
        return self._engine.left()

    def raised(self, error: BaseException | None) -> bool:
        """Returns True if this session, or a task of it, raised an error or its cause.

        A hook, a Python call or a session of another cluster may raise the same class.

        Args:
            error: The error that ended something in which the session was used.
        """
        while error is not None:
            if isinstance(error, OpError | ClosedSessionError) and error.session == self.id:
                return True
            error = error.__cause__
        return False

    def lost(self, error: BaseException) -> bool:
        """Returns True if an error says that this session has lost a task, or the values of its variables.

            try:
                hook.end(session)
            except Exception as error:
                if not session.lost(error):
                    raise  # the hook's own error: a new session would not help

        Args:
            error: The error that ended something in which the session was used.
        """
        loss = isinstance(error, UnavailableError | AbortedError) and not isinstance(error, DiskAwayError)
        return loss and self.raised(error)

    def cancel_steps(self) -> None:
        """Ends the steps under way with CancelledError. A session whose master is in another process ends with them."""
        self._engine.cancel_steps()

    @staticmethod
    def reset(target: str, containers: Sequence[str] | None = None, timeout_secs: float = 10.0) -> None:
        """Closes all sessions of the target's master and clears the named containers, or all, on every task."""
        reset_master(target, containers, timeout_secs)

    @property
    def checkpoint_coordinator(self) -> CheckpointCoordinator:
        """The coordinator that saves and restores variables on their tasks."""
        return self._checkpoint_coordinator

    @property
    def authority(self) -> Authority:
        """The leadership under which this session gives orders to tasks."""
        return self._authority

    def placement(self, variables: Sequence[_Placed]) -> dict[_Placed, Device]:
        """Returns the device of each of the variables."""
        placed = place_operations(prune_graph([v.op for v in variables], {}).operations, self._devices)
        return {v: placed[v.op] for v in variables}

    # -- life --------------------------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Ends the session: blocked operations end with CancelledError. Never waits for a dead task.

        Ctrl-C and SIGTERM take effect when the session has ended: a session that was half closed would keep its
        connections. In a forked child of the process that made the session, its connections stay as they are.
        """
        if not self._closed:
            self._closed = True
            if self._home.was_left:
                return
            self._when_dropped.detach()
            self._engine.close()

    def as_default(self: AnySession) -> AbstractContextManager[AnySession]:
        """Returns a context in which ``Tensor.eval`` and ``Operation.run`` use this session; its end closes nothing."""
        return default_session(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "graph":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.graph.extra_attribute(self, name)

    def __enter__(self) -> Session:
        """Makes the session and its graph the defaults of this thread."""
        if self._entered is not None:
            raise RuntimeError("Session context managers are not re-entrant: use Session.as_default() for nesting")
        self._entered = self.graph.as_default()
        self._entered.__enter__()
        push_default_session(self)
        return self

    @uninterrupted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Restores the defaults and closes the session."""
        pop_default_session(self)
        entered, self._entered = self._entered, None
        assert entered is not None
        entered.__exit__(kind, error, at)
        self.close()


class InteractiveSession(Session):
    """A session that is the default one from its making to its closing: for notebooks."""

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
            logging.error("an InteractiveSession is still open in this thread; close it to free its resources")
        self._graph_context = self.graph.as_default()
        self._graph_context.__enter__()
        push_default_session(self)

    def close(self) -> None:
        """Ends the session and takes back the defaults, when it is closed by the thread that opened it."""
        if self in default_session_stack():
            pop_default_session(self)
            self._graph_context.__exit__(None, None, None)
        super().close()


def _open(target: str, config: SessionConfig | None, security: Security | None) -> tuple[Engine, SessionConfig]:
    if not target:
        chosen = config or SessionConfig()
        return PrivateServer().create_session(chosen), chosen
    if not target.startswith("grpc://"):
        raise NotFoundError(
            f"{target!r} is not a session target: it needs the form grpc://host:port, or '' for this process"
        )
    local = find_local(target.removeprefix("grpc://"))
    if local is not None:
        assert isinstance(local.master, Master)
        chosen = config or local.config or SessionConfig()
        return local.master.create_session(chosen), chosen
    chosen = config or SessionConfig()
    return RemoteEngine(target, chosen, security), chosen


def _close_dropped(engine: Engine, target: str) -> None:
    logging.info("a session of %s was dropped without close(): it is closed now", target or "this process")
    engine.close()


def _is_leaf(item: object) -> bool:
    return isinstance(item, Tensor | Operation | str) or hasattr(item, "_as_graph_element")


def _structure(fetches: object) -> tuple[list[object], PyTreeDef]:
    return jax.tree.flatten(fetches, is_leaf=lambda x: x is None or _is_leaf(x))


def _fetch_key(fetches: object) -> Hashable:
    """Returns a key of a fetch structure: cheap for the lists that a training loop uses."""
    if type(fetches) is list:
        try:
            key = tuple(fetches)
            hash(key)
            if all(map(_is_leaf, key)):
                return key
        except TypeError:
            pass
    elif _is_leaf(fetches):
        return fetches
    leaves, tree = _structure(fetches)
    return tree, tuple(leaves)


def _to_user(value: AnyArray) -> object:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    return array[()] if array.ndim == 0 else array
