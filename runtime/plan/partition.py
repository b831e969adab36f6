"""Partitioning: placed operations become stages, the units that run as one program on one device.

Wanted: few stages, because each stage costs a message and a start of a program. No two stages may
wait for each other. Every process that plans the same graph must find the same stages, because
tasks know programs by their bytes.

Three simpler ways fail:

* One stage for each operation. A step would send a message for each addition, and XLA would fuse
  nothing.
* One stage for each place. A step reads a variable on a parameter server, computes on a worker, and
  updates the variable on the parameter server. The read and the update have one place, and the
  computation between them would wait for its own result.
* One stage for each wave of a place, and each operation in its earliest wave. The wave of an
  operation is the longest path to the operation, counted in changes of place. Edges then lead to
  later waves only, so no circle arises. But an operation that depends on nothing lands in wave 0,
  and makes a stage there although its reader runs in wave 2.

Solution: waves, and each operation moves to where the operation adds no stage.

1. Forward, each operation receives its earliest wave. The stages of these waves are the stages to
    choose from.
2. Backward, each read and each computation moves to the last of these stages that comes before its
    readers.
3. Forward again, each write joins the first stage that is left and fits. So a variable is written
    early.
4. Backward again, each stage as a whole moves to the last wave in which its task runs another stage,
    since the calls of a wave to one task are one message.

An operation that may wait, such as a dequeue, is a stage of its own. A stage waits for such an
operation only if all its operations do. Otherwise an operation that feeds an enqueue could share a
stage with an operation that needs the dequeue of the same queue, and the stage would wait for
itself. So a stage has a spot: its place, and the waiting operations behind which the stage runs.

Within a stage a read of a variable comes after the write, unless the write waits for the read.

Limits: each operation chooses alone, so a step may have more stages than the least possible number.
A path that changes the place n times has n + 1 waves, however the operations move.
"""

from __future__ import annotations

import graphlib
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.graph.graph import Operation, reachable
from runtime.graph.op_kinds import Host, Read, Update, may_wait

Place = Hashable
"""The place of an operation. Operations of equal places may share a stage."""


@dataclass(frozen=True)
class StagePartition:
    """A stage before lowering: place, wave and operations in the order in which they run."""

    place: Place
    wave: int
    operations: tuple[Operation, ...]


def partition_operations(
    operations: Sequence[Operation],
    waits_for: Mapping[Operation, Sequence[Operation]],
    find_place: Callable[[Operation], Place],
    find_task: Callable[[Operation], Hashable],
) -> list[StagePartition]:
    """Partitions ``operations`` into stages, in the order of their waves.

    Args:
        operations: the operations of the step, in topological order.
        waits_for: for each operation, the operations before it.
        find_place: the function that returns the place of an operation.
        find_task: the function that returns the task of an operation.
    """
    found = _WaveChoice(operations, waits_for, find_place)
    found.bundle_stages(find_task)
    members: dict[tuple[int, Place], list[Operation]] = {}
    for op in operations:
        members.setdefault((found.waves[op], found.spots[op]), []).append(op)
    # The sort is stable: within a wave the stages keep the order of their first operations.
    stages = sorted(members.items(), key=lambda item: item[0][0])
    return [
        StagePartition(place, wave, tuple(_order_operations(ops, waits_for)))
        for (wave, place), ops in stages
    ]


def find_awaited_stages(
    partitions: Sequence[StagePartition], waits_for: Mapping[Operation, Sequence[Operation]]
) -> tuple[tuple[int, ...], ...]:
    """Finds for each stage the numbers of the stages that must be finished before."""
    stage_of = {op: i for i, c in enumerate(partitions) for op in c.operations}
    return tuple(
        tuple(sorted({stage_of[before] for op in c.operations for before in waits_for[op]} - {i}))
        for i, c in enumerate(partitions)
    )


def is_write(op: Operation) -> bool:
    """Returns True if the operation changes state that outlives the step."""
    return isinstance(op.body, Update) or isinstance(op.body, Host) and op.body.stateful


