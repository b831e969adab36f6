"""Deferred updates of a graph: quorums of synchronous training, and the bound of semi-synchronous training."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.extend
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import (
    ArrayFn,
    Attrs,
    Constant,
    Deferred,
    Host,
    HostProgram,
    Shape,
    Update,
    VariableSpec,
)
from runtime.graph.ops import as_tensor, kind_of
from runtime.graph.tracing import aval, needs_64_bit, trace
from runtime.graph.variable import Variable
from runtime.tensor_spec import AnyArray, DType

ALL_WORKERS = 2**31 - 1
"""The ``needed`` of an aggregate with all present workers."""
_INT64 = np.dtype(np.int64)
_VECTOR: tuple[Shape, DType] = ((None,), _INT64)


class Quorum:
    """Synchronous updates on one task, which collects gradients until enough distinct workers have sent gradients.

    The task applies their mean once, and the step advances by one. Gradients of another step are
    dropped and counted.

    Args:
        beside: A variable on the task. With ``leads`` the variable is the step: each update adds 1.
        needed: Number of gradients in one aggregate.
        total: Number of workers. If below ``needed``, a worker sends several gradients to an
            aggregate.
        alone: True if the task itself decides that the gradients suffice. Of several tasks a chief
            decides with ``gather`` and ``commit``, on the leading task last, so that all tasks
            apply gradients of the same workers.
        leads: True if this task holds the step.
        timeout_secs: Seconds from the first gradient of a step until the step continues without
            missing gradients.
        tasks: Names of all tasks with a part of the step ("/job:ps/task:0").
        elastic: True if workers come and go. Then ``needed`` is ``ALL_WORKERS``, or the largest
            number of gradients in an aggregate, and ``total`` means nothing.
        clip_norm: Largest norm of the mean over all tasks; None for no limit.
        clipped: Number of the inputs of the updates, the first ones, that the limit is for.
        name: Name of the quorum, equal on all tasks and for all sessions.
        table: Name of the table whose rows the quorum collects; "" for variables.
    """

    def __init__(
        self,
        beside: Variable,
        *,
        needed: int,
        total: int,
        alone: bool,
        leads: bool = True,
        timeout_secs: float | None = None,
        tasks: Sequence[str] = (),
        elastic: bool = False,
        clip_norm: float | None = None,
        clipped: int = 0,
        name: str = "quorum",
        table: str = "",
    ) -> None:
        if needed < 1 or total < 1:
            raise InvalidArgumentError(
                f"{name}: needs at least 1 gradient of at least 1 worker, not {needed} of {total}"
            )
        if leads and (kind_of(beside.dtype) not in (1, 2) or beside.shape != ()):
            raise InvalidArgumentError(f"{name}: the step {beside.name!r} must be one number")
        self.beside = beside
        """A variable on the quorum's task."""
        self._leads = leads
        # A task may have a quorum of variables, and one of each table.
        self.name = f"{name}/{table}" if table else name
        # The description travels as JSON, and a task compares the descriptions of all sessions. So
        # the values have Python's own types.
        self._described = {
            "name": self.name,
            "group": name,
            "of_rows": bool(table),
            "container": "",
            "needed": int(needed),
            "total": int(total),
            "alone": bool(alone),
            "leads": bool(leads),
            "timeout_secs": None if timeout_secs is None else float(timeout_secs),
            "tasks": list(tasks),
            "elastic": bool(elastic),
            "clip_norm": clip_norm,
            "clipped": clipped,
        }

    @property
    def device(self) -> str:
        """Returns the requested device of the quorum's variables."""
        return self.beside.device

    def push(
        self, updates: Sequence[Operation], stamp: Tensor, worker: int | None = None
    ) -> Operation:
        """Sends this worker's gradients, and waits for the end of their step.

        Args:
            updates: Operations of ``rt.update`` or ``Variable.assign_add`` on the quorum's device.
                One update adds 1 to the step. The updates run once per aggregate, with the mean of
                their inputs. Integer inputs are joined bit by bit (or), so equal inputs stay equal,
                and marks of several workers come together.
            stamp: The step at which the variables were read.
            worker: Number of this worker, below ``total``. With None each session is a worker.

        Returns:
            An operation with the outputs (step afterwards; bool, true if the gradients counted). If
            the quorum leads, a step that also fetches the step variable receives the value
            afterwards.
        """
        # Only the leader has the counter, and the other tasks count in 64 bits.
        dtype = self.beside.dtype if self._leads else _INT64
        attrs = {"resource": self._described, "worker": worker, "dtype": dtype.name}
        outputs: list[tuple[Shape, DType]] = [((), dtype), ((), np.dtype(np.bool_))]
        name = f"{self.name}/push"
        if self._described["of_rows"]:
            return self._push_rows(updates, stamp, attrs, outputs)
        return defer_updates(
            self.beside,
            updates,
            "quorum/push",
            attrs,
            [as_tensor(stamp)],
            outputs,
            name=name,
            returns_step=self._leads,
        )

    def _push_rows(
        self,
        updates: Sequence[Operation],
        stamp: Tensor,
        attrs: Attrs,
        outputs: Sequence[tuple[Shape, DType]],
    ) -> Operation:
        (update,) = updates
        assert isinstance(update.body, HostProgram), "a table is updated by a kernel with a program"
        body = replace(update.body, kernel="table/push_mean", attrs={**update.body.attrs, **attrs})
        # As in ``defer_updates``, the update has dependencies of its own.
        with self.beside.graph.control_dependencies(None):
            return self.beside.graph.add_operation(
                "DeferredUpdate",
                body,
                [as_tensor(stamp), *update.inputs],
                outputs,
                name=f"{self.name}/push",
                control_inputs=update.control_inputs,
                colocate_with=self.beside.op,
            )

    def claim(self, request: Tensor) -> tuple[Tensor, Tensor]:
        """Begins a session of the chief. Orders of an earlier session are refused from now on.

        Args:
            request: int64[4]: epoch and owner of the obeyed leadership, the number of gradients for
                a decision, and 1 to drop the present gradients.

        Returns:
            int64[3] of (session, step, step of the last decision or -1), and the end of the order
            with that decision: the bits of the squared norm, and the workers.
        """
        # The kernel reads the step counter from the store, by this name.
        spec = self.beside.spec
        op = self._add_host(
            "claim", [request], [((3,), _INT64), _VECTOR], step=[spec.container, spec.name]
        )
        return op.outputs[0], op.outputs[1]

    def gather(self, request: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Waits for news for a decision.

        Args:
            request: int64[7]: epoch, owner, session, the chief's step, its number of gradients, its
                number of changes of membership, and the milliseconds until a reply without news.

        Returns:
            int64[3] of (step, milliseconds since its first gradient, number of changes of
            membership); the workers of the present gradients, the first first; the workers with a
            sign of life since, or with ``elastic`` the present workers.
        """
        op = self._add_host("gather", [request], [((3,), _INT64), _VECTOR, _VECTOR])
        return op.outputs[0], op.outputs[1], op.outputs[2]

    def norm(self, order: Tensor) -> Tensor:
        """Returns the squared norm of this task's part of the mean, float64; the order is that of ``commit``."""
        outputs: list[tuple[Shape, DType]] = [((), np.dtype(np.float64))]
        return self._add_host("norm", [order], outputs, stateful=False).outputs[0]

    def commit(self, order: Tensor) -> Tensor:
        """Applies the chief's choice of gradients.

        Args:
            order: int64: epoch, owner, session, the number of gradients for the next decision, the
                step, the bits of the squared norm of the whole mean, a float64, and then the chosen
                workers.

        Returns:
            int64 scalar, the step afterwards.
        """
        return self._add_host("commit", [order], [((), _INT64)]).outputs[0]

    def counts(self) -> tuple[Tensor, ...]:
        """Makes four int64 scalars: applied aggregates, their gradients, stale gradients, repeated gradients."""
        return self._add_host("counts", (), [((), _INT64)] * 4, stateful=False).outputs

    def status(self) -> Tensor:
        """Makes a string tensor with the workers for whom the present step waits, or an empty text."""
        return self._add_host("status", (), [((), np.dtype(object))], stateful=False).outputs[0]

    def _add_host(
        self,
        what: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[Shape, DType]],
        stateful: bool = True,
        **attrs: object,
    ) -> Operation:
        return self.beside.graph.add_operation(
            f"Quorum/{what}",
            Host(f"quorum/{what}", {"resource": self._described, **attrs}, stateful, self.name),
            inputs,
            outputs,
            name=f"{self.name}/{what}",
            colocate_with=self.beside.op,
        )


