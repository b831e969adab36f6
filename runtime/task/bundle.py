"""Bundles: several stage calls of one step in one message to their task, which runs one after the other.

The first array of a bundle has a row for each call: its handle, and the number of its inputs. The
first array of the reply is the error of a call, or is empty; the replies of all calls follow.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from runtime.errors import InternalError, InvalidArgumentError, OpError
from runtime.task.registry import CallRegistry, RegisteredCall
from runtime.tensor_spec import Array
from runtime.wire.connection import Reply
from runtime.wire.frames import HEADER_BYTES, decode_error, pack_error


def describe_calls(calls: Iterable[tuple[int, int]]) -> Array:
    """Returns the first array of a bundle, for the handle and the number of inputs of each call."""
    return np.array(list(calls), np.int64)


def cut_bundle(arrays: Sequence[Array]) -> list[tuple[int, list[Array]]]:
    """Returns the handle and the inputs of each call of a bundle.

    Raises:
        InvalidArgumentError: The first array does not describe the others.

    Examples:
        >>> one = np.ones(1)
        >>> cut_bundle([describe_calls([(7, 0), (9, 1)]), one])
        [(7, []), (9, [array([1.])])]
    """
    rows: Array = arrays[0] if arrays else np.empty(())
    if rows.ndim != 2 or rows.shape[1] != 2 or rows.dtype != np.int64:
        raise InvalidArgumentError("the first array of a bundle describes no calls")
    calls, begin = [], 1
    for handle, count in rows.tolist():
        if not 0 <= count <= len(arrays) - begin:
            raise InvalidArgumentError(f"a bundle has {len(arrays)} arrays, and calls with more")
        calls.append((handle, list(arrays[begin : begin + count])))
        begin += count
    if begin != len(arrays):
        raise InvalidArgumentError(f"{len(arrays) - begin} arrays of a bundle belong to no call")
    return calls


def open_bundle(
    registry: CallRegistry, client: int, arrays: Sequence[Array]
) -> list[tuple[RegisteredCall, list[Array]]]:
    """Returns the calls of a bundle with their inputs.

    Raises:
        InvalidArgumentError: The arrays do not fit the calls, or a call travels alone.
        PermissionDeniedError: A stage is another session's.
    """
    calls = []
    for handle, inputs in cut_bundle(arrays):
        registry.check_holder(handle, client)
        registered = registry.get(handle)
        layout = registered.input_layout
        # Without a layout the kernel checks its inputs.
        fits = layout is None or [(a.shape, a.dtype) for a in inputs] == [
            (spec.shape, spec.dtype) for spec in layout.specs
        ]
        if not fits or not registered.call.stage.joins_bundle:
            raise InvalidArgumentError(f"stage {handle} takes {layout}, or travels in no bundle")
        calls.append((registered, inputs))
    return calls


def answer_bundle(answers: Iterable[Callable[[], Reply]]) -> Reply:
    """Runs the calls of a bundle, and joins their replies.

    An error behind a call with an effect is a reply, too. So a repeated bundle finds the reply,
    and does not run the call again.
    """
    buffers: list[Array] = [np.empty(0, np.uint8)]
    remember = False
    for answer in answers:
        try:
            reply = answer()
        except Exception as error:
            if not remember:
                raise
            known = (
                error if isinstance(error, OpError) else InternalError(f"a call failed: {error!r}")
            )
            frame = pack_error(0, known)
            return Reply([np.frombuffer(frame, np.uint8, offset=HEADER_BYTES)], True, True)
        buffers += map(np.asarray, reply.buffers)
        remember |= reply.remember
    return Reply(buffers, remember, dynamic=True)


def open_reply(arrays: Sequence[Array], task: str) -> list[Array]:
    """Returns the replies of all calls of a bundle.

    Raises:
        OpError: The error of a call.
    """
    assert arrays, "a bundle is answered without its first array"
    error, *replies = arrays
    if error.size:
        raise decode_error(error.tobytes(), task)
    return replies
