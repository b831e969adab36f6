"""Pipelined steps: the push of one step and the pull of the next travel while the worker computes.

    during computation k:  take the reply of push k-1, ask for the parameters of step k+1 and receive them
    after computation k:   send push k, and do not wait for its reply

So the parameters of a step hold this worker's gradients up to the step before the last: one step more of staleness
than the strict loop. What a push replies (the global step) is fetched one step late. Off by default.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.transport.channel import Lane
from runtime.transport.codec import TensorBuffer

if TYPE_CHECKING:
    from runtime.server.master import MasterSession
    from runtime.server.prepared import PreparedPlan
    from runtime.server.tasks import RemoteCall

_Pulled = dict[int, Any]
"""Slot -> value."""


def can_pipeline(prepared: PreparedPlan) -> bool:
    """Whether a plan is a training step: pull from ps, compute here, push to ps."""
    if len(prepared.phases) != 3 or any(call.stage.host for call in prepared.plan.stages):
        return False  # a synchronous push must be over before the next pull
    pull, compute, push = prepared.phases
    if pull.local or compute.remote or push.local or not (pull.remote and compute.local and push.remote):
        return False
    reads_only = all(not call.inline and not call.writes_state and not call.dynamic for call in pull.remote)
    pulled = {slot for call in pull.remote for slot in call.reply_slots}
    return reads_only and not pulled.intersection(prepared.plan.fetches)


class Pipeline:
    """The steps of one plan, overlapped. One step at a time: a second thread waits for the first."""

    def __init__(self, session: MasterSession, prepared: PreparedPlan) -> None:
        self._session = session
        self._prepared = prepared
        self._lock = threading.Lock()
        self._pulled: tuple[_Pulled, list[tuple[RemoteCall, TensorBuffer]]] | None = None
        self._pushed: list[tuple[RemoteCall, Lane, Sequence[Any]]] = []
        self._replies: _Pulled = {}

    def run(self, feeds: Sequence[Any], step: int, deadline: float | None) -> list[Any]:
        """Runs one step; see ``MasterSession.run``."""
        with self._lock:
            return self._run(feeds, step, deadline)

    def flush(self) -> None:
        """Waits until the last push was answered, and forgets parameters pulled ahead."""
        with self._lock:
            self._take_replies()
            self._replies = {}  # of a step that will not be the one before the next
            self._forget()

    def _forget(self) -> None:
        if self._pulled is not None:
            for call, buffer in self._pulled[1]:
                call.buffers.append(buffer)
            self._pulled = None

    def _run(self, feeds: Sequence[Any], step: int, deadline: float | None) -> list[Any]:
        plan = self._prepared.plan
        if self._pulled is None:
            self._pulled = self._pull(step, deadline)
        pulled, borrowed = self._pulled
        self._pulled = None
        values: list[Any] = [*feeds, *plan.constants, None] + [None] * (plan.slots - plan.step_id_slot - 1)
        if self._prepared.uses_step_id:
            values[plan.step_id_slot] = self._session.next_step_id()
        for slot, value in pulled.items():
            values[slot] = value
        running = []
        for local in self._prepared.phases[1].local:
            outputs, done = local.worker.execute(
                local.registered, self._session.id, step, [values[slot] for slot in local.inline]
            )
            for slot, value in zip(local.outputs, outputs, strict=True):
                values[slot] = value
            running.append((local, done))
        first = not self._pushed and not self._replies
        self._take_replies()  # this and the next line go on while the programs above run
        self._pulled = self._pull(step, deadline)
        for local, done in running:
            local.registered.prepared.wait(done)
        for call, buffer in borrowed:
            call.buffers.append(buffer)
        self._push(values, step, deadline)
        if first:
            self._take_replies()  # there is no earlier reply to give
        for slot, value in self._replies.items():
            values[slot] = value
        return [None if slot < 0 else values[slot] for slot in plan.fetches]

    def _pull(self, step: int, deadline: float | None) -> tuple[_Pulled, list[tuple[RemoteCall, TensorBuffer]]]:
        sent: list[tuple[RemoteCall, Lane]] = []
        pulled: _Pulled = {}
        borrowed: list[tuple[RemoteCall, TensorBuffer]] = []
        try:
            for call in self._prepared.phases[0].remote:
                lane = call.task.peer.acquire(deadline=deadline)
                sent.append((call, lane))
                lane.send(call.handle, step, (), deadline=deadline)
            for call, lane in sent:
                buffer = call.borrow()
                borrowed.append((call, buffer))
                pulled.update(zip(call.reply_slots, lane.receive(call.reply_layout, buffer), strict=True))
        finally:
            for call, lane in sent:
                call.task.peer.release(lane)
        return pulled, borrowed

    def _push(self, values: list[Any], step: int, deadline: float | None) -> None:
        for call in self._prepared.phases[2].remote:
            arrays = [np.asarray(values[slot]) for slot in call.inline]
            lane = call.task.peer.acquire(deadline=deadline)
            self._pushed.append((call, lane, arrays))  # the arrays must live until the reply: they may be sent again
            lane.send(call.handle, step, arrays, dynamic=call.dynamic, deadline=deadline)

    def _take_replies(self) -> None:
        pushed, self._pushed = self._pushed, []
        try:
            for call, lane, _ in pushed:
                self._replies.update(zip(call.reply_slots, lane.receive(call.reply_layout), strict=True))
        finally:
            for call, lane, _ in pushed:
                call.task.peer.release(lane)
