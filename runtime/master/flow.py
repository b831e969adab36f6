"""A flow: the stage calls of a phase of which some may wait. Each begins as soon as those it depends on are over.

A call that waits does not hold up the others. One on a task of this process has a thread of its own. Answers are taken
in the order in which they come. If a task is lost, its error is raised at once and the waits elsewhere are given up.
What a call waits for may be done by a later call of the same step.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

import jax
import numpy as np

from runtime import concurrency, timeouts
from runtime.master.calls import FlowCall, LocalCall, RemoteCall
from runtime.master.exchange import Exchange, Run, Stopwatch
from runtime.plan.plan import COMPUTE
from runtime.state.cancellation import Cancellation
from runtime.tensor_spec import AnyArray
from runtime.wire.channel import Lane

_TICK_SECS = 1.0
_LATE_TICK_SECS = 0.1


def run_flow(flow: Sequence[FlowCall], run: Run, exchange: Exchange, watch: Stopwatch) -> None:
    """Runs the calls of a flow.

    Args:
        flow: the calls.
        run: the step.
        exchange: makes its calls to other tasks.
        watch: what passes until a call is over counts to its part of the step.
    """
    going = _Flow(flow, run, exchange, watch)
    try:
        going.to_the_end()
    finally:
        going.close()


class _Flow:
    def __init__(self, flow: Sequence[FlowCall], run: Run, exchange: Exchange, watch: Stopwatch) -> None:
        self._flow = flow
        self._run = run
        self._exchange = exchange
        self._watch = watch
        self._todo = {i: set(call.after) for i, call in enumerate(flow)}
        self._number = {call.call: i for i, call in enumerate(flow)}
        self._computed: set[int] = set()
        """Slots of values that this task may still be computing."""
        self._threads: dict[int, _LocalThread] = {}
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)

    def to_the_end(self) -> None:
        """Begins calls that can begin and takes replies, until all calls have finished."""
        self._begin()
        while len(self._exchange) or self._threads:
            for call in self._answered():
                self._run.put(call.reply_slots, self._exchange.receive(call))
                self._over(self._number[call])
            for i in [i for i, thread in self._threads.items() if thread.ended]:
                thread = self._threads.pop(i)
                thread.join()
                outputs, done = thread.result()
                self._run.put(thread.call.outputs, outputs)
                self._run.running.append((thread.call, done))
                self._computes(i, thread.call)
            self._begin()

    def close(self) -> None:
        """Gives up the calls under way."""
        for thread in self._threads.values():
            thread.cancelled.set("another part of the step failed")
        self._exchange.close()
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join()
        os.close(self._woken)

    def _begin(self) -> None:
        while ready := [i for i, left in self._todo.items() if not left]:
            for i in ready:
                del self._todo[i]
            calls = [(i, self._flow[i].call) for i in ready]
            far = [call for _, call in calls if isinstance(call, RemoteCall)]
            here = [(i, call) for i, call in calls if isinstance(call, LocalCall)]
            self._exchange.open(far)
            for remote in far:
                self._send(remote)
            for i, local in here:
                if self._flow[i].waits:
                    thread = self._threads[i] = _LocalThread(local, self._run, self._woken)
                    if self._run.ending is not None:
                        self._run.ending.include(thread.cancelled)
                    thread.start()
            for i, local in here:
                if not self._flow[i].waits:
                    self._run.execute(local)
                    self._computes(i, local)

    def _send(self, call: RemoteCall) -> None:
        arrays = [np.asarray(value) for value in self._run.inputs(call)]
        if not self._computed.isdisjoint(call.inline):
            self._watch.count(COMPUTE)
        deadline = self._run.deadline
        if deadline is not None and not call.waits:
            deadline += timeouts.LAST_WORD_SECS  # what a wait of the step was given just in time is not lost to this
        self._exchange.send(call, arrays, deadline)

    def _computes(self, i: int, call: LocalCall) -> None:
        self._computed.update(call.outputs)
        self._over(i)

    def _over(self, i: int) -> None:
        for left in self._todo.values():
            left.discard(i)
        self._watch.count(self._flow[i].part)

    def _answered(self) -> list[RemoteCall]:
        """Returns the calls elsewhere that have a reply; none when a thread has ended, or a tick has passed.

        Raises:
            OpError: one of them can have none.
        """
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        by_fd: dict[int, tuple[RemoteCall, Lane]] = {}
        for call, lane in self._exchange.lanes():
            if lane.fileno() < 0 and lane.answered():  # it could not be sent: now it is, on another connection
                return [call]
            fd = lane.fileno()
            by_fd[fd] = call, lane
            poll.register(fd, select.POLLIN)
        found = [fd for fd, _ in poll.poll(self._tick_secs() * 1000)]
        if self._woken in found:
            os.eventfd_read(self._woken)
        # One whose connection has broken is sent again, and not waited for more than the others.
        answered = [call for call, lane in (by_fd[fd] for fd in found if fd in by_fd) if lane.answered()]
        if not answered:
            for _, lane in self._exchange.lanes():
                lane.stalled()
        return answered

    def _tick_secs(self) -> float:
        if self._run.deadline is None:
            return _TICK_SECS
        left = self._run.deadline - concurrency.monotonic()
        return min(left + 0.001, _TICK_SECS) if left > 0 else _LATE_TICK_SECS


class _LocalThread(concurrency.Thread):
    """One call that may wait on a task of this process."""

    def __init__(self, call: LocalCall, run: Run, woken: int) -> None:
        super().__init__(name=f"step-{run.step}", daemon=True)
        self.call = call
        self.cancelled = Cancellation(run.deadline)
        self.ended = False
        self._arguments = (call.registered, run.session, run.step, run.inputs(call))
        self._woken = woken
        self._result: tuple[list[AnyArray], jax.Array | None] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, and wakes the thread that waits."""
        try:
            self._result = self.call.worker.execute(*self._arguments, cancelled=self.cancelled)
        except BaseException as error:
            self._error = error
        finally:
            self.ended = True
            os.eventfd_write(self._woken, 1)

    def result(self) -> tuple[list[AnyArray], jax.Array | None]:
        """Returns the results of the call, or raises its error."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
