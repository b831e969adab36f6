"""Queues and accumulators of a graph: named resources on one task, beside the variables."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jax.typing import DTypeLike

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Graph, Operation, Tensor, get_default_graph
from runtime.graph.op_kinds import Host, Shape
from runtime.graph.operators import TensorLike
from runtime.graph.ops import as_dtype, as_tensor, constant, is_tensor
from runtime.graph.placement import fixed_device
from runtime.tensor_spec import DType, dtype_name, shape_fits

DTypes: TypeAlias = DTypeLike | Sequence[DTypeLike]
"""The dtype of each component of a queue's elements, or the dtype of the only component."""
Shapes: TypeAlias = Sequence[int | None] | Sequence[Sequence[int | None] | None] | None
"""The static shape of each component, or of the only component; None for unknown shapes."""


class _NamedResource:
    """A named resource: an operation for the resource, and further operations on its task."""

    def __init__(
        self,
        type: str,  # noqa: A002
        kernel: str,
        name: str,
        described: Mapping[str, object],
        container: str,
        shared_name: str | None,
    ) -> None:
        graph = get_default_graph()
        full = graph.unique_name(name)
        # Workers with equal graphs have equal names, and so share the resource.
        key = shared_name or full
        self._described = {**described, "name": key, "container": container}
        self._kernel = kernel
        # The resource outlives each step, so its operation waits for none.
        with graph.control_dependencies(None):
            self.op = graph.add_operation(
                type,
                Host(f"{kernel}/open", {"resource": self._described}, True, key),
                outputs=[((), np.dtype(object))],
                name=full + "/",
            )
            """The operation that stands for the resource.

            Like any use, a run of the operation makes the resource.
            """

    @property
    def name(self) -> str:
        """Returns the name of the operation, unique in the graph."""
        return self.op.name

    @property
    def shared_name(self) -> str:
        """Returns the name on the task.

        Sessions, graphs and objects with the same name on the task share the resource.
        """
        return str(self._described["name"])

    @property
    def device(self) -> str:
        """Returns the requested device, or ``""``."""
        return self.op.device

    @property
    def graph(self) -> Graph:
        return self.op.graph

    def _add_operation(
        self,
        what: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[tuple[Shape | None, DType]] = (),
        *,
        name: str | None = None,
        **attrs: object,
    ) -> Operation:
        return self.op.graph.add_operation(
            f"{self.op.type}/{what}",
            Host(
                f"{self._kernel}/{what}",
                {"resource": self._described, **attrs},
                True,
                self.shared_name,
            ),
            inputs,
            outputs,
            name=name or f"{self.op.name.rsplit('/', 1)[-1]}_{what}",
            colocate_with=self.op,
        )


