"""The run record: the knowledge of a task about the training run.

Between-graph training has no central scheduler. Workers must agree on the chief, the phase, the
tasks of the run and the tasks that are done. These facts lie beside the variables, on every task
with variables.

The phases:

    new       no chief has led here yet; variables may be used as soon as they have values
    loading   a chief initialises or restores: half of the variables may be old, half new
    ready     training runs
    finished  the chief has ended training

A worker that leaves during training says goodbye, and counts as done. During a run any task may
order the end (``stop``) with a reason, and all tasks of the run wait for the order.

The end. A worker joins with a training session, and the connections of the session are the sign of
life. A ps leaves when the run has finished and every worker is done. The chief limits the silence
of a worker, and never the work: the wait for a silent worker ends after ``silence_secs``.

The fence. A chief that replaces the values of variables begins with ``load``. If there were values,
``load`` starts a new generation of the task, and stage calls that were registered in an earlier
generation are refused with AbortedError. So a gradient of old values that arrives during a restore
is never added to restored values.
"""

from collections.abc import Callable, Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from runtime import concurrency
from runtime.errors import InvalidArgumentError, OpError
from runtime.limits import Limits
from runtime.proto import run_record_pb2 as pb
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import MAX_EPOCH, Leader, Leadership, RunState
from runtime.state.participants import AwaitedTask, Participant, Participants, TaskEnvironment
from runtime.timeouts import LEASE_SECS

NEW, LOADING, READY, FINISHED = "new", "loading", "ready", "finished"

MOST_STATE_BYTES = 1 << 20
"""Most bytes of the trainer's states that are kept of a task that is done."""


