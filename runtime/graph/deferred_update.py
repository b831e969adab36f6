"""Deferred updates of a graph: quorums of synchronous training, and the bound of semi-synchronous training."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.extend
import numpy as np

from runtime.errors import InvalidArgumentError
from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import ArrayFn, Attrs, Constant, Deferred, Host, Shape, Update, VariableSpec
from runtime.graph.ops import as_tensor, kind_of
from runtime.graph.tracing import aval, needs_64_bit, trace
from runtime.graph.variable import Variable
from runtime.tensor_spec import AnyArray, DType

ALL_WORKERS = 2**31 - 1
"""How many gradients an aggregate needs in which all workers take part that are there."""
_INT64 = np.dtype(np.int64)
_VECTOR: tuple[Shape, DType] = ((None,), _INT64)


class Quorum:
    """Synchronous updates on one task: it collects gradients until enough distinct workers have given theirs.

    It applies their mean once, and the step advances by one. Gradients that were computed at another step are dropped
    and counted.

    Args:
        beside: a variable on the task. Where ``leads``, it is the step: a number that every update adds 1 to.
        needed: gradients in one aggregate.
        total: workers there are; below ``needed``, each gives several gradients to an aggregate.
        alone: the task decides by itself when it has enough gradients. With several tasks a chief decides, so that all
            tasks apply the gradients of the same workers: by ``gather`` and ``commit``, on the leading task last.
        leads: this task holds the step.
        timeout_secs: how long the first gradient of a step waits until the step goes on without those that are missing.
        tasks: names of all tasks that hold a part of the step ("/job:ps/task:0").
        elastic: workers come and go: ``needed`` is ``ALL_WORKERS``, or the most that an aggregate has, and
            ``total`` means nothing.
        name: the same on all these tasks, for all sessions.
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
        name: str = "quorum",
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
        self.name = name
        self._described = {
            "name": name,
            "container": "",
            "needed": int(needed),
            "total": int(total),
            "alone": bool(alone),
            "leads": bool(leads),
            "timeout_secs": None if timeout_secs is None else float(timeout_secs),
            "tasks": list(tasks),
            "elastic": bool(elastic),
        }

    @property
    def device(self) -> str:
        """Returns the device of its variables, as the graph asks for it."""
        return self.beside.device

    def push(self, updates: Sequence[Operation], stamp: Tensor, worker: int | None = None) -> Operation:
        """Gives this worker's gradients and waits until their step is over.

        Args:
            updates: operations made by ``rt.update`` or ``Variable.assign_add`` on the quorum's device, one of which
                adds 1 to the step. They run once per aggregate, with the mean of their inputs. Integer inputs are
                joined bit by bit (or): what is the same for all workers stays so, and marks come together.
            stamp: the step at which the variables were read.
            worker: this worker's number, below ``total``; None tells workers apart by their sessions.

        Returns:
            An operation with the outputs (step afterwards; whether the gradients counted, bool). Where the quorum
            leads, a step that fetches the step variable too gets the value afterwards.
        """
        dtype = self.beside.dtype if self._leads else _INT64
        attrs = {"resource": self._described, "worker": worker, "dtype": dtype.name}
        outputs: list[tuple[Shape, DType]] = [((), dtype), ((), np.dtype(np.bool_))]
        name = f"{self.name}/push"
        return defer(
            self.beside,
            updates,
            "quorum/push",
            attrs,
            [as_tensor(stamp)],
            outputs,
            name=name,
            returns_step=self._leads,
        )

    def claim(self, request: Tensor) -> tuple[Tensor, Tensor]:
        """Begins a session of the chief; what it has ordered in an earlier one is refused from now on.

        Args:
            request: int64[4]: epoch and owner of the leadership that the task obeys, how many gradients the chief wants
                to decide on, and 1 to drop what is there.

        Returns:
            int64[3] of (session, step, step of the last decision or -1), and the workers of that decision.
        """
        spec = self.beside.spec
        op = self._host("claim", [request], [((3,), _INT64), _VECTOR], step=[spec.container, spec.name])
        return op.outputs[0], op.outputs[1]

    def gather(self, request: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Waits until there is something to decide on.

        Args:
            request: int64[7]: epoch, owner, the session, the step that the chief knows, how many gradients of it, how
                many changes of who is there, and after how many milliseconds to tell what there is.

        Returns:
            int64[3], the step, for how many milliseconds its first gradient has waited, and how many changes of who is
            there there were; the workers whose gradients are there, in the order in which they came; the workers that
            have been heard of since, or with ``elastic`` those who are there.
        """
        op = self._host("gather", [request], [((3,), _INT64), _VECTOR, _VECTOR])
        return op.outputs[0], op.outputs[1], op.outputs[2]

    def commit(self, order: Tensor) -> Tensor:
        """Applies the gradients that the chief has chosen.

        Args:
            order: int64: epoch, owner, the session, how many gradients the chief wants for the next decision, the step,
                then the chosen workers.

        Returns:
            int64 scalar, the step afterwards.
        """
        return self._host("commit", [order], [((), _INT64)]).outputs[0]

    def counts(self) -> tuple[Tensor, ...]:
        """Makes tensors that count gradients.

        Four int64 scalars: aggregates applied, gradients in them, gradients dropped as stale, gradients repeated.
        """
        return self._host("counts", (), [((), _INT64)] * 4, stateful=False).outputs

    def status(self) -> Tensor:
        """Makes a string tensor of the workers that the present step waits for.

        Empty when the step waits for no worker.
        """
        return self._host("status", (), [((), np.dtype(object))], stateful=False).outputs[0]

    def _host(
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
    step: Variable, updates: Sequence[Operation], max_staleness: int, worker: int | None = None, name: str = "bounded"
) -> Operation:
    """Updates with bounded staleness: they run at once; then a worker that is too far ahead waits for the slowest.

    Args:
        step: the integer variable on the updates' device that one of them counts in.
        updates: operations made by ``rt.update`` or ``Variable.assign_add``, all on one device.
        max_staleness: how many steps a worker may be ahead of the slowest one that is connected.
        worker: this worker's number; None tells workers apart by their sessions.
        name: the same for all sessions.

    Returns:
        An operation with one output, the step after this worker's update.
    """
    if max_staleness < 0:
        raise InvalidArgumentError(f"max_staleness={max_staleness} is below 0")
    described = {"name": name, "container": "", "bound": int(max_staleness)}
    attrs = {"resource": described, "worker": worker, "dtype": step.dtype.name}
    outputs: list[tuple[Shape, DType]] = [((), step.dtype)]
    return defer(step, updates, "quorum/tick", attrs, (), outputs, name=f"{name}/update", returns_step=True)


def defer(
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
    """Makes one deferred update of several updates on one device; these are not run themselves.

    Args:
        first: a variable on the device; the kernel can read it.
        updates: the operations.
        kernel: registered name.
        attrs: the kernel's attributes.
        kernel_inputs: inputs of the kernel alone.
        outputs: (static shape, dtype) of the kernel's outputs.
        name: operation name.
        returns_step: the first output is the value of ``first`` after the updates, which one of them writes.

    Raises:
        InvalidArgumentError: an operation is not an update of numbers on ``first``'s device, or none writes ``first``
            although the kernel tells it.
    """
    ordered = sorted(set(updates), key=lambda op: op.id)
    for op in ordered:
        if not isinstance(op.body, Update) or isinstance(op.body, Deferred) or op.device != first.device:
            raise InvalidArgumentError(
                f"{name}: {op.name!r} at {op.device!r} is no update of variables at {first.device!r}"
            )
    specs = tuple(dict.fromkeys([first.spec, *(v for op in ordered for v in op.body.variables)]))  # type: ignore[union-attr]
    if returns_step and all(first.spec not in op.body.variables for op in ordered):  # type: ignore[union-attr]
        raise InvalidArgumentError(f"{name}: no update writes {first.name!r}")
    inputs = list(dict.fromkeys(t for op in ordered for t in op.inputs if not _is_literal(t)))
    before = [c for op in ordered for c in op.control_inputs if c not in ordered]
    body = Deferred(
        specs, _together(ordered, specs, inputs), False, kernel, dict(attrs), len(kernel_inputs), returns_step
    )
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


def _together(ordered: Sequence[Operation], specs: Sequence[VariableSpec], inputs: Sequence[Tensor]) -> ArrayFn:
    """Makes one function of several updates.

    Each is traced by itself, because one 64-bit counter must not widen the others.
    """

    def run(*arrays: jax.Array) -> tuple[AnyArray, ...]:
        now = dict(zip(specs, arrays[: len(specs)], strict=True))
        values = dict(zip(inputs, arrays[len(specs) :], strict=True))
        for op in ordered:
            body = op.body
            assert isinstance(body, Update)
            given: list[AnyArray] = [] if body.overwrites else [now[v] for v in body.variables]
            for tensor in op.inputs:
                literal = tensor.op.body
                given.append(literal.value if isinstance(literal, Constant) else values[tensor])
            wide = op.wide or needs_64_bit([np.dtype(a.dtype) for a in given] + [t.dtype for t in op.outputs])
            jaxpr = trace(body.fn, [aval(a.shape, a.dtype) for a in given], wide)
            now.update(zip(body.variables, jax.extend.core.jaxpr_as_fun(jaxpr)(*given), strict=False))
        return tuple(now[v] for v in specs)

    return run
