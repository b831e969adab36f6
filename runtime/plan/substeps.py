"""Substeps: the parts of a step with Python calls.

Each part takes the results of the parts before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import Constant, PythonCall
from runtime.plan.prune import NeededOperations, prune_graph


@dataclass(frozen=True, eq=False)
class Substep:
    """A part of a step: a computation of the tasks, and then the Python calls that waited for the computation.

    Attributes:
        fetches: the tensors that the tasks compute for later substeps, for the calls or for the
            user; often none.
        feeds: the tensors that must be given: feeds of the user, and results of earlier substeps.
        done: the operations of earlier substeps, which must not run again.
        calls: the Python calls, in the order in which the calls run.
    """

    fetches: tuple[Tensor | Operation, ...]
    feeds: tuple[Tensor, ...]
    done: frozenset[Operation]
    calls: tuple[Operation, ...]


def split_step(
    fetches: Sequence[Tensor | Operation], feeds: Collection[Tensor]
) -> tuple[Substep, ...]:
    """Splits a step with Python calls into substeps, in their order.

    A step without Python calls is one substep.

    A Python call runs as soon as possible. All other operations run as late as possible. So most
    steps are calls, and then one step as if the outputs of the calls were fed.

    Raises:
        MissingFeedError: a placeholder is needed and not fed.
    """
    needed = prune_graph(fetches, feeds)
    if not any(map(_is_call, needed.operations)):
        return (Substep(tuple(fetches), tuple(feeds), frozenset(), ()),)
    # The numbers of the operations decide the substeps. A constant costs nothing, and belongs to
    # none.
    numbers, last = _number_operations(needed)
    kept = _find_kept(needed, numbers) | set(map(_find_operation, fetches))
    fed = set(feeds)
    found = []
    done: set[Operation] = set()
    for number in range(last + 1):
        now = [
            op
            for op in needed.operations
            if numbers[op] == number and not isinstance(op.body, Constant)
        ]
        computed = [op for op in now if not _is_call(op)]
        wanted: list[Tensor | Operation]
        if number < last:
            wanted = [f for op in computed if op in kept for f in op.outputs or (op,)]
        # No call follows the last substep, so the last substep fetches the results that the user
        # asked for.
        else:
            wanted = [f for f in fetches if f not in fed and _find_operation(f) not in done]
        given = dict.fromkeys(t for op in computed for t in op.inputs if t in fed or t.op in done)
        calls = tuple(filter(_is_call, now))
        found.append(Substep(tuple(dict.fromkeys(wanted)), tuple(given), frozenset(done), calls))
        done.update(now)
    assert not found[-1].calls, "the results of the last calls reach nobody"
    return tuple(found)


def _is_call(op: Operation) -> bool:
    return isinstance(op.body, PythonCall)


def _find_operation(fetch: Tensor | Operation) -> Operation:
    return fetch.op if isinstance(fetch, Tensor) else fetch


def _find_kept(needed: NeededOperations, numbers: Mapping[Operation, int]) -> set[Operation]:
    """Finds the operations whose results a Python call or a later substep needs."""
    return {
        before
        for op in needed.operations
        for before in needed.waits_for[op]
        if _is_call(op) or numbers[before] < numbers[op]
    }


def _number_operations(needed: NeededOperations) -> tuple[dict[Operation, int], int]:
    """Returns the substep of each operation, and the number of the last substep, which has no calls."""
    # Forward: a computation that waits for a call runs in a later substep than the call.
    soonest: dict[Operation, int] = {}
    for op in needed.operations:
        ready = [soonest[b] + (_is_call(b) and not _is_call(op)) for b in needed.waits_for[op]]
        soonest[op] = max(ready, default=0)
    last = 1 + max(number for op, number in soonest.items() if _is_call(op))
    # Backward: a computation moves to the substep of its first reader.
    numbers = {op: soonest[op] if _is_call(op) else last for op in needed.operations}
    for op in reversed(needed.operations):
        for before in needed.waits_for[op]:
            if not _is_call(before):
                numbers[before] = min(numbers[before], numbers[op])
            assert numbers[before] <= numbers[op], "a substep needs a later substep"
    return numbers, last
