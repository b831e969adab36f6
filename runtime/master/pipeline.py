"""Pipelined steps: push, computation and pull overlap, and both directions of the network are used.

A trip is the push of a step, and then the pull of a later step. With ``prefetch=n`` there are n + 1
trips at once, each with a connection of its own. With ``prefetch=1``:

    the step    compute 5    compute 6    compute 7
    trip 4      push 4       pull 6
    trip 5                   push 5       pull 7
    trip 6                                push 6     pull 8

The parameters of a step lack the newest n pushes of this worker at most; a task may serve the pull of
a later step first. A push is sent after the reply of the push before, so a task applies the pushes
of a worker in their order. The reply of a push (the global step) is fetched one step late.
Pipelining is off by default.

Small messages fit into the buffers of the sockets, so the step itself sends and receives them, and
rarely waits. A thread would cost more than it saves. Each trip with large messages has a thread.

A push without a reply may be sent again, after its step has ended for the caller. So a push holds
copies of all arrays that the caller or a later pull may change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import jax
import numpy as np
from absl import logging

from runtime import concurrency, timeouts
from runtime.master import times
from runtime.master.calls import RemoteCall, StepPhase
from runtime.master.exchange import NOT_COMPUTED, Exchange, Moves, StepRun
from runtime.plan.plan import Plan
from runtime.tensor_spec import AnyArray, Array

_BUFFERED_BYTES = 1 << 20
"""The most bytes of small messages: half a megabyte in each direction, as a Unix socket holds."""
_Replies = dict[int, Array]
_Calls = Sequence[tuple[RemoteCall, Sequence[Array]]]


def can_pipeline(phases: Sequence[StepPhase], plan: Plan) -> bool:
    """Returns True if a plan is a training step: pull from ps, compute here, push to ps."""
    # A synchronous push is a host stage, and must have finished before the next pull.
    if len(phases) != 3 or any(call.stage.host for call in plan.stages):
        return False
    pull, compute, push = phases
    if (
        pull.local
        or compute.remote
        or push.local
        or not (pull.remote and compute.local and push.remote)
    ):
        return False
    # A pull that is sent a step early must not change a task, and must not depend on this step.
    reads_only = all(
        not call.inline and not call.writes_state and not call.dynamic for call in pull.remote
    )
    pulled = {slot for call in pull.remote for slot in call.reply_slots}
    return reads_only and not pulled.intersection(plan.fetches)


class _Trip:
    """The push of a step, and then the pull of a later step.

    A trip does not hold its pipeline, so a session may be dropped during a trip.

    Args:
        run: the later step, still with the number and the deadline of the pushed step.
        push: the calls of the push with their arrays; none at the start.
        pull: the calls of the pull.
    """

    def __init__(self, run: StepRun, push: _Calls, pull: _Calls) -> None:
        self._run = run
        self._push, self._pull = push, pull
        self._exchange = Exchange(run)
        self._replies: _Replies | None = None
        self._depart()

    def _depart(self) -> None:
        self._send(self._push)

    @property
    def is_answered(self) -> bool:
        """True if no replies and no error of the push are awaited."""
        return self._replies is not None or not len(self._exchange)

    def replies(self, deadline: float | None) -> _Replies:
        """Waits for the replies of the push, by slot. The pull has begun then.

        Args:
            deadline: that of the step that waits.
        """
        if self._replies is None:
            replies: _Replies = {}

            def put(slots: Sequence[int], arrays: Sequence[Array]) -> None:
                replies.update(zip(slots, arrays, strict=True))

            self._receive(self._push, deadline, put)
            self._replies = replies
            # The gradients need no memory from here on.
            self._push = ()
            self._run.deadline = deadline
            self._send(self._pull)
        return self._replies

    def parameters(self, deadline: float | None) -> StepRun:
        """Waits for the later step with its parameters; the argument as of ``replies``."""
        self.replies(deadline)
        # The copies to accelerators begin here.
        self._receive(self._pull, deadline, self._run.put)
        self._pull = ()
        return self._run

    def give_up(self) -> None:
        """Gives up the pull."""
        self._exchange.close()

    def _send(self, calls: _Calls) -> None:
        try:
            # All calls go out before the first reply is read, so that the tasks work at the same
            # time.
            self._exchange.open([call for call, _ in calls])
            for call, arrays in calls:
                self._exchange.send(call, arrays)
        except BaseException:
            self._exchange.close()
            raise

    def _receive(
        self,
        calls: _Calls,
        deadline: float | None,
        put: Callable[[Sequence[int], Sequence[Array]], None],
    ) -> None:
        try:
            # The step that has sent the calls may have ended long ago.
            if deadline is not None:
                for _, lane in self._exchange.lanes():
                    lane.limit(deadline)
            for call, _ in calls:
                put(call.reply_slots, self._exchange.receive(call))
        except BaseException:
            self._exchange.close()
            raise


class _TripApart(_Trip):
    """A trip on a thread of its own."""

    def _depart(self) -> None:
        run = self._run
        # A trip lasts into later steps, and has the time of another step.
        if run.deadline is not None:
            run.deadline += run.deadline - concurrency.monotonic()
        self._answered: futures.Future[_Replies] = futures.Future()
        self._returned = concurrency.in_thread(self._travel, "pipelined step")

    def _travel(self) -> StepRun:
        try:
            self._send(self._push)
            self._answered.set_result(super().replies(self._run.deadline))
        except BaseException as error:
            self._answered.set_exception(error)
            raise
        return super().parameters(self._run.deadline)

    @property
    def is_answered(self) -> bool:
        """True after the replies or the error of the push."""
        return self._answered.done()

    def replies(self, deadline: float | None) -> _Replies:
        """Waits for the replies of the push, by slot. The pull has begun then."""
        return self._answered.result()

    def parameters(self, deadline: float | None) -> StepRun:
        """Waits for the later step with its parameters."""
        return self._returned.result()

    def give_up(self) -> None:
        """Leaves the pull to the thread, which ends on its own."""


class Pipeline:
    """The overlapped steps of one plan.

    A second thread waits until the step of the first has returned.

    Args:
        phases: pull, compute, push.
        plan: the plan.
        session: id of the session.
        values: the function that makes the table of values of a step (``PreparedPlan.values``).
        moves: the copies to accelerators.
        step_ids: the ids of the next steps.
        closed: a function that returns True after the end of the session.
        prefetch: the number of steps whose parameters are pulled ahead.
        wire_bytes: bytes of tensors in the messages of a step.
    """

    def __init__(
        self,
        phases: Sequence[StepPhase],
        plan: Plan,
        session: int,
        values: Callable[[Sequence[AnyArray], Iterator[Array]], list[AnyArray]],
        moves: Moves,
        step_ids: Iterator[Array],
        closed: Callable[[], bool],
        prefetch: int,
        wire_bytes: int,
    ) -> None:
        assert can_pipeline(phases, plan)
        self._pull_phase, self._compute_phase, self._push_phase = phases
        self._plan = plan
        self._session = session
        self._values = values
        self._moves = moves
        self._step_ids = step_ids
        self._lock = concurrency.Lock()
        self._closed = closed
        self._prefetch = prefetch
        self._pulls = [(call, ()) for call in self._pull_phase.remote]
        self._apart = wire_bytes > _BUFFERED_BYTES
        self._ahead: deque[_Trip] = deque()
        """The trips that pull the parameters of the next steps."""
        self._pushed: _Trip | None = None
        """The trip with the newest push, until a step has taken the replies."""
        self._replies: _Replies | None = None
        """The replies of the newest answered push by slot; None before the first reply."""
        pulled = (slot for call in self._pull_phase.remote for slot in call.reply_slots)
        # The caller may change an array after its step has returned.
        self._changing = {*pulled, *range(plan.feeds)}
        """Slots of values whose memory changes later: pulled parameters, and feeds of the caller."""
        self._gives_replies = any(call.reply_slots for call in self._push_phase.remote)

    def run(
        self, feeds: Sequence[AnyArray], step: int, deadline: float | None
    ) -> list[AnyArray | None]:
        """Runs one step; see ``MasterSession.run``."""
        with self._lock:
            try:
                return self._run_step(feeds, step, deadline)
            except BaseException:
                self._give_up_pulls()
                raise

    def flush(self) -> None:
        """Waits for the reply to the last push, and drops parameters pulled ahead."""
        with self._lock:
            # Another plan runs before the next step of this plan, so the replies and the parameters
            # would be too old.
            try:
                self._take_replies(None)
                while self._ahead:
                    run = self._ahead.popleft().parameters(None)
                    # The copies to an accelerator may still read the memory.
                    jax.block_until_ready(run.values)
                    run.give_back()
            finally:
                self._replies = None
                self._give_up_pulls()

    def _give_up_pulls(self) -> None:
        """Gives up the pulls, but no push: the next step pulls anew, and meets the error of the push."""
        assert self._lock.locked()
        for trip in list(self._ahead):
            if trip is not self._pushed:
                trip.give_up()
                self._ahead.remove(trip)

    def finish(self) -> None:
        """Waits at the end of the session for the reply to the last push, but not for a silent task.

        A healthy ps answers at once. The wait for a frozen ps, or behind a step of another thread,
        ends when a task counts as silent.
        """
        flushed = concurrency.in_thread(self.flush, "last push")
        peers = {call.peer for call in (*self._push_phase.remote, *self._pull_phase.remote)}
        limit = concurrency.monotonic() + timeouts.RECONNECT_SECS
        while (
            not futures.wait([flushed], times.POLL_SECS).done
            and all(peer.silent_since is None for peer in peers)
            and concurrency.monotonic() < limit
        ):
            pass
        # The end of the session cancels the wait that goes on.
        error = flushed.exception() if flushed.done() else "no answer in time"
        if error is not None:
            logging.warning("the last pipelined push of a session was not answered: %s", error)

    def _run_step(
        self, feeds: Sequence[AnyArray], step: int, deadline: float | None
    ) -> list[AnyArray | None]:
        values = self._values(feeds, self._step_ids)
        # The first step, or a step after a flush, has nothing pulled ahead.
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._begin_trip(step, deadline, ()))
            # There is no push to wait for, so the pull begins.
            self._ahead[-1].replies(deadline)
        run = self._ahead.popleft().parameters(deadline)
        # The step before began the run, without feeds.
        known = slice(self._plan.step_id_slot + 1)
        run.step, run.deadline, run.values[known] = step, deadline, values[known]
        for local in self._compute_phase.local:
            run.execute(local)
        first = self._gives_replies and self._pushed is None and self._replies is None
        self._take_replies(deadline)
        # An accelerator computes while the parameters of the next step are copied there.
        if self._moves and not self._apart:
            self._ahead[0].parameters(deadline)
        run.wait()
        push = [(call, self._keep(run, call)) for call in self._push_phase.remote]
        run.give_back()
        self._pushed = self._begin_trip(step, deadline, push)
        self._ahead.append(self._pushed)
        # The first step has no earlier reply to return. No later step takes the reply of the last.
        if first or self._closed():
            self._take_replies(deadline)
        replies = self._replies or {}
        run.put(list(replies), replies.values())
        return run.fetch(self._plan.fetches)

    def _begin_trip(self, step: int, deadline: float | None, push: _Calls) -> _Trip:
        assert self._pushed is None, "two pushes could change places"
        unknown = [NOT_COMPUTED] * self._plan.slots
        run = StepRun(self._session, step, deadline, None, unknown, self._moves)
        make = _TripApart if self._apart else _Trip
        return make(run, push, self._pulls)

    def _keep(self, run: StepRun, call: RemoteCall) -> Sequence[Array]:
        """Returns the inputs of a push in memory that does not change before the reply."""
        return [
            np.array(value) if slot in self._changing else np.asarray(value)
            for slot, value in zip(call.inline, run.inputs(call), strict=True)
        ]

    def _take_replies(self, deadline: float | None) -> None:
        if self._pushed is None:
            return
        # Only the replies of all tasks together are replies of a step.
        self._replies = None
        try:
            self._replies = self._pushed.replies(deadline)
        finally:
            # After an interrupt the next step takes the replies.
            if self._pushed.is_answered:
                self._pushed = None
