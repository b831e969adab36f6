"""A quorum whose workers come and go: who is waited for, and that no gradient is lost when that changes."""

import threading
from typing import Any

import numpy as np
import pytest

from runtime.graph.deferred_update import ALL_WORKERS
from runtime.kernels.quorum import (
    GradientSelection,
    LeadingQuorum,
    LoneQuorum,
    QuorumResource,
    QuorumRules,
)
from runtime.state.cancellation import Cancellation
from tests.runtime.kernels.test_quorum import Push, Variables, _here

pytestmark = pytest.mark.unit


class Members:
    """A quorum of all who are there, and who of them lives; the session of worker w is w + 1."""

    def __init__(self, kind: type[QuorumResource] = LoneQuorum, **rules: Any) -> None:
        self.dead: set[int] = set()
        given = {"needed": ALL_WORKERS, "total": ALL_WORKERS, "elastic": True, **rules}
        self.quorum = kind("q", QuorumRules(**given), lambda session: session - 1 not in self.dead)
        self.variables = Variables()

    def push(self, worker: int, stamp: int, value: float) -> Push:
        """A push of one number."""
        return Push(self.quorum, self.variables, worker, stamp, value, worker + 1)

    def step(self, *workers: int) -> None:
        """One step of so many workers; the values are their numbers."""
        stamp = self.variables.at
        pushes = [self.push(worker, stamp, float(worker)) for worker in workers]
        assert [push.result() for push in pushes] == [(stamp + 1, True)] * len(workers)


def _meet(members: Members, *workers: int) -> None:
    """Workers come, by a push that is of no step."""
    for worker in workers:
        assert members.push(worker, members.variables.at + 100, 0.0).result()[1] is False


def test_aggregate_has_all_present_gradients() -> None:
    """An elastic aggregate has the gradients of all workers that are there."""
    members = Members()
    members.step(0)
    _meet(members, 1, 2)
    members.step(0, 1, 2)
    assert members.variables.applied == [0.0, 1.0]
    assert members.quorum.counts.accepted == 4


def test_newcomer_joins_the_step() -> None:
    """A worker that comes in the middle of a step is part of that step."""
    members = Members()
    _meet(members, 0, 1)
    first = members.push(0, 0, 1.0)
    _here(members.quorum, 1)
    new = members.push(5, 0, 2.0)
    _here(members.quorum, 2)
    assert members.push(1, 0, 6.0).result() == first.result() == new.result() == (1, True)
    assert members.variables.applied == [3.0]


@pytest.mark.parametrize("how", ["retire", "dies", "its session ends"])
def test_leaver_is_not_waited_for(how: str) -> None:
    """A worker that leaves in the middle of a step is not waited for until it comes back."""
    members = Members()
    _meet(members, 0, 1, 2)
    pushes = [members.push(worker, 0, float(worker)) for worker in (0, 1)]
    _here(members.quorum, 2)
    assert not any(push.outcome for push in pushes)
    if how == "retire":
        members.quorum.retire(3, 2)
    elif how == "dies":
        members.dead.add(2)
    else:
        members.quorum.end_client(3)
    assert [push.result() for push in pushes] == [(1, True)] * 2
    assert members.variables.applied == [0.5]
    members.step(0, 1)
    members.dead.clear()
    _meet(members, 2)  # it has come back
    members.step(0, 1, 2)
    assert members.quorum.counts.accepted == 7


def test_dying_worker_takes_its_gradients() -> None:
    """A worker that dies while its gradients wait takes them along."""
    members = Members()
    _meet(members, 0, 1)
    dead = members.push(1, 0, 5.0)
    _here(members.quorum, 1)
    members.dead.add(1)
    dead.cancellation.set("the caller hung up")
    dead.result()
    members.step(0)
    assert members.variables.applied == [0.0]


def test_marks_of_several_workers_are_joined() -> None:
    """The marks of several workers are joined by a bitwise or."""
    members = Members()
    applied: list[list[int]] = []

    class Target(Variables):
        def apply(self, inputs: Any, key: Any, expected: Any) -> None:
            applied.append([int(number) for number in inputs[1]])
            super().apply(inputs, key, expected)

    target = Target()
    _meet(members, 0, 1)

    def push(worker: int, marks: list[int]) -> None:
        arrays = [np.zeros(1, np.float32), np.array(marks, np.int32)]
        assert members.quorum.push(worker, 0, arrays, target, Cancellation(), worker + 1) == (
            1,
            True,
        )

    threads = [
        threading.Thread(target=push, args=given) for given in ((0, [1, 0, 4]), (1, [2, 0, 0]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert applied == [[3, 0, 4]]


def test_fixed_number_is_the_most() -> None:
    """A fixed number of gradients bounds an elastic aggregate."""
    members = Members(needed=2)
    members.step(0)
    _meet(members, 1, 2)
    pushes = [members.push(worker, 1, 1.0) for worker in (0, 1)]
    assert [push.result() for push in pushes] == [(2, True)] * 2
    assert members.push(2, 1, 1.0).result() == (2, False)


def test_chief_hears_of_changed_workers() -> None:
    """A chief hears when the workers change, so that fewer gradients may be enough."""
    members = Members(LeadingQuorum)
    quorum, variables = members.quorum, members.variables
    assert isinstance(quorum, LeadingQuorum)
    session, step, _ = quorum.claim(lambda: None, variables.step, 0, ALL_WORKERS)
    pushes = [members.push(worker, 0, float(worker)) for worker in (0, 1)]
    _here(quorum, 2)
    told = quorum.gather(session, lambda: None, 0, (-2, 0), Cancellation(), 60)
    assert sorted(told.workers) == [0, 1] and told.seen == (0, 1)
    _meet(members, 2)
    again: list[Any] = []
    known = (told.step, len(told.workers))
    arguments = (session, lambda: None, 0, known, Cancellation(), 60, told.changes)
    chief = threading.Thread(target=lambda: again.append(quorum.gather(*arguments)))
    chief.start()
    members.dead.add(2)
    chief.join(60)
    assert again[0].seen == (0, 1) and again[0].changes == told.changes + 2
    assert quorum.commit(session, lambda: None, 0, GradientSelection(0, (0, 1)), ALL_WORKERS) == 1
    assert [push.result() for push in pushes] == [(1, True)] * 2


def test_commit_without_worker_reaches_tasks() -> None:
    """A task stops waiting for a worker that the chief's commit leaves out."""
    members = Members(LeadingQuorum)
    quorum, variables = members.quorum, members.variables
    assert isinstance(quorum, LeadingQuorum)
    session, _, _ = quorum.claim(lambda: None, variables.step, 0, ALL_WORKERS)
    _meet(members, 0, 1)
    push = members.push(0, 0, 1.0)
    _here(quorum, 1)
    quorum.gather(session, lambda: None, 0, (-2, 0), Cancellation(), 0)
    assert quorum.commit(session, lambda: None, 0, GradientSelection(0, (0,)), 0) == 1
    assert push.result() == (1, True)
    push = members.push(0, 1, 1.0)
    _here(quorum, 1)
    told = quorum.gather(session, lambda: None, 0, (1, 0), Cancellation(), 60)
    assert told.workers == told.seen == (0,)
    quorum.clear()
    push.result()
