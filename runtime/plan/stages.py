"""Cut: placed operations become stages, the units that run as one program on one device.

An operation's wave is the longest path to it counted in changes of place. A stage is (place, wave), so edges between
stages lead to later waves and the stages of one wave are independent of each other. Where an operation could be in
several waves it goes where it adds no stage: reads and computations as late as possible, writes as early.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from runtime.graph.bodies import Host, Read, Update
from runtime.graph.graph import Operation

Place = Hashable
"""Where an operation runs: equal places in one wave share a stage."""


@dataclass(frozen=True)
class Cut:
    """One stage before it is lowered: its place, its wave, its operations in the order they run."""

    place: Place
    wave: int
    operations: tuple[Operation, ...]


def cut(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    place_of: Callable[[Operation], Place],
) -> list[Cut]:
    """Cuts ``operations`` (given in topological order) into stages, in the order of their waves."""
    places = {op: place_of(op) for op in operations}
    waves = _waves(operations, waits_for, places)
    members: dict[tuple[int, Place], list[Operation]] = {}
    for op in operations:
        members.setdefault((waves[op], places[op]), []).append(op)
    stages = sorted(members.items(), key=lambda item: item[0][0])  # stable: first made first within a wave
    return [Cut(place, wave, tuple(_in_order(ops, waits_for))) for (wave, place), ops in stages]


def is_write(op: Operation) -> bool:
    """Whether the operation changes something that outlives the step."""
    return isinstance(op.body, Update) or isinstance(op.body, Host) and op.body.stateful


def _waves(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    places: Mapping[Operation, Place],
) -> dict[Operation, int]:
    earliest: dict[Operation, int] = {}
    followers: dict[Operation, list[Operation]] = {op: [] for op in operations}
    for op in operations:
        wave = 0
        for before in waits_for[op]:
            followers[before].append(op)
            wave = max(wave, earliest[before] + (places[before] != places[op]))
        earliest[op] = wave
    used: dict[Place, set[int]] = {}
    for op in operations:
        used.setdefault(places[op], set()).add(earliest[op])

    waves = dict(earliest)
    latest: dict[Operation, int] = {}
    for op in reversed(operations):
        limit = min(
            (waves[after] - (places[after] != places[op]) for after in followers[op]), default=max(used[places[op]])
        )
        latest[op] = limit
        if not is_write(op):
            waves[op] = max(w for w in used[places[op]] if earliest[op] <= w <= limit)
    occupied: dict[Place, set[int]] = {}
    for op in operations:
        if not is_write(op):
            occupied.setdefault(places[op], set()).add(waves[op])
    for op in operations:  # a write joins the first stage that is there anyway
        if is_write(op):
            floor = max((waves[before] + (places[before] != places[op]) for before in waits_for[op]), default=0)
            stages = occupied.setdefault(places[op], set())
            waves[op] = min((w for w in stages if floor <= w <= latest[op]), default=max(floor, earliest[op]))
            stages.add(waves[op])
    return waves


def _in_order(operations: Sequence[Operation], waits_for: Mapping[Operation, Sequence[Operation]]) -> list[Operation]:
    """Orders the operations of one stage.

    What must be before is before, and a read that nothing orders against a write of the same variable sees what was
    written.
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
