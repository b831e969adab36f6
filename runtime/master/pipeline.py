"""Pipelined steps: the push of one step and the pull of the next travel while the worker computes.

    during computation k:  take the reply of push k-1, ask for the parameters of step k+1 and receive them
    after computation k:   send push k, and do not wait for its reply

So the parameters of a step hold this worker's gradients up to the step before the last: one step more of staleness
than the strict loop. What a push replies (the global step) is fetched one step late. Off by default.

A push may be sent again as long as it was not answered, which is when the step that made it is over for its caller: so
it holds nothing that the caller or a later pull may change.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from runtime import timeouts
from runtime.errors import OpError
from runtime.transport.channel import Lane
from runtime.transport.codec import TensorBuffer

if TYPE_CHECKING:
    from runtime.master.master import MasterSession
    from runtime.master.prepared import PreparedPlan
    from runtime.master.tasks import RemoteCall

_Pulled = dict[int, Any]
"""Slot -> value."""
_LOOK_SECS = 0.1


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
        self._replies: _Pulled | None = None
        """Of the newest push that was answered; None before the first one."""
        self._changing = {slot for call in prepared.phases[0].remote for slot in call.reply_slots}
        """Slots of values in memory that is used again: what is pulled; and what the caller feeds."""
        self._changing.update(range(prepared.plan.feeds))
        self._gives_replies = any(call.reply_slots for call in prepared.phases[2].remote)

    def run(self, feeds: Sequence[Any], step: int, deadline: float | None) -> list[Any]:
        """Runs one step; see ``MasterSession.run``."""
        with self._lock:
            try:
                return self._run(feeds, step, deadline)
            finally:
                if self._session.closed:  # nobody will ask for what was pushed
                    for call, lane, _ in self._pushed:
                        call.task.peer.release(lane)

    def flush(self) -> None:
        """Waits until the last push was answered, and forgets parameters pulled ahead."""
        with self._lock:
            self._take_replies()
            self._replies = None  # of a step that will not be the one before the next
            self._forget()

    def finish(self) -> None:
        """At the end of the session: gives the last push time to be answered, but waits for nobody who is silent.

        A ps that is well answers at once. One that is frozen or cut off is not waited for longer than it takes to be
        counted as silent, and what another thread still runs is not waited for longer than that either.
        """
        if not self._lock.acquire(timeout=timeouts.HEARTBEAT_TIMEOUT_SECS):
            return
        try:
            limit = time.monotonic() + timeouts.RECONNECT_SECS
            for call, lane, _ in self._pushed:
                peer = call.task.peer
                while _is_awaited(lane) and peer.silent_since is None and time.monotonic() < limit:
                    pass
                lane.limit(time.monotonic() + (timeouts.ATTEMPT_SECS if peer.silent_since is None else 0.0))
            self._take_replies()
        except OpError as error:
            logging.warning("the last pipelined push of a session was not answered: %s", error)
        finally:
            self._lock.release()

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
        first = self._gives_replies and not self._pushed and self._replies is None
        self._take_replies()  # this and the next line go on while the programs above run
        self._pulled = self._pull(step, deadline)
        for local, done in running:
            local.registered.prepared.wait(done)
        for call, buffer in borrowed:
            call.buffers.append(buffer)
        self._push(values, step, deadline)
        if first:
            self._take_replies()  # there is no earlier reply to give
        for slot, value in (self._replies or {}).items():
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
            arrays = [
                np.array(values[slot]) if slot in self._changing else np.asarray(values[slot]) for slot in call.inline
            ]
            lane = call.task.peer.acquire(deadline=deadline)
            self._pushed.append((call, lane, arrays))  # the arrays must live until the reply: they may be sent again
            lane.send(call.handle, step, arrays, dynamic=call.dynamic, deadline=deadline)

    def _take_replies(self) -> None:
        pushed, self._pushed = self._pushed, []
        if not pushed:
            return
        replies: _Pulled = {}
        self._replies = None  # unless all have answered
        try:
            for call, lane, _ in pushed:
                replies.update(zip(call.reply_slots, lane.receive(call.reply_layout), strict=True))
            self._replies = replies
        finally:
            for call, lane, _ in pushed:
                call.task.peer.release(lane)


def _is_awaited(lane: Lane) -> bool:
    """Whether a connection has brought neither an answer nor trouble after a moment."""
    fd = lane.fileno()
    if fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return not poll.poll(_LOOK_SECS * 1000)
