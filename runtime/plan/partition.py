"""Partitioning: placed operations become stages, the units that run as one program on one device.

An operation's wave is the longest path to it counted in changes of place. A stage is (place, wave), so edges between
stages lead to later waves and the stages of one wave are independent of each other. Where an operation could be in
several waves it goes where it adds no stage: reads and computations as late as possible, writes as early.

An operation that may wait is a stage of its own. A stage waits for such an operation only if its own operations do. So
an operation that feeds an enqueue never shares a stage with an operation that a dequeue feeds. In one stage the two
could wait for each other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.graph.graph import Operation
from runtime.graph.op_kinds import Host, Read, Update, may_wait

Place = Hashable
"""Where an operation runs: equal places in one wave share a stage."""


@dataclass(frozen=True)
class Partition:
    """A stage before lowering: place, wave and operations in the order in which they run."""

    place: Place
    wave: int
    operations: tuple[Operation, ...]


def partition(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    place_of: Callable[[Operation], Place],
) -> list[Partition]:
    """Partitions ``operations`` (given in topological order) into stages, in the order of their waves."""
    waves, places = _waves(operations, waits_for, {op: _Spot(_own_place(op, place_of)) for op in operations})
    members: dict[tuple[int, Place], list[Operation]] = {}
    for op in operations:
        members.setdefault((waves[op], places[op]), []).append(op)
    stages = sorted(members.items(), key=lambda item: item[0][0])  # stable: first made first within a wave
    return [Partition(place, wave, tuple(_in_order(ops, waits_for))) for (wave, place), ops in stages]


def after(
    partitions: Sequence[Partition], waits_for: Mapping[Operation, Sequence[Operation]]
) -> tuple[tuple[int, ...], ...]:
    """Finds for each stage the numbers of the stages that must be finished before it begins."""
    stage_of = {op: i for i, c in enumerate(partitions) for op in c.operations}
    return tuple(
        tuple(sorted({stage_of[before] for op in c.operations for before in waits_for[op]} - {i}))
        for i, c in enumerate(partitions)
    )


def is_write(op: Operation) -> bool:
    """Returns True if the operation changes something that outlives the step."""
    return isinstance(op.body, Update) or isinstance(op.body, Host) and op.body.stateful


class _Spot(NamedTuple):
    """The place of an operation, and the waiting operations behind which it runs. Equal spots share a stage."""

    place: Place
    behind: frozenset[Operation] = frozenset()


def _own_place(op: Operation, place_of: Callable[[Operation], Place]) -> Place:
    return (place_of(op), op) if may_wait(op.body) else place_of(op)


def _waves(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    spots: dict[Operation, _Spot],
) -> tuple[dict[Operation, int], dict[Operation, _Spot]]:
    # Forward: the earliest wave of each operation, and the waiting operations behind which it runs.
    earliest: dict[Operation, int] = {}
    followers: dict[Operation, list[Operation]] = {op: [] for op in operations}
    used: dict[Place, dict[_Spot, set[int]]] = {}
    for op in operations:
        behind = frozenset[Operation]().union(
            *(spots[before].behind | ({before} if may_wait(before.body) else set()) for before in waits_for[op])
        )
        spots[op] = spot = _Spot(spots[op].place, behind)
        for before in waits_for[op]:
            followers[before].append(op)
        earliest[op] = _floor(op, spot, earliest, spots, waits_for)
        used.setdefault(spot.place, {}).setdefault(spot, set()).add(earliest[op])

    # Backward: reads and computations move to the last stage that is there. Consumers come first, so that an operation
    # holds none of them up.
    waves = dict(earliest)
    latest: dict[Operation, float] = {}
    for op in reversed(operations):
        if not is_write(op):
            waves[op], spots[op] = _latest_stage(
                op, used[spots[op].place], earliest, waves, spots, waits_for, followers
            )
        latest[op] = _limit(op, spots[op], waves, spots, followers)
    occupied: dict[_Spot, set[int]] = {}
    for op in operations:
        if not is_write(op):
            occupied.setdefault(spots[op], set()).add(waves[op])
    # Forward again: a write joins the first stage that is there anyway. So a variable is written as early as possible
    # without an additional stage.
    for op in operations:
        if is_write(op):
            floor = _floor(op, spots[op], waves, spots, waits_for)
            stages = occupied.setdefault(spots[op], set())
            waves[op] = min((w for w in stages if floor <= w <= latest[op]), default=max(floor, earliest[op]))
            stages.add(waves[op])
    return waves, spots


def _latest_stage(
    op: Operation,
    used: Mapping[_Spot, set[int]],
    earliest: Mapping[Operation, int],
    waves: Mapping[Operation, int],
    spots: Mapping[Operation, _Spot],
    waits_for: Mapping[Operation, Sequence[Operation]],
    followers: Mapping[Operation, Sequence[Operation]],
) -> tuple[int, _Spot]:
    """Finds the last stage that can take the operation.

    Of stages of one wave, the stage at the operation's own spot is preferred.
    """
    own = spots[op]
    found: list[tuple[int, bool, _Spot]] = []
    for spot, stages in used.items():
        if own.behind <= spot.behind:
            floor, limit = _floor(op, spot, earliest, spots, waits_for), _limit(op, spot, waves, spots, followers)
            found += [(wave, spot == own, spot) for wave in stages if floor <= wave <= limit]
    wave, _, spot = max(found, key=lambda stage: stage[:2])
    return wave, spot


def _floor(
    op: Operation,
    spot: _Spot,
    waves: Mapping[Operation, int],
    spots: Mapping[Operation, _Spot],
    waits_for: Mapping[Operation, Sequence[Operation]],
) -> int:
    """Returns the first wave in which ``op`` can be at ``spot``, after all that it waits for."""
    return max((waves[before] + (spots[before] != spot) for before in waits_for[op]), default=0)


def _limit(
    op: Operation,
    spot: _Spot,
    waves: Mapping[Operation, int],
    spots: Mapping[Operation, _Spot],
    followers: Mapping[Operation, Sequence[Operation]],
) -> float:
    """Returns the last wave in which ``op`` can be at ``spot``, before all that wait for it.

    Returns -1 if ``op`` would hold them up.
    """
    if any(not spot.behind <= spots[after].behind for after in followers[op]):
        return -1
    return min((waves[after] - (spots[after] != spot) for after in followers[op]), default=math.inf)


def _in_order(operations: Sequence[Operation], waits_for: Mapping[Operation, Sequence[Operation]]) -> list[Operation]:
    """Orders the operations of one stage.

    An operation comes after all that it waits for. A read sees the written value of a variable, unless the write waits
    for the read.
    """
    inside = set(operations)
    before = {op: {other for other in waits_for[op] if other in inside} for op in operations}
    reads: dict[tuple[str, str], list[Operation]] = {}
    writes: dict[tuple[str, str], list[Operation]] = {}
    for op in operations:
        if isinstance(op.body, Read):
            reads.setdefault((op.body.variable.container, op.body.variable.name), []).append(op)
        elif isinstance(op.body, Update):
            for variable in op.body.variables:
                writes.setdefault((variable.container, variable.name), []).append(op)
        elif isinstance(op.body, Host) and op.body.stateful and "variable" in op.body.attrs:  # a string variable's
            writes.setdefault((op.body.attrs["container"], op.body.attrs["variable"]), []).append(op)
    # A write that depends on the read stays behind it: the update of a counter computes with the old value.
    moved = False
    for key, readers in reads.items():
        for writer in writes.get(key, ()):
            for reader in readers:
                if not _depends(writer, reader, before):
                    before[reader].add(writer)
                    moved = True
    return _topological(operations, before) if moved else list(operations)


def _depends(op: Operation, on: Operation, before: Mapping[Operation, set[Operation]]) -> bool:
    stack, seen = [op], {op}
    while stack:
        here = stack.pop()
        if here is on:
            return True
        for other in before[here]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return False


def _topological(operations: Sequence[Operation], before: Mapping[Operation, set[Operation]]) -> list[Operation]:
    missing = {op: len(before[op]) for op in operations}
    after: dict[Operation, list[Operation]] = {op: [] for op in operations}
    for op in operations:
        for other in before[op]:
            after[other].append(op)
    by_id = {op.id: op for op in operations}
    ready = [op.id for op in operations if not missing[op]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        op = by_id[heapq.heappop(ready)]
        ordered.append(op)
        for other in after[op]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other.id)
    return ordered
