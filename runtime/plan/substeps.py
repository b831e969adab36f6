"""Substeps: the parts of a step with Python calls. Each part takes the results of the parts before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from runtime.graph.graph import Operation, Tensor
from runtime.graph.op_kinds import Constant, PythonCall
from runtime.plan.prune import Needed, prune


@dataclass(frozen=True, eq=False)
class Substep:
    """A part of a step: a computation of the tasks, and then the Python calls that waited for the computation.

    Attributes:
        fetches: the tensors that the tasks compute for later substeps, for the calls or for the user; often none.
        feeds: the tensors that must be given: feeds of the user, and results of earlier substeps.
        done: the operations of earlier substeps, which must not run again.
        calls: the Python calls, in the order in which they run.
    """

    fetches: tuple[Tensor | Operation, ...]
    feeds: tuple[Tensor, ...]
    done: frozenset[Operation]
    calls: tuple[Operation, ...]


def substeps(fetches: Sequence[Tensor | Operation], feeds: Collection[Tensor]) -> tuple[Substep, ...]:
    """Splits a step with Python calls into substeps, in their order; none if it has no Python calls.

    A Python call runs as soon as it can, and everything else as late as it can: most steps are calls, and then one step
    as it would be if their outputs were fed.

    Raises:
        MissingFeedError: a placeholder is needed and not fed.
    """
    needed = prune(fetches, feeds)
    if not any(isinstance(op.body, PythonCall) for op in needed.operations):
        return ()
    when, last = _schedule(needed)
    users: dict[Operation, set[tuple[bool, int]]] = {}
    for op in needed.operations:
        for before in needed.waits_for[op]:
            users.setdefault(before, set()).add((_is_call(op), when[op]))
    for fetch in fetches:
        users.setdefault(fetch.op if isinstance(fetch, Tensor) else fetch, set()).add((False, last))
    found = []
    done: set[Operation] = set()
    fed = set(feeds)
    # An operation is fetched from its substep if a later substep or a Python call needs the result. The last substep
    # has no calls after it, so it fetches what the user asked for.
    for number in range(last + 1):
        now = [op for op in needed.operations if when[op] == number and not isinstance(op.body, Constant)]
        ours, calls = [op for op in now if not _is_call(op)], [op for op in now if _is_call(op)]
        wanted: dict[Tensor | Operation, None] = {}
        if number < last:
            for op in ours:
                if users[op] - {(False, number)}:
                    wanted |= dict.fromkeys(op.outputs or (op,))
        else:
            wanted = dict.fromkeys(f for f in fetches if not _is_known(f, done, fed))
        given = dict.fromkeys(t for op in ours for t in op.inputs if t in fed or t.op in done)
        found.append(Substep(tuple(wanted), tuple(given), frozenset(done), tuple(calls)))
        done.update(now)
    return tuple(found)


def _is_call(op: Operation) -> bool:
    return isinstance(op.body, PythonCall)


def _is_known(fetch: Tensor | Operation, done: Collection[Operation], fed: Collection[Tensor]) -> bool:
    return fetch in fed or (fetch.op if isinstance(fetch, Tensor) else fetch) in done


def _schedule(needed: Needed) -> tuple[dict[Operation, int], int]:
    """Returns the substep of each operation, and the number of the last substep, which has no calls."""
    soonest: dict[Operation, int] = {}
    for op in needed.operations:
        ready = [soonest[b] + (_is_call(b) and not _is_call(op)) for b in needed.waits_for[op]]
        soonest[op] = max(ready, default=0)
    last = 1 + max(number for op, number in soonest.items() if _is_call(op))
    when = {op: soonest[op] if _is_call(op) else last for op in needed.operations}
    for op in reversed(needed.operations):
        for before in needed.waits_for[op]:
            if not _is_call(before):
                when[before] = min(when[before], when[op])
    return when, last
