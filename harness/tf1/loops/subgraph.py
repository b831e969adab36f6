"""Subgraphs: operations that a function of the program has made, as one JAX function for conditionals and loops.

The operations lie in the graph like all others, where a step runs none of them by itself. What they
take from outside (values that were there before, variables, what is fed) becomes the inputs of the
conditional or loop. What they change, an update of a variable, is made anew beside it, and does
nothing unless the condition holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import runtime as rt
from runtime.lowlevel import DType, needs_64_bit

AnyArray = np.ndarray[Any, Any] | jax.Array
_Function = Callable[..., tuple[AnyArray, ...]]
kinds = rt.lowlevel.op_kinds


@dataclass(frozen=True)
class Condition:
    """The condition of an effect, which holds if the bool scalar ``tensor`` is ``value``."""

    tensor: rt.Tensor
    value: bool

    def holds(self, given: jax.Array) -> AnyArray:
        """Returns True if the condition holds, given the tensor's array."""
        return given if self.value else ~given


class Subgraph:
    """A function of arrays, made of operations.

    Attributes:
        arguments: tensors that stand for the arguments of a call.
        results: tensors that stand for the results.
        captured: the other tensors from outside that the function needs, in the order of their
            arrays in a call.
        after: operations outside that must have run before.
        operations: the operations of the function, in their order.
    """

    def __init__(
        self,
        results: Sequence[rt.Tensor],
        arguments: Sequence[rt.Tensor],
        computed: Iterable[rt.Operation],
        outside: Mapping[rt.Tensor, rt.Tensor],
        after: Iterable[rt.Operation],
    ) -> None:
        self.results, self.arguments, self.after = tuple(results), tuple(arguments), tuple(after)
        inner, given = set(computed), set(arguments)
        assert given.isdisjoint(outside), "a placeholder computes nothing, so nothing replaces it"
        needed: set[rt.Operation] = set()
        captured: dict[rt.Tensor, rt.Tensor] = {}
        stack = list(reversed(results))
        while stack:
            tensor = stack.pop()
            if tensor in given:
                continue
            if tensor in outside or tensor.op not in inner:
                captured[tensor] = outside.get(tensor, tensor)
            elif tensor.op not in needed:
                needed.add(tensor.op)
                stack.extend(reversed(tensor.op.inputs))
        self._inner_names = tuple(captured)
        self.captured = tuple(captured.values())
        # In the order in which they were made, inputs come before what needs them.
        self.operations = tuple(sorted(needed, key=lambda op: op.id))

    @property
    def wide_types(self) -> tuple[DType, ...]:
        """Returns a dtype of 64 bits if any operation computes with such a dtype.

        Shown to ``call``, the dtype asks for 64-bit mode.
        """
        wide = any(map(_is_wide, self.operations)) or needs_64_bit(
            [t.dtype for t in (*self.arguments, *self.captured)]
        )
        return (np.dtype(np.int64),) if wide else ()

    def depends_on(
        self, results: Iterable[rt.Tensor], by_shape: Callable[[rt.Operation], bool]
    ) -> tuple[set[rt.Tensor], set[rt.Tensor]]:
        """Finds the arguments and captured tensors from which ``results``, tensors within, are computed.

        ``by_shape`` tells the operations that look at nothing but the shapes of their inputs.
        """
        outer = dict(zip(self._inner_names, self.captured, strict=True))
        seen = self._behind(results, by_shape)
        return seen & set(self.arguments), {outer[t] for t in seen if t in outer}

    def _behind(
        self, results: Iterable[rt.Tensor], stop: Callable[[rt.Operation], bool] = lambda op: False
    ) -> set[rt.Tensor]:
        inner, seen = set(self.operations), set[rt.Tensor]()
        stack = list(results)
        while stack:
            tensor = stack.pop()
            if tensor not in seen:
                seen.add(tensor)
                if tensor.op in inner and not stop(tensor.op):
                    stack.extend(tensor.op.inputs)
        return seen

    def __call__(
        self, arguments: Sequence[AnyArray], captured: Sequence[AnyArray]
    ) -> tuple[jax.Array, ...]:
        """Computes the results from the arrays of ``arguments`` and of ``captured``."""
        return self.some(self.results, arguments, captured)

    def some(
        self,
        results: Sequence[rt.Tensor],
        arguments: Sequence[AnyArray],
        captured: Sequence[AnyArray],
    ) -> tuple[jax.Array, ...]:
        """Computes the values of ``results``, which are some of the tensors within."""
        values: dict[rt.Tensor, AnyArray] = dict(zip(self.arguments, arguments, strict=True))
        values |= zip(self._inner_names, captured, strict=True)
        # A counter is computed without the rest of the loop, which may need what is unknown yet.
        needed = {tensor.op for tensor in self._behind(results)}
        for op in self.operations:
            if op in needed:
                values.update(
                    zip(op.outputs, _evaluate_op(op, [values[t] for t in op.inputs]), strict=True)
                )
        return tuple(jnp.asarray(values[t], t.dtype) for t in results)

    def with_step(self, captured: Sequence[AnyArray], turn: jax.Array) -> list[AnyArray]:
        """Returns ``captured`` for one turn of a loop, with other random numbers for each turn of a step."""
        mixed = []
        for tensor, array in zip(self.captured, captured, strict=True):
            # The last two words of a step id are the key from which random operations draw.
            if isinstance(tensor.op.body, kinds.StepId):
                key = jax.random.wrap_key_data(jnp.asarray(array)[2:], impl="threefry2x32")
                array = jnp.concatenate(
                    [array[:2], jax.random.key_data(jax.random.fold_in(key, turn))]
                )
            mixed.append(array)
        return mixed


