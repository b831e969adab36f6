"""The calls that a step makes: stage calls that tasks have registered, as a master runs them."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.task.registry import RegisteredCall
from runtime.task.worker import Worker
from runtime.wire.codec import Layout, TensorBuffer
from runtime.wire.peer import Peer


class Buffers(list[TensorBuffer]):
    """The free memory for replies of one handle; plans that differ in other stages share the memory."""


@dataclass(eq=False)
class RemoteCall:
    """One stage call on a task of another process.

    Attributes:
        peer: the connections to the task.
        task: its name.
        wave: of the stage in the plan.
        handle: the call's handle on the task.
        inline: slots of the inputs that are sent with the call.
        reply_layout: of the replies; None when they describe themselves.
        reply_slots: where the replies go.
        dynamic: the inputs describe themselves.
        buffers: reusable memory for replies.
        reuse: the replies are received into it: nobody keeps them longer than the step.
        writes_state: running it twice differs from running it once.
        waits: it may wait for what others do.
    """

    peer: Peer
    task: str
    wave: int
    handle: int
    inline: tuple[int, ...]
    reply_layout: Layout | None
    reply_slots: tuple[int, ...]
    dynamic: bool
    buffers: Buffers
    reuse: bool
    writes_state: bool
    waits: bool

    def borrow(self) -> TensorBuffer:
        """Returns memory for one reply of a fixed layout; the caller returns it to ``buffers`` after the last read."""
        assert self.reply_layout is not None
        try:
            return self.buffers.pop()
        except IndexError:  # not looked at beforehand: other threads of the session take from it too
            return TensorBuffer(self.reply_layout)


@dataclass(eq=False)
class LocalCall:
    """One stage call on a task of this process.

    Attributes:
        worker: of the task.
        registered: the stage there.
        inline: slots of the inputs that are not fetched from other tasks.
        outputs: slots of the outputs.
    """

    worker: Worker
    registered: RegisteredCall
    inline: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class FlowCall:
    """One stage call among several of which some may wait.

    Attributes:
        call: the call.
        part: of the step (``runtime.plan.plan``), to which its time counts.
        after: the places of the calls in the flow that must be over before it begins.
        waits: whether it may wait.
    """

    call: RemoteCall | LocalCall
    part: int
    after: tuple[int, ...]
    waits: bool


@dataclass(frozen=True)
class Phase:
    """Stage calls of a step that begin when the phase before has finished, and do not wait for each other.

    Attributes:
        part: of the step, to which its time counts.
        awaited: slot of a value to wait for before the phase is sent, or -1 (``Plan.awaited_slots``).
        remote: the calls on other tasks.
        local: the calls on this one.
        flow: all of them in their place where there are several, of which some may wait: some may begin after others.
    """

    part: int
    awaited: int
    remote: tuple[RemoteCall, ...]
    local: tuple[LocalCall, ...]
    flow: tuple[FlowCall, ...] = field(default=())
