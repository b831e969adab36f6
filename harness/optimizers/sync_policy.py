"""The choice of gradients for a synchronous step over several tasks: pure functions of the tasks' reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskProgress:
    """The gradients of the present step that one task has.

    Attributes:
        step: the step that the task is at; -1 when it has not heard of one.
        workers: the worker of each gradient, in the order in which the gradients came.
    """

    step: int = -1
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClaimReply:
    """The report of a task to a new chief.

    Attributes:
        step: the step that the task is at; -1 when it has not heard of one.
        decided: the step of its last decision; -1 when there is none.
        workers: the workers of that decision.
    """

    step: int
    decided: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """The decision of the chief.

    Attributes:
        workers: the worker of each gradient to apply; empty if the chief waits.
        reason: in words.
    """

    workers: tuple[int, ...]
    reason: str


def choose(
    leader: TaskProgress,
    others: Sequence[TaskProgress],
    needed: int,
    members: frozenset[int] | None,
    each: int,
    time_is_up: bool,
) -> Choice:
    """Chooses whose gradients are applied at the leader's step: only such as all tasks have.

    Args:
        leader: report of the task that holds the step.
        others: reports of the other tasks.
        needed: gradients in an aggregate.
        members: the workers that the aggregate waits for; None for all.
        each: most gradients of one worker in an aggregate.
        time_is_up: take what there is.
    """
    wanted = needed if members is None else min(needed, len(members) * each)
    fewest = min(len(r.workers) if r.step == leader.step else 0 for r in (leader, *others))
    # This case is checked before anything is counted, because each of many tasks reports in each step.
    if fewest < wanted and not time_is_up:
        return Choice((), f"{fewest} of {wanted} gradients are in")
    has = [Counter(r.workers) if r.step == leader.step else Counter() for r in others]
    left = Counter(leader.workers)
    for counts in has:
        left &= counts
    everywhere = []
    for worker in leader.workers:
        if left[worker]:
            left[worker] -= 1
            everywhere.append(worker)
    if len(everywhere) >= wanted:
        return Choice(tuple(everywhere[:wanted]), f"{wanted} gradients are in")
    if time_is_up and everywhere:
        return Choice(tuple(everywhere), f"only {len(everywhere)} of {wanted} gradients came in time")
    return Choice((), f"{len(everywhere)} of {wanted} gradients are in")


@dataclass(frozen=True)
class Settlement:
    """The orders by which a new chief makes the tasks agree.

    Attributes:
        step: the step of an aggregate that some tasks have applied and others have not.
        workers: its workers.
        behind: indices of the tasks that must apply it, the leader (0) last.
        forget: indices of the tasks whose state does not fit the leader's and must be dropped.
    """

    step: int = -1
    workers: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()


def settle(claims: Sequence[ClaimReply]) -> Settlement:
    """Decides what to do after an earlier chief may have died at any point.

    Args:
        claims: one for each task, the leader's first. The leader's step is the truth; a task that has applied the
            leader's present step is ahead, as the leader is told last, and the leader follows.
    """
    leader, others = claims[0], claims[1:]
    ahead = [c for c in others if c.step == leader.step + 1 and c.decided == leader.step]
    forget = tuple(i for i, c in enumerate(others, 1) if c.step not in (-1, leader.step) and c not in ahead)
    if not ahead:
        return Settlement(forget=forget)
    behind = tuple(i for i, c in enumerate(others, 1) if c.step == leader.step)
    return Settlement(leader.step, ahead[0].workers, (*behind, 0), forget)


def rejoined(members: frozenset[int] | None, seen: Sequence[int], total: int) -> frozenset[int] | None:
    """Returns the members after some workers were heard of again; None once none is missing."""
    if members is None:
        return None
    now = members | frozenset(seen)
    return None if len(now) >= total else now