def bounded_update(
    step: Variable,
    updates: Sequence[Operation],
    max_staleness: int,
    worker: int | None = None,
    name: str = "bounded",
) -> Operation:
    """Makes an update with bounded staleness.

    After its update a worker too far ahead waits for the slowest worker.

    Args:
        step: The integer variable on the updates' device in which an update counts.
        updates: Operations of ``rt.update`` or ``Variable.assign_add``, all on one device.
        max_staleness: Number of steps that a worker may be ahead of the slowest connected worker.
        worker: Number of this worker. With None each session is a worker.
        name: Name of the bound, equal for all sessions.

    Returns:
        An operation with one output, the step after this worker's update.
    """
    if max_staleness < 0:
        raise InvalidArgumentError(f"max_staleness={max_staleness} is below 0")
    described = {"name": name, "container": "", "bound": int(max_staleness)}
    attrs = {"resource": described, "worker": worker, "dtype": step.dtype.name}
    outputs: list[tuple[Shape, DType]] = [((), step.dtype)]
    return defer_updates(
        step, updates, "quorum/tick", attrs, (), outputs, name=f"{name}/update", returns_step=True
    )


def defer_updates(
    first: Variable,
    updates: Sequence[Operation],
    kernel: str,
    attrs: Attrs,
    kernel_inputs: Sequence[Tensor],
    outputs: Sequence[tuple[Shape, DType]],
    *,
    name: str,
    returns_step: bool = False,
) -> Operation:
    """Makes one deferred update of several updates on one device.

    The given operations themselves do not run.

    Args:
        first: a variable on the device, which the kernel can read.
        updates: the operations.
        kernel: registered name.
        attrs: the kernel's attributes.
        kernel_inputs: inputs of the kernel alone.
        outputs: (static shape, dtype) of the kernel's outputs.
        name: operation name.
        returns_step: True if the first output is the value of ``first`` after the updates. An
            update must write ``first`` then.

    Raises:
        InvalidArgumentError: an operation is not an update of numbers on ``first``'s device, or no
            update writes ``first`` although the kernel returns the value.
    """
    # The order of creation is the order in which the updates would run.
    ordered = sorted(set(updates), key=lambda op: op.id)
    for op in ordered:
        if (
            not isinstance(op.body, Update)
            or isinstance(op.body, Deferred)
            or op.device != first.device
        ):
            raise InvalidArgumentError(
                f"{name}: {op.name!r} at {op.device!r} is no update of variables at "
                f"{first.device!r}"
            )
    specs = tuple(dict.fromkeys([first.spec, *(v for op in ordered for v in op.body.variables)]))  # type: ignore[union-attr]
    # A kernel that returns the step without an update of the step would return an old value.
    if returns_step and all(first.spec not in op.body.variables for op in ordered):  # type: ignore[union-attr]
        raise InvalidArgumentError(f"{name}: no update writes {first.name!r}")
    # Literals become a part of the function, so that workers need not send them.
    inputs = list(dict.fromkeys(t for op in ordered for t in op.inputs if not _is_literal(t)))
    # An order between two of the updates is kept by ``ordered``.
    before = [c for op in ordered for c in op.control_inputs if c not in ordered]
    body = Deferred(
        specs,
        _join_updates(ordered, specs, inputs),
        False,
        kernel,
        dict(attrs),
        len(kernel_inputs),
        returns_step,
    )
    # The dependencies that are open here belong to other operations. The updates have their own.
    with first.graph.control_dependencies(None):
        return first.graph.add_operation(
            "DeferredUpdate",
            body,
            [*kernel_inputs, *inputs],
            outputs,
            name=name,
            control_inputs=before,
            colocate_with=first.op,
        )