def _is_wide(op: rt.Operation) -> bool:
    return op.wide or needs_64_bit([t.dtype for t in (*op.inputs, *op.outputs)])


def _evaluate_op(op: rt.Operation, arrays: Sequence[AnyArray]) -> Sequence[AnyArray]:
    if isinstance(op.body, kinds.Constant):
        return [op.body.value]
    assert isinstance(op.body, kinds.Pure)
    # Each operation keeps the mode of its own program: a float64 one would lose half its digits
    # here otherwise.
    with jax.enable_x64(_is_wide(op)):
        return op.body(*arrays)


def make_subgraph(
    results: Sequence[rt.Tensor],
    arguments: Sequence[rt.Tensor] = (),
    *,
    first: int,
    what: str,
    condition: Condition | None = None,
) -> Subgraph:
    """Makes a function of ``arguments`` from the operations behind ``results``.

    Args:
        results: numeric tensors.
        arguments: placeholders among these operations.
        first: number of the first operation that belongs to it; earlier ones lie outside.
        what: names it in errors: "the body of tf.while_loop".
        condition: updates among the operations happen under it. Without one there may be none.

    Raises:
        rt.InvalidArgumentError: an operation has an effect that cannot be conditional, or one in a
            loop, or cannot be computed in a compiled program.
    """
    if strings := [t for t in results if t.dtype.hasobject]:
        raise rt.InvalidArgumentError(
            f"{what}: {strings[0].name!r} is a string; choose between strings in Python"
        )
    builder = _Builder(first, what, condition, arguments)
    # Operations come in the order in which they were made, so inputs have their replacements before
    # they are needed.
    for op in _find_inner([t.op for t in results], first):
        builder.take(op)
    after = dict.fromkeys(o for t in results for o in builder.before.get(t.op, ()))
    return Subgraph(results, arguments, builder.computed, builder.outside, after)


