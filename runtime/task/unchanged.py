"""Reads that cross the wire only when a variable has changed since the session read it last.

With each read a session tells the number of what it holds. The task answers with the number of what is there now, and
with the values only if they are others. It is asked every time, so nobody ever computes with what has been replaced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from runtime.observe.counters import StepTimes
from runtime.plan.plan import StageCall
from runtime.state.store import Slot, Store
from runtime.tensor_spec import TensorSpec
from runtime.transport.codec import Layout

if TYPE_CHECKING:
    from runtime.master.tasks import RemoteCall

QUESTION = Layout([TensorSpec((1,), np.dtype(np.uint64))])
"""What a session sends: the number of what it holds, 0 for nothing."""


def can_skip(call: StageCall) -> bool:
    """Whether the replies of a stage call depend on nothing but variables, and only the master gets its outputs."""
    stage = call.stage
    alone = not call.inputs and not call.holds and not stage.host and not stage.writes_state
    return alone and bool(stage.variables) and bool(call.replies)


# -- on the task ---------------------------------------------------------------------------------------------------


class ReadVersion:
    """The number of what some variables hold. Every update makes a new array, so arrays tell.

    Args:
        store: the task's state.
        slots: of the variables.
        generation: of the run record when the read was registered; in a later one nothing stays unchanged.
    """

    def __init__(self, store: Store, slots: Sequence[Slot], generation: int) -> None:
        self._store = store
        self._slots = slots
        self._generation = generation
        self._number = 0
        self._seen: list[weakref.ref[Any]] = []

    def start_at(self, number: int) -> None:
        """Gives larger numbers than this from now on: an earlier life of the task has given out some."""
        self._number = max(self._number, number)

    def now(self) -> int:
        """The number as of now, at least 1. What is read afterwards is as new or newer."""
        with self._store.lock:
            values = [slot.value for slot in self._slots]
            known = bool(self._seen) and self._store.run.generation == self._generation
            # A dead reference gives None, which is also what an empty slot holds.
            if not known or any(v is None or seen() is not v for seen, v in zip(self._seen, values, strict=True)):
                self._number += 1
                # Weak, so that the memory of a replaced array is free at once.
                self._seen = [] if any(v is None for v in values) else [weakref.ref(v) for v in values]
            return self._number


def answer(number: int, values: Sequence[Any] = ()) -> list[Any]:
    """The tensors of a reply: without values when the session has them."""
    return [np.array([number], np.uint64), *values]


# -- in the session ------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A reply that a session holds, read-only, and its number."""

    number: int = 0
    values: tuple[Any, ...] = ()


class LastRead:
    """The newest reply of one read, for all plans and threads of a session. Its memory goes with the last user."""

    def __init__(self) -> None:
        self.kept = Kept()
        self._lock = threading.Lock()

    def keep(self, fresh: Kept) -> None:
        """Keeps a reply if it is newer than the one that is kept."""
        for value in fresh.values:
            value.flags.writeable = False  # whoever fetches it must not change what later steps compute with
        with self._lock:
            if fresh.number > self.kept.number:
                self.kept = fresh


Reads = weakref.WeakValueDictionary[int, LastRead]
"""By handle."""


def skipping_call(call: RemoteCall, reads: Reads, times: StepTimes) -> RemoteCall:
    """A ``RemoteCall`` that was registered as ``versioned``, to be used like any other.

    Args:
        call: the call.
        reads: what the session has read from the task.
        times: what counts the bytes of its steps.
    """
    last = reads.setdefault(call.handle, LastRead())
    nbytes = 0 if call.reply_layout is None else call.reply_layout.nbytes
    task = _SkippingTask(_SkippingPeer(call.task.peer, last, times, nbytes))
    return replace(call, task=cast(Any, task), reuse=False)


class _SkippingTask(NamedTuple):
    peer: _SkippingPeer


class _SkippingPeer(NamedTuple):
    peer: Any
    last: LastRead
    times: StepTimes
    nbytes: int

    def acquire(self, **options: Any) -> _SkippingLane:
        return _SkippingLane(self.peer.acquire(**options), self)

    def release(self, lane: _SkippingLane) -> None:
        self.peer.release(lane.lane)


class _SkippingLane:
    def __init__(self, lane: Any, peer: _SkippingPeer) -> None:
        self.lane = lane
        self._peer = peer
        self._asked = Kept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lane, name)

    def send(self, handle: int, step: int, buffers: Sequence[Any], **options: Any) -> None:
        self._asked = self._peer.last.kept
        self.lane.send(handle, step, [np.array([self._asked.number], np.uint64)], **options)

    def receive(self, *_: Any) -> Sequence[Any]:
        number, *values = self.lane.receive(None)
        if not values:
            self._peer.times.wire_bytes -= self._peer.nbytes
            return self._asked.values
        fresh = Kept(int(number[0]), tuple(values))
        self._peer.last.keep(fresh)
        return fresh.values
