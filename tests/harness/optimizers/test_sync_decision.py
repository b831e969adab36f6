"""Choosing an aggregate over several tasks, and making the tasks agree after a chief's death."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from harness.optimizers.sync_policy import ClaimReply, TaskProgress, choose, rejoined, settle

WORKERS = st.lists(st.integers(0, 4), max_size=6).map(tuple)
REPORTS = st.builds(TaskProgress, st.integers(3, 5), WORKERS)


@given(REPORTS, st.lists(REPORTS, min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_chosen_gradients_are_on_all_tasks(
    leader: TaskProgress, others: list[TaskProgress], needed: int, up: bool
) -> None:
    """Only gradients that all tasks hold are chosen, and only the needed number of them."""
    chosen = Counter(choose(leader, others, needed, up))
    for report in [leader, *others]:
        assert not chosen or report.step == leader.step
        assert chosen <= Counter(report.workers)
    assert chosen.total() in (0, needed) or up and chosen.total() < needed


def test_first_gradients_are_chosen() -> None:
    """The gradients that came first to the leader are chosen."""
    assert choose(TaskProgress(3, (2, 0, 1)), [TaskProgress(3, (0, 1, 2))], 2, False) == (2, 0)


def test_returned_worker_is_waited_for_again() -> None:
    """A worker that is back is waited for again."""
    assert rejoined(None, [1], 3) is None
    assert rejoined(frozenset({0}), [1], 3) == {0, 1}
    assert rejoined(frozenset({0, 1}), [2], 3) is None


class Task:
    """A task as the chief sees it: it applies what it is told, if that is its step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.log: dict[int, tuple[int, ...]] = {}

    def commit(self, step: int, workers: tuple[int, ...]) -> None:
        if self.log.get(step) == workers and self.step == step + 1:
            return
        assert self.step == step
        self.log[step] = workers
        self.step += 1

    def claimed(self) -> ClaimReply:
        return ClaimReply(
            self.step, self.step - 1 if self.log else -1, self.log.get(self.step - 1, ())
        )


@given(st.integers(1, 4), st.lists(st.tuples(WORKERS, st.integers(0, 5)), max_size=6))
def test_chief_may_die_between_orders(
    others: int, rounds: list[tuple[tuple[int, ...], int]]
) -> None:
    """After a chief's death between any two orders the tasks agree on one history of aggregates."""
    tasks = [Task(0) for _ in range(others + 1)]
    for workers, orders in rounds:
        plan = settle([t.claimed() for t in tasks])
        assert plan.forget == ()
        for i in plan.behind:
            tasks[i].commit(plan.step, plan.decision)
        assert len({t.step for t in tasks}) == 1
        for task in [*tasks[1:], tasks[0]][:orders]:
            task.commit(task.step, workers)
    plan = settle([t.claimed() for t in tasks])
    for i in plan.behind:
        tasks[i].commit(plan.step, plan.decision)
    assert len({t.step for t in tasks}) == 1
    assert all(t.log == tasks[0].log for t in tasks)


def test_claims_unlike_the_leader_are_forgotten() -> None:
    """A claim that does not fit the leader's step is forgotten."""
    after_a_restore = [
        ClaimReply(10, -1, ()),
        ClaimReply(50, 49, (0, 1)),
        ClaimReply(-1, -1, ()),
        ClaimReply(10, 9, (1, 2)),
    ]
    assert settle(after_a_restore).forget == (1,)
    assert settle(after_a_restore).behind == ()
    one_step_by_chance = [ClaimReply(10, -1, ()), ClaimReply(11, 7, (0, 1))]
    assert settle(one_step_by_chance).forget == (1,)
