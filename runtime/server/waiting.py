"""Waves in which calls may wait for other workers: answers are taken in the order in which they come.

A call that waits must not hold up the others: on the way to them (a task in this process is called on a thread of its
own), or on the way back (if one task is lost, its error is raised at once, and the waits elsewhere are given up).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.execution.cancel import Cancellation
from runtime.server.ending import StepEnding
from runtime.transport.channel import Lane
from runtime.transport.codec import TensorBuffer

if TYPE_CHECKING:
    from runtime.server.prepared import LocalCall, Wave
    from runtime.server.tasks import RemoteCall

_TICK_SECS = 1.0


def run_waiting_wave(
    wave: Wave,
    session: int,
    step: int,
    values: list[Any],
    deadline: float | None,
    borrowed: list[tuple[RemoteCall, TensorBuffer]],
    running: list[tuple[LocalCall, Any]],
    ending: StepEnding | None,
) -> None:
    """Runs one wave; the arguments are those of ``MasterSession._run_wave``."""
    sent: list[tuple[RemoteCall, Lane]] = []
    woken = os.eventfd(0, os.EFD_CLOEXEC)
    locals_: list[_LocalThread] = []
    try:
        for call in wave.remote:
            lane = call.task.peer.acquire(deadline=deadline)
            sent.append((call, lane))
            arrays = [np.asarray(values[slot]) for slot in call.inline]
            lane.send(call.handle, step, arrays, dynamic=call.dynamic, deadline=deadline)
        for local in wave.local:
            inline = [values[slot] for slot in local.inline]
            locals_.append(_LocalThread(local, session, step, inline, deadline, woken))
        if ending is not None:
            ending.cover(lane for _, lane in sent)
        for thread in locals_:
            if ending is not None:
                ending.include(thread.cancelled)
            thread.start()
        waiting_lanes, waiting_threads = list(sent), list(locals_)
        while waiting_lanes or waiting_threads:
            for call, lane in _ready(waiting_lanes, woken):
                waiting_lanes.remove((call, lane))
                buffer = None
                if call.reuse:
                    buffer = call.borrow()
                    borrowed.append((call, buffer))
                for slot, value in zip(call.reply_slots, lane.receive(call.reply_layout, buffer), strict=True):
                    values[slot] = value
            for thread in [t for t in waiting_threads if t.ended]:
                waiting_threads.remove(thread)
                thread.join()
                outputs, done = thread.result()
                for slot, value in zip(thread.call.outputs, outputs, strict=True):
                    values[slot] = value
                running.append((thread.call, done))
    finally:
        if ending is not None:
            ending.uncover(lane for _, lane in sent)
        for thread in locals_:
            thread.cancelled.set("another part of the step failed")
        for thread in locals_:
            if thread.ident is not None:
                thread.join()
        os.close(woken)
        for call, lane in sent:
            call.task.peer.release(lane)  # a lane whose reply was not received is dropped


def _ready(waiting: Sequence[tuple[RemoteCall, Lane]], woken: int) -> list[tuple[RemoteCall, Lane]]:
    """Those of ``waiting`` that have an answer or trouble; empty when a thread has ended, or a tick has passed."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    for pair in waiting:
        fd = pair[1].fileno()
        if fd < 0:  # not connected: receiving connects it again
            return [pair]
        poll.register(fd, select.POLLIN)
    found = {fd for fd, _ in poll.poll(_TICK_SECS * 1000)}
    if woken in found:
        os.eventfd_read(woken)
    elif not found:
        for _, lane in waiting:
            lane.stalled()
    return [pair for pair in waiting if pair[1].fileno() in found or pair[1].fileno() < 0]


class _LocalThread(threading.Thread):
    """One call on a task of this process."""

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
