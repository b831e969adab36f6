"""The rarer answers of a server: errors, tensors that describe themselves, pongs and the goodbye.

`Lane` itself reads a reply of a fixed layout, which is nearly every answer.
"""

from typing import NamedTuple

from runtime.errors import InternalError, OpError, ResourceExhaustedError
from runtime.tensor_spec import Array, aligned_buffer
from runtime.wire import frames, sockets
from runtime.wire.codec import TensorLayout, decode_dynamic
from runtime.wire.link import TaskLink


class ExpectedAnswer(NamedTuple):
    """The answer that a lane waits for.

    Attributes:
        seq: Number of the call.
        handle: Handle of the call.
        layout: Layout of the reply; None for self-describing tensors.
    """

    seq: int
    handle: int
    layout: TensorLayout | None


def read_other(
    link: TaskLink,
    waiter: sockets.TransferWaiter,
    fields: tuple[int, int, int, int, int, int, int],
    start: memoryview,
    expected: ExpectedAnswer,
) -> list[Array] | OpError:
    """Returns an answer of which the header has come: tensors, or the error of the handler.

    Args:
        link: Connection of the answer.
        waiter: Object told of ticks without a byte.
        fields: Fields of the header.
        start: Bytes of the payload that have come.
        expected: Answer that the lane waits for.

    Raises:
        TaskLeftError: The answer is a goodbye.
        InternalError: The answer is to another call, or of another form.
        ResourceExhaustedError: The reply does not fit into the memory.
        DataLossError: The header is damaged.
        OSError: The connection broke.
    """
    _, kind, flags, _, seq, _, length = fields
    try:
        frames.check_header(fields, length if kind == frames.REPLY else frames.MAX_CONTROL_BYTES)
    except OpError as error:
        error.task = link.task
        raise
    if kind == frames.GOODBYE:
        raise link.farewell()
    # The server has left since it sent this frame: its goodbye came in the same read.
    if len(start) == length + frames.HEADER_BYTES and start[length:] == frames.LEAVES:
        start = start[:length]
        link.had_goodbye = True
    if kind == frames.PONG:
        return []
    if kind not in (frames.REPLY, frames.ERROR) or seq != expected.seq or len(start) > length:
        text = f"answered call {expected.seq} with a frame of kind {kind}, seq {seq}"
        raise InternalError(text, task=link.task)
    if kind == frames.REPLY and (expected.layout is not None or not flags & frames.DYNAMIC):
        wanted = "a self-describing payload" if expected.layout is None else repr(expected.layout)
        form = "self-describing" if flags & frames.DYNAMIC else "fixed"
        text = f"replied to call {expected.handle} with {length} bytes ({form}), expected {wanted}"
        raise InternalError(text, task=link.task)
    data = _receive_payload(link, waiter, length, start)
    return (
        frames.decode_error(data.tobytes(), link.task)
        if kind == frames.ERROR
        else decode_dynamic(data)
    )


def _receive_payload(
    link: TaskLink, waiter: sockets.TransferWaiter, length: int, start: memoryview
) -> Array:
    assert link.sock is not None
    try:
        data = aligned_buffer(length)
    except (MemoryError, ValueError) as error:
        # A reply has no limit but the memory, because the client asked for it.
        raise ResourceExhaustedError(
            f"no memory for a reply of {length} bytes: {error}", task=link.task
        ) from None
    window = data.data
    window[: len(start)] = start
    sockets.receive_rest(link.sock, window[len(start) :], waiter)
    return data
