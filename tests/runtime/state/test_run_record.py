"""The run record of a task by itself: what each order does, what is refused, and what ends a wait."""

import json
import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import (
    AbortedError,
    CancelledError,
    InvalidArgumentError,
    OpError,
    PermissionDeniedError,
    TaskLeftError,
    UnavailableError,
)
from runtime.limits import Limits
from runtime.proto.run_record_pb2 import RunOrder, RunReply
from runtime.state.cancellation import Cancellation
from runtime.state.leadership import EPOCHS_AT_ONCE, MAX_EPOCH, MAX_OWNER, NOBODY, Leadership
from runtime.state.participants import TaskEnvironment
from runtime.state.run_record import MOST_STATE_BYTES, RunRecord, wait_secs
from tests.kit.waits import count_waiters, until

TASK, CHIEF, OTHER = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
KINDS = [field.name for field in RunOrder.DESCRIPTOR.oneofs_by_name["order"].fields]
LEADERS = ["load", "open", "finish"]


class Kept:
    """A run record of variables that have values, or not."""

    def __init__(self, has_values: bool = False, **around: Any) -> None:
        self.has_values = has_values
        self.changed = threading.Condition()
        self.record = RunRecord(self.changed, lambda: self.has_values, TaskEnvironment(**around))

    def order(
        self, sender: str = CHIEF, epoch: int = 1, cancelled: Cancellation | None = None, **of: Any
    ) -> RunReply:
        """An order; each sender has the number of its task, and 7."""
        leadership = Leadership(epoch, 7 + int(sender[-1])) if epoch else NOBODY
        order = RunOrder(
            sender=sender, address=f"{sender[-1]}:1", leadership=leadership.to_proto(), **of
        )
        try:
            return self.record.obey(order, TASK, cancelled or Cancellation())
        finally:
            self.record.validate()

    def in_thread(
        self, cancelled: Cancellation | None = None, **of: Any
    ) -> tuple[threading.Thread, list[Any]]:
        """An order on a thread of its own that has begun to wait, and what becomes of it."""
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(self.order(cancelled=cancelled, **of))
            except OpError as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: count_waiters(self.changed) or results, "a wait for the order")
        assert not results, results
        return thread, results


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {kind: getattr(RunOrder, "".join(part.title() for part in kind.split("_")))(**fields)}


def test_each_start_joins_once() -> None:
    """A start of a task is reported once: no repeated order and no recovery."""
    starts: list[str] = []
    kept = Kept(when_joined=starts.append)
    joins = [(OTHER, 1, False), (OTHER, 1, False), (OTHER, 2, True), (OTHER, 3, False)]
    for sender, session, again in [*joins, (CHIEF, 4, True), (CHIEF, 5, True)]:
        kept.order(sender, **of("join", session=session, again=again))
    assert starts == [OTHER, OTHER, CHIEF]
    neighbour = Kept(when_joined=starts.append, own=lambda session: True)
    neighbour.order(OTHER, **of("join", session=6))
    assert len(starts) == 3, "a session of this process needs no line"


def test_run_goes_from_begin_to_end() -> None:
    """The record follows a run from its claim to its end and into the next run."""
    kept = Kept()
    found = kept.order(**of("inspect"))
    assert found == RunReply(phase=RunReply.NEW)
    found = kept.order(**of("claim"))
    assert found.leadership == Leadership(1, 7).to_proto()
    assert (found.leader_name, found.leader_address) == (CHIEF, "0:1")
    assert (kept.order(**of("load")).phase, kept.record.generation) == (RunReply.LOADING, 0)
    found = kept.order(**of("open", logdir="/runs/1"))
    assert (found.phase, found.logdir) == (RunReply.READY, "/runs/1")
    assert kept.order(**of("open")).logdir == "/runs/1"  # nothing is told: nothing is forgotten
    kept.order(**of("join", session=1))
    found = kept.order(OTHER, 0, **of("join", session=2))
    assert (found.joined, found.addresses) == ([CHIEF, OTHER], {CHIEF: "0:1", OTHER: "1:1"})
    assert kept.order(OTHER, 0, **of("rest", session=2)) == found
    found = kept.order(
        **of(
            "finish", silence_secs=9.0, counter_name="step", saved_step=0, took_part=[OTHER, "gone"]
        )
    )
    assert (found.phase, found.saved_step, found.done) == (RunReply.FINISHED, 0, ["gone"])
    assert kept.record.saved == (("", "step"), 0)
    assert not kept.order(**of("done", leave=False)).done == [CHIEF]
    found = kept.order(OTHER, 0, **of("done", leave=True))
    assert found.done == ["gone", CHIEF, OTHER] and kept.record._tasks.leave
    found = kept.order(**of("open"))  # another run with the same variables
    assert (found.phase, found.done, found.HasField("saved_step")) == (RunReply.READY, [], False)


