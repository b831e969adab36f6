"""The master: the sessions of clients, and the steps of these sessions over the tasks of the cluster.

A client's ``Session`` calls ``MasterSession.prepare`` once for each plan and ``MasterSession.run``
for each step. The client may be in this process, or in another process by way of
``runtime/server/services.py``.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from absl import logging

from runtime import concurrency
from runtime.checkpoint.states import task_states
from runtime.checkpoint.streaming import ByteStream
from runtime.cluster.spec import EVALUATOR, ClusterSpec
from runtime.errors import CancelledError, NotFoundError, UnavailableError
from runtime.master.cluster_states import ClusterStates
from runtime.master.config import SessionConfig
from runtime.master.dropped import when_dropped
from runtime.master.exchange import StepRun, Stopwatch, run_phase
from runtime.master.flow import run_flow
from runtime.master.pipeline import Pipeline, can_pipeline
from runtime.master.prepared import PreparedPlan, register_plan
from runtime.master.run_orders import choose_receivers, find_holders, send_run_order
from runtime.master.tasks import LocalTask, RemoteTask, Task, meet_tasks
from runtime.master.times import ANSWER_SECS
from runtime.observe.trace import merge as merge_stats
from runtime.observe.trace import nbytes, step_stats
from runtime.plan.place import Device
from runtime.plan.plan import COMPUTE, PUSH, Plan
from runtime.proto import run_record_pb2, services_pb2, step_stats_pb2
from runtime.state.cancellation import Cancellation
from runtime.state.forks import HomeProcess
from runtime.state.run_record import MOST_STATE_BYTES
from runtime.task.ending import StepEnding
from runtime.task.worker import Worker
from runtime.tensor_spec import AnyArray, Array
from runtime.trust.security import Security
from runtime.wire.dial import ChannelOptions

_step_numbers = itertools.count(1)
_clock = concurrency.perf_counter_ns


class MasterSession:
    """A session of a master: its tasks, and the steps on these tasks.

    Args:
        cluster: the cluster.
        target: (job, task) of the master's server.
        worker: the worker of the same server.
        options: the client's options.
        cancelled: ends the wait for tasks.
        foreign: True if the client is another process. All tasks then verify the programs, this
            process too.
        security: certificates or token of the server, for other tasks.

    Raises:
        DeadlineExceededError: tasks did not join in time. The message names the tasks.
        CancelledError: ``cancelled`` was set.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        target: tuple[str, int],
        worker: Worker,
        options: SessionConfig,
        cancelled: Cancellation,
        foreign: bool = False,
        security: Security | None = None,
    ) -> None:
        # Never 0, which means no session.
        self.id = concurrency.random_id(63) | 1
        self._home = HomeProcess("the session")
        self.options = options
        self.foreign = foreign
        self.target = target
        home = cluster.default_task()
        self.home = (home.job, home.index)
        self._step_ids = _make_step_ids()
        self.closed = False
        # A step outside of a pipeline must flush the pipelines first.
        self._ahead: set[Pipeline] = set()
        """The pipelines with a push that was not answered yet, or with parameters for the next step."""
        self._lock = concurrency.Lock()
        self.tasks: dict[str, Task] = {}
        self._states = ClusterStates(self.id, cluster, self.tasks, security)
        # The finalizer must not refer to the session, or the session would never be dropped.
        self._end = functools.partial(_end_session, self.id, self.tasks, worker, self._home)
        self._when_dropped = when_dropped(self, self._end)
        self.tasks |= meet_tasks(
            _find_visible(cluster, target, options.device_filters),
            cluster=cluster,
            sender=worker.task,
            client=self.id,
            options=ChannelOptions(reconnect_secs=options.reconnect_secs),
            timeout=options.start_timeout_secs,
            cancelled=cancelled,
            security=security,
        )
        self.devices: tuple[Device, ...] = tuple(
            d for task in self.tasks.values() for d in self._list_devices(task)
        )
        self.worker = worker
        self._traced_steps = concurrency.Lock()
        self._times = worker.counters.begin_session(self.id)
        self._trace_is_clean = True

    @property
    def value_ids(self) -> dict[str, str]:
        """By task, an id of its values: another id after a restart or in another generation."""
        return {
            name: f"{task.incarnation:x}.{task.generation}" for name, task in self.tasks.items()
        }

    def _list_devices(self, task: Task) -> Sequence[Device]:
        """Returns the devices of a task, marked as own if task and client are in this process."""
        if self.foreign or not isinstance(task, LocalTask):
            return task.devices
        return [replace(device, is_own=True) for device in task.devices]

    def prepare(self, plan: Plan, traced: bool = False) -> PreparedPlan:
        """Registers the stages of a plan on their tasks.

        Args:
            plan: the plan.
            traced: True to time the stages; see ``run_traced``.

        Raises:
            AbortedError: a task has restarted since the session began.
            UnavailableError: a task is gone.
        """
        self._check_open()
        times = self._times[0 if plan.is_training else 1]
        prepared = register_plan(self, plan, times, traced=traced)
        if self.options.prefetch and not traced and can_pipeline(prepared.phases, plan):
            prepared.pipeline = Pipeline(
                prepared.phases,
                plan,
                self.id,
                prepared.values,
                prepared.moves,
                self._step_ids,
                lambda: self.closed,
                self.options.prefetch,
                prepared.wire_bytes,
            )
        return prepared

    def run(
        self,
        prepared: PreparedPlan,
        feeds: Sequence[AnyArray],
        timeout: float | None = None,
        ending: StepEnding | None = None,
    ) -> list[AnyArray | None]:
        """Runs one step.

        Args:
            prepared: the result of ``prepare``.
            feeds: the values of the plan's feeds.
            timeout: seconds for this step; the session's operation timeout by default.
            ending: the means of another thread to end the step. A pipelined step waits for no other
                step, and has no such means.

        Returns:
            The fetched values: numpy or jax arrays, None for operations.

        Raises:
            OpError: a task failed. The message names the task.
        """
        # The check costs a fork test, so an open session skips the check in each step.
        if self.closed:
            self._check_open()
        step = next(_step_numbers)
        timeout = self.options.operation_timeout_secs if timeout is None else timeout
        deadline = None if timeout is None else concurrency.monotonic() + timeout
        if prepared.pipeline is not None:
            return self._run_pipelined(prepared, prepared.pipeline, feeds, step, deadline)
        if ending is not None:
            ending.deadline = deadline
        if self._ahead:
            # This step must read the values that earlier steps have written.
            self._flush_pipelines()
        values = prepared.values(feeds, self._step_ids)
        run = StepRun(self.id, step, deadline, ending, values, prepared.moves)
        exchange = prepared.exchange(run)
        times, part = prepared.times, COMPUTE
        watch = Stopwatch(times.parts_ns)
        # A phase is sent to all its tasks, then its replies are collected, then the next phase
        # begins.
        for phase in prepared.phases:
            # A send of a result would wait for the end of its program. So the wait comes first, and
            # the time of computing and the time of sending are counted apart. An update that ran
            # with a failed gradient would lose its variables.
            if run.running and (phase.remote or phase.part == PUSH):
                run.wait()
                watch.count(COMPUTE)
            if phase.flow:
                run_flow(phase.flow, run, exchange, watch)
            else:
                run_phase(phase, run, exchange)
            part = phase.part
            watch.count(part)
        if run.running:
            run.wait()
            watch.count(part)
        carried = prepared.wire_bytes
        # The size of rows is known now; other steps have no such tensors.
        if prepared.described:
            carried += nbytes([values[slot] for slot in prepared.described])
        times.add_step(watch.last - watch.began, carried)
        # The computations that read this memory have finished only now.
        run.give_back()
        return run.fetch(prepared.plan.fetches)

    def _run_pipelined(
        self,
        prepared: PreparedPlan,
        pipeline: Pipeline,
        feeds: Sequence[AnyArray],
        step: int,
        deadline: float | None,
    ) -> list[AnyArray | None]:
        """Runs a step whose pull, computation and push overlap. Only the whole step is timed."""
        began = _clock()
        # The calls under way belong to the parent of a fork.
        self._home.check()
        # A plan for other shapes may have pulled parameters long ago, and must not compute with old
        # parameters.
        if not self._ahead <= {pipeline}:
            self._flush_pipelines(pipeline)
        try:
            results = pipeline.run(feeds, step, deadline)
        finally:
            self._ahead.add(pipeline)
        prepared.times.add_step(_clock() - began, prepared.wire_bytes)
        return results

    def _flush_pipelines(self, but: Pipeline | None = None) -> None:
        """Waits for the replies to earlier pushes, and forgets values that were pulled ahead."""
        for pipeline in self._ahead - {but}:
            self._ahead.discard(pipeline)
            pipeline.flush()

    def run_traced(
        self,
        prepared: PreparedPlan,
        feeds: Sequence[AnyArray],
        timeout: float | None = None,
        ending: StepEnding | None = None,
    ) -> tuple[list[AnyArray | None], step_stats_pb2.StepStats]:
        """Runs one step like ``run``, and returns also the StepStats of all tasks, by this host's clock."""
        with self._traced_steps:
            if prepared.traced is None:
                prepared.traced = self.prepare(prepared.plan, True)
            # A traced step that failed has left spans on the tasks.
            if not self._trace_is_clean:
                self._collect_trace(prepared.plan)
            self._trace_is_clean = False
            values = self.run(prepared.traced, feeds, timeout, ending)
            stats = self._collect_trace(prepared.plan)
            self._trace_is_clean = True
            return values, stats

    def _collect_trace(self, plan: Plan) -> step_stats_pb2.StepStats:
        own = step_stats(self.worker.tracer.take(self.id))
        names = [name for name in plan.tasks if name != self.worker.task]
        return merge_stats([own, *(self.tasks[name].trace(self.id) for name in names)])

    def send_order(
        self, name: str, order: services_pb2.CheckpointOrder, timeout: float | None
    ) -> services_pb2.CheckpointReply:
        """Sends an order of a checkpoint coordinator to a task, and returns the reply.

        Args:
            name: the task. With an order for states ``""`` means all tasks of the cluster that
                answer in time.
            order: the order.
            timeout: seconds.
        """
        if not name:
            self._check_open()
            return self._states.collect(order, timeout)
        task = self._find_task(name)
        # The task gives a job to its session, and ends the job with the session.
        order.session = self.id
        if order.HasField("pause"):
            # A checkpoint must hold the values that earlier steps of this session have written.
            self._flush_pipelines()
        return task.send_order(order, timeout)

    def send_run_order(
        self,
        name: str,
        order: run_record_pb2.RunOrder,
        timeout: float = ANSWER_SECS,
        cancelled: Cancellation | None = None,
    ) -> run_record_pb2.RunReply:
        """Sends an order to the run record of one task, and returns the reply.

        Args:
            name: the task.
            order: the order, without a sender.
            timeout: seconds.
            cancelled: ends the order from another thread, if the task is in this process.
        """
        task = self._find_task(name)
        order.sender = self.worker.task
        if isinstance(task, LocalTask):
            return task.send_run_order(order, cancelled or Cancellation())
        return task.send_run_order(order, concurrency.monotonic() + timeout)

    def stream(self, name: str) -> ByteStream:
        """Opens a stream to a task for byte ranges of variables."""
        return self._find_task(name).stream(self.id)

    def _find_task(self, name: str) -> Task:
        self._check_open()
        task = self.tasks.get(name)
        if task is None:
            raise NotFoundError(f"{name} is not among this session's tasks")
        return task

    def adopt_generations(self, generations: Mapping[str, int]) -> bool:
        """Continues under generations that this session's own client has begun.

        Args:
            generations: by task.

        Returns:
            True if a generation is new to the session. The tasks then refuse registered stages, and
            the client prepares its plans anew.
        """
        self._check_open()
        changed = {
            n: g
            for n, g in generations.items()
            if n in self.tasks and self.tasks[n].generation != g
        }
        for name, generation in changed.items():
            self.tasks[name].generation = generation
        return bool(changed)

    def _check_open(self) -> None:
        self._home.check()
        if self.closed:
            raise CancelledError("the session was closed")

    def close(self) -> None:
        """Ends the session, and cancels its steps under way. Never waits for a dead task.

        With ``prefetch`` a task that is not silent has time to answer the last push. Does nothing
        in a forked child of the process that made the session.
        """
        if self._home.was_left:
            return
        # Of two threads that close the session only one ends it.
        with self._lock:
            if self.closed:
                return
            self.closed = True
        # The last push of each pipeline should reach its ps before the connections close.
        for pipeline in list(self._ahead):
            pipeline.finish()
        self._end()
        self._when_dropped.detach()

    def silent_secs(self) -> float:
        """Returns the seconds without a sign of life of the longest silent task; 0 if all tasks give signs."""
        # A task of this process cannot be silent while this code runs.
        peers = [task.peer for task in self.tasks.values() if isinstance(task, RemoteTask)]
        since = [peer.silent_since for peer in peers if not peer.lost]
        return max((concurrency.monotonic() - at for at in since if at is not None), default=0.0)

    def left(self) -> list[str]:
        """Returns the tasks that have left at the end of training."""
        return [
            name
            for name, task in self.tasks.items()
            if isinstance(task, RemoteTask) and task.peer.left
        ]

    def cancel_steps(self) -> None:
        """Ends the steps under way with CancelledError. The session stays open."""
        for task in self.tasks.values():
            task.cancel(self.id)


