"""Run records: messages of chief and workers by way of the tasks that hold the variables.

Every task of a cluster keeps a small record of the training run. ``runtime/state/run_record.py``
describes its phases. ``RunRecords`` is the client of all these records: the chief sends orders, and
all tasks send reports. A call is one request to each task and needs no session. So a call works
while the session of the training is broken or blocked. An interruption (Ctrl-C) ends a call, on the
tasks too.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import grpc

from runtime import concurrency
from runtime.cluster.spec import split_address
from runtime.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from runtime.master.config import SessionConfig
from runtime.master.tasks import find_local
from runtime.master.times import ANSWER_SECS
from runtime.proto import services_pb2, services_pb2_grpc
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.rpc import rpc
from runtime.session import times
from runtime.session.lead import Lead
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import NOBODY, Leadership
from runtime.state.run_record import wait_secs
from runtime.trust.security import Security


@dataclass(frozen=True)
class RunRecordView:
    """The record of one task.

    Attributes:
        address: address of the task.
        phase: "new", "loading", "ready" or "finished".
        leadership: the leadership that the task obeys; ``NOBODY`` without a leader.
        chief: the leader and its address, in words; empty without a leader.
        generation: number of times that values were replaced under sessions that used the values.
        joined: tasks that have taken part.
        addresses: addresses of joined tasks, as far as reported.
        done: tasks that no longer need this task.
        silent: by joined task that is not done, the seconds without a sign of life.
        saved_step: step of the last checkpoint of a finished run; None if not reported.
        stop: the reason to end training; empty without an order to stop.
        origin: the reason why the task started without the values of its backup.
        logdir: log directory of the run of the task's values; empty if not reported.
        left: tasks among ``done`` that have left before the end of training.
        goes_in_secs: seconds until the task stops serving; None if the task stays.
    """

    phase: str = "new"
    leadership: Leadership = NOBODY
    chief: str = ""
    generation: int = 0
    joined: tuple[str, ...] = ()
    done: tuple[str, ...] = ()
    origin: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    silent: Mapping[str, float] = field(default_factory=dict)
    saved_step: int | None = None
    stop: str = ""
    goes_in_secs: float | None = None
    logdir: str = ""
    left: tuple[str, ...] = ()


class RunRecords:
    """The run records of the tasks that hold variables (the ps tasks, where there are any).

    Each order goes to all tasks at the same time. An absent task is waited for, and keeps an order
    from no other task. Any order may raise UnavailableError (a task is absent), AbortedError (a
    task has restarted just now) and TaskLeftError (a task is leaving at the end of training).

    Args:
        target: Session target; orders come from the target's task.
        config: Options of the sessions; the device filters select the tasks.
        is_chief: True for a task that may lead.
        security: Certificates or token of the cluster; by default from ``BELLWETHER_SECURITY``.
    """

    def __init__(
        self,
        target: str,
        config: SessionConfig | None = None,
        *,
        is_chief: bool = False,
        security: Security | None = None,
    ) -> None:
        self._target = target
        self._security = security
        self.answer_secs = ANSWER_SECS
        """Seconds for one exchange beyond its intended wait."""
        self._device_filters = () if config is None else config.device_filters
        self.lead = Lead() if is_chief else None
        """The lead of this task; None if the task is not the chief."""
        self._task = ""
        self._took_part: frozenset[str] = frozenset()
        """All tasks of any record so far.

        The record of a restarted task has forgotten earlier tasks.
        """
        self._lock = concurrency.Lock()
        self._waiting: Cancellation | None = None
        self._closed = False

    def inspect(self) -> dict[str, RunRecordView]:
        """Returns the present records, by task name."""
        return self._send_order(RunOrder(inspect=RunOrder.Inspect()))

    def claim(self) -> Lead:
        """Takes the lead: the tasks refuse the later orders of any other chief.

        Raises:
            AbortedError: another chief keeps claiming the same tasks.
        """
        if self.lead is None:
            raise InvalidArgumentError("only the chief takes the lead: give is_chief=True")

        def ask(leadership: Leadership) -> dict[str, Leadership]:
            order = RunOrder(leadership=leadership.to_proto(), claim=RunOrder.Claim())
            records = self._send_order(order) if leadership else self.inspect()
            return {task: record.leadership for task, record in records.items()}

        self.lead.claim(ask)
        return self.lead

    def load(self) -> dict[str, int]:
        """Orders the tasks to let no worker train while this chief replaces values.

        Returns:
            By task, its generation from now on. A task that had values gets a new generation:
            sessions that used the values are cut off, and the caller's own session continues after
            ``Session.adopt_generations``.

        Raises:
            PermissionDeniedError: another chief has taken the lead. The message names the chief.
        """
        return {
            task: record.generation
            for task, record in self._send_order(RunOrder(load=RunOrder.Load())).items()
        }

    def open(self, logdir: str = "") -> None:
        """Orders the tasks to let all workers train.

        Args:
            logdir: log directory of the run that the values belong to now; empty changes nothing.

        Raises:
            PermissionDeniedError: another chief leads.
        """
        self._send_order(RunOrder(open=RunOrder.Open(logdir=logdir)))

    def finish(
        self,
        silence_secs: float,
        counter: tuple[str, str] | None = None,
        saved_step: int | None = None,
        elastic: bool = False,
    ) -> None:
        """Reports to the tasks that training has finished.

        Args:
            silence_secs: Seconds without a sign of life after which no task waits for an unfinished
                task.
            counter: The (container, name) of the global step.
            saved_step: The global step in the last checkpoint; None without a checkpoint.
            elastic: True if workers come and go. The tasks then wait for no worker that has never
                come.

        Raises:
            PermissionDeniedError: another chief leads.
        """
        container, name = counter or ("", "")
        order = RunOrder.Finish(
            silence_secs=silence_secs,
            counter_container=container,
            counter_name=name,
            saved_step=saved_step,
            took_part=sorted(self._took_part),
            elastic=elastic,
        )
        self._send_order(RunOrder(finish=order))

    def leads(self) -> bool:
        """Returns True if no other chief has taken the lead. A restarted task knows no chief."""
        owner = self.lead.owner if self.lead else 0
        return all(record.leadership.owner in (0, owner) for record in self.inspect().values())

    def join(self, session: int = 0, *, again: bool = False) -> None:
        """Reports to the tasks that this task takes part.

        Args:
            session: The session in which the task trains. Signs of life of the session are those of
                the task.
            again: True for a session in place of an earlier one of this process.

        Raises:
            InvalidArgumentError: another task with this name takes part, at another address, and
                lives.
        """
        with self._lock:
            self._closed = False
        self._send_order(RunOrder(join=RunOrder.Join(session=session, again=again)))

    def rest(self, session: int) -> None:
        """Reports that this task has stopped training in a session, and still needs the tasks."""
        self._send_order(RunOrder(rest=RunOrder.Rest(session=session)))

    def done(
        self, leave: bool, session: int = 0, *, goodbye: bool = False
    ) -> dict[str, RunRecordView]:
        """Reports that this task no longer needs the tasks.

        Args:
            leave: True if the tasks may stop when no task needs them; False if a launcher stops
                them.
            session: The session in which this task has trained.
            goodbye: True if training continues without this task.
        """
        return self._send_order(
            RunOrder(done=RunOrder.Done(session=session, leave=leave, goodbye=goodbye))
        )

    def wait_loaded(self, timeout_secs: float) -> bool:
        """Waits until no chief is loading, for a minute at most.

        Returns True if no chief is loading.
        """
        records = self._send_order(RunOrder(wait_loaded=RunOrder.WaitLoaded(secs=timeout_secs)))
        return all(record.phase != "loading" for record in records.values())

    def wait_done(self, timeout_secs: float) -> dict[str, float]:
        """Waits until all other tasks that take part are done, for a minute at most.

        Returns:
            The tasks that are not done, with their addresses, and the seconds without a sign of
            life to any task; infinite without any sign so far.
        """
        records = self._send_order(RunOrder(wait_done=RunOrder.WaitDone(secs=timeout_secs)))
        addresses = {
            name: address
            for record in records.values()
            for name, address in record.addresses.items()
        }
        silences = [record.silent for record in records.values()]
        return {
            at(name, addresses.get(name, "")): min(
                (silent[name] for silent in silences if name in silent), default=inf
            )
            for name in others(records, self.task)
        }

    def stop(self, reason: str) -> dict[str, RunRecordView]:
        """Orders training to end. All workers stop, and the chief saves and finishes.

        Args:
            reason: The reason in words.
        """
        return self._send_order(RunOrder(stop=RunOrder.Stop(reason=reason)))

    def wait_stop(self, timeout_secs: float) -> tuple[str, float | None]:
        """Waits until an order ends training, for a minute at most.

        The leader waits for tasks that leave, too.

        Returns:
            The reason to end, or an empty text; and for the leader the seconds until the first
            leaving task stops serving, or None.

        Raises:
            CancelledError: ``close`` was called, by another thread or before.
        """
        cancelled = Cancellation()
        with self._lock:
            if self._closed:
                cancelled.set("the run records were closed")
            self._waiting = cancelled
        cancelled.check("waiting for an order to stop")
        records = self._send_order(
            RunOrder(wait_stop=RunOrder.WaitStop(secs=timeout_secs)), cancelled
        )
        going = [
            record.goes_in_secs for record in records.values() if record.goes_in_secs is not None
        ]
        # An order to stop reaches the tasks one after the other, so any record may have the reason.
        reason = next((record.stop for record in records.values() if record.stop), "")
        return reason, min(going, default=None) if self.lead else None

    def close(self) -> None:
        """Ends ``wait_stop`` on other threads, and later calls until the next ``join``.

        All else keeps working.
        """
        with self._lock:
            self._closed = True
            waiting = self._waiting
        if waiting is not None:
            waiting.set("the run records were closed")

    @property
    def task(self) -> str:
        """Name of this task, known after the first exchange."""
        return self._task

    def _send_order(
        self, order: RunOrder, cancelled: Cancellation | None = None
    ) -> dict[str, RunRecordView]:
        order.address = self._target.removeprefix("grpc://")
        # A claim carries the wanted leadership already.
        if self.lead is not None and not order.HasField("claim"):
            order.leadership.CopyFrom(self.lead.leadership.to_proto())
        try:
            self._task, replies = _forward_order(
                self._target,
                order,
                self._device_filters,
                self.answer_secs,
                cancelled,
                self._security,
            )
        # Callers treat a task without an answer as absent, whatever limit ran out.
        except DeadlineExceededError as error:
            raise UnavailableError(error.message, task=error.task) from None
        records = {name: _read_record(reply) for name, reply in replies.items()}
        # The end of training needs the names of all tasks, even of those that a restarted record
        # forgot.
        self._took_part = self._took_part.union(*(record.joined for record in records.values()))
        return records


def at(task: str, address: str) -> str:
    """Returns a task and its address, in words. An empty address is unknown."""
    return f"{task} at {address}" if address else task


def others(records: Mapping[str, RunRecordView], own: str) -> list[str]:
    """Returns the tasks in any of ``records`` that take part and are not done, without ``own``."""
    # A restarted task has forgotten its workers, so the records are taken together.
    joined = dict.fromkeys(task for record in records.values() for task in record.joined)
    done = {task for record in records.values() for task in record.done}
    return [task for task in joined if task not in done and task != own]


def _read_record(reply: RunReply) -> RunRecordView:
    return RunRecordView(
        phase=RunReply.Phase.Name(reply.phase).lower(),
        leadership=Leadership.from_proto(reply.leadership),
        chief=at(reply.leader_name, reply.leader_address),
        generation=reply.generation,
        joined=tuple(reply.joined),
        done=tuple(reply.done),
        origin=reply.origin,
        logdir=reply.logdir,
        addresses=dict(reply.addresses),
        address=reply.address,
        silent=dict(reply.silent),
        saved_step=reply.saved_step if reply.HasField("saved_step") else None,
        stop=reply.stop,
        goes_in_secs=reply.goes_in_secs if reply.HasField("goes_in_secs") else None,
        left=tuple(reply.left),
    )


def _forward_order(
    target: str,
    order: RunOrder,
    device_filters: Sequence[str],
    answer_secs: float,
    cancelled: Cancellation | None,
    security: Security | None,
) -> tuple[str, dict[str, RunReply]]:
    """Sends an order by way of a target.

    Returns the name of the target's task, and the replies by task.
    """
    address = target.removeprefix("grpc://")
    if address == target:
        raise NotFoundError(
            f"{target!r} is not a session target: it needs the form grpc://host:port"
        )
    split_address(address)
    # A server of this process needs no socket.
    local = find_local(address)
    if local is not None:
        replies = local.master.send_run_order(
            order, device_filters, answer_secs, cancelled or Cancellation()
        )
        return local.worker.task, replies
    request = services_pb2.ForwardRunOrderRequest(
        order=order, device_filters=device_filters, answer_secs=answer_secs
    )
    with rpc.open_channel(address, security) as channel, _closing_channel(channel, cancelled):
        answer = rpc.call(
            services_pb2_grpc.MasterServiceStub(channel).ForwardRunOrder,
            request,
            timeout=wait_secs(order) + answer_secs + times.RELAY_SECS,
            task=target,
            wait_for_ready=True,
        )
    return answer.sender, {name: answer.replies[name] for name in sorted(answer.replies)}


@contextlib.contextmanager
def _closing_channel(channel: grpc.Channel, cancelled: Cancellation | None) -> Iterator[None]:
    """Closes a channel on cancellation within the block. So its call ends on the other side too."""
    if cancelled is None:
        yield
        return

    # A blocking call of gRPC ends early only with its channel.
    def close() -> None:
        cancelled.wait()
        channel.close()

    closer = concurrency.in_thread(close, "end of a run order")
    try:
        yield
    finally:
        # The thread that waits for the cancellation must end with the block.
        cancelled.set("it is over")
        closer.result()
