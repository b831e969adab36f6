"""Prune: the operations that the fetches of a step need, and the operations that each must wait for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from runtime.errors import MissingFeedError
from runtime.graph.graph import Operation, Tensor, reachable
from runtime.graph.op_kinds import EMBED_BYTES, Constant, Feed, Nothing, Pure, StepId


@dataclass(frozen=True)
class Needed:
    """The operations that a step has to run.

    Attributes:
        operations: the operations to run, each after all that it waits for. Placeholders and the step's own id are
            not among them (they are values of the step), nor are points of control (they are dissolved).
        waits_for: for each operation, the operations that must have run before it, data and control alike.
        given: the tensors that come with the step besides the feeds: its id, and constants that are strings or too
            large to be literals of a program.
        alias: tensors that are another tensor under a second name, by ``without_identities``.
    """

    operations: tuple[Operation, ...]
    waits_for: Mapping[Operation, tuple[Operation, ...]]
    given: tuple[Tensor, ...]
    alias: Mapping[Tensor, Tensor]


def prune(
    fetches: Iterable[Tensor | Operation], feeds: Collection[Tensor], done: Collection[Operation] = frozenset()
) -> Needed:
    """Finds the operations that ``fetches`` need when the tensors ``feeds`` are given.

    Args:
        fetches: what the client asked for.
        feeds: the given tensors.
        done: operations that have run already; what is needed of them is among ``feeds``.

    Raises:
        InvalidArgumentError: a placeholder is needed and not fed.
    """
    fed = frozenset(feeds)
    roots = [f.op if isinstance(f, Tensor) else f for f in fetches if not (isinstance(f, Tensor) and f in fed)]

    def before_of(op: Operation) -> Iterable[Operation]:
        yield from (t.op for t in op.inputs if t not in fed)
        yield from (c for c in op.control_inputs if c not in done and not _is_given(c, fed))

    seen = reachable(roots, before_of)
    missing = sorted(op.name for op in seen if isinstance(op.body, Feed) and op.outputs[0] not in fed)
    if missing:
        raise MissingFeedError(
            f"You must feed a value for placeholder tensor {', '.join(repr(name + ':0') for name in missing)}"
        )
    # An operation can only refer to operations made before it, so the order of making is a topological order.
    ordered = sorted(seen, key=lambda op: op.id)
    waits_for: dict[Operation, tuple[Operation, ...]] = {}
    given: list[Tensor] = []
    # Placeholders and points of control are no operations of the step. ``behind`` has the operations to wait for in
    # their place.
    behind: dict[Operation, tuple[Operation, ...]] = {}
    for op in ordered:
        before: dict[Operation, None] = {}
        for other in (*(t.op for t in op.inputs if t not in fed), *op.control_inputs):
            if other not in seen:
                continue
            for real in behind.get(other, (other,)):
                before[real] = None
        if isinstance(op.body, Nothing):
            behind[op] = tuple(before)
        elif isinstance(op.body, Feed):
            behind[op] = ()
        elif _comes_with_the_step(op):
            behind[op] = ()
            given.append(op.outputs[0])
        else:
            waits_for[op] = tuple(before)
    return Needed(tuple(waits_for), waits_for, tuple(given), {})


def without_identities(
    needed: Needed, same_place: Callable[[Operation, Operation], bool], feeds: Collection[Tensor]
) -> Needed:
    """Removes the operations that only pass a value on where it is.

    Args:
        needed: the pruned step.
        same_place: whether two operations run on the same device.
        feeds: the fed tensors.
    """
    given = {*feeds, *needed.given}
    alias: dict[Tensor, Tensor] = {}
    behind: dict[Operation, tuple[Operation, ...]] = {}
    waits_for: dict[Operation, tuple[Operation, ...]] = {}
    for op in needed.operations:
        before = tuple(dict.fromkeys(real for other in needed.waits_for[op] for real in behind.get(other, (other,))))
        if op.type == "Identity" and isinstance(op.body, Pure) and op.outputs[0] not in given:
            source = alias.get(op.inputs[0], op.inputs[0])
            if source in given or same_place(source.op, op):
                alias[op.outputs[0]] = source
                behind[op] = before
                continue
        waits_for[op] = before
    return Needed(tuple(waits_for), waits_for, needed.given, alias)


def _comes_with_the_step(op: Operation) -> bool:
    body = op.body
    if isinstance(body, Constant):
        return body.value.dtype == object or body.value.nbytes > EMBED_BYTES
    return isinstance(body, StepId)


def _is_given(op: Operation, fed: frozenset[Tensor]) -> bool:
    return isinstance(op.body, Feed) or bool(op.outputs) and all(t in fed for t in op.outputs)
