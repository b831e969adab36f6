import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from runtime.errors import FailedPreconditionError
from runtime.limits import Limits
from runtime.wire.reply_cache import CallSuperseded, LaneRecord, LaneTable


class Client:
    gone = False
    heard_at = 0.0


def test_lane_answers_repeats_from_memory():
    """A repeated call is answered from memory, and a call that is not remembered runs again."""
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


def test_next_call_releases_memory():
    """The next call of a lane releases the remembered reply."""
    table: LaneTable[object] = LaneTable()
    a = Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    record.begin(a, 1)
    record.finish(object())
    record.begin(a, 2)
    assert record._kept is None


def test_old_connection_cannot_begin():
    """A connection that a newer one has superseded begins no call."""
    table: LaneTable[str] = LaneTable()
    a, b = Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    table.attach(1, 1, 2, b, 0.0)
    with pytest.raises(CallSuperseded):
        record.begin(a, 1)
    with pytest.raises(CallSuperseded):
        table.attach(1, 1, 1, a, 0.0)


def test_second_connection_awaits_running_call():
    """A second connection of a lane waits for the running call and takes its answer."""
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


def test_superseded_wait_ends():
    """A connection that waits for a running call ends when a third one supersedes it."""
    table: LaneTable[str] = LaneTable()
    a, b, c = Client(), Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    record.begin(a, 1)
    table.attach(1, 1, 2, b, 0.0)
    ended = threading.Event()

    def wait():
        with pytest.raises(CallSuperseded):
            record.begin(b, 1)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    table.attach(1, 1, 3, c, 0.0)
    assert ended.wait(60)
    thread.join(60)


def test_lanes_are_forgotten_and_expire():
    """A lane is forgotten by goodbye or after its time, and never while connected."""
    table: LaneTable[str] = LaneTable()
    owners = [Client() for _ in range(4)]
    records = [
        table.attach(client, lane, 1, owners[2 * client + lane], 0.0)[0]
        for client in (0, 1)
        for lane in (0, 1)
    ]
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


def test_late_close_spares_returned_client():
    """A connection that closes after its client's goodbye takes no lane from a newer connection."""
    table: LaneTable[str] = LaneTable()
    a, b = Client(), Client()
    record, _, _ = table.attach(1, 1, 1, a, 0.0)
    table.forget(1, None, 1.0)
    table.attach(1, 1, 2, b, 2.0)
    table.detach(1, 1, record, a, 3.0)
    assert table.connected(1)


@hypothesis.given(
    st.lists(st.sampled_from(["call", "cut before", "cut after", "stale"]), max_size=40)
)
def test_every_remembered_call_runs_once(events):
    """Every remembered call runs once, wherever the network cuts."""
    # A client that repeats a call until it is answered, on a network that cuts where it is told to.
    table: LaneTable[int] = LaneTable()
    runs: dict[int, int] = {}
    seq = attempt = 0
    owner = Client()
    record, _, _ = table.attach(1, 1, attempt, owner, 0.0)
    pending = False
    for event in events:
        if event == "stale":
            with pytest.raises(CallSuperseded):
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


_TURNS = st.tuples(
    st.sampled_from(
        ["attach", "detach", "begin", "finish", "forget", "leave", "give_up", "expire"]
    ),
    st.integers(0, 2),
    st.integers(0, 2),
)


@hypothesis.given(st.lists(_TURNS, max_size=60))
def test_lane_table_keeps_its_invariants(turns):
    """A connection that is neither closed nor superseded keeps its lane until its client leaves."""
    limits = Limits(connections=32)
    table: LaneTable[str] = LaneTable(limits)
    # By client and lane: the connection with its record. Connections whose lane was forgotten stay
    # open.
    held: dict[tuple[int, int], tuple[Client, LaneRecord[str]]] = {}
    stray: list[tuple[int, int, Client, LaneRecord[str]]] = []
    running: list[LaneRecord[str]] = []
    for now, (what, client, lane) in enumerate(turns, 1):
        key = client, lane
        owner, record = held.get(key, (None, None))
        if what == "attach":
            connection = Client()
            found, _, before = table.attach(client, lane, now, connection, now)
            assert before is owner
            held[key] = connection, found
        elif what == "detach" and stray and lane == 2:
            table.detach(stray[0][0], stray[0][1], stray[0][3], stray[0][2], now)
            del stray[0]
        elif what == "detach" and record is not None:
            table.detach(client, lane, record, owner, now)
            del held[key]
        elif what == "begin" and record is not None and record not in running:
            if record.begin(owner, max(1, record.seq + now % 2)) is None:
                running.append(record)
        elif what == "finish" and running:
            running.pop(0).finish("kept" if lane else None)
        elif what in ("forget", "leave"):
            lanes = [key] if what == "forget" else [(client, other) for other in range(3)]
            stray += [(*gone, *held.pop(gone)) for gone in lanes if gone in held]
            table.forget(client, lane if what == "forget" else None, now)
        elif what == "give_up":
            connected = {client for client, _ in held}
            assert not connected.intersection(table.give_up(now - lane))
        elif what == "expire":
            table.expire(now - 5 * lane)
        table.validate()
        for (client, lane), (owner, record) in held.items():
            assert table.connected(client) and record.owner is owner
            assert table._clients[client][lane] is record