class _Builder:
    """The state while a subgraph is made.

    Attributes:
        outside: tensor within -> the tensor beside the subgraph that stands for it.
        before: operation within -> operations outside that must have run before.
        computed: the operations that the function computes.
    """

    def __init__(
        self, first: int, what: str, condition: Condition | None, arguments: Sequence[rt.Tensor]
    ) -> None:
        self._first, self._what, self._condition = first, what, condition
        self._varies = {t.op for t in arguments}
        """Operations whose values depend on the arguments."""
        self.outside: dict[rt.Tensor, rt.Tensor] = {}
        self.before: dict[rt.Operation, dict[rt.Operation, None]] = {}
        self.computed: list[rt.Operation] = []

    def take(self, op: rt.Operation) -> None:
        """Adds an operation, whose inputs have been added before."""
        assert op not in self.before and op.id >= self._first
        waits = self.before[op] = self._find_waits(op)
        if any(t.op in self._varies for t in op.inputs):
            self._varies.add(op)
        varies = op in self._varies
        # Placeholders of the arguments and no-ops compute nothing.
        if varies and not op.inputs or isinstance(op.body, kinds.Nothing):
            return
        if _is_computed(op):
            self.computed.append(op)
        # An effect cannot be inside a compiled program: a conditional copy of it runs outside.
        elif _has_effect(op):
            inputs = Subgraph(op.inputs, (), self.computed, self.outside, waits)
            made = _add_conditional(op, inputs, self._what, self._condition)
            self.outside.update(zip(op.outputs, made.outputs, strict=True))
            self.before[op] = {made: None}
        elif varies:
            raise rt.InvalidArgumentError(
                f"{self._what}: {op.name!r} ({op.type}) cannot be part of a compiled loop: compute "
                "it outside of it"
            )
        elif any(o.id >= self._first for o in op.control_inputs) or any(
            t in self.outside for t in op.inputs
        ):
            # As the operation is, it would wait for what does not run.
            copy = _copy_outside(op, waits, self.outside)
            self.outside.update(zip(op.outputs, copy.outputs, strict=True))

    def _find_waits(self, op: rt.Operation) -> dict[rt.Operation, None]:
        waits: dict[rt.Operation, None] = {}
        for other in op.control_inputs:
            waits |= self.before[other] if other.id >= self._first else {other: None}
        for tensor in op.inputs:
            waits |= self.before.get(tensor.op, {})
        return waits


def _is_computed(op: rt.Operation) -> bool:
    body = op.body
    # A large constant stays outside: inside it would make the program as large as the constant.
    small = isinstance(body, kinds.Constant) and body.value.nbytes <= kinds.EMBED_BYTES
    return small or isinstance(body, kinds.Pure)


def _has_effect(op: rt.Operation) -> bool:
    body = op.body
    return isinstance(body, kinds.Update) or isinstance(body, kinds.Host) and body.stateful


def _find_inner(results: Iterable[rt.Operation], first: int) -> list[rt.Operation]:
    found: set[rt.Operation] = set()
    stack = list(results)
    while stack:
        op = stack.pop()
        if op.id >= first and op not in found:
            found.add(op)
            stack.extend(t.op for t in op.inputs)
            stack.extend(op.control_inputs)
    return sorted(found, key=lambda op: op.id)


def _copy_outside(
    op: rt.Operation, waits: Iterable[rt.Operation], outside: Mapping[rt.Tensor, rt.Tensor]
) -> rt.Operation:
    """Copies an operation behind the replacements of its control inputs."""
    return op.graph.add_operation(
        op.type,
        op.body,
        [outside.get(t, t) for t in op.inputs],
        [(t.shape, t.dtype) for t in op.outputs],
        name=op.name.rpartition("/")[2],
        control_inputs=list(waits),
        colocate_with=op,
        wide=op.wide,
    )


def _add_conditional(
    op: rt.Operation, inputs: Subgraph, what: str, condition: Condition | None
) -> rt.Operation:
    """Makes an operation with the effect of ``op`` if the condition holds, and with none otherwise."""
    if condition is None:
        raise rt.InvalidArgumentError(
            f"{what}: {op.name!r} ({op.type}) has an effect, and a compiled loop has none: carry "
            "the value through the loop, and assign it behind"
        )
    body = op.body
    assert isinstance(body, kinds.Update | kinds.Host)
    deferred = isinstance(body, kinds.Deferred) and not body.kernel.startswith(kinds.WHEN)
    strings = any(t.dtype.hasobject for t in op.inputs)
    if deferred or strings or not _is_static(op.outputs):
        raise rt.InvalidArgumentError(
            f"{what}: {op.name!r} ({op.type}) cannot depend on a condition: choose in Python which "
            "of two to run"
        )
    return op.graph.add_operation(
        f"Conditional{op.type}",
        _make_conditional(op, body, condition),
        [condition.tensor, *_choose_inputs(condition, inputs, op)],
        [(t.shape, t.dtype) for t in op.outputs],
        name=op.name.rpartition("/")[2],
        control_inputs=inputs.after,
        colocate_with=op,
        wide=op.wide,
    )


