"""Flows: stage calls of a step of which some may wait, each begun as soon as those are over on which it depends.

A call that waits must not hold up the others: on the way to them (one on a task of this process has a thread of its
own), on the way back (answers are taken in the order in which they come; if one task is lost, its error is raised at
once, and the waits elsewhere are given up), or by its place in the step (what it waits for may be done by a later one).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime import timeouts
from runtime.master.prepared import FlowCall, LocalCall
from runtime.observe.counters import COMPUTE
from runtime.state.cancellation import Cancellation
from runtime.task.ending import StepEnding
from runtime.transport.channel import Lane
from runtime.transport.codec import TensorBuffer

if TYPE_CHECKING:
    from runtime.master.tasks import RemoteCall

_TICK_SECS = 1.0
_LATE_TICK_SECS = 0.1
_clock = time.perf_counter_ns


def run_flow(
    flow: Sequence[FlowCall],
    session: int,
    step: int,
    values: list[Any],
    deadline: float | None,
    borrowed: list[tuple[RemoteCall, TensorBuffer]],
    running: list[tuple[LocalCall, Any]],
    ending: StepEnding | None,
    parts_ns: list[int],
    last: int,
) -> int:
    """Runs the calls of a flow.

    Args:
        flow: the calls.
        session: for whom.
        step: number of the step.
        values: of the step, by slot.
        deadline: ``time.monotonic()`` at which calls give up.
        borrowed: is given the memory that replies came to.
        running: is given the computations on this task that go on.
        ending: how somebody else may end the step.
        parts_ns: the times of the parts of steps: what passes until a call is over counts to its part.
        last: ``time.perf_counter_ns()`` up to which time was counted.

    Returns:
        Up to when it is now.
    """
    run = _Run(flow, session, step, values, deadline, borrowed, running, ending, parts_ns, last)
    try:
        run.to_the_end()
    finally:
        run.close()
    return run.last


class _Run:
    def __init__(
        self,
        flow: Sequence[FlowCall],
        session: int,
        step: int,
        values: list[Any],
        deadline: float | None,
        borrowed: list[tuple[RemoteCall, TensorBuffer]],
        running: list[tuple[LocalCall, Any]],
        ending: StepEnding | None,
        parts_ns: list[int],
        last: int,
    ) -> None:
        self.last = last
        self._flow = flow
        self._session = session
        self._step = step
        self._values = values
        self._deadline = deadline
        self._borrowed = borrowed
        self._running = running
        self._ending = ending
        self._parts_ns = parts_ns
        self._todo = {i: set(call.after) for i, call in enumerate(flow)}
        self._computed: set[int] = set()
        """Slots of values that this task may still be computing."""
        self._lanes: dict[int, tuple[RemoteCall, Lane]] = {}
        self._threads: dict[int, _LocalThread] = {}
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)

    def to_the_end(self) -> None:
        """Begins what can begin and takes what has come, until all is over."""
        self._begin()
        while self._lanes or self._threads:
            for i in self._answered():
                self._receive(i)
            for i in [i for i, thread in self._threads.items() if thread.ended]:
                thread = self._threads.pop(i)
                thread.join()
                self._computes(i, thread.call, *thread.result())
            self._begin()

    def close(self) -> None:
        """Gives up what is still under way."""
        if self._ending is not None:
            self._ending.uncover(lane for _, lane in self._lanes.values())
        for thread in self._threads.values():
            thread.cancelled.set("another part of the step failed")
        for call, lane in self._lanes.values():
            call.task.peer.release(lane)  # a lane whose reply was not received is dropped
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join()
        os.close(self._woken)

    def _begin(self) -> None:
        while ready := [i for i, left in self._todo.items() if not left]:
            here: list[tuple[int, LocalCall]] = []
            far: list[tuple[int, RemoteCall]] = []
            for i in ready:
                del self._todo[i]
                call = self._flow[i].call
                if isinstance(call, LocalCall):
                    here.append((i, call))
                else:
                    far.append((i, call))
            for i, remote in far:  # a task that is lost is found out before any other is told to do something
                self._lanes[i] = remote, remote.task.peer.acquire(deadline=self._deadline)
            if self._ending is not None:
                self._ending.cover(self._lanes[i][1] for i, _ in far)
            for i, remote in far:
                self._send(i, remote)
            for i, local in here:
                if self._flow[i].waits:
                    thread = self._threads[i] = _LocalThread(
                        local, self._session, self._step, self._inline(local), self._deadline, self._woken
                    )
                    if self._ending is not None:
                        self._ending.include(thread.cancelled)
                    thread.start()
            for i, local in here:
                if not self._flow[i].waits:
                    execute, inline = local.worker.execute, self._inline(local)
                    self._computes(i, local, *execute(local.registered, self._session, self._step, inline))

    def _inline(self, call: LocalCall) -> list[Any]:
        return [self._values[slot] for slot in call.inline]

    def _send(self, i: int, call: RemoteCall) -> None:
        arrays = [np.asarray(self._values[slot]) for slot in call.inline]
        if not self._computed.isdisjoint(call.inline):
            self._count(COMPUTE)
        deadline = self._deadline
        if deadline is not None and not call.waits:
            deadline += timeouts.LAST_WORD_SECS  # what a wait of the step was given just in time is not lost to this
        self._lanes[i][1].send(
            call.handle, self._step, arrays, dynamic=call.dynamic, deadline=deadline, waits=call.waits
        )

    def _receive(self, i: int) -> None:
        call, lane = self._lanes[i]
        buffer = None
        if call.reuse:
            buffer = call.borrow()
            self._borrowed.append((call, buffer))
        for slot, value in zip(call.reply_slots, lane.receive(call.reply_layout, buffer), strict=True):
            self._values[slot] = value
        del self._lanes[i]
        if self._ending is not None:
            self._ending.uncover((lane,))
        call.task.peer.release(lane)
        self._over(i)

    def _computes(self, i: int, call: LocalCall, outputs: Sequence[Any], done: Any) -> None:
        for slot, value in zip(call.outputs, outputs, strict=True):
            self._values[slot] = value
        self._computed.update(call.outputs)
        self._running.append((call, done))
        self._over(i)

    def _over(self, i: int) -> None:
        for left in self._todo.values():
            left.discard(i)
        self._count(self._flow[i].part)

    def _count(self, part: int) -> None:
        now = _clock()
        self._parts_ns[part] += now - self.last
        self.last = now

    def _answered(self) -> list[int]:
        """The calls elsewhere that have an answer; none when a thread has ended, or a tick has passed.

        Raises:
            OpError: one of them can have none.
        """
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        by_fd: dict[int, int] = {}
        for i, (_, lane) in self._lanes.items():
            if lane.fileno() < 0 and lane.answered():  # it could not be sent: now it is, on another connection
                return [i]
            fd = lane.fileno()
            by_fd[fd] = i
            poll.register(fd, select.POLLIN)
        found = [fd for fd, _ in poll.poll(self._tick_secs() * 1000)]
        if self._woken in found:
            os.eventfd_read(self._woken)
        # One whose connection has broken is sent again, and not waited for more than the others.
        answered = [by_fd[fd] for fd in found if fd in by_fd and self._lanes[by_fd[fd]][1].answered()]
        if not answered:
            for _, lane in self._lanes.values():
                lane.stalled()
        return answered

    def _tick_secs(self) -> float:
        if self._deadline is None:
            return _TICK_SECS
        left = self._deadline - time.monotonic()
        return min(left + 0.001, _TICK_SECS) if left > 0 else _LATE_TICK_SECS


class _LocalThread(threading.Thread):
    """One call that may wait on a task of this process."""

    def __init__(
        self, call: LocalCall, session: int, step: int, inline: list[Any], deadline: float | None, woken: int
    ) -> None:
        super().__init__(name=f"step-{step}", daemon=True)
        self.call = call
        self.cancelled = Cancellation(deadline)
        self.ended = False
        self._arguments = (call.registered, session, step, inline)
        self._woken = woken
        self._result: Any = None
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

    def result(self) -> tuple[list[Any], Any]:
        """What the call gave; raises what it raised."""
        if self._error is not None:
            raise self._error
        result: tuple[list[Any], Any] = self._result
        return result