def test_resumed_run_has_its_comers() -> None:
    """A run that is resumed after its end has only the workers that come to it."""
    kept = Kept(has_values=True)
    kept.order(**of("claim"))
    kept.order(**of("open"))
    for sender in (CHIEF, OTHER, "/job:worker/task:2"):
        kept.order(sender, epoch=int(sender == CHIEF), **of("join", session=1 + int(sender[-1])))
    kept.order(OTHER, 0, **of("done", session=2))
    kept.order(**of("finish", silence_secs=60))
    kept.order(**of("done", session=1))
    found = kept.order(**of("open"))
    # it was given up, and may train on
    assert (found.joined, found.done) == (["/job:worker/task:2"], [])
    assert kept.order(**of("join", session=4)).joined == ["/job:worker/task:2", CHIEF]


def test_replaced_values_begin_a_generation() -> None:
    """Each load of values begins a generation."""
    kept = Kept(has_values=True)
    kept.order(**of("claim"))
    assert [kept.order(**of("load")).generation for _ in range(2)] == [1, 2]


def test_task_leaves_when_all_done() -> None:
    """A task may leave when all expected tasks are done."""
    left = threading.Event()
    kept = Kept(expected=frozenset({CHIEF, OTHER}), when_all_done=left.set)
    kept.order(**of("done", leave=True))
    assert not left.is_set()
    kept.order(OTHER, 0, **of("done"))
    assert left.is_set()


@pytest.mark.parametrize("kind", LEADERS)
def test_only_the_leader_may_order(kind: str) -> None:
    """A leader's order is refused from any other sender or epoch and changes nothing."""
    kept = Kept()
    with pytest.raises(AbortedError, match="restarted since a chief took the lead"):
        kept.order(**of(kind))
    kept.order(**of("claim"))
    kept.order(OTHER, 2, **of("claim"))
    before = kept.order(**of("inspect"))
    for epoch in (1, 2, 3):
        with pytest.raises(
            PermissionDeniedError,
            match=f"refused to {kind} for {CHIEF}: {OTHER} has taken the lead .*give is_chief=me.is_chief",
        ):
            kept.order(CHIEF, epoch, **of(kind))
    with pytest.raises(
        AbortedError, match=f"refused to {kind} for {OTHER}: the order is of epoch 1"
    ):
        kept.order(OTHER, 1, **of(kind))
    assert kept.order(**of("inspect")) == before


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_order_counts_once(kind: str) -> None:
    """An order that is given twice has the effect and answer of one."""
    once, twice = Kept(), Kept()
    for kept in (once, twice):
        kept.order(**of("claim"))
        kept.order(**of("join"))
    for _ in range(2):
        again = twice.order(**of(kind))
    assert again == once.order(**of(kind))


@pytest.mark.parametrize(
    "leadership", [NOBODY, Leadership(1, 0), Leadership(0, 7), Leadership(1, MAX_OWNER)]
)
def test_leader_has_epoch_and_number(leadership: Leadership) -> None:
    """A claim without an epoch and a number within their ranges is refused."""
    kept = Kept()
    with pytest.raises(InvalidArgumentError, match="an epoch and a number"):
        kept.record.obey(
            RunOrder(leadership=leadership.to_proto(), **of("claim")), TASK, Cancellation()
        )
    assert kept.record.leader.leadership == NOBODY


def test_later_epoch_wins_equal_keeps_first() -> None:
    """Of two claims the later epoch counts, and of equal epochs the first claim."""
    kept = Kept()
    for sender, epoch, obeyed in (
        (CHIEF, 5, (5, 7)),
        (OTHER, 5, (5, 7)),
        (OTHER, 4, (5, 7)),
        (OTHER, 6, (6, 8)),
    ):
        found = kept.order(sender, epoch, **of("claim"))
        assert (found.leadership.epoch, found.leadership.owner) == obeyed
        assert found.leader_name == (OTHER if epoch == 6 else CHIEF)