class Queue(_NamedResource):
    """The operations of all queues.

    An element is a tuple of tensors, or with one component the tensor itself.

    Blocking operations wait on the queue's task. An operation ends with CancelledError if its
    session closes. An enqueue ends with CancelledError if the queue is closed. A dequeue ends with
    OutOfRangeError if the queue is closed and empty.
    """

    def __init__(
        self,
        type: str,
        kind: str,
        capacity: int,
        dtypes: DTypes,
        shapes: Shapes,
        name: str,
        container: str,
        shared_name: str | None,
        **options: int | None,  # noqa: A002
    ) -> None:
        self.dtypes: tuple[DType, ...] = tuple(as_dtype(d) for d in _list_dtypes(dtypes))
        self.shapes: tuple[Shape | None, ...] = _list_shapes(shapes, len(self.dtypes), name)
        assert len(self.shapes) == len(self.dtypes), "a component has no shape"
        described = {
            "kind": kind,
            "capacity": int(capacity),
            "dtypes": [dtype_name(d) for d in self.dtypes],
            "shapes": [None if s is None else list(s) for s in self.shapes],
            **options,
        }
        super().__init__(type, "queue", name, described, container, shared_name)

    def enqueue(
        self, values: TensorLike | Sequence[TensorLike], name: str | None = None
    ) -> Operation:
        """Adds one element, and waits while the queue is full.

        Args:
            values: A tensor for each component; with one component the tensor itself.
            name: Operation name.
        """
        return self._add_operation("enqueue", self._list_components(values, ()), name=name)

    def enqueue_many(
        self, values: TensorLike | Sequence[TensorLike], name: str | None = None
    ) -> Operation:
        """Adds an element for each slice of ``values`` along the first dimension.

        Waits while the queue is full.
        """
        return self._add_operation(
            "enqueue_many", self._list_components(values, (None,)), name=name
        )

    def dequeue(self, name: str | None = None) -> Tensor | tuple[Tensor, ...]:
        """Removes one element, and waits for an element. Returns a tensor for each component."""
        op = self._add_operation(
            "dequeue", (), list(zip(self.shapes, self.dtypes, strict=True)), name=name
        )
        return _unpack_element(op)

    def dequeue_many(self, n: TensorLike, name: str | None = None) -> Tensor | tuple[Tensor, ...]:
        """Removes ``n`` elements and stacks the elements. Waits for ``n`` elements.

        In a step: OutOfRangeError if the queue is closed with fewer elements.
        """
        return self._dequeue_batch(n, False, name)

    def dequeue_up_to(self, n: TensorLike, name: str | None = None) -> Tensor | tuple[Tensor, ...]:
        """Removes elements like ``dequeue_many``.

        A closed queue returns its last elements, if fewer are left.
        """
        return self._dequeue_batch(n, True, name)

    def size(self, name: str | None = None) -> Tensor:
        """Makes an int32 scalar with the number of elements in the queue."""
        return self._add_operation("size", (), [((), np.dtype(np.int32))], name=name).outputs[0]

    def is_closed(self, name: str | None = None) -> Tensor:
        """Makes a bool scalar, true for a closed queue."""
        return self._add_operation("is_closed", (), [((), np.dtype(np.bool_))], name=name).outputs[
            0
        ]

    def close(self, cancel_pending_enqueues: bool = False, name: str | None = None) -> Operation:
        """Closes the queue to further elements.

        Args:
            cancel_pending_enqueues: True to end also the waiting enqueues.
            name: Operation name.
        """
        return self._add_operation(
            "close", name=name, cancel_pending_enqueues=bool(cancel_pending_enqueues)
        )

    def _dequeue_batch(
        self, n: TensorLike, up_to: bool, name: str | None
    ) -> Tensor | tuple[Tensor, ...]:
        if any(shape is None for shape in self.shapes):
            raise InvalidArgumentError(
                f"queue {self.name!r}: give it shapes= to dequeue several elements as one batch"
            )
        # A closed queue may return a smaller last batch, so the size is not static then.
        first = int(n) if isinstance(n, int | np.integer) and not up_to else None
        # The number is made on the device of the queue, so that no stage on another task is needed.
        with self.graph.as_default(), fixed_device(self.op.device):
            count = as_tensor(n) if hasattr(n, "op") else constant(n, np.int32, name="n")
        outputs = [((first, *(s or ())), d) for s, d in zip(self.shapes, self.dtypes, strict=True)]
        op = self._add_operation("dequeue_many", [count], outputs, name=name, up_to=up_to)
        return _unpack_element(op)

    def _list_components(
        self, values: TensorLike | Sequence[TensorLike], batch: tuple[None, ...]
    ) -> list[Tensor]:
        # With one component a list is the value, and no list of components.
        items = list(values) if isinstance(values, list | tuple) and len(self.dtypes) > 1 else None
        if items is None:
            items = [values[0] if isinstance(values, tuple) and len(values) == 1 else values]
        if len(items) != len(self.dtypes):
            raise InvalidArgumentError(
                f"queue {self.name!r} has {len(self.dtypes)} components, {len(items)} were given"
            )
        tensors = []
        for i, (value, dtype, shape) in enumerate(
            zip(items, self.dtypes, self.shapes, strict=True)
        ):
            with self.graph.as_default():
                tensor = as_tensor(value, dtype)
            wanted = None if shape is None else (*batch, *shape)
            if (
                tensor.dtype != dtype
                or wanted is not None
                and tensor.shape is not None
                and not shape_fits(tensor.shape, wanted)
            ):
                raise InvalidArgumentError(
                    f"queue {self.name!r}: component {i} takes {dtype_name(dtype)}{wanted}, "
                    f"got {dtype_name(tensor.dtype)}{tensor.shape}"
                )
            tensors.append(tensor)
        return tensors