class Master:
    """The maker and keeper of one server's sessions."""

    def __init__(
        self,
        cluster: Callable[[], ClusterSpec],
        target: tuple[str, int],
        worker: Worker,
        security: Security | None = None,
    ) -> None:
        # The cluster is complete once the server's port is open.
        self.cluster = cluster
        self._security = security
        self.target = target
        self._worker = worker
        self._lock = concurrency.Lock()
        self._sessions: weakref.WeakValueDictionary[int, MasterSession] = (
            weakref.WeakValueDictionary()
        )
        """The open sessions. A session belongs to the engine or client that opened the session."""
        self._pending: set[Cancellation] = set()
        """Cancellations of the sessions that are not open yet, and of the orders that wait."""
        self._stopped = False
        self._home = HomeProcess("the server")

    def create_session(
        self,
        options: SessionConfig,
        cancelled: Cancellation | None = None,
        foreign: bool = False,
    ) -> MasterSession:
        """Opens a session. The arguments are those of ``MasterSession``.

        Raises:
            UnavailableError: the server has stopped, before or during the wait for tasks.
        """
        cancelled = cancelled or Cancellation()
        with self._until_stopped(cancelled):
            session = MasterSession(
                self.cluster(),
                self.target,
                self._worker,
                options,
                cancelled,
                foreign,
                self._security,
            )
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._sessions[session.id] = session
        # A server that stopped during the wait must not leave a session behind.
        if stopped:
            session.close()
            raise self._has_stopped()
        return session

    def send_run_order(
        self,
        order: run_record_pb2.RunOrder,
        device_filters: Sequence[str],
        answer_secs: float,
        cancelled: Cancellation,
    ) -> dict[str, run_record_pb2.RunReply]:
        """Sends an order to the run records of the tasks that hold variables, in the name of this task.

        Args:
            order: the order, without a sender.
            device_filters: the filters of the client's sessions, which select the tasks.
            answer_secs: seconds for the order beyond its own wait.
            cancelled: ends the order from another thread.

        Returns:
            The replies by task.

        Raises:
            OpError: a task failed. The message names the task.
            UnavailableError: the server has stopped.
        """
        order.sender = self._worker.task
        # A finished task is not there for the last checkpoint, so its states travel with the
        # report.
        if order.HasField("done"):
            order.done.states.update(_states_to_leave(self._worker))
        tasks = choose_receivers(
            order, find_holders(_find_visible(self.cluster(), self.target, device_filters))
        )
        with self._until_stopped(cancelled):
            return send_run_order(
                order,
                tasks,
                cluster=self.cluster(),
                answer_secs=answer_secs,
                cancelled=cancelled,
                security=self._security,
            )

    @contextlib.contextmanager
    def _until_stopped(self, cancelled: Cancellation) -> Iterator[None]:
        """Runs a block whose waits ``stop`` ends."""
        self._home.check()
        with self._lock:
            if self._stopped:
                raise self._has_stopped()
            self._pending.add(cancelled)
        try:
            yield
        except CancelledError:
            if self._stopped:
                raise self._has_stopped() from None
            raise
        finally:
            with self._lock:
                self._pending.discard(cancelled)

    def _has_stopped(self) -> UnavailableError:
        return UnavailableError("its server has stopped", task=self._worker.task)

    def stop(self) -> None:
        """Closes every session, and refuses further sessions. Ends pending sessions and orders."""
        with self._lock:
            self._stopped = True
            pending = list(self._pending)
        for cancelled in pending:
            cancelled.set("its server has stopped")
        self.close_all()

    def has_session(self, session: int) -> bool:
        """Returns True if a session of this number is open."""
        found = self._sessions.get(session)
        return found is not None and not found.closed

    def close_all(self) -> None:
        """Closes every session."""
        with self._lock:
            # The end of a session may take seconds, and no other session waits for it.
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            session.close()


