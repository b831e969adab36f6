"""A flow: the stage calls of a phase in which some calls may wait.

A call begins as soon as the calls before have finished. A call that waits holds up no other call,
because another call of the step may end the wait. A call that may wait has a thread of its own if
its task is in this process. Replies are received in the order of their arrival. If a task is lost,
its error is raised at once, and all other waits are given up.
"""

import os
import select
from collections.abc import Sequence

import jax
import numpy as np

from runtime import concurrency, timeouts
from runtime.master import times
from runtime.master.calls import FlowCall, LocalCall, RemoteCall
from runtime.master.exchange import Exchange, StepRun, Stopwatch
from runtime.plan.plan import COMPUTE
from runtime.state.cancellation import Cancellation
from runtime.tensor_spec import AnyArray
from runtime.wire.channel import Lane


def run_flow(flow: Sequence[FlowCall], run: StepRun, exchange: Exchange, watch: Stopwatch) -> None:
    """Runs the calls of a flow.

    Args:
        flow: the calls.
        run: the step.
        exchange: the step's calls to other tasks.
        watch: the clock of the step. The time until a call has finished counts to the call's part.
    """
    flow_run = _FlowRun(flow, run, exchange, watch)
    try:
        flow_run.run_calls()
    finally:
        flow_run.close()


class _FlowRun:
    """The state of a flow under way."""

    def __init__(
        self, flow: Sequence[FlowCall], run: StepRun, exchange: Exchange, watch: Stopwatch
    ) -> None:
        self._flow = flow
        self._run = run
        self._exchange = exchange
        self._watch = watch
        self._todo = {i: set(call.after) for i, call in enumerate(flow)}
        self._number = {call.call: i for i, call in enumerate(flow)}
        self._computed: set[int] = set()
        """Slots of values whose computation on this task may still be under way."""
        self._threads: dict[int, _LocalThread] = {}
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)

    def run_calls(self) -> None:
        """Begins calls and receives replies, until all calls have finished."""
        self._begin_ready()
        while len(self._exchange) or self._threads:
            for call in self._wait_answered():
                self._run.put(call.reply_slots, self._exchange.receive(call))
                self._finish_call(self._number[call])
            for i in [i for i, thread in self._threads.items() if thread.ended]:
                thread = self._threads.pop(i)
                thread.join()
                outputs, done = thread.result()
                self._run.put(thread.call.outputs, outputs)
                self._run.running.append((thread.call, done))
                self._note_computing(i, thread.call)
            self._begin_ready()
        assert not self._todo, "the calls wait for each other"

    def close(self) -> None:
        """Gives up the calls under way."""
        # All waits are ended before the first is waited for.
        for thread in self._threads.values():
            thread.cancelled.set("another part of the step failed")
        self._exchange.close()
        # The threads write into ``_woken``, which closes next.
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join()
        assert all(thread.ended for thread in self._threads.values() if thread.ident is not None)
        os.close(self._woken)

    def _begin_ready(self) -> None:
        # A call on this task may finish at once, and so free further calls.
        while ready := [i for i, left in self._todo.items() if not left]:
            for i in ready:
                del self._todo[i]
            calls = [(i, self._flow[i].call) for i in ready]
            far = [call for _, call in calls if isinstance(call, RemoteCall)]
            here = [(i, call) for i, call in calls if isinstance(call, LocalCall)]
            # Calls to other tasks go first: their tasks work while this task starts its own calls.
            self._exchange.open(far)
            for remote in far:
                self._send_call(remote)
            for i, local in here:
                if self._flow[i].waits:
                    thread = self._threads[i] = _LocalThread(local, self._run, self._woken)
                    if self._run.ending is not None:
                        self._run.ending.include(thread.cancelled)
                    thread.start()
            for i, local in here:
                if not self._flow[i].waits:
                    self._run.execute(local)
                    self._note_computing(i, local)

    def _send_call(self, call: RemoteCall) -> None:
        arrays = [np.asarray(value) for value in self._run.inputs(call)]
        if not self._computed.isdisjoint(call.inline):
            self._watch.count(COMPUTE)
        # A wait of the step may have ended just in time. Its result must still reach the next call.
        deadline = self._run.deadline
        if deadline is not None and not call.waits:
            deadline += timeouts.LAST_WORD_SECS
        self._exchange.send(call, arrays, deadline)

    def _note_computing(self, i: int, call: LocalCall) -> None:
        self._computed.update(call.outputs)
        self._finish_call(i)

    def _finish_call(self, i: int) -> None:
        assert i not in self._todo, "a call ends before its begin"
        for left in self._todo.values():
            left.discard(i)
        self._watch.count(self._flow[i].part)

    def _wait_answered(self) -> list[RemoteCall]:
        """Waits for a reply, the end of a thread or a tick, and returns the calls that have a reply.

        Raises:
            OpError: a call can have no reply any more.
        """
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        by_fd: dict[int, tuple[RemoteCall, Lane]] = {}
        for call, lane in self._exchange.lanes():
            # A call without a connection could not be sent. ``answered`` sends the call on another
            # connection.
            if lane.fileno() < 0 and lane.answered():
                return [call]
            fd = lane.fileno()
            by_fd[fd] = call, lane
            poll.register(fd, select.POLLIN)
        found = [fd for fd, _ in poll.poll(self._tick_secs() * 1000)]
        if self._woken in found:
            os.eventfd_read(self._woken)
        # A call whose connection has broken is sent again, and its reply is awaited with all
        # others.
        answered = [
            call for call, lane in (by_fd[fd] for fd in found if fd in by_fd) if lane.answered()
        ]
        if not answered:
            # After a tick without news, each connection checks the life of its task.
            for _, lane in self._exchange.lanes():
                lane.stalled()
        return answered

    def _tick_secs(self) -> float:
        if self._run.deadline is None:
            return times.TICK_SECS
        left = self._run.deadline - concurrency.monotonic()
        # The millisecond makes sure that the deadline has passed at the next look.
        return min(left + 0.001, times.TICK_SECS) if left > 0 else times.LATE_TICK_SECS


class _LocalThread(concurrency.Thread):
    """A thread for a call that may wait, on a task of this process."""

    def __init__(self, call: LocalCall, run: StepRun, woken: int) -> None:
        super().__init__(name=f"step-{run.step}", daemon=True)
        self.call = call
        self.cancelled = Cancellation(run.deadline)
        self.ended = False
        self._arguments = (call.registered, run.session, run.step, run.inputs(call))
        self._woken = woken
        self._result: tuple[list[AnyArray], jax.Array | None] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, and wakes the thread of the flow."""
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