@pytest.mark.parametrize("epoch", [EPOCHS_AT_ONCE + 1, MAX_EPOCH - 1, MAX_EPOCH, 2**64 - 1])
def test_epochs_cannot_be_used_up(epoch: int) -> None:
    """A claim that jumps too many epochs is refused, so that epochs last."""
    kept = Kept()
    kept.order(**of("claim"))
    with pytest.raises(InvalidArgumentError, match=f"epoch {epoch}, where the task obeys epoch 1"):
        kept.order(OTHER, epoch, **of("claim"))
    assert kept.record.leader.leadership == Leadership(1, 7)
    kept.record.leader.leadership = Leadership(MAX_EPOCH - 2, 7)
    kept.order(OTHER, MAX_EPOCH - 1, **of("claim"))
    with pytest.raises(InvalidArgumentError, match=str(MAX_EPOCH)):
        kept.order(OTHER, MAX_EPOCH, **of("claim"))


def test_next_process_obeys_same_leader() -> None:
    """Another process of a task obeys the leader of the process before it."""
    before, after = Kept(), Kept()
    before.order(CHIEF, 5, **of("claim"))
    after.record.take_up(json.loads(json.dumps(before.record.state())))
    assert after.order(**of("inspect")).leadership == Leadership(5, 7).to_proto()
    with pytest.raises(PermissionDeniedError, match=f"{CHIEF} has taken the lead"):
        after.order(OTHER, 5, **of("load"))
    after.order(CHIEF, 5, **of("load"))


def test_empty_order_is_refused() -> None:
    """An order that orders nothing is refused."""
    with pytest.raises(InvalidArgumentError, match="orders nothing"):
        Kept().order()


UNKNOWN = b"\xf8\x7f\x01"
"""Field 2047: the number 1."""


@pytest.mark.parametrize("kind", KINDS)
def test_order_with_unknown_fields_is_refused(kind: str) -> None:
    """An order with unknown fields is refused and changes nothing."""
    kept = Kept()
    kept.order(**of("claim"))
    before = kept.order(**of("inspect"))
    known = RunOrder(sender=CHIEF, leadership=Leadership(1, 7).to_proto(), **of(kind))
    outside, inside, leadership = RunOrder(), RunOrder(), RunOrder()
    outside.MergeFromString(known.SerializeToString() + UNKNOWN)
    inside.CopyFrom(known)
    getattr(inside, kind).MergeFromString(UNKNOWN)
    leadership.CopyFrom(known)
    leadership.leadership.MergeFromString(UNKNOWN)
    for order in (outside, inside, leadership):
        with pytest.raises(
            InvalidArgumentError, match=f"to {kind} has fields that are not known here"
        ):
            kept.record.obey(order, TASK, Cancellation())
    assert kept.order(**of("inspect")) == before


def test_order_of_later_version_is_refused() -> None:
    """An order of an unknown kind is refused."""
    later = RunOrder(sender=CHIEF)
    # field 2047: an empty message, as each kind of order is one
    later.MergeFromString(b"\xfa\x7f\x00")
    with pytest.raises(InvalidArgumentError, match="not known here"):
        Kept().record.obey(later, TASK, Cancellation())


@pytest.mark.parametrize("secs", [-1.0, -math.inf, math.nan])
@pytest.mark.parametrize("order", ["finish", "wait_loaded", "wait_done", "wait_stop"])
def test_impossible_time_is_refused(order: str, secs: float) -> None:
    """An order with a negative time or none at all is refused."""
    kept = Kept()
    kept.order(**of("claim"))
    field = "silence_secs" if order == "finish" else "secs"
    with pytest.raises(InvalidArgumentError, match=f"to {order} gives"):
        kept.order(**of(order, **{field: secs}))
    assert kept.record.phase == "new"


@pytest.mark.parametrize("kind", ["wait_loaded", "wait_done", "wait_stop"])
def test_no_order_waits_for_ever(kind: str) -> None:
    """An order waits at most for the limit run_order_secs."""
    assert wait_secs(RunOrder(**of(kind, secs=math.inf))) == Limits().run_order_secs
    assert wait_secs(RunOrder(**of(kind, secs=3.0))) == 3.0
    assert wait_secs(RunOrder(**of("finish", silence_secs=9.0))) == 0.0


def waits(kept: Kept, kind: str) -> dict[str, Any]:
    """An order that has something to wait for."""
    kept.order(**of("claim"))
    kept.order(**of("load"))
    kept.order(OTHER, 0, **of("join"))
    return of(kind, secs=math.inf)


