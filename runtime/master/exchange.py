"""Exchange: the calls of one step to other tasks.

All calls are sent, and then all replies are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from runtime import concurrency
from runtime.master.calls import LocalCall, RemoteCall, StepPhase
from runtime.observe.trace import Span, Tracer, nbytes
from runtime.plan.packing import Pack
from runtime.task.bundle import open_reply
from runtime.task.ending import StepEnding
from runtime.tensor_spec import AnyArray, Array
from runtime.wire.channel import Lane
from runtime.wire.codec import TensorBuffer

Moves = Sequence[
    tuple[Callable[[Sequence[AnyArray]], Sequence[AnyArray]], frozenset[int], Sequence[Pack]]
]
"""The copy to each accelerator, the slots of the values that the stage there alone takes, and the packs of the stage."""
NOT_COMPUTED: AnyArray = np.array(None)
"""The placeholder of a value that is not computed yet. No stage takes an array of objects."""
_clock = concurrency.perf_counter_ns


def begin_moves(moves: Moves, values: list[AnyArray], slots: Sequence[int]) -> None:
    """Begins the copies of values to accelerators, and puts the copies into the table of values.

    The values of one accelerator travel together: a copy of each alone would take longer.
    """
    for place, taken, packs in moves:
        moving = [slot for slot in slots if slot in taken]
        for pack in packs:
            # All members come from one call.
            if pack.members[0] in slots:
                values[pack.slot] = np.concatenate([np.ravel(values[m]) for m in pack.members])
                moving.append(pack.slot)
        if moving:
            for slot, copy in zip(moving, place([values[slot] for slot in moving]), strict=True):
                values[slot] = copy


class Stopwatch:
    """A clock that counts the time of each part of a step.

    Args:
        parts_ns: sums by part, nanoseconds (``StepTimes``).
    """

    __slots__ = ("began", "last", "_parts_ns")

    def __init__(self, parts_ns: list[int]) -> None:
        self._parts_ns = parts_ns
        self.began = self.last = _clock()

    def count(self, part: int) -> None:
        """Adds the time since the last count to a part."""
        now = _clock()
        self._parts_ns[part] += now - self.last
        self.last = now


@dataclass(slots=True)
class StepRun:
    """One run of a prepared plan.

    Attributes:
        session: id of the session.
        step: number of the step.
        deadline: monotonic time at which calls fail.
        ending: the means of another thread to end the step.
        values: the values of the step, by slot.
        moves: the copies to accelerators, which begin when a value is there.
        borrowed: memory of replies, with the calls that receive the memory back at the end.
        running: computations under way on this task, each with the argument for
            ``PreparedStage.wait``.
    """

    session: int
    step: int
    deadline: float | None
    ending: StepEnding | None
    values: list[AnyArray]
    moves: Moves
    borrowed: list[tuple[RemoteCall, TensorBuffer]] = field(default_factory=list)
    running: list[tuple[LocalCall, jax.Array | None]] = field(default_factory=list)

    def inputs(self, call: RemoteCall | LocalCall) -> list[AnyArray]:
        """Returns the values of a call's inputs."""
        if self.moves:
            self.cut(call.inline)
        # A local name saves an attribute lookup for each input of each call.
        values = self.values
        return [values[slot] for slot in call.inline]

    def cut(self, slots: Sequence[int]) -> None:
        """Waits for the packs with members in ``slots``, and puts the members there."""
        for _, _, packs in self.moves:
            for pack in packs:
                if pack.members[0] in slots:
                    parts = pack.cut(np.asarray(self.values[pack.slot]))
                    for slot, part in zip(pack.members, parts, strict=True):
                        self.values[slot] = part

    def put(self, slots: Sequence[int], results: Iterable[AnyArray]) -> None:
        """Puts results into their slots."""
        values = self.values
        for slot, value in zip(slots, results, strict=True):
            values[slot] = value
        # A step without accelerators saves the call.
        if self.moves:
            begin_moves(self.moves, values, slots)

    def fetch(self, slots: Sequence[int]) -> list[AnyArray | None]:
        """Returns the values of slots. Slot -1 is an operation, whose value is None."""
        values = self.values
        return [None if slot < 0 else values[slot] for slot in slots]

    def execute(self, call: LocalCall) -> None:
        """Runs a call on this task. The computation may continue after the return."""
        outputs, done = call.worker.execute(
            call.registered, self.session, self.step, self.inputs(call), self.deadline, self.ending
        )
        self.put(call.outputs, outputs)
        self.running.append((call, done))
        # All copies to the host travel together, and while the program still runs.
        for slot in call.leaving:
            value = self.values[slot]
            assert isinstance(value, jax.Array), "an accelerator computes no other arrays"
            value.copy_to_host_async()

    def wait(self) -> None:
        """Waits for the computations on this task. Raises the error of a failed stage."""
        for call, done in self.running:
            call.registered.prepared.wait(done)
        self.running.clear()

    def give_back(self) -> None:
        """Returns the memory of replies.

        The computations that read the replies must have finished.
        """
        assert not self.running, "a computation may still read the memory"
        for call, buffer in self.borrowed:
            call.buffers.append(buffer)
        self.borrowed.clear()


