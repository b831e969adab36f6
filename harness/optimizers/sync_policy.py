"""The choice of gradients for a synchronous step over several tasks: pure functions of the tasks' reports."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskProgress:
    """The gradients of the present step that one task has.

    Attributes:
        step: present step of the task; -1 before the first.
        workers: the worker of each gradient, in the order in which the gradients came.
    """

    step: int = -1
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ClaimReply:
    """The report of a task to a new chief.

    Attributes:
        step: present step of the task; -1 before the first.
        decided: the step of its last decision; -1 before the first.
        decision: that decision as an order has it: the bits of the norm, and the workers.
    """

    step: int
    decided: int
    decision: tuple[int, ...]


def choose(
    leader: TaskProgress,
    others: Sequence[TaskProgress],
    wanted: int,
    time_is_up: bool,
) -> tuple[int, ...]:
    """Chooses the workers whose gradients are applied at the leader's step: all tasks have their gradients.

    Returns the worker of each gradient to apply; nothing if the chief waits.

        >>> reports = TaskProgress(7, (0, 2, 1)), TaskProgress(7, (2, 0))
        >>> choose(reports[0], reports[1:], wanted=2, time_is_up=False)
        (0, 2)

    Args:
        leader: report of the task that holds the step.
        others: reports of the other tasks.
        wanted: gradients in the aggregate.
        time_is_up: True to choose fewer gradients than wanted.
    """
    # This case is checked before anything is counted, because each of many tasks reports in each
    # step.
    if not time_is_up and any(
        r.step != leader.step or len(r.workers) < wanted for r in (leader, *others)
    ):
        return ()
    left = Counter(leader.workers)
    for report in others:
        left &= Counter(report.workers if report.step == leader.step else ())
    # A worker may have pushed several gradients for one step, so the gradients are counted down.
    everywhere = []
    for worker in leader.workers:
        if left[worker]:
            left[worker] -= 1
            everywhere.append(worker)
    return tuple(everywhere[:wanted]) if time_is_up or len(everywhere) >= wanted else ()


@dataclass(frozen=True)
class SettlementPlan:
    """The orders by which a new chief makes the tasks agree.

    Attributes:
        step: the step of an aggregate that some tasks have applied and others have not.
        decision: the decision on that aggregate.
        behind: indices of the tasks that must apply the aggregate, the leader (0) last.
        forget: indices of the tasks whose gradients must be dropped, as their step is not the
            leader's.
    """

    step: int = -1
    decision: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()


def settle(claims: Sequence[ClaimReply]) -> SettlementPlan:
    """Decides how tasks come to one step after an earlier chief may have died at any point.

    The chief commits at the leader last. So a task that has applied the leader's present step is
    one step ahead, and the leader follows. A task at any other step was initialised again, or
    belongs to an older chief.

    Args:
        claims: the replies of the tasks, the leader's first.
    """
    leader, others = claims[0], claims[1:]
    ahead = [c for c in others if c.step == leader.step + 1 and c.decided == leader.step]
    forget = tuple(
        i for i, c in enumerate(others, 1) if c.step not in (-1, leader.step) and c not in ahead
    )
    if not ahead:
        return SettlementPlan(forget=forget)
    behind = tuple(i for i, c in enumerate(others, 1) if c.step == leader.step)
    assert not {0, *behind}.intersection(forget), "an order to apply is not one to forget"
    return SettlementPlan(leader.step, ahead[0].decision, (*behind, 0), forget)


def rejoined(
    members: frozenset[int] | None, seen: Sequence[int], total: int
) -> frozenset[int] | None:
    """Returns the members after workers have pushed again; None as soon as all workers are members."""
    if members is None:
        return None
    now = members | frozenset(seen)
    return None if len(now) >= total else now