@pytest.mark.parametrize("kind", ["wait_loaded", "wait_done", "wait_stop"])
def test_wait_ends_at_its_time(kind: str) -> None:
    """A wait ends at its time with the present state."""
    kept = Kept()
    waits(kept, kind)
    assert kept.order(**of(kind, secs=0.01)).phase == RunReply.LOADING


@pytest.mark.parametrize("kind", ["wait_loaded", "wait_done", "wait_stop"])
def test_wait_ends_with_its_event(kind: str) -> None:
    """A wait ends when what it waits for comes."""
    kept = Kept()
    thread, results = kept.in_thread(**waits(kept, kind))
    kept.order(**of("open"))
    kept.order(OTHER, 0, **of("done"))
    kept.order(OTHER, 0, **of("stop", reason="enough"))
    thread.join(60)
    assert isinstance(results[0], RunReply)


@pytest.mark.parametrize("kind", ["wait_loaded", "wait_done", "wait_stop"])
def test_wait_ends_with_hung_up_caller(kind: str) -> None:
    """A wait ends with CancelledError when its caller hangs up."""
    kept, cancelled = Kept(), Cancellation()
    thread, results = kept.in_thread(cancelled, **waits(kept, kind))
    cancelled.set("the caller hung up")
    thread.join(60)
    assert isinstance(results[0], CancelledError) and "hung up" in str(results[0])


@pytest.mark.parametrize(
    "error", [TaskLeftError("it has left"), UnavailableError("its server has stopped")]
)
@pytest.mark.parametrize("kind", ["wait_loaded", "wait_done", "wait_stop"])
def test_wait_ends_with_the_task(kind: str, error: OpError) -> None:
    """A wait ends with the first reason of its task's end, and so does every later order."""
    kept = Kept()
    thread, results = kept.in_thread(**waits(kept, kind))
    kept.record.close(error)
    kept.record.close(AbortedError("too late: the first reason counts"))
    thread.join(60)
    assert type(results[0]) is type(error) and results[0].task == TASK
    with pytest.raises(type(error), match=error.message):
        kept.order(**of("inspect"))


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_gone_caller_is_ignored(kind: str) -> None:
    """An order whose caller is gone changes nothing."""
    kept, gone = Kept(has_values=True), Cancellation()
    gone.set("the caller hung up")
    kept.order(**of("claim"))
    before = kept.order(**of("inspect"))
    with pytest.raises(CancelledError, match="hung up"):
        kept.order(OTHER, cancelled=gone, **of(kind))
    assert kept.order(**of("inspect")) == before


def test_stop_holds_until_next_run() -> None:
    """An order to stop holds until a finished run is opened again."""
    kept = Kept()
    kept.order(**of("claim"))
    kept.order(**of("load"))
    kept.order(**of("open"))
    assert kept.order(**of("inspect")).stop == ""
    kept.order(OTHER, 0, **of("stop", reason="no better for 3 evaluations"))
    assert (
        kept.order(OTHER, 0, **of("stop", reason="another")).stop == "no better for 3 evaluations"
    )
    assert kept.order(OTHER, 0, **of("wait_stop", secs=60.0)).stop  # at once
    kept.order(**of("open"))  # the chief died and was started again: what was ordered holds
    assert kept.order(**of("inspect")).stop
    kept.order(**of("finish"))
    kept.order(**of("open"))
    assert kept.order(**of("inspect")).stop == ""


def test_stop_continues_from_backup() -> None:
    """An order to stop survives in a backup."""
    kept, other = Kept(), Kept()
    kept.order(OTHER, 0, **of("stop", reason="enough"))
    other.record.take_up(kept.record.state())
    assert other.order(**of("inspect")).stop == "enough"


def test_stop_comes_late_after_finish() -> None:
    """An order to stop a finished run is ignored."""
    kept = Kept()
    kept.order(**of("claim"))
    kept.order(**of("finish"))
    assert kept.order(OTHER, 0, **of("stop", reason="enough")).stop == ""


def test_done_task_leaves_its_states() -> None:
    """A task that is done leaves its states until the task joins again."""
    kept = Kept()
    kept.order(OTHER, join=RunOrder.Join(session=3))
    kept.order(OTHER, done=RunOrder.Done(session=3, states={"data": b"\xff7"}))
    assert kept.record.states_of_done() == {f"{OTHER} data": b"\xff7"}
    after = Kept()
    after.record.take_up(json.loads(json.dumps(kept.record.state())))
    assert after.record.states_of_done() == {f"{OTHER} data": b"\xff7"}
    # as an order that is given again, from a process without states
    kept.order(OTHER, done=RunOrder.Done(session=3))
    assert kept.record.states_of_done() == {f"{OTHER} data": b"\xff7"}
    kept.order(OTHER, join=RunOrder.Join(session=4))
    assert kept.record.states_of_done() == {}


