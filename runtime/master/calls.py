"""The calls of a step: registered stage calls, as a master runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.task.bundle import describe_calls
from runtime.task.registry import RegisteredCall
from runtime.task.worker import Worker
from runtime.tensor_spec import Array
from runtime.wire.codec import TensorBuffer, TensorLayout
from runtime.wire.handles import BUNDLE
from runtime.wire.peer import Peer


class ReplyBuffers(list[TensorBuffer]):
    """The free memory for replies of one handle.

    Plans that differ in other stages only share the memory.
    """


@dataclass(eq=False)
class RemoteCall:
    """One stage call on a task of another process.

    Attributes:
        peer: the connections to the task.
        task: name of the task.
        wave: wave of the stage in the plan.
        handle: the call's handle on the task.
        inline: slots of the inputs in the call's message.
        reply_layout: layout of the replies; None if each reply describes its arrays.
        reply_slots: slots for the replies.
        dynamic: True if the message describes its inputs.
        buffers: reusable memory for replies.
        reuse: True to receive replies into ``buffers``: no caller keeps the replies longer than the
            step.
        writes_state: True if running the call twice differs from running the call once.
        waits: True if the call may wait for effects of other calls.
        bundle: the first array of a bundle; None for a call alone.
    """

    peer: Peer
    task: str
    wave: int
    handle: int
    inline: tuple[int, ...]
    reply_layout: TensorLayout | None
    reply_slots: tuple[int, ...]
    dynamic: bool
    buffers: ReplyBuffers
    reuse: bool
    writes_state: bool
    waits: bool
    bundle: Array | None = None

    def __post_init__(self) -> None:
        assert not self.reuse or self.reply_layout is not None, "no memory fits such replies"

    @classmethod
    def join(cls, calls: Sequence[RemoteCall]) -> RemoteCall:
        """Returns a bundle of calls to one task."""
        first = calls[0]
        if len(calls) == 1:
            return first
        assert len({call.peer for call in calls}) == 1, "a bundle goes to one task"
        return cls(
            first.peer,
            first.task,
            first.wave,
            BUNDLE,
            tuple(slot for call in calls for slot in call.inline),
            None,
            tuple(slot for call in calls for slot in call.reply_slots),
            dynamic=True,
            buffers=first.buffers,
            reuse=False,
            writes_state=any(call.writes_state for call in calls),
            waits=False,
            bundle=describe_calls((call.handle, len(call.inline)) for call in calls),
        )

    def borrow(self) -> TensorBuffer:
        """Returns memory for one reply of a fixed layout.

        The caller adds the memory to ``buffers`` after the last read.
        """
        assert self.reply_layout is not None
        # Other threads of the session take buffers too, so a look at the length beforehand would
        # not help.
        try:
            return self.buffers.pop()
        except IndexError:
            return TensorBuffer(self.reply_layout)


@dataclass(eq=False)
class LocalCall:
    """One stage call on a task of this process.

    Attributes:
        worker: worker of the task.
        registered: the stage as registered with the worker.
        inline: slots of the inputs, without those fetched from other tasks.
        outputs: slots of the outputs.
        leaving: slots of the outputs that an accelerator has computed and the host takes.
    """

    worker: Worker
    registered: RegisteredCall
    inline: tuple[int, ...]
    outputs: tuple[int, ...]
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True)
class FlowCall:
    """One stage call of a flow, in which some calls may wait.

    Attributes:
        call: the call.
        part: part of the step (``runtime.plan.plan``) for the call's time.
        after: places in the flow of the calls to wait for.
        waits: True if the call may wait for effects of other calls.
    """

    call: RemoteCall | LocalCall
    part: int
    after: tuple[int, ...]
    waits: bool


@dataclass(frozen=True)
class StepPhase:
    """Independent stage calls of a step, which begin when the phase before has finished.

    Attributes:
        part: part of the step for the phase's time.
        remote: the calls on other tasks.
        local: the calls on this task.
        flow: all calls in their order, if some may wait; empty otherwise. Calls of a flow may
            depend on each other.
    """

    part: int
    remote: tuple[RemoteCall, ...]
    local: tuple[LocalCall, ...]
    flow: tuple[FlowCall, ...] = ()
