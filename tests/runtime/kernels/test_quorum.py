"""The quorum: who counts, who waits, who decides, and what is left when somebody dies."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.errors import (
    AbortedError,
    CancelledError,
    FailedPreconditionError,
    OutOfRangeError,
    PermissionDeniedError,
)
from runtime.kernels.quorum import (
    UNKNOWN,
    GradientSelection,
    LeadingQuorum,
    LedQuorum,
    LoneQuorum,
    QuorumResource,
    QuorumRules,
)
from runtime.state.cancellation import Cancellation

NOTHING = (-2, 0)


class Variables:
    """A target: a sum of all applied means, and a step."""

    def __init__(self) -> None:
        self.generation = 0
        self.at = 0
        self.applied: list[float] = []

    def step(self) -> int:
        return self.at

    def apply(
        self, inputs: Sequence[Any], key: tuple[int, int], expected: Mapping[str, int] | None
    ) -> None:
        self.applied.append(float(inputs[0][0]))
        self.at += 1


class NotedCancellation(Cancellation):
    """A cancellation that notes a wait of its call."""

    waits = False

    def wait_for(self, *args: Any, **options: Any) -> bool:
        self.waits = True
        return super().wait_for(*args, **options)


class Push(threading.Thread):
    """A worker's push, on its own thread."""

    def __init__(
        self,
        quorum: QuorumResource,
        variables: Variables,
        worker: int,
        stamp: int,
        value: float,
        client: int = 0,
    ) -> None:
        super().__init__(daemon=True)
        self.cancellation = NotedCancellation()
        self.outcome: Any = None
        self._call = lambda: quorum.push(
            worker, stamp, [np.array([value], np.float32)], variables, self.cancellation, client
        )
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._call()
        except Exception as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        return self.outcome