def _make_conditional(
    op: rt.Operation, body: kinds.Update | kinds.Host, condition: Condition
) -> kinds.Update | kinds.Host:
    # An effect that does not happen has outputs all the same.
    zeros = [[list(t.shape or ()), t.dtype.name] for t in op.outputs]
    attrs: dict[str, Any] = {"value": condition.value, "attrs": {}, "outputs": zeros}
    if isinstance(body, kinds.Host):
        attrs["attrs"] = dict(body.attrs)
        return kinds.Host(kinds.WHEN + body.kernel, attrs, True, body.resource)
    if not body.overwrites or _reads_its_variable(op):
        return kinds.Update(body.variables, _update_if(body, condition))
    # The program of an update reads each variable that it may keep, and the variable may have no
    # value yet. So a kernel decides if the program runs, which takes longer.
    kernel, known = "update", 0
    if isinstance(body, kinds.Deferred):
        kernel, known, attrs["attrs"] = body.kernel, body.kernel_inputs, dict(body.attrs)
    # The outputs of a deferred update are the kernel's.
    assigned, count = body.fn, len(body.variables)
    return kinds.Deferred(
        *(body.variables, lambda *given: tuple(assigned(*given))[:count], True),
        *(kinds.WHEN + kernel, attrs, known + 1),
    )


def _reads_its_variable(op: rt.Operation) -> bool:
    """Returns True if an update computes its inputs from its variable, which so has a value."""
    # An update such as v.assign(v + 1) fails without a value in TensorFlow, too.
    written = getattr(op.body, "variables", ())
    stack, seen = [tensor.op for tensor in op.inputs], set[rt.Operation]()
    while stack:
        behind = stack.pop()
        if isinstance(behind.body, kinds.Read) and behind.body.variable in written:
            return True
        if behind not in seen:
            seen.add(behind)
            stack.extend(tensor.op for tensor in behind.inputs)
    return False


def _is_static(tensors: Iterable[rt.Tensor]) -> bool:
    return all(
        t.shape is not None and None not in t.shape and not t.dtype.hasobject for t in tensors
    )


def _choose_inputs(condition: Condition, inputs: Subgraph, op: rt.Operation) -> list[rt.Tensor]:
    """Makes tensors that are the inputs of ``op`` if the condition holds, and zeros otherwise."""
    if not inputs.operations:
        return list(inputs.captured)

    def chosen(
        given: jax.Array, captured: Sequence[jax.Array], *_: object
    ) -> tuple[jax.Array, ...]:
        # The branch that is not chosen needs the shapes, which only the step knows.
        shapes = jax.eval_shape(lambda arrays: inputs((), arrays), captured)
        return jax.lax.cond(  # type: ignore[no-any-return]
            condition.holds(given),
            lambda: inputs((), captured),
            lambda: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes),
        )

    label = f"{op.name.rpartition('/')[2]}/inputs"
    return list(
        rt.call(chosen, condition.tensor, list(inputs.captured), *inputs.wide_types, name=label)
    )


def _update_if(body: kinds.Update, condition: Condition) -> _Function:
    count = len(body.variables)

    def fn(*arrays: jax.Array) -> tuple[AnyArray, ...]:
        old, given, inputs = arrays[:count], arrays[count], arrays[count + 1 :]

        def run() -> tuple[jax.Array, ...]:
            found = body.fn(*inputs) if body.overwrites else body.fn(*old, *inputs)
            return tuple(jnp.asarray(a) for a in found)

        def keep() -> tuple[jax.Array, ...]:
            # Both branches of XLA's conditional return arrays of the same shapes.
            outputs = jax.eval_shape(run)[count:]
            return (*(jnp.asarray(a) for a in old), *(jnp.zeros(s.shape, s.dtype) for s in outputs))

        return jax.lax.cond(condition.holds(given), run, keep)  # type: ignore[no-any-return]

    return fn