class _StageSpot(NamedTuple):
    """The place of an operation, and the waiting operations behind which it runs.

    Equal spots share a stage.
    """

    place: Place
    behind: frozenset[Operation]


class _WaveChoice:
    """The wave and the spot of each operation of a step."""

    def __init__(
        self,
        operations: Sequence[Operation],
        waits_for: Mapping[Operation, Sequence[Operation]],
        find_place: Callable[[Operation], Place],
    ) -> None:
        self._operations = operations
        self._waits_for = waits_for
        self._followers: dict[Operation, list[Operation]] = {op: [] for op in operations}
        self._earliest: dict[Operation, int] = {}
        self.spots: dict[Operation, _StageSpot] = {}
        self._find_earliest(find_place)
        self.waves = dict(self._earliest)
        self._join_writes(self._move_others_late())

    def _find_earliest(self, find_place: Callable[[Operation], Place]) -> None:
        """Finds the spot and the earliest wave of each operation."""
        for op in self._operations:
            behind = frozenset[Operation]()
            for before in self._waits_for[op]:
                behind |= self.spots[before].behind | ({before} if may_wait(before.body) else set())
                self._followers[before].append(op)
            # An operation that may wait has a place of its own, so that it is a stage of its own.
            place = (find_place(op), op) if may_wait(op.body) else find_place(op)
            self.spots[op] = _StageSpot(place, behind)
            self._earliest[op] = self._first_wave(op, self.spots[op], self._earliest)

    def _move_others_late(self) -> Mapping[Operation, float]:
        """Moves reads and computations to the last stage that is there.

        Returns:
            The last wave in which each operation can be.
        """
        stages: dict[Place, dict[_StageSpot, set[int]]] = defaultdict(lambda: defaultdict(set))
        for op, spot in self.spots.items():
            stages[spot.place][spot].add(self._earliest[op])
        latest: dict[Operation, float] = {}
        # Readers move first, so that an operation can follow its readers.
        for op in reversed(self._operations):
            if not is_write(op):
                self.waves[op], self.spots[op] = self._last_stage(op, stages[self.spots[op].place])
            latest[op] = self._last_wave(op, self.spots[op])
        return latest

    def _join_writes(self, latest: Mapping[Operation, float]) -> None:
        """Moves each write to the first stage that other operations need anyway.

        So a variable is written as early as possible without an additional stage.
        """
        stages: dict[_StageSpot, set[int]] = defaultdict(set)
        for op in self._operations:
            if not is_write(op):
                stages[self.spots[op]].add(self.waves[op])
        for op in filter(is_write, self._operations):
            first = self._first_wave(op, self.spots[op], self.waves)
            there = stages[self.spots[op]]
            found = (wave for wave in there if first <= wave <= latest[op])
            self.waves[op] = min(found, default=max(first, self._earliest[op]))
            there.add(self.waves[op])

    def bundle_stages(self, find_task: Callable[[Operation], Hashable]) -> None:
        """Moves each stage as a whole to the last wave in which its task runs another stage.

        The calls of a wave to one task are one message.
        """
        stages: dict[tuple[int, _StageSpot], list[Operation]] = defaultdict(list)
        for op in self._operations:
            stages[self.waves[op], self.spots[op]].append(op)
        there: dict[Hashable, set[int]] = defaultdict(set)
        # Later stages move first, so that a stage can follow its readers.
        for (wave, spot), members in sorted(stages.items(), key=lambda s: s[0][0], reverse=True):
            waves = there[find_task(members[0]), spot.behind]
            moving = frozenset(members)
            last = min(self._last_wave(op, spot, moving) for op in members)
            if not may_wait(members[0].body):
                wave = max((w for w in waves if wave < w <= last), default=wave)
                waves.add(wave)
            self.waves.update(dict.fromkeys(members, wave))
        assert all(
            self._first_wave(op, self.spots[op], self.waves) <= self.waves[op]
            for op in self._operations
        ), "a stage waits for its own result, or for a later stage"

    def _last_stage(
        self, op: Operation, stages: Mapping[_StageSpot, set[int]]
    ) -> tuple[int, _StageSpot]:
        """Finds the last stage that can take the operation.

        Of stages of one wave, the stage at the operation's own spot is preferred.
        """
        own = self.spots[op]
        found: list[tuple[int, bool, _StageSpot]] = []
        for spot, waves in stages.items():
            # At a spot behind fewer waiting operations, the operation would hold up the other
            # operations.
            if own.behind <= spot.behind:
                first, last = self._first_wave(op, spot, self._earliest), self._last_wave(op, spot)
                found += [(wave, spot == own, spot) for wave in waves if first <= wave <= last]
        wave, _, spot = max(found, key=lambda stage: stage[:2])
        return wave, spot

    def _first_wave(self, op: Operation, spot: _StageSpot, waves: Mapping[Operation, int]) -> int:
        """Returns the first wave in which ``op`` can be at ``spot``, after the operations that ``op`` waits for."""
        return max((waves[b] + (self.spots[b] != spot) for b in self._waits_for[op]), default=0)

    def _last_wave(
        self, op: Operation, spot: _StageSpot, moving: Collection[Operation] = frozenset()
    ) -> float:
        """Returns the last wave in which ``op`` can be at ``spot``, before the operations that wait for ``op``.

        Returns -1 if ``op`` would hold them up. The operations in ``moving`` move with ``op``.
        """
        followers = [after for after in self._followers[op] if after not in moving]
        if any(not spot.behind <= self.spots[after].behind for after in followers):
            return -1
        return min(
            (self.waves[after] - (self.spots[after] != spot) for after in followers),
            default=math.inf,
        )