class Exchange:
    """The calls of a step to other tasks: opened, sent, received.

    ``close`` gives up all other calls.

    Args:
        run: the step.
    """

    __slots__ = ("_run", "_lanes")

    def __init__(self, run: StepRun) -> None:
        self._run = run
        self._lanes: dict[RemoteCall, Lane] = {}

    def __len__(self) -> int:
        """Returns the number of calls under way."""
        return len(self._lanes)

    def lanes(self) -> Iterator[tuple[RemoteCall, Lane]]:
        """Returns the calls under way, with their connections."""
        return iter(self._lanes.items())

    def open(self, calls: Sequence[RemoteCall]) -> None:
        """Takes a connection for each call. So a lost task raises before any call is sent."""
        lanes, run = self._lanes, self._run
        for call in calls:
            assert call not in lanes, "the call is open already"
            lanes[call] = call.peer.acquire(deadline=run.deadline)
        # From here on another thread can end the step by its connections.
        if run.ending is not None:
            run.ending.cover(lanes[call] for call in calls)

    def send(
        self, call: RemoteCall, arrays: Sequence[Array] | None = None, deadline: float | None = None
    ) -> None:
        """Sends a call that is open.

        Args:
            call: the call.
            arrays: the inputs; by default the values of the step. The arrays must live until the
                reply.
            deadline: another deadline than the step's.
        """
        run = self._run
        if arrays is None:
            values = run.values
            if run.moves:
                run.cut(call.inline)
            arrays = [np.asarray(values[slot]) for slot in call.inline]
        if call.bundle is not None:
            arrays = [call.bundle, *arrays]
        self._lanes[call].send(
            call.handle,
            run.step,
            arrays,
            dynamic=call.dynamic,
            deadline=run.deadline if deadline is None else deadline,
            waits=call.waits,
        )

    def receive(self, call: RemoteCall) -> list[Array]:
        """Waits for the replies of a call and returns its connection."""
        run, lane = self._run, self._lanes[call]
        buffer = None
        if call.reuse:
            buffer = call.borrow()
            run.borrowed.append((call, buffer))
        replies = lane.receive(call.reply_layout, buffer)
        # A failed receive leaves the connection among the lanes, and ``close`` drops the
        # connection.
        del self._lanes[call]
        if run.ending is not None:
            run.ending.uncover((lane,))
        call.peer.release(lane)
        return replies if call.bundle is None else open_reply(replies, call.task)

    def close(self) -> None:
        """Gives up the calls without a reply, and drops their connections."""
        run = self._run
        if run.ending is not None and self._lanes:
            run.ending.uncover(self._lanes.values())
        # A connection with a reply under way cannot be used again, and its peer drops the
        # connection.
        for call, lane in self._lanes.items():
            call.peer.release(lane)
        self._lanes.clear()

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        run, lanes = self._run, list(self._lanes.values())
        assert len(set(map(id, lanes))) == len(lanes), "two calls share a connection"
        assert run.ending is None or all(map(run.ending.covers, lanes)), (
            "the end of the step does not end a call"
        )
        assert len({id(buffer) for _, buffer in run.borrowed}) == len(run.borrowed), (
            "two replies share memory"
        )


def run_phase(phase: StepPhase, run: StepRun, exchange: Exchange) -> None:
    """Runs the calls of a phase.

    All calls are sent first, so that the tasks work at the same time.
    """
    # A step without other tasks pays for no exchange.
    if not phase.remote:
        for local in phase.local:
            run.execute(local)
        return
    # A failure leaves other calls without a reader, so their connections are given up.
    try:
        exchange.open(phase.remote)
        for call in phase.remote:
            exchange.send(call)
        for local in phase.local:
            run.execute(local)
        for call in phase.remote:
            run.put(call.reply_slots, exchange.receive(call))
    except BaseException:
        exchange.close()
        raise


class TracedExchange(Exchange):
    """An exchange that records a span for each send and receive.

    Args:
        run: the step.
        device: name of the device for the spans.
        tracer: receives the spans.
    """

    __slots__ = ("_device", "_tracer")

    def __init__(self, run: StepRun, device: str, tracer: Tracer) -> None:
        super().__init__(run)
        self._device = device
        self._tracer = tracer

    def send(
        self, call: RemoteCall, arrays: Sequence[Array] | None = None, deadline: float | None = None
    ) -> None:
        """Sends a call that is open."""
        if arrays is None:
            arrays = [np.asarray(value) for value in self._run.inputs(call)]
        start = concurrency.wall_time_ns()
        super().send(call, arrays, deadline)
        self._note_span("send", call, start, arrays, f"to {call.task}")

    def receive(self, call: RemoteCall) -> list[Array]:
        """Waits for the replies of a call and returns its connection."""
        start = concurrency.wall_time_ns()
        replies = super().receive(call)
        self._note_span("recv", call, start, replies, f"from {call.task}")
        return replies

    def _note_span(
        self, kind: str, call: RemoteCall, start: int, arrays: Sequence[Array], label: str
    ) -> None:
        span = Span(
            self._device,
            f"{kind}:{call.wave}",
            call.wave,
            start,
            concurrency.wall_time_ns(),
            nbytes(arrays),
            label,
        )
        self._tracer.add(self._run.session, span)
