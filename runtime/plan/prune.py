"""Pruning: the operations that the fetches of a step need, and the order between these operations."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from runtime.errors import MissingFeedError
from runtime.graph.graph import Operation, Tensor, reachable
from runtime.graph.op_kinds import (
    EMBED_BYTES,
    Constant,
    Feed,
    Nothing,
    Pure,
    StepId,
)


@dataclass(frozen=True)
class NeededOperations:
    """The operations that a step has to run.

    Attributes:
        operations: the operations to run, each after the operations before. Placeholders and the
            step's own id are values of the step and not among the operations. Points of control are
            dissolved.
        waits_for: for each operation, the operations that must have run before, data and control
            alike.
        given: the tensors that come with the step besides the feeds: its id, strings, and constants
            too large to be literals of a program.
        alias: second names: a tensor, and the tensor behind its name (``drop_identities``).
    """

    operations: tuple[Operation, ...]
    waits_for: Mapping[Operation, tuple[Operation, ...]]
    given: tuple[Tensor, ...]
    alias: Mapping[Tensor, Tensor]


def prune_graph(
    fetches: Iterable[Tensor | Operation],
    feeds: Collection[Tensor],
    done: Collection[Operation] = frozenset(),
) -> NeededOperations:
    """Finds the operations that ``fetches`` need when the tensors ``feeds`` are given.

    Args:
        fetches: the tensors and operations of the client's request.
        feeds: the given tensors.
        done: operations that have run already. Results of theirs that the step needs are among
            ``feeds``.

    Raises:
        MissingFeedError: a placeholder is needed and not fed.
    """
    fed = frozenset(feeds)
    seen = _find_reachable(fetches, fed, done)
    missing = sorted(
        op.name for op in seen if isinstance(op.body, Feed) and op.outputs[0] not in fed
    )
    if missing:
        raise MissingFeedError(
            "You must feed a value for placeholder tensor "
            f"{', '.join(repr(name + ':0') for name in missing)}"
        )
    waits_for: dict[Operation, tuple[Operation, ...]] = {}
    given: list[Tensor] = []
    # Placeholders and points of control are no operations of the step. ``behind`` has the
    # operations to wait for in their place.
    behind: dict[Operation, tuple[Operation, ...]] = {}
    # An operation can only refer to operations made before it, so the order of making is a
    # topological order.
    for op in sorted(seen, key=lambda op: op.id):
        inputs = (t.op for t in op.inputs if t not in fed)
        before = _resolve_before(
            (other for other in (*inputs, *op.control_inputs) if other in seen), behind
        )
        if isinstance(op.body, Nothing):
            behind[op] = before
        elif isinstance(op.body, Feed):
            behind[op] = ()
        elif _comes_with_step(op):
            behind[op] = ()
            given.append(op.outputs[0])
        else:
            assert all(other in waits_for for other in before), (
                "a step waits for what it does not run"
            )
            waits_for[op] = before
    return NeededOperations(tuple(waits_for), waits_for, tuple(given), {})


def drop_identities(
    needed: NeededOperations,
    same_place: Callable[[Operation, Operation], bool],
    feeds: Collection[Tensor],
) -> NeededOperations:
    """Drops the operations that return a value of their own device unchanged.

    Args:
        needed: the pruned step.
        same_place: a function that returns True if two operations run on the same device.
        feeds: the fed tensors.
    """
    given = {*feeds, *needed.given}
    alias: dict[Tensor, Tensor] = {}
    behind: dict[Operation, tuple[Operation, ...]] = {}
    waits_for: dict[Operation, tuple[Operation, ...]] = {}
    for op in needed.operations:
        before = _resolve_before(needed.waits_for[op], behind)
        # A fed identity has a value of its own.
        if op.type == "Identity" and isinstance(op.body, Pure) and op.outputs[0] not in given:
            source = alias.get(op.inputs[0], op.inputs[0])
            if source in given or same_place(source.op, op):
                alias[op.outputs[0]] = source
                behind[op] = before
                continue
        waits_for[op] = before
    return NeededOperations(tuple(waits_for), waits_for, needed.given, alias)


def _find_reachable(
    fetches: Iterable[Tensor | Operation], fed: Collection[Tensor], done: Collection[Operation]
) -> Collection[Operation]:
    """Finds the operations from which the fetches are reached, without those behind fed tensors."""
    roots = [f.op if isinstance(f, Tensor) else f for f in fetches if f not in fed]

    def list_before(op: Operation) -> Iterable[Operation]:
        yield from (t.op for t in op.inputs if t not in fed)
        # Operations of earlier substeps, and those whose results are given, must not run again.
        yield from (c for c in op.control_inputs if c not in done and not _is_given(c, fed))

    return reachable(roots, list_before)


def _resolve_before(
    before: Iterable[Operation], behind: Mapping[Operation, tuple[Operation, ...]]
) -> tuple[Operation, ...]:
    """Replaces operations that the step does not run by the operations behind, each once."""
    return tuple(dict.fromkeys(real for other in before for real in behind.get(other, (other,))))


def _comes_with_step(op: Operation) -> bool:
    body = op.body
    if isinstance(body, Constant):
        return body.value.dtype == object or body.value.nbytes > EMBED_BYTES
    return isinstance(body, StepId)


def _is_given(op: Operation, fed: Collection[Tensor]) -> bool:
    return isinstance(op.body, Feed) or bool(op.outputs) and all(t in fed for t in op.outputs)