def test_large_states_are_refused() -> None:
    """States above the limit of bytes are refused with the task."""
    kept = Kept()
    with pytest.raises(
        InvalidArgumentError,
        match="worker/task:1 has states of 1048577 bytes, and 1048576 are kept",
    ):
        kept.order(OTHER, done=RunOrder.Done(states={"data": bytes(MOST_STATE_BYTES + 1)}))
    assert not kept.record.states_of_done()


@pytest.mark.parametrize("orders", [("open",), ("load", "open")])
def test_another_run_forgets_the_last(orders: tuple[str, ...]) -> None:
    """A run that follows a finished one keeps nothing of its end, whether values are restored or
    kept.
    """
    kept = Kept(has_values=True)
    kept.order(**of("claim"))
    kept.order(**of("open"))
    kept.order(OTHER, 0, **of("join", session=2))
    kept.order(OTHER, 0, **of("stop", reason="enough"))
    kept.order(OTHER, 0, **of("done", session=2))
    kept.order(**of("finish", silence_secs=60))
    for order in orders:
        found = kept.order(**of(order))
    assert (found.phase, found.done, found.stop, kept.record.finished_at) == (
        RunReply.READY,
        [],
        "",
        None,
    )


TASKS = [CHIEF, OTHER, "/job:worker/task:2", "/job:worker/task:3"]


@pytest.mark.parametrize(
    ("secs", "counts"), [(20.0, True), (31.0, False)], ids=["for a while", "for long"]
)
def test_silent_session_counts_for_a_while(secs: float, counts: bool) -> None:
    """A connected session of a process that is frozen for long does not count."""
    kept = Kept(silent=lambda session: secs)
    kept.order(OTHER, **of("join", session=7))
    assert kept.record.connected() == ({OTHER: 7} if counts else {})


@pytest.mark.parametrize("own", [True, False], ids=["of this process", "of another process"])
def test_task_done_with_open_session(own: bool) -> None:
    """Of the tasks that are done, those with an open session in another process are awaited."""
    kept = Kept(own=lambda session: own, expected=frozenset({OTHER}))
    kept.order(OTHER, **of("join", session=7))
    kept.order(OTHER, **of("done", leave=True))
    assert [who.task for who in kept.record.awaited()] == ([] if own else [OTHER])
    assert kept.record.connected() == {OTHER: 7}


RECORD_TURNS = st.tuples(
    st.sampled_from([*KINDS, "another process"]),
    st.sampled_from([CHIEF] * 4 + TASKS),
    st.sampled_from([1, 1, 1, 2, 0]),
)
FIELDS: dict[str, dict[str, Any]] = {
    "join": {"session": 1},
    "finish": {
        "silence_secs": 1.0,
        "counter_name": "step",
        "saved_step": 3,
        "took_part": TASKS[:3],
    },
    "done": {"leave": True, "goodbye": True, "states": {"position": b"3"}},
}


@given(st.lists(RECORD_TURNS, max_size=25))
def test_record_holds_after_any_orders(turns: list[tuple[str, str, int]]) -> None:
    """No order lowers the epoch or the generation, and a refused order changes nothing."""
    limits = Limits(participants=3)
    kept = Kept(has_values=True, limits=limits)
    before = kept.order(**of("claim"))
    for kind, sender, epoch in turns:
        if kind == "another process":
            state = json.loads(json.dumps(kept.record.state()))
            kept.record = RunRecord(kept.changed, lambda: True, TaskEnvironment(limits=limits))
            kept.record.take_up(state)
            kept.record.validate()
            before = kept.order(**of("inspect"))
            assert kept.record.state() == state | {"saved": kept.record.saved}
            continue
        try:
            after = kept.order(sender, epoch, **of(kind, **FIELDS.get(kind, {})))
        except OpError:
            after = kept.order(**of("inspect"))
            after.silent.clear(), before.silent.clear()
            assert after == before
        assert (
            after.leadership.epoch >= before.leadership.epoch
            and after.generation >= before.generation
        )
        before = after
