"""Partitioning: placed operations become stages, the units that run as one program on one device.

An operation's wave is the longest path to it counted in changes of place. A stage is (place, wave), so edges between
stages lead to later waves and the stages of one wave are independent of each other. Where an operation could be in
several waves it goes where it adds no stage: reads and computations as late as possible, writes as early.

An operation that may wait is a stage of its own. A stage waits for such an operation only if its own operations do. So
an operation that feeds an enqueue never shares a stage with an operation that a dequeue feeds. In one stage the two
could wait for each other.
"""

from __future__ import annotations

import graphlib
import heapq
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.graph.graph import Operation, reachable
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
    found = _Waves(operations, waits_for, place_of)
    members: dict[tuple[int, Place], list[Operation]] = {}
    for op in operations:
        members.setdefault((found.waves[op], found.spots[op]), []).append(op)
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


class _Waves:
    """The wave and the spot of each operation of a step."""

    def __init__(
        self,
        operations: Sequence[Operation],
        waits_for: Mapping[Operation, Sequence[Operation]],
        place_of: Callable[[Operation], Place],
    ) -> None:
        self._waits_for = waits_for
        self._followers: dict[Operation, list[Operation]] = {op: [] for op in operations}
        self._earliest: dict[Operation, int] = {}
        self.spots: dict[Operation, _Spot] = {}
        # Forward: the earliest wave of each operation, and the waiting operations behind which it runs.
        used: dict[Place, dict[_Spot, set[int]]] = {}
        for op in operations:
            behind = frozenset[Operation]()
            for before in waits_for[op]:
                behind |= self.spots[before].behind | ({before} if may_wait(before.body) else set())
                self._followers[before].append(op)
            place = (place_of(op), op) if may_wait(op.body) else place_of(op)
            self.spots[op] = spot = _Spot(place, behind)
            self._earliest[op] = self._floor(op, spot, self._earliest)
            used.setdefault(place, {}).setdefault(spot, set()).add(self._earliest[op])

        # Backward: reads and computations move to the last stage that is there. Consumers come first, so that an
        # operation holds none of them up.
        self.waves = dict(self._earliest)
        latest: dict[Operation, float] = {}
        for op in reversed(operations):
            if not is_write(op):
                self.waves[op], self.spots[op] = self._latest_stage(op, used[self.spots[op].place])
            latest[op] = self._limit(op, self.spots[op])
        occupied: dict[_Spot, set[int]] = {}
        for op in operations:
            if not is_write(op):
                occupied.setdefault(self.spots[op], set()).add(self.waves[op])
        # Forward again: a write joins the first stage that is there anyway. So a variable is written as early as
        # possible without an additional stage.
        for op in filter(is_write, operations):
            floor = self._floor(op, self.spots[op], self.waves)
            stages = occupied.setdefault(self.spots[op], set())
            found = (wave for wave in stages if floor <= wave <= latest[op])
            self.waves[op] = min(found, default=max(floor, self._earliest[op]))
            stages.add(self.waves[op])

    def _latest_stage(self, op: Operation, used: Mapping[_Spot, set[int]]) -> tuple[int, _Spot]:
        """Finds the last stage that can take the operation.

        Of stages of one wave, the stage at the operation's own spot is preferred.
        """
        own = self.spots[op]
        found: list[tuple[int, bool, _Spot]] = []
        for spot, stages in used.items():
            if own.behind <= spot.behind:
                floor, limit = self._floor(op, spot, self._earliest), self._limit(op, spot)
                found += [(wave, spot == own, spot) for wave in stages if floor <= wave <= limit]
        wave, _, spot = max(found, key=lambda stage: stage[:2])
        return wave, spot

    def _floor(self, op: Operation, spot: _Spot, waves: Mapping[Operation, int]) -> int:
        """Returns the first wave in which ``op`` can be at ``spot``, after all that it waits for."""
        return max((waves[b] + (self.spots[b] != spot) for b in self._waits_for[op]), default=0)

    def _limit(self, op: Operation, spot: _Spot) -> float:
        """Returns the last wave in which ``op`` can be at ``spot``, before all that wait for it.

        Returns -1 if ``op`` would hold them up.
        """
        followers = self._followers[op]
        if any(not spot.behind <= self.spots[after].behind for after in followers):
            return -1
        return min((self.waves[after] - (self.spots[after] != spot) for after in followers), default=math.inf)


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
            behind = reachable([writer], before.__getitem__)  # the same when a reader goes behind the writer
            for reader in readers:
                if reader not in behind:
                    before[reader].add(writer)
                    moved = True
    if not moved:
        return list(operations)
    # Else in the order in which they were made: of two writes that nothing orders, the later one stays the last.
    sorter, ready, ordered = graphlib.TopologicalSorter(before), list[tuple[int, Operation]](), list[Operation]()
    sorter.prepare()
    while sorter.is_active():
        for op in sorter.get_ready():
            heapq.heappush(ready, (op.id, op))
        ordered.append(heapq.heappop(ready)[1])
        sorter.done(ordered[-1])
    return ordered