def _is_literal(tensor: Tensor) -> bool:
    return isinstance(tensor.op.body, Constant) and tensor.dtype != object


def _join_updates(
    ordered: Sequence[Operation], specs: Sequence[VariableSpec], inputs: Sequence[Tensor]
) -> ArrayFn:
    """Makes one function of several updates.

    Each update is traced by itself, because a 64-bit counter must not widen other updates.
    """

    def run_updates(*arrays: jax.Array) -> tuple[AnyArray, ...]:
        now = dict(zip(specs, arrays[: len(specs)], strict=True))
        values = dict(zip(inputs, arrays[len(specs) :], strict=True))
        for op in ordered:
            body = op.body
            assert isinstance(body, Update)
            given: list[AnyArray] = [] if body.overwrites else [now[v] for v in body.variables]
            for tensor in op.inputs:
                literal = tensor.op.body
                given.append(literal.value if isinstance(literal, Constant) else values[tensor])
            wide = op.wide or needs_64_bit(
                [np.dtype(a.dtype) for a in given] + [t.dtype for t in op.outputs]
            )
            # The function was not traced before: the shapes are known here only.
            jaxpr = trace(body.fn, [aval(a.shape, a.dtype) for a in given], wide)
            now.update(
                zip(body.variables, jax.extend.core.jaxpr_as_fun(jaxpr)(*given), strict=False)
            )
        return tuple(now[v] for v in specs)

    return run_updates
