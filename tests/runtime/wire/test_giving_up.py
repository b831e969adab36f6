"""A call that may wait is given up in a way that loses no answer.

One that waits says so, and outlives cuts.
"""

import logging
import threading
import time
from typing import Any

import pytest

from runtime import timeouts
from runtime.errors import CancelledError, DeadlineExceededError, UnavailableError
from runtime.trust.certificates import Certificates
from runtime.wire import times
from runtime.wire.connection import Reply, call_memory, caller_is_gone
from runtime.wire.dial import ChannelOptions
from tests.kit.certificates import make
from tests.kit.waits import until
from tests.runtime.wire import kit
from tests.runtime.wire.kit import ServerProcess, make_peer, number
from tests.runtime.wire.test_channel import Pair
from tests.runtime.wire.test_failures import QUICK, Caller

pytestmark = pytest.mark.usefixtures("no_open_ends")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(make(tmp_path_factory.mktemp("certificates") / "here"))


@pytest.fixture(params=["tcp", "unix", "tls"])
def pair(no_open_ends, request, certificates):
    pair = Pair(request.param, certificates)
    yield pair
    pair.close()


@pytest.fixture
def patient(set_times):
    """A busy machine may take longer for an answer than users would wait for the last one."""
    set_times(timeouts, LAST_WORD_SECS=60.0)


def test_late_answer_arrives_after_deadline(pair, patient):
    """A waiting call returns the answer that the task sends when the deadline makes the client hang
    up.
    """
    lane = pair.peer.acquire()  # BLOCK answers when it is told that the client has hung up
    assert lane.call(kit.BLOCK, 1, [], kit.NUMBER, deadline=time.monotonic() + 0.1, waits=True) == [
        1
    ]
    assert not lane.usable
    pair.peer.release(lane)
    until(lambda: pair.server.counters.lanes <= 1)  # the heartbeat's: this one was taken leave of


def test_wait_without_answer_ends_with_deadline(pair):
    """A waiting call without an answer ends with DeadlineExceededError."""

    def wait() -> Reply:
        assert pair.desk.release.wait(100)
        raise CancelledError("the caller hung up")

    pair.desk.reply = wait
    lane = pair.peer.acquire()
    with pytest.raises(DeadlineExceededError, match="deadline") as caught:
        lane.call(kit.BLOCK, 1, [], kit.NUMBER, deadline=time.monotonic() + 0.1, waits=True)
    assert caught.value.task == kit.TASK
    pair.peer.release(lane)


def test_silent_task_is_given_up_soon(pair, set_times):
    """A client waits LAST_WORD_SECS for the last word of a task, and then ends the call."""
    set_times(timeouts, LAST_WORD_SECS=0.1)
    pair.desk.disconnected = lambda client, lane: None
    lane = pair.peer.acquire()
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        lane.call(kit.BLOCK, 1, [], kit.NUMBER, deadline=began + 0.1, waits=True)
    assert 0.1 + timeouts.LAST_WORD_SECS <= time.monotonic() - began
    pair.desk.release.set()
    pair.peer.release(lane)


@pytest.mark.parametrize("answers", ["at once", "late", "never"])
def test_cancelled_wait_takes_last_word(pair, often, patient, answers, set_times):
    """A cancelled wait returns the task's last word if one comes within LAST_WORD_SECS."""
    if answers == "late":  # many ticks later
        late = threading.Timer(0.3, pair.desk.release.set)
        pair.desk.disconnected = lambda client, lane: late.start()
    elif answers == "never":
        set_times(timeouts, LAST_WORD_SECS=0.1)
        pair.desk.disconnected = lambda client, lane: None
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [], waits=True)
    assert pair.desk.blocked.acquire(timeout=60)
    caller = Caller(lane)
    lane.cancel()
    caller.join(60)
    if answers != "never":
        assert caller.result == [1]
    else:
        assert type(caller.error) is CancelledError
    assert not lane.usable
    pair.desk.release.set()
    pair.peer.release(lane)


