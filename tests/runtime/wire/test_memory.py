import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from runtime.errors import FailedPreconditionError
from runtime.wire.reply_cache import LaneTable, Superseded


class Client:
    gone = False


def test_new_lane_runs_and_is_answered_from_memory():
    table: LaneTable[str] = LaneTable()
    a = Client()
    record, known, before = table.attach(1, 1, 1, a, 0.0)
    assert not known and before is None
    assert record.begin(a, 1) is None
    record.finish("one")
    b = Client()
    again, known, before = table.attach(1, 1, 2, b, 0.0)
    assert again is record and known and before is a
    assert record.begin(b, 1) == "one"
    assert record.begin(b, 2) is None
    record.finish(None)
    assert record.begin(b, 2) is None, "a call that is not remembered runs again"
    record.finish(None)
    with pytest.raises(FailedPreconditionError, match="call 1 of this lane came after call 2"):
        record.begin(b, 1)


def test_next_call_releases_what_is_remembered():
    table: LaneTable[object] = LaneTable()
    a = Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    record.begin(a, 1)
    record.finish(object())
    record.begin(a, 2)
    assert record._kept is None


def test_old_connection_cannot_begin():
    table: LaneTable[str] = LaneTable()
    a, b = Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    table.attach(1, 1, 2, b, 0.0)
    with pytest.raises(Superseded):
        record.begin(a, 1)
    with pytest.raises(Superseded):
        table.attach(1, 1, 1, a, 0.0)


def test_second_connection_waits_for_the_running_call():
    table: LaneTable[str] = LaneTable()
    a, b = Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    record.begin(a, 1)
    table.attach(1, 1, 2, b, 0.0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(record.begin(b, 1)))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not answers
    record.finish("done")
    thread.join(60)
    assert answers == ["done"]


def test_waiting_connection_ends_when_superseded():
    table: LaneTable[str] = LaneTable()
    a, b, c = Client(), Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    record.begin(a, 1)
    table.attach(1, 1, 2, b, 0.0)
    ended = threading.Event()

    def wait():
        with pytest.raises(Superseded):
            record.begin(b, 1)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    table.attach(1, 1, 3, c, 0.0)
    assert ended.wait(60)
    thread.join(60)


def test_forget_and_expire():
    table: LaneTable[str] = LaneTable()
    owners = [Client() for _ in range(4)]
    records = [table.attach(client, lane, 1, owners[2 * client + lane], 0.0)[0] for client in (0, 1) for lane in (0, 1)]
    table.detach(0, 0, records[0], owners[0], 10.0)
    table.expire(10.0)
    assert len(table) == 4, "closed at 10, so not before 10"
    table.expire(10.1)
    assert len(table) == 3
    table.forget(1, 0, 20.0)
    assert len(table) == 2
    table.forget(1, None, 20.0)
    assert len(table) == 1
    assert table.attach(0, 1, 5, owners[0], 0.0)[1], "a connected lane does not expire"


@hypothesis.given(st.lists(st.sampled_from(["call", "cut before", "cut after", "stale"]), max_size=40))
def test_every_remembered_call_runs_once(events):
    # A client that repeats a call until it is answered, on a network that cuts where it is told to.
    table: LaneTable[int] = LaneTable()
    runs: dict[int, int] = {}
    seq = attempt = 0
    owner = Client()
    record, _, _ = table.attach(1, 1, attempt, owner, 0.0)
    pending = False
    for event in events:
        if event == "stale":
            with pytest.raises(Superseded):
                table.attach(1, 1, attempt, Client(), 0.0)
            continue
        if not pending:
            seq += 1
        pending = True
        if event != "cut before":
            kept = record.begin(owner, seq)
            if kept is None:
                runs[seq] = runs.get(seq, 0) + 1
                record.finish(seq)
            else:
                assert kept == seq
            pending = event != "call"
        if pending:
            attempt += 1
            owner = Client()
            record, known, _ = table.attach(1, 1, attempt, owner, 0.0)
            assert known
    assert all(count == 1 for count in runs.values())