class FIFOQueue(Queue):
    """A queue that returns the oldest element first.

    Args:
        capacity: Largest number of elements; 0 or less for no limit.
        dtypes: Dtype of each component, or one dtype.
        shapes: Static shape of each component. With None elements may differ, and only ``dequeue``
            works.
        name: Operation name.
        container: Named container of the store.
        shared_name: Name on the task, shared by sessions and graphs; by default the operation's
            name with its scopes.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     queue = rt.FIFOQueue(10, "float32", shapes=[[]])
        ...     session.run(queue.enqueue_many([1.0, 2.0, 3.0]))
        ...     session.run(queue.dequeue_many(2)).tolist()
        [1.0, 2.0]
    """

    def __init__(
        self,
        capacity: int,
        dtypes: DTypes,
        shapes: Shapes = None,
        name: str = "fifo_queue",
        container: str = "",
        *,
        shared_name: str | None = None,
    ) -> None:
        super().__init__(
            "FIFOQueueV2", "fifo", capacity, dtypes, shapes, name, container, shared_name
        )


class PaddingFIFOQueue(Queue):
    """A FIFO queue whose batches pad smaller elements with zeros (empty strings), where a static size is None.

    Args:
        capacity: Largest number of elements.
        dtypes: Dtype of each component, or one dtype.
        shapes: Static shape of each component. A size None differs from element to element.
        name: Operation name.
        container: Named container of the store.
        shared_name: Name on the task, shared by sessions and graphs; by default the operation's
            name with its scopes.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     queue = rt.PaddingFIFOQueue(10, "int32", shapes=[[None]])
        ...     session.run([queue.enqueue([1, 2, 3]), queue.enqueue([1, 2, 3])])
        ...     session.run(queue.dequeue_many(2)).shape
        [None, None]
        (2, 3)
    """

    def __init__(
        self,
        capacity: int,
        dtypes: DTypes,
        shapes: Shapes,
        name: str = "padding_fifo_queue",
        container: str = "",
        *,
        shared_name: str | None = None,
    ) -> None:
        if shapes is None:
            raise InvalidArgumentError(
                f"queue {name!r}: a padding queue needs the shapes of its components"
            )
        super().__init__(
            "PaddingFIFOQueueV2", "padding", capacity, dtypes, shapes, name, container, shared_name
        )


class RandomShuffleQueue(Queue):
    """A queue that returns its elements in random order.

    Args:
        capacity: Largest number of elements.
        min_after_dequeue: Number of elements that stay in an open queue, so that each draw is
            random.
        dtypes: Dtype of each component, or one dtype.
        shapes: Static shape of each component, or None.
        seed: Seed of the draws.
        name: Operation name.
        container: Named container of the store.
        shared_name: Name on the task, shared by sessions and graphs; by default the operation's
            name with its scopes.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     queue = rt.RandomShuffleQueue(10, 0, "int32", shapes=[[]], seed=1)
        ...     session.run(queue.enqueue_many([1, 2, 3]))
        ...     sorted(session.run(queue.dequeue_many(3)).tolist())
        [1, 2, 3]
    """

    def __init__(
        self,
        capacity: int,
        min_after_dequeue: int,
        dtypes: DTypes,
        shapes: Shapes = None,
        seed: int | None = None,
        name: str = "random_shuffle_queue",
        container: str = "",
        *,
        shared_name: str | None = None,
    ) -> None:
        super().__init__(
            "RandomShuffleQueueV2",
            "shuffle",
            capacity,
            dtypes,
            shapes,
            name,
            container,
            shared_name,
            min_after_dequeue=int(min_after_dequeue),
            seed=seed,
        )