def _wait(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come to that")


def _here(quorum: QuorumResource, count: int) -> None:
    _wait(lambda: quorum.waiting == count)


def test_mean_of_workers_is_applied_once() -> None:
    """The mean over distinct workers is applied once, with the latest gradient of each."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 2)), Variables()
    first = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    # the same worker, started again: it takes the place of the first
    again = Push(quorum, variables, 0, 0, 3.0)
    assert first.result() == (0, False)
    _here(quorum, 1)
    other = Push(quorum, variables, 1, 0, 5.0)
    assert other.result() == (1, True)
    assert again.result() == (1, True)
    assert variables.applied == [4.0]
    assert quorum.counts.repeated == 1


def test_stale_gradients_are_dropped() -> None:
    """A gradient of another step is counted as dropped and answered at once."""
    quorum, variables = LoneQuorum("q", QuorumRules(1, 3)), Variables()
    assert Push(quorum, variables, 0, 0, 1.0).result() == (1, True)
    assert Push(quorum, variables, 1, 0, 9.0).result() == (1, False)
    # of variables that were restored meanwhile
    assert Push(quorum, variables, 2, 7, 9.0).result() == (1, False)
    assert variables.applied == [1.0]
    assert quorum.counts.dropped == 2


def test_worker_may_push_several_gradients() -> None:
    """A worker may push several gradients for one aggregate."""
    quorum, variables = LoneQuorum("q", QuorumRules(4, 2)), Variables()
    assert Push(quorum, variables, 0, 0, 1.0).result() == (0, True)
    waiting = Push(quorum, variables, 0, 0, 2.0)
    _here(quorum, 2)
    assert Push(quorum, variables, 1, 0, 3.0).result() == (0, True)
    assert Push(quorum, variables, 1, 0, 6.0).result() == (1, True)
    assert waiting.result() == (1, True)
    assert variables.applied == [3.0]


def test_gone_worker_takes_its_gradients() -> None:
    """A worker whose caller hangs up takes its gradients along."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 2)), Variables()
    dead = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    dead.cancellation.set("the caller hung up")
    assert isinstance(dead.result(), CancelledError)
    other = Push(quorum, variables, 1, 0, 3.0)
    _here(quorum, 1)
    assert Push(quorum, variables, 0, 0, 5.0).result() == (1, True)
    assert other.result() == (1, True)
    assert variables.applied == [4.0]


def test_timeout_leaves_late_workers_out() -> None:
    """After its timeout a step goes on, and a late worker is waited for only when it is back."""
    quorum, variables = LoneQuorum("q", QuorumRules(3, 3, timeout_secs=60.0)), Variables()
    pair = [Push(quorum, variables, 0, 0, 0.0)]
    _here(quorum, 1)
    quorum._gradients.since -= 100.0  # as if it had waited so long
    pair.append(Push(quorum, variables, 1, 0, 1.0))
    assert [p.result() for p in pair] == [(1, True)] * 2
    assert variables.applied == [0.5]
    slow = LoneQuorum("q", QuorumRules(3, 3, timeout_secs=60.0))
    slow._roster.keep_only((0, 1))
    slow._step = variables.at = 1
    pair = [Push(slow, variables, w, 1, float(w)) for w in (0, 1)]
    assert [p.result() for p in pair] == [(2, True)] * 2
    # late, but back: waited for from now on
    assert Push(slow, variables, 2, 0, 9.0).result() == (2, False)
    pair = [Push(slow, variables, w, 2, float(w)) for w in (0, 1)]
    _here(slow, 2)
    assert variables.at == 2
    assert Push(slow, variables, 2, 2, 5.0).result() == (3, True)


def test_restore_drops_earlier_gradients() -> None:
    """A restore aborts the pushes of the values before it."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 2)), Variables()
    old = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    variables.generation = 1
    new = Push(quorum, variables, 1, 0, 3.0)
    assert isinstance(old.result(), AbortedError)
    assert Push(quorum, variables, 0, 0, 5.0).result() == (1, True)
    assert new.result() == (1, True)
    assert variables.applied == [4.0]


# -- several tasks -------------------------------------------------------------------------------------------------


def leads() -> None:
    """The caller leads."""


def _several(kind: type[LedQuorum] = LeadingQuorum) -> tuple[LedQuorum, Variables]:
    return kind("q", QuorumRules(2, 3)), Variables()


def test_chief_orders_each_application() -> None:
    """A task with a chief applies an aggregate on the chief's order, and once."""
    quorum, variables = _several()
    session, step, last = quorum.claim(leads, variables.step, 0, 2)
    assert (step, last) == (0, None)
    pushes = {w: Push(quorum, variables, w, 0, float(w)) for w in (2, 0, 1)}
    _here(quorum, 3)
    found = quorum.gather(session, leads, 0, NOTHING, Cancellation(), 0.0)
    assert sorted(found.workers) == [0, 1, 2]
    assert quorum.commit(session, leads, 0, GradientSelection(0, (0, 2)), 2) == 1
    # told twice, applied once
    assert quorum.commit(session, leads, 0, GradientSelection(0, (0, 2)), 2) == 1
    assert {w: p.result() for w, p in pushes.items()} == {0: (1, True), 2: (1, True), 1: (1, False)}
    assert variables.applied == [1.0]
    with pytest.raises(FailedPreconditionError, match="at step 1"):
        quorum.commit(session, leads, 0, GradientSelection(0, (0, 1)), 2)


def test_promised_gradients_outlive_their_worker() -> None:
    """Gradients that a chief was promised stay when their worker hangs up or comes again."""
    quorum, variables = _several()
    session, _, _ = quorum.claim(leads, variables.step, 0, 2)
    value = np.array([1.0], np.float32)
    cancellation = Cancellation()
    outcome: list[Any] = []

    def push() -> None:
        try:
            quorum.push(0, 0, [value], variables, cancellation)
        except CancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    _here(quorum, 1)
    quorum.gather(session, leads, 0, NOTHING, Cancellation(), 0.0)
    cancellation.set("the caller hung up")
    thread.join(60)
    assert len(outcome) == 1
    value[0] = 100.0  # the caller's memory is used again
    again = Push(quorum, variables, 0, 0, 50.0)  # its next life: the promised gradients stay
    other = Push(quorum, variables, 1, 0, 3.0)
    _here(quorum, 2)
    quorum.commit(session, leads, 0, GradientSelection(0, (0, 1)), 2)
    assert other.result() == again.result() == (1, True)
    assert variables.applied == [2.0]


def test_orders_of_earlier_session_are_refused() -> None:
    """Orders of an earlier session of the chief are refused, waiting ones too."""
    quorum, variables = _several()
    old, _, _ = quorum.claim(leads, variables.step, 0, 2)
    waiting: list[Any] = []

    def gather() -> None:
        try:
            quorum.gather(old, leads, 0, (0, 0), Cancellation())
        except FailedPreconditionError as error:
            waiting.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    quorum.claim(leads, variables.step, 0, 2)
    thread.join(60)
    assert len(waiting) == 1
    with pytest.raises(FailedPreconditionError, match="claimed again"):
        quorum.commit(old, leads, 0, GradientSelection(0, ()), 2)


def test_deposed_chief_is_promised_nothing() -> None:
    """A chief that was deposed while it waited is promised no gradient."""
    quorum, variables = _several()
    session, _, _ = quorum.claim(leads, variables.step, 0, 2)

    def deposed() -> None:
        raise PermissionDeniedError("another one has taken the lead")

    push = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    for order in (
        lambda: quorum.claim(deposed, variables.step, 0, 1),
        lambda: quorum.gather(session, deposed, 0, NOTHING, Cancellation(), 0.0),
        lambda: quorum.commit(session, deposed, 0, GradientSelection(0, (0,)), 2),
    ):
        with pytest.raises(PermissionDeniedError, match="taken the lead"):
            order()
    push.cancellation.set("the caller hung up")
    assert isinstance(push.result(), CancelledError)
    assert not quorum.waiting and variables.applied == []  # gradients with a promise would stay
    push = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    assert (
        quorum.commit(session, leads, 0, GradientSelection(0, (0,)), 2) == 1
    )  # its session is as it was
    assert push.result() == (1, True)


def test_restarted_task_must_be_claimed_again() -> None:
    """A task that has restarted or been restored takes orders only after another claim."""
    quorum, variables = _several()
    with pytest.raises(FailedPreconditionError):
        quorum.gather(1, leads, 0, NOTHING, Cancellation(), 0.0)
    session, _, _ = quorum.claim(leads, variables.step, 0, 2)
    with pytest.raises(FailedPreconditionError, match="restored"):
        quorum.gather(session, leads, 1, NOTHING, Cancellation(), 0.0)
    quorum.claim(leads, variables.step, 0, 2)
    with pytest.raises(FailedPreconditionError, match="claimed again"):
        quorum.gather(session, leads, 0, NOTHING, Cancellation(), 0.0)


def test_task_without_counter_follows_stamps() -> None:
    """A task without the global step takes its step from the stamps of gradients."""
    quorum, variables = _several(LedQuorum)
    session, step, _ = quorum.claim(leads, variables.step, 0, 2)
    assert step == UNKNOWN
    early = Push(quorum, variables, 0, 40, 1.0)
    _here(quorum, 1)
    # the leader is at 41: nothing of 40 can be applied any more
    late = Push(quorum, variables, 1, 41, 3.0)
    assert early.result() == (41, False)
    assert Push(quorum, variables, 2, 40, 1.0).result() == (41, False)
    quorum.commit(session, leads, 0, GradientSelection(41, (1,)), 2)
    assert late.result() == (42, True)


def test_cleared_container_ends_waits() -> None:
    """A push that waits ends when its container is cleared."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 2)), Variables()
    push = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    quorum.clear()
    assert isinstance(push.result(), CancelledError)


def test_status_names_missing_workers() -> None:
    """The status names the workers whose gradients are in and those that are missing."""
    quorum, variables = LoneQuorum("/job:ps/task:0", QuorumRules(3, 3)), Variables()
    assert quorum.status() == ""
    push = Push(quorum, variables, 1, 0, 1.0)
    _here(quorum, 1)
    assert "gradients of workers [1] are in" in quorum.status()
    assert "missing: [0, 2]" in quorum.status()
    quorum.clear()
    assert isinstance(push.result(), CancelledError)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_gradient_is_applied_or_dropped(
    needed: int, total: int, rounds: int, chance: Any
) -> None:
    """Every gradient is applied once or dropped, however fast the workers push."""
    quorum, variables = LoneQuorum("q", QuorumRules(needed, total)), Variables()
    over = Cancellation()
    accepted: list[int] = []
    order = [chance.random() for _ in range(total)]

    def work(worker: int) -> None:
        threading.Event().wait(order[worker] / 1000)
        step = 0
        while step < rounds:
            try:
                after, counted = quorum.push(
                    worker, step, [np.array([1.0], np.float32)], variables, over
                )
                quorum.validate()
            except CancelledError:
                return
            if counted:
                accepted.append(step)
            step = after
        over.set("the goal is reached")

    threads = [threading.Thread(target=work, args=(w,)) for w in range(total)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert variables.at >= rounds
    assert variables.applied == [1.0] * variables.at
    assert quorum.counts.applied == variables.at
    assert quorum.counts.accepted == needed * variables.at
    by_step = [accepted.count(s) for s in range(rounds)]
    assert all(needed - total * -(-needed // total) <= n - needed <= 0 for n in by_step)


LED_TURNS = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just("hang up"), st.integers(0, 2)),
    st.tuples(st.just("retire"), st.integers(0, 2)),
    st.tuples(
        st.sampled_from(["claim", "gather", "commit", "commit again", "restore", "finish", "begin"])
    ),
)


@pytest.mark.parametrize("kind", [LeadingQuorum, LedQuorum])
@pytest.mark.parametrize("elastic", [False, True])
@example(turns=[("claim",), ("push", 0, 0), ("gather",), ("restore",), ("push", 1, 0), ("commit",)])
@given(turns=st.lists(LED_TURNS, max_size=20))
def test_led_quorum_keeps_its_promises(
    kind: type[LedQuorum], elastic: bool, turns: list[Any]
) -> None:
    """The chief finds each gradient that it was promised, and each decision is applied once."""
    quorum, variables = kind("q", QuorumRules(2, 3, elastic=elastic)), Variables()
    session, told, decision = 0, None, None
    pushes: list[Push] = []
    for what, *of in turns:
        waiting = [p for p in pushes if p.is_alive()]
        if what == "push":
            value = 1.0 + len(pushes)
            push = Push(quorum, variables, of[0], max(0, variables.at - of[1]), value)
            pushes.append(push)
            _wait(lambda push=push: push.cancellation.waits or not push.is_alive())
        elif what == "hang up" and len(waiting) > of[0]:
            waiting[of[0]].cancellation.set("the caller hung up")
            waiting[of[0]].result()
        elif what == "retire":
            quorum.retire(0, of[0])
        elif what == "restore":
            variables.generation, variables.at, decision = variables.generation + 1, 0, None
        elif what in ("finish", "begin"):
            quorum.set_finished(what == "finish")
        elif what == "claim":
            session, _, _ = quorum.claim(leads, variables.step, variables.generation, 2)
            told = None
        elif what == "gather":
            try:
                told = quorum.gather(
                    session, leads, variables.generation, NOTHING, Cancellation(), 0.0
                )
            except FailedPreconditionError:
                told = None
        elif what == "commit" and told is not None and told.workers:
            decision = GradientSelection(told.step, told.workers[:2])
            applied = len(variables.applied)
            try:
                assert (
                    quorum.commit(session, leads, variables.generation, decision, 2)
                    == told.step + 1
                )
                assert len(variables.applied) == applied + 1
            except FailedPreconditionError:
                assert len(variables.applied) == applied
                decision = None
            told = None
        elif what == "commit again" and decision is not None:
            applied = len(variables.applied)
            try:
                quorum.commit(session, leads, variables.generation, decision, 2)
            except FailedPreconditionError:
                pass
            assert len(variables.applied) == applied
        quorum.validate()
    quorum.clear()
    for push in pushes:
        push.result()
    quorum.validate()


def test_push_ends_with_too_few_workers() -> None:
    """A push ends with OutOfRangeError when the workers left are too few for an aggregate."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 3)), Variables()
    first = Push(quorum, variables, 0, 0, 1.0)
    _here(quorum, 1)
    quorum.retire(0, 1)  # it has never given any: known by its number
    first.join(0.05)
    assert first.is_alive()  # worker 2 may come
    quorum.retire(0, 2)
    assert isinstance(first.result(), OutOfRangeError)
    assert "2 gradients are needed, and of 3 workers [1, 2] are through" in str(first.outcome)
    again = Push(quorum, variables, 1, 0, 1.0)  # it trains after all
    _here(quorum, 1)
    assert Push(quorum, variables, 0, 0, 3.0).result() == again.result() == (1, True)


def test_finished_worker_is_known_by_session() -> None:
    """A worker that has finished is known by its session, whatever its number."""
    quorum, variables = LoneQuorum("q", QuorumRules(2, 2)), Variables()
    pushes = [Push(quorum, variables, worker, 0, 1.0, 70 + worker) for worker in (0, 1)]
    assert [push.result() for push in pushes] == [(1, True), (1, True)]
    waiting = Push(quorum, variables, 0, 1, 1.0, 70)
    _here(quorum, 1)
    quorum.retire(71, 5)
    assert isinstance(waiting.result(), OutOfRangeError)
