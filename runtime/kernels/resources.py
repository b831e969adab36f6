"""Kernels of queues and accumulators: named resources of a task, beside its variables."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.kernels.accumulator import AccumulatorResource
from runtime.kernels.queues import QueueResource, Shapes
from runtime.state.store import Resource
from runtime.task.host_kernels import Context, kernel
from runtime.tensor_spec import Array, canonical_dtype

T = TypeVar("T", bound=Resource)


def named(context: Context, kind: type[T], make: Callable[[], T]) -> T:
    """Returns the resource that ``attrs["resource"]`` describes, and makes a new resource at the first call.

    Raises:
        InvalidArgumentError: Another session made the resource from another description.
    """
    described = context.attrs["resource"]

    def make_described() -> T:
        resource = make()
        resource.described = described
        return resource

    # A queue and an accumulator may have the same name.
    key = f"{kind.__name__}:{described['name']}"
    found = context.store.resource(described["container"], key, make_described)
    # Sessions share resources by name, and two programs may mean different things by one name.
    if not isinstance(found, kind) or found.described != described:
        differing = sorted(
            k for k in {*described, *found.described} if described.get(k) != found.described.get(k)
        )
        raise InvalidArgumentError(
            f"resource {described['name']!r} is there with another {', '.join(differing)}: "
            f"{[found.described.get(k) for k in differing]} there, "
            f"{[described.get(k) for k in differing]} here",
            task=context.task,
        )
    return found


def _string_array(text: str) -> Array:
    return np.array(text.encode(), object)


# -- queues ------------------------------------------------------------------------------------------------------


def _find_queue(context: Context) -> QueueResource:
    d = context.attrs["resource"]

    def make() -> QueueResource:
        shapes: Shapes = tuple(None if s is None else tuple(s) for s in d["shapes"])
        dtypes = [canonical_dtype(t) for t in d["dtypes"]]
        stay, seed = int(d.get("min_after_dequeue", 0)), d.get("seed")
        options = {"ledger": context.store.ledger, "min_after_dequeue": stay, "seed": seed}
        return QueueResource(d["kind"], d["name"], d["capacity"], dtypes, shapes, **options)

    return named(context, QueueResource, make)


@kernel("queue/open")
def _open_queue(context: Context) -> Sequence[Array]:
    _find_queue(context)
    return [_string_array(context.attrs["resource"]["name"])]


@kernel("queue/enqueue")
def _enqueue_element(context: Context) -> Sequence[Array]:
    # The next call overwrites the memory of the inputs of this call.
    element = tuple(map(np.array, context.inputs))
    _find_queue(context).enqueue_many([element], context.cancelled, client=context.client)
    return []


@kernel("queue/enqueue_many")
def _enqueue_many(context: Context) -> Sequence[Array]:
    counts = sorted(
        {i.shape[0] for i in context.inputs if i.ndim} | {-1 for i in context.inputs if not i.ndim}
    )
    if len(counts) != 1 or counts[0] < 0:
        # A scalar has no first dimension.
        shapes = [i.shape for i in context.inputs]
        raise InvalidArgumentError(
            f"enqueue_many needs one first dimension for all components, got shapes {shapes}"
        )
    # Each element owns its bytes: a view would keep the whole batch until its last element is
    # taken.
    elements = [tuple(np.array(i[k], i.dtype) for i in context.inputs) for k in range(counts[0])]
    # A caller that was cut off makes the call again: it goes on where it was.
    memory, key = context.cancelled.memory, f"added by {context.op}"
    added = memory.get(key, 0)

    def count() -> None:
        memory[key] = memory.get(key, 0) + 1

    _find_queue(context).enqueue_many(elements[added:], context.cancelled, count, context.client)
    return []


@kernel("queue/dequeue")
def _dequeue_element(context: Context) -> Sequence[Array]:
    return _find_queue(context).dequeue(context.cancelled)


@kernel("queue/dequeue_many")
def _dequeue_many(context: Context) -> Sequence[Array]:
    return _find_queue(context).dequeue_many(
        int(context.inputs[0]), context.cancelled, up_to=bool(context.attrs.get("up_to"))
    )


@kernel("queue/size")
def _queue_size(context: Context) -> Sequence[Array]:
    return [np.asarray(_find_queue(context).size(), np.int32)]


@kernel("queue/is_closed")
def _queue_is_closed(context: Context) -> Sequence[Array]:
    return [np.asarray(_find_queue(context).is_closed())]


@kernel("queue/close")
def _close_queue(context: Context) -> Sequence[Array]:
    _find_queue(context).close(bool(context.attrs.get("cancel_pending_enqueues")))
    return []


# -- accumulators ------------------------------------------------------------------------------------------------


def _find_accumulator(context: Context) -> AccumulatorResource:
    d = context.attrs["resource"]

    def make() -> AccumulatorResource:
        shape = None if d["shape"] is None else tuple(d["shape"])
        return AccumulatorResource(
            canonical_dtype(d["dtype"]), shape, d["reduction"], context.store.ledger
        )

    return named(context, AccumulatorResource, make)


@kernel("accumulator/open")
def _open_accumulator(context: Context) -> Sequence[Array]:
    _find_accumulator(context)
    return [_string_array(context.attrs["resource"]["name"])]


@kernel("accumulator/apply_grad")
def _apply_grad(context: Context) -> Sequence[Array]:
    gradient, local_step, worker = context.inputs
    # A client without a number counts as one worker for each session.
    who = int(worker) if int(worker) >= 0 else ("session", context.client)
    return [
        np.asarray(
            _find_accumulator(context).apply_grad(gradient, int(local_step), who, context.client)
        )
    ]


@kernel("accumulator/take_grad")
def _take_grad(context: Context) -> Sequence[Array]:
    return [_find_accumulator(context).take_grad(int(context.inputs[0]), context.cancelled)]


@kernel("accumulator/counts")
def _count_gradients(context: Context) -> Sequence[Array]:
    accumulator = _find_accumulator(context)
    dropped = accumulator.dropped_gradients
    return [np.asarray(accumulator.num_accumulated, np.int32), np.asarray(dropped, np.int64)]


@kernel("accumulator/set_global_step")
def _set_global_step(context: Context) -> Sequence[Array]:
    _find_accumulator(context).set_global_step(int(context.inputs[0]))
    return []
