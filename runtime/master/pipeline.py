"""Pipelined steps: the push of one step and the pull of the next travel while the worker computes.

    during computation k:  receive the reply of push k-1,
                           request and receive the parameters of step k+1,
                           begin their copies to an accelerator
    after computation k:   send push k, and do not wait for its reply

So the parameters of a step hold this worker's gradients up to the step before the last: one step
more of staleness than in the strict loop. The reply of a push (the global step) is fetched one step
late. Pipelining is off by default.

A push without a reply may be sent again, after its step has ended for the caller. So a push holds
copies of all arrays that the caller or a later pull may change.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from absl import logging

from runtime import concurrency, timeouts
from runtime.errors import OpError
from runtime.master import times
from runtime.master.calls import StepPhase
from runtime.master.exchange import NOT_COMPUTED, Exchange, Moves, StepRun
from runtime.plan.plan import Plan
from runtime.tensor_spec import AnyArray, Array
from runtime.wire.channel import Lane


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
        self._pulled: StepRun | None = None
        """The run of the next step, with its parameters."""
        self._pushed: tuple[Exchange, list[Sequence[Array]]] | None = None
        """The newest push without a reply, and its arrays."""
        self._replies: dict[int, Array] | None = None
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
            finally:
                # No later step will receive the reply of this push.
                if self._closed() and self._pushed is not None:
                    self._pushed[0].close()

    def flush(self) -> None:
        """Waits for the reply to the last push, and drops parameters pulled ahead."""
        with self._lock:
            self._take_replies()
            # Another plan runs before the next step of this plan, so these replies would be too
            # old.
            self._replies = None
            self._drop_pulled()

    def finish(self) -> None:
        """Waits at the end of the session for the reply to the last push, but not for a silent task.

        A healthy ps answers at once. The wait for a frozen ps, or behind a step of another thread,
        ends when a task would count as silent.
        """
        # A step of another thread may hang on a dead task, and the end of a session waits for no
        # dead task.
        if not self._lock.acquire(timeout=timeouts.HEARTBEAT_TIMEOUT_SECS):
            return
        try:
            limit = concurrency.monotonic() + timeouts.RECONNECT_SECS
            for call, lane in self._pushed[0].lanes() if self._pushed else ():
                peer = call.peer
                while (
                    _is_awaited(lane)
                    and peer.silent_since is None
                    and concurrency.monotonic() < limit
                ):
                    pass
                lane.limit(
                    concurrency.monotonic()
                    + (timeouts.ATTEMPT_SECS if peer.silent_since is None else 0.0)
                )
            self._take_replies()
        except OpError as error:
            logging.warning("the last pipelined push of a session was not answered: %s", error)
        finally:
            self._lock.release()

    def _drop_pulled(self) -> None:
        assert self._lock.locked()
        if self._pulled is not None:
            # The copies to an accelerator may still read the memory.
            jax.block_until_ready(self._pulled.values)
            self._pulled.give_back()
            self._pulled = None

    def _run_step(
        self, feeds: Sequence[AnyArray], step: int, deadline: float | None
    ) -> list[AnyArray | None]:
        values = self._values(feeds, self._step_ids)
        # The first step, or a step after a flush, has nothing pulled ahead.
        run = self._pulled or self._pull_parameters(step, deadline)
        self._pulled = None
        # The step before began the run, without feeds.
        known = slice(self._plan.step_id_slot + 1)
        run.step, run.deadline, run.values[known] = step, deadline, values[known]
        for local in self._compute_phase.local:
            run.execute(local)
        first = self._gives_replies and self._pushed is None and self._replies is None
        # The programs above run while these messages travel.
        self._take_replies()
        self._pulled = self._pull_parameters(step, deadline)
        run.wait()
        run.give_back()
        self._send_push(run)
        # The first step has no earlier reply to return.
        if first:
            self._take_replies()
        replies = self._replies or {}
        run.put(list(replies), replies.values())
        return run.fetch(self._plan.fetches)

    def _pull_parameters(self, step: int, deadline: float | None) -> StepRun:
        """Pulls the parameters of a step, and begins their copies to accelerators."""
        unknown = [NOT_COMPUTED] * self._plan.slots
        run = StepRun(self._session, step, deadline, None, unknown, self._moves)
        exchange = Exchange(run)
        calls = self._pull_phase.remote
        try:
            # All requests go out before the first reply is read, so that the tasks work at the same
            # time.
            for call in calls:
                exchange.open((call,))
                exchange.send(call, ())
            for call in calls:
                run.put(call.reply_slots, exchange.receive(call))
        finally:
            exchange.close()
        return run

    def _send_push(self, run: StepRun) -> None:
        exchange = Exchange(run)
        sent: list[Sequence[Array]] = []
        assert self._pushed is None, "the reply to a push would be lost"
        self._pushed = exchange, sent
        for call in self._push_phase.remote:
            arrays = [
                np.array(value) if slot in self._changing else np.asarray(value)
                for slot, value in zip(call.inline, run.inputs(call), strict=True)
            ]
            # The push may be sent again, so its arrays must live until the reply.
            sent.append(arrays)
            exchange.open((call,))
            exchange.send(call, arrays)

    def _take_replies(self) -> None:
        if self._pushed is None:
            return
        (exchange, _), self._pushed = self._pushed, None
        replies: dict[int, Array] = {}
        # Only the replies of all tasks together are replies of a step.
        self._replies = None
        try:
            for call, _ in list(exchange.lanes()):
                replies.update(zip(call.reply_slots, exchange.receive(call), strict=True))
            self._replies = replies
        finally:
            exchange.close()


def _is_awaited(lane: Lane) -> bool:
    """Returns True if neither a reply nor an error has arrived on a connection after a moment."""
    fd = lane.fileno()
    if fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(times.POLL_SECS * 1000)