def test_call_memory_lasts_until_the_answer(pair):
    """A call's notes are there when the call is repeated and gone when the call is answered."""
    seen: list[list[int]] = []
    told = threading.Event()
    pair.desk.disconnected = lambda client, lane: told.set()

    def run() -> Reply:
        memory = call_memory()
        seen.append(list(memory.get("runs", ())))
        memory.setdefault("runs", []).append(len(seen))
        pair.desk.blocked.release()
        if len(seen) < 3:
            while not caller_is_gone():  # it may be told once more of the connection before
                assert told.wait(100)
                told.clear()
            raise CancelledError("the caller hung up")
        return Reply([number(len(seen))])

    pair.desk.reply = run
    lane = pair.peer.acquire()
    lane.send(kit.SUM, 1, [], waits=True)
    caller = Caller(lane)
    for _ in range(2):
        assert pair.desk.blocked.acquire(timeout=60)
        lane.link.interrupt()
    caller.join(100)
    assert caller.error is None and caller.result == [3]
    assert seen == [[], [1], [1, 2]]
    assert lane.call(kit.SUM, 2, [], kit.NUMBER) == [4]
    assert seen[-1] == []
    pair.peer.release(lane)


def _cut_while_it_waits(pair: Any, times: int) -> Caller:
    """Cuts the connection of a call that waits so often, each time when it has just been made again."""
    pair.desk.disconnected = lambda client, lane: None
    lane = pair.peer.acquire()
    lane.send(kit.BLOCK, 1, [])
    assert pair.desk.blocked.acquire(timeout=60)
    caller = Caller(lane)
    for _ in range(times):
        before = lane.link.connected_at
        lane.link.interrupt()
        while lane.link.connected_at == before and caller.is_alive():
            threading.Event().wait(0.001)
    return caller


@pytest.fixture
def hasty(set_times):
    set_times(timeouts, LAST_BACKOFF_SECS=0.001)


def test_waiting_call_survives_any_cuts(pair, hasty, set_times):
    """A call that waits survives 40 cuts if each connection held for a while."""
    set_times(times, STEADY_SECS=0.0)
    caller = _cut_while_it_waits(pair, 40)
    pair.desk.release.set()
    caller.join(100)
    assert caller.error is None and caller.result == [1]
    pair.peer.release(caller.lane)


def test_breaking_connection_is_given_up(pair, hasty, set_times):
    """A connection that breaks 33 times in a row as soon as it is made is given up."""
    set_times(times, STEADY_SECS=1e9)
    caller = _cut_while_it_waits(pair, 40)
    caller.join(100)
    assert type(caller.error) is UnavailableError and "33 times in a row" in str(caller.error)
    pair.desk.release.set()
    pair.peer.release(caller.lane)


def _lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_waiting_call_logs_again(pair, often, set_times, caplog):
    """A call that waits logs its wait again and again."""
    set_times(timeouts, LOG_EVERY_SECS=0.1)
    lane = pair.peer.acquire()
    with caplog.at_level(logging.INFO):
        lane.send(kit.BLOCK, 1, [])
        caller = Caller(lane)
        until(lambda: _lines(caplog, f"Waiting for {kit.TASK} at") >= 3)
        pair.desk.release.set()
        caller.join(100)
    assert caller.result == [1]
    pair.peer.release(lane)


@pytest.mark.cluster
def test_waiting_for_frozen_task_logs_again(no_open_ends, set_times, caplog):
    """A call that waits for a frozen task logs again and again that the task is not reached."""
    set_times(timeouts, LOG_EVERY_SECS=0.7)
    other = ServerProcess()
    peer = make_peer(other.resolve, options=ChannelOptions(reconnect_secs=60.0, **QUICK))
    lane = peer.acquire()
    try:
        with caplog.at_level(logging.INFO):
            other.freeze()
            lane.send(kit.SUM, 1, [])
            caller = Caller(lane)
            until(lambda: _lines(caplog, "to be reached") >= 3)
    finally:
        other.close()
    caller.join(100)
    peer.release(lane)
    peer.close()


def test_call_sent_during_cancel_keeps_answer(pair, patient):
    """A call that is sent during its cancellation returns the task's answer."""
    lane = pair.peer.acquire()

    class SentMeanwhile(threading.Event):
        def set(self) -> None:
            lane.send(kit.BLOCK, 1, [], deadline=time.monotonic() + 60, waits=True)
            until(lambda: pair.server.counters.calls > calls)
            super().set()

    calls = pair.server.counters.calls
    lane.link.cancelled = SentMeanwhile()
    lane.cancel()
    # BLOCK answers when it is told that the client has hung up.
    assert lane.receive(kit.NUMBER) == [1]
    pair.peer.release(lane)