def _order_operations(
    operations: Sequence[Operation], waits_for: Mapping[Operation, Sequence[Operation]]
) -> list[Operation]:
    """Orders the operations of one stage.

    An operation comes after the operations that it waits for. A read sees the written value of a
    variable, unless the write waits for the read.
    """
    inside = set(operations)
    before = {op: {other for other in waits_for[op] if other in inside} for op in operations}
    reads, writes = _find_accesses(operations)
    readers_of: dict[Operation, list[Operation]] = defaultdict(list)
    for key, readers in reads.items():
        for writer in writes[key]:
            readers_of[writer] += readers
    moved = False
    for writer, readers in readers_of.items():
        # A read behind which the write comes stays there: the update of a counter computes with
        # the old value. The set is the same for all readers, since no reader that goes behind
        # the writer is in the set.
        behind = reachable([writer], before.__getitem__)
        for reader in readers:
            if reader not in behind:
                before[reader].add(writer)
                moved = True
    return _sort_oldest_first(before) if moved else list(operations)


def _find_accesses(operations: Sequence[Operation]) -> tuple[_Accesses, _Accesses]:
    """Finds the reads and the writes of each variable."""
    reads: _Accesses = defaultdict(list)
    writes: _Accesses = defaultdict(list)
    for op in operations:
        if isinstance(op.body, Read):
            reads[op.body.variable.container, op.body.variable.name].append(op)
        elif isinstance(op.body, Update):
            for variable in op.body.variables:
                writes[variable.container, variable.name].append(op)
        # A host kernel writes a string variable.
        elif isinstance(op.body, Host) and op.body.stateful and "variable" in op.body.attrs:
            writes[op.body.attrs["container"], op.body.attrs["variable"]].append(op)
    return reads, writes


_Accesses = dict[tuple[str, str], list[Operation]]
"""The operations that read or write a variable, by container and name."""


def _sort_oldest_first(before: Mapping[Operation, Collection[Operation]]) -> list[Operation]:
    """Sorts operations topologically, and else in the order in which they were made.

    Of two writes without an order between them, the later one stays the last.
    """
    sorter, ready, ordered = (
        graphlib.TopologicalSorter(before),
        list[tuple[int, Operation]](),
        list[Operation](),
    )
    sorter.prepare()
    while sorter.is_active():
        for op in sorter.get_ready():
            heapq.heappush(ready, (op.id, op))
        ordered.append(heapq.heappop(ready)[1])
        sorter.done(ordered[-1])
    assert len(ordered) == len(before)
    return ordered