class ConditionalAccumulator(_NamedResource):
    """An accumulator that collects the gradients of one step from distinct workers, for their mean or sum.

    A gradient carries the step of its computation. A gradient older than the accumulator's step is
    dropped and counted. So is a second gradient of a worker whose first gradient was not taken yet.

    Args:
        dtype: Dtype of the gradients.
        shape: Static shape; None for a size that may differ.
        name: Operation name.
        reduction: "mean" or "sum".
        container: Named container of the store.
        shared_name: Name on the task, shared by sessions and graphs; by default the operation's
            name with its scopes.

    Examples:
        >>> import runtime as rt
        >>> with rt.Graph().as_default(), rt.Session() as session:
        ...     gradients = rt.ConditionalAccumulator("float32", shape=[])
        ...     for worker, gradient in enumerate((1.0, 3.0)):
        ...         accepted = session.run(gradients.apply_grad(gradient, local_step=0, worker=worker))
        ...     print(session.run(gradients.take_grad(2)))
        2.0
    """

    def __init__(
        self,
        dtype: DTypeLike,
        shape: Sequence[int | None] | None = None,
        name: str = "conditional_accumulator",
        reduction: str = "mean",
        container: str = "",
        *,
        shared_name: str | None = None,
    ) -> None:
        if reduction.lower() not in ("mean", "sum"):
            raise InvalidArgumentError(
                f"accumulator {name!r}: reduction {reduction!r} is neither 'mean' nor 'sum'"
            )
        self.dtype: DType = as_dtype(dtype)
        self.shape: Shape | None = None if shape is None else tuple(shape)
        # Strings have no sum.
        if self.dtype == object:
            raise InvalidArgumentError(f"accumulator {name!r}: strings cannot be accumulated")
        described = {
            "dtype": self.dtype.name,
            "shape": None if self.shape is None else list(self.shape),
            "reduction": reduction.lower(),
        }
        super().__init__(
            "ConditionalAccumulator", "accumulator", name, described, container, shared_name
        )

    def apply_grad(
        self,
        grad: TensorLike,
        local_step: TensorLike = 0,
        *,
        worker: TensorLike = -1,
        name: str | None = None,
    ) -> Tensor:
        """Offers a gradient. Returns a bool tensor, true for an accepted gradient.

        Args:
            grad: A tensor of the accumulator's dtype and shape.
            local_step: The step of the computation, int64.
            worker: Number of the worker, int. With -1 each session is a worker.
            name: Operation name.
        """
        with self.graph.as_default():
            gradient = as_tensor(grad, self.dtype)
        if gradient.dtype != self.dtype:
            raise InvalidArgumentError(
                f"accumulator {self.name!r} takes {self.dtype.name}, got "
                f"{dtype_name(gradient.dtype)}"
            )
        inputs = [
            gradient,
            self._make_integer(local_step, "local_step"),
            self._make_integer(worker, "worker"),
        ]
        return self._add_operation(
            "apply_grad", inputs, [((), np.dtype(np.bool_))], name=name
        ).outputs[0]

    def take_grad(self, num_required: TensorLike, name: str | None = None) -> Tensor:
        """Waits for gradients of ``num_required`` workers, takes all gradients, and advances the step by one."""
        inputs = [self._make_integer(num_required, "num_required")]
        return self._add_operation(
            "take_grad", inputs, [(self.shape, self.dtype)], name=name
        ).outputs[0]

    def num_accumulated(self, name: str | None = None) -> Tensor:
        """Makes an int32 scalar with the number of gradients to take."""
        return self._add_counts(name).outputs[0]

    def num_dropped(self, name: str | None = None) -> Tensor:
        """Makes an int64 scalar with the number of gradients dropped as stale or repeated."""
        return self._add_counts(name).outputs[1]

    def set_global_step(self, new_global_step: TensorLike, name: str | None = None) -> Operation:
        """Sets the accumulator's step. Older gradients are dropped on arrival."""
        return self._add_operation(
            "set_global_step", [self._make_integer(new_global_step, "new_global_step")], name=name
        )

    def _add_counts(self, name: str | None) -> Operation:
        return self._add_operation(
            "counts", (), [((), np.dtype(np.int32)), ((), np.dtype(np.int64))], name=name
        )

    def _make_integer(self, value: TensorLike, what: str) -> Tensor:
        if is_tensor(value):
            return as_tensor(value)
        # The number is made on the device of the accumulator, so that no stage on another task is
        # needed.
        with self.graph.as_default(), fixed_device(self.op.device):
            return constant(value, np.int64, name=what)


def _unpack_element(op: Operation) -> Tensor | tuple[Tensor, ...]:
    return op.outputs[0] if len(op.outputs) == 1 else op.outputs


def _list_dtypes(items: DTypes) -> list[DTypeLike]:
    # The name of a dtype is a sequence too.
    return list(items) if isinstance(items, Sequence) and not isinstance(items, str) else [items]


def _list_shapes(shapes: object, count: int, name: str) -> tuple[Shape | None, ...]:
    if shapes is None:
        return (None,) * count
    if not isinstance(shapes, list | tuple):
        raise InvalidArgumentError(
            f"queue {name!r}: shapes must be a list of shapes, not {shapes!r}"
        )
    # With one component a single shape may stand without a list around it, as in TF1.
    one = count == 1 and all(d is None or isinstance(d, int | np.integer) for d in shapes)
    listed = (
        [shapes] if one and not (shapes and isinstance(shapes[0], list | tuple)) else list(shapes)
    )
    if len(listed) != count:
        raise InvalidArgumentError(
            f"queue {name!r} has {count} components, but shapes for {len(listed)}"
        )
    return tuple(
        None if s is None else tuple(None if d is None else int(d) for d in s) for s in listed
    )