class RunRecord:
    """The record of one task.

    Args:
        changed: condition of the store. The lock guards the record too, so that a fence and a stage
            cannot overlap.
        has_values: returns True if a variable of the store has a value; called under the lock.
        environment: the task around the record.

    Attributes:
        generation: number of times that a restore has replaced values in use.
        environment: surroundings of the record.
        origin: reason for a start without values where values were expected; for the log of a
            chief.
        finished_at: ``time.monotonic()`` when the run finished, else None.
        goes_at: ``time.monotonic()`` at which the task stops to serve; None before an order to
            stop.
        leader: the leader that the task obeys.
        saved: key of the global step, and the step of the last checkpoint; None without a report.
        logdir: log directory of the chief; empty without one.
    """

    def __init__(
        self,
        changed: concurrency.Condition,
        has_values: Callable[[], bool],
        environment: TaskEnvironment | None = None,
    ) -> None:
        self.generation = 0
        self.environment = environment or TaskEnvironment()
        self.origin = ""
        self.finished_at: float | None = None
        self.goes_at: float | None = None
        self.leader = Leader()
        self.saved: tuple[tuple[str, str], int] | None = None
        self._tasks = Participants(self.environment)
        self._changed = changed
        self._has_values = has_values
        self.logdir = ""
        self._phase = NEW
        self._stop = ""
        self._closed: OpError | None = None

    def obey(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> pb.RunReply:
        """Carries out one order, and returns the record after the order.

        Args:
            order: the order. protos/runtime/proto/run_record.proto tells the effect of each kind.
            task: this task's name, for errors.
            cancelled: set when the caller has gone. The set ends an order that waits, and prevents
                a later order.

        Raises:
            InvalidArgumentError: The order is empty, or of an unknown kind.
            PermissionDeniedError: The sender does not lead any more.
            AbortedError: The sender took the lead before the task was started again.
            CancelledError: The caller has gone.
            OpError: The task has stopped, with the error of ``close``.
        """
        handler = _HANDLERS.get(_checked_kind(order, task))
        if handler is None:
            raise InvalidArgumentError(
                "an order for the run record that orders nothing which is known here", task=task
            )
        with self._changed:
            self._check_open(task)
            # An order of a dead caller must not be carried out late, as its next life may have
            # ordered the contrary.
            cancelled.check("an order for the run record")
            is_new = order.HasField("join") and self._tasks.is_new(order.sender, order.join)
            handler(self, order, task, cancelled)
            self._changed.notify_all()
            reply = self._make_reply()
        if is_new:
            self.environment.when_joined(order.sender)
        self._leave_when_done()
        return reply

    def _leave_when_done(self) -> None:
        with self._changed:
            left = self._tasks.may_go and not self._tasks.missing()
        # The call may stop the server and this record, so it comes without the lock.
        if left:
            self.environment.when_all_done()

    def _make_reply(self) -> pb.RunReply:
        leader = self.leader
        return pb.RunReply(
            address=self.environment.address(),
            phase=pb.RunReply.Phase.Value(self._phase.upper()),
            leadership=leader.leadership.to_proto() if leader.leadership else None,
            leader_name=leader.name,
            leader_address=leader.address,
            generation=self.generation,
            joined=self._tasks.joined,
            addresses={
                name: part.address for name, part in self._tasks.joined.items() if part.address
            },
            done=self._tasks.done,
            silent=self._tasks.silences(concurrency.monotonic()),
            saved_step=None if self.saved is None else self.saved[1],
            origin=self.origin,
            logdir=self.logdir,
            stop=self._stop,
            left=sorted(self._tasks.left),
            goes_in_secs=None
            if self.goes_at is None
            else max(0.0, self.goes_at - concurrency.monotonic()),
        )

    def go_at(self, when: float) -> None:
        """Reports to the leader the time at which the task stops to serve, as ``time.monotonic()``."""
        with self._changed:
            self.goes_at = when
            self._changed.notify_all()

    def close(self, error: OpError) -> None:
        """Ends the waits of orders, and refuses further orders. Does nothing the second time.

        Args:
            error: the reason, which every order raises from now on.
        """
        with self._changed:
            self._closed = self._closed or error
            self._changed.notify_all()

    def _check_open(self, task: str) -> None:
        if self._closed is not None:
            raise type(self._closed)(self._closed.message, task=task)

    def states_of_done(self) -> dict[str, bytes]:
        """Returns the small named states of the tasks that are done, by task and name in one text."""
        with self._changed:
            found = self._tasks.states.items()
            return {f"{task} {name}": s for task, states in found for name, s in states.items()}

    @property
    def phase(self) -> str:
        """The phase: ``NEW``, ``LOADING``, ``READY`` or ``FINISHED``."""
        return self._phase

    def state(self) -> RunState:
        """Returns the record as JSON, for the next process of the task.

        The caller holds the lock.
        """
        return {
            "generation": self.generation,
            **self.leader.state(),
            "phase": self._phase,
            "logdir": self.logdir,
            **self._tasks.state(),
            "stop": self._stop,
            "saved": self.saved,
        }

    def take_up(self, state: RunState) -> None:
        """Continues from the ``state`` of an earlier process of the task."""
        with self._changed:
            self.generation = state["generation"]
            self.leader.take_up(state)
            self.logdir, self._phase, self._stop = state["logdir"], state["phase"], state["stop"]
            now = concurrency.monotonic()
            self._tasks.take_up(state, now)
            if state["saved"] is not None:
                key, step = state["saved"]
                self.saved = ((key[0], key[1]), step)
            if self._phase == FINISHED:
                self.finished_at = now

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        with self._changed:
            assert self._phase in (NEW, LOADING, READY, FINISHED)
            assert self._phase == NEW or self.leader.leadership, (
                "a phase begins by an order of a chief"
            )
            assert (self._phase == FINISHED) == (self.finished_at is not None)
            assert self._phase == FINISHED or self.saved is None, (
                "the last checkpoint is that of another run"
            )
            assert self.generation >= 0 and 0 <= self.leader.leadership.epoch < MAX_EPOCH
            self._tasks.validate()

    # -- the end -----------------------------------------------------------------------------------------------

    def session_ended(self, session: int) -> None:
        """Notes the end of a session as the last sign of life of a task."""
        with self._changed:
            for part in self._tasks.joined.values():
                if part.session == session:
                    part.heard_at = concurrency.monotonic()
            self._changed.notify_all()
        # The close of a session is the goodbye of a task that is done.
        self._leave_when_done()

    def lost_contact(self) -> None:
        """Notes since when each session has been silent, before the connections are forgotten."""
        with self._changed:
            self._tasks.silences(concurrency.monotonic())

    def awaited(self) -> list[AwaitedTask]:
        """Returns the tasks to wait for at the end; empty before an order to leave."""
        with self._changed:
            return self._tasks.awaited(self._phase == FINISHED) if self._tasks.may_go else []

    def may_leave(self, late_secs: float) -> bool:
        """Returns True if the task may leave: every awaited task has been silent for too long.

        Args:
            late_secs: seconds after the end of the run in which absent tasks may still come.
        """
        with self._changed:
            if not self._tasks.may_go:
                return False
            awaited = self._tasks.awaited(self._phase == FINISHED)
            over = None if self.finished_at is None else concurrency.monotonic() - self.finished_at
        return all(who.is_given_up(over, late_secs) for who in awaited)

    def connected(self) -> dict[str, int]:
        """Returns the training sessions that have a connection to this task, by task.

        A process that is frozen for long is left out, as a master leaves such a client out.
        """
        with self._changed:
            silences = self._tasks.silences(concurrency.monotonic())
            sessions = self._tasks.connected()
        return {name: s for name, s in sessions.items() if silences.get(name, 0) < LEASE_SECS}

    def unfinished(self) -> bool:
        """Returns True if tasks take part in a run that is not finished."""
        return bool(self._tasks.joined) and self._phase != FINISHED

    # -- the orders --------------------------------------------------------------------------------------------

    def _check_leader(self, order: pb.RunOrder, task: str) -> None:
        what = f"{order.WhichOneof('order')} for {order.sender or 'a chief'}"
        self.leader.check(Leadership.from_proto(order.leadership), what, task)

    def _wait_until(
        self, done: Callable[[], bool], secs: float, task: str, cancelled: Cancellation
    ) -> None:
        until = concurrency.monotonic() + min(secs, self.environment.limits.run_order_secs)
        cancelled.wait_for(
            self._changed, lambda: done() or self._closed is not None, "waiting for the run", until
        )
        self._check_open(task)

    def _obey_inspect(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        """Changes nothing: "inspect" only reads, and for "rest" the worker wakes waiting updates."""

    def _obey_claim(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        wanted = Leadership.from_proto(order.leadership)
        self.leader.claim(wanted, order.sender, order.address, task)

    def _obey_load(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._check_leader(order, task)
        self.environment.when_loading()
        self._begin_another()
        self._phase = LOADING
        self.logdir = ""
        # Without values there is no gradient of an old value, so the first load of a task starts no
        # generation.
        if self._has_values():
            self.generation += 1

    def _begin_another(self) -> None:
        """Begins the next run after the end of a run."""
        if self._phase == FINISHED:
            self._tasks.reset()
            self._stop = ""
            self.finished_at = self.saved = None

    def _obey_open(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._check_leader(order, task)
        self.logdir = order.open.logdir or self.logdir
        self._begin_another()
        self.origin = ""
        self._phase = READY

    def _obey_finish(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._check_leader(order, task)
        given = order.finish
        took_part = dict.fromkeys(
            name for name in given.took_part if name not in self._tasks.joined
        )
        self._tasks.check_room(took_part, task)
        self._tasks.done |= took_part
        self._phase = FINISHED
        self._tasks.elastic = given.elastic
        self.finished_at = concurrency.monotonic()
        self._tasks.silence_secs = given.silence_secs
        # A chief without checkpoints reports no step.
        told = given.counter_name and given.HasField("saved_step")
        self.saved = (
            ((given.counter_container, given.counter_name), given.saved_step) if told else None
        )

    def _obey_join(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._tasks.check_room((order.sender,), task)
        self._tasks.check_single(order.sender, order.address, task)
        self._tasks.join(order.sender, Participant(order.address, order.join.session))

    def _done_with(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._tasks.check_room((order.sender,), task)
        # The states of a task that is done stay here for the checkpoints that follow.
        if (size := sum(map(len, order.done.states.values()))) > MOST_STATE_BYTES:
            raise InvalidArgumentError(
                f"refused: {order.sender} has states of {size} bytes, and {MOST_STATE_BYTES} are "
                "kept",
                task=task,
            )
        self._tasks.done[order.sender] = None
        if order.done.states:
            self._tasks.states[order.sender] = dict(order.done.states)
        if order.done.goodbye:
            self._tasks.left.add(order.sender)
        self._tasks.leave |= order.done.leave

    def _stop_training(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        # A later order is about a run that has ended by itself.
        if self._phase != FINISHED:
            self._stop = self._stop or order.stop.reason or "somebody has ordered it"

    def _wait_stop(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        sender = Leadership.from_proto(order.leadership).owner

        def told() -> bool:
            # The chief may claim the task again during its wait, so its epoch does not count.
            obeyed = self.leader.leadership
            leads = bool(obeyed) and sender == obeyed.owner
            return bool(self._stop) or (leads and self.goes_at is not None)

        self._wait_until(told, order.wait_stop.secs, task, cancelled)

    def _wait_loaded(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        self._wait_until(lambda: self._phase != LOADING, order.wait_loaded.secs, task, cancelled)

    def _wait_done(self, order: pb.RunOrder, task: str, cancelled: Cancellation) -> None:
        others = self._tasks.joined.keys() - {order.sender}
        self._wait_until(
            lambda: others <= self._tasks.done.keys(), order.wait_done.secs, task, cancelled
        )


_HANDLERS: Mapping[str, Callable[[RunRecord, pb.RunOrder, str, Cancellation], None]] = {
    "inspect": RunRecord._obey_inspect,
    "claim": RunRecord._obey_claim,
    "load": RunRecord._obey_load,
    "open": RunRecord._obey_open,
    "finish": RunRecord._obey_finish,
    "join": RunRecord._obey_join,
    "rest": RunRecord._obey_inspect,
    "done": RunRecord._done_with,
    "wait_loaded": RunRecord._wait_loaded,
    "wait_done": RunRecord._wait_done,
    "stop": RunRecord._stop_training,
    "wait_stop": RunRecord._wait_stop,
}
assert _HANDLERS.keys() == {f.name for f in pb.RunOrder.DESCRIPTOR.oneofs_by_name["order"].fields}


def wait_secs(order: pb.RunOrder) -> float:
    """Returns the longest wait of an order in seconds with the default limit; 0 without a wait."""
    return min(Limits.run_order_secs, max(_list_waits(order)))


def _list_waits(order: pb.RunOrder) -> tuple[float, ...]:
    return order.wait_loaded.secs, order.wait_done.secs, order.wait_stop.secs


def _checked_kind(order: pb.RunOrder, task: str) -> str:
    """Returns the kind of an order; empty for an order of no kind.

    Raises:
        InvalidArgumentError: The order has unknown fields, or an invalid time.
    """
    kind = order.WhichOneof("order") or ""
    # An unknown field may change the meaning of an order, so no order of a later version is half
    # obeyed.
    given: list[Message] = [order, order.leadership, *([getattr(order, kind)] if kind else [])]
    if any(len(UnknownFieldSet(message)) for message in given):
        raise InvalidArgumentError(
            f"an order for the run record{f' to {kind}' if kind else ''} has fields that are not "
            "known here: run one version on all tasks",
            task=task,
        )
    for secs in (order.finish.silence_secs, *_list_waits(order)):
        # Also NaN is refused.
        if not secs >= 0:
            raise InvalidArgumentError(
                f"an order for the run record to {kind} gives {secs} s", task=task
            )
    return kind