def _make_step_ids() -> Iterator[Array]:
    """Returns the ids of a session's steps, uint32[4]: a random number of the session, then the number of the step.

    Any thread may take the next id.
    """
    nonce = np.frombuffer(concurrency.random_bytes(8), np.uint32)
    return map(
        lambda step: np.array([*nonce, step & 0xFFFFFFFF, step >> 32], np.uint32), itertools.count()
    )


def _find_visible(
    cluster: ClusterSpec, target: tuple[str, int], filters: Sequence[str]
) -> list[tuple[str, str]]:
    """Returns the names and addresses of the tasks for a client. An evaluator serves no client."""
    return [
        (str(task), address)
        for task, address in cluster.tasks().items()
        if (task.job, task.index) == target
        or (task.job != EVALUATOR and _matches_filter(str(task), filters))
    ]


def _end_session(
    session: int, tasks: Mapping[str, Task], worker: Worker, home: HomeProcess
) -> None:
    # In a forked child the connections belong to the parent.
    if home.was_left:
        return
    for task in tasks.values():
        task.close(session)
    worker.counters.end_session(session)


def _matches_filter(task: str, filters: Sequence[str]) -> bool:
    if not filters:
        return True
    return any(
        task == f or task.startswith(f + "/") or fnmatch.fnmatchcase(task, f) for f in filters
    )


def _states_to_leave(worker: Worker) -> dict[str, bytes]:
    """Returns the states that a finished task leaves for the last checkpoint."""
    states = task_states(worker.task, worker.store.run.environment.address())
    if (size := sum(map(len, states.values()))) <= MOST_STATE_BYTES:
        return states
    logging.warning(
        "the states of this task are %d bytes: the last checkpoint has those of the one before "
        "(harness.checkpointable is for at most %d bytes)",
        size,
        MOST_STATE_BYTES,
    )
    return {}
